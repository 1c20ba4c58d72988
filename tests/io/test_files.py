import errno
import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from metaphrase.exceptions import StorageError
from metaphrase.io.digests import files_sha256
from metaphrase.io.files import append_csv, as_os_errors, replace_text, replacing, write_json


def test_a_file_is_replaced_once_it_is_complete(tmp_path):
    path = tmp_path / "new" / "x.txt"
    with replacing(path) as partial:
        partial.write_text("whole", encoding="utf-8")
        assert not path.exists()
    assert path.read_text(encoding="utf-8") == "whole"
    assert replace_text(path, "other") == path
    assert [(file.name, file.read_text(encoding="utf-8")) for file in path.parent.iterdir()] == [("x.txt", "other")]


@pytest.mark.parametrize("unique", [False, True])
def test_a_failed_write_leaves_the_file(tmp_path, unique):
    path = replace_text(tmp_path / "x.txt", "whole")

    def fail():
        with replacing(path, unique=unique) as partial:
            partial.write_text("ha", encoding="utf-8")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert [file.name for file in tmp_path.iterdir()] == ["x.txt"]
    assert path.read_text(encoding="utf-8") == "whole"


def test_a_file_system_that_is_read_only_does_not_hide_the_first_error(tmp_path, monkeypatch):
    def read_only(self, missing_ok=False):
        raise OSError(errno.EROFS, "Read-only file system")

    def fail():
        with replacing(tmp_path / "x.txt"):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "unlink", read_only)
    with pytest.raises(StorageError, match=r"Cannot write \S+/x.txt: the disk is full"):
        fail()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a device of Linux")
def test_errors_of_tokenizers_about_files_are_os_errors():
    with pytest.raises(OSError, match="No space left on device"), as_os_errors():
        Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")).save("/dev/full")
    with pytest.raises(Exception, match="another") as caught, as_os_errors():
        raise Exception("another")
    assert not isinstance(caught.value, OSError)


def test_names_that_are_not_utf_8_can_be_written(tmp_path):
    facts = {"file": os.fsdecode(b"sw-\xff.tsv")}
    assert json.loads(write_json(tmp_path / "facts.json", facts).read_text(encoding="utf-8")) == facts


def test_rows_with_other_columns_are_in_a_file_of_their_own(tmp_path):
    rows = [{"steps": 1, "de": 0.5}, {"steps": 2, "de": 0.6}, {"steps": 1, "sw": 0.7}, {"steps": 3, "de": 0.8}]
    paths = [append_csv(tmp_path / "new" / "x.csv", row).name for row in rows]
    assert paths == ["x.csv", "x.csv", "x-2.csv", "x.csv"]
    assert (tmp_path / "new" / "x.csv").read_text().split() == ["steps,de", "1,0.5", "2,0.6", "3,0.8"]
    assert (tmp_path / "new" / "x-2.csv").read_text().split() == ["steps,sw", "1,0.7"]


def test_the_digest_of_files_tells_their_names_and_contents_apart_but_not_their_folder(tmp_path):
    paths = [tmp_path / folder / name for folder in "xy" for name in ("de-en.tsv", "sw-en.tsv")]
    for path, text in zip(paths, ("one", "other", "one", "other"), strict=True):
        replace_text(path, text)
    whole = files_sha256(paths[:2])
    assert files_sha256(paths[:2][::-1]) == files_sha256(paths[2:]) == whole
    paths[3].rename(paths[3].with_name("te-en.tsv"))
    assert files_sha256([paths[2], paths[3].with_name("te-en.tsv")]) != whole
    replace_text(paths[0], "another")
    assert files_sha256(paths[:2]) != whole
