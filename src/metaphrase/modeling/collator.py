"""The data collator: builds the views that a recipe requires from a batch of examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from metaphrase.corpus.rows import COLUMNS, OPTIONAL
from metaphrase.exceptions import CorpusError
from metaphrase.io.arguments import Seed, checked
from metaphrase.modeling.views import Batch, Example, View, fingerprint

#: How to add the columns that some views require.
REMEDIES = {
    "alignment": "Add word links with `metaphrase align`, or `metaphrase.aligners.linking.add_alignment`.",
    "monolingual": "Mix text in with `--monolingual`, or `metaphrase.corpus.monolingual.with_monolingual`.",
    "source_bt": "Fill it with scripts/back_translate.py.",
    "target_bt": "Fill it with scripts/back_translate.py.",
    "negatives": "Mine them with `metaphrase filter CORPUS --negatives 3 -o OUT`. Those of pairs from English are "
    "not read: negatives are in English.",
}
_OTHER_REMEDY = (
    "Add it in Python with `dataset.add_column`; the columns that are read from the files of a corpus are "
    f"{', '.join((*COLUMNS, *OPTIONAL))}."
)


@checked
@dataclass
class ParallelCollator:
    """Build every view of a batch once.

    Attributes:
        tokenizer: The encoder's tokenizer.
        views: The views that the objectives require.
        seed: Random seed of the views.
        valid_label_columns: Always empty; no column of a bitext is a label.
    """

    tokenizer: PreTrainedTokenizerBase
    views: tuple[View, ...]
    seed: Seed = 42
    valid_label_columns: list[str] = field(default_factory=list)
    _epoch: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64).share_memory_(), repr=False)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which seeds the randomness of the views, in all worker processes."""
        self._epoch.fill_(epoch)

    def __call__(self, examples: Sequence[Example]) -> dict[str, dict[str, Tensor]]:
        """Build the views of a batch.

        Args:
            examples: Rows with the columns ``source`` and ``target`` and those that the views require.

        Returns:
            ``{view: {feature: tensor}}``.

        Raises:
            CorpusError: As in :meth:`check`.
        """
        self.check(examples)
        epoch = int(self._epoch)
        seeds = [(self.seed, epoch, fingerprint(example["source"], example["target"])) for example in examples]
        batch = Batch(examples, self.tokenizer)
        return {view.name: view.build(batch, [np.random.default_rng(seed) for seed in seeds]) for view in self.views}

    def check(self, examples: Sequence[Example]) -> None:
        """Refuse rows of which no batch can be built.

        Raises:
            CorpusError: The rows are not dictionaries, a column is missing, or a sentence is not text.
        """
        if not isinstance(examples[0], Mapping):
            kind = type(examples[0])
            raise CorpusError(
                f"The rows of a bitext must be dictionaries, but are of type {kind.__module__}.{kind.__qualname__}. Reset "
                "the format of the data set: `dataset.with_format(None)`."
            )
        if missing := {"source", "target"} - examples[0].keys():
            raise CorpusError(
                f"A bitext requires the columns 'source' and 'target', but {sorted(missing)} is missing "
                f"(found {sorted(examples[0])}). Rename the columns, or read the corpus with `load_corpus`."
            )
        for example in examples:
            if not (isinstance(example["source"], str) and isinstance(example["target"], str)):
                raise CorpusError(
                    f"'source' and 'target' must be text, but a row has {example['source']!r} and {example['target']!r}. "
                    "Remove such rows, for example with `dataset.filter`, or read the corpus with `load_corpus`."
                )
        for view in self.views:
            if missing := set(view.columns) - examples[0].keys():
                column = min(missing)
                raise CorpusError(
                    f"View {view.name!r} reads the column {column!r}, which is missing (found {sorted(examples[0])}). "
                    f"{REMEDIES.get(column, _OTHER_REMEDY)}"
                )
