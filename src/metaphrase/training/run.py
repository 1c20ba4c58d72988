"""A training run, from corpus to release, card and report.

``metaphrase train`` calls :class:`TrainingRun`; ``metaphrase adapt``, ``metaphrase demo`` and the ablations are
configurations of it. Its steps are methods, in the order of :meth:`TrainingRun.execute`.
"""

from __future__ import annotations

import logging
import shlex
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from datasets import IterableDataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.evaluation import BaseEvaluator
from sentence_transformers.sentence_transformer.training_args import BatchSamplers
from transformers import TrainerCallback, set_seed
from transformers.trainer_utils import SaveStrategy

from metaphrase.checkpoints.folders import check_space
from metaphrase.checkpoints.saving import check_finite, explain_lost_processes, how_to_resume
from metaphrase.corpus.loading import Corpus
from metaphrase.corpus.parallel import ParallelSet
from metaphrase.encoders.adapters import add_lora, has_adapter
from metaphrase.encoders.loading import freeze_word_embeddings, load_encoder, origin_of
from metaphrase.encoders.names import full_name, model_folder, split_revision
from metaphrase.encoders.prompts import search_prompts
from metaphrase.evaluation.encoding import Encoders
from metaphrase.evaluation.guards import GuardEvaluator
from metaphrase.evaluation.retrieval import RetrievalEvaluator
from metaphrase.exceptions import CorpusError, UsageError
from metaphrase.io.counts import counted
from metaphrase.io.digests import json_digest
from metaphrase.io.environment import flush_denormals, hardware, has_bfloat16_instructions, versions
from metaphrase.io.files import write_json
from metaphrase.io.outputs import check_files, claimed
from metaphrase.io.redaction import hide, without_tokens
from metaphrase.modeling.languages import LanguageEmbedding, fold_languages
from metaphrase.postprocessing.merging import remove_curve
from metaphrase.publishing.card import AlignmentModelCardData
from metaphrase.publishing.examples import usage_by_language, usage_lines
from metaphrase.publishing.hub import push
from metaphrase.publishing.provenance import Origins
from metaphrase.publishing.release import RECIPE, release, release_languages, remove_release
from metaphrase.publishing.report import remove_report, write_report
from metaphrase.training.arguments import (
    AlignmentTrainingArguments,
    check_best_metric,
    check_devices,
    check_trackers,
)
from metaphrase.training.baseline import (
    Baseline,
    EvaluationSets,
    Sets,
    configured_languages,
    measure_baseline,
    read_test_sets,
    split_retention,
)
from metaphrase.training.callbacks import log_readably
from metaphrase.training.card_facts import TRANSFORMS, fill_card
from metaphrase.training.checks import check_config, check_evaluation, check_language_embedding, check_text
from metaphrase.training.configuration import RunConfig, configured_recipe
from metaphrase.training.corpora import (
    leakage,
    read_bitext,
    read_dev,
    remove_other_corpora,
    restored_caches,
    with_columns,
)
from metaphrase.training.distributed import from_first_process
from metaphrase.training.finishing import check_finish, finish, release_guards, training_guards
from metaphrase.training.loss import AlignmentLoss, build_loss
from metaphrase.training.planning import TRIAL_PAIRS, faster_precision
from metaphrase.training.results import RunResult, measure_effects
from metaphrase.training.resuming import argument_of, checkpoint_to_resume
from metaphrase.training.trainer import AlignmentTrainer

logger = logging.getLogger(__name__)

#: File of the verdict of an adaptation, in the folder of its release.
VERDICT = "verdict.json"


