"""Running suites: benchmarks are measured one by one and cached, so that an interrupted evaluation resumes."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from rich.text import Text
from sentence_transformers import SentenceTransformer

from metaphrase.corpus.parallel import load_parallel_folder
from metaphrase.encoders.loading import load_encoder
from metaphrase.encoders.names import encoder_files, find_folder, load_vectors, name_parts
from metaphrase.encoders.prompts import resolve_prompt
from metaphrase.evaluation.encoding import encode_texts, encoder_settings, prepare
from metaphrase.evaluation.suites import FINETUNED, SUITES, DataUnavailable
from metaphrase.evaluation.suites.baselines import compare_with, differences, other_precision, read_results, stronger
from metaphrase.evaluation.suites.benchmarks import REVISION, Benchmark, Note, Sample, Settings, Subject
from metaphrase.evaluation.suites.folders import check_names
from metaphrase.evaluation.suites.samples import samples_of, with_samples
from metaphrase.evaluation.suites.transfer import PROBED_BY
from metaphrase.exceptions import DataError, MissingFileError, UsageError
from metaphrase.io.arguments import Count, LayerNumber, Length, PoolingMode, checked
from metaphrase.io.configuration import ENCODER, option
from metaphrase.io.counts import format_duration
from metaphrase.io.digests import PinnedFile, files_sha256, text_digest, unchanged
from metaphrase.io.environment import hardware, versions
from metaphrase.io.files import UDHR, write_json
from metaphrase.io.outputs import check_files, claim_folder
from metaphrase.io.tables import titled_table
from metaphrase.io.work_folders import read_part, write_part
from metaphrase.modeling.precision import bfloat16, usable_bfloat16

logger = logging.getLogger(__name__)

#: File in the output folder that holds the results of the last evaluation.
RESULTS = "results.json"

#: Suites that can load the model by name and fine-tune it.
_FINE_TUNED = {task.suite for task in FINETUNED.values()}


@checked
@dataclass(kw_only=True)
class EvaluateOptions(Settings):
    """The encoder to measure, the data, and the settings."""

    model: str = option(help=f"Encoder to measure: {ENCODER}. Can be passed as the first argument.", first=True)
    also: list[str] = option(
        [],
        "Further encoders, measured in the same way and compared with the same baseline, in one table. Can follow the "
        "first argument.",
        first=True,
    )
    data: str | None = option(
        None,
        "Folder of test sets xx-en.tsv.gz (header: source, target), or folder of data sets: tatoeba, udhr, "
        "stsb, xquad-r, sib200, xnli, pawsx, xquad, ud, BUCC, …; suites without data are skipped. Two suites also read "
        "the Hub and work without a folder: sts (STS22), and mteb with --tasks (Tatoeba, STS22, …).",
    )
    suite: Literal[*SUITES, "quick", "all"] = option(  # type: ignore[valid-type]
        "retrieval",
        "".join(f"{one.name}: {one.summary}; " for one in SUITES.values())
        + f"quick: a fixed sample of all suites except {', '.join(one.name for one in SUITES.values() if not one.quick)}, "
        "in minutes; all: all suites, with a sample of the largest data sets. If a data set fails, the others are still "
        "measured and written, and the exit status is 2.",
    )
    baseline: str | None = option(
        None,
        "Encoder to compare with, measured with its stored query prompt and without; the better result is used. "
        "--max_length applies to it; --pooling, --layer and --prompt do not. Or the JSON file of an earlier evaluation, "
        "for a baseline with other settings.",
    )
    pooling: PoolingMode | None = option(
        None, "cls, max, mean, mean_sqrt_len_tokens, weightedmean or lasttoken; default: the model's."
    )
    layer: LayerNumber | None = option(
        None, "Hidden layer to pool: 0 is the embedding layer, -1 the last (XTREME: 7 for mBERT)."
    )
    max_length: Length | None = option(
        None, "Number of tokens at which a sentence is truncated, also for the baseline (DAP: 32)."
    )
    batch_size: Count = option(64, "Sentences per forward pass.")
    output: str | None = option(None, "JSON file to write.", aliases=["-o"])
    output_dir: str = option(
        "runs/evaluation", "Folder of cached results, by digest of the model, and of results.json."
    )
    show_progress: bool = field(default=False, metadata={"internal": True})

    @property
    def suites(self) -> tuple[str, ...]:
        """Names of the suites to measure."""
        quick = tuple(name for name, suite in SUITES.items() if suite.quick)
        return {"all": tuple(SUITES), "quick": quick}.get(self.suite, (self.suite,))

    @property
    def outputs(self) -> tuple[Path, ...]:
        """The files that the results are written to."""
        paths = [Path(self.output_dir) / RESULTS, *([Path(self.output)] if self.output else [])]
        return tuple(dict.fromkeys(paths))

    def check(self) -> list[str]:
        """Check that each option has an effect.

        Returns a note for each option that affects only some of the suites.
        """
        if self.data is None and self.suite != "sts" and not (self.suite == "mteb" and self.tasks):
            raise UsageError(
                "Evaluation needs data: pass --data FOLDER; --suite sts (STS22) and --suite mteb --tasks read the Hub "
                "without it. See `metaphrase evaluate --help`."
            )
        if self.suite == "quick" and self.transfer == "finetune":
            raise UsageError(
                "--suite quick does not fine-tune encoders. Omit --transfer, or pass --suite pos or paraphrase."
            )
        notes = []
        for name, default in ((one.name, one.default) for one in fields(self)):
            applies = self._suites_of(name)
            if not applies or getattr(self, name) == default:
                continue
            if not applies & set(self.suites):
                raise UsageError(
                    f"--{name} applies to --suite {', '.join(sorted(applies))} and has no effect with --suite {self.suite}."
                )
            if len(self.suites) > 1:
                notes.append(f"Note: --{name} applies only to {', '.join(sorted(applies))}.")
        return notes

    def _suites_of(self, name: str) -> set[str]:
        """The suites that an option applies to; empty if it is not an option of suites."""
        fine_tuned = _FINE_TUNED - set(PROBED_BY[self.transfer])
        if name == "finetuning_runs":
            return fine_tuned
        if name in ("layer", "max_length"):
            return SUITES.keys() - fine_tuned
        if name in ("resamples", "seed"):  # of all comparisons
            return set()
        read = "prompt" if name == "pooling" else name
        applies = {suite.name for suite in SUITES.values() if read in (*suite.reads, *suite.options)}
        if name == "bf16":
            return applies | fine_tuned
        return applies - fine_tuned if read == "prompt" else applies


@dataclass(frozen=True)
class ModelScore:
    """The average of an encoder on a data set, and its difference from the baseline's, if there is one.

    Attributes:
        data: Name of the result.
        model: Name of the encoder.
        measure: Name of the measure.
        lower_is_better: Whether the score is an error.
        score: In percent, the mean over the languages.
        before: That of the baseline.
        difference: In points.
        interval: 95 % interval of the difference.
        verdict: ``"better"``, ``"tie"`` or ``"worse"``; not corrected for the number of encoders.
        n: Number of items in all languages.
        runs: Number of fine-tuning runs of each encoder, in suites that fine-tune.
        clusters: Number of different items, if languages share some.
    """

    data: str
    model: str
    measure: str
    lower_is_better: bool
    score: float
    before: float | None = None
    difference: float | None = None
    interval: list[float] | None = None
    verdict: str | None = None
    n: int | None = None
    runs: int | None = None
    clusters: int | None = None


@dataclass(frozen=True)
class Evaluations:
    """Several encoders, measured in the same way.

    Attributes:
        models: What `evaluate` returns for each, without the baseline.
        rows: A row for each data set and encoder, best first.
        baseline: The baseline, in the form of `evaluate`; None without one.
    """

    models: list[dict[str, Any]]
    rows: list[ModelScore]
    baseline: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Dictionary for JSON."""
        return {
            "models": self.models,
            "baseline": self.baseline,
            "rows": [{name: value for name, value in asdict(row).items() if value is not None} for row in self.rows],
        }


