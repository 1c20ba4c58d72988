"""Numbers that are out of range, in Python, recipes, YAML files and on the command line."""

from __future__ import annotations

import datetime
import importlib
import inspect
import math
import pkgutil
import re
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Annotated, Union, get_args, get_origin

import pytest
from sentence_transformers.base.evaluation import BaseEvaluator
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.sentence_transformer.training_args import BatchSamplers
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

import metaphrase
from metaphrase import evaluation
from metaphrase.aligners import Aligner
from metaphrase.cli import main, parse
from metaphrase.cli.options import options_of
from metaphrase.exceptions import ConfigError, RecipeError, UsageError
from metaphrase.io.arguments import Range, hints_of, is_of_type
from metaphrase.modeling.views import View
from metaphrase.objectives import OBJECTIVES, Objective
from metaphrase.objectives.registry import parameters_of
from metaphrase.training.configuration import RunConfig
from metaphrase.training.recipe import SETTINGS, Recipe, Term

MODULES = [
    importlib.import_module(found.name)
    for found in pkgutil.walk_packages(metaphrase.__path__, "metaphrase.")
    if not found.name.endswith("__main__")
]


def ranges(hint) -> list[Range | None]:
    """The range of each number in an annotation; None for a number without one."""
    if get_origin(hint) is Annotated:
        return [part for part in get_args(hint)[1:] if isinstance(part, Range)] or [None]
    if get_origin(hint) in (Union, UnionType, list, dict):
        return [one for part in get_args(hint) for one in ranges(part)]
    return [None] if hint in (int, float) else []


def takes_options(thing) -> bool:
    """Whether the arguments of a function or class are chosen by users."""
    if inspect.isclass(thing):
        if is_dataclass(thing) and any("help" in option.metadata for option in fields(thing)):
            return True
        return issubclass(thing, Objective | View | BaseEvaluator | Aligner)
    return thing in [getattr(home, name) for home in (metaphrase, evaluation) for name in home.__all__]


def arguments(thing) -> dict[str, object]:
    """Annotations of the arguments of a function or class."""
    hints = hints_of(thing)
    taken = (
        [option.name for option in fields(thing) if option.init] if is_dataclass(thing) else hints.keys() - {"return"}
    )
    return {name: hints.get(name) for name in taken}


def walk():
    for module in MODULES:
        for name, thing in vars(module).items():
            own = getattr(thing, "__module__", None) == module.__name__ and not name.startswith("_")
            if not own or not callable(thing) or inspect.isabstract(thing) or not hasattr(thing, "__qualname__"):
                continue
            found = {key: ranges(hint) for key, hint in arguments(thing).items()}
            assert found or not takes_options(thing) or not inspect.signature(thing).parameters, (
                f"{name} has unresolved annotations"
            )
            if any(found.values()) and (takes_options(thing) or any(any(one) for one in found.values())):
                yield pytest.param(thing, found, id=f"{module.__name__}.{name}")


WALKED = list(walk())


def wrong_values(hint, bounds: Range) -> list[object]:
    """Values of the wrong type, not finite, or next to a bound."""
    whole = int in (hint, *(get_args(part)[0] for part in (hint, *get_args(hint)) if get_origin(part) is Annotated))
    wrong = [math.nan, math.inf, -math.inf, True, "3", *([bounds.least + 1.0 if whole else None] if whole else [])]
    wrong += [bounds.least - 1] if math.isfinite(bounds.least) else []
    wrong += [bounds.most + 1] if math.isfinite(bounds.most) else []
    return wrong + [bound for bound in (bounds.above, bounds.below) if math.isfinite(bound)]


def required(thing) -> dict[str, object]:
    """Some value for each argument that a dataclass requires; others are called without them, and refuse numbers before."""
    if not is_dataclass(thing):
        return {}
    missing = [f.name for f in fields(thing) if f.init and f.default is MISSING and f.default_factory is MISSING]
    hints = hints_of(thing)
    return {
        name: next((one.least for one in ranges(hints[name])), False if hints[name] is bool else text(hints[name]))
        for name in missing
    }


def text(hint) -> str | list[str]:
    return ["source"] if get_origin(hint) is list else "source"


@pytest.mark.parametrize(("thing", "found"), WALKED)
def test_every_number_has_a_range_which_is_checked(thing, found, fault):
    tried = 0
    for key, bounds in found.items():
        assert None not in bounds, (
            f"{key!r} of {thing.__qualname__} has no range: annotate it, see metaphrase.io.arguments"
        )
        hint = hints_of(thing)[key]
        for value in wrong_values(hint, bounds[0]) if bounds else []:
            value = [value] if "list[" in str(hint) else {"a": value} if "dict[" in str(hint) else value
            with pytest.raises((UsageError, RecipeError), match=rf"'{key}' of .* must be .*, but is "):
                thing(**required(thing) | {key: value})
            tried += 1
    fault("H9", "numbers out of range, NaN, infinite or of another type, in Python", tried=tried, survived=tried)


