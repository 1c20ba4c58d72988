"""Run the ablations of the papers: train and evaluate every cell of a grid with every seed, and write a table with intervals.

    python scripts/ablations.py wacse-table10 --model starter --corpus BITEXT --steps 100 --seeds 1 2 3
    python scripts/ablations.py dap-fig3 --batch_size 8 --freeze_word_embeddings --vocabulary english
    python scripts/ablations.py ppa-table5 --set moco.queue_size=256 --set learning_rate=3e-5

A grid is a file in ``configs/ablations``. All other options of ``metaphrase train`` apply to every cell.
``--set OPTION=VALUE`` does the same; ``--set OBJECTIVE.ARGUMENT=VALUE`` applies to the cells that contain the objective.
Each cell and seed is a :class:`metaphrase.TrainingRun`, evaluated by translation retrieval in both directions. Its result
is a JSON file, named by a digest of everything that determines it, so that an interrupted program resumes with the missing
runs. The program also writes ``results.json``, ``table.md`` and plots. ``--keep`` stores the results in
``scripts/results/ablations``, unless the stored results have more seeds or steps, and writes them to docs/ablations.md, as
``python scripts/ablations.py --write`` does with all stored results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import re
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import yaml
from datasets import Dataset
from matplotlib.figure import Figure
from sentence_transformers import SentenceTransformer
from stored_results import fill, markdown, refuse_less, reports_errors
from transformers import HfArgumentParser
from update_tables import machine_words

from metaphrase.corpus.files import find_files
from metaphrase.corpus.hub import is_hub_name
from metaphrase.encoders.names import STARTER
from metaphrase.evaluation.retrieval import evaluate_retrieval
from metaphrase.evaluation.seeds import difference, interval
from metaphrase.evaluation.suites.encoders import Sets
from metaphrase.io.configuration import did_you_mean, option, read_yaml
from metaphrase.io.counts import counted
from metaphrase.io.digests import files_sha256, model_hash
from metaphrase.io.environment import prepare_process
from metaphrase.io.files import PACKAGED_DATA as DATA
from metaphrase.io.files import read_json, write_json
from metaphrase.modeling.languages import fold_languages
from metaphrase.training.baseline import read_test_sets
from metaphrase.training.checks import check_config, check_text
from metaphrase.training.configuration import RunConfig, RunOptions, configured_recipe
from metaphrase.training.corpora import read_bitext
from metaphrase.training.recipe import Recipe
from metaphrase.training.run import Inputs, TrainingRun

ROOT = Path(__file__).parents[1]
GRIDS = ROOT / "configs" / "ablations"
KEPT = ROOT / "scripts" / "results" / "ablations"
PAGE = ROOT / "docs" / "ablations.md"

#: Scores of a cell, and their names in tables.
SCORES = {"source_to_target": "xx→en", "target_to_source": "en→xx", "mean": "mean"}
#: Options that do not affect a result, or only through the content of the files that they name.
NOT_DECISIVE = {
    *("output_dir", "resume_from_checkpoint", "run_name", "report_to", "disable_tqdm", "save_strategy", "save_steps"),
    *("model", "corpus", "test", "recipe", "retention", "retention_languages", "on_disk", "license", "data_license"),
    "seed",
}
#: Options of a run that are set by this program.
OWN = {"recipe", "output_dir", "max_steps", "seed", "resume_from_checkpoint", "streaming"}
#: Default options of every cell.
DEFAULTS = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
#: Steps of the short run on which the estimate is based.
TRIAL = 3


@dataclass
class Options:
    """The program's options: encoder, data, steps, seeds and output."""

    model: str = option(STARTER, "Encoder: 'starter', a Hub id or a folder.")
    corpus: list[str] = option([str(DATA / "demo")], "Bitext (default: the demo's).")
    test: list[str] = option([str(DATA / "demo")], "Folders of test sets (default: the demo's).")
    steps: int = option(100, "Optimiser steps of each cell.")
    seeds: list[int] = option([1, 2, 3], "Seeds of each cell.")
    output: str = option("runs/ablations", "Results folder, with a subfolder for each grid.")
    batch_size: int | None = option(None, "Alias of --per_device_train_batch_size.")
    set: list[str] = option([], "OPTION=VALUE of `metaphrase train`, or OBJECTIVE.ARGUMENT=VALUE.", action="extend")
    keep: bool = option(False, "Store the results in scripts/results, and write docs.")


