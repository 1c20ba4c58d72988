import re
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import LSTM, Dense, Pooling, Router, StaticEmbedding
from transformers import BatchEncoding
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

from metaphrase.exceptions import ModelError, UsageError
from metaphrase.merging.projection import project_out
from metaphrase.modeling.collator import ParallelCollator
from metaphrase.modeling.packing import packed
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import Recipe, list_recipes
from tests.conftest import mostly_slow, small
from tests.packed_ranks import Rows, every_objective, padded_heads


def recipe(*terms):
    return Recipe.from_dict({"name": "some", "terms": list(terms)})


#: What is trained, and how often the encoder is called in a step: source and target share a call.
CALLS = {
    "tr rtl": 1,
    "tr rtl wtr": 1,
    "tr rtl wtr tlm": 2,
    "wacse": 1,
    "wacse-8": 1,
    "amber": 3,
    "ppa": 2,
    "mexma": 1,
    "mgc-hard": 2,
    "mgc-soft": 2,
    "metaphrase": 1,
}


@pytest.mark.parametrize("packing", mostly_slow([False, True], [True]))
@pytest.mark.parametrize(("trained", "calls"), CALLS.items())
def test_views_are_encoded_once(tiny_encoder, tokenizer, full_bitext, trained, calls, packing):
    known = {recipe.name for recipe in list_recipes()}
    chosen = Recipe.load(trained) if trained in known else recipe(*({"objective": n} for n in trained.split()))
    loss = AlignmentLoss(tiny_encoder, small(chosen), max_length=24)
    counts = Counter()
    tiny_encoder[0].auto_model.encoder.register_forward_hook(lambda *args: counts.update(["encoder"]))
    if "moco" in loss.heads.heads:
        momentum = loss.heads.heads["moco"].momentum_encoder
        momentum.register_forward_hook(lambda *args: counts.update(["momentum"]))
    with packed(tiny_encoder, enabled=packing):
        loss(ParallelCollator(tokenizer, loss.views)(full_bitext[:5]))
    assert counts == Counter(encoder=calls, momentum=1 if trained == "ppa" else 0)


def test_an_encoder_with_a_decoder_has_neither_micro_batches_nor_language_embeddings(tiny_encoder):
    loss = AlignmentLoss(tiny_encoder, Recipe.load("tr"), max_length=24)
    tiny_encoder[0].auto_model.config.is_encoder_decoder = True
    loss.micro_batch_size = 2  # the encoder alone, as of T5
    tiny_encoder[0].auto_model.decoder = torch.nn.Identity()
    loss.micro_batch_size = None
    with pytest.raises(
        ModelError, match=r"decoder, such as bert, cannot encode a batch in parts\. Omit micro_batch_size"
    ):
        loss.micro_batch_size = 2
    embedded = Recipe.from_dict({"name": "one", "language_embedding": True, "terms": [{"objective": "tr"}]})
    with pytest.raises(ModelError, match=r"^Language embeddings do not support encoders with a decoder, such as bert"):
        AlignmentLoss(tiny_encoder, embedded, languages=("de", "en"))


