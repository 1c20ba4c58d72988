"""Aligning the words of a corpus: files in, a file with links out, which a killed run resumes; or lines in, lines out.

The lines of a stream are sentence pairs, and each yields one line, in input order.
"""

from __future__ import annotations

import codecs
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

from datasets import Dataset

from metaphrase.aligners import ALIGNERS, STATISTICAL
from metaphrase.aligners.linking import (
    ADDED,
    AlignmentReport,
    add_alignment,
    align_rows,
    aligner_name,
    choose_aligner,
    load_aligners,
    model_digest,
    segmenter_of,
)
from metaphrase.aligners.options import AlignOptions
from metaphrase.corpus.codes import bare_language
from metaphrase.corpus.files import BitextFile
from metaphrase.corpus.phrases import PhraseTable
from metaphrase.corpus.readers.columns import find_layout, is_header
from metaphrase.corpus.writing import write_corpus
from metaphrase.exceptions import CorpusError, UsageError
from metaphrase.io.digests import file_sha256
from metaphrase.io.environment import versions
from metaphrase.io.outputs import claim_folder
from metaphrase.io.work_folders import clear_work_folder, open_work_folder, work_folder_of

logger = logging.getLogger(__name__)

#: Lines that are aligned together by an aligner that is not trained on them.
LINES = 256
#: Columns of lines that an aligner reads; others are only copied.
_READ = ("source", "target", "source_lang", "target_lang", *ADDED)


@dataclass(frozen=True)
class AlignmentResult:
    """The result of aligning files."""

    report: AlignmentReport
    facts: dict[str, Any]
    output: Path


def align_files(
    options: AlignOptions, *, show_progress: bool = False, note: Callable[[str], Any] = logger.info
) -> AlignmentResult:
    """Align the words of a corpus, and write it with its links.

    Aligned chunks and trained aligners are kept in ``OUTPUT.partial`` until the corpus is written. If a call is killed,
    the same call resumes. A second process with the same output is refused.
    """
    options.check()
    if options.output is None:
        raise UsageError("Files require an output file.")
    with work_folder_of(options.output) as work:
        corpus = options.load_bitext(options.files)
        if corpus.report.dropped:
            note(f"{corpus.report}\n")
        # A data set of the Hub has a commit instead of a digest.
        inputs = {facts["path"]: facts["sha256"] or facts.get("revision") for facts in corpus.files}
        settings = _settings(options)
        resumable = {name: value for name, value in settings.items() if name != "batch_size"}
        open_work_folder(work, {"inputs": inputs, **resumable}, locked=True)
        assert isinstance(corpus.dataset, Dataset)
        dataset, report = _add_links(corpus.dataset, options, work, show_progress)
        save_models(work / "models", options.save)
        names = ("file", "sha256", "revision")
        files = [{name: facts[name] for name in names if name in facts} for facts in corpus.files]
        facts: dict[str, Any] = {"output": Path(options.output).name, "files": files, **report.to_dict()}
        facts |= {"settings": settings, "versions": versions()}
        if options.phrase_table:
            table = PhraseTable.of_corpus(dataset)
            facts["phrases"] = len(table)
            note(f"Wrote {len(table):,} phrase pairs to {table.save(options.phrase_table)}")
        output = write_corpus(dataset, options.output)
        clear_work_folder(work)
        return AlignmentResult(report, facts, output)


def _add_links(
    dataset: Dataset, options: AlignOptions, folder: str | Path | None, show_progress: bool
) -> tuple[Dataset, AlignmentReport]:
    return add_alignment(
        dataset,
        load_aligners(options.load, heuristic=options.heuristic) if options.load else options.aligner,
        segmenter=options.segmenter,
        overwrite=options.overwrite,
        show_progress=show_progress,
        folder=folder,
        **({} if options.load else options.settings),
    )


def _settings(options: AlignOptions) -> dict[str, Any]:
    """Everything that determines the links, besides the corpus."""
    irrelevant = ("output", "save", "phrase_table", "summary", "files", "pharaoh")
    settings: dict[str, Any] = {key: value for key, value in asdict(options).items() if key not in irrelevant}
    if options.load:
        from metaphrase.aligners.statistical import FILE

        settings["load"] = {str(path): file_sha256(path) for path in sorted(Path(options.load).rglob(FILE))}
    if options.model:  # only neural aligners have one
        settings["model"] = {"name": options.model, "sha256": model_digest(options.model)}
    return settings


