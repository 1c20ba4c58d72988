"""A training run, from corpus to release, card and report.

``metaphrase train`` calls :class:`TrainingRun`; ``metaphrase adapt``, ``metaphrase demo`` and the ablations are
configurations of it. Its steps are methods, in the order of :meth:`TrainingRun.execute`.
"""

from __future__ import annotations

import logging
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.training_args import BatchSamplers
from transformers import TrainerCallback, set_seed
from transformers.trainer_utils import IntervalStrategy

from metaphrase.corpus.files import find_files
from metaphrase.corpus.loading import Corpus
from metaphrase.corpus.parallel import ParallelSet
from metaphrase.encoders.adapters import add_lora, has_adapter
from metaphrase.encoders.loading import english_piece_ids, freeze_word_embeddings, load_encoder, model_folder
from metaphrase.encoders.prompts import search_prompts
from metaphrase.evaluation.compare import compare
from metaphrase.evaluation.guards import AlphaCurve
from metaphrase.evaluation.retention import collapse_in_words, overall_verdict
from metaphrase.evaluation.retrieval import Encoders, RetrievalEvaluator
from metaphrase.exceptions import CorpusError, MissingExtraError, UsageError
from metaphrase.io.environment import hardware, install_command, versions
from metaphrase.io.files import write_json
from metaphrase.io.outputs import check_files, claimed
from metaphrase.io.redaction import hide, without_tokens
from metaphrase.modeling.languages import LanguageEmbedding, fold_languages
from metaphrase.objectives import OBJECTIVES
from metaphrase.objectives.registry import parameters_of
from metaphrase.publishing.card import AlignmentModelCardData
from metaphrase.publishing.hub import push
from metaphrase.publishing.provenance import Origins
from metaphrase.publishing.release import RECIPE
from metaphrase.publishing.report import usage_lines, write_report
from metaphrase.training.arguments import check_trackers
from metaphrase.training.baseline import (
    Baseline,
    EvaluationSets,
    Sets,
    measure,
    measure_baseline,
    measure_retention,
    read_test_sets,
    split_retention,
)
from metaphrase.training.callbacks import log_readably
from metaphrase.training.configuration import CLEANINGS, RunConfig
from metaphrase.training.corpora import (
    check_text,
    leakage,
    read_bitext,
    read_dev,
    remove_other_corpora,
    restored_caches,
    selected,
    with_columns,
)
from metaphrase.training.finishing import finish, release_guards
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import Recipe
from metaphrase.training.releases import TRANSFORMS, describe, usage_by_language, write_release
from metaphrase.training.resuming import checkpoint_to_resume
from metaphrase.training.trainer import AlignmentTrainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResult:
    """The result of a training run.

    Attributes:
        output: Folder of the release; with a language embedding, a release for each language in it.
        model: Name of the encoder that was trained.
        facts: Facts of the run, as in ``run.json``: recipe, corpus, files, steps, seconds, hardware, versions and log.
        before: Results before training, by test set.
        after: Results of the release, by test set.
        comparisons: Before and after compared, by test set.
        retention: Retention of languages that were not trained on, by test set.
        abilities: Retention of other abilities: rows of guards by their names.
        curve: Gain and cost by the weight of what training changed, if it was chosen.
        verdict: What the release is better and worse at than the encoder before, as one sentence.
        report: The HTML report; ``report.json`` is in the same folder. None without test sets.
        usage: Python that loads the release.
        pushed: Address of the commit on the Hub, if the release was pushed.
    """

    output: Path
    model: str
    facts: Mapping[str, Any]
    before: Mapping[str, Any] = field(default_factory=dict)
    after: Mapping[str, Any] = field(default_factory=dict)
    comparisons: Mapping[str, Any] = field(default_factory=dict)
    retention: Mapping[str, Any] = field(default_factory=dict)
    abilities: Mapping[str, Any] = field(default_factory=dict)
    curve: AlphaCurve | None = None
    verdict: str = ""
    report: Path | None = None
    usage: str = ""
    pushed: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data: the facts with ``output``, comparisons, retention, verdict and ``pushed``."""
        names = ("comparisons", "retention", "abilities", "verdict", "pushed")
        curve = None if self.curve is None else self.curve.to_dict()
        return {
            **self.facts,
            "output": str(self.output),
            **{name: getattr(self, name) for name in names},
            "curve": curve,
        }


@dataclass(frozen=True)
class Inputs:
    """Inputs that a caller has loaded already; a run loads those that are None.

    Attributes:
        encoder: The encoder; it is trained in place.
        corpus: The training bitext.
        dev: Dev sets by language.
        tests: Test sets by name, each by language.
        baseline: Results of the encoder on these test sets, e.g. of another run (``TrainingRun.baseline``).
    """

    encoder: SentenceTransformer | None = None
    corpus: Corpus | None = None
    dev: Mapping[str, ParallelSet] | None = None
    tests: Sets | None = None
    baseline: Baseline | None = None


class TrainingRun:
    """A training run: corpus, baseline, loss, trainer, release, card and report.

    Nothing is printed to stdout; progress is logged.

    Example::

        from metaphrase import RunConfig, TrainingRun

        config = RunConfig(model="starter", corpus=["pairs.tsv"], languages=["sw"], output_dir="runs/sw", max_steps=300)
        result = TrainingRun(config).execute()

    Args:
        config: The configuration; it is not changed.
        inputs: Inputs that are loaded already.
        callbacks: Additional callbacks for the trainer.
        command: The command line, for card and report; None writes the equivalent ``metaphrase train`` command.
        title: Heading of the report.
        origins: ``origin`` and ``license`` of training files whose origin the caller knows, by their bare names, for the
            card.

    Attributes:
        result: The result, once release and report are written; pushing comes last.

    Raises:
        ValueError: A value of the configuration is invalid.
    """

    encoder: SentenceTransformer
    tests: EvaluationSets
    baseline: Baseline
    corpus: Corpus
    dev: Mapping[str, ParallelSet]
    loss: AlignmentLoss
    trainer: AlignmentTrainer

    def __init__(
        self,
        config: RunConfig,
        *,
        inputs: Inputs = Inputs(),
        callbacks: Sequence[TrainerCallback] = (),
        command: Sequence[str] | None = None,
        title: str | None = None,
        origins: Origins | None = None,
    ) -> None:
        hide(config.hub_token)
        self.config = config
        self.inputs = inputs
        self.callbacks = list(callbacks)
        self.command = list(command or config.command())
        self.title = title
        self.origins = origins
        self.recipe = configured_recipe(config)
        self.arguments = config.training_arguments()
        self.output = Path(str(config.output_dir))
        self.result: RunResult | None = None
        self._preparation = 0.0  # seconds

    @property
    def is_main_process(self) -> bool:
        """Whether this process measures, writes and returns the result."""
        return bool(self.arguments.process_index == 0)

    @property
    def language_embedding(self) -> LanguageEmbedding | None:
        """The input language embedding that is trained with the encoder, if the recipe has one."""
        return self.loss.heads.language_embedding

    def execute(self) -> RunResult | None:
        """Train, release and measure.

        Returns:
            The result; None on other processes than the first.

        Raises:
            UsageError: Options are missing, unknown or contradict each other, or the output folder is that of the encoder
                or holds files that this library did not write.
            CheckpointError: Another process uses the output folder, it is not writable, or it cannot be resumed.
            CorpusError: The corpus cannot be read, or is smaller than a batch.
            HubError: The release and its report are written (``result``), but could not be pushed.
        """
        self.check()
        with self.claim_output():
            self.load_encoder()
            self.load_test_sets()
            resumes = self.is_main_process and self.arguments.resume_from_checkpoint
            with restored_caches(self.output) if resumes else nullcontext():
                self.load_corpus()
                self.build()
            self.measure_baseline()
            facts = self.train()
            if not self.is_main_process:
                return None
            self.finish(facts)
            card = self.write_release(facts)
            self.result = self.report(facts, card)
            if self.config.push_to_hub:
                self.result = replace(self.result, pushed=self.push())
            return self.result

    # -------------------------------------------------------------------------------------------------- the steps

    def check(self) -> None:
        """Refuse a configuration that cannot succeed, before anything is loaded.

        Raises:
            UsageError: An option is missing or unknown.
            MissingFileError: The corpus does not exist.
        """
        check(self.config)
        if self.config.merge == "auto" and not (self.config.dev or self.inputs.dev):
            raise UsageError("--merge auto needs pairs that show the gain: pass --dev, or a number with --merge.")
        if self.config.guard and self.config.merge != "auto" and not (self.config.test or self.inputs.tests):
            raise UsageError("--guard is measured with the test sets: also pass --test.")
        check_files([self.output / RECIPE], [self.config.recipe])
        check_trackers(self.arguments.report_to or ())
        check_text(self.recipe, self.config)

    @contextmanager
    def claim_output(self) -> Iterator[None]:
        """Keep other processes out of the output folder, and choose the checkpoint to resume from.

        Raises:
            UsageError: The folder is that of the encoder, or holds files that this library did not write.
            CheckpointError: Another process uses the folder, it is not writable, or it cannot be resumed.
        """
        torch.set_flush_denormal(True)  # peaked softmaxes produce denormal numbers, on which CPUs are 45 times slower
        with ExitStack() as stack:
            with self.arguments.main_process_first(local=False, desc="choice of a checkpoint"):
                if self.is_main_process:
                    stack.enter_context(claimed(self.output, model=model_folder(self.config.model)))
                self.arguments.resume_from_checkpoint = checkpoint_to_resume(self.arguments)
            set_seed(self.config.seed)
            yield

    def load_encoder(self) -> None:
        """Load the encoder."""
        self.encoder = self.inputs.encoder or load_encoder(
            self.config.model,
            pooling=self.config.pooling,
            default_pooling=self.recipe.pooling,
            device="cpu" if self.config.use_cpu else None,
        )

    def load_test_sets(self) -> None:
        """Read the test sets, and separate the languages that are trained on from the others."""
        self.tests = EvaluationSets()
        if self.is_main_process:
            tests = read_test_sets(self.config) if self.inputs.tests is None else self.inputs.tests
            self.tests = split_retention(tests, self.config, self.recipe)

    def measure_baseline(self) -> None:
        """Measure the encoder before training; an earlier run's results in the output folder are reused."""
        self.baseline = self.inputs.baseline or measure_baseline(
            self.encoder, self.tests, self.output, name=self.config.model, show_progress=self._show_progress
        )
        guarded: Any = self.config.guard or self.config.retention != ["none"]
        guarded = guarded and self.tests.trained and not self.recipe.language_embedding
        self.guards = release_guards(self.encoder, self.config, "test") if guarded else []

    def load_corpus(self) -> None:
        """Read the training bitext with the columns that the recipe reads, and the dev bitext."""
        started = time.time()
        corpus = self.inputs.corpus or read_bitext(self.config, self.encoder, self.arguments)
        self.corpus = with_columns(corpus, self.recipe, self.config, self.arguments)
        self.dev = read_dev(self.config, self.corpus) if self.inputs.dev is None else self.inputs.dev
        self._preparation = time.time() - started

    def build(self) -> None:
        """Build loss and trainer, and verify that the checkpoint to resume belongs to this run.

        Raises:
            UsageError: Options contradict each other.
            CorpusError: The corpus is smaller than a batch, or lacks a language that a language embedding requires.
            CheckpointError: The checkpoint belongs to another run.
        """
        self.build_loss()
        self.build_trainer()
        if self.arguments.resume_from_checkpoint:
            checkpoint = self.trainer.verify_checkpoint(self.arguments.resume_from_checkpoint)
            self.arguments.resume_from_checkpoint = checkpoint
        if self.config.on_disk and self.is_main_process:
            remove_other_corpora(self.output, self.corpus.dataset)

    def train(self) -> dict[str, Any]:
        """Train the encoder in place.

        Returns:
            Facts of the run, for card and report.

        Raises:
            CheckpointError: A checkpoint cannot be written.
        """
        started = time.time()
        with redirect_stdout(sys.stderr):  # the progress bar's log lines; stdout belongs to results
            outcome = self.trainer.train(resume_from_checkpoint=self.arguments.resume_from_checkpoint)
        arguments = self.arguments
        return {
            "command": without_tokens(shlex.join(self.command)),
            "recipe": self.recipe.to_dict(),
            "model": self.config.model,
            "frozen_word_embeddings": self.config.freeze_word_embeddings,
            "transforms": self.loss.transforms(),
            "seed": arguments.seed,
            "steps": self.trainer.state.global_step,
            "batch_size": arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size,
            "corpus": self.corpus.report.to_dict(),
            "files": self.corpus.files,
            "leakage": leakage(self.corpus.dataset, self.tests.merged()),
            "packing": arguments.packing,
            "seconds": round(self._preparation + time.time() - started, 1),
            "training_seconds": round(outcome.metrics["train_runtime"], 1),
            "hardware": hardware(),
            "versions": versions(),
            "log_history": self.trainer.state.log_history,
        }

    def finish(self, facts: dict[str, Any]) -> None:
        """Merge the trained encoder with its start and remove language identity, if the configuration says so.

        Raises:
            UsageError: The languages of the packaged texts do not differ in so many directions.
        """
        finished = finish(
            self.encoder, self.config, pooling=self.recipe.pooling, dev=self.dev, show_progress=self._show_progress
        )
        self.encoder, self.curve = finished.encoder, finished.curve
        facts |= finished.facts

    def build_loss(self) -> None:
        """Build the recipe's loss over the encoder.

        Raises:
            UsageError: The recipe's vocabulary cannot be read from a stream, or a language that is measured has no vector
                in the recipe's language embedding.
        """
        if self.config.freeze_word_embeddings:
            freeze_word_embeddings(self.encoder)
        if self.config.lora_rank is not None:
            add_lora(self.encoder, self.config.lora_rank)
        if self.config.keep_adapter and not has_adapter(self.encoder):
            raise UsageError("--keep_adapter requires an adapter: pass --lora_rank as well.")
        self.loss = build_loss(self.encoder, self.recipe, self.corpus, max_length=self.config.max_length)
        for name, transform in self.loss.transforms().items():
            logger.info("%s predicts pieces through %s.", name.upper(), TRANSFORMS[transform])
        if self.language_embedding is None:
            return
        if self.config.debias or self.config.merge is not None or self.config.guard:
            raise UsageError(
                f"Recipe {self.recipe.name!r} learns an input vector for each language, so its encoder is not merged, "
                "debiased or guarded. Omit --merge, --debias and --guard."
            )
        if self.config.push_to_hub:
            raise UsageError(
                f"Recipe {self.recipe.name!r} is released as one folder per language, which one repository cannot contain. "
                "Omit --push_to_hub, and push the folders after training: metaphrase push FOLDER/xx --repo me/name-xx."
            )
        measured = {*self.dev, *(language for sets in self.tests.merged().values() for language in sets)}
        if missing := sorted(measured - set(self.language_embedding.languages)):
            raise UsageError(
                f"The corpus has no {', '.join(missing)}, so the model learns no vector for it and cannot be measured "
                "on it. Choose the measured languages with --languages."
            )

    def build_trainer(self) -> None:
        """Build the trainer over corpus, loss and dev sets.

        Raises:
            CorpusError: The corpus is smaller than a batch.
        """
        arguments, dataset = self.arguments, self.corpus.dataset
        if isinstance(dataset, IterableDataset):
            dataset = dataset.shuffle(seed=arguments.seed, buffer_size=10_000)
            arguments.batch_sampler = BatchSamplers.BATCH_SAMPLER
        else:
            logger.info("Corpus:\n%s", self.corpus.report)
            if len(dataset) < arguments.train_batch_size:
                raise CorpusError(
                    f"The corpus has {len(dataset)} pairs, fewer than a batch of {arguments.train_batch_size}. Add "
                    "pairs, or lower --per_device_train_batch_size."
                )
        evaluators = [RetrievalEvaluator(dict(self.dev), name="dev")] if self.dev else None
        for evaluator in evaluators or ():
            evaluator.language_embedding = self.language_embedding
        if evaluators and arguments.eval_strategy == IntervalStrategy.NO:
            arguments.eval_strategy, arguments.eval_steps = IntervalStrategy.STEPS, arguments.save_steps
        self.trainer = AlignmentTrainer(
            model=self.encoder,
            args=arguments,
            train_dataset=dataset,
            loss=self.loss,
            evaluator=evaluators,
            callbacks=self.callbacks,
        )
        log_readably(self.trainer)
        arguments.hub_model_id = self.trainer.hub_model_id or arguments.hub_model_id

    def write_release(self, facts: dict[str, Any]) -> AlignmentModelCardData:
        """Write the release with its card, and the facts to ``run.json``.

        Returns:
            The card.
        """
        card = self.encoder.model_card_data
        assert isinstance(card, AlignmentModelCardData)
        config = self.config
        describe(card, facts, origins=self.origins, data_license=config.data_license, license=config.license)
        self.release(card)
        write_json(self.output / "run.json", facts)
        return card

    def release(self, card: AlignmentModelCardData) -> None:
        """Write the release with a card; with a language embedding, one for each language in it."""
        write_release(
            self.encoder,
            self.output,
            self.language_embedding,
            recipe=self.recipe.to_dict(),
            card=card,
            keep_adapter=self.config.keep_adapter,
            prompts=None if self.config.merge is None else search_prompts(self.encoder.prompts),
        )

    def trained_encoder(self) -> Encoders:
        """The released encoder, loaded from its folder, or one for each language of a language embedding."""
        if self.language_embedding is None:
            return load_encoder(self.output, device=str(self.encoder.device))
        return fold_languages(self.encoder, self.language_embedding)

    def report(self, facts: dict[str, Any], card: AlignmentModelCardData) -> RunResult:
        """Measure the release on the test sets, and write the results to card and report.

        Returns:
            The result of the run.
        """
        result = RunResult(self.output, self.config.model, facts, curve=self.curve)
        tests, before, name = self.tests.trained, self.baseline.trained, str(self.output)
        if not tests:
            return result
        trained = self.trained_encoder()
        after = measure(trained, tests, name=name, show_progress=self._show_progress)
        comparisons = {test: compare(before[test], after[test]) for test in tests}
        retained = measure_retention(
            trained, self.tests, self.baseline, facts, name=name, show_progress=self._show_progress
        )
        for test, comparison in comparisons.items():
            card.add_comparison(test, comparison)
        for test, one in retained.items():
            card.add_retention(test, one)
        abilities = {guard.name: guard.measure(trained) for guard in self.guards}
        for ability, row in abilities.items():
            card.add_ability(ability, row)
        card.verdict = collapse_in_words(before, after) or overall_verdict(comparisons, retained, abilities)
        self.release(card)
        embedding = self.language_embedding
        languages = [*next(iter(tests.values())), *card.language]
        usage = usage_lines(self.output, languages) if embedding is None else usage_by_language(self.output, languages)
        page = write_report(
            self.output,
            title=self.title or f"{self.config.model} trained with {self.recipe.name}",
            before=before,
            after=after,
            comparisons=comparisons,
            run=facts,
            usage=usage,
            analysis={"retention": retained, "abilities": abilities, "verdict": card.verdict}
            | ({} if self.curve is None else {"alpha": self.curve.to_dict()}),
        )
        measured: dict[str, Any] = {
            "before": before,
            "after": after,
            "comparisons": comparisons,
            "retention": retained,
        }
        return replace(result, **measured, abilities=abilities, verdict=card.verdict, report=page, usage=usage)

    def push(self) -> str:
        """Push the finished release, with its complete card, to the repository of the training arguments.

        Returns:
            Address of the commit.

        Raises:
            HubError: The Hub refuses the release or cannot be reached.
        """
        return push(
            self.output,
            str(self.arguments.hub_model_id),
            private=bool(self.arguments.hub_private_repo),
            revision=self.arguments.hub_revision,
            token=self.arguments.hub_token,
            commit_message="End of training",
        )

    @property
    def repository(self) -> str | None:
        """The repository that the release is pushed to."""
        return self.arguments.hub_model_id

    @property
    def _show_progress(self) -> bool:
        return not self.config.disable_tqdm and sys.stderr.isatty()


