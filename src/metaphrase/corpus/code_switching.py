"""Sentence-level code-switching with English, for fine-tuning on pairs of texts.

Where the training data of a task was translated, each item ``(a, b)`` of two texts is trained on as ``(a, b in English)``
and ``(a in English, b)``, both in one batch, and no longer as it was::

    dataset = ...  # premise hypothesis premise_en hypothesis_en label
    Trainer(train_dataset=dataset, data_collator=CodeSwitchingCollator(collate, NLI), args=TrainingArguments(
        per_device_train_batch_size=16,  # couples, that is batches of 32
        remove_unused_columns=False,
    ))

Reference: Pan et al. 2021 (PPA), section 2.3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset, Features

Item = Mapping[str, Any]


@dataclass(frozen=True)
class PairedTexts:
    """The columns of items of two texts, each of which has an English original.

    Attributes:
        first: Column of the first text.
        second: Column of the second text.
        with_first: Columns that speak of the first text and change language with it.
        with_second: Likewise for the second; in question answering the answers, which lie in the context.
        suffix: Behind a column's name it names the column of the English original.
    """

    first: str
    second: str
    with_first: tuple[str, ...] = ()
    with_second: tuple[str, ...] = ()
    suffix: str = "_en"

    @property
    def switched(self) -> tuple[str, ...]:
        """All columns that have an English original."""
        return (self.first, *self.with_first, self.second, *self.with_second)

    @property
    def originals(self) -> tuple[str, ...]:
        """The columns of the English originals."""
        return tuple(column + self.suffix for column in self.switched)


#: Natural language inference as in MultiNLI and XNLI.
NLI = PairedTexts("premise", "hypothesis")

#: Paraphrases as in PAWS-X.
PARAPHRASES = PairedTexts("sentence1", "sentence2")

#: Question answering as in SQuAD and MLQA: ``answers`` holds ``text`` and ``answer_start`` in the context.
QUESTION_ANSWERING = PairedTexts("question", "context", with_second=("answers",))


def code_switched(item: Item, columns: PairedTexts) -> list[dict[str, Any]]:
    """The two code-switched variants of an item, in place of it.

    Args:
        item: Has the columns and their English originals. An item that is English itself has nothing (None) for originals,
            or its own texts.
        columns: Which columns hold what.

    Returns:
        ``(first, second in English)`` and ``(first in English, second)``; the item alone if it is English. The other
        columns, labels among them, are copied; those of the originals are left out.

    Raises:
        ValueError: A column is missing.

    Reference: Pan et al. 2021 (PPA), section 2.3.

    >>> item = {"premise": "Il pleut.", "premise_en": "It rains.", "hypothesis": "Il fait beau.",
    ...         "hypothesis_en": "The sun shines.", "label": 2}
    >>> for variant in code_switched(item, NLI):
    ...     print(variant)
    {'premise': 'Il pleut.', 'hypothesis': 'The sun shines.', 'label': 2}
    {'premise': 'It rains.', 'hypothesis': 'Il fait beau.', 'label': 2}
    """
    if missing := [column for column in (*columns.switched, *columns.originals) if column not in item]:
        raise ValueError(
            f"Code-switching reads the columns {', '.join(columns.switched)} and their English originals "
            f"{', '.join(columns.originals)}, but {missing[0]!r} is missing (found {', '.join(sorted(item))}). Join the "
            "translated items with the English ones that they were made from."
        )
    kept = {column: value for column, value in item.items() if column not in columns.originals}
    texts = (columns.first, columns.second)
    if all(item[column + columns.suffix] in (None, item[column]) for column in texts):
        return [kept]
    halves = ((columns.first, *columns.with_first), (columns.second, *columns.with_second))
    english_first, english_second = ({column: item[column + columns.suffix] for column in half} for half in halves)
    return [{**kept, **english_second}, {**kept, **english_first}]


def code_switch(dataset: Dataset, columns: PairedTexts) -> Dataset:
    """A data set with the variants of each item, one behind the other, in place of it.

    A trainer that shuffles it tears the variants apart; to have them in one batch, leave the data set as it is and use
    :class:`CodeSwitchingCollator`.

    Args:
        dataset: Rows as :func:`code_switched` takes them.
        columns: Which columns hold what.

    Returns:
        The data set without the columns of the English originals.
    """

    def expand(batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        items = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        variants = [variant for item in items for variant in code_switched(item, columns)]
        return {column: [variant[column] for variant in variants] for column in variants[0]}

    features = Features({name: kind for name, kind in dataset.features.items() if name not in columns.originals})
    return dataset.map(expand, batched=True, remove_columns=dataset.column_names, features=features)


@dataclass(frozen=True)
class CodeSwitchingCollator:
    """Expands every item of a batch into its variants and hands them to another collator.

    So both variants are always in one batch, which has twice as many rows as items: 16 items for the paper's 32. The
    trainer needs ``remove_unused_columns=False``.

    Attributes:
        collate: Turns rows into a batch; it tokenises them.
        columns: Which columns hold what.
    """

    collate: Callable[[list[dict[str, Any]]], Any]
    columns: PairedTexts

    def __call__(self, items: Sequence[Item]) -> Any:
        """The batch of all variants, those of an item one behind the other."""
        return self.collate([variant for item in items for variant in code_switched(item, self.columns)])
