import copy
from types import SimpleNamespace

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import CNN, Pooling, Transformer
from transformers import AutoConfig, AutoModel

import metaphrase.modeling.packing as packing_module
from metaphrase.modeling.packing import (
    ATTENTION,
    PACKABLE,
    PACKABLE_OTHERS,
    Packing,
    can_pack,
    first_position,
    grouped_attention,
    one_kernel,
    packed,
)
from metaphrase.modeling.precision import bfloat16
from tests.conftest import shape

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


def test_gradients_in_bfloat16_are_those_in_float32_up_to_rounding(tiny_encoder):
    model = tiny_encoder.eval()
    direction = torch.randn(model.get_embedding_dimension(), generator=torch.Generator().manual_seed(1))
    results = []
    for enabled in (False, True):
        with packed(model), bfloat16(model, enabled=enabled):
            embeddings = model(dict(model.preprocess(TEXTS)))["sentence_embedding"]
        (embeddings.float() @ direction).sum().backward()
        results.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        model.zero_grad()
    assert torch.cosine_similarity(*results, dim=0) > 0.99


def test_only_real_tokens_go_through_the_encoder(tiny_encoder):
    sizes = []
    layer = tiny_encoder[0].auto_model.encoder.layer[0]
    layer.register_forward_hook(lambda module, args, output: sizes.append(args[0].shape[:2]))
    features = tiny_encoder.preprocess(TEXTS)
    with packed(tiny_encoder):
        tiny_encoder(dict(features))
    assert sizes == [(1, int(features["attention_mask"].sum()))]


def test_attention_is_restored(tiny_encoder):
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
    packing_module.notice.cache_clear()
    for _ in range(2):
        with packed(model) as active:
            assert not active
            torch.testing.assert_close(model.encode(TEXTS, convert_to_tensor=True), padded)
    assert caplog.messages == ["Sentences are padded for BertModel: it cannot run without padding."]


@pytest.mark.parametrize("change", ["padding on the left", "a convolution"])
def test_models_whose_results_depend_on_padding_run_padded(tiny_encoder, change):
    model = tiny_encoder
    if change == "a convolution":
        model = SentenceTransformer(modules=[model[0], CNN(32, 32, [3]), Pooling(32, "mean")], device="cpu")
    else:
        model.tokenizer.padding_side = "left"
    padded = model.encode(TEXTS, convert_to_tensor=True)
    with packed(model) as active:
        torch.testing.assert_close(model.encode(TEXTS, convert_to_tensor=True), padded)
    assert not active


def test_first_positions(tiny_encoder, tiny_xlmr):
    assert first_position(tiny_encoder[0].auto_model) == 0
    assert first_position(tiny_xlmr[0].auto_model) == tiny_xlmr.tokenizer.pad_token_id + 1


#: What tiny models of an architecture need beside what BERT's takes.
SETTINGS = {
    "albert": {"embedding_size": 16},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64},
    "electra": {"embedding_size": 16},
}
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout", "hidden_dropout")
LENGTHS = [3, 90, 1, 70, 12, 70, 33]


@pytest.fixture
def of_type(tokenizer, tmp_path):
    """A float64 model of an architecture, in training mode and without dropout."""

    def build(kind):
        config = AutoConfig.for_model(kind, **shape(tokenizer, max_position_embeddings=120), **SETTINGS.get(kind, {}))
        for name in DROPOUTS:
            if hasattr(config, name):
                setattr(config, name, 0.0)
        encoder = AutoModel.from_config(config)
        with torch.no_grad():
            for parameter in encoder.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))  # biases and position embeddings too
        encoder.save_pretrained(tmp_path / kind)
        tokenizer.save_pretrained(tmp_path / kind)
        transformer = Transformer(str(tmp_path / kind), max_seq_length=100)
        return (
            SentenceTransformer(modules=[transformer, Pooling(32, pooling_mode="mean")], device="cpu").double().train()
        )

    return build


