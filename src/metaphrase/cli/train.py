"""``metaphrase train``: from a bitext to a released encoder."""

from __future__ import annotations

import json
import logging
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from sentence_transformers import SentenceTransformer
from transformers import set_seed
from transformers.trainer_utils import get_last_checkpoint

from metaphrase.card import AlignmentModelCardData
from metaphrase.cli import parse
from metaphrase.corpus import Cleaning, Corpus, load_corpus, overlap
from metaphrase.encoders import english_piece_ids, freeze_word_embeddings, load_encoder
from metaphrase.evaluation.retrieval import ParallelSet, RetrievalEvaluator
from metaphrase.hub import release
from metaphrase.loss import AlignmentLoss
from metaphrase.objectives import OBJECTIVES
from metaphrase.recipe import Recipe
from metaphrase.trainer import AlignmentTrainer, AlignmentTrainingArguments

logger = logging.getLogger(__name__)

#: Packages whose versions belong to a result.
PACKAGES = ("metaphrase", "torch", "transformers", "sentence-transformers", "datasets", "accelerate", "tokenizers")


@dataclass
class ModelOptions:
    """Which encoder, and how it is used."""

    model: str = field(
        default="starter", metadata={"help": "Encoder to train: 'starter', a Hub id or a folder (default: starter)."}
    )
    pooling: str | None = field(
        default=None, metadata={"help": "Pooling in place of the encoder's own, e.g. cls or mean."}
    )
    freeze_word_embeddings: bool = field(
        default=False, metadata={"help": "Keep the word embeddings as they are: less memory, faster."}
    )


@dataclass
class CorpusOptions:
    """Which bitext, and how it is read."""

    corpus: list[str] = field(
        default_factory=list,
        metadata={"help": "Bitext to train on: TSV, JSONL, Parquet, TMX, Moses 'x.sw,x.en', a folder, or hf:org/name."},
    )
    dev: list[str] = field(
        default_factory=list, metadata={"help": "Bitext whose retrieval accuracy is measured during training."}
    )
    languages: list[str] = field(
        default_factory=list, metadata={"help": "Languages to take from the corpus, or the language of a single file."}
    )
    streaming: bool = field(default=False, metadata={"help": "Read the corpus while training (needs --max_steps)."})
    temperature: float | None = field(
        default=None, metadata={"help": "Mix languages in proportion to size^temperature; 1 as they are, 0 evenly."}
    )
    clean: str = field(
        default="basic", metadata={"help": "'basic' drops empty, absurd and repeated pairs; 'dap' adds DAP's filters."}
    )
    limit: int | None = field(default=None, metadata={"help": "Read this many pairs of each language at most."})


@dataclass
class RecipeOptions:
    """What is trained."""

    recipe: str = field(default="dap", metadata={"help": "A name from `metaphrase recipes`, or a YAML file."})
    paper_training: bool = field(
        default=False, metadata={"help": "Use the paper's optimiser, schedule, steps and batch."}
    )
    max_length: int | None = field(
        default=None, metadata={"help": "Pieces kept of a sentence in training (default: the recipe's)."}
    )
    vocabulary: str | None = field(
        default=None, metadata={"help": "Vocabulary of objectives that predict pieces: tied, untied or english."}
    )
    transform: str | None = field(
        default=None, metadata={"help": "Transform in front of the vocabulary: auto (a fresh one if need be) or none."}
    )


