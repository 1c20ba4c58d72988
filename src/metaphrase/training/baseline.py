"""The test sets of a run, and the measurements before training, which are stored in the output folder."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer

from metaphrase.corpus.codes import standard_code
from metaphrase.corpus.declaration import articles_of
from metaphrase.corpus.files import find_files
from metaphrase.corpus.parallel import ParallelSet, select_languages
from metaphrase.encoders.prompts import resolve_prompt
from metaphrase.evaluation.compare import compare
from metaphrase.evaluation.encoding import Encoders
from metaphrase.evaluation.retention import retention
from metaphrase.evaluation.retrieval import evaluate_retrieval
from metaphrase.evaluation.suites.parallel import Sets, read_test_folders
from metaphrase.exceptions import UsageError
from metaphrase.io.digests import encoder_digest
from metaphrase.io.environment import versions
from metaphrase.io.files import UDHR
from metaphrase.io.work_folders import read_part, write_part
from metaphrase.publishing.report import describe_model
from metaphrase.training.configuration import RunConfig
from metaphrase.training.recipe import Recipe

logger = logging.getLogger(__name__)

#: File of the baseline in an output folder.
BASELINE = "before.json"


@dataclass(frozen=True)
class EvaluationSets:
    """The test sets that a run is measured on, before and after training.

    Attributes:
        trained: Test sets by name, in the languages that are trained on.
        retention: Test sets by name, in other languages; they show the effect of training on them.
    """

    trained: Sets = field(default_factory=dict)
    retention: Sets = field(default_factory=dict)

    def merged(self) -> Sets:
        """All languages of each test set."""
        return {
            name: self.retention.get(name, {}) | self.trained.get(name, {}) for name in self.trained | self.retention
        }


@dataclass(frozen=True)
class Baseline:
    """Results of the encoder before training, by name of the test set.

    Attributes:
        trained: Results in the languages that are trained on.
        retention: Results in other languages.
    """

    trained: dict[str, Any] = field(default_factory=dict)
    retention: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Duration of all measurements."""
        return float(sum(result["seconds"] for result in chain(self.trained.values(), self.retention.values())))


def read_test_sets(config: RunConfig) -> Sets:
    """Read the test sets of ``config.test``, in its languages."""
    return read_test_folders(config.test, config.languages)


def split_retention(tests: Sets, config: RunConfig, recipe: Recipe, languages: Collection[str] = ()) -> EvaluationSets:
    """Separate the languages that are trained on from the others, and add the retention sets.

    ``languages`` are those of the corpus, if it is loaded; they count if neither the options nor the names of its files state
    them. Test sets are unchanged if none of their languages is trained on. A recipe with a language embedding cannot embed
    other languages. If directions of language identity are removed, the Universal Declaration of Human Rights is measured on
    the articles on which the directions are not estimated.
    """
    split = _split_retention(tests, config, recipe, configured_languages(config) or set(languages))
    if config.debias:
        parts = (
            {name: articles_of(one, "even") for name, one in sets.items()} for sets in (split.trained, split.retention)
        )
        split = EvaluationSets(*parts)
    return split


def _split_retention(tests: Sets, config: RunConfig, recipe: Recipe, languages: set[str]) -> EvaluationSets:
    if config.retention == ["none"] or not (tests or config.retention):
        return EvaluationSets(tests)
    if not tests:
        raise UsageError("--retention requires test sets: also pass --test.")
    if recipe.language_embedding:
        logger.info(
            "Recipe %s learns a vector for each language: languages without one are not measured.", recipe.name
        )
        return EvaluationSets(tests)
    trained: Sets = tests
    others: Sets = {}
    if any(languages & sets.keys() for sets in tests.values()):
        trained = select_languages(tests, lambda language: language in languages)
        others = select_languages(tests, lambda language: language not in languages)
    for folder in config.retention or ([] if others else [str(UDHR)]):
        for name, sets in read_test_folders([folder]).items():
            known = languages | others.get(name, {}).keys() | trained.get(name, {}).keys()
            if new := {language: one for language, one in sets.items() if language not in known}:
                others[name] = others.get(name, {}) | new
    chosen = set(config.retention_languages)
    if not chosen or "all" in chosen:
        return EvaluationSets(trained, others)
    chosen_others = select_languages(others, lambda language: language in chosen)
    if others and not chosen_others:
        raise UsageError(
            f"No retention set has any of the languages of --retention_languages, {', '.join(sorted(chosen))}. They have "
            f"{', '.join(sorted({language for sets in others.values() for language in sets}))}; 'all' measures these."
        )
    return EvaluationSets(trained, chosen_others)


