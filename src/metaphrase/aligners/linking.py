"""Word links for a whole corpus."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, Value
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from metaphrase.aligners import ALIGNERS, STATISTICAL
from metaphrase.aligners.base import Aligner, Alignment, WordPair
from metaphrase.corpus.words import UNSPACED, Words, parse_links

#: Columns that are added; ``segmenter`` only if rows are not split at spaces.
ADDED = ("alignment", "alignment_scores", "segmenter")
#: Methods to segment text into words.
SEGMENTERS = ("auto", "whitespace", "icu")
_READ = 10_000


@dataclass
class LinkCounts:
    """Counts of the pairs of two languages.

    Attributes:
        pairs: Number of pairs.
        kept: Pairs that already had links.
        unlinked: Pairs without links after aligning.
        too_long: Pairs with too many words for the aligner.
        links: Number of links.
        source_words: Number of source words.
        target_words: Number of target words.
        source_linked: Source words with a link.
        target_linked: Target words with a link.
    """

    pairs: int = 0
    kept: int = 0
    unlinked: int = 0
    too_long: int = 0
    links: int = 0
    source_words: int = 0
    target_words: int = 0
    source_linked: int = 0
    target_linked: int = 0

    def __add__(self, other: LinkCounts) -> LinkCounts:
        return LinkCounts(*(a + b for a, b in zip(_values(self), _values(other), strict=True)))

    def facts(self) -> dict[str, Any]:
        """Return the counts, the shares of linked words, and the mean number of links per pair."""
        return asdict(self) | {
            "share_source_linked": round(self.source_linked / max(1, self.source_words), 4),
            "share_target_linked": round(self.target_linked / max(1, self.target_words), 4),
            "links_per_pair": round(self.links / max(1, self.pairs), 2),
        }


def _values(counts: LinkCounts) -> list[int]:
    return [getattr(counts, field.name) for field in dataclasses.fields(counts)]


@dataclass
class AlignmentReport:
    """Report on the alignment of a corpus.

    Attributes:
        aligner: Name of the aligner.
        counts: Counts for each pair of languages (``"sw-en"``).
        training_seconds: Duration of training.
        seconds: Duration of aligning.
    """

    aligner: str
    counts: dict[str, LinkCounts] = field(default_factory=dict)
    training_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def total(self) -> LinkCounts:
        """Counts over all languages."""
        return sum(self.counts.values(), LinkCounts())

    @property
    def pairs_per_second(self) -> float:
        """Pairs aligned per second, including training."""
        aligned = self.total.pairs - self.total.kept
        return aligned / (self.training_seconds + self.seconds) if aligned else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Dictionary for JSON."""
        return {
            "aligner": self.aligner,
            **self.total.facts(),
            "training_seconds": round(self.training_seconds, 2),
            "seconds": round(self.seconds, 2),
            "pairs_per_second": round(self.pairs_per_second, 1),
            "languages": {languages: counts.facts() for languages, counts in sorted(self.counts.items())},
        }

    def count(self, languages: str, words: WordPair, alignment: str, *, kept: bool, too_long: bool) -> None:
        """Add one pair to the counts of its languages."""
        links = parse_links(alignment)
        counts = self.counts.setdefault(languages, LinkCounts())
        counts.pairs += 1
        counts.kept += kept
        counts.unlinked += not links
        counts.too_long += too_long
        counts.links += len(links)
        counts.source_words += len(words[0])
        counts.target_words += len(words[1])
        counts.source_linked += len({i for i, _ in links})
        counts.target_linked += len({j for _, j in links})

    def merge(self, counts: Mapping[str, LinkCounts], seconds: float) -> None:
        """Add the counts and the duration of a chunk."""
        for languages, more in counts.items():
            self.counts[languages] = self.counts.get(languages, LinkCounts()) + more
        self.seconds += seconds


