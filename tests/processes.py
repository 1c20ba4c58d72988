"""Run Python programs in forked processes, which inherit the imported libraries: importing them takes seconds."""

from __future__ import annotations

import gc
import logging
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn


def run_python(
    *arguments: object, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS``, where the arguments are ``-c CODE …``, ``-m MODULE …`` or ``SCRIPT …``.

    The program sees modules that are imported already: a test of imports, or of variables that libraries read when they
    are imported, needs a process of its own.
    """
    command = [str(argument) for argument in arguments]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        with warnings.catch_warnings():  # a warning about threads, none of which holds a lock here
            warnings.simplefilter("ignore")
            process = os.fork()
        if process == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            _become(command, os.environ if env is None else env, cwd)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return subprocess.CompletedProcess(command, status, *texts)


def _become(command: list[str], env: Mapping[str, str], cwd: Path | None) -> NoReturn:
    """Run the program and exit."""
    status = 1
    try:
        gc.freeze()
        warnings.resetwarnings()
        for name in ("", "metaphrase"):  # pytest's handlers
            logging.getLogger(name).handlers.clear()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        if cwd is not None:
            os.chdir(cwd)
        sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
        changes = dict(env)
        os.environ.clear()
        os.environ.update(changes)
        sys.stdin = open(os.devnull)  # noqa: PTH123, SIM115
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        _run(command)
        status = 0
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)  # noqa: T201
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(command: list[str]) -> None:
    kind = command[0]
    sys.argv = command if not kind.startswith("-") else [kind, *command[2:]]
    if kind == "-c":
        exec(compile(command[1], "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(kind).parent))
        runpy.run_path(kind, run_name="__main__")
