"""What the evaluators of sentence embeddings have in common: how they encode, and where their metrics go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.evaluation import BaseEvaluator

from metaphrase.evaluation.encoding import Encode, EncodingOptions
from metaphrase.io.arguments import Count, checked
from metaphrase.io.files import append_csv


@checked
class EmbeddingEvaluator(BaseEvaluator):
    """An evaluator of sentence embeddings; subclasses set `primary_metric` and `kind`, and compute the scores.

    Attributes:
        name: Name of the data set.
        encoding: How texts are embedded.
        write_csv: Whether each evaluation appends a line to `csv_file` in the output folder.
        csv_file: ``{kind}_evaluation_{name}_results.csv``.
    """

    kind: str

    def __init__(
        self,
        name: str,
        *,
        batch_size: Count,
        prompt: str | None,
        show_progress_bar: bool,
        write_csv: bool,
        encode: Encode | None,
    ) -> None:
        super().__init__()
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
