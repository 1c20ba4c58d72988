import csv
import gzip
import json

import numpy as np
import pytest
from scipy.stats import spearmanr

from metaphrase.evaluation.compare import compare
from metaphrase.evaluation.measures import resampled_spearman, spearman
from metaphrase.evaluation.sts import (
    STS22_GROUPS,
    STS22_SUBSETS,
    STSSet,
    cross_lingual,
    evaluate_sts,
    load_sts_folder,
)
from metaphrase.exceptions import DataError

ROWS = 30
GOLD = tuple(round(5 * (i % 13) / 12, 2) for i in range(ROWS))


def measured(*args, **options):
    """The JSON form of a result."""
    return evaluate_sts(*args, **options).to_dict()


class AngleModel:
    """Embeds ``de 7 b`` at an angle to ``de 7 a`` that grows as the gold score falls, with noise."""

    def __init__(self, noise, prompts=None):
        self.noise = noise
        self.prompts = prompts or {}
        self.calls = []

    def encode(self, texts, **kwargs):
        self.calls.append((list(texts), kwargs))
        return np.array([self._vector(*text.split()) for text in texts], dtype=np.float32)

    def _vector(self, language, row, side):
        noise = self.noise * np.random.default_rng([int(row), ord(language[0])]).normal()
        angle = 0.0 if side == "a" else (6 - GOLD[int(row)]) / 5 + noise
        return 3 * np.array([np.cos(angle), np.sin(angle)])


def make_set(language, scores=GOLD):
    first, second = (tuple(f"{language} {i} {side}" for i in range(len(scores))) for side in "ab")
    return STSSet(language, first, second, tuple(scores))


def cosine_loop(model, one):
    a, b = (np.asarray(model.encode(side), dtype=float) for side in (one.first, one.second))
    return [float(x @ y) / (float(x @ x) ** 0.5 * float(y @ y) ** 0.5) for x, y in zip(a, b, strict=True)]


@pytest.fixture
def sets():
    return {language: make_set(language) for language in ("en", "de", "zh")}


# --- The data ---


