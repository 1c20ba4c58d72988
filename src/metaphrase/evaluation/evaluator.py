"""Base class of the evaluators of sentence embeddings: encoding, and recording of metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.evaluation import BaseEvaluator

from metaphrase.evaluation.encoding import Encode, EncodingOptions
from metaphrase.io.arguments import Count, checked
from metaphrase.io.files import append_csv


@checked
class EmbeddingEvaluator(BaseEvaluator):
    """An evaluator of sentence embeddings; subclasses set `kind` and `metric`, and compute the scores.

    Args:
        sets: The data per language.
        name: Name of the data set.
        batch_size: Texts per forward pass.
        prompt: Text before each text; None for no prompt, ``"auto"`` for the prompts that the model stores.
        show_progress_bar: Show a progress bar while encoding.
        write_csv: Append a line to ``{kind}_evaluation_{name}_results.csv`` in the output folder at each evaluation.
        encode: Replaces ``model.encode``, with its signature.

    Attributes:
        kind: What is evaluated, in the name of the CSV file.
        metric: Name of the primary metric.
    """

    kind: ClassVar[str]
    metric: ClassVar[str]

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
        super().__init__()
        self.primary_metric = self.metric
        self.sets = dict(sets)
        self.name = name
        self.encoding: EncodingOptions = {
            "prompt": prompt,
            "batch_size": batch_size,
            "show_progress": show_progress_bar,
            "encode": encode,
        }
        self.write_csv = write_csv
        self.csv_file = f"{self.kind}_evaluation{'_' * bool(name)}{name}_results.csv"

    def record(
        self,
        model: SentenceTransformer,
        scores: Mapping[str, float],
        output_path: str | None,
        epoch: int,
        steps: int,
        *,
        on_card: Callable[[str], bool] = lambda metric: True,
    ) -> dict[str, float]:
        """Append scores to the CSV file and, where `on_card` accepts their names, to the model card; return the metrics."""
        if output_path is not None and self.write_csv:
            append_csv(Path(output_path) / self.csv_file, {"epoch": epoch, "steps": steps, **scores})
        metrics: dict[str, float] = self.prefix_name_to_metrics(dict(scores), self.name)
        shown = {metric: value for metric, value in metrics.items() if on_card(metric)}
        self.store_metrics_in_model_card_data(model, shown, epoch, steps)
        return metrics

    def get_config_dict(self) -> dict[str, Any]:
        """Settings for the model card."""
        prompt = self.encoding["prompt"]
        return {"prompt": prompt} if prompt else {}
