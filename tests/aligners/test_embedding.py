import math
from itertools import product

import numpy as np
import pytest
import torch

from metaphrase.aligners.embedding import (
    EmbeddingAligner,
    Rule,
    default_layer,
    itermax,
    locally_scaled,
    mutual_argmax,
    softmax_intersection,
)
from metaphrase.corpus.words import Words
from tests.aligners.joined import join_words
from tests.conftest import mostly_slow

PAIRS = [
    (Words.of("der Hund schläft"), Words.of("the dog sleeps")),
    (Words.of("ja"), Words.of("yes")),
    (Words.of("das Haus ist rot"), Words.of("the house is red and the garden is big")),
    (Words.of(""), Words.of("yes")),
    (Words.of("der Garten ist groß und das Haus ist klein"), Words.of("yes yes")),
]


# ----------------------------------------------------------------------------------------------- loops from the papers


def argmax_loop(similarity):
    """SimAlign, section 2.2: i and j are linked if each is the other's argmax."""
    m, n = similarity.shape
    links = set()
    for i in range(m):
        j = max(range(n), key=lambda k: (similarity[i][k], -k))
        if max(range(m), key=lambda k: (similarity[k][j], -k)) == i:
            links.add((i, j))
    return links


def itermax_loop(similarity, iterations, alpha):
    """SimAlign, section 2.2, with the two early ends of its released code."""
    m, n = similarity.shape
    links = argmax_loop(similarity)
    if min(m, n) <= 2:
        return links
    for _ in range(iterations - 1):
        rows, columns = {i for i, _ in links}, {j for _, j in links}
        if len(rows) == m or len(columns) == n:
            break
        discounted = similarity.copy()
        for i in range(m):
            for j in range(n):
                discounted[i, j] *= 0 if i in rows and j in columns else alpha if i in rows or j in columns else 1
        new = {(i, j) for i, j in argmax_loop(discounted) if not (i in rows and j in columns)}
        if not new - links:
            break
        links |= new
    return links


def csls_loop(similarity, neighbours):
    """Conneau et al. 2018, section 2.3, with the units of the other side as neighbours."""
    m, n = similarity.shape

    def mean(values):
        best = sorted(values, reverse=True)[:neighbours]
        return sum(best) / len(best)

    rows = [mean(similarity[i, j] for j in range(n)) for i in range(m)]
    columns = [mean(similarity[i, j] for i in range(m)) for j in range(n)]
    return np.array([[2 * similarity[i, j] - rows[i] - columns[j] for j in range(n)] for i in range(m)])


def softmax_loop(dots, threshold):
    """awesome-align, section 2.1; the score as its code prints it."""
    m, n = dots.shape

    def probability(values, at, temperature=1.0):
        return math.exp(values[at] / temperature) / sum(math.exp(value / temperature) for value in values)

    links = {}
    for i in range(m):
        for j in range(n):
            row, column = list(dots[i]), list(dots[:, j])
            if probability(row, j) > threshold and probability(column, i) > threshold:
                p, q = probability(row, j, math.sqrt(n)), probability(column, i, math.sqrt(m))
                links[i, j] = 2 * p * q / (p + q)
    return links


def linked(links_st):
    return {(i, j) for i, j in links_st.nonzero().tolist()}


SHAPES = [(1, 1), (1, 5), (2, 7), (3, 3), (4, 9), (12, 8)]


def padded(matrices):
    """Matrices of several shapes in one batch, with garbage at the padding."""
    rows, columns = max(m.shape[0] for m in matrices), max(m.shape[1] for m in matrices)
    batch, mask = torch.full((len(matrices), rows, columns), 50.0, dtype=torch.float64), []
    for row, matrix in zip(batch, matrices, strict=True):
        row[: matrix.shape[0], : matrix.shape[1]] = torch.from_numpy(matrix)
        real = torch.zeros(rows, columns, dtype=torch.bool)
        real[: matrix.shape[0], : matrix.shape[1]] = True
        mask.append(real)
    return batch, torch.stack(mask)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("iterations", [1, 2, 4])
def test_argmax_and_itermax_match_the_loop_in_a_padded_batch(seed, iterations):
    matrices = [np.random.default_rng([seed, *shape]).random(shape).round(2) for shape in SHAPES]  # rounded: with ties
    batch, mask = padded(matrices)
    for matrix, links in zip(matrices, mutual_argmax(batch, mask), strict=True):
        assert linked(links) == argmax_loop(matrix)
    for matrix, links in zip(matrices, itermax(batch, mask, iterations=iterations), strict=True):
        assert linked(links) == itermax_loop(matrix, iterations, 0.9)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("neighbours", [1, 5])
