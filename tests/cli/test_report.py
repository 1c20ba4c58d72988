import copy
import gzip
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer

from metaphrase.cli import main
from metaphrase.corpus.parallel import load_parallel_folder
from metaphrase.evaluation.compare import compare
from metaphrase.evaluation.geometry import hubs
from metaphrase.evaluation.guards import AlphaCurve
from metaphrase.evaluation.retrieval import evaluate_retrieval
from metaphrase.exceptions import DataError
from metaphrase.mining.search import unit_rows
from metaphrase.publishing import analysis, run_report
from metaphrase.publishing.run_comparison import compare_runs

HOSTILE = '<img src=x onerror="alert(1)">'


@pytest.fixture
def data(tmp_path, bitext):
    """German, which was trained on, and French and Dutch, which were not."""
    folder = tmp_path / "mini"
    folder.mkdir()
    rows = {
        "de": [(row["source"], row["target"]) for row in bitext],
        "fr": [(f"{row['target']} {row['source']}", row["target"]) for row in bitext],
        "nl": [(row["source"] if at % 2 else f"le {at}", row["target"]) for at, row in enumerate(bitext)],
    }
    rows["de"][3] = (f"{HOSTILE} trinkt", "the cat drinks milk")
    for language, pairs in rows.items():
        with gzip.open(folder / f"{language}-en.tsv.gz", "wt", encoding="utf-8") as file:
            file.write("source\ttarget\n" + "".join(f"{source}\t{target}\n" for source, target in pairs))
    return folder


