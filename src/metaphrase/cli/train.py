"""``metaphrase train``: from a bitext to a released encoder."""

from __future__ import annotations

import json
import logging
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import xxhash
from datasets import Dataset, IterableDataset, concatenate_datasets
from rich.console import RenderableType
from rich.syntax import Syntax
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.training_args import BatchSamplers
from transformers import TrainerCallback, set_seed
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)
from transformers.trainer_utils import IntervalStrategy

from metaphrase.checkpoints.folders import checkpoint_folders, newest, tidy, verify
from metaphrase.checkpoints.saving import check_finite
from metaphrase.cli import emit, is_quiet, parse, show_progress
from metaphrase.corpus.cleaning import Cleaning
from metaphrase.corpus.files import find_files
from metaphrase.corpus.loading import Corpus, load_corpus
from metaphrase.corpus.monolingual import check_monolingual, load_monolingual, with_monolingual
from metaphrase.corpus.overlap import overlap
from metaphrase.corpus.parallel import ParallelSet, load_parallel_folder
from metaphrase.encoders.loading import (
    STARTER,
    english_piece_ids,
    freeze_word_embeddings,
    load_encoder,
    split_revision,
)
from metaphrase.evaluation.compare import compare
from metaphrase.evaluation.retention import retention
from metaphrase.evaluation.retrieval import (
    Encoders,
    RetrievalEvaluator,
    evaluate_retrieval,
    resolve_prompt,
)
from metaphrase.exceptions import (
    CheckpointError,
    CorpusError,
    MetaphraseError,
    MissingExtraError,
    UsageError,
)
from metaphrase.io.configuration import did_you_mean
from metaphrase.io.digests import model_hash
from metaphrase.io.environment import hardware, versions
from metaphrase.io.files import UDHR, write_json
from metaphrase.io.locks import exclusive
from metaphrase.io.redaction import hide, without_tokens
from metaphrase.modeling.languages import LanguageEmbedding, fold_languages
from metaphrase.objectives import OBJECTIVES
from metaphrase.publishing.card import AlignmentModelCardData
from metaphrase.publishing.hub import push
from metaphrase.publishing.provenance import Origins, hub_licenses, provenance, stated_licenses
from metaphrase.publishing.release import release, release_languages
from metaphrase.publishing.report import describe_model, render_table, usage_lines, write_report
from metaphrase.training.arguments import AlignmentTrainingArguments
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import Recipe
from metaphrase.training.trainer import AlignmentTrainer

logger = logging.getLogger(__name__)

#: What stands in front of a vocabulary projection, in words.
TRANSFORMS = {
    "fresh": "a fresh dense-GELU-LayerNorm transform, as the checkpoint has none",
    "pretrained": "the checkpoint's own masked language modelling transform",
    "none": "no transform",
}

EXAMPLES = (
    "metaphrase train --corpus sw-en.tsv.gz --languages sw --output_dir runs/sw --max_steps 300 --test my-test-sets/",
    "metaphrase train --recipe wacse --corpus a-folder/ --temperature 0.7 --output_dir runs/all",
    "torchrun --nproc_per_node 8 -m metaphrase train --config run.yaml",
)

#: The Universal Declaration of Human Rights in 94 languages, which comes with the package.

#: Test sets by name, each by language.
Sets = dict[str, dict[str, ParallelSet]]

#: The facts of a run, and what people read of them.
Outcome = tuple[dict[str, Any], list[RenderableType]]

#: Trackers of transformers that do not say whether they are installed.
UNTOLD_TRACKERS = ("azure_ml", "flyte")

#: What ``--clean`` can be.
CLEANINGS = {"basic": Cleaning(), "dap": Cleaning.dap(), "ppa": Cleaning.ppa()}


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
    license: str | None = field(
        default=None,
        metadata={
            "help": "Licence of the release, as the Hub spells it, e.g. apache-2.0 (default: the base model's)."
        },
    )


