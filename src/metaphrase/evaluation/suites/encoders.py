"""The suites that measure an encoder as it is; those that train it or a probe for a task are in `transfer`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from metaphrase.aligners.embedding import EmbeddingAligner
from metaphrase.corpus.codes import standard_code
from metaphrase.corpus.parallel import (
    PARALLEL_FILE,
    TARGET_LANGUAGE,
    ParallelSet,
    load_parallel_folder,
    parallel_files,
)
from metaphrase.evaluation.answer_retrieval import answer_files, evaluate_answer_retrieval, load_answer_folder
from metaphrase.evaluation.bucc import (
    PROTOCOLS,
    Protocol,
    bucc_files,
    bucc_languages,
    bucc_protocol,
    evaluate_mining,
    load_bucc_folder,
)
from metaphrase.evaluation.encoding import encode_texts
from metaphrase.evaluation.measures import STS_RESAMPLES
from metaphrase.evaluation.result import Result, complete_groups, mean_of
from metaphrase.evaluation.retrieval import evaluate_retrieval, xsim_error
from metaphrase.evaluation.sib200 import (
    ENGLISH,
    XLMR_LANGUAGES,
    evaluate_topics,
    language_groups,
    load_topics,
    measured,
    topic_files,
    topic_pairs,
)
from metaphrase.evaluation.sts import STS22_GROUPS, STS_FILE, STSSet, cross_lingual, evaluate_sts, load_sts_folder
from metaphrase.evaluation.suites.benchmarks import (
    Benchmark,
    DataUnavailable,
    Settings,
    Subject,
    folder_name,
    folders,
    load_mteb_tasks,
    text_size,
    wanted_languages,
)
from metaphrase.evaluation.word_alignment import (
    RULES,
    GoldPair,
    evaluate_word_alignment,
    load_gold_lines,
    load_wpt,
    peer_scores,
    tune_rule,
)
from metaphrase.evaluation.xsimpp import NEIGHBOURS, evaluate_xsimpp
from metaphrase.io.digests import files_sha256

#: Number of neighbours in the margin of xsim.
XSIM_K = 4
#: Folders that hold a test set although their files name no split.
_TEST_SETS = ("tatoeba", "udhr")
#: Bytes encoded per byte of XQuAD-R's files, which have each sentence twice.
_ANSWER_WORK = {"sentence": 0.5, "paragraph": 2.5}
_STRIPPED = ", quotation marks stripped"
_REPEATED = {"keep": "repeated lines kept", "unify": "repeated lines unified and excluded"}

Results = dict[str, Result]

# Retrieval


def strip_quotes(sets: Mapping[str, ParallelSet]) -> dict[str, ParallelSet]:
    """Remove each ``"`` from test sets.

    Reference: Li et al. 2023 (DAP), whose released code reads Tatoeba in this way.
    """
    stripped = {}
    for language, one in sets.items():
        sources, targets = (tuple(text.replace('"', "") for text in side) for side in (one.sources, one.targets))
        stripped[language] = replace(one, sources=sources, targets=targets)
    return stripped


class ParallelFolder(NamedTuple):
    """The parallel test sets of a folder: its files of a split, or without a split, by language."""

    folder: Path
    split: str | None
    files: Mapping[str, Path]
    settings: Settings

    def read(self) -> dict[str, ParallelSet]:
        """The pairs that are measured, at most ``settings.first`` of each language, in the form of the settings."""
        sets = load_parallel_folder(self.folder, list(self.files), self.split)
        if self.settings.strip_quotes:
            sets = strip_quotes(sets)
        return {code: one.rows(range(len(one.sources))[: self.settings.first]) for code, one in sets.items()}

    def benchmark(self, name: str, suite: str, protocol: str, measure: Callable[[Subject], Results]) -> Benchmark:
        """A benchmark of these test sets."""
        files = tuple(self.files.values())
        return Benchmark(name, suite, protocol, files, text_size(files), measure)


def parallel_folders(data: Path | None, settings: Settings) -> dict[str, ParallelFolder]:
    """Test sets in a folder or its subfolders, by name.

    A folder that itself holds parallel files is the only test set; without ``settings.split``, its files without a split
    are read, or else those of the split ``test``. In subfolders, the split ``test`` is read first. Files without a split
    are a test set only in a subfolder that is named as one, because a corpus or a dictionary has the same format.

    Raises:
        MissingFileError: The folder itself lacks the split or a language.
    """
    if data is not None and any(data.glob("*-en.*tsv*")):
        tested = any(data.glob("*-en.test.tsv*")) and not any(data.glob("*-en.tsv*"))
        split = settings.split or ("test" if tested else None)
        # The languages of a sample are fixed, and a folder may lack some of them.
        files = parallel_files(data, settings.languages if settings.first is None else None, split)
        chosen = {language: files[language] for language in wanted_languages(files, settings)}
        return {folder_name(data): ParallelFolder(data, split, chosen, settings)} if chosen else {}
    found = {}
    for folder in folders(data):
        split = settings.split or ("test" if any(folder.glob("*-en.test.tsv*")) else None)
        paths = sorted(folder.glob(f"*-en.{split}.tsv*" if split else "*-en.tsv*"))
        paths = [
            path for path in paths if PARALLEL_FILE.fullmatch(path.name)
        ] or paths  # without checksums of the files
        files = {path.name.partition("-en.")[0]: path for path in paths}
        chosen = {language: files[language] for language in wanted_languages(files, settings)}
        if chosen and (split or folder.name in _TEST_SETS):
            found[folder_name(folder)] = ParallelFolder(folder, split, chosen, settings)
    return found


def find_retrieval(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    """The test sets of a folder or of its subfolders."""
    retrieved_by = "cosine" if settings.margin_k is None else f"ratio margin, k={settings.margin_k}"
    equal = ", equal texts count" if settings.text_equality else ""
    protocol = f"top-1 by {retrieved_by}{equal}{_STRIPPED * settings.strip_quotes}; xsim (ratio margin, k={XSIM_K})"
    for name, tests in parallel_folders(data, settings).items():
        yield tests.benchmark(name, "retrieval", protocol, partial(_measure_retrieval, name, tests))


def _measure_retrieval(name: str, tests: ParallelFolder, subject: Subject) -> Results:
    """Accuracy and xsim error, each with both directions and their mean."""
    settings, sets = subject.settings, tests.read()
    accuracy, margin = (
        evaluate_retrieval(
            subject.model, sets, text_equality=settings.text_equality, margin_k=margin_k, **subject.options()
        )
        for margin_k in (settings.margin_k, XSIM_K)
    )
    results = {name: accuracy, f"{name} xsim": xsim_error(margin)}
    return {
        key: replace(one, settings={**one.settings, "strip_quotes": settings.strip_quotes})
        for key, one in results.items()
    }


# Mining


def find_mining(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    """A benchmark for each folder and each protocol whose splits are available."""
    for folder in folders(data):
        nested = any(folder.glob(f"*-{TARGET_LANGUAGE}/*"))
        if folder != data and folder.name.endswith(f"-{TARGET_LANGUAGE}") and not nested:
            continue  # its files are found in the folder around it
        for protocol in settings.protocols or PROTOCOLS:
            tuned, scored, *defaults = bucc_protocol(protocol)
            languages = wanted_languages(bucc_languages(folder, cast("Protocol", protocol)), settings)
            files = bucc_files(folder)
            parts = [files[language][split] for language in languages for split in dict.fromkeys((tuned, scored))]
            used = tuple(chain.from_iterable(part.values() for part in parts))
            if not used:
                continue
            fixed = {
                "duplicates": settings.duplicates or defaults[0],
                "comparison": settings.comparison or defaults[1],
            }
            yield Benchmark(
                f"{folder_name(folder)} {protocol}",
                "mining",
                f"{protocol}: threshold from {tuned}, scored on {scored}; {settings.margin} margin, k={settings.k}, "
                f"{settings.retrieval} retrieval, {_REPEATED[fixed['duplicates']]}, score {fixed['comparison']} threshold",
                used,
                text_size(path for path in used if ".gold" not in path.name),
                partial(_measure_mining, folder, protocol, languages, fixed),
                fixed,
            )


def _measure_mining(
    folder: Path, protocol: Any, languages: Sequence[str], fixed: Mapping[str, Any], subject: Subject
) -> Results:
    result = evaluate_mining(
        subject.model,
        load_bucc_folder(folder, protocol, languages),
        protocol=protocol,
        k=subject.settings.k,
        margin=subject.settings.margin,
        retrieval=subject.settings.retrieval,
        device="cuda" if torch.cuda.is_available() else None,
        **fixed,
        **subject.options(),
    )
    return {f"{folder_name(folder)} {protocol}": result}


# Semantic similarity


def find_sts(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    """STS-B in a folder and its subfolders, then STS22."""
    for folder in folders(data):
        matches = {path: STS_FILE.fullmatch(path.name) for path in folder.glob("*-test.csv*")}
        files = {match["language"]: path for path, match in matches.items() if match}
        if wanted := wanted_languages(sorted(files), settings):
            read = sorted({*wanted, *({TARGET_LANGUAGE} & files.keys())})
            used = tuple(files[language] for language in read)
            yield Benchmark(
                folder_name(folder),
                "sts",
                "Spearman of the cosine ×100, test set; in each language, and across it and English",
                used,
                text_size(used),
                partial(_measure_sts, folder, wanted, read, settings.first),
            )
    if settings.first is None:
        yield Benchmark("sts22", "sts", "Spearman of the cosine ×100; 18 subsets, and without fr-pl", (), 0, _sts22)


def _measure_sts(
    folder: Path, languages: Sequence[str], read: Sequence[str], first: int | None, subject: Subject
) -> Results:
    sets = {code: one.rows(range(len(one.scores))[:first]) for code, one in load_sts_folder(folder, read).items()}
    crossed = cross_lingual(sets)
    name = folder_name(folder)
    results = {name: _evaluate_sts(subject, {code: sets[code] for code in languages})}
    return results | ({f"{name} cross-lingual": _evaluate_sts(subject, crossed)} if crossed else {})


def _evaluate_sts(
    subject: Subject, sets: Mapping[str, STSSet], groups: Mapping[str, Sequence[str]] | None = None
) -> Result:
    return evaluate_sts(subject.model, sets, groups=groups, **subject.options(STS_RESAMPLES))


def _sts22(subject: Subject) -> Results:
    tasks = load_mteb_tasks()
    try:
        (task,) = tasks.get_tasks(["STS22"], subject.settings.languages)
        sets = tasks.sts_sets(task)
    except (OSError, ValueError) as error:
        raise DataUnavailable(str(error).partition("\n")[0]) from error
    return {"sts22": _evaluate_sts(subject, sets, STS22_GROUPS)}


# Word alignment


def find_word_alignment(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    """The gold links in a folder and its subfolders, in the layouts of `load_wpt` and `load_gold_lines`."""
    for folder in folders(data):
        for gold in sorted((*folder.glob("test.*.*.wa"), *folder.glob("*.gold"))):
            name, read, files = _gold(gold)
            if all(file.exists() for file in files):
                peers = tuple(sorted(folder.glob(f"{gold.stem}.*.out"))) if gold.suffix == ".gold" else ()
                yield Benchmark(
                    name,
                    "word-alignment",
                    "AER of links between token states; tuned: layer, method, level and threshold from the first fifth of "
                    "the pairs, measured on the others",
                    (*files, *peers),
                    5 * text_size(files),
                    partial(_measure_word_alignment, name, read, files, peers, settings.first),
                    fixed={"rules": RULES},
                )


def _gold(gold: Path) -> tuple[str, Callable[..., list[GoldPair]], tuple[Path, ...]]:
    """Name, reader and files of gold links."""
    if gold.suffix == ".gold":
        return f"{folder_name(gold.parent)} {gold.stem}", load_gold_lines, (gold.with_suffix(".src-tgt"), gold)
    _, one, other, _ = gold.name.split(".")
    return folder_name(gold.parent), load_wpt, (gold.with_name(f"test.{one}"), gold.with_name(f"test.{other}"), gold)


def _measure_word_alignment(
    name: str,
    read: Callable[..., list[GoldPair]],
    files: tuple[Path, ...],
    peers: tuple[Path, ...],
    first: int | None,
    subject: Subject,
) -> Results:
    """With the default settings on all pairs, and with the best settings of the first fifth on the other pairs.

    The settings are not tuned on a sample, and peers are not scored on it.
    """
    pairs = read(*files)[:first]
    peers, fifth = (peers, len(pairs) // 5) if first is None else ((), 0)

    def measure(start: int, aligner: EmbeddingAligner | None = None, **facts: Any) -> Result:
        others = {path.name: 100 * peer_scores(pairs, path, first=start).aer for path in peers}
        result = evaluate_word_alignment(
            subject.model,
            {name: pairs[start:]},
            sha256={name: files_sha256(files)},
            name=subject.name,
            aligner=aligner,
            batch_size=subject.batch_size,
            resamples=subject.settings.resamples,
            seed=subject.settings.seed,
            show_progress=subject.show_progress,
        )
        return replace(result, facts=facts | ({"peers": others} if others else {}))

    results = {name: measure(0)}
    if fifth:
        layer, rule, tried = tune_rule(subject.model, pairs[:fifth], batch_size=subject.batch_size)
        aligner = EmbeddingAligner(subject.model, layer=layer, batch_size=subject.batch_size, **rule._asdict())
        rows = [{"layer": at, **one._asdict(), "aer": 100 * aer} for (at, one), aer in tried.items()]
        results[f"{name} tuned"] = measure(fifth, aligner, tried=rows)
    return results


# Answer retrieval


def find_answer_retrieval(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    """XQuAD-R, in a folder of this name."""
    for folder in folders(data):
        files = answer_files(folder) if folder_name(folder) == "xquad-r" else {}
        wanted = wanted_languages(files, settings)
        if len(wanted) > 1:
            used = tuple(files[language] for language in wanted)
            yield Benchmark(
                "xquad-r",
                "answer-retrieval",
                f"answers in one pool of {len(wanted)} languages, by cosine; text of a candidate: {settings.answer_text}",
                used,
                text_size(used) * _ANSWER_WORK[settings.answer_text],
                partial(_measure_answers, folder, wanted, settings.first),
            )


def _measure_answers(folder: Path, languages: Sequence[str], first: int | None, subject: Subject) -> Results:
    sets = load_answer_folder(folder, languages)
    results = evaluate_answer_retrieval(
        subject.model,
        {language: one.first_questions(first) for language, one in sets.items()},
        answer_text=subject.settings.answer_text,
        **subject.options(STS_RESAMPLES),
    )
    return {f"xquad-r {measure}": result for measure, result in results.items()}


# SIB-200


def _topic_folders(data: Path | None, settings: Settings) -> Iterator[dict[str, dict[str, Path]]]:
    """SIB-200, in a folder of this name: the files of English and of the other languages by split."""
    for folder in folders(data):
        files = topic_files(folder) if folder_name(folder) == "sib200" else {}
        # "fa" is pes_Arab, although prs_Arab has the same standard code.
        named = {standard_code(code) or code: code for code in files}
        named |= {language: code for language, code in XLMR_LANGUAGES.items() if code in files}
        asked = list(files) if settings.languages is None else [named[x] for x in settings.languages if x in named]
        wanted = [language for language in dict.fromkeys(asked) if language != ENGLISH]
        if wanted and ENGLISH in files:
            yield {language: files[language] for language in (ENGLISH, *wanted)}


def find_sib200(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    """Retrieval and topics of SIB-200."""
    for files in _topic_folders(data, settings):
        used = tuple(path for splits in files.values() for path in splits.values())
        yield Benchmark(
            "sib200",
            "sib200",
            "top-1 by cosine, both directions; topics: logistic regression on English embeddings of train, measured "
            "on test, or dev without test",
            used,
            text_size(used),
            partial(_measure_sib200, files, settings.first),
            {"intervals": "shared items"},
        )


def _measure_sib200(files: Mapping[str, Mapping[str, Path]], first: int | None, subject: Subject) -> Results:
    """Retrieval and topics; a sample is measured, but the classifier is trained on all English sentences."""
    whole = load_topics(files)
    sets = {language: one.first_sentences(first) for language, one in whole.items()}
    trained = subject.settings.trained_languages or ()
    retrieval = evaluate_retrieval(
        subject.model,
        topic_pairs(sets),
        groups=language_groups([language for language in files if language != ENGLISH], trained),
        shared_items=True,
        **subject.options(),
    )
    topics = evaluate_topics(
        subject.model, sets, train=whole[ENGLISH], trained=trained, **subject.options(STS_RESAMPLES)
    )
    return {"sib200": replace(retrieval, suite="sib200"), "sib200 topics": topics}


# xsim++


def find_xsimpp(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    """The test sets of `find_retrieval`, and SIB-200 with the split that its topics are measured on."""
    protocol = f"xx→en by ratio margin, k={NEIGHBOURS}, among the targets and English distractors"
    for name, tests in parallel_folders(data, settings).items():
        yield tests.benchmark(f"{name} xsim++", "xsim++", protocol, partial(_measure_xsimpp, name, tests.read))
    for files in _topic_folders(data, settings):
        used = tuple(path for splits in files.values() for path in splits.values())
        work = text_size(used) / 8  # one split of two or three
        measure = partial(_measure_xsimpp, "sib200", partial(_sib200_pairs, files, settings.first))
        yield Benchmark("sib200 xsim++", "xsim++", protocol, used, work, measure)


def _measure_xsimpp(name: str, read: Callable[[], Mapping[str, ParallelSet]], subject: Subject) -> Results:
    return {f"{name} xsim++": evaluate_xsimpp(subject.model, read(), **subject.options(STS_RESAMPLES))}


def _sib200_pairs(files: Mapping[str, Mapping[str, Path]], first: int | None) -> dict[str, ParallelSet]:
    sets = load_topics(files)
    split = measured(sets[ENGLISH])
    return topic_pairs({code: one.split_only(split).first_sentences(first) for code, one in sets.items()})


# MTEB


def find_mteb(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    """The test sets of a folder as tasks, or the tasks of the settings."""
    local = parallel_folders(data, settings)
    known = [name for name in local if name in _TEST_SETS]
    for name in settings.tasks or known or local:
        if name in local:
            protocol = f"MTEB bitext mining, F1 of top-1 by cosine, both directions{_STRIPPED * settings.strip_quotes}"
            measure = partial(_measure_mteb, name, local[name])
            yield local[name].benchmark(f"mteb {name}", "mteb", protocol, measure)
        else:
            measure = partial(_measure_mteb, name, None)
            yield Benchmark(f"mteb {name}", "mteb", "MTEB's task, data from the Hub", (), 0, measure)


def _measure_mteb(name: str, tests: ParallelFolder | None, subject: Subject) -> Results:
    tasks = load_mteb_tasks()
    if tests is None:
        chosen = tasks.get_tasks([name], subject.settings.languages)
    else:
        sets = tests.read()
        chosen = [tasks.bitext_task(f"{name}-bitext", sets)]
        texts = list(chain.from_iterable((*one.sources, *one.targets) for one in sets.values()))
        encode_texts(subject.model, texts, **subject.encoding())  # once; MTEB asks for the same texts many times
    folder = subject.output / "mteb"
    try:
        found = tasks.evaluate_mteb(subject.model, chosen, folder, name=subject.name, **subject.encoding())
    except OSError as error:
        if tests is not None:  # not an error of the Hub
            raise
        raise DataUnavailable(str(error).partition("\n")[0]) from error
    (result,) = found.values()
    groups = complete_groups(STS22_GROUPS if name.startswith("STS22") else {}, result.languages)
    means = {group: mean_of([result.languages[one] for one in members]) for group, members in groups.items()}
    return {f"mteb {name}": replace(result, groups=means)}
