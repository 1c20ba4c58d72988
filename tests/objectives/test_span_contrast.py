import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset

from metaphrase.corpus.phrases import PhraseTable
from metaphrase.corpus.words import parse_links, phrase_pairs
from metaphrase.exceptions import UsageError
from metaphrase.modeling.views import Batch
from metaphrase.objectives.span_contrast import PhrasePairs, SpanContrast, negatives, span_contrast
from metaphrase.training.arguments import AlignmentTrainingArguments
from metaphrase.training.heads import AlignmentHeads
from metaphrase.training.resuming import RunFacts
from tests.oracles import span_contrast_loop, word_places

ROWS = (6, 15, 22, 19, 23)


def sides(encodings):
    return [encodings[side].tokens_blh for side in ("source", "target")]


def phrases_of(row, tokenizer, **settings):
    """Pairs of sets of positions, one per phrase pair of more than one word."""
    source, target = (word_places(row, side, tokenizer) for side in ("source", "target"))
    pairs = phrase_pairs(parse_links(row["alignment"]), len(source), len(target), **settings)
    return [
        ({place for word in source[i:j] for place in word}, {place for word in target[k:m] for place in word})
        for (i, j), (k, m) in pairs
        if j - i > 1 or m - k > 1
    ]


def build(view, rows, tokenizer, seed=0):
    return view.build(Batch(rows, tokenizer), [np.random.default_rng([seed, row]) for row in range(len(rows))])


def pairs_in(features, row):
    return [
        (set(range(*source)), set(range(*target)))
        for source, target in zip(
            features["source_spans"][row].tolist(), features["target_spans"][row].tolist(), strict=True
        )
        if source[1]
    ]


