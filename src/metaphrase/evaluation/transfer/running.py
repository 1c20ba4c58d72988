"""Fine-tuning runs that resume, the choice of their checkpoints, and their results.

The mode of a program (see `FineTuningOptions`) consists of one or several *runs* of transformers' Trainer, each in its own
folder. Every checkpoint is measured on the dev data, and the selection decides which one a language is measured with.
English dev data are the only ones that zero-shot transfer may use. Code-switching (Pan et al. 2021) leaves English items
unchanged.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from safetensors.torch import load_model
from transformers import TrainerCallback, TrainingArguments, set_seed

from metaphrase.checkpoints.folders import (
    checkpoint_folders,
    checkpoints,
    fault_of,
    last_good,
    remove,
    remove_file,
    step_of,
    tidy,
    verify,
)
from metaphrase.checkpoints.saving import AtomicCheckpointMixin, check_finite, explain_lost_processes
from metaphrase.corpus.code_switching import CodeSwitchingCollator
from metaphrase.encoders.names import model_folder
from metaphrase.evaluation.transfer.data import ENGLISH, Languages, TransferData
from metaphrase.evaluation.transfer.options import FineTuningArguments, Selection
from metaphrase.evaluation.transfer.planning import Run, load_benchmark, plan, select_languages
from metaphrase.evaluation.transfer.tasks import EncoderSource, Task
from metaphrase.exceptions import DataError, UsageError
from metaphrase.io.digests import json_digest
from metaphrase.io.environment import hardware, versions
from metaphrase.io.files import as_json
from metaphrase.io.outputs import claimed
from metaphrase.io.tables import titled_table
from metaphrase.io.work_folders import read_part, write_part

logger = logging.getLogger(__name__)

RESULTS, SETTINGS = "results.json", "settings.json"
OPTIMIZER = "optimizer.pt"

#: How to resume a program, for error messages.
RUN_AGAIN = "Run the same command again to resume."


def fine_tune(task: Task, *, files: Sequence[Path] | None = None) -> dict[str, Any]:
    """Train, choose checkpoints and measure. Finished runs are not repeated.

    If ``files`` are given, only these are read from folders.

    Returns the content of ``results.json``, which :func:`metaphrase.evaluation.suites.transfer.finetuned_results` converts to
    ``Result`` objects: ``languages`` with ``metrics``, ``interval``, ``items``, ``facts`` and ``checkpoint``, ``average`` and
    ``average_without_english``, settings, data with their digests, runs with their dev scores, and seconds. The ``item_ids``
    of each language are added.
    """
    benchmark = load_benchmark(task.options, task.form, seed=task.arguments.seed, files=files)
    run = partial(_run_all, task, benchmark)
    results = run_once(task.name, task.source, task.options, task.arguments, benchmark.facts(), run)
    folder = Path(str(task.arguments.output_dir))
    if results and task.options.keep_checkpoints and not any(folder.glob("*/checkpoint-*")):
        logger.warning(
            "%s has no checkpoints: an earlier run with --keep_checkpoints false deleted them. To keep them, choose another "
            "--output_dir.",
            folder,
        )
    for language, ids in benchmark.item_ids().items() if results else ():  # only the first process has results
        results["languages"][language]["item_ids"] = ids
    return results


def run_once(
    task: str,
    source: EncoderSource,
    options: Any,
    arguments: FineTuningArguments,
    data: Mapping[str, Any],
    run: Callable[[Path], dict[str, Any] | None],
) -> dict[str, Any]:
    """Run a program in its folder and write ``results.json``, unless the folder has it already.

    ``data`` are the numbers and digests of the items. Only the first process receives results; in the others ``run`` returns
    None.
    """
    if not arguments.output_dir:
        raise UsageError("Fine-tuning needs a folder for its results. Pass --output_dir.")
    folder = Path(arguments.output_dir)
    first = arguments.process_index == 0
    claim = claimed(folder, model=model_folder(options.model)) if first else nullcontext()
    with claim, explain_lost_processes(lambda: RUN_AGAIN):
        settings = check_settings(folder, task, source, options, arguments, data)
        if (kept := read_part(folder / RESULTS)) is not None:
            logger.info("%s exists already.", folder / RESULTS)
            return kept if first else {}
        found = run(folder)
        if found is None:
            return {}
        facts = {"hardware": hardware(), "versions": versions(), "data": data}
        return write_part(folder / RESULTS, settings | facts | found)


def _run_all(task: Task, benchmark: TransferData, folder: Path) -> dict[str, Any] | None:
    if task.options.selection == "english" and ENGLISH not in benchmark.dev:
        raise UsageError("--selection english needs English dev data.")
    first = task.arguments.process_index == 0
    done = {}
    for name, run in plan(benchmark, task.options.mode, task.originals).items():
        kept = read_part(folder / name / RESULTS)
        if kept is None:
            kept = train_and_measure(task, run, benchmark, replace(task.arguments, output_dir=str(folder / name)))
            if first:
                kept = write_part(folder / name / RESULTS, kept)
        if first:
            _prune(folder / name, kept, keep=task.options.keep_checkpoints)
        done[name] = kept
    if not first:
        return None
    measured = {language: score for result in done.values() for language, score in result["languages"].items()}
    scores = {language: measured[language] for language in benchmark.test}
    return {
        "languages": scores,
        "average": average(scores),
        "average_without_english": average({code: score for code, score in scores.items() if code != ENGLISH}),
        "runs": {name: {key: result[key] for key in result if key != "languages"} for name, result in done.items()},
        "seconds": round(sum(result["seconds"] for result in done.values()), 1),
    }


def check_settings(
    folder: Path, task: str, source: EncoderSource, options: Any, arguments: TrainingArguments, data: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the settings of a program to its folder, or compare them with the settings in it."""
    trained = {name: getattr(arguments, name) for name in _HYPERPARAMETERS}
    trained["lr_scheduler_type"] = str(arguments.lr_scheduler_type.value)
    trained["lr_scheduler_kwargs"] = json.dumps(arguments.lr_scheduler_kwargs, sort_keys=True)
    settings = {
        "task": task,
        "model": options.model.rstrip("/"),
        "model_sha256": source.sha256,
        "seed": arguments.seed,
        "settings": {
            name: value for name, value in asdict(options).items() if name not in ("model", "keep_checkpoints")
        },
        "training": trained | {"world_size": arguments.world_size},
        "data_sha256": json_digest(data),
    }
    settings = as_json(settings)
    path = folder / SETTINGS
    if path.is_file():
        if (then := read_part(path)) is None:
            raise DataError(
                f"{path} was damaged, so the settings of the runs in {folder} are unknown. Delete {folder} to start over."
            )
        before, now = (one | one["settings"] | one["training"] for one in (then, settings))
        if then != settings and not _has_results(folder):  # nothing was trained: the data or options were refused
            if arguments.process_index == 0:
                write_part(path, settings)
            return settings
        same_weights = settings["model_sha256"] is not None and before.get("model_sha256") == settings["model_sha256"]
        digested = {"data_sha256", *(["model"] if same_weights else [])}  # a model may have several paths
        for key, value in now.items():
            if key not in digested and not isinstance(value, dict) and before.get(key, value) != value:
                raise UsageError(
                    f"{folder} was started with {key} {before[key]}, not {value}. Resume with the same settings, or "
                    "choose another --output_dir."
                )
        if then["data_sha256"] != settings["data_sha256"]:
            raise UsageError(f"The data have changed since {folder} was started. Choose another --output_dir.")
    elif arguments.process_index == 0:
        write_part(path, settings)
    return settings


