"""Recipes: a weighted sum of objectives, as data."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from metaphrase.exceptions import MissingFileError, RecipeError
from metaphrase.io.arguments import (
    AtLeast0,
    Count,
    LanguageTemperature,
    Length,
    PoolingMode,
    Ratio,
    Weight,
    check_value,
    hints_of,
)
from metaphrase.io.configuration import Keys, check_keys, did_you_mean, place, plain, read_yaml
from metaphrase.io.files import RECIPES
from metaphrase.io.training_ranges import TRAINING_RANGES
from metaphrase.objectives import OBJECTIVES
from metaphrase.objectives.registry import is_reference, parameters_of

if TYPE_CHECKING:
    from metaphrase.modeling.views import View
    from metaphrase.objectives import Objective

#: Which pairs are in the same batch.
Batches = Literal["mixed", "language", "shared_target"]

#: What the ``training`` section of a recipe may contain: settings of the optimisation, but not what is read, written, pushed
#: or logged. The ``args`` of a term may name files and models to read, and ``package.module:Class`` runs code.
SETTINGS: dict[str, Any] = {
    name: TRAINING_RANGES[name]
    for name in (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "num_train_epochs",
        "max_steps",
        "learning_rate",
        "warmup_steps",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "max_grad_norm",
        "seed",
        "data_seed",
    )
} | {
    "head_learning_rate": AtLeast0 | None,
    "weight_decay_toward": Literal["zero", "start"],
    "lr_scheduler_type": Literal[
        "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"
    ],
    "optim": Literal["adamw_torch", "adamw_torch_fused", "adafactor", "sgd"],
    "effective_batch_size": Count | None,
    "micro_batch_size": Count | None,
    "batches": Batches,
    "batch_sampler": Literal["batch_sampler", "no_duplicates", "no_duplicates_hashed"],
    "max_skipped_steps": Count,
    "bf16": bool | None,
    "fp16": bool,
    "activation_checkpointing": bool,
    "packing": bool,
    "freeze_word_embeddings": bool,
    "temperature": LanguageTemperature | None,
    "monolingual_ratio": Ratio,
    "max_length": Length | None,
}


@dataclass(frozen=True)
class Schedule:
    """A weight that changes linearly during training, and then keeps its final value.

    Attributes:
        steps: Steps of the optimiser until the end.
        start: Weight of the first step.
        end: Weight after these steps.

    >>> [Schedule(steps=4).at(step) for step in (0, 1, 4, 9)], f"{Schedule(steps=500):g}"
    ([0.0, 0.25, 1.0, 1.0], '0 → 1 in 500 steps')
    """

    steps: Count
    start: Weight = 0.0
    end: Weight = 1.0

    def __post_init__(self) -> None:
        _check_types(type(self), vars(self), "a schedule")

    def __format__(self, spec: str) -> str:
        return f"{self.start:{spec}} → {self.end:{spec}} in {self.steps:,} steps"

    def __bool__(self) -> bool:
        return bool(self.start or self.end)

    def at(self, step: int) -> float:
        """The weight at a step, from 0."""
        return self.start + (self.end - self.start) * min(1.0, step / self.steps)


@dataclass(frozen=True)
class Term:
    """One objective of a recipe.

    Attributes:
        objective: Its key in ``OBJECTIVES``: a name, or ``package.module:Class``.
        weight: Its weight in the sum, or the schedule of its weight.
        args: Arguments of its constructor.
        matryoshka: Sizes of embeddings. The objective is the sum over them, each on embeddings that are truncated to their
            first components and normalised. Without sizes it reads the whole embeddings only.
    """

    objective: str
    weight: Weight | Schedule = 1.0
    args: Mapping[str, Any] = field(default_factory=dict)
    matryoshka: list[Count] = field(default_factory=list)

    def __post_init__(self) -> None:
        _check_types(type(self), vars(self), f"the term of {_short(self.objective)}")

    def weight_at(self, step: int) -> float:
        """The weight at a step of the optimiser, from 0."""
        return self.weight.at(step) if isinstance(self.weight, Schedule) else self.weight

    @property
    def final_weight(self) -> float:
        """The weight at the end of its schedule."""
        return self.weight.end if isinstance(self.weight, Schedule) else self.weight

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
    max_length: Length = 32
    language_embedding: bool = False
    pooling: PoolingMode = "cls"
    training: Mapping[str, Any] = field(default_factory=dict)
    paper_training: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_types(type(self), vars(self), f"recipe {_short(self.name)}")
        if not self.terms or not all(isinstance(term, Term) for term in self.terms):
            raise RecipeError(
                f"'terms' of recipe {_short(self.name)} must be one or several Terms, but is {_short(self.terms)}. Build a "
                "recipe from plain data with Recipe.from_dict(content)."
            )
        for section in ("training", "paper_training"):
            _check_settings(getattr(self, section), f"{section!r} of recipe {self.name!r}")

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
        if isinstance(name_or_path, Recipe):
            raise RecipeError(
                "Expected the name of a recipe or the path of a YAML file, but got the Recipe object "
                f"{_short(name_or_path.name)}. Write its to_dict() to a YAML file, and pass the path."
            )
        path = Path(name_or_path)
        if path.suffix in (".yaml", ".yml"):
            if not path.is_file():
                raise MissingFileError(f"Recipe file {path} does not exist.")
            return cls.from_dict(read_yaml(path), origin=str(path))
        known = _packaged()
        if str(name_or_path) not in known:
            raise MissingFileError(
                f"Unknown recipe {str(name_or_path)!r}; known recipes are {', '.join(known)}"
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
        _check_types(cls, content, origin)
        for section in ("training", "paper_training"):
            _check_settings(content.get(section, {}), f"{section!r} of {origin}")
        terms = content.get("terms")
        if not isinstance(terms, list) or not terms:
            raise RecipeError(f"{origin} needs a list 'terms' of at least one objective, but has {_short(terms)}.")
        parsed = tuple(_parse_term(term, origin) for term in terms)
        _check_terms([(term.objective, term.weight) for term in parsed], origin)
        return cls(**{**plain(content), "name": content.get("name", Path(origin).stem), "terms": parsed})

    def to_dict(self) -> dict[str, Any]:
        """The recipe as plain data, as in its YAML file."""
        terms = [_plain_term(term) for term in self.terms]
        rest = {f.name: plain(getattr(self, f.name)) for f in fields(self) if f.name not in ("name", "terms")}
        return {"name": self.name, "terms": terms} | rest

    def check(self) -> None:
        """Check the arguments of every term against the constructor of its objective, which is imported.

        Raises:
            RecipeError: An objective cannot be imported, or an argument is unknown or has the wrong type; the message has
                its position if the recipe comes from a file.
        """
        for term in self.terms:
            _check_known(term.objective, f"recipe {self.name!r}")
            where = f"the args of {term.objective!r} in recipe {self.name!r}"
            parameters = parameters_of(OBJECTIVES[term.objective])
            check_keys(term.args, parameters, where, RecipeError)
            for key, value in term.args.items():
                check_value(value, parameters[key], f"{place(term.args, key)}{key!r} in {where}", RecipeError)
        _check_terms([(term.name, term.weight) for term in self.terms], f"recipe {self.name!r}")

    def objectives(self, max_length: int | None = None) -> dict[str, Objective]:
        """The objectives of the terms by name, without heads.

        Args:
            max_length: Maximum number of pieces per sentence; None uses the recipe's.

        Raises:
            RecipeError: See :meth:`check`.
        """
        self.check()
        length = self.max_length if max_length is None else max_length
        made = {t.name: OBJECTIVES[t.objective](**{"max_length": length, **t.args}) for t in self.terms}
        for name, objective in made.items():
            if "_modules" not in vars(objective):
                raise RecipeError(
                    f"The constructor of the objective {name!r} does not initialise its base class. Call "
                    "super().__init__(max_length=max_length) in it."
                )
        return made

    @property
    def columns(self) -> frozenset[str]:
        """Columns that the recipe reads in addition to ``source`` and ``target``."""
        views = (view for objective in self.objectives().values() for view in views_of(objective))
        return frozenset(column for view in views for column in view.columns)


def views_of(objective: Objective) -> tuple[View, ...]:
    """The views that an objective reads.

    Raises:
        RecipeError: They are not a list of views.
    """
    from metaphrase.modeling.views import View  # imports torch

    views: Any = objective.views()
    views = tuple(views) if isinstance(views, Iterable) else views
    if not isinstance(views, tuple) or not all(isinstance(view, View) for view in views):
        raise RecipeError(
            f"views() of the objective {objective.name!r} must return a list or tuple of views, but returns "
            f"{reprlib.repr(views)}. Return for example source_view(self.max_length), target_view(self.max_length)."
        )
    return views


def list_recipes() -> list[Recipe]:
    """Return the packaged recipes, sorted by name."""
    return [Recipe.load(name) for name in _packaged()]


def _packaged() -> dict[str, Path]:
    """The files of the packaged recipes by name, sorted."""
    return {path.stem: path for path in sorted(RECIPES.glob("*.yaml"), key=lambda path: path.stem)}


def _short(value: Any) -> str:
    return reprlib.repr(plain(value))


def _check_types(cls: type, content: Mapping[str, Any], origin: str) -> None:
    """Check the values of a recipe or a term; the terms of a recipe are checked by themselves."""
    hints = hints_of(cls)
    for key, value in content.items():
        check_value(value, hints[key], f"{place(content, key)}{key!r} of {origin}", RecipeError)


def _check_settings(settings: Mapping[Any, Any], where: str) -> None:
    """Check training settings: their names, which are limited to `SETTINGS`, and their values."""
    for key, value in settings.items():
        if key not in SETTINGS:
            raise RecipeError(
                f"{place(settings, key)}{key!r} in {where} is not a setting of recipes{did_you_mean(str(key), SETTINGS)}. "
                "Files, the Hub, logs and machines are set on the command line or in a --config file; a recipe may set "
                f"{', '.join(SETTINGS)}."
            )
        check_value(value, SETTINGS[key], f"{place(settings, key)}{key!r} in {where}", RecipeError)


def _plain_term(term: Term) -> dict[str, Any]:
    weight = asdict(term.weight) if isinstance(term.weight, Schedule) else term.weight
    sizes = {"matryoshka": list(term.matryoshka)} if term.matryoshka else {}
    return {"objective": term.objective, "weight": weight, "args": plain(term.args), **sizes}


def _check_terms(terms: list[tuple[str, float | Schedule]], origin: str) -> None:
    names = [name for name, _ in terms]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise RecipeError(f"{origin} names {', '.join(twice)} twice. Each objective can have one term.")
    if not any(weight for _, weight in terms):
        raise RecipeError(f"The 'weight' of every term of {origin} is 0, so nothing is trained. Raise one above 0.")


def _check_known(name: Any, where: str) -> None:
    if not isinstance(name, str) or name not in OBJECTIVES:
        raise RecipeError(
            f"{where} names objective {_short(name)}; known objectives are "
            f"{', '.join(sorted(OBJECTIVES))}{did_you_mean(str(name), OBJECTIVES)}. Name an objective of another package "
            "as package.module:Class."
        )


def _parse_term(term: Any, origin: str) -> Term:
    if not isinstance(term, Mapping) or "objective" not in term:
        raise RecipeError(f"A term of {origin} needs an 'objective', but is {_short(term)}.")
    check_keys(term, [f.name for f in fields(Term)], f"a term of {origin}", RecipeError)
    name, weight, sizes = term["objective"], term.get("weight", 1.0), term.get("matryoshka", [])
    args = {} if term.get("args") is None else term["args"]
    where = f"{name!r} in {origin}"
    if isinstance(weight, Mapping):
        weight = _parse_schedule(weight, f"'weight' of {where}")
    _check_known(name, f"{place(term, 'objective')}{origin}")
    for key, value in (("weight", weight), ("args", args), ("matryoshka", sizes)):
        check_value(value, hints_of(Term)[key], f"{place(term, key)}{key!r} of {where}", RecipeError)
    located = Keys(plain(args))
    located.places = dict(getattr(args, "places", {}))
    return Term(name, weight if isinstance(weight, Schedule) else float(weight), located, plain(sizes))


def _parse_schedule(content: Mapping[Any, Any], where: str) -> Schedule:
    check_keys(content, [one.name for one in fields(Schedule)], where, RecipeError)
    _check_types(Schedule, content, where)
    if "steps" not in content:
        raise RecipeError(f"{where} needs 'steps', the number of steps in which it changes.")
    return Schedule(**content)
