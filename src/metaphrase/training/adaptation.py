"""Adapting an encoder to a language: check the corpus, hold out test pairs, plan, train, measure, report a verdict.

``metaphrase adapt`` calls :class:`Adaptation`, which loads encoder and corpus once and passes them to a
:class:`metaphrase.TrainingRun`.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from transformers import EarlyStoppingCallback

from metaphrase.checkpoints.folders import checkpoint_folders, differences
from metaphrase.corpus.checks import LEAKAGE, Finding, check_corpus, errors, is_copied, read_corpus
from metaphrase.corpus.codes import bare_language, split_languages, standard_code
from metaphrase.corpus.declaration import articles_of
from metaphrase.corpus.identification import language_name
from metaphrase.corpus.loading import load_corpus
from metaphrase.corpus.options import SOURCE_COLUMN, TARGET_COLUMN
from metaphrase.corpus.parallel import ParallelSet, load_parallel_folder
from metaphrase.corpus.report import CorpusReport
from metaphrase.encoders.loading import load_encoder
from metaphrase.encoders.names import encoder_files, model_folder, repository_of
from metaphrase.evaluation.guard_data import GUARD_FOLDERS
from metaphrase.evaluation.guards import MAX_STRUCTURE_LOSS, check_guard_folders
from metaphrase.evaluation.retention import collapse_in_words, verdict_in_words
from metaphrase.exceptions import CheckpointError, CorpusError, UsageError
from metaphrase.io.arguments import AtLeast0, Directions, MergeWeight, Range, Seed, Weight, checked
from metaphrase.io.configuration import ENCODER, option, split_list
from metaphrase.io.counts import counted
from metaphrase.io.digests import files_sha256, json_digest
from metaphrase.io.files import PACKAGED_DATA, as_json, write_json
from metaphrase.io.outputs import check_files, check_folder, claimed
from metaphrase.io.work_folders import read_part, write_part
from metaphrase.publishing.provenance import PACKAGED
from metaphrase.publishing.release import RECIPE
from metaphrase.training.arguments import AlignmentTrainingArguments, check_devices
from metaphrase.training.checks import check_directions
from metaphrase.training.configuration import STRUCTURE_LIMIT, RunConfig, flags_of
from metaphrase.training.corpora import with_links
from metaphrase.training.demo import demo_settings
from metaphrase.training.finishing import check_finish, encoded_texts
from metaphrase.training.loss import build_loss
from metaphrase.training.planning import EVALUATIONS, PATIENCE, Plan, count_prompts, plan_run, restored
from metaphrase.training.recipe import Recipe
from metaphrase.training.results import RunResult
from metaphrase.training.run import VERDICT, Inputs, TrainingRun
from metaphrase.training.splits import Pair, Split, file_name, held_out, replay, split_all, write_split

logger = logging.getLogger(__name__)

#: File of the plan in the output folder, with the settings that it was made for.
PLAN = "plan.json"
#: Names of the test sets: held-out pairs, and the packaged Universal Declaration of Human Rights.
HELD_OUT, RETENTION = "held-out", "udhr"

#: Digests among the settings that a plan was made for; those of the pairs also follow from other settings.
_DIGESTS = ("weights", "pairs", HELD_OUT)
#: Options of the steps between training and release.
_FINISHING = ("merge", "guard", "max_structure_loss", "debias")
#: Training settings that the plan chooses, or that change the time or the memory of a planned step.
_PLANNED = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "effective_batch_size", "micro_batch_size",
    "num_train_epochs", "max_steps", "learning_rate", "head_learning_rate", "warmup_steps", "batch_sampler", "seed",
    "bf16", "fp16", "freeze_word_embeddings", "activation_checkpointing",
)  # fmt: skip
#: Languages that the Declaration has under another code.
_IN_DECLARATION = {"nb": "no"}

#: The user's pairs, split by language, and packaged pairs of other languages.
Splits: TypeAlias = Mapping[str, Split]
Replayed: TypeAlias = Mapping[str, Sequence[Pair]]


@checked
@dataclass
class AdaptationConfig:
    """Options of an adaptation."""

    corpus: list[str] = option(
        help="Your bitext: TSV, CSV, JSONL, Parquet, TMX, Moses 'x.sw,x.en', a folder, or hf:org/name."
    )
    languages: list[str] = option(help="Languages to adapt to: the languages of your bitext, besides English.")
    source_column: str | None = option(None, SOURCE_COLUMN)
    target_column: str | None = option(None, TARGET_COLUMN)
    model: str = option("starter", f"Encoder to adapt: {ENCODER} (default: starter).")
    output_dir: str | None = option(None, "Folder of the release, its report and its data (default: runs/adapt-XX).")
    recipe: str = option(
        "metaphrase",
        "A name from `metaphrase recipes`, or a YAML file. Batch size, learning rates and number of steps are planned.",
    )
    minutes: Annotated[float, Range(above=0, most=1_000_000)] = option(
        8.0, "Minutes for training; checks and measurements take additional time."
    )
    replay: Annotated[float, Range(0, 1000)] = option(
        1.0, "Packaged pairs of other languages for each of your pairs, to preserve these languages; 0 for none."
    )
    anchor: Weight | None = option(
        None,
        "Weight of the objective 'anchor', which keeps embeddings close to those of the original encoder; 0 for none "
        "(default: the recipe's). It is added to a recipe without an anchor, for the English side.",
    )
    merge: MergeWeight = option(
        "auto",
        "Weight of the trained encoder in the release: 0 is the encoder before training, 1 the trained encoder. auto: the "
        "weight that gains most on the pairs for early stopping while all guards hold: similarity structure, and the folders "
        "of --guard.",
    )
    guard: list[str] = option(
        [],
        f"Folders of data on which the release must not get worse. Their names must differ. Each contains {GUARD_FOLDERS}.",
    )
    max_structure_loss: AtLeast0 = option(MAX_STRUCTURE_LOSS, STRUCTURE_LIMIT)
    debias: Directions = option(
        20,
        "Directions of language identity to project out of the release; 0 for none. auto: of 10, 20, 30 and 40, the number "
        "that gains most on the pairs for early stopping, in one pool of all languages, while the guards of --guard hold.",
    )
    data_license: str | None = option(None, "Licence of your bitext, for the model card.")
    retention_languages: list[str] = option(
        [],
        "Other languages to measure before and after training: codes, or 'all' for the 94 languages of the packaged "
        "Universal Declaration of Human Rights (default: a sample of 20).",
    )
    force: bool = option(
        False, "Train even if the checks find errors, unless most pairs have exactly the same text on both sides."
    )
    plan_only: bool = option(False, "Check the corpus, print the plan with its estimated duration, and stop.")
    seed: Seed = option(42, "Seed of the split and of training.")


@dataclass(frozen=True)
class AdaptationResult:
    """The result of an adaptation. Its representation omits measurements, plan and findings.

    Attributes:
        run: The result of the training run.
        verdict: The changes as sentences, see `verdict_in_words`; the last says what the release is better and worse at.
        languages: For each language, held-out retrieval before and after with its interval.
        retention: Retention of languages that were not trained on; None if none was measured.
        plan: Settings of the run, with reasons.
        read: Report of the corpus.
        findings: Results of the checks.
        seconds: Duration of the call, without that of a run that it resumes.
    """

    run: RunResult
    verdict: list[str]
    languages: Mapping[str, Any] = field(repr=False)
    retention: Mapping[str, Any] | None = field(repr=False)
    plan: Plan = field(repr=False)
    read: CorpusReport
    findings: Sequence[Finding] = field(repr=False)
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, as in ``verdict.json``."""
        return {
            "verdict": self.verdict,
            "languages": self.languages,
            "retention": self.retention,
            "abilities": self.run.abilities,
            "curve": None if self.run.curve is None else self.run.curve.to_dict(),
            "plan": asdict(self.plan),
            "read": self.read.to_dict(),
            "findings": [finding.to_dict() for finding in self.findings],
            "seconds": self.seconds,
        }


