import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer

from metaphrase.modeling.encoding import Encoding
from metaphrase.modeling.packing import packed
from metaphrase.modeling.views import UNSCORED
from metaphrase.objectives.mexma import CrossUnmasking, Masked, cross_unmasking, koleo
from tests.oracles import koleo_loop, mexma_loop, padded
from tests.processes import run_python

ROOT = Path(__file__).parents[2]
SMALL = {"layers": 2, "heads": 4}
MASKED = ("masked-source-0.4", "masked-target-0.4")


def leaves_of(loss, encodings):
    sentences = [encodings[name].sentence_bh for name in ("source", "target")]
    return [*sentences, *(encodings[name].tokens_blh for name in MASKED)]


def loop(loss, encodings, **kwargs):
    clean = [encodings[name].sentence_bh for name in ("source", "target")]
    masked = [(e.tokens_blh, e.mask_bl.sum(1), e.features["labels"]) for e in (encodings[name] for name in MASKED)]
    return mexma_loop(loss.objectives["mexma"].head, clean, masked, encodings["source"].table_vh, **kwargs)


@pytest.mark.long
@pytest.mark.parametrize(
    ("rows", "weights"), [(slice(0, 2), (1.0, 1.0, 0.01)), (slice(1, 3), (0.3, 2.0, 0.0)), (slice(2, 3), (1, 1, 0))]
)
def test_matches_loop(make_loss, encodings_of, bitext, rows, weights):
    named = dict(zip(("alignment_weight", "unmasking_weight", "koleo_weight"), weights, strict=True))
    loss = make_loss("mexma", **SMALL, **named)
    encodings = encodings_of(loss, bitext[rows])
    assert all((encodings[name].features["labels"] != UNSCORED).any() for name in MASKED)
    fast, slow = loss.objectives["mexma"](encodings), loop(loss, encodings, weights=weights)
    assert fast.item() == pytest.approx(slow.item(), rel=1e-9)
    leaves = [*leaves_of(loss, encodings), encodings["source"].table_vh, *loss.heads.parameters()]
    got, wanted = (torch.autograd.grad(value, leaves) for value in (fast, slow))
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-11)
    assert all(grad.abs().max() > 0 for grad in wanted[:5])


@pytest.mark.parametrize("batch", [2, 3, 8])
def test_koleo_matches_loop(batch):
    embeddings = torch.randn(batch, 5, dtype=torch.float64, requires_grad=True)
    fast, slow = koleo(embeddings), koleo_loop(embeddings)
    assert fast.item() == pytest.approx(slow.item(), rel=1e-9)
    (got,), (wanted,) = (torch.autograd.grad(value, embeddings) for value in (fast, slow))
    assert wanted.abs().max() > 1e-3
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


def test_koleo_of_known_embeddings():
    eye = torch.eye(4, dtype=torch.float64)
    assert koleo(eye).item() == pytest.approx(-math.log(2) / 2, abs=1e-7)
    assert koleo(torch.cat([eye, -eye])[[0, 4]]).item() == pytest.approx(-math.log(2), abs=1e-7)
    assert koleo(7 * eye).item() == pytest.approx(koleo(eye).item(), rel=1e-12)
    order = torch.randperm(6)
    embeddings = torch.randn(6, 5, dtype=torch.float64)
    assert koleo(embeddings[order]).item() == pytest.approx(koleo(embeddings).item(), rel=1e-12)
    assert koleo(embeddings.bfloat16()).dtype == torch.float32


def test_koleo_without_neighbours_and_with_equal_ones():
    alone = torch.randn(1, 5, requires_grad=True)
    value = koleo(alone)
    assert value.item() == 0
    assert torch.equal(*torch.autograd.grad(value, alone), torch.zeros(1, 5))
    twins = torch.randn(1, 5).repeat(2, 1).requires_grad_()
    value = koleo(twins)
    assert value.item() == pytest.approx(-math.log(1e-8), rel=1e-4)
    assert torch.isfinite(torch.autograd.grad(value, twins)[0]).all()


def test_koleo_separates_neighbours():
    embeddings = torch.nn.Parameter(F.normalize(torch.ones(4, 8) + 0.1 * torch.randn(4, 8), dim=-1))
    before = torch.pdist(F.normalize(embeddings.detach(), dim=-1)).min()
    for _ in range(50):
        (grad,) = torch.autograd.grad(koleo(embeddings), embeddings)
        embeddings.data -= 0.02 * grad
    assert torch.pdist(F.normalize(embeddings.detach(), dim=-1)).min() > 3 * before


