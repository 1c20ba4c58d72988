"""Reading JSON lines."""

from __future__ import annotations

import json
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
                record = json.loads(text)
            except (ValueError, RecursionError) as error:
                yield line, BadLine("not JSON", str(error))
                continue
            yield line, record if isinstance(record, dict) else BadLine("not JSON", "not an object")

    yield from read_records(records(), file)
