"""What the fine-tuning programs share: options, runs that resume, the choice of checkpoints, results and their table.

A program measures an encoder in one of four modes:

- ``zero-shot``: trained on English, measured in every language;
- ``translate-train``: a model for each language, trained on its translated training data;
- ``translate-train-all``: one model, trained on the translations into all languages;
- ``code-switching``: translate-train whose items are half English (Pan et al. 2021); English itself is trained as it is.

Each is one or several *runs* of transformers' Trainer, each in a folder of its own. Every checkpoint is measured on the dev
data; what is kept is what some language chooses:

- ``mean``: one checkpoint for all languages, the best on the mean over the dev languages ("#M=1");
- ``language``: for each language the best on its own dev data ("#M=N");
- ``english``: one checkpoint, the best on English dev data, which is all that zero-shot transfer may see;
- ``last``: the last one, no dev data needed.
"""

from __future__ import annotations

import json
import logging
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from numpy.typing import NDArray
from rich import box
from rich.table import Table
from safetensors.torch import load_model
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments, set_seed

from metaphrase.checkpoints.folders import checkpoints, remove, remove_file, tidy, verify
from metaphrase.checkpoints.saving import AtomicCheckpoints
from metaphrase.corpus.code_switching import CodeSwitchingCollator, PairedTexts
from metaphrase.evaluation.significance import CONFIDENCE, RESAMPLES
from metaphrase.evaluation.transfer.data import (
    ENGLISH,
    Benchmark,
    Format,
    Languages,
    Row,
    digest,
    read_languages,
    split_items,
    take,
    with_originals,
)
from metaphrase.evaluation.transfer.encoders import EncoderSource
from metaphrase.exceptions import CheckpointError, NewerCheckpointError, UsageError
from metaphrase.io.environment import hardware
from metaphrase.io.files import write_json
from metaphrase.io.locks import exclusive

logger = logging.getLogger(__name__)

PACKAGES = ("metaphrase", "torch", "transformers", "datasets", "accelerate", "tokenizers", "numpy")
RESULTS, SETTINGS = "results.json", "settings.json"
OPTIMIZER = "optimizer.pt"

Mode = Literal["zero-shot", "translate-train", "translate-train-all", "code-switching"]
Selection = Literal["mean", "language", "english", "last"]


@dataclass
class FineTuningOptions:
    """Which encoder, on which data, how measured."""

    model: str = field(
        default="starter",
        metadata={"help": "Encoder to fine-tune: 'starter', a Hub id or a folder (default: starter)."},
    )
    train: str | None = field(
        default=None, metadata={"help": "Training data: PATH[@split] or hf:org/name[:config][@split] (split: train)."}
    )
    dev: str | None = field(
        default=None,
        metadata={"help": "Data that choose the checkpoint (split: dev). Default: held out of the training data."},
    )
    test: str | None = field(default=None, metadata={"help": "Data that are measured (split: test)."})
    halves: str | None = field(
        default=None,
        metadata={
            "help": "In place of the three: one parallel data set, half of whose items are trained on in English and the "
            "other half measured in every language (split: dev)."
        },
    )
    dev_share: float = field(
        default=0.1, metadata={"help": "Share of the items held out as dev data, where --dev is not given."}
    )
    languages: list[str] | None = field(
        default=None, metadata={"help": "Languages to measure, separated by spaces or commas. Default: all there are."}
    )
    mode: Mode = field(
        default="zero-shot", metadata={"help": "What is trained on; see metaphrase.evaluation.transfer.running."}
    )
    selection: Selection = field(
        default="mean",
        metadata={
            "help": "Checkpoint: best mean over the dev languages (#M=1), best of each language (#M=N), best in English, "
            "or the last."
        },
    )
    max_length: int = field(default=128, metadata={"help": "Pieces of an input, special ones included."})
    dropout: float | None = field(default=None, metadata={"help": "Dropout in place of the encoder's own."})
    freeze_word_embeddings: bool = field(
        default=False, metadata={"help": "Keep the word embeddings as they are: less memory, faster."}
    )
    limit_train: int | None = field(default=None, metadata={"help": "Train on the first so many items of a language."})
    limit_test: int | None = field(
        default=None, metadata={"help": "Measure the first so many items of a language, on dev and test data."}
    )
    keep_checkpoints: bool = field(
        default=True, metadata={"help": "Keep the chosen checkpoints; false leaves the results alone."}
    )


