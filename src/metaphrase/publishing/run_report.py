"""The report of a finished run: measures the release and its baseline, and writes the page.

Each model encodes every sentence once. Accuracies, retention, margins and errors are computed from those embeddings, word
maps and alignment matrices from the word states of a few pairs.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from metaphrase.corpus.declaration import articles_of
from metaphrase.corpus.parallel import TARGET_LANGUAGE, ParallelSet, select_languages
from metaphrase.corpus.words import Words
from metaphrase.encoders.loading import load_encoder
from metaphrase.encoders.names import model_folder
from metaphrase.encoders.prompts import resolve_prompt
from metaphrase.evaluation.compare import compare
from metaphrase.evaluation.encoding import CachedEncoder, encoder_settings
from metaphrase.evaluation.guards import AlphaCurve
from metaphrase.evaluation.retention import collapse_in_words, overall_verdict, retention
from metaphrase.evaluation.retrieval import evaluate_retrieval
from metaphrase.evaluation.significance import RESAMPLES
from metaphrase.evaluation.suites.parallel import Sets, read_test_folders
from metaphrase.exceptions import MissingFileError, UsageError
from metaphrase.io.arguments import AtLeast0, CountOr0, Resamples, Seed, checked
from metaphrase.io.configuration import option
from metaphrase.io.digests import model_hash
from metaphrase.io.files import DEMO, UDHR, read_json
from metaphrase.io.outputs import check_folder, check_writable, claim_folder
from metaphrase.io.progress import Begin, no_progress
from metaphrase.io.work_folders import damage_in
from metaphrase.modeling.packing import packed
from metaphrase.publishing import analysis
from metaphrase.publishing.analysis import geometry_of, read_answers
from metaphrase.publishing.contents import CURVE
from metaphrase.publishing.examples import usage_lines
from metaphrase.publishing.plots import save_pictures
from metaphrase.publishing.report import FOLDER, describe_model, write_report

logger = logging.getLogger(__name__)

#: Maximum number of languages of a word map in addition to English; more colours cannot be distinguished.
_MAX_MAPPED = 4


@checked
@dataclass
class ReportOptions:
    """The run, its baseline, and the data of the report."""

    run: str = option(
        help="Folder that `metaphrase adapt`, `train` or `demo` wrote. Can be passed as the first argument.",
        first=True,
    )
    baseline: str | None = option(
        None,
        "Encoder to compare with: a folder, a Hub id, 'starter', or 'none' for a report without a baseline. "
        "Default: the encoder that the run started from.",
    )
    data: list[str] = option(
        [],
        "Folders of test sets (xx-en.test.tsv.gz or xx-en.tsv.gz). Default: the test sets of the run and the "
        "packaged ones.",
    )
    languages: list[str] | None = option(
        None, "Languages of the word map and of the alignments, at most four. Default: the largest gains."
    )
    pairs: list[str] = option(
        [], "Pairs whose alignment is shown, as language:number in the first test set, e.g. sw:12 te:3."
    )
    red_line: AtLeast0 = option(
        1.0, "Acceptable average loss, in points, of languages without training data (default: 1)."
    )
    evaluation: str | None = option(
        None,
        "JSON file of `metaphrase evaluate RUN --suite answer-retrieval --data FOLDER --output FILE` (or of --suite all, or "
        "with --baseline), whose answers across languages are shown.",
    )
    errors: CountOr0 = option(12, "Maximum number of rows of each list of errors.")
    baseline_prompt: str = option(
        "auto",
        "Prompt of the baseline. auto: the one that the run selected, else the model's stored query prompt; "
        "none: no prompt.",
    )
    resamples: Resamples = option(RESAMPLES, "Bootstrap resamples of intervals and tests.")
    seed: Seed = option(0, "Seed of the bootstrap.")
    output_dir: str | None = option(None, "Folder of the report (default: RUN/report).", aliases=["-o"])


@dataclass(frozen=True)
class RunReport:
    """A written report.

    Attributes:
        page: Path of ``report.html``; ``report.json`` is in the same folder.
        pictures: The charts as PNG files.
        content: Content of ``report.json``.
    """

    page: Path
    pictures: list[Path]
    content: dict[str, Any]


def report_run(
    options: ReportOptions,
    *,
    command: str = "",
    note: Callable[[str], None] = lambda message: None,
    progress: Callable[[], AbstractContextManager[Begin]] = lambda: nullcontext(no_progress),
) -> RunReport:
    """Measure a run's release and its baseline, and write the report.

    Args:
        options: The run, its baseline, and the data of the report.
        command: The command line, as a fact of the report.
        note: Called with a line about each stage.
        progress: Context manager of the progress bars.

    Raises:
        MissingFileError: The folder is not a run, or the run has no release yet.
        UsageError: The test sets do not contain a language or pair of the options; or the output folder is the run's or
            the baseline, or holds files that this library did not write.
        CheckpointError: The output folder is not writable.
    """
    if len(options.languages or ()) > _MAX_MAPPED:
        raise UsageError("--languages takes at most four languages, which the word map and the alignments show.")
    started = time.perf_counter()
    folder = Path(options.run)
    run = _read_run(folder)
    output = Path(options.output_dir) if options.output_dir else folder / FOLDER
    for model in (folder, model_folder(options.baseline)):
        check_folder(output, model=model)
    check_writable(output)
    subjects = _load_subjects(options, run)
    answers = _read_answers(options, subjects)
    sets = _load_test_sets(options, run, subjects)
    focus = _choose_focus(sets, run.trained, options)
    _encode_all(subjects, sets, note, progress)
    settings = {"resamples": options.resamples, "seed": options.seed}
    results = _measure(subjects, select_languages(sets, lambda language: language in run.trained), settings)
    others = _measure(subjects, select_languages(sets, lambda language: language not in run.trained), settings)
    comparisons = _compare(results, settings)
    note("Computing word maps, alignments, margins and errors …")
    content = _analyse(subjects, sets, focus, run.trained, comparisons, options)
    if answers is not None:
        content["answers"] = answers
    content["retention"] = {
        name: retention(comparison, options.red_line)
        | {"models": {side: describe_model(one[name]) for side, one in others.items()}}
        for name, comparison in _compare(others, settings).items()
    }
    before, after = results.get("before"), results["after"]
    has_own_baseline = before and subjects["before"].name == run.facts["model"]
    content["abilities"] = _abilities(run.report) if has_own_baseline else {}
    content["verdict"] = collapse_in_words(before or {}, after) or overall_verdict(
        comparisons, content["retention"], content["abilities"]
    )
    if run.curve is not None:
        content["alpha"] = run.curve.to_dict()
    content["cost"] = _cost(subjects, command, time.perf_counter() - started)
    page = write_report(
        claim_folder(output),
        title=run.report.get("title") or f"{run.facts['model']} trained with {run.facts['recipe']['name']}",
        before=before,
        after=after,
        comparisons=comparisons,
        run=run.facts,
        usage=run.report.get("usage") or usage_lines(folder, sorted(run.trained)),
        analysis=content,
    )
    written = read_json(page.with_suffix(".json"))
    return RunReport(page, save_pictures(written, output), written)


class SentenceEmbeddings:
    """Sentence embeddings of one model, or of a model per language; each distinct sentence is encoded once.

    A single model has the key ``""``.
    """

    def __init__(self, name: str, models: Mapping[str, SentenceTransformer], prompt: str = "") -> None:
        self.name = name
        self.prompt = prompt
        self.encoders = {language: CachedEncoder(model) for language, model in models.items()}

    @property
    def hashes(self) -> list[str]:
        """The `model_hash` of each model."""
        return [model_hash(encoder.model) for encoder in self.encoders.values()]

    def encoder(self, language: str) -> CachedEncoder:
        """The encoder of a language."""
        return self.encoders.get("") or self.encoders[language]

    def model(self, language: str) -> SentenceTransformer:
        """The model of a language."""
        return self.encoder(language).model

    def of(self, language: str, texts: Sequence[str]) -> NDArray[Any]:
        """Embeddings of sentences, shape ``(n, hidden)``."""
        with packed(self.model(language)):
            return self.encoder(language).encode(texts, prompt=self.prompt)

    def measure(self, sets: Mapping[str, ParallelSet], **settings: Any) -> dict[str, Any]:
        """Run `evaluate_retrieval` on the embeddings."""
        encoders: Any = {language: self.encoder(language) for language in (*sets, TARGET_LANGUAGE)}
        result = evaluate_retrieval(encoders, sets, name=self.name, prompt=self.prompt, **settings).to_dict()
        result["settings"] |= encoder_settings(next(iter(self.encoders.values())).model)
        return result


def trained_languages(facts: Mapping[str, Any]) -> set[str]:
    """Languages of a run's training data, except English."""
    languages = {language for file in facts["files"] for language in file.get("languages", ())}
    return (languages | set(facts["corpus"]["languages"])) - {TARGET_LANGUAGE}


