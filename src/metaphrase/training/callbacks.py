"""Callbacks of the trainer."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from metaphrase.training.trainer import AlignmentTrainer

logger = logging.getLogger(__name__)


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
        if state.is_local_process_zero:
            logger.info("%s", logs)
