"""A run that is killed and resumed ends with the bytes of a run that was not."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from metaphrase.cli import main
from tests.contracts.conftest import command
from tests.faults.children import Child

STEPS, KILLED_AFTER = 10, 4


def weights(output: Path) -> dict[str, bytes]:
    """The released encoder, and all weights of the last checkpoint."""
    files = [output / "model.safetensors", *sorted((output / f"checkpoint-{STEPS}").rglob("*.safetensors"))]
    return {str(path.relative_to(output)): path.read_bytes() for path in files}


def killed_after(options: list[str], checkpoint: Path, log: Path) -> None:
    """Run a command in another process, and kill it once a checkpoint is there."""
    child = Child(lambda: main(options), log)
    ends = time.monotonic() + 120
    while not checkpoint.exists() and time.monotonic() < ends:
        time.sleep(0.002)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL, child.said()


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        pytest.param("dap", {}, id="dap"),
        pytest.param("ppa", {}, id="ppa", marks=pytest.mark.slow),
        pytest.param("dap", {"streaming": "true"}, id="dap-streaming", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_resumes_bit_exactly(training, tmp_path, recipe, more):
    more = {"max_steps": STEPS, "save_steps": KILLED_AFTER, "save_total_limit": 2, **more}
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    command(*training(whole, recipe, **more))
    again = training(resumed, recipe, **more)
    killed_after(again, resumed / f"checkpoint-{KILLED_AFTER}", tmp_path / "log")
    assert not (resumed / "model.safetensors").exists()
    for folder in resumed.glob("checkpoint-*"):  # the run may have come further before it died
        if folder.name != f"checkpoint-{KILLED_AFTER}":
            shutil.rmtree(folder)
    command(*again, "--resume_from_checkpoint", "true")
    expected = weights(whole)
    assert len(expected) >= 3  # a release, an encoder, heads
    assert weights(resumed) == expected
