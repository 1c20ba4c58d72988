"""The trainer: sentence-transformers' own, with losses that own parameters done right."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from datasets import Dataset, IterableDataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.sampler import NoDuplicatesBatchSampler
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.sentence_transformer.training_args import BatchSamplers
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader
from transformers import PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import HubStrategy, SaveStrategy

from metaphrase.checkpoints.folders import (
    HEADS,
    MANIFEST,
    TRAINING_ARGS,
    check_space,
    differences,
    exclusive,
    last_good,
    make_folder,
    newest,
    tidy,
    verify,
)
from metaphrase.checkpoints.saving import WholeCheckpoints, check_finite
from metaphrase.corpus.digests import data_digest, stream_digest
from metaphrase.encoders.loading import load_encoder, origin_of
from metaphrase.exceptions import (
    CheckpointError,
    HubError,
    MemoryBudgetError,
    MissingExtraError,
    NonFiniteError,
    UsageError,
    WorkerError,
)
from metaphrase.io.environment import versions
from metaphrase.io.hub import is_transient
from metaphrase.modeling.collator import ParallelCollator
from metaphrase.modeling.functional import accumulated_in_place, liger_kernel
from metaphrase.modeling.packing import packed
from metaphrase.publishing.card import AlignmentModelCardData
from metaphrase.publishing.hub import make_repository, push, push_command
from metaphrase.publishing.release import release
from metaphrase.training.heads import AlignmentHeads
from metaphrase.training.loss import AlignmentLoss

logger = logging.getLogger(__name__)

#: Name of the heads' parameters among the loss's.
HEAD_PARAMETERS = r"^heads\."

ONE_RELEASE = (
    "A model with a language embedding is a release for each language. Write them with "
    "`metaphrase.publishing.release.release_languages`, and push each folder: metaphrase push FOLDER/xx --repo me/name-xx."
)

#: What manifests did not say of a run from the beginning.
ADDED_FACTS = frozenset({"corpus", "base_model", "base_model_revision", "pooling", "modules", "tokenizer", "frozen"})

#: Steps in a row that float16's gradient scaler may leave out while it looks for its scale, which it halves each time.
SCALE_SEARCH = 20


@dataclass
class AlignmentTrainingArguments(SentenceTransformerTrainingArguments):
    """Training arguments of sentence-transformers and what alignment adds to them.

    Attributes:
        head_learning_rate: Learning rate of the objectives' heads; None takes ``learning_rate``.
        packing: Run the encoder without padding, where it can.
        effective_batch_size: Pairs that are ranked against each other, over all processes; sets
            ``per_device_train_batch_size``, which it replaces.
        micro_batch_size: Rows (sentences, of either side) that the encoder encodes at a time; None encodes all views of a
            batch at once. ``per_device_train_batch_size`` stays the batch that is ranked: the gradient is the same, for
            less memory and one more forward pass. Where memory runs out it is set, or halved, and the step made again.
        max_skipped_steps: Steps in a row without a finite loss and gradient after which training ends. Such a step changes
            nothing, and ``skipped_steps`` in the log counts it. Gradients that overflow in float16 have 20 steps at least,
            in which their scaler looks for its scale.
        allow_changes: Resume a checkpoint though recipe, encoder, data, batch or seed are not those that it was written with.
        restore_callback_states_from_checkpoint: On, so that early stopping goes on counting where it was.
        bf16: Turned off, with a warning, on CPUs that multiply bfloat16 in software, where it is slower than float32.
        use_liger_kernel: Compute the vocabulary loss by Liger's kernel, on CUDA (extra ``liger``).
        logging_nan_inf_filter: Off, as steps whose loss is not finite are skipped and counted.
        dataloader_pin_memory: On only where there is a CUDA device to pin for.
        dataloader_timeout: Seconds for which a batch is waited for where other processes make them; 0 waits forever.
    """

    head_learning_rate: float | None = field(
        default=None, metadata={"help": "Learning rate of the objectives' heads; default: learning_rate."}
    )
    packing: bool = field(default=True, metadata={"help": "Run the encoder without padding: the same result, faster."})
    effective_batch_size: int | None = field(
        default=None,
        metadata={"help": "Pairs ranked against each other, over all processes; in place of a batch size per device."},
    )
    micro_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Rows encoded at a time, with the gradient of the whole batch; found where memory runs out."
        },
    )
    bf16: bool = field(
        default=False, metadata={"help": "Compute in bfloat16, where the device has instructions for it."}
    )
    max_skipped_steps: int = field(
        default=5,
        metadata={"help": "End after so many steps in a row without a finite loss and gradient; each is skipped."},
    )
    restore_callback_states_from_checkpoint: bool = field(
        default=True, metadata={"help": "Resume the state of callbacks too, such as the patience of early stopping."}
    )
    allow_changes: bool = field(
        default=False,
        metadata={
            "help": "Resume a checkpoint of another recipe, encoder, corpus, batch size, seed or number of processes."
        },
    )
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Hide losses that are not finite from the log."}
    )
    dataloader_pin_memory: bool = field(
        default_factory=torch.cuda.is_available, metadata={"help": "Pin memory in data loaders."}
    )
    dataloader_timeout: float = field(
        default=600.0, metadata={"help": "Seconds after which a data loader's process that gives no batch hangs."}
    )

    def __post_init__(self) -> None:
        if self.bf16 and (self.use_cpu or not torch.accelerator.is_available()) and not _multiplies_bfloat16():
            logger.warning("This CPU has no instructions for bfloat16, and float32 is faster on it: bf16 is off.")
            self.bf16 = False
        super().__post_init__()
        if self.effective_batch_size is not None:
            size, rest = divmod(self.effective_batch_size, self.world_size)
            if rest or size < 1:
                raise UsageError(
                    f"effective_batch_size is divided among the processes, but got {self.effective_batch_size} for "
                    f"{self.world_size}. Take a multiple of {self.world_size}."
                )
            self.per_device_train_batch_size = size
        if self.use_liger_kernel and find_spec("liger_kernel") is None:
            raise MissingExtraError(
                "use_liger_kernel asks for Liger's kernel; liger-kernel is not installed: pip install 'metaphrase[liger]'."
            )
        if self.micro_batch_size is not None and self.micro_batch_size < 1:
            raise UsageError(f"micro_batch_size is a number of rows from 1, or none, but got {self.micro_batch_size}.")
        if self.max_skipped_steps < 1:
            raise UsageError(f"max_skipped_steps is a number of steps from 1, but got {self.max_skipped_steps}.")
        # With a stream, rank 0 would otherwise read for all ranks and slice tensors that are no batch (links, queues).
        if self.accelerator_config.dispatch_batches is None:
            self.accelerator_config.dispatch_batches = False


def _multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for it: AVX512-BF16, AMX, or Arm's."""
    able = torch.cpu.get_capabilities()
    return any(able.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


class _Pace(TrainerCallback):
    """Tell collator and sampler which epoch it is, the loss when a step was made, and the loop when to stop."""

    def __init__(self, trainer: AlignmentTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._evaluate_what_is_due()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._begin_epoch()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer._end_step():
            control.should_training_stop = control.should_save = True
            self.trainer._due, control.should_evaluate = control.should_evaluate, False


class _Collator(ParallelCollator):
    """A collator that leaves out the batches that a resumed stream passes over."""

    passed_over = 0

    def __call__(self, examples: Any) -> dict[str, dict[str, Tensor]]:
        if self.passed_over:
            self.passed_over -= 1
            return {}
        return super().__call__(examples)


def _rng_states() -> tuple[Tensor, list[Tensor]]:
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []


class AlignmentTrainer(WholeCheckpoints, SentenceTransformerTrainer):
    """Trains a SentenceTransformer with an :class:`AlignmentLoss`.

    What it adds to its parent: batches are views; heads are saved in every checkpoint and restored from it, averaged over
    processes, clipped with the encoder, and switched between training and evaluation; the encoder runs without padding.

    Checkpoints are whole or not there (:mod:`metaphrase.checkpoints.folders`), and a resumed run ends with the weights of an
    undisturbed one. SIGTERM and SIGINT end training behind the present step, with a checkpoint; a second one ends it at
    once. A step whose loss or gradient is not finite is skipped, and weights that are not finite are never written.

    Args:
        *args: As for ``SentenceTransformerTrainer``.
        **kwargs: Likewise; ``loss`` must be an :class:`AlignmentLoss`.

    Raises:
        ValueError: The loss is no :class:`AlignmentLoss`, prompts are given (training uses none), an objective ranks a
            pair against none but itself, or a model is to be pushed that is a release for each language, or that is to be
            private, to a public repository.
        HubAccessError: A model is to be pushed, and there is no token, or the Hub does not let it write there.
        CheckpointError: The output folder is a file, or cannot be made.
    """

    loss_is_scaled_for_ga = False
    training_args_class = AlignmentTrainingArguments
    model_card_data_class = AlignmentModelCardData

    def __init__(self, *args: Any, loss: AlignmentLoss, **kwargs: Any) -> None:
        if not isinstance(loss, AlignmentLoss):
            raise ValueError(f"AlignmentTrainer needs an AlignmentLoss, but got {type(loss).__name__}.")
        self._alignment_loss = loss
        self._gradients_pending = False
        self._sampler: Any = None
        self._signal = self._stop = 0  # received by this process; agreed on by all
        self._epoch = self._batches = 0  # passes over the data begun, and batches of this one
        self._offset = 0  # batches of the next pass that an earlier run made
        self._due = False  # an evaluation of this step, which a signal left out
        self._terms: dict[str, Tensor] = {}
        self._finite = torch.tensor(True)
        self._skipping = False  # the present step
        self._skipped = self._skipped_in_a_row = 0
        self._scale = 0.0  # of float16's gradients, before the present step
        self._overflows = 0  # in a row
        self._since_log = [0, 0]  # steps, and those of them that were skipped
        self._hashed: tuple[Any, str | None] = (None, None)  # a corpus and its digest
        arguments = kwargs.get("args", args[1] if len(args) > 1 else None)
        if getattr(arguments, "push_to_hub", False) and loss.heads.language_embedding is not None:
            raise UsageError(f"push_to_hub cannot push this recipe's checkpoints. {ONE_RELEASE}")
        if arguments is not None and arguments.should_save:
            make_folder(Path(str(arguments.output_dir)))
        AlignmentModelCardData.adopt(loss.model, recipe=loss.recipe.to_dict())
        super().__init__(*args, loss=loss, **kwargs)
        if self.args.n_gpu > 1:
            raise UsageError(
                f"{self.args.n_gpu} GPUs are visible to one process. Start one process each with torchrun, or show one "
                "with CUDA_VISIBLE_DEVICES=0."
            )
        if self.args.prompts:
            raise UsageError("Alignment trains without prompts; leave `prompts` out of the training arguments.")
        self._check_negatives()
        if self.args.head_learning_rate is not None and self.head_parameters():
            self.args.learning_rate_mapping.setdefault(HEAD_PARAMETERS, self.args.head_learning_rate)
        loss.micro_batch_size = self.args.micro_batch_size
        self.add_callback(_Pace(self))

    def _check_negatives(self) -> None:
        """Refuse batches in which an objective that ranks the pairs of a batch has nothing to rank."""
        size, processes = self.args.per_device_train_batch_size, self.args.world_size
        alone = [
            name
            for name, objective in self._alignment_loss.objectives.items()
            if objective.in_batch_negatives and size * (processes if objective.gather else 1) < 2
        ]
        if alone:
            raise UsageError(
                f"{', '.join(alone)} ranks each pair against the other pairs of its batch, but a batch of {size} has none, "
                "so that nothing is learnt; gradient accumulation adds none. Take per_device_train_batch_size 2 at least, "
                "better 32 or more; where memory is short, keep it and set micro_batch_size, which changes nothing else."
            )

    def get_data_collator(
        self, model: SentenceTransformer, args: Any, processing_class: PreTrainedTokenizerBase | None = None
    ) -> ParallelCollator:
        """A collator of the views that the loss asks for."""
        return _Collator(model.tokenizer, self._alignment_loss.views, seed=args.seed)

    def get_batch_sampler(self, dataset: Any, *args: Any, **kwargs: Any) -> BatchSampler | None:
        """As the parent's; batches without duplicates look at the two sentences only, not at their languages."""
        if self.args.batch_sampler in (BatchSamplers.NO_DUPLICATES, BatchSamplers.NO_DUPLICATES_HASHED):
            hashed = self.args.batch_sampler == BatchSamplers.NO_DUPLICATES_HASHED
            texts = dataset.select_columns(["source", "target"])
            self._sampler = NoDuplicatesBatchSampler(texts, *args, precompute_hashes=hashed, **kwargs)
            return self._sampler
        return super().get_batch_sampler(dataset, *args, **kwargs)

    def collect_features(self, inputs: dict[str, Any]) -> tuple[dict[str, dict[str, Tensor]], None]:
        """The batch is its views already."""
        return {name: view for name, view in inputs.items() if isinstance(view, dict)}, None

    def head_parameters(self) -> list[nn.Parameter]:
        """What the objectives train beside the encoder."""
        return [parameter for parameter in self._alignment_loss.heads.parameters() if parameter.requires_grad]

    def train(self, resume_from_checkpoint: str | Path | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, without padding unless told otherwise; every process starts from the first one's heads.

        Args:
            resume_from_checkpoint: A checkpoint, which must verify; True takes the last one that does.
            *args: As for the parent.
            **kwargs: Likewise.

        Raises:
            CheckpointError: The checkpoint cannot be gone on from, or one cannot be written.
            MemoryBudgetError: Memory ran out, and smaller micro-batches of this step would not help.
            NonFiniteError: Too many steps in a row had no finite loss and gradient, or weights are not finite.
            WorkerError: A process of the data loader died, or hangs.
            SystemExit: With 143 after SIGTERM, 130 after SIGINT; the checkpoint is written.
        """
        with ExitStack() as stack:
            if self.args.should_save and self.args.save_strategy != SaveStrategy.NO:
                stack.enter_context(exclusive(self.args.output_dir))
                tidy(Path(self.args.output_dir))
                self._check_space()
            checkpoint = self._choose_checkpoint(resume_from_checkpoint) if resume_from_checkpoint else None
            if self.args.world_size > 1:
                for value in self._alignment_loss.heads.state_dict().values():
                    dist.broadcast(value, src=0)
            stack.enter_context(self._heeding_signals())
            stack.enter_context(packed(self.model, enabled=self.args.packing))
            try:
                result = super().train(checkpoint, *args, **kwargs)
            except RuntimeError as error:
                if str(error).startswith("DataLoader timed out"):
                    raise WorkerError(
                        f"No process of the data loader gave a batch within {self.args.dataloader_timeout:g} seconds: one "
                        "hangs, on a disk or a network that does not answer. See that the corpus can be read, or raise "
                        f"--dataloader_timeout. {last_good(self.args.output_dir)}"
                    ) from error
                if not str(error).startswith("DataLoader worker"):
                    raise
                raise WorkerError(
                    f"{error} Often memory ran out: lower --dataloader_num_workers (0 reads in the process that trains). "
                    f"{last_good(self.args.output_dir)}"
                ) from error
        if 0 < self.state.global_step <= self._skipped:
            logger.warning("All %d steps were skipped: the weights are those that were there before.", self._skipped)
        if number := self._stop or self._signal:
            logger.warning(
                "Stopped by %s behind step %d of %d; go on with --resume_from_checkpoint true.",
                signal.Signals(number).name,
                self.state.global_step,
                self.state.max_steps,
            )
            raise SystemExit(128 + number)
        return result

    def _build_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        loader = super()._build_dataloader(*args, **kwargs)
        if loader.num_workers:
            loader.timeout = self.args.dataloader_timeout
        return loader

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """The parent's; behind a signal every checkpoint stays and no other weights are loaded, as the run is to go on."""
        if not (self._stop or self._signal):
            return super()._finalize_training(*args, **kwargs)
        limit, best = self.args.save_total_limit, self.args.load_best_model_at_end
        self.args.save_total_limit, self.args.load_best_model_at_end = None, False
        try:
            return super()._finalize_training(*args, **kwargs)
        finally:
            self.args.save_total_limit, self.args.load_best_model_at_end = limit, best

    def _evaluate_what_is_due(self) -> None:
        """Measure what a signal left out, so that the best checkpoint and early stopping are those of an undisturbed run."""
        if not self._due:
            return
        self._due = False
        metrics = self._evaluate(None, None, skip_scheduler=True)
        if self._determine_best_metric(metrics=metrics, trial=None):
            self.state.best_model_checkpoint = str(self._written)

    def _load_best_model(self) -> None:
        """Load the best checkpoint, where it is what was written; the parent would go on with the last weights.

        Raises:
            CheckpointError: It is damaged.
        """
        best = Path(str(self.state.best_model_checkpoint))
        try:
            verify(best)
        except CheckpointError as error:
            raise CheckpointError(
                f"The best checkpoint cannot be loaded, and no other weights are released in its place. {error} "
                f"{last_good(self.args.output_dir)} Put {best.name} back as it was, or delete it and resume: then the "
                "last weights count, or better ones that are still to come."
            ) from error
        self.model.model_card_data.set_best_model_step(self.state.best_global_step)
        self._load_from_checkpoint(str(best))

    # ------------------------------------------------------------------------------------------------------------ steps

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """As the parent's; processes end a pass over a stream together, and leave out an incomplete group of batches.

        Files of unequal length would otherwise leave one process waiting for others that have nothing left to read.
        """
        samples, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.args.world_size > 1 and isinstance(self.train_dataset, IterableDataset):
            whole = torch.tensor(len(samples) == num_batches, dtype=torch.int64, device=device)
            dist.all_reduce(whole, op=dist.ReduceOp.MIN)
            if not whole:
                return [], None
        return samples, items

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """One micro-batch; before an update the heads' gradients are averaged over processes, as DDP does the model's."""
        self.loss.train()
        loss = self._step_within_memory(model, inputs, num_items_in_batch)
        self._finite = self._finite.to(loss.device) & torch.isfinite(loss)
        self._batches += 1
        self._gradients_pending = not self.accelerator.sync_gradients
        if self.args.world_size > 1 and self.accelerator.sync_gradients:
            for parameter in self.head_parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.args.world_size
        return loss

    def track_loss_components(self, loss: dict[str, Tensor]) -> None:
        """As the parent's; the terms are kept for a message."""
        self._terms = {name: value.detach() for name, value in loss.items()}
        super().track_loss_components(loss)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The norm, heads included. Processes agree here whether this step is made, and whether it is the last."""
        parameters = [*model.parameters(), *self.head_parameters()]
        if grad_norm is None:
            grad_norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        scaled = self.accelerator.scaler is not None  # its steps overflow now and then, and are left out by itself
        finite = self._finite if scaled else self._finite & torch.isfinite(torch.as_tensor(grad_norm)).to(self._finite)
        if self.args.world_size > 1:
            agreed = torch.tensor([not finite, self._signal], dtype=torch.int64, device=self.args.device)
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
            self._skipping, self._stop = bool(agreed[0]), int(agreed[1])
        else:
            self._skipping = not finite
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if self._skipping else 0
        if scaled:
            self._scale = self.accelerator.scaler.get_scale()
        if self._skipping:
            self._skip(parameters, gradients=not scaled)
        return super()._get_grad_norm(model, grad_norm=grad_norm)

    def _skip(self, parameters: list[nn.Parameter], *, gradients: bool) -> None:
        """Take a step back before it changes anything; where it is one too many, end."""
        step = self.state.global_step + 1
        wrong = [name for name, value in self._terms.items() if not torch.isfinite(value).all()]
        cause = f"The loss of {', '.join(wrong)} is" if wrong else "A gradient, or the loss of another process, is"
        if self._skipped_in_a_row >= self.args.max_skipped_steps:
            raise NonFiniteError(
                f"{cause} not finite in step {step}, as in the {self._skipped_in_a_row - 1} before it, which were skipped. "
                f"Lower --learning_rate (now {self.args.learning_rate:g}), warm up longer, or look at the data there. "
                f"{last_good(self.args.output_dir)}"
            )
        self._skipped += 1
        self._since_log[1] += 1
        logger.warning("%s not finite in step %d, which is skipped.", cause, step)
        buffers, total, terms = self._before_step
        self._restore_buffers(buffers)
        self._tr_loss.copy_(total)
        self.accum_loss_components["train"] = terms
        if gradients:  # an optimiser passes over parameters without one
            for parameter in parameters:
                parameter.grad = None

    def _begin_step(self) -> None:
        """Remember what a step changes beside the gradients."""
        self._finite = torch.tensor(True, device=self.args.device)
        self._before_step = (
            dict(self._alignment_loss.heads.named_buffers()),
            self._tr_loss.clone(),
            {name: value.clone() for name, value in self.accum_loss_components["train"].items()},
        )

    def _end_step(self) -> bool:
        """Let the objectives follow the encoder.

        Returns:
            Whether training ends here, by a signal.
        """
        self._since_log[0] += 1
        if not self._skipping and not self._overflowed():
            self._alignment_loss.after_step()
        if self.args.world_size == 1:
            self._stop = self._signal
        return bool(self._stop)

    def _overflowed(self) -> bool:
        """Whether the gradient scaler left out this step: then it has lowered its scale. A fused optimiser does not tell.

        Raises:
            NonFiniteError: It did so too often in a row for one that is looking for its scale.
        """
        scaler = self.accelerator.scaler
        if scaler is None or scaler.get_scale() >= self._scale:
            self._overflows = 0
            return False
        self._overflows += 1
        self._skipped += 1
        if self._overflows >= max(self.args.max_skipped_steps, SCALE_SEARCH):
            raise NonFiniteError(
                f"The gradients of step {self.state.global_step} are not finite in float16, as in the {self._overflows - 1} "
                f"steps before it, none of which was made; gradients are multiplied by {scaler.get_scale():g} by now. Train "
                "with --bf16 or in float32, or look at the data there. "
                f"{last_good(self.args.output_dir)}"
            )
        return True

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the parent's; the mean loss is that of the steps that were made, and skipped ones are counted."""
        if "loss" in logs:
            steps, skipped = self._since_log
            self._since_log = [0, 0]
            if self._skipped:
                logs["skipped_steps"] = self._skipped
            if not math.isfinite(logs.get("grad_norm", 0.0)):
                del logs["grad_norm"]
            if steps and skipped == steps:
                del logs["loss"]
            elif skipped:
                logs["loss"] *= steps / (steps - skipped)
        super().log(logs, *args, **kwargs)

    def _restore_buffers(self, buffers: dict[str, Tensor]) -> None:
        heads = self._alignment_loss.heads
        for name, value in buffers.items():  # a queue that was filled
            parent, _, last = name.rpartition(".")
            setattr(heads.get_submodule(parent), last, value)

    def _step_within_memory(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any) -> Tensor:
        """The parent's step, made again with smaller micro-batches where memory runs out."""
        heads = self._alignment_loss.heads
        alone = self.args.world_size == 1 and self.accelerator.distributed_type == DistributedType.NO
        while True:
            randomness, buffers = _rng_states(), dict(heads.named_buffers())
            try:
                with accumulated_in_place(enabled=alone), liger_kernel(enabled=self.args.use_liger_kernel):
                    return super().training_step(model, inputs, num_items_in_batch)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                smaller = self._smaller_micro_batch(inputs, error)
            # Outside of the handler, whose traceback would keep the failed step's tensors.
            model.zero_grad()
            heads.zero_grad()
            self._restore_buffers(buffers)
            torch.set_rng_state(randomness[0])
            if torch.cuda.is_available():
                torch.cuda.set_rng_state_all(randomness[1])
                torch.cuda.empty_cache()
            logger.warning("Memory ran out; encoding %d rows at a time from here on (micro_batch_size).", smaller)
            self._alignment_loss.micro_batch_size = smaller

    def _smaller_micro_batch(self, inputs: dict[str, Any], error: Exception) -> int:
        """Half of the present micro-batch, or the error where that would not help."""
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise error
        rows = sum(
            len(view["input_ids"]) for view in inputs.values() if isinstance(view, dict) and "input_ids" in view
        )
        present = min(self._alignment_loss.micro_batch_size or rows, rows)
        if present <= 1:
            raise MemoryBudgetError(
                "Memory ran out at one row at a time. Shorten texts (--max_length), train less (--freeze_word_embeddings) or "
                "a smaller encoder, or take a device with more memory."
            ) from error
        if self._gradients_pending:
            raise MemoryBudgetError(
                f"Memory ran out at {present} rows, behind micro-batches whose gradients cannot be told from this one's. "
                f"Resume with --micro_batch_size {present // 2}."
            ) from error
        if self.args.world_size > 1:
            raise MemoryBudgetError(
                f"Memory ran out at {present} rows in process {self.args.process_index}, and the others cannot take smaller "
                f"parts in the same step. Resume with --micro_batch_size {present // 2}: the gradient stays the same."
            ) from error
        return present // 2

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """One batch of an evaluation loss."""
        self.loss.eval()
        return super().prediction_step(*args, **kwargs)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        parameters = [*model.parameters(), *self.head_parameters()]
        return self.accelerator.clip_grad_norm_(parameters, self.args.max_grad_norm)

    @contextmanager
    def _heeding_signals(self) -> Iterator[None]:
        """Take SIGTERM and SIGINT as wishes to stop behind the present step; a second one is not asked for twice."""
        self._signal = self._stop = 0
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        pid, first = os.getpid(), 0.0

        def heed(number: int, frame: Any) -> None:
            nonlocal first
            if os.getpid() != pid:  # a data loader's process, which ends with this one
                return
            if self._signal:
                # torchrun repeats an interrupt that the terminal has sent to all already.
                if self.args.world_size == 1 or time.monotonic() - first > 1:
                    signal.signal(number, signal.SIG_DFL)
                    signal.raise_signal(number)
                return
            self._signal, first = number, time.monotonic()
            message = (
                f"{signal.Signals(number).name}: a checkpoint is written behind this step; again to end at once.\n"
            )
            os.write(2, message.encode())  # a logger may be busy with a line of its own

        before = {number: signal.signal(number, heed) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)

    # ------------------------------------------------------------------------------------------------------ checkpoints

    def _saved(self) -> nn.Module:
        return self._alignment_loss

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        folder = Path(output_dir or self.args.output_dir)
        (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)  # a pickle
        (folder / TRAINING_ARGS).write_text(self.args.to_json_string() + "\n", encoding="utf-8")
        if self._alignment_loss.heads.state_dict():
            self._alignment_loss.heads.save_pretrained(folder / HEADS)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        before = self._written
        super()._save_checkpoint(model, trial)
        if self.args.push_to_hub and self._written != before:
            self._push_from_checkpoint(str(self._written))

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Make the repository to push to, before training. A Hub that fails or is out of reach is warned of only.

        Args:
            token: Access token; default: ``hub_token``, else the stored one.
            private: Make a new repository private; default: ``hub_private_repo``.

        Raises:
            HubAccessError: There is no token, or the Hub does not let it write there.
            UsageError: The repository is public where a private one is wanted; or it has no organisation in its name, and the
                Hub is out of reach.
        """
        if not self.is_world_process_zero():
            return
        self.push_in_progress = None
        name = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
        private = bool(self.args.hub_private_repo if private is None else private)
        command = push_command(self.args.output_dir, name, private=private, revision=self.args.hub_revision)
        later = f"A release can be pushed after training too: `{command}`."
        try:
            self.hub_model_id = make_repository(name, private=private, token=token or self.args.hub_token, later=later)
        except HubError as error:
            if not is_transient(error):
                raise
            if "/" not in name:
                raise UsageError(
                    f"The Hub, which knows whose {name!r} is, cannot be asked now. Give hub_model_id as organisation/name, "
                    "and training goes on without the Hub."
                ) from error
            self.hub_model_id = name
            logger.warning("%s Training goes on, and each of its pushes tries again.", error)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> str | None:
        """Release the model to the output folder and push the release: no pickle, no optimiser, no head.

        Args:
            commit_message: Title of the commit.
            blocking: Ignored: the upload is over, and checked, when this returns.
            token: Access token; default: ``hub_token``, else the stored one.
            revision: Branch; default: ``hub_revision``, else the main one.
            private: Make a new repository private; default: ``hub_private_repo``.
            **kwargs: As for the parent (unused).

        Returns:
            Address of the commit; None on other processes than the first.

        Raises:
            HubError: It could not be pushed, though the release is there; the message says how to push it later.
            UsageError: The repository is public where a private one is wanted; or the model was trained with a language
                embedding: each language's release is pushed by itself.
        """
        if not self.is_world_process_zero():
            return None
        if self._alignment_loss.heads.language_embedding is not None:
            raise UsageError(ONE_RELEASE)
        check_finite(self._alignment_loss, lambda: last_good(self.args.output_dir))
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        folder = Path(self.args.output_dir)
        release(self.model, folder, recipe=self._alignment_loss.recipe.to_dict(), card=self.model.model_card_data)
        return push(
            folder,
            str(self.hub_model_id),
            token=token or self.args.hub_token,
            revision=revision or self.args.hub_revision,
            private=bool(self.args.hub_private_repo if private is None else private),
            commit_message=commit_message or "End of training",
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push what training has reached, as a release; at a fault of the Hub, or its refusal, training goes on."""
        if self._staging is not None or self.args.hub_strategy == HubStrategy.END:
            return
        try:
            self.push_to_hub(f"Training in progress, step {self.state.global_step}")
        except (HubError, UsageError) as error:
            logger.warning("%s Training goes on; its next checkpoint, and its end, are pushed again.", error)

    def _check_space(self) -> None:
        weights, optimiser = self._bytes()
        check_space(Path(self.args.output_dir), weights, weights + optimiser)

    def _facts(self) -> dict[str, Any]:
        """What a manifest says of the run."""
        return {
            "step": self.state.global_step,
            "epoch": self._epoch - 1,
            "batches": self._batches,
            "skipped_steps": self._skipped,
            "skipped_in_a_row": self._skipped_in_a_row,
            "overflows_in_a_row": self._overflows,
            "evaluation_due": self._due,
            "ended": self.control.should_training_stop
            and not self._stop
            and self.state.global_step < self.state.max_steps,
            "run": self._run_facts(),
        }

    def _run_facts(self) -> dict[str, Any]:
        """What must not change when a run is resumed."""
        recipe = self._alignment_loss.recipe.to_dict()
        facts = {
            "terms": recipe["terms"],
            "max_length": self._alignment_loss.max_length,
            "processes": self.args.world_size,
            "per_device_train_batch_size": self.args.per_device_train_batch_size,
            "gradient_accumulation_steps": self.args.gradient_accumulation_steps,
            "seed": self.args.seed,
        }
        facts |= self._encoder_facts()
        if isinstance(self.train_dataset, Dataset):
            facts["pairs"] = len(self.train_dataset)
        if (digest := self._corpus_digest()) is not None:
            facts["corpus"] = digest
        return dict(json.loads(json.dumps(facts)))

    def _encoder_facts(self) -> dict[str, Any]:
        """What the encoder is beside its weights, which a checkpoint brings along."""
        card, origin = self.model.model_card_data, origin_of(self.model)
        folder = Path(origin).name if origin else None
        others = [module for module in list(self.model)[1:] if not isinstance(module, Pooling)]
        return {
            "base_model": card.base_model if card.base_model_revision else folder,
            "base_model_revision": card.base_model_revision,
            "pooling": [module.pooling_mode for module in self.model if isinstance(module, Pooling)],
            "modules": [f"{type(module).__name__} {_digest(module.get_config_dict())}" for module in others],
            "tokenizer": self._tokenizer_digest,
            "frozen": [name for name, weight in self.model.named_parameters() if not weight.requires_grad],
        }

    @cached_property
    def _tokenizer_digest(self) -> str:
        """Of pieces and rules, without what a call changes."""
        tokenizer = self.model.tokenizer
        if getattr(tokenizer, "is_fast", False):
            content = json.loads(tokenizer.backend_tokenizer.to_str())
            content = {key: value for key, value in content.items() if key not in ("truncation", "padding", "version")}
        else:
            content = tokenizer.get_vocab()
        return _digest(content)

    def _corpus_digest(self) -> str | None:
        """Of the rows, or of the files behind a stream where they are known; computed once."""
        dataset = self.train_dataset
        if self._hashed[0] is not dataset:
            made = data_digest if isinstance(dataset, Dataset) else stream_digest
            known = isinstance(dataset, Dataset | IterableDataset)
            self._hashed = dataset, made(dataset) if known else None
        return self._hashed[1]

    def _choose_checkpoint(self, asked: str | Path | bool) -> str:
        """The checkpoint to go on from, the same in all processes.

        Raises:
            CheckpointError: It is damaged, of another run, or there is none.
        """
        answer: list[Any] = [None, None]
        if self.args.process_index == 0:
            try:
                answer[0] = self._verified(asked)
            except CheckpointError as error:
                answer[1] = error
        if self.args.world_size > 1:
            dist.broadcast_object_list(answer)
        if answer[1] is not None:
            raise answer[1]
        return str(answer[0])

    def _verified(self, asked: str | Path | bool) -> Path:
        folder = newest(self.args.output_dir) if asked is True else Path(str(asked))
        if folder is None:
            raise CheckpointError(f"There is no checkpoint in {self.args.output_dir} to go on from.")
        manifest = verify(folder)
        before, now = manifest["run"], self._run_facts()
        for name in ADDED_FACTS - before.keys():  # written before there was this one, which then cannot tell
            now.pop(name, None)
        if "corpus" not in before:
            before.pop("data", None)
        if changed := differences(before, now):
            message = f"{folder} was written by another run, which differs in: {', '.join(changed)}."
            if not self.args.allow_changes:
                raise CheckpointError(
                    f"{message} Give what it was begun with, or go on all the same by --allow_changes."
                )
            logger.warning("%s", message)
        if changed := differences(manifest["versions"], versions()):
            logger.warning(
                "%s was written with other versions, so that digits may differ: %s.", folder, ", ".join(changed)
            )
        return folder

    def _load_from_checkpoint(self, checkpoint_path: str) -> None:
        encoder = load_encoder(checkpoint_path, device="cpu")
        self.model.load_state_dict(encoder.state_dict())
        if self._alignment_loss.heads.state_dict():
            heads = AlignmentHeads.from_pretrained(Path(checkpoint_path) / HEADS)
            self._alignment_loss.heads.load_state_dict(heads.state_dict())

    # ---------------------------------------------------------------------------------------------------- place in data

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """Passes over the data that are done, and batches of the next one: of a stream, whose length nobody knows, too."""
        self._written, self._due = None, False
        self._skipped = self._skipped_in_a_row = self._overflows = 0
        self._since_log = [0, 0]
        self._gradients_pending = False
        epoch, batches = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if resume_from_checkpoint is not None:
            manifest = json.loads((Path(resume_from_checkpoint) / MANIFEST).read_text(encoding="utf-8"))
            self._skipped, self._skipped_in_a_row = manifest["skipped_steps"], manifest["skipped_in_a_row"]
            self._overflows = manifest.get("overflows_in_a_row", 0)
            self._written = Path(resume_from_checkpoint)
            self._due = manifest.get("evaluation_due", False)
            stopped_early = manifest.get("ended") and not self.args.allow_changes
            if stopped_early or self.state.global_step >= max_steps:
                return num_train_epochs, 0
            if isinstance(self.train_dataset, IterableDataset) and not self.args.ignore_data_skip:
                epoch, batches = manifest["epoch"], manifest["batches"]
        self._epoch, self._offset = epoch, batches
        return epoch, batches

    def _begin_epoch(self) -> None:
        """Make what is random in views and batches that of this pass over the data."""
        self.data_collator.set_epoch(self._epoch)
        if self._sampler is not None:  # under distributed training, accelerate does not reach it
            self._sampler.set_epoch(self._epoch)
        if isinstance(self.train_dataset, IterableDataset) and self.args.dataloader_num_workers == 0:
            self.data_collator.passed_over = 0 if self.args.ignore_data_skip else self._offset
        self._batches, self._offset = self._offset, 0
        self._epoch += 1
