"""The table of objectives. Names are known without importing anything; classes are imported on first use."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, MutableMapping
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from metaphrase.exceptions import RecipeError
from metaphrase.io.arguments import hints_of

if TYPE_CHECKING:
    from metaphrase.objectives.base import Objective

#: Entry points of other packages: ``my-objective = "package.module:Class"``.
ENTRY_POINTS = "metaphrase.objectives"

#: Reference to a class of another package in a recipe.
REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


class Objectives(MutableMapping[str, "type[Objective]"]):
    """Objectives by name.

    A key is looked up in this order: classes that were set (``OBJECTIVES["name"] = Class``), the table, the entry points of
    installed packages, and, if it has the form ``package.module:Class``, that class.

    >>> objectives = Objectives({"tr": ("sentence", "metaphrase.objectives.translation_ranking:TranslationRanking")})
    >>> objectives.granularity("tr"), objectives["tr"].__name__
    ('sentence', 'TranslationRanking')
    """

    def __init__(self, table: Mapping[str, tuple[str, str]]) -> None:
        self._table = dict(table)
        self._classes: dict[str, type[Objective]] = {}

    def __getitem__(self, name: str) -> type[Objective]:
        """The class of an objective."""
        if name in self._classes:
            return self._classes[name]
        if name in self._table:
            return self._keep(name, self._table[name][1], expected=name)
        if name in self._entry_points:
            return self._keep(name, self._entry_points[name].value, expected=name)
        if is_reference(name):
            return self._keep(name, name, expected=None)
        raise KeyError(name)

    def __setitem__(self, name: str, cls: type[Objective]) -> None:
        """Add an objective, or replace one."""
        if cls.name != name:
            raise ValueError(f"{cls.__name__} has the name {cls.name!r}. Set its `name` to {name!r}, or use that key.")
        self._classes[name] = cls

    def __delitem__(self, name: str) -> None:
        del self._classes[name]

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys(
            [*self._table, *self._entry_points, *(n for n in self._classes if not is_reference(n))]
        )

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        known = name in self._classes or name in self._table or name in self._entry_points
        return known or (isinstance(name, str) and is_reference(name))

    def granularity(self, name: str) -> str:
        """Granularity of an objective; built-in objectives are not imported."""
        return self._table[name][0] if name in self._table and name not in self._classes else self[name].granularity

    @cached_property
    def _entry_points(self) -> dict[str, EntryPoint]:
        """Objectives of installed packages; the table has precedence."""
        return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}

    def _keep(self, name: str, reference: str, *, expected: str | None) -> type[Objective]:
        cls = load_class(reference)
        if expected is not None and cls.name != expected:
            raise RecipeError(
                f"The objective {expected!r} is registered for {reference}, whose name is {cls.name!r}. The names must be "
                "equal."
            )
        self._classes[name] = cls
        return cls


def is_reference(name: str) -> bool:
    """Whether a name has the form ``package.module:Class``.

    >>> is_reference("my_package.losses:Distance"), is_reference("tr")
    (True, False)
    """
    return REFERENCE.fullmatch(name) is not None


def load_class(reference: str) -> type[Objective]:
    """Import an objective."""
    from metaphrase.objectives.base import Objective

    module, _, name = reference.partition(":")
    try:
        cls = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise RecipeError(
            f"The objective {reference!r} cannot be imported: {error}. Install its package, or add its folder to PYTHONPATH."
        ) from error
    if not (inspect.isclass(cls) and issubclass(cls, Objective) and isinstance(getattr(cls, "name", None), str)):
        raise RecipeError(
            f"{reference!r} is not an objective: it must be a subclass of metaphrase.Objective with a name."
        )
    return cls


def parameters_of(cls: type[Objective]) -> dict[str, Any]:
    """Arguments that a recipe may pass to an objective, with their annotations; ``Any`` where these are unknown.

    >>> from metaphrase.objectives.sentence_alignment import SentenceAlignment
    >>> sorted(parameters_of(SentenceAlignment))
    ['candidates', 'exclude_specials', 'gather']
    """
    parameters = [
        parameter
        for name, parameter in inspect.signature(cls).parameters.items()
        if name != "max_length" and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    hints = hints_of(cls)
    return {parameter.name: hints.get(parameter.name, Any) for parameter in parameters}
