"""The report of a finished run: measures the release and its baseline, and writes the page.

Each model encodes every sentence once. Accuracies, retention, margins and errors are computed from those embeddings, word
maps and alignment matrices from the word states of a few pairs.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from metaphrase.corpus.declaration import articles_of
from metaphrase.corpus.parallel import TARGET_LANGUAGE, ParallelSet
from metaphrase.encoders.loading import load_encoder
from metaphrase.encoders.names import model_folder
from metaphrase.encoders.prompts import resolve_prompt
from metaphrase.evaluation.compare import compare
from metaphrase.evaluation.encoding import CachedEncoder, encoder_settings
from metaphrase.evaluation.guards import AlphaCurve
from metaphrase.evaluation.retention import collapse_in_words, overall_verdict, retention
from metaphrase.evaluation.retrieval import evaluate_retrieval
from metaphrase.evaluation.significance import RESAMPLES
from metaphrase.evaluation.suites.encoders import Sets, read_test_folders
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
from metaphrase.publishing.report import describe_model, write_report

logger = logging.getLogger(__name__)

#: Maximum number of languages of a word map in addition to English; more cannot be distinguished.
_MAPPED = 4


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
    if len(options.languages or ()) > _MAPPED:
        raise UsageError("--languages takes at most four languages, which the word map and the alignments show.")
    started = time.perf_counter()
    folder = Path(options.run)
    facts, trained, earlier, curve = _read_run(folder)
    output = Path(options.output_dir) if options.output_dir else folder / "report"
    for read in (folder, model_folder(options.baseline)):
        check_folder(output, model=read)
    check_writable(output)
    subjects = _load_subjects(options, facts, earlier)
    answers = None
    if options.evaluation:
        hashes = {"before": [], **{side: subject.hashes for side, subject in subjects.items()}}
        answers = read_answers(options.evaluation, **hashes)
    tests = read_test_folders(options.data or default_folders(earlier, Path(options.run)))
    if facts.get("debias"):  # its directions were estimated on the other articles
        tests = {name: articles_of(by_language, "even") for name, by_language in tests.items()}
    sets = _measurable(tests, subjects, trained)
    focus = _choose_focus(sets, trained, options)
    _encode_all(subjects, sets, note, progress)
    settings = {"resamples": options.resamples, "seed": options.seed}
    results, others, comparisons = _measure(subjects, sets, trained, settings)
    note("Computing word maps, alignments, margins and errors …")
    analyses = _analyse(subjects, sets, focus, trained, comparisons, options)
    if answers is not None:
        analyses["answers"] = answers
    analyses["retention"] = {
        name: retention(compare(pair["before"], pair["after"], **settings), options.red_line)
        | {"models": {side: describe_model(result) for side, result in pair.items()}}
        for name, pair in others.items()
    }
    before = {name: one["before"] for name, one in results.items()} if "before" in subjects else None
    after = {name: one["after"] for name, one in results.items()}
    analyses["abilities"] = _abilities(earlier) if before and subjects["before"].name == facts["model"] else {}
    analyses["verdict"] = collapse_in_words(before or {}, after) or overall_verdict(
        comparisons, analyses["retention"], analyses["abilities"]
    )
    if curve is not None:
        analyses["alpha"] = curve.to_dict()
    analyses["cost"] = _cost(subjects, command, time.perf_counter() - started)
    page = write_report(
        claim_folder(output),
        title=earlier.get("title") or f"{facts['model']} trained with {facts['recipe']['name']}",
        before=before,
        after=after,
        comparisons=comparisons,
        run=facts,
        usage=earlier.get("usage") or usage_lines(folder, sorted(trained)),
        analysis=analyses,
    )
    content = read_json(page.with_suffix(".json"))
    return RunReport(page, save_pictures(content, output), content)


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
    named = {language for file in facts["files"] for language in file.get("languages", ())}
    return (named | set(facts["corpus"]["languages"])) - {TARGET_LANGUAGE}


def load_run(folder: Path) -> dict[str, SentenceTransformer]:
    """The release of a run: one model under the key ``""``, or a model per language of a language embedding."""
    if (folder / "modules.json").is_file():
        return {"": load_encoder(folder)}
    folders = (path.parent for path in sorted(folder.glob("*/modules.json")))
    releases = {path.name: path for path in folders if not path.name.startswith(("checkpoint-", "_"))}
    if not releases:
        raise MissingFileError(f"{folder} has no release. Wait for the end of the run, or resume it.")
    return {language: load_encoder(path) for language, path in releases.items()}


def default_folders(earlier: Mapping[str, Any], run: Path) -> list[str]:
    """Folders of the test sets in a run's report that still exist, also in the folder of the run, and the packaged ones."""
    measured = _measured_folders(earlier, run)
    existing = [folder for folder in measured if folder.is_dir()]
    if gone := [folder.name for folder in measured if not folder.is_dir()]:
        logger.warning(
            "Test sets that no longer exist are skipped: %s. Pass their folders with --data.", ", ".join(gone)
        )
    existing += [packaged for packaged in (DEMO, UDHR) if packaged.name not in {folder.name for folder in existing}]
    return list(dict.fromkeys(map(str, existing)))


