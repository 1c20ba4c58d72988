"""Pushes to a Hub whose answers are not those of a Hub, and with tokens and names that are none."""

from __future__ import annotations

import re
import socket
import threading
from functools import partial
from pathlib import Path

import pytest
from datasets import Dataset
from huggingface_hub import HfApi, constants

from metaphrase.cli import main
from metaphrase.corpus.writing import write_corpus
from metaphrase.exceptions import HubAccessError, HubConnectionError, HubError, MetaphraseError, UsageError
from metaphrase.io.hub import LONGEST_PAUSE, download
from metaphrase.publishing import hub as publishing
from metaphrase.publishing.hub import make_repository, push_corpus
from tests.conftest import mostly_slow
from tests.hub_server import reach, serve_hub

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

push = partial(publishing.push, check=False)
CANARY = "hf_CANARYcanaryCANARYcanary0123456789"

JSON, HTML = {"Content-Type": "application/json"}, {"Content-Type": "text/html"}
WRONG = (
    b'{"url": 5, "files": 5, "sha": [], "siblings": 7, "private": "x", "objects": 3, "commitOid": {}, "commitUrl": 4, '
    b'"id": 8, "path": 9}'
)
ANSWERS = {
    "an HTML page": {"body": b"<html>Welcome to our network</html>", "headers": HTML},
    "an HTML page with 403": {"status": 403, "body": b"<html>" + b"x" * 10_000, "headers": HTML},
    "an HTML page with 404": {"status": 404, "body": b"<html>Not here</html>", "headers": HTML},
    "an HTML page with 502": {"status": 502, "body": b"<html>Bad gateway</html>", "headers": HTML},
    "a long text with 418": {"status": 418, "body": b"y" * 100_000},
    "half a JSON": {"body": b'{"url": "http', "headers": JSON},
    "nothing": {"body": b""},
    "a list": {"body": b"[]", "headers": JSON},
    "deeply nested JSON": {"body": b"[" * 100_000, "headers": JSON},
    "values of other types": {"body": WRONG, "headers": JSON},
    "errors of other types": {"status": 400, "body": b'{"error": {"a": 1}, "errors": 5}', "headers": JSON},
    "control characters": {"status": 400, "body": b'{"error": "\\u001b[2J\\u202eno"}', "headers": JSON},
    "bytes in no encoding": {"body": b"\xff\xfe\xfa", "headers": {"Content-Type": "application/json; charset=x"}},
    "what is not compressed": {"body": b"plain", "headers": {"Content-Encoding": "gzip"}},
    "a redirect to an address that is none": {"status": 302, "body": b"", "headers": {"Location": "http://[::1"}},
}
PATHS = [
    "/repos/create",
    "/preupload/",
    "/commit/",
    "^/api/models/acme/tiny$",
    "/branch/",
    "/revision/",
    "/objects/batch",
    "^/__lfs/",
    "/tree/",
    "/resolve/",
]


@pytest.fixture
def told(capsys):
    """Runs a command, and returns its last line of stderr; it must be an error on one readable line."""

    def run(*command: str, status: int = 2) -> str:
        assert main([str(word) for word in command]) == status
        err = capsys.readouterr().err
        assert "Traceback" not in err
        line = err.rstrip("\n").rpartition("\n")[2]
        assert line.isprintable()
        assert len(line) < 1500
        return line

    return run


@pytest.fixture
def corpus(bitext, tmp_path) -> Path:
    return write_corpus(Dataset.from_list(bitext), tmp_path / "pairs.parquet")


@pytest.mark.parametrize("path", mostly_slow(PATHS, PATHS[:1]))
def test_answers_of_another_kind_are_told(online, released, told, fault, path):
    check = [] if path in ("/tree/", "/resolve/") else ["--no_check"]
    for kind, answer in ANSWERS.items():
        online.repositories.clear()
        online.blobs.clear()
        online.faults[:] = [answer | {"path": path, "times": 9999}]
        line = told("push", released, "--repo", "acme/tiny", "--private", "--revision", "next", *check)
        assert "acme/tiny" in line, kind
        assert "push it later with" in line or "run it again to download" in line, kind
        assert online.faults[0]["times"] < 9999
    fault("G7", f"answers of another kind to {path.strip('^$')}", tried=len(ANSWERS), survived=len(ANSWERS))


def test_python_and_corpora_say_the_same(online, released, corpus, told):
    for what, call in ((released, push), (corpus, push_corpus)):
        online.faults[:] = [{"path": "/repos/create", "body": b"<html>", "headers": HTML, "times": 2}]
        with pytest.raises(
            HubConnectionError, match=r"unexpected response from the Hub at \S+ \(JSONDecodeError"
        ) as e:
            call(what, "acme/tiny")
        check = ["--no_check"] if what == released else []
        assert told("push", what, "--repo", "acme/tiny", *check) == f"metaphrase push: {e.value}"
    online.faults[:] = [{"path": "/repos/create", "body": b"<html>", "headers": HTML}]
    with pytest.raises(HubConnectionError, match=r"check that HF_ENDPOINT is the address of a Hub. Later."):
        make_repository("acme/tiny", later="Later.")


