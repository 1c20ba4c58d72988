from itertools import pairwise, product

import numpy as np
import pytest
import torch
from datasets import Dataset

from metaphrase.evaluation.transfer import question_answering
from metaphrase.evaluation.transfer.data import NOWHERE, QUESTIONS, read_languages
from metaphrase.evaluation.transfer.options import FineTuningArguments
from metaphrase.evaluation.transfer.question_answering import (
    QuestionAnsweringOptions,
    QuestionTask,
    Window,
    Windows,
    best_answer,
    collate_windows,
)
from tests.evaluation.transfer.conftest import program, read_json

CONTEXT = "the dog drinks water and the cat drinks milk in the garden today"


def question(text, start=None, asked="who drinks?"):
    start = CONTEXT.index(text) if start is None else start
    return {"question": asked, "context": CONTEXT, "answers": {"text": [text], "answer_start": [start]}}


@pytest.fixture
def windows(tokenizer):
    return Windows(tokenizer, max_length=18, doc_stride=4)


def shown(window):
    """Characters of the context that a window shows."""
    inside = window.offsets[window.offsets[:, 0] >= 0]
    return inside[0, 0], inside[-1, 1]


def test_windows_start_a_stride_apart_and_show_everything(windows, tokenizer):
    cut = windows(question("milk"))
    whole = tokenizer(CONTEXT, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    starts = [shown(window)[0] for window in cut]
    assert starts == [start for start, _ in whole][: 4 * len(cut) : 4]
    assert shown(cut[-1])[1] == len(CONTEXT)
    assert len(cut) > 2
    assert {len(window.inputs["input_ids"]) for window in cut[:-1]} == {18}
    places = [tuple(offset) for window in cut for offset in window.offsets[window.central]]
    assert sorted(places) == sorted(map(tuple, whole))  # each piece is central once


def test_central_is_where_most_context_is(windows):
    cut = windows(question("milk"))
    for window, following in pairwise(cut):
        inside, after = (part.offsets[part.offsets[:, 0] >= 0] for part in (window, following))
        for place in inside[4:]:  # shown by both
            left, right = (np.flatnonzero((part == place).all(1))[0] for part in (inside, after))
            first, second = min(left, len(inside) - 1 - left), min(right, len(after) - 1 - right)
            if first != second:
                better = window if first > second else following
                worse = following if first > second else window
                at = np.flatnonzero((worse.offsets == place).all(1))[0]
                assert not worse.central[at], (place, better)


def test_marked_spans_are_the_answers(windows, questions):
    rows = [question("milk"), question("the cat drinks"), question("water"), question(CONTEXT[4:7])]
    rows += read_languages(str(questions), QUESTIONS, split="test")["de"].to_list()
    for row in rows:
        cut = windows(row)
        start, text = row["answers"]["answer_start"][0], row["answers"]["text"][0]
        marked = 0
        for window in cut:
            first, last = shown(window)
            if first <= start and start + len(text) <= last:
                assert (window.offsets[window.start, 0], window.offsets[window.end, 1]) == (start, start + len(text))
                marked += 1
            else:
                assert window.start == window.end == 0
        assert marked


def test_a_long_question_is_cut_and_a_longer_one_refused(tokenizer):
    row = question("milk", asked="drinks " * 30)
    whole = tokenizer(row["question"], add_special_tokens=False)["input_ids"]
    (window, *_) = Windows(tokenizer, max_length=24, doc_stride=8, max_query_length=5)(row)
    ids = window.inputs["input_ids"].tolist()
    assert ids[: ids.index(tokenizer.sep_token_id)] == [tokenizer.cls_token_id, *whole[:5]]
    with pytest.raises(ValueError, match="leaves no room"):
        Windows(tokenizer, max_length=24, doc_stride=8, max_query_length=40)(row)


def test_a_short_context_is_one_window(tokenizer):
    (window,) = Windows(tokenizer, max_length=60, doc_stride=8)(question("milk"))
    assert window.central.sum() == (window.offsets[:, 0] >= 0).sum()


def brute_force(context, windows, logits, max_answer_length):
    best, answer = -np.inf, ""
    for window, scores in zip(windows, logits, strict=True):
        for start, end in product(range(len(window.offsets)), repeat=2):
            allowed = window.central[start] and window.offsets[end, 0] >= 0
            if allowed and start <= end < start + max_answer_length and scores[0, start] + scores[1, end] > best:
                best = scores[0, start] + scores[1, end]
                answer = context[window.offsets[start, 0] : window.offsets[end, 1]]
    return answer


@pytest.mark.parametrize("seed", range(20))
def test_best_answer_equals_trying_all_spans(windows, seed):
    cut = windows(question("milk"))
    rng = np.random.default_rng(seed)
    logits = [rng.normal(size=(2, len(window.offsets))) for window in cut]
    found = best_answer(CONTEXT, cut, logits, n_best=18, max_answer_length=4)
    assert found == brute_force(CONTEXT, cut, logits, 4)


def test_n_best_limits_what_is_tried():
    offsets = np.array([[-1, -1], [0, 1], [1, 2], [2, 3]])
    window = Window({}, offsets, offsets[:, 0] >= 0)
    logits = np.array([[9.0, 5.0, 0.0, 1.0], [9.0, 1.0, 5.0, 0.0]])
    assert best_answer("abc", [window], [logits], n_best=2) == "ab"
    assert best_answer("abc", [window], [logits], n_best=1) == ""  # the special piece is the best of both
    assert best_answer("abc", [window], [logits], n_best=4, max_answer_length=1) == "a"


def test_windows_are_padded_into_a_batch(windows, tokenizer):
    cut = windows(question("milk"))
    batch = collate_windows(tokenizer, cut)
    assert batch["input_ids"].shape == (len(cut), 18)
    assert batch["start_positions"].tolist() == [window.start for window in cut]
    assert torch.equal(batch["attention_mask"].sum(1), torch.tensor([len(window.offsets) for window in cut]))


ARGUMENTS = ["--doc_stride", "12", "--max_length", "40"]


@pytest.mark.parametrize("mode", ["zero-shot", "code-switching"])
def test_program(questions, common, tmp_path, capsys, mode):
    arguments = [*common, *ARGUMENTS, "--halves", str(questions), "--dev_share", "0.2", "--mode", mode]
    assert program("finetune_qa").main(arguments) == 0
    assert "exact_match" in capsys.readouterr().out
    results = read_json(tmp_path / "out" / "results.json")
    assert list(results["languages"]) == ["en", "de"]
    assert list(results["runs"]) == (["en"] if mode == "zero-shot" else ["en", "de"])
    score = results["languages"]["de"]
    assert score["n"] == len(score["items"]) == 12
    assert score["metrics"]["f1"] == pytest.approx(100 * sum(score["items"]) / 12)
    assert score["metrics"]["exact_match"] <= score["metrics"]["f1"]


@pytest.mark.slow
def test_learns_by_heart(questions, common, tmp_path):
    arguments = ["--train", str(questions), "--test", str(questions), "--selection", "last", "--languages", "en"]
    arguments += ["--max_steps", "250", "--dropout", "0", "--learning_rate", "3e-3", *ARGUMENTS]
    program("finetune_qa").main([*common, *arguments])
    results = read_json(tmp_path / "out" / "results.json")
    assert results["languages"]["en"]["metrics"]["f1"] > 35  # untrained: below 15


def test_an_answer_that_is_nowhere_in_the_context_is_not_marked(windows):
    """The first answer that has a place is."""
    row = question("milk")
    row["answers"] = {"text": ["elsewhere", "milk"], "answer_start": [NOWHERE, CONTEXT.index("milk")]}
    marked = [(window.start, window.end) for window in windows(question("milk"))]
    assert [(window.start, window.end) for window in windows(row)] == marked
    row["answers"] = {"text": ["elsewhere"], "answer_start": [NOWHERE]}
    assert {(window.start, window.end) for window in windows(row)} == {(0, 0)}


def test_a_stride_longer_than_a_window_leaves_nothing_out(tokenizer):
    cut = Windows(tokenizer, max_length=18, doc_stride=128)(question("milk"))
    whole = tokenizer(CONTEXT, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    shown_once = [tuple(offset) for window in cut for offset in window.offsets[window.offsets[:, 0] >= 0]]
    assert shown_once == list(map(tuple, whole))


@pytest.mark.parametrize(
    ("scoring", "language", "normalised"),
    [("mlqa", "de", "de"), ("mlqa", "el", None), ("squad", "de", None)],
)
def test_answers_are_normalised_as_asked(tiny_encoder_dir, tmp_path, monkeypatch, scoring, language, normalised):
    asked, real = [], question_answering.answer_scores
    monkeypatch.setattr(question_answering, "answer_scores", lambda *args: asked.append(args[2]) or real(*args))
    options = QuestionAnsweringOptions(model=str(tiny_encoder_dir), max_length=40, doc_stride=12, scoring=scoring)
    task = QuestionTask(options, FineTuningArguments(output_dir=str(tmp_path), use_cpu=True))
    task.score(task.build(), Dataset.from_list([question("milk") | {"item": "1"}]), language)
    assert asked == [normalised]