def _measured_folders(earlier: Mapping[str, Any], run: Path) -> list[Path]:
    """Folders of the test sets in a run's report."""
    measured = [one["settings"]["data"] for one in earlier.get("after", {}).values()]
    patterns = [pattern for one in measured for pattern in re.split(r"(?<=\.tsv), |(?<=\.gz), ", one) if pattern]
    named = dict.fromkeys(Path(pattern).parent for pattern in patterns)
    own = {folder: run / "data" / folder.name for folder in named}  # of `metaphrase adapt`, if it was moved
    return [own[folder] if not folder.is_dir() and own[folder].is_dir() else folder for folder in named]


def _read_run(folder: Path) -> tuple[dict[str, Any], set[str], dict[str, Any], AlphaCurve | None]:
    """The facts of a run, its languages, its report or ``{}``, and the curve of its merge, if there is one."""
    with damage_in(facts_file := folder / "run.json"):
        facts = _read_json(facts_file)
        trained = trained_languages(facts) if facts is not None else set()
    if facts is None:
        raise MissingFileError(
            f"{folder} is not the folder of a run: missing run.json. Name the --output_dir of `metaphrase adapt`, `train` or "
            "`demo`."
        )
    with damage_in(folder / "report.json"):
        earlier = _read_json(folder / "report.json") or {}
        _measured_folders(earlier, folder)
        overall_verdict({}, {}, _abilities(earlier))  # reads its rows
    with damage_in(folder / CURVE):
        curve = None if (content := _read_json(folder / CURVE)) is None else AlphaCurve(**content)
        str(curve)  # reads its rows
    return facts, trained, earlier, curve


