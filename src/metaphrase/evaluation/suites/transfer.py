"""The suites ``nli``, ``paraphrase``, ``qa`` and ``pos``: transfer from English, by probes or by fine-tuning."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import yaml
from transformers import HfArgumentParser

from metaphrase.evaluation.measures import FEWER_RESAMPLES, MEASURES, ScoreOfCounts, ScoreOfSamples
from metaphrase.evaluation.result import Measurement, Result, mean_of, with_intervals
from metaphrase.evaluation.significance import percentile_interval
from metaphrase.evaluation.suites.benchmarks import Benchmark, Settings, Subject
from metaphrase.evaluation.suites.folders import folder_name, folders, text_size, wanted_languages
from metaphrase.evaluation.transfer import SMALL_SCALE_CONFIGS
from metaphrase.evaluation.transfer.classification import TASKS, ClassificationOptions, PairTask
from metaphrase.evaluation.transfer.data import ENGLISH, QUESTIONS, Format, files_of, pairs_format, treebank_format
from metaphrase.evaluation.transfer.frozen import C, Probe, probe_pairs, probe_tags
from metaphrase.evaluation.transfer.options import FineTuningArguments, FineTuningOptions
from metaphrase.evaluation.transfer.planning import load_benchmark
from metaphrase.evaluation.transfer.question_answering import QuestionAnsweringOptions, QuestionTask
from metaphrase.evaluation.transfer.running import average, fine_tune
from metaphrase.evaluation.transfer.tagging import TaggingOptions, TaggingTask
from metaphrase.evaluation.transfer.tasks import Task
from metaphrase.io.digests import files_sha256, json_digest
from metaphrase.io.environment import versions
from metaphrase.io.locks import exclusive

#: Hyperparameters of the fine-tuned suites: minutes on two CPU cores, enough to compare encoders with each other.
SMALL_SCALE: dict[str, dict[str, Any]] = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in SMALL_SCALE_CONFIGS.glob("*.yaml")
}


@dataclass(frozen=True)
class FineTunedTask:
    """A data set that a suite trains on, by fine-tuning or by a probe.

    Attributes:
        task: Makes the task from options and arguments.
        work: Bytes encoded per byte of the files, estimated from the durations on one machine.
        splits: Splits of its data, by the option that names them; those measured are last.
        statistic: Measure of the items of its first metric, a key of `MEASURES`.
        revision: Version of its training runs and their scores. Kept runs of other revisions are not read.
    """

    suite: str
    form: Format
    task: Callable[..., Task]
    options: type
    work: float
    probe: Probe | None = None
    splits: Mapping[str, str] = field(default_factory=lambda: {"halves": "dev"})
    protocol: str = "trained on half of the English items, measured on the other half in all languages"
    statistic: str = "shared_items"
    revision: int = 3

    def files(self, folder: Path, languages: Collection[str]) -> tuple[Path, ...]:
        """The files of its data in some languages, and in English."""
        found = [one for split in self.splits.values() for one in files_of(folder, self.form, split)]
        return tuple(sorted(path for language, path in found if language in {*languages, ENGLISH}))

    def sources(self, folder: Path) -> dict[str, Any]:
        """Options that name its data."""
        return {option: f"{folder}@{split}" for option, split in self.splits.items()}


def _pair_task(suite: str, name: str, work: float, probe_work: float) -> FineTunedTask:
    columns, classes = TASKS[name]
    return FineTunedTask(
        suite,
        form=pairs_format(columns, classes),
        task=PairTask,
        options=ClassificationOptions,
        work=work,
        probe=Probe(
            partial(probe_pairs, columns),
            limit_test=600,
            work=probe_work,
            description="logistic regression on u, v, |u − v| and u ∗ v of sentence embeddings",
        ),
    )


FINETUNED = {
    "xnli": _pair_task("nli", "xnli", 1.0, 0.15),
    "pawsx": _pair_task("paraphrase", "pawsx", 2.2, 0.35),
    "xquad": FineTunedTask("qa", form=QUESTIONS, task=QuestionTask, options=QuestionAnsweringOptions, work=0.95),
    "ud": FineTunedTask(
        "pos",
        form=treebank_format(),
        task=TaggingTask,
        options=TaggingOptions,
        work=0.35,
        probe=Probe(
            probe_tags,
            limit_test=300,
            work=0.04,
            description="logistic regression on the states of words in the last layer",
        ),
        splits={"train": "dev", "test": "test"},
        protocol="trained on English dev, measured on test; seqeval chunk F1 on bare tags, and accuracy",
        statistic="chunk_f1",
        revision=4,
    ),
}

#: What the cached results of these suites depend on, in addition to their settings.
_INTERVALS = {"intervals": "shared items"}

#: The suites that train a probe, by the value of `Settings.transfer`.
PROBED_BY = {
    "auto": ("paraphrase", "pos"),
    "probe": tuple(task.suite for task in FINETUNED.values() if task.probe),
    "finetune": (),
}


def find_finetuned(suite: str, data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    """The data sets of a suite, in folders that have their names."""
    for name, task in FINETUNED.items():
        folder = next((folder for folder in folders(data) if folder_name(folder) == name), None)
        if task.suite != suite or folder is None:
            continue
        *_, measured = task.splits.values()
        wanted = wanted_languages(
            sorted({language for language, _ in files_of(folder, task.form, measured)}), settings, folder
        )
        used = task.files(folder, wanted)
        first = {} if settings.first is None else {"limit_test": settings.first}
        if wanted and task.probe and suite in PROBED_BY[settings.transfer]:
            probe = task.probe._replace(limit_test=settings.first or task.probe.limit_test)
            yield Benchmark(
                f"{name} probe",
                suite,
                f"{probe.description}, frozen; {task.protocol}; {_limits({'limit_test': probe.limit_test})}",
                used,
                probe.work * text_size(used),
                partial(_measure_probe, name, probe, folder, wanted, used),
                _INTERVALS,
            )
        elif wanted:
            precision = {"bf16": True} if settings.bf16 else {}
            scale = SMALL_SCALE[name] | first | precision | dict(settings.finetuning)
            yield Benchmark(
                name,
                suite,
                f"small scale: {task.protocol}; {_limits(scale)}{', bfloat16' * settings.bf16}",
                used,
                task.work * text_size(used) * settings.finetuning_runs,
                partial(_finetune_and_measure, name, scale, folder, wanted, used),
                {"small scale": scale, **_INTERVALS},
                reads=("languages", "finetuning_runs"),
            )


def _limits(scale: Mapping[str, Any]) -> str:
    """Which items are trained on and measured, in words."""
    first = {key: f"the first {scale[key]}" if scale.get(key) else "all" for key in ("limit_train", "limit_test")}
    return (
        f"of the training items {first['limit_train']}, of the test items {first['limit_test']} in each language "
        f"(limit_train {scale.get('limit_train') or 'none'}, limit_test {scale.get('limit_test') or 'none'})"
    )


def _measure_probe(
    name: str, probe: Probe, folder: Path, languages: Sequence[str], files: Sequence[Path], subject: Subject
) -> dict[str, Result]:
    """Train a probe on English, measure it in each language, and resample the items of its first metric."""
    start = time.perf_counter()
    task = FINETUNED[name]
    options = FineTuningOptions(
        **task.sources(folder), languages=list(languages), selection="last", limit_test=probe.limit_test, model=""
    )
    benchmark = load_benchmark(options, task.form, seed=42, files=files)
    scores = probe.measure(benchmark, subject.model, subject.encoding())
    ids = benchmark.item_ids()
    rows = {code: {"n": len(ids[code]), "item_ids": ids[code], **asdict(score)} for code, score in scores.items()}
    found = {
        "data": benchmark.facts("train", "test"),
        "languages": rows,
        "average": average(rows),
        "settings": {"c": C, "limit_test": probe.limit_test},
        "seconds": round(time.perf_counter() - start, 1),
        "versions": versions(),
        "model": subject.name,
    }
    results = {}
    for title, result in finetuned_results(name, found).items():
        if result.statistic is not None:
            others = [language for language in result.languages if language != ENGLISH]
            resampled = with_intervals(
                result.statistic,
                result.languages,
                groups=dict.fromkeys(result.groups, others),
                resamples=min(FEWER_RESAMPLES, subject.settings.resamples),
                seed=subject.settings.seed,
            )
            result = replace(result, **resampled)
        results[title.replace(name, f"{name} probe", 1)] = result
    return results


def _finetune_and_measure(
    name: str,
    scale: Mapping[str, Any],
    folder: Path,
    languages: Sequence[str],
    files: Sequence[Path],
    subject: Subject,
) -> dict[str, Result]:
    """Fine-tune an encoder as often as the settings say, with different seeds and the same items."""
    settings = dict(scale) | FINETUNED[name].sources(folder)
    settings |= {"languages": list(languages), "model": subject.name}
    settings.setdefault("split_seed", scale["seed"])
    runs, data = [], files_sha256(files)
    for seed in range(scale["seed"], scale["seed"] + subject.settings.finetuning_runs):
        content = settings | {"seed": seed, "revision": FINETUNED[name].revision, "data": data}
        output = subject.folder / f"{name}-{json_digest(content)[:8]}"
        run = settings | {"seed": seed, "output_dir": str(output), "disable_tqdm": not subject.show_progress}
        options, arguments = HfArgumentParser((FINETUNED[name].options, FineTuningArguments)).parse_dict(run)
        with exclusive(output):
            runs.append(fine_tune(FINETUNED[name].task(options, arguments), files=files))
    results = finetuned_results(name, mean_of_runs(name, runs))
    return {title: replace(result, model=subject.name) for title, result in results.items()}


def mean_of_runs(name: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Average runs over the same items: their metrics and item scores; counts of chunks are summed.

    ``run_scores`` of a language are the first metric of each run. Its interval covers the items alone. A classifier has
    learned if it has in any run.
    """
    measure = MEASURES[FINETUNED[name].statistic]
    assert isinstance(measure, ScoreOfSamples)
    languages = {}
    for language, first in runs[0]["languages"].items():
        rows = [run["languages"][language] for run in runs]
        primary, *_ = first["metrics"]
        row = {**first, "run_scores": [one["metrics"][primary] for one in rows]}
        if len(runs) > 1:
            combine = np.sum if isinstance(measure, ScoreOfCounts) else np.mean
            row["items"] = combine([one["items"] for one in rows], axis=0).tolist()
            items = measure.items(row)
            metrics = {metric: fmean(one["metrics"][metric] for one in rows) for metric in first["metrics"]}
            row["metrics"] = metrics | {primary: measure.score(items)}
            ((score_r,),) = measure.samples([{language: items}], resamples=measure.max_resamples, seed=0).values()
            row["interval"] = percentile_interval(score_r)
            facts = first.get("facts", {})
            if "learned" in facts:
                row["facts"] = facts | {"learned": any(one["facts"]["learned"] for one in rows)}
        languages[language] = row
    seconds = round(sum(run["seconds"] for run in runs), 1)
    return {**runs[0], "languages": languages, "average": average(languages), "seconds": seconds}


