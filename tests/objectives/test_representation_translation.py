import copy
import math
from dataclasses import replace

import pytest
import torch

from metaphrase.exceptions import ModelError
from metaphrase.objectives.representation_translation import representation_translation
from tests.oracles import padded, representation_translation_loop


def total(loss, batch):
    return sum(loss(batch).values())


@pytest.mark.parametrize("rows", [slice(0, 1), slice(22, 23), slice(0, 5)])
def test_matches_loop(make_loss, encodings_of, bitext, rows):
    loss = make_loss("rtl")
    head = loss.objectives["rtl"].head
    encodings = encodings_of(loss, bitext[rows])
    source, target = encodings["source"], encodings["target"]
    fast = loss.objectives["rtl"](encodings)
    slow = representation_translation_loop(
        head, source.tokens_blh, source.mask_bl.sum(1), target.ids_bl, target.mask_bl.sum(1), target.table_vh
    )
    assert fast.item() == pytest.approx(slow.item(), rel=1e-9)
    leaves = [source.tokens_blh, target.table_vh, *(p for p in head.parameters() if p.requires_grad)]
    got, wanted = (torch.autograd.grad(value, leaves, allow_unused=True) for value in (fast, slow))
    assert wanted[0].abs().max() > 0
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(
            torch.zeros(()) if ours is None else ours,
            torch.zeros(()) if theirs is None else theirs,
            rtol=1e-8,
            atol=1e-11,
        )


