"""Smaller and faster forms of an encoder: fewer pieces, fewer layers, another runtime.

:func:`trim_vocabulary` and :func:`prune_layers` give changed views of a model; :func:`drafted` writes one beside its
destination and loads what was written, so that it can be measured before it is let in. Nothing here trains: what a change
costs is for `metaphrase.evaluation` to say.
"""

from __future__ import annotations

import copy
import hashlib
import json
import platform
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import yaml
from sentence_transformers import (
    SentenceTransformer,
    export_dynamic_quantized_onnx_model,
    export_static_quantized_openvino_model,
)
from tokenizers import Tokenizer
from torch import nn

from metaphrase.exceptions import MissingExtraError, ModelError, UsageError
from metaphrase.modeling.packing import first_position
from metaphrase.publishing.card import AlignmentModelCardData
from metaphrase.publishing.hub import CARD, RECIPE, load, release

Format = Literal["safetensors", "onnx", "openvino"]

#: Of each runtime: what sentence-transformers needs to export for it, and what it is known to need in its turn.
RUNTIMES = {
    "onnx": (
        "optimum.onnxruntime",
        "ORTModelForFeatureExtraction",
        "optimum-onnx 0.1.0 needs transformers before 4.58",
    ),
    "openvino": (
        "optimum.intel.openvino",
        "OVModelForFeatureExtraction",
        "optimum-intel 2.2.0 needs transformers before 5.6",
    ),
}
#: The 8-bit forms of ONNX; ``"int8"`` is the one that this machine's kind of processor can run.
ONNX_INT8 = ("arm64", "avx2", "avx512", "avx512_vnni")

#: How files of weights end.
WEIGHTS = (".safetensors", ".onnx", ".bin")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
#: Texts whose pieces are counted at a time.
_BATCH = 4096


# Vocabulary


def trim_vocabulary(model: SentenceTransformer, texts: Iterable[str]) -> SentenceTransformer:
    """A view of a model that knows only the pieces that occur in some texts; it shares the other weights.

    Special tokens, the pieces of the model's prompts, single characters and bytes are kept too, so that a text is never
    less readable to the model than it was; words that do not occur in the texts fall into smaller pieces. A text all of
    whose pieces were kept is cut into the same pieces, and gets the same embedding.

    Args:
        model: An encoder with a fast tokenizer over Unigram, WordPiece or BPE pieces. It stays as it is.
        texts: Texts of the languages that the model is for. Pieces that do not occur are lost: give many.

    Raises:
        ModelError: The tokenizer is none of these.

    Reference: Abdaoui et al. 2020, "Load What You Need: Smaller Versions of Multilingual BERT" (SustaiNLP), for WordPiece.
    """
    encoder: Any = model[0].auto_model
    backend: Any = getattr(model.tokenizer, "backend_tokenizer", None)
    kind = None if backend is None else type(backend.model).__name__
    if kind not in ("Unigram", "WordPiece", "BPE"):
        raise ModelError(
            f"A vocabulary can be trimmed where a fast tokenizer has Unigram, WordPiece or BPE pieces; this one is "
            f"{kind or 'no fast tokenizer'}. Leave it as it is."
        )
    state = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
    seen = _pieces_of(Tokenizer.from_str(json.dumps(state)), chain(texts, filter(None, model.prompts.values())))
    config = encoder.config.to_dict()
    seen |= {id_ for name, id_ in config.items() if name.endswith("_token_id") and isinstance(id_, int)}
    # XLM-R counts positions from its padding id, which therefore has to stay where it is.
    seen |= {*model.tokenizer.all_special_ids, *range(first_position(encoder))}
    new_id = _trim(state, seen)

    model = _view(model)
    encoder = model[0].auto_model
    old = model.tokenizer
    changed = copy.deepcopy(old, {id(old._tokenizer): Tokenizer.from_str(json.dumps(state))})
    model[0].processor = changed
    table = encoder.get_input_embeddings()
    rows = torch.tensor(sorted(new_id, key=new_id.__getitem__), device=table.weight.device)
    table.weight = nn.Parameter(table.weight.detach()[rows].clone(), requires_grad=table.weight.requires_grad)
    table.num_embeddings = encoder.config.vocab_size = len(rows)
    table.padding_idx = new_id.get(table.padding_idx)
    for name, id_ in config.items():
        if name.endswith("_token_id") and id_ in new_id:
            setattr(encoder.config, name, new_id[id_])
    return model


def _pieces_of(tokenizer: Tokenizer, texts: Iterable[str]) -> set[int]:
    seen: set[int] = set()
    left = iter(texts)
    while batch := list(islice(left, _BATCH)):
        for encoding in tokenizer.encode_batch(batch):
            seen.update(encoding.ids)
    return seen


