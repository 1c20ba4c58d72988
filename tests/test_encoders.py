import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers.sentence_transformer.modules import Pooling

from metaphrase.encoders import english_piece_ids, freeze_word_embeddings, load_encoder, pretrained_mlm_head
from metaphrase.exceptions import MetaphraseError


def pooling_of(model):
    return next(module.pooling_mode for module in model if isinstance(module, Pooling))


def test_a_raw_encoder_gets_the_recipes_pooling(tiny_bert_dir):
    assert pooling_of(load_encoder(tiny_bert_dir)) == "mean"
    assert pooling_of(load_encoder(tiny_bert_dir, default_pooling="cls")) == "cls"


def test_an_encoder_keeps_its_own_pooling_unless_told_otherwise(tiny_encoder_dir):
    assert pooling_of(load_encoder(tiny_encoder_dir, default_pooling="mean")) == "cls"
    assert pooling_of(load_encoder(tiny_encoder_dir, pooling="mean")) == "mean"


@pytest.mark.parametrize("name", ["tiny_bert_dir", "tiny_mlm_dir", "tiny_encoder_dir"])
def test_no_encoder_has_a_transformers_pooler(request, name, capfd):
    model = load_encoder(request.getfixturevalue(name), max_length=17)
    assert not [key for key in model.state_dict() if "pooler" in key]
    assert model.max_seq_length == 17
    assert "MISSING" not in capfd.readouterr().err


@pytest.mark.parametrize("name", ["acme/nothing", "acme/nothing@v1", "runs/there/is/none", "nothing"])
def test_what_is_nowhere_is_said_in_one_sentence(name):
    with pytest.raises(OSError, match=rf"^There is no folder {name}, and no model of that name") as caught:
        load_encoder(name)
    assert isinstance(caught.value, MetaphraseError)


def test_word_embeddings_can_be_frozen(tiny_encoder):
    freeze_word_embeddings(tiny_encoder)
    frozen = [name for name, parameter in tiny_encoder.named_parameters() if not parameter.requires_grad]
    assert len(frozen) == 1
    assert "word_embeddings" in frozen[0]


def test_the_mlm_head_of_older_checkpoints(tiny_mlm_dir, tmp_path):
    """Norms were once called gamma and beta; mBERT's are to this day."""
    wanted = pretrained_mlm_head(str(tiny_mlm_dir))
    assert wanted is not None
    state = load_file(tiny_mlm_dir / "model.safetensors")
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    old = {}
    for key, value in state.items():
        for new, former in names.items():
            key = key.replace(new, former)
        old[key] = value
    save_file(old, tmp_path / "model.safetensors")
    found = pretrained_mlm_head(str(tmp_path))
    assert found is not None
    for name, value in wanted.items():
        assert torch.equal(found[name], value)


def test_checkpoints_without_an_mlm_head(tiny_bert_dir, tmp_path):
    assert pretrained_mlm_head(str(tiny_bert_dir)) is None
    assert pretrained_mlm_head(str(tmp_path)) is None


def test_english_pieces_hold_every_special_token(tokenizer, bitext):
    texts = [row["target"] for row in bitext]
    ids = english_piece_ids(texts, tokenizer).tolist()
    assert ids == sorted(set(ids))
    assert set(tokenizer.all_special_ids) <= set(ids)
    assert {piece for text in texts for piece in tokenizer(text)["input_ids"]} <= set(ids)
    assert len(ids) < len(tokenizer)
