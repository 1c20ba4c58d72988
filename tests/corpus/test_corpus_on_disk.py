"""A corpus kept on disk is the corpus in memory: the same pairs under the same numbers, without their memory."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys

import pyarrow as pa
import pytest
from datasets import Dataset

import metaphrase.corpus.loading
import metaphrase.corpus.selection
from metaphrase.cli import main
from metaphrase.corpus import Cleaning, load_corpus
from metaphrase.exceptions import CorpusError, UsageError
from metaphrase.training.trainer import AlignmentTrainer
from tests.faults.children import Child, die_before
from tests.faults.conftest import digest


@pytest.fixture
def corpora(tmp_path):
    """Files of two languages with duplicates, faults, and optional columns in one of them."""
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [f"neno {i % 700}\tword {i % 700}" for i in range(1000)] + ["x\t", "…\t…"]
    (folder / "sw-en.train.tsv").write_text("source\ttarget\n" + "\n".join(rows) + "\n", encoding="utf-8")
    links = [
        json.dumps({"source": f"padam {i}", "target": f"word {i}", "alignment": "0-0 1-1", "source_bt": None})
        for i in range(50)
    ]
    (folder / "te-en.train.jsonl").write_text("\n".join(links) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def unread(monkeypatch):
    """Nothing may read a corpus from here on."""

    def forbid():
        def read_pairs(*args, **kwargs):
            raise AssertionError("The corpus was read again.")

        monkeypatch.setattr(metaphrase.corpus.selection, "read_pairs", read_pairs)

    return forbid


def assert_same(corpus, other):
    assert corpus.dataset.features == other.dataset.features
    assert corpus.dataset.to_list() == other.dataset.to_list()
    assert corpus.report.to_dict() == other.report.to_dict()
    assert corpus.files == other.files


@pytest.mark.parametrize("temperature", [None, 0.3])
@pytest.mark.parametrize("cleaning", [None, Cleaning(), Cleaning.dap()], ids=["none", "basic", "dap"])
def test_it_is_the_corpus_in_memory(corpora, tmp_path, tokenizer, unread, cleaning, temperature):
    settings = {"cleaning": cleaning, "tokenizer": tokenizer, "temperature": temperature}
    there = load_corpus(corpora, **settings)
    kept = load_corpus(corpora, on_disk=tmp_path / "kept", **settings)
    assert_same(kept, there)
    assert "alignment" in kept.dataset.column_names
    assert "source_bt" not in kept.dataset.column_names
    assert isinstance(kept.dataset, Dataset)
    (arrow,) = (tmp_path / "kept").glob("pairs-*.arrow")
    assert kept.dataset.cache_files[0]["filename"] == str(arrow)
    unread()
    assert_same(load_corpus(corpora, on_disk=tmp_path / "kept", **settings), there)


@pytest.mark.parametrize("change", ["file", "limit", "damage", "cut"])
def test_another_corpus_is_read_again(corpora, tmp_path, change):
    kept = tmp_path / "kept"
    load_corpus(corpora, on_disk=kept)
    settings = {"limit": 30} if change == "limit" else {}
    if change == "file":
        path = corpora / "te-en.train.jsonl"
        path.write_text(path.read_text().replace("word 7", "WORD 7"))
    elif change == "damage":
        next(kept.glob("pairs-*.json")).write_text("{")
    elif change == "cut":
        os.truncate(next(kept.glob("pairs-*.arrow")), 1000)
    assert_same(load_corpus(corpora, on_disk=kept, **settings), load_corpus(corpora, **settings))


@pytest.mark.slow
def test_processes_know_it_again(corpora, tmp_path, tokenizer):
    """The key does not depend on the order in which a process has its sets."""
    script = """
import logging, sys
from metaphrase.corpus import load_corpus
logging.basicConfig(level=logging.INFO, format="%(message)s")
load_corpus(sys.argv[1], languages=["te", "sw"], on_disk=sys.argv[2])
"""
    said = []
    for seed in ("1", "2"):
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", script, str(corpora), str(tmp_path / "kept")]
        said.append(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stderr)
    assert "Reusing the corpus" not in said[0]
    assert "Reusing the corpus" in said[1]


@pytest.mark.slow
def test_its_memory_is_not_the_process_s(tmp_path):
    """100 MB of text; of it the process holds a chunk or two in memory of its own."""
    line = "maziwa " * 70
    with (tmp_path / "sw-en.tsv").open("w") as file:
        file.write("source\ttarget\n")
        file.writelines(f"{i} {line}\t{line} {i}\n" for i in range(100_000))
    script = """
