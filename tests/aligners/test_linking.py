import json
import shutil
from contextlib import nullcontext

import pytest
import torch
from datasets import Dataset

from metaphrase.aligners.base import Aligner, Alignment
from metaphrase.aligners.embedding import EmbeddingAligner
from metaphrase.aligners.linking import (
    add_alignment,
    align_rows,
    load_aligners,
    segmenter_of,
)
from metaphrase.aligners.statistical import StatisticalAligner
from metaphrase.corpus import load_corpus
from metaphrase.corpus.words import Words, are_tokenised, is_tokenised, parse_links, segmenter_of_text
from metaphrase.corpus.writing import write_corpus
from metaphrase.exceptions import DataMismatchError
from metaphrase.io.work_folders import open_work_folder


class Diagonal(Aligner):
    """Links words at the same place, and remembers the pairs that it saw."""

    name = "diagonal"

    def __init__(self, max_words=100):
        self.max_words = max_words
        self.seen = []

    def align(self, pairs):
        self.seen += pairs
        links = [tuple((i, i) for i in range(min(map(len, pair)))) for pair in pairs]
        return [Alignment(found, tuple(0.5 for _ in found)) for found in links]


def corpus(rows, languages=("sw", "en"), **columns):
    sides = {"source": [s for s, _ in rows], "target": [t for _, t in rows]}
    codes = {"source_lang": [languages[0]] * len(rows), "target_lang": [languages[1]] * len(rows)}
    return Dataset.from_dict(sides | codes | columns)


ROWS = [("paka anakunywa", "the cat drinks"), ("paka", "cat"), ("maji", "water ."), ("mimi na wewe", "you and me")]


def add(dataset, aligner, **settings):
    return add_alignment(dataset, aligner, show_progress=False, **settings)


def test_every_pair_gets_its_links_and_scores():
    dataset, report = add(corpus(ROWS, n=[1, 2, 3, 4]), Diagonal(), chunk_size=3)
    assert dataset["alignment"] == ["0-0 1-1", "0-0", "0-0", "0-0 1-1 2-2"]
    assert dataset["alignment_scores"] == ["0.5 0.5", "0.5", "0.5", "0.5 0.5 0.5"]
    assert "segmenter" not in dataset.column_names
    assert dataset["n"] == [1, 2, 3, 4]
    counts = report.counts["sw-en"]
    assert (counts.pairs, counts.kept, counts.links, counts.unlinked) == (4, 0, 7, 0)
    assert (counts.source_words, counts.source_linked) == (7, 7)
    assert (counts.target_words, counts.target_linked) == (9, 7)
    facts = report.to_dict()
    assert facts["share_target_linked"] == round(7 / 9, 4)
    assert facts["links_per_pair"] == 1.75
    assert facts["aligner"] == "diagonal"
    assert facts["languages"]["sw-en"]["pairs"] == 4
    assert json.loads(json.dumps(facts)) == facts
    assert report.pairs_per_second > 0


def test_links_that_are_there_stay_unless_overwritten():
    old = corpus(ROWS, alignment=["1-0", None, "", "2-0"], alignment_scores=["0.9", None, "", None])
    aligner = Diagonal()
    dataset, report = add(old, aligner)
    assert dataset["alignment"] == ["1-0", "0-0", "0-0", "2-0"]
    assert dataset["alignment_scores"] == ["0.9", "0.5", "0.5", None]
    assert [source.text for source, _ in aligner.seen] == ["paka", "maji"]
    assert report.total.kept == 2
    assert report.total.links == 4
    dataset, report = add(old, aligner, overwrite=True)
    assert dataset["alignment"][0] == "0-0 1-1"
    assert report.total.kept == 0


def test_nothing_is_trained_where_all_pairs_have_links():
    dataset, report = add(corpus(ROWS, alignment=["0-0"] * 4), "fast_align")
    assert dataset["alignment"] == ["0-0"] * 4
    assert (report.total.kept, report.training_seconds, report.pairs_per_second) == (4, 0, 0)


def test_pairs_that_are_too_long_are_counted():
    _, report = add(corpus(ROWS), Diagonal(max_words=2))
    assert report.total.too_long == 2
    _, report = add(corpus([*ROWS, ("maji " * 1025, "water")]), "fast_align")
    assert (report.total.too_long, report.total.unlinked) == (1, 1)


