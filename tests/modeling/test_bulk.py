import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer.modules import (
    LayerNorm,
    Normalize,
    Pooling,
    StaticEmbedding,
    WeightedLayerPooling,
)
from torch import nn

import metaphrase.modeling.bulk as bulk
from metaphrase.exceptions import UsageError
from metaphrase.modeling.bulk import encode, is_text_transformer, token_batches
from metaphrase.modeling.packing import notice

TEXTS = [
    "der Garten ist groß und das Haus ist klein",
    "ja",
    "der Hund schläft",
    "",
    "das Haus ist rot",
    "ja",
    "the garden is large and the house is small and the dog sleeps in the garden of the house",
]
MODES = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]


def with_modules(model: SentenceTransformer, *modules: nn.Module) -> SentenceTransformer:
    return SentenceTransformer(modules=[model[0], *modules], device="cpu")


def stacks(model: SentenceTransformer) -> dict[str, SentenceTransformer]:
    torch.manual_seed(1)
    pooling = Pooling(32, pooling_mode="mean")
    dense = Dense(32, 12, module_input_name="token_embeddings")
    return {
        **{mode: with_modules(model, Pooling(32, pooling_mode=mode)) for mode in MODES},
        "several": with_modules(model, Pooling(32, pooling_mode=("cls", "max", "mean")), Normalize()),
        "dense": with_modules(model, pooling, Dense(32, 8), LayerNorm(8), Normalize()),
        "residual": with_modules(model, pooling, Dense(32, 32, use_residual=True)),
        "dense tokens": with_modules(model, dense, Pooling(12, pooling_mode="max")),
        "prompt left out": with_modules(model, Pooling(32, pooling_mode="mean", include_prompt=False)),
    }


def assert_close(ours, theirs, name=""):
    assert ours.shape == theirs.shape
    assert np.abs(theirs).max() > 1e-3
    np.testing.assert_allclose(ours, theirs, atol=1e-6, rtol=0, err_msg=name)


@pytest.mark.parametrize(("encoder", "prompt"), [("tiny_encoder", "das Haus: "), ("tiny_xlmr", None)])
def test_equals_sentence_transformers_for_every_stack(request, encoder, prompt):
    for name, model in stacks(request.getfixturevalue(encoder)).items():
        for normalize in (False, True):
            theirs = model.encode(TEXTS, prompt=prompt, normalize_embeddings=normalize)
            ours = encode(model, TEXTS, prompt=prompt, normalize_embeddings=normalize, tokens=24)
            assert ours.dtype == theirs.dtype == np.float32
            assert_close(ours, theirs, name)


def test_layers_that_are_pooled_together(tiny_encoder):
    tiny_encoder[0].auto_model.config.output_hidden_states = True
    model = with_modules(tiny_encoder, WeightedLayerPooling(32, num_hidden_layers=2, layer_start=1), Pooling(32))
    assert_close(encode(model, TEXTS), model.encode(TEXTS))


def test_precision_is_that_of_double(tiny_encoder):
    model = tiny_encoder.double()
    np.testing.assert_allclose(encode(model, TEXTS, tokens=16), model.encode(TEXTS), rtol=1e-12, atol=1e-12)


def test_half_precision_becomes_an_array(tiny_encoder):
    assert encode(tiny_encoder.bfloat16(), TEXTS).dtype == np.float32
    assert encode(tiny_encoder, TEXTS, convert_to_tensor=True).dtype == torch.bfloat16


