"""Settings of an adaptation, planned from the data, the machine and the available time."""

from __future__ import annotations

import logging
import math
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from sentence_transformers import SentenceTransformer

from metaphrase.corpus.loading import Corpus
from metaphrase.corpus.parallel import ParallelSet
from metaphrase.encoders.loading import freeze_word_embeddings
from metaphrase.encoders.positions import evaluating
from metaphrase.encoders.prompts import resolve_prompt
from metaphrase.evaluation.encoding import encode_texts
from metaphrase.io.arguments import AtLeast0, Count, checked
from metaphrase.io.counts import counted, format_duration
from metaphrase.io.environment import flush_denormals, has_bfloat16_instructions
from metaphrase.modeling.bulk import distinct_texts
from metaphrase.modeling.collator import ParallelCollator
from metaphrase.modeling.encoding import has_decoder
from metaphrase.modeling.packing import packed
from metaphrase.modeling.precision import bfloat16
from metaphrase.training.loss import build_loss
from metaphrase.training.recipe import Recipe

logger = logging.getLogger(__name__)

#: Maximum number of epochs over the user's pairs.
EPOCHS = 3
#: Maximum number of evaluations of the dev set during training, and number without improvement after which training ends.
EVALUATIONS, PATIENCE = 8, 3
#: Maximum number of pairs of a step that is timed only to choose its precision.
TRIAL_PAIRS = 64
#: Number of texts whose encoding is timed.
TIMED_TEXTS = 64
#: File in which Linux reports its memory, in units of 1024 bytes.
MEMORY_FACTS = Path("/proc/meminfo")
#: Files of the memory limit and of the used memory of a container, and the page cache in its statistics; versions 2 and 1 of
#: Linux' control groups.
CONTAINER_FACTS = [
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"), "inactive_file"),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
        "total_inactive_file",
    ),
]
#: Free memory assumed if the system does not report it, in bytes.
UNKNOWN_MEMORY = 8e9


@checked
@dataclass(frozen=True)
class Plan:
    """Settings of a training run.

    Attributes:
        batch_size: Pairs ranked against each other.
        micro_batch_size: Rows encoded at a time, by memory; None encodes the whole batch.
        max_steps: Maximum number of optimiser steps.
        eval_steps: Steps between two evaluations of the dev set.
        freeze_word_embeddings: Whether the word embeddings are frozen.
        bf16: Whether steps compute in bfloat16.
        learning_rate: Peak learning rate.
        training_minutes: Estimated duration of all steps.
        measuring_minutes: Estimated duration of all measurements, before, during and after training.
        reasons: Reasons for the settings, one line each.
    """

    batch_size: Count
    micro_batch_size: Count | None
    max_steps: Count
    eval_steps: Count
    freeze_word_embeddings: bool
    bf16: bool
    learning_rate: AtLeast0
    training_minutes: AtLeast0
    measuring_minutes: AtLeast0
    reasons: tuple[str, ...]


def plan_run(
    model: SentenceTransformer,
    recipe: Recipe,
    corpus: Corpus,
    *,
    minutes: float,
    seed: int,
    dev: Mapping[str, ParallelSet],
    tests: Mapping[str, Mapping[str, ParallelSet]],
    further: Sequence[tuple[Sequence[str], int]] = (),
) -> Plan:
    """Time a step and the encoding of texts on this machine, and plan a run.

    ``further`` are groups of texts that the run also encodes, and how often each group is encoded.
    """
    encoder: Any = model[0].auto_model
    config = encoder.config
    cuda = model.device.type == "cuda"
    memory = float(torch.cuda.mem_get_info()[0]) if cuda else free_memory()
    rows = len(corpus.dataset)
    # Test sets are measured after training and, with each prompt, before it.
    groups: list[tuple[Sequence[str], int]] = [(texts_of(dev), EVALUATIONS), *further]
    groups += [(texts_of(sets), 1 + count_prompts(model)) for sets in tests.values()]
    reason = reason_to_freeze(
        memory=memory,
        parameters=sum(parameter.numel() for parameter in encoder.parameters()),
        table=encoder.get_input_embeddings().weight.numel(),
        cuda=cuda,
    )
    fit = fit_memory(
        batch_size_for(rows),
        memory=memory,
        held=held_bytes(model, recipe, corpus, freeze=bool(reason)),
        # 34 numbers per state (Korthikanti et al. 2022)
        row_bytes=recipe.max_length * config.hidden_size * config.num_hidden_layers * 4 * 34.0,
        divisible=not has_decoder(encoder),
        why_frozen=reason,
    )
    step = faster_precision(
        model,
        recipe,
        corpus,
        size=min(batch_size_for(rows), rows),
        freeze=fit.freeze_word_embeddings,
        micro_batch_size=fit.micro_batch_size,
        seed=seed,
    )
    return make_plan(
        rows=rows,
        fit=fit,
        step=step,
        measuring_seconds=encoding_seconds(model, groups, seed=seed),
        minutes=minutes,
    )


