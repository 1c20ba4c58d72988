import numpy as np
import pytest
import torch

from metaphrase.aligners.embedding import EmbeddingAligner
from metaphrase.corpus.parallel import ParallelSet
from metaphrase.corpus.words import Words
from metaphrase.evaluation.diagnosis import hubs_of
from metaphrase.evaluation.geometry import hubs
from metaphrase.mining.search import unit_rows
from metaphrase.publishing import analysis
from tests.publishing.reports import found


def test_maps_keep_clusters_apart_and_are_repeatable():
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.normal(size=(20, 8)) * 0.05 + centre for centre in np.eye(8)[:2]]).astype(np.float32)
    found = analysis.token_map(rows, ["sw"] * 20 + ["en"] * 20)
    assert found == analysis.token_map(rows, ["sw"] * 20 + ["en"] * 20)
    assert found["own_language"] == 100
    assert 0.9 < found["explained"][0] < 1
    for points in (np.array(found["pca"]), np.array(found["tsne"])):
        distance = np.linalg.norm(points[:, None] - points[None], axis=-1) + np.diag([np.inf] * 40)
        assert (distance.argmin(axis=1) // 20 == np.arange(40) // 20).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_words_of_a_collapsed_encoder_have_a_map():
    found = analysis.token_map(np.ones((40, 8), dtype=np.float32), ["sw", "en"] * 20)
    assert (found["pca"], found["explained"]) == ([[0.0, 0.0]] * 40, [0.0, 0.0])
    assert np.isfinite(found["tsne"]).all()


def test_own_language_share_equals_a_loop():
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(30, 5)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    languages = rng.choice(["sw", "en", "te"], 30).tolist()
    own = []
    for i in range(30):
        nearest = sorted((j for j in range(30) if j != i), key=lambda j, i=i: -float(rows[i] @ rows[j]))[:10]
        own += [languages[j] == languages[i] for j in nearest]
    assert 0 < sum(own) < len(own)
    assert analysis.own_language_share(rows, languages) == pytest.approx(100 * np.mean(own))


def test_expected_share_is_the_mean_over_pairs_of_words():
    languages = ["sw"] * 3 + ["en"] * 5
    same = [languages[i] == languages[j] for i in range(8) for j in range(8) if i != j]
    assert analysis.expected_share(languages) == pytest.approx(100 * np.mean(same))


def test_word_states_are_means_over_pieces(tiny_encoder):
    texts = ["der Hund schläft", "die Katze trinkt Milch"]
    found = analysis.word_states(tiny_encoder, [Words.of(text) for text in texts])
    for text, (at, states) in zip(texts, found, strict=True):
        assert at == list(range(len(text.split())))
        encoded = tiny_encoder.tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            hidden = tiny_encoder[0].auto_model(**encoded, output_hidden_states=True).hidden_states
        hidden = hidden[-1][0].numpy()
        word_of = encoded.encodings[0].word_ids
        for word, state in zip(at, states, strict=True):
            pieces = [piece for piece, owner in enumerate(word_of) if owner == word]
            np.testing.assert_allclose(state, hidden[pieces].mean(axis=0), atol=1e-5)
    assert len(tiny_encoder[0].auto_model.encoder.layer) == 2  # as it was


def test_words_behind_the_length_limit_have_no_state(tiny_encoder):
    tiny_encoder.max_seq_length = 4
    ((at, states),) = analysis.word_states(tiny_encoder, [Words.of("der Hund schläft gut heute")])
    assert len(at) == len(states) < 5


def test_sampled_words_have_letters_and_differ():
    sets = {
        "sw": ParallelSet("sw", ("mbwa 12 mbwa", "paka - Mbwa", "simba"), ("dog 12 dog", "cat - dog", "lion")),
        "fi": ParallelSet("fi", ("koira", "kissa"), ("dog", "cat")),
    }
    sample = analysis.sample_words(sets, limit=2)
    spelled = [(language, list(words)[at]) for language, words, chosen in sample for at in chosen]
    assert spelled == [("sw", "mbwa"), ("sw", "paka"), ("fi", "koira"), ("fi", "kissa"), ("en", "dog"), ("en", "cat")]


def test_pairs_to_align():
    sets = {
        "sw": ParallelSet("sw", ("moja", "hii ni nyumba yangu"), ("one", "this is my house")),
        "te": ParallelSet("te", ("moja",), ("one",)),
    }
    assert [(language, number) for language, number, _ in analysis.choose_pairs(sets)] == [("sw", 2)]
    ((_, _, (source, target)),) = analysis.choose_pairs(sets, ["te:1"])
    assert (list(source), list(target)) == (["moja"], ["one"])
    for wrong in ("te:2", "te:0", "te", "xx:1", "te:-1"):
        with pytest.raises(ValueError, match="language:number, such as sw:1"):
            analysis.choose_pairs(sets, [wrong])


def test_alignment_matrix_is_the_aligners(tiny_encoder):
    pair = Words.of("der Hund trinkt Wasser"), Words.of("the dog drinks water")
    matrix = analysis.alignment_matrix(tiny_encoder, tiny_encoder, pair)
    assert (matrix["source"], matrix["target"]) == (list(pair[0]), list(pair[1]))
    (alignment,) = EmbeddingAligner(tiny_encoder, level="word").align([pair])
    assert matrix["links"] == [list(link) for link in alignment.links]
    scores = {link: 2 * score - 1 for link, score in zip(alignment.links, alignment.scores, strict=True)}
    assert scores
    for (s, t), cosine in scores.items():
        assert matrix["cosine"][s][t] == pytest.approx(cosine, abs=1e-3)


def vectors(n=12, seed=0):
    rng = np.random.default_rng(seed)
    source, noise = rng.normal(size=(n, 6)) + 1, rng.normal(size=(n, 6))
    return source, source + 0.7 * noise


def parallel(n=12, language="sw"):
    return ParallelSet(
        language, tuple(f"{language} {i}" for i in range(n)), tuple(f"{language}'s {i}" for i in range(n))
    )


def test_margins_equal_a_loop():
    source, target = vectors()
    found = analysis.margins(source, target, parallel())
    cosine = [
        [float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) for b in target.astype(np.float64)] for a in source
    ]
    n = len(source)
    forward = [np.mean(sorted(row)[-4:]) for row in cosine]
    backward = [np.mean(sorted(cosine[i][j] for i in range(n))[-4:]) for j in range(n)]

    def margin(i, j):
        return cosine[i][j] / ((forward[i] + backward[j]) / 2)

    np.testing.assert_allclose(found[0], [margin(i, i) for i in range(n)], rtol=1e-5)
    near = [sorted(range(n), key=lambda j, i=i: -cosine[i][j])[:4] for i in range(n)]
    best = [max(margin(i, j) for j in near[i] if j != i) for i in range(n)]
    np.testing.assert_allclose(found[1], best, rtol=1e-5)


