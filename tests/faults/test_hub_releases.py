"""Releases into folders that are disks of their own, that lie where nothing can be written, and by processes that die."""

from __future__ import annotations

import copy
import gc
import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from metaphrase.exceptions import CheckpointError, StorageError
from metaphrase.publishing.hub import push
from metaphrase.publishing.release import release, verify
from tests.faults.children import Child, die_before, holder

TEXTS = ["the dog sleeps", "der Hund schläft tief und fest"]


@pytest.fixture
def disk(disk):
    """The same, which no model holds any more at the end."""
    yield disk
    gc.collect()


@pytest.fixture
def again(tiny_encoder):
    """The same encoder with other weights."""
    model = copy.deepcopy(tiny_encoder)
    with torch.no_grad():
        model[0].auto_model.embeddings.word_embeddings.weight.mul_(2)
    return model


def test_an_output_folder_that_is_a_mount_point(tiny_encoder, again, disk, fault):
    folder = disk(20 << 20)
    for model in (tiny_encoder, again):
        release(model, folder, recipe=None)
        assert np.array_equal(SentenceTransformer(str(folder), device="cpu").encode(TEXTS), model.encode(TEXTS))
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert not [path.name for path in folder.iterdir() if path.name.startswith(("_", "."))]
    fault("A8", "two releases to a folder that is a mount point", tried=2, survived=2)


def test_a_parent_that_cannot_be_written_to(tiny_encoder, again, disk, fault):
    parent = disk(1 << 20)
    folder = parent / "out"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(folder)], check=True)
    try:
        disk(1 << 20, "ro")
        with pytest.raises(OSError, match="Read-only"):
            (parent / "beside").mkdir()
        for model in (tiny_encoder, again):
            release(model, folder, recipe=None)
        assert verify(folder, device="cpu") == 0
    finally:
        gc.collect()
        subprocess.run(["umount", str(folder)], check=True)
    fault("A8", "release to a folder with a read-only parent", tried=2, survived=2)


def test_a_folder_that_cannot_be_written_to_is_told(tiny_encoder, disk, fault):
    folder = disk(20 << 20)
    release(tiny_encoder, folder, recipe=None)
    disk(20 << 20, "ro")
    with pytest.raises(CheckpointError, match=r"The output folder .* is not writable: Read-only file system"):
        release(tiny_encoder, folder, recipe=None)
    assert verify(folder, device="cpu") == 0
    fault("A8", "release to a read-only folder", tried=1, survived=1)


def test_no_space_for_the_copy_that_is_pushed(tiny_encoder, tmp_path, disk, monkeypatch, fault):
    folder = release(tiny_encoder, tmp_path / "out", recipe=None)
    monkeypatch.setattr(tempfile, "tempdir", str(disk(64 << 10)))
    with pytest.raises(
        StorageError, match=r"/disk has no space for a copy of \S+/out. Set TMPDIR to a folder with more"
    ):
        push(folder, "acme/tiny")
    assert list((tmp_path / "disk").iterdir()) == []
    fault("A2", "no space for the copy of a release", tried=1, survived=1)


def test_a_folder_that_another_process_writes_to_is_refused(tiny_encoder, tmp_path, fault):
    folder = release(tiny_encoder, tmp_path / "out", recipe=None)
    child = holder(folder, tmp_path / "log")
    with pytest.raises(CheckpointError, match=rf"is in use by process {child.pid}"):
        release(tiny_encoder, folder, recipe=None)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert verify(folder, device="cpu") == 0
    fault("A7", "release to a folder in use by another process", tried=1, survived=1)


@pytest.mark.slow
def test_killed_at_every_write(tiny_encoder, again, tmp_path, fault):
    """The folder gives the old model, or the new one, or refuses to load; and the next release is whole."""
    old = release(tiny_encoder, tmp_path / "old", recipe=None)
    models = {name: model.encode(TEXTS) for name, model in (("old", tiny_encoder), ("new", again))}
    at, seen = 0, []
    while True:
        at += 1
        folder = shutil.copytree(old, tmp_path / f"run-{at}")

        def work(at=at, folder=folder):
            die_before(at, folder)
            release(again, folder, recipe=None)

        child = Child(work, tmp_path / "log")
        status = child.wait()
        found = "none"
        with suppress(OSError, ValueError):
            loaded = SentenceTransformer(str(folder), device="cpu", local_files_only=True).encode(TEXTS)
            (found,) = (name for name, embeddings in models.items() if np.array_equal(loaded, embeddings))
        seen.append(found)
        if status == 0:
            break
        assert status == -signal.SIGKILL, child.said()
        release(again, folder, recipe=None)
        assert verify(folder, device="cpu") == 0
        assert not [path.name for path in folder.iterdir() if path.name.startswith(("_", "."))]
        shutil.rmtree(folder)
    assert list(dict.fromkeys(seen)) == ["old", "none", "new"]
    assert seen == sorted(seen, key=["old", "none", "new"].index)
    fault("A1", "kill -9 at every write of a release over an earlier one", tried=at - 1, survived=at - 1)
