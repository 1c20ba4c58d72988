"""Measures of encoders on dev data: what training gains across languages, and what it costs within a language.

- *translations*: accuracy of retrieval on the demo's dev pairs, mean of both directions and eight languages;
- *answers*: mean average precision of MLQA's dev questions in one pool of seven languages, the share of first answers in the
  question's own language, and the mean reciprocal rank among the sentences of that language;
- *similarity*: Spearman correlation on STS-B dev, mean of eleven languages;
- *structure*: Spearman correlation of the cosines of the original and the changed encoder within a language, of STS-B's
  sentences, of the packaged texts of the guard, and of tokens of these texts in context.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from metaphrase.corpus.parallel import load_parallel_folder
from metaphrase.encoders.debiasing import language_directions
from metaphrase.encoders.loading import load_encoder
from metaphrase.evaluation.answer_retrieval import AnswerSet, load_questions, question_files
from metaphrase.evaluation.encoding import embed_sides
from metaphrase.evaluation.measures import spearman
from metaphrase.evaluation.similarity_structure import mean_correlation, structure_texts
from metaphrase.evaluation.sts import load_sts_folder
from metaphrase.exceptions import UsageError
from metaphrase.io.digests import files_sha256, model_hash
from metaphrase.io.files import DEMO, UDHR, replacing
from metaphrase.mining.search import unit_rows

#: Sizes of the dev samples: STS-B items and MLQA questions, and paragraphs of the declaration, of each language.
ITEMS, QUESTIONS, PARAGRAPHS = 200, 120, 20
#: Tokens of each language whose similarities are compared.
TOKENS_OF_A_LANGUAGE = 300
#: Minimum number of languages of a sampled MLQA question.
LANGUAGES_OF_A_QUESTION = 4
#: Structure of the packaged texts, as `metaphrase.evaluation.guards.structure_guard` measures it.
GUARD = "guard"
#: Structure of tokens of these texts.
TOKENS = "tokens"
#: Measures in tables: key and heading.
COLUMNS = {
    "translations": "translations",
    "answers": "answers, mAP",
    "own_language_first": "own language first",
    "answers_in_own_language": "answers, MRR in the question's language",
    "similarity": "STS-B",
    "structure": "structure",
}

Embeddings = dict[str, list[NDArray[Any]]]


@dataclass(frozen=True)
class Answers:
    """Questions of MLQA and one pool of the sentences of their paragraphs, in all languages.

    Attributes:
        questions: Text, language and id of each question; translations share the id.
        candidates: Language and text of each sentence.
        right: For each question, the number of the sentence with its answer.
    """

    questions: list[tuple[str, str, str]]
    candidates: list[tuple[str, str]]
    right: list[int]

    @classmethod
    def read(cls, folder: Path, count: int) -> Answers:
        """Read a sample of the questions that exist in four languages, from files ``dev-xx.json`` or ``.json.gz``."""
        asked: dict[str, list[tuple[AnswerSet, int]]] = {}
        for answer_set in load_questions(dev_questions(folder)).values():
            for number, id_ in enumerate(answer_set.ids):
                asked.setdefault(id_, []).append((answer_set, number))
        parallel = sorted(id_ for id_, places in asked.items() if len(places) >= LANGUAGES_OF_A_QUESTION)
        if len(parallel) < count:
            raise UsageError(
                f"{folder} has {len(parallel)} questions in {LANGUAGES_OF_A_QUESTION} languages or more, but {count} are "
                "required. Pass the folder of MLQA's dev set, with files dev-xx.json.gz, as --mlqa."
            )
        chosen = np.random.default_rng(0).choice(len(parallel), count, replace=False)
        candidates: dict[tuple[str, str], int] = {}
        questions, right = [], []
        for at in sorted(chosen):
            for answer_set, number in asked[parallel[at]]:
                alone, language = answer_set.chosen([number]), answer_set.language
                rows = [candidates.setdefault((language, text), len(candidates)) for text in alone.sentences]
                questions.append((alone.questions[0], language, parallel[at]))
                right.append(rows[alone.answers[0]])
        return cls(questions, list(candidates), right)

    def measures(self, question_nh: NDArray[Any], candidate_mh: NDArray[Any]) -> dict[str, float]:
        """Mean average precision, share of answers in the question's language, reciprocal rank in it, in percent."""
        similarity_nm = question_nh @ candidate_mh.T
        rank_nm = np.argsort(np.argsort(-similarity_nm, axis=1), axis=1) + 1
        language_m = np.array([language for language, _ in self.candidates])
        answers_of_question: dict[str, list[int]] = {}
        for (_, _, id_), right in zip(self.questions, self.right, strict=True):
            answers_of_question.setdefault(id_, []).append(right)
        rows = []
        for n, (_, language, id_) in enumerate(self.questions):
            ranks = np.sort(rank_nm[n, answers_of_question[id_]])
            precision = np.mean(np.arange(1, len(ranks) + 1) / ranks)
            same_language_m = language_m == language
            better = similarity_nm[n, same_language_m] > similarity_nm[n, self.right[n]]
            rows.append((precision, same_language_m[rank_nm[n].argmin()], 1 / (1 + better.sum())))
        means = 100 * np.mean(rows, axis=0)
        return dict(zip(("answers", "own_language_first", "answers_in_own_language"), map(float, means), strict=True))


