import gzip
import json
import shutil
from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer

import metaphrase.cli.adapt as adapt
from metaphrase.cli import main

DATA = adapt.DATA
DEMO = DATA / "demo"


def lines_of(language, n):
    lines = gzip.decompress((DEMO / f"{language}-en.train.tsv.gz").read_bytes()).decode().split("\n")
    return ["\t".join(line.split("\t")[:2]) for line in lines[1 : n + 1]]


def write(path: Path, lines):
    path.write_text("source\ttarget\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def small_data(tmp_path, monkeypatch):
    """The packaged data with a few languages for retention."""
    folder = tmp_path / "packaged"
    shutil.copytree(DEMO, folder / "demo", ignore=shutil.ignore_patterns("*.dev.*", "*.test.*", "v*", "t*"))
    (folder / "udhr").mkdir()
    for language in ("sw", "fi", "de", "fr"):
        shutil.copy(adapt.DATA / "udhr" / f"{language}-en.tsv.gz", folder / "udhr")
    monkeypatch.setattr(adapt, "DATA", folder)
    return folder


def test_a_few_hundred_pairs_become_a_model_and_a_verdict(tiny_encoder_dir, small_data, tmp_path, capsys):
    corpus = write(tmp_path / "my.tsv", lines_of("sw", 400))
    output = tmp_path / "out"
    command = ["adapt", "--model", str(tiny_encoder_dir), "--corpus", str(corpus), "--languages", "sw"]
    command += ["--minutes", "0.02", "--anchor", "1", "--output_dir", str(output), "--json"]
    assert main(command) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["said"][0].startswith("Swahili (sw): ")
    assert result["languages"]["sw"]["verdict"] in ("better", "tie", "worse")
    assert {row["language"] for row in result["retention"]["languages"]} == {"de", "fr"}
    assert json.loads((output / "verdict.json").read_text())["said"] == result["said"]
    assert (output / "report.html").is_file()
    assert {path.name[:2] for path in (output / "data" / "training").iterdir()} == {"sw", "et", "fi", "ml"}
    SentenceTransformer(str(output), device="cpu")
    card = (output / "README.md").read_text(encoding="utf-8")
    assert "anchor" in card


@pytest.mark.parametrize(
    ("spoiled", "said"),
    [
        (lambda: ["\t".join(line.split("\t")[1::-1]) for line in lines_of("sw", 400)], "swapped"),
        (lambda: lines_of("fi", 400), "looks like Finnish"),
    ],
)
def test_a_wrong_corpus_is_stopped_before_training(tiny_encoder_dir, tmp_path, capsys, monkeypatch, spoiled, said):
    monkeypatch.setattr(adapt, "train_and_report", lambda *a, **k: pytest.fail("it was trained"))
    corpus = write(tmp_path / "my.tsv", spoiled())
    output = tmp_path / "out"
    command = ["adapt", "--model", str(tiny_encoder_dir), "--corpus", str(corpus), "--languages", "sw"]
    assert main([*command, "--output_dir", str(output)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Nothing was trained" in error
    assert not output.exists()


def test_a_language_that_cannot_be_identified_is_no_stop(tiny_encoder_dir, small_data, tmp_path, capsys, monkeypatch):
    trained = []
    monkeypatch.setattr(adapt, "train_and_report", lambda *a, **k: trained.append(k) or ({}, []))
    monkeypatch.setattr(adapt, "judge", lambda *a, **k: {"said": ["Tie."]})
    monkeypatch.setattr(adapt, "step_seconds", lambda *a, **k: 1.0)
    lines = gzip.decompress((DATA / "udhr" / "su-en.tsv.gz").read_bytes()).decode().split("\n")[1:]
    rows = ["\t".join(f"{side} {i}" for side in line.split("\t")[:2]) for i in range(3) for line in lines if line]
    corpus = write(tmp_path / "my.tsv", rows)
    command = ["adapt", "--model", str(tiny_encoder_dir), "--corpus", str(corpus), "--languages", "su"]
    assert main([*command, "--output_dir", str(tmp_path / "out")]) == 0
    assert "unknown-language" in capsys.readouterr().err
    assert len(trained) == 1


def test_bad_options_are_refused(tmp_path, capsys):
    assert main(["adapt", "--corpus", "x.tsv", "--languages", "sw", "--minutes", "0"]) == 2
    assert "--minutes must be positive" in capsys.readouterr().err
