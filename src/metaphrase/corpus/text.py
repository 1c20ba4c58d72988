"""Opening text files: UTF-8 lines from plain or gzip files, in bounded memory."""

from __future__ import annotations

import codecs
import gzip
import io
import re
import unicodedata
import zlib
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from metaphrase.corpus.kinds import check_content, check_regular
from metaphrase.exceptions import CorpusError

#: A side with more characters is too long for a sentence.
MAX_CHARS = 10_000
#: A file is refused once its share of unreadable lines exceeds the first number, after at least this many lines.
MAX_BAD_RATE, BAD_RATE_AFTER = 0.05, 1000
#: A compressed file is refused once it expands by more than this factor, after at least this many bytes. Text rarely
#: compresses to less than a twentieth.
MAX_EXPANSION, EXPANSION_AFTER = 200, 64 << 20

_BREAK = re.compile(r"[\t\n\r]")
#: Characters without width: soft hyphens, zero-width spaces and joiners, marks of the writing direction, byte order marks.
_WITHOUT_WIDTH = "\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff"
_INVISIBLE, _VISIBLE = re.compile(f"[{_WITHOUT_WIDTH}]"), re.compile(rf"[^\s{_WITHOUT_WIDTH}]")
_DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)


#: The reason of a line with an empty side.
EMPTY = "empty side"


class BadLine(NamedTuple):
    """The reason under which an unusable line is counted, and what was found. A TMX unit in other languages is not a
    fault of the file, nor is an empty side, which files of parallel lines have where a sentence is not translated.
    """

    reason: str
    detail: str = ""
    fault: bool = True


class _Unpacked(io.RawIOBase):
    """The bytes of a gzip file, up to a maximum expansion."""

    def __init__(self, path: Path, max_expansion: float | None) -> None:
        self.path, self.max_expansion, self.size = path, max_expansion, 0
        self.packed = path.open("rb")
        self.stream = gzip.GzipFile(fileobj=self.packed)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self.stream.readinto(buffer)
        self.size += count
        packed = self.packed.tell()
        if expands_too_far(self.size, packed, self.max_expansion):
            raise CorpusError(
                f"{self.path} expands to more than {self.max_expansion:g} times its size: reading stopped after "
                f"{self.size >> 20:,} MiB from {packed >> 10:,} KiB. Text does not compress that well. If you trust the "
                "file, decompress it first, or pass max_expansion=None."
            )
        return count

    def close(self) -> None:
        self.stream.close()
        self.packed.close()
        super().close()


def expands_too_far(size: int, packed: int, max_expansion: float | None) -> bool:
    """Whether compressed data expands further than text does.

    ``max_expansion`` is the largest factor beyond the first 64 MiB; None disables the limit.
    """
    return max_expansion is not None and size > max(EXPANSION_AFTER, max_expansion * packed)


def open_bytes(
    path: Path, max_expansion: float | None = MAX_EXPANSION, *, accepted: Collection[str] = ()
) -> io.BufferedReader:
    """Open a text file for reading, decompressed if its content is gzip, regardless of its name.

    ``accepted`` is what the file may be instead of UTF-8; see `check_content`.
    """
    check_regular(path)
    stream = path.open("rb")
    if stream.peek(2)[:2] == b"\x1f\x8b":
        stream.close()
        stream = io.BufferedReader(_Unpacked(path, max_expansion), 1 << 17)
    try:
        check_content(path, stream.peek(), accepted=accepted)
    except Exception:
        stream.close()
        raise
    return stream


@contextmanager
def open_text(path: Path, *, newline: str | None = "\n") -> Iterator[TextIO]:
    """Open the UTF-8 text of a plain or gzip file, without a byte order mark."""
    try:
        with open_bytes(path) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline=newline) as text:
            yield text
    except _DAMAGED as error:
        raise CorpusError(f"{path}: the gzip file is damaged or truncated ({error}). Download it again.") from error
    except UnicodeDecodeError as error:
        raise _not_utf8(path) from error


