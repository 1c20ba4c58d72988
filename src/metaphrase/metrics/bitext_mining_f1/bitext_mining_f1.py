"""Precision, recall and F1 of mined sentence pairs against gold pairs, above a given threshold or at the best threshold for
these gold pairs (an oracle).
"""

import math
from typing import Any

import datasets
import evaluate

from metaphrase.mining.margins import best_threshold, f1_scores

_CITATION = """\
@inproceedings{zweigenbaum-etal-2017-overview,
    title = "Overview of the Second {BUCC} Shared Task: Spotting Parallel Sentences in Comparable Corpora",
    author = "Zweigenbaum, Pierre and Sharoff, Serge and Rapp, Reinhard",
    booktitle = "Proceedings of the 10th Workshop on Building and Using Comparable Corpora",
    year = "2017",
    pages = "60--67"
}
"""

_INPUTS = """\
Args:
    predictions: Mined pairs, "source-id<TAB>target-id<TAB>score".
    references: Gold pairs, "source-id<TAB>target-id"; their number may differ from that of the mined pairs, so pass both as a
        list in a list: `compute(predictions=[mined], references=[gold])`.
    threshold: Minimum score of a pair; None uses the threshold with the best F1.

Returns:
    precision, recall and f1 as fractions, and the threshold.
"""


class BitextMiningF1(evaluate.Metric):
    """F1 of mining; ``evaluate.load(metaphrase.metrics.path("bitext_mining_f1"))``."""

    def _info(self) -> evaluate.MetricInfo:
        strings = datasets.Sequence(datasets.Value("string"))
        return evaluate.MetricInfo(
            description=__doc__,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": strings, "references": strings}),
        )

    def _compute(
        self, predictions: list[list[str]], references: list[list[str]], threshold: float | None = None
    ) -> dict[str, Any]:
        gold = {(at, _columns(line, 2)) for at, lines in enumerate(references) for line in lines}
        mined: dict[tuple[int, tuple[str, ...]], float] = {}  # a repeated pair counts once, with its best score
        for at, lines in enumerate(predictions):
            for line in lines:
                *pair, score = _columns(line, 3)
                key = at, tuple(pair)
                mined[key] = max(_number(score), mined.get(key, -math.inf))
        if threshold is not None and not (isinstance(threshold, int | float) and math.isfinite(threshold)):
            raise ValueError(f"threshold must be a finite number or None, but is {threshold!r}.")
        scores, correct = list(mined.values()), [key in gold for key in mined]
        if threshold is None:
            best = best_threshold(scores, correct, len(gold))
            return {"precision": best.precision, "recall": best.recall, "f1": best.f1, "threshold": best.threshold}
        kept = [right for score, right in zip(scores, correct, strict=True) if score >= threshold]
        shares = f1_scores(sum(kept), len(kept), len(gold))
        return dict(zip(("precision", "recall", "f1"), shares, strict=True)) | {"threshold": threshold}


def _number(score: str) -> float:
    try:
        number = float(score)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise ValueError(f"The score of a pair must be a number, but is {score!r}.")
    return number


def _columns(line: str, n: int) -> tuple[str, ...]:
    columns = tuple(line.split("\t"))
    if len(columns) != n:
        raise ValueError(f"Expected {n} tab-separated columns, got {len(columns)} in {line!r:.80}.")
    return columns