# ------------------------------------------------------------------------------------------------------------ functions


def check(config: RunConfig) -> None:
    """Refuse a configuration whose options are missing or unknown."""
    if not config.corpus:
        raise UsageError("Training needs a bitext: pass --corpus (a file, a folder or hf:org/name).")
    if not config.output_dir:
        raise UsageError("Training needs a folder for its results: pass --output_dir.")
    if config.streaming and config.max_steps <= 0:
        raise UsageError("A stream has no length: pass --max_steps.")
    if config.lora_rank is not None and find_spec("peft") is None:
        raise MissingExtraError(f"--lora_rank requires PEFT: {install_command('peft')}.")
    if config.clean not in CLEANINGS:
        raise UsageError(f"--clean is one of {', '.join(CLEANINGS)}, not {config.clean!r}.")
    find_files(config.corpus, **selected(config))


def configured_recipe(config: RunConfig) -> Recipe:
    """The recipe with the configured vocabulary and transform in every term that has them."""
    recipe = Recipe.load(config.recipe)
    recipe.check()
    chosen = {name: value for name in ("vocabulary", "transform") if (value := getattr(config, name)) is not None}
    terms = []
    for term in recipe.terms:
        accepted = parameters_of(OBJECTIVES[term.objective])
        settings = {name: value for name, value in chosen.items() if name in accepted}
        terms.append(replace(term, args={**term.args, **settings}) if settings else term)
    return replace(recipe, terms=tuple(terms))


def build_loss(
    model: SentenceTransformer, recipe: Recipe, corpus: Corpus, *, max_length: int | None = None
) -> AlignmentLoss:
    """Build a recipe's loss, with the vocabulary and the languages of the corpus."""
    english_ids = None
    if any(term.args.get("vocabulary") == "english" for term in recipe.terms):
        if not isinstance(corpus.dataset, Dataset):
            raise UsageError("The English subset vocabulary is read from the corpus; a stream does not provide it.")
        english_ids = english_piece_ids(corpus.dataset["target"], model.tokenizer)
        logger.info("English subset vocabulary: %d pieces.", len(english_ids))
    languages = {language for file in corpus.files for language in file.get("languages", ())}
    return AlignmentLoss(model, recipe, max_length=max_length, english_ids=english_ids, languages=sorted(languages))
