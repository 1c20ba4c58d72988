import math

import numpy as np
import pytest
import torch

from metaphrase.objectives.translation_language_modeling import masked_language_modeling
from metaphrase.views import UNSCORED, Concatenated, mask_pieces
from tests.oracles import cross_entropy_loop


def test_matches_loop(make_loss, encodings_of, bitext):
    loss = make_loss("tlm", mask_rate=0.5, transform="none")
    pair = encodings_of(loss, bitext[:4])["concatenated-0.5-reset"]
    labels = pair.features["labels"]
    scored = [(b, k) for b in range(len(labels)) for k in range(labels.shape[1]) if labels[b, k] != UNSCORED]
    states = torch.stack([pair.tokens_blh[b, k] for b, k in scored])
    head = loss.objectives["tlm"].head
    slow = cross_entropy_loop(states, pair.table_vh, torch.stack([labels[b, k] for b, k in scored]), head.bias_v)
    fast = masked_language_modeling(head, pair.tokens_blh, labels, pair.table_vh)
    assert fast.item() == pytest.approx(slow.item(), rel=1e-9)
    got, wanted = (torch.autograd.grad(value, [pair.tokens_blh, pair.table_vh]) for value in (fast, slow))
    assert wanted[0].abs().max() > 0
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_nothing_masked_is_a_zero_with_a_graph(make_loss, encodings_of, bitext):
    loss = make_loss("tlm", mask_rate=0.0)
    value = loss.objectives["tlm"](encodings_of(loss, bitext[:3]))
    assert value.item() == 0
    value.backward()


def test_a_blank_table_scores_log_vocabulary(make_loss, encodings_of, bitext, tokenizer):
    loss = make_loss("tlm", vocabulary="untied")
    with torch.no_grad():
        loss.heads.heads["tlm"].table_vh.zero_()
    value = loss.objectives["tlm"](encodings_of(loss, bitext))
    assert value.item() == pytest.approx(math.log(len(tokenizer)))


@pytest.mark.parametrize("positions", ["reset", "continuous"])
def test_positions_and_order(bitext, tokenizer, positions):
    view = Concatenated("concatenated", 24, 0.0, positions)
    features = view.build(bitext[:3], tokenizer, [np.random.default_rng(0)] * 3)
    for row in range(3):
        source, target = (tokenizer(bitext[row][side])["input_ids"] for side in ("source", "target"))
        length = len(source) + len(target)
        assert features["input_ids"][row, :length].tolist() == source + target
        second = 0 if positions == "reset" else len(source)
        wanted = [*range(len(source)), *range(second, second + len(target))]
        assert features["position_ids"][row, :length].tolist() == wanted
        assert features["attention_mask"][row].sum() == length


def test_masking_rates(tokenizer):
    special = tokenizer.all_special_ids
    words = [i for i in range(len(tokenizer)) if i not in special]
    ids = np.resize(np.array(words), 1_000_000)
    ids[::50] = tokenizer.sep_token_id
    masked, labels = mask_pieces(ids, 0.15, tokenizer, np.random.default_rng(0))
    chosen = labels != UNSCORED
    ordinary = ~np.isin(ids, special)
    assert not chosen[~ordinary].any()
    assert chosen[ordinary].mean() == pytest.approx(0.15, abs=0.001)
    assert (labels[chosen] == ids[chosen]).all()
    assert (masked[~chosen] == ids[~chosen]).all()
    fates = masked[chosen]
    assert (fates == tokenizer.mask_token_id).mean() == pytest.approx(0.8, abs=0.005)
    assert (fates == ids[chosen]).mean() == pytest.approx(0.1, abs=0.005)
    assert fates.max() < len(tokenizer)
