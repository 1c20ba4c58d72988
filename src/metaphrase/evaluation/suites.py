"""The benchmarks as data: what each needs in a folder, how long it takes, and what measures it.

A suite finds its *parts* in a folder of data: one part is one data set under one protocol, and the unit of what is kept
and not done again. A part gives one or several *scores*, all of one form, so that they can be tabled and compared::

    {"kind": "retrieval", "protocol": "…", "measure": "accuracy", "lower_is_better": False,
     "languages": {"sw": {"n": 390, "score": 73.3, "interval": [68.9, 77.7]}},
     "groups": {"36": {…}}, "average": {"n": 36, "score": …, "interval": …}, "detail": what the evaluation itself returned}

Where items have classes, a language also has ``"majority"``, the accuracy of always saying its largest class, and
``"learned"``, whether the model does more than saying one class.

========== ====================================== ================================================================
suite      in the folder                          protocol
========== ====================================== ================================================================
retrieval  any folder of ``xx-en[.test].tsv.gz``  cosine top-1, both directions; xsim error by the ratio margin
mining     a folder of BUCC's files               each of BUCC's protocols whose splits are there
sts        a folder of ``…-xx-test.csv.gz``       Spearman, in each language and across; STS22 always from the Hub
word-…     ``test.xx``, ``test.yy``, ``….wa``     AER of links from the encoder's token states
nli, …     ``xnli``, ``pawsx``, ``xquad``, ``ud`` fine-tuned in English at a small scale, measured in all languages
mteb       any folder of ``xx-en[.test].tsv.gz``  bitext mining tasks of MTEB's own form; or ``--tasks`` of the Hub
========== ====================================== ================================================================
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.resources import files as resources
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from sentence_transformers import SentenceTransformer
from transformers import HfArgumentParser

from metaphrase.aligners.embedding import EmbeddingAligner
from metaphrase.corpus.parallel import ParallelSet, load_parallel_folder
from metaphrase.evaluation.bucc import (
    PROTOCOLS,
    Comparison,
    Duplicates,
    Protocol,
    bucc_files,
    bucc_languages,
    bucc_protocol,
    compare_mining,
    evaluate_mining,
    load_bucc_folder,
)
from metaphrase.evaluation.compare import compare_resamples
from metaphrase.evaluation.retrieval import (
    DIRECTIONS,
    _protocol,
    compare_retrieval,
    evaluate_retrieval,
    resolve_prompt,
)
from metaphrase.evaluation.significance import (
    ALPHA,
    CONFIDENCE,
    RESAMPLES,
    holm,
    paired_bootstrap,
    pooled_paired_bootstrap,
    verdict,
)
from metaphrase.evaluation.sts import (
    STS22_GROUPS,
    STS_RESAMPLES,
    compare_sts,
    cross_lingual,
    evaluate_sts,
    load_sts_folder,
)
from metaphrase.evaluation.transfer.classification import TASKS, ClassificationOptions, finetune_classification
from metaphrase.evaluation.transfer.data import pairs_format
from metaphrase.evaluation.transfer.question_answering import QuestionAnsweringOptions, finetune_question_answering
from metaphrase.evaluation.transfer.running import FineTuningArguments, load_benchmark
from metaphrase.evaluation.transfer.tagging import TaggingOptions, finetune_tagging
from metaphrase.evaluation.word_alignment import alignment_error_interval, alignment_scores, load_wpt
from metaphrase.exceptions import DataMismatchError, MissingFileError
from metaphrase.io.digests import files_sha256, model_hash
from metaphrase.io.environment import hardware, versions
from metaphrase.io.files import write_json
from metaphrase.mining.margins import Margin, Retrieval
from metaphrase.modeling.packing import packed

logger = logging.getLogger(__name__)

Scores = dict[str, Any]
RESULTS = "results.json"
#: Neighbours of the margin by which xsim retrieves.
XSIM_K = 4
#: Goes up when a suite measures in another way, so that nothing that was kept before is taken for it.
REVISION = 1
#: Pairs of sentences that are aligned between two steps of a progress bar.
_ALIGNED = 64


@dataclass(frozen=True)
class Settings:
    """How suites measure; all that a kept part depends on, beside the model and the data.

    Attributes:
        prompt: Text before each sentence: ``"auto"`` is the query prompt that the model stores, None is none.
        languages: Languages to measure; None measures all.
        text_equality: In retrieval, finding another copy of the translation's text is a hit.
        strip_quotes: Take each ``"`` out of the texts of parallel test sets, as DAP did.
        protocols: BUCC's protocols to mine under; None takes all whose splits are there.
        margin: In mining, the score of a pair; see `metaphrase.mining.margins.margin_score`.
        k: In mining, neighbours in the margin.
        retrieval: In mining, which pairs are candidates; see `metaphrase.mining.margins.select_pairs`.
        duplicates: In mining, what becomes of repeated lines; None takes each protocol's own.
        comparison: In mining, how a score stands to the threshold; None takes each protocol's own.
        tasks: Tasks for the suite ``mteb``: folders of the data, and names of MTEB's own; None takes the folders.
        resamples: Bootstrap resamples; those of Spearman's correlation are at most `STS_RESAMPLES`.
        seed: Seed of the bootstrap.
        finetuning: Options of the fine-tuned suites in place of `SMALL_SCALE`'s.
    """

    prompt: str | None = "auto"
    languages: tuple[str, ...] | None = None
    text_equality: bool = False
    strip_quotes: bool = False
    protocols: tuple[str, ...] | None = None
    margin: Margin = "ratio"
    k: int = 4
    retrieval: Retrieval = "max"
    duplicates: Duplicates | None = None
    comparison: Comparison | None = None
    tasks: tuple[str, ...] | None = None
    resamples: int = RESAMPLES
    seed: int = 0
    finetuning: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Attributes:
        name: ``"starter"``, a folder or a Hub id; what is fine-tuned.
        model: The same, loaded.
        sha: Its `model_hash`.
        encode: Embeds texts; remembers what it has embedded.
        folder: Where its parts are kept.
        settings: How.
        batch_size: Sentences per forward pass.
        show_progress: Show progress bars.
    """

    name: str
    model: SentenceTransformer
    sha: str
    encode: Remembered
    folder: Path
    settings: Settings
    batch_size: int = 32
    show_progress: bool = False

    @classmethod
    def of(
        cls,
        name: str,
        model: SentenceTransformer,
        output: str | Path,
        settings: Settings,
        *,
        batch_size: int = 32,
        show_progress: bool = False,
    ) -> Subject:
        """A model whose parts are kept in a folder of ``output`` that its content names."""
        sha = model_hash(model)
        return cls(name, model, sha, Remembered(model), Path(output) / sha[:12], settings, batch_size, show_progress)


