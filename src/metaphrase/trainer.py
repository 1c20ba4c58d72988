"""The trainer: sentence-transformers' own, with losses that own parameters done right."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.sampler import NoDuplicatesBatchSampler
from sentence_transformers.sentence_transformer.training_args import BatchSamplers
from torch import Tensor, nn
from torch.utils.data import BatchSampler
from transformers import PreTrainedTokenizerBase, TrainerCallback

from metaphrase.card import AlignmentModelCardData
from metaphrase.collator import ParallelCollator
from metaphrase.encoders import load_encoder
from metaphrase.functional import accumulated_in_place
from metaphrase.heads import AlignmentHeads
from metaphrase.loss import AlignmentLoss
from metaphrase.packing import packed

logger = logging.getLogger(__name__)

#: Folder of the heads inside a checkpoint.
HEADS = "heads"

#: Name of the heads' parameters among the loss's.
HEAD_PARAMETERS = r"^heads\."


@dataclass
class AlignmentTrainingArguments(SentenceTransformerTrainingArguments):
    """Training arguments of sentence-transformers and what alignment adds to them.

    Attributes:
        head_learning_rate: Learning rate of the objectives' heads; None takes ``learning_rate``.
        packing: Run the encoder without padding, where it can.
        micro_batch_size: Rows (sentences, of either side) that the encoder encodes at a time; None encodes all views of a
            batch at once. ``per_device_train_batch_size`` stays the batch that is ranked: the gradient is the same, for
            less memory and one more forward pass. Where memory runs out it is set, or halved, and the step made again.
        logging_nan_inf_filter: Off, so that a loss that is not finite shows.
        dataloader_pin_memory: On only where there is a CUDA device to pin for.
    """

    head_learning_rate: float | None = field(
        default=None, metadata={"help": "Learning rate of the objectives' heads; default: learning_rate."}
    )
    packing: bool = field(default=True, metadata={"help": "Run the encoder without padding: the same result, faster."})
    micro_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Rows encoded at a time, with the gradient of the whole batch; found where memory runs out."
        },
    )
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Hide losses that are not finite from the log."}
    )
    dataloader_pin_memory: bool = field(
        default_factory=torch.cuda.is_available, metadata={"help": "Pin memory in data loaders."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.micro_batch_size is not None and self.micro_batch_size < 1:
            raise ValueError(f"micro_batch_size is a number of rows from 1, or none, but got {self.micro_batch_size}.")
        # With a stream, rank 0 would otherwise read for all ranks and slice tensors that are no batch (links, queues).
        if self.accelerator_config.dispatch_batches is None:
            self.accelerator_config.dispatch_batches = False


class _Pace(TrainerCallback):
    """Tell collator and sampler which epoch it is, so that masks and batches differ; and the loss when a step was made."""

    def __init__(self, trainer: AlignmentTrainer) -> None:
        self.trainer = trainer

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        epoch = int(state.epoch or 0)
        self.trainer.data_collator.set_epoch(epoch)
        if self.trainer._sampler is not None:  # under distributed training, accelerate does not reach it
            self.trainer._sampler.set_epoch(epoch)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._alignment_loss.after_step()


def _rng_states() -> tuple[Tensor, list[Tensor]]:
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []


class AlignmentTrainer(SentenceTransformerTrainer):
    """Trains a SentenceTransformer with an :class:`AlignmentLoss`.

    What it adds to its parent: batches are views; heads are saved in every checkpoint and restored from it, averaged over
    processes, clipped with the encoder, and switched between training and evaluation; the encoder runs without padding.

    Args:
        *args: As for ``SentenceTransformerTrainer``.
        **kwargs: Likewise; ``loss`` must be an :class:`AlignmentLoss`.

    Raises:
        ValueError: The loss is no :class:`AlignmentLoss`, or prompts are given: training uses none.
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
        AlignmentModelCardData.adopt(loss.model, recipe=loss.recipe.to_dict())
        super().__init__(*args, loss=loss, **kwargs)
        if self.args.n_gpu > 1:
            raise ValueError(
                f"{self.args.n_gpu} GPUs are visible to one process. Start one process each with torchrun, or show one "
                "with CUDA_VISIBLE_DEVICES=0."
            )
        if self.args.prompts:
            raise ValueError("Alignment trains without prompts; leave `prompts` out of the training arguments.")
        if self.args.head_learning_rate is not None and self.head_parameters():
            self.args.learning_rate_mapping.setdefault(HEAD_PARAMETERS, self.args.head_learning_rate)
        loss.micro_batch_size = self.args.micro_batch_size
        self.add_callback(_Pace(self))

    def get_data_collator(
        self, model: SentenceTransformer, args: Any, processing_class: PreTrainedTokenizerBase | None = None
    ) -> ParallelCollator:
        """A collator of the views that the loss asks for."""
        return ParallelCollator(model.tokenizer, self._alignment_loss.views, seed=args.seed)

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

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, without padding unless told otherwise; every process starts from the first one's heads."""
        if self.args.world_size > 1:
            for value in self._alignment_loss.heads.state_dict().values():
                dist.broadcast(value, src=0)
        with packed(self.model, enabled=self.args.packing):
            return super().train(*args, **kwargs)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """One micro-batch; before an update the heads' gradients are averaged over processes, as DDP does the model's."""
        self.loss.train()
        loss = self._step_within_memory(model, inputs, num_items_in_batch)
        self._gradients_pending = not self.accelerator.sync_gradients
        if self.args.world_size > 1 and self.accelerator.sync_gradients:
            for parameter in self.head_parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.args.world_size
        return loss

    def _step_within_memory(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any) -> Tensor:
        """The parent's step, made again with smaller micro-batches where memory runs out."""
        heads = self._alignment_loss.heads
        alone = self.args.world_size == 1 and self.accelerator.distributed_type == DistributedType.NO
        while True:
            randomness, buffers = _rng_states(), dict(heads.named_buffers())
            try:
                with accumulated_in_place(enabled=alone):
                    return super().training_step(model, inputs, num_items_in_batch)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                smaller = self._smaller_micro_batch(inputs, error)
            # Outside of the handler, whose traceback would keep the failed step's tensors.
            model.zero_grad()
            heads.zero_grad()
            for name, value in buffers.items():  # a queue that was filled
                parent, _, last = name.rpartition(".")
                setattr(heads.get_submodule(parent), last, value)
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
        if self._gradients_pending:
            raise ValueError(
                f"Memory ran out at {present} rows, behind micro-batches whose gradients cannot be told from this one's. "
                f"Resume with --micro_batch_size {max(present // 2, 1)}."
            ) from error
        if present <= 1 or self.args.world_size > 1:
            raise error
        return present // 2

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """One batch of an evaluation loss."""
        self.loss.eval()
        return super().prediction_step(*args, **kwargs)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        parameters = [*model.parameters(), *self.head_parameters()]
        return self.accelerator.clip_grad_norm_(parameters, self.args.max_grad_norm)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        if self._alignment_loss.heads.state_dict():
            self._alignment_loss.heads.save_pretrained(Path(output_dir or self.args.output_dir) / HEADS)

    def _load_from_checkpoint(self, checkpoint_path: str) -> None:
        encoder = load_encoder(checkpoint_path, device="cpu")
        self.model.load_state_dict(encoder.state_dict())
        if self._alignment_loss.heads.state_dict():
            heads = AlignmentHeads.from_pretrained(Path(checkpoint_path) / HEADS)
            self._alignment_loss.heads.load_state_dict(heads.state_dict())

    def _checkpoint_push_skip_names(self, checkpoint_folder: str) -> set[str]:
        return super()._checkpoint_push_skip_names(checkpoint_folder) | {HEADS}
