"""Reading JSON lines."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from metaphrase.corpus.files import BitextFile
from metaphrase.corpus.readers.columns import read_records
from metaphrase.corpus.rows import Row
from metaphrase.corpus.text import BadLine, read_lines


def read_jsonl(file: BitextFile, max_chars: int) -> Iterator[tuple[int, Row | BadLine]]:
    """Read a file with one JSON object a line."""

    def records() -> Iterator[tuple[int, Mapping[str, Any] | BadLine]]:
        for line, text in read_lines(file.paths[0], max_chars, file.max_expansion):
            if isinstance(text, BadLine):
                yield line, text
                continue
            try:
                record = json.loads(text, object_pairs_hook=_without_repetition)
            except _RepeatedKey as error:
                yield line, BadLine("repeated key", str(error))
                continue
            except json.JSONDecodeError as error:
                yield line, BadLine("not JSON", f"{error.msg} at column {error.colno}")
                continue
            except (ValueError, RecursionError):
                yield line, BadLine("not JSON", "a number is too long, or values are nested too deeply")
                continue
            yield line, record if isinstance(record, dict) else BadLine("not JSON", "not an object")

    yield from read_records(records(), file)


class _RepeatedKey(ValueError):
    """An object has a key twice."""


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise _RepeatedKey(", ".join(repr(key) for key, count in counts.items() if count > 1))
    return record
