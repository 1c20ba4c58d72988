"""Options and result tables that the training commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import RenderableType

from metaphrase.checkpoints.folders import checkpoint_folders
from metaphrase.cli.options import Parser, parse
from metaphrase.cli.output import emit, is_quiet, notes
from metaphrase.cli.tables import effect_lines
from metaphrase.exceptions import MetaphraseError
from metaphrase.io.redaction import hide
from metaphrase.publishing.report import render_table
from metaphrase.training.configuration import REPLACED, RunConfig, recipe_settings, refuse_token
from metaphrase.training.results import RunResult
from metaphrase.training.run import TrainingRun

#: The options that most runs use, by group, with the text of ``--help``; ``--help-all`` lists the rest too.
LEADING = {
    "what to train": {
        "recipe": "One of `metaphrase recipes`, or a file",
        "model": "'starter', a Hub id or a folder",
        "corpus": "Bitext: files, folders or hf:org/name",
        "languages": "Languages of the corpus, e.g. sw te",
        "output_dir": "Folder of release and checkpoints",
    },
    "what to measure": {
        "dev": "Bitext to measure during training",
        "test": "Test sets, measured before and after",
        "retention": "Test sets in other languages, or none",
    },
    "training": {
        "max_steps": "Training steps, instead of epochs",
        "num_train_epochs": "Passes over the corpus",
        "per_device_train_batch_size": "Pairs per batch",
        "learning_rate": "Learning rate of the encoder",
        "max_length": "Pieces per sentence",
        "freeze_word_embeddings": "Save memory and time",
        "bf16": "Compute in bfloat16",
        "seed": "Random seed",
        "seeds": "Train once with each of these seeds",
    },
    "checkpoints and the Hub": {
        "save_steps": "Steps between checkpoints",
        "resume_from_checkpoint": "A folder; true: the last valid one",
        "push_to_hub": "Push the release to the Hub",
    },
}

#: Flags that print something instead of running; they need the recipe first.
_PRINTING = ("-h", "--help", "--help-all", "--print-config", "--print_config")


def parse_run(
    argv: Sequence[str],
    settings_for: Callable[[str | None], dict[str, Any]] = lambda recipe: {},
    *,
    prog: str,
    description: str,
    examples: Sequence[str],
    also: Sequence[type] = (),
) -> tuple[RunConfig, list[str], tuple[Any, ...]]:
    """Parse the options of a training run: the recipe's settings, the command's, ``--config``, then the command line.

    ``settings_for`` returns the command's settings for a recipe; for None, those for its default recipe.

    Returns the configuration, the command line without the token, safe to print and store, and the options ``also``.
    """
    about: dict[str, Any] = {"description": description, "examples": examples, "leading": LEADING}
    token, argv = without_token(argv)
    hide(token)
    types = [RunConfig, *also]
    running = [word for word in argv if word not in _PRINTING]
    peeked, *_ = parse(prog, types, running, defaults=settings_for(None), **about)
    settings = recipe_settings(peeked.recipe, paper_training=peeked.paper_training) | settings_for(peeked.recipe)
    refuse_token({"hub_token": peeked.hub_token})
    config, *others = parse(prog, types, argv, defaults=settings, replaced=REPLACED, **about)
    config.hub_token = token
    config.disable_tqdm = True if is_quiet() else config.disable_tqdm
    return config, [*prog.split(), *argv], tuple(others)


def without_token(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of ``--hub_token``, and the command line without it, safe to print and store.

    >>> without_token(["--hub_token", "secret", "--seed", "1"])
    ('secret', ['--seed', '1'])
    """
    reader = Parser(add_help=False, allow_abbrev=False)
    reader.add_argument("--hub_token", "--hub-token")
    found, others = reader.parse_known_args(argv)
    return found.hub_token, others


def execute(run: TrainingRun) -> RunResult | None:
    """Execute a run; if a signal stops it after the first checkpoint, say how to resume it."""
    try:
        return run.execute()
    except (SystemExit, KeyboardInterrupt):
        if run.is_main_process and checkpoint_folders(run.output):
            notes().print("Resume with --resume_from_checkpoint true.")
        raise


def execute_and_print(run: TrainingRun) -> None:
    """Execute a run and print its result; if only the push fails, the result is printed before the error."""
    try:
        result = execute(run)
    except MetaphraseError:
        if run.result is not None:
            emit(run.result.to_dict(), *summary(run.result))
        raise
    if result is not None:
        pushed = f"\nPushed to {run.repository}: {result.pushed}"
        emit(result.to_dict(), *summary(result), *([pushed] if result.pushed else []))


def summary(result: RunResult) -> Iterator[RenderableType]:
    """Format a result for the console: tables before and after, retention, paths, and how to load the release."""
    yield from comparison_tables(result)
    yield from ("\n" + line for line in effect_lines(result.retention, result.abilities))
    if result.curve is not None:
        yield f"\n{result.curve}"
    if chosen := result.facts.get("debias", {}).get("chosen"):
        yield f"\n{chosen}"
    if result.verdict:
        yield f"\n{result.verdict}"
    if result.report is not None:
        yield f"\nReport: {result.report} and {result.report.with_suffix('.json').name}"
        yield f"\nUse it:\n\n{result.usage}"
    yield f"\nReleased to {result.output}."


def comparison_tables(result: RunResult) -> Iterator[RenderableType]:
    """Heading and table of each test set, before and after training."""
    for name, comparison in result.comparisons.items():
        yield f"\n{name}: {result.model} before, {result.output} after"
        yield render_table(result.after[name], result.before[name], comparison)
