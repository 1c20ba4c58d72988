"""Objectives on encoders of other architectures and sizes: they train, or say what they need."""

from __future__ import annotations

import re

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Pooling
from transformers import AutoConfig, AutoModel

from metaphrase.encoders.loading import load_encoder, pooling_of
from metaphrase.encoders.positions import set_max_length
from metaphrase.exceptions import ModelError, UsageError
from metaphrase.objectives import OBJECTIVES
from metaphrase.objectives.base import warn_unread_positions
from tests.conftest import shape


@pytest.fixture
def encoder_of(tmp_path, tokenizer):
    """Build a tiny encoder of an architecture."""

    def build(kind: str, **changes: int) -> SentenceTransformer:
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **shape(tokenizer, **changes))
        AutoModel.from_config(config).save_pretrained(tmp_path / kind)
        tokenizer.save_pretrained(tmp_path / kind)
        return load_encoder(tmp_path / kind, device="cpu")

    return build


@pytest.mark.parametrize(
    ("objective", "args", "needed"),
    [
        ("word-contrast", {"kind": "soft", "mutual": True}, "kind: hard"),
        ("word-contrast", {"kind": "soft", "mask_positives": True}, "kind: hard"),
        ("tr", {"soft_weight": 0.5}, "targets: soft"),
        ("tr", {"soft_temperature": 0.1}, "targets: soft"),
        ("tr", {"soft_sides": "both"}, "targets: soft"),
        ("similarity-preservation", {"temperature": 0.1}, "divergence: kl"),
        ("moco", {"projection_size": None, "bias": False}, "projection_size"),
    ],
)
def test_arguments_without_effect_are_refused(objective, args, needed):
    *_, name = args
    message = f"'{name}' of '{objective}' is {args[name]!r}, but has an effect only with '{needed}'"
    with pytest.raises(UsageError, match=re.escape(message)):
        OBJECTIVES[objective](**args)


@pytest.mark.parametrize("kind", ["mpnet", "deberta-v2"])
def test_states_are_translated_by_layers_of_an_encoder_without_sdpa(make_loss, batch_of, bitext, encoder_of, kind):
    loss = make_loss("rtl", model=encoder_of(kind, pad_token_id=1))
    loss(batch_of(loss, bitext[:3]))["rtl"].backward()
    assert loss.model[0].auto_model.get_input_embeddings().weight.grad.abs().sum() > 0


def test_the_encoder_of_an_encoder_decoder_has_no_layers_to_copy(make_loss, encoder_of):
    with pytest.raises(ModelError, match=r"T5EncoderModel has no decoder\..* or a recipe without RTL"):
        make_loss("rtl", model=encoder_of("t5"))


@pytest.mark.parametrize(
    ("kind", "changes", "resets"),
    [("bert", {}, True), ("modernbert", {}, True), ("deberta-v2", {"position_biased_input": False}, False)],
)
def test_positions_that_an_encoder_cannot_reset_are_reported_once(
    make_loss, encoder_of, caplog, kind, changes, resets
):
    warn_unread_positions.cache_clear()
    model = encoder_of(kind, **changes)
    for positions in ("continuous", "reset", "reset"):
        longest = make_loss("tlm", model=model, positions=positions, transform="none").objectives["tlm"]
    assert longest.longest_sequence(None) == (24 if resets else 48)
    assert caplog.text.count("`positions: reset` of 'tlm' has no effect") == (not resets)


@pytest.mark.parametrize("kind", ["deberta", "deberta-v2"])
def test_an_encoder_without_position_embeddings_has_no_limit(make_loss, batch_of, bitext, encoder_of, kind):
    settings = {"relative_attention": True, "position_biased_input": False, "pos_att_type": ["p2c", "c2p"]}
    model = encoder_of(kind, **settings, max_position_embeddings=16, pad_token_id=1)
    loss = make_loss("rtl", model=model)
    loss(batch_of(loss, bitext[:3]))["rtl"].backward()
    make_loss("tlm", model=model, transform="none")
    set_max_length(model, 64)
    text = " ".join(row["source"] for row in bitext)
    assert len(model.tokenizer(text, truncation=True, max_length=64)["input_ids"]) > 32
    assert model.encode(text).shape == (32,)


def test_two_passes_without_positions_are_reported_once(make_loss, encoder_of, caplog):
    warn_unread_positions.cache_clear()
    model = encoder_of("deberta-v2", position_biased_input=False, pad_token_id=1)
    for positions in ("single", "double", "double"):
        make_loss("rtl", model=model, positions=positions)
    assert caplog.text.count("`positions: double` of 'rtl' adds no positions") == 1


def test_two_embedding_passes_need_an_embedding_layer_that_takes_states(make_loss, encoder_of):
    model = encoder_of("modernbert", layer_types=["full_attention"] * 2)
    with pytest.raises(ModelError, match=r"the layer of ModernBertModel accepts none. Use positions 'single'"):
        make_loss("rtl", model=model, positions="double")


def test_equal_layers_with_a_type_for_each_are_copied(make_loss, batch_of, bitext, encoder_of):
    model = encoder_of("modernbert", num_hidden_layers=3, layer_types=["full_attention"] * 3)
    loss = make_loss("rtl", model=model)
    assert loss(batch_of(loss, bitext[:3]))["rtl"].isfinite()


def test_layers_that_differ_are_not_copied(make_loss, encoder_of):
    with pytest.raises(ModelError, match=r"those of ModernBertModel differ in their attention.* recipe without RTL"):
        make_loss("rtl", model=encoder_of("modernbert", num_hidden_layers=4))


def test_attention_to_the_translation_needs_a_window_of_a_pair(make_loss, encoder_of):
    make_loss("wa", model=encoder_of("modernbert"), max_length=16)
    with pytest.raises(ModelError, match=r"only attend to 64 pieces on each side. Lower max_length \(48\)"):
        make_loss("wa", model=encoder_of("modernbert", max_position_embeddings=256), max_length=48)


@pytest.mark.parametrize("kind", ["distilbert", "bert"])
def test_two_embedding_passes(make_loss, batch_of, bitext, encoder_of, kind):
    loss = make_loss("rtl", model=encoder_of(kind, pad_token_id=1), positions="double")
    assert loss(batch_of(loss, bitext[:3]))["rtl"].isfinite()


@pytest.mark.parametrize("objective", ["rtl", "tlm", "mlm", "awp", "mexma", "xtr"])
def test_word_embeddings_narrower_than_states_cannot_predict_pieces(make_loss, encoder_of, objective):
    with pytest.raises(ModelError, match="have 16 components, but its states have 32"):
        make_loss(objective, model=encoder_of("albert", embedding_size=16), languages=["de", "en"])


@pytest.mark.parametrize(("objective", "args"), [("mexma", {}), ("xtr", {}), ("tr", {"projection": "mlp"})])
def test_sentence_embeddings_of_another_size_do_not_fit_a_head(make_loss, tiny_encoder, objective, args):
    tiny_encoder.append(Dense(32, 16))
    with pytest.raises(ModelError, match=f"{objective}.* of 32 components, .* but those of this model have 16"):
        make_loss(objective, model=tiny_encoder, languages=["de", "en"], **args)
    assert make_loss("tr", model=tiny_encoder).objectives["tr"].head is None


def test_several_pooling_modes_are_none_of_them(make_loss, tiny_encoder):
    tiny_encoder[1] = Pooling(32, ("cls", "mean"))
    assert pooling_of(tiny_encoder) == "cls+mean"
    with pytest.raises(ModelError, match=r"but this encoder uses 'cls\+mean'"):
        make_loss("moco", model=tiny_encoder)
