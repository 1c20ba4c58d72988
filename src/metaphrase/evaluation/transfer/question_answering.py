"""Extractive question answering: trained on SQuAD, measured on XQuAD and MLQA.

Question and context have the same language (MLQA's "XLT"). A long context is read in overlapping windows. The answer is
the best span of all windows.

References: Rajpurkar et al. 2016 (SQuAD); Artetxe et al. 2020 (XQuAD); Lewis et al. 2020 (MLQA); the windows follow
Devlin et al. 2019 (BERT).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForQuestionAnswering, PreTrainedModel, PreTrainedTokenizerBase

from metaphrase.corpus.code_switching import QUESTION_ANSWERING
from metaphrase.evaluation.significance import bootstrap_interval
from metaphrase.evaluation.transfer.answer_scores import ARTICLES, answer_scores
from metaphrase.evaluation.transfer.data import NOWHERE, QUESTIONS, Row
from metaphrase.evaluation.transfer.options import FineTuningArguments, FineTuningOptions
from metaphrase.evaluation.transfer.running import fine_tune
from metaphrase.evaluation.transfer.tasks import Score, Task
from metaphrase.io.arguments import Count, Length, Range, checked
from metaphrase.io.configuration import option


@checked
@dataclass
class QuestionAnsweringOptions(FineTuningOptions):
    """Options of fine-tuning and measuring an encoder on questions."""

    max_length: Length = option(
        384, "Maximum number of pieces of a window, including the question and special tokens."
    )
    doc_stride: Count = option(128, "Pieces between the starts of two windows.")
    max_query_length: Count = option(64, "Maximum number of pieces of a question.")
    max_answer_length: Count = option(30, "Maximum number of pieces of an answer.")
    n_best: Annotated[int, Range(1, 1000)] = option(20, "Number of starts and ends to consider in each window.")
    scoring: Literal["mlqa", "squad"] = option(
        "mlqa",
        "mlqa: normalise answers by their language (as squad for languages that MLQA lacks); squad: normalise "
        "all answers as English, as XTREME scores XQuAD.",
    )


@dataclass(frozen=True)
class Window:
    """A question with a part of its context.

    Attributes:
        inputs: Inputs of the encoder: ``input_ids``, ``attention_mask`` and, if it has them, ``token_type_ids``, each of
            shape ``(pieces,)``.
        offsets: First character and exclusive end of each piece in the context, −1 for pieces outside the context, shape
            ``(pieces, 2)``.
        central: Whether the piece has more context in this window than in any other, shape ``(pieces,)``.
        start: First piece of the answer; 0, the first special token, if the window does not contain the whole answer.
        end: Last piece of the answer.
    """

    inputs: dict[str, NDArray[np.int64]]
    offsets: NDArray[np.int64]
    central: NDArray[np.bool_]
    start: int = 0
    end: int = 0


@dataclass(frozen=True)
class Windows:
    """Splits questions with their contexts into windows.

    ``doc_stride`` is the number of pieces between the starts of two windows.
    """

    tokenizer: PreTrainedTokenizerBase
    max_length: int = 384
    doc_stride: int = 128
    max_query_length: int = 64

    def __call__(self, row: Row) -> list[Window]:
        """Windows of a question, with its first answer marked."""
        question, pieces = self._shortened(row["question"].strip())
        room = self.max_length - pieces - self.tokenizer.num_special_tokens_to_add(pair=True)
        if room < 1:
            raise ValueError(
                f"A question of {pieces} pieces leaves no room for its context in {self.max_length} pieces. Increase "
                "--max_length or decrease --max_query_length."
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
        answers = zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)
        placed = next((one for one in answers if one[1] != NOWHERE), None)
        windows = []
        for at in range(len(encoded["input_ids"])):
            inside = np.array([sequence == 1 for sequence in encoded.sequence_ids(at)])
            start = end = 0
            if placed is not None:
                first = placed[1]
                last = first + len(placed[0]) - 1
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
    """Mark the window in which each piece has the most context; the first of ties."""
    counts = [int(window.central.sum()) for window in windows]
    context_wt = np.full((len(windows), step * len(windows) + max(counts)), -1.0)
    for number, count in enumerate(counts):
        at = np.arange(count)
        context_wt[number, number * step + at] = np.minimum(at, count - 1 - at) + 0.01 * count
    best_t = context_wt.argmax(axis=0)
    marked = []
    for number, window in enumerate(windows):
        central = window.central.copy()
        central[central] = best_t[number * step + np.arange(counts[number])] == number
        marked.append(replace(window, central=central))
    return marked


def collate_windows(tokenizer: PreTrainedTokenizerBase, windows: Sequence[Window]) -> dict[str, Tensor]:
    """Inputs of the model, padded to the same length, with ``start_positions`` and ``end_positions``."""
    rows = [{**one.inputs, "start_positions": one.start, "end_positions": one.end} for one in windows]
    return dict(tokenizer.pad(rows, return_tensors="pt"))


def best_answer(
    context: str,
    windows: Sequence[Window],
    logits: Sequence[NDArray[np.floating]],
    *,
    n_best: int = 20,
    max_answer_length: int = 30,
) -> str:
    """The span with the highest sum of start logit and end logit over all windows of a question.

    A span starts at a piece that is central in its window. The first of ties is the answer.

    The logits of a window have shape ``(2, pieces)``: start and end. ``n_best`` starts and ends are considered in each
    window.
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


