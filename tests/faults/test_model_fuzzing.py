"""Damaged and hostile model folders: loaded, with the same finite embeddings every time, or refused with a clear error.

A case is one seed: it selects a folder, one to three changes of its files, and the values that are written.
"""

from __future__ import annotations

import json
import pickle
import random
import resource
import shutil
import socket
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, LayerNorm, Normalize, Pooling, Transformer
from transformers import BertConfig, BertForMaskedLM, BertModel, XLMRobertaConfig, XLMRobertaModel
from transformers.utils import logging as transformers_logging

from metaphrase.encoders.loading import load_encoder
from metaphrase.exceptions import MetaphraseError
from tests.conftest import shape, wordpiece

CASES = 5000
#: Cases of one test, so that a failure is reported before the time limit.
PART = 500
TEXTS = ["Good morning", "The cat drinks milk and sleeps " * 60, "", "☃ 𒀀 \ue000"]
SETTINGS = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 40}

#: Values that settings may be replaced by.
VALUES = [
    *(None, True, False, 0, 1, 2, -1, 3, 7, 15, 16, 17, 64, 0.5, -0.5, 1e308, 2**31, 2**33, 2**63, 2**70, 10**12),
    *(
        float("nan"),
        float("inf"),
        "",
        "x",
        "16",
        "gelu",
        "float16",
        "float32",
        "int8",
        "torch.float32",
        "auto",
        "eager",
    ),
    *(
        "flash_attention_2",
        "org/kernel",
        "../x",
        "/etc/passwd",
        "x.bin",
        "evil.Evil",
        "os.system",
        "\ud800",
        "\0",
        "é" * 9,
    ),
    *([], {}, [[]], [{}], {"": ""}, ["x"], {"x": {"y": [1]}}, [1] * 1000, "x" * 10_000, {"": "org/kernel"}),
]
#: Settings that lead elsewhere, or to code.
KEYS = {
    "attn_implementation": "org/kernel",
    "_attn_implementation": "org/kernel",
    "_attn_implementation_internal": "org/kernel@main:f",
    "experts_implementation": "org/kernel",
    "auto_map": {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil", "AutoTokenizer": ["evil.Evil", "evil.Evil"]},
    "trust_remote_code": True,
    "quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "use_kernels": True,
    "fusion_config": {"patch_embeddings": True},
    "transformers_weights": "../outside/model.safetensors",
    "_name_or_path": "org/model",
    "name_or_path": "/etc",
    "configuration_files": ["config.9.0.json"],
    "per_layer_config": {"0": {"hidden_size": 8}},
    "architectures": ["AlignmentHeads"],
    "model_type": "alignment_heads",
    "pruned_heads": {"0": [0]},
    "num_labels": 10**7,
    "is_decoder": True,
    "tie_word_embeddings": False,
    "return_dict": False,
    "output_hidden_states": True,
    "tokenizer_file": "/etc/passwd",
    "vocab_file": "/etc/passwd",
    "vocab": "/etc/passwd",
    "gguf_file": "x.gguf",
    "fast_tokenizer_files": ["tokenizer.9.0.json"],
    "tokenizer_class": "MistralCommonBackend",
    "init_inputs": ["/etc/passwd"],
    "model_args": {"attn_implementation": "org/kernel", "use_safetensors": False, "weights_only": False},
    "tokenizer_args": {"tokenizer_file": "/etc/passwd"},
    "config_args": {"attn_implementation": "org/kernel"},
    "tokenizer_name_or_path": "org/model",
    "modality_config": {"text": {"method": "save_pretrained", "method_output_name": "last_hidden_state"}},
    "backend": "onnx",
    "activation_function": "os.system",
    "requirements": ["evil"],
    "base_model_name_or_path": "org/model",
    "dropout": 0.9,
    "max_seq_length": 10**6,
    "model_max_length": 0,
    "stride": 30,
    "pad_to_multiple_of": 0,
    "truncation": {"max_length": 3, "strategy": "LongestFirst", "stride": 9, "direction": "Right"},
    "unk_token": "nothing",
    "pad_token": "nothing",
    "padding_side": "middle",
    "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    "pre_tokenizer": {"type": "FixedLength", "length": 0},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
        "pair": [],
        "special_tokens": {},
    },
    "continuing_subword_prefix": "",
    "max_input_chars_per_word": 0,
    "type": "sentence_transformers.models.WordEmbeddings",
    "path": "/etc",
}