def _has_results(folder: Path) -> bool:
    """Whether a folder holds a checkpoint or results."""
    return any(next(folder.rglob(pattern), None) is not None for pattern in ("checkpoint-*", RESULTS))


_HYPERPARAMETERS = (
    *("learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
    *("label_smoothing_factor", "neftune_noise_alpha", "bf16", "fp16", "optim", "optim_args", "data_seed"),
    *("eval_strategy", "eval_steps", "save_strategy", "save_steps"),
)


def train_and_measure(task: Task, run: Run, benchmark: TransferData, arguments: Any) -> dict[str, Any]:
    """One run: train, resuming from the last checkpoint, and measure with the chosen checkpoints."""
    started = time.time()
    selection = task.options.selection
    arguments = replace(arguments, save_total_limit=None)  # KeepChosen deletes checkpoints
    dev = _dev_sets(run, benchmark, selection)
    if not dev:
        arguments = replace(arguments, eval_strategy="no")
    units, collate, arguments = _training_data(task, run, arguments)
    set_seed(arguments.seed)
    trainer = FineTuner(
        model=task.build(),
        args=arguments,
        data_collator=collate,
        train_dataset=units,
        eval_dataset=dev or None,
        score=task.score,
        callbacks=[KeepChosen(run.languages, selection)],
    )
    trainer.train_or_resume()
    trained = time.time()
    history = dev_history(trainer.state.log_history)
    chosen = choose(history, run.languages, selection, trainer.state.global_step)
    scores = _measure(task, trainer.model, run, benchmark, chosen, arguments)
    trainer.accelerator.wait_for_everyone()
    return {
        "languages": {language: scores[language] for language in run.languages},
        "items": len(run.train),
        "steps": trainer.state.global_step,
        "dev": history,
        "loss": trainer.losses,
        "seconds": round(time.time() - started, 1),
        "training_seconds": round(trained - started, 1),
    }


def _prune(folder: Path, results: Mapping[str, Any], *, keep: bool) -> None:
    """Delete the checkpoints of a run that no language is measured with, all unless ``keep``, and optimiser states."""
    tidy(folder)
    measured = {score["checkpoint"] for score in results["languages"].values()} if keep else set()
    for checkpoint in checkpoint_folders(folder):
        if step_of(checkpoint) in measured:
            remove_file(checkpoint, OPTIMIZER)
        else:
            remove(checkpoint)


def _dev_sets(run: Run, benchmark: TransferData, selection: Selection) -> Languages:
    """Dev data that select the checkpoints of a run."""
    if selection == "english":
        return select_languages(benchmark.dev, [ENGLISH])
    if set(run.languages) == set(benchmark.test):
        return benchmark.dev
    return select_languages(benchmark.dev, run.languages)


def _training_data(task: Task, run: Run, arguments: Any) -> tuple[Sequence[Any], Callable[[list[Any]], Any], Any]:
    """Units of the training data, their collator, and arguments with the batch size for these units."""
    if not run.couples:
        return task.units(run.train), task.collate, arguments
    if task.originals is None or arguments.per_device_train_batch_size % 2:
        raise UsageError("Code-switching creates two rows per item. Pass an even --per_device_train_batch_size.")
    collate = CodeSwitchingCollator(lambda rows: task.collate(list(task.units(rows))), task.originals)
    arguments = replace(arguments, per_device_train_batch_size=arguments.per_device_train_batch_size // 2)
    return run.train, collate, arguments


def _measure(
    task: Task, model: Any, run: Run, benchmark: TransferData, chosen: Mapping[str, int], arguments: Any
) -> dict[str, Any]:
    """Scores of each language with the checkpoint that was chosen for it."""
    scores: dict[str, Any] = {}
    for step in sorted(set(chosen.values())):
        checkpoint = Path(str(arguments.output_dir)) / f"checkpoint-{step}"
        verify(checkpoint)
        load_model(model, checkpoint / "model.safetensors")
        for language in (code for code in run.languages if chosen[code] == step):
            score = task.score(model, benchmark.test[language], language)
            scores[language] = {"n": len(benchmark.test[language]), **asdict(score), "checkpoint": step}
    return scores


class FineTuner(AtomicCheckpointMixin):
    """transformers' Trainer that measures each dev language with the score of the task, and writes complete checkpoints.

    ``eval_dataset`` is a data set per language; the score is None without dev data.
    """

    def __init__(self, *, score: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # The models return the mean over a batch, so the gradients of batches and of processes are averaged, not summed.
        self.model_accepts_loss_kwargs = False
        self.score = score

    def how_to_resume(self) -> str:
        """How to resume this run, for error messages."""
        return f"{last_good(self.args.output_dir)} {RUN_AGAIN}"

    def train_or_resume(self) -> None:
        """Train, from the last checkpoint in the output folder if there is one."""
        folder = Path(str(self.args.output_dir))
        with self.args.main_process_first(local=False, desc="choice of a checkpoint"):
            if self.args.process_index == 0:
                tidy(folder)
        resumed = last_checkpoint(folder)
        logger.info("%s: %s.", folder, f"resuming from {resumed.name}" if resumed else "training")
        self.train(resume_from_checkpoint=str(resumed) if resumed else None)

    @property
    def losses(self) -> list[list[float]]:
        """Step and training loss of each entry of the log."""
        return [[entry["step"], entry["loss"]] for entry in self.state.log_history if "loss" in entry]

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Dev scores: ``eval_xx`` of each language and ``eval_mean``, in percent.

        Raises:
            NonFiniteError: A weight is NaN or infinite.
        """
        check_finite(self._saved(), lambda: last_good(self.args.output_dir))
        scores = {code: self.score(self.model, data, code).primary for code, data in self.eval_dataset.items()}
        metrics = {f"eval_{code}": score for code, score in scores.items()}
        metrics["eval_mean"] = float(np.mean(list(scores.values())))
        self.log(metrics)
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class KeepChosen(TrainerCallback):
    """Deletes checkpoints that no language would choose, and the optimiser state of all but the last checkpoint.

    Nothing is deleted if the last checkpoint is damaged.
    """

    def __init__(self, languages: Sequence[str], selection: Selection) -> None:
        self.languages, self.selection = languages, selection

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After each checkpoint."""
        if not state.is_world_process_zero:
            return
        output = Path(args.output_dir)
        if fault := fault_of(output / f"checkpoint-{state.global_step}"):
            logger.warning("%s Older checkpoints are kept.", fault)
            return
        history = dev_history(state.log_history)
        kept = {state.global_step, *choose(history, self.languages, self.selection, state.global_step).values()}
        for checkpoint in checkpoints(output):
            if step_of(checkpoint) not in kept:
                remove(checkpoint)
            elif step_of(checkpoint) != state.global_step:
                remove_file(checkpoint, OPTIMIZER)


def last_checkpoint(folder: Path) -> Path | None:
    """The last checkpoint that a run can resume from: an undamaged one with the optimiser state."""
    for checkpoint in reversed(checkpoint_folders(folder)):
        if (checkpoint / OPTIMIZER).is_file():
            if (fault := fault_of(checkpoint)) is None:
                return checkpoint
            logger.warning("Skipped: %s", fault)
    return None


def dev_history(log: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Dev scores of the trainer's log: ``step``, ``mean`` and each language. The last entry of a step counts."""
    entries = {entry["step"]: entry for entry in log if "eval_mean" in entry}
    return [
        {"step": step} | {key.removeprefix("eval_"): value for key, value in entry.items() if key.startswith("eval_")}
        for step, entry in sorted(entries.items())
    ]


def choose(
    history: Sequence[Mapping[str, float]], languages: Sequence[str], selection: Selection, last: int
) -> dict[str, int]:
    """Step of the checkpoint that each language is measured with.

    The first of equally good checkpoints is chosen. A language without dev scores uses the best one on the mean; ``last`` is
    chosen if there are no dev scores.

    >>> history = [{"step": 10, "mean": 60, "en": 70, "sw": 50}, {"step": 20, "mean": 59, "en": 66, "sw": 52}]
    >>> choose(history, ["en", "sw"], "mean", 20), choose(history, ["en", "sw"], "language", 20)
    ({'en': 10, 'sw': 10}, {'en': 10, 'sw': 20})
    """
    if selection == "last" or not history:
        return dict.fromkeys(languages, last)
    steps = {}
    for language in languages:
        wanted = {"mean": "mean", "english": ENGLISH, "language": language}[selection]
        key = wanted if wanted in history[0] else "mean"
        steps[language] = int(max(history, key=lambda entry: (entry[key], -entry["step"]))["step"])
    return steps


def average(scores: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Unweighted mean of each metric over the languages; empty without languages."""
    names = next(iter(scores.values()))["metrics"] if scores else ()
    return {name: float(np.mean([score["metrics"][name] for score in scores.values()])) for name in names}


def results_table(results: Mapping[str, Any]) -> Table:
    """The results for the console: one row per language, then the means."""
    settings = results["settings"]
    title = f"{results['model']}: {results['task']}, {settings['mode']}, checkpoint by {settings['selection']}"
    names = list(results["average"])
    table = titled_table(title, "", right=["items", *names, "interval", "step"])
    table.caption = "In percent; 95 % bootstrap interval of the first metric over the items."
    for language, score in results["languages"].items():
        low, high = score["interval"]
        cells = [f"{score['metrics'][name]:.1f}" for name in names]
        table.add_row(language, str(score["n"]), *cells, f"{low:.1f}…{high:.1f}", str(score["checkpoint"]))
    table.add_section()
    for label, key in (("average", "average"), ("without English", "average_without_english")):
        if results[key]:
            table.add_row(label, "", *(f"{results[key][name]:.1f}" for name in names), "", "")
    return table
