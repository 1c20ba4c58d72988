"""Child processes that may be killed. They are forked, so that they need no imports."""

from __future__ import annotations

import gc
import logging
import os
import resource
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from metaphrase.io.locks import exclusive


class Child:
    """A forked process that runs a function and exits.

    Attributes:
        pid: Process id.
        log: File with its output.
    """

    def __init__(self, work: Callable[[], Any], log: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():  # a warning about threads, none of which holds a lock here
            warnings.simplefilter("ignore")
            self.pid = os.fork()
        if self.pid == 0:
            self._work(work)

    def _work(self, work: Callable[[], Any]) -> None:
        status = 70
        gc.freeze()
        warnings.simplefilter("default")  # as outside the tests
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            handle = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for number in (1, 2):
                os.dup2(handle, number)
            sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
            logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)
            logging.getLogger("metaphrase").setLevel(logging.INFO)
            work()
            status = 0
        except SystemExit as error:
            status = int(error.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def wait(self, seconds: float = 240) -> int:
        """Return the exit status, or the negative number of the signal that killed it."""
        handle = os.pidfd_open(self.pid)
        try:
            if not select.select([handle], [], [], seconds)[0]:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise TimeoutError(self.said())
        finally:
            os.close(handle)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def said(self) -> str:
        return self.log.read_text(errors="replace")


def die_before(operation: int, folder: Path) -> Callable[[], int]:
    """Kill this process before its n-th change to files below a folder.

    Changes are files opened for writing, ``torch.save``, fsync, renames, removed files, and created or removed folders.
    This cannot be undone: call it in a child process.

    Args:
        operation: n, from 1; 0 only counts.
        folder: The folder.

    Returns:
        A function that returns the number of changes so far.
    """
    count = 0

    def change(path: Any) -> None:
        nonlocal count
        if str(path).startswith(str(folder)):
            count += 1
            if count == operation:
                os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if (
            event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        ) or event in ("os.mkdir", "os.rename", "os.truncate"):
            change(args[0])
        elif event in ("os.remove", "os.rmdir"):
            change(args[0] if args[1] == -1 else f"{Path(f'/proc/self/fd/{args[1]}').readlink()}/{args[0]}")

    sys.addaudithook(audit)
    fsync, save = os.fsync, torch.save

    def counted_fsync(handle: int) -> None:
        change(Path(f"/proc/self/fd/{handle}").readlink())
        fsync(handle)

    def counted_save(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        change(file)
        save(value, file, *args, **kwargs)

    os.fsync, torch.save = counted_fsync, counted_save
    return lambda: count


def limit_files(size: int, *, die: bool) -> None:
    """Limit the size of files: larger writes fail, or kill the process in the middle."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if die else signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def holder(folder: Path, log: Path) -> Child:
    """A process that locks a folder until it is killed."""
    read, ready = os.pipe()

    def work() -> None:
        with exclusive(folder):
            os.write(ready, b".")
            signal.pause()

    child = Child(work, log)
    os.close(ready)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read(1) == b"."
    return child
