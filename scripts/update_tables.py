"""Write the tables of README.md, docs/ and the model cards from results files.

    python scripts/update_tables.py --demo runs/demo/report.json --swahili out/swahili/report.json
    python scripts/update_tables.py --suites runs/evaluation/results.json

An option stores the results of a run under ``scripts/results``; every call then rewrites the tables of all pages from the
stored results. Stored results are not replaced by results of fewer languages, scores or pairs: delete their file first. The
tables of docs/word_alignment.md come from the results of ``scripts/word_alignment.py``, the tables of docs/speed.md and
docs/scaling.md from the results of ``scripts/benchmarks/run.py`` and ``mining_scale.py`` there.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from stored_results import (
    fill,
    hardware_words,
    markdown,
    reports_errors,
    without_folders,
    write_results,
)
from suite_tables import (
    durations_table,
    headline_table,
    keep_durations,
    keep_suites,
    sib200_table,
    suites_table,
    xsimpp_table,
)
from transformers import HfArgumentParser

from metaphrase.evaluation.compare import difference_shown, verdict_shown
from metaphrase.io.configuration import option
from metaphrase.io.environment import cores
from metaphrase.io.files import read_json

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "scripts" / "results"
BENCHMARKS = ROOT / "scripts" / "benchmarks" / "results"
CARDS = ROOT / "model_cards"


@dataclass
class Options:
    """New results to store; without options, the tables are rewritten from the stored results."""

    demo: str | None = option(None, "report.json of `make demo`.")
    swahili: str | None = option(None, "report.json of scripts/swahili.sh.")
    adapted: list[str] = option([], "Output folders of `metaphrase adapt` (scripts/my_language.sh).")
    suites: list[str] = option(
        [],
        "results.json of `metaphrase evaluate RELEASE --suite all --baseline starter@wheel --data …`, or several such "
        "files, of other suites or other parts of the data, with the same two encoders.",
    )
    dap_suites: list[str] = option(
        [], "The same for the release of `metaphrase demo --recipe dap --vocabulary english`."
    )
    timed: list[str] = option(
        [], "results.json of `metaphrase evaluate … --suite all` and the like, for the durations of suites."
    )
    exports: list[str] = option(
        [],
        "Outputs of `metaphrase export starter --languages … --json`, in the order of the columns of the table.",
    )
    alignment: str | None = option(None, "alignment.json of scripts/wacse.sh.")
    translation: str | None = option(
        None, "results.json of trainers/finetune_translation.py with configs/finetune/overfit-translation.yaml."
    )


#: Keys of a guard that are stored.
_GUARD = ("before", "after", "difference", "interval", "n", "verdict", "limit")


def keep_report(report: Path, path: Path) -> None:
    """Store the comparisons of a report and the facts of its run."""
    content = read_json(report)
    run = {key: value for key, value in content["run"].items() if key not in ("log_history", "corpus", "settings")}
    for file in run["files"]:
        file.pop("path", None)
    run["command"] = without_folders(run["command"])
    analysis = content.get("analysis", {})
    guards = {}
    for name, guard in analysis.get("retention", {}).items():
        pooled = guard["pooled"]
        title = f"{pooled['languages']} other languages ({name})"
        guards[title] = pooled | {"verdict": guard["verdict"], "limit": guard["limit"]}
    for name, guard in analysis.get("abilities", {}).items():
        guards[f"{name}, {len(guard['languages'])} languages"] = {key: guard[key] for key in _GUARD}
    results = {
        "run": run,
        "comparisons": content["comparisons"],
        "baseline_prompt": {name: result["settings"]["prompt"] for name, result in content["before"].items()},
        "guards": guards,
    }
    write_results(
        path, results, lambda stored: {"test sets": set(stored["comparisons"]), "steps": stored["run"]["steps"]}
    )


def report_table(content: dict[str, Any]) -> str:
    """Format a run's facts and its test sets as Markdown."""
    run = content["run"]
    pairs = sum(file["pairs"] for file in run["files"])
    lines = [
        f"One run with seed {run['seed']}: {pairs:,} training pairs, {run['steps']} steps of {run['batch_size']} pairs in "
        f"{run['training_seconds'] / 60:.1f} minutes on {cores(run['hardware'])}.",
        "",
    ]
    for name, comparison in content["comparisons"].items():
        prompt = content["baseline_prompt"][name]
        setting = f"with its prompt `{prompt}`" if prompt else "without its prompt"
        lines += [f"**{name}** (baseline measured {setting}, where it scores higher)", ""]
        rows = dict(comparison["languages"])
        if len(rows) > 1:
            rows["**all**"] = comparison["pooled"] | {"n": sum(row["n"] for row in rows.values())}
        cells = [[language, row["n"], *change_cells(row), verdict_shown(row)] for language, row in rows.items()]
        lines += [*markdown(["language", "pairs", "before", "after", "difference", ""], "lrrrrl", cells), ""]
    if guards := content["guards"]:
        heads = ["measure", "items", "before", "after", "difference", "red line", ""]
        cells = [
            [name, row["n"], *change_cells(row), f"{-row['limit']:+g}", row["verdict"]] for name, row in guards.items()
        ]
        lines += ["**Retention**", "", *markdown(heads, "lrrrrrl", cells)]
    return "\n".join(lines).rstrip()


