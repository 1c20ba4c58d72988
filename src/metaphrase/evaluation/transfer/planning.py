"""Training, dev and test data of a benchmark: read or split, and distributed over the training runs of a mode."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from datasets import Dataset, concatenate_datasets

from metaphrase.corpus.code_switching import PairedTexts
from metaphrase.evaluation.transfer.data import ENGLISH, Format, Languages, TransferData, read_languages
from metaphrase.evaluation.transfer.options import FineTuningOptions, Mode
from metaphrase.exceptions import DataError, UsageError
from metaphrase.io.configuration import split_list

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """A training run, and the languages that its model is measured in. Code-switched data have the English originals as
    further columns.
    """

    train: Dataset
    languages: tuple[str, ...]
    couples: bool = False


def load_benchmark(
    options: FineTuningOptions, form: Format, *, seed: int, files: Sequence[Path] | None = None
) -> TransferData:
    """Read the data that the options name. If ``files`` are given, only these are read from folders.

    ``seed`` splits the data, unless the options have ``split_seed``.
    """
    seed = seed if options.split_seed is None else options.split_seed
    read = partial(read_languages, form=form, files=files)
    languages = split_list(options.languages or ()) or None
    trained = [ENGLISH] if options.mode == "zero-shot" else _with_english(languages)
    chosen_by = [ENGLISH] if options.selection == "english" else languages
    if options.halves is not None:
        if options.train or options.dev or options.test:
            raise UsageError("--halves replaces --train, --dev and --test. Pass either --halves or the other three.")
        sets = read(options.halves, split="dev", languages=_with_english(languages))
        if options.dev_share >= 0.5:
            raise UsageError("With --halves, --dev_share is taken from the training half, so it must be below 0.5.")
        shares = {"test": 0.5, "dev": 0.0 if options.selection == "last" else options.dev_share, "train": 1.0}
        parts = split_items(sets, form.group, shares, seed=seed)
        chosen = {"train": trained, "dev": languages and chosen_by, "test": languages}
        train, dev, test = (select_languages(parts[part], some) for part, some in chosen.items())
    else:
        if options.train is None or options.test is None:
            raise UsageError("Pass --train and --test, or --halves.")
        train = read(options.train, split="train", languages=trained)
        test = read(options.test, split="test", languages=languages)
        if options.selection == "last":
            dev = {}
        elif options.dev is not None:
            dev = read(options.dev, split="dev", languages=chosen_by)
        else:
            shares = {"dev": options.dev_share, "train": 1.0}
            parts = split_items(train, form.group, shares, seed=seed, others="train")
            train, dev = parts["train"], parts["dev"]
    if not dev and options.selection != "last":
        logger.warning("No dev items are left at --dev_share %g: the last checkpoint is measured.", options.dev_share)
    return TransferData(
        train={code: _head(data, options.limit_train) for code, data in train.items()},
        dev={code: _head(data, options.limit_test) for code, data in dev.items() if len(data)},
        test={code: _head(data, options.limit_test) for code, data in test.items() if len(data)},
    )


def split_items(
    sets: Languages, group: str, shares: Mapping[str, float], *, seed: int, others: str | None = None
) -> dict[str, Languages]:
    """Distribute the items over parts, which are filled one by one with random groups; the last receives the rest.

    English items with the same premise or paragraph are a group. The translations of an item are in the same part. Items
    without an English one are in the part ``others``, or in none.

    Raises:
        DataError: No item of a language is in a part.
    """
    english = _english(sets, "items are split by their English texts")
    members: dict[str, list[str]] = {}
    for item, key in zip(english["item"], english[group], strict=True):
        members.setdefault(key, []).append(item)
    keys = sorted(members)
    random.Random(seed).shuffle(keys)
    parts, dealt = iter(shares.items()), 0
    part_of: dict[str, str] = {}
    part, bound = next(parts)
    for key in keys:
        while dealt >= round(bound * len(english)) and (following := next(parts, None)) is not None:
            part, share = following
            bound += share
        part_of.update((item, part) for item in members[key])
        dealt += len(members[key])
    for language, data in sets.items():
        if others is None and len(data) and not any(item in part_of for item in data["item"]):
            raise DataError(
                f"The items of {language} cannot be split: none has the identifier of an English item. Pass --train and "
                "--test instead of --halves."
            )
    return {
        part: {
            language: data.select([at for at, item in enumerate(data["item"]) if part_of.get(item, others) == part])
            for language, data in sets.items()
        }
        for part in shares
    }


def _english(sets: Languages, reason: str) -> Dataset:
    if ENGLISH not in sets:
        raise DataError(f"There are no English data, only {', '.join(sets)}, but {reason}. Add the English file.")
    return sets[ENGLISH]


def with_originals(translated: Dataset, english: Dataset, columns: PairedTexts) -> Dataset:
    """Add the English originals as columns to translated items, for code-switching."""
    place = {item: at for at, item in enumerate(english["item"])}
    rows = []
    for row in translated:
        if row["item"] in place:
            original = english[place[row["item"]]]
            rows.append(row | {column + columns.suffix: original[column] for column in columns.switched})
    if not rows:
        raise DataError("No translated item has an English original. Their identifiers differ.")
    if len(rows) < len(translated):
        logger.info("%d of %d items have no English original.", len(translated) - len(rows), len(translated))
    return Dataset.from_list(rows)


def select_languages(sets: Languages, languages: Sequence[str] | None) -> Languages:
    """The sets of some languages; None for all."""
    return {language: data for language, data in sets.items() if languages is None or language in languages}


def _with_english(languages: list[str] | None) -> list[str] | None:
    return languages and list(dict.fromkeys([ENGLISH, *languages]))


def _head(data: Dataset, limit: int | None) -> Dataset:
    return data if limit is None else data.select(range(min(limit, len(data))))


def plan(benchmark: TransferData, mode: Mode, originals: PairedTexts | None) -> dict[str, Run]:
    """The training runs of a mode, by name."""
    tested = tuple(benchmark.test)
    if empty := [language for language, data in benchmark.train.items() if not len(data)]:
        raise DataError(f"No training items are left in {', '.join(empty)}. Lower --dev_share, or add data.")
    if mode == "zero-shot":
        return {ENGLISH: Run(benchmark.train[ENGLISH], tested)}
    if mode == "translate-train-all":
        return {"all": Run(concatenate_datasets(list(benchmark.train.values())), tested)}
    if missing := sorted(set(tested) - set(benchmark.train)):
        raise ValueError(
            f"Mode {mode} trains a model for each language, but {', '.join(missing)} has no training data."
        )
    if mode == "translate-train":
        return {language: Run(benchmark.train[language], (language,)) for language in tested}
    if originals is None:
        raise ValueError("Code-switching needs items of two texts, but the items of this task have one.")
    english, runs = _english(benchmark.train, "code-switching needs the English originals"), {}
    for language in tested:
        data, switched = benchmark.train[language], language != ENGLISH
        runs[language] = Run(
            with_originals(data, english, originals) if switched else data, (language,), couples=switched
        )
    return runs
