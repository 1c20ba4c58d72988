from metaphrase.corpus.parallel import ParallelSet
from metaphrase.publishing.run_report import SentenceEmbeddings, default_folders, token_maps, trained_languages


def test_sentences_are_encoded_once(tiny_encoder, bitext):
    sources, targets = ([row[side] for row in bitext] for side in ("source", "target"))
    texts = {"de": sources, "en": targets + targets}
    encoded = []
    sentences = SentenceEmbeddings("tiny", {"": tiny_encoder})
    sentences.encode(texts, encoded.append)
    distinct = len({*sources, *targets})
    assert sum(encoded) == sentences.size == distinct > 40
    sentences.encode(texts, encoded.append)
    assert sum(encoded) == distinct


def test_default_folders(tmp_path):
    data = tmp_path / "mini"
    data.mkdir()
    pattern = f"{data}/xx-en.tsv.gz, {data}-gone/xx-en.tsv.gz"
    folders = default_folders({"after": {"mini": {"settings": {"data": pattern}}}})
    assert folders[0] == str(data)
    assert [folder.rsplit("/", 1)[1] for folder in folders] == ["mini", "demo", "udhr"]


def test_languages_of_a_stream():
    assert trained_languages({"files": [{"languages": ["en", "sw"]}], "corpus": {"languages": {}}}) == {"sw"}


def test_two_words_have_no_map(tiny_encoder):
    sets = {"de": ParallelSet("de", ("hund",), ("dog",))}
    assert token_maps({"after": SentenceEmbeddings("tiny", {"": tiny_encoder})}, sets) == {}
