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

from metaphrase.corpus.words import Link, Words, parse_links, piece_spans
from metaphrase.modeling.languages import language_code

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
    #: Columns that it reads beside ``source`` and ``target``.
    columns: ClassVar[tuple[str, ...]] = ()

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
            Tensors with the batch as their first axis. ``input_ids``, ``attention_mask``, ``token_type_ids``,
            ``position_ids`` (from 0) and ``visible`` (which position attends to which, ``(batch, length, length)``) go to
            the encoder, the others to the objectives.
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
            "language": languages_of(examples, self.side),
        }


def source_view(max_length: int) -> Sentence:
    """The view ``"source"``: the source sentences."""
    return Sentence("source", "source", max_length)


def target_view(max_length: int) -> Sentence:
    """The view ``"target"``: the target sentences."""
    return Sentence("target", "target", max_length)


@dataclass(frozen=True)
class MaskedSentence(View):
    """One side of the pairs with some pieces masked, and ``labels`` at the masks.

    Attributes:
        side: ``"source"`` or ``"target"``.
        max_length: Pieces kept of a sentence, special tokens included.
        mask_rate: Share of the pieces chosen for prediction (see :func:`mask_pieces`).
    """

    side: Side
    max_length: int
    mask_rate: float

    def build(
        self, examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, rngs: Sequence[np.random.Generator]
    ) -> dict[str, Tensor]:
        """Ids with masks, labels at what was masked, and the language of each text."""
        texts = [example[self.side] for example in examples]
        encoded = tokenizer(texts, truncation=True, max_length=self.max_length)["input_ids"]
        masked = [
            mask_pieces(np.array(ids), self.mask_rate, tokenizer, own_stream(rng, self.name))
            for ids, rng in zip(encoded, rngs, strict=True)
        ]
        rows = {"input_ids": [ids for ids, _ in masked], "labels": [labels for _, labels in masked]}
        return {**pad_rows(tokenizer, **rows), "language": languages_of(examples, self.side)}


def masked_sentence(side: Side, max_length: int, mask_rate: float) -> MaskedSentence:
    """The view of one side with masks, named after its settings."""
    return MaskedSentence(f"masked-{side}-{mask_rate:g}", side, max_length, mask_rate)


@dataclass(frozen=True)
class Concatenated(View):
    """Both sentences in one sequence, some pieces masked, with ``labels`` at the masks.

    Attributes:
        max_length: Pieces kept of either side, its special tokens included.
        mask_rate: Share of the pieces chosen for prediction (see :func:`mask_pieces`).
        positions: ``"reset"`` numbers the second sentence from 0 again (XLM; DAP's baseline), ``"continuous"`` counts on
            (PPA, AMBER).
        layout: ``"sequences"`` puts one encoded sentence behind the other, ``<s> x </s> <s> y </s>`` (DAP's baseline);
            ``"pair"`` is the encoder's own form of a pair, for BERT ``[CLS] x [SEP] y [SEP]`` (PPA, AMBER).
        segments: Give the second sentence token type 1, where the encoder has one (BERT's pairs).
        order: ``"pair"`` is source, target; ``"shuffled"`` swaps the two in half of the pairs (see :func:`swapped`).
        monolingual: Read the texts of the column ``monolingual`` in place of the pair. A text of two lines gives the two
            sentences; each is kept to ``max_length`` pieces.
    """

    max_length: int
    mask_rate: float
    positions: Literal["reset", "continuous"] = "reset"
    layout: Literal["sequences", "pair"] = "sequences"
    segments: bool = False
    order: Literal["pair", "shuffled"] = "pair"
    monolingual: bool = False

    def build(
        self, examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, rngs: Sequence[np.random.Generator]
    ) -> dict[str, Tensor]:
        """Ids with masks, positions, and labels at what was masked.

        A batch without any monolingual text gives one row of special tokens, without labels.
        """
        texts = self._texts(examples, rngs)
        first = _ids(tokenizer, [text[0] for text in texts], self.max_length)
        second = _ids(tokenizer, [text[-1] for text in texts], self.max_length)
        rows: dict[str, list[Any]] = {"input_ids": [], "position_ids": [], "labels": []}
        if self.segments:
            rows["token_type_ids"] = []
        for text, one, two, rng in zip(texts, first, second, self._rngs(examples, rngs), strict=True):
            two = two if len(text) > 1 else []
            if two and self.layout == "pair":
                two = paired(two, tokenizer)
            ids, labels = mask_pieces(np.array(one + two), self.mask_rate, tokenizer, own_stream(rng, self.name))
            start = 0 if self.positions == "reset" else len(one)
            rows["input_ids"].append(ids)
            rows["labels"].append(labels)
            rows["position_ids"].append([*range(len(one)), *range(start, start + len(two))])
            if self.segments:
                rows["token_type_ids"].append([0] * len(one) + [1] * len(two))
        return pad_rows(tokenizer, **rows)

    def _texts(self, examples: Sequence[Example], rngs: Sequence[np.random.Generator]) -> list[list[str]]:
        if self.monolingual:
            texts = [text.split("\n", 1) for example in examples for text in example["monolingual"]]
            return texts or [[""]]
        pairs = [[example["source"], example["target"]] for example in examples]
        if self.order == "pair":
            return pairs
        return [pair[::-1] if swapped(rng) else pair for pair, rng in zip(pairs, rngs, strict=True)]

    def _rngs(self, examples: Sequence[Example], rngs: Sequence[np.random.Generator]) -> Sequence[np.random.Generator]:
        if not self.monolingual:
            return rngs
        of_texts = [rng for example, rng in zip(examples, rngs, strict=True) for _ in example["monolingual"]]
        return of_texts or rngs[:1]


