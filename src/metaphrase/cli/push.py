"""`metaphrase push`: upload a release, a task vector or an aligned corpus to a Hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from metaphrase.cli.options import parse
from metaphrase.cli.output import emit
from metaphrase.exceptions import MissingFileError, UsageError
from metaphrase.io.configuration import option
from metaphrase.io.environment import flush_denormals
from metaphrase.io.redaction import without_tokens

DESCRIPTION = (
    "Upload a release, a task vector (.safetensors), or a bitext (.parquet) as a data set. Of the folder of a run, only the "
    "release is uploaded, or with --vector its task vector. If a push fails, run it again: it uploads what is missing. The "
    "access token comes from HF_TOKEN or `hf auth login`, never from the command line."
)

EXAMPLES = (
    "metaphrase push runs/sw --repo me/swahili",
    "metaphrase push runs/sw --repo me/swahili --private --with_heads --revision next",
    "metaphrase push runs/sw --vector --bits 4 --repo me/swahili-vector",
    "metaphrase push aligned.parquet --repo me/swahili-english --license cc-by-4.0",
)


@dataclass
class PushOptions:
    """What to push, and the repository."""

    path: str = option(
        help="Folder of a run, a task vector (.safetensors) or a bitext. Can be passed as the first argument.",
        first=True,
    )
    repo: str = option(help="Repository, as me/name; created if it does not exist.", aliases=["--to"])
    private: bool = option(False, "Make a new repository private, and push nothing to a public one.")
    revision: str | None = option(None, "Branch to commit to; default: main.")
    message: str | None = option(None, "Title of the commit.")
    with_heads: bool = option(False, "Also push the objectives' heads, for further training (folder heads/).")
    check: bool = option(
        True, "Compare the model with its reference embeddings before, and its files with a download after the push."
    )
    vector: bool = option(
        False,
        "Push only the task vector of the run: the changes of the weights, which load_encoder adds to the base.",
    )
    bits: Literal[16, 8, 4] | None = option(None, "Bits for each value of --vector: 16, 8 or 4 (default: 8).")
    license: str | None = option(None, "Licence of a corpus, as the Hub spells it, e.g. cc-by-4.0.")


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    (options,) = parse("metaphrase push", (PushOptions,), argv, description=DESCRIPTION, examples=EXAMPLES)
    what = options.path
    vector = what.endswith(".safetensors") and Path(what).is_file()
    corpus = Path(what).is_file() and not vector
    _check(options, is_vector=vector, is_corpus=corpus)
    # Imported after the options are parsed, because it takes seconds.
    from metaphrase.postprocessing import merging
    from metaphrase.publishing import hub

    flush_denormals()
    common = {"private": options.private, "revision": options.revision, "commit_message": options.message}
    if vector or options.vector:
        bits: Literal[16, 8, 4] = options.bits or 8
        command = hub.push_command(
            what, options.repo, vector_bits=None if vector else bits, check=options.check, **common
        )
        with TemporaryDirectory(prefix="metaphrase-") as place:
            file = what if vector else merging.write_vector_of_run(Path(what), Path(place), bits)
            url = hub.push_vector(file, options.repo, check=options.check, command=command, **common)
    elif corpus:
        url = hub.push_corpus(what, options.repo, license=options.license, **common)
    else:
        url = hub.push(what, options.repo, with_heads=options.with_heads, check=options.check, **common)
    pushed = without_tokens(what)
    emit({"pushed": pushed, "repo": options.repo, "url": url}, f"Pushed {pushed} to {options.repo}: {url}")
    return 0


def _check(options: PushOptions, *, is_vector: bool, is_corpus: bool) -> None:
    """Refuse a path that does not exist, and options that do not apply to what is pushed."""
    if not Path(options.path).exists():
        raise MissingFileError(
            f"{without_tokens(options.path)} does not exist. Name the folder of a run, a task vector or a bitext."
        )
    if options.with_heads and (is_corpus or is_vector or options.vector):
        raise UsageError(
            "--with_heads applies to releases: a corpus or a task vector has no heads. Omit --with_heads."
        )
    if is_corpus and not options.check:
        raise UsageError("--no_check applies to releases and task vectors. Omit it for a corpus.")
    if is_corpus and options.vector:
        raise UsageError(f"{options.path} is not the folder of a run, so it has no task vector. Omit --vector.")
    if options.bits and (is_vector or not options.vector):
        raise UsageError("--bits applies to --vector, which writes the task vector of a run. Omit it.")
    if not is_corpus and options.license:
        raise UsageError(
            "--license applies to corpora only. The licence of a release is that of its base, or of `metaphrase train "
            "--license`. Omit it."
        )
