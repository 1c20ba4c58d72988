"""Exports are written beside their destination, with what belongs to the model, and overwrite nothing."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import metadata_load
from sentence_transformers import SentenceTransformer

import metaphrase.encoders.starter
from metaphrase.encoders.loading import load_encoder
from metaphrase.encoders.names import find_folder
from metaphrase.exceptions import CheckpointError, HubError, ModelFileError, UsageError
from metaphrase.publishing import drafts, exporting, provenance
from metaphrase.publishing.contents import release_files
from metaphrase.publishing.drafts import check_destination, drafted
from metaphrase.publishing.exporting import ExportOptions, prepare_export
from metaphrase.publishing.hub import push
from metaphrase.publishing.provenance import stated
from metaphrase.publishing.pulling import PullOptions, pull
from tests.conftest import BITEXT
from tests.faults.children import Child


def test_the_page_can_be_pasted(tiny_encoder_dir, tmp_path, monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "exporting.md"
    *_, block = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.setattr(metaphrase.encoders.starter, "starter_path", lambda: tiny_encoder_dir)
    monkeypatch.chdir(tmp_path)
    exec(block, {})
    assert (tmp_path / "out" / "tiny" / "README.md").read_text() == "# Tiny\n"


def test_what_is_not_published_is_removed(tiny_encoder, tmp_path):
    with drafted(tiny_encoder, tmp_path / "out") as draft:
        assert tmp_path in draft.folder.parents
        assert not (tmp_path / "out").exists()
    with pytest.raises(RuntimeError, match="in between"), drafted(tiny_encoder, tmp_path / "out"):
        raise RuntimeError("in between")
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


@pytest.fixture
def data(bitext, tmp_path) -> Path:
    lines = ["source\ttarget", *(f"{row['source']}\t{row['target']}" for row in bitext[:12])]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "de-en.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path / "data"


def test_an_export_is_measured_before_it_is_published(tiny_encoder_dir, data, tmp_path):
    options = ExportOptions(
        str(tiny_encoder_dir), str(tmp_path / "out"), keep_layers=[1], data=str(data), resamples=50
    )
    with prepare_export(options) as made:
        assert made.changes == ["layers 1 of 2 kept"]
        assert made.sizes["layers"] == {"before": 2, "after": 1}
        assert made.comparison["languages"].keys() == {"de"}
        assert not (tmp_path / "out").exists()
        made.publish("a command")
    assert SentenceTransformer(str(tmp_path / "out"), device="cpu")[0].auto_model.config.num_hidden_layers == 1
    with prepare_export(ExportOptions(**{**vars(options), "output_dir": str(tmp_path / "no")})):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "out"]


def test_results_on_two_packaged_sets_keep_their_names():
    from metaphrase.publishing.exporting import result_rows

    row = {"n": 9, "before": 70.0, "after": 60.0}
    comparison = {"languages": {"sw": row, "de": row}, "pooled": row}
    rows = [(found["data"], found["language"]) for found in result_rows(comparison, {"sw": "demo", "de": "udhr"})]
    assert rows == [("demo", "sw"), ("udhr", "de")]
    rows = [(found["data"], found["language"]) for found in result_rows(comparison, {"sw": "demo", "de": "demo"})]
    assert rows == [("demo", "sw"), ("demo", "de"), ("demo", "all")]


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


@pytest.mark.parametrize("kept", [{"languages": ["en"]}, {"texts": [str(BITEXT)]}])
def test_a_vocabulary_is_not_measured_on_languages_that_it_drops(tiny_encoder_dir, tmp_path, kept):
    options = ExportOptions(str(tiny_encoder_dir), str(tmp_path / "out"), **kept)
    with pytest.raises(UsageError, match="without a language other than English"), prepare_export(options):
        pass


def test_an_installed_model_is_no_base_on_the_hub(tiny_encoder_dir, data, tmp_path, monkeypatch):
    folders = {"my-model": tiny_encoder_dir}
    monkeypatch.setattr(exporting, "load_encoder", lambda name, **_: load_encoder(folders.get(name, name)))
    for module in (drafts, exporting, provenance):
        monkeypatch.setattr(module, "find_folder", lambda name: find_folder(folders.get(name, name)))
    options = ExportOptions("my-model", str(tmp_path / "out"), keep_layers=[0], data=str(data), resamples=50)
    with prepare_export(options) as made:
        made.publish("a command")
    assert "base_model" not in metadata_load(tmp_path / "out" / "README.md")
