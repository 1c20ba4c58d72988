"""Add what two runs changed, with several weights, and measure each sum on dev data; the table of docs/merging.md.

    python scripts/added_runs.py RUN RUN --dev FOLDER --stsb STSB_FOLDER --mlqa MLQA_FOLDER --keep

Both runs start from the starter and are released as trained: ``--merge 1``, without ``--debias``. From each sum, several
numbers of directions of language identity are projected out. The measures are those of ``scripts/dev_measures.py``, and
retrieval of translations in the folder ``--dev``. Measured sums are kept in ``--output``, so that an interrupted program
resumes. ``--keep`` writes ``scripts/results/added_runs.json`` and the table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from dev_measures import GUARD, DevData, accuracy, best_rows, dev_questions, kept_embeddings
from sentence_transformers import SentenceTransformer
from stored_results import check_settings, fill, markdown, reports_errors

from metaphrase.corpus.parallel import load_parallel_folder
from metaphrase.encoders.loading import load_encoder
from metaphrase.exceptions import UsageError
from metaphrase.io.digests import files_sha256, weights_digest
from metaphrase.io.environment import cores, hardware, prepare_process
from metaphrase.io.files import read_json, write_json
from metaphrase.merging import TaskVector, combine
from metaphrase.modeling.precision import bfloat16

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "scripts" / "results" / "added_runs.json"
PAGE = ROOT / "docs" / "merging.md"

#: Weights of each run, and the largest sum of the weights of both runs.
WEIGHTS, LARGEST_SUM = (0.0, 0.35, 0.5, 0.7, 1.0), 1.05
DIRECTIONS = (0, 20, 30, 40, 60)
#: Columns of the table: key and heading.
COLUMNS = {
    "pairs": "translations, dev of the first run",
    "translations": "translations, dev of the demo",
    "answers": "answers, mAP",
    "answers_in_own_language": "answers, MRR in the question's language",
    "similarity": "STS-B",
    GUARD: "structure",
}


class Measurements(DevData):
    """The dev data of the grid, and the dev pairs of a folder."""

    def __init__(self, stsb: Path, mlqa: Path, dev: Path) -> None:
        super().__init__(stsb, mlqa)
        self.dev = list(load_parallel_folder(dev, split="dev").values())

    def sides(self) -> dict[str, list[Sequence[str]]]:
        """The texts to encode by data set, for each of its sides."""
        return super().sides() | {"dev": [side for pairs in self.dev for side in (pairs.sources, pairs.targets)]}

    def measures(self, embedded: Mapping[str, Any], original: Mapping[str, Any], directions: int) -> dict[str, float]:
        """Gain and cost of an encoder, in percent."""
        changed = self.removal(embedded, directions)(embedded["dev"])
        return {"pairs": accuracy(changed)} | super().measures(embedded, original, directions)


def facts_of(folder: Path) -> dict[str, Any]:
    """The recipe, steps and data of a run.

    Raises:
        UsageError: The run is merged with its base, or directions were removed.
    """
    run = read_json(folder / "run.json")
    if run.get("merge", {}).get("alpha", 1) != 1 or run.get("debias", {}).get("directions"):
        raise UsageError(f"{folder} is merged or debiased. Train it with --merge 1 and --debias 0.")
    facts = {"recipe": run["recipe"]["name"], "languages": len(run["corpus"]["languages"])}
    return facts | {name: run[name] for name in ("steps", "batch_size", "seed", "model")}


def measured(
    weights: Sequence[float], vectors: Sequence[TaskVector], data: Measurements, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """The measures of a sum, for each number of directions; they are computed if missing."""
    path = options.output / f"{'-'.join(map(str, weights))}.json"
    if path.is_file():
        return list(read_json(path))

    def embed(model: SentenceTransformer) -> dict[str, Any]:
        with bfloat16(model, enabled=options.bf16):
            return data.embed(model)

    start = load_encoder("starter")
    before = kept_embeddings(options.output / "starter.npz", lambda: embed(start))
    scaled = [vector.scaled(weight) for vector, weight in zip(vectors, weights, strict=True) if weight]
    after = embed(combine(scaled, 1.0).apply(start)) if scaled else before
    facts = {"weights": list(weights), "hardware": hardware()}
    rows = [facts | {"directions": count} | data.measures(after, before, count) for count in DIRECTIONS]
    write_json(path, rows)
    return rows


def table(content: Mapping[str, Any]) -> str:
    """Format the best number of directions of each sum as Markdown, among those that lose nothing and among all."""
    rows = content["rows"]
    first, second = (
        f"{run['steps']:,} steps of {run['batch_size']:,} pairs in {run['languages']} languages (recipe {run['recipe']}, "
        f"seed {run['seed']})"
        for run in content["runs"]
    )
    machines = {row["hardware"].get("gpu") or cores(row["hardware"]) for row in rows}
    caption = (
        f"The first run is {first}, the second {second}. Dev data, without prompt"
        f"{', in bfloat16' if content['bf16'] else ''} ({', '.join(sorted(machines))}). A pair of weights has up to two "
        "rows. Both show the number of directions with the largest sum of translations, on both dev sets, and answers (mAP): "
        "the first if neither answers nor similarities within a language may be worse than the starter's, the second without "
        "this condition. Single runs: small differences are not meaningful."
    )
    shown = [row for row in rows if not any(row["weights"])]
    for weights in dict.fromkeys(tuple(row["weights"]) for row in rows if any(row["weights"])):
        shown += best_rows([row for row in rows if tuple(row["weights"]) == weights], rows[0], gain)
    cells = [
        [*(f"{weight:g}" for weight in row["weights"]), row["directions"], *(f"{row[key]:.1f}" for key in COLUMNS)]
        for row in shown
    ]
    heads = ["first", "second", "directions", *COLUMNS.values()]
    return "\n".join([caption, "", *markdown(heads, "r", cells)])


def gain(row: Mapping[str, Any]) -> float:
    """The sum of translations and answers."""
    return float(row["pairs"] + row["translations"] + row["answers"])


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Parse the command line and run the program; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs=2, help="Folders of two runs that start from the starter.")
    parser.add_argument("--dev", type=Path, required=True, help="Folder of pairs, xx-en.dev.tsv.gz.")
    parser.add_argument("--stsb", type=Path, required=True, help="Folder of STS-B in several languages.")
    parser.add_argument("--mlqa", type=Path, required=True, help="Folder of MLQA's dev set, dev-xx.json.gz.")
    parser.add_argument("--bf16", action="store_true", help="Compute embeddings in bfloat16.")
    parser.add_argument("--output", type=Path, default=Path("runs/added_runs"), help="Folder of measured sums.")
    parser.add_argument("--keep", action="store_true", help=f"Write scripts/results/{KEPT.name} and docs/merging.md.")
    options = parser.parse_args(argv)
    facts = [facts_of(folder) for folder in options.runs]
    prepare_process()
    base = load_encoder("starter")
    tuned = [load_encoder(str(folder)) for folder in options.runs]
    settings = {
        "runs": " ".join(map(weights_digest, tuned)),
        "data": files_sha256(
            [*options.stsb.glob("*dev*"), *dev_questions(options.mlqa).values(), *options.dev.glob("*.dev.*")]
        ),
        "bf16": options.bf16,
    }
    check_settings(options.output, settings)
    vectors = [TaskVector.between(base, model) for model in tuned]
    data = Measurements(options.stsb, options.mlqa, options.dev)
    rows: list[dict[str, Any]] = []
    for weights in sorted((pair for pair in product(WEIGHTS, repeat=2) if sum(pair) <= LARGEST_SUM), key=sum):
        rows += measured(weights, vectors, data, options)
        print(json.dumps(rows[-len(DIRECTIONS) :], indent=1), flush=True)
    content = {"runs": facts, "bf16": options.bf16, "rows": rows}
    write_json(options.output / "results.json", content)
    if options.keep:
        write_json(KEPT, content)
        fill(PAGE, {"added-runs": table(content)})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