def evaluate(options: EvaluateOptions, note: Note = lambda item: None) -> dict[str, Any]:
    """Measure an encoder, compare it with a baseline if there is one, and write the results.

    Returns a dictionary for JSON: ``scores`` are the results by name (`Result.to_dict`), next to ``model``, ``model_hash``,
    ``parts``, ``skipped``, ``failed``, ``suite``, ``settings``, ``versions`` and ``seconds``. With a baseline it has
    ``baseline``, in the same form, and ``comparisons`` by name.
    """
    if options.also:
        raise UsageError("`evaluate` measures one encoder. Use `evaluate_models` for several.")
    (results,) = _evaluate(options, [options.model], note)
    for path in options.outputs:
        write_json(path, results)
    return results


def evaluate_models(options: EvaluateOptions, note: Note = lambda item: None) -> Evaluations:
    """Measure ``options.model`` and ``options.also``, compare each with the baseline, and write the results as one file."""
    results = _evaluate(options, list(dict.fromkeys([options.model, *options.also])), note)
    baseline, *_ = [one.pop("baseline", None) for one in results]
    columns = {column.name for column in fields(ModelScore)}
    rows = []
    for one in results:
        for name, scores in one["scores"].items():
            pooled = one.get("comparisons", {}).get(name, {}).get("pooled", {})
            difference = {key: value for key, value in pooled.items() if key in columns}
            score, lower_is_better = scores["average"]["score"], scores["lower_is_better"]
            rows.append(ModelScore(name, one["model"], scores["measure"], lower_is_better, score, **difference))
    names = list(dict.fromkeys(row.data for row in rows))
    rows.sort(key=lambda row: (names.index(row.data), row.score if row.lower_is_better else -row.score))
    evaluations = Evaluations(results, rows, baseline)
    for path in options.outputs:
        write_json(path, evaluations.to_dict())
    return evaluations


