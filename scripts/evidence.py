"""Measure what each objective gains and costs, on one encoder and bitext, with the same steps and seeds.

    python scripts/evidence.py --data benchmarks --plan      # print stored and missing results, and the estimated time
    python scripts/evidence.py --data benchmarks             # train and measure what is missing, then write the page
    python scripts/evidence.py --time                        # measure the time of a step, on an otherwise idle machine
    python scripts/evidence.py --write                       # only write docs/evidence.md and the model cards
    python scripts/evidence.py --config configs/finalists.yaml --data benchmarks    # other recipes, for another page

``configs/evidence.yaml``, or another file with ``--config``, lists the recipes and names the page. A cell is a recipe with a
seed. Its stages are the training, the choice of the weight alpha on development data under guards, and each benchmark, for
the encoder as trained, merged with the starter by alpha, and, if the recipe has one, in the form of its release. The starter
is measured with and without its prompt. With ``--debias``, alpha is chosen without some directions of language identity, in
steps of 0.1 and with a guard on answers, and merged encoders are measured without these directions; encoders as trained are
measured only with ``--variants raw``.

The result of each stage is a JSON file under ``scripts/results/evidence``, or a folder named after another configuration; a
stage is skipped if the file exists with the same settings. A killed program loses at most one stage, whose embeddings are
kept. The change of the weights in training is stored as a task vector in ``--work_dir``. Programs with the same folders share
the work: each skips cells that another one computes.
"""

from __future__ import annotations

import logging
import shutil
import sys
import time
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from ablations import trained, varied
from evidence_cards import SETTING, write_cards
from evidence_table import CONFIG, VARIANTS, stored_scores, write_page
from evidence_time import plan, time_steps
from sentence_transformers import SentenceTransformer
from stored_results import reports_errors
from transformers import HfArgumentParser

from metaphrase.corpus.files import find_files
from metaphrase.corpus.parallel import load_parallel_folder
from metaphrase.encoders.adapters import shared_copy
from metaphrase.encoders.debiasing import language_directions, without_directions
from metaphrase.encoders.loading import load_encoder
from metaphrase.encoders.names import STARTER
from metaphrase.encoders.prompts import search_prompts
from metaphrase.evaluation.guard_data import LabelledData, spread
from metaphrase.evaluation.guards import ALPHAS as FINE_ALPHAS
from metaphrase.evaluation.guards import Guard, choose_alpha, data_guard
from metaphrase.evaluation.retrieval import evaluate_retrieval
from metaphrase.evaluation.sib200 import ENGLISH, XLMR_LANGUAGES, topic_files
from metaphrase.evaluation.suites import Benchmark, Sample, Settings, Subject
from metaphrase.evaluation.suites.benchmarks import REVISION
from metaphrase.evaluation.suites.running import find_benchmarks, run_benchmark
from metaphrase.exceptions import CheckpointError, MissingFileError, UsageError
from metaphrase.io.configuration import option
from metaphrase.io.digests import file_sha256, files_sha256, json_digest, model_hash
from metaphrase.io.environment import hardware, has_bfloat16_instructions, prepare_process, versions
from metaphrase.io.files import DEMO, as_json
from metaphrase.io.locks import exclusive
from metaphrase.io.work_folders import read_part, write_part
from metaphrase.merging import TaskVector
from metaphrase.modeling.precision import bfloat16
from metaphrase.postprocessing.debiasing import SAMPLED_TEXTS, debias, embed_languages, parallel_texts
from metaphrase.training.configuration import RunConfig
from metaphrase.training.demo import demo_settings
from metaphrase.training.finishing import release_guards
from metaphrase.training.recipe import Recipe
from metaphrase.training.run import Inputs

ROOT = Path(__file__).parents[1]

