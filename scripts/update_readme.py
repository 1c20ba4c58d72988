"""Write the README's results from the reports of runs.

    python scripts/update_readme.py --demo runs/demo/report.json --swahili out/swahili/report.json

    python scripts/update_readme.py --suites runs/evaluation/results.json runs/unprompted/against-*.json

keeps what the tables need of each report under ``scripts/results`` and rewrites the tables; without options it rewrites
them from what is kept. Those of docs/word_alignment.md come from what scripts/word_alignment.py keeps there, those of speed
and memory, there and in docs/scaling.md, from what scripts/benchmarks/run.py keeps.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "scripts" / "results"
BENCHMARKS = ROOT / "scripts" / "benchmarks" / "results"


@dataclass
class Options:
    """Reports to take results from."""

    demo: str | None = field(default=None, metadata={"help": "report.json of `make demo`."})
    swahili: str | None = field(default=None, metadata={"help": "report.json of scripts/swahili.sh."})
    adapted: str | None = field(
        default=None, metadata={"help": "Output folder of `metaphrase adapt`, told of in docs/my-language.md."}
    )
    suites: list[str] = field(
        default_factory=list,
        metadata={
            "help": "results.json of `metaphrase evaluate RELEASE --suite all --baseline starter --data …`, and those of the "
            "same release against the starter without its prompt; each score is shown against the better baseline."
        },
    )
    alignment: str | None = field(default=None, metadata={"help": "alignment.json of scripts/wacse.sh."})
    translation: str | None = field(
        default=None,
        metadata={
            "help": "results.json of trainers/finetune_translation.py with configs/finetune/overfit-translation.yaml."
        },
    )


def keep(report: Path, path: Path) -> None:
    """Keep a report's comparisons and the facts of its run."""
    content = json.loads(report.read_text(encoding="utf-8"))
    run = {key: value for key, value in content["run"].items() if key not in ("log_history", "corpus")}
    for file in run["files"]:
        file.pop("path", None)
    run["command"] = re.sub(r"(?<=\s)/\S*/(?=\S)", "", run["command"])  # where the data lay is nobody's business
    prompts = {name: result["settings"]["prompt"] for name, result in content["before"].items()}
    kept = {"run": run, "comparisons": content["comparisons"], "baseline_prompt": prompts}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def table(content: dict[str, Any]) -> str:
    """A run's facts and its test sets as Markdown."""
    run = content["run"]
    pairs = sum(file["pairs"] for file in run["files"])
    hardware = run["hardware"]
    lines = [
        f"{pairs:,} pairs; {run['steps']} steps of {run['batch_size']} in {run['training_seconds'] / 60:.1f} minutes on "
        f"{hardware['cpus']} {hardware['machine']} cores; seed {run['seed']}. Vocabulary transform: "
        f"{', '.join(run['transforms'].values())}.",
        "",
    ]
    for name, comparison in content["comparisons"].items():
        prompt = content["baseline_prompt"][name]
        lines += [
            f"**{name}** (baseline {f'with the prompt `{prompt}`' if prompt else 'without a prompt'}, the better of the two)",
            "",
            "| language | pairs | before | after | difference | |",
            "|---|--:|--:|--:|--:|---|",
        ]
        rows = dict(comparison["languages"])
        if len(rows) > 1:
            rows["**all**"] = comparison["pooled"]
        for language, row in rows.items():
            low, high = row["interval"]
            count = sum(r["n"] for r in comparison["languages"].values()) if language == "**all**" else row["n"]
            lines.append(
                f"| {language} | {count} | {row['before']:.1f} | {row['after']:.1f} | {row['difference']:+.1f} "
                f"[{low:+.1f}, {high:+.1f}] | {row['verdict']} |"
            )
        lines.append("")
    return "\n".join(lines).rstrip()


def keep_adapted(output: Path, path: Path) -> None:
    """Keep a verdict, without sentences of the corpus, and the facts of its run."""
    verdict = json.loads((output / "verdict.json").read_text(encoding="utf-8"))
    run = json.loads((output / "report.json").read_text(encoding="utf-8"))["run"]
    kept = {key: run[key] for key in ("command", "seed", "steps", "training_seconds", "hardware", "versions")}
    kept["pairs"] = {language: file["pairs"] for file in run["files"] for language in [file["language"]]}
    kept |= {key: verdict[key] for key in ("said", "languages", "plan", "seconds")}
    if verdict["retention"]:
        kept["retention"] = {key: value for key, value in verdict["retention"].items() if key != "languages"}
    path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def adapted_words(content: dict[str, Any]) -> str:
    """A verdict as the command prints it, and what it took."""
    own = ", ".join(f"{content['pairs'][language]:,} of {language}" for language in content["languages"])
    said = "\n".join(content["said"])
    return (
        f"```text\n{said}\n```\n\n"
        f"That is what 5,000 pairs of Swahili news gave (LAFAND-MT, the first of its training split; {own} remained to train "
        f"on): {content['steps']} steps, {content['seconds'] / 60:.0f} minutes in all on {content['hardware']['cpus']} "
        f"{content['hardware']['machine']} cores, seed {content['seed']}, one run."
    )