def _evaluate(options: EvaluateOptions, names: Sequence[str], note: Note) -> list[dict[str, Any]]:
    """Measure some encoders and the baseline."""
    for line in options.check():
        note(line)
    options = replace(options, bf16=usable_bfloat16(wanted=options.bf16))
    start = time.perf_counter()
    benchmarks, missing = find_benchmarks(options.data, options.suites, options, samples_of(options.suite))
    if not benchmarks:
        needs = "; ".join(f"{suite} {reason}" for suite, reason in missing.items())
        raise DataError(f"{options.data} has no data for the suites {', '.join(options.suites)}: {needs}.")
    read = [path for benchmark in benchmarks for path in benchmark.files]
    models = [path for name in (*names, options.baseline) for path in encoder_files(name)]
    check_files(options.outputs, [*read, *models, options.baseline])
    _find_encoders(names, options.baseline)
    claim_folder(options.output_dir)

    def measure(name: str, *variants: Settings, **protocol: Any) -> dict[str, Any]:
        """Measure a model under several settings; those after the first need a stored prompt."""
        model = prepare(load_encoder(name), max_length=options.max_length, **protocol)
        subjects = [
            Subject(name, model, Path(options.output_dir), settings, options.batch_size, options.show_progress)
            for settings in (variants if any(model.prompts.values()) else variants[:1])
        ]
        return stronger([measure_all(benchmarks, subject, missing, note) for subject in subjects])

    before: dict[str, Any] | None = None
    unlike: dict[str, str] = {}
    if options.baseline is not None and options.baseline.endswith(".json"):
        before = read_results(options.baseline, options.suite, benchmarks, note)
        unlike = differences(before["parts"], benchmarks)
        for name, reason in unlike.items():
            note(f"Not compared: {name}, {reason}.")
        computed = [one for one in benchmarks if "bf16" in _reads(one) or "small scale" in one.fixed]
        compared = [one for one in computed if one.name not in unlike]
        if others := other_precision(before["parts"], compared, bf16=options.bf16):
            this, that = ("bfloat16", "float32") if options.bf16 else ("float32", "bfloat16")
            note(
                f"Note: this evaluation is in {this}, but the baseline of {', '.join(others)} was measured in {that}, which "
                "changes scores a little. Measure both in the same precision."
            )
    elif options.baseline is not None:  # one model in memory at a time
        before = measure(options.baseline, *(replace(options, prompt=prompt) for prompt in ("auto", None)))
    measured = []
    for name in names:
        results = measure(name, options, pooling=options.pooling, layer=options.layer)
        if before is not None:
            results |= compare_with(
                before, results["scores"], unlike, resamples=options.resamples, seed=options.seed, note=note
            )
        seconds = round(time.perf_counter() - start, 1)
        measured.append(results | {"suite": options.suite, "versions": versions(), "seconds": seconds})
        start = time.perf_counter()
    return measured


