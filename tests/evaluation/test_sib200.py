import gzip
from dataclasses import replace

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from metaphrase.evaluation.compare import compare
from metaphrase.evaluation.measures import DIRECTIONS
from metaphrase.evaluation.retrieval import evaluate_retrieval
from metaphrase.evaluation.sib200 import (
    XLMR_LANGUAGES,
    TopicEvaluator,
    evaluate_topics,
    language_groups,
    load_topic_folder,
    probe_hits,
    topic_pairs,
)
from metaphrase.evaluation.significance import bootstrap_interval
from metaphrase.exceptions import DataError, DataMismatchError, MissingFileError

LANGUAGES = ("eng_Latn", "ewe_Latn", "swh_Latn", "tat_Cyrl")
TOPICS = ("health", "sports", "travel")


def write_topics(folder, languages=LANGUAGES, splits=(("train", 30), ("dev", 12)), header="index_id\tcategory\ttext"):
    folder.mkdir(parents=True, exist_ok=True)
    first = 0
    for split, size in splits:
        for language in languages:
            lines = [f"{at}\t{TOPICS[at % 3]}\t{language} {TOPICS[at % 3]} {at}" for at in range(first, first + size)]
            with gzip.open(folder / f"{language}.{split}.tsv.gz", "wt", encoding="utf-8", newline="") as file:
                file.writelines(f"{line}\n" for line in [header, *reversed(lines)])
        first += size
    return folder


class Topical:
    """Embeds a text by its topic and its number; the languages of `lost` by their number only."""

    def __init__(self, lost=()):
        rng = np.random.default_rng(0)
        self.topic = dict(zip(TOPICS, 3 * np.eye(3, 8), strict=True))
        self.number = rng.normal(size=(60, 8))
        self.lost = lost

    def encode(self, texts, **options):
        rows = [text.split() for text in texts]
        return np.array(
            [
                0.5 * self.number[int(number)] + (0 if language in self.lost else self.topic[topic])
                for language, topic, number in rows
            ],
            dtype=np.float32,
        )


def test_a_folder_is_read_in_the_order_of_ids(tmp_path):
    sets = load_topic_folder(write_topics(tmp_path))
    assert list(sets) == list(LANGUAGES)
    swahili = sets["swh_Latn"]
    assert swahili.ids == tuple(map(str, range(42)))
    assert swahili.split == ("train",) * 30 + ("dev",) * 12
    assert swahili.texts[31] == "swh_Latn sports 31"
    pairs = topic_pairs(load_topic_folder(tmp_path, ["tat_Cyrl"]))
    assert list(pairs) == ["tat_Cyrl"]
    assert (pairs["tat_Cyrl"].sources[7], pairs["tat_Cyrl"].targets[7]) == ("tat_Cyrl sports 7", "eng_Latn sports 7")


def test_line_breaks_of_windows(tmp_path):
    rows = "index_id\tcategory\ttext\r\n1\thealth\tone\r\n2\tsports\ttwo\r\n"
    (tmp_path / "eng_Latn.train.tsv").write_bytes(rows.encode())
    assert load_topic_folder(tmp_path)["eng_Latn"].texts == ("one", "two")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("text\n", "must have the header index_id, category, text"),
        ("index_id\tcategory\ttext\n", "no sentence after its header"),
        ("index_id\tcategory\ttext\n1\thealth\n", r"train\.tsv:2: a line must have 3 columns, but has 2"),
        ("index_id\tcategory\ttext\n1\thealth\ta\n1\thealth\tb\n", "has an id more than once"),
    ],
)
def test_other_formats_are_refused(tmp_path, text, message):
    (tmp_path / "eng_Latn.train.tsv").write_text(text)
    with pytest.raises(DataError, match=message):
        load_topic_folder(tmp_path)