#: Groups of languages that a table shows, where a test set has them.
GROUPS = ("36", "14", "8", "5", "4")


def keep_suites(results: Sequence[Path], path: Path) -> None:
    """Keep the averages of a suite's scores, for the baseline and for the release, and their tests.

    Args:
        results: What was measured of everything, then of parts against the baseline without its prompt.
        path: File to write.
    """
    content, *others = (json.loads(result.read_text(encoding="utf-8")) for result in results)
    sides = {"before": content["baseline"], "after": content}
    parts = content["parts"]

    def against(name: str) -> dict[str, Any]:
        """The results whose baseline does best; both directions together are asked for a direction alone."""
        decisive = re.sub(r" (xx→en|en→xx)$", " both directions", name).replace("xsim both", "xsim, both")
        there = [one for one in (content, *others) if decisive in one["baseline"]["scores"]]
        sign = -1 if content["scores"][decisive]["lower_is_better"] else 1
        return max(there, key=lambda one: sign * one["baseline"]["scores"][decisive]["average"]["score"])

    kept = {
        "models": {side: result["model"] for side, result in sides.items()},
        "hashes": {side: result["model_hash"] for side, result in sides.items()},
        "scores": {
            name: {
                "measure": one["measure"],
                "protocol": one["protocol"],
                "lower_is_better": one["lower_is_better"],
                "languages": len(one["languages"]),
                **{
                    side: {
                        "average": found["average"],
                        **found["groups"],
                        "unlearned": sum(row.get("learned") is False for row in found["languages"].values()),
                    }
                    for side, result in {"before": best["baseline"], "after": content}.items()
                    if (found := result["scores"].get(name)) is not None
                },
                "unprompted": best is not content,
                "test": best["comparisons"].get(name, {}).get("pooled"),
            }
            for name, one in content["scores"].items()
            for best in [against(name)]
        },
        "skipped": content["skipped"],
        "failed": content["failed"],
        "minutes": {
            side: round(sum(part["seconds"] for part in result["parts"].values()) / 60)
            for side, result in sides.items()
        },
        "seed": content["settings"]["seed"],
        "hardware": next(iter(parts.values()))["hardware"],
        "versions": content["versions"],
    }
    path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def suites_table(content: dict[str, Any]) -> str:
    """A row for each score: the baseline, the release, and the test between them where there is one."""
    scores = content["scores"]
    sides = ("before", "after")
    lines = ["| benchmark | measure | starter | release | release − starter | |", "|---|---|--:|--:|--:|---|"]

    def shown(one: dict[str, Any], side: str) -> str:
        if side not in one:
            return ""
        nothing = one[side].get("unlearned", 0) == max(one["languages"], 1)
        return f"{one[side]['average']['score']:.1f}{' †' if nothing else ''}{mark(one, side)}"

    def mark(one: dict[str, Any], side: str) -> str:
        return " ‡" if side == "before" and one["unprompted"] else ""

    def add(label: str, measure: str, cells: list[str], test: dict[str, Any] | None) -> None:
        found = "| |"
        if test is not None:
            low, high = test["interval"]
            found = f"{test['difference']:+.1f} [{low:+.1f}, {high:+.1f}] | {test['verdict']} |"
        lines.append(f"| {label} | {measure} | {' | '.join(cells)} | {found}")

    for name, one in scores.items():
        test_set, _, kind = name.partition(" ")
        measure = f"{one['measure']}{', lower is better' if one['lower_is_better'] else ''}"
        if kind.endswith(("xx→en", "en→xx")):
            continue
        if kind != "both directions":
            label = f"{name}, mean of {one['languages']}" if one["languages"] > 1 else name
            add(label, measure, [shown(one, side) for side in sides], one["test"])
            continue
        ways = [scores[f"{test_set} xx→en"], scores[f"{test_set} en→xx"]]
        for group in ("average", *(group for group in GROUPS if group in one["after"])):
            if group == str(one["languages"]):
                continue
            cells = [
                " / ".join(f"{way[side][group]['score']:.1f}" for way in ways) + mark(one, side) if side in one else ""
                for side in sides
            ]
            label = (
                f"{test_set}, {one['languages']} language{'s' * (one['languages'] > 1)}"
                if group == "average"
                else f"{test_set}, the {group}"
            )
            add(label, f"{measure}, xx→en / en→xx", cells, one["test"] if group == "average" else None)
    if any("†" in line for line in lines):
        lines += ["", "† no better than the commonest answer throughout: nothing was learned at this scale."]
    if any("‡" in line for line in lines):
        lines += ["", "‡ without its prompt (`query: `), with which it does worse: a baseline is taken at its best."]
    minutes = content["minutes"]
    hardware = content["hardware"]
    lines += [
        "",
        f"`metaphrase evaluate {content['models']['after']} --suite all --baseline starter --data …`: one run each, seed "
        f"{content['seed']}; {minutes['before']} minutes for the starter and {minutes['after']} for the release by the "
        f"clock, beside other work ({hardware_words(hardware)}). Differences are between the means over languages, of both "
        "directions, with 95 % paired bootstrap intervals; fine-tuned scores are compared item by item.",
        *(f"Left out: {name}, {reason}." for name, reason in content["skipped"].items()),
    ]
    return "\n".join(lines)


