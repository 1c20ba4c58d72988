"""Checks of arguments against their annotations: types, choices and the ranges of numbers.

The range of a number is part of its annotation, ``temperature: Annotated[float, Range(above=0)]``. The same annotation is
checked for keys of a recipe, options of the command line, YAML files and calls in Python.
"""

from __future__ import annotations

import functools
import inspect
import math
import reprlib
from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, Unpack, get_args, get_origin, get_type_hints

from metaphrase.exceptions import MetaphraseError, UsageError

_Target = TypeVar("_Target", bound=Callable[..., Any])


@dataclass(frozen=True)
class Range:
    """Bounds of a number, for ``Annotated``: ``least`` and ``most`` are in the range, ``above`` and ``below`` are not.

    NaN and infinity are in no range.

    >>> 0.5 in Range(above=0, most=1), math.nan in Range(), str(Range(above=0, most=1)), str(Range(1, 10_000))
    (True, False, 'above 0 and at most 1', 'from 1 to 10,000')
    """

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    def __contains__(self, value: Any) -> bool:
        return bool(self.least <= value <= self.most and self.above < value < self.below)

    def __str__(self) -> str:
        if math.isfinite(self.least) and math.isfinite(self.most):
            return f"from {self.least:,} to {self.most:,}"
        words = {"above": self.above, "of at least": self.least, "at most": self.most, "below": self.below}
        bounds = [f"{word} {bound:,}" for word, bound in words.items() if math.isfinite(bound)]
        return " and ".join(bounds) or "that is finite"


Finite = Annotated[float, Range()]
Positive = Annotated[float, Range(above=0)]
AtLeast0 = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
BelowOne = Annotated[float, Range(0, below=1)]
BetweenZeroAndOne = Annotated[float, Range(above=0, below=1)]
#: A share above 0.
Rate = Annotated[float, Range(above=0, most=1)]
Weight = Annotated[float, Range(0, 1_000_000)]
Temperature = Annotated[float, Range(0.0001, 10_000)]
#: A temperature, or ``"auto"``: the one that the encoder was trained with, if known.
OwnTemperature = Temperature | Literal["auto"]
#: Pooling of the states of a text, as in sentence-transformers.
PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
#: Weight of a trained encoder in a merge, or ``"auto"``: the best one under guards.
MergeWeight = Share | Literal["auto"]
#: Exponent of the sizes of languages in a mixture.
LanguageTemperature = Annotated[float, Range(0, 10)]
#: Texts or pairs to add for each pair.
Ratio = Annotated[float, Range(above=0, most=1000)]
Count = Annotated[int, Range(1, 2**31 - 1)]
CountOr0 = Annotated[int, Range(0, 2**31 - 1)]
#: Number of directions to remove, or ``"auto"``: the best one under guards.
Directions = CountOr0 | Literal["auto"]
Seed = Annotated[int, Range(0, 2**32 - 1)]
Resamples = Annotated[int, Range(1, 100_000)]
#: Maximum number of pieces of a text: at least one piece between two special tokens.
Length = Annotated[int, Range(3, 131_072)]
Layers = Annotated[int, Range(1, 128)]
#: Number of a layer; negative numbers count from the last layer.
LayerNumber = Annotated[int, Range(-1024, 1024)]

_SCALARS: dict[Any, tuple[type, str]] = {
    float: (Real, "a number"),
    int: (Integral, "a whole number"),
    str: (str, "text"),
    bool: (bool, "true or false"),
    NoneType: (NoneType, "null"),
}


def is_of_type(value: Any, hint: Any) -> bool:
    """Return whether a value has a type; numbers must be finite and in their range.

    Whole numbers are numbers, but 3.0 is not a whole number, and true is not a number. Types other than scalars, lists,
    mappings, literals, unions and dataclasses accept everything.

    >>> is_of_type(1, float | None), is_of_type(True, int), is_of_type("up", Literal["up", "down"]), is_of_type(2, Rate)
    (True, False, True, False)
    """
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return is_of_type(value, parts[0]) and all(value in part for part in parts[1:] if isinstance(part, Range))
    if origin in (Union, UnionType):
        return any(is_of_type(value, part) for part in parts)
    if origin is Literal:
        return any(isinstance(value, type(part)) and value == part for part in parts)
    if origin is list:
        return isinstance(value, list | tuple) and all(is_of_type(item, parts[0]) for item in value)
    if origin in (dict, abc.Mapping):
        return isinstance(value, Mapping) and all(is_of_type(item, parts[1]) for item in value.values())
    hint = NoneType if hint is None else hint
    if hint not in _SCALARS:
        return not (inspect.isclass(hint) and is_dataclass(hint)) or isinstance(value, hint)
    is_scalar = isinstance(value, _SCALARS[hint][0]) and (hint is bool or not isinstance(value, bool))
    return is_scalar and (hint is not float or value in Range())


