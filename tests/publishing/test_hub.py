"""Push and pull over real HTTP, to a Hub on loopback that fails in every way that Hubs fail."""

import gc
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from datasets import Dataset
from huggingface_hub import HfApi, ModelCard, close_session, constants, get_session, hf_hub_download
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from metaphrase.checkpoints.folders import publish
from metaphrase.cli import main
from metaphrase.corpus import load_corpus
from metaphrase.corpus.writing import write_corpus
from metaphrase.encoders.debiasing import without_directions
from metaphrase.encoders.loading import find_model, load_encoder, origin_of
from metaphrase.exceptions import (
    CorpusError,
    HubAccessError,
    HubConnectionError,
    HubError,
    MetaphraseError,
    ModelFileError,
    UsageError,
)
from metaphrase.io import hub as hub_requests
from metaphrase.io.digests import file_facts, weights_digest
from metaphrase.io.hub import download
from metaphrase.merging import TaskVector
from metaphrase.publishing import hub as publishing
from metaphrase.publishing.card import AlignmentModelCardData
from metaphrase.publishing.contents import release_files, write_manifest
from metaphrase.publishing.hub import push_corpus, push_vector
from metaphrase.publishing.release import release, verify
from metaphrase.training.arguments import AlignmentTrainingArguments
from metaphrase.training.configuration import RunConfig
from metaphrase.training.heads import AlignmentHeads
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import Recipe
from metaphrase.training.run import TrainingRun
from metaphrase.training.trainer import AlignmentTrainer
from tests.conftest import mostly_slow
from tests.faults.children import Child
from tests.hub_server import Hub, Repository, environment, reach, serve_hub
from tests.publishing.conftest import RECIPE
from tests.xet_store import available

# huggingface_hub hands httpx2 a stream as `data` where `content` is wanted by now.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

TEXTS = ["the dog sleeps", "der Hund schläft tief und fest"]
CANARY = "hf_CANARYcanaryCANARYcanary0123456789"
#: What comes back is compared with its reference embeddings where a test is about that; elsewhere it takes too long.
push = partial(publishing.push, check=False)


@pytest.fixture
def other(released, tmp_path) -> Path:
    """A release with other weights, and with one file fewer."""
    folder = Path(shutil.copytree(released, tmp_path / "other"))
    weights = {name: tensor * 2 for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "recipe.yaml").unlink()
    write_manifest(folder)
    return folder


def repository(hub: Hub, repo_id: str = "acme/tiny") -> Repository:
    return hub.repositories["model", repo_id]


def remote_files(hub: Hub, repo_id: str = "acme/tiny", revision: str = "main") -> list[str]:
    return sorted(repository(hub, repo_id).resolve(revision).tree)


def requests(hub: Hub, path: str, method: str | None = None) -> int:
    return sum(1 for r in hub.requests if re.search(path, r["path"]) and method in (None, r["method"]))


class TestPush:
    def test_uploads_release_files_only(self, online, released, template):
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
        assert remote_files(online) == release_files(template)
        assert url == f"{online.url}/acme/tiny/commit/{repository(online).branches['main']}"

    def test_notices_are_pushed_and_not_deleted(self, online, released, other):
        (released / "NOTICE.md").write_text("Thanks.\n")
        write_manifest(released)
        push(released, "acme/tiny")
        push(other, "acme/tiny")
        assert "NOTICE.md" in remote_files(online)

    def test_the_card_learns_its_address(self, online, released):
        push(released, "acme/tiny")
        entry = repository(online).resolve("main").tree["README.md"]
        assert 'SentenceTransformer("acme/tiny")' in online.blobs[entry.blob].decode()
        assert "acme/tiny" not in (released / "README.md").read_text()

    def test_a_card_that_is_not_yaml_is_refused_before_a_repository_is_made(self, online, released):
        (released / "README.md").write_text("---\nlicense: mit\n  x: [\n---\n# Mine\n", encoding="utf-8")
        with pytest.raises(
            ModelFileError, match=r"The metadata of .*README.md are not valid YAML: .*line 2, column 4"
        ):
            push(released, "acme/tiny")
        assert not online.repositories

    def test_a_run_remembers_the_commit_of_its_encoder(self, online, released, tmp_path):
        sha = push(released, "acme/tiny").rpartition("/")[2]
        for name in ("acme/tiny", f"acme/tiny@{sha}", str(released)):
            config = RunConfig(
                recipe="tr", model=name, corpus=["a.tsv"], output_dir=str(tmp_path / "run"), use_cpu=True
            )
            run = TrainingRun(config)
            run.load_encoder()
            assert run.base == (name if name == str(released) else f"acme/tiny@{sha}")

    def test_a_vector_of_a_base_without_a_commit_is_refused(self, online, released, other, tmp_path):
        push(released, "acme/tiny")
        vector = TaskVector.between(load_encoder(released), load_encoder(other), base_name="acme/tiny")
        with pytest.raises(UsageError, match=r'is acme/tiny, without a commit, .* base_name="acme/tiny@COMMIT"'):
            push_vector(vector.save(tmp_path / "v.safetensors"), "acme/vector")

    def test_again_without_changes_makes_no_commit(self, online, released):
        first = push(released, "acme/tiny")
        assert push(released, "acme/tiny") == first
        assert len(repository(online).commits) == 2  # the initial one and the release

    def test_another_release_replaces_the_first_and_nothing_else(self, online, released, other, template):
        (released / "heads").mkdir()
        shutil.copy(released / "model.safetensors", released / "heads")
        push(released, "acme/tiny", with_heads=True)
        online.put("acme/tiny", {"LICENSE": b"MIT", "training_args.bin": b"a pickle", "notes/a.json": b"{}"})
        online.requests.clear()
        push(other, "acme/tiny", commit_message="Twice as large")
        assert requests(online, "^/__lfs/", "PUT") == 1
        assert remote_files(online) == sorted(
            [*(set(release_files(template)) - {"recipe.yaml"}), "LICENSE", "notes/a.json"]
        )
        head = repository(online).resolve("main")
        assert (head.title, head.user) == ("Twice as large", "tester")

    def test_to_a_branch_leaves_main_alone(self, online, released, template):
        push(released, "acme/tiny", revision="next/one")
        assert remote_files(online) == []
        assert remote_files(online, revision="next/one") == release_files(template)

    def test_private_stays_private(self, online, released):
        push(released, "acme/secret", private=True)
        assert HfApi().repo_info("acme/secret").private
        HfApi().create_repo("acme/open")
        with pytest.raises(ValueError, match="acme/open exists and is public"):
            push(released, "acme/open", private=True)
        assert remote_files(online, "acme/open") == []

    @pytest.mark.parametrize("kind", ["model", "dataset"])
    def test_a_private_repository_that_turns_public_is_told(
        self, online, released, bitext, tmp_path, capsys, fault, kind
    ):
        """During the commit, that is after the check before it."""
        corpus = write_corpus(Dataset.from_list(bitext), tmp_path / "pairs.parquet")
        what, call = (released, push) if kind == "model" else (corpus, push_corpus)
        message = r"acme/a became public during the push, so everybody can read http://\S+/commit/[0-9a-f]{40}. Make it private"

        def publish(name: str) -> None:
            online.repositories[kind, name].private = False

        online.faults.append({"path": "/commit/", "then": lambda: publish("acme/a")})
        with pytest.raises(HubError, match=message):
            call(what, "acme/a", private=True)
        online.faults.append({"path": "/commit/", "then": lambda: publish("acme/b")})
        assert main(["push", str(what), "--repo", "acme/b", "--private"]) == 2
        said = capsys.readouterr()
        assert re.search(message.replace("acme/a", "acme/b"), said.err)
        assert "Pushed" not in said.out
        assert main(["push", str(what), "--repo", "acme/b", "--private"]) == 2  # as long as it is public
        assert "acme/b exists and is public" in capsys.readouterr().err
        fault("G2", f"a private {kind} repository becomes public during the commit", tried=2, survived=2)

    def test_what_differs_from_its_reference_is_not_pushed(self, online, other):
        with pytest.raises(
            RuntimeError, match=r"does not reproduce its reference embeddings: .* download or release it again"
        ):
            push(other, "acme/tiny", check=True)
        assert online.requests == []

    def test_what_comes_back_otherwise_is_found(self, online, released, monkeypatch):
        def altered(*args, **kwargs):
            folder = download(*args, **kwargs)
            weights = {name: tensor * 2 for name, tensor in load_file(folder / "model.safetensors").items()}
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
            return folder

        monkeypatch.setattr(publishing, "download", altered)
        with pytest.raises(RuntimeError, match=r"model.safetensors in \S+ differs from the file that was pushed"):
            push(released, "acme/tiny", check=True)

    def test_other_files_of_the_repository_are_not_downloaded(self, online, released):
        online.put("acme/tiny", {"huge.json": b"{}"})
        push(released, "acme/tiny", check=True)
        assert requests(online, "/resolve/.*/config.json")
        assert not requests(online, "/resolve/.*/huge.json")

    def test_refuses_what_is_no_release(self, online, released, tmp_path):
        with pytest.raises(ValueError, match=r"named organisation/name, .*; got 'tiny'"):
            push(released, "tiny")
        with pytest.raises(UsageError, match=r"organisation/name, in letters, .*; got 'acme/my model'"):
            push(released, "acme/my model")
        with pytest.raises(FileNotFoundError, match=r"has no heads to push"):
            push(released, "acme/tiny", with_heads=True)
        (tmp_path / "empty").mkdir()
        with pytest.raises(
            FileNotFoundError, match=r"missing modules.json, config.json and release.json. Push the output"
        ):
            push(tmp_path / "empty", "acme/tiny")
        weights = (released / "model.safetensors").rename(tmp_path / "weights")
        with pytest.raises(FileNotFoundError, match=r"missing model.safetensors. Push the output folder"):
            push(released, "acme/tiny")
        weights.rename(released / "model.safetensors")
        (released / "reference.json").rename(tmp_path / "reference")
        with pytest.raises(
            FileNotFoundError, match=r"has no reference.json. Name a release, or release the model again"
        ):
            verify(released)
        (tmp_path / "reference").rename(released / "reference.json")
        (released / "optimizer.pt").write_bytes(b"")
        with pytest.raises(ValueError, match=r"contains optimizer.pt: it is a training checkpoint"):
            push(released, "acme/tiny")
        assert online.requests == []

    def test_refuses_weights_that_are_not_finite(self, online, released):
        weights = load_file(released / "model.safetensors")
        weights[next(iter(weights))].view(-1)[3] = torch.inf
        save_file(weights, released / "model.safetensors", metadata={"format": "pt"})
        write_manifest(released)
        with pytest.raises(
            ValueError, match=r"Tensor \S+ in \S+ has NaN or infinite values; .* Release an earlier checkpoint"
        ):
            push(released, "acme/tiny")
        assert online.requests == []

    def test_refuses_module_folders_outside_the_release(self, online, released):
        modules = json.loads((released / "modules.json").read_text())
        modules[1]["path"] = "../elsewhere"
        (released / "modules.json").write_text(json.dumps(modules))
        with pytest.raises(ValueError, match=r"modules.json was altered after the release was written"):
            push(released, "acme/tiny")