def test_unspaced_languages_are_segmented_and_say_so():
    rows = [("我喜欢猫。", "I like cats ."), ("paka", "cat")]
    mixed = corpus(rows, source_lang=["zh", "sw"])
    aligner = Diagonal()
    dataset, report = add(mixed, aligner)
    assert dataset["segmenter"] == ["icu", "whitespace"]
    assert dataset["alignment"] == ["0-0 1-1 2-2 3-3", "0-0"]
    assert sorted(report.counts) == ["sw-en", "zh-en"]
    dataset, _ = add(mixed, aligner, segmenter="whitespace")
    assert dataset["alignment"] == ["0-0", "0-0"]
    assert "segmenter" not in dataset.column_names
    with pytest.raises(ValueError, match="must be one of 'auto', 'whitespace', 'icu', but is 'spacy'"):
        add(mixed, aligner, segmenter="spacy")


def test_kept_links_count_the_words_that_they_were_made_for():
    old = corpus([("我喜欢猫", "I like cats")] * 2, ("zh", "en"), alignment=["0-0", "2-2"], segmenter=[None, "icu"])
    dataset, report = add(old, Diagonal())
    assert dataset["segmenter"] == [None, "icu"]
    assert report.total.source_words == 1 + 3


def test_tokenised_text_is_not_segmented_again():
    rows = [("我们 喜欢 北京大学 。", "we like Peking University ."), ("我们喜欢北京大学。", "we like it")]
    texts = corpus(rows, ("zh", "en"))
    dataset, report = add(texts, Diagonal())
    assert dataset["segmenter"] == ["whitespace", "icu"]
    assert dataset["alignment"][0] == "0-0 1-1 2-2 3-3"
    assert (report.total.tokenised, report.total.source_words) == (1, 4 + 5)
    dataset, report = add(texts, Diagonal(), segmenter="icu")
    assert dataset["segmenter"] == ["icu", "icu"]
    assert (report.total.tokenised, report.total.source_words) == (0, 5 + 5)


GOLD = ["我们 喜欢 北京大学 。", "猫 喝 牛奶 。", "他 住 在 北京 。", "北京大学 。"]


def test_a_tokenised_corpus_is_split_at_its_spaces(tmp_path):
    """Such as the gold links of Chinese: also in a sentence that ICU would split although its words are separated."""
    assert segmenter_of_text(GOLD[-1], "zh") == "icu"
    rows = [(text, "we like it .") for text in GOLD]
    dataset, report = add(corpus(rows, ("zh", "en")), Diagonal())
    assert "segmenter" not in dataset.column_names
    assert report.total.source_words == sum(len(text.split()) for text in GOLD)
    assert report.total.tokenised == len(GOLD)
    aligned, _ = add(corpus(rows, ("zh", "en")), "fast_align")
    assert {source for source, _ in parse_links(aligned["alignment"][-1])} <= {0, 1}
    split = [(text.replace(" ", ""), target) for text, target in rows]
    split[1] = ("我们 喜欢 北京", "we like Beijing")
    dataset, _ = add(corpus(split, ("zh", "en")), Diagonal())
    assert dataset["segmenter"] == ["icu"] * 4


def test_only_the_side_without_spaces_is_split():
    """Chinese is tokenised, Japanese is not."""
    japanese = ["彼は本を読む。", "猫は牛乳を飲む。", "彼は北京に住む。", "北京大学です。"]
    pairs = list(zip(GOLD, japanese, strict=True))
    aligner = Diagonal()
    dataset, report = add(corpus(pairs, ("zh", "ja")), aligner)
    assert dataset["segmenter"] == ["icu-target"] * 4
    assert [len(source) for source, _ in aligner.seen] == [len(text.split()) for text in GOLD]
    assert all(len(target) > 1 for _, target in aligner.seen)
    assert report.total.source_words == sum(len(text.split()) for text in GOLD)
    again, _ = add(dataset, Diagonal())  # the links fit the words of the stored segmenter
    assert again["alignment"] == dataset["alignment"]
    swapped, _ = add(corpus([pair[::-1] for pair in pairs], ("ja", "zh")), Diagonal())
    assert swapped["segmenter"] == ["icu-source"] * 4
    assert [len(Words.of_side(row, "target")) for row in swapped] == [len(text.split()) for text in GOLD]
    assert [list(Words.of_side(row, "source")) for row in swapped] == [list(target) for _, target in aligner.seen]


