import copy

import pytest
import torch
from datasets import Dataset

from metaphrase.encoders.loading import freeze_word_embeddings
from metaphrase.modeling.encoding import encode_views
from metaphrase.objectives.anchor import anchor
from metaphrase.training.arguments import AlignmentTrainingArguments
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import Recipe
from metaphrase.training.trainer import AlignmentTrainer


def moved(loss):
    """The encoder after a step in some direction."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in loss.model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return loss


@pytest.mark.parametrize("sides", ["target", "both"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_matches_loop(make_loss, batch_of, bitext, tiny_encoder, sides, pooling):
    tiny_encoder[1].pooling_mode = pooling
    original = copy.deepcopy(tiny_encoder).double().eval()
    loss = moved(make_loss("anchor", sides=sides))
    rows = bitext[:5]
    views = {name: view for name, view in batch_of(loss, rows).items() if isinstance(view, dict)}
    slow = 0
    chosen = ("target",) if sides == "target" else ("source", "target")
    for side in chosen:
        for row in rows:  # one sentence at a time, without padding
            features = dict(original.preprocess([row[side]]))
            features = {key: value[:, :24] if torch.is_tensor(value) else value for key, value in features.items()}
            now = loss.model(dict(features))["sentence_embedding"][0]
            with torch.no_grad():
                then = original(dict(features))["sentence_embedding"][0]
            slow = slow + (now / now.norm() - then / then.norm()).pow(2).sum() / (len(rows) * len(chosen))
    fast = loss.objectives["anchor"](encode_views(loss.model, views))
    parameters = [p for p in loss.model.parameters() if p.requires_grad]
    got, wanted = (torch.autograd.grad(value, parameters, allow_unused=True) for value in (fast, slow))
    assert fast.item() > 1e-3
    assert fast.item() == pytest.approx(slow.item(), rel=1e-9)
    assert max(grad.abs().max() for grad in wanted if grad is not None) > 1e-4
    for ours, theirs in zip(got, wanted, strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-12)


def test_it_is_zero_at_the_start_of_training(make_loss, batch_of, bitext):
    loss = make_loss("anchor", sides="both")
    assert loss(batch_of(loss, bitext[:4]))["anchor"].item() == pytest.approx(0, abs=1e-20)


def test_length_does_not_count_and_opposites_are_four():
    embedding = torch.randn(3, 5)
    assert anchor(embedding, 7 * embedding).item() == pytest.approx(0, abs=1e-12)
    assert anchor(embedding, -embedding).item() == pytest.approx(4)


def test_it_is_computed_in_float32():
    assert anchor(torch.ones(1, 3).bfloat16(), torch.ones(1, 3).bfloat16()).dtype == torch.float32


def test_frozen_word_embeddings_are_shared_and_trained_ones_copied(tiny_encoder, bitext):
    recipe = Recipe.from_dict({"name": "one", "terms": [{"objective": "anchor"}]})
    for freeze in (False, True):
        if freeze:
            freeze_word_embeddings(tiny_encoder)
        loss = AlignmentLoss(tiny_encoder, recipe)
        (original,) = loss.objectives["anchor"]._original
        table = tiny_encoder[0].auto_model.get_input_embeddings()
        assert (original.get_input_embeddings() is table) == freeze
        assert not any(parameter.requires_grad for parameter in original.parameters())


def test_unknown_sides_and_pooling_are_refused(make_loss, tiny_encoder):
    with pytest.raises(ValueError, match="is 'source'"):
        make_loss("anchor", sides="source")
    tiny_encoder[1].pooling_mode = "max"
    with pytest.raises(ValueError, match="uses 'max'"):
        make_loss("anchor")


def test_it_keeps_the_model_in_place_and_is_neither_saved_nor_trained(tiny_encoder, bitext, tmp_path):
    recipe = {"name": "held", "terms": [{"objective": "tr"}, {"objective": "anchor", "weight": 100.0}]}
    texts = [row["target"] for row in bitext]
    start = tiny_encoder.encode(texts, convert_to_tensor=True)
    distances = {}
    for name, terms in (("free", recipe["terms"][:1]), ("held", recipe["terms"])):
        model = copy.deepcopy(tiny_encoder)
        loss = AlignmentLoss(model, Recipe.from_dict({"name": name, "terms": terms}), max_length=24)
        assert not any("original" in key for key in loss.state_dict())
        args = AlignmentTrainingArguments(
            output_dir=str(tmp_path / name),
            max_steps=8,
            save_steps=4,
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        AlignmentTrainer(model=model, args=args, train_dataset=Dataset.from_list(bitext), loss=loss).train()
        distances[name] = anchor(model.encode(texts, convert_to_tensor=True), start).item()
    assert distances["held"] < 0.5 * distances["free"]


def test_a_resumed_run_is_anchored_to_the_original_start(tiny_encoder, bitext, tmp_path):
    ends = []
    for stop in (None, 4):
        model = copy.deepcopy(tiny_encoder)
        torch.manual_seed(0)

        def train(steps, resume, model=model, stop=stop):
            recipe = Recipe.from_dict({"name": "held", "terms": [{"objective": "tr"}, {"objective": "anchor"}]})
            loss = AlignmentLoss(model, recipe, max_length=24)
            args = AlignmentTrainingArguments(
                output_dir=str(tmp_path / str(stop)),
                max_steps=8,
                save_steps=4,
                per_device_train_batch_size=8,
                learning_rate=1e-3,
                report_to="none",
                use_cpu=True,
                disable_tqdm=True,
            )
            trainer = AlignmentTrainer(model=model, args=args, train_dataset=Dataset.from_list(bitext), loss=loss)
            trainer.train(resume_from_checkpoint=resume)

        if stop is None:
            train(8, None)
        else:
            train(8, str(tmp_path / "None" / "checkpoint-4"))
        ends.append(model.state_dict())
    for key, value in ends[0].items():
        assert torch.equal(value, ends[1][key]), key
