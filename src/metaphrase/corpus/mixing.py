"""Mixing languages by temperature."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence


def shares(sizes: Mapping[str, int], temperature: float) -> dict[str, float]:
    """Compute each language's share of a mixture, in proportion to ``size ** temperature``.

    The exponent is the smoothing of multilingual BERT (0.7): 1 keeps the shares, 0 makes them equal.

    >>> shares({"sw": 100, "te": 400}, 0.5)
    {'sw': 0.3333333333333333, 'te': 0.6666666666666666}
    """
    weights = {language: size**temperature for language, size in sizes.items() if size}
    return {language: weight / sum(weights.values()) for language, weight in weights.items()}


def mix(languages: Sequence[str], temperature: float, seed: int) -> list[int]:
    """Resample rows at the same total size; within a language, the counts of two rows differ by one at most.

    Returns the row numbers of the mixture. The temperature is the exponent of the sizes; see `shares`.
    """
    rows: dict[str, list[int]] = defaultdict(list)
    for i, language in enumerate(languages):
        rows[language].append(i)
    total = sum(map(len, rows.values()))
    exact = {code: p * total for code, p in shares({c: len(r) for c, r in rows.items()}, temperature).items()}
    counts = {language: math.floor(n) for language, n in exact.items()}
    rest = sorted(exact, key=lambda language: (counts[language] - exact[language], language))
    for language in rest[: total - sum(counts.values())]:
        counts[language] += 1
    generator = random.Random(seed)
    mixture: list[int] = []
    for language in sorted(rows):
        copies, more = divmod(counts[language], len(rows[language]))
        mixture += rows[language] * copies + generator.sample(rows[language], more)
    generator.shuffle(mixture)
    return mixture