@pytest.mark.parametrize("value", ["no", "auto", 1])
def test_a_truth_value_is_no_word(value):
    """Every word would count as true."""
    with pytest.raises(UsageError, match="'freeze_word_embeddings' of RunConfig must be true or false, but is"):
        RunConfig(freeze_word_embeddings=value)


def test_the_walk_meets_everything_that_takes_options():
    names = {parameters.id.rpartition(".")[2] for parameters in WALKED}
    assert {cls.__name__ for cls in map(OBJECTIVES.__getitem__, OBJECTIVES)} <= names
    assert {
        "RunConfig",
        "AdaptationConfig",
        "AlignOptions",
        "EvaluateOptions",
        "ExportOptions",
        "FilterOptions",
    } <= names
    assert {"SearchOptions", "Settings", "TaggingOptions", "EmbeddingAligner", "SpanAligner", "Concatenated"} <= names


OPTIONS = [p for p in WALKED if is_dataclass(p.values[0]) and any("help" in f.metadata for f in fields(p.values[0]))]


@pytest.mark.parametrize(("thing", "found"), OPTIONS)
def test_every_numeric_option_is_checked_with_its_flag_or_its_place(thing, found, tmp_path, fault):
    config = tmp_path / "c.yaml"
    given = [word for f in fields(thing) if f.init and f.default is f.default_factory for word in (f"--{f.name}", "x")]
    if thing is RunConfig:
        given += ["--output_dir", "x"]
    tried = 0
    internal = {f.name for f in fields(thing) if f.metadata.get("internal")}
    for key, (bounds, *_) in ((key, bounds) for key, bounds in found.items() if bounds and key in hints_of(thing)):
        if "dict[" in str(hints_of(thing)[key]) or key in internal:  # on the command line, JSON, or no option
            continue
        value = (
            bounds.least - 1 if math.isfinite(bounds.least) else bounds.above if math.isfinite(bounds.above) else "nan"
        )
        with pytest.raises(UsageError, match=rf"^--{key} must be .*, but is "):
            parse("x", [thing], [*given, f"--{key}={value}"])
        config.write_text(f"{key}: {'.nan' if value == 'nan' else value}\n", encoding="utf-8")
        with pytest.raises(ConfigError, match=rf"c\.yaml:1:1: '{key}' must be .*, but is "):
            parse("x", [thing], [*given, "--config", str(config)])
        tried += 2
    fault("H9", "numeric options out of range, on the command line and in a file", tried=tried, survived=tried)


WRONG = {
    "2020-01-01": datetime.date(2020, 1, 1),
    "!!binary aGk=": b"hi",
    "{a: 1}": {"a": 1},
    "[[a]]": [["a"]],
    "null": None,
}


@pytest.mark.parametrize(("thing", "found"), OPTIONS)
def test_every_option_in_a_file_is_of_its_type(thing, found, tmp_path, fault):
    config = tmp_path / "c.yaml"
    given = [word for f in fields(thing) if f.init and f.default is f.default_factory for word in (f"--{f.name}", "x")]
    own = [option for option in options_of(thing) if option.name in inspect.get_annotations(thing)]
    tried = 0
    for option in (option for option in own if f"--{option.name}" not in given):
        hint = hints_of(thing)[option.name]
        wrong = [text for text, value in WRONG.items() if not is_of_type(value, hint)]
        wrong = [text for text in wrong if text[0] != "2" or "str" not in str(hint)]  # a date is a text or a word
        for text in wrong[tried % 2 :: 2]:
            config.write_text(f"{option.name}: {text}\n", encoding="utf-8")
            with pytest.raises(ConfigError, match=rf"c\.yaml:1:1: '{option.name}' must be .*, but is "):
                parse("x", [thing], [*given, "--config", str(config)])
            tried += 1
    fault("H9", "options of another type in a file", tried=tried, survived=tried)


def test_settings_of_accelerate_are_its_own():
    with pytest.raises(UsageError, match="accelerator_config has an unknown key 'a'"):
        RunConfig(output_dir="x", accelerator_config={"a": 1}).training_arguments()


def refused(tmp_path, text: str) -> str:
    """The message that refuses a recipe."""
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as error:
        Recipe.load(path).check()
    return str(error.value)


