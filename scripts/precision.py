"""Compare training in float32 and in bfloat16: quality on dev data over seeds.

    python scripts/precision.py --stsb STSB_FOLDER --mlqa MLQA_FOLDER
    python scripts/precision.py --stsb STSB_FOLDER --mlqa MLQA_FOLDER --keep

The demo's recipe is trained on the demo's bitext in each precision with each seed. It is measured on dev data only, without
a prompt, as the demo releases it: merged with the starter, without directions of language identity. The measures are those
of ``scripts/dev_measures.py``. Results are kept in the output folder, so that an interrupted program resumes with the
missing runs. ``--keep`` writes ``scripts/results/precision.json`` and the table of docs/speed.md, unless the stored results
have more seeds or steps.
"""

from __future__ import annotations

import shutil
import statistics
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ablations import trained
from dev_measures import COLUMNS, DevData, kept_embeddings, work_settings
from forgetting import interpolated
from stored_results import check_settings, fill, hardware_words, markdown, refuse_less, reports_errors
from transformers import HfArgumentParser

from metaphrase.encoders.loading import load_encoder
from metaphrase.evaluation.seeds import difference
from metaphrase.exceptions import UsageError
from metaphrase.io.configuration import option
from metaphrase.io.environment import hardware, has_bfloat16_instructions, prepare_process
from metaphrase.io.files import read_json, write_json
from metaphrase.training.configuration import RunConfig
from metaphrase.training.demo import demo_settings

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "scripts" / "results" / "precision.json"
PAGE = ROOT / "docs" / "speed.md"

#: Values of the option ``bf16``.
SETTINGS = {"float32": False, "bfloat16": True}


@dataclass
class Options:
    """Options of the program."""

    stsb: Path = option(help="Folder of STS-B in several languages.")
    mlqa: Path = option(help="Folder of MLQA's dev set, dev-xx.json.gz.")
    output: Path = option(Path("runs/precision"), "Folder of the results.")
    seeds: list[int] = option([1, 2, 3])
    steps: int = option(demo_settings()["max_steps"])
    keep: bool = option(False, "Write scripts/results/precision.json and docs/speed.md.")


def measured(name: str, seed: int, steps: int, data: DevData, output: Path) -> dict[str, Any]:
    """The row of a setting and a seed; it is measured if missing."""
    path = output / f"{name}-{steps}-{seed}.json"
    if path.is_file():
        return dict(read_json(path))
    original, work = load_encoder("starter"), path.with_suffix("")
    before = kept_embeddings(output / "starter.npz", lambda: data.embed(original))
    shutil.rmtree(work, ignore_errors=True)  # an interrupted run starts over
    settings = {key: value for key, value in demo_settings().items() if key not in ("merge", "debias", "test")}
    settings |= {"bf16": SETTINGS[name], "seed": seed, "max_steps": steps, "output_dir": str(work)}
    config = RunConfig(**settings, disable_tqdm=True, report_to="none")
    model, _, facts = trained(config, work, output / "links")
    weights = {key: weight.detach() for key, weight in model.named_parameters() if weight.requires_grad}
    release = demo_settings()
    after = data.embed(interpolated(original, weights, release["merge"]))
    row = {
        "setting": name,
        "seed": seed,
        "steps": steps,
        "scores": data.measures(after, before, release["debias"]),
        "hardware": hardware(),
        "versions": facts["versions"],
    }
    write_json(path, row)
    shutil.rmtree(work, ignore_errors=True)
    return row


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format means over seeds, and paired differences to float32, as Markdown."""
    first, *others = dict.fromkeys(row["setting"] for row in rows)
    seeds = sorted({row["seed"] for row in rows})

    def scores_by_seed(setting: str, key: str) -> list[float]:
        scores = {row["seed"]: row["scores"][key] for row in rows if row["setting"] == setting}
        return [scores[seed] for seed in seeds]

    cells = [
        [setting, *(f"{statistics.mean(scores_by_seed(setting, key)):.1f}" for key in COLUMNS)]
        for setting in (first, *others)
    ]
    for setting in others:
        differences = [difference(scores_by_seed(first, key), scores_by_seed(setting, key)) for key in COLUMNS]
        cells.append(
            [f"{setting} − {first}", *(f"{change['mean']:+.1f} ± {change['half']:.1f}" for change in differences)]
        )
    lines = [
        f"{rows[0]['steps']} steps of the demo's recipe, seeds {', '.join(map(str, seeds))}; "
        f"{hardware_words(rows[0]['hardware'])}. Differences from {first} are means over the same seeds, with 95 % intervals "
        "(Student's t).",
        "",
        *markdown(["setting", *COLUMNS.values()], "lr", cells),
    ]
    return "\n".join(lines)


def covers(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The seeds and steps of results."""
    return {"seeds": {row["seed"] for row in rows}, "steps": max(row["steps"] for row in rows)}


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Train and measure what is missing, and write the results; return the exit status."""
    parser = HfArgumentParser(Options, description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    (options,) = parser.parse_args_into_dataclasses(argv)
    if len(options.seeds) < 2:
        parser.error("a comparison needs at least two seeds")
    if options.keep:
        refuse_less(KEPT, covers, covers([{"seed": seed, "steps": options.steps} for seed in options.seeds]))
    prepare_process()
    if not has_bfloat16_instructions() and not torch.cuda.is_available():
        raise UsageError("This machine has no instructions for bfloat16.")
    data = DevData(options.stsb, options.mlqa)
    paths = ("corpus", "test", "retention", "output_dir")
    settings = {key: value for key, value in demo_settings().items() if key not in paths}
    check_settings(options.output, settings | work_settings(options.stsb, options.mlqa))
    rows = [measured(name, seed, options.steps, data, options.output) for seed in options.seeds for name in SETTINGS]
    print(table(rows))
    if options.keep:
        write_json(KEPT, rows)
        fill(PAGE, {"bfloat16": table(rows)})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
