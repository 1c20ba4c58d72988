from collections import Counter
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from accelerate.data_loader import prepare_data_loader
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch.utils.data import DataLoader

from metaphrase.corpus import Cleaning, files, load_corpus, loading
from metaphrase.corpus.loading import mix, shares
from metaphrase.corpus.overlap import overlap
from metaphrase.corpus.readers import read_parallel
from metaphrase.exceptions import CorpusError
from tests.corpus.samples import (
    DEMO,
    PAIRS,
    make_jsonl,
    make_moses_prefix,
    make_parquet,
    make_tmx,
    many,
    pairs_of,
    tmx,
    tsv,
    write,
)


@pytest.fixture
def two_languages(tmp_path) -> Path:
    tsv(tmp_path / "sw-en.tsv", many(800, "swa"))
    tsv(tmp_path / "te-en.tsv", many(100, "tel"))
    return tmp_path


def test_shares():
    sizes = {"a": 1, "b": 9, "c": 0}
    assert shares(sizes, 1) == {"a": 0.1, "b": 0.9}
    assert shares(sizes, 0) == {"a": 0.5, "b": 0.5}
    assert shares(sizes, 0.5) == {"a": 0.25, "b": 0.75}


@pytest.mark.parametrize(
    ("temperature", "expected"),
    # 800 ** 0.7 = 107.67 and 100 ** 0.7 = 25.12
    [(1, {"sw": 800, "te": 100}), (0, {"sw": 450, "te": 450}), (0.7, {"sw": 730, "te": 170})],
)
def test_temperature_resamples_at_the_same_size(two_languages, temperature, expected):
    corpus = load_corpus(two_languages, temperature=temperature)
    assert corpus.report.sampled == expected == Counter(corpus.dataset["source_lang"])
    times = Counter(pairs_of(corpus))
    assert {times[pair] for pair in many(100, "tel")} <= {expected["te"] // 100, expected["te"] // 100 + 1}
    assert max(times[pair] for pair in many(800, "swa")) == 1
    again = load_corpus(two_languages, temperature=temperature)
    assert pairs_of(again) == pairs_of(corpus)
    assert pairs_of(load_corpus(two_languages, temperature=temperature, seed=1)) != pairs_of(corpus)
    assert corpus.report.to_dict()["sampled"] == expected


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=50), st.sampled_from([0, 0.3, 0.7, 1]), st.integers(0, 9))
def test_a_mixture_has_the_size_of_the_corpus(languages, temperature, seed):
    mixture = mix(languages, temperature, seed)
    assert len(mixture) == len(languages)
    assert set(mixture) <= set(range(len(languages)))


@pytest.mark.parametrize("languages", [["sw"], ["sw", "te"]])
def test_a_stream_has_the_rows_of_the_data_set(two_languages, languages):
    stream = load_corpus(two_languages, languages=languages, streaming=True)
    rows = [tuple(row.values()) for row in stream.dataset]
    assert Counter(rows) == Counter(
        tuple(row.values()) for row in load_corpus(two_languages, languages=languages).dataset
    )
    assert [tuple(row.values()) for row in stream.dataset] == rows
    assert stream.report.languages == Counter(row[2] for row in rows)
    if len(languages) == 2:  # one language after the other would be no mixture
        assert 5 <= sum(row[2] == "te" for row in rows[:200]) <= 60


def test_a_stream_with_a_temperature_has_files_of_one_language(tmp_path):
    lines = [f"s{at}\tt{at}\t{'sw' if at < 200 else 'fi'}\n" for at in range(300)]
    path = tmp_path / "sw-en.tsv"
    path.write_text("source\ttarget\tsource_lang\n" + "".join(lines), encoding="utf-8")
    load_corpus(str(path), streaming=True)
    with pytest.raises(CorpusError, match=r"sw-en\.tsv has rows in other languages than its name states"):
        load_corpus(str(path), streaming=True, temperature=0)


def test_streamed_temperature(two_languages):
    rows = [row["source_lang"] for row in load_corpus(two_languages, streaming=True, temperature=0).dataset]
    assert rows.count("sw") >= 800  # every language is read to its end
    assert 0.45 < rows.count("te") / len(rows) < 0.55
    path = tsv(two_languages / "mixed.tsv", [(*pair, "sw") for pair in PAIRS], "source\ttarget\tsource_lang")
    with pytest.raises(ValueError, match=r"the name of .*mixed\.tsv states no language"):
        load_corpus(path, streaming=True, temperature=0.5)