class Remembered:
    """A model's ``encode`` that embeds no text twice.

    Args:
        model: The model.
    """

    def __init__(self, model: SentenceTransformer) -> None:
        self.model = model
        self.rows: dict[tuple[str, str], NDArray[np.float32]] = {}

    def __call__(
        self,
        texts: Sequence[str],
        *,
        prompt: str = "",
        batch_size: int = 32,
        show_progress_bar: bool = False,
        **_: Any,
    ) -> NDArray[np.float32]:
        """Embeddings, shape ``(texts, hidden)``."""
        new = list(dict.fromkeys(text for text in texts if (prompt, text) not in self.rows))
        if new:
            rows_nh = self.model.encode(
                new, prompt=prompt, batch_size=batch_size, show_progress_bar=show_progress_bar, convert_to_numpy=True
            )
            self.rows.update(((prompt, text), row_h) for text, row_h in zip(new, rows_nh, strict=True))
        return np.stack([self.rows[prompt, text] for text in texts])


class NoData(Exception):
    """A part's data are not there, which was found out only when they were wanted."""


@dataclass(frozen=True)
class Part:
    """One data set under one protocol.

    Attributes:
        name: ``"tatoeba"``, unlike that of any other part.
        suite: Its suite.
        protocol: In a few words.
        files: What it reads.
        work: Bytes of text that are encoded, a rough measure of its time; a training step counts three times.
        measure: Measures a model: scores by their names.
        fixed: What its result depends on beside the settings that its suite reads.
    """

    name: str
    suite: str
    protocol: str
    files: tuple[Path, ...]
    work: float
    measure: Callable[[Subject], dict[str, Scores]]
    fixed: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Suite:
    """A benchmark.

    Attributes:
        name: What the command line calls it.
        needs: What it looks for in a folder of data, in words.
        find: The parts that are there; without a folder, those whose data the Hub has.
        reads: Names of the `Settings` that its results depend on.
    """

    name: str
    needs: str
    find: Callable[[Path | None, Settings], Iterable[Part]]
    reads: tuple[str, ...]


# ---------------------------------------------------------------------------------------------------------- retrieval


def strip_quotes(sets: Mapping[str, ParallelSet]) -> dict[str, ParallelSet]:
    """Test sets without any ``"``.

    Reference: Li et al. 2023 (DAP), in whose released code Tatoeba is read so.
    """
    stripped = {}
    for language, one in sets.items():
        sources, targets = (tuple(text.replace('"', "") for text in side) for side in (one.sources, one.targets))
        stripped[language] = replace(one, sources=sources, targets=targets)
    return stripped


def _parallel_folders(
    data: Path | None, settings: Settings
) -> dict[str, tuple[dict[str, ParallelSet], tuple[Path, ...]]]:
    """Test sets in a folder and the folders in it; ``software`` may hold ``xx-en.test.tsv.gz`` among other splits.

    Files without a split are a test set where the folder is named as one: a corpus, or a dictionary, looks the same.
    """
    found = {}
    for folder in _folders(data):
        split = "test" if any(folder.glob("*-en.test.tsv*")) else None
        if split or (any(folder.glob("*-en.tsv*")) and (folder == data or folder.name in ("tatoeba", "udhr"))):
            try:
                sets = load_parallel_folder(folder, None, split)
            except ValueError as error:
                logger.warning("%s", error)
                continue
            chosen = {language: sets[language] for language in _wanted(sets, settings)}
            if chosen:
                chosen = strip_quotes(chosen) if settings.strip_quotes else chosen
                found[folder.name] = chosen, tuple(one.path for one in chosen.values() if one.path)
    return found


