import pytest

from metaphrase.corpus.parallel import ParallelSet
from metaphrase.publishing.run_report import SentenceEmbeddings, default_folders, token_maps, trained_languages


def test_sentences_are_encoded_once(tiny_encoder, bitext):
    sources, targets = ([row[side] for row in bitext] for side in ("source", "target"))
    sentences = SentenceEmbeddings("tiny", {"": tiny_encoder})
    for _ in range(2):
        of_sources, _ = sentences.of("de", sources), sentences.of("en", targets + targets)
        assert len(sentences.encoders[""].rows) == len({*sources, *targets}) > 40
    assert of_sources == pytest.approx(tiny_encoder.encode(sources), abs=1e-5)


def test_default_folders(tmp_path, caplog):
    data, own = tmp_path / "a, b" / "mini", tmp_path / "run" / "data" / "held-out"
    for folder in (data, own):
        folder.mkdir(parents=True)
    pattern = f"{data}/xx-en.tsv.gz, {data}-gone/xx-en.tsv, gone/run/data/held-out/xx-en.test.tsv.gz"
    folders = default_folders({"after": {"mini": {"settings": {"data": pattern}}}}, tmp_path / "run")
    assert folders[:2] == [str(data), str(own)]
    assert [folder.rsplit("/", 1)[1] for folder in folders] == ["mini", "held-out", "demo", "udhr"]
    assert "Test sets that no longer exist are skipped: mini-gone." in caplog.text


def test_languages_of_a_stream():
    assert trained_languages({"files": [{"languages": ["en", "sw"]}], "corpus": {"languages": {}}}) == {"sw"}


def test_two_words_have_no_map(tiny_encoder):
    sets = {"de": ParallelSet("de", ("hund",), ("dog",))}
    assert token_maps({"after": SentenceEmbeddings("tiny", {"": tiny_encoder})}, sets) == {}
