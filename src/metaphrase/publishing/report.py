"""The before/after report of a run: an HTML page, JSON, and a table for the console."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup
from rich.table import Table
from rich.text import Text

from metaphrase.corpus.identification import language_name
from metaphrase.evaluation.compare import ONE_RUN_NOTE, compare, verdict_shown
from metaphrase.evaluation.guards import AlphaCurve
from metaphrase.evaluation.retention import collapse_in_words
from metaphrase.evaluation.retrieval import DIRECTIONS, TATOEBA_GROUPS
from metaphrase.exceptions import DataMismatchError
from metaphrase.io.counts import counted
from metaphrase.io.files import replace_text, write_json
from metaphrase.io.tables import titled_table
from metaphrase.publishing.analysis import SIDES
from metaphrase.publishing.plots import COLOURS, charts, svg

#: Folder of the report that ``metaphrase report`` writes, in that of the run.
FOLDER = "report"
TEMPLATE = Path(__file__).with_name("report_template.html")

#: Verdicts that `verdict_shown` returns.
_STYLES = {"better": "bold green", "tie": "dim", "worse": "bold red", "too few to tell": "dim", "one run": "dim"}

Results = Mapping[str, Any]


def render_table(
    after: Results, before: Results | None = None, comparison: Results | None = None, *, title: str | None = None
) -> Table:
    """Format a result for the console: a row per language, with intervals; for retrieval, both directions and their mean.

    The results come from `Result.to_dict`. A baseline on the same data adds before → after, the difference and its
    verdict; the comparison is computed if it is not given and the results keep items.
    """
    if before is not None and comparison is None and after["statistic"] is not None:
        comparison = compare(before, after)
    directed = DIRECTIONS[0] in after["average"]
    numbers = ("n", *(("xx → en", "en → xx", "mean") if directed else (after["measure"],)))
    table = titled_table(title or str(after["model"]), "", right=numbers)
    direction = "lower" if after["lower_is_better"] else "higher"
    table.caption = f"{after['measure']} ({direction} is better); {after['protocol']}."
    if "interval" in after["average"]:
        table.caption += "\n95 % bootstrap intervals."
    if comparison is not None:
        table.caption += "\nVerdicts are Holm-corrected over the languages."
        table.caption += f"\n{ONE_RUN_NOTE}" * _has_one_run([comparison])
        table.add_column("difference", justify="right", overflow="fold")
        table.add_column("verdict")

    def add(label: str, n: int | None, new: Results, old: Results | None, tested: Results | None) -> None:
        keys = (*DIRECTIONS, "mean") if directed else (None,)
        cells = [_moved(new[key], old[key] if old else None) if key else _moved(new, old) for key in keys]
        if comparison is not None:
            cells += _tested(tested)
        table.add_row(Text(label), "" if n is None else str(n), *cells)

    counts = {language: row.get("n") for language, row in after["languages"].items()}
    for language, row in after["languages"].items():
        old = before["languages"].get(language) if before else None
        add(language + _unlearned(row), counts[language], row, old, comparison and comparison["languages"][language])
    if len(counts) > 1 and (before is None or before["languages"].keys() == counts.keys()):
        table.add_section()
        for group, row in after["groups"].items():
            members = TATOEBA_GROUPS.get(group)
            n = sum(counts[language] or 0 for language in members) if members else None  # items, as in other rows
            add(f"the {group}" if members else group, n, row, before["groups"].get(group) if before else None, None)
        total = None if None in counts.values() else sum(counts.values())
        add("average", total, after["average"], before and before["average"], comparison and comparison["pooled"])
    return table


def render_summary(results: Results) -> Table:
    """Format the results of `metaphrase.evaluation.suites.running.evaluate` for the console: a row per average."""
    comparisons = results.get("comparisons", {})
    before = results.get("baseline", {}).get("scores", {})
    numbers = ["languages", "score", *(["difference"] if before else [])]
    table = titled_table(str(results["model"]), "", "measure", right=numbers)
    table.caption = "In percent or ×100, with 95 % bootstrap intervals; ↓ lower is better."
    if before:
        table.add_column("verdicts", overflow="fold")
        table.caption += f"\n{ONE_RUN_NOTE}" * _has_one_run(comparisons.values())
    for name, scores in results["scores"].items():
        unlearned = sum(not row.get("learned", True) for row in scores["languages"].values())
        mark = f" (not learned in {unlearned} of {len(scores['languages'])})" if unlearned else ""
        old = before.get(name, {"languages": {}})
        if old["languages"].keys() != scores["languages"].keys():  # its means are over other languages
            pooled = comparisons.get(name, {}).get("pooled")
            old = {"groups": {}, "average": pooled and {"score": pooled["before"]}}
        rows = [(f"{name}, {group}", row, old["groups"].get(group)) for group, row in scores["groups"].items()]
        for label, new, there in (*rows, (name + mark, scores["average"], old["average"])):
            tested = comparisons.get(name) if new is scores["average"] else None
            cells = [
                Text(label),
                scores["measure"] + " ↓" * scores["lower_is_better"],
                str(new["n"]),
                _moved(new, there),
            ]
            if before:
                cells += [_tested(tested["pooled"])[0], _counts(tested["languages"])] if tested else ["", ""]
            table.add_row(*cells)
    return table


def _has_one_run(comparisons: Iterable[Results]) -> bool:
    """Whether a verdict is "one run"."""
    rows = (row for one in comparisons for row in (one["pooled"], *one["languages"].values()))
    return any(verdict_shown(row) == "one run" for row in rows)


def _unlearned(row: Results) -> str:
    """Mark of a language in which a classifier predicts a single class."""
    return "" if row.get("learned", True) else f" (not learned: the largest class is {row['majority']:.1f} %)"


def _tested(row: Results | None) -> list[Text]:
    """The difference with its interval, and the verdict."""
    if row is None:
        return []
    low, high = row["interval"]
    verdict = verdict_shown(row)
    return [
        Text.assemble(f"{row['difference']:+.1f}\n", (f"{low:+.1f}…{high:+.1f}", "dim")),
        Text(verdict, style=_STYLES[verdict]),
    ]


def _counts(rows: Results) -> str:
    """The number of languages of each verdict."""
    verdicts = [verdict_shown(row) for row in rows.values()]
    return ", ".join(f"{verdicts.count(word)} {word}" for word in _STYLES if word in verdicts)


def write_report(
    output_dir: str | Path,
    *,
    title: str,
    before: Mapping[str, Results] | None,
    after: Mapping[str, Results],
    comparisons: Mapping[str, Results] | None = None,
    run: Mapping[str, Any] | None = None,
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
        usage: Python code that loads the release, as `usage_lines` returns it.
        analysis: Results of :mod:`metaphrase.publishing.analysis`: ``tokens``, ``alignments``, ``margins``, ``errors``,
            ``geometry`` and ``answers``; ``retention``, by data set; ``abilities``, rows of guards by name; ``alpha``, an
            :class:`metaphrase.evaluation.guards.AlphaCurve` as data; ``verdict``, a sentence; and ``cost``. All are
            optional.

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
        "run": run or {},
        "usage": usage,
        "analysis": analysis or {},
    }
    folder = Path(output_dir)
    write_json(folder / "report.json", report)
    return replace_text(folder / "report.html", _page(report))


def remove_report(run: Path) -> None:
    """Delete the reports in the folder of a run: its own, and that of ``metaphrase report``."""
    for folder in (run, run / FOLDER):
        for name in ("report.json", "report.html"):
            (folder / name).unlink(missing_ok=True)


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    functions = (counted, describe_model, verdict_shown)
    environment.globals |= {"colours": COLOURS, **{function.__name__: function for function in functions}}
    environment.filters["named"] = language_name
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))


def _page(report: Mapping[str, Any]) -> str:
    analysis, run, before = report["analysis"], dict(report["run"]), report["before"]
    recipe = run.pop("recipe", None)
    return _template().render(
        analysis,
        title=report["title"],
        charts={name: Markup(svg(name, chart)) for name, chart in charts(report).items()},  # matplotlib escapes text
        sections=[
            {
                "name": name,
                "measured": {"before": before[name], "after": after} if before else {"after": after},
                "comparison": report["comparisons"].get(name),
            }
            for name, after in report["after"].items()
        ],
        alpha=AlphaCurve(**analysis["alpha"]) if "alpha" in analysis else None,
        verdict_line=analysis.get("verdict") or collapse_in_words(before or {}, report["after"]),
        alignments=[_with_scale(one) for one in analysis.get("alignments") or ()],
        sides=SIDES if before else SIDES[1:],
        usage=report["usage"],
        recipe=recipe and yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=60),
        facts=_facts({key: value for key, value in run.items() if key not in ("log_history", "settings")}),
    )


def _moved(new: Results, old: Results | None) -> Text:
    """A score with its interval, after the baseline's."""
    rows = [row for row in (new, old) if row is not None]
    score, *others = (next(row[key] for key in ("score", "accuracy", "error") if key in row) for row in rows)
    interval = "{:.1f}–{:.1f}".format(*new["interval"]) if "interval" in new else ""
    if others:
        return Text.assemble(f"{others[0]:.1f} → {score:.1f}", (f"\n{interval}" if interval else "", "dim"))
    return Text.assemble(f"{score:.1f}", (f" [{interval}]" if interval else "", "dim"))


