import gzip
from pathlib import Path

import pytest

from metaphrase import Recipe
from metaphrase.exceptions import MissingFileError

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_pairs_are_drawn_at_random_once(script, tmp_path):
    (tmp_path / "software").mkdir()
    text = "source\ttarget\n" + "".join(f"mot {at}\tword {at}\n" for at in range(50))
    (tmp_path / "software" / "fr-en.train.tsv.gz").write_bytes(gzip.compress(text.encode()))
    options = script.Options(data=str(tmp_path), languages=["fr"], pairs=10)
    other = script.write_bitext(options, tmp_path / "other", 1) / "fr-en.train.tsv.gz"
    for _ in range(2):
        folder = script.write_bitext(options, tmp_path / "bitext", 0)
        header, *rows = gzip.decompress((folder / "fr-en.train.tsv.gz").read_bytes()).decode().splitlines()
        assert header == "source\ttarget"
        assert len(set(rows)) == 10
        assert set(rows) < set(text.splitlines())
        assert (folder / "fr-en.train.tsv.gz").read_bytes() != other.read_bytes()
        (tmp_path / "software" / "fr-en.train.tsv.gz").unlink(missing_ok=True)  # what is drawn is not drawn again


def test_a_language_may_come_from_another_folder(script, tmp_path):
    for folder, language in (("software", "fr"), ("mine", "ro")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{language}-en.train.tsv.gz").touch()
    folders = [str(tmp_path / "software"), str(tmp_path / "mine")]
    options = script.Options(data=str(tmp_path), languages=["fr", "ro"], bitext=folders)
    assert [path.parent.name for path in script.bitext_files(options)] == ["software", "mine"]
    with pytest.raises(MissingFileError, match=r"ro-en\.train\.tsv\.gz is in none of these folders"):
        script.bitext_files(script.Options(data=str(tmp_path), languages=["fr", "ro"]))


def test_work_on_another_bitext_is_refused(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "rows_of", lambda options, output: [])
    argv = ["--data", str(tmp_path), "--languages", "fr", "--output", str(tmp_path / "out"), "--bitext"]
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "fr-en.train.tsv.gz").write_text(name)
    assert script.main([*argv, str(tmp_path / "one")]) == 0
    assert script.main([*argv, str(tmp_path / "other")]) == 2
    assert "another value of bitext files" in capsys.readouterr().err


def test_an_interrupted_training_resumes(script, tmp_path, monkeypatch):
    configs = []

    class Run:
        def __init__(self, config):
            configs.append(config)

        def execute(self):
            pass

    monkeypatch.setattr(script, "TrainingRun", Run)
    monkeypatch.setattr(script, "write_bitext", lambda *args: tmp_path)
    monkeypatch.setattr(script, "align_files", lambda options: None)
    folder = script.trained(tmp_path / "base", 0, script.Options(data="", output=str(tmp_path / "out")))
    assert [(one.output_dir, one.resume_from_checkpoint) for one in configs] == [(str(folder), "true")]


def test_the_recipe_ranks_the_words_of_a_pair(script):
    (term,) = Recipe.load(script.RECIPE).terms
    assert term.objective == "wtr"


def test_the_table_has_a_column_for_each_gold_set_and_a_row_for_each_encoder(load_script):
    row = {"aer": 6.93, "interval": [6.2, 7.7], "pairs": 358, "settings": {}}
    content = {
        "settings": {"steps": None, "pairs": 4000, "languages": ["fr"], "seed": 42},
        "rounds": [{"steps": 200}, {"steps": 400}],
        "layers": 8,
        "rows": [
            row | {"encoder": encoder, "part": part, "peers": peers}
            for encoder in ("starter", "round 1")
            for part, peers in (("enfr", {"enfr.awesome-align.out": 4.04}), ("en-hi", {}))
        ],
        "hardware": {"machine": "x86_64", "cpus": 2, "threads": 2},
    }
    lines = load_script("update_tables").trained_aligner_table(content).splitlines()
    assert lines[0] == "| encoder | enfr | en-hi |"
    assert lines[2] == "| starter | 6.9 [6.2, 7.7] | 6.9 [6.2, 7.7] |"
    assert lines[4] == "| awesome-align | 4.0 |  |"
    assert "rounds of 200, 400 steps" in lines[-1]