def load_run(folder: Path, languages: Collection[str]) -> dict[str, SentenceTransformer]:
    """The release of a run in these languages: one model under the key ``""``, or one per language of an embedding."""
    if (folder / "modules.json").is_file():
        return {"": load_encoder(folder)}
    folders = (path.parent for path in sorted(folder.glob("*/modules.json")))
    releases = {path.name: path for path in folders if path.name in languages}
    if not releases:
        raise MissingFileError(f"{folder} has no release. Wait for the end of the run, or resume it.")
    return {language: load_encoder(path) for language, path in releases.items()}


def default_folders(report: Mapping[str, Any], run: Path) -> list[str]:
    """Folders of the test sets in a run's report that still exist, also in the folder of the run, and the packaged ones."""
    measured = _measured_folders(report, run)
    existing = [folder for folder in measured if folder.is_dir()]
    if missing := [folder.name for folder in measured if not folder.is_dir()]:
        logger.warning(
            "Test sets that no longer exist are skipped: %s. Pass their folders with --data.", ", ".join(missing)
        )
    existing += [packaged for packaged in (DEMO, UDHR) if packaged.name not in {folder.name for folder in existing}]
    return list(dict.fromkeys(map(str, existing)))


def _measured_folders(report: Mapping[str, Any], run: Path) -> list[Path]:
    """Folders of the test sets in a run's report."""
    recorded: dict[Path, None] = {}  # an ordered set
    for result in report.get("after", {}).values():
        for pattern in re.split(r"(?<=\.tsv), |(?<=\.gz), ", result["settings"]["data"]):
            if pattern:
                recorded[Path(pattern).parent] = None
    folders = []
    for folder in recorded:
        moved = run / "data" / folder.name  # test data of `metaphrase adapt` move with the folder of the run
        folders.append(moved if not folder.is_dir() and moved.is_dir() else folder)
    return folders


