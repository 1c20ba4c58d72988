"""The model card: base model, recipe, data, and results per language.

Data are written to the card in two ways: through `dump_yaml` into its metadata, and through `cell`, `fence` or `table`
into its text. The template contains only Markdown prepared in this way, so no sentence, language or file name can
change the structure of the card.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from datasets import Dataset
from huggingface_hub import EvalResultEntry
from huggingface_hub.repocard_data import EvalResult, eval_results_to_model_index
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.model_card import YAML_FIELDS, format_duration
from sentence_transformers.sentence_transformer.model_card import SentenceTransformerModelCardData

from metaphrase import __version__
from metaphrase.encoders.folders import is_local
from metaphrase.encoders.names import PLUS, split_vectors
from metaphrase.encoders.pooler import is_pooler_optional
from metaphrase.encoders.prompts import BITEXT
from metaphrase.evaluation.compare import verdict_shown
from metaphrase.io.counts import counted, listed
from metaphrase.io.redaction import redact
from metaphrase.publishing.examples import MODEL_ID_PLACEHOLDER, card_usage, card_usage_of_transformers
from metaphrase.publishing.markdown import cell, code, dump_yaml, fence, hub_languages, table
from metaphrase.publishing.provenance import LICENSE_KEYS, as_list, hub_data_set, mappings

TAGS = ("sentence-transformers", "sentence-similarity", "feature-extraction", "dense", "metaphrase", "cross-lingual")
LIMITATIONS = (
    "Results apply to the named test sets; results in other domains, dialects and scripts may differ.",
    "The model inherits the biases of its base model and of its training pairs.",
    "A high similarity means that two sentences have a similar meaning, not that they are true.",
)
SAMPLE_LENGTH = 120
LOG_ROWS = 50


@dataclass
class AlignmentModelCardData(SentenceTransformerModelCardData):
    """Data of an aligned encoder's card; the callback of sentence-transformers adds the training log.

    Attributes:
        license: Licence as the Hub spells it, or a list of several.
        license_name: Name of a licence that the Hub does not list, whose ``license`` is ``other``.
        license_link: Its address, or the name of its file.
        recipe: The recipe as data; its `name` becomes a tag.
        results: One row per test set and language: `data`, `language`, `n` (pairs), `before` and `after` (accuracy in
            percent); if both were compared also `difference`, `interval` (its bounds) and `verdict`, and where `compare` has
            them `clusters` and `runs`. A row of a benchmark on the Hub also has its `dataset_id` and `task_id`, and
            optionally `dataset_revision`.
        retention: One row per test set in languages without training data: `data`, number of `languages` and of pairs
            (`n`), `before`, `after`, `difference` and its `interval` as means over the languages, the acceptable loss
            (`limit`), the `verdict` (kept, lost or uncertain) and the `worst` languages with their differences. A row
            of other abilities, in which `n` is a number of sentences, has the same keys.
        verdict: What the model is better and worse at than its base, as one sentence.
        leakage: One row per test set: `data`, `pairs`, and `shared`, the number of pairs with a sentence that is also in
            the training data. None if it was not checked.
        corpus: One row per training file: `file`, `language`, `pairs`, `sha256` (for a data set on the Hub `revision`, its
            commit), and `origin` and `license` if they are known.
        merge: How the weights were merged: `alpha`, the weight of the tuned model (a list with one for each tuned model if
            the weights differ), `tuned`, names of the models, `base`, the name of what they were added to (default:
            the base model), and `chosen`, how alpha was chosen.
        debias: How language identity was removed: number of `directions` and of `languages`, name of the `data`, `chosen`,
            how the number was chosen, and `earlier`, the number of directions that were projected out before.
        teacher: The model that was distilled: `name`, `revision` and `license` if they are known, and which `sides` of a
            pair were trained `toward` which of its embeddings, as in the term `anchor` of the recipe.
        source: What the cards of the models that this one was made from record, see `earlier_training`.
        command: The command that reproduces the model.
        seed: Random seed.
        mlm_head: Description of the layers between the encoder and the vocabulary during training.
        hardware: Description of the training hardware.
        training_seconds: Training time, of a resumed run from its start. None: the time that the callback measured.
        weights: SHA-256 of each weights file of the release.
        limitations: Sentences about the limits of the model.
    """

    license: str | list[str] | None = None
    license_name: str | None = None
    license_link: str | None = None
    model_name: str | None = None
    recipe: dict[str, Any] | None = None
    results: list[dict[str, Any]] = field(default_factory=list)
    retention: list[dict[str, Any]] = field(default_factory=list)
    verdict: str | None = None
    leakage: list[dict[str, Any]] | None = None
    corpus: list[dict[str, Any]] = field(default_factory=list)
    merge: dict[str, Any] | None = None
    debias: dict[str, Any] | None = None
    teacher: dict[str, Any] | None = None
    source: dict[str, Any] | None = None
    command: str | None = None
    seed: int | None = None
    mlm_head: str | None = None
    hardware: str | None = None
    training_seconds: float | None = None
    weights: dict[str, str] = field(default_factory=dict)
    limitations: list[str] = field(default_factory=lambda: list(LIMITATIONS))
    tags: list[str] = field(default_factory=lambda: list(TAGS))
    local_files_only: bool = True
    generate_widget_examples: bool = False
    template_path: Path = field(default=Path(__file__).with_name("model_card_template.md"), init=False, repr=False)

    @classmethod
    def adopt(cls, model: SentenceTransformer, **known: Any) -> AlignmentModelCardData:
        """Replace the card of `model` by one of this class with the same content.

        Args:
            model: Its `model_card_data` is replaced, or updated if it is of this class.
            **known: Fields to set, such as `language`, `license`, `base_model`, `recipe`.

        Returns:
            The model's new card.

        Raises:
            TypeError: A field does not exist.
        """
        card = model.model_card_data
        if not isinstance(card, cls):
            own = {"tags", "local_files_only", "generate_widget_examples", "template_path", "model"}
            old, card = card, cls()
            for name in {f.name for f in fields(old)} - own:
                setattr(card, name, getattr(old, name))
            card.add_tags(old.tags)
        unknown = known.keys() - {f.name for f in fields(cls)}
        if unknown:
            raise TypeError(f"A model card has no field {', '.join(sorted(unknown))}; see AlignmentModelCardData.")
        for name, value in known.items():
            setattr(card, name, value)
        card.register_model(model)
        model.model_card_data = card
        return card

    def add_comparison(self, data: str, comparison: Mapping[str, Any]) -> None:
        """Add the rows of a comparison (`evaluation.compare.compare`) on the test set `data`; the pooled row comes last."""
        rows = [*comparison["languages"].items(), ("all", comparison["pooled"])]
        self.results += [{"data": data, "language": language} | _compared(result) for language, result in rows]

    def add_retention(self, data: str, retention: Mapping[str, Any]) -> None:
        """Add the result of `evaluation.retention.retention` on the test set `data`."""
        rows = retention["languages"]
        worst = {row["language"]: row["difference"] for row in rows if row["language"] in retention["worst"]}
        compared = _compared(retention["pooled"] | {"limit": retention["limit"], "verdict": retention["verdict"]})
        self.retention.append({"data": f"other languages: {data}", "languages": len(rows), **compared, "worst": worst})

    def add_ability(self, data: str, row: Mapping[str, Any]) -> None:
        """Add a row of a guard (`evaluation.guards.Guard.measure`), for an ability other than retrieval of translations."""
        losses = {language: loss for language, loss in row["languages"].items() if loss < -row.get("limit", 0.0)}
        worst = dict(sorted(losses.items(), key=lambda item: item[1])[:5])
        self.retention.append(
            {"data": f"other abilities: {data}", "languages": len(row["languages"]), **_compared(row), "worst": worst}
        )

    def eval_result_entries(self) -> list[EvalResultEntry]:
        """The results on benchmarks of the Hub, for the `.eval_results` folder."""
        return [
            EvalResultEntry(
                dataset_id=str(row["dataset_id"]),
                task_id=str(row["task_id"]),
                value=round(float(row["after"]), 2),
                dataset_revision=row.get("dataset_revision"),
                notes=redact(f"{row['data']}, {row['language']}: accuracy in percent, mean of both directions"),
            )
            for row in self.results
            if row.get("dataset_id") and row.get("task_id")
        ]

    # Hooks of sentence-transformers

    def set_widget_examples(self, dataset: Any) -> None:
        """Set no widget: the metadata contain no training sentences."""

    def compute_dataset_metrics(
        self, dataset: Any, dataset_info: dict[str, Any], loss: Any, router_mapping: Any = None
    ) -> dict[str, Any]:
        """Add size and first rows of a data set, except of a stream."""
        if isinstance(dataset, Dataset):
            dataset_info |= {"size": len(dataset), "samples": list(dataset.select(range(min(3, len(dataset)))))}
        return dataset_info

    def get_default_model_name(self) -> str:
        """Name the model after its base model and recipe."""
        recipe = f" aligned with {self.recipe['name']}" if self.recipe and self.recipe.get("name") else ""
        return f"{self._base_name or 'Sentence encoder'}{recipe}"

    def to_dict(self) -> dict[str, Any]:
        """All data of the template and the metadata; `show` contains the prepared Markdown."""
        if self.recipe and self.recipe.get("name"):
            self.add_tags(str(self.recipe["name"]))
        named = self.model_name
        values = super().to_dict()
        self.model_name = named  # the default name depends on fields that may be set later
        if self.results:
            values |= {"metrics": ["accuracy"], "model-index": self._model_index(values["model_name"])}
        values["base_model"] = self.base_model if _is_hub_id(self.base_model) else None
        names = (hub_data_set(row.get("file")) for row in self.corpus)
        values["datasets"] = list(dict.fromkeys(filter(None, names)))
        values |= hub_languages(self._languages)
        values["metaphrase"] = self._facts()
        values["show"] = self._show(values)
        self._cached_dict = values  # saves `to_yaml` a second call
        return values

    def to_yaml(self, line_break: str | None = None) -> str:
        """The card's metadata as YAML of plain types."""
        values = self._cached_dict or self.to_dict()
        self._cached_dict = None
        metadata = {
            key: values[key]
            for key in ("language", *LICENSE_KEYS, *YAML_FIELDS, "language_bcp47", "metaphrase")
            if values.get(key) not in (None, [], {})
        }
        return dump_yaml(metadata, line_break=line_break).strip()

    # The card's own text

    def _model_index(self, name: str) -> list[dict[str, Any]]:
        results = [
            EvalResult(
                task_type="retrieval",
                task_name="Cross-lingual sentence retrieval",
                dataset_type=re.sub(r"[^a-z0-9]+", "-", str(row["data"]).lower()).strip("-") or "bitext",
                dataset_name=str(row["data"]),
                dataset_config=str(row["language"]),
                metric_type="accuracy",
                metric_name="Accuracy, mean of both directions",
                metric_value=round(float(row["after"]), 2),
            )
            for row in self.results
        ]
        return eval_results_to_model_index(name, results)

    def _facts(self) -> dict[str, Any]:
        """Facts that reproduce the model, and digests to compare the result."""
        facts = {
            "recipe": (self.recipe or {}).get("name"),
            "command": self.command,
            "seed": self.seed,
            "merge": self.merge,
            "debias": self.debias,
            "teacher": self.teacher and self.teacher | {"name": _public_name(self.teacher["name"])},
            "base_model_revision": self.base_model_revision,
            "data": self._files,
            "hardware": self.hardware,
            "versions": {"metaphrase": __version__} | self.version if self.command else None,
            "weights": self.weights,
            "source": self.source,
        }
        return {key: value for key, value in facts.items() if value not in (None, [], {})}

    @property
    def _files(self) -> list[dict[str, Any]]:
        """The training files by their names without folders, and data sets on the Hub by their whole names."""
        rows = [(row, str(row["file"])) for row in self.corpus if "file" in row]
        return [row | {"file": name if name.startswith("hf:") else Path(name).name} for row, name in rows]

    @property
    def _base_name(self) -> str:
        """The name of the base, and of task vectors that are added to it, without the folders that contain them."""
        encoder = None if self.model is None else self.model.transformers_model
        base, files = split_vectors(self.base_model or ("" if encoder is None else str(encoder.config.name_or_path)))
        return PLUS.join(Path(part).name for part in (base, *files))

    @property
    def _languages(self) -> list[str]:
        return as_list(self.language)

    def _license_in_words(self) -> str:
        named = ", ".join(filter(None, (self.license_name, self.license_link)))
        return ", ".join(as_list(self.license)) + (f" ({named})" if named else "")

    def _retention(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The results in trained languages, with the pooled ones, and the results in other languages."""
        trained = set(self._languages)
        own, foreign = (
            {row["data"] for row in self.results if row["language"] != "all" and (row["language"] in trained) == known}
            for known in (True, False)
        )
        kept = [
            row
            for row in self.results
            if trained
            and (row["data"] in foreign - own if row["language"] == "all" else row["language"] not in trained)
        ]
        return [row for row in self.results if row not in kept], kept

    def _show(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The variables of the template: safe Markdown, empty if there is no content."""
        recipe = self.recipe or {}
        name = self.model_id if _is_hub_id(self.model_id) else MODEL_ID_PLACEHOLDER
        spoken = [*(str(row.get("language")) for row in self.results), *self._languages]
        corpus = self._files
        earlier = _earlier_data(self.source, corpus)
        results, retention = self._retention()
        metrics = [item for scores in (self.eval_results_dict or {}).values() for item in scores.items()]
        samples = [row for info in self.train_datasets for row in info.get("samples", [])]
        versions = {"metaphrase": __version__} | self.version
        bibtex = "\n\n".join(citation.strip() for citation in self.citations.values())
        return {
            "title": cell(values["model_name"]),
            "base_revision": cell(self.base_model_revision),
            "base": _link(self.base_model) or cell(self._base_name),
            "teacher": _taught(self.teacher),
            "languages": ", ".join(cell(language) for language in self._languages),
            "license": cell(self._license_in_words()),
            "merged": cell(_merged(self.merge)),
            "debiased": cell(_debiased(self.debias)),
            "dimensions": cell(values.get("output_dimensionality")),
            "max_length": cell(values.get("model_max_length")),
            "similarity": cell(values.get("similarity_fn_name")),
            "mlm_head": cell(self.mlm_head),
            "architecture": fence(values.get("model_string")),
            "usage": fence(card_usage(name, spoken), "python"),
            "usage_transformers": fence(card_usage_of_transformers(name, self.model, spoken), "python"),
            "poolerless": self.model is not None and is_pooler_optional(type(self.model.transformers_model)),
            "results": table([result_row(row) for row in results]),
            "retention": table([result_row(row) for row in retention]),
            "retained": table([_retained_row(row) for row in self.retention]),
            "verdict": cell(self.verdict),
            "leakage": table(
                [
                    {"Test set": row["data"], "Pairs": row["pairs"], "Shared with the training data": row["shared"]}
                    for row in self.leakage or ()
                ]
            ),
            "metrics": table([{"Metric": name, "Value": value} for name, value in metrics]),
            "prompts": prompts_in_words(self.model),
            "recipe_name": cell(recipe.get("name")),
            "paper": cell(recipe.get("paper")),
            "recipe": fence(dump_yaml(recipe), "yaml") if recipe else "",
            "corpus": table([_corpus_row(row) for row in corpus]),
            "source_corpus": table([_corpus_row(row) for row in earlier]),
            "unlicensed": any(not row.get("license") for row in (*corpus, *earlier)),
            "samples": table([_sample_row(row) for row in samples]),
            "seed": cell(None if self.seed is None else str(self.seed)),
            "command": fence(self.command, "bash"),
            "hardware": cell(self.hardware),
            "time": cell(
                values.get("training_time")
                if self.training_seconds is None
                else format_duration(self.training_seconds)
            ),
            "settings": _settings(self.non_default_hyperparameters),
            "all_settings": _settings(self.all_hyperparameters),
            "log": table(_thinned(self.training_logs)),
            "versions": "\n".join(f"- {cell(name)}: {cell(version)}" for name, version in versions.items()),
            "limitations": "\n".join(f"- {cell(sentence)}" for sentence in self.limitations),
            "bibtex": fence(bibtex, "bibtex"),
        }


def _compared(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a row of the card takes from a comparison."""
    keys = ("n", "clusters", "runs", "before", "after", "difference", "interval", "limit", "verdict")
    return {key: row[key] for key in keys if key in row}


def _merged(merge: Mapping[str, Any] | None) -> str | None:
    """How the weights were merged, in words."""
    if merge is None:
        return None
    chosen = f". {merge['chosen']}" if merge.get("chosen") else ""
    base = merge.get("base", "the base model")
    return f"the weights of {base} plus {change_in_words(merge['alpha'], merge.get('tuned') or ())}{chosen}"


def prompts_in_words(model: Any) -> str:
    """The prompts of a model, in words."""
    stored = {} if model is None else {name: text for name, text in (model.prompts or {}).items() if text}
    if not stored:
        return "Sentences are encoded without a prompt."
    texts = ", ".join(f"{code(name)} ({code(text)})" for name, text in stored.items())
    if BITEXT in model.prompts:
        return (
            "Sentences are encoded without a prompt. For search, `encode_query` and `encode_document` add prompts that the "
            f"model stores: {texts}."
        )
    return f"The model stores prompts: {texts}."


def _debiased(debias: Mapping[str, Any] | None) -> str | None:
    """How language identity was removed, in words."""
    if debias is None:
        return None
    if "languages" not in debias:
        count = debias["directions"] + debias.get("earlier", 0)
        return f"{counted(count, 'direction')} projected out by linear layers"
    chosen = f". {debias['chosen']}" if debias.get("chosen") else ""
    earlier = f", in addition to {debias['earlier']} that were projected out before" if debias.get("earlier") else ""
    return (
        f"a linear layer projects out the {counted(debias['directions'], 'direction')} in which the mean embeddings of "
        f"{debias['languages']} languages differ most{earlier}, estimated on {debias['data']}{chosen}"
    )


def _taught(teacher: Mapping[str, Any] | None) -> str | None:
    """The teacher, its licence and what was learned from it, in words."""
    if teacher is None:
        return None
    name = _link(teacher["name"]) or cell(_public_name(teacher["name"]))
    name += f", revision {cell(teacher['revision'])}" if teacher.get("revision") else ""
    name += f", licence {cell(teacher['license'])}" if teacher.get("license") else ", which states no licence"
    sides = {"source": "Source sentences", "target": "Target sentences"}.get(teacher["sides"], "Both sides of a pair")
    sentence = "the target sentence" if teacher["toward"] == "target" else "the same sentence"
    return f"{name}. {sides} were trained towards its embedding of {sentence}."


def result_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `AlignmentModelCardData.results` as a row of a Markdown table."""
    shown = {"Test set": str(row["data"]), "Language": str(row["language"]), "Pairs": row.get("n")}
    shown |= {name: f"{row[name.lower()]:.1f}" for name in ("Before", "After") if row.get(name.lower()) is not None}
    if row.get("difference") is not None:
        low, high = row.get("interval") or (None, None)
        interval = "" if low is None else f" ({low:+.1f} … {high:+.1f})"
        shown["Difference (95 %)"] = f"{row['difference']:+.1f}{interval}"
    if row.get("verdict"):
        shown["Verdict"] = verdict_shown(row)
    return shown


def _retained_row(row: Mapping[str, Any]) -> dict[str, Any]:
    low, high = row["interval"]
    return {
        "Retention": str(row["data"]),
        "Languages": row["languages"],
        "Items": row.get("n"),
        "Before": f"{row['before']:.1f}",
        "After": f"{row['after']:.1f}",
        "Difference (95 %)": f"{row['difference']:+.2f} ({low:+.2f} … {high:+.2f})",
        "Red line": f"{0 - row['limit']:g}" if "limit" in row else "",
        "Verdict": verdict_shown(row),
        "Largest losses": ", ".join(f"{language} {loss:+.1f}" for language, loss in row["worst"].items()) or "none",
    }


def _corpus_row(row: Mapping[str, Any]) -> dict[str, Any]:
    names = {"file": "File", "language": "Language", "pairs": "Pairs", "origin": "Origin", "license": "Licence"}
    names |= {"sha256": "SHA-256", "revision": "Commit"}
    return {names[key]: row[key] for key in names if row.get(key) is not None}


def _earlier_data(source: Any, corpus: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The training files of the models that a model was made from, and of those before them, that are not in its corpus."""
    known = ("file", "language", "pairs", "sha256", "revision", "origin", "license")
    rows: list[dict[str, Any]] = []
    todo = mappings([source])
    for run in todo:
        for data in mappings(run.get("data")):
            row = {key: data[key] for key in known if key in data}
            if "file" in row and row not in rows and row not in corpus:
                rows.append(row)
        todo += mappings(run.get("runs")) + mappings([run.get("source")])
    return rows


def _sample_row(row: Mapping[str, Any]) -> dict[str, str]:
    def shortened(text: str) -> str:
        return text if len(text) <= SAMPLE_LENGTH else text[:SAMPLE_LENGTH] + " …"

    return {name: shortened(str(row[name])) for name in ("source", "target") if name in row}


def _settings(settings: Mapping[str, Any]) -> str:
    return "\n".join(f"- {cell(name)}: {cell(str(value))}" for name, value in settings.items())


def _thinned(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    step = -(-len(rows) // LOG_ROWS) or 1
    return [*rows[::-1][::step]][::-1]  # always keeps the last row


def _is_hub_id(name: str | None) -> bool:
    pattern = r"[A-Za-z0-9_-][\w.-]*(/[A-Za-z0-9_-][\w.-]*)?"
    return bool(name) and re.fullmatch(pattern, str(name), re.ASCII) is not None and not is_local(str(name))


def _link(base_model: str | None) -> str:
    return f"[{cell(base_model)}](https://huggingface.co/{base_model})" if _is_hub_id(base_model) else ""


def change_in_words(alpha: float | Sequence[float], tuned: Sequence[str] = ()) -> str:
    """What is added to a base: the changes of tuned encoders, with one weight, or with one for each of them.

    >>> change_in_words(0.5), change_in_words(0.5, ["a", "b"])
    ('0.5 times the weight changes from training', '0.5 times the weight changes of a and b')
    >>> change_in_words([0.2, 0.8], ["a", "b"])
    '0.2 times the weight changes of a and 0.8 times the weight changes of b'
    """
    if isinstance(alpha, int | float):
        return f"{alpha:g} times the weight changes {f'of {listed(tuned)}' if tuned else 'from training'}"
    names = tuned or [f"encoder {number}" for number in range(1, len(alpha) + 1)]
    return listed([change_in_words(one, [name]) for one, name in zip(alpha, names, strict=True)])


def _public_name(name: str) -> str:
    """The name of a model without the folders that contain it."""
    return name if _is_hub_id(name) else Path(name).name