@dataclass(frozen=True)
class Cell:
    """One variant of a grid: ``label`` names it in tables, and ``x`` is its position on the grid's axis, if there is one.

    ``published`` has the paper's numbers, one for each of the grid's published columns; ``costs`` is the name of the recipe
    in ``scripts/benchmarks/costs.py``, if the table shows operations.
    """

    label: str
    recipe: Recipe
    published: tuple[float, ...] = ()
    x: float | None = None
    costs: str | None = None

    @property
    def slug(self) -> str:
        """The label in the form used in file names.

        >>> Cell("TR → MLM", Recipe("", ())).slug
        'tr-mlm'
        """
        return re.sub(r"\W+", "-", self.label.lower()).strip("-")


@dataclass(frozen=True)
class Grid:
    """A table or figure of a paper, as cells to train; differences are relative to the first cell.

    ``varies`` states the difference between the cells. ``published`` has ``scale`` and ``columns`` of the paper's numbers,
    ``groups`` are language sets of Tatoeba whose means are shown if the test set contains them, and ``axis`` is the label of
    the x-axis, if the paper has a figure.
    """

    name: str
    title: str
    paper: str
    varies: str
    cells: tuple[Cell, ...]
    published: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[str, ...] = ()
    axis: str | None = None


@dataclass(frozen=True)
class Run:
    """A cell with a seed, its configuration without the output folder, and its file, named by a digest of the settings."""

    cell: Cell
    seed: int
    config: RunConfig
    path: Path

    def kept(self) -> dict[str, Any] | None:
        """Return the stored result, or None."""
        return read_json(self.path) if self.path.is_file() else None


def load_grid(name: str, *, settings: Mapping[str, Any] | None = None, monolingual: bool = False) -> Grid:
    """Read a grid.

    ``settings`` are values by ``objective.argument``, for every cell that contains the objective. Without ``monolingual``
    text, ``without_monolingual`` of each cell applies.

    Raises:
        ValueError: The grid does not exist, no cell contains the objective of a setting, or an argument is unknown.
    """
    known = sorted(path.stem for path in GRIDS.glob("*.yaml"))
    if name not in known:
        raise ValueError(f"Unknown ablation {name!r}. Available ablations: {', '.join(known)}.")
    content = yaml.safe_load((GRIDS / f"{name}.yaml").read_text(encoding="utf-8"))
    cells = []
    for cell in content.pop("cells"):
        changes = [cell.get("terms", {}), {} if monolingual else cell.get("without_monolingual", {})]
        recipe = varied(Recipe.load(cell["recipe"]), changes, settings or {}, name=f"{name}: {cell['label']}")
        training = {**recipe.training, **cell.get("training", {})}
        paper_training = {**recipe.paper_training, **cell.get("training", {})} if recipe.paper_training else {}
        recipe = replace(recipe, training=training, paper_training=paper_training, **cell.get("settings", {}))
        cells.append(Cell(cell["label"], recipe, tuple(cell.get("published", ())), cell.get("x"), cell.get("costs")))
    objectives = {term.objective for cell in cells for term in cell.recipe.terms}
    if unknown := sorted({key.partition(".")[0] for key in settings or {}} - objectives):
        raise ValueError(
            f"No cell of {name} contains the objective {', '.join(unknown)}. Its objectives: {', '.join(sorted(objectives))}."
        )
    content["groups"] = tuple(content.get("groups", ()))
    return Grid(name=name, cells=tuple(cells), **content)


