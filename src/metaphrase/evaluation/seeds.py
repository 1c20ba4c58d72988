"""Results of several seeds: means, and differences with an interval over seeds and test items together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from scipy.stats import t as student

from metaphrase.evaluation.significance import CONFIDENCE


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean over seeds and half the width of its 95 % interval (Student's t); None for a single seed.

    >>> interval([1.0, 2.0, 3.0])
    {'mean': 2.0, 'half': 2.484, 'values': [1.0, 2.0, 3.0]}
    """
    n, half = len(values), None
    if n > 1:
        half = round(float(student.ppf((1 + CONFIDENCE) / 2, n - 1)) * statistics.stdev(values) / n**0.5, 3)
    return {"mean": round(statistics.fmean(values), 3), "half": half, "values": [round(v, 3) for v in values]}


def difference(old: Sequence[float], new: Sequence[float], sampling: float = 0.0) -> dict[str, Any]:
    """Return the mean difference over paired seeds, its interval and a verdict: a tie if the interval contains 0.

    ``sampling`` is half the width of the interval due to the test items.

    >>> difference([70.0, 71.0, 72.0], [71.0, 72.1, 73.1])["verdict"], difference([70.0, 71.0], [71.0, 70.0])["verdict"]
    ('better', 'tie')
    >>> difference([70.0, 71.0], [71.0, 72.0], sampling=1.5)["verdict"]
    'tie'
    >>> difference([70.0, 71.0, 72.0], [71.0, 72.1, 73.1], sampling=0.4)["half"]  # the root of 0.143² + 0.4²
    0.425
    """
    change = interval([b - a for a, b in zip(old, new, strict=True)])
    if change["half"] is None:
        return change | {"verdict": "one seed"}
    change["half"] = round(math.hypot(change["half"], sampling), 3)
    tie = abs(change["mean"]) <= change["half"]
    return change | {"verdict": "tie" if tie else "better" if change["mean"] > 0 else "worse"}
