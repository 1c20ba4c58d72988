"""`metaphrase push`: upload a release, or an aligned corpus, to a Hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from metaphrase.cli import emit, parse
from metaphrase.exceptions import UsageError

SUMMARY = "Push a released encoder to the Hub"

DESCRIPTION = (
    "metaphrase push RUN --repo me/name: upload the release of a run, and nothing else that lies in its folder; or "
    "metaphrase push ALIGNED.parquet --repo me/corpus: upload a bitext as a data set. Run it again after a fault: it uploads "
    "what is missing. The access token comes from HF_TOKEN or `hf auth login`, never from the command line."
)

EXAMPLES = (
    "metaphrase push runs/sw --repo me/swahili",
    "metaphrase push runs/sw --repo me/swahili --private --with_heads --revision next",
    "metaphrase push aligned.parquet --repo me/swahili-english --license cc-by-4.0",
)


@dataclass
class PushOptions:
    """Where to push, and what of it."""

    repo: str = field(metadata={"aliases": ["--to"], "help": "Repository, as me/name; made if it does not exist."})
    private: bool = field(default=False, metadata={"help": "Make a new repository private."})
    revision: str | None = field(default=None, metadata={"help": "Branch to commit to; default: main."})
    message: str | None = field(default=None, metadata={"help": "Title of the commit."})
    with_heads: bool = field(
        default=False, metadata={"help": "Push the objectives' heads too, to go on training from (folder heads/)."}
    )
    check: bool = field(
        default=True, metadata={"help": "Download what was pushed and compare it with its reference embeddings."}
    )
    license: str | None = field(
        default=None, metadata={"help": "Licence of a corpus, as the Hub spells it, e.g. cc-by-4.0."}
    )


def run(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: `RUN --repo me/name` and further options.

    Returns:
        The exit status.

    Raises:
        ValueError: What to push is missing from the command line, or an option is wrong.
        OSError: The Hub cannot be reached or refuses.
    """
    what, flags = _split(argv)
    (options,) = parse("metaphrase push", (PushOptions,), flags, description=DESCRIPTION, examples=EXAMPLES)
    if what is None:
        raise UsageError("Push what? Name a run's folder or a corpus first: metaphrase push RUN --repo me/name.")
    corpus = Path(what).is_file()
    if corpus and options.with_heads:
        raise UsageError(f"{what} is a corpus, which has no heads; leave out --with_heads.")
    if not corpus and options.license:
        raise UsageError("--license is for corpora; a release has its licence from its base model.")
    from metaphrase.publishing import hub  # after the options: it takes seconds to import

    common = {"private": options.private, "revision": options.revision, "commit_message": options.message}
    if corpus:
        url = hub.push_corpus(what, options.repo, license=options.license, **common)
    else:
        url = hub.push(what, options.repo, with_heads=options.with_heads, check=options.check, **common)
    emit({"pushed": what, "repo": options.repo, "url": url}, f"Pushed {what} to {options.repo}: {url}")
    return 0


def _split(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """What to push, which comes first, and the flags after it."""
    return (argv[0], list(argv[1:])) if argv and not argv[0].startswith("-") else (None, list(argv))
