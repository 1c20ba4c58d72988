"""The JSON that the command line prints and writes has the keys and types that are checked in.

`pytest tests/contracts --update-contracts` rewrites the shapes. Use it only for an intended change, and name the change
in the changelog.
"""

import gzip
import json
import shutil
import time
from pathlib import Path

import pytest

from tests.contracts.conftest import command
from tests.hub_server import reach, serve_hub

DEMO = Path(__file__).parents[2] / "src" / "metaphrase" / "data" / "demo"


@pytest.fixture(scope="module")
def trained(training, test_sets, tmp_path_factory):
    """A run with test sets, retention and checkpoints; its folder and what it printed."""
    output = tmp_path_factory.mktemp("contract-run") / "out"
    sets = {"test": test_sets, "retention": test_sets}
    options = training(output, "dap", max_steps=4, save_steps=2, **sets)
    return output, json.loads(command(*options, "--json"))


def read(path: Path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_train(trained, contract):
    output, printed = trained
    assert contract("train.stdout", printed) == []
    for name in ("run", "report"):
        assert contract(f"train.{name}", read(output / f"{name}.json")) == []
    assert contract("train.manifest", read(output / "checkpoint-4" / "manifest.json")) == []
    assert contract("train.release", read(output / "release.json")) == []


def test_merge(trained, tiny_encoder_dir, contract, tmp_path):
    arguments = [
        "merge",
        tiny_encoder_dir,
        trained[0],
        "-o",
        tmp_path / "merged",
        "--vector",
        tmp_path / "v.safetensors",
    ]
    assert contract("merge", json.loads(command(*arguments, "--json"))) == []


def test_debias(tiny_encoder_dir, test_sets, contract, tmp_path):
    arguments = ["debias", tiny_encoder_dir, "-o", tmp_path / "debiased", "--data", test_sets, "--directions", 2]
    assert contract("debias", json.loads(command(*arguments, "--json"))) == []


def test_export(tiny_encoder_dir, corpus, test_sets, contract, tmp_path):
    arguments = ["export", tiny_encoder_dir, "-o", tmp_path / "small", "--corpus", corpus, "--max_loss", 100]
    assert contract("export", json.loads(command(*arguments, "--data", test_sets, "--json"))) == []


def test_pull(tiny_encoder_dir, contract, tmp_path):
    assert contract("pull", json.loads(command("pull", tiny_encoder_dir, tmp_path / "copy", "--json"))) == []


def test_compare(trained, contract):
    assert contract("compare.stdout", json.loads(command("compare", trained[0], "--json"))) == []


def test_evaluate_retrieval(trained, test_sets, tiny_encoder_dir, contract, tmp_path):
    arguments = ["evaluate", trained[0], "--suite", "retrieval", "--data", test_sets, "--baseline", tiny_encoder_dir]
    outputs = ["--output", tmp_path / "result.json", "--output_dir", tmp_path / "kept"]
    printed = command(*arguments, "--resamples", 50, *outputs, "--json")
    assert contract("evaluate.retrieval", json.loads(printed)) == []
    assert contract("evaluate.retrieval", read(tmp_path / "result.json")) == []


def test_evaluate_sts(tiny_encoder_dir, bitext, contract, tmp_path):
    """A suite of another kind than retrieval, against a baseline."""
    folder = tmp_path / "sts" / "stsb"
    folder.mkdir(parents=True)
    lines = [f"{bitext[at]['source']},{bitext[at + 1]['source']},{at % 5}\n" for at in range(20)]
    (folder / "stsb-de-test.csv").write_text("".join(lines), encoding="utf-8")
    arguments = ["evaluate", tiny_encoder_dir, "--suite", "sts", "--data", tmp_path / "sts", "--resamples", 50]
    printed = command(*arguments, "--baseline", tiny_encoder_dir, "--output_dir", tmp_path / "kept", "--json")
    assert contract("evaluate.sts", json.loads(printed)) == []
    assert contract("evaluate.sts.results", read(tmp_path / "kept" / "results.json")) == []


def test_evaluate_fine_tuning(tiny_encoder_dir, bitext, contract, tmp_path):
    """A suite that fine-tunes."""
    folder = tmp_path / "benchmarks" / "xnli"
    folder.mkdir(parents=True)
    labels = ("entailment", "neutral", "contradiction")
    for language, side in (("en", "target"), ("de", "source")):
        lines = [f"{row[side]}\t{bitext[at % 3][side]}\t{labels[at % 3]}\n" for at, row in enumerate(bitext)]
        (folder / f"dev-{language}.tsv").write_text("".join(lines), encoding="utf-8")
    arguments = ["evaluate", tiny_encoder_dir, "--suite", "nli", "--data", folder.parent, "--resamples", 50]
    printed = command(*arguments, "--baseline", tiny_encoder_dir, "--output_dir", tmp_path / "kept", "--json")
    assert contract("evaluate.fine-tuning", json.loads(printed)) == []


def test_mine(tiny_encoder_dir, bitext, contract, tmp_path):
    for language, side in (("de", "source"), ("en", "target")):
        lines = [row[side] for row in bitext]
        (tmp_path / f"news.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    files = tmp_path / "news.de", tmp_path / "news.en"
    printed = command("mine", *files, "-o", tmp_path / "mined.tsv", "--model", tiny_encoder_dir, "--k", 2, "--json")
    assert contract("mine.stdout", json.loads(printed)) == []
    assert contract("mine.facts", read(tmp_path / "mined.tsv.json")) == []


def test_filter(tiny_encoder_dir, corpus, contract, tmp_path):
    output = ["-o", tmp_path / "scored.tsv", "--model", tiny_encoder_dir]
    printed = command("filter", corpus, *output, "--k", 2, "--threshold", "0.5", "--json")
    assert contract("filter.stdout", json.loads(printed)) == []
    assert contract("filter.facts", read(tmp_path / "scored.tsv.json")) == []


def test_align(corpus, contract, tmp_path):
    output = ["-o", tmp_path / "aligned.tsv", "--summary", tmp_path / "summary.json", "--overwrite"]
    printed = command("align", corpus, *output, "--json")
    assert contract("align.stdout", json.loads(printed)) == []
    assert contract("align.summary", read(tmp_path / "summary.json")) == []


def swahili(path: Path, pairs: int) -> Path:
    with gzip.open(DEMO / "sw-en.train.tsv.gz", "rt", encoding="utf-8", newline="\n") as lines:
        rows = ["\t".join(line.rstrip("\n").split("\t")[:2]) for line in lines][1 : pairs + 1]
    path.write_text("source\ttarget\n" + "\n".join(rows) + "\n", encoding="utf-8")
    return path


def test_diagnose(tiny_encoder_dir, contract, tmp_path):
    arguments = ["--corpus", swahili(tmp_path / "pairs.tsv", 60), "--languages", "sw", "--lines", 40, "--sample", 30]
    arguments += ["--baseline", tiny_encoder_dir, "--output", tmp_path / "diagnosis.json"]
    printed = command("diagnose", tiny_encoder_dir, *arguments, "--json", status=1)
    assert contract("diagnose", json.loads(printed)) == []
    assert contract("diagnose", read(tmp_path / "diagnosis.json")) == []


def test_recipes(contract):
    assert contract("recipes", json.loads(command("recipes", "--json"))) == []
    assert contract("recipes.dap", json.loads(command("recipes", "dap", "--json"))) == []


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_push(trained, contract, tmp_path, monkeypatch):
    release = shutil.copytree(trained[0], tmp_path / "release")
    with serve_hub() as hub:
        reach(hub, monkeypatch.setattr, tmp_path / "client")
        monkeypatch.setenv("HF_TOKEN", "hf_write")
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        assert contract("push", json.loads(command("push", release, "--repo", "acme/tiny", "--json"))) == []
