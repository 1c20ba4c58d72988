import csv
import logging

import numpy as np
import pytest
import torch
from datasets import Dataset
from sentence_transformers.base.evaluation import SequentialEvaluator

from metaphrase.aligners.embedding import EmbeddingAligner
from metaphrase.corpus.words import Words, parse_links
from metaphrase.evaluation.word_alignment import (
    RULES,
    GoldPair,
    WordAlignmentEvaluator,
    alignment_scores,
    evaluate_word_alignment,
    load_gold_lines,
    load_pharaoh,
    load_wpt,
    parse_gold,
    peer_scores,
    tune_rule,
)
from metaphrase.exceptions import DataError, UsageError
from metaphrase.training.arguments import AlignmentTrainingArguments
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import Recipe
from metaphrase.training.trainer import AlignmentTrainer


def scores_loop(predicted, sure, possible):
    """Och and Ney 2003, section 6, link by link."""
    a = s = right = allowed = 0
    for links, surely, possibly in zip(predicted, sure, possible, strict=True):
        for link in set(links):
            a += 1
            right += link in surely
            allowed += link in surely or link in possibly
        s += len(set(surely))
    precision, recall = allowed / a, right / s
    return precision, recall, 2 * precision * recall / (precision + recall), 1 - (right + allowed) / (a + s)


def random_links(rng, count):
    return [tuple(link) for link in rng.integers(0, 6, (count, 2)).tolist()]


@pytest.mark.parametrize("seed", range(20))
def test_scores_match_the_loop(seed):
    rng = np.random.default_rng(seed)
    predicted, sure, possible = ([random_links(rng, rng.integers(3, 15)) for _ in range(4)] for _ in range(3))
    np.testing.assert_allclose(
        alignment_scores(predicted, sure, possible), scores_loop(predicted, sure, possible), rtol=1e-12
    )


def test_scores_by_hand():
    # A = 3 links, S = 2, |A ∩ S| = 1, |A ∩ P| = 2
    scores = alignment_scores([[(0, 0), (1, 1)], [(0, 0)]], [[(0, 0)], [(1, 1)]], [[(0, 0), (1, 1)], [(1, 1)]])
    assert scores == pytest.approx((2 / 3, 1 / 2, 4 / 7, 1 - 3 / 5))


def test_sums_are_over_the_corpus_not_means_of_pairs():
    predicted = [[(0, 0)], [(0, 0), (1, 1), (2, 2)]]
    gold = [[(0, 0)], [(3, 3), (4, 4), (5, 5)]]
    assert alignment_scores(predicted, gold, gold).precision == 1 / 4


@pytest.mark.parametrize("seed", range(5))
def test_without_possible_links_the_error_rate_is_one_minus_f1(seed):
    rng = np.random.default_rng(seed)
    predicted, sure = ([random_links(rng, 12) for _ in range(3)] for _ in range(2))
    scores = alignment_scores(predicted, sure, sure)
    assert scores.aer == pytest.approx(1 - scores.f1)


def test_the_ends_of_the_scale():
    gold = [[(0, 0), (1, 1)]]
    assert alignment_scores(gold, gold, gold) == (1, 1, 1, 0)
    assert alignment_scores([[]], gold, gold) == (0, 0, 0, 1)
    assert alignment_scores([[(0, 1)]], gold, gold) == (0, 0, 0, 1)
    assert alignment_scores([[]], [[]], [[]]) == (0, 0, 0, 0)
    assert alignment_scores([], [], []) == (0, 0, 0, 0)
    # leaving out what is only possible costs nothing
    assert alignment_scores(gold, gold, [[(0, 0), (1, 1), (2, 2)]]).aer == 0


def test_sides_of_different_length_are_refused():
    with pytest.raises(ValueError, match="argument 2 is longer"):
        alignment_scores([[(0, 0)]], [[(0, 0)], []], [[(0, 0)], []])


def test_gold_strings():
    sure, possible = parse_gold("0-0 12p3 4-5")
    assert sure == {(0, 0), (4, 5)}
    assert possible == {(0, 0), (4, 5), (12, 3)}
    assert parse_gold("") == (frozenset(), frozenset())
    for wrong in ("0", "0-", "0x1", "-1-0", "0-0p1"):
        with pytest.raises(ValueError, match="'0-0 1p2'"):
            parse_gold(wrong)


