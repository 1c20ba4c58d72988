"""Output of commands: the result on stdout, everything else on stderr.

A command prints its progress with :func:`notes` and ends with :func:`emit`, which implement ``--json`` and ``--quiet``.
Output of libraries is redirected, so that stdout contains only the JSON document.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from metaphrase.io.progress import Advance, Begin, progress_bars

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

#: Seconds between the lines that report the progress of a task without a progress bar.
SECONDS_BETWEEN_LINES = 60.0


@dataclass
class _Output:
    json: bool = False
    quiet: bool = False
    stdout: TextIO | None = None
    stack: ExitStack | None = None


_output = _Output()


@contextmanager
def session() -> Iterator[None]:
    """Scope of one command; restores stdout, logging and warnings at the end.

    Characters that the encoding of stdout does not have are escaped.
    """
    global _output
    outer, _output = _output, _Output()
    with ExitStack() as stack:
        _output.stack = stack
        if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
            stack.callback(sys.stdout.reconfigure, errors="strict")
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            yield
        finally:
            _output = outer


def configure(*, as_json: bool, quiet: bool) -> None:
    """Configure the output of the current command.

    JSON is one document on stdout, and everything else goes to stderr; quiet prints only errors and the result.
    """
    _output.json, _output.quiet = as_json, quiet
    if not show_progress():
        _hide_bars(_output.stack)
    if (stack := _output.stack) is None or not (as_json or quiet) or _output.stdout is not None:
        return  # nothing is redirected, or it already is, because options are parsed twice
    _output.stdout = sys.stdout
    if not quiet:
        stack.enter_context(redirect_stdout(sys.stderr))
    else:
        nowhere = stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - the stack closes it
        stack.enter_context(redirect_stdout(nowhere))
        logging.disable(logging.WARNING)
        stack.callback(logging.disable, logging.NOTSET)
        stack.enter_context(warnings.catch_warnings(action="ignore"))


def notes() -> Console:
    """Console for progress and notes, without markup: stderr, or nothing with ``--quiet``. Text is not broken into lines."""
    from rich.console import Console
    from rich.text import Text

    class Notes(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            is_text = all(isinstance(one, str | Text) for one in objects)
            super().print(*objects, **({"soft_wrap": True} if is_text else {}) | options)

    return Notes(stderr=True, quiet=_output.quiet, markup=False, highlight=False)


def emit(result: Mapping[str, Any] | list[Any] | str, *human: RenderableType) -> None:
    """Print a command's result.

    The result is printed on stdout with ``--json``; text and tables are then printed on stderr. Text is not broken into
    lines.
    """
    from rich.console import Console
    from rich.text import Text

    class Result(Console):
        def on_broken_pipe(self) -> None:  # rich would exit with 1
            raise BrokenPipeError

    stdout = result_stream()
    console = notes() if _output.json else Result(file=stdout)
    for item in human:
        if isinstance(item, str | Text):
            console.print(item, soft_wrap=True, markup=False, highlight=False)
        else:
            console.print(item)
    if _output.json:
        text = json.dumps(result, indent=2, ensure_ascii=False, default=str)
        try:
            text.encode(stdout.encoding or "utf-8")
        except UnicodeEncodeError:  # another encoding, or the name of a file that is not UTF-8
            text = json.dumps(result, indent=2, default=str)
        stdout.write(text + "\n")
    stdout.flush()


def result_stream() -> TextIO:
    """The process's stdout, also where the output of libraries is redirected."""
    return _output.stdout or sys.stdout


def emit_submitted(output: str) -> int:
    """Print the result of a command that submitted its work to Slurm. Returns its exit status."""
    notes().print(f"Submitted to Slurm; the last job writes {output}.")
    emit({"output": output, "submitted": True})
    return 0


def show_progress() -> bool:
    """Whether progress bars are shown: on a terminal, without ``--quiet``."""
    return not _output.quiet and sys.stderr.isatty()


@contextmanager
def progress(console: Console) -> Iterator[Begin]:
    """Progress bars on a console; if bars are not shown, a line per task, and at most one per minute while it runs.

    Yields a function that starts a bar: it takes a text and a total, and returns a function that advances the bar.
    """
    if show_progress():
        with progress_bars(True, console) as begin:
            yield begin
        return

    def announce(description: str, total: int) -> Advance:
        console.print(f"{description}: {total:,} …")
        done, shown = 0, time.monotonic()

        def advance(n: int) -> None:
            nonlocal done, shown
            done += n
            if done < total and time.monotonic() - shown >= SECONDS_BETWEEN_LINES:
                shown = time.monotonic()
                console.print(f"{description}: {done:,} of {total:,} …")

        return advance

    yield announce


def is_json() -> bool:
    """Whether the result is printed as JSON."""
    return _output.json


def is_quiet() -> bool:
    """Whether only errors and the result are printed."""
    return _output.quiet


def _hide_bars(stack: ExitStack | None) -> None:
    """Disable the progress bars of the libraries that are imported, and of those that the command imports."""
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
        if stack is not None and name not in os.environ:
            os.environ[name] = "1"
            stack.callback(os.environ.pop, name, None)
    if (datasets := sys.modules.get("datasets")) is not None:
        datasets.disable_progress_bars()
    if (transformers := sys.modules.get("transformers.utils.logging")) is not None:
        transformers.disable_progress_bar()  # also disables those of the Hub
