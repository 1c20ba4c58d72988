"""What an encoder is worth: translation retrieval, per language, with intervals and paired before/after tests."""

from metaphrase.evaluation.retrieval import (
    TATOEBA_GROUPS,
    ParallelSet,
    RetrievalEvaluator,
    compare_retrieval,
    evaluate_retrieval,
    load_parallel_folder,
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

__all__ = [
    "TATOEBA_GROUPS",
    "PairedDifference",
    "ParallelSet",
    "RetrievalEvaluator",
    "bootstrap_interval",
    "compare_retrieval",
    "evaluate_retrieval",
    "holm",
    "load_parallel_folder",
    "paired_bootstrap",
    "pooled_bootstrap_interval",
    "pooled_paired_bootstrap",
    "prepare",
    "retrieval_hits",
    "verdict",
]
