"""The measures of results: what is resampled to compare two results, and how a resample is scored.

A mean of item scores, an F1 of mined pairs, a rank correlation and an error rate of a corpus are resampled differently.
`Measure` is their common interface, and `MEASURES` is the table of all measures. Every `Result` stores the name of its
measure and the items to resample.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import spearmanr

from metaphrase.evaluation.significance import CHUNK, RESAMPLES, resampled_means

#: Directions of retrieval, as its results name them.
DIRECTIONS = ("source_to_target", "target_to_source")
#: Default number of resamples where each one takes long, such as correlations, which rank all pairs again.
FEWER_RESAMPLES = 2_000


class Resampled(NamedTuple):
    """Resampled differences after − before, in percentage points.

    Attributes:
        languages: Differences per language, shape ``(resamples,)`` each.
        pooled: Differences of the unweighted mean over languages, shape ``(resamples,)``.
    """

    languages: dict[str, NDArray[np.float64]]
    pooled: NDArray[np.float64]


class Measure(ABC):
    """The items of a score, and how they are resampled.

    Attributes:
        test: Description of the test.
        lower_is_better: Whether scores are errors.
        max_resamples: Maximum number of resamples, limited by their cost.
        settings: Names of the settings that two results must share to be comparable.
        shared_rows: Whether a row has the same item in all languages with the same number of items.
    """

    test: ClassVar[str] = "paired bootstrap over pairs of sentences"
    lower_is_better: ClassVar[bool] = False
    max_resamples: ClassVar[int] = RESAMPLES
    settings: ClassVar[tuple[str, ...]] = ()
    shared_rows: ClassVar[bool] = False

    @abstractmethod
    def items(self, details: Mapping[str, Any]) -> Any:
        """Read the items to resample from the JSON details of one language.

        Raises:
            KeyError, TypeError, ValueError: They are missing or malformed, or NaN or infinite.
        """

    def size(self, items: Any) -> int:
        """Number of items of one language."""
        return len(items)

    @abstractmethod
    def score(self, items: Any) -> float:
        """Score of all items, in percent."""

    @abstractmethod
    def resample(self, before: Mapping[str, Any], after: Mapping[str, Any], *, resamples: int, seed: int) -> Resampled:
        """Resample the items of both sides together."""

    def changes(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, NDArray[np.float64]] | None:
        """What each item of a language adds to the difference; None if the difference is not a mean over items."""
        return None

    def row_ids(self, sizes: Mapping[str, int]) -> dict[str, list[int]] | None:
        """Ids of the rows of each language, which languages of equal size share; None without `shared_rows`."""
        if not self.shared_rows:
            return None
        return {language: [size * size + row for row in range(size)] for language, size in sizes.items()}


class MeanOfItems(Measure):
    """Mean of item scores; the items of each language are its own."""

    test = "paired bootstrap over items"

    def items(self, details: Mapping[str, Any]) -> NDArray[np.float64]:
        """Score of each item, at most 1, shape ``(n,)``."""
        return np.asarray_chkfinite(details["items"], dtype=np.float64).ravel()

    def score(self, items: NDArray[np.float64]) -> float:
        """Mean, in percent; of ``1 − item`` for errors."""
        mean = 100 * float(items.mean())
        return 100 - mean if self.lower_is_better else mean

    def resample(self, before: Mapping[str, Any], after: Mapping[str, Any], *, resamples: int, seed: int) -> Resampled:
        """Resample the differences of each language with the same seed, and those of all languages once more."""
        changes = self.changes(before, after)
        languages = {
            language: resampled_means({"": one_n}, resamples=resamples, seed=seed)
            for language, one_n in changes.items()
        }
        return Resampled(languages, resampled_means(changes, resamples=resamples, seed=seed))

    def changes(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, NDArray[np.float64]]:
        """Differences of the items, shape ``(n,)`` each; of ``1 − item`` for errors."""
        sign = -1 if self.lower_is_better else 1
        return {language: sign * (after[language] - before[language]) for language in after}


class Hits(MeanOfItems):
    """Accuracy of retrieval; an item's score is the mean of its hits in both directions."""

    test = "paired bootstrap over pairs, mean of both directions"
    settings = ("text_equality", "margin_k", "one_pool")

    def items(self, details: Mapping[str, Any]) -> NDArray[np.float64]:
        """Score of each pair in [0, 1], shape ``(n,)``."""
        return np.mean([[hit == "1" for hit in details[direction]["hits"]] for direction in DIRECTIONS], axis=0)


