"""Releases are stock folders; pushing them goes through a real client to a real HTTP server on loopback."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from huggingface_hub import HfApi, ModelCard, constants
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Module
from transformers import AutoModel, AutoTokenizer

from metaphrase.card import AlignmentModelCardData
from metaphrase.hub import push, release, release_files, verify
from tests.hub_server import Hub, serve_hub

RECIPE = {"name": "tr", "terms": [{"objective": "tr", "weight": 1.0}]}
TEXTS = ["the dog sleeps", "der Hund schläft tief und fest"]
STOCK_FILES = [
    *("1_Pooling/config.json", "README.md", "config.json", "config_sentence_transformers.json", "model.safetensors"),
    *("modules.json", "recipe.yaml", "reference.json", "sentence_bert_config.json"),
    *("tokenizer.json", "tokenizer_config.json"),
]
# huggingface_hub hands httpx2 a stream as `data` where `content` is wanted by now.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
CANARY = "hf_CANARYcanaryCANARYcanary0123456789"


@pytest.fixture
def pooled_encoder(tiny_encoder_dir) -> SentenceTransformer:
    """As transformers loads it by default: with a pooler made up at random."""
    model = SentenceTransformer(str(tiny_encoder_dir), device="cpu")
    assert model[0].auto_model.pooler is not None
    return model


@pytest.fixture
def released(tiny_encoder, tmp_path) -> Path:
    return release(tiny_encoder, tmp_path / "out", recipe=RECIPE)


class TestRelease:
    def test_holds_the_stock_files_and_nothing_else(self, released):
        files = sorted(str(path.relative_to(released)) for path in released.rglob("*") if path.is_file())
        assert files == STOCK_FILES == release_files(released)
        assert list(released.parent.iterdir()) == [released]

    def test_loads_with_both_libraries_and_agrees(self, tiny_encoder, released):
        expected = tiny_encoder.encode(TEXTS)
        assert np.abs(SentenceTransformer(str(released), device="cpu").encode(TEXTS) - expected).max() <= 1e-5
        batch = AutoTokenizer.from_pretrained(released)(TEXTS, padding=True, return_tensors="pt")
        with torch.no_grad():
            hidden = AutoModel.from_pretrained(released)(**batch).last_hidden_state
        assert np.abs(hidden[:, 0].numpy() - expected).max() <= 1e-5

    def test_has_no_pooler_and_the_model_keeps_its_own(self, pooled_encoder, tmp_path):
        pooler = pooled_encoder[0].auto_model.pooler
        folder = release(pooled_encoder, tmp_path / "out", recipe=None)
        assert not any("pooler" in name for name in load_file(folder / "model.safetensors"))
        assert SentenceTransformer(str(folder), device="cpu")[0].auto_model.pooler is None
        assert pooled_encoder[0].auto_model.pooler is pooler

    def test_leaves_the_training_model_as_it_was(self, tiny_encoder, tmp_path):
        tiny_encoder.prompts, tiny_encoder.default_prompt_name = {"query": "query: "}, "query"
        tiny_encoder.train()
        before = {name: tensor.clone() for name, tensor in tiny_encoder.state_dict().items()}
        folder = release(tiny_encoder, tmp_path / "out", recipe=RECIPE)
        assert tiny_encoder.training
        assert tiny_encoder.prompts == {"query": "query: "}
        assert tiny_encoder.default_prompt_name == "query"
        assert all(torch.equal(tensor, before[name]) for name, tensor in tiny_encoder.state_dict().items())
        assert json.loads((folder / "config_sentence_transformers.json").read_text())["default_prompt_name"] is None

    def test_stores_no_prompts_unless_asked(self, tiny_encoder, tmp_path):
        tiny_encoder.prompts = {"query": "query: "}
        plain = SentenceTransformer(str(release(tiny_encoder, tmp_path / "plain", recipe=None)), device="cpu")
        asked = release(tiny_encoder, tmp_path / "asked", recipe=None, prompts={"query": "query: "})
        assert not any(plain.prompts.values())
        assert SentenceTransformer(str(asked), device="cpu").prompts["query"] == "query: "

    def test_keeps_the_sequence_length(self, tiny_encoder, tmp_path):
        tiny_encoder.max_seq_length = 7
        folder = release(tiny_encoder, tmp_path / "out", recipe=None)
        assert SentenceTransformer(str(folder), device="cpu").max_seq_length == 7

    def test_tells_its_recipe_and_its_card(self, tiny_encoder, tmp_path):
        card = AlignmentModelCardData(language=["de", "en"], license="mit")
        folder = release(tiny_encoder, tmp_path / "out", recipe=RECIPE, card=card)
        assert yaml.safe_load((folder / "recipe.yaml").read_text()) == RECIPE
        assert (folder / "README.md").read_text().startswith("---\n")
        assert {"tr", "metaphrase"} <= set(ModelCard.load(folder / "README.md").data.tags)

    def test_refuses_modules_that_only_this_code_knows(self, tiny_encoder, tmp_path):
        class Head(Module):
            def forward(self, features):
                return features

            def save(self, output_path, *args, **kwargs):
                pass

        tiny_encoder.append(Head())
        with pytest.raises(ValueError, match=r"Module \S+Head is not part of sentence-transformers"):
            release(tiny_encoder, tmp_path / "out", recipe=None)
        assert not (tmp_path / "out").exists()

    def test_refuses_embeddings_that_are_not_finite(self, tiny_encoder, tmp_path):
        with torch.no_grad():
            tiny_encoder[0].auto_model.embeddings.word_embeddings.weight.fill_(torch.nan)
        with pytest.raises(ValueError, match="not finite"):
            release(tiny_encoder, tmp_path / "out", recipe=None)
        assert list(tmp_path.iterdir()) == []

    def test_leaves_checkpoints_alone_and_replaces_an_earlier_release(self, tiny_encoder, released):
        for path in (
            "checkpoint-3/optimizer.pt",
            "heads/model.safetensors",
            "runs/log",
            "run.json",
            "training_args.bin",
        ):
            (released / path).parent.mkdir(exist_ok=True)
            (released / path).write_text("kept")
        with torch.no_grad():
            tiny_encoder[0].auto_model.embeddings.word_embeddings.weight.mul_(2)
        release(tiny_encoder, released, recipe=None)
        assert (released / "checkpoint-3/optimizer.pt").read_text() == "kept"
        assert (released / "run.json").read_text() == "kept"
        assert not (released / "recipe.yaml").exists()
        assert not (released / "training_args.bin").exists()
        loaded = SentenceTransformer(str(released), device="cpu")
        assert np.array_equal(loaded.encode(TEXTS), tiny_encoder.encode(TEXTS))

    @pytest.mark.parametrize("moved", range(len(STOCK_FILES)))
    def test_interrupted_anywhere_never_leaves_a_half_model(self, tiny_encoder, released, monkeypatch, moved):
        before, calls, replace = tiny_encoder.encode(TEXTS), [], Path.replace

        def interrupted(self, target):
            if ".release" in str(self):
                if len(calls) == moved:
                    raise KeyboardInterrupt
                calls.append(self)
            return replace(self, target)

        with torch.no_grad():
            tiny_encoder[0].auto_model.embeddings.word_embeddings.weight.mul_(2)
        monkeypatch.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            release(tiny_encoder, released, recipe=RECIPE)
        assert len(calls) == moved
        assert not np.array_equal(before, tiny_encoder.encode(TEXTS))
        with pytest.raises((OSError, ValueError)):
            SentenceTransformer(str(released), device="cpu", local_files_only=True)
        monkeypatch.undo()
        release(tiny_encoder, released, recipe=RECIPE)
        assert verify(released, device="cpu") == 0

    def test_verify_finds_altered_weights(self, released):
        assert verify(released, device="cpu") == 0
        weights = load_file(released / "model.safetensors")
        name = next(name for name in weights if name.endswith("word_embeddings.weight"))
        weights[name] += 0.01 * torch.randn_like(weights[name])
        save_file(weights, released / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(RuntimeError, match="does not give its reference embeddings"):
            verify(released, device="cpu")


@pytest.fixture
def hub():
    with serve_hub() as server:
        yield server


@pytest.fixture
def online(hub: Hub, monkeypatch, tmp_path) -> Hub:
    """Lets this process reach the loopback Hub as one without Xet, with the token of `tester`."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(tmp_path / "harnesses.json"))
    monkeypatch.setenv("HF_TOKEN", "hf_write")
    return hub


