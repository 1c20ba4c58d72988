"""The cost model: operations, memory and time of a training step, computed without running it.

    python scripts/benchmarks/costs.py

writes ``results/costs.md``: the model for mBERT, XLM-R base and XLM-R large, and the measurements of the benchmark.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from metaphrase.io.counts import counted
from metaphrase.io.files import read_json

RESULTS = Path(__file__).parent / "results"

#: Number of layers of DAP's head.
HEAD_LAYERS = 2
#: Bytes that a layer saves for the backward pass, per token and hidden unit, in bf16; twice that in float32.
ACTIVATION_BYTES = 34
#: An H200: assumed speed of bf16 matrix products, memory bandwidth, and expected utilisation.
H200_FLOPS, H200_BYTES, UTILISATION = 790e12, 4.3e12, 0.4
#: Mean pieces of a Tatoeba pair, source and target.
TATOEBA = (11.4, 10.8)
FULL = (32.0, 32.0)


@dataclass(frozen=True)
class Encoder:
    """The shape of an encoder, whose feed-forward layers are four times as wide as its states."""

    layers: int
    hidden: int
    vocabulary: int

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of a layer, including biases and norms."""
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def parameters(self) -> int:
        """Number of parameters, including word embeddings and 514 positions."""
        return self.layers * self.layer_parameters + (self.vocabulary + 514) * self.hidden


ENCODERS = {
    "mBERT": Encoder(12, 768, 119_547),
    "XLM-R base": Encoder(12, 768, 250_002),
    "XLM-R large": Encoder(24, 1024, 250_002),
}


def step_flops(
    encoder: Encoder, recipe: str, source: float, target: float, length: float = 32, scored: float | None = None
) -> float:
    """Return the forward operations on real tokens; a training step takes three times as many.

    A multiplication with an addition counts as two.

    Args:
        encoder: The encoder.
        recipe: ``"tr"``, ``"tr-tlm"`` (20 % of the pieces predicted) or ``"dap"``.
        source: Number of source tokens.
        target: Number of target tokens.
        length: Tokens per sentence, for the quadratic cost of attention.
        scored: Positions that DAP projects onto the vocabulary; None for all target tokens.

    >>> round(step_flops(ENCODERS["mBERT"], "tr", 32, 32) / 1e9, 1)
    11.0
    """
    hidden, tokens = encoder.hidden, source + target
    layer = 2 * encoder.layer_parameters
    operations = encoder.layers * tokens * (layer + 4 * length * hidden)
    projection = 2 * hidden * (encoder.vocabulary + hidden)
    if recipe == "tr-tlm":
        operations += encoder.layers * tokens * (layer + 8 * length * hidden) + 0.2 * tokens * projection
    if recipe == "dap":
        operations += (
            HEAD_LAYERS * tokens * (layer + 8 * length * hidden) + (target if scored is None else scored) * projection
        )
    return operations


def persistent_bytes(encoder: Encoder, recipe: str) -> int:
    """Return the bytes of weights, gradients and AdamW's two moments in float32, including the head."""
    head = HEAD_LAYERS * encoder.layer_parameters if recipe == "dap" else 0
    return 16 * (encoder.parameters + head)


def activation_bytes(encoder: Encoder, recipe: str, tokens: float, *, itemsize: int = 2) -> float:
    """Return the bytes that the layers save for the backward pass, in bf16 or float32."""
    layers = encoder.layers + (HEAD_LAYERS if recipe == "dap" else 0)
    return layers * tokens * encoder.hidden * ACTIVATION_BYTES * itemsize / 2


def step_seconds(encoder: Encoder, recipe: str, pairs: int, lengths: tuple[float, float]) -> float:
    """Return the seconds of a training step on an H200 at 40 % utilisation, including the optimiser's memory traffic."""
    source, target = (pairs * length for length in lengths)
    operations = 3 * step_flops(encoder, recipe, source, target, sum(lengths) / 2)
    return operations / (H200_FLOPS * UTILISATION) + 44 / 16 * persistent_bytes(encoder, recipe) / H200_BYTES


def model_table(pairs: int = 1024) -> str:
    """Format the model as Markdown: a padding-free step at Tatoeba's lengths and at full length."""
    lines = [
        f"A step of {pairs:,} pairs, padding-free, at Tatoeba's lengths / all 32 tokens. Weights: with gradients and AdamW's "
        "moments, float32. Activations: bf16. Time: an H200, assumed to reach 40 % of 790 TFLOP/s.",
        "",
        "| encoder | recipe | weights, GB | activations, GB | TFLOP | ms |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for name, encoder in ENCODERS.items():
        for recipe in ("tr", "tr-tlm", "dap"):
            cells = []
            for lengths in (TATOEBA, FULL):
                source, target = (pairs * length for length in lengths)
                tokens = (2 if recipe == "tr-tlm" else 1) * (source + target)
                cells.append(
                    (
                        f"{activation_bytes(encoder, recipe, tokens) / 1e9:.1f}",
                        f"{3 * step_flops(encoder, recipe, source, target, sum(lengths) / 2) / 1e12:.0f}",
                        f"{1000 * step_seconds(encoder, recipe, pairs, lengths):.0f}",
                    )
                )
            both = " | ".join(f"{short} / {long}" for short, long in zip(*cells, strict=True))
            lines.append(f"| {name} | `{recipe}` | {persistent_bytes(encoder, recipe) / 1e9:.1f} | {both} |")
    return "\n".join(lines)


def measured_table() -> str:
    """Format measured steps next to the model: activations in float32 and the achieved rate."""
    lines = [
        "| measured on | shape | recipe | pairs | seconds | GFLOP/s on real tokens | activations, MB | modelled |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    shapes = {f"{e.layers} × {e.hidden}, V = {e.vocabulary:,}": e for e in ENCODERS.values()}
    for path in sorted(RESULTS.glob("*/dap-vs-tr.json")):
        content = read_json(path)
        facts = content["facts"]
        where = f"{facts['device']}, {counted(facts['threads'], 'thread')}"
        for figure in content["figures"]:
            encoder, given = shapes.get(figure["of"]), figure["given"]
            if encoder is None or not given:
                continue
            recipe, tokens = given["recipe"], given["tokens"]
            (seconds,) = (min(rounds) for rounds in figure["seconds"].values())
            operations = 3 * step_flops(encoder, recipe, *tokens, sum(tokens) / 2 / given["pairs"])
            itemsize = 2 if "NVIDIA" in facts["device"] else 4
            modelled = activation_bytes(encoder, recipe, sum(tokens), itemsize=itemsize) / 1e6
            cells = [where, figure["of"], f"`{recipe}`", str(given["pairs"]), f"{seconds:.2g}"]
            cells += [f"{operations / seconds / 1e9:,.0f}", f"{figure['value']:,.0f}", f"{modelled:,.0f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else "Not measured yet: `make bench`."


def main() -> None:
    """Write the tables."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "costs.md").write_text(f"{model_table()}\n\n{measured_table()}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
