"""TR: translation ranking, the sentence-level objective of DAP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from metaphrase.corpus.rows import SEPARATOR
from metaphrase.exceptions import UsageError
from metaphrase.io.arguments import Count, CountOr0, Length, OwnTemperature, Range, Share, Temperature
from metaphrase.modeling import functional
from metaphrase.modeling.encoding import Encoding
from metaphrase.modeling.functional import Direction, Similarity
from metaphrase.modeling.languages import language_id
from metaphrase.modeling.views import SIDES, Batch, Generators, View, fingerprint, pad_rows, piece_ids
from metaphrase.objectives.base import Granularity, HeadSources, Objective, check_embedding_size, check_unused


@dataclass(frozen=True)
class HardNegatives(View):
    """The hard negatives of the pairs, as rows of the encoder's inputs; a batch without any has one row that is not ``real``.

    Also provides ``text``, ``language`` and ``real`` of each row.

    Attributes:
        max_length: Maximum pieces per sentence, including special tokens.
        count: Maximum number of negatives per pair; the first ones are read.
    """

    columns: ClassVar[tuple[str, ...]] = ("negatives",)
    max_length: Length
    count: Count

    def build(self, batch: Batch, rngs: Generators) -> dict[str, Tensor]:
        """Build ids, mask, fingerprint and language of each negative."""
        rows = [
            (text, example.get("target_lang") or "")
            for example in batch.examples
            for text in [one for one in _texts(example["negatives"] or "") if one.strip()][: self.count]
        ]
        first = batch.examples[0]
        texts, languages = zip(*(rows or [(first["target"], first.get("target_lang") or "")]), strict=True)
        return {
            **pad_rows(batch.tokenizer, input_ids=piece_ids(batch.tokenizer, texts, self.max_length)),
            "text": torch.tensor([fingerprint(text) for text in texts]),
            "language": torch.tensor([language_id(language) for language in languages]),
            "real": torch.full((len(texts),), bool(rows)),
        }


def _texts(negatives: str | list[str]) -> list[str]:
    """The sentences of a column that `load_corpus` has read, or of a list in a data set of the caller."""
    return negatives.split(SEPARATOR) if isinstance(negatives, str) else negatives


@dataclass(eq=False, repr=False, kw_only=True)
class TranslationRanking(Objective):
    """Each sentence must identify its translation in the batch.

    Args:
        temperature: Softmax temperature τ. ``"auto"`` is that of the encoder where it is known, which is 0.01 for the E5
            family (see :func:`metaphrase.encoders.loading.own_temperature`), else the default.
        margin: Additive margin in units of the similarity (LaBSE: 0.3).
        direction: ``"source_to_target"`` (DAP), ``"target_to_source"`` or ``"symmetric"``.
        similarity: ``"cosine"`` (the released code) or ``"dot"`` (the paper's equation).
        mask_duplicates: Exclude pairs that share a side with the ranked one from the denominator: other copies of a
            sentence are not negatives.
        positives: ``"translation"``: its translation is the only positive of a sentence. ``"shared_target"``: the pairs of
            the batch with the same target are positives of each other, such as translations of one English sentence into
            several languages; the loss is the mean over the positives (Khosla et al. 2020, equation 2, the sum outside of
            the logarithm). Copies of a sentence are neither positives nor negatives, as with ``mask_duplicates``, which
            this includes. ``batches: shared_target`` puts such pairs into one batch.
        gather: Rank against the sentences of all processes, with gradient. ``batch_sampler: no_duplicates`` keeps copies
            apart in one process only; ``mask_duplicates`` excludes those of others.
        projection: ``"none"``, or ``"mlp"``: rank ``tanh(W h + b)`` in training and discard the projection afterwards, as
            in the released code.
        targets: ``"hard"``: the translation. ``"soft"``: the similarities of the translation to the other candidates of
            its side, as the original encoder sees them, so that a paraphrase of it is not pushed away.
        soft_weight: Share of the soft targets; the rest is the translation's.
        soft_temperature: Softmax temperature of the soft targets; None is ``temperature``.
        soft_sides: Side whose similarities are the soft targets: ``"target"`` (English), ``"source"``, or the mean of
            ``"both"``.
        guided: Exclude candidates from the denominator that the original encoder finds more similar than the translation,
            unless they are positives.
        own_side: The other sentences of a sentence's own side are candidates too. A translation then has to rank above
            every other sentence of the query's own side, which is what a search among sentences of many languages needs.
        negatives: Number of hard negatives of each pair, from the column ``negatives``; every source ranks those of all pairs
            of its process as well. Copies of its translation are excluded.

    Inputs: the columns ``source`` and ``target``; with ``negatives``, the column of this name: sentences in the language of
    the target, separated by ``" ||| "`` (see ``metaphrase filter --negatives``).

    Relations: ``MultipleNegativesRankingLoss`` of sentence-transformers is the same ranking with ``scale = 1 / τ``, and its
    ``directions`` include the own side; LaBSE adds the margin; the released DAP code gathers negatives without gradient.
    ``GISTEmbedLoss`` of sentence-transformers masks with a guide model, and ranks both sides against themselves as well.

    Reference: Li et al. 2023 (DAP), section 3.2, equation 5; soft targets: Park et al. 2024 (IMASCL), section 3; guided:
    Solatorio 2024 (GISTEmbed), section 3; own side: Li et al. 2023 (GTE), section 3.3; several positives: Khosla et al. 2020
    (supervised contrastive learning), equation 2.
    """

    name: ClassVar[str] = "tr"
    granularity: ClassVar[Granularity] = "sentence"
    any_tokenizer: ClassVar[bool] = True
    in_batch_negatives: ClassVar[bool] = True
    citation: ClassVar[str] = """\
@inproceedings{li-etal-2023-dual,
    title = "Dual-Alignment Pre-training for Cross-lingual Sentence Embedding",
    author = "Li, Ziheng and Huang, Shaohan and Zhang, Zihan and Deng, Zhi-Hong and Lou, Qiang and Huang, Haizhen
        and Jiao, Jian and Wei, Furu and Deng, Weiwei and Zhang, Qi",
    booktitle = "Proceedings of ACL 2023",
    year = "2023",
}"""

    temperature: OwnTemperature = 0.05
    margin: Annotated[float, Range(0, 1000)] = 0.0
    direction: Direction = "source_to_target"
    similarity: Similarity = "cosine"
    mask_duplicates: bool = False
    positives: Literal["translation", "shared_target"] = "translation"
    gather: bool = True
    projection: Literal["none", "mlp"] = "none"
    targets: Literal["hard", "soft"] = "hard"
    soft_weight: Share = 1.0
    soft_temperature: Temperature | None = None
    soft_sides: Literal["source", "target", "both"] = "target"
    guided: bool = False
    own_side: bool = False
    negatives: CountOr0 = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.targets == "hard":
            check_unused(self, ("soft_weight", "soft_temperature", "soft_sides"), "targets: soft")
        if self.negatives and (self.targets == "soft" or self.direction == "target_to_source"):
            raise UsageError(
                "'negatives' of 'tr' are wrong targets of a source: they require hard targets and a direction other than "
                f"'target_to_source', but got {self.targets!r} and {self.direction!r}. Omit 'negatives', or change these."
            )
        if self.own_side and self.targets == "soft":
            raise UsageError(
                "Soft targets of 'tr' are a distribution over the sentences of the other side, so 'own_side' requires hard "
                "targets. Omit 'own_side', or use hard targets."
            )
        if self.shares_targets and self.targets == "soft":
            raise UsageError(
                "Soft targets of 'tr' already have a share for each sentence that resembles the translation, so 'positives: "
                "shared_target' requires hard targets. Omit 'positives', or use hard targets."
            )
        if self.shares_targets and self.direction == "source_to_target" and not self.own_side:
            raise UsageError(
                "'positives: shared_target' of 'tr' has no effect in the direction 'source_to_target': pairs with the same "
                "target have no other target. Use the direction 'symmetric' or 'target_to_source', or 'own_side'."
            )

    def views(self) -> tuple[View, ...]:
        """Return both sides, and hard negatives if they are read."""
        if not self.negatives:
            return super().views()
        return *super().views(), HardNegatives(f"negatives-{self.negatives}", self.max_length, self.negatives)

    def attach(self, sources: HeadSources) -> None:
        """Check that the projection fits the embeddings.

        Raises:
            ModelError: Sentence embeddings have another size than the encoder's states.
        """
        super().attach(sources)
        if self.projection == "mlp":
            check_embedding_size(sources, self.name)

    def make_head(self, config: PreTrainedConfig, **settings: Any) -> nn.Module | None:
        """Build the projection, which is not part of a release, or None."""
        if self.projection == "none":
            return None
        return nn.Sequential(nn.Linear(config.hidden_size, config.hidden_size), nn.Tanh())

    @property
    def reads_original(self) -> bool:  # type: ignore[override]
        """Whether an option compares with the original encoder."""
        return self.guided or self.targets == "soft"

    @property
    def shares_targets(self) -> bool:  # type: ignore[override]
        """Whether pairs with the same target are positives of each other."""
        return self.positives == "shared_target"

    @property
    def truncatable(self) -> bool:  # type: ignore[override]
        """Whether there is no projection, which has the size of the embeddings."""
        return self.projection == "none"

    def forward(self, encodings: Mapping[str, Encoding]) -> Tensor:
        """Compute the ranking loss."""
        rows: dict[str, Tensor] = {side: self._project(encodings[side].sentence_bh) for side in SIDES}
        pools = {side: self.gathered(row_bh) for side, row_bh in rows.items()}
        offset = self.offset(len(rows["source"]), len(pools["source"]))
        soft_bp = self._soft_targets(encodings) if self.targets == "soft" else None
        directions = ("source_to_target", "target_to_source") if self.direction == "symmetric" else (self.direction,)
        losses = []
        for query, candidates in (direction.split("_to_") for direction in directions):
            sides = (candidates, query) if self.own_side else (candidates,)
            pool = [pools[side] for side in sides]
            excluded = [self._excluded(encodings, query, side) for side in sides]
            positive = [self._positives(encodings, side) for side in sides] if self.shares_targets else []
            if self.own_side:
                excluded[1].diagonal(offset).fill_(True)  # the query itself
            if self.negatives and query == "source":
                negative_nh, excluded_bn = self._hard_negatives(encodings)
                pool.append(negative_nh)
                excluded.append(excluded_bn)
                if positive:
                    positive.append(torch.zeros_like(excluded_bn))
            loss = functional.translation_ranking(
                rows[query],
                torch.cat(pool),
                temperature=float(self.temperature),
                margin=self.margin,
                similarity=self.similarity,
                duplicate_bp=torch.cat(excluded, dim=1),
                positive_bp=torch.cat(positive, dim=1) if positive else None,
                offset=offset,
                soft_bp=soft_bp,
                soft_weight=self.soft_weight,
            )
            losses.append(loss)
        return torch.stack(losses).mean()

    def _project(self, embedding_bh: Tensor) -> Tensor:
        return embedding_bh if self.head is None else self.head(embedding_bh)

    def _excluded(self, encodings: Mapping[str, Encoding], query: str, candidates: str) -> Tensor:
        """Mask of the candidates that leave the denominator, shape ``(batch, pool)``.

        They share a side with the ranked pair (``mask_duplicates``), or the original encoder finds them more similar to the
        query than its translation (``guided``).
        """
        same_bp = self._same(encodings, "source") | self._same(encodings, "target")
        excluded_bp = same_bp if self.mask_duplicates or self.shares_targets else torch.zeros_like(same_bp)
        if self.guided:
            original: dict[str, Tensor] = {side: self.original(encodings[side]).sentence_bh for side in SIDES}
            translation_bh = original["target" if query == "source" else "source"]
            limit_b1 = functional.cosines(original[query], translation_bh).diagonal()[:, None]
            cosine_bp = functional.cosines(original[query], self.gathered(original[candidates]))
            excluded_bp = excluded_bp | (cosine_bp > limit_b1)
        return excluded_bp

    def _positives(self, encodings: Mapping[str, Encoding], side: str) -> Tensor:
        """Mask of the sentences of a side whose pair has the target of the ranked one, without copies, ``(batch, pool)``.

        Of several copies of another translation, the first one counts.
        """
        text_p, target_p = (self.gathered(encodings[name].features["text"]) for name in (side, "target"))
        group_p = torch.stack([text_p, target_p], dim=1).unique(dim=0, return_inverse=True)[1]
        number_p = torch.arange(len(group_p), device=group_p.device)
        first_g = number_p.new_full((len(group_p),), len(group_p)).scatter_reduce(0, group_p, number_p, "amin")
        is_copy_p = number_p > first_g[group_p]
        return self._same(encodings, "target") & ~self._same(encodings, side) & ~is_copy_p

    def _same(self, encodings: Mapping[str, Encoding], side: str) -> Tensor:
        """Whether a sentence of the pool has the same text as that of the ranked pair on this side, ``(batch, pool)``."""
        text_b = encodings[side].features["text"]
        return text_b[:, None] == self.gathered(text_b)[None, :]

    def _hard_negatives(self, encodings: Mapping[str, Encoding]) -> tuple[Tensor, Tensor]:
        """Embeddings of the negatives, shape ``(n, hidden)``, and a mask of those that a source omits, ``(batch, n)``."""
        hard = encodings[f"negatives-{self.negatives}"]
        same_bn = encodings["target"].features["text"][:, None] == hard.features["text"][None, :]
        excluded_bn = same_bn | ~hard.features["real"][None, :]
        if self.guided:
            source_bh, target_bh, negative_nh = (
                self.original(one).sentence_bh for one in (encodings["source"], encodings["target"], hard)
            )
            own_b1 = functional.cosines(source_bh, target_bh).diagonal()[:, None]
            excluded_bn = excluded_bn | (functional.cosines(source_bh, negative_nh) > own_b1)
        return self._project(hard.sentence_bh), excluded_bn

    def _soft_targets(self, encodings: Mapping[str, Encoding]) -> Tensor:
        """Logits of the soft targets: similarities within one side, or their mean, shape ``(batch, pool)``."""
        sides = SIDES if self.soft_sides == "both" else (self.soft_sides,)
        originals = [self.original(encodings[side]).sentence_bh for side in sides]
        cosine_bp = torch.stack([functional.cosines(one, self.gathered(one)) for one in originals]).mean(dim=0)
        return cosine_bp / float(self.soft_temperature or self.temperature)
