import numpy as np
import pytest
from sklearn.model_selection import PredefinedSplit

from metaphrase.corpus.parallel import ParallelSet
from metaphrase.evaluation import geometry as module
from metaphrase.evaluation.diagnosis import diagnose
from metaphrase.evaluation.geometry import hubs, isotropy, language_identification


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def test_hubs_match_a_loop():
    rng = np.random.default_rng(0)
    query, pool = unit(rng.normal(size=(40, 6))), unit(rng.normal(size=(25, 6)))
    pool[3] = unit(query.mean(axis=0, keepdims=True))[0]  # near to many queries
    counts = np.zeros(25)
    for one in query:
        for row in np.argsort(-(pool @ one))[:5]:
            counts[row] += 1
    found = hubs(query, pool, k=5)
    assert found.count_m.tolist() == counts.tolist()
    centred = counts - counts.mean()
    assert found.skewness == pytest.approx((centred**3).mean() / (centred**2).mean() ** 1.5)


def test_hubs_do_not_depend_on_the_length_of_embeddings():
    rng = np.random.default_rng(0)
    query, pool, length = rng.normal(size=(40, 8)), rng.normal(size=(30, 8)), rng.uniform(0.1, 9, size=(30, 1))
    one, other = (hubs(query.astype(np.float32), rows.astype(np.float32), 3) for rows in (pool, pool * length))
    assert (one.count_m == other.count_m).all()


def test_a_pool_without_hubs_has_no_skewness():
    rows = np.eye(8, dtype=np.float32)
    assert hubs(rows, rows, k=1) == (0.0, pytest.approx(np.ones(8)))
    assert hubs(rows, rows, k=99).skewness == 0
    crowd = unit(np.eye(8)[:, :] + 3 * np.eye(8)[0])
    assert hubs(rows, crowd[[0, 1, 1]], k=1).count_m.sum() == 8


def test_isotropy_of_known_clouds():
    axes = np.concatenate([np.eye(5), -np.eye(5)])
    assert isotropy(axes) == pytest.approx(1)
    one = np.tile(np.eye(5)[:1], (7, 1))
    assert isotropy(one) == pytest.approx(np.exp(-1) / np.exp(1))
    rng = np.random.default_rng(0)
    cloud = rng.normal(size=(200, 5))
    assert isotropy(unit(cloud)) > 0.7 > isotropy(unit(cloud + 3))


def test_a_probe_reads_the_language_only_if_it_is_there():
    rng = np.random.default_rng(0)
    meanings = rng.normal(size=(60, 8))
    noisy = {language: meanings + 0.1 * rng.normal(size=(60, 8)) for language in ("de", "sw", "en")}
    assert language_identification({language: unit(rows) for language, rows in noisy.items()})["accuracy"] < 50
    for at, rows in enumerate(noisy.values()):
        rows[:, at] += 6
    found = language_identification({language: unit(rows) for language, rows in noisy.items()})
    assert found["accuracy"] > 95
    assert (found["chance"], found["languages"], found["sentences"]) == (pytest.approx(100 / 3), 3, 60)
    assert language_identification({"de": meanings}) == {}
    assert language_identification({"de": meanings, "en": meanings[:1]}) == {}


def test_diagnosis_has_the_geometry(tiny_encoder, bitext):
    sources, targets = (tuple(row[side] for row in bitext) for side in ("source", "target"))
    sets = {"de": ParallelSet("de", sources, targets), "sw": ParallelSet("sw", sources[::-1], targets[::-1])}
    result = diagnose(tiny_encoder, sets)
    assert result.language_identification["languages"] == 3
    assert 0 < result.geometry["isotropy"] <= 1
    for facts in result.languages.values():
        assert len(facts["hubs"]) == 3
        assert facts["hubs"][0]["count"] == max(hub["count"] for hub in facts["hubs"])
        assert facts["hubs"][0]["text"] in targets


def test_copies_of_a_target_are_one_hub(tiny_encoder, bitext):
    sources, targets = ([row[side] for row in bitext] for side in ("source", "target"))
    copied = ParallelSet("de", tuple(sources), (*targets[:1] * 6, *targets[6:]))
    texts = [hub["text"] for hub in diagnose(tiny_encoder, {"de": copied}).languages["de"]["hubs"]]
    assert len(set(texts)) == len(texts) == 3


def test_translations_of_a_sentence_are_in_one_fold(monkeypatch):
    folds = []
    monkeypatch.setattr(module, "PredefinedSplit", lambda one: folds.append(one.tolist()) or PredefinedSplit(one))
    language_identification(
        {code: np.random.default_rng(at).normal(size=(5, 3)) for at, code in enumerate(("de", "sw"))}
    )
    assert folds == [[0, 1, 0, 1, 0] * 2]
