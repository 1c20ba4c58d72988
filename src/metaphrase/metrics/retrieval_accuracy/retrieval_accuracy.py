"""Share of the sentences whose nearest neighbour on the other side, by cosine, is their translation, as on Tatoeba."""

from typing import Any

import datasets
import evaluate
import numpy as np

from metaphrase.evaluation.retrieval import DIRECTIONS, retrieval_hits

_CITATION = """\
@article{artetxe-schwenk-2019-massively,
    title = "Massively Multilingual Sentence Embeddings for Zero-Shot Cross-Lingual Transfer and Beyond",
    author = "Artetxe, Mikel and Schwenk, Holger",
    journal = "Transactions of the Association for Computational Linguistics",
    volume = "7",
    year = "2019",
    pages = "597--610"
}
"""

_INPUTS = """\
Args:
    predictions: Embeddings of the sources, one list of numbers each.
    references: Embeddings of their translations, in the same order.

Returns:
    source_to_target, target_to_source and their mean, accuracy, as fractions.
"""


class RetrievalAccuracy(evaluate.Metric):
    """Retrieval accuracy; ``evaluate.load(metaphrase.metrics.path("retrieval_accuracy"))``."""

    def _info(self) -> evaluate.MetricInfo:
        vector = datasets.Sequence(datasets.Value("float32"))
        return evaluate.MetricInfo(
            description=__doc__,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": vector, "references": vector}),
        )

    def _compute(self, predictions: list[list[float]], references: list[list[float]]) -> dict[str, Any]:
        sizes = {len(embedding) for embedding in (*predictions, *references)}
        if len(sizes) != 1:
            raise ValueError(f"Embeddings must have one size, but have the sizes {sorted(sizes)}.")
        hits = retrieval_hits(np.asarray(predictions), np.asarray(references))
        scores = {direction: float(hits_n.mean()) for direction, hits_n in zip(DIRECTIONS, hits, strict=True)}
        return scores | {"accuracy": sum(scores.values()) / 2}