class TestRefusals:
    """One sentence each, with the repository, the token's name and the command for later, and no second attempt."""

    @pytest.mark.parametrize(
        ("token", "repo_id", "message"),
        [
            ("hf_wrongwrongwrongwrong", "acme/tiny", r"does not accept HF_TOKEN for acme/tiny \(401\)"),
            (
                "hf_write",
                "nobody/tiny",
                r"does not allow HF_TOKEN to write to nobody/tiny \(403\): .* access to 'nobody'",
            ),
            ("hf_read", "acme/tiny", r"does not allow HF_TOKEN to write to acme/tiny \(403\)"),
        ],
    )
    def test_name_repository_and_token_but_not_its_value(
        self, online, released, monkeypatch, fault, token, repo_id, message
    ):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(PermissionError, match=message) as caught:
            push(released, repo_id)
        assert isinstance(caught.value, MetaphraseError)
        assert token not in "".join(traceback.format_exception(caught.value))
        assert f"push it later with `metaphrase push {released} --repo {repo_id} --no_check`" in str(caught.value)
        assert requests(online, "/repos/create") == 1
        reason = "unknown token" if "401" in message else "token without write access"
        fault("G1", f"the Hub refuses a push: {reason}", tried=1, survived=1)

    def test_a_read_token_cannot_write_to_an_existing_repository(self, online, released):
        push(released, "acme/tiny")
        with pytest.raises(PermissionError, match=r"does not allow the given token to write to acme/tiny \(403\)"):
            push(released, "acme/tiny", token="hf_other")

    def test_without_a_token_nothing_is_asked(self, online, released, monkeypatch):
        monkeypatch.delenv("HF_TOKEN")
        with pytest.raises(PermissionError, match=r"set HF_TOKEN or run `hf auth login`"):
            push(released, "acme/tiny")
        assert online.requests == []

    def test_an_empty_revision_is_no_branch(self, online, released):
        with pytest.raises(UsageError, match="The name of the branch is empty"):
            push(released, "acme/tiny", revision="")
        assert online.requests == []
        with pytest.raises(UsageError, match="The revision of acme/tiny is empty"):
            load_encoder("acme/tiny@")

    def test_a_vanished_repository(self, online, released):
        online.faults.append({"path": "/preupload/", "status": 404, "code": "RepoNotFound"})
        with pytest.raises(
            FileNotFoundError, match=r"has no repository acme/tiny, or HF_TOKEN has no access to it \(404\)"
        ):
            push(released, "acme/tiny")

    @pytest.mark.long
    def test_private_gated_and_missing_repositories_are_told_to_readers(self, online, released, tmp_path, fault):
        push(released, "acme/secret", private=True)
        push(released, "acme/gated")
        HfApi().update_repo_settings("acme/gated", gated="manual")
        read = partial(download, cache_dir=tmp_path / "theirs")
        with pytest.raises(
            FileNotFoundError, match=r"has no repository acme/secret, or the given token has no access to it"
        ):
            read("acme/secret", token="hf_other")
        with pytest.raises(
            PermissionError,
            match=r"acme/gated is gated, and the given token has no access to it \(403\): request access",
        ):
            read("acme/gated", token="hf_other")
        with pytest.raises(FileNotFoundError, match=r"has no repository acme/nothing"):
            read("acme/nothing")
        assert (read("acme/secret") / "config.json").is_file()
        assert (read("acme/gated") / "config.json").is_file()
        fault("G1", "private, gated and missing repositories", tried=3, survived=3)

    def test_a_file_that_the_token_may_not_read(self, online, released, tmp_path):
        """The client itself advises to check the connection."""
        push(released, "acme/tiny")
        online.faults.append({"path": "/resolve/.*/config.json", "status": 403, "times": 9})
        with pytest.raises(PermissionError, match=r"does not allow HF_TOKEN to read acme/tiny \(403\)"):
            download("acme/tiny", cache_dir=tmp_path / "cache")

    @pytest.mark.long
    def test_the_command_for_later_is_the_whole_one(self, online, released, bitext, tmp_path):
        """One that left out --private would make a public repository of what was to be private."""
        folder = released.rename(tmp_path / "my run")
        (folder / "heads").mkdir()
        shutil.copy(folder / "model.safetensors", folder / "heads")
        corpus = write_corpus(Dataset.from_list(bitext), tmp_path / "my pairs.parquet")
        wish = {"private": True, "revision": "next/one"}
        model = partial(push, folder, "acme/tiny", with_heads=True, **wish)
        pairs = partial(push_corpus, corpus, "acme/pairs", license="cc-by-4.0", **wish)
        for pushed, path, rest in (
            (model, folder, "acme/tiny --private --revision next/one --with_heads --no_check"),
            (pairs, corpus, "acme/pairs --private --revision next/one --license cc-by-4.0"),
        ):
            online.faults.append({"path": "/repos/create", "status": 503, "times": 2})
            with pytest.raises(ConnectionError) as caught:
                pushed()
            command = f"metaphrase push '{path}' --repo {rest}"
            assert str(caught.value).endswith(f"Nothing is lost; push it later with `{command}`.")
            assert main([*shlex.split(command)[1:], "--quiet"]) == 0
        assert [repository.private for repository in online.repositories.values()] == [True, True]
        assert [len(one.commits) for one in online.repositories.values()] == [2, 2]

    def test_offline_says_how_to_push_later(self, online, released, monkeypatch, fault):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(
            ConnectionError, match=r"HF_HUB_OFFLINE is set. Unset it.*push it later with `metaphrase push"
        ):
            push(released, "acme/tiny")
        assert online.requests == []
        fault("G6", "a push without a network", tried=1, survived=1)

    def test_a_hub_that_is_not_there(self, online, released, monkeypatch, waits):
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(ConnectionError, match=r"Hub at http://127.0.0.1:9 could not be reached: .*push it later"):
            push(released, "acme/tiny")
        assert waits == [1.0]

    def test_a_hub_without_xet_is_explained(self, online, released, monkeypatch):
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
        with pytest.raises(ConnectionError, match=r"has no Xet storage: set HF_HUB_DISABLE_XET=1 and push again"):
            push(released, "acme/tiny")
        assert requests(online, "/xet-write-token/")


