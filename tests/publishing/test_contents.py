"""What a push uploads: the files of the manifest, as they were released, and nothing that they link to."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import stat
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from metaphrase.checkpoints.folders import publish
from metaphrase.cli import main
from metaphrase.exceptions import MetaphraseError
from metaphrase.io.digests import file_facts
from metaphrase.publishing import hub as publishing
from metaphrase.publishing.contents import MANIFEST, release_files, write_manifest
from tests.hub_server import Hub

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

SECRET = b"the password is swordfish"
push = partial(publishing.push, check=False)


@pytest.fixture
def secret(tmp_path) -> Path:
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "elsewhere" / "config.json"
    path.write_bytes(SECRET)
    return path


@pytest.fixture
def refused(online, released, capsys):
    """The words in which Python and the command line refuse to push the release, the same and before any request."""

    def refused(*options: str) -> str:
        with pytest.raises(MetaphraseError) as caught:
            push(released, "acme/tiny", with_heads="--with_heads" in options)
        assert main(["push", str(released), "--repo", "acme/tiny", "--no_check", *options]) == 2
        assert capsys.readouterr().err.strip() == f"metaphrase push: {caught.value}"
        assert online.requests == []
        return str(caught.value)

    return refused


def contents(hub: Hub) -> dict[str, bytes]:
    tree = hub.repositories["model", "acme/tiny"].resolve("main").tree
    return {path: hub.blobs[entry.blob] for path, entry in tree.items()}


def list_in_manifest(folder: Path, name: str, facts: object) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][name] = facts
    (folder / MANIFEST).write_text(json.dumps(manifest))


def test_only_listed_files_are_pushed(online, released, template, fault):
    extra = ("1_Pooling/secret.json", "1_Pooling/a.safetensors", "2_Dense/config.json", "secret.json", "vocab.txt")
    for name in (*extra, ".eval_results/other.yaml", ".env", "heads/config.json", "checkpoint-1/config.json"):
        (released / name).parent.mkdir(exist_ok=True)
        (released / name).write_bytes(SECRET)
    push(released, "acme/tiny")
    assert sorted(contents(online)) == release_files(template)
    assert not [blob for blob in online.blobs.values() if SECRET in blob]
    fault("G8", "other files in a release folder", tried=9, survived=9)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "file") for name in ("recipe.yaml", "README.md", "model.safetensors", "1_Pooling/config.json")),
        *(("recipe.yaml", kind) for kind in ("folder", "device", "missing file")),
    ],
)
def test_symbolic_links_are_not_followed(released, secret, refused, fault, name, kind):
    path = released / name
    path.unlink()
    path.symlink_to({"file": secret, "folder": secret.parent, "device": "/dev/zero"}.get(kind, "/nowhere"))
    if kind == "file":
        list_in_manifest(released, name, file_facts(path))  # by somebody who knows the file
    assert re.search("missing recipe.yaml" if kind == "missing file" else rf"{name} is a symbolic link", refused())
    fault("G8", f"a symbolic link to a {kind} in a release folder", tried=2, survived=2)


def test_linked_folders_are_not_entered(released, secret, refused, fault):
    shutil.rmtree(released / "1_Pooling")
    (released / "1_Pooling").symlink_to(secret.parent)
    write_manifest(released)
    assert re.search(r"1_Pooling/config.json is a symbolic link, or in a linked folder", refused())
    fault("G8", "a link to another folder in a release folder", tried=2, survived=2)


@pytest.mark.parametrize("kind", ["pipe", "device", "socket", "folder", "second name"])
def test_only_regular_files_are_read(released, secret, refused, fault, monkeypatch, kind):
    """The card may be edited, so that no digest protects a file with a second name."""
    monkeypatch.chdir(released)
    (released / "README.md").unlink()
    if kind == "pipe":
        os.mkfifo("README.md")
    elif kind == "device":
        try:
            os.mknod("README.md", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        except OSError:
            pytest.skip("needs the right to make devices")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("README.md")
    elif kind == "folder":
        Path("README.md").mkdir()
    else:
        os.link(secret, "README.md")
    assert re.search("README.md (is not a regular file|cannot be copied)", refused())
    fault("G8", f"a {kind} in place of a release's file", tried=2, survived=2)


NAMES = (
    *("../elsewhere/config.json", "1_Pooling/../../elsewhere/config.json", "1_Pooling//config.json", "./recipe.yaml"),
    *("1_Pooling/secret.json", "1_Pooling/1_Pooling/config.json", "notes.txt", "run.json", ".env", "", "."),
    *("pytorch_model.bin", "heads/model.safetensors", "checkpoint-1/model.safetensors", "release.json"),
    *("recipe.yaml\n", "recipe.yaml\0", "\u202elmay.epicer", "１_Pooling/config.json", "CONFIG.JSON"),
)


def test_only_names_of_release_files_are_accepted(online, released, secret, refused, fault):
    (released / "1_Pooling" / "secret.json").write_bytes(SECRET)
    original = (released / MANIFEST).read_text()
    names = (*NAMES, str(secret))
    for name in names:
        (released / MANIFEST).write_text(original)
        list_in_manifest(released, name, file_facts(secret))
        with pytest.raises(
            MetaphraseError, match=r"release.json lists '.*', which is not a file of a release"
        ) as caught:
            push(released, "acme/tiny")
        assert str(caught.value).isprintable()
    assert re.search(r"release.json lists '.*', which is not a file of a release", refused())
    fault("G8", "a manifest with the name of another file", tried=len(names), survived=len(names))


MANIFESTS = (
    *("", "null", "[]", "{}", '{"files": []}', '{"files": {"config.json": 5}}', '{"files": {"config.json": "ab"}}'),
    *('{"files": {"config.json": null}}', "[" * 100_000, '{"files": ', "\ud800"),
)


def test_a_damaged_manifest_is_refused(released, refused, fault):
    for manifest in MANIFESTS:
        (released / MANIFEST).write_bytes(manifest.encode(errors="surrogatepass"))
        with pytest.raises(MetaphraseError, match=r"release.json is damaged. Release the model again"):
            push(released, "acme/tiny")
    assert re.search(r"release.json is damaged. Release the model again", refused())
    fault("G8", "a damaged manifest of a release", tried=len(MANIFESTS), survived=len(MANIFESTS))


def test_every_altered_file_is_found(online, released, template, fault):
    """One byte more, one bit flipped, or another file's content of the same size."""
    names = [name for name in release_files(template) if name != "README.md"]
    for name in names:
        whole = (template / name).read_bytes()
        for altered in (whole + b"\n", bytes([whole[0] ^ 1]) + whole[1:], b"x" * len(whole)):
            (released / name).write_bytes(altered)
            with pytest.raises(MetaphraseError, match=rf"{name} was altered after the release was written"):
                push(released, "acme/tiny")
        (released / name).write_bytes(whole)
    assert online.requests == []
    fault("G8", "a file of a release altered before a push", tried=3 * len(names), survived=3 * len(names))


