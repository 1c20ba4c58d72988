"""Hub data sets: their names, and their rows at a fixed commit."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from datasets import load_dataset, load_dataset_builder

from metaphrase.exceptions import CorpusError

#: What the name of a Hub data set starts with.
PREFIX = "hf:"

_NAME = re.compile(r"hf:(?P<name>[^:@#]+)(?::(?P<config>[^@#]+))?(?:@(?P<split>[^#]+))?(?:#(?P<revision>.+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class HubName(NamedTuple):
    """The parts of ``hf:org/name[:config][@split][#revision]``."""

    name: str
    config: str | None = None
    split: str | None = None
    revision: str | None = None


def is_hub_name(name: str) -> bool:
    """Whether a name denotes a Hub data set."""
    return name.startswith(PREFIX)


def parse_hub_name(name: str) -> HubName:
    """Parse the name of a Hub data set.

    Raises:
        CorpusError: The name is malformed.

    >>> parse_hub_name("hf:org/name:en-sw@dev")
    HubName(name='org/name', config='en-sw', split='dev', revision=None)
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise CorpusError(
            f"{name!r} is not the name of a Hub data set. Expected hf:org/name, hf:org/name:config, …@split or …#revision."
        )
    return HubName(*match.group("name", "config", "split", "revision"))


def pin_revision(name: str, revision: str | None = None) -> str | None:
    """Resolve a revision of a Hub data set to its current commit, so that later pushes do not change the data.

    Args:
        name: ``hf:org/name…``.
        revision: Branch, tag or commit; None is the default branch.

    Returns:
        The commit, or the revision as given if the Hub names no commit.
    """
    parsed = parse_hub_name(name)
    commit = load_dataset_builder(parsed.name, parsed.config, revision=revision).hash
    return str(commit) if _COMMIT.fullmatch(commit or "") else revision


def stream_rows(name: str, split: str, revision: str | None = None) -> Iterable[dict[str, Any]]:
    """Stream the rows of a Hub data set."""
    parsed = parse_hub_name(name)
    rows: Iterable[dict[str, Any]] = load_dataset(
        parsed.name, parsed.config, split=split, streaming=True, revision=revision
    )
    return rows


def count_rows(name: str, split: str, revision: str | None = None) -> int:
    """Return the size of a split, as its card states it.

    Raises:
        CorpusError: The card does not state it.
    """
    parsed = parse_hub_name(name)
    splits = load_dataset_builder(parsed.name, parsed.config, revision=revision).info.splits or {}
    if split not in splits:
        raise CorpusError(
            f"The size of {name} is unknown, so it cannot be mixed as a stream. Read it without streaming."
        )
    return int(splits[split].num_examples)
