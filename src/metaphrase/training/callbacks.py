"""Callbacks of the trainer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from metaphrase.evaluation.evaluator import is_fraction

if TYPE_CHECKING:
    from metaphrase.training.trainer import AlignmentTrainer

logger = logging.getLogger(__name__)

#: Maximum number of values in a line of the log.
_VALUES = 10
#: Values of the trainer that are not logged as text; neither are durations, which the progress bar shows.
_HIDDEN = ("epoch", "total_flos", "sequential_score", "eval_sequential_score")


class StepCallback(TrainerCallback):
    """Calls the trainer where the training loop has no method to override."""

    def __init__(self, trainer: AlignmentTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Run a skipped evaluation."""
        self.trainer.evaluate_pending()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Seed the epoch."""
        self.trainer.begin_epoch()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Finish the epoch; after a signal, without an evaluation."""
        if self.trainer.end_epoch(is_complete=not control.should_training_stop):
            control.should_evaluate = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Store the state before the step."""
        self.trainer.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Finish the step, and training if a signal was received."""
        if self.trainer.end_step(evaluation_due=control.should_evaluate):
            control.should_training_stop = control.should_save = True
            control.should_evaluate = False


class LoggingCallback(TrainerCallback):
    """Logs values that the trainer would print to stdout, which is reserved for results."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Log the trainer's values."""
        if state.is_local_process_zero and (line := log_line(logs or {}, state.global_step)):
            logger.info("%s", line)


class ReadableProgressCallback(ProgressCallback):
    """A progress bar, above which the trainer's values are lines of text instead of dictionaries."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write the trainer's values."""
        line = log_line(logs or {}, state.global_step)
        if state.is_world_process_zero and self.training_bar is not None and line:
            self.training_bar.write(line)


def log_readably(trainer: AlignmentTrainer) -> None:
    """Replace the callbacks of a trainer that print dictionaries."""
    for printer, readable in ((PrinterCallback, LoggingCallback), (ProgressCallback, ReadableProgressCallback)):
        if trainer.pop_callback(printer) is not None:
            trainer.add_callback(readable())


def log_line(logs: Mapping[str, Any], step: int) -> str:
    """The trainer's values at a step as a line of text, accuracies and guards in percent; of many values, the first ones.

    Guards follow the mean accuracy. Without values, the line is empty.

    >>> log_line({"loss": 1.23456, "learning_rate": 4e-05, "epoch": 0.5, "eval_runtime": 7.1, "total_flos": 0.0}, 10)
    'step 10, epoch 0.5: loss 1.235, learning rate 4e-05'
    >>> log_line({"train_runtime": 0.1, "epoch": 0.2}, 8)
    ''
    >>> log_line({"eval_guard_stsb": 0.95, "eval_dev_mean_accuracy": 0.8125, "eval_dev_sw_accuracy": 0.5}, 10)
    'step 10: dev mean accuracy 81.2 %, guard stsb 95.0 %, dev sw accuracy 50.0 %'
    """
    values = [
        f"{name.removeprefix('eval_').replace('_', ' ')} {_shown(name, value)}"
        for name, value in sorted(logs.items(), key=lambda item: _rank(item[0]))
        if name not in _HIDDEN and not name.endswith(("runtime", "_per_second"))
    ]
    if not values:
        return ""
    more = f", and {len(values) - _VALUES} more" if len(values) > _VALUES else ""
    epoch = f", epoch {logs['epoch']:.4g}" if "epoch" in logs else ""
    return f"step {step}{epoch}: {', '.join(values[:_VALUES])}{more}"


def _rank(name: str) -> int:
    """Place in a line of the log: guards follow the mean accuracy, other metrics the guards."""
    if name.startswith("eval_guard_"):
        return 1
    return 2 if name.startswith("eval_") and not name.endswith("mean_accuracy") else 0


def _shown(name: str, value: Any) -> str:
    """A value of the log; evaluators return accuracies and guards as fractions."""
    if not isinstance(value, float):
        return str(value)
    return f"{100 * value:.1f} %" if is_fraction(name) else f"{value:.4g}"
