import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from metaphrase.corpus import load_corpus
from metaphrase.io.digests import model_hash
from metaphrase.training import planning
from metaphrase.training.planning import (
    EPOCHS,
    EVALUATIONS,
    batch_size_for,
    encoding_seconds,
    faster_precision,
    fit_memory,
    free_memory,
    make_plan,
    reason_to_freeze,
    step_seconds,
)
from metaphrase.training.recipe import Recipe

ENCODER = {"parameters": 118_000_000, "table": 96_000_000}
MACHINE = {
    "memory": 20e9,
    "held": 4 * ENCODER["parameters"] + 12 * (ENCODER["parameters"] - ENCODER["table"]),
    "row_bytes": 32 * 384 * 12 * 4 * 34.0,
    "why_frozen": "on a CPU",
}
PLAN = {
    "rows": 8000,
    "fit": fit_memory(64, **MACHINE),
    "step": (torch.float32, 2.0),
    "measuring_seconds": 90.0,
    "minutes": 20.0,
}


def test_the_plan_ends_in_time():
    plan = make_plan(**PLAN)
    assert plan.batch_size == 64
    assert plan.max_steps == EPOCHS * 8000 // 64
    assert plan.freeze_word_embeddings
    assert plan.micro_batch_size is None
    assert (plan.training_minutes, plan.measuring_minutes) == (12.5, 1.5)
    assert plan.reasons[-1] == "about 12 minutes for training and 2 minutes for measurements"
    slow = make_plan(**{**PLAN, "step": (torch.float32, 60.0)})
    assert slow.max_steps == 20
    assert "20 minutes at 60.0 s a step" in " ".join(slow.reasons)
    assert make_plan(**{**PLAN, "step": (torch.float32, 1e6)}).max_steps == 1
    short = make_plan(**{**PLAN, "step": (torch.float32, 1200.0), "measuring_seconds": 1.0})
    assert "measured on the dev set at every step; " in short.reasons[-2]
    assert short.reasons[-1] == "about 20 minutes for training and 1 second for measurements"
    for steps in (*range(1, 70), 375):
        plan = make_plan(**{**PLAN, "step": (torch.float32, 1200 / (steps + 0.5))})
        assert plan.max_steps == steps
        assert (
            len({*range(plan.eval_steps, steps, plan.eval_steps), steps}) <= EVALUATIONS
        )  # those that the plan counts


def test_the_plan_fits_into_memory():
    def plan(**changes):
        return make_plan(**{**PLAN, "fit": fit_memory(64, **{**MACHINE, **changes})})

    tight = plan(memory=1.5e9)
    assert 4 <= tight.micro_batch_size < 128
    assert MACHINE["held"] + tight.micro_batch_size * MACHINE["row_bytes"] <= 1.5e9
    assert any("1.5 GB" in reason for reason in tight.reasons)
    assert plan(memory=1.5e9, divisible=False).micro_batch_size is None
    assert not plan(why_frozen="").freeze_word_embeddings


@pytest.mark.parametrize(("cuda", "memory", "frozen"), [(False, 20e9, True), (True, 20e9, False), (True, 3e9, True)])
def test_word_embeddings_are_frozen_where_memory_or_time_is_short(cuda, memory, frozen):
    assert bool(reason_to_freeze(cuda=cuda, memory=memory, **ENCODER)) is frozen


@pytest.mark.parametrize("freeze", [False, True])
def test_copies_of_the_encoder_take_memory(tiny_encoder, bitext_path, freeze):
    """The original that `anchor` reads shares frozen word embeddings; a momentum encoder has its own."""
    corpus, encoder = load_corpus(bitext_path, languages=["de"]), tiny_encoder[0].auto_model
    whole = sum(weight.numel() for weight in encoder.parameters())
    table = encoder.get_input_embeddings().weight.numel() if freeze else 0
    held = []
    for terms in ([], [{"objective": "anchor"}], [{"objective": "moco", "args": {"projection_size": None}}]):
        recipe = Recipe.from_dict({"name": "r", "terms": [{"objective": "tr"}, *terms]})
        held.append(planning.held_bytes(tiny_encoder, recipe, corpus, freeze=freeze))
    assert held == [16 * whole - 12 * table + 4 * copy for copy in (0, whole - table, whole)]


def plan_of(encoder, bitext_path, max_length):
    return planning.plan_run(
        encoder,
        replace(Recipe.load("tr"), max_length=max_length),
        load_corpus(bitext_path, languages=["de"]),
        minutes=1,
        seed=0,
        dev={},
        tests={},
        further=[(["hund"], 1)],
    )


def test_an_encoder_with_a_decoder_is_planned_without_micro_batches(tiny_encoder, bitext_path, monkeypatch):
    encoder = tiny_encoder[0].auto_model
    encoder.config.is_encoder_decoder, encoder.decoder = True, torch.nn.Identity()
    monkeypatch.setattr(planning, "free_memory", lambda: 1.0)
    assert plan_of(tiny_encoder, bitext_path, 16).micro_batch_size is None


