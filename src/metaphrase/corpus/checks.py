"""Checks of a bitext before training, without a model.

`check_corpus` returns a list of `Finding`: an ``error`` should prevent training, a ``warning`` should be inspected, an
``info`` is a fact. Every message states what was found, what was expected and what to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from metaphrase.corpus.codes import bare_language
from metaphrase.corpus.files import CorpusLike, find_files, source_language
from metaphrase.corpus.identification import LINES, Identification, canonical, identify, knows, language_name, related
from metaphrase.corpus.overlap import shared_sentences
from metaphrase.corpus.parallel import ParallelSet
from metaphrase.corpus.readers import read_pairs
from metaphrase.corpus.report import EXAMPLES, CorpusReport
from metaphrase.corpus.shifts import Shift, find_shift, length_similarity
from metaphrase.corpus.text import composed, normalised
from metaphrase.exceptions import CorpusError
from metaphrase.io.counts import counted

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")

#: A side is in another language if the mean probability of that language exceeds the first number, and the probability of the
#: expected language is below the second.
SURE, ABSENT = 0.4, 0.2
#: With fewer lines a wrong language is a warning, not an error.
MIN_LINES = 20
#: Share of lines in another language, with high probability, that is a warning.
OTHER_LINES = 0.1
#: Share of pairs with identical sides, or with the same text on one side, above which this is an error, or a warning.
IDENTICAL_ERROR, IDENTICAL_WARNING = 0.5, 0.1
#: Share of duplicate pairs that is a warning.
DUPLICATES = 0.1
#: Share of test pairs with a side in the training corpus that is an error; a smaller share is a warning.
LEAKAGE = 0.05
#: A pair is uneven if its length ratio is this many times the corpus's median ratio, and its longer side has at least
#: this many characters; the share of such pairs that is a warning.
RATIO, RATIO_CHARS, UNEVEN = 4.0, 40, 0.05
#: Characters of a sentence in an example.
_SHOWN = 160

_SIDES = ("source", "target")


@dataclass(frozen=True)
class Finding:
    """A result of a check.

    Attributes:
        severity: ``error``, ``warning`` or ``info``.
        code: Short name of the check, such as ``wrong-language``.
        message: What was found, what was expected, what to do.
        language: Language of the corpus that it concerns, if any.
        count: Number of lines, pairs or words that it concerns.
        of: Number of lines, pairs or words that were checked.
        examples: Examples, each a list of texts.
    """

    severity: Severity
    code: str
    message: str
    language: str | None = None
    count: int = 0
    of: int = 0
    examples: list[list[str]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The finding as plain data."""
        return asdict(self)


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that should prevent training."""
    return [finding for finding in findings if finding.severity == "error"]


def by_language(rows: Any) -> dict[str, ParallelSet]:
    """Group pairs by source language."""
    sides: dict[str, tuple[list[str], list[str]]] = {}
    for row in rows:
        sources, targets = sides.setdefault(row["source_lang"], ([], []))
        sources.append(row["source"])
        targets.append(row["target"])
    return {code: ParallelSet(code, tuple(sources), tuple(targets)) for code, (sources, targets) in sides.items()}


def read_corpus(
    corpus: CorpusLike, *, languages: Sequence[str] | None = None, **options: Any
) -> tuple[dict[str, ParallelSet], CorpusReport]:
    """Read every pair of a corpus without cleaning, including duplicates and copies.

    See `metaphrase.corpus.files.find_files` for the arguments. The cleaning of `load_corpus` would hide some of the
    problems.

    Returns the pairs of each source language in the order of the files, and a report of unreadable lines.
    """
    report = CorpusReport()
    wanted = {bare_language(code) for code in languages or ()}
    rows: list[dict[str, str]] = []
    for file in find_files(corpus, languages=languages, **options):
        for _, source, target, known in read_pairs(file, report=report):
            language = source_language(known, file)
            if not wanted or language in wanted:
                report.of(file.name, language).kept += 1
                rows.append({"source": source, "target": target, "source_lang": language})
    sets = by_language(rows)
    if missing := sorted(wanted - sets.keys()) or (not sets and ["any language"]):
        available = ", ".join(sorted(report.languages or {code for _, code in report.counts})) or "none"
        raise CorpusError(f"The corpus has no pair for {', '.join(missing)}. Its languages: {available}.")
    return sets, report


def check_corpus(
    sets: Mapping[str, ParallelSet],
    tests: Mapping[str, ParallelSet] | None = None,
    *,
    target_lang: str = "en",
    lines: int = LINES,
    seed: int = 0,
    strict: bool = False,
    advance: Callable[[int], None] = lambda n: None,
) -> list[Finding]:
    """Check a corpus before training.

    Args:
        sets: The pairs of each source language, from `read_corpus` or `by_language`.
        tests: Test sets of the trained model.
        target_lang: Language of the targets.
        lines: Lines of each side whose language is identified.
        seed: Seed of the sample of lines.
        strict: Treat a single test pair in the training corpus as an error.
        advance: Called with the number of newly checked languages.

    Returns:
        Findings, errors first; empty if there are no problems.
    """
    findings: list[Finding] = []
    for pairs in sets.values():
        findings += check_languages(pairs, target_lang, lines=lines, seed=seed)
        findings += check_pairs(pairs)
        advance(1)
    if tests:
        findings += check_leakage(sets, tests, strict=strict)
    # A finding that does not concern a single language occurs once for each.
    return by_severity({(one.code, one.language, one.message): one for one in findings}.values())


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings by severity, errors first; the sort is stable."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


# ----------------------------------------------------------------------------------------------------------- languages


def check_languages(
    pairs: ParallelSet, target_lang: str = "en", *, lines: int = LINES, seed: int = 0
) -> list[Finding]:
    """Check the language of each side: swapped sides or pairs, another language, lines in another language.

    A language that the classifier does not know results in a warning, unless the sides are swapped. See
    `check_corpus` for the arguments.
    """
    language = pairs.language
    source, target = (identify(side, lines=lines, seed=seed) for side in (pairs.sources, pairs.targets))
    if knows(target_lang) and target_lang != language:
        swapped = _swapped(pairs, target_lang, source, target) or _partly_swapped(pairs, target_lang, source, target)
        if swapped:
            return [swapped]
    findings = (
        _check_side("source", language, language, source),
        _check_side("target", target_lang, language, target),
    )
    return [finding for finding in findings if finding is not None]


def _swapped(pairs: ParallelSet, target_lang: str, source: Identification, target: Identification) -> Finding | None:
    known = knows(pairs.language)
    if source.share(target_lang) < SURE or target.share(target_lang) > ABSENT:
        return None
    if known and (target.share(pairs.language) < SURE or source.share(pairs.language) > ABSENT):
        return None
    enough = min(len(source.lines), len(target.lines)) >= MIN_LINES
    count = sum(line.language == source.best for line in source.lines)
    return Finding(
        "error" if enough else "warning",
        "swapped-sides",
        f"The sides are swapped: the source side looks like {language_name(target_lang)}, the target side like "
        f"{language_name(pairs.language if known else target.best or '?')}. The source side should be "
        f"{language_name(pairs.language)}, the target side {language_name(target_lang)}. Swap the columns (or the "
        "order of the two files).",
        pairs.language,
        count,
        len(source.lines),
        _examples(zip(pairs.sources, pairs.targets, strict=True)),
    )


def _partly_swapped(
    pairs: ParallelSet, target_lang: str, source: Identification, target: Identification
) -> Finding | None:
    """The finding about lines of each side that are in the language of the other, in similar numbers."""
    sources = [line for line in source.others(pairs.language) if line.language in related(target_lang)]
    targets = [
        line
        for line in target.others(target_lang)
        if line.language in related(pairs.language) or not knows(pairs.language)
    ]
    shares = sorted((len(sources) / max(1, len(source.lines)), len(targets) / max(1, len(target.lines))))
    if shares[0] <= OTHER_LINES or shares[0] < shares[1] / 2:
        return None
    texts = {line.text for line in sources}
    return Finding(
        "warning",
        "swapped-pairs",
        f"Some pairs are swapped: {len(sources)} of {len(source.lines)} lines of the source side look like "
        f"{language_name(target_lang)}, and {len(targets)} of {len(target.lines)} of the target side do not. The source "
        f"side should be {language_name(pairs.language)}, the target side {language_name(target_lang)}. Swap the two sides "
        "of these pairs.",
        pairs.language,
        len(sources),
        len(source.lines),
        _examples(pair for pair in zip(pairs.sources, pairs.targets, strict=True) if pair[0] in texts),
    )


def _check_side(side: str, expected: str, language: str, identified: Identification) -> Finding | None:
    """The finding about the language of one side, if it is not the expected one."""
    n, name, best = len(identified.lines), language_name(expected), str(identified.best)
    severity: Severity = "warning"
    if not n:
        message = f"The language of the {side} side cannot be identified; it should be {name}."
        return Finding(severity, "no-language", message, language)
    if not knows(expected):
        message = (
            f"The language identifier does not know {name}, so the {side} side was not checked; it is closest to "
            f"{language_name(best)}. Inspect the examples."
        )
        examples = _examples((line.text,) for line in identified.lines)
        return Finding(severity, "unknown-language", message, language, of=n, examples=examples)
    lines = [line for line in identified.lines if line.language == best]
    if identified.shares[best] < SURE or identified.shares.get(canonical(expected), 0.0) > ABSENT:
        code, lines = "other-language-lines", identified.others(expected)
        if len(lines) <= OTHER_LINES * n:
            return None
        counts = Counter(line.language for line in lines).most_common(3)
        named = ", ".join(f"{language_name(other)} {count}" for other, count in counts)
        message = f"{len(lines)} of {n} lines of the {side} side are not {name}, with high probability: {named}. Remove them."
    elif identified.share(expected) > ABSENT:
        code = "related-language"
        message = (
            f"The {side} side looks more like {language_name(best)} than {name}. These languages are hard to distinguish "
            "in short lines: inspect the examples."
        )
    else:
        severity, code = "error" if n >= MIN_LINES else "warning", "wrong-language"
        remedy = f", or pass --languages {best}" if side == "source" else ""
        message = (
            f"The {side} side looks like {language_name(best)}, not {name}, in {len(lines)} of {n} lines. Pass the right "
            f"file{remedy}."
        )
    return Finding(severity, code, message, language, len(lines), n, _examples((line.text,) for line in lines))


# --------------------------------------------------------------------------------------------------------------- pairs


def check_pairs(pairs: ParallelSet) -> list[Finding]:
    """Check the pairs of one language for copies, duplicates, repeated sides, uneven lengths and shifted sides."""
    checks = (_identical, _duplicates, _repeated, _uneven, _shifted)
    return [finding for check in checks if (finding := check(pairs)) is not None]


def is_copied(pairs: ParallelSet) -> bool:
    """Whether most pairs have exactly the same text on both sides."""
    same = sum(source == target for source, target in zip(pairs.sources, pairs.targets, strict=True))
    return same > IDENTICAL_ERROR * len(pairs.sources)


def _identical(pairs: ParallelSet) -> Finding | None:
    n = len(pairs.sources)
    same = [(s, t) for s, t in zip(pairs.sources, pairs.targets, strict=True) if normalised(s) == normalised(t)]
    if not same:
        return None
    severity: Severity = "info"
    advice = "Such pairs are useless for training: remove them."
    if len(same) > IDENTICAL_ERROR * n:
        severity, advice = "error", "Check that the two sides are not the same file or column."
    elif len(same) > IDENTICAL_WARNING * n:
        severity = "warning"
    message = f"Both sides are the same text in {len(same):,} of {n:,} pairs ({len(same) / n:.1%}). {advice}"
    return Finding(severity, "identical-sides", message, pairs.language, len(same), n, _examples(same))


def _duplicates(pairs: ParallelSet) -> Finding | None:
    n = len(pairs.sources)
    counts = Counter(zip(map(composed, pairs.sources), map(composed, pairs.targets), strict=True))
    again = n - len(counts)
    if not again:
        return None
    return Finding(
        "warning" if again > DUPLICATES * n else "info",
        "duplicates",
        f"{again:,} of {n:,} pairs ({again / n:.1%}) are duplicates. Training drops them, which leaves "
        f"{counted(len(counts), 'pair')}.",
        pairs.language,
        again,
        n,
        _examples(pair for pair, count in counts.most_common(EXAMPLES) if count > 1),
    )


def _repeated(pairs: ParallelSet) -> Finding | None:
    """The finding about a text that is the translation of many others; identical pairs count once."""
    distinct = set(zip(pairs.sources, pairs.targets, strict=True))
    n = len(distinct)
    counts = [Counter(pair[at] for pair in distinct).most_common(1)[0] for at in range(len(_SIDES))]
    at = max(range(len(_SIDES)), key=lambda at: counts[at][1])
    text, count = counts[at]
    enough = n >= MIN_LINES
    if count < 2 or count <= (IDENTICAL_WARNING if enough else IDENTICAL_ERROR) * n:
        return None
    side, other = _SIDES[at], _SIDES[1 - at]
    return Finding(
        "error" if enough and count > IDENTICAL_ERROR * n else "warning",
        "repeated-side",
        f"One text is the {side} of {count:,} of {n:,} different pairs ({count / n:.1%}), whose {other}s differ. Check that "
        f"the {side}s are the right column or file, and remove pairs that are not translations.",
        pairs.language,
        count,
        n,
        _examples(pair for pair in zip(pairs.sources, pairs.targets, strict=True) if pair[at] == text),
    )


def _uneven(pairs: ParallelSet) -> Finding | None:
    length_n2 = _lengths(pairs)
    ratio_n = np.log(length_n2[:, 0] / length_n2[:, 1])
    off_n = (np.abs(ratio_n - np.median(ratio_n)) > np.log(RATIO)) & (length_n2.max(axis=1) >= RATIO_CHARS)
    places = np.flatnonzero(off_n)
    if not len(places):
        return None
    n = len(ratio_n)
    return Finding(
        "warning" if len(places) > UNEVEN * n else "info",
        "uneven-lengths",
        f"{len(places):,} of {n:,} pairs ({len(places) / n:.1%}) have one side more than {RATIO:g} times as long as the "
        "other, relative to the median ratio of this corpus. Such pairs are rarely translations: inspect the examples.",
        pairs.language,
        len(places),
        n,
        _examples((pairs.sources[at], pairs.targets[at]) for at in places),
    )


def _lengths(pairs: ParallelSet) -> NDArray[np.float64]:
    """Characters of both sides, at least 1, shape ``(pairs, 2)``."""
    sides = ([max(len(text), 1) for text in side] for side in (pairs.sources, pairs.targets))
    return np.array(list(zip(*sides, strict=True)), dtype=float)


def _shifted(pairs: ParallelSet) -> Finding | None:
    """Shifted sides: the lengths of neighbouring targets fit better than the lengths of the translations."""
    length_n, length_m = _lengths(pairs).T
    row_n = np.arange(len(length_n))
    shift = find_shift(length_similarity(length_n, length_m), row_n)
    if shift is not None:
        return shift_finding(pairs, shift, "the lengths of the sentences")
    if all(find_shift(length_similarity(length_n, np.roll(length_m, by)), row_n) for by in (-1, 1)):
        return None  # a shift would be found
    return Finding(
        "info",
        "shift-not-checked",
        "The lengths of the sentences do not show whether the sides are shifted by a line. Pass a model, which compares "
        "their meaning: metaphrase diagnose starter --corpus … --languages …",
        pairs.language,
        of=len(row_n),
    )


def shift_finding(pairs: ParallelSet, shift: Shift, evidence: str) -> Finding:
    """Create the finding for shifted sides."""
    lines = "line" if abs(shift.by) == 1 else "lines"
    return Finding(
        "error",
        "shifted-sides",
        f"The sides are shifted from pair {shift.first + 1:,} to {shift.end:,}: according to {evidence}, {shift.closer:,} of "
        f"{shift.of:,} sources match the target {abs(shift.by)} {lines} {'below' if shift.by > 0 else 'above'} better than "
        "their own. One side has a missing or an additional line: compare the files there, and align them again.",
        pairs.language,
        shift.closer,
        shift.of,
        _examples(zip(pairs.sources[shift.first :], pairs.targets[shift.first :], strict=True)),
    )


# ------------------------------------------------------------------------------------------------------------- leakage


def check_leakage(
    train: Mapping[str, ParallelSet], test: Mapping[str, ParallelSet], *, strict: bool = False
) -> list[Finding]:
    """Check for test sentences that also occur in the training corpus; see `metaphrase.corpus.overlap.shared_sentences`.

    A share of such sentences above `LEAKAGE` is an error, and a smaller one a warning; if ``strict``, a single one is an
    error.
    """
    shared = iter(shared_sentences(train, test))
    findings = []
    for language, tested in test.items():
        counts: Counter[str] = Counter()
        leaked: list[tuple[str, str]] = []
        for pair, known in zip(zip(tested.sources, tested.targets, strict=True), shared, strict=False):
            counts.update({part: int(found) for part, found in known._asdict().items()})
            if any(known):
                leaked.append(pair)
        if leaked:
            n = len(tested.sources)
            bad = strict or len(leaked) > LEAKAGE * n
            findings.append(
                Finding(
                    "error" if bad else "warning",
                    "leakage",
                    f"{len(leaked):,} of {n:,} test pairs ({len(leaked) / n:.1%}) have a side in the training corpus: "
                    f"{counted(counts['source'], 'source')}, {counted(counts['target'], 'target')}, "
                    f"{counted(counts['pair'], 'whole pair')}. Scores "
                    "on them are meaningless: remove them from the training corpus.",
                    language,
                    len(leaked),
                    n,
                    _examples(leaked),
                )
            )
    return findings


def _examples(texts: Iterable[Sequence[str]]) -> list[list[str]]:
    return [[_shorten(text) for text in row] for row in islice(texts, EXAMPLES)]


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
