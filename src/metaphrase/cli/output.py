"""What a command says, and where: its result on stdout, all else on stderr.

A command prints its progress with :func:`notes` and ends with :func:`emit`; ``--json`` and ``--quiet`` then work by
themselves. What libraries print meanwhile never gets between a reader and the JSON on stdout.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


@dataclass
class _Output:
    json: bool = False
    quiet: bool = False
    stdout: TextIO | None = None
    stack: ExitStack | None = field(default=None, repr=False)


_output = _Output()


@contextmanager
def session() -> Iterator[None]:
    """The time of one command; when it ends, stdout, logging and warnings are as they were."""
    global _output
    outer, _output = _output, _Output()
    with ExitStack() as stack:
        _output.stack = stack
        try:
            yield
        finally:
            _output = outer


def configure(*, as_json: bool, quiet: bool) -> None:
    """Say how the command of this session answers.

    Args:
        as_json: The result is one JSON document on stdout; what would stand there goes to stderr.
        quiet: Nothing but errors and the result is printed.
    """
    _output.json, _output.quiet = (
        _output.json or as_json,
        _output.quiet or quiet,
    )  # a command may parse another's options
    as_json, quiet = _output.json, _output.quiet
    if not show_progress():
        _hide_bars()
    if (stack := _output.stack) is None or not (as_json or quiet) or _output.stdout is not None:
        return
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
    """Where progress and remarks go: stderr, nowhere with ``--quiet``."""
    from rich.console import Console

    return Console(stderr=True, quiet=_output.quiet)


def emit(result: Mapping[str, Any] | list[Any] | str, *human: RenderableType) -> None:
    """Print a command's result.

    Args:
        result: What ``--json`` prints, on stdout.
        *human: What people read instead: text or tables, on stdout; with ``--json`` on stderr.
    """
    from rich.console import Console

    stdout = _output.stdout or sys.stdout
    console = notes() if _output.json else Console(file=stdout)
    for item in human:
        if isinstance(item, str):
            console.print(item, soft_wrap=True, markup=False, highlight=False)
        else:
            console.print(item)
    if _output.json:
        stdout.write(json.dumps(result, indent=2, ensure_ascii=False, default=str) + "\n")
    stdout.flush()


def show_progress() -> bool:
    """Whether bars are drawn: to a person at a terminal who did not ask for quiet."""
    return not _output.quiet and sys.stderr.isatty()


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """Progress bars on a console, or a line per task if bars are not shown.

    Yields:
        A function that starts a bar: it takes a text and a total, and returns a function that advances the bar.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not show_progress()) as bars:

        def begin(description: str, total: int) -> Callable[[int], None]:
            if not show_progress():
                console.print(f"{description}: {total:,} …")
            task = bars.add_task(description, total=total)
            return lambda n: bars.advance(task, n)

        yield begin


def is_json() -> bool:
    """Whether stdout is for the JSON result."""
    return _output.json


def is_quiet() -> bool:
    """Whether nothing but errors and the result is wanted."""
    return _output.quiet


def _hide_bars() -> None:
    """Turn off the bars of the libraries that are there."""
    if (datasets := sys.modules.get("datasets")) is not None:
        datasets.disable_progress_bars()
    if (transformers := sys.modules.get("transformers.utils.logging")) is not None:
        transformers.disable_progress_bar()  # the Hub's too
