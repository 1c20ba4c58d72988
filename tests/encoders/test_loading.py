import json
import time
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import BertModel, PhobertTokenizer, SqueezeBertConfig, SqueezeBertModel

from metaphrase.cli import main
from metaphrase.encoders.loading import (
    freeze_word_embeddings,
    load_encoder,
    origin_of,
    pretrained_mlm_head,
    used_piece_ids,
)
from metaphrase.encoders.names import model_folder
from metaphrase.exceptions import (
    HubAccessError,
    HubConnectionError,
    HubMissingError,
    MetaphraseError,
    ModelFileError,
    UsageError,
)
from tests.hub_server import reach, serve_hub


def pooling_of(model):
    return next(module.pooling_mode for module in model if isinstance(module, Pooling))


def test_a_raw_encoder_gets_the_recipes_pooling(tiny_bert_dir):
    assert pooling_of(load_encoder(tiny_bert_dir)) == "mean"
    assert pooling_of(load_encoder(tiny_bert_dir, default_pooling="cls")) == "cls"


@pytest.mark.parametrize("options", [{"pooling": "middle"}, {"device": "abacus"}])
def test_a_wrong_option_is_not_called_damage(tiny_encoder_dir, options):
    with pytest.raises(
        UsageError, match=r"'pooling' of load_encoder must be|The device abacus cannot be used: Expected"
    ):
        load_encoder(tiny_encoder_dir, **options)


def test_an_encoder_keeps_its_own_pooling_unless_told_otherwise(tiny_encoder_dir):
    assert pooling_of(load_encoder(tiny_encoder_dir, default_pooling="mean")) == "cls"
    assert pooling_of(load_encoder(tiny_encoder_dir, pooling="mean")) == "mean"


def test_another_pooling_keeps_whether_the_prompt_is_pooled(tiny_encoder, tmp_path):
    tiny_encoder[1] = Pooling(32, pooling_mode="cls", include_prompt=False)
    tiny_encoder.save_pretrained(str(tmp_path), create_model_card=False)
    pooling = next(module for module in load_encoder(tmp_path, pooling="mean") if isinstance(module, Pooling))
    assert (pooling.pooling_mode, pooling.include_prompt) == ("mean", False)


def test_a_slow_tokenizer_that_copies_its_vocabulary_is_saved(tiny_bert_dir, tmp_path):
    """PhoBERT's tokenizer copies the file that it was loaded from."""
    folder = tmp_path / "phobert"
    folder.mkdir()
    pieces = [f"{letter}{end}" for letter in "abcdefghijklmnopqrstuvwxyz" for end in ("", "@@")]
    (folder / "vocab.txt").write_text("".join(f"{piece} 1\n" for piece in pieces), encoding="utf-8")
    (folder / "bpe.codes").write_text("t h 1\n", encoding="utf-8")
    model = load_encoder(tiny_bert_dir, device="cpu")
    model[0].auto_model.save_pretrained(folder)
    PhobertTokenizer(str(folder / "vocab.txt"), str(folder / "bpe.codes")).save_pretrained(folder)
    loaded = load_encoder(folder, device="cpu")
    loaded.save_pretrained(str(tmp_path / "saved"), create_model_card=False)
    again = load_encoder(tmp_path / "saved", device="cpu")
    assert again.encode("der Hund").tolist() == loaded.encode("der Hund").tolist()


def test_an_encoder_that_always_calls_its_pooler_keeps_it(tokenizer, tmp_path):
    config = SqueezeBertConfig(
        **{"vocab_size": len(tokenizer), "embedding_size": 32, "hidden_size": 32, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "intermediate_size": 64},
    )
    SqueezeBertModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert load_encoder(tmp_path, device="cpu").encode("a dog").shape == (32,)


@pytest.mark.parametrize("name", ["tiny_bert_dir", "tiny_mlm_dir", "tiny_encoder_dir"])
def test_no_encoder_has_a_transformers_pooler(request, name):
    model = load_encoder(request.getfixturevalue(name), max_length=17)
    assert not [key for key in model.state_dict() if "pooler" in key]
    assert model.max_seq_length == 17


def test_tables_of_loaded_weights_are_not_printed(tiny_mlm_dir, caplog):
    """Its masked language modelling head is not part of the encoder."""
    BertModel.from_pretrained(tiny_mlm_dir)
    assert "LOAD REPORT" in caplog.text
    caplog.clear()
    load_encoder(tiny_mlm_dir, device="cpu")
    assert "REPORT" not in caplog.text