def free_memory() -> float:
    """Free memory in bytes; the page cache, which the system gives up for programs, counts as free.

    In a container it is at most what the container may still use.
    """
    with suppress(OSError, StopIteration):  # systems other than Linux have no such file
        lines = MEMORY_FACTS.read_text(encoding="utf-8").splitlines()
        free = 1024.0 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))
        return min(free, _left_in_container())
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError):
        return UNKNOWN_MEMORY


def _left_in_container() -> float:
    """The memory limit of the control group minus its use without page cache, in bytes; infinite without a limit."""
    for limit, used, cache in CONTAINER_FACTS:
        with suppress(OSError, ValueError, StopIteration):  # no control group of this version, or "max"
            most = int(limit.read_text(encoding="utf-8"))
            lines = (limit.parent / "memory.stat").read_text(encoding="utf-8").splitlines()
            cached = int(next(line.split()[1] for line in lines if line.startswith(f"{cache} ")))
            return most - int(used.read_text(encoding="utf-8")) + float(cached)
    return math.inf


def faster_precision(model: SentenceTransformer, *trial: Any, **settings: Any) -> tuple[torch.dtype, float]:
    """The precision in which a step is faster, and its seconds: float32, or bfloat16 on a CPU that has instructions for it.

    See `step_seconds` for the arguments.
    """
    single = step_seconds(model, *trial, **settings)
    if model.device.type != "cpu" or not has_bfloat16_instructions():
        return torch.float32, single
    half = step_seconds(model, *trial, **settings, dtype=torch.bfloat16)
    logger.info("A trial step takes %.2f s in float32 and %.2f s in bfloat16; the faster is used.", single, half)
    return min((single, torch.float32), (half, torch.bfloat16), key=itemgetter(0))[::-1]