import sys
from metaphrase.corpus import Cleaning, load_corpus
def held():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) // 1024
used = held()
corpus = load_corpus(sys.argv[1], cleaning=Cleaning(duplicates=False), on_disk=sys.argv[2] or None)
print(held() - used, len(corpus.dataset))
"""
    used = {}
    for kept in ("", str(tmp_path / "kept")):
        command = [sys.executable, "-c", script, str(tmp_path / "sw-en.tsv"), kept]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        used[bool(kept)], pairs = map(int, done.stdout.split())
        assert pairs == 100_000
    assert used[False] > 100
    assert used[True] < used[False] / 2


@pytest.mark.long
def test_a_killed_reading_is_begun_again(corpora, tmp_path, monkeypatch, fault):
    """Between any two chunks of pairs, and before every change to the folder."""
    monkeypatch.setattr(metaphrase.corpus.loading, "_CHUNK", 100)
    there, read, tried = load_corpus(corpora), metaphrase.corpus.loading.select_rows, 0

    def killed(kept, *, rows=None, change=0):
        def rows_until(*args):
            for number, row in enumerate(read(*args)):
                if number == rows:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield row

        def work():
            metaphrase.corpus.loading.select_rows = rows_until
            die_before(change, kept)
            load_corpus(corpora, on_disk=kept)

        return Child(work, tmp_path / "log").wait() == -signal.SIGKILL

    places = [{"rows": rows} for rows in range(0, 750, 150)] + [{"change": change} for change in range(1, 30)]
    for number, place in enumerate(places):
        kept = tmp_path / f"kept-{number}"
        if not killed(kept, **place):
            break
        assert_same(load_corpus(corpora, on_disk=kept), there)
        tried += 1
    assert tried >= 9
    fault("A1", "kill -9 while a corpus is written to disk", tried=tried, survived=tried)


def test_nothing_is_left_where_nothing_was_kept(tmp_path):
    (tmp_path / "sw-en.tsv").write_text("source\ttarget\n…\t…\n", encoding="utf-8")
    with pytest.raises(CorpusError, match=r"No pair of .* was kept"):
        load_corpus(tmp_path / "sw-en.tsv", on_disk=tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_a_stream_is_not_kept(corpora, tmp_path):
    with pytest.raises(UsageError, match="`streaming` and `on_disk`"):
        load_corpus(corpora, streaming=True, on_disk=tmp_path / "kept")


@pytest.mark.long
def test_training_goes_on_at_its_place_without_reading(
    tiny_encoder_dir, corpora, tmp_path, unread, caplog, monkeypatch, fault
):
    """The same weights as in memory; the resumed run opens the file and enters the pass where it was."""
    command = ["train", "--model", str(tiny_encoder_dir), "--recipe", "tr", "--max_steps", "6", "--save_steps", "4"]
    command += ["--per_device_train_batch_size", "8", "--report_to", "none", "--use_cpu", "--corpus", str(corpora)]
    weights = {}
    train = AlignmentTrainer.train

    def noted(trainer, *args, **kwargs):
        result = train(trainer, *args, **kwargs)
        weights[len(weights)] = digest(trainer)
        return result

    monkeypatch.setattr(AlignmentTrainer, "train", noted)
    assert main([*command, "--output_dir", str(tmp_path / "memory")]) == 0
    command += ["--on_disk", "--output_dir", str(tmp_path / "disk")]
    assert main(command) == 0
    unread()
    last = tmp_path / "disk" / "checkpoint-4"
    shutil.rmtree(last.with_name("checkpoint-6"))
    with caplog.at_level(logging.INFO, "metaphrase"):
        assert main([*command, "--resume_from_checkpoint", str(last)]) == 0
    assert "Reusing the corpus" in caplog.text
    assert weights[0] == weights[1]
    fault("A4", "resume on an on-disk corpus", tried=1, survived=weights[1] == weights[2])


def test_each_choice_of_languages_of_a_file_is_kept_apart(tmp_path):
    """The file is the same; a corpus of another language must not be taken for it."""
    rows = "".join(f"neno {at}\tword {at}\t{('sw', 'te', 'fi')[at % 3]}\n" for at in range(30))
    (tmp_path / "pairs.tsv").write_text("source\ttarget\tsource_lang\n" + rows, encoding="utf-8")
    for languages in (["sw"], ["te"], ["sw", "te"], ["sw", "fi"], ["sw"]):
        kept = load_corpus(tmp_path / "pairs.tsv", languages=languages, on_disk=tmp_path / "kept")
        assert set(kept.dataset["source_lang"]) == set(languages)
    assert len(list((tmp_path / "kept").glob("pairs-*.arrow"))) == 4


def test_a_corpus_that_lost_its_last_chunk_is_read_again(corpora, tmp_path, monkeypatch):
    """A stream of Arrow that ends between two chunks can be read."""
    monkeypatch.setattr(metaphrase.corpus.loading, "_CHUNK", 100)
    there, kept = load_corpus(corpora), tmp_path / "kept"
    load_corpus(corpora, on_disk=kept)
    (arrow,) = kept.glob("pairs-*.arrow")
    with pa.OSFile(str(arrow)) as file:
        reader = pa.ipc.open_stream(file)
        reader.read_next_batch()
        end = file.tell()
    os.truncate(arrow, end)
    assert len(Dataset.from_file(str(arrow))) == 100
    assert_same(load_corpus(corpora, on_disk=kept), there)
