"""The trainer: sentence-transformers' own, extended for losses with parameters, for views and for safe resuming."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from accelerate.utils import DistributedType
from datasets import IterableDataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from metaphrase.checkpoints.saving import explain_lost_processes
from metaphrase.corpus.digests import check_stream
from metaphrase.encoders.loading import origin_of
from metaphrase.encoders.names import model_folder
from metaphrase.exceptions import CorpusError, UsageError
from metaphrase.io.outputs import claim_folder
from metaphrase.modeling.collator import ParallelCollator
from metaphrase.modeling.functional import accumulated_in_place, liger_kernel
from metaphrase.modeling.packing import packed
from metaphrase.publishing.card import AlignmentModelCardData
from metaphrase.training.arguments import (
    AlignmentTrainingArguments,
    check_arguments,
    check_evaluation_batches,
    check_negatives,
    check_optimizer,
    check_trainable,
)
from metaphrase.training.callbacks import StepCallback
from metaphrase.training.checkpointing import ResumeMixin
from metaphrase.training.distributed import average_gradients, broadcast_weights, highest
from metaphrase.training.fault_tolerance import (
    GracefulShutdown,
    StepGuard,
    explain_worker_errors,
    repeat_within_memory,
    restorer,
)
from metaphrase.training.hub_sync import HubReleaseMixin, check_single_release
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.resuming import DataPosition, ResumableCollator, RunFacts
from metaphrase.training.sampling import BatchSamplingTrainer, check_batches, check_data, check_rows
from metaphrase.training.search import HyperparameterSearchMixin, check_collator, check_loss, check_loss_function
from metaphrase.training.weight_decay import decay_toward_start

#: Pattern of the heads' parameters in the loss.
HEAD_PARAMETERS = r"^heads\."


class AlignmentTrainer(
    HyperparameterSearchMixin, HubReleaseMixin, ResumeMixin, BatchSamplingTrainer, SentenceTransformerTrainer
):
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
        eval_dataset: Pairs on which the loss is evaluated, in the same forms.
        loss: An :class:`AlignmentLoss`; with ``model_init``, a function that takes an encoder and returns its loss.
        model_init: Function that returns an encoder, for hyperparameter search
            (:mod:`metaphrase.training.search`).
        **kwargs: As in ``SentenceTransformerTrainer``.

    Raises:
        UsageError: The loss is not an :class:`AlignmentLoss` or belongs to another encoder, the data are not data sets, an
            argument does not apply, an objective has no negatives to rank against, the run pushes a model that has one
            release per language, or the output folder is the encoder's or holds files that this library did not
            write.
        CorpusError: The rows of a data set are not dictionaries, or lack a column that the loss reads.
        HubAccessError: The run pushes to the Hub, and the token is missing or has no write access.
        CheckpointError: The output folder is a file, or is not writable.
    """

    loss_is_scaled_for_ga = False  # the loss of a micro-batch is divided by gradient_accumulation_steps
    training_args_class = AlignmentTrainingArguments
    model_card_data_class = AlignmentModelCardData
    model: Any
    _default_optimizer: Any = None

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
            self._make_loss = check_loss_function(loss, kwargs.get("data_collator"))
            loss = self.build_trial()
        self.alignment_loss = check_loss(loss, model if model_init is None else None)
        self._terms: dict[str, Tensor] = {}
        self._position, self._shutdown = DataPosition(), GracefulShutdown()
        if getattr(args, "push_to_hub", False):
            check_single_release(loss)
        if args is not None and args.should_save:
            claim_folder(str(args.output_dir), model=model_folder(origin_of(loss.model)))
        AlignmentModelCardData.adopt(loss.model, recipe=loss.recipe.to_dict())
        super().__init__(model, args, **data, loss=loss, model_init=model_init, **kwargs)
        check_arguments(self.args, loss.objectives)
        check_negatives(train_dataset, "train_dataset", loss.objectives)
        check_evaluation_batches(eval_dataset, self.args, loss.objectives)
        check_collator(self.data_collator, loss)
        for name, dataset in data.items():
            if type(self.data_collator) is ResumableCollator:  # another collator may change the rows
                check_rows(dataset, self.data_collator)
            check_batches(self.args.batches, dataset, name)
        self._steps = StepGuard(self.args)
        self.use_loss(loss)
        self.add_callback(StepCallback(self))

    def use_loss(self, loss: AlignmentLoss) -> None:
        """Set the loss, and what depends on it: micro-batches, weight decay, and the facts that a resumed run must share."""
        self.alignment_loss = loss
        loss.micro_batch_size = self.args.micro_batch_size or loss.micro_batch_size
        self._decay = decay_toward_start(loss.model, self.args)
        self._run_facts = RunFacts(loss, self.args, self._decay)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The optimiser, with the learning rate of the heads and the requested weight decay."""
        mapping = self.args.learning_rate_mapping
        if has_own := bool(self.optimizer or self.optimizer_cls_and_kwargs):
            args, kwargs = (self.alignment_loss,), {}  # the parent class would omit the heads
        elif self.head_parameters():  # always a group of their own, so that their learning rate may change on resume
            self.args.learning_rate_mapping = {HEAD_PARAMETERS: self.args.learning_rate_of_heads} | mapping
        try:
            optimizer = super().create_optimizer(*args, **kwargs)
        finally:
            self.args.learning_rate_mapping = mapping
        if not has_own:
            self._default_optimizer = optimizer
        # In a second training, the optimiser of the first one is in accelerate's wrapper.
        is_own = getattr(optimizer, "optimizer", optimizer) is not self._default_optimizer
        check_optimizer(optimizer, self.head_parameters(), self.args, is_own=is_own)
        if self._decay is not None:
            self._decay.attach(optimizer)
        return optimizer

    def head_parameters(self) -> list[nn.Parameter]:
        """Trainable parameters of the objectives' heads."""
        return [parameter for parameter in self.alignment_loss.heads.parameters() if parameter.requires_grad]

    # ------------------------------------------------------------------------------------------------------------- data

    def get_data_collator(
        self, model: SentenceTransformer, args: Any, processing_class: PreTrainedTokenizerBase | None = None
    ) -> ParallelCollator:
        """A collator that builds the views of the loss."""
        if processing_class not in (None, model.tokenizer, model.processor):
            raise UsageError(
                "`processing_class` is another tokenizer than the encoder's, which tokenizes the batches. Omit it, or set "
                "`model[0].processor` before you build the loss."
            )
        return ResumableCollator(model.tokenizer, self.alignment_loss.views, seed=args.seed)

    def _build_dataloader(self, dataset: Any, batch_size: int, dataset_kind: str) -> DataLoader[Any]:
        loader = super()._build_dataloader(dataset, batch_size, dataset_kind)
        if dataset_kind == "train":
            self._sampler = loader.batch_sampler
        if loader.num_workers:
            loader.timeout = self.args.dataloader_timeout
            loader.multiprocessing_context = self.args.dataloader_multiprocessing_context
            loader.in_order = self.args.dataloader_in_order
        return loader

    def collect_features(self, inputs: dict[str, Any]) -> tuple[dict[str, dict[str, Tensor]], None]:
        """The views of a batch."""
        return {name: view for name, view in inputs.items() if isinstance(view, dict)}, None

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """End an epoch over a stream in all processes together, because their files may have different lengths.

        An incomplete last group of micro-batches is skipped; its gradients would be added to the next step.
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
            NonFiniteError: A weight, or the loss or gradient of all or of too many consecutive steps, is NaN or infinite.
            WorkerError: A data loader worker died or is hung, or another process of the run ended.
            UsageError: No parameter is trained, or an optimiser lacks the heads.
            SystemExit: With 143 after SIGTERM, 130 after SIGINT; the checkpoint is written.
        """
        check_trainable(self.alignment_loss.model, self.head_parameters(), processes=self.args.world_size)
        trial = kwargs.get("trial", args[0] if args else None)
        with explain_lost_processes(self.how_to_resume), self.hold_output_folder():
            if self.model_init is not None:
                self.begin_trial(trial)
            checkpoint = self.verify_checkpoint(resume_from_checkpoint) if resume_from_checkpoint else None
            self._verified = None
            self.tidy_output_folder()
            broadcast_weights(self.alignment_loss.heads)
            self.alignment_loss.zero_grad()  # an earlier training may have failed within a step
            self.accum_loss_components["train"] = {}
            with (
                self._shutdown.handle_signals(repeat_after=float(self.args.world_size > 1)),
                packed(self.model, enabled=self.args.packing and not self.args.torch_compile),
                explain_worker_errors(self.args),
            ):
                result = super().train(checkpoint, *args, **kwargs)
                result = result._replace(training_loss=result.metrics.get("train_loss", result.training_loss))
            # A signal may have come after the last step, which may have no checkpoint.
            if self._shutdown.signal and self.args.world_size == 1:
                self._save_checkpoint(self.model, trial)
        self._shutdown.exit_if_signalled(self.state.global_step, self.state.max_steps)
        if self.state.global_step == 0 < self.state.max_steps:
            raise CorpusError(
                f"The data have too few different pairs for a step of {self.args.gradient_accumulation_steps} × "
                f"{self.args.train_batch_size * self.args.world_size}, so nothing was trained. Lower "
                "--gradient_accumulation_steps or --per_device_train_batch_size."
            )
        self._steps.check_progress(self.state.global_step)
        if isinstance(self.train_dataset, IterableDataset):
            check_stream(self.train_dataset)
        return result

    # ------------------------------------------------------------------------------------------------------------ steps

    def begin_step(self) -> None:
        """Save the state that a skipped step restores: buffers of the heads, total loss and logged terms."""
        self._steps.begin_step()
        self.alignment_loss.step = self.state.global_step
        self._before_step = restorer(self.alignment_loss.heads, self.accum_loss_components), self._tr_loss.clone()

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
                logged=self.accum_loss_components,
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
            grad_norm = self.accelerator.clip_grad_norm_(parameters, float("inf"))  # unscaled, but not clipped
        skip = not self._steps.is_finite(grad_norm, scaler)
        if self.args.world_size > 1:
            nonfinite, self._shutdown.agreed = highest([int(skip), self._shutdown.received], self.args.device)
            skip = bool(nonfinite)
        self._steps.record(skip=skip, step=self.state.global_step + 1, terms=self._terms, scaler=scaler)
        if skip:
            restore, total = self._before_step
            restore()
            self._tr_loss.copy_(total)
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
        self._steps.correct_log(logs)
        super().log(logs, *args, **kwargs)