def change_cells(row: dict[str, Any]) -> list[str]:
    """Format the scores before and after, and their difference."""
    return [f"{row['before']:.1f}", f"{row['after']:.1f}", difference_shown(row)]


def keep_adapted(outputs: Sequence[Path], path: Path) -> None:
    """Store verdicts and the facts of their runs, without sentences of the corpora."""
    runs = []
    for output in outputs:
        verdict = read_json(output / "verdict.json")
        facts = read_json(output / "report.json")["run"]
        run = {key: facts[key] for key in ("seed", "steps", "training_seconds", "hardware", "versions")}
        run["pairs"] = {file["language"]: file["pairs"] for file in facts["files"]}
        run |= {key: verdict[key] for key in ("verdict", "languages", "plan", "seconds")}
        if verdict["retention"]:
            omitted = ("languages", "models")  # the latter name the output folder
            run["retention"] = {key: value for key, value in verdict["retention"].items() if key not in omitted}
        runs.append(run)
    write_results(path, runs, lambda runs: {"languages": {language for run in runs for language in run["languages"]}})


def adapted_words(runs: Sequence[dict[str, Any]]) -> str:
    """Format verdicts as the command prints them, with the cost of each run."""
    paragraphs = []
    for run in runs:
        pairs = ", ".join(f"{run['pairs'][language]:,} pairs of {language}" for language in run["languages"])
        verdict = "\n".join(run["verdict"])
        paragraphs += [
            f"```text\n{verdict}\n```",
            f"{pairs} were used for training: seed {run['seed']}, {run['steps']} steps, {run['seconds'] / 60:.0f} minutes in "
            f"total on {cores(run['hardware'])}.",
        ]
    return "\n\n".join(paragraphs)


def keep_exports(outputs: Sequence[Path], path: Path) -> None:
    """Store the sizes and scores of exported encoders."""
    exports = []
    for content in map(read_json, outputs):
        options = {key: content["options"][key] for key in ("languages", "layers")}
        facts = {key: content[key] for key in ("changes", "sizes", "languages", "settings", "versions")}
        exports.append({"options": options} | facts)
    write_results(path, {"exports": exports}, lambda stored: {"exports": len(stored["exports"])})


def exports_table(content: dict[str, Any]) -> str:
    """Format sizes and scores of the starter and of exported encoders as Markdown."""
    exports = content["exports"]
    rows = []
    for label, name, number_format in (
        ("MB on disk", "megabytes", ".0f"),
        ("pieces", "pieces", ","),
        ("layers", "layers", ""),
    ):
        sizes = [exports[0]["sizes"][name]["before"], *(export["sizes"][name]["after"] for export in exports)]
        rows.append([label, *(format(size, number_format) for size in sizes)])
    for language, starter in exports[0]["languages"].items():
        cells = []
        for export in exports:
            row = export["languages"][language]
            cells.append(f"{row['after']:.1f} ({difference_shown(row)}, {verdict_shown(row)})")
        rows.append([f"retrieval, {language}, {starter['n']} pairs", f"{starter['before']:.1f}", *cells])
    columns = []
    for export in exports:
        options = [f"--{key} {as_words(value)}" for key, value in export["options"].items() if value]
        columns.append(f"`{' '.join(options)}`")
    return "\n".join(markdown(["", "starter", *columns], "lr", rows))


def as_words(value: Any) -> str:
    """Format the value of an option."""
    return " ".join(value) if isinstance(value, list) else str(value)


def keep_translation(report: Path, path: Path) -> None:
    """Store the results of a translation run with a few examples, and with file names instead of paths."""
    content = read_json(report)
    for split in ("train", "test"):
        content["settings"][split] = Path(content["settings"][split]).name
    content["examples"] = content["examples"][:3]
    write_results(path, content, lambda stored: {"steps": stored["steps"]})


def translation_words(content: dict[str, Any]) -> str:
    """Describe the overfitting check of the translation program."""
    settings, bleu = content["settings"], content["signatures"]["bleu"]
    (_, first), *_, (_, last) = content["loss"]
    hardware = hardware_words(content["hardware"])
    return (
        f"{settings['limit_train']} pairs of {settings['train']} ({settings['language']}–en), {content['steps']:,} steps: "
        f"the loss falls from {first:.1f} to {last:.2g}, and the training pairs are translated with BLEU "
        f"{content['metrics']['bleu']:.1f} (`{bleu}`). Frozen encoder, decoder with {settings['decoder_layers']} layers, one "
        f"run with seed {content['seed']}, {content['training_seconds'] / 60:.0f} minutes ({hardware})."
    )


