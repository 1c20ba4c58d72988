"""Smaller encoders: a vocabulary trimmed to some texts, and fewer layers.

:func:`trim_vocabulary` and :func:`prune_layers` return changed views of a model that share its other weights. Nothing is
trained, so measure what a change costs with `metaphrase.evaluation`.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import WeightedLayerPooling
from tokenizers import Tokenizer
from torch import nn

from metaphrase.encoders.adapters import shared_copy
from metaphrase.encoders.loading import used_piece_ids
from metaphrase.encoders.pooler import remove_pooler
from metaphrase.encoders.positions import first_position
from metaphrase.exceptions import ModelError, UsageError

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def trim_vocabulary(model: SentenceTransformer, texts: Iterable[str]) -> SentenceTransformer:
    """Return a view of a model whose vocabulary has only the pieces that occur in some texts; it shares the other weights.

    Special tokens, the pieces of the model's prompts, single characters and bytes are kept as well, so every text stays
    readable. Words that do not occur in the texts are split into smaller pieces. A text whose pieces are all kept is split
    as before and has the same embedding.

    Args:
        model: An encoder with a fast Unigram, WordPiece or BPE tokenizer. It does not change.
        texts: Texts in the languages of the trimmed model. Pieces that do not occur are removed, so pass many texts.

    Raises:
        ModelError: The tokenizer is of another kind.
        UsageError: ``texts`` is a single text.

    Reference: Abdaoui et al. 2020, "Load What You Need: Smaller Versions of Multilingual BERT" (SustaiNLP), for WordPiece.
    """
    if isinstance(texts, str):
        raise UsageError(
            "Trimming a vocabulary requires a list of texts, but got one text. Pass many texts in a list."
        )
    encoder: Any = model[0].auto_model
    backend: Any = getattr(model.tokenizer, "backend_tokenizer", None)
    kind = None if backend is None else type(backend.model).__name__
    if kind not in ("Unigram", "WordPiece", "BPE"):
        raise ModelError(
            "Trimming a vocabulary requires a fast tokenizer with Unigram, WordPiece or BPE pieces; this one is "
            f"{kind or 'not a fast tokenizer'}. Keep the whole vocabulary."
        )
    state = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
    seen = set(used_piece_ids(chain(texts, filter(None, model.prompts.values())), model.tokenizer).tolist())
    config = encoder.config.to_dict()
    seen |= {id_ for name, id_ in config.items() if name.endswith("_token_id") and isinstance(id_, int)}
    # XLM-R counts positions from its padding id, which must not change.
    seen |= {*range(first_position(encoder))}
    new_id = _trim(state, seen)

    model = shared_copy(model)
    encoder = model[0].auto_model
    old = model.tokenizer
    changed = copy.deepcopy(old, {id(old.backend_tokenizer): Tokenizer.from_str(json.dumps(state))})
    model[0].processor = changed
    table = encoder.get_input_embeddings()
    rows = torch.tensor(sorted(new_id, key=new_id.__getitem__), device=table.weight.device)
    whole = table.weight
    kept = nn.Parameter(whole.detach()[rows].clone(), requires_grad=whole.requires_grad)
    for one in encoder.modules():
        if isinstance(one, nn.Embedding) and one.weight is whole:  # T5 has the table under two names
            one.weight, one.num_embeddings, one.padding_idx = kept, len(rows), new_id.get(one.padding_idx)
    encoder.config.vocab_size = len(rows)
    for name, id_ in config.items():
        if name.endswith("_token_id") and id_ in new_id:
            setattr(encoder.config, name, new_id[id_])
    return model


def _trim(state: dict[str, Any], seen: set[int]) -> dict[int, int]:
    """Remove the pieces that are not needed from a tokenizer's serialised state.

    Returns the new id of each remaining old id.
    """
    model = state["model"]
    is_list = isinstance(model["vocab"], list)
    pieces = (
        dict(enumerate(piece for piece, _ in model["vocab"])) if is_list else {i: p for p, i in model["vocab"].items()}
    )
    added = {token["id"] for token in state["added_tokens"]}
    prefix, suffix = (model.get(key) or "" for key in ("continuing_subword_prefix", "end_of_word_suffix"))
    kept = {
        id_
        for id_, piece in pieces.items()
        if id_ in seen or id_ in added or piece == model.get("unk_token") or _is_character(piece, prefix, suffix)
    }
    if is_list:  # the score of an unknown piece lies a fixed amount below the worst piece's
        kept |= {model["unk_id"]} - {None}
        kept.add(min(pieces, key=lambda id_: model["vocab"][id_][1]))
    if "merges" in model:
        kept |= _parts({pieces[id_] for id_ in kept}, model, prefix)
    ordered = [*sorted(kept), *sorted(added - pieces.keys())]
    new_id = {old: new for new, old in enumerate(ordered)}
    if is_list:
        model["vocab"] = [model["vocab"][id_] for id_ in sorted(kept)]
        model["unk_id"] = new_id.get(model["unk_id"])
    else:
        model["vocab"] = {pieces[id_]: new_id[id_] for id_ in sorted(kept)}
    if "merges" in model:
        model["merges"] = [
            [left, right]
            for left, right in model["merges"]
            if {left, right, left + right.removeprefix(prefix)} <= model["vocab"].keys()
        ]
    for token in state["added_tokens"]:
        token["id"] = new_id[token["id"]]
    _renumber(state["post_processor"], new_id)
    return new_id


def _is_character(piece: str, prefix: str, suffix: str) -> bool:
    return (
        len(piece.removeprefix(prefix).removeprefix("▁").removesuffix(suffix)) <= 1
        or _BYTE.fullmatch(piece) is not None
    )


def _parts(pieces: set[str], model: Mapping[str, Any], prefix: str) -> set[int]:
    """Ids of all pieces that some BPE pieces are merged from."""
    sources: dict[str, set[str]] = {}
    for left, right in model["merges"]:
        sources.setdefault(left + right.removeprefix(prefix), set()).update((left, right))
    todo, found = list(pieces), set(pieces)
    while todo:
        new = sources.get(todo.pop(), set()) - found
        found |= new
        todo += new
    return {model["vocab"][piece] for piece in found if piece in model["vocab"]}


def _renumber(processor: dict[str, Any] | None, new_id: Mapping[int, int]) -> None:
    """Replace the ids of a post-processor's special tokens."""
    if processor is None:
        return
    for inner in processor.get("processors", []):
        _renumber(inner, new_id)
    for name in ("cls", "sep"):
        if name in processor:
            processor[name][1] = new_id[processor[name][1]]
    special = processor.get("special_tokens")
    for token in special.values() if isinstance(special, dict) else ():
        token["ids"] = [new_id[id_] for id_ in token["ids"]]


