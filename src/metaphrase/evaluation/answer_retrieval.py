"""Answer retrieval from one pool of sentences in all languages.

Every question has one right answer in each language. Mean average precision (mAP) over the whole pool is high only if
right answers in other languages are closer than wrong ones in the language of the question, which retrieval from one
language does not test.

Reference: Roy et al. 2020, "LAReQA: Language-Agnostic Answer Retrieval from a Multilingual Pool".

Shapes: ``n`` questions, ``m`` candidates, ``l`` languages, ``h`` hidden.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, Unpack

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from metaphrase.corpus.parallel import add_file, rows_of
from metaphrase.corpus.text import open_text
from metaphrase.encoders.prompts import resolve_prompt
from metaphrase.evaluation.encoding import EncodingOptions, embed_sides, encoding_settings
from metaphrase.evaluation.evaluator import EmbeddingEvaluator
from metaphrase.evaluation.measures import FEWER_RESAMPLES
from metaphrase.evaluation.result import Measurement, Result, conditions, item_id, with_intervals
from metaphrase.exceptions import DataError, DataMismatchError, MissingFileError
from metaphrase.io.arguments import Resamples, Seed, checked
from metaphrase.io.digests import text_digest
from metaphrase.mining.search import distinct_rows, unit_rows

#: Text of a candidate: the sentence alone, or the sentence followed by its paragraph.
AnswerText = Literal["sentence", "paragraph"]

#: Files of XQuAD-R.
_ANSWER_FILE = re.compile(r"(?P<language>[a-z]{2,3})\.json(\.gz)?")
#: Files of questions in SQuAD's format: XQuAD-R's, ``dev-xx.json``, ``xquad.xx.json``, and MLQA's own names.
QUESTION_FILE = re.compile(
    r"(?:(?P<split>dev|test)-(?:context-)?|xquad\.)?(?P<language>[a-z]{2,3})(?:-question-(?P=language))?\.json(\.gz)?"
)
#: Maximum number of characters of a sentence that belongs to the next one, such as an abbreviation.
_SHORTEST = 15
_SENTENCE_END = re.compile(r"(?<=[.!?؟।۔።։။។])\s+|(?<=[。！？])")
#: Number of similarities held in memory (64 MB).
_CHUNK = 1 << 24


@dataclass(frozen=True)
class AnswerSet:
    """Questions and candidate sentences of one language.

    Attributes:
        language: Its code.
        ids: Ids of the questions, the same in every language.
        questions: The questions.
        answers: For each question, the number of the sentence that answers it.
        sentences: The sentences of all paragraphs.
        paragraphs: For each sentence, its paragraph.
    """

    language: str
    ids: tuple[str, ...]
    questions: tuple[str, ...]
    answers: tuple[int, ...]
    sentences: tuple[str, ...]
    paragraphs: tuple[str, ...]

    def candidates(self, text: AnswerText) -> list[str]:
        """Text of each candidate."""
        if text == "sentence":
            return list(self.sentences)
        return [f"{sentence} {paragraph}" for sentence, paragraph in zip(self.sentences, self.paragraphs, strict=True)]

    def questions_by_paragraph(self) -> list[list[int]]:
        """The numbers of the questions that each paragraph answers."""
        questions: dict[str, list[int]] = {}
        for number, answer in enumerate(self.answers):
            questions.setdefault(self.paragraphs[answer], []).append(number)
        return list(questions.values())

    def chosen(self, questions: Sequence[int]) -> AnswerSet:
        """Some questions by number, with the sentences of the paragraphs that have their answers."""
        paragraphs = {self.paragraphs[self.answers[at]] for at in questions}
        kept = [row for row, paragraph in enumerate(self.paragraphs) if paragraph in paragraphs]
        place = {row: at for at, row in enumerate(kept)}
        part = rows_of(rows_of(self, ("ids", "questions", "answers"), questions), ("sentences", "paragraphs"), kept)
        return replace(part, answers=tuple(place[answer] for answer in part.answers))


def load_answer_folder(path: str | Path, languages: Sequence[str] | None = None) -> dict[str, AnswerSet]:
    """Read XQuAD-R: files ``xx.json[.gz]`` in SQuAD's format, with ``sentences`` and ``sentence_breaks`` in each paragraph.

    The answer of a question is the sentence in which its first answer starts.

    Args:
        path: The folder.
        languages: Languages to read, in this order; None reads all, in alphabetical order.

    Raises:
        FileNotFoundError: The folder has no such files, or lacks a language.
        DataError: A file has another format.
        DataMismatchError: The questions of two languages differ.
    """
    folder = Path(path)
    files = answer_files(folder)
    if not files:
        raise MissingFileError(f"{folder} has no files named xx.json or xx.json.gz.")
    if missing := [language for language in languages or () if language not in files]:
        raise MissingFileError(f"{folder} has no questions in {', '.join(missing)}. It has: {', '.join(files)}.")
    sets = {language: _read(files[language], language) for language in dict.fromkeys(languages or files)}
    first = next(iter(sets.values()))
    for language, answer_set in sets.items():
        if answer_set.ids != first.ids:
            raise DataMismatchError(
                f"The files of {folder} must have the same questions in the same order, but the questions of {language} and "
                f"{first.language} differ ({len(answer_set.ids)} and {len(first.ids)} questions)."
            )
    return sets


def answer_files(folder: Path) -> dict[str, Path]:
    """The files of XQuAD-R in a folder by language, in alphabetical order."""
    return _matching(folder, _ANSWER_FILE).get("", {})


def question_files(folder: Path) -> dict[str, dict[str, Path]]:
    """The files of questions of a folder by split (``""`` without one) and language, in alphabetical order."""
    return _matching(folder, QUESTION_FILE)


def _matching(folder: Path, pattern: re.Pattern[str]) -> dict[str, dict[str, Path]]:
    files: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.glob("*.json*")):
        if match := pattern.fullmatch(path.name):
            add_file(files.setdefault(match.groupdict().get("split") or "", {}), match["language"], path)
    return files


def load_questions(files: Mapping[str, Path]) -> dict[str, AnswerSet]:
    """Read questions with their answers by language: XQuAD-R, or SQuAD's format, whose paragraphs are split into sentences.

    The questions of the languages may differ, as in MLQA.
    """
    return {language: _read(path, language, split=True) for language, path in files.items()}


def sentence_spans(text: str) -> Iterator[tuple[int, int]]:
    """Sentences of a text, as start and exclusive end; very short ones belong to the next.

    >>> list(sentence_spans("Dr. Smith went home early. It rained."))
    [(0, 27), (27, 37)]
    """
    start = 0
    for match in _SENTENCE_END.finditer(text):
        if match.end() - start > _SHORTEST:
            yield start, match.end()
            start = match.end()
    if start < len(text):
        yield start, len(text)


def _read(path: Path, language: str, *, split: bool = False) -> AnswerSet:
    wanted = "SQuAD's JSON" + " with 'sentences' and 'sentence_breaks' in each paragraph" * (not split)
    ids, questions, answers = [], [], []
    sentences: list[str] = []
    paragraphs: list[str] = []
    try:
        with open_text(path) as file:
            articles = json.load(file)["data"]
        for paragraph in chain.from_iterable(article["paragraphs"] for article in articles):
            context = str(paragraph["context"])
            if split and "sentences" not in paragraph:
                ends = list(sentence_spans(context))
                paragraph |= {"sentence_breaks": ends, "sentences": [context[at:end].strip() for at, end in ends]}
            breaks = [range(*ends) for ends in paragraph["sentence_breaks"]]
            if len(breaks) != len(paragraph["sentences"]):
                raise ValueError(f"{len(paragraph['sentences'])} sentences, but {len(breaks)} sentence_breaks")
            for question in paragraph["qas"]:
                start = question["answers"][0]["answer_start"]
                at = next((at for at, part in enumerate(breaks) if start in part), None)
                if at is None:
                    raise ValueError(f"no sentence has the answer of question {question['id']}")
                ids.append(str(question["id"]))
                questions.append(str(question["question"]))
                answers.append(len(sentences) + at)
            sentences += map(str, paragraph["sentences"])
            paragraphs += [context] * len(breaks)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise DataError(f"{path} must be {wanted}: {type(error).__name__} {error}.") from error
    if not ids:
        raise DataError(f"{path} has no questions.")
    return AnswerSet(language, tuple(ids), tuple(questions), tuple(answers), tuple(sentences), tuple(paragraphs))


class AnswerRanks(NamedTuple):
    """How the right answers of the questions of one language are ranked.

    Attributes:
        precision_n: Average precision in the whole pool.
        others_n: Average precision in the pool without the language of the questions; 0 if there is no other.
        reciprocal_nl: Reciprocal rank of the right answer among the candidates of each language.
        own_first_n: 1 if the first candidate of the whole pool is in the language of the question. If the best candidates
            of several languages are equally similar, each counts its share.
    """

    precision_n: NDArray[np.float64]
    others_n: NDArray[np.float64]
    reciprocal_nl: NDArray[np.float64]
    own_first_n: NDArray[np.float64]


@checked
def rank_answers(
    question_nh: NDArray[Any], candidates: Sequence[NDArray[Any]], answer_nl: NDArray[np.integer], own: int
) -> AnswerRanks:
    """Rank the candidates of all languages by cosine for the questions of one language.

    Tied candidates share the last of their ranks, so that the order of the candidates never matters: the
    precision at a right answer is the share of right answers among all candidates that are at least as similar, as in
    scikit-learn's ``average_precision_score``.

    Args:
        question_nh: Embeddings of the questions, shape ``(n, hidden)``.
        candidates: Embeddings of the candidates of each language, shape ``(candidates, hidden)`` each.
        answer_nl: Row of the right answer in each language, shape ``(n, languages)``.
        own: Number of the language of the questions.

    Raises:
        ValueError: The answers are not of shape ``(n, languages)``.
        NonFiniteError: An embedding is NaN or infinite.
    """
    answer_nl = np.asarray(answer_nl)
    if answer_nl.shape != (len(question_nh), len(candidates)):
        raise ValueError(
            f"The answers must have the shape {(len(question_nh), len(candidates))}, but have the shape {answer_nl.shape}."
        )
    query_nh = unit_rows(np.asarray(question_nh))
    pool_mh = unit_rows(np.concatenate([np.asarray(candidate_mh) for candidate_mh in candidates]))
    # Equal rows are compared once, because a matrix product may round equal columns differently.
    first_d, distinct_m = distinct_rows(pool_mh)
    starts_l = np.cumsum([0, *map(len, candidates[:-1])])
    size = max(1, _CHUNK // len(pool_mh))
    parts = []
    for at in range(0, len(query_nh), size):
        similarity_nm = (query_nh[at : at + size] @ pool_mh[first_d].T)[:, distinct_m]
        parts.append(_ranks(similarity_nm, starts_l, answer_nl[at : at + size], own))
    return AnswerRanks(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _ranks(
    similarity_nm: NDArray[np.float32], starts_l: NDArray[np.integer], answer_nl: NDArray[np.integer], own: int
) -> AnswerRanks:
    """`rank_answers` from similarities; the candidates of a language start at its column."""
    right_nl = np.take_along_axis(similarity_nm, answer_nl + starts_l, axis=1)
    blocks = np.split(similarity_nm, starts_l[1:], axis=1)
    # Number of candidates of each language (last axis) that are at least as similar as a right answer (middle axis).
    above_nll = np.stack(
        [
            np.stack([np.count_nonzero(block_nm >= right_n[:, None], axis=1) for right_n in right_nl.T], axis=1)
            for block_nm in blocks
        ],
        axis=2,
    )
    others_l = np.arange(len(starts_l)) != own
    best_nl = np.stack([block_nm.max(axis=1) for block_nm in blocks], axis=1)
    first_nl = best_nl == best_nl.max(axis=1, keepdims=True)
    return AnswerRanks(
        _average_precision(right_nl, above_nll),
        _average_precision(right_nl[:, others_l], above_nll[:, others_l][:, :, others_l]),
        1 / np.einsum("nll->nl", above_nll),
        first_nl[:, own] / first_nl.sum(axis=1),
    )


def _average_precision(right_nl: NDArray[np.float32], above_nll: NDArray[np.integer]) -> NDArray[np.float64]:
    """Mean over the right answers; 0 without any."""
    right_above_nl = (right_nl[:, None, :] >= right_nl[:, :, None]).sum(axis=2)
    return (right_above_nl / above_nll.sum(axis=2)).sum(axis=1) / max(1, right_nl.shape[1])


@checked
def find_answers(
    model: Any,
    sets: Mapping[str, AnswerSet],
    *,
    answer_text: AnswerText = "sentence",
    **encoding: Unpack[EncodingOptions],
) -> dict[str, AnswerRanks]:
    """`rank_answers` for the questions of every language; see `evaluate_answer_retrieval` for the arguments."""
    texts = [data.questions for data in sets.values()], [data.candidates(answer_text) for data in sets.values()]
    questions, candidates = _embed(model, *texts, **encoding)
    answer_nl = np.array([data.answers for data in sets.values()]).T
    return {
        language: rank_answers(question_nh, candidates, answer_nl, own)
        for own, (language, question_nh) in enumerate(zip(sets, questions, strict=True))
    }


def _embed(
    model: Any,
    questions: Iterable[Sequence[str]],
    passages: Iterable[Sequence[str]],
    **encoding: Unpack[EncodingOptions],
) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
    """Embed questions and passages, each with their prompt."""
    prompts = (resolve_prompt(model, encoding.get("prompt"), use) for use in ("question", "passage"))
    for_questions, for_passages = (EncodingOptions(**{**encoding, "prompt": prompt}) for prompt in prompts)
    return list(embed_sides(model, questions, **for_questions)), list(embed_sides(model, passages, **for_passages))


def _prompt_settings(model: Any, **encoding: Unpack[EncodingOptions]) -> dict[str, Any]:
    """Settings of the encoding, with the prompts of questions and answers."""
    question, passage = (resolve_prompt(model, encoding.get("prompt"), use) for use in ("question", "passage"))
    return {**encoding_settings(model, **encoding), "prompt": question, "answer_prompt": passage}


@checked
def evaluate_answer_retrieval(
    model: Any,
    sets: Mapping[str, AnswerSet],
    *,
    name: str | None = None,
    answer_text: AnswerText = "sentence",
    resamples: Resamples = FEWER_RESAMPLES,
    seed: Seed = 0,
    **encoding: Unpack[EncodingOptions],
) -> dict[str, Result]:
    """Measure the retrieval of answers in all languages from one pool.

    Args:
        model: A SentenceTransformer, or an object with its ``encode``.
        sets: Questions and candidates per language, from `load_answer_folder`.
        name: Name of the model in the results.
        answer_text: ``"sentence"``, or ``"paragraph"`` to add the paragraph of a sentence to its text, as in the paper.
        resamples: Number of bootstrap samples of the intervals, over questions, which are the same in all languages.
        seed: Seed of the bootstrap.
        **encoding: See :class:`metaphrase.evaluation.encoding.EncodingOptions`. With the prompt ``"auto"``, questions have
            the stored query prompt and candidates the stored passage prompt.

    Returns:
        Results by measure; the scores of a language are those of its questions, and ``items`` those of each question:

            - ``"mAP"``: mean average precision over the whole pool.
            - ``"mAP in one language"``: over the candidates of a single language, averaged over these languages. With one
              right answer, this is the mean reciprocal rank. ``answers`` has the score for each language of the candidates.
            - ``"MRR in the question's language"``: over the candidates of the question's language.
            - ``"own-language bias"``: share of first candidates in the question's language, minus the share of that
              language among the languages; lower is better.
            - ``"mAP lost to the question's language"``: mAP of the pool without the candidates of the question's language,
              minus mAP of the whole pool; lower is better.

    Raises:
        DataError: There are fewer than two languages.
    """
    if len(sets) < 2:
        raise DataError(
            f"Answer retrieval needs a pool of at least two languages, but got {', '.join(sets) or 'none'}."
        )
    start = time.perf_counter()
    ranks = find_answers(model, sets, answer_text=answer_text, **encoding)
    digest = _sha256(sets, answer_text)
    common = conditions(
        start,
        resamples,
        seed,
        **_prompt_settings(model, **encoding),
        answer_text=answer_text,
        pool=list(sets),
        candidates=sum(len(data.sentences) for data in sets.values()),
    )
    results = {}
    for measure, (lower_is_better, items_of) in _MEASURES.items():
        languages = {}
        for own, (language, answer_ranks) in enumerate(ranks.items()):
            details = {}
            if measure == "mAP in one language":
                details["answers"] = dict(
                    zip(sets, (100 * answer_ranks.reciprocal_nl.mean(axis=0)).tolist(), strict=True)
                )
            languages[language] = Measurement.of_items(items_of(answer_ranks, own).round(6), digest, **details)
        fields = with_intervals("shared_items", languages, resamples=resamples, seed=seed)
        results[measure] = Result(
            suite="answer-retrieval",
            model=name or type(model).__name__,
            measure=measure,
            protocol=f"one pool of {len(sets)} languages, by cosine; text of a candidate: {answer_text}",
            **fields | {"lower_is_better": lower_is_better},
            **common,
        )
    return results


#: Measures: whether lower is better, and the score of each question of a language, whose number is the second argument.
_MEASURES: dict[str, tuple[bool, Callable[[AnswerRanks, int], NDArray[np.float64]]]] = {
    "mAP": (False, lambda ranks, own: ranks.precision_n),
    "mAP in one language": (False, lambda ranks, own: ranks.reciprocal_nl.mean(axis=1)),
    "MRR in the question's language": (False, lambda ranks, own: ranks.reciprocal_nl[:, own]),
    "own-language bias": (True, lambda ranks, own: ranks.own_first_n - 1 / ranks.reciprocal_nl.shape[1]),
    "mAP lost to the question's language": (True, lambda ranks, own: ranks.others_n - ranks.precision_n),
}


@checked
def evaluate_monolingual_answers(
    model: Any, sets: Mapping[str, AnswerSet], **encoding: Unpack[EncodingOptions]
) -> Result:
    """Measure the retrieval of answers within each language; the questions of the languages may differ.

    The scores are mean reciprocal ranks ×100; ``items`` are those of each question. Tied candidates share the last of their
    ranks.
    """
    start = time.perf_counter()
    texts = [data.questions for data in sets.values()], [data.sentences for data in sets.values()]
    questions, candidates = _embed(model, *texts, **encoding)
    languages = {}
    for (language, answer_set), question_nh, candidate_mh in zip(sets.items(), questions, candidates, strict=True):
        ranks = rank_answers(question_nh, [candidate_mh], np.array(answer_set.answers)[:, None], 0)
        item_n = ranks.reciprocal_nl[:, 0].round(6)
        ids = [*map(item_id, answer_set.ids)]
        languages[language] = Measurement.of_items(item_n, _sha256({language: answer_set}, "sentence"), item_ids=ids)
    return Result(
        suite="monolingual answers",
        model=type(model).__name__,
        measure="MRR in the question's language",
        protocol="the sentence with the answer among all sentences of its language, by cosine",
        **with_intervals("shared_items", languages, resamples=FEWER_RESAMPLES, seed=0),
        **conditions(start, FEWER_RESAMPLES, 0, **_prompt_settings(model, **encoding)),
    )


def _sha256(sets: Mapping[str, AnswerSet], answer_text: AnswerText) -> str:
    """Digest of the questions, the pool and the answers."""
    content = [
        [language, data.ids, data.questions, data.answers, data.candidates(answer_text)]
        for language, data in sorted(sets.items())
    ]
    return text_digest(json.dumps(content, ensure_ascii=False))


@checked
class AnswerRetrievalEvaluator(EmbeddingEvaluator):
    """Answer retrieval from one pool of all languages, during training.

    The metrics are ``mean_average_precision``, ``own_language_first`` (share of first candidates in the language of
    the question) and ``{language}_average_precision``.

    Args:
        sets: Questions and candidates per language, from `load_answer_folder`.
        answer_text: ``"sentence"`` or ``"paragraph"``, see `evaluate_answer_retrieval`.
        **options: The other arguments of `EmbeddingEvaluator`.
    """

    kind = "answer_retrieval"
    metric = "mean_average_precision"

    def __init__(self, sets: Mapping[str, AnswerSet], *, answer_text: AnswerText = "sentence", **options: Any) -> None:
        super().__init__(sets, **options)
        self.answer_text = answer_text

    def scores(self, model: SentenceTransformer) -> dict[str, float]:
        """Measure a model."""
        ranks = find_answers(model, self.sets, answer_text=self.answer_text, **self.encoding)
        precisions = {language: float(answer_ranks.precision_n.mean()) for language, answer_ranks in ranks.items()}
        return {
            "mean_average_precision": float(np.mean(list(precisions.values()))),
            "own_language_first": float(np.mean([answer_ranks.own_first_n.mean() for answer_ranks in ranks.values()])),
            **{f"{language}_average_precision": precision for language, precision in precisions.items()},
        }

    def get_config_dict(self) -> dict[str, Any]:
        """Settings for the model card."""
        return {"answer_text": self.answer_text, **super().get_config_dict()}
