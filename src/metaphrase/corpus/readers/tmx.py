"""Reading TMX."""

from __future__ import annotations

from collections.abc import Iterator
from xml.parsers import expat

from metaphrase.corpus.codes import bare_language
from metaphrase.corpus.files import BitextFile
from metaphrase.corpus.kinds import XML
from metaphrase.corpus.rows import Row
from metaphrase.corpus.text import BadLine, read_chunks
from metaphrase.exceptions import CorpusError

#: Elements of inline formatting codes, whose content is not text.
_CODES = ("bpt", "ept", "it", "ph", "ut")


def read_tmx(file: BitextFile, max_chars: int) -> Iterator[tuple[int, Row | BadLine]]:
    """Read the translation units of a TMX file."""
    parser = _TmxParser(file, max_chars)
    for chunk in read_chunks(file.paths[0], file.max_expansion, accepted=XML):
        yield from parser.feed(chunk)
    yield from parser.feed(b"", last=True)


class _TmxParser:
    """Translation units of a TMX file, each language paired with the corpus's target, in bounded memory."""

    def __init__(self, file: BitextFile, max_chars: int) -> None:
        self.file, self.max_chars = file, max_chars
        self.rows: list[tuple[int, Row | BadLine]] = []
        self.line, self.language, self.is_chosen = 0, "", True
        self.texts: dict[str, str] = {}
        self.parts: list[str] | None = None  # of the current segment
        self.length = 0
        self.codes = 0  # depth of `_CODES`
        self.expat = expat.ParserCreate()
        self.expat.StartElementHandler = self.start
        self.expat.EndElementHandler = self.end
        self.expat.CharacterDataHandler = self.characters

    def feed(self, chunk: bytes, *, last: bool = False) -> list[tuple[int, Row | BadLine]]:
        """Parse a chunk of the file and return the rows that end in it."""
        path = self.file.paths[0]
        try:
            self.expat.Parse(chunk, last)
        except expat.ExpatError as error:
            raise CorpusError(f"{path}:{error.lineno}: not well-formed TMX ({error}).") from error
        except (ValueError, LookupError) as error:
            raise CorpusError(
                f"{path}:1: the encoding is not supported ({error}). Convert the file to UTF-8."
            ) from error
        rows, self.rows = self.rows, []
        return rows

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "tu":
            self.line, self.texts = self.expat.CurrentLineNumber, {}
        elif name == "tuv":
            stated = attributes.get("xml:lang") or attributes.get("lang") or ""
            self.language, self.is_chosen = bare_language(stated), self.file.has_chosen_script(stated)
        elif name == "seg" and self.is_chosen:
            self.parts, self.length = [], 0
        elif name in _CODES:
            self.codes += 1

    def characters(self, text: str) -> None:
        if self.parts is not None and not self.codes and self.length <= self.max_chars:
            self.parts.append(text)
            self.length += len(text)

    def end(self, name: str) -> None:
        if name == "seg" and self.parts is not None:
            if self.language not in self.texts:
                self.texts[self.language] = "".join(self.parts).replace("\n", " ")
            elif self.language == self.file.into or self.file.language in (self.language, None):
                self.rows.append((self.line, BadLine("another variant", f"in {self.language!r}", fault=False)))
            self.parts = None
        elif name in _CODES:
            self.codes -= 1
        elif name == "tu":
            target = self.texts.pop(self.file.into, None)
            wanted = self.file.language
            sources = {code: text for code, text in self.texts.items() if code and wanted in (code, None)}
            if target is None or not sources:
                others = ", ".join(self.texts) or "nothing"
                self.rows.append((self.line, BadLine("other languages", f"the unit has {others}", fault=False)))
                return
            self.rows += [(self.line, Row(text, target, code, self.file.into)) for code, text in sources.items()]
