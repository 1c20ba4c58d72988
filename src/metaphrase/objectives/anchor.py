"""Anchor: keep embeddings or token states close to those of the original encoder, or move them to those of a teacher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from metaphrase.encoders.loading import load_encoder
from metaphrase.exceptions import MetaphraseError, ModelError, UsageError
from metaphrase.io.digests import json_digest, tokenizer_content
from metaphrase.modeling.encoding import Encoding
from metaphrase.modeling.frozen import FrozenEncoder, FrozenEncoding
from metaphrase.modeling.functional import at_least_float32, normalized
from metaphrase.modeling.views import SIDES, Side, TeacherSentence, View
from metaphrase.objectives.base import Granularity, HeadSources, Objective

Sides = Literal["source", "target", "both", "interpolated"]


def anchor(embedding_bh: Tensor, original_bh: Tensor, *, normalize: bool = True) -> Tensor:
    """Squared distance between embeddings and the original ones, averaged over sentences.

    Args:
        embedding_bh: Sentence embeddings, shape ``(batch, hidden)``.
        original_bh: Sentence embeddings of the original encoder or of a teacher, shape ``(batch, hidden)``.
        normalize: Compare normalised embeddings, whose squared distance is ``2 (1 − cosine)``.

    Returns:
        Scalar of at least 0; between 0 and 4 for normalised embeddings.

    >>> anchor(torch.eye(2), 3 * torch.eye(2)).item(), anchor(torch.eye(2), 3 * torch.eye(2), normalize=False).item()
    (0.0, 4.0)
    """
    prepare = normalized if normalize else at_least_float32
    return (prepare(embedding_bh) - prepare(original_bh)).pow(2).sum(dim=-1).mean()


def token_anchor(tokens_blh: Tensor, original_blh: Tensor, mask_bl: Tensor) -> Tensor:
    """:func:`anchor` of token states: the mean over the tokens of a sentence, then over sentences.

    Args:
        tokens_blh: Token states, shape ``(batch, length, hidden)``.
        original_blh: Token states of the original encoder, shape ``(batch, length, hidden)``.
        mask_bl: True at tokens, shape ``(batch, length)``.

    Returns:
        Scalar between 0 and 4.
    """
    distance_bl = (normalized(tokens_blh) - normalized(original_blh)).pow(2).sum(dim=-1).masked_fill(~mask_bl, 0.0)
    return (distance_bl.sum(dim=1) / mask_bl.sum(dim=1).clamp(min=1)).mean()


def interpolated_anchor(source_bh: Tensor, target_bh: Tensor, originals: tuple[Tensor, Tensor]) -> Tensor:
    """:func:`anchor` of the mean of the two normalised embeddings of a pair, whose sides may approach each other.

    Args:
        source_bh: Embeddings of the source sentences, shape ``(batch, hidden)``.
        target_bh: Embeddings of the target sentences, shape ``(batch, hidden)``.
        originals: The same of the original encoder.

    Returns:
        Scalar between 0 and 4.
    """
    return anchor(normalized(source_bh) + normalized(target_bh), normalized(originals[0]) + normalized(originals[1]))


@dataclass(eq=False, repr=False, kw_only=True)
class Anchor(Objective):
    """Keep embeddings close to those of the encoder at the start of training, or move them to those of a teacher.

    If English targets stay in place, languages aligned with English stay aligned, and a new language moves towards English.
    A frozen copy of the model encodes the sentences a second time. It shares frozen word embeddings and is neither saved nor
    released. With a teacher there is no copy; the teacher reads the sentences with its own tokenizer and without a prompt.

    Args:
        sides: ``"source"``, ``"target"`` or ``"both"``: the sentences that keep their places. ``"interpolated"``: the mean of
            the two embeddings of a pair keeps its place, so its sentences may approach each other.
        level: ``"sentence"``: sentence embeddings. ``"tokens"``: the states of all tokens, which taggers and question
            answering read.
        teacher: Another encoder instead of the original one: ``"starter"``, a folder or a Hub id (see
            :func:`metaphrase.encoders.loading.load_encoder`). Its embeddings must have as many components as the trained
            ones.
        toward: ``"itself"``: each sentence is compared with its own original embedding. ``"target"``: both sides are
            compared with that of the target sentence (English).
        normalize: Compare normalised embeddings. If false, their lengths count too.

    Inputs: the columns ``source`` and ``target``.

    Relations: Equation 1 of Reimers & Gurevych 2020 is ``sides: both``, ``toward: target``, ``normalize: false`` and a
    ``teacher``, times 2, because its sides are added. ``MSELoss`` of sentence-transformers also divides by the number of
    components. The defaults are its first term, with the original encoder as the teacher and normalised embeddings.
    ``"interpolated"`` is the frozen interpolation anchor of SALT.

    Raises:
        UsageError: ``level: tokens`` or ``sides: interpolated`` is combined with what applies to single sentence embeddings.
        MetaphraseError: The teacher cannot be loaded; the class is that of the cause.
        ModelError: The embeddings of the teacher have another size.

    Reference: Reimers & Gurevych 2020, Making Monolingual Sentence Embeddings Multilingual using Knowledge Distillation,
    section 2, equation 1.
    """

    name: ClassVar[str] = "anchor"
    granularity: ClassVar[Granularity] = "sentence"
    any_tokenizer: ClassVar[bool] = True
    citation: ClassVar[str] = """\