def test_local_scaling_matches_the_loop_in_a_padded_batch(seed, neighbours):
    matrices = [np.random.default_rng([seed, *shape]).standard_normal(shape) for shape in SHAPES]
    batch, mask = padded(matrices)
    scaled = locally_scaled(batch, mask, neighbours=neighbours)
    assert (scaled[~mask] == -torch.inf).all()
    for matrix, row, real in zip(matrices, scaled, mask, strict=True):
        np.testing.assert_allclose(
            row[real].reshape(matrix.shape), csls_loop(matrix, neighbours), rtol=1e-12, atol=1e-12
        )


def test_local_scaling_takes_words_from_a_hub():
    similarity = torch.tensor([[[0.9, 0.85, 0.1], [0.9, 0.1, 0.1], [0.1, 0.1, 0.2]]])  # all like the first column
    mask = torch.ones(1, 3, 3, dtype=torch.bool)
    assert linked(mutual_argmax(similarity, mask)[0]) == {(0, 0), (2, 2)}
    assert linked(mutual_argmax(locally_scaled(similarity, mask), mask)[0]) == {(0, 1), (1, 0), (2, 2)}


@pytest.mark.parametrize("seed", range(5))
def test_softmax_matches_the_loop_in_a_padded_batch(seed):
    matrices = [5 * np.random.default_rng([seed, *shape]).standard_normal(shape) for shape in SHAPES]
    batch, mask = padded(matrices)
    links, scores = softmax_intersection(batch, mask, threshold=0.02)
    assert ((scores > 0) == links).all()
    for matrix, row, score in zip(matrices, links, scores, strict=True):
        expected = softmax_loop(matrix, 0.02)
        assert linked(row) == set(expected)
        np.testing.assert_allclose([score[link] for link in expected], list(expected.values()), rtol=1e-7)


def test_itermax_finds_what_argmax_leaves():
    similarity = torch.tensor([[[0.9, 0.8, 0.1], [0.2, 0.1, 0.1], [0.1, 0.1, 0.7]]])
    mask = torch.ones(1, 3, 3, dtype=torch.bool)
    assert linked(mutual_argmax(similarity, mask)[0]) == {(0, 0), (2, 2)}
    # 0.9 × 0.8 > 0.1: the free column 1 takes the linked row 0; row 1 is free and takes the linked column 0.
    assert linked(itermax(similarity, mask)[0]) == {(0, 0), (2, 2), (0, 1), (1, 0)}
    assert linked(itermax(similarity, mask, iterations=1)[0]) == {(0, 0), (2, 2)}


def test_transposing_the_matrix_transposes_the_links():
    similarity, mask = torch.rand(3, 6, 9), torch.ones(3, 6, 9, dtype=torch.bool)
    scaled = lambda matrix, mask: mutual_argmax(locally_scaled(matrix, mask), mask)  # noqa: E731
    for links in (mutual_argmax, itermax, scaled, lambda matrix, mask: softmax_intersection(10 * matrix, mask)[0]):
        assert torch.equal(links(similarity.mT, mask.mT), links(similarity, mask).mT)


def test_the_default_layer_is_two_thirds_up():
    assert [default_layer(n) for n in (2, 6, 12, 24)] == [1, 4, 8, 16]


# --------------------------------------------------------------------------------------------------------- the aligner


def states_of(model, text, layer):
    """States of one layer by transformers alone, a sentence at a time."""
    inputs = model.tokenizer([text], return_tensors="pt")
    output = model[0].auto_model(**inputs, output_hidden_states=True)
    return output.hidden_states[layer][0], inputs.encodings[0]