def test_clean_and_masked_sentences_share_a_call_of_the_encoder(tiny_encoder, make_loss, batch_of, bitext):
    loss = make_loss("mexma", **SMALL)
    calls = []
    loss.model[0].auto_model.encoder.register_forward_hook(lambda *args: calls.append(1))
    for packing in (False, True):
        with packed(loss.model, enabled=packing):
            loss(batch_of(loss, bitext[:5]))
    assert len(calls) == 2


def test_only_masked_places_are_projected(make_loss, encodings_of, bitext):
    loss = make_loss("mexma", **SMALL)
    encodings = encodings_of(loss, bitext[:6])
    seen = []
    loss.objectives["mexma"].head.vocabulary.register_forward_pre_hook(lambda module, args: seen.append(args))
    loss.objectives["mexma"](encodings)
    labels = [encodings[name].features["labels"] for name in MASKED]
    wanted = torch.cat([side[side != UNSCORED] for side in labels])
    assert len(seen) == 1
    assert torch.equal(seen[0][1], wanted)
    assert len(seen[0][0]) == len(wanted)
    assert loss.transforms() == {"mexma": "none"}


def test_what_the_gradient_reaches(make_loss, encodings_of, bitext):
    loss = make_loss("mexma", **SMALL, alignment_weight=0.0, koleo_weight=0.0)
    encodings = encodings_of(loss, bitext[:6])
    grads = torch.autograd.grad(loss.objectives["mexma"](encodings), leaves_of(loss, encodings))
    for grad, name in zip(grads[2:], MASKED, strict=True):
        encoding = encodings[name]
        scored = (encoding.features["labels"] != UNSCORED).any(1)
        assert not grad[:, 0].any()  # the masked sentence's own first state is replaced
        assert not grad[~encoding.mask_bl].any()
        assert (grad[:, 1:][encoding.mask_bl[:, 1:] & scored[:, None]].abs().sum(-1) > 0).all()
    target_scored = (encodings[MASKED[1]].features["labels"] != UNSCORED).any(1)
    assert torch.equal(grads[0].abs().sum(-1) > 0, target_scored)  # the source's embedding unmasks the target


@pytest.mark.parametrize("gradient", ["both", "tokens", "sentence"])
def test_the_unmasking_gradient_can_be_cut(make_loss, encodings_of, bitext, gradient):
    only = {**SMALL, "alignment_weight": 0.0, "koleo_weight": 0.0}
    loss, both = make_loss("mexma", **only, unmasking_gradient=gradient), make_loss("mexma", **only)
    both.heads.load_state_dict(loss.heads.state_dict())
    encodings = encodings_of(loss, bitext[:6])
    value = loss.objectives["mexma"](encodings)
    grads = torch.autograd.grad(value, leaves_of(loss, encodings), allow_unused=True)
    reached = [grad is not None and grad.abs().max().item() > 0 for grad in grads]
    assert reached == [gradient != "tokens"] * 2 + [gradient != "sentence"] * 2
    torch.testing.assert_close(value, both.objectives["mexma"](encodings), rtol=0, atol=0)


@pytest.mark.parametrize("side", MASKED)
def test_padding_changes_nothing(make_loss, encodings_of, bitext, side):
    loss = make_loss("mexma", **SMALL)
    encodings = encodings_of(loss, bitext[:5])
    wanted = loss.objectives["mexma"](encodings)
    got = loss.objectives["mexma"]({**encodings, side: padded(encodings[side], 3, UNSCORED)})
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_permuting_the_pairs_or_swapping_the_sides_changes_nothing(make_loss, encodings_of, bitext):
    loss = make_loss("mexma", **SMALL)
    objective, encodings = loss.objectives["mexma"], encodings_of(loss, bitext[:5])
    order = torch.tensor([3, 0, 4, 1, 2])
    permuted = {
        name: replace(
            e,
            features={key: value[order] for key, value in e.features.items()},
            sentence_bh=e.sentence_bh[order],
            tokens_blh=e.tokens_blh[order],
            mask_bl=e.mask_bl[order],
        )
        for name, e in encodings.items()
    }
    swapped = dict(zip(("target", "source", *MASKED[::-1]), encodings.values(), strict=True))
    for other in (permuted, swapped):
        torch.testing.assert_close(objective(other), objective(encodings), rtol=1e-12, atol=1e-12)


def test_nothing_masked_leaves_the_other_terms(make_loss, encodings_of, bitext):
    loss = make_loss("mexma", **SMALL, mask_rate=0.0)
    encodings = encodings_of(loss, bitext[:4])
    source, target = encodings["source"].sentence_bh, encodings["target"].sentence_bh
    wanted = F.mse_loss(source, target) + 0.01 * (koleo(source) + koleo(target)) / 2
    value = loss.objectives["mexma"](encodings)
    torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)
    value.backward()
    only = make_loss("mexma", **SMALL, mask_rate=0.0, alignment_weight=0.0, koleo_weight=0.0)
    value = only.objectives["mexma"](encodings_of(only, bitext[:4]))
    assert value.item() == 0
    value.backward()


