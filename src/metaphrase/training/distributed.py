"""Collective operations of distributed training; no-ops with a single process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def broadcast_weights(module: nn.Module) -> None:
    """Copy parameters and buffers of the first process to all others."""
    if _is_distributed():
        for value in module.state_dict().values():
            dist.broadcast(value, src=0)


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Average gradients over processes, as DDP does; a missing gradient counts as zero."""
    if not _is_distributed():
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def highest(values: list[int], device: torch.device) -> list[int]:
    """The maximum of each value over all processes."""
    if not _is_distributed():
        return values
    agreed = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    return [int(value) for value in agreed]


def from_first_process(value: Any) -> Any:
    """The value of the first process, which must be picklable."""
    if not _is_distributed():
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]
