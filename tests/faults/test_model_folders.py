"""What a model's folder can do to whoever loads it: nothing. It is loaded exactly, or refused with one clear sentence."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shutil
import socket
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, LayerNorm, Normalize
from transformers import (
    AlbertForMaskedLM,
    AlbertForPreTraining,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertModel,
    XLMRobertaForMaskedLM,
)

from metaphrase.aligners.embedding import EmbeddingAligner
from metaphrase.aligners.span import SpanAligner
from metaphrase.cli import main
from metaphrase.encoders.loading import load_encoder
from metaphrase.evaluation.encoding import prepare
from metaphrase.evaluation.transfer.tasks import encoder_source, load_tokenizer, load_with_head
from metaphrase.exceptions import MetaphraseError, ModelError, ModelFileError, NonFiniteError, UsageError
from metaphrase.objectives import HeadSources
from metaphrase.objectives.vocabulary import VocabularyHead
from metaphrase.publishing.release import release, verify
from metaphrase.training.heads import AlignmentHeads
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import Recipe
from tests.conftest import shape

TEXTS = ["Guten Morgen", "The cat sleeps", ""]
CONFIG, MODULES, WEIGHTS = "config.json", "modules.json", "model.safetensors"
ENCODER, CALL = "sentence_transformers.models", "sentence_bert_config.json"
QUERY = "encoder.layer.0.attention.self.query.weight"


@pytest.fixture(scope="module")
def template(tmp_path_factory, tiny_encoder_dir) -> Path:
    """A SentenceTransformer of five modules, three of them with weights."""
    torch.manual_seed(0)
    model = SentenceTransformer(str(tiny_encoder_dir), device="cpu", model_kwargs={"add_pooling_layer": False})
    modules = [*model, Dense(32, 16), LayerNorm(16), Normalize()]
    folder = tmp_path_factory.mktemp("template")
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(folder), create_model_card=False)
    return folder


@pytest.fixture
def model(template, tmp_path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "model"))


@pytest.fixture
def pairs(tmp_path, bitext) -> Path:
    path = tmp_path / "de-en.tsv"
    lines = [f"{row['source']}\t{row['target']}" for row in bitext]
    path.write_text("\n".join(["source\ttarget", *lines]) + "\n", encoding="utf-8")
    return path


def commands(model: Path, pairs: Path, out: Path) -> dict[str, list[str]]:
    """Every command that loads an encoder."""
    lines = [line.split("\t") for line in pairs.read_text(encoding="utf-8").splitlines()[1:]]
    for side, language in enumerate(("de", "en")):
        (pairs.parent / f"text.{language}").write_text("".join(f"{line[side]}\n" for line in lines), encoding="utf-8")
    texts = [str(pairs.parent / f"text.{language}") for language in ("de", "en")]
    sets = pairs.parent / "sets"
    sets.mkdir(exist_ok=True)
    shutil.copy(pairs, sets / "de-en.tsv")
    given, file, test = str(model), str(pairs), str(sets)
    train = ["train", "--model", given, "--corpus", file, "--languages", "de", "--recipe", "tr", "--max_steps", "1"]
    return {
        "train": [*train, "--use_cpu", "--report_to", "none", "--retention", "none", "--output_dir", str(out)],
        "evaluate": ["evaluate", given, "--data", test, "--output_dir", str(out)],
        "mine": ["mine", *texts, "--model", given, "-o", str(out / "mined.tsv")],
        "filter": ["filter", file, "--source_lang", "de", "--model", given, "-o", str(out / "filtered.tsv")],
        "align": ["align", file, "--aligner", "embedding", "--model", given, "-o", str(out / "aligned.tsv")],
        "diagnose": ["diagnose", "--corpus", file, "--languages", "de", "--model", given],
        "export": ["export", given, "--data", test, "--output_dir", str(out), "--layers", "1"],
    }


@pytest.fixture
def refused(model, pairs, tmp_path, capsys, monkeypatch):
    """The sentence with which a model is refused: the same one in Python and by a command, without a trace."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def refused(kind: type[MetaphraseError] = ModelError, folder: Path = model) -> str:
        with pytest.raises(kind) as caught:
            load_encoder(folder, device="cpu")
        message = str(caught.value)
        assert str(temporary) not in message
        capsys.readouterr()
        assert main(commands(folder, pairs, tmp_path / "out")["filter"]) == 2
        error = capsys.readouterr().err.strip().splitlines()
        assert error[-1] == f"metaphrase filter: {message}"
        assert "Traceback" not in "".join(error)
        assert not [path for path in tmp_path.glob("out/**/*") if path.is_file()]
        assert list(temporary.iterdir()) == []
        return message

    return refused


def edit(path: Path, content=None, **changes) -> None:
    """Change keys of a JSON file; None deletes a key."""
    content = json.loads(path.read_text()) | changes if content is None else content
    path.write_text(json.dumps({key: value for key, value in content.items() if value != "deleted"}))


