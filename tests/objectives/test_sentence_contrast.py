import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer

from metaphrase.modeling.encoding import encode_views
from metaphrase.modeling.languages import language_id
from metaphrase.modeling.views import Batch
from metaphrase.objectives.sentence_contrast import BackTranslations, SentenceContrast
from tests.oracles import assert_same_loss, sentence_contrast_loop
from tests.processes import run_python

ROOT = Path(__file__).parents[2]
NAME = "sentence-contrast"


@pytest.fixture
def noisy(bitext):
    """Rows with two back-translations of the source, one of the target, and none in the last row."""
    rows = [
        {**row, "source_bt": f"das ist {row['source']} ||| {row['source']} nicht", "target_bt": f"not {row['target']}"}
        for row in bitext[:6]
    ]
    return [*rows, {**bitext[6], "source_bt": "", "target_bt": None}]


def real(encoding, row):
    return list(encoding.tokens_blh[row][encoding.mask_bl[row]])


def leaves_of(encodings):
    return [encoding.tokens_blh for encoding in encodings.values()]


@pytest.mark.parametrize("batch", [2, 7])
def test_matches_loop(make_loss, encodings_of, bitext, batch):
    loss = make_loss(NAME, back_translation="none")
    encodings = encodings_of(loss, bitext[:batch])
    sentences = [[real(encodings[side], row) for row in range(batch)] for side in ("source", "target")]
    assert_same_loss(loss.objectives[NAME](encodings), sentence_contrast_loop(*sentences), leaves_of(encodings))


@pytest.mark.parametrize("mode", ["sample", "all"])
def test_matches_loop_with_back_translations(make_loss, encodings_of, noisy, mode):
    loss = make_loss(NAME, back_translation=mode)
    encodings = encodings_of(loss, noisy)
    bt = encodings[f"back-translations-{mode}"]
    originals, back = {}, {}
    for side in ("source", "target"):
        row = bt.features[f"{side}_row"].tolist()
        originals[side] = [real(encodings[side], n) for n in range(len(noisy))]
        back[side] = [real(bt, row[n]) if row[n] >= 0 else originals[side][n] for n in range(len(noisy))]
        assert row[-1] == -1
        assert (-1 in row[:-1]) == (mode == "sample")
    if mode == "sample":
        slow = sentence_contrast_loop(back["source"], back["target"])
    else:
        choices = [(x, y) for x in (originals, back) for y in (originals, back)]
        slow = sum(sentence_contrast_loop(x["source"], y["target"]) for x, y in choices)
    assert_same_loss(loss.objectives[NAME](encodings), slow, leaves_of(encodings))


def test_sentences_are_gathered_once(make_loss, encodings_of, noisy, monkeypatch):
    loss = make_loss(NAME, back_translation="all")
    calls = []
    monkeypatch.setattr("metaphrase.objectives.base.gather_with_gradient", lambda one: calls.append(1) or one)
    loss.objectives[NAME](encodings_of(loss, noisy))
    assert len(calls) == 4


def test_numbers_by_hand(make_loss, encodings_of, bitext):
    loss = make_loss(NAME, back_translation="none")
    encodings = encodings_of(loss, bitext[:4])
    same = {
        name: replace(encoding, tokens_blh=torch.ones_like(encoding.tokens_blh))
        for name, encoding in encodings.items()
    }
    assert loss.objectives[NAME](same).item() == pytest.approx(math.log(4))
    apart = {
        name: replace(
            encoding, tokens_blh=torch.eye(4, 32, dtype=torch.float64)[:, None].expand_as(encoding.tokens_blh)
        )
        for name, encoding in encodings.items()
    }
    assert loss.objectives[NAME](apart).item() == pytest.approx(math.log(1 + 3 * math.exp(-10)), rel=1e-9)


def test_one_pair_costs_nothing(make_loss, encodings_of, bitext):
    loss = make_loss(NAME, back_translation="none")
    value = loss.objectives[NAME](encodings_of(loss, bitext[:1]))
    value.backward()
    assert value.item() == 0


def test_symmetry_order_and_padding(make_loss, encodings_of, bitext):
    loss = make_loss(NAME, back_translation="none")
    objective, encodings = loss.objectives[NAME], encodings_of(loss, bitext[:9])
    value = objective(encodings)
    torch.testing.assert_close(objective({"source": encodings["target"], "target": encodings["source"]}), value)
    torch.testing.assert_close(objective(encodings_of(loss, bitext[8::-1])), value)
    padded = {
        name: replace(
            encoding,
            tokens_blh=F.pad(encoding.tokens_blh, (0, 0, 0, 3), value=7.0),
            mask_bl=F.pad(encoding.mask_bl, (0, 3)),
        )
        for name, encoding in encodings.items()
    }
    torch.testing.assert_close(objective(padded), value)
    value.backward()
    for encoding in encodings.values():
        assert encoding.tokens_blh.grad[encoding.mask_bl].abs().max() > 0
        assert not encoding.tokens_blh.grad[~encoding.mask_bl].any()