def describe_model(results: Results) -> str:
    """Describe the model of an `evaluate_retrieval` result and how it was used."""
    settings = results["settings"]
    parts = [
        str(results["model"]),
        f"prompt “{settings['prompt']}”" if settings["prompt"] else "no prompt",
        *(f"{key.replace('_', ' ')} {settings[key]}" for key in ("pooling", "max_length") if settings.get(key)),
    ]
    return ", ".join(parts)


def _with_scale(one: Mapping[str, Any]) -> dict[str, Any]:
    """An alignment with the smallest cosine of both sides, and the distance to the largest."""
    cosines = [cosine for side in SIDES if side in one for row in one[side]["cosine"] for cosine in row]
    return {**one, "lowest": min(cosines), "spread": (max(cosines) - min(cosines)) or 1.0}


def _facts(run: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """The facts of a run: a label and lines of text each."""
    facts = []
    for key, value in run.items():
        label, lines = key.replace("_", " "), [str(value)]
        if key == "seconds":
            label, lines = "time", [f"{value / 60:.1f} minutes"]
        elif isinstance(value, Mapping):
            lines = [f"{name}: {_words(item)}" for name, item in value.items()]
        elif isinstance(value, list | tuple):
            lines = list(map(_words, value))
        facts.append((label, lines))
    return facts


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return " · ".join(f"{key} {_words(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_words, value))
    return str(value)
