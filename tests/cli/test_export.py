import copy
import hashlib
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import yaml
from huggingface_hub import ModelCard
from sentence_transformers import SentenceTransformer

import metaphrase.encoders.starter
from metaphrase.cli import main
from metaphrase.encoders.loading import load_encoder
from metaphrase.merging import TaskVector
from metaphrase.postprocessing import exporting
from tests.hub_server import reach, serve_hub


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


@pytest.mark.long
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
    for shown in (err, card):  # 12 pairs
        assert ("too few to tell" in " ".join(shown.split())) == (result["languages"]["de"]["verdict"] == "tie")
    assert "1 of 2 layers kept (1)" in card
    assert "| de | 12 |" in card


def test_a_loss_that_is_too_large_is_not_written(command, tmp_path, capsys, monkeypatch):
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

    monkeypatch.setattr(exporting, "compare", lost)
    assert main([*command, "--layers", "1", "--max_loss", "5"]) == 1
    assert "de lost significantly more than 5 points" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "data") == []
    assert main([*command, "--layers", "1", "--max_loss", "7"]) == 0  # the interval does not exclude 7
    assert (tmp_path / "out" / "modules.json").is_file()


OWN_CARD = """---
# For the metadata, see the documentation.
language:
- de
- no
- en
license: cc-by-4.0
tags:
- dap
datasets:
- me/pairs
metrics:
- accuracy
- f1
base_model: acme/base
base_model_relation: finetune
model-index:
- name: the model before
  results:
  - task: {type: retrieval}
    dataset: {name: held-out, type: held-out, config: de}
    metrics: [{type: accuracy, value: 99.99}]
metaphrase:
  recipe: dap
  command: metaphrase train --seed 3
  seed: 3
  weights: {model.safetensors: 0123abcd}
---

# My model

Its own words.
"""


@pytest.fixture
def source(command, tmp_path, tiny_encoder_dir):
    """A model with a card, which is exported."""
    folder = shutil.copytree(tiny_encoder_dir, tmp_path / "source")
    (folder / "README.md").write_text(OWN_CARD, encoding="utf-8")
    command[1] = str(folder)
    return folder


