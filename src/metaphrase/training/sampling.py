"""The batches of a trainer: mixed, of pairs in one language, or of pairs that share targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from sentence_transformers import SentenceTransformerTrainer
from sentence_transformers.base.sampler import DefaultBatchSampler, NoDuplicatesBatchSampler
from sentence_transformers.sentence_transformer.training_args import BatchSamplers
from torch import Tensor
from torch.utils.data import BatchSampler
from transformers.trainer_pt_utils import find_batch_size, nested_gather
from transformers.trainer_utils import EvalLoopOutput

from metaphrase.corpus.files import SPLITS
from metaphrase.exceptions import CorpusError, UsageError
from metaphrase.modeling.collator import ParallelCollator

#: Columns besides the two sentences that a kind of batches needs; mixed batches support streams, too.
_COLUMNS: dict[str, tuple[str, ...]] = {"language": ("source_lang", "target_lang"), "shared_target": ()}


def check_data(dataset: Any, name: str) -> None:
    """Refuse data that are not data sets of the library `datasets`, have no rows, or are not for training."""
    if isinstance(dataset, Mapping) and not dataset:
        raise UsageError(f"`{name}` is a dictionary without data sets. Omit it, or add one.")
    if name == "train_dataset":
        _check_splits(dataset)
    for part in parts_of(dataset):
        if not isinstance(part, Dataset | IterableDataset):
            raise UsageError(
                f"`{name}` must be a Dataset, an IterableDataset or a dictionary of Datasets, but is or contains a "
                f"{type(part).__name__}. Pass the `dataset` of a corpus from `load_corpus`, or convert rows with "
                "Dataset.from_list(rows)."
            )
        if isinstance(dataset, Mapping) and isinstance(part, IterableDataset):
            raise UsageError(
                f"`{name}` is a dictionary that contains a stream, but only Datasets can be mixed. Combine streams with "
                "datasets.interleave_datasets, or load the data without streaming."
            )
        if isinstance(part, IterableDataset) and part.column_names is None:
            raise UsageError(
                f"`{name}` is a stream without features, which name its columns. Pass them to "
                "IterableDataset.from_generator: features=Features({'source': Value('string'), 'target': Value('string')})."
            )
        if isinstance(part, Dataset) and not len(part):
            raise UsageError(
                f"`{name}` is or contains a data set without rows. Omit it, or check what was filtered out."
            )


def _check_splits(dataset: Any) -> None:
    """Refuse to train on data sets that are named after a split for validation or tests."""
    for name in dataset if isinstance(dataset, Mapping) else ():
        if name in SPLITS and name != "train":
            raise UsageError(
                f"`train_dataset` contains the split {name!r}, which would be trained on. Remove it, and pass it as "
                "`eval_dataset` if it is for validation. If it is for training, rename it."
            )


def check_rows(dataset: Any, collator: ParallelCollator) -> None:
    """Refuse data sets of whose first row no batch can be built, before training; of a stream, nothing is read."""
    for part in parts_of(dataset):
        if isinstance(part, Dataset):
            collator([part[0]])


def check_batches(batches: str, dataset: Any, name: str) -> None:
    """Refuse data that do not support a kind of batches, before they are read.

    Batches of one language need the languages of the pairs. Streams, which have no sampler, support mixed batches only;
    those for evaluation always have mixed batches.
    """
    if (columns := _COLUMNS.get(batches)) is None:
        return
    for part in parts_of(dataset):
        if name == "eval_dataset" and isinstance(part, IterableDataset):
            continue
        if not isinstance(part, Dataset) or not set(columns) <= set(part.column_names):
            needed, found = "", "is a stream"
            if columns:
                needed, found = ", with the columns 'source_lang' and 'target_lang'", "lacks these or is a stream"
            raise UsageError(
                f"'batches: {batches}' requires data that are not a stream{needed}, but `{name}` {found}. Load the corpus "
                "without streaming, or set 'batches' to 'mixed'."
            )


def parts_of(dataset: Any) -> list[Any]:
    """The data sets of a dictionary, or the data set; none for None."""
    if isinstance(dataset, Mapping):
        return list(dataset.values())
    return [] if dataset is None else [dataset]


class BatchSamplingTrainer(SentenceTransformerTrainer):
    """The part of the trainer that selects the batch sampler, and computes the evaluation loss per pair."""

    args: Any
    alignment_loss: Any
    _evaluated: tuple[str, float, dict[str, float]] | None = None  # key of the loss, the loss, and its terms

    def get_batch_sampler(
        self, dataset: Any, batch_size: int, drop_last: bool, *args: Any, **kwargs: Any
    ) -> BatchSampler | None:
        """The sampler of the batches: of one language each, or of pairs that share targets, if requested.

        A last batch with a single pair is dropped if an objective ranks a pair against the others of its batch.
        """
        ranks = any(objective.in_batch_negatives for objective in self.alignment_loss.objectives.values())
        drop_last |= ranks and len(dataset) > batch_size and len(dataset) % batch_size == 1
        kwargs |= {"batch_size": batch_size, "drop_last": drop_last, "seed": self._data_seed}
        if self.args.batches == "shared_target":
            return SharedTargetBatchSampler(dataset, *args, **kwargs)
        if self.args.batches == "language":
            return LanguageBatchSampler(dataset, *args, make=self._batch_sampler_of, **kwargs)
        return self._batch_sampler_of(dataset, *args, **kwargs)

    def get_multi_dataset_batch_sampler(self, *args: Any, **kwargs: Any) -> BatchSampler:
        """The sampler of the batches of several data sets."""
        return super().get_multi_dataset_batch_sampler(*args, **kwargs | {"seed": self._data_seed})

    def evaluation_loop(
        self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> EvalLoopOutput:
        """Evaluate, and fail if the data, such as a stream, have no batch; the loss would be missing."""
        self.accum_loss_components["eval"], self._evaluated = {}, None
        output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        only_evaluators = isinstance(dataloader.dataset, list)  # the parent class passes an empty list
        if not only_evaluators and not any(name.endswith("_loss") for name in output.metrics):
            raise CorpusError(
                "The evaluation data have no pairs, or too few for a batch, so they have no loss. Add pairs, or lower "
                f"per_device_eval_batch_size, which is {self.args.per_device_eval_batch_size}."
            )
        if (name := f"{metric_key_prefix}_loss") in output.metrics:
            sums = dict(nested_gather(self.accum_loss_components["eval"], self.args.parallel_mode))
            pairs = sums.pop("pairs").sum()
            terms = {f"{metric_key_prefix}_{term}": (value.sum() / pairs).item() for term, value in sums.items()}
            # That of the parent class omits pairs if processes do not divide the last batch.
            output.metrics[name] = loss = sum(terms.values())
            self._evaluated = name, loss, {term: round(mean, 4) for term, mean in terms.items()}
            self.accum_loss_components["eval"] = {}  # the parent class would log them, too
        return output

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """One batch of an evaluation loss, whose terms count once for each of its pairs, with heads in evaluation mode."""
        self.loss.eval()
        self._pairs = find_batch_size(inputs.get("source", inputs))
        return super().prediction_step(model, inputs, *args, **kwargs)

    def track_loss_components(self, loss: dict[str, Tensor]) -> None:
        """Sum the terms of the loss: in training over batches, in an evaluation over pairs."""
        if self.model.training:
            super().track_loss_components(loss)
            return
        sums = self.accum_loss_components["eval"]
        for name, value in {**loss, "pairs": torch.ones((), device=self.args.device)}.items():
            sums[name] = sums.get(name, 0) + self._pairs * value.detach().float()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the terms of the loss for each evaluation data set."""
        if self._evaluated is not None:
            name, loss, terms = self._evaluated
            logs = logs | terms if logs.get(name) == loss else logs
        super().log(logs, *args, **kwargs)

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


