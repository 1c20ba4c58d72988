"""Rows on the share of the machine's rate that steps and bulk encoding reach, and on where the rest of a step goes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from costs import Encoder, step_flops
from measuring import Figure, Skipped, interleaved
from rows import DAP, TR, Context, loss_of, step
from settings import SHAPES, batch_of
from torch.profiler import ProfilerActivity, profile

from metaphrase import packed
from metaphrase.mining.bulk import CPU_TOKENS, encode
from metaphrase.modeling.functional import accumulated_in_place

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
    "copies, indices, sums": (
        "copy_",
        "index",
        "gather",
        "scatter",
        "cat",
        "add_",
        "add",
        "mul",
        "sum",
        "fill_",
        "zero_",
    ),
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


def shares(context: Context) -> list[Figure]:
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
    products = partial(layer_products, context, shape.hidden)
    variants = {
        "products, step": products(sum(real), torch.float32),
        "products, encode": products(min(sum(real), CPU_TOKENS), torch.float32),
        "TR step": step(context, losses["TR"], batch),
        "DAP step": step(context, losses["DAP"], batch),
        "encode": lambda: context.clock.of(lambda: encode(model, sentences)),
    }
    capabilities = torch.cpu.get_capabilities()
    if any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16")):
        variants["products, bfloat16"] = products(sum(real), torch.bfloat16)
    for name in variants:
        variants[name]()  # the first call allocates and chooses kernels
    seconds = interleaved(variants, max(context.rounds, 3))
    layers = 2 * LAYERS * 12 * shape.hidden**2
    figures = []
    cases = {
        "step": (sum(real), "float32, as in a step"),
        "encode": (min(sum(real), CPU_TOKENS), "float32, as in bulk encoding"),
        "bfloat16": (sum(real), "bfloat16, as in a step"),
    }
    for name, (tokens, words) in cases.items():
        if rounds := seconds.get(f"products, {name}"):
            rate = layers * tokens / min(rounds) / 1e9
            what = f"matrix products of a layer, {tokens:,} tokens, {words}"
            figures.append(Figure(what, rate, None, "GFLOP/s", {name: rounds}, str(shape)))
    for name, count in operations.items():
        case = "encode" if name == "encode" else "step"
        rounds = {one: seconds[one] for one in (name, f"products, {case}")}
        took, products_took = (min(one) for one in rounds.values())
        share = 100 * count / took / (layers * cases[case][0] / products_took)
        what = f"share of this rate, {name}" + (f", {len(sentences)} sentences" if name == "encode" else "")
        figures.append(Figure(what, share, None, "%", rounds, "starter"))
    return figures


def kind_of(operator: str) -> str:
    """Return the kind of an operator of torch by its name.

    >>> kind_of("aten::native_layer_norm_backward"), kind_of("aten::addmm"), kind_of("AddmmBackward0")
    ('LayerNorm', 'matrix products', 'other')
    """
    return next((kind for kind, parts in KINDS.items() if any(part in operator for part in parts)), OTHER)


def profiled(context: Context) -> list[Figure]:
    """Shares of a TR step of the starter by kinds of operators: forward, backward, clipping and AdamW."""
    if context.device != "cpu":
        raise Skipped("only operators on a CPU are profiled")
    model, texts = context.starter()
    loss, size = loss_of(model, TR), context.batch(64, 64)
    batch = batch_of(loss, texts.pairs(size), context.device)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)

    def work() -> None:
        with packed(model), accumulated_in_place():
            sum(loss(batch).values()).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    work()
    seconds = dict.fromkeys([*KINDS, OTHER], 0.0)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(context.rounds):
            work()
    for event in found.key_averages():
        seconds[kind_of(event.key)] += event.self_cpu_time_total / 1e6
    model.load_state_dict(kept)
    total = sum(seconds.values())
    ordered = sorted(seconds.items(), key=lambda one: (one[0] == OTHER, -one[1]))
    return [
        Figure(kind, 100 * spent / total, None, "%", {}, "starter", {"ms": round(1000 * spent / context.rounds, 1)})
        for kind, spent in ordered
    ]


def profile_table(content: dict[str, Any]) -> str:
    """Format the profile of a step as Markdown."""
    lines = [f"| {content['figures'][0]['of']}, TR step | ms | share |", "|---|--:|--:|"]
    lines += [f"| {one['what']} | {one['given']['ms']:,.0f} | {one['value']:.0f} % |" for one in content["figures"]]
    return "\n".join(lines) + "\n"


ROWS = {"shares": shares, "profile": profiled}