def test_an_altered_file_is_one_line(released, refused):
    (released / "config.json").write_text("{}")
    assert re.search(
        r"config.json was altered after the release was written: its digest differs from release.json", refused()
    )


def test_the_card_may_be_edited(online, released):
    with (released / "README.md").open("a") as card:
        card.write("\nEvaluated by a colleague.\n")
    push(released, "acme/tiny")
    assert contents(online)["README.md"].endswith(b"Evaluated by a colleague.\n")


def test_a_card_in_another_encoding_is_refused(released, refused):
    (released / "README.md").write_bytes("---\nlicense: mit\n---\nÉvaluation\n".encode("latin-1"))
    assert re.search(r"README.md is not in UTF-8", refused())


@pytest.mark.parametrize(
    "reference",
    [
        *("", "[]", "{}", "null", '{"texts": 5, "tolerance": 1, "embeddings": []}', "[" * 100_000),
        *('{"texts": [], "tolerance": 1, "embeddings": []}', '{"texts": ["a"], "tolerance": 1, "embeddings": [[0]]}'),
        *(
            '{"texts": ["a"], "tolerance": 1, "embeddings": [["x"]]}',
            '{"texts": ["a"], "tolerance": [], "embeddings": 0}',
        ),
    ],
    ids=lambda text: text[:40],
)
def test_damaged_reference_embeddings_are_told(online, released, capsys, reference):
    (released / "reference.json").write_text(reference)
    write_manifest(released)
    assert main(["push", str(released), "--repo", "acme/tiny"]) == 2
    assert "out is damaged" in capsys.readouterr().err
    assert online.requests == []


def test_what_was_verified_is_what_is_pushed(online, released, template, secret, fault):
    """Every file is replaced by a link to a secret once the upload has begun."""

    def replace() -> None:
        for name in release_files(template):
            (released / name).unlink()
            (released / name).symlink_to(secret)

    online.faults.append({"path": "/repos/create", "then": replace})
    push(released, "acme/tiny")
    assert (released / "config.json").is_symlink()
    pushed = contents(online)
    same = [name for name in release_files(template) if pushed[name] == (template / name).read_bytes()]
    assert sorted([*same, "README.md"]) == sorted(pushed)
    assert not [blob for blob in online.blobs.values() if SECRET in blob]
    fault("G8", "a release folder altered during the upload", tried=1, survived=1)


class TestHeads:
    @pytest.fixture
    def heads(self, released) -> Path:
        folder = released / "heads"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        save_file({"step": torch.tensor([1])}, folder / "model.safetensors")
        return folder

    def test_other_files_beside_them_are_not_pushed(self, online, released, heads):
        (heads / "secret.json").write_bytes(SECRET)
        push(released, "acme/tiny", with_heads=True)
        added = {name for name in contents(online) if name.startswith("heads/")}
        assert added == {"heads/config.json", "heads/model.safetensors"}

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
    @pytest.mark.parametrize("kind", ["link", "second name", "linked folder"])
    def test_links_are_refused(self, released, heads, secret, refused, fault, name, kind):
        if kind == "linked folder":
            heads.rename(secret.parent / "heads")
            heads.symlink_to(secret.parent / "heads")
        else:
            (heads / name).unlink()
            (heads / name).symlink_to(secret) if kind == "link" else os.link(secret, heads / name)
        assert re.search(r"heads/\S+ is (a symbolic link|not a regular file)", refused("--with_heads"))
        fault("G8", f"a {kind} in place of heads", tried=2, survived=2)

    def test_damaged_weights_are_refused(self, heads, refused):
        (heads / "model.safetensors").write_bytes(SECRET)
        assert re.search(r"heads/model.safetensors is damaged", refused("--with_heads"))

    def test_those_of_a_checkpoint_are_verified(self, released, refused, tmp_path):
        folder = tmp_path / "partial"
        (folder / "heads").mkdir(parents=True)
        shutil.copy(released / "model.safetensors", folder)
        save_file({"step": torch.tensor([1])}, folder / "heads" / "model.safetensors")
        publish(folder, released / "checkpoint-1", {"step": 1})
        weights = released / "checkpoint-1" / "heads" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")
        assert re.search(r"checkpoint-1/heads/model.safetensors was altered", refused("--with_heads"))
