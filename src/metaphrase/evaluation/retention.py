"""Retention: the loss of accuracy in languages without training data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metaphrase.io.arguments import AtLeast0, checked


@checked
def retention(comparison: Mapping[str, Any], limit: AtLeast0 = 1.0) -> dict[str, Any]:
    """Test whether languages without training data kept their accuracy.

    This is a non-inferiority test of the mean over the languages. The verdict is ``"kept"`` if the whole interval of the
    difference lies above the red line ``-limit``, ``"lost"`` if the whole interval lies below it, else ``"uncertain"``.

    Languages are sorted from the largest loss to the largest gain; ``below`` is true if a language's difference lies below
    the red line; ``worst`` lists the significantly worse languages and up to five with the largest losses.
    """
    rows = [
        {"language": language, **row, "below": row["difference"] < -limit}
        for language, row in sorted(comparison["languages"].items(), key=lambda item: item[1]["difference"])
    ]
    low, high = comparison["pooled"]["interval"]
    verdict = "kept" if low >= -limit else "lost" if high < -limit else "uncertain"
    losses = [row["language"] for row in rows if row["difference"] < 0][:5]
    worst = [row["language"] for row in rows if row["verdict"] == "worse" or row["language"] in losses]
    return {
        "limit": limit,
        "verdict": verdict,
        "pooled": comparison["pooled"],
        "languages": rows,
        "worst": worst,
        "settings": comparison["settings"],
    }
