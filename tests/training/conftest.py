from itertools import pairwise
from pathlib import Path

import pytest


@pytest.fixture
def sts(tmp_path, bitext) -> Path:
    """A guard with labels."""
    folder = tmp_path / "sts"
    folder.mkdir()
    rows = [f'"{one["source"]}","{other["source"]}",{at % 5}\n' for at, (one, other) in enumerate(pairwise(bitext))]
    (folder / "de-dev.csv").write_text("".join(rows), encoding="utf-8")
    return folder
