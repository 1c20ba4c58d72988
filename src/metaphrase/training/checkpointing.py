"""Saving and resuming a training run: everything that a checkpoint contains and how it is restored."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import IterableDataset
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from transformers import TrainerState
from transformers.optimization import GreedyLR
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import IntervalStrategy

from metaphrase.checkpoints.folders import HEADS, TRAINING_ARGS, differences, read_manifest, step_of
from metaphrase.checkpoints.saving import AtomicCheckpointMixin, errors_of
from metaphrase.encoders.adapters import ADAPTER, has_adapter, load_weights, save_adapter, shared_copy
from metaphrase.encoders.loading import load_encoder
from metaphrase.exceptions import CheckpointError, UsageError
from metaphrase.training.fault_tolerance import GracefulShutdown, StepGuard
from metaphrase.training.heads import check_same_state, restore_heads
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.resuming import (
    DataPosition,
    RunFacts,
    choose_checkpoint,
    digest_of,
    kind_of_optimizer,
    verify_best,
)

logger = logging.getLogger(__name__)

#: Settings of optimisers that a resumed run takes from its arguments.
HYPERPARAMETERS = {"initial_lr", "weight_decay", "betas", "eps", "momentum"}

#: Schedules that follow a metric, by default one that should fall.
ADAPTIVE = ("reduce_lr_on_plateau", "greedy")

#: Attributes of schedules that a resumed run takes from the checkpoint. Each kind of schedule has a different subset.
PROGRESS = {
    "last_epoch",
    "best",
    "num_bad_epochs",
    "num_good_epochs",
    "cooldown_counter",
    "warmup_counter",
    "reset_start",
}


class ResumeMixin(AtomicCheckpointMixin):
    """Trainer mixin: a resumed run ends with the same weights as an uninterrupted one. List it before the trainer class.

    In addition to transformers' files, a checkpoint contains the heads, the training arguments as JSON, and a manifest with
    the position in the data and the counters of skipped steps.
    """

    alignment_loss: AlignmentLoss
    model: Any
    args: Any
    optimizer: Any
    lr_scheduler: Any
    dev_digests: Mapping[str, str] = {}  # of the dev sets by language, and of the guard that selects
    _run_facts: RunFacts
    _shutdown: GracefulShutdown
    _steps: StepGuard
    _position: DataPosition
    _sampler: Any = None  # of the training data
    _verified: str | None = None  # the checkpoint to resume
    _evaluation_pending = False
    _gradients_pending = False

    @property
    def training_seconds(self) -> float:
        """Duration of the training so far, including the runs that it resumes."""
        return round(time.time() - self._began, 1)

    def verify_checkpoint(self, requested: str | Path | bool) -> str:
        """Verify the checkpoint that :meth:`train` resumes, and that it belongs to this run; nothing else is changed.

        Args:
            requested: A checkpoint, or True for the latest valid one.

        Returns:
            The checkpoint; when it is passed to :meth:`train`, it is not verified again.

        Raises:
            CheckpointError: The checkpoint is damaged or of another run, or does not exist.
        """
        if self._verified is None or requested != self._verified:
            facts = partial(self._run_facts.collect, self.train_dataset)
            self._verified = choose_checkpoint(requested, self.args, facts)
        return self._verified

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """Completed epochs and batches of the next one, from the manifest.

        The number of steps does not determine them for a stream, or if a callback stopped an epoch.
        """
        self._written, self._evaluation_pending, self._gradients_pending = None, False, False
        self._steps.reset()
        self._began = time.time()
        epoch, batches = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if resume_from_checkpoint is not None:
            manifest = read_manifest(resume_from_checkpoint)
            self._steps.reset(manifest)
            self._began -= manifest["seconds"]
            self._written = Path(resume_from_checkpoint)
            is_before_epoch_end = manifest["batches"] > 0 == batches and manifest["epoch"] < epoch
            ends_with_evaluation = is_before_epoch_end and self.args.eval_strategy == IntervalStrategy.EPOCH
            self._evaluation_pending = manifest["evaluation_due"] or (
                ends_with_evaluation and not self._is_evaluated()
            )
            is_measured_anew = self._selection not in (None, manifest["selection"])
            if is_measured_anew:
                self._forget_best_checkpoint(manifest["selection"])
            else:
                self._find_best_checkpoint()
            self.data_collator.set_epoch(manifest["epoch"])  # an evaluation may precede the first step
            self.alignment_loss.step = max(self.state.global_step - 1, 0)
            stopped_early = manifest["ended"] and not (self.args.allow_changes or is_measured_anew)
            if stopped_early or self.state.global_step >= max_steps:
                return num_train_epochs, 0
            is_stream = isinstance(self.train_dataset, IterableDataset)
            is_unchanged = not is_before_epoch_end and not self.args.allow_changes
            if (is_stream or is_unchanged) and not self.args.ignore_data_skip:
                epoch, batches = manifest["epoch"], manifest["batches"]
        self._position = DataPosition(epoch, offset=batches)
        return epoch, batches

    def _is_evaluated(self) -> bool:
        """Whether the log has an evaluation of the current step."""
        return any(
            entry["step"] == self.state.global_step and any(name.startswith("eval_") for name in entry)
            for entry in self.state.log_history
        )

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Train for an epoch, unless the evaluation that a resumed run makes up for has ended training."""
        if not self.control.should_training_stop:
            super()._run_epoch(*args, **kwargs)

    def _find_best_checkpoint(self) -> None:
        """Find the best checkpoint beside the one that is resumed: its folder may have been moved or copied."""
        assert self._written is not None
        best = TrainerState.load_from_json(str(self._written / TRAINER_STATE_NAME)).best_model_checkpoint
        if best is not None and (place := self._written.with_name(Path(best).name)).is_dir():
            self.state.best_model_checkpoint = str(place)

    @property
    def _selection(self) -> dict[str, Any] | None:
        """What selects the best model; None if nothing does."""
        if self.args.metric_for_best_model is None:
            return None
        dev = dict(self.dev_digests)
        if (digest := digest_of(self.eval_dataset)) is not None:
            dev["eval_dataset"] = digest
        return {
            "metric": self.args.metric_for_best_model.removeprefix("eval_"),
            "greater_is_better": self.args.greater_is_better,
            "dev": dev,
        }

    def _forget_best_checkpoint(self, selection: Mapping[str, Any] | None) -> None:
        """Select the best model from this step on, because values of different metrics or data cannot be compared."""
        logger.warning(
            "What selects the best model differs from %s: %s. The best model is selected from the checkpoints of step %d and "
            "later, and early stopping starts to count again.",
            self._written,
            ", ".join(differences(selection or {}, self._selection or {})),
            self.state.global_step,
        )
        self.state.best_metric = self.state.best_global_step = self.state.best_model_checkpoint = None
        self._evaluation_pending = self.args.eval_strategy != IntervalStrategy.NO

    def begin_epoch(self) -> None:
        """Seed views and batches for the epoch that begins, and skip the batches of an earlier run."""
        self.data_collator.set_epoch(self._position.epoch)
        if hasattr(self._sampler, "set_epoch"):  # out of the trainer's reach when a distributed run is resumed
            self._sampler.set_epoch(self._position.epoch)
        if isinstance(self.train_dataset, IterableDataset) and self.args.dataloader_num_workers == 0:
            self.data_collator.batches_to_skip = 0 if self.args.ignore_data_skip else self._position.offset
        self._position.begin_epoch()

    def end_epoch(self, *, is_complete: bool) -> bool:
        """Count an epoch, unless training stops within it. Returns whether a signal ends training here."""
        if is_complete:
            self._position.end_epoch()
        return bool(self._shutdown.agreed)

    def evaluate_pending(self) -> None:
        """Run the evaluation that a signal skipped, so that best checkpoint and early stopping are unaffected."""
        if not self._evaluation_pending:
            return
        self._evaluation_pending = False
        metrics = self._evaluate(None, None)  # a schedule that reads the metrics takes its step as well
        if self._determine_best_metric(metrics=metrics, trial=None):
            self.state.best_model_checkpoint = str(self._written)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate without a trace in the random states: a training does not depend on the evaluations before it."""
        with torch.random.fork_rng(devices=[]):  # data loaders draw a seed
            return super().evaluate(*args, **kwargs)

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._evaluate(*args, **kwargs)
        except KeyError as error:  # of a schedule that reads the metric
            if "metric_for_best_model" not in str(error):
                raise
            step, logs = self.state.global_step, self.state.log_history
            raise self._unknown_metric(chain(*[log for log in logs if log["step"] == step])) from error

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        try:
            return bool(super()._determine_best_metric(metrics, trial))
        except KeyError as error:
            raise self._unknown_metric(metrics) from error

    def _unknown_metric(self, metrics: Iterable[str]) -> UsageError:
        names = [name for name in metrics if re.fullmatch(r"eval_.*(?<!_runtime)(?<!_per_second)", name)]
        choices = f"choose one of {', '.join(names)}" if names else "pass eval_dataset or an evaluator"
        return UsageError(
            f"metric_for_best_model ({self.args.metric_for_best_model}) is not a result of the evaluation; {choices}. "
            "The terms of the loss are only logged."
        )

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Finish training, without deleting checkpoints; after a signal, with the current weights for the resumed run."""
        with self._shutdown.keep_checkpoints(self.args):
            if self.args.load_best_model_at_end:
                self._report_best_step()
            return super()._finalize_training(*args, **kwargs)

    def _report_best_step(self) -> None:
        """Warn if the model that is loaded at the end is not the best one, because none was measured or kept."""
        best, kept = self.state.best_global_step, self.state.best_model_checkpoint
        loaded = self.state.global_step if kept is None else step_of(kept)
        if best != loaded:
            logger.warning(
                "The final model is from step %d, not the best by %s: %s.",
                loaded,
                self.args.metric_for_best_model,
                f"step {best} has no checkpoint. Save at every evaluation" if best else "all measured values are NaN",
            )

    def _saved(self) -> nn.Module:
        return self.alignment_loss

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        check_same_state(self.alignment_loss.heads)
        super()._save_checkpoint(model, trial)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if not self.args.should_save:  # transformers calls this method in every process
            return
        model, args, folder = self.model, self.args, Path(output_dir or self.args.output_dir)
        try:
            self.model = shared_copy(model) if has_adapter(model) else model
            self.args = SimpleNamespace()  # are pickled, but may contain functions
            super()._save(str(folder), state_dict)
        finally:
            self.model, self.args = model, args
        if has_adapter(model):
            save_adapter(model, folder / ADAPTER)
        (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)  # a pickle
        (folder / TRAINING_ARGS).write_text(self.args.to_json_string() + "\n", encoding="utf-8")
        if self.alignment_loss.heads.state_dict():
            self.alignment_loss.heads.save_pretrained(folder / HEADS)

    def _facts(self) -> dict[str, Any]:
        ended = self.control.should_training_stop and not self._shutdown.agreed
        return {
            "step": self.state.global_step,
            "seconds": self.training_seconds,
            **self._position.facts(is_epoch_over=self.control.should_epoch_stop),
            **self._steps.facts(),
            "evaluation_due": self._evaluation_pending,
            "ended": ended and self.state.global_step < self.state.max_steps,
            "selection": self._selection,
            "run": self._run_facts.collect(self.train_dataset),
        }

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """The schedule. The optimiser stores the initial learning rates, whatever the kind of schedule."""
        given = self.args.lr_scheduler_kwargs
        if self.args.lr_scheduler_type in ADAPTIVE and self.args.greater_is_better:
            self.args.lr_scheduler_kwargs = {"mode": "max"} | (given or {})
        try:
            schedule = super().create_scheduler(*args, **kwargs)
        finally:
            self.args.lr_scheduler_kwargs = given
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        return schedule

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restore optimiser and schedule, with the settings of the arguments; those of another kind start here."""
        optimizer, schedule, groups = self.optimizer, self.lr_scheduler, self.optimizer.param_groups
        if checkpoint is None or not isinstance(schedule, (LambdaLR, ReduceLROnPlateau, GreedyLR)):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        own = [{key: group[key] for key in HYPERPARAMETERS & group.keys()} for group in groups]
        saved: dict[str, Any] = {}
        state: dict[str, Any] = {}
        self.optimizer = SimpleNamespace(load_state_dict=saved.update)
        self.lr_scheduler = SimpleNamespace(load_state_dict=state.update)
        try:
            super()._load_optimizer_and_scheduler(checkpoint)
        finally:
            self.optimizer, self.lr_scheduler = optimizer, schedule
        sizes = [[len(group["params"]) for group in one] for one in (saved["param_groups"], groups)]
        kind = read_manifest(Path(checkpoint))["run"].get("optim")
        if kind == kind_of_optimizer(self.args) and sizes[0] == sizes[1]:
            with errors_of(checkpoint, "optimiser"):
                optimizer.load_state_dict(saved)
        else:
            logger.warning(
                "The optimiser of %s is of another kind, or trains other weights. A new one starts.", checkpoint
            )
        if "best" in state and self.state.best_metric is None:  # the best model is selected by other measures
            state["best"] = getattr(schedule, "best", None)
        groups = self.optimizer.param_groups
        rates = restore_schedule(schedule, state, groups, [one["initial_lr"] for one in own], self.state.global_step)
        for group, one, rate in zip(groups, own, rates, strict=True):
            group |= {**one, "lr": rate}

    def _load_from_checkpoint(self, checkpoint_path: str) -> None:
        encoder = load_encoder(checkpoint_path, device="cpu")
        try:
            load_weights(self.model, encoder, Path(checkpoint_path) / ADAPTER)
        except (RuntimeError, FileNotFoundError) as error:
            raise CheckpointError(
                f"{checkpoint_path} cannot be resumed: its weights do not fit this encoder or its adapter. Use the original "
                f"ones, or start from its weights with --model {checkpoint_path}."
            ) from error
        if self.alignment_loss.heads.state_dict():
            restore_heads(self.alignment_loss.heads, Path(checkpoint_path))

    def _load_best_model(self) -> None:
        """Load the best checkpoint, and fail if it is damaged; the parent class would continue with the last weights."""
        best = Path(str(self.state.best_model_checkpoint))
        verify_best(best, self.args.output_dir)
        self.model.model_card_data.set_best_model_step(step_of(best))
        self._load_from_checkpoint(str(best))


def restore_schedule(
    schedule: Any, state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], initial: Sequence[float], step: int
) -> list[float]:
    """Restore a schedule from the state of a checkpoint; a schedule of another kind starts at this step.

    Args:
        schedule: The schedule of the arguments.
        state: State of the schedule of the checkpoint.
        groups: Parameter groups of the optimiser of the checkpoint.
        initial: Learning rates of the arguments, one per group.
        step: Step of the checkpoint.

    Returns:
        The learning rates at this step.
    """
    progress = {name: state[name] for name in PROGRESS & state.keys()}
    is_same_kind = progress.keys() == PROGRESS & schedule.state_dict().keys()
    if isinstance(schedule, LambdaLR):
        own = schedule.state_dict()
        progress = {**state, "lr_lambdas": own["lr_lambdas"]} if is_same_kind else own | {"last_epoch": step}
        factors = [factor(progress["last_epoch"]) for factor in schedule.lr_lambdas]
        rates = [rate * factor for rate, factor in zip(initial, factors, strict=True)]
        schedule.load_state_dict(progress | {"base_lrs": initial, "_last_lr": rates})
        return rates
    if not is_same_kind:
        return [*initial]
    schedule.load_state_dict(progress)
    pairs = [(group["lr"], group["initial_lr"]) for group in groups]
    return [rate * (new / old) if old else new for (rate, old), new in zip(pairs, initial, strict=True)]