@pytest.mark.parametrize("name", ["acme/nothing", "acme/nothing@v1", "runs/there/is/none", "nothing"])
def test_what_is_nowhere_is_said_in_one_sentence(name):
    with pytest.raises(OSError, match=rf"^There is no folder {name}, and no model of that name") as caught:
        load_encoder(name)
    assert isinstance(caught.value, MetaphraseError)


def test_word_embeddings_can_be_frozen(tiny_encoder):
    freeze_word_embeddings(tiny_encoder)
    frozen = [name for name, parameter in tiny_encoder.named_parameters() if not parameter.requires_grad]
    assert len(frozen) == 1
    assert "word_embeddings" in frozen[0]


def test_the_mlm_head_of_older_checkpoints(tiny_mlm_dir, tmp_path):
    """Norms were once called gamma and beta; mBERT's are to this day."""
    wanted = pretrained_mlm_head(str(tiny_mlm_dir))
    assert wanted is not None
    state = load_file(tiny_mlm_dir / "model.safetensors")
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    old = {}
    for key, value in state.items():
        for new, former in names.items():
            key = key.replace(new, former)
        old[key] = value
    save_file(old, tmp_path / "model.safetensors")
    found = pretrained_mlm_head(str(tmp_path))
    assert found is not None
    for name, value in wanted.items():
        assert torch.equal(found[name], value)


