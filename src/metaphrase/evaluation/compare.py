"""Better, tie or worse, for measures that are no means over items: correlations, F1 and error rates of a corpus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metaphrase.evaluation.significance import ALPHA, CONFIDENCE, holm, verdict


def compare_resamples(
    before: Mapping[str, float],
    after: Mapping[str, float],
    resampled: Mapping[str, tuple[NDArray[np.floating], NDArray[np.floating]]],
    *,
    sizes: Mapping[str, int],
    test: str,
    lower_is_better: bool = False,
) -> dict[str, Any]:
    """Paired test of two models from their scores in the same samples of items.

    Args:
        before: Score of the baseline, per language.
        after: Score of the model, per language.
        resampled: Scores of both in samples that were drawn with replacement, row ``r`` of both being of the same sample,
            shape ``(resamples,)`` each.
        sizes: Number of items, per language.
        test: What was drawn, in words.
        lower_is_better: Scores are errors.

    Returns:
        What `metaphrase.evaluation.compare_retrieval` returns: per language and pooled ``before``, ``after``,
        ``difference``, ``interval``, ``p_value``, ``p_adjusted`` (Holm) and ``verdict``.

    >>> rising = np.linspace(1, 3, 99)
    >>> samples = {"sw": (50 * np.ones(99), 50 + rising)}
    >>> compared = compare_resamples({"sw": 50}, {"sw": 52}, samples, sizes={"sw": 9}, test="")
    >>> compared["languages"]["sw"]["verdict"], compared["pooled"]["p_value"]
    ('better', 0.02)
    """
    sign = -1 if lower_is_better else 1
    differences = {language: new_r - old_r for language, (old_r, new_r) in resampled.items()}
    p_values = {language: _p_value(difference_r) for language, difference_r in differences.items()}
    adjusted = holm(p_values)
    pooled_r = np.mean([differences[language] for language in sorted(differences)], axis=0)
    languages = {
        language: _compared(before[language], after[language], differences[language], p_values[language])
        | {"n": sizes[language], "p_adjusted": adjusted[language]}
        for language in after
    }
    for row in languages.values():
        row["verdict"] = verdict(sign * row["difference"], row["p_adjusted"])
    means = [float(np.mean([row[key] for row in languages.values()])) for key in ("before", "after")]
    pooled = _compared(means[0], means[1], pooled_r, _p_value(pooled_r))
    pooled |= {"languages": len(languages), "verdict": verdict(sign * pooled["difference"], pooled["p_value"])}
    settings = {
        "test": test,
        "correction": "Holm",
        "alpha": ALPHA,
        "confidence": CONFIDENCE,
        "resamples": len(pooled_r),
    }
    return {"languages": languages, "pooled": pooled, "settings": settings}


def percentile_interval(values_r: NDArray[np.floating]) -> list[float]:
    """Ends of the interval that holds the middle 95 % of some resampled values."""
    return np.quantile(values_r, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]).tolist()


def _compared(old: float, new: float, difference_r: NDArray[np.floating], p_value: float) -> dict[str, Any]:
    return {
        "before": old,
        "after": new,
        "difference": new - old,
        "interval": percentile_interval(difference_r),
        "p_value": p_value,
    }


def _p_value(difference_r: NDArray[np.floating]) -> float:
    """Two-sided; see :func:`metaphrase.evaluation.significance.paired_bootstrap`."""
    tail = min(np.count_nonzero(difference_r <= 0), np.count_nonzero(difference_r >= 0))
    return min(1.0, 2 * (1 + int(tail)) / (1 + len(difference_r)))
