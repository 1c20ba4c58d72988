"""Alignment error rate (AER), precision, recall and F1 of word alignments against sure and possible gold links, from counts
over all pairs.
"""

from typing import Any

import datasets
import evaluate

from metaphrase.corpus.words import parse_links
from metaphrase.evaluation.word_alignment import alignment_scores, parse_gold

_CITATION = """\
@article{och-ney-2003-systematic,
    title = "A Systematic Comparison of Various Statistical Alignment Models",
    author = "Och, Franz Josef and Ney, Hermann",
    journal = "Computational Linguistics",
    volume = "29",
    number = "1",
    year = "2003",
    pages = "19--51"
}
"""

_INPUTS = """\
Args:
    predictions: Links of each pair in Pharaoh format, "0-0 1-2".
    references: Gold links of each pair, sure links with a hyphen and possible links with a p, "0-0 1p2".

Returns:
    aer, precision, recall and f1 as fractions.
"""


class AlignmentErrorRate(evaluate.Metric):
    """AER, precision, recall and F1; ``evaluate.load(metaphrase.metrics.path("aer"))``."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=__doc__,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        gold = [parse_gold(reference) for reference in references]
        scores = alignment_scores(
            [parse_links(prediction) for prediction in predictions],
            [sure for sure, _ in gold],
            [possible for _, possible in gold],
        )
        return scores._asdict()
