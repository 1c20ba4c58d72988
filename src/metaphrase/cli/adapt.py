"""``metaphrase adapt --corpus my.tsv --languages xx``: from a few thousand pairs to a verdict, with nothing to decide."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from rich.console import RenderableType
from rich.text import Text
from sentence_transformers import SentenceTransformer
from transformers import EarlyStoppingCallback

from metaphrase.checkpoints.folders import checkpoint_folders, differences, tidy
from metaphrase.cli import emit, notes, parse
from metaphrase.cli.tables import findings_table, lines_without_pair
from metaphrase.cli.train import make_loss, parse_options, prepare_process, train_and_report
from metaphrase.corpus.checks import check_corpus, errors, read_corpus
from metaphrase.corpus.identification import language_name
from metaphrase.corpus.loading import load_corpus
from metaphrase.corpus.parallel import ParallelSet, load_parallel_folder
from metaphrase.encoders.loading import freeze_word_embeddings, load_encoder
from metaphrase.exceptions import CheckpointError, CorpusError, UsageError
from metaphrase.io.files import PACKAGED_DATA, write_json
from metaphrase.io.locks import exclusive
from metaphrase.modeling.collator import ParallelCollator
from metaphrase.modeling.packing import packed
from metaphrase.publishing.provenance import PACKAGED
from metaphrase.training.adaptation import (
    PATIENCE,
    Pair,
    Plan,
    Split,
    batch_size_for,
    file_name,
    held_out,
    make_plan,
    replay,
    split_all,
    verdict_in_words,
    write_pairs,
)
from metaphrase.training.recipe import Recipe

SUMMARY = "Adapt an encoder to your language: check, train, measure, and an honest verdict"
EXAMPLES = [
    "metaphrase adapt --corpus my.tsv --languages sw",
    "metaphrase adapt --model BAAI/bge-m3 --corpus my.tsv --languages wo --minutes 120 --anchor 1 --output_dir runs/wo",
]

#: Bitext of other languages that comes with the package, and the Declaration of Human Rights, for retention.

#: In the output folder: what was asked for, and the plan that was made for it.
PLAN = "plan.json"

#: Names of the test sets.
HELD_OUT, RETENTION = TESTS = "held-out", "udhr"


@dataclass
class AdaptOptions:
    """What is adapted, to what."""

    corpus: list[str] = field(
        metadata={"help": "Your bitext: TSV, JSONL, Parquet, TMX, Moses 'x.sw,x.en', a folder, or hf:org/name."}
    )
    languages: list[str] = field(metadata={"help": "The language, or languages, to adapt to."})
    model: str = field(
        default="starter", metadata={"help": "Encoder to adapt: 'starter', a Hub id or a folder (default: starter)."}
    )
    output_dir: str | None = field(
        default=None,
        metadata={"help": "Where the release, its report and the split go (default: runs/adapt-XX)."},
    )
    recipe: str = field(default="dap", metadata={"help": "A name from `metaphrase recipes`, or a YAML file."})
    minutes: float = field(default=20.0, metadata={"help": "Time for training; checks and measuring come on top."})
    replay: float = field(
        default=1.0,
        metadata={"help": "Pairs of other languages that come with the package, for each pair of yours; 0 for none."},
    )
    anchor: float = field(
        default=0.0,
        metadata={"help": "Weight of an objective that holds English where the original encoder had it; 0 for none."},
    )
    data_license: str | None = field(default=None, metadata={"help": "Licence of your bitext, for the model's card."})
    force: bool = field(default=False, metadata={"help": "Train although the checks found errors."})
    seed: int = field(default=42, metadata={"help": "Seed of split and training."})


def run(argv: Sequence[str]) -> int:
    """Check the data, plan, train, measure, and say what came of it."""
    (options,) = parse("metaphrase adapt", [AdaptOptions], argv, description=SUMMARY, examples=EXAMPLES)
    if options.minutes <= 0 or options.replay < 0 or options.anchor < 0:
        raise UsageError(
            f"--minutes must be positive, --replay and --anchor at least 0; they are {options.minutes:g}, "
            f"{options.replay:g} and {options.anchor:g}."
        )
    started = time.time()
    prepare_process()
    languages = [code for item in options.languages for code in item.replace(",", " ").split()]
    output = Path(options.output_dir or f"runs/adapt-{'-'.join(languages)}")
    if inside := [item for item in options.corpus if Path(item).resolve().is_relative_to((output / "data").resolve())]:
        raise UsageError(
            f"{inside[0]} lies where this run writes its own data. Copy it elsewhere, or choose another --output_dir."
        )
    sets, read = read_corpus(options.corpus, languages=languages)
    if unread := lines_without_pair(read):
        notes().print(unread, highlight=False, markup=False)
    findings = check_corpus(sets, seed=options.seed)
    if findings:
        notes().print(findings_table(findings))
    if (wrong := errors(findings)) and not options.force:
        raise CorpusError(
            f"{' '.join(finding.message for finding in wrong)} Nothing was trained. Mend the corpus, or give --force."
        )
    splits = split_all(sets, seed=options.seed)
    wanted = int(options.replay * own_pairs(splits))
    kept = replay(others(sets, options), wanted, held=held_out(splits.values()), seed=options.seed)
    with exclusive(output):
        result, shown = adapt(options, output, splits, kept, command=["metaphrase", "adapt", *argv])
        result |= {"read": read.to_dict(), "findings": [finding.to_dict() for finding in findings]}
        result["seconds"] = round(time.time() - started, 1)
        write_json(output / "verdict.json", result)
    lines = [f"\n{line}" for line in result["said"]]
    emit(
        result,
        *shown[: 2 * len(TESTS)],
        *(Text(line, style="bold") for line in lines),
        f"\n{result['seconds'] / 60:.0f} minutes. The model is in {output}, its report is {output / 'report.html'}; "
        f"`metaphrase report {output}` looks closer. Publish it: metaphrase push {output} --to me/my-encoder",
    )
    return 0


def adapt(
    options: AdaptOptions,
    output: Path,
    splits: Mapping[str, Split],
    kept: Mapping[str, Sequence[Pair]],
    *,
    command: Sequence[str],
) -> tuple[dict[str, Any], list[RenderableType]]:
    """Plan, train and measure, in a folder that no other process writes to; or go on with what was begun there.

    Args:
        options: What was asked for.
        output: The folder.
        splits: The user's pairs, by language.
        kept: Pairs of other languages to train on beside them.
        command: How this run was called.

    Returns:
        The verdict and the plan, and the tables of the measurements.

    Raises:
        CheckpointError: The folder holds another run's checkpoints.
    """
    recipe = recipe_of(options)
    asked = {
        "model": options.model,
        "languages": sorted(splits),
        "recipe": recipe,
        "minutes": options.minutes,
        "replay": options.replay,
        "seed": options.seed,
        "pairs": pairs_digest(splits, kept),
    }
    tidy(output)
    plan = plan_left(output, asked)
    folders = write_data(output, splits, kept)
    written = write_json(output / "data" / "recipe.yaml", recipe)  # JSON is YAML, and says floats exactly
    if plan is None:
        plan = plan_for(options, folders["training"], written, own_pairs(splits))
        write_json(output / PLAN, {"asked": asked, "plan": asdict(plan)})
    say(splits, folders["training"], plan)
    arguments = [
        *("--model", options.model, "--recipe", str(written), "--corpus", str(folders["training"])),
        *("--dev", str(folders["dev"]), "--test", str(folders[HELD_OUT]), str(PACKAGED_DATA / RETENTION)),
        *("--output_dir", str(output), "--seed", str(options.seed), "--max_steps", str(plan.max_steps)),
        *("--per_device_train_batch_size", str(plan.batch_size), "--learning_rate", str(plan.learning_rate)),
        *("--head_learning_rate", "5e-4", "--warmup_steps", "0.1", "--batch_sampler", "no_duplicates"),
        *("--eval_strategy", "steps", "--eval_steps", str(plan.eval_steps), "--save_steps", str(plan.eval_steps)),
        *("--load_best_model_at_end", "true", "--metric_for_best_model", "eval_dev_mean_accuracy"),
        *("--greater_is_better", "true", "--save_total_limit", "1", "--logging_steps", "5"),
        *("--resume_from_checkpoint", "true"),
        *(("--freeze_word_embeddings", "true") if plan.freeze_word_embeddings else ()),
        *(("--micro_batch_size", str(plan.micro_batch_size)) if plan.micro_batch_size else ()),
        *(("--data_license", options.data_license) if options.data_license else ()),
    ]
    try:
        facts, shown = train_and_report(
            parse_options(arguments),
            command=command,
            title=f"{options.model} adapted to {', '.join(map(language_name, splits))}",
            callbacks=[EarlyStoppingCallback(early_stopping_patience=PATIENCE)],
            origins={file_name(language, "train"): PACKAGED for language in kept},
        )
    except (Exception, SystemExit):
        notes().print(
            "Stopped. Where nothing is to be changed, the same `metaphrase adapt` goes on from the last checkpoint; options "
            f"that it lacks are those of: metaphrase train {shlex.join(arguments)}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        raise
    return judge(facts) | {"plan": asdict(plan)}, shown


def own_pairs(splits: Mapping[str, Split]) -> int:
    """The user's pairs that are trained on."""
    return sum(len(one.train) for one in splits.values())


