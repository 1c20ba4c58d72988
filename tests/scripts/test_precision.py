from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_settings_are_compared_over_the_same_seeds(script):
    rows = [
        {
            "setting": setting,
            "seed": seed,
            "steps": 100,
            "scores": dict.fromkeys(script.COLUMNS, 80.0 + seed + gain),
            "hardware": {"machine": "x86_64", "cpus": 2, "threads": 2},
        }
        for setting, gain in (("float32", 0.0), ("bfloat16", 0.5))
        for seed in (2, 1, 3)
    ]
    *_, first, second, compared = script.table(rows).splitlines()
    assert first.startswith("| float32 | 82.0 | ")
    assert second.startswith("| bfloat16 | 82.5 | ")
    assert compared.startswith("| bfloat16 − float32 | +0.5 ± 0.0 | ")


def test_a_comparison_needs_two_seeds(script, capsys):
    with pytest.raises(SystemExit):
        script.main(["--stsb", "x", "--mlqa", "y", "--seeds", "1"])
    assert "at least two seeds" in capsys.readouterr().err
