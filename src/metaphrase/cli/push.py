"""`metaphrase push`: upload a release to a Hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console

from metaphrase.cli import parse

SUMMARY = "Push a released encoder to the Hub"

DESCRIPTION = (
    "metaphrase push FOLDER --to organisation/name: upload a release, and nothing else that lies in its folder. "
    "The access token comes from HF_TOKEN or `hf auth login`, never from the command line."
)


@dataclass
class PushOptions:
    """Where to push a release."""

    to: str = field(metadata={"help": "Repository, as organisation/name; it is made if it does not exist."})
    private: bool = field(default=False, metadata={"help": "Make a new repository private."})
    revision: str | None = field(default=None, metadata={"help": "Branch to commit to; default: main."})
    message: str | None = field(default=None, metadata={"help": "Title of the commit."})


def run(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: `FOLDER --to organisation/name` and further options.

    Returns:
        The exit status.

    Raises:
        ValueError: The folder is missing from the command line, or an option is wrong.
        OSError: The Hub cannot be reached or refuses.
    """
    folders, flags = _split(argv)
    (options,) = parse("metaphrase push", (PushOptions,), flags, description=DESCRIPTION)
    if not folders:
        raise ValueError("Which release? Name its folder first: metaphrase push FOLDER --to organisation/name.")
    from metaphrase.hub import push  # after the options: it takes seconds to import

    url = push(
        folders[0], options.to, private=options.private, revision=options.revision, commit_message=options.message
    )
    Console().print(f"Pushed {folders[0]} to {options.to}: {url}", soft_wrap=True, markup=False, highlight=False)
    return 0


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The folder, which comes first, and the flags after it."""
    if argv and not argv[0].startswith("-"):
        return [argv[0]], list(argv[1:])
    return [], list(argv)
