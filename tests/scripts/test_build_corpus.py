import gzip
import hashlib
import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from metaphrase.corpus import Cleaning, load_corpus
from metaphrase.corpus.readers import read_parallel

SCRIPT = Path(__file__).parents[2] / "scripts" / "build_corpus.py"


def sentences(n: int, name: str, length: int = 12) -> list[tuple[str, str]]:
    return [
        (" ".join(f"{name}{i}s{k}" for k in range(length)), " ".join(f"{name}{i}t{k}" for k in range(length)))
        for i in range(n)
    ]


def moses(folder: Path, pair: str, pairs: list[tuple[str, str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for side, code in enumerate(pair.split("-")):
        (folder / f"{pair}.{code}.gz").write_bytes(gzip.compress("".join(f"{p[side]}\n" for p in pairs).encode()))


EUROPARL = sentences(300, "e")
TANZIL = sentences(60, "z")


@pytest.fixture
def opus(tmp_path) -> Path:
    """Three sources of Swahili, one of them also of Telugu, in all three formats."""
    folder = tmp_path / "opus"
    dirty = [("", "empty"), ("a@b " * 5, "c d e f g"), (TANZIL[0][0], TANZIL[0][0])]
    moses(folder / "europarl", "sw-en", [*EUROPARL, *EUROPARL[:20]])
    (folder / "tanzil").mkdir()
    lines = "".join(f"{s}\t{t}\n" for s, t in [*TANZIL, *EUROPARL[:5], *dirty])
    (folder / "tanzil" / "sw-en.tsv.gz").write_bytes(gzip.compress(f"source\ttarget\n{lines}".encode()))
    (folder / "wikimatrix").mkdir()
    units = "".join(
        f'<tu><tuv xml:lang="te"><seg>{s}</seg></tuv><tuv xml:lang="en"><seg>{t}</seg></tuv></tu>'
        for s, t in sentences(40, "w")
    )
    (folder / "wikimatrix" / "en-te.tmx.gz").write_bytes(gzip.compress(f"<tmx><body>{units}</body></tmx>".encode()))
    return folder


def build(script, opus, output, **options):
    return script.build(script.Options(input_dir=str(opus), output_dir=str(output), **options))


@pytest.fixture
def split_at_spaces(script, monkeypatch):
    class Words:
        tokenize = staticmethod(str.split)

    monkeypatch.setattr(script, "load_tokenizer", lambda name: Words)
    return "words"


def test_dap(script, opus, tmp_path, split_at_spaces):
    report = build(script, opus, tmp_path / "out", tokenizer=split_at_spaces)
    train, dev = (read_parallel(tmp_path / "out" / f"sw-en.{part}.tsv.gz") for part in ("train", "dev"))
    assert Counter(train + dev) == Counter(EUROPARL + TANZIL)
    assert len(dev) == 36
    assert train + dev != EUROPARL + TANZIL
    europarl, tanzil = report["languages"]["sw"]["sources"]
    assert europarl == {
        "source": "europarl", "files": ["sw-en.sw.gz", "sw-en.en.gz"], "read": 320, "kept": 300,
        "dropped": {"duplicate": 20},
    }  # fmt: skip
    assert tanzil["dropped"] == {"empty side": 1, "forbidden string": 1, "identical sides": 1}
    assert (tanzil["read"], tanzil["kept"]) == (68, 65)
    assert report["languages"]["te"]["dev"]["pairs"] == 4
    assert set(read_parallel(tmp_path / "out" / "te-en.train.tsv.gz")) < set(sentences(40, "w"))


def test_daps_caps(script, opus, tmp_path, split_at_spaces):
    report = build(script, opus, tmp_path / "out", tokenizer=split_at_spaces, train_cap=80, dev_cap=7)
    facts = report["languages"]["sw"]
    assert (facts["train"]["pairs"], facts["dev"]["pairs"]) == (80, 7)
    assert [source["kept"] for source in facts["sources"]] == [87, 65]
    assert facts["sources"][0]["dropped"]["not drawn"] + facts["sources"][0]["dropped"].get("duplicate", 0) == 320 - 87
    for source in facts["sources"]:
        assert source["read"] == source["kept"] + sum(source["dropped"].values())
    train, dev = (read_parallel(tmp_path / "out" / f"sw-en.{part}.tsv.gz") for part in ("train", "dev"))
    assert not set(train) & set(dev)
    assert set(train + dev) < set(EUROPARL + TANZIL)
    corpus = load_corpus(tmp_path / "out")
    assert corpus.report.languages == {"sw": 80, "te": 36}


def test_sampling_is_uniform_over_sources(script, opus, tmp_path):
    """The merged pairs are sampled evenly: the small keys of those drawn from a large source give them no edge."""
    shares, places = [], []
    for seed in range(30):
        out = tmp_path / str(seed)
        build(script, opus, out, train_cap=50, dev_cap=0, languages=["sw"], seed=seed)
        drawn = read_parallel(out / "sw-en.train.tsv.gz")
        assert len(drawn) == 50
        shares.append(sum(pair in EUROPARL for pair in drawn) / 50)
        places += [EUROPARL.index(pair) for pair in drawn if pair in EUROPARL]
    # 50 of Europarl's and 50 of the 65 of Tanzil (up to 5 of which are Europarl's) are merged: about half each
    assert 0.45 < sum(shares) / 30 < 0.6
    assert 130 < sum(places) / len(places) < 170


def test_a_sample_is_what_sorting_by_key_gives(script):
    generator = random.Random(0)
    pairs = [(f"s{generator.randrange(500)}", "t") for _ in range(2000)]
    sample = script.Sample(50, 42, "test")
    for pair in pairs:
        if sample.refusal(key := sample.key(pair)) is None:
            sample.add(key, pair)
    assert sample.pairs() == sorted(set(pairs), key=sample.key)[:50]


def test_full_samples_spare_the_tokenizer(script, opus, tmp_path, monkeypatch):
    class Counting:
        calls = 0

        def tokenize(self, text):
            Counting.calls += 1
            return text.split()

    monkeypatch.setattr(script, "load_tokenizer", lambda name: Counting())
    build(script, opus, tmp_path / "out", tokenizer="x", train_cap=10, dev_cap=0, sources=["europarl"])
    assert Counting.calls < 2 * 100  # of 320 pairs; about 10 (1 + ln 30) of them are looked at


def test_ppa(script, opus, tmp_path, split_at_spaces):
    moses(
        opus / "bible", "sw-en", [(" ".join("abcdefghi"), EUROPARL[0][1]), *sentences(3, "b", 70), *sentences(4, "c")]
    )
    options = {"protocol": "ppa", "tokenizer": split_at_spaces, "languages": ["sw"]}
    report = build(script, opus, tmp_path / "out", pairs="0.1k", **options)
    pairs = read_parallel(tmp_path / "out" / "sw-en.train.tsv.gz")
    assert pairs == sentences(4, "c") + EUROPARL[:96]  # sources by name, pairs in order
    assert not (tmp_path / "out" / "sw-en.dev.tsv.gz").exists()
    bible, europarl, tanzil = report["languages"]["sw"]["sources"]
    assert bible["dropped"] == {"too few pieces": 1, "too many pieces": 3}
    assert (europarl["read"], europarl["kept"], tanzil["read"]) == (96, 96, 0)
    build(script, opus, tmp_path / "few", pairs="30", sources=["tanzil", "europarl"], **options)
    assert read_parallel(tmp_path / "few" / "sw-en.train.tsv.gz") == TANZIL[:30]


def test_a_folder_has_a_corpus_of_one_protocol_and_keeps_other_languages(script, opus, tmp_path, split_at_spaces):
    """Dev pairs of another protocol might be among the training pairs."""
    both = build(script, opus, tmp_path / "out", train_cap=100)
    again = build(script, opus, tmp_path / "out", train_cap=100, languages=["sw"])
    assert len(both["languages"]) > 1
    assert again["languages"] == both["languages"]
    with pytest.raises(
        ValueError, match=r"out has a corpus that was built with another value of protocol, tokenizer, pairs\."
    ):
        build(script, opus, tmp_path / "out", protocol="ppa", pairs="50", tokenizer=split_at_spaces)


@pytest.mark.parametrize("protocol", ["dap", "ppa"])
def test_the_same_input_gives_the_same_bytes(script, opus, tmp_path, protocol, split_at_spaces):
    digests = []
    for name in ("one", "two"):
        report = build(script, opus, tmp_path / name, protocol=protocol, tokenizer=split_at_spaces, train_cap=100)
        files = sorted((tmp_path / name).iterdir())
        digests.append({file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files})
        for facts in report["languages"].values():
            for part in {"train", "dev"} & set(facts):
                assert facts[part]["sha256"] == digests[-1][facts[part]["file"]]
        assert json.loads((tmp_path / name / "report.json").read_text()) == report
    assert digests[0] == digests[1]
    assert all(path.read_bytes()[3:8] == bytes(5) for path in files if path.suffix == ".gz")  # no name, no time
    assert len(digests[0]) == {"dap": 6, "ppa": 4}[protocol]


def test_characters_of_a_tsv_in_the_text(script, tmp_path):
    (tmp_path / "in" / "a").mkdir(parents=True)
    record = {"source": "moja\tmbili\ntatu\u2028nne", "target": 'one "two"\r\nthree four'}
    (tmp_path / "in" / "a" / "sw-en.jsonl").write_text(json.dumps(record) + "\n")
    build(script, tmp_path / "in", tmp_path / "out")
    assert read_parallel(tmp_path / "out" / "sw-en.train.tsv.gz") == [
        ("moja mbili tatu\u2028nne", "one two  three four")
    ]


def test_without_a_tokenizer(script, opus, tmp_path, capsys):
    report = build(script, opus, tmp_path / "out")
    assert (
        "Without --tokenizer, DAP's length and copy filters are skipped, because they count pieces."
        in capsys.readouterr().err
    )
    assert report["languages"]["sw"]["train"]["pairs"] == 324
    assert report["tokenizer"] is None
    with pytest.raises(ValueError, match="PPA's filters count pieces: pass --tokenizer"):
        build(script, opus, tmp_path / "out", protocol="ppa")


def test_wrong_options(script, opus, tmp_path, split_at_spaces):
    with pytest.raises(ValueError, match=r"protocol.* must be one of 'dap', 'ppa', but is 'labse'"):
        build(script, opus, tmp_path / "out", protocol="labse")
    with pytest.raises(ValueError, match=r"train_cap.* must be a whole number from 1"):
        build(script, opus, tmp_path / "out", train_cap=-1)
    for pairs in ("all", "inf", "0", "0.5", "-5"):
        with pytest.raises(ValueError, match=f"--pairs expects a number such as 250k or 2M, but is '{pairs}'"):
            build(script, opus, tmp_path / "out", protocol="ppa", pairs=pairs, tokenizer=split_at_spaces)
    with pytest.raises(FileNotFoundError, match=r"no file <source>/xx-en\.\* for th"):
        build(script, opus, tmp_path / "out", languages=["sw", "th"])
    assert script.number("250k") == 250_000
    assert script.number("2M") == 2_000_000
    assert script.number("1000") == 1000


def test_an_unequal_pair_leaves_no_output(script, opus, tmp_path):
    (opus / "europarl" / "sw-en.en.gz").write_bytes(gzip.compress(b"one line\n"))
    with pytest.raises(ValueError, match=r"has 320 and .* has 1"):
        build(script, opus, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("protocol", ["dap", "ppa"])
def test_the_command_line(script, opus, tmp_path, tiny_bert_dir, capsys, protocol):
    arguments = ["--input_dir", str(opus), "--output_dir", str(tmp_path / "out"), "--protocol", protocol]
    tokenizer = tmp_path / "tokenizer"  # without weights
    AutoTokenizer.from_pretrained(tiny_bert_dir).save_pretrained(tokenizer)
    arguments += ["--tokenizer", str(tokenizer), "--languages", "sw"]
    assert script.main(arguments) == 0
    assert capsys.readouterr().out.startswith("sw: ")
    assert json.loads((tmp_path / "out" / "report.json").read_text())["protocol"] == protocol
    assert script.main([*arguments[:-1], "th"]) == 2
    assert capsys.readouterr().err.startswith("build_corpus: ")


def test_a_tokenizer_has_no_code_and_no_links(script, opus, tmp_path, tiny_bert_dir, capsys, fault):
    tokenizer = Path(shutil.copytree(tiny_bert_dir, tmp_path / "tokenizer"))
    arguments = ["--input_dir", str(opus), "--output_dir", str(tmp_path / "out"), "--tokenizer", str(tokenizer)]
    settings = tokenizer / "tokenizer_config.json"
    content = json.loads(settings.read_text())
    settings.write_text(json.dumps(content | {"auto_map": {"AutoTokenizer": ["own.Own", None]}}))
    assert script.main(arguments) == 2
    assert "requires its own code, which is not run" in capsys.readouterr().err
    settings.write_text(json.dumps(content))
    (tokenizer / "tokenizer.json").rename(tmp_path / "elsewhere.json")
    (tokenizer / "tokenizer.json").symlink_to(tmp_path / "elsewhere.json")
    assert script.main(arguments) == 2
    assert "outside the model's folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    fault("J2", "code and links in a tokenizer's folder, in a script", tried=2, survived=2)


def test_presets_are_the_papers():
    assert Cleaning.dap().min_pieces == 4
    assert Cleaning.ppa().max_together == 128
