import gzip
import json

import numpy as np
import pytest

from metaphrase.evaluation.bucc import (
    PROTOCOLS,
    MiningEvaluator,
    MiningSet,
    bucc_languages,
    evaluate_mining,
    load_bucc_folder,
    mine_set,
)
from metaphrase.evaluation.compare import compare
from metaphrase.evaluation.retrieval import retrieval_hits
from metaphrase.exceptions import DataError
from tests.mining.test_search import mine_loop, random_sides


def measured(*args, **options):
    """The JSON form of a result."""
    return evaluate_mining(*args, **options).to_dict()


class EchoModel:
    """Embeds the text ``zh 7`` beside ``en 7``, with noise of its own for each text; ``far`` ones anywhere."""

    def __init__(self, noise=0.3, far=()):
        self.noise = noise
        self.far = set(far)
        self.calls = []

    def encode(self, texts, **kwargs):
        self.calls.append((list(texts), kwargs))
        return np.array([self._vector(text) for text in texts], dtype=np.float32)

    def _vector(self, text):
        language, number = text.split()[:2]
        own = np.random.default_rng([ord(language[0]), int(number), 1]).normal(size=24)
        if text in self.far:
            return own
        return np.random.default_rng(int(number)).normal(size=24) + self.noise * own


def make_set(split, sources, targets, gold, language="zh"):
    return MiningSet(
        language,
        split,
        tuple(f"{language}-{i}" for i in range(len(sources))),
        tuple(f"zh {i}" for i in sources),
        tuple(f"en-{i}" for i in range(len(targets))),
        tuple(f"en {i}" for i in targets),
        frozenset((f"{language}-{i}", f"en-{j}") for i, j in gold),
    )


def translations(sources, targets):
    return [(i, targets.index(text)) for i, text in enumerate(sources) if text in targets]


@pytest.fixture(scope="module")
def data():
    """Two texts that share half of their sentences, in a split that is easy and one with other sentences."""
    sample = list(range(40)), list(range(20, 70))
    training = list(range(100, 160)), list(range(130, 200))
    return {
        "zh": {
            "sample": make_set("sample", *sample, translations(*sample)),
            "training": make_set("training", *training, translations(*training)),
        }
    }


def write_bucc(folder, data):
    for split, one in data["zh"].items():
        for part, ids, texts in (("zh", one.source_ids, one.sources), ("en", one.target_ids, one.targets)):
            with gzip.open(folder / f"zh-en.{split}.{part}.gz", "wt", encoding="utf-8") as file:
                file.writelines(f"{i}\t{text}\n" for i, text in zip(ids, texts, strict=True))
        (folder / f"zh-en.{split}.gold").write_text("".join(f"{s}\t{t}\n" for s, t in sorted(one.gold)))


def test_gold_without_pairs_is_named(data, tmp_path):
    write_bucc(tmp_path, data)
    (tmp_path / "zh-en.sample.gold").write_text("")
    with pytest.raises(DataError, match=r"zh-en\.sample\.gold has no pairs"):
        load_bucc_folder(tmp_path, "sample_oracle")


# --- Protocols ---


@pytest.mark.parametrize("protocol", ["train_oracle", "sample_to_train", "sample_oracle"])
def test_f1_is_that_of_a_loop(data, protocol):
    model = EchoModel(noise=1.2)
    result = measured(model, data, protocol=protocol, resamples=50)
    tuned, scored, *_ = PROTOCOLS[protocol]

    def mined(split):
        one = data["zh"][split]
        pairs = mine_loop(model.encode(one.sources), model.encode(one.targets), 4, "ratio", "max")
        return [(score, (one.source_ids[i], one.target_ids[j]) in one.gold) for score, i, j in pairs], len(one.gold)

    def f1(pairs, gold, threshold):
        kept = [right for score, right in pairs if score >= threshold]
        return 200 * sum(kept) / (len(kept) + gold)

    pairs, gold = mined(tuned)
    best = max(f1(pairs, gold, score) for score, _ in pairs)
    row = result["languages"]["zh"]
    assert row["tuned_on"]["f1"] == pytest.approx(best)
    assert row["f1"] == pytest.approx(f1(*mined(scored), row["threshold"]))
    assert 20 < row["f1"] < 100
    assert row["f1"] == pytest.approx(2 / (1 / row["precision"] + 1 / row["recall"]))
    if tuned == scored:
        assert row["f1"] == row["tuned_on"]["f1"]
    assert row["interval"][0] <= row["f1"] <= row["interval"][1]
    assert result["settings"]["protocol"] == protocol
    assert (result["settings"]["tuned_on"], result["settings"]["scored_on"]) == (tuned, scored)
    assert result["average"] == {"n": 1, "score": row["f1"], "interval": pytest.approx(row["interval"])}
    json.dumps(result, allow_nan=False)