@pytest.mark.parametrize("ratio", [0.3, 1.0])
@pytest.mark.parametrize("direction", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("positions", ["single", "double"])
@pytest.mark.parametrize("language_embeddings", [False, True])
@pytest.mark.parametrize("encoder", ["tiny_encoder", "tiny_xlmr"])
def test_every_setting_of_the_slots_matches_loop(
    make_loss, encodings_of, bitext, request, ratio, direction, positions, language_embeddings, encoder
):
    loss = make_loss(
        "rtl",
        model=request.getfixturevalue(encoder),
        ratio=ratio,
        direction=direction,
        positions=positions,
        language_embeddings=language_embeddings,
        languages=["de", "en"] if language_embeddings else [],
    )
    head = loss.objectives["rtl"].head
    encodings = encodings_of(loss, bitext[:2])
    read, wanted = encodings["source"], encodings["target"]
    if direction == "target_to_source":
        read, wanted = wanted, read
    masked = encodings["reconstructed-slots"].features["masked"] if ratio < 1 else None
    fast = loss.objectives["rtl"](encodings)
    slow = representation_translation_loop(
        head,
        read.tokens_blh,
        read.mask_bl.sum(1),
        wanted.ids_bl,
        wanted.mask_bl.sum(1),
        wanted.table_vh,
        masked=masked,
        target=wanted.tokens_blh,
        languages=wanted.features["language"] if language_embeddings else None,
        double=positions == "double",
        slots_first=positions == "double" and direction == "target_to_source",
    )
    assert fast.item() == pytest.approx(slow.item(), rel=1e-9)
    leaves = [read.tokens_blh, head.mask_h, head.layers.embeddings.position_embeddings.weight]
    leaves += [wanted.tokens_blh] if ratio < 1 else []
    leaves += [head.languages.table.weight] if language_embeddings else []
    got, expected = (torch.autograd.grad(value, leaves) for value in (fast, slow))
    for ours, theirs in zip(got, expected, strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-11)


def test_a_leaked_state_skips_the_first_of_two_embedding_passes(make_loss, encodings_of, bitext):
    """As in the released code: only masks are embedded twice."""
    loss = make_loss("rtl", positions="double", ratio=0.5)
    head = loss.objectives["rtl"].head
    encodings = encodings_of(loss, bitext[:4])
    target = encodings["target"]
    masked = encodings["reconstructed-slots"].features["masked"][:, : target.ids_bl.shape[1]]
    slots = head.fill_slots(tuple(target.ids_bl.shape), masked, target.tokens_blh, None)
    assert torch.equal(slots[~masked], target.tokens_blh[~masked])
    assert not torch.isclose(slots[masked], head.mask_h).all(-1).any()


def test_an_uninformed_head_scores_log_vocabulary(make_loss, encodings_of, bitext, tokenizer):
    loss = make_loss("rtl", vocabulary="untied")
    with torch.no_grad():
        loss.objectives["rtl"].head.vocabulary.table_vh.zero_()
    encodings = encodings_of(loss, bitext[:6])
    assert loss.objectives["rtl"](encodings).item() == pytest.approx(math.log(len(tokenizer)), rel=1e-12)


def test_what_the_gradient_reaches(make_loss, encodings_of, bitext):
    loss = make_loss("rtl")
    encodings = encodings_of(loss, bitext[:6])
    source, target = encodings["source"].tokens_blh, encodings["target"].tokens_blh
    source_grad, target_grad = torch.autograd.grad(
        loss.objectives["rtl"](encodings), [source, target], allow_unused=True
    )
    real = encodings["source"].mask_bl
    assert target_grad is None
    assert torch.equal(source_grad[:, 0], torch.zeros_like(source_grad[:, 0]))
    assert torch.equal(source_grad[~real], torch.zeros_like(source_grad[~real]))
    assert (source_grad[:, 1:][real[:, 1:]].abs().sum(-1) > 0).all()


def test_without_source_the_loss_does_not_depend_on_it(make_loss, encodings_of, bitext):
    loss = make_loss("rtl")
    encodings = encodings_of(loss, bitext[:4])
    source = encodings["source"]
    blind = replace(source, mask_bl=torch.zeros_like(source.mask_bl))
    other = replace(blind, tokens_blh=torch.randn_like(source.tokens_blh))
    objective = loss.objectives["rtl"]
    torch.testing.assert_close(
        objective({**encodings, "source": blind}), objective({**encodings, "source": other}), rtol=0, atol=0
    )
    assert objective({**encodings, "source": blind}) != objective(encodings)


@pytest.mark.parametrize("positions", ["single", "double"])
@pytest.mark.parametrize("side", ["source", "target"])
def test_padding_changes_nothing(make_loss, encodings_of, bitext, side, positions):
    loss = make_loss("rtl", positions=positions)
    encodings = encodings_of(loss, bitext[:5])
    wanted = loss.objectives["rtl"](encodings)
    got = loss.objectives["rtl"]({**encodings, side: padded(encodings[side], 3)})
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_an_offset_that_followed_the_padding_would_change_the_loss(make_loss, encodings_of, bitext):
    loss = make_loss("rtl")
    objective, encodings = loss.objectives["rtl"], encodings_of(loss, bitext[:5])
    losses = []
    for offset in (9, 12):
        objective.head.offset = offset
        losses.append(objective(encodings).item())
    assert abs(losses[0] - losses[1]) > 1e-6


def test_labels_are_all_pieces_but_the_first(make_loss, encodings_of, bitext, tokenizer):
    loss = make_loss("rtl")
    encodings = encodings_of(loss, bitext[:7])
    seen = []
    loss.objectives["rtl"].head.vocabulary.register_forward_pre_hook(lambda module, args: seen.append(args))
    loss.objectives["rtl"](encodings)
    hidden, labels, _ = seen[0]
    target = encodings["target"]
    assert len(hidden) == len(labels) == int((target.mask_bl.sum(1) - 1).sum())
    wanted = target.ids_bl[:, 1:][target.mask_bl[:, 1:]]
    assert sorted(labels.tolist()) == sorted(wanted.tolist())
    assert (labels == tokenizer.sep_token_id).sum() == 7
    assert not (labels == tokenizer.cls_token_id).any()


def test_both_directions_share_the_batch(make_loss, encodings_of, bitext):
    rows = bitext[3:5]
    loss = make_loss("rtl", direction="both")
    heads = loss.heads.state_dict()

    def alone(direction, row):
        other = make_loss("rtl", direction=direction)
        other.heads.load_state_dict(heads)
        return other.objectives["rtl"](encodings_of(other, [row]))

    wanted = (alone("target_to_source", rows[0]) + alone("source_to_target", rows[1])) / 2
    torch.testing.assert_close(loss.objectives["rtl"](encodings_of(loss, rows)), wanted, rtol=1e-12, atol=1e-12)


def test_both_directions_of_a_single_pair_reconstruct_the_target(make_loss, encodings_of, bitext):
    loss = make_loss("rtl", direction="both")
    assert torch.isfinite(loss.objectives["rtl"](encodings_of(loss, bitext[:1])))


def test_nothing_to_reconstruct_is_a_zero_with_a_graph(make_loss, encodings_of, bitext):
    loss = make_loss("rtl", ratio=0.0)
    value = loss.objectives["rtl"](encodings_of(loss, bitext[:4]))
    assert value.item() == 0
    value.backward()


def test_the_ratio_masks_its_share_and_leaks_the_rest(make_loss, encodings_of, bitext):
    loss = make_loss("rtl", ratio=0.5)
    encodings = encodings_of(loss, bitext * 20)
    seen = []
    loss.objectives["rtl"].head.vocabulary.register_forward_pre_hook(lambda module, args: seen.append(len(args[1])))
    loss.objectives["rtl"](encodings).backward()
    scorable = int((encodings["target"].mask_bl.sum(1) - 1).sum())
    assert seen[0] / scorable == pytest.approx(0.5, abs=0.05)
    assert encodings["target"].tokens_blh.grad.abs().max() > 0  # the unmasked slots hold the target's own states


def test_the_ratio_masks_other_slots_in_another_epoch(make_loss, batch_of, bitext):
    loss = make_loss("rtl", ratio=0.5)
    masks = [batch_of(loss, bitext, epoch=epoch)["reconstructed-slots"]["masked"] for epoch in (0, 0, 1)]
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


def test_the_english_vocabulary_is_the_full_one_with_the_rest_at_minus_infinity(
    make_loss, encodings_of, bitext, tokenizer
):
    english = sorted(
        {*tokenizer.all_special_ids, *(i for row in bitext for i in tokenizer(row["target"])["input_ids"])}
    )
    loss = make_loss("rtl", vocabulary="english", english_ids=torch.tensor(english))
    full = make_loss("rtl")
    state = {k: v for k, v in loss.heads.state_dict().items() if k in full.heads.state_dict() and "bias_v" not in k}
    full.heads.load_state_dict(state, strict=False)
    rest = torch.ones(len(tokenizer), dtype=torch.bool)
    rest[english] = False
    with torch.no_grad():
        full.heads.heads["rtl"].vocabulary.bias_v[rest] = -torch.inf
    encodings = encodings_of(loss, bitext[:6])
    torch.testing.assert_close(
        loss.objectives["rtl"](encodings), full.objectives["rtl"](encodings), rtol=1e-10, atol=1e-10
    )


def test_classes_of_the_english_vocabulary(make_loss, tokenizer):
    english = torch.tensor(sorted({*tokenizer.all_special_ids, 11, 17, 40}))
    head = make_loss("rtl", vocabulary="english", english_ids=english).objectives["rtl"].head.vocabulary
    assert english[head.class_of(english)].tolist() == english.tolist()
    outside = torch.tensor([12, len(tokenizer) - 1])
    assert english[head.class_of(outside)].tolist() == [tokenizer.unk_token_id] * 2
    assert len(head.table_vh) == len(head.bias_v) == len(english)


def test_the_english_vocabulary_must_be_given(make_loss):
    with pytest.raises(ValueError, match="Pass `english_ids` to AlignmentLoss"):
        make_loss("rtl", vocabulary="english")


def test_the_head_starts_as_the_encoders_last_layers(make_loss, tiny_encoder):
    head = make_loss("rtl", layers=1).objectives["rtl"].head
    encoder = tiny_encoder.double()[0].auto_model
    for name, value in encoder.encoder.layer[1].state_dict().items():
        torch.testing.assert_close(head.layers.encoder.layer[0].state_dict()[name], value)
    torch.testing.assert_close(head.layers.embeddings.LayerNorm.weight, encoder.embeddings.LayerNorm.weight)
    positions = encoder.embeddings.position_embeddings.weight
    torch.testing.assert_close(head.layers.embeddings.position_embeddings.weight, positions)
    mask = encoder.get_input_embeddings().weight[tiny_encoder.tokenizer.mask_token_id]
    torch.testing.assert_close(head.mask_h, mask)
    layer = encoder.encoder.layer[1].attention.self.query.weight
    assert head.layers.encoder.layer[0].attention.self.query.weight.data_ptr() != layer.data_ptr()


def test_the_head_copies_token_types_whatever_the_padding_id(make_loss, tiny_encoder):
    """With padding id 1 and two token types, the reduced word embeddings have the shape of the token type embeddings."""
    encoder = tiny_encoder[0].auto_model
    encoder.config.pad_token_id = 1
    head = make_loss("rtl", model=tiny_encoder).objectives["rtl"].head
    assert head.layers.get_input_embeddings().weight.shape == (2, 32)
    types = encoder.embeddings.token_type_embeddings.weight
    torch.testing.assert_close(head.layers.embeddings.token_type_embeddings.weight, types.double())


def test_the_transform_comes_from_the_checkpoint_if_it_has_one(make_loss, tiny_mlm_dir, tiny_encoder):
    from metaphrase.encoders.loading import load_encoder

    fresh = make_loss("rtl")
    assert fresh.transforms() == {"rtl": "fresh"}
    pretrained = make_loss("rtl", model=load_encoder(tiny_mlm_dir, default_pooling="cls"))
    assert pretrained.transforms() == {"rtl": "pretrained"}
    from transformers import BertForMaskedLM

    theirs = BertForMaskedLM.from_pretrained(tiny_mlm_dir).cls.predictions
    ours = pretrained.objectives["rtl"].head.vocabulary
    torch.testing.assert_close(ours.transform["dense"].weight, theirs.transform.dense.weight.double())
    torch.testing.assert_close(ours.transform["norm"].weight, theirs.transform.LayerNorm.weight.double())
    torch.testing.assert_close(ours.bias_v, theirs.bias.double())
    assert make_loss("rtl", transform="none").transforms() == {"rtl": "none"}


def test_language_embeddings_tell_languages_apart(make_loss, encodings_of, bitext):
    loss = make_loss("rtl", language_embeddings=True, direction="both", languages=["de", "en"])
    encodings = encodings_of(loss, bitext[:4])
    loss.objectives["rtl"](encodings).backward()
    grad = loss.objectives["rtl"].head.languages.table.weight.grad
    assert (grad.abs().sum(1) > 0).all()
    relabelled = replace(
        encodings["target"],
        features={**encodings["target"].features, "language": encodings["source"].features["language"]},
    )
    assert loss.objectives["rtl"]({**encodings, "target": relabelled}) != loss.objectives["rtl"](encodings)
    with pytest.raises(ValueError, match="Pass `languages` to AlignmentLoss"):
        make_loss("rtl", language_embeddings=True)


def test_an_encoder_with_a_decoder_is_refused(make_loss, tiny_encoder):
    encoder = tiny_encoder[0].auto_model
    encoder.config.is_encoder_decoder, encoder.decoder = True, torch.nn.Identity()
    with pytest.raises(ModelError, match=r"those of BertModel belong to a decoder, which also reads piece ids"):
        make_loss("rtl")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"layers": 3}, "copies 3 layers, but the encoder has 2"),
        ({"max_length": 64}, "sequences of up to 128 positions"),
        ({"direction": "xx"}, "'source_to_target', 'target_to_source', 'both', but is 'xx'"),
        ({"ratio": 1.5}, "from 0 to 1, but is 1.5"),
        ({"vocabulary": "english", "direction": "both"}, "holds the target side's pieces only"),
    ],
)
def test_impossible_heads_are_refused(make_loss, args, message):
    with pytest.raises(ValueError, match=message):
        make_loss("rtl", **args)