class TestFaults:
    @pytest.mark.parametrize(
        "trouble",
        [
            {"path": "/commit/", "status": 503, "times": 3},
            {"path": "/commit/", "status": 429, "headers": {"Retry-After": "7"}},
            {"path": "/repos/create", "status": 500},
            {"path": "^/__lfs/", "status": 403, "error": "Request has expired"},
            {"path": "/commit/", "truncate": 0},
            *mostly_slow(
                [
                    {"path": "/commit/", "status": 500},
                    {"path": "/commit/", "status": 409},
                    {"path": "/commit/", "status": 412},
                    {"path": "/preupload/", "status": 503},
                    {"path": "^/__lfs/", "status": 500},
                    {"path": "/objects/verify", "status": 404},
                    {"path": "/objects/batch", "status": 502},
                    {"path": "^/api/models/acme/tiny$", "status": 500},
                ],
                (),
            ),
        ],
        ids=lambda trouble: f"{trouble['path'].strip('^/')}-{trouble.get('status', 'answer lost')}",
    )
    def test_pass_and_leave_one_commit(self, online, released, template, waits, fault, trouble):
        online.faults.append(dict(trouble))
        url = push(released, "acme/tiny")
        assert online.faults[0].get("times", 1) < 1
        assert remote_files(online) == release_files(template)
        assert len(repository(online).commits) == 2
        assert url.endswith(repository(online).branches["main"])
        if "headers" in trouble:
            assert 7.0 in waits
        lost = "truncate" in trouble
        kind = "reply lost after the commit" if lost else f"{trouble['path'].strip('^$/')} answers {trouble['status']}"
        fault("G5" if lost else "G3", kind, tried=1, survived=1)

    @pytest.mark.parametrize(
        "trouble",
        [
            {"path": "/branch/", "status": 503},
            {"path": "/branch/", "truncate": 0},
            {"path": "^/api/models/acme/tiny$", "status": 502},
        ],
        ids=["the branch", "the branch, made though", "whether it is private"],
    )
    def test_before_the_upload_pass(self, online, released, template, waits, fault, trouble):
        online.faults.append(dict(trouble))
        push(released, "acme/tiny", private=True, revision="next")
        assert online.faults[0]["times"] < 1
        assert waits == [1.0]
        assert remote_files(online, revision="next") == release_files(template)
        assert remote_files(online) == []
        kind = (
            f"{trouble['path'].strip('^$')} {'answers ' + str(trouble['status']) if 'status' in trouble else 'is cut'}"
        )
        fault("G3", f"a private push to a branch: {kind}", tried=1, survived=1)

    @pytest.fixture
    def impatient(self, monkeypatch):
        monkeypatch.setattr(hub_requests, "REQUEST_TIMEOUT", 1.0)
        close_session()
        yield
        close_session()

    @pytest.mark.parametrize(
        ("number", "path", "wait"),
        mostly_slow(
            [("G3", "/repos/create", "delay"), ("G3", "/commit/", "delay"), ("G5", "/commit/", "late")],
            [("G5", "/commit/", "late")],
        ),
    )
    def test_of_a_hub_that_falls_silent_pass(
        self, online, released, template, waits, fault, impatient, number, path, wait
    ):
        online.faults.append({"path": path, wait: 2.0})
        url = push(released, "acme/tiny")
        assert waits == [1.0]
        assert remote_files(online) == release_files(template)
        assert len(repository(online).commits) == 2
        assert url.endswith(repository(online).branches["main"])
        assert requests(online, "/commit/", "POST") == (2 if path == "/commit/" and wait == "delay" else 1)
        done = "after the work" if wait == "late" else "before it"
        fault(number, f"no answer to {path} within the limit, {done}", tried=1, survived=1)

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("path", "revision"),
        mostly_slow(
            [("^/api/models/acme/tiny$", None), ("/revision/", "main"), ("/commits/", None)], [("/commits/", None)]
        ),
    )
    def test_of_a_hub_that_does_not_say_what_it_holds_pass(
        self, online, released, template, waits, fault, impatient, path, revision
    ):
        """The client sets no limit for these requests, whatever its limit for others is."""
        online.faults += [{"path": "/commit/", "status": 503}, {"path": path, "delay": 2.0}]
        push(released, "acme/tiny", revision=revision)
        assert all(left.get("times", 1) < 1 for left in online.faults)
        assert len(waits) == 2
        assert remote_files(online) == release_files(template)
        assert len(repository(online).commits) == 2
        assert len(get_session().event_hooks["request"]) == 1  # the client is as it was
        fault("G3", f"a push gets no answer to {path.strip('^$')} within the limit", tried=1, survived=1)

    @pytest.mark.long
    @pytest.mark.parametrize("path", mostly_slow(["/revision/", "/tree/", "/resolve/", "^/__cdn/"], ["^/__cdn/"]))
    def test_of_a_hub_that_falls_silent_when_asked_for_files_pass(
        self, online, released, tmp_path, fault, impatient, monkeypatch, path
    ):
        for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):  # the client's own limits, for files
            monkeypatch.setattr(constants, name, 1)
        push(released, "acme/tiny")
        online.requests.clear()
        download("acme/tiny", cache_dir=tmp_path / "before")
        undisturbed = len(online.requests)
        online.faults.append({"path": path, "delay": 2.0})
        folder = download("acme/tiny", cache_dir=tmp_path / "cache")
        assert len(online.requests) > 2 * undisturbed
        assert (folder / "model.safetensors").read_bytes() == (released / "model.safetensors").read_bytes()
        fault("G3", f"a download gets no answer to {path.strip('^')} within the limit", tried=1, survived=1)

    def test_a_slow_hub_is_waited_for(self, online, released, waits, fault):
        online.faults += [{"path": path, "delay": 0.2, "times": 9} for path in ("/commit/", "/preupload/", "^/__lfs/")]
        push(released, "acme/tiny")
        assert waits == []
        assert requests(online, "/commit/", "POST") == 1
        fault("G3", "slow answers", tried=1, survived=1)

    def test_patience_ends(self, online, released, waits):
        online.faults.append({"path": "/commit/", "status": 507, "error": "disk full", "times": 99})
        with pytest.raises(ConnectionError, match=r"upload to acme/tiny failed: .*disk full.*push it later"):
            push(released, "acme/tiny")
        assert waits == list(hub_requests.RETRY_PAUSES)
        assert remote_files(online) == []
        online.faults.clear()
        online.requests.clear()
        push(released, "acme/tiny")
        assert requests(online, "^/__lfs/") == 0  # it was there already

    def test_an_upload_that_never_works_names_the_file_and_the_cause(self, online, released):
        online.faults.append({"path": "^/__lfs/", "status": 403, "error": "Request has expired", "times": 99})
        with pytest.raises(ConnectionError, match=r"Error while uploading '\S+' .*Request has expired"):
            push(released, "acme/tiny")

    def test_somebody_commits_meanwhile(self, online, released, template, fault):
        """Between our upload and our commit: theirs stays, ours comes on top of it, nothing is forced."""
        push(released, "acme/tiny", revision="draft")
        theirs = []
        online.faults.append(
            {"path": "/commit/", "then": lambda: theirs.append(online.put("acme/tiny", {"LICENSE": b"MIT"}))}
        )
        push(released, "acme/tiny")
        head = repository(online).resolve("main")
        assert head.parent == theirs[0]
        assert sorted(head.tree) == sorted([*release_files(template), "LICENSE"])
        fault("G2", "another commit between upload and commit", tried=1, survived=1)

    def test_a_retry_after_a_lost_answer_keeps_a_later_push(self, online, released, other, monkeypatch, fault):
        """The client alone would commit the first release again, on top of the second."""
        later = []
        monkeypatch.setattr(time, "sleep", lambda seconds: later.append(push(other, "acme/tiny")))
        online.faults.append({"path": "/commit/", "truncate": 0})
        push(released, "acme/tiny")
        assert len(later) == 1
        assert later[0].endswith(repository(online).branches["main"])
        assert len(repository(online).commits) == 3
        fault("G5", "reply lost after the commit, and another push before the retry", tried=1, survived=1)

    def test_two_pushers_at_once(self, online, released, other, fault):
        """Both end, one after the other, and the head is one of the two releases and no mixture."""
        barrier = threading.Barrier(2, timeout=60)
        online.put("acme/tiny", {"LICENSE": b"MIT"})
        failures = []

        def pushes(folder):
            try:
                barrier.wait()
                push(folder, "acme/tiny", commit_message=folder.name)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=pushes, args=(folder,)) for folder in (released, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        head = repository(online).resolve("main")
        last = {"out": released, "other": other}[head.title]
        assert sorted(head.tree) == sorted([*release_files(last), "LICENSE"])
        assert online.blobs[head.tree["model.safetensors"].blob] == (last / "model.safetensors").read_bytes()
        assert len(repository(online).commits) == 4
        fault("G2", "two pushers at once", tried=2, survived=2)

    @pytest.mark.parametrize(
        ("trouble", "retried"),
        [
            ({"path": "^/__cdn/", "status": 503}, True),
            ({"path": "^/__cdn/", "truncate": 4000, "times": 2}, False),
            ({"path": "/resolve/", "status": 503}, False),
            ({"path": "/tree/", "status": 500}, False),
            ({"path": "/revision/", "status": 502}, True),
        ],
        ids=lambda value: value["path"].strip("^/") if isinstance(value, dict) else "",
    )
    def test_of_a_download_pass(self, online, released, tmp_path, waits, fault, trouble, retried):
        push(released, "acme/tiny")
        online.faults.append(dict(trouble))
        folder = download("acme/tiny", cache_dir=tmp_path / "cache")
        assert (folder / "model.safetensors").read_bytes() == (released / "model.safetensors").read_bytes()
        assert (hub_requests.RETRY_PAUSES[0] in waits) >= retried
        assert all(left["times"] < 1 for left in online.faults)
        fault("G3", f"download: {trouble['path'].strip('^')} {trouble.get('status', 'is cut')}", tried=1, survived=1)

    def test_a_download_that_is_cut_again_and_again_goes_on_later(self, online, released, tmp_path):
        push(released, "acme/tiny")
        online.faults.append({"path": "^/__cdn/", "truncate": 1000, "times": 10_000})
        with pytest.raises(ConnectionError, match=r"download of|could not be reached.*run it again"):
            download("acme/tiny", cache_dir=tmp_path / "cache")
        online.faults.clear()
        folder = download("acme/tiny", cache_dir=tmp_path / "cache")
        assert (folder / "model.safetensors").read_bytes() == (released / "model.safetensors").read_bytes()


class TestStrangers:
    """What a repository of somebody else can do to whoever loads it."""

    @pytest.fixture
    def marker(self, tmp_path) -> Path:
        return tmp_path / "executed"

    def hostile_pickle(self, marker: Path) -> bytes:
        import pickle

        class Payload:
            def __reduce__(self):
                return Path.touch, (marker,)

        return pickle.dumps(Payload())

    def without_weights(self, template: Path) -> dict[str, bytes]:
        return {
            path: (template / path).read_bytes() for path in release_files(template) if path != "model.safetensors"
        }

    def test_pickles_are_not_read(self, online, template, marker, tmp_path, fault):
        pickled = {"pytorch_model.bin": self.hostile_pickle(marker), "training_args.bin": self.hostile_pickle(marker)}
        online.put("evil/pickle", self.without_weights(template) | pickled)
        online.put("evil/raw", {"config.json": (template / "config.json").read_bytes()} | pickled)
        for name in ("evil/pickle", "evil/raw"):
            with pytest.raises(OSError, match=rf"{name} has no weights in safetensors format") as caught:
                load_encoder(name)
            assert isinstance(caught.value, MetaphraseError)
            with pytest.raises((OSError, ValueError)):
                verify(name)
        folder = download("evil/pickle")
        assert not list(folder.rglob("*.bin"))
        local = Path(shutil.copytree(template, tmp_path / "local"))
        (local / "model.safetensors").rename(local / "pytorch_model.bin").write_bytes(pickled["pytorch_model.bin"])
        with pytest.raises(OSError, match=r"local has no weights in safetensors format"):
            load_encoder(local)
        assert not marker.exists()
        fault("H1", "repositories and folders with pickles only", tried=5, survived=5)

    @pytest.mark.parametrize("wish", ["modules", "config", "arguments"])
    def test_their_code_is_not_run(self, online, template, marker, wish, fault):
        files = {path: (template / path).read_bytes() for path in release_files(template)}
        files["evil.py"] = f"from pathlib import Path\nPath({str(marker)!r}).touch()\nclass Evil: pass\n".encode()
        if wish == "modules":
            modules = json.loads(files["modules.json"])
            modules[1]["type"] = "evil.Evil"
            files["modules.json"] = json.dumps(modules).encode()
        else:
            config = json.loads(files["config.json"]) | {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}
            files["config.json"] = json.dumps(
                config | {"auto_map": {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"}}
            )
            files["config.json"] = files["config.json"].encode()
        if wish == "arguments":
            trusting = {"model_args": {"trust_remote_code": True, "use_safetensors": False}}
            files["sentence_bert_config.json"] = json.dumps(
                trusting | {"config_args": {"trust_remote_code": True}}
            ).encode()
        online.put("evil/code", files)
        with pytest.raises(ValueError, match="requires its own code, which is not run"):
            load_encoder("evil/code")
        with pytest.raises((OSError, ValueError)):
            verify("evil/code")
        assert not marker.exists()
        fault("H2", f"code in a repository, requested by its {wish}", tried=2, survived=2)

    @pytest.mark.parametrize("where", ["option", "config", "recipe", "training", "term"])
    def test_no_setting_of_ours_trusts_code(self, template, tmp_path, bitext_path, capsys, where, fault):
        trusting = {"trust_remote_code": True}
        recipe = {"name": "x", "terms": [{"objective": "tr"} | ({"args": trusting} if where == "term" else {})]}
        recipe |= {"recipe": trusting, "training": {"training": trusting}}.get(where, {})
        (tmp_path / "x.yaml").write_text(yaml.safe_dump(recipe))
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(trusting))
        command = [
            "train",
            "--model",
            str(template),
            "--recipe",
            str(tmp_path / "x.yaml"),
            "--corpus",
            str(bitext_path),
        ]
        command += {"option": ["--trust_remote_code"], "config": ["--config", str(tmp_path / "config.yaml")]}.get(
            where, []
        )
        assert main([*command, "--output_dir", str(tmp_path / "out")]) == 2
        assert "trust_remote_code" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
        fault("H2", f"`trust_remote_code` as a setting: {where}", tried=1, survived=1)

    @pytest.mark.parametrize("path", ["../../escaped.txt", "a/../../../escaped.txt", "/tmp/escaped-metaphrase.txt"])
    def test_files_do_not_leave_their_folder(self, online, template, tmp_path, path, fault):
        online.put(
            "evil/path", {name: (template / name).read_bytes() for name in release_files(template)} | {path: b"out"}
        )
        with pytest.raises((OSError, ValueError)):
            download("evil/path", cache_dir=tmp_path / "cache" / "deep" / "inside")
        assert not list(tmp_path.rglob("*escaped*"))
        assert not Path("/tmp/escaped-metaphrase.txt").exists()
        fault("H3", f"a file named {path}", tried=1, survived=1)

    @pytest.mark.long
    def test_a_revision_stays_what_it_was(self, online, released, other, tmp_path, fault, monkeypatch):
        sha = push(released, "acme/tiny").rpartition("/")[2]
        push(other, "acme/tiny")
        monkeypatch.setattr("transformers.utils.hub.TRANSFORMERS_CACHE", str(tmp_path / "tf"), raising=False)
        pinned, moved = load_encoder(f"acme/tiny@{sha}"), load_encoder("acme/tiny")
        assert verify(f"acme/tiny@{sha}") <= 1e-5
        original = SentenceTransformer(str(released), device="cpu").encode(TEXTS)
        assert np.array_equal(pinned.encode(TEXTS), original)
        assert not np.array_equal(moved.encode(TEXTS), original)
        assert origin_of(pinned) == f"acme/tiny@{sha}"
        card = AlignmentModelCardData.adopt(pinned, recipe=RECIPE)
        facts = ModelCard.load(release(pinned, tmp_path / "next", recipe=RECIPE, card=card) / "README.md")
        assert facts.data.to_dict()["base_model"] == "acme/tiny"
        assert facts.data.to_dict()["metaphrase"]["base_model_revision"] == sha
        assert f"[acme/tiny](https://huggingface.co/acme/tiny), revision {sha}" in facts.text
        fault("H4", "the main branch changes", tried=1, survived=1)


class TestHeadsAndCorpora:
    def heads(self, encoder, tokenizer) -> AlignmentHeads:
        loss = AlignmentLoss(encoder, Recipe.load("dap"), max_length=24, english_ids=torch.arange(len(tokenizer)))
        return loss.heads

    def assert_equal(self, loaded: AlignmentHeads, heads: AlignmentHeads) -> None:
        state = heads.state_dict()
        assert state.keys() == loaded.state_dict().keys()
        assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())

    def test_heads_go_with_a_release_into_a_folder(self, online, released, tiny_encoder, tokenizer, template):
        heads = self.heads(tiny_encoder, tokenizer)
        heads.save_pretrained(released / "heads")
        push(released, "acme/tiny", with_heads=True)
        added = {"heads/config.json", "heads/model.safetensors"}
        assert set(remote_files(online)) == {*release_files(template), *added}
        self.assert_equal(AlignmentHeads.from_pretrained("acme/tiny", subfolder="heads"), heads)
        assert isinstance(load_encoder("acme/tiny"), SentenceTransformer)
        assert tiny_encoder[0].auto_model.config._name_or_path not in (released / "heads" / "config.json").read_text()

    def test_heads_go_alone(self, online, tiny_encoder, tokenizer):
        heads = self.heads(tiny_encoder, tokenizer)
        heads.push_to_hub("acme/heads")
        assert "model.safetensors" in remote_files(online, "acme/heads")
        self.assert_equal(AlignmentHeads.from_pretrained("acme/heads"), heads)

    @pytest.fixture
    def datasets_online(self, online, tmp_path, monkeypatch):
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", online.url)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")

    def test_a_corpus_comes_back_with_its_links(self, online, bitext, tmp_path, datasets_online):
        path = write_corpus(Dataset.from_list(bitext), tmp_path / "aligned.parquet")
        url = push_corpus(path, "acme/corpus", license="cc-by-4.0")
        assert url.startswith(f"{online.url}/datasets/acme/corpus/commit/")
        assert push_corpus(path, "acme/corpus", license="cc-by-4.0") == url
        here, there = load_corpus(str(path)), load_corpus("hf:acme/corpus")
        assert here.dataset.to_list() == there.dataset.to_list()
        assert there.files[0]["revision"] == url.rsplit("/", 1)[1]
        assert "alignment" in there.dataset.column_names
        head = online.repositories["dataset", "acme/corpus"].resolve("main")
        card = ModelCard(online.blobs[head.tree["README.md"].blob].decode())
        assert card.data.license == "cc-by-4.0"
        assert sorted(card.data.language) == sorted(
            {row[side] for row in bitext for side in ("source_lang", "target_lang")}
        )

    @pytest.mark.long
    def test_a_corpus_is_read_at_a_commit_after_it_moved_on(self, online, bitext, tmp_path, datasets_online):
        first = push_corpus(write_corpus(Dataset.from_list(bitext), tmp_path / "a.parquet"), "acme/corpus")
        push_corpus(write_corpus(Dataset.from_list(bitext[:20]), tmp_path / "b.parquet"), "acme/corpus")
        commit = first.rsplit("/", 1)[1]
        assert len(load_corpus("hf:acme/corpus").dataset) == 20
        then = load_corpus(f"hf:acme/corpus#{commit}")
        assert len(then.dataset) == len(bitext)
        assert then.files[0]["revision"] == commit
        stream = load_corpus(f"hf:acme/corpus#{commit}", streaming=True)
        assert len(list(stream.dataset)) == len(bitext)

    @pytest.mark.parametrize("with_data", [True, False], ids=["beside data", "as its loader"])
    def test_code_of_a_data_set_is_not_run(self, online, bitext, tmp_path, datasets_online, fault, with_data):
        marker = tmp_path / "executed"
        code = f"from pathlib import Path\nPath({str(marker)!r}).touch()\n".encode()
        files = {"corpus.py": code} if not with_data else {"setup.py": code, "data/__init__.py": code}
        files["data/train.parquet"] = write_corpus(Dataset.from_list(bitext), tmp_path / "a.parquet").read_bytes()
        online.put("evil/corpus", files, kind="dataset")
        if with_data:
            assert len(load_corpus("hf:evil/corpus").dataset) == len(bitext)
        else:
            with pytest.raises(CorpusError, match=r"scripts are no longer supported, but found corpus\.py"):
                load_corpus("hf:evil/corpus")
        assert not marker.exists()
        fault("H2", "code in the repository of a data set", tried=1, survived=1)

    def test_what_is_no_bitext_is_refused(self, online, tmp_path):
        (tmp_path / "x.tsv").write_text("a\tb\n")
        with pytest.raises(ValueError, match=r"x.tsv is not a Parquet file"):
            push_corpus(tmp_path / "x.tsv", "acme/corpus")
        pq.write_table(Dataset.from_dict({"text": ["a"]}).data.table, tmp_path / "y.parquet")
        with pytest.raises(ValueError, match=r"is not a bitext: it has the columns text"):
            push_corpus(tmp_path / "y.parquet", "acme/corpus")
        row = {"source": ["a"], "target": ["b"], "source_lang": ["sw"]}
        for name, values, kind in (
            ("target", [1], "int64"),
            ("source_lang", [1], "int64"),
            ("source", [None], "null"),
        ):
            pq.write_table(pa.table(row | {name: values}), tmp_path / "n.parquet")
            with pytest.raises(UsageError, match=f"its column {name} holds {kind}, but requires text"):
                push_corpus(tmp_path / "n.parquet", "acme/corpus")
        with pytest.raises(
            FileNotFoundError, match=r"The file \S+z.parquet does not exist. Name a .parquet file that"
        ):
            push_corpus(tmp_path / "z.parquet", "acme/corpus")
        assert online.requests == []


