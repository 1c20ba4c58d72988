"""The vocabulary loss alone, compared with ``F.linear`` and ``F.cross_entropy``.

    python scripts/benchmarks/vocabulary.py ours 1024 250002 768 cpu

prints the peak memory in bytes of one forward and backward pass, without its inputs and the embeddings' gradient.
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
    """Return ``n`` states, embeddings and labels. The embeddings have a gradient, as tied embeddings do.

    The scale 1 of the states gives flat logits, 60 gives peaked logits.
    """
    generator = torch.Generator().manual_seed(0)
    table = (0.02 * torch.randn(rows, hidden, generator=generator)).to(device).requires_grad_()
    table.grad = torch.zeros_like(table)
    states = (scale * torch.randn(n, hidden, generator=generator)).to(device).requires_grad_()
    return states, table, torch.randint(rows, (n,), generator=generator).to(device)


def step(kind: str, states: Any, table: Any, labels: Any) -> None:
    """Run one forward and backward pass of ``"ours"``, ``"plain"`` or ``"liger"``."""
    if kind == "plain":
        F.cross_entropy(F.linear(states, table), labels).backward()
    else:
        with accumulated_in_place(), liger_kernel(enabled=kind == "liger"):
            vocabulary_cross_entropy(states, table, labels).backward()


def peak_in_a_process(kind: str, n: int, rows: int, hidden: int, device: str) -> int:
    """Return the peak memory in bytes, measured in a new process, which has no cached memory to reuse."""
    command = [sys.executable, __file__, kind, *map(str, (n, rows, hidden)), device]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main(kind: str, n: str, rows: str, hidden: str, device: str) -> None:
    """Print the peak memory."""
    torch.set_flush_denormal(True)
    torch.set_num_threads(1)
    step(kind, *case(8, 64, int(hidden), device))  # libraries allocate their buffers
    tensors = case(int(n), int(rows), int(hidden), device)
    print(peak_memory(lambda: step(kind, *tensors), device))


if __name__ == "__main__":
    main(*sys.argv[1:])
