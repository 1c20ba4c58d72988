"""The trainer: sentence-transformers' own, extended for losses with parameters, for views and for safe resuming."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.utils import DistributedType
from datasets import IterableDataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.base.sampler import NoDuplicatesBatchSampler
from sentence_transformers.sentence_transformer.training_args import BatchSamplers
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import BatchSampler, DataLoader
from transformers import PreTrainedTokenizerBase, TrainerState
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import IntervalStrategy

from metaphrase.checkpoints.folders import HEADS, TRAINING_ARGS, read_manifest
from metaphrase.corpus.digests import check_stream
from metaphrase.encoders.adapters import ADAPTER, has_adapter, load_weights, save_adapter, shared_copy
from metaphrase.encoders.loading import load_encoder, model_folder, origin_of
from metaphrase.exceptions import CorpusError, UsageError
from metaphrase.io.outputs import claim_folder
from metaphrase.modeling.collator import ParallelCollator
from metaphrase.modeling.functional import accumulated_in_place, liger_kernel
from metaphrase.modeling.packing import packed
from metaphrase.publishing.card import AlignmentModelCardData
from metaphrase.training.arguments import AlignmentTrainingArguments, check_arguments
from metaphrase.training.callbacks import StepCallback
from metaphrase.training.distributed import average_gradients, broadcast_weights, highest
from metaphrase.training.fault_tolerance import (
    GracefulShutdown,
    StepGuard,
    buffers_before_step,
    explain_worker_errors,
    repeat_within_memory,
    restore_buffers,
)
from metaphrase.training.heads import restore_heads
from metaphrase.training.hub_sync import PushesReleases, check_single_release
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.resuming import (
    DataPosition,
    ResumableCollator,
    RunFacts,
    choose_checkpoint,
    verify_best,
)
from metaphrase.training.sampling import LanguageBatchSampler, check_data, check_languages
from metaphrase.training.search import SearchesHyperparameters, check_loss, check_loss_function

logger = logging.getLogger(__name__)

#: Pattern of the heads' parameters among those of the loss.
HEAD_PARAMETERS = r"^heads\."
#: Settings of optimisers that a resumed run takes from its arguments.
HYPERPARAMETERS = {"initial_lr", "weight_decay", "betas", "eps", "momentum"}


class AlignmentTrainer(SearchesHyperparameters, PushesReleases, SentenceTransformerTrainer):
    """Trains a SentenceTransformer with an :class:`AlignmentLoss`.

    In addition to its parent: a batch consists of views; heads are saved and resumed with every checkpoint, averaged over
    processes, clipped with the encoder, and switched between training and evaluation; the encoder runs without padding.

    Checkpoints are atomic (:mod:`metaphrase.checkpoints.folders`), and a resumed run ends with the same weights as an
    uninterrupted one. SIGTERM and SIGINT end training after the current step, with a checkpoint; a second signal ends it
    immediately. Steps with a NaN or infinite loss or gradient are skipped (:mod:`metaphrase.training.fault_tolerance`).

    Args:
        model: The encoder of the loss.
        args: Training arguments.
        train_dataset: The bitext: a ``Dataset``, an ``IterableDataset`` or a dictionary of ``Dataset``.
        eval_dataset: Pairs for an evaluation loss, likewise.
        loss: An :class:`AlignmentLoss`; with ``model_init``, a function that takes an encoder and returns its loss.
        model_init: Function that returns an encoder, for hyperparameter search
            (:mod:`metaphrase.training.search`).
        **kwargs: As in ``SentenceTransformerTrainer``.

    Raises:
        UsageError: The loss is not an :class:`AlignmentLoss` or that of another encoder, the data are not data sets, an
            argument does not apply, an objective has no negatives to rank against, the run pushes a model that has one
            release per language, or the output folder is that of the encoder or holds files that this library did not
            write.
        HubAccessError: The run pushes to the Hub, and the token is missing or has no write access.
        CheckpointError: The output folder is a file, or is not writable.
    """

    loss_is_scaled_for_ga = False
    training_args_class = AlignmentTrainingArguments
    model_card_data_class = AlignmentModelCardData
    model: Any

    def __init__(
        self,
        model: SentenceTransformer | None = None,
        args: AlignmentTrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        loss: Any,
        model_init: Any = None,
        **kwargs: Any,
    ) -> None:
        data = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        for name, dataset in data.items():
            check_data(dataset, name)
        self.model_init = model_init
        if model_init is not None:
            self._make_loss = check_loss_function(loss)
            loss = self.build_trial()
        self.alignment_loss = check_loss(loss, model if model_init is None else None)
        self._gradients_pending = self._evaluation_pending = False
        self._sampler: Any = None
        self._verified: str | None = None  # the checkpoint to resume
        self._terms: dict[str, Tensor] = {}
        self._position, self._shutdown = DataPosition(), GracefulShutdown()
        if getattr(args, "push_to_hub", False):
            check_single_release(loss)
        if args is not None and args.should_save:
            claim_folder(str(args.output_dir), model=model_folder(origin_of(loss.model)))
        AlignmentModelCardData.adopt(loss.model, recipe=loss.recipe.to_dict())
        super().__init__(model, args, **data, loss=loss, model_init=model_init, **kwargs)
        check_arguments(self.args, loss.objectives)
        if not isinstance(self.data_collator, ParallelCollator):
            raise UsageError(
                f"`data_collator` must be a ParallelCollator, which builds the views of the loss, but is a "
                f"{type(self.data_collator).__name__}. Omit it."
            )
        if self.args.batches == "language":
            check_languages(train_dataset, "train_dataset")
            check_languages(eval_dataset, "eval_dataset", streams=True)
        self._learning_rates = dict(self.args.learning_rate_mapping)
        self._steps = StepGuard(self.args)
        self.use_loss(loss)
        self.add_callback(StepCallback(self))

    def use_loss(self, loss: AlignmentLoss) -> None:
        """Adopt a loss whose encoder is trained."""
        self.alignment_loss = loss
        loss.micro_batch_size = self.args.micro_batch_size
        self._run_facts = RunFacts(loss, self.args)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The optimiser, with the learning rate of the heads."""
        rates = {HEAD_PARAMETERS: self.args.head_learning_rate}
        has_own = self.args.head_learning_rate is not None and self.head_parameters()
        self.args.learning_rate_mapping = (rates if has_own else {}) | self._learning_rates
        return super().create_optimizer(*args, **kwargs)

    def head_parameters(self) -> list[nn.Parameter]:
        """Trainable parameters of the objectives' heads."""
        return [parameter for parameter in self.alignment_loss.heads.parameters() if parameter.requires_grad]

    @property
    def training_seconds(self) -> float:
        """Duration of the training so far, with that of the runs that it resumes."""
        return round(time.time() - self._began, 1)

    # ------------------------------------------------------------------------------------------------------------- data

    def get_data_collator(
        self, model: SentenceTransformer, args: Any, processing_class: PreTrainedTokenizerBase | None = None
    ) -> ParallelCollator:
        """A collator that builds the views of the loss."""
        return ResumableCollator(model.tokenizer, self.alignment_loss.views, seed=args.seed)

    def get_batch_sampler(self, dataset: Any, *args: Any, **kwargs: Any) -> BatchSampler | None:
        """The sampler of the batches: of one language each, if requested."""
        kwargs["seed"] = self._data_seed
        if self.args.batches == "language":
            return LanguageBatchSampler(dataset, *args, make=self._batch_sampler_of, **kwargs)
        return self._batch_sampler_of(dataset, *args, **kwargs)

    def get_multi_dataset_batch_sampler(self, *args: Any, **kwargs: Any) -> BatchSampler:
        """The sampler of the batches of several data sets."""
        return super().get_multi_dataset_batch_sampler(*args, **kwargs | {"seed": self._data_seed})

    @property
    def _data_seed(self) -> int:
        """Seed of the order of the data."""
        return int(self.args.seed if self.args.data_seed is None else self.args.data_seed)

    def _batch_sampler_of(self, dataset: Any, *args: Any, **kwargs: Any) -> BatchSampler | None:
        """Samplers without duplicates compare the two sentences only, not their languages."""
        if self.args.batch_sampler in (BatchSamplers.NO_DUPLICATES, BatchSamplers.NO_DUPLICATES_HASHED):
            hashed = self.args.batch_sampler == BatchSamplers.NO_DUPLICATES_HASHED
            texts = dataset.select_columns(["source", "target"])
            return NoDuplicatesBatchSampler(texts, *args, precompute_hashes=hashed, **kwargs)
        return super().get_batch_sampler(dataset, *args, **kwargs)

    def _build_dataloader(self, dataset: Any, batch_size: int, dataset_kind: str) -> DataLoader[Any]:
        loader = super()._build_dataloader(dataset, batch_size, dataset_kind)
        if dataset_kind == "train":
            self._sampler = loader.batch_sampler
        if loader.num_workers:
            loader.timeout = self.args.dataloader_timeout
        return loader

    def collect_features(self, inputs: dict[str, Any]) -> tuple[dict[str, dict[str, Tensor]], None]:
        """The views of a batch."""
        return {name: view for name, view in inputs.items() if isinstance(view, dict)}, None

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """End an epoch over a stream in all processes together, because their files may have different lengths.

        Batches that are too few for a step are skipped; their gradients would be added to the next step.
        """
        samples, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        missing = int(len(samples) < num_batches)
        if isinstance(self.train_dataset, IterableDataset):
            missing = highest([missing], device)[0]
        return ([], None) if missing else (samples, items)

    # ------------------------------------------------------------------------------------------------------------ train

    def train(self, resume_from_checkpoint: str | Path | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train. All processes start from the heads of the first one.

        Args:
            resume_from_checkpoint: Checkpoint to resume; True selects the latest valid one.
            *args: As in the parent class.
            **kwargs: As in the parent class.

        Raises:
            CheckpointError: The checkpoint cannot be resumed, or a checkpoint cannot be written.
            CorpusError: A file of a stream from `load_corpus` changed, or the data have no whole batch.
            MemoryBudgetError: Memory ran out, and smaller micro-batches of this step cannot help.
            NonFiniteError: Too many consecutive steps, or all steps, had a NaN or infinite loss or gradient, or a weight is
                NaN or infinite.
            WorkerError: A data loader worker died or is hung.
            UsageError: No parameter is trained.
            SystemExit: With 143 after SIGTERM, 130 after SIGINT; the checkpoint is written.
        """
        with ExitStack() as stack:
            if not any(parameter.requires_grad for parameter in self.alignment_loss.parameters()):
                raise UsageError(
                    "All parameters of the encoder are frozen and the objectives have none, so there is nothing to train. "
                    "Set requires_grad of some parameters to True."
                )
            stack.enter_context(self.hold_output_folder())
            if self.model_init is not None:
                self.begin_trial(kwargs.get("trial", args[0] if args else None))
            checkpoint = self.verify_checkpoint(resume_from_checkpoint) if resume_from_checkpoint else None
            self._verified = None
            self.tidy_output_folder()
            broadcast_weights(self.alignment_loss.heads)
            stack.enter_context(self._shutdown.handle_signals(repeat_after=float(self.args.world_size > 1)))
            stack.enter_context(packed(self.model, enabled=self.args.packing))
            stack.enter_context(explain_worker_errors(self.args))
            result = super().train(checkpoint, *args, **kwargs)
        if self._shutdown.signal and self.args.world_size == 1:  # after the last step, which may have no checkpoint
            self._save_checkpoint(self.model, None)
        self._shutdown.exit_if_signalled(self.state.global_step, self.state.max_steps)
        if self.state.global_step == 0 < self.state.max_steps:
            raise CorpusError(
                f"The data have too few different pairs for a step of {self.args.gradient_accumulation_steps} × "
                f"{self.args.train_batch_size}, so nothing was trained. Lower --gradient_accumulation_steps or "
                "--per_device_train_batch_size."
            )
        self._steps.check_progress(self.state.global_step)
        if isinstance(self.train_dataset, IterableDataset):
            check_stream(self.train_dataset)
        return result

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
            is_evaluated = any(
                entry["step"] == self.state.global_step and any(name.startswith("eval_") for name in entry)
                for entry in self.state.log_history
            )
            self._evaluation_pending = manifest["evaluation_due"] or (
                is_before_epoch_end and not is_evaluated and self.args.eval_strategy == IntervalStrategy.EPOCH
            )
            self._find_best_checkpoint()
            stopped_early = manifest["ended"] and not self.args.allow_changes
            if stopped_early or self.state.global_step >= max_steps:
                return num_train_epochs, 0
            is_stream = isinstance(self.train_dataset, IterableDataset)
            is_unchanged = not is_before_epoch_end and not self.args.allow_changes
            if (is_stream or is_unchanged) and not self.args.ignore_data_skip:
                epoch, batches = manifest["epoch"], manifest["batches"]
        self._position = DataPosition(epoch, offset=batches)
        return epoch, batches

    def _find_best_checkpoint(self) -> None:
        """Find the best checkpoint beside the one that is resumed: its folder may have been moved or copied."""
        assert self._written is not None
        best = TrainerState.load_from_json(str(self._written / TRAINER_STATE_NAME)).best_model_checkpoint
        if best is not None and (place := self._written.with_name(Path(best).name)).is_dir():
            self.state.best_model_checkpoint = str(place)

    def begin_epoch(self) -> None:
        """Seed views and batches for the epoch that begins, and skip the batches of an earlier run."""
        self.data_collator.set_epoch(self._position.epoch)
        if hasattr(self._sampler, "set_epoch"):  # out of the trainer's reach when a distributed run is resumed
            self._sampler.set_epoch(self._position.epoch)
        if isinstance(self.train_dataset, IterableDataset) and self.args.dataloader_num_workers == 0:
            self.data_collator.batches_to_skip = 0 if self.args.ignore_data_skip else self._position.offset
        self._position.begin_epoch()

    def end_epoch(self, *, is_complete: bool) -> bool:
        """Count an epoch, unless training stops within it.

        Returns:
            Whether a signal ends training here.
        """
        if is_complete:
            self._position.end_epoch()
        return bool(self._shutdown.agreed)

    def evaluate_pending(self) -> None:
        """Run the evaluation that a signal skipped, so that best checkpoint and early stopping are unaffected."""
        if not self._evaluation_pending:
            return
        self._evaluation_pending = False
        metrics = self._evaluate(None, None, skip_scheduler=True)
        if self._determine_best_metric(metrics=metrics, trial=None):
            self.state.best_model_checkpoint = str(self._written)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        try:
            return bool(super()._determine_best_metric(metrics, trial))
        except KeyError as error:
            names = [name for name in metrics if name.startswith("eval_")]
            raise UsageError(
                f"--metric_for_best_model {self.args.metric_for_best_model} was not measured; choose one of "
                f"{', '.join(names)}."
            ) from error

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Finish training; after a signal, all checkpoints and the current weights are kept for the resumed run."""
        with self._shutdown.keep_checkpoints(self.args):
            return super()._finalize_training(*args, **kwargs)

    # ------------------------------------------------------------------------------------------------------------ steps

    def begin_step(self) -> None:
        """Store the state that a step changes in addition to the gradients."""
        self._steps.begin_step()
        self.alignment_loss.step = self.state.global_step
        self._before_step = (
            buffers_before_step(self.alignment_loss.heads),
            self._tr_loss.clone(),
            {name: value.clone() for name, value in self.accum_loss_components["train"].items()},
        )

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Run a micro-batch; before an update, average the heads' gradients over processes, as DDP does the encoder's."""
        self.loss.train()
        step = super().training_step
        in_place = self.args.world_size == 1 and self.accelerator.distributed_type == DistributedType.NO
        with accumulated_in_place(enabled=in_place), liger_kernel(enabled=self.args.use_liger_kernel):
            loss = repeat_within_memory(
                lambda: step(model, inputs, num_items_in_batch),
                model=model,
                loss=self.alignment_loss,
                inputs=inputs,
                args=self.args,
                accumulating=self._gradients_pending,
            )
        self._steps.observe_loss(loss)
        self._position.batches += 1
        self._gradients_pending = not self.accelerator.sync_gradients
        if self.accelerator.sync_gradients:
            average_gradients(self.head_parameters())
        return loss

    def compute_loss_context_manager(self) -> ExitStack:
        """In bfloat16, autocast the whole loss; the parent class autocasts the trained encoder, but not the rest."""
        stack: ExitStack = super().compute_loss_context_manager()
        if self.args.bf16:
            stack.enter_context(self.accelerator.autocast())
        return stack

    def track_loss_components(self, loss: dict[str, Tensor]) -> None:
        """Log each term, and keep the terms for error messages."""
        self._terms = {name: value.detach() for name, value in loss.items()}
        super().track_loss_components(loss)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The gradient norm, heads included. All processes agree here whether to skip this step and to stop after it."""
        parameters, scaler = [*model.parameters(), *self.head_parameters()], self.accelerator.scaler
        if grad_norm is None:
            grad_norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        skip = not self._steps.is_finite(grad_norm, scaler)
        if self.args.world_size > 1:
            nonfinite, self._shutdown.agreed = highest([int(skip), self._shutdown.received], self.args.device)
            skip = bool(nonfinite)
        if self._steps.decide(skip=skip, step=self.state.global_step + 1, terms=self._terms, scaler=scaler):
            buffers, total, terms = self._before_step
            restore_buffers(self.alignment_loss.heads, buffers)
            self._tr_loss.copy_(total)
            self.accum_loss_components["train"] = terms
            if scaler is None:  # optimisers ignore parameters without a gradient; a scaler skips the step itself
                for parameter in parameters:
                    parameter.grad = None
        return super()._get_grad_norm(model, grad_norm=grad_norm)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        parameters = [*model.parameters(), *self.head_parameters()]
        return self.accelerator.clip_grad_norm_(parameters, self.args.max_grad_norm)

    def end_step(self, *, evaluation_due: bool) -> bool:
        """Update the state of the objectives, such as momentum encoders.

        Args:
            evaluation_due: Whether an evaluation follows this step; if training stops here, the resumed run performs it.

        Returns:
            Whether a signal ends training here.
        """
        if self._steps.end_step(self.state.global_step, self.accelerator.scaler):
            self.alignment_loss.after_step()
        if self.args.world_size == 1:
            self._shutdown.agreed = self._shutdown.received
        self._evaluation_pending = bool(self._shutdown.agreed) and evaluation_due
        return bool(self._shutdown.agreed)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the mean loss of the executed steps, and the number of skipped ones."""
        if "loss" in logs:
            self._steps.correct_log(logs)
        super().log(logs, *args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """One batch of an evaluation loss, with the heads in evaluation mode."""
        self.loss.eval()
        return super().prediction_step(*args, **kwargs)

    # ------------------------------------------------------------------------------------------------------ checkpoints

    def _saved(self) -> nn.Module:
        return self.alignment_loss

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        model, folder = self.model, Path(output_dir or self.args.output_dir)
        try:
            self.model = shared_copy(model) if has_adapter(model) else model
            super()._save(output_dir, state_dict)
        finally:
            self.model = model
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
            "run": self._run_facts.collect(self.train_dataset),
        }

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restore optimiser and schedule, with the hyperparameters of the arguments, if they changed."""
        schedule, groups = self.lr_scheduler, self.optimizer.param_groups
        own = [{key: group[key] for key in HYPERPARAMETERS & group.keys()} for group in groups]
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or not isinstance(schedule, LambdaLR):
            return
        initial = [one["initial_lr"] for one in own]
        rates = [rate * factor(schedule.last_epoch) for rate, factor in zip(initial, schedule.lr_lambdas, strict=True)]
        for group, one, rate in zip(self.optimizer.param_groups, own, rates, strict=True):
            group |= {**one, "lr": rate}
        schedule.load_state_dict(schedule.state_dict() | {"base_lrs": initial, "_last_lr": rates})

    def _load_from_checkpoint(self, checkpoint_path: str) -> None:
        encoder = load_encoder(checkpoint_path, device="cpu")
        load_weights(self.model, encoder, Path(checkpoint_path) / ADAPTER)
        if self.alignment_loss.heads.state_dict():
            restore_heads(self.alignment_loss.heads, Path(checkpoint_path))

    def _load_best_model(self) -> None:
        """Load the best checkpoint, and fail if it is damaged; the parent class would continue with the last weights."""
        best = Path(str(self.state.best_model_checkpoint))
        verify_best(best, self.args.output_dir)
        self.model.model_card_data.set_best_model_step(self.state.best_global_step)
        self._load_from_checkpoint(str(best))
