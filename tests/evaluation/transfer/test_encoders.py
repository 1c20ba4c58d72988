import json

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    MambaConfig,
    MambaModel,
    XLMRobertaConfig,
    XLMRobertaModel,
    XmodConfig,
    XmodModel,
)

from metaphrase.evaluation.transfer.tasks import encoder_source, load_tokenizer, load_with_head, make_linear
from metaphrase.exceptions import ModelError
from tests.conftest import shape


def same_encoder(model, folder):
    expected = BertModel.from_pretrained(folder, add_pooling_layer=False).state_dict()
    found = model.base_model.state_dict()
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_sentence_transformer_and_a_bare_encoder(tiny_encoder_dir, tiny_bert_dir):
    for folder in (tiny_encoder_dir, tiny_bert_dir):
        source = encoder_source(folder)
        assert source.name == str(folder)
        model = load_with_head(source, AutoModelForSequenceClassification, num_labels=3)
        assert same_encoder(model, tiny_bert_dir)
        assert load_tokenizer(source)("a")["input_ids"]
    assert encoder_source(tiny_encoder_dir).sha256 == encoder_source(str(tiny_encoder_dir)).sha256 is not None


def test_the_transformer_in_a_folder_of_its_own(tiny_bert_dir, tokenizer, tmp_path):
    modules = [{"idx": 0, "name": "0", "path": "0_Transformer", "type": "sentence_transformers.models.Transformer"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    BertModel.from_pretrained(tiny_bert_dir, add_pooling_layer=False).save_pretrained(tmp_path / "0_Transformer")
    tokenizer.save_pretrained(tmp_path / "0_Transformer")
    source = encoder_source(tmp_path)
    assert same_encoder(load_with_head(source, AutoModelForSequenceClassification), tiny_bert_dir)
    assert load_tokenizer(source)("a")["input_ids"] == tokenizer("a")["input_ids"]
    modules[0]["type"] = "sentence_transformers.models.BoW"
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(
        ValueError, match=r"lists sentence_transformers\.models\.BoW, but a model starts with a Transformer"
    ):
        encoder_source(tmp_path)


def test_options_of_the_encoder(tiny_encoder_dir):
    source = encoder_source(tiny_encoder_dir)
    model = load_with_head(source, AutoModelForSequenceClassification, dropout=0.0, freeze_word_embeddings=True)
    assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == {0.0}
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == ["bert.embeddings.word_embeddings.weight"]


@pytest.mark.parametrize("head", [AutoModelForQuestionAnswering, AutoModelForSequenceClassification])
def test_dropout_has_other_names_in_distilbert(tokenizer, tmp_path, head):
    config = DistilBertConfig(vocab_size=len(tokenizer), dim=32, n_layers=2, n_heads=2, hidden_dim=64)
    DistilBertModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = load_with_head(encoder_source(tmp_path), head, dropout=0.3)
    assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == {0.3}


def test_an_encoder_without_dropout(tokenizer, tmp_path):
    config = MambaConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, state_size=4)
    MambaModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert load_with_head(encoder_source(tmp_path), AutoModel)
    with pytest.raises(ModelError, match=r"has no dropout to set\. Omit --dropout"):
        load_with_head(encoder_source(tmp_path), AutoModel, dropout=0.1)


def test_an_encoder_with_adapters_needs_a_default_language(tokenizer, tmp_path):
    config = XmodConfig(
        **shape(tokenizer, type_vocab_size=1, max_position_embeddings=82), languages=["en_XX", "sw_KE"]
    )
    XmodModel(config, add_pooling_layer=False).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"sets no default_language, .* Set it to one of its languages"):
        load_with_head(encoder_source(tmp_path), AutoModelForSequenceClassification)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"default_language": "sw_KE"}))
    model = load_with_head(encoder_source(tmp_path), AutoModelForSequenceClassification)
    assert model(**tokenizer("the dog", return_tensors="pt")).logits.isfinite().all()


def test_padding_and_truncation_are_on_the_right(tiny_bert_dir, tokenizer, tmp_path):
    """On the left, labels would be at pads, and windows would be counted from the end."""
    BertModel.from_pretrained(tiny_bert_dir, add_pooling_layer=False).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    sides = {"padding_side": "left", "truncation_side": "left"}
    path.write_text(json.dumps(json.loads(path.read_text()) | sides))
    loaded = load_tokenizer(encoder_source(tmp_path))
    given = {"padding": True, "truncation": True, "max_length": 5}
    texts = ["the dog drinks water today", "the dog"]
    assert loaded(texts, **given)["input_ids"] == tokenizer(texts, **given)["input_ids"]


@pytest.mark.parametrize("kind", ["bert", "xlmr"])
def test_linear_head_sees_the_first_token_alone(kind, tokenizer, tmp_path):
    if kind == "bert":
        BertModel(BertConfig(**shape(tokenizer)), add_pooling_layer=False).save_pretrained(tmp_path)
    else:
        config = XLMRobertaConfig(**shape(tokenizer, type_vocab_size=1, max_position_embeddings=82))
        XLMRobertaModel(config, add_pooling_layer=False).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = load_with_head(encoder_source(tmp_path), AutoModelForSequenceClassification, num_labels=3).eval()
    make_linear(model)
    inputs = {"input_ids": torch.tensor([[2, 9, 10, 3]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    linear = model.classifier if kind == "bert" else model.classifier.out_proj  # its name in checkpoints
    assert linear.weight.abs().sum() > 0
    states_bsh = model.base_model(**inputs).last_hidden_state
    torch.testing.assert_close(model(**inputs).logits, linear(states_bsh[:, 0]))
