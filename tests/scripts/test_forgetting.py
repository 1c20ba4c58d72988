import gzip
import json
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from metaphrase.encoders.loading import load_encoder
from metaphrase.evaluation.similarity_structure import similarity_structure
from metaphrase.exceptions import UsageError
from metaphrase.training.demo import demo_settings
from metaphrase.training.recipe import Recipe

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def mlqa(tmp_path):
    """Two questions in four languages, and one that is missing in a language."""
    for language in ("ar", "de", "en", "zh"):
        context = f"The first sentence in {language}. The second sentence in {language}! A third one in {language}?"
        questions = [("a", "first", 3), ("b", "second", 35)] + ([("c", "third", 60)] if language != "zh" else [])
        rows = [
            {"id": id_, "question": f"{ask} {language}", "answers": [{"answer_start": at}]}
            for id_, ask, at in questions
        ]
        content = {"data": [{"paragraphs": [{"context": context, "qas": rows}]}]}
        (tmp_path / f"dev-{language}.json.gz").write_bytes(gzip.compress(json.dumps(content).encode()))
    return tmp_path


def test_questions_in_four_languages_share_one_pool(script, mlqa):
    answers = script.Answers.read(mlqa, 2)
    assert [question for question, _, _ in answers.questions] == [
        f"{ask} {language}" for ask in ("first", "second") for language in ("ar", "de", "en", "zh")
    ]
    assert len(answers.candidates) == 12
    right = [answers.candidates[at] for at in answers.right]
    assert right[:2] == [("ar", "The first sentence in ar."), ("de", "The first sentence in de.")]
    assert right[-1] == ("zh", "The second sentence in zh!")


def test_answers_are_measured_as_by_a_loop(script, mlqa):
    answers = script.Answers.read(mlqa, 2)
    rng = np.random.default_rng(0)
    question_nh, candidate_mh = (rng.normal(size=(n, 8)) for n in (len(answers.questions), len(answers.candidates)))
    precisions, own, reciprocal = [], [], []
    for (_, language, id_), right, query_h in zip(answers.questions, answers.right, question_nh, strict=True):
        ranked = sorted(range(len(answers.candidates)), key=lambda m: -float(query_h @ candidate_mh[m]))
        relevant = {at for (_, _, other), at in zip(answers.questions, answers.right, strict=True) if other == id_}
        hits = [place for place, m in enumerate(ranked, 1) if m in relevant]
        precisions.append(sum(found / place for found, place in enumerate(hits, 1)) / len(relevant))
        own.append(answers.candidates[ranked[0]][0] == language)
        reciprocal.append(1 / (1 + [m for m in ranked if answers.candidates[m][0] == language].index(right)))
    assert answers.measures(question_nh, candidate_mh) == pytest.approx(
        {
            "answers": 100 * np.mean(precisions),
            "own_language_first": 100 * np.mean(own),
            "answers_in_own_language": 100 * np.mean(reciprocal),
        }
    )


SETTING = {"steps": 100, "batch_size": 64}


def test_the_grid_varies_temperature_ranking_and_term(script):
    cells = list(script.grid([1, 2], **SETTING, corpus=script.DEMO))
    assert len({cell.name for cell in cells}) * 2 == len(cells)
    assert len({cell.digest for cell in cells}) == len(cells)
    assert [cell.seed for cell in cells if cell.removed] == [1, 2]
    names = {cell.name for cell in cells if cell.training == {"batches": "language"}}
    assert names == {f"{script.DEFAULT}, batches of one language"}
    (own,) = [cell for cell in cells if (cell.name, cell.seed) == ("tau=0.02, own side, anchor, weight 10", 2)]
    assert own.terms[0]["args"] | own.terms[1] == {
        "temperature": 0.02,
        "direction": "symmetric",
        "mask_duplicates": True,
        "own_side": True,
        "objective": "anchor",
        "weight": 10.0,
        "args": {"sides": "both"},
    }


def test_recipes_are_chosen_by_name_or_part_of_a_name(script):
    cells = list(script.grid([1, 2], **SETTING, corpus=script.DEMO))

    def names(*only):
        return [f"{cell.name}, seed {cell.seed}" for cell in script.chosen(cells, only)]

    assert names("tau=0.02, anchor") == ["tau=0.02, anchor, seed 1", "tau=0.02, anchor, seed 2"]
    assert len(names("tau=0.02, anch", "tau=0.01, nothing")) == 2 * 5 + 2
    with pytest.raises(UsageError, match=r"No recipe of the grid contains 'tau=9' \(--only\)"):
        names("tau=9")