class Adaptation:
    """Adapts an encoder to one or several languages.

    Example::

        from metaphrase.training.adaptation import Adaptation, AdaptationConfig

        result = Adaptation(AdaptationConfig(corpus=["my.tsv"], languages=["sw"])).execute()
        print(" ".join(result.verdict))

    Args:
        config: The configuration.
        command: The command line, for card and report.
        show_progress: Show progress bars.

    Attributes:
        output: The output folder.
        read: Report of the corpus, once it is checked.
        findings: Results of the checks.
        run: The training run, once it has begun.

    Raises:
        UsageError: A number is out of range, or is to be chosen without data; there are several processes; the recipe learns
            a vector for each language, or reads more than a bitext; the output folder is that of the encoder, or holds files
            that this library did not write; or the corpus or the recipe is in the folder of the run's own data.
    """

    def __init__(
        self, config: AdaptationConfig, *, command: Sequence[str] | None = None, show_progress: bool = True
    ) -> None:
        self.config = config
        self.command = command
        self.show_progress = show_progress
        self.started = time.time()
        languages = split_languages(config.languages, keep_scripts=True)
        if not languages:
            raise UsageError("--languages names no language. Name those to adapt to, e.g. sw.")
        self.output = Path(config.output_dir or f"runs/adapt-{'-'.join(languages)}")
        self.data = self.output / "data"
        self.languages = languages
        self.sets: dict[str, ParallelSet] = {}
        self.read = CorpusReport()
        self.findings: list[Finding] = []
        self.run: TrainingRun | None = None
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UsageError("An adaptation runs in one process. For several, use `metaphrase train`.")
        check_guard_folders(config.guard)
        check_directions(config.debias, config.guard, config.corpus)  # the dev pairs are part of the corpus
        check_folder(self.output, model=model_folder(config.model))
        recipe = Recipe.load(config.recipe)
        check_files([self.output / RECIPE, self.data / RECIPE], [config.recipe])
        if recipe.language_embedding:
            raise UsageError(
                f"Recipe {config.recipe} learns an input vector for each language, so its encoder is neither merged nor "
                "compared on other languages. Train it with `metaphrase train`."
            )
        if others := sorted(recipe.columns - {"alignment"}):
            raise UsageError(
                f"Recipe {config.recipe} reads {', '.join(others)}, which an adaptation does not provide. Train it with "
                "`metaphrase train`."
            )
        inside = [item for item in config.corpus if Path(item).resolve().is_relative_to(self.data.resolve())]
        if inside:
            raise UsageError(
                f"{inside[0]} is in the folder of the run's own data. Copy it elsewhere, or choose another --output_dir."
            )

    def check(self) -> list[Finding]:
        """Read the corpus and check it.

        Raises:
            CorpusError: The corpus cannot be read.
        """
        self.sets, self.read = read_corpus(
            self.config.corpus,
            languages=self.languages,
            source_column=self.config.source_column,
            target_column=self.config.target_column,
        )
        self.findings = check_corpus(self.sets, seed=self.config.seed)
        return self.findings

    def execute(self) -> AdaptationResult:
        """Check the corpus, if :meth:`check` has not yet been called; split, plan, train and measure.

        A run that was interrupted resumes from its last checkpoint, with its plan.

        Raises:
            CorpusError: The checks found errors, or there are too few pairs.
            CheckpointError: Another process uses the output folder, or it holds checkpoints of another run.
        """
        check_devices(AlignmentTrainingArguments(str(self.output)))
        splits, replayed = self._split()
        with claimed(self.output):
            return self._train(splits, replayed)

    def plan(self) -> Plan:
        """Check the corpus and plan the run, with its estimated duration. Nothing is written.

        Raises:
            CorpusError: The checks found errors, or there are too few pairs.
        """
        splits, replayed = self._split()
        with tempfile.TemporaryDirectory() as folder:
            return self._plan(splits, replayed, *self._load(Path(folder) / "data", splits, replayed))

    def _split(self) -> tuple[Splits, Replayed]:
        """The pairs for training and measuring, and the pairs of other languages."""
        if not self.sets:
            self.check()
        wrong = errors(self.findings)
        has_copies = any(map(is_copied, self.sets.values()))  # `load_corpus` refuses them too
        if wrong and (has_copies or not self.config.force):
            raise CorpusError(
                f"{' '.join(finding.message for finding in wrong)} Nothing was trained. Fix the corpus"
                f"{'' if has_copies else ', or pass --force'}."
            )
        splits = split_all(self.sets, seed=self.config.seed)
        packaged = load_parallel_folder(PACKAGED_DATA / "demo", split="train") if self.config.replay else {}
        replayed = replay(
            {language: pairs for language, pairs in packaged.items() if language not in self.sets},
            int(self.config.replay * sum(len(one.train) for one in splits.values())),
            held=held_out(splits.values()),
            seed=self.config.seed,
        )
        return splits, replayed

    def _load(self, data: Path, splits: Splits, replayed: Replayed) -> tuple[Path, Inputs]:
        """Write recipe and pairs to a folder, and load the encoder. Returns the recipe's path and the inputs of a run.

        Word links are added to the pairs if the recipe reads them; they are stored beside the folder.
        """
        retained = retention_sets(self.config.retention_languages, self.languages, replayed)
        encoder = load_encoder(self.config.model, default_pooling=Recipe.load(self.config.recipe).pooling)
        check_finish(encoder, self._release)  # before the data of an earlier run are replaced
        folders = write_data(data, splits, replayed)
        path = write_json(data / RECIPE, recipe_content(self.config))  # JSON is YAML, and writes floats exactly
        recipe, corpus = Recipe.load(path), load_corpus(folders["training"])
        if "alignment" in recipe.columns:
            with restored(encoder):  # a recipe that does not fit the encoder is refused before words are aligned
                build_loss(encoder, recipe, corpus)
            corpus = replace(corpus, dataset=with_links(corpus.dataset, recipe, data.parent))
        inputs = Inputs(
            encoder=encoder,
            corpus=corpus,
            dev=load_parallel_folder(folders["dev"], languages=list(splits), split="dev"),
            tests={
                HELD_OUT: load_parallel_folder(folders[HELD_OUT], languages=list(splits), split="test"),
                RETENTION: retained,
            },
        )
        return path, inputs

    @property
    def _release(self) -> RunConfig:
        """The options of the steps between training and release."""
        return RunConfig(model=self.config.model, **{name: getattr(self.config, name) for name in _FINISHING})

    def _plan(self, splits: Splits, replayed: Replayed, recipe: Path, inputs: Inputs) -> Plan:
        """Plan the run and log the plan."""
        assert inputs.encoder is not None
        assert inputs.corpus is not None
        release = self._release
        dev, tests = inputs.dev or {}, inputs.tests or {}
        if release.debias:  # its directions are estimated on the other articles
            tests = {name: articles_of(sets, "even") for name, sets in tests.items()}
        plan = plan_run(
            inputs.encoder,
            Recipe.load(recipe),
            inputs.corpus,
            minutes=self.config.minutes,
            seed=self.config.seed,
            dev=dev,
            tests=tests,
            further=encoded_texts(release, dev, prompts=count_prompts(inputs.encoder), evaluations=EVALUATIONS),
        )
        log_plan(splits, replayed, plan)
        return plan

    def _train(self, splits: Splits, replayed: Replayed) -> AdaptationResult:
        """Train and measure in a folder that no other process writes to."""
        parts, files = sorted(splits.items()), encoder_files(self.config.model)
        asked = {
            "model": repository_of(self.config.model),
            "weights": files_sha256(files) if files else None,  # a local folder may hold another model now
            "languages": sorted(splits),
            "recipe": recipe_content(self.config),
            "minutes": self.config.minutes,
            "replay": self.config.replay,
            "seed": self.config.seed,
            "pairs": json_digest(
                [[(name, one.train, one.dev, one.test) for name, one in parts], sorted(replayed.items())]
            ),
            HELD_OUT: json_digest([(name, one.test) for name, one in parts]),
        }
        plan = plan_of_checkpoints(self.output, asked)
        recipe, inputs = self._load(self.data, splits, replayed)
        if plan is None:
            plan = self._plan(splits, replayed, recipe, inputs)
            write_part(self.output / PLAN, {"asked": asked, "plan": asdict(plan)})
        else:
            log_plan(splits, replayed, plan)
        self.run = self._run(recipe, plan, inputs, replayed=replayed)
        result = self.run.execute()
        assert result is not None  # of the only process
        return self._judge(result, plan)

    def _run(self, recipe: Path, plan: Plan, inputs: Inputs, *, replayed: Iterable[str]) -> TrainingRun:
        """The training run."""
        config = RunConfig(
            model=self.config.model,
            recipe=str(recipe),
            corpus=[str(self.data / "training")],
            dev=[str(self.data / "dev")],
            test=[str(self.data / HELD_OUT), str(PACKAGED_DATA / RETENTION)],
            languages=list({*self.sets, *(_IN_DECLARATION.get(one, one) for one in self.languages), *replayed}),
            output_dir=str(self.output),
            data_license=self.config.data_license,
            **{name: getattr(self.config, name) for name in _FINISHING},
            seed=self.config.seed,
            max_steps=plan.max_steps,
            per_device_train_batch_size=plan.batch_size,
            micro_batch_size=plan.micro_batch_size,
            freeze_word_embeddings=plan.freeze_word_embeddings,
            bf16=plan.bf16,
            learning_rate=plan.learning_rate,
            head_learning_rate=5e-4,
            warmup_steps=0.1,
            batch_sampler="no_duplicates",
            eval_strategy="steps",
            eval_steps=plan.eval_steps,
            save_steps=plan.eval_steps,
            load_best_model_at_end=True,
            metric_for_best_model="eval_dev_mean_accuracy",
            greater_is_better=True,
            save_total_limit=2,  # the best and the last one, from which a repeated command goes on without training
            logging_steps=5,
            resume_from_checkpoint="true",
            disable_tqdm=not self.show_progress,
        )
        return TrainingRun(
            config,
            inputs=inputs,
            callbacks=[EarlyStoppingCallback(early_stopping_patience=PATIENCE)],
            command=self.command or self._command(),
            title=f"{self.config.model} adapted to {', '.join(map(language_name, self.sets))}",
            origins={file_name(language, "train"): PACKAGED for language in replayed},
        )

    def _command(self) -> list[str]:
        """The ``metaphrase adapt`` command with these settings."""
        plain = AdaptationConfig(corpus=[], languages=[])
        return ["metaphrase", "adapt", *flags_of(self.config, plain)]

    def _judge(self, result: RunResult, plan: Plan) -> AdaptationResult:
        """The verdict on the user's languages and on those that were not trained on; it is written to ``verdict.json``."""
        own, retained = result.comparisons[HELD_OUT]["languages"], result.retention.get(RETENTION)
        names = {language: language_name(language) for language in own}
        if collapsed := collapse_in_words(result.before, result.after):  # nothing else means anything
            sentences = [collapsed, *verdict_in_words(own, None, names)]
        else:
            sentences = verdict_in_words(own, retained, names, result.abilities, result.curve)
            sentences += [*filter(None, [result.facts.get("debias", {}).get("chosen")]), result.verdict]
        sentences[-1:-1] = [
            f"{one['shared']:,} of {counted(one['pairs'], 'pair')} of {one['data']} share a sentence with the training "
            "data, so their scores are too high."
            for one in result.facts.get("leakage") or ()
            if one["shared"] > LEAKAGE * one["pairs"]
        ]
        verdict = AdaptationResult(
            run=result,
            verdict=sentences,
            languages=own,
            retention=retained,
            plan=plan,
            read=self.read,
            findings=self.findings,
            seconds=round(time.time() - self.started, 1),
        )
        write_json(self.output / VERDICT, verdict.to_dict())
        return verdict


