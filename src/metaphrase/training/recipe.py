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
from metaphrase.io.configuration import check_keys, did_you_mean, place, plain, read_yaml
from metaphrase.objectives import OBJECTIVES

if TYPE_CHECKING:
    from metaphrase.objectives import Objective


@dataclass(frozen=True)
class Term:
    """One objective of a recipe.

    Attributes:
        objective: Its name in ``OBJECTIVES``.
        weight: Its weight in the sum.
        args: Arguments of its constructor.
    """

    objective: str
    weight: float = 1.0
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """A weighted sum of objectives with the settings that it is trained with.

    Attributes:
        name: Key of the recipe.
        terms: The objectives.
        paper: Where it was published.
        description: One line for a reader.
        max_length: Pieces kept of a sentence.
        language_embedding: Add a learned vector of each text's language to the encoder's input (WACSE, section 6.1).
        pooling: Pooling given to an encoder that comes without one.
        training: Training arguments that suit one small machine.
        paper_training: The paper's optimiser, schedule, steps and batch, on top of ``training`` where they are asked for.
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
        """Load a recipe that comes with the package, or a YAML file of your own.

        Args:
            name_or_path: A name that ``metaphrase recipes`` prints, or a path that ends in ``.yaml``.

        Raises:
            MissingFileError: There is no such recipe.
            ConfigError: The file is not YAML; the message says where.
            RecipeError: It is not a recipe; the message says what is wrong with which key, and where it stands.
        """
        path = Path(name_or_path)
        if path.suffix in (".yaml", ".yml"):
            if not path.is_file():
                raise MissingFileError(f"Recipe file {path} does not exist.")
            return cls.from_dict(read_yaml(path), origin=str(path))
        known = {recipe.stem: recipe for recipe in _packaged()}
        if str(name_or_path) not in known:
            raise MissingFileError(
                f"There is no recipe {str(name_or_path)!r}; known recipes are {', '.join(sorted(known))}"
                f"{did_you_mean(str(name_or_path), known)}. A recipe of your own is a path that ends in .yaml."
            )
        return cls.from_dict(read_yaml(known[str(name_or_path)]), origin=f"recipe {name_or_path}")

    @classmethod
    def from_dict(cls, content: Any, *, origin: str = "recipe") -> Recipe:
        """Build a recipe from what its YAML holds. Nothing is imported or loaded for it.

        Raises:
            RecipeError: A key, an objective or one of its arguments is unknown or of the wrong kind.
        """
        if not isinstance(content, Mapping):
            raise RecipeError(f"{origin} should hold keys such as 'name' and 'terms', but holds {_short(content)}.")
        check_keys(content, [f.name for f in fields(cls)], origin, RecipeError)
        for key, (kinds, wanted) in _KINDS.items():
            if key in content and not _is(content[key], kinds):
                raise RecipeError(
                    f"{place(content, key)}{key!r} of {origin} should be {wanted}, but is {_short(content[key])}."
                )
        for key in ("training", "paper_training"):
            if odd := [name for name in content.get(key, ()) if not isinstance(name, str)]:
                raise RecipeError(
                    f"{place(content[key], odd[0])}{odd[0]!r} in {key!r} of {origin} is no option's name."
                )
        if content.get("max_length", 1) < 1:
            raise RecipeError(f"{place(content, 'max_length')}'max_length' of {origin} should be at least 1.")
        terms = content.get("terms")
        if not isinstance(terms, list) or not terms:
            raise RecipeError(f"{origin} needs a list 'terms' of at least one objective, but has {_short(terms)}.")
        parsed = tuple(_parse_term(term, origin) for term in terms)
        twice = sorted({term.objective for term in parsed if sum(t.objective == term.objective for t in parsed) > 1})
        if twice:
            raise RecipeError(f"{origin} names {', '.join(twice)} twice; give each objective one term.")
        return cls(**{**plain(content), "name": content.get("name", origin), "terms": parsed})

    def to_dict(self) -> dict[str, Any]:
        """The recipe as plain data, as its YAML would hold it."""
        terms = [{"objective": t.objective, "weight": t.weight, "args": dict(t.args)} for t in self.terms]
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "terms"}
        return {"name": plain.pop("name"), "terms": terms} | {
            k: dict(v) if isinstance(v, Mapping) else v for k, v in plain.items()
        }

    def objectives(self, max_length: int | None = None) -> dict[str, Objective]:
        """The objectives of the terms by name, without heads.

        Args:
            max_length: Pieces kept of a sentence; None takes the recipe's.
        """
        length = max_length or self.max_length
        return {t.objective: OBJECTIVES[t.objective](**{"max_length": length, **t.args}) for t in self.terms}

    @property
    def columns(self) -> frozenset[str]:
        """Columns that a corpus needs beside ``source`` and ``target``."""
        views = (view for objective in self.objectives().values() for view in objective.views())
        return frozenset(column for view in views for column in view.columns)


def list_recipes() -> list[Recipe]:
    """The recipes that come with the package, by name."""
    return [Recipe.load(path.stem) for path in sorted(_packaged(), key=lambda path: path.stem)]


def _packaged() -> list[Path]:
    return [
        Path(str(p)) for p in resources.files("metaphrase").joinpath("recipes").iterdir() if p.name.endswith(".yaml")
    ]


#: What the keys of a recipe hold, and the words for it.
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


def _parse_term(term: Any, origin: str) -> Term:
    if not isinstance(term, Mapping) or "objective" not in term:
        raise RecipeError(f"A term of {origin} needs an 'objective', but is {_short(term)}.")
    check_keys(term, [f.name for f in fields(Term)], f"a term of {origin}", RecipeError)
    name, weight, args = term["objective"], term.get("weight", 1.0), term.get("args")
    args = {} if args is None else args
    if not isinstance(name, str) or name not in OBJECTIVES:
        raise RecipeError(
            f"{place(term, 'objective')}{origin} names objective {_short(name)}; known objectives are "
            f"{', '.join(sorted(OBJECTIVES))}{did_you_mean(str(name), OBJECTIVES)}. Register a new one in "
            "objectives/__init__.py."
        )
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= sys.float_info.max:
        raise RecipeError(
            f"{place(term, 'weight')}The weight of {name!r} in {origin} should be a number from 0, but is "
            f"{_short(weight)}."
        )
    if not isinstance(args, Mapping):
        raise RecipeError(
            f"{place(term, 'args')}The args of {name!r} in {origin} should be keys and values, but are {_short(args)}."
        )
    declaration = OBJECTIVES.declaration(name)
    check_keys(args, declaration.parameters, f"the args of {name!r} in {origin}", RecipeError)
    for key, value in args.items():
        if not declaration.accepts(key, value):
            raise RecipeError(
                f"{place(args, key)}{key!r} in the args of {name!r} in {origin} should be {declaration.type_of(key)}, "
                f"but is {_short(value)}."
            )
    return Term(name, float(weight), plain(args))
