"""The corpora of a run: bitext with the columns that its recipe reads, dev sets, and leakage into test sets."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash
from datasets import Dataset, IterableDataset, concatenate_datasets
from sentence_transformers import SentenceTransformer
from transformers import TrainingArguments

from metaphrase.checkpoints.folders import checkpoint_folders
from metaphrase.corpus.checks import by_language
from metaphrase.corpus.files import find_files, has_columns
from metaphrase.corpus.loading import Corpus, load_corpus
from metaphrase.corpus.monolingual import load_monolingual, with_monolingual
from metaphrase.corpus.overlap import overlap
from metaphrase.corpus.parallel import ParallelSet
from metaphrase.exceptions import UsageError
from metaphrase.io.files import replacing
from metaphrase.training.configuration import CLEANINGS, RunConfig
from metaphrase.training.recipe import Recipe

logger = logging.getLogger(__name__)

#: Folder of the clean corpus with ``on_disk``.
ON_DISK = "corpus"
_CLEAN = tuple(f"{ON_DISK}/{name}" for name in ("pairs-*.arrow", "pairs-*.json", ".pairs-*.part"))
_LINKS = ("alignment-*.parquet",)


@contextmanager
def restored_caches(output: Path) -> Iterator[None]:
    """If the block raises, delete the clean corpus and the word links that it has stored in an output folder."""
    before = set(_files(output, *_CLEAN, *_LINKS))
    try:
        yield
    except BaseException:
        for path in set(_files(output, *_CLEAN, *_LINKS)) - before:
            path.unlink()
        with suppress(OSError):  # missing, or not empty
            (output / ON_DISK).rmdir()
        raise


def remove_other_corpora(output: Path, dataset: Dataset) -> None:
    """Delete the clean corpora that earlier runs have stored in an output folder, except a data set's."""
    used = {Path(file["filename"]).stem for file in dataset.cache_files}
    for path in _files(output, *_CLEAN):
        if path.stem not in used:
            path.unlink()


def _files(output: Path, *patterns: str) -> list[Path]:
    return [path for pattern in patterns for path in output.glob(pattern)]


def selected(config: RunConfig) -> dict[str, Any]:
    """The languages and columns of a bitext that a run reads."""
    columns = {name: getattr(config, name) for name in ("source_column", "target_column")}
    return {"languages": config.languages or None, **columns}


def read_bitext(config: RunConfig, model: SentenceTransformer, arguments: TrainingArguments) -> Corpus:
    """Read the training bitext; one process reads a corpus that is stored on disk, for all of them."""
    first = arguments.main_process_first(local=False, desc="corpus") if config.on_disk else nullcontext()
    with first:
        return load_corpus(
            config.corpus,
            **selected(config),
            streaming=config.streaming,
            on_disk=Path(str(config.output_dir)) / ON_DISK if config.on_disk else None,
            cleaning=CLEANINGS[config.clean],
            tokenizer=model.tokenizer,
            temperature=config.temperature,
            limit=config.limit,
            seed=config.seed,
        )


def with_columns(corpus: Corpus, recipe: Recipe, config: RunConfig, arguments: TrainingArguments) -> Corpus:
    """Add the columns that a recipe reads: word links, and monolingual text if it is configured."""
    if "alignment" in recipe.columns:
        with arguments.main_process_first(local=False, desc="word alignment"):
            dataset = with_links(corpus.dataset, recipe, Path(str(arguments.output_dir)))
        corpus = replace(corpus, dataset=dataset)
    if config.monolingual:
        texts = load_monolingual(config.monolingual)
        logger.info("Monolingual text: %d texts, %g for each pair.", len(texts), config.monolingual_ratio)
        ratio, seed = config.monolingual_ratio, config.seed
        corpus = replace(corpus, dataset=with_monolingual(corpus.dataset, texts, ratio=ratio, seed=seed))
    return corpus


