"""``metaphrase evaluate MODEL --data DIR``: measure an encoder, alone or against a baseline.

Each data set is measured and cached on its own, and an interrupted command resumes after the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from rich.table import Table

from metaphrase.cli import emit, notes, parse, show_progress
from metaphrase.evaluation.suites.running import EvaluateOptions, evaluate
from metaphrase.publishing.report import render_summary, render_table

SUMMARY = "Measure an encoder, alone or against a baseline"

EXAMPLES = (
    "metaphrase evaluate starter --data data/test --languages sw,te",
    "metaphrase evaluate runs/sw --data data/test --baseline starter --output sw.json",
    "metaphrase evaluate runs/sw --data data/suites --suite all --json",
)


def run(argv: Sequence[str]) -> int:
    """Evaluate, print tables, write JSON."""
    arguments = ["--model", *argv] if argv and not argv[0].startswith("-") else list(argv)
    (options,) = parse("metaphrase evaluate", [EvaluateOptions], arguments, description=SUMMARY, examples=EXAMPLES)
    torch.set_flush_denormal(True)
    options.show_progress = show_progress()
    console = notes()
    results = evaluate(options, partial(console.print, markup=False, highlight=False))
    for path in options.outputs:
        console.print(f"Wrote {path}")
    emit(results, *_tables(results))
    return 2 if results["failed"] else 0


def _tables(results: Mapping[str, Any]) -> Iterator[Table]:
    """A table for each result, and a summary of several."""
    before, comparisons = results.get("baseline", {}).get("scores", {}), results.get("comparisons", {})
    for name, scores in results["scores"].items():
        yield render_table(scores, before.get(name), comparisons.get(name), title=name)
    yield render_summary(results)
