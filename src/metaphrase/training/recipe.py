"""Recipes: a weighted sum of objectives, as data."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metaphrase.exceptions import MissingFileError, RecipeError
from metaphrase.io.configuration import (
    Keys,
    check_keys,
    describe_type,
    did_you_mean,
    is_of_type,
    place,
    plain,
    read_yaml,
)
from metaphrase.objectives import OBJECTIVES
from metaphrase.objectives.registry import is_reference, parameters_of

if TYPE_CHECKING:
    from metaphrase.objectives import Objective


@dataclass(frozen=True)
class Term:
    """One objective of a recipe.

    Attributes:
        objective: Its key in ``OBJECTIVES``: a name, or ``package.module:Class``.
        weight: Its weight in the sum.
        args: Arguments of its constructor.
    """

    objective: str
    weight: float = 1.0
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the objective in logs, heads and cards. A class given as ``package.module:Class`` is imported for it."""
        return OBJECTIVES[self.objective].name if is_reference(self.objective) else self.objective


@dataclass(frozen=True)
class Recipe:
    """A weighted sum of objectives, with the settings for training it.

    Attributes:
        name: Key of the recipe.
        terms: The objectives.
        paper: Publication.
        description: One line about the recipe.
        max_length: Maximum number of pieces per sentence.
        language_embedding: Add a learned language vector to the encoder's input (WACSE, section 6.1).
        pooling: Pooling for encoders without a pooling layer.
        training: Training arguments for one small machine.
        paper_training: Training arguments of the paper, which override ``training`` on request.
    """

    name: str
    terms: tuple[Term, ...]
    paper: str | None = None
    description: str = ""
    max_length: int = 32
    language_embedding: bool = False
    pooling: str = "cls"
    training: Mapping[str, Any] = field(default_factory=dict)
    paper_training: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, name_or_path: str | Path) -> Recipe:
        """Load a packaged recipe or a YAML file.

        Keys, names of objectives and weights are checked here. The arguments of objectives are checked by :meth:`check`,
        which imports the objectives.

        Args:
            name_or_path: A name that ``metaphrase recipes`` lists, or a path that ends in ``.yaml``.

        Raises:
            MissingFileError: The recipe does not exist.
            ConfigError: The file is not valid YAML; the message has the position.
            RecipeError: A key, an objective or a weight is invalid; the message has the position.
        """
        path = Path(name_or_path)
        if path.suffix in (".yaml", ".yml"):
            if not path.is_file():
                raise MissingFileError(f"Recipe file {path} does not exist.")
            return cls.from_dict(read_yaml(path), origin=str(path))
        known = {recipe.stem: recipe for recipe in _packaged()}
        if str(name_or_path) not in known:
            raise MissingFileError(
                f"Unknown recipe {str(name_or_path)!r}; known recipes are {', '.join(sorted(known))}"
                f"{did_you_mean(str(name_or_path), known)}. For a recipe file, pass a path that ends in .yaml."
            )
        return cls.from_dict(read_yaml(known[str(name_or_path)]), origin=f"recipe {name_or_path}")

    @classmethod
    def from_dict(cls, content: Any, *, origin: str = "recipe") -> Recipe:
        """Build a recipe from the content of its YAML file. No objective is imported.

        Args:
            content: The content.
            origin: Description of its source, for messages.

        Raises:
            RecipeError: A key, an objective or a weight is invalid.
        """
        if not isinstance(content, Mapping):
            raise RecipeError(f"{origin} should have keys such as 'name' and 'terms', but is {_short(content)}.")
        check_keys(content, [f.name for f in fields(cls)], origin, RecipeError)
        for key, (kinds, wanted) in _KINDS.items():
            if key in content and not _is(content[key], kinds):
                raise RecipeError(
                    f"{place(content, key)}{key!r} of {origin} should be {wanted}, but is {_short(content[key])}."
                )
        for key in ("training", "paper_training"):
            if odd := [name for name in content.get(key, ()) if not isinstance(name, str)]:
                raise RecipeError(
                    f"{place(content[key], odd[0])}{odd[0]!r} in {key!r} of {origin} is not the name of an option."
                )
        if content.get("max_length", 1) < 1:
            raise RecipeError(f"{place(content, 'max_length')}'max_length' of {origin} should be at least 1.")
        terms = content.get("terms")
        if not isinstance(terms, list) or not terms:
            raise RecipeError(f"{origin} needs a list 'terms' of at least one objective, but has {_short(terms)}.")
        parsed = tuple(_parse_term(term, origin) for term in terms)
        _check_duplicates([term.objective for term in parsed], origin)
        return cls(**{**plain(content), "name": content.get("name", origin), "terms": parsed})

    def to_dict(self) -> dict[str, Any]:
        """The recipe as plain data, as in its YAML file."""
        terms = [{"objective": t.objective, "weight": t.weight, "args": plain(t.args)} for t in self.terms]
        rest = {f.name: plain(getattr(self, f.name)) for f in fields(self) if f.name not in ("name", "terms")}
        return {"name": self.name, "terms": terms} | rest

    def check(self) -> None:
        """Check the arguments of every term against the constructor of its objective, which is imported.

        Raises:
            RecipeError: An objective cannot be imported, or an argument is unknown or has the wrong type; the message has
                its position if the recipe comes from a file.
        """
        for term in self.terms:
            where = f"the args of {term.objective!r} in recipe {self.name!r}"
            parameters = parameters_of(OBJECTIVES[term.objective])
            check_keys(term.args, parameters, where, RecipeError)
            for key, value in term.args.items():
                if not is_of_type(value, parameters[key]):
                    raise RecipeError(
                        f"{place(term.args, key)}{key!r} in {where} should be {describe_type(parameters[key])}, but is "
                        f"{_short(value)}."
                    )
        _check_duplicates([term.name for term in self.terms], f"recipe {self.name!r}")

    def objectives(self, max_length: int | None = None) -> dict[str, Objective]:
        """The objectives of the terms by name, without heads.

        Args:
            max_length: Maximum number of pieces per sentence; None uses the recipe's.

        Raises:
            RecipeError: See :meth:`check`.
        """
        self.check()
        length = max_length or self.max_length
        return {t.name: OBJECTIVES[t.objective](**{"max_length": length, **t.args}) for t in self.terms}

    @property
    def columns(self) -> frozenset[str]:
        """Columns that the recipe reads in addition to ``source`` and ``target``."""
        views = (view for objective in self.objectives().values() for view in objective.views())
        return frozenset(column for view in views for column in view.columns)


