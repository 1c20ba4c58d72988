import ast
import functools
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


#: Exceptions outside the tree: programming errors, and Python's protocols.
PLAIN = {"AttributeError", "ValueError", "TypeError", "IndexError", "KeyError", "AssertionError", "SystemExit"}
#: Modules that report to users, which raise exceptions of the tree only,
USER_FACING = (
    "cli/",
    "checkpoints/",
    "encoders/",
    "io/",
    "postprocessing/",
    "publishing/",
    "training/",
    "corpus/checks.py",
    "mining/shards.py",
)
#: except for programming errors, and the exits of a process.
EXCEPTIONS = {
    ("cli/options.py", "SystemExit"),
    ("io/files.py", "OSError"),  # of `as_os_errors`, whose callers convert it
    ("publishing/card.py", "TypeError"),
    ("training/fault_tolerance.py", "SystemExit"),
}
#: Exceptions of other libraries' protocols, and internal ones, that callers convert into those of the tree.
CONVERTED = {"ArgumentError", "ArgumentTypeError", "ComposerError", "ConstructorError", "DataUnavailable"}


@functools.cache
def raised():
    """Each exception raised by name: file, line and name."""
    root, found = Path(exceptions.__file__).parent, []
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = node.exc.func if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) else None
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name[:1].isupper():
                found.append((path.relative_to(root).as_posix(), node.lineno, name))
    return found


@pytest.mark.long
def test_exceptions_are_of_the_tree_or_programming_errors():
    tree = {cls.__name__ for cls in CLASSES}
    found = [one for one in raised() if one[2] not in tree]
    assert found
    for file, line, name in found:
        if name in CONVERTED or (file, name) in EXCEPTIONS:
            continue
        assert name in PLAIN, (file, line)
        assert not file.startswith(USER_FACING), (file, line)
    assert {(file, name) for file, _, name in found} >= EXCEPTIONS
    assert {"MemoryBudgetError", "NonFiniteError", "WorkerError", "NewerCheckpointError"} <= {
        one[2] for one in raised()
    }


@pytest.mark.long
def test_no_class_stands_outside_of_the_tree():
    root = Path(exceptions.__file__).parent
    for path in sorted(root.rglob("*.py")):
        if path.name == "exceptions.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.ClassDef) and node.name.endswith("Error")), (path, node.name)
