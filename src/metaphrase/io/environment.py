"""The environment of a result: library versions and hardware."""

from __future__ import annotations

import logging
import os
import platform
import sys
from importlib.metadata import version
from typing import Any

#: Packages whose versions are recorded in checkpoints and results.
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
    """Return the versions of Python and of the recorded packages."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def hardware() -> dict[str, Any]:
    """Describe the machine: architecture, CPUs, threads and GPU."""
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