class Misses(Hits):
    """The xsim error of retrieval."""

    lower_is_better = True


class ScoreOfSamples(Measure):
    """A score that is not a mean over items, and is computed for each sample."""

    #: Whether languages with the same number of items share their samples, as translations of one set have the same items.
    shared: ClassVar[bool] = True

    @abstractmethod
    def scores(self, results: Sequence[Any], resamples: int, rng: np.random.Generator) -> list[NDArray[np.float64]]:
        """Scores of the items of results over one set, in the same samples, shape ``(resamples,)`` each."""

    def samples(
        self, results: Sequence[Mapping[str, Any]], *, resamples: int, seed: int
    ) -> dict[str, list[NDArray[np.float64]]]:
        """`scores` of each language."""
        rng = np.random.default_rng(seed)
        samples = {}
        for language in sorted(results[-1]):
            rng = np.random.default_rng(seed) if self.shared else rng
            samples[language] = self.scores([one[language] for one in results], resamples, rng)
        return samples

    def resample(self, before: Mapping[str, Any], after: Mapping[str, Any], *, resamples: int, seed: int) -> Resampled:
        """Score both sides in the same samples."""
        samples = self.samples([before, after], resamples=resamples, seed=seed)
        differences = {language: new_r - old_r for language, (old_r, new_r) in samples.items()}
        return Resampled(differences, np.mean(list(differences.values()), axis=0))


class SharedItems(ScoreOfSamples, MeanOfItems):
    """Mean of item scores of translations of one set, which are resampled together.

    Results may have the ids of their items. Without ids, all languages of equal size share the resampled items.
    """

    test = "paired bootstrap over items, translations of an item together"
    max_resamples = FEWER_RESAMPLES
    shared_rows = True

    def scores(self, results: Sequence[Any], resamples: int, rng: np.random.Generator) -> list[NDArray[np.float64]]:
        """Average the items of all results in the same samples."""
        counts_rn = draw_counts(len(results[0]), resamples, rng)
        return [100 * (counts_rn @ items_n) / len(items_n) for items_n in results]


class PairsF1(ScoreOfSamples):
    """F1 of mined pairs at a fixed threshold; source sentences are resampled.

    The items of a language are its number of source sentences, and for each source sentence that has any pair the
    numbers of correct, kept and gold pairs.
    """

    test = "paired bootstrap over source sentences, F1 at each result's threshold"
    settings = ("protocol", "margin", "k", "retrieval", "duplicates", "comparison")
    shared = False

    def items(self, details: Mapping[str, Any]) -> tuple[int, dict[str, tuple[int, ...]]]:
        """Number of source sentences, and the counts of those with pairs."""
        outcomes = {source: tuple(map(int, counts.split())) for source, counts in details["outcomes"].items()}
        if any(len(counts) != 3 for counts in outcomes.values()):
            raise ValueError("A source sentence must have three counts.")
        return int(details["sources"]), outcomes

    def size(self, items: tuple[int, dict[str, tuple[int, ...]]]) -> int:
        """Number of source sentences."""
        return items[0]

    def score(self, items: tuple[int, dict[str, tuple[int, ...]]]) -> float:
        """F1 in percent."""
        return float(f1_of_counts(np.sum(list(items[1].values()) or [(0, 0, 0)], axis=0)[None])[0])

    def scores(self, results: Sequence[Any], resamples: int, rng: np.random.Generator) -> list[NDArray[np.float64]]:
        """F1 in percent. Source sentences with the same counts in all results are drawn as one multinomial count."""
        sources = sorted({source for _, outcomes in results for source in outcomes})
        table_sx = np.array(
            [[n for _, outcomes in results for n in outcomes.get(source, (0, 0, 0))] for source in sources],
            dtype=np.int64,
        ).reshape(len(sources), -1)
        values_vx, count_v = np.unique(table_sx, axis=0, return_counts=True)
        n = max(results[0][0], len(sources))
        drawn_rv = rng.multinomial(n, np.append(count_v, n - len(sources)) / n, size=resamples)
        sums_rx = drawn_rv[:, :-1] @ values_vx if len(sources) else np.zeros((resamples, 3 * len(results)), int)
        return [f1_of_counts(sums_rx[:, at : at + 3]) for at in range(0, 3 * len(results), 3)]


