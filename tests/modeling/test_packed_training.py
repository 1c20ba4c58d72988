"""Training without padding or in micro-batches equals ordinary training: for every objective, with and without gradient
accumulation, in one process and in two."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from metaphrase.objectives import OBJECTIVES
from tests.conftest import mostly_slow
from tests.packed_ranks import ACCUMULATION, differences, differences_in_parts, every_objective

#: Of weights in float64, after two updates.
TOLERANCE = 1e-10


EVERY = every_objective()


@pytest.mark.parametrize("accumulation", mostly_slow([1, 2], [2]))
@pytest.mark.parametrize("recipe", mostly_slow(EVERY, EVERY[::6]), ids=lambda recipe: recipe.name)
def test_packed_training_equals_padded(tiny_encoder_dir, full_bitext, tmp_path, recipe, accumulation):
    difference, moved = differences(tiny_encoder_dir, recipe, full_bitext, tmp_path, accumulation)
    assert moved > 1e-6
    assert difference < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("recipe", EVERY, ids=lambda recipe: recipe.name)
def test_training_in_micro_batches_equals_training_without(tiny_encoder_dir, full_bitext, tmp_path, recipe):
    difference, moved = differences_in_parts(tiny_encoder_dir, recipe, full_bitext, tmp_path, 2)
    assert moved > 1e-6
    assert difference < TOLERANCE


def test_every_objective_is_trained():
    assert {term.objective for recipe in EVERY for term in recipe.terms} == set(OBJECTIVES)


@pytest.mark.slow
def test_packed_training_equals_padded_on_two_ranks(tiny_encoder_dir, bitext_path, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29618"]
    done = subprocess.run(
        [*torchrun, "-m", "tests.packed_ranks", str(tiny_encoder_dir), str(bitext_path), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        found = torch.load(tmp_path / f"rank-{rank}.pt")
        assert len(found) == (len(ACCUMULATION) + 1) * len(EVERY)
        for name, (difference, moved) in found.items():
            assert moved > 1e-6, name
            assert difference < TOLERANCE, name
