"""Resuming a run: facts that must not change, the choice of a checkpoint, and the position in the data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.sentence_transformer.training_args import BatchSamplers
from torch import Tensor
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.training_args import OptimizerNames

from metaphrase.checkpoints.folders import (
    TRAINING_ARGS,
    checkpoint_folders,
    differences,
    fault_of,
    last_good,
    newest,
    read_manifest,
    recover,
    verify,
)
from metaphrase.checkpoints.saving import errors_of
from metaphrase.corpus.digests import data_digest, stream_digest
from metaphrase.encoders.adapters import adapter_settings
from metaphrase.encoders.loading import origin_of
from metaphrase.encoders.names import encoder_files
from metaphrase.exceptions import CheckpointError
from metaphrase.io.digests import files_sha256, json_digest, tokenizer_content
from metaphrase.io.environment import hardware, versions
from metaphrase.io.files import as_json, read_json
from metaphrase.modeling.collator import ParallelCollator
from metaphrase.training.arguments import AlignmentTrainingArguments
from metaphrase.training.distributed import from_first_process
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.weight_decay import DecayTowardStart

logger = logging.getLogger(__name__)

#: Words that --resume_from_checkpoint takes instead of a path.
TRUE, FALSE = ("true", "yes", "1"), ("false", "no", "0")

#: Facts that the position in a stream depends on, which is counted in batches.
COUNTED_IN = ("per_device_train_batch_size", "processes", "dataloader_num_workers")


class RunFacts:
    """Facts of a run that must not change when it is resumed. Digests are computed once.

    The encoder of the loss is not yet wrapped for distributed training.
    """

    def __init__(
        self, loss: AlignmentLoss, args: AlignmentTrainingArguments, decay: DecayTowardStart | None = None
    ) -> None:
        self._loss, self._args, self._decay = loss, args, decay
        self._read = loss.digests
        self._model = loss.model
        self._digested: tuple[Any, str | None] = (None, None)  # the training data and their digest

    def collect(self, dataset: Any) -> dict[str, Any]:
        """The facts of training on a data set, as JSON values."""
        facts = {
            "terms": self._loss.recipe.to_dict()["terms"],
            "max_length": self._loss.max_length,
            "processes": self._args.world_size,
            "per_device_train_batch_size": self._args.per_device_train_batch_size,
            "gradient_accumulation_steps": self._args.gradient_accumulation_steps,
            "seed": self._args.seed,
        }
        settings = {"batches": "mixed", "data_seed": None, "batch_sampler": BatchSamplers.BATCH_SAMPLER}
        given = {name: getattr(self._args, name) for name in settings}
        facts |= {name: _named(value) for name, value in given.items() if value != settings[name]}
        if (optimizer := kind_of_optimizer(self._args)) is not None:
            facts["optim"] = optimizer
        facts |= self._encoder_facts() | self._original_facts
        parts = dataset if isinstance(dataset, Mapping) else {"": dataset}
        if isinstance(dataset, Mapping):
            facts["multi_dataset_batch_sampler"] = _named(self._args.multi_dataset_batch_sampler)
        if all(isinstance(part, Dataset) for part in parts.values()):
            facts["pairs"] = sum(map(len, parts.values()))
        if isinstance(dataset, IterableDataset) and self._args.dataloader_num_workers:
            facts["dataloader_num_workers"] = min(self._args.dataloader_num_workers, dataset.num_shards)
        if self._digested[0] is not dataset:
            self._digested = dataset, digest_of(dataset)
        if (digest := self._digested[1]) is not None:
            facts["corpus"] = digest
        return dict(as_json(facts))

    def _encoder_facts(self) -> dict[str, Any]:
        """The encoder without its weights, which the checkpoint contains."""
        model = self._model
        card, origin = model.model_card_data, origin_of(model)
        folder = Path(origin).name if origin else None
        others = [module for module in list(model)[1:] if not isinstance(module, Pooling)]
        return {
            "base_model": card.base_model if card.base_model_revision else folder,
            "base_model_revision": card.base_model_revision,
            "base_weights": self._base_weights,
            "pooling": [module.pooling_mode for module in model if isinstance(module, Pooling)],
            "modules": [f"{type(module).__name__} {_digest(module.get_config_dict())}" for module in others],
            "tokenizer": self._tokenizer_digest,
            "frozen": [name for name, weight in model.named_parameters() if not weight.requires_grad],
            **({"adapters": _digest(adapters)} if (adapters := adapter_settings(model)) else {}),
        }

    @cached_property
    def _base_weights(self) -> str | None:
        """Digest of the files of weights in a local folder, which could contain other weights than before."""
        files = [path for path in encoder_files(origin_of(self._model)) if path.suffix == ".safetensors"]
        return files_sha256(files)[:16] if files else None

    @cached_property
    def _tokenizer_digest(self) -> str:
        return _digest(tokenizer_content(self._model.tokenizer))

    @cached_property
    def _original_facts(self) -> dict[str, str]:
        """Digests of what a checkpoint does not contain: what an objective reads, its code, and the start of weight decay."""
        digests = {} if self._decay is None else {"start": self._decay.digest}
        for name, read in self._read.items():
            digests |= {f"{name}.{what}": digest for what, digest in read.items()}
        return {name: _digest(digest) for name, digest in digests.items()}


def _named(value: Any) -> Any:
    """The name of a class or function, such as the caller's own sampler; other values unchanged."""
    if not callable(value):
        return value
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def kind_of_optimizer(args: AlignmentTrainingArguments) -> str | None:
    """The kind of optimiser; None for AdamW of PyTorch, whose two forms have equal states."""
    return None if args.optim in (OptimizerNames.ADAMW_TORCH, OptimizerNames.ADAMW_TORCH_FUSED) else args.optim


