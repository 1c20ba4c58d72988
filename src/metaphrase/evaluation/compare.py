"""Paired comparison of two results: a verdict for each language, and one for their mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from metaphrase.evaluation.measures import Resampled
from metaphrase.evaluation.result import Result
from metaphrase.evaluation.significance import (
    ALPHA,
    CONFIDENCE,
    RESAMPLES,
    Verdict,
    cluster_scores,
    cluster_sums,
    holm,
    percentile_interval,
    resampled_means,
    sign_flip_p_value,
    two_sided_p_value,
    verdict,
)
from metaphrase.exceptions import DataError, DataMismatchError
from metaphrase.io.arguments import Resamples, Seed, checked, is_of_type

#: A tie on fewer items is not meaningful, because its interval is wide.
FEW_ITEMS = 100
#: What the verdict "one run" means.
ONE_RUN_NOTE = "one run: fine-tuned once. Pass --finetuning_runs 3 to include the variation between runs."


class ComparedRow(TypedDict):
    """Two scores and the test of their difference, in percent and percentage points.

    ``p_adjusted``, after Holm's correction, is only in rows of languages. ``languages``, their number, is only in the pooled
    row, and so is ``clusters``, the number of different items, if languages share some. ``runs`` is the number of fine-tuning
    runs of each encoder, in tasks that fine-tune.
    """

    before: float
    after: float
    difference: float
    interval: list[float]
    p_value: float
    n: int
    p_adjusted: NotRequired[float]
    languages: NotRequired[int]
    clusters: NotRequired[int]
    runs: NotRequired[int]
    verdict: Verdict


class Comparison(TypedDict):
    """Paired comparison of two results.

    Attributes:
        languages: A row for each language; verdicts follow from Holm's correction over the languages.
        pooled: The unweighted mean over the languages; its verdict follows from its own p-value.
        settings: Settings of the test.
    """

    languages: dict[str, ComparedRow]
    pooled: ComparedRow
    settings: dict[str, Any]


@checked
def compare(
    before: Result | Mapping[str, Any],
    after: Result | Mapping[str, Any],
    *,
    resamples: Resamples = RESAMPLES,
    seed: Seed = 0,
) -> Comparison:
    """Test two results over the same items with a paired bootstrap.

    Args:
        before: Result of the baseline, or its JSON dictionary; it may have more languages.
        after: Result to test, or its JSON dictionary; all of its languages are compared.
        resamples: Number of bootstrap samples, but at least as many as Holm's correction requires. Measures that are slow to
            resample, such as Spearman's correlation, use at most 2,000 otherwise.
        seed: Seed of the bootstrap.

    Returns:
        ``{"languages": {"sw": {"before", "after", "difference", "interval", "p_value", "n", "p_adjusted", "verdict"}},
        "pooled": {…}, "settings": {…}}``, see `Comparison`.

    Raises:
        DataMismatchError: The results are over different items, were measured in different ways, or are means of different
            numbers of fine-tuning runs.
        DataError: A result keeps no items, or is damaged.

    >>> from metaphrase.evaluation.result import Measurement
    >>> def result(name, items):
    ...     english = Measurement(len(items), 100 * sum(items) / len(items), details={"items": items})
    ...     return Result("nli", name, "accuracy", {"en": english}, Measurement(1, english.score), statistic="items")
    >>> comparison = compare(result("a", [0, 1] * 30), result("b", [1, 1] * 30))
    >>> comparison["pooled"]["difference"], comparison["languages"]["en"]["verdict"]
    (50.0, 'better')
    """
    before, after = (one if isinstance(one, Result) else Result.from_dict(one) for one in (before, after))
    check_comparable(before, after)
    measure = after.statistic_measure()
    # With fewer samples, no p-value would be significant after Holm's correction over so many languages.
    enough = math.ceil(2 * len(after.languages) / ALPHA)
    resamples = max(min(resamples, measure.max_resamples), enough)
    items = [{language: one.items(language) for language in after.languages} for one in (before, after)]
    old_sizes, sizes = ({language: measure.size(one) for language, one in side.items()} for side in items)
    for language, size in sizes.items():
        if old_sizes[language] != size:  # a file is damaged
            raise DataMismatchError(
                f"The results for {language!r} must have the same items, but one has {old_sizes[language]} and the other "
                f"{size}. Evaluate both models again."
            )
    resampled = measure.resample(*items, resamples=resamples, seed=seed)
    scores = [{language: measure.score(one) for language, one in side.items()} for side in items]
    changes, ids = measure.changes(*items), after.item_ids() or measure.row_ids(sizes)
    contribution_k = None
    if changes is not None:
        contribution_k = cluster_sums(changes, ids)
        if ids is not None:
            pooled_r = resampled_means({"": cluster_scores(changes, ids)}, resamples=resamples, seed=seed)
            resampled = resampled._replace(pooled=pooled_r)
    changed = _changes_of_runs(before, after)
    if changed and len(next(iter(changed.values()))) > 1:
        resampled = _with_runs(resampled, changed, seed)
    rows = {
        language: _row(
            scores[0][language],
            scores[1][language],
            resampled.languages[language],
            None if changes is None else changes[language],
            size,
        )
        for language, size in sizes.items()
    }
    sign = -1 if after.lower_is_better else 1
    for language, p_adjusted in holm({language: row["p_value"] for language, row in rows.items()}).items():
        row = rows[language]
        row["p_adjusted"] = p_adjusted
        row["verdict"] = verdict(sign * row["difference"], p_adjusted)
    old, new = (float(np.mean(list(side.values()))) for side in scores)
    pooled = _row(old, new, resampled.pooled, contribution_k, sum(row["n"] for row in rows.values()))
    pooled["languages"] = len(rows)
    if ids is not None:
        pooled["clusters"] = len(set().union(*ids.values()))
    pooled["verdict"] = verdict(sign * pooled["difference"], pooled["p_value"])
    for language, change_s in changed.items():
        rows[language]["runs"] = pooled["runs"] = len(change_s)
    return {
        "languages": rows,
        "pooled": pooled,
        "settings": {
            "test": measure.test,
            "correction": "Holm",
            "alpha": ALPHA,
            "confidence": CONFIDENCE,
            "resamples": resamples,
            "seed": seed,
        },
    }


def verdict_shown(row: Mapping[str, Any]) -> str:
    """Return the verdict of a row for readers.

    A tie on few items, or on few that languages share, is "too few to tell". A difference after one fine-tuning of each
    encoder is "one run", because its interval lacks the variation between runs.

    >>> verdict_shown({"verdict": "tie", "n": 61}), verdict_shown({"verdict": "tie", "n": 100})
    ('too few to tell', 'tie')
    >>> verdict_shown({"verdict": "better", "n": 100, "runs": 1}), verdict_shown({"verdict": "better", "n": 100, "runs": 3})
    ('one run', 'better')
    """
    if row.get("runs") == 1 and row["verdict"] != "tie":
        return "one run"
    few = row.get("clusters", row.get("n", FEW_ITEMS)) < FEW_ITEMS
    return "too few to tell" if row["verdict"] == "tie" and few else str(row["verdict"])


def difference_shown(row: Mapping[str, Any]) -> str:
    """Return the difference of a row with its interval, for readers.

    >>> difference_shown({"difference": 1.26, "interval": [-0.5, 3.0]})
    '+1.3 [-0.5, +3.0]'
    """
    low, high = row["interval"]
    return f"{row['difference']:+z.1f} [{low:+.1f}, {high:+.1f}]"


def red_line_verdict(low: float, high: float, *, limit: float) -> str:
    """Verdict of a non-inferiority test: ``"kept"``, ``"lost"`` or ``"uncertain"``.

    Args:
        low: Lower bound of the interval of the difference.
        high: Upper bound.
        limit: Largest acceptable loss.
    """
    return "kept" if low >= -limit else "lost" if high < -limit else "uncertain"


def _changes_of_runs(before: Result, after: Result) -> dict[str, NDArray[np.float64]]:
    """The difference in each fine-tuning run, by language, shape ``(runs,)`` each; empty for tasks without fine-tuning.

    Raises:
        DataMismatchError: One encoder was fine-tuned more often.
    """
    changed = {}
    for language, one in after.languages.items():
        old, new = (side.details.get("run_scores") for side in (before.languages[language], one))
        if old is None or new is None:
            return {}
        if not all(is_of_type(scores, list[float]) for scores in (old, new)):
            raise DataError(
                f"The scores of the fine-tuning runs of {language!r} are damaged. Evaluate both models again."
            )
        if len(old) != len(new):
            raise DataMismatchError(
                f"The two results are means of different numbers of fine-tuning runs: {len(old)} before, {len(new)} after. "
                "Evaluate both models with the same --finetuning_runs."
            )
        changed[language] = np.subtract(new, old)
    return changed


def _with_runs(resampled: Resampled, changed: Mapping[str, NDArray[np.float64]], seed: int) -> Resampled:
    """Add the variation between at least two runs to resampled differences: standard errors times draws of Student's t."""
    rng = np.random.default_rng(seed)

    def add(difference_r: NDArray[np.float64], change_s: NDArray[np.float64]) -> NDArray[np.float64]:
        runs = len(change_s)
        error = np.std(change_s, ddof=1) / np.sqrt(runs)
        return difference_r + error * rng.standard_t(runs - 1, size=len(difference_r))

    return Resampled(
        {language: add(resampled.languages[language], change_s) for language, change_s in changed.items()},
        add(resampled.pooled, np.mean(list(changed.values()), axis=0)),
    )