def retention_sets(
    chosen: Sequence[str], own: Collection[str], replayed: Collection[str] = ()
) -> dict[str, ParallelSet]:
    """The Universal Declaration of Human Rights in the chosen languages (none: the demo's sample) and in the user's own.

    Raises:
        UsageError: A chosen language is missing, or the chosen ones are all trained on.
    """
    own = {_IN_DECLARATION.get(language, language) for language in own}
    packaged = {
        language: one
        for language, one in load_parallel_folder(PACKAGED_DATA / RETENTION).items()
        if language in own or bare_language(language) not in map(bare_language, own)  # their other scripts
    }
    named = [name if name in ("all", *packaged) else standard_code(name) or name for name in split_list(chosen)]
    if "all" in named:
        return packaged
    if missing := sorted(set(named) - set(packaged)):
        raise UsageError(
            f"--retention_languages: the Declaration of Human Rights has no {', '.join(missing)}. It has: "
            f"{', '.join(packaged)}; 'all' measures these."
        )
    if named and not set(named).difference(own, replayed):
        raise UsageError(
            f"--retention_languages names only languages that are trained on ({', '.join(named)}). Name others, or 'all', or "
            "omit the option."
        )
    kept = {*(named or demo_settings()["retention_languages"]), *own}
    return {language: one for language, one in packaged.items() if language in kept}