@dataclass
class CorpusOptions:
    """Which bitext, and how it is read."""

    corpus: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Bitext to train on: TSV, JSONL, Parquet, TMX, Moses 'x.sw,x.en', a folder, or hf:org/name."
        },
    )
    dev: list[str] = field(
        default_factory=list, metadata={"help": "Bitext whose retrieval accuracy is measured while training."}
    )
    test: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Folders of test sets (xx-en.test.tsv.gz or xx-en.tsv.gz) to measure before and after, with a report."
        },
    )
    retention: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Folders of test sets whose languages that are not trained on are measured before and after, too; none "
            "for no such measurement. Default, with --test: other languages of the test sets, or else the 94 of the "
            "packaged Declaration of Human Rights, 6,000 pairs."
        },
    )
    data_license: str | None = field(
        default=None, metadata={"help": "Licence of the corpus, for the card; for files of which none is known."}
    )
    languages: list[str] = field(
        default_factory=list, metadata={"help": "Languages to take from the corpus, or the language of a single file."}
    )
    streaming: bool = field(default=False, metadata={"help": "Read the corpus while training (needs --max_steps)."})
    on_disk: bool = field(
        default=False,
        metadata={"help": "Keep the corpus in the output folder in place of memory; resuming enters it at once."},
    )
    temperature: float | None = field(
        default=None, metadata={"help": "Mix languages in proportion to size^temperature; 1 as they are, 0 evenly."}
    )
    clean: str = field(
        default="basic",
        metadata={"help": "'basic' drops empty and repeated pairs; 'dap' and 'ppa' add the filters of those papers."},
    )
    limit: int | None = field(default=None, metadata={"help": "Read this many pairs of each language at most."})
    monolingual: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Monolingual text for recipes that read some: files of one sentence a line, or hf:org/name with a "
            "column 'text'."
        },
    )
    monolingual_ratio: float = field(default=1.0, metadata={"help": "Monolingual texts for each pair of the bitext."})