@dataclass(frozen=True)
class Inputs:
    """Inputs that a caller has loaded already; a run loads those that are None.

    Attributes:
        encoder: The model of the configuration, before training; it is trained in place.
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
        encoder: The encoder, from :meth:`load_encoder`; :meth:`train` trains it in place, :meth:`finish` may replace it.
        base: Name of the encoder before training, from :meth:`load_encoder`.
        tests: The test sets, from :meth:`load_test_sets`; :meth:`load_corpus` separates them by the languages of the corpus.
        corpus: The training bitext, from :meth:`load_corpus`.
        dev: The dev sets by language, from :meth:`load_corpus`.
        loss: The loss with the heads, from :meth:`build`.
        trainer: The trainer, from :meth:`build`.
        baseline: Results before training, from :meth:`measure_baseline`.
        result: The result, None until release and report are written; pushing comes last.

    Raises:
        ValueError: A value of the configuration is invalid.
    """

    encoder: SentenceTransformer
    base: str
    tests: EvaluationSets
    corpus: Corpus
    dev: Mapping[str, ParallelSet]
    loss: AlignmentLoss
    trainer: AlignmentTrainer
    baseline: Baseline

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
        check_evaluation(config, self._dev_names)  # before transformers asks for an evaluation data set
        self.arguments = self._arguments()
        self.output = Path(str(config.output_dir))
        self.result: RunResult | None = None
        self._began = time.time()

    def _arguments(self) -> AlignmentTrainingArguments:
        return self.config.training_arguments(evaluates=bool(self._dev_names))

    @property
    def _dev_names(self) -> Collection[str]:
        """The files of the dev sets, or their languages if the inputs contain them; empty without dev sets."""
        return self.config.dev or self.inputs.dev or ()

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
            UsageError: Options are missing, unknown or contradict each other, or the output folder is the encoder's
                or holds files that this library did not write.
            CheckpointError: Another process uses the output folder, it is not writable, or it cannot be resumed.
            CorpusError: The corpus cannot be read, or is smaller than a batch.
            WorkerError: A data loader worker died or is hung, or another process of the run ended.
            HubError: The release and its report are written (``result``), but could not be pushed.
        """
        self._began = time.time()
        self.check()
        self.arguments = self._arguments()  # resets the state of accelerate, which all runs share
        with explain_lost_processes(lambda: how_to_resume(self.output)), self.claim_output():
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
        """Refuse a configuration that cannot succeed, before anything is loaded."""
        check_devices(self.arguments)
        check_config(self.config, dev=self._dev_names, tests=self.config.test or self.inputs.tests or ())
        check_files([self.output / RECIPE], [self.config.recipe])
        check_trackers(self.arguments.report_to or ())
        check_text(self.recipe, self.config)

    @contextmanager
    def claim_output(self) -> Iterator[None]:
        """Keep other processes out of the output folder, and choose the checkpoint to resume from."""
        flush_denormals()
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
        self.base = full_name(self.config.model)
        if (origin := origin_of(self.encoder) or "").startswith(f"{split_revision(self.base)[0]}@"):
            self.base = origin  # with the commit: the Hub's model may change
        check_finish(self.encoder, self.config)
        if self.is_main_process and self.arguments.save_strategy == SaveStrategy.NO:
            weights = sum(parameter.nbytes for parameter in self.encoder.parameters())
            check_space(self.output, "release", weights, weights)

    def load_test_sets(self) -> None:
        """Read the test sets, and separate the languages that are trained on from the others."""
        self.tests = EvaluationSets()
        if self.is_main_process:
            self._test_sets = read_test_sets(self.config) if self.inputs.tests is None else self.inputs.tests
            self.tests = split_retention(self._test_sets, self.config, self.recipe)

    def measure_baseline(self) -> None:
        """Measure the encoder before training; an earlier run's results in the output folder are reused.

        Raises:
            UsageError: The baseline of the inputs lacks a test set.
        """
        started = time.time()
        self.baseline = self.inputs.baseline or measure_baseline(
            self.encoder, self.tests, self.output, name=self.config.model, show_progress=self._show_progress
        )
        if self.arguments.resume_from_checkpoint and not self.inputs.baseline:
            self._began += time.time() - started - self.baseline.seconds  # the resumed run measured it
        unmeasured = self.tests.trained.keys() - self.baseline.trained.keys()
        if missing := sorted(unmeasured | self.tests.retention.keys() - self.baseline.retention.keys()):
            raise UsageError(
                f"The given baseline has no results on {', '.join(missing)}. Omit it, or measure it there."
            )
        guarded = self._is_guarded and self.tests.trained
        self.guards = release_guards(self.encoder, self.config, "test") if guarded else []

    def load_corpus(self) -> None:
        """Read the training bitext with the columns that the recipe reads, and the dev bitext."""
        corpus = self.inputs.corpus or read_bitext(self.config, self.encoder, self.arguments)
        self.corpus = with_columns(corpus, self.recipe, self.config, self.arguments)
        if self.is_main_process and not configured_languages(self.config):
            languages = {language for file in self.corpus.files for language in file["languages"]}
            self.tests = split_retention(self._test_sets, self.config, self.recipe, languages)
        self.dev = read_dev(self.config, self.corpus) if self.inputs.dev is None else self.inputs.dev
        self.leakage = leakage(self.corpus.dataset, self.dev, self.tests.merged())

    def build(self) -> None:
        """Build loss and trainer, and verify that the checkpoint to resume belongs to this run."""
        self.choose_precision()
        self.build_loss()
        self.build_trainer()
        if self.arguments.resume_from_checkpoint:
            checkpoint = self.trainer.verify_checkpoint(self.arguments.resume_from_checkpoint)
            self.arguments.resume_from_checkpoint = checkpoint
        if self.config.on_disk and self.is_main_process:
            remove_other_corpora(self.output, self.corpus.dataset)

    def train(self) -> dict[str, Any]:
        """Train the encoder in place. Returns facts of the run, for card and report."""
        arguments, started = self.arguments, time.time()
        with redirect_stdout(sys.stderr):  # the progress bar's log lines; stdout belongs to results
            self.trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
        seconds = self.trainer.training_seconds
        self._began += time.time() - started - seconds  # a resumed run was also trained before
        return {
            "command": without_tokens(shlex.join(self.command)),
            "settings": self.config.settings(),
            "recipe": self.recipe.to_dict(),
            "objective_code": {name: read["code"] for name, read in self.loss.digests.items() if "code" in read},
            "model": self.config.model,
            "base": self.base,
            "frozen_word_embeddings": self.config.freeze_word_embeddings,
            "transforms": self.loss.transforms(),
            "seed": arguments.seed,
            "steps": self.trainer.state.global_step,
            "batch_size": arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size,
            "corpus": self.corpus.report.to_dict(),
            "files": self.corpus.files,
            "leakage": self.leakage,
            "packing": arguments.packing,
            "bf16": arguments.bf16,
            "seconds": self._seconds(),  # updated when a release is written and measured
            "training_seconds": seconds,
            "hardware": hardware(),
            "versions": versions(),
            "log_history": self.trainer.state.log_history,
        }

    def finish(self, facts: dict[str, Any]) -> None:
        """Merge the trained encoder with the original one and remove language identity, if configured.

        The curve, the report and the verdict of an earlier run are deleted from the output folder.
        """
        remove_curve(self.output)
        remove_report(self.output)
        (self.output / VERDICT).unlink(missing_ok=True)
        finished = finish(
            self.encoder, self.config, pooling=self.recipe.pooling, dev=self.dev, show_progress=self._show_progress
        )
        self.encoder, self.curve = finished.encoder, finished.curve
        facts |= finished.facts

    def choose_precision(self) -> None:
        """With ``bf16=None``, compute in bfloat16 if a trial step is faster in it; a resumed run keeps its precision."""
        arguments, config, dataset = self.arguments, self.config, self.corpus.dataset
        if config.bf16 is not None or arguments.fp16 or isinstance(dataset, IterableDataset):
            return
        if checkpoint := arguments.resume_from_checkpoint:
            arguments.bf16 = argument_of(checkpoint, "bf16")
        elif self.encoder.device.type == "cpu" and has_bfloat16_instructions():
            dtype, _ = faster_precision(
                self.encoder,
                self.recipe,
                self.corpus,
                size=min(arguments.train_batch_size, TRIAL_PAIRS, len(dataset)),
                freeze=config.freeze_word_embeddings,
                micro_batch_size=config.micro_batch_size,
                seed=config.seed,
            )
            arguments.bf16 = from_first_process(dtype == torch.bfloat16)
        if arguments.bf16:
            arguments.mixed_precision = "bf16"

    def build_loss(self) -> None:
        """Build the recipe's loss over the encoder."""
        if self.config.freeze_word_embeddings:
            freeze_word_embeddings(self.encoder)
        if self.config.lora_rank is not None:
            add_lora(self.encoder, self.config.lora_rank)
        if self.config.keep_adapter and not has_adapter(self.encoder):
            raise UsageError("--keep_adapter requires an adapter: pass --lora_rank as well.")
        self.loss = build_loss(self.encoder, self.recipe, self.corpus)
        for term in self.recipe.terms:
            if term.args.get("temperature") == "auto":
                logger.info("The temperature of %s is %g.", term.name, self.loss.objectives[term.name].temperature)
        for name, transform in self.loss.transforms().items():
            logger.info("%s predicts pieces through %s.", name.upper(), TRANSFORMS[transform])
        if (embedding := self.language_embedding) is not None:
            check_language_embedding(self.config, self.recipe, embedding, [self.dev, *self.tests.merged().values()])

    def build_trainer(self) -> None:
        """Build the trainer over corpus, loss and dev sets."""
        arguments, dataset = self.arguments, self.corpus.dataset
        if isinstance(dataset, IterableDataset):
            seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
            dataset = dataset.shuffle(seed=seed, buffer_size=10_000)
            arguments.batch_sampler = BatchSamplers.BATCH_SAMPLER
        else:
            logger.info("Corpus:\n%s", self.corpus.report)
            size, processes = arguments.train_batch_size * arguments.world_size, arguments.world_size
            if len(dataset) < size:
                over = f" over {processes} processes" if processes > 1 else ""
                raise CorpusError(
                    f"The corpus has {counted(len(dataset), 'pair')}, fewer than a batch of {size}{over}. Add pairs, or "
                    "lower --per_device_train_batch_size."
                )
        evaluators: list[BaseEvaluator] = []
        digests = {language: one.sha256[:16] for language, one in self.dev.items()}
        if self.dev:
            retrieval = RetrievalEvaluator(self.dev, name="dev", language_embedding=self.language_embedding)
            metrics = retrieval.metrics
            if self._is_guarded:
                guards = GuardEvaluator(training_guards(self.encoder, self.config, self.dev))
                metrics += guards.metrics
                if selecting := guards.guards.get(str(arguments.metric_for_best_model).removeprefix("eval_")):
                    digests[f"guard {selecting.name}"] = json_digest(selecting.digests)[:16]
                evaluators.append(guards)
            check_best_metric(arguments, metrics)
            evaluators.append(retrieval)  # the last one has the sequential score
        self.trainer = AlignmentTrainer(
            model=self.encoder,
            args=arguments,
            train_dataset=dataset,
            loss=self.loss,
            evaluator=evaluators or None,
            callbacks=self.callbacks,
        )
        self.trainer.dev_digests = digests
        log_readably(self.trainer)
        arguments.hub_model_id = self.trainer.hub_model_id or arguments.hub_model_id

    def write_release(self, facts: dict[str, Any]) -> AlignmentModelCardData:
        """Write the release with its card, which is returned, and the facts to ``run.json``."""
        card = self.encoder.model_card_data
        assert isinstance(card, AlignmentModelCardData)
        config = self.config
        fill_card(card, facts, origins=self.origins, data_license=config.data_license, license=config.license)
        self.release(card)
        facts["seconds"] = self._seconds()
        write_json(self.output / "run.json", facts)
        return card

    def release(self, card: AlignmentModelCardData) -> None:
        """Write the release with a card; with a language embedding, one for each language in it."""
        check_finite(self.encoder)
        settings: dict[str, Any] = {
            "recipe": self.recipe.to_dict(),
            "card": card,
            "keep_adapter": self.config.keep_adapter,
            "prompts": None if self.config.merge is None else search_prompts(self.encoder.prompts),
        }
        if (embedding := self.language_embedding) is None:
            release(self.encoder, self.output, **settings)
        else:
            release_languages(self.encoder, self.output, embedding, **settings)
            remove_release(self.output)  # of an earlier run without a language embedding

    def trained_encoder(self) -> Encoders:
        """The released encoder, loaded from its folder, or one for each language of a language embedding."""
        if self.language_embedding is None:
            return load_encoder(self.output, device=str(self.encoder.device))
        return fold_languages(self.encoder, self.language_embedding)

    def report(self, facts: dict[str, Any], card: AlignmentModelCardData) -> RunResult:
        """Measure the release on the test sets, write it again with the results on its card, and write the report."""
        result = RunResult(self.output, self.config.model, facts, curve=self.curve)
        tests = self.tests.trained
        if not tests:
            return result
        model = self.trained_encoder()
        result = measure_effects(
            result, model, self.tests, self.baseline, self.guards, show_progress=self._show_progress
        )
        facts["seconds"] = self._seconds()
        write_json(self.output / "run.json", facts)
        result.add_to(card)
        self.release(card)
        languages = [*next(iter(tests.values())), *card.language]
        write_usage = usage_lines if self.language_embedding is None else usage_by_language
        usage = write_usage(self.output, languages)
        page = write_report(
            self.output,
            title=self.title or f"{self.config.model} trained with {self.recipe.name}",
            before=result.before,
            after=result.after,
            comparisons=result.comparisons,
            run=facts,
            usage=usage,
            analysis={name: getattr(result, name) for name in ("retention", "abilities", "verdict")}
            | ({} if self.curve is None else {"alpha": self.curve.to_dict()}),
        )
        return replace(result, report=page, usage=usage)

    def push(self) -> str:
        """Push the finished release, with its complete card. Returns the address of the commit."""
        return push(
            self.output,
            str(self.arguments.hub_model_id),
            private=bool(self.arguments.hub_private_repo),
            revision=self.arguments.hub_revision,
            token=self.arguments.hub_token,
            commit_message="End of training",
        )

    def _seconds(self) -> float:
        """Seconds of the run so far: loading, measuring and training, also before it was resumed."""
        return round(time.time() - self._began, 1)

    @property
    def repository(self) -> str | None:
        """The repository that the release is pushed to."""
        return self.arguments.hub_model_id

    @property
    def _is_guarded(self) -> bool:
        """Whether guards are measured: not if retention is switched off and no data are given."""
        wanted = bool(self.config.guard) or self.config.retention != ["none"]
        return wanted and not self.recipe.language_embedding

    @property
    def _show_progress(self) -> bool:
        return not self.config.disable_tqdm and sys.stderr.isatty()
