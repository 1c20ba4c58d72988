"""Collective operations of distributed training; no-ops with a single process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from metaphrase.io.digests import tensors_digest


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def broadcast_weights(module: nn.Module) -> None:
    """Copy parameters and buffers of the first process to all others."""
    if _is_distributed():
        for value in module.state_dict().values():
            _in_place(lambda dense: dist.broadcast(dense, src=0), value)


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Average gradients over processes, as DDP does; a missing gradient counts as zero."""
    if not _is_distributed():
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        _in_place(dist.all_reduce, parameter.grad)
        parameter.grad /= dist.get_world_size()


def _in_place(operation: Callable[[Tensor], Any], tensor: Tensor) -> None:
    """Apply a collective operation to a tensor; a transposed or strided one is copied, as backends need contiguous memory."""
    dense = tensor.contiguous()
    operation(dense)
    tensor.copy_(dense)


def differing(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors whose values differ between processes."""
    if not _is_distributed():
        return []
    digests = {name: tensors_digest({name: value}) for name, value in tensors.items()}
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, digests)
    return [name for name, digest in digests.items() if any(other.get(name) != digest for other in found)]


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