@dataclass
class FineTuningArguments(TrainingArguments):
    """transformers' training arguments, with other defaults: a dev score and a checkpoint after every epoch."""

    output_dir: str | None = field(default="", metadata={"help": "Where checkpoints and results go."})
    eval_strategy: str = field(default="epoch", metadata={"help": "When to measure and save: epoch or steps."})
    logging_steps: float = field(default=50, metadata={"help": "Log every so many steps."})
    per_device_eval_batch_size: int = field(default=32, metadata={"help": "Items per forward pass when measuring."})
    report_to: None | str | list[str] = field(  # noqa: RUF036 - the order that HfArgumentParser reads
        default="none", metadata={"help": "Where curves are logged: tensorboard (where installed), none, …"}
    )
    remove_unused_columns: bool = field(default=False, metadata={"help": "Must stay false: rows become batches late."})
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Hide losses that are not finite from the log."}
    )

    def __post_init__(self) -> None:
        """Save when measured; draw progress bars for people only; pin memory for a GPU only."""
        given: Any = self
        if given.disable_tqdm is None:
            given.disable_tqdm = not sys.stderr.isatty()
        given.dataloader_pin_memory = given.dataloader_pin_memory and torch.cuda.is_available()
        if self.eval_strategy != "no":
            self.save_strategy = self.eval_strategy
        if self.eval_steps is not None:
            self.save_steps = self.eval_steps
        super().__post_init__()


@dataclass(frozen=True)
class Score:
    """What a model scores on the test items of one language.

    Attributes:
        metrics: Percentages; the first is what checkpoints are chosen by.
        interval: 95 % bootstrap interval of the first.
        items: Score of each item in [0, 1], for paired tests between models.
    """

    metrics: dict[str, float]
    interval: tuple[float, float]
    items: Sequence[float]

    @property
    def primary(self) -> float:
        """The first metric."""
        return next(iter(self.metrics.values()))


