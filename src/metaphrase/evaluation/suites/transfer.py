"""The suites ``nli``, ``paraphrase``, ``qa`` and ``pos``: encoders that are fine-tuned in English at a small scale."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import yaml
from transformers import HfArgumentParser

from metaphrase.evaluation.result import Measurement, Result, mean_of
from metaphrase.evaluation.suites.benchmarks import (
    Benchmark,
    Settings,
    Subject,
    folders,
    text_size,
    wanted_languages,
)
from metaphrase.evaluation.transfer import SMALL_SCALE_CONFIGS
from metaphrase.evaluation.transfer.classification import TASKS, ClassificationOptions, finetune_classification
from metaphrase.evaluation.transfer.data import ENGLISH, pairs_format
from metaphrase.evaluation.transfer.options import FineTuningArguments
from metaphrase.evaluation.transfer.planning import load_benchmark
from metaphrase.evaluation.transfer.question_answering import QuestionAnsweringOptions, finetune_question_answering
from metaphrase.evaluation.transfer.tagging import TaggingOptions, finetune_tagging

#: Hyperparameters of the fine-tuned suites: minutes on two CPU cores, enough to compare encoders with each other.
SMALL_SCALE: dict[str, dict[str, Any]] = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in SMALL_SCALE_CONFIGS.glob("*.yaml")
}


@dataclass(frozen=True)
class FineTunedTask:
    """A data set that a suite fine-tunes on.

    Attributes:
        suite: Name of its suite.
        pattern: Pattern of its file names, with the language as a group.
        sources: Options that name its data, with ``{}`` for the folder.
        protocol: Short description of the protocol.
        work: Bytes encoded per byte of the files, estimated from the durations on one machine.
        run: Trains and measures.
        options: Class of its options.
    """

    suite: str
    pattern: re.Pattern[str]
    sources: Mapping[str, str]
    protocol: str
    work: float
    run: Callable[[Any, FineTuningArguments], Mapping[str, Any]]
    options: type


_HALVES = "small scale: trained on half of the English items, measured on the other half in all languages"
FINETUNED = {
    "xnli": FineTunedTask(
        "nli",
        re.compile(r"dev-(\w+)\.tsv(\.gz)?"),
        {"halves": "{}@dev"},
        _HALVES,
        1.0,
        finetune_classification,
        ClassificationOptions,
    ),
    "pawsx": FineTunedTask(
        "paraphrase",
        re.compile(r"dev-(\w+)\.tsv(\.gz)?"),
        {"halves": "{}@dev"},
        _HALVES,
        2.2,
        finetune_classification,
        ClassificationOptions,
    ),
    "xquad": FineTunedTask(
        "qa",
        re.compile(r"xquad\.(\w+)\.json(\.gz)?"),
        {"halves": "{}@dev"},
        _HALVES,
        0.95,
        finetune_question_answering,
        QuestionAnsweringOptions,
    ),
    "ud": FineTunedTask(
        "pos",
        re.compile(r"([a-z]+)_\w+-ud-(dev|test)\.conllu(\.gz)?"),
        {"train": "{}@dev", "test": "{}@test"},
        "small scale: trained on English dev, measured on test; seqeval chunk F1 on bare tags, and accuracy",
        0.35,
        finetune_tagging,
        TaggingOptions,
    ),
}


def find_finetuned(suite: str, data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    """The data sets of a suite, in folders that have their names."""
    for name, task in FINETUNED.items():
        folder = next((folder for folder in folders(data) if folder.name == name), None)
        if task.suite != suite or folder is None:
            continue
        files = {path: match[1] for path in folder.iterdir() if (match := task.pattern.fullmatch(path.name))}
        if wanted := wanted_languages(sorted(set(files.values())), settings):
            used = tuple(sorted(path for path, language in files.items() if language in {*wanted, ENGLISH}))
            scale = SMALL_SCALE[name] | dict(settings.finetuning)
            yield Benchmark(
                name,
                suite,
                f"{task.protocol}; {_limits(scale)}",
                used,
                task.work * text_size(used),
                partial(_measure, name, folder, wanted),
                {"small scale": scale},
            )


def _limits(scale: Mapping[str, Any]) -> str:
    """Which items are trained on and measured, in words."""
    first = {key: f"the first {scale[key]}" if scale.get(key) else "all" for key in ("limit_train", "limit_test")}
    return (
        f"of the training items {first['limit_train']}, of the test items {first['limit_test']} in each language "
        f"(limit_train {scale.get('limit_train') or 'none'}, limit_test {scale.get('limit_test') or 'none'})"
    )


def _measure(name: str, data: Path, languages: Sequence[str], subject: Subject) -> dict[str, Result]:
    settings = SMALL_SCALE[name] | dict(subject.settings.finetuning) | _sources(name, data, languages)
    settings |= {"model": subject.name}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    output = Path(mkdtemp()) if subject.folder is None else subject.folder / f"{name}-{digest[:8]}"
    settings |= {"output_dir": str(output), "disable_tqdm": not subject.show_progress}
    options, arguments = HfArgumentParser((FINETUNED[name].options, FineTuningArguments)).parse_dict(settings)
    found = FINETUNED[name].run(options, arguments)
    shutil.rmtree(output)
    results = finetuned_results(name, found, gold_labels(name, data, languages, subject.settings))
    return {title: replace(result, model=subject.name) for title, result in results.items()}


def _sources(name: str, data: Path, languages: Sequence[str]) -> dict[str, Any]:
    """Options that name the data."""
    sources = {option: source.format(data) for option, source in FINETUNED[name].sources.items()}
    return sources | {"languages": list(languages)}


def gold_labels(name: str, data: Path, languages: Sequence[str], settings: Settings) -> dict[str, list[int]]:
    """Gold classes of the test items of a task, by language; empty if its items have no classes."""
    if name not in TASKS:
        return {}
    scale = SMALL_SCALE[name] | dict(settings.finetuning) | _sources(name, data, languages) | {"model": ""}
    options, *_ = HfArgumentParser(ClassificationOptions).parse_dict(scale, allow_extra_keys=True)
    benchmark = load_benchmark(options, pairs_format(*TASKS[name]), seed=scale.get("seed", 42))
    return {language: list(rows["label"]) for language, rows in benchmark.test.items()}


def finetuned_results(
    name: str, found: Mapping[str, Any], labels: Mapping[str, Sequence[int]] | None = None
) -> dict[str, Result]:
    """Results of a fine-tuned model, one for each of its first two metrics.

    Only the first keeps the items that `compare` tests: whether a pair is correct, the F1 of an answer, or the share of
    correctly tagged words of a sentence. For tags, the tested difference is thus one of accuracy within sentences, not
    of chunk F1.

    Args:
        name: Name of the benchmark.
        found: What :func:`metaphrase.evaluation.transfer.running.fine_tune` returned.
        labels: Gold classes of the test items by language, if they have classes.
    """
    results = {}
    for number, measure in enumerate(list(found["average"])[:2]):
        languages = {
            language: _measurement(found, language, measure, (labels or {}).get(language), keep=number == 0)
            for language in found["languages"]
        }
        others = [one for language, one in languages.items() if language != ENGLISH]
        results[f"{name} {measure.replace('_', ' ')}"] = Result(
            suite=name if name not in FINETUNED else FINETUNED[name].suite,
            model=found.get("model", ""),
            measure=measure.replace("_", " "),
            statistic="items" if number == 0 else None,
            languages=languages,
            groups={"without English": mean_of(others)} if 0 < len(others) < len(languages) else {},
            average=mean_of(list(languages.values())),
            settings=found.get("settings", {}) if number == 0 else {},
            versions=found.get("versions", {}),
            seconds=found.get("seconds", 0.0),
            facts={key: found[key] for key in ("training", "data", "runs", "hardware") if key in found}
            if number == 0
            else {},
        )
    return results


def _measurement(
    found: Mapping[str, Any], language: str, measure: str, gold: Sequence[int] | None, *, keep: bool
) -> Measurement:
    row = found["languages"][language]
    details: dict[str, Any] = {}
    if keep:
        details = {key: row[key] for key in ("items", "checkpoint", "metrics") if key in row}
        details |= against_majority(row["items"], gold) if gold is not None else {}
    return Measurement(
        row["n"],
        row["metrics"][measure],
        tuple(row["interval"]) if keep and "interval" in row else None,
        found.get("data", {}).get("test", {}).get(language, {}).get("sha256"),
        details,
    )


def against_majority(correct_n: Sequence[float], label_n: Sequence[int]) -> dict[str, Any]:
    """Whether a classifier does more than predicting a single class.

    Args:
        correct_n: Whether each item is correct.
        label_n: Gold class of each item.

    Returns:
        ``majority``, the accuracy in percent of always predicting the largest class; ``learned``, False if the correct
        items are exactly those of one class, or as many as the largest class has.

    >>> against_majority([1, 1, 0, 1], [0, 0, 1, 0])
    {'majority': 75.0, 'learned': False}
    >>> against_majority([1, 1, 1, 1], [0, 0, 1, 0])
    {'majority': 75.0, 'learned': True}
    """
    right_n, gold_n = np.asarray(correct_n, dtype=bool), np.asarray(label_n)
    classes, count_c = np.unique(gold_n, return_counts=True)
    constant = any(np.array_equal(right_n, gold_n == one) for one in classes) and len(classes) > 1
    return {
        "majority": 100 * int(count_c.max()) / len(gold_n),
        "learned": not constant and int(right_n.sum()) != int(count_c.max()),
    }
