"""Dividing a user's bitext: pairs for training, early stopping and evaluation, without a shared sentence.

Everything here is a pure function of corpus and seed, so that a run can be reproduced.
"""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path

from metaphrase.corpus.parallel import TARGET_LANGUAGE, ParallelSet
from metaphrase.corpus.text import composed, normalised
from metaphrase.exceptions import CorpusError
from metaphrase.io.counts import counted

#: Maximum numbers of a language's pairs that are held out for test and for dev, and the maximum share of each.
TEST, DEV, SHARE = 500, 250, 0.1
#: Minimum number of pairs that can be both trained on and measured.
FEWEST = 100

Pair = tuple[str, str]


@dataclass(frozen=True)
class Split:
    """A language's pairs, divided.

    Attributes:
        train: Pairs to train on; none of their sentences is in dev or test.
        dev: Pairs for early stopping.
        test: Pairs for evaluation.
        excluded: Number of pairs that share a sentence with dev or test, or repeat another pair.
    """

    train: tuple[Pair, ...]
    dev: tuple[Pair, ...]
    test: tuple[Pair, ...]
    excluded: int


def split(pairs: ParallelSet, *, seed: int = 0) -> Split:
    """Hold out dev and test pairs whose sentences do not occur in the training pairs."""
    stripped = [(s.strip(), t.strip()) for s, t in zip(pairs.sources, pairs.targets, strict=True)]
    first = {tuple(map(composed, pair)): pair for pair in reversed(stripped)}  # of copies, the first one is kept
    unique = [pair for pair in dict.fromkeys(first[tuple(map(composed, pair))] for pair in stripped) if all(pair)]
    if len(unique) < FEWEST:
        raise CorpusError(
            f"{pairs.language} has {counted(len(unique), 'different pair')}; adapting and evaluating require at "
            f"least {FEWEST}. Mine more pairs (metaphrase mine), or train with your own test set (metaphrase train)."
        )
    random.Random(seed).shuffle(unique)
    tests, devs = (min(most, int(SHARE * len(unique))) for most in (TEST, DEV))
    # Keep one copy of a sentence in a test set, so that every sentence has one correct answer.
    test, dev = _one_each(unique[:tests]), _one_each(unique[tests : tests + devs])
    train = without(unique[tests + devs :], sentences([*test, *dev]))
    dev = without(dev, sentences(test))
    kept = len(train) + len(dev) + len(test)
    return Split(train, dev, test, excluded=len(pairs.sources) - kept)


def split_all(sets: Mapping[str, ParallelSet], *, seed: int = 0) -> dict[str, Split]:
    """Hold out pairs of every language.

    Sentences that are held out in one language are not trained on in others, and its test sentences are in no dev set.
    """
    splits = {language: split(pairs, seed=seed) for language, pairs in sets.items()}
    tested = sentences(pair for one in splits.values() for pair in one.test)
    for language, one in splits.items():  # languages may be translations of the same sentences
        dev = without(one.dev, tested)
        splits[language] = replace(one, dev=dev, excluded=one.excluded + len(one.dev) - len(dev))
    held = held_out(splits.values())
    for language, one in splits.items():
        train = without(one.train, held)
        if not (train and one.dev and one.test):
            raise CorpusError(
                f"{language} repeats its sentences too often: {counted(len(train), 'pair')} for training, {len(one.dev)} for "
                f"early stopping and {len(one.test)} for evaluation would be left without common sentences. Add pairs with "
                "other sentences."
            )
        splits[language] = replace(one, train=train, excluded=one.excluded + len(one.train) - len(train))
    return splits


def held_out(splits: Iterable[Split]) -> set[str]:
    """The normalised sentences of both sides of the dev and test sets."""
    return sentences(pair for one in splits for pair in (*one.dev, *one.test))


def sentences(pairs: Iterable[Pair]) -> set[str]:
    """The normalised sentences of both sides of some pairs."""
    return {normalised(side) for pair in pairs for side in pair}


def without(pairs: Iterable[Pair], held: Set[str]) -> tuple[Pair, ...]:
    """The pairs without a held-out sentence on either side."""
    return tuple(pair for pair in pairs if held.isdisjoint(map(normalised, pair)))


def _one_each(pairs: Iterable[Pair]) -> tuple[Pair, ...]:
    """The pairs without a side that occurred before."""
    sources, targets = set[str](), set[str]()
    kept = []
    for pair in pairs:
        source, target = map(normalised, pair)
        if source not in sources and target not in targets:
            kept.append(pair)
        sources.add(source)
        targets.add(target)
    return tuple(kept)


def replay(
    others: Mapping[str, ParallelSet], wanted: int, *, held: Set[str] = frozenset(), seed: int = 0
) -> dict[str, tuple[Pair, ...]]:
    """Choose pairs of other languages, as evenly as possible, to add to the user's and preserve these languages.

    ``held`` are normalised sentences that must not be trained on in any language.
    """
    chosen: dict[str, tuple[Pair, ...]] = {}
    left = wanted
    allowed = {
        language: without(zip(pairs.sources, pairs.targets, strict=True), held) for language, pairs in others.items()
    }
    ordered = sorted(allowed.items(), key=lambda item: (len(item[1]), item[0]))
    for number, (language, pairs) in enumerate(ordered):
        share = min(left // (len(ordered) - number), len(pairs))
        chosen[language] = tuple(random.Random(seed).sample(pairs, share))
        left -= share
    return {language: pairs for language, pairs in sorted(chosen.items()) if pairs}


def file_name(language: str, part: str) -> str:
    """Name of a file of pairs, ``xx-en.PART.tsv.gz``."""
    return f"{language}-{TARGET_LANGUAGE}.{part}.tsv.gz"


def write_split(folder: Path, language: str, part: str, pairs: Iterable[Pair]) -> Path:
    """Write ``xx-en.PART.tsv.gz``, the same bytes for the same pairs; all whitespace becomes single spaces."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(language, part)
    lines = ["source\ttarget", *("\t".join(" ".join(side.split()) for side in pair) for pair in pairs)]
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode(), mtime=0))
    return path