def write(path, rows, header=False):
    with gzip.open(path, "wt", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        if header:
            writer.writerow(["sentence1", "sentence2", "score"])
        writer.writerows(rows)


def test_reads_a_folder(tmp_path):
    write(tmp_path / "stsb-de-test.csv.gz", [('Ein "Mann", der läuft', "b", "2.5"), ("c\nd", "", "5")])
    write(tmp_path / "stsb-en-test.csv.gz", [("A man", "b", 2.5), ("c", "d", 5.0)], header=True)
    write(tmp_path / "stsb-en-dev.csv.gz", [("x", "y", 1)])
    sets = load_sts_folder(tmp_path)
    assert list(sets) == ["de", "en"]
    assert sets["de"].first == ('Ein "Mann", der läuft', "c\nd")
    assert sets["de"].second == ("b", "")
    assert sets["de"].scores == sets["en"].scores == (2.5, 5.0)
    assert load_sts_folder(tmp_path, ["en"], "dev")["en"].scores == (1.0,)
    assert sets["de"].sha256 != sets["en"].sha256


def test_missing_files_are_reported_with_alternatives(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        load_sts_folder(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="It has no such files"):
        load_sts_folder(tmp_path)
    write(tmp_path / "stsb-de-dev.csv.gz", [("a", "b", 1)])
    with pytest.raises(FileNotFoundError, match="Its splits are: dev"):
        load_sts_folder(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no pairs for sw\. It has: de"):
        load_sts_folder(tmp_path, ["sw"], "dev")
    write(tmp_path / "stsb-de-dev.csv.gz", [("a", "b", 1), ("c", "d")])
    with pytest.raises(ValueError, match="row 2 must be two sentences and a finite score, but is 'c,d'"):
        load_sts_folder(tmp_path, split="dev")
    write(tmp_path / "stsb-de-dev.csv.gz", [], header=True)
    with pytest.raises(ValueError, match="has no pairs"):
        load_sts_folder(tmp_path, split="dev")
    write(tmp_path / "sts-de-dev.csv.gz", [("a", "b", 1)])
    with pytest.raises(ValueError, match=r"Both \S+/sts-de-dev\.csv\.gz and \S+/stsb-de-dev\.csv\.gz exist"):
        load_sts_folder(tmp_path, split="dev")


def test_pairs_of_languages_are_taken_from_the_same_row(sets):
    crossed = cross_lingual(sets)
    assert list(crossed) == ["de-en", "en-de", "zh-en", "en-zh"]
    assert crossed["de-en"] == STSSet("de-en", sets["de"].first, sets["en"].second, GOLD)
    assert cross_lingual({"de": sets["de"]}) == {}
    with pytest.raises(ValueError, match="same rows in both"):
        cross_lingual(sets | {"de": make_set("de", GOLD[1:])})


# --- The measure ---


def test_correlation_is_that_of_the_cosines(sets):
    model = AngleModel(0.3)
    chosen = sets | cross_lingual(sets)
    result = measured(model, chosen, resamples=300)
    for name, one in chosen.items():
        expected = 100 * spearmanr(GOLD, np.round(cosine_loop(model, one), 7)).statistic
        row = result["languages"][name]
        assert row["score"] == pytest.approx(expected, abs=1e-9)
        assert 20 < row["score"] < 95
        assert row["interval"][0] < row["score"] < row["interval"][1]
        assert (row["n"], row["sha256"]) == (ROWS, one.sha256)
    assert result["average"]["score"] == pytest.approx(np.mean([row["score"] for row in result["languages"].values()]))
    assert result["languages"]["de"]["score"] != result["languages"]["zh"]["score"]
    json.dumps(result, allow_nan=False)


def test_each_sentence_is_encoded_once(sets):
    model = AngleModel(0.3, prompts={"query": "query: "})
    result = measured(model, sets | cross_lingual(sets), prompt="auto", batch_size=7, resamples=2)
    ((texts, options),) = model.calls
    assert len(texts) == len(set(texts)) == 3 * 2 * ROWS
    assert (options["prompt"], options["batch_size"]) == ("query: ", 7)
    assert result["settings"]["prompt"] == "query: "


def test_perfect_reversed_and_collapsed_encoders(sets):
    german = {"de": sets["de"]}
    assert measured(AngleModel(0), german, resamples=9)["average"] == {
        "n": 1,
        "score": pytest.approx(100),
        "interval": pytest.approx([100, 100]),
    }
    assert spearman(GOLD, [-score for score in GOLD]) == pytest.approx(-100)
    collapsed = measured(AngleModel(0), german, resamples=9, encode=lambda texts, **_: np.ones((len(texts), 3)))
    assert collapsed["average"] == {"n": 1, "score": 0.0, "interval": [0.0, 0.0]}


def test_order_of_the_pairs_does_not_matter(sets):
    one = sets["de"]
    order = np.random.default_rng(0).permutation(ROWS)
    shuffled = STSSet("de", *(tuple(side[i] for i in order) for side in (one.first, one.second, one.scores)))
    results = [measured(AngleModel(0.3), {"de": s}, resamples=2)["average"]["score"] for s in (one, shuffled)]
    assert results[0] == pytest.approx(results[1])


@pytest.mark.parametrize("values", [4, 30, 1000])
def test_resampled_correlation_is_that_of_the_repeated_items(values):
    """Ties within the items, and copies of them."""
    rng = np.random.default_rng(values)
    gold, predicted = rng.integers(values, size=25).astype(float), rng.integers(values, size=25).astype(float)
    counts = rng.multinomial(25, np.full(25, 1 / 25), size=40)
    expected = [100 * spearmanr(np.repeat(gold, count), np.repeat(predicted, count)).statistic for count in counts]
    np.testing.assert_allclose(resampled_spearman(gold, predicted, counts), expected, rtol=1e-9)


def test_a_sample_of_one_item_has_no_correlation():
    assert resampled_spearman([1.0, 2.0], [3.0, 4.0], np.array([[2, 0], [1, 1]])).tolist() == [0.0, 100.0]


# --- STS22 ---


def test_the_subsets_of_sts22():
    assert len(STS22_SUBSETS) == len(set(STS22_SUBSETS)) == 18
    assert set(STS22_GROUPS["18"]) - set(STS22_GROUPS["without fr-pl"]) == {"fr-pl"}
    assert len(STS22_GROUPS["without fr-pl"]) == 17


def test_both_averages_of_sts22():
    sets = {name: make_set(chr(97 + at), GOLD[: 10 + at]) for at, name in enumerate(STS22_SUBSETS)}
    result = measured(AngleModel(0.5), sets, groups=STS22_GROUPS, resamples=50)
    scores = {name: row["score"] for name, row in result["languages"].items()}
    assert result["groups"]["18"]["score"] == pytest.approx(np.mean(list(scores.values())))
    fewer = [score for name, score in scores.items() if name != "fr-pl"]
    assert result["groups"]["without fr-pl"]["score"] == pytest.approx(np.mean(fewer))
    assert {group: row["n"] for group, row in result["groups"].items()} == {"18": 18, "without fr-pl": 17}
    assert result["groups"]["18"]["score"] != result["groups"]["without fr-pl"]["score"]
    del sets["it"]
    assert measured(AngleModel(0.5), sets, groups=STS22_GROUPS, resamples=2)["groups"] == {}


# --- Before and after ---


def test_verdicts(sets):
    weak, strong = (measured(AngleModel(noise), sets, resamples=300) for noise in (1.5, 0.05))
    better = compare(weak, strong, resamples=500)
    assert {row["verdict"] for row in better["languages"].values()} == {"better"}
    row = better["languages"]["de"]
    assert row["difference"] == pytest.approx(row["after"] - row["before"])
    assert row["interval"][0] < row["difference"] < row["interval"][1]
    assert row["p_adjusted"] >= row["p_value"]
    assert better["pooled"]["difference"] == pytest.approx(strong["average"]["score"] - weak["average"]["score"])
    worse = compare(strong, weak, resamples=500)
    assert worse["pooled"]["verdict"] == "worse"
    assert worse["pooled"]["interval"] == pytest.approx([-end for end in better["pooled"]["interval"][::-1]])
    same = compare(strong, json.loads(json.dumps(strong)), resamples=50)
    assert {row["verdict"] for row in same["languages"].values()} == {"tie"}
    assert same["pooled"]["p_value"] == 1


def test_other_pairs_are_refused(sets):
    before = measured(AngleModel(0.1), {"de": sets["de"]}, resamples=2)
    after = measured(AngleModel(0.1), sets, resamples=2)
    with pytest.raises(ValueError, match="baseline result lacks en, zh"):
        compare(before, after)
    other = measured(AngleModel(0.1), {"de": make_set("de", GOLD[1:])}, resamples=2)
    with pytest.raises(ValueError, match="'de' are over different items"):
        compare(other, before)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("stsb-de-test.csv", b"a,b,1\n" * 3000 + b"caf\xe9,b,1\n", r"de-test\.csv:3001: this is not UTF-8"),
        (
            "stsb-de-test.csv.gz",
            gzip.compress(b"a,b,1\n" * 3000)[:-9],
            r"csv\.gz: the gzip file is damaged or truncated",
        ),
        ("stsb-de-test.csv", b"a,b,1\n" + b"x" * 200_000 + b",b,1\n", r"csv:2: this is not CSV \(field larger"),
    ],
    ids=["encoding", "packed", "long"],
)
def test_damaged_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_sts_folder(tmp_path)