@dataclass
class RecipeOptions:
    """What is trained."""

    recipe: str = field(default="dap", metadata={"help": "A name from `metaphrase recipes`, or a YAML file."})
    paper_training: bool = field(
        default=False,
        metadata={"help": "Use the paper's optimiser, schedule, steps and batch per process (DAP: 128 on each of 8)."},
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

    output_dir: str | None = field(default="", metadata={"help": "Where the release and its checkpoints go."})
    logging_steps: float = field(default=10, metadata={"help": "Log every so many steps."})
    save_steps: float = field(default=500, metadata={"help": "Write a checkpoint every so many steps."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints kept."})
    report_to: None | str | list[str] = field(  # noqa: RUF036 - the order that HfArgumentParser reads
        default="tensorboard" if find_spec("tensorboard") else "none",
        metadata={"help": "Where curves are logged: tensorboard (where installed), none or another integration."},
    )


def run(argv: Sequence[str]) -> int:
    """Train, release, measure, and say where everything is."""
    result, shown = train_and_report(parse_options(argv), command=["metaphrase", "train", *argv])
    if result:
        emit(result, *shown)
    return 0


def parse_options(
    argv: Sequence[str],
    defaults: Mapping[str, Any] | None = None,
    *,
    prog: str = "metaphrase train",
    description: str = "Train an encoder with a recipe and release it.",
    examples: Sequence[str] = EXAMPLES,
) -> tuple[Any, ...]:
    """Options of a training run: the recipe's training section, ``defaults``, ``--config``, then the command line.

    Args:
        argv: The command line.
        defaults: Values in place of the options' own.
        prog: Name of the command, for its help text.
        description: One line above the options there.
        examples: Command lines below them.

    Raises:
        UsageError: An option is unknown or wrong, or a file holds a token.
    """
    types = [ModelOptions, CorpusOptions, RecipeOptions, TrainArguments]
    about: dict[str, Any] = {"description": description, "examples": examples}
    token, argv = without_token(argv)
    hide(token)
    _, _, chosen, arguments = parse(prog, types, argv, defaults=defaults, peek=True, **about)
    recipe = Recipe.load(chosen.recipe)
    settings = dict(recipe.training) | (dict(recipe.paper_training) if chosen.paper_training else {})
    settings |= defaults or {}
    if arguments.hub_token or settings.get("hub_token"):
        raise UsageError("A file of settings should hold no token, but has a hub_token. Set HF_TOKEN in its place.")
    options = parse(prog, types, argv, defaults=settings, **about)
    options[3].hub_token = token
    options[3].disable_tqdm = options[3].disable_tqdm or is_quiet()
    options[1].languages = [language for item in options[1].languages for language in item.split(",") if language]
    return options


def without_token(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of ``--hub_token``, and the command line without it, as it may be printed and written down.

    >>> without_token(["--hub_token", "secret", "--seed", "1"])
    ('secret', ['--seed', '1'])
    """
    token, kept, at = None, list(argv), 0
    while at < len(kept):
        flag, given, value = kept[at].partition("=")
        has_value = given or (at + 1 < len(kept) and not kept[at + 1].startswith("--"))
        if flag in ("--hub_token", "--hub-token") and has_value:
            token = value if given else kept.pop(at + 1)
            del kept[at]
        else:
            at += 1
    return token, kept


def train_and_report(
    options: tuple[Any, ...],
    *,
    command: Sequence[str],
    title: str | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    origins: Origins | None = None,
) -> Outcome:
    """One training run from corpus to release, with a before/after report where test sets are given.

    Args:
        options: What :func:`parse_options` returns.
        command: How this run was called; goes into card and report.
        title: Heading of the report.
        callbacks: Callbacks for the trainer, beside its own.
        origins: ``origin`` and ``license`` of training files whose origin the caller knows, by their bare names; for the
            card.

    Returns:
        Facts of the run with its ``output``, its ``comparisons``, the ``retention`` of other languages and the address
        that it was ``pushed`` to, and what people read of them; both empty on other processes than the first.

    Raises:
        CheckpointError: Another process uses the output folder, nothing can be written there, or it cannot be resumed.
        HubError: The release is there, with its report, and both are told of; but it could not be pushed.
    """
    _, corpus_options, recipe_options, arguments = options
    check(corpus_options, arguments)
    check_text(Recipe.load(recipe_options.recipe), corpus_options)
    prepare_process()
    with ExitStack() as stack:
        with arguments.main_process_first(local=False, desc="choice of a checkpoint"):
            if arguments.process_index == 0:
                stack.enter_context(exclusive(arguments.output_dir))
                tidy(Path(arguments.output_dir))
            arguments.resume_from_checkpoint = checkpoint_to_resume(arguments)
        return _train_and_report(options, command=command, title=title, callbacks=callbacks, origins=origins)


def _train_and_report(
    options: tuple[Any, ...],
    *,
    command: Sequence[str],
    title: str | None,
    callbacks: Sequence[TrainerCallback],
    origins: Origins | None,
) -> Outcome:
    model_options, corpus_options, recipe_options, arguments = options
    output = Path(arguments.output_dir)
    set_seed(arguments.seed)
    recipe = with_choices(Recipe.load(recipe_options.recipe), recipe_options)
    model = load_encoder(
        model_options.model,
        pooling=model_options.pooling,
        default_pooling=recipe.pooling,
        device="cpu" if arguments.use_cpu else None,
    )
    main_process = arguments.process_index == 0
    tests, others = with_retention(read_tests(corpus_options), corpus_options, recipe) if main_process else ({}, {})
    before, others_before = measure_before(model, tests, others, output, name=model_options.model)
    facts, embedding = train(
        model,
        recipe,
        model_options,
        corpus_options,
        recipe_options,
        arguments,
        command=command,
        tests={name: others.get(name, {}) | tests.get(name, {}) for name in tests | others},
        callbacks=callbacks,
    )
    if not main_process:
        return {}, []
    card = model.model_card_data
    assert isinstance(card, AlignmentModelCardData)
    describe(card, facts, origins=origins, data_license=corpus_options.data_license, license=model_options.license)
    write_release(model, output, embedding, recipe, card)
    write_json(output / "run.json", facts)
    shown: list[RenderableType] = []
    comparisons, retained = {}, {}
    if tests:
        trained = (
            load_encoder(output, device=str(model.device)) if embedding is None else fold_languages(model, embedding)
        )
        after = measure(trained, tests, name=str(output))
        comparisons = {name: compare(before[name], after[name]) for name in tests}
        for name, comparison in comparisons.items():
            card.add_comparison(name, comparison)
            shown.append(f"\n{name}: {model_options.model} before, {output} after")
            shown.append(render_table(after[name], before[name], comparison))
        retained = measure_retention(trained, others, others_before, facts, name=str(output))
        for name, one in retained.items():
            card.add_retention(name, one)
            shown.append(retention_line(name, one))
        write_release(model, output, embedding, recipe, card)
        usage = usage_lines(output) if embedding is None else usage_by_language(output, embedding.languages)
        report = write_report(
            output,
            title=title or f"{model_options.model} trained with {recipe.name}",
            before=before,
            after=after,
            comparisons=comparisons,
            run=facts,
            usage=usage,
            analysis={"retention": retained},
        )
        shown.append(f"\nReport: {report} and {report.with_suffix('.json').name}\n\nUse it:\n")
        shown.append(Syntax(usage, "python", background_color="default"))
    result = facts | {"output": str(output), "comparisons": comparisons, "retention": retained, "pushed": None}
    if arguments.push_to_hub:
        try:
            result["pushed"] = push_release(output, arguments)
        except MetaphraseError:
            emit(result, *shown)
            raise
        shown.append(f"\nPushed to {arguments.hub_model_id}: {result['pushed']}")
    return result, shown


def push_release(output: Path, arguments: AlignmentTrainingArguments) -> str:
    """Push a finished release, with all that its card came to know, to the repository of the training arguments."""
    return push(
        output,
        str(arguments.hub_model_id),
        private=bool(arguments.hub_private_repo),
        revision=arguments.hub_revision,
        token=arguments.hub_token,
        commit_message="End of training",
    )


def write_release(
    model: SentenceTransformer,
    output: Path,
    embedding: LanguageEmbedding | None,
    recipe: Recipe,
    card: AlignmentModelCardData,
) -> None:
    """Release to ``output``; with a language embedding to a folder for each language in it.

    Raises:
        NonFiniteError: A weight is infinite or no number.
    """
    check_finite(model)
    if embedding is None:
        release(model, output, recipe=recipe.to_dict(), card=card)
    else:
        release_languages(model, output, embedding, recipe=recipe.to_dict(), card=card)


def usage_by_language(output: Path, languages: Sequence[str]) -> str:
    """Python that loads the release of a language and the English one."""
    language = next((language for language in languages if language != "en"), "en")
    return f"""\
from sentence_transformers import SentenceTransformer

folder = {str(output)!r}  # a model for each language
source = SentenceTransformer(f"{{folder}}/{language}")
english = SentenceTransformer(f"{{folder}}/en")
print(english.encode(["It is raining today."]) @ source.encode(["..."]).T)  # a sentence in {language!r}"""


def check(corpus_options: CorpusOptions, arguments: AlignmentTrainingArguments) -> None:
    """Refuse a run that cannot end well before anything is loaded.

    Raises:
        ValueError: An option is missing or unknown.
        FileNotFoundError: There is no such corpus.
    """
    if not corpus_options.corpus:
        raise UsageError("Training needs a bitext: give --corpus (a file, a folder or hf:org/name).")
    if not arguments.output_dir:
        raise UsageError("Training needs a place for its results: give --output_dir.")
    if corpus_options.streaming and arguments.max_steps <= 0:
        raise UsageError("A stream has no length: give --max_steps.")
    if corpus_options.clean not in CLEANINGS:
        raise UsageError(f"--clean is one of {', '.join(CLEANINGS)}, not {corpus_options.clean!r}.")
    check_trackers(arguments.report_to or ())
    find_files(corpus_options.corpus, languages=corpus_options.languages or None)


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that are unknown or not installed.

    Raises:
        UsageError: There is no such tracker.
        MissingExtraError: It is not installed.
    """
    known, installed = list(INTEGRATION_TO_CALLBACK), get_available_reporting_integrations()
    for name in names:
        if name not in known:
            raise UsageError(
                f"There is no tracker {name!r}{did_you_mean(name, known)}; --report_to takes {', '.join(known)}, all or none."
            )
        if name not in (*installed, *UNTOLD_TRACKERS):
            raise MissingExtraError(f"--report_to {name} needs a package that is not installed: pip install {name}")


def check_text(recipe: Recipe, options: CorpusOptions) -> None:
    """Refuse a recipe without the monolingual text that it reads, or text that no objective reads.

    Raises:
        ValueError: The recipe and ``--monolingual`` do not go together, or the ratio is not positive.
        FileNotFoundError: There is no such text.
    """
    reads = "monolingual" in recipe.columns
    if reads and not options.monolingual:
        raise UsageError(
            f"Recipe {recipe.name!r} reads monolingual text: give --monolingual (files of one sentence a line, or "
            "hf:org/name), or a YAML of your own whose objectives do without."
        )
    if options.monolingual and not reads:
        raise UsageError(f"Recipe {recipe.name!r} reads no monolingual text; leave out --monolingual.")
    if options.monolingual_ratio <= 0:
        raise UsageError(f"--monolingual_ratio should be positive, but is {options.monolingual_ratio:g}.")
    check_monolingual(options.monolingual)


def train(
    model: SentenceTransformer,
    recipe: Recipe,
    model_options: ModelOptions,
    corpus_options: CorpusOptions,
    recipe_options: RecipeOptions,
    arguments: AlignmentTrainingArguments,
    *,
    command: Sequence[str],
    tests: Mapping[str, Mapping[str, ParallelSet]] | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> tuple[dict[str, Any], LanguageEmbedding | None]:
    """Train a model in place.

    Args:
        model: The encoder.
        recipe: What it is trained with.
        model_options: How the encoder is used.
        corpus_options: The bitext.
        recipe_options: Lengths.
        arguments: Training arguments.
        command: How this run was called.
        tests: Test sets that the model will be measured on.
        callbacks: Callbacks for the trainer.

    Returns:
        The facts of the run, for card and report, and the input language embedding that was trained with the model.

    Raises:
        ValueError: The corpus is smaller than a batch, or lacks a language that a language embedding needs, or options do
            not fit each other.
    """
    started = time.time()
    if model_options.freeze_word_embeddings:
        freeze_word_embeddings(model)
    corpus = read_corpus(corpus_options, model, arguments)
    if "alignment" in recipe.columns:
        corpus = replace(corpus, dataset=with_links(corpus.dataset, recipe, arguments))
    if corpus_options.monolingual:
        texts = load_monolingual(corpus_options.monolingual)
        logger.info("Monolingual text: %d texts, %g for each pair.", len(texts), corpus_options.monolingual_ratio)
        ratio, seed = corpus_options.monolingual_ratio, arguments.seed
        corpus = replace(corpus, dataset=with_monolingual(corpus.dataset, texts, ratio=ratio, seed=seed))
    evaluators = read_dev(corpus_options, corpus)
    loss = make_loss(model, recipe, corpus, max_length=recipe_options.max_length)
    for name, transform in loss.transforms().items():
        logger.info("%s predicts pieces through %s.", name.upper(), TRANSFORMS[transform])
    embedding = loss.heads.language_embedding
    if embedding is not None:
        if arguments.push_to_hub:
            raise UsageError(
                f"Recipe {recipe.name!r} is released as a folder for each language, so that one repository cannot hold it. "
                "Leave out --push_to_hub, and push the folders after training: metaphrase push FOLDER/xx --repo me/name-xx."
            )
        for evaluator in evaluators:
            evaluator.language_embedding = embedding
        tested = {language for sets in (tests or {}).values() for language in sets}
        asked = {*tested, *(language for evaluator in evaluators for language in evaluator.sets)}
        if missing := sorted(asked - set(embedding.languages)):
            raise UsageError(
                f"The corpus has no {', '.join(missing)}, so that the model learns no vector for it and cannot be measured "
                "on it. Choose what is measured with --languages."
            )
    dataset: Any = corpus.dataset
    if isinstance(dataset, IterableDataset):
        dataset = dataset.shuffle(seed=arguments.seed, buffer_size=10_000)
        arguments.batch_sampler = BatchSamplers.BATCH_SAMPLER
    else:
        logger.info("Corpus:\n%s", corpus.report)
        if len(dataset) < arguments.train_batch_size:
            raise CorpusError(
                f"The corpus has {len(dataset)} pairs, fewer than a batch of {arguments.train_batch_size}. Give more "
                "text or a smaller --per_device_train_batch_size."
            )
    if evaluators and arguments.eval_strategy == IntervalStrategy.NO:
        arguments.eval_strategy, arguments.eval_steps = IntervalStrategy.STEPS, arguments.save_steps
    trainer = AlignmentTrainer(
        model=model,
        args=arguments,
        train_dataset=dataset,
        loss=loss,
        evaluator=evaluators or None,
        callbacks=list(callbacks),
    )
    arguments.hub_model_id = trainer.hub_model_id or arguments.hub_model_id
    result = trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    facts = {
        "command": without_tokens(shlex.join(without_token(command)[1])),
        "recipe": recipe.to_dict(),
        "model": model_options.model,
        "frozen_word_embeddings": model_options.freeze_word_embeddings,
        "transforms": loss.transforms(),
        "seed": arguments.seed,
        "steps": trainer.state.global_step,
        "batch_size": arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size,
        "corpus": corpus.report.to_dict(),
        "files": corpus.files,
        "leakage": leakage(corpus.dataset, tests or {}),
        "packing": arguments.packing,
        "seconds": round(time.time() - started, 1),
        "training_seconds": round(result.metrics["train_runtime"], 1),
        "hardware": hardware(),
        "versions": versions(),
        "log_history": trainer.state.log_history,
    }
    return facts, embedding


def leakage(dataset: Any, tests: Mapping[str, Mapping[str, ParallelSet]]) -> list[dict[str, Any]] | None:
    """For each test set its pairs, and how many of them have a sentence that is trained on; None for a stream."""
    if isinstance(dataset, IterableDataset) or not tests:
        return None
    found = []
    for name, sets in tests.items():
        rows = [
            {"source": source, "target": target}
            for one in sets.values()
            for source, target in zip(one.sources, one.targets, strict=True)
        ]
        found.append({"data": name, "pairs": len(rows), "shared": overlap(dataset, rows)})
    return found


def read_tests(options: CorpusOptions) -> Sets:
    """The test sets by the name of their folder; of a folder with splits the test split, and nothing else."""
    tests: Sets = {}
    for folder in options.test:
        name = Path(folder).resolve().name
        if name in tests:
            raise UsageError(
                f"Two --test folders are named {name!r}; their results would overwrite each other. Rename one."
            )
        tests[name] = read_folder(folder, options.languages or None)
    return tests


def read_folder(folder: str | Path, languages: Sequence[str] | None = None) -> dict[str, ParallelSet]:
    """The test sets of a folder; of one with splits the test split."""
    split = "test" if any(Path(folder).glob("*.test.tsv*")) else None
    return load_parallel_folder(folder, languages, split)


def with_retention(tests: Sets, options: CorpusOptions, recipe: Recipe) -> tuple[Sets, Sets]:
    """The test sets in languages that are trained on, and those in others, which show what training cost them.

    Args:
        tests: What :func:`read_tests` reads. Where no language of theirs is trained on, they are what is asked for, and stay.
        options: The corpus and the folders of ``--retention``.
        recipe: One with a language embedding cannot embed other languages.

    Raises:
        UsageError: There are no test sets beside ``--retention``.
    """
    if options.retention == ["none"] or not (tests or options.retention):
        return tests, {}
    if not tests:
        raise UsageError("--retention is measured beside test sets: give --test, too.")
    if recipe.language_embedding:
        logger.info(
            "Recipe %s learns a vector for each language: languages without one are not measured.", recipe.name
        )
        return tests, {}
    trained = languages_told(options)
    own: Sets = tests
    others: Sets = {}
    if any(trained & sets.keys() for sets in tests.values()):
        parts = {
            is_trained: {
                name: {language: one for language, one in sets.items() if (language in trained) == is_trained}
                for name, sets in tests.items()
            }
            for is_trained in (True, False)
        }
        own, others = ({name: sets for name, sets in parts[side].items() if sets} for side in (True, False))
    for folder in options.retention or ([] if others else [str(UDHR)]):
        name = Path(folder).resolve().name
        there = trained | others.get(name, {}).keys() | own.get(name, {}).keys()
        sets = {language: one for language, one in read_folder(folder).items() if language not in there}
        if sets:
            others[name] = others.get(name, {}) | sets
    return own, others


def languages_told(options: CorpusOptions) -> set[str]:
    """Languages that will be trained on; none where neither options nor names of files tell all of them."""
    files = find_files(options.corpus, languages=options.languages or None)
    told = {file.language for file in files if file.language}
    return set(options.languages) or (told if all(file.language for file in files) else set())


def measure(model: Encoders, tests: Mapping[str, Any], *, name: str, prompt: str = "") -> dict[str, Any]:
    """Retrieval accuracy on every test set, without padding."""
    return {
        test: evaluate_retrieval(model, sets, name=name, prompt=prompt, show_progress=show_progress()).to_dict()
        for test, sets in tests.items()
    }


def measure_before(
    model: SentenceTransformer, tests: Sets, others: Sets, output: Path, *, name: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The baselines on test sets and on other languages; what ``before.json`` has of the same encoder is not measured again.

    A model that stores a query prompt (E5) is measured with and without it, and on each test set the better average
    counts: a baseline is measured at its best. Other languages are measured with what was best on the test set.
    """
    if not tests:
        return {}, {}
    path = output / "before.json"
    prompts = list(dict.fromkeys(["", resolve_prompt(model, "auto")]))
    subject = {"model": model_hash(model), "versions": versions()}
    known = read_baseline(path, subject)

    def best(kind: str, test: str, sets: Mapping[str, ParallelSet], prompts: Sequence[str]) -> dict[str, Any]:
        kept = known.get(f"{kind} {test}")
        digests = {language: one.sha256 for language, one in sets.items()}
        if (
            kept
            and kept["settings"]["prompt"] in prompts
            and {language: one["sha256"] for language, one in kept["languages"].items()} == digests
        ):
            return {**kept, "model": name}
        results = [measure(model, {test: sets}, name=name, prompt=prompt)[test] for prompt in prompts]
        return max(results, key=lambda result: result["average"]["mean"]["accuracy"])

    before = {test: best("test", test, sets, prompts) for test, sets in tests.items()}
    first = next(iter(before.values()))
    others_before = {
        test: best("others", test, sets, [before.get(test, first)["settings"]["prompt"]])
        for test, sets in others.items()
    }
    results = {f"test {test}": one for test, one in before.items()}
    results |= {f"others {test}": one for test, one in others_before.items()}
    if results != known:
        write_json(path, {"subject": subject, "results": results})
    return before, others_before


def read_baseline(path: Path, subject: Mapping[str, Any]) -> dict[str, Any]:
    """What an earlier run measured of the same encoder with the same libraries."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return dict(content["results"]) if content["subject"] == subject else {}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def measure_retention(
    model: Encoders, others: Sets, before: Mapping[str, Any], facts: Mapping[str, Any], *, name: str
) -> dict[str, Any]:
    """Retention on each set, in the languages that were not trained on after all."""
    trained = {language for file in facts["files"] for language in file["languages"]}
    untrained = {
        test: {language: one for language, one in sets.items() if language not in trained}
        for test, sets in others.items()
    }
    after = measure(model, {test: sets for test, sets in untrained.items() if sets}, name=name)
    return {
        test: retention(compare(before[test], one))
        | {"models": {"before": describe_model(before[test]), "after": describe_model(one)}}
        for test, one in after.items()
    }


def retention_line(name: str, one: Mapping[str, Any]) -> str:
    """Retention on a set in a line."""
    pooled, (low, high) = one["pooled"], one["pooled"]["interval"]
    return (
        f"\n{name}, {len(one['languages'])} languages not trained on: {pooled['before']:.1f} → {pooled['after']:.1f}, "
        f"{pooled['difference']:+.2f} points [{low:+.2f}, {high:+.2f}] against a red line of {-one['limit']:g}: "
        f"{one['verdict']}"
    )


def describe(
    card: AlignmentModelCardData,
    facts: Mapping[str, Any],
    *,
    origins: Origins | None = None,
    data_license: str | None = None,
    license: str | None = None,
) -> None:
    """Fill a card with what a run knows of itself.

    Args:
        card: The card.
        facts: Facts of the run.
        origins: Origin and licence of training files, by their bare names.
        data_license: Licence of training files that have no other.
        license: Licence of the release; None is that of the base model, where it states one.
    """
    origins = {**hub_licenses(facts["files"]), **(origins or {})}
    card.command = facts["command"]
    card.seed = facts["seed"]
    card.corpus = [
        {key: file.get(key) for key in ("file", "language", "pairs", "sha256", "revision") if key in file}
        | provenance(file, origins=origins, data_license=data_license)
        for file in facts["files"]
    ]
    card.leakage = facts["leakage"]
    card.language = sorted({language for file in facts["files"] for language in file["languages"]})
    card.mlm_head = "; ".join(f"{name}: {TRANSFORMS[kind]}" for name, kind in facts["transforms"].items()) or None
    card.hardware = ", ".join(f"{key} {value}" for key, value in facts["hardware"].items())
    if facts["model"] == STARTER:
        card.base_model, card.license = "intfloat/multilingual-e5-small", "mit"
    elif card.license is None and not license:
        name, revision = split_revision(facts["model"])
        stated = stated_licenses(name, revision=card.base_model_revision or revision)
        card.license = stated[0] if len(stated) == 1 else None
    card.license = license or card.license


def with_choices(recipe: Recipe, options: RecipeOptions) -> Recipe:
    """The recipe with the command line's choices of vocabulary and transform in every term that has them."""
    chosen = {k: v for k in ("vocabulary", "transform") if (v := getattr(options, k)) is not None}
    terms = []
    for term in recipe.terms:
        accepted = OBJECTIVES[term.objective].__init__.__kwdefaults__ or {}
        terms.append(replace(term, args={**term.args, **{k: v for k, v in chosen.items() if k in accepted}}))
    return replace(recipe, terms=tuple(terms))


def read_corpus(options: CorpusOptions, model: SentenceTransformer, arguments: Any) -> Corpus:
    """The training bitext; one that is kept on disk is read by one process, for all."""
    first = arguments.main_process_first(local=False, desc="corpus") if options.on_disk else nullcontext()
    with first:
        return load_corpus(
            options.corpus,
            languages=options.languages or None,
            streaming=options.streaming,
            on_disk=Path(arguments.output_dir) / "corpus" if options.on_disk else None,
            cleaning=CLEANINGS[options.clean],
            tokenizer=model.tokenizer,
            temperature=options.temperature,
            limit=options.limit,
            seed=arguments.seed,
        )


def with_links(dataset: Any, recipe: Recipe, arguments: Any) -> Any:
    """The corpus with word links: where it has none it is aligned, once for an output folder.

    Words are best ranked by the links that both directions find, phrases best taken from grow-diag-final-and.

    Raises:
        ValueError: The corpus is a stream, which a statistical aligner cannot learn from.
    """
    there = "alignment" in (dataset.column_names or ())
    if there and (isinstance(dataset, IterableDataset) or None not in dataset["alignment"]):
        return dataset
    if isinstance(dataset, IterableDataset):
        raise UsageError(
            "This recipe needs word links and the corpus has none; a stream cannot be aligned while it is read. Align the "
            "corpus first: metaphrase align CORPUS -o ALIGNED.parquet."
        )
    from metaphrase.aligners.linking import add_alignment

    heuristic = "grow-diag-final-and" if "span-contrast" in recipe.objectives() else "intersection"
    digest = xxhash.xxh64(heuristic.encode())
    read = ("source", "target", "source_lang", "target_lang", "alignment", "segmenter")
    for row in dataset:
        digest.update("\t".join(row.get(name) or "" for name in read).encode())
    kept = Path(arguments.output_dir) / f"alignment-{digest.hexdigest()}.parquet"
    with arguments.main_process_first(local=False, desc="word alignment"):
        if not kept.is_file():
            logger.info(
                "The recipe needs word links, which the corpus lacks: aligning %d pairs first, with fast_align in both "
                "directions, put together by %s. Other links come from `metaphrase align`.",
                len(dataset),
                heuristic,
            )
            aligned, report = add_alignment(dataset, "fast_align", heuristic=heuristic)
            facts = report.total.facts()
            logger.info(
                "Aligned %.0f pairs a second; %.0f %% of the sources' words and %.0f %% of the targets' are linked.",
                report.pairs_per_second,
                100 * facts["share_source_linked"],
                100 * facts["share_target_linked"],
            )
            names = [name for name in aligned.column_names if name in ("alignment", "alignment_scores", "segmenter")]
            partial = kept.with_suffix(".partial")
            aligned.select_columns(names).to_parquet(partial)
            partial.rename(kept)
    links = Dataset.from_parquet(str(kept))
    others = dataset.remove_columns([name for name in links.column_names if name in dataset.column_names])
    return concatenate_datasets([others, links], axis=1)


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
        sources, targets = sides.setdefault(row["source_lang"], ([], []))
        sources.append(row["source"])
        targets.append(row["target"])
    sets = {
        language: ParallelSet(language, tuple(sources), tuple(targets))
        for language, (sources, targets) in sides.items()
    }
    return [RetrievalEvaluator(sets, name="dev")]


def make_loss(
    model: SentenceTransformer, recipe: Recipe, corpus: Corpus, *, max_length: int | None = None
) -> AlignmentLoss:
    """The recipe's loss, with what it needs to know of the corpus."""
    english_ids = None
    if any(term.args.get("vocabulary") == "english" for term in recipe.terms):
        if not isinstance(corpus.dataset, Dataset):
            raise UsageError("The English subset vocabulary is read off the corpus; it cannot be had from a stream.")
        english_ids = english_piece_ids(corpus.dataset["target"], model.tokenizer)
        logger.info("English subset vocabulary: %d pieces.", len(english_ids))
    languages = {language for file in corpus.files for language in file.get("languages", ())}
    return AlignmentLoss(model, recipe, max_length=max_length, english_ids=english_ids, languages=sorted(languages))


def checkpoint_to_resume(arguments: Any) -> str | None:
    """The checkpoint that ``--resume_from_checkpoint`` means: a path, or the output folder's last good one for ``true``.

    Raises:
        CheckpointError: The checkpoint does not exist or is damaged, or the folder holds checkpoints and resuming was not
            asked for: a later resume could not tell them from this run's.
    """
    asked = str(arguments.resume_from_checkpoint or "false")
    if asked.lower() in ("false", "no", "0"):
        if present := checkpoint_folders(arguments.output_dir):
            raise CheckpointError(
                f"{arguments.output_dir} holds {present[-1].name} of an earlier run. Go on with it by "
                "--resume_from_checkpoint true, or choose another --output_dir."
            )
        return None
    if asked.lower() in ("true", "yes", "1"):
        checkpoint = newest(arguments.output_dir)
        if checkpoint is None:
            logger.info("No checkpoint in %s yet; training starts from the beginning.", arguments.output_dir)
    else:
        checkpoint = Path(asked)
        verify(checkpoint)
    if checkpoint is not None:
        logger.info("Resuming from %s.", checkpoint)
    return None if checkpoint is None else str(checkpoint)


def prepare_process() -> None:
    """Log our own lines, not every library's; and keep the CPU out of denormal numbers, which slow it 45-fold."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("metaphrase").setLevel(logging.INFO)
    torch.set_flush_denormal(True)
