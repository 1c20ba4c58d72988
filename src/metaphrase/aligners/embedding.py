"""Word alignment from an encoder's token states: words with similar states translate each other.

The methods need no training: mutual argmax and itermax (SimAlign), mutual argmax of locally scaled similarities (CSLS), or a
threshold on both softmaxes of dot products (awesome-align) or of cosines. Each side is encoded separately, as in both papers:
encoding a pair jointly makes alignment worse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from metaphrase.aligners.base import Aligner, Alignment, Level, Method, WordPair, check_word_pairs
from metaphrase.corpus.words import Link, Words, piece_spans
from metaphrase.encoders.loading import load_encoder
from metaphrase.exceptions import ModelError, UsageError
from metaphrase.io.arguments import Count, CountOr0, Positive, Share, checked
from metaphrase.modeling.functional import check_finite_rows
from metaphrase.modeling.packing import PACKABLE, packed

#: Factor of the similarities between linked and free units in the second round of `itermax`, as in SimAlign.
DISCOUNT = 0.9
#: Batches whose states are kept at a time.
_BATCHES = 16


class Rule(NamedTuple):
    """How the words of a pair are linked by their states; see `EmbeddingAligner`."""

    method: Method = "itermax"
    level: Level = "piece"
    threshold: float = 1e-3
    temperature: float | None = None


def check_softmax(method: str, threshold: float | None, temperature: float | None) -> None:
    """Refuse settings of ``"softmax"`` for another method, unless they have their default.

    Raises:
        UsageError: The threshold or the temperature would have no effect.
    """
    if method == "softmax":
        return
    for name, value in (("threshold", threshold), ("temperature", temperature)):
        if value not in (None, getattr(Rule(), name)):
            raise UsageError(
                f"{name!r} is {value:g}, but the method {method!r} has none. Omit it, or use the method 'softmax'."
            )


def mutual_argmax(similarity_bst: Tensor, mask_bst: Tensor) -> Tensor:
    """Link units that are each other's most similar unit; the first wins in a tie.

    Args:
        similarity_bst: Similarity of each source and target unit, shape ``(batch, source, target)``.
        mask_bst: True at real units.

    Returns:
        Links, boolean, shape ``(batch, source, target)``.

    Reference: Jalili Sabet et al. 2020, "SimAlign: High Quality Word Alignments Without Parallel Training Data Using
    Static and Contextualized Embeddings", section 2.2, Argmax.

    >>> mutual_argmax(torch.tensor([[[0.9, 0.8], [0.7, 0.1]]]), torch.tensor([[[True]]])).tolist()
    [[[True, False], [False, False]]]
    """
    similarity_bst = similarity_bst.masked_fill(~mask_bst, -torch.inf)
    n_source, n_target = similarity_bst.shape[-2:]
    forward_bst = F.one_hot(similarity_bst.argmax(-1), n_target).bool()
    backward_bst = F.one_hot(similarity_bst.argmax(-2), n_source).bool().mT
    return forward_bst & backward_bst & mask_bst


def itermax(similarity_bst: Tensor, mask_bst: Tensor, *, iterations: int = 2) -> Tensor:
    """Apply mutual argmax repeatedly to find links for units without one.

    From the second round on, similarities between two linked units become 0, and those between a linked and a free unit
    are multiplied by ``DISCOUNT``. The rounds end when either side has no free unit. As in the released code, a pair with at
    most two units on one side has only the first round.

    Args:
        similarity_bst: Similarities of at least 0, shape ``(batch, source, target)``.
        mask_bst: True at real units.
        iterations: Number of rounds.

    Returns:
        Links, boolean, shape ``(batch, source, target)``.

    Reference: Jalili Sabet et al. 2020 (SimAlign), section 2.2, Itermax (α = 0.9, two rounds).
    """
    links_bst = mutual_argmax(similarity_bst, mask_bst)
    source_bs1, target_b1t = mask_bst.any(-1, keepdim=True), mask_bst.any(-2, keepdim=True)
    small_b11 = torch.minimum(source_bs1.sum(-2, keepdim=True), target_b1t.sum(-1, keepdim=True)) <= 2
    for _ in range(iterations - 1):
        free_bs1 = source_bs1 & ~links_bst.any(-1, keepdim=True)
        free_b1t = target_b1t & ~links_bst.any(-2, keepdim=True)
        weight_bst = torch.where(free_bs1 & free_b1t, 1.0, DISCOUNT).masked_fill(~(free_bs1 | free_b1t), 0.0)
        found_bst = mutual_argmax(similarity_bst * weight_bst.to(similarity_bst.dtype), mask_bst)
        over_b11 = small_b11 | ~free_bs1.any(-2, keepdim=True) | ~free_b1t.any(-1, keepdim=True)
        links_bst = links_bst | (found_bst & (free_bs1 | free_b1t) & ~over_b11)
    return links_bst


def locally_scaled(similarity_bst: Tensor, mask_bst: Tensor, *, neighbours: int = 5) -> Tensor:
    """Lower the similarities of units that are similar to many units of the other side.

    A hub, such as a comma, is the most similar unit of several words. ``2 s_ij − r_i − r_j`` corrects this, where ``r`` is
    the mean of a unit's highest similarities to the other side.

    Args:
        similarity_bst: Similarity of each source and target unit, shape ``(batch, source, target)``.
        mask_bst: True at real units.
        neighbours: Number of similarities in a mean; all of them if there are fewer.

    Returns:
        Scaled similarities, shape ``(batch, source, target)``; minus infinity at units that are not real.

    Reference: Conneau et al. 2018, "Word Translation Without Parallel Data", section 2.3 (CSLS), where the neighbours are
    words of the vocabulary.

    >>> locally_scaled(torch.tensor([[[0.9, 0.5], [0.8, 0.5]]]), torch.tensor([[[True]]]), neighbours=1)[0]
    tensor([[ 0.0000, -0.4000],
            [-0.1000, -0.3000]])
    """
    masked_bst = similarity_bst.masked_fill(~mask_bst, -torch.inf)
    means = []
    for side in (-1, -2):
        best = masked_bst.topk(min(neighbours, masked_bst.shape[side]), dim=side).values
        found = best.isfinite()
        means.append(best.masked_fill(~found, 0).sum(side, keepdim=True) / found.sum(side, keepdim=True).clamp(min=1))
    return (2 * similarity_bst - means[0] - means[1]).masked_fill(~mask_bst, -torch.inf)


def softmax_intersection(logits_bst: Tensor, mask_bst: Tensor, *, threshold: float = 1e-3) -> tuple[Tensor, Tensor]:
    """Link units whose probability exceeds a threshold in the softmaxes of both directions.

    Args:
        logits_bst: Dot products of the states of source and target units, or their cosines divided by a temperature, shape
            ``(batch, source, target)``.
        mask_bst: True at real units.
        threshold: Minimum of both probabilities.

    Returns:
        Links, boolean, and their scores, 0 elsewhere, both of shape ``(batch, source, target)``. A score is the harmonic
        mean of both probabilities, each with the square root of its number of candidates as temperature, as the
        released code prints it; without it, nearly all scores would be 1.

    Reference: Dou and Neubig 2021, "Word Alignment by Fine-tuning Embeddings on Parallel Corpora" (awesome-align),
    section 2.1.
    """
    logits_bst = logits_bst.masked_fill(~mask_bst, torch.finfo(logits_bst.dtype).min)
    links_bst = (logits_bst.softmax(-1) > threshold) & (logits_bst.softmax(-2) > threshold) & mask_bst
    n_source, n_target = mask_bst.sum(-2, keepdim=True).amax(-1, True), mask_bst.sum(-1, keepdim=True).amax(-2, True)
    forward_bst = (logits_bst / n_target.clamp(min=1).sqrt()).softmax(-1)
    backward_bst = (logits_bst / n_source.clamp(min=1).sqrt()).softmax(-2)
    score_bst = 2 * forward_bst * backward_bst / (forward_bst + backward_bst + 1e-9)
    return links_bst, score_bst.masked_fill(~links_bst, 0.0)


def default_layer(layers: int) -> int:
    """Return the default layer: two thirds of the layers, the 8th of 12.

    SimAlign and awesome-align both found the 8th layer of multilingual BERT to be the best; higher layers specialise in the
    encoder's training objective.

    >>> default_layer(12), default_layer(24), default_layer(2)
    (8, 16, 1)
    """
    return round(2 * layers / 3)


@checked
class EmbeddingAligner(Aligner):
    """Links words with similar states in an encoder.

    Both levels of both papers are available: states of word pieces, where two words are linked if any of their pieces are,
    or means over the pieces of each word. Scores are those of `softmax_intersection` for ``softmax``, and else
    ``(1 + cosine) / 2``; a word link has the score of its best piece link. Words that are truncated,
    wholly or in part, have no links. Sentences are encoded without padding and only up to the layer, if `packed` supports
    the encoder. Each distinct sentence is encoded once per block of about a thousand pairs.

    Args:
        model: A SentenceTransformer, or a name for `load_encoder`: ``"starter"``, a Hub id or a folder.
        layer: From 0, the embeddings, to the number of layers; None uses `default_layer`.
        method: ``"argmax"`` finds the fewest and most precise links, ``"itermax"`` finds more, ``"csls"`` is argmax of
            similarities that `locally_scaled` corrects for hubs, ``"softmax"`` also links one word to several.
        level: ``"piece"`` or ``"word"``.
        threshold: See `softmax_intersection`; ``"softmax"`` only. The default is 0.2 with a temperature, and else
            awesome-align's 0.001.
        temperature: Temperature of the softmaxes of cosines; None compares dot products, as awesome-align does.
            ``"softmax"`` only.
        batch_size: Sentences per forward pass, and pairs per comparison.
        device: Device of a model given by name.

    Raises:
        ValueError: The layer, the method or the level is unknown, a setting does not apply to the method, or the tokenizer of
            the model is slow.

    Reference: Jalili Sabet et al. 2020 (SimAlign); Dou and Neubig 2021 (awesome-align); Conneau et al. 2018 (CSLS).
    """

    name = "embedding"

    def __init__(
        self,
        model: SentenceTransformer | str | Path = "starter",
        *,
        layer: CountOr0 | None = None,
        method: Method = "itermax",
        level: Level = "piece",
        threshold: Share | None = None,
        temperature: Positive | None = None,
        batch_size: Count = 64,
        device: str | None = None,
    ) -> None:
        check_softmax(method, threshold, temperature)
        self.model = model if isinstance(model, SentenceTransformer) else load_encoder(model, device=device)
        if not getattr(self.model.tokenizer, "is_fast", False):
            raise ModelError(
                "The embedding aligner requires a fast tokenizer, because words are found by character offsets."
            )
        layers = self.model[0].auto_model.config.num_hidden_layers
        self.layer = default_layer(layers) if layer is None else layer
        if not 0 <= self.layer <= layers:
            raise ModelError(f"Unknown layer {layer}: the encoder has layers 0 to {layers}.")
        self.method = method
        self.level = level
        self.threshold = threshold if threshold is not None else 1e-3 if temperature is None else 0.2
        self.temperature = temperature
        self.batch_size = batch_size

    def align(self, pairs: Sequence[WordPair]) -> list[Alignment]:
        """Align sentence pairs; see `Aligner.align`."""
        return self.align_by(pairs, [self.rule])[0]

    @property
    def rule(self) -> Rule:
        """The aligner's own method, level, threshold and temperature."""
        return Rule(self.method, self.level, self.threshold, self.temperature)

    @torch.inference_mode()
    def align_by(self, pairs: Sequence[WordPair], rules: Sequence[Rule]) -> list[list[Alignment]]:
        """Align sentence pairs by several rules; each sentence is encoded once for all of them."""
        check_word_pairs(pairs)
        self.model.eval()
        alignments: list[list[Alignment]] = [[] for _ in rules]
        size = _BATCHES * self.batch_size
        with packed(self.model), _up_to(self.model[0].auto_model, self.layer):
            for start in range(0, len(pairs), size):
                block = pairs[start : start + size]
                sides = {words: None for pair in block for words in pair}
                states, encodings = self._encode(list(dict.fromkeys(words.text for words in sides)))
                pieces = {words: (states[words.text], piece_spans(encodings[words.text], words)) for words in sides}
                for by_rule, rule in zip(alignments, rules, strict=True):
                    by_rule += self._align(block, pieces, rule)
        return alignments

    @torch.inference_mode()
    def word_states(self, sentences: Sequence[Words]) -> list[tuple[list[int], Tensor]]:
        """States of words in the aligner's layer, each the mean over the states of its pieces.

        Returns for each sentence the indices of the words that have states (truncation may remove some), and their states,
        shape ``(words, hidden)``.
        """
        self.model.eval()
        with packed(self.model), _up_to(self.model[0].auto_model, self.layer):
            states, encodings = self._encode(list(dict.fromkeys(words.text for words in sentences)))
        return [_word_means(states[words.text], piece_spans(encodings[words.text], words)) for words in sentences]

    def _align(
        self, pairs: Sequence[WordPair], pieces: Mapping[Words, tuple[Tensor, np.ndarray]], rule: Rule
    ) -> list[Alignment]:
        units = {words: _units(*of_words, rule.level) for words, of_words in pieces.items()}
        compared = [at for at, pair in enumerate(pairs) if all(units[words][1] for words in pair)]
        compared.sort(key=lambda at: [len(units[words][1]) for words in pairs[at]])
        alignments = [Alignment((), ())] * len(pairs)
        for start in range(0, len(compared), self.batch_size):
            batch = compared[start : start + self.batch_size]
            sources, targets = ([units[pairs[at][side]] for at in batch] for side in (0, 1))
            linked = link_units([states_uh for states_uh, _ in sources], [states_uh for states_uh, _ in targets], rule)
            for at, (_, source_words), (_, target_words), links in zip(batch, sources, targets, linked, strict=True):
                alignments[at] = _word_alignment(links, source_words, target_words)
        return alignments

    def _encode(self, texts: list[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """States of the layer, shape ``(pieces, hidden)``, and tokenisation of each text."""
        model = self.model
        encodings = model.tokenizer(texts, truncation=True, max_length=model.max_seq_length).encodings
        order = sorted(range(len(texts)), key=lambda at: len(encodings[at].ids))
        states: dict[str, Tensor] = {}
        for start in range(0, len(texts), self.batch_size):
            batch = order[start : start + self.batch_size]
            ids = [torch.tensor(encodings[at].ids) for at in batch]
            features = {
                "input_ids": pad_sequence(ids, True, float(model.tokenizer.pad_token_id)),
                "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], True),
            }
            output = model[0]({name: tensor.to(model.device) for name, tensor in features.items()})
            layers = output.get("all_layer_embeddings")
            states_blh = output["token_embeddings"] if layers is None else layers[self.layer]
            unpadded = [states_lh[: len(row)] for row, states_lh in zip(ids, states_blh.float(), strict=True)]
            check_finite_rows(torch.cat(unpadded))
            states.update((texts[at], states_lh) for at, states_lh in zip(batch, unpadded, strict=True))
        return states, dict(zip(texts, encodings, strict=True))


def _units(states_lh: Tensor, spans_w2: np.ndarray, level: Level) -> tuple[Tensor, list[list[int]]]:
    """States of the units that are compared, shape ``(units, hidden)``, and the words that each belongs to."""
    if level == "word":
        words, states_wh = _word_means(states_lh, spans_w2)
        return states_wh, [[word] for word in words]
    owners: dict[int, list[int]] = {}
    for word in np.flatnonzero(spans_w2[:, 1]).tolist():
        for piece in range(*spans_w2[word]):
            owners.setdefault(piece, []).append(word)
    return states_lh[list(owners)], list(owners.values())


def link_units(sources: list[Tensor], targets: list[Tensor], rule: Rule) -> list[dict[Link, float]]:
    """Link the units of sentence pairs by their states, each of shape ``(units, hidden)``; links with their scores."""
    source_bsh, target_bth = pad_sequence(sources, True), pad_sequence(targets, True)
    real_bs, real_bt = (pad_sequence([x.new_ones(len(x)) for x in side], True).bool() for side in (sources, targets))
    mask_bst = real_bs.unsqueeze(2) & real_bt.unsqueeze(1)
    if rule.method != "softmax" or rule.temperature is not None:
        source_bsh, target_bth = F.normalize(source_bsh, dim=-1), F.normalize(target_bth, dim=-1)
    dots_bst = source_bsh @ target_bth.mT
    if rule.method == "softmax":
        logits_bst = dots_bst / (rule.temperature or 1)
        links_bst, score_bst = softmax_intersection(logits_bst, mask_bst, threshold=rule.threshold)
    else:
        score_bst = (1 + dots_bst) / 2
        compared_bst = locally_scaled(score_bst, mask_bst) if rule.method == "csls" else score_bst
        match: Callable[[Tensor, Tensor], Tensor] = itermax if rule.method == "itermax" else mutual_argmax
        links_bst = match(compared_bst, mask_bst)
    links: list[dict[Link, float]] = [{} for _ in sources]
    for (row, i, j), score in zip(links_bst.nonzero().tolist(), score_bst[links_bst].tolist(), strict=True):
        links[row][i, j] = score
    return links


def _word_means(states_lh: Tensor, spans_w2: np.ndarray) -> tuple[list[int], Tensor]:
    """Indices of the words that have pieces, and the means over their pieces' states, shape ``(words, hidden)``."""
    words = np.flatnonzero(spans_w2[:, 1]).tolist()
    means = [states_lh[slice(*spans_w2[word])].mean(dim=0) for word in words]
    return words, torch.stack(means) if means else states_lh[:0]


def _word_alignment(
    links: dict[Link, float], source_words: list[list[int]], target_words: list[list[int]]
) -> Alignment:
    """Words are linked if any of their units are, with the best of their scores."""
    best: dict[Link, float] = {}
    for (s, t), score in links.items():
        for i in source_words[s]:
            for j in target_words[t]:
                best[i, j] = max(score, best.get((i, j), 0.0))
    ordered = sorted(best)
    return Alignment(tuple(ordered), tuple(best[link] for link in ordered))


@contextmanager
def _up_to(encoder: Any, layer: int) -> Iterator[None]:
    """Stop an encoder after a layer if its architecture supports it; otherwise return the states of all layers."""
    owner, name, value = encoder.config, "output_hidden_states", True
    if encoder.config.model_type in PACKABLE:
        owner, name, value = encoder.encoder, "layer", encoder.encoder.layer[:layer]
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
