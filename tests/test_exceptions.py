import ast
import inspect
from pathlib import Path

import pytest

from metaphrase import exceptions
from metaphrase.corpus import load_corpus
from metaphrase.corpus.words import parse_links
from metaphrase.exceptions import (
    AlignmentFormatError,
    ConfigError,
    CorpusError,
    MetaphraseError,
    MissingFileError,
    RecipeError,
    UsageError,
)
from metaphrase.training.recipe import Recipe

CLASSES = [cls for _, cls in inspect.getmembers(exceptions, inspect.isclass)]


@pytest.mark.parametrize("cls", CLASSES)
def test_one_tree_of_errors_that_are_builtins_too(cls):
    assert issubclass(cls, MetaphraseError)
    builtins = [base for base in cls.__mro__ if base.__module__ == "builtins" and base is not object]
    assert cls is MetaphraseError or len(builtins) > 2  # more than Exception and BaseException
    assert str(cls("what was wanted")) == "what was wanted"
    assert cls.__doc__


def test_malformed_data_raise_their_own_class(tmp_path):
    path = tmp_path / "sw-en.tsv"
    with pytest.raises(MissingFileError):
        load_corpus(path)
    path.write_text("one column\nx\n")
    with pytest.raises(CorpusError):
        load_corpus(path)
    with pytest.raises(AlignmentFormatError):
        parse_links("0:0")
    with pytest.raises(RecipeError):
        Recipe.from_dict({"trems": []})


def test_kinds_of_mistakes_can_be_told_apart():
    assert issubclass(RecipeError, ConfigError)
    assert issubclass(AlignmentFormatError, CorpusError)
    assert not issubclass(UsageError, ConfigError)


#: What may be raised beside the tree: misuse by a programmer, and the protocols of Python.
PLAIN = {"AttributeError", "ValueError", "TypeError", "IndexError", "AssertionError", "SystemExit"}
#: Files that answer to people, where nothing but the tree may be raised.
PEOPLE = ("cli/", "adaptation.py", "card.py", "checkpoints.py", "checks.py", "configuration.py", "hub.py", "monolingual.py",
          "plots.py", "recipe.py", "report.py", "shards.py", "starter.py", "trainer.py")  # fmt: skip
#: … but for what a caller's program gets wrong, and the ends of a process.
MISUSE = {
    ("card.py", "TypeError"),
    ("cli/options.py", "SystemExit"),
    ("monolingual.py", "ValueError"),
    ("shards.py", "IndexError"),
    ("trainer.py", "SystemExit"),
    ("trainer.py", "ValueError"),
}
#: What other libraries want to be told, and those who call them turn into the tree's.
TURNED = {"ArgumentError", "ArgumentTypeError", "ComposerError", "ConstructorError", "NoData"}


def raised():
    """Every class that is raised by its name: the file, the line and the name."""
    root = Path(exceptions.__file__).parent
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = node.exc.func if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) else None
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name[:1].isupper():
                yield path.relative_to(root).as_posix(), node.lineno, name


def test_whatever_is_raised_is_of_the_tree_or_misuse():
    tree = {cls.__name__ for cls in CLASSES}
    found = [one for one in raised() if one[2] not in tree]
    assert found
    for file, line, name in found:
        if name in TURNED or (file, name) in MISUSE:
            continue
        assert name in PLAIN, (file, line)
        assert not file.startswith(PEOPLE), (file, line)
    assert {(file, name) for file, _, name in found} >= MISUSE
    assert {"MemoryBudgetError", "NonFiniteError", "WorkerError", "NewerCheckpointError"} <= {
        one[2] for one in raised()
    }


def test_no_class_stands_outside_of_the_tree():
    root = Path(exceptions.__file__).parent
    for path in sorted(root.rglob("*.py")):
        if path.name == "exceptions.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.ClassDef) and node.name.endswith("Error")), (path, node.name)
