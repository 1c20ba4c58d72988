"""Guards hold or do not by their intervals, and the chosen alpha follows the rule that is stated with it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metaphrase.encoders.debiasing import without_directions
from metaphrase.encoders.prompts import search_prompts
from metaphrase.evaluation.guard_data import load_guard_data
from metaphrase.evaluation.guards import (
    ALPHAS,
    RULE,
    AlphaCurve,
    Guard,
    GuardEvaluator,
    choose_alpha,
    data_guard,
    structure_guard,
)
from metaphrase.exceptions import DataError, MissingFileError, UsageError
from metaphrase.merging import TaskVector


def row(difference: float, holds: bool = True) -> dict[str, object]:
    scores = {"before": 50.0, "after": 50 + difference, "difference": difference, "interval": [0, 1]}
    return scores | {"verdict": "tie" if holds else "worse", "holds": holds}


@pytest.fixture(scope="module")
def linear() -> tuple[torch.nn.Module, TaskVector]:
    """A model of one weight, 0, and a vector that adds alpha to it."""
    base, tuned = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    base.weight.data.zero_()
    tuned.weight.data.fill_(1.0)
    return base, TaskVector.between(base, tuned)


def guard(name: str, values) -> Guard:
    """A guard that knows its rows by alpha."""
    return Guard(name, lambda model: values[round(model.weight.item(), 1)])


@settings(max_examples=100)
@given(
    gains=st.lists(st.integers(-3, 3), min_size=11, max_size=11),
    held=st.lists(st.lists(st.booleans(), min_size=11, max_size=11), max_size=3),
)
def test_the_rule(linear, gains, held):
    base, vector = linear
    gain_of = dict(zip(ALPHAS, gains, strict=True))
    rows = {alpha: row(gain) | {"verdict": "better" if gain > 1 else "tie"} for alpha, gain in gain_of.items()}
    guards = [
        guard(f"guard {at}", {alpha: row(0, ok) for alpha, ok in zip(ALPHAS, one, strict=True)})
        for at, one in enumerate(held)
    ]
    curve = choose_alpha(base, vector, guard("dev", rows), guards)
    short = choose_alpha(base, vector, guard("dev", rows), guards, complete=False)
    assert (short.alpha, short.gains) == (curve.alpha, curve.gains)
    assert short.points == curve.points[: len(short.points)]
    assert all(point["holds"] for point in short.points[1:-1])
    assert len(short.points) == len(curve.points) or not short.points[-1]["holds"]
    allowed = [0.0] if all(one[0] for one in held) else []
    for at, alpha in enumerate(ALPHAS[1:], 1):
        if not all(one[at] for one in held):
            break
        allowed.append(alpha)
    best = 0.0
    for alpha in allowed:
        if best not in allowed or gain_of[alpha] > gain_of[best]:
            best = alpha
    assert (curve.alpha, curve.gains) == (best, best in allowed and gain_of[best] > 0)
    said = str(curve)
    if curve.gains:
        assert said.startswith(f"Alpha {best:g} was chosen: dev +{gain_of[best]}.0 ")
        assert said.endswith("This gain may be due to chance.") == (gain_of[best] == 1)
    else:
        assert said.startswith(f"{curve.without_gain()} The release has alpha {best:g}, ")
        assert curve.without_gain().startswith("Nothing can be gained without a loss: ")
        assert curve.without_gain().count("alpha ") >= len(ALPHAS)  # the frontier
    assert [point["alpha"] for point in curve.points] == list(ALPHAS)
    assert AlphaCurve(**json.loads(json.dumps(curve.to_dict()))) == curve
    assert curve.rule == RULE


@pytest.mark.parametrize(
    ("gains", "held", "alpha", "said"),
    [
        ([0, 2, 3], [False, True, True], 1.0, "Alpha 1 was chosen: dev +3.0"),  # training makes up for debiasing
        (
            [-4, -2, 1],
            [True, True, False],
            0.5,
            "at alpha 1, this guard does not hold: sts. * The release has alpha 0.5, which loses least of those whose",
        ),
        (
            [-1, 2, 3],
            [True, False, True],
            0.0,
            "at alpha 0.5, this guard does not hold: sts. * The release has alpha 0, the weights before training.",
        ),
        (
            [1, -2, -3],
            [False, True, True],
            0.5,
            "at alpha 0, this guard does not hold: sts. * has alpha 0.5, which loses",
        ),
        (
            [0, 2, 3],
            [False, False, False],
            0.0,
            "at alpha 0.5, this guard does not hold: sts. * has alpha 0, the weights",
        ),
        (
            [0, -2, -3],
            [True, True, False],
            0.0,
            "loss: no alpha gains anything on dev. Gain * The release has alpha 0, ",
        ),
    ],
)
def test_the_choice_in_words(linear, gains, held, alpha, said):
    alphas = (0.0, 0.5, 1.0)
    gain = guard("dev", {at: row(one) | {"verdict": "better"} for at, one in zip(alphas, gains, strict=True)})
    sts = guard("sts", {at: row(0, one) for at, one in zip(alphas, held, strict=True)})
    curve = choose_alpha(*linear, gain, [sts], alphas=alphas)
    assert curve.alpha == alpha
    assert re.search(".*".join(map(re.escape, said.split("*"))), str(curve))


def test_all_guards_that_do_not_hold_are_named(linear):
    gain, *guards = (guard(name, {0.0: row(0), 1.0: row(1, name == "dev")}) for name in ("dev", "sts", "mlqa"))
    curve = choose_alpha(*linear, gain, guards, alphas=(1.0,))
    assert "at alpha 1, these guards do not hold: sts, mlqa." in str(curve)


def moved(model, by: float):
    """A copy with other weights."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(by * torch.randn(parameter.shape, generator=generator))
    return other