@pytest.mark.long
def test_every_number_of_a_recipe_is_checked_with_its_place(tmp_path, fault):
    tried = 0
    for name in OBJECTIVES:
        for key, hint in parameters_of(OBJECTIVES[name]).items():
            for bounds in ranges(hint):
                for value in (
                    ".nan",
                    ".inf",
                    "true",
                    bounds.least - 1 if math.isfinite(bounds.least) else bounds.above,
                ):
                    message = refused(tmp_path, f"terms:\n- objective: {name}\n  args: {{{key}: {value}}}\n")
                    assert re.search(
                        rf"mine\.yaml:3:10: '{key}' in the args of '{name}' .* must be .*, but is ", message
                    )
                    tried += 1
    for section in ("training", "paper_training"):
        for key, hint in SETTINGS.items():
            for value in (".nan", ".inf", "-2", "x") if ranges(hint) else ("3.5",):
                message = refused(tmp_path, f"terms: [{{objective: tr}}]\n{section}:\n  {key}: {value}\n")
                assert re.search(rf"mine\.yaml:3:3: '{key}' in '{section}' .* must be .*, but is ", message)
                tried += 1
    for value in (0, 1, 2, 10**9, 32.0, "true"):
        message = refused(tmp_path, f"terms: [{{objective: tr}}]\nmax_length: {value}")
        assert re.search(
            r"mine\.yaml:2:1: 'max_length' of .* must be a whole number from 3 to 131,072, but is ", message
        )
        tried += 1
    for weights in ((0,), (0, 0.0)):
        terms = ", ".join(
            f"{{objective: {name}, weight: {w}}}" for name, w in zip(("tr", "tlm"), weights, strict=False)
        )
        assert "The 'weight' of every term of" in refused(tmp_path, f"terms: [{terms}]")
        tried += 1
    fault("H9", "numbers out of range in a recipe", tried=tried, survived=tried)


def test_recipes_built_in_python_are_checked_too():
    with pytest.raises(
        RecipeError, match="'weight' of the term of 'tr' must be a number from 0 to 1,000,000, but is nan"
    ):
        Term("tr", math.nan)
    with pytest.raises(RecipeError, match=r"'max_length' of recipe 'mine' must be .*, but is 0"):
        Recipe("mine", (Term("tr"),), max_length=0)
    with pytest.raises(RecipeError, match=r"'learning_rate' in 'training' of recipe 'mine' must be .*, but is -1"):
        Recipe("mine", (Term("tr"),), training={"learning_rate": -1})
    with pytest.raises(RecipeError, match="The 'weight' of every term of recipe 'mine' is 0"):
        Recipe("mine", (Term("tr", 0.0),)).objectives()
    with pytest.raises(UsageError, match="'max_length' of TranslationRanking must be"):
        Recipe("mine", (Term("tr"),)).objectives(max_length=0)


def test_a_setting_of_a_recipe_is_an_option_with_the_same_range():
    options = hints_of(RunConfig)
    for name, hint in SETTINGS.items():
        assert name in options
        if ranges(hint):
            assert hint == options[name], name
    assert set(get_args(SETTINGS["lr_scheduler_type"])) < {one.value for one in SchedulerType}
    assert set(get_args(SETTINGS["optim"])) < {one.value for one in OptimizerNames}
    assert set(get_args(SETTINGS["batch_sampler"])) < {one.value for one in BatchSamplers}
    assert set(get_args(hints_of(Recipe)["pooling"])) == set(Pooling.POOLING_MODES)


@pytest.mark.parametrize(
    "setting",
    [
        "push_to_hub: true", "hub_model_id: me/mine", "hub_token: x", "output_dir: /tmp/x", "report_to: wandb",
        "run_name: x", "deepspeed: x.json", "fsdp: full_shard", "resume_from_checkpoint: /tmp/x", "logging_steps: 1",
        "corpus: [/etc/passwd]", "model: me/mine", "test: [x]", "save_total_limit: 1", "use_cpu: true", "learning_rat: 1",
    ],
)  # fmt: skip
@pytest.mark.parametrize("section", ["training", "paper_training"])
def test_a_recipe_does_not_decide_where_things_go(tmp_path, capsys, fault, section, setting):
    path = tmp_path / "mine.yaml"
    path.write_text(f"name: mine\nterms: [{{objective: tr}}]\n{section}:\n  {setting}\n", encoding="utf-8")
    key = setting.partition(":")[0]
    message = (
        rf"mine\.yaml:4:3: '{key}' in '{section}' .* is not a setting of recipes.*may set .*learning_rate, .*seed"
    )
    with pytest.raises(RecipeError, match=message):
        Recipe.load(path)
    with pytest.raises(RecipeError, match=message):
        RunConfig(recipe=str(path))
    for command in (["train", "--corpus", "x", "--output_dir", str(tmp_path / "out")], ["recipes"]):
        assert main([*command, "--recipe" if command[0] == "train" else "--show", str(path)]) == 2
        assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
    fault("H10", "a recipe that sets where things go, or an unknown setting", tried=4, survived=4)
