"""Shared fixtures: tiny encoders built in code, and a small bitext."""

from __future__ import annotations

import copy
import csv
import functools
import gc
import gzip
import importlib.metadata
import json
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Container, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# `evaluate` copies modules to a folder and imports them from there, so every process needs a separate folder.
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="modules-")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from hypothesis import HealthCheck, settings
from jinja2 import Environment
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from sentence_transformers.util import environment
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    PreTrainedTokenizerFast,
    XLMRobertaConfig,
    XLMRobertaModel,
)

from metaphrase.io.files import PACKAGED_DATA, UDHR
from metaphrase.training.recipe import Recipe
from tests.faults.children import Child

# Properties are not tests of speed: a machine may be slow. Fixtures that are shared by the examples of a test do not change.
settings.register_profile(
    "metaphrase", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("metaphrase")

BITEXT = Path(__file__).parent / "data" / "bitext.tsv"


def pytest_addoption(parser):
    parser.addoption("--fault-table", help="write the faults tested and survived to this JSONL file")
    parser.addoption("--update-contracts", action="store_true", help="rewrite the expected shapes in tests/contracts")


def pytest_configure(config):
    # Libraries parse the metadata of packages for every trainer, and the template of a card for every checkpoint.
    for owner, name in (
        (environment, "metadata"),
        (importlib.metadata, "metadata"),
        (importlib.metadata, "version"),
        (Environment, "from_string"),
    ):
        setattr(owner, name, functools.cache(getattr(owner, name)))
    os.fsync = lambda handle: None  # no test cuts the power
    table = config.getoption("--fault-table")
    if table and not hasattr(config, "workerinput"):
        Path(table).write_text("")


def pytest_collection_finish(session):
    """Exempt the objects of imported libraries from garbage collection, which would dominate the time of small tests."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config):
    shutil.rmtree(os.environ["HF_MODULES_CACHE"], ignore_errors=True)


@pytest.fixture
def fault(request):
    """Record a row of the fault table: how often a fault was tried and survived. All trials must survive."""

    def record(number: str, what: str, *, tried: int, survived: int) -> None:
        row = {"number": number, "fault": what, "tried": tried, "survived": survived, "test": request.node.nodeid}
        if table := request.config.getoption("--fault-table"):
            with Path(table).open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(row, ensure_ascii=False) + "\n")
        assert tried > 0
        assert survived == tried, row

    return record


@pytest.fixture
def assert_follows_umask():
    """Set a umask, and return a check that a folder and everything in it have its permissions.

    They are neither those of temporary files, 0o600, nor the usual ones, 0o644.
    """

    def check(folder: Path) -> None:
        modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}
        assert len(modes) > 1
        wanted = {path: (0o777 if path.is_dir() else 0o666) & ~0o027 for path in modes}
        assert {path: oct(mode) for path, mode in modes.items() if mode != wanted[path]} == {}

    before = os.umask(0o027)
    yield check
    os.umask(before)


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch):
    # gzip files contain the time at which they were written.
    monkeypatch.setattr(gzip, "time", SimpleNamespace(time=lambda: 0))
    torch.manual_seed(0)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.set_flush_denormal(True)


@pytest.fixture(scope="session")
def bitext() -> list[dict[str, str]]:
    with BITEXT.open(encoding="utf-8", newline="\n") as lines:
        return list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))


def mostly_slow(values: Iterable[Any], fast: Container[Any]) -> list[Any]:
    """Parameters of a test of which `make test` runs a few."""
    return [
        value
        if value in fast
        else pytest.param(*(value if isinstance(value, tuple) else [value]), marks=pytest.mark.slow)
        for value in values
    ]


def with_every_column(bitext: list[dict[str, str]]) -> list[dict[str, object]]:
    """Return the bitext with every column that a recipe reads: links, monolingual text, back-translations, negatives."""
    others = bitext[1:] + bitext[:1]
    return [
        {
            **row,
            "monolingual": [f"{row['target']}\n{other['target']}"] if at % 2 else [],
            "source_bt": f"{other['source']} ||| {row['source']}",
            "target_bt": other["target"],
            "negatives": f"{other['target']} ||| {row['target']}" if at % 3 else "",
        }
        for at, (row, other) in enumerate(zip(bitext, others, strict=True))
    ]


@pytest.fixture(scope="session")
def full_bitext(bitext) -> list[dict[str, object]]:
    return with_every_column(bitext)


def small(recipe: Recipe) -> Recipe:
    """Adapt a recipe to the tiny encoder: the queue holds a few batches instead of thousands, and it is its own teacher."""
    changes: dict[str, dict[str, Any]] = {"moco": {"queue_size": 20}, "anchor": {"teacher": None}}
    terms = [replace(t, args={**t.args, **changes.get(t.objective, {})}) for t in recipe.terms]
    return replace(recipe, terms=tuple(terms))


@pytest.fixture(scope="session")
def bitext_path() -> Path:
    return BITEXT


def wordpiece() -> PreTrainedTokenizerFast:
    """Build a BERT tokenizer with 120 pieces of the bitext: most words are one piece, some are several.

    The vocabulary is hard-coded, because training breaks ties differently in every process.
    """
    pieces = (BITEXT.parent / "wordpiece.txt").read_text(encoding="utf-8").split("\n")[:-1]
    vocabulary = {piece: at for at, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=False, lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    cls, sep = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", sep), ("[CLS]", cls))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=64,
    )


def shape(tokenizer: PreTrainedTokenizerFast, **changes: object) -> dict[str, object]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 80,
        "pad_token_id": tokenizer.pad_token_id,
        **changes,
    }


def as_sentence_transformer(folder: Path, pooling: str = "cls") -> SentenceTransformer:
    transformer = Transformer(str(folder), model_kwargs={"add_pooling_layer": False}, max_seq_length=32)
    modules = [transformer, Pooling(transformer.get_embedding_dimension(), pooling_mode=pooling)]
    return SentenceTransformer(modules=modules, device="cpu")


@pytest.fixture
def small_data(tmp_path, monkeypatch) -> Path:
    """Two hundred pairs of four languages of the packaged data, and a few languages for retention."""
    folder = tmp_path / "packaged"
    (folder / "demo").mkdir(parents=True)
    for language in ("et", "fi", "ml", "sw"):
        lines = gzip.decompress((PACKAGED_DATA / "demo" / f"{language}-en.train.tsv.gz").read_bytes()).split(b"\n")
        (folder / "demo" / f"{language}-en.train.tsv.gz").write_bytes(gzip.compress(b"\n".join([*lines[:201], b""])))
    (folder / "udhr").mkdir()
    for language in ("sw", "fi", "de", "fr"):
        shutil.copy(PACKAGED_DATA / "udhr" / f"{language}-en.tsv.gz", folder / "udhr")
    monkeypatch.setattr("metaphrase.training.adaptation.PACKAGED_DATA", folder)
    lines = gzip.decompress((folder / "demo" / "fi-en.train.tsv.gz").read_bytes()).decode().splitlines()[1:33]
    texts = {str(place): [line.split("\t")[0]] for place, line in enumerate(lines)}
    monkeypatch.setattr("metaphrase.training.finishing.parallel_texts", lambda **_: texts)
    return folder


@pytest.fixture
def few_languages(tmp_path, monkeypatch) -> None:
    """Directions of language identity are estimated on 8 languages, with English, instead of 95."""
    (tmp_path / "udhr").mkdir()
    for language in ("de", "fi", "fr", "hi", "sw", "te", "th"):
        shutil.copy(UDHR / f"{language}-en.tsv.gz", tmp_path / "udhr")
    monkeypatch.setattr("metaphrase.postprocessing.debiasing.UDHR", tmp_path / "udhr")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A new one for each test: a call changes the padding that it saves."""
    return wordpiece()


@pytest.fixture(scope="session")
def tiny_bert_dir(tmp_path_factory) -> Path:
    """A raw BERT without pooling modules and without a masked language modelling head."""
    torch.manual_seed(0)
    folder, tokenizer = tmp_path_factory.mktemp("tiny-bert"), wordpiece()
    BertModel(BertConfig(**shape(tokenizer)), add_pooling_layer=False).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_mlm_dir(tmp_path_factory) -> Path:
    """A raw BERT with a masked language modelling head, like mBERT."""
    torch.manual_seed(0)
    folder, tokenizer = tmp_path_factory.mktemp("tiny-mlm"), wordpiece()
    BertForMaskedLM(BertConfig(**shape(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_encoder_dir(tmp_path_factory, tiny_bert_dir) -> Path:
    """A SentenceTransformer folder with CLS pooling."""
    folder = tmp_path_factory.mktemp("tiny-encoder")
    as_sentence_transformer(tiny_bert_dir).save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="session")
def _encoder(tiny_encoder_dir) -> SentenceTransformer:
    return SentenceTransformer(str(tiny_encoder_dir), device="cpu", model_kwargs={"add_pooling_layer": False})


@pytest.fixture
def tiny_encoder(_encoder) -> SentenceTransformer:
    """A BERT of two layers, hidden size 32, CLS pooling; a copy for each test."""
    return copy.deepcopy(_encoder)


@pytest.fixture
def tiny_xlmr(tmp_path, tokenizer) -> SentenceTransformer:
    """A tiny XLM-R with mean pooling; its positions start after the padding id."""
    torch.manual_seed(0)
    config = XLMRobertaConfig(**shape(tokenizer, type_vocab_size=1, max_position_embeddings=82))
    XLMRobertaModel(config, add_pooling_layer=False).save_pretrained(tmp_path / "xlmr")
    tokenizer.save_pretrained(tmp_path / "xlmr")
    return as_sentence_transformer(tmp_path / "xlmr", "mean")


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.fixture
def ranks_of(tmp_path):
    """The exit statuses of two forked processes that run a function of their rank, with the variables of torchrun."""

    def ranks_of(work, name="rank"):
        port = free_port()

        def joined(rank):
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            for state in (PartialState, AcceleratorState, GradientState):
                state._reset_state()
            work(rank)

        children = [Child(lambda rank=rank: joined(rank), tmp_path / f"{name}-{rank}.log") for rank in (0, 1)]
        return [child.wait(120) for child in children]

    return ranks_of
