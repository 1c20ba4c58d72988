"""Slow reference implementations of the losses, written from the papers, with one loop per sum."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metaphrase.encoders.positions import first_position
from metaphrase.modeling.encoding import Encoding


def cosine(u: Tensor, v: Tensor) -> Tensor:
    return (u * v).sum() / ((u * u).sum().sqrt() * (v * v).sum().sqrt())


def logsumexp(values: list[Tensor]) -> Tensor:
    largest = max(float(value.detach()) for value in values)
    return largest + sum((value - largest).exp() for value in values).log()


def translation_ranking_loop(
    source: Tensor, target: Tensor, *, temperature: float = 0.05, margin: float = 0.0, dot: bool = False
) -> Tensor:
    """Equation 5 of DAP, with LaBSE's margin: every source ranks all targets."""
    total = 0.0
    for i in range(len(source)):
        similarities = []
        for j in range(len(target)):
            similarity = (source[i] * target[j]).sum() if dot else cosine(source[i], target[j])
            similarities.append((similarity - (margin if i == j else 0.0)) / temperature)
        total = total + logsumexp(similarities) - similarities[i]
    return total / len(source)


def cross_entropy_loop(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None) -> Tensor:
    """Mean over positions of the negative log-probability of the correct piece."""
    total = 0.0
    for n in range(len(labels)):
        logits = [(hidden[n] * weight[v]).sum() + (0.0 if bias is None else bias[v]) for v in range(len(weight))]
        total = total + logsumexp(logits) - logits[int(labels[n])]
    return total / len(labels)


def representation_translation_loop(
    head,
    source,
    source_lengths,
    target_ids,
    target_lengths,
    table,
    *,
    masked=None,
    target=None,
    languages=None,
    double: bool = False,
    slots_first: bool = False,
) -> Tensor:
    """Equation 6 of DAP, pair by pair: the first slots are part of the sequence and masked, as in the released code.

    Position ``t`` of the target is ``offset + t``, where ``offset`` is the head's; positions of XLM-R start after its
    padding id. Pairs are not padded. ``masked`` selects the masked slots; the others contain ``target``, the states of the
    reconstructed sentence. ``languages`` are the codes of the reconstructed sentences.

    ``double`` follows the released code: masks pass through the embedding layer at their own position, leaked states do
    not; then the language vector is added to every slot. If the source is reconstructed, its slots come first
    (``slots_first``).
    """
    layers, total, count = head.layers, 0.0, 0
    first = first_position(layers)
    attention = layers.config._attn_implementation
    layers.set_attn_implementation("eager")
    for i in range(len(source)):
        s, t = int(source_lengths[i]), int(target_lengths[i])
        language = 0.0
        if languages is not None:
            language = head.languages.table.weight[head.languages.codes.tolist().index(int(languages[i]))]
        slots = []
        for k in range(t):
            if masked is not None and not masked[i, k]:
                slots.append(target[i, k] + language if double else target[i, k])
            elif double:
                embedded = layers.embeddings(
                    inputs_embeds=head.mask_h[None, None], position_ids=torch.tensor([[first + k]])
                )
                slots.append(embedded[0, 0] + language)
            else:
                slots.append(head.mask_h + language)
        rows = [source[i, k] for k in range(s)] + slots
        positions = [*range(s), *range(head.offset, head.offset + t)]
        if slots_first:
            positions = [*range(head.offset, head.offset + s), *range(t)]
        position_ids = first + torch.tensor([positions])
        mask = torch.ones(1, s + t, dtype=torch.long)
        mask[0, 0] = mask[0, s] = 0
        hidden = layers(
            inputs_embeds=torch.stack(rows)[None], position_ids=position_ids, attention_mask=mask
        ).last_hidden_state[0]
        for k in range(1, t):
            if masked is not None and not masked[i, k]:
                continue
            state = hidden[s + k]
            transform = head.vocabulary.transform
            state = transform["norm"](head.vocabulary.activation(transform["dense"](state)))
            label = target_ids[i, k : k + 1]
            total = total + cross_entropy_loop(state[None], table, label, head.vocabulary.bias_v)
            count += 1
    layers.set_attn_implementation(attention)
    return total / count