@pytest.mark.parametrize(
    "make", [make_parquet, make_tmx, make_moses_prefix, make_jsonl], ids=lambda make: make.__name__
)
def test_streams_of_every_format_can_be_mixed(tmp_path, make):
    other = tsv(tmp_path / "te-en.tsv", many(6))
    corpus = load_corpus([make(tmp_path), other], streaming=True, temperature=0.3)
    assert {*PAIRS, *many(6)} == set(pairs_of(corpus))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_file_without_the_language_is_reported_and_skipped(tmp_path, caplog, streaming):
    other = write(tmp_path / "x.tmx", tmx().replace(b'"SW"', b'"te"'))
    corpus = load_corpus([tsv(tmp_path / "sw-en.tsv"), other], languages=["sw"], streaming=streaming)
    assert pairs_of(corpus) == PAIRS
    assert [record.getMessage() for record in caplog.records] == [f"{other}: no pair was kept."]
    with pytest.raises(CorpusError, match=r"(?s)No pair of .*x\.tmx was kept\.\n.*other languages"):
        load_corpus(other, languages=["sw"], streaming=streaming)


def test_a_chosen_language_that_a_stream_may_lack_is_reported(tmp_path, caplog):
    path = tsv(tmp_path / "x.tsv", [(*pair, "sw") for pair in PAIRS], "source\ttarget\tsource_lang")
    load_corpus(path, languages=["sw", "te"], streaming=True)
    assert [record.getMessage() for record in caplog.records] == [
        "No pair in 'te' among the first 100 pairs of each file."
    ]


def test_a_languages_files_are_shards(tmp_path):
    for i in range(3):
        tsv(tmp_path / f"part{i}.sw-en.tsv", many(4, f"n{i}"))
    dataset = load_corpus(tmp_path, streaming=True).dataset
    assert dataset.num_shards == 3
    parts = [[row["source"] for row in dataset.shard(3, i)] for i in range(3)]
    assert parts == [[s for s, _ in many(4, f"n{i}")] for i in range(3)]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more processes than there are CPUs
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("names", ["sw", "sw sw", "sw sw sw", "sw sw sw sw", "sw te", "sw sw te te"])
def test_processes_share_a_stream(tmp_path, names, workers):
    """Each of two processes makes its batches as training does; together they have every row, and none twice."""
    rows = []
    for at, language in enumerate(names.split()):
        rows += many(24, f"{language}{at}")
        tsv(tmp_path / f"part{at}.{language}-en.tsv", rows[-24:])
    shared = []
    for process in (0, 1):
        stream = load_corpus(tmp_path, streaming=True).dataset
        loader = DataLoader(stream, batch_size=4, drop_last=True, num_workers=workers, collate_fn=list)
        loader = prepare_data_loader(
            loader, num_processes=2, process_index=process, put_on_device=False, dispatch_batches=False
        )
        shared.append([[(row["source"], row["target"]) for row in batch] for batch in loader])
    assert all(len(batch) == 4 for batches in shared for batch in batches)
    assert min(map(len, shared)) >= 3
    assert Counter(pair for batches in shared for batch in batches for pair in batch) == Counter(rows)


def test_a_stream_resumes_exactly(two_languages):
    def stream():
        return load_corpus(two_languages, streaming=True, temperature=0.5).dataset

    first = stream()
    rows = list(first)
    again = stream()
    list(islice(again, 57))
    state = again.state_dict()
    rest = stream()
    rest.load_state_dict(state)
    assert list(rest) == rows[57:]


def test_a_stream_can_be_shuffled_and_read_by_epochs(two_languages):
    dataset = load_corpus(two_languages, streaming=True).dataset.shuffle(seed=1, buffer_size=100)
    first = list(dataset)
    assert list(dataset) == first
    dataset.set_epoch(1)
    assert list(dataset) != first
    assert Counter(row["source"] for row in dataset) == Counter(row["source"] for row in first)


def test_streams_keep_duplicates_unless_told(tmp_path):
    path = tsv(tmp_path / "sw-en.tsv", [*PAIRS, *PAIRS])
    assert pairs_of(load_corpus(path, streaming=True)) == [*PAIRS, *PAIRS]
    assert pairs_of(load_corpus(path, streaming=True, cleaning=Cleaning(duplicates=True))) == PAIRS


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("names", [("a.sw-en", "b.sw-en"), ("a.sw-en", "b")])
def test_limits_and_duplicates_do_not_depend_on_files_and_workers(tmp_path, names, workers):
    rows = [("\t".join(pair) + "\tsw\ten\n") for pair in PAIRS]
    for name in names:
        write(tmp_path / f"{name}.tsv", "source\ttarget\tsource_lang\ttarget_lang\n" + "".join(rows))
    files = [tmp_path / f"{name}.tsv" for name in names]
    for chosen in ({"limit": 2}, {"cleaning": Cleaning(duplicates=True)}):
        stream = load_corpus(files, streaming=True, **chosen).dataset
        read = [row["source"] for row in DataLoader(stream, batch_size=None, num_workers=workers)]
        assert read == [source for source, _ in PAIRS][: len(read)]
        assert len(read) == (2 if "limit" in chosen else 3)


