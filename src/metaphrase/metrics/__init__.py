"""Metrics for Hugging Face's ``evaluate``, as thin wrappers of functions of this package.

>>> from pathlib import Path
>>> Path(path("aer")).name
'aer'
"""

from __future__ import annotations

import importlib
from pathlib import Path

_FOLDER = Path(__file__).parent


def path(name: str) -> str:
    """Return the folder of a metric, for ``evaluate.load(path("aer"))``.

    Raises:
        ValueError: The metric does not exist.
    """
    known = sorted(folder.parent.name for folder in _FOLDER.glob("*/*.py") if folder.stem == folder.parent.name)
    if name not in known:
        raise ValueError(f"Unknown metric {name!r}. Available metrics: {', '.join(known)}.")
    importlib.invalidate_caches()  # `evaluate` copies the module to a folder whose listing Python may have cached
    return str(_FOLDER / name)
