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
from pathlib import Path
from typing import Any

import yaml
from ablation_table import draw, summary, table
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from stored_results import fill, refuse_less, reports_errors, without_folders
from transformers import HfArgumentParser

from metaphrase.corpus.files import find_files
from metaphrase.corpus.hub import is_hub_name
from metaphrase.encoders.names import STARTER
from metaphrase.evaluation.retrieval import evaluate_retrieval
from metaphrase.evaluation.suites.parallel import Sets
from metaphrase.io.configuration import did_you_mean, option, read_yaml
from metaphrase.io.digests import files_sha256, json_digest, model_hash, text_digest
from metaphrase.io.environment import prepare_process
from metaphrase.io.files import DEMO, read_json, write_json
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

#: Options that do not affect a result, or only through the content of the files that they name.
NOT_DECISIVE = {
    *("output_dir", "resume_from_checkpoint", "run_name", "report_to", "disable_tqdm", "save_strategy", "save_steps"),
    *("model", "corpus", "test", "recipe", "retention", "retention_languages", "on_disk", "license", "data_license"),
    "seed",
}
#: Options of a run that are set by this program.
RESERVED = {"recipe", "output_dir", "max_steps", "seed", "resume_from_checkpoint", "streaming"}
#: Options of a run that change its release, which this program does not make.
OF_RELEASES = {"merge", "max_structure_loss", "debias", "keep_adapter", "push_to_hub"}
#: Default options of every cell.
DEFAULTS = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
#: Steps of the short run on which the estimate is based.
TRIAL = 3


@dataclass
class Options:
    """The program's options: encoder, data, steps, seeds and output."""

    model: str = option(STARTER, "Encoder: 'starter', a Hub id or a folder.")
    corpus: list[str] = option([str(DEMO)], "Bitext (default: the demo's).")
    test: list[str] = option([str(DEMO)], "Folders of test sets (default: the demo's).")
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

    def stored_result(self) -> dict[str, Any] | None:
        """Return the result if it is stored, else None."""
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
    if taken := sorted(given.keys() & RESERVED):
        raise ValueError(f"This program sets --{taken[0]} for every cell. Use --steps, --seeds and --output.")
    if taken := sorted(name for name in given.keys() & OF_RELEASES if given[name]):
        raise ValueError(f"Encoders are measured as they are trained, so --{taken[0]} has no effect here. Omit it.")
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
        recipe = folder / f"{cell.slug}-{text_digest(text)[:6]}.yaml"
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
            path = folder / f"{cell.slug}-seed{seed}-{json_digest([seed, decisive])[:12]}.json"
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
    run_options = {option.name for option in fields(RunOptions)}
    default = RunConfig(recipe="tr")
    values = {option.name: getattr(config, option.name) for option in fields(RunConfig) if option.init}
    # With dev sets, checkpoints determine when the encoder is measured, and so which one is the best.
    ignored = NOT_DECISIVE - ({"save_strategy", "save_steps"} if config.dev else set())
    values = {name: value for name, value in values.items() if name not in ignored}
    recipe_content = recipe.to_dict()
    hub = [name for name in config.monolingual if is_hub_name(name)]
    local = [path for path in config.monolingual if path not in hub]
    return {
        "corpus": [[file.name] if not file.paths else files_sha256(file.paths) for file in files],
        "monolingual": [files_sha256(local), *sorted(hub)] if hub else files_sha256(local),
        "tests": {
            name: {language: pairs.sha256 for language, pairs in by_language.items()}
            for name, by_language in read_test_sets(config).items()
        },
        "recipe": {key: recipe_content[key] for key in ("terms", "max_length", "language_embedding", "pooling")},
        "options": {name: value for name, value in values.items() if name in run_options and name != "monolingual"},
        "training": {
            name: str(value)
            for name, value in values.items()
            if name not in run_options and str(value) != str(getattr(default, name))
        },
    }


def check_columns(grid: Grid, dataset: Any) -> None:
    """Refuse a corpus without the columns that a cell reads, except those that training adds."""
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
    results = [run.stored_result() for run in runs]
    if seconds := [result["seconds"] for result in results if result]:
        return statistics.mean(seconds)
    preparation, step = [], []
    for run in (runs[0], runs[-1]):
        work = folder / "trial"
        shutil.rmtree(work, ignore_errors=True)
        facts = trained(replace(run.config, max_steps=TRIAL), work, links)[2]
        shutil.rmtree(work, ignore_errors=True)
        preparation.append(facts["seconds"] - facts["training_seconds"])
        step.append(facts["training_seconds"] / TRIAL)
    # The first run may have to align words; the others share its links.
    return min(preparation) + statistics.mean(step) * runs[0].config.max_steps + evaluation


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


def run_grid(name: str, argv: Sequence[str]) -> None:
    """Train the missing runs of a grid and write its results. Cells that cannot be trained are refused first."""
    options, given, objective_settings = parsed(argv)
    if options.keep:
        refuse_less(KEPT / f"{name}.json", covers, covers(vars(options)))
    grid = load_grid(name, settings=objective_settings, monolingual=bool(given.get("monolingual")))
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
    missing = [run for run in runs if run.stored_result() is None]
    print(
        f"{grid.name}: {len(grid.cells)} cells × {len(options.seeds)} seeds, {len(runs) - len(missing)} already done."
    )
    if missing:
        seconds = estimate(runs, evaluation, folder, links)
        print(f"Estimate: {seconds:.0f} s each, {len(missing) * seconds / 60:.0f} minutes in total.", flush=True)
    logging.getLogger("metaphrase").setLevel(logging.WARNING)
    started = time.perf_counter()
    for number, run in enumerate(missing, 1):
        if run.stored_result() is not None:  # by another program meanwhile
            continue
        score, seconds = execute(run, grid, folder, links)
        minutes_left = (time.perf_counter() - started) / number * (len(missing) - number) / 60
        print(
            f"{number}/{len(missing)} {run.cell.label}, seed {run.seed}: {score:.1f} % (before {_mean(untrained):.1f}) in "
            f"{seconds:.0f} s; {minutes_left:.0f} minutes left",
            flush=True,
        )
    result = summary(grid, runs, untrained, shape)
    write_json(folder / "results.json", result)
    text = table(grid, result)
    (folder / "table.md").write_text(text, encoding="utf-8")
    plots = draw(grid, result, folder)
    print(f"\n{text}\n{folder / 'results.json'}" + "".join(f"\n{path}" for path in plots))
    if options.keep:
        keep(grid, result, without_folders(f"python scripts/ablations.py {shlex.join([name, *argv])}"))


def execute(run: Run, grid: Grid, folder: Path, links: Path) -> tuple[float, float]:
    """Train and measure a run, and store its result; return its mean score and its duration in seconds."""
    started = time.perf_counter()
    work = folder / "work" / run.path.stem
    model, tests, facts = trained(run.config, work, links)
    training_seconds = time.perf_counter() - started
    results = measured(model, tests, run.cell.label)
    seconds = round(time.perf_counter() - started, 2)
    content = {
        "ablation": grid.name,
        "cell": run.cell.label,
        "seed": run.seed,
        "seconds": seconds,
        "evaluation_seconds": round(seconds - training_seconds, 2),
        "facts": facts,
        "results": results,
    }
    write_json(run.path, content)
    shutil.rmtree(work, ignore_errors=True)
    return _mean(results), seconds


def _mean(results: Mapping[str, Any]) -> float:
    return statistics.fmean(result["average"]["mean"]["accuracy"] for result in results.values())


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main(sys.argv[1:]))
