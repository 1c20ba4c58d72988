"""Aligning the words of a corpus: files in, a file with links out. A killed run resumes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset

from metaphrase.aligners.lines import save_models
from metaphrase.aligners.linking import AlignmentReport, add_alignment, load_aligners
from metaphrase.aligners.options import AlignOptions
from metaphrase.corpus.loading import Corpus
from metaphrase.corpus.phrases import PhraseTable
from metaphrase.corpus.writing import write_corpus
from metaphrase.exceptions import UsageError
from metaphrase.io.digests import file_sha256
from metaphrase.io.work_folders import clear_work_folder, open_work_folder, work_folder_of

logger = logging.getLogger(__name__)


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
        return _align(options, Path(options.output), work, show_progress, note)


def _align(
    options: AlignOptions, output: Path, work: Path, show_progress: bool, note: Callable[[str], Any]
) -> AlignmentResult:
    """Align with a work folder that no other process uses."""
    corpus = options.load_bitext(options.files)
    if corpus.report.dropped:
        note(f"{corpus.report}\n")
    inputs = {facts["path"]: facts["sha256"] for facts in corpus.files}
    open_work_folder(work, _manifest(options, inputs))
    dataset, report = _add_links(corpus, options, work, show_progress)
    if not save_models(work / "models", options.save):
        logger.warning("No aligner was saved: every pair already has links, so none was trained.")
    files = [{"file": facts["file"], "sha256": facts["sha256"]} for facts in corpus.files]
    facts: dict[str, Any] = {"output": output.name, "files": files, **report.to_dict()}
    if options.phrase_table:
        table = PhraseTable.of_corpus(dataset)
        facts["phrases"] = len(table)
        note(f"Wrote {len(table):,} phrase pairs to {table.save(options.phrase_table)}")
    write_corpus(dataset, output)
    clear_work_folder(work)
    return AlignmentResult(report, facts, output)


def _add_links(
    corpus: Corpus, options: AlignOptions, work: Path, show_progress: bool
) -> tuple[Dataset, AlignmentReport]:
    aligner = load_aligners(options.load, heuristic=options.heuristic) if options.load else options.aligner
    assert isinstance(corpus.dataset, Dataset)
    return add_alignment(
        corpus.dataset,
        aligner,
        segmenter=options.segmenter,
        overwrite=options.overwrite,
        show_progress=show_progress,
        folder=work,
        **({} if options.load else options.settings),
    )


def _manifest(options: AlignOptions, inputs: Mapping[str, str | None]) -> dict[str, Any]:
    """Everything that determines the links."""
    irrelevant = ("output", "save", "phrase_table", "summary", "files", "pharaoh")
    manifest: dict[str, Any] = {key: value for key, value in asdict(options).items() if key not in irrelevant}
    if options.load:
        files = sorted(Path(options.load).rglob("aligner.json"))
        manifest["load"] = {str(path): file_sha256(path) for path in files}
    return {"inputs": dict(inputs), **manifest}
