"""Corpora that change while they are read: noticed, and the recorded digest is that of the text that was used."""

from __future__ import annotations

import hashlib
import os

import pytest
from transformers import TrainerCallback

from metaphrase.cli import main
from metaphrase.corpus import Cleaning, load_corpus
from metaphrase.corpus.monolingual import load_monolingual
from metaphrase.corpus.readers import read_pairs, read_parallel
from metaphrase.exceptions import CorpusError, MetaphraseError
from metaphrase.io.digests import PinnedFile
from tests.faults.test_fuzzing import FORMATS, written

CHANGED = "changed while it was in use"
PAIRS = [(f"neno la {at} " + "maji " * (at % 9), f"word {at} " + "water " * (at % 9)) for at in range(1500)]


def append(path):
    with path.open("ab") as file:
        file.write(b"neno\tword\n")


def replace(path):
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[:-2] + b"x\n")
    other.replace(path)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def overwrite(path):
    """As many other bytes, with the time of the last modification put back."""
    before, middle = path.stat(), path.stat().st_size // 2
    with path.open("r+b") as file:
        file.seek(middle)
        byte = file.read(1)
        file.seek(middle)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def remove(path):
    path.unlink()


CHANGES = (append, replace, truncate, overwrite, remove)


def touch(path):
    path.touch()
    path.chmod(0o600)


def corpus_of(path):
    return f"{path},{path.with_suffix('.en')}" if path.suffix == ".sw" else path


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_noticed(call) -> bool:
    try:
        call()
    except CorpusError as error:
        return CHANGED in str(error)
    return False


# ------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("kind", FORMATS)
def test_every_reader_notices_a_change(tmp_path, fault, kind):
    survived = 0
    for change in CHANGES:
        path = written(tmp_path, kind, PAIRS)
        rows = read_pairs(corpus_of(path))
        next(rows)
        change(path)
        survived += is_noticed(lambda rows=rows: list(rows))
        path.unlink(missing_ok=True)
    assert survived == len(CHANGES)
    fault("C11", f"a {kind} file changes while it is read", tried=len(CHANGES), survived=survived)


@pytest.mark.parametrize("limit", [None, 1000], ids=["whole", "limit"])
@pytest.mark.parametrize("kept", ["memory", "disk"])
def test_loading_notices_a_change(tmp_path, fault, kept, limit):
    """Changed from within, by the tokenizer that cleaning calls for each sentence."""
    survived = 0
    for change in CHANGES:
        path, calls = written(tmp_path, "tsv", PAIRS), []

        def tokenize(text, path=path, calls=calls, change=change):
            calls.append(text)
            if len(calls) == 500:
                change(path)
            return text.split()

        options = {"on_disk": tmp_path / change.__name__} if kept == "disk" else {}
        cleaning = Cleaning(tokenizer=tokenize, min_pieces=1)
        survived += is_noticed(lambda: load_corpus(path, cleaning=cleaning, limit=limit, **options))  # noqa: B023
        assert not list(tmp_path.glob("*/pairs.json"))
    fault("C11", f"a corpus changes while it is read into {kept}", tried=len(CHANGES), survived=survived)


@pytest.mark.parametrize("when", ["before", "within", "between"])
def test_a_stream_notices_a_change(tmp_path, fault, when):
    """Before its first pass, within a pass, and between two passes."""
    survived = 0
    for change in CHANGES:
        path = written(tmp_path, "tsv", PAIRS)
        stream = load_corpus(path, streaming=True)
        assert stream.files[0]["sha256"] == sha256(path)
        if when == "between":
            assert len(list(stream.dataset)) == len(PAIRS)
        rows = iter(stream.dataset)
        if when == "within":
            next(rows)
        change(path)
        survived += is_noticed(lambda rows=rows: list(rows))
    fault("C11", f"a stream's file changes, {when} its passes", tried=len(CHANGES), survived=survived)


def test_a_file_that_is_only_touched_is_still_the_corpus(tmp_path):
    path = written(tmp_path, "tsv", PAIRS)
    stream = load_corpus(path, streaming=True)
    rows = iter(stream.dataset)
    next(rows)
    touch(path)
    assert len(list(rows)) == len(PAIRS) - 1
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    assert len(list(stream.dataset)) == len(PAIRS)


