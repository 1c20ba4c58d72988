"""Part-of-speech tagging: trained on an English treebank of Universal Dependencies, measured on those of other languages.

The tag of a word is predicted from its first piece. A long sentence is split between words, so that every word is tagged
and counted. Its parts are scored as one sentence, because where it is split depends on the tokenizer.

References: Hu et al. 2020 (XTREME), section 3.2; Hu et al. 2021 (AMBER), section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForTokenClassification, PreTrainedModel, PreTrainedTokenizerBase

from metaphrase.evaluation.measures import ChunkF1
from metaphrase.evaluation.significance import RESAMPLES, percentile_interval
from metaphrase.evaluation.transfer.data import UPOS, Row, treebank_format
from metaphrase.evaluation.transfer.options import FineTuningArguments, FineTuningOptions
from metaphrase.evaluation.transfer.running import fine_tune
from metaphrase.evaluation.transfer.tag_scores import Tags, tag_scores
from metaphrase.evaluation.transfer.tasks import Score, Task
from metaphrase.io.arguments import checked
from metaphrase.io.configuration import option
from metaphrase.modeling.views import UNSCORED


@checked
@dataclass
class TaggingOptions(FineTuningOptions):
    """Options of fine-tuning and measuring an encoder on treebanks."""

    fused: bool = option(
        False, "Tag written words instead of the syntactic words that they consist of (Spanish 'del'), as XTREME does."
    )
    whole_types: bool = option(False, "Distinguish SCONJ from CCONJ in the chunks, as seqeval did before version 1.")


@dataclass(frozen=True)
class TaggedPieces:
    """The pieces of a sentence or a part of one: inputs of the encoder, position of each word's first piece, and tag of
    each word.
    """

    inputs: dict[str, list[int]]
    first: tuple[int, ...]
    tags: tuple[str, ...]


@dataclass(frozen=True)
class Tagger:
    """Splits sentences into parts and turns these into batches."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int = 128

    def parts(self, row: Row) -> Iterator[TaggedPieces]:
        """Split a sentence into as few parts as possible. A word without pieces becomes the unknown token."""
        words = [self._space * (at > 0) + word for at, word in enumerate(row["words"])]
        pieces = self.tokenizer(words, add_special_tokens=False)["input_ids"]
        unknown = self.tokenizer.unk_token
        words = [word if ids else unknown for word, ids in zip(words, pieces, strict=True)]
        room = self.max_length - self.tokenizer.num_special_tokens_to_add(pair=False)
        start = taken = 0
        for at in range(len(words) + 1):
            size = len(pieces[at]) or 1 if at < len(words) else 0
            if at == len(words) or (at > start and taken + size > room):
                yield self._encode(words[start:at], row["tags"][start:at])
                start, taken = at, 0
            taken += size

    @cached_property
    def _space(self) -> str:
        """A space if words must have one before them to get the pieces that they have in text, as in byte-level BPE."""
        alone = self.tokenizer(["a", "a"], is_split_into_words=True)["input_ids"]
        return "" if alone == self.tokenizer("a a")["input_ids"] else " "

    def _encode(self, words: Sequence[str], tags: Sequence[str]) -> TaggedPieces:
        encoded = self.tokenizer(list(words), is_split_into_words=True, truncation=True, max_length=self.max_length)
        numbers = encoded.word_ids()
        first = tuple(numbers.index(word) for word in range(len(words)))
        names = [name for name in self.tokenizer.model_input_names if name in encoded]
        return TaggedPieces({name: encoded[name] for name in names}, first, tuple(tags))

    def __call__(self, parts: Sequence[TaggedPieces]) -> dict[str, Tensor]:
        """Inputs of the model, with ``labels`` at the words' first pieces."""
        batch = self.tokenizer.pad([part.inputs for part in parts], return_tensors="pt")
        labels = torch.full(batch["input_ids"].shape, UNSCORED)
        for row, part in enumerate(parts):
            labels[row, list(part.first)] = torch.tensor([UPOS.index(tag) for tag in part.tags])
        return {**batch, "labels": labels}


class TaggingTask(Task):
    """Part-of-speech tags, scored by chunk F1 and accuracy."""

    name = "udpos"
    head = AutoModelForTokenClassification
    classes = UPOS

    def __init__(self, options: TaggingOptions, arguments: FineTuningArguments) -> None:
        super().__init__(options, arguments)
        self.form = treebank_format(fused=options.fused)
        self.collate = self.tagger = Tagger(self.tokenizer, options.max_length)
        self.whole_types = options.whole_types

    def units(self, rows: Sequence[Row]) -> list[TaggedPieces]:
        """The parts of sentences."""
        return [part for row in rows for part in self.tagger.parts(row)]

    def score(self, model: PreTrainedModel, data: Dataset, language: str) -> Score:
        """Chunk F1 and accuracy, and the numbers of correct, predicted and gold chunks of each sentence."""

        def read(output: Any, batch: Sequence[TaggedPieces]) -> list[list[str]]:
            best = output.logits.argmax(-1).tolist()
            return [[UPOS[row[at]] for at in part.first] for row, part in zip(best, batch, strict=True)]

        cut = [list(self.tagger.parts(row)) for row in data]
        parts = [part for sentence in cut for part in sentence]
        found = iter(self.predict(model, parts, read=read, length=lambda part: len(part.inputs["input_ids"])))
        predicted = [[tag for _ in sentence for tag in next(found)] for sentence in cut]
        return score_tags(data["tags"], predicted, whole_types=self.whole_types)


def score_tags(gold: Tags, predicted: Tags, *, whole_types: bool = False) -> Score:
    """Chunk F1 and accuracy, and the numbers of correct, predicted and gold chunks of each sentence."""
    metrics, chunks = tag_scores(gold, predicted, whole_types=whole_types)
    (f1_r,) = ChunkF1().scores([np.array(chunks)], RESAMPLES, np.random.default_rng(0))
    return Score(metrics, percentile_interval(f1_r), chunks)


def finetune_tagging(options: TaggingOptions, arguments: FineTuningArguments) -> Mapping[str, Any]:
    """Fine-tune an encoder on part-of-speech tags and measure chunk F1 and accuracy in each language.

    Returns:
        See :func:`metaphrase.evaluation.transfer.running.fine_tune`; the metrics are ``f1``, ``accuracy``, ``precision`` and
        ``recall``, and ``items`` holds the numbers of correct, predicted and gold chunks of each sentence.
    """
    return fine_tune(TaggingTask(options, arguments))