def varied(recipe: Recipe, changes: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], *, name: str) -> Recipe:
    """Return a recipe with changed, added or (where a change is None) removed terms.

    >>> dap = varied(Recipe.load("dap"), [{"tr": None, "rtl": {"args": {"ratio": 0.5}}}], {"rtl.layers": 1}, name="")
    >>> [(term.objective, dict(term.args)) for term in dap.terms]
    [('rtl', {'layers': 1, 'direction': 'source_to_target', 'ratio': 0.5})]
    """
    content = recipe.to_dict()
    terms = {term["objective"]: term for term in content["terms"]}
    for change in changes:
        for objective, given in change.items():
            if given is None:
                del terms[objective]
            else:
                term = terms.setdefault(objective, {"objective": objective, "args": {}})
                terms[objective] = {**term, **given, "args": {**term["args"], **given.get("args", {})}}
    for key, value in settings.items():
        objective, _, argument = key.partition(".")
        if objective in terms:
            terms[objective] = {**terms[objective], "args": {**terms[objective]["args"], argument: value}}
    return Recipe.from_dict({**content, "name": name, "terms": list(terms.values())}, origin=name)


def parsed(argv: Sequence[str]) -> tuple[Options, dict[str, Any], dict[str, Any]]:
    """Return the program's options, the options of the training runs by name, and settings by ``objective.argument``.

    Raises:
        ValueError: An option is unknown or set by the program, or a setting has no value.
    """
    parser = HfArgumentParser(Options, allow_abbrev=False)
    options, rest = parser.parse_args_into_dataclasses(list(argv), return_remaining_strings=True)
    settings = {}
    if options.batch_size is not None:
        rest += ["--per_device_train_batch_size", str(options.batch_size)]
    for item in options.set:
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"--set expects OPTION=VALUE or OBJECTIVE.ARGUMENT=VALUE, got {item!r}.")
        if "." in key:
            settings[key] = yaml.safe_load(value)
        else:
            rest += [f"--{key}", value]
    given = run_options(rest)
    if taken := sorted(given.keys() & OWN):
        raise ValueError(f"This program sets --{taken[0]} for every cell. Use --steps, --seeds and --output.")
    if taken := sorted(given.keys() & {"model", "corpus", "test"}):
        raise ValueError(f"--config has {taken[0]}. Remove it, and pass --{taken[0]} on the command line.")
    options.seeds = list(dict.fromkeys(options.seeds))
    return options, given, settings


def run_options(argv: Sequence[str]) -> dict[str, Any]:
    """Return the options of a training run that are set on a command line or in its ``--config``, by name.

    >>> run_options(["--learning_rate", "1e-3", "--languages", "sw", "fi"])
    {'languages': ['sw', 'fi'], 'learning_rate': 0.001}

    Raises:
        ValueError: An option is unknown.
    """
    names = [option.name for option in fields(RunConfig) if option.init]
    parser = HfArgumentParser(RunConfig, allow_abbrev=False, add_help=False)
    parser.add_argument("--config")
    namespace = argparse.Namespace(**dict.fromkeys(names, ...))  # options that are set replace the dots
    namespace, unknown = parser.parse_known_args(list(argv), namespace)
    if unknown:
        raise ValueError(f"Unknown option {unknown[0]}{did_you_mean(unknown[0].lstrip('-'), names)}.")
    given = {name: value for name, value in vars(namespace).items() if value is not ...}
    config = given.pop("config")
    return {**(read_yaml(config) or {} if config else {}), **given}


def configurations(grid: Grid, options: Options, given: Mapping[str, Any]) -> list[RunConfig]:
    """Return the configuration of each cell, without seed and folder, and write the cells' recipes to files."""
    folder = Path(options.output) / grid.name / "recipes"
    folder.mkdir(parents=True, exist_ok=True)
    configs = []
    for cell in grid.cells:
        text = yaml.safe_dump(cell.recipe.to_dict(), sort_keys=False, allow_unicode=True)
        recipe = folder / f"{cell.slug}-{hashlib.sha256(text.encode()).hexdigest()[:6]}.yaml"
        recipe.write_text(text, encoding="utf-8")
        settings = {"model": options.model, "corpus": options.corpus, "test": options.test, "recipe": str(recipe)}
        configs.append(
            RunConfig(**{**DEFAULTS, **settings, "max_steps": options.steps, **given, "output_dir": "unused"})
        )
    return configs


