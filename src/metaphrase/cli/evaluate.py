"""``metaphrase evaluate MODEL --data DIR``: measure an encoder, alone or against a baseline.

Each data set is measured and cached on its own, and an interrupted command resumes after the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from metaphrase.cli import emit, notes, parse, show_progress
from metaphrase.evaluation.bucc import Duplicates, ThresholdComparison
from metaphrase.evaluation.significance import RESAMPLES
from metaphrase.evaluation.suites import FINETUNED, SUITES, Benchmark, Settings
from metaphrase.evaluation.suites.running import RESULTS, Evaluation, Reporter, evaluate
from metaphrase.exceptions import UsageError
from metaphrase.io.configuration import option
from metaphrase.io.files import write_json
from metaphrase.mining.margins import Margin, Retrieval
from metaphrase.publishing.report import render_summary, render_table

SUMMARY = "Measure an encoder, alone or against a baseline"

EXAMPLES = (
    "metaphrase evaluate starter --data data/test --languages sw,te",
    "metaphrase evaluate runs/sw --data data/test --baseline starter --output sw.json",
    "metaphrase evaluate runs/sw --data data/suites --suite all --json",
)


@dataclass
class EvaluateOptions:
    """The encoder to measure, the data, and the settings."""

    model: str = option(help="Encoder to measure: a folder, a Hub id, or 'starter'. May be the first argument.")
    data: str | None = option(
        None,
        "Folder of test sets xx-en.tsv.gz (header: source, target), or folder of data sets: tatoeba, udhr, "
        "stsb, xnli, pawsx, xquad, ud, BUCC, …; suites without data are skipped. Two suites also read the Hub and "
        "work without a folder: sts (STS22), and mteb with --tasks (Tatoeba, STS22, …).",
    )
    suite: Literal["retrieval", "sts", "mining", "word-alignment", "nli", "paraphrase", "qa", "pos", "mteb", "all"] = (
        option(
            "retrieval",
            "retrieval: accuracy of translation retrieval in both directions; sts: similarity in and across "
            "languages; mining: BUCC; word-alignment: AER; nli, paraphrase, qa, pos: fine-tuned in English at a small "
            "scale, measured in all languages; mteb: the folder's test sets as tasks of MTEB, or --tasks; all: all "
            "suites. If a data set fails, the others are still measured and written, and the exit status is 2.",
        )
    )
    languages: list[str] | None = option(None, "Languages, separated by spaces or commas. Default: all in the folder.")
    split: str | None = option(None, "Split of parallel test sets to read: xx-en.dev.tsv.gz, xx-en.test.tsv.gz, …")
    tasks: list[str] | None = option(
        None, "Tasks of the suite mteb: folders of the data (udhr), or tasks of MTEB (Tatoeba, STS22)."
    )
    protocols: list[str] | None = option(
        None,
        "BUCC protocols, by the split that sets the threshold and the split that is scored: train_oracle (both "
        "training, DAP's table 2), train_to_test (training, then test: the shared task), sample_to_train (sample, then "
        "training: XTREME), sample_oracle (both sample: WACSE, mSimCSE). Default: all whose splits are available.",
    )
    margin: Margin = option(
        "ratio",
        "Mining: the score of a pair. ratio: its cosine divided by the mean cosine of both sentences with their "
        "--k neighbours; distance: the cosine minus that mean; absolute: the cosine.",
    )
    k: int = option(4, "Mining: number of neighbours in the margin.")
    retrieval: Retrieval = option(
        "max",
        "Mining: candidate pairs. forward: each source with its best target; backward: each target with its best "
        "source; intersection: the pairs of both; max: the pairs of either, with each sentence in one pair only.",
    )
    duplicates: Duplicates | None = option(
        None,
        "Mining: repeated lines. keep: each is searched (DAP, mSimCSE); unify: they are searched once and "
        "excluded from the pairs (LASER, XTREME). Default: that of the protocol, keep except for sample_to_train.",
    )
    comparison: ThresholdComparison | None = option(
        None,
        "Mining: comparison of a pair's score with the threshold, > (DAP) or >= (LASER, XTREME). Default: that "
        "of the protocol, > for train_oracle and train_to_test.",
    )
    output: str | None = option(None, "JSON file to write.")
    output_dir: str = option(
        "runs/evaluation", "Folder of cached results, by digest of the model, and of results.json."
    )
    baseline: str | None = option(
        None,
        "Encoder to compare with, measured with its stored query prompt; --max_length applies to it, "
        "--pooling, --layer and --prompt do not. Or the JSON file of an earlier evaluation, for a baseline with other "
        "settings.",
    )
    prompt: str = option(
        "auto",
        "Text before each sentence. auto: the query prompt that the model stores (E5's 'query: '), "
        "if any; none: no prompt.",
    )
    pooling: str | None = option(None, "cls, mean, max, …; default: that of the model.")
    layer: int | None = option(
        None, "Hidden layer to pool: 0 is the embedding layer, -1 the last (XTREME: 7 for mBERT)."
    )
    max_length: int | None = option(
        None, "Number of tokens at which a sentence is truncated, also for the baseline (DAP: 32)."
    )
    batch_size: int = option(32, "Sentences per forward pass.")
    resamples: int = option(RESAMPLES, "Number of bootstrap samples of intervals and tests.")
    seed: int = option(0, "Seed of the bootstrap.")
    text_equality: bool = option(False, "Count another copy of the translation's text as a hit.")
    strip_quotes: bool = option(False, "Remove each \" from the texts of parallel test sets (DAP's Tatoeba).")
    margin_k: int | None = option(
        None,
        "In retrieval, measure accuracy by ratio margin over this number of neighbours instead of cosine. The "
        "xsim error is always by margin over 4.",
    )


def run(argv: Sequence[str]) -> int:
    """Evaluate, print tables, write JSON."""
    arguments = ["--model", *argv] if argv and not argv[0].startswith("-") else list(argv)
    (options,) = parse("metaphrase evaluate", [EvaluateOptions], arguments, description=SUMMARY, examples=EXAMPLES)
    torch.set_flush_denormal(True)
    console = notes()
    if options.data is None and options.suite != "sts" and not (options.suite == "mteb" and options.tasks):
        raise UsageError(
            "Evaluation needs data: pass --data FOLDER; --suite sts (STS22) and --suite mteb --tasks read the Hub without "
            "it. See `metaphrase evaluate --help`."
        )
    evaluation = _evaluation(options)
    _check_options(options, set(evaluation.suites), console)
    results = evaluate(evaluation, _Notes(console))
    for path in filter(None, (str(Path(options.output_dir) / RESULTS), options.output)):
        console.print(f"Wrote {write_json(path, results)}")
    emit(results, *_tables(results))
    return 2 if results["failed"] else 0


def _evaluation(options: EvaluateOptions) -> Evaluation:
    return Evaluation(
        **_shared(Evaluation, options),
        suites=tuple(SUITES) if options.suite == "all" else (options.suite,),
        settings=Settings(
            **_shared(Settings, options)
            | {"prompt": None if options.prompt == "none" else options.prompt}
            | {name: _listed(getattr(options, name)) for name in ("languages", "protocols", "tasks")}
        ),
        show_progress=show_progress(),
    )


def _shared(kind: type[Any], options: EvaluateOptions) -> dict[str, Any]:
    """The options that a data class has a field for."""
    return {one.name: getattr(options, one.name) for one in fields(kind) if hasattr(options, one.name)}


def _tables(results: Mapping[str, Any]) -> Iterator[Table]:
    """A table for each result, and a summary of several."""
    before, comparisons = results.get("baseline", {}).get("scores", {}), results.get("comparisons", {})
    for name, scores in results["scores"].items():
        yield render_table(scores, before.get(name), comparisons.get(name), title=name)
    yield render_summary(results)


def _listed(items: Sequence[str] | None) -> tuple[str, ...] | None:
    """Split items at commas and spaces; None if there are none."""
    return tuple(one for item in items or () for one in item.replace(",", " ").split()) or None


#: Suites that load the model by name and fine-tune it.
_FINE_TUNED = {task.suite for task in FINETUNED.values()}
#: The suites of options that do not apply to all suites.
_APPLIES = {
    "split": {"retrieval", "mteb"},
    "margin_k": {"retrieval"},
    "tasks": {"mteb"},
    **{name: {"mining"} for name in ("protocols", "margin", "k", "retrieval", "duplicates", "comparison")},
    "text_equality": {"retrieval"},
    "strip_quotes": {"retrieval", "mteb"},
    "prompt": set(SUITES) - _FINE_TUNED - {"word-alignment"},
    "pooling": set(SUITES) - _FINE_TUNED - {"word-alignment"},
    "layer": set(SUITES) - _FINE_TUNED,
    "max_length": set(SUITES) - _FINE_TUNED,
}


def _check_options(options: EvaluateOptions, suites: set[str], console: Console) -> None:
    """Refuse options that have no effect, and print a note if an option affects only some of the suites.

    Raises:
        UsageError: An option applies to none of the suites.
    """
    defaults = {option.name: option.default for option in fields(options)}
    for name, applies in _APPLIES.items():
        if getattr(options, name) == defaults[name]:
            continue
        if not applies & suites:
            raise UsageError(
                f"--{name} applies to --suite {', '.join(sorted(applies))} and has no effect with --suite {options.suite}."
            )
        if options.suite == "all":
            console.print(f"Note: --{name} applies only to {', '.join(sorted(applies))}.", highlight=False)


class _Notes(Reporter):
    """Prints the progress of an evaluation on stderr."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def planned(self, plan: Sequence[Mapping[str, Any]], missing: Mapping[str, str], model: str) -> None:
        """Print the benchmarks and their estimated duration on this machine."""
        table = Table(box=box.SIMPLE_HEAD, title="Benchmarks", title_justify="left", pad_edge=False)
        for heading in ("name", "suite", "protocol", "minutes"):
            table.add_column(heading, justify="right" if heading == "minutes" else "left")
        for one in plan:
            minutes = "?" if one["seconds"] is None else f"{one['seconds'] / 60:.1f}"
            table.add_row(one["name"], one["suite"], one["protocol"], "done" if one["cached"] else minutes)
        self.console.print(table)
        for suite, reason in missing.items():
            self.console.print(f"Skipped: {suite}, which {reason}.")
        total = sum(one["seconds"] or 0 for one in plan)
        self.console.print(f"Estimate for {model}: {_duration(total)}.")

    def started(self, benchmark: Benchmark, model: str, number: int, total: int) -> None:
        """Print the name of the benchmark."""
        self.console.print(f"[{number}/{total}] {model}: {benchmark.name} …", markup=False, highlight=False)

    def finished(self, content: Mapping[str, Any], *, cached: bool) -> None:
        """Print the averages."""
        averages = "; ".join(
            f"{name} {one['measure']} {one['average']['score']:.1f}" for name, one in content["scores"].items()
        )
        when = "cached" if cached else _duration(content["seconds"])
        self.console.print(f"  {averages} ({when})", markup=False, highlight=False)

    def skipped(self, benchmark: Benchmark, reason: str) -> None:
        """Print the reason."""
        self.console.print(f"Skipped: {benchmark.name}, {reason}.", markup=False)

    def failed(self, benchmark: Benchmark, reason: str) -> None:
        """Print the reason."""
        self.console.print(Text(f"Failed: {benchmark.name}: {reason}", style="bold red"))


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
