"""Word links for a whole corpus."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, astuple, dataclass, field
from functools import cached_property, partial
from itertools import chain
from operator import add
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, Value

from metaphrase.aligners import ALIGNERS, STATISTICAL
from metaphrase.aligners.base import Aligner, Alignment, Segmentation, WordPair
from metaphrase.corpus.codes import bare_language, is_plain
from metaphrase.corpus.digests import data_digest
from metaphrase.corpus.files import language_pair
from metaphrase.corpus.words import (
    Words,
    are_tokenised,
    check_links,
    is_unspaced,
    parse_links,
    segmenter_of_side,
    segmenter_of_text,
)
from metaphrase.exceptions import AlignmentFormatError, CorpusError, DataError, DataMismatchError, UsageError
from metaphrase.io.arguments import Count, checked
from metaphrase.io.digests import files_sha256, tensors_digest
from metaphrase.io.locks import exclusive
from metaphrase.io.progress import progress_bars
from metaphrase.io.work_folders import ARGUMENTS, holds_parts, read_kept, read_part, write_atomically, write_part

#: Columns that are added; ``segmenter`` only if the words of a row were found by ICU.
ADDED = ("alignment", "alignment_scores", "segmenter")
#: Pairs that are read together to train an aligner.
_READ = 10_000
#: Pairs of languages without spaces that show whether a side of a corpus is tokenised.
_JUDGED = 1_000
_SIDES = ("source", "target")

#: Whether the source and the target of a corpus are tokenised; None if each sentence is judged by itself.
Tokenised = tuple[bool | None, bool | None]
_UNKNOWN: Tokenised = (None, None)


@dataclass
class LinkCounts:
    """Counts for a pair of languages: pairs, links, words of each side, and words with a link.

    Of the pairs, ``kept`` already had links and kept them, ``unlinked`` have no link after alignment, ``too_long`` have a
    side that is too long for the aligner, and ``tokenised`` are in a language without spaces, but have spaces between words.
    """

    pairs: int = 0
    kept: int = 0
    unlinked: int = 0
    too_long: int = 0
    tokenised: int = 0
    links: int = 0
    source_words: int = 0
    target_words: int = 0
    source_linked: int = 0
    target_linked: int = 0

    def __add__(self, other: LinkCounts) -> LinkCounts:
        return LinkCounts(*map(add, astuple(self), astuple(other)))

    def count(self, words: WordPair, alignment: str) -> None:
        """Count a pair and its links."""
        links = parse_links(alignment)
        self.pairs += 1
        self.unlinked += not links
        self.links += len(links)
        self.source_words += len(words[0])
        self.target_words += len(words[1])
        self.source_linked += len({i for i, _ in links})
        self.target_linked += len({j for _, j in links})

    def facts(self) -> dict[str, Any]:
        """The counts, the shares of words with a link, and the mean number of links per pair."""
        return asdict(self) | {
            "share_source_linked": round(self.source_linked / max(1, self.source_words), 4),
            "share_target_linked": round(self.target_linked / max(1, self.target_words), 4),
            "links_per_pair": round(self.links / max(1, self.pairs), 2),
        }


@dataclass
class AlignmentReport:
    """The counts of each pair of languages (``"sw-en"``), the aligner, and the time of its training and of aligning."""

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
        """Aligned pairs per second, including training."""
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

    def add(self, counts: Mapping[str, LinkCounts], seconds: float) -> None:
        """Add the counts and the time of a chunk."""
        for languages, more in counts.items():
            self.counts[languages] = self.counts.get(languages, LinkCounts()) + more
        self.seconds += seconds


@checked
def add_alignment(
    dataset: Dataset,
    aligner: str | Aligner | Mapping[str, Aligner],
    *,
    segmenter: Segmentation = "auto",
    overwrite: bool = False,
    show_progress: bool = True,
    folder: str | Path | None = None,
    chunk_size: Count | None = None,
    **settings: Any,
) -> tuple[Dataset, AlignmentReport]:
    """Add word links to every pair of a corpus.

    A statistical aligner given by name is trained on the corpus, one for each pair of languages, unless all pairs of these
    languages have links. A row with a missing or empty ``alignment`` has no links.

    Args:
        dataset: Rows ``source``, ``target`` and, if known, ``source_lang`` and ``target_lang``.
        aligner: A name of ``ALIGNERS``; an aligner; or one for each pair of languages, ``{"sw-en": …}``.
        segmenter: ``"icu"`` finds the words of languages written without spaces (zh, ja, th, …) with ICU, and splits
            others at spaces. ``"auto"`` does so too, except in texts whose words are separated by spaces already, and on a
            side of the corpus with mostly such texts. ``"whitespace"`` splits all languages at spaces.
        overwrite: Also align pairs that already have links, and replace these.
        show_progress: Show progress bars on stderr.
        folder: Folder for aligned chunks and trained aligners. The next call with the same arguments resumes from them.
        chunk_size: Pairs that are aligned and stored together. Defaults to 10,000 for a statistical aligner and 500 for
            others.
        **settings: Settings of an aligner given by name.

    Returns:
        The corpus with the columns ``alignment``, ``alignment_scores`` and, if ICU found the words of a row,
        ``segmenter``; and a report.

    Raises:
        ValueError: The corpus is a stream, the aligner, the segmenter or a pair of languages is unknown, or the folder has
            links of other pairs or settings.
        CheckpointError: Another process uses the folder, or it is not writable.
        ImportError: A required extra is not installed.
    """
    if not isinstance(dataset, Dataset):
        raise UsageError("A stream cannot be aligned while it is read. Align its files with `metaphrase align` first.")
    if isinstance(aligner, str) and aligner not in ALIGNERS:
        raise UsageError(f"Unknown aligner {aligner!r}; choose from {', '.join(ALIGNERS)}.")
    if settings and not isinstance(aligner, str):
        raise UsageError(f"Settings require an aligner given by name, but got an aligner and {', '.join(settings)}.")
    known = ("source", "target", "source_lang", "target_lang", *ADDED)
    rows = dataset.select_columns([name for name in known if name in dataset.column_names])
    name = aligner_name(aligner)
    if chunk_size is None:
        chunk_size = 10_000 if name in STATISTICAL else 500
    aligners = _Aligners(
        rows, aligner, segmenter, settings, show_progress, Path(folder) / "models" if folder else None
    )
    report = AlignmentReport(name)
    tables = []
    with exclusive(folder) if folder else nullcontext(), progress_bars(show_progress) as begin:
        if folder:
            call: dict[str, Any] = {"segmenter": segmenter, "overwrite": overwrite, "chunk_size": chunk_size}
            call |= {"rows": data_digest(rows), "aligner": name, **_aligner_arguments(aligner, settings)}
            _check_same_call(Path(folder), call)
        advance = begin(f"Aligning with {name}", len(rows))
        for first in range(0, len(rows), chunk_size):
            chunk = rows[first : first + chunk_size]
            shard = Path(folder) / f"{first:010d}.parquet" if folder else None
            table = None if shard is None else read_kept(shard, partial(_read_shard, len(chunk["source"])))
            if table is None:
                before, start = aligners.training_seconds, time.perf_counter()
                columns, counts = align_rows(
                    chunk, aligners.get, segmenter=segmenter, overwrite=overwrite, tokenised=aligners.tokenised
                )
                seconds = time.perf_counter() - start - (aligners.training_seconds - before)
                table = _shard(columns, counts, seconds)
                if shard is not None:
                    with write_atomically(shard) as file:
                        pq.write_table(table, file)
            report.add(*_counts(table))
            tables.append(table)
            advance(len(table))
    report.training_seconds = aligners.training_seconds
    return _with_columns(dataset, tables), report


def align_rows(
    rows: Mapping[str, Sequence[Any]],
    aligner_of: Callable[[str], Aligner],
    *,
    segmenter: Segmentation = "auto",
    overwrite: bool = False,
    tokenised: Callable[[str], Tokenised] = lambda languages: _UNKNOWN,
) -> tuple[dict[str, list[str | None]], dict[str, LinkCounts]]:
    """Align some rows.

    Returns the columns ``ADDED``, and the counts of each pair of languages. ``aligner_of`` returns the aligner of a pair of
    languages, ``"sw-en"``, and ``tokenised`` which sides of its corpus are tokenised.

    Raises:
        ValueError: Links that are kept do not fit the words, or a language is not a code.
    """
    columns = {name: list(rows.get(name) or [None] * len(rows["source"])) for name in ADDED}
    languages = _codes(rows)
    labels = [language_pair(*codes) for codes in languages]
    pairs: list[WordPair] = []
    todo: dict[str, list[int]] = defaultdict(list)
    counts: dict[str, LinkCounts] = defaultdict(LinkCounts)
    for at, (codes, source, target) in enumerate(zip(languages, rows["source"], rows["target"], strict=True)):
        kept = bool(columns["alignment"][at]) and not overwrite
        if not kept:
            columns["segmenter"][at] = segmenter_of(codes, segmenter, (source, target), tokenised(labels[at]))
            todo[labels[at]].append(at)
        pairs.append(_split(codes, (source, target), columns["segmenter"][at]))
        counts[labels[at]].kept += kept
        if kept:
            _check_kept(str(columns["alignment"][at]), pairs[at])
    for label, places in todo.items():
        aligner = aligner_of(label)
        longest = getattr(aligner, "max_words", math.inf)
        alignments: list[Alignment] = aligner.align([pairs[at] for at in places])
        for at, alignment in zip(places, alignments, strict=True):
            columns["alignment"][at], columns["alignment_scores"][at] = alignment.pharaoh, alignment.score_text
            counts[label].tokenised += columns["segmenter"][at] != segmenter_of(languages[at], segmenter)
            counts[label].too_long += max(map(len, pairs[at])) > longest
    for label, words, links in zip(labels, pairs, columns["alignment"], strict=True):
        counts[label].count(words, links or "")
    return columns, counts


def _codes(rows: Mapping[str, Sequence[Any]]) -> list[tuple[str | None, str | None]]:
    """The languages of both sides of some rows, without scripts and regions."""
    absent = [None] * len(rows["source"])
    sides = (rows.get(name) or absent for name in ("source_lang", "target_lang"))
    codes = [[code and bare_language(code) for code in side] for side in sides]
    if odd := [code for code in set(chain.from_iterable(codes)) if code and not is_plain(code)]:
        raise CorpusError(f"{odd[0]!r:.40} is not the code of a language. Pass a code of ISO 639, such as sw.")
    return list(zip(*codes, strict=True))


def _split(languages: Sequence[str | None], texts: Sequence[str], segmenter: str | None) -> WordPair:
    """The words of both sides of a pair."""
    source, target = (
        Words.of(text, language, segmenter_of_side(segmenter, side))
        for text, language, side in zip(texts, languages, _SIDES, strict=True)
    )
    return source, target


def _check_kept(alignment: str, words: WordPair) -> None:
    """Check that the links of a pair fit its words."""
    try:
        check_links(parse_links(alignment), len(words[0]), len(words[1]))
    except AlignmentFormatError as error:
        raise AlignmentFormatError(
            f"The pair {words[0].text[:80]!r} has unusable links: {str(error).rstrip('.')}. Correct them, or overwrite "
            "all links (--overwrite)."
        ) from error


def segmenter_of(
    languages: Sequence[str | None],
    segmenter: Segmentation,
    texts: Sequence[str] | None = None,
    tokenised: Tokenised = _UNKNOWN,
) -> str:
    """Return the segmenter of a pair: ``icu`` if one of its languages requires it.

    With ``"auto"``, texts whose words are separated by spaces already do not require it; ``tokenised`` states this for the
    sides of the corpus. If only one of two languages requires it, the segmenter is ``icu-source`` or ``icu-target``.
    """
    unspaced = [side for side, language in zip(_SIDES, languages, strict=True) if is_unspaced(language)]
    if segmenter == "whitespace" or not unspaced:
        return "whitespace"
    if segmenter == "icu" or texts is None:
        return "icu"
    segmenters = dict(zip(_SIDES, map(segmenter_of_text, texts, languages, tokenised), strict=True))
    split = [side for side in unspaced if segmenters[side] == "icu"]
    return "icu" if split == unspaced else f"icu-{split[0]}" if split else "whitespace"


@dataclass
class _Aligners:
    """The aligner of each pair of languages, created or trained on first use."""

    dataset: Dataset
    given: str | Aligner | Mapping[str, Aligner]
    segmenter: Segmentation
    settings: dict[str, Any]
    show_progress: bool
    folder: Path | None
    made: dict[str, Aligner] = field(default_factory=dict)
    judged: dict[str, Tokenised] = field(default_factory=dict)
    training_seconds: float = 0.0

    def get(self, languages: str) -> Aligner:
        """The aligner of a pair of languages."""
        if not isinstance(self.given, str):
            return choose_aligner(self.given, languages)
        is_trained = self.given in STATISTICAL
        key = languages if is_trained else "all"
        if key not in self.made:
            self.made[key] = self._trained(languages) if is_trained else ALIGNERS[self.given](**self.settings)
        return self.made[key]

    def _trained(self, languages: str) -> Aligner:
        from metaphrase.aligners.statistical import FILE, StatisticalAligner

        folder = self.folder and self.folder / languages
        aligner = read_kept(folder / FILE, lambda path: StatisticalAligner.load(path.parent)) if folder else None
        if aligner is None:
            aligner = StatisticalAligner(str(self.given), **self.settings)
            aligner.train(self._words(languages), show_progress=self.show_progress)
            if folder:
                aligner.save(folder)
        self.training_seconds += aligner.training_seconds
        return aligner

    def _words(self, languages: str) -> Iterator[WordPair]:
        for batch in self.dataset.select(self._places[languages]).iter(_READ):
            for source, target, codes in zip(batch["source"], batch["target"], _codes(batch), strict=True):
                texts = source, target
                yield _split(codes, texts, segmenter_of(codes, self.segmenter, texts, self.tokenised(languages)))

    def tokenised(self, languages: str) -> Tokenised:
        """Which sides of a pair of languages are tokenised, judged from pairs that are spread over the corpus."""
        codes = languages.split("-")
        if self.segmenter != "auto" or not any(map(is_unspaced, codes)):
            return _UNKNOWN
        if languages not in self.judged:
            places = self._places[languages]
            sample = self.dataset.select(places[:: max(1, len(places) // _JUDGED)][:_JUDGED])
            source, target = (are_tokenised(sample[side][:], code) for side, code in zip(_SIDES, codes, strict=True))
            self.judged[languages] = source, target
        return self.judged[languages]

    @cached_property
    def _places(self) -> dict[str, list[int]]:
        """The rows of each pair of languages."""
        places: dict[str, list[int]] = defaultdict(list)
        names = [name for name in ("source_lang", "target_lang") if name in self.dataset.column_names]
        batches = self.dataset.select_columns(["source", *names]).iter(_READ)
        for at, codes in enumerate(chain.from_iterable(map(_codes, batches))):
            places[language_pair(*codes)].append(at)
        return places


def choose_aligner(given: Aligner | Mapping[str, Aligner], languages: str) -> Aligner:
    """The aligner of a pair of languages, ``"sw-en"``; of ``"und-en"`` the only one into English."""
    if isinstance(given, Aligner):
        return given
    fitting = [languages] if languages in given else [other for other in given if _may_be_same(languages, other)]
    if len(fitting) != 1:
        raise UsageError(f"No aligner for {languages}. Available: {', '.join(given)}.")
    return given[fitting[0]]


def _may_be_same(languages: str, others: str) -> bool:
    """Whether two pairs of languages are the same, as far as they are known."""
    first, second = languages.split("-"), others.split("-")
    same = (one == other or "und" in (one, other) for one, other in zip(first, second, strict=False))
    return len(first) == len(second) and all(same)


def aligner_name(aligner: str | Aligner | Mapping[str, Aligner]) -> str:
    """Return the name of an aligner, or of several of the same kind."""
    one = next(iter(aligner.values())) if isinstance(aligner, Mapping) else aligner
    return one if isinstance(one, str) else one.name


def load_aligners(folder: str | Path, *, heuristic: str | None = None) -> Aligner | dict[str, Aligner]:
    """Load statistical aligners that ``metaphrase align --save`` or ``StatisticalAligner.save`` wrote.

    Returns an aligner for each pair of languages, or a single one, for all languages, if the folder itself holds it.
    """
    from metaphrase.aligners.statistical import FILE, StatisticalAligner

    folder = Path(folder)
    found = {path.parent for name in (FILE, "direct.*") for path in folder.glob(f"*/{name}")}
    if (folder / FILE).exists() or not found:
        return StatisticalAligner.load(folder, heuristic=heuristic)
    return {path.name: StatisticalAligner.load(path, heuristic=heuristic) for path in sorted(found)}


def model_digest(name: str | Path) -> str:
    """The digest of the files of an aligner's model, except its card."""
    from metaphrase.encoders.names import encoder_files

    return files_sha256(path for path in encoder_files(str(name)) if path.suffix != ".md")


