import copy

import pytest
import torch
from tokenizers import processors

from metaphrase.modeling.collator import ParallelCollator
from metaphrase.modeling.encoding import encode_views
from metaphrase.modeling.packing import first_position, packed
from metaphrase.modeling.views import Batch
from metaphrase.objectives import HeadSources
from metaphrase.objectives.word_alignment import PrefixedPair, WordAlignment, sides, word_alignment
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import Recipe
from tests.oracles import prefix_mask_loop, word_alignment_loop

ENCODERS = ["tiny_encoder", "tiny_xlmr"]


@pytest.fixture
def two_separators(tokenizer):
    """The tokenizer with the pair format of XLM-R, ``<s> x </s></s> y </s>``."""
    twin = copy.deepcopy(tokenizer)
    ends = [(token, twin.convert_tokens_to_ids(token)) for token in ("[SEP]", "[CLS]")]
    twin.backend_tokenizer.post_processor = processors.RobertaProcessing(*ends, trim_offsets=False)
    return twin


def blocks(attention, source, target):
    """Submatrix of each pair: attention of one side to the other."""
    return [matrix[:, rows][:, :, columns] for matrix, rows, columns in zip(attention, source, target, strict=True)]


def as_pair(target_to_source, source_to_target):
    """Embed two small matrices in the attention over the sequence [x; y], for one head."""
    t, s = target_to_source.shape
    backward, forward = torch.rand(2, 1, 1, s + t, s + t).double()
    backward[0, 0, s:, :s] = target_to_source
    forward[0, 0, :s, s:] = source_to_target
    source = (torch.arange(s + t) < s)[None]
    return backward, forward, source, ~source