@pytest.fixture
def sts(tmp_path, bitext, tiny_encoder) -> Path:
    """STS pairs whose gold scores are the cosines of the tiny encoder: it is perfect, and any other is worse."""
    folder = tmp_path / "stsb"
    folder.mkdir()
    texts = [one["source"] for one in bitext]
    pairs = [(a, b) for at, a in enumerate(texts) for b in texts[at + 1 :]][::2]
    sides = (torch.from_numpy(tiny_encoder.encode([pair[side] for pair in pairs])) for side in (0, 1))
    scores = torch.nn.functional.cosine_similarity(*sides)
    lines = [f'"{a}","{b}",{score}\n' for (a, b), score in zip(pairs, scores.tolist(), strict=True)]
    (folder / "stsb-de-dev.csv").write_text("".join(lines), encoding="utf-8")
    (folder / "stsb-de-test.csv").write_text("no,test,0\n" * 3, encoding="utf-8")
    return folder


def test_a_guard_with_labels_holds_unless_it_is_worse(tiny_encoder, sts):
    measure = data_guard(tiny_encoder, load_guard_data(sts)).measure
    same, near, far = (measure(model) for model in (tiny_encoder, moved(tiny_encoder, 1e-6), moved(tiny_encoder, 0.3)))
    assert (same["difference"], same["verdict"], same["holds"]) == (0.0, "tie", True)
    assert near["before"] == pytest.approx(100, abs=0.1)
    assert near["holds"]
    assert (far["verdict"], far["holds"]) == ("worse", False)
    assert far["interval"][1] < 0


def columns(rows: Iterable[Sequence[object]]) -> str:
    return "".join("\t".join(map(str, row)) + "\n" for row in rows)


def write_pairs(folder: Path, bitext) -> None:
    rows = [(one["source"], one["target"]) for one in bitext]
    for part in ("dev", "test"):
        (folder / f"de-en.{part}.tsv").write_text(columns([("source", "target"), *rows]), encoding="utf-8")


