"""Search for a recipe that gains across languages without losses: train a grid, and measure gain and cost on dev data.

    python scripts/forgetting.py --stsb STSB_FOLDER --mlqa MLQA_FOLDER
    python scripts/forgetting.py --stsb STSB_FOLDER --mlqa MLQA_FOLDER --only tau=0.01 --keep
    python scripts/forgetting.py --stsb STSB_FOLDER --mlqa MLQA_FOLDER --corpus FOLDER --steps 750 --batch_size 512

Each recipe of the grid combines a temperature, the candidates that a translation is ranked against, and a term that keeps the
encoder close to the original one. It is trained on the demo's bitext, or on the training sets of another folder, and measured
without a prompt on dev data only: merged with the original encoder with the weight ``alpha``, and with some of the directions
of language identity projected out. ``scripts/dev_measures.py`` describes the measures.

With ``--transfer``, probes of frozen encoders for inference and parts of speech, and question answering by encoders that are
fine-tuned, show whether structure predicts these as well. They do not take part in the choice of a recipe.

Trained weights and measurements are kept in the output folder, so that an interrupted program resumes with the missing
ones. ``--workers`` trains several recipes at a time, for a GPU that one small encoder does not fill, or for CPU cores that
work better alone (with ``OMP_NUM_THREADS=1``). ``--keep`` adds the results of each recipe to
``scripts/results/forgetting.json`` and writes the table of docs/forgetting.md; recipes that are stored there with all scores
are not computed again.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from argparse import RawDescriptionHelpFormatter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import product, repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
import yaml
from ablations import trained
from derived_bitexts import NEGATIVES, mined, with_added, with_hard_negatives
from dev_measures import (
    COLUMNS,
    GUARD,
    ITEMS,
    PARAGRAPHS,
    QUESTIONS,
    TOKENS,
    TOKENS_OF_A_LANGUAGE,
    DevData,
    Embeddings,
    best_rows,
    kept_embeddings,
    work_settings,
)
from matplotlib.figure import Figure
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from stored_results import check_settings, fill, markdown, reports_errors
from transformers import HfArgumentParser

from metaphrase.corpus.files import find_files
from metaphrase.encoders.loading import load_encoder
from metaphrase.evaluation.result import Result
from metaphrase.evaluation.suites import Settings, Subject
from metaphrase.evaluation.suites.running import find_benchmarks
from metaphrase.exceptions import UsageError
from metaphrase.io.configuration import option
from metaphrase.io.counts import counted
from metaphrase.io.digests import files_sha256, text_digest
from metaphrase.io.environment import cores, hardware, has_bfloat16_instructions, prepare_process
from metaphrase.io.files import DEMO, read_json, write_json
from metaphrase.postprocessing.debiasing import debias, parallel_texts
from metaphrase.training.configuration import RunConfig
from metaphrase.training.demo import demo_settings
from metaphrase.training.run import Inputs

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "scripts" / "results" / "forgetting.json"
PAGE = ROOT / "docs" / "forgetting.md"
PLOT = ROOT / "docs" / "forgetting" / "frontier.svg"

TEMPERATURES = (0.01, 0.02, 0.05)
#: Candidates that a translation is ranked against, as arguments of `tr`, by their part of a recipe's name.
RANKINGS: dict[str, dict[str, Any]] = {"": {}, "soft targets, ": {"targets": "soft"}, "own side, ": {"own_side": True}}
#: Terms that keep the encoder close to the original one, by name.
TERMS: dict[str, list[dict[str, Any]]] = {
    "nothing": [],
    "anchor": [{"objective": "anchor", "weight": 3.0, "args": {"sides": "both"}}],
    "anchor, weight 1": [{"objective": "anchor", "weight": 1.0, "args": {"sides": "both"}}],
    "anchor, weight 10": [{"objective": "anchor", "weight": 10.0, "args": {"sides": "both"}}],
    "anchor of tokens": [{"objective": "anchor", "weight": 3.0, "args": {"sides": "both", "level": "tokens"}}],
    "anchor to targets, weight 10": [
        {"objective": "anchor", "weight": 10.0, "args": {"sides": "both", "toward": "target"}}
    ],
    "interpolated anchor": [{"objective": "anchor", "weight": 3.0, "args": {"sides": "interpolated"}}],
    "similarities, weight 100": [{"objective": "similarity-preservation", "weight": 100.0, "args": {"sides": "both"}}],
    "similarities, weight 1000": [
        {"objective": "similarity-preservation", "weight": 1000.0, "args": {"sides": "both"}}
    ],
}
ALPHAS = (0.3, 0.5, 0.7, 1.0)
#: Numbers of directions of language identity that are projected out.
DIRECTIONS = (0, 10, 20, 30, 40, 60)
#: The recipe `metaphrase`, and the α and number of directions with which it gains most without a loss. It is also trained
#: from an encoder without these directions.
DEFAULT, DEFAULT_RELEASE = "tau=0.01, own side, anchor, weight 10", {"alpha": 0.7, "directions": 20}
#: Variations of the default, by their part of a recipe's name: the fields of `Cell` that differ.
VARIATIONS: dict[str, dict[str, Any]] = {
    "batches of one language": {"training": {"batches": "language"}},
    "bfloat16": {"training": {"bf16": True}},
    "batches of 512 in bfloat16": {"training": {"effective_batch_size": 512, "micro_batch_size": 64, "bf16": True}},
    "batches of 1,024 in bfloat16": {"training": {"effective_batch_size": 1024, "micro_batch_size": 64, "bf16": True}},
    "word embeddings trained": {"training": {"freeze_word_embeddings": False}},
    "hard negatives": {"bitext": "hard negatives"},
    "mined pairs": {"bitext": "mined"},
}
#: Of these encoders, without removed directions, transfer is measured.
TRANSFER_ALPHAS = (0.5, 1.0)
#: Suites of transfer and their results, by folder of their data.
TRANSFER = {
    "xnli": ("nli", "xnli probe accuracy"),
    "ud": ("pos", "ud probe accuracy"),
    "xquad": ("qa", "xquad f1"),
}
#: Test items of each language.
TRANSFER_ITEMS = 100


@dataclass
class Options:
    """Options of the program."""

    stsb: Path = option(help="Folder of STS-B in several languages.")
    mlqa: Path = option(help="Folder of MLQA's dev set, dev-xx.json.gz.")
    transfer: Path | None = option(
        None, "Folder with xnli or ud, to measure probes for inference or tags, or xquad, to fine-tune for questions."
    )
    output: Path = option(Path("runs/forgetting"), "Folder of weights and rows.")
    only: list[str] = option([""], "Names of recipes, or parts of names (default: all).")
    corpus: Path = option(DEMO, "Bitext to train on (default: the demo's).")
    add: Path | None = option(None, "Folder of pairs, such as dictionaries: adds a recipe with these pairs.")
    steps: int = option(100)
    batch_size: int = option(64)
    workers: int = option(1, "Recipes that are trained and measured at a time.")
    seeds: list[int] = option([1])
    keep: bool = option(False, "Add to scripts/results/forgetting.json and write docs/forgetting.md.")


@dataclass(frozen=True)
class Cell:
    """A recipe of the grid with a seed, and what it is trained on.

    ``removed`` directions are removed before training. ``training`` are the fields of `RunConfig` that differ from those of
    other cells. ``bitext`` names how the bitext is changed: ``hard negatives`` or ``mined``. ``added`` is a folder with pairs
    that are added to it.
    """

    name: str
    terms: list[dict[str, Any]]
    seed: int
    steps: int
    batch_size: int
    corpus: Path
    removed: int = 0
    training: Mapping[str, Any] = field(default_factory=dict)
    bitext: str = ""
    added: Path | None = None

    @property
    def varied(self) -> bool:
        """Whether the recipe is trained in another way than the others."""
        return bool(self.training or self.bitext or self.added)

    @property
    def digest(self) -> str:
        """Digest of the settings that determine the trained weights."""
        folders = [str(folder) for folder in (self.corpus, self.added) if folder]
        files = files_sha256(path for folder in folders for file in find_files(folder) for path in file.paths)
        content = [self.terms, self.seed, self.steps, self.batch_size, files]
        content += [one for one in (self.removed, self.training, self.bitext) if one]
        return text_digest(json.dumps(content))[:12]


def grid(seeds: Iterable[int], added: Path | None = None, **setting: Any) -> Iterator[Cell]:
    """The cells of the grid, seed by seed; with the pairs of the folder ``added``, if there is one."""
    variations = dict(VARIATIONS)
    if added:
        variations[f"pairs of {added.name} added"] = {"added": added}
    for seed, tau, (ranked, ranking), (name, terms) in product(seeds, TEMPERATURES, RANKINGS.items(), TERMS.items()):
        args = {"temperature": tau, "direction": "symmetric", "mask_duplicates": True, **ranking}
        cell = Cell(f"tau={tau}, {ranked}{name}", [{"objective": "tr", "args": args}, *terms], seed, **setting)
        yield cell
        if cell.name == DEFAULT:
            removed = int(DEFAULT_RELEASE["directions"])
            yield replace(cell, name=f"{cell.name}, after removing {removed} directions", removed=removed)
            for words, fields in variations.items():
                yield replace(cell, name=f"{cell.name}, {words}", **fields)


# ------------------------------------------------------------------------------------------------------------- training


def trained_weights(cell: Cell, output: Path) -> Path:
    """The trained parameters of a cell in float16, with facts about the run as metadata; they are trained if missing."""
    path = output / "weights" / f"{cell.digest}.safetensors"
    if path.is_file():
        return path
    work = output / f"work-{cell.digest}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    parameters, facts = train(cell, work, output)
    tensors = {name: parameter.half() for name, parameter in parameters.items()}
    path.parent.mkdir(exist_ok=True)
    save_file(tensors, work / path.name, metadata={"facts": json.dumps(facts)})
    (work / path.name).replace(path)
    shutil.rmtree(work)
    return path


def train(cell: Cell, work: Path, output: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Train the encoder of a cell; return its trained parameters, and facts about the run."""
    work.mkdir(exist_ok=True)
    recipe = work / "recipe.yaml"
    training = {"learning_rate": 5e-5, "warmup_steps": 0.1, "batch_sampler": "no_duplicates"}
    terms = deepcopy(cell.terms)
    if cell.bitext == "hard negatives":
        terms[0]["args"]["negatives"] = NEGATIVES
    content = {"name": cell.name, "terms": terms, "max_length": 32, "pooling": "cls", "training": training}
    recipe.write_text(yaml.safe_dump(content), encoding="utf-8")
    corpus = bitext_of(cell, work)
    settings = {name: value for name, value in demo_settings().items() if name not in ("merge", "debias", "bf16")}
    settings |= {
        "recipe": str(recipe),
        "test": [],
        "output_dir": str(work / "run"),
        "max_steps": cell.steps,
        "per_device_train_batch_size": cell.batch_size,
        "seed": cell.seed,
        "disable_tqdm": True,
        "report_to": "none",
    }
    if corpus != DEMO:
        settings |= {"corpus": [str(corpus)], "languages": []}
    settings |= cell.training
    inputs = Inputs(encoder=start_of(cell))
    encoder, _, facts = trained(RunConfig(**settings), work / "run", output / "links", inputs)
    parameters = {
        name: parameter.detach().cpu() for name, parameter in encoder.named_parameters() if parameter.requires_grad
    }
    stored_facts = ("steps", "batch_size", "training_seconds", "hardware", "versions")
    return parameters, {name: facts[name] for name in stored_facts}


