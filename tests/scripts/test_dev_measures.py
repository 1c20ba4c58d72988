import gzip
import json
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from metaphrase.evaluation.similarity_structure import similarity_structure
from metaphrase.exceptions import UsageError


@pytest.fixture
def mlqa(tmp_path):
    """Two questions in four languages, and one that is missing in a language."""
    for language in ("ar", "de", "en", "zh"):
        context = f"The first sentence in {language}. The second sentence in {language}! A third one in {language}?"
        questions = [("a", "first", 3), ("b", "second", 35)] + ([("c", "third", 60)] if language != "zh" else [])
        rows = [
            {"id": id_, "question": f"{ask} {language}", "answers": [{"answer_start": at}]}
            for id_, ask, at in questions
        ]
        content = {"data": [{"paragraphs": [{"context": context, "qas": rows}]}]}
        (tmp_path / f"dev-{language}.json.gz").write_bytes(gzip.compress(json.dumps(content).encode()))
    return tmp_path


def test_questions_in_four_languages_share_one_pool(script, mlqa):
    answers = script.Answers.read(mlqa, 2)
    assert [question for question, _, _ in answers.questions] == [
        f"{ask} {language}" for ask in ("first", "second") for language in ("ar", "de", "en", "zh")
    ]
    assert len(answers.candidates) == 12
    right = [answers.candidates[at] for at in answers.right]
    assert right[:2] == [("ar", "The first sentence in ar."), ("de", "The first sentence in de.")]
    assert right[-1] == ("zh", "The second sentence in zh!")


def test_answers_are_measured_as_by_a_loop(script, mlqa):
    answers = script.Answers.read(mlqa, 2)
    rng = np.random.default_rng(0)
    question_nh, candidate_mh = (rng.normal(size=(n, 8)) for n in (len(answers.questions), len(answers.candidates)))
    precisions, own, reciprocal = [], [], []
    for (_, language, id_), right, query_h in zip(answers.questions, answers.right, question_nh, strict=True):
        ranked = sorted(range(len(answers.candidates)), key=lambda m: -float(query_h @ candidate_mh[m]))
        relevant = {at for (_, _, other), at in zip(answers.questions, answers.right, strict=True) if other == id_}
        hits = [place for place, m in enumerate(ranked, 1) if m in relevant]
        precisions.append(sum(found / place for found, place in enumerate(hits, 1)) / len(relevant))
        own.append(answers.candidates[ranked[0]][0] == language)
        reciprocal.append(1 / (1 + [m for m in ranked if answers.candidates[m][0] == language].index(right)))
    assert answers.measures(question_nh, candidate_mh) == pytest.approx(
        {
            "answers": 100 * np.mean(precisions),
            "own_language_first": 100 * np.mean(own),
            "answers_in_own_language": 100 * np.mean(reciprocal),
        }
    )


def test_work_of_another_starter_is_refused(script, load_script, tiny_encoder, mlqa, tmp_path, monkeypatch):
    check_settings = load_script("stored_results").check_settings
    monkeypatch.setattr(script, "load_encoder", lambda name: tiny_encoder)
    check_settings(tmp_path / "out", script.work_settings(tmp_path, mlqa))
    monkeypatch.setattr(script, "model_hash", lambda model: "another")
    with pytest.raises(UsageError, match="another value of starter"):
        check_settings(tmp_path / "out", script.work_settings(tmp_path, mlqa))


def test_embeddings_are_kept_whole_or_not_at_all(script, tmp_path):
    path = tmp_path / "rows" / "starter-1.npz"
    groups = {"sts": [np.ones(2), np.zeros(3)], "answers": [np.arange(4)]}
    script.kept_embeddings(path, lambda: groups)
    kept = script.kept_embeddings(path, lambda: pytest.fail("they were embedded again"))
    assert {name: [x.tolist() for x in xs] for name, xs in kept.items()} == {
        "sts": [[1, 1], [0, 0, 0]],
        "answers": [[0, 1, 2, 3]],
    }
    broken = [np.ones(2), np.array([lambda: None])]  # the second array cannot be written
    with pytest.raises((AttributeError, pickle.PicklingError)):
        script.kept_embeddings(tmp_path / "rows" / "starter-2.npz", lambda: {"sts": broken})
    assert [one.name for one in path.parent.iterdir()] == ["starter-1.npz"]


@pytest.mark.parametrize("directions", [0, 2])
def test_structure_of_the_packaged_texts_is_that_of_the_guard(script, directions, monkeypatch):
    monkeypatch.setattr(script, "ITEMS", 3)
    rng = np.random.default_rng(0)
    shapes = {
        "pairs": [4, 4],
        "sts": [3, 3],
        "answers": [2, 5],
        "languages": [6, 6, 6],
        "guard": [7, 8],
        "tokens": [9, 9],
    }
    original, changed = (
        {name: [rng.normal(size=(n, 5)).astype("f4") for n in sizes] for name, sizes in shapes.items()} for _ in "12"
    )
    data = script.DevData.__new__(script.DevData)
    data.sts, data.languages = [[[], [], [1.0, 2.0, 3.0]]], dict.fromkeys(("de", "en", "fi"))
    data.answers = SimpleNamespace(measures=lambda *sides: {})

    texts = {language: [f"{language}{n}" for n in range(size)] for language, size in {"de": 7, "en": 8}.items()}
    rows = [
        {
            text: row
            for one, side in zip(texts.values(), group, strict=True)
            for text, row in zip(one, side, strict=True)
        }
        for group in (original["guard"], changed["guard"])
    ]
    if directions:
        means = {name: torch.from_numpy(x) for name, x in zip(data.languages, changed["languages"], strict=True)}
        removed = script.language_directions(means, directions)[0].numpy()
        rows = [{text: row - row @ removed.T @ removed for text, row in one.items()} for one in rows]
    models = [
        SimpleNamespace(encode=lambda batch, own=own, **_: np.array([own[text] for text in batch])) for own in rows
    ]
    expected = similarity_structure(*models, texts, resamples=2).average.score
    assert data.measures(changed, original, directions)[script.GUARD] == pytest.approx(expected, abs=0.01)
    assert data.measures(original, original, directions)[script.GUARD] == pytest.approx(100)
    tokens = data.measures(changed, original, directions).get(script.TOKENS)  # tokens keep all directions
    sides = original["tokens"], changed["tokens"]
    assert tokens == (None if directions else pytest.approx(script.mean_correlation(*sides)))


def test_structure_of_tokens_compares_the_same_tokens(script, tiny_encoder, monkeypatch):
    texts = ["the cat", "the cat sat on the mat", "a dog"]
    whole = script.token_states(tiny_encoder, texts)
    lengths = [len(tiny_encoder.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    assert len(whole) == sum(lengths)
    alone = script.token_states(tiny_encoder, texts[:1])
    np.testing.assert_allclose(whole[: len(alone)], alone, atol=1e-5)
    monkeypatch.setattr(script, "TOKENS_OF_A_LANGUAGE", 3)
    some = script.token_states(tiny_encoder, texts)
    assert len(some) == 3
    assert (whole[:, None] == some).all(-1).any(0).all()