class TestOverXet:
    """The default way of the real client: chunks go into a content store and come back from it."""

    @pytest.fixture
    def xet(self, tmp_path, monkeypatch, waits):
        if not available(tmp_path / "probe"):
            pytest.skip("storing in a folder is an undocumented feature of hf_xet, which this version lacks")
        with serve_hub(xet=tmp_path / "store") as hub:
            reach(hub, monkeypatch.setattr, tmp_path / "client")
            monkeypatch.setenv("HF_TOKEN", "hf_write")
            yield hub
            assert requests(hub, "/xet-write-token/")
            gc.collect()

    def assert_comes_back(self, released: Path, cache: Path, **where: str) -> None:
        folder = download(cache_dir=cache, **where)
        assert (folder / "model.safetensors").read_bytes() == (released / "model.safetensors").read_bytes()

    def test_round_trip(self, xet, released, tmp_path, monkeypatch):
        sha = push(released, "acme/tiny", check=True).rpartition("/")[2]
        assert requests(xet, "/xet-read-token/")
        assert requests(xet, "^/__(lfs|cdn)/") == 0
        self.assert_comes_back(released, tmp_path / "cache", repo_id="acme/tiny", revision=sha)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # readers without Xet get the same
        self.assert_comes_back(released, tmp_path / "plain", repo_id="acme/tiny", revision=sha)
        assert requests(xet, "^/__cdn/")

    def test_the_clients_upload_of_a_folder_can_be_several_commits(self, xet, tmp_path):
        """Why a push is `create_commit` and not `upload_folder`: the first of two commits is half a release."""
        for name in (*(f"{at}.json" for at in range(20)), "model.safetensors"):
            (tmp_path / "folder").mkdir(exist_ok=True)
            (tmp_path / "folder" / name).write_bytes(name.encode())
        HfApi().create_repo("acme/folder")
        xet.faults.append({"path": "/commit/", "status": 400, "times": 6})
        HfApi().upload_folder(repo_id="acme/folder", folder_path=tmp_path / "folder", commit_message="Release")
        titles = [commit.title for commit in repository(xet, "acme/folder").commits.values()]
        assert titles == ["initial commit", "Release", "Release (part 2)"]

    def test_a_private_branch(self, xet, released, other, template, tmp_path):
        push(released, "acme/secret", private=True, revision="next/one")
        push(other, "acme/secret", private=True)
        assert remote_files(xet, "acme/secret", "next/one") == release_files(template)
        self.assert_comes_back(released, tmp_path / "a", repo_id="acme/secret", revision="next/one")
        self.assert_comes_back(other, tmp_path / "b", repo_id="acme/secret")
        with pytest.raises(FileNotFoundError, match="or the given token has no access to it"):
            download("acme/secret", token="hf_other", cache_dir=tmp_path / "theirs")

    @pytest.mark.parametrize(
        "trouble",
        mostly_slow(
            [
                {"path": "/commit/", "status": 500},
                {"path": "/commit/", "truncate": 0},
                {"path": "/xet-write-token/", "status": 503},
            ],
            [{"path": "/commit/", "truncate": 0}],
        ),
        ids=["commit-500", "commit-answer lost", "token-503"],
    )
    def test_faults_of_a_push_pass(self, xet, released, template, fault, trouble):
        xet.faults.append(dict(trouble))
        push(released, "acme/tiny")
        assert xet.faults[0]["times"] < 1
        assert remote_files(xet) == release_files(template)
        assert len(repository(xet).commits) == 2
        kind = f"{trouble['path'].strip('/')} {trouble.get('status', 'is cut after the work')}"
        fault("G5" if "truncate" in trouble else "G3", f"over Xet: {kind}", tried=1, survived=1)

    def test_a_download_that_is_cut_goes_on_later(self, xet, released, tmp_path, fault):
        push(released, "acme/tiny")
        (chunks,) = (path for path in xet.xet.folder.rglob("xorbs/default.*") if path.suffix != ".tagset")
        whole = chunks.read_bytes()
        chunks.chmod(0o644)
        chunks.write_bytes(whole[: len(whole) // 2])
        xet.faults.append({"path": "/xet-read-token/", "status": 503})
        with pytest.raises(MetaphraseError, match=r"run it again to download the rest of acme/tiny"):
            download("acme/tiny", cache_dir=tmp_path / "cache")
        assert xet.faults[0]["times"] < 1
        chunks.write_bytes(whole)
        self.assert_comes_back(released, tmp_path / "cache", repo_id="acme/tiny")
        fault("G3", "over Xet: a download gets no token at first, and is truncated", tried=2, survived=2)


COMMAND = "from metaphrase.cli import main; raise SystemExit(main())"


def pusher(hub: Hub, folder: Path, home: Path, *options: str) -> subprocess.Popen:
    hub.tokens[CANARY] = {"name": "tester", "role": "write", "orgs": ["acme"]}
    command = [sys.executable, "-c", COMMAND, "push", str(folder), "--repo", "acme/tiny", *options]
    return subprocess.Popen(
        command, env=environment(hub, home, CANARY), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@pytest.mark.slow
def test_push_and_pull_with_faults_along_the_way(hub, released, tmp_path, monkeypatch, fault):
    """Killed between upload and commit; again, with a commit that answers 500 and a cut download; then pulled."""
    expected = SentenceTransformer(str(released), device="cpu").encode(TEXTS)
    hub.faults.append({"path": "/commit/", "then": lambda: killed.kill(), "status": 503})
    killed = pusher(hub, released, tmp_path / "home", "--no_check")
    output = killed.communicate(timeout=300)[0]
    assert killed.returncode == -signal.SIGKILL, output
    assert len(repository(hub).commits) == 1
    assert remote_files(hub) == []
    uploaded = requests(hub, "^/__lfs/", "PUT")
    assert uploaded > 0

    hub.requests.clear()
    hub.faults[:] = [{"path": "/commit/", "status": 500}, {"path": "^/__cdn/", "truncate": 4000, "times": 2}]
    again = pusher(hub, released, tmp_path / "home")
    output += again.communicate(timeout=300)[0]
    assert again.returncode == 0, output
    assert requests(hub, "^/__lfs/", "PUT") == 0
    assert requests(hub, "/commit/", "POST") == 2
    assert all(trouble["times"] < 1 for trouble in hub.faults)
    (sha,) = re.findall(rf"{hub.url}/acme/tiny/commit/([0-9a-f]{{40}})", output)
    assert sha == repository(hub).branches["main"]
    assert len(repository(hub).commits) == 2

    reach(hub, monkeypatch.setattr, tmp_path / "client")
    monkeypatch.setenv("HF_TOKEN", CANARY)
    hub.faults[:] = [{"path": "^/__cdn/", "truncate": 4000}]
    model = SentenceTransformer("acme/tiny", revision=sha, device="cpu", cache_folder=str(tmp_path / "client"))
    assert np.array_equal(model.encode(TEXTS), expected)

    assert CANARY not in output
    leaks = [path for path in tmp_path.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]
    assert leaks == []
    assert CANARY not in json.dumps(hub.requests)
    assert all(CANARY.encode() not in blob for blob in hub.blobs.values())
    elsewhere = [r for r in hub.requests if r["path"].startswith(("/__cdn/", "/__lfs/"))]
    assert not any(r["token"] for r in elsewhere)
    assert {r["host"].split(":")[0] for r in elsewhere if "/__cdn/" in r["path"]} == {"localhost"}
    fault("G4", "killed between upload and commit, then pushed again", tried=1, survived=1)
    fault("H6", "the token in files, output and addresses of a push with faults", tried=1, survived=1)


@pytest.mark.parametrize(
    ("path", "number"),
    mostly_slow(
        [
            (path, number)
            for path in ("^/__lfs/", "/commit/")
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
        ],
        [("^/__lfs/", signal.SIGINT), ("/commit/", signal.SIGTERM), ("/commit/", signal.SIGKILL)],
    ),
    ids=lambda value: getattr(value, "name", value),
)
def test_interrupted_and_repeated(online, released, template, tmp_path, monkeypatch, fault, number, path):
    """The repository is unchanged, only a killed process leaves a copy, and the next push completes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    Path(tempfile.gettempdir()).mkdir()
    command = ["push", str(released), "--repo", "acme/tiny", "--no_check"]
    online.faults.append({"path": path, "then": lambda: os.kill(child.pid, number), "delay": 0.2, "late": 0.2})

    def work() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        raise SystemExit(main(command))

    child = Child(work, tmp_path / "log")
    assert child.wait(60) == (-number if number == signal.SIGKILL else 128 + number), child.said()
    if path == "^/__lfs/":
        assert remote_files(online) == []
    left = list(Path(tempfile.gettempdir()).iterdir())
    assert len(left) <= (number == signal.SIGKILL)
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in left] == [0o700] * len(left)
    assert main(command) == 0
    assert remote_files(online) == release_files(template)
    assert len(repository(online).commits) == 2
    fault("G4", f"{number.name} at {path.strip('^')}, then pushed again", tried=1, survived=1)


@pytest.mark.slow
def test_killed_at_every_request(hub, released, tmp_path, template, fault, monkeypatch):
    """The head is the old one or the whole release, and the next push uploads only what is missing."""
    wanted = {
        hub_path: (template / hub_path).stat().st_size
        for hub_path in release_files(template)
        if hub_path != "README.md"
    }
    reach(hub, monkeypatch.setattr, tmp_path / "client")
    monkeypatch.setenv("HF_TOKEN", CANARY)
    at = survived = 0
    while True:
        hub.repositories.clear()
        hub.blobs.clear()
        process: list[subprocess.Popen] = []
        hub.faults[:] = [{"path": "", "skip": at, "then": lambda ps=process: ps[0].kill(), "status": 503}]
        hub.requests.clear()
        process.append(pusher(hub, released, tmp_path / "home", "--no_check"))
        output = process[0].communicate(timeout=300)[0]
        if process[0].returncode == 0:
            break
        assert process[0].returncode == -signal.SIGKILL, output
        uploaded = len(hub.blobs)
        if ("model", "acme/tiny") in hub.repositories:
            assert len(repository(hub).commits) == (2 if remote_files(hub) else 1)
            assert remote_files(hub) in ([], release_files(template))
        hub.faults.clear()
        hub.requests.clear()
        push(released, "acme/tiny")
        tree = repository(hub).resolve("main").tree
        assert {path: tree[path].size for path in wanted} == wanted
        assert len(repository(hub).commits) == 2
        assert requests(hub, "^/__lfs/", "PUT") <= max(2 - uploaded, 0)
        at, survived = at + 1, survived + 1
    fault("G4", "killed at each request of a push", tried=at, survived=survived)


@pytest.mark.long
def test_a_trainer_pushes_releases_and_goes_on_after_a_fault(hub, tiny_encoder, bitext, tmp_path, monkeypatch, waits):
    reach(hub, monkeypatch.setattr, tmp_path / "cache")
    monkeypatch.setenv("HF_TOKEN", "hf_write")
    args = AlignmentTrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=2,
        save_steps=1,
        per_device_train_batch_size=4,
        push_to_hub=True,
        hub_model_id="acme/run",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    loss = AlignmentLoss(tiny_encoder, Recipe.load("tr"), max_length=24)
    trainer = AlignmentTrainer(model=tiny_encoder, args=args, train_dataset=Dataset.from_list(bitext), loss=loss)
    hub.faults.append({"path": "/commit/", "status": 403, "times": 1})
    trainer.train()
    repository = hub.repositories["model", "acme/run"]
    assert sum("step 1" in commit.title for commit in repository.commits.values()) == 0
    assert sum("step 2" in commit.title for commit in repository.commits.values()) == 1
    assert trainer.push_to_hub() is not None
    files = set(repository.resolve("main").tree)
    assert {"model.safetensors", "training_args.json", "recipe.yaml"} <= files
    assert not [name for name in files if name.endswith((".bin", ".pt", ".pth", ".pkl")) or name.startswith("heads")]
    pulled = SentenceTransformer("acme/run", device="cpu")
    np.testing.assert_allclose(pulled.encode(TEXTS), tiny_encoder.encode(TEXTS), atol=1e-6)


class TestBeforeTraining:
    """A Hub that fails is waited for while training; what the user has to mend is said before it."""

    @pytest.fixture
    def make(self, online, tiny_encoder, bitext, tmp_path):
        def made(**options) -> AlignmentTrainer:
            settings = {"max_steps": 2, "save_steps": 1, "per_device_train_batch_size": 4, "push_to_hub": True}
            settings |= {"hub_model_id": "acme/run", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
            args = AlignmentTrainingArguments(output_dir=str(tmp_path / "my run"), **settings | options)
            loss = AlignmentLoss(tiny_encoder, Recipe.load("tr"), max_length=24)
            return AlignmentTrainer(model=tiny_encoder, args=args, train_dataset=Dataset.from_list(bitext), loss=loss)

        return made

    def titles(self, hub: Hub) -> list[str]:
        return [commit.title for commit in repository(hub, "acme/run").commits.values()]

    def test_one_fault_passes(self, online, make, waits, caplog, fault):
        online.faults.append({"path": "/repos/create", "status": 503})
        trainer = make(hub_private_repo=True)
        assert waits == [1.0]
        assert trainer.hub_model_id == "acme/run"
        assert repository(online, "acme/run").private
        assert "Training continues" not in caplog.text
        fault("G3", "repository creation before training: answers 503", tried=1, survived=1)

    def test_a_name_alone_is_the_users(self, online, make):
        assert make(hub_model_id="run").hub_model_id == "tester/run"
        assert ("model", "tester/run") in online.repositories

    @pytest.mark.long
    def test_a_hub_that_fails_is_told_and_training_goes_on(self, online, make, caplog, fault):
        online.faults.append({"path": "/repos/create", "status": 503, "times": 4})  # at the start, and for step 1
        trainer = make(hub_private_repo=True)
        assert "The upload to acme/run failed: Server error '503 Service" in caplog.text
        command = f"metaphrase push '{trainer.args.output_dir}' --repo acme/run --private"
        assert f"also be pushed after training: `{command}`. Training continues, and each push" in caplog.text
        trainer.train()
        assert self.titles(online) == ["initial commit", "Training in progress, step 2"]
        assert repository(online, "acme/run").private
        fault("G3", "repository cannot be created before training", tried=1, survived=1)

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("HF_HUB_OFFLINE", True, "HF_HUB_OFFLINE is set. Unset it."),
            pytest.param(
                *("ENDPOINT", "http://127.0.0.1:9", "Hub at http://127.0.0.1:9 could not be reached"),
                marks=pytest.mark.slow,
            ),
        ],
    )
    def test_without_a_network_training_goes_on(self, online, make, monkeypatch, caplog, fault, name, value, message):
        monkeypatch.setattr(constants, name, value)
        trainer = make(max_steps=1)
        assert message in caplog.text
        assert "Training continues, and each push tries again." in caplog.text
        trainer.train()
        assert trainer.state.global_step == 1
        assert online.requests == []
        with pytest.raises(HubConnectionError, match="push it later with"):
            trainer.push_to_hub()
        fault("G6", f"training run with push, without a network ({name})", tried=1, survived=1)

    def test_without_a_token_nothing_begins(self, online, make, monkeypatch):
        monkeypatch.delenv("HF_TOKEN")
        with pytest.raises(
            HubAccessError, match=r"set HF_TOKEN or run `hf auth login`. A release can also be pushed after"
        ):
            make()
        assert online.requests == []

    @pytest.mark.parametrize(
        ("token", "name", "message"),
        [
            ("hf_wrong", "acme/run", r"does not accept the given token for acme/run \(401\)"),
            ("hf_write", "nobody/run", r"does not allow the given token to write to nobody/run \(403\)"),
            ("hf_read", "acme/new", r"does not allow the given token to write to acme/new \(403\)"),
        ],
    )
    def test_refusals_of_the_hub_are_reported(self, online, make, waits, fault, token, name, message):
        with pytest.raises(HubAccessError, match=message) as caught:
            make(hub_token=token, hub_model_id=name)
        assert token not in str(caught.value)
        assert waits == []
        reason = "unknown token" if "401" in message else "token without write access"
        fault("G1", f"before training: {reason}", tried=1, survived=1)

    def test_a_repository_that_is_there_must_be_writable(self, online, make, fault):
        """A token that may not make it may still read it, which the client takes for success."""
        HfApi().create_repo("acme/run")
        with pytest.raises(HubAccessError, match=r"does not allow the given token to write to acme/run \(403\)"):
            make(hub_token="hf_read")
        with pytest.raises(HubAccessError, match=r"does not allow the given token to write to acme/run \(403\)"):
            make(hub_token="hf_other")
        assert make().hub_model_id == "acme/run"
        fault("G1", "before training: a read-only token, or another user's", tried=2, survived=2)

    def test_a_hub_that_does_not_tell_who_may_write_is_taken_at_its_word(self, online, make):
        online.faults.append({"path": "/auth-check/write$", "status": 404})
        assert make().hub_model_id == "acme/run"
        assert online.faults[0]["times"] == 0

    def test_another_refusal_is_none_to_wait_for(self, online, make, waits):
        online.faults.append({"path": "/repos/create", "status": 400, "error": "no room"})
        with pytest.raises(HubConnectionError, match="no room"):
            make()
        assert waits == []

    def test_a_public_repository_is_not_taken_for_a_private_one(self, online, make):
        HfApi().create_repo("acme/run")
        with pytest.raises(UsageError, match="acme/run exists and is public"):
            make(hub_private_repo=True)
        assert remote_files(online, "acme/run") == []

    @pytest.mark.long
    def test_a_repository_that_turns_out_public_gets_nothing(self, online, make, caplog, fault):
        HfApi().create_repo("acme/run")
        online.faults.append({"path": "/repos/create", "status": 503, "times": 2})
        trainer = make(hub_private_repo=True)
        trainer.train()
        assert trainer.state.global_step == 2
        assert caplog.text.count("acme/run exists and is public. Make it private in its settings") == 2
        assert remote_files(online, "acme/run") == []
        with pytest.raises(UsageError, match="acme/run exists and is public"):
            trainer.push_to_hub()
        fault("G2", "public repository where a private one is required", tried=3, survived=3)

    @pytest.mark.parametrize("name", ["acme/my run", "acme/a/b"])
    def test_a_name_that_is_none_is_refused(self, online, make, name):
        with pytest.raises(UsageError, match="A repository is named organisation/name"):
            make(hub_model_id=name)
        assert online.requests == []

    def test_a_name_alone_needs_the_hub(self, online, make):
        online.faults.append({"path": "/repos/create", "status": 503, "times": 2})
        with pytest.raises(UsageError, match=r"owner of 'run' is unknown. Pass hub_model_id as organisation/name"):
            make(hub_model_id="run")

    def test_only_the_first_process_asks(self, online, make, monkeypatch):
        monkeypatch.setattr(AlignmentTrainer, "is_world_process_zero", lambda self: False)
        make()
        assert online.requests == []


class TestHeadsOfCheckpoints:
    @pytest.fixture
    def checkpoint(self, released, other, tmp_path):
        """Makes one, with the released encoder or another one and heads that hold its step."""

        def make(step: int, *, same: bool) -> None:
            folder = tmp_path / "partial"
            (folder / "heads").mkdir(parents=True)
            weights = load_file((released if same else other) / "model.safetensors")
            save_file(weights | {"pooler.dense.bias": torch.zeros(2)}, folder / "model.safetensors")
            save_file({"step": torch.tensor([step])}, folder / "heads" / "model.safetensors")
            publish(folder, released / f"checkpoint-{step}", {"step": step})

        return make

    def pushed(self, released: Path) -> int:
        push(released, "acme/tiny", with_heads=True)
        return int(load_file(hf_hub_download("acme/tiny", "heads/model.safetensors"))["step"])

    def test_those_that_belong_to_the_released_encoder_are_taken(self, online, released, checkpoint):
        """Of the best checkpoint, where a run released the best; of the last one of several."""
        checkpoint(2, same=True)
        checkpoint(10, same=True)
        checkpoint(12, same=False)
        assert self.pushed(released) == 10
        assert [name for name in remote_files(online) if name.startswith("heads/")] == ["heads/model.safetensors"]

    def test_those_beside_a_release_come_first(self, online, released, checkpoint):
        checkpoint(2, same=True)
        (released / "heads").mkdir()
        save_file({"step": torch.tensor([7])}, released / "heads" / "model.safetensors")
        assert self.pushed(released) == 7

    def test_those_of_another_encoder_are_refused(self, online, released, checkpoint):
        checkpoint(2, same=False)
        checkpoint(4, same=False)
        with pytest.raises(
            FileNotFoundError, match=r"those of checkpoint-4, checkpoint-2 were trained with other weights"
        ):
            push(released, "acme/tiny", with_heads=True)
        assert online.requests == []

    def test_a_run_that_releases_its_best_checkpoint(self, online, tiny_encoder, bitext, tmp_path):
        args = AlignmentTrainingArguments(
            output_dir=str(tmp_path / "run"),
            max_steps=3,
            save_steps=1,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            head_learning_rate=1e-3,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        loss = AlignmentLoss(tiny_encoder, Recipe.load("dap"), max_length=24)
        trainer = AlignmentTrainer(model=tiny_encoder, args=args, train_dataset=Dataset.from_list(bitext), loss=loss)
        trainer.train()
        best = load_encoder(tmp_path / "run" / "checkpoint-2", device="cpu")
        push(release(best, tmp_path / "run", recipe=RECIPE), "acme/best", with_heads=True)
        pulled = load_file(hf_hub_download("acme/best", "heads/model.safetensors"))
        heads = {n: load_file(tmp_path / "run" / f"checkpoint-{n}" / "heads" / "model.safetensors") for n in (1, 2, 3)}
        same = {n: all(torch.equal(tensor, pulled[name]) for name, tensor in heads[n].items()) for n in heads}
        assert same == {1: False, 2: True, 3: False}


class TestVector:
    """A repository that holds what training changed, and nothing else."""

    @pytest.fixture
    def tuned(self, online, released, tmp_path) -> Path:
        """A run that was tuned from a base on the Hub, and debiased."""
        push(released, "acme/base")
        model = load_encoder("acme/base", device="cpu")
        with torch.no_grad():
            for parameter in model[0].auto_model.encoder.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        model = without_directions(model, torch.linalg.qr(torch.randn(32, 2))[0].T)
        card = AlignmentModelCardData.adopt(model, language=["sw"], license="mit")
        release(model, tmp_path / "run", recipe=RECIPE, card=card)
        (tmp_path / "run" / "run.json").write_text(json.dumps({"base": "acme/base"}))
        return tmp_path / "run"

    @pytest.mark.long
    def test_it_is_pushed_and_loaded_with_its_base(self, online, tuned, tmp_path, capsys):
        assert main(["push", str(tuned), "--vector", "--bits", "16", "--repo", "acme/vector"]) == 0
        assert remote_files(online, "acme/vector") == ["README.md", "task_vector.safetensors"]
        entry = repository(online, "acme/vector").resolve("main").tree["README.md"]
        card = online.blobs[entry.blob].decode()
        assert 'load_encoder("acme/vector")' in card
        assert re.search(r"metaphrase merge acme/base@\w+ acme/vector --output_dir merged", card)
        metadata = ModelCard(card).data.to_dict()
        assert (metadata["base_model"], metadata["language"], metadata["license"]) == ("acme/base", ["sw"], "mit")
        wanted = load_encoder(tuned, device="cpu").encode(TEXTS)
        loaded = load_encoder("acme/vector", device="cpu")
        assert loaded.encode(TEXTS) == pytest.approx(wanted, abs=1e-3)
        assert load_encoder(origin_of(loaded), device="cpu").encode(TEXTS) == pytest.approx(wanted, abs=1e-3)
        assert main(["merge", "acme/base", "acme/vector", "--output_dir", str(tmp_path / "merged")]) == 0
        alone = SentenceTransformer(str(tmp_path / "merged"), device="cpu")
        assert alone.encode(TEXTS) == pytest.approx(wanted, abs=1e-3)
        assert load_encoder(find_model("acme/vector")[1], device="cpu").encode(TEXTS) == pytest.approx(
            wanted, abs=1e-3
        )

    @pytest.mark.long
    def test_it_may_be_the_base_of_another(self, online, tuned, tmp_path):
        assert main(["push", str(tuned), "--vector", "--bits", "16", "--repo", "acme/vector"]) == 0
        model = load_encoder("acme/vector", device="cpu")
        with torch.no_grad():
            model[0].auto_model.encoder.layer[0].output.dense.weight.add_(0.01)
        release(model, tmp_path / "next", recipe=RECIPE, card=AlignmentModelCardData.adopt(model))
        (tmp_path / "next" / "run.json").write_text(json.dumps({"base": "acme/vector"}))
        assert main(["push", str(tmp_path / "next"), "--vector", "--bits", "16", "--repo", "acme/next"]) == 0
        wanted = load_encoder(tmp_path / "next", device="cpu").encode(TEXTS)
        assert load_encoder("acme/next", device="cpu").encode(TEXTS) == pytest.approx(wanted, abs=1e-3)
        entry = repository(online, "acme/next").resolve("main").tree["README.md"]
        assert ModelCard(online.blobs[entry.blob].decode()).data.base_model == "acme/vector"

    @pytest.mark.long
    def test_the_card_of_the_encoder_describes_the_encoder(self, online, tuned, tmp_path):
        assert main(["push", str(tuned), "--vector", "--repo", "acme/vector"]) == 0
        assert main(["pull", "acme/vector", str(tmp_path / "pulled")]) == 0
        card = ModelCard.load(tmp_path / "pulled" / "README.md")
        metadata = card.data.to_dict()
        assert (metadata["base_model"], metadata["language"], metadata["license"]) == ("acme/vector", ["sw"], "mit")
        assert "task vector" not in card.text
        assert f'SentenceTransformer("{tmp_path / "pulled"}")' in card.text

    @pytest.mark.long
    def test_the_vector_of_a_package_is_pushed_with_its_digests(self, online, tuned, tmp_path, capsys):
        vector = tmp_path / "package" / "task_vector.safetensors"
        vector.parent.mkdir()
        assert main(["merge", "acme/base", str(tuned), "--alpha", "1", "--vector", str(vector)]) == 0
        model = load_encoder(f"acme/base + {vector}", device="cpu")
        reference = {"texts": TEXTS, "tolerance": 1e-4, "embeddings": model.encode(TEXTS).tolist()}
        (vector.parent / "reference.json").write_text(json.dumps(reference))
        facts = {"weights": weights_digest(model), "files": {vector.name: file_facts(vector)}}
        (vector.parent / "release.json").write_text(json.dumps(facts))
        packaged = Path(__file__).parents[2] / "models/metaphrase-e5-small/metaphrase_e5_small/README.md"
        shutil.copy(packaged, vector.parent)
        assert main(["push", str(vector), "--repo", "acme/package"]) == 0
        card = Path(hf_hub_download("acme/package", "README.md")).read_text(encoding="utf-8")
        assert re.findall(
            r"pip install \..*|load_encoder\(.*?\)|metaphrase (?:adapt|pull|evaluate) .*?[`\n]", card
        ) == [
            "pip install .    # in a clone of metaphrase",
            'load_encoder("acme/package")',
            "metaphrase adapt --model acme/package`",
            "metaphrase pull acme/package my-encoder\n",
            "metaphrase evaluate acme/package --baseline starter@wheel --data …`",
        ]
        names = ["README.md", "reference.json", "release.json", "task_vector.safetensors"]
        assert remote_files(online, "acme/package") == names
        assert load_encoder("acme/package", device="cpu").encode(TEXTS) == pytest.approx(model.encode(TEXTS))
        assert main(["push", str(vector.parent), "--repo", "acme/package"]) == 2
        assert (
            f"is not a release folder: missing modules.json and config.json. Push {vector}." in capsys.readouterr().err
        )
        (tmp_path / "token").write_text("hf_secret")
        (vector.parent / "LICENSE").symlink_to(tmp_path / "token")
        assert main(["push", str(vector), "--repo", "acme/package"]) == 2
        assert f"is a link to {tmp_path / 'token'}, outside the model's folder" in capsys.readouterr().err
        (vector.parent / "LICENSE").unlink()
        (vector.parent / "README.md").write_bytes(b"caf\xe9")
        assert main(["push", str(vector), "--repo", "acme/package"]) == 2
        assert f"{vector.parent / 'README.md'} is not in UTF-8. Save it in UTF-8" in capsys.readouterr().err
        (vector.parent / "README.md").unlink()
        (vector.parent / "release.json").write_text(json.dumps(facts | {"weights": "0"}))
        assert main(["push", str(vector), "--repo", "acme/package"]) == 0
        card = Path(hf_hub_download("acme/package", "README.md")).read_text(encoding="utf-8")
        assert 'load_encoder("acme/package")` loads the base' in card
        with pytest.raises(ModelFileError, match=r"merged weights of acme/package have the digest"):
            load_encoder("acme/package", device="cpu")

    @pytest.mark.long
    def test_what_is_pushed_next_replaces_a_vector_with_its_digests(self, online, tuned, released, tmp_path):
        vector = tmp_path / "v.safetensors"
        assert main(["merge", "acme/base", str(tuned), "--alpha", "1", "--vector", str(vector)]) == 0
        online.put("acme/vector", {"release.json": b'{"files": {"task_vector.safetensors": {}}}', "LICENSE": b"MIT"})
        assert main(["push", str(vector), "--repo", "acme/vector"]) == 0
        assert remote_files(online, "acme/vector") == ["LICENSE", "README.md", "task_vector.safetensors"]
        assert load_encoder("acme/vector", device="cpu").encode(TEXTS) is not None
        push(released, "acme/vector")
        assert remote_files(online, "acme/vector") == sorted(["LICENSE", *release_files(released)])

    @pytest.mark.long
    def test_a_file_is_pushed_unless_nobody_could_load_it(self, online, tuned, released, tmp_path, capsys):
        vector = tmp_path / "v.safetensors"
        assert main(["merge", "acme/base", str(tuned), "--alpha", "1", "--vector", str(vector)]) == 0
        assert main(["push", str(vector), "--repo", "acme/vector"]) == 0
        assert load_encoder("acme/base + acme/vector", device="cpu").encode(TEXTS) is not None
        own = tmp_path / "own.safetensors"
        assert main(["merge", str(released), str(tuned), "--vector", str(own)]) == 0
        versioned = replace(TaskVector.load(own), base_name="base@v2").save(tmp_path / "versioned.safetensors")
        (tuned / "run.json").unlink()
        cases = {
            "is out, which is not on a Hub": [str(own)],
            "is base@v2, which is not on a Hub": [str(versioned)],
            "has no readable run.json": [str(tuned), "--vector"],
            "Omit --with_heads": [str(vector), "--with_heads"],
        }
        for said, words in cases.items():
            capsys.readouterr()
            assert main(["push", *words, "--repo", "acme/other"]) == 2
            assert said in capsys.readouterr().err
        assert ("model", "acme/other") not in online.repositories

    def test_the_command_for_later_names_the_run(self, online, tuned, capsys):
        """Not the vector's file, which is deleted."""
        online.faults.append({"path": "/repos/create", "status": 503, "times": 2})
        assert main(["push", str(tuned), "--vector", "--bits", "4", "--repo", "acme/vector", "--private"]) == 2
        command = f"metaphrase push {tuned} --repo acme/vector --private --vector --bits 4"
        assert f"push it later with `{command}`" in capsys.readouterr().err
