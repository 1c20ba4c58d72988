"""The rows of the benchmark: each measures one statement and yields its figures."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import vocabulary
from costs import ENCODERS, step_flops
from datasets import Dataset
from measuring import Clock, Figure, Skipped, held_activations, interleaved, peak_memory, ratio
from official import OfficialStep
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from settings import (
    SHAPES,
    Pair,
    RealTexts,
    Shape,
    Words,
    batch_of,
    random_encoder,
    recipe,
    starter,
    subset_ids,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import TrainerCallback

import metaphrase.objectives.vocabulary as vocabulary_module
from metaphrase import AlignmentLoss, AlignmentTrainer, AlignmentTrainingArguments, Recipe, load_corpus, packed
from metaphrase.encoders.loading import used_piece_ids
from metaphrase.io.files import DEMO
from metaphrase.modeling.bulk import encode
from metaphrase.modeling.functional import accumulated_in_place, vocabulary_cross_entropy
from metaphrase.modeling.precision import bfloat16
from metaphrase.modeling.views import UNSCORED

#: Rows of DAP's English subset vocabulary (its Table 6 fits 37,000).
ENGLISH = 37_000
TR = recipe("tr")
DAP = recipe("dap")


@dataclass
class Context:
    """The settings of a measurement.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        rounds: Rounds of each measurement.
        shapes: Names of the shapes whose steps are measured; targets apply to the first one if it is ``"base"``.
        texts: Folder of test sets for the starter; None uses bundled pairs.
        quick: Skip the slowest measurements: batches of 256, full-length batches, and step times as published.
        tiny: Use sizes that take seconds.
    """

    device: str
    rounds: int
    shapes: Sequence[str]
    texts: str | None = None
    quick: bool = False
    tiny: bool = False

    @property
    def clock(self) -> Clock:
        """Return the clock of the device."""
        return Clock(self.device)

    def batch(self, cpu: int, cuda: int) -> int:
        """Return the batch size for the device."""
        return 6 if self.tiny else cuda if self.device == "cuda" else cpu

    def target(self, shape: str, sense: str, bound: float) -> tuple[str, float] | None:
        """Return a target that applies to XLM-R base only."""
        return (sense, bound) if shape in ("base", "mbert") else None

    def encoders(self) -> Iterator[tuple[str, Shape, SentenceTransformer, Words]]:
        """Iterate over random encoders with pairs for each."""
        for name in self.shapes:
            yield name, SHAPES[name], random_encoder(SHAPES[name], self.device), Words(SHAPES[name].vocabulary)

    def starter(self) -> tuple[SentenceTransformer, Words | RealTexts]:
        """Return the starter with real texts."""
        if self.tiny:
            return random_encoder(SHAPES["tiny"], self.device), Words(SHAPES["tiny"].vocabulary)
        return starter(self.device, self.texts)

    def autocast(self) -> Any:
        """Use bf16 on a GPU, as in training."""
        return torch.autocast("cuda", torch.bfloat16) if self.device == "cuda" else nullcontext()


def loss_of(model: SentenceTransformer, of: Recipe, subset: int | None = None) -> AlignmentLoss:
    """Build the loss of a recipe on the device of the encoder, in training mode."""
    english_ids = subset_ids(model[0].auto_model.config.vocab_size, subset) if subset else None
    return AlignmentLoss(model, of, english_ids=english_ids).to(model.device).train()


def step(
    context: Context, loss: AlignmentLoss, batch: Any, *, packing: bool = True, bf16: bool = False
) -> Callable[[], float]:
    """Return a function that times a forward and backward pass of metaphrase, starting without gradients."""

    def work() -> None:
        with packed(loss.model, enabled=packing), accumulated_in_place():
            with bfloat16(loss.model) if bf16 else context.autocast():
                total = sum(loss(batch).values())
            total.backward()

    return _timed(context, work, loss)


def official_step(context: Context, official: OfficialStep, batch: Any) -> Callable[[], float]:
    """Return a function that times a forward and backward pass of the released code on the same batch."""
    ids = [batch[side]["input_ids"] for side in ("source", "target")]
    official.to(context.device).train()

    def work() -> None:
        with context.autocast():
            loss = official(*ids)
        loss.backward()

    return _timed(context, work, official)


def _timed(context: Context, work: Callable[[], None], module: torch.nn.Module) -> Callable[[], float]:
    def measure() -> float:
        seconds = context.clock.of(work)
        module.zero_grad()
        return seconds

    return measure


LENGTHS = {"Tatoeba-like lengths": False, "full-length batches": True}


def dap_vs_official(context: Context) -> Iterator[Figure]:
    """DAP step of metaphrase and of the released code, which projects 2S positions, keeps padding and unties embeddings.

    On a GPU with batches of 256, because the released code keeps the logits of all 64 positions: 197 GB at 1,024.
    """
    targets = {"Tatoeba-like lengths": 0.40, "full-length batches": 0.75}
    for name, shape, model, words in context.encoders():
        loss, official = loss_of(model, DAP), OfficialStep(model[0].auto_model, "dap")
        short = context.quick or (context.device == "cpu" and name != context.shapes[0])
        for which, full in list(LENGTHS.items())[: 1 if short else None]:
            batch = batch_of(loss, words.pairs(context.batch(16, 256), full=full), context.device)
            seconds = interleaved(
                {"ours": step(context, loss, batch), "official": official_step(context, official, batch)},
                context.rounds,
            )
            target = context.target(name, "<=", targets[which])
            what = f"time of a DAP step, metaphrase ÷ the paper's code, {which}"
            yield ratio(what, seconds, "ours", "official", target, str(shape))


def dap_vs_tr(context: Context) -> Iterator[Figure]:
    """DAP step and TR step of metaphrase on the same batch: time and activations."""
    english = recipe("dap", rtl={"vocabulary": "english"})
    for name in [*context.shapes, *(["mbert", "large"] if "base" in context.shapes else [])]:
        shape = SHAPES[name]
        model, words = random_encoder(shape, context.device), Words(shape.vocabulary)
        losses = {"tr": loss_of(model, TR), "dap": loss_of(model, DAP)}
        if name in context.shapes:
            losses["dap, English subset"] = loss_of(model, english, subset=ENGLISH)
        size = context.batch(4 if name == "large" else 16, 1024)
        batch = batch_of(losses["dap"], words.pairs(size), context.device)
        given = {"pairs": size, "tokens": [int(batch[side]["attention_mask"].sum()) for side in ("source", "target")]}
        seconds = interleaved({key: step(context, loss, batch) for key, loss in losses.items()}, context.rounds)
        bound = 1.9 if name == "mbert" else 2.5
        yield ratio("time of a step, DAP ÷ TR", seconds, "dap", "tr", context.target(name, "<=", bound), str(shape))
        for key in ("tr", "dap"):
            with held_activations(losses[key]) as total, packed(model), context.autocast():
                sum(losses[key](batch).values())
            what = f"activation memory of a {key.upper()} step, {size} pairs"
            yield Figure(what, total[0] / 1e6, None, "MB", {key: seconds[key]}, str(shape), {"recipe": key, **given})
        if name in context.shapes:
            target = context.target(name, "<=", 1.5)
            what = f"time of a step, DAP with a vocabulary of {min(ENGLISH, shape.vocabulary):,} pieces ÷ TR"
            yield ratio(what, seconds, "dap, English subset", "tr", target, str(shape))


# ---------------------------------------------------------------------------------------------------------- whole steps


class _Marks(TrainerCallback):
    """Record the beginning and end of every step and the optimiser's share of it."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.begins: list[Any] = []
        self.ends: list[Any] = []
        self.optimizer: list[tuple[Any, Any]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begins.append(self.clock.mark())

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.before = self.clock.mark()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.optimizer.append((self.before, self.clock.mark()))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.append(self.clock.mark())

    @property
    def seconds(self) -> float:
        """Return the seconds per step, without the first step, which creates the optimiser's state."""
        return self.clock.between(self.ends[0], self.ends[-1]) / (len(self.ends) - 1)


def trainer(context: Context, loss: Any, pairs: Sequence[Pair], batch_size: int, steps: int, folder: str) -> Any:
    """Build an AlignmentTrainer or a SentenceTransformerTrainer with the same settings and batches."""
    ours = isinstance(loss, AlignmentLoss)
    make: Any = AlignmentTrainer if ours else SentenceTransformerTrainer
    settings: Any = AlignmentTrainingArguments if ours else SentenceTransformerTrainingArguments
    arguments = settings(
        output_dir=folder,
        per_device_train_batch_size=batch_size,
        max_steps=steps,
        learning_rate=5e-5,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=context.device == "cpu",
        bf16=context.device == "cuda",
        seed=1,
    )
    return make(model=loss.model, args=arguments, train_dataset=Dataset.from_list(list(pairs)), loss=loss)


def whole_step(context: Context, loss: Any, pairs: Sequence[Pair], batch_size: int) -> Callable[[], float]:
    """Return a function that times whole steps: reading, tokenising, forward, backward, clipping, optimiser."""

    def measure() -> float:
        with tempfile.TemporaryDirectory() as folder:
            training = trainer(context, loss, pairs, batch_size, len(pairs) // batch_size, folder)
            marks = _Marks(context.clock)
            training.add_callback(marks)
            training.train()
        loss.model.zero_grad()
        return marks.seconds

    return measure


def first_step(context: Context, training: Any) -> float:
    """Train one step, and return its duration, without the preparation of the trainer."""
    marks = _Marks(context.clock)
    training.add_callback(marks)
    training.train()
    return context.clock.between(marks.begins[0], marks.ends[0])


def dap_vs_mnrl(context: Context) -> Iterator[Figure]:
    """Whole steps of AlignmentTrainer with DAP and of SentenceTransformerTrainer with in-batch ranking."""
    for name, shape, model, words in context.encoders():
        size = context.batch(16, 256)
        pairs = words.pairs(2 * size)
        losses = {"ours, DAP": loss_of(model, DAP), "theirs, TR": MultipleNegativesRankingLoss(model)}
        seconds = interleaved(
            {key: whole_step(context, loss, pairs, size) for key, loss in losses.items()}, context.rounds
        )
        target = context.target(name, "<=", 1.1 if context.device == "cuda" else 1.35)
        what = f"time of a step, DAP in AlignmentTrainer ÷ TR in SentenceTransformerTrainer, batch {size}"
        yield ratio(what, seconds, "ours, DAP", "theirs, TR", target, str(shape))


def tr_vs_mnrl(context: Context) -> Iterator[Figure]:
    """Whole TR steps of AlignmentTrainer and SentenceTransformerTrainer, with the starter and the same pairs."""
    model, texts = context.starter()
    losses = {"ours": loss_of(model, TR), "theirs": MultipleNegativesRankingLoss(model)}
    cases = [(64, False, 3, 1.3), (256, False, 2, 1.8), (64, True, 2, 0.95)]
    for n, full, steps, bound in cases[: 1 if context.quick else None]:
        size = context.batch(n, n)
        pairs = texts.pairs(steps * size, full=full, seed=n)
        seconds = interleaved(
            {key: whole_step(context, loss, pairs, size) for key, loss in losses.items()}, context.rounds
        )
        what = f"time of a TR step, SentenceTransformerTrainer ÷ AlignmentTrainer, batch {size}"
        what += ", full length" if full else ""
        yield ratio(what, seconds, "theirs", "ours", (">=", bound), "starter")


def trainer_overhead(context: Context) -> list[Figure]:
    """Share of a step of AlignmentTrainer that is not forward, backward or optimiser."""
    model, texts = context.starter()
    size, steps = context.batch(64, 64), 4
    clock = context.clock
    loss = loss_of(model, TR)
    spans: list[tuple[Any, Any]] = []

    def timed(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = clock.mark()
            result = work(*args, **kwargs)
            spans.append((start, clock.mark()))
            return result

        return call

    seconds, shares = [], []
    for _ in range(context.rounds):
        spans.clear()
        with tempfile.TemporaryDirectory() as folder:
            training = trainer(context, loss, texts.pairs(steps * size), size, steps, folder)
            marks = _Marks(clock)
            training.add_callback(marks)
            training.accelerator.backward = timed(training.accelerator.backward)
            with patch.object(loss, "forward", timed(loss.forward)):
                training.train()
        inside = [*spans[2:], *marks.optimizer[1:]]  # forward and backward passes, without the first step
        seconds.append(marks.seconds)
        shares.append(100 * (1 - sum(clock.between(*span) for span in inside) / (steps - 1) / marks.seconds))
    what = f"share of a step outside forward pass, backward pass and optimiser, batch {size}"
    return [Figure(what, min(shares), ("<=", 5.0), "%", {"whole step": seconds}, "starter")]


def demo_step(context: Context) -> Iterator[Figure]:
    """Step of the demo, packed and padded, on the same batch."""
    model, texts = context.starter()
    size = context.batch(64, 64)
    pairs = texts.pairs(size) if context.tiny else _demo_pairs(size)
    english_ids = used_piece_ids(load_corpus(DEMO).dataset["target"], model.tokenizer)
    for name in ("dap",) if context.quick else ("tr", "dap"):
        arguments: Mapping[str, Any] = {"rtl": {"vocabulary": "english"}} if name == "dap" else {}
        loss = AlignmentLoss(model, recipe(name, **arguments), english_ids=english_ids).to(model.device).train()
        batch = batch_of(loss, pairs, context.device)
        seconds = interleaved(
            {kind: step(context, loss, batch, packing=kind == "packed") for kind in ("packed", "padded")},
            context.rounds,
        )
        target = (">=", 1.3) if name == "dap" else None
        what = f"time of a {name.upper()} step of the demo, with padding ÷ without padding, batch {size}"
        yield ratio(what, seconds, "padded", "packed", target, "starter")


def _demo_pairs(n: int) -> list[Pair]:
    rows = load_corpus(DEMO).dataset.shuffle(seed=0).select(range(n))
    return [{"source": row["source"], "target": row["target"]} for row in rows]


# ------------------------------------------------------------------------------------------------------ vocabulary loss


def vocabulary_memory(context: Context) -> Iterator[Figure]:
    """Peak memory and time of the vocabulary loss and of linear plus cross-entropy, each peak in its own process.

    On a GPU, also Liger's kernel if it is installed.
    """
    n = 64 if context.tiny else 1024
    others = ["liger"] if context.device == "cuda" and find_spec("liger_kernel") else []
    libraries = {"ours": "metaphrase", "plain": "torch", "liger": "Liger"}
    for name in context.shapes if context.device == "cuda" else context.shapes[:1]:
        shape = SHAPES[name]
        size = (n, shape.vocabulary, shape.hidden, context.device)
        peaks = {kind: vocabulary.peak_in_a_process(kind, *size) / 1e6 for kind in ("ours", "plain", *others)}
        for kind, peak in peaks.items():
            what = f"peak memory of the vocabulary loss in {libraries[kind]}, {n:,} positions"
            yield Figure(what, peak, None, "MB", of=str(shape))
        what = f"peak memory of the vocabulary loss, metaphrase ÷ torch, {n:,} positions"
        target = context.target(name, "<=", 0.1)
        yield Figure(what, peaks["ours"] / max(peaks["plain"], 1e-9), target, of=str(shape))
        case = vocabulary.case(*size)
        seconds = interleaved(
            {
                kind: lambda kind=kind, case=case: context.clock.of(lambda: vocabulary.step(kind, *case))
                for kind in peaks
            },
            context.rounds,
        )
        target = context.target(name, "<=", 1.25)
        for kind in ("ours", *others):
            what = f"time of the vocabulary loss, {libraries[kind]} ÷ torch, {n:,} positions"
            yield ratio(what, seconds, kind, "plain", target if kind == "ours" else None, str(shape))


def denormals(context: Context) -> Iterator[Figure]:
    """Backward pass of the vocabulary loss with peaked and with flat logits."""
    n = 64 if context.tiny else 256
    for name in context.shapes:
        shape = SHAPES[name]

        def backward(scale: float, shape: Shape = shape) -> float:
            hidden, table, labels = vocabulary.case(n, shape.vocabulary, shape.hidden, context.device, scale)
            with accumulated_in_place():
                loss = vocabulary_cross_entropy(hidden, table, labels)
                return context.clock.of(loss.backward)

        seconds = interleaved({"peaked": lambda: backward(60.0), "flat": lambda: backward(1.0)}, context.rounds)
        target = context.target(name, "<=", 1.5)
        what = f"time of the backward pass of the vocabulary loss, peaked ÷ flat logits, {n:,} positions"
        yield ratio(what, seconds, "peaked", "flat", target, str(shape))


def projected_rows(context: Context) -> Iterator[Figure]:
    """Number of positions projected onto the vocabulary and number of positions scored."""
    for _, shape, model, words in list(context.encoders())[-1:]:
        for name in ("dap", "tr-tlm"):
            loss = loss_of(model, recipe(name))
            batch = batch_of(loss, words.pairs(8), context.device)
            counted = []

            def counting(hidden: Any, *args: Any, counted: list[int] = counted, **kwargs: Any) -> Any:
                counted.append(len(hidden))
                return vocabulary_cross_entropy(hidden, *args, **kwargs)

            with patch.object(vocabulary_module, "vocabulary_cross_entropy", counting), packed(model), torch.no_grad():
                loss(batch)
            if name == "dap":
                scored = int(batch["target"]["attention_mask"][:, 1:].sum())
            else:
                scored = sum(int((view["labels"] != UNSCORED).sum()) for view in batch.values() if "labels" in view)
            what = f"positions projected onto the vocabulary − positions scored ({scored}), {name}"
            yield Figure(what, sum(counted) - scored, ("==", 0), "positions", of=str(shape))


# --------------------------------------------------------------------------------------------------------- big batches


def gradcache(context: Context) -> Iterator[Figure]:
    """DAP step in three micro-batches and with the whole batch: time and peak activations."""
    for name, shape, model, words in context.encoders():
        size = context.batch(16, 1024)
        loss, ranking = loss_of(model, DAP), loss_of(model, TR)
        batch = batch_of(loss, words.pairs(size), context.device)
        third = -(-2 * size // 3)

        def measure(rows: int | None, loss: AlignmentLoss = loss, batch: Any = batch) -> float:
            loss.micro_batch_size = rows
            return step(context, loss, batch)()

        variants = {"micro-batches": partial(measure, third), "plain": partial(measure, None)}
        seconds = interleaved(variants, context.rounds)
        target = context.target(name, "<=", 1.25)
        what = f"time of a DAP step, in micro-batches of {third} sentences ÷ whole batch of {2 * size}"
        yield ratio(what, seconds, "micro-batches", "plain", target, str(shape))

        def held(loss: AlignmentLoss, rows: int | None, batch: Any = batch) -> int:
            loss.micro_batch_size = rows
            with held_activations(loss) as total, packed(loss.model), context.autocast():
                sum(loss(batch).values())
            return total[0]

        # Kept activations, plus those that the backward pass recomputes: the encoder's for the largest micro-batch.
        tokens_b = torch.cat([batch[side]["attention_mask"].sum(dim=1) for side in ("source", "target")])
        largest = max(float(part.sum()) for part in tokens_b.split(third)) / float(tokens_b.sum())
        share = (held(loss, third) + held(ranking, None) * largest) / held(loss, None)
        target = context.target(name, "<=", 0.5)
        yield Figure("activation memory of a DAP step, in micro-batches ÷ whole batch", share, target, of=str(shape))


def adamw(context: Context) -> Iterator[Figure]:
    """Fused AdamW and torch's default (foreach) on the word embeddings."""
    for name in context.shapes[:1]:
        shape = SHAPES[name]
        table = torch.nn.Parameter(torch.zeros(shape.vocabulary, shape.hidden, device=context.device))
        table.grad = torch.ones_like(table)
        optimizers = {kind: torch.optim.AdamW([table], **{kind: True}) for kind in ("fused", "foreach")}
        variants = {
            kind: lambda optimizer=optimizer: context.clock.of(optimizer.step)
            for kind, optimizer in optimizers.items()
        }
        seconds = interleaved(variants, context.rounds + 1)
        seconds = {kind: rounds[1:] for kind, rounds in seconds.items()}  # the first round creates the moments
        target = context.target(name, "<=", 1 / 3)
        what = "time of AdamW on the word embeddings, fused ÷ foreach"
        yield ratio(what, seconds, "fused", "foreach", target, str(shape))


def compiled(context: Context) -> Iterator[Figure]:
    """TR step of the starter: padded and compiled, packed, and padded."""
    if context.device == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise Skipped("torch.compile needs a C compiler")
    model, texts = context.starter()
    loss, size = loss_of(model, TR), context.batch(16, 256)
    encoder = model[0].auto_model
    eager = encoder.forward
    fast = torch.compile(eager, dynamic=True, backend="eager" if context.tiny else "inductor")
    for which, full in list(LENGTHS.items())[: None if context.device == "cuda" else 1]:
        batch = batch_of(loss, texts.pairs(size, full=full), context.device)

        def measure(forward: Any, packing: bool, batch: Any = batch) -> float:
            with patch.object(encoder, "forward", forward):
                return step(context, loss, batch, packing=packing)()

        variants = {
            "compiled": partial(measure, fast, False),
            "padded": partial(measure, eager, False),
            "packed": partial(measure, eager, True),
        }
        with warnings.catch_warnings(action="ignore"):
            variants["compiled"]()  # the first call compiles
        seconds = interleaved(variants, context.rounds)
        for kind, shown in (("compiled", "compiled with padding"), ("packed", "without padding")):
            yield ratio(f"time of a TR step, {shown} ÷ with padding, {which}", seconds, kind, "padded", of="starter")


# ------------------------------------------------------------------------------------------------------------- encoding


def encode_vs_st(context: Context) -> list[Figure]:
    """Bulk encoding and ``SentenceTransformer.encode`` on texts of mixed lengths."""
    model, texts = context.starter()
    limit = model.max_seq_length
    model.max_seq_length = limit if context.tiny else 512  # texts are not truncated to the training length
    pairs = texts.pairs(context.batch(150 if context.quick else 300, 10_000))
    sentences = [pair[side] for pair in pairs for side in ("source", "target")]

    def theirs(size: int) -> Any:
        return model.encode(sentences, batch_size=size, show_progress_bar=False)

    seconds = interleaved(
        {
            "ours": lambda: context.clock.of(lambda: encode(model, sentences)),
            "theirs, 32": lambda: context.clock.of(lambda: theirs(32)),
            "theirs, 128": lambda: context.clock.of(lambda: theirs(128)),
        },
        context.rounds,
    )
    difference = float(np.abs(encode(model, sentences) - theirs(32)).max())
    n = len(sentences)
    lengths = [int(mask.sum()) for mask in model.preprocess(sentences)["attention_mask"]]
    order = sorted(range(n), key=lambda i: -len(sentences[i]))  # by characters, like sentence-transformers
    batches = [[lengths[i] for i in order[at : at + 128]] for at in range(0, n, 128)]
    positions = sum(len(batch) * max(batch) for batch in batches)
    model.max_seq_length = limit
    return [
        *(
            ratio(
                f"time to encode {n} texts, sentence-transformers ÷ metaphrase, batch {size}",
                seconds,
                f"theirs, {size}",
                "ours",
                (">=", bound),
                "starter",
            )
            for size, bound in ((32, 1.2), (128, 1.8))
        ),
        Figure(
            "positions that sentence-transformers encodes ÷ tokens, batch 128", positions / sum(lengths), of="starter"
        ),
        Figure("largest difference between embeddings of both", difference, ("<=", 1e-5), "", of="starter"),
    ]


# ---------------------------------------------------------------------------------------------------------------- FLOPs


@contextmanager
def _floating_point_operations() -> Iterator[list[float]]:
    total = [0.0]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        yield total
    total[0] = float(counter.get_total_flops())


def flops(context: Context) -> Iterator[Figure]:
    """Forward operations and step time per pair, counted as published (DAP's Table 6) and in metaphrase."""
    name = "tiny" if context.tiny else "mbert"
    shape = SHAPES[name]
    model, words = random_encoder(shape, context.device), Words(shape.vocabulary)
    encoder, size = model[0].auto_model, context.batch(8, 512)
    ours = {
        "TR": loss_of(model, TR),
        "TR + TLM": loss_of(model, recipe("tr-tlm")),
        "DAP": loss_of(model, DAP),
        "DAP, 37k": loss_of(model, recipe("dap", rtl={"vocabulary": "english"}), subset=ENGLISH),
    }
    published = {
        "TR": OfficialStep(encoder, "tr"),
        "TR + TLM": OfficialStep(encoder, "tr-tlm"),
        "DAP": OfficialStep(encoder, "dap"),
        "DAP, 37k": OfficialStep(encoder, "dap", rows=min(ENGLISH, shape.vocabulary)),
    }
    variants = {}
    for which, full in LENGTHS.items():
        for key, loss in ours.items():
            batch = batch_of(loss, words.pairs(size, full=full), context.device)
            with packed(model), _floating_point_operations() as total:
                sum(loss(batch).values())
            yield Figure(f"{key}, ours, {which}", total[0] / size / 1e9, None, "GFLOP/pair", of=str(shape))
            variants[f"{key}, ours" + ("" if full else ", Tatoeba-like")] = step(context, loss, batch)
            if full:
                ids = [batch[side]["input_ids"] for side in ("source", "target")]
                official = published[key].to(context.device)
                with _floating_point_operations() as total:
                    official(*ids)
                yield Figure(f"{key}, published", total[0] / size / 1e9, None, "GFLOP/pair", of=str(shape))
                variants[f"{key}, published"] = official_step(context, official, batch)
    if context.quick:
        return
    seconds = interleaved(variants, context.rounds)
    for key, rounds in seconds.items():
        value = 1000 * min(rounds) / size
        what = f"{key}, step" + ("" if key.endswith("like") else " at full length")
        yield Figure(what, value, None, "ms/pair", {key: rounds}, str(shape))
    for counting in ("published", "ours"):
        for key in ("TR + TLM", "DAP", "DAP, 37k"):
            what = f"{key} / TR, {counting}, full length"
            yield ratio(what, seconds, f"{key}, {counting}", f"TR, {counting}", of=str(shape))


def gpu_step(context: Context) -> Iterator[Figure]:
    """On a GPU: DAP step with 1,024 pairs in bf16, its peak memory and model FLOPs utilisation."""
    if context.device != "cuda" and not context.tiny:
        raise Skipped("it needs a GPU")
    rate = _matmul_rate(context)
    yield Figure("speed of a matrix product", rate / 1e12, None, "TFLOP/s")
    name = "tiny" if context.tiny else "base"
    shape, size = SHAPES[name], context.batch(16, 1024)
    model, words = random_encoder(shape, context.device), Words(shape.vocabulary)
    loss = loss_of(model, DAP)
    for (which, full), bound in zip(LENGTHS.items(), (90, 245), strict=True):
        batch = batch_of(loss, words.pairs(size, full=full), context.device)
        measure = step(context, loss, batch)
        measure()
        seconds = {"ours": [measure() for _ in range(context.rounds)]}
        target = ("<=", float(bound)) if context.device == "cuda" else None
        what = f"time of a DAP step, {size:,} pairs, {which}"
        yield Figure(what, 1000 * min(seconds["ours"]), target, "ms", seconds, str(shape))
        real = [int(batch[side]["attention_mask"].sum()) for side in ("source", "target")]
        scored = real[1] - size  # all pieces of the target except CLS
        operations = 3 * step_flops(ENCODERS["XLM-R base"], "dap", *real, scored=scored)
        used = 100 * operations / min(seconds["ours"]) / rate
        target = (">=", 40.0) if context.device == "cuda" else None
        what = f"speed of this step, without padding ÷ speed of a matrix product, {which}"
        yield Figure(what, used, target, "%", seconds, str(shape))
        peak = peak_memory(measure, context.device) / 1e9
        yield Figure(f"peak memory of a DAP step without weights, {which}", peak, None, "GB", of=str(shape))


def _matmul_rate(context: Context) -> float:
    side = 8192 if context.device == "cuda" else 512
    dtype = torch.bfloat16 if context.device == "cuda" else torch.float32
    left, right = (torch.randn(side, side, device=context.device, dtype=dtype) for _ in range(2))
    torch.mm(left, right)
    return 2 * side**3 / min(context.clock.of(lambda: torch.mm(left, right)) for _ in range(10))


#: Rows by name, in the order in which they are measured.
ROWS: dict[str, Callable[[Context], Iterable[Figure]]] = {
    "projected-rows": projected_rows,
    "demo-step": demo_step,
    "encode-vs-st": encode_vs_st,
    "trainer-overhead": trainer_overhead,
    "tr-vs-mnrl": tr_vs_mnrl,
    "denormals": denormals,
    "adamw": adamw,
    "compiled": compiled,
    "gradcache": gradcache,
    "vocabulary-memory": vocabulary_memory,
    "dap-vs-tr": dap_vs_tr,
    "dap-vs-mnrl": dap_vs_mnrl,
    "dap-vs-official": dap_vs_official,
    "flops": flops,
    "gpu-step": gpu_step,
}
