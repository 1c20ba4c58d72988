"""Parallel files in every format, for tests of the corpus."""

import gzip
import json
from importlib.resources import files
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

DEMO = Path(str(files("metaphrase"))) / "data" / "demo"
PAIRS = [
    ("Habari ya asubuhi", "Good morning"),
    ("Asante sana", "Thank you very much"),
    ("Paka anakunywa maziwa", "The cat drinks milk"),
]


def write(path: Path, content: str | bytes) -> Path:
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def tsv(path: Path, pairs=PAIRS, header: str | None = "source\ttarget") -> Path:
    lines = [*([header] if header else []), *("\t".join(pair) for pair in pairs)]
    return write(path, "\n".join(lines) + "\n")


def many(n: int, word: str = "neno") -> list[tuple[str, str]]:
    return [(f"{word} {i} hapa", f"word {i} of {word}") for i in range(n)]


def pairs_of(corpus) -> list[tuple[str, str]]:
    return [(row["source"], row["target"]) for row in corpus.dataset]


def languages_of(corpus) -> set[tuple[str, str]]:
    return {(row["source_lang"], row["target_lang"]) for row in corpus.dataset}


def dropped(corpus) -> dict[str, int]:
    return dict(corpus.report.dropped)


def make_tsv(folder):
    return tsv(folder / "sw-en.tsv")


def make_tsv_gz(folder):
    return tsv(folder / "sw-en.train.tsv.gz")


def make_headerless(folder):
    return tsv(folder / "sw-en.tsv", header=None)


def make_named_by_languages(folder):
    return tsv(folder / "news.tsv", [pair[::-1] for pair in PAIRS], header="en\tsw")


def make_dap_header(folder):
    return tsv(folder / "sw-en.tsv", header="source\ten")


def make_language_columns(folder):
    return tsv(
        folder / "all.tsv",
        [("x", *pair, "sw", "en") for pair in PAIRS],
        "id\tsource\ttarget\tsource_lang\ttarget_lang",
    )


def make_reversed_name(folder):
    return tsv(folder / "en-sw.tsv", [pair[::-1] for pair in PAIRS])


def make_reversed_columns(folder):
    rows = [(target, source, "en", "sw") for source, target in PAIRS]
    return tsv(folder / "all.tsv", rows, "source\ttarget\tsource_lang\ttarget_lang")


def make_jsonl(folder):
    return write(folder / "x.sw-en.jsonl", "".join(json.dumps({"source": s, "target": t}) + "\n" for s, t in PAIRS))


def make_jsonl_translation(folder):
    rows = [{"translation": {"en": t, "sw": s}} for s, t in PAIRS]
    return write(folder / "opus.jsonl.gz", "".join(json.dumps(row) + "\n" for row in rows))


def make_jsonl_english(folder):
    rows = [{"english": t, "non_english": s} for s, t in PAIRS]
    return write(folder / "en-sw.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def make_parquet(folder):
    path = folder / "sw-en.train.parquet"
    pq.write_table(pa.table({"source": [s for s, _ in PAIRS], "target": [t for _, t in PAIRS], "n": [1, 2, 3]}), path)
    return path


def tmx(pairs=PAIRS, encoding="utf-8") -> bytes:
    units = "".join(
        f'<tu><tuv xml:lang="en-US"><seg>{t}</seg></tuv><tuv xml:lang="SW"><seg>{s}</seg></tuv></tu>\n'
        for s, t in pairs
    )
    head = f'<?xml version="1.0" encoding="{encoding}"?>\n<tmx version="1.4"><header/><body>\n'
    return f"{head}{units}</body></tmx>".encode(encoding)


def make_tmx(folder):
    return write(folder / "en-sw.tmx", tmx())


def make_tmx_gz_utf16(folder):
    return write(folder / "memory.tmx.gz", tmx(encoding="utf-16"))


def moses(folder, name="europarl.sw-en", suffix="", pairs=PAIRS):
    write(folder / f"{name}.sw{suffix}", "".join(f"{s}\n" for s, _ in pairs))
    write(folder / f"{name}.en{suffix}", "".join(f"{t}\n" for _, t in pairs))
    return folder / name


def make_moses_prefix(folder):
    return moses(folder, suffix=".gz")


def make_moses_comma(folder):
    prefix = moses(folder, "train")
    return f"{prefix}.en,{prefix}.sw"


def make_moses_braces(folder):
    return f"{moses(folder, suffix='.gz')}.{{sw,en}}.gz"


def make_folder(folder):
    make_tsv_gz(folder)
    tsv(folder / "sw-en.dev.tsv.gz", many(5))
    write(folder / "NOTICE.md", "no bitext")
    write(folder / "report.json", "{}")
    return folder


def make_folder_of_moses(folder):
    return moses(folder, suffix=".gz").parent


FORMATS = [value for name, value in sorted(globals().items()) if name.startswith("make_")]