def aligned_slowly(model, source, target, layer, method, level):
    """Piece links by the loops above, then word links."""
    sides = []
    for words in (source, target):
        states, encoding = states_of(model, words.text, layer)
        units, owners = [], []
        for word, (start, end) in enumerate(words.spans):
            pieces = [
                p
                for p, (first, last) in enumerate(encoding.offsets)
                if not encoding.special_tokens_mask[p] and first < end and last > start
            ]
            if level == "word":
                units.append(states[pieces].mean(0))
                owners.append(word)
            else:
                units += [states[p] for p in pieces]
                owners += [word] * len(pieces)
        sides.append((torch.stack(units), owners))
    (x, of_x), (y, of_y) = sides
    cosine = torch.nn.functional.cosine_similarity(x[:, None], y[None], dim=-1)
    if method == "softmax":
        links = softmax_loop((x @ y.T).numpy(), 1e-3)
    elif method == "softmax of cosines":
        links = softmax_loop((cosine / 0.05).numpy(), 0.02)
    else:
        similarity = ((1 + cosine) / 2).numpy()
        compared = csls_loop(similarity, 5) if method == "csls" else similarity
        found = itermax_loop(similarity, 2, 0.9) if method == "itermax" else argmax_loop(compared)
        links = {(i, j): similarity[i, j] for i, j in found}
    best = {}
    for (i, j), score in links.items():
        link = of_x[i], of_y[j]
        best[link] = max(best.get(link, 0), score)
    return best


@pytest.mark.parametrize(
    ("name", "layer"),
    mostly_slow(
        list(product(("tiny_encoder", "tiny_xlmr"), (0, 1, 2))),
        [("tiny_encoder", 0), ("tiny_encoder", 1), ("tiny_xlmr", 2)],
    ),
)
@pytest.mark.parametrize("method", ["argmax", "itermax", "csls", "softmax", "softmax of cosines"])
@pytest.mark.parametrize("level", ["piece", "word"])
@torch.inference_mode()
def test_matches_one_pair_at_a_time(request, name, layer, method, level):
    model = request.getfixturevalue(name)
    cosines = {"method": "softmax", "temperature": 0.05, "threshold": 0.02}
    settings = cosines if method == "softmax of cosines" else {"method": method}
    aligner = EmbeddingAligner(model, layer=layer, level=level, batch_size=2, **settings)
    for (source, target), alignment in zip(PAIRS, aligner.align(PAIRS), strict=True):
        if not (len(source) and len(target)):
            assert alignment.links == alignment.scores == ()
            continue
        expected = aligned_slowly(model, source, target, layer, method, level)
        assert alignment.links == tuple(sorted(expected))
        assert alignment.links
        np.testing.assert_allclose(alignment.scores, [expected[link] for link in alignment.links], rtol=1e-4)


def test_an_encoder_that_cannot_stop_early_gives_the_same(tiny_encoder, monkeypatch):
    early = EmbeddingAligner(tiny_encoder, layer=1).align(PAIRS)
    monkeypatch.setattr("metaphrase.aligners.embedding.PACKABLE", frozenset())
    late = EmbeddingAligner(tiny_encoder, layer=1).align(PAIRS)
    assert [a.links for a in late] == [a.links for a in early]
    for a, b in zip(early, late, strict=True):
        np.testing.assert_allclose(a.scores, b.scores, rtol=1e-5)
    assert tiny_encoder[0].auto_model.config.output_hidden_states is False


def test_layers_above_are_not_run_and_are_put_back(tiny_encoder):
    layers = tiny_encoder[0].auto_model.encoder.layer
    calls = []
    for at, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, at=at: calls.append(at))
    EmbeddingAligner(tiny_encoder, layer=1).align(PAIRS)
    assert set(calls) == {0}
    assert tiny_encoder[0].auto_model.encoder.layer is layers


def test_layers_are_put_back_after_an_error(tiny_encoder):
    layers = tiny_encoder[0].auto_model.encoder.layer
    aligner = EmbeddingAligner(tiny_encoder, layer=1)
    with pytest.raises(AttributeError):
        aligner.align([(None, None)])
    assert tiny_encoder[0].auto_model.encoder.layer is layers


def test_each_distinct_sentence_is_encoded_once_and_without_padding(tiny_encoder):
    rows = []
    embeddings = tiny_encoder[0].auto_model.embeddings
    embeddings.register_forward_hook(
        lambda module, args, kwargs, output: rows.append(output.shape[:2]), with_kwargs=True
    )
    EmbeddingAligner(tiny_encoder).align(PAIRS + PAIRS)
    texts = {words.text for pair in PAIRS for words in pair}
    pieces = sum(len(ids) for ids in tiny_encoder.tokenizer(sorted(texts))["input_ids"])
    assert rows == [(1, pieces)]


