import gzip
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import save_file

from metaphrase.corpus.parallel import load_parallel_folder
from metaphrase.encoders.loading import load_encoder
from metaphrase.exceptions import UsageError
from metaphrase.training.demo import demo_settings
from metaphrase.training.recipe import Recipe

SCRIPTS = Path(__file__).parents[2] / "scripts"


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
    (one,) = load_parallel_folder(script.bitext_of(cell, work), split="train").values()
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