def check_comparable(before: Result, after: Result) -> None:
    """Check that two results measure the same items in the same way."""
    measure = after.statistic_measure()
    old, new = (
        {name: getattr(one, name) for name in ("measure", "statistic", "lower_is_better")}
        | {name: one.settings.get(name) for name in measure.settings}
        for one in (before, after)
    )
    for name, value in new.items():
        if old[name] != value:
            raise DataMismatchError(
                f"The two results differ in {name}: {old[name]!r} before, {value!r} after. "
                "Evaluate both models with the same suite and settings, and compare results of the same name."
            )
    if missing := sorted(after.languages.keys() - before.languages.keys()):
        raise DataMismatchError(
            f"The baseline result lacks {', '.join(missing)}; it has {', '.join(before.languages)}. "
            "Evaluate both models on the same languages."
        )
    for language, one in after.languages.items():
        other = before.languages[language]
        if (other.sha256, other.n) != (one.sha256, one.n):
            raise DataMismatchError(
                f"The two results for {language!r} are over different items ({other.n} before, {one.n} after). "
                "Evaluate both models on the same data."
            )


def _row(
    before: float,
    after: float,
    difference_r: NDArray[np.float64],
    change_n: NDArray[np.float64] | None,
    n: int,
) -> ComparedRow:
    """A row without a verdict. ``change_n`` is what each item adds to the difference, if it is a sum over items."""
    exact = 0.0 if change_n is None else sign_flip_p_value(change_n)
    return {
        "before": before,
        "after": after,
        "difference": after - before,
        "interval": list(percentile_interval(difference_r)),
        "p_value": max(two_sided_p_value(difference_r), exact),
        "n": n,
        "verdict": "tie",
    }
