"""The directions of language identity are found, and projected out by one linear map inside the model."""

import copy
from dataclasses import asdict

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize

from metaphrase.encoders.debiasing import language_directions, without_directions
from metaphrase.encoders.loading import load_encoder
from metaphrase.evaluation.guards import Guard
from metaphrase.exceptions import NonFiniteError, UsageError
from metaphrase.merging.projection import find_projection
from metaphrase.postprocessing.debiasing import DirectionsCurve, choose_directions, debias

TEXTS = {
    "de": ["der Hund schläft", "die Frau liest", "guten Morgen"],
    "en": ["the dog sleeps", "the woman reads", "good morning"],
    "sw": ["mbwa analala", "mwanamke anasoma", "habari za asubuhi"],
}


def samples(languages=5, hidden=12):
    """Embeddings of languages that differ by an offset, and in the number of texts."""
    generator = torch.Generator().manual_seed(0)
    content = torch.randn(20, hidden, generator=generator)
    offsets = torch.randn(languages, hidden, generator=generator)
    return {f"l{i}": content[: 20 - i % 5] + offset for i, offset in enumerate(offsets)}


def unit_means(embeddings):
    return torch.stack([(one / one.norm(dim=1, keepdim=True)).double().mean(0) for one in embeddings.values()])


def map_of(model):
    return next(module for module in model if isinstance(module, Dense)).linear.weight.detach()


@pytest.mark.parametrize("count", [1, 2, 4])
def test_they_are_the_eigenvectors_of_the_covariance_of_the_means(count):
    embeddings = samples()
    means = unit_means(embeddings).numpy()
    covariance = np.zeros((12, 12))
    for mean in means:
        away = mean - means.sum(0) / len(means)
        covariance += np.outer(away, away)
    values, vectors = np.linalg.eigh(covariance)
    directions, share = language_directions(embeddings, count)
    for found, wanted in zip(directions.numpy(), vectors.T[::-1], strict=False):
        assert abs(found @ wanted) == pytest.approx(1, abs=1e-6)
    assert share == pytest.approx(values[::-1][:count].sum() / values.sum(), rel=1e-6)


def test_the_means_of_all_languages_coincide_without_all_directions(tiny_encoder):
    embeddings = samples(hidden=tiny_encoder.get_embedding_dimension())
    directions, share = language_directions(embeddings, 4)
    assert share == pytest.approx(1)
    means = unit_means(embeddings).float()
    projected = means @ map_of(without_directions(tiny_encoder, directions)).T
    assert (means - means[0]).abs().max() > 0.1
    torch.testing.assert_close(projected, projected[0].expand_as(projected), rtol=0, atol=1e-6)


def test_the_map_is_a_projection(tiny_encoder):
    directions, _ = language_directions(samples(hidden=32), 3)
    weight = map_of(without_directions(tiny_encoder, directions)).double()
    torch.testing.assert_close(weight, weight.T)
    torch.testing.assert_close(weight @ weight, weight, rtol=0, atol=1e-6)
    assert weight.trace() == pytest.approx(32 - 3, abs=1e-4)
    assert (directions @ weight).abs().max() < 1e-6


@pytest.mark.parametrize(("languages", "count", "most"), [(5, 5, 4), (3, 10, 2), (40, 12, 11), (1, 1, 0)])
def test_more_directions_than_languages_differ_in_are_refused(languages, count, most):
    with pytest.raises(UsageError, match=f"of {languages} languages differ in {most} directions, but .* is {count}"):
        language_directions(samples(languages), count)


def test_no_direction_is_refused():
    with pytest.raises(UsageError, match="'count' of language_directions must be"):
        language_directions(samples(), 0)


def test_embeddings_that_are_not_finite_are_refused():
    embeddings = samples()
    embeddings["l1"][3, 4] = torch.nan
    with pytest.raises(NonFiniteError, match="NaN or infinite"):
        language_directions(embeddings, 2)


def test_a_stock_model_holds_the_map_and_the_original_stays(tiny_encoder, tmp_path):
    tiny_encoder.append(Normalize())
    before = tiny_encoder.encode(TEXTS["de"])
    model, share = debias(tiny_encoder, TEXTS, 2)
    assert share == pytest.approx(1)
    assert [type(module) for module in model][-2:] == [Dense, Normalize]
    assert (
        model[0].auto_model.get_input_embeddings().weight is tiny_encoder[0].auto_model.get_input_embeddings().weight
    )
    np.testing.assert_array_equal(tiny_encoder.encode(TEXTS["de"]), before)
    wanted = before @ map_of(model).T.numpy()
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    np.testing.assert_allclose(model.encode(TEXTS["de"]), wanted, atol=1e-5)
    gaps = [
        np.ptp([one.encode(texts).mean(axis=0) for texts in TEXTS.values()], axis=0).max()
        for one in (tiny_encoder, model)
    ]
    assert gaps[1] < 0.05 * gaps[0]
    model.save_pretrained(str(tmp_path / "debiased"))
    for loaded in (
        SentenceTransformer(str(tmp_path / "debiased"), device="cpu"),
        load_encoder(tmp_path / "debiased", device="cpu"),
    ):
        np.testing.assert_allclose(loaded.encode(TEXTS["sw"]), model.encode(TEXTS["sw"]), atol=1e-6)
        _, direction_kh = find_projection(loaded)
        kept_hh = torch.eye(32).double() - direction_kh.T @ direction_kh
        torch.testing.assert_close(kept_hh.float(), map_of(model), rtol=0, atol=1e-6)
    assert find_projection(tiny_encoder) is None


