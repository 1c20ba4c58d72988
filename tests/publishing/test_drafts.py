"""Drafts are written beside their destination, with what belongs to the model, and overwrite nothing."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import metadata_load
from sentence_transformers import SentenceTransformer

from metaphrase.exceptions import CheckpointError, HubError, ModelFileError, StorageError, UsageError
from metaphrase.publishing import drafts
from metaphrase.publishing.contents import release_files
from metaphrase.publishing.drafts import check_destination, drafted
from metaphrase.publishing.hub import push
from metaphrase.publishing.provenance import stated
from metaphrase.publishing.pulling import PullOptions, pull
from tests.faults.children import Child


def test_what_is_not_published_is_removed(tiny_encoder, tmp_path):
    with drafted(tiny_encoder, tmp_path / "out") as draft:
        assert tmp_path in draft.folder.parents
        assert not (tmp_path / "out").exists()
    with pytest.raises(RuntimeError, match="in between"), drafted(tiny_encoder, tmp_path / "out"):
        raise RuntimeError("in between")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk(tiny_encoder, tmp_path, monkeypatch):
    def full(folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(drafts, "write_manifest", full)
    with (
        pytest.raises(StorageError, match=r"Cannot write \S+/out: the disk is full. Free some space"),
        drafted(tiny_encoder, tmp_path / "out") as draft,
    ):
        draft.publish()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_by_the_next_export(tiny_encoder, tmp_path):
    def work() -> None:
        with drafted(tiny_encoder, tmp_path / "killed"):
            os.kill(os.getpid(), signal.SIGKILL)

    assert Child(work, tmp_path / "log" / "child.txt").wait() == -signal.SIGKILL
    (left,) = tmp_path.glob(".*")
    with drafted(tiny_encoder, tmp_path / "soon"):
        assert left.exists()  # it might be that of a process that has not locked it yet
    os.utime(left, (0, 0))
    with drafted(tiny_encoder, tmp_path / "one") as draft:
        assert not left.exists()
        with drafted(tiny_encoder, tmp_path / "two") as other:
            other.publish()
        draft.publish()  # it was in use, so it was kept
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "one", "two"]


def test_a_draft_that_fails_its_check_is_where_the_message_says(tiny_encoder, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_encoder, "max_seq_length", 500)
        with (
            pytest.raises(HubError, match="is 80, that of the model 500") as caught,
            drafted(tiny_encoder, tmp_path / "a"),
        ):
            pass
    kept = Path(str(caught.value).rpartition("are kept in ")[2].rstrip("."))
    assert (kept / "model.safetensors").is_file()
    os.utime(kept.parents[1], (0, 0))
    with drafted(tiny_encoder, tmp_path / "a"):
        assert not kept.exists()
    assert list(tmp_path.iterdir()) == []


LAUGHS = b"a0: &a0 [x]\n" + b"".join(b"a%d: &a%d [*a%d, *a%d]\n" % (i, i, i - 1, i - 1) for i in range(1, 30))


@pytest.mark.parametrize("content", [b"- a list\n", b"name: [\n", b"name: \xff\n", LAUGHS])
def test_a_file_that_is_no_recipe_stays_behind(content, tmp_path, caplog):
    (tmp_path / "recipe.yaml").write_bytes(content)
    assert drafts.stored_recipe(tmp_path) is None
    assert "recipe.yaml is not a recipe, so it is not copied" in caplog.text


def test_prompts_recipe_and_licence_go_along(tiny_encoder, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "recipe.yaml").write_text("name: dap\n")
    (source / "LICENSE").write_text("Be kind.\n")
    tiny_encoder.prompts, tiny_encoder.default_prompt_name = {"query": "the dog "}, "query"
    wanted = tiny_encoder.encode(["sleeps"])
    with drafted(tiny_encoder, tmp_path / "out", source=source) as draft:
        draft.publish("# A card\n")
    out = tmp_path / "out"
    assert (out / "recipe.yaml").read_text() == "name: dap\n"
    assert (out / "LICENSE").read_text() == "Be kind.\n"
    assert (out / "README.md").read_text() == "# A card\n"
    assert np.array_equal(SentenceTransformer(str(out), device="cpu").encode(["sleeps"]), wanted)


def test_the_release_of_a_language_is_copied(tiny_encoder, tmp_path):
    """It contains the vector of its language, which is no longer an embedding of its own."""
    (tmp_path / "sw").mkdir()
    (tmp_path / "sw" / "recipe.yaml").write_text("name: wacse-language\nlanguage_embedding: true\n")
    with drafted(tiny_encoder, tmp_path / "out", source=tmp_path / "sw") as draft:
        assert metadata_load(draft.folder / "README.md")["metaphrase"]["recipe"] == "wacse-language"


@pytest.mark.parametrize("name", ["LICENSE", "NOTICE.md", "recipe.yaml"])
def test_no_file_outside_of_the_models_folder_is_copied(tiny_encoder, tmp_path, name):
    (tmp_path / "source").mkdir()
    (tmp_path / "token").write_text("secret: yes\n")
    (tmp_path / "source" / name).symlink_to(tmp_path / "token")
    with (
        pytest.raises(ModelFileError, match=rf"{name} of .*source is a link to .*token, outside the model's folder"),
        drafted(tiny_encoder, tmp_path / "out", source=tmp_path / "source"),
    ):
        pass


def test_no_card_outside_of_the_models_folder_is_copied(tiny_bert_dir, tmp_path):
    source = shutil.copytree(tiny_bert_dir, tmp_path / "source")
    (tmp_path / "secret.md").write_text("---\nlicense: mit\n---\n")
    (source / "README.md").symlink_to(tmp_path / "secret.md")
    assert stated(str(source), "license") == []
    with pytest.raises(ModelFileError, match=r"README\.md of .*source is a link to .*secret\.md"):
        pull(PullOptions(str(source), str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_an_export_follows_the_umask(assert_follows_umask, tiny_encoder, tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "LICENSE").touch(0o400)
    with drafted(tiny_encoder, tmp_path / "out", source=tmp_path / "source") as draft:
        draft.publish("# A card\n")
    assert_follows_umask(tmp_path / "out")


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_an_export_can_be_pushed(tiny_encoder, tmp_path, online):
    with drafted(tiny_encoder, tmp_path / "out") as draft:
        draft.publish("---\nlicense: mit\n---\n\n# A card\n")
    push(tmp_path / "out", "acme/tiny")
    assert sorted(online.repositories["model", "acme/tiny"].resolve("main").tree) == release_files(tmp_path / "out")


def test_nothing_is_overwritten(tiny_encoder, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="exists"), drafted(tiny_encoder, tmp_path / "out"):
        pass
    with drafted(tiny_encoder, tmp_path / "late") as draft:
        (tmp_path / "late").mkdir()
        (tmp_path / "late" / "thesis.txt").write_text("mine")
        with pytest.raises(UsageError, match="exists"):
            draft.publish("")
    assert (tmp_path / "late" / "thesis.txt").read_text() == "mine"


def test_unusual_destinations(tiny_encoder, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "dangling").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path)
    for place in ("link", "dangling", "modèle", "x" * 250):
        with drafted(tiny_encoder, place) as draft:
            draft.publish()
        card = (tmp_path / place / "README.md").read_text(encoding="utf-8")
        assert f'SentenceTransformer("{place}")' in card
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UsageError, match="is the current folder"), drafted(tiny_encoder, "."):
        pass


def test_a_destination_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match=r"pipe exists\. Nothing is overwritten"):
        check_destination(tmp_path / "pipe")
    for place in (tmp_path / "file" / "out", tmp_path / "pipe" / "new" / "out", Path("/proc/out")):
        with pytest.raises(CheckpointError, match=f"The output folder {place.parent} is not writable"):
            check_destination(place)
    check_destination(tmp_path / "new" / "out")
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "empty")
    with pytest.raises(UsageError, match="empty is a mounted folder, which cannot be replaced"):
        check_destination(tmp_path / "empty")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "pipe"]
