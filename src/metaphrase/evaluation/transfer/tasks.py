"""The interface of fine-tuning tasks, prediction, and scoring of predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from metaphrase.corpus.code_switching import PairedTexts
from metaphrase.evaluation.significance import CHUNK, RESAMPLES, percentile_interval
from metaphrase.evaluation.transfer.data import Format, Row


@dataclass(frozen=True)
class Score:
    """Scores of a model on the test items of one language.

    Attributes:
        metrics: Scores in percent; the first one selects the checkpoint.
        interval: 95 % bootstrap interval of the first metric.
        items: Score of each item in [0, 1], for paired tests between models.
    """

    metrics: dict[str, float]
    interval: tuple[float, float]
    items: Sequence[float]

    @property
    def primary(self) -> float:
        """The first metric."""
        return next(iter(self.metrics.values()))


@dataclass(frozen=True)
class Task:
    """A fine-tuning task.

    Attributes:
        name: ``"xnli"``.
        form: Format of its data.
        build: Builds the model with a new head.
        units: Turns training items into the units of batches: the items themselves, or their windows.
        collate: Turns units into a training batch.
        score: Measures a model on the data of one language.
        originals: Columns that have an English original, for code-switching; None if the task has none.
    """

    name: str
    form: Format
    build: Callable[[], PreTrainedModel]
    units: Callable[[Sequence[Row]], Sequence[Any]]
    collate: Callable[[list[Any]], Any]
    score: Callable[[PreTrainedModel, Dataset, str], Score]
    originals: PairedTexts | None = None


@torch.no_grad()
def predict(
    model: PreTrainedModel,
    rows: Sequence[Any],
    *,
    collate: Callable[[list[Any]], Mapping[str, Tensor]],
    read: Callable[[Any, list[Any]], Sequence[Any]],
    length: Callable[[Any], int],
    batch_size: int,
    forward: Callable[..., Any] | None = None,
) -> list[Any]:
    """Predictions of a model for some rows, in their order. Rows of similar length share a batch.

    Args:
        model: The model, which is set to evaluation mode.
        rows: The inputs.
        collate: Turns rows into a batch.
        read: Turns the output of the model, and the rows, into one result for each row.
        length: Length of a row, by which rows are sorted.
        batch_size: Number of rows in a batch.
        forward: Replaces the forward pass of the model.
    """
    model.eval()
    order = sorted(range(len(rows)), key=lambda at: -length(rows[at]))
    results: list[Any] = [None] * len(rows)
    for start in range(0, len(order), batch_size):
        places = order[start : start + batch_size]
        batch = [rows[at] for at in places]
        output = (forward or model)(**{key: value.to(model.device) for key, value in collate(batch).items()})
        for at, result in zip(places, read(output, batch), strict=True):
            results[at] = result
    return results


def ratio_interval(
    parts: Sequence[float], wholes: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of a ratio of sums over items in percent, such as the F1 of chunks over sentences.

    Args:
        parts: Numerator of each item.
        wholes: Denominator of each item.
        resamples: Number of bootstrap samples.
        seed: Seed of the resampling.

    >>> ratio_interval([1, 1, 1], [2, 2, 2])
    (50.0, 50.0)
    """
    rng = np.random.default_rng(seed)
    values_n2: NDArray[np.float64] = np.stack([np.asarray(parts, float), np.asarray(wholes, float)], axis=1)
    count = len(values_n2)
    ratios: list[NDArray[np.float64]] = []
    rows = max(1, CHUNK // count)
    for start in range(0, resamples, rows):
        drawn_rn = rng.multinomial(count, np.full(count, 1 / count), size=min(rows, resamples - start))
        sums_r2 = drawn_rn @ values_n2
        ratios.append(sums_r2[:, 0] / np.maximum(sums_r2[:, 1], 1e-12))
    low, high = percentile_interval(np.concatenate(ratios))
    return 100 * low, 100 * high
