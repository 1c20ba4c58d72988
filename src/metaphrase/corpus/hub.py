"""Hub data sets: their names, and their rows at a fixed commit."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from datasets import DatasetBuilder, load_dataset_builder
from datasets.packaged_modules.cache.cache import Cache

from metaphrase.exceptions import CorpusError

#: What the name of a Hub data set starts with.
PREFIX = "hf:"

_NAME = re.compile(
    r"hf:(?P<name>\w[\w.-]*/[\w.-]+)(?::(?P<config>[^@#]+))?(?:@(?P<split>[^#]+))?(?:#(?P<revision>.+))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


class HubName(NamedTuple):
    """The parts of ``hf:org/name[:config][@split][#revision]``."""

    name: str
    config: str | None = None
    split: str | None = None
    revision: str | None = None

    @property
    def path(self) -> str:
        """The name for `datasets`, which without the prefix would read a folder ``org/name`` of this machine."""
        return f"hf://datasets/{self.name}"


def is_hub_name(name: str) -> bool:
    """Whether a name denotes a Hub data set."""
    return name.startswith(PREFIX)


def parse_hub_name(name: str) -> HubName:
    """Parse the name of a Hub data set.

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

    None is the default branch. Returns the revision as given if the Hub names no commit.
    """
    commit = _load_builder(name, revision).hash
    return str(commit) if _COMMIT.fullmatch(commit or "") else revision


def stream_rows(name: str, split: str, revision: str | None = None) -> Iterable[dict[str, Any]]:
    """Stream the rows of a Hub data set."""
    rows: Iterable[dict[str, Any]]
    try:
        rows = _load_builder(name, revision).as_streaming_dataset(split)
    except ValueError as error:  # no such split
        raise CorpusError(f"{name}: {error}") from error
    return rows


def count_rows(name: str, split: str, revision: str | None = None) -> int:
    """Return the size of a split, as its card states it."""
    splits = _load_builder(name, revision).info.splits or {}
    if split not in splits:
        raise CorpusError(
            f"The size of {name} is unknown, so it cannot be mixed as a stream. Read it without streaming."
        )
    return int(splits[split].num_examples)


def _load_builder(name: str, revision: str | None) -> DatasetBuilder:
    """The data set at a revision, from the Hub or its cache."""
    parsed = parse_hub_name(name)
    try:
        builder = load_dataset_builder(parsed.path, parsed.config, revision=revision)
    except (ValueError, RuntimeError) as error:
        raise CorpusError(f"{name}: {error}") from error
    if revision is not None and isinstance(builder, Cache) and builder.hash != revision:
        raise CorpusError(
            f"The Hub cannot be reached, and the cache has commit {builder.hash} of {parsed.name}, not {revision}. Pass "
            f"hf:{parsed.name}#{builder.hash} to read that commit, or connect."
        )
    return builder
