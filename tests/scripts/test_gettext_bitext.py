import gzip
import shutil
import struct
from pathlib import Path

import pytest

from metaphrase.exceptions import DataError


def catalogue(messages: dict[str, str]) -> bytes:
    """A gettext catalogue in its binary form: a header, two tables of lengths and offsets, and the strings."""
    header = {"": "Content-Type: text/plain; charset=UTF-8\n"}
    pairs = [(a.encode(), b.encode()) for a, b in sorted((header | messages).items())]
    tables, strings = [b"", b""], b""
    for side in (0, 1):
        for pair in pairs:
            tables[side] += struct.pack("<II", len(pair[side]), 28 + 16 * len(pairs) + len(strings))
            strings += pair[side] + b"\0"
    numbers = (0x950412DE, 0, len(pairs), 28, 28 + 8 * len(pairs), 0, 0)
    return struct.pack("<7I", *numbers) + b"".join(tables) + strings


@pytest.fixture
def installed(tmp_path) -> Path:
    """A folder with a catalogue in Romanian, and one in another language."""
    messages = {
        "_Open this file again": "_Deschide din nou acest fișier",
        "menu\x04Close the window without saving": "Închide fereastra fără salvare",
        "Open this file again": "Deschide iar acest fișier",  # the same English string without its access key
        "Delete %s from this folder": "Șterge %s din acest dosar",
        "Files of the year 2001": "Files of the year 2001",
        "one file was\0many files were": "un fișier\0multe fișiere",
        "Save it": "Salvează",
        "The office of R&D is open": "Biroul de cercetare este deschis",
        "Add the path to ld_library_path": "Adaugă o cale la ld_library_path",
        "This one has no translation": "Da, da, da, da, da, da, da, da, da, da, da, da",
    }
    for language in ("ro", "de"):
        folder = tmp_path / "usr" / "share" / "locale" / language / "LC_MESSAGES"
        folder.mkdir(parents=True)
        (folder / "files.mo").write_bytes(catalogue(messages if language == "ro" else {"a b c d": "e f g h"}))
    return tmp_path / "usr"


def rows(path: Path) -> list[list[str]]:
    return [line.split("\t") for line in gzip.decompress(path.read_bytes()).decode().splitlines()]


def test_clean_strings_become_pairs_with_their_provenance(script, installed, tmp_path, capsys):
    output = tmp_path / "ro-en.tsv.gz"
    assert script.main(["--language", "ro", "--folder", str(installed), "--output", str(output)]) == 0
    assert rows(output) == [
        ["source", "target", "provenance"],
        ["Deschide iar acest fișier", "Open this file again", "files.mo"],
        ["Închide fereastra fără salvare", "Close the window without saving", "files.mo"],
    ]
    assert capsys.readouterr().out.startswith("2 pairs in")


def test_accents_can_be_removed(script, installed, tmp_path):
    output = tmp_path / "ro-en.tsv.gz"
    script.main(["--language", "ro", "--folder", str(installed), "--output", str(output), "--strip_accents"])
    assert rows(output)[2][:2] == ["Inchide fereastra fara salvare", "Close the window without saving"]


def test_packages_are_read_without_being_installed(script, installed, tmp_path, monkeypatch):
    def download(package: str, folder: str) -> Path:
        (Path(folder) / "files-l10n_1_all.deb").touch()
        return Path(folder) / "files-l10n_1_all.deb"

    content = (installed / "share/locale/ro/LC_MESSAGES/files.mo").read_bytes()
    monkeypatch.setattr(script, "downloaded", download)
    monkeypatch.setattr(script, "packaged_catalogues", lambda path, pattern: [content] if path.is_file() else [])
    output = tmp_path / "ro-en.tsv.gz"
    assert script.main(["--language", "ro", "--packages", "files-l10n", "--output", str(output)]) == 0
    assert {row[2] for row in rows(output)[1:]} == {"files-l10n"}


@pytest.mark.parametrize(
    ("text", "tidy"), [("&Open it", "Open it"), ("打开(_O)", "打开"), ("a  b ", "a b"), ("A & B", "A & B")]
)
def test_marks_of_access_keys_are_removed(script, text, tidy):
    assert script.tidied(text) == tidy


@pytest.mark.parametrize("language", ["xx", "r[o"])
def test_a_language_without_strings_is_refused(script, installed, tmp_path, capsys, language):
    output = tmp_path / "out.tsv.gz"
    assert script.main(["--language", language, "--folder", str(installed), "--output", str(output)]) == 2
    assert "has suitable strings" in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="needs dpkg-deb")
def test_a_damaged_package_is_an_error_with_its_name(script, tmp_path):
    (tmp_path / "files_1_all.deb").write_bytes(b"no package at all")
    with pytest.raises(DataError, match=r"files_1_all\.deb is damaged"):
        list(script.packaged_catalogues(tmp_path / "files_1_all.deb", "*"))


def test_a_damaged_catalogue_is_an_error_with_its_name(script, installed, tmp_path, capsys):
    (installed / "share/locale/ro/LC_MESSAGES/a.mo").write_bytes(b"no catalogue at all")
    assert script.main(["--language", "ro", "--folder", str(installed), "--output", str(tmp_path / "x.gz")]) == 2
    assert "a.mo" in capsys.readouterr().err