def test_results_of_other_recipes_are_added_to_stored_ones(script, tmp_path, monkeypatch, capsys):
    (tmp_path / "page.md").write_text("<!-- forgetting -->\n<!-- /forgetting -->")
    names = {"KEPT": "kept.json", "PAGE": "page.md", "PLOT": "plot.svg"}
    for name, file in names.items():
        monkeypatch.setattr(script, name, tmp_path / file)
    computed, translations = [], 50.0

    def measured(cell, data, output, transfer=None):
        computed.append(cell.name if cell else "starter")
        row = {"alpha": 0.5, "directions": 0, "hardware": {"gpu": "GPU"}} | dict.fromkeys(script.COLUMNS, 50.0)
        row |= dict.fromkeys((script.GUARD, script.TOKENS), 50.0)
        seed = {"seed": cell.seed} if cell else {}
        return [row | seed | {"recipe": computed[-1], "translations": translations}]

    class Pool:
        def __init__(self, *args):
            pass

        __enter__, __exit__, map = (lambda self: self), (lambda self, *_: None), staticmethod(map)

    monkeypatch.setattr(script, "measured", measured)
    monkeypatch.setattr(script, "measured_in_worker", lambda cell, options: measured(cell, None, None))
    monkeypatch.setattr(script, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(script, "DevData", lambda *folders: None)
    monkeypatch.setattr(script, "work_settings", lambda *folders: {})
    argv = ["--stsb", str(tmp_path), "--mlqa", str(tmp_path), "--output", str(tmp_path / "out"), "--keep", "--only"]
    first, second = "tau=0.05, nothing", "tau=0.01, anchor"
    assert script.main([*argv, first]) == 0
    assert script.main([*argv, first, second]) == 0
    assert computed == ["starter", first, "starter", second]
    rows = json.loads((tmp_path / "kept.json").read_text())["rows"]
    assert [row["recipe"] for row in rows] == ["starter", second, first]
    assert first in (tmp_path / "page.md").read_text()
    (tmp_path / "kept.json").unlink()
    assert script.main([*argv, first, "--seeds", "1", "2"]) == 0
    rows = json.loads((tmp_path / "kept.json").read_text())["rows"]
    assert [(row["recipe"], row.get("seed")) for row in rows] == [("starter", None), (first, 1), (first, 2)]
    translations = 51.0
    assert script.main([*argv, "tau=0.02, anchor", "--seeds", "1", "2"]) == 2
    assert "The starter's translations differ from those in" in capsys.readouterr().err


def test_stored_scores_of_the_same_encoder_are_kept(script):
    encoder = {"recipe": "tr", "seed": 1, "alpha": 0.5, "directions": 0} | dict.fromkeys(script.COLUMNS, 50.0)
    stored = [encoder | {"pos": 70.0, "qa": 40.0}, encoder | {"alpha": 1.0, "pos": 71.0}]
    stored += [encoder | {"recipe": "starter", "pos": 72.0}]
    again = encoder | {"structure": 50.04, "qa": 41.0}
    assert script.with_stored_scores([again], stored) == [again | {"pos": 70.0}]
    others = [encoder | {"alpha": 1.0, "structure": 51.0}, encoder | {"seed": 2}]  # trained again; another seed
    assert script.with_stored_scores(others, stored) == others
    assert script.with_stored_scores([again], []) == [again]


def test_work_of_another_starter_is_refused(script, tiny_encoder, mlqa, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "load_encoder", lambda name: tiny_encoder)
    script.check_settings(tmp_path / "out", script.work_settings(tmp_path, mlqa))
    monkeypatch.setattr(script, "model_hash", lambda model: "another")
    with pytest.raises(UsageError, match="another value of starter"):
        script.check_settings(tmp_path / "out", script.work_settings(tmp_path, mlqa))


def test_kept_weights_are_not_trained_again(script, tmp_path, monkeypatch):
    cell = next(script.grid([1], **SETTING, corpus=script.DEMO))
    path = tmp_path / "weights" / f"{cell.digest}.safetensors"
    path.parent.mkdir()
    save_file({"x": torch.zeros(1)}, path)
    monkeypatch.setattr(script, "trained", lambda *args: pytest.fail("it was trained again"))
    assert script.trained_weights(cell, tmp_path) == path


def bitext(folder, pairs, split=".train"):
    """Write pairs of Swahili sentences and their translations."""
    folder.mkdir(exist_ok=True)
    lines = ["source\ttarget", *(f"{source}\t{target}" for source, target in pairs)]
    with gzip.open(folder / f"sw-en{split}.tsv.gz", "wt", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines))
    return folder


