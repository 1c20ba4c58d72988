"""The table of objectives. What recipes have to know of one is read off its source: the class is imported when it is used.

Importing an objective imports torch, which takes seconds; reading that ``name`` is ``"tr"`` and that the constructor takes
a ``temperature: float`` does not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from metaphrase.objectives.base import Objective

_PACKAGE = "metaphrase.objectives"
_SCALARS = {"float": (int, float), "int": (int,), "str": (str,), "bool": (bool,)}


@dataclass(frozen=True)
class Declaration:
    """What an objective says of itself before it is made.

    Attributes:
        name: Its name in recipes.
        granularity: What it aligns.
        parameters: The arguments that a recipe may give, with their types.
    """

    name: str
    granularity: str
    parameters: dict[str, ast.expr]

    def accepts(self, parameter: str, value: Any) -> bool:
        """Whether a value is of a parameter's type; a type that cannot be told from the source accepts all."""
        return _fits(value, self.parameters[parameter])

    def type_of(self, parameter: str) -> str:
        """The type of a parameter, as Python writes it."""
        return ast.unparse(self.parameters[parameter])


class Objectives(MutableMapping[str, "type[Objective]"]):
    """Objectives by name, each imported when it is first used.

    Args:
        places: ``module.Class`` of each.
    """

    def __init__(self, places: Sequence[str]) -> None:
        self._places = {declare(place).name: place for place in places}
        self._classes: dict[str, type[Objective]] = {}

    def __getitem__(self, name: str) -> type[Objective]:
        if name in self._places and name not in self._classes:
            module, _, cls = self._places[name].rpartition(".")
            self._classes[name] = getattr(import_module(f"{_PACKAGE}.{module}"), cls)
        return self._classes[name]

    def __setitem__(self, name: str, cls: type[Objective]) -> None:
        self._classes[name] = cls

    def __delitem__(self, name: str) -> None:
        del self._classes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._places, *self._classes]))

    def __len__(self) -> int:
        return len(set(self._places) | set(self._classes))

    def __contains__(self, name: object) -> bool:
        return name in self._places or name in self._classes

    def declaration(self, name: str) -> Declaration:
        """What an objective says of itself, without importing it where it stands in the table."""
        if name in self._places:
            return declare(self._places[name])
        cls = self._classes[name]
        parameters = [key for key in cls.__init__.__kwdefaults__ or {} if key != "max_length"]
        return Declaration(name, cls.granularity, {key: ast.Name("Any") for key in parameters})


@cache
def declare(place: str) -> Declaration:
    """Read an objective's declaration off its source.

    Args:
        place: ``module.Class`` within this package.

    >>> sorted(declare("sentence_alignment.SentenceAlignment").parameters)
    ['candidates', 'exclude_specials', 'gather']
    """
    module, _, name = place.rpartition(".")
    constants: dict[str, str] = {}
    parameters: dict[str, ast.expr] | None = None
    for tree, cls in _lineage(f"{_PACKAGE}.{module}", name):
        for line in cls.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.value, ast.Constant):
                constants.setdefault(ast.unparse(line.target), str(line.value.value))
            if isinstance(line, ast.FunctionDef) and line.name == "__init__" and parameters is None:
                arguments = zip(line.args.kwonlyargs, line.args.kw_defaults, strict=True)
                parameters = {
                    argument.arg: _resolved(argument.annotation or ast.Name("Any"), tree)
                    for argument, default in arguments
                    if default is not None and argument.arg != "max_length"
                }
    return Declaration(constants["name"], constants["granularity"], parameters or {})


@cache
def _tree(module: str) -> ast.Module:
    path = Path(__file__).parents[1].joinpath(*module.split(".")[1:]).with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def _lineage(module: str, name: str) -> Iterator[tuple[ast.Module, ast.ClassDef]]:
    """A class and its bases, as far as they are this library's."""
    tree = _tree(module)
    cls = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
    if cls is None:
        source = _source(name, tree)
        yield from _lineage(source, name) if source else ()
        return
    yield tree, cls
    for base in cls.bases:
        if isinstance(base, ast.Name):
            yield from _lineage(module, base.id)


def _source(name: str, tree: ast.Module) -> str | None:
    """The module of this library that a name is imported from."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return node.module if str(node.module).startswith("metaphrase.") else None
    return None


def _resolved(annotation: ast.expr, tree: ast.Module) -> ast.expr:
    """An annotation with the name of a type that this library defines replaced by the type."""
    if not isinstance(annotation, ast.Name) or annotation.id in _SCALARS:
        return annotation
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == annotation.id:
            return node.value
    source = _source(annotation.id, tree)
    return _resolved(annotation, _tree(source)) if source else annotation


def _fits(value: Any, annotation: ast.expr) -> bool:
    match annotation:
        case ast.BinOp(left=left, right=right):
            return _fits(value, left) or _fits(value, right)
        case ast.Constant(value=None):
            return value is None
        case ast.Name(id=name) if name in _SCALARS:
            return isinstance(value, _SCALARS[name]) and (name == "bool" or not isinstance(value, bool))
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            return value in (
                ast.literal_eval(choices) if isinstance(choices, ast.Tuple) else (ast.literal_eval(choices),)
            )
    return True
