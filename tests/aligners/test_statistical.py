import json
import random
import subprocess
import sys

import pytest

from metaphrase.aligners import ALIGNERS, STATISTICAL
from metaphrase.aligners.statistical import FILE, HEURISTICS, MODELS, StatisticalAligner, word_form
from metaphrase.corpus.words import Words
from metaphrase.exceptions import ModelFileError, UsageError
from metaphrase.io.environment import install_command
from tests.aligners.joined import join_words


def ciphered(n, seed=0, crossing=False):
    """Pairs whose target is the source in another alphabet, and their links; crossing turns the last two words round."""
    rng = random.Random(seed)
    pairs, links = [], []
    for _ in range(n):
        numbers = rng.sample(range(20), rng.randint(3, 7))
        order = list(range(len(numbers)))
        if crossing:
            order[-2:] = order[:-3:-1]
        pairs.append((join_words([f"s{k}" for k in numbers]), join_words([f"t{numbers[i]}" for i in order])))
        links.append(sorted((i, j) for j, i in enumerate(order)))
    return pairs, links


@pytest.fixture(scope="module")
def fast_align():
    return StatisticalAligner().train(ciphered(200)[0])


@pytest.mark.parametrize("model", STATISTICAL)
def test_every_model_breaks_the_cipher(model):
    aligner = ALIGNERS[model](iterations=3).train(ciphered(150, crossing=True)[0])
    unseen, links = ciphered(20, seed=1, crossing=True)
    found = aligner.align(unseen)
    right = sum(len(set(f.links) & set(gold)) for f, gold in zip(found, links, strict=True))
    assert right >= 0.85 * sum(map(len, links))
    assert right >= 0.85 * sum(len(f.links) for f in found)


def test_the_table_of_aligners_has_every_model():
    assert sorted(STATISTICAL) == sorted(MODELS)
    assert list(ALIGNERS) == [*STATISTICAL, "embedding", "span"]


def test_scores_are_surer_for_right_links(fast_align):
    pair = join_words(["s1", "s2"]), join_words(["t1", "t3"])
    (found,) = fast_align.align([pair])
    scores = dict(zip(found.links, found.scores, strict=True))
    assert 0.5 < scores[0, 0] <= 1
    assert all(0 <= score < 0.1 for link, score in scores.items() if link != (0, 0))
    assert list(found.links) == sorted(found.links)


def test_a_score_is_the_geometric_mean_of_both_directions():
    ambiguous = [(join_words(["s4", f"s{k}"]), join_words(["other", f"t{k}"])) for k in range(5, 15)]
    aligner = StatisticalAligner("ibm1").train([*ciphered(200)[0], *ambiguous])
    direct, inverse = aligner._models
    forth = direct.translation_prob(direct.get_src_word_index("s4"), direct.get_trg_word_index("t4"))
    back = inverse.translation_prob(inverse.get_src_word_index("t4"), inverse.get_trg_word_index("s4"))
    assert back - forth > 0.01
    (found,) = aligner.align([(join_words(["s4", "s9"]), join_words(["t4", "t9"]))])
    assert found.links[0] == (0, 0)
    assert found.scores[0] == pytest.approx((forth * back) ** 0.5)


@pytest.mark.parametrize("heuristic", HEURISTICS)
def test_heuristics_lie_between_intersection_and_union(fast_align, heuristic, monkeypatch):
    rng = random.Random(0)
    words = [[f"{side}{rng.randrange(22)}" for _ in range(rng.randint(1, 8))] for _ in range(60) for side in "st"]
    pairs = [(join_words(s), join_words(t)) for s, t in zip(words[::2], words[1::2], strict=True)]

    def links(name):
        monkeypatch.setattr(fast_align, "heuristic", name)
        return [set(found.links) for found in fast_align.align(pairs)]

    chosen, union, intersection = links(heuristic), links("union"), links("intersection")
    assert union != intersection
    assert all(a <= b <= c for a, b, c in zip(intersection, chosen, union, strict=True))
    for found in intersection:
        assert len({i for i, _ in found}) == len({j for _, j in found}) == len(found)
    if heuristic == "none":
        assert all(len({j for _, j in found}) == len(found) for found in chosen)


def test_a_heuristic_may_have_underscores():
    assert StatisticalAligner(heuristic="grow_diag_final_and").heuristic == "grow-diag-final-and"