def test_added_pairs_are_a_sample_of_at_most_as_many(script, tmp_path):
    corpus = bitext(tmp_path / "corpus", [("Mvua", "Rain"), ("Jua", "Sun")])
    words = [(f"neno {n}", f"word {n}") for n in range(9)]
    added = bitext(tmp_path / "words", words, split="")
    (cell,) = [cell for cell in script.grid([1], added, **SETTING, corpus=corpus) if cell.added]
    assert cell.name == f"{script.DEFAULT}, pairs of words added"
    work = tmp_path / "work"
    work.mkdir()
    (one,) = script.load_parallel_folder(script.bitext_of(cell, work), split="train").values()
    pairs = list(zip(one.sources, one.targets, strict=True))
    assert pairs[:2] == [("Mvua", "Rain"), ("Jua", "Sun")]
    assert len(pairs) == 4
    assert set(pairs[2:]) < set(words)
    assert cell.digest != replace(cell, added=None).digest


def test_pairs_are_mined_among_the_english_sentences_of_all_languages(script, tmp_path, monkeypatch):
    corpus = bitext(tmp_path / "corpus", [("Mvua", "Rain"), ("Jua", "Sun")])
    (corpus / "et-en.train.tsv").write_text("source\ttarget\nVihm\tRain\nLumi\tSnow\n")
    read = {}

    def mine(options):
        read[options.output.rpartition("/")[2]] = [
            sorted(Path(path).read_text().splitlines()) for path in (options.source, options.target)
        ]

    monkeypatch.setattr("derived_bitexts.mine_files", mine)
    script.mined(corpus, tmp_path)
    english = ["Rain", "Snow", "Sun"]
    assert read == {
        "et-en.train.tsv.gz": [["Lumi", "Vihm"], english],
        "sw-en.train.tsv.gz": [["Jua", "Mvua"], english],
    }


def test_only_hard_negatives_are_ranked_as_negatives(script, tmp_path, monkeypatch):
    recipes = {}

    def trained(config, *rest):
        recipes[Path(config.recipe).parent.name] = yaml.safe_load(Path(config.recipe).read_text())["terms"][0]["args"]
        raise UsageError("far enough")

    monkeypatch.setattr(script, "trained", trained)
    monkeypatch.setattr(script, "start_of", lambda cell: None)
    monkeypatch.setattr(script, "bitext_of", lambda cell, work: script.DEMO)
    default, hard = (
        next(
            cell for cell in script.grid([1], **SETTING, corpus=script.DEMO) if cell.name == f"{script.DEFAULT}{more}"
        )
        for more in ("", ", hard negatives")
    )
    for name, cell in {"default": default, "hard": hard}.items():
        with pytest.raises(UsageError, match="far enough"):
            script.train(cell, tmp_path / name, tmp_path)
    assert "negatives" not in recipes["default"]
    assert recipes["hard"] == recipes["default"] | {"negatives": 3}


def test_other_corpora_and_sizes_are_other_cells(script, tmp_path):
    (tmp_path / "sw-en.train.tsv").write_text("source\ttarget\nMvua\tRain\n")
    settings = [{"corpus": script.DEMO}, {"corpus": tmp_path}, {"corpus": script.DEMO, "batch_size": 128}]
    assert len({next(script.grid([1], **SETTING | one)).digest for one in settings}) == 3


def test_the_table_has_the_best_encoders_of_a_recipe(script):
    machine = {"cpus": 2, "machine": "x86_64"}
    start = {"recipe": "starter", "alpha": 0.0, "directions": 0, "hardware": machine} | dict.fromkeys(
        script.COLUMNS, 50.0
    )
    kept = start | {"recipe": "tr", "alpha": 0.5, "translations": 60.0}
    gained = kept | {"alpha": 1.0, "translations": 70.0, "similarity": 49.0}
    content = {"rows": [start, kept, kept | {"answers": 49.0, "directions": 10}, gained], **SETTING, "seeds": [1]}
    content["corpus"] = "the training sets in mine"
    lines = [line for line in script.table(content).splitlines() if line.startswith(("| starter", "| tr"))]
    assert [line.split(" | ")[1:4] for line in lines] == [["0", "0", "50.0"], ["0.5", "0", "60.0"], ["1", "0", "70.0"]]
    assert "64 pairs of the training sets in mine," in script.table(content)


