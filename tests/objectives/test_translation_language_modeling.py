import math

import numpy as np
import pytest
import torch

from metaphrase.modeling.views import UNSCORED, Batch, Concatenated, mask_pieces
from metaphrase.objectives.masked_language_modeling import masked_language_modeling
from tests.oracles import cross_entropy_loop


def test_matches_loop(make_loss, encodings_of, bitext):
    loss = make_loss("tlm", mask_rate=0.5, transform="none")
    pair = encodings_of(loss, bitext[:4])["concatenated-0.5-reset"]
    labels = pair.features["labels"]
    scored = [(b, k) for b in range(len(labels)) for k in range(labels.shape[1]) if labels[b, k] != UNSCORED]
    states = torch.stack([pair.tokens_blh[b, k] for b, k in scored])
    head = loss.objectives["tlm"].head
    slow = cross_entropy_loop(states, pair.table_vh, torch.stack([labels[b, k] for b, k in scored]), head.bias_v)
    fast = masked_language_modeling(head, [pair.tokens_blh], [labels], pair.table_vh)
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
    features = view.build(Batch(bitext[:3], tokenizer), [np.random.default_rng(0)] * 3)
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
    random = fates[(fates != tokenizer.mask_token_id) & (fates != ids[chosen])]
    assert set(random.tolist()) == set(range(len(tokenizer))) - {tokenizer.mask_token_id}


AMBER = {"mask_rate": 0.5, "positions": "continuous", "layout": "pair", "segments": True}


@pytest.fixture
def rows(bitext):
    texts = [[f"{row['target']}\n{row['source']}"] for row in bitext[:3]] + [[], [], []]
    return [{**row, "monolingual": text} for row, text in zip(bitext, texts, strict=False)]


def test_the_defaults_are_the_baseline_of_dap(make_loss):
    (view,) = make_loss("tlm").objectives["tlm"].views()
    assert view == Concatenated("concatenated-0.2-reset", 24, 0.2, "reset", "sequences", False, "pair", False)


@pytest.mark.long
def test_monolingual_and_parallel_pieces_are_one_mean(make_loss, encodings_of, rows):
    loss = make_loss("tlm", **AMBER, monolingual=True)
    pair, text = (encodings_of(loss, rows)[view.name] for view in loss.views)
    assert len(pair.tokens_blh) == 6
    assert len(text.tokens_blh) == 3
    objective = loss.objectives["tlm"]
    fast = objective({view.name: encoding for view, encoding in zip(loss.views, (pair, text), strict=True)})
    states, labels = [], []
    for encoding in (pair, text):
        for b, row in enumerate(encoding.features["labels"].tolist()):
            for at, label in enumerate(row):
                if label != UNSCORED:
                    state = encoding.tokens_blh[b, at]
                    transform = objective.head.transform
                    states.append(transform["norm"](objective.head.activation(transform["dense"](state))))
                    labels.append(label)
    slow = cross_entropy_loop(torch.stack(states), pair.table_vh, torch.tensor(labels), objective.head.bias_v)
    assert fast.item() == pytest.approx(slow.item(), rel=1e-9)
    leaves = [pair.tokens_blh, text.tokens_blh]
    got, wanted = (torch.autograd.grad(value, leaves) for value in (fast, slow))
    assert min(grad.abs().max() for grad in wanted) > 0
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_monolingual_text_joins_the_call_of_the_pairs(make_loss, batch_of, rows):
    loss = make_loss("tlm", **AMBER, monolingual=True)
    calls = []
    loss.model[0].auto_model.encoder.register_forward_hook(lambda *args: calls.append(1))
    loss(batch_of(loss, rows))
    assert len(calls) == 1


def test_a_batch_without_monolingual_text_is_tlm_alone(make_loss, batch_of, rows):
    values = []
    for monolingual in (True, False):
        loss = make_loss("tlm", **AMBER, monolingual=monolingual)
        values.append(loss(batch_of(loss, rows[3:]))["tlm"])
    torch.testing.assert_close(*values, rtol=1e-12, atol=0)


def test_monolingual_text_is_shared_with_mlm(make_loss):
    mlm = make_loss("mlm", text="monolingual", mask_rate=0.5).views
    assert mlm[0] in make_loss("tlm", **AMBER, monolingual=True).views


def test_pairs_are_shuffled_on_request(make_loss, batch_of, bitext, tokenizer):
    loss = make_loss("tlm", mask_rate=0.0, layout="pair", order="shuffled")
    (features,) = batch_of(loss, bitext).values()
    source_first = 0
    for row, ids in zip(bitext, features["input_ids"].tolist(), strict=True):
        ways = [
            tokenizer(*texts)["input_ids"]
            for texts in ((row["source"], row["target"]), (row["target"], row["source"]))
        ]
        found = [ids[: len(way)] == way for way in ways]
        assert any(found)
        source_first += found[0]
    assert 4 < source_first < 20


@pytest.mark.parametrize("setting", ["positions", "layout", "order"])
def test_unknown_forms_are_refused(make_loss, setting):
    with pytest.raises(ValueError, match=f"'{setting}' in the args of 'tlm' .* but is 'other'"):
        make_loss("tlm", **{setting: "other"})


def test_the_concatenation_must_fit_the_positions(make_loss):
    make_loss("tlm", max_length=80)  # positions are reset
    make_loss("tlm", max_length=40, positions="continuous")
    make_loss("tlm", max_length=40, positions="continuous", layout="pair")
    with pytest.raises(ValueError, match=r"up to 82 positions, but the encoder has 80\b.*Lower max_length"):
        make_loss("tlm", max_length=41, positions="continuous")
    with pytest.raises(ValueError, match="up to 81 positions"):
        make_loss("tlm", max_length=41, positions="continuous", layout="pair")


def test_another_vocabulary_is_refused(make_loss):
    with pytest.raises(ValueError, match="'tied', 'untied', but is 'english'"):
        make_loss("tlm", vocabulary="english")