def _aligner_arguments(aligner: str | Aligner | Mapping[str, Aligner], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What determines the links of an aligner, or of one for each pair of languages: its settings, and its model."""
    if not isinstance(aligner, str):
        each = aligner if isinstance(aligner, Mapping) else {"": aligner}
        return {f"aligner {languages}": _object_facts(one) for languages, one in sorted(each.items())}
    settings = {name: value for name, value in settings.items() if name != "batch_size"}
    if isinstance(model := settings.get("model"), str | Path):
        return {**settings, "model": f"{model} {model_digest(model)}"}
    return settings


def _object_facts(aligner: Aligner) -> str:
    """The settings of an aligner that is given as an object, and a digest of its model, as text."""
    names = vars(aligner).keys() - {"training_seconds", "batch_size"}
    kept = {name: value for name in names if isinstance(value := getattr(aligner, name), str | int | float | None)}
    model: Any = getattr(aligner, "model", None)
    digest = tensors_digest(model.state_dict(), []) if hasattr(model, "state_dict") else ""
    return f"{json.dumps(kept, sort_keys=True)} {digest}"


def _check_same_call(folder: Path, arguments: dict[str, Any]) -> None:
    """Refuse a folder with the links of other pairs or of another aligner."""
    arguments = {key: value for key, value in arguments.items() if isinstance(value, str | int | float)}
    path = folder / ARGUMENTS
    kept = read_part(path) if holds_parts(folder) else None
    if (kept or write_part(path, arguments)) != arguments:
        raise DataMismatchError(
            f"{folder} holds links of other pairs, or of an aligner with other settings. Repeat that call to use them, or "
            f"delete {folder} to start over."
        )


def _shard(columns: Mapping[str, Sequence[str | None]], counts: Mapping[str, LinkCounts], seconds: float) -> pa.Table:
    facts = {"counts": {languages: asdict(one) for languages, one in counts.items()}, "seconds": seconds}
    schema = pa.schema([(name, pa.string()) for name in ADDED], metadata={"report": json.dumps(facts)})
    return pa.table({name: pa.array(columns[name], pa.string()) for name in ADDED}, schema=schema)


def _read_shard(count: int, path: Path) -> pa.Table:
    table = pq.read_table(path)
    _counts(table)
    if len(table) != count:
        raise DataError(f"it has {len(table)} pairs instead of {count}")
    return table


def _counts(table: pa.Table) -> tuple[dict[str, LinkCounts], float]:
    """Counts and seconds of a chunk."""
    facts = json.loads(table.schema.metadata[b"report"])
    return {key: LinkCounts(**counts) for key, counts in facts["counts"].items()}, facts["seconds"]


def _with_columns(dataset: Dataset, tables: Sequence[pa.Table]) -> Dataset:
    """The corpus with the columns of the chunks, which replace existing ones."""
    segmenters = {segmenter for table in tables for segmenter in table["segmenter"].unique().to_pylist()}
    segmented = "segmenter" in dataset.column_names or bool(segmenters - {None, "whitespace"})
    dataset = dataset.remove_columns([name for name in ADDED if name in dataset.column_names])
    for name in ADDED if segmented else ADDED[:2]:
        values = [value for table in tables for value in table[name].to_pylist()]
        dataset = dataset.add_column(name, values, feature=Value("string"))
    return dataset