def write_topics(folder: Path, bitext) -> None:
    for language, side in (("eng_Latn", "target"), ("deu_Latn", "source")):
        for part, rows in (("train", bitext[:12]), ("dev", bitext[12:])):
            table = [(f"{part}{at}", at % 2, one[side]) for at, one in enumerate(rows)]
            content = columns([("index_id", "category", "text"), *table])
            (folder / f"{language}.{part}.tsv").write_text(content, encoding="utf-8")


def write_questions(folder: Path, bitext) -> None:
    """MLQA's layout: paragraphs that are not yet split into sentences, and other questions in each language."""
    for language, side in (("en", "target"), ("de", "source")):
        texts = [f"{one[side].rstrip('.')} and so on, as everyone knows." for one in bitext[language == "de" :]]
        questions = [
            {
                "id": str(at + (language == "de")),
                "question": text[:-20],
                "answers": [{"text": "x", "answer_start": 3 + sum(map(len, texts[:at])) + at}],
            }
            for at, text in enumerate(texts)
        ]
        content = {"data": [{"title": "a", "paragraphs": [{"context": " ".join(texts), "qas": questions}]}]}
        (folder / f"dev-{language}.json").write_text(json.dumps(content), encoding="utf-8")


KINDS = {
    "retrieval": (write_pairs, lambda one: one.sources),
    "sib200": (
        write_topics,
        lambda one: [text for text, part in zip(one.texts, one.split, strict=True) if part == "dev"],
    ),
    "monolingual answers": (write_questions, lambda one: one.questions),
}


@pytest.mark.parametrize("kind", KINDS)
def test_folders_with_labels(tiny_encoder, tmp_path, bitext, kind):
    write, items = KINDS[kind]
    write(tmp_path, bitext)
    whole, first, second = (
        load_guard_data(tmp_path, part, halved=halved)
        for part, halved in (("dev", False), ("dev", True), ("test", True))
    )
    assert whole.evaluate(tiny_encoder, whole.sets).suite == kind
    for language in whole.sets:
        halves = [set(items(one.sets[language])) for one in (first, second)]
        if kind == "retrieval":  # a file for each part
            assert halves[0] == halves[1] == set(items(whole.sets[language]))
        else:
            assert not halves[0] & halves[1]
            assert halves[0] | halves[1] == set(items(whole.sets[language]))
    assert set(whole.texts) >= {text for one in whole.sets.values() for text in items(one)}
    assert len(set(whole.texts)) == len(whole.texts) <= 4 * len(bitext)
    few = load_guard_data(tmp_path, max_items=4)
    assert {len(items(one)) for one in few.sets.values()} == {4}
    row = data_guard(tiny_encoder, few, prompts=["x: "]).measure(tiny_encoder)
    assert row["languages"].keys() == few.sets.keys()
    assert row["verdict"] in ("tie", "worse")  # the original counts with its better prompt
    questions = {
        question for one in few.sets.values() for question in getattr(one, "ids", ())
    }  # German lacks the first
    assert row.get("clusters") == {"retrieval": None, "sib200": 4, "monolingual answers": len(questions)}[kind]
    assert len(questions) != 4


class Letters:
    """A model that counts letters, those of the prompt included."""

    prompts: ClassVar[dict[str, str]] = {}

    def encode(self, texts, prompt=None, **_):
        return np.array([[1.0 + f"{prompt or ''}{text}".count(letter) for letter in "ade"] for text in texts])


def test_answers_are_ranked_among_the_sentences_of_their_language(tmp_path, bitext):
    write_questions(tmp_path, bitext)
    data = load_guard_data(tmp_path, max_items=6)
    result = data.evaluate(Letters(), data.sets)
    for language, one in data.sets.items():
        assert len(one.sentences) == len(bitext) - (language == "de")
        assert all(one.questions[at][:9] == one.sentences[one.answers[at]][:9] for at in range(6))
        questions, sentences = (Letters().encode(texts) for texts in (one.questions, one.sentences))
        reciprocal = []
        for question, right in zip(questions, one.answers, strict=True):
            cosines = [float(question @ s / np.linalg.norm(question) / np.linalg.norm(s)) for s in sentences]
            reciprocal.append(1 / sum(cosine >= cosines[right] - 1e-6 for cosine in cosines))
        assert 0 < np.mean(reciprocal) < 1
        assert result.languages[language].score == pytest.approx(100 * np.mean(reciprocal), abs=1e-3)