def test_protocols_differ(data):
    scores = {p: measured(EchoModel(1.2), data, protocol=p, resamples=2) for p in PROTOCOLS if "test" not in p}
    f1 = {protocol: result["average"]["score"] for protocol, result in scores.items()}
    assert f1["sample_to_train"] <= f1["train_oracle"]
    assert f1["sample_oracle"] != f1["train_oracle"]


def test_there_is_no_default_protocol(data):
    with pytest.raises(TypeError, match="protocol"):
        measured(EchoModel(), data)
    with pytest.raises(ValueError, match=r"one of 'train_oracle', 'train_to_test', .*, but is 'bucc'"):
        measured(EchoModel(), data, protocol="bucc")
    with pytest.raises(ValueError, match="'train_to_test' needs the split 'test' of 'zh'"):
        measured(EchoModel(), data, protocol="train_to_test")


@pytest.mark.parametrize(
    ("protocol", "duplicates", "comparison"),
    [("train_oracle", "keep", ">"), ("sample_to_train", "unify", ">="), ("sample_oracle", "keep", ">=")],
)
def test_a_protocol_is_run_as_its_paper_ran_it(data, protocol, duplicates, comparison):
    own = measured(EchoModel(1.2), data, protocol=protocol, resamples=2)
    assert (own["settings"]["duplicates"], own["settings"]["comparison"]) == (duplicates, comparison)
    other = measured(EchoModel(1.2), data, protocol=protocol, duplicates="keep", comparison=">", resamples=2)
    assert (other["settings"]["duplicates"], other["settings"]["comparison"]) == ("keep", ">")


def test_a_sample_has_the_share_of_other_sentences(data):
    one = data["zh"]["sample"]
    part = one.first_pairs(5)
    assert part.gold == {(source, target) for source, target in one.gold if int(source.removeprefix("zh-")) < 25}
    for side, ids in enumerate((part.source_ids, part.target_ids)):
        whole = (one.source_ids, one.target_ids)[side]
        paired, kept = ({pair[side] for pair in some.gold} for some in (one, part))
        assert paired & set(ids) == kept
        assert len(ids) == 5 + round((len(whole) - len(paired)) * 5 / len(one.gold))
        assert list(ids) == [name for name in whole if name in ids]
    texts = dict(zip(one.source_ids, one.sources, strict=True)) | dict(zip(one.target_ids, one.targets, strict=True))
    assert part.sources + part.targets == tuple(texts[name] for name in part.source_ids + part.target_ids)
    assert one.first_pairs(None) is one.first_pairs(99) is one


def test_languages_that_have_all_files_of_a_protocol(data, tmp_path):
    write_bucc(tmp_path, data)
    assert bucc_languages(tmp_path, "sample_to_train") == ["zh"]
    assert bucc_languages(tmp_path, "train_to_test") == []
    (tmp_path / "zh-en.training.gold").unlink()
    assert bucc_languages(tmp_path, "sample_to_train") == []
    assert bucc_languages(tmp_path, "sample_oracle") == ["zh"]


def test_the_best_cut_may_be_behind_the_last_pair():
    one = make_set("sample", [1, 2, 3], [1, 2, 3], [(0, 0), (1, 1), (2, 2)])
    for comparison in (">", ">="):
        result = measured(
            EchoModel(0.1), {"zh": {"sample": one}}, protocol="sample_oracle", comparison=comparison, resamples=2
        )
        assert result["languages"]["zh"]["f1"] == 100
        assert result["languages"]["zh"]["kept"] == 3


def test_comparison_decides_about_equal_scores(data, monkeypatch):
    import metaphrase.evaluation.bucc as module

    first = mine_set(EchoModel(), data["zh"]["sample"])
    fixed = module.best_threshold(first.score_c, [True] * len(first.score_c), len(first.score_c))
    fixed = fixed._replace(threshold=float(first.score_c[4]))
    monkeypatch.setattr(module, "best_threshold", lambda *args: fixed)
    kept = {
        comparison: measured(EchoModel(), data, protocol="sample_oracle", comparison=comparison, resamples=2)[
            "languages"
        ]["zh"]["kept"]
        for comparison in (">", ">=")
    }
    assert kept == {">": 4, ">=": 5}


