import os
import signal

import pytest
from transformers import TrainerCallback

from metaphrase.checkpoints.folders import checkpoint_folders, newest, verify
from tests.conftest import mostly_slow
from tests.faults.scores import SETTINGS, scored
from tests.processes import run_python


class Send(TrainerCallback):
    """Sends this process a signal when a step begins."""

    def __init__(self, step, *numbers):
        self.step, self.numbers = step, numbers

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            for number in self.numbers:
                os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "status"), mostly_slow([(signal.SIGTERM, 143), (signal.SIGINT, 130)], [(signal.SIGTERM, 143)])
)
def test_a_signal_ends_the_step_with_a_checkpoint(run, result, undisturbed, tmp_path, fault, number, status):
    options = {"save_steps": 100}
    assert run("stopped", callbacks=[Send(3, number)], **options) == status
    said = (tmp_path / "stopped.log").read_text()
    assert f"{number.name}: stopping after this step, with a checkpoint" in said
    assert f"Stopped by {number.name} after step 3 of 4, with a checkpoint." in said
    assert [path.name for path in checkpoint_folders(tmp_path / "stopped")] == ["checkpoint-3"]
    assert run("stopped", **options) == 0
    fault("A3", f"{number.name} during a step", tried=1, survived=result("stopped") == undisturbed()[0])


def test_a_second_signal_ends_it_at_once(run, tmp_path, fault):
    assert run(callbacks=[Send(4, signal.SIGTERM, signal.SIGTERM)]) == -signal.SIGTERM
    fault(
        "A3",
        "a second signal",
        tried=1,
        survived=[p.name for p in checkpoint_folders(tmp_path / "run")] == ["checkpoint-2"],
    )


@pytest.mark.long
def test_a_signal_behind_a_checkpoint(run, result, undisturbed, tmp_path, fault):
    class Late(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            if state.global_step == 4:  # nothing is left to do but to exit
                os.kill(os.getpid(), signal.SIGTERM)

    assert run("stopped", callbacks=[Late()]) == 143
    assert run("stopped") == 0
    for checkpoint in checkpoint_folders(tmp_path / "stopped"):
        verify(checkpoint)
    fault("A3", "SIGTERM after the last step", tried=1, survived=result("stopped") == undisturbed()[0])


@pytest.mark.long
def test_a_signal_after_the_last_step_of_a_run_that_saves_nothing(run, result, undisturbed, tmp_path):
    class Late(TrainerCallback):
        sent = False

        def on_log(self, args, state, control, **kwargs):
            if state.global_step == 4 and not self.sent:
                self.sent = True
                os.kill(os.getpid(), signal.SIGTERM)

    assert run("stopped", callbacks=[Late()], save_strategy="no") == 143
    assert [path.name for path in checkpoint_folders(tmp_path / "stopped")] == ["checkpoint-4"]
    assert run("stopped") == 0
    assert result("stopped") == undisturbed()[0]


@pytest.mark.slow
def test_a_signal_by_epochs_writes_one_checkpoint(run, result, undisturbed, tmp_path):
    options = {"save_strategy": "epoch"}  # three steps an epoch
    assert run("stopped", callbacks=[Send(3, signal.SIGTERM)], **options) == 143
    assert [path.name for path in checkpoint_folders(tmp_path / "stopped")] == ["checkpoint-3"]
    assert run("stopped", **options) == 0
    assert result("stopped") == undisturbed()[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "scores"),
    [
        (5, {2: 3.0, 4: 2.0}),  # behind an evaluation that brought nothing
        # In a step that is to be evaluated: that is made up for.
        (6, {2: 3.0, 4: 2.0, 6: 1.0}),
        (6, {2: 1.0, 4: 2.0, 6: 3.0}),
        (8, {2: 3.0, 4: 2.0}),  # that is made up for, and ends the run
    ],
)
def test_what_came_after_the_best_checkpoint_stays(run, result, monkeypatch, tmp_path, fault, step, scores):
    last = tmp_path / "last"
    monkeypatch.setattr("tests.faults.conftest.AlignmentTrainer", scored(scores, last))
    assert run("whole", **SETTINGS) == 0, (tmp_path / "whole.log").read_text()
    whole = result("whole"), last.read_text(), kept(tmp_path / "whole")
    assert int(whole[1]) == max(scores, key=scores.get) + 6
    assert run("stopped", callbacks=[Send(step, signal.SIGTERM)], **SETTINGS) == 143
    assert newest(tmp_path / "stopped").name == f"checkpoint-{step}"
    assert "checkpoint-2" in kept(tmp_path / "stopped") or step == 6
    assert run("stopped", **SETTINGS) == 0, (tmp_path / "stopped.log").read_text()
    resumed = result("stopped"), last.read_text(), kept(tmp_path / "stopped")
    fault("A3", f"SIGTERM during step {step} with load_best_model_at_end", tried=1, survived=resumed == whole)


def kept(folder):
    return [path.name for path in checkpoint_folders(folder)]


@pytest.mark.slow
def test_a_run_killed_behind_its_last_evaluation_has_ended(run, result, monkeypatch, tmp_path, fault):
    class Die(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            if state.global_step == 8:
                os.kill(os.getpid(), signal.SIGKILL)

    last = tmp_path / "last"
    monkeypatch.setattr("tests.faults.conftest.AlignmentTrainer", scored({2: 1.0, 10: 2.0}, last))
    assert run("whole", **SETTINGS) == 0
    whole = result("whole"), last.read_text()
    assert whole[1] == "8"
    assert run("killed", callbacks=[Die()], **SETTINGS) == -signal.SIGKILL
    assert run("killed", **SETTINGS) == 0, (tmp_path / "killed.log").read_text()
    survived = (result("killed"), last.read_text()) == whole
    fault("A1", "kill -9 after early stopping", tried=1, survived=survived)


def test_handlers_are_given_back(make_trainer):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    make_trainer(max_steps=1).train()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.slow
def test_the_command_exits_with_143(tiny_encoder_dir, bitext_path, tmp_path, fault):
    command = ["-m", "tests.faults.stopped_command", "train", "--model", tiny_encoder_dir]
    options = [
        "--corpus",
        str(bitext_path),
        "--languages",
        "de",
        "--output_dir",
        str(tmp_path / "run"),
        "--recipe",
        "dap",
    ]
    small = ["--max_length", "24", "--max_steps", "5", "--per_device_train_batch_size", "8", "--use_cpu"]
    done = run_python(*command, *options, *small, "--report_to", "none")
    fault("A3", "SIGTERM to the command", tried=1, survived=done.returncode == 143)
    assert "Resume with --resume_from_checkpoint true" in done.stderr
    assert "Traceback" not in done.stderr
    verify(tmp_path / "run" / "checkpoint-2")