def draws(noisy, tokenizer, share, rounds):
    """Counts of the original and of each back-translation over many epochs, for both sides of the first row."""
    view = BackTranslations("noisy", 24, share)
    chosen = Counter()
    for seed in range(rounds):
        features = view.build(Batch(noisy[:1], tokenizer), [np.random.default_rng(seed)])
        texts = {-1: "original"}
        for row, ids in enumerate(features["input_ids"].tolist()):
            texts[row] = tokenizer.decode(ids, skip_special_tokens=True)
        chosen[texts[int(features["source_row"])], texts[int(features["target_row"])]] += 1
    return chosen


def test_each_side_is_drawn_by_itself(noisy, tokenizer):
    chosen = draws(noisy, tokenizer, 0.5, 2000)
    first, second, target = (
        tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True)
        for text in (*noisy[0]["source_bt"].split(" ||| "), noisy[0]["target_bt"])
    )
    for source, share in (("original", 1 / 2), (first, 1 / 4), (second, 1 / 4)):
        for other in ("original", target):
            assert chosen[source, other] / 2000 == pytest.approx(share / 2, abs=0.03)
    assert len(chosen) == 6
    assert set(draws(noisy, tokenizer, 1.0, 50)) == {(first, target), (second, target)}


def test_only_sampled_back_translations_are_encoded(make_loss, batch_of, noisy, bitext):
    loss = make_loss(NAME)
    batch = batch_of(loss, noisy)["back-translations-sample"]
    rows = torch.cat([batch["source_row"], batch["target_row"]])
    assert rows[rows >= 0].tolist() == list(range(len(batch["input_ids"])))
    assert len(batch["language"]) == len(batch["input_ids"]) < 2 * len(noisy)
    calls = []
    hook = loss.model[0].auto_model.encoder.register_forward_hook(lambda *args: calls.append(1))
    encode_views(loss.model, batch_of(loss, noisy))
    hook.remove()
    assert len(calls) == 1


def test_without_back_translations_the_originals_are_used(make_loss, batch_of, bitext):
    rows = [{**row, "source_bt": "", "target_bt": ""} for row in bitext[:5]]
    plain, sample, every = (make_loss(NAME, back_translation=mode) for mode in ("none", "sample", "all"))
    values = [loss(batch_of(loss, rows))[NAME] for loss in (plain, sample, every)]
    torch.testing.assert_close(values[1], values[0])
    torch.testing.assert_close(values[2], 4 * values[0])
    values[1].backward()


def test_columns(make_loss, batch_of, bitext):
    assert batch_of(make_loss(NAME, back_translation="none"), bitext[:2]).keys() == {"source", "target"}
    with pytest.raises(ValueError, match=r"reads the column 'source_bt'.*back_translate\.py"):
        batch_of(make_loss(NAME), bitext[:2])


def test_an_unknown_choice_is_refused():
    with pytest.raises(ValueError, match="'sample', 'all', 'none', but is 'both'"):
        SentenceContrast(back_translation="both")


@pytest.mark.slow
def test_the_tutorial_runs(noisy, tiny_encoder_dir, tmp_path):
    rows = [{key: row[key] or "" for key in ("source", "target", "source_bt", "target_bt")} for row in noisy] * 5
    lines = [
        f"{row['source']} {n}\t{row['target']} {n}\t{row['source_bt']}\t{row['target_bt']}"
        for n, row in enumerate(rows)
    ]
    bitext = tmp_path / "de-en.tsv"
    bitext.write_text("\n".join(["source\ttarget\tsource_bt\ttarget_bt", *lines, ""]), encoding="utf-8")
    done = run_python(ROOT / "trainers" / "mgc.py", bitext, tmp_path / "out", tiny_encoder_dir, 2)
    assert done.returncode == 0, done.stderr
    assert "phrase pairs" in done.stdout
    assert "back_translation: sample" in (tmp_path / "out" / "recipe.yaml").read_text(encoding="utf-8")
    assert SentenceTransformer(str(tmp_path / "out"), device="cpu").encode("ja").shape == (32,)


def test_auto_samples_if_there_are_back_translations(make_loss, encodings_of, bitext, noisy):
    plain = [{key: row[key] for key in ("source", "target", "source_lang", "target_lang")} for row in bitext[:7]]
    values = {}
    for mode, rows in (("auto", plain), ("none", plain), ("auto", noisy), ("sample", noisy)):
        loss = make_loss(NAME, back_translation=mode)
        values[mode, rows is noisy] = loss.objectives[NAME](encodings_of(loss, rows))
    torch.testing.assert_close(values["auto", False], values["none", False], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(values["auto", True], values["sample", True], rtol=1e-9, atol=1e-12)
    assert values["sample", True] != values["none", False]


def test_back_translations_have_the_language_of_their_side(tokenizer):
    row = {"source_bt": "ein Satz", "target_bt": "a sentence", "source_lang": "de", "target_lang": "en"}
    built = BackTranslations("all", 24, 1.0).build(Batch([row], tokenizer), [np.random.default_rng(0)])
    assert built["language"].tolist() == [language_id("de"), language_id("en")]