def test_that_a_corpus_is_tokenised_is_logged_once(caplog):
    with caplog.at_level("INFO", logger="metaphrase"):
        assert [are_tokenised(GOLD, "wuu") for _ in range(2)] == [True, True]
        assert are_tokenised(GOLD[:1] + [text.replace(" ", "") for text in GOLD[:1]], "wuu") is None
        assert are_tokenised([text.replace(" ", "") for text in GOLD], "wuu") is False
        assert are_tokenised(["猫"], "wuu") is None
    assert [record.getMessage() for record in caplog.records] == [
        "Most sentences in wuu are tokenised already: spaces separate the words.",
        "Some sentences in wuu are tokenised already: spaces separate the words of these.",
    ]


@pytest.mark.parametrize(
    ("text", "language", "tokenised"),
    [
        ("我们 喜欢 北京大学 。", "zh", True),
        ("我们喜欢北京大学。 你呢？", "zh", False),
        ("用 GIMP 2.8 打开文件", "zh", False),
        ("打开文件", "zh", False),
        ("彼 は 本 を 読む 。", "ja", True),
        ("彼は本を読む。", "ja", False),
        ("ฉัน ชอบ กิน ข้าว", "th", True),
        ("ฉันชอบกินข้าว เธอชอบไหม", "th", False),
        ("the cat sleeps", "en", False),
        ("", "zh", False),
    ],
)
def test_spaces_of_tokenised_text_are_recognised(text, language, tokenised):
    assert is_tokenised(text, language) is tokenised
    assert segmenter_of_text(text, language) == ("whitespace" if tokenised or language == "en" else "icu")


@pytest.mark.parametrize(
    ("languages", "chosen"), [(("zh", "en"), "icu"), (("sw", "ja"), "icu"), ((None, "en"), "whitespace")]
)
def test_the_segmenter_of_a_pair(languages, chosen):
    assert segmenter_of(languages, "auto") == segmenter_of(languages, "icu") == chosen
    assert segmenter_of(languages, "whitespace") == "whitespace"