@pytest.mark.parametrize("direction", ["source_to_target", "both"])
@pytest.mark.parametrize("positions", ["single", "double"])
def test_an_encoder_that_cannot_be_packed_gives_the_same(
    make_loss, encodings_of, bitext, monkeypatch, positions, direction
):
    loss = make_loss("rtl", positions=positions, direction=direction)
    encodings = encodings_of(loss, bitext[:5])
    wanted = loss.objectives["rtl"](encodings)
    layers = loss.objectives["rtl"].head.layers
    padded = copy.deepcopy(loss)
    monkeypatch.setattr(type(layers), "_supports_attention_backend", False)
    padded.objectives["rtl"].head.layers.set_attn_implementation("eager")
    torch.testing.assert_close(padded.objectives["rtl"](encodings), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_it_learns_to_translate_one_pair(make_loss, batch_of, bitext):
    loss = make_loss("rtl", vocabulary="untied").float()
    batch = batch_of(loss, bitext[:4])
    optimizer = torch.optim.AdamW(loss.parameters(), lr=3e-3)
    first = total(loss, batch).item()
    for _ in range(60):
        optimizer.zero_grad()
        total(loss, batch).backward()
        optimizer.step()
    assert total(loss, batch).item() < first / 4


def test_the_pure_function_needs_states_for_unmasked_slots(make_loss, encodings_of, bitext):
    loss = make_loss("rtl")
    encodings = encodings_of(loss, bitext[:3])
    source, target = encodings["source"], encodings["target"]
    everything = torch.ones_like(target.mask_bl)
    value = representation_translation(
        loss.objectives["rtl"].head,
        source.tokens_blh,
        source.mask_bl,
        target.ids_bl,
        target.mask_bl,
        source.table_vh,
        masked_bt=everything,
        target_bth=target.tokens_blh,
    )
    torch.testing.assert_close(value, loss.objectives["rtl"](encodings), rtol=1e-12, atol=1e-12)
