"""The measures of results: what is resampled to compare two results, and how a resample is scored.

A mean of item scores, an F1 of mined pairs, a rank correlation and an error rate of a corpus are resampled differently.
`Measure` is their common interface, and `MEASURES` is the table of all measures. Every `Result` stores the name of its
measure and the items to resample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import spearmanr

from metaphrase.evaluation.significance import CHUNK, RESAMPLES, item_differences, resampled_means

#: Directions of retrieval, as its results name them.
DIRECTIONS = ("source_to_target", "target_to_source")
#: Default number of resamples of a correlation. Each resample ranks all pairs again.
STS_RESAMPLES = 2_000


class Resampled(NamedTuple):
    """Resampled differences after − before, in percentage points.

    Attributes:
        languages: Differences per language, shape ``(resamples,)`` each.
        pooled: Differences of the unweighted mean over languages, shape ``(resamples,)``.
    """

    languages: dict[str, NDArray[np.float64]]
    pooled: NDArray[np.float64]


class Measure(Protocol):
    """The items of a score, and how they are resampled."""

    @property
    def test(self) -> str:
        """Description of the test."""

    @property
    def lower_is_better(self) -> bool:
        """Whether scores are errors."""

    @property
    def max_resamples(self) -> int:
        """Maximum number of resamples, limited by their cost."""

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of the settings that two results must share to be comparable."""

    def items(self, details: Mapping[str, Any]) -> Any:
        """Read the items to resample from the JSON details of one language."""

    def score(self, items: Any) -> float:
        """Score of all items, in percent."""

    def resample(self, before: Mapping[str, Any], after: Mapping[str, Any], *, resamples: int, seed: int) -> Resampled:
        """Resample the items of both sides together."""


@dataclass(frozen=True)
class MeanOfItems:
    """Mean of item scores: the accuracy of fine-tuned models, the hits of retrieval, or the misses of xsim.

    Attributes:
        test: See `Measure`.
        hits: Items are hits of retrieval in both directions; an item's score is their mean.
        lower_is_better: The score is the mean of ``1 − item`` (xsim error).
        settings: See `Measure`.
    """

    test: str = "paired bootstrap over items"
    hits: bool = False
    lower_is_better: bool = False
    max_resamples: int = RESAMPLES
    settings: tuple[str, ...] = ()

    def items(self, details: Mapping[str, Any]) -> NDArray[np.float64]:
        """Score of each item in [0, 1], shape ``(n,)``."""
        if self.hits:
            return np.mean([[hit == "1" for hit in details[direction]["hits"]] for direction in DIRECTIONS], axis=0)
        return np.asarray(details["items"], dtype=np.float64)

    def score(self, items: NDArray[np.float64]) -> float:
        """Mean, in percent."""
        mean = 100 * float(items.mean())
        return 100 - mean if self.lower_is_better else mean

    def resample(self, before: Mapping[str, Any], after: Mapping[str, Any], *, resamples: int, seed: int) -> Resampled:
        """Resample the differences of each language with the same seed, and those of all languages once more."""
        differences = item_differences(before, after)
        sign = -1 if self.lower_is_better else 1
        languages = {
            language: sign * resampled_means({"": one_n}, resamples=resamples, seed=seed)
            for language, one_n in differences.items()
        }
        return Resampled(languages, sign * resampled_means(differences, resamples=resamples, seed=seed))


@dataclass(frozen=True)
class PairsF1:
    """F1 of mined pairs at a fixed threshold; source sentences are resampled.

    The items of a language are its number of source sentences, and for each source sentence that has any pair the
    numbers of correct, kept and gold pairs.
    """

    test: str = "paired bootstrap over source sentences, F1 at each result's threshold"
    lower_is_better: bool = False
    max_resamples: int = RESAMPLES
    settings: tuple[str, ...] = ("protocol", "margin", "k", "retrieval", "duplicates", "comparison")

    def items(self, details: Mapping[str, Any]) -> tuple[int, dict[str, tuple[int, ...]]]:
        """Number of source sentences, and the counts of those with pairs."""
        outcomes = {source: tuple(map(int, counts.split())) for source, counts in details["outcomes"].items()}
        return details["sources"], outcomes

    def score(self, items: tuple[int, dict[str, tuple[int, ...]]]) -> float:
        """F1 in percent."""
        correct, kept, gold = np.sum(list(items[1].values()) or [(0, 0, 0)], axis=0)
        return 100 * 2 * int(correct) / max(int(kept + gold), 1)

    def resample(self, before: Mapping[str, Any], after: Mapping[str, Any], *, resamples: int, seed: int) -> Resampled:
        """Resample the languages in alphabetical order with one generator."""
        rng = np.random.default_rng(seed)
        differences = {}
        for language in sorted(after):
            old_r, new_r = resampled_f1([before[language], after[language]], resamples, rng)
            differences[language] = new_r - old_r
        return Resampled(differences, np.mean(list(differences.values()), axis=0))