def add_alignment(
    dataset: Dataset,
    aligner: str | Aligner | Mapping[str, Aligner],
    *,
    segmenter: str = "auto",
    overwrite: bool = False,
    show_progress: bool = True,
    folder: str | Path | None = None,
    chunk_size: int | None = None,
    **settings: Any,
) -> tuple[Dataset, AlignmentReport]:
    """Add word links to every pair of a corpus.

    If `aligner` names a statistical aligner, one aligner for each pair of languages is trained on the corpus, unless all
    their rows have links. A row whose ``alignment`` is missing or empty has no links.

    Args:
        dataset: Rows with ``source``, ``target`` and, if known, ``source_lang`` and ``target_lang``.
        aligner: A name in `ALIGNERS`, an aligner, or one aligner for each pair of languages, ``{"sw-en": …}``.
        segmenter: ``"auto"`` and ``"icu"`` segment languages written without spaces (`UNSPACED`) with ICU, and split all
            others at spaces. ``"whitespace"`` splits all languages at spaces.
        overwrite: Replace existing links.
        show_progress: Show a progress bar on stderr.
        folder: Folder for aligned chunks and trained aligners, from which the next call with the same arguments resumes.
        chunk_size: Number of pairs that are aligned and stored together; by default 10,000 for statistical aligners and
            500 for others.
        **settings: Settings of an aligner given by name.

    Returns:
        The corpus with the columns ``alignment``, ``alignment_scores`` and, if ICU was used, ``segmenter``; and a report.

    Raises:
        ValueError: The corpus is a stream, or the aligner, the segmenter or, in a mapping, a pair of languages is unknown.
        ImportError: A required extra is not installed.
    """
    if not isinstance(dataset, Dataset):
        raise ValueError("Links cannot be added to a stream. Align its files with `metaphrase align` first.")
    check_segmenter(segmenter)
    there = [
        name for name in ("source", "target", "source_lang", "target_lang", *ADDED) if name in dataset.column_names
    ]
    rows = dataset.select_columns(there)
    aligners = _Aligners(
        rows, aligner, segmenter, settings, show_progress, Path(folder) / "models" if folder else None
    )
    if chunk_size is None:
        chunk_size = 10_000 if aligners.statistical else 500
    report = AlignmentReport(aligners.name)
    tables = []
    with _bar(show_progress) as progress:
        task = progress.add_task(f"Aligning with {aligners.name}", total=len(rows))
        for first in range(0, len(rows), chunk_size):
            shard = Path(folder) / f"{first:010d}.parquet" if folder else None
            if shard is None or not shard.exists():
                chunk = AlignmentReport(aligners.name)
                before, start = aligners.training_seconds, time.perf_counter()
                columns = align_rows(
                    rows[first : first + chunk_size],
                    aligners.get,
                    segmenter=segmenter,
                    overwrite=overwrite,
                    report=chunk,
                )
                seconds = time.perf_counter() - start - (aligners.training_seconds - before)
                table = _shard(columns, chunk, seconds)
                if shard is not None:
                    _write_shard(table, shard)
            else:
                table = pq.read_table(shard)
            facts = json.loads(table.schema.metadata[b"report"])
            report.merge({key: LinkCounts(**counts) for key, counts in facts["counts"].items()}, facts["seconds"])
            tables.append(table)
            progress.update(task, completed=min(first + chunk_size, len(rows)))
    report.training_seconds = aligners.training_seconds
    return _with_columns(dataset, tables), report


