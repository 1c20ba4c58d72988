from dataclasses import replace

import pytest
from datasets import Dataset

from metaphrase import RunConfig, load_corpus
from metaphrase.training.corpora import read_dev, with_links
from metaphrase.training.recipe import Recipe
from tests.corpus.samples import PAIRS, moses, tsv


@pytest.mark.parametrize("checkpoint", [None, "checkpoint-2"])
def test_new_word_links_replace_those_of_runs_that_cannot_be_resumed(tmp_path, bitext, checkpoint):
    rows, recipe = Dataset.from_list(bitext).select_columns(["source", "target"]), Recipe.load("wacse")
    with_links(rows, recipe, tmp_path)
    (first,) = tmp_path.glob("alignment-*")
    if checkpoint is not None:
        (tmp_path / checkpoint).mkdir()
    with_links(rows, recipe, tmp_path)
    assert list(tmp_path.glob("alignment-*")) == [first]
    links = with_links(rows.select(range(12)), recipe, tmp_path)
    assert len(links["alignment"]) == 12
    assert first.exists() == (checkpoint is not None)
    assert len(list(tmp_path.glob("alignment-*"))) == 1 + (checkpoint is not None)


def test_links_are_computed_again_if_those_of_the_corpus_change(tmp_path, bitext):
    """Of a corpus in which some pairs have links of their own, which are kept."""
    rows, recipe = Dataset.from_list(bitext).select_columns(["source", "target"]), Recipe.load("wacse")
    for own in ("0-0", "1-1"):
        links = with_links(rows.add_column("alignment", [own, *[None] * (len(rows) - 1)]), recipe, tmp_path)
        assert links["alignment"][0] == own
        assert None not in links["alignment"]


def test_pairs_with_an_empty_alignment_are_counted(tmp_path, caplog):
    caplog.set_level("INFO")
    path = tsv(tmp_path / "sw-en.tsv", [("paka", "cat", "0-0"), ("mbwa", "dog", "")], "source\ttarget\talignment")
    dataset = with_links(load_corpus(path).dataset, Recipe.load("wacse"), tmp_path)
    assert dataset["alignment"][:] == ["0-0", ""]
    assert "1 of 2 pairs have no word links: their alignment is empty" in caplog.text


def test_dev_sets_need_not_have_the_columns_of_the_corpus(tmp_path):
    columns = {"source_column": "anchor", "target_column": "positive"}
    path = tsv(tmp_path / "corpus.tsv", [("paka", "cat")], header="anchor\tpositive")
    config = RunConfig(corpus=[str(path)], languages=["sw"], dev=[str(moses(tmp_path))], **columns)
    corpus = load_corpus(path, languages=["sw"], **columns)
    for dev in (moses(tmp_path), tsv(tmp_path / "sw-en.dev.tsv")):
        sets = read_dev(replace(config, dev=[str(dev)]), corpus)
        assert [*zip(sets["sw"].sources, sets["sw"].targets, strict=True)] == PAIRS
