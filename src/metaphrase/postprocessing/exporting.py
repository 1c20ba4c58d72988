"""Export of smaller encoders: reduce a model, measure the result, write it with its model card."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from sentence_transformers import SentenceTransformer

from metaphrase.corpus.checks import read_corpus
from metaphrase.corpus.codes import split_languages
from metaphrase.corpus.monolingual import load_monolingual
from metaphrase.corpus.parallel import TARGET_LANGUAGE, ParallelSet, load_parallel_folder
from metaphrase.encoders import starter
from metaphrase.encoders.folders import public_name
from metaphrase.encoders.loading import load_encoder
from metaphrase.encoders.names import PLUS, find_folder, has_vector, is_starter, model_folder, split_vectors
from metaphrase.encoders.reduction import evenly_spaced, footprint, prune_layers, trim_vocabulary
from metaphrase.evaluation.compare import compare
from metaphrase.evaluation.retrieval import evaluate_retrieval
from metaphrase.evaluation.significance import RESAMPLES
from metaphrase.exceptions import MissingFileError, UsageError
from metaphrase.io.arguments import AtLeast0, Count, CountOr0, Layers, Resamples, Seed, checked
from metaphrase.io.configuration import ENCODER, option
from metaphrase.io.counts import counted
from metaphrase.io.files import DEMO, UDHR
from metaphrase.publishing.card import AlignmentModelCardData, result_row
from metaphrase.publishing.contents import weights_digests
from metaphrase.publishing.drafts import Draft, check_destination, drafted, how_to_load, part_folders
from metaphrase.publishing.markdown import cell, table
from metaphrase.publishing.provenance import (
    LICENSE_KEYS,
    as_list,
    earlier_training,
    find_card,
    hub_base,
    read_card,
    stated,
    stated_license,
)

logger = logging.getLogger(__name__)

#: Metadata of a card that do not apply to a reduced model.
_STALE = ("metrics", "model-index", "metaphrase")
#: Metadata of the card of a model on the Hub, or of a task vector, that also apply to a reduced model.
_INHERITED = ("language", *LICENSE_KEYS, "base_model")


@checked
@dataclass
class ExportOptions:
    """The model, how it is reduced, and the data that measure the result."""

    model: str = option(help=f"Encoder: {ENCODER}. Can be passed as the first argument.", first=True)
    output_dir: str = option(help="New folder for the result.", aliases=["-o"])
    languages: list[str] = option(
        [],
        "Keep only the pieces of these languages and English, separated by spaces or commas, that occur in the "
        "packaged bitext, --corpus and --texts.",
    )
    corpus: list[str] = option([], "Bitext whose pieces are kept, as for `metaphrase train`.")
    texts: list[str] = option([], "Text whose pieces are kept, one sentence per line; also .gz.")
    layers: Layers | None = option(None, "Number of layers to keep, evenly spaced from the first to the last.")
    keep_layers: list[CountOr0] = option([], "Indices of the layers to keep, from 0.")
    data: str | None = option(
        None,
        "Folder of test sets xx-en.tsv.gz. Default: the packaged test sets of the languages, from the demo or "
        "the Declaration of Human Rights.",
    )
    split: str | None = option(None, "Split of --data: xx-en.dev.tsv.gz, xx-en.test.tsv.gz, …")
    max_loss: AtLeast0 | None = option(
        None, "Write nothing if a language loses significantly more than this, in points of accuracy."
    )
    batch_size: Count = option(32, "Sentences per forward pass.")
    resamples: Resamples = option(RESAMPLES, "Bootstrap resamples of intervals and tests.")
    seed: Seed = option(0, "Seed of the bootstrap.")

    @property
    def trims(self) -> bool:
        """Whether the vocabulary is trimmed."""
        return bool(self.languages or self.corpus or self.texts)


@dataclass
class Export:
    """A reduced model that is measured but not yet published.

    Attributes:
        options: The options.
        changes: What was changed, in words.
        before: Result of `evaluate_retrieval` with the original model.
        after: The same with the written, reduced model.
        comparison: Their comparison.
        sizes: ``before`` and ``after`` of megabytes on disk, pieces, layers and parameters.
        lost: Languages that lost significantly more than ``max_loss``.
        draft: The written model.
        model: The original model.
        languages: Languages that are kept.
        tests: Name of the test set of each language.
    """

    options: ExportOptions
    changes: list[str]
    before: dict[str, Any]
    after: dict[str, Any]
    comparison: Mapping[str, Any]
    sizes: dict[str, dict[str, float]]
    lost: list[str]
    draft: Draft
    model: SentenceTransformer = field(repr=False)
    languages: list[str]
    tests: dict[str, str]

    def publish(self, command: str) -> Path:
        """Move the reduced model to its destination, with a card."""
        metadata, text = _original_card(self.model, self.options)
        results = result_rows(self.comparison, self.tests)
        head = _metadata(self, metadata, results, command)
        return self.draft.publish(f"---\n{head}---\n\n{_card_text(self, text, results)}")


@contextmanager
def prepare_export(
    options: ExportOptions, *, note: Callable[[str], None] = lambda message: None, show_progress: bool = False
) -> Iterator[Export]:
    """Reduce a model, write it to a temporary folder and measure it; it is deleted at the end unless it is published.

    Args:
        options: The model, how it is reduced, and the data that measure the result.
        note: Called with a line about each stage.
        show_progress: Show progress bars.

    Raises:
        UsageError: Options are missing or contradict each other, or the destination exists.
        MissingFileError: A language has no test set.
    """
    _check(options)
    check_destination(options.output_dir)
    languages = [code for code in dict.fromkeys(split_languages(options.languages)) if code != TARGET_LANGUAGE]
    languages, texts = _kept_texts(options, languages) if options.trims else (languages, [])
    sets, tests = _test_sets(options, languages)

    def measure(measured: SentenceTransformer, name: str) -> dict[str, Any]:
        note(f"Measuring {name} on {counted(len(sets), 'language')} …")
        return evaluate_retrieval(
            measured,
            sets,
            name=name,
            prompt="auto",
            batch_size=options.batch_size,
            resamples=options.resamples,
            seed=options.seed,
            show_progress=show_progress,
        ).to_dict()

    model = load_encoder(options.model)
    reduced, changes = _reduce(model, options, texts)
    before = measure(model, options.model)
    source, *added = part_folders(options.model)
    with drafted(reduced, options.output_dir, source=source, tuned=added) as draft:
        after = measure(draft.model, options.output_dir)
        comparison = compare(before, after, resamples=options.resamples, seed=options.seed)
        lost = [
            language
            for language, row in comparison["languages"].items()
            if options.max_loss is not None and row["interval"][1] < -options.max_loss
        ]
        sizes = _sizes(model, reduced, draft)
        yield Export(options, changes, before, after, comparison, sizes, lost, draft, model, languages, tests)


def size_rows(sizes: Mapping[str, Mapping[str, float]]) -> Iterator[tuple[str, str, str]]:
    """Label, value before and value after of each size of an `Export`."""
    for name, pair in sizes.items():
        form = ",.1f" if name == "megabytes" else ","
        yield "MB on disk" if name == "megabytes" else name, format(pair["before"], form), format(pair["after"], form)


# ----------------------------------------------------------------------------------------------------------- reduction


def _check(options: ExportOptions) -> None:
    if options.layers is not None and options.keep_layers:
        raise UsageError("Pass --layers or --keep_layers, not both.")
    if options.split and options.data is None:
        raise UsageError("--split is a split of --data. Pass a folder of test sets with --data, or omit it.")
    if options.languages and not split_languages(options.languages):
        raise UsageError("--languages names no language. Name those to keep, or omit it.")
    if not (options.trims or options.layers or options.keep_layers):
        raise UsageError(
            "No change is requested. Pass languages (--languages, --corpus, --texts) or layers (--layers, --keep_layers)."
        )


def _kept_texts(options: ExportOptions, languages: list[str]) -> tuple[list[str], list[str]]:
    """The languages that are kept, those given and those of the corpus, and the texts whose pieces are kept."""
    packaged = {split: load_parallel_folder(DEMO, split=split) for split in ("train", "dev")}  # not the test split
    texts = [text for sets in packaged.values() for pairs in sets.values() for text in pairs.targets]
    if options.corpus:
        sets, _ = read_corpus(options.corpus, languages=languages or None)
        languages = list(dict.fromkeys([*languages, *sets]))
        texts += [text for pairs in sets.values() for text in (*pairs.sources, *pairs.targets)]
    for content in load_monolingual(options.texts) if options.texts else ():
        texts += content.split("\n")
    available = packaged["train"]
    missing = [language for language in languages if language not in available]
    if missing and not options.corpus and not options.texts:
        raise UsageError(
            f"The package has no text of {', '.join(missing)}; it has {', '.join(available)}. Pass text with --corpus or "
            "--texts."
        )
    for sets in packaged.values():
        texts += [text for language in languages if language in sets for text in sets[language].sources]
    return languages, texts


def _test_sets(options: ExportOptions, languages: Sequence[str]) -> tuple[dict[str, ParallelSet], dict[str, str]]:
    """Test sets by language, and the name of the folder of each."""
    if options.data is not None:
        sets = load_parallel_folder(options.data, languages or None, options.split)
        return sets, dict.fromkeys(sets, Path(options.data).resolve().name)
    if options.trims and not languages:  # the other packaged languages are those that the encoder loses
        raise UsageError(
            "The smaller vocabulary cannot be measured without a language other than English. Pass languages with "
            "--languages, or test sets with --data."
        )
    demo = load_parallel_folder(DEMO, split="test")
    available = load_parallel_folder(UDHR) | demo
    if missing := [language for language in languages if language not in available]:
        raise MissingFileError(
            f"The package has no test set of {', '.join(missing)}. Pass a folder of test sets with --data."
        )
    sets = {language: available[language] for language in languages} or demo
    return sets, {language: DEMO.name if language in demo else UDHR.name for language in sets}


def _reduce(
    model: SentenceTransformer, options: ExportOptions, texts: Sequence[str]
) -> tuple[SentenceTransformer, list[str]]:
    """The reduced model, and the changes in words."""
    changes = []
    reduced = model
    if texts:
        reduced = trim_vocabulary(reduced, texts)
        changes.append(f"{len(reduced.tokenizer):,} of {len(model.tokenizer):,} pieces kept")
    if options.layers or options.keep_layers:
        count = model[0].auto_model.config.num_hidden_layers
        if options.layers is not None and options.layers > count:
            raise UsageError(f"--layers {options.layers} was requested, but the encoder has {count}.")
        keep = options.keep_layers or evenly_spaced(count, int(options.layers or 0))
        reduced = prune_layers(reduced, keep)
        kept = sorted(set(keep))
        changes.append(f"{len(kept)} of {count} layers kept ({', '.join(map(str, kept))})")
    return reduced, changes


def _sizes(model: SentenceTransformer, reduced: SentenceTransformer, draft: Draft) -> dict[str, dict[str, float]]:
    encoders: list[Any] = [model[0].auto_model, reduced[0].auto_model]
    pairs: dict[str, list[float]] = {
        "megabytes": [round(size / 1e6, 3) for size in (footprint(model), draft.size)],
        "pieces": [len(model.tokenizer), len(reduced.tokenizer)],
        "layers": [encoder.config.num_hidden_layers for encoder in encoders],
        "parameters": [sum(tensor.numel() for tensor in encoder.parameters()) for encoder in encoders],
    }
    return {key: {"before": before, "after": after} for key, (before, after) in pairs.items()}


# ---------------------------------------------------------------------------------------------------------------- card


def _card_folder(name: str) -> Path | None:
    """The folder with the card of the starter or of a local model; None for others. A task vector has a card of its own."""
    if is_starter(name):
        return find_folder(name)[1]
    folder = None if split_vectors(name)[1] else model_folder(name)
    return None if folder is None or has_vector(folder) else folder


def _original_card(model: SentenceTransformer, options: ExportOptions) -> tuple[dict[str, Any], str]:
    """Metadata and text of the original model's card.

    Of a model on the Hub and of a task vector, only the metadata that also apply to the export.
    """
    source, path = _card_folder(options.model), None
    if not split_vectors(options.model)[1]:
        path = find_card(str(source or options.model), revision=hub_base(model, options.model)[1])
    if path is None:  # task vectors state both
        languages = stated(options.model, "language")
        return ({"language": languages} if languages else {}) | stated_license(options.model), ""
    metadata, text = read_card(path)
    if metadata is None:
        logger.warning("The metadata of %s cannot be read. Add the licence to the new card.", path)
        metadata = {}
    if source is None:
        return {key: metadata[key] for key in _INHERITED if key in metadata}, ""
    return metadata, text


def result_rows(comparison: Mapping[str, Any], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Rows of the card's results; the mean over the languages only if all come from one test set."""
    card = AlignmentModelCardData()
    for name in dict.fromkeys(names.values()):
        rows = {language: row for language, row in comparison["languages"].items() if names[language] == name}
        card.add_comparison(name, {"languages": rows, "pooled": comparison["pooled"]})
    mixed = len(set(names.values())) > 1
    return [row for row in card.results if not (mixed and row["language"] == "all")]