class QuestionTask(Task):
    """Questions whose answers are spans of their contexts, scored by F1 and exact match."""

    name = "qa"
    form = QUESTIONS
    head = AutoModelForQuestionAnswering
    originals = QUESTION_ANSWERING

    def __init__(self, options: QuestionAnsweringOptions, arguments: FineTuningArguments) -> None:
        super().__init__(options, arguments)
        self.limits = {"n_best": options.n_best, "max_answer_length": options.max_answer_length}
        self.scoring = options.scoring
        self.collate = partial(collate_windows, self.tokenizer)
        self.windows = Windows(self.tokenizer, options.max_length, options.doc_stride, options.max_query_length)

    def units(self, rows: Sequence[Row]) -> list[Window]:
        """The windows of questions."""
        return [window for row in rows for window in self.windows(row)]

    def score(self, model: PreTrainedModel, data: Dataset, language: str) -> Score:
        """F1 and exact match of the best spans."""
        rows = data.to_list()
        cut = [self.windows(row) for row in rows]
        windows = [window for part in cut for window in part]
        logits = iter(self.predict(model, windows, read=_logits, length=lambda window: len(window.offsets)))
        answers = {
            row["item"]: best_answer(row["context"], part, [next(logits) for _ in part], **self.limits)
            for row, part in zip(rows, cut, strict=True)
        }
        golds = {row["item"]: row["answers"]["text"] for row in rows}
        by_language = self.scoring == "mlqa" and language in ARTICLES
        metrics, f1_n = answer_scores(answers, golds, language if by_language else None)
        return Score(metrics, bootstrap_interval(f1_n), f1_n)


def _logits(output: Any, windows: Sequence[Window]) -> list[NDArray[np.floating]]:
    scores_b2t = torch.stack([output.start_logits, output.end_logits], 1).float().cpu().numpy()
    return [scores_2t[:, : len(window.offsets)] for scores_2t, window in zip(scores_b2t, windows, strict=True)]


def finetune_question_answering(
    options: QuestionAnsweringOptions, arguments: FineTuningArguments
) -> Mapping[str, Any]:
    """Fine-tune an encoder on questions and measure F1 and exact match in each language.

    Returns:
        See :func:`metaphrase.evaluation.transfer.running.fine_tune`; the metrics are ``f1`` and ``exact_match``.
    """
    return fine_tune(QuestionTask(options, arguments))