def _find_encoders(names: Sequence[str], baseline: str | None) -> None:
    """Refuse a name that denotes no encoder before another encoder is measured."""
    baselines = [] if baseline is None or baseline.endswith(".json") else [baseline]
    for name in (*names, *baselines):
        base, files = name_parts(name)
        find_folder(base)
        load_vectors(files)


def find_benchmarks(
    data: str | Path | None, suites: Sequence[str], settings: Settings, samples: Mapping[str, Sample] | None = None
) -> tuple[list[Benchmark], dict[str, str]]:
    """The benchmarks of some suites that a folder has data for.

    Without a folder, these are the ones whose data are on the Hub. ``samples``, by suite or folder, replace all items.
    Returns also, for each suite without data, a description of the data that it needs.
    """
    folder = None if data is None else Path(data)
    if folder is not None and not folder.is_dir():
        raise MissingFileError(f"{folder} is not a folder.")
    benchmarks: list[Benchmark] = []
    missing = {}
    for name in suites:
        suite = SUITES[name]
        # The embeddings of earlier suites are cached, those of a sample only for the same sample.
        embedded = {(path, one.fixed.get("first")) for one in benchmarks for path in one.files}
        found = with_samples(partial(suite.find, folder), settings, samples or {})
        benchmarks += [
            replace(one, work=one.work * suite.new_texts)
            if all({(path, None), (path, one.fixed.get("first"))} & embedded for path in one.files)
            else one
            for one in found
        ]
        if not any(one.files for one in found) and not (name == "mteb" and settings.tasks):
            missing[name] = f"needs {suite.needs}"
    return check_names(benchmarks), missing


def encoding_speed(model: SentenceTransformer, *, batch_size: int = 64) -> float:
    """Seconds per byte of text, measured by encoding some of the packaged sentences."""
    sets = load_parallel_folder(UDHR, ["sw", "de", "hi", "zh"])
    texts = [text for one in sets.values() for text in (*one.sources[:16], *one.targets[:16])]
    encode_texts(model, texts[:8], batch_size=batch_size)
    start = time.perf_counter()
    encode_texts(model, texts, batch_size=batch_size)
    return (time.perf_counter() - start) / sum(len(text.encode()) for text in texts)


