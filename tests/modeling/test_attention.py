from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModel

from metaphrase.encoders.loading import load_encoder
from metaphrase.modeling.attention import observed
from metaphrase.modeling.encoding import encode_views
from metaphrase.modeling.packing import first_position, packed
from tests.conftest import shape


def prefix_views(tokenizer, rows):
    """Two views with causal attention and one with full attention."""
    encoded = tokenizer([row["source"] for row in rows], padding=True, return_tensors="pt")
    ids, mask = encoded["input_ids"], encoded["attention_mask"].bool()
    everything = mask[:, None, :] & mask[:, :, None]
    before = everything & torch.ones_like(everything).tril()
    base = {"input_ids": ids, "attention_mask": mask.long()}
    return {"before": {**base, "visible": before}, "all": {**base, "visible": everything}, "plain": base}


@pytest.mark.parametrize("name", ["tiny_encoder", "tiny_xlmr"])
def test_probabilities_and_states_are_those_of_eager_attention(request, name, tokenizer, bitext):
    model = request.getfixturevalue(name).double().eval()
    views = prefix_views(tokenizer, bitext[:5])
    encodings = encode_views(model, views)
    encoder = model[0].auto_model
    encoder.set_attn_implementation("eager")
    for view in ("before", "all"):
        visible = views[view]["visible"] | torch.eye(views[view]["visible"].shape[1], dtype=torch.bool)
        additive = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -torch.inf)[:, None]
        eager = encoder(
            input_ids=views[view]["input_ids"],
            attention_mask=additive,
            position_ids=_positions(encoder, views[view]),
            output_attentions=True,
        )
        real = views[view]["attention_mask"].bool()
        attention = encodings[view].attention_bell
        assert len(eager.attentions) == encoder.config.num_hidden_layers
        mask = real[:, None, :, None].expand_as(attention)
        torch.testing.assert_close(attention[mask], eager.attentions[-1][mask], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(
            encodings[view].tokens_blh[real], eager.last_hidden_state[real], rtol=1e-9, atol=1e-10
        )


def _positions(encoder, view):
    return (torch.arange(view["input_ids"].shape[1]) + first_position(encoder)).expand_as(view["input_ids"])


def test_heads_that_share_keys_and_values(tmp_path, tokenizer, bitext):
    """EuroBERT's eager attention computes the softmax in float32."""
    config = AutoConfig.for_model("eurobert", **shape(tokenizer, num_attention_heads=4, num_key_value_heads=2))
    AutoModel.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = load_encoder(tmp_path, device="cpu").eval()
    view = prefix_views(tokenizer, bitext[:5])["all"]
    encoding = encode_views(model, {"all": view})["all"]
    encoder = model[0].auto_model
    encoder.set_attn_implementation("eager")
    eager = encoder(view["input_ids"], view["attention_mask"], output_attentions=True)
    real = encoding.mask_bl[:, None, :, None].expand_as(encoding.attention_bell)
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(encoding.attention_bell[real], eager.attentions[-1][real], **close)
    mask_bl = encoding.mask_bl
    torch.testing.assert_close(encoding.tokens_blh[mask_bl], eager.last_hidden_state[mask_bl], **close)


def test_seeing_all_is_plain_encoding(tiny_encoder, tokenizer, bitext):
    model = tiny_encoder.double().eval()
    encodings = encode_views(model, prefix_views(tokenizer, bitext[:5]))
    torch.testing.assert_close(encodings["all"].sentence_bh, encodings["plain"].sentence_bh, rtol=1e-10, atol=1e-12)
    assert encodings["plain"].attention_bell is None
    assert (encodings["before"].sentence_bh - encodings["plain"].sentence_bh).abs().max() > 1e-3


def test_a_position_may_be_hidden_from_itself(tiny_encoder, tokenizer, bitext):
    views = prefix_views(tokenizer, bitext[:2])
    length = views["all"]["visible"].shape[1]
    views["others"] = {**views["all"], "visible": views["all"]["visible"] & ~torch.eye(length, dtype=torch.bool)}
    attention = encode_views(tiny_encoder.double().eval(), views)["others"].attention_bell
    real = views["all"]["attention_mask"].bool()[:, None].expand(-1, attention.shape[1], -1)
    assert (attention.diagonal(dim1=-2, dim2=-1)[real] == 0).all()


def test_packing_changes_nothing_and_is_undone(tiny_encoder, tokenizer, bitext):
    model = tiny_encoder.double().eval()
    views = prefix_views(tokenizer, bitext[:5])
    padded = encode_views(model, views)
    with packed(model):
        implementation = model[0].auto_model.config._attn_implementation
        flat = encode_views(model, views)
        assert model[0].auto_model.config._attn_implementation == implementation
    for view, encoding in padded.items():
        torch.testing.assert_close(flat[view].sentence_bh, encoding.sentence_bh, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(flat["before"].attention_bell, padded["before"].attention_bell, rtol=1e-10, atol=1e-12)


def test_gradient_reaches_the_encoder_through_the_probabilities(tiny_encoder, tokenizer, bitext):
    encoding = encode_views(tiny_encoder.double(), prefix_views(tokenizer, bitext[:3]))["before"]
    encoding.attention_bell[:, :, 2, 1].sum().backward()
    layer = tiny_encoder[0].auto_model.encoder.layer[-1].attention.self
    assert layer.query.weight.grad.abs().sum() > 0
    assert layer.key.weight.grad.abs().sum() > 0
    assert layer.value.weight.grad is None or layer.value.weight.grad.abs().sum() == 0


def test_probabilities_are_before_dropout(tiny_encoder, tokenizer, bitext):
    encoding = encode_views(tiny_encoder.double().train(), prefix_views(tokenizer, bitext[:3]))["all"]
    mask = encoding.mask_bl
    rows = encoding.attention_bell.sum(-1)[mask[:, None].expand(-1, encoding.attention_bell.shape[1], -1)]
    torch.testing.assert_close(rows, torch.ones_like(rows))


def test_checkpointed_layers_are_refused(tiny_encoder, tokenizer, bitext):
    encoder = tiny_encoder[0].auto_model
    encoder.activation_checkpointing_enable()
    views = prefix_views(tokenizer, bitext[:3])
    with pytest.raises(ValueError, match=r"Gradient checkpointing is not supported.*--micro_batch_size"):
        encode_views(tiny_encoder.train(), views)
    assert encode_views(tiny_encoder.eval(), views)["before"].attention_bell is not None


def test_the_implementation_is_restored_after_an_error(tiny_encoder):
    encoder = tiny_encoder[0].auto_model
    before = encoder.config._attn_implementation
    with pytest.raises(RuntimeError, match="boom"), observed(encoder):
        raise RuntimeError("boom")
    assert encoder.config._attn_implementation == before