def test_order_and_company_do_not_matter(tiny_encoder):
    aligner = EmbeddingAligner(tiny_encoder, batch_size=2)
    together = aligner.align(PAIRS)
    backwards = aligner.align(PAIRS[::-1])[::-1]
    assert [a.links for a in together] == [a.links for a in backwards]
    assert [aligner.align([pair])[0].links for pair in PAIRS] == [a.links for a in together]
    assert aligner.align([]) == []


def test_blocks_join_seamlessly(tiny_encoder, monkeypatch):
    aligner = EmbeddingAligner(tiny_encoder, batch_size=1)
    whole = [a.links for a in aligner.align(PAIRS)]
    monkeypatch.setattr("metaphrase.aligners.embedding._BATCHES", 2)
    assert [a.links for a in aligner.align(PAIRS)] == whole


def test_a_sentence_is_most_similar_to_itself(tiny_encoder):
    words = Words.of("der Garten ist groß und das Haus rot")
    for level in ("piece", "word"):
        (alignment,) = EmbeddingAligner(tiny_encoder, layer=2, method="argmax", level=level).align([(words, words)])
        assert alignment.links == tuple((i, i) for i in range(len(words)))
        np.testing.assert_allclose(alignment.scores, 1, rtol=1e-6)


def test_words_that_are_cut_have_no_links(tiny_encoder):
    long = Words.of(" ".join(["der Garten ist groß und das Haus ist klein"] * 6))
    tiny_encoder.max_seq_length = 8
    (alignment,) = EmbeddingAligner(tiny_encoder, method="argmax").align([(long, long)])
    pieces = tiny_encoder.tokenizer(long.text, truncation=True, max_length=8).encodings[0]
    whole = [i for i, (_, end) in enumerate(long.spans) if end <= pieces.offsets[-2][1]]
    assert alignment.links == tuple((i, i) for i in whole)
    assert 0 < len(whole) < len(long)


def test_a_piece_of_two_words_counts_for_both(tiny_encoder):
    text = "Haus"
    split = Words(text, ((0, 2), (2, 4)))
    whole = Words.of(text)
    (alignment,) = EmbeddingAligner(tiny_encoder, method="argmax").align([(split, whole)])
    n_pieces = len(tiny_encoder.tokenizer(text, add_special_tokens=False)["input_ids"])
    assert alignment.links == ((0, 0), (1, 0))
    assert n_pieces == 1


def test_words_from_a_list_are_the_same_as_from_text(tiny_encoder):
    aligner = EmbeddingAligner(tiny_encoder)
    listed = [(join_words(list(s)), join_words(list(t))) for s, t in PAIRS]
    assert [a.links for a in aligner.align(listed)] == [a.links for a in aligner.align(PAIRS)]


def test_dropout_is_off(tiny_encoder):
    tiny_encoder.train()
    aligner = EmbeddingAligner(tiny_encoder)
    assert aligner.align(PAIRS) == aligner.align(PAIRS)


def test_the_threshold_bounds_the_links(tiny_encoder):
    counts = [
        sum(len(a.links) for a in EmbeddingAligner(tiny_encoder, method="softmax", threshold=threshold).align(PAIRS))
        for threshold in (1e-3, 0.2, 0.9999)
    ]
    assert counts[0] > counts[1] > counts[2]
    assert EmbeddingAligner(tiny_encoder, method="softmax").rule == Rule("softmax", "piece", 1e-3)
    assert EmbeddingAligner(tiny_encoder, method="softmax", temperature=0.1).rule == Rule("softmax", "piece", 0.2, 0.1)


def test_a_model_is_loaded_by_name(tiny_encoder_dir, tiny_encoder):
    named = EmbeddingAligner(tiny_encoder_dir, device="cpu").align(PAIRS)
    assert [a.links for a in named] == [a.links for a in EmbeddingAligner(tiny_encoder).align(PAIRS)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer": 3}, "layers 0 to 2"),
        ({"layer": -1}, "from 0 to"),
        ({"method": "mwmf"}, "'argmax', 'itermax', 'csls', 'softmax'"),
        ({"level": "char"}, "'piece', 'word'"),
        ({"threshold": 0.5}, "'threshold' is 0.5, but the method 'itermax' has none"),
        ({"method": "csls", "temperature": 0.1}, "'temperature' is 0.1, but the method 'csls' has none"),
    ],
)
def test_wrong_settings_are_refused(tiny_encoder, settings, message):
    with pytest.raises(ValueError, match=message):
        EmbeddingAligner(tiny_encoder, **settings)
