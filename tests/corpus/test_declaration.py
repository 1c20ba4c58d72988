"""What is estimated on a part of the Declaration of Human Rights can be measured on the other."""

from __future__ import annotations

import pytest

from metaphrase.corpus.declaration import articles_of
from metaphrase.corpus.parallel import ParallelSet, load_parallel_folder
from metaphrase.evaluation.similarity_structure import structure_texts
from metaphrase.io.files import UDHR
from metaphrase.training.baseline import split_retention
from metaphrase.training.configuration import RunConfig
from metaphrase.training.recipe import Recipe


@pytest.mark.long
def test_the_parts_share_no_text():
    whole = load_parallel_folder(UDHR)
    odd, even = articles_of(whole, "odd"), articles_of(whole, "even")
    texts = [{text for one in part.values() for text in (*one.sources, *one.targets)} for part in (odd, even)]
    assert not texts[0] & texts[1]
    for language, one in whole.items():
        parts = [(*part[language].sources,) for part in (odd, even)]
        assert sorted((*parts[0], *parts[1])) == sorted(one.sources)
        assert min(map(len, parts)) > 10
    own = {"xx": ParallelSet("xx", ("a",), ("b",))}
    assert articles_of(own, "odd") == own


def test_similarity_structure_has_two_parts():
    odd, even = (structure_texts(["sw"], english=50, articles=part) for part in ("odd", "even"))
    for language in ("sw", "en"):
        assert not set(odd[language]) & set(even[language])
    assert len(odd["en"]) == len(even["en"]) == 50


def test_a_release_without_language_identity_is_measured_on_other_articles(bitext_path):
    """Trained languages and others; without --debias, all articles are measured."""
    tests = {"udhr": load_parallel_folder(UDHR, ["de", "sw"])}
    even = articles_of(load_parallel_folder(UDHR), "even")
    for directions in (0, 5):
        config = RunConfig(corpus=[str(bitext_path)], languages=["de"], debias=directions, output_dir="x")
        split = split_retention(tests, config, Recipe.load("tr"))
        for sets, language in ((split.trained, "de"), (split.retention, "sw")):
            wanted = even if directions else tests["udhr"]
            assert sets["udhr"] == {language: wanted[language]}
