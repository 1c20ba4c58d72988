"""Monolingual text mixed into a bitext, for objectives that read the column ``monolingual``."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from datasets import Dataset, Features, IterableDataset, List, Value

from metaphrase.corpus.hub import is_hub_name, parse_hub_name, pin_revision, stream_rows
from metaphrase.corpus.kinds import check_regular
from metaphrase.corpus.text import BAD_RATE_AFTER, MAX_BAD_RATE, MAX_CHARS, BadLine, is_blank, read_lines
from metaphrase.exceptions import CorpusError
from metaphrase.io.arguments import Count, Ratio, Seed, checked
from metaphrase.io.digests import PinnedFile, json_digest, unchanged

logger = logging.getLogger(__name__)

AnyDataset = TypeVar("AnyDataset", Dataset, IterableDataset)


def check_monolingual(paths: Sequence[str | Path]) -> None:
    """Check that :func:`load_monolingual` finds its files, without reading them."""
    for name in map(str, paths):
        if is_hub_name(name):
            parse_hub_name(name)
        else:
            check_regular(Path(name))


@checked
def load_monolingual(paths: str | Path | Sequence[str | Path], *, max_chars: Count = MAX_CHARS) -> list[str]:
    r"""Read monolingual text as pairs of contiguous sentences.

    A file is plain or gzip UTF-8 text with one sentence a line and blank lines between documents. A Hub data set
    ``hf:org/name[:config][@split][#revision]``, pinned to the commit that it has when it is loaded, by default of the split
    ``train``, has a column ``text``: a row of several lines is a document; rows of one line are consecutive sentences, and
    empty rows separate documents.

    Args:
        paths: The files and data sets.
        max_chars: Lines with more characters are skipped.

    Returns:
        Texts of two sentences each, ``"a\nb"``, in the order of the files. The last text of a document with an odd number
        of sentences has one sentence.

    Raises:
        FileNotFoundError: A file does not exist.
        ValueError: A file is damaged, is not UTF-8, has too many unreadable lines, or has no text; the message names it.

    Reference: Hu et al. 2021 (AMBER), section 2: x and y are "two contiguous sentences in a monolingual corpus".
    """
    names = [paths] if isinstance(paths, str | Path) else list(paths)
    check_monolingual(names)
    texts: list[str] = []
    for name in map(str, names):
        lines = _hub_lines(name) if is_hub_name(name) else read_lines(Path(name), max_chars)
        before = len(texts)
        with unchanged([] if is_hub_name(name) else [PinnedFile.of(name)]):
            texts += _contiguous(_readable(lines, name, max_chars))
        if len(texts) == before:
            raise CorpusError(f"{name} contains no text. Monolingual text has one sentence a line.")
    return texts


@checked
def with_monolingual(dataset: AnyDataset, texts: Sequence[str], *, ratio: Ratio = 1.0, seed: Seed = 42) -> AnyDataset:
    """Add monolingual texts to the rows of a bitext, as lists of strings in the column ``monolingual``.

    Row ``i`` gets the texts from ``⌊i·ratio⌋`` to ``⌊(i + 1)·ratio⌋`` (exclusive) of a shuffled order that repeats when it
    ends. They are the same in every epoch and after a resume. In a stream with several workers, each counts its own rows.

    Args:
        dataset: A bitext, or a stream of one.
        texts: What :func:`load_monolingual` returns.
        ratio: Texts per pair: 1 adds as many texts as pairs, 0.5 adds one to every second row.
        seed: Seed of the order.

    Raises:
        ValueError: There are no texts, or the ratio is out of range.

    >>> with_monolingual(Dataset.from_dict({"source": ["a", "b"]}), ["x y"], ratio=0.5)["monolingual"][:]
    [[], ['x y']]
    """
    if not texts:
        raise CorpusError("There is no monolingual text to add.")
    order = np.random.default_rng(seed).permutation(len(texts)).tolist()

    def of_row(i: int) -> list[str]:
        return [texts[order[k % len(texts)]] for k in range(math.floor(i * ratio), math.floor((i + 1) * ratio))]

    feature = List(Value("string"))
    if isinstance(dataset, Dataset):
        return dataset.add_column("monolingual", [of_row(i) for i in range(len(dataset))], feature=feature)

    def add(row: dict[str, Any], i: int, texts_digest: str) -> dict[str, Any]:
        return {**row, "monolingual": of_row(i)}

    facts = {"texts_digest": json_digest([texts, ratio, seed])}  # for `stream_digest`
    features = None if dataset.features is None else Features({**dataset.features, "monolingual": feature})
    return dataset.map(add, with_indices=True, features=features, fn_kwargs=facts)


def _contiguous(lines: Iterable[str]) -> Iterator[str]:
    """Join sentences in pairs; a blank line ends a document."""
    first = ""
    for line in chain(("" if is_blank(line) else line.strip() for line in lines), [""]):
        if first:
            yield f"{first}\n{line}" if line else first
            first = ""
        else:
            first = line


def _readable(lines: Iterable[tuple[int, str | BadLine]], name: str, max_chars: int) -> Iterator[str]:
    """Lines of text; an unreadable line becomes a blank one, as its neighbours are not contiguous."""
    read = bad = 0
    first = ""
    for read, (number, line) in enumerate(lines, 1):
        if isinstance(line, str) and len(line) <= max_chars:
            yield line
            continue
        bad += 1
        reason = f"more than {max_chars} characters" if isinstance(line, str) else f"{line.reason}, {line.detail}"
        first = first or f"line {number}: {reason}"
        if read >= BAD_RATE_AFTER and bad > MAX_BAD_RATE * read:
            raise CorpusError(
                f"{name}: {bad} of the first {read} lines are unreadable, more than {MAX_BAD_RATE:.0%}; {first}. Fix "
                "the file."
            )
        yield ""
    if bad:
        logger.warning("%s: %d of %d lines were skipped; %s.", name, bad, read, first)


def _hub_lines(name: str) -> Iterator[tuple[int, str | BadLine]]:
    """The lines of a Hub data set, with the numbers of their rows."""
    parsed = parse_hub_name(name)
    rows = stream_rows(name, parsed.split or "train", pin_revision(name, parsed.revision))
    for number, row in enumerate(rows, 1):
        if "text" not in row:
            raise CorpusError(f"{name} has no column 'text'; it has {', '.join(map(repr, row))}.")
        text = "" if row["text"] is None else row["text"]
        if not isinstance(text, str):
            yield number, BadLine("not text", f"{text!r:.40}")
            continue
        lines = text.split("\n")
        for line in lines if len(lines) == 1 else ["", *lines, ""]:
            yield number, BadLine("not text", "NUL") if "\0" in line else line
