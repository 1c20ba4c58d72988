"""Evaluation of encoders on several suites of benchmarks, with intervals and paired before/after tests."""

from metaphrase.corpus.parallel import ParallelSet, load_parallel_folder
from metaphrase.evaluation.retrieval import RetrievalEvaluator, evaluate_retrieval
from metaphrase.evaluation.word_alignment import WordAlignmentEvaluator, load_wpt

__all__ = [
    "ParallelSet",
    "RetrievalEvaluator",
    "WordAlignmentEvaluator",
    "evaluate_retrieval",
    "load_parallel_folder",
    "load_wpt",
]