def _abilities(earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Abilities other than retrieval of translations, as the run measured them against the encoder before training."""
    return dict(earlier.get("analysis", {}).get("abilities", {}))


def _read_json(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.is_file() else None


def _load_subjects(
    options: ReportOptions, facts: Mapping[str, Any], earlier: Mapping[str, Any]
) -> dict[str, SentenceEmbeddings]:
    """The baseline, unless the report has none, and the release."""
    release = SentenceEmbeddings(options.run, load_run(Path(options.run)))
    baseline, prompt = options.baseline or facts["model"], options.baseline_prompt
    is_own = baseline == facts["model"]
    if baseline == "none":
        return {"after": release}
    model = load_encoder(facts["base"], **_pooling(facts)) if is_own else load_encoder(baseline)
    used = {one["settings"]["prompt"] for one in (earlier.get("before") or {}).values()}
    if prompt == "auto" and len(used) == 1 and is_own:
        prompt = str(used.pop())
    else:
        prompt = resolve_prompt(model, None if prompt == "none" else prompt)
    return {"before": SentenceEmbeddings(baseline, {"": model}, prompt), "after": release}


def _pooling(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The pooling with which a run loaded the encoder that it started from."""
    return {
        "pooling": facts["settings"].get("pooling"),
        "default_pooling": facts["recipe"].get("pooling", "mean"),
    }


def _measurable(sets: Sets, subjects: Mapping[str, SentenceEmbeddings], trained: set[str]) -> Sets:
    """The languages that can be measured: the models'; without a baseline, those of the training data."""
    encoders = subjects["after"].encoders
    languages: set[str] | None = None
    if "" not in encoders:
        languages = set(encoders)
    elif "before" not in subjects:  # retention requires a baseline
        languages = trained
    measurable = {
        name: {x: one for x, one in by_language.items() if languages is None or x in languages}
        for name, by_language in sets.items()
    }
    return {name: by_language for name, by_language in measurable.items() if by_language}


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
    on_cpu = all(one.model(TARGET_LANGUAGE).device.type == "cpu" for one in subjects.values())
    machine = f"{torch.get_num_threads()} CPU threads" if on_cpu else "an accelerator"
    encoded = sum(len(encoder.rows) for one in subjects.values() for encoder in one.encoders.values())
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
    pairs = [one for by_language in sets.values() for one in by_language.values()]
    for subject in subjects.values():
        note(f"Encoding {len(pairs)} test sets of {', '.join(sets)} with {subject.name} …")
        with progress() as begin:
            advance = begin("Encoding test sets", len(pairs))
            for one in pairs:
                subject.of(one.language, one.sources)
                subject.of(TARGET_LANGUAGE, one.targets)
                advance(1)


def _measure(
    subjects: Mapping[str, SentenceEmbeddings], sets: Sets, trained: set[str], settings: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Results of both models in trained languages and in other languages, and comparisons in trained languages."""
    results: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, by_language in sets.items():
        for into, is_trained in ((results, True), (others, False)):
            chosen = {x: one for x, one in by_language.items() if (x in trained) == is_trained}
            if chosen and (is_trained or "before" in subjects):
                into[name] = {side: one.measure(chosen, **settings) for side, one in subjects.items()}
    comparisons = {
        name: compare(one["before"], one["after"], **settings) for name, one in results.items() if "before" in one
    }
    return results, others, comparisons


def _analyse(
    subjects: Mapping[str, SentenceEmbeddings],
    sets: Sets,
    focus: str,
    trained: set[str],
    comparisons: Mapping[str, Any],
    options: ReportOptions,
) -> dict[str, Any]:
    """Word maps, alignments, margins and errors on one test set."""
    shown = {language: one for language, one in sets[focus].items() if language in trained}
    embedded = {
        language: {
            side: (one.of(language, data.sources), one.of(TARGET_LANGUAGE, data.targets))
            for side, one in subjects.items()
        }
        for language, data in shown.items()
    }
    nearest = {
        language: {side: analysis.nearest_targets(*both) for side, both in sides.items()}
        for language, sides in embedded.items()
    }
    gains = comparisons[focus]["languages"] if focus in comparisons else {}
    ranked = sorted(shown, key=lambda language: -gains[language]["difference"] if gains else 0)
    mapped = (options.languages or ranked)[:_MAPPED]
    mapped_sets = {language: sets[focus][language] for language in mapped}
    content: dict[str, Any] = {
        "alignments": _alignments(subjects, sets[focus] if options.pairs else mapped_sets, options.pairs),
        "geometry": geometry_of(embedded, shown) | {"data": focus},
        "errors": analysis.nearest_errors(shown, nearest, limit=options.errors) | {"data": focus},
    }
    if tokens := token_maps(subjects, mapped_sets):
        content["tokens"] = tokens | {"data": focus}
    if margins := analysis.margin_histogram(_margins(embedded, shown)):
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
                side: analysis.alignment_matrix(one.model(language), one.model(TARGET_LANGUAGE), pair)
                for side, one in subjects.items()
            },
        }
        for language, number, pair in analysis.choose_pairs(sets, chosen)
    ]


def _margins(
    embedded: analysis.Embedded, sets: Mapping[str, ParallelSet]
) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
    """Margins of translation pairs and of wrong pairs over all languages, of each model."""
    margins: dict[str, list[tuple[NDArray[Any], NDArray[Any]]]] = {}
    for language, data in sets.items():
        for side, both in embedded[language].items():
            margins.setdefault(side, []).append(analysis.margins(*both, data))
    return {
        side: (np.concatenate([pair for pair, _ in parts]), np.concatenate([wrong for _, wrong in parts]))
        for side, parts in margins.items()
    }


def token_maps(subjects: Mapping[str, SentenceEmbeddings], sets: Mapping[str, ParallelSet]) -> dict[str, Any]:
    """Maps of the same words before and after; empty if there are fewer than three words."""
    sample = analysis.sample_words(sets)
    states: dict[str, dict[tuple[int, int], NDArray[Any]]] = {side: {} for side in subjects}
    for side, one in subjects.items():
        for language in dict.fromkeys(language for language, _, _ in sample):
            numbers = [number for number, (spoken, _, _) in enumerate(sample) if spoken == language]
            of_words = analysis.word_states(one.model(language), [sample[number][1] for number in numbers])
            for number, (at_n, states_nh) in zip(numbers, of_words, strict=True):
                states[side] |= {(number, at): state_h for at, state_h in zip(at_n, states_nh, strict=True)}
    chosen = [(number, at) for number, (_, _, at_n) in enumerate(sample) for at in at_n]
    kept = [word for word in chosen if all(word in of_side for of_side in states.values())]  # others are truncated
    if len(kept) < 3:
        return {}
    languages = [sample[number][0] for number, _ in kept]
    return {
        "languages": [TARGET_LANGUAGE, *sets],
        "language_of": languages,
        "words": [list(sample[number][1])[at] for number, at in kept],
        "neighbours": analysis.WORD_NEIGHBOURS,
        "expected": analysis.expected_share(languages),
        **{
            side: analysis.token_map(np.stack([of_side[word] for word in kept]), languages)
            for side, of_side in states.items()
        },
    }