def _plan(
    benchmarks: Sequence[Benchmark], subject: Subject, missing: Mapping[str, str], note: Note
) -> list[float | None]:
    """Estimate the seconds of each benchmark from the encoding speed of the model, and show the estimates.

    A benchmark with a cached result has None.
    """
    with bfloat16(subject.model, enabled=subject.settings.bf16):
        speed = encoding_speed(subject.model, batch_size=subject.batch_size)
    table = titled_table("Benchmarks", "name", "suite", "protocol", right=["minutes"])
    plan: list[float | None] = []
    for one in benchmarks:
        cached = read_part(cache_path(one, subject)) is not None
        plan.append(None if cached else one.work * speed)
        minutes = "done" if cached else f"{one.work * speed / 60:.1f}" if one.files else "?"
        table.add_row(one.name, one.suite, one.protocol, minutes)
    note(table)
    for suite, reason in missing.items():
        note(f"Skipped: {suite}, which {reason}.")
    if seconds := sum(filter(None, plan)):
        note(f"Estimate for {subject.name}: {format_duration(seconds)}.")
    return plan


def _seconds_left(plan: Sequence[float | None], spent: Sequence[float | None]) -> float:
    """Estimate for the benchmarks that follow, corrected by the time that the measured ones took.

    Cached, skipped and failed benchmarks have None in ``spent``; their estimates correct nothing.
    """
    pairs = [(estimate, one) for estimate, one in zip(plan, spent, strict=False) if estimate and one is not None]
    estimated, took = (sum(side) for side in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
    after = sum(filter(None, plan[len(spent) :]))
    return after * took / estimated if estimated else after


def _with_measure(name: str, measure: str) -> str:
    """The name of a score with its measure, which the name may end with.

    >>> _with_measure("udhr", "accuracy"), _with_measure("udhr xsim", "xsim error"), _with_measure("xquad f1", "f1")
    ('udhr accuracy', 'udhr xsim error', 'xquad f1')
    """
    return f"{name.removesuffix(measure.removesuffix(' error')).rstrip()} {measure}".lstrip()


def cache_path(benchmark: Benchmark, subject: Subject) -> Path:
    """File of a cached result: its folder depends on the model, its name on the data and the settings."""
    key = {
        "part": benchmark.name,
        "suite": benchmark.suite,
        "revision": REVISION,
        "data": files_sha256(benchmark.files),
        "settings": _relevant_settings(benchmark, subject),
    }
    if not benchmark.files:  # MTEB names the revisions of the data on the Hub
        with suppress(PackageNotFoundError):
            key["mteb"] = version("mteb")
    digest = text_digest(json.dumps(key, sort_keys=True, default=list))
    name = benchmark.name.replace(" ", "-").replace("/", "-")
    return subject.folder / f"{name}-{digest[:8]}.json"


def _reads(benchmark: Benchmark) -> tuple[str, ...]:
    """Names of the settings that the result of a benchmark depends on."""
    return SUITES[benchmark.suite].reads if benchmark.reads is None else benchmark.reads


def _relevant_settings(benchmark: Benchmark, subject: Subject) -> dict[str, Any]:
    """The settings that the result of a benchmark depends on, with the text of the prompt."""
    relevant = {name: getattr(subject.settings, name) for name in _reads(benchmark)}
    prompt, passage = _prompts(benchmark, subject)
    if "prompt" in relevant:
        relevant["prompt"] = prompt
    if (benchmark.asks or benchmark.suite == "mteb") and subject.settings.prompt == "auto":
        relevant["passage prompt"] = passage
    return relevant | dict(benchmark.fixed)


def _prompts(benchmark: Benchmark, subject: Subject) -> tuple[str, str]:
    """The prompts of sentences (in answer retrieval: of questions) and of passages."""
    model, prompt = subject.model, subject.settings.prompt
    asked = resolve_prompt(model, prompt, "question" if benchmark.asks else "sentence")
    return asked, resolve_prompt(model, prompt, "passage")


def describe_protocol(benchmark: Benchmark, subject: Subject) -> str:
    """Protocol of a benchmark; for suites that embed sentences, with the settings of the encoder."""
    if "prompt" not in _reads(benchmark):
        return benchmark.protocol
    encoder = encoder_settings(subject.model)
    prompt, passage = _prompts(benchmark, subject)
    described = f"prompt {prompt!r}" if prompt else "no prompt"
    if benchmark.asks and passage:
        described += f", candidates {passage!r}"
    return (
        f"{benchmark.protocol}; {encoder['pooling']} pooling of layer {encoder['layer']}, {encoder['max_length']} tokens, "
        f"{described}{', bfloat16' * subject.settings.bf16}"
    )


def run_benchmark(benchmark: Benchmark, subject: Subject) -> dict[str, Any]:
    """Measure a benchmark, or read its cached result.

    Raises:
        CorpusError: A file of the benchmark changed while it was measured.
    """
    with unchanged([PinnedFile.of(file) for file in benchmark.files]):
        path = cache_path(benchmark, subject)
        if (kept := read_part(path)) is not None:
            if kept["model"] == subject.name:
                return kept
            # It was measured with a copy of this encoder.
            scores = {name: {**score, "model": subject.name} for name, score in kept["scores"].items()}
            return {**kept, "model": subject.name, "scores": scores}
        start = time.perf_counter()
        protocol = describe_protocol(benchmark, subject)
        results = benchmark.measure(subject)
        content = {
            "part": benchmark.name,
            "suite": benchmark.suite,
            "protocol": protocol,
            "model": subject.name,
            "model_hash": subject.sha,
            "settings": subject.settings.to_dict(),
            "data": {"files": [file.name for file in benchmark.files], "sha256": files_sha256(benchmark.files)},
            "scores": {name: replace(result, protocol=protocol).to_dict() for name, result in results.items()},
            "seconds": round(time.perf_counter() - start, 1),
            "hardware": hardware(),
            "versions": versions(),
        }
    return write_part(path, content)


def measure_all(
    benchmarks: Sequence[Benchmark], subject: Subject, missing: Mapping[str, str], note: Note
) -> dict[str, Any]:
    """Measure benchmarks one by one; the failure of one does not stop the others."""
    plan = _plan(benchmarks, subject, missing, note)
    spent: list[float | None] = []
    scores: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    skipped, failed = dict(missing), {}
    for number, benchmark in enumerate(benchmarks, 1):
        seconds = _seconds_left(plan, spent)
        left = f", about {format_duration(seconds)} left with this encoder and prompt" if seconds else ""
        note(f"[{number}/{len(benchmarks)}] {subject.name}: {benchmark.suite}, {benchmark.name}{left} …")
        start = time.perf_counter()
        spent.append(None)
        try:
            content = run_benchmark(benchmark, subject)
            spent[-1] = time.perf_counter() - start if plan[number - 1] else None
        except DataUnavailable as reason:
            skipped[benchmark.name] = str(reason)
            note(f"Skipped: {benchmark.name}, {reason}.")
            continue
        except Exception as error:  # the other benchmarks may take hours and are still measured
            failed[benchmark.name] = str(error) or type(error).__name__
            if not isinstance(error, ValueError | OSError):
                logger.exception("%s failed.", benchmark.name)
            note(Text(f"Failed: {benchmark.name}: {failed[benchmark.name]}", style="bold red"))
            continue
        scores |= content["scores"]
        parts[benchmark.name] = content | {"scores": list(content["scores"])}
        averages = "; ".join(
            f"{_with_measure(name, one['measure'])} {one['average']['score']:.1f}"
            for name, one in content["scores"].items()
        )
        note(f"  {averages} ({'cached' if plan[number - 1] is None else format_duration(content['seconds'])})")
    if not scores:
        reasons = [f"{name}: {reason.removesuffix('.')}" for name, reason in (skipped | failed).items()]
        raise DataError(f"Nothing could be measured with {subject.name}: {'; '.join(reasons)}.")
    return {
        "model": subject.name,
        "model_hash": subject.sha,
        "scores": scores,
        "parts": parts,
        "skipped": skipped,
        "failed": failed,
        "settings": subject.settings.to_dict(),
    }