@dataclass(frozen=True)
class Task:
    """What a program knows of its task.

    Attributes:
        name: ``"xnli"``.
        form: How its data are read.
        build: Makes the model, with a fresh head.
        units: Makes of training items what batches are drawn from: themselves, or their windows.
        collate: Makes a training batch of some of these.
        score: Measures a model on the data of a language.
        originals: Columns with an English original, for code-switching; None where there is no such thing.
    """

    name: str
    form: Format
    build: Callable[[], PreTrainedModel]
    units: Callable[[Sequence[Row]], Sequence[Any]]
    collate: Callable[[list[Any]], Any]
    score: Callable[[PreTrainedModel, Dataset, str], Score]
    originals: PairedTexts | None = None


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        train: What is trained on; with English originals beside it where it is to be code-switched.
        languages: What its model is measured on.
        couples: Whether it is to be code-switched.
    """

    train: Dataset
    languages: tuple[str, ...]
    couples: bool = False


def load_benchmark(options: FineTuningOptions, form: Format, *, seed: int) -> Benchmark:
    """Read what the options name.

    Raises:
        ValueError: The sources are not given, or not enough of them.
        FileNotFoundError: Something is not there.
    """
    languages = split_languages(options.languages)
    trained = [ENGLISH] if options.mode == "zero-shot" else _with_english(languages)
    if options.halves is not None:
        if options.train or options.dev or options.test:
            raise UsageError("--halves stands in place of --train, --dev and --test; give it or them.")
        sets = read_languages(options.halves, form, split="dev", languages=_with_english(languages))
        shares = {"test": 0.5, "dev": 0.0 if options.selection == "last" else options.dev_share, "train": 1.0}
        part_of = split_items(sets[ENGLISH], form.group, shares, seed=seed)
        train, dev, test = (take(sets, part_of, part) for part in ("train", "dev", "test"))
        if trained:
            train = _only(train, trained)
        if languages:
            chosen_by = [ENGLISH] if options.selection == "english" else languages
            dev, test = _only(dev, chosen_by), _only(test, languages)
    else:
        if options.train is None or options.test is None:
            raise UsageError("Give --train and --test, or --halves.")
        train = read_languages(options.train, form, split="train", languages=trained)
        test = read_languages(options.test, form, split="test", languages=languages)
        if options.selection == "last":
            dev = {}
        elif options.dev is not None:
            wanted = [ENGLISH] if options.selection == "english" else languages
            dev = read_languages(options.dev, form, split="dev", languages=wanted)
        else:
            shares = {"dev": options.dev_share, "train": 1.0}
            part_of = split_items(train[ENGLISH], form.group, shares, seed=seed)
            train, dev = take(train, part_of, "train"), take(train, part_of, "dev")
    return Benchmark(
        train={code: _head(data, options.limit_train) for code, data in train.items()},
        dev={code: _head(data, options.limit_test) for code, data in dev.items() if len(data)},
        test={code: _head(data, options.limit_test) for code, data in test.items() if len(data)},
    )


def split_languages(languages: Sequence[str] | None) -> list[str] | None:
    """Language codes that were separated by commas or spaces; None for none."""
    return [code for item in languages or () for code in item.replace(",", " ").split()] or None


def _with_english(languages: list[str] | None) -> list[str] | None:
    return languages and list(dict.fromkeys([ENGLISH, *languages]))


def _head(data: Dataset, limit: int | None) -> Dataset:
    return data if limit is None else data.select(range(min(limit, len(data))))


def plan(benchmark: Benchmark, mode: Mode, originals: PairedTexts | None) -> dict[str, Run]:
    """The runs of a mode, by their names.

    Raises:
        ValueError: The task knows no code-switching, or a language has no training data.
    """
    tested = tuple(benchmark.test)
    if mode == "zero-shot":
        return {ENGLISH: Run(benchmark.train[ENGLISH], tested)}
    if mode == "translate-train-all":
        return {"all": Run(concatenate_datasets(list(benchmark.train.values())), tested)}
    if missing := sorted(set(tested) - set(benchmark.train)):
        raise ValueError(
            f"Mode {mode} trains a model for each language, but {', '.join(missing)} has no training data."
        )
    if mode == "translate-train":
        return {language: Run(benchmark.train[language], (language,)) for language in tested}
    if originals is None:
        raise ValueError("Code-switching needs items of two texts; this task has one.")
    english, runs = benchmark.train[ENGLISH], {}
    for language in tested:
        data, switched = benchmark.train[language], language != ENGLISH
        runs[language] = Run(
            with_originals(data, english, originals) if switched else data, (language,), couples=switched
        )
    return runs


def fine_tune(
    task: Task,
    source: EncoderSource,
    benchmark: Benchmark,
    options: FineTuningOptions,
    arguments: FineTuningArguments,
) -> dict[str, Any]:
    """Train, choose, measure; what was done before is not done again.

    Args:
        task: What is trained.
        source: The encoder, for the record.
        benchmark: The data.
        options: How.
        arguments: Hyper-parameters. ``output_dir`` gets ``results.json``, and a folder for each run with its checkpoints.

    Returns:
        The content of ``results.json``: ``languages`` with ``metrics``, ``interval``, ``items`` and the checkpoint of each,
        ``average`` and ``average_without_english``, settings, data with their digests, runs with their dev scores, seconds.

    Raises:
        ValueError: The folder holds results of other settings, or options do not fit each other.
        CheckpointError: Another process uses the folder, nothing can be written there, or a checkpoint is damaged.
        NonFiniteError: A weight has become infinite or no number.
    """
    if not arguments.output_dir:
        raise UsageError("Fine-tuning needs a place for its results: give --output_dir.")
    with exclusive(str(arguments.output_dir)) if arguments.process_index == 0 else nullcontext():
        return _fine_tune(task, source, benchmark, options, arguments)


def _fine_tune(
    task: Task,
    source: EncoderSource,
    benchmark: Benchmark,
    options: FineTuningOptions,
    arguments: FineTuningArguments,
) -> dict[str, Any]:
    folder = Path(str(arguments.output_dir))
    settings = check_settings(folder, task.name, source, options, arguments)
    if (folder / RESULTS).is_file():
        logger.info("%s is there already.", folder / RESULTS)
        return json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    if options.selection == "english" and ENGLISH not in benchmark.dev:
        raise UsageError("--selection english needs English dev data.")
    runs = plan(benchmark, options.mode, task.originals)
    for name, run in runs.items():
        if not (folder / name / RESULTS).is_file():
            result = train_and_measure(task, run, benchmark, options, for_run(arguments, folder / name))
            if arguments.process_index == 0:
                write_json(folder / name / RESULTS, result)
    if arguments.process_index != 0:
        return {}
    done = {name: json.loads((folder / name / RESULTS).read_text(encoding="utf-8")) for name in runs}
    scores = {language: result["languages"][language] for result in done.values() for language in result["languages"]}
    scores = {language: scores[language] for language in benchmark.test}
    results = settings | {
        "data": {
            part: {code: {"n": len(data), "sha256": digest(data)} for code, data in getattr(benchmark, part).items()}
            for part in ("train", "dev", "test")
        },
        "languages": scores,
        "average": average(scores),
        "average_without_english": average({code: score for code, score in scores.items() if code != ENGLISH}),
        "runs": {
            name: {key: value for key, value in result.items() if key != "languages"} for name, result in done.items()
        },
        "seconds": round(sum(result["seconds"] for result in done.values()), 1),
        "hardware": hardware(),
        "versions": {name: version(name) for name in PACKAGES} | {"python": platform.python_version()},
    }
    write_json(folder / RESULTS, results)
    return results


def check_settings(
    folder: Path, task: str, source: EncoderSource, options: Any, arguments: TrainingArguments
) -> dict[str, Any]:
    """Write down the settings of a program in its folder, or compare them with those that are there.

    Raises:
        ValueError: The folder belongs to other settings.
    """
    trained = {name: getattr(arguments, name) for name in _HYPERPARAMETERS}
    trained["lr_scheduler_type"] = str(arguments.lr_scheduler_type.value)
    settings = {
        "task": task,
        "model": options.model,
        "model_sha256": source.sha256,
        "seed": arguments.seed,
        "settings": {
            name: value for name, value in asdict(options).items() if name not in ("model", "keep_checkpoints")
        },
        "training": trained | {"world_size": arguments.world_size},
    }
    settings = json.loads(json.dumps(settings))
    path = folder / SETTINGS
    if path.is_file():
        then = json.loads(path.read_text(encoding="utf-8"))
        for key, value in chain(settings.items(), settings["settings"].items(), settings["training"].items()):
            before = (then | then["settings"] | then["training"]).get(key)
            if not isinstance(value, dict) and before != value:
                raise UsageError(
                    f"{folder} was begun with {key} {before}, not {value}. Go on with the same settings, or choose another "
                    "--output_dir."
                )
    elif arguments.process_index == 0:
        write_json(path, settings)
    return settings


_HYPERPARAMETERS = (
    *("learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
    *("label_smoothing_factor", "bf16", "fp16"),
)


def for_run(arguments: FineTuningArguments, folder: Path) -> FineTuningArguments:
    """The same arguments, for a run in a folder of its own."""
    return replace(arguments, output_dir=str(folder))


def train_and_measure(
    task: Task, run: Run, benchmark: Benchmark, options: FineTuningOptions, arguments: Any
) -> dict[str, Any]:
    """One run: train, from the last checkpoint if there is one, and measure with the checkpoints that were chosen."""
    started = time.time()
    folder = Path(str(arguments.output_dir))
    if arguments.process_index == 0:
        tidy(folder)
    resumed = last_checkpoint(folder)
    logger.info("%s: %s.", folder, f"resuming from {resumed.name}" if resumed else "training")
    dev = benchmark.dev if set(run.languages) == set(benchmark.test) else _only(benchmark.dev, run.languages)
    if options.selection == "english":
        dev = _only(benchmark.dev, [ENGLISH])
    if not dev:
        arguments = replace(arguments, eval_strategy="no")
    collate: Callable[[list[Any]], Any] = task.collate
    units: Sequence[Any] = run.train
    if run.couples:
        if task.originals is None or arguments.per_device_train_batch_size % 2:
            raise UsageError("Code-switching makes two rows of an item: give an even --per_device_train_batch_size.")
        collate = CodeSwitchingCollator(lambda rows: task.collate(list(task.units(rows))), task.originals)
        arguments = replace(arguments, per_device_train_batch_size=arguments.per_device_train_batch_size // 2)
    else:
        units = task.units(run.train)
    set_seed(arguments.seed)
    keep = KeepChosen(run.languages, options.selection)
    trainer = FineTuner(
        model=task.build(),
        args=arguments,
        data_collator=collate,
        train_dataset=units,
        eval_dataset=dev or None,
        score=task.score,
        callbacks=[keep],
    )
    trainer.train(resume_from_checkpoint=str(resumed) if resumed else None)
    trained = time.time()
    history = dev_history(trainer.state.log_history)
    chosen = choose(history, run.languages, options.selection, trainer.state.global_step)
    model = trainer.model
    scores: dict[str, Any] = {}
    for step in sorted(set(chosen.values())):
        checkpoint = folder / f"checkpoint-{step}"
        verify(checkpoint)
        load_model(model, checkpoint / "model.safetensors", device=str(arguments.device))
        for language in (code for code in run.languages if chosen[code] == step):
            score = task.score(model, benchmark.test[language], language)
            scores[language] = {"n": len(benchmark.test[language]), **asdict(score), "checkpoint": step}
    trainer.accelerator.wait_for_everyone()
    if arguments.process_index == 0:
        for checkpoint in folder.glob("checkpoint-*"):
            if not options.keep_checkpoints or _step(checkpoint) not in chosen.values():
                remove(checkpoint)
            else:
                remove_file(checkpoint, OPTIMIZER)
    return {
        "languages": {language: scores[language] for language in run.languages},
        "items": len(run.train),
        "steps": trainer.state.global_step,
        "dev": history,
        "loss": [[entry["step"], entry["loss"]] for entry in trainer.state.log_history if "loss" in entry],
        "seconds": round(time.time() - started, 1),
        "training_seconds": round(trained - started, 1),
    }


def _only(sets: Languages, languages: Sequence[str]) -> Languages:
    return {language: data for language, data in sets.items() if language in languages}


class FineTuner(AtomicCheckpoints):
    """transformers' Trainer that measures with the task's own score, for each dev language, and writes whole checkpoints.

    Args:
        score: Measures a model on the data of a language.
        kwargs: Those of the Trainer; ``eval_dataset`` is a data set for each language.
    """

    # The models return the mean over a batch; without this, accumulated gradients would be summed.
    loss_is_scaled_for_ga = False

    def __init__(self, *, score: Callable[[PreTrainedModel, Dataset, str], Score], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.score = score

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Dev scores: ``eval_xx`` of each language and ``eval_mean``, in percent."""
        scores = {code: self.score(self.model, data, code).primary for code, data in self.eval_dataset.items()}
        metrics = {f"eval_{code}": score for code, score in scores.items()}
        metrics["eval_mean"] = float(np.mean(list(scores.values())))
        self.log(metrics)
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class KeepChosen(TrainerCallback):
    """Deletes the checkpoints that nothing would choose, and the optimiser's state of all but the last, which must verify.

    Args:
        languages: What the run measures.
        selection: How checkpoints are chosen.
    """

    def __init__(self, languages: Sequence[str], selection: Selection) -> None:
        self.languages, self.selection = languages, selection

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After each checkpoint."""
        if not state.is_world_process_zero:
            return
        output = Path(args.output_dir)
        try:
            verify(output / f"checkpoint-{state.global_step}")
        except CheckpointError as error:
            logger.warning("%s Older checkpoints are kept.", error)
            return
        history = dev_history(state.log_history)
        kept = {state.global_step, *choose(history, self.languages, self.selection, state.global_step).values()}
        for checkpoint in checkpoints(output):
            if _step(checkpoint) not in kept:
                remove(checkpoint)
            elif _step(checkpoint) != state.global_step:
                remove_file(checkpoint, OPTIMIZER)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def last_checkpoint(folder: Path) -> Path | None:
    """The last checkpoint of a run that it can go on from: one that verifies and has the optimiser's state."""
    for checkpoint in sorted(folder.glob("checkpoint-*"), key=_step, reverse=True):
        if not (checkpoint / OPTIMIZER).is_file():
            continue
        try:
            verify(checkpoint)
        except NewerCheckpointError:
            raise
        except CheckpointError as error:
            logger.warning("Skipped: %s", error)
            continue
        return checkpoint
    return None


