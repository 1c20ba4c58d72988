"""Requests to a Hub: downloads, retries, time limits, and the client's errors as exceptions of this library.

`HF_ENDPOINT` selects a Hub other than huggingface.co.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from httpx2 import HTTPError, Request, Response, Timeout, TransportError
from huggingface_hub import constants, get_session, get_token, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name

from metaphrase.exceptions import HubAccessError, HubConnectionError, HubError, HubMissingError, MetaphraseError
from metaphrase.io.redaction import hide, redact, visible

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

#: Files that can execute code when they are read, or that no release needs. They are not downloaded.
UNSAFE_FILES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.h5", "*.msgpack", "*.py", "*.onnx", "*.ot")
#: Seconds between attempts at requests that the client itself does not retry: a commit, a new repository, a download.
RETRY_PAUSES = (1.0, 4.0, 15.0)
#: Timeout in seconds of requests for which the client sets none.
REQUEST_TIMEOUT = 300.0
#: Longest pause in seconds before a retry, even if the Hub asks for a longer one.
LONGEST_PAUSE = 60
#: Maximum number of characters of a cause's message that is repeated in ours.
_MESSAGE_LENGTH = 500

#: Errors that the client raises: its own HTTP errors, transport errors, and a RuntimeError for a failed file upload.
_CLIENT_ERRORS = (HTTPError, OSError, RuntimeError)


def download(
    repo_id: str,
    *,
    revision: str | None = None,
    repo_type: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    files: Sequence[str] | None = None,
) -> Path:
    """Download a repository, or some of its files, without its pickles and code.

    The download is retried if the server fails or truncates a file. Files that are already in the cache are kept.

    The token is by default `HF_TOKEN`, then the token stored by `hf auth login`.
    """
    try:
        with hub_errors(repo_id, "read", "", token=token):
            folder = retry(
                lambda: snapshot_download(
                    repo_id,
                    repo_type=repo_type,
                    revision=revision,
                    token=token,
                    cache_dir=cache_dir,
                    allow_patterns=None if files is None else list(files),
                    ignore_patterns=list(UNSAFE_FILES),
                )
            )
    except HubConnectionError as error:
        cached = repo_folder_name(repo_id=repo_id, repo_type=repo_type or constants.REPO_TYPE_MODEL)
        if Path(cache_dir or constants.HF_HUB_CACHE, cached).is_dir():
            raise HubConnectionError(
                f"{error} Downloaded files are kept; run it again to download the rest of {repo_id}."
            ) from error
        raise
    return Path(folder)


def retry(action: Callable[[], Result], pauses: Sequence[float] | None = None) -> Result:
    """Run requests, and run them again after a pause if they fail with a transient error.

    A longer ``Retry-After`` of the Hub takes precedence over the pauses.
    """
    for pause in (*(RETRY_PAUSES if pauses is None else pauses), None):
        try:
            with _limits():
                return action()
        except _CLIENT_ERRORS as error:
            if pause is None or not _may_succeed_later(error):
                raise
            wait = max(pause, _retry_after(error))
            logger.warning("%s. Trying again in %g seconds.", format_error(error), wait)
            time.sleep(wait)
    raise AssertionError  # the last attempt returned or raised


def is_transient(error: HubError) -> bool:
    """Whether the same request may succeed later: the Hub failed or could not be reached, or offline mode is set."""
    return _may_succeed_later(error) or any(isinstance(cause, OfflineModeIsEnabled) for cause in _causes(error))


def status_of(error: BaseException) -> int | None:
    """The HTTP status of an error, also if the client wrapped the error."""
    response = _response(error)
    return None if response is None else int(response.status_code)


def format_error(error: BaseException) -> str:
    """The messages of an error and its causes, on one line and without secrets."""
    messages: list[str] = []
    for cause in _causes(error):
        message = re.sub(r"For more information check: \S+", "", redact(str(cause)))
        message = visible(" ".join(message.split()))[:_MESSAGE_LENGTH].rstrip(".:")
        if not any(message in known for known in messages):
            messages.append(message)
    return ": ".join(messages)


@contextlib.contextmanager
def hub_errors(repo_id: str, access: str, hint: str, *, token: str | None) -> Iterator[None]:
    """Translate the client's errors inside this block to a `HubError` with a one-sentence message and no token.

    ``access`` is ``"read"`` or ``"write to"``; ``hint``, what to do, is the last sentence of the message;
    ``token`` is the one that was passed as an argument.
    """
    try:
        used = token or get_token() or ""
        hide(used)
        if re.search(r"[^!-~]", used):
            raise HubAccessError(
                f"The access token ({_name_of_token(token)}) contains a space, a line break or a letter outside ASCII, so it "
                f"is invalid: copy it again. {hint}"
            )
        yield
    except (MetaphraseError, HFValidationError):
        raise
    except Exception as error:  # the client does not expect answers of another server
        translated = _translated(error, repo_id, access, token)
        raise type(translated)(f"{translated} {hint}".rstrip()) from error


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """Limit the requests inside this block: their duration, the pauses between them, and where they are redirected to."""

    def limit_time(request: Request) -> None:
        if all(seconds is None for seconds in request.extensions.get("timeout", {}).values()):
            request.extensions["timeout"] = Timeout(REQUEST_TIMEOUT).as_dict()

    hooks = get_session().event_hooks
    hooks["request"].append(limit_time)
    hooks["response"].append(_limit_answer)
    try:
        yield
    finally:
        hooks["request"].remove(limit_time)
        hooks["response"].remove(_limit_answer)


def _limit_answer(response: Response) -> None:
    """Shorten the pauses that an answer asks for, and follow no redirect of an upload to another host."""
    headers, request = response.headers, response.request
    if "Retry-After" in headers:
        pause = re.fullmatch(r"\s*([0-9]{1,9})\s*", headers.pop("Retry-After"))
        headers["Retry-After"] = str(min(int(pause[1]), LONGEST_PAUSE)) if pause else ""
    if "RateLimit" in headers:
        headers["RateLimit"] = re.sub(r"\bt\s*=\s*[0-9]{4,}", f"t={LONGEST_PAUSE}", headers["RateLimit"])
    if response.has_redirect_location and request.method not in ("GET", "HEAD"):
        target = request.url.join(headers["Location"])
        if (target.host, target.port) != (request.url.host, request.url.port):
            raise HubConnectionError(
                f"The Hub at {constants.ENDPOINT} redirects uploads to {target.netloc.decode()}. Nothing is sent "
                "there. If you trust that host, set HF_ENDPOINT to its address."
            )


def _may_succeed_later(error: BaseException) -> bool:
    """Whether a retry makes sense. It does not if the Hub refuses the request or a local file is missing."""
    status = status_of(error)
    if status is None:
        return any(isinstance(cause, TransportError) for cause in _causes(error))
    if type(error) is RuntimeError and status in (403, 404):  # the signed address of an upload has expired
        return True
    return status in (408, 409, 412, 429) or status >= 500


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and its chain of causes."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _response(error: BaseException) -> Response | None:
    """The response of the Hub that an error is about, also if the client wrapped the error."""
    responses = (cause.response for cause in _causes(error) if isinstance(cause, HfHubHTTPError))
    return next((response for response in responses if response is not None), None)


def _retry_after(error: BaseException) -> int:
    response = _response(error)
    return 0 if response is None else int(response.headers.get("Retry-After") or 0)  # see `_limit_answer`


def _name_of_token(token: str | None) -> str:
    """The token in words: where it comes from."""
    if token is not None:
        return "the given token"
    stored = "HF_TOKEN" if os.environ.get("HF_TOKEN") else "the token of `hf auth login`"
    return stored if get_token() else "an anonymous user"


def _known_fault(message: str) -> HubError | None:
    """The error for a message of the client that names its own cause."""
    if "xet-write-token" in message:
        return HubConnectionError(
            f"The Hub at {constants.ENDPOINT} has no Xet storage: set HF_HUB_DISABLE_XET=1 and push again."
        )
    if message.startswith("Invalid metadata in README.md"):
        return HubError(f"The Hub refuses the metadata of the card. {message}. Correct README.md, and push again.")
    return None


def _translated(error: Exception, repo_id: str, access: str, given: str | None) -> HubError:
    status, message, token = status_of(error), format_error(error), _name_of_token(given)
    causes = list(_causes(error))
    if any(isinstance(cause, OfflineModeIsEnabled) for cause in causes):
        return HubConnectionError("The Hub could not be reached because HF_HUB_OFFLINE is set. Unset it.")
    if (known := _known_fault(message)) is not None:
        return known
    if any(isinstance(cause, GatedRepoError) for cause in causes):
        return HubAccessError(
            f"{repo_id} is gated, and {token} has no access to it ({status}): request access on its page, "
            f"{constants.ENDPOINT}/{repo_id}."
        )
    refused = type(error) is not RuntimeError  # a RuntimeError is a failed file upload, whose address may have expired
    if refused and status == 401:
        return HubAccessError(f"The Hub does not accept {token} for {repo_id} (401): renew it and log in.")
    if refused and status == 403:
        required = f"{'write ' if access != 'read' else ''}access to {repo_id.split('/')[0]!r}"
        return HubAccessError(
            f"The Hub does not allow {token} to {access} {repo_id} (403): the token needs {required}, or choose another "
            f"repository."
        )
    if refused and any(isinstance(cause, RevisionNotFoundError) for cause in causes):
        return HubMissingError(f"{repo_id} has no such commit, tag or branch (404): check the name after the @.")
    if refused and status == 404:
        return HubMissingError(
            f"The Hub has no repository {repo_id}, or {token} has no access to it (404): check the name."
        )
    if status is None and any(isinstance(cause, TransportError) for cause in causes):
        return HubConnectionError(f"The Hub at {constants.ENDPOINT} could not be reached: {message}.")
    operation = "download of" if access == "read" else "upload to"
    if not isinstance(error, _CLIENT_ERRORS):
        message = (
            f"unexpected response from the Hub at {constants.ENDPOINT} ({type(error).__name__}: {message}); check "
            "that HF_ENDPOINT is the address of a Hub"
        )
    return HubConnectionError(f"The {operation} {repo_id} failed: {message}.")
