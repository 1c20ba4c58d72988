import pytest
import torch
from transformers import AutoModel

from metaphrase.exceptions import CheckpointError
from metaphrase.training.heads import AlignmentHeads, restore_heads
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import Recipe


def recipe(*terms):
    return Recipe.from_dict({"name": "some", "terms": [{"objective": name, "args": args} for name, args in terms]})


@pytest.mark.parametrize("name", ["dap", "dap-release", "tr-tlm"])
def test_heads_come_back_exactly(tiny_encoder, tokenizer, tmp_path, name):
    heads = AlignmentLoss(
        tiny_encoder, Recipe.load(name), max_length=24, english_ids=torch.arange(len(tokenizer))
    ).heads
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter))
    heads.save_pretrained(tmp_path)
    for loaded in (AlignmentHeads.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        state = loaded.state_dict()
        assert state.keys() == heads.state_dict().keys()
        for key, value in heads.state_dict().items():
            assert torch.equal(state[key], value), key


def test_buffers_of_the_english_vocabulary_come_back(tiny_encoder, tmp_path, tokenizer):
    english = torch.tensor(sorted({*tokenizer.all_special_ids, 20, 30}))
    loss = AlignmentLoss(
        tiny_encoder,
        recipe(("rtl", {"vocabulary": "english", "language_embeddings": True})),
        max_length=24,
        english_ids=english,
        languages=["de", "en"],
    )
    loss.heads.save_pretrained(tmp_path)
    head = AlignmentHeads.from_pretrained(tmp_path).heads["rtl"]
    assert torch.equal(head.vocabulary.ids_v, english)
    assert head.vocabulary.class_of(torch.tensor([20])).item() == english.tolist().index(20)
    assert torch.equal(head.languages.codes, loss.heads.heads["rtl"].languages.codes)


def test_heads_of_another_recipe_are_not_restored(tiny_encoder, tmp_path):
    dap, other = (AlignmentLoss(tiny_encoder, Recipe.load(name), max_length=24).heads for name in ("dap", "tr-tlm"))
    with pytest.raises(CheckpointError, match=r"heads do not fit this recipe .*, in the checkpoint None\)\. Use the"):
        restore_heads(dap, tmp_path)
    dap.save_pretrained(tmp_path / "heads")
    restore_heads(dap, tmp_path)
    with pytest.raises(
        CheckpointError, match=r"cannot be resumed: \d+ weights of its heads .* --model .* new heads\."
    ):
        restore_heads(other, tmp_path)


def test_no_head_owns_the_encoders_embeddings(tiny_encoder):
    loss = AlignmentLoss(tiny_encoder, recipe(("tr", {}), ("rtl", {}), ("tlm", {})), max_length=24)
    table = tiny_encoder[0].auto_model.get_input_embeddings().weight
    assert all(parameter.shape != table.shape for parameter in loss.heads.parameters())


def test_a_term_of_weight_zero_moves_nothing(tiny_encoder, tokenizer, bitext):
    from metaphrase.modeling.collator import ParallelCollator

    zero = Recipe.from_dict({"name": "zero", "terms": [{"objective": "tr"}, {"objective": "rtl", "weight": 0}]})
    loss = AlignmentLoss(tiny_encoder, zero, max_length=24)
    sum(loss(ParallelCollator(tokenizer, loss.views)(bitext[:4])).values()).backward()
    grads = [parameter.grad for parameter in loss.heads.parameters() if parameter.grad is not None]
    assert grads
    assert max(grad.abs().max() for grad in grads) == 0
