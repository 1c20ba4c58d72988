import gzip
import io
import json
import random
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from metaphrase.aligners import workflow
from metaphrase.aligners.statistical import StatisticalAligner
from metaphrase.aligners.workflow import LINES as LINES_TOGETHER
from metaphrase.cli import main
from metaphrase.corpus import load_corpus
from metaphrase.corpus.phrases import PhraseTable
from metaphrase.corpus.words import Words
from tests.processes import run_python

LINES = ["paka anakunywa\tcat drinks", "paka analala\tcat sleeps", "mbwa analala\tdog sleeps", "mbwa\tdog"] * 5
OLD = ["source", "target", "source_lang", "target_lang"]


@pytest.fixture
def stdin(monkeypatch):
    def give(text):
        raw = text if isinstance(text, bytes) else text.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))

    return give


@pytest.fixture
def filtered(stdin, capfdbinary):
    """Lines in, lines out."""

    def run(lines, *arguments):
        stdin("".join(f"{line}\n" for line in lines))
        assert main(["align", *arguments]) == 0
        return capfdbinary.readouterr().out.decode().splitlines()

    return run


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for language in ("sw", "te"):
        lines = LINES if language == "sw" else LINES[:8]
        with gzip.open(folder / f"{language}-en.train.tsv.gz", "wt") as stream:
            stream.write("source\ttarget\n" + "".join(f"{line}\n" for line in lines))
    return folder


def rows_of(path):
    return load_corpus(path, cleaning=None).dataset.to_list()


def failure(arguments, capsys):
    assert main(["align", *map(str, arguments)]) == 2
    return capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------------- filter


def test_quiet_lines_are_the_same_lines(filtered):
    lines = ["mbwa analala\tdog sleeps", "paka\tcat"]
    assert filtered(lines, "--quiet") == filtered(lines)


def test_a_header_gets_columns(filtered):
    out = filtered(["id\tsource\ttarget", *(f"{i}\t{line}" for i, line in enumerate(LINES))])
    assert out[0] == "id\tsource\ttarget\talignment\talignment_scores"
    assert [line.split("\t")[:3] for line in out[1:]] == [[str(i), *line.split("\t")] for i, line in enumerate(LINES)]
    assert out[1].split("\t")[3] == "0-0 1-1"
    assert all(0 < float(score) <= 1 for score in out[1].split("\t")[4].split())


def test_an_option_states_the_language_of_an_empty_cell(filtered):
    pairs = [f"{line}\t" for line in LINES]
    out = filtered(["source\ttarget\tsource_lang", *pairs, "猫喝水\tcat drinks\t"], "--source_lang", "zh")
    assert out[-1].split("\t")[2::3] == ["", "icu"]


def test_two_columns_get_a_third(filtered):
    out = filtered(LINES, "-")
    assert out == [f"{line}\t{'0-0 1-1' if ' ' in line else '0-0'}" for line in LINES]


def test_the_form_of_fast_align_and_its_output(filtered):
    lines = [line.replace("\t", " ||| ") for line in LINES]
    for stdin in ([], ["-"]):
        assert filtered(lines, "--pharaoh", *stdin)[:4] == ["0-0 1-1", "0-0 1-1", "0-0 1-1", "0-0"]
    assert filtered(lines)[0] == "paka anakunywa\tcat drinks\t0-0 1-1"


def test_every_line_stays_in_its_place(filtered):
    lines = [*LINES, "\tno source", "no target\t", "\t"]
    out = filtered(lines, "--pharaoh")
    assert len(out) == len(lines)
    assert out[-3:] == ["", "", ""]


def test_a_byte_order_mark_is_not_part_of_a_word_or_column(filtered):
    assert filtered(["\ufeffpaka\tcat", *LINES])[0] == "paka\tcat\t0-0"
    assert filtered(["\ufeffsource\ttarget", *LINES])[0] == "source\ttarget\talignment\talignment_scores"