def test_repeated_lines_are_left_out_or_kept():
    sources, targets = [1, 2, 2, 3, 4], [1, 2, 3, 3, 4]
    one = make_set("sample", sources, targets, [(0, 0), (1, 1), (3, 2), (4, 4)])
    model = EchoModel(0.1)
    unified = mine_set(model, one, duplicates="unify")
    assert sorted(zip(unified.source_c.tolist(), unified.target_c.tolist(), strict=True)) == [(0, 0), (4, 4)]
    assert [len(texts) for texts, _ in model.calls] == [4, 4]
    kept = mine_set(model, one, duplicates="keep")
    pairs = set(zip(kept.source_c.tolist(), kept.target_c.tolist(), strict=True))
    assert {(0, 0), (4, 4)} < pairs
    assert len(pairs) == 4
    with pytest.raises(ValueError, match="one of 'unify', 'keep', but is 'drop'"):
        measured(model, {"zh": {"sample": one}}, protocol="sample_oracle", duplicates="drop")


def test_prompt_and_settings_are_recorded(data):
    model = EchoModel()
    model.prompts = {"query": "query: "}
    result = measured(
        model, data, protocol="sample_oracle", prompt="auto", batch_size=7, margin="distance", k=2, resamples=2
    )
    assert {call["prompt"] for _, call in model.calls} == {"query: "}
    assert {call["batch_size"] for _, call in model.calls} == {7}
    settings = result["settings"]
    assert (settings["prompt"], settings["margin"], settings["k"], settings["duplicates"]) == (
        "query: ",
        "distance",
        2,
        "keep",
    )
    assert result["languages"]["zh"]["sha256"] == data["zh"]["sample"].sha256


# --- Comparison ---


def test_a_better_model_is_better(data):
    weak = measured(EchoModel(2.5), data, protocol="sample_oracle", resamples=50)
    strong = measured(EchoModel(0.2), data, protocol="sample_oracle", resamples=50)
    compared = compare(json.loads(json.dumps(weak)), strong, resamples=500)
    row = compared["languages"]["zh"]
    assert row["difference"] == pytest.approx(strong["average"]["score"] - weak["average"]["score"])
    assert row["interval"][0] <= row["difference"] <= row["interval"][1]
    assert row["verdict"] == compared["pooled"]["verdict"] == "better"
    assert compare(strong, weak, resamples=500)["languages"]["zh"]["verdict"] == "worse"
    same = compare(weak, weak, resamples=500)["languages"]["zh"]
    assert (same["difference"], same["interval"], same["verdict"]) == (0, [0, 0], "tie")


def test_outcomes_hold_the_counts(data):
    result = measured(EchoModel(1.2), data, protocol="sample_oracle", resamples=2)["languages"]["zh"]
    counts = np.array([list(map(int, text.split())) for text in result["outcomes"].values()])
    assert counts.sum(axis=0).tolist() == [result["correct"], result["kept"], result["gold"]]


def test_results_that_cannot_be_compared_are_refused(data):
    before = measured(EchoModel(), data, protocol="sample_oracle", resamples=2)
    after = measured(EchoModel(), data, protocol="train_oracle", resamples=2)
    with pytest.raises(ValueError, match="differ in protocol: 'sample_oracle' before, 'train_oracle' after"):
        compare(before, after)
    for option, value in (("margin", "distance"), ("k", 2), ("comparison", ">"), ("duplicates", "unify")):
        changed = measured(EchoModel(), data, protocol="sample_oracle", resamples=2, **{option: value})
        with pytest.raises(ValueError, match=f"differ in {option}"):
            compare(before, changed)
    other = {"zh": {"sample": make_set("sample", [1, 2, 3], [1, 2, 3], [(0, 0)])}}
    with pytest.raises(ValueError, match="'zh' are over different items"):
        compare(before, measured(EchoModel(), other, protocol="sample_oracle", resamples=2))


# --- Reading ---


def test_reads_what_a_protocol_needs(data, tmp_path):
    write_bucc(tmp_path, data)
    read = load_bucc_folder(tmp_path, "sample_to_train")
    assert read == data
    assert list(load_bucc_folder(tmp_path, "sample_oracle", ["zh"])["zh"]) == ["sample"]
    inner = tmp_path / "bucc"
    (inner / "zh-en").mkdir(parents=True)
    write_bucc(inner / "zh-en", data)
    assert load_bucc_folder(inner, "train_oracle")["zh"]["training"].sha256 == data["zh"]["training"].sha256


