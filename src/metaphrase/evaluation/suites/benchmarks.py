"""Classes that all suites share: the settings, the measured model, and a benchmark, the unit of caching."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sentence_transformers import SentenceTransformer

from metaphrase.corpus.codes import code_with_region, language_code
from metaphrase.evaluation.answer_retrieval import AnswerText
from metaphrase.evaluation.bucc import Duplicates, ThresholdComparison
from metaphrase.evaluation.encoding import Encode, EncodingOptions, StoredEncoder
from metaphrase.evaluation.result import Result
from metaphrase.evaluation.sib200 import is_variety
from metaphrase.evaluation.significance import RESAMPLES
from metaphrase.io.arguments import Count, Resamples, Seed, checked
from metaphrase.io.configuration import option, split_list
from metaphrase.io.digests import encoder_digest, model_hash
from metaphrase.mining.margins import Margin, Retrieval

#: Version of the measurements and of their JSON form. Cached results of other revisions are not read.
REVISION = 3


@checked
@dataclass(kw_only=True)
class Settings:
    """How suites measure. A cached result depends on these settings, the model and the data.

    Attributes:
        finetuning: Options of the fine-tuned suites that override `SMALL_SCALE`.
        first: Number of items of each language that are measured; None measures all.
        spread: Whether these items are evenly spaced over the data set instead of its first ones: STS and answer retrieval.
    """

    prompt: str | None = option(
        "auto",
        "Text before each sentence. auto: the query prompt that the model stores (E5's 'query: '), "
        "if any; none: no prompt.",
    )
    languages: list[str] | None = option(None, "Languages, separated by spaces or commas. Default: all in the folder.")
    split: str | None = option(None, "Split of parallel test sets to read: xx-en.dev.tsv.gz, xx-en.test.tsv.gz, …")
    text_equality: bool = option(False, "Also count a target with the same text as the translation as a hit.")
    margin_k: Count | None = option(
        None,
        "Retrieval: rank candidates by ratio margin over this number of neighbours instead of by cosine. The xsim "
        "error always uses the margin over 4 neighbours.",
    )
    strip_quotes: bool = option(False, "Remove each \" from the texts of parallel test sets (DAP's Tatoeba).")
    protocols: list[str] | None = option(
        None,
        "BUCC protocols, by the split that sets the threshold and the split that is scored: train_oracle (both "
        "training, DAP's table 2), train_to_test (training, then test: the shared task), sample_to_train (sample, then "
        "training: XTREME), sample_oracle (both sample: WACSE, mSimCSE). Default: all whose splits are available.",
    )
    margin: Margin = option(
        "ratio",
        "Mining: the score of a pair. ratio: its cosine divided by the mean cosine of both sentences with their "
        "--k neighbours; distance: the cosine minus that mean; absolute: the cosine.",
    )
    k: Count = option(4, "Mining: number of neighbours in the margin.")
    retrieval: Retrieval = option(
        "max",
        "Mining: candidate pairs. forward: each source with its best target; backward: each target with its best "
        "source; intersection: the pairs of both; max: the pairs of either, with each sentence in one pair only.",
    )
    duplicates: Duplicates | None = option(
        None,
        "Mining: repeated lines. keep: each is searched (DAP, mSimCSE); unify: they are searched once and "
        "excluded from the pairs (LASER, XTREME). Default: the protocol's, keep except for sample_to_train.",
    )
    comparison: ThresholdComparison | None = option(
        None,
        "Mining: comparison of a pair's score with the threshold, > (DAP) or >= (LASER, XTREME). Default: that "
        "of the protocol, > for train_oracle and train_to_test.",
    )
    tasks: list[str] | None = option(
        None, "Tasks of the suite mteb: folders of the data (udhr, sib200), or tasks of MTEB (Tatoeba, STS22)."
    )
    answer_text: Literal[AnswerText, "both"] = option(
        "both",
        "Answer retrieval: the text of a candidate. sentence: the sentence alone; paragraph: the sentence and its "
        "paragraph (LAReQA), which takes several times as long; both: each on its own.",
    )
    trained_languages: list[str] | None = option(
        None, "SIB-200: languages that the encoder was trained on, which are averaged separately."
    )
    transfer: Literal["auto", "probe", "finetune"] = option(
        "auto",
        "nli, paraphrase, pos. probe: a linear probe on the frozen encoder; finetune: the whole encoder is fine-tuned at a "
        "small scale, as qa always is. auto: a probe for paraphrase and pos; nli is fine-tuned, because a probe of sentence "
        "embeddings does not show what token states lost.",
    )
    finetuning_runs: Count = option(
        1,
        "Suites that fine-tune: number of runs of each encoder, with seeds 42, 43, …, whose scores are averaged. With "
        "at least 2, the interval of a difference also covers the variation between runs.",
    )
    bf16: bool = option(
        False,
        "Embed sentences and fine-tune in bfloat16: faster on GPUs, and on CPUs with bfloat16 instructions, such as AMX.",
    )
    resamples: Resamples = option(RESAMPLES, "Number of bootstrap samples of intervals and tests.")
    seed: Seed = option(0, "Seed of the bootstrap.")
    finetuning: Mapping[str, Any] = field(default_factory=dict, metadata={"internal": True})
    first: Count | None = field(default=None, metadata={"internal": True})
    spread: bool = field(default=False, metadata={"internal": True})

    def __post_init__(self) -> None:
        """Split lists at commas and spaces; None means no list, or no prompt."""
        self.prompt = None if self.prompt == "none" else self.prompt
        named = split_list(self.languages or ())
        self.languages = [code if is_variety(code) else code_with_region(code) for code in named] or None
        for name in ("protocols", "tasks", "trained_languages"):
            setattr(self, name, split_list(getattr(self, name) or ()) or None)

    @property
    def codes(self) -> list[str] | None:
        """The languages without their regions."""
        return self.languages and [code if is_variety(code) else language_code(code) for code in self.languages]

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain data, without the fields of a subclass."""
        return {one.name: getattr(self, one.name) for one in fields(Settings)}