@dataclass
class _Lines:
    """Sentence pairs, one per line, and their format. The header is None if the first line is a pair."""

    options: AlignOptions
    header: list[str] | None
    rows: Iterator[list[str]]

    @classmethod
    def open(cls, stream: BinaryIO, options: AlignOptions) -> _Lines:
        """Read the first line, and infer the format: TSV with or without a header, or fast_align's."""
        lines = _decode(stream)
        first = next(lines, None)
        if first is None:
            return cls(options, None, iter(()))
        text = first[1]
        if "\t" not in text and "|||" in text.split():
            return cls(options, None, _split(chain([first], lines), 2, "|||"))
        columns = text.split("\t")
        if {"source", "target"} <= set(columns):
            if len(set(columns)) < len(columns):
                raise CorpusError(f"stdin:1: the header has a duplicate column: {', '.join(columns)}.")
            return cls(options, columns, _split(lines, len(columns), "\t"))
        file = BitextFile("stdin", "tsv", into=bare_language(options.target_lang))
        if len(columns) != 2 or is_header(columns) or find_layout(columns, file) is not None:
            raise CorpusError(
                "stdin:1: expected a line 'source<TAB>target' or 'a b ||| x y', or a header with the columns 'source' and "
                f"'target', found {text[:80]!r}."
            )
        return cls(options, None, _split(chain([first], lines), 2, "\t"))

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return self.header or ["source", "target"]

    def columns(self, rows: Sequence[Sequence[str]]) -> dict[str, list[Any]]:
        """Convert rows to the columns that an aligner reads."""
        languages = {name: getattr(self.options, name) for name in ("source_lang", "target_lang")}
        columns = {name: [language] * len(rows) for name, language in languages.items()}
        for at, name in enumerate(self.names):
            if name in _READ:
                columns[name] = [row[at] or languages.get(name, "") for row in rows]
        return columns

    @property
    def added(self) -> list[str]:
        """Columns of the output: without a header only the links, and ``segmenter`` only if ICU may be used."""
        if self.header is None:
            return ["alignment"]
        named = not {"source_lang", "target_lang", "segmenter"}.isdisjoint(self.header)
        languages = self.options.source_lang, self.options.target_lang
        unspaced = segmenter_of(languages, self.options.segmenter) == "icu"
        return ["alignment", "alignment_scores", *(["segmenter"] if named or unspaced else [])]

    def write(self, rows: Sequence[Sequence[str]], columns: Mapping[str, Sequence[str | None]], out: BinaryIO) -> None:
        """Write rows with their links."""
        added = {name: list(columns.get(name, [None] * len(rows))) for name in self.added}
        for at, row in enumerate(rows):
            links = {name: values[at] for name, values in added.items()}
            every = dict(zip(self.names, row, strict=True)) | links
            _write(out, [links["alignment"]] if self.options.pharaoh else every.values())


def align_lines(
    options: AlignOptions, stream: BinaryIO, out: BinaryIO, *, show_progress: bool = False
) -> AlignmentReport:
    """Align lines of sentence pairs. An aligner that is not trained on them writes links as lines arrive."""
    options.check()
    lines = _Lines.open(stream, options)
    if lines.header is not None and not options.pharaoh:
        _write(out, dict.fromkeys([*lines.header, *lines.added]))
    if options.aligner in STATISTICAL and not options.load:
        return _align_all(lines, out, show_progress)
    return _align_streaming(lines, out)


def save_models(models: Path, folder: str | None) -> None:
    """Copy trained aligners to the folder of ``save``; warn if no aligner was trained."""
    if folder is not None and not models.exists():
        logger.warning("No aligner was saved: every pair already has links, so none was trained.")
    elif folder is not None:
        from metaphrase.aligners.statistical import remove_aligner

        place = claim_folder(folder)
        remove_aligner(place)  # an aligner that `StatisticalAligner.save` wrote: it would be loaded instead
        for trained in (path for path in models.iterdir() if path.is_dir()):
            remove_aligner(claim_folder(place / trained.name))
        shutil.copytree(models, place, dirs_exist_ok=True)


def _align_all(lines: _Lines, out: BinaryIO, show_progress: bool) -> AlignmentReport:
    """Train on all lines, then align them."""
    rows, options = list(lines.rows), lines.options
    if not rows:
        return AlignmentReport(options.aligner)
    with TemporaryDirectory() as folder:
        pairs = Dataset.from_dict(lines.columns(rows))
        dataset, report = _add_links(pairs, options, folder if options.save else None, show_progress)
        save_models(Path(folder) / "models", options.save)
    lines.write(rows, {name: dataset[name] for name in dataset.column_names}, out)
    return report


def _align_streaming(lines: _Lines, out: BinaryIO) -> AlignmentReport:
    """Align lines as they arrive."""
    options = lines.options
    if options.load:
        aligner = load_aligners(options.load, heuristic=options.heuristic)
    else:
        aligner = ALIGNERS[options.aligner](**options.settings)
    report = AlignmentReport(aligner_name(aligner))
    find = partial(choose_aligner, aligner)
    while rows := list(islice(lines.rows, LINES)):
        columns = lines.columns(rows)
        start = time.perf_counter()
        links, counts = align_rows(columns, find, segmenter=options.segmenter, overwrite=options.overwrite)
        report.add(counts, time.perf_counter() - start)
        lines.write(rows, columns | links, out)
        out.flush()
    return report


def _write(out: BinaryIO, cells: Iterable[str | None]) -> None:
    out.write(("\t".join(cell or "" for cell in cells) + "\n").encode())


def _decode(stream: BinaryIO) -> Iterator[tuple[int, str]]:
    for number, raw in enumerate(stream, 1):
        raw = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
        try:
            yield number, raw.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorpusError(f"stdin:{number}: this is not UTF-8 (byte {raw[error.start]:#04x}).") from error


def _split(lines: Iterable[tuple[int, str]], width: int, separator: str) -> Iterator[list[str]]:
    for number, text in lines:
        fields = text.split("\t") if separator == "\t" else [side.strip() for side in text.split(separator)]
        if len(fields) != width:
            raise CorpusError(f"stdin:{number}: expected {width} columns, found {len(fields)}: {text[:80]!r}.")
        yield fields
