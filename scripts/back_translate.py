"""Add back-translations to a bitext, in the columns ``source_bt`` and ``target_bt``, for the sentence contrast.

    python scripts/back_translate.py --corpus sw-en.tsv.gz --output sw-en.bt.tsv.gz \
        --to_source Helsinki-NLP/opus-mt-en-sw --to_target Helsinki-NLP/opus-mt-sw-en
    python scripts/back_translate.py --corpus corpus/ --output corpus.bt.parquet --method top-k --codes sw=swh_Latn \
        en=eng_Latn --to_source facebook/nllb-200-distilled-600M --to_target facebook/nllb-200-distilled-600M

``source_bt`` contains translations of the target into the source language, ``target_bt`` translations of the source into
the target language. Each sentence has several translations, separated by `` ||| `` (Li et al. 2021, section 2.4: beam
search or top-k sampling). Any sequence-to-sequence model from the Hub or a folder works, if its weights are in safetensors
format; a model that has only a pickle is not loaded. Multilingual models (NLLB, M2M-100, mBART) require ``--codes``. The
corpus is read as by ``metaphrase train``, but not cleaned.

Finished shards are stored in ``<output>.partial``, from which an interrupted run resumes. The output is written once it is
complete. The same input, options and device produce the same text, however often the run is interrupted.
"""

from __future__ import annotations

import logging
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset
from stored_results import reports_errors
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, HfArgumentParser

from metaphrase.corpus import Corpus, load_corpus
from metaphrase.corpus.files import find_files
from metaphrase.corpus.rows import SEPARATOR
from metaphrase.corpus.writing import check_format, write_corpus
from metaphrase.encoders.checks import check_tokenizer, load_complete
from metaphrase.encoders.folders import open_model
from metaphrase.encoders.loading import find_model
from metaphrase.io.arguments import Count, checked
from metaphrase.io.configuration import option
from metaphrase.io.digests import weights_digest
from metaphrase.io.files import read_json, write_json
from metaphrase.io.outputs import check_files
from metaphrase.io.progress import progress_bars
from metaphrase.io.work_folders import clear_work_folder, open_work_folder, work_folder_of

#: Options on which the text does not depend, or only through the content of the files that they name.
NOT_DECISIVE = {"corpus", "output", "device"}


@checked
@dataclass
class Options:
    """Add back-translations to a bitext, in the columns source_bt and target_bt."""

    corpus: list[str] = option(help="Bitext: TSV, JSONL, Parquet, Moses 'x.sw,x.en', a folder, hf:org/name.")
    output: str = option(help="Output file: .tsv, .jsonl (both also .gz) or .parquet.")
    to_source: str | None = option(None, "Model that translates targets into the source language, for source_bt.")
    to_target: str | None = option(None, "Model that translates sources into the target language, for target_bt.")
    languages: list[str] = option([], "Languages to read, or the language of a single file.")
    codes: list[str] = option([], "Language codes of a multilingual model, e.g. sw=swh_Latn en=eng_Latn.")
    to_source_prefix: str = option("", "Prefix of each target, e.g. '>>swh<< '.")
    to_target_prefix: str = option("", "Prefix of each source.")
    method: Literal["beam", "top-k"] = option("beam", "beam (the best hypotheses) or top-k (samples).")
    num: Count = option(4, "Number of translations per sentence; duplicates are removed.")
    beams: Count = option(5, "beam: beam size, at least --num.")
    top_k: Count = option(10, "top-k: number of candidate pieces.")
    max_length: Count = option(128, "Maximum length of inputs and translations in pieces.")
    batch_size: Count = option(32, "Sentences translated at a time.")
    shard_size: Count = option(1000, "Pairs between two saves.")
    dtype: str = option("float32", "Data type of the models, e.g. bfloat16.")
    seed: int = option(42, "Seed of the sampling.")
    device: str | None = option(None, "Device, e.g. cuda:1 (default: a GPU if available).")


@dataclass
class Job:
    """One direction: the column to read, the column to write, and the model."""

    column: str
    read: str
    languages: tuple[str, str]
    prefix: str
    model: Any
    tokenizer: Any