def align_rows(
    rows: Mapping[str, Sequence[Any]],
    aligner_of: Callable[[str], Aligner],
    *,
    segmenter: str = "auto",
    overwrite: bool = False,
    report: AlignmentReport | None = None,
) -> dict[str, list[str | None]]:
    """Align rows.

    Args:
        rows: Columns ``source`` and ``target``, and optionally ``source_lang``, ``target_lang`` and `ADDED`.
        aligner_of: Returns the aligner for a pair of languages, ``"sw-en"``.
        segmenter: See `add_alignment`.
        overwrite: Replace existing links.
        report: Report to which the pairs are added.

    Returns:
        The columns `ADDED`.
    """
    report = AlignmentReport("") if report is None else report
    n = len(rows["source"])
    langs = [rows.get(name) or [None] * n for name in ("source_lang", "target_lang")]
    old = {name: list(rows.get(name) or [None] * n) for name in ADDED}
    pairs: list[WordPair] = []
    todo: dict[str, list[int]] = defaultdict(list)
    labels = [pair_label(*codes) for codes in zip(*langs, strict=True)]
    for at, (source, target, *codes) in enumerate(zip(rows["source"], rows["target"], *langs, strict=True)):
        kept = bool(old["alignment"][at]) and not overwrite
        if not kept:
            old["segmenter"][at] = segmenter_of(codes, segmenter)
            todo[labels[at]].append(at)
        chosen = old["segmenter"][at] or "whitespace"
        pairs.append((Words.of(source, codes[0], chosen), Words.of(target, codes[1], chosen)))
    long: set[int] = set()
    for label, places in todo.items():
        aligner = aligner_of(label)
        longest = getattr(aligner, "max_words", math.inf)
        long.update(at for at in places if max(map(len, pairs[at])) > longest)
        found: list[Alignment] = aligner.align([pairs[at] for at in places])
        for at, alignment in zip(places, found, strict=True):
            old["alignment"][at], old["alignment_scores"][at] = alignment.pharaoh, alignment.score_text
    fresh = {at for places in todo.values() for at in places}
    for at, (label, words, alignment) in enumerate(zip(labels, pairs, old["alignment"], strict=True)):
        report.count(label, words, alignment or "", kept=at not in fresh, too_long=at in long)
    return old


def pair_label(source_lang: str | None, target_lang: str | None) -> str:
    """Name a pair of languages, with ``und`` for an unknown language.

    >>> pair_label("sw", "en"), pair_label(None, "en")
    ('sw-en', 'und-en')
    """
    return f"{source_lang or 'und'}-{target_lang or 'und'}"


def segmenter_of(languages: Sequence[str | None], segmenter: str) -> str:
    """Return the segmenter of a pair: ``icu`` if one of its languages is written without spaces."""
    return "icu" if segmenter != "whitespace" and not UNSPACED.isdisjoint(filter(None, languages)) else "whitespace"


def check_segmenter(segmenter: str) -> None:
    """Check the name of a segmenter.

    Raises:
        ValueError: The segmenter is unknown.
    """
    if segmenter not in SEGMENTERS:
        raise ValueError(f"Unknown segmenter {segmenter!r}. Available segmenters: {', '.join(SEGMENTERS)}.")


class _Aligners:
    """The aligner of each pair of languages, built or trained on first use."""

    def __init__(
        self,
        dataset: Dataset,
        aligner: str | Aligner | Mapping[str, Aligner],
        segmenter: str,
        settings: dict[str, Any],
        show_progress: bool,
        folder: Path | None,
    ) -> None:
        if isinstance(aligner, str) and aligner not in ALIGNERS:
            raise ValueError(f"Unknown aligner {aligner!r}. Available aligners: {', '.join(ALIGNERS)}.")
        if settings and not isinstance(aligner, str):
            raise ValueError(f"Settings are only accepted for aligners given by name, got {', '.join(settings)}.")
        self.dataset, self.segmenter, self.settings = dataset, segmenter, settings
        self.show_progress, self.folder = show_progress, folder
        self.given = aligner
        self.made: dict[str, Aligner] = {}
        self.training_seconds = 0.0

    @property
    def name(self) -> str:
        return aligner_name(self.given)

    @property
    def statistical(self) -> bool:
        return self.name in STATISTICAL

    def get(self, languages: str) -> Aligner:
        """Return the aligner of a pair of languages."""
        if isinstance(self.given, Mapping):
            if languages not in self.given:
                raise ValueError(f"No aligner for {languages}, only for {', '.join(self.given)}.")
            return self.given[languages]
        if isinstance(self.given, Aligner):
            return self.given
        key = languages if self.statistical else "all"
        if key not in self.made:
            self.made[key] = self._trained(languages) if self.statistical else ALIGNERS[self.given](**self.settings)
        return self.made[key]

    def _trained(self, languages: str) -> Aligner:
        from metaphrase.aligners.statistical import FILE, StatisticalAligner

        folder = self.folder and self.folder / languages
        if folder and (folder / FILE).exists():
            aligner = StatisticalAligner.load(folder)
        else:
            aligner = StatisticalAligner(str(self.given), **self.settings)
            aligner.train(self._words(languages), show_progress=self.show_progress)
            if folder:
                aligner.save(folder)
        self.training_seconds += aligner.training_seconds
        return aligner

    def _words(self, languages: str) -> Iterator[WordPair]:
        for batch in self.dataset.select(self._places[languages]).iter(_READ):
            n = len(batch["source"])
            langs = [batch.get(name) or [None] * n for name in ("source_lang", "target_lang")]
            for source, target, *codes in zip(batch["source"], batch["target"], *langs, strict=True):
                chosen = segmenter_of(codes, self.segmenter)
                yield Words.of(source, codes[0], chosen), Words.of(target, codes[1], chosen)

    @cached_property
    def _places(self) -> dict[str, list[int]]:
        """Row numbers of each pair of languages."""
        places: dict[str, list[int]] = defaultdict(list)
        names = [name for name in ("source_lang", "target_lang") if name in self.dataset.column_names]
        at = 0
        for batch in self.dataset.select_columns(["source", *names]).iter(_READ):
            n = len(batch["source"])
            for codes in zip(*(batch.get(name) or [None] * n for name in ("source_lang", "target_lang")), strict=True):
                places[pair_label(*codes)].append(at)
                at += 1
        return places


