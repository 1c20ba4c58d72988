"""The configuration of a training run: one dataclass with the names of the command line's flags and of YAML files."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from metaphrase.corpus.cleaning import Cleaning
from metaphrase.corpus.codes import split_languages
from metaphrase.corpus.options import SOURCE_COLUMN, TARGET_COLUMN
from metaphrase.evaluation.guard_data import GUARD_FOLDERS
from metaphrase.evaluation.guards import MAX_STRUCTURE_LOSS
from metaphrase.exceptions import UsageError
from metaphrase.io.arguments import (
    AtLeast0,
    Count,
    CountOr0,
    Directions,
    LanguageTemperature,
    Length,
    MergeWeight,
    PoolingMode,
    Positive,
    Ratio,
    check_value,
    check_values,
    checked,
    hints_of,
)
from metaphrase.io.configuration import ENCODER, default_of, did_you_mean, option, plain
from metaphrase.io.redaction import without_tokens
from metaphrase.objectives import OBJECTIVES
from metaphrase.objectives.registry import parameters_of
from metaphrase.objectives.vocabulary import Transform, Vocabulary
from metaphrase.training.arguments import WITHOUT_EFFECT, AlignmentTrainingArguments
from metaphrase.training.recipe import Recipe

logger = logging.getLogger(__name__)

#: Options without an effect on the release: what is shown during training, and what alignment does not use.
_NOT_IN_FACTS = {"disable_tqdm", "report_to", *WITHOUT_EFFECT}

#: Options that are a number or "auto", with the type of the number.
_NUMBER_OR_AUTO: dict[str, tuple[type[float], Any]] = {
    "merge": (float, MergeWeight | None),
    "debias": (int, Directions),
}

#: Options that replace a setting of the recipe, which would take precedence over them.
REPLACED = {
    "num_train_epochs": "max_steps",
    "per_device_train_batch_size": "effective_batch_size",
    "warmup_ratio": "warmup_steps",
}

#: Values of ``clean``.
CLEANINGS = {"basic": Cleaning(), "dap": Cleaning.dap(), "ppa": Cleaning.ppa()}
#: Help of ``--max_structure_loss``.
STRUCTURE_LIMIT = (
    "Acceptable loss of similarity structure for --merge auto and the verdict, in points of correlation. If --guard has "
    "labelled data, 100 disables this limit, so that only these data decide."
)


@checked
@dataclass
class RunOptions:
    """The encoder, its training and evaluation data, and how the release is made."""

    model: str = option("starter", f"Encoder to train: {ENCODER} (default: starter).")
    recipe: str = option("metaphrase", "A name from `metaphrase recipes`, or a YAML file.")
    corpus: list[str] = option(
        [], "Bitext to train on: TSV, CSV, JSONL, Parquet, TMX, Moses 'x.sw,x.en', a folder or hf:org/name."
    )
    languages: list[str] = option([], "Languages to read from the corpus, or the language of a single file.")
    source_column: str | None = option(None, SOURCE_COLUMN)
    target_column: str | None = option(None, TARGET_COLUMN)
    dev: list[str] = option(
        [],
        "Bitext whose retrieval accuracy is measured during training, together with similarity structure and the folders "
        "of --guard.",
    )
    test: list[str] = option(
        [],
        "Folders of test sets (xx-en.test.tsv.gz or xx-en.tsv.gz), or parent folders of such folders, measured before and "
        "after training, with a report. With --languages, only these languages are measured.",
    )
    retention: list[str] = option(
        [],
        "Folders of test sets in languages that are not trained on, measured before and after training; 'none' skips "
        "this measurement. Default with --test: the languages of the test sets that are not trained on, or, if there are "
        "none (as with --languages), the packaged Universal Declaration of Human Rights in 94 languages (6,000 pairs).",
    )
    retention_languages: list[str] = option(
        [], "Languages of the retention sets that are measured. If omitted, or 'all': all languages."
    )
    pooling: PoolingMode | None = option(
        None,
        "Pooling that replaces the encoder's own: cls, max, mean, mean_sqrt_len_tokens, weightedmean or lasttoken.",
    )
    lora_rank: Count | None = option(
        None, "Train a LoRA adapter of this rank instead of all weights (requires peft); it is merged on release."
    )
    keep_adapter: bool = option(False, "Also write the adapter to the folder 'adapter' of the release.")
    freeze_word_embeddings: bool = option(False, "Freeze the word embeddings, which saves memory and time.")
    merge: str | None = option(  # a number or "auto"; HfArgumentParser has no type for it
        None,
        "Weight of the trained encoder in the release: 0 is the encoder before training, 1 (if omitted) the trained encoder. "
        "auto: the weight that gains most on --dev while all guards hold: similarity structure, and the folders of --guard.",
    )
    guard: list[str] = option(
        [],
        "Folders of data on which the release must not get worse, measured before and after training (--test), during "
        f"training (--dev), and by --merge auto and --debias auto. Their names must differ. Each contains {GUARD_FOLDERS}.",
    )
    max_structure_loss: AtLeast0 = option(MAX_STRUCTURE_LOSS, STRUCTURE_LIMIT)
    debias: str = option(  # likewise
        0,
        "Directions of language identity to project out of the release, as `metaphrase debias` does; 0 for none. auto: of "
        "10, 20, 30 and 40, the number that gains most on --dev, in one pool of all languages, while the folders of --guard "
        "hold.",
    )
    license: str | None = option(
        None, "Licence of the release as the Hub spells it, e.g. apache-2.0 (default: the base model's)."
    )
    data_license: str | None = option(None, "Licence of corpus files whose licence is unknown, for the model card.")
    streaming: bool = option(False, "Read the corpus during training (requires --max_steps).")
    on_disk: bool = option(
        False, "Store the clean corpus in the output folder instead of memory; a resumed run reuses it."
    )
    temperature: LanguageTemperature | None = option(
        None, "Sample languages in proportion to size^temperature: 1 keeps their shares, 0 makes them equal."
    )
    clean: str = option(
        "basic", "'basic' drops empty and repeated pairs; 'dap' and 'ppa' add the filters of those papers."
    )
    limit: Count | None = option(None, "Maximum number of pairs read for each language.")
    monolingual: list[str] = option(
        [],
        "Monolingual text for recipes that use it: files with one sentence per line, or hf:org/name with a "
        "column 'text'.",
    )
    monolingual_ratio: Ratio = option(1.0, "Monolingual texts per pair of the bitext.")
    paper_training: bool = option(
        False, "Use the paper's optimiser, schedule, steps and batch per process (DAP: 128 pairs on each of 8)."
    )
    max_length: Length | None = option(
        None, "Maximum number of pieces per sentence in training (default: the recipe's)."
    )
    vocabulary: Vocabulary | None = option(
        None,
        "Vocabulary projection of objectives that predict pieces. tied: the encoder's word embeddings; untied: a "
        "trainable copy; english: a trainable copy for the pieces of the corpus's English side only.",
    )
    transform: Transform | None = option(
        None, "Transform before the vocabulary projection: auto (a fresh one if required) or none."
    )


@dataclass(init=False, repr=False)
class RunConfig(AlignmentTrainingArguments, RunOptions):
    """Configuration of a training run: encoder, data and training arguments.

    The names are the same as the flags of ``metaphrase train`` and the keys of its YAML files;
    ``metaphrase train --help-all`` lists them. Settings that are not passed come from the recipe's ``training`` section,
    then from the defaults.

    A configuration is plain data. :meth:`training_arguments` sets up the device and the processes.

    Example:
        >>> config = RunConfig(recipe="tr", corpus=["pairs.tsv"], languages=["sw"], output_dir="runs/sw", max_steps=300)
        >>> config.max_steps, config.per_device_train_batch_size
        (300, 32)

    Args:
        **settings: Options by name.

    Raises:
        UsageError: An option is unknown (the message names the nearest), a number is out of range, or a language code is
            unknown.
        RecipeError: The recipe is invalid.
        MissingFileError: The recipe does not exist.
    """

    output_dir: str | None = option("", "Folder of the release and its checkpoints.")
    logging_steps: Positive = option(10, "Steps between two log entries.")
    save_steps: Positive = option(500, "Steps between two checkpoints.")
    save_total_limit: CountOr0 | None = option(
        2, "Number of checkpoints to keep; 0 for all. The last and the best are always kept."
    )
    eval_strategy: str | None = option(
        None, "When to measure --dev: steps (every --eval_steps), epoch or no. Default: at every checkpoint."
    )
    report_to: None | str | list[str] = option(  # noqa: RUF036 - the order that HfArgumentParser reads
        "tensorboard" if find_spec("tensorboard") else "none",
        "Trackers that log curves: tensorboard (if installed), none or another integration.",
    )

    def __init__(self, **settings: Any) -> None:
        options = {one.name: one for one in fields(self) if one.init}
        for name in settings:
            if name not in options:
                raise UsageError(f"Unknown option {name!r}{did_you_mean(name, options)}.")
        settings = plain(settings)  # NumPy's numbers as Python's
        check_values(hints_of(type(self)), settings, type(self).__name__)
        for name, (number, hint) in _NUMBER_OR_AUTO.items():
            if name in settings:
                settings[name] = number_or_auto(settings[name], number, hint, name)
        recipe: Any = settings.get("recipe", options["recipe"].default)
        recipe = recipe if isinstance(recipe, Recipe) else str(recipe)  # a Recipe is refused
        defaults = recipe_settings(recipe, paper_training=bool(settings.get("paper_training")))
        replaced = {name for option, name in REPLACED.items() if settings.get(option) is not None}
        defaults = {name: value for name, value in defaults.items() if name not in replaced}
        for name, one in options.items():
            default = default_of(one)
            setattr(self, name, _plain({**defaults, **settings}.get(name, default), default))
        self.output_dir = os.path.expanduser(self.output_dir or "")  # noqa: PTH111 - transformers expands ~ too
        for name, hint in hints_of(RunOptions).items():
            if name not in _NUMBER_OR_AUTO:  # checked above
                check_value(getattr(self, name), hint, f"{name!r} of RunConfig")
        self.languages = split_languages(self.languages, keep_scripts=True)
        if self.retention_languages != ["all"]:
            self.retention_languages = split_languages(self.retention_languages)

    __repr__ = AlignmentTrainingArguments.__str__  # hides tokens

    def training_arguments(self, *, evaluates: bool | None = None) -> AlignmentTrainingArguments:
        """The arguments of the trainer; building them sets up the device and joins the processes of ``torchrun``.

        Args:
            evaluates: Whether there are dev data to measure while training; by default, if ``dev`` is set. They are
                measured at every checkpoint, unless ``eval_strategy`` is set.

        Raises:
            UsageError: A value is invalid, or two values contradict each other.
            WorkerError: The processes cannot be connected.
        """
        names = [one.name for one in fields(AlignmentTrainingArguments) if one.init]
        values = {name: deepcopy(getattr(self, name)) for name in names}
        if values["eval_strategy"] is None:
            if not (bool(self.dev) if evaluates is None else evaluates):
                values["eval_strategy"] = "no"
            elif self.save_strategy == "epoch" and self.eval_steps is None:
                values["eval_strategy"] = "epoch"
            else:
                values |= {"eval_strategy": "steps", "eval_steps": self.eval_steps or self.save_steps}
        return AlignmentTrainingArguments(**values)

    def command(self) -> list[str]:
        """The ``metaphrase train`` command with these settings, for card and report.

        >>> " ".join(RunConfig(recipe="tr", corpus=["pairs.tsv"], output_dir="runs/sw", max_steps=300).command())
        'metaphrase train --recipe tr --corpus pairs.tsv --output_dir runs/sw --max_steps 300'
        """
        return ["metaphrase", "train", *flags_of(self, self._defaults(), "recipe")]

    def settings(self) -> dict[str, Any]:
        """The options that differ from their defaults, as plain data without tokens, for ``run.json``.

        >>> RunConfig(recipe="tr", corpus=["pairs.tsv"], output_dir="runs/sw", max_steps=300).settings()
        {'recipe': 'tr', 'corpus': ['pairs.tsv'], 'output_dir': 'runs/sw', 'max_steps': 300}
        """
        changed = changed_options(self, self._defaults(), "recipe")
        return {name: _as_data(value) for name, value in changed.items() if name not in _NOT_IN_FACTS}

    def _defaults(self) -> RunConfig:
        """The configuration with the recipe's settings and defaults only."""
        return RunConfig(recipe=self.recipe, paper_training=self.paper_training)


