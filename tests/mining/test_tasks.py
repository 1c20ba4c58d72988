"""Filtering and encoding as tasks of datatrove, their storage, and their workers."""

import json
import os
import time
from pathlib import Path

import dill
import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from datasets import load_dataset
from datatrove.pipeline.base import PipelineStep

from metaphrase.cli import main
from metaphrase.corpus import load_corpus
from metaphrase.encoders.loading import load_encoder
from metaphrase.exceptions import StorageError
from metaphrase.io.work_folders import open_work_folder
from metaphrase.mining import encoding, workflow
from metaphrase.mining.encoding import encode_file
from metaphrase.mining.engine import LocalExecutor, default_workers
from metaphrase.mining.options import EngineOptions, SearchOptions
from metaphrase.mining.search import unit_rows
from tests.cli.test_mine import texts  # noqa: F401
from tests.mining.test_engine import LOCAL, ROOT, shards, submitted  # noqa: F401


@pytest.fixture
def pairs(bitext, tmp_path):
    """Pairs of two languages, with repeated sentences."""
    rows = [{**row, "source_lang": "de" if at % 3 else "nl"} for at, row in enumerate([*bitext, *bitext[:5]])]
    lines = ["\t".join([row["source"], row["target"], row["source_lang"], "en"]) for row in rows]
    path = tmp_path / "pairs.tsv"
    path.write_text("\n".join(["source\ttarget\tsource_lang\ttarget_lang", *lines]) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def filtered(pairs, tiny_encoder_dir, tmp_path):
    """Filters with further options, and returns the bytes of the pairs."""
    words = [
        "filter",
        str(pairs),
        "--model",
        str(tiny_encoder_dir),
        "--shard_size",
        "4",
        "--k",
        "2",
        "--batch_size",
        "4",
    ]

    def run(*options):
        output = tmp_path / "scored.jsonl"
        assert main([*words, "-o", str(output), *map(str, options)]) == 0
        return output.read_bytes() if output.exists() else None

    return run


@pytest.mark.parametrize(
    ("options", "stages"),
    [
        ([], {"embed", "search"}),
        (["--score", "cosine"], {"embed"}),
        pytest.param(["--index", "ivf", "--negatives", "2"], {"embed", "index", "search"}, marks=pytest.mark.long),
    ],
)
def test_scores_do_not_depend_on_the_tasks(filtered, tmp_path, options, stages):
    one = filtered(*LOCAL, *options, "--storage", tmp_path / "1")
    made = shards(tmp_path / "1")
    assert {path.parts[0] for path in made} == {"de-en", "nl-en"}
    assert filtered(*LOCAL, *options, "--tasks", 5, "--storage", tmp_path / "5") == one
    assert shards(tmp_path / "5") == made
    assert {path.parent.parent.name.partition("-")[0] for path in (tmp_path / "5").rglob("completions/*")} == stages
    memory = fsspec.filesystem("memory")
    assert filtered(*LOCAL, *options, "--tasks", 3, "--storage", "memory://filter") == one
    assert {path: memory.cat(f"/filter/{path}") for path in made} == made
    memory.rm("/filter", recursive=True)
    plain = filtered(*options)  # as many threads as there are
    assert len(plain.splitlines()) == len(one.splitlines()) > 20
    if os.environ["OMP_NUM_THREADS"] == "1":
        assert plain == one
    assert not (tmp_path / "scored.jsonl.partial").exists()


def test_a_kept_storage_serves_other_scores(filtered, tmp_path):
    storage = [*LOCAL, "--tasks", 2, "--storage", tmp_path / "storage"]
    filtered(*storage, "--score", "cosine")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "storage").rglob("*.npy")}
    assert filtered(*storage) == filtered(*LOCAL)
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_storage_belongs_to_the_columns(filtered, tmp_path, capsys):
    storage = [*LOCAL, "--storage", tmp_path / "storage"]
    filtered(*storage, "--source_column", "source", "--target_column", "target")
    with pytest.raises(AssertionError):  # exit status 2
        filtered(*storage, "--source_column", "target", "--target_column", "source")
    assert "holds the work of another command" in " ".join(capsys.readouterr().err.split())


def test_the_last_slurm_job_writes_the_scores(filtered, submitted, tmp_path, capsys):  # noqa: F811
    storage = ["--storage", str(tmp_path / "storage"), "--tasks", "2"]
    expected = filtered(*LOCAL, *storage)
    (tmp_path / "scored.jsonl").unlink()
    capsys.readouterr()
    slurm = ["--executor", "slurm", "--executor_args", "partition=cpu", "time=1:00:00"]
    assert filtered(*slurm, *storage, "--json") is None
    assert json.loads(capsys.readouterr().out) == {"output": str(tmp_path / "scored.jsonl"), "submitted": True}
    (job,) = [script for script in submitted() if "logs/finish/executor.pik" in script]
    assert "--array=0-0" in job
    with (tmp_path / "storage" / "logs" / "finish" / "executor.pik").open("rb") as file:
        finish = dill.load(file).pipeline[0]
    finish(None, 0, 1)
    assert (tmp_path / "scored.jsonl").read_bytes() == expected


