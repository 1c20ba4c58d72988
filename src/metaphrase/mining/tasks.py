"""Embedding and searching in tasks of an engine, the same way for mining, filtering and encoding."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from metaphrase.mining.options import EngineOptions, SearchOptions
from metaphrase.mining.sentences import Sentences


def run_tasks(
    engine: EngineOptions,
    search: SearchOptions,
    encoder: str,
    texts: Iterable[tuple[str, Iterable[str]]],
    pools: Mapping[str, str],
    work: Path,
    *,
    with_rows: bool,
    finish: Callable[[EngineOptions], Any],
    note: Callable[[str], Any],
) -> AbstractContextManager[Path] | None:
    """Make the embeddings and neighbours of some texts in tasks; without an executor, nothing is made.

    Args:
        engine: The executor and its options.
        search: The encoder, and how neighbours are searched.
        encoder: Digest of the encoder and its settings.
        texts: Each side with its distinct, non-empty texts.
        pools: For each side whose neighbours are searched, the side that they are searched in.
        work: The work folder, which has a manifest.
        with_rows: The folder of the result has the embeddings, too.
        finish: Called by the last Slurm job with the options of an engine that finds everything made.
        note: Receives remarks.

    Returns:
        A context with the folder of the shards, a folder for each side; None if the tasks were submitted to Slurm.
    """
    if engine.executor is None:
        return nullcontext(work)
    os.environ.setdefault("LOGURU_DIAGNOSE", "NO")  # else datatrove logs the variables of a failed task, too
    from metaphrase.mining.engine import Work, run_stages  # of an extra

    counts = {side: len(Sentences.write(work / side, partial(iter, of_side))) for side, of_side in texts}
    given = Work(engine.storage or str(work.resolve()), search, encoder, counts, pools)
    last = partial(finish, replace(engine, executor="local", executor_args=[]))
    return run_stages(engine, given, work, with_rows=with_rows, finish=last, note=note)