def momentum_contrast_loop(query, key, queue, *, temperature: float = 0.05, literal: bool = False) -> Tensor:
    """Equation 3 of PPA with MoCo's denominator, the positive and the queue; ``literal`` sums over the queue alone."""
    total = 0.0
    for i in range(len(query)):
        positive = (query[i] * key[i]).sum() / temperature
        negatives = [(query[i] * negative).sum() / temperature for negative in queue]
        total = total + logsumexp(negatives if literal else [positive, *negatives]) - positive
    return total / len(query)


def sentence_alignment_loop(source: list[Tensor], target: list[Tensor], *, both: bool = False) -> Tensor:
    """Equations 2 and 3 of AMBER: each row is one sentence's token states, unpadded."""
    source_means = [sum(states) / len(states) for states in source]
    target_means = [sum(states) / len(states) for states in target]
    total = 0.0
    for i in range(len(source)):
        products = [(source_means[i] * mean).sum() for mean in target_means]
        others = [(source_means[i] * source_means[j]).sum() for j in range(len(source)) if both and j != i]
        total = total + logsumexp(products + others) - products[i]
    return total / len(source)


def word_alignment_loop(target_to_source: list[Tensor], source_to_target: list[Tensor]) -> Tensor:
    """Equation 8 of AMBER, with two matrices per pair, ``(heads, |y|, |x|)`` and ``(heads, |x|, |y|)``."""
    total = 0.0
    for backward, forward in zip(target_to_source, source_to_target, strict=True):
        heads, t, s = backward.shape
        trace = sum(backward[h, i, j] * forward[h, j, i] for h in range(heads) for i in range(t) for j in range(s))
        total = total + 1 - trace / heads / min(s, t)
    return total / len(target_to_source)


def prefix_mask_loop(source_length: int, target_length: int, *, reader: str, strict: bool) -> list[list[bool]]:
    """Equations 4 and 5 of AMBER, or 10 and 11: the positions of ``[x ; y]`` that each position attends to."""
    length = source_length + target_length
    in_source = [at < source_length for at in range(length)]
    seen = [[False] * length for _ in range(length)]
    for i in range(length):
        for j in range(length):
            reads = in_source[i] == (reader == "source")
            if in_source[j] != in_source[i]:
                seen[i][j] = reads
            else:
                seen[i][j] = (j < i or (j == i and not strict)) if reads else True
    return seen


def soft_cross_entropy_loop(hidden: Tensor, weight: Tensor, targets, bias: Tensor | None = None) -> Tensor:
    """Weighted negative log-probabilities of ``targets``, a dictionary of weights by piece for each position."""
    total = hidden.sum() * 0.0
    for n, shares in enumerate(targets):
        logits = [(hidden[n] * weight[v]).sum() + (0.0 if bias is None else bias[v]) for v in range(len(weight))]
        for piece, share in shares.items():
            total = total + share * (logsumexp(logits) - logits[piece])
    return total


def koleo_loop(embeddings: Tensor) -> Tensor:
    """KoLeo as in DINOv2: the log of the distance to the nearest other embedding, of normalised embeddings."""
    total = 0.0
    for i in range(len(embeddings)):
        distances = []
        for j in range(len(embeddings)):
            if j != i:
                x, y = (row / (row * row).sum().sqrt() for row in (embeddings[i], embeddings[j]))
                distances.append(((x - y) * (x - y)).sum().sqrt())
        nearest = min(distances, key=lambda distance: float(distance.detach()))
        total = total - (nearest + 1e-8).log()
    return total / len(embeddings)


