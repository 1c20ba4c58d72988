"""The transfer tasks in minutes: linear probes on the features of a frozen encoder, trained on English.

- Pairs of sentences (XNLI, PAWS-X): logistic regression on ``u``, ``v``, ``|u − v|`` and ``u ∗ v`` of the two embeddings.
- Tags (Universal Dependencies): logistic regression on the states of words.

A probe shows what the features contain, fine-tuning what the encoder can learn: compare probes only with probes. There is no
probe for question answering (XQuAD), because the features of a context without its question do not determine the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from metaphrase.aligners.embedding import EmbeddingAligner
from metaphrase.corpus.code_switching import PairedTexts
from metaphrase.corpus.words import Words
from metaphrase.evaluation.encoding import EncodingOptions, encode_texts
from metaphrase.evaluation.transfer.classification import score_classes
from metaphrase.evaluation.transfer.data import ENGLISH, TransferData
from metaphrase.evaluation.transfer.tagging import score_tags
from metaphrase.evaluation.transfer.tasks import Score
from metaphrase.mining.search import unit_rows

#: Inverse strength of the L2 penalty of the logistic regressions, on features of unit variance.
C = {"pairs": 1e-3, "tags": 1e-2}
#: Iterations of the regressions.
ITERATIONS = 300


class Probe(NamedTuple):
    """A linear probe on the features of a frozen encoder.

    ``measure`` trains on English and scores each language. ``work`` is the number of bytes encoded per byte of the files.
    """

    measure: Callable[[TransferData, SentenceTransformer, EncodingOptions], dict[str, Score]]
    limit_test: int
    work: float
    description: str


def _fit(features_nf: NDArray[Any], labels: Sequence[Any], c: float) -> Pipeline:
    return make_pipeline(StandardScaler(), LogisticRegression(C=c, max_iter=ITERATIONS)).fit(features_nf, labels)


def probe_pairs(
    columns: PairedTexts, benchmark: TransferData, model: SentenceTransformer, encoding: EncodingOptions
) -> dict[str, Score]:
    """Accuracy of a probe of pairs of sentences."""

    def of(data: Dataset) -> NDArray[Any]:
        first_nh, second_nh = (
            unit_rows(np.asarray(encode_texts(model, list(data[column]), **encoding)))
            for column in (columns.first, columns.second)
        )
        return np.concatenate([first_nh, second_nh, np.abs(first_nh - second_nh), first_nh * second_nh], axis=1)

    english = benchmark.train[ENGLISH]
    probe = _fit(of(english), english["label"], C["pairs"])
    return {
        language: score_classes(probe.predict(of(data)).tolist(), data["label"])
        for language, data in benchmark.test.items()
    }


def probe_tags(benchmark: TransferData, model: SentenceTransformer, encoding: EncodingOptions) -> dict[str, Score]:
    """Chunk F1 and accuracy of a probe of words, by their states in the last layer."""
    layers = model[0].auto_model.config.num_hidden_layers
    aligner = EmbeddingAligner(model, layer=layers, batch_size=encoding["batch_size"])

    def of(data: Dataset) -> list[tuple[list[int], Tensor]]:
        found = aligner.word_states([_joined(words) for words in data["words"]])
        return [(words, states_wh.cpu()) for words, states_wh in found]

    english = benchmark.train[ENGLISH]
    states = of(english)
    tags = [row[word] for row, (words, _) in zip(english["tags"], states, strict=True) for word in words]
    probe = _fit(torch.cat([states_wh for _, states_wh in states]).numpy(), tags, C["tags"])
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