def eager(model, features, *, reader, strict, doubled=False):
    """Attention of the top layer with the eager attention of transformers, pair by pair, with masks from the oracle."""
    encoder = model[0].auto_model
    encoder.set_attn_implementation("eager")
    maps, states = [], []
    for row in range(len(features["input_ids"])):
        length = int(features["attention_mask"][row].sum())
        types = features["token_type_ids"][row, :length]
        t = int(types.sum())
        mask = torch.tensor(prefix_mask_loop(length - t, t, reader=reader, strict=strict))
        bias = torch.zeros(length, length, dtype=torch.float64).masked_fill(~mask, -torch.inf)
        one = {
            "input_ids": features["input_ids"][row : row + 1, :length],
            "attention_mask": bias[None, None],
            "position_ids": torch.arange(length)[None] + first_position(encoder),
        }
        if encoder.config.type_vocab_size > 1:
            one["token_type_ids"] = types[None]
        output = encoder(**one, output_attentions=True)
        maps.append(output.attentions[-1][0])
        states.append(output.last_hidden_state[0])
    return maps, states


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("exclude_specials", [True, False])
def test_it_is_eager_attention_and_the_papers_loop(
    request, make_loss, batch_of, bitext, encoder, strict, exclude_specials
):
    loss = make_loss("wa", model=request.getfixturevalue(encoder), strict=strict, exclude_specials=exclude_specials)
    batch = batch_of(loss, bitext[:5])
    kind = "strict" if strict else "inclusive"
    features = batch[f"target-to-source-{kind}"]
    assert len(set(features["attention_mask"].sum(1).tolist())) > 1
    fast = loss(batch)["wa"]
    twin = copy.deepcopy(loss.model)
    maps = {side: eager(twin, features, reader=side, strict=strict)[0] for side in ("source", "target")}
    counts = features["piece"].bool() if exclude_specials else features["attention_mask"].bool()
    source, target = (
        [row.nonzero().squeeze(1) for row in side & counts] for side in (sides(features)[0], sides(features)[1])
    )
    slow = word_alignment_loop(blocks(maps["target"], target, source), blocks(maps["source"], source, target))
    assert fast.item() == pytest.approx(slow.item(), rel=1e-9)
    fast.backward()
    slow.backward()
    wanted = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
    got = {name: p.grad for name, p in loss.model.named_parameters() if p.grad is not None}
    assert max(grad.abs().max() for grad in wanted.values()) > 1e-6
    assert wanted.keys() <= got.keys()
    for name, grad in got.items():  # zero for what attention does not depend on
        torch.testing.assert_close(grad, wanted.get(name, torch.zeros_like(grad)), rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("encoder", ENCODERS)
def test_states_and_attention_are_eager_ones(request, make_loss, batch_of, bitext, encoder):
    loss = make_loss("wa", model=request.getfixturevalue(encoder))
    encodings = encode_views(loss.model, batch_of(loss, bitext[:4]))
    for side, name in (("target", "target-to-source-strict"), ("source", "source-to-target-strict")):
        maps, states = eager(copy.deepcopy(loss.model), encodings[name].features, reader=side, strict=True)
        for row, (attention, state) in enumerate(zip(maps, states, strict=True)):
            length = len(state)
            ours = encodings[name].attention_bell[row]
            torch.testing.assert_close(ours[:, :length, :length], attention, rtol=1e-9, atol=1e-12)
            assert not ours[:, :length, length:].any()
            torch.testing.assert_close(encodings[name].tokens_blh[row, :length], state, rtol=1e-9, atol=1e-12)


def test_the_worked_example():
    backward = torch.tensor([[0.7, 0.2], [0.1, 0.6], [0.3, 0.3]])
    forward = torch.tensor([[0.6, 0.1, 0.2], [0.1, 0.7, 0.1]])
    assert word_alignment(*as_pair(backward, forward)).item() == pytest.approx(0.52)


@pytest.mark.parametrize(("s", "t"), [(1, 1), (1, 4), (4, 1), (3, 3), (5, 2)])
def test_bounds_and_symmetry(s, t):
    identity, blank = torch.eye(t, s), torch.zeros(t, s)
    assert word_alignment(*as_pair(identity, identity.T)).item() == pytest.approx(0.0)
    assert word_alignment(*as_pair(blank, blank.T)).item() == pytest.approx(1.0)
    backward, forward = torch.rand(t, s).double().softmax(-1), torch.rand(s, t).double().softmax(-1)
    one_way, other_way = word_alignment(*as_pair(backward, forward)), word_alignment(*as_pair(forward, backward))
    assert one_way.item() == pytest.approx(other_way.item())
    assert -1e-12 <= one_way.item() <= 1


def test_heads_and_pairs_are_averaged():
    small = [as_pair(torch.rand(3, 2), torch.rand(2, 3)) for _ in range(4)]
    single = [word_alignment(*pair).item() for pair in small]
    source, target = (small[0][k].expand(2, -1) for k in (2, 3))
    maps = [torch.stack([torch.cat([small[a][k][0], small[b][k][0]]) for a, b in ((0, 1), (2, 3))]) for k in (0, 1)]
    assert word_alignment(*maps, source, target).item() == pytest.approx(sum(single) / 4)


def test_a_pair_without_pieces_is_skipped():
    backward, forward, source, target = as_pair(torch.rand(3, 2), torch.rand(2, 3))
    backward.requires_grad_()
    two = [tensor.repeat(2, *[1] * (tensor.dim() - 1)) for tensor in (backward, forward, source, target)]
    two[3][1] = False
    torch.testing.assert_close(word_alignment(*two), word_alignment(backward, forward, source, target))
    nothing = word_alignment(backward, forward, source, torch.zeros_like(target))
    assert nothing.item() == 0
    nothing.backward()
    assert not backward.grad.any()


@pytest.mark.parametrize("reader", ["source", "target"])
@pytest.mark.parametrize("strict", [True, False])
def test_visible_positions(bitext, tokenizer, reader, strict):
    features = PrefixedPair("pair", 24, reader, strict).build(Batch(bitext[:6], tokenizer), [None] * 6)
    for row in range(6):
        source, target = (tokenizer(bitext[row][side])["input_ids"] for side in ("source", "target"))
        length = len(source) + len(target) - 1
        assert features["input_ids"][row, :length].tolist() == source + target[1:]
        assert features["attention_mask"][row].sum() == length
        assert features["position_ids"][row, :length].tolist() == list(range(length))
        assert features["token_type_ids"][row, :length].tolist() == [0] * len(source) + [1] * (len(target) - 1)
        pieces = [0, *[1] * (len(source) - 2), 0, *[1] * (len(target) - 2), 0]
        assert features["piece"][row].tolist() == pieces + [0] * (features["piece"].shape[1] - length)
        wanted = torch.zeros_like(features["visible"][row])
        wanted[:length, :length] = torch.tensor(
            prefix_mask_loop(len(source), len(target) - 1, reader=reader, strict=strict)
        )
        assert torch.equal(features["visible"][row], wanted)


@pytest.mark.parametrize("reader", ["source", "target"])
def test_the_second_separator_belongs_to_the_target(bitext, two_separators, reader):
    features = PrefixedPair("pair", 24, reader, True).build(Batch(bitext[:6], two_separators), [None] * 6)
    for row in range(6):
        ids = two_separators(bitext[row]["source"], bitext[row]["target"])["input_ids"]
        source, target = (two_separators(bitext[row][side])["input_ids"] for side in ("source", "target"))
        assert len(ids) == len(source) + len(target)
        assert features["input_ids"][row, : len(ids)].tolist() == ids
        pieces = [0, *[1] * (len(source) - 2), 0, 0, *[1] * (len(target) - 2), 0]
        assert features["piece"][row, : len(ids)].tolist() == pieces
        wanted = torch.tensor(prefix_mask_loop(len(source), len(target), reader=reader, strict=True))
        assert torch.equal(features["visible"][row, : len(ids), : len(ids)], wanted)


def test_the_first_target_token_sees_the_source_alone(make_loss, batch_of, bitext):
    for strict in (True, False):
        loss = make_loss("wa", strict=strict)
        encodings = encode_views(loss.model, batch_of(loss, bitext[:3]))
        backward = next(iter(encodings.values()))
        source, target = sides(backward.features)
        first = target.int().argmax(1)
        for row in range(3):
            on_source = backward.attention_bell[row, :, first[row], source[row]].sum(-1)
            ones = torch.ones_like(on_source)
            if strict:
                torch.testing.assert_close(on_source, ones)
            else:
                assert (on_source < 1).all()


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("strict", [True, False])
def test_tokens_do_not_depend_on_following_ones(request, make_loss, batch_of, bitext, encoder, strict):
    loss = make_loss("wa", model=request.getfixturevalue(encoder), strict=strict)
    batch = batch_of(loss, bitext[2:3])
    name = next(iter(batch))
    source, target = sides(batch[name])
    before = encode_views(loss.model, batch)[name]
    for place in target[0].nonzero().squeeze(1).tolist():
        changed = copy.deepcopy(batch)
        changed[name]["input_ids"][0, place] = 60 if batch[name]["input_ids"][0, place] != 60 else 61
        after = encode_views(loss.model, changed)[name]
        assert torch.equal(after.tokens_blh[0, :place], before.tokens_blh[0, :place])
        assert torch.equal(after.attention_bell[0, :, :place], before.attention_bell[0, :, :place])
        assert not torch.allclose(after.tokens_blh[0, place], before.tokens_blh[0, place])
    changed = copy.deepcopy(batch)
    changed[name]["input_ids"][target] = 60
    after = encode_views(loss.model, changed)[name]
    assert torch.equal(after.tokens_blh[source], before.tokens_blh[source])


def test_the_reading_side_of_the_other_pass_is_the_source(make_loss, batch_of, bitext):
    loss = make_loss("wa")
    batch = batch_of(loss, bitext[2:3])
    source, target = sides(batch["source-to-target-strict"])
    before = encode_views(loss.model, batch)["source-to-target-strict"]
    batch["source-to-target-strict"]["input_ids"][source] = 60
    after = encode_views(loss.model, batch)["source-to-target-strict"]
    assert torch.equal(after.tokens_blh[target], before.tokens_blh[target])
    assert not torch.allclose(after.tokens_blh[source], before.tokens_blh[source])


def test_attention_is_read_before_dropout(tiny_encoder, tokenizer, bitext):
    loss = AlignmentLoss(tiny_encoder, Recipe.from_dict({"terms": [{"objective": "wa"}]}), max_length=24).train()
    assert tiny_encoder[0].auto_model.config.attention_probs_dropout_prob > 0
    encodings = encode_views(loss.model, ParallelCollator(tokenizer, loss.views)(bitext[:4]))
    for encoding in encodings.values():
        rows = encoding.attention_bell.sum(-1).transpose(1, 2)[encoding.mask_bl]
        torch.testing.assert_close(rows, torch.ones_like(rows))
        visible = encoding.features["visible"][:, None].expand_as(encoding.attention_bell)
        assert (encoding.attention_bell[visible] > 0).all()


@pytest.mark.parametrize("encoder", ENCODERS)
def test_padding_and_packing_change_nothing(request, make_loss, batch_of, bitext, encoder):
    loss = make_loss("wa", model=request.getfixturevalue(encoder))
    rows = sorted(bitext, key=lambda row: len(row["source"]))[:3] + bitext[-3:]
    together = loss(batch_of(loss, rows))["wa"]
    alone = [loss(batch_of(loss, [row]))["wa"] for row in rows]
    torch.testing.assert_close(together, sum(alone) / len(rows), rtol=1e-10, atol=0)
    with packed(loss.model):
        torch.testing.assert_close(loss(batch_of(loss, rows))["wa"], together, rtol=1e-12, atol=0)
    torch.testing.assert_close(loss(batch_of(loss, rows[::-1]))["wa"], together, rtol=1e-10, atol=0)


def test_truncation_and_one_word_sentences(make_loss, batch_of):
    loss = make_loss("wa", max_length=5)
    rows = [
        {"source": "der Hund schläft " * 5, "target": "the dog sleeps " * 5, "source_lang": "de", "target_lang": "en"},
        {"source": "ja", "target": "yes", "source_lang": "de", "target_lang": "en"},
    ]
    batch = batch_of(loss, rows)
    features = batch["target-to-source-strict"]
    assert features["attention_mask"].sum(1).tolist()[0] == 9
    assert features["piece"][0].tolist() == [0, 1, 1, 1, 0, 1, 1, 1, 0]
    value = loss(batch)["wa"]
    assert 0 < value.item() < 1
    value.backward()


def test_both_passes_are_one_call(make_loss, batch_of, bitext):
    loss = make_loss("wa")
    calls = []
    loss.model[0].auto_model.encoder.register_forward_hook(lambda *args: calls.append(1))
    loss(batch_of(loss, bitext[:3]))
    assert len(calls) == 1


def test_encoders_that_cannot_run_the_passes_are_refused(
    make_loss, tiny_encoder, tiny_xlmr, two_separators, monkeypatch
):
    make_loss("wa", max_length=40)  # [CLS] x [SEP] y [SEP]: 79 of 80 positions
    with pytest.raises(ValueError, match="up to 81 positions, but the encoder has 80"):
        make_loss("wa", max_length=41)
    xlmr = HeadSources(tiny_xlmr[0].auto_model, two_separators)  # its positions start after the padding id
    WordAlignment(max_length=40).attach(xlmr)  # <s> x </s></s> y </s>: 80 positions
    with pytest.raises(ValueError, match="up to 82 positions, but the encoder has 81"):
        WordAlignment(max_length=41).attach(xlmr)
    attention = tiny_encoder[0].auto_model.encoder.layer[0].attention.self
    monkeypatch.setattr(attention, "is_causal", True)
    with pytest.raises(ValueError, match="tokens of BertModel only attend to preceding ones"):
        make_loss("wa")
    monkeypatch.setattr(attention, "is_causal", False)
    monkeypatch.setattr(type(tiny_encoder[0].auto_model), "_supports_attention_backend", False)
    with pytest.raises(ValueError, match="BertModel does not support the attention"):
        make_loss("wa")
