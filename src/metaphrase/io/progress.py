"""Progress of a long function, reported to its caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

#: Called with the number of newly finished items.
Advance = Callable[[int], None]
#: Starts a task: takes its description and its number of items, and returns a function that advances it.
Begin = Callable[[str, int], Advance]


def no_progress(description: str, total: int) -> Advance:
    """Ignore the progress of a task."""
    return lambda n: None


@contextmanager
def progress_bars(show: bool, console: Console | None = None) -> Iterator[Begin]:
    """Draw progress bars. A finished bar is erased when the next one starts, and all of them at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = console or Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not show) as bars:

        def begin(description: str, total: int) -> Advance:
            for finished in [task.id for task in bars.tasks if task.finished]:
                bars.remove_task(finished)
            task = bars.add_task(description, total=total)
            return lambda n: bars.advance(task, n)

        yield begin
