import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import BertForMaskedLM

from metaphrase.encoders.loading import load_encoder
from metaphrase.modeling.views import UNSCORED, Batch, masked_sentence
from metaphrase.objectives.masked_language_modeling import masked_language_modeling, monolingual_view
from tests.oracles import cross_entropy_loop

MONOLINGUAL = "concatenated-0.5-continuous-pair-segments-monolingual"


@pytest.fixture
def rows(bitext):
    """Six pairs: three have a monolingual text of two sentences, one of them also a text of one sentence."""
    texts = [[f"{row['target']}\n{row['source']}"] for row in bitext[:3]] + [[], [], []]
    texts[2].append(bitext[9]["target"])
    return [{**row, "monolingual": text} for row, text in zip(bitext, texts, strict=False)]


def scored_rows(encodings):
    """State and label of every masked piece, view by view."""
    states, labels = [], []
    for encoding in encodings:
        for b in range(len(encoding.features["labels"])):
            for at, label in enumerate(encoding.features["labels"][b].tolist()):
                if label != UNSCORED:
                    states.append(encoding.tokens_blh[b, at])
                    labels.append(label)
    return torch.stack(states), torch.tensor(labels)


@pytest.mark.parametrize("text", ["pair", "monolingual"])
def test_matches_loop(make_loss, encodings_of, rows, text):
    loss = make_loss("mlm", text=text, mask_rate=0.5, transform="none")
    encodings = encodings_of(loss, rows)
    names = ["masked-source-0.5", "masked-target-0.5"] if text == "pair" else [MONOLINGUAL]
    assert list(encodings) == names
    objective = loss.objectives["mlm"]
    table = encodings[names[0]].table_vh
    states, labels = scored_rows(encodings.values())
    slow = cross_entropy_loop(states, table, labels, objective.head.bias_v)
    fast = objective(encodings)
    assert fast.item() == pytest.approx(slow.item(), rel=1e-9)
    leaves = [*(encodings[name].tokens_blh for name in names), table, objective.head.bias_v]
    got, wanted = (torch.autograd.grad(value, leaves) for value in (fast, slow))
    assert min(grad.abs().max() for grad in wanted) > 0
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_a_pretrained_head_is_that_of_transformers(make_loss, tiny_mlm_dir, tokenizer, tmp_path):
    theirs = BertForMaskedLM.from_pretrained(tiny_mlm_dir).eval()
    with torch.no_grad():
        for parameter in theirs.cls.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loss = make_loss("mlm", model=load_encoder(tmp_path, default_pooling="cls"))
    theirs = theirs.double()
    state_nh, label_n = torch.randn(5, 32, dtype=torch.float64), torch.arange(5) + 7
    ours = loss.objectives["mlm"].head(state_nh, label_n, theirs.get_input_embeddings().weight)
    torch.testing.assert_close(ours, F.cross_entropy(theirs.cls(state_nh), label_n))


@pytest.mark.parametrize("text", ["pair", "monolingual"])
def test_nothing_masked_is_a_zero_with_a_graph(make_loss, batch_of, rows, text):
    loss = make_loss("mlm", text=text, mask_rate=0.0)
    value = loss(batch_of(loss, rows))["mlm"]
    assert value.item() == 0
    value.backward()
    assert all(p.grad is None or not p.grad.any() for p in loss.parameters())


def test_a_batch_without_monolingual_text_is_a_zero_with_a_graph(make_loss, batch_of, rows):
    loss = make_loss("mlm", text="monolingual", mask_rate=0.9)
    value = loss(batch_of(loss, rows[3:]))["mlm"]
    assert value.item() == 0
    value.backward()


@pytest.mark.parametrize("text", ["pair", "monolingual"])
def test_a_blank_table_scores_log_vocabulary(make_loss, encodings_of, rows, tokenizer, text):
    loss = make_loss("mlm", text=text, mask_rate=0.5, vocabulary="untied")
    with torch.no_grad():
        loss.heads.heads["mlm"].table_vh.zero_()
    assert loss.objectives["mlm"](encodings_of(loss, rows)).item() == pytest.approx(math.log(len(tokenizer)))