def alignment_table(content: dict[str, Any]) -> str:
    """Format the speed of an aligner on a corpus, and the share of words it linked."""
    heads = ["corpus", "aligner", "pairs", "training + aligning", "pairs/s"]
    heads += ["source words linked", "target words linked"]
    cells = (
        content["files"][0]["file"],
        content["aligner"],
        f"{content['pairs']:,}",
        f"{content['training_seconds']:.0f} s + {content['seconds']:.0f} s",
        f"{content['pairs_per_second']:,.0f}",
        f"{content['share_source_linked']:.1%}",
        f"{content['share_target_linked']:.1%}",
    )
    caption = f"One run of `scripts/wacse.sh` on {content['cpus']} cores."
    return "\n".join([*markdown(heads, "llr", [cells]), "", caption])


def trained_aligner_table(content: dict[str, Any]) -> str:
    """Format the error of a trained word aligner after each round, on each gold set, with default and tuned settings."""
    parts = list(dict.fromkeys(row["part"] for row in content["rows"]))
    rows = []
    for encoder in dict.fromkeys(row["encoder"] for row in content["rows"]):
        by_part = {row["part"]: row for row in content["rows"] if row["encoder"] == encoder}
        cells = [f"{row['aer']:.1f} [{row['interval'][0]:.1f}, {row['interval'][1]:.1f}]" for row in by_part.values()]
        rows.append([encoder, *cells])
    # Errors of the links of other aligners, which are in files ``PART.ALIGNER``.
    peers: dict[str, dict[str, float]] = {}
    for row in content["rows"]:
        for file, error in row["peers"].items():
            aligner = file.partition(".")[2]
            peers.setdefault(aligner, {})[row["part"]] = error
    for aligner, errors in peers.items():
        rows.append(
            [aligner.removesuffix(".out"), *(f"{errors[part]:.1f}" if part in errors else "" for part in parts)]
        )
    settings = content["settings"]
    steps = ", ".join(str(training["steps"]) for training in content["rounds"])
    caption = (
        f"`scripts/train_aligner.py`: {content['layers']} layers, {settings['pairs']:,} pairs of each of "
        f"{', '.join(settings['languages'])} with English, rounds of {steps} steps. One run with seed {settings['seed']}, "
        f"{hardware_words(content['hardware'])}. Intervals are over sentences."
    )
    return "\n".join([*markdown(["encoder", *parts], "lr", rows), "", caption])


def aligner_cells(row: dict[str, Any]) -> list[str]:
    """Format the measures of an aligner, which are fractions, in percent, and its speed."""
    low, high = row["aer_interval"]
    error = f"{100 * row['aer']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
    measures = [f"{100 * row[name]:.1f}" for name in ("precision", "recall", "f1")]
    return [error, *measures, f"{row['pairs_per_second']:,.0f}"]


def is_default(row: dict[str, Any], section: dict[str, Any]) -> bool:
    """Return whether a row was measured with the default settings of its aligner."""
    return all(row[name] == value for name, value in section["default"].items())


def word_alignment_tables(content: dict[str, Any]) -> dict[str, str]:
    """Return the tables of docs/word_alignment.md by marker."""
    measures = ["AER [95 %]", "precision", "recall", "F1", "pairs/s"]
    gold, aligners = content["gold"], content["aligners"]
    default_rows, heuristic_rows, facts = [], [], []
    for name, section in sorted(aligners.items()):
        facts.append(_aligner_facts(name, section))
        for row in section["rows"]:
            if is_default(row, section):
                settings = ", ".join(f"{key.replace('_', ' ')} {row[key]}" for key in section["default"])
                default_rows.append([name, settings, *aligner_cells(row)])
            if "heuristic" in row:
                heuristic_rows.append([name, row["heuristic"], *aligner_cells(row)])
    about = f"{gold['name']}: {gold['pairs']} pairs, {gold['links']:,} links. Every aligner uses its default settings."
    lines = [about, "", *markdown(["aligner", "settings", *measures], "llr", default_rows), "", *facts]
    tables = {
        "word_alignment": "\n".join(lines),
        "word_alignment_heuristics": "\n".join(markdown(["aligner", "heuristic", *measures], "llr", heuristic_rows)),
    }
    if "embedding" in aligners:
        tables["word_alignment_layers"] = _layer_table(aligners["embedding"])
    return tables


