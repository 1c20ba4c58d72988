"""Exports are measured before they are published."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from huggingface_hub import metadata_load
from sentence_transformers import SentenceTransformer

import metaphrase.encoders.starter
from metaphrase.encoders.loading import load_encoder
from metaphrase.encoders.names import find_folder
from metaphrase.exceptions import UsageError
from metaphrase.postprocessing import exporting
from metaphrase.postprocessing.exporting import ExportOptions, prepare_export
from metaphrase.publishing import drafts, provenance
from tests.conftest import BITEXT


def test_the_page_can_be_pasted(tiny_encoder_dir, tmp_path, monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "exporting.md"
    *_, block = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.setattr(metaphrase.encoders.starter, "starter_path", lambda: tiny_encoder_dir)
    monkeypatch.chdir(tmp_path)
    exec(block, {})
    assert (tmp_path / "out" / "tiny" / "README.md").read_text() == "# Tiny\n"


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
        assert made.changes == ["1 of 2 layers kept (1)"]
        assert made.sizes["layers"] == {"before": 2, "after": 1}
        assert made.comparison["languages"].keys() == {"de"}
        assert not (tmp_path / "out").exists()
        made.publish("a command")
    assert SentenceTransformer(str(tmp_path / "out"), device="cpu")[0].auto_model.config.num_hidden_layers == 1
    with prepare_export(ExportOptions(**{**vars(options), "output_dir": str(tmp_path / "no")})):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "out"]


def test_results_on_two_packaged_sets_keep_their_names():
    from metaphrase.postprocessing.exporting import result_rows

    row = {"n": 9, "before": 70.0, "after": 60.0}
    comparison = {"languages": {"sw": row, "de": row}, "pooled": row}
    rows = [(found["data"], found["language"]) for found in result_rows(comparison, {"sw": "demo", "de": "udhr"})]
    assert rows == [("demo", "sw"), ("udhr", "de")]
    rows = [(found["data"], found["language"]) for found in result_rows(comparison, {"sw": "demo", "de": "demo"})]
    assert rows == [("demo", "sw"), ("demo", "de"), ("demo", "all")]


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