def test_truncated_embeddings_are_those_of_the_whole_ones(tiny_encoder):
    tiny_encoder.truncate_dim = 8
    model, _ = debias(tiny_encoder, TEXTS, 2)
    short = model.encode(TEXTS["de"])
    with model.truncate_embeddings(None):
        np.testing.assert_array_equal(short, model.encode(TEXTS["de"])[:, :8])
    assert (tiny_encoder.truncate_dim, short.shape) == (8, (3, 8))


def test_another_last_layer_is_no_projection(tiny_encoder):
    tiny_encoder.append(Dense(32, 32, bias=False, activation_function=None))
    assert find_projection(tiny_encoder) is None
    tiny_encoder[-1] = Dense(32, 8, bias=False, activation_function=None)
    assert find_projection(tiny_encoder) is None


def test_languages_that_only_differ_by_an_offset_become_equal(tiny_encoder):
    """The offset of each language is removed, what its sentences differ in is not."""
    embeddings = samples(3, 32)
    content = embeddings["l0"] - embeddings["l0"].mean(0)
    shifted = {name: content + 20 * torch.eye(32)[i] for i, name in enumerate(embeddings)}
    directions, _ = language_directions(shifted, 2)
    weight = map_of(without_directions(copy.deepcopy(tiny_encoder), directions))
    apart = (shifted["l0"] - shifted["l1"]).norm()
    assert ((shifted["l0"] - shifted["l1"]) @ weight).norm() < 0.05 * apart
    assert (content @ weight).norm() > 0.8 * content.norm()


def measurement(name, differences, holds=lambda number: True):
    """A guard that knows its rows by the number of directions that a model projects out."""

    def measure(model):
        projection = find_projection(model)
        number = 0 if projection is None else len(projection[1])
        scores = {"before": 50.0, "after": 50.0, "difference": differences.get(number, 0.0), "interval": [0.0, 1.0]}
        return scores | {"verdict": "tie" if holds(number) else "worse", "holds": holds(number)}

    return Guard(name, measure)


@pytest.mark.parametrize(
    ("gains", "most", "wanted"),
    [
        ({10: 1.0, 20: 3.0, 30: 2.0}, 40, 20),
        ({10: 1.0, 20: 3.0, 30: 2.0}, 10, 10),  # the guard does not hold at 20
        ({10: 1.0, 20: 3.0}, 5, 0),  # nor at 10
        ({10: -1.0, 20: -3.0}, 40, 0),
    ],
)
def test_the_number_with_the_largest_gain_under_the_guards_is_chosen(tiny_encoder, gains, most, wanted):
    embeddings = samples(40, 32)
    gain, guard = measurement("pairs", gains), measurement("stsb", {}, lambda number: number <= most)
    curve = choose_directions(tiny_encoder, embeddings, gain, [guard])
    assert [point["directions"] for point in curve.points] == [0, 10, 20, 30]  # the embeddings have 32 components
    assert curve.directions == wanted
    expected = (
        f"{wanted} directions were chosen. Gain and cost: 0 directions: pairs"
        if wanted
        else "Nothing can be gained without a loss. "
    )
    assert str(curve).startswith(expected)
    assert DirectionsCurve(**asdict(curve)) == curve
    assert find_projection(tiny_encoder) is None


def test_few_languages_have_few_directions(tiny_encoder):
    curve = choose_directions(tiny_encoder, samples(4, 32), measurement("pairs", {2: 1.0}), [])
    assert [point["directions"] for point in curve.points] == [0, 1, 2, 3]
    assert curve.directions == 2
    curve = choose_directions(tiny_encoder, samples(11, 32), measurement("pairs", {10: 1.0}), [])
    assert [point["directions"] for point in curve.points] == [0, 10]  # eleven means differ in ten directions
    with pytest.raises(UsageError, match="One language has no direction"):
        choose_directions(tiny_encoder, samples(1, 32), measurement("pairs", {}), [])
