import argparse
import contextlib
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import types
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import httpx2
import pytest
import yaml
from rich.text import Text

from metaphrase import __version__, cli
from metaphrase.cli import COMMANDS, main, parse
from metaphrase.cli.options import FLAGS, add_options
from metaphrase.cli.output import emit, notes, progress, session, show_progress
from metaphrase.cli.runs import LEADING
from metaphrase.exceptions import ConfigError, MissingExtraError, MissingFileError
from metaphrase.training.configuration import RunConfig
from metaphrase.training.recipe import Recipe


@dataclass
class Options:
    steps: int = field(default=3, metadata={"help": "Steps."})
    rate: float = 0.1
    names: list[str] = field(default_factory=list)
    flag: bool = False
    text: str | None = None
    kind: Literal["small", "large"] = "small"
    on: bool = True


def test_flags_yaml_and_defaults_share_names_and_have_their_order(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("steps: 7\nrate: 5e-5\nnames: [a, b]\n")
    (options,) = parse("x", [Options], ["--config", str(config), "--steps", "9"], defaults={"steps": 1, "text": "t"})
    assert options == Options(steps=9, rate=5e-5, names=["a", "b"], text="t")
    (options,) = parse("x", [Options], [f"--config={config}"], defaults={"rate": 1e-3})
    assert options == Options(steps=7, rate=5e-5, names=["a", "b"])
    assert str(parse("x", [Options], [], defaults={"rate": 1})[0].rate) == "1.0"


@pytest.mark.parametrize(
    ("command", "name"), [(["evaluate", "starter"], "output"), (["report", "runs/sw"], "output_dir")]
)
def test_the_output_has_a_short_option(command, name, capsys):
    with pytest.raises(SystemExit):
        main([*command, "-o", "x", "--print-config"])
    assert yaml.safe_load(capsys.readouterr().out)[name] == "x"


@pytest.mark.parametrize("flag", ["--max_steps", "--max-steps"])
def test_underscores_and_hyphens_are_the_same(flag):
    assert parse("x", [RunConfig], [flag, "5", "--output_dir", "y"])[0].max_steps == 5


def test_an_unquoted_no_is_norwegian(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("names: [no, sw]\n")
    assert parse("x", [Options], ["--config", str(config)])[0].names == ["no", "sw"]
    for word in ("yes", "on", "true"):
        config.write_text(f"text: no\nflag: {word}\n")
        (options,) = parse("x", [Options], ["--config", str(config)])
        assert (options.text, options.flag) == ("no", True)


def test_a_quoted_word_turns_an_option_off_and_an_empty_item_is_an_error(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("'on': 'no'\n")
    assert not parse("x", [Options], ["--config", str(config)])[0].on
    config.write_text("names:\n  - a\n  -\n")
    with pytest.raises(ConfigError, match="'names' must be a list, each text"):
        parse("x", [Options], ["--config", str(config)])


def test_a_config_that_is_no_file_is_an_error(tmp_path):
    with pytest.raises(MissingFileError, match=r"^\. is not a file\."):
        parse("x", [Options], ["--config", ""])
    with pytest.raises(MissingFileError, match=r"none\.yaml does not exist"):
        parse("x", [Options], ["--config", str(tmp_path / "none.yaml")])
    with pytest.raises(MissingFileError, match=r"\S+ is not a file\."):
        parse("x", [Options], ["--config", str(tmp_path)])


@pytest.mark.parametrize("flags", [["--quiet"], ["--json"]])
def test_the_config_is_printed_whatever_the_output(flags, capsys):
    with pytest.raises(SystemExit):
        main(["recipes", "dap", "--print-config", *flags])
    assert capsys.readouterr().out == "show: dap\n"


def test_the_home_folder_may_be_abbreviated(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = tmp_path / "c.yaml"
    config.write_text("names: [~/a.tsv, b~/c]\ntext: ~/é x\n")
    (options,) = parse("x", [Options], ["--config", "~/c.yaml"])
    assert (options.names, options.text) == ([f"{tmp_path}/a.tsv", "b~/c"], f"{tmp_path}/é x")
    assert RunConfig(output_dir="~/run").output_dir == f"{tmp_path}/run"


@pytest.mark.parametrize("home", [r"C:\Users\me", "~"])
def test_a_home_folder_with_backslashes_and_an_unknown_one_are_no_bug(tmp_path, monkeypatch, home):
    monkeypatch.setattr(os.path, "expanduser", lambda path: path.replace("~", home))
    config = tmp_path / "c.yaml"
    config.write_text("text: ~/x\n")
    (options,) = parse("x", [Options], ["--config", str(config), "--names", "a", "~b"])
    assert (options.text, options.names) == (f"{home}/x", ["a", "~b"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["push", "--repo", "a/b", "runs/sw"],
            "Positional arguments come first: metaphrase push PATH [OPTIONS].",
        ),
        (
            ["align", "-o", "x.tsv", "a.tsv"],
            "Positional arguments come first: metaphrase align FILES [OPTIONS].",
        ),
        (["pull", "starter"], "Positional arguments come first: metaphrase pull MODEL OUTPUT_DIR [OPTIONS]."),
        (["train", "a.tsv"], "unrecognized arguments: a.tsv. See"),
    ],
)
def test_arguments_in_the_wrong_order_are_explained(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["pull", "starter", "a", "--output_dir", "b"],
            "--output_dir is given twice. Pass it once, with the option or without.",
        ),
        (["pull", "starter", "a", "-ob"], "--output_dir is given twice"),
        (["export", "a", "-o", "out", "--model=b"], "--model is given twice"),
        (["evaluate", "a", "b", "--also", "c"], "--also is given twice. Pass all values after one --also"),
    ],
)
def test_an_argument_that_is_given_twice_is_refused(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("word", ["012", "1e3", "1_000", "2026-01-31", "12:30"])
def test_text_that_looks_like_a_number_is_kept(tmp_path, word):
    config = tmp_path / "c.yaml"
    config.write_text(f"text: {word}\n")
    assert parse("x", [Options], ["--config", str(config)])[0].text == word
    for names in (word, f"[{word}, a]"):
        config.write_text(f"names: {names}\n")
        assert parse("x", [Options], ["--config", str(config)])[0].names[0] == word


def test_a_word_stands_for_a_list_of_one(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("names: sw\n")
    assert parse("x", [Options], ["--config", str(config)])[0].names == ["sw"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stpes", "3"], "Unknown option --stpes .did you mean 'steps'"),
        (["--steps", "many"], "invalid int value: 'many'"),
        (["--steps"], "expected one argument"),
        (["--config"], "argument --config: expected one argument"),
        (["--config=a.yaml", "--config", "b.yaml"], "--config is given 2 times: a.yaml, b.yaml"),
        (["--names", "a", "--names=b"], "--names is given twice. Pass all values after one --names"),
        (["--kind", "lagre"], "invalid choice: 'lagre' .did you mean 'large'"),
        (["--flag", "perhaps"], "expected true or false, got 'perhaps'"),
    ],
)
def test_wrong_flags_say_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse("x", [Options], arguments)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("stpes: 3", "unknown option 'stpes' .did you mean 'steps'"),
        ("[", "not valid YAML"),
        ("- 1", "keys and values"),
        ("rate: 1\nstpes: 3", r"c.yaml:2:1: unknown option"),
        ("steps: [1, 2]", r"c.yaml:1:1: 'steps' must be a whole number, but is \['1', '2'\]"),
        ("steps: {a: 1}", "must be a whole number"),
        ("steps: true", "must be a whole number"),
        ("steps: many", "c.yaml:1:1: 'steps' must be a whole number, but is 'many'"),
        ("flag: perhaps", "c.yaml:1:1: 'flag' must be true or false, but is 'perhaps'"),
        ("kind: smal", r"must be one of small, large, but is 'smal' .did you mean 'small'"),
        ("!!python/name:os.system x: 1", "not valid YAML"),
    ],
)
def test_wrong_files_say_what_is_wrong(tmp_path, content, message):
    config = tmp_path / "c.yaml"
    config.write_text(content)
    with pytest.raises(ValueError, match=message):
        parse("x", [Options], ["--config", str(config)])