@pytest.fixture
def wpt(tmp_path):
    (tmp_path / "e").write_text(
        "<s snum=0007>the cat sleeps</s>\n<s snum=3> yes .  </s>\n<s snum=9>no gold</s>\n", encoding="utf-8"
    )
    (tmp_path / "h").write_bytes('<s snum="3">ja .</s>\r\n<s snum=7> die Katze schläft   </s>\r\n'.encode())
    (tmp_path / "wa").write_text("7 1 1\n07 2 2 S\n7 3 3 p 0.7\n7 3 2 0.9\n3 1 1 S 1\n3 2 0\n", encoding="utf-8")
    return tmp_path / "e", tmp_path / "h", tmp_path / "wa"


def test_reads_the_format_of_the_shared_tasks(wpt):
    first, second = load_wpt(*wpt)
    assert (list(first.source), list(first.target)) == (["the", "cat", "sleeps"], ["die", "Katze", "schläft"])
    assert first.sure == {(0, 0), (1, 1), (2, 1)}
    assert first.possible == first.sure | {(2, 2)}
    assert (second.source.text, second.target.text) == ("yes .", "ja .")
    assert second.sure == second.possible == {(0, 0)}  # the empty word is left out


def test_a_link_beyond_the_sentence_is_kept_with_a_warning(wpt, caplog):
    wpt[2].write_text("3 2 3\n", encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        (pair,) = load_wpt(*wpt)
    assert pair.sure == {(1, 2)}
    assert "3 2 3 points beyond" in caplog.text


@pytest.mark.parametrize(
    ("at", "text", "message"),
    [
        (2, "7 1\n", "form '26 2 1"),
        (2, "7 1 x\n", "form '26 2 1"),
        (2, "8 1 1\n", r"sentences \[8\]"),
        (2, "9 1 1\n", r"sentences \[9\]"),
        (0, "the cat\n", "form '<s snum=26>"),
        (2, "7 1 1 X\n", r"'7 1 1 X.*' of wa is neither sure \(S\) nor possible \(P\)"),
    ],
)
def test_malformed_gold_is_refused(wpt, at, text, message):
    wpt[at].write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load_wpt(*wpt)


def test_reads_pharaoh_files(tmp_path):
    paths = [tmp_path / name for name in ("s", "t", "gold")]
    for path, text in zip(paths, ("the cat\n\nyes\n", "die Katze\nnichts\nja\n", "0-0 1p1\n\n0-0\n"), strict=True):
        path.write_text(text, encoding="utf-8")
    pairs = load_pharaoh(*paths)
    assert [pair.sure for pair in pairs] == [{(0, 0)}, set(), {(0, 0)}]
    assert pairs[0].possible == {(0, 0), (1, 1)}
    paths[2].write_text("0-0\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"s 3, .*t 3, .*gold 1"):
        load_pharaoh(*paths)


@pytest.fixture
def gold_lines(tmp_path):
    """Gold in the layout of SimAlign's and awesome-align's releases, and the links of a peer."""
    texts, gold, peer = (tmp_path / f"zhen.{suffix}" for suffix in ("src-tgt", "gold", "peer.out"))
    texts.write_text("我们 喜欢 北京大学 ||| we like Peking University \n猫   ||| a cat \n", encoding="utf-8")
    gold.write_text("1-1 2-2 3p3 3-4\n1-2\n")
    peer.write_text("0-0 1-1 2-2\n0-0 0-1\n")
    return texts, gold, peer


def test_reads_gold_lines(gold_lines):
    texts, gold, peer = gold_lines
    pairs = load_gold_lines(texts, gold)
    assert list(pairs[0].source) == ["我们", "喜欢", "北京大学"]  # the spaces, not ICU, separate the words
    assert pairs[0].sure == {(0, 0), (1, 1), (2, 3)}
    assert pairs[0].possible == {(0, 0), (1, 1), (2, 2), (2, 3)}
    assert list(pairs[1].target) == ["a", "cat"]
    assert peer_scores(pairs, peer).aer == pytest.approx(1 - (3 + 4) / (5 + 4))
    assert peer_scores(pairs, peer, first=1).aer == pytest.approx(1 - (1 + 1) / (2 + 1))


def test_the_last_pairs_can_be_without_links(gold_lines):
    """Empty lines at the end of a file are pairs without links, unless there are more of them than pairs."""
    texts, gold, peer = gold_lines
    gold.write_text("1-1 2-2\n\n")
    peer.write_text("0-0\n\n")
    pairs = load_gold_lines(texts, gold)
    assert [len(pair.sure) for pair in pairs] == [2, 0]
    assert peer_scores(pairs, peer).recall == 1 / 2
    texts.write_text(texts.read_text(encoding="utf-8") + "\n\n", encoding="utf-8")
    peer.write_text("0-0\n\n\n\n")
    assert load_gold_lines(texts, gold) == pairs
    assert peer_scores(pairs, peer).recall == 1 / 2
    gold.write_text("1-1 2-2\n")
    with pytest.raises(DataError, match="one line per pair"):
        load_gold_lines(texts, gold)


def test_a_gold_link_beyond_the_sentence_has_a_warning(gold_lines, caplog):
    texts, gold, _ = gold_lines
    gold.write_text("1-1\n1p4\n")
    assert load_gold_lines(texts, gold)[1].possible == {(0, 3)}
    assert "zhen.gold:2: gold link 1-4 points beyond the end" in caplog.text


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        (0, "a b\nc ||| d\n", r"src-tgt:1: a line must be 'source \|\|\| target', not 'a b'"),
        (0, "a ||| b\n", "one line per pair, but .* differ: .* 1, .* 2"),
        (1, "1-1\n0-1\n", r"gold:2: The words of these gold links are counted from 1, but a link is '0-1'"),
        (1, "1-1\nx\n", "gold:2: Gold links have the form"),
        (2, "0-0\n", "must have one line per pair, but has 1 line for 2 pairs"),
    ],
)
def test_malformed_gold_lines_are_refused(gold_lines, file, text, message):
    gold_lines[file].write_text(text)
    with pytest.raises(DataError, match=message):
        peer_scores(load_gold_lines(*gold_lines[:2]), gold_lines[2])