def _trim(state: dict[str, Any], seen: set[int]) -> dict[int, int]:
    """Take out of a tokenizer's serialised state what is not needed.

    Returns:
        The new id of each old one that is left.
    """
    model = state["model"]
    is_list = isinstance(model["vocab"], list)
    pieces = (
        dict(enumerate(piece for piece, _ in model["vocab"])) if is_list else {i: p for p, i in model["vocab"].items()}
    )
    added = {token["id"] for token in state["added_tokens"]}
    prefix = model.get("continuing_subword_prefix") or ""
    kept = {
        id_
        for id_, piece in pieces.items()
        if id_ in seen or id_ in added or piece == model.get("unk_token") or _is_character(piece, prefix)
    }
    if is_list:  # what is unknown scores less than the worst piece by a fixed amount
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


def _is_character(piece: str, prefix: str) -> bool:
    return len(piece.removeprefix(prefix).removeprefix("▁")) <= 1 or _BYTE.fullmatch(piece) is not None


def _parts(pieces: set[str], model: Mapping[str, Any], prefix: str) -> set[int]:
    """Ids of everything that some BPE pieces are merged from."""
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
    """Give the special tokens of a post-processor their new ids."""
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


# Layers


def prune_layers(model: SentenceTransformer, keep: Iterable[int]) -> SentenceTransformer:
    """A view of a model that has only some of its layers, in their old order; it shares their weights.

    Without further training this costs accuracy, the more the more layers go.

    Args:
        model: An encoder whose layers are one list. It stays as it is.
        keep: Numbers of the layers, from 0.

    Raises:
        ModelError: There is no such layer, or the encoder's layers cannot be found.
        UsageError: No layer would be left.
    """
    wanted = sorted(set(keep))
    model = _view(model)
    encoder: Any = model[0].auto_model
    count = encoder.config.num_hidden_layers
    stacks = [
        (parent, name, child)
        for parent in encoder.modules()
        for name, child in parent.named_children()
        if name in ("layer", "layers") and isinstance(child, nn.ModuleList) and len(child) == count
    ]
    if len(stacks) != 1:
        raise ModelError(
            f"The layers of an encoder of type {encoder.config.model_type} were not found. Leave them as they are."
        )
    if not wanted:
        raise UsageError(f"An encoder needs at least one layer, and none of its {count} is to be kept. Name one.")
    if missing := [str(layer) for layer in wanted if not 0 <= layer < count]:
        raise ModelError(f"There is no layer {', '.join(missing)}: the encoder has {count} layers, 0 to {count - 1}.")
    ((parent, name, layers),) = stacks
    setattr(parent, name, nn.ModuleList(layers[layer] for layer in wanted))
    encoder.config.num_hidden_layers = len(wanted)
    if getattr(encoder.config, "layer_types", None):
        encoder.config.layer_types = [encoder.config.layer_types[layer] for layer in wanted]
    return model


def spread(layers: int, count: int) -> list[int]:
    """So many of an encoder's layers, evenly spread from the first to the last.

    >>> spread(12, 6), spread(12, 1)
    ([0, 2, 4, 7, 9, 11], [11])
    """
    return [layers - 1] if count == 1 else np.linspace(0, layers - 1, count).round().astype(int).tolist()


def _view(model: SentenceTransformer) -> SentenceTransformer:
    """A copy that shares weights and tokenizer."""
    shared = [model.tokenizer, *model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(part): part for part in shared})


# Files


def check_runtime(format: Format) -> None:
    """Make sure that sentence-transformers can export to a format here.

    Raises:
        MissingExtraError: What it needs is not installed, or does not work with the installed transformers.
    """
    if format == "safetensors":
        return
    module, name, known = RUNTIMES[format]
    try:
        getattr(import_module(module), name)
    except (ImportError, AttributeError, RuntimeError) as error:
        reason = str(error).strip().rpartition("\n")[2]
        raise MissingExtraError(
            f"Sentence-transformers exports to {format} through {module}, which cannot be used here: {reason}. It comes "
            f"with `pip install 'sentence-transformers[{format}]'`, but {known}, and this is transformers "
            f"{version('transformers')}. Until there is one for it, export without --format, which needs nothing more."
        ) from error


def check_destination(output_dir: str | Path) -> None:
    """Make sure that nothing is overwritten.

    Raises:
        UsageError: There is something already.
    """
    folder = Path(output_dir)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UsageError(f"{folder} exists. Nothing is overwritten: choose another --output_dir, or remove it.")


def footprint(model: SentenceTransformer) -> int:
    """Bytes that the weights and the tokenizer of a model take on disk."""
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    backend = getattr(model.tokenizer, "backend_tokenizer", None)
    return weights + (len(backend.to_str(pretty=True).encode()) if backend is not None else 0)


