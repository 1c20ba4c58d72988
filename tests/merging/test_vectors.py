"""Task vectors: arithmetic of weights against slow loops, and files that are exact or refused."""

from __future__ import annotations

import copy
import datetime
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedTokenizerFast

from metaphrase.encoders.debiasing import without_directions
from metaphrase.encoders.pooler import remove_pooler
from metaphrase.exceptions import (
    MetaphraseError,
    MissingFileError,
    ModelError,
    ModelFileError,
    NonFiniteError,
    UsageError,
)
from metaphrase.io.digests import weights_digest
from metaphrase.merging import TaskVector, combine, interpolate
from metaphrase.merging.files import KEY
from metaphrase.merging.projection import find_projection, project_out

FACTS = {"base_name": "starter", "alpha": 0.5, "recipe": {"name": "dap"}, "license": "mit", "card": "# Ein Kärtchen"}


class Small(nn.Module):
    """Two names of one weight, a buffer of whole numbers, and a weight that stays frozen."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.frozen = nn.Parameter(torch.arange(6.0).view(2, 3), requires_grad=False)
        self.weight = nn.Parameter(torch.randn(5, 27, generator=generator))
        self.tied = self.weight
        self.scale = nn.Parameter(torch.randn((), generator=generator))
        self.register_buffer("ids", torch.arange(4))


def merged_loop(base: nn.Module, others: list[nn.Module], alpha: float) -> dict[str, list[float]]:
    weights = {}
    for name, tensor in base.state_dict().items():
        values = tensor.flatten().double().tolist()
        sums = list(values)
        for other in others:
            for at, value in enumerate(other.state_dict()[name].flatten().double().tolist()):
                sums[at] += alpha * (value - values[at])
        weights[name] = sums
    return weights


def weights_of(model: nn.Module) -> dict[str, list[float]]:
    return {name: one.flatten().double().tolist() for name, one in model.state_dict().items()}


def close(one: dict[str, list[float]], other: dict[str, list[float]], tolerance: float = 1e-6) -> bool:
    assert one.keys() == other.keys()
    return all(value == pytest.approx(other[name], abs=tolerance, rel=tolerance) for name, value in one.items())


@pytest.fixture
def vector() -> TaskVector:
    return TaskVector.between(Small(), Small(1), **FACTS)


# ---------------------------------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0, -0.5, 2.0])
def test_merging_matches_the_loop(alpha):
    base, tuned = Small(), Small(1)
    before = weights_of(base)
    assert close(weights_of(interpolate(base, tuned, alpha)), merged_loop(base, [tuned], alpha))
    assert weights_of(base) == before


@settings(max_examples=25)
@given(alpha=st.floats(-2, 2, allow_subnormal=False), seeds=st.lists(st.integers(1, 50), min_size=1, max_size=4))
def test_sums_match_the_loop_in_any_order(alpha, seeds):
    base, others = Small(), [Small(seed) for seed in seeds]
    vectors = [TaskVector.between(base, other) for other in others]
    forward, backward = vectors[0], vectors[-1]
    for one in vectors[1:]:
        forward += one
    for one in reversed(vectors[:-1]):
        backward = one + backward
    wanted = merged_loop(base, others, alpha)
    assert close(weights_of(forward.apply(base, alpha)), wanted, 1e-5)
    assert close(weights_of(backward.apply(base, alpha)), wanted, 1e-5)


@settings(max_examples=25)
@given(one=st.floats(-1, 1, allow_subnormal=False), other=st.floats(-1, 1, allow_subnormal=False))
def test_a_vector_is_linear_in_its_weight(one, other):
    base = Small()
    vector = TaskVector.between(base, Small(1))
    both = vector.scaled(one) + vector.scaled(other)
    assert close(weights_of(both.apply(base)), weights_of(vector.apply(base, one + other)), 1e-5)


def test_the_tuned_model_comes_back(tiny_encoder):
    tuned = copy.deepcopy(tiny_encoder)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_(1e-3 * torch.randn_like(parameter))
    merged = TaskVector.between(tiny_encoder, tuned).apply(tiny_encoder)
    for name, weight in tuned.state_dict().items():
        assert torch.allclose(merged.state_dict()[name], weight, rtol=1e-6, atol=1e-7), name
    assert merged.encode(["Guten Morgen"]) == pytest.approx(tuned.encode(["Guten Morgen"]), abs=1e-5)


def test_an_optional_pooler_that_training_removed_is_no_difference(tiny_bert_dir):
    module = Transformer(str(tiny_bert_dir), model_kwargs={"add_pooling_layer": True})
    base = SentenceTransformer(modules=[module, Pooling(module.get_embedding_dimension())], device="cpu")
    tuned = copy.deepcopy(base)
    remove_pooler(tuned[0].auto_model)
    with torch.no_grad():
        tuned[0].auto_model.encoder.layer[0].output.dense.bias += 1
    assert [*TaskVector.between(base, tuned).differences] == ["0.model.encoder.layer.0.output.dense.bias"]


@pytest.mark.parametrize("normalised", [True, False])
def test_directions_of_a_tuned_model_are_kept(tiny_encoder, tmp_path, normalised):
    if normalised:
        tiny_encoder.append(Normalize())
    directions = torch.linalg.qr(torch.randn(32, 3, dtype=torch.float64))[0].T
    moved = copy.deepcopy(tiny_encoder)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    tuned = without_directions(moved, directions)
    vector = TaskVector.between(tiny_encoder, tuned)
    assert vector.differences.keys() == TaskVector.between(tiny_encoder, moved).differences.keys()
    same = TaskVector.load(vector.save(tmp_path / "v.safetensors")).apply(tiny_encoder)
    assert [type(module) for module in same] == [type(module) for module in tuned]
    for one, model in ((same, tuned), (vector.apply(tiny_encoder, 0.0), without_directions(tiny_encoder, directions))):
        assert one.encode(["the dog", "a cat"]) == pytest.approx(model.encode(["the dog", "a cat"]), abs=1e-3)
    again = TaskVector.between(tuned, without_directions(moved, directions))  # both have the map: an ordinary weight
    assert again.directions is None
    total = (vector + TaskVector.between(tiny_encoder, moved)).directions
    assert (total.T @ total).numpy() == pytest.approx((directions.T @ directions).numpy(), abs=1e-6)
    with pytest.raises(ModelError, match="differ in the shape or presence"):
        TaskVector.between(tuned, tiny_encoder)


def test_a_sum_has_the_principal_directions_of_both(tiny_encoder):
    """The shared axis first, and as many as the larger number."""
    axes = torch.eye(32, dtype=torch.float64)
    one, other = (
        TaskVector.between(tiny_encoder, without_directions(tiny_encoder, axes[rows])) for rows in ([0, 1], [1, 2, 3])
    )
    for both in ((one + other).directions, (other + one).directions):
        assert both.shape == (3, 32)
        assert both[0].abs().argmax() == 1
        assert both[:, 4:].abs().max() < 1e-6


def with_prompts(model, default, **prompts):
    model = copy.deepcopy(model)
    model.prompts, model.default_prompt_name = prompts, default
    return model


@pytest.mark.parametrize(
    ("base", "tuned", "wanted"),
    [
        ((None, {"query": ""}), ("query", {"query": "q: "}), "tuned"),
        ((None, {"query": "q: "}), ("query", {"query": "q: "}), "tuned"),
        (("query", {"query": "q: "}), (None, {"query": "q: "}), "tuned"),
        (("query", {"query": "q: "}), ("query", {"query": "q: "}), "tuned"),
        (("query", {"query": "q: "}), (None, {"query": "", "document": ""}), "base"),
        ((None, {}), ("query", {"query": None, "document": "d: "}), (None, {"document": "d: "})),
    ],
)
def test_prompts_are_those_of_the_tuned_model_if_it_has_any(tiny_encoder, tmp_path, base, tuned, wanted):
    wanted = {"base": base, "tuned": tuned}[wanted] if isinstance(wanted, str) else wanted
    models = [with_prompts(tiny_encoder, default, **prompts) for default, prompts in (base, tuned)]
    vector = TaskVector.between(*models)
    for one in (vector, vector + vector, TaskVector.load(vector.save(tmp_path / "v.safetensors"))):
        merged = one.apply(models[0])
        assert (merged.default_prompt_name, merged.prompts) == wanted


def test_settings_are_those_of_the_tuned_model(tiny_encoder, tmp_path):
    tuned = copy.deepcopy(tiny_encoder)
    assert TaskVector.between(tiny_encoder, tuned).settings is None
    tuned.max_seq_length, tuned.truncate_dim, tuned.similarity_fn_name = 17, 16, "dot"
    vector = TaskVector.between(tiny_encoder, tuned)
    for one in (vector, vector + vector, TaskVector.load(vector.save(tmp_path / "v.safetensors"))):
        merged, unchanged = (one.apply(tiny_encoder, alpha) for alpha in (0.5, 0))
        assert (merged.max_seq_length, merged.truncate_dim, merged.similarity_fn_name) == (17, 16, "dot")
        assert (unchanged.max_seq_length, unchanged.truncate_dim, unchanged.similarity_fn_name) == (32, None, "cosine")
    assert (tiny_encoder.max_seq_length, tiny_encoder.truncate_dim, tiny_encoder.similarity_fn_name) == (
        32,
        None,
        "cosine",
    )
    merged = TaskVector.between(tuned, tiny_encoder).apply(tuned)
    assert (merged.max_seq_length, merged.truncate_dim, merged.similarity_fn_name) == (32, None, "cosine")


def test_a_sum_keeps_each_setting_on_which_the_vectors_agree(tiny_encoder):
    shorter = copy.deepcopy(tiny_encoder)
    shorter.max_seq_length = 17
    smaller = copy.deepcopy(shorter)
    smaller.truncate_dim = 16
    longer = copy.deepcopy(tiny_encoder)
    longer.max_seq_length = 18
    models = (shorter, smaller, longer, tiny_encoder)
    one, other, another, plain = (TaskVector.between(tiny_encoder, model) for model in models)
    assert (one + other).settings == (other + one).settings == {"max_seq_length": 17}
    assert (one + another).settings is (one + plain).settings is None
    assert combine([one, other]).settings == {"max_seq_length": 17}  # though neither changes a weight


def test_a_sum_needs_vectors_and_a_finite_weight(tiny_encoder):
    with pytest.raises(UsageError, match="no task vectors to add"):
        combine([])
    vector = TaskVector.between(tiny_encoder, tiny_encoder)
    for alpha in (math.nan, "auto"):
        with pytest.raises(UsageError, match="'alpha' of combine"):
            combine([vector], alpha)


MERGED = """
import numpy as np
import torch
from metaphrase.io.digests import weights_digest
from metaphrase.merging import interpolate

