import gzip
import logging

import pytest
from datasets import Dataset, Features, IterableDataset, Value

from metaphrase.corpus import hub as hub_module
from metaphrase.corpus.monolingual import check_monolingual, load_monolingual, with_monolingual
from metaphrase.exceptions import CorpusError

COLUMNS = ("source", "target", "source_lang", "target_lang")


@pytest.fixture
def write(tmp_path):
    def write(content, name="text.de.txt"):
        path = tmp_path / name
        data = content if isinstance(content, bytes) else content.encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return write


@pytest.mark.parametrize("name", ["text.txt", "text.txt.gz", "packed-without-saying-so"])
def test_sentences_are_paired_inside_documents(write, name):
    path = write("a\nb\nc\nd\ne\n\u200b\n\n f \n \t\ng\nh", name)
    if name == "packed-without-saying-so":
        path.write_bytes(gzip.compress(path.read_bytes()))
    assert load_monolingual(path) == ["a\nb", "c\nd", "e", "f", "g\nh"]


def test_files_are_documents_of_their_own(write):
    paths = [write("a\nb\nc\n", "1.txt"), write("d\ne\n", "2.txt")]
    assert load_monolingual(paths) == ["a\nb", "c", "d\ne"]


@pytest.mark.parametrize("content", ["", "\n\n", "  \n\t\n"])
def test_a_file_without_text_is_refused(write, content):
    good = write("a\n", "good.txt")
    with pytest.raises(ValueError, match=r"text\.de\.txt contains no text"):
        load_monolingual([good, write(content)])


def test_a_damaged_file_is_refused(write):
    path = write("ein Satz\n" * 5000, "text.txt.gz")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"text\.txt\.gz, after line .* damaged or truncated"):
        load_monolingual(path)


def test_text_in_another_encoding_is_refused(write):
    with pytest.raises(ValueError, match="UTF-16"):
        load_monolingual(write("ein Satz\n".encode("utf-16")))
    with pytest.raises(ValueError, match=r"of the first 1000 lines are unreadable\b.*line 1: not UTF-8"):
        load_monolingual(write("schläft\n".encode("latin-1") * 1000))


def test_what_cannot_be_read_ends_a_document(write, caplog):
    path = write(b"a\nb\nc\n\xff\nd\n" + b"e" * 50 + b"\nf\ng\n")
    with caplog.at_level(logging.WARNING, "metaphrase"):
        assert load_monolingual(path, max_chars=40) == ["a\nb", "c", "d", "f\ng"]
    assert "2 of 8 lines were skipped; line 4: not UTF-8" in caplog.text


def test_missing_files_are_told_before_any_is_read(write):
    with pytest.raises(FileNotFoundError, match=r"The file .*nowhere\.txt does not exist"):
        load_monolingual([write(""), write("").with_name("nowhere.txt")])
    with pytest.raises(CorpusError, match="is a folder, but should be a file"):
        check_monolingual([write("").parent])
    with pytest.raises(ValueError, match="is not the name of a Hub data set"):
        check_monolingual(["hf:"])
    check_monolingual(["hf:org/name:config@split"])


@pytest.fixture
def hub(monkeypatch):
    """Gives the rows of every Hub data set, and what has been asked for."""
    asked = []
    commit = "c0ffee" + "0" * 34

    def give(*rows):
        class Builder:
            hash = commit

            def __init__(self, *names, revision):
                self.names, self.revision = names, revision

            def as_streaming_dataset(self, split):
                asked.append((*self.names, split))
                assert self.revision == commit
                return iter(rows)

        monkeypatch.setattr(hub_module, "load_dataset_builder", Builder)
        return asked

    return give


def test_hub_data_sets(hub):
    asked = hub({"text": "a\nb\nc"}, {"text": "d"}, {"text": "e"}, {"text": None}, {"text": "f"})
    texts = ["a\nb", "c", "d\ne", "f"]
    assert load_monolingual("hf:org/name") == texts
    assert load_monolingual(["hf:org/name:sw@part"]) == texts
    path = "hf://datasets/org/name"
    assert asked == [(path, None, "train"), (path, "sw", "part")]
    hub({"sentence": "a"})
    with pytest.raises(ValueError, match="hf:org/name has no column 'text'; it has 'sentence'"):
        load_monolingual("hf:org/name")