def _metadata(export: Export, original: Mapping[str, Any], results: list[dict[str, Any]], command: str) -> str:
    """Metadata of the new card: the original card's that still apply, and the new results."""
    options = export.options
    card = AlignmentModelCardData(
        model_name=Path(options.output_dir).name,
        results=results,
        command=command,
        weights=weights_digests(export.draft.folder),
        tags=["sentence-transformers", "metaphrase"],
        source=earlier_training(options.model),
    )
    kept = {key: value for key, value in original.items() if key not in _STALE}
    if is_starter(split_vectors(options.model)[0]):
        card.base_model = starter.HUB_ID
        kept |= {"license": "mit"} if is_starter(options.model) else {}
    elif _card_folder(options.model) is None:
        card.base_model, card.base_model_revision = hub_base(export.model, options.model)
    if card.base_model is not None:  # the base model of the original card is not the nearest
        for key in ("base_model", "base_model_relation"):
            kept.pop(key, None)
    if options.trims:
        for key in ("language", "language_bcp47"):
            kept.pop(key, None)
        card.language = [*export.languages, TARGET_LANGUAGE] if export.languages or options.languages else None
    elif "language" in kept:
        kept["language"] = as_list(kept["language"])
    card.register_model(export.draft.model)
    new = yaml.safe_load(card.to_yaml())
    tags = as_list(kept.get("tags"))
    head = new | kept | {"tags": [*tags, *(tag for tag in new["tags"] if tag not in tags)]}
    return yaml.safe_dump(head, sort_keys=False, allow_unicode=True)


