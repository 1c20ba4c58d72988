import pytest
from datasets import Dataset, IterableDataset, concatenate_datasets, load_dataset

from metaphrase.corpus import load_corpus
from metaphrase.corpus.cleaning import Cleaning
from metaphrase.corpus.digests import check_stream, data_digest, stream_digest
from metaphrase.corpus.monolingual import with_monolingual

ROWS = [
    {"source": "ja", "target": "yes", "monolingual": ["a", "bc"], "n": 1},
    {"source": "nein", "target": None, "monolingual": [], "n": None},
    {"source": "", "target": "", "monolingual": None, "n": 3},
]


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr("metaphrase.corpus.digests.ROWS", 2)


@pytest.mark.usefixtures("small_blocks")
def test_the_same_rows_have_one_digest_however_they_are_kept(tmp_path):
    dataset = Dataset.from_list(ROWS)
    dataset.to_parquet(tmp_path / "rows.parquet")
    same = [
        Dataset.from_parquet(str(tmp_path / "rows.parquet"), cache_dir=str(tmp_path)),
        concatenate_datasets([Dataset.from_list([row], features=dataset.features) for row in ROWS]),
        Dataset.from_list(ROWS[::-1], features=dataset.features).select([2, 1, 0]),
        Dataset.from_list([ROWS[0], *ROWS], features=dataset.features).select(range(1, 4)),
        dataset.select_columns(["n", "target", "monolingual", "source"]),
    ]
    assert {data_digest(one) for one in same} == {data_digest(dataset)}


@pytest.mark.parametrize(
    "changed",
    [
        [*ROWS[:2], {**ROWS[2], "source": None}],
        [{**ROWS[0], "source": "j", "target": "ayes"}, *ROWS[1:]],
        [{**ROWS[0], "source": "jan"}, {**ROWS[1], "source": "ein"}, ROWS[2]],
        [{**ROWS[0], "monolingual": ["ab", "c"]}, *ROWS[1:]],
        [{**ROWS[0], "monolingual": ["a"]}, {**ROWS[1], "monolingual": ["bc"]}, ROWS[2]],
        [{**ROWS[0], "n": 2}, *ROWS[1:]],
        [ROWS[1], ROWS[0], ROWS[2]],
        [{**row, "more": "x"} for row in ROWS],
        [{"source_bt" if name == "source" else name: value for name, value in row.items()} for row in ROWS],
    ],
)
def test_every_change_gives_another(changed):
    assert data_digest(Dataset.from_list(changed)) != data_digest(Dataset.from_list(ROWS))


def test_a_stream_is_known_by_its_files(bitext_path, tmp_path):
    def digest(folder, **options):
        return stream_digest(load_corpus(str(folder), streaming=True, **options).dataset)

    for folder in ("one", "other", "more"):
        (tmp_path / folder).mkdir()
        for language in ("de", "sw"):
            (tmp_path / folder / f"{language}-en.tsv").write_bytes(bitext_path.read_bytes())
    with (tmp_path / "more" / "sw-en.tsv").open("a", encoding="utf-8") as lines:
        lines.write("x\ty\n")
    assert digest(tmp_path / "one") == digest(tmp_path / "other")
    assert digest(tmp_path / "one") != digest(tmp_path / "more")
    assert stream_digest(IterableDataset.from_generator(lambda: iter([]))) is None


def test_a_stream_is_known_by_its_monolingual_text(bitext_path):
    def digest(*texts, **options):
        stream = load_corpus(str(bitext_path), streaming=True).dataset
        return stream_digest(with_monolingual(stream, texts, **options) if texts else stream)

    found = [digest(), digest("a b"), digest("c d"), digest("a b", ratio=0.5), digest("a b", seed=1)]
    assert len(set(found)) == len(found)
    assert digest("a b") == found[1]


def test_a_stream_is_known_by_what_selects_and_orders_its_rows(bitext_path, tmp_path):
    for language in ("de", "sw"):
        text = bitext_path.read_text(encoding="utf-8").replace("\tde\t", f"\t{language}\t")
        (tmp_path / f"{language}-en.tsv").write_text(text, encoding="utf-8")

    def digests(shuffled=11, **options):
        stream = load_corpus(str(tmp_path), **{"streaming": True, **options}).dataset
        return stream_digest(stream), stream_digest(stream.shuffle(seed=shuffled, buffer_size=10))

    changes = [
        {},
        {"languages": ["de"]},
        {"temperature": 0.5},
        {"seed": 5},
        {"limit": 7},
        {"cleaning": Cleaning(identical=True)},
    ]
    plain, shuffled = zip(*[digests(**change) for change in changes], strict=True)
    assert (plain, shuffled) == tuple(zip(*[digests(**change) for change in changes], strict=True))
    assert len({*plain, *shuffled}) == 2 * len(changes) - 1  # a seed for shuffling replaces that of the mixture
    assert digests()[1] != digests(shuffled=12)[1]


def test_an_edit_of_the_same_length_makes_another_stream(tmp_path):
    path = tmp_path / "sw-en.tsv"
    lines = [f"neno {at}\tword {at}\n" for at in range(20_000)]
    found = set()
    for place in (None, 0, 1234, len(lines) - 1):
        edited = [line.replace("word", "WORD") if at == place else line for at, line in enumerate(lines)]
        path.write_text("".join(edited), encoding="utf-8")
        found.add(stream_digest(load_corpus(str(path), streaming=True).dataset))
    assert len(found) == 4


def test_a_stream_of_another_origin_has_no_digest(tmp_path):
    Dataset.from_list(ROWS).to_parquet(tmp_path / "rows.parquet")
    stream = load_dataset("parquet", data_files=str(tmp_path / "rows.parquet"), split="train", streaming=True)
    assert stream_digest(stream) is None
    check_stream(stream)


def test_a_stream_is_known_by_its_columns_languages_and_buffer(tmp_path):
    """Of one and the same file."""
    path = tmp_path / "pairs.tsv"
    rows = "".join(f"neno {at}\tword {at}\ta word {at}\t{'sw' if at % 2 else 'te'}\n" for at in range(20))
    path.write_text("source\ttarget\tother\tsource_lang\n" + rows, encoding="utf-8")

    def stream(**options):
        return load_corpus(str(path), streaming=True, **options).dataset

    columns = [
        stream(languages=["sw", "te"], source_column="source", target_column=one) for one in ("target", "other")
    ]
    languages = [stream(languages=chosen) for chosen in (["sw"], ["te"], ["sw", "te"])]
    shuffled = [languages[0].shuffle(seed=1, buffer_size=size) for size in (5, 10)]
    digests = [stream_digest(one) for one in (*columns, *languages, *shuffled)]
    assert len(set(digests)) == len(digests)
    assert stream_digest(stream(languages=["te", "sw"])) == digests[4]  # in any order