def configured_languages(config: RunConfig) -> set[str]:
    """Languages that will be trained on; empty if neither the options nor the file names state all of them."""
    files = find_files(config.corpus, languages=config.languages or None)
    named = {file.language for file in files if file.language}
    return {standard_code(code) or code for code in config.languages} or (
        named if all(file.language for file in files) else set()
    )


def measure(
    model: Encoders, tests: Mapping[str, Any], *, name: str, prompt: str = "", show_progress: bool = False
) -> dict[str, Any]:
    """Measure retrieval accuracy on every test set, without padding."""
    return {
        test: evaluate_retrieval(model, sets, name=name, prompt=prompt, show_progress=show_progress).to_dict()
        for test, sets in tests.items()
    }


def measure_baseline(
    model: SentenceTransformer, tests: EvaluationSets, output: Path, *, name: str, show_progress: bool = False
) -> Baseline:
    """Measure an encoder before training; results in ``before.json`` of the same encoder and test sets are reused.

    A model that stores a query prompt (E5) is measured with and without it; for each test set, the result with the better
    average is used, with the duration of both. Other languages are measured with the prompt that was better on the test set.
    """
    if not tests.trained:
        return Baseline()
    path = output / BASELINE
    prompts = list(dict.fromkeys(["", resolve_prompt(model, "auto")]))
    subject = {"model": encoder_digest(model), "versions": versions()}
    known = read_baseline(path, subject)

    def best(kind: str, test: str, sets: Mapping[str, ParallelSet], prompts: Sequence[str]) -> dict[str, Any]:
        kept = known.get(f"{kind} {test}")
        digests = {language: one.sha256 for language, one in sets.items()}
        if (
            kept
            and kept["settings"]["prompt"] in prompts
            and {language: one["sha256"] for language, one in kept["languages"].items()} == digests
        ):
            return {**kept, "model": name}
        results = [
            measure(model, {test: sets}, name=name, prompt=prompt, show_progress=show_progress)[test]
            for prompt in prompts
        ]
        seconds = sum(result["seconds"] for result in results)
        return {**max(results, key=lambda result: result["average"]["mean"]["accuracy"]), "seconds": seconds}

    trained = {test: best("test", test, sets, prompts) for test, sets in tests.trained.items()}
    first = next(iter(trained.values()))
    others = {
        test: best("others", test, sets, [trained.get(test, first)["settings"]["prompt"]])
        for test, sets in tests.retention.items()
    }
    results = {f"test {test}": one for test, one in trained.items()}
    results |= {f"others {test}": one for test, one in others.items()}
    if results != known:
        write_part(path, {"subject": subject, "results": results})
    return Baseline(trained, others)


def read_baseline(path: Path, subject: Mapping[str, Any]) -> dict[str, Any]:
    """Results of an earlier run for the same encoder with the same libraries; empty without such a run."""
    content = read_part(path)
    return content["results"] if content is not None and content["subject"] == subject else {}


def measure_retention(
    model: Encoders,
    tests: EvaluationSets,
    baseline: Baseline,
    facts: Mapping[str, Any],
    *,
    name: str,
    show_progress: bool = False,
) -> dict[str, Any]:
    """Measure retention on each set, in the languages that were not trained on."""
    trained = {language for file in facts["files"] for language in file["languages"]}
    untrained = select_languages(tests.retention, lambda language: language not in trained)
    after = measure(model, untrained, name=name, show_progress=show_progress)
    return {
        test: retention(compare(baseline.retention[test], one))
        | {"models": {"before": describe_model(baseline.retention[test]), "after": describe_model(one)}}
        for test, one in after.items()
    }