@dataclass(frozen=True)
class Spearman:
    """Spearman's correlation ×100 of predictions and gold scores; pairs of sentences are resampled.

    Sets of the same size share their resamples, because translations of one set have the same items.
    """

    test: str = "paired bootstrap over pairs of sentences"
    lower_is_better: bool = False
    max_resamples: int = STS_RESAMPLES
    settings: tuple[str, ...] = ()

    def items(self, details: Mapping[str, Any]) -> tuple[Sequence[float], Sequence[float]]:
        """Gold scores and cosines."""
        return details["scores"], details["cosines"]

    def score(self, items: tuple[Sequence[float], Sequence[float]]) -> float:
        """Correlation ×100."""
        return spearman(*items)

    def resample(self, before: Mapping[str, Any], after: Mapping[str, Any], *, resamples: int, seed: int) -> Resampled:
        """Rank both sides in the same resamples."""
        counts: dict[int, NDArray[np.int64]] = {}
        differences = {}
        for language, (gold_n, cosine_n) in after.items():
            n = len(gold_n)
            if n not in counts:
                counts[n] = draw_counts(n, resamples, seed)
            before_gold_n, before_cosine_n = before[language]
            old_r = resampled_spearman(before_gold_n, before_cosine_n, counts[n])
            differences[language] = resampled_spearman(gold_n, cosine_n, counts[n]) - old_r
        return Resampled(differences, _mean_over_languages(differences))


@dataclass(frozen=True)
class ErrorRate:
    """Alignment error rate; sentence pairs are resampled.

    The items are the numbers of predicted, sure, correct sure and correct possible links of each sentence pair.
    """

    test: str = "paired bootstrap over pairs of sentences"
    lower_is_better: bool = True
    max_resamples: int = RESAMPLES
    settings: tuple[str, ...] = ()

    def items(self, details: Mapping[str, Any]) -> NDArray[np.int64]:
        """Counts, shape ``(n, 4)``."""
        return np.asarray(details["counts"], dtype=np.int64).reshape(-1, 4)

    def score(self, items: NDArray[np.int64]) -> float:
        """Error rate in percent."""
        return float(error_rates(items.sum(axis=0)[None])[0])

    def resample(self, before: Mapping[str, Any], after: Mapping[str, Any], *, resamples: int, seed: int) -> Resampled:
        """Sum the counts of the same resamples on both sides."""
        differences = {}
        for language, after_n4 in after.items():
            drawn_rn = draw_counts(len(after_n4), resamples, seed)
            differences[language] = error_rates(drawn_rn @ after_n4) - error_rates(drawn_rn @ before[language])
        return Resampled(differences, _mean_over_languages(differences))


_RETRIEVAL: dict[str, Any] = {
    "test": "paired bootstrap over pairs, mean of both directions",
    "hits": True,
    "settings": ("text_equality", "margin_k"),
}
#: Measures by the name that results store as ``statistic``.
MEASURES: dict[str, Measure] = {
    "hits": MeanOfItems(**_RETRIEVAL),
    "misses": MeanOfItems(**_RETRIEVAL, lower_is_better=True),
    "items": MeanOfItems(),
    "pairs_f1": PairsF1(),
    "spearman": Spearman(),
    "error_rate": ErrorRate(),
}


def _mean_over_languages(differences: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    return np.mean([differences[language] for language in sorted(differences)], axis=0)


def draw_counts(n: int, resamples: int, seed: int) -> NDArray[np.int64]:
    """How often each of ``n`` items is drawn in each resample, shape ``(resamples, n)``."""
    return np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=resamples)


