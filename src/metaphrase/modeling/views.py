"""Views: ways of presenting a batch of examples to the encoder.

Views are frozen and comparable. Objectives that use equal views share them: a view is built and encoded once per batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import xxhash
from torch import Tensor
from transformers import BatchEncoding, PreTrainedTokenizerBase

from metaphrase.corpus.words import Link, Words, parse_links, piece_spans
from metaphrase.exceptions import AlignmentFormatError
from metaphrase.io.arguments import Length, Share, check_values, hints_of
from metaphrase.modeling.languages import language_id

#: One row of a parallel corpus: ``source``, ``target``, ``source_lang``, ``target_lang`` and further columns.
Example = Mapping[str, Any]
Examples = Sequence[Example]
Generators = Sequence[np.random.Generator]
Side = Literal["source", "target"]
SIDES: tuple[Side, ...] = ("source", "target")

#: Label of a position that is not scored, which the cross-entropy of torch ignores.
UNSCORED = -100


@dataclass(frozen=True, eq=False)
class Batch:
    """The examples of a batch. Its views share the pieces and words of both sides, which are computed once.

    Attributes:
        examples: The rows of the batch.
        tokenizer: The encoder's tokenizer.
    """

    examples: Examples
    tokenizer: PreTrainedTokenizerBase
    _encoded: dict[tuple[Side, int], BatchEncoding] = field(default_factory=dict, init=False, repr=False)
    _words: dict[tuple[Side, int], list[np.ndarray]] = field(default_factory=dict, init=False, repr=False)

    def pieces(self, side: Side, max_length: int) -> list[list[int]]:
        """The ids of each text of one side, truncated to ``max_length`` pieces including special tokens."""
        return self._encoding(side, max_length)["input_ids"]

    def words(self, side: Side, max_length: int) -> list[np.ndarray]:
        """The spans of the words of each text of one side in its :meth:`pieces`.

        Words share no pieces: a piece that crosses a word boundary belongs to one word only. A word that owns no piece,
        like a truncated word, has the empty span ``(0, 0)``.

        Returns arrays of shape ``(words, 2)`` (see :func:`metaphrase.corpus.words.piece_spans`).
        """
        key = side, max_length
        if key not in self._words:
            encodings = self._encoding(*key).encodings
            self._words[key] = [
                piece_spans(encoding, Words.of_side(example, side), disjoint=True)
                for encoding, example in zip(encodings, self.examples, strict=True)
            ]
        return self._words[key]

    def _encoding(self, side: Side, max_length: int) -> BatchEncoding:
        key = side, max_length
        if key not in self._encoded:
            texts = [example[side] for example in self.examples]
            self._encoded[key] = self.tokenizer(texts, truncation=True, max_length=max_length)
        return self._encoded[key]


@dataclass(frozen=True)
class View(ABC):
    """One way of presenting a batch. Its fields are its settings; it has no parameters.

    Attributes:
        name: Key of the view in batches and encodings.
    """

    name: str
    #: Columns that it reads in addition to ``source`` and ``target``.
    columns: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_values(hints_of(type(self)), vars(self), type(self).__name__)

    @abstractmethod
    def build(self, batch: Batch, rngs: Generators) -> dict[str, Tensor]:
        """Convert examples to tensors.

        Args:
            batch: The examples, with their pieces and words.
            rngs: One generator per example, seeded by (seed, epoch, text of the pair). Views are thus reproducible after a
                resume and for any number of workers or processes. All views of an example see the same stream, so two
                views share a decision if both draw it first.

        Returns:
            Tensors with the batch as their first axis. ``input_ids``, ``attention_mask``, ``token_type_ids``,
            ``position_ids`` (from 0) and ``visible`` (which position attends to which, ``(batch, length, length)``) are
            inputs of the encoder, the others of the objectives. A view without ``input_ids`` is not encoded.
        """


@dataclass(frozen=True)
class Sentence(View):
    """One side of the pairs, unchanged.

    Provides the encoder's inputs, ``text`` (a fingerprint of each text, int64) and ``language`` (the id of each text's
    language, see :func:`language_id`), both of shape ``(batch,)``.

    Attributes:
        side: ``"source"`` or ``"target"``.
        max_length: Maximum pieces per sentence, including special tokens.
    """

    side: Side
    max_length: Length

    def build(self, batch: Batch, rngs: Generators) -> dict[str, Tensor]:
        """Build ids, mask, fingerprint and language of each text."""
        return {
            **pad_rows(batch.tokenizer, input_ids=batch.pieces(self.side, self.max_length)),
            "text": torch.tensor([fingerprint(example[self.side]) for example in batch.examples]),
            "language": languages_of(batch.examples, self.side),
        }


def source_view(max_length: int) -> Sentence:
    """View ``"source"``: the source sentences."""
    return Sentence("source", "source", max_length)


def target_view(max_length: int) -> Sentence:
    """View ``"target"``: the target sentences."""
    return Sentence("target", "target", max_length)


@dataclass(frozen=True)
class TeacherSentence(Sentence):
    """One side of the pairs in the pieces of another encoder: ``ids`` and ``mask``, both of shape ``(batch, length)``.

    Attributes:
        tokenizer: The tokenizer of that encoder.
    """

    tokenizer: Any = field(default=None, compare=False, repr=False)

    def build(self, batch: Batch, rngs: Generators) -> dict[str, Tensor]:
        """Build ids and mask of each text."""
        built = super().build(Batch(batch.examples, self.tokenizer), rngs)
        return {"ids": built["input_ids"], "mask": built["attention_mask"]}


@dataclass(frozen=True)
class MaskedSentence(View):
    """One side of the pairs with masked pieces, and ``labels`` at the masks.

    Attributes:
        side: ``"source"`` or ``"target"``.
        max_length: Maximum pieces per sentence, including special tokens.
        mask_rate: Share of the pieces to predict (see :func:`mask_pieces`).
    """

    side: Side
    max_length: Length
    mask_rate: Share

    def build(self, batch: Batch, rngs: Generators) -> dict[str, Tensor]:
        """Build masked ids, labels, and the language of each text."""
        masked = [
            mask_pieces(np.array(ids), self.mask_rate, batch.tokenizer, own_stream(rng, self.name))
            for ids, rng in zip(batch.pieces(self.side, self.max_length), rngs, strict=True)
        ]
        rows = {"input_ids": [ids for ids, _ in masked], "labels": [labels for _, labels in masked]}
        return {**pad_rows(batch.tokenizer, **rows), "language": languages_of(batch.examples, self.side)}


def masked_sentence(side: Side, max_length: int, mask_rate: float) -> MaskedSentence:
    """View of one masked side, named after its settings."""
    return MaskedSentence(f"masked-{side}-{mask_rate:g}", side, max_length, mask_rate)


@dataclass(frozen=True)
class Concatenated(View):
    """Both sentences in one sequence with masked pieces, and ``labels`` at the masks.

    Attributes:
        max_length: Maximum pieces per side, including its special tokens.
        mask_rate: Share of the pieces to predict (see :func:`mask_pieces`).
        positions: ``"reset"`` restarts the positions of the second sentence at 0 (XLM; DAP's baseline), ``"continuous"``
            does not (PPA, AMBER).
        layout: ``"sequences"`` concatenates the encoded sentences, ``<s> x </s> <s> y </s>`` (DAP's baseline); ``"pair"`` is
            the pair format of the encoder, for BERT ``[CLS] x [SEP] y [SEP]`` (PPA, AMBER).
        segments: Assign token type 1 to the second sentence, if the encoder has one (BERT's pairs).
        order: ``"pair"`` is source, target; ``"shuffled"`` swaps the two in half of the pairs (see :func:`swapped`).
        monolingual: Read the texts of the column ``monolingual`` instead of the pair. The two lines of a text are the two
            sentences, each limited to ``max_length`` pieces.
    """

    max_length: Length
    mask_rate: Share
    positions: Literal["reset", "continuous"] = "reset"
    layout: Literal["sequences", "pair"] = "sequences"
    segments: bool = False
    order: Literal["pair", "shuffled"] = "pair"
    monolingual: bool = False

    @property
    def columns(self) -> tuple[str, ...]:  # type: ignore[override]
        """The column of monolingual text, if it is read."""
        return ("monolingual",) if self.monolingual else ()

    def build(self, batch: Batch, rngs: Generators) -> dict[str, Tensor]:
        """Build masked ids, positions and labels.

        A batch without monolingual text yields one row of special tokens, without labels.
        """
        rows: dict[str, list[Any]] = {"input_ids": [], "position_ids": [], "labels": []}
        if self.segments:
            rows["token_type_ids"] = []
        for (one, two), rng in zip(self._pieces(batch, rngs), self._rngs(batch, rngs), strict=True):
            if two and self.layout == "pair":
                two = paired(two, batch.tokenizer)
            ids, labels = mask_pieces(np.array(one + two), self.mask_rate, batch.tokenizer, own_stream(rng, self.name))
            start = 0 if self.positions == "reset" else len(one)
            rows["input_ids"].append(ids)
            rows["labels"].append(labels)
            rows["position_ids"].append([*range(len(one)), *range(start, start + len(two))])
            if self.segments:
                rows["token_type_ids"].append([0] * len(one) + [1] * len(two))
        return pad_rows(batch.tokenizer, **rows)

    def _pieces(self, batch: Batch, rngs: Generators) -> list[tuple[list[int], list[int]]]:
        """The ids of the two sentences of each row; a text of one line has no second sentence."""
        if self.monolingual:
            texts = [text.split("\n", 1) for example in batch.examples for text in example["monolingual"]] or [[""]]
            first, last = (piece_ids(batch.tokenizer, [text[at] for text in texts], self.max_length) for at in (0, -1))
            return [(one, two if len(text) > 1 else []) for text, one, two in zip(texts, first, last, strict=True)]
        pairs = [*zip(*(batch.pieces(side, self.max_length) for side in SIDES), strict=True)]
        if self.order == "pair":
            return pairs
        return [(two, one) if swapped(rng) else (one, two) for (one, two), rng in zip(pairs, rngs, strict=True)]

    def _rngs(self, batch: Batch, rngs: Generators) -> Generators:
        if not self.monolingual:
            return rngs
        of_texts = [rng for example, rng in zip(batch.examples, rngs, strict=True) for _ in example["monolingual"]]
        return of_texts or rngs[:1]


def concatenated(
    max_length: int, mask_rate: float, positions: Literal["reset", "continuous"] = "reset", **settings: Any
) -> Concatenated:
    """View of masked pairs, or of monolingual texts, named after its positions and what differs from the defaults."""
    view = Concatenated("concatenated", max_length, mask_rate, positions, **settings)
    values = [(one, getattr(view, one.name)) for one in fields(view) if one.name in settings]
    changed = [value if isinstance(value, str) else one.name for one, value in values if value != one.default]
    return replace(view, name="-".join([view.name, f"{mask_rate:g}", positions, *changed]))


def swapped(rng: np.random.Generator) -> bool:
    """Whether to swap source and target of a pair. Views that draw this first share the decision.

    Reference: Pan et al. 2021 (PPA), section 2.1, random input shuffling.
    """
    return bool(rng.random() < 0.5)


def own_stream(rng: np.random.Generator, name: str) -> np.random.Generator:
    """Create a generator for one view, so that the masks of two views of an example are independent."""
    return np.random.default_rng((int(rng.integers(1 << 63)), fingerprint(name)))


def paired(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Convert the ids of a sentence to those of the second sentence in the pair format of the encoder."""
    doubled = tokenizer.num_special_tokens_to_add(pair=True) - 2 * (tokenizer.num_special_tokens_to_add() - 1)
    return [tokenizer.sep_token_id] * (doubled - 1) + ids[1:]


@dataclass(frozen=True)
class WordPieces(View):
    """The words of both sides, as positions in the views ``source`` and ``target``; does not require links.

    Provides ``source_spans`` and ``target_spans``, ``(batch, words, 2)``: first piece and exclusive end of each word, and
    ``(0, 0)`` for padding and for words that are not usable (see :meth:`Batch.words`).

    Attributes:
        max_length: Maximum pieces per sentence, including special tokens.
    """

    max_length: Length

    def build(self, batch: Batch, rngs: Generators) -> dict[str, Tensor]:
        """Build the spans of each pair."""
        return {f"{side}_spans": pad_arrays(batch.words(side, self.max_length), (0, 2)) for side in SIDES}


@dataclass(frozen=True)
class Links(WordPieces):
    """The words of both sides, as in :class:`WordPieces`, and the links between them.

    In addition to the spans, provides ``links``, ``(batch, links, 2)``: source and target word, ``-1`` for padding.

    Attributes:
        mutual: Keep only links whose two words are each other's best partner (see :func:`mutual_links`).
    """

    columns: ClassVar[tuple[str, ...]] = ("alignment",)
    mutual: bool = False

    def build(self, batch: Batch, rngs: Generators) -> dict[str, Tensor]:
        """Build the spans and links of each pair."""
        source, target = (batch.words(side, self.max_length) for side in SIDES)
        kept = [kept_links(*row, mutual=self.mutual) for row in zip(batch.examples, source, target, strict=True)]
        links = [np.array([*links], dtype=np.int64).reshape(-1, 2) for links in kept]
        return {**super().build(batch, rngs), "links": pad_arrays(links, (0, 2), -1)}


def links_view(max_length: int, *, mutual: bool = False) -> Links:
    """View ``"links"`` or ``"mutual-links"``: the words of both sides and their links."""
    return Links("mutual-links" if mutual else "links", max_length, mutual)


def kept_links(
    example: Example, source_w2: np.ndarray, target_w2: np.ndarray, *, mutual: bool = False
) -> dict[Link, float]:
    """Parse the links of an example and drop those of words with an empty span.

    A link that occurs several times counts once, with its highest score.

    If ``mutual``, a link is kept if its two words are each other's best partner, which is decided before links are
    dropped. Returns the score of each link, 1 if the corpus has none.
    """
    links = [] if example["alignment"] is None else parse_links(example["alignment"])
    scores = [float(score) for score in (example.get("alignment_scores") or "").split()] or [1.0] * len(links)
    if any(i >= len(source_w2) or j >= len(target_w2) for i, j in links) or len(scores) != len(links):
        raise AlignmentFormatError(
            f"The alignment {(example['alignment'] or '')[:80]!r} does not fit a pair of {len(source_w2)} and "
            f"{len(target_w2)} words: {example['source'][:80]!r}, {example['target'][:80]!r}. The text or its "
            "segmentation may have changed after the alignment. Align it again with `metaphrase align --overwrite`."
        )
    distinct: dict[Link, float] = {}
    for link, score in zip(links, scores, strict=True):
        distinct[link] = max(score, distinct.get(link, score))
    if mutual:
        distinct = {link: distinct[link] for link in mutual_links([*distinct], [*distinct.values()])}
    return {(i, j): score for (i, j), score in distinct.items() if source_w2[i, 1] and target_w2[j, 1]}


def best_partners(links: Sequence[Link], scores: Sequence[float]) -> dict[int, int]:
    """For each linked word of the first side, its partner with the highest score, the first in a tie.

    >>> best_partners([(0, 0), (0, 1), (2, 3), (2, 1)], [0.5, 0.9, 1.0, 1.0])
    {0: 1, 2: 1}
    """
    ranked = sorted(zip(scores, links, strict=True), key=lambda scored: (scored[0], -scored[1][1]))
    return {x: y for _, (x, y) in ranked}


def mutual_links(links: Sequence[Link], scores: Sequence[float]) -> list[Link]:
    """Links whose two words are each other's best partner (see :func:`best_partners`).

    The result is one-to-one. Links that are one-to-one already, such as the intersection of two directions, are all kept.

    >>> mutual_links([(0, 0), (0, 1), (1, 1)], [0.5, 0.9, 0.8])
    [(0, 1)]
    """
    forward = best_partners(links, scores)
    backward = best_partners([(y, x) for x, y in links], scores)
    return [(x, y) for x, y in links if forward[x] == y and backward[y] == x]


def piece_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_length: int) -> list[list[int]]:
    """The ids of some texts, each truncated to ``max_length`` pieces including special tokens."""
    return tokenizer(list(texts), truncation=True, max_length=max_length)["input_ids"]


def mask_pieces(
    ids_l: np.ndarray, rate: float, tokenizer: PreTrainedTokenizerBase, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Select pieces for prediction as in BERT: 80 % are masked, 10 % replaced by a random piece, 10 % kept.

    Special tokens are never selected. ``[UNK]`` counts as a special token, as in transformers' data collator.

    Returns the ids to encode and the labels, ``UNSCORED`` at pieces that are not selected.

    Reference: Devlin et al. 2019 (BERT), section 3.1.
    """
    chosen_l = (rng.random(len(ids_l)) < rate) & ~np.isin(ids_l, tokenizer.all_special_ids)
    fate_l = rng.random(len(ids_l))
    random_l = rng.integers(0, len(tokenizer), len(ids_l))
    masked_l = np.where(chosen_l & (fate_l < 0.8), tokenizer.mask_token_id, ids_l)
    masked_l = np.where(chosen_l & (fate_l >= 0.9), random_l, masked_l)
    return masked_l, np.where(chosen_l, ids_l, UNSCORED)


def pad_rows(tokenizer: PreTrainedTokenizerBase, **rows: Sequence[Any]) -> dict[str, Tensor]:
    """Pad ragged rows on the right to the longest row and stack them.

    ``labels`` are padded with ``UNSCORED``, other rows with 0. Returns int64 tensors of shape ``(batch, length)``, and the
    ``attention_mask``.
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
    """Pad arrays of different lengths and stack them.

    ``tail`` is the minimum length and the further axes of the result, ``(length, …)``. Returns shape ``(batch, length,
    …)``.
    """
    longest = max([tail[0], *(len(array) for array in arrays)])
    padded = np.full((len(arrays), longest, *tail[1:]), fill, dtype=arrays[0].dtype)
    for row, array in zip(padded, arrays, strict=True):
        row[: len(array)] = array
    return torch.from_numpy(padded)


def languages_of(examples: Examples, side: Side) -> Tensor:
    """Ids of the languages of one side (see :func:`language_id`), shape ``(batch,)``."""
    return torch.tensor([language_id(example.get(f"{side}_lang") or "") for example in examples])


def fingerprint(*texts: str) -> int:
    """A 63-bit fingerprint of one or several texts, the same in every process."""
    return xxhash.xxh64_intdigest("\n".join(texts).encode()) >> 1