def test_a_text_is_encoded(texts, tiny_encoder_dir, tmp_path):  # noqa: F811
    search = SearchOptions(str(tiny_encoder_dir), shard_size=7, batch_size=4)
    output = str(tmp_path / "rows.npy")
    engines = [
        None,
        EngineOptions(executor="local", tasks=3, workers=1),
        EngineOptions(executor="local", tasks=4, workers=1, storage="memory://encode"),
    ]
    found = []
    for engine in engines:
        rows, lines = encode_file(texts[0], output, search, engine)
        found.append(np.load(rows, mmap_mode="r").copy())
        sentences = lines.read_text(encoding="utf-8").splitlines()
        assert not Path(f"{output}.partial").exists()
    text = Path(texts[0]).read_text(encoding="utf-8").splitlines()
    assert sentences == [line for line in dict.fromkeys(text) if line]
    expected = unit_rows(load_encoder(tiny_encoder_dir).encode(sentences))
    np.testing.assert_allclose(found[1], expected, atol=1e-5)
    assert found[1].tobytes() == found[2].tobytes()
    if os.environ["OMP_NUM_THREADS"] == "1":
        assert found[0].tobytes() == found[1].tobytes()
    fsspec.filesystem("memory").rm("/encode", recursive=True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="requires a device that is always full")
@pytest.mark.parametrize("name", [".rows.npy.part", "rows.npy.partial/text/.ends.npy.{pid}.part"])
def test_a_full_disk_is_an_error(texts, tiny_encoder_dir, tmp_path, name):  # noqa: F811
    search, output = SearchOptions(str(tiny_encoder_dir)), str(tmp_path / "rows.npy")
    full = tmp_path / name.format(pid=os.getpid())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            encoding,
            "open_work_folder",
            lambda *args: (open_work_folder(*args), full.parent.mkdir(exist_ok=True), full.symlink_to("/dev/full")),
        )
        with pytest.raises(StorageError, match="the disk is full"):
            encode_file(texts[0], output, search)
    rows, _ = encode_file(texts[0], output, search)
    assert len(np.load(rows)) == 25


@pytest.mark.long
def test_mined_and_filtered_shards_are_streamed_in_training(texts, bitext, tiny_encoder_dir, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(workflow, "draw_histogram", lambda *args: [])
    shards = [tmp_path / "shards" / name for name in ("news.parquet", "web.parquet")]
    (tmp_path / "web.tsv").write_text(
        "".join(f"{row['source']}\t{row['target']}\n" for row in bitext), encoding="utf-8"
    )
    encoder = ["--model", str(tiny_encoder_dir)]
    assert main(["mine", *texts, *encoder, "-o", str(shards[0])]) == 0
    command = ["filter", str(tmp_path / "web.tsv"), "--source_lang", "de", "--score", "cosine", *encoder]
    assert main([*command, "-o", str(shards[1])]) == 0
    written = [(row["source"], row["target"]) for shard in shards for row in pq.read_table(shard).to_pylist()]
    for stream in (
        load_corpus(shards[0].parent, streaming=True, cleaning=None).dataset,
        load_dataset("parquet", data_files=[*map(str, shards)], split="train", streaming=True),
    ):
        assert stream.num_shards == 2
        assert [(row["source"], row["target"]) for row in stream] == written
    options = [
        "--corpus",
        str(shards[0].parent),
        "--streaming",
        "--max_steps",
        "2",
        "--per_device_train_batch_size",
        "8",
    ]
    options += ["--output_dir", str(tmp_path / "run"), "--use_cpu", "--report_to", "none"]
    assert main(["train", "--recipe", "tr", *encoder, *options]) == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["model"] == str(tiny_encoder_dir)


def test_the_name_of_a_storage_is_no_pattern(texts, tiny_encoder_dir, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(workflow, "draw_histogram", lambda *args: [])
    storage, output = tmp_path / "run[1]*", tmp_path / "mined.tsv"
    command = ["mine", *texts, "--model", str(tiny_encoder_dir), "-o", str(output), *LOCAL, "--storage", str(storage)]
    assert main(command) == 0
    assert len(shards(storage)) == 4
    assert output.stat().st_size > 0


def test_the_default_number_of_workers(monkeypatch):
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cores)})
        assert default_workers() == 1
    finally:
        os.sched_setaffinity(0, cores)
    monkeypatch.setenv("LOKY_MAX_CPU_COUNT", "1")  # a quota, as of a container
    assert default_workers() == 1
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert default_workers() == 3


class Visible(PipelineStep):
    """Notes the GPU that its process may use, and waits until there are two."""

    name, type = "visible", "Test"

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def run(self, data=None, rank=0, world_size=1):
        (self.folder / f"gpu {os.environ['CUDA_VISIBLE_DEVICES']}").touch()
        until = time.monotonic() + 60
        while len(list(self.folder.glob("gpu *"))) < 2 and time.monotonic() < until:
            time.sleep(0.05)


@pytest.mark.long
def test_each_worker_has_its_gpu(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)  # for workers
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7a")
    executor = LocalExecutor([Visible(tmp_path)], tasks=3, workers=2, logging_dir=str(tmp_path / "logs"))
    executor.run()
    assert sorted(path.name for path in tmp_path.glob("gpu *")) == ["gpu 5", "gpu GPU-7a"]