def error_rates(counts_r4: NDArray[np.integer]) -> NDArray[np.float64]:
    """Alignment error rates in percent.

    Args:
        counts_r4: Numbers of predicted, sure, correct sure and correct possible links, shape ``(resamples, 4)``.
    """
    predicted_r, sure_r, correct_r, possible_r = counts_r4.T
    return 100 * (1 - (correct_r + possible_r) / np.maximum(predicted_r + sure_r, 1))


def resampled_f1(
    results: Sequence[tuple[int, Mapping[str, tuple[int, ...]]]], resamples: int, rng: np.random.Generator
) -> list[NDArray[np.float64]]:
    """F1 in percent in samples of the source sentences, shape ``(resamples,)`` for each result.

    Source sentences with the same counts in all results are drawn together, as one multinomial count.

    Args:
        results: Items of results over the same set, as `PairsF1.items` returns them.
        resamples: Number of samples.
        rng: Generator of the samples.
    """
    sources = sorted({source for _, outcomes in results for source in outcomes})
    table_sx = np.array(
        [[n for _, outcomes in results for n in outcomes.get(source, (0, 0, 0))] for source in sources],
        dtype=np.int64,
    ).reshape(len(sources), -1)
    values_vx, count_v = np.unique(table_sx, axis=0, return_counts=True)
    n = max(results[0][0], len(sources))
    drawn_rv = rng.multinomial(n, np.append(count_v, n - len(sources)) / n, size=resamples)
    sums_rx = drawn_rv[:, :-1] @ values_vx if len(sources) else np.zeros((resamples, 3 * len(results)))
    return [
        100 * 2 * sums_rx[:, at] / np.maximum(sums_rx[:, at + 1] + sums_rx[:, at + 2], 1)
        for at in range(0, 3 * len(results), 3)
    ]


def spearman(gold_n: ArrayLike, predicted_n: ArrayLike) -> float:
    """Spearman's correlation ×100; 0 if all predictions are equal, as for a collapsed encoder.

    >>> round(spearman([1, 2, 3, 4], [0.1, 0.3, 0.2, 0.9]), 6)
    80.0
    """
    if len(np.unique(gold_n)) < 2 or len(np.unique(predicted_n)) < 2:
        return 0.0
    return 100 * float(spearmanr(gold_n, predicted_n).statistic)


def resampled_spearman(
    gold_n: ArrayLike, predicted_n: ArrayLike, counts_rn: NDArray[np.integer]
) -> NDArray[np.float64]:
    """Spearman's correlation ×100 in samples that may contain an item several times.

    Equal values, and copies of one item, share their mean rank. The rank of an item in a sample follows from the number
    of items below it, so no sample has to be sorted.

    Args:
        gold_n: Gold score of each item, shape ``(n,)``.
        predicted_n: Prediction for each item, shape ``(n,)``.
        counts_rn: How often each item occurs in each sample, shape ``(resamples, n)``.

    Returns:
        Shape ``(resamples,)``; 0 if a side has a single value.
    """
    gold_n, predicted_n = np.asarray(gold_n), np.asarray(predicted_n)
    rows = max(1, CHUNK // len(gold_n))
    parts = []
    for start in range(0, len(counts_rn), rows):
        part_rn = counts_rn[start : start + rows].astype(np.float64)
        x_rn, y_rn = (_centred_ranks(values_n, part_rn) for values_n in (gold_n, predicted_n))
        xy_r, xx_r, yy_r = (
            np.einsum("rn,rn,rn->r", part_rn, a, b) for a, b in ((x_rn, y_rn), (x_rn, x_rn), (y_rn, y_rn))
        )
        spread_r = np.sqrt(xx_r * yy_r)
        parts.append(100 * np.divide(xy_r, spread_r, out=np.zeros_like(xy_r), where=spread_r > 0))
    return np.concatenate(parts)


def _centred_ranks(values_n: NDArray[Any], counts_rn: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks of the items in each sample minus their mean, shape ``(resamples, n)``."""
    order_n = np.argsort(values_n, kind="stable")
    values_v, value_n = np.unique(values_n, return_inverse=True)
    first_v = np.searchsorted(values_n[order_n], values_v)
    counts_rv = np.add.reduceat(counts_rn[:, order_n], first_v, axis=1)
    above_rv = np.cumsum(counts_rv, axis=1)
    rank_rv = above_rv - (counts_rv - 1) / 2
    return (rank_rv - (above_rv[:, -1:] + 1) / 2)[:, value_n]