def test_the_rule_with_the_lowest_error_is_chosen(tiny_encoder, gold):
    best_layer, best_rule, tried = tune_rule(tiny_encoder, gold)
    layers = tiny_encoder[0].auto_model.config.num_hidden_layers + 1
    assert len(tried) == layers * len(RULES)
    assert tried[best_layer, best_rule] == min(tried.values())
    assert len({round(aer, 6) for aer in tried.values()}) > 1
    for (layer, rule), aer in list(tried.items())[::7]:
        aligner = EmbeddingAligner(tiny_encoder, layer=layer, **rule._asdict())
        result = evaluate_word_alignment(tiny_encoder, {"x": gold}, aligner=aligner, resamples=10)
        assert result.average.score == pytest.approx(100 * aer)
        assert [result.settings[key] for key in ("layer", "method", "level")] == [layer, rule.method, rule.level]


def test_swapping():
    pair = GoldPair(Words.of("a b"), Words.of("c"), frozenset({(1, 0)}), frozenset({(0, 0), (1, 0)}))
    swapped = pair.swapped()
    assert swapped.pair == (pair.target, pair.source)
    assert swapped.sure == {(0, 1)}
    assert swapped.possible == {(0, 0), (0, 1)}
    assert swapped.swapped() == pair


# ---------------------------------------------------------------------------------------------------------- evaluator


@pytest.fixture
def gold(bitext):
    pairs = []
    for row in bitext:
        links = frozenset(parse_links(row["alignment"]))
        pairs.append(GoldPair(Words.of(row["source"]), Words.of(row["target"]), links, links))
    return pairs


