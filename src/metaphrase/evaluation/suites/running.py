"""Running suites: benchmarks are measured one by one and cached, so that an interrupted evaluation resumes."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer

from metaphrase.corpus.parallel import load_parallel_folder
from metaphrase.encoders.loading import load_encoder
from metaphrase.evaluation.compare import compare
from metaphrase.evaluation.encoding import encode_texts, encoder_settings, prepare, resolve_prompt
from metaphrase.evaluation.suites import SUITES
from metaphrase.evaluation.suites.benchmarks import Benchmark, DataUnavailable, Settings, Subject
from metaphrase.evaluation.suites.retrieval import find_test_set, holds_folders
from metaphrase.exceptions import DataError, MissingFileError
from metaphrase.io.digests import files_sha256
from metaphrase.io.environment import hardware, versions
from metaphrase.io.files import UDHR, write_json

logger = logging.getLogger(__name__)

#: File in the output folder that holds the results of the last evaluation.
RESULTS = "results.json"
#: Version of the measurements and of their JSON form. Cached results of other revisions are not read.
REVISION = 2


@dataclass(frozen=True)
class Evaluation:
    """The model and the data of an evaluation, and its settings.

    Attributes:
        model: Encoder to measure: a folder, a Hub id, or ``"starter"``.
        data: Folder of test sets, or folder of data sets; None uses only data on the Hub.
        suites: Names of the suites.
        settings: How they measure.
        baseline: Encoder to compare with, or the JSON file of an earlier evaluation.
        pooling: See `prepare`; for the model only.
        layer: See `prepare`; for the model only.
        max_length: See `prepare`; for the model and the baseline.
        batch_size: Sentences per forward pass.
        output_dir: Folder of the cached results.
        show_progress: Show progress bars.
    """

    model: str
    data: str | None = None
    suites: tuple[str, ...] = ("retrieval",)
    settings: Settings = field(default_factory=Settings)
    baseline: str | None = None
    pooling: str | None = None
    layer: int | None = None
    max_length: int | None = None
    batch_size: int = 32
    output_dir: str = "runs/evaluation"
    show_progress: bool = False

    @property
    def is_test_set(self) -> bool:
        """Whether the data are a single folder of test sets, which is measured directly and not cached."""
        return self.suites == ("retrieval",) and self.data is not None and not holds_folders(Path(self.data))


class Reporter:
    """Receives the progress of an evaluation. The base class ignores it."""

    def planned(self, plan: Sequence[Mapping[str, Any]], missing: Mapping[str, str], models: Sequence[str]) -> None:
        """Benchmarks are planned: ``name``, ``suite``, ``protocol``, ``seconds`` (None if unknown), ``cached``."""

    def started(self, benchmark: Benchmark, model: str, number: int, total: int) -> None:
        """A benchmark is started."""

    def finished(self, content: Mapping[str, Any], *, cached: bool) -> None:
        """A benchmark is finished."""

    def skipped(self, benchmark: Benchmark, reason: str) -> None:
        """The data of a benchmark are unavailable."""

    def failed(self, benchmark: Benchmark, reason: str) -> None:
        """A benchmark failed."""


def evaluate(evaluation: Evaluation, reporter: Reporter | None = None) -> dict[str, Any]:
    """Measure an encoder, and compare it with a baseline if there is one.

    Args:
        evaluation: What is measured.
        reporter: Receives the progress.

    Returns:
        A dictionary for JSON: ``scores`` are the results by name (`Result.to_dict`), next to ``model``, ``model_hash``,
        ``parts``, ``skipped``, ``failed``, ``settings``, ``versions`` and ``seconds``. With a baseline it has
        ``baseline``, in the same form, and ``comparisons`` by name. For a single folder of test sets, the keys of its
        only result (``languages``, ``average``, …) and ``comparison`` are also at the top level.

    Raises:
        DataError: No benchmark can be measured.
        DataMismatchError: The baseline was measured on other data, or with other settings.
    """
    reporter = reporter or Reporter()
    start = time.perf_counter()
    benchmarks, missing = _benchmarks(evaluation)
    baseline = evaluation.baseline
    earlier = read_results(baseline, evaluation) if baseline is not None and baseline.endswith(".json") else None
    loaders = [partial(_load_model, evaluation)]
    if baseline is not None and earlier is None:
        loaders.insert(0, partial(_load_baseline, evaluation, baseline))
    if evaluation.is_test_set:  # one model in memory at a time
        measured = [measure_all(benchmarks, load(), missing, reporter, raise_errors=True) for load in loaders]
    else:
        subjects = [load() for load in loaders]
        reporter.planned(_plan(benchmarks, subjects), missing, [subject.name for subject in subjects])
        measured = [measure_all(benchmarks, subject, missing, reporter) for subject in subjects]
    measured = [_with_result_keys(one, evaluation) for one in measured]
    results = measured[-1]
    if not results["scores"]:
        reasons = [f"{name}: {reason}" for key in ("skipped", "failed") for name, reason in results[key].items()]
        raise DataError(f"Nothing could be measured: {'; '.join(reasons)}.")
    if baseline is not None:
        results |= _comparisons(evaluation, earlier or measured[0], results)
    results["suite"] = evaluation.suites[0] if len(evaluation.suites) == 1 else "all"
    results["versions"] = versions()
    results["seconds"] = round(time.perf_counter() - start, 1)
    return results


def _comparisons(evaluation: Evaluation, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    options = {"resamples": evaluation.settings.resamples, "seed": evaluation.settings.seed}
    if evaluation.is_test_set:
        comparison = compare(before, after, **options)
        named = dict.fromkeys(after["scores"], comparison)
        return {"baseline": before, "comparison": comparison, "comparisons": named}
    return {"baseline": before, "comparisons": compare_scores(before["scores"], after["scores"], **options)}


def _with_result_keys(measured: dict[str, Any], evaluation: Evaluation) -> dict[str, Any]:
    """Put the keys of the only result at the top level, for a single folder of test sets."""
    if evaluation.is_test_set:
        (result,) = measured["scores"].values()
        return result | measured | {"settings": result["settings"]}
    return measured | {"settings": asdict(evaluation.settings)}


def _benchmarks(evaluation: Evaluation) -> tuple[list[Benchmark], dict[str, str]]:
    if evaluation.is_test_set:
        return [find_test_set(str(evaluation.data), evaluation.settings)], {}
    benchmarks, missing = find_benchmarks(evaluation.data, evaluation.suites, evaluation.settings)
    if not benchmarks:
        needs = "; ".join(f"{suite} {reason}" for suite, reason in missing.items())
        raise DataError(f"{evaluation.data} has no data for the suites {', '.join(evaluation.suites)}: {needs}.")
    return benchmarks, missing


def _load_model(evaluation: Evaluation) -> Subject:
    model = prepare(
        load_encoder(evaluation.model),
        pooling=evaluation.pooling,
        layer=evaluation.layer,
        max_length=evaluation.max_length,
    )
    return _subject(evaluation, evaluation.model, model, evaluation.settings)


def _load_baseline(evaluation: Evaluation, name: str) -> Subject:
    """The baseline is measured with its stored prompt."""
    model = prepare(load_encoder(name), max_length=evaluation.max_length)
    return _subject(evaluation, name, model, replace(evaluation.settings, prompt="auto"))


def _subject(evaluation: Evaluation, name: str, model: SentenceTransformer, settings: Settings) -> Subject:
    output = None if evaluation.is_test_set else evaluation.output_dir
    return Subject.of(
        name,
        model,
        output,
        settings,
        batch_size=evaluation.batch_size,
        show_progress=evaluation.show_progress,
    )


def read_results(path: str, evaluation: Evaluation) -> dict[str, Any]:
    """Read the JSON file of an earlier evaluation as a baseline.

    Raises:
        DataError: The file is not JSON, or not a result of the same kind.
    """
    try:
        results = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    key = "languages" if evaluation.is_test_set else "scores"
    if not isinstance(results, dict) or not isinstance(results.get(key), dict):
        data = "a folder of test sets" if evaluation.is_test_set else "a folder of data sets"
        raise DataError(f"{path} is not a result of `metaphrase evaluate` on {data}.")
    return results


def find_benchmarks(
    data: str | Path | None, suites: Sequence[str], settings: Settings
) -> tuple[list[Benchmark], dict[str, str]]:
    """The benchmarks of some suites that a folder has data for.

    Args:
        data: The folder; without a folder, benchmarks whose data are on the Hub: STS22, and the named tasks of MTEB.
        suites: Names in `SUITES`.
        settings: How they are measured.

    Returns:
        The benchmarks, and for each suite without data a description of the data that it needs.

    Raises:
        FileNotFoundError: The folder does not exist.
        ValueError: A data set is malformed.
    """
    folder = Path(data) if data is not None else None
    if folder is not None and not folder.is_dir():
        raise MissingFileError(f"{folder} is not a folder.")
    benchmarks: list[Benchmark] = []
    missing = {}
    for name in suites:
        suite = SUITES[name]
        embedded = {path for benchmark in benchmarks for path in benchmark.files}
        found = list(suite.find(folder, settings))
        # The embeddings of retrieval are cached, so that MTEB encodes nothing.
        benchmarks += [
            replace(one, work=0) if one.suite == "mteb" and embedded.issuperset(one.files) else one for one in found
        ]
        if not any(one.files for one in found) and not (name == "mteb" and settings.tasks):
            missing[name] = f"needs {suite.needs}"
    return benchmarks, missing


def compare_scores(
    before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]], *, resamples: int, seed: int
) -> dict[str, Any]:
    """Compare all results that two models share, by name; results without items are skipped."""
    return {
        name: compare(before[name], result, resamples=resamples, seed=seed)
        for name, result in after.items()
        if name in before and result["statistic"] is not None
    }


def encoding_speed(model: SentenceTransformer, *, batch_size: int = 32) -> float:
    """Seconds per byte of text, measured by encoding some of the packaged sentences."""
    sets = load_parallel_folder(UDHR, ["sw", "de", "hi", "zh"])
    texts = [
        text for one in sets.values() for pair in zip(one.sources[:16], one.targets[:16], strict=True) for text in pair
    ]
    encode_texts(model, texts[:8], batch_size=batch_size)
    start = time.perf_counter()
    encode_texts(model, texts, batch_size=batch_size)
    return (time.perf_counter() - start) / sum(len(text.encode()) for text in texts)


def _plan(benchmarks: Sequence[Benchmark], subjects: Sequence[Subject]) -> list[dict[str, Any]]:
    """Estimated seconds of each benchmark, from the encoding speed of each model."""
    speeds = [encoding_speed(subject.model, batch_size=subject.batch_size) for subject in subjects]
    plan = []
    for benchmark in benchmarks:
        pending = [
            speed
            for subject, speed in zip(subjects, speeds, strict=True)
            if not cache_path(benchmark, subject).is_file()
        ]
        plan.append(
            {
                "name": benchmark.name,
                "suite": benchmark.suite,
                "protocol": benchmark.protocol,
                "seconds": benchmark.work * sum(pending) if benchmark.files else None,
                "cached": not pending,
            }
        )
    return plan


def cache_path(benchmark: Benchmark, subject: Subject) -> Path:
    """File of a cached result: its folder depends on the model, its name on the data and the settings."""
    key = {
        "part": benchmark.name,
        "suite": benchmark.suite,
        "revision": REVISION,
        "data": files_sha256(benchmark.files),
        "settings": _relevant_settings(benchmark, subject),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=list).encode()).hexdigest()
    name = benchmark.name.replace(" ", "-").replace("/", "-")
    return Path(subject.folder or ".") / f"{name}-{digest[:8]}.json"


def _relevant_settings(benchmark: Benchmark, subject: Subject) -> dict[str, Any]:
    """The settings that the result of a benchmark depends on, with the text of the prompt."""
    relevant = {name: getattr(subject.settings, name) for name in SUITES[benchmark.suite].reads}
    if "prompt" in relevant:
        relevant["prompt"] = resolve_prompt(subject.model, subject.settings.prompt)
    if benchmark.suite == "mteb" and subject.settings.prompt == "auto":
        relevant["passage prompt"] = subject.model.prompts.get("passage")
    return relevant | dict(benchmark.fixed)


def describe_protocol(benchmark: Benchmark, subject: Subject) -> str:
    """Protocol of a benchmark; for suites that embed sentences, with the settings of the encoder."""
    if "prompt" not in SUITES[benchmark.suite].reads:
        return benchmark.protocol
    encoder = encoder_settings(subject.model)
    prompt = resolve_prompt(subject.model, subject.settings.prompt)
    return (
        f"{benchmark.protocol}; {encoder['pooling']} pooling of layer {encoder['layer']}, {encoder['max_length']} tokens, "
        f"{f'prompt {prompt!r}' if prompt else 'no prompt'}"
    )


def run_benchmark(benchmark: Benchmark, subject: Subject) -> dict[str, Any]:
    """Measure a benchmark, or read its cached result.

    Returns:
        A dictionary for JSON: ``scores`` (`Result.to_dict` by name), ``part``, ``suite``, ``protocol``, ``settings``,
        ``data`` (files and digest), ``model``, ``model_hash``, ``seconds``, ``hardware`` and ``versions``.

    Raises:
        DataUnavailable: Its data are missing.
    """
    path = None if subject.folder is None else cache_path(benchmark, subject)
    if path is not None and path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    start = time.perf_counter()
    protocol = describe_protocol(benchmark, subject)
    scores = {
        name: replace(result, protocol=protocol).to_dict() for name, result in benchmark.measure(subject).items()
    }
    content = {
        "part": benchmark.name,
        "suite": benchmark.suite,
        "protocol": protocol,
        "model": subject.name,
        "model_hash": subject.sha,
        "settings": asdict(subject.settings),
        "data": {"files": [file.name for file in benchmark.files], "sha256": files_sha256(benchmark.files)},
        "scores": scores,
        "seconds": round(time.perf_counter() - start, 1),
        "hardware": hardware(),
        "versions": versions(),
    }
    if path is None:
        return content
    write_json(path, content)
    return json.loads(path.read_text(encoding="utf-8"))


def measure_all(
    benchmarks: Sequence[Benchmark],
    subject: Subject,
    missing: Mapping[str, str],
    reporter: Reporter,
    *,
    raise_errors: bool = False,
) -> dict[str, Any]:
    """Measure benchmarks one by one; the failure of one does not stop the others.

    Args:
        benchmarks: The benchmarks.
        subject: The model.
        missing: Description of the data that each suite without data needs.
        reporter: Receives the progress.
        raise_errors: Raise the error of a benchmark instead.
    """
    scores: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    skipped, failed = dict(missing), {}
    for number, benchmark in enumerate(benchmarks, 1):
        reporter.started(benchmark, subject.name, number, len(benchmarks))
        cached = subject.folder is not None and cache_path(benchmark, subject).is_file()
        try:
            content = run_benchmark(benchmark, subject)
        except DataUnavailable as reason:
            skipped[benchmark.name] = str(reason)
            reporter.skipped(benchmark, str(reason))
            continue
        except Exception as error:  # the other benchmarks may take hours and are still measured
            if raise_errors:
                raise
            failed[benchmark.name] = str(error) or type(error).__name__
            if not isinstance(error, ValueError | OSError):
                logger.exception("%s failed.", benchmark.name)
            reporter.failed(benchmark, failed[benchmark.name])
            continue
        scores |= content["scores"]
        parts[benchmark.name] = content | {"scores": list(content["scores"])}
        reporter.finished(content, cached=cached)
    return {
        "model": subject.name,
        "model_hash": subject.sha,
        "scores": scores,
        "parts": parts,
        "skipped": skipped,
        "failed": failed,
    }
