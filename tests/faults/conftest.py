"""Runs of a few steps, in this process or in child processes that may be killed."""

from __future__ import annotations

import copy
import hashlib
import os
import subprocess
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from metaphrase.checkpoints.folders import newest, tidy
from metaphrase.training.arguments import AlignmentTrainingArguments
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import Recipe
from metaphrase.training.trainer import AlignmentTrainer
from tests.conftest import small
from tests.faults.children import Child, die_before


@pytest.fixture
def disk(tmp_path):
    """Mount a file system of a given size in bytes, which is unmounted after the test."""
    folder = tmp_path / "disk"

    def mount(size, *options):
        again = ["remount"] if folder.is_mount() else []
        folder.mkdir(exist_ok=True)
        command = [
            "mount",
            "-t",
            "tmpfs",
            "-o",
            ",".join([*again, f"size={int(size)}", *options]),
            "tmpfs",
            str(folder),
        ]
        if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting a small file system requires root on Linux")
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", str(folder)], check=True)


SETTINGS = {
    "per_device_train_batch_size": 8,
    "max_steps": 4,
    "save_steps": 2,
    "logging_steps": 1,
    "learning_rate": 1e-3,
    "warmup_steps": 0,
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
}

_undisturbed: dict[str, tuple[str, int]] = {}


@pytest.fixture
def make_trainer(tiny_encoder, tmp_path, full_bitext):
    def make(folder="run", *, recipe="dap", dataset=None, callbacks=(), tiny_encoder=tiny_encoder, **options):
        torch.manual_seed(7)
        loss = AlignmentLoss(
            copy.deepcopy(tiny_encoder), small(Recipe.load(recipe)), max_length=24, languages=("de", "en")
        )
        args = AlignmentTrainingArguments(output_dir=str(tmp_path / folder), **{**SETTINGS, **options})
        dataset = Dataset.from_list(full_bitext) if dataset is None else dataset
        return AlignmentTrainer(
            model=loss.model, args=args, train_dataset=dataset, loss=loss, callbacks=list(callbacks)
        )

    return make


def digest(trainer) -> str:
    """Return the digest of all weights, heads and buffers."""
    found = hashlib.sha256()
    for name, value in sorted(trainer.loss.state_dict().items()):
        found.update(name.replace("model.module.", "model.").encode() + value.numpy().tobytes())
    return found.hexdigest()


@pytest.fixture
def run(make_trainer, tmp_path):
    """Train in a separate process, which resumes from the latest checkpoint if there is one."""

    def run(folder="run", *, before=lambda trainer: None, wait=True, log=None, **options):
        def work():
            trainer = make_trainer(folder, **options)
            output = Path(trainer.args.output_dir)
            before(trainer)
            tidy(output)
            trainer.train(resume_from_checkpoint=newest(output) is not None)
            (tmp_path / f"{folder}.digest").write_text(digest(trainer))

        (tmp_path / f"{folder}.digest").unlink(missing_ok=True)
        child = Child(work, tmp_path / f"{log or folder}.log")
        return child.wait() if wait else child

    return run


@pytest.fixture
def undisturbed(run, result, tmp_path):
    """Return the digest of an undisturbed run, and the number of file changes that it makes while keeping one checkpoint."""

    def undisturbed(recipe="dap"):
        if recipe not in _undisturbed:

            def before(trainer):
                count, train = die_before(0, tmp_path / "undisturbed"), trainer.train

                def counted(*args, **kwargs):
                    train(*args, **kwargs)
                    (tmp_path / "count").write_text(str(count()))

                trainer.train = counted

            status = run("undisturbed", before=before, recipe=recipe, save_total_limit=1)
            assert status == 0, (tmp_path / "undisturbed.log").read_text()
            _undisturbed[recipe] = result("undisturbed"), int((tmp_path / "count").read_text())
        return _undisturbed[recipe]

    return undisturbed


@pytest.fixture
def result(tmp_path):
    """Return the digest of a run's weights; fail if the run did not succeed."""

    def result(folder="run"):
        return (tmp_path / f"{folder}.digest").read_text()

    return result