class Payload:
    """What a pickle does when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.fixture(scope="module")
def templates(tmp_path_factory) -> list[Path]:
    """A SentenceTransformer of five modules, an XLM-R, a BERT in several files, and a BERT with a head."""
    torch.manual_seed(0)
    root, tokenizer = tmp_path_factory.mktemp("templates"), wordpiece()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    bert = BertConfig(**shape(tokenizer, **SETTINGS))
    for name, model in (
        ("raw", BertModel(bert, add_pooling_layer=False)),
        ("xlmr", XLMRobertaModel(XLMRobertaConfig(**shape(tokenizer, **SETTINGS)), add_pooling_layer=False)),
        ("mlm", BertForMaskedLM(bert)),
    ):
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    BertModel(bert, add_pooling_layer=False).save_pretrained(root / "sharded", max_shard_size="5KB")
    tokenizer.save_pretrained(root / "sharded")
    transformer = Transformer(str(root / "raw"), model_kwargs={"add_pooling_layer": False}, max_seq_length=20)
    modules = [transformer, Pooling(16, "mean"), Dense(16, 8), LayerNorm(8), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(root / "modules"), create_model_card=False)
    shutil.rmtree(root / "raw")
    yield sorted(root.iterdir())
    transformers_logging.set_verbosity_warning()
    transformers_logging.enable_progress_bar()


def files_of(folder: Path, pattern: str = "*") -> list[Path]:
    """Files of a folder, without links, through which a change would leave it."""
    return sorted(path for path in folder.rglob(pattern) if path.is_file() and not path.is_symlink())


def state_of(folder: Path) -> dict[Path, tuple[int, int]]:
    """Size and time of change of everything in a folder but folders."""
    return {
        path: (status.st_size, status.st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir()
        for status in [path.lstat()]
    }


def places(content, place=()):
    """The places of all values of nested settings."""
    yield place
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        if isinstance(value, dict | list):
            yield from places(value, (*place, key))
        else:
            yield (*place, key)


def change_json(content, draw: random.Random):
    """Replace, delete, add or repeat one value."""
    *parents, last = draw.choice([place for place in places(content) if place] or [("x",)])
    parent = content
    for key in parents:
        parent = parent[key]
    kind = draw.choice(["replace", "replace", "delete", "add", "add", "repeat"])
    if kind == "add" or not parent:
        target = draw.choice([parent, content])
        key = draw.choice(sorted(KEYS))
        if isinstance(target, dict):
            target[key] = draw.choice([KEYS[key], draw.choice(VALUES)])
        else:
            target.insert(draw.randrange(len(target) + 1), draw.choice(VALUES))
    elif kind == "replace":
        parent[last] = draw.choice(VALUES)
    elif kind == "delete":
        del parent[last]
    elif isinstance(parent, list):
        parent.insert(0, parent[last])
    else:
        parent[f"{last}2"] = parent.pop(last)
    return content


def change_settings(folder: Path, draw: random.Random) -> None:
    """Change a value of a JSON file, or replace the file's content."""
    paths = files_of(folder, "*.json")
    light = [path for path in paths if path.name != "tokenizer.json"]
    if not paths:
        return
    path = draw.choice(draw.choice([paths, light or paths]))
    kind = draw.randrange(12)
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):  # of an earlier change
        return
    if kind == 0:
        path.write_text(json.dumps(draw.choice(VALUES)))
    elif kind == 1:
        depth = draw.choice([20, 40, 500, 100_000])
        path.write_text("[" * depth + "]" * depth)
    elif isinstance(content, dict | list):
        path.write_text(json.dumps(change_json(content, draw)))


def change_bytes(folder: Path, draw: random.Random) -> None:
    """Flip, insert, remove or cut bytes of any file."""
    path = draw.choice(files_of(folder))
    data = path.read_bytes()
    at = draw.randrange(min(len(data), draw.choice([10, 1000, 10**6])) + 1)
    junk = draw.choice([b"", b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"{", b"[" * 2000, draw.randbytes(9), b"9" * 5000])
    kind = draw.choice(["flip", "insert", "cut", "remove", "garbage", "empty"])
    if kind == "flip" and at < len(data):
        data = data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
    elif kind == "insert":
        data = data[:at] + junk + data[at:]
    elif kind == "cut":
        data = data[:at]
    elif kind == "remove":
        data = data[:at] + data[at + draw.randrange(40) :]
    elif kind == "garbage":
        data = draw.randbytes(draw.choice([1, 8, 9, 100, 5000]))
    else:
        data = b""
    path.write_bytes(data)