@inproceedings{reimers-gurevych-2020-making,
    title = "Making Monolingual Sentence Embeddings Multilingual using Knowledge Distillation",
    author = "Reimers, Nils and Gurevych, Iryna",
    booktitle = "Proceedings of EMNLP 2020",
    year = "2020",
}"""

    sides: Sides = "target"
    level: Literal["sentence", "tokens"] = "sentence"
    teacher: str | None = None
    toward: Literal["itself", "target"] = "itself"
    normalize: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.sides, self.level) == ("interpolated", "tokens"):
            raise UsageError(
                "'sides: interpolated' of 'anchor' averages the two embeddings of a pair, which 'level: tokens' does not "
                "have. Use 'level: sentence', or 'sides: both'."
            )

        distils = self.teacher is not None or self.toward == "target" or not self.normalize
        if distils and (self.sides == "interpolated" or self.level == "tokens"):
            raise UsageError(
                "'teacher', 'toward' and 'normalize' of 'anchor' apply to the embeddings of single sentences. Omit them, or "
                "use 'level: sentence', and 'source', 'target' or 'both' for 'sides'."
            )
        self.tokenizer: Any = None

    @property
    def reads_original(self) -> bool:  # type: ignore[override]
        """Whether there is no teacher."""
        return self.teacher is None

    @property
    def truncatable(self) -> bool:  # type: ignore[override]
        """Whether normalised sentence embeddings are compared."""
        return self.level == "sentence" and self.normalize

    def attach(self, sources: HeadSources) -> None:
        """Take the original encoder, or load the teacher."""
        super().attach(sources)
        if self.teacher is None:
            return
        try:
            model = load_encoder(self.teacher, device="cpu", max_length=self.max_length)
        except MetaphraseError as error:
            raise type(error)(f"The 'teacher' of 'anchor' cannot be loaded. {error}") from error
        size = model.get_embedding_dimension()
        if size != sources.embedding_size:
            raise ModelError(
                f"The embeddings of the 'teacher' {self.teacher} have {size} components, but those of the encoder to train "
                f"have {sources.embedding_size}. Choose encoders of one size, or project the teacher's embeddings first: "
                'docs/keeping.md, "Learn from a teacher".'
            )
        modules: Any = tuple(model.children())
        self.original, self.tokenizer = FrozenEncoder(modules[0].auto_model, modules[1:]), model.tokenizer

    def views(self) -> tuple[View, ...]:
        """Return the sides that are read, and those that the teacher reads."""
        own = {view.name: view for view in super().views()}
        read, compared = self._sides, [self._compared(side) for side in self._sides]
        if self.teacher is None:
            return tuple(view for name, view in own.items() if name in (*read, *compared))
        taught = [
            TeacherSentence(f"teacher-{side}", side, self.max_length, self.tokenizer)
            for side in dict.fromkeys(compared)
        ]
        return (*(own[side] for side in read), *taught)

    def forward(self, encodings: Mapping[str, Encoding]) -> Tensor:
        """Compute the loss, averaged over the sides."""
        pairs = [(encodings[side], self._original(encodings, self._compared(side))) for side in self._sides]
        if self.sides == "interpolated":
            (source, then_source), (target, then_target) = pairs
            originals = then_source.sentence_bh, then_target.sentence_bh
            return interpolated_anchor(source.sentence_bh, target.sentence_bh, originals)
        if self.level == "tokens":
            return torch.stack(
                [token_anchor(now.tokens_blh, then.tokens_blh, now.mask_bl) for now, then in pairs]
            ).mean()
        losses = [anchor(now.sentence_bh, then.sentence_bh, normalize=self.normalize) for now, then in pairs]
        return torch.stack(losses).mean()

    def digests(self) -> dict[str, str]:
        """Digest of the original encoder, or of the teacher with its tokenizer."""
        if self.teacher is None:
            return super().digests()
        return {f"teacher {self.teacher}": json_digest([self.original.digest, tokenizer_content(self.tokenizer)])}

    @property
    def _sides(self) -> tuple[Side, ...]:
        return (self.sides,) if self.sides in ("source", "target") else SIDES

    def _compared(self, side: Side) -> Side:
        """The side of the original embeddings that those of a side are compared with."""
        return "target" if self.toward == "target" else side

    def _original(self, encodings: Mapping[str, Encoding], side: Side) -> FrozenEncoding:
        """The encoding of a side by the original encoder or the teacher, with embeddings of the size of the trained ones."""
        original: FrozenEncoder = self.original
        if self.teacher is None:
            return original(encodings[side])
        trained, features = encodings[self._sides[0]], encodings[f"teacher-{side}"].features
        return original(replace(trained, features={"input_ids": features["ids"]}, mask_bl=features["mask"].bool()))
