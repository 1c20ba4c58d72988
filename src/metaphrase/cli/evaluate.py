"""``metaphrase evaluate MODEL --data DIR``: measure an encoder, alone or against a baseline."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from metaphrase.cli import parse
from metaphrase.encoders import load_encoder
from metaphrase.evaluation.retrieval import (
    ParallelSet,
    compare_retrieval,
    evaluate_retrieval,
    load_parallel_folder,
    prepare,
)
from metaphrase.evaluation.significance import RESAMPLES
from metaphrase.report import render_table, write_json

SUMMARY = "Measure an encoder, alone or against a baseline"

logger = logging.getLogger(__name__)


@dataclass
class EvaluateOptions:
    """What is measured, on what, and how."""

    model: str = field(metadata={"help": "Encoder to measure: a folder, a Hub id, or 'starter'. May stand first."})
    data: str = field(metadata={"help": "Folder of test sets xx-en.tsv.gz (header: source, target)."})
    suite: Literal["retrieval"] = field(
        default="retrieval", metadata={"help": "retrieval: does a sentence find its own translation, both directions."}
    )
    languages: list[str] | None = field(
        default=None, metadata={"help": "Languages, separated by spaces or commas. Default: all in the folder."}
    )
    split: str | None = field(default=None, metadata={"help": "Which of xx-en.dev.tsv.gz, xx-en.test.tsv.gz, …"})
    output: str | None = field(default=None, metadata={"help": "JSON file to write."})
    baseline: str | None = field(
        default=None,
        metadata={
            "help": "Encoder to compare with, measured as it is with its stored query prompt; or the JSON file of an "
            "earlier evaluation, for a baseline measured in any other way."
        },
    )
    prompt: str = field(
        default="auto",
        metadata={
            "help": "Text before each sentence. auto: the query prompt that the model stores (E5's 'query: '), "
            "if any; none: nothing."
        },
    )
    pooling: str | None = field(default=None, metadata={"help": "cls, mean, max, …; default: the model's own."})
    layer: int | None = field(
        default=None, metadata={"help": "Hidden layer to pool: 0 the embeddings, -1 the last (XTREME: 7 for mBERT)."}
    )
    max_length: int | None = field(
        default=None, metadata={"help": "Tokens after which a sentence is cut, baseline included (DAP: 32)."}
    )
    batch_size: int = field(default=32, metadata={"help": "Sentences per forward pass."})
    resamples: int = field(default=RESAMPLES, metadata={"help": "Bootstrap resamples of intervals and tests."})
    seed: int = field(default=0, metadata={"help": "Seed of the bootstrap."})
    text_equality: bool = field(
        default=False, metadata={"help": "Count another copy of the translation's text as a hit."}
    )


def run(argv: Sequence[str]) -> int:
    """Evaluate, print a table, write JSON."""
    arguments = ["--model", *argv] if argv and not argv[0].startswith("-") else list(argv)
    (options,) = parse("metaphrase evaluate", [EvaluateOptions], arguments, description=SUMMARY)
    torch.set_flush_denormal(True)
    console = Console()
    languages = [code for item in options.languages or () for code in item.replace(",", " ").split()]
    sets = load_parallel_folder(options.data, languages or None, options.split)

    before = comparison = None
    if options.baseline is not None:
        before = _baseline(options, sets, console)
    model = prepare(
        load_encoder(options.model), pooling=options.pooling, layer=options.layer, max_length=options.max_length
    )
    results = _measure(model, options.model, options.prompt, options, sets, console)
    if before is not None:
        comparison = compare_retrieval(before, results, resamples=options.resamples, seed=options.seed)
        results |= {"baseline": before, "comparison": comparison}
    console.print(render_table(results, before, comparison))
    if options.output is not None:
        console.print(f"Wrote {write_json(options.output, results)}")
    return 0


def _baseline(options: EvaluateOptions, sets: dict[str, ParallelSet], console: Console) -> dict[str, Any]:
    """Measure the baseline at its best, or read what an earlier evaluation found."""
    name = str(options.baseline)
    if not name.endswith(".json"):
        model = prepare(load_encoder(name), max_length=options.max_length)
        return _measure(model, name, "auto", options, sets, console)
    try:
        results = json.loads(Path(name).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not JSON: {error}") from error
    if not isinstance(results, dict) or results.get("suite") != options.suite:
        raise ValueError(f"{name} is no result of `metaphrase evaluate --suite {options.suite}`.")
    return results


def _measure(
    model: Any,
    name: str,
    prompt: str,
    options: EvaluateOptions,
    sets: dict[str, ParallelSet],
    console: Console,
) -> dict[str, Any]:
    console.print(f"Measuring {name} on {len(sets)} languages, {sum(len(s.sources) for s in sets.values())} pairs …")
    return evaluate_retrieval(
        model,
        sets,
        name=name,
        prompt=None if prompt == "none" else prompt,
        batch_size=options.batch_size,
        text_equality=options.text_equality,
        resamples=options.resamples,
        seed=options.seed,
        show_progress=sys.stderr.isatty(),
    )