def _wanted(languages: Iterable[str], settings: Settings) -> list[str]:
    """The languages that are there and asked for, in the order of asking."""
    there = list(languages)
    return [language for language in settings.languages or there if language in there]


def _folders(data: Path | None) -> list[Path]:
    """A folder and the folders in it."""
    return [] if data is None else [data, *sorted(path for path in data.iterdir() if path.is_dir())]


def _size(files: Iterable[Path]) -> int:
    """Bytes of text in files, packed or not."""
    return sum(
        len(gzip.decompress(path.read_bytes())) if path.suffix == ".gz" else path.stat().st_size for path in files
    )


def _find_retrieval(data: Path | None, settings: Settings) -> Iterator[Part]:
    equal = ", equal texts count" if settings.text_equality else ""
    equal += _stripped(settings)
    for name, (sets, files) in _parallel_folders(data, settings).items():
        protocol = f"top-1 by cosine{equal}; xsim (ratio margin, k={XSIM_K})"
        yield Part(name, "retrieval", protocol, files, _size(files), partial(_retrieval, name, sets))


def _stripped(settings: Settings) -> str:
    return ", quotation marks stripped" if settings.strip_quotes else ""


def _retrieval(name: str, sets: Mapping[str, ParallelSet], subject: Subject) -> dict[str, Scores]:
    cosine, margin = (
        evaluate_retrieval(
            subject.model,
            sets,
            name=subject.name,
            prompt=subject.settings.prompt,
            batch_size=subject.batch_size,
            text_equality=subject.settings.text_equality,
            margin_k=margin_k,
            resamples=subject.settings.resamples,
            seed=subject.settings.seed,
            show_progress=subject.show_progress,
            encode=subject.encode,
        )
        for margin_k in (None, XSIM_K)
    )
    return retrieval_scores(name, cosine, margin)


def retrieval_scores(name: str, cosine: Mapping[str, Any], margin: Mapping[str, Any]) -> dict[str, Scores]:
    """Scores of two results of `evaluate_retrieval`, by cosine and by margin.

    xsim is directed (source to target): its mean over both directions is named as such.
    """
    labels = dict(zip((*DIRECTIONS, "mean"), ("xx→en", "en→xx", "both directions"), strict=True))
    scores = {f"{name} {label}": _of_retrieval(cosine, direction) for direction, label in labels.items()}
    for direction, label in labels.items():
        title = f"{name} xsim{',' if direction == 'mean' else ''} {label}"
        scores[title] = _of_retrieval(margin, direction, errors=True)
    return scores


def _of_retrieval(result: Mapping[str, Any], direction: str, *, errors: bool = False) -> Scores:
    def row(entry: Mapping[str, Any]) -> dict[str, Any]:
        score, (low, high) = entry[direction]["accuracy"], entry[direction]["interval"]
        score, interval = (100 - score, [100 - high, 100 - low]) if errors else (score, [low, high])
        return {"n": entry["n"], "score": score, "interval": interval}

    compared = direction == "mean"
    return {
        "kind": ("xsim" if errors else "retrieval") if compared else "",
        "measure": "xsim error" if errors else "accuracy",
        "lower_is_better": errors,
        **_rows(result, row),
        "detail": result if compared else {},
    }