def _card_text(export: Export, text: str, results: Sequence[Mapping[str, Any]]) -> str:
    """The text of the original card with a section about the export, or that section alone."""
    options = export.options
    sizes = table([{"": name, "Before": before, "After": after} for name, before, after in size_rows(export.sizes)])
    name, vectors = split_vectors(options.model)
    base = PLUS.join(public_name(one) for one in (name, *vectors))
    base = starter.HUB_ID if is_starter(options.model) else base
    section = (
        f"Made with `metaphrase export` from {cell(base)}, without further training: "
        f"{cell('; '.join(export.changes))}.\n\n{sizes}\n\nRetrieval accuracy in percent, mean of both directions. Intervals "
        f"and verdicts come from a paired bootstrap.\n\n{table([result_row(row) for row in results])}\n\n"
        f"{how_to_load(options.output_dir)}"
    )
    if text.strip():
        title, rest = _split_title(text)
        return f"{title}\n## Exported\n\n{section}\n\nThe following sections describe the original model.\n{rest}"
    return f"# {cell(Path(options.output_dir).name)}\n\n{section}\n"


def _split_title(text: str) -> tuple[str, str]:
    """The title of a card, and the rest."""
    before, mark, after = f"\n{text}".partition("\n# ")
    if not mark:
        return "# Exported encoder\n", text
    title, _, rest = after.partition("\n")
    return f"# {title}\n", f"{before}{rest}"