def finetuned_results(name: str, found: Mapping[str, Any]) -> dict[str, Result]:
    """Results of a fine-tuned model, one for each of its first two metrics.

    Only the first keeps the items that `compare` tests: whether a pair is correct or the F1 of an answer, with the ids that
    translations share, or the numbers of chunks of a tagged sentence.
    """
    results: dict[str, Result] = {}
    tested = found.get("data", {}).get("test", {})
    kept = ["items", "run_scores", "checkpoint", "metrics"]
    if FINETUNED[name].statistic == "shared_items":
        kept.append("item_ids")
    for measure in list(found["average"])[:2]:
        first = not results
        languages = {
            language: Measurement(
                row["n"],
                row["metrics"][measure],
                tuple(row["interval"]) if first and "interval" in row else None,
                tested.get(language, {}).get("sha256"),
                {key: row[key] for key in kept if key in row} | row.get("facts", {}) if first else {},
            )
            for language, row in found["languages"].items()
        }
        others = [one for language, one in languages.items() if language != ENGLISH]
        results[f"{name} {measure.replace('_', ' ')}"] = Result(
            suite=FINETUNED[name].suite,
            model=found.get("model", ""),
            measure=measure.replace("_", " "),
            statistic=FINETUNED[name].statistic if first else None,
            languages=languages,
            groups={"without English": mean_of(others)} if 0 < len(others) < len(languages) else {},
            average=mean_of(list(languages.values())),
            settings=found.get("settings", {}) if first else {},
            versions=found.get("versions", {}),
            seconds=found.get("seconds", 0.0),
            facts={key: found[key] for key in ("training", "data", "runs", "hardware") if first and key in found},
        )
    return results