@dataclass(frozen=True)
class Subject:
    """The model that is measured.

    Attributes:
        name: ``"starter"``, a folder or a Hub id; fine-tuned suites load the model by this name.
        model: The loaded model.
        output: Folder of the cached results and embeddings of all models.
        settings: How it is measured.
        batch_size: Sentences per forward pass.
        show_progress: Show progress bars.
    """

    name: str
    model: SentenceTransformer
    output: Path
    settings: Settings
    batch_size: int = 64
    show_progress: bool = False

    @cached_property
    def sha(self) -> str:
        """Its `model_hash`."""
        return model_hash(self.model)

    @cached_property
    def digest(self) -> str:
        """Its `encoder_digest`, which names what is cached."""
        return encoder_digest(self.model)

    @property
    def folder(self) -> Path:
        """Folder of its cached results."""
        return self.output / self.digest[:12]

    @cached_property
    def encode(self) -> Encode:
        """Replaces ``model.encode``; embeds each text once."""
        bf16 = self.settings.bf16
        digest = encoder_digest(self.model, "bfloat16") if bf16 else self.digest
        return StoredEncoder(self.model, self.output / "embeddings", digest, bf16=bf16).encode

    def encoding(self) -> EncodingOptions:
        """How the subject embeds texts."""
        return {
            "prompt": self.settings.prompt,
            "batch_size": self.batch_size,
            "show_progress": self.show_progress,
            "encode": self.encode,
        }

    def options(self, most: int = 2**31) -> dict[str, Any]:
        """Options that all evaluations of sentence embeddings take, with at most some number of resamples."""
        resamples = min(most, self.settings.resamples)
        return {"name": self.name, "resamples": resamples, "seed": self.settings.seed, **self.encoding()}


class DataUnavailable(Exception):
    """The data of a benchmark are missing; detected when they are loaded."""


@dataclass(frozen=True)
class Benchmark:
    """One data set under one protocol.

    Attributes:
        name: Unique name, such as ``"tatoeba"``.
        suite: Name of its suite.
        protocol: Short description of the protocol.
        files: Files that it reads.
        work: Bytes of text to encode, a rough measure of its duration.
        measure: Measures a model and returns results by name.
        fixed: Further values that its results depend on, in addition to the settings that it reads.
        reads: Names of the `Settings` that its results depend on; None for those of its suite.
        asks: Whether it embeds questions and passages, each with their prompt.
    """

    name: str
    suite: str
    protocol: str
    files: tuple[Path, ...]
    work: float
    measure: Callable[[Subject], dict[str, Result]]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    reads: tuple[str, ...] | None = None
    asks: bool = False


#: Results by name.
Results = dict[str, Result]

#: Shows a line or a table of progress.
Note = Callable[[Any], None]

#: Finds the benchmarks of a folder; without a folder, those whose data are on the Hub.
Find = Callable[[Path | None, Settings], Iterable[Benchmark]]


class Sample(NamedTuple):
    """The part of a suite that is measured.

    Attributes:
        items: Items of each language: pairs of sentences, gold pairs, questions, or sentences of a split.
        share: Rough share of the texts of a data set that is encoded, for the estimate of the duration (mining computes it).
        languages: Languages, if available; None for all.
        spread: Whether the items are evenly spaced over the data set instead of its first ones, which are about one subject
            where items are in the order of their documents.
    """

    items: int
    share: float
    languages: tuple[str, ...] | None = None
    spread: bool = False


@dataclass(frozen=True)
class Suite:
    """A kind of benchmark.

    Attributes:
        name: Name on the command line.
        summary: What it measures, for ``--help``.
        needs: Description of the data that it looks for.
        find: See `Find`.
        reads: Names of the `Settings` that its results depend on.
        options: Further settings that apply to it: they select its data, or its results record them in `Benchmark.fixed`.
        quick: Its sample in the suite ``quick``; None if it is not part of it.
        new_texts: Share of its texts that is new if an earlier suite has read its files, for the estimate of the duration.
    """

    name: str
    summary: str
    needs: str
    find: Find
    reads: tuple[str, ...]
    options: tuple[str, ...] = ()
    quick: Sample | None = None
    new_texts: float = 1.0
