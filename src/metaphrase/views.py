"""Views: the ways of presenting a batch of examples to the encoder.

A view is frozen and comparable, so that two objectives which ask for the same one share it: it is built once and encoded
once per step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import xxhash
from torch import Tensor
from transformers import PreTrainedTokenizerBase

#: One row of a parallel corpus: ``source``, ``target``, ``source_lang``, ``target_lang`` and what else it carries.
Example = Mapping[str, Any]
Side = Literal["source", "target"]

#: The label of a position that is not scored.
UNSCORED = -100


@dataclass(frozen=True)
class View(ABC):
    """One way of presenting a batch. Its fields are its settings; it has nothing to learn.

    Attributes:
        name: Key of the view in batches and encodings.
    """

    name: str
    #: Whether the encoder reads this view; others only carry tensors for an objective.
    encoded: ClassVar[bool] = True

    @abstractmethod
    def build(
        self, examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, rngs: Sequence[np.random.Generator]
    ) -> dict[str, Tensor]:
        """Turn examples into tensors.

        Args:
            examples: The rows of the batch.
            tokenizer: The encoder's tokenizer.
            rngs: One generator for each example, seeded by (seed, epoch, text of the pair): a view is the same again
                after a resume, on any number of workers or processes, and every view of an example sees the same
                stream, so that two views can share a decision by drawing it first.

        Returns:
            Tensors with the batch as their first axis. ``input_ids``, ``attention_mask``, ``token_type_ids`` and
            ``position_ids`` (from 0) go to the encoder, the others to the objectives.
        """


@dataclass(frozen=True)
class Sentence(View):
    """One side of the pairs as it stands.

    Beside the encoder's inputs it gives ``text`` (a fingerprint of each text, int64) and ``language`` (the code of each
    text's language, see :func:`language_code`), both of shape ``(batch,)``.

    Attributes:
        side: ``"source"`` or ``"target"``.
        max_length: Pieces kept of a sentence, special tokens included.
    """

    side: Side
    max_length: int

    def build(
        self, examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, rngs: Sequence[np.random.Generator]
    ) -> dict[str, Tensor]:
        """Ids, mask, fingerprint and language of each text."""
        texts = [example[self.side] for example in examples]
        ids = tokenizer(texts, truncation=True, max_length=self.max_length)["input_ids"]
        return {
            **pad_rows(tokenizer, input_ids=ids),
            "text": torch.tensor([fingerprint(text) for text in texts]),
            "language": torch.tensor([language_code(example.get(f"{self.side}_lang") or "") for example in examples]),
        }


def source_view(max_length: int) -> Sentence:
    """The view ``"source"``: the source sentences."""
    return Sentence("source", "source", max_length)


def target_view(max_length: int) -> Sentence:
    """The view ``"target"``: the target sentences."""
    return Sentence("target", "target", max_length)


@dataclass(frozen=True)
class Concatenated(View):
    """Both sentences in one sequence, some pieces masked: ``<s> x </s> <s> y </s>`` with ``labels`` at the masks.

    Attributes:
        max_length: Pieces kept of either side, special tokens included.
        mask_rate: Share of the pieces chosen for prediction; specials are never chosen. Of the chosen, 80 % become the
            mask token, 10 % a random piece and 10 % stay.
        positions: ``"reset"`` numbers the second sentence from 0 again (XLM; DAP's baseline), ``"continuous"`` counts on.
    """

    max_length: int
    mask_rate: float
    positions: Literal["reset", "continuous"]

    def build(
        self, examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, rngs: Sequence[np.random.Generator]
    ) -> dict[str, Tensor]:
        """Ids with masks, positions, and labels at what was masked."""
        sides = [
            tokenizer([example[side] for example in examples], truncation=True, max_length=self.max_length)[
                "input_ids"
            ]
            for side in ("source", "target")
        ]
        rows: dict[str, list[Any]] = {"input_ids": [], "position_ids": [], "labels": []}
        for source, target, rng in zip(*sides, rngs, strict=True):
            ids, labels = mask_pieces(np.array(source + target), self.mask_rate, tokenizer, rng)
            second = 0 if self.positions == "reset" else len(source)
            rows["input_ids"].append(ids)
            rows["labels"].append(labels)
            rows["position_ids"].append([*range(len(source)), *range(second, second + len(target))])
        return pad_rows(tokenizer, **rows)


def mask_pieces(
    ids_l: np.ndarray, rate: float, tokenizer: PreTrainedTokenizerBase, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Choose pieces for prediction as BERT does: 80 % masked, 10 % replaced by a random piece, 10 % kept.

    Args:
        ids_l: Ids of one sequence, shape ``(length,)``.
        rate: Probability of a piece to be chosen; special tokens never are.
        tokenizer: Knows the mask token and the special ids.
        rng: Source of the choices.

    Returns:
        The ids to encode and the labels, ``UNSCORED`` where nothing was chosen, each of shape ``(length,)``.

    Reference: Devlin et al. 2019 (BERT), section 3.1.
    """
    chosen_l = (rng.random(len(ids_l)) < rate) & ~np.isin(ids_l, tokenizer.all_special_ids)
    fate_l = rng.random(len(ids_l))
    random_l = rng.integers(0, len(tokenizer), len(ids_l))
    masked_l = np.where(chosen_l & (fate_l < 0.8), tokenizer.mask_token_id, ids_l)
    masked_l = np.where(chosen_l & (fate_l >= 0.9), random_l, masked_l)
    return masked_l, np.where(chosen_l, ids_l, UNSCORED)


def pad_rows(tokenizer: PreTrainedTokenizerBase, **rows: Sequence[Any]) -> dict[str, Tensor]:
    """Pad ragged rows on the right to the longest and stack them.

    Args:
        tokenizer: Gives the padding id of ``input_ids``.
        **rows: For each tensor its rows; ``input_ids`` is needed. ``labels`` are padded with ``UNSCORED``, others with 0.

    Returns:
        int64 tensors of shape ``(batch, length)``, and the ``attention_mask``.
    """
    lengths = np.array([len(row) for row in rows["input_ids"]])
    shape = (len(lengths), int(lengths.max(initial=1)))
    fill = {"input_ids": tokenizer.pad_token_id, "labels": UNSCORED}
    mask_bl = np.arange(shape[1]) < lengths[:, None]
    padded = {"attention_mask": torch.from_numpy(mask_bl.astype(np.int64))}
    for name, values in rows.items():
        array_bl = np.full(shape, fill.get(name, 0), dtype=np.int64)
        array_bl[mask_bl] = np.concatenate([np.asarray(row, dtype=np.int64) for row in values])
        padded[name] = torch.from_numpy(array_bl)
    return padded


def fingerprint(*texts: str) -> int:
    """A 63-bit fingerprint of a text or of several, the same in every process."""
    return xxhash.xxh64_intdigest("\n".join(texts).encode()) >> 1


def language_code(language: str) -> int:
    """A language's code as a number, so that it can travel in a tensor.

    >>> language_code("en") == int.from_bytes(b"en")
    True
    """
    return int.from_bytes(language.encode()[:7])