class DevData:
    """The dev texts, and the measures of an encoder on them."""

    def __init__(self, stsb: Path, mlqa: Path) -> None:
        self.pairs = list(load_parallel_folder(DEMO, split="dev").values())
        sets = load_sts_folder(stsb, split="dev")
        chosen = np.random.default_rng(0).choice(len(next(iter(sets.values())).first), ITEMS, replace=False)
        self.sts = [
            [[column[row] for row in sorted(chosen)] for column in (sts.first, sts.second, sts.scores)]
            for sts in sets.values()
        ]
        self.answers = Answers.read(mlqa, QUESTIONS)
        declaration = load_parallel_folder(UDHR)
        self.languages = {language: list(pairs.sources[:PARAGRAPHS]) for language, pairs in declaration.items()}
        self.languages["en"] = list(next(iter(declaration.values())).targets[:PARAGRAPHS])
        self.guard = {language: list(dict.fromkeys(texts)) for language, texts in structure_texts().items()}

    def sides(self) -> dict[str, list[Sequence[str]]]:
        """The texts to encode by data set, for each of its sides."""
        return {
            "pairs": [side for pairs in self.pairs for side in (pairs.sources, pairs.targets)],
            "sts": [side for first, second, _ in self.sts for side in (first, second)],
            "answers": [
                [text for text, _, _ in self.answers.questions],
                [text for _, text in self.answers.candidates],
            ],
            "languages": list(self.languages.values()),
            "guard": list(self.guard.values()),
        }

    def embed(self, model: SentenceTransformer) -> dict[str, list[NDArray[Any]]]:
        """Embeddings of all texts by data set, in the order of its sides; each text is encoded once."""
        sides = self.sides()
        rows = iter(embed_sides(model, (side for group in sides.values() for side in group), batch_size=128))
        embedded = {name: [unit_rows(next(rows)) for _ in group] for name, group in sides.items()}
        return embedded | {TOKENS: [token_states(model, texts) for texts in self.guard.values()]}

    def removal(
        self, embedded: Mapping[str, Any], directions: int
    ) -> Callable[[Sequence[NDArray[Any]]], list[NDArray[Any]]]:
        """A function that projects an encoder's directions of language identity out of embeddings."""
        if not directions:
            return list
        by_language = {
            language: torch.from_numpy(x_nh)
            for language, x_nh in zip(self.languages, embedded["languages"], strict=True)
        }
        removed_kh = language_directions(by_language, directions)[0].numpy()
        return lambda group: [unit_rows(x_nh - (x_nh @ removed_kh.T) @ removed_kh) for x_nh in group]

    def measures(self, embedded: Mapping[str, Any], original: Mapping[str, Any], directions: int) -> dict[str, float]:
        """Gain and cost of an encoder, in percent."""
        remove = self.removal(embedded, directions)
        changed = {name: remove(group) for name, group in embedded.items()}
        correlations = [
            spearman(scores, (first_nh * second_nh).sum(axis=1))
            for (_, _, scores), first_nh, second_nh in zip(
                self.sts, changed["sts"][::2], changed["sts"][1::2], strict=True
            )
        ]
        upper = np.triu_indices(ITEMS, 1)
        structure = [
            spearman((old @ old.T)[upper], (new @ new.T)[upper])
            for old, new in zip(original["sts"][::2], changed["sts"][::2], strict=True)
        ]
        measures = {
            "translations": accuracy(changed["pairs"]),
            **self.answers.measures(*changed["answers"]),
            "similarity": float(np.mean(correlations)),
            "structure": float(np.mean(structure)),
            # Compared with the original without the same directions.
            GUARD: mean_correlation(remove(original["guard"]), changed["guard"]),
        }
        if not directions:  # directions are removed from sentences, not from tokens
            measures[TOKENS] = mean_correlation(original[TOKENS], embedded[TOKENS])
        return measures


