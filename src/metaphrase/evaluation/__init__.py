"""Evaluation of encoders on several suites of benchmarks, with intervals and paired before/after tests."""

from metaphrase.corpus.parallel import ParallelSet, load_parallel_folder
from metaphrase.evaluation.compare import Comparison
from metaphrase.evaluation.result import Measurement, Result
from metaphrase.evaluation.retrieval import (
    TATOEBA_GROUPS,
    RetrievalEvaluator,
    evaluate_retrieval,
    prepare,
    retrieval_hits,
)
from metaphrase.evaluation.significance import (
    PairedDifference,
    bootstrap_interval,
    holm,
    paired_bootstrap,
    pooled_bootstrap_interval,
    pooled_paired_bootstrap,
    verdict,
)
from metaphrase.evaluation.word_alignment import (
    AlignmentScores,
    GoldPair,
    WordAlignmentEvaluator,
    alignment_error_interval,
    alignment_scores,
    load_pharaoh,
    load_wpt,
    parse_gold,
)

__all__ = [
    "TATOEBA_GROUPS",
    "AlignmentScores",
    "Comparison",
    "GoldPair",
    "Measurement",
    "PairedDifference",
    "ParallelSet",
    "Result",
    "RetrievalEvaluator",
    "WordAlignmentEvaluator",
    "alignment_error_interval",
    "alignment_scores",
    "bootstrap_interval",
    "evaluate_retrieval",
    "holm",
    "load_parallel_folder",
    "load_pharaoh",
    "load_wpt",
    "paired_bootstrap",
    "parse_gold",
    "pooled_bootstrap_interval",
    "pooled_paired_bootstrap",
    "prepare",
    "retrieval_hits",
    "verdict",
]