class LanguageBatchSampler(DefaultBatchSampler):
    """Batches of pairs whose sources are in one language, and whose targets are in one language.

    The batches of the languages follow each other at random, in proportion to their pairs. The pairs that do not fill a
    batch of their language form mixed batches at the end of an epoch. The batches of an epoch depend on the seed and its
    number only.

    ``make`` creates the sampler of a part of the data, and takes the same arguments.
    """

    generator: torch.Generator

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        drop_last: bool,
        generator: torch.Generator,
        seed: int,
        make: Callable[..., Any],
        **others: Any,
    ) -> None:
        super().__init__(dataset, batch_size=batch_size, drop_last=drop_last, generator=generator, seed=seed)
        settings = {"batch_size": batch_size, "generator": generator, "seed": seed, **others}
        self._part = lambda rows, *, drop: make(dataset.select(rows), drop_last=drop, **settings)
        languages = list(zip(dataset["source_lang"], dataset["target_lang"], strict=True))
        rows_of: dict[Any, list[int]] = {}
        for row, language in enumerate(languages):
            rows_of.setdefault(language, []).append(row)
        self._parts = [(rows, self._part(rows, drop=True)) for rows in rows_of.values()]
        self._rows = len(languages)

    def __iter__(self) -> Iterator[list[int]]:
        self.generator.manual_seed(self.seed + self.epoch)
        turns = torch.tensor([at for at, (_, sampler) in enumerate(self._parts) for _ in range(len(sampler))])
        turns = turns[torch.randperm(len(turns), generator=self.generator)]
        batches = [self._batches(rows, sampler) for rows, sampler in self._parts]
        left = np.ones(self._rows, dtype=bool)
        for turn in turns.tolist():
            yield from _unseen(islice(batches[turn], 1), left)
        if left.any():
            rows = left.nonzero()[0].tolist()
            yield from _unseen(self._batches(rows, self._part(rows, drop=self.drop_last)), left)

    def _batches(self, rows: Sequence[int], sampler: Any) -> Iterator[list[int]]:
        """The batches of a part, as rows of the whole."""
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.epoch)
        for batch in sampler:
            yield [rows[at] for at in batch]


