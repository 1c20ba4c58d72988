"""The before/after report of a run: an HTML page to look at, JSON to compute with, a table for the console."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from rich import box
from rich.table import Table
from rich.text import Text

from metaphrase.evaluation.compare import compare
from metaphrase.evaluation.retrieval import DIRECTIONS, TATOEBA_GROUPS
from metaphrase.exceptions import DataMismatchError
from metaphrase.io.files import replace_text, write_json
from metaphrase.publishing.plots import MARKERS, SIDES, learning_curves

TEMPLATE = Path(__file__).with_name("report_template.html")

_STYLES = {"better": "bold green", "tie": "dim", "worse": "bold red"}

Results = Mapping[str, Any]


def usage_lines(release: str | Path) -> str:
    """Eight lines of Python that load a release and match Swahili sentences to English ones.

    >>> len(usage_lines("runs/demo").splitlines())
    8
    """
    return f"""\
from sentence_transformers import SentenceTransformer

model = SentenceTransformer({str(release)!r})
swahili = ["Habari ya asubuhi.", "Ninasoma kitabu.", "Mvua inanyesha leo."]
english = ["It is raining today.", "Good morning.", "I am reading a book."]
similarity = model.similarity(model.encode(swahili), model.encode(english))
for sentence, row in zip(swahili, similarity):
    print(sentence, "→", english[row.argmax()])"""


def render_table(after: Results, before: Results | None = None, comparison: Results | None = None) -> Table:
    """A result of `evaluate_retrieval` for the console: a row per language, both directions with their intervals.

    Args:
        after: The result.
        before: The baseline's result over the same pairs; adds before → after, the difference and its verdict.
        comparison: Their `compare`; made here where ``before`` is given without it.
    """
    if before is not None and comparison is None:
        comparison = compare(before, after)
    table = Table(
        title=Text(str(after["model"]), style="bold"),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.caption = "Accuracy in percent and its 95 % bootstrap interval."
    table.add_column("")
    for heading in ("pairs", "xx → en", "en → xx", "mean"):
        table.add_column(heading, justify="right", overflow="fold")
    if comparison is not None:
        table.caption += "\nVerdicts on the mean of both directions, Holm-corrected over the languages."
        table.add_column("difference", justify="right", overflow="fold")
        table.add_column("verdict")

    def add(label: str, pairs: int, new: Results, old: Results | None, tested: Results | None) -> None:
        cells = [_moved(new[key], old[key] if old else None) for key in (*DIRECTIONS, "mean")]
        if tested is not None:
            low, high = tested["interval"]
            cells.append(Text.assemble(f"{tested['difference']:+.1f}\n", (f"{low:+.1f}…{high:+.1f}", "dim")))
            cells.append(Text(tested["verdict"], style=_STYLES[tested["verdict"]]))
        table.add_row(Text(label), str(pairs), *cells)

    pairs = {language: result["n"] for language, result in after["languages"].items()}
    for language, result in after["languages"].items():
        old = before["languages"][language] if before else None
        add(language, pairs[language], result, old, comparison["languages"][language] if comparison else None)
    if len(pairs) > 1 and (before is None or before["languages"].keys() == pairs.keys()):
        table.add_section()
        for group, result in after["groups"].items():
            members = sum(pairs[language] for language in TATOEBA_GROUPS[group])
            add(f"the {group}", members, result, before["groups"][group] if before else None, None)
        old = before["average"] if before else None
        add("average", sum(pairs.values()), after["average"], old, comparison["pooled"] if comparison else None)
    return table


def write_report(
    output_dir: str | Path,
    *,
    title: str,
    before: Mapping[str, Results] | None,
    after: Mapping[str, Results],
    comparisons: Mapping[str, Results] | None = None,
    run: Mapping[str, Any] | None = None,
    descriptions: Mapping[str, str] | None = None,
    usage: str | None = None,
    analysis: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``report.json`` and a self-contained ``report.html``.

    Args:
        output_dir: Folder of the two files.
        title: Heading of the page.
        before: Results of `evaluate_retrieval` with the model as it was, per data set (``"demo test"``, ``"udhr"``);
            None for a report without a baseline.
        after: Results of the trained model, for the same data sets.
        comparisons: Their `compare`; made here if None.
        run: Facts of the run (command, seed, data, versions, hardware, seconds, …); ``log_history``, the trainer's
            log, becomes the learning curves.
        descriptions: A sentence about each data set.
        usage: Python that loads the release, from `usage_lines`.
        analysis: What :mod:`metaphrase.publishing.plots` computes: ``retention`` (per data set), ``tokens``, ``alignments``,
            ``margins``, ``errors``, ``cost``; each may be missing.

    Returns:
        Path of ``report.html``.

    Raises:
        ValueError: The two sides are not over the same data sets.
    """
    if before is not None and before.keys() != after.keys():
        raise DataMismatchError(
            f"A report needs the same data sets before and after, but got {sorted(before)} and {sorted(after)}."
        )
    if comparisons is None:
        comparisons = {name: compare(before[name], after[name]) for name in after} if before else {}
    run, descriptions, analysis = run or {}, descriptions or {}, analysis or {}
    folder = Path(output_dir)
    write_json(
        folder / "report.json",
        {
            "title": title,
            "before": before,
            "after": after,
            "comparisons": comparisons,
            "descriptions": descriptions,
            "run": run,
            "usage": usage,
            "analysis": analysis,
        },
    )
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=title,
        sections=[
            _section(
                name,
                descriptions.get(name, ""),
                before[name] if before else None,
                after[name],
                comparisons.get(name),
            )
            for name in after
        ],
        retention={
            name: {"models": {}, **one, "chart": _waterfall(one)}
            for name, one in analysis.get("retention", {}).items()
        },
        tokens=analysis.get("tokens"),
        maps=_maps(analysis["tokens"]) if analysis.get("tokens") else [],
        alignments=[_shaded(one) for one in analysis.get("alignments") or ()],
        margins=analysis.get("margins"),
        histograms=_histograms(analysis["margins"]) if analysis.get("margins") else [],
        errors=analysis.get("errors"),
        sides=SIDES if before else SIDES[1:],
        curves=_curves(run.get("log_history", ())),
        usage=usage,
        facts=_facts({key: value for key, value in run.items() if key != "log_history"}),
        cost=analysis.get("cost"),
    )
    return replace_text(folder / "report.html", page)