def digest_of(dataset: Any) -> str | None:
    """Digest of the rows of one or several data sets, or of the files of a stream if they are known."""
    if isinstance(dataset, Dataset):
        return data_digest(dataset)
    if isinstance(dataset, Mapping):
        return _digest([[name, data_digest(part)] for name, part in dataset.items()])
    return stream_digest(dataset) if isinstance(dataset, IterableDataset) else None


def _digest(content: Any) -> str:
    return json_digest(content)[:16]


def choose_checkpoint(
    requested: str | Path | bool, args: AlignmentTrainingArguments, facts: Callable[[], dict[str, Any]]
) -> str:
    """Choose the checkpoint to resume; the first process decides for all.

    ``requested`` is a checkpoint, or True for the latest valid one.
    """
    answer: Path | CheckpointError | None = None
    if args.process_index == 0:
        try:
            answer = recover(_verified_checkpoint(requested, args, facts))
        except CheckpointError as error:
            answer = error
    answer = from_first_process(answer)
    if isinstance(answer, CheckpointError):
        raise answer
    return str(answer)


def _verified_checkpoint(
    requested: str | Path | bool, args: AlignmentTrainingArguments, facts: Callable[[], dict[str, Any]]
) -> Path:
    folder = _find_checkpoint(requested, str(args.output_dir))
    if folder is None:
        raise CheckpointError(f"There is no checkpoint in {args.output_dir} to resume.")
    manifest = read_manifest(folder)
    if argument_of(folder, "save_only_model"):
        raise CheckpointError(
            f"{folder} cannot be resumed: it was written with save_only_model, so it has no optimiser, schedule and random "
            f"states. Start from its weights with --model {folder}, or resume another checkpoint."
        )
    with errors_of(folder, "state"):
        state = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
        if (
            not isinstance(manifest["run"], dict)
            or state.global_step != manifest["step"]
            or not state.train_batch_size
        ):
            raise ValueError
    if changed := differences(manifest["run"], now := facts()):
        message = f"{folder} belongs to another run, which differs in: {', '.join(changed)}."
        counts_differ = any((manifest["run"].get(name) or 1) != (now.get(name) or 1) for name in COUNTED_IN)
        loses_position = counts_differ and "pairs" not in now  # in a stream
        if not args.allow_changes:
            base, commit = (manifest["run"].get(name) for name in ("base_model", "base_model_revision"))
            is_other = commit is not None and base == now["base_model"] and commit != now["base_model_revision"]
            original = f"encoder with --model {base}@{commit}" if is_other else "settings"
            options = "--allow_changes and --ignore_data_skip" if loses_position else "--allow_changes"
            raise CheckpointError(
                f"{message} Restore the original {original}, or pass {options} to `metaphrase train`."
            )
        if loses_position and not args.ignore_data_skip:
            raise CheckpointError(
                f"{message} The position in a stream is a number of batches, so it is lost if their size, or the number of "
                "processes or data loader workers, changes. Restore these, or also pass --ignore_data_skip, which reads the "
                "stream from its start."
            )
        logger.warning("%s", message)
    before = manifest["versions"] | manifest["hardware"]
    if changed := differences(before, versions() | hardware()):
        logger.warning(
            "%s was written with other versions or hardware, so results may differ in the last digits: %s.",
            folder,
            ", ".join(changed),
        )
    return folder


