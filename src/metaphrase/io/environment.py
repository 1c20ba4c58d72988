"""The environment of a result: library versions and hardware."""

from __future__ import annotations

import json
import logging
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

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


def install_command(extra: str) -> str:
    """The command that installs an extra, from where this package was installed: a clone, a repository or an index."""
    try:
        origin = json.loads(distribution("metaphrase").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):  # imported from a folder of sources
        origin = {}
    url, is_repository = str(origin.get("url", "")), "vcs_info" in origin
    if url.startswith("file://") and not is_repository and (folder := Path(url2pathname(urlparse(url).path))).is_dir():
        return f"pip install {shlex.quote(f'{folder}[{extra}]')}"
    repository = f" @ {origin['vcs_info']['vcs']}+{url}" if is_repository else ""
    return f"pip install 'metaphrase[{extra}]{repository}'"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the recorded packages."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def hardware() -> dict[str, Any]:
    """Describe the machine: architecture, processor, CPUs, threads and GPU."""
    import torch

    facts: dict[str, Any] = {
        "machine": platform.machine(),
        "processor": processor(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def processor() -> str:
    """The name of the CPU, or the architecture if the system does not report it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def cores(facts: Mapping[str, Any]) -> str:
    """Describe the CPUs of `hardware` in words: ``2 AMD EPYC cores``."""
    return f"{facts['cpus']} {facts.get('processor', facts['machine'])} cores"


def has_bfloat16_instructions() -> bool:
    """Whether this CPU multiplies matrices in bfloat16 in hardware: AVX512-BF16, AMX or Arm's instructions."""
    import torch

    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def set_variables() -> None:
    """Set environment variables of the libraries that compute on CPUs, unless they are set.

    OpenMP's threads spin only briefly: spinning threads take CPUs from other programs, and from threads they wait for.
    docs/speed.md has the effect alone and beside another program. OpenMP reads the variable when torch is imported.

    oneDNN, which computes bfloat16, keeps the kernels of fewer shapes: batches differ in shape, so its default of 1,024
    kernels takes gigabytes of memory in training, and few of them are used again. The first operation reads the variable.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def flush_denormals() -> None:
    """Flush denormal numbers to 0: peaked softmaxes produce them, and CPUs are 45 times slower with them.

    Threads inherit the setting, so this comes before any computation.
    """
    import torch

    torch.set_flush_denormal(True)


def prepare_process() -> None:
    """Set up the process of a program.

    This package's lines are logged to stderr; of several processes, only the first one logs more than warnings. See also
    `set_variables` and `flush_denormals`.
    """
    set_variables()
    flush_denormals()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    first = os.environ.get("RANK", "0") == "0"
    logging.getLogger("metaphrase").setLevel(logging.INFO if first else logging.WARNING)