def dev_history(log: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Of the trainer's log the dev scores: ``step``, ``mean`` and each language; the last of a step counts."""
    entries = {entry["step"]: entry for entry in log if "eval_mean" in entry}
    return [
        {"step": step} | {key.removeprefix("eval_"): value for key, value in entry.items() if key.startswith("eval_")}
        for step, entry in sorted(entries.items())
    ]


def choose(
    history: Sequence[Mapping[str, float]], languages: Sequence[str], selection: Selection, last: int
) -> dict[str, int]:
    """The step whose checkpoint each language is measured with.

    Of equally good checkpoints the first is chosen. A language without dev data takes the best on the mean.

    Args:
        history: Dev scores, see :func:`dev_history`.
        languages: Languages to choose for.
        selection: See the module.
        last: The last step, chosen where there are no dev scores.

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


@torch.no_grad()
def predict(
    model: PreTrainedModel,
    rows: Sequence[Any],
    *,
    collate: Callable[[list[Any]], Mapping[str, Tensor]],
    read: Callable[[Any, list[Any]], Sequence[Any]],
    length: Callable[[Any], int],
    batch_size: int,
    forward: Callable[..., Any] | None = None,
) -> list[Any]:
    """What a model says of some rows, in their order; rows of like length go into one batch.

    Args:
        model: In whatever mode; it is put into evaluation mode.
        rows: Anything.
        collate: Makes a batch of some rows.
        read: Makes of the model's output, and the rows, one result for each row.
        length: By which rows are sorted.
        batch_size: Rows in a batch.
        forward: Called with a batch, in place of the model.
    """
    model.eval()
    order = sorted(range(len(rows)), key=lambda at: -length(rows[at]))
    results: list[Any] = [None] * len(rows)
    for start in range(0, len(order), batch_size):
        places = order[start : start + batch_size]
        batch = [rows[at] for at in places]
        output = (forward or model)(**{key: value.to(model.device) for key, value in collate(batch).items()})
        for at, result in zip(places, read(output, batch), strict=True):
            results[at] = result
    return results


def ratio_interval(
    parts: Sequence[float], wholes: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of a ratio of sums over items, in percent, such as F1 over the chunks of sentences.

    Args:
        parts: Numerator of each item.
        wholes: Its denominator.
        resamples: Number of bootstrap samples.
        seed: Of the resampling.

    >>> ratio_interval([1, 1, 1], [2, 2, 2])
    (50.0, 50.0)
    """
    rng = np.random.default_rng(seed)
    values_n2: NDArray[np.float64] = np.stack([np.asarray(parts, float), np.asarray(wholes, float)], axis=1)
    count = len(values_n2)
    ratios: list[NDArray[np.float64]] = []
    rows = max(1, (1 << 22) // count)
    for start in range(0, resamples, rows):
        drawn_rn = rng.multinomial(count, np.full(count, 1 / count), size=min(rows, resamples - start))
        sums_r2 = drawn_rn @ values_n2
        ratios.append(sums_r2[:, 0] / np.maximum(sums_r2[:, 1], 1e-12))
    low, high = np.quantile(np.concatenate(ratios), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return 100 * float(low), 100 * float(high)


def average(scores: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Unweighted mean over the languages of each metric; empty where there are none."""
    names = next(iter(scores.values()))["metrics"] if scores else ()
    return {name: float(np.mean([score["metrics"][name] for score in scores.values()])) for name in names}


def results_table(results: Mapping[str, Any]) -> Table:
    """The results for the console: a row for each language, then the means."""
    settings = results["settings"]
    title = f"{results['model']}: {results['task']}, {settings['mode']}, checkpoint by {settings['selection']}"
    table = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.caption = "In percent; the interval is the first metric's, 95 % bootstrap over the items."
    names = list(results["average"])
    for heading in ("", "items", *names, "interval", "step"):
        table.add_column(heading, justify="left" if not heading else "right")
    for language, score in results["languages"].items():
        low, high = score["interval"]
        cells = [f"{score['metrics'][name]:.1f}" for name in names]
        table.add_row(language, str(score["n"]), *cells, f"{low:.1f}…{high:.1f}", str(score["checkpoint"]))
    table.add_section()
    for label, key in (("average", "average"), ("without English", "average_without_english")):
        if results[key]:
            table.add_row(label, "", *(f"{results[key][name]:.1f}" for name in names), "", "")
    return table
