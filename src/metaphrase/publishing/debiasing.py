"""Debiasing: a release without the directions in which the embeddings of languages differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer

from metaphrase.corpus.declaration import articles_of
from metaphrase.corpus.parallel import TARGET_LANGUAGE, load_parallel_folder
from metaphrase.encoders.debiasing import language_directions, without_directions
from metaphrase.encoders.loading import find_folder, load_encoder, split_vectors
from metaphrase.evaluation.encoding import embed_sides
from metaphrase.io.arguments import Count, checked
from metaphrase.io.configuration import option
from metaphrase.io.environment import versions
from metaphrase.io.files import UDHR
from metaphrase.publishing.export import check_destination, drafted, how_to_load
from metaphrase.publishing.merging import derived_card

#: Number of directions if none is given.
DIRECTIONS = 20
#: Name of the data if none are given. The other articles can measure the result.
DECLARATION = "udhr, articles with odd numbers"


@checked
@dataclass
class DebiasOptions:
    """The model, the number of directions, and the texts that they are estimated on."""

    model: str = option(help="Encoder: a folder, a Hub id, or 'starter'. May be the first argument.", first=True)
    output_dir: str = option(help="New folder for the result.", aliases=["-o"])
    directions: Count = option(DIRECTIONS, "Number of directions to remove, fewer than there are languages.")
    data: str | None = option(
        None,
        "Folder of texts xx-en.tsv.gz in many languages, with the same content in each. Default: articles with odd numbers "
        "of the Declaration of Human Rights, which is part of the package.",
    )
    split: str | None = option(None, "Split of --data: xx-en.dev.tsv.gz, xx-en.train.tsv.gz, …")
    prompt: str | None = option(
        None,
        "Text before each sentence. Default: none, which serves questions and passages alike. 'auto': the query prompt.",
    )
    batch_size: Count = option(32, "Sentences per forward pass.")


@dataclass(frozen=True)
class Debiasing:
    """What was removed and written.

    Attributes:
        model: Name of the original model.
        output_dir: Folder of the result.
        directions: Number of directions that were removed.
        share: Their share of the variance of the languages' means.
        languages: Languages that they were estimated on.
        texts: Number of texts.
        data: Name of the folder of the texts.
        versions: Versions of the packages.
    """

    model: str
    output_dir: str
    directions: int
    share: float
    languages: list[str]
    texts: int
    data: str
    versions: dict[str, str]


@checked
def debias(
    model: SentenceTransformer,
    texts: Mapping[str, Sequence[str]],
    directions: Count = DIRECTIONS,
    *,
    prompt: str | None = None,
    batch_size: Count = 32,
    show_progress: bool = False,
) -> tuple[SentenceTransformer, float]:
    """Remove the principal directions of language identity from the embeddings of a model.

    Args:
        model: The model. It does not change.
        texts: Texts of each language, with the same content in each.
        directions: Number of directions.
        prompt: Text before each sentence; ``"auto"`` is the stored query prompt.
        batch_size: Texts per forward pass.
        show_progress: Show a progress bar.

    Returns:
        The debiased model, which shares the weights, and the share of the variance of the languages' means that was removed.

    Raises:
        UsageError: The languages do not differ in so many directions.
        NonFiniteError: An embedding is NaN or infinite.
    """
    with model.truncate_embeddings(None):  # the directions are removed before embeddings are truncated
        sides = embed_sides(model, texts.values(), prompt=prompt, batch_size=batch_size, show_progress=show_progress)
    embeddings = {language: torch.from_numpy(one_nh) for language, one_nh in zip(texts, sides, strict=True)}
    direction_kh, share = language_directions(embeddings, directions)
    return without_directions(model, direction_kh), share


def parallel_texts(folder: Path | None = None, split: str | None = None) -> dict[str, Sequence[str]]:
    """The texts of a folder of translations by language; by default articles with odd numbers of the packaged declaration."""
    sets = (
        articles_of(load_parallel_folder(UDHR), "odd") if folder is None else load_parallel_folder(folder, split=split)
    )
    texts: dict[str, Sequence[str]] = {language: one.sources for language, one in sets.items()}
    texts[TARGET_LANGUAGE] = list(dict.fromkeys(text for one in sets.values() for text in one.targets))
    return texts


def write_debiased(
    options: DebiasOptions,
    *,
    command: str | None = None,
    notify: Callable[[str], None] = lambda message: None,
    show_progress: bool = False,
) -> Debiasing:
    """Debias a model and write the result as a plain SentenceTransformer folder.

    Args:
        options: The model, the number of directions, and the texts that they are estimated on.
        command: The command line, for the card.
        notify: Called with a line about each stage.
        show_progress: Show a progress bar.

    Raises:
        UsageError: The folder exists, or the languages do not differ in so many directions.
        MissingFileError: The folder of texts does not exist, or has no texts.
    """
    check_destination(options.output_dir)
    folder = None if options.data is None else Path(options.data)
    texts = parallel_texts(folder, options.split)
    model = load_encoder(options.model)
    count = sum(map(len, texts.values()))
    notify(f"Embedding {count:,} texts in {len(texts)} languages …")
    debiased, share = debias(
        model,
        texts,
        options.directions,
        prompt=options.prompt,
        batch_size=options.batch_size,
        show_progress=show_progress,
    )
    result = Debiasing(
        model=options.model,
        output_dir=options.output_dir,
        directions=options.directions,
        share=share,
        languages=sorted(texts),
        texts=count,
        data=DECLARATION if folder is None else folder.resolve().name,
        versions=versions(),
    )
    source = find_folder(split_vectors(options.model)[0])[1]
    card = derived_card(
        model,
        options.model,
        debias={"directions": result.directions, "languages": len(texts), "data": result.data},
        command=command,
    )
    with drafted(debiased, options.output_dir, source=source, card=card) as draft:
        draft.publish()
    return result


def describe(result: Debiasing) -> str:
    """A sentence about what was written."""
    return (
        f"Wrote {result.output_dir}: {result.model} without the {result.directions} directions that hold "
        f"{100 * result.share:.1f} % of the variance of the mean embeddings of {len(result.languages)} languages. "
        f"{how_to_load(result.output_dir)}"
    )