def recipe_content(config: AdaptationConfig) -> dict[str, Any]:
    """The recipe of a run, with the chosen anchor and without the training settings that the plan chooses.

    Unless the recipe sets it, the vocabulary of an objective that predicts English is that of the corpus, which saves
    memory.
    """
    content = Recipe.load(config.recipe).to_dict()
    training = {name: value for name, value in content.get("training", {}).items() if name not in _PLANNED}
    content |= {"max_length": training.pop("max_length", None) or content["max_length"], "training": training}
    for term in content["terms"]:
        args = term.get("args", {})
        if term["objective"] == "rtl" and args.get("direction", "source_to_target") == "source_to_target":
            term["args"] = {"vocabulary": "english", **args}
    if config.anchor is not None:
        anchors = [term for term in content["terms"] if term["objective"] == "anchor"]
        content["terms"] = [term for term in content["terms"] if term not in anchors]
        if config.anchor:
            content["terms"].append({**(anchors or [{"objective": "anchor"}])[0], "weight": config.anchor})
    return content


def plan_of_checkpoints(output: Path, asked: Mapping[str, Any]) -> Plan | None:
    """The plan of the run whose checkpoints a folder contains, to keep its schedule; None without checkpoints.

    Raises:
        CheckpointError: The folder holds a release or checkpoints of a run with other held-out pairs or options. The new
            held-out pairs may be among those that the release was trained on.
    """
    hint = "To start over, choose another --output_dir or delete that folder."
    left = read_part(output / PLAN)
    now = as_json(asked)
    if not (present := checkpoint_folders(output, staged=True)):
        if left is not None and (output / VERDICT).exists() and left["asked"].get(HELD_OUT) != now[HELD_OUT]:
            raise CheckpointError(
                f"{output} holds the release of a run on other pairs, which would be replaced. {hint}"
            )
        return None
    if left is None:
        raise CheckpointError(
            f"{output} holds {present[-1].name}, but {PLAN}, which describes its run, is missing or was damaged. {hint}"
        )
    options, old_options = ({name: one[name] for name in one if name not in _DIGESTS} for one in (now, left["asked"]))
    if changed := differences(old_options, options) or differences(left["asked"], now):
        raise CheckpointError(
            f"{output} holds {present[-1].name} of a run that differs in: {', '.join(changed)}. To resume it, use the "
            f"original options. {hint}"
        )
    return Plan(**left["plan"])