def hardware_words(hardware: Any) -> str:
    """Hardware in words."""
    return (
        ", ".join(f"{key} {value}" for key, value in hardware.items()) if isinstance(hardware, dict) else str(hardware)
    )


def keep_translation(report: Path, path: Path) -> None:
    """Keep the results of a translation run, with the names of its data instead of their places, and a few examples."""
    content = json.loads(report.read_text(encoding="utf-8"))
    for split in ("train", "test"):
        content["settings"][split] = Path(content["settings"][split]).name
    content["examples"] = content["examples"][:3]
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def translation_words(content: dict[str, Any]) -> str:
    """What came of learning pairs by heart."""
    settings, bleu = content["settings"], content["signatures"]["bleu"]
    (_, first), *_, (_, last) = content["loss"]
    hardware = hardware_words(content["hardware"])
    return (
        f"Of {settings['limit_train']} pairs of {settings['train']} ({settings['language']}–en), {content['steps']:,} steps: "
        f"the loss falls from {first:.1f} to {last:.2g}, and the pairs are translated again with BLEU "
        f"{content['metrics']['bleu']:.1f} (`{bleu}`). A decoder of {settings['decoder_layers']} layers, encoder frozen, "
        f"seed {content['seed']}, one run; {content['training_seconds'] / 60:.0f} minutes ({hardware})."
    )


def alignment_table(content: dict[str, Any]) -> str:
    """How fast a corpus was aligned, and how many of its words have a link."""
    cells = (
        content["files"][0]["file"],
        content["aligner"],
        f"{content['pairs']:,}",
        f"{content['training_seconds']:.0f} s + {content['seconds']:.0f} s",
        f"{content['pairs_per_second']:,.0f}",
        f"{content['share_source_linked']:.1%}",
        f"{content['share_target_linked']:.1%}",
    )
    return "\n".join(
        [
            "| corpus | aligner | pairs | training + aligning | pairs/s | source words linked | target words linked |",
            "|---|---|--:|--:|--:|--:|--:|",
            f"| {' | '.join(cells)} |",
            "",
            f"`scripts/wacse.sh`, one run on {content['cpus']} cores.",
        ]
    )


def scores(row: dict[str, Any]) -> str:
    """Cells of a row of measures."""
    low, high = row["aer_interval"]
    measures = " | ".join(f"{row[name]:.3f}" for name in ("precision", "recall", "f1"))
    return f"{row['aer']:.3f} [{low:.3f}, {high:.3f}] | {measures} | {row['pairs_per_second']:,.0f}"


def is_default(row: dict[str, Any], section: dict[str, Any]) -> bool:
    """Whether a row was measured at its aligner's defaults."""
    return all(row[name] == value for name, value in section["default"].items())


