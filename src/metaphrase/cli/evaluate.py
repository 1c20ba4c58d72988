"""``metaphrase evaluate MODEL --data DIR``: measure an encoder, alone or against a baseline.

A folder of test sets (``xx-en.tsv.gz``) is measured at once. A folder of such folders, or any other suite, is measured part
by part: each finished part is kept, and an interrupted command goes on behind it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from metaphrase.cli import emit, notes, parse, show_progress
from metaphrase.corpus.parallel import ParallelSet, load_parallel_folder
from metaphrase.encoders.loading import load_encoder
from metaphrase.evaluation.bucc import Comparison, Duplicates
from metaphrase.evaluation.retrieval import compare_retrieval, evaluate_retrieval, prepare
from metaphrase.evaluation.significance import RESAMPLES
from metaphrase.evaluation.suites import (
    FINETUNED,
    RESULTS,
    SUITES,
    NoData,
    Part,
    Settings,
    Subject,
    compare,
    find_parts,
    kept,
    run_part,
    speed,
    strip_quotes,
)
from metaphrase.exceptions import DataError, UsageError
from metaphrase.io.environment import versions
from metaphrase.io.files import write_json
from metaphrase.mining.margins import Margin, Retrieval
from metaphrase.publishing.report import render_table

SUMMARY = "Measure an encoder, alone or against a baseline"

EXAMPLES = (
    "metaphrase evaluate starter --data data/test --languages sw,te",
    "metaphrase evaluate runs/sw --data data/test --baseline starter --output sw.json",
    "metaphrase evaluate runs/sw --data data/suites --suite all --json",
)

logger = logging.getLogger(__name__)

_STYLES = {"better": "bold green", "tie": "dim", "worse": "bold red"}


@dataclass
class EvaluateOptions:
    """What is measured, on what, and how."""

    model: str = field(metadata={"help": "Encoder to measure: a folder, a Hub id, or 'starter'. May stand first."})
    data: str | None = field(
        default=None,
        metadata={
            "help": "Folder of test sets xx-en.tsv.gz (header: source, target), or folder of data sets: tatoeba, udhr, "
            "stsb, xnli, pawsx, xquad, ud, BUCC's, …; what is not there is left out. All suites read it but two, which also "
            "read the Hub, without a folder: sts (STS22), and mteb with --tasks (Tatoeba, STS22, …)."
        },
    )
    suite: Literal["retrieval", "sts", "mining", "word-alignment", "nli", "paraphrase", "qa", "pos", "mteb", "all"] = (
        field(
            default="retrieval",
            metadata={
                "help": "retrieval: does a sentence find its own translation, both directions; sts: similarity in and across "
                "languages; mining: BUCC; word-alignment: AER; nli, paraphrase, qa, pos: fine-tuned in English at a small "
                "scale, measured in all languages; mteb: the folder's test sets as tasks of MTEB, or --tasks; all: all of "
                "it. A part that fails leaves the others: the rest is written, and the exit status is 2."
            },
        )
    )
    languages: list[str] | None = field(
        default=None, metadata={"help": "Languages, separated by spaces or commas. Default: all in the folder."}
    )
    split: str | None = field(
        default=None, metadata={"help": "Which of xx-en.dev.tsv.gz, xx-en.test.tsv.gz, …; for a folder of test sets."}
    )
    tasks: list[str] | None = field(
        default=None,
        metadata={"help": "Tasks of the suite mteb: folders of the data (udhr), or MTEB's own (Tatoeba, STS22)."},
    )
    protocols: list[str] | None = field(
        default=None,
        metadata={
            "help": "Protocols of BUCC, by where the threshold comes from and what is scored: train_oracle (both on "
            "training, DAP's table 2), train_to_test (training, then test: the shared task), sample_to_train (sample, then "
            "training: XTREME), sample_oracle (both on sample: WACSE, mSimCSE). Default: all whose splits are there."
        },
    )
    margin: Margin = field(
        default="ratio",
        metadata={
            "help": "Of mining, the score of a pair. ratio: its cosine over the mean cosine of both sentences with their --k "
            "neighbours; distance: the cosine less that mean; absolute: the cosine."
        },
    )
    k: int = field(default=4, metadata={"help": "Of mining, neighbours in the margin."})
    retrieval: Retrieval = field(
        default="max",
        metadata={
            "help": "Of mining. forward: each source with its best target; backward: each target with its best source; "
            "intersection: the pairs that both find; max: the pairs that either finds, each sentence in one pair only."
        },
    )
    duplicates: Duplicates | None = field(
        default=None,
        metadata={
            "help": "Of mining, lines that repeat. keep: each is searched (DAP, mSimCSE); unify: they are searched once and "
            "left out of the pairs (LASER, XTREME). Default: the protocol's own, keep but for sample_to_train."
        },
    )
    comparison: Comparison | None = field(
        default=None,
        metadata={
            "help": "Of mining, how a pair's score has to stand to the threshold: > (DAP) or >= (LASER, XTREME). Default: "
            "the protocol's own, > for train_oracle and train_to_test."
        },
    )
    output: str | None = field(default=None, metadata={"help": "JSON file to write."})
    output_dir: str = field(
        default="runs/evaluation",
        metadata={"help": "Where suites keep their parts, under a digest of the model, and results.json."},
    )
    baseline: str | None = field(
        default=None,
        metadata={
            "help": "Encoder to compare with, measured as it is with its stored query prompt: --pooling, --layer and "
            "--prompt are not applied to it, --max_length is. Or the JSON file of an earlier evaluation, for a "
            "baseline measured in any other way."
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
    strip_quotes: bool = field(
        default=False, metadata={"help": "Take each \" out of the texts of parallel test sets (DAP's Tatoeba)."}
    )
    margin_k: int | None = field(
        default=None,
        metadata={
            "help": "For a folder of test sets: retrieve by the ratio margin over so many neighbours in place of the "
            "cosine; 100 less the accuracy is then the xsim error (xsim: 4)."
        },
    )


def run(argv: Sequence[str]) -> int:
    """Evaluate, print a table, write JSON."""
    arguments = ["--model", *argv] if argv and not argv[0].startswith("-") else list(argv)
    (options,) = parse("metaphrase evaluate", [EvaluateOptions], arguments, description=SUMMARY, examples=EXAMPLES)
    torch.set_flush_denormal(True)
    console = notes()
    if options.data is None and options.suite != "sts" and not (options.suite == "mteb" and options.tasks):
        raise UsageError(
            "Evaluation needs data: give --data FOLDER; --suite sts (STS22) and --suite mteb --tasks read the Hub without "
            "it. See `metaphrase evaluate --help`."
        )
    if options.suite == "retrieval" and not _holds_folders(Path(str(options.data))):
        _check_options(options, {"retrieval", "test sets"}, console)
        return _retrieval(options, console)
    _check_options(options, set(SUITES) if options.suite == "all" else {options.suite}, console)
    return _suites(options, console)


#: Suites that load the model anew to fine-tune it.
_FINE_TUNED = {task.suite for task in FINETUNED.values()}
#: Suites that an option applies to, where it does not apply to all; "test sets" is a single folder of them.
_APPLIES = {
    "split": {"test sets"},
    "margin_k": {"test sets"},
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
    """Refuse options that would change nothing, and say which suites of several one does not change.

    Raises:
        ValueError: An option applies to none of the suites.
    """
    defaults = {option.name: option.default for option in fields(options)}
    for name, applies in _APPLIES.items():
        if getattr(options, name) == defaults[name]:
            continue
        if not applies & suites:
            where = "a folder of test sets" if applies == {"test sets"} else f"--suite {', '.join(sorted(applies))}"
            raise UsageError(f"--{name} applies to {where}, not to what --suite {options.suite} measures here.")
        if options.suite == "all":
            console.print(f"Note: --{name} applies to {', '.join(sorted(applies))} alone.", highlight=False)


def _holds_folders(data: Path) -> bool:
    """Whether test sets lie in folders of a folder, not in itself."""
    return data.is_dir() and not any(data.glob("*-en.*")) and any(data.glob("*/*-en.*"))


def _listed(items: Sequence[str] | None) -> list[str]:
    return [one for item in items or () for one in item.replace(",", " ").split()]


def _retrieval(options: EvaluateOptions, console: Console) -> int:
    """A folder of test sets, at once."""
    sets = load_parallel_folder(str(options.data), _listed(options.languages) or None, options.split)
    sets = strip_quotes(sets) if options.strip_quotes else sets
    before = comparison = None
    if options.baseline is not None:
        before = _baseline(options, sets, console)
    results = _measure(_model(options), options.model, options.prompt, options, sets, console)
    if before is not None:
        comparison = compare_retrieval(before, results, resamples=options.resamples, seed=options.seed)
        results |= {"baseline": before, "comparison": comparison}
    if options.output is not None:
        console.print(f"Wrote {write_json(options.output, results)}")
    emit(results, render_table(results, before, comparison))
    return 0


def _model(options: EvaluateOptions) -> Any:
    return prepare(
        load_encoder(options.model), pooling=options.pooling, layer=options.layer, max_length=options.max_length
    )


def _baseline(options: EvaluateOptions, sets: dict[str, ParallelSet], console: Console) -> dict[str, Any]:
    """Measure the baseline at its best, or read what an earlier evaluation found."""
    name = str(options.baseline)
    if not name.endswith(".json"):
        model = prepare(load_encoder(name), max_length=options.max_length)
        return _measure(model, name, "auto", options, sets, console)
    return _read(name, options.suite, "languages")


def _read(name: str, suite: str, key: str) -> dict[str, Any]:
    try:
        results = json.loads(Path(name).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(f"{name} is not JSON: {error}") from error
    if not isinstance(results, dict) or key not in results or (key == "languages" and results.get("suite") != suite):
        raise DataError(f"{name} is no result of `metaphrase evaluate --suite {suite}`.")
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
    results = evaluate_retrieval(
        model,
        sets,
        name=name,
        prompt=None if prompt == "none" else prompt,
        batch_size=options.batch_size,
        text_equality=options.text_equality,
        margin_k=options.margin_k,
        resamples=options.resamples,
        seed=options.seed,
        show_progress=show_progress(),
    )
    results["settings"]["strip_quotes"] = options.strip_quotes
    return results


# Suites


def _suites(options: EvaluateOptions, console: Console) -> int:
    """Part by part, each kept when it is done."""
    start = time.perf_counter()
    settings = Settings(
        prompt=None if options.prompt == "none" else options.prompt,
        languages=tuple(_listed(options.languages)) or None,
        text_equality=options.text_equality,
        strip_quotes=options.strip_quotes,
        protocols=tuple(_listed(options.protocols)) or None,
        margin=options.margin,
        k=options.k,
        retrieval=options.retrieval,
        duplicates=options.duplicates,
        comparison=options.comparison,
        tasks=tuple(_listed(options.tasks)) or None,
        resamples=options.resamples,
        seed=options.seed,
    )
    suites = list(SUITES) if options.suite == "all" else [options.suite]
    parts, missing = find_parts(options.data, suites, settings)
    if not parts:
        needs = "; ".join(f"{suite} {reason}" for suite, reason in missing.items())
        raise DataError(f"{options.data} has nothing that --suite {options.suite} could measure: {needs}.")

    def subject(name: str, model: Any, settings: Settings) -> Subject:
        return Subject.of(
            name,
            model,
            options.output_dir,
            settings,
            batch_size=options.batch_size,
            show_progress=show_progress(),
        )

    subjects = [subject(options.model, _model(options), settings)]
    earlier = None
    if options.baseline is not None and options.baseline.endswith(".json"):
        earlier = _read(options.baseline, options.suite, "scores")
    elif options.baseline is not None:
        model = prepare(load_encoder(options.baseline), max_length=options.max_length)
        subjects.insert(0, subject(options.baseline, model, Settings(**{**vars(settings), "prompt": "auto"})))
    _estimate(parts, missing, subjects, console)
    measured = [_run(parts, one, missing, console) for one in subjects]
    results = measured[-1]
    before = earlier or (measured[0] if len(measured) > 1 else None)
    if not results["scores"]:
        raise DataError(f"Nothing could be measured: {'; '.join(_reasons(results))}.")
    if before is not None:
        results["comparisons"] = compare(before["scores"], results["scores"], settings)
        results["baseline"] = before
    results |= {
        "suite": options.suite,
        "settings": asdict(settings),
        "versions": versions(),
        "seconds": round(time.perf_counter() - start, 1),
    }
    for path in filter(None, (str(Path(options.output_dir) / RESULTS), options.output)):
        console.print(f"Wrote {write_json(path, results)}")
    comparisons = results.get("comparisons", {}).items()
    tables = [_comparison_table(name, results["scores"][name], comparison) for name, comparison in comparisons]
    emit(results, *tables, *_language_tables(results), _summary_table(results))
    return 2 if results["failed"] else 0


def _reasons(results: Mapping[str, Any]) -> list[str]:
    """Why parts were left out, a line each."""
    return [f"{name}: {reason}" for key in ("skipped", "failed") for name, reason in results[key].items()]


def _estimate(
    parts: Sequence[Part], missing: Mapping[str, str], subjects: Sequence[Subject], console: Console
) -> None:
    """Say what will be done and how long it will take, from the speed of this machine."""
    table = Table(box=box.SIMPLE_HEAD, title="Parts", title_justify="left", pad_edge=False)
    for heading in ("part", "suite", "protocol", "minutes"):
        table.add_column(heading, justify="right" if heading == "minutes" else "left")
    seconds = [speed(one.model, batch_size=one.batch_size) for one in subjects]
    total = 0.0
    for part in parts:
        todo = [rate for one, rate in zip(subjects, seconds, strict=True) if not kept(part, one).is_file()]
        minutes = part.work * sum(todo) / 60
        total += minutes
        known = f"{minutes:.1f}" if part.files else "?"
        table.add_row(part.name, part.suite, part.protocol, known if todo else "done")
    console.print(table)
    for suite, reason in missing.items():
        console.print(f"Left out: {suite}, which {reason}.")
    models = " and ".join(one.name for one in subjects)
    console.print(f"Estimate for {models}: {_duration(60 * total)}.")


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def _run(parts: Sequence[Part], subject: Subject, missing: Mapping[str, str], console: Console) -> dict[str, Any]:
    """Measure all parts; one that fails does not keep the others from being measured."""
    scores: dict[str, Any] = {}
    done: dict[str, Any] = {}
    skipped, failed = dict(missing), {}
    for number, part in enumerate(parts, 1):
        console.print(f"[{number}/{len(parts)}] {subject.name}: {part.name} …", markup=False, highlight=False)
        was_kept = kept(part, subject).is_file()
        try:
            result = run_part(part, subject)
        except NoData as reason:
            skipped[part.name] = str(reason)
            console.print(f"Left out: {part.name}, {reason}.", markup=False)
            continue
        except Exception as error:  # hours of other parts are not to be lost by one
            failed[part.name] = str(error) or type(error).__name__
            if not isinstance(error, ValueError | OSError):
                logger.exception("%s failed.", part.name)
            console.print(Text(f"Failed: {part.name}: {failed[part.name]}", style="bold red"))
            continue
        scores |= result["scores"]
        done[part.name] = result | {"scores": list(result["scores"])}
        averages = "; ".join(
            f"{name} {one['measure']} {one['average']['score']:.1f}" for name, one in result["scores"].items()
        )
        when = "kept from before" if was_kept else _duration(result["seconds"])
        console.print(f"  {averages} ({when})", markup=False, highlight=False)
    return {
        "model": subject.name,
        "model_hash": subject.sha,
        "scores": scores,
        "parts": done,
        "skipped": skipped,
        "failed": failed,
    }


def _comparison_table(name: str, scores: Mapping[str, Any], comparison: Mapping[str, Any]) -> Table:
    """Before → after and the verdict, a row for each language."""
    table = Table(title=Text(name, style="bold"), title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    direction = "lower is better" if scores["lower_is_better"] else "higher is better"
    table.caption = f"{scores['measure']} ({direction}); {scores['protocol']}. Verdicts are Holm-corrected."
    for heading in ("", "n", "before", "after", "difference", "verdict"):
        table.add_column(heading, justify="left" if heading in ("", "verdict") else "right")
    rows = comparison["languages"].items()
    for label, row in [*rows, ("average", comparison["pooled"])] if len(rows) > 1 else rows:
        if label == "average":
            table.add_section()
        low, high = row["interval"]
        table.add_row(
            label + _unlearned(scores["languages"].get(label, {})),
            str(row.get("n", row.get("languages"))),
            f"{row['before']:.1f}",
            f"{row['after']:.1f}",
            f"{row['difference']:+.1f} [{low:+.1f}, {high:+.1f}]",
            Text(row["verdict"], style=_STYLES[row["verdict"]]),
        )
    return table


def _unlearned(row: Mapping[str, Any]) -> str:
    """A mark for a language in which a classifier does no more than saying one class."""
    return "" if row.get("learned", True) else f" (not learned: the largest class is {row['majority']:.1f} %)"


def _language_tables(results: Mapping[str, Any]) -> list[Table]:
    """A row for each language of the scores that are not compared; those of one part and measure share a table."""
    before = results.get("baseline", {}).get("scores", {})
    shared: dict[Any, dict[str, Any]] = {}
    for part, done in results["parts"].items():
        for name in done["scores"]:
            scores = results["scores"][name]
            if name not in results.get("comparisons", {}):
                shared.setdefault((part, scores["measure"], *scores["languages"]), {})[name] = scores
    return [_language_table(columns, before) for columns in shared.values()]


def _language_table(columns: Mapping[str, Any], before: Mapping[str, Any]) -> Table:
    first = next(iter(columns.values()))
    direction = "lower is better" if first["lower_is_better"] else "higher is better"
    table = Table(caption_justify="left", box=box.SIMPLE_HEAD)
    table.caption = f"{first['measure']} ({direction}); {first['protocol']}."
    for heading in ("", "n"):
        table.add_column(heading, justify="right" if heading else "left")
    for name in columns:
        for label in (f"{name}, before", name) if name in before else (name,):
            table.add_column(label, justify="right", overflow="fold")

    def cell(row: Mapping[str, Any]) -> str:
        interval = " [{:.1f}–{:.1f}]".format(*row["interval"]) if "interval" in row else ""
        return f"{row['score']:.1f}{interval}" if row else "–"

    for language, row in first["languages"].items():
        cells = []
        for name, scores in columns.items():
            if name in before:
                cells.append(cell(before[name]["languages"].get(language, {})))
            cells.append(cell(scores["languages"][language]))
        table.add_row(language + _unlearned(row), str(row.get("n", "")), *cells)
    return table


def _summary_table(results: Mapping[str, Any]) -> Table:
    """A row for each average."""
    table = Table(
        title=Text(str(results["model"]), style="bold"),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.caption = "In percent or ×100, with 95 % bootstrap intervals; ↓ lower is better."
    comparisons = results.get("comparisons", {})
    before = results.get("baseline", {}).get("scores", {})
    for heading in ("", "measure", "n", *(("before",) if before else ()), "score"):
        table.add_column(heading, justify="left" if heading in ("", "measure") else "right", overflow="fold")
    if before:
        table.add_column("difference", justify="right", overflow="fold")
        table.add_column("verdicts", overflow="fold")
    for name, scores in results["scores"].items():
        arrow = " ↓" if scores["lower_is_better"] else ""
        rows = {f"{name}, {group}": (group, row) for group, row in scores["groups"].items()} | {
            name: (None, scores["average"])
        }
        unlearned = sum(not row.get("learned", True) for row in scores["languages"].values())
        for label, (group, row) in rows.items():
            mark = (
                f" (not learned in {unlearned} of {len(scores['languages'])})" if unlearned and group is None else ""
            )
            cells = [label + mark, scores["measure"] + arrow, str(row["n"])]
            old = before.get(name, {})
            if before:
                there = old.get("groups", {}).get(group) if group else old.get("average")
                cells.append(f"{there['score']:.1f}" if there else "–")
            interval = "{:.1f}–{:.1f}".format(*row["interval"]) if "interval" in row else ""
            cells.append(f"{row['score']:.1f} [{interval}]".replace(" []", ""))
            if before:
                cells += _verdicts(comparisons.get(name) if group is None else None)
            table.add_row(*cells)
    return table


def _verdicts(comparison: Mapping[str, Any] | None) -> list[str]:
    """The pooled difference, and how many languages are better, tied or worse."""
    if comparison is None:
        return ["", ""]
    low, high = comparison["pooled"]["interval"]
    words = [row["verdict"] for row in comparison["languages"].values()]
    counts = ", ".join(f"{words.count(word)} {word}" for word in ("better", "tie", "worse") if word in words)
    return [f"{comparison['pooled']['difference']:+.1f} [{low:+.1f}, {high:+.1f}]", counts]