def test_errors_are_one_line_and_status_two(capsys):
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == (
        "metaphrase trian: Unknown command 'trian' (did you mean 'train'?). See `metaphrase --help`.\n"
    )
    assert main(["train", "--recipe", "nope", "--output_dir", "x"]) == 2
    assert "known recipes are amber" in capsys.readouterr().err
    assert main(["train", "--pooling", "men", "--output_dir", "x"]) == 2
    assert "--pooling: invalid choice: 'men' (did you mean 'mean'?)" in capsys.readouterr().err
    assert main(["train", "--output_dir", "x"]) == 2
    assert "pass --corpus" in capsys.readouterr().err


def test_help_lists_every_command(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)


HEAVY = ("torch", "transformers", "sentence_transformers", "datasets", "numpy", "huggingface_hub")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["recipes"], ["recipes", "dap"], ["recipes", "--json"], ["trian"]]
)
def test_what_needs_no_library_imports_none(arguments):
    code = (
        "import sys; from metaphrase.cli import main; main(sys.argv[2:]); "
        "print(*(set(sys.argv[1].split()) & set(sys.modules)), file=sys.stderr)"
    )
    command = [sys.executable, "-X", "importtime", "-c", code, " ".join(HEAVY), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1].strip() == ""


@pytest.mark.long
def test_languages_of_texts_are_asked_for_before_torch_is_imported():
    arguments = ["mine", "mono.txt", "mono.eu.txt", "-o", "mined.tsv"]
    code = "import sys; from metaphrase.cli import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"
    assert "Cannot infer the language from the file name 'mono.txt': pass --source_lang." in done.stderr


