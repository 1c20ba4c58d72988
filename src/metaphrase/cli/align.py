"""``metaphrase align``: word links for a bitext, as a corpus step (files in, a file out) or as a Unix filter."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from rich.table import Table

from metaphrase.aligners import STATISTICAL
from metaphrase.aligners.linking import AlignmentReport
from metaphrase.aligners.options import AlignOptions
from metaphrase.aligners.workflow import align_files, align_lines
from metaphrase.cli.options import parse
from metaphrase.cli.output import emit, is_json, notes, result_stream, show_progress
from metaphrase.corpus.codes import split_languages
from metaphrase.corpus.writing import text_writer
from metaphrase.exceptions import UsageError
from metaphrase.io.counts import counted
from metaphrase.io.environment import flush_denormals
from metaphrase.io.files import replacing, write_json
from metaphrase.io.tables import titled_table
from metaphrase.io.work_folders import work_folder_of

DESCRIPTION = "Link the words of a bitext: from files to a file, or line by line from stdin to stdout."

EXAMPLES = (
    "metaphrase align pairs.tsv -o aligned.parquet --source_lang sw",
    "metaphrase align data/ -o aligned.tsv.gz --aligner hmm --json",
    "metaphrase align --pharaoh < pairs.tsv > links.txt",
)


def run(argv: Sequence[str]) -> int:
    """Align files, or lines of stdin."""
    if {("-o", "-"), ("--output", "-")} & set(itertools.pairwise(argv)):
        raise UsageError("-o needs a file, not '-'. Lines of stdin are written to stdout by default.")
    if "-" in argv and "--files" not in argv:  # stdin, at any position
        argv = ["-", *(token for token in argv if token != "-")]
    (options,) = parse("metaphrase align", [AlignOptions], argv, description=DESCRIPTION, examples=EXAMPLES)
    options.languages = split_languages(options.languages, keep_scripts=True)
    options.check()
    if options.aligner not in STATISTICAL:
        flush_denormals()  # it imports torch, which statistical aligners do without
    return _align_stdin(options) if options.reads_lines else _align_files(options)


def _align_files(options: AlignOptions) -> int:
    console = notes()
    result = align_files(options, show_progress=show_progress(), note=console.print)
    _summarise(result.report, options, result.facts)
    console.print(f"Wrote {result.output}")
    emit(result.facts)
    return 0


def _align_stdin(options: AlignOptions) -> int:
    if is_json() and options.output is None:
        raise UsageError(
            "stdout is used for the aligned lines: pass --summary FILE instead of --json, or also pass -o FILE."
        )
    if sys.stdin.isatty():
        raise UsageError("Pass the files to align, or pipe lines to stdin. See `metaphrase align --help`.")
    with _open_output(options.output) as out:
        report = align_lines(options, sys.stdin.buffer, out, show_progress=show_progress())
    _summarise(report, options, report.to_dict())
    if is_json():
        emit(report.to_dict())
    return 0


def _summarise(report: AlignmentReport, options: AlignOptions, facts: dict[str, Any]) -> None:
    """Print the summary, and write it as JSON if requested."""
    console = notes()
    if report.total.pairs:
        console.print(_summary_table(report))
    if report.pairs_per_second:
        console.print(
            f"{report.pairs_per_second:,.0f} pairs per second: "
            f"{report.training_seconds:.1f} s of training, {report.seconds:.1f} s of aligning"
        )
    if tokenised := report.total.tokenised:
        console.print(
            f"Tokenised already, in a language without spaces: {counted(tokenised, 'pair')}. Spaces separate the words; "
            "--segmenter icu segments them again."
        )
    if options.summary:
        console.print(f"Wrote {write_json(options.summary, facts)}")


def _summary_table(report: AlignmentReport) -> Table:
    numbers = ["pairs", "already linked", "source words linked", "target words linked", "links per pair"]
    table = titled_table(f"Word links by {report.aligner}", "languages", right=[*numbers, "without links", "too long"])
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
    return table


@contextlib.contextmanager
def _open_output(output: str | None) -> Iterator[BinaryIO]:
    """Stdout, or a file that exists only once it is complete and that no other process writes."""
    if output is None:
        stdout = result_stream().buffer
        yield stdout
        stdout.flush()
        return
    path = Path(output)
    packed = path.suffix == ".gz"
    with work_folder_of(path), replacing(path) as partial, text_writer(partial, packed=packed) as stream:
        yield stream.buffer