@pytest.mark.parametrize("stack", ["mean", "dense"])
def test_bfloat16_gives_float32_embeddings_in_nearly_the_same_direction(tiny_encoder, stack):
    model = stacks(tiny_encoder)[stack]
    exact, rounded = encode(model, TEXTS), encode(model, TEXTS, bf16=True)
    assert rounded.dtype == np.float32
    assert not np.array_equal(exact, rounded)
    cosines = (exact * rounded).sum(axis=1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(rounded, axis=1)
    assert cosines.min() > 0.99


def test_bfloat16_of_a_model_that_pads_on_the_left(tiny_encoder):
    tiny_encoder.tokenizer.padding_side = "left"
    exact, rounded = encode(tiny_encoder, TEXTS), encode(tiny_encoder, TEXTS, bf16=True)
    assert rounded.dtype == np.float32
    assert not np.array_equal(exact, rounded)
    cosines = (exact * rounded).sum(axis=1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(rounded, axis=1)
    assert cosines.min() > 0.99


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("stack", ["several", "projected"])
def test_a_model_that_normalises_its_embeddings_does_so_in_bfloat16(tiny_encoder, stack, side):
    """A dot product would otherwise rank by the rounding errors of lengths, too."""
    tiny_encoder.tokenizer.padding_side = side
    projected = with_modules(
        tiny_encoder, Pooling(32), Dense(32, 32, bias=False, activation_function=None), Normalize()
    )
    model = {"projected": projected, **stacks(tiny_encoder)}[stack]
    length_n = np.linalg.norm(encode(model, TEXTS, bf16=True), axis=1)
    assert np.abs(length_n - 1).max() < 1e-6
    with model.truncate_embeddings(8):  # as in float32, after the embeddings are normalised
        assert (np.linalg.norm(encode(model, TEXTS, bf16=True), axis=1) < 0.99).all()


def test_prompts_by_name_and_by_default(tiny_encoder):
    model = SentenceTransformer(modules=list(tiny_encoder), prompts={"query": "ja "}, device="cpu")
    assert_close(encode(model, TEXTS, prompt_name="query"), model.encode(TEXTS, prompt_name="query"))
    assert np.abs(encode(model, TEXTS, prompt_name="query") - encode(model, TEXTS)).max() > 1e-3
    model.default_prompt_name = "query"
    assert_close(encode(model, TEXTS), model.encode(TEXTS))
    with pytest.raises(ValueError, match="does not store the prompt"):
        encode(model, TEXTS, prompt_name="no such")


def test_truncated_texts_and_embeddings(tiny_encoder):
    tiny_encoder.max_seq_length = 6
    tiny_encoder.truncate_dim = 20
    ours = encode(tiny_encoder, TEXTS, normalize_embeddings=True)
    assert ours.shape == (len(TEXTS), 20)
    assert_close(ours, tiny_encoder.encode(TEXTS, normalize_embeddings=True))


def test_tensors_and_training_mode(tiny_encoder):
    tiny_encoder.train()
    ours = encode(tiny_encoder, TEXTS, convert_to_tensor=True)
    assert isinstance(ours, torch.Tensor)
    torch.testing.assert_close(ours, tiny_encoder.encode(TEXTS, convert_to_tensor=True), atol=1e-6, rtol=0)


def test_no_and_one_sentence(tiny_encoder):
    assert encode(tiny_encoder, []).shape == (0, 32)
    assert encode(tiny_encoder, [], convert_to_tensor=True).shape == (0, 32)
    assert_close(encode(tiny_encoder, TEXTS[:1]), tiny_encoder.encode(TEXTS[:1]))
    with pytest.raises(ValueError, match="list of sentences"):
        encode(tiny_encoder, "ja")


def test_batches_hold_a_number_of_tokens():
    lengths = [3, 40, 1, 7, 7, 2, 2, 9]
    batches = list(token_batches(lengths, 14))
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert [lengths[i] for batch in batches for i in batch] == sorted(lengths, reverse=True)
    assert all(len(batch) == 1 or len(batch) * lengths[batch[0]] <= 14 for batch in batches)
    assert batches == [[1], [7], [3, 4], [0, 5, 6, 2]]


def test_texts_are_tokenised_once_and_batches_are_even(tiny_encoder, monkeypatch):
    calls, sizes = [], []
    preprocess = tiny_encoder.preprocess
    monkeypatch.setattr(
        tiny_encoder, "preprocess", lambda texts, **kwargs: calls.append(len(texts)) or preprocess(texts, **kwargs)
    )
    layer = tiny_encoder[0].auto_model.encoder.layer[0]
    layer.register_forward_hook(lambda module, args, output: sizes.append(args[0].shape[:2]))
    texts = TEXTS * 6
    encode(tiny_encoder, texts, tokens=40)
    assert calls == [len(texts)]
    tokens = sum(map(len, tiny_encoder.tokenizer(texts, truncation=True, max_length=32)["input_ids"]))
    assert sum(n for _, n in sizes) == tokens
    assert all(one == 1 and n <= 40 for one, n in sizes)


def test_windows_do_not_show(tiny_encoder, monkeypatch):
    whole = encode(tiny_encoder, TEXTS)
    monkeypatch.setattr(bulk, "WINDOW", 3)
    told = []
    assert_close(encode(tiny_encoder, TEXTS, advance=told.append), whole)
    assert told == [3, 3, 1]


def test_an_encoder_that_cannot_be_packed_is_padded(tiny_encoder, monkeypatch, caplog):
    monkeypatch.setattr(type(tiny_encoder[0].auto_model), "_supports_attention_backend", False)
    notice.cache_clear()
    for _ in range(2):
        assert_close(encode(tiny_encoder, TEXTS, tokens=24), tiny_encoder.encode(TEXTS))
    assert caplog.messages == ["Sentences are padded for BertModel: it cannot run without padding."]


def test_other_models_are_handed_on(tokenizer, tiny_encoder):
    torch.manual_seed(0)
    static = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=8)], device="cpu")
    assert not is_text_transformer(static)
    assert is_text_transformer(tiny_encoder)
    assert_close(encode(static, TEXTS[:3]), static.encode(TEXTS[:3]))
    tiny_encoder.tokenizer.padding_side = "left"
    assert not is_text_transformer(tiny_encoder)


@pytest.mark.parametrize(("texts", "kind"), [("ja", "str"), ((text for text in TEXTS), "generator")])
def test_other_texts_than_a_list_are_refused(tiny_encoder, texts, kind):
    with pytest.raises(UsageError, match=rf"requires a list of sentences, but got a {kind}\. Pass \[text\] or list"):
        encode(tiny_encoder, texts)