def test_a_copy_of_the_translation_is_no_rival():
    source, target = vectors(3)
    source[1], target[1] = source[0], target[0]
    data = ParallelSet("sw", ("a", "a", "c"), ("A", "A", "C"))
    pair_n, other_n = analysis.margins(source, target, data)
    assert len(pair_n) == 3
    assert (other_n[:2] < pair_n[:2]).all()  # the third sentence, not the copy, which has the same margin
    copies = analysis.margins(source[:2], target[:2], ParallelSet("sw", ("a", "a"), ("A", "A")))
    assert np.isneginf(copies[1]).all()
    assert analysis.margin_histogram({"after": copies}) == {}


def test_both_sides_of_a_histogram_have_the_same_sources():
    before = np.array([1.1, 1.2, 1.3]), np.array([-np.inf, 1.0, 1.4])
    after = np.array([1.1, 1.2, 1.3]), np.array([1.0, 1.0, 1.4])
    histogram = analysis.margin_histogram({"before": before, "after": after})
    assert histogram["n"] == sum(histogram["before"]["others"]) == sum(histogram["after"]["others"]) == 2
    assert histogram["after"]["overlap"] == 50


def test_geometry_counts_copies_of_a_target_as_one_hub():
    """Half of the targets are one text; searched once each, its copies would fill the neighbours of every source."""
    source, target = vectors(24)
    target[::2] = target[0]
    data = ParallelSet("sw", tuple(map(str, range(24))), tuple("hub" if at % 2 == 0 else str(at) for at in range(24)))
    facts = analysis.geometry_of({"sw": {"after": (source, target)}}, {"sw": data})["after"]
    sides = unit_rows(source), unit_rows(target)
    (worst, *_), hubness = (hubs_of(data, sides)[key] for key in ("hubs", "hubness"))
    assert (facts["hub"], facts["hub_count"], facts["hubness"]) == (worst["text"], worst["count"], hubness)
    assert facts["hubness"] != hubs(*sides).skewness


def test_structure_is_that_of_the_sources():
    source, target = vectors(24)
    data = ParallelSet("sw", tuple(map(str, range(24))), tuple(map(str, range(24))))
    kept = {"before": (source, target), "after": (source, -target[::-1] + 1)}
    lost = {"before": (source, target), "after": (target, target)}
    kept, lost = (analysis.geometry_of({"sw": one}, {"sw": data})["after"]["structure"] for one in (kept, lost))
    assert kept == pytest.approx(100)
    assert lost < 90


SCALES = {"before": 0.02, "after": 0.3}


def test_histogram_counts_every_pair_once():
    before = np.linspace(0.8, 1.2, 50), np.linspace(0.7, 1.19, 50)
    after = np.linspace(1.0, 1.5, 50), np.linspace(0.7, 1.1, 50)[::-1]
    histogram = analysis.margin_histogram({"before": before, "after": after})
    assert histogram["n"] == 50
    for side, (pair_n, other_n) in (("before", before), ("after", after)):
        assert sum(histogram[side]["translations"]) == sum(histogram[side]["others"]) == 50
        assert histogram[side]["overlap"] == pytest.approx(100 * np.mean(other_n >= pair_n))
        assert histogram[side]["translation_median"] == pytest.approx(np.median(pair_n))
    assert 0 < histogram["after"]["overlap"] < 100
    for side, (pair_n, _) in (("before", before), ("after", after)):
        edges = np.array(histogram[side]["edges"])
        inner = (pair_n > edges[35]) & (pair_n < edges[36])
        assert histogram[side]["translations"][35] == inner.sum() > 0


