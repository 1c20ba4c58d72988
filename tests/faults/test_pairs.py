"""Pairs that a corpus may hold and that give an objective little or nothing to learn from."""

from __future__ import annotations

import logging
import math
import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from datasets import Dataset

from metaphrase.modeling.views import Batch, links_view, source_view
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import Recipe, list_recipes
from tests.conftest import mostly_slow, small

LINKED = ["mgc-hard", "mgc-soft", "wacse"]
RECIPES = [
    *LINKED,
    "amber",
    "dap",
    "metaphrase",
    "mexma",
    "ppa",
    "tr-xtr",
]  # all objectives of all recipes are among theirs

#: Text that the tokenizer makes no piece of: format and control characters, and a separator that is a space to it.
NOTHING = ["\u200d", "\u200b\u200d", "\x07", "\ufeff\u200e", "\u2060"]


def build(view, rows, tokenizer):
    return view.build(Batch(rows, tokenizer), [np.random.default_rng(at) for at in range(len(rows))])


def learned(trainer, caplog):
    """Train; whether every loss and every weight is finite, no step was skipped, and something was learned."""
    before = {name: value.clone() for name, value in trainer.loss.state_dict().items()}
    with caplog.at_level(logging.WARNING, logger="metaphrase"):
        trainer.train()
    after = trainer.loss.state_dict()
    terms = [log[key] for log in trainer.state.log_history for key in ("loss", *trainer.loss.weights) if key in log]
    return (
        len(terms) > trainer.state.max_steps
        and all(map(math.isfinite, terms))
        and not any("skipped_steps" in log for log in trainer.state.log_history)
        and "NaN or infinite" not in caplog.text
        and all(bool(value.isfinite().all()) for value in after.values())
        and any(not torch.equal(value, after[name]) for name, value in before.items())
    )


# ----------------------------------------------------------------------------------------------------------------- links


def test_links_of_words_without_pieces_are_dropped(tokenizer, fault):
    for word in NOTHING:
        row = {"source": f"der {word} Hund", "target": "the dog", "alignment": "0-0 1-0 1-1 2-1"}
        built = build(links_view(32), [{**row, "source_lang": "de", "target_lang": "en"}], tokenizer)
        assert built["links"][0].tolist() == [[0, 0], [2, 1]]
        assert built["source_spans"][0, 1].tolist() == [0, 0]
    fault("D2", "a word without any piece", tried=len(NOTHING), survived=len(NOTHING))


def test_links_of_words_that_are_unknown_stay(tokenizer, fault):
    """One unknown piece is a piece: the link has something to stand on."""
    words = ["😀", "👩‍👩‍👧", "安", "ⴰ", "\U0001f1f9\U0001f1ff"]
    for word in words:
        row = {"source": f"der {word} Hund", "target": "the dog", "alignment": "0-0 1-0 2-1"}
        built = build(links_view(32), [{**row, "source_lang": "de", "target_lang": "en"}], tokenizer)
        start, end = built["source_spans"][0, 1].tolist()
        assert end > start
        assert len(built["links"][0]) == 3
    fault("D2", "a word unknown to the tokenizer", tried=len(words), survived=len(words))


@pytest.mark.parametrize("length", [3, 5])
def test_every_link_of_a_cut_sentence_stays_unless_a_word_was_cut(tokenizer, bitext, fault, length):
    built = build(links_view(length), bitext, tokenizer)
    last = built["source_spans"].amax(), built["target_spans"].amax()
    assert max(last) < length
    survived = 0
    for at, row in enumerate(bitext):
        # Each word of this bitext is at least one piece, so that the words that are left are the first ones.
        left = [int((built[f"{side}_spans"][at, :, 1] > 0).sum()) for side in ("source", "target")]
        given = [tuple(map(int, link.split("-"))) for link in row["alignment"].split()]
        stay = sorted((i, j) for i, j in given if i < left[0] and j < left[1])
        survived += stay == sorted(tuple(link) for link in built["links"][at].tolist() if link[0] >= 0)
    fault("D1", f"sentences truncated to {length} pieces", tried=len(bitext), survived=survived)


