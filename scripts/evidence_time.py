"""The times of scripts/evidence.py: the time of a training step of each recipe, and an estimate for the missing stages."""

from __future__ import annotations

import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from evidence_table import STEP_TIMES

from metaphrase.corpus.parallel import load_parallel_folder
from metaphrase.encoders.names import STARTER
from metaphrase.evaluation.suites.running import encoding_speed
from metaphrase.exceptions import UsageError
from metaphrase.io.environment import hardware, versions
from metaphrase.io.work_folders import read_part, write_part
from metaphrase.training.configuration import RunConfig
from metaphrase.training.corpora import read_bitext, with_columns
from metaphrase.training.finishing import encoded_texts
from metaphrase.training.planning import step_seconds
from metaphrase.training.recipe import Recipe

if TYPE_CHECKING:
    from evidence import Evidence

#: Rounds over all recipes in which the time of a step is measured.
ROUNDS = 2


def time_steps(evidence: Evidence) -> None:
    """Measure the time of a training step of each recipe: the shortest of some rounds over all recipes.

    Raises:
        UsageError: Times of other recipes are stored, but cannot be compared with new ones.
    """
    path, options = evidence.folder / STEP_TIMES, evidence.options
    facts = {"rounds": ROUNDS, "batch_size": options.batch_size, "hardware": hardware()}
    other_times = stored_times(path, facts, {cell.name for cell in evidence.cells})
    # The corpus of a recipe with word links, if there is one, has the columns of all recipes.
    largest = max(evidence.cells, key=lambda cell: "alignment" in cell.recipe.columns)
    config = evidence.run_config(largest, evidence.work / "training" / "timed")
    arguments = config.training_arguments()
    corpus = with_columns(read_bitext(config, evidence.start, arguments), largest.recipe, config, arguments)
    recipes = {cell.name: replace(cell.recipe, max_length=config.max_length) for cell in evidence.cells}
    seconds = dict.fromkeys(recipes, float("inf"))
    size, dtype = options.batch_size, torch.bfloat16 if options.bf16 else torch.float32
    for _ in range(ROUNDS):
        for name, recipe in recipes.items():
            measured = step_seconds(evidence.start, recipe, corpus, size, freeze=True, seed=0, dtype=dtype)
            seconds[name] = round(min(seconds[name], measured), 3)
            print(f"{time.strftime('%H:%M:%S')} {name}: {measured:.2f} seconds", flush=True)
    write_part(path, facts | {"seconds": other_times | seconds, "versions": versions()})


def stored_times(path: Path, facts: Mapping[str, Any], recipes: set[str]) -> dict[str, float]:
    """The stored times of other recipes than these.

    Raises:
        UsageError: Such times were measured with other settings or on another machine.
    """
    content = read_part(path) or {"seconds": {}}
    times = {name: seconds for name, seconds in content["seconds"].items() if name not in recipes}
    if times and any(content.get(name) != value for name, value in facts.items()):
        raise UsageError(
            f"{path} has times of other recipes ({', '.join(times)}) with other settings or from another machine, which "
            "cannot be compared. Measure all recipes (without --only), or remove the file."
        )
    return times


def plan(evidence: Evidence) -> str:
    """Stored and missing results, and an estimate of the remaining time, as text."""
    estimate = Estimate(evidence)
    minutes = sum(
        estimate.minutes(STARTER, benchmark.name)
        for tier in evidence.tiers
        for path, settings, benchmark in evidence.missing_of_start(tier)
        if not evidence.shared_result(path, settings)
    )
    lines = ["cell | trained | alpha | benchmarks | minutes left", f"{STARTER} | | | | {minutes:.0f}"]
    total_minutes = minutes
    for cell in evidence.cells:
        benchmarks = evidence.benchmarks if cell.packaged else list(chain.from_iterable(evidence.tiers[:-1]))
        missing = evidence.missing(cell, benchmarks)
        minutes = sum(
            estimate.minutes(cell.name, benchmark.name if benchmark else stage) for stage, benchmark in missing
        )
        total_minutes += minutes
        trained = "no" if ("train", None) in missing else "yes"
        chosen = "no" if ("alpha", None) in missing else "yes"
        count = len(benchmarks) * len(cell.variants)
        measured = count - sum(benchmark is not None for _, benchmark in missing)
        lines.append(f"{cell} | {trained} | {chosen} | {measured} of {count} | {minutes:.0f}")
    lines.append(f"About {total_minutes / 60:.1f} hours are left on this machine, one program at a time.")
    return "\n".join(lines)


class Estimate:
    """Estimates the time of a stage from stored results or, without any, from a short measurement."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.of_recipe: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.of_stage: dict[str, list[float]] = defaultdict(list)
        for path in evidence.folder.glob("*/**/*.json"):
            if content := read_part(path):
                stage = content.get("benchmark", path.stem)
                recipe = path.relative_to(evidence.folder).parts[0]
                self.of_recipe[recipe, stage].append(content["seconds"])
                self.of_stage[stage].append(content["seconds"])

    def minutes(self, recipe: str, stage: str) -> float:
        """The minutes of a stage of a recipe: ``train``, ``alpha``, or the name of a benchmark."""
        if stored := self.of_recipe.get((recipe, stage)) or self.of_stage.get(stage):
            return statistics.median(stored) / 60
        if stage == "train":
            return self.training_seconds / 60
        return self.encoded_bytes(stage) * self.byte_seconds / 60

    @cached_property
    def training_seconds(self) -> float:
        """Seconds to train a recipe: those of a step of ranking alone, for all steps."""
        evidence, folder = self.evidence, self.evidence.work / "training" / "timed"
        config = evidence.run_config(evidence.cells[0], folder)
        corpus = read_bitext(config, evidence.start, config.training_arguments())
        size = min(evidence.options.batch_size, len(corpus.dataset))
        seconds = step_seconds(evidence.start, Recipe.load("tr"), corpus, size, freeze=True, seed=0)
        shutil.rmtree(folder)
        return seconds * evidence.options.steps

    @cached_property
    def byte_seconds(self) -> float:
        """Seconds to encode a byte of text."""
        return encoding_speed(self.evidence.start)

    def encoded_bytes(self, stage: str) -> float:
        """The bytes of text that a stage encodes."""
        if stage == "alpha":
            config = RunConfig(merge="auto", guard=[str(path) for path in self.evidence.guard_folders])
            pairs = load_parallel_folder(Path(self.evidence.options.corpus), split="dev")
            groups = encoded_texts(config, pairs, prompts=2)
            return sum(times * len("".join(texts).encode()) for texts, times in groups)
        return next(benchmark.work for benchmark in self.evidence.benchmarks if benchmark.name == stage)