def test_a_command_runs_with_the_matplotlib_backend_of_another_environment():
    command = [sys.executable, "-m", "metaphrase", "report", "--help"]
    environment = os.environ | {"MPLBACKEND": "unknown"}
    assert (
        "usage: metaphrase report" in subprocess.run(command, capture_output=True, text=True, env=environment).stdout
    )


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, "1000 64"),
        ({"OMP_WAIT_POLICY": "active"}, "None 64"),
        ({"GOMP_SPINCOUNT": "5", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "7"}, "5 7"),
    ],
)
def test_threads_do_not_spin_and_few_kernels_are_kept_unless_the_environment_decides_it(given, wanted):
    names = ("GOMP_SPINCOUNT", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    code = f"import os; from metaphrase.cli import main; main(['recipes']); print(*map(os.environ.get, {names}))"
    unset = {name: value for name, value in os.environ.items() if name not in (*names, "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=unset | given)
    assert done.stdout.splitlines()[-1] == wanted


@pytest.mark.parametrize("arguments", [["--help"], ["recipes", "--json"]])
def test_it_takes_less_than_a_second_of_the_processor(arguments):
    code = "import sys, time; from metaphrase.cli import main; main(sys.argv[1:]); print(time.process_time(), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert float(done.stderr.splitlines()[-1]) < 1


@pytest.mark.parametrize("command", ["train", "demo"])
def test_help_leads_with_the_options_that_people_use(command, capsys):
    shown = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as stop:
            main([command, flag])
        assert stop.value.code == 0
        text = capsys.readouterr().out.split("examples:")[0]
        shown[flag] = re.findall(r"^  --(\w+)", text, re.MULTILINE)
        assert len(text.splitlines()) < 60 or flag == "--help-all"  # examples and exit status follow
    leading = [name for group in LEADING.values() for name in group if name != "seeds" or command == "train"]
    assert shown["--help"][: len(leading)] == leading
    assert len(leading) <= 20
    assert len(shown["--help"]) < 30
    assert "adam_beta1" in shown["--help-all"]
    assert {option.name for option in fields(RunConfig)} <= set(shown["--help-all"])


def test_help_shows_lists_as_they_are_typed_and_names_packaged_data(capsys):
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            main(["demo", flag])
        text = " ".join(capsys.readouterr().out.split())
        assert "packaged: demo, udhr)" in text
        assert "sw et te tl th vi fi ml)" in text
        assert "['" not in text


def test_help_fits_the_terminal_and_explains_opposites(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["push", "--help"])
    options = capsys.readouterr().out.partition("examples:")[0]
    assert max(map(len, options.splitlines())) <= 80
    assert re.search(r"--no_check +Turn --check off\.", options)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    assert "usage: metaphrase" in capsys.readouterr().out


def test_recipes_are_listed_and_printed(capsys):
    assert main(["recipes"]) == 0
    assert "dap-release" in capsys.readouterr().out
    assert main(["recipes", "dap"]) == 0
    assert Recipe.from_dict(yaml.safe_load(capsys.readouterr().out)) == Recipe.load("dap")
    assert main(["recipes", "--json", "dap"]) == 0  # flags stand anywhere
    assert Recipe.from_dict(json.loads(capsys.readouterr().out)) == Recipe.load("dap")
    assert main(["--json", "recipes"]) == 0
    out, err = capsys.readouterr()
    assert "dap-release" in [recipe["name"] for recipe in json.loads(out)]
    assert not err


@pytest.fixture
def command(monkeypatch):
    """A command that does what it is told."""

    def make(run):
        monkeypatch.setitem(COMMANDS, "try", "a test")
        monkeypatch.setitem(sys.modules, "metaphrase.cli.try", types.SimpleNamespace(run=run))

    return make


def talks(argv):
    (options,) = parse("metaphrase try", [Options], argv)
    sys.stdout.write("a library prints\n")
    logging.getLogger("metaphrase.try").warning("a library warns")
    notes().print("on the way")
    emit({"steps": options.steps}, "the result")
    return 1


@pytest.mark.parametrize(
    ("flags", "out", "err"),
    [
        ([], "a library prints\nthe result\n", "on the way\n"),
        (["--json"], '{\n  "steps": 3\n}\n', "a library prints\non the way\nthe result\n"),
        (["--quiet"], "the result\n", ""),
        (["-q", "--json"], '{\n  "steps": 3\n}\n', ""),
    ],
)
def test_the_result_goes_to_stdout_and_the_rest_elsewhere(command, capsys, caplog, flags, out, err):
    command(talks)
    stdout = sys.stdout
    assert main(["try", *flags]) == 1
    assert capsys.readouterr() == (out, err)
    assert bool(caplog.records) == ("a library prints" in out + err)
    assert sys.stdout is stdout
    assert logging.root.manager.disable == logging.NOTSET
    assert not show_progress()


@pytest.mark.parametrize(
    ("seconds", "lines"), [(0.0, ["Reading: 3 …", "Reading: 1 of 3 …"]), (60.0, ["Reading: 3 …"])]
)
def test_a_log_shows_progress_at_intervals(capsys, monkeypatch, seconds, lines):
    monkeypatch.setattr("metaphrase.cli.output.SECONDS_BETWEEN_LINES", seconds)
    with session(), progress(notes()) as begin:
        advance = begin("Reading", 3)
        advance(1)
        advance(2)
    assert capsys.readouterr().err.splitlines() == lines


@pytest.mark.parametrize("kind", [str, Text])
def test_text_is_not_broken_into_lines(command, capsys, monkeypatch, kind):
    monkeypatch.setenv("COLUMNS", "40")
    line = f"Wrote {'/a long name' * 9}.json"
    command(lambda argv: notes().print(kind(line)) or emit({}, kind(line)) or 0)
    assert main(["try"]) == 0
    assert capsys.readouterr() == (f"{line}\n", f"{line}\n")


def test_the_printed_config_is_the_config(tmp_path, capsys):
    arguments = ["--steps", "9", "--names", "no", "sw", "--rate", "5e-5", "--flag", "--kind", "large", "--no_on"]
    with pytest.raises(SystemExit) as stop:
        parse("metaphrase try", [Options], [*arguments, "--print-config"], defaults={"text": "t: 1"})
    assert stop.value.code == 0
    path = tmp_path / "c.yaml"
    path.write_text(capsys.readouterr().out)
    wanted = Options(9, 5e-5, ["no", "sw"], True, "t: 1", "large", False)
    assert parse("metaphrase try", [Options], ["--config", str(path)]) == (wanted,)
    changed = parse("metaphrase try", [Options], ["--config", str(path), "--on", "true", "--steps", "1"])
    assert changed == (replace(wanted, on=True, steps=1),)


@pytest.mark.parametrize("name", ["align", "evaluate", "mine", "filter", "train", "demo", "adapt", "merge"])
def test_commands_print_a_config_that_they_take(name, tmp_path, capsys):
    given = {
        "align": ["x.tsv", "-o", "y.tsv"],
        "evaluate": ["starter", "--data", "d"],
        "mine": ["a", "b", "-o", "c.tsv"],
        "train": ["--corpus", "x.tsv"],
        "demo": ["--seed", "3"],
        "adapt": ["--corpus", "x.tsv", "--languages", "sw"],
        "merge": ["a", "b", "-o", "c"],
    }
    with pytest.raises(SystemExit):
        main([name, *given.get(name, ["x.tsv", "-o", "y.tsv"]), "--print-config"])
    printed = capsys.readouterr().out
    (tmp_path / "c.yaml").write_text(printed)
    with pytest.raises(SystemExit):
        main([name, "--config", str(tmp_path / "c.yaml"), "--print-config"])
    assert numbers(yaml.safe_load(capsys.readouterr().out)) == numbers(yaml.safe_load(printed))


def numbers(options):
    """Options with numbers that may be written as text, such as those that may also be "auto"."""
    found = dict(options)
    for name, value in options.items():
        with contextlib.suppress(TypeError, ValueError):
            found[name] = float(value)
    return found


def fails(error):
    def run(argv):
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MissingExtraError("pip install 'metaphrase[align]'"), "pip install 'metaphrase[align]'"),
        (ValueError("a wrong value"), "a wrong value"),
        (ImportError("x is not installed"), "x is not installed"),
        (PermissionError(13, "Permission denied", "x.tsv"), "[Errno 13] Permission denied: 'x.tsv'"),
        (httpx2.ReadTimeout("the read timed out"), "the read timed out"),
        (MemoryError(), "Out of memory. Use smaller batches."),
    ],
)
def test_what_a_user_can_mend_is_one_line(command, capsys, error, message):
    command(fails(error))
    assert main(["try"]) == 2
    assert capsys.readouterr().err == f"metaphrase try: {message}\n"