@dataclass(frozen=True)
class _Run:
    """What the folder of a run records.

    Attributes:
        facts: Content of ``run.json``.
        trained: Languages of the training data, except English.
        report: Content of the run's own ``report.json``, or empty.
        curve: Curve of the choice of the merging weight, if it was chosen.
    """

    facts: dict[str, Any]
    trained: set[str]
    report: dict[str, Any]
    curve: AlphaCurve | None


def _read_run(folder: Path) -> _Run:
    """Read and check the records of a run."""
    with damage_in(path := folder / "run.json"):
        facts = _read_json(path)
        trained = trained_languages(facts) if facts is not None else set()
    if facts is None:
        raise MissingFileError(
            f"{folder} is not the folder of a run: missing run.json. Name the --output_dir of `metaphrase adapt`, `train` or "
            "`demo`."
        )
    with damage_in(path := folder / "report.json"):
        report = _read_json(path) or {}
        _measured_folders(report, folder)
        overall_verdict({}, {}, _abilities(report))  # reads its rows
    with damage_in(path := folder / CURVE):
        content = _read_json(path)
        curve = None if content is None else AlphaCurve(**content)
        str(curve)  # reads its rows
    return _Run(facts, trained, report, curve)


def _abilities(report: Mapping[str, Any]) -> dict[str, Any]:
    """Abilities other than retrieval of translations, as the run measured them against the encoder before training."""
    return dict(report.get("analysis", {}).get("abilities", {}))


