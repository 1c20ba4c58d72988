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

#: Columns that are added; ``segmenter`` only where a row is not split at spaces.
ADDED = ("alignment", "alignment_scores", "segmenter")
#: How the words to align may be found.
SEGMENTERS = ("auto", "whitespace", "icu")
_READ = 10_000


@dataclass
class LinkCounts:
    """What became of the pairs of two languages.

    Attributes:
        pairs: Pairs of the corpus.
        kept: Those that had links already, and kept them.
        unlinked: Pairs without any link, in the end.
        too_long: Pairs that the aligner does not take, as a side has too many words.
        links: Links.
        source_words: Words of the sources.
        target_words: Words of the targets.
        source_linked: Words of the sources that have a link.
        target_linked: Words of the targets that have a link.
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
        """The counts, the shares of the words that have a link, and the links of an average pair."""
        return asdict(self) | {
            "share_source_linked": round(self.source_linked / max(1, self.source_words), 4),
            "share_target_linked": round(self.target_linked / max(1, self.target_words), 4),
            "links_per_pair": round(self.links / max(1, self.pairs), 2),
        }


def _values(counts: LinkCounts) -> list[int]:
    return [getattr(counts, field.name) for field in dataclasses.fields(counts)]


@dataclass
class AlignmentReport:
    """How a corpus was aligned.

    Attributes:
        aligner: What aligned it.
        counts: For each pair of languages (``"sw-en"``) its counts.
        training_seconds: How long aligners were trained.
        seconds: How long pairs were aligned.
    """

    aligner: str
    counts: dict[str, LinkCounts] = field(default_factory=dict)
    training_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def total(self) -> LinkCounts:
        """The counts of all languages."""
        return sum(self.counts.values(), LinkCounts())

    @property
    def pairs_per_second(self) -> float:
        """Pairs aligned in a second, training included."""
        aligned = self.total.pairs - self.total.kept
        return aligned / (self.training_seconds + self.seconds) if aligned else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "aligner": self.aligner,
            **self.total.facts(),
            "training_seconds": round(self.training_seconds, 2),
            "seconds": round(self.seconds, 2),
            "pairs_per_second": round(self.pairs_per_second, 1),
            "languages": {languages: counts.facts() for languages, counts in sorted(self.counts.items())},
        }

    def _count(self, languages: str, words: WordPair, alignment: str, *, kept: bool, too_long: bool) -> None:
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

    def _merge(self, counts: Mapping[str, LinkCounts], seconds: float) -> None:
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
    """Give every pair of a corpus its word links.

    A statistical aligner that is given by its name is trained on the corpus, one for each pair of languages, unless all
    pairs of these have links. A row whose ``alignment`` is missing or empty has none.

    Args:
        dataset: Rows ``source``, ``target`` and, where they are known, ``source_lang`` and ``target_lang``.
        aligner: A name of ``ALIGNERS``; an aligner; or one for each pair of languages, ``{"sw-en": …}``.
        segmenter: ``"auto"`` and ``"icu"`` find words of languages that are written without spaces (``UNSPACED``) with
            ICU, and split others at spaces; ``"whitespace"`` splits all at spaces.
        overwrite: Align pairs again that have links.
        show_progress: Show bars on stderr.
        folder: Where aligned chunks and trained aligners are kept, and found by the next call with the same arguments,
            which goes on from there.
        chunk_size: Pairs that are aligned, and kept, together. By default 10,000 of a statistical aligner and 500 of
            another.
        **settings: Of the aligner that is given by its name.

    Returns:
        The corpus with the columns ``alignment``, ``alignment_scores`` and, where a row's words were found by ICU,
        ``segmenter``; and a report.

    Raises:
        ValueError: The corpus is a stream, or there is no such aligner, segmenter or, in a mapping, pair of languages.
        ImportError: An extra is needed and not installed.
    """
    if not isinstance(dataset, Dataset):
        raise ValueError(
            "A stream cannot be given links while it is read: align its files with `metaphrase align` first."
        )
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
            report._merge({key: LinkCounts(**counts) for key, counts in facts["counts"].items()}, facts["seconds"])
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
    """Links for some rows.

    Args:
        rows: Columns ``source`` and ``target`` and those among ``source_lang``, ``target_lang`` and ``ADDED`` that are
            there.
        aligner_of: Gives the aligner for a pair of languages, ``"sw-en"``.
        segmenter: See :func:`add_alignment`.
        overwrite: Align rows again that have links.
        report: Where the pairs are counted.

    Returns:
        The columns ``ADDED``.
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
        report._count(label, words, alignment or "", kept=at not in fresh, too_long=at in long)
    return old


def pair_label(source_lang: str | None, target_lang: str | None) -> str:
    """What a pair of languages is called, ``und`` standing for one that is not known.

    >>> pair_label("sw", "en"), pair_label(None, "en")
    ('sw-en', 'und-en')
    """
    return f"{source_lang or 'und'}-{target_lang or 'und'}"


def segmenter_of(languages: Sequence[str | None], segmenter: str) -> str:
    """Which segmenter finds the words of a pair: ``icu`` if one of its languages needs it."""
    return "icu" if segmenter != "whitespace" and not UNSPACED.isdisjoint(filter(None, languages)) else "whitespace"


def check_segmenter(segmenter: str) -> None:
    """Refuse a segmenter that does not exist.

    Raises:
        ValueError: With those that do.
    """
    if segmenter not in SEGMENTERS:
        raise ValueError(f"There is no segmenter {segmenter!r}; there are {', '.join(SEGMENTERS)}.")


class _Aligners:
    """The aligner of each pair of languages, made or trained when it is first needed."""

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
            raise ValueError(f"There is no aligner {aligner!r}; there are {', '.join(ALIGNERS)}.")
        if settings and not isinstance(aligner, str):
            raise ValueError(f"An aligner that is given takes no settings, but {', '.join(settings)} came.")
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
        """The aligner of a pair of languages."""
        if isinstance(self.given, Mapping):
            if languages not in self.given:
                raise ValueError(f"There is no aligner for {languages}; there are some for {', '.join(self.given)}.")
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
        """The rows of each pair of languages."""
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
    """What an aligner, or one of several alike, is called."""
    if isinstance(aligner, str):
        return aligner
    some = next(iter(aligner.values())) if isinstance(aligner, Mapping) else aligner
    return str(some.model) if some.name == "statistical" else some.name  # type: ignore[attr-defined]


def load_aligners(folder: str | Path, *, heuristic: str | None = None) -> Aligner | dict[str, Aligner]:
    """Statistical aligners that ``metaphrase align --save`` wrote, or the one of ``StatisticalAligner.save``.

    Args:
        folder: Of one aligner, or of several, each in a folder named after its languages (``sw-en``).
        heuristic: In place of theirs.

    Returns:
        The aligner, for whatever languages, if it is the only one; else one for each pair of languages.

    Raises:
        ValueError: There is none, or a damaged one.
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
    """The corpus with the columns of the chunks in place of its own."""
    segmented = "segmenter" in dataset.column_names or any("icu" in table["segmenter"].to_pylist() for table in tables)
    dataset = dataset.remove_columns([name for name in ADDED if name in dataset.column_names])
    for name in ADDED if segmented else ADDED[:2]:
        values = [value for table in tables for value in table[name].to_pylist()]
        dataset = dataset.add_column(name, values, feature=Value("string"))
    return dataset
