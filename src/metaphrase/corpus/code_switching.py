"""Sentence-level code-switching with English, for fine-tuning on pairs of texts.

If the training data of a task was translated, each item ``(a, b)`` of two texts is replaced by ``(a, b in English)`` and
``(a in English, b)``, both in one batch::

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

Item = Mapping[str, Any]


@dataclass(frozen=True)
class PairedTexts:
    """The columns of items with two texts, each with an English original.

    Attributes:
        first: Column of the first text.
        second: Column of the second text.
        with_first: Columns that depend on the first text and change language with it.
        with_second: Columns that depend on the second text, such as the answers of question answering.
        suffix: Suffix of the columns of English originals.
    """

    first: str
    second: str
    with_first: tuple[str, ...] = ()
    with_second: tuple[str, ...] = ()
    suffix: str = "_en"

    @property
    def switched(self) -> tuple[str, ...]:
        """All columns with an English original."""
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
    """Create the two code-switched variants of an item.

    Args:
        item: The columns and their English originals. The originals of an English item are None, or its own texts.
        columns: The roles of the columns.

    Returns:
        ``(first, second in English)`` and ``(first in English, second)``; only the item itself if it is English. The other
        columns, such as labels, are copied; the columns of the originals are removed.

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
            f"Code-switching requires the columns {', '.join(columns.switched)} and their English originals "
            f"{', '.join(columns.originals)}, but {missing[0]!r} is missing (found {', '.join(sorted(item))}). Join the "
            "translated items with their English originals."
        )
    kept = {column: value for column, value in item.items() if column not in columns.originals}
    texts = (columns.first, columns.second)
    if all(item[column + columns.suffix] in (None, item[column]) for column in texts):
        return [kept]
    halves = ((columns.first, *columns.with_first), (columns.second, *columns.with_second))
    english_first, english_second = ({column: item[column + columns.suffix] for column in half} for half in halves)
    return [{**kept, **english_second}, {**kept, **english_first}]


@dataclass(frozen=True)
class CodeSwitchingCollator:
    """Expands every item of a batch into its variants and passes them to another collator.

    Both variants are always in one batch, which has twice as many rows as items: 16 items for the paper's 32. The trainer
    requires ``remove_unused_columns=False``.
    """

    collate: Callable[[list[dict[str, Any]]], Any]
    columns: PairedTexts

    def __call__(self, items: Sequence[Item]) -> Any:
        """Create the batch of all variants; the variants of an item are adjacent."""
        return self.collate([variant for item in items for variant in code_switched(item, self.columns)])