def test_statistical_aligners_are_trained_for_each_pair_of_languages(bitext, tmp_path):
    columns = {name: [row[name] for row in bitext] for name in ("source", "target", "source_lang", "target_lang")}
    columns["source_lang"] = ["de", "nl"] * (len(bitext) // 2)
    dataset, report = add(Dataset.from_dict(columns), "fast_align", heuristic="intersection", folder=tmp_path)
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["de-en", "nl-en"]
    alone = Dataset.from_dict(columns).select(range(0, len(bitext), 2))
    pairs = [(Words.of(row["source"]), Words.of(row["target"])) for row in alone]
    own = StatisticalAligner(heuristic="intersection").train(pairs)
    assert dataset["alignment"][::2] == [found.pharaoh for found in own.align(pairs)]
    assert report.training_seconds > 0
    loaded = load_aligners(tmp_path / "models")
    assert sorted(loaded) == ["de-en", "nl-en"]
    again, _ = add(Dataset.from_dict(columns), loaded)
    assert again["alignment"] == dataset["alignment"]
    assert load_aligners(tmp_path / "models" / "de-en", heuristic="union").heuristic == "union"
    with pytest.raises(ValueError, match=r"No aligner for sw-en\. Available: de-en, nl-en"):
        add(corpus(ROWS), loaded)
    unknown = Dataset.from_dict({name: columns[name] for name in ("source", "target", "target_lang")})
    with pytest.raises(ValueError, match=r"No aligner for und-en\. Available: de-en, nl-en"):
        add(unknown, loaded)
    only = shutil.copytree(tmp_path / "models" / "de-en", tmp_path / "only" / "de-en").parent
    found, _ = add(unknown.select(range(0, len(bitext), 2)), load_aligners(only))
    assert found["alignment"][:] == dataset["alignment"][::2]
    with pytest.raises(ValueError, match=r"No aligner for nl-en\. Available: de-en"):
        add(Dataset.from_dict(columns), load_aligners(only))
    (tmp_path / "models" / "nl-en" / "aligner.json").unlink()  # the other one must not align Dutch, too
    with pytest.raises(ValueError, match=r"nl-en holds no statistical aligner: aligner\.json is missing"):
        load_aligners(tmp_path / "models")
    with pytest.raises(ValueError, match="holds no statistical aligner"):
        load_aligners(tmp_path / "nothing")


def test_a_folder_with_links_of_another_aligner_is_refused(tmp_path, tiny_encoder):
    for settings, fits in (({"layer": 0}, True), ({"layer": 0}, True), ({"layer": 1}, False)):
        with nullcontext() if fits else pytest.raises(ValueError, match="an aligner with other settings"):
            add(corpus(ROWS), EmbeddingAligner(tiny_encoder, **settings), folder=tmp_path)
    with torch.no_grad():
        tiny_encoder[0].auto_model.get_input_embeddings().weight[0] += 1
    with pytest.raises(ValueError, match="an aligner with other settings"):
        add(corpus(ROWS), EmbeddingAligner(tiny_encoder, layer=0), folder=tmp_path)


def test_interrupted_work_goes_on(tmp_path):
    class Stops(Diagonal):
        def align(self, pairs):
            if len(self.seen) >= 2:
                raise KeyboardInterrupt
            return super().align(pairs)

    with pytest.raises(KeyboardInterrupt):
        add(corpus(ROWS), Stops(), folder=tmp_path, chunk_size=1)
    assert len(list(tmp_path.glob("*.parquet"))) == 2
    aligner = Diagonal()
    dataset, report = add(corpus(ROWS), aligner, folder=tmp_path, chunk_size=1)
    assert len(aligner.seen) == 2
    whole, expected = add(corpus(ROWS), Diagonal(), chunk_size=3)
    assert dataset.to_list() == whole.to_list()
    assert report.total == expected.total
    assert not list(tmp_path.glob("*.part"))


def test_trained_aligners_are_found_again(tmp_path, monkeypatch):
    first, report = add(corpus(ROWS), "ibm1", folder=tmp_path)
    for shard in tmp_path.glob("*.parquet"):
        shard.unlink()
    monkeypatch.setattr(StatisticalAligner, "train", None)
    second, again = add(corpus(ROWS), "ibm1", folder=tmp_path)
    assert second.to_list() == first.to_list()
    assert again.training_seconds == report.training_seconds
    monkeypatch.undo()
    for shard in tmp_path.glob("*.parquet"):
        shard.unlink()
    next((tmp_path / "models" / "sw-en").glob("direct.*")).write_bytes(b"")
    third, _ = add(corpus(ROWS), "ibm1", folder=tmp_path)
    assert third.to_list() == first.to_list()
    assert load_aligners(tmp_path / "models")["sw-en"].trained_pairs


def test_a_work_folder_belongs_to_one_command(tmp_path):
    folder = tmp_path / "out.partial"
    manifest = {"inputs": {"a.tsv": "0"}, "aligner": "hmm", "languages": []}
    assert open_work_folder(folder, manifest) == folder
    assert open_work_folder(folder, dict(manifest)) == folder
    with pytest.raises(ValueError, match=r"the work of another command, which differs in: aligner, new\. .* delete "):
        open_work_folder(folder, manifest | {"aligner": "ibm1", "new": 1})
    assert open_work_folder(folder, manifest | {"aligner": "ibm1"}, locked=True) == folder  # no part is finished
    (folder / "0.parquet").touch()
    with pytest.raises(ValueError, match="differs in: aligner"):
        open_work_folder(folder, manifest, locked=True)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").touch()
    with pytest.raises(ValueError, match="is needed for unfinished work"):
        open_work_folder(tmp_path / "taken", manifest)


def test_rows_without_languages_or_words():
    links, counts = align_rows({"source": ["", "a b"], "target": ["x", "y"]}, lambda languages: Diagonal())
    assert links["alignment"] == ["", "0-0"]
    assert {languages: one.unlinked for languages, one in counts.items()} == {"und-und": 1}


def test_what_cannot_be_aligned_is_refused():
    with pytest.raises(ValueError, match="A stream cannot be aligned"):
        add(corpus(ROWS).to_iterable_dataset(), Diagonal())
    with pytest.raises(ValueError, match="Unknown aligner 'giza'; choose from fast_align, hmm"):
        add(corpus(ROWS), "giza")
    with pytest.raises(ValueError, match="but got an aligner and heuristic"):
        add(corpus(ROWS), Diagonal(), heuristic="och")


def test_the_embedding_aligner_goes_by_its_name(bitext, tiny_encoder):
    dataset, report = add(Dataset.from_list(bitext[:4]), "embedding", model=tiny_encoder, overwrite=True)
    assert all(parse_links(links) for links in dataset["alignment"])
    assert report.to_dict()["aligner"] == "embedding"


@pytest.mark.parametrize("suffix", [".tsv", ".tsv.gz", ".jsonl", ".jsonl.gz", ".parquet", ".tsv.jsonl"])
def test_what_is_written_is_read_again(tmp_path, suffix):
    rows = [("我喜欢猫", "I like cats"), ("x\ty  z", "a\nb"), ("paka", "—")]
    dataset, _ = add(corpus(rows, source_lang=["zh", "sw", "sw"]), Diagonal())
    path = write_corpus(dataset, tmp_path / "new" / f"all{suffix}")
    again = load_corpus(path, cleaning=None).dataset
    assert again.column_names == dataset.column_names
    expected = dataset.to_list()
    if suffix in (".tsv", ".tsv.gz"):
        expected[1] |= {"source": "x y  z", "target": "a b"}
    assert again.to_list() == expected
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    content = path.read_bytes()
    assert write_corpus(dataset, path).read_bytes() == content


def test_only_known_formats_are_written(tmp_path):
    with pytest.raises(
        ValueError, match=r"Cannot write .*x.tmx: the format is unknown. Supported formats: .tsv, .tsv.gz"
    ):
        write_corpus(corpus(ROWS), tmp_path / "x.tmx")


def test_a_folder_keeps_the_links_of_one_call(tmp_path):
    add(corpus(ROWS), "fast_align", folder=tmp_path)
    again, _ = add(corpus(ROWS), "fast_align", folder=tmp_path)
    assert again["alignment"] == add(corpus(ROWS), "fast_align")[0]["alignment"]
    for rows, settings in ((ROWS[::-1], {}), (ROWS, {"heuristic": "union"}), (ROWS, {"chunk_size": 2})):
        with pytest.raises(DataMismatchError, match="holds links of other pairs"):
            add(corpus(rows), "fast_align", folder=tmp_path, **settings)


def test_a_folder_does_not_keep_the_links_of_a_model_that_changed(tmp_path, tiny_encoder_dir):
    model = shutil.copytree(tiny_encoder_dir, tmp_path / "model")
    settings = {"model": model, "folder": tmp_path / "links"}
    add(corpus(ROWS), "embedding", **settings)
    add(corpus(ROWS), "embedding", **settings)
    config = model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"layer_norm_eps": 0.1}))
    with pytest.raises(DataMismatchError, match="holds links of other pairs"):
        add(corpus(ROWS), "embedding", **settings)


