"""Choices of mining. They stand apart from the search, so that options are checked before torch is imported."""

from __future__ import annotations

from typing import Literal

Margin = Literal["ratio", "distance", "absolute"]
Retrieval = Literal["max", "forward", "backward", "intersection"]
Index = Literal["exact", "ivf", "hnsw"]
Executor = Literal["local", "slurm", "ray"]
