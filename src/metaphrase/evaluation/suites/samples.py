"""Fixed samples of suites: ``quick``, to choose between two runs in minutes, and the largest data sets of ``all``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from metaphrase.evaluation.suites import SUITES
from metaphrase.evaluation.suites.benchmarks import Benchmark, Sample, Settings
from metaphrase.evaluation.suites.folders import check_names

#: The samples of ``quick`` and ``all`` by folder or benchmark; those of `Suite.quick` are further ones. SIB-200's 164,000
#: sentences take longer than all other data together, the 43,000 long pairs of software longer than all other retrieval, and
#: the paragraphs of XQuAD-R longer than its sentences. MTEB trains on SIB-200 in each language, and a sample of it has all
#: sentences of ``train``.
_SAMPLES: dict[str, dict[str, Sample]] = {
    "quick": {"xquad-r paragraph": Sample(60, 0.05, spread=True)},
    "all": {
        "sib200": Sample(50, 0.125),
        "software": Sample(500, 0.4),
        "xquad-r paragraph": Sample(120, 0.1),
        "mteb sib200": Sample(100, 0.5, ("en", "de", "ru", "hi", "sw", "th")),
    },
}


def samples_of(suite: str) -> dict[str, Sample]:
    """The samples of ``quick`` or ``all``, by suite, folder or benchmark; other suites measure all items."""
    quick = {one.name: one.quick for one in SUITES.values() if one.quick} if suite == "quick" else {}
    return quick | _SAMPLES.get(suite, {})


def with_samples(
    find: Callable[[Settings], Iterable[Benchmark]], settings: Settings, samples: Mapping[str, Sample]
) -> list[Benchmark]:
    """Find the benchmarks of a suite; of those that have a sample, only the sample is measured.

    A sample by the name of a benchmark replaces that of its folder, which replaces that of its suite. Data without any of the
    languages of a sample are sampled in all of their languages.
    """
    whole = check_names(find(settings))
    found = {one.name: one for one in whole}
    keys = {one.name: [key for key in (one.name, *one.name.split(), one.suite) if key in samples] for one in whole}
    for key, sample in samples.items():
        if named := {name for name, own in keys.items() if own[:1] == [key]}:
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
