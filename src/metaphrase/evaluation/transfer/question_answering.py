"""Questions with answers in a text: trained on SQuAD, measured on XQuAD and MLQA.

Question and context are of the same language throughout (MLQA's "XLT"). A context that is too long is read in overlapping
windows; of the spans that the windows propose the best one is the answer.

References: Rajpurkar et al. 2016 (SQuAD); Artetxe et al. 2020 (XQuAD); Lewis et al. 2020 (MLQA); the windows are those of
Devlin et al. 2019 (BERT).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForQuestionAnswering, PreTrainedModel, PreTrainedTokenizerBase

from metaphrase.corpus.code_switching import QUESTION_ANSWERING
from metaphrase.evaluation.significance import bootstrap_interval
from metaphrase.evaluation.transfer.answer_scores import ARTICLES, AnswerScores, answer_scores
from metaphrase.evaluation.transfer.data import QUESTIONS, Row
from metaphrase.evaluation.transfer.encoders import encoder_source, load_tokenizer, load_with_head
from metaphrase.evaluation.transfer.running import (
    FineTuningArguments,
    FineTuningOptions,
    Score,
    Task,
    fine_tune,
    load_benchmark,
    predict,
)


@dataclass
class QuestionAnsweringOptions(FineTuningOptions):
    """Which encoder, on which questions, how measured."""

    max_length: int = field(default=384, metadata={"help": "Pieces of a window, question and special ones included."})
    doc_stride: int = field(default=128, metadata={"help": "Pieces from the start of a window to that of the next."})
    max_query_length: int = field(default=64, metadata={"help": "Pieces kept of a question."})
    max_answer_length: int = field(default=30, metadata={"help": "Pieces of an answer at most."})
    n_best: int = field(default=20, metadata={"help": "Starts and ends that are tried of each window."})
    scoring: Literal["mlqa", "squad"] = field(
        default="mlqa",
        metadata={
            "help": "mlqa: answers are normalised by their language (languages that MLQA lacks as squad does); squad: all "
            "as English, as XTREME scores XQuAD."
        },
    )


@dataclass(frozen=True)
class Window:
    """A stretch of a context, behind its question.

    Attributes:
        inputs: What the encoder reads: ``input_ids``, ``attention_mask`` and ``token_type_ids`` where it has some, each of
            shape ``(pieces,)``.
        offsets: First character in the context and the one behind the last, of each piece; of a piece that is no part of
            the context −1, shape ``(pieces, 2)``.
        central: Whether no other window shows the piece with more context around it, shape ``(pieces,)``.
        start: The piece where the answer starts; 0, the first special piece, where the window does not hold it all.
        end: The piece where it ends.
    """

    inputs: dict[str, NDArray[np.int64]]
    offsets: NDArray[np.int64]
    central: NDArray[np.bool_]
    start: int = 0
    end: int = 0


@dataclass(frozen=True)
class Windows:
    """Cuts questions with their contexts into windows.

    Attributes:
        tokenizer: The encoder's.
        max_length: Pieces of a window.
        doc_stride: Pieces of the context from the start of a window to that of the next.
        max_query_length: Pieces kept of a question.
    """

    tokenizer: PreTrainedTokenizerBase
    max_length: int = 384
    doc_stride: int = 128
    max_query_length: int = 64

    def __call__(self, row: Row) -> list[Window]:
        """The windows of a question; the first of its answers is marked."""
        question, pieces = self._shortened(row["question"].strip())
        room = self.max_length - pieces - self.tokenizer.num_special_tokens_to_add(pair=True)
        if room < 1:
            raise ValueError(
                f"A question of {pieces} pieces leaves no room for its context in {self.max_length}. Give more --max_length "
                "or less --max_query_length."
            )
        step = min(self.doc_stride, room)
        encoded = self.tokenizer(
            question,
            row["context"],
            truncation="only_second",
            max_length=self.max_length,
            stride=room - step,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        names = [name for name in self.tokenizer.model_input_names if name in encoded]
        answers = row["answers"]
        windows = []
        for at in range(len(encoded["input_ids"])):
            inside = np.array([sequence == 1 for sequence in encoded.sequence_ids(at)])
            start = end = 0
            if answers["text"]:
                first = answers["answer_start"][0]
                last = first + len(answers["text"][0]) - 1
                found = [encoded.char_to_token(at, char, 1) for char in (first, last)]
                start, end = (0, 0) if None in found else found
            windows.append(
                Window(
                    inputs={name: np.asarray(encoded[name][at]) for name in names},
                    offsets=np.where(inside[:, None], np.asarray(encoded["offset_mapping"][at]), -1),
                    central=inside,
                    start=start,
                    end=end,
                )
            )
        return _with_central(windows, step)

    def _shortened(self, question: str) -> tuple[str, int]:
        encoded = self.tokenizer(question, add_special_tokens=False, return_offsets_mapping=True)
        pieces = len(encoded["input_ids"])
        if pieces <= self.max_query_length:
            return question, pieces
        question = question[: encoded["offset_mapping"][self.max_query_length - 1][1]]
        return question, len(self.tokenizer(question, add_special_tokens=False)["input_ids"])


def _with_central(windows: Sequence[Window], step: int) -> list[Window]:
    """Mark in which window each piece of the context has the most context, the first of equals."""
    best: dict[int, tuple[float, int]] = {}
    for number, window in enumerate(windows):
        count = int(window.central.sum())
        for at in range(count):
            context = min(at, count - 1 - at) + 0.01 * count
            if context > best.get(number * step + at, (-1.0, 0))[0]:
                best[number * step + at] = context, number
    marked = []
    for number, window in enumerate(windows):
        central = window.central.copy()
        places = np.flatnonzero(central)
        central[places] = [best[number * step + at][1] == number for at in range(len(places))]
        marked.append(Window(window.inputs, window.offsets, central, window.start, window.end))
    return marked


@dataclass(frozen=True)
class WindowCollator:
    """Pads windows to one length.

    Attributes:
        tokenizer: The encoder's.
    """

    tokenizer: PreTrainedTokenizerBase

    def __call__(self, windows: Sequence[Window]) -> dict[str, Tensor]:
        """Inputs of the model, with ``start_positions`` and ``end_positions``."""
        batch = self.tokenizer.pad([dict(window.inputs) for window in windows], return_tensors="pt")
        marks = {
            "start_positions": torch.tensor([window.start for window in windows]),
            "end_positions": torch.tensor([window.end for window in windows]),
        }
        return {**batch, **marks}


def best_answer(
    context: str,
    windows: Sequence[Window],
    logits: Sequence[NDArray[np.floating]],
    *,
    n_best: int = 20,
    max_answer_length: int = 30,
) -> str:
    """The span with the highest sum of its start's and its end's logit, over all windows of a question.

    A span starts at a piece that has no more context in another window; the first of equals wins.

    Args:
        context: The text.
        windows: Its windows.
        logits: Of each window those of the start and of the end, shape ``(2, pieces)``.
        n_best: Highest starts and ends of each window that are tried.
        max_answer_length: Pieces of a span at most.

    Returns:
        The words of the span; nothing where no span is possible.
    """
    best, answer = -np.inf, ""
    for window, scores_2t in zip(windows, logits, strict=True):
        starts, ends = (np.argsort(-scores_t, kind="stable")[:n_best] for scores_t in scores_2t)
        for start in starts[window.central[starts]]:
            for end in ends[window.offsets[ends, 0] >= 0]:
                score = scores_2t[0, start] + scores_2t[1, end]
                if 0 <= end - start < max_answer_length and score > best:
                    best = score
                    answer = context[window.offsets[start, 0] : window.offsets[end, 1]].strip()
    return answer


def answer_questions(
    model: PreTrainedModel,
    data: Dataset,
    windows: Windows,
    *,
    n_best: int = 20,
    max_answer_length: int = 30,
    batch_size: int = 32,
) -> dict[str, str]:
    """A model's answer to each question, by the question's ``item``."""
    rows = data.to_list()
    cut = [windows(row) for row in rows]
    logits = iter(
        predict(
            model,
            [window for part in cut for window in part],
            collate=WindowCollator(windows.tokenizer),
            read=_logits,
            length=lambda window: len(window.offsets),
            batch_size=batch_size,
        )
    )
    return {
        row["item"]: best_answer(
            row["context"],
            part,
            [next(logits) for _ in part],
            n_best=n_best,
            max_answer_length=max_answer_length,
        )
        for row, part in zip(rows, cut, strict=True)
    }


def _logits(output: Any, windows: Sequence[Window]) -> list[NDArray[np.floating]]:
    scores_b2t = torch.stack([output.start_logits, output.end_logits], 1).float().cpu().numpy()
    return [scores_2t[:, : len(window.offsets)] for scores_2t, window in zip(scores_b2t, windows, strict=True)]


def score_answers(answers: Mapping[str, str], data: Dataset, language: str | None) -> AnswerScores:
    """Score answers against a data set's own; see :func:`metaphrase.evaluation.transfer.answer_scores.answer_scores`."""
    golds = {item: answers["text"] for item, answers in zip(data["item"], data["answers"], strict=True)}
    return answer_scores(answers, golds, language)