def accuracy(sides: Sequence[NDArray[Any]]) -> float:
    """Accuracy of retrieval in both directions, in percent: mean over pairs of sides, whose rows are translations."""
    hits = [
        np.mean((a_nh @ b_nh.T).argmax(axis=1) == np.arange(len(a_nh)))
        for x_nh, y_nh in zip(sides[::2], sides[1::2], strict=True)
        for a_nh, b_nh in ((x_nh, y_nh), (y_nh, x_nh))
    ]
    return 100 * float(np.mean(hits))


def token_states(model: SentenceTransformer, texts: Sequence[str]) -> NDArray[Any]:
    """States of a sample of the tokens of texts, the same for every encoder, without those that begin and end a text."""
    states = model.encode(list(texts), output_value="token_embeddings", batch_size=128, show_progress_bar=False)
    states_th = np.concatenate([one_lh[1:-1].float().cpu().numpy() for one_lh in states])
    count = min(TOKENS_OF_A_LANGUAGE, len(states_th))
    chosen = np.random.default_rng(0).choice(len(states_th), count, replace=False)
    return unit_rows(states_th[np.sort(chosen)])


def kept_embeddings(path: Path, embed: Callable[[], Embeddings]) -> Embeddings:
    """The embeddings in a file, which is written first if it is missing."""
    if not path.is_file():
        groups = embed()
        with replacing(path, unique=True) as partial, partial.open("wb") as file:
            np.savez(file, **{f"{name}-{at}": x for name, group in groups.items() for at, x in enumerate(group)})
        return groups
    embeddings: Embeddings = {}
    with np.load(path) as content:
        for key in content.files:
            embeddings.setdefault(key.rpartition("-")[0], []).append(content[key])
    return embeddings


def dev_questions(mlqa: Path) -> dict[str, Path]:
    """The files of MLQA's dev set by language."""
    return question_files(mlqa).get("dev", {})


def work_settings(stsb: Path, mlqa: Path) -> dict[str, str]:
    """Digests of the dev texts outside the package, and of the encoder before training."""
    data = files_sha256([*stsb.glob("*dev*"), *dev_questions(mlqa).values()])
    return {"data": data, "starter": model_hash(load_encoder("starter"))}


def guarded(row: Mapping[str, Any], start: Mapping[str, Any]) -> bool:
    """Whether an encoder is no worse than the original within a language, in answers and similarities."""
    return all(row[key] >= start[key] for key in ("answers_in_own_language", "similarity"))


def best_rows(
    rows: Sequence[Mapping[str, Any]], start: Mapping[str, Any], gain: Callable[[Mapping[str, Any]], float]
) -> list[Mapping[str, Any]]:
    """The row that gains most among those that lose nothing, if any, and the one that gains most, if it is another."""
    best = max(rows, key=gain)
    best_without_loss = max((row for row in rows if guarded(row, start)), key=gain, default=best)
    return [best] if best_without_loss == best else [best_without_loss, best]
