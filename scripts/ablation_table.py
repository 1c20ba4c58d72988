"""The results of scripts/ablations.py: means over seeds and differences with intervals, their tables and their plots."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from stored_results import machine_words, markdown

from metaphrase.evaluation.seeds import difference, interval
from metaphrase.io.counts import counted

if TYPE_CHECKING:
    from ablations import Grid, Run

#: Scores of a cell, and their names in tables.
SCORES = {"source_to_target": "xx→en", "target_to_source": "en→xx", "mean": "mean"}


def sampling_error(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> float:
    """Return half the width of the 95 % interval of a mean difference over languages, in points, due to the test sentences.

    The arguments are the results by language of two cells, one for each seed, with the hits of both directions.
    """
    directions = [key for key in SCORES if key != "mean"]

    def mean_hits(runs: Sequence[Mapping[str, Any]], language: str) -> np.ndarray:
        hits = [list(map(int, run[language][direction]["hits"])) for run in runs for direction in directions]
        return np.mean(hits, axis=0)

    errors = []
    for language in old[0]:
        difference_n = 100 * (mean_hits(new, language) - mean_hits(old, language))
        errors.append(difference_n.std(ddof=1) / len(difference_n) ** 0.5)
    return float(1.96 * np.linalg.norm(errors) / len(errors))


def summary(grid: Grid, runs: Sequence[Run], untrained: Mapping[str, Any], shape: Mapping[str, int]) -> dict[str, Any]:
    """Return means over seeds and differences to the first cell for every cell, test set and language."""
    results: dict[str, list[dict[str, Any]]] = {cell.label: [] for cell in grid.cells}
    for run in runs:
        if result := run.stored_result():
            results[run.cell.label].append(result)
    first = results[grid.cells[0].label]
    facts = first[0]["facts"]
    cells = []
    for cell in grid.cells:
        row = {
            "label": cell.label,
            "x": cell.x,
            "published": list(cell.published),
            "tests": {
                test: summarise_test(
                    grid,
                    [result["results"][test] for result in first],
                    [result["results"][test] for result in results[cell.label]],
                    facts["languages"],
                )
                for test in untrained
            },
            "ms_per_pair": interval([milliseconds_per_pair(result["facts"]) for result in results[cell.label]]),
        }
        if cell.costs:
            row["gflop"] = operations(cell.costs, shape)
        cells.append(row)
    return {
        "ablation": grid.name,
        "seeds": [result["seed"] for result in first],
        "steps": facts["steps"],
        "batch_size": facts["batch_size"],
        "model": Path(facts["model"]).name,
        "frozen_word_embeddings": facts["frozen_word_embeddings"],
        "pairs": facts["languages"],
        "hardware": facts["hardware"],
        "versions": facts["versions"],
        "untrained": {test: scores["average"]["mean"]["accuracy"] for test, scores in untrained.items()},
        "cells": cells,
    }


def summarise_test(
    grid: Grid, first: Sequence[Mapping[str, Any]], cell: Sequence[Mapping[str, Any]], pairs: Mapping[str, int]
) -> dict[str, Any]:
    """Return the scores of a cell on a test set, and its differences to the first cell.

    ``first`` and ``cell`` are the results of both cells, one for each seed. Languages are sorted by their training ``pairs``.
    """
    scores = {key: interval([seed["average"][key]["accuracy"] for seed in cell]) for key in SCORES}
    for group in grid.groups:
        if group in cell[0]["groups"]:
            scores[group] = interval([seed["groups"][group]["mean"]["accuracy"] for seed in cell])
    gains = {}
    for language in sorted(cell[0]["languages"], key=lambda language: (pairs.get(language, 0), language)):
        before, after = ([{language: seed["languages"][language]} for seed in seeds] for seeds in (first, cell))
        gains[language] = difference(
            [seed[language]["mean"]["accuracy"] for seed in before],
            [seed[language]["mean"]["accuracy"] for seed in after],
            sampling_error(before, after),
        )
    return {
        "scores": scores,
        "difference": difference(
            [seed["average"]["mean"]["accuracy"] for seed in first],
            [seed["average"]["mean"]["accuracy"] for seed in cell],
            sampling_error([seed["languages"] for seed in first], [seed["languages"] for seed in cell]),
        ),
        "gains": gains,
    }


def milliseconds_per_pair(facts: Mapping[str, Any]) -> float:
    """Return the training time of a pair."""
    return 1000 * facts["training_seconds"] / facts["steps"] / facts["batch_size"]


def operations(recipe: str, shape: Mapping[str, int]) -> dict[str, float]:
    """Return the forward GFLOP of a pair at full length, for the paper's encoder and for the trained one."""
    sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
    costs: Any = import_module("costs")
    sys.path.pop(0)
    encoders = {
        "mBERT, 32 pieces": (costs.ENCODERS["mBERT"], 32),
        f"this encoder, {shape['length']} pieces": (
            costs.Encoder(shape["layers"], shape["hidden"], shape["vocabulary"]),
            shape["length"],
        ),
    }
    return {
        name: round(costs.step_flops(encoder, recipe, length, length, length) / 1e9, 3)
        for name, (encoder, length) in encoders.items()
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
    frozen = ", word embeddings frozen" if result["frozen_word_embeddings"] else ""
    lines = [
        f"`{result['model']}`{frozen}; {result['steps']} steps of {result['batch_size']} pairs, from "
        f"{sum(result['pairs'].values()):,} pairs in {counted(len(result['pairs']), 'language')}; "
        f"{counted(len(result['seeds']), 'seed')}; {machine_words(result['hardware'])}. "
        "Means over the seeds ± 95 % interval (Student's t; for differences, over the test sentences too); a difference "
        "smaller than its interval is a tie.",
    ]
    for test, before in result["untrained"].items():
        lines += ["", f"**{test}**: retrieval, % correct; the encoder before training: {before:.1f}", ""]
        lines += cell_table(grid, result, test)
        lines += gain_table(result, test)
    if grid.published.get("columns"):
        lines += ["", f"The paper's numbers are not directly comparable: {grid.published['scale']}."]
    return "\n".join(lines) + "\n"


def cell_table(grid: Grid, result: Mapping[str, Any], test: str) -> list[str]:
    """Format scores or costs of each cell on a test set, its difference to the first cell, and the paper's numbers."""
    first = result["cells"][0]
    rows = []
    for cell in result["cells"]:
        scores = cell["tests"][test]["scores"]
        if "gflop" in cell:
            measures = {f"GFLOP, {encoder}": f"{value:.3g}" for encoder, value in cell["gflop"].items()}
            measures |= {"ms per pair": shown(cell["ms_per_pair"], ".2f"), "mean": shown(scores["mean"])}
        else:
            measures = {SCORES.get(key, f"the {key}"): shown(score) for key, score in scores.items()}
        gain = cell["tests"][test]["difference"]
        gain_cells = ["", ""] if cell is first else [shown(gain, "+.1f"), gain["verdict"]]
        rows.append([cell["label"], *measures.values(), *gain_cells, *cell["published"]])
    columns = [f"*paper: {column}*" for column in grid.published.get("columns", ())]
    heads = ["", *measures, f"mean − {first['label']}", "", *columns]
    return markdown(heads, f"l{'r' * (len(measures) + 1)}lr", rows)


def gain_table(result: Mapping[str, Any], test: str) -> list[str]:
    """Format the differences of each cell to the first one by language; empty if the test set has one language."""
    first, *others = result["cells"]
    languages = first["tests"][test]["gains"]
    if len(languages) < 2:
        return []
    rows, any_marked = [], False
    for language in languages:
        cells = []
        for cell in others:
            gain = cell["tests"][test]["gains"][language]
            is_marked = gain["verdict"] not in ("tie", "one seed")
            any_marked = any_marked or is_marked
            cells.append(shown(gain, "+.1f") + (" *" if is_marked else ""))
        rows.append([language, f"{result['pairs'].get(language, 0):,}", *cells])
    lines = ["", f"Gain over {first['label']}, by language, smallest corpora first:", ""]
    lines += markdown(["", "pairs", *(cell["label"] for cell in others)], "lr", rows)
    if any_marked:
        lines += ["", "\\* larger than its interval"]
    return lines


def draw(grid: Grid, result: Mapping[str, Any], folder: Path, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Plot the figure of a grid with an axis and the gains per language."""
    matplotlib.rcParams["svg.hashsalt"] = grid.name
    figures = {}
    if grid.axis:
        figures[grid.name] = score_figure(grid, result)
    for test in result["untrained"]:
        if len(result["cells"][0]["tests"][test]["gains"]) > 1:
            name = f"{grid.name}-gains"
            if len(result["untrained"]) > 1:
                name += f"-{test}"
            figures[name] = gain_figure(grid, result, test)
    paths = []
    for name, figure in figures.items():
        for suffix in formats:
            path = folder / f"{name}.{suffix}"
            figure.savefig(path, dpi=150, metadata={"Date": None} if suffix == "svg" else None)
            paths.append(path)
    return paths


def score_figure(grid: Grid, result: Mapping[str, Any]) -> Figure:
    """Draw the mean score of each cell over the grid's axis."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    positions = [cell["x"] for cell in result["cells"]]
    for test in result["untrained"]:
        scores = [cell["tests"][test]["scores"]["mean"] for cell in result["cells"]]
        axes.errorbar(
            positions,
            [score["mean"] for score in scores],
            yerr=[score["half"] or 0 for score in scores],
            marker="o",
            capsize=4,
            label=test,
        )
    axes.set_xticks(positions)
    axes.set(xlabel=grid.axis, ylabel="retrieval, mean of both directions, %", title=grid.title)
    axes.legend(frameon=False)
    return figure


def gain_figure(grid: Grid, result: Mapping[str, Any], test: str) -> Figure:
    """Draw the difference of each cell to the first one, by language."""
    first, *others = result["cells"]
    languages = list(first["tests"][test]["gains"])
    figure = Figure(figsize=(max(7, 0.5 * len(languages) + 4), 4), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0, color="black", linewidth=0.8)
    for number, cell in enumerate(others):
        gains = [cell["tests"][test]["gains"][language] for language in languages]
        axes.errorbar(
            [at + 0.6 * ((number + 0.5) / len(others) - 0.5) for at in range(len(languages))],
            [gain["mean"] for gain in gains],
            yerr=[gain["half"] or 0 for gain in gains],
            fmt="o",
            capsize=2,
            label=cell["label"],
        )
    labels = [f"{language}\n{result['pairs'].get(language, 0):,}" for language in languages]
    axes.set_xticks(range(len(languages)), labels)
    axes.set(xlabel="language, and its pairs in the corpus", ylabel=f"gain over {first['label']}, points")
    axes.set_title(f"{grid.title}, {test}")
    figure.legend(loc="outside right upper", frameon=False)
    return figure