def test_a_folder_does_not_mix_kept_and_overwritten_links(tmp_path):
    old = corpus(ROWS, alignment=["1-0", None, None, "2-0"])
    kept, _ = add(old, Diagonal(), folder=tmp_path)
    assert kept["alignment"][0] == "1-0"
    with pytest.raises(DataMismatchError, match="holds links of other pairs"):
        add(old, Diagonal(), folder=tmp_path, overwrite=True)


def test_a_corpus_whose_first_pairs_are_tokenised_is_judged_by_all_of_it(monkeypatch):
    monkeypatch.setattr("metaphrase.aligners.linking._JUDGED", 4)
    monkeypatch.setattr("metaphrase.corpus.words._SAMPLE", 4)
    rest = ["我们喜欢北京大学。", "猫喝牛奶。", "他住在北京。 你呢？", "我们喜欢猫。"]
    texts = [*GOLD[:3], *GOLD[:1], *rest * 5]
    assert are_tokenised(texts, "zh") is False
    dataset, _ = add(corpus([(text, "we like it .") for text in texts], ("zh", "en")), Diagonal())
    assert dataset["segmenter"] == ["icu"] * len(texts)


def test_an_aligner_is_trained_on_the_words_that_it_aligns(monkeypatch):
    """Those of a tokenised corpus, also in a sentence that ICU would split."""
    seen = []
    train, align = StatisticalAligner.train, StatisticalAligner.align
    monkeypatch.setattr(
        StatisticalAligner, "train", lambda self, pairs, **_: train(self, seen.append(list(pairs)) or seen[-1])
    )
    monkeypatch.setattr(
        StatisticalAligner, "align", lambda self, pairs: align(self, seen.append(list(pairs)) or pairs)
    )
    add(corpus([(text, "we like it .") for text in GOLD], ("zh", "en")), "ibm1")
    trained, aligned = seen
    assert trained == aligned
    assert [len(source) for source, _ in trained] == [len(text.split()) for text in GOLD]
