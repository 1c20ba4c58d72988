import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss, MultipleNegativesRankingLoss

from metaphrase.evaluation.encoding import encode_texts
from metaphrase.exceptions import RecipeError
from metaphrase.modeling.collator import ParallelCollator
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import Recipe
from tests.oracles import translation_ranking_loop

SIZES = [32, 20, 8]


def loss_of(model, *terms):
    return AlignmentLoss(model, Recipe.from_dict({"name": "one", "terms": list(terms)}), max_length=32).eval()


def gradients(value, model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad(value, parameters, allow_unused=True)


def assert_same(ours, theirs, model, **tolerance):
    torch.testing.assert_close(ours, theirs, **tolerance)
    for got, wanted in zip(gradients(ours, model), gradients(theirs, model), strict=True):
        torch.testing.assert_close(got, wanted, **tolerance)


def test_it_matches_the_loop_over_sizes(tiny_encoder, bitext):
    """Equation 1 of Kusupati et al. 2022: the sum over sizes of the loss of the first components; a weight scales it."""
    model, rows = tiny_encoder.double(), bitext[:5]
    loss = loss_of(
        model,
        {"objective": "tr", "args": {"temperature": 0.2, "similarity": "dot"}, "matryoshka": SIZES, "weight": 0.5},
    )
    batch = ParallelCollator(model.tokenizer, loss.views)(rows)
    sides = [
        [model(dict(model.preprocess([row[side]])))["sentence_embedding"][0] for row in rows]
        for side in ("source", "target")
    ]
    slow = 0
    for size in SIZES:
        cut = [[embedding[:size] / embedding[:size].norm() for embedding in side] for side in sides]
        slow = slow + 0.5 * translation_ranking_loop(*map(torch.stack, cut), temperature=0.2)
    assert_same(loss(batch)["tr"], slow, model, rtol=1e-8, atol=1e-12)


def test_it_equals_the_loss_of_sentence_transformers(tiny_encoder, bitext):
    model, rows = tiny_encoder.double(), bitext[:6]
    loss = loss_of(model, {"objective": "tr", "args": {"temperature": 0.05}, "matryoshka": SIZES})
    theirs = MatryoshkaLoss(model, MultipleNegativesRankingLoss(model, scale=20.0), SIZES)
    features = [model.preprocess([row[side] for row in rows]) for side in ("source", "target")]
    ours = loss(ParallelCollator(model.tokenizer, loss.views)(rows))["tr"]
    assert_same(ours, theirs(features, None), model, rtol=1e-6, atol=1e-9)
    assert "Matryoshka Representation Learning" in loss.citation


def test_terms_with_the_original_encoder_read_its_first_components(tiny_encoder, bitext):
    terms = [
        {"objective": "anchor", "args": {"sides": "both"}, "matryoshka": SIZES},
        {"objective": "similarity-preservation", "matryoshka": [32, 8]},
        {"objective": "tr", "args": {"guided": True}},
    ]
    loss = loss_of(tiny_encoder.double(), *terms)
    values = loss(ParallelCollator(tiny_encoder.tokenizer, loss.views)(bitext[:4]))
    assert [values[name].item() for name in ("anchor", "similarity-preservation")] == pytest.approx([0, 0], abs=1e-14)
    assert loss.recipe.to_dict()["terms"][0]["matryoshka"] == SIZES
    assert "matryoshka" not in loss.recipe.to_dict()["terms"][2]


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (
            {"objective": "tr", "matryoshka": [32, 33]},
            "has the size 33, but .* have 32 components. List sizes up to 32",
        ),
        ({"objective": "tr", "args": {"projection": "mlp"}, "matryoshka": [8]}, "'matryoshka' of 'tr' truncates"),
        (
            {"objective": "anchor", "args": {"level": "tokens"}, "matryoshka": [8]},
            "'matryoshka' of 'anchor' truncates",
        ),
        ({"objective": "rtl", "matryoshka": [8]}, "'matryoshka' of 'rtl' truncates"),
        ({"objective": "tr", "matryoshka": [0]}, "'matryoshka' of 'tr' .* must be a list, each a whole number from 1"),
        ({"objective": "tr", "matryoshka": 8}, "'matryoshka' of 'tr' .* must be a list"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(tiny_encoder, term, message):
    with pytest.raises(RecipeError, match=message):
        loss_of(tiny_encoder, term)


def test_truncated_models_are_evaluated(tiny_encoder, tiny_encoder_dir, bitext):
    texts = [row["target"] for row in bitext[:4]]
    small = SentenceTransformer(str(tiny_encoder_dir), truncate_dim=8, device="cpu")
    torch.testing.assert_close(encode_texts(small, texts), encode_texts(tiny_encoder, texts)[:, :8])