@pytest.mark.parametrize("reduction", ["anchor_mean", "sum"])
def test_matches_loop(make_loss, encodings_of, bitext, tokenizer, reduction):
    loss = make_loss("span-contrast", max_spans=1000, reduction=reduction)
    rows = [bitext[i] for i in ROWS]
    encodings = encodings_of(loss, rows)
    leaves = sides(encodings)
    phrases = [phrases_of(row, tokenizer) for row in rows]
    assert [len(pairs) for pairs in phrases][2] == 0
    targets = [frozenset(target) for _, target in phrases[1]]
    assert len(set(targets)) < len(targets) or len(phrases[1]) > 3
    slow = span_contrast_loop(*leaves, phrases, summed=reduction == "sum")
    fast = loss.objectives["span-contrast"](encodings)
    assert fast.item() == pytest.approx(slow.item(), rel=1e-9)
    got, wanted = (torch.autograd.grad(value, leaves) for value in (fast, slow))
    for ours, theirs in zip(got, wanted, strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_equal_spans_are_one_negative():
    """With unaligned words, several sources share a target, which is one negative."""
    spans = torch.tensor([[[1, 3], [4, 6], [4, 6]]])
    others = torch.tensor([[[1, 3], [4, 6], [4, 7]]])
    states = torch.eye(3, dtype=torch.float64)[None]
    value = span_contrast(states, states, others, spans, reduction="sum")
    one, two = math.log(1 + math.exp(-10)), math.log(1 + 2 * math.exp(-10))
    assert value.item() == pytest.approx(5 * one + two, rel=1e-9)


def test_negatives_share_no_piece_with_the_positive(bitext, tokenizer):
    features = build(PhrasePairs("phrases", 24, max_spans=1000), bitext, tokenizer)
    spans = features["target_spans"]
    wrong = negatives(spans)
    assert wrong.any()
    for row, right, candidate in wrong.nonzero().tolist():
        assert not set(range(*spans[row, right].tolist())) & set(range(*spans[row, candidate].tolist()))
        assert spans[row, candidate, 1] > 0


def test_phrases_are_those_that_are_consistent_with_the_alignment(bitext, tokenizer):
    features = build(PhrasePairs("phrases", 24, max_spans=1000), bitext, tokenizer)
    for number, row in enumerate(bitext):
        assert pairs_in(features, number) == phrases_of(row, tokenizer)
    short = build(PhrasePairs("phrases", 24, max_words=3, max_spans=1000), bitext, tokenizer)
    assert pairs_in(short, 19) == phrases_of(bitext[19], tokenizer, max_length=3)
    assert len(pairs_in(short, 19)) < len(pairs_in(features, 19))


def test_pairs_of_words_can_be_included(bitext, tokenizer):
    row = {"source": "das Haus schläft", "target": "the dog sleeps", "alignment": "0-0 1-2 2-1"}
    words = [word_places(row, side, tokenizer) for side in ("source", "target")]
    features = build(PhrasePairs("phrases", 24, min_words=1), [row], tokenizer)
    wanted = [((0, 1), (0, 1)), ((0, 3), (0, 3)), ((1, 2), (2, 3)), ((1, 3), (1, 3)), ((2, 3), (1, 2))]
    places = [
        tuple({place for word in side[slice(*span)] for place in word} for side, span in zip(words, pair, strict=True))
        for pair in wanted
    ]
    assert pairs_in(features, 0) == places


def test_a_sample_of_too_many_phrases_is_drawn(bitext, tokenizer):
    everything = pairs_in(build(PhrasePairs("phrases", 24, max_spans=1000), bitext[23:], tokenizer), 0)
    assert len(everything) > 16
    view = PhrasePairs("phrases", 24)
    drawn = [pairs_in(build(view, bitext[23:], tokenizer, seed), 0) for seed in (0, 0, 1)]
    assert all(len(pairs) == 16 and all(pair in everything for pair in pairs) for pairs in drawn)
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_phrase_must_be_consistent_with_links_of_cut_words(tokenizer):
    """The second source word is linked to a cut word: no phrase contains it, although its other link is complete."""
    row = {
        "source": "das Haus ist",
        "target": "the house is the house is the house is the house is the house",
        "alignment": "0-0 1-1 1-13 2-2",
    }
    whole = pairs_in(build(PhrasePairs("phrases", 64, min_words=1), [row], tokenizer), 0)
    cut = build(PhrasePairs("phrases", 10, min_words=1), [row], tokenizer)
    words = word_places(row, "source", tokenizer)
    assert pairs_in(cut, 0) == [pair for pair in whole if max(pair[1]) < 9]
    assert not any(set(words[1]) & source for source, _ in pairs_in(cut, 0))
    assert pairs_in(cut, 0)


def test_links_that_do_not_fit_are_refused(bitext, tokenizer):
    with pytest.raises(ValueError, match="does not fit a pair of 3 and 3 words"):
        build(PhrasePairs("phrases", 24), [{**bitext[0], "alignment": "0-0 7-7"}], tokenizer)


def test_without_phrases_the_loss_is_a_zero_with_a_graph(make_loss, encodings_of, bitext):
    loss = make_loss("span-contrast")
    for rows in ([{**row, "alignment": ""} for row in bitext[:3]], [bitext[22]]):
        encodings = encodings_of(loss, rows)
        value = loss.objectives["span-contrast"](encodings)
        assert value.item() == 0
        value.backward()
        assert not any(leaf.grad.any() for leaf in sides(encodings))


def test_padding_and_order_change_nothing(make_loss, encodings_of, bitext):
    loss = make_loss("span-contrast")
    objective, encodings = loss.objectives["span-contrast"], encodings_of(loss, bitext)
    value = objective(encodings)
    torch.testing.assert_close(objective(encodings_of(loss, bitext[::-1])), value)
    padded = {
        name: replace(encodings[name], tokens_blh=F.pad(encodings[name].tokens_blh, (0, 0, 0, 3), value=5.0))
        for name in ("source", "target")
    }
    features = {name: F.pad(spans, (0, 0, 0, 4)) for name, spans in encodings["phrases"].features.items()}
    padded["phrases"] = replace(encodings["phrases"], features=features)
    torch.testing.assert_close(objective(padded), value)
    value.backward()
    for side in ("source", "target"):
        grad, mask = encodings[side].tokens_blh.grad, encodings[side].mask_bl
        assert grad[mask].abs().max() > 0
        assert not grad[~mask].any()
        assert not grad[:, 0].any()


def test_sides_can_be_swapped():
    source, target = torch.randn(2, 2, 3, 4, dtype=torch.float64)
    source_spans = torch.tensor([[[1, 3], [3, 5], [6, 8]], [[1, 2], [2, 5], [0, 0]]])
    target_spans = torch.tensor([[[1, 2], [4, 7], [2, 4]], [[3, 5], [1, 3], [0, 0]]])
    one = span_contrast(source, target, source_spans, target_spans)
    torch.testing.assert_close(span_contrast(target, source, target_spans, source_spans), one)
    assert one > 0


def test_the_settings_of_the_heads_do_not_tell_the_home_folder(make_loss, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "table.tsv").write_text("ein hund\ta dog\t0.9\n")
    loss = make_loss("span-contrast", phrase_table=str(tmp_path / "table.tsv"))
    assert loss.heads.config.objectives["span-contrast"]["args"]["phrase_table"] == "~/table.tsv"
    (tmp_path / "table.tsv").unlink()
    assert not AlignmentHeads(loss.heads.config).heads  # others load the heads without the table


def test_a_cut_requires_a_phrase_table():
    with pytest.raises(UsageError, match=r"'cut' \(0\.9\) filters the phrases of a phrase table"):
        SpanContrast(cut=0.9)


def test_a_phrase_table_filters(make_loss, batch_of, bitext, tokenizer, tmp_path):
    path = str(PhraseTable.of_corpus(bitext).save(tmp_path / "phrases.tsv.gz"))
    table = PhraseTable.load(path)
    everything = build(PhrasePairs("phrases", 24, max_spans=1000), bitext, tokenizer)
    views = {
        cut: build(PhrasePairs("phrases", 24, max_spans=1000, phrase_table=path, cut=cut), bitext, tokenizer)
        for cut in (0.0, 0.9)
    }
    assert torch.equal(views[0.0]["source_spans"], everything["source_spans"])
    kept = [
        sum(
            table.score(row["source"].split()[slice(*one)], row["target"].split()[slice(*other)]) >= 0.9
            and max(one[1] - one[0], other[1] - other[0]) > 1
            for one, other in phrase_pairs(
                parse_links(row["alignment"]), len(row["source"].split()), len(row["target"].split())
            )
        )
        for row in bitext
    ]
    assert (views[0.9]["source_spans"][..., 1] > 0).sum(dim=1).tolist() == kept
    assert 0 < sum(kept) < (everything["source_spans"][..., 1] > 0).sum()
    loss = make_loss("span-contrast", phrase_table=path, cut=0.9)
    assert loss(batch_of(loss, bitext))["span-contrast"] > 0
    foreign = str(PhraseTable().save(tmp_path / "empty.tsv"))
    assert not build(PhrasePairs("phrases", 24, phrase_table=foreign), bitext, tokenizer)["source_spans"].any()


def test_a_run_with_another_phrase_table_is_another_run(make_loss, bitext, tmp_path):
    """The checkpoint names the table by its path only."""
    path, found = str(tmp_path / "table.tsv"), []
    arguments = AlignmentTrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True)
    for cut in (0, 0.9):
        PhraseTable.of_corpus(bitext).filter(cut).save(path)
        loss = make_loss("span-contrast", phrase_table=path, cut=0.5)
        found.append(RunFacts(loss, arguments).collect(Dataset.from_list(bitext)))
    assert {name for name in found[0] if found[0][name] != found[1][name]} == {"span-contrast.phrase_table"}