def pairs_digest(splits: Mapping[str, Split], kept: Mapping[str, Sequence[Pair]]) -> str:
    """By which other data are told apart: what is trained on, stopped by and judged by."""
    parts = [[language, one.train, one.dev, one.test] for language, one in sorted(splits.items())]
    return xxhash.xxh3_64_hexdigest(json.dumps([parts, sorted(kept.items())]).encode())


def plan_left(output: Path, asked: Mapping[str, Any]) -> Plan | None:
    """The plan of the run whose checkpoints are in a folder, so that its schedule stays; None where there are none.

    Raises:
        CheckpointError: They are of another run, or nobody knows of which.
    """
    if not (present := checkpoint_folders(output)):
        return None
    way_out = "Choose another --output_dir, or delete that folder to begin anew."
    try:
        left = json.loads((output / PLAN).read_text(encoding="utf-8"))
        plan, before = Plan(**left["plan"]), dict(left["asked"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"{output} holds {present[-1].name}, but {PLAN}, which says of which run, is missing or damaged ({error}). "
            f"{way_out}"
        ) from error
    now = json.loads(json.dumps(asked))
    if changed := differences(before, now):
        raise CheckpointError(
            f"{output} holds {present[-1].name} of a run that differs in: {', '.join(changed)}. Give what it was begun "
            f"with to go on with it. {way_out}"
        )
    return plan


def others(sets: Mapping[str, ParallelSet], options: AdaptOptions) -> dict[str, ParallelSet]:
    """The packaged bitext of all languages but the user's."""
    if options.replay == 0:
        return {}
    packaged = load_parallel_folder(PACKAGED_DATA / "demo", split="train")
    return {language: pairs for language, pairs in packaged.items() if language not in sets}


def write_data(output: Path, splits: Mapping[str, Split], kept: Mapping[str, Sequence[Pair]]) -> dict[str, Path]:
    """Write what is trained on and what is held out, so that a run can be made again and others can be judged by it.

    What an earlier run left there goes: a folder is read whole.
    """
    folders = {name: output / "data" / name for name in ("training", "dev", HELD_OUT)}
    for folder in folders.values():
        shutil.rmtree(folder, ignore_errors=True)
    for language, one in splits.items():
        write_pairs(folders["training"], language, "train", one.train)
        write_pairs(folders["dev"], language, "dev", one.dev)
        write_pairs(folders[HELD_OUT], language, "test", one.test)
    for language, pairs in kept.items():
        write_pairs(folders["training"], language, "train", pairs)
    return folders


def recipe_of(options: AdaptOptions) -> dict[str, Any]:
    """The recipe of this run: vocabularies read off the corpus, which suits small machines, and the anchor if any."""
    content = Recipe.load(options.recipe).to_dict()
    for term in content["terms"]:
        if term["objective"] == "rtl":
            term["args"] = {**term.get("args", {}), "vocabulary": "english"}
    if options.anchor:
        content["terms"].append({"objective": "anchor", "weight": options.anchor})
    return content


def plan_for(options: AdaptOptions, training: Path, recipe: Path, own: int) -> Plan:
    """Make a step on this machine, and plan the run by what it takes."""
    model = load_encoder(options.model, default_pooling=Recipe.load(str(recipe)).pooling)
    encoder: Any = model[0].auto_model
    parameters = sum(parameter.numel() for parameter in encoder.parameters())
    table = encoder.get_input_embeddings().weight.numel()
    cuda = model.device.type == "cuda"
    memory = float(torch.cuda.mem_get_info()[0]) if cuda else free_memory()
    corpus = load_corpus(str(training))
    rows = corpus.dataset
    size = batch_size_for(len(rows))
    seconds = step_seconds(model, recipe, corpus, min(size, len(rows)), freeze=not cuda, seed=options.seed)
    config = encoder.config
    row_bytes = (
        32 * config.hidden_size * config.num_hidden_layers * 4 * 34.0
    )  # 34 numbers a state (Korthikanti et al. 2022)
    return make_plan(
        pairs=own,
        replayed=len(rows) - own,
        seconds_per_step=seconds,
        minutes=options.minutes,
        memory=memory,
        parameters=parameters,
        table=table,
        row_bytes=row_bytes,
        cuda=cuda,
    )


def free_memory() -> float:
    """Bytes of memory that this process can get."""
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError):  # another system than Linux
        return 8e9