def finetune_question_answering(
    options: QuestionAnsweringOptions, arguments: FineTuningArguments
) -> Mapping[str, Any]:
    """Fine-tune an encoder on questions and measure F1 and exact match in each language.

    Returns:
        See :func:`metaphrase.evaluation.transfer.running.fine_tune`; the metrics are ``f1`` and ``exact_match``.
    """
    source = encoder_source(options.model)
    tokenizer = load_tokenizer(source)
    windows = Windows(tokenizer, options.max_length, options.doc_stride, options.max_query_length)

    def build() -> PreTrainedModel:
        return load_with_head(
            source,
            AutoModelForQuestionAnswering,
            dropout=options.dropout,
            freeze_word_embeddings=options.freeze_word_embeddings,
        )

    def score(model: PreTrainedModel, data: Dataset, language: str) -> Score:
        answers = answer_questions(
            model,
            data,
            windows,
            n_best=options.n_best,
            max_answer_length=options.max_answer_length,
            batch_size=arguments.per_device_eval_batch_size,
        )
        by_language = options.scoring == "mlqa" and language in ARTICLES
        scores = score_answers(answers, data, language if by_language else None)
        metrics = {"f1": scores.f1, "exact_match": scores.exact_match}
        return Score(metrics, bootstrap_interval(scores.f1_n), scores.f1_n)

    task = Task(
        "qa",
        QUESTIONS,
        build,
        units=lambda rows: [window for row in rows for window in windows(row)],
        collate=WindowCollator(tokenizer),
        score=score,
        originals=QUESTION_ANSWERING,
    )
    benchmark = load_benchmark(options, QUESTIONS, seed=arguments.seed)
    return fine_tune(task, source, benchmark, options, arguments)
