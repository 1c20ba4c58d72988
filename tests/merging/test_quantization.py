"""Quantized tensors are those of a slow loop, and differ from the originals by at most half a scale."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from metaphrase.merging.quantization import BLOCK, dequantize, quantize

TENSORS = arrays(
    np.float32,
    array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=13),
    elements=st.floats(-1, 1, width=32, allow_subnormal=False) | st.just(2.0**-126),
)


def restored(tensor: torch.Tensor, bits: int) -> torch.Tensor:
    return dequantize(quantize(tensor, bits), tensor.shape, bits)


def quantized_loop(values: list[float], most: int) -> list[float]:
    """Each block of 64 has a scale in bfloat16, each value is a whole number of scales."""
    result = []
    for start in range(0, len(values), 64):
        block = [np.float32(value) for value in values[start : start + 64]]
        scale = np.float32(torch.tensor(max(abs(value) for value in block) / np.float32(most)).bfloat16().item())
        for value in block:
            code = 0 if scale == 0 else max(-most, min(most, round(float(value / scale))))
            result.append(float(np.float32(code) * scale))
    return result


@pytest.mark.parametrize(("bits", "most"), [(8, 127), (4, 7)])
@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 301])
def test_matches_the_loop(bits, most, n):
    tensor = torch.randn(n) * torch.logspace(-6, 3, n)
    assert restored(tensor, bits).tolist() == quantized_loop(tensor.tolist(), most)


@settings(max_examples=60)
@given(array=TENSORS, bits=st.sampled_from([4, 8]))
def test_a_value_changes_by_at_most_half_a_scale(array, bits):
    """A scale below 2**-126 may be flushed to 0, and all values of its block with it."""
    tensor = torch.from_numpy(array.copy())
    error_n = (restored(tensor, bits) - tensor).flatten().abs().double()
    for start in range(0, len(error_n), BLOCK):
        largest = tensor.flatten()[start : start + BLOCK].abs().max().double()
        levels = 2 ** (bits - 1) - 1
        scale = largest / levels
        assert error_n[start : start + BLOCK].max() <= scale * (0.5 + 2**-7) + levels * 2**-126


@settings(max_examples=30)
@given(array=TENSORS, bits=st.sampled_from([4, 8, 16]))
def test_what_was_restored_is_stored_without_loss(array, bits):
    """Except for scales, which are rounded when the largest value of a block is not exact."""
    once = restored(torch.from_numpy(array.copy()), bits)
    assert torch.allclose(restored(once, bits), once, rtol=2**-7, atol=127 * 2**-126)


def test_sizes():
    tensor = torch.randn(10, 13)
    sizes = {bits: sum(one.nbytes for one in quantize(tensor, bits).values()) for bits in (16, 8, 4)}
    assert sizes == {16: 260, 8: 130 + 6, 4: 65 + 6}


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("change", ["missing", "another", "short", "type"])
def test_other_layouts_are_refused(bits, change):
    stored = quantize(torch.randn(100), bits)
    if change == "missing":
        stored.pop("values")
    elif change == "another":
        stored["zeros"] = torch.zeros(2)
    elif change == "short":
        stored["values"] = stored["values"][:-1]
    else:
        stored["values"] = stored["values"].to(torch.int32)
    with pytest.raises(ValueError, match="are stored as"):
        dequantize(stored, (100,), bits)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_scales_that_are_no_scales_are_refused(bad):
    stored = quantize(torch.randn(100), 4)
    stored["scales"][1] = bad
    with pytest.raises(ValueError, match="NaN, infinite or negative"):
        dequantize(stored, (100,), 4)