@pytest.mark.parametrize("status", mostly_slow([301, 302, 307, 308], [301, 307]))
def test_nothing_is_sent_to_another_host(online, released, told, status, fault):
    """The client would send the files there, though not the token."""
    with serve_hub() as other:
        for path in ("/repos/create", "/preupload/", "/objects/batch", "^/__lfs/", "/commit/"):
            online.faults[:] = [
                {"path": path, "status": status, "body": b"", "headers": {"Location": f"{other.url}/x"}, "times": 9}
            ]
            line = told("push", released, "--repo", "acme/tiny", "--no_check")
            assert f"redirects uploads to {other.url.removeprefix('http://')}. Nothing is sent there." in line
        assert other.requests == []
    fault("G7", "a redirect of an upload to another host", tried=5, survived=5)


def test_a_redirect_on_the_same_host_is_followed(online, released):
    """As that of a repository that was renamed."""
    HfApi().create_repo("acme/tiny")
    place = {"Location": "/api/models/acme/tiny/preupload/main"}
    online.faults.append({"path": "/preupload/", "status": 307, "body": b"", "headers": place})
    push(released, "acme/tiny")
    assert online.repositories["model", "acme/tiny"].resolve("main").tree


@pytest.mark.parametrize(
    "headers",
    mostly_slow(
        [
            *({"Retry-After": value} for value in ("99999999", "9" * 5000, "\xb2", "-5", "inf", "1e9", "", "7")),
            {"Retry-After": "Wed, 21 Oct 2099 07:28:00 GMT"},
            {"RateLimit": '"api";r=0;t=99999999'},
        ],
        [{"Retry-After": "99999999"}, {"Retry-After": "\xb2"}, {"Retry-After": "7"}],
    ),
    ids=lambda headers: str(headers)[:50],
)
def test_no_pause_is_long(online, released, waits, fault, headers):
    """Neither ours nor those of the client, which waits as long as it is told."""
    online.faults += [
        {"path": path, "status": 429, "body": b"", "headers": headers} for path in ("/commit/", "/preupload/")
    ]
    push(released, "acme/tiny")
    assert all(left["times"] <= 0 for left in online.faults)
    assert 0 < max(waits) <= LONGEST_PAUSE + 1
    assert (7.0 in waits) == ("7" in headers.get("Retry-After", "").split())
    fault("G7", "an unusual Retry-After", tried=2, survived=2)


def test_a_server_that_hangs_up(released, told, monkeypatch, tmp_path, waits, hub, fault):
    reach(hub, monkeypatch.setattr, tmp_path / "client")
    monkeypatch.setenv("HF_TOKEN", CANARY)
    greetings = [b"", b"HTTP/1.1 200 OK\r\nContent-Le", b"\0" * 100, b"SSH-2.0-OpenSSH_9.6\r\n"]
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection = listener.accept()[0]
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(greeting)

        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        threading.Thread(target=serve, daemon=True).start()
        for greeting in greetings:  # noqa: B007 - the thread sends it
            line = told("push", released, "--repo", "acme/tiny")
            assert f"The Hub at {constants.ENDPOINT} could not be reached" in line
            assert CANARY not in line
        listener.shutdown(socket.SHUT_RDWR)
    fault("G7", "a server that closes the connection", tried=len(greetings), survived=len(greetings))


TOKENS = [
    f"{CANARY} word",
    f"{CANARY}é",
    f"{CANARY}\u202e",
    f"a\n{CANARY}",
    f"\t{CANARY}",
    f"{CANARY}\x7f",
    f"“{CANARY}”",
]


@pytest.mark.parametrize("token", TOKENS, ids=ascii)
def test_tokens_that_are_none(online, released, corpus, told, monkeypatch, tmp_path, fault, token):
    """httpx would put them into its messages, or fail with an encoding error."""
    monkeypatch.delenv("HF_TOKEN")
    calls = [partial(call, what, "acme/tiny", token=token) for call, what in ((push, released), (push_corpus, corpus))]
    calls.append(partial(make_repository, "acme/tiny", token=token))
    calls.append(partial(download, "acme/tiny", token=token, cache_dir=tmp_path / "cache"))
    for call in calls:
        with pytest.raises(
            HubAccessError, match=r"token \(the given token\) contains a space, a line break or a"
        ) as e:
            call()
        assert "CANARY" not in str(e.value)
    assert online.requests == []
    monkeypatch.setenv("HF_TOKEN", token)  # the client removes line breaks and blanks around it
    for what in (released, corpus):
        line = told("push", what, "--repo", "acme/tiny")
        assert re.search(r"\(HF_TOKEN\) contains a space|does not accept HF_TOKEN", line)
        assert "CANARY" not in line
    fault("H6", "tokens with spaces, line breaks and letters outside ASCII", tried=6, survived=6)


