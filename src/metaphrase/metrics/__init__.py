"""Metrics as modules of Hugging Face's ``evaluate``: thin shells over the package's own functions.

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
        ValueError: There is no such metric.
    """
    known = sorted(folder.parent.name for folder in _FOLDER.glob("*/*.py") if folder.stem == folder.parent.name)
    if name not in known:
        raise ValueError(f"There is no metric {name!r}; there is: {', '.join(known)}.")
    importlib.invalidate_caches()  # `evaluate` copies the module to a folder that Python may have listed without it
    return str(_FOLDER / name)