def _rows(result: Mapping[str, Any], row: Callable[[Mapping[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    return {
        "languages": {language: row(entry) for language, entry in result["languages"].items()},
        "groups": {group: row(entry) for group, entry in result.get("groups", {}).items()},
        "average": row(result["average"]),
    }


def _compare_xsim(before: Mapping[str, Any], after: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """As errors: a positive difference is worse."""
    compared = compare_retrieval(before, after, **options)
    for row in (*compared["languages"].values(), compared["pooled"]):
        low, high = row["interval"]
        row |= {"before": 100 - row["before"], "after": 100 - row["after"]}
        row |= {"difference": -row["difference"], "interval": [-high, -low]}
    return compared


# ------------------------------------------------------------------------------------------------------------- mining


def _find_mining(data: Path | None, settings: Settings) -> Iterator[Part]:
    taken: set[tuple[str, Path]] = set()
    for folder in _folders(data):
        for protocol in settings.protocols or PROTOCOLS:
            tuned, scored, *own = bucc_protocol(protocol)
            languages = _wanted(bucc_languages(folder, cast("Protocol", protocol)), settings)
            files = bucc_files(folder)
            parts = [files[language][split] for language in languages for split in dict.fromkeys((tuned, scored))]
            used = tuple(chain.from_iterable(part.values() for part in parts))
            if not used or taken.issuperset((protocol, path) for path in used):
                continue
            taken |= {(protocol, path) for path in used}
            fixed = {"duplicates": settings.duplicates or own[0], "comparison": settings.comparison or own[1]}
            repeated = {"keep": "repeated lines kept", "unify": "repeated lines unified and left out"}
            yield Part(
                f"{folder.name} {protocol}",
                "mining",
                f"{protocol}: threshold from {tuned}, scored on {scored}; {settings.margin} margin, k={settings.k}, "
                f"{settings.retrieval} retrieval, {repeated[fixed['duplicates']]}, score {fixed['comparison']} threshold",
                used,
                _size(path for path in used if ".gold" not in path.name),
                partial(_mining, folder, protocol, languages, fixed),
                fixed,
            )


def _mining(
    folder: Path, protocol: Any, languages: Sequence[str], fixed: Mapping[str, Any], subject: Subject
) -> dict[str, Scores]:
    result = evaluate_mining(
        subject.model,
        load_bucc_folder(folder, protocol, languages),
        protocol=protocol,
        k=subject.settings.k,
        margin=subject.settings.margin,
        retrieval=subject.settings.retrieval,
        device="cuda" if torch.cuda.is_available() else None,
        **fixed,
        name=subject.name,
        prompt=subject.settings.prompt,
        batch_size=subject.batch_size,
        resamples=subject.settings.resamples,
        seed=subject.settings.seed,
        show_progress=subject.show_progress,
        encode=subject.encode,
    )

    def row(entry: Mapping[str, Any]) -> dict[str, Any]:
        return {"n": entry.get("gold", entry.get("n")), "score": entry["f1"], "interval": entry["interval"]}

    scores = {"kind": "mining", "measure": "F1", "lower_is_better": False, **_rows(result, row), "detail": result}
    return {f"{folder.name} {protocol}": scores}


# ---------------------------------------------------------------------------------------------------------------- sts


def _find_sts(data: Path | None, settings: Settings) -> Iterator[Part]:
    for folder in _folders(data):
        files = {match[1]: path for path in folder.glob("*-test.csv*") if (match := _STS_FILE.search(path.name))}
        if wanted := _wanted(sorted(files), settings):
            used = tuple(files[language] for language in sorted({*wanted, *({"en"} & files.keys())}))
            yield Part(
                folder.name,
                "sts",
                "Spearman of the cosine ×100, test set; in each language, and across it and English",
                used,
                _size(used),
                partial(_sts, folder, wanted),
            )
    yield Part("sts22", "sts", "Spearman of the cosine ×100; 18 subsets, and without fr-pl", (), 0, _sts22)


_STS_FILE = re.compile(r"-([a-z]{2,3}(?:-[A-Z][a-z]{3})?)-test\.csv(\.gz)?$")


def _sts(folder: Path, languages: Sequence[str], subject: Subject) -> dict[str, Scores]:
    sets = load_sts_folder(folder)
    crossed = cross_lingual({code: one for code, one in sets.items() if code == "en" or code in languages})
    scores = {folder.name: _of_sts(subject, {code: sets[code] for code in languages})}
    return scores | ({f"{folder.name} cross-lingual": _of_sts(subject, crossed)} if crossed else {})


def _of_sts(subject: Subject, sets: Any, groups: Mapping[str, Sequence[str]] | None = None) -> Scores:
    result = evaluate_sts(
        subject.model,
        sets,
        name=subject.name,
        prompt=subject.settings.prompt,
        batch_size=subject.batch_size,
        groups=groups,
        resamples=min(STS_RESAMPLES, subject.settings.resamples),
        seed=subject.settings.seed,
        show_progress=subject.show_progress,
        encode=subject.encode,
    )

    def row(entry: Mapping[str, Any]) -> dict[str, Any]:
        return {"n": entry["n"], "score": entry["spearman"], "interval": entry["interval"]}

    return {"kind": "sts", "measure": "Spearman", "lower_is_better": False, **_rows(result, row), "detail": result}


def _sts22(subject: Subject) -> dict[str, Scores]:
    tasks = _mteb_tasks()
    try:
        (task,) = tasks.get_tasks(["STS22"], subject.settings.languages)
        sets = tasks.sts_sets(task)
    except (OSError, ValueError) as error:
        raise NoData(str(error).partition("\n")[0]) from error
    return {"sts22": _of_sts(subject, sets, STS22_GROUPS)}


# ----------------------------------------------------------------------------------------------------- word alignment


def _find_word_alignment(data: Path | None, settings: Settings) -> Iterator[Part]:
    for gold in chain.from_iterable(sorted(folder.glob("test.*.*.wa")) for folder in _folders(data)):
        _, one, other, _ = gold.name.split(".")
        files = (gold.with_name(f"test.{one}"), gold.with_name(f"test.{other}"), gold)
        yield Part(
            gold.parent.name,
            "word-alignment",
            "AER of links between token states",
            files,
            _size(files),
            partial(_word_alignment, gold.parent.name, files),
        )


def _word_alignment(name: str, files: tuple[Path, Path, Path], subject: Subject) -> dict[str, Scores]:
    pairs = load_wpt(*files)
    aligner = EmbeddingAligner(subject.model, batch_size=subject.batch_size)
    predicted = []
    with Progress(console=Console(stderr=True), transient=True, disable=not subject.show_progress) as progress:
        for first in progress.track(range(0, len(pairs), _ALIGNED), description=f"Aligning {name}"):
            aligned = aligner.align([pair.pair for pair in pairs[first : first + _ALIGNED]])
            predicted += [alignment.links for alignment in aligned]
    sides = predicted, [pair.sure for pair in pairs], [pair.possible for pair in pairs]
    options: dict[str, Any] = {"resamples": subject.settings.resamples, "seed": subject.settings.seed}
    counts = [
        [len(set(links)), len(pair.sure), len(pair.sure & set(links)), len(pair.possible & set(links))]
        for links, pair in zip(predicted, pairs, strict=True)
    ]
    scores = {measure: 100 * score for measure, score in alignment_scores(*sides)._asdict().items()}
    row = {
        "n": len(pairs),
        "score": scores["aer"],
        "interval": [100 * end for end in alignment_error_interval(*sides, **options)],
    }
    detail = {
        "languages": {name: {**scores, "n": len(pairs), "sha256": files_sha256(files), "counts": counts}},
        "settings": {"layer": aligner.layer, "method": aligner.method, "level": aligner.level, **options},
    }
    found = {"kind": "word-alignment", "measure": "AER", "lower_is_better": True, "detail": detail}
    return {name: found | {"languages": {name: row}, "groups": {}, "average": row | {"n": 1}}}


def compare_word_alignment(
    before: Mapping[str, Any], after: Mapping[str, Any], *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Any]:
    """Paired test of two error rates over the same pairs, which are drawn with replacement; lower is better."""
    languages = after["languages"]
    resampled = {}
    for name, result in languages.items():
        if before["languages"][name]["sha256"] != result["sha256"]:
            raise DataMismatchError(
                f"The two results for {name!r} are over different pairs. Evaluate both on the same data."
            )
        n = result["n"]
        drawn_rn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=resamples)
        old_r4, new_r4 = (drawn_rn @ np.array(one["counts"]) for one in (before["languages"][name], result))
        resampled[name] = (_error_rates(old_r4), _error_rates(new_r4))
    return compare_resamples(
        {name: before["languages"][name]["aer"] for name in languages},
        {name: result["aer"] for name, result in languages.items()},
        resampled,
        sizes={name: result["n"] for name, result in languages.items()},
        test="paired bootstrap over pairs of sentences",
        lower_is_better=True,
    )


def _error_rates(counts_r4: NDArray[np.integer]) -> NDArray[np.float64]:
    predicted_r, sure_r, right_r, allowed_r = counts_r4.T
    return 100 * (1 - (right_r + allowed_r) / np.maximum(predicted_r + sure_r, 1))


# --------------------------------------------------------------------------------------------------------- fine-tuned

#: Hyper-parameters of the fine-tuned suites: minutes on two CPU cores, for comparing encoders with each other.
SMALL_SCALE: dict[str, dict[str, Any]] = {
    name: yaml.safe_load(
        resources("metaphrase").joinpath("evaluation", "transfer", "small", f"{name}.yaml").read_text("utf-8")
    )
    for name in ("xnli", "pawsx", "xquad", "ud")
}


@dataclass(frozen=True)
class _FineTuned:
    """A task that is fine-tuned.

    Attributes:
        suite: Its suite.
        pattern: Names of its files, with the language as a group.
        sources: Options that name its data, with ``{}`` for the folder.
        protocol: In a few words.
        work: Bytes that are encoded for each byte of the files, from its minutes and those of encoding on the same machine.
        run: Trains and measures.
        options: Its options.
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
    "xnli": _FineTuned(
        "nli",
        re.compile(r"dev-(\w+)\.tsv(\.gz)?"),
        {"halves": "{}@dev"},
        _HALVES,
        1.0,
        finetune_classification,
        ClassificationOptions,
    ),
    "pawsx": _FineTuned(
        "paraphrase",
        re.compile(r"dev-(\w+)\.tsv(\.gz)?"),
        {"halves": "{}@dev"},
        _HALVES,
        2.2,
        finetune_classification,
        ClassificationOptions,
    ),
    "xquad": _FineTuned(
        "qa",
        re.compile(r"xquad\.(\w+)\.json(\.gz)?"),
        {"halves": "{}@dev"},
        _HALVES,
        0.95,
        finetune_question_answering,
        QuestionAnsweringOptions,
    ),
    "ud": _FineTuned(
        "pos",
        re.compile(r"([a-z]+)_\w+-ud-(dev|test)\.conllu(\.gz)?"),
        {"train": "{}@dev", "test": "{}@test"},
        "small scale: trained on English dev, measured on test; seqeval chunk F1 on bare tags, and accuracy",
        0.35,
        finetune_tagging,
        TaggingOptions,
    ),
}


def _find_finetuned(suite: str, data: Path | None, settings: Settings) -> Iterator[Part]:
    for name, task in FINETUNED.items():
        folder = next((folder for folder in _folders(data) if folder.name == name), None)
        if task.suite != suite or folder is None:
            continue
        files = {path: match[1] for path in folder.iterdir() if (match := task.pattern.fullmatch(path.name))}
        if wanted := _wanted(sorted(set(files.values())), settings):
            used = tuple(sorted(path for path, language in files.items() if language in {*wanted, "en"}))
            scale = SMALL_SCALE[name] | dict(settings.finetuning)
            yield Part(
                name,
                suite,
                f"{task.protocol}; {_limits(scale)}",
                used,
                task.work * _size(used),
                partial(_finetuned, name, folder, wanted),
                {"small scale": scale},
            )


def _limits(scale: Mapping[str, Any]) -> str:
    """Which items are trained on and measured, in words."""
    first = {key: f"the first {scale[key]}" if scale.get(key) else "all" for key in ("limit_train", "limit_test")}
    return (
        f"of the training items {first['limit_train']}, of the test items {first['limit_test']} in each language "
        f"(limit_train {scale.get('limit_train') or 'none'}, limit_test {scale.get('limit_test') or 'none'})"
    )


def _finetuned(name: str, data: Path, languages: Sequence[str], subject: Subject) -> dict[str, Scores]:
    settings = SMALL_SCALE[name] | dict(subject.settings.finetuning) | _sources(name, data, languages)
    settings |= {"model": subject.name}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    output = subject.folder / f"{name}-{digest[:8]}"
    settings |= {"output_dir": str(output), "disable_tqdm": not subject.show_progress}
    options, arguments = HfArgumentParser((FINETUNED[name].options, FineTuningArguments)).parse_dict(settings)
    result = FINETUNED[name].run(options, arguments)
    shutil.rmtree(output)
    return finetuned_scores(name, result, gold_labels(name, data, languages, subject.settings))


def _sources(name: str, data: Path, languages: Sequence[str]) -> dict[str, Any]:
    """Options that name the data."""
    sources = {option: source.format(data) for option, source in FINETUNED[name].sources.items()}
    return sources | {"languages": list(languages)}


def gold_labels(name: str, data: Path, languages: Sequence[str], settings: Settings) -> dict[str, list[int]]:
    """Gold classes of the items that a task is measured on, by language; none where items have no class."""
    if name not in TASKS:
        return {}
    scale = SMALL_SCALE[name] | dict(settings.finetuning) | _sources(name, data, languages) | {"model": ""}
    options, *_ = HfArgumentParser(ClassificationOptions).parse_dict(scale, allow_extra_keys=True)
    benchmark = load_benchmark(options, pairs_format(*TASKS[name]), seed=scale.get("seed", 42))
    return {language: list(rows["label"]) for language, rows in benchmark.test.items()}


def finetuned_scores(name: str, result: Mapping[str, Any], labels: Mapping[str, Sequence[int]]) -> dict[str, Scores]:
    """Scores of a fine-tuned model.

    Args:
        name: The part's.
        result: What its training returned.
        labels: Gold classes of the test items, by language, where they have classes.
    """
    measures = list(result["average"])
    scores = {f"{name} {measure.replace('_', ' ')}": _of_finetuned(result, measure) for measure in measures[:2]}
    first = scores[f"{name} {measures[0]}"]
    first |= {"kind": "finetuned", "detail": dict(result)}
    for language, gold in labels.items():
        first["languages"][language] |= against_majority(result["languages"][language]["items"], gold)
    return scores


def against_majority(correct_n: Sequence[float], label_n: Sequence[int]) -> dict[str, Any]:
    """Whether a classifier does more than always saying one class.

    Args:
        correct_n: Whether each item is right.
        label_n: Gold class of each.

    Returns:
        ``majority``, the accuracy in percent of always saying the largest class; ``learned``, False where what is right is
        just the items of one class, or as many items as the largest class has.

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


def _of_finetuned(result: Mapping[str, Any], measure: str) -> Scores:
    first = measure == next(iter(result["average"]))
    languages = {
        language: {"n": row["n"], "score": row["metrics"][measure]} | ({"interval": row["interval"]} if first else {})
        for language, row in result["languages"].items()
    }
    others = {language for language in languages if language != "en"}
    groups = {"without English": others} if others and len(others) < len(languages) else {}
    return {
        "kind": "",
        "measure": measure.replace("_", " "),
        "lower_is_better": False,
        "languages": languages,
        "groups": {group: _mean(languages, sorted(members)) for group, members in groups.items()},
        "average": _mean(languages, list(languages)),
        "detail": {},
    }


def _mean(languages: Mapping[str, Any], members: Sequence[str]) -> dict[str, Any]:
    return {"n": len(members), "score": float(np.mean([languages[member]["score"] for member in members]))}


def compare_finetuned(
    before: Mapping[str, Any], after: Mapping[str, Any], *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Any]:
    """Paired test of two fine-tuned models by their scores of single items, in percentage points.

    An item's score is whether a pair is right, the F1 of an answer, or the share of a sentence's words that are tagged right:
    for tags, the difference is thus one of accuracy within sentences, not one of chunk F1.

    Raises:
        ValueError: The two were not measured on the same items.
    """
    languages = list(after["languages"])
    for language in languages:
        old, new = (result["data"]["test"].get(language) for result in (before, after))
        if old != new:
            raise DataMismatchError(
                f"The two results for {language!r} are over different items. Evaluate both on the same data."
            )
    items = [
        {language: result["languages"][language]["items"] for language in languages} for result in (before, after)
    ]
    options: dict[str, Any] = {"resamples": resamples, "seed": seed}
    tests = {language: paired_bootstrap(items[0][language], items[1][language], **options) for language in languages}
    adjusted = holm({language: test.p_value for language, test in tests.items()})
    pooled = pooled_paired_bootstrap(*items, **options)
    means = [{language: 100 * float(np.mean(side[language])) for language in languages} for side in items]
    sides = [float(np.mean(list(side.values()))) for side in means]
    return {
        "languages": {
            language: {
                "before": means[0][language],
                "after": means[1][language],
                **asdict(test),
                "p_adjusted": adjusted[language],
                "verdict": verdict(test.difference, adjusted[language]),
            }
            for language, test in tests.items()
        },
        "pooled": {
            "languages": len(languages),
            "before": sides[0],
            "after": sides[1],
            **asdict(pooled),
            "verdict": verdict(pooled.difference, pooled.p_value),
        },
        "settings": {"test": "paired bootstrap over items", "correction": "Holm", "alpha": ALPHA}
        | {"confidence": CONFIDENCE, **options},
    }


# --------------------------------------------------------------------------------------------------------------- mteb


def _mteb_tasks() -> Any:
    """The module that needs the extra."""
    try:
        from metaphrase.evaluation import mteb_tasks
    except ModuleNotFoundError as error:
        raise NoData(f"{error.name} is not installed: pip install 'metaphrase[mteb]'") from error
    return mteb_tasks


def _find_mteb(data: Path | None, settings: Settings) -> Iterator[Part]:
    local = _parallel_folders(data, settings)
    known = [name for name in local if name in ("tatoeba", "udhr")]
    for name in settings.tasks or known or local:
        if name in local:
            sets, files = local[name]
            protocol = f"MTEB bitext mining, F1 of top-1 by cosine, both directions{_stripped(settings)}"
            yield Part(f"mteb {name}", "mteb", protocol, files, _size(files), partial(_mteb, name, sets))
        else:
            yield Part(f"mteb {name}", "mteb", "MTEB's task, data from the Hub", (), 0, partial(_mteb, name, None))


def _mteb(name: str, sets: Mapping[str, ParallelSet] | None, subject: Subject) -> dict[str, Scores]:
    tasks = _mteb_tasks()
    if sets is None:
        chosen = tasks.get_tasks([name], subject.settings.languages)
    else:
        chosen = [tasks.bitext_task(f"{name}-bitext", sets)]
        texts = list(chain.from_iterable((*one.sources, *one.targets) for one in sets.values()))
        prompt = resolve_prompt(subject.model, subject.settings.prompt)
        with packed(subject.model):
            subject.encode(
                texts, prompt=prompt, batch_size=subject.batch_size, show_progress_bar=subject.show_progress
            )
    result = tasks.evaluate_mteb(
        subject.model,
        chosen,
        subject.folder.parent / "mteb",
        name=subject.name,
        prompt=subject.settings.prompt,
        batch_size=subject.batch_size,
        show_progress=subject.show_progress,
        encode=subject.encode,
    )
    if result["unavailable"]:
        raise NoData("; ".join(result["unavailable"].values()))
    (task,) = result["tasks"].values()
    groups = STS22_GROUPS if name.startswith("STS22") else {}
    return {
        f"mteb {name}": {
            "kind": "mteb",
            "measure": task["measure"],
            "lower_is_better": False,
            "languages": task["languages"],
            "groups": {
                group: _mean(task["languages"], members)
                for group, members in groups.items()
                if task["languages"].keys() >= set(members)
            },
            "average": {"n": len(task["languages"]), "score": task["average"]},
            "detail": result,
        }
    }


# ---------------------------------------------------------------------------------------------------------- the table

_BOOTSTRAP = ("resamples", "seed")
SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            "retrieval",
            "a folder of xx-en.tsv.gz or xx-en.test.tsv.gz (tatoeba, udhr, …)",
            _find_retrieval,
            ("prompt", "languages", "text_equality", "strip_quotes", *_BOOTSTRAP),
        ),
        Suite(
            "sts",
            "a folder of stsb-xx-test.csv.gz (but for STS22, whose data the Hub has)",
            _find_sts,
            ("prompt", "languages", *_BOOTSTRAP),
        ),
        Suite(
            "mining",
            "a folder of BUCC's files (zh-en.sample.zh.gz, …)",
            _find_mining,
            ("prompt", "languages", "margin", "k", "retrieval", *_BOOTSTRAP),
        ),
        Suite("word-alignment", "a folder with test.xx, test.yy and test.xx.yy.wa", _find_word_alignment, _BOOTSTRAP),
        Suite("nli", "xnli/dev-xx.tsv.gz", partial(_find_finetuned, "nli"), ("languages",)),
        Suite("paraphrase", "pawsx/dev-xx.tsv.gz", partial(_find_finetuned, "paraphrase"), ("languages",)),
        Suite("qa", "xquad/xquad.xx.json.gz", partial(_find_finetuned, "qa"), ("languages",)),
        Suite(
            "pos",
            "ud/xx_…-ud-test.conllu.gz, English dev among them",
            partial(_find_finetuned, "pos"),
            ("languages",),
        ),
        Suite(
            "mteb",
            "a folder of xx-en.tsv.gz or xx-en.test.tsv.gz, or tasks of MTEB",
            _find_mteb,
            ("prompt", "languages", "strip_quotes"),
        ),
    )
}

#: How two scores of a kind are tested against each other. MTEB keeps no items, so that there is nothing to test.
COMPARISONS: dict[str, Callable[..., dict[str, Any]]] = {
    "retrieval": compare_retrieval,
    "xsim": _compare_xsim,
    "mining": compare_mining,
    "sts": compare_sts,
    "word-alignment": compare_word_alignment,
    "finetuned": compare_finetuned,
}


def find_parts(
    data: str | Path | None, suites: Sequence[str], settings: Settings
) -> tuple[list[Part], dict[str, str]]:
    """The parts of some suites that a folder has data for.

    Args:
        data: The folder; without one there is what the Hub has data for: STS22, and MTEB's tasks that are named.
        suites: Names in `SUITES`.
        settings: How they are measured.

    Returns:
        The parts, and for each suite that has none what it needs.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: A data set is malformed.
    """
    folder = Path(data) if data is not None else None
    if folder is not None and not folder.is_dir():
        raise MissingFileError(f"{folder} is no folder.")
    parts: list[Part] = []
    missing = {}
    for name in suites:
        suite = SUITES[name]
        embedded = {path for part in parts for path in part.files}
        found = list(suite.find(folder, settings))
        # MTEB's encoder remembers what retrieval has embedded.
        parts += [
            replace(part, work=0) if part.suite == "mteb" and embedded.issuperset(part.files) else part
            for part in found
        ]
        if not any(part.files for part in found) and not (name == "mteb" and settings.tasks):
            missing[name] = f"needs {suite.needs}"
    return parts, missing


def compare(before: Mapping[str, Scores], after: Mapping[str, Scores], settings: Settings) -> dict[str, Any]:
    """Test all scores that two models share against each other; those that have no test are left out."""
    compared = {}
    for name, scores in after.items():
        if scores["kind"] in COMPARISONS and name in before:
            resamples = min(STS_RESAMPLES, settings.resamples) if scores["kind"] == "sts" else settings.resamples
            test = COMPARISONS[scores["kind"]]
            compared[name] = test(before[name]["detail"], scores["detail"], resamples=resamples, seed=settings.seed)
    return compared


# ------------------------------------------------------------------------------------------------------------ running


def speed(model: SentenceTransformer, *, batch_size: int = 32) -> float:
    """Seconds that a model needs for a byte of text, from a minute's fraction of encoding the bundled texts."""
    folder = resources("metaphrase").joinpath("data", "udhr")
    texts: list[str] = []
    for language in ("sw", "de", "hi", "zh"):
        lines = gzip.decompress(folder.joinpath(f"{language}-en.tsv.gz").read_bytes()).decode().splitlines()[1:17]
        texts += [text for line in lines for text in line.split("\t")[:2]]
    with packed(model):
        model.encode(texts[:8], batch_size=batch_size, show_progress_bar=False)
        start = time.perf_counter()
        model.encode(texts, batch_size=batch_size, show_progress_bar=False)
    return (time.perf_counter() - start) / sum(len(text.encode()) for text in texts)


def kept(part: Part, subject: Subject) -> Path:
    """File of a part's result: its name tells the data and the settings, its folder the model."""
    key = {
        "part": part.name,
        "suite": part.suite,
        "revision": REVISION,
        "data": files_sha256(part.files),
        "settings": _relevant(part, subject),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=list).encode()).hexdigest()
    return subject.folder / f"{part.name.replace(' ', '-').replace('/', '-')}-{digest[:8]}.json"