@dataclass
class Draft:
    """An export that is written, but not yet in its place.

    Attributes:
        folder: Where it lies.
        model: What was loaded from there.
        destination: Where it is to go.
    """

    folder: Path
    model: SentenceTransformer
    destination: Path

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    @property
    def weights(self) -> dict[str, str]:
        """SHA-256 of each file of weights."""
        files = sorted(path for path in self.folder.rglob("*") if path.suffix in WEIGHTS)
        found = {}
        for path in files:
            with path.open("rb") as stream:
                found[path.relative_to(self.folder).as_posix()] = hashlib.file_digest(stream, "sha256").hexdigest()
        return found

    def publish(self, card: str) -> Path:
        """Put the export into its place, all of it at once.

        Args:
            card: Its model card.
        """
        (self.folder / CARD).write_text(card, encoding="utf-8")
        check_destination(self.destination)
        self.folder.chmod(0o755)
        return self.folder.replace(self.destination)


@contextmanager
def drafted(
    model: SentenceTransformer,
    output_dir: str | Path,
    *,
    format: Format = "safetensors",
    quantize: str | None = None,
    texts: Sequence[str] = (),
    source: str | Path | None = None,
) -> Iterator[Draft]:
    """Write a model beside its destination, and load what was written; what is not published in the block is removed.

    Args:
        model: The model.
        output_dir: Where it is to go.
        format: ``"safetensors"`` loads as `SentenceTransformer(folder)`, the others with ``backend=`` their name.
        quantize: 8-bit form of the runtime formats: ``"int8"``, or one of ``ONNX_INT8``.
        texts: Sentences that OpenVINO's 8-bit form is calibrated with.
        source: Folder that the model comes from; its recipe and licence go along.

    Raises:
        MissingExtraError: The format needs packages that are not there.
        UsageError: The destination exists.
        RuntimeError: What was written does not give the model's embeddings.
    """
    check_runtime(format)
    check_destination(output_dir)
    destination = Path(output_dir)
    destination.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", suffix=".export", dir=destination.parent))
    try:
        recipe = None if source is None else Path(source) / RECIPE
        release(
            model,
            folder,
            recipe=yaml.safe_load(recipe.read_text(encoding="utf-8")) if recipe and recipe.is_file() else None,
            card=AlignmentModelCardData(),
            prompts=model.prompts,
        )
        settings = folder / "config_sentence_transformers.json"
        content = json.loads(settings.read_text(encoding="utf-8"))
        content["default_prompt_name"] = model.default_prompt_name
        settings.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        if source is not None and (Path(source) / "LICENSE").is_file():
            shutil.copy(Path(source) / "LICENSE", folder)
        written = (
            load(folder, device=str(model.device))
            if format == "safetensors"
            else convert(folder, format, quantize, texts)
        )
        yield Draft(folder, written, destination)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def convert(
    folder: Path, format: Literal["onnx", "openvino"], quantize: str | None = None, texts: Sequence[str] = ()
) -> SentenceTransformer:
    """Replace the weights of a saved model by those of another runtime, through sentence-transformers' exporters.

    Args:
        folder: A SentenceTransformer folder.
        format: The runtime.
        quantize: See :func:`drafted`.
        texts: Sentences to calibrate OpenVINO's 8-bit form with.

    Returns:
        The model, loaded with that runtime.
    """
    model = SentenceTransformer(str(folder), backend=format, device="cpu", model_kwargs={"export": True})
    model.save_pretrained(str(folder), create_model_card=False)
    weights = folder / format
    if quantize is not None:
        plain = {path.name: path for path in weights.iterdir()}
        if format == "onnx":
            arm = platform.machine().lower() in ("aarch64", "arm64")
            kind = {"int8": "arm64" if arm else "avx2"}.get(quantize, quantize)
            export_dynamic_quantized_onnx_model(model, kind, str(folder))
        else:
            with tempfile.TemporaryDirectory() as sample:
                rows = "".join(json.dumps({"sentence": text}) + "\n" for text in texts)
                (Path(sample) / "train.jsonl").write_text(rows, encoding="utf-8")
                export_static_quantized_openvino_model(
                    model, None, str(folder), sample, "default", "train", "sentence"
                )
        # The 8-bit weights take the name that is loaded where none is given.
        stem = next(Path(name).stem for name in plain if Path(name).suffix in (".onnx", ".xml"))
        new = [path for path in weights.iterdir() if path.name not in plain]
        for path in plain.values():
            path.unlink()
        for path in new:
            path.rename(path.with_name(stem + path.suffix))
    (folder / "model.safetensors").unlink()
    return SentenceTransformer(str(folder), backend=format, device="cpu", local_files_only=True)
