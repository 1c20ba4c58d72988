"""The scores of the suites equal those of a script that imports nothing of the package."""

import json
from pathlib import Path

import numpy as np
import pytest

from metaphrase.evaluation.distractors import distractors
from metaphrase.evaluation.suites import Settings, Subject
from metaphrase.evaluation.suites.running import find_benchmarks, run_benchmark
from tests.evaluation.test_answer_retrieval import write_answers
from tests.evaluation.test_sib200 import Topical, write_topics

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def scripts(load_script):
    return [load_script(name) for name in ("embed_benchmarks", "check_benchmarks")]


@pytest.fixture
def data(tmp_path, bitext):
    root = tmp_path / "data"
    write_answers(root / "xquad-r")
    write_topics(root / "sib200")
    (root / "tatoeba").mkdir()
    lines = [
        f"Satz {at}: {row['source']}\tIn 19{at + 50}, {row['target']} because it is cold.\n"
        for at, row in enumerate(bitext)
    ]
    (root / "tatoeba" / "de-en.tsv").write_text("source\ttarget\n" + "".join(lines))
    gold = root / "alignment-gold"
    gold.mkdir()
    (gold / "ende.src-tgt").write_text("".join(f"{row['target']} ||| {row['source']}\n" for row in bitext))
    (gold / "ende.gold").write_text("1-1 2-2 2p3\n" * len(bitext))
    return root


def test_scores_equal_those_of_the_package(scripts, data, tiny_encoder, tiny_encoder_dir, tmp_path, capsys):
    embed, check = scripts
    settings = Settings(resamples=20, prompt="none")
    subject = Subject("tiny", tiny_encoder, tmp_path / "kept", settings)
    parts, _ = find_benchmarks(data, ["sib200", "answer-retrieval", "word-alignment", "xsim++"], settings)
    scores = {}
    for part in parts:
        scores |= run_benchmark(part, subject)["scores"]
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"scores": scores}))
    layer = scores["alignment-gold ende"]["settings"]["layer"]
    languages = ",".join(scores["xquad-r mAP"]["languages"])
    arguments = ["--languages", languages, "--sib200", "swh_Latn,ewe_Latn", "--layer", str(layer)]
    assert embed.main([str(tiny_encoder_dir), str(data), str(tmp_path / "embeddings"), *arguments]) == 0
    targets = [line.split("\t")[1] for line in (data / "tatoeba" / "de-en.tsv").read_text().splitlines()[1:]]
    changed = tmp_path / "changed.tsv"
    changed.write_text("".join(f"{kind}\t{one}\t{new}\n" for one in targets for kind, new in distractors(one).items()))
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "tatoeba").symlink_to(data / "tatoeba")
    only = [str(tiny_encoder_dir), str(tmp_path / "only"), str(tmp_path / "embeddings"), "--languages", "de"]
    assert embed.main([*only, "--xsimpp", "tatoeba", str(changed)]) == 0
    command = [str(data), str(tmp_path / "embeddings"), "--results", str(results)]
    assert check.main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 + len(scores["xquad-r mAP"]["languages"]) + 2
    error = scores["tatoeba xsim++"]["languages"]["de"]
    assert set(error["kinds"]) == {"number", "negation", "cause"}
    assert error["without"] <= error["score"]
    assert all(line.endswith("equal") for line in lines)
    only = tmp_path / "only.json"
    only.write_text(json.dumps({"scores": {"sib200 topics": scores["sib200 topics"]}}))
    rest = tmp_path / "rest.json"
    rest.write_text(json.dumps({"scores": {name: one for name, one in scores.items() if name != "sib200 topics"}}))
    assert check.main([*command[:-1], str(only), str(rest)]) == 0
    capsys.readouterr()
    assert check.main([*command[:-1], str(rest)]) == 1
    missing = [line.split() for line in capsys.readouterr().out.splitlines() if line.endswith("MISSING")]
    assert {line[2] for line in missing} == {"eng_Latn", "swh_Latn", "ewe_Latn"}
    del scores["xquad-r mAP"]["languages"]["de"]
    results.write_text(json.dumps({"scores": scores}))
    assert check.main(command) == 1
    assert any(line.endswith("MISSING") and " de " in line for line in capsys.readouterr().out.splitlines())
    scores["alignment-gold ende"]["languages"]["alignment-gold ende"]["score"] += 0.2
    results.write_text(json.dumps({"scores": scores}))
    assert check.main(command) == 1
    results.write_text('{"scores": {"stsb": {}}}')
    assert check.main(command) == 2
    assert "no score in common: found sib200 topics" in capsys.readouterr().err
    results.unlink()
    assert check.main(command) == 2
    assert "No such file" in capsys.readouterr().err


def test_topics_are_measured_on_the_test_split(scripts, tmp_path):
    embed, check = scripts
    write_topics(tmp_path / "sib200", splits=(("train", 30), ("dev", 12), ("test", 15)))
    model = Topical()
    embed.embed_topics(model, tmp_path, tmp_path / "embeddings", ["swh_Latn"])
    assert check.topic_accuracy(tmp_path, tmp_path / "embeddings") == {"eng_Latn": 100, "swh_Latn": 100}
    assert len(np.load(tmp_path / "embeddings" / "sib200" / "swh_Latn.test.npy")) == 15


def test_a_piece_that_is_only_a_space_has_no_word(scripts, tmp_path):
    """Without it, both words are linked as the gold says; with it, it takes the place of a word."""
    _, check = scripts
    folder = tmp_path / "embeddings" / "alignment-gold"
    folder.mkdir(parents=True)
    (tmp_path / "alignment-gold").mkdir()
    (tmp_path / "alignment-gold" / "x.gold").write_text("1-1 2-2 3-3\n")
    np.save(folder / "x.source.npy", np.array([[1.0, 0, 0], [0, 1, 0], [0, 0, 1]]))
    np.save(folder / "x.source.words.npy", np.array([[0, 0, 1], [0, 1, 1], [0, 2, 1]]))
    np.save(folder / "x.target.npy", np.array([[0, 0.9, 0.1], [1.0, 0.1, 0], [0, 0.8, 0.6], [0, 0, 1]]))
    np.save(folder / "x.target.words.npy", np.array([[0, 0, 0], [0, 0, 1], [0, 1, 1], [0, 2, 1]]))
    assert check.alignment_error(tmp_path, tmp_path / "embeddings")["x"] == 0
    assert check.alignment_error(tmp_path, tmp_path / "embeddings", spaces=True)["x"] > 0