def step_seconds(
    model: SentenceTransformer, recipe: Path, corpus: Any, size: int, *, freeze: bool, seed: int
) -> float:
    """Seconds of a step's forward and backward pass, after one that warms up; a twentieth more for the optimiser."""
    if freeze:
        freeze_word_embeddings(model)
    loss = make_loss(model, Recipe.load(str(recipe)), corpus).to(model.device).train()
    collate = ParallelCollator(model.tokenizer, loss.views, seed=seed)
    rows = corpus.dataset.shuffle(seed=seed)
    seconds = 0.0
    for at in (0, 1):
        chosen = [rows[(at * size + i) % len(rows)] for i in range(size)]
        batch = {k: _on(v, model.device) for k, v in collate(chosen).items()}
        start = time.perf_counter()
        with packed(model):
            torch.stack(list(loss(batch).values())).sum().backward()
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        loss.zero_grad()
    return 1.05 * seconds


def _on(view: Any, device: torch.device) -> Any:
    if not isinstance(view, dict):
        return view
    return {key: value.to(device) if torch.is_tensor(value) else value for key, value in view.items()}


def load_languages(training: Path) -> list[str]:
    """Languages that were trained on."""
    return sorted(path.name.split("-en.")[0] for path in training.glob("*-en.train.tsv.gz"))


def say(splits: Mapping[str, Split], training: Path, plan: Plan) -> None:
    """Tell what will be done before it is."""
    console = notes()
    for language, one in splits.items():
        console.print(
            f"{language_name(language)}: {len(one.train):,} pairs to train on, {len(one.dev)} to stop by, "
            f"{len(one.test)} to judge by; {one.left_out:,} left out (repeated, or too like a held-out one).",
            highlight=False,
        )
    if replayed := [language for language in load_languages(training) if language not in splits]:
        console.print(f"Other languages that are trained on beside it: {', '.join(replayed)}.", highlight=False)
    for reason in plan.reasons:
        console.print(f"- {reason}", highlight=False)


def judge(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict on the user's languages and on those that were not trained on, from what training found."""
    own, kept = facts["comparisons"][HELD_OUT]["languages"], facts["retention"].get(RETENTION)
    names = {language: language_name(language) for language in own}
    return {"said": verdict_in_words(own, kept, names), "languages": own, "retention": kept}