def recipe_settings(name: str, *, paper_training: bool = False) -> dict[str, Any]:
    """The training settings of a recipe.

    Raises:
        UsageError: The settings of a paper are asked for, but the recipe is not a paper's.
    """
    recipe = Recipe.load(name)
    if paper_training and not recipe.paper_training:
        raise UsageError(
            f"--paper_training uses the training settings of a paper, but the recipe {recipe.name!r} has none. Choose a "
            "paper's recipe with --recipe, see `metaphrase recipes`, or omit the option."
        )
    return {**recipe.training, **(recipe.paper_training if paper_training else {})}


def configured_recipe(config: RunConfig) -> Recipe:
    """The recipe with the configured length, and with the vocabulary and transform in every term that has them."""
    recipe = Recipe.load(config.recipe)
    recipe.check()
    chosen = {name: value for name in ("vocabulary", "transform") if (value := getattr(config, name)) is not None}
    terms = []
    for term in recipe.terms:
        accepted = parameters_of(OBJECTIVES[term.objective])
        settings = {name: value for name, value in chosen.items() if name in accepted}
        terms.append(replace(term, args={**term.args, **settings}) if settings else term)
    for name in chosen:
        if not any(name in term.args for term in terms):
            logger.warning("No objective of recipe %s has a %s, so --%s has no effect.", recipe.name, name, name)
    return replace(recipe, terms=tuple(terms), max_length=config.max_length or recipe.max_length)


