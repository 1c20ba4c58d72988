"""``metaphrase filter CORPUS -o OUT``: score the pairs that a user has, and keep those above a threshold."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset, Value
from numpy.typing import NDArray
from rich.console import Console
from sentence_transformers import SentenceTransformer

from metaphrase.aligners.linking import pair_label
from metaphrase.cli import emit, notes, parse
from metaphrase.cli.mine import (
    EncoderOptions,
    check_encoder,
    embed,
    histogram,
    manifest,
    needs,
    progress,
    search_shards,
    state_needs,
    text_histogram,
)
from metaphrase.corpus.loading import load_corpus
from metaphrase.corpus.writing import check_writable, write_corpus
from metaphrase.encoders.loading import load_encoder
from metaphrase.io.environment import versions
from metaphrase.io.files import write_json
from metaphrase.mining.search import Margin, margin_score
from metaphrase.mining.shards import clear_work_folder, open_work_folder

SUMMARY = "Score the pairs of a bitext, and keep the good ones"
DESCRIPTION = "metaphrase filter CORPUS… -o OUT"
EXAMPLES = (
    "metaphrase filter pairs.tsv --source_lang sw -o scored.tsv",
    "metaphrase filter data/ --languages sw -o good.parquet --threshold 1.06 --json",
)


#: Bytes that Python takes for a text besides its characters: its head, its places in a list and a dictionary.
_TEXT = 200


@dataclass
class FilterOptions:
    """What is scored, and what is kept."""

    corpus: list[str] = field(
        metadata={
            "help": "Bitext: TSV, JSONL, Parquet, TMX, Moses 'x.sw,x.en', a folder, or hf:org/name. May stand first."
        }
    )
    output: str = field(
        metadata={"aliases": ["-o"], "help": "Where it goes, with the column score: .tsv, .jsonl (.gz) or .parquet."}
    )
    score: Literal["margin", "cosine"] = field(
        default="margin",
        metadata={
            "help": "margin: the cosine of a pair against those of both sentences with their neighbours in the corpus; "
            "cosine: the cosine alone, which needs no search, but is not comparable between sentences and languages."
        },
    )
    margin: Margin = field(default="ratio", metadata={"help": "Kind of margin."})
    threshold: float | None = field(
        default=None, metadata={"help": "Least score of a pair that is kept. Default: all are, with their scores."}
    )
    top: int | None = field(default=None, metadata={"help": "Keep the best so many pairs."})
    source_lang: str | None = field(
        default=None, metadata={"help": "Language of the sources, where nothing else tells it."}
    )
    target_lang: str = field(default="en", metadata={"help": "Language of the targets."})
    languages: list[str] = field(default_factory=list, metadata={"help": "Languages to take from the corpus."})
    split: str = field(default="train", metadata={"help": "Which of xx-en.train.tsv.gz, xx-en.dev.tsv.gz, … to take."})
    limit: int | None = field(default=None, metadata={"help": "Take this many pairs of each language at most."})


def run(argv: Sequence[str]) -> int:
    """Score, keep, write."""
    leading = next((at for at, token in enumerate(argv) if token.startswith("-")), len(argv))
    arguments = ["--corpus", *argv[:leading], *argv[leading:]] if leading else list(argv)
    options, encoder = parse(
        "metaphrase filter", [FilterOptions, EncoderOptions], arguments, description=DESCRIPTION, examples=EXAMPLES
    )
    check_writable(options.output)
    check_encoder(encoder)
    start = time.perf_counter()
    torch.set_flush_denormal(True)
    console = notes()
    corpus = load_corpus(
        options.corpus,
        languages=[code for item in options.languages for code in item.split(",") if code] or None,
        source_lang=options.source_lang,
        target_lang=options.target_lang,
        split=options.split,
        limit=options.limit,
        cleaning=None,
    )
    dataset = corpus.dataset
    model = load_encoder(encoder.model, max_length=encoder.max_length)
    output = Path(options.output)
    inputs = {facts["path"]: facts["sha256"] for facts in corpus.files}
    how = {"inputs": inputs, "languages": options.languages, "limit": options.limit}
    work = open_work_folder(output.with_name(f"{output.name}.partial"), manifest(model, encoder, how))
    score_n = score_corpus(dataset, model, work, options, encoder, console)

    kept_n = np.argsort(-score_n, kind="stable")[: options.top]
    kept_n = np.sort(kept_n if options.threshold is None else kept_n[score_n[kept_n] >= options.threshold])
    scored = with_scores(dataset, score_n, as_string=".tsv" in output.suffixes[-2:])
    write_corpus(scored.select(kept_n), output)
    result = {
        "output": output.name,
        "inputs": inputs,
        "pairs": len(score_n),
        "kept": len(kept_n),
        "threshold": options.threshold,
        "histogram": histogram(score_n),
        "settings": {**asdict(encoder), "score": options.score, "margin": options.margin, "top": options.top},
        "versions": versions(),
        "seconds": round(time.perf_counter() - start, 2),
    }
    console.print("\n".join(text_histogram(result["histogram"], options.threshold)))
    written = write_json(output.with_name(f"{output.name}.json"), result)
    console.print(f"Kept {len(kept_n):,} of {len(score_n):,} pairs: {output}, {written}")
    clear_work_folder(work)
    emit(result)
    return 0


def score_corpus(
    dataset: Dataset,
    model: SentenceTransformer,
    work: Path,
    options: FilterOptions,
    encoder: EncoderOptions,
    console: Console,
) -> NDArray[np.float64]:
    """The score of every pair, shape ``(pairs,)``; neighbours are searched among the pairs of the same languages."""
    labels = [pair_label(*codes) for codes in zip(dataset["source_lang"], dataset["target_lang"], strict=True)]
    rows_of: dict[str, list[int]] = {}
    for at, label in enumerate(labels):
        rows_of.setdefault(label, []).append(at)
    score_n = np.empty(len(labels))
    state_needs(filter_needs(dataset, rows_of, model, encoder), work, console)
    for label, rows in rows_of.items():
        chosen = dataset.select(rows)
        score_n[rows] = _score_pairs(
            chosen["source"], chosen["target"], label, model, work / label, options, encoder, console
        )
    return score_n


def filter_needs(
    dataset: Dataset, rows_of: Mapping[str, Sequence[int]], model: SentenceTransformer, encoder: EncoderOptions
) -> dict[str, int]:
    """Bytes of disk and memory that scoring takes: `needs` of each pair of languages, and what the texts take.

    Returns:
        ``disk``, of all languages together, and ``memory``, of the largest.
    """
    disk, memory = 0, 0
    for rows in rows_of.values():
        chosen = dataset.select(rows)
        sides = [set(chosen[column]) for column in ("source", "target")]
        size = sum(len(text.encode()) for side in sides for text in side)
        needed = needs(len(sides[0]), len(sides[1]), model, encoder, size)
        disk += needed["disk"]
        memory = max(memory, needed["memory"] + 2 * size + _TEXT * sum(map(len, sides)))
    return {"disk": disk, "memory": memory}


def _score_pairs(
    sources: Sequence[str],
    targets: Sequence[str],
    label: str,
    model: SentenceTransformer,
    work: Path,
    options: FilterOptions,
    encoder: EncoderOptions,
    console: Console,
) -> NDArray[Any]:
    """Scores of pairs of two languages; a text that recurs is embedded once, and is one neighbour."""
    rows, places_of = [], []
    with progress(console) as begin:
        for side, texts in (("source", sources), ("target", targets)):
            places: dict[str, int] = {}
            places_of.append(np.array([places.setdefault(text, len(places)) for text in texts]))
            advance = begin(f"{label}: embedding {side}s", len(places))
            rows.append(embed(model, list(places), work / side / "embeddings", encoder, advance))
        source_n, target_n = places_of
        cosine_n = np.empty(len(source_n), dtype=np.float32)
        for first in range(0, len(cosine_n), encoder.shard_size):
            chunk = slice(first, first + encoder.shard_size)
            cosine_n[chunk] = np.einsum("nh,nh->n", rows[0].take(source_n[chunk]), rows[1].take(target_n[chunk]))
        if options.score == "cosine":
            return cosine_n
        means = []
        for side, queries, pool in (("source", rows[0], rows[1]), ("target", rows[1], rows[0])):
            advance = begin(f"{label}: neighbours of {side}s", len(queries))
            neighbours, share = search_shards(queries, pool, work / side, encoder, advance)
            means.append(neighbours.mean_q)
            if share is not None:
                console.print(f"The {encoder.index} index finds {share:.1%} of the {side}s' {encoder.k} neighbours.")
    return margin_score(cosine_n, means[0][source_n], means[1][target_n], options.margin)


def with_scores(dataset: Dataset, score_n: NDArray[np.float64], *, as_string: bool) -> Dataset:
    """A corpus with the column ``score``: text where the file can hold nothing else."""
    if as_string:
        return dataset.add_column("score", [f"{score:.6f}" for score in score_n], feature=Value("string"))
    return dataset.add_column("score", score_n.round(6).tolist(), feature=Value("float64"))