def with_links(dataset: Any, recipe: Recipe, output: Path) -> Any:
    """Add word links to pairs whose alignment is missing; they are computed once for an output folder.

    An empty alignment, such as an empty cell of a TSV file, is that of a pair without links, as aligners write it.
    Objectives on words use the links that both directions find, objectives on spans those of grow-diag-final-and.
    """
    is_stream = isinstance(dataset, IterableDataset)
    if "alignment" in (dataset.column_names or ()):
        if is_stream or _is_aligned(dataset):
            return dataset
    elif is_stream:
        raise UsageError(
            "This recipe requires word links and the corpus has none; a stream cannot be aligned while it is read. Align "
            "the corpus first: metaphrase align CORPUS -o ALIGNED.parquet."
        )
    spans = any(objective.granularity == "span" for objective in recipe.objectives().values())
    heuristic = "grow-diag-final-and" if spans else "intersection"
    digest = xxhash.xxh64(heuristic.encode())
    read = ("source", "target", "source_lang", "target_lang", "alignment", "segmenter")
    for row in dataset:
        digest.update("\t".join(row.get(name) or "" for name in read).encode())
    path = output / f"alignment-{digest.hexdigest()}.parquet"
    if not path.is_file():
        _write_links(dataset, heuristic, path)
        _remove_other_links(path)
    links = Dataset.from_parquet(str(path))
    others = dataset.remove_columns([name for name in links.column_names if name in dataset.column_names])
    return concatenate_datasets([others, links], axis=1)


def _is_aligned(dataset: Dataset) -> bool:
    """Whether the alignment of all pairs is known; empty ones are logged."""
    batches = dataset.select_columns(["alignment"]).iter(batch_size=1000)
    unlinked = Counter(text for batch in batches for text in batch["alignment"] if not text)
    if None in unlinked:
        return False
    if unlinked:
        logger.info(
            "%d of %d pairs have no word links: their alignment is empty. To align all pairs, remove the column.",
            *(unlinked.total(), len(dataset)),
        )
    return True


def _write_links(dataset: Dataset, heuristic: str, path: Path) -> None:
    """Align all pairs, and write the columns of their links to a Parquet file."""
    from metaphrase.aligners.linking import add_alignment

    logger.info(
        "The recipe requires word links, which the corpus lacks: aligning %d pairs first, with fast_align in both "
        "directions, combined by %s. For other links, run `metaphrase align` first.",
        len(dataset),
        heuristic,
    )
    aligned, report = add_alignment(dataset, "fast_align", heuristic=heuristic)
    facts = report.total.facts()
    logger.info(
        "Aligned %.0f pairs per second; %.0f %% of the source words and %.0f %% of the target words are linked.",
        report.pairs_per_second,
        100 * facts["share_source_linked"],
        100 * facts["share_target_linked"],
    )
    names = [name for name in aligned.column_names if name in ("alignment", "alignment_scores", "segmenter")]
    with replacing(path) as partial:
        aligned.select_columns(names).to_parquet(partial)


def _remove_other_links(kept: Path) -> None:
    """Delete the word links of earlier runs beside the new ones, unless checkpoints show that such a run may be resumed."""
    if not checkpoint_folders(kept.parent, staged=True):
        for path in set(_files(kept.parent, *_LINKS)) - {kept}:
            path.unlink()


def read_dev(config: RunConfig, corpus: Corpus) -> dict[str, ParallelSet]:
    """Read the dev bitext; pairs that are also in the training corpus are reported."""
    if not config.dev:
        return {}
    options = selected(config)
    columns = [name for key in ("source_column", "target_column") if (name := options[key])]
    files = find_files(config.dev, languages=options["languages"], split="dev")
    if not any(has_columns(file, columns) for file in files):
        options |= {"source_column": None, "target_column": None}  # those of the corpus
    dev = load_corpus(config.dev, **options, split="dev").dataset
    if isinstance(corpus.dataset, Dataset) and (leaked := overlap(corpus.dataset, dev)):
        logger.warning("%d of the %d dev pairs share a sentence with the training corpus.", leaked, len(dev))
    return by_language(dev)


def leakage(
    dataset: Any, dev: Mapping[str, ParallelSet], tests: Mapping[str, Mapping[str, ParallelSet]]
) -> list[dict[str, Any]] | None:
    """For each test set, its pairs and how many of them have a sentence that is trained on; None for a stream.

    These pairs, and those with a sentence of the dev pairs, are logged as warnings.
    """
    counts = []
    for name, sets in tests.items():
        pairs = sum(len(one.sources) for one in sets.values())
        if shared_with_dev := overlap(dev, sets):
            logger.warning(
                "%d of the %d pairs of the test set %s share a sentence with the dev pairs, by which settings are chosen.",
                *(shared_with_dev, pairs, name),
            )
        if isinstance(dataset, IterableDataset):
            continue
        if shared := overlap(dataset, sets):
            logger.warning(
                "%d of the %d pairs of the test set %s share a sentence with the training corpus: do not trust its scores.",
                *(shared, pairs, name),
            )
        counts.append({"data": name, "pairs": pairs, "shared": shared})
    return counts or None
