"""Checks of a run's configuration, before anything is loaded or trained."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from importlib.util import find_spec
from typing import Any

from metaphrase.corpus.files import find_files
from metaphrase.corpus.monolingual import check_monolingual
from metaphrase.evaluation.guards import check_guard_folders
from metaphrase.exceptions import MissingExtraError, UsageError
from metaphrase.io.environment import install_command
from metaphrase.modeling.languages import LanguageEmbedding
from metaphrase.training.checkpointing import ADAPTIVE
from metaphrase.training.configuration import CLEANINGS, RunConfig
from metaphrase.training.corpora import selected
from metaphrase.training.recipe import Recipe

logger = logging.getLogger(__name__)


def check_config(
    config: RunConfig, *, dev: Collection[str] | None = None, tests: Collection[str] | None = None
) -> None:
    """Refuse a configuration whose options are missing or unknown; ``dev`` and ``tests`` replace its own."""
    dev = config.dev if dev is None else dev
    tests = config.test if tests is None else tests
    if not config.corpus:
        raise UsageError("Training needs a bitext: pass --corpus (a file, a folder or hf:org/name).")
    if not config.output_dir:
        raise UsageError("Training needs a folder for its results: pass --output_dir.")
    if config.streaming and config.max_steps <= 0:
        raise UsageError("A stream has no length: pass --max_steps.")
    if config.lora_rank is not None and find_spec("peft") is None:
        raise MissingExtraError(f"--lora_rank requires PEFT: {install_command('peft')}.")
    if config.keep_adapter and (config.merge is not None or config.debias):
        raise UsageError(
            "--keep_adapter keeps the adapter of the trained encoder, but with --merge or --debias another encoder is "
            "released. Omit --keep_adapter, or omit --merge and --debias."
        )
    if config.clean not in CLEANINGS:
        raise UsageError(f"--clean is one of {', '.join(CLEANINGS)}, not {config.clean!r}.")
    if config.merge == "auto" and not dev:
        raise UsageError("--merge auto needs pairs to measure the gain: pass --dev, or a number with --merge.")
    check_directions(config.debias, config.guard, dev)
    check_guard_folders(config.guard)
    if config.guard and not (dev or tests):
        raise UsageError("--guard is measured with the dev sets and the test sets: also pass --dev or --test.")
    find_files(config.corpus, **selected(config))


def check_directions(directions: Any, guard: Collection[str], dev: Collection[str]) -> None:
    """Refuse to choose the number of directions of language identity without data that show gain and loss."""
    if directions == "auto" and not (guard and dev):
        missing = " and ".join(name for name, given in (("--dev", dev), ("--guard", guard)) if not given)
        raise UsageError(
            "--debias auto needs data that show what the removal of directions gains and loses. Pass folders with "
            f"{missing}, or a number with --debias."
        )


def check_evaluation(config: RunConfig, dev: Collection[str]) -> None:
    """Refuse evaluation or the choice of a best model without dev data; warn if the best model is not released."""
    metric, is_chosen = config.metric_for_best_model, config.load_best_model_at_end
    saves_best = config.save_strategy == "best"
    needed = {
        "load_best_model_at_end": is_chosen,
        "metric_for_best_model": metric,
        "save_strategy best": saves_best,
        "eval_strategy": config.eval_strategy not in (None, "no"),
        "eval_on_start": config.eval_on_start,
        **{f"lr_scheduler_type {kind}": config.lr_scheduler_type == kind for kind in ADAPTIVE},
    }
    if not dev and any(needed.values()):
        name = next(name for name, given in needed.items() if given)
        raise UsageError(f"--{name} needs pairs on which the models are measured: pass --dev.")
    if saves_best and not metric:
        raise UsageError("--save_strategy best needs a metric: pass --metric_for_best_model.")
    if metric and not is_chosen:
        logger.warning(
            "The release will be the last model, not the best by --metric_for_best_model %s. To release the best, pass "
            "--load_best_model_at_end.",
            metric,
        )


def check_text(recipe: Recipe, config: RunConfig) -> None:
    """Refuse a recipe without the monolingual text that it reads, or text that no objective reads."""
    reads = "monolingual" in recipe.columns
    if reads and not config.monolingual:
        raise UsageError(
            f"Recipe {recipe.name!r} reads monolingual text: pass --monolingual (files with one sentence per line, or "
            "hf:org/name), or use a recipe whose objectives do not read it."
        )
    if config.monolingual and not reads:
        raise UsageError(f"Recipe {recipe.name!r} reads no monolingual text; omit --monolingual.")
    check_monolingual(config.monolingual)


def check_language_embedding(
    config: RunConfig, recipe: Recipe, embedding: LanguageEmbedding, measured: Iterable[Collection[str]]
) -> None:
    """Refuse options that do not apply to a recipe with a language embedding, and measured languages without a vector."""
    if config.debias or config.merge is not None or config.guard:
        raise UsageError(
            f"Recipe {recipe.name!r} learns an input vector for each language, so its encoder is not merged, "
            "debiased or guarded. Omit --merge, --debias and --guard."
        )
    if config.push_to_hub:
        raise UsageError(
            f"Recipe {recipe.name!r} is released as one folder per language, which one repository cannot contain. "
            "Omit --push_to_hub, and push the folders after training: metaphrase push FOLDER/xx --repo me/name-xx."
        )
    if missing := sorted(set().union(*measured) - set(embedding.languages)):
        raise UsageError(
            f"The corpus has no {', '.join(missing)}, so the model learns no vector for it and cannot be measured "
            "on it. Choose the measured languages with --languages."
        )