def test_the_mlm_head_of_a_checkpoint_in_several_files(tiny_mlm_dir, tmp_path):
    wanted = pretrained_mlm_head(str(tiny_mlm_dir))
    state = load_file(tiny_mlm_dir / "model.safetensors")
    places = {name: f"model-{at % 2 + 1:05}-of-00002.safetensors" for at, name in enumerate(sorted(state))}
    for file in set(places.values()):
        save_file({name: value for name, value in state.items() if places[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    found = pretrained_mlm_head(str(tmp_path))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_checkpoints_without_an_mlm_head(tiny_bert_dir, tmp_path):
    assert pretrained_mlm_head(str(tiny_bert_dir)) is None
    assert pretrained_mlm_head(str(tmp_path)) is None
    assert pretrained_mlm_head(str(tmp_path / "deleted")) is None


def test_english_pieces_hold_every_special_token(tokenizer, bitext):
    texts = [row["target"] for row in bitext]
    ids = used_piece_ids(texts, tokenizer).tolist()
    assert ids == sorted(set(ids))
    assert set(tokenizer.all_special_ids) <= set(ids)
    assert {piece for text in texts for piece in tokenizer(text)["input_ids"]} <= set(ids)
    assert len(ids) < len(tokenizer)


@pytest.fixture
def hub(tmp_path, monkeypatch, tiny_encoder_dir, tiny_mlm_dir):
    """A Hub with a SentenceTransformer and a raw BERT; nothing sleeps."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setenv("HF_TOKEN", "hf_write")
    with serve_hub() as server:
        reach(server, monkeypatch.setattr, tmp_path / "client")
        for name, folder in (("acme/tiny", tiny_encoder_dir), ("acme/raw", tiny_mlm_dir)):
            files = [path for path in folder.rglob("*") if path.is_file()]
            server.put(name, {path.relative_to(folder).as_posix(): path.read_bytes() for path in files})
        yield server


@pytest.mark.parametrize("name", ["acme/tiny", "acme/raw"])
def test_an_encoder_of_the_hub_keeps_its_name_and_is_there_offline(hub, monkeypatch, name, tmp_path):
    commit = hub.repositories["model", name].branches["main"]
    model = load_encoder(name, device="cpu")
    assert origin_of(model) == f"{name}@{commit}"
    assert (model.model_card_data.base_model, model.model_card_data.base_model_revision) == (name, commit)
    assert (pretrained_mlm_head(origin_of(model)) is not None) == (name == "acme/raw")
    model.save_pretrained(str(tmp_path / "saved"), create_model_card=False)
    assert not [
        path for path in (tmp_path / "saved").rglob("*.json") if str(tmp_path) in path.read_text(encoding="utf-8")
    ]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    for again in (name, f"{name}@{commit}", f"{name}@main"):
        found = load_encoder(again, device="cpu")
        assert origin_of(found) == f"{name}@{commit}"
        assert all(torch.equal(value, found.state_dict()[key]) for key, value in model.state_dict().items())
    assert hub.requests == []


@pytest.mark.parametrize("folder", ["acme/raw", "acme/raw@main"])
def test_a_folder_without_a_model_hides_no_model_of_the_hub(hub, tmp_path, monkeypatch, caplog, folder):
    monkeypatch.chdir(tmp_path)
    Path(folder, "checkpoint-10").mkdir(parents=True)
    model = load_encoder(folder, device="cpu")
    assert origin_of(model) == f"acme/raw@{hub.repositories['model', 'acme/raw'].branches['main']}"
    assert f"The folder {folder} holds no model" in caplog.text
    assert model_folder(folder) is None
    assert pretrained_mlm_head(folder) is not None
    Path(folder, "model.safetensors").touch()
    with pytest.raises(ModelFileError, match=rf"^{folder} has no config.json, so it is not a model"):
        load_encoder(folder, device="cpu")


def test_a_folder_without_a_model_is_named_if_the_hub_has_none_either(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("acme/none").mkdir(parents=True)
    with pytest.raises(
        HubMissingError, match=r"^The folder acme/none exists, but holds no model, and there is no model of that"
    ):
        load_encoder("acme/none")


@pytest.mark.parametrize(
    ("refusal", "error", "message"),
    [
        ({"status": 401}, HubAccessError, r"does not accept HF_TOKEN for acme/tiny \(401\)"),
        ({"status": 403}, HubAccessError, r"does not allow HF_TOKEN to read acme/tiny \(403\)"),
        ({"status": 403, "code": "GatedRepo"}, HubAccessError, r"acme/tiny is gated"),
        ({"status": 404, "code": "RepoNotFound"}, HubMissingError, r"The Hub has no repository acme/tiny"),
        ({"status": 503}, HubConnectionError, r"The download of acme/tiny failed"),
    ],
)
def test_a_hub_that_refuses_an_encoder_is_explained(hub, fault, refusal, error, message):
    hub.faults.append({"path": "/acme/tiny", "times": 99, **refusal})
    with pytest.raises(error, match=rf"^There is no folder acme/tiny, and .* in the cache\. .*{message}") as caught:
        load_encoder("acme/tiny")
    assert "hf_write" not in str(caught.value)
    assert "Downloaded files are kept" not in str(caught.value)
    number = "G3" if refusal["status"] == 503 else "G1"
    fault(number, f"Hub answers {refusal['status']} when a model is loaded", tried=1, survived=1)


@pytest.mark.parametrize(
    "trouble",
    [
        {"path": "/__cdn/", "status": 503},
        {"path": "/api/models/", "status": 503},
        {"path": "/__cdn/", "truncate": 5000},
        {"path": "/resolve/", "status": 429, "headers": {"Retry-After": "1"}},
    ],
    ids=lambda trouble: f"{trouble['path'].strip('/')} {trouble.get('status', 'cut')}",
)
def test_faults_on_the_way_to_an_encoder_pass(hub, tiny_encoder, fault, trouble):
    hub.faults.append(dict(trouble))
    found = load_encoder("acme/tiny", device="cpu")
    assert all(torch.equal(value, found.state_dict()[key]) for key, value in tiny_encoder.state_dict().items())
    answer = "is cut" if "truncate" in trouble else f"answers {trouble['status']}"
    fault("G3", f"loading a model: {trouble['path']} {answer}", tried=1, survived=1)


def test_a_command_takes_an_encoder_of_the_hub(hub, tmp_path, capsys):
    pairs = tmp_path / "de-en.tsv"
    pairs.write_text("source\ttarget\nja\tyes\nnein\tno\n", encoding="utf-8")
    command = ["filter", str(pairs), "--model", "acme/tiny", "--output", str(tmp_path / "kept.tsv")]
    hub.faults.append({"path": "/__cdn/", "status": 503})
    assert main(command) == 0, capsys.readouterr().err
    assert (tmp_path / "kept.tsv").exists()
    assert main([*command[:3], "acme/none", *command[4:]]) == 2
    said = capsys.readouterr().err
    assert "metaphrase filter: There is no folder acme/none, and no model of that name" in said
    assert "The Hub has no repository acme/none" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("name", ["starter+vector.safetensors", "starter +vector.safetensors"])
def test_a_vector_without_spaces_around_the_plus_sign_is_explained(name):
    with pytest.raises(OSError, match=r'separated by spaces and a plus sign: "BASE \+ VECTOR"'):
        load_encoder(name)
