"""Adapters of PEFT: trained, saved, resumed, merged on release."""

import json

import numpy as np
import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense

from metaphrase import release
from metaphrase.encoders.adapters import add_lora, shared_copy
from metaphrase.encoders.loading import load_encoder
from metaphrase.exceptions import ModelError, UsageError
from metaphrase.publishing.contents import release_files
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import Recipe

TEXTS = ["the dog sleeps", "der Hund schläft tief und fest"]
CONFIGS = {
    "lora": LoraConfig(r=2, target_modules="all-linear"),
    "lora and whole modules": LoraConfig(r=2, target_modules=["query"], modules_to_save=["LayerNorm"]),
    "dora": LoraConfig(r=2, target_modules=["query", "dense"], use_dora=True),
    "biases": LoraConfig(r=2, target_modules=["query"], bias="all"),
    "ia3": IA3Config(target_modules=["key", "value", "dense"], feedforward_modules=["dense"]),
}


def with_adapter(model, kind="lora"):
    """A model with an adapter whose weights are random."""
    torch.manual_seed(0)
    model.add_adapter(CONFIGS[kind])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_release_has_the_adapter_in_its_weights(tiny_encoder, tmp_path, kind):
    plain, names = tiny_encoder.encode(TEXTS), tiny_encoder.state_dict().keys()
    model = with_adapter(tiny_encoder, kind)
    wanted, before = model.encode(TEXTS), {name: value.clone() for name, value in model.state_dict().items()}
    assert np.abs(wanted - plain).max() > 1e-3
    folder = release(model, tmp_path / "out", recipe=None)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert load_encoder(folder, device="cpu").state_dict().keys() == names
    assert np.abs(SentenceTransformer(str(folder), device="cpu").encode(TEXTS) - wanted).max() < 1e-5
    assert "config.json" in release_files(folder)
    assert not any("adapter" in path for path in release_files(folder))


def test_the_adapter_is_kept_where_asked_for(tiny_encoder, tiny_encoder_dir, tmp_path):
    model = with_adapter(tiny_encoder)
    wanted = model.encode(TEXTS)
    folder = release(model, tmp_path / "out", recipe=None, keep_adapter=True)
    kept = [path for path in release_files(folder) if path.startswith("adapter/")]
    assert kept == ["adapter/adapter_config.json", "adapter/adapter_model.safetensors"]
    assert set(kept) <= json.loads((folder / "release.json").read_text())["files"].keys()
    assert str(tiny_encoder_dir) not in (folder / kept[0]).read_text()
    base = SentenceTransformer(str(tiny_encoder_dir), device="cpu")
    base.load_adapter(str(folder / "adapter"))
    assert np.abs(base.encode(TEXTS) - wanted).max() < 1e-5
    assert np.abs(load_encoder(folder, device="cpu").encode(TEXTS) - wanted).max() < 1e-5
    release(model, folder, recipe=None)
    assert not any("adapter" in path for path in release_files(folder))


def test_a_model_without_an_adapter_keeps_none(tiny_encoder, tmp_path):
    with pytest.raises(UsageError, match="has no adapter to keep"):
        release(tiny_encoder, tmp_path / "out", recipe=None, keep_adapter=True)


def test_lora_trains_the_adapter_only(tiny_encoder):
    tiny_encoder.append(Dense(32, 16))
    add_lora(tiny_encoder, 2)
    trained = {name for name, parameter in tiny_encoder.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)


def test_an_adapter_beside_which_a_module_is_trained_is_not_kept(tiny_encoder, tmp_path):
    tiny_encoder.append(Dense(32, 16))
    model = with_adapter(tiny_encoder)
    with pytest.raises(UsageError, match=r"module 2, Dense, which are trainable.*model\[2\]\.requires_grad_\(False\)"):
        release(model, tmp_path / "out", recipe=None, keep_adapter=True)
    release(model, tmp_path / "out", recipe=None)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_around_the_encoder_is_refused(tiny_encoder):
    tiny_encoder[0].model = get_peft_model(tiny_encoder[0].auto_model, LoraConfig(target_modules=["query"]))
    with pytest.raises(ModelError, match=r"wrapped in a PeftModel\. Add the adapter to the SentenceTransformer"):
        AlignmentLoss(tiny_encoder, Recipe.load("tr"))


def test_a_copy_shares_the_weights_outside_of_the_adapter(tiny_encoder):
    copied = shared_copy(with_adapter(tiny_encoder))
    table = "0.model.embeddings.word_embeddings.weight"
    assert copied.get_parameter(table) is tiny_encoder.get_parameter(table)
    assert copied.tokenizer is tiny_encoder.tokenizer
