"""Damaged parts of unfinished or repeated work: they are made again, or refused with the file and what to do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from datasets import Dataset

from metaphrase.aligners.linking import add_alignment
from metaphrase.checkpoints.folders import publish
from metaphrase.cli import main
from metaphrase.corpus import load_corpus
from metaphrase.evaluation.transfer.classification import finetune_classification
from metaphrase.exceptions import CheckpointError, DataError
from metaphrase.io.work_folders import read_part, write_part
from metaphrase.mining import workflow
from metaphrase.training.adaptation import PLAN, plan_of_checkpoints
from metaphrase.training.baseline import BASELINE, read_baseline
from tests.cli.test_mine import counting, embedder
from tests.conftest import mostly_slow
from tests.evaluation.transfer.conftest import nli, words  # noqa: F401 - fixtures
from tests.evaluation.transfer.test_running import arguments, options  # noqa: F401 - fixtures

#: What a damaged file may contain, made from its content.
DAMAGE = {
    "empty": lambda data: b"",
    "list": lambda data: b"[]",
    "null": lambda data: b"null",
    "nan": lambda data: b"NaN",
    "cut": lambda data: data[: len(data) // 2],
    "other keys": lambda data: b'{"a": 1, "digest": "0"}',
    "nested": lambda data: b"[" * 100_000,
    "one digit": lambda data: data.replace(b"1", b"2", 1) if data.lstrip()[:1] == b"{" else data[:-1],
}


@pytest.fixture(
    params=[
        pytest.param(name, marks=() if name in ("list", "cut", "one digit") else pytest.mark.slow) for name in DAMAGE
    ]
)
def damage(request):
    """Damage a file in one way."""
    return lambda path: path.write_bytes(DAMAGE[request.param](path.read_bytes()))


def of_measurement(content):
    """A result without durations."""
    if isinstance(content, dict):
        return {key: of_measurement(value) for key, value in content.items() if "seconds" not in key}
    return content


def test_a_part_is_read_as_it_was_written(tmp_path, damage, caplog, fault):
    path = tmp_path / "part.json"
    assert read_part(path) is None
    content = {"a": 1.5, 2: [float("nan")], "path": Path("x")}
    assert str(write_part(path, content)) == str(read_part(path)) == "{'a': 1.5, '2': [nan], 'path': 'x'}"
    assert caplog.text == ""
    damage(path)
    damaged = path.read_bytes()
    assert read_part(path) is None
    assert f"{path} is damaged (" in caplog.text
    assert path.read_bytes() == damaged  # it may be under version control, and the reader only a report
    write_part(path, content)
    assert read_part(path)["a"] == 1.5
    fault("I3", "a damaged part of an evaluation", tried=1, survived=1)


@pytest.mark.parametrize("suite", mostly_slow(["retrieval", "mteb"], ["retrieval"]))
def test_a_damaged_part_of_an_evaluation_is_measured_again(
    tmp_path, tiny_encoder_dir, bitext, capsys, caplog, damage, fault, suite
):
    (tmp_path / "data").mkdir()
    lines = "".join(f"{row['source']}\t{row['target']}\n" for row in bitext[:8])
    (tmp_path / "data" / "de-en.tsv").write_text(f"source\ttarget\n{lines}", encoding="utf-8")
    command = [
        "evaluate",
        str(tiny_encoder_dir),
        "--data",
        str(tmp_path / "data"),
        "--suite",
        suite,
        "--resamples",
        "20",
    ]
    command += ["--output_dir", str(tmp_path / "out"), "--json"]
    assert main(command) == 0
    first = json.loads(capsys.readouterr().out)
    parts = [
        path for path in (tmp_path / "out").rglob("*.json") if path.name not in ("results.json", "model_meta.json")
    ]
    assert len(parts) == (2 if suite == "mteb" else 1)
    for part in parts:
        damage(part)
    assert main(command) == 0
    again = json.loads(capsys.readouterr().out)
    assert of_measurement(again["scores"]) == of_measurement(first["scores"])
    assert all(f"{part} is damaged" in caplog.text for part in parts)
    fault("I3", "a damaged part of an evaluation", tried=len(parts), survived=len(parts))


@pytest.mark.parametrize(
    "name", mostly_slow(["results.json", "en/results.json", "settings.json"], ["results.json", "settings.json"])
)
def test_damaged_results_of_fine_tuning(options, tmp_path, damage, fault, name):  # noqa: F811
    first = finetune_classification(options, arguments(tmp_path, max_steps=2))
    if name != "results.json":
        (tmp_path / "results.json").unlink()
    damage(tmp_path / name)
    if name == "settings.json":
        with pytest.raises(DataError, match=r"settings\.json was damaged.*Delete .* to start over"):
            finetune_classification(options, arguments(tmp_path, max_steps=2))
    else:
        again = finetune_classification(options, arguments(tmp_path, max_steps=2))
        assert again["languages"] == first["languages"]
    fault("I3", "a damaged part of fine-tuning", tried=1, survived=1)


@pytest.mark.parametrize("index", mostly_slow(["exact", "hnsw"], ["exact"]))
def test_damaged_work_of_mining(tmp_path, tiny_encoder, bitext, monkeypatch, capsys, damage, fault, index):
    counting(tiny_encoder, embedder(bitext), monkeypatch)
    monkeypatch.setattr(workflow, "draw_histogram", lambda *args: [])
    texts = [tmp_path / "news.de", tmp_path / "news.en"]
    for path, side in zip(texts, ("source", "target"), strict=True):
        path.write_text("".join(f"{row[side]}\n" for row in bitext[:8]), encoding="utf-8")
    out = tmp_path / "out.tsv"
    command = [
        "mine",
        *map(str, texts),
        "-o",
        str(out),
        "--keep_work",
        "--shard_size",
        "4",
        "--k",
        "2",
        "--index",
        index,
    ]
    assert main(command) == 0
    first, work = out.read_text(), Path(f"{out}.partial")
    manifest = (work / "manifest.json").read_bytes()
    parts = [path for path in work.rglob("*") if path.is_file() and path.stat().st_size]
    assert {"000000.npy", "000001.npz", "sentences.json", "sentences.txt", "ends.npy", "manifest.json"} <= {
        p.name for p in parts
    }
    for part in parts:
        damage(part)
        assert main(command) == (2 if part.name == "manifest.json" else 0), part
        if part.name == "manifest.json":
            assert re.search("Delete|delete", capsys.readouterr().err)
            part.write_bytes(manifest)
        assert out.read_text() == first, part
    fault("I3", f"damaged work of mining ({index})", tried=len(parts), survived=len(parts))


def test_damaged_work_of_alignment(tmp_path, full_bitext, damage, fault):
    dataset = Dataset.from_list(full_bitext)
    settings = {"folder": tmp_path, "chunk_size": 8, "overwrite": True, "show_progress": False}
    first, _ = add_alignment(dataset, "fast_align", **settings)
    parts = sorted(tmp_path.glob("*.parquet"))
    for part in parts:
        damage(part)
        again, report = add_alignment(dataset, "fast_align", **settings)
        assert again[:] == first[:]
        assert report.total.pairs == len(dataset)
    fault("I3", "damaged work of word alignment", tried=len(parts), survived=len(parts))


def test_a_damaged_corpus_on_disk_is_read_again(tmp_path, bitext_path, damage, fault):
    first = load_corpus(bitext_path, on_disk=tmp_path)
    for suffix in ("json", "arrow"):
        (part,) = tmp_path.glob(f"pairs-*.{suffix}")
        damage(part)
        assert load_corpus(bitext_path, on_disk=tmp_path).dataset[:] == first.dataset[:]
    fault("I3", "a damaged corpus on disk", tried=2, survived=2)


def test_a_damaged_plan_of_an_adaptation_is_refused(tmp_path, damage, fault):
    (tmp_path / "_partial").mkdir()
    publish(tmp_path / "_partial", tmp_path / "checkpoint-2", {"step": 2})
    plan = {
        "batch_size": 16,
        "micro_batch_size": None,
        "max_steps": 4,
        "eval_steps": 1,
        "freeze_word_embeddings": True,
        "bf16": False,
    }
    plan |= {"learning_rate": 5e-5, "training_minutes": 1.0, "measuring_minutes": 1.0, "reasons": ["one"]}
    write_part(tmp_path / PLAN, {"asked": {"seed": 1}, "plan": plan})
    assert plan_of_checkpoints(tmp_path, {"seed": 1}).max_steps == 4
    damage(tmp_path / PLAN)
    with pytest.raises(CheckpointError, match=r"plan\.json, which .*, is missing or was damaged.*delete that folder"):
        plan_of_checkpoints(tmp_path, {"seed": 1})
    fault("I3", "a damaged plan of an adaptation", tried=1, survived=1)


def test_a_damaged_baseline_is_measured_again(tmp_path, damage, fault):
    write_part(tmp_path / BASELINE, {"subject": {"model": "1"}, "results": {"test udhr": {}}})
    assert read_baseline(tmp_path / BASELINE, {"model": "1"}) == {"test udhr": {}}
    damage(tmp_path / BASELINE)
    assert read_baseline(tmp_path / BASELINE, {"model": "1"}) == {}
    fault("I3", "a damaged part of an evaluation", tried=1, survived=1)


def test_damaged_results_of_earlier_commands_are_refused(
    tmp_path, tiny_encoder_dir, bitext_path, damage, capsys, fault
):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "de-en.tsv").write_bytes(bitext_path.read_bytes())
    (tmp_path / "run").mkdir()
    result, run = tmp_path / "results.json", tmp_path / "run" / "run.json"
    language = {"n": 1, "value": 1.0}
    scores = {"suite": "retrieval", "model": "x", "measure": "x", "languages": {"de": language}, "average": language}
    result.write_text(json.dumps({"scores": {"data": scores}, "parts": {"data": {}}}))
    run.write_text(json.dumps({"files": [{"languages": ["de"]}], "corpus": {"languages": ["de"]}}))
    damage(result)
    damage(run)
    evaluated = ["evaluate", str(tiny_encoder_dir), "--data", str(tmp_path / "data"), "--resamples", "9"]
    commands = [
        [*evaluated, "--output_dir", str(tmp_path / "out"), "--baseline", str(result)],
        ["report", str(run.parent), "--output_dir", str(tmp_path / "report")],
    ]
    for command in commands:
        assert main(command) == 2
        assert "Traceback" not in capsys.readouterr().err
    fault("I3", "a damaged result or run of an earlier command", tried=2, survived=2)