def test_the_evaluator_measures_the_model_as_an_aligner(tiny_encoder, gold, tmp_path):
    evaluator = WordAlignmentEvaluator(gold, name="dev", layer=1, method="argmax", level="word")
    metrics = evaluator(tiny_encoder, str(tmp_path / "eval"), epoch=1, steps=30)
    alignments = EmbeddingAligner(tiny_encoder, layer=1, method="argmax", level="word").align([g.pair for g in gold])
    expected = alignment_scores([a.links for a in alignments], [g.sure for g in gold], [g.possible for g in gold])
    assert metrics == {f"dev_{name}": score for name, score in expected._asdict().items()}
    assert 0 < expected.f1 < 1
    assert evaluator.primary_metric == "dev_f1"
    assert evaluator.greater_is_better
    assert metrics[evaluator.primary_metric] == expected.f1
    evaluator(tiny_encoder, str(tmp_path / "eval"), epoch=2, steps=60)
    with (tmp_path / "eval" / "word_alignment_evaluation_dev_results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["steps"] for row in rows] == ["30", "60"]
    assert float(rows[0]["aer"]) == expected.aer


def test_settings_reach_the_aligner(tiny_encoder, gold):
    def aer(**settings):
        return WordAlignmentEvaluator(gold, **settings)(tiny_encoder)["aer"]

    assert aer(layer=0, method="softmax") != aer(layer=2, method="softmax")
    assert aer(layer=0, method="softmax") != aer(layer=0, method="argmax")
    assert aer(layer=0, method="softmax") != aer(layer=0, method="softmax", level="word")
    assert aer(layer=0, method="softmax") != aer(layer=0, method="softmax", temperature=0.1, threshold=0.3)


def test_a_threshold_of_another_method_is_refused_before_training(gold):
    with pytest.raises(UsageError, match=r"'threshold' is 0\.3, but the method 'itermax' has none"):
        WordAlignmentEvaluator(gold, threshold=0.3)


def test_the_recommended_setting_can_be_used_in_training(tiny_encoder, gold):
    settings = {"layer": 1, "method": "softmax", "level": "word", "threshold": 0.3, "temperature": 0.1}
    evaluator = WordAlignmentEvaluator(gold, **settings)
    result = evaluate_word_alignment(
        tiny_encoder, {"x": gold}, aligner=EmbeddingAligner(tiny_encoder, **settings), resamples=10
    )
    assert evaluator(tiny_encoder)["aer"] == pytest.approx(result.average.score / 100)
    assert evaluator.get_config_dict() == settings


def test_chooses_a_checkpoint_in_the_trainer(tiny_encoder, gold, bitext, tmp_path):
    loss = AlignmentLoss(tiny_encoder, Recipe.load("tr"))
    arguments = AlignmentTrainingArguments(
        output_dir=str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_dev_f1",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    before = [layer.output.dense.weight.detach().clone() for layer in tiny_encoder[0].auto_model.encoder.layer]
    trainer = AlignmentTrainer(
        model=tiny_encoder,
        args=arguments,
        train_dataset=Dataset.from_list(bitext),
        loss=loss,
        evaluator=WordAlignmentEvaluator(gold, name="dev", layer=1, method="softmax"),
    )
    trainer.train()
    logged = {log["step"]: log["eval_dev_f1"] for log in trainer.state.log_history if "eval_dev_f1" in log}
    assert set(logged) == {2, 4}
    assert trainer.state.best_metric == max(logged.values())
    after = [layer.output.dense.weight for layer in tiny_encoder[0].auto_model.encoder.layer]
    assert all(not torch.equal(b, a) for b, a in zip(before, after, strict=True))  # the layer above 1 came back
    assert len(list(tmp_path.rglob("word_alignment_evaluation_dev_results.csv"))) == 1


def test_no_file_is_written_by_default(tiny_encoder, gold, tmp_path):
    WordAlignmentEvaluator(gold[:2], write_csv=False)(tiny_encoder, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_works_in_a_sequence_of_evaluators(tiny_encoder, gold):
    evaluator = WordAlignmentEvaluator(gold[:4], name="dev")
    metrics = SequentialEvaluator([evaluator])(tiny_encoder)
    assert metrics["sequential_score"] == metrics["dev_f1"]
    assert evaluator.description == "Word Alignment"
    assert evaluator.get_config_dict() == {"layer": None, "method": "itermax", "level": "piece"}


def test_text_that_is_not_utf_8_is_named(tmp_path):
    source, target, gold = (tmp_path / name for name in ("text.en", "text.hi", "gold"))
    source.write_text("a b\nc d\n")
    target.write_bytes(b"x y\nu \xff\n")
    gold.write_text("0-0\n0-0\n")
    with pytest.raises(DataError, match=r"text\.hi:2: this is not UTF-8 \(byte 0xff at 2\)"):
        load_pharaoh(source, target, gold)