def transformer_loop(layers, states: Tensor) -> Tensor:
    """Post-norm transformer layers over one sentence without padding, head by head and position by position."""
    for layer in layers:
        attend, width = layer.attention.self, layer.attention.self.attention_head_size
        query, key, value = (projection(states) for projection in (attend.query, attend.key, attend.value))
        rows = []
        for i in range(len(states)):
            parts = []
            for e in range(attend.num_attention_heads):
                at = slice(e * width, (e + 1) * width)
                scores = [(query[i, at] * key[j, at]).sum() / width**0.5 for j in range(len(states))]
                shares = [(score - logsumexp(scores)).exp() for score in scores]
                parts.append(sum(share * value[j, at] for j, share in enumerate(shares)))
            rows.append(torch.cat(parts))
        mixed = layer.attention.output
        states = mixed.LayerNorm(mixed.dense(torch.stack(rows)) + states)
        inner = layer.intermediate.intermediate_act_fn(layer.intermediate.dense(states))
        states = layer.output.LayerNorm(layer.output.dense(inner) + states)
    return states


def mexma_loop(head, clean, masked, table, *, weights=(1.0, 1.0, 0.01)) -> Tensor:
    """MEXMA's loss, sentence by sentence.

    ``clean`` contains the sentence embeddings of the two sides; ``masked`` contains the states, lengths and labels (-100
    at unmasked positions) of the masked sentences of each side.
    """
    distance = sum(
        (clean[0][i, h] - clean[1][i, h]) ** 2 for i in range(len(clean[0])) for h in range(clean[0].shape[1])
    )
    unmasking = 0.0
    for (tokens, lengths, labels), other in zip(masked, reversed(clean), strict=True):
        total, count = 0.0, 0
        for i in range(len(tokens)):
            states = [other[i]] + [tokens[i, k] for k in range(1, int(lengths[i]))]
            hidden = transformer_loop(head.layers.layer, torch.stack(states))
            for k in range(int(lengths[i])):
                if labels[i, k] != -100:
                    total = total + cross_entropy_loop(
                        hidden[k : k + 1], table, labels[i, k : k + 1], head.vocabulary.bias_v
                    )
                    count += 1
        unmasking = unmasking + (total / count if count else 0.0) / 2
    spread = (koleo_loop(clean[0]) + koleo_loop(clean[1])) / 2 if weights[2] else 0.0
    return weights[0] * distance / clean[0].numel() + weights[1] * unmasking + weights[2] * spread


def sentence_to_tokens_loop(head, sentences, languages, texts, table) -> Tensor:
    """KL divergence between a sentence's piece frequencies and the prediction of the head, averaged over sentences."""
    total = 0.0
    for sentence, language, pieces in zip(sentences, languages, texts, strict=True):
        state = sentence
        if head.languages is not None:
            row = head.languages.codes.tolist().index(int(language))
            vector = head.languages.table.weight[row]
            vector = vector - vector.mean()
            vector = vector / ((vector * vector).mean() + 1e-12).sqrt()
            vector = vector * head.language_norm.weight + head.language_norm.bias
            state = torch.cat([vector, sentence])
        state = head.mlp[0](state)
        state = state / (1 + (-state).exp())
        centred = state - state.mean()
        norm = head.mlp[2]
        state = centred / ((centred * centred).mean() + 1e-12).sqrt() * norm.weight + norm.bias
        logits = [(state * table[v]).sum() + head.vocabulary.bias_v[v] for v in range(len(table))]
        for piece in set(pieces):
            p = pieces.count(piece) / len(pieces)
            total = total + p * (math.log(p) - (logits[piece] - logsumexp(logits)))
    return total / len(sentences)


def aligned_word_prediction_loop(
    head, states: list[Tensor], words: list[list], table, *, summed: bool = False
) -> Tensor:
    """Equations 4 and 5 of WACSE, over the sentences of both sides.

    ``states[i]`` are the states of sentence ``i`` with its linked words masked; ``words[i]`` contains, for each of these
    words, the positions of its pieces and the pieces of its translation. The longer of the two is clipped.
    """
    total, count = 0.0, 0
    for sentence, masked in zip(states, words, strict=True):
        for places, pieces in masked:
            for n in range(min(len(places), len(pieces))):
                state = sentence[places[n]]
                state = head.transform["norm"](head.activation(head.transform["dense"](state)))
                total = total + cross_entropy_loop(state[None], table, torch.tensor([pieces[n]]), head.bias_v)
                count += 1
    return total / (len(states) if summed else count)