def _relevant(part: Part, subject: Subject) -> dict[str, Any]:
    """The settings that a part's result depends on; of the prompt, the text."""
    relevant = {name: getattr(subject.settings, name) for name in SUITES[part.suite].reads}
    if "prompt" in relevant:
        relevant["prompt"] = resolve_prompt(subject.model, subject.settings.prompt)
    if part.suite == "mteb" and subject.settings.prompt == "auto":
        relevant["passage prompt"] = subject.model.prompts.get("passage")
    return relevant | dict(part.fixed)


def described(part: Part, subject: Subject) -> str:
    """A part's protocol, with how the model embeds sentences where that decides the scores."""
    if "prompt" not in SUITES[part.suite].reads:
        return part.protocol
    how = _protocol(subject.model)
    prompt = resolve_prompt(subject.model, subject.settings.prompt)
    return (
        f"{part.protocol}; {how['pooling']} pooling of layer {how['layer']}, {how['max_length']} tokens, "
        f"{f'prompt {prompt!r}' if prompt else 'no prompt'}"
    )


def run_part(part: Part, subject: Subject) -> dict[str, Any]:
    """Measure a part, or read what was measured before.

    Returns:
        ``scores`` by their names, and ``part``, ``suite``, ``protocol``, ``settings``, ``data`` (files and digest),
        ``model``, ``model_hash`` and ``seconds``.

    Raises:
        NoData: Its data are not there.
    """
    path = kept(part, subject)
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    start = time.perf_counter()
    scores = part.measure(subject)
    protocol = described(part, subject)
    for one in scores.values():
        one["protocol"] = protocol
    result = {
        "part": part.name,
        "suite": part.suite,
        "protocol": protocol,
        "model": subject.name,
        "model_hash": subject.sha,
        "settings": asdict(subject.settings),
        "data": {"files": [path.name for path in part.files], "sha256": files_sha256(part.files)},
        "scores": scores,
        "seconds": round(time.perf_counter() - start, 1),
        "hardware": hardware(),
        "versions": versions(),
    }
    write_json(path, result)
    return json.loads(path.read_text(encoding="utf-8"))