def test_quotation_marks_and_line_separators_are_text(tmp_path):
    (tmp_path / "zh-en.sample.zh").write_bytes('zh-1\t"open\nzh-2\ta\u2028b\tc\u0085\n'.encode())
    (tmp_path / "zh-en.sample.en").write_bytes(b'en-1\t"\nen-2\td"\n')
    (tmp_path / "zh-en.sample.gold").write_text("zh-2\ten-2\n")
    one = load_bucc_folder(tmp_path, "sample_oracle")["zh"]["sample"]
    assert one.sources == ('"open', "a\u2028b\tc\u0085")
    assert one.targets == ('"', 'd"')
    assert one.gold == {("zh-2", "en-2")}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: (d / "zh-en.sample.gold").unlink(), r"needs zh-en.sample.gold"),
        (
            lambda d: (d / "zh-en.sample.zh").write_text("zh-1\n"),
            r"zh-en.sample.zh:1: a line must have two columns, but is 'zh-1'",
        ),
        (
            lambda d: (d / "zh-en.sample.zh.gz").write_bytes(b""),
            r"Both \S+sample\.zh and \S+sample\.zh\.gz exist, but only one",
        ),
        (lambda d: (d / "zh-en.sample.en").write_text("e\ta\ne\tb\n"), r"en:2: the identifier 'e' is used twice"),
        (
            lambda d: (d / "zh-en.sample.zh").write_bytes(b"zh-1\t\xff\n"),
            r"zh:1: a line must have two columns, but is 'unreadable'",
        ),
    ],
)
def test_malformed_folders_are_refused(tmp_path, spoil, message):
    for part, text in (("zh", "zh-1\tx\n"), ("en", "en-1\ty\n"), ("gold", "zh-1\ten-1\n")):
        (tmp_path / f"zh-en.sample.{part}").write_text(text)
    spoil(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_bucc_folder(tmp_path, "sample_oracle", ["zh"])


def test_missing_files_are_named(data, tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        load_bucc_folder(tmp_path / "none", "sample_oracle")
    with pytest.raises(FileNotFoundError, match=r"splits training and test, which no language .* no BUCC files"):
        load_bucc_folder(tmp_path, "train_to_test")
    write_bucc(tmp_path, data)
    with pytest.raises(FileNotFoundError, match="Available: zh sample, zh training"):
        load_bucc_folder(tmp_path, "train_to_test")
    with pytest.raises(FileNotFoundError, match=r"needs de-en.sample.de"):
        load_bucc_folder(tmp_path, "sample_oracle", ["de"])


def test_gold_of_unknown_sentences_counts_as_missed(tmp_path, caplog):
    for part, text in (("zh", "z1\tzh 1\nz2\tzh 2\n"), ("en", "e1\ten 1\ne2\ten 2\n"), ("gold", "z1\te1\nz9\te2\n")):
        (tmp_path / f"zh-en.sample.{part}").write_text(text)
    data = load_bucc_folder(tmp_path, "sample_oracle")
    assert "z9" in caplog.text
    result = measured(EchoModel(0.1), data, protocol="sample_oracle", resamples=2)["languages"]["zh"]
    assert (result["gold"], result["recall"]) == (2, 50)


# --- xsim ---


@pytest.mark.parametrize("n", [3, 50])
def test_misses_by_margin_are_the_xsim_error_of_a_loop(n):
    source, target = random_sides(n, n)
    for side, (one, other) in enumerate(((source, target), (target, source))):
        pairs = mine_loop(one, other, 4, "ratio", "forward")
        wrong = sum(i != j for _, i, j in pairs) / n
        assert 1 - retrieval_hits(source, target, margin_k=4)[side].mean() == pytest.approx(wrong)
        assert wrong > 0


# --- Training loop ---


def test_evaluator(data, tiny_encoder, tmp_path):
    evaluator = MiningEvaluator(data, protocol="sample_oracle", name="dev", encode=EchoModel(1.2).encode)
    metrics = evaluator(tiny_encoder, str(tmp_path))
    result = measured(EchoModel(1.2), data, protocol="sample_oracle", resamples=2)
    assert metrics["dev_mean_f1"] == metrics["dev_zh_f1"] == pytest.approx(result["average"]["score"] / 100)
    assert evaluator.primary_metric == "dev_mean_f1"
    assert evaluator.get_config_dict()["protocol"] == "sample_oracle"
    with pytest.raises(ValueError, match="Unknown BUCC protocol 'none'"):
        MiningEvaluator(data, protocol="none")
