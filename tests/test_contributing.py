"""Following CONTRIBUTING.md adds the objective of docs/adding-an-objective.md: one new file and one line in the table."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import metaphrase

ROOT = Path(__file__).parents[1]
SOURCE = Path(metaphrase.__file__).parent

CHECK = """
import sys, torch
from datasets import Dataset
from metaphrase.encoders.loading import load_encoder
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import Recipe
from metaphrase.training.arguments import AlignmentTrainingArguments
from metaphrase.training.trainer import AlignmentTrainer
import metaphrase
assert metaphrase.__file__.startswith(sys.argv[1]), metaphrase.__file__
model = load_encoder(sys.argv[3], device="cpu")
loss = AlignmentLoss(model, Recipe.load(sys.argv[2]), max_length=24)
rows = [{"source": f"der Hund {i}", "target": f"the dog {i}", "source_lang": "de", "target_lang": "en"} for i in range(8)]
args = AlignmentTrainingArguments(output_dir=sys.argv[4], max_steps=2, per_device_train_batch_size=4, report_to="none",
    use_cpu=True, logging_steps=1, disable_tqdm=True, save_strategy="no")
trainer = AlignmentTrainer(model=model, args=args, train_dataset=Dataset.from_list(rows), loss=loss)
trainer.train()
assert any(log.get("distance", 0) > 0 for log in trainer.state.log_history), trainer.state.log_history
"""


@pytest.mark.slow
def test_the_guide_adds_an_objective(tmp_path, tiny_encoder_dir):
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    name = re.search(r"^1\. `src/metaphrase/(objectives/\w+\.py)`", guide, re.MULTILINE)[1]
    line = re.search(r"^2\. One line in the table of `src/metaphrase/(\S+)`[^`]*\n   `(.+)`", guide, re.MULTILINE)
    own_import = re.search(r"`(from metaphrase\.\S+ import Objective)`", guide)[1]
    page = (ROOT / "docs" / "adding-an-objective.md").read_text(encoding="utf-8")
    code = re.search(r'^```python title="my_package/losses.py"\n(.*?)^```', page, re.DOTALL | re.MULTILINE)[1]
    code = code.replace("from metaphrase import Objective", own_import)
    recipe = "name: own\nterms: [{objective: tr}, {objective: distance, weight: 0.5}]\n"

    package = tmp_path / "src" / "metaphrase"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__", "data"))
    (package / name).write_text(code, encoding="utf-8")
    table = package / line[1]
    before = table.read_text(encoding="utf-8")
    after = re.sub(r"(?m)^( +)(\"tr\": )", rf"\1{line[2]}\n\1\2", before)
    table.write_text(after, encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(recipe, encoding="utf-8")

    changed = [row for row in difflib.ndiff(before.splitlines(), after.splitlines()) if row[0] in "+-"]
    assert len(changed) == 1
    assert changed[0].startswith("+")
    command = [sys.executable, "-c", CHECK, str(package), str(tmp_path / "mine.yaml"), str(tiny_encoder_dir), "out"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
