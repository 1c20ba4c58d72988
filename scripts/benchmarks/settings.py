"""Inputs of the benchmark: random encoders of several shapes, and sentence pairs of given lengths."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

from metaphrase import AlignmentLoss, ParallelCollator, Recipe, load_corpus, load_encoder
from metaphrase.corpus.parallel import load_parallel_folder
from metaphrase.encoders.loading import freeze_word_embeddings
from metaphrase.encoders.packed_starter import SPECIAL_TOKENS
from metaphrase.io.files import DEMO

#: Maximum length of a sentence in pieces, including special tokens, as in the papers.
MAX_LENGTH = 32

#: Lengths of source and target of every 166th pair of Tatoeba v1's 36 languages (LASER), sorted: pieces of XLM-R with
#: special tokens, truncated to 32. The means over all 31,692 pairs are 11.4 and 10.8.
TATOEBA = """
4,6 5,7 6,6 6,6 6,7 6,7 6,8 6,8 6,9 7,6 7,6 7,7 7,7 7,7 7,7 7,7 7,8 7,8 7,8 7,8 7,9 7,9 7,10 7,10 8,6 8,6 8,7 8,7 8,7
8,7 8,7 8,8 8,8 8,8 8,8 8,8 8,8 8,8 8,9 8,9 8,9 8,9 8,9 8,10 8,10 8,11 8,11 9,6 9,7 9,7 9,7 9,7 9,8 9,8 9,8 9,8 9,8 9,9
9,9 9,9 9,9 9,9 9,9 9,10 9,10 9,10 9,10 9,11 9,11 9,11 9,12 9,13 10,7 10,7 10,8 10,8 10,8 10,8 10,8 10,9 10,9 10,9 10,9
10,9 10,9 10,10 10,10 10,10 10,10 10,10 10,11 10,11 10,11 10,11 10,12 10,12 10,13 11,7 11,8 11,8 11,8 11,9 11,9 11,9 11,9
11,10 11,10 11,10 11,10 11,10 11,11 11,11 11,11 11,11 11,11 11,12 11,12 11,12 11,13 11,14 12,7 12,8 12,9 12,9 12,9 12,10
12,10 12,10 12,11 12,11 12,11 12,11 12,12 12,12 12,12 12,13 12,13 12,14 12,17 13,8 13,9 13,10 13,10 13,11 13,11 13,11
13,12 13,12 13,13 13,13 13,14 13,15 13,18 14,9 14,10 14,11 14,11 14,12 14,12 14,13 14,14 14,15 14,16 15,9 15,11 15,12
15,13 15,14 15,14 15,16 15,20 16,11 16,12 16,14 16,15 16,17 17,10 17,13 17,15 17,17 18,8 18,14 18,16 18,23 19,15 19,19
20,15 20,21 21,18 22,17 23,18 24,19 25,31 28,27 32,27 32,32
"""

Pair = dict[str, str]


@dataclass(frozen=True)
class Shape:
    """The architecture and the shape of an encoder."""

    model_type: str
    layers: int
    hidden: int
    vocabulary: int

    @property
    def config(self) -> dict[str, Any]:
        """Return the settings for transformers."""
        return {
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": max(self.hidden // 64, 2) if self.hidden != 384 else 12,
            "intermediate_size": 4 * self.hidden,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 514,
            "pad_token_id": 1,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "type_vocab_size": 1 if self.model_type == "xlm-roberta" else 2,
        }

    def __str__(self) -> str:
        return f"{self.layers} × {self.hidden}, V = {self.vocabulary:,}"


SHAPES = {
    "base": Shape("xlm-roberta", 12, 768, 250_002),  # XLM-R base
    "mbert": Shape("bert", 12, 768, 119_547),
    "large": Shape("xlm-roberta", 24, 1024, 250_002),  # XLM-R large
    "small": Shape("bert", 12, 384, 250_037),  # the starter
    "tiny": Shape("xlm-roberta", 2, 32, 600),
}


def random_encoder(shape: Shape, device: str) -> SentenceTransformer:
    """Build an encoder with random weights, whose tokenizer maps the words ``w4``, ``w5``, … to their ids."""
    with tempfile.TemporaryDirectory() as folder:  # sentence-transformers loads modules from folders only
        stub = AutoConfig.for_model(shape.model_type, **{**shape.config, "num_hidden_layers": 1, "vocab_size": 8})
        AutoModel.from_config(stub, add_pooling_layer=False).save_pretrained(folder)
        _tokenizer(shape.vocabulary).save_pretrained(folder)
        transformer = Transformer(folder, model_kwargs={"add_pooling_layer": False}, max_seq_length=MAX_LENGTH)
    config = AutoConfig.for_model(shape.model_type, **shape.config)
    transformer.model = AutoModel.from_config(config, add_pooling_layer=False)
    pooling = Pooling(shape.hidden, pooling_mode="cls")
    return SentenceTransformer(modules=[transformer, pooling], device=device)


def _tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    special = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": vocabulary - 1}
    words = {f"w{at}": at for at in range(4, vocabulary - 1)}
    tokenizer = Tokenizer(models.WordLevel(special | words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL_TOKENS, model_max_length=MAX_LENGTH)


def lengths(n: int, seed: int, *, full: bool = False) -> np.ndarray:
    """Return the lengths of both sides of pairs: Tatoeba's, or 32 throughout; shape ``(n, 2)``."""
    if full:
        return np.full((n, 2), MAX_LENGTH)
    drawn = np.array([[int(x) for x in pair.split(",")] for pair in TATOEBA.split()])
    drawn = drawn[np.argsort(drawn.sum(axis=1), kind="stable")]
    # Quantiles, so that a few pairs have the same mean lengths.
    spread = ((np.arange(n) + 0.5) * len(drawn) / n).astype(int)
    return drawn[np.random.default_rng(seed).permutation(spread)]


