"""Tensors in 16, 8 or 4 bits.

With 16 bits, values are float16. With 8 and 4 bits, each block of 64 values shares a scale, and a value is a whole number of
scales: from -127 to 127, or from -7 to 7, two to a byte. A value differs from its original by at most half the scale of its
block, the largest absolute value of the block divided by 127 or 7.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Bits = Literal[4, 8, 16]

#: Values that share a scale.
BLOCK = 64


def quantize(tensor: Tensor, bits: Bits) -> dict[str, Tensor]:
    """Store a tensor of finite values, of any shape, as ``values`` and, in 8 and 4 bits, ``scales``; see `dequantize`."""
    values_n = tensor.flatten().float()
    if bits == 16:
        return {"values": values_n.half()}
    blocks_bk = F.pad(values_n, (0, -len(values_n) % BLOCK)).view(-1, BLOCK)
    most = 2 ** (bits - 1) - 1
    scales_b = (blocks_bk.abs().amax(dim=1) / most).bfloat16()
    codes_bk = (blocks_bk / scales_b.float()[:, None]).nan_to_num(nan=0.0).round().clamp(-most, most)
    codes_n = codes_bk.flatten()[: len(values_n)].to(torch.int8)
    return {"values": codes_n if bits == 8 else _packed(codes_n), "scales": scales_b}


def dequantize(stored: Mapping[str, Tensor], shape: Sequence[int], bits: Bits) -> Tensor:
    """Restore a tensor from the output of `quantize`.

    Returns:
        The tensor in float32, of the given shape.

    Raises:
        ValueError: The stored tensors are of other names, types or sizes, or have NaN, infinite or negative scales.
    """
    n = math.prod(shape)
    blocks = -(-n // BLOCK)
    layouts = {
        16: {"values": (torch.float16, n)},
        8: {"values": (torch.int8, n), "scales": (torch.bfloat16, blocks)},
        4: {"values": (torch.uint8, -(-n // 2)), "scales": (torch.bfloat16, blocks)},
    }
    found = {name: (tensor.dtype, tensor.numel()) for name, tensor in stored.items()}
    if found != layouts[bits]:
        raise ValueError(f"{n:,} values in {bits} bits are stored as {_words(layouts[bits])}, not as {_words(found)}")
    values_n = stored["values"].flatten()
    if bits == 16:
        result_n = values_n.float()
        valid = bool(torch.isfinite(result_n).all())
    else:
        scales_b = stored["scales"].flatten().float()
        valid = bool((torch.isfinite(scales_b) & (scales_b >= 0)).all())
        codes_n = values_n if bits == 8 else _unpacked(values_n, n)
        result_n = (F.pad(codes_n.float(), (0, -n % BLOCK)).view(-1, BLOCK) * scales_b[:, None]).flatten()[:n]
    if not valid:
        raise ValueError("a value or scale is NaN, infinite or negative")
    return result_n.reshape(tuple(shape))


def _packed(codes_n: Tensor) -> Tensor:
    """Two codes in a byte, the first in its lower half; 8 is added to make them positive."""
    codes_n = F.pad(codes_n + 8, (0, len(codes_n) % 2)).to(torch.uint8)
    return codes_n[0::2] | codes_n[1::2] << 4


def _unpacked(bytes_m: Tensor, n: int) -> Tensor:
    return torch.stack((bytes_m & 15, bytes_m >> 4), dim=1).flatten()[:n].to(torch.int8) - 8


def _words(layout: Mapping[str, tuple[torch.dtype, int]]) -> str:
    return " and ".join(f"{n:,} {name} in {str(dtype).removeprefix('torch.')}" for name, (dtype, n) in layout.items())