def test_a_traceback_on_demand(command, capsys, monkeypatch):
    command(fails(ValueError("a wrong value")))
    assert main(["try", "--traceback"]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err
    monkeypatch.setenv("METAPHRASE_DEBUG", "1")
    assert main(["try"]) == 2
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("METAPHRASE_DEBUG", "0")
    assert main(["try"]) == 2
    assert capsys.readouterr().err == "metaphrase try: a wrong value\n"


def test_a_bug_says_that_it_is_one(command, capsys):
    command(fails(KeyError("x")))
    assert main(["try"]) == 70
    error = capsys.readouterr().err
    assert error.startswith(
        f"metaphrase try: this is a bug in metaphrase. Please report it, with all of the following, at {cli.ISSUES}\n"
    )
    assert "torch 2" in error
    assert error.endswith("KeyError: 'x'\n")


def test_an_interrupt_is_130(command, capsys):
    command(fails(KeyboardInterrupt()))
    assert main(["try"]) == 130
    assert capsys.readouterr().err == "Interrupted.\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_a_command(command, capsys, tmp_path, number):
    def run(argv):
        with TemporaryDirectory(dir=tmp_path):
            signal.raise_signal(number)

    command(run)
    before = signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup
    try:
        assert main(["try"]) == 128 + number
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert capsys.readouterr().err == "Terminated.\n"
    assert list(tmp_path.iterdir()) == []


def test_signals_that_the_caller_ignores_have_no_effect(command):
    command(lambda argv: signal.raise_signal(signal.SIGHUP) or 0)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert main(["try"]) == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_process_of_several_ends_immediately(command, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    before = signal.getsignal(signal.SIGTERM)
    command(lambda argv: signal.getsignal(signal.SIGTERM) != before)
    assert main(["try"]) == 0


def metaphrase(*arguments, stdout):
    """Run the command line in a process whose stdout is buffered."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "metaphrase", *arguments]
    return subprocess.run(command, env=environment, stdout=stdout, stderr=subprocess.PIPE, check=False)


@pytest.mark.parametrize(
    "arguments",
    [["recipes", "--json"], ["recipes", "--json", "-q"], ["recipes"], ["recipes", "--help"], ["--version"]],
)
def test_a_reader_that_has_seen_enough_is_no_error(arguments):
    read, write = os.pipe()
    os.close(read)
    done = metaphrase(*arguments, stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_another_broken_pipe_is_an_error(command, capfd):
    command(fails(BrokenPipeError(32, "Broken pipe")))
    assert main(["try"]) == 2
    assert capfd.readouterr().err == "metaphrase try: [Errno 32] Broken pipe\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("arguments", [["recipes"], ["recipes", "--help"], ["--help"]])
def test_a_result_that_cannot_be_written_is_an_error(arguments):
    with Path("/dev/full").open("w") as full:
        done = metaphrase(*arguments, stdout=full)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


@pytest.mark.parametrize(("arguments", "status"), [(["recipes"], 0), (["recipes", "nope"], 2), (["--help"], 0)])
def test_closed_streams_are_no_bug(arguments, status):
    code = "import os, sys; os.closerange(0, 3); os.execv(sys.executable, sys.argv[1:])"
    command = [sys.executable, "-m", "metaphrase", *arguments]
    assert subprocess.run([sys.executable, "-c", code, *command], check=False).returncode == status


@pytest.mark.parametrize("flags", [["--json"], []])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_characters_that_stdout_does_not_have_are_escaped(command, monkeypatch, encoding, flags):
    result = {"file": "\udcffé → 𝛼.tsv"}

    def run(argv):
        parse("metaphrase try", [Options], argv)
        emit(result, result["file"])
        return 0

    command(run)
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    assert main(["try", *flags]) == 0
    assert not flags or json.loads(written.getvalue().decode(encoding)) == result


def test_unknown_options_before_the_command(capsys):
    assert main(["--halp"]) == 2
    assert "Expected a command first, got '--halp' (did you mean '--help'?)" in capsys.readouterr().err
    assert main(["--config", "run.yaml", "train"]) == 2
    assert "Expected a command first, got '--config'." in capsys.readouterr().err
    assert main(["recipes", "--jsno"]) == 2
    assert "Unknown option --jsno (did you mean 'json'?)" in capsys.readouterr().err


def test_module_and_command_are_one():
    done = subprocess.run([sys.executable, "-m", "metaphrase", "nope"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("metaphrase nope: Unknown command")


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_examples_of_its_own_and_says_how_it_ends(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    examples = re.search(r"^examples:\n((?:  .+\n)+)", text, re.MULTILINE)[1].splitlines()
    assert any(f"metaphrase {command}" in example for example in examples)
    assert not [example for example in examples if not re.search(rf"metaphrase {command}\b", example)]
    assert "exit status:\n  0    done" in text
    assert all(f"\n  {status:<3}  " in text for status in (0, 1, 2, 70, 130, 143))
    assert all(flag in text for flag in FLAGS)


def test_hf_runs_it_as_an_extension(tmp_path, monkeypatch, capfd):
    from huggingface_hub.cli import extensions

    program = tmp_path / "hf-metaphrase.py"
    program.write_text(f"#!{sys.executable}\nimport sys\nfrom metaphrase.cli import main\nsys.exit(main())\n")
    program.chmod(0o755)
    monkeypatch.setattr(extensions, "EXTENSIONS_ROOT", tmp_path)
    monkeypatch.setattr(extensions.constants, "HF_HUB_DISABLE_UPDATE_CHECK", True)
    extensions.ExtensionManifest(
        owner="metaphrase",
        repo="hf-metaphrase",
        repo_id="metaphrase/hf-metaphrase",
        short_name="metaphrase",
        executable_path=str(program),
        type="python",
        installed_at=datetime.now(UTC),
    ).save(tmp_path / "hf-metaphrase")
    assert extensions.dispatch_unknown_top_level_extension(["metaphrase", "--version"], {"upload"}) == 0
    assert capfd.readouterr().out.strip() == __version__


def test_options_are_those_of_hf_argument_parser():
    from transformers import HfArgumentParser

    parser = argparse.ArgumentParser()
    add_options(parser, RunConfig)
    theirs = {action.option_strings[0]: action for action in HfArgumentParser(RunConfig)._actions}
    ours = {action.option_strings[0]: action for action in parser._actions}
    assert ours.keys() == theirs.keys()
    assert len(ours) > 100
    for name, action in ours.items():
        for part in ("option_strings", "dest", "nargs", "const", "required"):
            assert getattr(action, part) == getattr(theirs[name], part), (name, part)
        assert list(action.choices or ()) == list(theirs[name].choices or ()), name
        assert action.default in (theirs[name].default, argparse.SUPPRESS), name


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("demo", "Takes the options of `metaphrase train`, except --seeds."),
        ("report", "`metaphrase evaluate RUN --suite answer-retrieval --data FOLDER --output FILE`"),
        ("compare", "Folders that `metaphrase adapt`, `train --test` or `demo` wrote."),
        ("merge", "1 done, but problems were found, or nothing was worth writing"),
    ],
)
def test_help_names_what_is_needed(command, text, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")  # lines are broken at hyphens
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert text in " ".join(capsys.readouterr().out.split())
