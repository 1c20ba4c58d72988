"""Loading a corpus: in memory, on disk, or as a stream."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, IterableDataset, interleave_datasets
from datasets.fingerprint import Hasher

from metaphrase.corpus.cleaning import Cleaning
from metaphrase.corpus.codes import bare_language
from metaphrase.corpus.files import (
    BitextFile,
    CorpusLike,
    dataset_rows,
    describe_file,
    file_names,
    find_files,
    json_keys,
    source_language,
    states_languages,
)
from metaphrase.corpus.hub import count_rows, pin_revision
from metaphrase.corpus.kinds import XML
from metaphrase.corpus.readers import read_pairs
from metaphrase.corpus.readers.columns import column_role
from metaphrase.corpus.report import CorpusReport
from metaphrase.corpus.rows import OPTIONAL, SENTENCES, Row, row_features
from metaphrase.corpus.selection import Selection, select_rows
from metaphrase.corpus.text import MAX_BAD_RATE, MAX_CHARS, MAX_EXPANSION, count_lines, read_chunks
from metaphrase.exceptions import CorpusError, UsageError
from metaphrase.io.arguments import Count, LanguageTemperature, Positive, Seed, Share, checked
from metaphrase.io.digests import PinnedFile
from metaphrase.io.files import read_json, replacing, write_json
from metaphrase.io.locks import exclusive
from metaphrase.io.work_folders import DAMAGED

logger = logging.getLogger(__name__)

#: Rows that are converted at a time.
_CHUNK = 10_000
#: Pairs of each file that are read in advance, to find the columns and languages of the stream.
_PEEKED = 100


@dataclass
class Corpus:
    """A loaded corpus.

    Attributes:
        dataset: Rows ``source``, ``target``, ``source_lang``, ``target_lang``, and the columns of ``OPTIONAL`` that a file
            has.
        report: How many pairs were read, kept and dropped.
        files: One dict per file: ``path``, ``file`` (its bare name), ``language``, ``languages`` (of both sides), ``sha256``
            (comma-separated for the two files of a Moses pair), ``revision`` (of a Hub data set) and, except in a stream,
            ``pairs`` kept.
    """

    dataset: Dataset | IterableDataset
    report: CorpusReport
    files: list[dict[str, Any]]


@checked
def load_corpus(  # noqa: PLR0913 - one keyword per decision of the user
    corpus: CorpusLike,
    *,
    languages: Sequence[str] | None = None,
    source_lang: str | None = None,
    target_lang: str = "en",
    split: str = "train",
    source_column: str | None = None,
    target_column: str | None = None,
    streaming: bool = False,
    on_disk: str | Path | None = None,
    cleaning: Cleaning | None = Cleaning(),  # noqa: B008
    temperature: LanguageTemperature | None = None,
    limit: Count | None = None,
    seed: Seed = 42,
    tokenizer: Any = None,
    max_chars: Count = MAX_CHARS,
    max_bad_rate: Share = MAX_BAD_RATE,
    max_expansion: Positive | None = MAX_EXPANSION,
) -> Corpus:
    """Load parallel text.

    A corpus is one of these, or a list of them:

    - a file ``.tsv``, ``.csv``, ``.jsonl``, ``.parquet`` or ``.tmx``, optionally compressed (``.gz``). The header of a TSV or
      CSV names its columns: ``source target [source_lang target_lang alignment …]`` (see ``OPTIONAL``), or language codes.
      A column ``id`` beside other columns is a key, unless Indonesian is chosen. Without a header, it has two columns. A TSV
      has no quoting;
    - a Moses pair: ``europarl.sw-en.sw,europarl.sw-en.en``, ``europarl.sw-en.{sw,en}`` or their prefix
      ``europarl.sw-en``;
    - a folder: every file ``xx-en[.split].<ext>`` in it, or, if there is none, every ``.parquet`` file whose columns state
      the languages, as ``metaphrase mine`` and ``filter`` write them;
    - a Hub data set ``hf:org/name[:config][@split][#revision]``, pinned to the commit that it has when it is loaded;
    - a ``datasets.Dataset``.

    A column ``translation`` of ``{language: text}`` is read as columns of these languages.

    The language of a row comes from its columns, else from the file's name (``sw-en.train.tsv.gz``, ``x.sw-en.jsonl``,
    Moses suffixes), else from ``source_lang``, or from ``languages`` if it has a single entry. A pair whose source is in the
    target language (``en-sw.tsv``) is swapped.

    Without streaming, ``temperature`` resamples the corpus; its size stays the same. In a stream, languages are interleaved
    at random. Without a temperature, they are interleaved in proportion to their sizes, and each pair occurs once per pass.
    With a temperature, they are interleaved in proportion to ``size ** temperature`` until every language is exhausted
    (``stopping_strategy="all_exhausted"``), so that pairs of small languages recur. Within a language, a stream keeps the
    order of the files: shuffle it with ``dataset.shuffle(seed=…, buffer_size=…)``. A trainer that replays the stream resumes
    it exactly.

    Args:
        corpus: What to load.
        languages: Source languages to keep: one code or several. A code with a script, such as ``zh-Hant``, keeps only this
            script; a code without a script keeps all scripts. If a single file does not state its language, a single code is
            taken as this language.
        source_lang: Language of the sources, for files without one.
        target_lang: The target language of the corpus.
        split: Which of ``xx-en.train.tsv.gz``, ``xx-en.dev.tsv.gz``, … (or ``train-00000-of-00001.parquet``, …) to load from
            a folder or the Hub. In a folder, a file named ``valid`` or ``validation`` is one of ``dev``, and a file without a
            split is used if a language has no file of this split.
        source_column: Name of the column with the texts in the source language, if it has another name, e.g. ``"anchor"``.
        target_column: Name of the column with the texts in the target language, e.g. ``"positive"``. If some files have
            these columns, the others are read as usual.
        streaming: Read while training, in bounded memory. The report is filled while the stream is read.
        on_disk: Folder for the clean pairs, which are memory-mapped from there. Pairs have indices even if the
            corpus exceeds memory, so that a trainer resumes at any pair without reading the preceding ones. A folder that
            already holds this corpus is reused. Finding duplicates takes about 100 bytes of memory per pair, unless the
            cleaning disables it.
        cleaning: The filters; None keeps every readable pair unchanged.
        temperature: Exponent of the mixture of languages, ``n ** temperature``: 1 keeps their shares, 0 makes them equal;
            multilingual BERT uses 0.7.
        limit: Maximum number of pairs of each language; the first ones are kept.
        seed: Seed of the mixture.
        tokenizer: Counts pieces for a cleaning without a tokenizer: a function from text to pieces, or a tokenizer with a
            method ``tokenize``.
        max_chars: A side with more characters is unreadable.
        max_bad_rate: A file is refused if a larger share of its lines is unreadable, once 1000 lines are read.
        max_expansion: Largest expansion of a ``.gz`` or Parquet file, beyond its first 64 MiB; None disables the limit.

    Raises:
        FileNotFoundError: A file, or a language of the folder, does not exist.
        ValueError: A file is damaged, expands too far, cannot be paired, has too many unreadable lines, has no language,
            or changes while it is read. A stream checks this in every pass.
    """
    languages = [languages] if isinstance(languages, str) else languages
    files = find_files(
        corpus,
        languages=languages,
        source_lang=source_lang,
        target_lang=target_lang,
        split=split,
        source_column=source_column,
        target_column=target_column,
    )
    if cleaning is not None and cleaning.counts_pieces and cleaning.tokenizer is None:
        if tokenizer is None:
            raise UsageError("This cleaning counts pieces: pass a tokenizer, or use `cleaning.without_pieces()`.")
        cleaning = dataclasses.replace(cleaning, tokenizer=getattr(tokenizer, "tokenize", tokenizer))
    drop = cleaning is not None and (not streaming if cleaning.duplicates is None else cleaning.duplicates)
    wanted = frozenset(map(bare_language, languages or ()))
    selection = Selection(cleaning, drop, wanted, limit, max_chars, max_bad_rate)
    for at, file in enumerate(files):
        revision = pin_revision(file.name, file.revision) if file.format == "hub" else file.revision
        files[at] = dataclasses.replace(file, revision=revision, max_expansion=max_expansion)
    if streaming and on_disk is not None:
        raise UsageError("`streaming` and `on_disk` exclude each other. Remove one of them.")
    if any(file.format == "dataset" for file in files) and (streaming or on_disk is not None):
        raise UsageError("A data set in memory is neither streamed nor stored. Omit `streaming` and `on_disk`.")
    if streaming:
        return _stream(files, selection, temperature, seed)
    loaded = _in_memory(files, selection) if on_disk is None else _on_disk(files, selection, Path(on_disk))
    if temperature is not None:
        assert isinstance(loaded.dataset, Dataset)
        loaded.dataset = loaded.dataset.select(mix(loaded.dataset["source_lang"], temperature, seed))
        loaded.report.sampled = dict(Counter(loaded.dataset["source_lang"]))
    return loaded


def _in_memory(files: Sequence[BitextFile], selection: Selection) -> Corpus:
    report, tables = CorpusReport(), list[pa.Table]()
    files = [file.pinned() for file in files]
    present, facts = _read_all(files, selection, report, tables.append)
    features = row_features(present)
    columns = {name: pa.chunked_array([table[name].chunk(0) for table in tables]) for name in features}
    return Corpus(Dataset.from_dict(columns, features=features), report, facts)


def _on_disk(files: Sequence[BitextFile], selection: Selection, folder: Path) -> Corpus:
    """The clean pairs in a memory-mapped Arrow file, with a JSON file next to it that is written last."""
    key = _cache_key(files, selection)
    for about in sorted(folder.glob(f"pairs-{key}-*.json")):
        with suppress(OSError, *DAMAGED):
            known = read_json(about)
            arrow = about.with_suffix(".arrow")
            if known["bytes"] == arrow.stat().st_size:
                for pin in known["pins"]:
                    PinnedFile.from_dict(pin).check()
                logger.info("Reusing the corpus in %s.", arrow)
                dataset = Dataset.from_file(str(arrow)).select_columns(known["columns"])
                return Corpus(dataset, CorpusReport.from_dict(known["report"]), known["files"])
    report, files = CorpusReport(), [file.pinned() for file in files]
    arrow = folder / f"pairs-{key}-{Hasher.hash([file.sha256 for file in files])}.arrow"
    about = arrow.with_suffix(".json")
    schema = pa.schema([(name, pa.string()) for name in Row._fields])
    with exclusive(folder):
        about.unlink(missing_ok=True)
        with replacing(arrow) as partial, partial.open("wb") as file, pa.ipc.new_stream(file, schema) as writer:
            present, facts = _read_all(files, selection, report, writer.write_table)
        columns = list(row_features(present))
        known = {"bytes": arrow.stat().st_size, "columns": columns, "report": report.to_dict(), "files": facts}
        write_json(about, known | {"pins": [pin.to_dict() for file in files for pin in file.pins]})
    return Corpus(Dataset.from_file(str(arrow)).select_columns(columns), report, facts)


def _cache_key(files: Sequence[BitextFile], selection: Selection) -> str:
    """The key of a corpus on disk: the names of its files, and how they are read."""
    how = dataclasses.replace(selection, languages=frozenset()), sorted(selection.languages)
    return str(Hasher.hash((files, how, importlib.metadata.version("metaphrase"))))


def _read_all(
    files: Sequence[BitextFile], selection: Selection, report: CorpusReport, write: Callable[[pa.Table], Any]
) -> tuple[set[str], list[dict[str, Any]]]:
    """Read every pair, a chunk at a time.

    Returns the optional columns that have a value anywhere, and the facts of each file.
    """
    present = set[str]()
    rows = select_rows(files, selection, report)
    while chunk := list(islice(rows, _CHUNK)):
        columns = {
            name: pa.array(values, pa.string())
            for name, values in zip(Row._fields, zip(*chunk, strict=True), strict=True)
        }
        present.update(name for name, column in columns.items() if len(column) > column.null_count)
        write(pa.table({n: c.fill_null("") if n in SENTENCES else c for n, c in columns.items()}))
    if not report.kept:
        raise CorpusError(f"No pair of {file_names(files)} was kept.\n{report}")
    if missing := selection.languages - set(report.languages):
        available = ", ".join(sorted(report.languages))
        raise CorpusError(f"No pair was kept for {', '.join(sorted(missing))}. Languages of the corpus: {available}.")
    facts = []
    for file in files:
        counts = {language: c for (name, language), c in report.counts.items() if name == file.name}
        found = [language for language, c in counts.items() if c.kept]
        pairs = sum(c.kept for c in counts.values())
        facts.append(describe_file(file, found) | {"pairs": pairs})
        if not pairs and report.of(file.name, file.language or "?").read:
            logger.warning("%s: no pair was kept.", file.name)
    return present, facts


# Mixing


def shares(sizes: Mapping[str, int], temperature: float) -> dict[str, float]:
    """Compute each language's share of a mixture, in proportion to ``size ** temperature``.

    The exponent is the smoothing of multilingual BERT (0.7): 1 keeps the shares, 0 makes them equal.

    >>> shares({"sw": 100, "te": 400}, 0.5)
    {'sw': 0.3333333333333333, 'te': 0.6666666666666666}
    """
    weights = {language: size**temperature for language, size in sizes.items() if size}
    return {language: weight / sum(weights.values()) for language, weight in weights.items()}


def mix(languages: Sequence[str], temperature: float, seed: int) -> list[int]:
    """Resample rows at the same total size; within a language, the counts of two rows differ by one at most.

    Returns the row numbers of the mixture. The temperature is the exponent of the sizes; see `shares`.
    """
    rows: dict[str, list[int]] = defaultdict(list)
    for i, language in enumerate(languages):
        rows[language].append(i)
    total = sum(map(len, rows.values()))
    exact = {code: p * total for code, p in shares({c: len(r) for c, r in rows.items()}, temperature).items()}
    counts = {language: math.floor(n) for language, n in exact.items()}
    rest = sorted(exact, key=lambda language: (counts[language] - exact[language], language))
    for language in rest[: total - sum(counts.values())]:
        counts[language] += 1
    generator = random.Random(seed)
    mixture: list[int] = []
    for language in sorted(rows):
        copies, more = divmod(counts[language], len(rows[language]))
        mixture += rows[language] * copies + generator.sample(rows[language], more)
    generator.shuffle(mixture)
    return mixture


# Streaming


def _stream(files: Sequence[BitextFile], selection: Selection, temperature: float | None, seed: int) -> Corpus:
    """Files as one interleaved stream.

    The files of a language are its shards, unless the rows to keep depend on those before them: with a limit, or if
    duplicates are dropped.
    """
    report = CorpusReport()
    groups: dict[str | None, Sequence[BitextFile]] = {}
    facts, found, optional, mixed = [], set[str](), set[str](), list[BitextFile]()
    in_order = selection.limit is not None or selection.drop_duplicates
    needs_all = in_order or temperature is not None
    files = [file.pinned() for file in files]
    glance = CorpusReport(logged={file.name for file in files})
    for file in files:
        pairs = read_pairs(file, max_chars=selection.max_chars, max_bad_rate=selection.max_bad_rate, report=glance)
        is_whole = needs_all and file.format != "hub" and states_languages(file)  # any row may be in another language
        languages = dict[str, None]()
        for _, _, _, known in islice(pairs, None if is_whole else _PEEKED):
            languages[source_language(known, file)] = None
            optional.update(known)
        optional.update(_later_columns(file, selection.max_chars))
        facts.append(describe_file(file, [*languages]))
        found.update(languages)
        if not languages:
            logger.warning("%s: no pair was kept.", file.name)
            continue
        chosen = selection.languages.intersection(languages) if selection.languages else {*languages}
        if file.language is None or chosen - {file.language}:
            mixed.append(file)
        groups[file.language] = [*groups.get(file.language, ()), file]
    if not found:
        raise CorpusError(f"No pair of {file_names(files)} was kept.\n{glance}")
    _warn_of_missing(selection.languages - found)
    features = row_features(optional)
    if temperature is not None:
        _check_mixture(groups.get(None, ()), mixed)
    if in_order and mixed:  # rows may be in the language of another group
        groups = {None: files}
    streams = [
        IterableDataset.from_generator(
            _stream_rows,
            features=features,
            gen_kwargs={
                "files": tuple(group) if in_order else group,
                "selection": selection,
                "report": report,
                "columns": tuple(features),
            },
        )
        for group in groups.values()
    ]
    if len(streams) == 1:
        return Corpus(streams[0], report, facts)
    sizes = {str(code): sum(map(_size, group)) for code, group in groups.items()}
    if selection.limit is not None:
        sizes = {language: min(size, selection.limit) for language, size in sizes.items()}
    dataset = interleave_datasets(
        streams,
        probabilities=list(shares(sizes, 1.0 if temperature is None else temperature).values()),
        seed=seed,
        stopping_strategy="all_exhausted_without_replacement" if temperature is None else "all_exhausted",
    )
    return Corpus(dataset, report, facts)


def _warn_of_missing(languages: Iterable[str]) -> None:
    """Report chosen languages that the files of a stream may lack; its later pairs are not read in advance."""
    for language in sorted(languages):
        logger.warning("No pair in %r among the first %d pairs of each file.", language, _PEEKED)


def _later_columns(file: BitextFile, max_chars: int) -> set[str]:
    """Optional columns that only pairs after the first ones may fill."""
    names: Iterable[str] = ()
    if file.format == "parquet":
        names = pq.read_schema(file.paths[0]).names
    elif file.format == "jsonl":
        names = json_keys(file, max_chars)
    elif file.format == "hub":
        names = next(iter(dataset_rows(file)), {})
    return {*OPTIONAL}.intersection(map(column_role, names))


def _check_mixture(unnamed: Sequence[BitextFile], mixed: Sequence[BitextFile]) -> None:
    """Refuse files that have to be one stream, whose languages cannot be mixed by a temperature."""
    if unnamed:
        raise CorpusError(
            f"A stream mixes languages by file, but the name of {file_names(unnamed)} states no language. Split the "
            "file by language, or read it without streaming."
        )
    if mixed:
        raise CorpusError(
            f"A stream mixes languages by file, but {file_names(mixed)} has rows in other languages than its name states. "
            "Split the file by language, or read it without streaming."
        )


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