@pytest.mark.parametrize("chosen", every_objective(), ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("encoder", mostly_slow(["tiny_encoder", "tiny_xlmr"], ["tiny_xlmr"]))
def test_packed_and_padded_are_equal(request, tokenizer, full_bitext, chosen, encoder):
    model = request.getfixturevalue(encoder).double()
    settings = {"english_ids": torch.arange(len(tokenizer)), "languages": ["de", "en"]}
    loss = AlignmentLoss(model, small(chosen), max_length=24, **settings).double().eval()
    if any(one.original for one in loss.objectives.values()):  # an encoder that has not moved has no gradient of these
        model[0].auto_model.encoder.layer[0].output.dense.weight.data.mul_(2)
    results = []
    for enabled in (False, True):
        batch = ParallelCollator(tokenizer, loss.views)(full_bitext[:9])
        loss.zero_grad()
        rows = Rows(loss)
        with packed(model, enabled=enabled) as active, nullcontext() if enabled else padded_heads():
            assert active == enabled
            values = loss(batch)
            sum(values.values()).backward()
        rows.check(packing=enabled)
        grads = {key: p.grad.clone() for key, p in loss.named_parameters() if p.grad is not None}
        results.append((values, grads))
    (padded, padded_grads), (flat, flat_grads) = results
    assert padded.keys() == flat.keys()
    assert padded_grads.keys() == flat_grads.keys()
    assert max(grad.abs().max() for grad in padded_grads.values()) > 1e-4
    for key in padded:
        torch.testing.assert_close(flat[key], padded[key], rtol=1e-10, atol=1e-10)
    for key in padded_grads:
        torch.testing.assert_close(flat_grads[key], padded_grads[key], rtol=1e-10, atol=1e-10, msg=key)


def test_weights_scale_terms(tiny_encoder, tokenizer, bitext):
    tiny_encoder.eval()
    batch, values = None, []
    for weight in (1.0, 0.25):
        loss = AlignmentLoss(tiny_encoder, recipe({"objective": "tr", "weight": weight}), max_length=24).eval()
        batch = batch or ParallelCollator(tokenizer, loss.views)(bitext[:5])
        values.append(loss(batch)["tr"])
    torch.testing.assert_close(values[1], values[0] * 0.25)


def test_only_scored_positions_are_projected(tiny_encoder, tokenizer, bitext):
    loss = AlignmentLoss(tiny_encoder, recipe({"objective": "rtl"}, {"objective": "tlm"}), max_length=24)
    rows = []
    for head in (loss.heads.heads["rtl"].vocabulary, loss.heads.heads["tlm"]):
        head.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    batch = ParallelCollator(tokenizer, loss.views)(bitext)
    loss(batch)
    targets = int((batch["target"]["attention_mask"].sum(1) - 1).sum())
    masked = int((batch["concatenated-0.2-reset"]["labels"] != -100).sum())
    assert rows == [targets, masked]


def test_views_of_one_name_must_be_equal(tiny_encoder, monkeypatch):
    from metaphrase.modeling.views import source_view
    from metaphrase.objectives import OBJECTIVES
    from metaphrase.objectives.translation_ranking import TranslationRanking

    class Longer(TranslationRanking):
        name = "longer"

        def views(self):
            return (source_view(self.max_length + 1),)

    monkeypatch.setitem(OBJECTIVES, "longer", Longer)
    with pytest.raises(ValueError, match="different views named 'source'"):
        AlignmentLoss(tiny_encoder, recipe({"objective": "tr"}, {"objective": "longer"}))


def test_sentences_longer_than_the_positions_are_refused(tiny_encoder):
    with pytest.raises(ValueError, match="'some' builds sequences of up to 81 positions, but the encoder has 80"):
        AlignmentLoss(tiny_encoder, recipe({"objective": "tr"}), max_length=81)


def test_a_tokenizer_without_a_mask_token_is_refused(tiny_encoder):
    tiny_encoder.tokenizer.mask_token = None
    with pytest.raises(ValueError, match=r"has no mask token, required by tlm, rtl\. Use a recipe such as 'tr'"):
        AlignmentLoss(tiny_encoder, recipe(*({"objective": name} for name in ("tlm", "tr", "rtl"))))


def test_a_tokenizer_without_special_tokens_around_a_text_is_refused(tiny_encoder):
    tiny_encoder.tokenizer.backend_tokenizer.post_processor = None
    with pytest.raises(
        ModelError, match="does not put a special token before and after every text, as required by rtl"
    ):
        AlignmentLoss(tiny_encoder, recipe({"objective": "tr"}, {"objective": "rtl"}))
    AlignmentLoss(tiny_encoder, recipe({"objective": "tr"}))


def test_a_tokenizer_without_padding_is_refused(tiny_encoder):
    tiny_encoder.tokenizer.pad_token = None
    with pytest.raises(ModelError, match="has no pad token"):
        AlignmentLoss(tiny_encoder, recipe({"objective": "tr"}))


def test_heads_need_the_encoders_own_states_of_tokens(tiny_encoder):
    dense = Dense(32, 16, module_input_name="token_embeddings", module_output_name="token_embeddings")
    model = SentenceTransformer(modules=[tiny_encoder[0], dense, Pooling(16)], device="cpu")
    AlignmentLoss(model, Recipe.load("tr"))
    with pytest.raises(ModelError, match=r"^rtl read the encoder's states of tokens, but a module of .* changes them"):
        AlignmentLoss(model, Recipe.load("dap"))


def test_embeddings_that_only_encode_truncates_train_in_full(tiny_encoder):
    tiny_encoder.truncate_dim = 16
    AlignmentLoss(tiny_encoder, recipe({"objective": "tr", "args": {"projection": "mlp"}}, {"objective": "anchor"}))
    AlignmentLoss(tiny_encoder, recipe({"objective": "tr", "matryoshka": [32, 16]}))
    assert tiny_encoder.get_embedding_dimension() == 16


def test_a_tokenizer_with_more_pieces_than_embeddings_is_refused(tiny_encoder, fault):
    rows = len(tiny_encoder.tokenizer)
    tiny_encoder.tokenizer.add_tokens(["zwei", "drei"])
    with pytest.raises(
        ModelError,
        match=rf"has {rows + 2} pieces, but the encoder has embeddings for {rows} .*_embeddings\({rows + 2}\)",
    ):
        AlignmentLoss(tiny_encoder, Recipe.load("dap"), max_length=24)
    tiny_encoder[0].auto_model.resize_token_embeddings(rows + 2)
    AlignmentLoss(tiny_encoder, Recipe.load("dap"), max_length=24)
    fault("D5", "a tokenizer with more pieces than embeddings", tried=1, survived=1)


@pytest.mark.parametrize("name", ["wacse", "mgc-hard"])
def test_a_slow_tokenizer_is_refused_where_words_are_asked_for(tiny_encoder, tokenizer, tmp_path, fault, name):
    pieces = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    tiny_encoder[0].processor = BertTokenizerLegacy(str(tmp_path / "vocab.txt"))
    with pytest.raises(
        ModelError, match=r"needs the pieces of each word.* a BertTokenizerLegacy, is a slow tokenizer"
    ):
        AlignmentLoss(tiny_encoder, Recipe.load(name), max_length=24, english_ids=torch.arange(9))
    AlignmentLoss(tiny_encoder, Recipe.load("dap"), max_length=24)
    fault("D5", f"a slow tokenizer ({name})", tried=1, survived=1)


def test_objectives_that_read_words_say_so(tiny_encoder, tokenizer, full_bitext, monkeypatch):
    """Those whose views look for the pieces of words, and no others."""
    asked, encodings = [], BatchEncoding.encodings
    monkeypatch.setattr(BatchEncoding, "encodings", property(lambda self: asked.append(1) or encodings.fget(self)))
    told = set()
    for chosen in (one for one in every_objective() if one.name != "distill"):  # reads the pieces of its teacher
        for name, objective in chosen.objectives(24).items():
            asked.clear()
            ParallelCollator(tokenizer, objective.views())(full_bitext[:3])
            assert bool(asked) == objective.reads_words, name
            told.add(objective.reads_words)
    assert told == {True, False}


def test_card_facts(tiny_encoder):
    loss = AlignmentLoss(tiny_encoder, Recipe.load("dap"), max_length=24)
    assert loss.get_config_dict()["terms"][1]["objective"] == "rtl"
    assert len(re.findall("@inproceedings", loss.citation)) == 1


def test_other_models_and_recipes_are_refused(tiny_encoder, tokenizer):
    static = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=8)], device="cpu")
    for model, found in ((static, "StaticEmbedding"), (tiny_encoder[0].auto_model, "BertModel"), ("starter", "str")):
        with pytest.raises(UsageError, match=f"first module is a Transformer, but got a {found}"):
            AlignmentLoss(model, Recipe.load("tr"))
    with pytest.raises(UsageError, match=r"requires a Recipe, but got a str. Load one with Recipe.load"):
        AlignmentLoss(tiny_encoder, "dap")


