"""Embeddings on disk: each text is encoded once, whatever happens to the files."""

import os
from pathlib import Path

import numpy as np
import pytest

from metaphrase.evaluation.encoding import StoredEncoder, shrink
from tests.faults.children import Child

#: The open files of a process, on Linux.
OPEN = Path("/proc/self/fd")


@pytest.fixture
def counted(tiny_encoder, monkeypatch):
    """The tiny encoder, and the texts that it encodes."""
    seen = []
    encode = tiny_encoder.encode
    monkeypatch.setattr(tiny_encoder, "encode", lambda texts, **to: seen.extend(texts) or encode(texts, **to))
    return tiny_encoder, seen


def test_a_later_process_encodes_nothing(counted, tmp_path):
    model, seen = counted
    first = StoredEncoder(model, tmp_path, "a" * 32).encode(["one", "two"], prompt="query: ")
    again = StoredEncoder(model, tmp_path, "a" * 32)
    np.testing.assert_array_equal(again.encode(["two", "one"], prompt="query: "), first[::-1])
    assert seen == ["one", "two"]
    again.encode(["two"], prompt="")  # another prompt, and then another encoder
    StoredEncoder(model, tmp_path, "b" * 32).encode(["two"], prompt="query: ")
    assert seen == ["one", "two", "two", "two"]


def test_damaged_embeddings_are_computed_again(counted, tmp_path, fault):
    model, seen = counted
    first = StoredEncoder(model, tmp_path, "a" * 32).encode(["one"])
    (path,) = tmp_path.rglob("*.npy")
    content = path.read_bytes()
    for damaged in (content[:-5], content[:-1] + bytes([content[-1] ^ 1]), b"", None):
        path.unlink()
        if damaged is not None:
            path.write_bytes(damaged)
        again = StoredEncoder(model, tmp_path, "a" * 32)
        np.testing.assert_array_equal(again.encode(["one"]), first)
        assert path.read_bytes() == content
    assert seen == ["one"] * 5
    fault("A6", "kept embeddings damaged or deleted", tried=4, survived=4)


def test_the_files_used_last_are_kept(counted, tmp_path):
    model, _ = counted
    StoredEncoder(model, tmp_path, "a" * 32).encode(["one"])
    (old,) = tmp_path.rglob("*.npy")
    os.utime(old, (1, 1))
    size = old.stat().st_size
    StoredEncoder(model, tmp_path, "b" * 32).encode(["two"])
    os.utime(next(tmp_path.glob("bbbb*/*.npy")), (2, 2))
    StoredEncoder(model, tmp_path, "a" * 32)  # reads the oldest file, which is now the newest
    StoredEncoder(model, tmp_path, "c" * 32, limit=2 * size).encode(["three"])
    assert {path.parent.name[0] for path in tmp_path.rglob("*.npy")} == {"a", "c"}
    shrink(tmp_path, 0)
    assert not list(tmp_path.rglob("*.npy"))


def test_values_that_are_not_finite_are_not_kept(counted, tmp_path):
    model, _ = counted
    stored = StoredEncoder(model, tmp_path, "a" * 32)
    stored.add(["one"], "", np.array([[np.nan, 1.0]], dtype=np.float32))
    assert not list(tmp_path.rglob("*.npy"))


def test_a_killed_writer_leaves_what_it_finished(counted, tmp_path, fault):
    """A process that dies within the second file leaves the first one and an unfinished file."""
    model, _ = counted

    def work() -> None:
        store, rows = StoredEncoder(model, tmp_path / "kept", "a" * 32), np.ones((1, 4), dtype=np.float32)
        store.add(["one"], "", rows)
        np.save = lambda file, table: (file.write(b"x" * 9), file.flush(), os._exit(9))
        store.add(["two"], "", rows)

    assert Child(work, tmp_path / "log").wait() == 9
    assert len(list(tmp_path.rglob("*.part"))) == 1
    assert StoredEncoder(model, tmp_path / "kept", "a" * 32).missing(["one", "two"]) == ["two"]
    fault("A1", "process dies while it keeps embeddings", tried=1, survived=1)


@pytest.mark.skipif(not OPEN.is_dir(), reason="counts open files")
def test_kept_files_are_not_kept_open(counted, tmp_path):
    model, seen = counted
    first = StoredEncoder(model, tmp_path, "a" * 32)
    rows = [first.encode([f"text {at}"]) for at in range(20)]
    before = len(list(OPEN.iterdir()))
    again = StoredEncoder(model, tmp_path, "a" * 32)
    assert len(list(OPEN.iterdir())) <= before + 2
    np.testing.assert_array_equal(again.encode(["text 3"]), rows[3])
    assert len(seen) == 20