base, tuned = torch.nn.Linear(99, 99, bias=False), torch.nn.Linear(99, 99, bias=False)
for seed, model in enumerate((base, tuned)):  # the numbers of torch depend on the instruction set
    model.weight.data = torch.from_numpy(np.random.default_rng(seed).normal(size=(99, 99)).astype(np.float32))
print(weights_digest(interpolate(base, tuned, 0.3)))
"""


@pytest.mark.long  # imports in three processes
def test_merged_weights_do_not_depend_on_the_instruction_set():
    environments = [{"ATEN_CPU_CAPABILITY": one} for one in ("default", "avx2")] + [{}]
    plain = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"}
    command = [sys.executable, "-c", MERGED]
    children = [subprocess.Popen(command, env=plain | one, stdout=subprocess.PIPE, text=True) for one in environments]
    digests = {child.communicate()[0] for child in children}
    assert len(digests) == 1
    assert len(digests.pop().strip()) == 32


def test_a_sum_of_vectors_with_other_prompts_has_those_of_the_base(tiny_encoder):
    one, other = (
        TaskVector.between(tiny_encoder, with_prompts(tiny_encoder, "query", query=text)) for text in ("a: ", "b: ")
    )
    both = one + other
    assert (both.prompts, both.default_prompt_name) == (None, None)
    merged = both.apply(tiny_encoder)
    assert (merged.prompts, merged.default_prompt_name) == (tiny_encoder.prompts, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalised", [True, False])
def test_directions_that_were_removed_in_two_steps_are_kept(tiny_encoder, normalised, dtype):
    if normalised:
        tiny_encoder.append(Normalize())
    base = tiny_encoder.to(dtype)
    direction_kh = torch.linalg.qr(torch.randn(32, 5, dtype=torch.float64))[0].T
    once, other = (without_directions(base, direction_kh[part]) for part in (slice(3), slice(1, 5)))
    twice = without_directions(once, direction_kh[3:])
    for start, count in ((base, 5), (once, 2)):
        vector = TaskVector.between(start, twice)
        assert (len(vector.directions), vector.differences) == (count, {})
        merged = vector.apply(start)
        texts = ["the dog", "a cat"]
        assert merged.encode(texts) == pytest.approx(
            twice.encode(texts), abs=0.02 if dtype == torch.bfloat16 else 1e-5
        )
    oblique_kh = torch.ones(1, 32, dtype=torch.float64) / 32**0.5
    assert len(TaskVector.between(base, without_directions(other, oblique_kh)).directions) == 5
    assert len(find_projection(without_directions(once, direction_kh[:1]), 9)[1]) == 3  # removed before
    project_out(other, oblique_kh)
    with pytest.raises(ModelError, match="differ in the shape or presence"):  # the maps do not commute
        TaskVector.between(base, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_directions_are_found_in_any_precision(tiny_encoder, dtype):
    direction_kh = torch.linalg.qr(torch.randn(32, 2))[0].T
    model = tiny_encoder.to(dtype)
    assert find_projection(model) is None
    project_out(model, direction_kh)
    places, found_kh = find_projection(model)
    assert places == [len(model) - 1]
    assert torch.linalg.svdvals(found_kh @ direction_kh.double().T).tolist() == pytest.approx([1, 1], abs=1e-3)


def test_only_changed_weights_are_kept_and_the_others_are_shared():
    base, tuned = Small(), Small(1)
    vector = TaskVector.between(base, tuned)
    assert set(vector.differences) == {"weight", "tied", "scale"}
    merged = vector.apply(base)
    assert merged.frozen is base.frozen
    assert merged.tied is merged.weight is not base.weight
    assert TaskVector.between(base, copy.deepcopy(base)).differences == {}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_base_in_half_precision_keeps_small_changes(dtype):
    """Training is in float32, and half precision would round most of a short training away."""
    base = Small().to(dtype)
    before = copy.deepcopy(base.state_dict())
    tuned = copy.deepcopy(base).float()
    with torch.no_grad():
        tuned.weight += 1e-5
    for alpha in (0.5, 1.0):
        merged = interpolate(base, tuned, alpha)
        assert merged.weight.dtype == torch.float32
        assert torch.allclose(
            merged.weight - base.weight.float(), torch.full_like(tuned.weight, alpha * 1e-5), rtol=0.01
        )
    assert interpolate(base, tuned, 0).weight.dtype == dtype
    assert all(torch.equal(one, before[name]) for name, one in base.state_dict().items())


def test_a_sum_keeps_what_both_agree_on():
    base = Small()
    one = TaskVector.between(base, Small(1), **FACTS)
    other = TaskVector.between(base, Small(2), **FACTS | {"license": "apache-2.0", "recipe": None, "alpha": 0.7})
    both = one + other
    assert (both.base_name, both.alpha, both.recipe) == ("starter", 1.0, None)
    assert (both.license, both.card) == ("mit AND apache-2.0", FACTS["card"])
    assert (one + one).alpha == 0.5
    unknown = TaskVector.between(base, Small(3), **FACTS | {"license": None})
    assert (one + unknown).license is (unknown + one).license is None


# ------------------------------------------------------------------------------------------------------------ refusals


def test_another_base_is_refused(vector):
    other = Small(3)
    for base in (Small(1), Small().half()):
        with pytest.raises(ModelError, match=r"weights of starter with the digest \w+, but .* Load the model"):
            vector.apply(base)
    with pytest.raises(ModelError, match="different bases"):
        vector + TaskVector.between(other, Small())


def test_weights_of_other_shapes_or_names_are_refused(vector):
    wider, extra, whole = Small(1), Small(1), Small(1)
    wider.weight = wider.tied = nn.Parameter(torch.zeros(5, 28))
    extra.more = nn.Parameter(torch.zeros(1))
    whole.ids += 1
    with pytest.raises(ModelError, match="differ in the shape or presence of weight, tied"):
        TaskVector.between(Small(), wider)
    with pytest.raises(ModelError, match="differ in the shape or presence of more"):
        TaskVector.between(Small(), extra)
    with pytest.raises(ModelError, match="ids differs, and is of type torch"):
        TaskVector.between(Small(), whole)
    for name, weight in (("other", torch.ones(3)), ("weight", torch.ones(3))):
        forged = TaskVector({name: weight}, base=weights_digest(Small()))
        with pytest.raises(ModelError, match=f"in another shape: {name}"):
            forged.apply(Small())
    with pytest.raises(ModelError, match="weight has another shape"):
        vector + TaskVector({"weight": torch.ones(3)}, base=vector.base)


def test_other_modules_are_refused(tiny_encoder):
    other = copy.deepcopy(tiny_encoder)
    other[1] = Pooling(32, "mean")
    with pytest.raises(
        ModelError, match=r"different settings of them \(Transformer, Pooling cls; Transformer, Pooling mean\)"
    ):
        TaskVector.between(tiny_encoder, other)


def test_another_vocabulary_of_the_same_size_is_refused(tiny_encoder):
    other = copy.deepcopy(tiny_encoder)
    state = json.loads(other.tokenizer.backend_tokenizer.to_str())
    pieces = state["model"]["vocab"]
    pieces["the"], pieces["a"] = pieces["a"], pieces["the"]
    other[0].processor = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))
    with pytest.raises(ModelError, match="tokenizers of the two models have different vocabularies"):
        TaskVector.between(tiny_encoder, other)


def test_nan_and_infinity_are_refused(vector):
    broken = Small(1)
    broken.weight.data[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="weight of one of the models"):
        TaskVector.between(Small(), broken)
    with pytest.raises(NonFiniteError, match="Choose a smaller alpha"):
        vector.scaled(3e38).apply(Small(), 2.0)
    for alpha in (float("nan"), float("inf"), "auto"):
        with pytest.raises(UsageError, match="alpha"):
            vector.apply(Small(), alpha)


# --------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(("bits", "levels"), [(16, 2**10), (8, 127), (4, 7)])
def test_a_file_holds_the_vector(vector, tmp_path, bits, levels):
    read = TaskVector.load(vector.save(tmp_path / "new" / "vector.safetensors", bits=bits))
    assert {name: getattr(read, name) for name in FACTS} == FACTS
    assert read.base == vector.base
    assert read.differences.keys() == vector.differences.keys()
    for name, difference in vector.differences.items():
        assert read.differences[name].shape == difference.shape
        assert (read.differences[name] - difference).abs().max() <= 0.51 * difference.abs().max() / levels
    assert close(weights_of(read.apply(Small(), 1)), weights_of(Small(1)), 0.52 * 5.16 / levels)


@pytest.mark.parametrize("alpha", [np.float32(0.5), torch.tensor(0.5), 0.5])
def test_numbers_of_other_libraries_are_stored(vector, tmp_path, alpha):
    path = replace(vector, alpha=alpha).save(tmp_path / "vector.safetensors")
    assert TaskVector.load(path).alpha == 0.5


@pytest.mark.parametrize(
    "facts",
    [{"alpha": float("nan")}, {"alpha": "0.5"}, {"license": ["mit"]}, {"recipe": "tr"}, {"prompts": {"a": None}}],
)
def test_a_file_that_could_not_be_read_is_not_written(vector, tmp_path, facts):
    path = vector.save(tmp_path / "vector.safetensors")
    before = path.read_bytes()
    with pytest.raises(UsageError, match=f"cannot be saved, because '{next(iter(facts))}'"):
        replace(vector, **facts).save(path)
    assert path.read_bytes() == before


def test_models_that_project_other_directions_out_are_refused(tiny_encoder):
    models = [copy.deepcopy(tiny_encoder) for _ in range(3)]
    generator = torch.Generator().manual_seed(0)
    for model in models[:2]:
        project_out(model, torch.linalg.qr(torch.randn(32, 4, generator=generator))[0].T)
    with pytest.raises(ModelError, match="--debias"):
        TaskVector.between(*models[:2])
    assert TaskVector.between(models[0], copy.deepcopy(models[0])).differences == {}
    assert TaskVector.between(models[2], models[0]).directions is not None


def test_a_date_in_a_recipe_is_text(vector, tmp_path):
    """YAML reads 2026-01-31 as a date."""
    dated = replace(vector, recipe={"name": "tr", "paper": datetime.date(2026, 1, 31)})
    read = TaskVector.load(dated.save(tmp_path / "v.safetensors"))
    assert read.recipe == {"name": "tr", "paper": "2026-01-31"}


def test_an_empty_vector_is_stored(tmp_path):
    read = TaskVector.load(TaskVector.between(Small(), Small()).save(tmp_path / "v.safetensors", bits=4))
    assert weights_of(read.apply(Small())) == weights_of(Small())


def test_a_file_follows_the_umask_and_replaces_an_older_one(vector, tmp_path, assert_follows_umask):
    folder = tmp_path / "new"
    for bits in (16, 4):
        vector.save(folder / "vector.safetensors", bits=bits)
    assert [path.name for path in folder.iterdir()] == ["vector.safetensors"]
    assert_follows_umask(folder)


def test_what_a_file_cannot_hold_is_refused(vector, tmp_path):
    with pytest.raises(NonFiniteError, match="too large for 16 bits"):
        vector.scaled(1e6).save(tmp_path / "v.safetensors")
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match="'bits'"):
        vector.save(tmp_path / "v.safetensors", bits=5)


def rewritten(path: Path, change) -> None:
    """Write a file again after a change of its tensors and metadata."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        content = json.loads(file.metadata()[KEY])
    text = change(tensors, content)
    save_file(tensors, path, {KEY: text if isinstance(text, str) else json.dumps(content)})