def test_nothing_in_nothing_out(filtered, tmp_path):
    assert filtered([], "--summary", str(tmp_path / "summary.json")) == []
    assert json.loads((tmp_path / "summary.json").read_text())["pairs"] == 0
    assert filtered(["source\ttarget"]) == ["source\ttarget\talignment\talignment_scores"]
    assert filtered(["source\ttarget"], "--pharaoh") == []


def test_links_of_the_input_stay_unless_overwritten(filtered):
    lines = ["source\talignment\ttarget", "paka analala\t1-0\tcat sleeps"]
    lines += [f"{line.split(chr(9))[0]}\t\t{line.split(chr(9))[1]}" for line in LINES]
    out = filtered(lines)
    assert out[0] == "source\talignment\ttarget\talignment_scores"
    assert out[1] == "paka analala\t1-0\tcat sleeps\t"
    assert out[2].startswith("paka anakunywa\t0-0 1-1\tcat drinks\t")
    assert filtered(lines, "--overwrite")[1].split("\t")[1] == "0-0 1-1"


def test_saving_no_aligner_is_a_warning(filtered, tmp_path, caplog):
    filtered(["source\talignment\ttarget", "paka analala\t1-0\tcat sleeps"], "--save", str(tmp_path / "m"))
    assert "No aligner was saved: every pair already has links" in caplog.text


def test_stdout_is_data_and_stderr_the_summary(stdin, capfdbinary, tmp_path):
    stdin("\n".join(LINES))
    assert main(["align", "--summary", str(tmp_path / "r.json")]) == 0
    out, err = capfdbinary.readouterr()
    assert len(out.splitlines()) == len(LINES)
    assert b"pairs per second" in err
    facts = json.loads((tmp_path / "r.json").read_text())
    assert (facts["pairs"], facts["share_source_linked"]) == (20, 1)


def test_unspaced_languages_in_a_filter(filtered):
    lines = ["source\ttarget", *["我喜欢猫\tI like cats", "我喜欢狗\tI like dogs", "狗\tdogs"] * 5]
    out = filtered(lines, "--source_lang", "zh")
    assert out[0].endswith("\talignment\talignment_scores\tsegmenter")
    assert out[1].split("\t")[2] == "0-0 1-1 2-2"
    assert out[1].endswith("\ticu")
    assert filtered(lines, "--source_lang", "zh", "--segmenter", "whitespace")[1].split("\t")[2] in (
        "0-0 0-1 0-2",
        "0-2",
    )


def test_scripts_and_regions_do_not_hide_an_unspaced_language(filtered):
    pairs = ["我喜欢猫\tI like cats", "我喜欢狗\tI like dogs"] * 5
    plain = filtered(pairs, "--source_lang", "zh")
    for code in ("zh-Hant", "zh_CN"):
        assert filtered(pairs, "--source_lang", code) == plain
    rows = [f"{pair}\t{code}" for pair, code in zip(pairs, ["zh", "zh-Hant"] * 5, strict=True)]
    assert [line.split("\t")[3] for line in filtered(["source\ttarget\tsource_lang", *rows])[1:]] == [
        line.split("\t")[2] for line in plain
    ]


def test_saved_aligners_answer_the_same(filtered, tmp_path):
    folder = str(tmp_path / "model")
    first = filtered(LINES, "--save", folder, "--heuristic", "intersection")
    assert StatisticalAligner.load(tmp_path / "model" / "und-en").heuristic == "intersection"
    assert filtered(LINES, "--load", folder) == first