def test_no_message_has_a_token_with_blanks_around_it(online, released, told, monkeypatch):
    token = "another-kind-of-token-0123456789"
    monkeypatch.setenv("HF_TOKEN", f" {token}\n")
    online.faults.append({"path": "/repos/create", "status": 400, "error": f"who is {token}?"})
    assert "who is " in (line := told("push", released, "--repo", "acme/tiny"))
    assert token not in line


def test_no_message_has_the_stored_token(online, released, told, monkeypatch, tmp_path):
    token = "another-kind-of-token-0123456789"
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / "token").write_text(token)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    online.faults.append({"path": "/repos/create", "status": 400, "error": f"who is {token}?"})
    assert "who is ***" in told("push", released, "--repo", "acme/tiny")


NAMES = [
    *(
        "acme/tíny",
        "acmé/tiny",
        "acme/tiny\n",
        "acme/ti\0ny",
        "acme/\x1b[2J",
        "acme/\u202eynit",
        "аcme/tiny",
        "acme/tiny\u200b",
    ),
    *(
        "acme/../x",
        "../acme",
        "acme/",
        "/acme",
        "",
        ".",
        "acme//tiny",
        "acme/tiny?x=1",
        "acme/tiny#x",
        "acme/a%2Fb",
        "a/b/c",
    ),
    *("acme/\udcff", "acme/" + "x" * 97, "acme/tiny.git", "https://huggingface.co/acme/tiny", "acme\\tiny"),
]


def test_names_that_are_none(online, released, corpus, told, fault):
    for name in NAMES:
        for what, call in ((released, push), (corpus, push_corpus)):
            with pytest.raises(UsageError, match="A repository is named organisation/name") as caught:
                call(what, name)
            assert told("push", what, "--repo", name) == f"metaphrase push: {caught.value}"
        with pytest.raises(UsageError, match="A repository is named organisation/name"):
            make_repository(name)
    assert online.requests == []
    fault(
        "G7",
        "names of repositories with other letters and control characters",
        tried=3 * len(NAMES),
        survived=3 * len(NAMES),
    )


@pytest.mark.parametrize("revision", ["ne\rxt", "\x1b[2J", "next\udcff", "../../main", "n\u202ext", "é", "?"])
def test_unusual_branches(online, released, told, revision):
    """They reach the Hub as they are, or not at all."""
    online.faults.append({"path": "/branch/", "status": 400, "error": "no branch", "times": 9})
    line = told("push", released, "--repo", "acme/tiny", "--revision", revision)
    assert "no branch" in line or "unexpected response" in line


def test_a_token_is_in_no_name(online, released, told, capsys):
    for word in ("hf_0123456789abcdefghij", "hf_write"):
        line = told("push", released, "--repo", f"acme/{word}")
        assert line.startswith("metaphrase push: The name of the repository contains an access token.")
    assert online.requests == []
    push(released, "acme/tiny", commit_message="with hf_0123456789abcdefghij and hf_write")
    (commit,) = (one for one in online.repositories["model", "acme/tiny"].commits.values() if one.tree)
    assert commit.title == "with hf_*** and $HF_TOKEN"
    folder = released.rename(released.with_name("hf_0123456789abcdefghij"))
    assert main(["push", str(folder), "--repo", "acme/tiny", "--no_check"]) == 0
    assert "hf_0123456789" not in "".join(capsys.readouterr())
    online.faults.append({"path": "/repos/create", "status": 400})
    with pytest.raises(HubError) as caught:
        push(folder, "acme/tiny")
    assert "hf_0123456789" not in str(caught.value)


@pytest.mark.parametrize("url", ["/evil/other", "/acme/tinier", "/x", "", "http://elsewhere.example/acme/tiny2"])
@pytest.mark.parametrize("status", [200, 409])
def test_the_name_of_another_repository(hub, online, released, told, url, status, fault):
    """The Hub's answer neither redirects a push nor tells whether the repository is private."""
    HfApi().create_repo("acme/tiny")
    HfApi().create_repo("acme/tinier", private=True)
    address = url if url.startswith("http") else hub.url + url
    answer = {"path": "/repos/create", "status": status, "body": f'{{"url": "{address}"}}'.encode(), "headers": JSON}
    online.faults[:] = [answer | {"times": 9}]
    line = told("push", released, "--repo", "acme/tiny", "--private")
    assert re.search(r"acme/tiny was requested, but the Hub returned '|unexpected response", line)
    with pytest.raises(MetaphraseError):
        make_repository("tiny")
    assert not any(repository.resolve("main").tree for repository in online.repositories.values())
    fault("G7", "a Hub that names another repository", tried=2, survived=2)


@pytest.mark.parametrize(
    "commit", mostly_slow(["main", "../../x", "\x1b[2J", "", None, "0" * 39, "A" * 40], ["../../x", None])
)
def test_the_name_of_a_commit_that_is_none(online, released, told, commit):
    body = {"commitUrl": f"{online.url}/acme/tiny/commit/{commit}", "commitOid": commit}
    online.faults.append({"path": "/commit/", "body": str(body).replace("'", '"').replace("None", "null").encode()})
    online.faults[0]["headers"] = JSON
    assert re.search("unexpected response|which is not a commit id", told("push", released, "--repo", "acme/tiny"))
