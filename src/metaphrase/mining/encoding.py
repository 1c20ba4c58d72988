"""Embeddings of a text on disk: a file in, an array out. A killed run resumes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from metaphrase.corpus.writing import text_writer
from metaphrase.encoders.loading import load_encoder
from metaphrase.io.digests import PinnedFile, unchanged
from metaphrase.io.files import replacing
from metaphrase.io.outputs import check_files
from metaphrase.io.progress import Begin, no_progress
from metaphrase.io.work_folders import clear_work_folder, open_work_folder, work_folder_of
from metaphrase.mining.options import EngineOptions, SearchOptions
from metaphrase.mining.sentences import Sentences, check_text, read_sentences
from metaphrase.mining.shards import load_rows, make_shards, prepare, work_manifest

logger = logging.getLogger(__name__)


def encode_file(
    text: str,
    output: str,
    search: SearchOptions | None = None,
    engine: EngineOptions | None = None,
    *,
    column: str | None = None,
    begin: Begin = no_progress,
    note: Callable[[str], Any] = logger.info,
) -> tuple[Path, Path] | None:
    """Embed the distinct sentences of a monolingual text, which need not fit in memory.

    Embeddings are kept in ``OUTPUT.partial`` until all are complete. If a call is killed, the same call resumes. A second
    process with the same output is refused.

    Args:
        text: One sentence per line, or TSV; also .gz. Empty, unreadable and repeated lines are skipped.
        output: ``.npy`` file of unit rows, shape ``(sentences, hidden)``, float32, or float16 with ``search.half``.
        search: The encoder; options of neighbours are ignored.
        engine: Where embedding runs.
        column: Column of a TSV file: its name in the header, or its number, from 1.
        begin: Starts a progress bar.
        note: Receives remarks during the run.

    Returns:
        The embeddings, and ``OUTPUT.txt``, whose lines are the sentences of the rows; None if Slurm jobs were submitted, the
        last of which writes both.

    Raises:
        ValueError: An option or the text is invalid, or an output is the text.
        CheckpointError: Another process writes the output, or its folder is not writable.
        StorageError: The storage cannot be written to.
        WorkerError: Tasks of the engine failed repeatedly.
        ImportError: The engine is not installed.
    """
    search, engine = prepare(search, engine)
    written = Path(output), Path(f"{output}.txt")
    check_files(written, [text])
    read = partial(read_sentences, text, column)
    check_text("text", read)
    with work_folder_of(output) as work:
        pin = PinnedFile.of(text)
        model = load_encoder(search.model, max_length=search.max_length)
        open_work_folder(work, work_manifest(model, search, {"input": pin.sha256, "column": column}))
        with unchanged([pin]):
            sentences = Sentences.write(work / "text", read)
        shards = make_shards(
            model,
            [("text", sentences)],
            {},
            work,
            search,
            engine,
            with_rows=True,
            finish=partial(encode_file, text, output, search, column=column),
            begin=begin,
            note=note,
        )
        if shards is None:
            return None
        with shards as folder, replacing(written[0]) as partial_file, partial_file.open("wb") as file:
            blocks = load_rows(folder / "text" / "embeddings", len(sentences), search.shard_size).blocks
            shape, descr = (len(sentences), blocks[0].shape[1]), np.lib.format.dtype_to_descr(blocks[0].dtype)
            header = {"descr": descr, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            for block in blocks:  # not through a memory map: a full disk would kill the process
                file.write(block.tobytes())
        with replacing(written[1]) as partial_file, text_writer(partial_file, packed=False) as lines:
            lines.writelines(f"{sentence}\n" for sentence in sentences)
        clear_work_folder(work)
    return written
