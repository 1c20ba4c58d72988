"""What an encoder is worth: translation retrieval and word alignment, with intervals and paired before/after tests."""

from metaphrase.corpus.parallel import ParallelSet, load_parallel_folder
from metaphrase.evaluation.retrieval import (
    TATOEBA_GROUPS,
    RetrievalEvaluator,
    compare_retrieval,
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
    "GoldPair",
    "PairedDifference",
    "ParallelSet",
    "RetrievalEvaluator",
    "WordAlignmentEvaluator",
    "alignment_error_interval",
    "alignment_scores",
    "bootstrap_interval",
    "compare_retrieval",
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