def test_padding_and_the_order_of_the_batch_change_nothing(make_loss, encodings_of, bitext):
    loss = make_loss("mlm", mask_rate=0.5)
    rows = sorted(bitext, key=lambda row: len(row["source"]))[:2] + bitext[-2:]
    values = [loss.objectives["mlm"](encodings_of(loss, some)) for some in (rows, rows[::-1])]
    torch.testing.assert_close(*values, rtol=1e-12, atol=0)
    alone = [encodings_of(loss, [row]) for row in rows]
    counts = [sum((e.features["labels"] != UNSCORED).sum() for e in encodings.values()) for encodings in alone]
    weighted = sum(loss.objectives["mlm"](e) * n for e, n in zip(alone, counts, strict=True)) / sum(counts)
    torch.testing.assert_close(weighted, values[0], rtol=1e-10, atol=0)


def test_monolingual_texts_are_bert_pairs(rows, tokenizer):
    view = monolingual_view(24, 0.0)
    features = view.build(Batch(rows, tokenizer), [np.random.default_rng(0)] * 6)
    texts = [text for row in rows for text in row["monolingual"]]
    assert len(features["input_ids"]) == len(texts) == 4
    for at, text in enumerate(texts):
        wanted = tokenizer(*text.split("\n"), return_token_type_ids=True)
        length = len(wanted["input_ids"])
        assert features["input_ids"][at, :length].tolist() == wanted["input_ids"]
        assert features["position_ids"][at, :length].tolist() == list(range(length))
        first = len(tokenizer(text.split("\n")[0])["input_ids"])
        assert features["token_type_ids"][at, :length].tolist() == [0] * first + [1] * (length - first)
        assert features["attention_mask"][at].sum() == length


@pytest.mark.parametrize("kind", ["pair", "monolingual"])
def test_specials_are_never_masked(rows, tokenizer, kind):
    view = monolingual_view(24, 1.0) if kind == "monolingual" else masked_sentence("source", 24, 1.0)
    features = view.build(Batch(rows, tokenizer), [np.random.default_rng(at) for at in range(6)])
    plain = monolingual_view(24, 0.0) if kind == "monolingual" else masked_sentence("source", 24, 0.0)
    ids = plain.build(Batch(rows, tokenizer), [np.random.default_rng(at) for at in range(6)])["input_ids"]
    special = torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
    assert torch.equal(features["input_ids"][special], ids[special])
    assert (features["labels"][special] == UNSCORED).all()
    assert torch.equal(features["labels"][~special], ids[~special])


def test_several_views_are_one_mean(make_loss, encodings_of, rows):
    """The mean is taken over the pieces of all views, not over the views."""
    loss = make_loss("mlm", mask_rate=0.5)
    read = list(encodings_of(loss, rows).values())
    head, table = loss.objectives["mlm"].head, read[0].table_vh
    tokens, labels = [e.tokens_blh for e in read], [e.features["labels"].clone() for e in read]
    labels[1][1:] = UNSCORED
    parts = [masked_language_modeling(head, [t], [k], table) for t, k in zip(tokens, labels, strict=True)]
    counts = [int((k != UNSCORED).sum()) for k in labels]
    assert 0 < counts[1] < counts[0]
    whole = (parts[0] * counts[0] + parts[1] * counts[1]) / sum(counts)
    torch.testing.assert_close(masked_language_modeling(head, tokens, labels, table), whole)


def test_impossible_arguments_are_refused(make_loss):
    with pytest.raises(ValueError, match="'pair', 'monolingual', but is 'wiki'"):
        make_loss("mlm", text="wiki")
    with pytest.raises(ValueError, match="'tied', 'untied', but is 'english'"):
        make_loss("mlm", vocabulary="english")
    make_loss("mlm", max_length=80)
    with pytest.raises(ValueError, match="up to 81 positions, but the encoder has 80"):
        make_loss("mlm", max_length=81)
    with pytest.raises(ValueError, match="up to 81 positions, but the encoder has 80"):
        make_loss("mlm", text="monolingual", max_length=41)
