"""The before/after report of a run: an HTML page to look at, JSON to compute with, a table for the console."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from rich import box
from rich.table import Table
from rich.text import Text

from metaphrase.evaluation.retrieval import DIRECTIONS, TATOEBA_GROUPS, compare_retrieval

TEMPLATE = Path(__file__).with_name("report_template.html")

#: Scalars of the training log that are no objective's curve.
_NOT_CURVES = ("epoch", "step", "learning_rate", "grad_norm", "total_flos", "num_input_tokens_seen")
_STYLES = {"better": "bold green", "tie": "dim", "worse": "bold red"}

Results = Mapping[str, Any]


def write_json(path: str | Path, content: Any) -> Path:
    """Write JSON whole or not at all: a reader never sees half a file.

    Returns:
        The path.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return _replace(path, json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n")


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
        comparison: Their `compare_retrieval`; made here where ``before`` is given without it.
    """
    if before is not None and comparison is None:
        comparison = compare_retrieval(before, after)
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
    before: Mapping[str, Results],
    after: Mapping[str, Results],
    comparisons: Mapping[str, Results] | None = None,
    run: Mapping[str, Any] | None = None,
    descriptions: Mapping[str, str] | None = None,
    usage: str | None = None,
) -> Path:
    """Write ``report.json`` and a self-contained ``report.html``.

    Args:
        output_dir: Folder of the two files.
        title: Heading of the page.
        before: Results of `evaluate_retrieval` with the model as it was, per data set (``"demo test"``, ``"udhr"``).
        after: Results of the trained model, for the same data sets.
        comparisons: Their `compare_retrieval`; made here if None.
        run: Facts of the run (command, seed, data, versions, hardware, seconds, …); ``log_history``, the trainer's
            log, becomes the learning curves.
        descriptions: A sentence about each data set.
        usage: Python that loads the release, from `usage_lines`.

    Returns:
        Path of ``report.html``.

    Raises:
        ValueError: The two sides are not over the same data sets.
    """
    if before.keys() != after.keys():
        raise ValueError(
            f"A report needs the same data sets before and after, but got {sorted(before)} and {sorted(after)}."
        )
    if comparisons is None:
        comparisons = {name: compare_retrieval(before[name], after[name]) for name in after}
    run, descriptions = run or {}, descriptions or {}
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
        },
    )
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=title,
        sections=[
            _section(name, descriptions.get(name, ""), before[name], after[name], comparisons[name]) for name in after
        ],
        curves=_curves(run.get("log_history", ())),
        usage=usage,
        facts=_facts({key: value for key, value in run.items() if key != "log_history"}),
    )
    return _replace(folder / "report.html", page)


def _replace(path: Path, text: str) -> Path:
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
    return path


def _moved(new: Results, old: Results | None) -> Text:
    low, high = new["interval"]
    if old is None:
        return Text.assemble(f"{new['accuracy']:.1f} ", (f"[{low:.1f}–{high:.1f}]", "dim"))
    return Text.assemble(f"{old['accuracy']:.1f} → {new['accuracy']:.1f}\n", (f"{low:.1f}–{high:.1f}", "dim"))


def _section(name: str, description: str, before: Results, after: Results, comparison: Results) -> dict[str, Any]:
    """One data set: rows of the table, geometry of the chart, the verdict in words."""
    rows = [
        {
            "language": language,
            "n": result["n"],
            "before": before["languages"][language],
            "after": result,
            "test": comparison["languages"][language],
        }
        for language, result in after["languages"].items()
    ]
    verdicts = {
        word: [row["language"] for row in rows if row["test"]["verdict"] == word]
        for word in ("better", "tie", "worse")
    }
    return {
        "name": name,
        "description": description,
        "rows": rows,
        "pooled": comparison["pooled"],
        "directions": [
            sum(row[side][direction]["accuracy"] for row in rows) / len(rows)
            for direction in DIRECTIONS
            for side in ("before", "after")
        ],
        "verdicts": verdicts,
        "chart": _dumbbells(rows),
        "settings": {"before": _settings(before), "after": _settings(after), "test": comparison["settings"]},
    }


def _settings(results: Results) -> str:
    settings = results["settings"]
    parts = [
        str(results["model"]),
        f"prompt “{settings['prompt']}”" if settings["prompt"] else "no prompt",
        *(f"{key.replace('_', ' ')} {settings[key]}" for key in ("pooling", "max_length") if settings.get(key)),
    ]
    return ", ".join(parts)


def _dumbbells(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Geometry of before → after per language: the mean of both directions with its interval, best gain first."""
    left, right, row_height = 64, 900, 30
    intervals = [row[side]["mean"]["interval"] for row in rows for side in ("before", "after")]
    low = 10 * int(min(interval[0] for interval in intervals) // 10)
    high = min(100, 10 * int(-(-max(interval[1] for interval in intervals) // 10)))
    low = min(low, high - 10)

    def x(value: float) -> float:
        return round(left + (right - left) * (value - low) / (high - low), 1)

    ordered = sorted(rows, key=lambda row: -row["test"]["difference"])
    return {
        "width": right + 20,
        "height": row_height * len(ordered) + 44,
        "ticks": [{"x": x(value), "label": value} for value in range(low, high + 1, 10)],
        "rows": [
            {
                "language": row["language"],
                "verdict": row["test"]["verdict"],
                "difference": row["test"]["difference"],
                "y": 30 + row_height * i,
                **{
                    side: {
                        "x": x(row[side]["mean"]["accuracy"]),
                        "from": x(row[side]["mean"]["interval"][0]),
                        "to": x(row[side]["mean"]["interval"][1]),
                        "accuracy": row[side]["mean"]["accuracy"],
                    }
                    for side in ("before", "after")
                },
            }
            for i, row in enumerate(ordered)
        ],
    }


def _curves(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A small chart for the loss, each objective and each accuracy measured during training."""
    series: dict[str, list[tuple[float, float]]] = {}
    for entry in history:
        for key, value in entry.items():
            if isinstance(value, int | float) and "step" in entry and _is_curve(key):
                series.setdefault(key, []).append((entry["step"], value))
    return [_curve(name, points) for name, points in series.items() if len(points) > 1]


def _is_curve(key: str) -> bool:
    if key.startswith("eval_"):
        return key.endswith(("mean_accuracy", "eval_loss"))
    return key not in _NOT_CURVES and not key.startswith("train_")


def _curve(name: str, points: Sequence[tuple[float, float]]) -> dict[str, Any]:
    left, right, top, bottom = 56, 330, 14, 120
    steps, values = zip(*points, strict=True)
    finite = [value for value in values if abs(value) < float("inf")] or [0.0]
    low, high = min(finite), max(finite)
    spread = (high - low) or 1.0
    width = (max(steps) - min(steps)) or 1
    return {
        "name": name,
        "points": " ".join(
            f"{left + (right - left) * (step - min(steps)) / width:.1f},"
            f"{bottom - (bottom - top) * (value - low) / spread:.1f}"
            for step, value in points
            if abs(value) < float("inf")
        ),
        "low": f"{low:.3g}",
        "high": f"{high:.3g}",
        "last": f"{finite[-1]:.3g}",
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
