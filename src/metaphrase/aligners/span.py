"""Word alignment as question answering: mark a word in one sentence, and find its translation as a span of the other.

Questions and scores follow WSPAlign, with transformers' ``AutoModelForQuestionAnswering``. Any checkpoint that was
trained on such questions can be used.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForQuestionAnswering, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from metaphrase.aligners.base import Aligner, Alignment, WordPair, check_word_pairs
from metaphrase.corpus.words import Link, Span, Words
from metaphrase.encoders.checks import check_tokenizer, load_complete
from metaphrase.encoders.folders import open_model
from metaphrase.encoders.loading import find_model
from metaphrase.encoders.positions import max_positions
from metaphrase.exceptions import ModelError
from metaphrase.io.arguments import Count, CountOr0, Length, Range, checked
from metaphrase.modeling.functional import check_finite_rows

#: Encloses the word that a question is about.
MARKER = " ¶ "

#: The probability of an answer, and the words in its span.
Answer = tuple[float, Sequence[int]]

#: Pairs whose questions are processed at a time.
_BLOCK = 256


def best_spans(
    start_bl: Tensor,
    end_bl: Tensor,
    mask_bl: Tensor,
    context_bl: Tensor,
    *,
    max_length: int = 15,
    softmax_over: Literal["sequence", "context"] = "sequence",
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the most probable answer span of each sequence.

    The probability of a span is that of its first piece times that of its last piece. Both come from a softmax that includes
    the question and the first token, although neither can be part of the answer: the probability of the first token,
    which denotes "no answer", lowers the score of all spans.

    Args:
        start_bl: Logits of a span's first piece, shape ``(batch, length)``.
        end_bl: Logits of its last piece.
        mask_bl: True at real pieces, including special tokens.
        context_bl: True at pieces of the context.
        max_length: Maximum number of pieces of an answer.
        softmax_over: ``"sequence"`` normalises over all pieces. ``"context"`` excludes those of the question, as the
            question answering pipeline of transformers 4 did.

    Returns:
        Probability, first and last piece of each best span, shape ``(batch,)``. The first of equal spans wins.

    Reference: Wu et al. 2023, "WSPAlign: Word Alignment Pre-training via Large-Scale Weakly Supervised Span Prediction".
    """
    if softmax_over == "context":
        mask_bl = context_bl.clone()
        mask_bl[:, 0] = True
    first_bl, last_bl = (
        logits_bl.float().masked_fill(~mask_bl, -torch.inf).softmax(dim=-1).masked_fill(~context_bl, 0.0)
        for logits_bl in (start_bl, end_bl)
    )
    span_bll = (first_bl.unsqueeze(2) * last_bl.unsqueeze(1)).triu().tril(max_length - 1)
    score_b, place_b = span_bll.flatten(1).max(dim=1)
    length = start_bl.shape[1]
    return score_b, place_b // length, place_b % length


def span_links(
    forward: Sequence[Answer],
    backward: Sequence[Answer],
    *,
    threshold: float = 0.9,
    force_bidirectional: bool = False,
) -> Alignment:
    """Combine the answers of both directions into links.

    A word is linked to each word of its answer, and the probability of the answer is divided among them. The scores of both
    directions are added, so that they lie between 0 and 2. A link that only the target's questions find is dropped: the
    two directions are not symmetric.

    Args:
        forward: For each source word, the probability of its answer and the target words in it.
        backward: For each target word, the probability of its answer and the source words in it.
        threshold: Links with a larger score are kept; the score is the sum of two probabilities.
        force_bidirectional: Keep only links that both directions find.

    Reference: Wu et al. 2023 (WSPAlign), as its released inference scores; the threshold of 0.9 is WACSE's.

    >>> span_links([(0.5, [0])], [(0.5, [0])])
    Alignment(links=((0, 0),), scores=(1.0,))
    """
    scores: dict[Link, float] = {}
    for i, (score, words) in enumerate(forward):
        for j in words:
            scores[i, j] = score / len(words)
    confirmed = set()
    for j, (score, words) in enumerate(backward):
        for i in words:
            if (i, j) in scores:
                scores[i, j] += score / len(words)
                confirmed.add((i, j))
    links = sorted(
        link for link, score in scores.items() if score > threshold and (link in confirmed or not force_bidirectional)
    )
    return Alignment(tuple(links), tuple(scores[link] for link in links))