@pytest.mark.slow
def test_answers_come_as_lines_come(filtered, tmp_path):
    folder = str(tmp_path / "model")
    filtered(LINES, "--save", folder, "--heuristic", "intersection")
    code = "import sys; from metaphrase.cli import main; sys.exit(main(['align', '--load', sys.argv[1]]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin
    assert process.stdout
    process.stdin.write("mbwa analala\tdog sleeps\n" * LINES_TOGETHER)
    process.stdin.flush()
    assert process.stdout.readline() == "mbwa analala\tdog sleeps\t0-0 1-1\n"  # while stdin is open
    _, errors = process.communicate()
    assert process.returncode == 0, errors


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_error(tmp_path):
    source = tmp_path / "in.tsv"
    source.write_text("paka analala\tcat sleeps\n" * 20_000)
    code = "import sys; from metaphrase.cli import main; sys.exit(main(['align', '--aligner', 'ibm1']))"
    command = f"'{sys.executable}' -c \"{code}\" < '{source}' | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("paka analala\tcat sleeps\t")
    assert done.returncode == 0, done.stderr
    assert "Broken" not in done.stderr


def test_a_filter_can_write_to_a_file(filtered, tmp_path):
    path = tmp_path / "out.tsv.gz"
    assert filtered(LINES, "-o", str(path)) == []
    assert gzip.decompress(path.read_bytes()).decode().splitlines()[3] == "mbwa\tdog\t0-0"
    assert [file.name for file in tmp_path.iterdir()] == ["out.tsv.gz"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\tb\tc\n", "stdin:1: expected a line 'source<TAB>target'"),
        ("one sentence\n", "stdin:1: expected a line"),
        ("sw\ten\n", "or a header with the columns 'source' and 'target', found 'sw"),
        ("a\tb\na\n", "stdin:2: expected 2 columns, found 1: 'a'"),
        ("a ||| b\na\n", "stdin:2: expected 2 columns, found 1"),
        ("source\ttarget\tsource\n", "duplicate column"),
        (b"a\tb\n\xff\tb\n", "stdin:2: this is not UTF-8 .byte 0xff"),
        (
            "source\ttarget\talignment\na b\tx\t1-1\n",
            "The pair 'a b' has unusable links: a link points outside of the 2 and 1",
        ),
        ("source\ttarget\talignment\na b\tx\t1:1\n", "The pair 'a b' has unusable links: An alignment has the form"),
        ("source\ttarget\tsource_lang\na\tb\t../../x\n", "'../../x' is not the code of a language"),
    ],
)
def test_lines_that_are_wrong_are_named(stdin, capsys, content, message):
    stdin(content)
    assert re.search(message, failure([], capsys))


# -------------------------------------------------------------------------------------------------------------- corpus


