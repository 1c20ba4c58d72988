import pytest
import torch

from metaphrase.modeling import encoding
from metaphrase.modeling.collator import ParallelCollator
from metaphrase.modeling.encoding import encode_views
from metaphrase.modeling.packing import packed
from metaphrase.modeling.views import Concatenated, source_view, target_view
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import Recipe


@pytest.fixture
def batch(tokenizer, bitext):
    views = (source_view(24), target_view(24), Concatenated("concatenated", 24, 0.2, "reset"))
    return ParallelCollator(tokenizer, views)(bitext[:7])


@pytest.mark.parametrize("name", ["tiny_encoder", "tiny_xlmr"])
def test_sentences_are_what_the_model_encodes(request, name, batch, bitext):
    model = request.getfixturevalue(name).double()
    encodings = encode_views(model, batch)
    for side in ("source", "target"):
        wanted = model.encode([row[side] for row in bitext[:7]], convert_to_tensor=True)
        torch.testing.assert_close(encodings[side].sentence_bh, wanted, rtol=1e-10, atol=1e-10)
        assert encodings[side].tokens_blh.shape[:2] == encodings[side].ids_bl.shape


@pytest.mark.parametrize("name", ["tiny_encoder", "tiny_xlmr"])
def test_positions_of_the_second_sentence_start_again(request, name, batch, bitext):
    """With reset positions, the embeddings of the second sentence do not depend on the length of the first."""
    model = request.getfixturevalue(name).double().eval()
    encoder, seen = model[0].auto_model, []
    encoder.embeddings.position_embeddings.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    encode_views(model, {"concatenated": batch["concatenated"]})
    start = getattr(encoder.embeddings, "padding_idx", None) or 0
    start = start + 1 if name == "tiny_xlmr" else 0
    assert torch.equal(seen[0], batch["concatenated"]["position_ids"] + start)


@pytest.mark.parametrize("packing", [False, True])
def test_source_and_target_share_one_call(tiny_encoder, batch, packing):
    calls = []
    tiny_encoder[0].auto_model.encoder.register_forward_hook(lambda *args: calls.append(1))
    with packed(tiny_encoder, enabled=packing):
        encode_views(tiny_encoder, {name: batch[name] for name in ("source", "target")})
        assert len(calls) == 1
        encode_views(tiny_encoder, batch)
        assert len(calls) == 3


def test_views_that_are_not_encoded_keep_their_features(tiny_encoder, batch):
    extra = torch.ones(7, 3)
    encodings = encode_views(tiny_encoder, {**batch, "links": {"links": extra}})
    assert encodings["links"].features["links"] is extra
    assert encodings["links"].tokens_blh is None


def joint_gradient(loss, batch, micro_batch_size, seed=3):
    loss.micro_batch_size = micro_batch_size
    loss.zero_grad()
    torch.manual_seed(seed)
    sum(loss(batch).values()).backward()
    return {name: p.grad.clone() for name, p in loss.named_parameters() if p.grad is not None}


class TestMicroBatches:
    @pytest.mark.parametrize("packing", [False, True])
    @pytest.mark.parametrize("name", ["metaphrase", "amber", "wacse-language", "tr-tlm"])
    def test_the_gradient_is_that_of_the_whole_batch(self, tiny_encoder, tokenizer, full_bitext, name, packing):
        loss = AlignmentLoss(tiny_encoder.double(), Recipe.load(name), max_length=24, languages=["de", "en"])
        loss = loss.double().eval()
        batch = ParallelCollator(tokenizer, loss.views)(full_bitext[:7])
        with packed(tiny_encoder, enabled=packing):
            whole = joint_gradient(loss, batch, None)
            parts = joint_gradient(loss, batch, 3)
        assert whole.keys() == parts.keys()
        assert max(grad.abs().max() for grad in whole.values()) > 1e-4
        for key, value in whole.items():
            torch.testing.assert_close(parts[key], value, rtol=1e-10, atol=1e-10, msg=key)

    @pytest.mark.parametrize("packing", [False, True])
    def test_dropout_is_replayed(self, tiny_encoder, tokenizer, full_bitext, packing, monkeypatch):
        loss = AlignmentLoss(tiny_encoder.double(), Recipe.load("dap"), max_length=24).double().train()
        batch = ParallelCollator(tokenizer, loss.views)(full_bitext[:7])
        with packed(tiny_encoder, enabled=packing):
            again = joint_gradient(loss, batch, 3)
            monkeypatch.setattr(encoding, "checkpoint", lambda call, part, **kwargs: call(part))
            kept = joint_gradient(loss, batch, 3)
            other = joint_gradient(loss, batch, 3, seed=4)
        for key, value in kept.items():
            torch.testing.assert_close(again[key], value, rtol=1e-12, atol=1e-12, msg=key)
        assert any((other[key] - value).abs().max() > 1e-3 for key, value in kept.items())

    def test_activations_of_one_micro_batch_are_held(self, tiny_encoder, tokenizer, full_bitext):
        loss = AlignmentLoss(tiny_encoder, Recipe.load("tr"), max_length=24).train()
        batch = ParallelCollator(tokenizer, loss.views)(full_bitext[:12])
        held = {}
        for size in (None, 2):
            saved: dict[int, int] = {}
            parameters = {p.data_ptr() for p in loss.parameters()}

            def keep(tensor, saved=saved, parameters=parameters):
                if tensor.data_ptr() not in parameters:
                    saved[tensor.data_ptr()] = tensor.numel()
                return tensor

            loss.micro_batch_size = size
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                values = loss(batch)
            held[size] = sum(saved.values())
            sum(values.values()).backward()
        assert held[2] < held[None] / 4
