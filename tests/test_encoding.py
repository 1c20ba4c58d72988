import pytest
import torch

from metaphrase.collator import ParallelCollator
from metaphrase.encoding import encode_views
from metaphrase.packing import packed
from metaphrase.views import Concatenated, source_view, target_view


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
    """With reset positions and a first sentence of one piece more, the second is the same to the embedding layer."""
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