def bitext_of(cell: Cell, work: Path) -> Path:
    """The bitext that a cell is trained on, which is written to ``work`` if it is not the corpus itself."""
    if not (cell.bitext or cell.added):
        return cell.corpus
    folder = work / "bitext"
    folder.mkdir()
    if cell.added:
        return with_added(cell.corpus, folder, cell.added)
    return {"hard negatives": with_hard_negatives, "mined": mined}[cell.bitext](cell.corpus, folder)


def start_of(cell: Cell) -> SentenceTransformer:
    """The encoder before training."""
    model = load_encoder("starter")
    return debias(model, parallel_texts(), cell.removed)[0] if cell.removed else model


def interpolated(
    original: SentenceTransformer, weights: Mapping[str, torch.Tensor], alpha: float
) -> SentenceTransformer:
    """An encoder between the original and the trained one."""
    model = deepcopy(original)
    start = dict(original.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in weights:
                parameter.copy_(torch.lerp(start[name], weights[name].to(parameter), alpha))
    return model


# ------------------------------------------------------------------------------------------------------------- transfer


def transfer_measures(folder: Path | None) -> dict[str, str]:
    """The scores of transfer that a folder has data for, by suite; none without a folder.

    Raises:
        UsageError: The folder has data for none of them.
    """
    if folder is None:
        return {}
    measures = dict(measure for name, measure in TRANSFER.items() if (folder / name).is_dir())
    if not measures:
        raise UsageError(f"{folder} contains none of {', '.join(TRANSFER)} (--transfer).")
    return measures


def transfer_scores(model: SentenceTransformer, folder: Path) -> dict[str, float]:
    """Scores of the suites of transfer, mean over the languages other than English, in percent."""
    measures = transfer_measures(folder)
    settings = Settings(
        prompt=None, transfer="probe", bf16=has_bfloat16_instructions(), first=TRANSFER_ITEMS, resamples=2
    )
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory() as work:
        encoder = str(Path(work) / "encoder")
        model.save_pretrained(encoder, create_model_card=False)
        for benchmark in find_benchmarks(folder, list(measures), settings)[0]:
            results |= benchmark.measure(Subject(encoder, model, Path(work), settings))
    return {suite: results[name].groups["without English"].score for suite, name in measures.items()}


# ---------------------------------------------------------------------------------------------------------- measurement


def measured(cell: Cell | None, data: DevData, output: Path, transfer: Path | None = None) -> list[dict[str, Any]]:
    """The rows of a cell, or of the original encoder; they are measured if missing."""
    digest = measurement_digest(data, transfer)
    path = output / "rows" / f"{cell.digest if cell else 'starter'}-{digest}.json"
    if path.is_file():
        return list(read_json(path))
    original = load_encoder("starter")
    embedded = kept_embeddings(output / "rows" / f"starter-{digest}.npz", lambda: data.embed(original))
    if cell is None:
        facts = {"recipe": "starter", "alpha": 0.0, "hardware": hardware()}
        rows = [facts | {"directions": count} | data.measures(embedded, embedded, count) for count in DIRECTIONS]
        if transfer:
            rows[0] |= transfer_scores(original, transfer)
    else:
        weights, start = load_file(trained_weights(cell, output)), start_of(cell)
        rows = []
        for alpha in ALPHAS:
            model = interpolated(start, weights, alpha)
            rows_of_alpha = measured_rows(cell, alpha, model, data, embedded)
            if transfer and alpha in TRANSFER_ALPHAS:
                rows_of_alpha[0] |= transfer_scores(model, transfer)
            rows += rows_of_alpha
    write_json(path, rows)
    return rows


def measurement_digest(data: DevData, transfer: Path | None) -> str:
    """Digest of the settings that determine the measurements of an encoder."""
    settings: list[Any] = [ALPHAS, DIRECTIONS, ITEMS, QUESTIONS, PARAGRAPHS, TOKENS_OF_A_LANGUAGE]
    settings += [*map(len, data.sts), *data.guard]
    if transfer:
        files = sorted(path for name in TRANSFER for path in (transfer / name).glob("*"))
        settings += [transfer_measures(transfer), TRANSFER_ALPHAS, TRANSFER_ITEMS, files_sha256(files)]
    return text_digest(json.dumps(settings))[:8]


def measured_rows(
    cell: Cell, alpha: float, model: SentenceTransformer, data: DevData, original: Embeddings
) -> list[dict[str, Any]]:
    """The rows of an encoder of a cell, one for each number of directions, from the embeddings of the original encoder."""
    embedded = data.embed(model)
    facts: dict[str, Any] = {"recipe": cell.name, "seed": cell.seed, "alpha": alpha, "hardware": hardware()}
    if cell.varied:
        facts = {"varied": True} | facts
    if cell.removed:
        facts = {"removed": cell.removed} | facts
    rows = [facts | {"directions": count} | data.measures(embedded, original, count) for count in DIRECTIONS]
    if cell.removed:  # the guard would compare with the original encoder, which has these directions
        for row in rows:
            del row[GUARD]
    return rows


def measured_in_worker(cell: Cell, options: Options) -> list[dict[str, Any]]:
    """The rows of a cell, computed in a separate process."""
    prepare_process()
    return measured(cell, DevData(options.stsb, options.mlqa), options.output, options.transfer)


# ----------------------------------------------------------------------------------------------------------------- page


def gain(row: Mapping[str, Any]) -> float:
    """The sum of translations and answers."""
    return float(row["translations"] + row["answers"])


def encoder_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Recipe, α, number of directions and seed; the starter has no seed."""
    return row["recipe"], row["alpha"], row["directions"], row.get("seed")


def cell_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Recipe and seed; the starter has no seed."""
    return row["recipe"], row.get("seed")


def means(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of each recipe, α and number of directions as one, with means over the seeds."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(encoder_of(row)[:-1], []).append(row)
    return [
        {**group[0], **{key: float(np.mean([row[key] for row in group])) for key in COLUMNS}}
        for group in groups.values()
    ]


def table(content: Mapping[str, Any]) -> str:
    """Format the best encoders of each recipe as Markdown: of those that lose nothing, and of all."""
    rows = means(content["rows"])
    start = rows[0]
    machines = {row["hardware"].get("gpu") or cores(row["hardware"]) for row in content["rows"]}
    several = len(content["seeds"]) > 1
    caption = (
        f"{content['steps']} steps of {content['batch_size']} pairs of {content['corpus']}, word embeddings "
        f"frozen unless a name says otherwise, {'seeds' if several else 'seed'} {', '.join(map(str, content['seeds']))}; "
        f"without prompt, on dev data ({', '.join(sorted(machines))}). α is the share of the way from the original encoder "
        "to the trained one. "
        "A recipe has up to two rows. Both show the α and the number of directions with the largest sum of translations and "
        "answers: the first if neither answers nor similarities within a language may be worse than the starter's, the "
        "second without this condition. "
        f"{'Means over the seeds' if several else 'Single runs'}: small differences are not meaningful."
    )
    shown = [row for row in rows if row["recipe"] == "starter"]
    for recipe in dict.fromkeys(row["recipe"] for row in rows if row["recipe"] != "starter"):
        shown += best_rows([row for row in rows if row["recipe"] == recipe], start, gain)
    cells = [
        [row["recipe"], f"{row['alpha']:g}", row["directions"], *(f"{row[key]:.1f}" for key in COLUMNS)]
        for row in shown
    ]
    heads = ["recipe", "α", "directions removed", *COLUMNS.values()]
    return "\n".join([caption, "", *markdown(heads, "lr", cells)])


#: Measures that similarity structure has to predict, and the structure above which encoders are close to the original one.
PREDICTED = {
    "similarity": "STS-B",
    "answers_in_own_language": "answers, MRR in the question's language",
    "nli": "XNLI, probe",
    "pos": "parts of speech, probe",
    "qa": "XQuAD, fine-tuned",
}
CLOSE = 90.0
#: Minimum number of encoders for a correlation.
FEWEST = 5
#: The measures that predict them, and the sentences whose similarities they compare.
PREDICTORS = {"structure": "STS-B dev", GUARD: "packaged", TOKENS: "packaged, tokens"}


def prediction(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format how well similarity structure predicts other measures, for each number of directions, as Markdown."""
    heads = ["measure", "structure of", "directions removed", "encoders", "correlation"]
    heads += [f"with structure ≥ {CLOSE:g}", "correlation"]
    cells = []
    for (key, words), (predictor, texts), directions in product(PREDICTED.items(), PREDICTORS.items(), DIRECTIONS):
        # Directions that are removed before training change the structure without a loss.
        comparable = [row for row in rows if row["directions"] == directions and not row.get("removed")]
        encoders = [row for row in comparable if {key, predictor} <= row.keys()]
        close = [row for row in encoders if row[predictor] >= CLOSE]
        if len(encoders) >= FEWEST:
            correlations = [
                f"{correlation(group, predictor, key):.2f}" if len(group) >= FEWEST else ""
                for group in (encoders, close)
            ]
            cells.append([words, texts, directions, len(encoders), correlations[0], len(close), correlations[1]])
    return "\n".join(markdown(heads, "llr", cells))


def correlation(rows: Sequence[Mapping[str, Any]], predictor: str, measure: str) -> float:
    """Pearson correlation of two measures; NaN if one of them does not vary."""
    values = np.array([[row[key] for row in rows] for key in (predictor, measure)])
    return float(np.corrcoef(values)[0, 1]) if rows and values.std(axis=1).all() else float("nan")


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw what every encoder gains and costs: the mean of translations and answers over similarities, as SVG.

    A star marks the recipe `metaphrase` with `DEFAULT_RELEASE`.
    """
    with matplotlib.rc_context({"svg.hashsalt": "forgetting", "svg.fonttype": "none"}):
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        groups: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            kind = next((name for name in RANKINGS if name and name in row["recipe"]), "the other side alone")
            label = "starter" if row["recipe"] == "starter" else kind.removesuffix(", ")
            groups.setdefault(label, []).append((row["similarity"], gain(row) / 2))
        for label, points in groups.items():
            axes.scatter(*zip(*points, strict=True), s=14, label=label, alpha=0.7)
        for row in rows:
            if row["recipe"] == DEFAULT and all(row[key] == value for key, value in DEFAULT_RELEASE.items()):
                place = row["similarity"], gain(row) / 2
                axes.scatter(*place, s=140, marker="*", color="black", label="recipe metaphrase", zorder=3)
        axes.axvline(rows[0]["similarity"], color="grey", linewidth=1)
        axes.set(xlabel="STS-B, dev", ylabel="mean of translations and answers, dev")
        axes.legend(title="ranked against", loc="lower left")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})


# -------------------------------------------------------------------------------------------------------------- program


def chosen(cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """The cells that are named in ``only``, in full or by a part of the name.

    The full name of a cell does not select others whose names contain it.

    Raises:
        UsageError: No cell is selected.
    """
    parts = set(only) - {cell.name for cell in cells}
    selected = [cell for cell in cells if cell.name in only or any(part in cell.name for part in parts)]
    if not selected:
        raise UsageError(f"No recipe of the grid contains {' or '.join(map(repr, only))} (--only).")
    return selected


def stored_rows(path: Path, setting: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The stored rows, to which those of other recipes can be added; none if there is no such file.

    Raises:
        UsageError: The stored results were measured in another setting.
    """
    if not path.exists():
        return []
    stored = read_json(path)
    if differing := [f"{key} {stored[key]}" for key in setting if stored[key] != setting[key]]:
        raise UsageError(
            f"{path} has results of {', '.join(differing)}. To replace the stored results, delete this file first."
        )
    return list(stored["rows"])


#: Largest difference that rounding makes between two machines: one of the 480 questions changes a share by 0.2 points.
ROUNDING = 0.3


def differing_scores(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The measures on dev data in which two rows differ by more than rounding."""
    return [key for key in COLUMNS if abs(old[key] - new[key]) > ROUNDING]


def with_stored_scores(
    measured: Sequence[Mapping[str, Any]], stored: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Measured rows, with those stored scores of the same encoder that were not measured this time.

    The encoder is the same if its scores on dev data are: weights that were trained again may differ.
    """
    stored_row = {encoder_of(row): row for row in stored}
    rows = []
    for new in measured:
        old = stored_row.get(encoder_of(new))
        rows.append({**old, **new} if old and not differing_scores(old, new) else dict(new))
    return rows


def require_same_start(stored: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]]) -> None:
    """Refuse stored results if the starter's scores there differ from the measured ones by more than rounding."""
    for old, new in zip(stored, measured, strict=False):
        if differing := [COLUMNS[key] for key in differing_scores(old, new)]:
            raise UsageError(
                f"The starter's {', '.join(differing)} differ from those in {KEPT}, so the dev data or the encoder differ. "
                "To replace the stored results, delete this file first."
            )


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Train and measure what is missing, and write the results; return the exit status."""
    parser = HfArgumentParser(Options, description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    (options,) = parser.parse_args_into_dataclasses(argv)
    setting = {"steps": options.steps, "batch_size": options.batch_size}
    options.seeds = list(dict.fromkeys(options.seeds))
    whole_grid = list(grid(options.seeds, options.add, corpus=options.corpus, **setting))
    cells = chosen(whole_grid, options.only)
    order = ["starter", *dict.fromkeys(cell.name for cell in whole_grid)]
    corpus = "the demo's bitext" if options.corpus == DEMO else f"the training sets in {options.corpus.name}"
    content: dict[str, Any] = {"corpus": corpus, **setting, "seeds": options.seeds}
    rows = stored_rows(KEPT, content) if options.keep else []
    order += dict.fromkeys(row["recipe"] for row in rows if row["recipe"] not in order)
    prepare_process()
    data = DevData(options.stsb, options.mlqa)
    check_settings(options.output, work_settings(options.stsb, options.mlqa))
    start = measured(None, data, options.output, options.transfer)
    require_same_start(rows, start)
    rows = with_stored_scores(start, rows) + rows[len(start) :]
    missing = missing_cells(cells, rows, options.transfer)
    print(f"{counted(len(missing), 'recipe')} to train", flush=True)
    write_results(content, rows, order, options)
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        for new_rows in pool.map(measured_in_worker, missing, repeat(options)):
            measured_cells = set(map(cell_of, new_rows))
            others = [row for row in rows if cell_of(row) not in measured_cells]
            rows = others + with_stored_scores(new_rows, rows)
            print(json.dumps(new_rows, indent=1), flush=True)
            write_results(content, rows, order, options)
    return 0


def missing_cells(cells: Iterable[Cell], rows: Iterable[Mapping[str, Any]], transfer: Path | None) -> list[Cell]:
    """The cells of which no row has all scores."""
    required = {TOKENS, *transfer_measures(transfer)}
    complete = set()
    for row in rows:
        if row.keys() >= required and (GUARD in row or row.get("removed")):
            complete.add(cell_of(row))
    return [cell for cell in cells if (cell.name, cell.seed) not in complete]


def write_results(
    setting: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], order: Sequence[str], options: Options
) -> None:
    """Write the results so far, sorted by the order of their recipes, and with ``--keep`` those of the documentation."""
    content = {**setting, "rows": sorted(rows, key=lambda row: order.index(row["recipe"]))}
    write_json(options.output / "results.json", content)
    if options.keep:
        write_json(KEPT, content)
        fill(PAGE, {"forgetting": table(content), "prediction": prediction(content["rows"])})
        plot(content["rows"], PLOT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
