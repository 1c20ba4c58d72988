"""Any values of a recipe: it is built and trains with a finite loss, or is refused with an error that names the key."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
import torch

from metaphrase.encoders.loading import used_piece_ids
from metaphrase.exceptions import MetaphraseError
from metaphrase.io.arguments import Range, hints_of
from metaphrase.modeling.collator import ParallelCollator
from metaphrase.objectives import OBJECTIVES
from metaphrase.objectives.registry import parameters_of
from metaphrase.training.arguments import AlignmentTrainingArguments, check_arguments
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import SETTINGS, Recipe, Schedule
from tests.conftest import as_sentence_transformer

#: Values that no number, choice or switch may have, whatever its range.
NEVER = [
    math.nan,
    math.inf,
    -math.inf,
    "",
    "x",
    "1",
    [],
    [1],
    {},
    {"a": 1},
    10**400,
    -(10**400),
    1e308,
    -1e308,
    b"x",
    object,
]


def parts_of(hint: Any) -> list[Any]:
    """The alternatives of an annotation."""
    if get_origin(hint) in (Annotated, Literal) or not get_args(hint):
        return [hint]
    return list(get_args(hint))


def allowed(draw: random.Random, hint: Any) -> Any:
    """A value of an annotation: often small, sometimes a bound."""
    part = draw.choice(parts_of(hint))
    if part is Schedule:
        return {name: allowed(draw, one) for name, one in hints_of(Schedule).items()}
    if get_origin(part) is Literal:
        return draw.choice(get_args(part))
    if get_origin(part) is not Annotated:
        return {bool: draw.random() < 0.5, NoneType: None, str: "nowhere.tsv"}.get(part)
    kind, bounds = get_args(part)[:2]
    low, high = max(bounds.least, bounds.above, -1e6), min(bounds.most, bounds.below, 1e5 if kind is int else 1e6)
    if kind is int:
        return draw.choices([int(low), draw.randint(int(low), int(min(high, low + 20))), int(high)], [20, 75, 5])[0]
    value = low + (high - low) * draw.choice([0.0, 1e-6, 1e-3, 0.1, 0.5, 1.0])
    return value if value in bounds else low + (high - low) / 2


def arbitrary(draw: random.Random, hint: Any) -> Any:
    """An allowed value, one next to a bound, or one of another type."""
    kind = draw.random()
    if kind < 0.8:
        return allowed(draw, hint)
    bounds = [one for part in parts_of(hint) for one in get_args(part)[1:] if isinstance(one, Range)]
    if kind < 0.9 and bounds:
        near = [bounds[0].least - 1, bounds[0].most + 1, bounds[0].above, bounds[0].below, bounds[0].least + 0.5]
        return draw.choice([value for value in near if math.isfinite(value)] or [True])
    return draw.choice([*NEVER, True, None, 3.0, -1, 0])


def recipe_of(draw: random.Random) -> dict[str, Any]:
    """The content of a recipe of one or two objectives with some of their arguments, and of some settings."""
    terms = []
    for name in draw.sample(sorted(OBJECTIVES), draw.choice([1, 1, 1, 2])):
        parameters = parameters_of(OBJECTIVES[name])
        chosen = draw.sample(sorted(parameters), min(len(parameters), draw.randint(0, 3)))
        args = {key: arbitrary(draw, parameters[key]) for key in chosen}
        if name == "moco":  # the default of 32,000 rows is slow
            args.setdefault("queue_size", draw.randint(1, 50))
        if name == "mexma":
            args.setdefault("layers", 1)
        terms.append({"objective": name, "args": args})
        if draw.random() < 0.2:
            terms[-1]["weight"] = arbitrary(draw, hints_of(type(Recipe.load("tr").terms[0]))["weight"])
    content: dict[str, Any] = {"name": "drawn", "terms": terms, "max_length": draw.randint(8, 24)}
    if draw.random() < 0.1:
        content["max_length"] = arbitrary(draw, hints_of(Recipe)["max_length"])
    for key in ("pooling", "language_embedding"):
        if draw.random() < 0.05:
            content[key] = arbitrary(draw, hints_of(Recipe)[key])
    settings = draw.sample(sorted(SETTINGS), draw.choice([0, 0, 1, 2, 3]))
    content["training"] = {key: arbitrary(draw, SETTINGS[key]) for key in settings}
    return content


def keys_of(content: dict[str, Any]) -> set[str]:
    """The keys that a refusal may name."""
    keys = {"weight", *content, *content["training"]}
    return keys.union(*(term["args"] for term in content["terms"])) - {"name", "terms", "training"}


def outcome(content: dict[str, Any], model: Any, english: Any, rows: list[Any], folder: Path) -> str:
    """Build a recipe and train a batch: "trained", "refused", or what is wrong."""
    try:
        recipe = Recipe.from_dict(content)
        own = hints_of(AlignmentTrainingArguments).keys() & recipe.training.keys()
        settings = {key: recipe.training[key] for key in own}
        arguments = AlignmentTrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", **settings)
        loss = AlignmentLoss(model, recipe, languages=("de", "en"), english_ids=english)
        check_arguments(arguments, loss.objectives)
        batch = ParallelCollator(model.tokenizer, loss.views, seed=1)(rows)
        total = torch.stack(list(loss(batch).values())).sum()
        total.backward()
    except MetaphraseError as error:
        named = any(key in str(error) for key in keys_of(content))
        return "refused" if named and len(str(error)) < 2000 else f"refused without the name of a key: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finite = all(torch.isfinite(p.grad).all() for p in loss.parameters() if p.grad is not None)
    model.zero_grad()
    return "trained" if finite and torch.isfinite(total) else f"the loss is {total}, finite gradients: {finite}"


@pytest.mark.long
@pytest.mark.parametrize(
    ("seed", "cases"), [(1, 60), pytest.param(2, 5000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_any_recipe_trains_or_is_refused_by_the_name_of_a_key(
    seed, cases, tiny_bert_dir, full_bitext, tmp_path, fault
):
    draw = random.Random(seed)
    model = as_sentence_transformer(tiny_bert_dir, "mean")
    english = used_piece_ids([row["target"] for row in full_bitext], model.tokenizer)
    counts = Counter[str]()
    for case in range(cases):
        content = recipe_of(draw)
        found = outcome(content, model, english, full_bitext[:4], tmp_path)
        assert found in ("trained", "refused"), f"case {case}, {found}: {content}"
        counts[found] += 1
    assert min(counts["trained"], counts["refused"]) > cases / 5
    fault("H11", "any values of a recipe", tried=cases, survived=cases)