def _unseen(batches: Iterable[list[int]], left: np.ndarray) -> Iterator[list[int]]:
    """The batches of rows that are left, without those that a sampler draws again to reach its length."""
    for batch in batches:
        if left[batch].all():
            left[batch] = False
            yield batch


class SharedTargetBatchSampler(DefaultBatchSampler):
    """Batches in which pairs with the same target come together, such as its translations into several languages.

    The pairs of a target form groups of at most ``max(2, batch_size // 4)`` pairs, so that a batch has other targets too. The
    groups follow each other in random order, and the end of a batch may divide one. Every pair is in one batch of an epoch,
    except those of an incomplete last batch if ``drop_last``. The batches depend on the seed and the number of the epoch.
    """

    generator: torch.Generator

    def __init__(
        self, dataset: Dataset, *, batch_size: int, drop_last: bool, generator: torch.Generator, seed: int, **_: Any
    ) -> None:
        super().__init__(dataset, batch_size=batch_size, drop_last=drop_last, generator=generator, seed=seed)
        numbers: dict[str, int] = {}
        self._targets = np.array(
            [numbers.setdefault(text, len(numbers)) for text in dataset["target"]], dtype=np.int64
        )

    def __iter__(self) -> Iterator[list[int]]:
        self.generator.manual_seed(self.seed + self.epoch)
        pairs: dict[int, list[int]] = {}
        for row in torch.randperm(len(self._targets), generator=self.generator).tolist():
            pairs.setdefault(int(self._targets[row]), []).append(row)
        most = max(2, self.batch_size // 4)
        groups = [rows[at : at + most] for rows in pairs.values() for at in range(0, len(rows), most)]
        order = torch.randperm(len(groups), generator=self.generator).tolist()
        rows = [row for group in order for row in groups[group]]
        for at in range(0, len(self) * self.batch_size, self.batch_size):
            yield rows[at : at + self.batch_size]
