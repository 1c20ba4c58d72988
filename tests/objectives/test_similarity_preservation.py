import copy

import pytest
import torch

from metaphrase.modeling.encoding import encode_views
from metaphrase.modeling.languages import language_id
from metaphrase.objectives.similarity_preservation import similarity_preservation
from tests.oracles import assert_equal_gradients, similarity_preservation_loop

ALL = ~torch.eye(6, dtype=torch.bool)


def embeddings(*seeds, rows=6):
    return [torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in seeds]


@pytest.mark.parametrize("divergence", ["squared", "kl"])
@pytest.mark.parametrize("sides", ["source", "target", "both"])
def test_matches_loop(make_loss, batch_of, bitext, divergence, sides):
    """Three languages on the source side, of which one has a single sentence."""
    softmax = {"temperature": 0.2} if divergence == "kl" else {}
    loss = make_loss("similarity-preservation", sides=sides, divergence=divergence, **softmax)
    original = copy.deepcopy(loss.model)
    with torch.no_grad():
        for parameter in loss.model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).double()
    languages = ["de", "fr", "de", "de", "sw", "fr"]
    rows = [{**row, "source_lang": code} for row, code in zip(bitext, languages, strict=False)]
    batch = batch_of(loss, rows)
    encodings, before = encode_views(loss.model, batch), encode_views(original, batch)
    read = ("source", "target") if sides == "both" else (sides,)
    slow = sum(
        similarity_preservation_loop(
            encodings[side].sentence_bh,
            before[side].sentence_bh.detach(),
            languages if side == "source" else ["en"] * len(rows),
            temperature=0.2 if divergence == "kl" else None,
        )
        for side in read
    ) / len(read)
    fast = loss.objectives["similarity-preservation"](encodings)
    assert fast.item() > 1e-6
    assert_equal_gradients(fast, slow, loss.model, least=1e-6)


@pytest.mark.parametrize("divergence", ["squared", "kl"])
def test_rotations_and_lengths_are_free(divergence):
    new, old = embeddings(1, 2)
    rotation, _ = torch.linalg.qr(embeddings(3, rows=4)[0])
    length = torch.rand(6, 1, dtype=torch.float64) + 0.5
    assert similarity_preservation(old @ rotation * length, old, ALL, divergence=divergence).item() < 1e-15
    assert similarity_preservation(new, old, ALL, divergence=divergence).item() > 0.01


@pytest.mark.parametrize("divergence", ["squared", "kl"])
def test_each_language_may_move_by_itself(divergence):
    old = embeddings(1)[0]
    turns = [torch.linalg.qr(turn)[0] for turn in embeddings(2, 3, rows=4)]
    language = torch.tensor([0, 0, 0, 1, 1, 1])
    new = torch.stack([row @ turns[code] for row, code in zip(old, language, strict=True)])
    own = (language[:, None] == language) & ALL
    assert similarity_preservation(new, old, own, divergence=divergence).item() < 1e-15
    assert similarity_preservation(new, old, ALL, divergence=divergence).item() > 0.01


def test_two_languages_are_not_compared(make_loss, encodings_of, bitext):
    loss = make_loss("similarity-preservation", sides="source")
    encodings = encodings_of(loss, bitext[:2])
    encodings["source"].sentence_bh.data[0] *= -1
    term = loss.objectives["similarity-preservation"]
    assert term(encodings).item() > 0.01
    encodings["source"].features["language"].copy_(torch.tensor([language_id("de"), language_id("fr")]))
    value = term(encodings)
    value.backward()
    assert value.item() == 0
    assert not encodings["source"].sentence_bh.grad.any()


def test_the_nearest_neighbours_count_most_in_the_divergence():
    """The same change of a cosine, near and far."""
    old = torch.tensor([[1.0, 0.0], [0.9, 0.44], [-0.2, 0.98]])
    near, far = old.clone(), old.clone()
    near[1], far[2] = torch.tensor([0.8, 0.6]), torch.tensor([-0.3, 0.954])
    row = torch.tensor([[False, True, True], [False] * 3, [False] * 3])
    values = [similarity_preservation(new, old, row, divergence="kl", temperature=0.5) for new in (near, far)]
    assert values[0] > values[1] > 0
