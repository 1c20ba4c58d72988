"""Running suites: benchmarks are measured one by one and cached, so that an interrupted evaluation resumes."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer

from metaphrase.corpus.parallel import load_parallel_folder
from metaphrase.encoders.loading import load_encoder
from metaphrase.evaluation.compare import compare
from metaphrase.evaluation.encoding import encode_texts, encoder_settings, prepare, resolve_prompt
from metaphrase.evaluation.suites import SUITES
from metaphrase.evaluation.suites.benchmarks import Benchmark, DataUnavailable, Settings, Subject
from metaphrase.exceptions import DataError, MissingFileError
from metaphrase.io.digests import files_sha256
from metaphrase.io.environment import hardware, versions
from metaphrase.io.files import UDHR, write_json

logger = logging.getLogger(__name__)

#: File in the output folder that holds the results of the last evaluation.
RESULTS = "results.json"
#: Version of the measurements and of their JSON form. Cached results of other revisions are not read.
REVISION = 3


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
    def suite(self) -> str:
        """Name of the suite in the results: ``"all"`` stands for several suites."""
        return self.suites[0] if len(self.suites) == 1 else "all"


class Reporter:
    """Receives the progress of an evaluation. The base class ignores it."""

    def planned(self, plan: Sequence[Mapping[str, Any]], missing: Mapping[str, str], model: str) -> None:
        """A model is loaded and its benchmarks are planned: ``name``, ``suite``, ``protocol``, ``seconds``, ``cached``.

        ``seconds`` is None if unknown.
        """

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
        ``parts``, ``skipped``, ``failed``, ``suite``, ``settings``, ``versions`` and ``seconds``. With a baseline it has
        ``baseline``, in the same form, and ``comparisons`` by name.

    Raises:
        DataError: No benchmark can be measured, or the file of the baseline has none of the benchmarks.
        DataMismatchError: The baseline was measured on other data, or with other settings.
    """
    reporter = reporter or Reporter()
    start = time.perf_counter()
    benchmarks, missing = _benchmarks(evaluation)
    baseline = evaluation.baseline
    before = None
    if baseline is not None and baseline.endswith(".json"):
        before = read_results(baseline, evaluation.suite, benchmarks)
    elif baseline is not None:  # one model in memory at a time
        before = measure_all(benchmarks, _load_baseline(evaluation, baseline), missing, reporter)
    results = measure_all(benchmarks, _load_model(evaluation), missing, reporter)
    if before is not None:
        settings = evaluation.settings
        results["comparisons"] = compare_scores(
            before["scores"], results["scores"], resamples=settings.resamples, seed=settings.seed
        )
        results["baseline"] = before
    return results | {
        "suite": evaluation.suite,
        "versions": versions(),
        "seconds": round(time.perf_counter() - start, 1),
    }


def _benchmarks(evaluation: Evaluation) -> tuple[list[Benchmark], dict[str, str]]:
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
    return Subject.of(
        name,
        model,
        evaluation.output_dir,
        settings,
        batch_size=evaluation.batch_size,
        show_progress=evaluation.show_progress,
    )


def read_results(path: str, suite: str, benchmarks: Sequence[Benchmark]) -> dict[str, Any]:
    """Read the JSON file of an earlier evaluation as a baseline.

    Args:
        path: The file.
        suite: The suite to compare; ``"all"`` compares with any suite.
        benchmarks: The benchmarks to compare.

    Raises:
        DataError: The file is not JSON, not a result of `evaluate`, or has another suite or none of the benchmarks.
    """
    try:
        results = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(results, dict) or not all(isinstance(results.get(key), dict) for key in ("scores", "parts")):
        raise DataError(f"{path} is not a result of `metaphrase evaluate`: it needs the keys 'scores' and 'parts'.")
    if suite != results.get("suite") and "all" not in (suite, results.get("suite")):
        raise DataError(
            f"The baseline must be a result of the suite {suite}, but {path} is one of {results.get('suite')}. "
            "Evaluate the baseline with the same --suite."
        )
    names = [benchmark.name for benchmark in benchmarks]
    if not set(names) & results["parts"].keys():
        raise DataError(
            f"The baseline must have a result of {', '.join(names)}, but {path} has {', '.join(results['parts']) or 'none'}. "
            "Evaluate the baseline on the same data."
        )
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


def _plan(benchmarks: Sequence[Benchmark], subject: Subject) -> list[dict[str, Any]]:
    """Estimated seconds of each benchmark, from the encoding speed of the model."""
    speed = encoding_speed(subject.model, batch_size=subject.batch_size)
    plan = []
    for benchmark in benchmarks:
        cached = is_cached(benchmark, subject)
        plan.append(
            {
                "name": benchmark.name,
                "suite": benchmark.suite,
                "protocol": benchmark.protocol,
                "seconds": benchmark.work * speed * (not cached) if benchmark.files else None,
                "cached": cached,
            }
        )
    return plan


def is_cached(benchmark: Benchmark, subject: Subject) -> bool:
    """Whether the result of a benchmark is cached."""
    return subject.folder is not None and cache_path(benchmark, subject).is_file()


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
    path = cache_path(benchmark, subject)
    if is_cached(benchmark, subject):
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
    if subject.folder is None:
        return content
    write_json(path, content)
    return json.loads(path.read_text(encoding="utf-8"))


def measure_all(
    benchmarks: Sequence[Benchmark], subject: Subject, missing: Mapping[str, str], reporter: Reporter
) -> dict[str, Any]:
    """Measure benchmarks one by one; the failure of one does not stop the others.

    Args:
        benchmarks: The benchmarks.
        subject: The model.
        missing: Description of the data that each suite without data needs.
        reporter: Receives the progress.

    Raises:
        DataError: Nothing could be measured.
    """
    reporter.planned(_plan(benchmarks, subject), missing, subject.name)
    scores: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    skipped, failed = dict(missing), {}
    for number, benchmark in enumerate(benchmarks, 1):
        reporter.started(benchmark, subject.name, number, len(benchmarks))
        cached = is_cached(benchmark, subject)
        try:
            content = run_benchmark(benchmark, subject)
        except DataUnavailable as reason:
            skipped[benchmark.name] = str(reason)
            reporter.skipped(benchmark, str(reason))
            continue
        except Exception as error:  # the other benchmarks may take hours and are still measured
            failed[benchmark.name] = str(error) or type(error).__name__
            if not isinstance(error, ValueError | OSError):
                logger.exception("%s failed.", benchmark.name)
            reporter.failed(benchmark, failed[benchmark.name])
            continue
        scores |= content["scores"]
        parts[benchmark.name] = content | {"scores": list(content["scores"])}
        reporter.finished(content, cached=cached)
    if not scores:
        reasons = [f"{name}: {reason}" for name, reason in (skipped | failed).items()]
        raise DataError(f"Nothing could be measured with {subject.name}: {'; '.join(reasons)}.")
    return {
        "model": subject.name,
        "model_hash": subject.sha,
        "scores": scores,
        "parts": parts,
        "skipped": skipped,
        "failed": failed,
        "settings": asdict(subject.settings),
    }
