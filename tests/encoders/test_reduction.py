"""Trimmed and pruned encoders behave as before on what they keep, and load with sentence-transformers alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import WeightedLayerPooling
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertModel,
    LongformerConfig,
    LongformerModel,
    ModernBertConfig,
    ModernBertModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
    XLMRobertaConfig,
    XLMRobertaModel,
    XLMRobertaTokenizer,
)

from metaphrase.encoders.loading import load_encoder
from metaphrase.encoders.reduction import evenly_spaced, footprint, prune_layers, trim_vocabulary
from metaphrase.exceptions import ModelError, UsageError
from metaphrase.io.files import DEMO
from metaphrase.publishing.drafts import drafted
from tests.conftest import as_sentence_transformer, shape
from tests.processes import run_python

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
ROBERTA = {"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>"}
ROBERTA |= {"pad_token": "<pad>", "unk_token": "<unk>"}


def embeddings_without_this_package(folder: Path, texts: list[str]) -> np.ndarray:
    """Embeddings by sentence-transformers where this package cannot be imported."""
    code = (
        "import json, sys; from sentence_transformers import SentenceTransformer; "
        "sys.modules |= dict.fromkeys([name for name in sys.modules if name.startswith('metaphrase')]); "
        "model = SentenceTransformer(sys.argv[1], device='cpu'); "
        "print(json.dumps(model.encode(json.loads(sys.argv[2])).tolist()))"
    )
    done = run_python("-c", code, folder, json.dumps(texts))
    assert done.returncode == 0, done.stderr
    return np.array(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def texts(bitext) -> list[str]:
    return [row[side] for row in bitext for side in ("source", "target")]


def unigram(texts) -> tuple[Tokenizer, list[tuple[str, float]]]:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    pieces = [(piece, score) for piece, score in json.loads(tokenizer.to_str())["model"]["vocab"]]
    return tokenizer, [*pieces, ("<mask>", 0.0)]


def xlmr_tokenizer(texts, kind: str) -> PreTrainedTokenizerFast:
    tokenizer, pieces = unigram(texts)
    if kind == "own class":
        return XLMRobertaTokenizer(vocab=pieces, model_max_length=64)
    tokenizer.model = models.Unigram(pieces, unk_id=3, byte_fallback=False)
    ends = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=ends
    )
    mask = AddedToken("<mask>", lstrip=True, special=True)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, mask_token=mask, model_max_length=64, **ROBERTA)


def bpe_tokenizer(texts) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[*SPECIAL, "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, mask_token="<mask>", model_max_length=64, **ROBERTA)
    made.add_tokens(["[new]"])  # not among the pieces, but behind them
    return made


def encoder_of(tokenizer: PreTrainedTokenizerFast, folder: Path) -> SentenceTransformer:
    torch.manual_seed(0)
    config = XLMRobertaConfig(
        **shape(tokenizer, type_vocab_size=1, max_position_embeddings=82, vocab_size=len(tokenizer) + 7)
    )
    XLMRobertaModel(config, add_pooling_layer=False).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return as_sentence_transformer(folder, "mean")


@pytest.fixture(params=["wordpiece", "unigram", "own class", "bpe", "roberta positions"])
def encoder(request, tmp_path, texts, tiny_encoder, tiny_xlmr) -> SentenceTransformer:
    if request.param == "wordpiece":
        return tiny_encoder
    if request.param == "roberta positions":
        return tiny_xlmr
    tokenizer = bpe_tokenizer(texts) if request.param == "bpe" else xlmr_tokenizer(texts, request.param)
    return encoder_of(tokenizer, tmp_path / "encoder")


# ------------------------------------------------------------------------------------------------------------- vocabulary


def test_kept_texts_are_cut_and_embedded_as_before(encoder, texts, tmp_path):
    few = texts[:8]
    before = encoder.encode(few), encoder.encode(texts)
    size = len(encoder.tokenizer)
    trimmed = trim_vocabulary(encoder, few)

    assert len(trimmed.tokenizer) < size
    assert trimmed[0].auto_model.get_input_embeddings().num_embeddings == len(trimmed.tokenizer)
    assert trimmed[0].auto_model.config.vocab_size == len(trimmed.tokenizer)
    for text in few:
        assert trimmed.tokenizer.tokenize(text) == encoder.tokenizer.tokenize(text)
        assert trimmed.tokenizer.decode(trimmed.tokenizer(text)["input_ids"]) == encoder.tokenizer.decode(
            encoder.tokenizer(text)["input_ids"]
        )
    assert np.array_equal(trimmed.encode(few), before[0])
    assert not np.array_equal(trimmed.encode(texts), before[1])  # others fall apart into smaller pieces
    assert footprint(trimmed) < footprint(encoder)
    assert len(encoder.tokenizer) == size  # the model itself stays
    assert np.array_equal(encoder.encode(texts), before[1])

    with drafted(trimmed, tmp_path / "out") as draft:
        assert np.array_equal(draft.model.encode(few), before[0])
        assert draft.model.tokenizer.get_vocab() == trimmed.tokenizer.get_vocab()
        ids = draft.model.tokenizer(texts)["input_ids"]
        assert ids == trimmed.tokenizer(texts)["input_ids"]


def test_a_table_under_two_names_is_trimmed(tokenizer, texts, tmp_path):
    sizes = {"vocab_size": len(tokenizer), "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    T5EncoderModel(T5Config(**sizes, pad_token_id=tokenizer.pad_token_id)).save_pretrained(tmp_path / "t5")
    tokenizer.save_pretrained(tmp_path / "t5")
    encoder = load_encoder(tmp_path / "t5", device="cpu")
    before = encoder.encode(texts[:8])
    with drafted(trim_vocabulary(encoder, texts[:8]), tmp_path / "out") as draft:
        assert len(draft.model.tokenizer) < len(tokenizer)
        assert np.array_equal(draft.model.encode(texts[:8]), before)
    assert np.array_equal(encoder.encode(texts[:8]), before)


def test_special_tokens_keep_their_parts(encoder, texts):
    trimmed = trim_vocabulary(encoder, texts[:4])
    old, new = encoder.tokenizer, trimmed.tokenizer
    assert new.special_tokens_map == old.special_tokens_map
    assert all(new.convert_ids_to_tokens(new.convert_tokens_to_ids(t)) == t for t in old.all_special_tokens)
    assert trimmed[0].auto_model.config.pad_token_id == new.pad_token_id
    assert new.get_added_vocab().keys() == old.get_added_vocab().keys()
    rows = trimmed[0].auto_model.get_input_embeddings().weight
    table = encoder[0].auto_model.get_input_embeddings().weight
    for piece, id_ in new.get_vocab().items():
        assert torch.equal(rows[id_], table[old.convert_tokens_to_ids(piece)])


def test_every_character_stays_readable(encoder, texts):
    trimmed = trim_vocabulary(encoder, ["a"])
    for text in texts:
        unknown = [
            tokenizer.tokenize(text).count(tokenizer.unk_token) for tokenizer in (encoder.tokenizer, trimmed.tokenizer)
        ]
        assert unknown[1] <= unknown[0]


def test_prompts_are_kept(encoder, texts):
    encoder.prompts = {"query": f"{texts[20]} "}
    trimmed = trim_vocabulary(encoder, ["a"])
    assert trimmed.tokenizer.tokenize(texts[20]) == encoder.tokenizer.tokenize(texts[20])


def test_merges_of_a_kept_piece_are_kept(tmp_path, texts):
    encoder = encoder_of(bpe_tokenizer(texts), tmp_path)
    trimmed = trim_vocabulary(encoder, texts[:2])
    state = json.loads(trimmed.tokenizer.backend_tokenizer.to_str())["model"]
    assert 0 < len(state["merges"]) < len(json.loads(encoder.tokenizer.backend_tokenizer.to_str())["model"]["merges"])
    assert {part for merge in state["merges"] for part in (*merge, "".join(merge))} <= state["vocab"].keys()


def test_characters_that_end_words_are_kept(tmp_path, texts):
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[*SPECIAL, "<mask>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, mask_token="<mask>", model_max_length=64, **ROBERTA)
    trimmed = trim_vocabulary(encoder_of(fast, tmp_path), [texts[0]])
    assert len(trimmed.tokenizer) < len(fast)
    assert all(trimmed.tokenizer.unk_token_id not in trimmed.tokenizer(text)["input_ids"] for text in texts)


def test_one_text_is_no_list_of_texts(tiny_encoder):
    with pytest.raises(UsageError, match="but got one text"):
        trim_vocabulary(tiny_encoder, "der Hund")


def test_a_tokenizer_of_words_is_left_alone(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "a": 2}, unk_token="[UNK]"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    BertModel(BertConfig(**shape(fast)), add_pooling_layer=False).save_pretrained(tmp_path)
    fast.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="this one is WordLevel"):
        trim_vocabulary(as_sentence_transformer(tmp_path), ["a"])


def test_plain_sentence_transformers_loads_it(tmp_path, texts):
    encoder = encoder_of(xlmr_tokenizer(texts, "generic"), tmp_path / "encoder")
    trimmed = trim_vocabulary(prune_layers(encoder, [1]), texts[:8])
    with drafted(trimmed, tmp_path / "out") as draft:
        draft.publish("# Card\n")
    assert np.allclose(
        embeddings_without_this_package(tmp_path / "out", texts[:8]), trimmed.encode(texts[:8]), atol=1e-6
    )


@pytest.mark.slow
def test_the_starter_is_trimmed_to_swahili_and_english(tmp_path):
    from metaphrase.corpus.parallel import load_parallel_folder
    from metaphrase.encoders.loading import load_encoder

    model = load_encoder("starter", device="cpu")
    pairs = load_parallel_folder(DEMO, ["sw"], "train")["sw"]
    trimmed = trim_vocabulary(model, [*pairs.sources, *pairs.targets])
    few = [*pairs.sources[:20], *pairs.targets[:20]]
    assert np.array_equal(trimmed.encode(few), model.encode(few))
    assert len(model.tokenizer) == 250002
    assert len(trimmed.tokenizer) < 25_000
    with drafted(trimmed, tmp_path / "sw") as draft:
        assert draft.size < 0.26 * footprint(model)
        assert np.allclose(draft.model.encode(few), model.encode(few), atol=1e-6)
        draft.publish("# sw\n")


# ------------------------------------------------------------------------------------------------------------------ layers


def test_layers_are_kept_in_their_order(tiny_encoder, tmp_path):
    layers = tiny_encoder[0].auto_model.encoder.layer
    swapped = prune_layers(tiny_encoder, [1, 0, 1])
    assert np.array_equal(swapped.encode(["a dog"]), tiny_encoder.encode(["a dog"]))
    pruned = prune_layers(tiny_encoder, [1])
    (left,) = pruned[0].auto_model.encoder.layer
    assert pruned[0].auto_model.config.num_hidden_layers == 1
    assert left.output.dense.weight is layers[1].output.dense.weight
    assert len(layers) == tiny_encoder[0].auto_model.config.num_hidden_layers == 2
    with drafted(pruned, tmp_path / "out") as draft:
        assert draft.model[0].auto_model.config.num_hidden_layers == 1
        assert np.array_equal(draft.model.encode(["a dog"]), pruned.encode(["a dog"]))


@pytest.mark.parametrize("keep", [[2], [-1], [0, 5]])
def test_layers_that_do_not_exist_are_named(tiny_encoder, keep):
    with pytest.raises(ModelError, match=f"Unknown layer {keep[-1]}: the encoder has 2 layers, 0 to 1"):
        prune_layers(tiny_encoder, keep)


def test_an_encoder_keeps_a_layer(tiny_encoder):
    with pytest.raises(UsageError, match="at least one layer, but none of its 2 would be kept"):
        prune_layers(tiny_encoder, [])


def test_layers_that_are_no_list_are_not_guessed(tiny_encoder):
    tiny_encoder[0].auto_model.config.num_hidden_layers = 7
    with pytest.raises(ModelError, match="of type bert were not found"):
        prune_layers(tiny_encoder, [0])


def test_a_layer_that_differs_from_the_first_cannot_replace_it(tmp_path, tokenizer):
    special = {f"{name}_token_id": 2 for name in ("cls", "sep", "bos", "eos")}
    ModernBertModel(ModernBertConfig(**shape(tokenizer), **special)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    encoder = load_encoder(tmp_path, device="cpu")
    assert prune_layers(encoder, [0])[0].auto_model.config.num_hidden_layers == 1
    with pytest.raises(
        ModelError, match=r"of type modernbert, whose layers differ in .*attn_norm.*Keep the first layer"
    ):
        prune_layers(encoder, [1])


def test_settings_by_layer_follow_the_layers(tmp_path, tokenizer):
    config = LongformerConfig(**shape(tokenizer), attention_window=[4, 8], sep_token_id=2)
    LongformerModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    pruned = prune_layers(load_encoder(tmp_path, device="cpu"), [1])
    assert pruned[0].auto_model.config.attention_window == [8]
    assert pruned.encode("a dog").shape == (32,)


def test_a_pooling_of_all_layers_keeps_them(tiny_encoder):
    tiny_encoder.insert(1, WeightedLayerPooling(32, num_hidden_layers=2, layer_start=1))
    with pytest.raises(ModelError, match=r"weighs the states of all of its layers .* Keep all layers"):
        prune_layers(tiny_encoder, [0])


@pytest.mark.parametrize("layers", [1, 2, 6, 12, 24])
def test_layers_are_evenly_spaced(layers):
    for count in range(1, layers + 1):
        kept = evenly_spaced(layers, count)
        assert len(set(kept)) == count
        assert kept == sorted(kept)
        assert kept[-1] == layers - 1
        assert count == 1 or kept[0] == 0