def edit_weights(path: Path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def embeddings(folder: Path) -> np.ndarray:
    return load_encoder(folder, device="cpu").encode(TEXTS, show_progress_bar=False)


# ------------------------------------------------------------------------------------------------------------- pickles


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("hostile", [True, False], ids=["code", "tensors"])
@pytest.mark.parametrize("where", ["the encoder", "a module", "an index", "under the name of safetensors"])
def test_pickles_are_not_read(model, refused, tmp_path, fault, where, hostile):
    """Neither one that runs code nor one of tensors alone, which torch would read with `weights_only`."""
    folder = model / "2_Dense" if where == "a module" else model
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    name, pattern = "pytorch_model.bin", f"model has no weights in safetensors format: .*{WEIGHTS} is missing"
    if where == "an index":
        name, pattern = "x.bin", "refers to x.bin, which must be a safetensors file"
        edit(folder / f"{WEIGHTS}.index.json", {"metadata": {}, "weight_map": dict.fromkeys(tensors, name)})
    elif where.startswith("under"):
        name, pattern = WEIGHTS, "model.safetensors of .* is damaged"
    if hostile:
        (folder / name).write_bytes(pickle.dumps(Payload(tmp_path / "executed")))
    else:
        torch.save(tensors, folder / name)
    assert re.search(pattern, refused(ModelFileError))
    assert not (tmp_path / "executed").exists()
    fault("J1", f"a pickle with {'code' if hostile else 'tensors'}: {where}", tried=2, survived=2)


# ----------------------------------------------------------------------------------------------- code, kernels, other files

IGNORED = [
    (CONFIG, "attn_implementation", "org/kernel"),
    (CONFIG, "attn_implementation", {"": "org/kernel", "encoder": "org/kernel"}),
    (CONFIG, "_attn_implementation", "org/kernel"),
    (CONFIG, "_attn_implementation_internal", "org/kernel"),
    (CONFIG, "_experts_implementation", "org/kernel"),
    (CONFIG, "use_kernels", True),
    (CONFIG, "fusion_config", {"patch_embeddings": True}),
    (CONFIG, "auto_map", {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"}),
    (CONFIG, "trust_remote_code", True),
    (CONFIG, "_name_or_path", "/etc/passwd"),
    (CONFIG, "extra_files", ["../evil.safetensors"]),
    (CONFIG, "return_dict", False),
    (CALL, "model_args", {"attn_implementation": "org/kernel", "trust_remote_code": True, "use_safetensors": False}),
    (CALL, "config_args", {"attn_implementation": "org/kernel", "trust_remote_code": True}),
    ("tokenizer_config.json", "tokenizer_file", "/etc/passwd"),
    ("tokenizer_config.json", "vocab", "/etc/passwd"),
    ("tokenizer_config.json", "vocab_file", "/etc/passwd"),
    ("tokenizer_config.json", "gguf_file", "/etc/passwd"),
    ("tokenizer_config.json", "fast_tokenizer_files", ["tokenizer.9.0.json"]),
    ("tokenizer_config.json", "trust_remote_code", True),
    ("config_sentence_transformers.json", "requirements", {"evil": "1"}),
]


@pytest.mark.parametrize(("file", "key", "value"), IGNORED, ids=lambda value: str(value)[:40])
def test_settings_that_lead_elsewhere_have_no_effect(model, template, monkeypatch, fault, file, key, value):
    reached: list[object] = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: reached.append(address))
    (model / "evil.py").write_text("raise SystemExit('executed')")
    edit(model / file, **{key: value})
    expected = embeddings(template)
    loaded = load_encoder(model, device="cpu")
    assert np.array_equal(loaded.encode(TEXTS, show_progress_bar=False), expected)
    assert loaded[0].auto_model.config._attn_implementation == "sdpa"
    assert not reached
    fault("J2", f"`{key}` in `{file}`: ignored", tried=1, survived=1)


REFUSED = [
    (
        CONFIG,
        {"model_type": "evil", "auto_map": {"AutoModel": "evil.Evil"}},
        "requires its own code, which is not run",
    ),
    (CONFIG, {"model_type": "alignment_heads", "objectives": {"x": {"objective": "os:system"}}}, "not a text encoder"),
    (CONFIG, {"model_type": "clip"}, "not a text encoder"),
    (CONFIG, {"quantization_config": {"quant_method": "bitsandbytes"}}, "quantised weights are not supported"),
    (CONFIG, {"transformers_weights": "../evil.safetensors"}, "weights must be in model.safetensors"),
    (
        CALL,
        {"tokenizer_name_or_path": "org/model"},
        "sets tokenizer_name_or_path to org/model, which is not supported",
    ),
    (CALL, {"modality_config": {"text": {"method": "save_pretrained"}}}, "sets modality_config to .*save_pretrained"),
    (CALL, {"model_args": {"quantization_config": {}, "gguf_file": "x"}}, r"sets model_args\.gguf_file to x"),
    (CALL, {"transformer_task": "text-generation"}, "sets transformer_task to text-generation"),
    ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.E", "evil.E"]}}, "requires its own code"),
    ("config_sentence_transformers.json", {"model_type": "CrossEncoder"}, "is a CrossEncoder, not a SentenceTransf"),
    ("2_Dense/config.json", {"activation_function": "os.getcwd"}, "activation_function to os.getcwd, not to one of"),
    ("2_Dense/config.json", {"activation_function": "torch.hub.list"}, "activation_function to torch.hub.list"),
    ("adapter_config.json", {"base_model_name_or_path": "org/model", "peft_type": "LORA"}, "is a PEFT adapter"),
]


@pytest.mark.parametrize(("file", "changes", "pattern"), REFUSED, ids=[f"{f}-{next(iter(c))}" for f, c, _ in REFUSED])
def test_settings_that_would_change_the_model_are_refused(model, refused, fault, file, changes, pattern):
    (model / "evil.py").write_text("raise SystemExit('executed')")
    if not (model / file).exists():
        (model / file).write_text("{}")
    edit(model / file, **changes)
    assert re.search(pattern, refused())
    fault("J2", f"`{next(iter(changes))}` in `{file}`: refused", tried=2, survived=2)


@pytest.mark.parametrize(
    ("at", "changes", "pattern"),
    [
        (1, {"type": "evil.Evil"}, "requires its own code"),
        (1, {"type": "sentence_transformers.models.LSTM"}, "but a model consists of Transformer, Pooling"),
        (0, {"type": "sentence_transformers.models.BoW"}, "but a model starts with a Transformer"),
        (1, {"type": "sentence_transformers.models.Transformer"}, "but a model consists of"),
        (1, {"path": "/etc"}, "names the module folder /etc, which must lie directly in"),
        (1, {"path": "../outside"}, "names the module folder ../outside"),
        (0, {"path": ".."}, r"names the module folder \.\.,"),
        (1, {"path": "a/b"}, "names the module folder a/b"),
        (1, {"path": ""}, "names the module folder"),
    ],
)
def test_modules_are_those_of_a_table_in_the_folder(model, refused, fault, at, changes, pattern):
    modules = json.loads((model / MODULES).read_text())
    modules[at] |= changes
    (model / MODULES).write_text(json.dumps(modules))
    assert re.search(pattern, refused())
    fault("J2", "a module that is not part of sentence-transformers, or not in the folder", tried=2, survived=2)


def test_a_sparse_encoder_is_named_as_such(model, refused):
    """Its modules differ, too, which says less."""
    edit(model / "config_sentence_transformers.json", model_type="SparseEncoder")
    modules = json.loads((model / MODULES).read_text())
    modules[0]["type"] = "sentence_transformers.sparse_encoder.modules.mlm_transformer.MLMTransformer"
    (model / MODULES).write_text(json.dumps(modules))
    assert "is a SparseEncoder, not a SentenceTransformer. Choose another encoder." in refused()


@pytest.mark.parametrize("path", [CONFIG, WEIGHTS, "tokenizer.json", "2_Dense/model.safetensors", "1_Pooling"])
def test_links_do_not_leave_the_folder(model, refused, tmp_path, fault, path):
    outside = (model / path).rename(tmp_path / "outside")
    (model / path).symlink_to(outside)
    assert re.search(
        rf"of .* is a link to {outside}.*, outside the model's folder. Copy the file into the folder", refused()
    )
    (model / path).unlink()
    inside = outside.rename(model / "inside")
    (model / path).symlink_to(inside)
    load_encoder(model, device="cpu")
    fault("J2", "a link that leads out of the folder", tried=2, survived=2)


def test_other_files_of_a_folder_are_not_read(model, template, fault, tmp_path):
    """Files that transformers and sentence-transformers would read if they were there."""
    garbage = [
        *("processor_config.json", "preprocessor_config.json", "generation_config.json", "chat_template.jinja"),
        *("adapter_model.safetensors", "model.gguf", "pytorch_model.bin", "optimizer.pt", "custom_generate"),
        *("2_Dense/pytorch_model.bin", "tokenizer.5.0.json", "config.5.0.json", "training_args.bin", "evil.py"),
    ]
    for name in garbage:
        (model / name).write_bytes(b"\xff{[garbage")
    assert np.array_equal(embeddings(model), embeddings(template))
    fault("J2", "files that are not part of a model", tried=len(garbage), survived=len(garbage))


# ------------------------------------------------------------------------------------------------------------- weights


def remove(tensors):
    del tensors[next(iter(tensors))]


def rename(tensors):
    name = next(iter(tensors))
    tensors[f"{name}_renamed"] = tensors.pop(name)


def reshape(tensors):
    name = max(tensors, key=lambda name: tensors[name].ndim)
    tensors[name] = torch.zeros(7, *tensors[name].shape[1:])


def add(tensors):
    tensors["linear.more"] = torch.zeros(3)


@pytest.mark.parametrize("change", [remove, rename, reshape, add], ids=lambda change: change.__name__)
@pytest.mark.parametrize("module", ["", "2_Dense", "3_LayerNorm"], ids=["Transformer", "Dense", "LayerNorm"])
def test_no_weight_is_random_or_left_out(model, refused, fault, module, change):
    edit_weights(model / module / WEIGHTS, change)
    names = {remove: "(?i)missing", rename: "_renamed", reshape: "7", add: "linear.more"}
    assert re.search(names[change], refused(ModelFileError))
    fault("J3", f"weights of a module: {change.__name__}", tried=2, survived=2)


def test_the_names_of_weights_are_few_and_counted(model):
    edit_weights(model / WEIGHTS, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layer.1" in name])
    edit_weights(model / WEIGHTS, lambda tensors: tensors.update({QUERY: torch.zeros(2, 2)}))
    with pytest.raises(ModelFileError) as caught:
        load_encoder(model, device="cpu")
    layer = "encoder.layer.1.attention"
    missing = f"{layer}.output.LayerNorm.bias, {layer}.output.LayerNorm.weight, {layer}.output.dense.bias and 13 more"
    assert f"16 missing ({missing}); 1 of another shape ({QUERY}: [2, 2] instead of [32, 32])" in str(caught.value)


def test_a_config_of_fewer_layers_is_refused(model, refused):
    edit(model / CONFIG, num_hidden_layers=1)
    assert re.search(r"16 not part of the model \(encoder\.layer\.1\.", refused(ModelFileError))


def pooler(tensors):
    tensors |= {"pooler.dense.weight": torch.zeros(32, 32), "pooler.dense.bias": torch.zeros(32)}


def position_ids(tensors):
    tensors["embeddings.position_ids"] = torch.arange(80)[None]


def gamma_and_beta(tensors):
    for name in [name for name in tensors if "LayerNorm" in name]:
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        tensors[old] = tensors.pop(name)


@pytest.mark.parametrize("change", [pooler, position_ids, gamma_and_beta], ids=lambda change: change.__name__)
def test_harmless_differences_of_older_checkpoints(model, template, change):
    edit_weights(model / WEIGHTS, change)
    assert np.array_equal(embeddings(model), embeddings(template))


@pytest.mark.parametrize(
    "cls",
    [
        BertForMaskedLM,
        BertForSequenceClassification,
        BertForQuestionAnswering,
        XLMRobertaForMaskedLM,
        AlbertForMaskedLM,
        AlbertForPreTraining,
    ],
)
def test_checkpoints_of_another_task_keep_their_encoder(cls, tokenizer, tmp_path):
    trained = cls(cls.config_class(**shape(tokenizer))).eval()
    trained.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_encoder(tmp_path, device="cpu")[0].auto_model
    expected = trained.base_model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    with_head = load_with_head(encoder_source(tmp_path), AutoModelForSequenceClassification, num_labels=3)
    for name, value in with_head.base_model.state_dict().items():
        assert "pooler" in name or torch.equal(value, expected[name]), name


def test_weights_in_several_files(tiny_bert_dir, tokenizer, tmp_path):
    BertModel.from_pretrained(tiny_bert_dir, add_pooling_layer=False).save_pretrained(tmp_path, max_shard_size="20KB")
    tokenizer.save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert np.array_equal(embeddings(tmp_path), embeddings(tiny_bert_dir))
    next(tmp_path.glob("model-00002*")).unlink()
    with pytest.raises(ModelFileError, match=r"lists model-00002-of-\d+\.safetensors, which is missing"):
        load_encoder(tmp_path)


def test_other_loaders_refuse_missing_weights_too(model, template, tiny_bert_dir, tokenizer, tmp_path, fault):
    edit_weights(model / WEIGHTS, rename)
    with pytest.raises(ModelFileError, match=r"1 missing .* 1 not part of the model"):
        load_with_head(encoder_source(model), AutoModelForSequenceClassification)
    with pytest.raises(ModelFileError, match=r"2 missing \(qa_outputs.bias, qa_outputs.weight\)"):
        SpanAligner(tiny_bert_dir)
    BertForQuestionAnswering(BertConfig(**shape(tokenizer))).save_pretrained(tmp_path / "qa")
    tokenizer.save_pretrained(tmp_path / "qa")
    assert SpanAligner(tmp_path / "qa", stride=8, max_answer_length=4).max_length == 64
    with pytest.raises(ModelFileError, match=r"1 missing .* 1 not part of the model"):
        EmbeddingAligner(str(model))
    released = release(load_encoder(template, device="cpu"), tmp_path / "released", recipe=None)
    edit_weights(released / WEIGHTS, rename)
    with pytest.raises(ModelFileError, match=r"1 missing .* 1 not part of the model"):
        verify(released, name="released")
    fault("J3", "renamed weights of an aligner, a release and a fine-tuned encoder", tried=4, survived=4)


def test_heads_are_loaded_completely_or_refused(tiny_encoder, tokenizer, tmp_path, fault):
    heads = AlignmentLoss(
        tiny_encoder, Recipe.load("dap"), max_length=24, english_ids=torch.arange(len(tokenizer))
    ).heads
    heads.save_pretrained(tmp_path / "heads")
    config = json.loads((tmp_path / "heads" / CONFIG).read_text())
    edit(tmp_path / "heads" / CONFIG, encoder=config["encoder"] | {"_attn_implementation": "org/kernel"})
    loaded = AlignmentHeads.from_pretrained(tmp_path / "heads").state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in heads.state_dict().items())
    changes = {remove: "1 missing", rename: "1 not part", reshape: "1 of another shape", add: "1 not part"}
    for change, pattern in changes.items():
        folder = shutil.copytree(tmp_path / "heads", tmp_path / change.__name__)
        edit_weights(folder / WEIGHTS, change)
        with pytest.raises(ModelFileError, match=pattern):
            AlignmentHeads.from_pretrained(folder)
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match="no weights in safetensors format"):
        AlignmentHeads.from_pretrained(folder)
    fault("J3", "heads with missing, renamed, reshaped or additional weights, or in a pickle", tried=5, survived=5)


DAMAGED_HEADS = [
    ("{", "config.json of .*heads is not valid JSON"),
    ("[]", "config.json of .*heads must contain an object"),
    ("{}", "config.json of .*heads is not a file of training heads: it has no encoder"),
    ({"encoder": {"hidden_size": 48}}, r"weights of .*heads do not fit its config.json: \d+ of another shape .*48"),
    ({"encoder": {"hidden_size": 10**6}}, "config.json of .*heads describes a model of [0-9,]+ values, but"),
    ({"encoder": {"hidden_size": "32"}}, "config.json of .*heads does not describe training heads"),
    ({"encoder": {"model_type": "nothing"}}, "config.json of .*heads does not describe training heads .*nothing"),
    ({"objectives": ["rtl"]}, "must map each of its objectives to its args and settings, but contains .*rtl"),
    ({"objectives": {"rtl": {"args": {}}}}, "must map each of its objectives to its args and settings"),
    (
        {"objectives": {"rtl": {"args": {"layers": 10**9}, "settings": {}}}},
        "sets layers to 1000000000, which is out of range",
    ),
    (
        {"objectives": {"rtl": {"args": {"depth": 2}, "settings": {}}}},
        "heads does not describe training heads .*depth",
    ),
    ({"objectives": {"nothing": {"args": {}, "settings": {}}}}, "unknown objective 'nothing'"),
    ({"languages": "de"}, "config.json of .*heads must list codes of languages, but contains de"),
]


@pytest.mark.parametrize(("change", "pattern"), DAMAGED_HEADS, ids=[pattern for _, pattern in DAMAGED_HEADS])
def test_a_damaged_configuration_of_heads_is_refused(tiny_encoder, tmp_path, fault, change, pattern):
    folder = tmp_path / "heads"
    AlignmentLoss(tiny_encoder, Recipe.load("dap"), max_length=24).heads.save_pretrained(folder)
    if isinstance(change, str):
        (folder / CONFIG).write_text(change)
    else:
        encoder = json.loads((folder / CONFIG).read_text())["encoder"] | change.get("encoder", {})
        edit(folder / CONFIG, **change | {"encoder": encoder})
    with pytest.raises(ModelError, match=pattern):
        AlignmentHeads.from_pretrained(folder)
    fault("J5", "a damaged config.json of heads", tried=1, survived=1)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("dense.weight", torch.eye(33), "dense.weight has the shape [33, 33] instead of [32, 32]"),
        ("LayerNorm.bias", torch.full((32,), torch.nan), "or NaN or infinite values"),
        (
            "predictions.bias",
            torch.zeros(1),
            "bias has the shape [1] instead of",
        ),  # torch would copy it to every piece
    ],
)
def test_a_head_of_masked_language_modelling_fits_its_encoder(tiny_mlm_dir, tmp_path, fault, part, value, message):
    folder = Path(shutil.copytree(tiny_mlm_dir, tmp_path / "mlm"))

    def change(weights):
        (key,) = [key for key in weights if key.startswith("cls.") and key.endswith(part)]
        weights[key] = value

    edit_weights(folder / "model.safetensors", change)
    encoder = load_encoder(folder, device="cpu")
    with pytest.raises(ModelFileError, match=re.escape(message)):
        AlignmentLoss(encoder, Recipe.load("tr-tlm"), max_length=24)
    sources = HeadSources(encoder[0].auto_model, encoder.tokenizer, str(folder))
    assert VocabularyHead.settings(sources, "tied", "none")["transform"] == "none"
    fault("J5", "a head of masked language modelling that does not fit", tried=1, survived=1)