def files_of(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def card_of(folder) -> tuple[dict, str]:
    """Metadata and text; the Hub's own reader takes them, too."""
    content = (folder / "README.md").read_text(encoding="utf-8")
    assert ModelCard(content).data.eval_results
    head, text = content.removeprefix("---\n").split("\n---\n")
    return yaml.safe_load(head), text


def scores(metadata: dict) -> dict[str, float]:
    (model,) = metadata["model-index"]
    return {row["dataset"]["config"]: row["metrics"][0]["value"] for row in model["results"]}


def test_the_models_own_card_is_kept(command, source, tmp_path):
    assert main([*command, "--keep_layers", "0", "--quiet"]) == 0
    metadata, text = card_of(tmp_path / "out")
    assert text.index("# My model") < text.index("## Exported") < text.index("Its own words.")
    assert "For the metadata" not in text
    kept = {"language": ["de", "no", "en"], "license": "cc-by-4.0", "datasets": ["me/pairs"]}
    kept |= {"base_model": "acme/base", "base_model_relation": "finetune"}
    assert {key: metadata[key] for key in kept} == kept
    assert metadata["tags"] == ["dap", "sentence-transformers", "metaphrase"]


def test_the_card_has_the_scores_and_facts_of_what_was_written(command, source, tmp_path, capsys):
    assert main([*command, "--keep_layers", "0", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    metadata, _ = card_of(tmp_path / "out")
    after = {"de": result["languages"]["de"]["after"], "all": result["pooled"]["after"]}
    assert scores(metadata) == pytest.approx(after, abs=0.005)
    assert metadata["model-index"][0]["name"] == "out"
    assert {row["dataset"]["name"] for row in metadata["model-index"][0]["results"]} == {"data"}
    assert metadata["metrics"] == ["accuracy"]
    facts = metadata["metaphrase"]
    digest = hashlib.sha256((tmp_path / "out" / "model.safetensors").read_bytes()).hexdigest()
    assert facts["weights"] == {"model.safetensors": digest}
    assert facts["command"].startswith("metaphrase export ")
    assert facts["command"].endswith("--keep_layers 0 --json")
    assert "seed" not in facts
    assert facts["source"] == yaml.safe_load(OWN_CARD.split("---\n")[1])["metaphrase"]


@pytest.mark.slow
def test_a_trimmed_model_names_the_languages_that_are_left(command, source, data, tmp_path):
    card = OWN_CARD.replace("license:", "language_bcp47: [de-CH]\nlicense:")
    (source / "README.md").write_text(card, encoding="utf-8")
    assert main([*command, "--corpus", str(data / "de-en.tsv"), "--quiet"]) == 0
    metadata, _ = card_of(tmp_path / "out")
    assert (metadata["language"], "language_bcp47" in metadata) == (["de", "en"], False)
    command[5] = str(tmp_path / "texts")
    assert main([*command, "--texts", str(data / "de-en.tsv"), "--quiet"]) == 0
    assert "language" not in card_of(tmp_path / "texts")[0]  # nobody said of which the text is


def test_the_starter_is_the_base_of_what_is_made_from_it(command, source, tmp_path, monkeypatch):
    monkeypatch.setattr(metaphrase.encoders.starter, "starter_path", lambda: source)
    command[1] = "starter"
    assert main([*command, "--keep_layers", "0", "--quiet"]) == 0
    metadata, _ = card_of(tmp_path / "out")
    assert metadata["base_model"] == "intfloat/multilingual-e5-small"
    assert "base_model_relation" not in metadata  # the Hub has no word for it
    assert metadata["license"] == "mit"
    assert 99.99 not in scores(metadata).values()


@pytest.mark.parametrize(("at", "languages"), [("", ["de", "no", "en"]), ("@main", ["no"])])
def test_a_model_of_the_hub_is_the_base_and_gives_its_licence(command, source, tmp_path, monkeypatch, at, languages):
    with serve_hub() as hub:
        files = files_of(source)
        licence = b"license: other\nlicense_name: theirs\n"
        files["README.md"] = OWN_CARD.encode().replace(b"license: cc-by-4.0\n", licence)
        if len(languages) == 1:
            files["README.md"] = files["README.md"].replace(b"language:\n- de\n- no\n- en\n", b"language: no\n")
        commit = hub.put("acme/tiny", files)
        reach(hub, monkeypatch.setattr, tmp_path / "client")
        command[1] = f"acme/tiny{at}"
        assert main([*command, "--keep_layers", "0", "--quiet"]) == 0
    metadata, text = card_of(tmp_path / "out")
    assert (metadata["license"], metadata["license_name"]) == ("other", "theirs")
    assert metadata["base_model"] == "acme/tiny"
    assert metadata["metaphrase"]["base_model_revision"] == commit
    assert metadata["language"] == languages
    assert not {"datasets", "base_model_relation"} & metadata.keys()
    assert metadata["metaphrase"]["source"] == yaml.safe_load(OWN_CARD.split("---\n")[1])["metaphrase"]
    assert "Its own words." not in text


def test_a_model_of_the_hub_may_have_no_card(command, source, tmp_path, monkeypatch):
    with serve_hub() as hub:
        (source / "README.md").unlink()
        hub.put("acme/tiny", files_of(source))
        reach(hub, monkeypatch.setattr, tmp_path / "client")
        command[1] = "acme/tiny"
        assert main([*command, "--keep_layers", "0", "--quiet"]) == 0
    metadata, _ = card_of(tmp_path / "out")
    assert metadata["base_model"] == "acme/tiny"
    assert "license" not in metadata


VECTOR_CARD = """---
license: cc-by-4.0
language: [sw]
base_model: acme/tiny
library_name: metaphrase
tags: [metaphrase, task-vector]
---

# A task vector
"""


def vector_of(base, base_name) -> TaskVector:
    model = load_encoder(base, device="cpu")
    changed = copy.deepcopy(model)
    changed[0].auto_model.encoder.layer[0].output.dense.weight.data += 0.01
    return TaskVector.between(model, changed, base_name=base_name)


def test_a_vector_of_the_hub_is_the_base_and_gives_its_licence(command, source, tmp_path, monkeypatch):
    with serve_hub() as hub:
        commit = hub.put("acme/tiny", files_of(source))
        (tmp_path / "vector").mkdir()
        vector_of(source, f"acme/tiny@{commit}").save(tmp_path / "vector" / "task_vector.safetensors")
        (tmp_path / "vector" / "README.md").write_text(VECTOR_CARD, encoding="utf-8")
        of_vector = hub.put("acme/vector", files_of(tmp_path / "vector"))
        reach(hub, monkeypatch.setattr, tmp_path / "client")
        command[1] = "acme/vector"
        assert main([*command, "--keep_layers", "0", "--quiet"]) == 0
    metadata, _ = card_of(tmp_path / "out")
    assert (metadata["license"], metadata["language"]) == ("cc-by-4.0", ["sw"])
    assert (metadata["base_model"], metadata["metaphrase"]["base_model_revision"]) == ("acme/vector", of_vector)


def test_the_card_of_a_vector_does_not_describe_the_export(command, source, tmp_path):
    command[1] = str(tmp_path / "vector")
    (tmp_path / "vector").mkdir()
    vector_of(source, str(source)).save(tmp_path / "vector" / "task_vector.safetensors")
    (tmp_path / "vector" / "README.md").write_text(VECTOR_CARD, encoding="utf-8")
    assert main([*command, "--keep_layers", "0", "--quiet"]) == 0
    metadata, text = card_of(tmp_path / "out")
    assert (metadata["license"], metadata["language"], metadata["base_model"]) == ("cc-by-4.0", ["sw"], "acme/tiny")
    assert metadata["library_name"] == "sentence-transformers"
    assert "task-vector" not in metadata["tags"]
    assert "A task vector" not in text
    assert "Made with `metaphrase export` from vector, without" in text


def test_the_licence_the_notices_and_the_record_of_a_vector_without_a_card_are_kept(command, source, tmp_path):
    vector = tmp_path / "vector"
    vector.mkdir()
    card = "---\nmetaphrase: {runs: [{seed: 7}, {seed: 8}]}\n---\n"
    replace(vector_of(source, str(source)), license="cc-by-4.0", card=card).save(vector / "task_vector.safetensors")
    (vector / "NOTICE.md").write_text("Thanks to A.\n", encoding="utf-8")
    for number, name in enumerate((str(vector), f"{source} + {vector}")):
        command[1], command[-3] = name, str(tmp_path / f"out-{number}")
        assert main([*command, "--keep_layers", "0", "--quiet"]) == 0
        metadata, _ = card_of(tmp_path / f"out-{number}")
        assert "cc-by-4.0" in metadata["license"]
        assert metadata["metaphrase"]["source"]["runs"] == [{"seed": 7}, {"seed": 8}]
        assert "Thanks to A." in (tmp_path / f"out-{number}" / "NOTICE.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("head", ["license: [mit", "- license"])
def test_metadata_that_cannot_be_read_are_told(command, source, tmp_path, caplog, head):
    (source / "README.md").write_text(f"---\n{head}\n---\n\n# My model\n\nIts own words.\n", encoding="utf-8")
    assert main([*command, "--keep_layers", "0"]) == 0
    assert "cannot be read. Add the licence to the new card." in caplog.text
    metadata, text = card_of(tmp_path / "out")
    assert "license" not in metadata
    assert "Its own words." in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "No change is requested"),
        (["--layers", "1", "--keep_layers", "0"], "not both"),
        (["--layers", "0"], "--layers must be a whole number from 1 to 128, but is 0."),
        (["--layers", "3"], "the encoder has 2"),
        (["--keep_layers", "4"], "Unknown layer 4"),
        (["--languages", "de"], "The package has no text of de"),
        (["--languages", ""], "--languages names no language"),
        (["--layers", "1", "--split", "dev"], "--split is a split of --data"),
        (["--format", "onnx"], "Unknown option --format"),
    ],
)
def test_what_cannot_be_done_is_said(options, message, command, tmp_path, capsys):
    if "--split" in options:
        del command[2:4]  # --data
    assert main([*command, *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_there_is_not_overwritten(command, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    assert main([*command, "--layers", "1"]) == 2
    assert "Nothing is overwritten" in capsys.readouterr().err


@pytest.mark.long
def test_a_language_without_test_set_is_named(command, capsys, data):
    del command[2:4]
    assert main([*command, "--languages", "tlh", "--texts", str(data / "de-en.tsv")]) == 2
    assert "The package has no test set of tlh" in capsys.readouterr().err
