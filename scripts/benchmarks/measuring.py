"""Measurements: interleaved rounds, CPU seconds or CUDA events, peak memory, and verdicts."""

from __future__ import annotations

import os
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

from metaphrase.io.environment import processor

#: Maximum spread of rounds, and maximum share of other processes, for a conclusive figure.
TOLERANCE = 0.2


class Skipped(Exception):
    """A row that cannot be measured here, with the reason."""


@dataclass
class Figure:
    """One number in the table, with the name of the shape that was measured and further settings.

    A target is for example ``("<=", 0.4)``; an informative number has none. ``seconds`` are the rounds of each variant from
    which the number is computed.
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
        """Return how much the typical round exceeds the best one, for the noisiest variant."""
        return max((median(rounds) / min(rounds) - 1 for rounds in self.seconds.values()), default=0.0)

    def verdict(self, others: float) -> str:
        """Return ``"met"``, ``"missed"``, ``"skipped: …"`` or, without a target, ``"reported"``.

        ``others`` is the share of the machine that other processes used.
        """
        if self.target is None:
            return "reported"
        if self.seconds and others > TOLERANCE:
            return f"skipped: other processes used {others:.0%} of the machine"
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
    """Return the ratio of the best rounds of two variants."""
    both = {above: seconds[above], below: seconds[below]}
    return Figure(what, min(seconds[above]) / min(seconds[below]), target, seconds=both, of=of)


class Clock:
    """A clock: CPU seconds of this process or, on a GPU, time between CUDA events."""

    def __init__(self, device: str) -> None:
        self.device = device

    def mark(self) -> Any:
        """Return the current time."""
        if self.device != "cuda":
            return time.process_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Return the seconds between two times."""
        if self.device != "cuda":
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1000

    def of(self, work: Callable[[], Any]) -> float:
        """Return the duration of a function in seconds."""
        start = self.mark()
        work()
        return self.between(start, self.mark())


def interleaved(variants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Measure variants, functions that measure themselves once, in turn, so that a disturbance affects all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, measure in variants.items():
            seconds[name].append(measure())
    return seconds


def peak_memory(work: Callable[[], Any], device: str) -> int:
    """Return the peak memory of a function in bytes, beyond the memory used before."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{key}:")).split()[1])


@contextmanager
def held_activations(model: torch.nn.Module) -> Iterator[list[int]]:
    """Count the bytes that autograd saves for the backward pass within this block, without parameters."""
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
    """Share of the CPUs that other processes use, from Linux's counters."""

    def __init__(self) -> None:
        self.start = self._now()

    def __call__(self) -> float:
        """Return the share since this object was created; 0 if the system does not provide it."""
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
    """Return the hardware and library versions."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "cpus": os.cpu_count(),
        "threads": threads,
        **{name: version(name) for name in ("torch", "transformers", "sentence-transformers")},
    }