def describe_type(hint: Any) -> str:
    """Describe a type in words, for error messages; None is not mentioned.

    >>> describe_type(int | None), describe_type(Literal["up", "down"]), describe_type(Rate)
    ('a whole number', "one of 'up', 'down'", 'a number above 0 and at most 1')
    """
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return " ".join(filter(None, [describe_type(parts[0]), *(str(p) for p in parts[1:] if isinstance(p, Range))]))
    if origin in (Union, UnionType):
        return " or ".join(describe_type(part) for part in parts if part is not NoneType and not is_dataclass(part))
    if origin is Literal:
        return f"{'one of ' * (len(parts) > 1)}{', '.join(map(repr, parts))}"
    if origin is list:
        return f"a list, each {describe_type(parts[0])}"
    if origin in (dict, abc.Mapping):
        return "keys and values" + (f", each {describe_type(parts[1])}" if is_limited(parts[1]) else "")
    return _SCALARS[hint][1] if hint in _SCALARS else str(getattr(hint, "__name__", hint))


def check_value(value: Any, hint: Any, what: str, error: type[MetaphraseError] = UsageError) -> None:
    """Refuse a value of the wrong type or out of range; ``what`` is its name and place, for the message."""
    if not is_of_type(value, hint):
        raise error(f"{what} must be {describe_type(hint)}, but is {reprlib.repr(value)}.")


def python_number(value: Any) -> Any:
    """A number of NumPy as Python's own, which JSON and seeds require; other values unchanged.

    >>> import numpy as np
    >>> python_number(np.int64(3)), python_number(np.float32(0.5)), python_number("3")
    (3, 0.5, '3')
    """
    return value.item() if isinstance(value, Real) and hasattr(value, "item") else value


def hints_of(target: Any) -> dict[str, Any]:
    """Annotations of the arguments of a function or class; empty if they cannot be resolved."""
    is_plain_class = inspect.isclass(target) and "__dataclass_fields__" not in vars(target)
    try:
        hints = get_type_hints(target.__init__ if is_plain_class else target, include_extras=True)
        options = [get_args(hint)[0] for hint in hints.values() if get_origin(hint) is Unpack]  # of **options
        return {key: hint for one in options for key, hint in get_type_hints(one, include_extras=True).items()} | hints
    except (NameError, TypeError, AttributeError):  # annotations that are imported for type checkers only
        return {}


def is_limited(hint: Any) -> bool:
    """Whether a type is a number, a truth value or a choice."""
    if get_origin(hint) in (Annotated, Union, UnionType, dict, list):
        return any(map(is_limited, get_args(hint)))
    return hint in (int, float, bool) or get_origin(hint) is Literal


def check_values(hints: Mapping[str, Any], given: Mapping[str, Any], name: str) -> None:
    """Refuse numbers out of range, unknown choices, and text in place of true or false; other types are not checked."""
    for key, value in given.items():
        if is_limited(hints.get(key)):
            check_value(value, hints[key], f"{key!r} of {name}")


def checked(target: _Target) -> _Target:
    """Decorator of a function or class: calls are checked with :func:`check_values`, and NumPy's numbers become Python's.

    >>> @checked
    ... def sample(rate: Rate = 0.5) -> None: ...
    >>> sample(1.5)
    Traceback (most recent call last):
    metaphrase.exceptions.UsageError: 'rate' of sample must be a number above 0 and at most 1, but is 1.5.
    """
    function: Any = target.__init__ if inspect.isclass(target) else target
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tuple(map(python_number, args)), {key: python_number(value) for key, value in kwargs.items()}
        name = type(args[0]).__qualname__ if inspect.isclass(target) else target.__qualname__
        given = {**signature.bind_partial(*args, **kwargs).arguments, **kwargs}
        check_values(hints(), given, name)
        for key, value in given.items():
            if isinstance(value, str) and get_origin(hints().get(key)) is list:  # each letter would be an item
                check_value(value, hints()[key], f"{key!r} of {name}")
        return function(*args, **kwargs)

    hints = functools.cache(lambda: hints_of(target))
    if not inspect.isclass(target):
        return call  # type: ignore[return-value]
    target.__init__ = call  # type: ignore[method-assign]
    return target
