import copy
import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from metaphrase.corpus.checks import read_corpus
from metaphrase.corpus.parallel import ParallelSet
from metaphrase.encoders.loading import load_encoder
from metaphrase.evaluation import diagnosis
from metaphrase.evaluation.diagnosis import closer, diagnose, measure, sample_blocks, under_aligned
from metaphrase.evaluation.geometry import geometry
from metaphrase.io.files import PACKAGED_DATA as DATA


@pytest.fixture(scope="module")
def swahili():
    return read_corpus(str(DATA / "demo"), languages=["sw"])[0]["sw"]


@pytest.fixture
def german(bitext):
    return ParallelSet("de", tuple(row["source"] for row in bitext), tuple(row["target"] for row in bitext))


@pytest.fixture
def fair(monkeypatch, swahili):
    """A model that knows the demo's and the Declaration's Swahili: translations lie near each other."""
    declaration = diagnosis.load_parallel_folder(diagnosis.UDHR, ["sw"])["sw"]
    number = {}
    for pairs in (swahili, declaration):
        for source, target in zip(pairs.sources, pairs.targets, strict=True):
            number[source] = number[target] = len(number)

    def encode(model, texts, advance=lambda n: None, **kwargs):
        advance(len(texts))
        noise_nh = np.random.default_rng(list(texts[0].encode())).normal(size=(len(texts), 48))
        rows = [np.random.default_rng(number.get(text, 10**6)).normal(size=48) for text in texts]
        embedding_nh = np.stack(rows) + 0.8 * noise_nh
        return embedding_nh / np.linalg.norm(embedding_nh, axis=1, keepdims=True)

    monkeypatch.setattr(diagnosis, "encode", encode)
    monkeypatch.setattr(diagnosis, "is_text_transformer", lambda model: False)


def codes(result, severity="error"):
    return [finding.code for finding in result.findings if finding.severity == severity]


def test_geometry_of_known_clouds():
    generator = np.random.default_rng(0)
    plane_nh = np.zeros((400, 16), dtype=np.float32)
    plane_nh[:, :2] = generator.normal(size=(400, 2))
    plane_nh /= np.linalg.norm(plane_nh, axis=1, keepdims=True)
    facts = geometry(plane_nh)
    assert facts["effective_rank"] == pytest.approx(2, abs=0.02)
    assert facts["first_ten"] == pytest.approx(1)
    cosine_nn = plane_nh.astype(float) @ plane_nh.astype(float).T
    assert facts["mean_cosine"] == pytest.approx((cosine_nn.sum() - np.trace(cosine_nn)) / (400 * 399))
    point = geometry(np.tile(plane_nh[:1], (10, 1)))
    assert point["mean_cosine"] == pytest.approx(1)
    assert point["effective_rank"] == point["first_component"] == 1


def test_closer_equals_a_loop():
    own_n, control_n = np.random.default_rng(0).integers(0, 9, size=(2, 50))
    loop = np.mean([(own > control) + 0.5 * (own == control) for own in own_n for control in control_n])
    assert closer(own_n, control_n) == pytest.approx(loop)


def test_a_sound_model_on_a_sound_corpus(fair, tiny_encoder, swahili):
    told = []
    result = diagnose(tiny_encoder, {"sw": swahili}, sample=400, advance=told.append)
    assert codes(result) == codes(result, "warning") == []
    facts = result.languages["sw"]
    assert facts["pairs"] == 400
    assert facts["interval"][0] <= facts["accuracy"] <= facts["interval"][1]
    assert facts["accuracy"] > 80
    assert facts["pairs_cosine"] > facts["random_cosine"] + 0.3
    assert sum(told) == diagnosis.sentences_to_embed({"sw": swahili}, sample=400) == 800


def test_shifted_by_one_line(fair, tiny_encoder, swahili):
    moved = replace(swahili, targets=(swahili.targets[-1], *swahili.targets[:-1]))
    result = diagnose(tiny_encoder, {"sw": moved}, sample=400)
    assert codes(result) == ["shifted-sides"]
    message = "according to the model, in a sample of 400 pairs, 39[0-6] of 396 sources match the target 1 line below"
    assert re.search(message, result.findings[0].message)


