"""``metaphrase export MODEL --output_dir DIR``: a smaller or faster encoder, measured before it is written."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from sentence_transformers import SentenceTransformer
from transformers.utils import cached_file

from metaphrase.cli import emit, notes, parse, show_progress
from metaphrase.corpus.checks import read_corpus
from metaphrase.corpus.monolingual import load_monolingual
from metaphrase.corpus.parallel import TARGET_LANGUAGE, ParallelSet, load_parallel_folder
from metaphrase.encoders import starter
from metaphrase.encoders.loading import STARTER, load_encoder, split_revision
from metaphrase.evaluation.compare import compare
from metaphrase.evaluation.retrieval import evaluate_retrieval
from metaphrase.evaluation.significance import RESAMPLES
from metaphrase.exceptions import MissingFileError, UsageError
from metaphrase.io.environment import versions
from metaphrase.io.files import PACKAGED_DATA
from metaphrase.publishing.card import AlignmentModelCardData, cell, table
from metaphrase.publishing.export import (
    ONNX_INT8,
    Draft,
    check_destination,
    check_runtime,
    drafted,
    footprint,
    prune_layers,
    spread,
    trim_vocabulary,
)
from metaphrase.publishing.hub import CARD
from metaphrase.publishing.report import render_table

SUMMARY = "Make an encoder smaller or faster, and say what that costs"

DESCRIPTION = (
    "Take out of an encoder what some languages do not need: pieces of its vocabulary (--languages, --corpus, --texts), "
    "layers (--layers, --keep_layers); or write it for another runtime (--format, --quantize). The result is measured per "
    "language against the model before, with a paired bootstrap, and that is printed before anything is written."
)

EXAMPLES = (
    "metaphrase export runs/sw --languages sw --output_dir runs/sw-small",
    "metaphrase export runs/sw --corpus sw-en.tsv.gz --texts news.sw.gz --max_loss 1 --output_dir runs/sw-small",
    "metaphrase export runs/sw --layers 9 --data my-test-sets --output_dir runs/sw-fast",
    "metaphrase export runs/sw --format onnx --quantize int8 --output_dir runs/sw-onnx",
)

#: What the card of a model says that does not hold for what is made from it.
STALE = ("metrics", "model-index", "metaphrase")
#: What the card of a Hub's model says that holds for what is made from it, too.
INHERITED = ("language", "license", "license_name", "license_link")
#: Bitext and test sets that come with the package.


@dataclass
class ExportOptions:
    """What is exported, what is left of it, and what it is measured on."""

    model: str = field(metadata={"help": "Encoder: a folder, a Hub id, or 'starter'. May stand first."})
    output_dir: str = field(metadata={"help": "New folder for the result."})
    languages: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Keep only the pieces of these languages and English, separated by spaces or commas, as they occur in "
            "the packaged bitext, --corpus and --texts."
        },
    )
    corpus: list[str] = field(
        default_factory=list, metadata={"help": "Bitext whose pieces are kept, as for `metaphrase train`."}
    )
    texts: list[str] = field(
        default_factory=list, metadata={"help": "Text whose pieces are kept, one sentence a line, packed or not."}
    )
    layers: int | None = field(
        default=None, metadata={"help": "Keep so many layers, evenly spread from the first to the last."}
    )
    keep_layers: list[int] = field(
        default_factory=list, metadata={"help": "Keep the layers of these numbers, from 0."}
    )
    format: Literal["safetensors", "onnx", "openvino"] = field(
        default="safetensors", metadata={"help": "What the result is for; onnx and openvino need further packages."}
    )
    quantize: Literal["int8", "arm64", "avx2", "avx512", "avx512_vnni"] | None = field(
        default=None,
        metadata={
            "help": "8-bit weights, for onnx and openvino. int8 suits this machine's kind of processor; the others name one "
            "for onnx."
        },
    )
    data: str | None = field(
        default=None,
        metadata={
            "help": "Folder of test sets xx-en.tsv.gz to measure on. Default: the packaged ones of the languages, test sets "
            "of the demo or the Declaration of Human Rights."
        },
    )
    split: str | None = field(
        default=None, metadata={"help": "Which of xx-en.dev.tsv.gz, xx-en.test.tsv.gz, … of --data."}
    )
    max_loss: float | None = field(
        default=None,
        metadata={"help": "Write nothing where a language loses significantly more than so many points of accuracy."},
    )
    batch_size: int = field(default=32, metadata={"help": "Sentences per forward pass."})
    resamples: int = field(default=RESAMPLES, metadata={"help": "Bootstrap resamples of intervals and tests."})
    seed: int = field(default=0, metadata={"help": "Seed of the bootstrap."})


def run(argv: Sequence[str]) -> int:
    """Change, measure, print, write; the exit status is 1 where the loss was too large to write anything."""
    arguments = ["--model", *argv] if argv and not argv[0].startswith("-") else list(argv)
    (options,) = parse("metaphrase export", [ExportOptions], arguments, description=DESCRIPTION, examples=EXAMPLES)
    _check(options)
    check_destination(options.output_dir)
    check_runtime(options.format)
    torch.set_flush_denormal(True)
    languages = dict.fromkeys(code for item in options.languages for code in item.replace(",", " ").split())
    languages.pop(TARGET_LANGUAGE, None)
    kept = _texts(options, languages)
    sets, names = _test_sets(options, list(languages))

    model = load_encoder(options.model)
    changed, done = _change(model, options, kept)
    before = _measure(model, options.model, options, sets)
    source = _source(options.model)
    calibration = kept
    if options.format == "openvino" and not kept:
        calibration = _sentences(load_parallel_folder(PACKAGED_DATA / "demo", split="train"))
    with drafted(
        changed,
        options.output_dir,
        format=options.format,
        quantize=options.quantize,
        texts=calibration[:1000],
        source=source,
    ) as draft:
        after = _measure(draft.model, options.output_dir, options, sets)
        comparison = compare(before, after, resamples=options.resamples, seed=options.seed)
        sizes = _sizes(model, changed, draft)
        lost = [
            language
            for language, row in comparison["languages"].items()
            if options.max_loss is not None and row["interval"][1] < -options.max_loss
        ]
        people: list[RenderableType] = [render_table(after, before, comparison), _size_table(sizes)]
        if lost:
            people.append(
                f"Wrote nothing: {', '.join(lost)} lost significantly more than {options.max_loss:g} points. Keep more of "
                "the model, or allow more with --max_loss."
            )
        else:
            for item in people:
                notes().print(item)
            people = []
            results = _results(comparison, names)
            own, text = _own_card(model, options, source)
            head = _metadata(own, model, draft, options, languages, results, ["metaphrase", "export", *argv])
            draft.publish(f"---\n{head}---\n\n{_card(text, options, source, done, sizes, comparison)}")
            people.append(f"Wrote {options.output_dir}: {'; '.join(done)}. {_how_to_load(options)}")
    result = {
        "model": options.model,
        "output_dir": options.output_dir,
        "written": not lost,
        "changes": done,
        "sizes": sizes,
        **comparison,
        "lost": lost,
        "options": asdict(options),
        "versions": versions(),
    }
    emit(result, *people)
    return 1 if lost else 0


def _check(options: ExportOptions) -> None:
    if options.layers is not None and options.keep_layers:
        raise UsageError("Give --layers or --keep_layers, not both.")
    if options.layers is not None and options.layers < 1:
        raise UsageError(f"--layers is how many layers to keep, at least 1; got {options.layers}.")
    if options.quantize is not None and options.format == "safetensors":
        raise UsageError("8-bit weights are for --format onnx or openvino; safetensors keeps the weights as they are.")
    if options.quantize in ONNX_INT8 and options.format == "openvino":
        raise UsageError(f"--quantize {options.quantize} is for onnx; openvino has int8.")
    trims = options.languages or options.corpus or options.texts
    if not (trims or options.layers or options.keep_layers or options.format != "safetensors"):
        raise UsageError(
            "Nothing is to be changed. Give languages (--languages, --corpus, --texts), layers (--layers, --keep_layers) or "
            "a --format."
        )


def _texts(options: ExportOptions, languages: dict[str, None]) -> list[str]:
    """Texts whose pieces are kept, none where the vocabulary stays; languages of the corpus are added to the others."""
    if not (options.languages or options.corpus or options.texts):
        return []
    texts = []
    packaged = {}
    for split in ("train", "dev"):  # not what is measured on
        packaged[split] = load_parallel_folder(PACKAGED_DATA / "demo", split=split)
        texts += [text for pairs in packaged[split].values() for text in pairs.targets]
    if options.corpus:
        sets, _ = read_corpus(options.corpus, languages=list(languages) or None)
        languages |= dict.fromkeys(sets)
        texts += _sentences(sets)
    for both in load_monolingual(options.texts) if options.texts else ():
        texts += both.split("\n")
    own = [language for language in languages if language in packaged["train"]]
    if not options.corpus and not options.texts and (without := [one for one in languages if one not in own]):
        raise UsageError(
            f"No text of {', '.join(without)} comes with the package (there is {', '.join(packaged['train'])}). Give some "
            "with --corpus or --texts."
        )
    for sets in packaged.values():
        texts += [text for language in own if language in sets for text in sets[language].sources]
    return texts


def _sentences(sets: Mapping[str, ParallelSet]) -> list[str]:
    return [text for pairs in sets.values() for text in (*pairs.sources, *pairs.targets)]


def _test_sets(options: ExportOptions, languages: Sequence[str]) -> tuple[dict[str, ParallelSet], dict[str, str]]:
    """What is measured on, by language, and the names of the folders that it comes from."""
    if options.data is not None:
        sets = load_parallel_folder(options.data, languages or None, options.split)
        return sets, dict.fromkeys(sets, Path(options.data).resolve().name)
    demo, udhr = (
        load_parallel_folder(PACKAGED_DATA / "demo", split="test"),
        load_parallel_folder(PACKAGED_DATA / "udhr"),
    )
    there = udhr | demo
    if missing := [language for language in languages if language not in there]:
        raise MissingFileError(
            f"No test set of {', '.join(missing)} comes with the package. Give a folder of test sets with --data."
        )
    sets = {language: there[language] for language in languages} or demo
    return sets, {language: "demo" if language in demo else "udhr" for language in sets}


def _change(
    model: SentenceTransformer, options: ExportOptions, texts: Sequence[str]
) -> tuple[SentenceTransformer, list[str]]:
    """The changed model, and what was done in words."""
    done = []
    changed = model
    if texts:
        changed = trim_vocabulary(changed, texts)
        done.append(f"{len(changed.tokenizer):,} of {len(model.tokenizer):,} pieces kept")
    if options.layers or options.keep_layers:
        count = model[0].auto_model.config.num_hidden_layers
        if options.layers is not None and options.layers > count:
            raise UsageError(f"--layers {options.layers} was asked for, but the encoder has {count}.")
        keep = options.keep_layers or spread(count, int(options.layers or 0))
        changed = prune_layers(changed, keep)
        done.append(f"layers {', '.join(map(str, sorted(set(keep))))} of {count} kept")
    if options.format != "safetensors":
        done.append(
            f"written for {options.format}" + (f" with 8-bit weights ({options.quantize})" if options.quantize else "")
        )
    return changed, done


def _measure(
    model: SentenceTransformer, name: str, options: ExportOptions, sets: Mapping[str, ParallelSet]
) -> dict[str, Any]:
    notes().print(f"Measuring {name} on {len(sets)} languages …", markup=False, highlight=False)
    return evaluate_retrieval(
        model,
        sets,
        name=name,
        prompt="auto",
        batch_size=options.batch_size,
        resamples=options.resamples,
        seed=options.seed,
        show_progress=show_progress(),
    ).to_dict()


def _sizes(model: SentenceTransformer, changed: SentenceTransformer, draft: Draft) -> dict[str, dict[str, float]]:
    encoders: list[Any] = [model[0].auto_model, changed[0].auto_model]
    pairs: dict[str, list[float]] = {
        "megabytes": [round(size / 1e6, 3) for size in (footprint(model), draft.size)],
        "pieces": [len(model.tokenizer), len(changed.tokenizer)],
        "layers": [encoder.config.num_hidden_layers for encoder in encoders],
        "parameters": [sum(tensor.numel() for tensor in encoder.parameters()) for encoder in encoders],
    }
    return {key: {"before": before, "after": after} for key, (before, after) in pairs.items()}


def _size_rows(sizes: Mapping[str, Mapping[str, float]]) -> Iterator[tuple[str, str, str]]:
    for name, pair in sizes.items():
        form = ",.1f" if name == "megabytes" else ","
        yield "MB on disk" if name == "megabytes" else name, format(pair["before"], form), format(pair["after"], form)


def _size_table(sizes: Mapping[str, Mapping[str, float]]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    shown.add_column("")
    for heading in ("before", "after"):
        shown.add_column(heading, justify="right")
    for row in _size_rows(sizes):
        shown.add_row(*map(Text, row))
    return shown


# The card


def _source(name: str) -> Path | None:
    """The folder that a model comes from, if it is one."""
    if name == STARTER:
        return starter.starter_path()
    return Path(name) if Path(name).is_dir() else None


def _own_card(model: SentenceTransformer, options: ExportOptions, source: Path | None) -> tuple[dict[str, Any], str]:
    """Metadata and text of the model's own card; of a Hub's model the metadata that hold for what is made from it."""
    path = source / CARD if source is not None else _card_of(options.model, model.model_card_data.base_model_revision)
    if path is None or not path.is_file():
        return {}, ""
    content = path.read_text(encoding="utf-8-sig", errors="replace")
    block = REGEX_YAML_BLOCK.search(content)
    text = content[block.end() :] if block else content
    try:
        metadata = (yaml.safe_load(block[2]) if block else None) or {}
    except yaml.YAMLError:
        metadata = None
    if not isinstance(metadata, dict):
        notes().print(f"The metadata of {path} cannot be read. Add the licence to the new card.", markup=False)
        metadata = {}
    if source is None:
        return {key: metadata[key] for key in INHERITED if key in metadata}, ""
    return metadata, text


def _card_of(name: str, revision: str | None) -> Path | None:
    """The card of a Hub's model, if it has one and that can be had."""
    try:
        path = cached_file(
            split_revision(name)[0],
            CARD,
            revision=revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except OSError:
        return None
    return None if path is None else Path(path)


def _results(comparison: Mapping[str, Any], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """What was measured, in the form of a card, language by language and, on one test set, over all of them."""
    card = AlignmentModelCardData()
    for name in dict.fromkeys(names.values()):
        rows = {language: row for language, row in comparison["languages"].items() if names[language] == name}
        card.add_comparison(name, {"languages": rows, "pooled": comparison["pooled"]})
    mixed = len(set(names.values())) > 1
    return [row for row in card.results if not (mixed and row["language"] == "all")]


def _metadata(
    own: Mapping[str, Any],
    model: SentenceTransformer,
    draft: Draft,
    options: ExportOptions,
    languages: Mapping[str, None],
    results: list[dict[str, Any]],
    command: Sequence[str],
) -> str:
    """The new card's metadata: those of the model's own card that still hold, and what was measured now."""
    card = AlignmentModelCardData(
        model_name=Path(options.output_dir).name,
        results=results,
        command=shlex.join(command),
        weights=draft.weights,
        tags=["sentence-transformers", "metaphrase"],
    )
    kept = {key: value for key, value in own.items() if key not in STALE}
    if options.model == STARTER:
        card.base_model, kept["license"] = starter.HUB_ID, "mit"
    elif _source(options.model) is None:
        card.base_model = split_revision(options.model)[0]
        card.base_model_revision = model.model_card_data.base_model_revision
    if card.base_model is not None:  # what an older card says of its own base is no longer the nearest
        for key in ("base_model", "base_model_relation"):
            kept.pop(key, None)
        if options.quantize is not None:
            kept["base_model_relation"] = "quantized"
    if options.languages or options.corpus or options.texts:
        kept.pop("language", None)
        card.language = [*languages, TARGET_LANGUAGE] if languages else None
    elif isinstance(kept.get("language"), list):
        kept["language"] = [
            "no" if code is False else code for code in kept["language"]
        ]  # Norwegian, as YAML reads it
    card.register_model(draft.model)
    new = yaml.safe_load(card.to_yaml())
    if "metaphrase" in own:
        new["metaphrase"]["source"] = own["metaphrase"]
    tags = kept.get("tags") or []
    tags = [tags] if isinstance(tags, str) else tags
    head = new | kept | {"tags": [*tags, *(tag for tag in new["tags"] if tag not in tags)]}
    return yaml.safe_dump(head, sort_keys=False, allow_unicode=True)


def _card(
    text: str,
    options: ExportOptions,
    source: Path | None,
    done: Sequence[str],
    sizes: Mapping[str, Mapping[str, float]],
    comparison: Mapping[str, Any],
) -> str:
    """The text of the model's own card with a section on what was done to it, or that section alone."""
    rows = [
        {
            "Language": language,
            "Pairs": row.get("n"),
            "Before": round(row["before"], 1),
            "After": round(row["after"], 1),
            "Difference": f"{row['difference']:+.1f} [{row['interval'][0]:+.1f}, {row['interval'][1]:+.1f}]",
            "Verdict": row["verdict"],
        }
        for language, row in [*comparison["languages"].items(), ("all", comparison["pooled"])]
    ]
    measured = table(rows)
    shrunk = table([{"": name, "Before": before, "After": after} for name, before, after in _size_rows(sizes)])
    base = starter.HUB_ID if options.model == STARTER else options.model
    said = (
        f"Made with `metaphrase export` from {cell(base if source is None else Path(base).name)}, without further training: "
        f"{cell('; '.join(done))}.\n\n{shrunk}\n\nAccuracy in percent of finding a sentence's translation, mean of both "
        f"directions; intervals and verdicts come from a paired bootstrap.\n\n{measured}\n\n{_how_to_load(options)}"
    )
    if text.strip():
        title, rest = _divided(text)
        return f"{title}\n## Exported\n\n{said}\n\nWhat follows describes the model before.\n{rest}"
    return f"# {cell(Path(options.output_dir).name)}\n\n{said}\n"


def _divided(text: str) -> tuple[str, str]:
    """A card's title, and the rest."""
    before, mark, after = f"\n{text}".partition("\n# ")
    if not mark:
        return "# Exported encoder\n", text
    title, _, rest = after.partition("\n")
    return f"# {title}\n", f"{before}{rest}"


def _how_to_load(options: ExportOptions) -> str:
    backend = "" if options.format == "safetensors" else f', backend="{options.format}"'
    return f'It loads as SentenceTransformer("{Path(options.output_dir).name}"{backend}).'
