"""Compiled training: its checkpoints have the names of an uncompiled model, and resume."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from safetensors import safe_open
from sentence_transformers import SentenceTransformer

from metaphrase.encoders.loading import load_encoder
from tests.faults.conftest import digest


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # warnings while it traces end the compilation
def test_a_compiled_run_resumes(make_trainer, tmp_path, monkeypatch):
    packing = []  # each length would be compiled
    monkeypatch.setattr(
        "metaphrase.training.trainer.packed", lambda model, *, enabled: packing.append(enabled) or nullcontext()
    )
    options = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 3, "save_steps": 1}
    whole = make_trainer("run", **options)
    whole.train()
    assert hasattr(whole.model_wrapped, "_orig_mod")
    for file in (tmp_path / "run" / "checkpoint-2").rglob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            assert not [name for name in weights.keys() if "_orig_mod" in name]  # noqa: SIM118 - it is not a mapping
    resumed = make_trainer("run", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert packing == [False, False]
    assert digest(resumed) == digest(whole)
    folder, texts = tmp_path / "run" / "checkpoint-3", ["Guten Morgen", "The cat sleeps"]
    expected = whole.model.encode(texts, convert_to_tensor=True)
    for model in (SentenceTransformer(str(folder), device="cpu"), load_encoder(folder, device="cpu")):
        torch.testing.assert_close(model.encode(texts, convert_to_tensor=True), expected)