def test_the_original_counts_with_its_best_prompt(tmp_path, bitext):
    write_questions(tmp_path, bitext)
    data = load_guard_data(tmp_path)
    original, released = Letters(), Letters()
    original.prompts = {"query": "add ", "passage": "deed "}
    released.prompts = search_prompts(original.prompts)
    with_prompts, without = (
        data.evaluate(original, data.sets, prompt=prompt).average.score for prompt in ("auto", None)
    )
    assert without > with_prompts + 1
    row = data_guard(original, data, prompt="auto", prompts=[None]).measure(released)
    assert row["before"] == pytest.approx(max(with_prompts, without))
    assert row["after"] == pytest.approx(with_prompts)


def test_similarity_structure_has_a_red_line(tiny_encoder, bitext):
    texts = {"de": [one["source"] for one in bitext]}
    far = moved(tiny_encoder, 0.02)
    wide, narrow = (structure_guard(tiny_encoder, texts, max_loss=loss).measure(far) for loss in (100, 0))
    assert (wide["verdict"], wide["holds"]) == ("kept", True)
    assert (narrow["verdict"], narrow["holds"]) == ("lost", False)
    assert wide["difference"] == narrow["difference"] < 0
    low, high = wide["interval"]
    middle = structure_guard(tiny_encoder, texts, max_loss=-(low + high) / 2).measure(far)
    assert (middle["verdict"], middle["holds"]) == ("uncertain", False)
    same = structure_guard(tiny_encoder, texts, max_loss=0.001).measure(tiny_encoder)
    assert [same["difference"], *same["interval"]] == pytest.approx([0, 0, 0], abs=1e-9)
    assert same["holds"]


@pytest.mark.parametrize("size", [None, 24])
def test_similarity_structure_does_not_count_the_removal_of_directions(tiny_encoder, bitext, size):
    tiny_encoder.truncate_dim = size
    texts = {"de": [one["source"] for one in bitext]}
    direction = torch.linalg.qr(torch.randn(32, 5, generator=torch.Generator().manual_seed(0))).Q.T
    guard = structure_guard(tiny_encoder, texts)
    assert guard.measure(without_directions(tiny_encoder, direction))["difference"] == pytest.approx(0, abs=0.2)
    far, near = (guard.measure(one) for one in (moved(tiny_encoder, 0.02), moved(tiny_encoder, 0.002)))
    assert guard.measure(without_directions(moved(tiny_encoder, 0.02), direction))["difference"] < -1
    assert far["difference"] < near["difference"] < 0


def test_guards_are_measured_during_training(tiny_encoder, bitext, sts, tmp_path):
    texts = {"de": [one["source"] for one in bitext]}
    guards = [structure_guard(tiny_encoder, texts), data_guard(tiny_encoder, load_guard_data(sts))]
    evaluator = GuardEvaluator(guards)
    changed = moved(tiny_encoder, 0.02)
    expected = [guard.measure(changed)["after"] / 100 for guard in guards]
    tiny_encoder.load_state_dict(changed.state_dict())  # trained in place
    metrics = evaluator(tiny_encoder, str(tmp_path / "eval"), epoch=0, steps=10)
    assert list(metrics) == ["guard_similarity_structure", "guard_stsb"]
    assert list(metrics.values()) == pytest.approx(expected)
    assert 0 < metrics[evaluator.primary_metric] < 0.99
    header, values = (tmp_path / "eval" / "guard_evaluation_results.csv").read_text().splitlines()
    assert header.split(",") == ["epoch", "steps", *metrics]
    assert values.split(",")[:2] == ["0", "10"]


