import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from metaphrase.modeling.languages import language_id
from metaphrase.objectives.sentence_to_tokens import piece_frequencies, sentence_to_tokens
from tests.oracles import sentence_to_tokens_loop

LANGUAGES = ["de", "en"]


def texts_of(encoding, tokenizer):
    """The pieces of each sentence without the special ones."""
    rows = [ids[mask].tolist() for ids, mask in zip(encoding.ids_bl, encoding.mask_bl, strict=True)]
    return [[piece for piece in row if piece not in tokenizer.all_special_ids] for row in rows]


def loop(loss, encodings, tokenizer):
    head, source, target = loss.objectives["xtr"].head, encodings["source"], encodings["target"]
    return sum(
        sentence_to_tokens_loop(
            head, read.sentence_bh, wanted.features["language"], texts_of(wanted, tokenizer), read.table_vh
        )
        for read, wanted in ((source, target), (target, source))
    )


def with_repeats(bitext):
    """Sentences in which pieces occur several times."""
    twice = {**bitext[3], "target": f"{bitext[3]['target']} {bitext[3]['target']} {bitext[4]['target']}"}
    return [bitext[0], twice, bitext[6]]


@pytest.mark.parametrize("told", [True, False])
def test_matches_loop(make_loss, encodings_of, bitext, tokenizer, told):
    loss = make_loss("xtr", language_embeddings=told, languages=LANGUAGES if told else [])
    encodings = encodings_of(loss, with_repeats(bitext))
    assert any(len(set(text)) < len(text) for text in texts_of(encodings["target"], tokenizer))
    fast, slow = loss.objectives["xtr"](encodings), loop(loss, encodings, tokenizer)
    assert fast.item() == pytest.approx(slow.item(), rel=1e-9)
    sentences = [encodings[side].sentence_bh for side in ("source", "target")]
    leaves = [*sentences, encodings["source"].table_vh, *loss.heads.parameters()]
    got, wanted = (torch.autograd.grad(value, leaves) for value in (fast, slow))
    for ours, theirs in zip(got, wanted, strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-11)


def test_piece_frequencies():
    ids = torch.tensor([[1, 8, 9, 8, 2, 0], [1, 3, 2, 0, 0, 0], [1, 2, 0, 0, 0, 0]])
    rows, labels, shares = piece_frequencies(ids, ids > 2)
    assert list(zip(rows.tolist(), labels.tolist(), shares.tolist(), strict=True)) == [
        (0, 8, pytest.approx(2 / 3)),
        (0, 9, pytest.approx(1 / 3)),
        (1, 3, 1.0),
    ]


def test_the_true_distribution_scores_zero(make_loss, encodings_of, bitext, tokenizer):
    """A head whose logits are log p, whatever it reads."""
    loss = make_loss("xtr", languages=LANGUAGES)
    head, encodings = loss.objectives["xtr"].head, encodings_of(loss, bitext[:1])
    rows, labels, shares = piece_frequencies(
        encodings["target"].ids_bl, encodings["target"].mask_bl & (encodings["target"].ids_bl > 4), torch.float64
    )
    with torch.no_grad():
        head.mlp[2].weight.zero_()
        head.vocabulary.bias_v.fill_(-1e4)
        head.vocabulary.bias_v[labels] = shares.log()
    value = sentence_to_tokens(
        head,
        encodings["source"].sentence_bh,
        encodings["target"].features["language"],
        rows,
        labels,
        shares,
        encodings["source"].table_vh,
    )
    assert value.item() == pytest.approx(0, abs=1e-12)
    assert loss.objectives["xtr"](encodings) > 0


def test_equals_kl_divergence_of_whole_distributions(make_loss, encodings_of, bitext, tokenizer):
    loss = make_loss("xtr", languages=LANGUAGES)
    head, encodings = loss.objectives["xtr"].head, encodings_of(loss, with_repeats(bitext))
    wanted = 0.0
    for read, told in (("source", "target"), ("target", "source")):
        other = encodings[told]
        hidden = head(encodings[read].sentence_bh, other.features["language"])
        log_q = F.log_softmax(F.linear(hidden, other.table_vh, head.vocabulary.bias_v), dim=-1)
        p = torch.zeros_like(log_q)
        for row, text in enumerate(texts_of(other, tokenizer)):
            for piece in text:
                p[row, piece] += 1 / len(text)
        wanted = wanted + F.kl_div(log_q, p, reduction="batchmean")
    torch.testing.assert_close(loss.objectives["xtr"](encodings), wanted, rtol=1e-9, atol=1e-12)