def set_nan(tensors, content):
    tensors["weight/scales"][0] = float("nan")


def setter(name, value):
    return lambda tensors, content: content.__setitem__(name, value)


DAMAGE = {
    "NaN scales": (set_nan, "weight: a value or scale is NaN"),
    "another value": (lambda t, c: t["weight/values"].add_(1), "does not match its digest"),
    "another alpha": (setter("alpha", 0.7), "does not match its digest"),
    "a missing tensor": (lambda t, c: t.pop("weight/scales"), "weight: 135 values in 4 bits are stored as"),
    "an unknown tensor": (lambda t, c: t.__setitem__("pickle", torch.ones(1)), "do not list 'pickle'"),
    "a huge shape": (
        lambda t, c: c["shapes"].__setitem__("weight", [2**31 - 1] * 4),
        "values in 4 bits are stored as",
    ),
    "a negative shape": (
        lambda t, c: c["shapes"].__setitem__("weight", [-5, -27]),
        "'shapes' of its metadata must be",
    ),
    "alpha as text": (setter("alpha", "0.5"), "'alpha' of its metadata must be a number"),
    "alpha NaN": (setter("alpha", float("nan")), "'alpha' of its metadata must be a number"),
    "bits": (setter("bits", 3), "'bits' of its metadata must be one of"),
    "base as a number": (setter("base", 3), "'base' of its metadata must be text"),
    "recipe as a list": (setter("recipe", []), "'recipe' of its metadata must be keys and values"),
    "a missing key": (lambda t, c: c.pop("shapes"), "missing or unknown: 'shapes'"),
    "an unknown default prompt": (setter("default_prompt_name", "query"), "which its 'prompts' do not have"),
    "an unknown setting": (
        setter("settings", {"device": "cpu"}),
        "'settings' of its metadata has the unknown key 'device'",
    ),
    "a wrong setting": (setter("settings", {"truncate_dim": 0}), "'truncate_dim' of its metadata must be"),
    "an unknown key": (setter("code", "x"), "missing or unknown: 'code'"),
    "a later format": (setter("version", 2), "its format is 2, but this version of metaphrase reads up to 1"),
    "no object": (lambda t, c: "[]", "are not a JSON object"),
    "no JSON": (lambda t, c: "{", "cannot be read as a task vector: "),
    "deep JSON": (lambda t, c: "[" * 100_000, "cannot be read as a task vector: "),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_file_is_refused(vector, tmp_path, what, fault):
    change, message = DAMAGE[what]
    path = vector.save(tmp_path / "v.safetensors", bits=4)
    rewritten(path, change)
    with pytest.raises(ModelFileError, match="Download or write the file again") as caught:
        TaskVector.load(path)
    assert message in str(caught.value)
    fault("J7", f"a task vector with {what}", tried=1, survived=1)


def test_a_truncated_or_flipped_file_is_refused(vector, tmp_path, fault):
    path = vector.save(tmp_path / "v.safetensors", bits=8)
    content = path.read_bytes()
    places = range(0, len(content), 17)
    for at in places:
        flipped = bytearray(content)
        flipped[at] ^= 0x10
        for damaged in (content[:at], bytes(flipped)):
            path.write_bytes(damaged)
            with pytest.raises(MetaphraseError):
                TaskVector.load(path)
    tried = 2 * len(places)
    fault("J7", "a task vector that is truncated, or of which a bit is flipped", tried=tried, survived=tried)


def test_other_files_are_refused(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ModelFileError, match="is another kind of file"):
        TaskVector.load(tmp_path / "other.safetensors")
    with pytest.raises(MissingFileError, match="There is no task vector"):
        TaskVector.load(tmp_path / "missing.safetensors")
    with pytest.raises(MissingFileError, match="is a folder, not a task vector"):
        TaskVector.load(tmp_path)


def test_vectors_are_added_each_with_its_own_weight():
    base, one, other = (nn.Linear(2, 1) for _ in range(3))
    vectors = [TaskVector.between(base, tuned, alpha=alpha) for tuned, alpha in ((one, 0.2), (other, 0.8))]
    merged = combine(vectors).apply(base)
    wanted = base.weight + 0.2 * (one.weight - base.weight) + 0.8 * (other.weight - base.weight)
    torch.testing.assert_close(merged.weight, wanted)
    scaled = vectors[0].scaled(0.5)
    assert scaled.alpha == 1
    torch.testing.assert_close(scaled.apply(base).weight, base.weight + 0.5 * (one.weight - base.weight))


@pytest.mark.parametrize(("degrees", "same"), [(0, True), (3, True), (30, False)])
def test_models_without_the_same_directions_are_not_merged(tiny_encoder, degrees, same):
    axes, angle = torch.eye(32, dtype=torch.float64), math.radians(degrees)
    turned = (math.cos(angle) * axes[0] + math.sin(angle) * axes[1])[None]
    base, tuned = (without_directions(tiny_encoder, one) for one in (axes[:1], turned))
    if same:
        assert TaskVector.between(base, tuned).directions is None
    else:
        with pytest.raises(ModelError, match="1 and 1, but not the same"):
            TaskVector.between(base, tuned)
    with pytest.raises(ModelError, match="1 and 2, but not the same"):
        TaskVector.between(base, without_directions(tiny_encoder, axes[:2]))


def test_a_map_that_removes_a_direction_in_part_is_no_projection(tiny_encoder):
    weight = torch.eye(32)
    weight[0, 0] = 0.05
    tiny_encoder.append(Dense(32, 32, bias=False, activation_function=None, init_weight=weight))
    assert find_projection(tiny_encoder) is None


def test_a_map_that_is_not_finite_is_no_projection(tiny_encoder):
    tiny_encoder.append(Dense(32, 8, bias=False))
    weight = torch.full((8, 8), torch.nan)
    tiny_encoder.append(Dense(8, 8, bias=False, activation_function=None, init_weight=weight))
    assert find_projection(tiny_encoder) is None
