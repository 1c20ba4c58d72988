"""MoCo: contrast with a queue of translations encoded by a momentum encoder, the sentence-level objective of PPA."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from metaphrase.exceptions import ModelError, UsageError
from metaphrase.io.arguments import Length, Range, Share, Temperature, check_value
from metaphrase.modeling.encoding import Encoding
from metaphrase.modeling.frozen import frozen
from metaphrase.modeling.functional import at_least_float32, gather_with_gradient, mean_pooled
from metaphrase.modeling.packing import token_states
from metaphrase.modeling.views import SIDES, Batch, Generators, View, pad_rows, swapped
from metaphrase.objectives.base import Granularity, HeadSources, Objective, check_unused

Denominator = Literal["positive_and_queue", "queue"]
Normalize = Literal["both", "h", "z"]

#: Maximum number of values in a queue: 4 GB in float32.
MAX_QUEUE = 2**30


def momentum_contrast(
    query_bh: Tensor,
    key_bh: Tensor,
    queue_qh: Tensor,
    *,
    temperature: float = 0.05,
    denominator: Denominator = "positive_and_queue",
) -> Tensor:
    """InfoNCE against a queue: each query must distinguish its key from the keys of a queue.

    ``-log exp(q · k⁺ / τ) / Σ_k exp(q · k / τ)``, averaged over the queries, with dot products. The computation is in
    float32 or wider, regardless of the type of the embeddings.

    Args:
        query_bh: Embeddings of the queries, shape ``(batch, hidden)``.
        key_bh: Row ``i`` is the key of query ``i``, shape ``(batch, hidden)``.
        queue_qh: Keys of other sentences, shape ``(queue, hidden)``.
        temperature: Softmax temperature τ.
        denominator: ``"positive_and_queue"`` sums over the query's key and the queue (MoCo); ``"queue"`` sums over the queue
            only, as equation 3 is printed, which is not a likelihood and can be negative.

    Returns:
        Scalar loss.

    Reference: Pan et al. 2021 (PPA), section 2.1, equation 3; He et al. 2020 (MoCo), equation 1.

    >>> query = F.normalize(torch.ones(1, 4), dim=-1)
    >>> momentum_contrast(query, query, query.expand(7, 4)).exp().round().item()
    8.0
    """
    check_value(denominator, Denominator, "'denominator' of momentum_contrast")
    query_bh, key_bh, queue_qh = map(at_least_float32, (query_bh, key_bh, queue_qh))
    with torch.autocast(query_bh.device.type, enabled=False):
        positive_b1 = (query_bh * key_bh).sum(dim=1, keepdim=True) / temperature
        logits_bq = query_bh @ queue_qh.T / temperature
    if denominator == "positive_and_queue":
        logits_bq = torch.cat([positive_b1, logits_bq], dim=1)
    return (logits_bq - positive_b1).logsumexp(dim=1).mean()


def enqueue(queue_qh: Tensor, pointer: Tensor, key_bh: Tensor) -> tuple[Tensor, Tensor]:
    """Replace the oldest keys of a queue.

    The queue is not modified, because the backward pass of a loss may need it. If the new keys exceed its size, the last
    ones are kept.

    >>> queue, pointer = enqueue(torch.zeros(3, 1), torch.tensor(2), torch.tensor([[1.0], [2.0]]))
    >>> queue.flatten().tolist(), pointer.item()
    ([2.0, 0.0, 1.0], 1)
    """
    size = len(queue_qh)
    place_b = (pointer + torch.arange(len(key_bh), device=pointer.device)) % size
    return queue_qh.index_copy(0, place_b[-size:], key_bh[-size:].to(queue_qh.dtype)), (pointer + len(key_bh)) % size


@dataclass(frozen=True)
class QueryAndKey(View):
    """One sentence of each pair for the encoder, the other for the momentum encoder.

    Provides the encoder's inputs of the query, and ``key_ids`` and ``key_mask`` of the key, ``(batch, length)``.

    If ``shuffle``, source and target of half of the pairs are swapped (see :func:`metaphrase.modeling.views.swapped`);
    otherwise the sources are the queries.
    """

    max_length: Length
    shuffle: bool

    def build(self, batch: Batch, rngs: Generators) -> dict[str, Tensor]:
        """Build ids and masks of both sentences."""
        pairs = [*zip(*(batch.pieces(side, self.max_length) for side in SIDES), strict=True)]
        if self.shuffle:
            pairs = [pair[::-1] if swapped(rng) else pair for pair, rng in zip(pairs, rngs, strict=True)]
        query, key = (pad_rows(batch.tokenizer, input_ids=ids) for ids in zip(*pairs, strict=True))
        return {**query, "key_ids": key["input_ids"], "key_mask": key["attention_mask"]}


class MomentumHead(nn.Module):
    """The projection, the momentum copies of encoder and projection, and the queue of past keys.

    ``normalize`` is what is normalised: the pooled state ``"h"``, its projection ``"z"``, or ``"both"``. ``queue_qh`` holds
    the keys of past batches, shape ``(queue, projection)``, and ``pointer`` the position of the oldest key.
    """

    queue_qh: Tensor
    pointer: Tensor

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        pooling: str,
        projection_size: int | None,
        bias: bool,
        queue_size: int,
        normalize: Normalize,
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.pooling = pooling
        self.normalize = normalize
        self.projection: nn.Module = nn.Identity()
        if projection_size is not None:
            first, last = nn.Linear(hidden, hidden), nn.Linear(hidden, projection_size)
            for layer in (first, last):
                layer.bias.requires_grad_(bias)  # biases start at zero; frozen ones stay zero
            self.projection = nn.Sequential(first, nn.ReLU(), last)
        self.momentum_projection = copy.deepcopy(self.projection).requires_grad_(False)
        with torch.device("meta"):  # replaced by a copy of the encoder, or loaded
            self.momentum_encoder = frozen(AutoModel.from_config(config))
        self.register_buffer("queue_qh", torch.zeros(queue_size, projection_size or hidden))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def fill(self, sources: HeadSources) -> None:
        """Copy the encoder, and fill the queue with random directions that are the same in every process."""
        self.momentum_encoder = frozen(copy.deepcopy(sources.encoder))
        self.momentum_projection.load_state_dict(self.projection.state_dict())
        random_qh = torch.randn(self.queue_qh.shape, generator=torch.Generator().manual_seed(0))
        self.queue_qh.copy_(F.normalize(random_qh, dim=1))

    def query(self, tokens_blh: Tensor, mask_bl: Tensor) -> Tensor:
        """Embed sentences from the states of the trained encoder."""
        return self._embed(tokens_blh, mask_bl, self.projection)

    @torch.no_grad()
    def key(self, ids_bl: Tensor, mask_bl: Tensor) -> Tensor:
        """Embed sentences with the momentum encoder, without gradient, and without padding if supported."""
        tokens_blh = token_states(self.momentum_encoder, mask_bl, input_ids=ids_bl)
        return self._embed(tokens_blh, mask_bl, self.momentum_projection)

    def _embed(self, tokens_blh: Tensor, mask_bl: Tensor, projection: nn.Module) -> Tensor:
        pooled_bh = tokens_blh[:, 0] if self.pooling == "cls" else mean_pooled(tokens_blh, mask_bl)
        if self.normalize != "z":
            pooled_bh = F.normalize(pooled_bh, dim=-1)
        embedding_bh = at_least_float32(projection(pooled_bh.to(tokens_blh.dtype)))
        return embedding_bh if self.normalize == "h" else F.normalize(embedding_bh, dim=-1)

    def enqueue(self, key_bh: Tensor) -> None:
        """Replace the oldest keys by the keys of this step, from all processes."""
        self.queue_qh, self.pointer = enqueue(self.queue_qh, self.pointer, gather_with_gradient(key_bh))

    @torch.no_grad()
    def follow(self, encoder: PreTrainedModel, momentum: float) -> None:
        """Update all trained parameters by ``θ_k ← m θ_k + (1 − m) θ_q``.

        Reference: Pan et al. 2021 (PPA), equation 1.
        """
        trained = dict(encoder.named_parameters())
        pairs = [(theirs, trained[name]) for name, theirs in self.momentum_encoder.named_parameters()]
        pairs += zip(self.momentum_projection.parameters(), self.projection.parameters(), strict=True)
        keys, queries = zip(*(pair for pair in pairs if pair[1].requires_grad), strict=True)
        torch._foreach_lerp_(keys, queries, 1 - momentum)


@dataclass(eq=False, repr=False, kw_only=True)
class MomentumContrast(Objective):
    """Each sentence must distinguish its translation from a queue of sentences of past batches, in all languages.

    States are pooled as by the model; its modules after the pooling, such as a Dense layer, are neither read nor trained. The
    translations (keys) are encoded by a momentum encoder, a moving average of the trained one. Neither it nor the projection
    is part of a release. In training, the keys of a batch join the queue after the loss is computed; in evaluation
    they do not.

    Args:
        temperature: Softmax temperature τ.
        queue_size: Number of keys in the queue, K. It starts with random directions, which ``queue_size / batch`` batches
            replace.
        momentum: m, the share of its parameters that the momentum encoder keeps in an optimiser step.
        projection_size: Width of the projection ``W₂ ReLU(W₁ h)``; None contrasts the pooled states themselves.
        bias: Whether the projection has biases, as in MoCo; equation 2 shows none.
        normalize: What to normalise: ``"h"``, the sentence embedding (text of the paper), its projection ``"z"`` (MoCo), or
            ``"both"``.
        shuffle: Random input shuffling: in half of the pairs, the target is the query and the source the key. Otherwise
            the sources are the queries.
        denominator: See :func:`momentum_contrast`.

    Inputs: the columns ``source`` and ``target``.

    Relations: :class:`TranslationRanking` takes its negatives from the batch, with gradient. With ``order: shuffled``, TLM
    sees the sentences in the same order.

    Reference: Pan et al. 2021 (PPA), section 2.1; the queue follows He et al. 2020 (MoCo), algorithm 1.
    """

    name: ClassVar[str] = "moco"
    granularity: ClassVar[Granularity] = "sentence"
    citation: ClassVar[str] = """\