def _read_json(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.is_file() else None


def _load_subjects(options: ReportOptions, run: _Run) -> dict[str, SentenceEmbeddings]:
    """The baseline, unless the report has none, and the release."""
    release = SentenceEmbeddings(options.run, load_run(Path(options.run), {*run.trained, TARGET_LANGUAGE}))
    name = options.baseline or run.facts["model"]
    if name == "none":
        return {"after": release}
    is_start = name == run.facts["model"]
    try:
        if is_start:
            pooling, default = run.facts["settings"].get("pooling"), run.facts["recipe"].get("pooling", "mean")
            baseline = load_encoder(run.facts["base"], pooling=pooling, default_pooling=default)
        else:
            baseline = load_encoder(name)
    except MissingFileError as error:
        if not is_start:
            raise
        raise MissingFileError(
            f"{error} The run started from it. If it was moved, pass its new place with --baseline; for a report without it, "
            "pass --baseline none."
        ) from error
    used_prompts = {result["settings"]["prompt"] for result in (run.report.get("before") or {}).values()}
    if options.baseline_prompt == "auto" and len(used_prompts) == 1 and is_start:
        prompt = str(used_prompts.pop())
    else:
        prompt = resolve_prompt(baseline, None if options.baseline_prompt == "none" else options.baseline_prompt)
    return {"before": SentenceEmbeddings(name, {"": baseline}, prompt), "after": release}


def _read_answers(options: ReportOptions, subjects: Mapping[str, SentenceEmbeddings]) -> dict[str, Any] | None:
    """The answers across languages of both models in the file of ``--evaluation``, if there is one."""
    if not options.evaluation:
        return None
    hashes = {side: subject.hashes for side, subject in subjects.items()}
    return read_answers(options.evaluation, before=hashes.get("before", []), after=hashes["after"])


def _load_test_sets(options: ReportOptions, run: _Run, subjects: Mapping[str, SentenceEmbeddings]) -> Sets:
    """The test sets in languages that can be measured: the models'; without a baseline, those of the training data."""
    sets = read_test_folders(options.data or default_folders(run.report, Path(options.run)))
    if run.facts.get("debias"):  # its directions were estimated on the odd articles
        sets = {name: articles_of(by_language, "even") for name, by_language in sets.items()}
    languages: set[str] | None = None
    if "" not in subjects["after"].encoders:
        languages = set(subjects["after"].encoders)
    elif "before" not in subjects:  # retention requires a baseline
        languages = run.trained
    return select_languages(sets, lambda language: languages is None or language in languages)


def _choose_focus(sets: Sets, trained: set[str], options: ReportOptions) -> str:
    """The test set that is analysed, the first in a trained language.

    Languages and pairs that it does not contain are refused before anything is encoded.
    """
    focus = next((name for name, by_language in sets.items() if trained & by_language.keys()), None)
    if focus is None:
        raise UsageError(
            f"None of the test sets is in a language of the training data ({', '.join(sorted(trained))}). Pass --data."
        )
    if unknown := [language for language in options.languages or () if language not in sets[focus]]:
        raise UsageError(f"No pairs in {', '.join(unknown)}; choose from {', '.join(sets[focus])}.")
    if options.pairs:
        analysis.choose_pairs(sets[focus], options.pairs)
    return focus


def _cost(subjects: Mapping[str, SentenceEmbeddings], command: str, seconds: float) -> dict[str, str]:
    """The effort of the report, in words."""
    on_cpu = all(subject.model(TARGET_LANGUAGE).device.type == "cpu" for subject in subjects.values())
    machine = f"{torch.get_num_threads()} CPU threads" if on_cpu else "an accelerator"
    encoded = sum(len(encoder.rows) for subject in subjects.values() for encoder in subject.encoders.values())
    return {
        "command": command,
        "encoded": f"{encoded} sentences, each once per model",
        "time": f"{seconds:.0f} seconds on {machine}",
    }


def _encode_all(
    subjects: Mapping[str, SentenceEmbeddings],
    sets: Sets,
    note: Callable[[str], None],
    progress: Callable[[], AbstractContextManager[Begin]],
) -> None:
    """Encode all test sets with both models."""
    parallel_sets = [pairs for by_language in sets.values() for pairs in by_language.values()]
    for subject in subjects.values():
        note(f"Encoding {len(parallel_sets)} test sets of {', '.join(sets)} with {subject.name} …")
        with progress() as begin:
            advance = begin("Encoding test sets", len(parallel_sets))
            for pairs in parallel_sets:
                subject.of(pairs.language, pairs.sources)
                subject.of(TARGET_LANGUAGE, pairs.targets)
                advance(1)


def _measure(
    subjects: Mapping[str, SentenceEmbeddings], sets: Sets, settings: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """The results of each model (``before`` and ``after``) by test set."""
    return {
        side: {name: subject.measure(by_language, **settings) for name, by_language in sets.items()}
        for side, subject in subjects.items()
    }


def _compare(results: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The comparison of both models on each test set; empty without a baseline."""
    before, after = results.get("before", {}), results["after"]
    return {name: compare(one, after[name], **settings) for name, one in before.items()}


def _analyse(
    subjects: Mapping[str, SentenceEmbeddings],
    sets: Sets,
    focus: str,
    trained: set[str],
    comparisons: Mapping[str, Any],
    options: ReportOptions,
) -> dict[str, Any]:
    """Word maps, alignments, margins and errors on one test set."""
    measured = {language: pairs for language, pairs in sets[focus].items() if language in trained}
    embedded = {
        language: {
            side: (subject.of(language, pairs.sources), subject.of(TARGET_LANGUAGE, pairs.targets))
            for side, subject in subjects.items()
        }
        for language, pairs in measured.items()
    }
    nearest = {
        language: {side: analysis.nearest_targets(sources, targets) for side, (sources, targets) in embeddings.items()}
        for language, embeddings in embedded.items()
    }
    gains = comparisons[focus]["languages"] if focus in comparisons else {}
    ranked = sorted(measured, key=lambda language: -gains[language]["difference"]) if gains else list(measured)
    mapped = (options.languages or ranked)[:_MAX_MAPPED]
    mapped_sets = {language: sets[focus][language] for language in mapped}
    content: dict[str, Any] = {
        "alignments": _alignments(subjects, sets[focus] if options.pairs else mapped_sets, options.pairs),
        "geometry": geometry_of(embedded, measured) | {"data": focus},
        "errors": analysis.nearest_errors(measured, nearest, limit=options.errors) | {"data": focus},
    }
    if tokens := token_maps(subjects, mapped_sets):
        content["tokens"] = tokens | {"data": focus}
    if margins := analysis.margin_histogram(_margins(embedded, measured)):
        content["margins"] = margins | {"data": focus}
    return content


def _alignments(
    subjects: Mapping[str, SentenceEmbeddings], sets: Mapping[str, ParallelSet], chosen: Sequence[str]
) -> list[dict[str, Any]]:
    """Cosines between the words of the pairs that are drawn, of each model."""
    return [
        {
            "language": language,
            "number": number,
            **{
                side: analysis.alignment_matrix(subject.model(language), subject.model(TARGET_LANGUAGE), pair)
                for side, subject in subjects.items()
            },
        }
        for language, number, pair in analysis.choose_pairs(sets, chosen)
    ]


def _margins(
    embedded: analysis.Embedded, sets: Mapping[str, ParallelSet]
) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
    """Margins of translation pairs and of wrong pairs over all languages, of each model."""
    margins: dict[str, list[tuple[NDArray[Any], NDArray[Any]]]] = {}
    for language, pairs in sets.items():
        for side, (sources, targets) in embedded[language].items():
            margins.setdefault(side, []).append(analysis.margins(sources, targets, pairs))
    return {
        side: (np.concatenate([pairs for pairs, _ in parts]), np.concatenate([wrong for _, wrong in parts]))
        for side, parts in margins.items()
    }


def token_maps(subjects: Mapping[str, SentenceEmbeddings], sets: Mapping[str, ParallelSet]) -> dict[str, Any]:
    """Maps of the same words before and after; empty if there are fewer than three words."""
    sample = analysis.sample_words(sets)
    states = {side: _states_of_words(subject, sample) for side, subject in subjects.items()}
    sampled = [(number, at) for number, (_, _, at_n) in enumerate(sample) for at in at_n]
    # A word has no state if the sentence is truncated before it.
    words = [word for word in sampled if all(word in states_of_side for states_of_side in states.values())]
    if len(words) < 3:
        return {}
    languages = [sample[number][0] for number, _ in words]
    return {
        "languages": [TARGET_LANGUAGE, *sets],
        "language_of": languages,
        "words": [list(sample[number][1])[at] for number, at in words],
        "neighbours": analysis.WORD_NEIGHBOURS,
        "expected": analysis.expected_share(languages),
        **{
            side: analysis.token_map(np.stack([states_of_side[word] for word in words]), languages)
            for side, states_of_side in states.items()
        },
    }


def _states_of_words(
    subject: SentenceEmbeddings, sample: Sequence[tuple[str, Words, Sequence[int]]]
) -> dict[tuple[int, int], NDArray[Any]]:
    """States of the words of sampled sentences, by the number of the sentence and the position of the word."""
    states: dict[tuple[int, int], NDArray[Any]] = {}
    for language in dict.fromkeys(language for language, _, _ in sample):
        numbers = [number for number, (sentence_language, _, _) in enumerate(sample) if sentence_language == language]
        sentences = [sample[number][1] for number in numbers]
        states_of_sentences = analysis.word_states(subject.model(language), sentences)
        for number, (at_n, states_nh) in zip(numbers, states_of_sentences, strict=True):
            states |= {(number, at): state_h for at, state_h in zip(at_n, states_nh, strict=True)}
    return states
