"""Scoring the pairs of a bitext, and keeping the best. A killed run resumes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Value
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from metaphrase.corpus.files import language_pair
from metaphrase.corpus.rows import SEPARATOR
from metaphrase.corpus.writing import is_tsv, write_corpus
from metaphrase.encoders.loading import load_encoder
from metaphrase.io.environment import versions
from metaphrase.io.files import write_json
from metaphrase.io.progress import Begin, no_progress
from metaphrase.io.work_folders import clear_work_folder, open_work_folder, work_folder_of
from metaphrase.mining.margins import margin_score
from metaphrase.mining.options import EngineOptions, FilterOptions, SearchOptions
from metaphrase.mining.output import DECIMALS, histogram, none_reaches
from metaphrase.mining.resources import check_disk, estimate_needs
from metaphrase.mining.search import Neighbours, check_device
from metaphrase.mining.shards import (
    SIDES,
    load_neighbours,
    load_rows,
    make_shards,
    prepare,
    work_manifest,
)
from metaphrase.modeling.bulk import distinct_texts

logger = logging.getLogger(__name__)

#: Number of neighbours that are searched for hard negatives, and their largest similarity, as a share of the translation's.
#: The share comes from Moreira et al. 2024 (NV-Retriever), section 4.
NEGATIVE_NEIGHBOURS, MOST_SIMILAR = 32, 0.95
#: Memory of a Python string without its characters, including its entries in a list and a dictionary.
_STRING_BYTES = 200


@dataclass(frozen=True)
class FilterResult:
    """The result of filtering.

    Attributes:
        score_n: The score of every pair, shape ``(pairs,)``.
        kept_n: The row numbers of the pairs that were written.
        facts: The content of the summary ``OUTPUT.json``.
        files: The files that were written, the pairs first.
    """

    score_n: NDArray[np.float64]
    kept_n: NDArray[np.integer]
    facts: dict[str, Any]
    files: tuple[Path, ...]


def filter_corpus(
    options: FilterOptions,
    search: SearchOptions | None = None,
    engine: EngineOptions | None = None,
    *,
    begin: Begin = no_progress,
    note: Callable[[str], Any] = logger.info,
) -> FilterResult | None:
    """Score the pairs of a bitext, and write the kept ones in input order, with a summary.

    Embeddings and neighbours are kept in ``OUTPUT.partial`` until the pairs are written. If a call is killed, the
    same call resumes. A second process with the same output is refused.

    Args:
        options: The bitext, the output, and which pairs are kept.
        search: The encoder, and how neighbours are searched.
        engine: Where embedding and searching run.
        begin: Starts a progress bar.
        note: Receives remarks during the run: the disk space needed, the recall of an index.

    Returns:
        The scores and facts; None if Slurm jobs were submitted, the last of which writes the pairs.

    Raises:
        ValueError: An option or the corpus is invalid, or an output is an input.
        CheckpointError: Another process writes the output, or its folder is not writable.
        StorageError: There is not enough disk space, or the storage cannot be written to.
        WorkerError: Tasks of the engine failed repeatedly.
        ImportError: The engine is not installed.
    """
    options.check()
    search, engine = prepare(search, engine)
    check_device(search.search_device, here=engine.executor is None)
    start = time.perf_counter()
    with work_folder_of(options.output) as work:
        corpus = options.load_bitext(options.corpus)
        dataset = corpus.dataset
        assert isinstance(dataset, Dataset)
        model = load_encoder(search.model, max_length=search.max_length)
        output, summary = options.outputs
        # A data set of the Hub has a commit instead of a digest.
        inputs = {facts["path"]: facts["sha256"] or facts.get("revision") for facts in corpus.files}
        names = ("languages", "split", "limit", "source_lang", "target_lang", "source_column", "target_column")
        loaded = {name: getattr(options, name) for name in names}
        # As a list: the files are in the order of the embeddings.
        known = {"inputs": [*inputs.items()], **loaded, "negatives": options.negatives > 0}
        manifest = work_manifest(model, search, known)
        open_work_folder(work, manifest, locked=True)
        scored = _score_pairs(dataset, model, work, options, search, engine, begin, note)
        if scored is None:
            return None
        score_n, negatives = scored
        if options.negatives:
            if "negatives" in dataset.column_names:
                dataset = dataset.remove_columns("negatives")
            dataset = dataset.add_column("negatives", negatives.tolist(), feature=Value("string"))
        kept_n = np.argsort(-score_n, kind="stable")[: options.top]
        if options.threshold is not None:
            kept_n = kept_n[score_n[kept_n].round(DECIMALS) >= options.threshold]
            if not len(kept_n):
                logger.warning("%s", none_reaches(options.threshold, score_n))
        kept_n = np.sort(kept_n)
        if is_tsv(output):  # a format without numbers
            dataset = dataset.add_column(
                "score", [f"{score:.{DECIMALS}f}" for score in score_n], feature=Value("string")
            )
        else:
            dataset = dataset.add_column("score", score_n.round(DECIMALS).tolist(), feature=Value("float64"))
        write_corpus(dataset.select(kept_n), output)
        facts = {
            "output": output.name,
            "inputs": inputs,
            "pairs": len(score_n),
            "kept": len(kept_n),
            "threshold": options.threshold,
            "histogram": histogram(score_n),
            "encoder": manifest["encoder"],
            "settings": asdict(search)
            | loaded
            | {name: getattr(options, name) for name in ("score", "margin", "top", "negatives")},
            "versions": versions(),
            "seconds": round(time.perf_counter() - start, 2),
        }
        write_json(summary, facts)
        clear_work_folder(work)
        return FilterResult(score_n, kept_n, facts, (output, summary))


def _score_pairs(
    dataset: Dataset,
    model: SentenceTransformer,
    work: Path,
    options: FilterOptions,
    search: SearchOptions,
    engine: EngineOptions,
    begin: Begin,
    note: Callable[[str], Any],
) -> tuple[NDArray[np.float64], NDArray[np.object_]] | None:
    """Scores and negatives of all pairs; neighbours are searched among the pairs of the same languages.

    Returns None if Slurm jobs were submitted.
    """
    rows_of = _rows_by_languages(dataset)
    parts = {label: dataset.select(rows) for label, rows in rows_of.items()}
    deep = replace(search, k=max(search.k, NEGATIVE_NEIGHBOURS)) if options.negatives else search
    if engine.storage is None:
        check_disk(_needs(parts.values(), model, deep), work, note)
    shards = make_shards(
        model,
        ((f"{label}/{side}", distinct_texts([part[side]])[0]) for label, part in parts.items() for side in SIDES),
        {f"{label}/{side}": f"{label}/{other}" for label in parts for side, other in _searched(options).items()},
        work,
        deep,
        engine,
        with_rows=True,
        finish=partial(filter_corpus, options, search),
        begin=begin,
        note=note,
    )
    if shards is None:
        return None
    score_n, negatives = np.empty(len(dataset)), np.full(len(dataset), "", dtype=object)
    with shards as folder:
        for label, rows in rows_of.items():
            score_n[rows], negatives[rows] = _score_language(
                parts[label], folder / label, options, deep, search.k, note
            )
    return score_n, negatives


def _rows_by_languages(dataset: Dataset) -> dict[str, list[int]]:
    """The row numbers of each pair of languages."""
    rows: dict[str, list[int]] = {}
    for at, codes in enumerate(zip(dataset["source_lang"], dataset["target_lang"], strict=True)):
        rows.setdefault(language_pair(*codes), []).append(at)
    return rows


def _searched(options: FilterOptions) -> dict[str, str]:
    """The sides whose neighbours are searched, and the sides that they are searched in."""
    sides = {"source": "target", "target": "source"}
    if options.score != "cosine":
        return sides
    return {"source": "target"} if options.negatives else {}


def _needs(parts: Iterable[Dataset], model: SentenceTransformer, search: SearchOptions) -> dict[str, int]:
    """Resources for all pairs of languages: the sum of their disk space, and the memory of the largest."""
    disk, memory = 0, 0
    for part in parts:
        sides = [set(part[side]) for side in SIDES]
        size = sum(len(text.encode()) for side in sides for text in side)
        needed = estimate_needs(len(sides[0]), len(sides[1]), model, search, size)
        disk += needed["disk"]
        memory = max(memory, needed["memory"] + 2 * size + _STRING_BYTES * sum(map(len, sides)))
    return {"disk": disk, "memory": memory}


def _score_language(
    dataset: Dataset,
    folder: Path,
    options: FilterOptions,
    search: SearchOptions,
    k: int,
    note: Callable[[str], Any],
) -> tuple[NDArray[Any], list[str]]:
    """Scores and negatives of the pairs of two languages; a repeated text is embedded once and counts as one neighbour."""
    _, (source_n,) = distinct_texts([dataset["source"]])
    targets, (target_n,) = distinct_texts([dataset["target"]])
    numbers = {"source": source_n, "target": target_n}
    counts = {side: int(row_n.max()) + 1 for side, row_n in numbers.items()}
    rows = [load_rows(folder / side / "embeddings", counts[side], search.shard_size) for side in SIDES]
    cosine_n = np.empty(len(source_n), dtype=np.float32)
    for first in range(0, len(cosine_n), search.shard_size):
        chunk = slice(first, first + search.shard_size)
        cosine_n[chunk] = np.einsum("nh,nh->n", rows[0].take(source_n[chunk]), rows[1].take(target_n[chunk]))
    neighbours = {side: load_neighbours(folder / side, counts[side], search, note)[0] for side in _searched(options)}
    negatives = [""] * len(cosine_n)
    if options.negatives:
        near = hard_negatives(neighbours["source"], source_n, target_n, cosine_n, targets, options.negatives)
        negatives = list(map(SEPARATOR.join, near))
    if options.score == "cosine":
        return cosine_n, negatives
    means = [Neighbours(near.similarity_qk[:, :k], near.row_qk[:, :k]).mean_q for near in neighbours.values()]
    return margin_score(cosine_n, means[0][source_n], means[1][target_n], options.margin), negatives


def hard_negatives(
    neighbours: Neighbours,
    source_n: NDArray[np.integer],
    target_n: NDArray[np.integer],
    cosine_n: NDArray[np.floating],
    targets: Sequence[str],
    count: int,
) -> list[list[str]]:
    """The targets most similar to the source of each pair, except its translations and targets that are nearly as similar
    as the translation.

    Targets that contain the separator of a column of sentences are skipped.

    ``neighbours`` are those of the distinct sources among the distinct ``targets``; ``source_n`` and ``target_n`` are
    their numbers in each pair. Returns up to ``count`` negatives of each pair, the most similar first.
    """
    translations: dict[int, set[int]] = {}
    for source, target in zip(source_n.tolist(), target_n.tolist(), strict=True):
        translations.setdefault(source, set()).add(target)
    unusable = {row for row, text in enumerate(targets) if SEPARATOR in text}
    negatives = []
    for source, cosine in zip(source_n.tolist(), cosine_n.tolist(), strict=True):
        near = zip(neighbours.row_qk[source].tolist(), neighbours.similarity_qk[source].tolist(), strict=True)
        skipped = translations[source] | unusable
        kept = [row for row, other in near if row >= 0 and row not in skipped and other <= MOST_SIMILAR * cosine]
        negatives.append([targets[row] for row in kept[:count]])
    return negatives