#: Length to which every recipe truncates sentences, in pieces.
LENGTH = 32
#: Weights that alpha is chosen from.
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
#: Data sets whose development parts must not get worse when alpha is chosen, in addition to similarity structure.
GUARDS = ("stsb",)
#: The same with ``--debias``, because removing directions costs answers within a language.
DEBIASED_GUARDS = ("stsb", "mlqa")
#: Languages of SIB-200 that are measured in addition to those of the bitext, evenly spaced over all.
OTHER_LANGUAGES = 40
#: Samples of suites and benchmarks. Word alignment has fewer pairs: with a sample, it does not tune its settings.
SAMPLES = {
    "answer-retrieval": Sample(300, 0.25),
    "sts": Sample(500, 0.36),
    "sib200": Sample(100, 0.25),
    "sib200 xsim++": Sample(100, 0.05),
    "word-alignment": Sample(1000, 0.2),
}
#: Names of the benchmarks by suite, in the order in which they are measured, the cheap ones first. The suites of the last
#: group are measured for packaged recipes only.
TIERS: tuple[dict[str, tuple[str, ...]], ...] = (
    {
        "retrieval": ("demo",),
        "word-alignment": ("alignment-gold enfr", "alignment-gold roen", "wpt05-en-hi"),
        "sts": ("stsb",),
        "answer-retrieval": ("xquad-r",),
        "sib200": ("sib200",),
        "xsim++": ("sib200 xsim++",),
    },
    {"retrieval": ("tatoeba",)},
    {"mining": ("bucc2018-sample sample_oracle",)},
    {"paraphrase": ("pawsx probe",), "pos": ("ud probe",), "nli": ("xnli probe", "xnli"), "qa": ("xquad",)},
)
#: All suites, in the order in which they are measured.
ALL_SUITES = list(dict.fromkeys(chain.from_iterable(TIERS)))
#: Benchmarks that load an encoder from a folder and train all of it.
FINE_TUNED = ("xnli", "xquad")
#: Prompts with which the starter is measured, by the name of the folder: its stored prompt, and none.
PROMPTS = {"prompt": "auto", "plain": None}


@dataclass
class Options:
    """The program's options, and the recipes of its configuration."""

    data: str = option("benchmarks", "Folder of the benchmarks, as for `metaphrase evaluate`.")
    config: Path = option(CONFIG, "Recipes and their page (default: configs/evidence.yaml).")
    only: list[str] = option([], "Recipes of the configuration (default: all).", metavar="RECIPE")
    seeds: list[int] = option([0, 1, 2])
    suites: list[str] = option(ALL_SUITES, "Suites to measure (default: all).", choices=ALL_SUITES)
    variants: list[str] = option(list(VARIANTS), "Default: all.", choices=list(VARIANTS))
    debias: int = option(
        0,
        "Remove N directions of language identity before alpha is chosen, and measure only merged encoders (default: 0); the "
        "results are a setting of their own.",
        metavar="N",
    )
    steps: int = option(100)
    batch_size: int = option(64)
    model: str = option(STARTER, "Encoder to train: 'starter', a folder or a Hub id.")
    reinitialise: int = option(0, "Reinitialise its top N layers first.", metavar="N")
    bf16: bool = option(
        False, "Train, and embed sentences, in bfloat16 (default: float32); the results are a setting of their own."
    )
    corpus: str = option(str(DEMO), "Bitext with train and dev sets (default: the demo's).")
    results: Path | None = option(
        None, "Folder of the results, with a subfolder for each setting (default: scripts/results/CONFIG)."
    )
    work_dir: str = option("runs/evidence", "Folder of task vectors, embeddings and whole results.")
    page: Path | None = option(None, "Page with markers to write (default: that of --config, without --results only).")
    device: Literal["cpu", "cuda"] | None = option(None, "Device (default: a GPU if available).")
    plan: bool = option(False, "Only print stored and missing results, and the estimated time.")
    time: bool = option(False, "Only measure the time of a step of each recipe.")
    write: bool = option(False, "Only write the page and the model cards.")
    recipes: dict[str, Any] = field(init=False)
    transfer: str = field(init=False)


