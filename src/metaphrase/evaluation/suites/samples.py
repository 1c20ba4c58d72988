"""Fixed samples of suites: ``quick``, to choose between two runs in minutes, and the largest data sets of ``all``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from metaphrase.evaluation.suites.benchmarks import Benchmark, Settings
from metaphrase.evaluation.suites.folders import check_names


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


_LANGUAGES = ("de", "ru", "zh", "hi", "sw", "te", "tl", "th")
#: The sample of each suite. Languages are of several scripts, with much and with little training data.
QUICK: dict[str, Sample] = {
    "retrieval": Sample(150, 0.15, _LANGUAGES),
    "sts": Sample(200, 0.15, ("en", "de", "zh"), spread=True),
    "mining": Sample(90, 1),
    "answer-retrieval": Sample(120, 0.1, spread=True),
    "xquad-r paragraph": Sample(60, 0.05, spread=True),
    "xsim++": Sample(150, 0.15, _LANGUAGES),
    "sib200": Sample(100, 0.25, (*_LANGUAGES, "ewe_Latn", "tat_Cyrl", "bod_Tibt", "quy_Latn")),
    "word-alignment": Sample(60, 0.04),
    "paraphrase": Sample(200, 0.3, ("en", "de", "zh")),
    "pos": Sample(100, 0.4),
}


#: The samples of ``quick`` and ``all``, by suite, folder or benchmark. SIB-200's 164,000 sentences take longer than all other
#: data together, the 43,000 long pairs of software longer than all other retrieval, and the paragraphs of XQuAD-R longer than
#: its sentences. MTEB trains on SIB-200 in each language, and a sample of it has all sentences of ``train``.
SAMPLES: dict[str, dict[str, Sample]] = {
    "quick": QUICK,
    "all": {
        "sib200": Sample(50, 0.125),
        "software": Sample(500, 0.4),
        "xquad-r paragraph": Sample(120, 0.1),
        "mteb sib200": Sample(100, 0.5, ("en", "de", "ru", "hi", "sw", "th")),
    },
}


def with_samples(
    find: Callable[[Settings], Iterable[Benchmark]], settings: Settings, samples: Mapping[str, Sample]
) -> list[Benchmark]:
    """Find the benchmarks of a suite; of those that have a sample, only the sample is measured.

    A sample of a benchmark by its name replaces those of its suite and folder. Data without any of the languages of a sample
    are sampled in all of their languages.
    """
    whole = check_names(find(settings))
    found = {one.name: one for one in whole}
    keys = {one.name: (one.name,) if one.name in samples else (one.suite, *one.name.split()) for one in whole}
    for key, sample in samples.items():
        if named := {name for name, own in keys.items() if key in own}:
            found = {name: one for name, one in found.items() if name not in named}
            for languages in (settings.languages, settings.languages or list(sample.languages or ())):
                parts = find(replace(settings, first=sample.items, spread=sample.spread, languages=languages))
                found |= {one.name: _sampled(one, sample) for one in parts if one.name in named}
    return [found[one.name] for one in whole if one.name in found]


def _sampled(benchmark: Benchmark, sample: Sample) -> Benchmark:
    """A benchmark of a sample, which is cached apart from the benchmark of all items."""
    items = f"{sample.items} items of each language{' and split' * (benchmark.suite == 'sib200')}"
    return replace(
        benchmark,
        protocol=f"{benchmark.protocol}; sample: {f'{items}, evenly spaced' if sample.spread else f'the first {items}'}",
        work=benchmark.work * sample.share,
        fixed={**benchmark.fixed, "first": sample.items} | ({"spread": True} if sample.spread else {}),
    )
