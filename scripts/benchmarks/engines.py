"""Rows on other engines for the starter, if they are installed: ``pip install onnx onnxscript onnxruntime openvino``."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from measuring import Figure, Skipped, interleaved, ratio
from rows import Context
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from metaphrase.modeling.bulk import encode

Run = Callable[[Tensor, Tensor], Tensor]


class States(nn.Module):
    """An encoder that returns its last hidden states only."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids_bl: Tensor, mask_bl: Tensor) -> Tensor:
        """Return the states, shape ``(batch, length, hidden)``."""
        return self.encoder(input_ids=ids_bl, attention_mask=mask_bl).last_hidden_state


def onnx_int8(model: SentenceTransformer, folder: Path, threads: int) -> Run:
    """Export the encoder with ``torch.onnx``, and quantise its matrix products dynamically to 8 bits."""
    try:
        import onnxruntime
        from onnxruntime.quantization import QuantType, quantize_dynamic
    except ImportError as error:
        raise Skipped(f"{error.name} is not installed") from error
    if find_spec("onnxscript") is None:  # of torch.onnx.export
        raise Skipped("onnxscript is not installed")
    example = torch.ones(2, 8, dtype=torch.int64)
    exact, quantised = str(folder / "exact.onnx"), str(folder / "int8.onnx")
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=512)}
    encoder = States(model[0].auto_model).eval()
    torch.onnx.export(encoder, (example, example), exact, dynamo=True, dynamic_shapes=(axes, axes), verbose=False)
    quantize_dynamic(exact, quantised, weight_type=QuantType.QInt8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(quantised, options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]

    def run(ids_bl: Tensor, mask_bl: Tensor) -> Tensor:
        given = dict(zip(names, (ids_bl.numpy(), mask_bl.numpy()), strict=True))
        return torch.from_numpy(session.run(None, given)[0])

    return run


def openvino_float(model: SentenceTransformer, folder: Path, threads: int) -> Run:
    """Convert the encoder with ``openvino.convert_model``."""
    try:
        import openvino
    except ImportError as error:
        raise Skipped(f"{error.name} is not installed") from error
    example = torch.ones(2, 8, dtype=torch.int64)
    converted = openvino.convert_model(States(model[0].auto_model).eval(), example_input=(example, example))
    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.compile_model(converted, "CPU", settings)
    return lambda ids_bl, mask_bl: torch.from_numpy(compiled([ids_bl.numpy(), mask_bl.numpy()])[0].copy())


def compared(context: Context, name: str, build: Callable[[SentenceTransformer, Path, int], Run]) -> list[Figure]:
    """Compare bulk encoding with torch and ``SentenceTransformer.encode`` with another engine, on texts of mixed lengths."""
    if context.device != "cpu":
        raise Skipped("these engines are measured on a CPU")
    model, texts = context.starter()
    pairs = texts.pairs(context.batch(100, 100))
    sentences = [pair[side] for pair in pairs for side in ("source", "target")]
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode(False), torch.no_grad():
        run = build(model, Path(folder), torch.get_num_threads())

        def forward(input_ids: Tensor, attention_mask: Tensor, **options: Any) -> BaseModelOutput:
            return BaseModelOutput(last_hidden_state=run(input_ids, attention_mask))

        def theirs() -> Any:
            with patch.object(model[0].auto_model, "forward", forward):
                return model.encode(sentences, batch_size=32, show_progress_bar=False)

        model.eval()
        seconds = interleaved(
            {
                "ours": lambda: context.clock.of(lambda: encode(model, sentences)),
                "theirs": lambda: context.clock.of(theirs),
            },
            context.rounds,
        )
        sides = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (encode(model, sentences), theirs())]
    cosine = float((sides[0] * sides[1]).sum(axis=1).min())
    what = f"time to encode {len(sentences)} texts, {name} ÷ metaphrase, batch 32"
    return [
        ratio(what, seconds, "theirs", "ours", of="starter"),
        Figure(f"smallest cosine between embeddings of {name} and metaphrase", cosine, None, "", of="starter"),
    ]


def encode_vs_onnx(context: Context) -> list[Figure]:
    """Bulk encoding with torch and ``SentenceTransformer.encode`` with onnxruntime in 8 bits."""
    return compared(context, "onnxruntime (int8)", onnx_int8)


def encode_vs_openvino(context: Context) -> list[Figure]:
    """Bulk encoding with torch and ``SentenceTransformer.encode`` with openvino in float32."""
    return compared(context, "openvino (float32)", openvino_float)


ROWS = {"encode-vs-onnx": encode_vs_onnx, "encode-vs-openvino": encode_vs_openvino}
