"""Measure speed and memory as ratios.

    python scripts/benchmarks/run.py                       # the rows of a CPU, about half an hour; `make bench`
    python scripts/benchmarks/run.py --quick               # the starter's shape only, about 10 minutes; `make bench-quick`
    python scripts/benchmarks/run.py --rows dap-vs-tr,compiled --again
    python scripts/benchmarks/run.py --device cuda         # `make bench-gpu`

The variants of a row are measured in one process, in turn, with a fixed number of threads. The best round counts, in CPU
seconds or time between CUDA events. Every row is a JSON file in ``results/cpu`` or, on a GPU, in a folder with its name;
``table.md`` there contains all rows. With ``--quick``, ``--shape`` or ``--threads``, results are not
comparable with stored ones and are written to ``out/benchmarks``. An interrupted run resumes with the missing rows, and
prints the minutes that are left. If rounds differ by more than 20 %, or other processes use more than 20 % of the machine,
the verdict is open and the next run measures the row again.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import commands
import engines
import isolated
import rates
import rows
import torch
from costs import main as write_costs
from measuring import OthersShare, Skipped, facts
from rows import Context
from settings import SHAPES
from transformers import HfArgumentParser

from metaphrase.io.configuration import option
from metaphrase.io.counts import counted
from metaphrase.io.files import read_json

RESULTS = Path(__file__).parent / "results"
#: Folder of results with other settings than those stored.
OTHER_RESULTS = Path(__file__).parents[2] / "out" / "benchmarks"
#: Rows by name, in the order in which they are measured.
ROWS = {**rows.ROWS, **rates.ROWS, **isolated.ROWS, **engines.ROWS, **commands.ROWS}
#: Rows that are measured on a CPU only if they are named: a compiler takes most of their time.
NAMED = ("compiled",)
#: Rows with tables of their own.
TABLES = ("flops", "profile")
#: Assumed minutes of a row without results.
MINUTES = 2.0


@dataclass
class Options:
    """Options of the benchmark."""

    rows: str = option("all", f"Rows, separated by commas: {', '.join(ROWS)}.")
    quick: bool = option(False, "Measure the starter's shape only, in two rounds, and skip the slowest rows.")
    device: str = option("cpu", "cpu or cuda.")
    threads: int = option(1, "Number of threads.")
    rounds: int = option(2, "Rounds of each measurement; the minimum counts.")
    texts: str | None = option(
        None, "Folder of test sets, such as Tatoeba's xx-en.tsv.gz, for the starter. Default: the demo's pairs."
    )
    again: bool = option(False, "Measure rows again even if recent results exist.")
    max_age: float = option(24.0, "Age in hours up to which a result is reused.")
    results: str | None = option(None, "Results folder (default: one for each device).")
    shape: str | None = option(None, "Measure one shape instead of all: " + ", ".join(SHAPES))


def measure(name: str, context: Context, options: Options) -> dict[str, Any]:
    """Measure a row."""
    others, start = OthersShare(), time.perf_counter()
    figures = list(ROWS[name](context))
    share = others()
    content = {
        "row": name,
        "statement": " ".join((ROWS[name].__doc__ or "").split()),
        "facts": {**facts(options.device, options.threads), "texts": options.texts or "bundled"},
        "others": round(share, 3),
        "minutes": round((time.perf_counter() - start) / 60, 2),
        "finished": time.time(),
        "figures": [asdict(one) | {"verdict": one.verdict(share), "spread": round(one.spread, 3)} for one in figures],
    }
    gc.collect()
    return content


def is_done(path: Path, options: Options) -> bool:
    """Return whether a row has a recent, conclusive result on this machine."""
    if options.again or not path.exists():
        return False
    content = read_json(path)
    here = facts(options.device, options.threads)
    return (
        time.time() - content["finished"] < 3600 * options.max_age
        and all(content["facts"][key] == here[key] for key in ("device", "threads", "torch", "transformers"))
        and content["facts"]["texts"] == (options.texts or "bundled")
        and not any(figure["verdict"].startswith("skipped") for figure in content["figures"])
    )


def results_folder(kind: str, options: Options) -> Path:
    """Return the default folder of results. Only those with default settings are stored in the repository."""
    other = ["quick"] if options.quick else []
    other += [options.shape] if options.shape else []
    other += [f"{options.threads}-threads"] if options.threads != Options.threads else []
    return OTHER_RESULTS / "-".join([kind, *other]) if other else RESULTS / kind


def expected_minutes(name: str, folder: Path) -> float:
    """Return the minutes that a row took last time, in this folder or in the stored results."""
    paths = [path for path in (folder / f"{name}.json", RESULTS / "cpu" / f"{name}.json") if path.exists()]
    return read_json(paths[0])["minutes"] if paths else MINUTES


def table(folder: Path) -> str:
    """Format all rows of a folder as Markdown, except those with tables of their own."""
    contents = [read_json(path) for path in folder.glob("*.json")]
    minutes = sum(content["minutes"] for content in contents if content["row"] not in NAMED)
    contents = sorted((c for c in contents if c["row"] not in TABLES), key=lambda c: list(ROWS).index(c["row"]))
    lines = ["| what | encoder or cores | measured | target | |", "|---|---|--:|--:|---|"]
    for figure in (figure for content in contents for figure in content["figures"]):
        sense, bound = figure["target"] or ("", None)
        target = "" if bound is None else f"{_SENSES[sense]} {bound:.4g}"
        value = f"{figure['value']:.3g}" if abs(figure["value"]) < 1000 else f"{figure['value']:,.0f}"
        verdict = "" if figure["verdict"] == "reported" else figure["verdict"]
        lines.append(f"| {figure['what']} | {figure['of']} | {value} {figure['unit']} | {target} | {verdict} |")
    where = sorted({_where(content["facts"]) for content in contents})
    return "\n".join([*where, f"All rows took {minutes:.0f} minutes.", "", *lines]) + "\n"


def flops_table(content: dict[str, Any]) -> str:
    """Format the row of FLOPs as Markdown: recipes by implementations."""
    values = {figure["what"]: figure["value"] for figure in content["figures"]}
    heads = ["published", "ours, full-length batches", "ours, Tatoeba-like lengths"]
    lines = [
        f"{_where(content['facts'])} {content['figures'][0]['of']}; forward GFLOP of a pair; in brackets the milliseconds of "
        "its training step.",
        "",
        f"| recipe | {' | '.join(heads)} |",
        "|---|--:|--:|--:|",
    ]
    for recipe in ("TR", "TR + TLM", "DAP", "DAP, 37k"):
        cells = [f"{values[f'{recipe}, {head}']:.1f}" for head in heads]
        for at, column in enumerate(
            ("published, step at full length", "ours, step at full length", "ours, Tatoeba-like, step")
        ):
            milliseconds = values.get(f"{recipe}, {column}")
            cells[at] += f" ({milliseconds:,.0f})" if milliseconds else ""
        lines.append(f"| {recipe} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


_SENSES = {"<=": "≤", ">=": "≥", "==": "="}


def _where(facts: dict[str, Any]) -> str:
    texts = "the demo's pairs" if facts["texts"] == "bundled" else Path(facts["texts"]).name
    threads = counted(facts["threads"], "thread")
    return f"{facts['date']}: {facts['device']}, {threads} of {facts['cpus']} CPUs, torch {facts['torch']}; texts: {texts}."


def measure_missing(names: list[str], context: Context, options: Options, folder: Path) -> list[str]:
    """Measure the rows without a recent result, and keep each. Returns those that failed."""
    failed, missing = [], [name for name in names if not is_done(folder / f"{name}.json", options)]
    for name in names:
        if name not in missing:
            print(f"{name}: recent result found")
    for at, name in enumerate(missing):
        left = [expected_minutes(one, folder) for one in missing[at:]]
        print(
            f"[{at + 1}/{len(missing)}] {name}: about {left[0]:.1f} of {sum(left):.0f} minutes that are left",
            flush=True,
        )
        torch.manual_seed(0)
        try:
            content = measure(name, context, options)
        except Skipped as reason:
            print(f"{name}: skipped, {reason}")
            continue
        except (RuntimeError, MemoryError, CalledProcessError):  # such as a row that needs too much memory
            traceback.print_exc()
            failed.append(name)
            continue
        path = folder / f"{name}.json"
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(
            f"{name}: {content['minutes']:.1f} minutes, {content['others']:.0%} of the machine used by other processes"
        )
        for figure in content["figures"]:
            print(f"  {figure['what']} ({figure['of']}): {figure['value']:.4g} {figure['unit']}, {figure['verdict']}")
    return failed


def main(argv: list[str]) -> int:
    """Measure the missing rows and write the table."""
    options = HfArgumentParser(Options).parse_args_into_dataclasses(argv)[0]
    torch.set_flush_denormal(True)
    torch.set_num_threads(options.threads)
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
    every = [name for name in ROWS if options.device != "cpu" or name not in NAMED]
    names = every if options.rows == "all" else options.rows.split(",")
    if unknown := set(names) - ROWS.keys():
        raise ValueError(f"Unknown rows: {', '.join(sorted(unknown))}. Available rows: {', '.join(ROWS)}.")
    rounds = min(options.rounds, 2) if options.quick else options.rounds
    shapes = [options.shape] if options.shape else ["small"] if options.quick else ["base", "small"]
    context = Context(options.device, rounds, shapes, options.texts, options.quick, tiny=options.shape == "tiny")
    kind = options.device if options.device == "cpu" else torch.cuda.get_device_name().replace(" ", "-")
    folder = Path(options.results) if options.results else results_folder(kind, options)
    folder.mkdir(parents=True, exist_ok=True)
    failed = measure_missing(names, context, options, folder)
    (folder / "table.md").write_text(table(folder), encoding="utf-8")
    for name, formatted in (("flops", flops_table), ("profile", rates.profile_table)):
        if (folder / f"{name}.json").exists():
            content = read_json(folder / f"{name}.json")
            where = "" if name == "flops" else f"{_where(content['facts'])}\n\n"
            (folder / f"{name}.md").write_text(where + formatted(content), encoding="utf-8")
    if folder == RESULTS / kind:
        write_costs()
    if failed:
        print(f"Failed: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
