"""Embedding and searching for mining, filtering and encoding: in this process, or in tasks of an engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer

from metaphrase.encoders.prompts import resolve_prompt
from metaphrase.io.digests import encoder_digest
from metaphrase.io.progress import Begin
from metaphrase.mining.options import EngineOptions, SearchOptions
from metaphrase.mining.sentences import Sentences
from metaphrase.mining.shards import INDEX, build_index, embed_texts, search_shards


def make_shards(
    model: SentenceTransformer,
    texts: Iterable[tuple[str, Sequence[str]]],
    pools: Mapping[str, str],
    work: Path,
    search: SearchOptions,
    engine: EngineOptions,
    *,
    with_rows: bool,
    finish: Callable[..., Any],
    begin: Begin,
    note: Callable[[str], Any],
) -> AbstractContextManager[Path] | None:
    """Make the embeddings and neighbours of some texts, unless they are already there.

    Args:
        model: The encoder.
        texts: Each side with its distinct, non-empty texts.
        pools: For each side whose neighbours are searched, the side that they are searched in.
        work: The work folder, which has a manifest.
        search: How the texts are embedded, and neighbours searched.
        engine: The executor and its options.
        with_rows: The folder of the result has the embeddings, too.
        finish: Called by the last Slurm job with the options of an engine that finds everything made.
        begin: Starts a progress bar.
        note: Receives remarks.

    Returns:
        A context with the folder of the shards, a folder for each side; None if the tasks were submitted to Slurm.
    """
    if engine.executor is None:
        rows = {
            side: embed_texts(
                model, of_side, work / side / "embeddings", search, begin(f"Embedding {side}s", len(of_side))
            )
            for side, of_side in texts
        }
        for side, pool in pools.items():
            if search.index != "exact" and not (work / side / INDEX).exists():
                build_index(rows[pool], work / side, search, begin(f"Index of {pool}s", len(rows[pool])))
            advance = begin(f"Neighbours of {side}s", len(rows[side]))
            search_shards(rows[side], rows[pool], work / side, search, advance)
        return nullcontext(work)
    os.environ.setdefault("LOGURU_DIAGNOSE", "NO")  # else datatrove logs the variables of a failed task, too
    from metaphrase.mining.engine import Work, run_stages  # of an extra

    counts = {side: len(Sentences.write(work / side, partial(iter, of_side))) for side, of_side in texts}
    encoder = encoder_digest(model, resolve_prompt(model, search.prompt_name))
    given = Work(engine.storage or str(work.resolve()), search, encoder, counts, pools)
    last = partial(finish, replace(engine, executor="local", executor_args=[]))
    return run_stages(engine, given, work, with_rows=with_rows, finish=last, note=note)
