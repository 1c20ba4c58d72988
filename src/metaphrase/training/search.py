"""Hyperparameter search with the hook of transformers' trainer: every trial trains its own encoder and loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sentence_transformers import SentenceTransformer
from torch import nn
from transformers import Trainer, set_seed

from metaphrase.exceptions import UsageError
from metaphrase.modeling.collator import ParallelCollator
from metaphrase.modeling.encoding import unwrap
from metaphrase.publishing.card import AlignmentModelCardData
from metaphrase.training.arguments import check_arguments
from metaphrase.training.loss import AlignmentLoss


class HyperparameterSearchMixin:
    """Trainer mixin that builds a new encoder and a new loss for each trial. List it before the trainer class.

    ``hyperparameter_search`` requires a trainer that is made with ``model_init``, a function that returns an encoder, and
    with a function as ``loss`` that returns the loss of an encoder. Both are called before each training, so that trials
    share neither weights nor heads.
    """

    args: Any
    model: Any
    get_data_collator: Callable[..., Any]
    use_loss: Callable[[AlignmentLoss], None]
    _hp_search_setup: Callable[[Any], None]
    _make_loss: Callable[[SentenceTransformer], AlignmentLoss]
    _fresh: SentenceTransformer | None = None

    def build_trial(self, trial: Any = None) -> AlignmentLoss:
        """Build the encoder of a trial and its loss."""
        self._fresh = Trainer.call_model_init(self, trial)
        return check_loss(self._make_loss(self._fresh), self._fresh)

    def begin_trial(self, trial: Any) -> None:
        """Give the trainer the arguments, the encoder and the loss of a trial."""
        batch = self.args.effective_batch_size
        self._hp_search_setup(trial)  # the parent class does this again, after it has built the model
        if self.args.effective_batch_size != batch:
            self.args.divide_batch()
        set_seed(self.args.seed)
        loss = self.build_trial(trial)
        check_arguments(self.args, loss.objectives)
        self.model = loss.model.to(self.args.device)
        self.loss = loss.to(self.args.device)
        AlignmentModelCardData.adopt(loss.model, recipe=loss.recipe.to_dict())
        self.data_collator = self.get_data_collator(loss.model, self.args)
        self.use_loss(loss)

    def call_model_init(self, trial: Any = None) -> SentenceTransformer | None:
        """The encoder of the trial that has begun; parent classes call this method."""
        return self._fresh


def check_loss(loss: Any, model: Any = None) -> AlignmentLoss:
    """Refuse a loss that is not an AlignmentLoss, or that trains another encoder than `model`."""
    if not isinstance(loss, AlignmentLoss):
        raise UsageError(f"AlignmentTrainer requires an AlignmentLoss, but got {type(loss).__name__}.")
    if model is not None and unwrap(loss.model) is not unwrap(model):
        raise UsageError(
            "The loss belongs to another encoder than the one to train. Build it with the same object: "
            "AlignmentLoss(model, recipe)."
        )
    return loss


def check_loss_function(loss: Any, collator: Any = None) -> Callable[[SentenceTransformer], AlignmentLoss]:
    """Refuse a loss that belongs to one encoder, and a collator, which belongs to one loss."""
    if isinstance(loss, nn.Module) or not callable(loss):
        raise UsageError(
            "With model_init, every trial has its own encoder and requires its own loss: pass a function as `loss` that "
            "takes an encoder and returns its AlignmentLoss."
        )
    if collator is not None:
        raise UsageError(
            "With model_init, every trial builds the views of its own loss, so `data_collator` does not apply. Omit it; to "
            "use another class of collators, override `get_data_collator` of the trainer."
        )
    return loss


def check_collator(collator: Any, loss: AlignmentLoss) -> None:
    """Refuse a collator that does not build the views of the loss."""
    if not isinstance(collator, ParallelCollator):
        raise UsageError(
            f"`data_collator` must be a ParallelCollator, which builds the views of the loss, but is a "
            f"{type(collator).__name__}. Omit it."
        )
    if missing := {view.name for view in loss.views} - {view.name for view in collator.views}:
        raise UsageError(
            f"`data_collator` does not build the view {min(missing)!r}, which the loss reads. Pass it `loss.views`, or omit "
            "it."
        )
