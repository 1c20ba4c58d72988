"""A corpus as a stream: files read while training, languages interleaved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pyarrow.parquet as pq
from datasets import IterableDataset, interleave_datasets

from metaphrase.corpus.files import BitextFile, describe_file, file_names, unknown_language
from metaphrase.corpus.hub import count_rows
from metaphrase.corpus.kinds import XML
from metaphrase.corpus.mixing import shares
from metaphrase.corpus.readers import read_pairs
from metaphrase.corpus.readers.moses import check_line_counts
from metaphrase.corpus.report import CorpusReport
from metaphrase.corpus.rows import SENTENCES, row_features
from metaphrase.corpus.selection import Selection, select_rows
from metaphrase.corpus.text import count_lines, read_chunks
from metaphrase.exceptions import CorpusError

#: Pairs of each file that are read in advance, to find the columns of the stream.
_PEEKED = 100


def stream_files(
    files: Sequence[BitextFile], selection: Selection, temperature: float | None, seed: int
) -> tuple[IterableDataset, CorpusReport, list[dict[str, Any]]]:
    """Open files as one interleaved stream. The files of a language are its shards, unless there is a limit.

    Returns the stream, the report that is filled while it is read, and the facts of each file.
    """
    report = CorpusReport()
    groups: dict[str | None, list[BitextFile]] = defaultdict(list)
    facts, optional = [], set[str]()
    for file in (file.pinned() for file in files):
        if file.format == "moses":
            check_line_counts(file)
        glance = CorpusReport(logged={file.name})
        known = [row[3] for row in islice(read_pairs(file, max_chars=selection.max_chars, report=glance), _PEEKED)]
        if not known:
            raise CorpusError(f"{file.name} has no pairs.")
        optional.update(*known)
        if "source_lang" not in known[0]:
            raise unknown_language(file)
        facts.append(describe_file(file, [known[0]["source_lang"]]))
        groups[file.language].append(file)
    features = row_features(optional)
    if temperature is not None and None in groups:
        raise CorpusError(
            f"A stream mixes languages by file, but the name of {file_names(groups[None])} states no language. Split the "
            "file by language, or read it without streaming."
        )
    streams = [
        IterableDataset.from_generator(
            _stream_rows,
            features=features,
            gen_kwargs={
                "files": group if selection.limit is None else tuple(group),
                "selection": selection,
                "report": report,
                "columns": tuple(features),
            },
        )
        for group in groups.values()
    ]
    if len(streams) == 1:
        return streams[0], report, facts
    sizes = {str(code): sum(map(_size, group)) for code, group in groups.items()}
    if selection.limit is not None:
        sizes = {language: min(size, selection.limit) for language, size in sizes.items()}
    once = temperature is None
    dataset = interleave_datasets(
        streams,
        probabilities=list(shares(sizes, 1.0 if temperature is None else temperature).values()),
        seed=seed,
        stopping_strategy="all_exhausted_without_replacement" if once else "all_exhausted",
    )
    return dataset, report, facts


def _stream_rows(
    files: Sequence[BitextFile], selection: Selection, report: CorpusReport, columns: tuple[str, ...]
) -> Iterator[dict[str, str | None]]:
    for row in select_rows(files, selection, report):
        values = {name: value for name, value in row._asdict().items() if value is not None}
        yield {name: values.get(name, "" if name in SENTENCES else None) for name in columns}


def _size(file: BitextFile) -> int:
    """The approximate number of pairs of a file, without parsing them."""
    if file.format == "parquet":
        return int(pq.ParquetFile(file.paths[0]).metadata.num_rows)
    if file.format == "tmx":
        chunks = read_chunks(file.paths[0], file.max_expansion, accepted=XML)
        return max(1, sum(chunk.replace(b"\0", b"").count(b"</tu>") for chunk in chunks))
    if file.format == "hub":
        return count_rows(file.name, file.split, file.revision)
    return count_lines(file.paths[0], file.max_expansion)
