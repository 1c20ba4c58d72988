"""Parts of speech: trained on an English treebank of Universal Dependencies, measured on those of other languages.

A word's tag is predicted from its first piece. A sentence that is too long is cut between words, so that every word is
tagged and counted.

References: Hu et al. 2020 (XTREME), section 3.2; Hu et al. 2021 (AMBER), section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForTokenClassification, PreTrainedModel, PreTrainedTokenizerBase

from metaphrase.evaluation.transfer.data import UPOS, Row, treebank_format
from metaphrase.evaluation.transfer.encoders import encoder_source, load_tokenizer, load_with_head
from metaphrase.evaluation.transfer.running import (
    FineTuningArguments,
    FineTuningOptions,
    Score,
    Task,
    fine_tune,
    load_benchmark,
    predict,
    ratio_interval,
)
from metaphrase.evaluation.transfer.tag_scores import tag_scores

IGNORED = -100


@dataclass
class TaggingOptions(FineTuningOptions):
    """Which encoder, on which treebanks, how measured."""

    fused: bool = field(
        default=False,
        metadata={
            "help": "Tag written words in place of the several syntactic ones that some stand for (Spanish 'del'), as XTREME."
        },
    )
    whole_types: bool = field(
        default=False,
        metadata={"help": "Tell SCONJ from CCONJ in the chunks, as seqeval did before its version 1."},
    )


@dataclass(frozen=True)
class TaggedPieces:
    """The pieces of a sentence, or of a part of one.

    Attributes:
        inputs: What the encoder reads, by name.
        first: Place of each word's first piece.
        tags: Tag of each word.
    """

    inputs: dict[str, list[int]]
    first: tuple[int, ...]
    tags: tuple[str, ...]


@dataclass(frozen=True)
class Tagger:
    """Cuts sentences and makes batches of them.

    Attributes:
        tokenizer: The encoder's.
        max_length: Pieces of a part, special ones included.
    """

    tokenizer: PreTrainedTokenizerBase
    max_length: int = 128

    def parts(self, row: Row) -> Iterator[TaggedPieces]:
        """A sentence in as few parts as go; a word without a piece stands as the unknown one."""
        pieces = self.tokenizer(row["words"], add_special_tokens=False)["input_ids"]
        unknown = self.tokenizer.unk_token
        words = [word if ids else unknown for word, ids in zip(row["words"], pieces, strict=True)]
        room = self.max_length - self.tokenizer.num_special_tokens_to_add(pair=False)
        start = taken = 0
        for at in range(len(words) + 1):
            size = len(pieces[at]) or 1 if at < len(words) else 0
            if at == len(words) or (at > start and taken + size > room):
                yield self._encode(words[start:at], row["tags"][start:at])
                start, taken = at, 0
            taken += size

    def _encode(self, words: Sequence[str], tags: Sequence[str]) -> TaggedPieces:
        encoded = self.tokenizer(list(words), is_split_into_words=True, truncation=True, max_length=self.max_length)
        numbers = encoded.word_ids()
        first = tuple(numbers.index(word) for word in range(len(words)))
        names = [name for name in self.tokenizer.model_input_names if name in encoded]
        return TaggedPieces({name: encoded[name] for name in names}, first, tuple(tags))

    def __call__(self, parts: Sequence[TaggedPieces]) -> dict[str, Tensor]:
        """Inputs of the model, with ``labels`` at the words' first pieces."""
        batch = self.tokenizer.pad([part.inputs for part in parts], return_tensors="pt")
        labels = torch.full(batch["input_ids"].shape, IGNORED)
        for row, part in enumerate(parts):
            labels[row, list(part.first)] = torch.tensor([UPOS.index(tag) for tag in part.tags])
        return {**batch, "labels": labels}


def tag_sentences(
    model: PreTrainedModel, parts: Sequence[TaggedPieces], tagger: Tagger, *, batch_size: int = 32
) -> list[list[str]]:
    """The tag that a model gives to each word."""

    def read(output: Any, batch: Sequence[TaggedPieces]) -> list[list[str]]:
        best = output.logits.argmax(-1).tolist()
        return [[UPOS[row[at]] for at in part.first] for row, part in zip(best, batch, strict=True)]

    return predict(
        model,
        parts,
        collate=tagger,
        read=read,
        length=lambda part: len(part.inputs["input_ids"]),
        batch_size=batch_size,
    )


def finetune_tagging(options: TaggingOptions, arguments: FineTuningArguments) -> Mapping[str, Any]:
    """Fine-tune an encoder on part-of-speech tags and measure chunk F1 and accuracy in each language.

    Returns:
        See :func:`metaphrase.evaluation.transfer.running.fine_tune`; the metrics are ``f1``, ``accuracy``, ``precision`` and
        ``recall``, and ``items`` holds the accuracy within each sentence.
    """
    source = encoder_source(options.model)
    tagger = Tagger(load_tokenizer(source), options.max_length)

    def build() -> PreTrainedModel:
        return load_with_head(
            source,
            AutoModelForTokenClassification,
            dropout=options.dropout,
            freeze_word_embeddings=options.freeze_word_embeddings,
            id2label=dict(enumerate(UPOS)),
            label2id={tag: number for number, tag in enumerate(UPOS)},
        )

    def units(rows: Sequence[Row]) -> list[TaggedPieces]:
        return [part for row in rows for part in tagger.parts(row)]

    def score(model: PreTrainedModel, data: Dataset, language: str) -> Score:
        parts = units(data)
        predicted = tag_sentences(model, parts, tagger, batch_size=arguments.per_device_eval_batch_size)
        scores = tag_scores([part.tags for part in parts], predicted, whole_types=options.whole_types)
        right, wholes = zip(*((2 * hits, found + gold) for hits, found, gold in scores.chunks), strict=True)
        metrics = {"f1": scores.f1, "accuracy": scores.accuracy}
        metrics |= {"precision": scores.precision, "recall": scores.recall}
        return Score(metrics, ratio_interval(right, wholes), [good / count for good, count in scores.words])

    form = treebank_format(fused=options.fused)
    task = Task("udpos", form, build, units, tagger, score)
    benchmark = load_benchmark(options, form, seed=arguments.seed)
    return fine_tune(task, source, benchmark, options, arguments)
