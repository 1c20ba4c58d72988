"""The transfer tasks in minutes: linear probes on the features of a frozen encoder, trained on English.

- Pairs of sentences (XNLI, PAWS-X): logistic regression on ``|u − v|`` and ``u ∗ v`` of the two embeddings.
- Tags (Universal Dependencies): logistic regression on the states of words.
- Answers (XQuAD): a start and an end in the context, by a linear model of each piece's state, of its product with the
  question, and of its similarity with the question. Contexts and questions are encoded separately.

A probe shows what is in the features, and a fine-tuned encoder what it can learn: compare probes only with probes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from torch.nn import functional as F

from metaphrase.aligners.embedding import EmbeddingAligner
from metaphrase.corpus.words import Words
from metaphrase.evaluation.transfer.classification import TASKS, score_classes
from metaphrase.evaluation.transfer.data import (
    ENGLISH,
    QUESTIONS,
    Format,
    TransferData,
    digest,
    pairs_format,
    treebank_format,
)
from metaphrase.evaluation.transfer.options import FineTuningOptions
from metaphrase.evaluation.transfer.planning import load_benchmark
from metaphrase.evaluation.transfer.question_answering import Window, best_answer, score_answers
from metaphrase.evaluation.transfer.running import average
from metaphrase.evaluation.transfer.tagging import score_tags
from metaphrase.evaluation.transfer.tasks import Score
from metaphrase.mining.search import unit_rows

#: Inverse strength of the L2 penalty of the logistic regressions, on features of unit variance.
C = 0.01
#: Strength of the L2 penalty of the answer probe, on weights whose features have mean square 1.
SPAN_PENALTY = 3e-3
#: Iterations of the probes.
ITERATIONS = 300
#: Pieces on each side over which the similarity with the question is averaged.
WIDTHS = (2, 8, 32)


@dataclass(frozen=True)
class Features:
    """A frozen encoder.

    Attributes:
        embed: Sentence embeddings of texts, shape ``(texts, hidden)``.
        states: States of words in the last layer.
    """

    embed: Callable[[Sequence[str]], NDArray[Any]]
    states: EmbeddingAligner

    def piece_states(self, texts: Sequence[str]) -> list[tuple[Tensor, NDArray[np.int64]]]:
        """States of the pieces of each text, shape ``(pieces, hidden)``, and their spans in characters."""
        encodings = self.states.model.tokenizer(list(texts), add_special_tokens=False).encodings
        sentences = [
            Words(text, tuple(dict.fromkeys(span for span in encoding.offsets if span[0] < span[1])))
            for text, encoding in zip(texts, encodings, strict=True)
        ]
        return [
            (states_th, np.array(words.spans)[kept])
            for words, (kept, states_th) in zip(sentences, self.states.word_states(sentences), strict=True)
        ]


class ProbedTask(NamedTuple):
    """A data set that probes are trained on.

    Attributes:
        form: Format of its data.
        measure: Trains on English and scores each language.
        limit_test: Number of test items of each language.
    """

    form: Format
    measure: Callable[[TransferData, Features], dict[str, Score]]
    limit_test: int


def run_probe(name: str, sources: Mapping[str, Any], languages: Sequence[str], features: Features) -> dict[str, Any]:
    """Train a probe on English and measure it in each language.

    Args:
        name: A key of `PROBED`.
        sources: Options of `FineTuningOptions` that name the data.
        languages: Languages to measure.
        features: The frozen encoder.

    Returns:
        The part of the result of :func:`metaphrase.evaluation.transfer.running.fine_tune` that is not about training.
    """
    task = PROBED[name]
    options = FineTuningOptions(
        **sources, languages=list(languages), selection="last", limit_test=task.limit_test, model=""
    )
    benchmark = load_benchmark(options, task.form, seed=42)
    scores = task.measure(benchmark, features)
    rows = {code: {"n": len(benchmark.test[code]), **asdict(score)} for code, score in scores.items()}
    return {
        "data": {
            part: {code: {"n": len(data), "sha256": digest(data)} for code, data in getattr(benchmark, part).items()}
            for part in ("train", "test")
        },
        "languages": rows,
        "average": average(rows),
        "settings": {"C": C, "span_penalty": SPAN_PENALTY, "limit_test": task.limit_test},
    }


def _fit(features_nf: NDArray[Any], labels: Sequence[Any]) -> Pipeline:
    return make_pipeline(StandardScaler(), LogisticRegression(C=C, max_iter=ITERATIONS)).fit(features_nf, labels)


# Pairs of sentences


def _probe_pairs(task: str, benchmark: TransferData, features: Features) -> dict[str, Score]:
    columns = TASKS[task][0]

    def of(data: Dataset) -> NDArray[Any]:
        first_nh, second_nh = (
            unit_rows(np.asarray(features.embed(list(data[column])))) for column in (columns.first, columns.second)
        )
        return np.concatenate([np.abs(first_nh - second_nh), first_nh * second_nh], axis=1)

    english = benchmark.train[ENGLISH]
    probe = _fit(of(english), english["label"])
    return {
        language: score_classes(probe.predict(of(data)).tolist(), data["label"])
        for language, data in benchmark.test.items()
    }


# Tags


def _probe_tags(benchmark: TransferData, features: Features) -> dict[str, Score]:
    def of(data: Dataset) -> list[tuple[list[int], Tensor]]:
        return features.states.word_states([_joined(words) for words in data["words"]])

    english = benchmark.train[ENGLISH]
    states = of(english)
    tags = [row[word] for row, (words, _) in zip(english["tags"], states, strict=True) for word in words]
    probe = _fit(torch.cat([states_wh for _, states_wh in states]).numpy(), tags)
    scores = {}
    for language, data in benchmark.test.items():
        predicted = []
        for row, (words, states_wh) in zip(data["tags"], of(data), strict=True):
            found = dict(zip(words, probe.predict(states_wh.numpy()) if words else (), strict=True))
            predicted.append([found.get(word, "X") for word in range(len(row))])
        scores[language] = score_tags(data["tags"], predicted)
    return scores


def _joined(words: Iterable[str]) -> Words:
    """Words with spaces between them."""
    text, spans = "", []
    for word in words:
        text += " " * bool(text)
        spans.append((len(text), len(text) + len(word)))
        text += word
    return Words(text, tuple(spans))


# Answers


class _Question(NamedTuple):
    """A question: its number among the contexts, its embedding, and the similarities of each piece of its context."""

    context: int
    embedding_h: Tensor
    similarity_tk: Tensor


def _probe_answers(benchmark: TransferData, features: Features) -> dict[str, Score]:
    english = benchmark.train[ENGLISH]
    contexts, questions = _read_questions(english, features)
    spans = [
        _answer_pieces(contexts[one.context][1], row["answers"])
        for one, row in zip(questions, english.to_list(), strict=True)
    ]
    weights = _fit_spans([states_th for states_th, _ in contexts], questions, spans)
    scores = {}
    for language, data in benchmark.test.items():
        contexts, questions = _read_questions(data, features)
        answers = {}
        for one, row in zip(questions, data.to_list(), strict=True):
            states_th, offsets_t2 = contexts[one.context]
            logits_2t = _span_logits(weights, states_th, one).numpy()
            window = Window({}, offsets_t2, np.ones(len(offsets_t2), dtype=bool))
            answers[row["item"]] = best_answer(row["context"], [window], [logits_2t])
        scores[language] = score_answers(answers, data.to_list(), None)
    return scores


def _read_questions(
    data: Dataset, features: Features
) -> tuple[list[tuple[Tensor, NDArray[np.int64]]], list[_Question]]:
    """States and spans of each distinct context, and the questions."""
    texts = list(dict.fromkeys(data["context"]))
    contexts = [(_scaled(states_th), offsets_t2) for states_th, offsets_t2 in features.piece_states(texts)]
    questions = []
    for context, (states_qh, _) in zip(data["context"], features.piece_states(data["question"]), strict=True):
        at = texts.index(context)
        states_th, embedding_h = contexts[at][0], _scaled(states_qh.mean(dim=0))
        pieces_tq = states_th @ _scaled(states_qh).T / states_th.shape[1]
        near = [states_th @ embedding_h / len(embedding_h), pieces_tq.amax(dim=1)]
        near += [_smoothed(one_t, width) for one_t in list(near) for width in WIDTHS]
        similarity_tk = torch.stack(near, dim=1)
        spread_k = similarity_tk.std(dim=0).clamp(min=1e-6)
        questions.append(_Question(at, embedding_h, (similarity_tk - similarity_tk.mean(dim=0)) / spread_k))
    return contexts, questions


def _scaled(states_h: Tensor) -> Tensor:
    """States whose components have mean square 1."""
    return F.normalize(states_h, dim=-1) * states_h.shape[-1] ** 0.5


def _smoothed(values_t: Tensor, width: int) -> Tensor:
    """Mean over a piece and ``width`` pieces on each side, as far as there are pieces."""
    kernel = torch.ones(1, 1, 2 * width + 1)
    sums, counts = (
        F.conv1d(one[None, None], kernel, padding=width)[0, 0] for one in (values_t, torch.ones_like(values_t))
    )
    return sums / counts


def _answer_pieces(offsets_t2: NDArray[np.int64], answers: Mapping[str, Any]) -> tuple[int, int]:
    """First and last piece of the first answer."""
    start = answers["answer_start"][0]
    end = start + len(answers["text"][0])
    inside = np.flatnonzero((offsets_t2[:, 1] > start) & (offsets_t2[:, 0] < end))
    return (int(inside[0]), int(inside[-1])) if len(inside) else (0, 0)


def _span_logits(weights: Mapping[str, Tensor], states_th: Tensor, question: _Question) -> Tensor:
    """Scores of each piece as a start and as an end, shape ``(2, pieces)``."""
    of_states_2h = weights["state"] + weights["product"] * question.embedding_h
    return of_states_2h @ states_th.T + weights["similarity"] @ question.similarity_tk.T


def _fit_spans(
    contexts: Sequence[Tensor], questions: Sequence[_Question], spans: Sequence[tuple[int, int]]
) -> dict[str, Tensor]:
    """Weights that maximize the probabilities of starts and ends among the pieces of their contexts."""
    hidden, similarities = contexts[0].shape[1], questions[0].similarity_tk.shape[1]
    sizes = {"state": hidden, "product": hidden, "similarity": similarities}
    weights = {name: torch.zeros(2, size, requires_grad=True) for name, size in sizes.items()}
    optimizer = torch.optim.LBFGS(list(weights.values()), max_iter=40, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        total = SPAN_PENALTY * sum((one**2).sum() for one in weights.values())
        for one, span in zip(questions, spans, strict=True):
            logits_2t = _span_logits(weights, contexts[one.context], one)
            total = total + F.cross_entropy(logits_2t, torch.tensor(span)) / len(questions)
        total.backward()
        return total

    optimizer.step(loss)
    return {name: one.detach() for name, one in weights.items()}


def _pairs_task(name: str, limit_test: int) -> ProbedTask:
    columns, classes = TASKS[name]
    return ProbedTask(
        pairs_format(columns, classes), lambda benchmark, features: _probe_pairs(name, benchmark, features), limit_test
    )


#: The data sets by name.
PROBED: dict[str, ProbedTask] = {
    "xnli": _pairs_task("xnli", 600),
    "pawsx": _pairs_task("pawsx", 600),
    "xquad": ProbedTask(QUESTIONS, _probe_answers, 300),
    "ud": ProbedTask(treebank_format(), _probe_tags, 300),
}
