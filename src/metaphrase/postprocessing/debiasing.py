"""Debiasing an encoder: choose the directions of language identity, project them out, and write the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Unpack

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from metaphrase.corpus.declaration import articles_of
from metaphrase.corpus.parallel import TARGET_LANGUAGE, ParallelSet, load_parallel_folder, parallel_files
from metaphrase.encoders.debiasing import language_directions, without_directions
from metaphrase.encoders.loading import load_encoder
from metaphrase.evaluation.encoding import EncodingOptions, embed_sides
from metaphrase.evaluation.guard_data import GUARD_FOLDERS, LabelledData, load_guard_data
from metaphrase.evaluation.guards import (
    Guard,
    chance_in_words,
    changes_in_words,
    check_guard_folders,
    choose_alpha,
    data_guard,
)
from metaphrase.evaluation.retrieval import evaluate_retrieval
from metaphrase.exceptions import UsageError
from metaphrase.io.arguments import Count, Range, checked
from metaphrase.io.configuration import ENCODER, option
from metaphrase.io.counts import counted
from metaphrase.io.environment import versions
from metaphrase.io.files import UDHR
from metaphrase.publishing.drafts import check_destination, derived_card, drafted, how_to_load, part_folders

#: Number of directions if none is given.
DIRECTIONS = 20
#: Numbers of directions that ``auto`` measures; all possible numbers if the languages differ in fewer directions.
MEASURED = (10, 20, 30, 40)
#: Texts of each language on which the directions are estimated when each weight of a merge is measured.
SAMPLED_TEXTS = 12
#: Name of the data if none are given. The other articles can measure the result.
DECLARATION = "udhr, articles with odd numbers"
RULE = (
    "The chosen number of directions has the largest gain on the development data among those whose guards hold, at this "
    "number and at all smaller ones above 0. If none of these gains anything, no direction is removed. A guard holds unless "
    "its score is significantly worse than that of the original encoder."
)


@checked
@dataclass
class DebiasOptions:
    """The model, the number of directions, and the texts that they are estimated on."""

    model: str = option(help=f"Encoder: {ENCODER}. Can be passed as the first argument.", first=True)
    output_dir: str = option(help="New folder for the result.", aliases=["-o"])
    directions: Count | Literal["auto"] = option(
        DIRECTIONS,
        "Number of directions to remove, fewer than there are languages. auto: of 10, 20, 30 and 40, the number with the "
        "largest gain on --dev for which all guards hold.",
    )
    data: str | None = option(
        None,
        "Folder of texts xx-en.tsv.gz in many languages, with the same content in each. Default: articles with odd numbers "
        "of the Declaration of Human Rights, which is part of the package.",
    )
    split: str | None = option(None, "Split of --data: xx-en.dev.tsv.gz, xx-en.train.tsv.gz, …")
    prompt: str | None = option(
        None,
        "Text before each sentence. Default: no prompt, which suits questions and passages alike. 'auto': the stored query "
        "prompt.",
    )
    batch_size: Count = option(32, "Sentences per forward pass.")
    dev: str | None = option(
        None,
        "With --directions auto: folder of parallel sentences (xx-en.dev.tsv.gz or xx-en.tsv.gz) of several languages. The "
        "gain is the accuracy with which a translation is found in one pool of the sentences of all languages.",
    )
    guard: list[str] = option(
        [], f"With --directions auto: folders of data on which the result must not get worse: {GUARD_FOLDERS}."
    )
    max_items: Annotated[int, Range(3, 2**31 - 1)] = option(
        300, "With --directions auto: maximum number of pairs, or sentences, of a language in each folder."
    )


@dataclass(frozen=True)
class DirectionsCurve:
    """Gain and cost of the removal of several numbers of directions.

    Attributes:
        directions: The chosen number; 0 if none gains anything without a loss.
        gain: Name of the data of the gain.
        points: For each number its ``directions``, its ``gain``, its ``guards`` by name, as
            `metaphrase.evaluation.guards.Guard.measure` returns them, and whether all of them ``hold``.
        rule: How the number was chosen.
    """

    directions: int
    gain: str
    points: list[dict[str, Any]]
    rule: str = RULE

    def __str__(self) -> str:
        """The choice in words, with gain and cost of no removal and the chosen one, or of all if nothing can be gained."""
        costs = "; ".join(
            f"{counted(point['directions'], 'direction')}: {changes_in_words(self.gain, point)}"
            for point in self.points
            if not self.directions or point["directions"] in (0, self.directions)
        )
        if not self.directions:
            return f"Nothing can be gained without a loss. Gain and cost: {costs}."
        chosen = next(point for point in self.points if point["directions"] == self.directions)
        were = "was" if self.directions == 1 else "were"
        return (
            f"{counted(self.directions, 'direction')} {were} chosen. Gain and cost: {costs}.{chance_in_words(chosen)}"
        )


@dataclass(frozen=True)
class Debiasing:
    """What was removed and written.

    Attributes:
        model: Name of the original model.
        output_dir: Folder of the result; None if the number of directions was to be chosen, and none gains anything without a
            loss.
        directions: Number of directions that were removed.
        share: Their share of the variance of the languages' means.
        languages: Languages that they were estimated on.
        texts: Number of texts.
        data: Name of the folder of the texts.
        curve: Gain and cost by number of directions, if it was chosen; see `DirectionsCurve`.
        versions: Versions of the packages.
    """

    model: str
    output_dir: str | None
    directions: int
    share: float
    languages: list[str]
    texts: int
    data: str
    curve: dict[str, Any] | None
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
    embeddings = embed_languages(model, texts, prompt=prompt, batch_size=batch_size, show_progress=show_progress)
    direction_kh, share = language_directions(embeddings, directions)
    return without_directions(model, direction_kh), share


@checked
def embed_languages(
    model: SentenceTransformer, texts: Mapping[str, Sequence[str]], **encoding: Unpack[EncodingOptions]
) -> dict[str, Tensor]:
    """Embeddings of the texts of each language, on which directions are estimated, shape ``(texts, hidden)``."""
    if not texts:
        raise UsageError("There are no texts to estimate directions on. Pass texts of several languages.")
    for language, one in texts.items():
        if isinstance(one, str) or not one:
            raise UsageError(f"The texts of {language!r} must be a list of at least one text, but are {one!r}.")
    with model.truncate_embeddings(None):  # the directions are removed before embeddings are truncated
        sides = embed_sides(model, texts.values(), **encoding)
        return {language: torch.from_numpy(one_nh) for language, one_nh in zip(texts, sides, strict=True)}


@dataclass(frozen=True)
class _Removal:
    """The removal of a number of directions, estimated on embeddings of each language."""

    embeddings: Mapping[str, Tensor]

    def apply(self, base: SentenceTransformer, alpha: float) -> SentenceTransformer:
        """The model without the first ``alpha`` directions."""
        return without_directions(base, language_directions(self.embeddings, int(alpha))[0])


def choose_directions(
    model: SentenceTransformer, embeddings: Mapping[str, Tensor], gain: Guard, guards: Sequence[Guard]
) -> DirectionsCurve:
    """Measure gain and cost of the removal of several numbers of directions, and choose one by `RULE`.

    Args:
        model: The model that `gain` compares with. It does not change.
        embeddings: Embeddings of each language, see `metaphrase.encoders.debiasing.language_directions`.
        gain: Measurement that should improve, such as retrieval from one pool of several languages.
        guards: Measurements that must not get worse. Similarity structure cannot be one: it does not count what is
            projected out.

    Raises:
        UsageError: There is one language only.
    """
    most = min(len(embeddings), *(one_nh.shape[1] for one_nh in embeddings.values())) - 1
    numbers = [number for number in MEASURED if number <= most] or list(range(1, most + 1))
    if not numbers:
        raise UsageError("One language has no direction of language identity. Pass texts in several languages.")
    curve = choose_alpha(model, _Removal(embeddings), gain, guards, alphas=numbers)
    points = [
        {"directions": int(point["alpha"]), **{key: value for key, value in point.items() if key != "alpha"}}
        for point in curve.points
    ]
    return DirectionsCurve(int(curve.alpha) if curve.gains else 0, curve.gain, points)


def parallel_texts(
    folder: Path | None = None, split: str | None = None, *, most: int | None = None
) -> dict[str, Sequence[str]]:
    """The texts of a folder of translations by language; by default articles with odd numbers of the packaged declaration.

    With ``most``, only so many English texts and their translations, the same in all languages: those that are translated
    into most languages.
    """
    sets = (
        articles_of(load_parallel_folder(UDHR), "odd") if folder is None else load_parallel_folder(folder, split=split)
    )
    if most is not None:
        counts = Counter(text for one in sets.values() for text in dict.fromkeys(one.targets))
        kept = {text for text, _ in counts.most_common(most)}
        sets = {
            language: one.rows(at for at, text in enumerate(one.targets) if text in kept)
            for language, one in sets.items()
        }
    texts: dict[str, Sequence[str]] = {language: one.sources for language, one in sets.items()}
    texts[TARGET_LANGUAGE] = list(dict.fromkeys(text for one in sets.values() for text in one.targets))
    return texts


def check_direction_count(count: int, model: SentenceTransformer) -> None:
    """Refuse more directions than the packaged languages differ in."""
    with model.truncate_embeddings(None):  # directions are removed before embeddings are truncated
        languages = len(parallel_files(UDHR, None, None)) + 1  # and English
        most = min(languages, model.get_embedding_dimension() or 0) - 1 if count else 0
    if count > most:
        raise UsageError(
            f"--debias is {count}, but at most {most} directions can be removed from this encoder, by the number of packaged "
            "languages and the size of the embeddings."
        )


def write_debiased(
    options: DebiasOptions,
    *,
    command: str | None = None,
    note: Callable[[str], None] = lambda message: None,
    show_progress: bool = False,
) -> Debiasing:
    """Debias a model and write the result as a plain SentenceTransformer folder.

    Args:
        options: The model, the number of directions, and the texts that they are estimated on.
        command: The command line, for the card.
        note: Called with a line about each stage.
        show_progress: Show a progress bar.

    Raises:
        UsageError: The folder exists, the languages do not differ in so many directions, or the number of directions is to be
            chosen without data that show gain and loss.
        MissingFileError: A folder does not exist, or has no texts or data.
    """
    check_destination(options.output_dir)
    _check(options)
    measured = _measured(options) if options.directions == "auto" else []
    folder = None if options.data is None else Path(options.data)
    texts = parallel_texts(folder, options.split)
    if options.directions != "auto" and options.directions >= len(texts):
        raise UsageError(
            f"The means of {len(texts)} languages differ in at most {len(texts) - 1} directions, but 'directions' is "
            f"{options.directions}. Lower it, or pass texts in more languages with --data."
        )
    model = load_encoder(options.model)
    count = sum(map(len, texts.values()))
    note(f"Embedding {count:,} texts in {len(texts)} languages …")
    encoding: EncodingOptions = {
        "prompt": None if options.prompt == "none" else options.prompt,
        "batch_size": options.batch_size,
        "show_progress": show_progress,
    }
    embeddings = embed_languages(model, texts, **encoding)
    directions, curve = options.directions, None
    if directions == "auto":
        note("Measuring gain and guards for several numbers of directions …")
        gain, *guards = (data_guard(model, one, **encoding) for one in measured)
        curve = choose_directions(model, embeddings, gain, guards)
        directions = curve.directions
    direction_kh, share = language_directions(embeddings, directions) if directions else (None, 0.0)
    result = Debiasing(
        model=options.model,
        output_dir=options.output_dir if directions else None,
        directions=directions,
        share=share,
        languages=sorted(texts),
        texts=count,
        data=DECLARATION if folder is None else folder.resolve().name,
        curve=None if curve is None else asdict(curve),
        versions=versions(),
    )
    if direction_kh is None:
        return result
    card = derived_card(
        model,
        options.model,
        debias={
            "directions": directions,
            "languages": len(texts),
            "data": result.data,
            **({} if curve is None else {"chosen": str(curve)}),
        },
        command=command,
    )
    source, *added = part_folders(options.model)
    debiased = without_directions(model, direction_kh)
    with drafted(debiased, options.output_dir, source=source, tuned=added, card=card) as draft:
        draft.publish()
    return result


def _measured(options: DebiasOptions) -> list[LabelledData]:
    """The development pairs, whose translations are found in one pool of all languages, and the data of the guards."""
    pairs = load_guard_data(str(options.dev), max_items=options.max_items)
    if not all(isinstance(one, ParallelSet) for one in pairs.sets.values()):
        raise UsageError(
            f"--dev {options.dev} must be a folder of parallel sentences, xx-en.dev.tsv.gz or xx-en.tsv.gz. Pass other data "
            "with --guard."
        )
    guards = [load_guard_data(folder, max_items=options.max_items) for folder in options.guard]
    return [in_one_pool(pairs), *guards]


def in_one_pool(pairs: LabelledData) -> LabelledData:
    """Parallel sentences whose translations are searched in one pool of the sentences of all languages."""
    return replace(pairs, evaluate=partial(evaluate_retrieval, one_pool=True))


def _check(options: DebiasOptions) -> None:
    """Check that data are passed exactly if ``--directions auto`` chooses, and ``--split`` only with ``--data``."""
    if options.split and options.data is None:
        raise UsageError("--split is a split of --data. Pass a folder of texts with --data, or omit it.")
    if options.directions != "auto":
        if options.dev or options.guard:
            raise UsageError(
                "--dev and --guard choose the number of directions. Pass them with --directions auto, or omit them."
            )
        if options.max_items != DebiasOptions.max_items:
            raise UsageError(
                "--max_items is a setting of --directions auto. Pass it with --directions auto, or omit it."
            )
        return
    if options.dev is None or not options.guard:
        raise UsageError(
            "--directions auto needs data that show the gain and the loss. Pass a folder of parallel sentences with --dev, "
            "and folders of other data with --guard."
        )
    check_guard_folders(options.guard, options.dev)


def describe(result: Debiasing) -> str:
    """Sentences about the choice and about what was written."""
    chosen = "" if result.curve is None else f"{DirectionsCurve(**result.curve)} "
    if result.output_dir is None:
        return f"{chosen}Nothing was written."
    return (
        f"{chosen}Wrote {result.output_dir}: {result.model} without {counted(result.directions, 'direction')}, which held "
        f"{100 * result.share:.1f} % of the variance of the mean embeddings of {len(result.languages)} languages. "
        f"{how_to_load(result.output_dir)}"
    )