@dataclass
class TrainArguments(AlignmentTrainingArguments):
    """Training arguments, with defaults for runs that a person watches."""

    output_dir: str | None = field(default=None, metadata={"help": "Where the release and its checkpoints go."})
    logging_steps: float = field(default=10, metadata={"help": "Log every so many steps."})
    save_steps: float = field(default=500, metadata={"help": "Write a checkpoint every so many steps."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints kept."})
    report_to: None | str | list[str] = field(
        default="tensorboard", metadata={"help": "Where curves are logged: tensorboard, none or another integration."}
    )


def run(argv: Sequence[str]) -> int:
    """Train, release, and say where everything is."""
    model_options, corpus_options, recipe_options, arguments = parse_options(argv)
    train(model_options, corpus_options, recipe_options, arguments, command=["metaphrase", "train", *argv])
    return 0


def parse_options(argv: Sequence[str]) -> tuple[Any, ...]:
    """Options of a training run: the recipe's training section, then ``--config``, then the command line."""
    types = [ModelOptions, CorpusOptions, RecipeOptions, TrainArguments]
    description = "Train an encoder with a recipe and release it."
    chosen = parse("metaphrase train", types, argv, description=description)[2]
    recipe = Recipe.load(chosen.recipe)
    defaults = dict(recipe.training) | (dict(recipe.paper_training) if chosen.paper_training else {})
    options = parse("metaphrase train", types, argv, defaults=defaults, description=description)
    options[1].languages = [language for item in options[1].languages for language in item.split(",") if language]
    return options


def train(
    model_options: ModelOptions,
    corpus_options: CorpusOptions,
    recipe_options: RecipeOptions,
    arguments: AlignmentTrainingArguments,
    *,
    command: Sequence[str],
) -> Path:
    """One training run, from corpus to release.

    Args:
        model_options: The encoder.
        corpus_options: The bitext.
        recipe_options: The recipe.
        arguments: Training arguments.
        command: How this run was called; goes into the card.

    Returns:
        The release folder, ``arguments.output_dir``.

    Raises:
        ValueError: An option is missing or does not fit another.
    """
    if not corpus_options.corpus:
        raise ValueError("Training needs a bitext: give --corpus (a file, a folder or hf:org/name).")
    if not arguments.output_dir:
        raise ValueError("Training needs a place for its results: give --output_dir.")
    started = time.time()
    quiet_down()
    output = Path(arguments.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    set_seed(arguments.seed)
    recipe = with_choices(Recipe.load(recipe_options.recipe), recipe_options)
    model = load_encoder(
        model_options.model,
        pooling=model_options.pooling,
        default_pooling=recipe.pooling,
        device="cpu" if arguments.use_cpu else None,
    )
    if model_options.freeze_word_embeddings:
        freeze_word_embeddings(model)
    corpus = read_corpus(corpus_options, model, arguments)
    logger.info("Corpus:\n%s", corpus.report)
    evaluators = read_dev(corpus_options, corpus)
    loss = make_loss(model, recipe, corpus, max_length=recipe_options.max_length)
    for name, transform in loss.transforms().items():
        logger.info("Objective %s: the transform in front of its vocabulary is %s.", name, transform)
    dataset: Any = corpus.dataset
    if isinstance(dataset, IterableDataset):
        if arguments.max_steps <= 0:
            raise ValueError("A stream has no length: give --max_steps.")
        dataset = dataset.shuffle(seed=arguments.seed, buffer_size=10_000)
        arguments.batch_sampler = "batch_sampler"  # type: ignore[assignment]
    elif len(dataset) < arguments.train_batch_size and arguments.dataloader_drop_last:
        raise ValueError(f"The corpus has {len(dataset)} pairs, fewer than a batch of {arguments.train_batch_size}.")
    trainer = AlignmentTrainer(
        model=model, args=arguments, train_dataset=dataset, loss=loss, evaluator=evaluators or None
    )
    result = trainer.train(resume_from_checkpoint=checkpoint_to_resume(arguments))
    facts = {
        "command": shlex.join(command),
        "recipe": recipe.to_dict(),
        "model": model_options.model,
        "frozen_word_embeddings": model_options.freeze_word_embeddings,
        "transforms": loss.transforms(),
        "seed": arguments.seed,
        "steps": trainer.state.global_step,
        "pairs": corpus.report.to_dict(),
        "files": corpus.files,
        "packing": arguments.packing,
        "seconds": round(time.time() - started, 1),
        "training_seconds": round(result.metrics["train_runtime"], 1),
        "hardware": hardware(),
        "versions": {name: version(name) for name in PACKAGES},
        "log_history": trainer.state.log_history,
    }
    if trainer.is_world_process_zero():
        card = model.model_card_data
        assert isinstance(card, AlignmentModelCardData)
        card.describe_run(facts)
        release(model, output, recipe=recipe.to_dict(), card=card)
        write_json(output / "run.json", facts)
        logger.info("Released to %s after %d steps.", output, trainer.state.global_step)
    return output


def with_choices(recipe: Recipe, options: RecipeOptions) -> Recipe:
    """The recipe with the command line's choices of vocabulary and transform in every term that has them."""
    chosen = {k: v for k in ("vocabulary", "transform") if (v := getattr(options, k)) is not None}
    terms = []
    for term in recipe.terms:
        accepted = OBJECTIVES[term.objective].__init__.__kwdefaults__ or {}
        terms.append(replace(term, args={**term.args, **{k: v for k, v in chosen.items() if k in accepted}}))
    return replace(recipe, terms=tuple(terms))


def read_corpus(options: CorpusOptions, model: SentenceTransformer, arguments: Any) -> Corpus:
    """The training bitext."""
    cleanings = {"basic": Cleaning(), "dap": Cleaning.dap(model.tokenizer.tokenize)}
    if options.clean not in cleanings:
        raise ValueError(f"--clean is one of {', '.join(cleanings)}, not {options.clean!r}.")
    return load_corpus(
        options.corpus,
        languages=options.languages or None,
        streaming=options.streaming,
        cleaning=cleanings[options.clean],
        temperature=options.temperature,
        limit=options.limit,
        seed=arguments.seed,
    )


def read_dev(options: CorpusOptions, corpus: Corpus) -> list[RetrievalEvaluator]:
    """An evaluator over the dev bitext; pairs that are in the training corpus too are reported."""
    if not options.dev:
        return []
    dev = load_corpus(options.dev, languages=options.languages or None, split="dev").dataset
    assert isinstance(dev, Dataset)
    if isinstance(corpus.dataset, Dataset) and (leaked := overlap(corpus.dataset, dev)):
        logger.warning("%d of the %d dev pairs share a sentence with the training corpus.", leaked, len(dev))
    sides: dict[str, tuple[list[str], list[str]]] = {}
    for row in dev:
        sources, targets = sides.setdefault(row["source_lang"], ([], []))  # type: ignore[index]
        sources.append(row["source"])  # type: ignore[index]
        targets.append(row["target"])  # type: ignore[index]
    sets = {language: ParallelSet(language, *pair) for language, pair in sides.items()}
    return [RetrievalEvaluator(sets, name="dev")]


def make_loss(
    model: SentenceTransformer, recipe: Recipe, corpus: Corpus, *, max_length: int | None = None
) -> AlignmentLoss:
    """The recipe's loss, with what it needs to know of the corpus."""
    english_ids = None
    if any(term.args.get("vocabulary") == "english" for term in recipe.terms):
        if not isinstance(corpus.dataset, Dataset):
            raise ValueError("The English subset vocabulary is read off the corpus; it cannot be had from a stream.")
        english_ids = english_piece_ids(corpus.dataset["target"], model.tokenizer)
        logger.info("English subset vocabulary: %d pieces.", len(english_ids))
    languages = {language for file in corpus.files for language in file.get("languages", ())}
    return AlignmentLoss(
        model, recipe, max_length=max_length, english_ids=english_ids, languages=sorted(languages)
    )


def checkpoint_to_resume(arguments: Any) -> str | None:
    """The checkpoint that ``--resume_from_checkpoint`` means: a path, or the last one of the output folder for ``true``."""
    asked = arguments.resume_from_checkpoint
    if asked is None or str(asked).lower() in ("false", "no", "0"):
        return None
    if str(asked).lower() in ("true", "yes", "1"):
        last = get_last_checkpoint(arguments.output_dir)
        if last is None:
            logger.info("No checkpoint in %s yet; training starts from the beginning.", arguments.output_dir)
        else:
            logger.info("Resuming from %s.", last)
        return last
    if not Path(asked).is_dir():
        raise ValueError(f"--resume_from_checkpoint {asked}: there is no such folder.")
    return str(asked)


def hardware() -> dict[str, Any]:
    """What the figures of a run were measured on."""
    facts: dict[str, Any] = {"machine": platform.machine(), "cpus": os.cpu_count(), "threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file as a whole or not at all."""
    partial = path.with_suffix(path.suffix + ".part")
    partial.write_text(json.dumps(content, ensure_ascii=False, indent=1, default=str) + "\n", encoding="utf-8")
    partial.replace(path)


def quiet_down() -> None:
    """Log our own lines, not every library's; and keep the CPU out of denormal numbers, which slow it 45-fold."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("metaphrase").setLevel(logging.INFO)
    torch.set_flush_denormal(True)
