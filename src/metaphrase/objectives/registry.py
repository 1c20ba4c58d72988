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
from metaphrase.io.arguments import describe_type, hints_of, is_of_type
from metaphrase.io.configuration import did_you_mean

if TYPE_CHECKING:
    from metaphrase.objectives.base import Objective

#: Entry points of other packages: ``my-objective = "package.module:Class"``.
ENTRY_POINTS = "metaphrase.objectives"

#: Reference to a class of another package in a recipe.
REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")

#: Keys of the trainer's log that are not objectives.
LOG_KEYS = re.compile(r"loss|steps?|skipped_steps|epoch|learning_rate|grad_norm|total_flos|(train|eval)_.*")


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
        self._classes: dict[str, type[Objective]] = {}  # set by the caller; others are imported at each lookup

    def __getitem__(self, name: str) -> type[Objective]:
        """The class of an objective."""
        return self._classes[name] if name in self._classes else self._load(name)

    def __setitem__(self, name: str, cls: type[Objective]) -> None:
        """Add an objective, or replace one."""
        check_class(cls, getattr(cls, "__name__", repr(cls)))
        if cls.name != name:
            raise ValueError(f"{cls.__name__} has the name {cls.name!r}. Set its `name` to {name!r}, or use that key.")
        self._classes[name] = cls

    def __delitem__(self, name: str) -> None:
        del self._classes[name]

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys([*self._table, *self._entry_points, *self._classes])

    def __len__(self) -> int:
        return sum(1 for _ in self)

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

    def _load(self, name: str) -> type[Objective]:
        if name in self._table:
            reference = self._table[name][1]
        elif name in self._entry_points:
            reference = self._entry_points[name].value
        elif is_reference(name):
            return load_class(name)
        else:
            raise KeyError(name)
        cls = load_class(reference)
        if cls.name != name:
            raise RecipeError(
                f"The objective {name!r} is registered for {reference}, whose name is {cls.name!r}. The names must be equal."
            )
        return cls


def is_reference(name: str) -> bool:
    """Whether a name has the form ``package.module:Class``.

    >>> is_reference("my_package.losses:Distance"), is_reference("tr")
    (True, False)
    """
    return REFERENCE.fullmatch(name) is not None


def load_class(reference: str) -> type[Objective]:
    """Import an objective."""
    module, _, name = reference.partition(":")
    try:
        found = import_module(module)
        cls = getattr(found, name, None)
    except (Exception, SystemExit) as error:  # the module may raise any
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            reason = f"{error}. Install its package, or add its folder to PYTHONPATH."
        else:
            reason = f"{module} raises {type(error).__name__}: {error}. Correct it, or install what it imports."
        raise RecipeError(f"The objective {reference!r} cannot be imported: {reason}") from error
    if cls is None:
        raise RecipeError(
            f"The objective {reference!r} cannot be imported: {module} has no {name!r}{did_you_mean(name, vars(found))}."
        )
    check_class(cls, repr(reference))
    return cls


def check_class(cls: Any, reference: str) -> None:
    """Check that a class has what an objective needs."""
    from torch.nn import ModuleDict

    from metaphrase.objectives.base import Granularity, Objective

    if not (inspect.isclass(cls) and issubclass(cls, Objective) and isinstance(getattr(cls, "name", None), str)):
        raise RecipeError(
            f"{reference} is not an objective: it must be a subclass of metaphrase.Objective with a name."
        )
    if missing := sorted(cls.__abstractmethods__):
        raise RecipeError(f"The objective {reference} lacks the method {', '.join(missing)}. Define it in the class.")
    if not is_of_type(granularity := getattr(cls, "granularity", None), Granularity):
        raise RecipeError(
            f"'granularity' of the objective {reference} must be {describe_type(Granularity)}, but is {granularity!r}."
        )
    if not cls.name or "." in cls.name:
        raise RecipeError(f"The objective {reference} has the name {cls.name!r}. Use a name without dots.")
    if hasattr(ModuleDict, cls.name):
        raise RecipeError(
            f"The objective {reference} has the name {cls.name!r}, which torch reserves. Use another name."
        )
    if LOG_KEYS.fullmatch(cls.name):
        raise RecipeError(
            f"The objective {reference} has the name {cls.name!r}, which is a key of the trainer's log. Use another name."
        )
    if cls.__hash__ is None:
        raise RecipeError(
            f"The objective {reference} cannot be hashed, which torch requires of modules. Decorate it with "
            "@dataclass(eq=False, repr=False, kw_only=True)."
        )
    parameters = inspect.signature(cls).parameters.values()
    if not any(one.name == "max_length" or one.kind is one.VAR_KEYWORD for one in parameters):
        raise RecipeError(
            f"The constructor of the objective {reference} has no argument 'max_length', which every recipe passes. Add it, "
            "and pass it to super().__init__()."
        )


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
