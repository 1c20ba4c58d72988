"""``metaphrase align``: add word links to a bitext, from files to a file or as a Unix filter."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import logging
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, cast

import torch
from datasets import Dataset
from rich.table import Table

from metaphrase.aligners import ALIGNERS, STATISTICAL
from metaphrase.aligners.base import Aligner
from metaphrase.aligners.linking import (
    SEGMENTERS,
    AlignmentReport,
    add_alignment,
    align_rows,
    aligner_name,
    load_aligners,
    segmenter_of,
)
from metaphrase.cli import emit, is_json, notes, parse, show_progress
from metaphrase.corpus.loading import load_corpus
from metaphrase.corpus.phrases import PhraseTable
from metaphrase.corpus.writing import check_writable, write_corpus
from metaphrase.exceptions import CorpusError, MissingExtraError, UsageError
from metaphrase.io.work_folders import clear_work_folder, open_work_folder

logger = logging.getLogger(__name__)

DESCRIPTION = "metaphrase align FILES… -o OUT, or metaphrase align < TSV > TSV"

EXAMPLES = (
    "metaphrase align pairs.tsv -o aligned.parquet --source_lang sw",
    "metaphrase align data/ -o aligned.tsv.gz --aligner hmm --json",
    "metaphrase align --pharaoh < pairs.tsv > links.txt",
)

#: Options of each kind of aligner.
SETTINGS = {
    "statistical": ("heuristic", "iterations", "lowercase", "strip_punctuation"),
    "embedding": ("model", "layer", "method", "level", "threshold", "batch_size"),
    "span": ("model", "threshold", "batch_size", "force_bidirectional", "align_to_words"),
}
#: Number of lines that a streaming filter processes at a time.
_LINES = 256


@dataclass
class AlignOptions:
    """Options of ``metaphrase align``."""

    files: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Bitext: TSV, JSONL, Parquet, TMX, Moses 'x.sw,x.en', a folder, or hf:org/name. May be the first "
            "argument. Without files, or with '-', lines are read from stdin: 'source<TAB>target', with or without a "
            "header, or 'a b ||| x y'."
        },
    )
    output: str | None = field(
        default=None,
        metadata={
            "aliases": ["-o"],
            "help": "Output file: .tsv, .tsv.gz, .jsonl, .jsonl.gz or .parquet. A filter writes to stdout by default.",
        },
    )
    aligner: str = field(
        default="fast_align", metadata={"help": f"Aligner: {', '.join(ALIGNERS)} (default: fast_align)."}
    )
    heuristic: str | None = field(
        default=None,
        metadata={"help": "Statistical: symmetrisation heuristic (default: grow-diag-final-and)."},
    )
    iterations: int | None = field(
        default=None, metadata={"help": "Statistical: training iterations of each model (default: 5)."}
    )
    model: str | None = field(
        default=None,
        metadata={"help": "Embedding: encoder (default: starter). Span: checkpoint for question answering."},
    )
    layer: int | None = field(default=None, metadata={"help": "Embedding: hidden layer."})
    method: str | None = field(default=None, metadata={"help": "Embedding: argmax, itermax (default) or softmax."})
    level: str | None = field(default=None, metadata={"help": "Embedding: units to compare, piece (default) or word."})
    threshold: float | None = field(
        default=None,
        metadata={"help": "Span, and embedding with --method softmax: lower bound of the score of a link."},
    )
    lowercase: bool | None = field(default=None, metadata={"help": "Statistical: lowercase words (default: true)."})
    strip_punctuation: bool | None = field(
        default=None, metadata={"help": "Statistical: strip punctuation at both ends of words (default: true)."}
    )
    force_bidirectional: bool | None = field(
        default=None, metadata={"help": "Span: keep only links found in both directions."}
    )
    align_to_words: bool | None = field(
        default=None, metadata={"help": "Span: extend answers to whole words (default: true)."}
    )
    batch_size: int | None = field(default=None, metadata={"help": "Embedding and span: texts per forward pass."})
    segmenter: str = field(
        default="auto",
        metadata={
            "help": "whitespace: split words at spaces. auto, icu: use ICU for languages written without spaces (zh, ja, th, "
            "…), and record it in the column 'segmenter'."
        },
    )
    overwrite: bool = field(default=False, metadata={"help": "Replace existing links."})
    source_lang: str | None = field(
        default=None, metadata={"help": "Language of the sources, if it cannot be inferred."}
    )
    target_lang: str = field(default="en", metadata={"help": "Language of the targets."})
    languages: list[str] = field(default_factory=list, metadata={"help": "Languages to read from the files."})
    split: str = field(default="train", metadata={"help": "Split to read: xx-en.train.tsv.gz, xx-en.dev.tsv.gz, …"})
    limit: int | None = field(default=None, metadata={"help": "Maximum number of pairs per language."})
    pharaoh: bool = field(default=False, metadata={"help": "Filter: print only the links, '0-0 1-2'."})
    save: str | None = field(
        default=None,
        metadata={"help": "Statistical: save the aligners to this folder, one for each pair of languages."},
    )
    load: str | None = field(
        default=None,
        metadata={"help": "Statistical: load aligners written by --save; a filter then streams."},
    )
    phrase_table: str | None = field(
        default=None, metadata={"help": "File for the phrase pairs of the aligned bitext (.tsv.gz)."}
    )
    summary: str | None = field(default=None, metadata={"help": "File for the summary (JSON)."})


def run(argv: Sequence[str]) -> int:
    """Align a corpus or lines of stdin."""
    leading = next((at for at, token in enumerate(argv) if token.startswith("-") and token != "-"), len(argv))
    arguments = ["--files", *argv[:leading], *argv[leading:]] if leading else list(argv)
    (options,) = parse("metaphrase align", [AlignOptions], arguments, description=DESCRIPTION, examples=EXAMPLES)
    settings = check(options)
    torch.set_flush_denormal(True)
    try:
        if options.files in ([], ["-"]):
            return align_lines(options, settings)
        return align_corpus(options, settings)
    except ImportError as error:
        raise MissingExtraError(str(error)) from error


def check(options: AlignOptions) -> dict[str, Any]:
    """Return the settings of the aligner.

    Raises:
        UsageError: Options conflict.
    """
    if options.aligner not in ALIGNERS:
        raise UsageError(f"Unknown aligner {options.aligner!r}. Available aligners: {', '.join(ALIGNERS)}.")
    if options.segmenter not in SEGMENTERS:
        raise UsageError(f"Unknown segmenter {options.segmenter!r}. Available segmenters: {', '.join(SEGMENTERS)}.")
    kind = "statistical" if options.aligner in STATISTICAL else options.aligner
    everything = {name for names in SETTINGS.values() for name in names}
    settings = {name: value for name in sorted(everything) if (value := getattr(options, name)) is not None}
    if others := settings.keys() - set(SETTINGS[kind]):
        raise UsageError(f"--{min(others)} is not an option of the aligner {options.aligner!r}.")
    if kind == "embedding" and options.threshold is not None and options.method != "softmax":
        raise UsageError(
            "--threshold requires --method softmax; the other methods of the embedding aligner have no threshold."
        )
    if kind == "span" and options.model is None:
        raise UsageError("The span aligner requires --model, a question answering checkpoint such as WSPAlign's.")
    if kind != "statistical" and (options.save or options.load):
        raise UsageError("--save and --load are for statistical aligners; other aligners are not trained.")
    trained = {"iterations", "lowercase", "strip_punctuation"} & settings.keys()
    if options.load and (options.save or trained):
        raise UsageError(f"--load uses an aligner as it was trained: remove --{min(trained) if trained else 'save'}.")
    filtering = options.files in ([], ["-"])
    if not filtering and "-" in options.files:
        raise UsageError("stdin ('-') cannot be mixed with files.")
    if not filtering and options.output is None:
        raise UsageError("Files require -o FILE. Or pass the bitext on stdin.")
    if not filtering and options.pharaoh:
        raise UsageError("--pharaoh is for lines of stdin; the output of files contains the pairs.")
    if filtering and options.phrase_table:
        raise UsageError("--phrase_table requires files.")
    if filtering and is_json() and options.output is None:
        raise UsageError("stdout contains the aligned lines: pass --summary FILE instead of --json, or add -o FILE.")
    if not filtering:
        check_writable(str(options.output))
    return settings


def align_corpus(options: AlignOptions, settings: dict[str, Any]) -> int:
    """Align files to one file. Finished chunks are stored next to it until it is complete."""
    output = Path(str(options.output))
    corpus = load_corpus(
        options.files,
        languages=[code for item in options.languages for code in item.split(",") if code] or None,
        source_lang=options.source_lang,
        target_lang=options.target_lang,
        split=options.split,
        limit=options.limit,
        cleaning=None,
    )
    console = notes()
    if corpus.report.dropped:
        console.print(f"{corpus.report}\n")
    inputs = {facts["path"]: facts["sha256"] for facts in corpus.files}
    work = open_work_folder(output.with_name(f"{output.name}.partial"), _manifest(options, inputs))
    dataset, report = add_alignment(
        corpus.dataset,
        *([load_aligners(options.load, heuristic=options.heuristic)] if options.load else [options.aligner]),
        segmenter=options.segmenter,
        overwrite=options.overwrite,
        show_progress=show_progress(),
        folder=work,
        **({} if options.load else settings),
    )
    _keep(work / "models", options.save)
    files = [{"file": facts["file"], "sha256": facts["sha256"]} for facts in corpus.files]
    facts: dict[str, Any] = {"output": output.name, "files": files, **report.to_dict()}
    if options.phrase_table:
        table = PhraseTable.of_corpus(dataset)
        facts["phrases"] = len(table)
        console.print(f"Wrote {len(table):,} phrase pairs to {table.save(options.phrase_table)}")
    write_corpus(dataset, output)
    summarise(report, options, facts)
    console.print(f"Wrote {output}")
    clear_work_folder(work)
    emit(facts)
    return 0


def _manifest(options: AlignOptions, inputs: Mapping[str, str | None]) -> dict[str, Any]:
    """Return everything that determines the output."""
    nowhere = ("output", "save", "phrase_table", "summary", "files", "pharaoh")
    manifest: dict[str, Any] = {key: value for key, value in asdict(options).items() if key not in nowhere}
    if options.load:
        files = sorted(Path(options.load).rglob("aligner.json"))
        manifest["load"] = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return {"inputs": dict(inputs), **manifest}


def _keep(models: Path, folder: str | None) -> None:
    """Copy trained aligners to the folder of ``--save``."""
    if folder is not None:
        if models.exists():
            shutil.copytree(models, folder, dirs_exist_ok=True)
        else:
            logger.warning("No aligner was saved: all pairs have links, so none was trained.")


def summarise(report: AlignmentReport, options: AlignOptions, facts: dict[str, Any]) -> None:
    """Print the summary, and write it as JSON with ``--summary``."""
    console = notes()
    table = Table(title=f"Word links by {report.aligner}")
    for column in ("languages", "pairs", "kept", "source words linked", "target words linked", "links per pair"):
        table.add_column(column, justify="left" if column == "languages" else "right", no_wrap=column == "languages")
    for column in ("without links", "too long"):
        table.add_column(column, justify="right")
    rows = sorted(report.counts.items())
    for languages, counts in [*rows, ("all", report.total)] if len(rows) > 1 else rows:
        shares = counts.facts()
        table.add_row(
            languages,
            f"{counts.pairs:,}",
            f"{counts.kept:,}",
            f"{shares['share_source_linked']:.1%}",
            f"{shares['share_target_linked']:.1%}",
            f"{shares['links_per_pair']:.1f}",
            f"{counts.unlinked:,}",
            f"{counts.too_long:,}",
        )
    console.print(table)
    if report.pairs_per_second:
        console.print(
            f"{report.pairs_per_second:,.0f} pairs per second: "
            f"{report.training_seconds:.1f} s of training, {report.seconds:.1f} s of aligning"
        )
    if options.summary:
        path = Path(options.summary)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        console.print(f"Wrote {path}")


# -------------------------------------------------------------------------------------------------------------- filter


@dataclass
class _Lines:
    """The lines of a filter and their format.

    Attributes:
        header: Names of the columns, or None if the first line is a pair.
        form: ``"tsv"`` or ``"fast_align"``.
        rows: The fields of each line.
    """

    header: list[str] | None
    form: str
    rows: Iterator[list[str]]

    @classmethod
    def of(cls, stream: BinaryIO) -> _Lines:
        lines = _decoded(stream)
        first = next(lines, None)
        if first is None:
            return cls(None, "tsv", iter(()))
        text = first[1]
        if "\t" not in text and "|||" in text.split():
            return cls(None, "fast_align", _split(_again(first, lines), 2, "fast_align"))
        columns = text.split("\t")
        if {"source", "target"} <= set(columns):
            if len(set(columns)) < len(columns):
                raise CorpusError(f"stdin:1: duplicate column in the header: {', '.join(columns)}.")
            return cls(columns, "tsv", _split(lines, len(columns), "tsv"))
        if len(columns) != 2:
            raise CorpusError(
                "stdin:1: expected 'source<TAB>target', 'a b ||| x y', or a header with the columns 'source' and 'target', "
                f"got {text[:80]!r}."
            )
        return cls(None, "tsv", _split(_again(first, lines), 2, "tsv"))

    def columns(self, rows: Sequence[Sequence[str]], options: AlignOptions) -> dict[str, list[Any]]:
        """Convert rows to the columns that an aligner reads."""
        names = self.header or ["source", "target"]
        columns: dict[str, list[Any]] = {
            name: [row[at] for row in rows]
            for at, name in enumerate(names)
            if name in ("source", "target", "source_lang", "target_lang", "alignment", "alignment_scores", "segmenter")
        }
        columns.setdefault("source_lang", [options.source_lang] * len(rows))
        columns.setdefault("target_lang", [options.target_lang] * len(rows))
        return columns

    def added(self, options: AlignOptions) -> list[str]:
        """Return the added columns: only ``alignment`` without a header, ``segmenter`` only if it may be needed."""
        if self.header is None:
            return ["alignment"]
        named = "source_lang" in self.header or "target_lang" in self.header or "segmenter" in self.header
        unspaced = segmenter_of((options.source_lang, options.target_lang), options.segmenter) == "icu"
        return ["alignment", "alignment_scores", *(["segmenter"] if named or unspaced else [])]


def _again(first: tuple[int, str], lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    yield first
    yield from lines


def _decoded(stream: BinaryIO) -> Iterator[tuple[int, str]]:
    for number, raw in enumerate(stream, 1):
        try:
            yield number, raw.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorpusError(f"stdin:{number}: not UTF-8 (byte {raw[error.start]:#04x}).") from error


def _split(lines: Iterable[tuple[int, str]], width: int, form: str) -> Iterator[list[str]]:
    for number, text in lines:
        fields = text.split("\t") if form == "tsv" else [side.strip() for side in text.split("|||")]
        if len(fields) != width:
            raise CorpusError(f"stdin:{number}: expected {width} columns, got {len(fields)}: {text[:80]!r}.")
        yield fields


def align_lines(options: AlignOptions, settings: dict[str, Any]) -> int:
    """Align lines of stdin, one output line for each input line."""
    if sys.stdin.isatty():
        raise UsageError("Pass files to align, or lines on stdin. See `metaphrase align --help`.")
    lines = _Lines.of(sys.stdin.buffer)
    with _destination(options.output) as out:
        if lines.header is not None and not options.pharaoh:
            new = [name for name in lines.added(options) if name not in lines.header]
            _write(out, "\t".join([*lines.header, *new]))
        learns = options.aligner in STATISTICAL and not options.load
        report = (
            _align_all(lines, options, settings, out) if learns else _align_streaming(lines, options, settings, out)
        )
    if report.total.pairs:
        summarise(report, options, report.to_dict())
    if is_json():
        emit(report.to_dict())
    return 0


def _align_all(lines: _Lines, options: AlignOptions, settings: dict[str, Any], out: BinaryIO) -> AlignmentReport:
    """Align with an aligner that is trained on all lines."""
    rows = list(lines.rows)
    if not rows:
        return AlignmentReport(options.aligner)
    with TemporaryDirectory() as folder:
        dataset, report = add_alignment(
            Dataset.from_dict(lines.columns(rows, options)),
            options.aligner,
            segmenter=options.segmenter,
            overwrite=options.overwrite,
            show_progress=show_progress(),
            folder=folder if options.save else None,
            **settings,
        )
        _keep(Path(folder) / "models", options.save)
    _write_rows(lines, rows, {name: dataset[name] for name in dataset.column_names}, options, out)
    return report


def _align_streaming(lines: _Lines, options: AlignOptions, settings: dict[str, Any], out: BinaryIO) -> AlignmentReport:
    """Align while reading."""
    loaded = load_aligners(options.load, heuristic=options.heuristic) if options.load else None
    aligner = ALIGNERS[options.aligner](**settings) if loaded is None else loaded

    def aligner_of(languages: str) -> Aligner:
        if isinstance(aligner, Aligner):
            return aligner
        if languages not in aligner:
            raise UsageError(f"{options.load} has no aligner for {languages}, only for {', '.join(aligner)}.")
        return aligner[languages]

    report = AlignmentReport(options.aligner if loaded is None else aligner_name(loaded))
    while rows := list(islice(lines.rows, _LINES)):
        columns = lines.columns(rows, options)
        start = time.perf_counter()
        links = align_rows(
            columns, aligner_of, segmenter=options.segmenter, overwrite=options.overwrite, report=report
        )
        report.seconds += time.perf_counter() - start
        _write_rows(lines, rows, columns | links, options, out)
        out.flush()
    return report


def _write_rows(
    lines: _Lines,
    rows: Sequence[Sequence[str]],
    columns: Mapping[str, Sequence[str | None]],
    options: AlignOptions,
    out: BinaryIO,
) -> None:
    names = lines.header or ["source", "target"]
    added = lines.added(options)
    new = [name for name in added if name not in names]
    values = {name: list(columns[name]) if name in columns else [None] * len(rows) for name in added}
    for at, row in enumerate(rows):
        if options.pharaoh:
            _write(out, values["alignment"][at] or "")
            continue
        old = [values[name][at] if name in values else cell for name, cell in zip(names, row, strict=True)]
        _write(out, "\t".join(cell or "" for cell in [*old, *(values[name][at] for name in new)]))


def _write(out: BinaryIO, text: str) -> None:
    out.write(f"{text}\n".encode())


@contextlib.contextmanager
def _destination(output: str | None) -> Iterator[BinaryIO]:
    """Return stdout, or a file that is replaced once everything is written."""
    if output is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(output)
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as raw:
        if path.suffix == ".gz":
            with gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed:
                yield cast("BinaryIO", packed)
        else:
            yield raw
    part.replace(path)