@dataclass(frozen=True)
class Cell:
    """A recipe with a seed, the folder of its results, and the encoders that are measured.

    A ``packaged`` recipe is measured on all benchmarks. ``release`` has its ``merge`` and ``debias``, if it is released. With
    a ``merge`` of 0, nothing is trained, and only the release is measured.
    """

    name: str
    recipe: Recipe
    seed: int
    folder: Path
    packaged: bool
    release: Mapping[str, Any] | None
    variants: tuple[str, ...]

    @property
    def untrained(self) -> bool:
        """Whether the release does not depend on training."""
        return self.release is not None and self.release["merge"] == 0

    def has_variant(self, variant: str) -> bool:
        """Whether the recipe has such an encoder."""
        return self.release is not None if variant == "released" else not self.untrained

    def __str__(self) -> str:
        return f"{self.name}, seed {self.seed}"


def load_cells(options: Options, folder: Path) -> list[Cell]:
    """The chosen cells, seed by seed.

    Raises:
        UsageError: A recipe is unknown.
    """
    entries = options.recipes
    if unknown := sorted(set(options.only) - entries.keys()):
        raise UsageError(f"Unknown recipe {unknown[0]!r}. The recipes are {', '.join(entries)}.")
    cells = []
    for seed in options.seeds:
        for name, entry in entries.items():
            if options.only and name not in options.only:
                continue
            cell = Cell(
                name=name,
                recipe=varied(Recipe.load(entry["recipe"]), [entry.get("terms", {})], {}, name=name),
                seed=seed,
                folder=folder / name / f"seed{seed}",
                packaged=entry.get("packaged", False),
                release=entry.get("release"),
                variants=(),
            )
            if cell.untrained and seed != options.seeds[0]:
                continue  # all seeds would have the same results
            cells.append(replace(cell, variants=tuple(filter(cell.has_variant, options.variants))))
    return cells


def setting_name(options: Options) -> str:
    """Name of the folder of results with these options."""
    name = Path(options.model).name
    if options.reinitialise:
        name += f"-top{options.reinitialise}"
    name += f"-{options.steps}x{options.batch_size}"
    if options.bf16:
        name += "-bf16"
    if options.debias:
        name += f"-debias{options.debias}"
    return name