def write_data(folder: Path, splits: Splits, replayed: Replayed) -> dict[str, Path]:
    """Write the training and held-out pairs, so that a run can be reproduced and compared with others.

    Data of an earlier run are deleted.
    """
    folders = {name: folder / name for name in ("training", "dev", HELD_OUT)}
    for part in folders.values():
        shutil.rmtree(part, ignore_errors=True)
    for language, one in splits.items():
        write_split(folders["training"], language, "train", one.train)
        write_split(folders["dev"], language, "dev", one.dev)
        write_split(folders[HELD_OUT], language, "test", one.test)
    for language, pairs in replayed.items():
        write_split(folders["training"], language, "train", pairs)
    return folders


def log_plan(splits: Splits, replayed: Replayed, plan: Plan) -> None:
    """Log the plan of a run."""
    for language, one in splits.items():
        logger.info(
            "%s: %s pairs for training, %d for early stopping, %d for evaluation; %s excluded (repeated, or too similar to a "
            "held-out pair).",
            language_name(language),
            f"{len(one.train):,}",
            len(one.dev),
            len(one.test),
            f"{one.excluded:,}",
        )
    if replayed:
        logger.info("Other languages in the training data: %s.", ", ".join(sorted(replayed)))
    for reason in plan.reasons:
        logger.info("- %s", reason)