def test_a_narrow_side_has_bars_of_its_own():
    """Training can spread margins tenfold: neither side is then a few bars in the bins of the other."""
    rng = np.random.default_rng(0)
    histogram = analysis.margin_histogram(
        {side: (rng.normal(1 + scale, scale, 500), rng.normal(1, scale, 500)) for side, scale in SCALES.items()}
    )
    for side in SCALES:
        assert np.count_nonzero(histogram[side]["translations"]) > 20


def test_errors_to_read():
    sets = {"sw": ParallelSet("sw", ("a", "b", "c", "d"), ("A", "B", "C", "A"))}
    sides = {"before": found([1, 1, 0, 0]), "after": found([0, 2, 0, 0], right=0.6)}
    sides["after"]["cosine"] = np.array([0.6, 0.7, 0.8, 0.9])
    errors = analysis.nearest_errors(sets, {"sw": sides})
    assert errors["counts"] == {"wrong": 2, "fixed": 1, "broken": 1}  # of the fourth another copy is found: no error
    assert errors["pairs"] == 4
    assert [row["source"] for row in errors["wrong"]] == ["c", "b"]  # the wider gap first
    assert errors["fixed"] == [
        {
            "language": "sw",
            "number": 1,
            "source": "a",
            "right": "A",
            "before": {"found": "B", "found_cosine": 0.9, "right_cosine": 0.5},
            "after": {"found": "A", "found_cosine": 0.6, "right_cosine": 0.6},
        }
    ]
    assert [row["source"] for row in errors["broken"]] == ["b"]


def test_every_language_has_its_share_of_the_errors():
    sets = {language: parallel(9, language) for language in ("sw", "te", "vi")}
    errors = analysis.nearest_errors(sets, {x: {"after": found(np.roll(np.arange(9), 1))} for x in sets}, limit=6)
    assert [row["language"] for row in errors["wrong"]] == ["sw", "sw", "te", "te", "vi", "vi"]
    assert errors["counts"] == {"wrong": 27}
    assert "fixed" not in errors


def test_a_share_that_a_language_leaves_goes_to_the_others():
    sets = {language: parallel(9, language) for language in ("sw", "te", "vi")}
    wrong = {x: {"after": found(np.roll(np.arange(9), 1))} for x in sets}
    wrong["sw"]["after"]["row"][1:] = np.arange(1, 9)
    for limit, shares in (
        (6, "sw te te te vi vi"),
        (17, "sw" + " te" * 8 + " vi" * 8),
        (99, "sw" + " te" * 9 + " vi" * 9),
    ):
        errors = analysis.nearest_errors(sets, wrong, limit=limit)
        assert [row["language"] for row in errors["wrong"]] == shares.split()


def test_nearest_targets():
    source, target = vectors()
    one = analysis.nearest_targets(source, target)
    unit = [side / np.linalg.norm(side, axis=1, keepdims=True) for side in (source, target)]
    cosine = unit[0] @ unit[1].T
    assert (one["row"] != np.arange(12)).any()
    np.testing.assert_array_equal(one["row"], cosine.argmax(axis=1))
    np.testing.assert_allclose(one["cosine"], cosine.max(axis=1), rtol=1e-5)
    np.testing.assert_allclose(one["right"], np.diag(cosine), rtol=1e-5)


def test_another_translation_of_the_same_source_is_no_rival():
    source, target = vectors()
    source[1] = source[0]
    target[1] = source[0]
    distinct = parallel()
    shared = ParallelSet("sw", (distinct.sources[1], *distinct.sources[1:]), distinct.targets)
    rivals = [analysis.margins(source, target, data)[1][0] for data in (shared, distinct)]
    assert rivals[0] < rivals[1]


def test_a_wrong_target_with_the_same_margin_counts_as_a_confusion():
    """In a collapsed encoder, every target has the margin of the translation."""
    histogram = analysis.margin_histogram({"after": (np.ones(4), np.array([0.5, 1.0, 1.0, 1.0]))})
    assert histogram["after"]["overlap"] == 75


def test_errors_that_are_fixed_are_ordered_by_the_gap_before():
    sets = {"sw": ParallelSet("sw", ("a", "b"), ("A", "B"))}
    before, after = found([1, 0]), found([0, 1])
    before["cosine"], after["cosine"] = np.array([0.6, 0.9]), np.array([0.9, 0.6])
    errors = analysis.nearest_errors(sets, {"sw": {"before": before, "after": after}})
    assert [row["source"] for row in errors["fixed"]] == ["b", "a"]