class Evidence:
    """The cells of a setting, and their stages."""

    def __init__(self, options: Options) -> None:
        if options.bf16 and options.device != "cuda" and not has_bfloat16_instructions():
            raise UsageError("--bf16 needs a CPU with instructions for bfloat16, or --device cuda.")
        self.options = options
        self.name = setting_name(options)
        self.folder = options.results / self.name
        self.work = Path(options.work_dir)
        self.cells = load_cells(options, self.folder)
        self.alphas = FINE_ALPHAS if options.debias else ALPHAS
        # For the settings of results: the directions that are removed from merged encoders, and another precision.
        self.directions = {"directions": options.debias} if options.debias else {}
        self.precision = {"bf16": True} if options.bf16 else {}
        self.failed: list[str] = []

    # ------------------------------------------------------------------------------------------- what all cells share

    @cached_property
    def start(self) -> SentenceTransformer:
        """The encoder before training."""
        return self.load()

    def load(self) -> SentenceTransformer:
        """Load the encoder before training."""
        model = load_encoder(self.options.model, device=self.options.device)
        reinitialise(model, self.options.reinitialise)
        return model

    @cached_property
    def start_digest(self) -> str:
        """Digest of the encoder before training."""
        return model_hash(self.start)

    @cached_property
    def languages(self) -> list[str]:
        """The languages of the bitext."""
        return sorted({str(file.language) for file in find_files(self.options.corpus)})

    @cached_property
    def corpus_digest(self) -> str:
        """Digest of the bitext."""
        return files_sha256(path for file in find_files(self.options.corpus) for path in file.paths)

    @cached_property
    def settings(self) -> Settings:
        """How benchmarks are measured."""
        return Settings(
            trained_languages=self.languages,
            answer_text="sentence",
            bf16=self.options.bf16,
            transfer=self.options.transfer,
        )

    @cached_property
    def tiers(self) -> list[list[Benchmark]]:
        """The benchmarks that the data folder has, by tier."""
        data = Path(self.options.data)
        if not data.is_dir():
            raise MissingFileError(f"{data} is not a folder. Name a folder of benchmarks with --data.")
        samples = dict(SAMPLES)
        if (data / "sib200").is_dir():
            codes = sib200_languages(data / "sib200", self.languages)
            samples |= {name: samples[name]._replace(languages=codes) for name in ("sib200", "sib200 xsim++")}
        suites = [suite for suite in ALL_SUITES if suite in self.options.suites]
        benchmarks = {
            benchmark.name: benchmark for benchmark in find_benchmarks(data, suites, self.settings, samples)[0]
        }
        names = [[name for suite in tier if suite in suites for name in tier[suite]] for tier in TIERS]
        tiers = [[benchmarks[name] for name in names_of_tier if name in benchmarks] for names_of_tier in names]
        if not any(tiers):
            message = f"{data} has none of {', '.join(chain.from_iterable(names))}."
            if benchmarks:
                message += f" It has {', '.join(benchmarks)}, which this program does not measure."
            raise UsageError(message)
        return tiers

    @property
    def benchmarks(self) -> list[Benchmark]:
        """The benchmarks of all tiers."""
        return list(chain.from_iterable(self.tiers))

    @cached_property
    def data_digests(self) -> dict[str, str]:
        """Digest of the files of each benchmark."""
        return {benchmark.name: files_sha256(benchmark.files) for benchmark in self.benchmarks}

    @cached_property
    def guards(self) -> tuple[Guard, list[Guard]]:
        """The gain, on the development pairs of the bitext, and the guards, which must not get worse."""
        pairs = load_parallel_folder(Path(self.options.corpus), split="dev")
        data = LabelledData("dev", pairs, evaluate_retrieval)
        gain = data_guard(self.start, data, prompt="auto", prompts=[None])
        folders = [str(path) for path in self.guard_folders]
        return gain, release_guards(self.start, RunConfig(guard=folders), "dev")

    @property
    def guard_folders(self) -> list[Path]:
        """Folders of the guards that the data folder has."""
        names = DEBIASED_GUARDS if self.options.debias else GUARDS
        folders = [Path(self.options.data) / name for name in names]
        return [folder for folder in folders if folder.is_dir()]

    @cached_property
    def guard_digests(self) -> dict[str, str]:
        """Digest of the development data of each guard."""
        return {path.name: files_sha256(path.glob("*dev*")) for path in self.guard_folders}

    # ------------------------------------------------------------------------------------------------------- the stages

    def training_settings(self, cell: Cell) -> dict[str, Any]:
        """The settings that determine the weights of a cell."""
        recipe = cell.recipe.to_dict()
        training = {key: value for key, value in recipe["training"].items() if key != "per_device_train_batch_size"}
        return {
            "model": self.start_digest,
            "corpus": self.corpus_digest,
            "terms": recipe["terms"],
            "training": training,
            "steps": self.options.steps,
            "batch_size": self.options.batch_size,
            "max_length": LENGTH,
            "seed": cell.seed,
            **self.precision,
        }

    def alpha_settings(self, vector: str | None) -> dict[str, Any]:
        """The settings that determine the choice of alpha."""
        settings = {
            "vector": vector,
            "alphas": self.alphas,
            "guards": self.guard_digests,
            "corpus": self.corpus_digest,
        }
        return settings | self.directions | self.precision if self.options.debias else settings

    def encoder_settings(self, cell: Cell, variant: str, vector: str | None, alpha: float | None) -> dict[str, Any]:
        """The settings that determine an encoder of a cell, given the digest of its task vector and the chosen alpha."""
        settings: dict[str, Any] = {"vector": vector, "variant": variant}
        if variant == "raw":
            return settings | {"alpha": 1.0}
        if variant == "released" and cell.release is not None:
            return settings | {"alpha": cell.release["merge"], "directions": cell.release["debias"]}
        return settings | {"alpha": alpha} | self.directions

    def measured_settings(self, benchmark: Benchmark, **encoder: Any) -> dict[str, Any]:
        """The settings that determine the results of a benchmark."""
        return {
            "benchmark": benchmark.protocol,
            "data": self.data_digests[benchmark.name],
            "revision": REVISION,
            "model": self.start_digest,
            **encoder,
            **self.precision,
        }

    def vector_path(self, cell: Cell) -> Path:
        """File of the task vector, named after the settings that determine it."""
        digest = json_digest(self.training_settings(cell))[:12]
        return self.work / "vectors" / f"{cell.name}-seed{cell.seed}-{digest}.safetensors"

    def has_vector(self, cell: Cell) -> bool:
        """Whether the task vector is that of the stored training; another folder of results may have trained it again."""
        if cell.untrained:
            return True
        path, facts = self.vector_path(cell), read_part(cell.folder / "train.json")
        return path.is_file() and facts is not None and file_sha256(path) == facts["vector"]

    def missing(self, cell: Cell, tier: Sequence[Benchmark]) -> list[tuple[str, Benchmark | None]]:
        """The stages of a cell without stored results: ``train``, ``alpha``, and a variant with each of its benchmarks."""
        training = stored_result(cell.folder / "train.json", self.training_settings(cell))
        vector = training["vector"] if training else None
        choice = stored_result(cell.folder / "alpha.json", self.alpha_settings(vector))
        alpha = choice["alpha"] if choice else None
        stages: list[tuple[str, Benchmark | None]] = []
        if training is None:
            stages.append(("train", None))
        if choice is None and "merged" in cell.variants:
            stages.append(("alpha", None))
        for variant in cell.variants:
            if variant == "merged" and alpha == 0:
                continue  # the starter
            encoder = self.encoder_settings(cell, variant, vector, alpha)
            for benchmark in tier:
                path, settings = result_path(cell, variant, benchmark), self.measured_settings(benchmark, **encoder)
                if stored_result(path, settings) is None:
                    stages.append((variant, benchmark))
        return stages

    def train(self, cell: Cell) -> None:
        """Train a cell, and store its task vector and the facts of the run."""
        if cell.untrained:
            self.store_no_training(cell)
            return
        started = time.perf_counter()
        path = self.vector_path(cell)
        work = self.work / "training" / path.stem
        # Interrupted training starts over: it is short, and its forward passes are counted from the first step.
        shutil.rmtree(work, ignore_errors=True)
        model = self.load()
        with counted_passes(model) as passes:
            config = self.run_config(cell, work)
            encoder, _, facts = trained(config, work / "run", self.work / "links", Inputs(encoder=model))
        TaskVector.between(self.start, encoder).save(path)
        shutil.rmtree(work)
        steps = facts["steps"]
        losses = [row["loss"] for row in facts["log_history"] if "loss" in row]
        content = {key: facts[key] for key in ("steps", "batch_size", "training_seconds", "hardware", "versions")}
        content |= {
            "settings": self.training_settings(cell),
            "vector": file_sha256(path),
            "encoder_calls": passes["calls"] / steps,
            "tokens": passes["tokens"] / steps,
            "loss": losses[-1] if losses else None,
            "languages": facts["languages"],
            "seconds": round(time.perf_counter() - started, 1),
        }
        write_part(cell.folder / "train.json", content)

    def store_no_training(self, cell: Cell) -> None:
        """Store the facts of a cell whose release does not depend on training."""
        facts = {
            "steps": 0,
            "batch_size": self.options.batch_size,
            "encoder_calls": 0,
            "tokens": 0,
            "vector": None,
            "seconds": 0.0,
            "settings": self.training_settings(cell),
            "hardware": hardware(),
            "versions": versions(),
        }
        write_part(cell.folder / "train.json", facts)

    def run_config(self, cell: Cell, work: Path) -> RunConfig:
        """The configuration of a cell: the demo's, with the cell's recipe."""
        work.mkdir(parents=True, exist_ok=True)
        recipe = work / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(cell.recipe.to_dict(), sort_keys=False), encoding="utf-8")
        omitted = ("merge", "debias", "languages", "retention_languages")
        settings = {name: value for name, value in demo_settings().items() if name not in omitted}
        settings |= {
            "model": self.options.model,
            "recipe": str(recipe),
            "corpus": [self.options.corpus],
            "test": [],
            "output_dir": str(work),
            "max_steps": self.options.steps,
            "per_device_train_batch_size": self.options.batch_size,
            "seed": cell.seed,
            "max_length": LENGTH,
            "bf16": self.options.bf16,
            "use_cpu": self.options.device == "cpu",
            "disable_tqdm": True,
            "report_to": "none",
        }
        return RunConfig(**settings)

    def choose(self, cell: Cell) -> None:
        """Choose the weight of the task vector on development data, and store it with its curve."""
        started = time.perf_counter()
        path = self.vector_path(cell)
        debiased = bool(self.options.debias)
        vector = TaskVector.load(path)
        with bfloat16(self.start, enabled=debiased and self.options.bf16):
            gain, guards = self.guards
            curve = choose_alpha(
                self.start, vector, gain, guards, alphas=self.alphas, finish=self.finished, complete=not debiased
            )
        content = {
            "settings": self.alpha_settings(file_sha256(path)),
            "alpha": curve.alpha,
            "curve": curve.to_dict(),
            "seconds": round(time.perf_counter() - started, 1),
            "hardware": hardware(),
            "versions": versions(),
        }
        write_part(cell.folder / "alpha.json", content)

    def finished(self, model: SentenceTransformer) -> SentenceTransformer:
        """A merged encoder as it is measured when alpha is chosen, its directions estimated on a sample of the texts."""
        if self.options.debias:
            embeddings = embed_languages(model, parallel_texts(most=SAMPLED_TEXTS))
            with bfloat16(model, enabled=False):
                model = without_directions(model, language_directions(embeddings, self.options.debias)[0])
        return self.with_prompts(model)

    def with_prompts(self, model: SentenceTransformer) -> SentenceTransformer:
        """A merged encoder with the prompts of a merged release."""
        model = shared_copy(model)
        model.prompts = search_prompts(self.start.prompts)
        return model

    def encoder(self, cell: Cell, settings: Mapping[str, Any]) -> SentenceTransformer:
        """An encoder of a cell. As trained, it has no prompts, like a release that is not merged."""
        if cell.untrained:
            model = shared_copy(self.start)
        else:
            model = TaskVector.load(self.vector_path(cell)).apply(self.start, settings["alpha"])
        if directions := settings.get("directions"):
            model, _ = debias(model, parallel_texts(), directions)
        if settings["variant"] == "raw":
            model.prompts = {}
            return model
        return self.with_prompts(model)

    def measure(
        self, path: Path, settings: Mapping[str, Any], benchmark: Benchmark, model: SentenceTransformer
    ) -> None:
        """Measure a benchmark and store its scores; embeddings and whole results are stored in the work folder."""
        with_prompt = replace(self.settings, prompt=settings.get("prompt", "auto"))
        subject = Subject(path.parent.name, model, self.work / "measured", with_prompt, batch_size=32)
        folder = self.work / "encoders" / subject.sha
        if benchmark.name in FINE_TUNED:
            model.save_pretrained(str(folder), create_model_card=False)
            subject = replace(subject, name=str(folder))
        result = run_benchmark(benchmark, subject)
        shutil.rmtree(folder, ignore_errors=True)
        facts = {key: result[key] for key in ("protocol", "model_hash", "seconds", "hardware", "versions", "data")}
        scores = stored_scores(result["scores"], self.languages)
        write_part(path, {"settings": settings, "benchmark": benchmark.name, **facts, "scores": scores})

    # ------------------------------------------------------------------------------------------------------ the program

    def run(self) -> None:
        """Train and measure what is missing."""
        for tier, cells in self.order():
            tasks = {STARTER: partial(self.run_start, tier)}
            tasks |= {str(cell): partial(self.run_cell, cell, tier) for cell in cells}
            for name, task in tasks.items():
                try:
                    with exclusive(self.work / "locks" / f"{self.name}, {name}"):
                        task()
                except CheckpointError as error:
                    print(f"Skipped: {name}, {error}", flush=True)

    def order(self) -> Iterator[tuple[list[Benchmark], list[Cell]]]:
        """Tiers of benchmarks with the cells that they are measured for: packaged recipes and cheap benchmarks first."""
        for seed in self.options.seeds:
            for packaged in (True, False):
                cells = [cell for cell in self.cells if (cell.seed, cell.packaged) == (seed, packaged)]
                yield from ((tier, cells) for tier in self.tiers[:-1])
        yield self.tiers[-1], [cell for cell in self.cells if cell.packaged]

    def missing_of_start(self, tier: Sequence[Benchmark]) -> Iterator[tuple[Path, dict[str, Any], Benchmark]]:
        """The benchmarks on which the encoder before training is not measured, with and without its prompt."""
        for name, prompt in PROMPTS.items():
            for benchmark in tier:
                path = self.folder / STARTER / name / file_name(benchmark)
                settings = self.measured_settings(benchmark, prompt=prompt)
                if stored_result(path, settings) is None:
                    yield path, settings, benchmark

    def shared_result(self, path: Path, settings: Mapping[str, Any]) -> Path | None:
        """File with the same results of the encoder before training in another setting or configuration, if there is one."""
        for folder in self.folder.parents[1].glob("*/*"):
            shared = folder / path.relative_to(self.folder)
            if stored_result(shared, settings):
                return shared
        return None

    def run_start(self, tier: Sequence[Benchmark]) -> None:
        """Measure the encoder before training, or copy its results."""
        for path, settings, benchmark in self.missing_of_start(tier):
            if shared := self.shared_result(path, settings):
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(shared, path)
            else:
                name = f"{STARTER}, {path.parent.name}: {benchmark.name}"
                self.attempt(name, self.measure, path, settings, benchmark, self.start)

    def run_cell(self, cell: Cell, tier: Sequence[Benchmark]) -> None:
        """Run the missing stages of a cell."""
        if not (missing := self.missing(cell, tier)):
            return
        if ("train", None) in missing or not self.has_vector(cell):
            if not self.attempt(f"{cell}: training", self.train, cell):
                return
            missing = self.missing(cell, tier)  # results of the previous weights do not count
        if ("alpha", None) in missing and self.attempt(f"{cell}: choice of alpha", self.choose, cell):
            missing = self.missing(cell, tier)
        for variant in cell.variants:
            if variant == "merged" and ("alpha", None) in missing:
                continue
            benchmarks = [benchmark for stage, benchmark in missing if stage == variant and benchmark]
            if benchmarks:
                self.measure_variant(cell, variant, benchmarks)

    def measure_variant(self, cell: Cell, variant: str, benchmarks: Sequence[Benchmark]) -> None:
        """Measure an encoder of a cell on some benchmarks."""
        training, choice = read_part(cell.folder / "train.json"), read_part(cell.folder / "alpha.json")
        vector, alpha = training and training["vector"], choice and choice["alpha"]
        encoder = self.encoder_settings(cell, variant, vector, alpha)
        model = self.encoder(cell, encoder)
        for benchmark in benchmarks:
            path, settings = result_path(cell, variant, benchmark), self.measured_settings(benchmark, **encoder)
            self.attempt(f"{cell}, {variant}: {benchmark.name}", self.measure, path, settings, benchmark, model)

    def attempt(self, name: str, stage: Callable[..., None], *arguments: Any) -> bool:
        """Run a stage, report it, and return whether it succeeded. This program does not repeat a failed stage."""
        if name in self.failed:
            return False
        started = time.perf_counter()
        print(f"{time.strftime('%H:%M:%S')} {name} …", flush=True)
        try:
            stage(*arguments)
        except Exception as error:
            if not isinstance(error, ValueError | OSError):
                logging.getLogger("metaphrase").exception("%s failed.", name)
            self.failed.append(name)
            print(f"Failed: {name}: {error}", flush=True)
            return False
        print(f"  {time.perf_counter() - started:.0f} seconds", flush=True)
        return True

    def check_results(self) -> None:
        """Refuse a folder with results of another encoder or bitext, which would be replaced or averaged with new ones."""
        digests = {"model": self.start_digest, "corpus": self.corpus_digest}
        for path in self.folder.glob("*/seed*/train.json"):
            training = read_part(path)
            if training is None:
                continue
            if differing := [name for name, digest in digests.items() if training["settings"][name] != digest]:
                raise UsageError(
                    f"{self.folder} has results with another {' and '.join(differing)}. Pass another folder with --results."
                )