def word_alignment_tables(content: dict[str, Any]) -> dict[str, str]:
    """The tables of docs/word_alignment.md by their markers."""
    measures = "AER [95 %] | precision | recall | F1 | pairs/s |"
    gold, aligners = content["gold"], content["aligners"]
    summary = [
        f"{gold['name']}: {gold['pairs']} pairs, {gold['links']:,} links. Every aligner at its defaults.",
        "",
        f"| aligner | settings | {measures}",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    heuristics = [f"| aligner | heuristic | {measures}", "|---|---|--:|--:|--:|--:|--:|"]
    facts = []
    for name in sorted(aligners):
        section = aligners[name]
        learned = ""
        if corpus := section.get("corpus"):
            learned = (
                f", trained on {section['trained_pairs']:,} pairs ({corpus['file']} and the test sentences) "
                f"in {section['training_seconds']:,.0f} s"
            )
        facts.append(f"- {name}: `{section['command']}`{learned}; {section['seconds']:,.0f} s in all.")
        for row in section["rows"]:
            settings = ", ".join(f"{key.replace('_', ' ')} {row[key]}" for key in section["default"])
            if is_default(row, section):
                summary.append(f"| {name} | {settings} | {scores(row)} |")
            if "heuristic" in row:
                heuristics.append(f"| {name} | {row['heuristic']} | {scores(row)} |")
    tables = {
        "word_alignment": "\n".join([*summary, "", *facts]),
        "word_alignment_heuristics": "\n".join(heuristics),
    }
    if section := aligners.get("embedding"):
        settings = sorted({(row["level"], row["method"]) for row in section["rows"]})
        layers = ["| layer | " + " | ".join(f"{level}, {method}" for level, method in settings) + " |"]
        layers.append("|--:|" + "--:|" * len(settings))
        for layer in sorted({row["layer"] for row in section["rows"]}):
            cells = []
            for level, method in settings:
                key = {"layer": layer, "level": level, "method": method}
                row = next(row for row in section["rows"] if key.items() <= row.items())
                cells.append(f"**{row['aer']:.3f}**" if is_default(row, section) else f"{row['aer']:.3f}")
            layers.append(f"| {layer} | {' | '.join(cells)} |")
        tables["word_alignment_layers"] = "\n".join(layers)
    return tables


def benchmark_tables(folder: Path) -> dict[str, str]:
    """The tables of speed and memory by their markers."""
    files = {"bench": "cpu/table.md", "flops": "cpu/flops.md", "costs": "costs.md", "bench-gpu": "NVIDIA*/table.md"}
    found = {name: sorted(folder.glob(pattern)) for name, pattern in files.items()}
    return {name: paths[0].read_text(encoding="utf-8").rstrip() for name, paths in found.items() if paths}


def fill(path: Path, tables: dict[str, str]) -> None:
    """Rewrite what stands between a file's markers."""
    text = path.read_text(encoding="utf-8")
    for name, content in tables.items():
        block = f"<!-- {name} -->\n{content}\n<!-- /{name} -->"
        text = re.sub(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _, block=block: block, text, flags=re.DOTALL)
    path.write_text(text, encoding="utf-8")


def main(argv: list[str]) -> None:
    """Keep new results, then rewrite the tables."""
    parser = HfArgumentParser(Options)
    options = parser.parse_args_into_dataclasses(argv)[0]
    tables = {}
    for name in ("demo", "swahili"):
        if report := getattr(options, name):
            keep(Path(report), RESULTS / f"{name}.json")
        if (RESULTS / f"{name}.json").exists():
            tables[name] = table(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))
    adapted = RESULTS / "adapt.json"
    if options.adapted:
        keep_adapted(Path(options.adapted), adapted)
    if adapted.exists():
        words = adapted_words(json.loads(adapted.read_text(encoding="utf-8")))
        fill(ROOT / "docs" / "my-language.md", {"adapted": words})
    measured_suites = RESULTS / "suites.json"
    if options.suites:
        keep_suites([Path(file) for file in options.suites], measured_suites)
    if measured_suites.exists():
        tables["suites"] = suites_table(json.loads(measured_suites.read_text(encoding="utf-8")))
    kept = RESULTS / "alignment.json"
    if options.alignment:
        measured = json.loads(Path(options.alignment).read_text(encoding="utf-8")) | {"cpus": os.cpu_count()}
        kept.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    if kept.exists():
        tables["alignment"] = alignment_table(json.loads(kept.read_text(encoding="utf-8")))
    translated = RESULTS / "translation_overfit.json"
    if options.translation:
        keep_translation(Path(options.translation), translated)
    if translated.exists():
        fill(
            ROOT / "docs" / "evaluation.md",
            {"translation": translation_words(json.loads(translated.read_text("utf-8")))},
        )
    tables |= benchmark_tables(BENCHMARKS)
    fill(ROOT / "README.md", tables)
    fill(ROOT / "docs" / "scaling.md", tables)
    aligned = RESULTS / "word_alignment.json"
    if aligned.exists():
        content = json.loads(aligned.read_text(encoding="utf-8"))
        fill(ROOT / "docs" / "word_alignment.md", word_alignment_tables(content))


if __name__ == "__main__":
    main(sys.argv[1:])
