"""Progress of a long function, reported to its caller."""

from __future__ import annotations

from collections.abc import Callable

#: Called with the number of newly finished items.
Advance = Callable[[int], None]
#: Starts a task: takes its description and its number of items, and returns a function that advances it.
Begin = Callable[[str, int], Advance]


def no_progress(description: str, total: int) -> Advance:
    """Ignore the progress of a task."""
    return lambda n: None
