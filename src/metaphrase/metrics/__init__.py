"""Metrics as modules of Hugging Face ``evaluate``, based on the functions of the package.

>>> from pathlib import Path
>>> Path(path("aer")).name
'aer'
"""

from __future__ import annotations

import importlib
from pathlib import Path

_FOLDER = Path(__file__).parent


def path(name: str) -> str:
    """Folder of a metric, for ``evaluate.load(path("aer"))``.

    Raises:
        ValueError: The metric is unknown.
    """
    known = sorted(folder.parent.name for folder in _FOLDER.glob("*/*.py") if folder.stem == folder.parent.name)
    if name not in known:
        raise ValueError(f"Unknown metric {name!r}. The metrics are {', '.join(known)}.")
    importlib.invalidate_caches()  # `evaluate` copies the module to a folder whose listing Python may have cached
    return str(_FOLDER / name)
