"""The suites that measure an encoder as it is; those that train it or a probe for a task are in `transfer`.

For each suite a function finds the data sets in a folder and yields a benchmark for each, which measures them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

from metaphrase.aligners.embedding import EmbeddingAligner
from metaphrase.corpus import parallel
from metaphrase.corpus.parallel import TARGET_LANGUAGE, ParallelSet
from metaphrase.corpus.text import MAX_CHARS, read_lines
from metaphrase.evaluation import answer_retrieval, bucc, distractors, sib200, sts, word_alignment, xsimpp
from metaphrase.evaluation.encoding import encode_texts
from metaphrase.evaluation.guard_data import spread
from metaphrase.evaluation.measures import FEWER_RESAMPLES
from metaphrase.evaluation.result import Result, complete_groups, mean_of
from metaphrase.evaluation.retrieval import evaluate_retrieval, xsim_error
from metaphrase.evaluation.suites.benchmarks import (
    Benchmark,
    DataUnavailable,
    Find,
    Settings,
    Subject,
    folder_name,
    folders,
    load_mteb_tasks,
    text_size,
    wanted_languages,
    warn_absent,
)
from metaphrase.exceptions import DataError, MissingFileError, UsageError
from metaphrase.io.digests import files_sha256

logger = logging.getLogger(__name__)

#: Number of neighbours in the margin of xsim.
XSIM_K = 4
#: Folders that hold a test set although their files name no split.
_TEST_SETS = ("tatoeba", "udhr")
#: Bytes encoded per byte of XQuAD-R's files, which have each sentence twice.
_ANSWER_WORK: dict[answer_retrieval.AnswerText, float] = {"sentence": 0.5, "paragraph": 2.5}
#: Settings that the tasks of MTEB without parallel test sets depend on.
_MTEB_READS = ("prompt", "bf16", "languages")
_STRIPPED = ", quotation marks stripped"
_UNQUOTED = "; texts without the quotes of the files"
_REPEATED = {"keep": "repeated lines kept", "unify": "repeated lines unified and excluded"}

Results = dict[str, Result]
#: Test sets by name and language.
Sets = dict[str, dict[str, ParallelSet]]


def in_each_folder(find: Callable[[Path, Settings], Iterable[Benchmark]]) -> Find:
    """Decorator: find the benchmarks of a folder and of its subfolders."""

    def find_all(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
        for folder in folders(data):
            yield from find(folder, settings)

    return find_all


# Retrieval


class ParallelFolder(NamedTuple):
    """The parallel test sets of a folder: its files of a split, or without a split, by language."""

    folder: Path
    split: str | None
    files: Mapping[str, Path]
    settings: Settings

    def read(self) -> dict[str, ParallelSet]:
        """The pairs that are measured, at most ``settings.first`` of each language.

        ``settings.strip_quotes`` removes each ``"``, as the released code of DAP (Li et al. 2023) reads Tatoeba.
        """
        sets = parallel.load_parallel_folder(self.folder, list(self.files), self.split)
        for language, one in sets.items() if self.settings.strip_quotes else ():
            sources, targets = (tuple(text.replace('"', "") for text in side) for side in (one.sources, one.targets))
            sets[language] = replace(one, sources=sources, targets=targets)
        return {code: one.rows(range(len(one.sources))[: self.settings.first]) for code, one in sets.items()}

    def benchmark(self, name: str, suite: str, protocol: str, measure: Callable[[Subject], Results]) -> Benchmark:
        """A benchmark of these test sets."""
        files = tuple(self.files.values())
        return Benchmark(name, suite, protocol, files, text_size(files), measure)


def read_test_folders(folders: Iterable[str | Path], languages: Sequence[str] = ()) -> Sets:
    """Read the test sets of folders, or of their subfolders, as `metaphrase evaluate` does, by name and language.

    Raises:
        UsageError: Two folders have the same name.
    """
    found: Sets = {}
    for folder in map(Path, folders):
        parts: Sets = {}
        if folder.is_dir() and not any(folder.glob("*-en.*tsv*")):
            parts = {
                name: one.read() for name, one in parallel_folders(folder, Settings(languages=list(languages))).items()
            }
            # A corpus or a dictionary has the same format.
            if skipped := sorted({path.parent.name for path in folder.glob("*/*-en.tsv*")} - parts.keys()):
                logger.warning(
                    "%s: %s without files of the split 'test' is not measured. To measure it, name the folder itself.",
                    folder,
                    ", ".join(skipped),
                )
        for name, sets in (
            parts or {folder.resolve().name: parallel.load_test_folder(folder, languages or None)}
        ).items():
            if name in found:
                raise UsageError(
                    f"Two folders of test sets are named {name!r}; their results would overwrite each other. Rename one."
                )
            found[name] = sets
    return found


def parallel_folders(data: Path | None, settings: Settings) -> dict[str, ParallelFolder]:
    """Test sets in a folder or its subfolders, by name.

    A folder that itself holds parallel files is the only test set. Without ``settings.split``, the files of the split
    ``test`` are read, or else those without a split. In a subfolder, these are a test set only if it is named as one, because
    a corpus or a dictionary has the same format.

    Raises:
        MissingFileError: The folder itself lacks the split or a language.
    """
    if data is not None and any(data.glob("*-en.*tsv*")):
        split = settings.split or parallel.test_split(data)
        # The languages of a sample are fixed, and a folder may lack some of them.
        files = parallel.parallel_files(data, settings.languages if settings.first is None else None, split)
        return _parallel_folder(data, split, files, settings)
    found: dict[str, ParallelFolder] = {}
    for folder in folders(data):
        split = settings.split or parallel.test_split(folder)
        paths = sorted(folder.glob(f"*-en.{split}.tsv*" if split else "*-en.tsv*"))
        # Checksums of the files have similar names.
        known = [path for path in paths if parallel.PARALLEL_FILE.fullmatch(path.name)]
        if split or folder.name in _TEST_SETS:
            files = {path.name.partition("-en.")[0]: path for path in known or paths}
            found |= _parallel_folder(folder, split, files, settings)
    return found


def _parallel_folder(
    folder: Path, split: str | None, files: Mapping[str, Path], settings: Settings
) -> dict[str, ParallelFolder]:
    """The test sets of a folder by name, if it has a language of the settings."""
    chosen = {language: files[language] for language in wanted_languages(files, settings, folder)}
    return {folder_name(folder): ParallelFolder(folder, split, chosen, settings)} if chosen else {}


def find_retrieval(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    """Accuracy and xsim error, each with both directions and their mean."""
    retrieved_by = "cosine" if settings.margin_k is None else f"ratio margin, k={settings.margin_k}"
    equal = ", equal texts count" if settings.text_equality else ""
    protocol = f"top-1 by {retrieved_by}{equal}{_STRIPPED * settings.strip_quotes}; xsim (ratio margin, k={XSIM_K})"
    for name, tests in parallel_folders(data, settings).items():
        found = tests.benchmark(name, "retrieval", protocol, partial(_measure_retrieval, name, tests))
        yield replace(found, fixed={"intervals": "shared targets"})


def _measure_retrieval(name: str, tests: ParallelFolder, subject: Subject) -> Results:
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
        for protocol in settings.protocols or bucc.PROTOCOLS:
            yield from _find_protocol(folder, cast("bucc.Protocol", protocol), settings)


def _find_protocol(folder: Path, protocol: bucc.Protocol, settings: Settings) -> Iterator[Benchmark]:
    named = bucc.bucc_protocol(protocol)
    name = f"{folder_name(folder)} {protocol}"
    fixed: dict[str, Any] = {
        "duplicates": settings.duplicates or named.duplicates,
        "comparison": settings.comparison or named.comparison,
    }
    files = bucc.bucc_files(folder)
    languages = wanted_languages(bucc.bucc_languages(folder, protocol), settings, folder)
    used = tuple(path for code in languages for split in named.splits for path in files[code][split].values())
    work = float(text_size(path for path in used if ".gold" not in path.name))
    if settings.first is not None:
        gold = (sum(1 for _ in read_lines(path, MAX_CHARS)) for path in used if ".gold" in path.name)
        work *= min(1, settings.first / max([1, *gold]))

    def measure(subject: Subject) -> Results:
        whole = bucc.load_bucc_folder(folder, protocol, languages)
        first = settings.first
        result = bucc.evaluate_mining(
            subject.model,
            {code: {name: one.first_pairs(first) for name, one in splits.items()} for code, splits in whole.items()},
            protocol=protocol,
            k=subject.settings.k,
            margin=subject.settings.margin,
            retrieval=subject.settings.retrieval,
            device="cuda" if subject.model.device.type == "cuda" else None,
            **fixed,
            **subject.options(),
        )
        return {name: result}

    if used:
        yield Benchmark(
            name,
            "mining",
            f"{protocol}: threshold from {named.tuned}, scored on {named.scored}; {settings.margin} margin, k={settings.k}, "
            f"{settings.retrieval} retrieval, {_REPEATED[fixed['duplicates']]}, score {fixed['comparison']} threshold",
            used,
            work,
            measure,
            fixed,
        )


# Semantic similarity


def find_sts(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    """STS-B in a folder and its subfolders, then STS22."""
    yield from _find_stsb(data, settings)
    if settings.first is None:
        yield Benchmark("sts22", "sts", "Spearman of the cosine ×100; 18 subsets, and without fr-pl", (), 0, _sts22)


@in_each_folder
def _find_stsb(folder: Path, settings: Settings) -> Iterator[Benchmark]:
    name = folder_name(folder)
    matches = {path: sts.STS_FILE.fullmatch(path.name) for path in folder.glob("*-test.csv*")}
    files = {match["language"]: path for path, match in matches.items() if match}
    languages = wanted_languages(sorted(files), settings, folder)
    read = sorted({*languages, *({TARGET_LANGUAGE} & files.keys())})

    def measure(subject: Subject) -> Results:
        whole = sts.load_sts_folder(folder, read)
        sets = {code: one.rows(_items(range(len(one.scores)), settings)) for code, one in whole.items()}
        sides = {name: {code: sets[code] for code in languages}, f"{name} cross-lingual": sts.cross_lingual(sets)}
        options = subject.options(FEWER_RESAMPLES)
        return {key: sts.evaluate_sts(subject.model, some, **options) for key, some in sides.items() if some}

    if languages:
        used = tuple(files[language] for language in read)
        protocol = "Spearman of the cosine ×100, test set; in each language, and across it and English"
        yield Benchmark(name, "sts", protocol, used, text_size(used), measure)


def _items(whole: Sequence[int], settings: Settings) -> Sequence[int]:
    """The items of a language that are measured."""
    if settings.first is None or not settings.spread:
        return whole[: settings.first]
    return spread(whole, settings.first)


def _sts22(subject: Subject) -> Results:
    tasks = load_mteb_tasks()
    try:
        (task,) = tasks.get_tasks(["STS22"], subject.settings.codes)
        sets = tasks.sts_sets(task)
    except (OSError, ValueError) as error:
        raise DataUnavailable(str(error).partition("\n")[0]) from error
    return {
        "sts22": sts.evaluate_sts(subject.model, sets, groups=sts.STS22_GROUPS, **subject.options(FEWER_RESAMPLES))
    }


# Word alignment


@in_each_folder
def find_word_alignment(folder: Path, settings: Settings) -> Iterator[Benchmark]:
    """The gold links of a folder, in the layouts of `load_wpt` and `load_gold_lines`."""
    for gold in sorted((*folder.glob("test.*.*.wa"), *folder.glob("*.gold"))):
        yield from _find_gold(gold, settings.first)


def _find_gold(gold: Path, first: int | None) -> Iterator[Benchmark]:
    """Gold links: measured with the default settings, and with the best settings of the first fifth on the other pairs.

    The settings are not tuned on a sample, and peers are not scored on it.
    """
    name, peers = folder_name(gold.parent), []
    read: Callable[..., list[word_alignment.GoldPair]] = word_alignment.load_wpt
    if gold.suffix == ".gold":
        name, read, files = f"{name} {gold.stem}", word_alignment.load_gold_lines, [gold.with_suffix(".src-tgt"), gold]
        peers = sorted(gold.parent.glob(f"{gold.stem}.*.out"))
    else:
        _, *sides, _ = gold.name.split(".")
        files = [*(gold.with_name(f"test.{side}") for side in sides), gold]

    def measure(subject: Subject) -> Results:
        pairs = read(*files)[:first]

        def measured_from(start: int, aligner: EmbeddingAligner | None = None, **facts: Any) -> Result:
            others = _peer_errors(pairs, peers if first is None else [], start)
            result = word_alignment.evaluate_word_alignment(
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

        results = {name: measured_from(0)}
        if first is None and (fifth := len(pairs) // 5):
            layer, rule, tried = word_alignment.tune_rule(subject.model, pairs[:fifth], batch_size=subject.batch_size)
            aligner = EmbeddingAligner(subject.model, layer=layer, batch_size=subject.batch_size, **rule._asdict())
            rows = [{"layer": at, **one._asdict(), "aer": 100 * aer} for (at, one), aer in tried.items()]
            results[f"{name} tuned"] = measured_from(fifth, aligner, tried=rows)
        return results

    if all(file.exists() for file in files):
        protocol = (
            "AER of links between token states; tuned: layer, method, level and threshold from the first fifth of the pairs, "
            "measured on the others"
        )
        used = (*files, *peers)
        yield Benchmark(
            name, "word-alignment", protocol, used, 5 * text_size(files), measure, {"rules": word_alignment.RULES}
        )


def _peer_errors(pairs: Sequence[word_alignment.GoldPair], peers: Iterable[Path], start: int) -> dict[str, float]:
    """AER in percent of the links in the files of other programs; a file without usable links is skipped with a warning."""
    errors = {}
    for path in peers:
        try:
            errors[path.name] = 100 * word_alignment.peer_scores(pairs, path, first=start).aer
        except DataError as error:
            logger.warning("Skipped the links of %s. %s", path.name, error)
    return errors


# Answer retrieval


@in_each_folder
def find_answer_retrieval(folder: Path, settings: Settings) -> Iterator[Benchmark]:
    """XQuAD-R."""
    files = _answer_files(folder, settings)

    def measure(name: str, text: answer_retrieval.AnswerText, subject: Subject) -> Results:
        sets = _read_answers(folder, files, settings)
        options = subject.options(FEWER_RESAMPLES)
        results = answer_retrieval.evaluate_answer_retrieval(subject.model, sets, answer_text=text, **options)
        return {f"{name} {measure}": result for measure, result in results.items()}

    used = tuple(files.values())
    for text, work in _ANSWER_WORK.items() if len(files) > 1 else ():
        if settings.answer_text in ("both", text):
            name = "xquad-r" if text == "sentence" else f"xquad-r {text}"
            yield Benchmark(
                name,
                "answer-retrieval",
                f"answers in one pool of {len(files)} languages, by cosine; text of a candidate: {text}",
                used,
                text_size(used) * work,
                partial(measure, name, text),
                {"answer_text": text},
                asks=True,
            )


def _answer_files(folder: Path, settings: Settings) -> dict[str, Path]:
    """The files of XQuAD-R by language, in a folder of this name."""
    files = answer_retrieval.answer_files(folder) if folder_name(folder) == "xquad-r" else {}
    return {language: files[language] for language in wanted_languages(files, settings, folder)}


def _read_answers(folder: Path, languages: Iterable[str], settings: Settings) -> dict[str, answer_retrieval.AnswerSet]:
    """The questions that are measured; of evenly spaced ones, whole paragraphs, because each adds candidates."""
    sets = answer_retrieval.load_answer_folder(folder, list(languages))
    if settings.first is None:
        return sets
    whole = next(iter(sets.values()))
    questions: Sequence[int] = range(len(whole.ids))
    if settings.spread:
        by_paragraph = whole.questions_by_paragraph()
        count = max(1, round(settings.first * len(by_paragraph) / len(questions)))
        questions = list(chain.from_iterable(spread(by_paragraph, count)))
    else:
        questions = questions[: settings.first]
    return {language: one.chosen(questions) for language, one in sets.items()}


# SIB-200


#: The files of SIB-200 by language and split.
TopicFiles = Mapping[str, Mapping[str, Path]]


def _topic_folders(data: Path | None, settings: Settings) -> Iterator[tuple[TopicFiles, tuple[Path, ...]]]:
    """SIB-200, in a folder of this name: the files of English and of the other languages, and all of them."""
    for folder in folders(data):
        files = sib200.topic_files(folder) if folder_name(folder) == "sib200" else {}
        asked = list(files) if settings.languages is None else settings.languages
        codes = {language: sib200.find_language(language, files) for language in asked}
        if files and settings.first is None:
            warn_absent(folder, [language for language, code in codes.items() if code is None])
        wanted = [code for code in dict.fromkeys(codes.values()) if code and code != sib200.ENGLISH]
        if wanted and sib200.ENGLISH in files:
            chosen = {language: files[language] for language in (sib200.ENGLISH, *wanted)}
            yield chosen, tuple(path for splits in chosen.values() for path in splits.values())


def find_sib200(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    """Retrieval and topics of SIB-200."""
    protocol = (
        "top-1 by cosine, both directions; topics: logistic regression on English embeddings of train, measured on test, or "
        f"dev without test{_UNQUOTED}"
    )
    for files, used in _topic_folders(data, settings):
        absent = [one for one in settings.trained_languages or () if sib200.find_language(one, files) is None]
        if absent and settings.first is None:
            logger.warning("--trained_languages has languages without data in SIB-200: %s.", ", ".join(absent))
        measure = partial(_measure_sib200, files, settings.first)
        fixed = {"intervals": "shared targets", "texts": _UNQUOTED}
        yield Benchmark("sib200", "sib200", protocol, used, text_size(used), measure, fixed)


def _measure_sib200(files: TopicFiles, first: int | None, subject: Subject) -> Results:
    """Retrieval and topics; a sample is measured, but the classifier is trained on all English sentences."""
    whole = sib200.load_topics(files)
    sets = {language: one.first_sentences(first) for language, one in whole.items()}
    trained = subject.settings.trained_languages or ()
    retrieval = evaluate_retrieval(
        subject.model,
        sib200.topic_pairs(sets),
        groups=sib200.language_groups([language for language in files if language != sib200.ENGLISH], trained),
        **subject.options(),
    )
    topics = sib200.evaluate_topics(
        subject.model, sets, train=whole[sib200.ENGLISH], trained=trained, **subject.options(FEWER_RESAMPLES)
    )
    return {"sib200": replace(retrieval, suite="sib200"), "sib200 topics": topics}


# xsim++


def find_xsimpp(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    """The test sets of `find_retrieval`, and SIB-200 with the split that its topics are measured on."""
    protocol = f"xx→en by ratio margin, k={xsimpp.NEIGHBOURS}, among the targets and English distractors"
    fixed = {"rules": files_sha256([Path(str(module.__file__)) for module in (distractors, xsimpp)])}
    for name, tests in parallel_folders(data, settings).items():
        found = tests.benchmark(f"{name} xsim++", "xsim++", protocol, partial(_measure_xsimpp, name, tests.read))
        yield replace(found, fixed=fixed)
    for files, used in _topic_folders(data, settings):
        work = text_size(used) / 8  # one split of two or three
        measure = partial(_measure_xsimpp, "sib200", partial(_sib200_pairs, files, settings.first))
        yield Benchmark(
            "sib200 xsim++", "xsim++", f"{protocol}{_UNQUOTED}", used, work, measure, fixed | {"texts": _UNQUOTED}
        )


def _measure_xsimpp(name: str, read: Callable[[], Mapping[str, ParallelSet]], subject: Subject) -> Results:
    return {f"{name} xsim++": xsimpp.evaluate_xsimpp(subject.model, read(), **subject.options(FEWER_RESAMPLES))}


def _sib200_pairs(files: TopicFiles, first: int | None) -> dict[str, ParallelSet]:
    sets = sib200.load_topics(files)
    split = sib200.measured(sets[sib200.ENGLISH])
    return sib200.topic_pairs({code: one.split_only(split).first_sentences(first) for code, one in sets.items()})


# MTEB


def find_mteb(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    """The test sets of a folder as tasks, or the tasks of the settings."""
    protocol = f"MTEB bitext mining, F1 of top-1 by cosine, both directions{_STRIPPED * settings.strip_quotes}"
    pairs = {
        name: tests.benchmark(
            f"mteb {name}", "mteb", protocol, partial(_measure_mteb, name, partial(_bitext_task, name, tests))
        )
        for name, tests in parallel_folders(data, settings).items()
    }
    known = [name for name in pairs if name in _TEST_SETS]
    others = chain(_mteb_topics(data, settings), _mteb_answers(data, settings))
    whole = {one.name.removeprefix("mteb "): one for one in others}
    folder_names = {folder_name(folder) for folder in folders(data)}
    for name in settings.tasks or (*(known or pairs), *whole):
        if name in folder_names and name not in pairs | whole:
            continue  # it lacks the languages
        measure = partial(_measure_mteb, name, None)
        hub = Benchmark(f"mteb {name}", "mteb", "MTEB's task, data from the Hub", (), 0, measure)
        yield (pairs | whole).get(name, hub)


def _mteb_topics(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
    protocol = (
        "MTEB's SIB200Classification: accuracy of ten classifiers in each language, each of 8 sentences of each topic of "
        f"train, measured on test, or dev without test{_UNQUOTED}"
    )
    for files, used in _topic_folders(data, settings):
        languages = {sib200.find_language(language, files) for language in settings.languages or files}
        make = partial(_topic_task, files, [language for language in files if language in languages], settings.first)
        measure = partial(_measure_mteb, "sib200", make)
        fixed = {"texts": _UNQUOTED}
        yield Benchmark("mteb sib200", "mteb", protocol, used, text_size(used), measure, fixed, _MTEB_READS)


@in_each_folder
def _mteb_answers(folder: Path, settings: Settings) -> Iterator[Benchmark]:
    protocol = (
        "MTEB's XQuADRetrieval: nDCG@10 of the sentence with the answer among the sentences of the question's language"
    )
    if files := _answer_files(folder, settings):
        used = tuple(files.values())
        work = text_size(used) * _ANSWER_WORK["sentence"]
        measure = partial(_measure_mteb, "xquad-r", partial(_answer_task, folder, list(files), settings))
        yield Benchmark("mteb xquad-r", "mteb", protocol, used, work, measure, reads=_MTEB_READS, asks=True)


def _bitext_task(name: str, tests: ParallelFolder, tasks: Any, subject: Subject) -> Any:
    sets = tests.read()
    texts = list(chain.from_iterable((*one.sources, *one.targets) for one in sets.values()))
    encode_texts(subject.model, texts, **subject.encoding())  # once; MTEB asks for the same texts many times
    return tasks.bitext_task(f"{name}-bitext", sets)


def _topic_task(files: TopicFiles, languages: Sequence[str], first: int | None, tasks: Any, subject: Subject) -> Any:
    """A sample is measured, but the classifiers are trained on all sentences."""
    sets = sib200.load_topics(files, by_id=False)
    return tasks.topic_task("sib200-classification", {language: sets[language] for language in languages}, first)


def _answer_task(folder: Path, languages: Sequence[str], settings: Settings, tasks: Any, subject: Subject) -> Any:
    return tasks.answer_task("xquad-r-retrieval", _read_answers(folder, languages, settings))


def _measure_mteb(name: str, make: Callable[[Any, Subject], Any] | None, subject: Subject) -> Results:
    """Measure the task that ``make`` creates with `mteb_tasks`, or MTEB's task of this name."""
    tasks = load_mteb_tasks()
    try:
        chosen = [make(tasks, subject)] if make else tasks.get_tasks([name], subject.settings.codes)
    except MissingFileError as error:  # MTEB has none of the languages
        raise DataUnavailable(str(error).removesuffix(".")) from error
    folder = subject.output / ("mteb-bf16" if subject.settings.bf16 else "mteb")  # MTEB's cache ignores the precision
    try:
        found = tasks.evaluate_mteb(subject.model, chosen, folder, name=subject.name, **subject.encoding())
    except OSError as error:
        if make:  # not an error of the Hub
            raise
        raise DataUnavailable(str(error).partition("\n")[0]) from error
    (result,) = found.values()
    groups = complete_groups(sts.STS22_GROUPS if name.startswith("STS22") else {}, result.languages)
    means = {group: mean_of([result.languages[one] for one in members]) for group, members in groups.items()}
    return {f"mteb {name}": replace(result, groups=means)}
