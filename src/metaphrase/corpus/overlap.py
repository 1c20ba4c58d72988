"""Test pairs that occur in the training corpus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from datasets import Dataset, IterableDataset

from metaphrase.corpus.text import normalised


def overlap(train: Any, test: Any) -> int:
    """Count the test pairs with a sentence that also occurs in the training corpus, on the same side.

    Sentences are compared after NFKC, case folding and joining of whitespace, without characters of no width. Both arguments
    are rows with ``source`` and ``target``: a data set or an iterable of mappings.

    >>> overlap([{"source": "Habari", "target": "Hello"}], [{"source": "Jambo", "target": "HELLO"}])
    1
    """
    pairs = [(normalised(source), normalised(target)) for source, target in _texts(test)]
    tested = {source for source, _ in pairs}, {target for _, target in pairs}
    trained: tuple[set[str], set[str]] = (
        set(),
        set(),
    )  # of the tested sentences: all of the corpus may not fit into memory
    for pair in _texts(train):
        for side, known, text in zip(tested, trained, map(normalised, pair), strict=True):
            if text in side:
                known.add(text)
    return sum(any(text in known for known, text in zip(trained, pair, strict=True)) for pair in pairs)


def _texts(rows: Any) -> Iterator[tuple[str, str]]:
    if isinstance(rows, Dataset | IterableDataset):
        for batch in rows.select_columns(["source", "target"]).iter(batch_size=1000):
            yield from zip(batch["source"], batch["target"], strict=True)
    else:
        yield from ((row["source"], row["target"]) for row in rows)
