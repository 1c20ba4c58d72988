"""Build a bitext from the message catalogues (gettext) of free software: strings of programs and their translations.

    python scripts/gettext_bitext.py --language ro --packages libreoffice-l10n-ro gimp-data --output ro-en.train.tsv.gz
    python scripts/gettext_bitext.py --language ro --folder /usr --output ro-en.train.tsv.gz

``--packages`` downloads packages with ``apt-get download`` on Debian or Ubuntu, without installing them; ``--folder`` reads
the catalogues of installed programs. The output has the columns ``source`` (the language), ``target`` (English) and
``provenance`` (the package or file). Marks of access keys are removed. Strings with placeholders, markup or several lines,
copied strings and duplicates of either side are skipped. Each package has its own licence: check it before you publish the
output.
"""

from __future__ import annotations

import fnmatch
import gzip
import io
import re
import struct
import subprocess
import sys
import tarfile
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from gettext import GNUTranslations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from stored_results import reports_errors
from transformers import HfArgumentParser

from metaphrase.corpus import Cleaning
from metaphrase.exceptions import DataError, UsageError
from metaphrase.io.configuration import option
from metaphrase.io.files import replacing

#: Characters of placeholders, markup and paths.
UNUSUAL = re.compile(r"[%<>{}$\\|@=^`\t\n]|https?:|\.\.\.$|…$")
#: The mark of an access key, as in ``_Open``, ``&Open`` and ``~Open``, and the key in parentheses that other scripts append.
ACCESS_KEY = re.compile(r"[ ]?\([_&~]\w\)|[_&~](?=\w)")

#: Marks that are part of the text, as in ``R&D`` and ``first_name, last_name``: a message has at most one access key.
NO_KEY = re.compile(r"[A-Z0-9][_&~][A-Z0-9]|[_&~]\w.*[_&~]\w")


@dataclass
class Options:
    """Build a bitext from the message catalogues of free software."""

    language: str = option(help="Code of the language, as in the paths of catalogues.")
    output: str = option(help="File to write, gzip-compressed TSV.")
    packages: list[str] = option([], "Debian packages to download and read.")
    folder: str | None = option(None, "Folder with installed catalogues, such as /usr.")
    min_words: int = option(4, "Minimum number of words of either side.")
    max_words: int = option(60, "Maximum number of words of either side.")
    strip_accents: bool = option(
        False, "Remove accents from the language, for text that is often written without them."
    )


def downloaded(package: str, folder: str) -> Path:
    """Download a Debian package.

    Raises:
        UsageError: There is no such package.
    """
    run = subprocess.run(
        ["apt-get", "download", "-q", package], cwd=folder, capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise UsageError(f"apt-get download {package} failed: {run.stderr.strip() or run.stdout.strip()}")
    return next(Path(folder).glob(f"{package}_*.deb"))


def packaged_catalogues(package: Path, pattern: str) -> Iterator[bytes]:
    """Read the catalogues of a Debian package whose path matches a pattern.

    Raises:
        DataError: The package is damaged.
    """
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE) as process:
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                for member in archive:
                    if member.isfile() and fnmatch.fnmatch(member.name, pattern):
                        content = archive.extractfile(member)
                        yield content.read() if content else b""
        except tarfile.ReadError as error:
            raise DataError(f"{package.name} is damaged: {error}.") from error
        process.communicate()  # the padding at the end
    if process.returncode:
        raise DataError(f"{package.name} is damaged: dpkg-deb returned {process.returncode}.")


def catalogues(options: Options) -> Iterator[tuple[str, bytes]]:
    """Iterate over the provenance and content of all catalogues of the language."""
    pattern = f"*/{options.language}/LC_MESSAGES/*.mo"
    with TemporaryDirectory() as work:
        for package in options.packages:
            path = downloaded(package, work)
            yield from ((package, content) for content in packaged_catalogues(path, pattern))
            path.unlink()
    if options.folder:
        for path in sorted(Path(options.folder).rglob(pattern.removeprefix("*/"))):
            yield path.name, path.read_bytes()


class Catalogue(GNUTranslations):
    """The messages of a gettext catalogue."""

    def messages(self) -> Iterator[tuple[str, str]]:
        """Iterate over translations and originals, without those that have plural forms."""
        catalogue: dict[Any, str] = self._catalog  # type: ignore[attr-defined]
        for original, translation in catalogue.items():
            if isinstance(original, str) and original:
                yield translation, original.rpartition("\x04")[2]  # the context of a message stands before \x04


def tidied(text: str) -> str:
    """Remove marks of access keys and repeated spaces.

    >>> tidied("_Open  the file")
    'Open the file'
    """
    return " ".join(ACCESS_KEY.sub("", text).split())


def pairs(options: Options, found: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, str, str]]:
    """Iterate over clean pairs with their provenance; each side occurs once.

    Raises:
        DataError: A catalogue cannot be read.
    """
    cleaning = Cleaning(identical=True)
    seen: set[str] = set()
    for provenance, content in found:
        try:
            catalogue = Catalogue(io.BytesIO(content))
        except (OSError, ValueError, LookupError, struct.error) as error:
            raise DataError(f"A catalogue of {provenance} cannot be read: {error}.") from error
        for sides in catalogue.messages():
            if any(UNUSUAL.search(side) or NO_KEY.search(side) for side in sides):
                continue
            source, target = map(tidied, sides)
            lengths = len(source.split()), len(target.split())
            if min(lengths) < options.min_words or max(lengths) > min(options.max_words, 2 * min(lengths)):
                continue
            if cleaning.fault(source, target) or seen & {source.lower(), target.lower()}:
                continue
            seen |= {source.lower(), target.lower()}
            yield without_accents(source) if options.strip_accents else source, target, provenance


def without_accents(text: str) -> str:
    """Remove accents.

    >>> without_accents("Îmbină fișierele")
    'Imbina fisierele'
    """
    return "".join(one for one in unicodedata.normalize("NFD", text) if not unicodedata.combining(one))


@reports_errors
def main(argv: list[str]) -> int:
    """Write the bitext; return the exit status."""
    options = HfArgumentParser(Options).parse_args_into_dataclasses(argv)[0]
    rows = list(pairs(options, catalogues(options)))
    if not rows:
        raise UsageError(
            f"No catalogue of {options.language!r} has suitable strings. Name packages with translations with "
            "--packages, or a folder with installed programs with --folder."
        )
    lines = ["source\ttarget\tprovenance", *("\t".join(row) for row in rows), ""]
    with replacing(Path(options.output)) as partial:
        partial.write_bytes(gzip.compress("\n".join(lines).encode(), mtime=0))
    print(f"{len(rows):,} pairs in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
