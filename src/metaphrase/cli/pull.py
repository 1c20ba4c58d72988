"""``metaphrase pull MODEL DIR``: an installed model, or a model of the Hub, as a plain SentenceTransformer folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from metaphrase.cli.options import parse
from metaphrase.cli.output import emit
from metaphrase.publishing.pulling import PullOptions, describe, pull

DESCRIPTION = (
    "Write an encoder as a plain SentenceTransformer folder, with its card, licence and notices. The encoder can be an "
    "installed model, a model or a task vector on the Hub, the starter, or a base and its task vectors."
)
EXAMPLES = (
    "metaphrase pull metaphrase-e5-small my-encoder",
    "metaphrase pull me/swahili-vector runs/sw",
    'metaphrase pull "starter + sw.safetensors" runs/sw',
)


def run(argv: Sequence[str]) -> int:
    """Load, write, and say how to load the result."""
    (options,) = parse("metaphrase pull", [PullOptions], argv, description=DESCRIPTION, examples=EXAMPLES)
    result = pull(options)
    emit(asdict(result), describe(result))
    return 0
