import json
from dataclasses import replace

import pytest
import torch

from metaphrase.corpus.parallel import load_test_folder
from metaphrase.exceptions import DataError, MissingFileError, UsageError
from metaphrase.training import baseline
from metaphrase.training.baseline import EvaluationSets, measure_baseline, read_test_sets, split_retention
from metaphrase.training.configuration import RunConfig
from metaphrase.training.recipe import Recipe


def write_sets(folder, **languages):
    folder.mkdir(exist_ok=True)
    for language, rows in languages.items():
        lines = "".join(f"{row['source']} ({language})\t{row['target']}\n" for row in rows)
        (folder / f"{language}-en.tsv").write_text("source\ttarget\n" + lines, encoding="utf-8")
    return folder


def with_options(config, **options):
    changed = RunConfig(**options)
    return replace(config, **{name: getattr(changed, name) for name in options})


@pytest.mark.parametrize("columns", [False, True])
def test_retention_languages_are_in_no_training_file(columns, tmp_path, bitext, monkeypatch):
    """If file names do not state the languages of a corpus, they are unknown until it is read."""
    monkeypatch.setattr(baseline, "UDHR", write_sets(tmp_path / "udhr", de=bitext[:9], sw=bitext[:8]))
    write_sets(tmp_path / "train", **({} if columns else {"de": bitext}))
    lines = "".join(f"{row['source']}\t{row['target']}\tde\ten\n" for row in bitext)
    (tmp_path / "all.tsv").write_text("source\ttarget\tsource_lang\ttarget_lang\n" + lines, encoding="utf-8")
    corpus = tmp_path / ("all.tsv" if columns else "train")
    test = write_sets(tmp_path / "t", de=bitext[:5], fi=bitext[:5])
    config = RunConfig(corpus=[str(corpus)], test=[str(test)])
    tests = read_test_sets(config)
    sets = split_retention(tests, config, Recipe.load("tr"))
    if columns:
        assert (sets.trained["t"].keys(), sets.retention["udhr"].keys()) == ({"de", "fi"}, {"de", "sw"})
        sets = split_retention(tests, config, Recipe.load("tr"), {"de", "en"})
        assert (sets.trained["t"].keys(), sets.retention["t"].keys()) == ({"de"}, {"fi"})
    else:
        assert (sets.trained["t"].keys(), sets.retention["t"].keys()) == ({"de"}, {"fi"})
    assert split_retention(tests, with_options(config, retention=["none"]), Recipe.load("tr")) == EvaluationSets(tests)
    assert split_retention(tests, config, Recipe.load("wacse-language")) == EvaluationSets(tests)


def test_retention_languages_can_be_chosen(tmp_path, bitext):
    write_sets(tmp_path / "train", de=bitext)
    test, far = write_sets(tmp_path / "t", de=bitext[:5]), write_sets(tmp_path / "far", sw=bitext[:5], fi=bitext[:5])
    config = RunConfig(corpus=[str(tmp_path / "train")], test=[str(test)], retention=[str(far)])
    tests, recipe = read_test_sets(config), Recipe.load("tr")
    for chosen, expected in (([], {"sw", "fi"}), (["all"], {"sw", "fi"}), (["sw", "de"], {"sw"})):
        found = split_retention(tests, with_options(config, retention_languages=chosen), recipe)
        assert found.retention["far"].keys() == expected
        assert found.trained == tests
    with pytest.raises(UsageError, match=r"No retention set has any of .*, ko\. They have fi, sw"):
        split_retention(tests, with_options(config, retention_languages=["ko"]), recipe)


def test_test_sets_are_found_in_subfolders(tmp_path, bitext):
    for name in ("tatoeba", "news"):
        (tmp_path / "all" / name).mkdir(parents=True)
    write_sets(tmp_path / "all" / "tatoeba", de=bitext[:5], sw=bitext[:5])
    write_sets(tmp_path / "all" / "news", de=bitext[:5]).joinpath("de-en.tsv").rename(
        tmp_path / "all" / "news" / "de-en.test.tsv"
    )
    config = RunConfig(corpus=["x.tsv"], test=[str(tmp_path / "all")])
    assert {name: list(sets) for name, sets in read_test_sets(config).items()} == {
        "news": ["de"],
        "tatoeba": ["de", "sw"],
    }
    with pytest.raises(MissingFileError, match="has no file named"):
        read_test_sets(with_options(config, test=[str(tmp_path)]))


def test_a_damaged_test_set_in_a_subfolder_is_refused(tmp_path, bitext):
    for name in ("tatoeba", "udhr"):
        (tmp_path / name).mkdir()
        write_sets(tmp_path / name, de=bitext[:5])
    (tmp_path / "udhr" / "de-en.tsv").write_text("source\ttarget\nonly one column\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"udhr.de-en\.tsv"):
        read_test_sets(RunConfig(corpus=["x.tsv"], test=[str(tmp_path)]))


def test_a_baseline_is_measured_once_for_an_encoder(tiny_encoder, bitext, tmp_path, monkeypatch):
    measured, real = [], baseline.evaluate_retrieval
    monkeypatch.setattr(
        baseline, "evaluate_retrieval", lambda *a, **k: measured.append(list(a[1])) or real(*a, **k, resamples=10)
    )
    folder = str(write_sets(tmp_path / "held-out", de=bitext[:15], sw=bitext[:12]))
    own, others = ({"held-out": load_test_folder(folder, [language])} for language in ("de", "sw"))
    first = measure_baseline(tiny_encoder, EvaluationSets(own, others), tmp_path, name="x")
    assert measured == [["de"], ["sw"]]
    again = measure_baseline(tiny_encoder, EvaluationSets(own, others), tmp_path, name="x")
    assert measured == [["de"], ["sw"]]
    for side in ("trained", "retention"):
        assert json.loads(json.dumps(getattr(first, side))) == json.loads(json.dumps(getattr(again, side)))
    measure_baseline(tiny_encoder, EvaluationSets(others), tmp_path, name="x")
    assert measured[2:] == [["sw"]]
    with torch.no_grad():
        next(tiny_encoder.parameters()).add_(1)
    measure_baseline(tiny_encoder, EvaluationSets(others), tmp_path, name="x")
    assert measured[3:] == [["sw"]]


def test_files_beside_those_of_the_split_test_are_named(tmp_path, caplog):
    for name in ("sw-en.test.tsv", "sw-en.tsv", "te-en.tsv"):
        (tmp_path / name).write_text("source\ttarget\npaka\tcat\n", encoding="utf-8")
    assert list(load_test_folder(tmp_path)) == ["sw"]
    (record,) = caplog.records
    assert record.getMessage().endswith("has files of the split test, so these are not read: te-en.tsv.")


def test_a_checksum_is_not_a_file_of_the_split_test(tmp_path):
    (tmp_path / "sw-en.tsv").write_text("source\ttarget\npaka\tcat\n", encoding="utf-8")
    (tmp_path / "sw-en.test.tsv.sha256").write_text("0")
    assert list(load_test_folder(tmp_path)) == ["sw"]