def test_models_that_could_not_be_loaded_again_are_refused(tiny_encoder):
    class OwnPooling(Pooling):
        pass

    transformer, router = tiny_encoder[0], Router.for_query_document([Dense(32, 8)], [Dense(32, 8)])
    for kind, modules in {
        "Router": [Pooling(32), router],
        "LSTM": [LSTM(32, 8), Pooling(16)],
        "OwnPooling": [OwnPooling(32)],
    }.items():
        model = SentenceTransformer(modules=[transformer, *modules], device="cpu")
        with pytest.raises(
            ModelError, match=f"consists of Transformer, Pooling, .* but this one has the module {kind}, so"
        ):
            AlignmentLoss(model, Recipe.load("tr"))
    with pytest.raises(ModelError, match="The model has no Pooling, which computes the embeddings of sentences"):
        AlignmentLoss(SentenceTransformer(modules=[transformer], device="cpu"), Recipe.load("tr"))


def test_a_projection_of_directions_is_not_trained(tiny_encoder):
    tiny_encoder.append(Dense(32, 32, bias=False))
    project_out(tiny_encoder, torch.linalg.qr(torch.randn(32, 3))[0].T)
    loss = AlignmentLoss(tiny_encoder, recipe({"objective": "tr"}))
    _, _, dense, projection = loss.model
    assert dense.linear.weight.requires_grad
    assert not projection.linear.weight.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_encoder_in_half_precision_is_trained_in_float32(tiny_encoder, dtype):
    loss = AlignmentLoss(tiny_encoder.to(dtype), small(Recipe.load("dap")), max_length=24)
    assert {weight.dtype for weight in loss.parameters()} == {torch.float32}