# ----------------------------------------------------------------------------------------------------------- tokenizers


def test_an_encoder_without_its_tokenizer_is_refused(model, refused, fault):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    assert re.search("has no tokenizer: none of tokenizer.json, vocab.txt, .* exists", refused(ModelFileError))
    fault("J4", "no files of a tokenizer", tried=2, survived=2)


def change_tokenizer(folder: Path, change) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))


def only_special_tokens(content):
    content["model"]["vocab"] = {name: id_ for name, id_ in content["model"]["vocab"].items() if name.startswith("[")}


def ids_beyond_the_embeddings(content):
    content["model"]["vocab"]["the"] = 5000


def no_unknown_token(content):
    content["model"]["unk_token"] = "[NOTHING]"


def dropout(content):
    pieces = list(content["model"]["vocab"])
    vocabulary = {piece.removeprefix("##"): id_ for id_, piece in enumerate(pieces)}
    content["model"] = {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": "[UNK]", "dropout": 0.5}


def fixed_length_0(content):
    content["pre_tokenizer"] = {"type": "FixedLength", "length": 0}


def charsmap(content):
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (only_special_tokens, "knows no words: its vocabulary is missing or empty"),
        (ids_beyond_the_embeddings, "has ids of pieces up to 5000, but the encoder has 120 embeddings"),
        (no_unknown_token, r"Missing \[UNK\] token|WordPiece error"),
        (dropout, "uses BPE dropout, which splits words at random"),
        (fixed_length_0, "PanicException: chunk size must be non-zero"),
        (charsmap, "PanicException: Precompiled"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_tokenizer_that_cannot_work_is_refused(model, refused, fault, change, pattern):
    change_tokenizer(model, change)
    assert re.search(pattern, refused())
    fault("J4", f"a tokenizer with {change.__name__.replace('_', ' ')}", tried=2, survived=2)


def test_an_empty_vocabulary_file_is_refused(tiny_bert_dir, tmp_path, refused, fault):
    """transformers makes a tokenizer of special tokens of it."""
    folder = Path(shutil.copytree(tiny_bert_dir, tmp_path / "raw"))
    for path in folder.glob("tokenizer*"):
        path.unlink()
    (folder / "vocab.txt").write_text("")
    assert re.search("knows no word|cannot be loaded", refused(ModelFileError, folder))
    fault("J4", "an empty vocabulary file", tried=2, survived=2)


def test_no_padding_token(model, refused):
    edit(model / "tokenizer_config.json", pad_token="deleted")
    edit(model / "tokenizer.json", padding=None)  # which would name the token
    assert re.search("has no padding token. Set its pad_token, and save it", refused())


def test_a_fine_tuned_encoder_needs_its_tokenizer(model):
    source = encoder_source(model)
    (model / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match="has no tokenizer"):
        load_tokenizer(source)


# -------------------------------------------------------------------------------------------------------- damaged files


@pytest.mark.parametrize("path", [WEIGHTS, "2_Dense/model.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "empty", "garbage", "header"])
def test_damaged_weights_are_called_damaged(model, refused, fault, path, damage):
    data = (model / path).read_bytes()
    (model / path).write_bytes(
        {"cut": data[:-5], "empty": b"", "garbage": os.urandom(500), "header": b"\xff" * 8 + data[8:]}[damage]
    )
    assert re.search(f"{path} of .* is damaged: ", refused(ModelFileError))
    fault("J5", f"weights: {damage}", tried=2, survived=2)


WRONG_MODULES = [
    ('["x", "y"]', "must be a list of modules with a type and a path, but contains x"),
    ('{"0": {}}', "must contain a list, but contains"),
    ("null", "must contain a list, but contains None"),
    ("[]", "lists no module"),
    ('[{"type": 3, "path": ""}]', "must be a list of modules with a type and a path"),
    ("[{}]", "must be a list of modules with a type and a path"),
    ("[" * 60 + "]" * 60, "is nested too deeply"),
    ("[" * 100_000 + "]" * 100_000, "is not valid JSON: maximum recursion depth"),
    ("[" + " " * 5_000_000 + "]", "exceeds 4,000,000 bytes, the maximum for settings"),
    ("[1" + "0" * 10_000 + "]", "is not valid JSON: Exceeds the limit"),
    ("", "is not valid JSON"),
    ("\ufeff[]", "is not valid JSON"),
]


@pytest.mark.parametrize(("content", "pattern"), WRONG_MODULES, ids=range(len(WRONG_MODULES)))
def test_a_list_of_modules_of_another_kind(model, refused, fault, content, pattern):
    (model / MODULES).write_text(content, encoding="utf-8")
    assert re.search(f"modules.json of .* {pattern}", refused(ModelFileError))
    fault("J5", "modules.json that is not a list of modules", tried=2, survived=2)


IMPOSSIBLE = [
    ({"hidden_act": "nothing"}, "does not describe a model of type bert .*nothing"),
    ({"num_attention_heads": 5}, r"does not describe a model of type bert .*32.*not a multiple .*5"),
    ({"num_attention_heads": 0}, "does not describe a model of type bert"),
    ({"dtype": "int8"}, "sets dtype to int8, which must be one of float16"),
    ({"dtype": "nothing"}, "sets dtype to nothing"),
    ({"vocab_size": 10**9}, "describes a model of 32,000,.* values, but the weights have"),
    ({"vocab_size": 10**13}, "sets vocab_size to 10000000000000, which is out of range"),
    ({"vocab_size": -1}, "does not describe a model of type bert"),
    ({"hidden_size": -32}, "does not describe a model of type bert"),
    ({"hidden_size": "32"}, "does not describe a model of type bert"),
    ({"hidden_size": 10**6}, "describes a model of|does not describe"),
    ({"max_position_embeddings": 10**9}, "describes a model of"),
    ({"num_hidden_layers": 10**9}, "sets num_hidden_layers to 1000000000, which is out of range"),
    ({"num_labels": 10**9}, "sets num_labels to 1000000000, which is out of range"),
    ({"intermediate_size": 65}, "4 of another shape|of another shape"),
    ({"model_type": "deleted"}, "has no model_type"),
    ({"model_type": 3}, "requires its own code"),
]


@pytest.mark.parametrize(("changes", "pattern"), IMPOSSIBLE, ids=[str(changes) for changes, _ in IMPOSSIBLE])
def test_impossible_settings_of_a_model(model, refused, fault, changes, pattern):
    edit(model / CONFIG, **changes)
    assert re.search(pattern, refused())
    fault("J5", "impossible values in config.json", tried=2, survived=2)


@contextlib.contextmanager
def as_another_user():
    """Without the privileges of root, which reads every file."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize("path", [WEIGHTS, CONFIG, MODULES, "2_Dense/model.safetensors"])
def test_files_without_permission_are_called_that(template, fault, path):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        model = Path(shutil.copytree(template, Path(folder, "model")))
        for file in (model, *model.rglob("*")):
            file.chmod(0o755)
        (model / path).chmod(0)
        with as_another_user(), pytest.raises(ModelFileError, match=f"{path} of .* cannot be read: Permission denied"):
            load_encoder(model, device="cpu")
    fault("J5", "a file that may not be read", tried=1, survived=1)


def test_a_file_is_not_a_model(model, refused):
    assert re.search("is a file, but a model is a folder", refused(ModelFileError, model / CONFIG))


def test_a_folder_is_not_a_file(model, refused):
    (model / WEIGHTS).unlink()
    (model / WEIGHTS).mkdir()
    assert re.search("model.safetensors of .* must be a file", refused(ModelFileError))


def test_a_folder_without_a_model(tmp_path, refused):
    (tmp_path / "empty").mkdir()
    assert re.search(
        "empty exists, but holds no model: it has no config.json", refused(ModelFileError, tmp_path / "empty")
    )


def test_the_folder_of_an_interrupted_run(tmp_path, refused):
    (tmp_path / "run" / "checkpoint-4").mkdir(parents=True)
    assert re.search("run holds checkpoints, but no release. Repeat the", refused(ModelFileError, tmp_path / "run"))


@pytest.mark.parametrize("command", ["evaluate", "mine", "filter", "train"])
def test_more_tokens_than_positions_are_refused(template, pairs, tmp_path, capsys, fault, command):
    pairs.write_text(pairs.read_text(encoding="utf-8") + "word " * 300 + "\t" + "Wort " * 300 + "\n", encoding="utf-8")
    given = commands(template, pairs, tmp_path / "out")[command]
    assert main([*given, "--max_length", "100000"]) == 2
    error = capsys.readouterr().err
    assert re.search("100000.*but the encoder has 80", error.splitlines()[-1]), error
    assert "Traceback" not in error
    with pytest.raises(UsageError, match="100000 tokens was requested, but the encoder has 80 positions"):
        load_encoder(template, max_length=100_000)
    with pytest.raises(UsageError, match="100000 tokens was requested, but the encoder has 80 positions"):
        prepare(load_encoder(template), max_length=100_000)
    fault("J5", f"`{command} --max_length` above the positions of the encoder", tried=3, survived=3)


@pytest.mark.parametrize("length", [None, 10**30, 10_000, 0])
def test_long_texts_are_cut_at_the_positions(tiny_bert_dir, tmp_path, length):
    folder = Path(shutil.copytree(tiny_bert_dir, tmp_path / "raw"))
    edit(folder / "tokenizer_config.json", model_max_length="deleted" if length is None else length)
    loaded = load_encoder(folder, device="cpu")
    assert loaded.max_seq_length == 80
    assert np.isfinite(loaded.encode(["word " * 300], show_progress_bar=False)).all()


def test_reserved_positions_hold_no_tokens(tiny_xlmr, tmp_path):
    """Of the 82 positions of this XLM-R, the first is that of padding."""
    edit(tmp_path / "xlmr" / "tokenizer_config.json", model_max_length=10_000)
    loaded = load_encoder(tmp_path / "xlmr", device="cpu")
    assert loaded.max_seq_length == 81
    assert np.isfinite(loaded.encode(["word " * 300], show_progress_bar=False)).all()
    with pytest.raises(UsageError, match="82 tokens was requested, but the encoder has 81 positions"):
        load_encoder(tmp_path / "xlmr", max_length=82)
    with pytest.raises(UsageError, match="82 tokens was requested, but the encoder has 81 positions"):
        prepare(loaded, max_length=82)
    with pytest.raises(ModelError, match="up to 82 positions, but the encoder has 81"):
        AlignmentLoss(loaded, Recipe.load("tr"), max_length=82)
    AlignmentLoss(loaded, Recipe.load("tr"), max_length=81)


# ------------------------------------------------------------------------------------------------ NaN and infinite weights


@pytest.mark.parametrize("command", ["train", "evaluate", "mine", "filter", "align", "diagnose", "export"])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_weights_that_are_not_finite_are_refused(model, pairs, tmp_path, capsys, fault, command, value):
    """In the embedding of one piece, which no sentence of the corpus needs to have."""
    edit_weights(model / WEIGHTS, lambda tensors: tensors["embeddings.word_embeddings.weight"][7].fill_(value))
    before = sorted(tmp_path.rglob("*"))
    arguments = commands(model, pairs, tmp_path / "out")[command]
    before = sorted(tmp_path.rglob("*"))
    assert main(arguments) == 2
    assert "has NaN or infinite weights, in" in capsys.readouterr().err.splitlines()[-1]
    written = [path for path in tmp_path.rglob("*") if path not in before and path.is_file()]
    assert not [path for path in written if path.suffix in (".tsv", ".safetensors") or "results" in path.name], written
    fault("J6", f"{command}: a weight is {value}", tried=1, survived=1)


@pytest.mark.parametrize("path", ["2_Dense/model.safetensors", "3_LayerNorm/model.safetensors"])
def test_weights_of_later_modules_are_finite(model, refused, path):
    edit_weights(model / path, lambda tensors: next(iter(tensors.values())).fill_(torch.nan))
    assert re.search("has NaN or infinite weights", refused(NonFiniteError))


def test_finite_weights_whose_embeddings_are_not(model, refused, fault):
    edit_weights(model / "3_LayerNorm" / WEIGHTS, lambda tensors: tensors["norm.weight"].fill_(3e38))
    assert re.search("The embeddings of .* are NaN or infinite", refused(NonFiniteError))
    fault("J6", "finite weights with infinite embeddings", tried=2, survived=2)


# --------------------------------------------------------------------------------------------------------------- traces


def test_a_loaded_model_does_not_name_the_copy(template, tmp_path):
    """Neither the model nor what it is saved to refers to the temporary folder that it was read from."""
    loaded = load_encoder(template, device="cpu")
    assert loaded[0].auto_model.config.name_or_path == loaded.tokenizer.name_or_path == str(template)
    assert type(loaded[0]).__module__.startswith("sentence_transformers.")
    loaded.save_pretrained(str(tmp_path / "saved"))
    release(loaded, tmp_path / "released", recipe=None)
    for path in [*(tmp_path / "saved").rglob("*.*"), *(tmp_path / "released").rglob("*.*")]:
        assert not re.search(rb"metaphrase-\w{8}", path.read_bytes()), path
    assert np.array_equal(embeddings(tmp_path / "saved"), embeddings(template))


def test_the_checks_change_neither_random_states_nor_modes(template):
    states = []
    for load, options in ((SentenceTransformer, {"model_kwargs": {"add_pooling_layer": False}}), (load_encoder, {})):
        torch.manual_seed(3)
        loaded = load(str(template), device="cpu", **options)
        states.append((torch.random.get_rng_state().tolist(), [module.training for module in loaded.modules()]))
    assert states[0] == states[1]