def test_unseen_words_empty_sides_and_reserved_words_do_not_crash(fast_align):
    pairs = [
        (join_words(["new", "s1"]), join_words(["neu", "t1"])),
        (Words.of(""), join_words(["t1"])),
        (join_words(["s1"]), Words.of(" ")),
        (join_words(["NULL", "s1"]), join_words(["t1", "<UNUSED_WORD>"])),
    ]
    found = fast_align.align(pairs)
    assert (1, 1) in found[0].links
    assert found[1].links == found[2].links == ()
    assert found[1].pharaoh == found[1].score_text == ""
    assert (1, 0) in found[3].links
    assert fast_align.align([]) == []


def test_reserved_words_are_words():
    pairs = [
        (join_words([s, f"s{k % 7}"]), join_words([t, f"t{k % 7}"])) for k in range(40) for s, t in [("NULL", "T")]
    ]
    aligner = StatisticalAligner(lowercase=False).train(pairs)
    assert aligner.align(pairs[:1])[0].links == ((0, 0), (1, 1))


@pytest.mark.parametrize(("model", "most"), [("fast_align", 1024), ("hmm", 200)])
def test_too_long_pairs_are_skipped_and_counted(model, most):
    pairs, links = ciphered(60)
    long = join_words(["s1"] * (most + 1)), join_words(["t1"])
    aligner = StatisticalAligner(model).train([*pairs, long, long[::-1], (Words.of(""), long[1])])
    assert aligner.max_words == most
    assert (aligner.trained_pairs, aligner.skipped_pairs) == (60, 3)
    found = aligner.align([long, pairs[0], (join_words(["s1"] * most), long[1])])
    assert found[0].links == ()
    assert list(found[1].links) == links[0]
    assert found[2].links


def test_case_and_punctuation_do_not_split_counts():
    pairs, _ = ciphered(100)
    odd = [(Words.of(source.text.upper() + "."), Words.of(f"“{target.text}”!")) for source, target in pairs]
    assert StatisticalAligner().train(odd).align(odd) == StatisticalAligner().train(pairs).align(pairs)
    exact = StatisticalAligner(lowercase=False, strip_punctuation=False).train(pairs)
    (found,) = exact.align([(Words.of("S1."), Words.of("t1"))])
    assert all(score < 1e-3 for score in found.scores)


@pytest.mark.parametrize(
    ("word", "form"), [("क्यों?", "क्यों"), ("(मैं)", "मैं"), ("--", "--"), ("$5", "$5"), ("a.b.", "a.b"), ("NULL", "null")]
)
def test_word_forms(word, form):
    assert word_form(word) == form


def test_training_is_repeatable_and_forgets(fast_align):
    again = StatisticalAligner().train(ciphered(50, seed=5)[0])
    pairs = ciphered(200)[0]
    assert again.train(iter(pairs)).align(pairs) == fast_align.align(pairs)


@pytest.mark.parametrize("model", STATISTICAL)
def test_saved_and_loaded(tmp_path, model):
    pairs, _ = ciphered(60)
    unseen, _ = ciphered(20, seed=3)
    odd = Words.of("#1 \u200b ||| %s ' x"), Words.of("é 😀 \\ : y")
    aligner = StatisticalAligner(model, heuristic="union", iterations=2).train([*pairs, odd])
    aligner.save(tmp_path / "a model")
    loaded = StatisticalAligner.load(tmp_path / "a model")
    assert (
        loaded.settings
        == aligner.settings
        == {"model": model, "heuristic": "union", "lowercase": True, "strip_punctuation": True, "iterations": 2}
    )
    assert loaded.align([*unseen, odd]) == aligner.align([*unseen, odd])
    assert (loaded.trained_pairs, loaded.training_seconds) == (61, aligner.training_seconds)
    assert StatisticalAligner.load(tmp_path / "a model", heuristic="och").heuristic == "och"


def test_saving_replaces_another_model(tmp_path):
    pairs, _ = ciphered(30)
    StatisticalAligner("ibm4", iterations=1).train(pairs).save(tmp_path)
    aligner = StatisticalAligner("ibm1", iterations=1).train(pairs)
    aligner.save(tmp_path)
    assert StatisticalAligner.load(tmp_path).align(pairs) == aligner.align(pairs)
    assert not list(tmp_path.glob("*fert*"))