@pytest.mark.parametrize("names", [["dev"], ["a", "a"], ["similarity structure", "similarity_structure"]])
def test_guards_with_the_same_name_do_not_replace_each_other(linear, names):
    base, vector = linear
    guards = [guard(name, dict.fromkeys(ALPHAS, row(0))) for name in names]
    with pytest.raises(UsageError, match=f"two have the same name: dev, {', '.join(names)}. Rename one"):
        choose_alpha(base, vector, guard("dev", dict.fromkeys(ALPHAS, row(1))), guards)
    if len(names) > 1:
        with pytest.raises(UsageError, match=f"two have the same name: {', '.join(names)}. Rename one"):
            GuardEvaluator(guards)


def test_a_single_item_cannot_be_halved(tmp_path):
    (tmp_path / "stsb-de-dev.csv").write_text("a,b,1\n", encoding="utf-8")
    with pytest.raises(DataError, match="have the same score in de, so no correlation can be computed"):
        load_guard_data(tmp_path)
    with pytest.raises(DataError, match="has a single item for de, but settings are chosen on one half"):
        load_guard_data(tmp_path, "test", halved=True)


def test_halves_of_pairs_that_alternate(tmp_path):
    """Files often have a similar pair after each other one."""
    rows = "".join(f"a {at},b {at},{at % 2}\n" for at in range(40))
    (tmp_path / "stsb-de-dev.csv").write_text(rows, encoding="utf-8")
    halves = [load_guard_data(tmp_path, part, halved=True).sets["de"] for part in ("dev", "test")]
    assert {text for half in halves for text in half.first} == {f"a {at}" for at in range(40)}
    assert [len(half.scores) for half in halves] == [20, 20]
    assert all(4 < sum(half.scores) < 16 for half in halves)


@pytest.mark.parametrize("names", ["{}-{}.csv", "{}-en.{}.tsv"])
def test_languages_without_data_of_a_part_are_named_once(tmp_path, caplog, names):
    content = "a,b,1\nc,d,2\n" if names.endswith("csv") else "source\ttarget\na\tb\nc\td\n"
    for name in (("de", "dev"), ("sw", "dev"), ("sw", "test"), ("fr", "test")):
        (tmp_path / names.format(*name)).write_text(content, encoding="utf-8")
    for part, languages in (("dev", ["de", "sw"]), ("test", ["fr", "sw"])) * 2:
        assert sorted(load_guard_data(tmp_path, part, halved=True).sets) == languages
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path} has no {part} data for these languages, which are skipped: {language}. Add files."
        for part, language in (("development", "fr"), ("test", "de"))
    ]


def test_files_without_a_split_beside_those_of_a_part_are_named(tmp_path, caplog):
    for name in ("de-en.dev.tsv", "de-en.tsv", "sw-en.tsv"):
        (tmp_path / name).write_text("source\ttarget\na\tb\nc\td\n", encoding="utf-8")
    assert list(load_guard_data(tmp_path).sets) == ["de"]
    (record,) = caplog.records
    assert "which are skipped: sw." in record.getMessage()


def test_both_halves_of_questions_are_of_one_part(tmp_path, bitext):
    write_questions(tmp_path, bitext)
    for path in list(tmp_path.iterdir()):  # files without a split have the same questions, except the first one
        content = json.loads(path.read_text(encoding="utf-8"))
        del content["data"][0]["paragraphs"][0]["qas"][0]
        (tmp_path / path.name.removeprefix("dev-")).write_text(json.dumps(content), encoding="utf-8")
    dev, test = (load_guard_data(tmp_path, part, halved=True).sets["de"].questions for part in ("dev", "test"))
    assert not set(dev) & set(test)


def test_folders_without_development_data_are_refused(tiny_encoder, tmp_path):
    (tmp_path / "stsb-de-test.csv").write_text("a,b,1\n", encoding="utf-8")
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(MissingFileError, match="no development data"):
            load_guard_data(folder)
    with pytest.raises(MissingFileError, match="none has no data"):
        load_guard_data(tmp_path / "none", halved=True)
    with pytest.raises(UsageError, match="max_loss"):
        structure_guard(tiny_encoder, {}, max_loss=float("nan"))