def word_similarity_loop(word: list[Tensor], other: list[Tensor], kind: str) -> Tensor:
    """φ of WACSE between two words, each given as the states of its pieces."""
    if kind == "pooled":
        return cosine(sum(word) / len(word), sum(other) / len(other))
    cosines = [cosine(u, v) for u in word for v in other]
    return max(cosines) if kind == "max" else sum(cosines) / len(cosines)


def word_translation_ranking_loop(
    sources, targets, links, *, temperature=0.05, kind="pairwise", mask_positives=False, summed=False
) -> Tensor:
    """Equations 6 to 8 of WACSE: ``sources[i]`` and ``targets[i]`` are the words of pair ``i``, ``links[i]`` its links."""
    total, count = 0.0, 0
    for source, target, pairs in zip(sources, targets, links, strict=True):
        for words, others, ranked in ((source, target, pairs), (target, source, [(y, x) for x, y in pairs])):
            for j, k in ranked:
                logits = [word_similarity_loop(words[j], other, kind) / temperature for other in others]
                kept = [n for n in range(len(others)) if n == k or not (mask_positives and (j, n) in ranked)]
                total = total + logsumexp([logits[n] for n in kept]) - logits[k]
                count += 1
    return total / (2 * len(sources) if summed else count)


def mutual_links_loop(links, scores) -> list:
    """Links that are the best link of both of their words, by score; in a tie, the lower word wins."""
    scored = dict(zip(links, scores, strict=True))
    kept = []
    for x, y in links:
        of_x = [(-scored[a, b], b) for a, b in links if a == x]
        of_y = [(-scored[a, b], a) for a, b in links if b == y]
        if min(of_x)[1] == y and min(of_y)[1] == x:
            kept.append((x, y))
    return kept


def disjoint_pieces_loop(word_spans, offsets) -> list[list[int]]:
    """Assign each piece to the word that it shares most characters with, the first in a tie; return the pieces of each word."""
    owned = [[] for _ in word_spans]
    for piece, (start, end) in enumerate(offsets):
        shared = [max(0, min(end, last) - max(start, first)) for first, last in word_spans]
        if shared and max(shared):
            owned[shared.index(max(shared))].append(piece)
    return owned


def contrast(anchor: Tensor, positive: Tensor, negatives: list[Tensor], temperature: float) -> Tensor:
    """Equation 1 of MGC over normalised vectors."""
    right = cosine(anchor, positive) / temperature
    return logsumexp([right, *(cosine(anchor, negative) / temperature for negative in negatives)]) - right


def hard_word_contrast_loop(sources, targets, links, *, temperature=0.1, summed=False) -> Tensor:
    """Equations 2 to 4 of MGC, both directions: ``sources[i]`` and ``targets[i]`` contain a vector for each word."""
    total, anchors = 0.0, 0
    for xs, ys, pairs in zip(sources, targets, links, strict=True):
        for j, k in pairs:
            total = total + contrast(xs[j], ys[k], [y for n, y in enumerate(ys) if n != k], temperature)
            total = total + contrast(ys[k], xs[j], [x for n, x in enumerate(xs) if n != j], temperature)
            anchors += 2
    return total / (len(sources) if summed else anchors)


def multi_head_attention_loop(attention, query: Tensor, states: list[Tensor]) -> Tensor:
    """Attention output of one query over some states, head by head (Vaswani et al. 2017, section 3.2)."""
    hidden, size = len(query), len(query) // attention.num_heads
    weights, biases = attention.in_proj_weight, attention.in_proj_bias
    project = [
        lambda h, n=n: weights[n * hidden : (n + 1) * hidden] @ h + biases[n * hidden : (n + 1) * hidden]
        for n in range(3)
    ]
    heads = []
    for head in range(attention.num_heads):
        part = slice(head * size, (head + 1) * size)
        scores = [(project[0](query)[part] * project[1](state)[part]).sum() / math.sqrt(size) for state in states]
        normaliser = logsumexp(scores)
        heads.append(
            sum((s - normaliser).exp() * project[2](state)[part] for s, state in zip(scores, states, strict=True))
        )
    return attention.out_proj.weight @ torch.cat(heads) + attention.out_proj.bias


