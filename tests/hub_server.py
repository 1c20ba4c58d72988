"""A small Hub on the loopback interface with the protocol of `huggingface_hub` 2.x over Git LFS and, optionally, Xet.

It tests this project *through* the real client over real HTTP: create, upload, commit, list, download, permissions,
faults. It does not reproduce the policies of huggingface.co (quotas, scanners, moderation, exact texts).

    with serve_hub() as hub:
        hub.url                             # for HF_ENDPOINT, with HF_HUB_DISABLE_XET=1
        hub.requests                        # received requests: method, path, query, host, whether they had a token
        hub.faults.append({"path": "/commit/", "status": 503})

A fault applies to requests whose raw path matches the regular expression `path` and whose method is `method`, if given. It
applies `times` times (default 1), after the first `skip` matching requests:

    status, error, code, headers    answer with these instead of handling the request
    body                            the same, with these bytes as the body
    delay                           seconds to wait before the request is handled
    late                            seconds to wait between handling the request and the answer
    then                            function to call first, e.g. to kill the client
    truncate                        handle the request, send this number of bytes, and cut the connection

Routes are matched on the raw path: a revision such as `refs%2Fpr%2F1` is one segment.
Everything except a Xet store is kept in memory.
"""

import asyncio
import base64
import contextlib
import functools
import hashlib
import hmac
import json
import os
import re
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import transformers.utils.hub
import uvicorn
import yaml
from huggingface_hub import constants
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from tests.xet_store import XetStore

BINARY = re.compile(r"\.(safetensors|bin|pt|npz|parquet|gz|zip|model)$|(^|/)tokenizer\.json$")
LFS_THRESHOLD = 10 << 20
TOKENS = {
    "hf_write": {"name": "tester", "role": "write", "orgs": ["acme"]},
    "hf_read": {"name": "reader", "role": "read", "orgs": []},
    "hf_other": {"name": "other", "role": "write", "orgs": []},
}