def jobs_of(options: Options) -> list[Job]:
    """Return the directions that have a model."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    jobs = []
    for side, other in (("source", "target"), ("target", "source")):
        name = getattr(options, f"to_{side}")
        if name is not None:
            dtype = getattr(torch, options.dtype)
            called, folder = find_model(name)
            with open_model(called, folder) as files:
                model = load_complete(AutoModelForSeq2SeqLM.from_pretrained, files, called, dtype=dtype)
                tokenizer = AutoTokenizer.from_pretrained(files)
            check_tokenizer(tokenizer, model, called)
            languages = (f"{other}_lang", f"{side}_lang")
            prefix = getattr(options, f"to_{side}_prefix")
            jobs.append(Job(f"{side}_bt", other, languages, prefix, model.to(device).eval(), tokenizer))
    return jobs


def parse_codes(items: Sequence[str]) -> dict[str, str]:
    """Parse the language codes of the model.

    >>> parse_codes(["sw=swh_Latn"])
    {'sw': 'swh_Latn'}
    """
    pairs = [item.partition("=") for item in items]
    if wrong := [item for item, (_, equals, code) in zip(items, pairs, strict=True) if not equals or not code]:
        raise ValueError(f"--codes expects the form sw=swh_Latn, got {wrong[0]!r}.")
    return {language: code for language, _, code in pairs}


def forced_piece(tokenizer: Any, code: str) -> int:
    """Return the piece that selects the output language of a multilingual model."""
    for piece in (code, f"__{code}__"):  # M2M-100 has underscores around its codes
        if (number := tokenizer.get_vocab().get(piece)) is not None:
            return number
    raise ValueError(
        f"The model does not know the language code {code!r}. See its card for the codes, and give --codes."
    )


def language_settings(job: Job, languages: tuple[str, str], codes: dict[str, str]) -> dict[str, Any]:
    """Prepare the tokenizer for a pair of languages, and return further arguments of the model."""
    if not codes:
        return {}
    if missing := [language for language in languages if language not in codes]:
        raise ValueError(f"--codes has no code for {missing[0]!r}, only for {', '.join(codes)}.")
    read, written = (codes[language] for language in languages)
    forced_piece(job.tokenizer, read)
    job.tokenizer.src_lang = read
    return {"forced_bos_token_id": forced_piece(job.tokenizer, written)}


@torch.inference_mode()
def translate(job: Job, texts: Sequence[str], options: Options, settings: dict[str, Any]) -> list[str]:
    """Translate texts in batches of similar length; the translations of a text are joined by the separator."""
    if options.method == "beam":
        search = {"num_beams": max(options.beams, options.num), "do_sample": False}
    else:
        search = {"num_beams": 1, "do_sample": True, "top_k": options.top_k}
    prefixed = [job.prefix + text for text in texts]
    encoded = job.tokenizer(prefixed, truncation=True, max_length=options.max_length)
    order = sorted(range(len(texts)), key=lambda row: len(encoded["input_ids"][row]), reverse=True)
    joined = [""] * len(texts)
    for start in range(0, len(order), options.batch_size):
        rows = order[start : start + options.batch_size]
        inputs = job.tokenizer.pad(
            {key: [values[row] for row in rows] for key, values in encoded.items()}, return_tensors="pt"
        )
        ids = job.model.generate(
            input_ids=inputs["input_ids"].to(job.model.device),
            attention_mask=inputs["attention_mask"].to(job.model.device),
            max_new_tokens=options.max_length,
            num_return_sequences=options.num,
            **search,
            **settings,
        )
        written = job.tokenizer.batch_decode(ids, skip_special_tokens=True)
        for at, row in enumerate(rows):
            alternatives = (clean(text) for text in written[at * options.num : (at + 1) * options.num])
            joined[row] = SEPARATOR.join(dict.fromkeys(filter(None, alternatives)))
    return joined


def clean(text: str) -> str:
    """Return the text on one line, without the separator of translations."""
    return " ".join(text.replace(SEPARATOR.strip(), " ").split())


def translate_shard(
    jobs: Sequence[Job], rows: Sequence[dict[str, Any]], options: Options, seed: int
) -> dict[str, Any]:
    """Return the new columns of some rows."""
    codes = parse_codes(options.codes)
    columns: dict[str, list[str]] = {}
    for job in jobs:
        torch.manual_seed(seed)
        of_languages: dict[tuple[str, str], list[int]] = defaultdict(list)
        for number, row in enumerate(rows):
            of_languages[tuple(row[name] for name in job.languages) if codes else ("", "")].append(number)
        column = [""] * len(rows)
        for languages, numbers in of_languages.items():
            settings = language_settings(job, languages, codes)
            translations = translate(job, [rows[number][job.read] for number in numbers], options, settings)
            for number, translation in zip(numbers, translations, strict=True):
                column[number] = translation
        columns[job.column] = column
    return columns


def manifest_of(options: Options, corpus: Corpus, jobs: Sequence[Job]) -> dict[str, Any]:
    """Return everything that determines the translations."""
    chosen = {name: value for name, value in asdict(options).items() if name not in NOT_DECISIVE}
    files = [file["sha256"] or [file["path"], file.get("revision")] for file in corpus.files]
    weights = {job.column: weights_digest(job.model) for job in jobs}
    return {"files": files, "pairs": len(corpus.dataset), "weights": weights, **chosen}


def back_translate(options: Options) -> Dataset:
    """Translate and save shard by shard, then write the corpus with its new columns."""
    if options.to_source is None and options.to_target is None:
        raise ValueError("Nothing to do: pass --to_source, --to_target or both.")
    if not isinstance(getattr(torch, options.dtype, None), torch.dtype):
        raise ValueError(f"--dtype expects a data type of torch, such as float32 or bfloat16, got {options.dtype!r}.")
    parse_codes(options.codes)
    check_format(options.output)
    files = find_files(options.corpus, languages=options.languages or None)
    check_files([options.output], [path for file in files for path in file.paths])
    with work_folder_of(options.output) as work:
        return translate_corpus(options, work)


def translate_corpus(options: Options, parts: Path) -> Dataset:
    """Do the work of :func:`back_translate`, with a folder for finished shards."""
    corpus = load_corpus(options.corpus, languages=options.languages or None, cleaning=None)
    dataset: Dataset = corpus.dataset
    jobs = jobs_of(options)
    open_work_folder(parts, manifest_of(options, corpus, jobs))
    shards = range(0, len(dataset), options.shard_size)
    with progress_bars(True) as begin:
        advance = begin("pairs", len(dataset))
        for number, start in enumerate(shards):
            path = parts / f"{number:06}.json"
            rows = dataset.select(range(start, min(start + options.shard_size, len(dataset)))).to_list()
            if not path.exists():
                write_json(path, translate_shard(jobs, rows, options, options.seed + number))
            advance(len(rows))
    filled: dict[str, list[str]] = {"source_bt": [], "target_bt": []}
    for number in range(len(shards)):
        for column, texts in read_json(parts / f"{number:06}.json").items():
            filled[column] += texts
    for column, texts in filled.items():
        if texts or column not in dataset.column_names:
            dataset = dataset.remove_columns([column] if column in dataset.column_names else [])
            dataset = dataset.add_column(column, texts or [""] * len(dataset))
    write_corpus(dataset, options.output)
    clear_work_folder(parts)
    return dataset


@reports_errors
def main(argv: list[str] | None = None) -> int:
    """Parse the options, translate, and print the number of pairs."""
    logging.basicConfig(format="%(message)s")
    torch.set_flush_denormal(True)
    (options,) = HfArgumentParser(Options, description=Options.__doc__).parse_args_into_dataclasses(argv)
    dataset = back_translate(options)
    for column in ("source_bt", "target_bt"):
        counts = [text.count(SEPARATOR) + 1 for text in dataset[column] if text]
        print(f"{column}: {sum(counts):,} translations of {len(counts):,} of {len(dataset):,} sentences")
    return 0


if __name__ == "__main__":
    sys.exit(main())
