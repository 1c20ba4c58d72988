"""bfloat16: whether to use it, and autocast."""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import nn

from metaphrase.exceptions import UsageError
from metaphrase.io.environment import has_bfloat16_instructions

logger = logging.getLogger(__name__)


def usable_bfloat16(*, wanted: bool, on_cpu: bool | None = None) -> bool:
    """Whether to compute in bfloat16: if requested, except on a CPU without instructions for it, with a warning.

    ``on_cpu`` is by default whether there is no accelerator.
    """
    on_cpu = not torch.accelerator.is_available() if on_cpu is None else on_cpu
    if wanted and on_cpu and not has_bfloat16_instructions():
        logger.warning("This CPU has no bfloat16 instructions, so float32 is faster: bf16 is disabled.")
        return False
    return wanted


def bfloat16(module: nn.Module, *, enabled: bool = True) -> torch.autocast:
    """Compute in bfloat16 on the device of a module inside this block: about twice as fast where the hardware supports it.

    Weights and outputs of norms remain in float32. On a CPU without instructions for bfloat16, the result is the same, but
    slower than in float32; this is logged once.

    Raises:
        UsageError: The module is on a CPU, and in float16.
    """
    device = next((one.device.type for one in module.parameters()), "cpu")
    if enabled and device == "cpu" and any(one.dtype == torch.float16 for one in module.parameters()):
        raise UsageError(
            "This encoder is stored in float16, which a CPU does not combine with bfloat16. Omit --bf16 (bf16), or convert "
            "the encoder with .float()."
        )
    if enabled and device == "cpu" and not has_bfloat16_instructions():
        _warn()
    return torch.autocast(device, torch.bfloat16, enabled=enabled)


@cache
def _warn() -> None:
    logger.warning("This CPU has no bfloat16 instructions, so bfloat16 is slower than float32.")
