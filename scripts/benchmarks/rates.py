"""Rows on the share of the machine's rate that steps and bulk encoding reach, and on where the rest of a step goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from costs import Encoder, step_flops
from measuring import Figure, Skipped, interleaved, ratio
from rows import DAP, TR, Context, loss_of, step
from settings import SHAPES, batch_of
from torch.profiler import ProfilerActivity, profile

from metaphrase import packed
from metaphrase.io.environment import has_bfloat16_instructions
from metaphrase.modeling.bulk import CPU_TOKENS, encode
from metaphrase.modeling.functional import accumulated_in_place
from metaphrase.modeling.precision import bfloat16

#: Repetitions of the products of a layer in a measurement.
LAYERS = 12
#: Kinds of operators by parts of their names; the first one that fits counts.
KINDS = {
    "attention and softmax": ("scaled_dot_product", "softmax"),
    "matrix products": ("aten::mm", "addmm", "bmm", "aten::linear", "aten::matmul", "mkldnn_linear"),
    "GELU": ("gelu",),
    "LayerNorm": ("layer_norm",),
    "embedding": ("embedding",),
    "dropout": ("bernoulli", "dropout"),
    "optimiser": ("adam", "foreach_norm", "foreach_mul"),
    "copies, indices, sums": ("copy_", "index", "gather", "scatter", "cat", "add", "mul", "sum", "fill_", "zero_"),
}
OTHER = "other"


def layer_products(context: Context, hidden: int, tokens: int, dtype: torch.dtype) -> Callable[[], float]:
    """Return a function that times the matrix products of encoder layers: in attention four, and two that are wider."""
    wide = 4 * hidden
    left = {width: torch.randn(tokens, width, device=context.device, dtype=dtype) for width in (hidden, wide)}
    shapes = [(hidden, hidden)] * 4 + [(hidden, wide), (wide, hidden)]
    weights = [torch.randn(*shape, device=context.device, dtype=dtype) for shape in shapes]

    def work() -> None:
        for _ in range(LAYERS):
            for weight in weights:
                torch.mm(left[len(weight)], weight)

    return lambda: context.clock.of(work)


def shares(context: Context) -> Iterator[Figure]:
    """Operations per second of training steps and bulk encoding with the starter, by the rate of its layers' products.

    The operations are those of the cost model, on real tokens. The rate is measured with as many tokens, in the same run.
    """
    if context.device != "cpu":
        raise Skipped("gpu-step measures the utilisation of a GPU")
    model, texts = context.starter()
    shape, size = SHAPES["tiny" if context.tiny else "small"], context.batch(64, 64)
    encoder = Encoder(shape.layers, shape.hidden, shape.vocabulary)
    losses = {"TR": loss_of(model, TR), "DAP": loss_of(model, DAP)}
    pairs = texts.pairs(size)
    batch = batch_of(losses["DAP"], pairs, context.device)
    real = [int(batch[side]["attention_mask"].sum()) for side in ("source", "target")]
    length, scored = sum(real) / 2 / size, real[1] - size
    sentences = [pair[side] for pair in pairs for side in ("source", "target")]
    forward = step_flops(encoder, "tr", *real, length)
    head = step_flops(encoder, "dap", *real, length, scored=0) - forward
    projection = step_flops(encoder, "dap", *real, length, scored=scored) - forward - head
    operations = {
        "TR step": 3 * forward,
        "DAP step": 3 * (forward + head) + 2 * projection,  # frozen word embeddings have no gradient
        "encode": forward,
    }
    tokens = {"step": sum(real), "encode": min(sum(real), CPU_TOKENS)}
    shown = {name: f"a {name}" for name in operations} | {"encode": f"encoding {len(sentences)} sentences"}
    precisions = ["float32"] + ["bfloat16"] * has_bfloat16_instructions()
    variants: dict[str, Callable[[], float]] = {}
    for precision in precisions:
        half = precision == "bfloat16"
        dtype = torch.bfloat16 if half else torch.float32
        for case, count in tokens.items():
            variants[f"products, {case}, {precision}"] = layer_products(context, shape.hidden, count, dtype)
        for name, loss in losses.items():
            variants[f"{name} step, {precision}"] = step(context, loss, batch, bf16=half)
        bulk = partial(encode, model, sentences, bf16=half)
        variants[f"encode, {precision}"] = partial(context.clock.of, bulk)
    for name in variants:
        variants[name]()  # the first call allocates and chooses kernels
    seconds = interleaved(variants, max(context.rounds, 3))
    layers = 2 * LAYERS * 12 * shape.hidden**2
    for precision, (case, count) in product(precisions, tokens.items()):
        rounds = seconds[f"products, {case}, {precision}"]
        work = "bulk encoding" if case == "encode" else "a step"
        what = f"speed of a layer's matrix products, {count:,} tokens as in {work}, {precision}"
        yield Figure(what, layers * count / min(rounds) / 1e9, None, "GFLOP/s", {what: rounds}, str(shape))
    for precision, (name, count) in product(precisions, operations.items()):
        case = "encode" if name == "encode" else "step"
        rounds = {one: seconds[one] for one in (f"{name}, {precision}", f"products, {case}, {precision}")}
        took, products_took = (min(one) for one in rounds.values())
        share = 100 * count / took / (layers * tokens[case] / products_took)
        what = f"speed of {shown[name]} ÷ speed of matrix products, {precision}"
        target = (">=", 60.0) if precision == "bfloat16" and name != "DAP step" else None
        yield Figure(what, share, target, "%", rounds, "starter")
    if len(precisions) > 1:
        for name in operations:
            pair = f"{name}, float32", f"{name}, bfloat16"
            yield ratio(f"time of {shown[name]}, float32 ÷ bfloat16", seconds, *pair, of="starter")


def rounding(context: Context) -> list[Figure]:
    """Embeddings of pairs in bfloat16 and in float32: their cosine, and the retrieval of translations in both."""
    if context.device != "cpu" or not has_bfloat16_instructions():
        raise Skipped("it needs a CPU with instructions for bfloat16")
    model, texts = context.starter()
    pairs = texts.pairs(context.batch(1000, 1000))
    exact, rounded = (
        [
            torch.from_numpy(encode(model, [pair[side] for pair in pairs], normalize_embeddings=True, bf16=half))
            for side in ("source", "target")
        ]
        for half in (False, True)
    )
    cosine = min(float((one * other).sum(dim=1).min()) for one, other in zip(exact, rounded, strict=True))
    before, after = (_retrieved(*sides) for sides in (exact, rounded))
    of, what = f"starter, {len(pairs):,} pairs", "translations retrieved with embeddings in"
    return [
        Figure("smallest cosine between an embedding in bfloat16 and in float32", cosine, (">=", 0.99), "", of=of),
        Figure(f"{what} float32", before, None, "%", of=of),
        Figure(f"{what} bfloat16 − float32, absolute difference", abs(after - before), ("<=", 0.5), "%", of=of),
    ]


def _retrieved(source_nh: torch.Tensor, target_nh: torch.Tensor) -> float:
    similarity_nn = source_nh @ target_nh.T
    right = torch.arange(len(source_nh))
    return 100 * float(torch.cat([similarity_nn.argmax(dim=at) == right for at in (0, 1)]).float().mean())


def kind_of(operator: str) -> str:
    """Return the kind of an operator of torch by its name.

    >>> kind_of("aten::native_layer_norm_backward"), kind_of("aten::addmm"), kind_of("AddmmBackward0")
    ('LayerNorm', 'matrix products', 'other')
    """
    return next((kind for kind, parts in KINDS.items() if any(part in operator for part in parts)), OTHER)


def profiled(context: Context) -> Iterator[Figure]:
    """Shares of a TR step of the starter by kinds of operators: forward, backward, clipping and AdamW."""
    if context.device != "cpu":
        raise Skipped("only operators on a CPU are profiled")
    model, texts = context.starter()
    loss, size = loss_of(model, TR), context.batch(64, 64)
    batch = batch_of(loss, texts.pairs(size), context.device)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)

    def work(*, half: bool) -> None:
        with packed(model), accumulated_in_place():
            with bfloat16(model, enabled=half):
                total = sum(loss(batch).values())
            total.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for half in (False, True) if has_bfloat16_instructions() else (False,):
        work(half=half)
        seconds = dict.fromkeys([*KINDS, OTHER], 0.0)
        with profile(activities=[ProfilerActivity.CPU]) as found:
            for _ in range(context.rounds):
                work(half=half)
        for event in found.key_averages():
            seconds[kind_of(event.key)] += event.self_cpu_time_total / 1e6
        total = sum(seconds.values())
        ordered = sorted(seconds.items(), key=lambda one: (one[0] == OTHER, -one[1]))
        for kind, spent in ordered:
            given = {"kind": kind, "ms": round(1000 * spent / context.rounds, 1), "bf16": half}
            what = f"{kind}, {'bfloat16' if half else 'float32'}"
            yield Figure(what, 100 * spent / total, None, "%", {}, "starter", given)
    model.load_state_dict(kept)


def profile_table(content: dict[str, Any]) -> str:
    """Format the profile of a step as Markdown, with two columns for each precision."""
    columns = [[one for one in content["figures"] if one["given"]["bf16"] is half] for half in (False, True)]
    names = [name for name, column in zip(("float32", "bfloat16"), columns, strict=True) if column]
    heading = " | ".join(f"{name}, ms | share" for name in names)
    lines = [f"| {content['figures'][0]['of']}, TR step | {heading} |", "|---|" + "--:|--:|" * len(names)]
    for kind in (one["given"]["kind"] for one in columns[0]):
        cells = [one for column in columns for one in column if one["given"]["kind"] == kind]
        shown = " | ".join(f"{one['given']['ms']:,.0f} | {one['value']:.0f} %" for one in cells)
        lines.append(f"| {kind} | {shown} |")
    return "\n".join(lines) + "\n"


ROWS = {"shares": shares, "encode-bf16": rounding, "profile": profiled}
