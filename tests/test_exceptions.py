import inspect

import pytest

from metaphrase import exceptions
from metaphrase.corpus import load_corpus
from metaphrase.exceptions import (
    AlignmentFormatError,
    ConfigError,
    CorpusError,
    MetaphraseError,
    MissingFileError,
    RecipeError,
    UsageError,
)
from metaphrase.recipe import Recipe
from metaphrase.words import parse_links

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