def test_languages_must_have_the_same_sentences(tmp_path):
    with pytest.raises(MissingFileError, match=r"no files eng_Latn\.train\.tsv\.gz"):
        load_topic_folder(tmp_path)
    write_topics(tmp_path, ["eng_Latn"])
    write_topics(tmp_path, ["swh_Latn"], splits=[("train", 29), ("dev", 12)])
    with pytest.raises(DataMismatchError, match=r"of swh_Latn \(41 sentences\) are not those of eng_Latn \(42\)"):
        load_topic_folder(tmp_path)
    with pytest.raises(MissingFileError, match=r"no files deu_Latn\.train"):
        load_topic_folder(tmp_path, ["deu_Latn"])


def test_the_probe_is_trained_on_english_and_measured_everywhere(tmp_path):
    sets = load_topic_folder(write_topics(tmp_path))
    model = Topical(lost=["ewe_Latn"])
    result = evaluate_topics(model, sets, trained=["sw"], resamples=100)
    embeddings = {language: model.encode(one.texts) for language, one in sets.items()}
    unit = {language: rows / np.linalg.norm(rows, axis=1, keepdims=True) for language, rows in embeddings.items()}
    topics = np.array(sets["eng_Latn"].topics)
    probe = LogisticRegression(max_iter=1000).fit(unit["eng_Latn"][:30], topics[:30])
    for language, one in result.languages.items():
        hits = probe.predict(unit[language][30:]) == topics[30:]
        assert one.details["items"] == hits.astype(int).tolist()
        assert one.score == pytest.approx(100 * hits.mean())
        assert one.interval[0] <= one.score <= one.interval[1]
        assert one.n == 12
    assert result.languages["swh_Latn"].score == 100
    assert result.languages["ewe_Latn"].score < 70
    assert result.groups["without English"].n == 3
    assert result.groups["not in XLM-R"].score == pytest.approx((result.languages["ewe_Latn"].score + 100) / 2)
    assert result.protocol.endswith("measured on dev")
    assert evaluate_topics(model, sets, trained=["sw"], resamples=100).languages == result.languages
    better = evaluate_topics(Topical(), sets, resamples=500)
    compared = compare(result, better)
    assert {language: row["verdict"] for language, row in compared["languages"].items()} == {
        "eng_Latn": "tie",
        "ewe_Latn": "better",
        "swh_Latn": "tie",
        "tat_Cyrl": "tie",
    }


def test_the_test_split_is_measured_if_there_is_one(tmp_path):
    sets = load_topic_folder(write_topics(tmp_path, splits=[("train", 30), ("dev", 12), ("test", 9)]))
    result = evaluate_topics(Topical(), sets, resamples=10)
    assert (result.settings["split"], result.languages["eng_Latn"].n) == ("test", 9)
    with pytest.raises(DataError, match="need the split train and one of dev and test, but got train"):
        evaluate_topics(Topical(), load_topic_folder(write_topics(tmp_path / "a", splits=[("train", 30)])))


def test_the_length_of_embeddings_does_not_matter():
    rng = np.random.default_rng(1)
    train, test = rng.normal(size=(40, 6)), rng.normal(size=(25, 6))
    topics, gold = ([TOPICS[int(row[:3].argmax())] for row in rows] for rows in (train, test))
    one, other = (probe_hits(scale * train, topics, {"x": scale * test}, gold)["x"] for scale in (1, 50))
    assert one.tolist() == other.tolist()
    assert one.mean() > 0.7


def test_groups_are_by_resource_and_script():
    groups = language_groups(
        ["swh_Latn", "tel_Telu", "deu_Latn", "rus_Cyrl", "tat_Cyrl", "ewe_Latn"], ["sw", "tel_Telu"]
    )
    assert groups == {
        "trained": ["swh_Latn", "tel_Telu"],
        "in XLM-R": ["deu_Latn", "rus_Cyrl"],
        "not in XLM-R": ["tat_Cyrl", "ewe_Latn"],
        "Latn": ["swh_Latn", "deu_Latn", "ewe_Latn"],
        "Cyrl": ["rus_Cyrl", "tat_Cyrl"],
    }
    assert len(set(XLMR_LANGUAGES.values())) == len(XLMR_LANGUAGES) == 91


