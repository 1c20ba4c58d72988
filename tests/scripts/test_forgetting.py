import gzip
import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module("forgetting")
    sys.path.remove(str(SCRIPTS))


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


def test_sentences_cover_a_text(script):
    text = "Short. The first sentence ends here. 第二句在这里结束了应该没有任何问题吧。And the rest"
    spans = list(script.sentence_spans(text))
    assert "".join(text[first:end] for first, end in spans) == text
    assert len(spans) == 3


def test_the_grid_varies_temperature_and_term(script):
    cells = list(script.grid([1, 2], 100))
    assert len(cells) == len({cell.digest for cell in cells}) == 2 * len(script.TEMPERATURES) * len(script.TERMS)


def test_kept_weights_are_not_trained_again(script, tmp_path, monkeypatch):
    cell = next(script.grid([1], 100))
    path = tmp_path / "weights" / f"{cell.digest}.safetensors"
    path.parent.mkdir()
    save_file({"x": torch.zeros(1)}, path)
    monkeypatch.setattr(script, "trained", lambda *args: pytest.fail("it was trained again"))
    assert script.trained_weights(cell, tmp_path) == path


def test_the_table_has_a_row_for_each_measurement(script):
    row = {"recipe": "starter", "alpha": 0.0, "directions": 20} | dict.fromkeys(script.COLUMNS, 50.0)
    machine = {"cpus": 2, "machine": "x86_64"}
    content = {"rows": [row] * 3, "steps": 100, "batch_size": 64, "seeds": [1], "hardware": machine}
    lines = script.table(content).splitlines()
    assert [line for line in lines if "starter" in line] == [
        "| starter | 0 | 20 |" + " 50.0 |" * len(script.COLUMNS)
    ] * 3
