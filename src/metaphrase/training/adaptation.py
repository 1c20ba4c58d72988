"""What ``metaphrase adapt`` decides for a user: what is held out, what is mixed in, and settings for the machine.

Everything here is a pure function of corpus, machine and seed, so that a run can be explained and made again.
"""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from metaphrase.corpus.parallel import TARGET_LANGUAGE, ParallelSet
from metaphrase.corpus.text import normalised
from metaphrase.exceptions import CorpusError

#: Of the user's pairs so many are held out at most, and so large a share of them at most.
TEST, DEV, SHARE = 500, 250, 0.1
#: Fewer pairs than this cannot be trained on and measured at once.
FEWEST = 100
#: Epochs over the user's pairs at most.
EPOCHS = 3
#: Evaluations of the dev set during training, and how many without improvement end it.
EVALUATIONS, PATIENCE = 8, 3

Pair = tuple[str, str]


@dataclass(frozen=True)
class Split:
    """A language's pairs, divided.

    Attributes:
        train: To train on; no sentence of them is in dev or test.
        dev: To stop by.
        test: To judge by.
        left_out: Pairs that share a sentence with dev or test, or repeat another pair.
    """

    train: tuple[Pair, ...]
    dev: tuple[Pair, ...]
    test: tuple[Pair, ...]
    left_out: int


def split(pairs: ParallelSet, *, seed: int = 0) -> Split:
    """Hold out dev and test pairs whose sentences do not occur in what is trained on.

    Args:
        pairs: A language's pairs.
        seed: Of the choice.

    Raises:
        CorpusError: There are too few pairs.
    """
    unique = list(dict.fromkeys((s.strip(), t.strip()) for s, t in zip(pairs.sources, pairs.targets, strict=True)))
    unique = [pair for pair in unique if all(pair)]
    if len(unique) < FEWEST:
        raise CorpusError(
            f"{pairs.language} has {len(unique)} different pairs; adapting, and judging what came of it, needs at least "
            f"{FEWEST}. Mine some more (metaphrase mine), or train with a test set of your own (metaphrase train)."
        )
    random.Random(seed).shuffle(unique)
    tests, devs = (min(most, int(SHARE * len(unique))) for most in (TEST, DEV))
    test, dev, rest = unique[:tests], unique[tests : tests + devs], unique[tests + devs :]
    # One copy of a sentence in a set that is searched, so that every sentence has one right answer.
    test, dev = _one_each(test), _one_each(dev)
    held = {normalised(side) for pair in (*test, *dev) for side in pair}
    seen = {normalised(side) for pair in test for side in pair}
    dev = [pair for pair in dev if not seen & {normalised(side) for side in pair}]
    train = without(rest, held)
    kept = len(train) + len(dev) + len(test)
    return Split(tuple(train), tuple(dev), tuple(test), len(pairs.sources) - kept)


def split_all(sets: Mapping[str, ParallelSet], *, seed: int = 0) -> dict[str, Split]:
    """Hold out pairs of every language; what is held out of one is trained on in none, in English either.

    Args:
        sets: The pairs of each language.
        seed: Of the choice.

    Raises:
        CorpusError: A language has too few pairs.
    """
    splits = {language: split(pairs, seed=seed) for language, pairs in sets.items()}
    held = held_out(splits.values())
    for language, one in splits.items():
        train = without(one.train, held)
        splits[language] = replace(one, train=train, left_out=one.left_out + len(one.train) - len(train))
    return splits


def held_out(splits: Iterable[Split]) -> set[str]:
    """The normalised sentences, of either side, that are in a dev or test set."""
    return {normalised(side) for one in splits for pair in (*one.dev, *one.test) for side in pair}


def without(pairs: Iterable[Pair], held: Set[str]) -> tuple[Pair, ...]:
    """The pairs no side of which is among the held-out sentences."""
    return tuple(pair for pair in pairs if held.isdisjoint(map(normalised, pair)))