@pytest.mark.parametrize("first", [0, 30])
def test_sixty_pairs_are_enough(fair, tiny_encoder, swahili, fault, first):
    targets = (*swahili.targets[:first], "An extra line.", *swahili.targets[first:])
    moved = replace(swahili, sources=swahili.sources[:60], targets=targets[:60])
    result = diagnose(tiny_encoder, {"sw": moved})
    assert codes(result) == ["shifted-sides"]
    assert re.match(rf"The sides are shifted from pair {first + 1} to 59: .*1 line below", result.findings[0].message)
    sound = diagnose(
        tiny_encoder, {"sw": replace(swahili, sources=swahili.sources[:60], targets=swahili.targets[:60])}
    )
    fault("C2", "60 pairs whose sides are shifted, found by a model", tried=1, survived=codes(sound) == [])


def test_shuffled_sides(fair, tiny_encoder, swahili):
    targets = tuple(random.Random(0).sample(swahili.targets, len(swahili.targets)))
    result = diagnose(tiny_encoder, {"sw": replace(swahili, targets=targets)}, sample=400)
    assert codes(result) == ["not-translations"]
    assert "The sides are not translations of each other" in result.findings[0].message
    assert 0.4 < result.languages["sw"]["closer"] < 0.6


@pytest.mark.parametrize("language", ["wo", "xx"])
def test_an_unknown_language_is_a_warning(fair, tiny_encoder, swahili, language):
    targets = tuple(random.Random(0).sample(swahili.targets, len(swahili.targets)))
    pairs = replace(swahili, language=language, targets=targets)
    result = diagnose(tiny_encoder, {language: pairs}, sample=400)
    assert codes(result) == []
    assert codes(result, "warning") == ["not-translations"]


def test_a_collapsed_model(tiny_encoder, german, fault):
    norm = tiny_encoder[0].auto_model.encoder.layer[-1].output.LayerNorm
    torch.nn.init.zeros_(norm.weight)
    torch.nn.init.ones_(norm.bias)
    result = diagnose(tiny_encoder, {"de": german})
    assert codes(result) == ["collapse"]
    assert "Train again" in result.findings[0].message
    assert result.geometry["mean_cosine"] == pytest.approx(1)
    fault("B2", "collapsed encoder, detected by `diagnose`", tried=1, survived=1)


@pytest.mark.parametrize("pairs", [1, 2, 9])
def test_few_pairs_are_no_evidence_against_a_model(fair, tiny_encoder, swahili, pairs):
    result = diagnose(tiny_encoder, {"sw": swahili.rows(range(pairs))})
    (finding,) = result.findings
    assert (finding.severity, finding.code) == ("info", "not-measured")
    assert f"only {2 * pairs} different sentences, fewer than 20" in finding.message


def test_an_unchanged_model(tiny_encoder, german, monkeypatch):
    monkeypatch.setattr(diagnosis, "collapse", lambda facts: [])
    result = diagnose(tiny_encoder, {"de": german}, baseline=copy.deepcopy(tiny_encoder))
    assert "unchanged" in codes(result)
    assert result.geometry["distance"] < 1e-7
    assert result.geometry["structure"] == pytest.approx(100, abs=0.1)
    prompted = copy.deepcopy(tiny_encoder)
    prompted.prompts["query"] = "query: "  # both are embedded without a prompt, as the model stores none
    assert "unchanged" in codes(diagnose(tiny_encoder, {"de": german}, baseline=prompted))
    trained = copy.deepcopy(tiny_encoder)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trained[0].auto_model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=noise)
    result = diagnose(trained, {"de": german}, baseline=tiny_encoder)
    assert "unchanged" not in codes(result)
    assert result.geometry["distance"] > 1e-3
    assert result.geometry["structure"] < 90


def test_non_finite_embeddings(tiny_encoder, german):
    torch.nn.init.constant_(tiny_encoder[0].auto_model.embeddings.LayerNorm.bias, torch.nan)
    result = diagnose(tiny_encoder, {"de": german})
    assert codes(result) == ["not-finite"]
    assert result.findings[0].count == result.findings[0].of == 2 * len(german.sources)


def test_the_wrong_pooling(tiny_encoder, swahili, monkeypatch):
    """A model that stores CLS pooling though the mean finds the translations."""
    number = {text: at for side in (swahili.sources, swahili.targets) for at, text in enumerate(side)}

    def encode(model, texts, advance=lambda n: None, **kwargs):
        spread = 0.3 if diagnosis.pooling_of(model) == "mean" else 2.0
        noise_nh = np.random.default_rng(list(texts[0].encode())).normal(size=(len(texts), 32))
        rows_nh = np.stack([np.random.default_rng(number[text]).normal(size=32) for text in texts])
        return rows_nh + spread * noise_nh

    monkeypatch.setattr(diagnosis, "encode", encode)
    monkeypatch.setattr(diagnosis, "under_aligned", lambda *args, **kwargs: ([], None))
    result = diagnose(tiny_encoder, {"sw": swahili}, sample=200)
    assert "pooling" in codes(result, "warning")
    (message,) = (finding.message for finding in result.findings if finding.code == "pooling")
    gain, low, high = map(float, re.search(r"\((\S+) points, (\S+) to (\S+)\)", message).groups())
    assert 0 < low < gain < high
    assert list(result.pooling) == ["cls", "mean"]
    assert result.pooling["mean"] > result.pooling["cls"] + 20