def _not_utf8(path: Path) -> CorpusError:
    """The error for a file, which names the first line that is not UTF-8."""
    with open_bytes(path) as stream:
        for number, raw in enumerate(stream, 1):
            try:
                raw.decode("utf-8")
            except UnicodeDecodeError as error:
                found = f"byte {raw[error.start]:#04x} at {error.start}"
                return CorpusError(f"{path}:{number}: this is not UTF-8 ({found}). Convert the file to UTF-8.")
    return CorpusError(f"{path} is not UTF-8. Convert the file to UTF-8.")


def max_line_bytes(max_chars: int) -> int:
    """Maximum number of bytes of a line: two sides of four-byte characters, and the other columns."""
    return 8 * max_chars + (1 << 16)


def read_lines(
    path: Path, max_chars: int = MAX_CHARS, max_expansion: float | None = MAX_EXPANSION
) -> Generator[tuple[int, str | BadLine], None, None]:
    """Read the numbered lines of a UTF-8 file, split at line feeds only, in bounded memory.

    Yields the number of a line, from 1, and its text, or the reason why it cannot be read. A line that is too long for two
    sides of ``max_chars`` characters is unreadable.
    """
    limit = max_line_bytes(max_chars)
    number = 0
    try:
        with open_bytes(path, max_expansion) as stream:
            while raw := stream.readline(limit):
                number += 1
                if len(raw) == limit and not raw.endswith(b"\n"):
                    while (rest := stream.readline(limit)) and not rest.endswith(b"\n"):
                        pass
                    yield number, BadLine("too long", f"more than {limit} bytes")
                    continue
                if number == 1:
                    raw = raw.removeprefix(codecs.BOM_UTF8)
                    if not raw:
                        return
                raw = raw.removesuffix(b"\n").removesuffix(b"\r")
                if b"\0" in raw:
                    yield number, BadLine("not text", "NUL byte")
                    continue
                try:
                    text = raw.decode("utf-8")
                except UnicodeDecodeError as error:
                    yield number, BadLine("not UTF-8", f"byte {raw[error.start]:#04x} at {error.start}")
                    continue
                yield number, text
    except _DAMAGED as error:
        raise _damage(path, number, error) from error


def read_chunks(
    path: Path, max_expansion: float | None = MAX_EXPANSION, *, accepted: Collection[str] = ()
) -> Iterator[bytes]:
    """Read the bytes of a plain or gzip file, one MiB at a time. See `open_bytes` for the arguments."""
    lines = 0
    try:
        with open_bytes(path, max_expansion, accepted=accepted) as stream:
            while chunk := stream.read(1 << 20):
                yield chunk
                lines += chunk.count(b"\n")
    except _DAMAGED as error:
        raise _damage(path, lines, error) from error


def count_lines(path: Path, max_expansion: float | None = MAX_EXPANSION) -> int:
    """Count the lines of a plain or gzip file, including a last one without a line feed."""
    lines, last = 0, b"\n"
    for number, chunk in enumerate(read_chunks(path, max_expansion)):
        chunk = chunk if number else chunk.removeprefix(codecs.BOM_UTF8)
        lines, last = lines + chunk.count(b"\n"), chunk[-1:] or last
    return lines + (last != b"\n")


def _damage(path: Path, line: int, error: Exception) -> CorpusError:
    return CorpusError(
        f"{path}, after line {line}: the gzip file is damaged or truncated ({error}). Download it again."
    )


def one_line(text: str) -> str:
    r"""Replace tabs and line breaks by spaces, so that a text fits into a column of a TSV.

    >>> one_line("Habari\tyako")
    'Habari yako'
    """
    return _BREAK.sub(" ", text)


def is_blank(text: str) -> bool:
    r"""Whether a text has only whitespace and characters without width.

    >>> is_blank(" \u200b"), is_blank("—")
    (True, False)
    """
    return _VISIBLE.search(text) is None


def composed(text: str) -> str:
    r"""Normalise a text so that its copies are equal: NFC, single spaces.

    >>> composed("e\u0301  a") == "\u00e9 a"
    True
    """
    return " ".join(unicodedata.normalize("NFC", text).split())


def normalised(text: str) -> str:
    """Normalise a sentence for comparison: NFKC without characters that have no width, case folding, single spaces.

    >>> normalised("HELLO  world")
    'hello world'
    """
    return " ".join(_INVISIBLE.sub("", unicodedata.normalize("NFKC", text)).casefold().split())