def test_damaged_and_foreign_folders_are_refused(tmp_path, fast_align):
    with pytest.raises(ValueError, match=f"holds no statistical aligner: {FILE} is missing"):
        StatisticalAligner.load(tmp_path)
    fast_align.save(tmp_path / "a")
    victim = max((tmp_path / "a").glob("direct.*"), key=lambda path: path.stat().st_size)
    content = victim.read_bytes()
    for damage in (content[: len(content) // 2], b""):
        victim.write_bytes(damage)
        with pytest.raises(ValueError, match="is damaged"):
            StatisticalAligner.load(tmp_path / "a")
    victim.unlink()
    with pytest.raises(ValueError, match="is damaged"):
        StatisticalAligner.load(tmp_path / "a")
    facts = json.loads((tmp_path / "a" / FILE).read_text())
    damages: list[dict[str, object]] = [{key: None} for key in facts if key != "format"]
    damages += [{"settings": facts["settings"] | change} for change in ({"model": 1}, {"heuristic": 2}, {"x": 3})]
    for change in damages:
        (tmp_path / "a" / FILE).write_text(json.dumps(facts | change))
        with pytest.raises(ModelFileError, match=r"aligner.json is damaged, or is another kind of file \("):
            StatisticalAligner.load(tmp_path / "a")
    (tmp_path / FILE).write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ValueError, match="is another kind of file"):
        StatisticalAligner.load(tmp_path)
    (tmp_path / FILE).write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        StatisticalAligner.load(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "ibm5"}, "Unknown statistical aligner 'ibm5'"),
        ({"heuristic": "grow-final"}, "Unknown heuristic 'grow-final'"),
    ],
)
def test_unknown_names_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        StatisticalAligner(**arguments)


def test_an_aligner_that_learned_nothing_says_so(tmp_path):
    with pytest.raises(ValueError, match="Cannot train an aligner"):
        StatisticalAligner().train([(Words.of(""), Words.of("a"))])
    with pytest.raises(ValueError, match="call `train`"):
        StatisticalAligner().align([])
    with pytest.raises(ValueError, match="call `train`"):
        StatisticalAligner().save(tmp_path)


def test_progress_goes_to_stderr(capsys):
    StatisticalAligner().train(ciphered(5)[0], show_progress=True)
    assert capsys.readouterr().out == ""


def test_the_bitext_is_aligned_as_by_hand(bitext):
    pairs = [(Words.of(row["source"], "de"), Words.of(row["target"], "en")) for row in bitext]
    found = StatisticalAligner(heuristic="intersection").train(pairs).align(pairs)
    gold = [set(row["alignment"].split()) for row in bitext]
    links = [set(alignment.pharaoh.split()) for alignment in found]
    right = sum(len(a & b) for a, b in zip(gold, links, strict=True))
    assert right / sum(map(len, links)) > 0.9
    assert right / sum(map(len, gold)) > 0.8


@pytest.mark.slow
def test_the_extra_is_named_where_it_is_missing():
    code = (
        "import sys; sys.modules['thot'] = sys.modules['thot.alignment'] = None\n"
        "from metaphrase.aligners import ALIGNERS\n"
        "print('torch' in sys.modules)\n"
        "try:\n    ALIGNERS['hmm']()\nexcept ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False", f"Statistical aligners require sil-thot: {install_command('align')}."]


def test_texts_that_are_not_divided_into_words_are_refused():
    pairs = [("der Hund", "the dog"), ("die Katze", "the cat")]
    with pytest.raises(UsageError, match=r"reads pairs of Words, but got the text 'der Hund'. Pass Words.of\(text\)"):
        StatisticalAligner().train(pairs)
    trained = StatisticalAligner().train([tuple(map(Words.of, pair)) for pair in pairs])
    with pytest.raises(UsageError, match="reads pairs of Words"):
        trained.align(pairs)


@pytest.mark.parametrize(("setting", "word"), [("lowercase", "S1"), ("strip_punctuation", "s1.")])
def test_each_normalisation_can_be_disabled(setting, word):
    """A word in another form is then another word."""
    scores = []
    for enabled in (True, False):
        aligner = StatisticalAligner(**{setting: enabled}).train(ciphered(100)[0])
        (found,) = aligner.align([(Words.of(word), Words.of("t1"))])
        scores.append(max(found.scores, default=0.0))
    assert scores[0] > 0.5
    assert scores[1] < 1e-3


def test_more_iterations_learn_more():
    pairs, _ = ciphered(60)
    scores = []
    for iterations in (1, 5, 8):
        (found,) = StatisticalAligner("ibm1", iterations=iterations).train(pairs).align(pairs[:1])
        scores.append(found.scores[0])
    assert scores == sorted(set(scores))


def test_a_second_training_counts_its_own_pairs():
    aligner = StatisticalAligner("ibm1", iterations=1)
    aligner.train([*ciphered(30)[0], (Words.of(""), Words.of("a"))])
    assert (aligner.trained_pairs, aligner.skipped_pairs) == (30, 1)
    aligner.train(ciphered(20)[0])
    assert (aligner.trained_pairs, aligner.skipped_pairs) == (20, 0)