def soft_word_contrast_loop(attention, sources, targets, *, temperature=0.1, summed=False) -> Tensor:
    """Equation 5 of MGC, both directions: ``sources[i]`` contains the vectors of the words and of the pieces of a side."""
    total, anchors = 0.0, 0
    for one, other in zip(sources, targets, strict=True):
        for (words, _), (_, pieces) in ((one, other), (other, one)):
            found = [multi_head_attention_loop(attention, word, pieces) for word in words]
            for n, word in enumerate(words):
                total = total + contrast(word, found[n], found[:n] + found[n + 1 :], temperature)
                anchors += 1
    return total / (len(sources) if summed else anchors)


def span_contrast_loop(sources, targets, phrases, *, temperature=0.1, summed=False) -> Tensor:
    """Equation 6 of MGC: ``sources[i]`` contains a vector for each piece, ``phrases[i]`` pairs of sets of positions."""
    total, anchors = 0.0, 0

    def mean(states, places):
        return sum(states[place] for place in places) / len(places)

    for source, target, pairs in zip(sources, targets, phrases, strict=True):
        for (xs, ys), spans in (((source, target), pairs), ((target, source), [(y, x) for x, y in pairs])):
            wrong = {frozenset(other) for _, other in spans}
            for span, other in spans:
                negatives = [mean(ys, places) for places in wrong if not places & set(other)]
                total = total + contrast(mean(xs, span), mean(ys, other), negatives, temperature)
                anchors += 1
    return total / (len(sources) if summed else anchors)


def sentence_contrast_loop(sources: list[Tensor], targets: list[Tensor], *, temperature=0.1) -> Tensor:
    """Equation 8 of MGC, the mean of both directions: ``sources[i]`` are the states of a sentence's tokens."""
    xs, ys = ([sum(states) / len(states) for states in side] for side in (sources, targets))
    total = 0.0
    for i in range(len(xs)):
        total = total + contrast(xs[i], ys[i], ys[:i] + ys[i + 1 :], temperature) / 2
        total = total + contrast(ys[i], xs[i], xs[:i] + xs[i + 1 :], temperature) / 2
    return total / len(xs)


def similarity_preservation_loop(new, old, languages, *, temperature: float | None = None) -> Tensor:
    """Squared differences of the cosines of sentences of one language, or with a temperature the divergence of each row."""
    total, count = 0.0, 0
    for i in range(len(new)):
        peers = [j for j in range(len(new)) if j != i and languages[j] == languages[i]]
        now, then = ([cosine(rows[i], rows[j]) for j in peers] for rows in (new, old))
        if temperature is None:
            total = total + sum((u - v) ** 2 for u, v in zip(now, then, strict=True))
            count += len(peers)
        elif peers:
            logs = [
                [value / temperature - logsumexp([v / temperature for v in row]) for value in row]
                for row in (now, then)
            ]
            total = total + sum(v.exp() * (v - u) for u, v in zip(*logs, strict=True))
            count += 1
    return total / count


def guided_soft_ranking_loop(
    source, target, old_source, old_target, *, temperature, soft_temperature, soft_weight, guided
) -> Tensor:
    """IMASCL's soft labels mixed with the translation, over the candidates that GIST keeps, in both directions."""
    total = 0.0
    for query, candidates, old_query, old_candidates in (
        (source, target, old_source, old_target),
        (target, source, old_target, old_source),
    ):
        for i in range(len(query)):
            own = cosine(old_query[i], old_candidates[i])
            kept = [
                j for j in range(len(query)) if not guided or j == i or cosine(old_query[i], old_candidates[j]) <= own
            ]
            logits = [cosine(query[i], candidates[j]) / temperature for j in kept]
            teacher = [cosine(old_target[i], old_target[j]) / soft_temperature for j in kept]
            for j, logit, wanted in zip(kept, logits, teacher, strict=True):
                share = soft_weight * (wanted - logsumexp(teacher)).exp() + (1 - soft_weight) * (i == j)
                total = total - share * (logit - logsumexp(logits))
    return total / (2 * len(source))