def number_or_auto(value: Any, number: type[float], hint: Any, name: str) -> Any:
    """The option of a name, as a number or "auto"."""
    if isinstance(value, str):
        with suppress(ValueError):
            value = number(value)
    check_value(value, hint, repr(name))
    return value


def flags_of(config: Any, plain: Any, *always: str) -> list[str]:
    """The options of :func:`changed_options` as words of a command line."""
    changed = changed_options(config, plain, *always)
    return [word for name, value in changed.items() if value is not None for word in (f"--{name}", *_words(value))]


def changed_options(config: Any, plain: Any, *always: str) -> dict[str, Any]:
    """The options of a configuration that differ from another one, and the options ``always``; without tokens.

    None and empty text do not differ: the command line has one for the other.
    """

    def given(configured: Any, name: str) -> Any:
        value = getattr(configured, name, None)
        return None if value == "" else value

    names = [one.name for one in fields(config) if one.init and not one.name.endswith("_token")]
    changed = [name for name in names if name in always or given(config, name) != given(plain, name)]
    return {name: given(config, name) for name in changed}


def refuse_token(settings: Mapping[str, Any]) -> None:
    """Refuse settings of a file that contain a token."""
    if settings.get("hub_token"):
        raise UsageError("A settings file must not contain a token, but has a hub_token. Set HF_TOKEN instead.")


def _plain(value: Any, default: Any) -> Any:
    """A setting with text for paths, and a list for a single word where one is expected."""
    if isinstance(default, list) and isinstance(value, str | Path):
        value = [value]
    if isinstance(value, list | tuple) and isinstance(default, list):
        return [_plain(item, None) for item in value]
    return str(value) if isinstance(value, Path) else value


def _as_data(value: Any) -> Any:
    """A value as JSON can express it, without tokens in its texts."""
    if isinstance(value, list | tuple):
        return list(map(_as_data, value))
    if isinstance(value, Mapping):
        return {str(key): _as_data(item) for key, item in value.items()}
    if isinstance(value, Enum):
        return _as_data(value.value)
    return value if value is None or isinstance(value, bool | int | float) else without_tokens(str(value))


def _words(value: Any) -> list[str]:
    """A value as words of a command line."""
    if isinstance(value, list | tuple):
        return [word for item in value for word in _words(item)]
    if isinstance(value, bool):
        return ["true" if value else "false"]
    if isinstance(value, Mapping):
        return [json.dumps(dict(value))]
    return [str(value.value if isinstance(value, Enum) else value)]
