"""Recipes: a weighted sum of objectives, as data."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

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
            FileNotFoundError: There is no such recipe.
            ValueError: The file is not a recipe; the message says what is wrong with which key.
        """
        path = Path(name_or_path)
        if path.suffix in (".yaml", ".yml"):
            if not path.is_file():
                raise FileNotFoundError(f"Recipe file {path} does not exist.")
            return cls.from_dict(_read_yaml(path), origin=str(path))
        known = {recipe.stem: recipe for recipe in _packaged()}
        if str(name_or_path) not in known:
            raise FileNotFoundError(
                f"There is no recipe {str(name_or_path)!r}; known recipes are {', '.join(sorted(known))}"
                f"{_did_you_mean(str(name_or_path), known)}. A recipe of your own is a path that ends in .yaml."
            )
        return cls.from_dict(_read_yaml(known[str(name_or_path)]), origin=f"recipe {name_or_path}")

    @classmethod
    def from_dict(cls, content: Any, *, origin: str = "recipe") -> Recipe:
        """Build a recipe from what its YAML holds.

        Raises:
            ValueError: A key, an objective or one of its arguments is unknown or of the wrong kind.
        """
        if not isinstance(content, Mapping):
            raise ValueError(f"{origin} should hold keys such as 'name' and 'terms', but holds {content!r}.")
        _check_keys(content, [f.name for f in fields(cls)], origin)
        terms = content.get("terms")
        if not isinstance(terms, list) or not terms:
            raise ValueError(f"{origin} needs a list 'terms' of at least one objective, but has {terms!r}.")
        parsed = tuple(_parse_term(term, origin) for term in terms)
        twice = sorted({term.objective for term in parsed if sum(t.objective == term.objective for t in parsed) > 1})
        if twice:
            raise ValueError(f"{origin} names {', '.join(twice)} twice; give each objective one term.")
        return cls(**{**content, "name": content.get("name", origin), "terms": parsed})

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
        from metaphrase.objectives import OBJECTIVES

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


def _read_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error


def _parse_term(term: Any, origin: str) -> Term:
    from metaphrase.objectives import OBJECTIVES

    if not isinstance(term, Mapping) or "objective" not in term:
        raise ValueError(f"A term of {origin} needs an 'objective', but is {term!r}.")
    _check_keys(term, [f.name for f in fields(Term)], f"a term of {origin}")
    name, weight, args = term["objective"], term.get("weight", 1.0), term.get("args") or {}
    if name not in OBJECTIVES:
        raise ValueError(
            f"{origin} names objective {name!r}; known objectives are {', '.join(sorted(OBJECTIVES))}"
            f"{_did_you_mean(str(name), OBJECTIVES)}. Register a new one in objectives/__init__.py."
        )
    if isinstance(weight, bool) or not isinstance(weight, int | float) or weight < 0:
        raise ValueError(f"The weight of {name!r} in {origin} should be a number from 0, but is {weight!r}.")
    if not isinstance(args, Mapping):
        raise ValueError(f"The args of {name!r} in {origin} should be keys and values, but are {args!r}.")
    accepted = [key for key in OBJECTIVES[name].__init__.__kwdefaults__ or {} if key != "max_length"]
    _check_keys(args, accepted, f"the args of {name!r} in {origin}")
    return Term(name, float(weight), dict(args))


def _check_keys(given: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    known = list(known)
    for key in given:
        if key not in known:
            raise ValueError(
                f"Unknown key {key!r} in {where}{_did_you_mean(str(key), known)}. Known keys are {', '.join(known)}."
            )


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
