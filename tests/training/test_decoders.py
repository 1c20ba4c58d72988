"""Decoders that embed sentences, such as Qwen3-Embedding: they pad on the left, and their tokenizers have no mask token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

from metaphrase.encoders.loading import load_encoder
from metaphrase.exceptions import ModelError
from metaphrase.modeling.collator import ParallelCollator
from metaphrase.modeling.encoding import encode_views
from metaphrase.training.configuration import RunConfig
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import Recipe
from metaphrase.training.run import TrainingRun
from tests.conftest import BITEXT, shape


@pytest.fixture
def decoder(tmp_path, tokenizer):
    """The folder of a tiny Qwen3 with last-token pooling, whose texts end with a special token."""
    torch.manual_seed(0)
    backend = tokenizer.backend_tokenizer
    end = "[SEP]", backend.token_to_id("[SEP]")
    backend.post_processor = TemplateProcessing(single=f"$A {end[0]}", special_tokens=[end])
    tokens = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": end[0]}
    own = PreTrainedTokenizerFast(tokenizer_object=backend, **tokens, model_max_length=64, padding_side="left")
    config = Qwen3Config(**shape(own, num_key_value_heads=1, head_dim=16, max_position_embeddings=64))
    for part in (Qwen3Model(config), own):
        part.save_pretrained(tmp_path / "raw")
    modules = [Transformer(str(tmp_path / "raw"), max_seq_length=32), Pooling(32, "lasttoken"), Normalize()]
    model = SentenceTransformer(modules=modules, device="cpu", prompts={"query": "find: "})
    model.save_pretrained(str(tmp_path / "decoder"), create_model_card=False)
    return tmp_path / "decoder"


@pytest.mark.parametrize("recipe", ["tr", "metaphrase"])
def test_embeddings_are_those_of_encode(decoder, bitext, recipe):
    model = load_encoder(str(decoder))
    assert model.tokenizer.padding_side == "left"
    loss = AlignmentLoss(model, Recipe.load(recipe), max_length=32)
    batch = ParallelCollator(model.tokenizer, loss.views)(bitext[:6])
    with torch.no_grad():
        encodings = encode_views(model.eval(), batch)
    for side in ("source", "target"):
        wanted = model.encode([pair[side] for pair in bitext[:6]], prompt="")
        np.testing.assert_allclose(encodings[side].sentence_bh.numpy(), wanted, atol=1e-5)


def test_it_is_trained_merged_and_released(decoder, tmp_path):
    settings = {"model": str(decoder), "corpus": [str(BITEXT)], "languages": ["de"], "use_cpu": True}
    settings |= {"recipe": "metaphrase", "max_steps": 2, "per_device_train_batch_size": 8, "merge": "0.5"}
    result = TrainingRun(RunConfig(**settings, output_dir=str(tmp_path / "out"))).execute()
    released, base = (SentenceTransformer(str(folder), device="cpu") for folder in (result.output, decoder))
    texts = ["ein Satz", "zwei Worte mehr"]
    assert released.prompts["query"] == "find: "
    assert not np.allclose(released.encode(texts), base.encode(texts), atol=1e-6)


def test_objectives_that_mask_are_refused(decoder):
    with pytest.raises(ModelError, match=r"has no cls token, required by tlm\. Use a recipe such as 'tr'"):
        AlignmentLoss(load_encoder(str(decoder)), Recipe.load("tr-tlm"))
