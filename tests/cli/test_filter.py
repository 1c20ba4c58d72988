import re

from metaphrase.cli import main
from metaphrase.mining import filtering


def test_what_it_takes_is_said_before_the_work(tiny_encoder_dir, bitext, tmp_path, capsys, monkeypatch):
    pairs = [f"{row['source']}\t{row['target']}" for row in bitext]
    (tmp_path / "pairs.tsv").write_text("\n".join(["source\ttarget", *pairs, pairs[0]]) + "\n", encoding="utf-8")
    seen = []
    needs = filtering.estimate_needs

    def counted(sources, targets, *arguments):
        seen.append((sources, targets))
        return needs(sources, targets, *arguments)

    monkeypatch.setattr(filtering, "estimate_needs", counted)
    command = ["filter", str(tmp_path / "pairs.tsv"), "--source_lang", "de", "--model", str(tiny_encoder_dir)]
    assert main([*command, "-o", str(tmp_path / "scored.tsv")]) == 0
    error = capsys.readouterr().err
    assert re.search(r"This requires [\d.]+ MB of disk in .* and [\d.]+ MB of memory", " ".join(error.split()))
    assert error.index("MB of") < error.index("embedding sources")
    assert seen == [tuple(len({row[side] for row in bitext}) for side in ("source", "target"))]  # distinct ones

    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100}))
    assert main([*command, "-o", str(tmp_path / "other.tsv")]) != 0
    assert "Not enough disk space" in capsys.readouterr().err
    assert not list(tmp_path.rglob("other.tsv.partial/**/*.npy"))