def stored_result(path: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The content of a stage's file, if it exists and has these settings."""
    content = read_part(path)
    if content is None or content["settings"] != as_json(settings, default=str):
        return None
    return content


def file_name(benchmark: Benchmark) -> str:
    """Name of the file of a benchmark's results."""
    return f"{benchmark.name.replace(' ', '-')}.json"


def result_path(cell: Cell, variant: str, benchmark: Benchmark) -> Path:
    """File of the results of an encoder of a cell."""
    return cell.folder / variant / file_name(benchmark)


def sib200_languages(folder: Path, trained_on: Sequence[str]) -> tuple[str, ...]:
    """The languages of SIB-200 that are measured: those of the bitext, and others that are evenly spaced over all."""
    available = [code for code in topic_files(folder) if code != ENGLISH]
    trained_codes = {XLMR_LANGUAGES.get(language, language) for language in trained_on}
    return tuple(sorted(trained_codes.intersection(available).union(spread(available, OTHER_LANGUAGES))))


def reinitialise(model: SentenceTransformer, layers: int) -> None:
    """Reinitialise the top layers of an encoder, with the same weights in every call."""
    encoder: Any = model[0].auto_model
    generator = torch.Generator().manual_seed(0)
    top_layers = list(encoder.encoder.layer)[-layers:] if layers else []
    with torch.no_grad():
        for module in chain.from_iterable(layer.modules() for layer in top_layers):
            if isinstance(module, torch.nn.Linear):
                drawn = torch.randn(module.weight.shape, generator=generator)
                module.weight.copy_(encoder.config.initializer_range * drawn)
                module.bias.zero_()
            elif isinstance(module, torch.nn.LayerNorm):
                module.reset_parameters()


@contextmanager
def counted_passes(model: SentenceTransformer) -> Iterator[dict[str, int]]:
    """Count the forward passes and tokens of an encoder, and of copies that are made of it in this context."""
    counts = {"calls": 0, "tokens": 0}

    def count(module: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        states_blh = args[0] if args else options["hidden_states"]
        counts["calls"] += 1
        counts["tokens"] += states_blh.shape[0] * states_blh.shape[1]

    hook = model[0].auto_model.encoder.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield counts
    finally:
        hook.remove()


def parsed(argv: Sequence[str]) -> Options:
    """The program's options, with the recipes of the configuration and the defaults that depend on other options."""
    parser = HfArgumentParser(Options, description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    (options,) = parser.parse_args_into_dataclasses(argv)
    content = yaml.safe_load(options.config.read_text(encoding="utf-8"))
    options.recipes, options.transfer = content.get("recipes"), content.get("transfer", "auto")
    options.seeds = list(dict.fromkeys(options.seeds))
    if not options.recipes or not (options.page or options.results or "page" in content):
        parser.error(f"{options.config} needs `recipes`, and `page` unless --page or --results is given.")
    if options.debias:
        if options.variants == list(VARIANTS):
            options.variants = ["merged"]
        if "released" in options.variants:
            parser.error("--debias measures merged encoders, and with --variants raw, encoders as trained.")
    if options.results is None:  # the page of the documentation shows the results of the repository only
        options.page = options.page or ROOT / content["page"]
        options.results = ROOT / "scripts" / "results" / options.config.stem
    text = options.page.read_text(encoding="utf-8") if options.page and options.page.is_file() else ""
    if options.page and "<!-- evidence -->" not in text:
        parser.error(f"--page {options.page} is not a file with the lines <!-- evidence --> and <!-- /evidence -->.")
    return options


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Train and measure what is missing, and write the page and the model cards; 1 if a stage failed."""
    options = parsed(argv)
    failed: list[str] = []
    if not options.write:
        prepare_process()
        evidence = Evidence(options)
        evidence.check_results()
        if options.plan:
            print(plan(evidence))
            return 0
        if options.time:
            time_steps(evidence)
        else:
            evidence.run()
        failed = evidence.failed
    if options.page:
        write_page(options.results, options.page, options.config)
    if options.results == ROOT / "scripts" / "results" / CONFIG.stem:
        write_cards(options.results / SETTING)
    if failed:
        print(f"{len(failed)} stages failed: {'; '.join(failed)}. The same command repeats them.", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
