"""Hub data sets, over HTTP from a small Hub: read at their commit, and never from a folder of the same name."""

import json

import datasets
import pytest
from huggingface_hub import HfApi, constants

from metaphrase.cli import main
from metaphrase.corpus import load_corpus
from metaphrase.corpus.monolingual import load_monolingual
from metaphrase.exceptions import CorpusError
from tests.corpus.samples import PAIRS, pairs_of
from tests.hub_server import reach, serve_hub

HERE = [("ya hapa", "from this machine")]


def write_rows(folder, pairs):
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"source": s, "target": t, "source_lang": "sw", "alignment": "0-0", "text": s} for s, t in pairs]
    (folder / "sw-en.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


@pytest.fixture
def push(monkeypatch, tmp_path):
    """Push pairs to ``acme/corpus`` of a Hub that this process reaches, from a folder that has ``acme/corpus`` too."""
    with serve_hub() as hub:
        reach(hub, monkeypatch.setattr, tmp_path / "client")
        monkeypatch.setenv("HF_TOKEN", "hf_write")
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        monkeypatch.chdir(write_rows(tmp_path / "here" / "acme" / "corpus", HERE).parents[1])
        api = HfApi(endpoint=hub.url)
        api.create_repo("acme/corpus", repo_type="dataset")

        def push(pairs):
            folder = write_rows(tmp_path / "pushed", pairs)
            return api.upload_folder(folder_path=folder, repo_id="acme/corpus", repo_type="dataset").oid

        yield push


def offline(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.mark.long
@pytest.mark.parametrize("streaming", [False, True], ids=["map", "stream"])
def test_the_hub_is_read_where_a_folder_has_the_same_name(push, streaming, fault):
    first, second = push(PAIRS[:1]), push(PAIRS)
    survived = 0
    for name, commit, pairs in (("", second, PAIRS), (f"#{first}", first, PAIRS[:1])):
        corpus = load_corpus(f"hf:acme/corpus{name}", streaming=streaming)
        assert corpus.dataset.column_names == ["source", "target", "source_lang", "target_lang", "alignment"]
        survived += pairs_of(corpus) == pairs and corpus.files[0]["revision"] == commit
    assert load_monolingual("hf:acme/corpus") == ["\n".join(s for s, _ in PAIRS[:2]), PAIRS[2][0]]
    assert pairs_of(load_corpus("acme/corpus")) == HERE
    fault("H4", "a local folder with the name of a Hub data set", tried=2, survived=survived)


def test_the_command_reads_the_hub(push, capsys):
    push([PAIRS[0]] * 5)
    assert main(["diagnose", "--corpus", "hf:acme/corpus", "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["pairs"] == {"sw": 5}
    assert main(["diagnose", "--corpus", "hf:acme/missing"]) == 2
    assert "acme/missing" in capsys.readouterr().err


def test_offline_the_cache_is_read_at_its_commit_only(push, monkeypatch, fault):
    first = push(PAIRS[:1])
    datasets.load_dataset("hf://datasets/acme/corpus")
    second = push(PAIRS)
    offline(monkeypatch)
    for name in ("hf:acme/corpus", f"hf:acme/corpus#{first}"):
        corpus = load_corpus(name)
        assert (pairs_of(corpus), corpus.files[0]["revision"]) == (PAIRS[:1], first)
    for revision in (second, "main"):
        with pytest.raises(CorpusError, match=rf"the cache has commit {first} of acme/corpus, not {revision}"):
            load_corpus(f"hf:acme/corpus#{revision}")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", "nothing")
    with pytest.raises(ConnectionError, match="acme/corpus"):
        load_corpus("hf:acme/corpus")
    fault("H4", "another commit than the cached one, offline", tried=2, survived=2)


@pytest.mark.parametrize("name", ["hf:", "hf:corpus", "hf:./acme", "hf:/tmp/acme", "hf:acme/corpus/sw", "hf:../acme"])
def test_names_that_are_not_of_the_hub_are_refused(push, name):
    with pytest.raises(CorpusError, match="is not the name of a Hub data set"):
        load_corpus(name)


@pytest.mark.parametrize(("name", "message"), [(":telugu", "'telugu' not found"), ("@test", "Bad split: test")])
def test_unknown_configurations_and_splits(push, name, message):
    push(PAIRS)
    with pytest.raises(CorpusError, match=rf"hf:acme/corpus{name}: .*{message}"):
        load_corpus(f"hf:acme/corpus{name}")
