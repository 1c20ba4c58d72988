"""Callbacks of the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from metaphrase.training.trainer import AlignmentTrainer


class StepCallback(TrainerCallback):
    """Calls the trainer where the training loop has no method to override.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: AlignmentTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make up for a skipped evaluation."""
        self.trainer.evaluate_pending()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Seed the epoch."""
        self.trainer.begin_epoch()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remember the state before the step."""
        self.trainer.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Finish the step, and training if a signal was received."""
        if self.trainer.end_step(evaluation_due=control.should_evaluate):
            control.should_training_stop = control.should_save = True
            control.should_evaluate = False