def step_seconds(
    model: SentenceTransformer,
    recipe: Recipe,
    corpus: Corpus,
    size: int,
    *,
    freeze: bool,
    seed: int,
    micro_batch_size: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> float:
    """Time the forward and backward pass of a step, after a warm-up step; 5 % are added for the optimiser.

    The model and the random number generators are restored.
    """
    flush_denormals()  # as the run does
    with restored(model):
        torch.manual_seed(seed)
        if freeze:
            freeze_word_embeddings(model)
        loss = build_loss(model, recipe, corpus).to(model.device).train()
        loss.micro_batch_size = micro_batch_size
        collate = ParallelCollator(model.tokenizer, loss.views, seed=seed)
        rows = corpus.dataset.shuffle(seed=seed)
        seconds = 0.0
        for step in range(2):
            chosen = [rows[(step * size + i) % len(rows)] for i in range(size)]
            batch = send_to_device(collate(chosen), model.device)
            start = time.perf_counter()
            with packed(model):
                with bfloat16(model, enabled=dtype == torch.bfloat16):
                    total = torch.stack(list(loss(batch).values())).sum()
                total.backward()
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            loss.zero_grad()
    return 1.05 * seconds


def texts_of(sets: Mapping[str, ParallelSet]) -> list[str]:
    """Distinct texts of test sets."""
    return distinct_texts(side for one in sets.values() for side in (one.sources, one.targets))[0]


def count_prompts(model: SentenceTransformer) -> int:
    """Number of prompts that an original encoder is measured with: none, and the query prompt that it stores."""
    return 1 + bool(resolve_prompt(model, "auto"))


def encoding_seconds(model: SentenceTransformer, groups: Sequence[tuple[Sequence[str], int]], *, seed: int) -> float:
    """Estimate the seconds to encode groups of texts, each a number of times, from the time of a sample, after a warm-up.

    Texts are sampled in proportion to how often they are encoded, because groups differ in the length of their texts.
    """
    texts = [text for group, _ in groups for text in group]
    times = [number for group, number in groups for _ in group]
    chosen = random.Random(seed).choices(texts, times, k=TIMED_TEXTS)
    encode_texts(model, chosen[:2])
    start = time.perf_counter()
    encode_texts(model, chosen)
    return (time.perf_counter() - start) / len(chosen) * sum(times)


@contextmanager
def restored(model: SentenceTransformer) -> Iterator[None]:
    """Restore mode, gradients and frozen parameters of a model, and all random number generators."""
    trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    python, array = random.getstate(), np.random.get_state()  # noqa: NPY002 - the global generator is what is restored
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    try:
        with evaluating(model), torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(array)  # noqa: NPY002
        for parameter, requires_grad in trainable:
            parameter.requires_grad_(requires_grad)
            parameter.grad = None


def batch_size_for(pairs: int) -> int:
    """Pairs ranked against each other: more if there are enough of them for a few hundred steps."""
    return 64 if pairs >= 4000 else 32 if pairs >= 1000 else 16


@dataclass(frozen=True)
class Fit:
    """Settings with which a step fits into memory.

    Attributes:
        freeze_word_embeddings: Whether the word embeddings are frozen.
        micro_batch_size: Rows encoded at a time; None encodes the whole batch.
        reasons: Reasons for the settings, one line each.
    """

    freeze_word_embeddings: bool
    micro_batch_size: int | None
    reasons: tuple[str, ...]


def reason_to_freeze(*, memory: float, parameters: int, table: int, cuda: bool) -> str:
    """Why the word embeddings are frozen; empty if they are trained.

    ``table`` is their number of parameters, ``memory`` that of the device in bytes.
    """
    if not cuda:
        return "on a CPU"
    if 16 * parameters > 0.5 * memory:  # weights, gradients, two moments
        return f"because training them requires {16 * table / 1e9:.1f} of {memory / 1e9:.1f} GB"
    return ""


def held_bytes(model: SentenceTransformer, recipe: Recipe, corpus: Corpus, *, freeze: bool) -> int:
    """Memory of all weights of a recipe's loss, and of the gradients and two moments of those that are trained.

    The original encoder and teachers that objectives compare with are included. The model is restored.
    """
    with restored(model):
        if freeze:
            freeze_word_embeddings(model)
        loss = build_loss(model, recipe, corpus)
        frozen = [objective.original for objective in loss.objectives.values() if objective.original is not None]
        parts = [loss, *(part for one in frozen for part in (one.encoder, one.modules))]
        weights = {id(weight): weight for part in parts for weight in part.parameters()}  # some are shared
        return sum((16 if weight.requires_grad else 4) * weight.numel() for weight in weights.values())


def fit_memory(
    batch: int, *, memory: float, held: float, row_bytes: float, divisible: bool = True, why_frozen: str = ""
) -> Fit:
    """Choose settings by memory (in bytes).

    ``held`` is the memory of weights, gradients and moments, ``row_bytes`` that of the activations of a sentence, and
    ``divisible`` whether the encoder can encode a batch in parts.
    """
    reasons = [f"word embeddings are frozen, {why_frozen}"] if why_frozen else []
    room = max(memory - held, 0.0) * 0.5
    rows = int(room // row_bytes)
    micro = None if rows >= 2 * batch or not divisible else max(rows, 4)
    if micro is not None:
        reasons.append(f"{micro} rows are encoded at a time, for {memory / 1e9:.1f} GB of free memory")
    return Fit(bool(why_frozen), micro, tuple(reasons))


def make_plan(
    *, rows: int, fit: Fit, step: tuple[torch.dtype, float], measuring_seconds: float, minutes: float
) -> Plan:
    """Choose settings by data, time and memory. ``step`` is the result of `faster_precision`."""
    batch = min(batch_size_for(rows), rows)
    reasons = [f"batch of {batch} pairs, for {rows:,} pairs", *fit.reasons]
    wanted = max(EPOCHS * rows // batch, 1)
    dtype, seconds_per_step = step
    if dtype == torch.bfloat16:
        reasons.append("bfloat16, in which a trial step is faster than in float32")
    affordable = max(int(60 * minutes / seconds_per_step), 1)
    steps = min(wanted, affordable)
    which = f"{EPOCHS} epochs" if steps == wanted else f"{minutes:g} minutes at {seconds_per_step:.1f} s a step"
    reasons.append(f"at most {counted(steps, 'step')}: {which}")
    evaluate = -(-steps // EVALUATIONS)  # rounded up, as the last step is measured too
    when = "at every step" if evaluate == 1 else f"every {evaluate} steps"
    reasons.append(
        f"the encoder is measured on the dev set {when}; training ends after {PATIENCE} measurements without improvement"
    )
    training_seconds = steps * seconds_per_step
    reasons.append(
        f"about {format_duration(training_seconds)} for training and {format_duration(measuring_seconds)} for measurements"
    )
    return Plan(
        batch_size=batch,
        micro_batch_size=fit.micro_batch_size,
        max_steps=steps,
        eval_steps=evaluate,
        freeze_word_embeddings=fit.freeze_word_embeddings,
        bf16=dtype == torch.bfloat16,
        learning_rate=5e-5,
        training_minutes=round(training_seconds / 60, 2),
        measuring_minutes=round(measuring_seconds / 60, 2),
        reasons=tuple(reasons),
    )
