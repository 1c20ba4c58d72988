"""Guards hold or do not by their intervals, and the chosen alpha follows the rule that is stated with it."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metaphrase.evaluation.guards import ALPHAS, RULE, AlphaCurve, Guard, choose_alpha, data_guard, structure_guard
from metaphrase.exceptions import MissingFileError, UsageError
from metaphrase.merging import TaskVector


def row(difference: float, holds: bool = True) -> dict[str, object]:
    return {"before": 50.0, "after": 50 + difference, "difference": difference, "interval": [0, 1], "holds": holds}


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


@settings(max_examples=50, deadline=None)
@given(
    gains=st.lists(st.integers(-3, 3), min_size=11, max_size=11),
    held=st.lists(st.lists(st.booleans(), min_size=11, max_size=11), max_size=3),
)
def test_the_rule(linear, gains, held):
    base, vector = linear
    rows = {alpha: row(gain if alpha else 0) for alpha, gain in zip(ALPHAS, gains, strict=True)}
    guards = [
        guard(f"guard {at}", {alpha: row(0, ok or not alpha) for alpha, ok in zip(ALPHAS, one, strict=True)})
        for at, one in enumerate(held)
    ]
    curve = choose_alpha(base, vector, guard("dev", rows), guards)
    best, gain = 0.0, 0
    for at, alpha in enumerate(ALPHAS):
        if alpha and not all(one[at] for one in held):
            break
        if alpha and gains[at] > gain:
            best, gain = alpha, gains[at]
    assert curve.alpha == best
    assert [point["alpha"] for point in curve.points] == list(ALPHAS)
    assert curve.chosen["gain"]["difference"] == gain
    assert AlphaCurve(**json.loads(json.dumps(curve.to_dict()))) == curve
    assert curve.rule == RULE


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
    measure = data_guard(tiny_encoder, sts).measure
    same, near, far = (measure(model) for model in (tiny_encoder, moved(tiny_encoder, 1e-6), moved(tiny_encoder, 0.3)))
    assert (same["difference"], same["verdict"], same["holds"]) == (0.0, "tie", True)
    assert near["before"] == pytest.approx(100, abs=0.1)
    assert near["holds"]
    assert (far["verdict"], far["holds"]) == ("worse", False)
    assert far["interval"][1] < 0


def test_a_guard_of_parallel_sentences(tiny_encoder, tmp_path, bitext):
    lines = [f"{one['source']}\t{one['target']}\n" for one in bitext]
    (tmp_path / "de-en.dev.tsv").write_text("source\ttarget\n" + "".join(lines), encoding="utf-8")
    (tmp_path / "de-en.test.tsv").write_text("damaged", encoding="utf-8")  # is not read
    one = data_guard(tiny_encoder, tmp_path, max_items=10)
    assert one.name == tmp_path.name
    assert one.measure(moved(tiny_encoder, 0.1))["before"] % 5 == 0  # 10 pairs in two directions
    (tmp_path / "de-en.dev.tsv").rename(tmp_path / "de-en.tsv")
    (tmp_path / "de-en.test.tsv").unlink()
    assert data_guard(tiny_encoder, tmp_path).measure(tiny_encoder)["verdict"] == "tie"


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


def test_folders_without_development_data_are_refused(tiny_encoder, tmp_path):
    (tmp_path / "stsb-de-test.csv").write_text("a,b,1\n", encoding="utf-8")
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(MissingFileError, match="no development data"):
            data_guard(tiny_encoder, folder)
    with pytest.raises(UsageError, match="max_loss"):
        structure_guard(tiny_encoder, {}, max_loss=float("nan"))
