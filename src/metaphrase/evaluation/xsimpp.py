"""xsim++: retrieval of English translations among altered English sentences.

Reference: Chen et al. 2023, "xSIM++: An Improved Proxy to Bitext Mining Performance for Low-Resource Languages". The
distractors come from `distractors`.

Shapes: ``n`` queries, ``m`` candidates, ``h`` hidden.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from metaphrase.corpus.parallel import ParallelSet
from metaphrase.evaluation.distractors import KINDS, distractors
from metaphrase.evaluation.encoding import EncodingOptions, embed_sides, encoding_settings
from metaphrase.evaluation.evaluator import EmbeddingEvaluator
from metaphrase.evaluation.measures import FEWER_RESAMPLES
from metaphrase.evaluation.result import Measurement, Result, conditions, item_id, with_intervals
from metaphrase.evaluation.retrieval import largest_margin
from metaphrase.io.arguments import Resamples, Seed, checked
from metaphrase.mining.search import unit_rows

#: Number of neighbours in the margin.
NEIGHBOURS = 4


class Pool(NamedTuple):
    """English candidates.

    Attributes:
        texts: The distinct targets, then the distractors.
        kinds: Kind of each distractor; ``""`` for targets.
        right: For each query, the number of its target.
    """

    texts: tuple[str, ...]
    kinds: tuple[str, ...]
    right: tuple[int, ...]


class Errors(NamedTuple):
    """Queries whose best candidate is not their target, boolean, shape ``(n,)`` each.

    Attributes:
        without: Among the targets alone.
        together: Among the targets and all distractors.
        kinds: Among the targets and the distractors of a kind.
    """

    without: NDArray[np.bool_]
    together: NDArray[np.bool_]
    kinds: dict[str, NDArray[np.bool_]]


def distractor_pool(targets: Sequence[str]) -> Pool:
    """Return the distinct targets, and their distractors that are not targets themselves.

    >>> distractor_pool(["He is tall.", "He is not tall.", "He is ill."]).texts
    ('He is tall.', 'He is not tall.', 'He is ill.', 'He is not ill.')
    """
    numbers = {text: number for number, text in enumerate(dict.fromkeys(targets))}
    altered = {
        changed: kind for text in numbers for kind, changed in distractors(text).items() if changed not in numbers
    }
    return Pool(
        (*numbers, *altered), ("",) * len(numbers) + tuple(altered.values()), tuple(numbers[one] for one in targets)
    )


def retrieval_errors(query_nh: NDArray[Any], pool_mh: NDArray[Any], pool: Pool) -> Errors:
    """Retrieve the target of each query by ratio margin among the candidates, and return the `Errors`."""
    queries_nh, candidates_mh, kind_m = unit_rows(query_nh), unit_rows(pool_mh), np.array(pool.kinds)

    def wrong(kinds: Sequence[str]) -> NDArray[np.bool_]:
        rows = np.flatnonzero(np.isin(kind_m, ["", *kinds]))
        return np.asarray(rows[largest_margin(queries_nh, candidates_mh[rows], NEIGHBOURS)] != np.array(pool.right))

    return Errors(wrong([]), wrong(list(KINDS)), {kind: wrong([kind]) for kind in KINDS if kind in pool.kinds})


@checked
def find_errors(
    model: Any, sets: Mapping[str, ParallelSet], **encoding: Unpack[EncodingOptions]
) -> dict[str, tuple[Pool, Errors]]:
    """Return the `retrieval_errors` of every language, with its candidates."""
    pools = {one.targets: distractor_pool(one.targets) for one in sets.values()}
    of = [pools[one.targets] for one in sets.values()]
    sides = list(
        embed_sides(model, [*(one.sources for one in sets.values()), *(pool.texts for pool in of)], **encoding)
    )
    return {
        language: (pool, retrieval_errors(sides[at], sides[len(of) + at], pool))
        for at, (language, pool) in enumerate(zip(sets, of, strict=True))
    }


@checked
def evaluate_xsimpp(
    model: Any,
    sets: Mapping[str, ParallelSet],
    *,
    name: str | None = None,
    resamples: Resamples = FEWER_RESAMPLES,
    seed: Seed = 0,
    **encoding: Unpack[EncodingOptions],
) -> Result:
    """Measure the retrieval of English translations among distractors.

    Args:
        model: A SentenceTransformer, or an object with its ``encode``.
        sets: Parallel sentences per language with English targets, from `load_parallel_folder`.
        name: Name of the model in the result.
        resamples: Number of bootstrap samples of the intervals, over pairs.
        seed: Seed of the bootstrap.
        **encoding: See :class:`metaphrase.evaluation.encoding.EncodingOptions`.

    Returns:
        A result whose scores are errors in percent; lower is better. Its groups are means over the languages:
        ``"without distractors"``, and with the distractors of each kind alone, if a language has any. In JSON, each language
        has ``without`` and ``kinds``, the number of ``distractors`` and the ``error`` of each kind. ``items`` are 1 for each
        error, ``item_ids`` identify the targets.
    """
    start = time.perf_counter()
    languages = {}
    by_language = find_errors(model, sets, **encoding)
    kinds = [kind for kind in KINDS if any(kind in errors.kinds for _, errors in by_language.values())]
    variants: dict[str, dict[str, Measurement]] = {name: {} for name in ("without distractors", *kinds)}
    for language, (pool, errors) in by_language.items():
        digest = hashlib.sha256("\n".join([sets[language].sha256, *pool.texts]).encode()).hexdigest()
        ids = [*map(item_id, sets[language].targets)]
        for kind, scores in variants.items():  # of which a language may have no distractors
            scores[language] = Measurement.of_items(
                errors.kinds.get(kind, errors.without).astype(int), digest, item_ids=ids
            )
        languages[language] = Measurement.of_items(
            errors.together.astype(int),
            digest,
            item_ids=ids,
            without=variants["without distractors"][language].score,
            kinds={
                kind: {"distractors": pool.kinds.count(kind), "error": variants[kind][language].score}
                for kind in errors.kinds
            },
        )
    measured = {
        name: with_intervals("shared_items", scores, resamples=resamples, seed=seed)
        for name, scores in {"": languages, **variants}.items()
    }
    fields = measured.pop("") | {"groups": {name: fields["average"] for name, fields in measured.items()}}
    return Result(
        suite="xsim++",
        model=name or type(model).__name__,
        measure="xsim++ error",
        protocol=f"xx→en by ratio margin, k={NEIGHBOURS}, among the targets and English distractors",
        **fields | {"lower_is_better": True},
        **conditions(start, resamples, seed, **encoding_settings(model, **encoding), k=NEIGHBOURS),
    )


class XsimPlusPlusEvaluator(EmbeddingEvaluator):
    """xsim++ during training.

    The metrics are ``accuracy`` (1 − xsim++ error, the mean over the languages), ``without_distractors`` and
    ``{kind}_accuracy``.

    Args:
        sets: Parallel sentences per language with English targets, from `load_parallel_folder`.

    See `EmbeddingEvaluator` for the other arguments.
    """

    kind = "xsimpp"
    metric = "accuracy"

    def scores(self, model: SentenceTransformer) -> dict[str, float]:
        """Measure a model."""
        every = [errors for _, errors in find_errors(model, self.sets, **self.encoding).values()]
        present = [kind for kind in KINDS if any(kind in errors.kinds for errors in every)]
        kinds = {kind: [errors.kinds.get(kind, errors.without).mean() for errors in every] for kind in present}
        return {
            "accuracy": 1 - float(np.mean([errors.together.mean() for errors in every])),
            "without_distractors": 1 - float(np.mean([errors.without.mean() for errors in every])),
            **{f"{kind}_accuracy": 1 - float(np.mean(shares)) for kind, shares in kinds.items()},
        }
