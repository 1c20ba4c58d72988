import pytest
import torch

from metaphrase.modeling.functional import translation_ranking


@pytest.mark.parametrize("direction", ["source_to_target", "target_to_source", "symmetric"])
def test_it_is_the_pure_function(make_loss, encodings_of, bitext, direction):
    loss = make_loss("tr", direction=direction, margin=0.1, temperature=0.2)
    encodings = encodings_of(loss, bitext[:6])
    wanted = translation_ranking(
        encodings["source"].sentence_bh,
        encodings["target"].sentence_bh,
        direction=direction,
        margin=0.1,
        temperature=0.2,
    )
    torch.testing.assert_close(loss.objectives["tr"](encodings), wanted)


def test_identical_targets_can_leave_the_denominator(make_loss, encodings_of, bitext):
    twin = {**bitext[1], "target": bitext[0]["target"]}
    rows = [bitext[0], twin, bitext[2]]
    losses = {}
    for mask in (False, True):
        loss = make_loss("tr", mask_duplicates=mask)
        encodings = encodings_of(loss, rows)
        losses[mask] = loss.objectives["tr"](encodings)
    target = encodings["target"].sentence_bh
    torch.testing.assert_close(target[0], target[1])
    source = encodings["source"].sentence_bh
    pair = torch.tensor([[False, True, False], [True, False, False], [False, False, False]])
    torch.testing.assert_close(losses[True], translation_ranking(source, target, duplicate_bb=pair))
    assert losses[True] < losses[False]


def test_identical_sources_can_leave_the_denominator(make_loss, encodings_of, bitext):
    rows = [bitext[0], {**bitext[1], "source": bitext[0]["source"]}, bitext[2]]
    plain, masked = (
        loss.objectives["tr"](encodings_of(loss, rows))
        for loss in (make_loss("tr"), make_loss("tr", mask_duplicates=True))
    )
    assert masked < plain


def test_the_projection_trains_and_is_only_in_the_heads(make_loss, encodings_of, bitext):
    loss = make_loss("tr", projection="mlp")
    loss.objectives["tr"](encodings_of(loss, bitext[:5])).backward()
    grads = [parameter.grad.abs().max() for parameter in loss.heads.parameters()]
    assert len(grads) == 2
    assert min(grads) > 0
    assert not list(make_loss("tr").heads.parameters())
