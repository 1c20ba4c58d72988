"""Measure the effect of each precision of a task vector, compared with the encoder that it was made from.

    python scripts/vector_precision.py starter runs/demo --guards benchmarks/stsb benchmarks/mlqa --keep

The vector between the base and the tuned encoder is written in 16, 8 and 4 bits, and applied to the base. Each encoder is
measured on evenly spaced samples of the demo's dev pairs and of the guards, and by its similarity structure; its embeddings
are compared with those of the tuned encoder. ``--keep`` writes ``scripts/results/vector_precision.json`` and the table of
docs/merging.md, unless the stored results are those of more items.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer
from stored_results import fill, markdown, refuse_less, reports_errors

from metaphrase.encoders.loading import load_encoder
from metaphrase.evaluation.answer_retrieval import AnswerSet
from metaphrase.evaluation.encoding import CachedEncoder
from metaphrase.evaluation.guard_data import LabelledData, load_guard_data
from metaphrase.evaluation.similarity_structure import similarity_structure, structure_texts
from metaphrase.io.environment import hardware, prepare_process, versions
from metaphrase.io.files import DEMO, read_json, write_json
from metaphrase.merging import TaskVector
from metaphrase.mining.search import unit_rows

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "scripts" / "results" / "vector_precision.json"
PAGE = ROOT / "docs" / "merging.md"

#: Bits of each value, in the order of the table.
PRECISIONS = (16, 8, 4)


def sampled(data: LabelledData) -> LabelledData:
    """The data; answers are searched among the sentences of the paragraphs that answer the questions."""
    sets = {
        language: items.chosen(range(len(items.ids))) if isinstance(items, AnswerSet) else items
        for language, items in data.sets.items()
    }
    return replace(data, sets=sets)


def measured(
    base: SentenceTransformer, model: SentenceTransformer, data: Sequence[LabelledData]
) -> tuple[dict[str, float], CachedEncoder]:
    """The scores of an encoder on each data set, and the encoder with the embeddings of all texts."""
    cached = CachedEncoder(model)
    results = {labelled.name: labelled.evaluate(model, labelled.sets, encode=cached.encode) for labelled in data}
    results["structure"] = similarity_structure(base, model, structure_texts(), encode=cached.encode, resamples=1)
    return {f"{name}, {result.measure}": result.average.score for name, result in results.items()}, cached


def difference(reference: CachedEncoder, encoder: CachedEncoder) -> dict[str, float]:
    """Smallest cosine and largest difference of a component between embeddings of length 1 of two encoders."""
    reference_nh, encoder_nh = (
        unit_rows(np.stack([cached.rows[key] for key in reference.rows])) for cached in (reference, encoder)
    )
    return {
        "smallest_cosine": float(np.einsum("nh,nh->n", reference_nh, encoder_nh).min()),
        "largest_difference": float(np.abs(reference_nh - encoder_nh).max()),
    }


def measure(base_name: str, tuned_name: str, guards: Sequence[str], items: int) -> dict[str, Any]:
    """The rows of the table: the base, the tuned encoder, and the vector in each precision."""
    data = [sampled(load_guard_data(folder, max_items=items)) for folder in (DEMO, *guards)]
    base, tuned = load_encoder(base_name, device="cpu"), load_encoder(tuned_name, device="cpu")
    vector = TaskVector.between(base, tuned)
    before, _ = measured(base, base, data)
    scores, reference = measured(base, tuned, data)
    rows: list[dict[str, Any]] = [{"encoder": "base", "scores": before}, {"encoder": "tuned", "scores": scores}]
    for bits in PRECISIONS:
        with tempfile.TemporaryDirectory() as folder:
            file = vector.save(Path(folder) / "vector.safetensors", bits=bits)
            size = file.stat().st_size
            scores, cached = measured(base, TaskVector.load(file).apply(base), data)
        rows.append({"encoder": f"{bits} bits", "bytes": size, "scores": scores, **difference(reference, cached)})
        print(json.dumps(rows[-1]), flush=True)
    facts: dict[str, Any] = {"base": base_name, "items": items, "texts": len(reference.rows)}
    run = read_json(Path(tuned_name) / "run.json")
    facts |= {"recipe": run["recipe"]["name"], "steps": run["steps"], "alpha": run.get("merge", {}).get("alpha", 1.0)}
    facts["directions"] = 0 if vector.directions is None else len(vector.directions)
    return facts | {"rows": rows, "hardware": hardware(), "versions": versions()}


def table(content: Mapping[str, Any]) -> str:
    """Format the results as Markdown."""
    names = list(content["rows"][0]["scores"])
    headings = ["encoder", "size", *names, "smallest cosine", "largest difference"]
    cells = []
    for row in content["rows"]:
        size = f"{row['bytes'] / 1e6:.1f} MB" if "bytes" in row else ""
        change = [f"{row['smallest_cosine']:.7f}", f"{row['largest_difference']:.1g}"] if "bytes" in row else ["", ""]
        cells.append([row["encoder"], size, *(f"{row['scores'][name]:.2f}" for name in names), *change])
    removed = ""
    if content["directions"]:
        removed = f", without {content['directions']} directions of language identity"
    return "\n".join(
        [
            *markdown(headings, "lr", cells),
            "",
            f"The base is the {content['base']}; the tuned encoder is the release after {content['steps']} steps with the "
            f"recipe {content['recipe']}, alpha {content['alpha']:g}{removed}. Scores are in percent or ×100, on up to "
            f"{content['items']} dev items of each language (*demo*: held-out pairs of the demo; *structure*: similarity "
            "structure, compared with the base, removed directions included; answers are searched among the sentences of "
            f"their paragraphs). The last two columns compare {content['texts']:,} sentence embeddings of length 1 with "
            "those of the tuned encoder.",
        ]
    )


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="The encoder before training.")
    parser.add_argument("tuned", help="The folder of a run that was trained from it.")
    parser.add_argument(
        "--guards", nargs="+", required=True, help="Folders of data, as of `metaphrase merge --guard`."
    )
    parser.add_argument("--items", type=int, default=50, help="Maximum number of items of a language.")
    parser.add_argument("--keep", action="store_true", help=f"Write {KEPT.name} and the table of docs/{PAGE.name}.")
    options = parser.parse_args(argv)
    if options.keep:
        refuse_less(KEPT, lambda stored: {"items": stored["items"]}, {"items": options.items})
    prepare_process()
    content = measure(options.base, options.tuned, options.guards, options.items)
    print(table(content))
    if options.keep:
        write_json(KEPT, content)
        fill(PAGE, {"precision": table(content)})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
