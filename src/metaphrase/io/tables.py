"""Tables for the console."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text


def titled_table(title: str) -> Table:
    """An empty table with a title on its left."""
    return Table(
        title=Text(title, style="bold"),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
