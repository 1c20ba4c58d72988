import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import DistilBertConfig, DistilBertModel, ElectraConfig, ElectraModel

from metaphrase.corpus.parallel import ParallelSet
from metaphrase.evaluation.retrieval import RetrievalEvaluator, evaluate_retrieval, find_translations
from metaphrase.exceptions import UsageError
from metaphrase.modeling.collator import ParallelCollator
from metaphrase.modeling.encoding import encode_views
from metaphrase.modeling.languages import (
    LanguageEmbedding,
    fold_language,
    fold_languages,
    language_id,
    token_type_table,
)
from metaphrase.modeling.packing import packed
from metaphrase.modeling.views import source_view, target_view
from metaphrase.publishing.release import release, release_languages, verify
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import Recipe
from tests.conftest import as_sentence_transformer, shape

RECIPE = {"name": "tr", "language_embedding": True, "terms": [{"objective": "tr"}]}


def measured(*args, **options):
    """The JSON form of a result."""
    return evaluate_retrieval(*args, **options).to_dict()


@pytest.fixture
def embedding():
    torch.manual_seed(3)
    return LanguageEmbedding(["en", "de"], 32)


@pytest.fixture(params=["tiny_encoder", "tiny_xlmr"])
def encoder(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def sets(bitext):
    pairs = [(row["source"], row["target"]) for row in bitext]
    return {"de": ParallelSet("de", *map(tuple, zip(*pairs, strict=True)))}


def test_codes_of_languages_with_scripts_differ():
    assert torch.tensor([language_id("zho_Hans")]) != torch.tensor([language_id("zho_Hant")])
    with pytest.raises(UsageError, match=r"'zh-Hant-TW' is too long\. .* such as zh-Hant\."):
        language_id("zh-Hant-TW")


class TestEmbedding:
    def test_each_language_has_its_vector(self, embedding):
        codes = torch.tensor([language_id(language) for language in ("de", "en", "de")])
        vectors = embedding(codes)
        assert vectors.shape == (3, 32)
        assert torch.equal(vectors[0], embedding.of("de"))
        assert torch.equal(vectors[1], embedding.of("en"))
        assert not torch.equal(vectors[0], vectors[1])

    def test_an_unknown_language_is_refused(self, embedding):
        with pytest.raises(ValueError, match=r"covers de, en, but not 'sw'"):
            embedding.of("sw")

    def test_codes_are_distinct(self):
        languages = ["de", "en", "eng", "zh", "zh-Hans", "yue", ""]
        assert len({language_id(language) for language in languages}) == len(languages)


class TestFold:
    @pytest.mark.parametrize("packing", [False, True])
    def test_matches_training(self, encoder, tokenizer, bitext, embedding, packing):
        encoder.eval()
        views = ParallelCollator(tokenizer, (source_view(32), target_view(32)))(bitext)
        with torch.no_grad(), packed(encoder, enabled=packing):
            trained = encode_views(encoder, views, embedding)
            plain = encode_views(encoder, views)
        for side, language in (("source", "de"), ("target", "en")):
            folded = fold_language(encoder, embedding, language)
            texts = [row[side] for row in bitext]
            with packed(folded, enabled=packing):
                got = folded.encode(texts, convert_to_tensor=True)
            torch.testing.assert_close(got, trained[side].sentence_bh, rtol=0, atol=1e-6)
            assert (got - plain[side].sentence_bh).abs().max() > 1e-2

    def test_leaves_the_model_alone_and_shares_its_weights(self, encoder, embedding):
        before = {name: value.clone() for name, value in encoder.state_dict().items()}
        folded = fold_language(encoder, embedding, "de")
        assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
        theirs = dict(encoder.named_parameters())
        changed = [name for name, value in folded.named_parameters() if value is not theirs[name]]
        assert [name.rpartition("embeddings.")[2] for name in changed] == ["weight"]
        assert "token_type_embeddings" in changed[0]
        torch.testing.assert_close(
            folded.get_parameter(changed[0])[0], theirs[changed[0]][0] + embedding.of("de"), rtol=0, atol=0
        )
        assert torch.equal(folded.get_parameter(changed[0])[1:], theirs[changed[0]][1:])

    def test_every_language(self, tiny_encoder, embedding):
        models = fold_languages(tiny_encoder, embedding)
        assert list(models) == ["de", "en"]
        assert not np.allclose(models["de"].encode("Hund"), models["en"].encode("Hund"), atol=1e-3)

    def test_an_unknown_language_is_refused(self, tiny_encoder, embedding):
        with pytest.raises(ValueError, match="but not 'sw'"):
            fold_language(tiny_encoder, embedding, "sw")


class TestCheck:
    def test_encoders_with_token_types_pass(self, encoder):
        assert token_type_table(encoder[0].auto_model).weight.shape[1] == 32

    @pytest.mark.parametrize("kind", ["distilbert", "electra"])
    def test_other_encoders_are_refused_when_training_starts(self, tmp_path, tokenizer, kind):
        if kind == "distilbert":  # no token types at all
            made = DistilBertModel(
                DistilBertConfig(vocab_size=len(tokenizer), dim=32, n_layers=1, n_heads=2, hidden_dim=64)
            )
        else:  # embeddings narrower than states
            made = ElectraModel(ElectraConfig(**shape(tokenizer, embedding_size=16)))
        made.save_pretrained(tmp_path / kind)
        tokenizer.save_pretrained(tmp_path / kind)
        from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

        model = SentenceTransformer(modules=[Transformer(str(tmp_path / kind)), Pooling(32, "cls")], device="cpu")
        with pytest.raises(ValueError, match=r"token type embeddings, but .*Model has none of its hidden size"):
            AlignmentLoss(model, Recipe.from_dict(RECIPE), languages=["de", "en"])
        AlignmentLoss(model, Recipe.from_dict({**RECIPE, "language_embedding": False}))

    def test_the_languages_must_be_known(self, tiny_encoder):
        with pytest.raises(ValueError, match="Pass `languages`"):
            AlignmentLoss(tiny_encoder, Recipe.from_dict(RECIPE))


class TestTraining:
    def test_vectors_learn(self, tiny_encoder, tokenizer, bitext):
        loss = AlignmentLoss(tiny_encoder, Recipe.load("wacse-language"), max_length=24, languages=["de", "en"])
        sum(loss(ParallelCollator(tokenizer, loss.views)(bitext)).values()).backward()
        grad = loss.heads.language_embedding.table.weight.grad
        assert (grad.abs().max(dim=1).values > 0).all()


class TestRelease:
    @pytest.mark.parametrize("pooling", ["cls", "mean"])
    def test_one_stock_folder_per_language(self, tiny_bert_dir, embedding, bitext, tmp_path, pooling, tokenizer):
        model = as_sentence_transformer(tiny_bert_dir, pooling).eval()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        folders = release_languages(model, tmp_path / "out", embedding, recipe=RECIPE)
        assert folders == {language: tmp_path / "out" / language for language in ("de", "en")}
        views = ParallelCollator(tokenizer, (source_view(32), target_view(32)))(bitext)
        with torch.no_grad():
            trained = encode_views(model, views, embedding)
        for side, language in (("source", "de"), ("target", "en")):
            stock = SentenceTransformer(str(folders[language]), device="cpu")
            got = stock.encode([row[side] for row in bitext], convert_to_tensor=True)
            torch.testing.assert_close(got, trained[side].sentence_bh, rtol=0, atol=1e-6)
            assert verify(folders[language], device="cpu") <= 1e-6
            card = (folders[language] / "README.md").read_text()
            assert f"texts in one language, {language}," in card
            assert f"language:\n- {language}\n" in card
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert "texts in one language" not in str(model.model_card_data.limitations)

    def test_chosen_languages(self, tiny_encoder, embedding, tmp_path):
        assert list(release_languages(tiny_encoder, tmp_path / "out", embedding, ["en"], recipe=None)) == ["en"]
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["en"]

    def test_needs_a_language(self, tiny_encoder, embedding, tmp_path):
        with pytest.raises(ValueError, match=r"one language at a time.*`release_languages`"):
            release(tiny_encoder, tmp_path / "out", recipe=None, language_embedding=embedding)
        with pytest.raises(ValueError, match="pass both"):
            release(tiny_encoder, tmp_path / "out", recipe=None, language="de")
        with pytest.raises(ValueError, match="but not 'sw'"):
            release(tiny_encoder, tmp_path / "out", recipe=None, language="sw", language_embedding=embedding)
        for facts in (Recipe.load("wacse-language").to_dict(), {"language_embedding": True}):
            with pytest.raises(ValueError, match=r"one language at a time.*`release_languages`"):
                release(tiny_encoder, tmp_path / "out", recipe=facts)
        assert list(tmp_path.iterdir()) == []

    def test_a_text_without_a_language_is_reported(self, embedding):
        with pytest.raises(ValueError, match=r"some rows have none.*'source_lang'"):
            embedding(torch.tensor([language_id("de"), 0]))


class TestEvaluation:
    def test_each_side_is_embedded_with_its_languages_model(self, tiny_encoder, embedding, sets):
        models = fold_languages(tiny_encoder, embedding)
        seen = {language: [] for language in models}

        def listen(language, model):
            encode = model.encode
            model.encode = lambda texts, **settings: seen[language].extend(texts) or encode(texts, **settings)

        for language, model in models.items():
            listen(language, model)
        find_translations(models, sets)
        assert seen == {"de": list(dict.fromkeys(sets["de"].sources)), "en": list(dict.fromkeys(sets["de"].targets))}

    def test_equal_vectors_change_nothing_but_the_names(self, tiny_encoder, embedding, sets):
        with torch.no_grad():
            embedding.table.weight.zero_()
        one = measured(tiny_encoder, sets, resamples=10)
        many = measured(fold_languages(tiny_encoder, embedding), sets, resamples=10)
        unlike = {"seconds"}
        assert {k: v for k, v in one.items() if k not in unlike} == {k: v for k, v in many.items() if k not in unlike}

    def test_a_language_without_a_model_is_named(self, tiny_encoder, embedding, sets):
        with pytest.raises(ValueError, match="no model for sw, only for de, en"):
            find_translations(fold_languages(tiny_encoder, embedding), {"sw": ParallelSet("sw", ("a",), ("b",))})

    def test_in_the_training_loop(self, tiny_encoder, embedding, sets, tmp_path):
        plain = RetrievalEvaluator(sets, name="dev", write_csv=False)(tiny_encoder)
        with torch.no_grad():
            embedding.table.weight.mul_(20)  # large enough to separate the sides
        told = RetrievalEvaluator(sets, name="dev", write_csv=False, language_embedding=embedding)
        with packed(tiny_encoder):
            inside = told(tiny_encoder)
        assert inside == told(tiny_encoder)
        assert inside["dev_mean_accuracy"] != plain["dev_mean_accuracy"]
        hits = find_translations(fold_languages(tiny_encoder, embedding), sets)[0]["de"]
        assert inside["dev_mean_accuracy"] == pytest.approx(np.mean(hits))