class HubError(Exception):
    """An answer other than 2xx: the client reads its text and code from headers."""

    def __init__(self, status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status, self.message = status, message
        self.headers = {"X-Error-Message": message.replace("\n", " ")} | (headers or {})
        if code:
            self.headers["X-Error-Code"] = code


@dataclass(frozen=True)
class Entry:
    """A file of a commit: its git object id, its SHA-256 if it is stored with LFS, and its hash in a Xet store."""

    oid: str
    size: int
    sha256: str | None = None
    xet: str | None = None

    @property
    def blob(self) -> str:
        return self.sha256 or self.oid

    def as_json(self, path: str) -> dict[str, Any]:
        lfs = {"oid": self.sha256, "sha256": self.sha256, "size": self.size, "pointerSize": 130}
        return {"type": "file", "path": path, "oid": self.oid, "size": self.size} | (
            ({"lfs": lfs} if self.sha256 else {}) | ({"xetHash": self.xet} if self.xet else {})
        )


@dataclass(frozen=True)
class Commit:
    oid: str
    parent: str | None
    title: str
    message: str
    user: str
    tree: dict[str, Entry]
    date: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z"))


class Repository:
    def __init__(self, kind: str, name: str, private: bool, user: str):
        self.kind, self.name, self.private, self.gated = kind, name, private, False
        self.commits: dict[str, Commit] = {}
        self.branches: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.commit("main", user, "initial commit", "", {})

    def commit(self, branch: str, user: str, title: str, message: str, tree: dict[str, Entry]) -> Commit:
        parent = self.branches.get(branch)
        identity = json.dumps([self.name, parent, title, len(self.commits), sorted(tree)])
        commit = Commit(hashlib.sha1(identity.encode()).hexdigest(), parent, title, message, user, tree)
        self.commits[commit.oid] = commit
        self.branches[branch] = commit.oid
        return commit

    def resolve(self, revision: str) -> Commit:
        branch = revision.removeprefix("refs/heads/")
        oid = self.branches.get(branch) or self.tags.get(revision) or revision
        if oid not in self.commits:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.commits[oid]


#: Valid texts in the metadata of a card. The real Hub has lists of licences and languages.
METADATA = {"language": "[a-z]{2,3}|code|multilingual", "license": "[a-z0-9.+-]+"}
METADATA |= dict.fromkeys(("tags", "datasets", "metrics"), "(?s:.*)")


def check_card(text: str) -> list[dict[str, str]]:
    """Check the metadata rules that the tests need; return warnings, raise on errors."""
    block = re.match(r"^---\r?\n(.*?)\r?\n---\s*(\r?\n|$)", text, re.DOTALL)
    if not block:
        return [{"message": "empty or missing yaml metadata in repo card"}]
    try:
        metadata = yaml.safe_load(block[1]) or {}
    except yaml.YAMLError as error:
        raise HubError(400, f"Invalid metadata in README.md: {error}") from error
    if not isinstance(metadata, dict):
        raise HubError(400, "Invalid metadata in README.md: it must be a mapping")
    for key, valid in METADATA.items():
        values = metadata.get(key, [])
        values = [values] if isinstance(values, str) else values
        if not (isinstance(values, list) and all(isinstance(x, str) and re.fullmatch(valid, x) for x in values)):
            raise HubError(400, f'Invalid metadata in README.md: "{key}" is not valid: {values}')
    for model in metadata.get("model-index") or []:
        if not (isinstance(model, dict) and "name" in model and isinstance(model.get("results"), list)):
            raise HubError(400, 'Invalid metadata in README.md: "model-index" entries need a name and results')
    return []


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Hub:
    """The state of the server and the answers to its routes."""

    def __init__(self, xet: XetStore | None = None) -> None:
        self.url, self.xet = "", xet
        self.tokens: dict[str, dict[str, Any]] = {token: dict(user) for token, user in TOKENS.items()}
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[dict[str, Any]] = []
        self.faults: list[dict[str, Any]] = []
        self.secret = os.urandom(16)

    def put(self, name: str, files: dict[str, bytes], kind: str = "model") -> str:
        """Commit files without a client, for tests only; return the id of the commit."""
        repository = self.repositories.setdefault((kind, name), Repository(kind, name, False, "somebody"))
        tree = dict(repository.resolve("main").tree)
        for path, data in files.items():
            sha256 = hashlib.sha256(data).hexdigest() if BINARY.search(path) else None
            tree[path] = Entry(git_oid(data), len(data), sha256)
            self.blobs[tree[path].blob] = data
        return repository.commit("main", "somebody", "put", "", tree).oid

    # Users and permissions

    def user(self, request: Request) -> dict[str, Any] | None:
        header = request.headers.get("authorization")
        if header is None:
            return None
        user = self.tokens.get(header.removeprefix("Bearer "))
        if user is None:
            raise HubError(401, "Invalid credentials in Authorization header")
        return user

    def repository(self, request: Request, write: bool = False) -> Repository:
        path = request.path_params
        kind, name = path.get("kind", "models").rstrip("s"), f"{path['namespace']}/{path['name']}"
        user, repository = self.user(request), self.repositories.get((kind, name))
        member = user is not None and path["namespace"] in [user["name"], *user["orgs"]]
        if repository is None or (repository.private and not member):  # private repositories look like missing ones
            raise HubError(404 if user else 401, "Repository not found", "RepoNotFound")
        if repository.gated and not member:
            raise HubError(403 if user else 401, f"Access to {name} is restricted.", "GatedRepo")
        if write and not (user and member and user["role"] == "write"):
            raise HubError(403 if user else 401, "You don't have the required permissions to perform this action.")
        return repository

    def address(self, repository: Repository) -> str:
        return f"{self.url}/{'' if repository.kind == 'model' else repository.kind + 's/'}{repository.name}"

    async def whoami(self, request: Request) -> Response:
        user = self.user(request)
        if user is None:
            raise HubError(401, "Invalid username or password.")
        organisations = [{"type": "org", "name": name, "id": name} for name in user["orgs"]]
        access = {"type": "access_token", "accessToken": {"displayName": "loopback", "role": user["role"]}}
        name = user["name"]
        return JSONResponse(
            {"type": "user", "id": name, "name": name, "fullname": name, "orgs": organisations, "auth": access}
        )

    async def create(self, request: Request) -> Response:
        body, user = await request.json(), self.user(request)
        if user is None:
            raise HubError(401, "Unauthorized")
        namespace, kind = body.get("organization") or user["name"], body.get("type") or "model"
        if user["role"] != "write" or namespace not in [user["name"], *user["orgs"]]:
            raise HubError(403, f'You don\'t have the rights to create a {kind} under the namespace "{namespace}".')
        key = kind, f"{namespace}/{body['name']}"
        status, error = 200, {}
        if key in self.repositories:  # with exist_ok, the client reads `url` from this answer, too
            status, error = 409, {"error": "You already created this model repo"}
        else:
            self.repositories[key] = Repository(*key, private=body.get("visibility") == "private", user=user["name"])
        url = self.address(self.repositories[key])
        return JSONResponse({"url": url, "name": key[1], "id": key[1]} | error, status)

    async def delete(self, request: Request) -> Response:
        body, user = await request.json(), self.user(request) or {"name": ""}
        namespace = body.get("organization") or user["name"]
        request.path_params.update(kind=(body.get("type") or "model") + "s", namespace=namespace, name=body["name"])
        repository = self.repository(request, write=True)
        del self.repositories[repository.kind, repository.name]
        return Response("OK")

    async def settings(self, request: Request) -> Response:
        repository, body = self.repository(request, write=True), await request.json()
        repository.private = body.get("visibility", "private" if repository.private else "public") == "private"
        repository.gated = body.get("gated", repository.gated)
        return JSONResponse({"private": repository.private, "gated": repository.gated})

    # Repository contents

    async def info(self, request: Request) -> Response:
        repository = self.repository(request)
        commit = repository.resolve(request.path_params.get("revision", "main"))
        files = [{"rfilename": path, "size": entry.size} for path, entry in sorted(commit.tree.items())]
        return JSONResponse(
            {
                **{"_id": "0", "id": repository.name, "modelId": repository.name, "sha": commit.oid},
                **{"private": repository.private, "gated": repository.gated, "tags": [], "downloads": 0, "likes": 0},
                **{"siblings": files, "lastModified": commit.date, "createdAt": commit.date},
            }
        )

    async def tree(self, request: Request) -> Response:
        commit = self.repository(request).resolve(request.path_params["revision"])
        under = request.path_params.get("path", "").strip("/")
        prefix = under + "/" if under else ""
        inside = {path: entry for path, entry in sorted(commit.tree.items()) if path.startswith(prefix)}
        if under and not inside:
            raise HubError(404, f"{under} does not exist", "EntryNotFound")
        recursive = request.query_params.get("recursive", "").lower() in ("true", "1")
        listing, folders = [], set()
        for path, entry in inside.items():
            parts = path.removeprefix(prefix).split("/")
            for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
                folders.add(prefix + "/".join(parts[:depth]))
            if recursive or len(parts) == 1:
                listing.append(entry.as_json(path))
        listing += [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in sorted(folders)]
        return JSONResponse(listing)

    async def paths_info(self, request: Request) -> Response:
        commit = self.repository(request).resolve(request.path_params["revision"])
        form = urllib.parse.parse_qs((await request.body()).decode())
        known = [path for path in form.get("paths", []) if path in commit.tree]  # unknown paths are omitted
        return JSONResponse([commit.tree[path].as_json(path) for path in known])

    async def refs(self, request: Request) -> Response:
        repository = self.repository(request)

        def listed(names: dict[str, str], kind: str) -> list[dict[str, str]]:
            return [{"name": n, "ref": f"refs/{kind}/{n}", "targetCommit": oid} for n, oid in names.items()]

        branches, tags = listed(repository.branches, "heads"), listed(repository.tags, "tags")
        return JSONResponse({"branches": branches, "tags": tags, "converts": [], "pullRequests": []})

    async def commits(self, request: Request) -> Response:
        repository, history = self.repository(request), []
        commit: Commit | None = repository.resolve(request.path_params["revision"])
        while commit:
            authors = [{"user": commit.user}]
            history.append({"id": commit.oid, "title": commit.title, "message": commit.message, "authors": authors})
            history[-1]["date"] = commit.date
            commit = repository.commits.get(commit.parent or "")
        return JSONResponse(history)

    async def branch(self, request: Request) -> Response:
        repository, name = self.repository(request, write=True), request.path_params["revision"]
        if name in repository.branches:
            raise HubError(409, f"Reference already exists: refs/heads/{name}")
        start = json.loads(await request.body() or b"{}").get("startingPoint") or "main"
        repository.branches[name] = repository.resolve(start).oid
        return Response("OK")

    async def tag(self, request: Request) -> Response:
        repository, name = self.repository(request, write=True), (await request.json())["tag"]
        if name in repository.tags:
            raise HubError(409, f"Tag reference exists already: {name}")
        repository.tags[name] = repository.resolve(request.path_params["revision"]).oid
        return Response("OK")

    async def auth_check(self, request: Request) -> Response:
        self.repository(request, write=request.url.path.endswith("/write"))
        return Response("OK")

    async def validate_yaml(self, request: Request) -> Response:
        return JSONResponse({"errors": [], "warnings": check_card((await request.json())["content"])})

    # Upload: preupload selects the mode, large files go to LFS, all others into one NDJSON commit

    async def preupload(self, request: Request) -> Response:
        tree = self.repository(request, write=True).resolve(request.path_params["revision"]).tree
        answers = []
        for file in (await request.json())["files"]:
            sample = base64.b64decode(file.get("sample", ""))
            large = file["size"] > 0 and (
                file["size"] >= LFS_THRESHOLD or BINARY.search(file["path"]) is not None or b"\0" in sample
            )
            answer = {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            if file["path"] in tree:  # lets the client skip unchanged files
                answer["oid"] = tree[file["path"]].blob
            answers.append(answer)
        return JSONResponse({"files": answers})

    async def lfs_batch(self, request: Request) -> Response:
        repository, answers = self.repository(request, write=True), []
        for wanted in (await request.json())["objects"]:
            answer = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.blobs:
                upload = {"href": f"{self.url}/__lfs/{wanted['oid']}?signature={self.sign(wanted['oid'])}"}
                verify = {"href": f"{self.address(repository)}.git/info/lfs/objects/verify"}
                answer |= {"authenticated": True, "actions": {"upload": upload, "verify": verify}}
            answers.append(answer)
        return JSONResponse(
            {"transfer": "basic", "objects": answers}, headers={"Content-Type": "application/vnd.git-lfs+json"}
        )

    async def lfs_put(self, request: Request) -> Response:
        oid, data = self.signed(request), await request.body()
        if hashlib.sha256(data).hexdigest() != oid:
            raise HubError(400, "hash mismatch")
        self.blobs[oid] = data
        return Response(headers={"ETag": f'"{oid}"'})

    async def lfs_verify(self, request: Request) -> Response:
        self.repository(request, write=True)
        body = await request.json()
        if len(self.blobs.get(body["oid"], b"")) != body["size"]:
            raise HubError(404, "Object not found")
        return JSONResponse({})

    async def commit(self, request: Request) -> Response:
        repository, user = self.repository(request, write=True), self.user(request)
        revision = request.path_params["revision"]
        head = repository.resolve(revision)
        branch = revision.removeprefix("refs/heads/")
        if branch not in repository.branches:
            raise HubError(400, "commits can only be made on a branch")
        tree, header = dict(head.tree), {}
        for line in (await request.body()).splitlines():
            operation = json.loads(line)
            if operation["key"] == "header":
                header = operation["value"]
                if header.get("parentCommit") not in (None, head.oid):
                    raise HubError(412, "A commit has happened since. Please refresh and try again.")
            else:
                self.apply(tree, operation["key"], operation["value"])
        commit = repository.commit(branch, user["name"], header["summary"], header.get("description", ""), tree)
        url = f"{self.address(repository)}/commit/{commit.oid}"
        return JSONResponse({"success": True, "commitOid": commit.oid, "commitUrl": url, "hookOutput": ""})

    def apply(self, tree: dict[str, Entry], kind: str, value: dict[str, Any]) -> None:
        """Apply one line of a commit to its tree."""
        path = value["path"]
        if any(part in ("", ".", "..", ".git") for part in path.split("/")):
            raise HubError(400, f"Invalid path: {path}")
        if kind == "file":
            data = base64.b64decode(value["content"])
            if path == "README.md":
                check_card(data.decode())
            tree[path] = Entry(git_oid(data), len(data))
            self.blobs[tree[path].oid] = data
        elif kind == "lfsFile":
            in_xet = self.xet.files().get(value["oid"]) if self.xet else None
            if value["oid"] not in self.blobs and in_xet is None:
                raise HubError(400, f"LFS object {value['oid']} was not uploaded")
            size = len(self.blobs[value["oid"]]) if in_xet is None else in_xet[1]
            pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{value['oid']}\nsize {size}\n"
            tree[path] = Entry(git_oid(pointer.encode()), size, value["oid"], in_xet[0] if in_xet else None)
        elif kind == "deletedFile":
            if tree.pop(path, None) is None:
                raise HubError(404, f"{path} does not exist", "EntryNotFound")
        else:
            raise HubError(400, f"unknown operation {kind}")

    async def xet_token(self, request: Request) -> Response:
        self.repository(request, write=request.path_params["access"] == "write")
        if self.xet is None:
            raise HubError(404, "Xet is not enabled on this server")
        answer = {"casUrl": self.xet.url, "accessToken": self.xet.token, "exp": self.xet.expiry}
        headers = {"X-Xet-Cas-Url": self.xet.url, "X-Xet-Access-Token": self.xet.token}
        return JSONResponse(answer, headers=headers | {"X-Xet-Token-Expiration": str(answer["exp"])})

    # Download: HEAD and GET of /resolve/, LFS files from another host

    async def resolve(self, request: Request) -> Response:
        repository = self.repository(request)
        commit = repository.resolve(request.path_params["revision"])
        headers = {"X-Repo-Commit": commit.oid, "Accept-Ranges": "bytes"}
        entry = commit.tree.get(request.path_params["path"])
        if entry is None:
            raise HubError(404, "Entry not found", "EntryNotFound", headers)
        headers["ETag"] = f'"{entry.blob}"'
        if entry.sha256 is None:
            return Response(self.blobs[entry.blob], headers=headers, media_type="text/plain; charset=utf-8")
        headers |= {"X-Linked-Size": str(entry.size), "X-Linked-Etag": headers["ETag"]}
        if entry.xet:
            route = f"{self.url}/api/{repository.kind}s/{repository.name}/xet-read-token/{commit.oid}"
            headers |= {"X-Xet-Hash": entry.xet, "X-Xet-Refresh-Route": route, "Link": f'<{route}>; rel="xet-auth"'}
        # As on the real Hub, LFS files live elsewhere. On the same host, the client would follow the redirect of
        # its HEAD and lose the headers above; for another host, it must also drop the Authorization header.
        other = self.url.replace("//127.0.0.1", "//localhost")
        return RedirectResponse(f"{other}/__cdn/{entry.blob}?signature={self.sign(entry.blob)}", 302, headers)

    async def cdn(self, request: Request) -> Response:
        oid = self.signed(request)
        if oid not in self.blobs and self.xet:
            self.blobs[oid] = await asyncio.to_thread(self.xet.read, oid)
        data, headers = self.blobs[oid], {"ETag": f'"{oid}"', "Accept-Ranges": "bytes"}
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
        if span is None:
            return Response(data, headers=headers, media_type="application/octet-stream")
        first, last = int(span[1]), int(span[2] or len(data) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        return Response(data[first : last + 1], 206, headers, media_type="application/octet-stream")

    def sign(self, oid: str) -> str:
        return hmac.new(self.secret, oid.encode(), "sha256").hexdigest()[:24]

    def signed(self, request: Request) -> str:
        oid = request.path_params["oid"]
        if not hmac.compare_digest(self.sign(oid), request.query_params.get("signature", "")):
            raise HubError(403, "Request has expired")
        return oid

    # The application

    def application(self) -> Any:
        api, repository, data = "/api/{kind}/{namespace}/{name}", "/{namespace}/{name}", "/{kind}/{namespace}/{name}"
        table = [
            ("GET", "/api/whoami-v2", self.whoami),
            ("POST", "/api/repos/create", self.create),
            ("DELETE", "/api/repos/delete", self.delete),
            ("POST", "/api/validate-yaml", self.validate_yaml),
            ("GET", api, self.info),
            ("GET", api + "/revision/{revision}", self.info),
            ("GET", api + "/tree/{revision}", self.tree),
            ("GET", api + "/tree/{revision}/{path:path}", self.tree),
            ("POST", api + "/paths-info/{revision}", self.paths_info),
            ("GET", api + "/refs", self.refs),
            ("GET", api + "/commits/{revision}", self.commits),
            ("POST", api + "/branch/{revision}", self.branch),
            ("POST", api + "/tag/{revision}", self.tag),
            ("GET", api + "/auth-check", self.auth_check),
            ("GET", api + "/auth-check/write", self.auth_check),
            ("PUT", api + "/settings", self.settings),
            ("GET", api + "/xet-{access}-token/{revision}", self.xet_token),
            ("POST", api + "/preupload/{revision}", self.preupload),
            ("POST", api + "/commit/{revision}", self.commit),
            *(("POST", at + ".git/info/lfs/objects/batch", self.lfs_batch) for at in (repository, data)),
            *(("POST", at + ".git/info/lfs/objects/verify", self.lfs_verify) for at in (repository, data)),
            ("PUT", "/__lfs/{oid}", self.lfs_put),
            ("GET", "/__cdn/{oid}", self.cdn),
            ("GET", data + "/resolve/{revision}/{path:path}", self.resolve),
            ("GET", repository + "/resolve/{revision}/{path:path}", self.resolve),
        ]
        routes = [Route(path, with_slashes(answer), methods=[method]) for method, path, answer in table]
        inner = Starlette(routes=routes, exception_handlers={HubError: error_answer})

        async def outer(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                raw = scope["raw_path"].decode()
                headers = {key.decode(): value.decode() for key, value in scope["headers"]}
                seen = {"method": scope["method"], "path": raw, "query": scope["query_string"].decode()}
                self.requests.append(seen | {"host": headers["host"], "token": "authorization" in headers})
                for fault in self.faults:
                    if self.strikes(fault, scope["method"], raw):
                        await asyncio.sleep(fault.get("delay", 0))
                        if "then" in fault:
                            fault["then"]()
                        if "body" in fault or "status" in fault:
                            return await injected(fault)(scope, receive, send)
                        if "late" in fault:
                            send = late(send, fault["late"])
                        if "truncate" in fault:
                            send = cut_after(send, fault["truncate"])
                scope = scope | {"path": urllib.parse.unquote(re.sub("%2[fF]", "\0", raw))}
            await inner(scope, receive, send)

        return outer

    @staticmethod
    def strikes(fault: dict[str, Any], method: str, path: str) -> bool:
        """Return whether a remaining fault applies to this request."""
        if fault.get("method", method) != method or not re.search(fault["path"], path):
            return False
        left = "skip" if fault.get("skip") else "times"
        fault[left] = fault.get(left, 1) - 1
        return left == "times" and fault[left] >= 0


def with_slashes(answer: Any) -> Any:
    """Restore the slashes in the parameters of a route, which are `%2F` in the raw path."""

    async def answered(request: Request) -> Response:
        request.path_params.update({key: value.replace("\0", "/") for key, value in request.path_params.items()})
        return await answer(request)

    return answered


def injected(fault: dict[str, Any]) -> Response:
    """Return the answer of a fault."""
    status, headers = fault.get("status", 200), fault.get("headers")
    if "body" in fault:
        return Response(fault["body"], status, headers)
    return error_answer(None, HubError(status, fault.get("error", "injected fault"), fault.get("code"), headers))


def cut_after(send: Any, size: int) -> Any:
    """Return an ASGI `send` that passes a number of bytes of the body and then cuts the connection."""
    left = size

    async def sent(message: dict[str, Any]) -> None:
        nonlocal left
        if message["type"] == "http.response.body":
            body = message.get("body", b"")
            message = message | {"body": body[:left]}
            left -= len(body)
            if left <= 0:
                await send(message | {"more_body": True})
                raise ConnectionResetError("injected cut")
        await send(message)

    return sent


def late(send: Any, seconds: float) -> Any:
    """Return an ASGI `send` that delays the answer."""

    async def sent(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            await asyncio.sleep(seconds)
        await send(message)

    return sent


def error_answer(_: Any, error: Any) -> Response:
    return JSONResponse({"error": error.message}, error.status, error.headers)


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of all Hubs of this process, in a thread: uvicorn takes 0.2 seconds to end one of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


@contextlib.contextmanager
def serve_hub(xet: Path | None = None) -> Iterator[Hub]:
    """Run a Hub on a free port of 127.0.0.1 in a thread of this process, optionally with a Xet store in a folder."""
    hub = Hub(XetStore(xet) if xet else None)
    listener = socket.create_server(("127.0.0.1", 0))
    hub.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    # `localhost` may resolve to ::1 first; a refused connection falls back to 127.0.0.1.
    server = uvicorn.Server(uvicorn.Config(hub.application(), log_level="critical", lifespan="off"))
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)

    async def stop() -> None:
        """Close the port and the idle connections; a request that is being answered keeps its Hub."""
        for each in server.servers:
            each.close()
        for connection in list(server.server_state.connections):
            connection.shutdown()

    asyncio.run_coroutine_threadsafe(server.startup([listener]), _event_loop()).result()
    try:
        yield hub
    finally:
        asyncio.run_coroutine_threadsafe(stop(), _event_loop()).result()


def reach(hub: Hub, patch: Callable[..., None], folder: Path) -> None:
    """Point the client of this process to a Hub, as the user `tester`, with token and caches in a folder.

    Args:
        hub: The Hub.
        patch: `monkeypatch.setattr`.
        folder: Folder for tokens and caches.
    """
    settings = {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": hub.xet is None,
        "HF_HUB_CACHE": str(folder / "cache"),
        "HF_TOKEN_PATH": str(folder / "no-token"),
        "AGENT_HARNESSES_PATH": str(folder / "harnesses.json"),
    }
    for name, value in settings.items():
        patch(constants, name, value)
    patch(transformers.utils.hub, "_hf_api", None)  # otherwise it keeps using the first Hub


def environment(hub: Hub, folder: Path, token: str) -> dict[str, str]:
    """Return the environment variables that do the same for another process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder), "HF_TOKEN": token, "HF_DEBUG": "1"}
    return kept | settings | ({} if hub.xet else {"HF_HUB_DISABLE_XET": "1"})