def aligner_name(aligner: str | Aligner | Mapping[str, Aligner]) -> str:
    """Return the name of an aligner, or of the aligners in a mapping."""
    if isinstance(aligner, str):
        return aligner
    some = next(iter(aligner.values())) if isinstance(aligner, Mapping) else aligner
    return str(some.model) if some.name == "statistical" else some.name  # type: ignore[attr-defined]


def load_aligners(folder: str | Path, *, heuristic: str | None = None) -> Aligner | dict[str, Aligner]:
    """Load statistical aligners written by ``metaphrase align --save`` or `StatisticalAligner.save`.

    Args:
        folder: Folder of one aligner, or of several in subfolders named after their languages (``sw-en``).
        heuristic: Symmetrisation heuristic that replaces the saved one.

    Returns:
        A single aligner, which is used for all languages, or one aligner for each pair of languages.

    Raises:
        ValueError: There is no aligner, or it is damaged.
    """
    from metaphrase.aligners.statistical import FILE, StatisticalAligner

    folder = Path(folder)
    inner = [] if (folder / FILE).exists() else sorted(path.parent for path in folder.glob(f"*/{FILE}"))
    if len(inner) < 2:
        return StatisticalAligner.load(inner[0] if inner else folder, heuristic=heuristic)
    return {path.name: StatisticalAligner.load(path, heuristic=heuristic) for path in inner}


def _bar(show: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not show)


def _shard(columns: Mapping[str, Sequence[str | None]], report: AlignmentReport, seconds: float) -> pa.Table:
    facts = {"counts": {key: asdict(counts) for key, counts in report.counts.items()}, "seconds": seconds}
    schema = pa.schema([(name, pa.string()) for name in ADDED], metadata={"report": json.dumps(facts)})
    return pa.table({name: pa.array(columns[name], pa.string()) for name in ADDED}, schema=schema)


def _write_shard(table: pa.Table, path: Path) -> None:
    part = path.with_suffix(".part")
    pq.write_table(table, part)
    part.replace(path)


def _with_columns(dataset: Dataset, tables: Sequence[pa.Table]) -> Dataset:
    """Replace the columns of the corpus by those of the chunks."""
    segmented = "segmenter" in dataset.column_names or any("icu" in table["segmenter"].to_pylist() for table in tables)
    dataset = dataset.remove_columns([name for name in ADDED if name in dataset.column_names])
    for name in ADDED if segmented else ADDED[:2]:
        values = [value for table in tables for value in table[name].to_pylist()]
        dataset = dataset.add_column(name, values, feature=Value("string"))
    return dataset