def test_groups_of_retrieval(tmp_path):
    pairs = topic_pairs(load_topic_folder(write_topics(tmp_path)))
    result = evaluate_retrieval(Topical(), pairs, groups=language_groups(list(pairs)), resamples=20)
    assert result.groups.keys() == {"not in XLM-R", "Latn"}
    assert result.groups["Latn"].score == result.languages["swh_Latn"].score == 100


def test_the_average_is_as_uncertain_as_the_sentences_that_languages_share(tmp_path):
    """If all languages find and miss the same sentences, more languages do not make the average more certain."""
    model, sets = Topical(lost=("swh_Latn",)), topic_pairs(load_topic_folder(write_topics(tmp_path)))
    sets = {language: replace(one, sources=sets["swh_Latn"].sources) for language, one in sets.items()}
    options = {"groups": {}, "resamples": 2000}
    shared = evaluate_retrieval(model, sets, **options)
    assert shared.average.interval == shared.languages["swh_Latn"].interval
    own = {
        code: replace(one, targets=[text.replace("eng_Latn", f"eng_{code}") for text in one.targets])
        for code, one in sets.items()
    }
    low, high = evaluate_retrieval(model, own, **options).average.interval
    assert high - low < 0.8 * (shared.average.interval[1] - shared.average.interval[0])
    other = replace(shared, languages={**shared.languages, "ewe_Latn": _turned(shared.languages["ewe_Latn"])})
    rows = compare(other, shared, resamples=2000)
    hits = [shared.items(language) - other.items(language) for language in shared.languages]
    expected = bootstrap_interval((np.mean(hits, axis=0) + 1) / 2, resamples=2000)  # the differences as scores
    assert rows["pooled"]["interval"] == pytest.approx(2 * np.array(expected) - 100)


def _turned(one):
    """A measurement with the opposite hits."""
    details = {
        direction: {"hits": one.details[direction]["hits"].translate({48: 49, 49: 48})} for direction in DIRECTIONS
    }
    return replace(one, details=details)


def test_the_evaluator_logs_fractions(tmp_path, tiny_encoder):
    sets = load_topic_folder(write_topics(tmp_path))
    evaluator = TopicEvaluator(sets, name="sib200")
    metrics = evaluator(tiny_encoder, str(tmp_path), epoch=1, steps=10)
    result = evaluate_topics(tiny_encoder, sets, resamples=10)
    assert evaluator.primary_metric == "sib200_mean_accuracy"
    assert 100 * metrics["sib200_mean_accuracy"] == pytest.approx(result.groups["without English"].score)
    assert 100 * metrics["sib200_ewe_Latn_accuracy"] == pytest.approx(result.languages["ewe_Latn"].score)
    assert len((tmp_path / "topic_evaluation_sib200_results.csv").read_text().splitlines()) == 2
    assert evaluator.get_config_dict() == {}


def test_quoted_text_is_read_without_its_quotes(tmp_path):
    """The public release is written by pandas: a text with quotes is quoted, and its quotes are doubled."""
    folder = write_topics(tmp_path)
    path = folder / "eng_Latn.train.tsv.gz"
    header, first, *others = gzip.decompress(path.read_bytes()).decode().splitlines()
    quoted = first.rpartition("\t")[0] + '\t"He said ""no"" twice"'
    path.write_bytes(gzip.compress("\n".join([header, quoted, *others, ""]).encode()))
    assert 'He said "no" twice' in load_topic_folder(folder)["eng_Latn"].texts
    path.write_bytes(gzip.compress("\n".join([header, first, *others, '99\tsports\t"open']).encode()))
    with pytest.raises(DataError, match="unexpected end of data"):
        load_topic_folder(folder)