def test_an_uninformed_head_scores_log_vocabulary(make_loss, encodings_of, bitext, tokenizer):
    loss = make_loss("xtr", vocabulary="untied", languages=LANGUAGES)
    with torch.no_grad():
        loss.heads.heads["xtr"].vocabulary.table_vh.zero_()
    encodings = encodings_of(loss, bitext[:4])
    wanted = 0.0
    for side in ("source", "target"):
        for text in texts_of(encodings[side], tokenizer):
            shares = torch.tensor([text.count(piece) / len(text) for piece in set(text)], dtype=torch.float64)
            wanted += (math.log(len(tokenizer)) + (shares * shares.log()).sum().item()) / 4
    assert loss.objectives["xtr"](encodings).item() == pytest.approx(wanted, rel=1e-9)


def test_a_sentence_is_projected_once(make_loss, encodings_of, bitext, monkeypatch):
    from metaphrase.modeling import functional

    shapes = []
    original = functional._block_logits
    monkeypatch.setattr(functional, "_block_logits", lambda *args: shapes.append(len(args[0])) or original(*args))
    loss = make_loss("xtr", languages=LANGUAGES)
    loss.objectives["xtr"](encodings_of(loss, bitext[:5]))
    assert shapes == [10]  # one block of the vocabulary, both directions in it


def test_only_sentence_embeddings_are_read(make_loss, encodings_of, bitext):
    loss = make_loss("xtr", languages=LANGUAGES)
    encodings = encodings_of(loss, bitext[:5])
    leaves = [encodings[side].tokens_blh for side in ("source", "target")]
    assert torch.autograd.grad(loss.objectives["xtr"](encodings), leaves, allow_unused=True) == (None, None)


def test_padding_and_order_change_nothing(make_loss, encodings_of, bitext):
    loss = make_loss("xtr", languages=LANGUAGES)
    objective, encodings = loss.objectives["xtr"], encodings_of(loss, bitext[:5])
    target = encodings["target"]
    padded = replace(
        target,
        features={**target.features, "input_ids": F.pad(target.ids_bl, (0, 4))},
        mask_bl=F.pad(target.mask_bl, (0, 4)),
    )
    torch.testing.assert_close(
        objective({**encodings, "target": padded}), objective(encodings), rtol=1e-12, atol=1e-12
    )
    swapped = {"source": encodings["target"], "target": encodings["source"]}
    torch.testing.assert_close(objective(swapped), objective(encodings), rtol=1e-12, atol=1e-12)
    other = make_loss("xtr", languages=LANGUAGES)
    other.heads.load_state_dict(loss.heads.state_dict())
    permuted = other.objectives["xtr"](encodings_of(other, [bitext[k] for k in (3, 1, 4, 0, 2)]))
    torch.testing.assert_close(permuted, objective(encodings), rtol=1e-9, atol=1e-12)


def test_the_head_reads_the_language_to_predict(make_loss, encodings_of, bitext):
    loss = make_loss("xtr", languages=LANGUAGES)
    encodings = encodings_of(loss, bitext[:4])
    value = loss.objectives["xtr"](encodings)
    value.backward()
    assert (loss.objectives["xtr"].head.languages.table.weight.grad.abs().sum(1) > 0).all()
    german = torch.full_like(encodings["target"].features["language"], language_id("de"))
    relabelled = replace(encodings["target"], features={**encodings["target"].features, "language": german})
    assert loss.objectives["xtr"]({**encodings, "target": relabelled}) != value
    with pytest.raises(ValueError, match="Pass `languages` to AlignmentLoss, or set language_embeddings to false"):
        make_loss("xtr")


def test_sentences_of_special_pieces_alone_are_a_zero_with_a_graph(make_loss, encodings_of, bitext):
    loss = make_loss("xtr", languages=LANGUAGES)
    value = loss.objectives["xtr"](encodings_of(loss, [{**bitext[0], "source": "", "target": ""}]))
    assert value.item() == 0
    value.backward()


def test_the_english_vocabulary_is_refused(make_loss):
    with pytest.raises(ValueError, match="'tied', 'untied', but is 'english'"):
        make_loss("xtr", vocabulary="english")


@pytest.mark.long
def test_it_learns_to_predict_four_pairs(make_loss, batch_of, bitext):
    loss = make_loss("xtr", vocabulary="untied", languages=LANGUAGES).float()
    batch = batch_of(loss, bitext[:4])
    optimizer = torch.optim.AdamW(loss.parameters(), lr=3e-3)
    first = loss(batch)["xtr"].item()
    for _ in range(60):
        optimizer.zero_grad()
        loss(batch)["xtr"].backward()
        optimizer.step()
    assert loss(batch)["xtr"].item() < first / 4
