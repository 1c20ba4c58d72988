"""Mining two monolingual texts: files in, a file of scored pairs out. A killed run resumes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from metaphrase.encoders.loading import load_encoder
from metaphrase.encoders.prompts import resolve_prompt
from metaphrase.exceptions import DataError, UsageError
from metaphrase.io.counts import counted
from metaphrase.io.digests import PinnedFile, unchanged
from metaphrase.io.environment import versions
from metaphrase.io.files import write_json
from metaphrase.io.progress import Begin, no_progress
from metaphrase.io.work_folders import clear_work_folder, open_work_folder, work_folder_of
from metaphrase.mining.copies import without_copies
from metaphrase.mining.margins import Pairs, Threshold, select_pairs, suggest_threshold
from metaphrase.mining.options import EngineOptions, MiningOptions, SearchOptions
from metaphrase.mining.output import (
    DECIMALS,
    draw_histogram,
    histogram,
    none_reaches,
    quantiles,
    write_sample,
    write_scored_pairs,
)
from metaphrase.mining.resources import check_disk, estimate_needs
from metaphrase.mining.search import Neighbours, check_device
from metaphrase.mining.sentences import Sentences, check_text, read_sentences
from metaphrase.mining.shards import SIDES, load_neighbours, make_shards, prepare, work_manifest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MiningResult:
    """The result of mining.

    Attributes:
        pairs: All candidates with their scores, best first, without copies.
        kept: The pairs that were written.
        threshold: The threshold that was applied, if any.
        suggestion: The threshold with the best expected F1, if it can be estimated.
        facts: The content of the summary ``OUTPUT.json``.
        files: The files that were written, the pairs first.
        work: The work folder, if it was kept.
    """

    pairs: Pairs
    kept: Pairs
    threshold: float | None
    suggestion: Threshold | None
    facts: dict[str, Any]
    files: tuple[Path, ...]
    work: Path | None = None


def mine_files(
    options: MiningOptions,
    search: SearchOptions | None = None,
    engine: EngineOptions | None = None,
    *,
    begin: Begin = no_progress,
    note: Callable[[str], Any] = logger.info,
) -> MiningResult | None:
    """Mine the translations in two monolingual texts, and write them with a summary, a sample and a histogram.

    Embeddings and neighbours are kept in ``OUTPUT.partial`` until the pairs are written. If a call is killed, the
    same call resumes. A second process with the same output is refused.

    Args:
        options: The texts, the output, and which pairs are kept.
        search: The encoder, and how neighbours are searched.
        engine: Where embedding and searching run.
        begin: Starts a progress bar.
        note: Receives remarks during the run: the number of sentences, the disk space needed, the recall of an index.

    Returns:
        The pairs and facts; None if Slurm jobs were submitted, the last of which writes the pairs.

    Raises:
        ValueError: An option or a text is invalid, an output is an input, or no threshold can be suggested.
        CheckpointError: Another process writes the output, or its folder is not writable.
        StorageError: There is not enough disk space, or the storage cannot be written to.
        WorkerError: Tasks of the engine failed repeatedly.
        ImportError: The engine is not installed.
    """
    options.check()
    search, engine = prepare(search, engine)
    check_device(search.search_device, here=engine.executor is None)
    if options.threshold == "auto" and search.k < 2:
        raise UsageError("--threshold auto compares neighbours, and requires --k 2 or more, but --k is 1.")
    start = time.perf_counter()
    with work_folder_of(options.output) as work:
        model, texts, described = _prepare_texts(options, search, work)
        sources, targets = texts.values()
        note("\n".join(f"{side}: {_describe(text.facts)}" for side, text in texts.items()))
        if engine.storage is None:
            size = sum((work / side / "sentences.txt").stat().st_size for side in SIDES)
            check_disk(estimate_needs(len(sources), len(targets), model, search, size), work, note)
        shards = make_shards(
            model,
            texts.items(),
            {"source": "target", "target": "source"},
            work,
            search,
            engine,
            with_rows=False,
            finish=partial(mine_files, options, search),
            begin=begin,
            note=note,
        )
        if shards is None:
            return None
        with shards as folder:
            neighbours, recalls = _load_neighbours(folder, texts, search, note)
        scored = _score(neighbours, texts, options)
        score_c, threshold = scored.pairs.score_c, options.threshold
        if threshold == "auto":
            threshold = _threshold_for_auto(scored)
        elif threshold is not None:
            score_c = score_c.round(DECIMALS)  # as they are written
        kept = scored.pairs if threshold is None else scored.pairs.take(score_c >= threshold)
        kept = kept.take(slice(options.top))
        if not len(kept.score_c):
            logger.warning("%s", _no_pair_warning(scored, threshold))
        output, summary, sample, picture = options.outputs
        write_scored_pairs(kept, sources, targets, options.languages, output, work)
        facts = {
            "output": output.name,
            **_describe_pairs(scored, kept, threshold),
            **described,
            "settings": _settings(options, search, model) | recalls,
            "versions": versions(),
            "seconds": round(time.perf_counter() - start, 2),
        }
        written = [output, write_json(summary, facts)]
        around = scored.suggested_threshold if threshold is None else threshold
        written.append(write_sample(scored.pairs, sources, targets, around, sample))
        written += draw_histogram(scored.pairs, scored.wrong_d, threshold, scored.suggested_threshold, picture)
        if not options.keep_work:
            clear_work_folder(work)
        return MiningResult(
            scored.pairs,
            kept,
            threshold,
            scored.suggestion,
            facts,
            tuple(written),
            work if options.keep_work else None,
        )


def _prepare_texts(
    options: MiningOptions, search: SearchOptions, work: Path
) -> tuple[SentenceTransformer, dict[str, Sentences], dict[str, Any]]:
    """Start or resume the work: the encoder, the distinct sentences of each side, and their facts for the summary."""
    inputs = [(options.source, options.source_column), (options.target, options.target_column)]
    read = [partial(read_sentences, path, column) for path, column in inputs]
    for side, text in zip(SIDES, read, strict=True):
        check_text(side, text)
    pins = [PinnedFile.of(path) for path, _ in inputs]
    model = load_encoder(search.model, max_length=search.max_length)
    files = [
        {"sha256": pin.sha256, "bytes": pin.size, "column": column}
        for pin, (_, column) in zip(pins, inputs, strict=True)
    ]
    manifest = work_manifest(model, search, {"inputs": files})
    open_work_folder(work, manifest, locked=True)
    with unchanged(pins):
        texts = {side: Sentences.write(work / side, text) for side, text in zip(SIDES, read, strict=True)}
    described = {
        side: {"lang": language, "file": Path(path).name, **file, **texts[side].facts}
        for side, language, (path, _), file in zip(SIDES, options.languages, inputs, files, strict=True)
    }
    return model, texts, described | {"encoder": manifest["encoder"]}


def _load_neighbours(
    folder: Path, texts: Mapping[str, Sentences], search: SearchOptions, note: Callable[[str], Any]
) -> tuple[dict[str, Neighbours], dict[str, float]]:
    """The neighbours of each side, and the recall of an approximate search."""
    neighbours, recalls = {}, dict[str, float]()
    for side, text in texts.items():
        neighbours[side], recall = load_neighbours(folder / side, len(text), search, note)
        if recall is not None:
            recalls[f"{side}_recall"] = round(recall, 4)
    return neighbours, recalls


@dataclass(frozen=True)
class _Scored:
    """The scored pairs, the number of sentences in both texts, and what `suggest_threshold` returns for these pairs."""

    pairs: Pairs
    copies: int
    suggestion: Threshold | None
    wrong_d: NDArray[np.floating]

    @property
    def suggested_threshold(self) -> float | None:
        """The suggested threshold."""
        return None if self.suggestion is None else self.suggestion.threshold


def _score(
    neighbours: Mapping[str, Neighbours], texts: Mapping[str, Sequence[str]], options: MiningOptions
) -> _Scored:
    selection: dict[str, Any] = {"margin": options.margin, "retrieval": options.retrieval}
    directions, copies = tuple(neighbours.values()), 0
    if not options.copies:
        directions, copies = without_copies(directions, texts.values(), options.margin)
    pairs = select_pairs(*directions, **selection)
    return _Scored(pairs, copies, *suggest_threshold(pairs, *directions, **selection))


def _describe_pairs(scored: _Scored, kept: Pairs, threshold: float | None) -> dict[str, Any]:
    """The facts of the pairs for the summary."""
    expected = scored.suggestion
    return {
        "pairs": len(kept.score_c),
        "candidates": len(scored.pairs.score_c),
        "copies_dropped": scored.copies,
        "threshold": threshold,
        "suggested_threshold": scored.suggested_threshold,
        "expected": expected and {name: round(getattr(expected, name), 3) for name in ("precision", "recall", "f1")},
        "quantiles": quantiles(scored.pairs.score_c),
        "histogram": histogram(scored.pairs.score_c),
    }


def _settings(options: MiningOptions, search: SearchOptions, model: SentenceTransformer) -> dict[str, Any]:
    """The settings of the search and of the scores for the summary."""
    scores = {name: getattr(options, name) for name in ("margin", "retrieval", "copies", "top")}
    return asdict(search) | {"prompt": resolve_prompt(model, search.prompt_or_none)} | scores


def _threshold_for_auto(scored: _Scored) -> float:
    """The threshold for ``auto``."""
    if scored.suggestion is None:
        reason, advice = why_no_threshold(len(scored.pairs.score_c), scored.copies)
        raise DataError(f"No threshold can be suggested: {reason}. {advice}")
    return scored.suggestion.threshold


def _no_pair_warning(scored: _Scored, threshold: float | None) -> str:
    """The warning that no pair was kept."""
    if threshold is not None and len(scored.pairs.score_c):
        return none_reaches(threshold, scored.pairs.score_c)
    reason, advice = why_no_threshold(0, scored.copies)
    return f"No pair was kept: {reason}. {advice}"


def why_no_threshold(pairs: int, copies: int) -> tuple[str, str]:
    """Why no threshold is suggested for a number of pairs, without the copies that were dropped, and what to do."""
    if copies and not pairs:
        return f"both sides are the same text in all pairs that were found ({copies:,})", (
            "Check that the two texts are in different languages, or keep copies with --copies."
        )
    return "wrong pairs score like all pairs", (
        "Inspect the scores without --threshold; the two texts may have no translations in common, or the encoder may not "
        "know the languages."
    )


def _describe(facts: Mapping[str, int]) -> str:
    skipped = [f"{facts[key]:,} {key}" for key in ("repeated", "empty", "unreadable") if facts[key]]
    return f"{counted(facts['sentences'], 'sentence')} of {counted(facts['lines'], 'line')}" + (
        f" ({', '.join(skipped)} skipped)" if skipped else ""
    )
