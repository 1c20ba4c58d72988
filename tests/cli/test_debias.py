"""`metaphrase debias` writes a stock release without the directions of language identity."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from sentence_transformers import SentenceTransformer

from metaphrase.cli import main
from metaphrase.encoders.loading import load_encoder
from metaphrase.exceptions import UsageError
from metaphrase.merging import TaskVector
from metaphrase.postprocessing import debiasing
from metaphrase.postprocessing.debiasing import DebiasOptions, write_debiased
from metaphrase.publishing.release import verify


@pytest.fixture
def model(tiny_encoder, tmp_path):
    tiny_encoder.prompts, tiny_encoder.default_prompt_name = {"query": "frage: ", "document": ""}, "query"
    tiny_encoder.save_pretrained(str(tmp_path / "model"))
    return tmp_path / "model"


@pytest.fixture
def texts(tmp_path):
    """The same sentences in three languages and English."""
    lines = {
        "de": ["der Hund schläft", "die Frau liest die Zeitung"],
        "fr": ["le chien dort", "la femme lit le journal"],
        "sw": ["mbwa analala", "mwanamke anasoma gazeti"],
    }
    folder = tmp_path / "texts"
    folder.mkdir()
    for language, sources in lines.items():
        pairs = zip(sources, ["the dog sleeps", "a woman reads the newspaper"], strict=True)
        rows = ["source\ttarget", *("\t".join(pair) for pair in pairs)]
        (folder / f"{language}-en.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder


def test_a_release_without_language_directions_is_written(model, texts, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["debias", str(model), "--data", str(texts), "--directions", "3", "-o", str(out), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["directions"] == 3
    assert result["share"] == pytest.approx(1)
    assert (result["languages"], result["texts"], result["data"]) == (["de", "en", "fr", "sw"], 8, "texts")
    loaded = load_encoder(out, device="cpu")
    assert (loaded.prompts["query"], loaded.default_prompt_name) == ("frage: ", "query")
    assert verify(out) < 1e-5
    stock = SentenceTransformer(str(out), device="cpu")
    sentences = ["le chien dort", "mbwa analala"]
    np.testing.assert_allclose(stock.encode(sentences), loaded.encode(sentences), atol=1e-6)
    assert np.abs(stock.encode(sentences) - load_encoder(model, device="cpu").encode(sentences)).max() > 1e-4
    card = (out / "README.md").read_text(encoding="utf-8")
    facts = yaml.safe_load(REGEX_YAML_BLOCK.search(card)[2])["metaphrase"]["debias"]
    assert facts == {"directions": 3, "languages": 4, "data": "texts"}
    assert "the 3 directions in which the mean embeddings of 4 languages differ most" in card


def test_the_card_keeps_several_licences(model, texts, tmp_path):
    card = model / "README.md"
    card.write_text("---\nlicense: [mit, apache-2.0]\n---\n# A card\n", encoding="utf-8")
    write_debiased(DebiasOptions(str(model), str(tmp_path / "out"), 3, str(texts)))
    written = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert yaml.safe_load(REGEX_YAML_BLOCK.search(written)[2])["license"] == ["mit", "apache-2.0"]
    assert "- **Licence:** mit, apache-2.0" in written


@pytest.mark.parametrize("directions", [0, 4, 31])
def test_a_number_of_directions_out_of_range_is_refused(model, texts, tmp_path, capsys, directions):
    out = tmp_path / "out"
    arguments = ["debias", str(model), "--data", str(texts), "--directions", str(directions), "-o", str(out)]
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert "directions" in message
    assert f"is {directions}" in message
    assert "Traceback" not in message
    assert not out.exists()
    with pytest.raises(UsageError, match=f"is {directions}"):
        write_debiased(DebiasOptions(str(model), str(out), directions, str(texts)))


def test_nothing_is_overwritten(model, texts, tmp_path, capsys):
    before = {path: path.read_bytes() for path in model.rglob("*") if path.is_file()}
    arguments = ["debias", str(model), "--data", str(texts), "--directions", "2", "-o"]
    assert main([*arguments, str(model)]) == 2
    assert "Nothing is overwritten" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in model.rglob("*") if path.is_file()}


def test_none_is_no_prompt(model, texts, tmp_path):
    layers = []
    for out, prompt in (("default", []), ("none", ["--prompt", "none"]), ("other", ["--prompt", "frage: "])):
        words = ["debias", str(model), "--data", str(texts), "--directions", "2", "-o", str(tmp_path / out)]
        assert main([*words, *prompt]) == 0
        layers.append(load_encoder(tmp_path / out, device="cpu").encode(["le chien dort"], prompt=""))
    np.testing.assert_array_equal(layers[0], layers[1])
    assert np.abs(layers[0] - layers[2]).max() > 1e-4


def test_a_split_belongs_to_data(model, tmp_path, capsys):
    assert main(["debias", str(model), "--split", "dev", "-o", str(tmp_path / "out")]) == 2
    assert "--split is a split of --data" in capsys.readouterr().err


def test_a_folder_without_texts_is_refused(model, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["debias", str(model), "--data", str(tmp_path / "empty"), "-o", str(tmp_path / "out")]) == 2
    assert str(tmp_path / "empty") in capsys.readouterr().err


@pytest.fixture
def measured(tmp_path, bitext):
    """Folders of development pairs, and of STS pairs for a guard."""
    lines = ["source\ttarget", *(f"{row['source']}\t{row['target']}" for row in bitext)]
    pairs, similar = tmp_path / "pairs", tmp_path / "stsb"
    for folder in (pairs, similar):
        folder.mkdir()
    (pairs / "de-en.dev.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    texts = [row["source"] for row in bitext[:8]]
    rows = "".join(f'"{one}","{other}",{at}\n' for at, (one, other) in enumerate(itertools.pairwise(texts)))
    (similar / "stsb-de-dev.csv").write_text(rows, encoding="utf-8")
    return ["--dev", str(pairs), "--guard", str(similar)]


def test_the_number_of_directions_is_chosen(model, texts, measured, tmp_path, capsys, monkeypatch):
    """The choice itself depends on the encoder, so that both of its outcomes are forced."""
    arguments = ["debias", str(model), "--data", str(texts), "--directions", "auto", *measured, "--json", "-o"]
    for chosen in (2, 0):
        before = debiasing.choose_alpha

        def choose(*args, chosen=chosen, before=before, **kwargs):
            curve = before(*args, **kwargs)
            return replace(curve, alpha=chosen, gains=bool(chosen))

        monkeypatch.setattr(debiasing, "choose_alpha", choose)
        out = tmp_path / f"chosen-{chosen}"
        assert main([*arguments, str(out)]) == (0 if chosen else 1)
        monkeypatch.undo()
        result = json.loads(capsys.readouterr().out)
        assert result["directions"] == result["curve"]["directions"] == chosen
        assert [point["directions"] for point in result["curve"]["points"]] == [0, 1, 2, 3]
        assert result["curve"]["gain"] == "pairs"
        assert result["curve"]["points"][0]["gain"]["difference"] == 0
        assert all(point["guards"].keys() == {"stsb"} for point in result["curve"]["points"])
        assert result["output_dir"] == (str(out) if chosen else None)
        assert out.exists() == bool(chosen)
    card = (tmp_path / "chosen-2" / "README.md").read_text(encoding="utf-8")
    assert "2 directions were chosen. Gain and cost: 0 directions: pairs +0.0 " in card


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda measured: [], "needs data that show the gain and the loss"),
        (lambda measured: measured[:2], "needs data that show the gain and the loss"),
        (
            lambda measured: [*measured[:2], "--guard", measured[1]],
            "have the same name: similarity structure, pairs, pairs.",
        ),
        (lambda measured: ["--dev", measured[3], "--guard", measured[1]], "must be a folder of parallel sentences"),
        (lambda measured: [*measured, "--directions", "2"], "Pass them with --directions auto"),
        (lambda measured: ["--directions", "2", "--max_items", "5"], "--max_items is a setting of --directions auto"),
        (lambda measured: [*measured, "--max_items", "2"], "--max_items must be a whole number from 3 to"),
    ],
)
def test_a_choice_without_its_data_is_refused(model, texts, measured, tmp_path, capsys, change, message):
    out = tmp_path / "out"
    arguments = ["debias", str(model), "--data", str(texts), "--directions", "auto", "-o", str(out)]
    assert main([*arguments, *change(measured)]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_release_can_be_debiased_again(model, texts, tmp_path, dtype):
    """The directions that are removed later are orthogonal to the earlier ones, and the card counts both."""
    rounded = tmp_path / "rounded"
    load_encoder(model).to(dtype).save_pretrained(str(rounded))
    options = ["--data", str(texts), "--directions", "1"]
    assert main(["debias", str(rounded), *options, "-o", str(tmp_path / "once")]) == 0
    assert main(["debias", str(tmp_path / "once"), *options, "-o", str(tmp_path / "twice")]) == 0
    card = (tmp_path / "twice" / "README.md").read_text(encoding="utf-8")
    assert "projects out the 1 direction in which" in card
    assert "differ most, in addition to 1 that were projected out before, estimated on" in card
    vector = TaskVector.between(load_encoder(rounded), load_encoder(tmp_path / "twice"))
    assert len(vector.directions) == 2