class Words:
    """Pairs of random words with a skewed frequency distribution, for encoders of `random_encoder`."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def pairs(self, n: int, *, full: bool = False, seed: int = 0) -> list[Pair]:
        """Return pairs."""
        rng = np.random.default_rng(seed)

        def text(length: int) -> str:
            ids = 4 + np.floor((self.vocabulary - 5) ** rng.random(length - 2) - 1).astype(int)
            return " ".join(f"w{i}" for i in ids)

        return [{"source": text(s), "target": text(t)} for s, t in lengths(n, seed, full=full)]


class RealTexts:
    """Real pairs of a folder for the starter; without a folder, bundled pairs with lengths close to Tatoeba's."""

    def __init__(self, tokenizer: Any, folder: str | None) -> None:
        if folder:
            sets = load_parallel_folder(folder).values()
            rows = [(s, t) for one in sets for s, t in zip(one.sources, one.targets, strict=True)]
        else:
            dataset = load_corpus(DEMO).dataset
            rows = list(zip(dataset["source"], dataset["target"], strict=True))
        self.rows = [{"source": s, "target": t} for s, t in rows]
        self.lengths: Any = None
        if not folder:
            sides = [tokenizer([row[side] for row in self.rows])["input_ids"] for side in ("source", "target")]
            self.lengths = np.array([[min(len(ids), MAX_LENGTH) for ids in side] for side in sides]).T

    def pairs(self, n: int, *, full: bool = False, seed: int = 0) -> list[Pair]:
        """Return distinct pairs; full-length pairs are concatenations, whose sides exceed the length limit."""
        order = np.random.default_rng(seed).permutation(len(self.rows))
        if full:
            parts = [[self.rows[i] for i in order[8 * at : 8 * at + 8]] for at in range(n)]
            return [{side: " ".join(row[side] for row in part) for side in ("source", "target")} for part in parts]
        if self.lengths is None:
            return [self.rows[i] for i in order[:n]]
        free = self.lengths[order].astype(float)
        chosen = []
        for wanted in lengths(n, seed):
            chosen.append(int(np.abs(free - wanted).sum(axis=1).argmin()))
            free[chosen[-1]] = np.inf
        return [self.rows[order[i]] for i in chosen]


@cache
def starter(device: str, folder: str | None) -> tuple[SentenceTransformer, RealTexts]:
    """Return the starter encoder with frozen word embeddings, and texts for it."""
    model = load_encoder("starter", device=device, max_length=MAX_LENGTH)
    freeze_word_embeddings(model)
    return model, RealTexts(model.tokenizer, folder)


def recipe(name: str, **arguments: Mapping[str, Any]) -> Recipe:
    """Return a packaged recipe with other arguments for some of its objectives."""
    content = Recipe.load(name).to_dict()
    for term in content["terms"]:
        term["args"] = {**term["args"], **arguments.get(term["objective"], {})}
    return Recipe.from_dict(content)


def batch_of(loss: AlignmentLoss, pairs: Sequence[Pair], device: str) -> Any:
    """Return the views of pairs."""
    views = ParallelCollator(loss.model.tokenizer, loss.views)(list(pairs))
    return {name: {key: value.to(device) for key, value in view.items()} for name, view in views.items()}


def subset_ids(vocabulary: int, size: int) -> torch.Tensor:
    """Return the ids of a subset vocabulary: special tokens and the most frequent words."""
    return torch.cat([torch.arange(min(size, vocabulary) - 1), torch.tensor([vocabulary - 1])])
