import copy

import pytest
import torch

import metaphrase.packing as packing_module
from metaphrase.packing import ATTENTION, Packing, can_pack, first_position, grouped_attention, packed

TEXTS = ["ja", "der Hund schläft", "das Haus ist rot", "der Garten ist groß und das Haus ist klein", "ja", ""]


def test_layout_of_a_batch():
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 1], [0, 0, 0], [1, 0, 1]])
    packing = Packing.of(mask)
    assert packing.groups == ((1, 1), (1, 2), (2, 3))
    values = torch.arange(15).view(5, 3)
    assert packing.flatten(values).tolist() == [3, 12, 14, 0, 1, 2, 6, 7, 8]
    assert packing.position_n.tolist() == [0, 0, 1, 0, 1, 2, 0, 1, 2]
    assert torch.equal(packing.pad(packing.flatten(values)), values * mask)


@pytest.mark.parametrize("name", ["tiny_encoder", "tiny_xlmr"])
def test_encode_is_the_same_without_padding(request, name):
    model = request.getfixturevalue(name).double()
    padded = model.encode(TEXTS, convert_to_tensor=True, batch_size=4)
    with packed(model) as active:
        flat = model.encode(TEXTS, convert_to_tensor=True, batch_size=4)
    assert active
    torch.testing.assert_close(flat, padded, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.encode(TEXTS, convert_to_tensor=True), padded, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["tiny_encoder", "tiny_xlmr"])
def test_gradients_are_the_same_without_padding(request, name):
    model = request.getfixturevalue(name).double().eval()
    results = []
    for enabled in (False, True):
        twin = copy.deepcopy(model)
        with packed(twin, enabled=enabled):
            output = twin(dict(twin.preprocess(TEXTS)))
            (output["sentence_embedding"].pow(3).sum() + output["token_embeddings"][:, 1].sin().sum()).backward()
        results.append({name: p.grad for name, p in twin.named_parameters() if p.grad is not None})
    padded, flat = results
    assert padded.keys() == flat.keys()
    assert max(grad.abs().max() for grad in padded.values()) > 0
    for key, grad in padded.items():
        torch.testing.assert_close(flat[key], grad, rtol=1e-10, atol=1e-10, msg=key)


def test_only_real_tokens_go_through_the_encoder(tiny_encoder):
    sizes = []
    layer = tiny_encoder[0].auto_model.encoder.layer[0]
    layer.register_forward_hook(lambda module, args, output: sizes.append(args[0].shape[:2]))
    features = tiny_encoder.preprocess(TEXTS)
    with packed(tiny_encoder):
        tiny_encoder(dict(features))
    assert sizes == [(1, int(features["attention_mask"].sum()))]


def test_attention_is_put_back(tiny_encoder):
    config = tiny_encoder[0].auto_model.config
    before = config._attn_implementation
    with packed(tiny_encoder):
        assert config._attn_implementation == ATTENTION
    assert config._attn_implementation == before
    assert not tiny_encoder[0]._forward_hooks
    assert not tiny_encoder[0]._forward_pre_hooks


def test_blocks_can_be_nested(tiny_encoder):
    padded = tiny_encoder.encode(TEXTS, convert_to_tensor=True)
    with packed(tiny_encoder):
        with packed(tiny_encoder) as active:
            assert active
        torch.testing.assert_close(tiny_encoder.encode(TEXTS, convert_to_tensor=True), padded)
    assert not tiny_encoder[0]._forward_hooks


def test_dropout_is_on_in_training(tiny_encoder):
    tiny_encoder.train()
    with packed(tiny_encoder):
        once, again = (tiny_encoder(dict(tiny_encoder.preprocess(TEXTS)))["sentence_embedding"] for _ in range(2))
    assert not torch.equal(once, again)


def test_an_encoder_without_positions_runs_padded(tiny_encoder, monkeypatch, caplog):
    model = tiny_encoder
    encoder = model[0].auto_model
    monkeypatch.setattr(type(encoder), "_supports_attention_backend", False)
    assert not can_pack(encoder)
    padded = model.encode(TEXTS, convert_to_tensor=True)
    with packed(model) as active:
        assert not active
        torch.testing.assert_close(model.encode(TEXTS, convert_to_tensor=True), padded)
    assert "BertModel cannot run without padding" in caplog.text


def test_first_positions(tiny_encoder, tiny_xlmr):
    assert first_position(tiny_encoder[0].auto_model) == 0
    assert first_position(tiny_xlmr[0].auto_model) == tiny_xlmr.tokenizer.pad_token_id + 1


def stream(lengths, heads=2, width=8):
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    packing = Packing.of(mask)
    return packing, [torch.randn(1, heads, sum(lengths), width) for _ in range(3)]


def attend_each(query, key, value, starts, ends, longest, longest_key, *, scale=None):
    """What `varlen_attn` is documented to do: sequences one behind the other, shape (tokens, heads, head)."""
    assert starts.dtype == ends.dtype == torch.int32
    assert longest == longest_key == int(starts.diff().max())
    out = torch.empty_like(query)
    for start, end in zip(starts[:-1].tolist(), ends[1:].tolist(), strict=True):
        scores = torch.einsum("qah,kah->aqk", query[start:end], key[start:end])
        scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
        out[start:end] = torch.einsum("aqk,kah->qah", scores.softmax(-1), value[start:end])
    return out


@pytest.mark.parametrize("scaling", [None, 0.3])
def test_attention_of_one_kernel_is_that_of_groups(monkeypatch, scaling):
    monkeypatch.setattr(packing_module, "varlen_attn", attend_each)
    packing, (query, key, value) = stream([3, 1, 5, 3, 1])
    assert packing.starts_n.tolist() == [0, 1, 2, 5, 8, 13]
    grouped, _ = grouped_attention(None, query, key, value, None, scaling=scaling, packing=packing)
    varlen = packing_module._varlen(query, key, value, packing, scaling)
    torch.testing.assert_close(varlen, grouped)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_variable_length_kernel_gives_what_groups_give(monkeypatch, dtype):
    calls = []
    kernel = packing_module.varlen_attn
    monkeypatch.setattr(packing_module, "varlen_attn", lambda *a, **k: calls.append(1) or kernel(*a, **k))
    packing, inputs = stream([3, 17, 32, 17, 1], heads=12, width=64)
    packing = Packing.of((torch.arange(32) < torch.tensor([3, 17, 32, 17, 1])[:, None]).cuda())
    results = []
    for dropped in (0.0, 1e-30):  # the smallest dropout takes the groups
        query, key, value = (x.detach().cuda().to(dtype).requires_grad_() for x in inputs)
        out, _ = grouped_attention(None, query, key, value, None, dropout=dropped, packing=packing)
        out.float().pow(2).sum().backward()
        results.append([out, query.grad, key.grad, value.grad])
    assert calls == [1]
    for varlen, grouped in zip(*results, strict=True):
        torch.testing.assert_close(varlen, grouped, rtol=2e-2, atol=2e-2)