@pytest.fixture
def finished(tmp_path, tiny_encoder, tiny_encoder_dir):
    """A run that moved the tiny encoder a little."""
    folder = tmp_path / "run"
    trained = copy.deepcopy(tiny_encoder)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    trained.save_pretrained(str(folder), create_model_card=False)
    facts = {
        "command": "metaphrase train",
        "model": str(tiny_encoder_dir),
        "base": str(tiny_encoder_dir),
        "settings": {},
        "recipe": {"name": "dap"},
        "seed": 1,
        "seconds": 5.0,
        "files": [{"file": "de-en.tsv", "languages": ["en", "de"]}],
        "corpus": {"languages": {"de": 24}},
        "log_history": [{"step": 1, "loss": 2.0, "tr": 1.0}, {"step": 2, "loss": 1.0, "tr": 0.5}],
    }
    (folder / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    return folder


@pytest.fixture
def quick(monkeypatch):
    """Without the two slow parts, which `test_report_of_a_run` has."""
    monkeypatch.setattr(analysis.TSNE, "fit_transform", lambda tsne, rows: rows[:, :2])
    monkeypatch.setattr(run_report, "save_pictures", lambda report, folder: [])


def read(folder):
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


def write_evaluation(path):
    """A result of `metaphrase evaluate` with answers in two languages."""
    rows = {"de": {"answers": {"de": 61.0, "en": 52.5}}, "en": {"answers": {"de": 33.3, "en": 70.0}}}
    path.write_text(json.dumps({"scores": {"xquad-r mAP in one language": {"languages": rows}}}), encoding="utf-8")
    return str(path)


@pytest.mark.long
def test_report_of_a_run(finished, data, tiny_encoder, capsys):
    answers = write_evaluation(finished.parent / "evaluation.json")
    options = ["--data", str(data), "--resamples", "200", "--errors", "40", "--evaluation", answers]
    assert main(["report", str(finished), *options]) == 0
    out = finished / "report"
    names = ("accuracy-mini", "retention-mini", "curves", "tokens", "margins", "answers")
    pictures = {f"{name}.png" for name in names}
    assert {path.name for path in out.iterdir()} == {"_metaphrase", "report.html", "report.json", *pictures}
    report = read(out)
    sets = load_parallel_folder(data)
    assert report["before"]["mini"]["languages"].keys() == {"de"}
    expected = {}
    for side, model in (("before", tiny_encoder), ("after", SentenceTransformer(str(finished), device="cpu"))):
        expected[side] = evaluate_retrieval(model, sets, resamples=200).to_dict()
        alone = {key: one for key, one in expected[side]["languages"]["de"].items() if key != "item_ids"}
        assert report[side]["mini"]["languages"]["de"] == alone
        assert report[side]["mini"]["settings"]["pooling"] == "cls"
    untrained = [{**one, "languages": {x: one["languages"][x] for x in ("fr", "nl")}} for one in expected.values()]
    comparison = compare(*untrained, resamples=200)
    retention = report["analysis"]["retention"]["mini"]
    assert retention["pooled"] == comparison["pooled"]
    assert {row["language"]: row["difference"] for row in retention["languages"]} == {
        language: row["difference"] for language, row in comparison["languages"].items()
    }
    errors = report["analysis"]["errors"]
    hits = [one["languages"]["de"]["source_to_target"]["hits"] for one in expected.values()]
    assert errors["counts"]["wrong"] <= hits[1].count("0")  # copies of the translation's text are no errors
    assert errors["pairs"] == 24
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "<img" not in page
    assert "loss, tr over training steps" in page
    assert report["analysis"]["answers"] == {"languages": ["de", "en"], "after": [[61.0, 52.5], [33.3, 70.0]]}
    assert "en questions, de candidates: 33.3" in page
    geometry = report["analysis"]["geometry"]
    (german,) = (one for language, one in sets.items() if language == "de")
    embedded = [tiny_encoder.encode(list(side)) for side in (german.sources, german.targets)]
    skewness = hubs(*map(unit_rows, embedded)).skewness
    assert geometry["before"]["hubness"] == pytest.approx(skewness, abs=0.05)  # near-ties may differ between batches
    assert 0 < geometry["after"]["isotropy"] <= 1
    assert -100 <= geometry["after"]["structure"] <= 100
    assert "Worst hub" in page
    printed = capsys.readouterr()
    assert "2 languages not trained on" in printed.out
    assert "Encoding" in printed.err
    assert "Encoding" not in printed.out


@pytest.mark.long
@pytest.mark.usefixtures("quick")
def test_the_report_as_json(finished, data, capsys):
    options = [str(finished), "--data", str(data), "--baseline", "none", "--json"]
    assert main(["report", *options]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == read(finished / "report")
    assert "Encoding" in printed.err
    assert "Report:" in printed.err
    assert main(["report", *options, "--quiet"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == read(finished / "report")
    assert printed.err == ""
    assert main(["report", *options[:-1], "--quiet"]) == 0
    printed = capsys.readouterr()
    assert "Report:" in printed.out
    assert printed.err == ""


def test_an_evaluation_without_answers_is_refused(finished, data, tmp_path, capsys):
    (tmp_path / "other.json").write_text('{"scores": {}}', encoding="utf-8")
    assert main(["report", str(finished), "--data", str(data), "--evaluation", str(tmp_path / "other.json")]) == 2
    assert "has no answer retrieval. Evaluate with --suite answer-retrieval" in capsys.readouterr().err


def test_an_evaluation_of_another_encoder_is_refused(finished, data, tmp_path, capsys):
    path = tmp_path / "other.json"
    write_evaluation(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": "runs/tr", "model_hash": "0123456789"}))
    assert main(["report", str(finished), "--data", str(data), "--evaluation", str(path)]) == 2
    error = capsys.readouterr().err
    assert f"{path} must have results of this model (" in error
    assert "has those of runs/tr (01234567). Evaluate the model with its own settings" in error


def test_the_results_of_the_model_are_read_among_several(tmp_path, caplog):
    path = tmp_path / "several.json"
    one = json.loads(Path(write_evaluation(path)).read_text())
    other = {
        "scores": {analysis.ANSWERS: {"languages": {"sw": {"answers": {"sw": 5.0}}}}},
        "model": "runs/dap",
        "model_hash": "b",
    }
    baseline = one | {"model": "starter", "model_hash": "c"}
    path.write_text(
        json.dumps({"models": [other, one | {"model": "runs/tr", "model_hash": "a"}], "baseline": baseline})
    )
    tables = {"languages": ["de", "en"], "before": [[61.0, 52.5], [33.3, 70.0]], "after": [[61.0, 52.5], [33.3, 70.0]]}
    assert analysis.read_answers(path, ["a"], ["c"]) == tables
    without = {key: tables[key] for key in ("languages", "after")}
    assert analysis.read_answers(path, ["a"], []) == without
    assert not caplog.records
    assert analysis.read_answers(path, ["a"], ["x"]) == without
    assert "another baseline, starter, whose answers are not shown" in caplog.text
    with pytest.raises(ValueError, match=r"must have results of this model \(x\)"):
        analysis.read_answers(path, ["x"], [])


@pytest.mark.usefixtures("quick")
def test_report_without_a_baseline(finished, data, tmp_path):
    options = ["--data", str(data), "--baseline", "none", "--output_dir", str(tmp_path / "page")]
    assert main(["report", str(finished), *options]) == 0
    report = read(tmp_path / "page")
    assert report["before"] is None
    assert report["analysis"]["retention"] == {}
    assert set(report["analysis"]["errors"]) == {"counts", "pairs", "wrong", "data"}
    assert not (finished / "report").exists()


def test_an_encoder_that_was_moved_is_named(finished, data, tmp_path, capsys):
    facts = json.loads((finished / "run.json").read_text(encoding="utf-8"))
    moved = str(tmp_path / "moved")
    (finished / "run.json").write_text(json.dumps(facts | {"model": moved, "base": moved}), encoding="utf-8")
    assert main(["report", str(finished), "--data", str(data)]) == 2
    error = capsys.readouterr().err
    assert f"There is no folder {moved}" in error
    assert "If it was moved, pass its new place with --baseline" in error


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("settings", "pooling"), [({}, "cls"), ({"pooling": "max"}, "max")])
def test_an_encoder_without_pooling_is_measured_as_it_was_trained(finished, data, tiny_bert_dir, settings, pooling):
    facts = json.loads((finished / "run.json").read_text(encoding="utf-8"))
    facts |= {
        "model": "starter",
        "base": str(tiny_bert_dir),
        "settings": settings,
        "recipe": {"name": "dap", "pooling": "cls"},
    }
    (finished / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    assert main(["report", str(finished), "--data", str(data), "--resamples", "50"]) == 0
    assert read(finished / "report")["before"]["mini"]["settings"]["pooling"] == pooling


@pytest.mark.long
@pytest.mark.usefixtures("quick")
def test_chosen_pairs_and_languages(finished, data):
    options = ["--pairs", "de:1", "de:3", "--languages", "fr,nl", "--resamples", "100"]
    assert main(["report", str(finished), "--data", str(data), *options]) == 0
    content = read(finished / "report")["analysis"]
    assert [(one["language"], one["number"]) for one in content["alignments"]] == [("de", 1), ("de", 3)]
    assert content["alignments"][0]["after"]["source"] == ["der", "Hund", "schläft"]
    assert content["tokens"]["languages"] == ["en", "fr", "nl"]


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_a_release_for_each_language(finished, data):
    """What training with a language embedding leaves: a model for each language, and none for the others."""
    for language in ("de", "en"):
        shutil.copytree(finished, finished.with_name("folded") / language, ignore=shutil.ignore_patterns("run.json"))
    folded = finished.with_name("folded")
    shutil.copy(finished / "run.json", folded)
    assert main(["report", str(folded), "--data", str(data), "--resamples", "100"]) == 0
    assert main(["report", str(finished), "--data", str(data), "--resamples", "100"]) == 0
    reports = [read(folder / "report") for folder in (folded, finished)]
    languages = [report["after"]["mini"]["languages"] for report in reports]
    assert languages[0] == languages[1]
    assert reports[0]["analysis"]["retention"] == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pairs", "de:99"], "number in its test set; got 'de:99'"),
        (["--languages", "xx"], "No pairs in xx; choose from de, fr, nl"),
    ],
)
def test_a_wrong_choice_is_refused(finished, data, capsys, options, message):
    assert main(["report", str(finished), "--data", str(data), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (finished / "report").exists()


def test_a_folder_that_is_no_run(tmp_path, finished, data, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "missing run.json" in capsys.readouterr().err
    (finished / "modules.json").unlink()
    assert main(["report", str(finished), "--data", str(data)]) == 2
    assert "has no release" in capsys.readouterr().err


def ability(verdict):
    row = {"before": 100.0, "after": 95.0, "difference": -5.0, "interval": [-6.0, -3.5], "n": 40, "limit": 4.0}
    return row | {"verdict": verdict, "holds": verdict == "kept", "languages": {"de": -5.0}}


@pytest.mark.parametrize(("baseline", "shown"), [((), True), (("--baseline", "none"), False)])
def test_abilities_and_the_verdict_are_shown(finished, data, quick, capsys, monkeypatch, baseline, shown):
    """The run measured them against the encoder before training, so they do not apply to another baseline."""
    monkeypatch.setattr(run_report, "collapse_in_words", lambda *sides: "")  # of the tiny encoder
    earlier = {"analysis": {"abilities": {"similarity structure": ability("uncertain")}}}
    (finished / "report.json").write_text(json.dumps(earlier), encoding="utf-8")
    assert main(["report", str(finished), "--data", str(data), "--resamples", "50", *baseline]) == 0
    content = read(finished / "report")["analysis"]
    page, printed = (finished / "report" / "report.html").read_text(encoding="utf-8"), capsys.readouterr().out
    assert content["abilities"] == (earlier["analysis"]["abilities"] if shown else {})
    assert bool(re.search(r"uncertain: [^;]*similarity structure", content["verdict"].lower())) == shown
    assert "kept" not in content["verdict"]
    assert content["verdict"] in page
    assert content["verdict"] in " ".join(printed.split())
    assert ("other abilities: similarity structure" in page) == shown
    assert ("Other abilities, similarity structure, 1 language: " in printed) == shown


@pytest.mark.long
def test_the_choice_of_alpha_is_shown(finished, data, quick, capsys):
    row = {
        "before": 50.0,
        "after": 52.0,
        "difference": 2.0,
        "interval": [1.0, 3.0],
        "verdict": "better",
        "holds": True,
    }
    points = [{"alpha": at / 2, "gain": row, "guards": {"sts": row}, "holds": True} for at in range(3)]
    curve = AlphaCurve(0.5, "dev", points)
    (finished / "alpha.json").write_text(json.dumps(curve.to_dict()), encoding="utf-8")
    assert main(["report", str(finished), "--data", str(data), "--resamples", "50"]) == 0
    assert read(finished / "report")["analysis"]["alpha"] == curve.to_dict()
    assert "Alpha 0.5 was chosen: dev +2.0" in (finished / "report" / "report.html").read_text(encoding="utf-8")
    (finished / "alpha.json").write_text('{"alpha": 1}', encoding="utf-8")
    capsys.readouterr()
    assert main(["report", str(finished), "--data", str(data), "--resamples", "50"]) == 2
    assert "alpha.json is damaged" in capsys.readouterr().err


def test_more_languages_than_the_word_map_has_are_refused(tmp_path, capsys):
    """The rest would be missing from the report without a word."""
    assert main(["report", str(tmp_path), "--languages", "de,fr,nl,sw,te"]) == 2
    assert "at most four languages, which the word map and the alignments show" in capsys.readouterr().err


def test_a_report_takes_the_place_of_a_damaged_one_in_a_comparison(quick, finished, data):
    facts = json.loads((finished / "run.json").read_text(encoding="utf-8"))
    facts |= {"settings": {}, "files": [{**facts["files"][0], "sha256": "0"}]}
    (finished / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    (finished / "report.json").write_text("{")
    with pytest.raises(DataError) as error:
        compare_runs([finished])
    report, place = re.search(
        r"run `metaphrase (.*) TEST_SETS`, and compare (\S+) in its place", str(error.value)
    ).groups()
    assert main([*report.split(), str(data)]) == 2
    (finished / "report.json").unlink()
    assert main([*report.split(), str(data)]) == 0
    (row,) = compare_runs([place])
    assert (row["configuration"], row["test"], row["seeds"]) == ("dap", "mini", [1])
