"""What a result was made with: versions of the libraries, and the machine."""

from __future__ import annotations

import logging
import os
import platform
import sys
from importlib.metadata import version
from typing import Any

#: Packages whose versions belong to a checkpoint and to a result.
PACKAGES = (
    "metaphrase",
    "torch",
    "transformers",
    "sentence-transformers",
    "datasets",
    "accelerate",
    "tokenizers",
    "numpy",
)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a result depends on."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def hardware() -> dict[str, Any]:
    """The machine that a figure was measured on."""
    import torch

    facts: dict[str, Any] = {"machine": platform.machine(), "cpus": os.cpu_count(), "threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def prepare_process() -> None:
    """Set up the process of a program: log this package's lines to stderr, and flush denormal numbers, slow on CPUs, to 0."""
    import torch

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("metaphrase").setLevel(logging.INFO)
    torch.set_flush_denormal(True)