def test_the_table_has_means_over_the_seeds(script):
    """An encoder that is best with one seed only is not the best one."""
    start = {"recipe": "starter", "alpha": 0.0, "directions": 0, "hardware": {"gpu": "GPU"}}
    start |= dict.fromkeys(script.COLUMNS, 50.0)
    scores = {0.5: (60.0, 64.0), 1.0: (70.0, 50.0)}
    rows = [
        start | {"recipe": "tr", "seed": seed, "alpha": alpha, "translations": values[seed - 1]}
        for seed in (1, 2)
        for alpha, values in scores.items()
    ]
    text = script.table({"rows": [start, *rows], **SETTING, "seeds": [1, 2], "corpus": "the demo's bitext"})
    lines = [line.split(" | ")[1:4] for line in text.splitlines() if line.startswith("| tr ")]
    assert lines == [["0.5", "0", "62.0"]]  # also the best of those without a loss
    assert "otherwise, seeds 1, 2; without" in text
    assert "Means over the seeds: small" in text


def test_embeddings_are_kept_whole_or_not_at_all(script, tmp_path):
    path = tmp_path / "rows" / "starter-1.npz"
    groups = {"sts": [np.ones(2), np.zeros(3)], "answers": [np.arange(4)]}
    script.kept_embeddings(path, lambda: groups)
    kept = script.kept_embeddings(path, lambda: pytest.fail("they were embedded again"))
    assert {name: [x.tolist() for x in xs] for name, xs in kept.items()} == {
        "sts": [[1, 1], [0, 0, 0]],
        "answers": [[0, 1, 2, 3]],
    }
    broken = [np.ones(2), np.array([lambda: None])]  # the second array cannot be written
    with pytest.raises((AttributeError, pickle.PicklingError)):
        script.kept_embeddings(tmp_path / "rows" / "starter-2.npz", lambda: {"sts": broken})
    assert [one.name for one in path.parent.iterdir()] == ["starter-1.npz"]


@pytest.mark.parametrize("directions", [0, 2])
def test_structure_of_the_packaged_texts_is_that_of_the_guard(script, directions, monkeypatch):
    monkeypatch.setattr(script, "ITEMS", 3)
    rng = np.random.default_rng(0)
    shapes = {
        "pairs": [4, 4],
        "sts": [3, 3],
        "answers": [2, 5],
        "languages": [6, 6, 6],
        "guard": [7, 8],
        "tokens": [9, 9],
    }
    original, changed = (
        {name: [rng.normal(size=(n, 5)).astype("f4") for n in sizes] for name, sizes in shapes.items()} for _ in "12"
    )
    data = script.DevData.__new__(script.DevData)
    data.sts, data.languages = [[[], [], [1.0, 2.0, 3.0]]], dict.fromkeys(("de", "en", "fi"))
    data.answers = SimpleNamespace(measures=lambda *sides: {})

    texts = {language: [f"{language}{n}" for n in range(size)] for language, size in {"de": 7, "en": 8}.items()}
    rows = [
        {
            text: row
            for one, side in zip(texts.values(), group, strict=True)
            for text, row in zip(one, side, strict=True)
        }
        for group in (original["guard"], changed["guard"])
    ]
    if directions:
        means = {name: torch.from_numpy(x) for name, x in zip(data.languages, changed["languages"], strict=True)}
        removed = script.language_directions(means, directions)[0].numpy()
        rows = [{text: row - row @ removed.T @ removed for text, row in one.items()} for one in rows]
    models = [
        SimpleNamespace(encode=lambda batch, own=own, **_: np.array([own[text] for text in batch])) for own in rows
    ]
    expected = similarity_structure(*models, texts, resamples=2).average.score
    assert data.measures(changed, original, directions)[script.GUARD] == pytest.approx(expected, abs=0.01)
    assert data.measures(original, original, directions)[script.GUARD] == pytest.approx(100)
    tokens = data.measures(changed, original, directions).get(script.TOKENS)  # tokens keep all directions
    sides = original["tokens"], changed["tokens"]
    assert tokens == (None if directions else pytest.approx(script.mean_correlation(*sides)))