def word_places(row: dict[str, str], side: str, tokenizer: Any) -> list[range]:
    """Positions of the pieces of each word, tokenised word by word."""
    words, at = [], 1
    for word in row[side].split():
        end = at + len(tokenizer(word, add_special_tokens=False)["input_ids"])
        words.append(range(at, end))
        at = end
    return words


def padded(encoding: Encoding, extra: int, label: int = 0) -> Encoding:
    """The same encoding with more padding, whose states are not 0."""
    fill = {name: label if name == "labels" else 0 for name in encoding.features}
    features = {
        name: F.pad(value, (0, extra), value=fill[name]) if value.dim() == 2 else value
        for name, value in encoding.features.items()
    }
    tokens_blh = F.pad(encoding.tokens_blh, (0, 0, 0, extra), value=7.0)
    return replace(encoding, features=features, tokens_blh=tokens_blh, mask_bl=F.pad(encoding.mask_bl, (0, extra)))


def assert_equal_gradients(fast: Tensor, slow: Tensor, model: nn.Module, least: float = 1e-4) -> None:
    """Assert that two values are equal, and their gradients, which are not 0."""
    assert math.isclose(fast.item(), slow.item(), rel_tol=1e-9)
    parameters = [p for p in model.parameters() if p.requires_grad]
    got, wanted = (torch.autograd.grad(v, parameters, allow_unused=True, retain_graph=True) for v in (fast, slow))
    assert max(grad.abs().max() for grad in wanted if grad is not None) > least
    for ours, theirs in zip(got, wanted, strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-12)


def assert_same_loss(fast: Tensor, slow: Tensor, leaves: list[Tensor]) -> None:
    """Assert that value and gradients of a loss are those of its reference."""
    assert math.isclose(fast.item(), slow.item(), rel_tol=1e-9)
    got, wanted = (torch.autograd.grad(value, leaves) for value in (fast, slow))
    for ours, theirs in zip(got, wanted, strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def both_sides_ranking_loop(source, target, same, *, temperature) -> Tensor:
    """Every sentence ranks those of the other side and, except itself, of its own; ``same`` are pairs that are copies."""
    total = 0.0
    for own, other in ((source, target), (target, source)):
        for i in range(len(own)):
            translation = cosine(own[i], other[i]) / temperature
            left = [j for j in range(len(own)) if j != i and {i, j} not in same]
            wrong = [cosine(own[i], side[j]) / temperature for side in (other, own) for j in left]
            total = total + logsumexp([translation, *wrong]) - translation
    return total / (2 * len(source))


def hard_negatives_ranking_loop(source, target, negatives, excluded, *, temperature) -> Tensor:
    """Every source ranks all targets and all negatives but its ``excluded`` ones; every target ranks all sources."""
    total = 0.0
    for i in range(len(source)):
        logits = [cosine(source[i], one) / temperature for one in target]
        wrong = [cosine(source[i], one) / temperature for n, one in enumerate(negatives) if n not in excluded[i]]
        backward = [cosine(one, target[i]) / temperature for one in source]
        total = total + logsumexp([*logits, *wrong]) - logits[i] + logsumexp(backward) - backward[i]
    return total / (2 * len(source))


def several_positives_loop(query, pool, positives, excluded, *, temperature, margin=0.0) -> Tensor:
    """Equation 2 of Khosla et al. 2020, with LaBSE's margin; ``positives[i]`` and ``excluded[i]`` are rows of the pool."""
    total = 0.0
    for i in range(len(query)):
        logits = {}
        for j in range(len(pool)):
            if j in positives[i]:
                logits[j] = (cosine(query[i], pool[j]) - margin) / temperature
            elif j not in excluded[i]:
                logits[j] = cosine(query[i], pool[j]) / temperature
        normaliser = logsumexp(list(logits.values()))
        total = total + sum(normaliser - logits[j] for j in positives[i]) / len(positives[i])
    return total / len(query)