def bare_span(text: str, span: Span) -> Span:
    """Strip adjacent punctuation from the span of a word; a word of punctuation only is unchanged.

    Questions and answers use bare words, as the checkpoints were trained on text with separated punctuation.

    >>> bare_span("“cats,” he said", (0, 7))
    (1, 5)
    """
    start, end = span
    inside = [at for at in range(start, end) if unicodedata.category(text[at])[0] not in "PS"]
    return (inside[0], inside[-1] + 1) if inside else span


@checked
class SpanAligner(Aligner):
    """Links words by the answers of a question answering model.

    For every word of either side, the sentence with the word between ``¶`` is the question, and the other sentence is the
    context: a pair takes as many forward passes as it has words. They are batched over all pairs by length. A context that
    is too long is read in overlapping windows, and the best answer wins. A question that leaves no room for such a window
    is truncated, and a word whose closing mark is truncated has no answer.

    Args:
        model: The model, or its Hub id or folder.
        tokenizer: Its fast tokenizer; None loads it from the same place.
        threshold: Minimum sum of both directions' probabilities, in [0, 2]; see `span_links`.
        force_bidirectional: See `span_links`.
        max_question_length: Maximum number of pieces of a question; None leaves room for one window of the context, one
            piece longer than the stride.
        max_answer_length: Maximum number of pieces of an answer.
        max_length: Maximum number of pieces of question and context together, including special tokens.
        stride: Overlap of the windows of a context, in pieces; by default 128, or a third of a shorter sequence.
        softmax_over: See `best_spans`.
        align_to_words: Extend an answer to whole words of the tokenizer, as the pipeline of transformers 4 did. Disable it
            for a SentencePiece tokenizer in a script without spaces, in which a word may be a whole sentence.
        batch_size: Sequences per forward pass.
        device: Device of the model; None uses CUDA if available for a model given by name, and does not move others.

    Raises:
        ValueError: The lengths leave no room for a context, or the tokenizer is not a fast one.

    Reference: Wu et al. 2023, "WSPAlign: Word Alignment Pre-training via Large-Scale Weakly Supervised Span Prediction".
    """

    name = "span"

    def __init__(  # noqa: PLR0913 - one argument for each parameter of the method
        self,
        model: PreTrainedModel | str | Path,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        threshold: Annotated[float, Range(0, 2)] = 0.9,
        force_bidirectional: bool = False,
        max_question_length: Count | None = None,
        max_answer_length: Count = 15,
        max_length: Length = 384,
        stride: CountOr0 | None = None,
        softmax_over: Literal["sequence", "context"] = "sequence",
        align_to_words: bool = True,
        batch_size: Count = 32,
        device: str | None = None,
    ) -> None:
        if isinstance(model, (str, Path)):
            name, folder = find_model(model)
            with open_model(name, folder) as copy:
                tokenizer = tokenizer or AutoTokenizer.from_pretrained(copy)
                model = load_complete(AutoModelForQuestionAnswering.from_pretrained, copy, name)
                check_tokenizer(tokenizer, model, name)
            device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if tokenizer is None or not tokenizer.is_fast:
            raise ModelError(
                "The span aligner requires a fast tokenizer, because answers are located by character offsets."
            )
        self.model: Any = model.to(device) if device else model
        self.tokenizer: Any = tokenizer
        self.max_length = min(max_length, tokenizer.model_max_length, max_positions(model) or max_length)
        stride = min(128, self.max_length // 3) if stride is None else stride
        room = self.max_length - tokenizer.num_special_tokens_to_add(pair=True) - stride - 1
        self.max_question_length = room if max_question_length is None else max_question_length
        if not 0 < self.max_question_length <= room:
            wanted = "none is left" if max_question_length is None else f"max_question_length is {max_question_length}"
            raise ModelError(
                f"A sequence of {self.max_length} pieces and windows that overlap by {stride} leave {max(room, 0)} pieces "
                f"for a question, but {wanted}. Lower {'it or ' if max_question_length else ''}the stride, or raise "
                "max_length, up to the number of positions of the model."
            )
        self.threshold = threshold
        self.force_bidirectional = force_bidirectional
        self.max_answer_length = max_answer_length
        self.stride = stride
        self.softmax_over = softmax_over
        self.align_to_words = align_to_words
        self.batch_size = batch_size

    @torch.inference_mode()
    def align(self, pairs: Sequence[WordPair]) -> list[Alignment]:
        """Align sentence pairs; see `Aligner.align`."""
        check_word_pairs(pairs)
        self.model.eval()
        alignments: list[Alignment] = []
        for start in range(0, len(pairs), _BLOCK):
            alignments += self._align(pairs[start : start + _BLOCK])
        return alignments

    def _align(self, pairs: Sequence[WordPair]) -> list[Alignment]:
        asked = [(side, other) for pair in pairs for side, other in (pair, pair[::-1])]
        questions = [(side, word, other) for side, other in asked if len(other) for word in range(len(side))]
        spans = iter(self._answer(questions))
        answers: list[list[Answer]] = []
        for side, other in asked:
            bare = [bare_span(other.text, span) for span in other.spans]
            answers.append([])
            for score, start, end in (next(spans) for _ in range(len(side) if bare else 0)):
                inside = [word for word, (first, last) in enumerate(bare) if start <= first and last <= end]
                answers[-1].append((score, inside))
        return [
            span_links(forward, backward, threshold=self.threshold, force_bidirectional=self.force_bidirectional)
            for forward, backward in zip(answers[::2], answers[1::2], strict=True)
        ]

    def _answer(self, questions: Sequence[tuple[Words, int, Words]]) -> list[tuple[float, int, int]]:
        """Probability, first character and exclusive end of the answer to each question."""
        answers = [(0.0, 0, 0)] * len(questions)
        texts = self._question_texts(questions)
        kept = [at for at, text in enumerate(texts) if text is not None]
        if not kept:
            return answers
        windows = self.tokenizer(
            [texts[at] for at in kept],
            [questions[at][2].text for at in kept],
            truncation="only_second",
            max_length=self.max_length,
            stride=self.stride,
            return_overflowing_tokens=True,
        )
        asked = [kept[sample] for sample in windows["overflow_to_sample_mapping"]]
        order = sorted(range(len(asked)), key=lambda window: len(windows.encodings[window].ids))
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            encodings = [windows.encodings[window] for window in batch]
            for window, encoding, (score, first, last) in zip(batch, encodings, self._spans(encodings), strict=True):
                if score > answers[asked[window]][0]:
                    answers[asked[window]] = score, *self._characters(encoding, first, last)
        return answers

    def _question_texts(self, questions: Sequence[tuple[Words, int, Words]]) -> list[str | None]:
        """The questions, truncated at their limit; None if the marks do not fit."""
        texts: list[str | None] = []
        ends = []
        for words, word, _ in questions:
            start, end = bare_span(words.text, words.spans[word])
            texts.append(f"{words.text[:start]}{MARKER}{words.text[start:end]}{MARKER}{words.text[end:]}")
            ends.append(end + len(MARKER) + len(MARKER.rstrip()))
        encodings = self.tokenizer(texts, add_special_tokens=False).encodings if texts else []
        for at, encoding in enumerate(encodings):
            if len(encoding.ids) > self.max_question_length:
                cut = encoding.offsets[self.max_question_length - 1][1]
                texts[at] = str(texts[at])[:cut] if cut >= ends[at] else None
        return texts

    def _spans(self, encodings: Sequence[Any]) -> list[tuple[float, int, int]]:
        """Best span of each window, in pieces."""
        names = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
        features = {
            name: pad_sequence(
                [torch.tensor(getattr(encoding, names[name])) for encoding in encodings],
                batch_first=True,
                padding_value=self.tokenizer.pad_token_id if name == "input_ids" else 0,
            ).to(self.model.device)
            for name in self.tokenizer.model_input_names
        }
        output = self.model(**features)
        for logits_bl in (output.start_logits, output.end_logits):
            check_finite_rows(logits_bl)
        rows = [torch.tensor([sequence == 1 for sequence in encoding.sequence_ids]) for encoding in encodings]
        score_b, first_b, last_b = best_spans(
            output.start_logits,
            output.end_logits,
            features["attention_mask"].bool(),
            pad_sequence(rows, batch_first=True).to(self.model.device),
            max_length=self.max_answer_length,
            softmax_over=self.softmax_over,
        )
        return list(zip(score_b.tolist(), first_b.tolist(), last_b.tolist(), strict=True))

    def _characters(self, encoding: Any, first: int, last: int) -> Span:
        """The characters of an answer in the context."""
        if not self.align_to_words:
            return encoding.offsets[first][0], encoding.offsets[last][1]
        words = encoding.word_ids
        return encoding.word_to_chars(words[first], 1)[0], encoding.word_to_chars(words[last], 1)[1]