@dataclass(frozen=True)
class MonolingualText(Concatenated):
    """The texts of the column ``monolingual``, masked (see :class:`Concatenated`)."""

    columns: ClassVar[tuple[str, ...]] = ("monolingual",)


def concatenated(max_length: int, mask_rate: float, **settings: Any) -> Concatenated:
    """The view of masked pairs, or of monolingual texts, named after its settings."""
    kind = MonolingualText if settings.get("monolingual") else Concatenated
    values = [value if isinstance(value, str) else key for key, value in settings.items() if value]
    return kind("-".join(["concatenated", f"{mask_rate:g}", *values]), max_length, mask_rate, **settings)


def swapped(rng: np.random.Generator) -> bool:
    """Whether a pair is turned round. Every view that asks first gets the same answer.

    Reference: Pan et al. 2021 (PPA), section 2.2, random input shuffling.
    """
    return bool(rng.random() < 0.5)


def own_stream(rng: np.random.Generator, name: str) -> np.random.Generator:
    """A generator for one view alone: what two views mask of an example are independent draws.

    Args:
        rng: The example's generator, which every view sees alike.
        name: Of the view.
    """
    return np.random.default_rng((int(rng.integers(1 << 63)), fingerprint(name)))


def paired(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of a second sentence as they stand behind the first in the encoder's own form of a pair."""
    doubled = tokenizer.num_special_tokens_to_add(pair=True) - 2 * (tokenizer.num_special_tokens_to_add() - 1)
    return [tokenizer.sep_token_id] * (doubled - 1) + ids[1:]


@dataclass(frozen=True)
class Links(View):
    """The words of both sides and the links between them, in terms of the views ``source`` and ``target``.

    Gives ``source_spans`` and ``target_spans``, ``(batch, words, 2)``: first piece of each word and the one behind its
    last, ``(0, 0)`` for a word that truncation cut and for padding; ``links``, ``(batch, links, 2)``: source and target
    word, ``-1`` for padding; ``scores``, ``(batch, links)``, one for each link, 1 where the corpus has none; and
    ``dropped``, ``(batch,)``: how many links went with cut words.

    Attributes:
        max_length: Pieces kept of a sentence, special tokens included.
    """

    encoded: ClassVar[bool] = False
    columns: ClassVar[tuple[str, ...]] = ("alignment",)
    max_length: int
    mutual: bool = False

    def build(
        self, examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, rngs: Sequence[np.random.Generator]
    ) -> dict[str, Tensor]:
        """Spans and links of each pair."""
        _, source = tokenize_words(examples, "source", tokenizer, self.max_length)
        _, target = tokenize_words(examples, "target", tokenizer, self.max_length)
        kept = [kept_links(*row, mutual=self.mutual) for row in zip(examples, source, target, strict=True)]
        return {
            "source_spans": pad_arrays(source, (0, 2)),
            "target_spans": pad_arrays(target, (0, 2)),
            "links": pad_arrays([np.array(links, dtype=np.int64).reshape(-1, 2) for links, _, _ in kept], (0, 2), -1),
            "scores": pad_arrays([np.array(scores, dtype=np.float32) for _, scores, _ in kept], (0,)),
            "dropped": torch.tensor([dropped for _, _, dropped in kept]),
        }


def links_view(max_length: int, *, mutual: bool = False) -> Links:
    """The view ``"links"`` or ``"mutual-links"``: the words of both sides and their links."""
    return Links("mutual-links" if mutual else "links", max_length, mutual)


def tokenize_words(
    examples: Sequence[Example], side: Side, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> tuple[list[list[int]], list[np.ndarray]]:
    """Piece ids of one side, truncated, and the pieces of each word.

    Returns:
        For each example its ids, and the spans of its words, shape ``(words, 2)`` (see
        :func:`metaphrase.corpus.words.piece_spans`).
    """
    encoded = tokenizer([example[side] for example in examples], truncation=True, max_length=max_length)
    spans = [
        piece_spans(
            encoding,
            Words.of(example[side], example.get(f"{side}_lang"), example.get("segmenter") or "whitespace"),
            disjoint=True,
        )
        for encoding, example in zip(encoded.encodings, examples, strict=True)
    ]
    return encoded["input_ids"], spans


def kept_links(
    example: Example, source_w2: np.ndarray, target_w2: np.ndarray, *, mutual: bool = False
) -> tuple[list[Link], list[float], int]:
    """The links of an example both of whose words are whole.

    Returns:
        Links, their scores (1 where the corpus has none) and the number of links that were dropped.

    Raises:
        ValueError: A link points outside of the words.
    """
    links = parse_links(example["alignment"] or "")
    scores = [float(score) for score in (example.get("alignment_scores") or "").split()] or [1.0] * len(links)
    if any(i >= len(source_w2) or j >= len(target_w2) for i, j in links) or len(scores) != len(links):
        raise ValueError(
            f"The alignment {example['alignment'][:80]!r} does not fit a pair of {len(source_w2)} and {len(target_w2)} "
            f"words: {example['source'][:80]!r}, {example['target'][:80]!r}. Was the text changed, or segmented in "
            "another way, after it was aligned? Align it again with `metaphrase align --overwrite`."
        )
    distinct: dict[Link, float] = {}
    for link, score in zip(links, scores, strict=True):
        distinct[link] = max(score, distinct.get(link, score))
    if mutual:
        distinct = {link: distinct[link] for link in mutual_links(list(distinct), list(distinct.values()))}
    kept = {(i, j): score for (i, j), score in distinct.items() if source_w2[i, 1] and target_w2[j, 1]}
    return list(kept), list(kept.values()), len(distinct) - len(kept)


def surest_partners(links: Sequence[Link], scores: Sequence[float]) -> dict[int, int]:
    """For each linked word of the first side, its partner with the highest score, the first in a tie.

    >>> surest_partners([(0, 0), (0, 1), (2, 3), (2, 1)], [0.5, 0.9, 1.0, 1.0])
    {0: 1, 2: 1}
    """
    ranked = sorted(zip(scores, links, strict=True), key=lambda scored: (scored[0], -scored[1][1]))
    return {x: y for _, (x, y) in ranked}


def mutual_links(links: Sequence[Link], scores: Sequence[float]) -> list[Link]:
    """Links whose two words are each other's surest partner (see :func:`surest_partners`).

    The result is one-to-one. Links that are one-to-one already, such as the intersection of two directions, are all kept.

    >>> mutual_links([(0, 0), (0, 1), (1, 1)], [0.5, 0.9, 0.8])
    [(0, 1)]
    """
    forward = surest_partners(links, scores)
    backward = surest_partners([(y, x) for x, y in links], scores)
    return [(x, y) for x, y in links if forward[x] == y and backward[y] == x]


def _ids(tokenizer: PreTrainedTokenizerBase, texts: list[str], max_length: int) -> list[list[int]]:
    return tokenizer(texts, truncation=True, max_length=max_length)["input_ids"]


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


def pad_arrays(arrays: Sequence[np.ndarray], tail: tuple[int, ...], fill: float = 0) -> Tensor:
    """Stack arrays of unequal first axis.

    Args:
        arrays: One for each example, shape ``(length, …)``.
        tail: ``(least length, …)`` of the result behind its batch axis.
        fill: What stands behind the end of an array.

    Returns:
        Tensor of shape ``(batch, length, …)``.
    """
    longest = max([tail[0], *(len(array) for array in arrays)])
    padded = np.full((len(arrays), longest, *tail[1:]), fill, dtype=arrays[0].dtype)
    for row, array in zip(padded, arrays, strict=True):
        row[: len(array)] = array
    return torch.from_numpy(padded)


def languages_of(examples: Sequence[Example], side: Side) -> Tensor:
    """The code of each text's language (see :func:`language_code`), shape ``(batch,)``."""
    return torch.tensor([language_code(example.get(f"{side}_lang") or "") for example in examples])


def fingerprint(*texts: str) -> int:
    """A 63-bit fingerprint of a text or of several, the same in every process."""
    return xxhash.xxh64_intdigest("\n".join(texts).encode()) >> 1