def plan(grid: Grid, options: Options, configs: Sequence[RunConfig], settings: Sequence[Any]) -> list[Run]:
    """Return the runs of a grid, seed by seed, from the configuration of each cell and what determines its result."""
    folder = Path(options.output) / grid.name / "cells"
    runs = []
    for seed in options.seeds:
        for cell, config, decisive in zip(grid.cells, configs, settings, strict=True):
            text = json.dumps([seed, decisive], sort_keys=True, default=str)
            digest = hashlib.sha256(text.encode()).hexdigest()[:12]
            path = folder / f"{cell.slug}-seed{seed}-{digest}.json"
            runs.append(Run(cell, seed, replace(config, seed=seed), path))
    return runs


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Return the settings that determine a result, except weights and seed: texts, recipe and options, without paths.

    Raises:
        ValueError: An option is invalid, or the recipe cannot be trained with it.
        FileNotFoundError: The corpus, a test set or monolingual text does not exist.
    """
    check_config(config)
    recipe = configured_recipe(config)
    check_text(recipe, config)
    recipe.objectives(config.max_length)
    files = find_files(config.corpus, languages=config.languages or None)
    own = {option.name for option in fields(RunOptions)}
    plain = RunConfig(recipe="tr")
    values = {option.name: getattr(config, option.name) for option in fields(RunConfig) if option.init}
    values = {name: value for name, value in values.items() if name not in NOT_DECISIVE}
    terms = recipe.to_dict()
    hub = [name for name in config.monolingual if is_hub_name(name)]
    local = [path for path in config.monolingual if path not in hub]
    return {
        "corpus": [[file.name] if not file.paths else files_sha256(file.paths) for file in files],
        "monolingual": [files_sha256(local), *sorted(hub)] if hub else files_sha256(local),
        "tests": {name: {k: s.sha256 for k, s in sets.items()} for name, sets in read_test_sets(config).items()},
        "recipe": {key: terms[key] for key in ("terms", "max_length", "language_embedding", "pooling")},
        "options": {name: value for name, value in values.items() if name in own and name != "monolingual"},
        "training": {
            name: str(value)
            for name, value in values.items()
            if name not in own and str(value) != str(getattr(plain, name))
        },
    }


def check_columns(grid: Grid, dataset: Any) -> None:
    """Refuse a corpus without the columns that a cell reads, except those that training adds.

    Raises:
        ValueError: A column is missing or empty.
    """
    for cell in grid.cells:
        for column in sorted(cell.recipe.columns - {"alignment", "alignment_scores", "segmenter", "monolingual"}):
            if column not in dataset.column_names or not any(dataset[column]):
                how = " Add it with scripts/back_translate.py." if column.endswith("_bt") else ""
                raise ValueError(
                    f"Cell {cell.label!r} requires the column {column!r}, which is missing or empty in the corpus.{how}"
                )


def trained(
    config: RunConfig, work: Path, links: Path, inputs: Inputs | None = None
) -> tuple[Any, Sets, dict[str, Any]]:
    """Train without a release, resuming from checkpoints in ``work``. All cells share the word links in ``links``.

    Returns the encoder, or one encoder per language; the test sets; facts about the run.
    """
    started = time.perf_counter()
    links.mkdir(parents=True, exist_ok=True)
    config = replace(config, output_dir=str(work), retention=["none"], resume_from_checkpoint="true")
    run = TrainingRun(config, inputs=inputs or Inputs())
    with run.claim_output():
        for path in links.glob("alignment-*.parquet"):
            (work / path.name).unlink(missing_ok=True)
            (work / path.name).symlink_to(path.resolve())
        run.load_encoder()
        run.load_test_sets()
        run.load_corpus()
        run.build()
        facts = run.train()
    for path in work.glob("alignment-*.parquet"):
        if not path.is_symlink():
            shutil.move(path, links / path.name)
    facts["seconds"] = round(time.perf_counter() - started, 2)
    facts["languages"] = facts.pop("corpus")["languages"]
    embedding = run.language_embedding
    return run.encoder if embedding is None else fold_languages(run.encoder, embedding), run.tests.trained, facts


def measured(model: Any, tests: Sets, name: str) -> dict[str, Any]:
    """Return the retrieval scores on every test set."""
    return {test: evaluate_retrieval(model, sets, name=name).to_dict() for test, sets in tests.items()}


def estimate(runs: Sequence[Run], evaluation: float, folder: Path, links: Path) -> float:
    """Return the expected seconds per run, from finished runs or from a few steps of the first and the last cell."""
    if done := [kept["seconds"] for run in runs if (kept := run.kept())]:
        return statistics.mean(done)
    times = []
    for run in (runs[0], runs[-1]):
        work = folder / "trial"
        shutil.rmtree(work, ignore_errors=True)
        facts = trained(replace(run.config, max_steps=TRIAL), work, links)[2]
        shutil.rmtree(work, ignore_errors=True)
        times.append((facts["seconds"] - facts["training_seconds"], facts["training_seconds"] / TRIAL))
    beside, step = min(other for other, _ in times), statistics.mean(step for _, step in times)
    return beside + step * runs[0].config.max_steps + evaluation


def sampling_error(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> float:
    """Return half the width of the 95 % interval of a mean difference over languages, in points, due to the test sentences.

    The arguments are the results by language of two cells, one for each seed, with the hits of both directions.
    """
    directions = [key for key in SCORES if key != "mean"]

    def hits(runs: Sequence[Mapping[str, Any]], language: str) -> np.ndarray:
        found = [list(map(int, run[language][direction]["hits"])) for run in runs for direction in directions]
        return np.mean(found, axis=0)

    errors = []
    for language in old[0]:
        moved = 100 * (hits(new, language) - hits(old, language))
        errors.append(moved.std(ddof=1) / len(moved) ** 0.5)
    return float(1.96 * np.linalg.norm(errors) / len(errors))


def summary(grid: Grid, runs: Sequence[Run], untrained: Mapping[str, Any], shape: Mapping[str, int]) -> dict[str, Any]:
    """Return means over seeds and differences to the first cell for every cell, test set and language."""
    kept = {cell.label: [k for run in runs if run.cell == cell and (k := run.kept())] for cell in grid.cells}
    first, facts = kept[grid.cells[0].label], kept[grid.cells[0].label][0]["facts"]
    pairs = facts["languages"]
    result: dict[str, Any] = {
        "ablation": grid.name,
        "seeds": [run["seed"] for run in first],
        "steps": facts["steps"],
        "batch_size": facts["batch_size"],
        "model": Path(facts["model"]).name,
        "frozen_word_embeddings": facts["frozen_word_embeddings"],
        "pairs": pairs,
        "hardware": facts["hardware"],
        "versions": facts["versions"],
        "untrained": {test: measure["average"]["mean"]["accuracy"] for test, measure in untrained.items()},
        "cells": [],
    }
    for cell in grid.cells:
        tests: dict[str, Any] = {}
        for test in untrained:
            results = [run["results"][test] for run in kept[cell.label]]
            baseline = [run["results"][test] for run in first]
            scores = {key: interval([r["average"][key]["accuracy"] for r in results]) for key in SCORES}
            for group in grid.groups:
                if group in results[0]["groups"]:
                    scores[group] = interval([r["groups"][group]["mean"]["accuracy"] for r in results])
            languages = sorted(results[0]["languages"], key=lambda language: (pairs.get(language, 0), language))
            tests[test] = {
                "scores": scores,
                "difference": difference(
                    *([r["average"]["mean"]["accuracy"] for r in side] for side in (baseline, results)),
                    sampling_error(*([r["languages"] for r in side] for side in (baseline, results))),
                ),
                "gains": {
                    language: difference(
                        *(
                            [r["languages"][language]["mean"]["accuracy"] for r in side]
                            for side in (baseline, results)
                        ),
                        sampling_error(
                            *([{language: r["languages"][language]} for r in side] for side in (baseline, results))
                        ),
                    )
                    for language in languages
                },
            }
        milliseconds = [
            1000 * run["facts"]["training_seconds"] / run["facts"]["steps"] / run["facts"]["batch_size"]
            for run in kept[cell.label]
        ]
        row = {"label": cell.label, "x": cell.x, "published": list(cell.published), "tests": tests}
        row["ms_per_pair"] = interval(milliseconds)
        if cell.costs:
            row["gflop"] = operations(cell.costs, shape)
        result["cells"].append(row)
    return result


def operations(recipe: str, shape: Mapping[str, int]) -> dict[str, float]:
    """Return the forward GFLOP of a pair at full length, for the paper's encoder and for the trained one."""
    sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
    costs: Any = import_module("costs")
    sys.path.pop(0)
    lengths = {"mBERT, 32 pieces": 32, f"this encoder, {shape['length']} pieces": shape["length"]}
    ours = costs.Encoder(shape["layers"], shape["hidden"], shape["vocabulary"])
    encoders = (costs.ENCODERS["mBERT"], ours)
    return {
        what: round(costs.step_flops(of, recipe, length, length, length) / 1e9, 3)
        for (what, length), of in zip(lengths.items(), encoders, strict=True)
    }


