"""``metaphrase evaluate MODEL … --data DIR``: measure encoders, alone or against a baseline.

Each data set is measured and cached on its own, and an interrupted command resumes after the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from metaphrase.cli.options import parse
from metaphrase.cli.output import emit, notes, show_progress
from metaphrase.cli.tables import models_table
from metaphrase.evaluation.suites.running import EvaluateOptions, evaluate, evaluate_models
from metaphrase.publishing.report import render_summary, render_table

DESCRIPTION = "Measure encoders, alone or against a baseline. An interrupted command resumes."

EXAMPLES = (
    "metaphrase evaluate starter --data data/test --languages sw,te",
    "metaphrase evaluate runs/sw --data data/test --baseline starter --output sw.json",
    "metaphrase evaluate runs/sw --data data/suites --suite all --json",
    "metaphrase evaluate runs/tr runs/dap runs/mexma --data data/test --baseline starter",
)


def run(argv: Sequence[str]) -> int:
    """Evaluate, print tables, write JSON."""
    (options,) = parse("metaphrase evaluate", [EvaluateOptions], argv, description=DESCRIPTION, examples=EXAMPLES)
    options.show_progress = show_progress()
    console = notes()
    if options.also:
        found = evaluate_models(options, console.print)
        results, tables = found.models, [models_table(found)]
        content = found.to_dict()
    else:
        content = evaluate(options, console.print)
        results, tables = [content], list(_tables(content))
    for path in options.outputs:
        console.print(f"Wrote {path}")
    emit(content, *tables)
    if options.baseline is not None and not options.baseline.endswith(".json"):
        results = [*results, content.get("baseline", {})]
    return 2 if any(one.get("failed") for one in results) else 0


def _tables(results: Mapping[str, Any]) -> Iterator[Table]:
    """A table for each result, and a summary of several."""
    before, comparisons = results.get("baseline", {}).get("scores", {}), results.get("comparisons", {})
    for name, scores in results["scores"].items():
        yield render_table(scores, before.get(name), comparisons.get(name), title=name)
    yield render_summary(results)