def _moved(new: Results, old: Results | None) -> Text:
    low, high = new["interval"]
    if old is None:
        return Text.assemble(f"{new['accuracy']:.1f} ", (f"[{low:.1f}–{high:.1f}]", "dim"))
    return Text.assemble(f"{old['accuracy']:.1f} → {new['accuracy']:.1f}\n", (f"{low:.1f}–{high:.1f}", "dim"))


def _section(
    name: str, description: str, before: Results | None, after: Results, comparison: Results | None
) -> dict[str, Any]:
    """One data set: rows of the table, geometry of the chart, the verdict in words."""
    measured = {"before": before, "after": after} if before is not None else {"after": after}
    rows: list[dict[str, Any]] = [
        {
            "language": language,
            "n": result["n"],
            **{side: one["languages"][language] for side, one in measured.items()},
            "test": comparison["languages"][language] if comparison else None,
        }
        for language, result in after["languages"].items()
    ]
    return {
        "name": name,
        "description": description,
        "sides": list(measured),
        "rows": rows,
        "pooled": comparison["pooled"] if comparison else None,
        "average": after["average"],
        "directions": [
            sum(row[side][direction]["accuracy"] for row in rows) / len(rows)
            for direction in (*DIRECTIONS, "mean")
            for side in measured
        ],
        "verdicts": {
            word: [row["language"] for row in rows if row["test"] and row["test"]["verdict"] == word]
            for word in ("better", "tie", "worse")
        },
        "chart": _dumbbells(rows, list(measured)),
        "settings": {side: describe_model(one) for side, one in measured.items()},
        "test": comparison["settings"] if comparison else None,
    }


def describe_model(results: Results) -> str:
    """Which model a result of `evaluate_retrieval` is of, and how it was used, in words."""
    settings = results["settings"]
    parts = [
        str(results["model"]),
        f"prompt “{settings['prompt']}”" if settings["prompt"] else "no prompt",
        *(f"{key.replace('_', ' ')} {settings[key]}" for key in ("pooling", "max_length") if settings.get(key)),
    ]
    return ", ".join(parts)