def test_the_limit_of_a_stream_counts_languages_of_columns_in_other_files(tmp_path):
    rows = [f"neno {i}\tword {i}\t{language}\n" for i in range(3) for language in ("sw", "te")]
    write(tmp_path / "sw-en.tsv", "source\ttarget\tsource_lang\n" + "".join(rows))
    write(tmp_path / "te-en.tsv", "padam\ta word\n")
    stream = load_corpus(tmp_path, limit=2, streaming=True).dataset
    assert Counter(row["source_lang"] for row in stream) == {"sw": 2, "te": 2}
    with pytest.raises(CorpusError, match=r"sw-en\.tsv has rows in other languages"):
        load_corpus(tmp_path, limit=2, temperature=0.5, streaming=True)


@pytest.mark.parametrize("kind", ["parquet", "hub"])
def test_a_stream_has_the_columns_that_only_later_rows_fill(tmp_path, monkeypatch, kind):
    columns = {"source": ["paka"] * 300, "target": ["cat"] * 300, "Alignment": [None] * 150 + ["0-0"] * 150}
    columns["negative"] = [None] * 150 + ["dog"] * 150
    table, name = pa.table(columns), tmp_path / "sw-en.parquet"
    if kind == "hub":
        name = "hf:acme/sw-en"
        monkeypatch.setattr(loading, "pin_revision", lambda *name: None)
        monkeypatch.setattr(files, "stream_rows", lambda *name: table.to_pylist())
    else:
        pq.write_table(table, name)
    whole, stream = (load_corpus(name, cleaning=None, streaming=streaming).dataset for streaming in (False, True))
    assert stream.features == whole.features
    assert list(stream) == list(whole)


def test_a_stream_allows_as_many_unreadable_lines_as_asked(tmp_path):
    path = tsv(tmp_path / "sw-en.tsv", [*[("paka", "")] * 1500, *PAIRS])
    for streaming in (False, True):
        assert pairs_of(load_corpus(path, max_bad_rate=1, streaming=streaming)) == PAIRS


@pytest.mark.parametrize("streaming", [False, True])
def test_sentence_transformers_trains_on_it(tmp_path, tiny_encoder, two_languages, streaming):
    dataset = load_corpus(two_languages, streaming=streaming).dataset.select_columns(["source", "target"])
    assert dataset.column_names == ["source", "target"]
    arguments = SentenceTransformerTrainingArguments(
        str(tmp_path / "out"), max_steps=2, per_device_train_batch_size=4, report_to="none", use_cpu=True,
        save_strategy="no",
    )  # fmt: skip
    loss = MultipleNegativesRankingLoss(tiny_encoder)
    SentenceTransformerTrainer(tiny_encoder, arguments, train_dataset=dataset, loss=loss).train()


@pytest.mark.long
def test_the_demo_bitext():
    corpus = load_corpus(DEMO)
    assert corpus.report.languages == dict.fromkeys(["et", "fi", "ml", "sw", "te", "th", "tl", "vi"], 3000)
    assert not corpus.report.dropped
    for split in ("dev", "test"):
        for path in DEMO.glob(f"*.{split}.tsv.gz"):
            assert len(read_parallel(path)) > 80
    assert (
        overlap(load_corpus(DEMO, languages=["sw"]).dataset, load_corpus(DEMO, languages=["sw"], split="dev").dataset)
        == 0
    )


def test_a_mixture_draws_its_rows_by_the_seed_and_mixes_them():
    languages = ["sw"] * 40 + ["te"] * 4
    mixtures = [mix(languages, 0, seed) for seed in (1, 1, 2)]
    chosen = [{row for row in mixture if row < 40} for mixture in mixtures]
    assert mixtures[0] == mixtures[1]
    assert chosen[0] != chosen[2]  # 22 of the 40
    for mixture in mixtures:
        order = [languages[row] for row in mixture]
        assert order not in (sorted(order), sorted(order, reverse=True))


def test_a_limited_stream_mixes_by_the_pairs_that_it_keeps(two_languages):
    """Of 800 and 100 pairs, a limit of 100 leaves as many of either."""
    rows = [row["source_lang"] for row in load_corpus(two_languages, streaming=True, limit=100).dataset]
    assert Counter(rows) == {"sw": 100, "te": 100}
    assert 30 <= rows[:100].count("te") <= 70