class Spearman(ScoreOfSamples):
    """Spearman's correlation ×100 of predictions and gold scores; pairs of sentences are resampled."""

    max_resamples = FEWER_RESAMPLES
    shared_rows = True

    def items(self, details: Mapping[str, Any]) -> NDArray[np.float64]:
        """Gold score and cosine of each pair, shape ``(n, 2)``."""
        return np.asarray_chkfinite([details["scores"], details["cosines"]], dtype=np.float64).reshape(2, -1).T

    def score(self, items: NDArray[np.float64]) -> float:
        """Correlation ×100."""
        return spearman(*items.T)

    def scores(self, results: Sequence[Any], resamples: int, rng: np.random.Generator) -> list[NDArray[np.float64]]:
        """Rank the items of all results in the same samples."""
        counts_rn = draw_counts(len(results[0]), resamples, rng)
        return [resampled_spearman(items_n2[:, 0], items_n2[:, 1], counts_rn) for items_n2 in results]


class ScoreOfCounts(ScoreOfSamples):
    """A score of the sums of the items' counts."""

    #: Key of the counts in the details of a result, and their number ``k`` for each item.
    counts: ClassVar[tuple[str, int]]

    @abstractmethod
    def score_of(self, counts_rk: NDArray[np.integer]) -> NDArray[np.float64]:
        """Scores of sums of counts, shape ``(resamples, k)``, in percent."""

    def items(self, details: Mapping[str, Any]) -> NDArray[np.int64]:
        """Counts, shape ``(n, k)``."""
        key, k = self.counts
        return np.asarray(details[key], dtype=np.int64).reshape(-1, k)

    def score(self, items: NDArray[np.int64]) -> float:
        """Score of the sums over all items, in percent."""
        return float(self.score_of(items.sum(axis=0)[None])[0])

    def scores(self, results: Sequence[Any], resamples: int, rng: np.random.Generator) -> list[NDArray[np.float64]]:
        """Sum the counts of all results in the same samples."""
        rows, parts = max(1, CHUNK // len(results[0])), []
        for start in range(0, resamples, rows):
            counts_rn = draw_counts(len(results[0]), min(rows, resamples - start), rng)
            parts.append([self.score_of(counts_rn @ items_nk) for items_nk in results])
        return [np.concatenate(scores) for scores in zip(*parts, strict=True)]


class ErrorRate(ScoreOfCounts):
    """Alignment error rate; sentence pairs are resampled.

    The items are the numbers of predicted, sure, correct sure and correct possible links of each sentence pair.
    """

    lower_is_better = True
    counts = ("counts", 4)

    def score_of(self, counts_rk: NDArray[np.integer]) -> NDArray[np.float64]:
        """Error rates in percent; 0 without links."""
        predicted_r, sure_r, correct_r, possible_r = counts_rk.T
        links_r = predicted_r + sure_r
        return 100 * (links_r - correct_r - possible_r) / np.maximum(links_r, 1)


class ChunkF1(ScoreOfCounts):
    """F1 over the chunks of all sentences; sentences are resampled.

    The items are the numbers of correct, predicted and gold chunks of each sentence.
    """

    test = "paired bootstrap over sentences, F1 over their chunks"
    counts = ("items", 3)

    def score_of(self, counts_rk: NDArray[np.integer]) -> NDArray[np.float64]:
        """F1 in percent."""
        return f1_of_counts(counts_rk)


#: Measures by the name that results store as ``statistic``.
MEASURES: dict[str, Measure] = {
    "hits": Hits(),
    "misses": Misses(),
    "items": MeanOfItems(),
    "shared_items": SharedItems(),
    "pairs_f1": PairsF1(),
    "spearman": Spearman(),
    "error_rate": ErrorRate(),
    "chunk_f1": ChunkF1(),
}


def draw_counts(n: int, resamples: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """How often each of ``n`` items is drawn in each resample, shape ``(resamples, n)``."""
    return rng.multinomial(n, np.full(n, 1 / n), size=resamples)


def f1_of_counts(counts_r3: NDArray[np.integer]) -> NDArray[np.float64]:
    """F1 in percent of the numbers of correct, predicted and gold items, shape ``(resamples, 3)``; 0 without items."""
    correct_r, predicted_r, gold_r = counts_r3.T
    return 100 * 2 * correct_r / np.maximum(predicted_r + gold_r, 1)


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

    ``counts_rn`` is how often each item occurs in each sample; the correlation is 0 if a side of a sample has a single
    value.
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
