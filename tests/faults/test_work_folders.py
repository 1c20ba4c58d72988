"""Commands that keep unfinished work in a folder, killed at any of their changes to files."""

from __future__ import annotations

import signal
import sys

import pytest

from metaphrase.cli import main
from metaphrase.exceptions import DataError, DataMismatchError
from metaphrase.io.work_folders import open_work_folder
from metaphrase.mining import workflow
from tests.cli.test_mine import counting, embedder
from tests.faults.children import Child, die_before

MANIFEST = {"inputs": ["x"], "k": 4}


@pytest.fixture
def arguments(request, tiny_encoder, bitext, tmp_path, monkeypatch):
    """Of a command that is over in a moment, without the place of its output."""
    monkeypatch.setattr(workflow, "draw_histogram", lambda *args: [])
    texts = [tmp_path / "news.de", tmp_path / "news.en"]
    for path, side in zip(texts, ("source", "target"), strict=True):
        path.write_text("".join(f"{row[side]}\n" for row in bitext[:8]), encoding="utf-8")
    if request.param == "mine":
        counting(tiny_encoder, embedder(bitext), monkeypatch)
        return ["mine", *map(str, texts), "--shard_size", "4", "--k", "2"]
    pairs = tmp_path / "de-en.tsv"
    pairs.write_text("".join(f"{row['source']}\t{row['target']}\n" for row in bitext[:8]), encoding="utf-8")
    return ["align", str(pairs), "--iterations", "1"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "step"),
    [
        pytest.param("mine", 30, id="mine"),
        pytest.param("align", 30, id="align"),
        pytest.param("mine", 1, id="mine-all", marks=pytest.mark.slow),
        pytest.param("align", 1, id="align-all", marks=pytest.mark.slow),
    ],
    indirect=["arguments"],
)
def test_a_command_killed_anywhere_goes_on_to_the_same_file(arguments, step, tmp_path, monkeypatch, fault):
    """At the first changes, at every ``step``-th, and at all of those that clear the work folder away."""

    def run(folder, operation=0):
        def work():
            folder.mkdir(exist_ok=True)
            count = die_before(operation, folder) if operation >= 0 else lambda: 0
            status = main([*arguments, "-o", str(folder / "out.tsv")])
            (tmp_path / "count").write_text(str(count()))
            sys.exit(status)

        child = Child(work, tmp_path / f"{folder.name}.log")
        return child.wait(), child

    status, child = run(tmp_path / "whole")
    assert status == 0, child.said()
    whole, total = (tmp_path / "whole" / "out.tsv").read_text(), int((tmp_path / "count").read_text())
    assert total > 10
    chosen = sorted({1, 2, 3, *range(step, total, step), *range(total - 4, total + 1)})
    survived = 0
    for operation in chosen:
        folder = tmp_path / f"killed-{operation}"
        status, child = run(folder, operation)
        assert status == -signal.SIGKILL, child.said()
        status, child = run(folder, -1)
        same = status == 0 and (folder / "out.tsv").read_text() == whole and not list(folder.glob("out.tsv.partial*"))
        survived += same
        assert same, f"{operation} of {total}: {child.said()}"
    what = "every write" if step == 1 else "some writes"
    fault("I1", f"kill -9 at {what} of {arguments[0]}", tried=len(chosen), survived=survived)


def test_a_manifest_that_was_not_finished_is_not_in_the_way(tmp_path):
    folder = tmp_path / "out.partial"
    folder.mkdir()
    (folder / ".manifest.json.123.part").write_text('{"inputs": [')
    assert open_work_folder(folder, MANIFEST) == folder
    assert open_work_folder(folder, MANIFEST) == folder
    other = tmp_path / "mine"
    other.mkdir()
    (other / "novel.part").write_text("Chapter 1")
    with pytest.raises(DataMismatchError, match="mine is needed for unfinished work, but something else"):
        open_work_folder(other, MANIFEST)


@pytest.mark.parametrize("content", [b"", b'{"inputs": [', b"[1]", b"null", b"\xff\xfe"])
def test_a_damaged_manifest_is_refused_in_words(tmp_path, content, fault):
    open_work_folder(tmp_path / "out.partial", MANIFEST)
    (tmp_path / "out.partial" / "manifest.json").write_bytes(content)
    with pytest.raises(DataError, match=r"manifest\.json is damaged \(.*Delete .*out\.partial to start over"):
        open_work_folder(tmp_path / "out.partial", MANIFEST)
    fault("I1", "a damaged manifest of unfinished work", tried=1, survived=1)
