import pytest
import torch

from metaphrase.exceptions import CorpusError
from metaphrase.modeling.collator import ParallelCollator
from metaphrase.modeling.views import Concatenated, View, language_id, source_view, target_view
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import Recipe


@pytest.fixture
def views():
    return source_view(6), target_view(6), Concatenated("concatenated", 6, 0.5, "reset")


def test_sides_are_tokenised_truncated_and_marked(tokenizer, views, bitext):
    batch = ParallelCollator(tokenizer, views)(bitext)
    source = batch["source"]
    assert source["input_ids"].shape[1] == 6
    for row, example in enumerate(bitext):
        wanted = tokenizer(example["source"], truncation=True, max_length=6)["input_ids"]
        assert source["input_ids"][row][source["attention_mask"][row].bool()].tolist() == wanted
    assert set(source["language"].tolist()) == {language_id("de")}
    assert set(batch["target"]["language"].tolist()) == {language_id("en")}
    assert len(set(source["text"].tolist())) == len({row["source"] for row in bitext})


def test_the_same_text_has_the_same_fingerprint_on_either_side(tokenizer, bitext):
    row = {"source": "ja", "target": "ja"}
    batch = ParallelCollator(tokenizer, (source_view(8), target_view(8)))([row])
    assert batch["source"]["text"] == batch["target"]["text"]
    assert batch["source"]["language"].item() == 0


def test_masks_depend_on_seed_epoch_and_pair_not_on_the_batch(tokenizer, views, bitext):
    collator = ParallelCollator(tokenizer, views, seed=1)

    def labels(rows):
        return [row[row != -100].tolist() for row in collator(rows)["concatenated"]["labels"]]

    first = labels(bitext)
    assert labels(bitext[::-1]) == first[::-1]
    assert labels(bitext[5:6]) == first[5:6]
    collator.set_epoch(1)
    assert labels(bitext) != first
    collator.set_epoch(0)
    assert labels(bitext) == first
    other = ParallelCollator(tokenizer, views, seed=2)(bitext)["concatenated"]["labels"]
    assert [row[row != -100].tolist() for row in other] != first


@pytest.mark.parametrize("name", ["dap", "metaphrase", "mgc-hard", "ppa", "wacse"])
def test_each_side_is_tokenised_once(tiny_encoder, bitext, monkeypatch, name):
    loss = AlignmentLoss(tiny_encoder, Recipe.load(name), max_length=24)
    tokenizer, tokenised = tiny_encoder.tokenizer, []
    call = type(tokenizer).__call__
    monkeypatch.setattr(
        type(tokenizer),
        "__call__",
        lambda self, text, **options: tokenised.append(text) or call(self, text, **options),
    )
    ParallelCollator(tokenizer, loss.views)([{**row, "monolingual": []} for row in bitext])
    for side in ("source", "target"):
        assert tokenised.count([row[side] for row in bitext]) == 1


def test_the_epoch_reaches_worker_processes(tokenizer, views, bitext):
    collator = ParallelCollator(tokenizer, views)
    loader = torch.utils.data.DataLoader(
        bitext,
        batch_size=8,
        collate_fn=collator,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    epochs = []
    for epoch in (0, 1):
        collator.set_epoch(epoch)
        epochs.append(torch.cat([batch["concatenated"]["labels"].flatten() for batch in loader]))
    assert epochs[0].shape != epochs[1].shape or not torch.equal(*epochs)


def test_a_missing_column_is_named(tokenizer, views):
    with pytest.raises(ValueError, match=r"'target'\] is missing \(found \['english', 'source'\]\)"):
        ParallelCollator(tokenizer, views)([{"source": "ja", "english": "yes"}])


def test_an_own_column_is_added_in_python(tokenizer, bitext):
    """Corpus files have no such columns, so the message must not send users there."""

    class Domain(View):
        columns = ("domain",)

        def build(self, batch, rngs):
            return {}

    with pytest.raises(
        CorpusError, match=r"'domain', which is missing .* Add it in Python with `dataset.add_column`; "
    ):
        ParallelCollator(tokenizer, (Domain("domain"),))(bitext)


@pytest.mark.parametrize("value", [None, 3.5, float("nan")])
def test_rows_without_text_are_refused(tokenizer, views, bitext, value):
    """Such values come from tables of pandas with empty cells."""
    rows = [bitext[0], {**bitext[1], "target": value}]
    with pytest.raises(ValueError, match=f"must be text, but a row has .* and {value}. Remove such rows"):
        ParallelCollator(tokenizer, views)(rows)