@pytest.mark.parametrize(("max_length", "rows"), [(16, 8), (32, 4)])
def test_the_trial_step_has_the_memory_of_the_plan(tiny_encoder, bitext_path, monkeypatch, max_length, rows):
    """The sentences of a recipe that is twice as long take twice the memory."""
    losses, build = [], planning.build_loss
    monkeypatch.setattr(planning, "build_loss", lambda *a, **k: losses.append(build(*a, **k)) or losses[-1])
    config = tiny_encoder[0].auto_model.config
    weights = tiny_encoder[0].auto_model.state_dict()
    table = weights["embeddings.word_embeddings.weight"].numel()
    held = 16 * sum(weight.numel() for weight in weights.values() if weight.is_floating_point()) - 12 * table
    row = 16 * config.hidden_size * config.num_hidden_layers * 4 * 34
    monkeypatch.setattr(planning, "free_memory", lambda: held + 2 * 8.5 * row)
    plan = plan_of(tiny_encoder, bitext_path, max_length)
    measured, *tried = losses
    assert measured.micro_batch_size is None
    assert [plan.micro_batch_size, *(loss.micro_batch_size for loss in tried)] == [rows] * (1 + len(tried))
    assert tried


@pytest.mark.parametrize("facts", ["MemFree: 10 kB\nMemAvailable:   2048 kB\n", "MemFree: 10 kB\n", None])
def test_the_page_cache_is_free_memory(tmp_path, monkeypatch, facts):
    if facts is not None:
        (tmp_path / "meminfo").write_text(facts)
    monkeypatch.setattr(planning, "MEMORY_FACTS", tmp_path / "meminfo")
    monkeypatch.setattr(planning.os, "sysconf", {"SC_AVPHYS_PAGES": 5, "SC_PAGE_SIZE": 1000}.get)
    assert free_memory() == (2048 * 1024 if "Available" in str(facts) else 5000)


def test_small_corpora_have_small_batches():
    sizes = [batch_size_for(n) for n in (100, 1000, 4000)]
    assert sizes == sorted(sizes) == [16, 32, 64]


def test_measurements_take_the_time_of_their_texts(tiny_encoder, monkeypatch):
    """Long texts that are encoded often count as often."""
    clock = [0.0]
    monkeypatch.setattr(planning.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(
        planning, "encode_texts", lambda model, texts: clock.__setitem__(0, clock[0] + sum(map(len, texts)))
    )
    groups = [([f"{at:03}" for at in range(500)], 1), ([f"{at:0100}" for at in range(50)], 20)]
    wanted = 500 * 3 + 50 * 20 * 100
    assert encoding_seconds(tiny_encoder, groups, seed=0) == pytest.approx(wanted, rel=0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("recipe", "freeze"), [("dap", False), ("ppa", True), ("mexma", False)])
def test_the_trial_step_leaves_no_trace(recipe, freeze, dtype, tiny_encoder, bitext_path):
    def state():
        flags = [(weight.requires_grad, weight.grad is None) for weight in tiny_encoder.parameters()]
        numbers = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
        return model_hash(tiny_encoder), tiny_encoder.training, flags, numbers, list(tiny_encoder.state_dict())

    corpus = load_corpus(bitext_path, languages=["de"])
    before = state()
    short = replace(Recipe.load(recipe), max_length=16)
    assert step_seconds(tiny_encoder, short, corpus, 6, freeze=freeze, seed=1, dtype=dtype) > 0
    assert state() == before


@pytest.mark.parametrize(
    ("able", "seconds", "expected"),
    [
        (False, {torch.float32: 2.0}, (torch.float32, 2.0)),
        (True, {torch.float32: 2.0, torch.bfloat16: 1.0}, (torch.bfloat16, 1.0)),
        (True, {torch.float32: 2.0, torch.bfloat16: 3.0}, (torch.float32, 2.0)),
    ],
)
def test_a_step_runs_in_the_faster_precision(able, seconds, expected, tiny_encoder, monkeypatch):
    """bfloat16 is tried only on a CPU with instructions for it."""
    monkeypatch.setattr(planning, "has_bfloat16_instructions", lambda: able)
    monkeypatch.setattr(planning, "step_seconds", lambda *a, dtype=torch.float32, **k: seconds[dtype])
    assert faster_precision(tiny_encoder, None, None, 6, freeze=True, seed=1) == expected
    assert any("bfloat16" in reason for reason in make_plan(**{**PLAN, "step": expected}).reasons) is (
        expected[0] == torch.bfloat16
    )


def test_a_container_has_the_memory_that_its_limit_leaves(tmp_path, monkeypatch):
    """Its page cache is free, too."""
    facts = {"max": "5000\n", "current": "4000\n", "stat": "anon 3000\ninactive_file 700\nactive_file 200\n"}
    for name, text in facts.items():
        (tmp_path / f"memory.{name}").write_text(text)
    (tmp_path / "meminfo").write_text("MemAvailable: 9000 kB\n")
    monkeypatch.setattr(planning, "MEMORY_FACTS", tmp_path / "meminfo")
    places = (tmp_path / "memory.max", tmp_path / "memory.current", "inactive_file")
    monkeypatch.setattr(planning, "CONTAINER_FACTS", [places])
    assert free_memory() == 5000 - 4000 + 700
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory() == 9000 * 1024
