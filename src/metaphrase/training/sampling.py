"""Batches of pairs in one language."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from sentence_transformers.base.sampler import DefaultBatchSampler

from metaphrase.exceptions import UsageError


def check_data(dataset: Any, name: str) -> None:
    """Refuse data that are not data sets of the library `datasets`."""
    for part in _parts_of(dataset):
        if not isinstance(part, Dataset | IterableDataset):
            raise UsageError(
                f"`{name}` must be a Dataset, an IterableDataset or a dictionary of Datasets, but is or contains a "
                f"{type(part).__name__}. Pass the `dataset` of a corpus from `load_corpus`, or convert rows with "
                "Dataset.from_list(rows)."
            )


def check_languages(dataset: Any, name: str, *, streams: bool = False) -> None:
    """Refuse data whose languages are unknown, before they are read."""
    for part in _parts_of(dataset):
        if streams and isinstance(part, IterableDataset):
            continue
        if not isinstance(part, Dataset) or not {"source_lang", "target_lang"} <= set(part.column_names):
            raise UsageError(
                f"'batches: language' requires data that are not a stream, with the columns 'source_lang' and 'target_lang', "
                f"but `{name}` lacks these or is a stream. Load the corpus without streaming, or set 'batches' to 'mixed'."
            )


def _parts_of(dataset: Any) -> list[Any]:
    """The data sets of a dictionary, or the data set; none for None."""
    if isinstance(dataset, Mapping):
        return list(dataset.values())
    return [] if dataset is None else [dataset]


class LanguageBatchSampler(DefaultBatchSampler):
    """Batches of pairs whose sources are in one language, and whose targets are in one language.

    The batches of the languages follow each other at random, in proportion to their pairs. The pairs that do not fill a
    batch of their language form mixed batches at the end of an epoch. The batches of an epoch depend on the seed and its
    number only.

    ``make`` makes the sampler of a part of the data, with the same arguments.
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

    def __len__(self) -> int:
        return self._rows // self.batch_size if self.drop_last else -(-self._rows // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        self.generator.manual_seed(self.seed + self.epoch)
        turns = torch.tensor([at for at, (_, sampler) in enumerate(self._parts) for _ in range(len(sampler))])
        turns = turns[torch.randperm(len(turns), generator=self.generator)]
        batches = [self._batches(rows, sampler) for rows, sampler in self._parts]
        left = np.ones(self._rows, dtype=bool)
        for turn in turns.tolist():
            if (batch := next(batches[turn], None)) is not None:
                left[batch] = False
                yield batch
        if left.any():
            rows = left.nonzero()[0].tolist()
            yield from self._batches(rows, self._part(rows, drop=self.drop_last))

    def _batches(self, rows: Sequence[int], sampler: Any) -> Iterator[list[int]]:
        """The batches of a part, as rows of the whole."""
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.epoch)
        for batch in sampler:
            yield [rows[at] for at in batch]