def _one_each(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs neither side of which occurred before."""
    seen: tuple[set[str], set[str]] = (set(), set())
    kept = []
    for pair in pairs:
        sides = [normalised(side) for side in pair]
        if not any(side in there for side, there in zip(sides, seen, strict=True)):
            kept.append(pair)
        for side, there in zip(sides, seen, strict=True):
            there.add(side)
    return kept


def replay(
    others: Mapping[str, ParallelSet], wanted: int, *, held: Set[str] = frozenset(), seed: int = 0
) -> dict[str, tuple[Pair, ...]]:
    """Pairs of other languages to train on beside the user's, so that these are kept: as evenly as there are pairs.

    Args:
        others: Pairs of each other language.
        wanted: Pairs of all of them together.
        held: Normalised sentences that must not be trained on, in whatever language.
        seed: Of the choice.
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
    """``xx-en.PART.tsv.gz``."""
    return f"{language}-{TARGET_LANGUAGE}.{part}.tsv.gz"


def write_pairs(folder: Path, language: str, part: str, pairs: Sequence[Pair]) -> Path:
    """Write ``xx-en.PART.tsv.gz``, the same bytes for the same pairs."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(language, part)
    lines = ["source\ttarget", *("\t".join(" ".join(side.split()) for side in pair) for pair in pairs)]
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode(), mtime=0))
    return path


@dataclass(frozen=True)
class Plan:
    """Settings of a training run.

    Attributes:
        batch_size: Pairs ranked against each other.
        micro_batch_size: Rows encoded at a time, by memory; None encodes a batch at once.
        max_steps: Optimiser steps at most.
        eval_steps: Steps between two looks at the dev set.
        freeze_word_embeddings: Whether the word embeddings stay as they are.
        learning_rate: Peak learning rate.
        reasons: Why, a line each.
    """

    batch_size: int
    micro_batch_size: int | None
    max_steps: int
    eval_steps: int
    freeze_word_embeddings: bool
    learning_rate: float
    reasons: tuple[str, ...]


def batch_size_for(pairs: int) -> int:
    """Pairs ranked against each other: more where there are enough of them for some hundred steps."""
    return 64 if pairs >= 4000 else 32 if pairs >= 1000 else 16


def make_plan(
    *,
    pairs: int,
    replayed: int,
    seconds_per_step: float,
    minutes: float,
    memory: float,
    parameters: int,
    table: int,
    row_bytes: float,
    cuda: bool,
) -> Plan:
    """Choose settings by data, time and memory.

    Args:
        pairs: The user's pairs to train on.
        replayed: Pairs of other languages beside them.
        seconds_per_step: What a step takes here, measured.
        minutes: Time for training.
        memory: Bytes that are free.
        parameters: Parameters of the encoder.
        table: Those of its word embeddings.
        row_bytes: Activations of a sentence, in bytes.
        cuda: Whether there is a GPU.
    """
    batch = batch_size_for(pairs + replayed)
    reasons = [f"batch of {batch} pairs, for {pairs + replayed:,} pairs"]
    whole = 16 * parameters  # weights, gradients, two moments
    freeze = not cuda or whole > 0.5 * memory
    if freeze:
        why = "on a CPU" if not cuda else f"as training them takes {16 * table / 1e9:.1f} GB of {memory / 1e9:.1f}"
        reasons.append(f"word embeddings stay as they are, {why}")
    held = 4 * parameters + 12 * (parameters - table if freeze else parameters)
    room = max(memory - held, 0.0) * 0.5
    rows = int(room // row_bytes)
    micro = None if rows >= 2 * batch else max(rows, 4)
    if micro is not None:
        reasons.append(f"{micro} rows are encoded at a time, for {memory / 1e9:.1f} GB of free memory")
    wanted = max(EPOCHS * (pairs + replayed) // batch, 1)
    affordable = max(int(60 * minutes / seconds_per_step), 1)
    steps = min(wanted, affordable)
    which = f"{EPOCHS} epochs" if steps == wanted else f"{minutes:g} minutes at {seconds_per_step:.1f} s a step"
    reasons.append(f"{steps} steps at most: {which}")
    evaluate = max(steps // EVALUATIONS, 1)
    reasons.append(
        f"the dev set is measured every {evaluate} steps; training ends after {PATIENCE} without improvement"
    )
    return Plan(batch, micro, steps, evaluate, freeze, 5e-5, tuple(reasons))


def verdict_in_words(
    languages: Mapping[str, Mapping[str, Any]], retained: Mapping[str, Any] | None, names: Mapping[str, str]
) -> list[str]:
    """What came of it, a sentence for each language, and one for the others.

    Args:
        languages: For each adapted language its row of `compare`.
        retained: `plots.retention` of the languages that were not adapted; None where none was measured.
        names: Names of languages.
    """
    said = {"better": "Better", "tie": "Tie: no difference can be told from chance", "worse": "Worse"}
    lines = []
    for language, row in languages.items():
        low, high = row["interval"]
        lines.append(
            f"{names.get(language, language)}: {said[row['verdict']]}. {row['before']:.1f} → "
            f"{row['after']:.1f} % on {row['n']} held-out pairs, {row['difference']:+.1f} [{low:+.1f}, {high:+.1f}]."
        )
    if retained is not None:
        pooled, limit = retained["pooled"], retained["limit"]
        low, high = pooled["interval"]
        kept = {
            "kept": f"were kept (a loss above {limit:g} points can be excluded)",
            "lost": f"were damaged by more than {limit:g} points",
            "uncertain": f"may have lost more than {limit:g} points, or not",
        }[retained["verdict"]]
        lines.append(
            f"{len(retained['languages'])} languages that were not trained on {kept}: {pooled['difference']:+.1f} "
            f"[{low:+.1f}, {high:+.1f}] on average."
        )
    return lines
