import json
import sys

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from metaphrase.cli import main


@pytest.fixture
def data(bitext, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    lines = ["source\ttarget", *(f"{row['source']}\t{row['target']}" for row in bitext[:12])]
    (folder / "de-en.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def command(tiny_encoder_dir, data, tmp_path):
    return [
        "export",
        str(tiny_encoder_dir),
        "--data",
        str(data),
        "--output_dir",
        str(tmp_path / "out"),
        "--resamples",
        "50",
    ]


def test_a_trimmed_encoder_is_measured_written_and_loads(command, data, tmp_path, capsys, bitext):
    assert main([*command, "--corpus", str(data / "de-en.tsv"), "--layers", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["written"] is True
    assert result["lost"] == []
    assert set(result["languages"]) == {"de"}
    assert result["sizes"]["pieces"]["after"] < result["sizes"]["pieces"]["before"]
    assert result["sizes"]["layers"] == {"before": 2, "after": 1}
    assert result["sizes"]["parameters"]["after"] < result["sizes"]["parameters"]["before"]
    assert err.index("MB on disk") < err.index("Wrote")  # the cost is said first
    model = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert len(model.tokenizer) == result["sizes"]["pieces"]["after"]
    assert np.isfinite(model.encode([bitext[0]["source"]])).all()
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "layers 1 of 2 kept" in card
    assert "| de | 12 |" in card


def test_a_loss_that_is_too_large_is_not_written(command, tmp_path, capsys, monkeypatch):
    from metaphrase.cli import export

    def lost(before, after, **_):
        row = {
            "n": 12,
            "before": 90.0,
            "after": 80.0,
            "difference": -10.0,
            "interval": [-14.0, -6.0],
            "verdict": "worse",
        }
        return {"languages": {"de": row}, "pooled": row, "settings": {}}

    monkeypatch.setattr(export, "compare_retrieval", lost)
    assert main([*command, "--layers", "1", "--max_loss", "5"]) == 1
    assert "de lost significantly more than 5 points" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "data") == []
    assert main([*command, "--layers", "1", "--max_loss", "7"]) == 0  # the interval does not exclude 7
    assert (tmp_path / "out" / "modules.json").is_file()


def test_the_models_own_card_is_kept(command, tmp_path, tiny_encoder_dir):
    import shutil

    source = shutil.copytree(tiny_encoder_dir, tmp_path / "source")
    (source / "README.md").write_text("---\nlicense: mit\n---\n\n# My model\n\nIts own words.\n")
    command[1] = str(source)
    assert main([*command, "--keep_layers", "0", "--quiet"]) == 0
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlicense: mit\n---\n")
    assert card.index("# My model") < card.index("## Exported") < card.index("Its own words.")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "Nothing is to be changed"),
        (["--layers", "1", "--keep_layers", "0"], "not both"),
        (["--layers", "0"], "at least 1"),
        (["--layers", "3"], "the encoder has 2"),
        (["--keep_layers", "4"], "no layer 4"),
        (["--quantize", "int8"], "for --format onnx or openvino"),
        (["--format", "openvino", "--quantize", "avx2"], "openvino has int8"),
        (["--languages", "de"], "No text of de comes with the package"),
        (["--format", "onnx"], "pip install 'sentence-transformers[onnx]'"),
    ],
)
def test_what_cannot_be_done_is_said(options, message, command, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optimum.onnxruntime", None)
    assert main([*command, *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_there_is_not_overwritten(command, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    assert main([*command, "--layers", "1"]) == 2
    assert "Nothing is overwritten" in capsys.readouterr().err


def test_a_language_without_test_set_is_named(command, capsys, data):
    del command[2:4]
    assert main([*command, "--languages", "tlh", "--texts", str(data / "de-en.tsv")]) == 2
    assert "No test set of tlh comes with the package" in capsys.readouterr().err