def _aligner_facts(name: str, section: dict[str, Any]) -> str:
    """Format the command of an aligner, and how long it took, as a list item."""
    training = ""
    if corpus := section.get("corpus"):
        training = (
            f", trained on {section['trained_pairs']:,} pairs ({corpus['file']} and the test sentences) "
            f"in {section['training_seconds']:,.0f} s"
        )
    return f"- {name}: `{section['command']}`{training}; {section['seconds']:,.0f} s in total."


def _layer_table(section: dict[str, Any]) -> str:
    """Format the error of the embedding aligner by layer, level and method; the default is bold."""
    rows = {(row["layer"], row["level"], row["method"]): row for row in section["rows"]}
    layers = sorted({layer for layer, _, _ in rows})
    settings = sorted({(level, method) for _, level, method in rows})
    lines = []
    for layer in layers:
        cells = [layer]
        for level, method in settings:
            row = rows[layer, level, method]
            error = f"{100 * row['aer']:.1f}"
            cells.append(f"**{error}**" if is_default(row, section) else error)
        lines.append(cells)
    heads = ["layer", *(f"{level}, {method}" for level, method in settings)]
    return "\n".join(markdown(heads, "r", lines))


def benchmark_tables(folder: Path) -> dict[str, str]:
    """Return the tables of speed and memory by marker."""
    patterns = {
        "bench": "cpu/table.md",
        "flops": "cpu/flops.md",
        "costs": "costs.md",
        "profile": "cpu/profile.md",
        "mining-scale": "mining-scale.md",
        "mining-peers": "mining-peers.md",
    }
    tables = {}
    for marker, pattern in patterns.items():
        if paths := sorted(folder.glob(pattern)):
            tables[marker] = paths[0].read_text(encoding="utf-8").rstrip()
    return tables


def store(options: Options) -> None:
    """Store new results under ``scripts/results``."""
    for name in ("demo", "swahili"):
        if report := getattr(options, name):
            keep_report(Path(report), RESULTS / f"{name}.json")
    if options.adapted:
        keep_adapted([Path(output) for output in options.adapted], RESULTS / "adapt.json")
    for name, files in (("suites", options.suites), ("suites-dap", options.dap_suites)):
        if files:
            keep_suites([Path(file) for file in files], RESULTS / f"{name}.json")
    if options.timed:
        keep_durations([Path(file) for file in options.timed], RESULTS / "durations.json")
    if options.exports:
        keep_exports([Path(file) for file in options.exports], RESULTS / "export.json")
    if options.alignment:
        measured = read_json(options.alignment) | {"cpus": os.cpu_count()}
        write_results(RESULTS / "alignment.json", measured, lambda stored: {"pairs": stored["pairs"]})
    if options.translation:
        keep_translation(Path(options.translation), RESULTS / "translation_overfit.json")


def stored_tables() -> dict[str, str]:
    """Return every table that can be written from stored results, by marker."""
    formats = {
        "demo": ("demo", report_table),
        "swahili": ("swahili", report_table),
        "adapted": ("adapt", adapted_words),
        "results": ("suites", headline_table),
        "suites": ("suites", suites_table),
        "sib200": ("suites", sib200_table),
        "xsimpp": ("suites", xsimpp_table),
        "suites-dap": ("suites-dap", partial(suites_table, described=False)),
        "durations": ("durations", durations_table),
        "exports": ("export", exports_table),
        "alignment": ("alignment", alignment_table),
        "trained-aligner": ("word_aligner", trained_aligner_table),
        "translation": ("translation_overfit", translation_words),
    }
    tables = {}
    for marker, (name, format_table) in formats.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            tables[marker] = format_table(read_json(path))
    if (RESULTS / "word_alignment.json").exists():
        tables |= word_alignment_tables(read_json(RESULTS / "word_alignment.json"))
    return tables | benchmark_tables(BENCHMARKS)


def fill_pages(pages: Sequence[Path]) -> None:
    """Rewrite the tables of pages from stored results. A model card has only results of its own weights."""
    tables, suites = stored_tables(), RESULTS / "suites.json"
    measured = read_json(suites)["hashes"]["after"] if suites.exists() else None
    for page in pages:
        hashes = measured_as(page)
        is_own = hashes is None or measured in hashes
        fill(page, tables if is_own else tables | {"suites": "The suites have not been measured with these weights."})


def measured_as(page: Path) -> list[str] | None:
    """Return the digests of the encoders whose results a model card may have; None if the page is not a model card."""
    head = re.match(r"---\n(.*?)^---$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return None if head is None else yaml.safe_load(head[1])["metaphrase"].get("measured_as", [])


@reports_errors
def main(argv: list[str]) -> int:
    """Store new results, then rewrite the tables of all pages."""
    store(HfArgumentParser(Options).parse_args_into_dataclasses(argv)[0])
    cards = [*CARDS.glob("*.md"), *ROOT.glob("models/*/*/README.md")]
    fill_pages([ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *cards])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