def change_weights(folder: Path, draw: random.Random) -> None:
    """Remove, rename, reshape, retype or spoil a tensor, or change the header as JSON."""
    path = draw.choice(files_of(folder, "*.safetensors") or [None])
    kind = draw.choice(["remove", "rename", "reshape", "type", "spoil", "add", "header", "length"])
    if path is None:
        return
    data = path.read_bytes()
    try:
        tensors = load_file(path)
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
    except Exception:
        return
    name = draw.choice(sorted(tensors) or [""])
    if kind in ("header", "length") or not name:
        text = json.dumps(change_json(header, draw)).encode() if kind == "header" else data[8 : 8 + length]
        size = len(text) if kind == "header" else draw.choice([0, 1, length - 1, length + 1, 2**31, 2**63])
        path.write_bytes(struct.pack("<Q", size) + text + data[8 + length :])
        return
    tensor = tensors.pop(name)
    if kind == "rename":
        tensors[draw.choice([f"{name}.x", f"x.{name}", name[:-1], "", "x" * 5000, "é", "__metadata__x"])] = tensor
    elif kind == "reshape":
        size = draw.choice([0, 1, tensor.shape[0] + 1])
        tensors[name] = tensor[:0].clone() if size == 0 else torch.ones(size, *tensor.shape[1:])
    elif kind == "type":
        kinds = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64]
        tensors[name] = tensor.to(draw.choice([*kinds, torch.float8_e4m3fn]))
    elif kind == "spoil":
        tensors[name] = tensor.clone()
        if tensor.is_floating_point() and tensor.numel():
            value = draw.choice([torch.nan, torch.inf, -torch.inf, 3e38, 1e30])
            tensors[name].view(-1)[draw.randrange(tensor.numel())] = value
    elif kind == "add":
        tensors |= {name: tensor, draw.choice([f"{name}2", "encoder.layer.1.x", "x"]): torch.ones(2)}
    save_file(tensors, path, metadata={"format": "pt"})


def change_files(folder: Path, draw: random.Random) -> None:
    """Delete or rename a file, or put a folder, a link, another file or a pickle in its place."""
    path, other = draw.choice(files_of(folder)), draw.choice(files_of(folder))
    kind = draw.choice(["delete", "rename", "folder", "link", "swap", "pickle", "adapter", "copy", "loop"])
    content = path.read_bytes()
    if kind == "copy":
        other.write_bytes(content)
        return
    if kind == "adapter":
        (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/model", "peft_type": "LORA"}')
        return
    path.unlink()
    outside = folder.parent / "outside"
    if kind == "rename":
        path.with_name(f"{path.stem}2{path.suffix}").write_bytes(content)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        (outside / path.name).write_bytes(content)
        path.symlink_to(draw.choice([outside / path.name, "/etc/passwd", outside / "nothing", "/dev/zero"]))
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "swap":
        path.write_bytes(draw.choice([b"", other.read_bytes() if other.is_file() else b""]))
    elif kind == "pickle":
        name = draw.choice(["pytorch_model.bin", "adapter_model.bin", "model.pt", path.name])
        path.with_name(name).write_bytes(pickle.dumps(Payload(outside / "executed")))


CHANGES = [change_settings] * 5 + [change_weights] * 3 + [change_bytes] * 2 + [change_files] * 2


def load(folder: Path, seed: int) -> np.ndarray | None:
    """Embeddings of a model; None if it is refused with an error of ours."""
    torch.manual_seed(seed)
    try:
        model = load_encoder(folder, device="cpu")
    except MetaphraseError as error:
        message = str(error)
        assert len(message) < 1500, message
        assert message.isprintable(), message
        assert tempfile.gettempdir() not in message, message
        return None
    return model.encode(TEXTS, show_progress_bar=False)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "seeds",
    [
        range(30),
        pytest.param(range(30, 60), marks=pytest.mark.slow),
        *(pytest.param(range(at, at + PART), marks=pytest.mark.slow) for at in range(60, CASES, PART)),
    ],
    ids=lambda seeds: f"{seeds.start}-{seeds.stop}",
)
def test_a_changed_folder_is_loaded_exactly_or_refused(templates, tmp_path, monkeypatch, fault, seeds):
    connections: list[object] = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: connections.append(address))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "temporary").mkdir()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert all(load(folder, 0) is not None for folder in templates)
    loaded = 0
    for seed in seeds:
        draw = random.Random(seed)
        outside, folder = tmp_path / "outside", tmp_path / "model"
        outside.mkdir()
        shutil.copytree(draw.choice(templates), folder)
        for _ in range(draw.choice([1, 1, 2, 3])):
            draw.choice(CHANGES)(folder, draw)
        before = state_of(tmp_path)
        first = load(folder, 0)
        if first is not None:
            loaded += 1
            assert np.isfinite(first).all(), seed
            second = load(folder, 1)
            assert second is not None, seed
            assert np.array_equal(first, second), seed
        assert state_of(tmp_path) == before, seed
        assert not connections, seed
        assert torch.get_default_dtype() == torch.float32, seed
        shutil.rmtree(folder)
        shutil.rmtree(outside)
    assert 0.1 * len(seeds) < loaded < 0.7 * len(seeds)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 1_000_000  # KiB
    fault(
        "J1",
        "a model's folder with changed settings, tokenizer, weights and files",
        tried=len(seeds),
        survived=len(seeds),
    )