def remote_files(hub: Hub, repo_id: str, revision: str = "main") -> list[str]:
    return sorted(hub.repositories["model", repo_id].resolve(revision).tree)


class TestPush:
    def test_uploads_release_files_only(self, online, released):
        for path in (
            "checkpoint-3/optimizer.pt",
            "heads/model.safetensors",
            "runs/log",
            "pytorch_model.bin",
            "run.json",
        ):
            (released / path).parent.mkdir(exist_ok=True)
            (released / path).write_bytes(b"not for the world")
        url = push(released, "acme/tiny")
        assert remote_files(online, "acme/tiny") == STOCK_FILES
        assert url == f"{online.url}/acme/tiny/commit/{online.repositories['model', 'acme/tiny'].branches['main']}"

    def test_the_card_learns_its_address(self, online, released):
        push(released, "acme/tiny")
        entry = online.repositories["model", "acme/tiny"].resolve("main").tree["README.md"]
        assert 'SentenceTransformer("acme/tiny")' in online.blobs[entry.blob].decode()
        assert "acme/tiny" not in (released / "README.md").read_text()

    def test_again_without_changes_makes_no_commit(self, online, released):
        first = push(released, "acme/tiny")
        assert push(released, "acme/tiny") == first
        assert len(online.repositories["model", "acme/tiny"].commits) == 2  # the initial one and the release

    def test_again_with_changes_uploads_only_these(self, online, tiny_encoder, released):
        push(released, "acme/tiny")
        with torch.no_grad():
            tiny_encoder[0].auto_model.embeddings.word_embeddings.weight.mul_(2)
        release(tiny_encoder, released, recipe=RECIPE)
        online.requests.clear()
        push(released, "acme/tiny", commit_message="Twice as large")
        assert [r["method"] for r in online.requests if r["path"].startswith("/__lfs/")] == ["PUT"]
        head = online.repositories["model", "acme/tiny"].resolve("main")
        assert (head.title, head.user) == ("Twice as large", "tester")

    def test_to_a_branch_leaves_main_alone(self, online, released):
        push(released, "acme/tiny", revision="next/one")
        assert remote_files(online, "acme/tiny") == []
        assert remote_files(online, "acme/tiny", "next/one") == STOCK_FILES

    def test_private_stays_private(self, online, released):
        push(released, "acme/secret", private=True)
        assert HfApi().repo_info("acme/secret").private
        HfApi().create_repo("acme/open")
        with pytest.raises(ValueError, match="acme/open exists and is public"):
            push(released, "acme/open", private=True)
        assert remote_files(online, "acme/open") == []

    @pytest.mark.parametrize(
        ("token", "repo_id", "message"),
        [
            ("hf_wrongwrongwrongwrong", "acme/tiny", r"does not accept HF_TOKEN for acme/tiny \(401\)"),
            ("hf_write", "nobody/tiny", r"does not let HF_TOKEN write to nobody/tiny \(403\): .* access to 'nobody'"),
            ("hf_read", "acme/tiny", r"does not let HF_TOKEN write to acme/tiny \(403\)"),
        ],
    )
    def test_a_refusal_names_repository_and_token_but_not_its_value(
        self, online, released, monkeypatch, token, repo_id, message
    ):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(PermissionError, match=message) as caught:
            push(released, repo_id)
        assert token not in str(caught.value)
        assert f"push it later with `metaphrase push {released} --to {repo_id}`" in str(caught.value)

    def test_a_read_token_cannot_write_to_an_existing_repository(self, online, released):
        push(released, "acme/tiny")
        with pytest.raises(PermissionError, match=r"does not let the given token write to acme/tiny \(403\)"):
            push(released, "acme/tiny", token="hf_other")

    def test_without_a_token_nothing_is_asked(self, online, released, monkeypatch):
        monkeypatch.delenv("HF_TOKEN")
        with pytest.raises(PermissionError, match=r"set HF_TOKEN or run `hf auth login`"):
            push(released, "acme/tiny")
        assert online.requests == []

    def test_a_vanished_repository_and_a_broken_server_are_named(self, online, released):
        online.faults.append({"path": "/preupload/", "status": 404, "code": "RepoNotFound"})
        with pytest.raises(FileNotFoundError, match=r"knows no acme/tiny, or does not show it to HF_TOKEN \(404\)"):
            push(released, "acme/tiny")
        online.faults.append({"path": "/commit/", "status": 507, "error": "disk full"})
        with pytest.raises(ConnectionError, match=r"upload to acme/tiny failed: .*disk full"):
            push(released, "acme/tiny")
        online.blobs.clear()
        online.faults.append({"path": "/__lfs/", "status": 403, "error": "Request has expired"})
        with pytest.raises(ConnectionError, match=r"failed: Error while uploading '\S+' .*Request has expired"):
            push(released, "acme/tiny")
        assert remote_files(online, "acme/tiny") == []

    def test_offline_says_how_to_push_later(self, online, released, monkeypatch):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(ConnectionError, match=r"could not be reached.*push it later with `metaphrase push"):
            push(released, "acme/tiny")
        assert online.requests == []

    def test_a_hub_without_xet_is_explained(self, online, released, monkeypatch):
        pytest.importorskip("hf_xet")
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
        with pytest.raises(ConnectionError, match=r"has no Xet storage: set HF_HUB_DISABLE_XET=1 and push again"):
            push(released, "acme/tiny")
        assert any("/xet-write-token/" in request["path"] for request in online.requests)

    def test_refuses_what_is_no_release(self, online, released, tmp_path):
        with pytest.raises(ValueError, match=r"named organisation/name; got 'tiny'"):
            push(released, "tiny")
        with pytest.raises(FileNotFoundError, match=r"is no release: it lacks modules.json and config.json"):
            push(tmp_path, "acme/tiny")
        (released / "optimizer.pt").write_bytes(b"")
        with pytest.raises(ValueError, match=r"holds optimizer.pt: it is a training checkpoint"):
            push(released, "acme/tiny")
        assert online.requests == []

    def test_refuses_weights_that_are_not_finite(self, online, released):
        weights = load_file(released / "model.safetensors")
        weights[next(iter(weights))].view(-1)[3] = torch.inf
        save_file(weights, released / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"Tensor \S+ in \S+model.safetensors is not finite"):
            push(released, "acme/tiny")
        assert online.requests == []

    def test_refuses_module_folders_outside_the_release(self, online, released):
        modules = json.loads((released / "modules.json").read_text())
        modules[1]["path"] = "../elsewhere"
        (released / "modules.json").write_text(json.dumps(modules))
        with pytest.raises(ValueError, match=r"must lie directly in"):
            push(released, "acme/tiny")