@pytest.mark.parametrize("recipe", LINKED)
@pytest.mark.parametrize("without", ["all", pytest.param("some", marks=pytest.mark.slow)])
def test_pairs_without_a_link_are_trained_on(make_trainer, full_bitext, caplog, fault, recipe, without):
    rows = [
        {**row, "alignment": "" if without == "all" or at % 3 else row["alignment"]}
        for at, row in enumerate(full_bitext)
    ]
    trainer = make_trainer(recipe=recipe, dataset=Dataset.from_list(rows), save_strategy="no")
    assert learned(trainer, caplog)
    fault("D3", f"{without} pairs of a corpus without links", tried=1, survived=1)


@pytest.mark.parametrize("recipe", LINKED)
def test_pairs_whose_links_are_all_cut_are_trained_on(make_trainer, full_bitext, caplog, fault, recipe):
    rows = [
        {**row, "source": f"{row['source']} {'und ' * 30}Ende", "alignment": f"{len(row['source'].split()) + 30}-0"}
        for row in full_bitext
    ]
    trainer = make_trainer(recipe=recipe, dataset=Dataset.from_list(rows), save_strategy="no")
    assert learned(trainer, caplog)
    fault("D3", "pairs whose links are all truncated", tried=1, survived=1)


# ------------------------------------------------------------------------------------------------------------- sentences


def test_the_recipes_here_are_of_every_kind():
    terms = {recipe.name: {term.objective for term in recipe.terms} for recipe in list_recipes()}
    assert set().union(*terms.values()) == set().union(*(terms[name] for name in RECIPES))
    columns = {name: Recipe.load(name).columns for name in RECIPES}
    assert [name for name in RECIPES if "alignment" in columns[name]] == LINKED


@pytest.mark.parametrize("recipe", mostly_slow(RECIPES, RECIPES[::3]))
def test_sentences_without_a_piece_are_trained_on(make_trainer, full_bitext, tokenizer, caplog, fault, recipe):
    """Special tokens are all that is left of one side, of the other, and of both."""
    rows = [dict(row) for row in full_bitext]
    for at, sides in enumerate((("source",), ("target",), ("source", "target"))):
        for side in sides:
            rows[at][side] = NOTHING[at]
        rows[at]["alignment"] = "0-0"
    assert build(source_view(24), [rows[0]], tokenizer)["input_ids"].shape == (1, 2)
    trainer = make_trainer(recipe=recipe, dataset=Dataset.from_list(rows), save_strategy="no")
    fault("B1", "sentences without any piece", tried=3, survived=3 * int(learned(trainer, caplog)))


@pytest.mark.parametrize("sampler", ["no_duplicates", "no_duplicates_hashed"])
def test_no_text_is_twice_in_a_batch(make_trainer, fault, sampler):
    """A copy of a translation would be pushed away as if it were none. A third of the rows repeat a side of others."""
    generator = random.Random(0)
    rows = [{"source": f"der Hund {at}", "target": f"the dog {at}"} for at in range(210)]
    for at in range(70):
        rows.append({**generator.choice(rows), generator.choice(("source", "target")): f"neu {at}"})
    rows += generator.choices(rows, k=20)
    generator.shuffle(rows)
    trainer = make_trainer(dataset=Dataset.from_list(rows), batch_sampler=sampler, recipe="tr")
    batches = list(
        trainer.get_batch_sampler(trainer.train_dataset, batch_size=8, drop_last=False, generator=torch.Generator())
    )
    assert sorted(at for batch in batches for at in batch) == list(range(len(rows)))
    clean = [len({rows[at][side] for at in batch}) == len(batch) for batch in batches for side in ("source", "target")]
    fault("C6", "repeated sentences, kept in separate batches", tried=len(clean), survived=sum(clean))


# ------------------------------------------------------------------------------------------------------------ tokenizers


@pytest.mark.parametrize("token", ["pad", "cls", "sep", "mask"])
def test_a_tokenizer_without_a_special_token_is_refused_where_it_is_needed(tiny_encoder, fault, token):
    setattr(tiny_encoder.tokenizer, f"{token}_token", None)
    advice = "Set its pad_token" if token == "pad" else "Use a recipe such as 'tr'"
    for recipe in ("tr", "dap", "ppa", "wacse"):
        is_needed = token == "pad" or recipe != "tr"
        with pytest.raises(ValueError, match=f"has no {token} token.*{advice}") if is_needed else nullcontext():
            AlignmentLoss(tiny_encoder, small(Recipe.load(recipe)), max_length=24)
    fault("D4", f"a tokenizer without a {token} token", tried=4, survived=4)
