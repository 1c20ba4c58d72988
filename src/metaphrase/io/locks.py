"""Locks, so that only one process writes to an output folder."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from metaphrase.exceptions import CheckpointError

logger = logging.getLogger(__name__)

#: Name of the lock inside a folder. It names its owner. Uploads to the Hub ignore names that begin with an underscore.
LOCK = "_lock"

#: Errors of a file system that does not support locks.
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)

_held: dict[Path, int] = {}  # folder → process that holds it: a forked child inherits the entry, but not the lock


@contextmanager
def exclusive(folder: str | Path) -> Iterator[None]:
    """Lock a folder, so that no other process writes to it. The folder is created if it is missing.

    The operating system releases the lock when the process ends, even if it is killed. A process can lock its folder again;
    forked children do not inherit the lock. File systems without locks cause a warning.

    A folder that was created and stays empty is removed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, exclusive(folder):
    ...     (Path(folder) / LOCK).read_text().startswith(f"process {os.getpid()} on ")
    True
    """
    folder = Path(folder)
    key = folder.resolve()
    if _held.get(key) == os.getpid():
        yield
        return
    is_new = make_folder(folder)
    lock = _acquire(folder)
    _held[key] = os.getpid()
    try:
        yield
    finally:
        del _held[key]
        with suppress(OSError):
            (folder / LOCK).unlink()
        lock.release()
        if is_new:
            with suppress(OSError):  # it has files
                folder.rmdir()


def make_folder(folder: Path) -> bool:
    """Create an output folder if it is missing. Returns whether it was created."""
    try:
        folder.mkdir(parents=True)
        return True
    except (FileExistsError, NotADirectoryError) as error:
        if folder.is_dir():
            return False
        raise CheckpointError(f"The output folder {folder} is a file, or inside one. Choose another.") from error
    except OSError as error:
        raise not_writable(folder, error) from error


def _acquire(folder: Path) -> FileLock:
    path = folder / LOCK
    lock = FileLock(path, blocking=False, thread_local=False, fallback_to_soft=False)
    while True:
        make_folder(folder)
        try:
            lock.acquire()
        except Timeout as error:
            try:
                owner = path.read_text(encoding="utf-8", errors="replace").strip() or "another process"
            except OSError:  # released in the meantime
                continue
            raise CheckpointError(
                f"{folder} is in use by {owner}. Wait for it or stop it, or choose another output folder."
            ) from error
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise not_writable(folder, error) from error
            logger.warning(
                "The file system of %s does not support locks (%s). Make sure that no other process writes to it.",
                folder,
                error.strerror,
            )
            return lock
        with suppress(OSError):  # a full disk: the lock holds without its owner's name
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
        return lock


def not_writable(folder: Path, error: OSError) -> CheckpointError:
    """The error for an output folder that cannot be written to."""
    return CheckpointError(f"The output folder {folder} is not writable: {error.strerror}. Choose another.")
