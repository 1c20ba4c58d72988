"""Measuring: interleaved rounds, CPU seconds or CUDA events, peak memory, and what a figure is worth."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

#: How far rounds may lie apart, and how much of the machine others may use, before a figure proves nothing.
TOLERANCE = 0.2


@dataclass
class Figure:
    """One number of the table.

    Attributes:
        what: What it is.
        value: The number.
        target: ``("<=", 0.4)``; None for a number that is only reported.
        unit: ``"×"`` for ratios.
        seconds: Rounds of each variant that it comes from.
        of: Name of the shape that was measured.
        given: What else a reader needs: the size of the batch, its tokens.
    """

    what: str
    value: float
    target: tuple[str, float] | None = None
    unit: str = "×"
    seconds: dict[str, list[float]] = field(default_factory=dict)
    of: str = ""
    given: dict[str, Any] = field(default_factory=dict)

    @property
    def spread(self) -> float:
        """How far the typical round lies above the best one, at the worst variant."""
        return max((median(rounds) / min(rounds) - 1 for rounds in self.seconds.values()), default=0.0)

    def verdict(self, others: float) -> str:
        """``"met"``, ``"missed"``, ``"skipped: …"`` or, without a target, ``"reported"``.

        Args:
            others: Share of the machine that others used meanwhile.
        """
        if self.target is None:
            return "reported"
        if self.seconds and others > TOLERANCE:
            return f"skipped: others used {others:.0%} of the machine"
        if self.spread > TOLERANCE:
            return f"skipped: rounds differ by {self.spread:.0%}"
        sense, bound = self.target
        met = {"<=": self.value <= bound, ">=": self.value >= bound, "==": self.value == bound}[sense]
        return "met" if met else "missed"


def ratio(
    what: str,
    seconds: Mapping[str, list[float]],
    above: str,
    below: str,
    target: tuple[str, float] | None = None,
    of: str = "",
) -> Figure:
    """The quotient of two variants' best rounds."""
    both = {above: seconds[above], below: seconds[below]}
    return Figure(what, min(seconds[above]) / min(seconds[below]), target, seconds=both, of=of)


class Clock:
    """CPU seconds of this process; on a GPU, time between events of its stream.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
    """

    def __init__(self, device: str) -> None:
        self.device = device

    def mark(self) -> Any:
        """A moment."""
        if self.device != "cuda":
            return time.process_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Seconds between two moments."""
        if self.device != "cuda":
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1000

    def of(self, work: Callable[[], Any]) -> float:
        """Seconds that some work takes."""
        start = self.mark()
        work()
        return self.between(start, self.mark())


def interleaved(variants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Measure variants in turn, so that what disturbs one round disturbs all of them.

    Args:
        variants: Each measures itself once.
        rounds: How often.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, measure in variants.items():
            seconds[name].append(measure())
    return seconds


def peak_memory(work: Callable[[], Any], device: str) -> int:
    """Bytes that some work needs at its peak, beyond what is there before."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{key}:")).split()[1])


@contextmanager
def held_activations(model: torch.nn.Module) -> Iterator[list[int]]:
    """Bytes that autograd keeps for the backward pass of what runs in this block, parameters aside; one number."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage
        return tensor.detach()

    total = [0]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield total
    total[0] = sum(storage.nbytes() for storage in storages.values())


class OthersShare:
    """Share of the machine's processors that other processes use, from Linux's counters."""

    def __init__(self) -> None:
        self.start = self._now()

    def __call__(self) -> float:
        """The share since this object was made; 0 where the system does not tell."""
        busy, own, wall = (now - start for now, start in zip(self._now(), self.start, strict=True))
        return max(0.0, busy - own) / (wall * (os.cpu_count() or 1)) if busy else 0.0

    @staticmethod
    def _now() -> tuple[float, float, float]:
        own = os.times()
        used = own.user + own.system + own.children_user + own.children_system
        stat = Path("/proc/stat")
        if not stat.exists():
            return 0.0, used, time.monotonic()
        user, nice, system, _, _, irq, softirq, *_ = map(int, stat.read_text().split()[1:9])
        return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK"), used, time.monotonic()


def facts(device: str, threads: int) -> dict[str, Any]:
    """Where and with what was measured."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else _processor(),
        "cpus": os.cpu_count(),
        "threads": threads,
        **{name: version(name) for name in ("torch", "transformers", "sentence-transformers")},
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
