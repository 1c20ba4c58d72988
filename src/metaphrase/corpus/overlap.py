"""Test pairs that occur in the training corpus."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from metaphrase.corpus.codes import bare_language
from metaphrase.corpus.text import normalised


class Shared(NamedTuple):
    """Whether the source of a pair, its target, and the whole pair occur in a corpus."""

    source: bool
    target: bool
    pair: bool


def shared_sentences(train: Any, test: Any) -> list[Shared]:
    """For each test pair, what of it occurs in the training corpus, on the same side.

    Sources are searched among the sources in the same language, in any script or region: that languages have a sentence in
    common, such as a name or a number, does not show that its translation was trained on. Targets are searched among all
    targets. Sentences are compared after NFKC, case folding and joining of whitespace, without characters of no width.

    Args:
        train: The training corpus: a data set with ``source``, ``target`` and ``source_lang``, or pairs by source language.
        test: The test pairs, likewise.
    """
    tested = [*_keys(test)]
    if not tested:
        return []
    sources, targets = map(set, zip(*tested, strict=True))
    # Only the pairs that share a side with a test pair are collected: the corpus may not fit into memory.
    trained = [(source, target) for source, target in _keys(train) if source in sources or target in targets]
    known_sources, known_targets, pairs = {one for one, _ in trained}, {one for _, one in trained}, set(trained)
    return [Shared(pair[0] in known_sources, pair[1] in known_targets, pair in pairs) for pair in tested]


def overlap(train: Any, test: Any) -> int:
    """Count the test pairs with a side that also occurs in the training corpus; see `shared_sentences`.

    >>> from metaphrase.corpus.parallel import ParallelSet
    >>> train = {"sw": ParallelSet("sw", ("Habari",), ("Hello",))}
    >>> overlap(train, {"te": ParallelSet("te", ("Habari", "హలో"), ("News", "HELLO"))})
    1
    """
    return sum(one.source or one.target for one in shared_sentences(train, test))


def _keys(pairs: Any) -> Iterator[tuple[Hashable, Hashable]]:
    """For each pair, the keys by which its source and its target are compared."""
    bare = cache(bare_language)
    for language, *texts in _rows(pairs):
        source, target = map(normalised, texts)
        yield (bare(language), source), target


def _rows(pairs: Any) -> Iterator[tuple[str, str, str]]:
    if isinstance(pairs, Mapping):
        for language, one in pairs.items():
            yield from ((language, *texts) for texts in zip(one.sources, one.targets, strict=True))
        return
    columns = ["source_lang", "source", "target"]
    for batch in pairs.select_columns(columns).iter(batch_size=1000):
        yield from zip(*(batch[column] for column in columns), strict=True)