def test_the_digest_is_that_of_the_text_that_was_read(tmp_path, fault):
    path = written(tmp_path, "tsv", PAIRS)
    digest = sha256(path)
    corpora = [load_corpus(path), load_corpus(path, streaming=True), load_corpus(path, on_disk=tmp_path / "disk")]
    overwrite(path)
    assert sha256(path) != digest
    survived = sum(corpus.files[0]["sha256"] == digest for corpus in corpora)
    again = load_corpus(path, on_disk=tmp_path / "disk")
    assert again.files[0]["sha256"] == sha256(path)
    fault("C11", "a corpus changes after it was read: the digest is that of its text", tried=3, survived=survived)


@pytest.mark.parametrize(("seconds", "is_trusted"), [(1, False), (3, True)])
def test_the_times_of_a_file_that_was_just_written_are_not_trusted(tmp_path, monkeypatch, seconds, is_trusted):
    """Another change within the resolution of the clock of the file system would leave them as they are."""
    path = written(tmp_path, "tsv", PAIRS[:9])
    now = path.stat().st_ctime_ns + seconds * 10**9
    monkeypatch.setattr("metaphrase.io.digests.time.time_ns", lambda: now)
    assert (PinnedFile.of(path).stamp is not None) == is_trusted


# ------------------------------------------------------------------------------------------------------------ commands


@pytest.fixture
def growing(tmp_path, monkeypatch):
    """A file that grows whenever its digest was computed."""
    path, pin = written(tmp_path, "tsv", 5 * PAIRS), PinnedFile.of

    def pin_and_grow(file):
        pinned = pin(file)
        append(path)
        return pinned

    monkeypatch.setattr(PinnedFile, "of", pin_and_grow)
    return path


@pytest.mark.parametrize("command", ["diagnose", "filter", "align", "mine", "train", "train --streaming"])
def test_a_command_notices_a_change(tmp_path, growing, tiny_encoder_dir, capsys, fault, command):
    name, *more = command.split()
    out, model = str(tmp_path / "out.tsv"), ["--model", str(tiny_encoder_dir)]
    mined = [str(growing), str(growing), "--source_column", "1", "--target_column", "2"]
    options = {
        "diagnose": ["--corpus", str(growing)],
        "filter": [str(growing), "-o", out, *model],
        "align": [str(growing), "-o", out],
        "mine": [*mined, "-o", out, "--source_lang", "sw", "--target_lang", "en", *model],
        "train": ["--corpus", str(growing), "--output_dir", out, "--max_steps", "2", "--use_cpu", *model, *more],
    }
    assert main([name, *options[name]]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out.tsv").is_file()
    fault("C11", f"a corpus grows during {command}", tried=1, survived=CHANGED in error and growing.name in error)


def test_monolingual_text_and_test_sets_notice_a_change(growing, fault):
    survived = is_noticed(lambda: load_monolingual(growing)) + is_noticed(lambda: read_parallel(growing))
    assert survived == 2
    fault("C11", "monolingual text and test sets grow while they are read", tried=2, survived=survived)


class ChangeAt(TrainerCallback):
    """Changes a file before a step of training."""

    def __init__(self, path, change, step):
        self.path, self.change, self.step = path, change, step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.change(self.path)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("steps", [3, 5], ids=["within-a-pass", "next-pass"])
def test_training_on_a_stream_notices_a_change(make_trainer, tmp_path, fault, steps, workers):
    """Whether training ends within the pass, or begins another."""
    changes = CHANGES if steps == 3 and not workers else CHANGES[:1]
    for change in changes:
        path = written(tmp_path, "tsv", PAIRS[:32])
        trainer = make_trainer(
            change.__name__,
            dataset=load_corpus(path, streaming=True).dataset,
            callbacks=[ChangeAt(path, change, 2)],
            max_steps=steps,
            dataloader_num_workers=workers,
        )
        with pytest.raises(MetaphraseError, match=CHANGED):
            trainer.train()
    fault("C11", "a stream's file changes during training", tried=len(changes), survived=len(changes))