def list_recipes() -> list[Recipe]:
    """The packaged recipes, sorted by name."""
    return [Recipe.load(path.stem) for path in sorted(_packaged(), key=lambda path: path.stem)]


def _packaged() -> list[Path]:
    return [
        Path(str(p)) for p in resources.files("metaphrase").joinpath("recipes").iterdir() if p.name.endswith(".yaml")
    ]


#: Types of the keys of a recipe, and their description.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "name": ((str,), "text"),
    "paper": ((str, type(None)), "text"),
    "description": ((str,), "text"),
    "max_length": ((int,), "a whole number"),
    "language_embedding": ((bool,), "true or false"),
    "pooling": ((str,), "a word such as cls or mean"),
    "training": ((Mapping,), "keys and values"),
    "paper_training": ((Mapping,), "keys and values"),
}


def _is(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def _short(value: Any) -> str:
    return reprlib.repr(plain(value))


def _check_duplicates(names: list[str], origin: str) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise RecipeError(f"{origin} names {', '.join(twice)} twice. Each objective can have one term.")


def _parse_term(term: Any, origin: str) -> Term:
    if not isinstance(term, Mapping) or "objective" not in term:
        raise RecipeError(f"A term of {origin} needs an 'objective', but is {_short(term)}.")
    check_keys(term, [f.name for f in fields(Term)], f"a term of {origin}", RecipeError)
    name, weight, args = term["objective"], term.get("weight", 1.0), term.get("args")
    args = {} if args is None else args
    if not isinstance(name, str) or name not in OBJECTIVES:
        raise RecipeError(
            f"{place(term, 'objective')}{origin} names objective {_short(name)}; known objectives are "
            f"{', '.join(sorted(OBJECTIVES))}{did_you_mean(str(name), OBJECTIVES)}. Name an objective of another package "
            "as package.module:Class."
        )
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= sys.float_info.max:
        raise RecipeError(
            f"{place(term, 'weight')}The weight of {name!r} in {origin} should be a number of at least 0, but is "
            f"{_short(weight)}."
        )
    if not isinstance(args, Mapping):
        raise RecipeError(
            f"{place(term, 'args')}The args of {name!r} in {origin} should be keys and values, but are {_short(args)}."
        )
    located = Keys(plain(args))
    located.places = dict(getattr(args, "places", {}))
    return Term(name, float(weight), located)