@pytest.mark.parametrize("suffix", [".tsv", ".tsv.gz", ".jsonl", ".jsonl.gz", ".parquet"])
def test_a_folder_becomes_a_file(corpus, tmp_path, suffix, capsys):
    output = tmp_path / "out" / f"all{suffix}"
    arguments = ["align", str(corpus), "-o", str(output), "--summary", str(tmp_path / "r.json")]
    assert main([*arguments, "--phrase_table", str(tmp_path / "p.tsv.gz"), "--save", str(tmp_path / "models")]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "sw-en" in err
    rows = rows_of(output)
    assert list(rows[0]) == [*OLD, "alignment", "alignment_scores"]
    assert [(row["source_lang"], row["source"]) for row in rows] == [
        (code, line.split("\t")[0]) for code, lines in (("sw", LINES), ("te", LINES[:8])) for line in lines
    ]
    assert rows[0]["alignment"] == "0-0 1-1"
    assert len(rows[0]["alignment_scores"].split()) == 2
    facts = json.loads((tmp_path / "r.json").read_text())
    assert (facts["pairs"], facts["languages"]["te-en"]["pairs"]) == (28, 8)
    assert facts["pairs_per_second"] > 0
    assert len(PhraseTable.load(tmp_path / "p.tsv.gz")) == facts["phrases"]
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["_metaphrase", "sw-en", "te-en"]
    assert [path.name for path in output.parent.iterdir()] == [output.name]


def test_the_corpus_step_is_what_the_aligner_says(corpus, tmp_path):
    output = tmp_path / "x.jsonl"
    arguments = ["align", "--files", str(corpus), "--languages", "sw", "-o", str(output)]
    assert main([*arguments, "--aligner", "hmm", "--heuristic", "union", "--iterations", "2"]) == 0
    pairs = [(Words.of(s, "sw"), Words.of(t, "en")) for s, t in (line.split("\t") for line in LINES)]
    own = StatisticalAligner("hmm", heuristic="union", iterations=2).train(pairs).align(pairs)
    assert [row["alignment"] for row in rows_of(output)] == [found.pharaoh for found in own]


def test_links_of_a_corpus_stay_unless_overwritten(tmp_path, capsys):
    path = tmp_path / "sw-en.tsv"
    path.write_text("source\ttarget\talignment\n" + "".join(f"{line}\t0-0\n" for line in LINES))
    assert main(["align", str(path), "-o", str(tmp_path / "a.tsv")]) == 0
    assert re.search(r"already.*\n.*pairs +linked(?s:.*)sw-en +20 +20 ", capsys.readouterr().err)
    assert {row["alignment"] for row in rows_of(tmp_path / "a.tsv")} == {"0-0"}
    assert main(["align", str(path), "-o", str(tmp_path / "a.tsv"), "--overwrite"]) == 0
    assert rows_of(tmp_path / "a.tsv")[0]["alignment"] == "0-0 1-1"


def test_back_translations_come_through(tmp_path):
    path = tmp_path / "sw-en.jsonl"
    rows = [
        {"source": s, "target": t, "target_bt": f"{t} ||| so {t}"} for s, t in (line.split("\t") for line in LINES)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["align", str(path), "-o", str(tmp_path / "a.tsv.gz")]) == 0
    assert rows_of(tmp_path / "a.tsv.gz")[3]["target_bt"] == "dog ||| so dog"


def test_saved_aligners_align_another_corpus(corpus, tmp_path):
    assert main(["align", str(corpus), "-o", str(tmp_path / "a.tsv"), "--save", str(tmp_path / "m")]) == 0
    assert main(["align", str(corpus), "-o", str(tmp_path / "b.tsv"), "--load", str(tmp_path / "m")]) == 0
    assert (tmp_path / "a.tsv").read_text() == (tmp_path / "b.tsv").read_text()


def test_a_saved_aligner_replaces_one_of_python_in_its_folder(corpus, tmp_path):
    aligner = StatisticalAligner("ibm1")
    aligner.train([(Words.of("x y"), Words.of("p q"))] * 3)
    aligner.save(tmp_path / "m")
    assert main(["align", str(corpus), "-o", str(tmp_path / "a.tsv"), "--save", str(tmp_path / "m")]) == 0
    assert main(["align", str(corpus), "-o", str(tmp_path / "b.tsv"), "--load", str(tmp_path / "m")]) == 0
    assert (tmp_path / "a.tsv").read_text() == (tmp_path / "b.tsv").read_text()


def test_the_embedding_aligner_from_the_command_line(corpus, tmp_path, tiny_encoder_dir):
    arguments = ["align", str(corpus), "-o", str(tmp_path / "a.tsv"), "--aligner", "embedding"]
    assert main([*arguments, "--model", str(tiny_encoder_dir), "--method", "argmax", "--layer", "1"]) == 0
    assert all(row["alignment"] for row in rows_of(tmp_path / "a.tsv"))


def test_dropped_lines_are_reported(tmp_path, capsys):
    path = tmp_path / "sw-en.tsv"
    path.write_text("source\ttarget\n" + "\n".join([*LINES, "paka\t"]) + "\n")
    assert main(["align", str(path), "-o", str(tmp_path / "a.tsv")]) == 0
    assert "empty side 1" in capsys.readouterr().err
    assert len(rows_of(tmp_path / "a.tsv")) == len(LINES)


SLOW = """
import sys, time
from metaphrase.aligners import workflow
from metaphrase.aligners.statistical import StatisticalAligner
from metaphrase.cli import main

add, own = workflow.add_alignment, StatisticalAligner.align

def linger(self, pairs):
    print(len(pairs), flush=True)
    time.sleep(float(sys.argv[1]))
    return own(self, pairs)

workflow.add_alignment = lambda *arguments, **options: add(*arguments, chunk_size=500, **options)
StatisticalAligner.align = linger
sys.exit(main(["align", *sys.argv[2:]]))
"""


@pytest.mark.slow
def test_killed_half_way_it_goes_on(tmp_path):
    rng = random.Random(0)
    path, output, work = tmp_path / "sw-en.tsv", tmp_path / "out.tsv", tmp_path / "out.tsv.partial"
    words = [rng.randrange(30) for _ in range(4000)]
    path.write_text("source\ttarget\n" + "".join(f"s{a} s{b}\tt{a} t{b}\n" for a, b in pairwise(words)))
    command = [str(path), "-o", str(output), "--summary", str(tmp_path / "out.json")]

    process = subprocess.Popen([sys.executable, "-c", SLOW, "0.5", *command], stdout=subprocess.PIPE)
    assert process.stdout
    for _ in range(3):  # two chunks are done when the third begins
        assert process.stdout.readline() == b"500\n"
    process.kill()
    process.communicate()
    assert not output.exists()
    assert 2 <= len(list(work.glob("*.parquet"))) < 8

    def again(*arguments):
        return run_python("-c", SLOW, "0", *command, *arguments)

    other = again("--aligner", "hmm")
    assert other.returncode == 2
    assert (
        "out.tsv.partial holds the work of another command, which differs in: aligner. Run that command again"
        in other.stderr
    )
    same = again()
    assert same.returncode == 0, same.stderr
    assert len(same.stdout.split()) <= 6  # chunks that were left to do
    assert not work.exists()

    assert (
        main(["align", str(path), "-o", str(tmp_path / "whole.tsv"), "--summary", str(tmp_path / "whole.json")]) == 0
    )
    assert output.read_text() == (tmp_path / "whole.tsv").read_text()
    facts, whole = (json.loads((tmp_path / name).read_text()) for name in ("out.json", "whole.json"))
    assert facts["languages"] == whole["languages"]
    assert facts["pairs"] == 3999


def interrupted_after_a_part(*_, folder, **__):
    (Path(folder) / "0.parquet").touch()
    raise KeyboardInterrupt


def test_a_changed_input_is_another_command(corpus, tmp_path, capsys, monkeypatch):
    arguments = [corpus, "-o", tmp_path / "a.tsv"]

    monkeypatch.setattr(workflow, "add_alignment", interrupted_after_a_part)
    assert main(["align", *map(str, arguments)]) == 130
    with gzip.open(corpus / "te-en.train.tsv.gz", "at") as stream:
        stream.write("moja\tone\n")
    assert "which differs in: inputs" in failure(arguments, capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x.tsv"], "Files require -o FILE"),
        (["x.tsv", "-o", "y.csv"], "the format is unknown"),
        (["x.tsv", "-", "-o", "y.tsv"], "cannot be combined"),
        (["x.tsv", "-o", "y.tsv", "--pharaoh"], "--pharaoh requires lines"),
        (["nowhere.tsv", "-o", "y.tsv"], "No such file, folder or Moses pair: nowhere.tsv"),
        (["--aligner", "giza"], "Unknown aligner 'giza'; choose from fast_align"),
        (["--aligner", "span"], "requires --model"),
        (["--aligner", "embedding", "--heuristic", "och"], "--heuristic is not an option of the aligner 'embedding'"),
        (["--layer", "3"], "--layer is not an option of the aligner 'fast_align'"),
        (["--aligner", "embedding", "--save", "m"], "require a statistical aligner"),
        (["--aligner", "embedding", "--temperature", "0.1"], "--temperature requires --method softmax"),
        (["--load", "m", "--save", "n"], "remove --save"),
        (["--load", "m", "--aligner", "hmm"], "--load uses an aligner as trained: remove --aligner."),
        (["x.tsv", "-o", "-"], "-o needs a file, not '-'. Lines of stdin are written to stdout by default."),
        (["--load", "m"], "m holds no statistical aligner"),
        (["--segmenter", "spacy"], "invalid choice: 'spacy'"),
        (["--phrase_table", "p.tsv"], "--phrase_table requires files"),
        (["--languages", "sw"], "--languages requires files. All lines of stdin are aligned; --source_lang states"),
        (["--limit", "2"], "--limit requires files"),
        (["--source_lang", "Swahili"], "'Swahili' is not the code of a language. Swahili is 'sw'."),
        (["-o", "x.parquet"], "Lines of stdin are written as TSV"),
        (["-o", "x.jsonl.gz"], "Lines of stdin are written as TSV"),
        (["--heuristic", "grow"], None),
        (["--heuristic", "big"], "Unknown heuristic 'big'"),
    ],
)
def test_options_that_do_not_go_together(stdin, capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    stdin("a b\tx y\n" * 3)
    if message is None:
        assert main(["align", *arguments]) == 0
    else:
        assert message in failure(arguments, capsys)
        assert not list(tmp_path.iterdir())


def test_a_terminal_is_not_waited_for(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert "Pass the files to align" in failure([], capsys)


def test_a_missing_extra_is_one_line(stdin, capsys, monkeypatch):
    stdin("a\tb\n")
    monkeypatch.setitem(sys.modules, "metaphrase.aligners.statistical", None)
    assert "metaphrase align: import of metaphrase.aligners.statistical halted" in failure([], capsys)


def test_json_goes_to_stdout_where_no_lines_do(corpus, stdin, tmp_path, capsys):
    assert main(["align", str(corpus), "-o", str(tmp_path / "a.tsv"), "--json", "--languages", "sw"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["pairs"] == 20
    assert "Wrote" in err
    stdin("\n".join(LINES))
    assert "stdout is used for the aligned lines" in failure(["--json"], capsys)


def test_saving_replaces_aligners_of_another_kind(corpus, tmp_path):
    command = ["align", str(corpus), "-o", str(tmp_path / "a.tsv"), "--iterations", "1", "--save", str(tmp_path / "m")]
    for aligner in ("ibm4", "ibm1"):
        assert main([*command, "--aligner", aligner]) == 0
    assert main(["align", str(corpus), "-o", str(tmp_path / "b.tsv"), "--load", str(tmp_path / "m")]) == 0
    assert (tmp_path / "a.tsv").read_text() == (tmp_path / "b.tsv").read_text()


def test_another_model_in_the_same_folder_is_another_command(corpus, tmp_path, tiny_encoder_dir, capsys, monkeypatch):
    model = Path(shutil.copytree(tiny_encoder_dir, tmp_path / "model"))
    command = ["align", str(corpus), "-o", str(tmp_path / "a.tsv"), "--aligner", "embedding", "--model", str(model)]

    monkeypatch.setattr(workflow, "add_alignment", interrupted_after_a_part)
    assert main(command) == 130
    (model / "model.safetensors").write_bytes(b"other")
    assert main(command) == 2
    assert "which differs in: model" in " ".join(capsys.readouterr().err.split())


def test_a_wrong_model_does_not_claim_the_output(corpus, tmp_path, tiny_encoder_dir, capsys):
    """Nothing was aligned, so the corrected command starts."""
    command = ["align", str(corpus), "-o", str(tmp_path / "a.tsv"), "--model", str(tiny_encoder_dir), "--aligner"]
    assert main([*command, "span"]) == 2
    assert "qa_outputs" in capsys.readouterr().err
    assert main([*command, "embedding"]) == 0
    assert (tmp_path / "a.tsv").is_file()
    assert not list(tmp_path.glob("*.partial"))
