"""The before/after report of a run: an HTML page, JSON, and a table for the console."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from rich import box
from rich.table import Table
from rich.text import Text

from metaphrase.evaluation.compare import compare
from metaphrase.evaluation.retrieval import DIRECTIONS, TATOEBA_GROUPS
from metaphrase.exceptions import DataMismatchError
from metaphrase.io.files import replace_text, write_json
from metaphrase.publishing.analysis import SIDES
from metaphrase.publishing.plots import COLOURS, charts, svg

TEMPLATE = Path(__file__).with_name("report_template.html")

_STYLES = {"better": "bold green", "tie": "dim", "worse": "bold red"}

Results = Mapping[str, Any]


def usage_lines(release: str | Path) -> str:
    """Return eight lines of Python that load a release and match Swahili sentences with English ones.

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
    """Format a result of `evaluate_retrieval` for the console: a row per language, both directions with their intervals.

    Args:
        after: The result.
        before: The baseline's result on the same pairs; adds before → after, the difference and its verdict.
        comparison: Result of `compare`; computed if ``before`` is given without it.
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
        title: Title of the page.
        before: Results of `evaluate_retrieval` with the baseline, per data set (``"demo test"``, ``"udhr"``); None for a
            report without a baseline.
        after: Results of the trained model, for the same data sets.
        comparisons: Results of `compare` per data set; computed if None.
        run: Facts of the run (command, seed, data, versions, hardware, seconds, …). ``log_history``, the trainer's log,
            is drawn as learning curves.
        descriptions: A sentence per data set.
        usage: Python code that loads the release, as `usage_lines` returns it.
        analysis: Results of :mod:`metaphrase.publishing.analysis`: ``retention`` (per data set), ``tokens``,
            ``alignments``, ``margins``, ``errors``, ``cost``; all are optional.

    Returns:
        Path of ``report.html``.

    Raises:
        ValueError: Data sets before and after differ.
    """
    if before is not None and before.keys() != after.keys():
        raise DataMismatchError(
            f"A report requires the same data sets before and after, but got {sorted(before)} and {sorted(after)}. "
            "Measure both models on the same data sets."
        )
    if comparisons is None:
        comparisons = {name: compare(before[name], after[name]) for name in after} if before else {}
    report: dict[str, Any] = {
        "title": title,
        "before": before,
        "after": after,
        "comparisons": comparisons,
        "descriptions": descriptions or {},
        "run": run or {},
        "usage": usage,
        "analysis": analysis or {},
    }
    folder = Path(output_dir)
    write_json(folder / "report.json", report)
    return replace_text(folder / "report.html", _page(report))


def _page(report: Mapping[str, Any]) -> str:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    analysis, run, before = report["analysis"], report["run"], report["before"]
    drawn = {
        name: chart for name, chart in charts(report).items() if name != "alignments"
    }  # the page has tables of them
    return environment.from_string(
        TEMPLATE.read_text(encoding="utf-8")
    ).render(
        title=report["title"],
        colours=COLOURS,
        charts={name: Markup(svg(name, chart)) for name, chart in drawn.items()},  # matplotlib escapes text
        sections=[
            _section(
                name,
                report["descriptions"].get(name, ""),
                before[name] if before else None,
                after,
                report["comparisons"].get(name),
            )
            for name, after in report["after"].items()
        ],
        retention={name: {"models": {}, **one} for name, one in analysis.get("retention", {}).items()},
        tokens=analysis.get("tokens"),
        alignments=[_shaded(one) for one in analysis.get("alignments") or ()],
        margins=analysis.get("margins"),
        errors=analysis.get("errors"),
        sides=SIDES if before else SIDES[1:],
        usage=report["usage"],
        facts=_facts({key: value for key, value in run.items() if key != "log_history"}),
        cost=analysis.get("cost"),
    )


def _moved(new: Results, old: Results | None) -> Text:
    low, high = new["interval"]
    if old is None:
        return Text.assemble(f"{new['accuracy']:.1f} ", (f"[{low:.1f}–{high:.1f}]", "dim"))
    return Text.assemble(f"{old['accuracy']:.1f} → {new['accuracy']:.1f}\n", (f"{low:.1f}–{high:.1f}", "dim"))


def _section(
    name: str, description: str, before: Results | None, after: Results, comparison: Results | None
) -> dict[str, Any]:
    """Content of a data set's section: rows of the table, verdicts, settings."""
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
            verdict: [row["language"] for row in rows if row["test"] and row["test"]["verdict"] == verdict]
            for verdict in ("better", "tie", "worse")
        },
        "settings": {side: describe_model(one) for side, one in measured.items()},
        "test": comparison["settings"] if comparison else None,
    }


def describe_model(results: Results) -> str:
    """Describe the model of an `evaluate_retrieval` result and how it was used."""
    settings = results["settings"]
    parts = [
        str(results["model"]),
        f"prompt “{settings['prompt']}”" if settings["prompt"] else "no prompt",
        *(f"{key.replace('_', ' ')} {settings[key]}" for key in ("pooling", "max_length") if settings.get(key)),
    ]
    return ", ".join(parts)


def _shaded(one: Mapping[str, Any]) -> dict[str, Any]:
    """An alignment matrix with the shade of each cell, scaled from the smallest to the largest cosine of both sides."""
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


def _facts(run: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """The facts of a run: a label and lines of text each."""
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