@pytest.mark.parametrize("kind", sorted(PACKABLE | PACKABLE_OTHERS))
def test_every_architecture_gives_the_same_without_padding(of_type, tokenizer, kind):
    model = of_type(kind)
    model[0].auto_model.config.output_hidden_states = True
    assert hasattr(getattr(model[0].auto_model, "encoder", None), "layer") or kind not in PACKABLE
    mask_bl = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    ids_bl = torch.randint(5, len(tokenizer), mask_bl.shape).where(mask_bl, torch.tensor(tokenizer.pad_token_id))
    weight_blh = torch.randn(*mask_bl.shape, 32, dtype=torch.float64) * mask_bl[..., None]
    results = []
    for enabled in (False, True):
        sizes = []
        hook = (
            model[0]
            .auto_model.get_input_embeddings()
            .register_forward_pre_hook(lambda module, args, sizes=sizes: sizes.append(tuple(args[0].shape)))
        )
        model.zero_grad()
        with packed(model, enabled=enabled) as active:
            assert active == enabled
            output = model({"input_ids": ids_bl, "attention_mask": mask_bl.long()})
            ((output["token_embeddings"] * weight_blh).sum() + output["sentence_embedding"].pow(3).sum()).backward()
        hook.remove()
        assert sizes == [(1, sum(LENGTHS)) if enabled else (len(LENGTHS), max(LENGTHS))]
        states = [output["sentence_embedding"], *(h[mask_bl] for h in output["all_layer_embeddings"])]
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        results.append((states, grads))
    (padded, padded_grads), (flat, flat_grads) = results
    assert len(padded) == len(flat) == 4
    for ours, theirs in zip(flat, padded, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    assert padded_grads.keys() == flat_grads.keys()
    assert sum(grad.abs().max() > 1e-3 for grad in padded_grads.values()) > 20
    for name, grad in padded_grads.items():
        torch.testing.assert_close(flat_grads[name], grad, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("kind", ["mobilebert", "modernbert"])
def test_other_architectures_are_padded(tokenizer, kind):
    """MobileBERT's embeddings look at the neighbouring tokens, ModernBERT's masks are sliding windows."""
    config = AutoConfig.for_model(kind, **shape(tokenizer))
    for name in ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"):
        setattr(config, name, None)
    assert not can_pack(AutoModel.from_config(config))


def test_decoders_are_padded(tokenizer):
    config = AutoConfig.for_model("bert-generation", **shape(tokenizer, is_decoder=True))
    assert not can_pack(AutoModel.from_config(config))


def stream(lengths, heads=2, width=8):
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    packing = Packing.of(mask)
    return packing, [torch.randn(1, heads, sum(lengths), width) for _ in range(3)]


def attend_each(query, key, value, starts, ends, longest, longest_key, *, scale=None):
    """Reference for `varlen_attn`: concatenated sequences, shape (tokens, heads, head)."""
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


def test_attention_of_the_padded_batch_is_that_of_groups():
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 0, 1, 1, 0]])
    packing = Packing.of(mask)
    inputs = [torch.randn(1, 2, int(mask.sum()), 8, dtype=torch.double, requires_grad=True) for _ in range(3)]
    padded = packing_module.padded_attention(*inputs, packing, 0.3)
    grouped, _ = grouped_attention(None, *inputs, None, scaling=0.3, packing=packing)
    torch.testing.assert_close(padded, grouped)
    for ours, theirs in zip(*(torch.autograd.grad(x.sin().sum(), inputs) for x in (padded, grouped)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_dropout_kernel_is_differentiable():
    packing, inputs = stream([3, 1, 5, 3, 1])
    inputs = [x.to("meta", torch.bfloat16).requires_grad_() for x in inputs]
    out = packing_module._varlen(*inputs, packing, None, 0.1)
    assert (out.shape, out.dtype) == ((1, 13, 2, 8), torch.bfloat16)
    out.float().sum().backward()
    assert all(x.grad.shape == x.shape for x in inputs)


def test_the_kernel_receives_the_dropout_probability(monkeypatch):
    told = []
    packing, inputs = stream([3, 1, 5, 3, 1])

    def kernel(query, key, value, *where, scale):
        told.append((where[4:], scale))
        return attend_each(query, key, value, *where[:4], scale=scale), "logsumexp", "seed", "offset", "mask"

    monkeypatch.setattr(packing_module, "flash_attention", kernel)
    grouped, _ = grouped_attention(None, *inputs, None, scaling=0.3, packing=packing)
    torch.testing.assert_close(packing_module._varlen(*inputs, packing, 0.3, 0.1), grouped)
    assert told == [((0.1, False, False), 0.3)]  # not causal, and the dropout mask is not returned


@pytest.mark.parametrize(
    ("changes", "dropout", "used"),
    [
        ({}, 0.0, True),
        ({}, 0.1, True),
        ({"is_cuda": False}, 0.1, False),
        ({"dtype": torch.float32}, 0.1, False),
        ({"shape": (1, 2, 9, 12)}, 0.0, False),
        ({"shape": (1, 2, 9, 264)}, 0.0, False),
        ({"capability": (7, 5)}, 0.1, False),
        ({"lacks": "flash_attention"}, 0.1, False),
        ({"lacks": "flash_attention"}, 0.0, True),
    ],
)
def test_when_one_kernel_is_used(monkeypatch, changes, dropout, used):
    query = {"is_cuda": True, "dtype": torch.bfloat16, "shape": (1, 2, 9, 64), "device": "cuda"}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: changes.get("capability", (8, 0)))
    if "lacks" in changes:
        monkeypatch.setattr(packing_module, changes["lacks"], None)
    assert one_kernel(SimpleNamespace(**{**query, **changes}), dropout) is used


def on_cuda(lengths, dtype, heads=12, width=64):
    """A layout and inputs that require gradients."""
    _, inputs = stream(lengths, heads, width)
    mask_bl = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return Packing.of(mask_bl.cuda()), [x.cuda().to(dtype).requires_grad_() for x in inputs]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dropout_in_one_kernel_is_that_of_the_padded_batch_on_average(monkeypatch, dtype):
    packing, inputs = on_cuda([3, 17, 32, 17, 1], dtype)

    def attend(seed, dropout, *, kernel=True):
        torch.manual_seed(seed)
        with monkeypatch.context() as patch:
            if not kernel:
                patch.setattr(packing_module, "one_kernel", lambda query, dropout: False)
            out, _ = grouped_attention(None, *inputs, None, dropout=dropout, packing=packing)
        return [out, *torch.autograd.grad(out.float().pow(2).sum(), inputs)]

    for one, groups in zip(attend(0, 1e-9), attend(0, 0.0, kernel=False), strict=True):  # too rare to drop anything
        torch.testing.assert_close(one, groups, rtol=2e-2, atol=2e-2)
    for first, again, other in zip(attend(1, 0.1), attend(1, 0.1), attend(2, 0.1), strict=True):
        assert torch.isfinite(first).all()
        torch.testing.assert_close(first, again, rtol=2e-2, atol=2e-2)  # dropout can be replayed
        assert not torch.allclose(first, other, rtol=2e-2, atol=2e-2)
    outs = torch.stack([attend(seed, 0.1)[0].detach().float() for seed in range(400)])
    error = outs.std(dim=0) / len(outs) ** 0.5
    expected = attend(0, 0.0, kernel=False)[0].detach().float()
    assert outs.std(dim=0).mean() > 0.01
    torch.testing.assert_close(outs.mean(dim=0), expected, rtol=1e-2, atol=6 * float(error.max()))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_variable_length_kernel_gives_what_the_padded_batch_gives(monkeypatch, dtype):
    calls = []
    kernel = packing_module.varlen_attn
    monkeypatch.setattr(packing_module, "varlen_attn", lambda *a, **k: calls.append(1) or kernel(*a, **k))
    packing, inputs = on_cuda([3, 17, 32, 17, 1], dtype)
    results = []
    for _ in range(2):
        out, _ = grouped_attention(None, *inputs, None, packing=packing)
        results.append([out, *torch.autograd.grad(out.float().pow(2).sum(), inputs)])
        monkeypatch.setattr(packing_module, "one_kernel", lambda query, dropout: False)
    assert calls == [1]
    for varlen, grouped in zip(*results, strict=True):
        torch.testing.assert_close(varlen, grouped, rtol=2e-2, atol=2e-2)
