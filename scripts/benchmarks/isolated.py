"""Rows whose variants need processes of their own, for their environment or their peak memory.

    python scripts/benchmarks/isolated.py threads '{"context": {"device": "cpu", "rounds": 2, "shapes": []}, "threads": 2}'

is such a process; it prints its measurements as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
from measuring import Figure, Skipped, peak_memory, ratio
from rows import TR, Context, first_step, loss_of, step, trainer
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from settings import batch_of

from metaphrase.modeling.bulk import encode

#: Environments of the threads of torch's OpenMP, which read them before torch is imported.
WAITING = {
    "default": {},
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
}
#: Rows of a micro-batch, in both libraries.
MICRO = 64


def in_a_process(
    kind: str, context: Context, environment: dict[str, str] | None = None, **given: Any
) -> dict[str, Any]:
    """Run a measurement in a new process."""
    request = json.dumps({"context": asdict(context), **given})
    command = [sys.executable, __file__, kind, request]
    cleared = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=cleared | (environment or {}))
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def busy_process() -> Iterator[None]:
    """Keep another process busy during this block."""
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        other.kill()
        other.wait()


def seconds_of(work: Callable[[], Any]) -> float:
    """Return the wall-clock time of a function."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def time_threads(context: Context) -> dict[str, list[float]]:
    """Measure an encoding of 64 sentences and a TR step of 64 pairs."""
    model, texts = context.starter()
    loss = loss_of(model, TR)
    pairs = texts.pairs(context.batch(64, 64))
    batch = batch_of(loss, pairs, context.device)
    sentences = [pair["source"] for pair in pairs]
    works = {"encode": lambda: encode(model, sentences), "TR step": step(context, loss, batch)}
    for work in works.values():
        work()
    return {name: [seconds_of(work) for _ in range(context.rounds)] for name, work in works.items()}


def threads(context: Context) -> Iterator[Figure]:
    """Encoding and training with two threads, alone and beside a busy process, by the waiting of OpenMP's threads.

    Times are wall-clock times. Each process measures itself a few times; processes of all variants alternate.
    """
    if context.device != "cpu" or (os.cpu_count() or 1) < 2:
        raise Skipped("it needs two CPUs")
    if context.quick:
        raise Skipped("--quick skips it")
    seconds: dict[tuple[str, str, str], list[float]] = {}
    for _ in range(1 if context.tiny else 2):
        for beside, other in (("alone", nullcontext), ("beside a busy process", busy_process)):
            with other():
                for waiting, environment in WAITING.items():
                    found = in_a_process("threads", context, environment, threads=2)
                    for work, rounds in found.items():
                        seconds.setdefault((work, beside, waiting), []).extend(rounds)
    for work, shown in (("encode", "encoding"), ("TR step", "a TR step")):
        for beside in ("alone", "beside a busy process"):
            own = {waiting: seconds[work, beside, waiting] for waiting in WAITING}
            what = f"time of {shown} with 2 threads, {beside}"
            yield Figure(what, min(own["default"]), None, "s", {"default": own["default"]}, "starter")
            for name in list(own)[1:]:
                yield ratio(f"{what}, {name} ÷ default", own, name, "default", of="starter")


def time_ranking(context: Context, library: str, size: int) -> dict[str, float]:
    """Measure a step of a trainer in micro-batches: time without the trainer's own work, and peak memory."""
    model, texts = context.starter()
    theirs = library != "metaphrase"
    loss = CachedMultipleNegativesRankingLoss(model, mini_batch_size=MICRO) if theirs else loss_of(model, TR)
    pairs = texts.pairs(size, seed=size)
    with tempfile.TemporaryDirectory() as folder:
        training = trainer(context, loss, pairs, size, 1, folder)
        loss.micro_batch_size = MICRO
        seconds: list[float] = []
        peak = peak_memory(lambda: seconds.append(first_step(context, training)), context.device)
    return {"seconds": seconds[0], "peak": peak}


def cached_ranking(context: Context) -> Iterator[Figure]:
    """First step of AlignmentTrainer in micro-batches and of SentenceTransformerTrainer with its cached ranking."""
    libraries = ("metaphrase", "sentence-transformers")
    for size in (256,) if context.quick else (256, 1024):
        n = context.batch(size, size)
        rounds = context.rounds if size == 256 else 1
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in libraries}
        for _ in range(rounds):
            for name in libraries:
                found[name].append(
                    in_a_process("ranking", context, threads=torch.get_num_threads(), library=name, size=n)
                )
        seconds = {name: [one["seconds"] for one in measured] for name, measured in found.items()}
        peaks = {name: min(one["peak"] for one in measured) / 1e6 for name, measured in found.items()}
        what = f"time of a TR step in micro-batches, sentence-transformers ÷ metaphrase, batch {n:,}"
        yield ratio(what, seconds, *libraries[::-1], of="starter")
        for name, peak in peaks.items():
            what = f"peak memory of a TR step in micro-batches in {name}, batch {n:,}"
            yield Figure(what, peak, None, "MB", of="starter")


ROWS = {"threads": threads, "cached-ranking": cached_ranking}


def main(kind: str, request: str) -> None:
    """Measure, and print the results."""
    given = json.loads(request)
    torch.set_flush_denormal(True)
    torch.set_num_threads(given.pop("threads"))
    measure = {"threads": time_threads, "ranking": time_ranking}[kind]
    print(json.dumps(measure(Context(**given.pop("context")), **given)))


if __name__ == "__main__":
    main(*sys.argv[1:])