def test_rows_of_the_hub_that_are_no_text_end_a_document(hub, caplog):
    hub(*({"text": text} for text in ["a", "b", "c", 7, "d", "e\0", "f", "g" * 50 + "\nh\ni", ["j"]]))
    with caplog.at_level(logging.WARNING, "metaphrase"):
        assert load_monolingual("hf:org/name", max_chars=40) == ["a\nb", "c", "d", "f", "h\ni"]
    assert "hf:org/name: 4 of 13 lines were skipped; line 4: not text, 7." in caplog.text
    hub(*[{"text": 7}] * 1000)
    with pytest.raises(ValueError, match="hf:org/name: 1000 of the first 1000 lines are unreadable"):
        load_monolingual("hf:org/name")


@pytest.fixture
def pairs(bitext):
    return [{column: row[column] for column in COLUMNS} for row in bitext]


@pytest.fixture(params=["whole", "stream"])
def dataset(request, pairs):
    if request.param == "whole":
        return Dataset.from_list(pairs)
    features = Features({column: Value("string") for column in COLUMNS})
    return IterableDataset.from_generator(lambda: iter(pairs), features=features)


def given(dataset):
    return [row["monolingual"] for row in dataset]


@pytest.mark.parametrize("ratio", [0.25, 0.4, 1.0, 2.5])
def test_rows_get_their_share(dataset, pairs, ratio):
    texts = [f"text {i}" for i in range(1000)]
    mixed = with_monolingual(dataset, texts, ratio=ratio)
    counts = [len(some) for some in given(mixed)]
    assert sum(counts) == int(len(pairs) * ratio)
    assert max(counts) - min(counts) <= 1
    assert [sum(counts[:i]) for i in range(len(counts) + 1)] == [int(i * ratio) for i in range(len(counts) + 1)]
    flat = [text for some in given(mixed) for text in some]
    assert len(set(flat)) == len(flat)
    assert flat != texts[: len(flat)]
    assert [row["source"] for row in mixed] == [row["source"] for row in pairs]
    assert str(mixed.features["monolingual"]) == "List(Value('string'))"


def test_texts_are_used_again_from_the_start(dataset):
    flat = [text for some in given(with_monolingual(dataset, ["a", "b", "c"])) for text in some]
    assert sorted(flat[:3]) == ["a", "b", "c"]
    assert flat == (flat[:3] * 9)[: len(flat)]


def test_the_seed_alone_decides(dataset):
    texts = [f"text {i}" for i in range(100)]
    first, again, other = (given(with_monolingual(dataset, texts, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_streams_and_whole_corpora_agree(pairs):
    texts = [f"text {i}" for i in range(100)]
    features = Features({column: Value("string") for column in COLUMNS})
    stream = IterableDataset.from_generator(lambda: iter(pairs), features=features)
    whole = Dataset.from_list(pairs)
    assert given(with_monolingual(stream, texts, ratio=0.7)) == given(with_monolingual(whole, texts, ratio=0.7))


def test_a_stream_resumes_where_it_stopped(pairs):
    features = Features({column: Value("string") for column in COLUMNS})
    stream = IterableDataset.from_generator(lambda: iter(pairs), features=features)
    mixed = with_monolingual(stream, [f"text {i}" for i in range(100)])
    whole, rows = given(mixed), iter(mixed)
    for _ in range(7):
        next(rows)
    state = mixed.state_dict()
    fresh = with_monolingual(stream, [f"text {i}" for i in range(100)])
    fresh.load_state_dict(state)
    assert given(fresh) == whole[7:]


def test_what_cannot_be_added_is_refused(dataset):
    with pytest.raises(ValueError, match="no monolingual text"):
        with_monolingual(dataset, [])
    for ratio in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="must be a number above 0"):
            with_monolingual(dataset, ["a"], ratio=ratio)