def test_words_are_counted_and_linked(tiny_encoder, german, monkeypatch):
    monkeypatch.setattr(diagnosis, "WORD_COUNT", 2)
    german = replace(german, sources=tuple(f"¿{text}۔" for text in german.sources))
    rows, finding = under_aligned(tiny_encoder, german)
    assert rows
    text = " ".join(german.sources).casefold().split()
    for row in rows:
        assert row["count"] == sum(word.strip(".,!?¿۔") == row["word"] for word in text)
        assert 0 <= row["linked"] <= 1
        assert (row["score"] is None) == (row["translation"] is None) == (row["linked"] == 0)
    assert [row["linked"] for row in rows] == sorted(row["linked"] for row in rows)
    assert (finding is None) == all(row["linked"] >= 0.5 for row in rows)


def test_the_sample_is_of_whole_blocks_in_order(swahili):
    sample, row_n = sample_blocks(swahili, 500, seed=3)
    assert sample.sources == tuple(swahili.sources[row] for row in row_n)
    assert (np.diff(row_n) > 0).all()
    assert (np.diff(row_n) == 1).sum() >= 495
    for seed in range(10):  # smaller than a block
        few, row_n = sample_blocks(swahili, 30, seed)
        assert row_n.tolist() == [*range(row_n[0], row_n[0] + 30)]
        assert few.targets == swahili.targets[row_n[0] : row_n[0] + 30]
    everything, row_n = sample_blocks(swahili, 10_000)
    assert everything == swahili
    assert row_n.tolist() == list(range(len(swahili.sources)))


def test_a_shift_in_a_sample_is_found_at_its_place_in_the_file(fair, tiny_encoder, swahili):
    moved = replace(swahili, targets=(*swahili.targets[:1500], "An extra line.", *swahili.targets[1500:-1]))
    message = diagnose(tiny_encoder, {"sw": moved}, sample=1000, seed=1).findings[0].message
    start, end = (int(n.replace(",", "")) for n in re.findall(r"pair ([\d,]+) to ([\d,]+)", message)[0])
    assert 1500 <= start <= 1701
    assert end > 2700


def test_measure_of_no_relation():
    sides = np.random.default_rng(0).normal(size=(2, 300, 24)).astype(np.float32)
    sides /= np.linalg.norm(sides, axis=2, keepdims=True)
    facts = measure((sides[0], sides[1]))
    assert facts["closer"] == pytest.approx(0.5, abs=0.05)
    assert facts["accuracy"] < 3


@pytest.mark.slow
def test_the_starter_on_the_demo(swahili):
    """The real encoder: nothing is wrong with the demo, and each fault is seen."""
    model = load_encoder("starter", device="cpu")
    sound = diagnose(model, {"sw": swahili}, sample=100)
    assert codes(sound) == codes(sound, "warning") == []
    assert sound.words["sw"]
    for first, by in ((0, 1), (25, 3)):
        targets = (*swahili.targets[:first], *["An extra line."] * by, *swahili.targets[first:])
        moved = replace(swahili, sources=swahili.sources[:60], targets=targets[:60])
        assert codes(diagnose(model, {"sw": moved})) == ["shifted-sides"]
    targets = tuple(random.Random(0).sample(swahili.targets, len(swahili.targets)))
    assert codes(diagnose(model, {"sw": replace(swahili, targets=targets)}, sample=100)) == ["not-translations"]
    other = diagnosis.prepare(model, pooling="cls")
    assert "pooling" in codes(diagnose(other, {"sw": swahili}, sample=200), "warning")


def test_shares_of_variance_do_not_depend_on_the_mean():
    rows = np.random.default_rng(0).normal(size=(50, 6)).astype(np.float32)
    facts, moved = geometry(rows), geometry(rows + 3)
    for name in ("first_component", "effective_rank"):
        assert moved[name] == pytest.approx(facts[name], rel=1e-3)
