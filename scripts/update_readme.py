"""Write the README's results from the reports of runs.

    python scripts/update_readme.py --demo runs/demo/report.json --swahili out/swahili/report.json

keeps what the tables need of each report under ``scripts/results`` and rewrites the tables; without options it rewrites
them from what is kept.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "scripts" / "results"


@dataclass
class Options:
    """Reports to take results from."""

    demo: str | None = field(default=None, metadata={"help": "report.json of `make demo`."})
    swahili: str | None = field(default=None, metadata={"help": "report.json of scripts/swahili.sh."})


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


def main(argv: list[str]) -> None:
    """Keep new results, then rewrite the tables."""
    parser = HfArgumentParser(Options)
    options = parser.parse_args_into_dataclasses(argv)[0]
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    for name in ("demo", "swahili"):
        if report := getattr(options, name):
            keep(Path(report), RESULTS / f"{name}.json")
        if (RESULTS / f"{name}.json").exists():
            content = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
            block = f"<!-- {name} -->\n{table(content)}\n<!-- /{name} -->"
            text = re.sub(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _, block=block: block, text, flags=re.DOTALL)
    readme.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