def _find_checkpoint(requested: str | Path | bool, output: str) -> Path | None:
    """The requested checkpoint, or for True the latest valid one of the output folder if there is any; it is verified."""
    if requested is True:
        return newest(output)
    folder = Path(str(requested))
    if (fault := fault_of(folder)) is not None:
        raise CheckpointError(f"{fault} {last_good(folder.parent)}") from fault
    return folder


def verify_best(folder: Path, output: str | Path) -> None:
    """Verify the best checkpoint before its weights are loaded at the end of training."""
    try:
        verify(folder)
    except CheckpointError as error:
        raise CheckpointError(
            f"The best checkpoint cannot be loaded, and other weights are not released in its place. {error} "
            f"{last_good(output)} Restore {folder.name}, or delete it and resume: the run then ends with the last weights, "
            "or with a better checkpoint still to come."
        ) from error


@dataclass
class DataPosition:
    """Position of a run in its data. It also locates streams, whose length is unknown.

    Attributes:
        epoch: Number of the epoch, from 0.
        batches: Batches of this epoch that were trained on.
        offset: Batches of the new epoch that an earlier run trained on.
    """

    epoch: int = 0
    batches: int = 0
    offset: int = 0

    def begin_epoch(self) -> None:
        """Start an epoch after the batches of an earlier run."""
        self.batches, self.offset = self.offset, 0

    def end_epoch(self) -> None:
        """Move to the first batch of the next epoch."""
        self.batches = 0
        self.epoch += 1

    def facts(self, *, is_epoch_over: bool = False) -> dict[str, int]:
        """The position, for the manifest of a checkpoint. A callback may end an epoch before its last batch."""
        if is_epoch_over and self.batches:
            return {"epoch": self.epoch + 1, "batches": 0}
        return {"epoch": self.epoch, "batches": self.batches}


class ResumableCollator(ParallelCollator):
    """A collator that skips the batches that a resumed stream has already trained on, without building them."""

    batches_to_skip = 0

    def __call__(self, examples: Any) -> dict[str, dict[str, Tensor]]:
        """Build the views of a batch, or skip it."""
        if self.batches_to_skip:
            self.batches_to_skip -= 1
            return {}
        return super().__call__(examples)


def argument_of(checkpoint: str | Path, name: str) -> bool:
    """A training argument of the run of a checkpoint; False if it cannot be read."""
    try:
        return bool(read_json(Path(checkpoint) / TRAINING_ARGS)[name])
    except (OSError, ValueError, KeyError):  # `verify` reports a damaged checkpoint
        return False


def checkpoint_to_resume(arguments: AlignmentTrainingArguments) -> str | None:
    """The checkpoint of ``--resume_from_checkpoint``: a path, or the last valid one of the output folder for ``true``.

    A folder that holds other checkpoints is refused: a later resume could not distinguish them from this run's.
    """
    output = str(arguments.output_dir)
    asked = str(arguments.resume_from_checkpoint or "false")
    present = checkpoint_folders(output, staged=True)
    if asked.lower() in FALSE:
        if present:
            raise CheckpointError(
                f"{output} holds {present[-1].name} of an earlier run. Resume it with "
                "--resume_from_checkpoint true, or choose another --output_dir."
            )
        return None
    checkpoint = _find_checkpoint(True if asked.lower() in TRUE else asked, output)
    if checkpoint is None:
        logger.info("No checkpoint in %s yet; training starts from the beginning.", output)
        return None
    last = present[-1].resolve() if present else None
    if last is not None and asked.lower() not in TRUE and last != checkpoint.resolve():
        raise CheckpointError(
            f"{checkpoint} is not the last checkpoint in {output}, which also holds {last.name}. Choose another "
            f"--output_dir, or delete the other checkpoints of {output}, so that a later resume does not continue from them."
        )
    logger.info("Resuming from %s.", checkpoint)
    return str(checkpoint)
