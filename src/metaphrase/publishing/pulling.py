"""Pulling: an encoder of any name as a plain SentenceTransformer folder, which loads without this library."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from metaphrase.encoders.installed import is_packaged
from metaphrase.encoders.loading import load_encoder
from metaphrase.encoders.names import find_folder, full_name, has_vector, model_file, split_vectors
from metaphrase.io.arguments import checked
from metaphrase.io.configuration import option
from metaphrase.io.environment import versions
from metaphrase.publishing.contents import CARD, weights_digests
from metaphrase.publishing.drafts import check_destination, derived_card, drafted, how_to_load, part_folders
from metaphrase.publishing.examples import name_model


@checked
@dataclass
class PullOptions:
    """The encoder, and where it is written."""

    model: str = option(
        help="Encoder: an installed model such as metaphrase-e5-small, a Hub id, 'starter', or a base and its task vectors. "
        "Can be passed as the first argument.",
        first=True,
    )
    output_dir: str = option(
        help="New folder for the encoder. Can be passed as the second argument.", aliases=["-o"], first=True
    )


@dataclass(frozen=True)
class Pull:
    """What was written.

    Attributes:
        model: Name of the encoder, with its version if it is installed.
        output_dir: The folder.
        weights: SHA-256 of each file of weights.
        versions: Versions of the packages.
    """

    model: str
    output_dir: str
    weights: dict[str, str]
    versions: dict[str, str]


def pull(options: PullOptions) -> Pull:
    """Load an encoder and write it as a plain SentenceTransformer folder, with its card, licence and notices.

    Raises:
        UsageError: The folder exists.
        MetaphraseError: The encoder cannot be loaded; see :func:`metaphrase.encoders.loading.load_encoder`.
    """
    check_destination(options.output_dir)
    model, full = load_encoder(options.model, device="cpu"), full_name(options.model)  # before a folder has the name
    name, vectors = split_vectors(options.model)
    source = find_folder(name)[1]
    card, added = derived_card(model, options.model), part_folders(options.model)[1:]
    with drafted(model, options.output_dir, source=source, tuned=added, card=card) as draft:
        text, weights = None, weights_digests(draft.folder)
        describes = not vectors and (not has_vector(source) or is_packaged(source))  # others have a card of the vector
        if describes and (card_file := model_file(source, CARD)) is not None:
            text = name_model(card_file.read_text(encoding="utf-8", errors="replace"), options.output_dir, [name])
            text = text.replace("library_name: metaphrase", "library_name: sentence-transformers", 1)
            text = text.replace("\n- task-vector\n", "\n", 1)
            text = _with_weights(text, weights)  # the card has those of the release before it was stored in 4 bits
        draft.publish(text)
    return Pull(full, options.output_dir, weights, versions())


def _with_weights(card: str, weights: Mapping[str, str]) -> str:
    """A card that records the digests of its own weights; those of its runs and of its source stay as they are."""
    record = "  weights:\n" + "".join(f"    {file}: {digest}\n" for file, digest in weights.items())
    text, replaced = re.subn(r"^  weights:\n(?:    .*\n)+", record, card, count=1, flags=re.MULTILINE)
    return text if replaced else re.sub(r"^metaphrase:\n", rf"\g<0>{record}", text, count=1, flags=re.MULTILINE)


def describe(result: Pull) -> str:
    """A sentence about what was written."""
    return f"Wrote {result.output_dir}: {result.model}. {how_to_load(result.output_dir)}"
