import subprocess
import sys
import time
from dataclasses import dataclass, field

import pytest

from metaphrase.cli import COMMANDS, main, parse


@dataclass
class Options:
    steps: int = field(default=3, metadata={"help": "Steps."})
    rate: float = 0.1
    names: list[str] = field(default_factory=list)
    flag: bool = False
    text: str | None = None


def test_flags_yaml_and_defaults_share_names_and_have_their_order(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("steps: 7\nrate: 5e-5\nnames: [a, b]\n")
    (options,) = parse("x", [Options], ["--config", str(config), "--steps", "9"], defaults={"steps": 1, "text": "t"})
    assert options == Options(steps=9, rate=5e-5, names=["a", "b"], text="t")
    (options,) = parse("x", [Options], [f"--config={config}"], defaults={"rate": 1e-3})
    assert options == Options(steps=7, rate=5e-5, names=["a", "b"])


@pytest.mark.parametrize("flag", ["--max_steps", "--max-steps"])
def test_underscores_and_hyphens_are_the_same(flag):
    from metaphrase.cli.train import parse_options

    assert parse_options([flag, "5", "--output_dir", "x"])[3].max_steps == 5


def test_an_unquoted_no_is_norwegian(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("names: [no, sw]\n")
    assert parse("x", [Options], ["--config", str(config)])[0].names == ["no", "sw"]


def test_a_recipes_unknown_setting_is_named():
    with pytest.raises(ValueError, match=r"unknown training option 'stpes' .did you mean 'steps'"):
        parse("x", [Options], [], defaults={"stpes": 3})


def test_a_word_stands_for_a_list_of_one(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("names: sw\n")
    assert parse("x", [Options], ["--config", str(config)])[0].names == ["sw"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stpes", "3"], "no option --stpes .did you mean 'steps'"),
        (["--steps", "many"], "invalid int value: 'many'"),
        (["--steps"], "expected one argument"),
        (["--config"], "needs the path"),
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
        "metaphrase trian: There is no command 'trian' (did you mean 'train'?). See `metaphrase --help`.\n"
    )
    assert main(["train", "--recipe", "nope", "--output_dir", "x"]) == 2
    assert "known recipes are amber" in capsys.readouterr().err
    assert main(["train", "--output_dir", "x"]) == 2
    assert "give --corpus" in capsys.readouterr().err


def test_help_lists_every_command(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)


def test_help_is_quick():
    start = time.perf_counter()
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from metaphrase.cli import main; main(['--help']); print('torch' in sys.modules)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.endswith("False\n")
    assert time.perf_counter() - start < 30


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    assert "usage: metaphrase" in capsys.readouterr().out


def test_recipes_are_listed_and_printed(capsys):
    import yaml

    from metaphrase.recipe import Recipe

    assert main(["recipes"]) == 0
    assert "dap-release" in capsys.readouterr().out
    assert main(["recipes", "dap"]) == 0
    assert Recipe.from_dict(yaml.safe_load(capsys.readouterr().out)) == Recipe.load("dap")