def shown(value: Mapping[str, Any], form: str = ".1f") -> str:
    """Format a mean with its interval.

    >>> shown({"mean": 70.04, "half": 0.52}), shown({"mean": 1.0, "half": None}, "+.1f")
    ('70.0 ± 0.5', '+1.0')
    """
    half = "" if value["half"] is None else f" ± {value['half']:{form.lstrip('+')}}"
    return f"{value['mean']:{form}}{half}"


def table(grid: Grid, result: Mapping[str, Any]) -> str:
    """Format the results as Markdown: cells, then gains per language, for every test set."""
    total = sum(result["pairs"].values())
    frozen = ", word embeddings frozen" if result["frozen_word_embeddings"] else ""
    lines = [
        f"`{result['model']}`{frozen}; {result['steps']} steps of {result['batch_size']} pairs, from {total:,} pairs in "
        f"{counted(len(result['pairs']), 'language')}; {counted(len(result['seeds']), 'seed')}; "
        f"{machine_words(result['hardware'])}. "
        "Means over the seeds ± 95 % interval (Student's t; for differences, over the test sentences too); a difference "
        "smaller than its interval is a tie.",
    ]
    columns = [f"*paper: {column}*" for column in grid.published.get("columns", ())]
    for test, before in result["untrained"].items():
        cells = [(cell, cell["tests"][test]) for cell in result["cells"]]
        scores = list(cells[0][1]["scores"])
        heads = [SCORES.get(key, f"the {key}") for key in scores]
        measures = [[shown(tested["scores"][key]) for key in scores] for _, tested in cells]
        if "gflop" in cells[0][0]:
            heads = [f"GFLOP, {what}" for what in cells[0][0]["gflop"]] + ["ms per pair", "mean"]
            measures = [
                [*(f"{value:.3g}" for value in cell["gflop"].values()), shown(cell["ms_per_pair"], ".2f"), m[2]]
                for (cell, _), m in zip(cells, measures, strict=True)
            ]
        first = result["cells"][0]["label"]
        lines += ["", f"**{test}**: retrieval, % correct; the encoder before training: {before:.1f}", ""]
        rows = []
        for (cell, tested), measure in zip(cells, measures, strict=True):
            moved = tested["difference"]
            against = ["", ""] if cell["label"] == first else [shown(moved, "+.1f"), moved["verdict"]]
            rows.append([cell["label"], *measure, *against, *cell["published"]])
        lines += markdown(["", *heads, f"mean − {first}", "", *columns], f"l{'r' * (len(heads) + 1)}lr", rows)
        languages = cells[0][1]["gains"]
        if len(languages) > 1:
            others = [cell["label"] for cell in result["cells"][1:]]
            lines += ["", f"Gain over {first}, by language, smallest corpora first:", ""]
            rows = []
            for language in languages:
                gains = [tested["gains"][language] for _, tested in cells[1:]]
                marked = [shown(gain, "+.1f") + " *" * (gain["verdict"] not in ("tie", "one seed")) for gain in gains]
                rows.append([language, f"{result['pairs'].get(language, 0):,}", *marked])
            lines += markdown(["", "pairs", *others], "lr", rows)
            if any(line.endswith(" * |") or " * | " in line for line in lines):
                lines += ["", "\\* larger than its interval"]
    if columns:
        lines += ["", f"The paper's numbers are not directly comparable: {grid.published['scale']}."]
    return "\n".join(lines) + "\n"


