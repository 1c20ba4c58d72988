import shutil
import signal

import pytest
from transformers import TrainerCallback

from metaphrase.checkpoints.folders import MANIFEST, checkpoint_folders, verify
from metaphrase.cli import main
from metaphrase.exceptions import CheckpointError
from metaphrase.io.outputs import MARK
from tests.faults.children import die_before, limit_files


class At(TrainerCallback):
    """Does something at the end of a step, or before its checkpoint."""

    def __init__(self, step, work):
        self.step, self.work = step, work

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.work()


@pytest.mark.long
def test_a_run_killed_anywhere_goes_on_to_the_same_weights(run, result, undisturbed, tmp_path, fault):
    """A sample of what the slow sweep does at every operation."""
    whole, total = undisturbed()
    assert total > 60
    chosen = [total // 3, total - 3]
    survived = sum(killed_and_resumed(run, result, tmp_path, k, save_total_limit=1) == whole for k in chosen)
    fault("A1", "kill -9 at some writes of a run with two checkpoints", tried=len(chosen), survived=survived)


def killed_and_resumed(run, result, tmp_path, operation, **options):
    folder = f"killed-{operation}"
    status = run(folder, before=lambda trainer: die_before(operation, tmp_path / folder), **options)
    assert status == -signal.SIGKILL, (tmp_path / f"{folder}.log").read_text()
    status = run(folder, **options)
    assert status == 0, (tmp_path / f"{folder}.log").read_text()
    for checkpoint in checkpoint_folders(tmp_path / folder):
        verify(checkpoint)
    assert [path.name for path in (tmp_path / folder).iterdir() if path.name.startswith("_")] == [MARK]
    shutil.rmtree(tmp_path / folder)
    return result(folder)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("recipe", ["dap", "ppa"])
def test_a_run_killed_at_every_write_goes_on_to_the_same_weights(run, result, undisturbed, tmp_path, fault, recipe):
    options = {"recipe": recipe, "save_total_limit": 1}
    whole, total = undisturbed(recipe)
    for k in range(1, total + 1):
        assert killed_and_resumed(run, result, tmp_path, k, **options) == whole, f"write {k} of {total}"
    fault("A1", f"kill -9 at every write of a run with two checkpoints ({recipe})", tried=total, survived=total)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_that_dies_in_the_middle_of_a_file_goes_on_to_the_same_weights(run, result, tmp_path, fault):
    assert run("whole") == 0
    sizes = {path.stat().st_size for path in (tmp_path / "whole" / "checkpoint-4").rglob("*") if path.is_file()}
    limits = sorted({limit for size in sizes if size > 30_000 for limit in (size // 3, size // 2, size - 1)})
    survived = 0
    for limit in limits:
        folder = f"cut-{limit}"
        status = run(folder, callbacks=[At(3, lambda limit=limit: limit_files(limit, die=True))])
        assert status == -signal.SIGXFSZ, (tmp_path / f"{folder}.log").read_text()
        assert [path.name for path in checkpoint_folders(tmp_path / folder)] == ["checkpoint-2"]
        assert run(folder) == 0
        survived += result(folder) == result("whole")
        shutil.rmtree(tmp_path / folder)
    fault("A1", "process dies while writing a checkpoint file", tried=len(limits), survived=survived)


@pytest.mark.long
def test_a_full_disk_leaves_the_checkpoint_before(run, result, undisturbed, tmp_path, fault):
    survived, limits = 0, (150_000,)
    for limit in limits:
        folder = f"full-{limit}"
        status = run(folder, callbacks=[At(3, lambda limit=limit: limit_files(limit, die=False))])
        said = (tmp_path / f"{folder}.log").read_text()
        assert status == 70
        assert "checkpoint-4 could not be written" in said
        assert f"The last valid checkpoint is {tmp_path / folder / 'checkpoint-2'}" in said
        assert not (tmp_path / folder / "_partial").exists()
        verify(tmp_path / folder / "checkpoint-2")
        assert run(folder) == 0
        survived += result(folder) == undisturbed()[0]
    fault("A2", "no space for a checkpoint (file size limit)", tried=len(limits), survived=survived)


@pytest.mark.slow
def test_a_small_disk(run, result, tmp_path, disk, fault):
    assert run("whole") == 0
    used = sum(path.stat().st_size for path in (tmp_path / "whole" / "checkpoint-4").rglob("*") if path.is_file())
    folder = disk(1.6 * used)
    assert run("disk/run", log="small") == 70
    assert "could not be written" in (tmp_path / "small.log").read_text()
    verify(folder / "run" / "checkpoint-2")
    disk(100 << 20)
    assert run("disk/run", log="grown") == 0
    same = result("disk/run") == result("whole")
    fault("A2", "disk full after the first checkpoint", tried=1, survived=same)


def test_a_disk_without_room_for_the_weights_is_noticed_before_the_first_step(make_trainer, disk, fault):
    folder = disk(100 << 10)
    trainer = make_trainer("disk/run")
    with pytest.raises(CheckpointError, match=r"run has 0\.1 MB free, and a checkpoint needs about .*MB\. Free"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert [path.name for path in (folder / "run").iterdir()] == [MARK]
    fault("A2", "no space for the weights, before the first step", tried=1, survived=1)


def test_a_disk_that_is_read_only_is_refused_at_the_start(tiny_encoder_dir, bitext_path, disk, capsys, fault):
    folder = disk(1 << 20, "ro")
    command = [
        "train",
        "--model",
        str(tiny_encoder_dir),
        "--corpus",
        str(bitext_path),
        "--max_steps",
        "1",
        "--use_cpu",
    ]
    refused = 0
    for output in (folder, folder / "out"):
        assert main([*command, "--report_to", "none", "--output_dir", str(output)]) == 2
        said = capsys.readouterr().err
        refused += f"train: The output folder {output} is not writable: Read-only file system. Choose" in said
        assert "Traceback" not in said
    fault("A8", "metaphrase train on a read-only disk", tried=2, survived=refused)


def test_a_manifest_is_the_last_file(run, tmp_path):
    assert run() == 0
    checkpoint = tmp_path / "run" / "checkpoint-4"
    latest = max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_mtime_ns)
    assert latest.name == MANIFEST
