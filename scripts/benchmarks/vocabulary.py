"""The vocabulary loss by itself, as ours and as plain ``F.linear`` with ``F.cross_entropy``.

    python scripts/benchmarks/vocabulary.py ours 1024 250002 768 cpu

prints the bytes that one forward and backward pass needs at its peak, beyond its inputs and the table's gradient.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch
from measuring import peak_memory
from torch.nn import functional as F

from metaphrase.modeling.functional import accumulated_in_place, liger_kernel, vocabulary_cross_entropy


def case(n: int, rows: int, hidden: int, device: str, scale: float = 1.0) -> tuple[Any, Any, Any]:
    """States, table and labels; the table's gradient is there, as a tied table's is.

    Args:
        n: Positions.
        rows: Rows of the table.
        hidden: Width.
        device: Where.
        scale: Size of the states: 1 gives flat logits, 60 peaked ones.
    """
    generator = torch.Generator().manual_seed(0)
    table = (0.02 * torch.randn(rows, hidden, generator=generator)).to(device).requires_grad_()
    table.grad = torch.zeros_like(table)
    states = (scale * torch.randn(n, hidden, generator=generator)).to(device).requires_grad_()
    return states, table, torch.randint(rows, (n,), generator=generator).to(device)


def step(kind: str, states: Any, table: Any, labels: Any) -> None:
    """One forward and backward pass, ``"ours"``, ``"plain"`` or ``"liger"``."""
    if kind == "plain":
        F.cross_entropy(F.linear(states, table), labels).backward()
    else:
        with accumulated_in_place(), liger_kernel(enabled=kind == "liger"):
            vocabulary_cross_entropy(states, table, labels).backward()


def peak_in_a_process(kind: str, n: int, rows: int, hidden: int, device: str) -> int:
    """The peak, in bytes, in a fresh process, where no earlier work has left memory to be used again."""
    command = [sys.executable, __file__, kind, *map(str, (n, rows, hidden)), device]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main(kind: str, n: str, rows: str, hidden: str, device: str) -> None:
    """Print the peak."""
    torch.set_flush_denormal(True)
    torch.set_num_threads(1)
    step(kind, *case(8, 64, int(hidden), device))  # libraries take their buffers
    tensors = case(int(n), int(rows), int(hidden), device)
    print(peak_memory(lambda: step(kind, *tensors), device))


if __name__ == "__main__":
    main(*sys.argv[1:])