@inproceedings{pan-etal-2021-multilingual,
    title = "Multilingual {BERT} Post-Pretraining Alignment",
    author = "Pan, Lin and Hang, Chung-Wei and Qi, Haode and Shah, Abhishek and Potdar, Saloni and Yu, Mo",
    booktitle = "Proceedings of NAACL-HLT 2021",
    year = "2021",
}"""

    temperature: Temperature = 0.05
    queue_size: Annotated[int, Range(1, 1_000_000)] = 32_000
    momentum: Share = 0.999
    projection_size: Annotated[int, Range(1, 8192)] | None = 300
    bias: bool = True
    normalize: Normalize = "both"
    shuffle: bool = True
    denominator: Denominator = "positive_and_queue"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.projection_size is None:
            check_unused(self, ("bias",), "projection_size")
        self.view = QueryAndKey("query-and-key", self.max_length, self.shuffle)

    def views(self) -> tuple[View, ...]:
        """Return the view of queries and keys."""
        return (self.view,)

    def head_settings(self, sources: HeadSources) -> dict[str, Any]:
        """Return the pooling mode of the model, by which queries and keys are pooled too.

        Raises:
            UsageError: The queue is too large.
            ModelError: The pooling mode is not ``"cls"`` or ``"mean"``.
        """
        width = self.projection_size or sources.encoder.config.hidden_size
        if self.queue_size * width > MAX_QUEUE:
            raise UsageError(
                f"A queue of {self.queue_size:,} keys with {width:,} numbers each exceeds {MAX_QUEUE:,} numbers. Lower "
                "queue_size or projection_size."
            )
        if sources.pooling not in ("cls", "mean"):
            raise ModelError(
                f"'moco' supports the pooling modes 'cls' and 'mean', but this encoder uses {sources.pooling!r}. Load it "
                "with pooling='cls' or pooling='mean'."
            )
        return {"pooling": sources.pooling}

    def make_head(self, config: PreTrainedConfig, **settings: Any) -> nn.Module:
        """Build projection, momentum encoder and queue."""
        return MomentumHead(
            config,
            projection_size=self.projection_size,
            bias=self.bias,
            queue_size=self.queue_size,
            normalize=self.normalize,
            **settings,
        )

    def forward(self, encodings: Mapping[str, Encoding]) -> Tensor:
        """Compute the contrastive loss; in training the keys join the queue."""
        pair = encodings[self.view.name]
        query_bh = self.head.query(pair.tokens_blh, pair.mask_bl)
        key_bh = self.head.key(pair.features["key_ids"], pair.features["key_mask"].bool())
        loss = momentum_contrast(
            query_bh, key_bh, self.head.queue_qh, temperature=self.temperature, denominator=self.denominator
        )
        if self.head.training:
            self.head.enqueue(key_bh)
        return loss

    def after_step(self, encoder: PreTrainedModel) -> None:
        """Update the momentum encoder and the momentum projection."""
        self.head.follow(encoder, self.momentum)