def _dumbbells(rows: Sequence[Mapping[str, Any]], sides: Sequence[str]) -> dict[str, Any]:
    """Geometry of before → after per language: the mean of both directions with its interval, best gain first."""
    left, right, row_height = 64, 900, 30
    intervals = [row[side]["mean"]["interval"] for row in rows for side in sides]
    low = 10 * int(min(interval[0] for interval in intervals) // 10)
    high = min(100, 10 * int(-(-max(interval[1] for interval in intervals) // 10)))
    low = min(low, high - 10)

    def x(value: float) -> float:
        return round(left + (right - left) * (value - low) / (high - low), 1)

    ordered = sorted(
        rows, key=lambda row: -(row["test"] or {"difference": row["after"]["mean"]["accuracy"]})["difference"]
    )
    return {
        "width": right + 20,
        "height": row_height * len(ordered) + 44,
        "ticks": [{"x": x(value), "label": value} for value in range(low, high + 1, 10)],
        "rows": [
            {
                "language": row["language"],
                "test": row["test"],
                "y": 30 + row_height * i,
                **{
                    side: {
                        "x": x(row[side]["mean"]["accuracy"]),
                        "from": x(row[side]["mean"]["interval"][0]),
                        "to": x(row[side]["mean"]["interval"][1]),
                        "accuracy": row[side]["mean"]["accuracy"],
                    }
                    for side in sides
                },
            }
            for i, row in enumerate(ordered)
        ],
    }


def _waterfall(one: Mapping[str, Any]) -> dict[str, Any]:
    """Geometry of retention: a column for each language, the largest loss first, and the pooled difference."""
    rows, pooled, limit = one["languages"], one["pooled"], one["limit"]
    ends = [end for row in (*rows, pooled) for end in row["interval"]]
    low, high = min(*ends, -2 * limit), max(*ends, limit)
    step = next(step for step in (1, 2, 5, 10, 20, 50) if (high - low) / step <= 8)
    low, high = step * int(low // step), step * int(-(-high // step))
    left, top, bottom, column = 46, 14, 330, max(10, min(34, 900 // len(rows)))

    def y(points: float) -> float:
        return round(bottom - (bottom - top) * (points - low) / (high - low), 1)

    def place(row: Mapping[str, Any], x: float) -> dict[str, Any]:
        return {**row, "x": x, "y": y(row["difference"]), "from": y(row["interval"][0]), "to": y(row["interval"][1])}

    first = left + 48
    return {
        "left": left,
        "right": first + column * len(rows),
        "width": max(first + column * len(rows) + 8, 420),
        "height": bottom + 44,
        "bottom": bottom,
        "ticks": [{"y": y(value), "label": f"{value:+d}" if value else "0"} for value in range(low, high + 1, step)],
        "upright": len(rows) > 24,
        "zero": y(0),
        "red": y(-limit),
        "pooled": place(pooled, left + 20),
        "rows": [place(row, first + column * at + column / 2) for at, row in enumerate(rows)],
    }


#: Outlines of the markers, around the origin.
_SHAPES = {
    "o": "m-3.2 0a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0-6.4 0",
    "s": "m-2.8-2.8h5.6v5.6h-5.6z",
    "^": "m0-3.8l3.6 6.4h-7.2z",
    "D": "m0-4l3.6 4l-3.6 4l-3.6-4z",
    "v": "m0 3.8l3.6-6.4h-7.2z",
    "p": "m0-3.8l3.6 2.6l-1.4 4.3h-4.4l-1.4-4.3z",
    "*": "m0-4.4l1.2 3.2h3.2l-2.6 2l1 3.4l-2.8-2.1l-2.8 2.1l1-3.4l-2.6-2h3.2z",
    "X": "m-3.4-2l1.4-1.4l2 2l2-2l1.4 1.4l-2 2l2 2l-1.4 1.4l-2-2l-2 2l-1.4-1.4l2-2z",
}


def _maps(tokens: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Panels of the word maps: each projection, before and after."""
    size, edge = 400, 12
    numbers = {language: at for at, language in enumerate(tokens["languages"])}
    panels = []
    for kind, label in (("pca", "PCA"), ("tsne", "t-SNE")):
        for side in SIDES:
            points = tokens.get(side, {}).get(kind)
            if not points:
                continue
            columns = list(zip(*points, strict=True))
            centre = [(min(column) + max(column)) / 2 for column in columns]
            spread = max(max(column) - min(column) for column in columns) or 1.0
            scale = (size - 2 * edge) / spread
            panels.append(
                {
                    "title": f"{label}, {side}",
                    "size": size,
                    "marks": [
                        {
                            "x": round(size / 2 + scale * (x - centre[0]), 1),
                            "y": round(size / 2 - scale * (y - centre[1]), 1),
                            "language": language,
                            "marker": numbers[language] % len(MARKERS),
                            "shape": _SHAPES[MARKERS[numbers[language] % len(MARKERS)]],
                            "word": word,
                        }
                        for (x, y), language, word in zip(points, tokens["language_of"], tokens["words"], strict=True)
                    ],
                }
            )
    return panels


def _shaded(one: Mapping[str, Any]) -> dict[str, Any]:
    """An alignment matrix with the shade of each cell, from the smallest to the largest cosine of both sides."""
    sides = [side for side in SIDES if side in one]
    values = [value for side in sides for row in one[side]["cosine"] for value in row]
    low, spread = min(values), (max(values) - min(values)) or 1.0
    return {
        **one,
        "sides": {
            side: {
                "target": one[side]["target"],
                "rows": [
                    {
                        "word": word,
                        "cells": [
                            {
                                "cosine": value,
                                "shade": round(70 * (value - low) / spread),
                                "linked": [s, t] in one[side]["links"],
                            }
                            for t, value in enumerate(one[side]["cosine"][s])
                        ],
                    }
                    for s, word in enumerate(one[side]["source"])
                ],
            }
            for side in sides
        },
    }


def _histograms(margins: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Geometry of the margins of translations (filled) and nearest others (outlined), before and after."""
    left, right, top, bottom = 40, 420, 16, 170

    def panel(side: str, one: Mapping[str, Any]) -> dict[str, Any]:
        edges, most = one["edges"], max(*one["translations"], *one["others"], 1)

        def x(value: float) -> float:
            return round(left + (right - left) * (value - edges[0]) / (edges[-1] - edges[0]), 1)

        def outline(counts: Sequence[int]) -> str:
            steps = [f"M{x(edges[0])} {bottom}"]
            for count, start, end in zip(counts, edges[:-1], edges[1:], strict=True):
                height = round(bottom - (bottom - top) * count / most, 1)
                steps.append(f"L{x(start)} {height}L{x(end)} {height}")
            return "".join(steps) + f"L{x(edges[-1])} {bottom}"

        marks = [edges[0] + (edges[-1] - edges[0]) * at / 4 for at in range(5)]
        return {
            "side": side,
            "translations": outline(one["translations"]),
            "others": outline(one["others"]),
            "most": most,
            "ticks": [{"x": x(value), "label": f"{value:.2f}"} for value in marks],
            "left": left,
            "right": right,
            "top": top,
            "bottom": bottom,
        }

    return [panel(side, margins[side]) for side in SIDES if side in margins]


def _curves(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A small chart for the loss, each objective and each accuracy measured during training."""
    return [_curve(name, points) for name, points in learning_curves(history).items()]


def _curve(name: str, points: Sequence[tuple[float, float]]) -> dict[str, Any]:
    left, right, top, bottom = 56, 330, 14, 120
    steps, values = zip(*points, strict=True)
    low, high = min(values), max(values)
    spread = (high - low) or 1.0
    width = (max(steps) - min(steps)) or 1
    return {
        "name": name,
        "points": " ".join(
            f"{left + (right - left) * (step - min(steps)) / width:.1f},"
            f"{bottom - (bottom - top) * (value - low) / spread:.1f}"
            for step, value in points
        ),
        "low": f"{low:.3g}",
        "high": f"{high:.3g}",
        "last": f"{values[-1]:.3g}",
        "first_step": steps[0],
        "last_step": steps[-1],
        "left": left,
        "right": right,
        "top": top,
        "bottom": bottom,
    }


def _facts(run: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """The facts of a run as a label and lines of text each."""
    facts = []
    for key, value in run.items():
        if key == "seconds":
            facts.append(("time", [f"{value / 60:.1f} minutes"]))
        elif isinstance(value, Mapping):
            facts.append((key.replace("_", " "), [f"{name}: {_words(item)}" for name, item in value.items()]))
        elif isinstance(value, list | tuple):
            facts.append((key.replace("_", " "), [_words(item) for item in value]))
        else:
            facts.append((key.replace("_", " "), [str(value)]))
    return facts


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return " · ".join(f"{key} {_words(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_words, value))
    return str(value)