def test_round_trip_between_two_processes(hub, tiny_encoder, released, tmp_path):
    """Create, push by command, download by SentenceTransformer: the same bits, and the token nowhere."""
    hub.tokens[CANARY] = {"name": "tester", "role": "write", "orgs": ["acme"]}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": CANARY,
        "HF_HUB_DISABLE_XET": "1",
        "HF_DEBUG": "1",
    }

    def python(code: str, *arguments: str) -> str:
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    output = python(
        "from metaphrase.cli import main; raise SystemExit(main())", "push", str(released), "--to", "acme/tiny"
    )
    assert re.search(rf"{hub.url}/acme/tiny/commit/[0-9a-f]{{40}}", output)
    output += python(
        "import sys, numpy as np\n"
        "from sentence_transformers import SentenceTransformer\n"
        "from metaphrase.hub import verify\n"
        "assert verify('acme/tiny', device='cpu') == 0\n"
        "model = SentenceTransformer('acme/tiny', device='cpu')\n"
        "np.save(sys.argv[1], model.encode(sys.argv[2:]))\n",
        str(tmp_path / "embeddings.npy"),
        *TEXTS,
    )
    assert np.array_equal(np.load(tmp_path / "embeddings.npy"), tiny_encoder.encode(TEXTS))

    assert CANARY not in output
    leaks = [path for path in tmp_path.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]
    assert leaks == []
    assert CANARY not in json.dumps(hub.requests)
    assert all(CANARY.encode() not in blob for blob in hub.blobs.values())
    elsewhere = [r for r in hub.requests if r["path"].startswith(("/__cdn/", "/__lfs/"))]
    assert {r["path"].split("/")[1] for r in elsewhere} == {"__cdn", "__lfs"}
    assert not any(r["token"] for r in elsewhere)
    assert {r["host"].split(":")[0] for r in elsewhere if "/__cdn/" in r["path"]} == {"localhost"}