def draw(grid: Grid, result: Mapping[str, Any], folder: Path, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Plot the figure of a grid with an axis and the gains per language."""
    matplotlib.rcParams["svg.hashsalt"] = grid.name
    cells = result["cells"]
    figures = {}
    if grid.axis:
        figures[grid.name] = figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        for test in result["untrained"]:
            scores = [cell["tests"][test]["scores"]["mean"] for cell in cells]
            axes.errorbar(
                [cell["x"] for cell in cells],
                [score["mean"] for score in scores],
                yerr=[score["half"] or 0 for score in scores],
                marker="o",
                capsize=4,
                label=test,
            )
        axes.set_xticks([cell["x"] for cell in cells])
        axes.set(xlabel=grid.axis, ylabel="retrieval, mean of both directions, %", title=grid.title)
        axes.legend(frameon=False)
    for test in result["untrained"]:
        languages = list(cells[0]["tests"][test]["gains"])
        if len(languages) < 2:
            continue
        name = f"{grid.name}-gains" + (f"-{test}" if len(result["untrained"]) > 1 else "")
        figures[name] = figure = Figure(figsize=(max(7, 0.5 * len(languages) + 4), 4), layout="constrained")
        axes = figure.subplots()
        axes.axhline(0, color="black", linewidth=0.8)
        for i, cell in enumerate(cells[1:]):
            gains = [cell["tests"][test]["gains"][language] for language in languages]
            axes.errorbar(
                [at + 0.6 * ((i + 0.5) / len(cells[1:]) - 0.5) for at in range(len(languages))],
                [gain["mean"] for gain in gains],
                yerr=[gain["half"] or 0 for gain in gains],
                fmt="o",
                capsize=2,
                label=cell["label"],
            )
        axes.set_xticks(range(len(languages)), [f"{x}\n{result['pairs'].get(x, 0):,}" for x in languages])
        axes.set(xlabel="language, and its pairs in the corpus", ylabel=f"gain over {cells[0]['label']}, points")
        axes.set_title(f"{grid.title}, {test}")
        figure.legend(loc="outside right upper", frameon=False)
    paths = []
    for name, figure in figures.items():
        for suffix in formats:
            paths.append(folder / f"{name}.{suffix}")
            figure.savefig(paths[-1], dpi=150, metadata={"Date": None} if suffix == "svg" else None)
    return paths


def keep(grid: Grid, result: Mapping[str, Any], command: str, page: Path = PAGE, kept: Path = KEPT) -> None:
    """Store results in the repository, and write the page."""
    write_json(kept / f"{grid.name}.json", {**result, "command": command})
    write_page(kept, page)


def write_page(kept: Path, page: Path) -> None:
    """Write a section for each grid with stored results, and draw their plots."""
    folder = page.parent / "ablations"
    folder.mkdir(parents=True, exist_ok=True)
    sections = []
    for path in sorted(kept.glob("*.json")):
        grid, result = load_grid(path.stem), read_json(path)
        plots = draw(grid, result, folder, formats=["svg"])
        pictures = "".join(f"\n![{grid.title}: {plot.stem}](ablations/{plot.name})\n" for plot in plots)
        text = f"{grid.paper}. {grid.varies}\n\n{table(grid, result)}{pictures}\n`{result['command']}`"
        sections.append(f"## {grid.name}: {grid.title}\n\n{text}")
    fill(page, {"ablations": "\n\n".join(sections)})


def covers(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the seeds and steps of results."""
    return {"seeds": set(result["seeds"]), "steps": result["steps"]}


def shape_of(model: SentenceTransformer, length: int) -> dict[str, int]:
    """Return the dimensions that determine the costs of an encoder."""
    config = model[0].auto_model.config
    layers, hidden, vocabulary = config.num_hidden_layers, config.hidden_size, config.vocab_size
    return {"layers": layers, "hidden": hidden, "vocabulary": vocabulary, "length": length}


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Parse the command line and run a grid; return the exit status."""
    if list(argv) == ["--write"]:
        write_page(KEPT, PAGE)
        return 0
    if not argv or argv[0].startswith("-"):
        HfArgumentParser(Options, usage="python scripts/ablations.py NAME [OPTIONS] | --write").print_help()
        print(f"\nAblations: {', '.join(sorted(path.stem for path in GRIDS.glob('*.yaml')))}")
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    run_grid(argv[0], argv[1:])
    return 0


def run_grid(name: str, argv: Sequence[str]) -> dict[str, Any]:
    """Train the missing runs of a grid and write its results.

    Raises:
        ValueError: A cell cannot be trained with these options or on this corpus.
        FileNotFoundError: A text or model does not exist.
    """
    options, given, own = parsed(argv)
    if options.keep:
        refuse_less(KEPT / f"{name}.json", covers, covers(vars(options)))
    grid = load_grid(name, settings=own, monolingual=bool(given.get("monolingual")))
    configs = configurations(grid, options, given)
    settings = [settings_of(config) for config in configs]
    prepare_process()
    folder, links = Path(options.output) / grid.name, Path(options.output) / "alignment"
    config = configs[0]
    run = TrainingRun(config)
    run.load_encoder()
    identity = model_hash(run.encoder)
    runs = plan(grid, options, configs, [[identity, decisive] for decisive in settings])
    dataset = read_bitext(config, run.encoder, run.arguments).dataset
    assert isinstance(dataset, Dataset)
    check_columns(grid, dataset)
    started = time.perf_counter()
    untrained = measured(run.encoder, read_test_sets(config), options.model)
    evaluation = time.perf_counter() - started
    shape = shape_of(run.encoder, config.max_length or grid.cells[0].recipe.max_length)
    del run, dataset
    missing = [run for run in runs if run.kept() is None]
    print(
        f"{grid.name}: {len(grid.cells)} cells × {len(options.seeds)} seeds, {len(runs) - len(missing)} already done."
    )
    if missing:
        seconds = estimate(runs, evaluation, folder, links)
        print(f"Estimate: {seconds:.0f} s each, {len(missing) * seconds / 60:.0f} minutes in total.", flush=True)
    logging.getLogger("metaphrase").setLevel(logging.WARNING)
    began = time.perf_counter()
    for at, run in enumerate(missing, 1):
        if run.kept() is not None:  # by another program meanwhile
            continue
        started = time.perf_counter()
        work = folder / "work" / run.path.stem
        model, tests, facts = trained(run.config, work, links)
        trained_in = time.perf_counter() - started
        results = measured(model, tests, run.cell.label)
        seconds = round(time.perf_counter() - started, 2)
        content = {"ablation": grid.name, "cell": run.cell.label, "seed": run.seed, "seconds": seconds}
        content["evaluation_seconds"] = round(seconds - trained_in, 2)
        write_json(run.path, {**content, "facts": facts, "results": results})
        shutil.rmtree(work, ignore_errors=True)
        score = _mean(results)
        left = (time.perf_counter() - began) / at * (len(missing) - at) / 60
        print(
            f"{at}/{len(missing)} {run.cell.label}, seed {run.seed}: {score:.1f} % (before {_mean(untrained):.1f}) in "
            f"{seconds:.0f} s; {left:.0f} minutes left",
            flush=True,
        )
    result = summary(grid, runs, untrained, shape)
    write_json(folder / "results.json", result)
    text = table(grid, result)
    (folder / "table.md").write_text(text, encoding="utf-8")
    plots = draw(grid, result, folder)
    print(f"\n{text}\n{folder / 'results.json'}" + "".join(f"\n{path}" for path in plots))
    if options.keep:
        keep(
            grid, result, re.sub(r"(?<=\s)/\S*/(?=\S)", "", f"python scripts/ablations.py {shlex.join([name, *argv])}")
        )
    return result


def _mean(results: Mapping[str, Any]) -> float:
    return statistics.fmean(result["average"]["mean"]["accuracy"] for result in results.values())


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main(sys.argv[1:]))
