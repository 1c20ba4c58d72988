"""Base classes of evaluators: encoding, and recording of metrics."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.evaluation import BaseEvaluator

from metaphrase.evaluation.encoding import Encode, EncodingOptions
from metaphrase.exceptions import UsageError
from metaphrase.io.arguments import Count, checked
from metaphrase.io.files import append_csv

logger = logging.getLogger(__name__)


def is_fraction(metric: str) -> bool:
    """Whether evaluators return a metric as a fraction: accuracies and guards."""
    return metric.endswith("accuracy") or metric.startswith("eval_guard_")


class RecordedEvaluator(BaseEvaluator):
    """An evaluator whose scores go to the log, to a CSV file and to the model card; subclasses set `kind` and `metric`."""

    #: What is evaluated, in the name of the CSV file, and name of the primary metric.
    kind: ClassVar[str]
    metric: ClassVar[str]
    #: How the names of the metrics end that are added to the model card; None for no metrics.
    on_card: ClassVar[str | None] = ""

    def __init__(self, *, name: str = "", write_csv: bool = True) -> None:
        super().__init__()
        self.primary_metric = self.metric
        self.name = name
        self.write_csv = write_csv
        self.csv_file = f"{self.kind}_evaluation{'_' * bool(name)}{name}_results.csv"

    @abstractmethod
    def scores(self, model: SentenceTransformer) -> dict[str, float]:
        """Measure a model."""

    def __call__(
        self, model: SentenceTransformer, output_path: str | None = None, epoch: int = -1, steps: int = -1
    ) -> dict[str, float]:
        """Evaluate a model; see `BaseEvaluator` for the arguments."""
        scores = self.scores(model)
        percent = 100 * scores[self.metric]
        described = f"{self.description} {self.name}".strip()
        logger.info("%s at step %d: %s %.1f %%", described, steps, self.metric, percent)
        if output_path is not None and self.write_csv:
            append_csv(Path(output_path) / self.csv_file, {"epoch": epoch, "steps": steps, **scores})
        metrics: dict[str, float] = self.prefix_name_to_metrics(dict(scores), self.name)
        if isinstance(model, SentenceTransformer) and self.on_card is not None:
            shown = {metric: value for metric, value in metrics.items() if metric.endswith(self.on_card)}
            self.store_metrics_in_model_card_data(model, shown, epoch, steps)
        return metrics


@checked
class EmbeddingEvaluator(RecordedEvaluator):
    """An evaluator of sentence embeddings.

    As in sentence-transformers' evaluators, the metrics are fractions, their names start with the name of the evaluator, and
    each evaluation appends a line to ``{kind}_evaluation_{name}_results.csv`` in the output folder.

    Args:
        sets: The data per language.
        name: Name of the data set.
        batch_size: Texts per forward pass.
        prompt: Text before each text; None for no prompt, ``"auto"`` for the prompts that the model stores.
        show_progress_bar: Show a progress bar while encoding.
        write_csv: Write the CSV file.
        encode: Replaces ``model.encode``, with its signature.

    Raises:
        UsageError: The data are not those of languages, or there are none.
    """

    def __init__(
        self,
        sets: Mapping[str, Any],
        *,
        name: str = "",
        batch_size: Count = 32,
        prompt: str | None = None,
        show_progress_bar: bool = False,
        write_csv: bool = True,
        encode: Encode | None = None,
    ) -> None:
        super().__init__(name=name, write_csv=write_csv)
        if not isinstance(sets, Mapping) or not sets:
            raise UsageError(
                f"{type(self).__name__} requires a dictionary with the data of each language, but got {sets!r:.80}. Read "
                "a folder of sentence pairs with load_parallel_folder(folder)."
            )
        self.sets = dict(sets)
        self.encoding: EncodingOptions = {
            "prompt": prompt,
            "batch_size": batch_size,
            "show_progress": show_progress_bar,
            "encode": encode,
        }

    def get_config_dict(self) -> dict[str, Any]:
        """Settings for the model card."""
        prompt = self.encoding["prompt"]
        return {"prompt": prompt} if prompt else {}