def prune_layers(model: SentenceTransformer, keep: Iterable[int]) -> SentenceTransformer:
    """Return a view of a model that has only some of its layers, in their order; it shares their weights.

    Without further training, accuracy decreases with every removed layer.

    Args:
        model: An encoder whose layers are one list. It does not change.
        keep: Indices of the layers, from 0.

    Raises:
        ModelError: A layer does not exist, the encoder's layers cannot be found, or they differ, so that a layer cannot take
            the place of another one (the first of ModernBERT).
        UsageError: No layer would remain.
    """
    wanted = sorted(set(keep))
    model = shared_copy(model)
    encoder: Any = model[0].auto_model
    count = encoder.config.num_hidden_layers
    if any(isinstance(module, WeightedLayerPooling) for module in model):
        raise ModelError("The model weighs the states of all of its layers (WeightedLayerPooling). Keep all layers.")
    stacks = [
        (parent, name, child)
        for parent in encoder.modules()
        for name, child in parent.named_children()
        if name in ("layer", "layers") and isinstance(child, nn.ModuleList) and len(child) == count
    ]
    if len(stacks) != 1:
        raise ModelError(
            f"The layers of an encoder of type {encoder.config.model_type} were not found. Keep all layers."
        )
    if not wanted:
        raise UsageError(f"An encoder requires at least one layer, but none of its {count} would be kept. Name one.")
    if missing := [str(layer) for layer in wanted if not 0 <= layer < count]:
        raise ModelError(f"Unknown layer {', '.join(missing)}: the encoder has {count} layers, 0 to {count - 1}.")
    ((parent, name, layers),) = stacks
    setattr(parent, name, nn.ModuleList(layers[layer] for layer in wanted))
    encoder.config.num_hidden_layers = len(wanted)
    for setting in ("layer_types", "attention_window"):
        if isinstance(values := getattr(encoder.config, setting, None), list):
            setattr(encoder.config, setting, [values[layer] for layer in wanted])
    with torch.device("meta"):
        rebuilt = remove_pooler(type(encoder)(encoder.config))
    if different := rebuilt.state_dict().keys() ^ remove_pooler(encoder).state_dict().keys():
        raise ModelError(
            f"The layers {wanted} alone do not form an encoder of type {encoder.config.model_type}, whose layers differ in "
            f"{min(different)}. Keep the first layer."
        )
    return model


def evenly_spaced(layers: int, count: int) -> list[int]:
    """Indices of `count` of an encoder's layers, evenly spaced from the first to the last.

    >>> evenly_spaced(12, 6), evenly_spaced(12, 1)
    ([0, 2, 4, 7, 9, 11], [11])
    """
    return [layers - 1] if count == 1 else np.linspace(0, layers - 1, count).round().astype(int).tolist()


def footprint(model: SentenceTransformer) -> int:
    """Bytes of a model's weights and tokenizer on disk."""
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    backend = getattr(model.tokenizer, "backend_tokenizer", None)
    return weights + (len(backend.to_str(pretty=True).encode()) if backend is not None else 0)
