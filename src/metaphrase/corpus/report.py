"""The report of a corpus: how many pairs were read, kept and dropped, and why."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

#: How many examples of each reason a report keeps.
EXAMPLES = 5


@dataclass
class Counts:
    """Pairs of one file and language that were read, kept, and dropped by reason; ``read == kept + dropped.total()``.

    ``examples`` are the first occurrences of each reason. ``english`` and ``identical`` count, among the first pairs kept,
    the sources and targets that look English, and the pairs with identical sides.
    """

    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    english: list[int] = field(default_factory=lambda: [0, 0])
    identical: int = 0

    def drop(self, reason: str, example: str) -> None:
        """Count a dropped pair."""
        self.dropped[reason] += 1
        if len(self.examples[reason]) < EXAMPLES:
            self.examples[reason].append(example)


class CorpusReport:
    """How many pairs were read, kept and dropped, per file and language, with the first examples of each reason.

    In a stream it is filled while the stream is read, by the process that reads it (the workers of a data loader fill
    their own copies). The counts of a file are from its latest pass.

    Args:
        logged: Files whose unreadable lines have been logged and are not logged again.

    Attributes:
        counts: The `Counts` of each ``(file, language)``; the language of an unreadable line may be unknown (``"?"``).
        sampled: Pairs per language after temperature mixing, if any.
    """

    def __init__(self, logged: Iterable[str] = ()) -> None:
        self.counts: dict[tuple[str, str], Counts] = {}
        self.sampled: dict[str, int] = {}
        self._logged = set(logged)

    def __deepcopy__(self, memo: dict[int, Any]) -> CorpusReport:
        return self  # `datasets` copies the arguments of a stream's generator; the copies fill this one report

    def of(self, file: str, language: str) -> Counts:
        """The counts of a file and language."""
        key = file, language
        if key not in self.counts:
            self.counts[key] = Counts()
        return self.counts[key]

    def restart(self, file: str) -> None:
        """Reset the counts of a file that is about to be read again."""
        for key in [key for key in self.counts if key[0] == file]:
            del self.counts[key]

    @property
    def read(self) -> int:
        """Pairs read."""
        return sum(counts.read for counts in self.counts.values())

    @property
    def kept(self) -> int:
        """Pairs kept."""
        return sum(counts.kept for counts in self.counts.values())

    @property
    def dropped(self) -> Counter[str]:
        """Pairs dropped, by reason."""
        return sum((counts.dropped for counts in self.counts.values()), Counter[str]())

    @property
    def languages(self) -> dict[str, int]:
        """Pairs kept per source language."""
        kept: Counter[str] = Counter()
        for (_, language), counts in self.counts.items():
            kept[language] += counts.kept
        return {language: n for language, n in kept.items() if n}

    def table(self) -> list[dict[str, Any]]:
        """One row per file and language: ``file``, ``language``, ``read``, ``kept``, and ``dropped`` as text."""
        return [
            {"file": file, "language": language, "read": c.read, "kept": c.kept, "dropped": _format_counts(c.dropped)}
            for (file, language), c in self.counts.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """The whole report as plain data."""
        files = [
            {"file": file, "language": language, "read": counts.read, "kept": counts.kept}
            | {"dropped": dict(counts.dropped), "examples": dict(counts.examples)}
            for (file, language), counts in self.counts.items()
        ]
        report: dict[str, Any] = {"read": self.read, "kept": self.kept, "dropped": dict(self.dropped)}
        report |= {"languages": self.languages, "files": files}
        return report | ({"sampled": dict(self.sampled)} if self.sampled else {})

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> CorpusReport:
        """Create a report from the output of `to_dict`.

        >>> report = CorpusReport()
        >>> report.of("x.tsv", "sw").drop("duplicate", "x.tsv:3")
        >>> CorpusReport.from_dict(report.to_dict()).dropped
        Counter({'duplicate': 1})
        """
        report = cls()
        for row in content["files"]:
            counts = report.of(row["file"], row["language"])
            counts.read, counts.kept, counts.dropped = row["read"], row["kept"], Counter(row["dropped"])
            counts.examples.update(row["examples"])
        return report

    def __repr__(self) -> str:
        return f"CorpusReport(read={self.read}, kept={self.kept})"

    def __str__(self) -> str:
        rows = [("file", "language", "read", "kept", "dropped")]
        rows += [
            (Path(row["file"]).name, row["language"], f"{row['read']:,}", f"{row['kept']:,}", row["dropped"])
            for row in self.table()
        ]
        if len(rows) > 2:
            rows.append(("total", "", f"{self.read:,}", f"{self.kept:,}", _format_counts(self.dropped)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        aligned = ("<", "<", ">", ">", "")
        return "\n".join(
            "  ".join(f"{cell:{a}{w if a else ''}}" for cell, a, w in zip(row, aligned, widths, strict=True)).rstrip()
            for row in rows
        )

    def log_unreadable(self, file: str, unreadable: Mapping[str, Sequence[str]], n: int, read: int) -> None:
        """Log the unreadable lines of a file, once per file."""
        if unreadable and file not in self._logged:
            self._logged.add(file)
            logger.warning("%s: %d of %d lines were unreadable: %s.", file, n, read, format_examples(unreadable))


def format_examples(examples: Mapping[str, Sequence[str]]) -> str:
    """Format reasons with the places where they occurred.

    >>> format_examples({"empty side": ["x.tsv:2", "x.tsv:7"]})
    'empty side at x.tsv:2, x.tsv:7'
    """
    return "; ".join(f"{reason} at {', '.join(lines)}" for reason, lines in examples.items())


def _format_counts(dropped: Counter[str]) -> str:
    return ", ".join(f"{reason} {n:,}" for reason, n in dropped.most_common())