def test_a_side_without_masks_counts_as_zero(make_loss, encodings_of, bitext):
    loss = make_loss("mexma", **SMALL)
    head, encodings = loss.objectives["mexma"].head, encodings_of(loss, bitext[:5])
    source, target = encodings["source"], encodings["target"]
    sides = [
        Masked(e.tokens_blh, e.mask_bl, e.features["labels"], other.sentence_bh)
        for e, other in ((encodings[MASKED[0]], target), (encodings[MASKED[1]], source))
    ]
    blank = sides[0]._replace(labels_bl=torch.full_like(sides[0].labels_bl, UNSCORED))
    torch.testing.assert_close(
        cross_unmasking(head, [blank, sides[1]], source.table_vh),
        cross_unmasking(head, sides[1:], source.table_vh) / 2,
        rtol=1e-12,
        atol=1e-12,
    )


def test_an_uninformed_head_scores_log_vocabulary(make_loss, encodings_of, bitext, tokenizer):
    loss = make_loss("mexma", **SMALL, vocabulary="untied", alignment_weight=0.0, koleo_weight=0.0)
    with torch.no_grad():
        loss.heads.heads["mexma"].vocabulary.table_vh.zero_()
    value = loss.objectives["mexma"](encodings_of(loss, bitext))
    assert value.item() == pytest.approx(math.log(len(tokenizer)), rel=1e-12)


def test_the_head_has_the_encoders_width_and_dropout(tiny_encoder, make_loss):
    config = tiny_encoder[0].auto_model.config
    head = make_loss("mexma").objectives["mexma"].head
    assert len(head.layers.layer) == 6
    for layer in head.layers.layer:
        assert layer.attention.self.num_attention_heads == 8
        assert layer.attention.self.dropout.p == config.attention_probs_dropout_prob
        assert layer.output.dropout.p == config.hidden_dropout_prob
        assert layer.intermediate.dense.out_features == config.intermediate_size
    trained = make_loss("mexma", **SMALL).float().train()
    states, mask = torch.randn(2, 5, 32), torch.ones(2, 5, dtype=torch.bool)
    once, again = (trained.objectives["mexma"].head(states, mask, torch.randn(2, 32)) for _ in range(2))
    assert not torch.equal(once, again)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"heads": 5}, "32 is not a multiple of the 5 attention heads"),
        ({"unmasking_gradient": "none"}, "'both', 'tokens', 'sentence', but is 'none'"),
        ({"vocabulary": "english"}, "'tied', 'untied', but is 'english'"),
    ],
)
def test_impossible_heads_are_refused(make_loss, args, message):
    with pytest.raises(ValueError, match=message):
        make_loss("mexma", **args)


@pytest.mark.slow
def test_it_learns_to_unmask_and_to_align(make_loss, batch_of, bitext):
    loss = make_loss("mexma", **SMALL).float()
    batch = batch_of(loss, bitext[:6])
    optimizer = torch.optim.AdamW(loss.parameters(), lr=2e-3)
    first = loss(batch)["mexma"].item()
    for _ in range(60):
        optimizer.zero_grad()
        loss(batch)["mexma"].backward()
        optimizer.step()
    assert loss(batch)["mexma"].item() < first / 3


@pytest.mark.slow
def test_the_tutorial_runs(tiny_encoder_dir, bitext_path, tmp_path):
    rows = bitext_path.read_text(encoding="utf-8").splitlines()
    bitext = tmp_path / "bitext.tsv"
    bitext.write_text("\n".join(rows + rows[1:] * 2) + "\n", encoding="utf-8")
    done = run_python(ROOT / "trainers" / "mexma.py", bitext, tmp_path / "out", tiny_encoder_dir, 3)
    assert done.returncode == 0, done.stderr
    assert SentenceTransformer(str(tmp_path / "out"), device="cpu").encode("ja").shape == (32,)


def test_the_distance_does_not_overflow_in_half_precision(monkeypatch):
    monkeypatch.setattr("metaphrase.objectives.mexma.cross_unmasking", lambda *args: torch.tensor(0.0))
    objective = CrossUnmasking(koleo_weight=0.0)
    far_bh = torch.full((2, 4), 300.0, dtype=torch.float16)
    masked = {view.name: Encoding({"labels": far_bh}, far_bh) for view in objective.masked_views}
    sides = {"source": Encoding({}, far_bh, far_bh), "target": Encoding({}, far_bh, -far_bh)}
    assert objective(masked | sides) == 600**2