def test_structure_of_tokens_compares_the_same_tokens(script, tiny_encoder, monkeypatch):
    texts = ["the cat", "the cat sat on the mat", "a dog"]
    whole = script.token_states(tiny_encoder, texts)
    lengths = [len(tiny_encoder.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    assert len(whole) == sum(lengths)
    alone = script.token_states(tiny_encoder, texts[:1])
    np.testing.assert_allclose(whole[: len(alone)], alone, atol=1e-5)
    monkeypatch.setattr(script, "TOKENS_OF_A_LANGUAGE", 3)
    some = script.token_states(tiny_encoder, texts)
    assert len(some) == 3
    assert (whole[:, None] == some).all(-1).any(0).all()


def test_recipes_without_a_score_are_missing(script):
    first, second, *_ = cells = list(script.grid([1], **SETTING, corpus=script.DEMO))[:2]
    rows = [
        {"recipe": first.name, "seed": 1, script.TOKENS: 99.0},
        {"recipe": second.name, "seed": 1, script.TOKENS: 99.0, script.GUARD: 99.0},
    ]
    assert script.missing_cells(cells, rows, None) == [first]
    assert script.missing_cells([replace(second, seed=2)], rows, None) == [replace(second, seed=2)]
    assert script.missing_cells(cells, [rows[0] | {"removed": 20}, rows[1]], None) == []


def test_the_plot_shows_every_encoder(script, tmp_path):
    rows = [
        {"recipe": name, "similarity": 80.0, "translations": 90.0, "answers": 50.0, "alpha": 1.0, "directions": 0}
        for name in ("starter", "own side, x", script.DEFAULT)
    ]
    path = tmp_path / "plots" / "frontier.svg"
    script.plot(rows, path)
    assert "own side" in path.read_text()
    assert "recipe metaphrase" not in path.read_text()
    script.plot([*rows, rows[-1] | script.DEFAULT_RELEASE], path)
    assert "recipe metaphrase" in path.read_text()


def test_the_default_of_the_grid_is_the_recipe_metaphrase(script):
    cells = script.grid([1], **SETTING, corpus=script.DEMO)
    terms = next(cell.terms for cell in cells if cell.name == script.DEFAULT)
    packaged = Recipe.load("metaphrase").to_dict()["terms"]
    packaged[0]["args"]["temperature"] = 0.01  # the starter's own
    assert Recipe.from_dict({"name": "x", "terms": terms}).to_dict()["terms"] == packaged
    demo = demo_settings()
    assert demo["debias"] == script.DEFAULT_RELEASE["directions"]
    assert demo["merge"] in script.ALPHAS
    assert demo["merge"] <= script.DEFAULT_RELEASE["alpha"]  # its guard has few sentences


def test_transfer_is_measured_on_the_data_that_a_folder_has(script, tiny_encoder, tmp_path, monkeypatch):
    assert script.transfer_measures(None) == {}
    with pytest.raises(UsageError, match=r"contains none of xnli, ud, xquad \(--transfer\)"):
        script.transfer_measures(tmp_path)
    for name in ("ud", "xquad"):
        (tmp_path / name).mkdir()
    assert script.transfer_measures(tmp_path) == {"pos": "ud probe accuracy", "qa": "xquad f1"}

    def find(folder, suites, settings):
        def measure(name, subject):
            load_encoder(subject.name, device="cpu")  # fine-tuning loads it
            return {name: SimpleNamespace(groups={"without English": SimpleNamespace(score=len(name))})}

        return [SimpleNamespace(measure=partial(measure, script.TRANSFER[one][1])) for one in ("ud", "xquad")], {}

    monkeypatch.setattr(script, "find_benchmarks", find)
    assert script.transfer_scores(tiny_encoder, tmp_path) == {"pos": 17, "qa": 8}


def test_structure_predicts_what_varies_with_it(script, monkeypatch):
    monkeypatch.setattr(script, "FEWEST", 3)
    removed = {"directions": 0, "structure": 99.0, "similarity": 20.0, "removed": 20}
    rows = [
        {"directions": 0, "structure": 80.0 + 5 * at, "similarity": 70.0 + at, "answers_in_own_language": 75.0}
        | ({script.GUARD: 99.0 - at} if at else {})
        for at in range(4)
    ]
    for at in (1, 2, 3):
        rows[at]["pos"] = 70.0 + at
    rows[3]["nli"] = 50.0
    lines = [one for one in script.prediction([*rows, removed]).splitlines() if " | 0 | " in one]
    assert lines == [
        "| STS-B | STS-B dev | 0 | 4 | 1.00 | 2 |  |",
        "| STS-B | packaged | 0 | 3 | -1.00 | 3 | -1.00 |",
        "| answers, MRR in the question's language | STS-B dev | 0 | 4 | nan | 2 |  |",
        "| answers, MRR in the question's language | packaged | 0 | 3 | nan | 3 | nan |",
        "| parts of speech, probe | STS-B dev | 0 | 3 | 1.00 | 2 |  |",
        "| parts of speech, probe | packaged | 0 | 3 | -1.00 | 3 | -1.00 |",
    ]
