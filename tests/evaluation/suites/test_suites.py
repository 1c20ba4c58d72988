import copy
import csv
import gzip
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import mteb
import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from tokenizers.normalizers import Lowercase

from metaphrase.aligners.embedding import EmbeddingAligner
from metaphrase.corpus.code_switching import PARAPHRASES
from metaphrase.corpus.parallel import ParallelSet, load_parallel_folder, parallel_files
from metaphrase.corpus.words import Words
from metaphrase.evaluation import answer_retrieval, bucc, sib200, sts, word_alignment
from metaphrase.evaluation.bucc import PROTOCOLS
from metaphrase.evaluation.compare import compare, verdict_shown
from metaphrase.evaluation.distractors import KINDS
from metaphrase.evaluation.encoding import CachedEncoder
from metaphrase.evaluation.measures import MEASURES
from metaphrase.evaluation.result import Measurement, Result
from metaphrase.evaluation.retrieval import evaluate_retrieval, retrieval_hits, xsim_error
from metaphrase.evaluation.sib200 import language_groups
from metaphrase.evaluation.suites import (
    FINETUNED,
    SUITES,
    Benchmark,
    DataUnavailable,
    Sample,
    Settings,
    Subject,
    running,
)
from metaphrase.evaluation.suites.baselines import compare_scores, differences, stronger
from metaphrase.evaluation.suites.parallel import parallel_folders
from metaphrase.evaluation.suites.running import (
    EvaluateOptions,
    cache_path,
    describe_protocol,
    encoding_speed,
    evaluate_models,
    find_benchmarks,
    measure_all,
    run_benchmark,
)
from metaphrase.evaluation.suites.samples import samples_of
from metaphrase.evaluation.suites.transfer import finetuned_results, mean_of_runs
from metaphrase.evaluation.transfer import frozen
from metaphrase.evaluation.transfer.classification import against_majority
from metaphrase.evaluation.transfer.data import UPOS, TransferData
from metaphrase.evaluation.transfer.running import FineTuner
from metaphrase.evaluation.word_alignment import alignment_scores, load_gold_lines, load_wpt
from metaphrase.exceptions import CorpusError
from tests.evaluation.test_answer_retrieval import write_answers
from tests.evaluation.test_sib200 import write_topics
from tests.mining.test_search import mine_loop

SETTINGS = Settings(resamples=50)
QUICK = samples_of("quick")


def write_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8", newline="") as file:
        file.writelines(f"{line}\n" for line in lines)


def write_pairs(path, rows):
    write_lines(path, ["source\ttarget", *(f"{row['source']}\t{row['target']}" for row in rows)])


@pytest.fixture
def data(bitext, tmp_path):
    """A folder with a little of everything."""
    root = tmp_path / "data"
    german, english = ([row[side] for row in bitext] for side in ("source", "target"))
    write_pairs(root / "tatoeba" / "de-en.tsv.gz", bitext[:12])
    write_pairs(root / "tatoeba" / "sw-en.tsv.gz", bitext[12:])
    write_pairs(root / "news" / "de-en.test.tsv.gz", bitext[:6])
    write_pairs(root / "news" / "de-en.train.tsv.gz", bitext[6:])
    write_pairs(root / "corpus" / "de-en.tsv.gz", bitext)
    for language, texts in (("de", german), ("en", english)):
        with gzip.open(_made(root / "stsb" / f"stsb-{language}-test.csv.gz"), "wt", newline="") as file:
            writer = csv.writer(file)
            writer.writerows((texts[i], texts[i + 1], i % 5) for i in range(20))
        write_lines(
            root / "bucc" / f"de-en.sample.{language}.gz", (f"{language}-{i}\t{t}" for i, t in enumerate(texts))
        )
        write_lines(
            root / "pawsx" / f"dev-{language}.tsv.gz",
            (f"{texts[i]}\t{texts[(i + 1) % 24]}\t{i % 2}" for i in range(24)),
        )
    write_lines(root / "bucc" / "de-en.sample.gold.gz", (f"de-{i}\ten-{i}" for i in range(24)))
    for name, texts in (("deu", german), ("eng", english)):
        lines = (f"<s snum={i}> {text} </s>\n" for i, text in enumerate(texts, 1))
        _made(root / "gold" / f"test.{name}").write_text("".join(lines))
    write_answers(root / "xquad-r")
    write_topics(root / "sib200")
    (root / "gold" / "test.deu.eng.wa").write_text("".join(f"{i} 1 1\n{i} 2 2 P\n" for i in range(1, 25)))
    return root


def _made(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@pytest.fixture
def subject(tiny_encoder, tiny_encoder_dir, tmp_path):
    return Subject(str(tiny_encoder_dir), tiny_encoder, tmp_path / "kept", SETTINGS)


# --- What there is ---


def test_suite_names():
    assert list(SUITES) == [
        *("retrieval", "sts", "mining", "answer-retrieval", "sib200", "xsim++", "word-alignment"),
        *("nli", "paraphrase", "qa", "pos", "mteb"),
    ]
    assert {task.suite for task in FINETUNED.values()} == {"nli", "paraphrase", "qa", "pos"}


def test_finds_benchmarks_and_reports_missing_data(data):
    parts, missing = find_benchmarks(data, list(SUITES), SETTINGS)
    assert [(part.suite, part.name) for part in parts] == [
        ("retrieval", "news"),
        ("retrieval", "tatoeba"),
        ("sts", "stsb"),
        ("sts", "sts22"),
        ("mining", "bucc sample_oracle"),
        ("answer-retrieval", "xquad-r"),
        ("answer-retrieval", "xquad-r paragraph"),
        ("sib200", "sib200"),
        ("xsim++", "news xsim++"),
        ("xsim++", "tatoeba xsim++"),
        ("xsim++", "sib200 xsim++"),
        ("word-alignment", "gold"),
        ("paraphrase", "pawsx probe"),
        ("mteb", "mteb tatoeba"),
        ("mteb", "mteb sib200"),
        ("mteb", "mteb xquad-r"),
    ]
    assert {suite: reason.startswith("needs ") for suite, reason in missing.items()} == {
        "nli": True,
        "qa": True,
        "pos": True,
    }
    named = {part.name: part for part in parts}
    assert [path.name for path in named["news"].files] == ["de-en.test.tsv.gz"]
    assert [path.name for path in named["gold"].files] == ["test.deu", "test.eng", "test.deu.eng.wa"]
    assert len(named["bucc sample_oracle"].files) == 3
    assert "sample_oracle" in named["bucc sample_oracle"].protocol
    assert all(part.work > 0 for part in parts if part.files and part.suite != "mteb")
    text = sum(len(gzip.decompress(path.read_bytes())) for path in named["tatoeba"].files)
    assert named["tatoeba"].work == text
    assert named["mteb tatoeba"].work == 0  # its texts are embedded for retrieval
    (alone, *_), _ = find_benchmarks(data, ["mteb"], SETTINGS)
    assert alone.work == text


def test_languages_and_tasks_limit_what_is_found(data):
    parts, missing = find_benchmarks(data, list(SUITES), Settings(languages=("sw",)))
    assert [part.name for part in parts] == [
        *("tatoeba", "sts22", "sib200", "tatoeba xsim++", "sib200 xsim++", "gold"),
        *("mteb tatoeba", "mteb sib200", "mteb xquad-r"),
    ]
    sib200 = next(part for part in parts if part.name == "sib200")
    assert {path.name.partition(".")[0] for path in sib200.files} == {"eng_Latn", "swh_Latn"}
    assert {"sts", "mining", "paraphrase"} < missing.keys()
    parts, _ = find_benchmarks(data, ["sts"], Settings(languages=("de",)))
    assert [path.name for path in parts[0].files] == ["stsb-de-test.csv.gz", "stsb-en-test.csv.gz"]
    parts, missing = find_benchmarks(data, ["mteb"], Settings(tasks=("news", "STS22", "sib200")))
    assert [(part.name, len(part.files)) for part in parts] == [
        ("mteb news", 1),
        ("mteb STS22", 0),
        ("mteb sib200", 8),
    ]
    assert find_benchmarks(None, ["mteb"], Settings(tasks=("STS22",)))[0][0].name == "mteb STS22"
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        find_benchmarks(data / "nowhere", ["sts"], SETTINGS)


def test_a_data_set_itself_can_be_the_folder(data):
    for folder, suite, name in (
        ("tatoeba", "retrieval", "tatoeba"),
        ("corpus", "retrieval", "corpus"),
        ("stsb", "sts", "stsb"),
        ("bucc", "mining", "bucc sample_oracle"),
        ("xquad-r", "answer-retrieval", "xquad-r"),
        ("sib200", "sib200", "sib200"),
        ("gold", "word-alignment", "gold"),
        ("pawsx", "paraphrase", "pawsx probe"),
        ("sib200", "mteb", "mteb sib200"),
        ("xquad-r", "mteb", "mteb xquad-r"),
    ):
        assert find_benchmarks(data / folder, [suite], SETTINGS)[0][0].name == name


def test_the_split_of_a_folder_of_test_sets(data):
    def files(folder, **settings):
        ((part, *_), _) = find_benchmarks(folder, ["retrieval"], Settings(**settings))
        return [path.name for path in part.files]

    assert files(data / "news") == ["de-en.test.tsv.gz"]
    assert files(data / "news", split="train") == files(data, split="train") == ["de-en.train.tsv.gz"]
    with pytest.raises(FileNotFoundError, match="Its splits are: test, train"):
        files(data / "news", split="dev")
    write_pairs(data / "news" / "de-en.tsv.gz", [{"source": "a", "target": "b"}])
    assert files(data / "news") == ["de-en.test.tsv.gz"]  # the file without a split may be a corpus


@pytest.mark.parametrize("inside", [True, False])
def test_files_without_a_split_beside_those_of_the_test_split_have_a_warning(data, caplog, inside):
    write_pairs(data / "news" / "sw-en.tsv.gz", [{"source": "a", "target": "b"}])
    find_benchmarks(data / "news" if inside else data, ["retrieval"], SETTINGS)
    assert "news has files of the split test, so these are not read: sw-en.tsv.gz." in caplog.text


def test_bucc_uses_every_protocol_with_available_splits(data):
    for path in list((data / "bucc").iterdir()):
        path.with_name(path.name.replace("sample", "training")).write_bytes(path.read_bytes())
    names = [part.name for part in find_benchmarks(data, ["mining"], SETTINGS)[0]]
    assert names == [f"bucc {protocol}" for protocol in PROTOCOLS if "test" not in protocol]
    parts, _ = find_benchmarks(data, ["mining"], Settings(protocols=("train_oracle",)))
    assert [part.name for part in parts] == ["bucc train_oracle"]
    assert all(".training." in path.name for path in parts[0].files)


def test_missing_bucc_languages_are_skipped(data):
    for settings in (Settings(languages=("sw", "de")), Settings(languages=("de",))):
        (part,) = find_benchmarks(data, ["mining"], settings)[0]
        assert len(part.files) == 3
    assert find_benchmarks(data, ["mining"], Settings(languages=("sw",)))[0] == []


def test_mining_settings(data, tiny_encoder, tiny_encoder_dir, tmp_path):
    default = find_benchmarks(data, ["mining"], SETTINGS)[0][0]
    assert default.protocol == (
        "sample_oracle: threshold from sample, scored on sample; ratio margin, k=4, max retrieval, repeated lines kept, "
        "score >= threshold"
    )
    chosen = {"margin": "distance", "k": 2, "retrieval": "intersection", "duplicates": "unify", "comparison": ">"}
    files = set()
    for settings in (SETTINGS, Settings(resamples=50, duplicates="keep"), Settings(resamples=50, **chosen)):
        subject = Subject(str(tiny_encoder_dir), tiny_encoder, tmp_path / "kept", settings)
        (part,) = find_benchmarks(data, ["mining"], settings)[0]
        files.add(cache_path(part, subject))
    assert len(files) == 2
    told = run_benchmark(part, subject)["scores"]["bucc sample_oracle"]["settings"]
    assert {key: told[key] for key in chosen} == chosen
    for word in ("distance margin, k=2, intersection retrieval", "unified", "score > threshold"):
        assert word in part.protocol


def test_mining_searches_where_the_model_is(data, subject, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    devices = []
    monkeypatch.setattr(bucc, "evaluate_mining", lambda *a, device, **k: devices.append(device))
    find_benchmarks(data, ["mining"], SETTINGS)[0][0].measure(subject)
    assert devices == [None]


def test_quick_is_a_sample_of_the_suites_that_do_not_fine_tune(data, subject):
    small = {suite: sample._replace(items=5) for suite, sample in QUICK.items()}
    suites = [name for name in QUICK if name in SUITES]  # the others are benchmarks with a sample of their own
    parts, missing = find_benchmarks(data, suites, SETTINGS, small)
    whole = {part.name: part for part in find_benchmarks(data, suites, SETTINGS)[0]}
    assert [part.name for part in parts] == [
        *("news", "tatoeba", "stsb", "bucc sample_oracle", "xquad-r", "xquad-r paragraph"),
        *("sib200", "news xsim++", "tatoeba xsim++", "sib200 xsim++", "gold", "pawsx probe"),
    ]
    assert list(missing) == ["pos"]
    for part in parts:
        spread = part.suite in ("sts", "answer-retrieval")
        words = "5 items of each language, evenly spaced" if spread else "the first 5 items of each language"
        assert f"; sample: {words}" in part.protocol
        assert cache_path(part, subject) != cache_path(whole[part.name], subject)
        assert part.work < whole[part.name].work
        for result in run_benchmark(part, subject)["scores"].values():
            sizes = {row["n"] for row in result["languages"].values()}
            assert sizes == ({10} if part.name == "sib200" and result["measure"] == "accuracy" else {5})
    names = {path.name.partition(".")[0] for part in parts for path in part.files if part.name == "sib200"}
    assert names == {"eng_Latn", "ewe_Latn", "swh_Latn", "tat_Cyrl"}
    (part,) = find_benchmarks(data / "sib200", ["sib200"], Settings(languages=("sw",)), QUICK)[0]
    assert {path.name.partition(".")[0] for path in part.files} == {"eng_Latn", "swh_Latn"}


def test_a_spread_sample_is_not_about_one_document(data, monkeypatch):
    """Items in the order of their documents are drawn from all of them, and questions with their whole paragraph."""
    seen = []
    monkeypatch.setattr(sts, "evaluate_sts", lambda model, sets, **_: seen.append(sets) or Mock())
    monkeypatch.setattr(
        answer_retrieval, "evaluate_answer_retrieval", lambda model, sets, **_: seen.append(sets) or {}
    )
    samples = {suite: QUICK[suite]._replace(items=3, languages=None) for suite in ("sts", "answer-retrieval")}
    for part in find_benchmarks(data, list(samples), SETTINGS, samples)[0]:
        part.measure(Mock(settings=SETTINGS, options=lambda *_: {}))
    pairs, _, answers, _ = seen
    assert pairs["de"].scores == (0, 0, 4)  # the first, the middle and the last of 20
    assert {one.ids for one in answers.values()} == {("q0.0", "q0.1")}  # one paragraph, for 3 of 5 questions
    samples["answer-retrieval"] = samples["answer-retrieval"]._replace(spread=False)
    (part, _) = find_benchmarks(data, ["answer-retrieval"], SETTINGS, samples)[0]
    part.measure(Mock(settings=SETTINGS, options=lambda *_: {}))
    assert {one.ids for one in seen[-1].values()} == {("q0.0", "q0.1", "q1.0")}


def test_a_folder_has_a_sample_of_its_own(data):
    samples = {"news": QUICK["retrieval"]._replace(items=5, languages=None)}
    whole = {part.name: part for part in find_benchmarks(data, ["retrieval", "xsim++"], SETTINGS)[0]}
    parts, _ = find_benchmarks(data, ["retrieval", "xsim++"], SETTINGS, samples)
    assert [part.name for part in parts] == list(whole)
    assert {part.name for part in parts if "; sample: the first 5 items" in part.protocol} == {"news", "news xsim++"}
    assert all(
        part.protocol == whole[part.name].protocol
        for part in parts
        if part.suite == "retrieval" and part.name != "news"
    )


def evaluation(prompt, accuracy, error):
    """An evaluation with a prompt: one part with two scores."""
    scores = {
        "a": {"average": {"score": accuracy}, "lower_is_better": False, "settings": {"prompt": prompt}},
        "b": {"average": {"score": error}, "lower_is_better": True, "settings": {"prompt": prompt}},
    }
    settings = {"prompt": prompt, "seed": 0}
    part = {"scores": list(scores), "settings": settings, "protocol": f"prompt {prompt}"}
    return {"model": "x", "scores": scores, "parts": {"set": part}, "failed": {}, "settings": settings}


def test_the_sample_of_a_folder_is_that_of_its_task_of_mteb(data, bitext):
    """Without tatoeba and udhr, the suite mteb measures the other test sets."""
    (data / "tatoeba").rename(data / "software")
    write_pairs(data / "software" / "de-en.test.tsv.gz", bitext)
    samples = {"software": QUICK["retrieval"]._replace(items=5, languages=None)}
    parts, _ = find_benchmarks(data, ["retrieval", "mteb"], SETTINGS, samples)
    named = {part.name: part for part in parts}
    assert "sample" not in named["mteb news"].protocol
    assert "; sample: the first 5 items" in named["mteb software"].protocol
    assert (named["mteb news"].work, named["mteb software"].work) == (0, 0)  # embedded for retrieval


def test_the_name_of_a_benchmark_has_a_sample_before_its_folder(data, subject):
    """MTEB's classifiers need all sentences of train, also in a sample."""
    samples = {"mteb sib200": Sample(3, 0.5, ("sw", "ewe_Latn")), "sib200": Sample(5, 0.1)}
    parts, _ = find_benchmarks(data, ["sib200", "xsim++", "mteb"], SETTINGS, samples)
    named = {part.name: part for part in parts}
    assert {name: part.fixed.get("first") for name, part in named.items() if "sib200" in name} == {
        "sib200": 5,
        "sib200 xsim++": 5,
        "mteb sib200": 3,
    }
    assert named["mteb sib200"].work > 0
    (scores,) = run_benchmark(named["mteb sib200"], subject)["scores"].values()
    assert list(scores["languages"]) == ["ewe_Latn", "swh_Latn"]
    texts = [text.split() for _, text in subject.encode.__self__.rows]
    for language in ("swh_Latn", "ewe_Latn"):
        trained, tested = (
            [int(at) for one, _, at in texts if one == language and (int(at) < 30) is train] for train in (True, False)
        )
        assert len(trained) > 5
        assert tested == [41, 40, 39]  # the first in the file


def test_only_the_embeddings_of_the_same_sample_are_cached(data):
    """A suite that reads all of a file after a sample of it embeds the rest."""
    samples = {"retrieval": QUICK["retrieval"]._replace(items=5, languages=None)}
    parts, _ = find_benchmarks(data, ["retrieval", "mteb"], SETTINGS, samples)
    assert {part.name: part.work > 0 for part in parts}["mteb tatoeba"]


def test_the_better_score_of_a_baseline_counts():
    one, other = evaluation("query: ", 70, 30), evaluation("", 60, 20)
    best = stronger([one, other])["scores"]
    assert (best["a"], best["b"]) == (one["scores"]["a"], other["scores"]["b"])
    assert stronger([one]) == one
    tied = stronger([one, evaluation("", 70, 30)])
    assert tied == one
    assert tied["scores"]["a"] is one["scores"]["a"]


def test_the_prompt_of_a_part_is_that_of_its_scores():
    one = evaluation("query: ", 70, 30)
    better = evaluation("", 80, 20)
    assert stronger([one, better]) == better
    mixed = stronger([one, evaluation("", 60, 20)])
    assert mixed["settings"] == mixed["parts"]["set"]["settings"] == {"seed": 0}
    assert [mixed["scores"][name]["settings"]["prompt"] for name in "ab"] == ["query: ", ""]


# --- Measuring ---


@pytest.mark.parametrize(
    ("name", "scores"),
    [
        ("tatoeba", ["tatoeba", "tatoeba xsim"]),
        ("stsb", ["stsb", "stsb cross-lingual"]),
        ("bucc sample_oracle", ["bucc sample_oracle"]),
        (
            "xquad-r",
            [
                "xquad-r mAP",
                "xquad-r mAP in one language",
                "xquad-r MRR in the question's language",
                "xquad-r own-language bias",
                "xquad-r mAP lost to the question's language",
            ],
        ),
        ("sib200", ["sib200", "sib200 topics"]),
        ("gold", ["gold", "gold tuned"]),
        ("mteb tatoeba", ["mteb tatoeba"]),
        ("mteb sib200", ["mteb sib200"]),
        ("mteb xquad-r", ["mteb xquad-r"]),
    ],
)
def test_all_results_have_one_form(data, subject, name, scores):
    part = next(part for part in find_benchmarks(data, list(SUITES), SETTINGS)[0] if part.name == name)
    result = run_benchmark(part, subject)
    assert list(result["scores"]) == scores
    for one in result["scores"].values():
        assert one["protocol"] == result["protocol"]
        assert one["statistic"] in {None, *MEASURES}
        assert Result.from_dict(one).to_dict() == one
        for row in (*one["languages"].values(), *one["groups"].values(), one["average"]):
            assert -100 <= row["score"] <= 200
        mean = np.mean([row["score"] for row in one["languages"].values()])
        assert one["average"]["score"] == pytest.approx(mean)
        assert one["average"]["n"] == len(one["languages"])
    embeds = "; cls pooling of layer 2, 32 tokens, no prompt" if part.suite != "word-alignment" else ""
    assert result["protocol"] == part.protocol + embeds
    assert result["model_hash"] == subject.sha
    assert result["data"]["files"] == [path.name for path in part.files]
    assert len(result["data"]["sha256"]) == 64
    assert result["settings"]["resamples"] == 50
    assert result["seconds"] >= 0
    json.dumps(result, allow_nan=False)


def test_scores_equal_those_of_evaluate_retrieval(data, subject):
    (part,) = (part for part in find_benchmarks(data, ["retrieval"], SETTINGS)[0] if part.name == "tatoeba")
    scores = run_benchmark(part, subject)["scores"]
    sets = load_parallel_folder(data / "tatoeba")
    expected = evaluate_retrieval(subject.model, sets, resamples=50).to_dict()
    assert scores["tatoeba"]["languages"] == expected["languages"]
    assert scores["tatoeba"]["average"] == expected["average"]


def xsim_loop(source, target, k=4):
    pairs = mine_loop(
        *(side / np.linalg.norm(side, axis=1, keepdims=True) for side in (source, target)), k, "ratio", "forward"
    )
    return 100 * sum(i != j for _, i, j in pairs) / len(source)


def test_xsim_is_directed(data, subject):
    """Constructed embeddings, far from any tie: sources are noisy copies of their targets."""
    sets = load_parallel_folder(data / "tatoeba")
    rng = np.random.default_rng(0)
    vectors = {}
    for one in sets.values():
        for source, target in zip(one.sources, one.targets, strict=True):
            vectors[target] = rng.normal(size=8)
            vectors[source] = vectors[target] + 1.5 * rng.normal(size=8)

    def encode(texts, **options):
        return np.array([vectors[text] for text in texts], dtype=np.float32)

    vars(subject)["encode"] = encode
    (part,) = (part for part in find_benchmarks(data, ["retrieval"], SETTINGS)[0] if part.name == "tatoeba")
    scores = run_benchmark(part, subject)["scores"]
    asymmetric = []
    for language, one in sets.items():
        sources, targets = (np.array([vectors[text] for text in side]) for side in (one.sources, one.targets))
        errors = [xsim_loop(sources, targets), xsim_loop(targets, sources)]
        asymmetric.append(errors[0] != errors[1])
        row = scores["tatoeba xsim"]["languages"][language]
        for direction, error in zip(("source_to_target", "target_to_source"), errors, strict=True):
            assert row[direction]["error"] == pytest.approx(error)
            low, high = row[direction]["interval"]
            assert low <= row[direction]["error"] <= high
        assert row["score"] == row["mean"]["error"] == pytest.approx(np.mean(errors))
    assert any(asymmetric), "the sets do not tell one direction from the other"


def test_a_damaged_test_set_fails(data, tiny_encoder, tiny_encoder_dir, tmp_path):
    """Its results would be missing; the other test sets are still measured."""
    (data / "damaged").mkdir()
    (data / "damaged" / "sw-en.test.tsv").write_text("source\ttarget\nonly one column\n", encoding="utf-8")
    benchmarks, missing = find_benchmarks(data, ["retrieval"], SETTINGS)
    assert not missing
    subject = Subject(str(tiny_encoder_dir), tiny_encoder, tmp_path / "kept", SETTINGS)
    found = measure_all(benchmarks, subject, missing, lambda item: None)
    assert list(found["failed"]) == ["damaged"]
    assert "sw-en.test.tsv" in found["failed"]["damaged"]
    assert "tatoeba" in found["scores"]
    (part,) = find_benchmarks(data / "damaged", ["retrieval"], SETTINGS)[0]
    with pytest.raises(ValueError, match=r"Nothing could be measured.*sw-en\.test\.tsv"):
        measure_all([part], subject, {}, lambda item: None)


def test_a_checksum_beside_a_file_is_not_a_test_set(data):
    """The cached result depends on the content of the files that are read."""
    (data / "news" / "de-en.test.tsv.gz.md5").write_text("0")
    (path,) = parallel_folders(data, SETTINGS)["news"].files.values()
    assert path.name == "de-en.test.tsv.gz"


def test_quotation_marks_can_be_stripped(data, tiny_encoder, tiny_encoder_dir, tmp_path):
    write_pairs(data / "tatoeba" / "de-en.tsv.gz", [{"source": '"a" b', "target": 'c "d"'}])
    settings = Settings(resamples=50, strip_quotes=True)
    sets = parallel_folders(data, settings)["tatoeba"].read()
    assert (sets["de"].sources, sets["de"].targets) == (("a b",), ("c d",))
    part, plain = (
        next(part for part in find_benchmarks(data, ["retrieval"], one)[0] if part.name == "tatoeba")
        for one in (settings, SETTINGS)
    )
    one, other = (Subject(str(tiny_encoder_dir), tiny_encoder, tmp_path / "kept", of) for of in (settings, SETTINGS))
    assert cache_path(part, one) != cache_path(plain, other)
    protocol = run_benchmark(part, one)["protocol"]
    assert "quotation marks stripped" in protocol
    assert protocol.endswith("cls pooling of layer 2, 32 tokens, no prompt")


def test_word_alignment_equals_the_aligner(data, subject):
    (part,) = find_benchmarks(data, ["word-alignment"], SETTINGS)[0]
    one = run_benchmark(part, subject)["scores"]["gold"]
    pairs = load_wpt(*part.files)
    evaluator = EmbeddingAligner(subject.model, batch_size=subject.batch_size)
    links = [alignment.links for alignment in evaluator.align([pair.pair for pair in pairs])]
    aer = alignment_scores(links, [pair.sure for pair in pairs], [pair.possible for pair in pairs]).aer
    assert one["average"]["score"] == pytest.approx(100 * aer)
    assert one["lower_is_better"]
    low, high = one["average"]["interval"]
    assert low < 100 * aer < high
    counts = np.sum(one["languages"]["gold"]["counts"], axis=0)
    assert aer == pytest.approx(1 - (counts[2] + counts[3]) / (counts[0] + counts[1]))


def test_word_alignment_is_tuned_on_the_first_fifth(data, subject, bitext):
    folder = data / "alignment-gold"
    folder.mkdir()
    (folder / "deen.src-tgt").write_text("".join(f"{row['source']} ||| {row['target']}\n" for row in bitext))
    (folder / "deen.gold").write_text("1-1 2p2\n" * len(bitext))
    (folder / "deen.peer.out").write_text("0-0 1-1\n" * len(bitext))
    (folder / "fren.gold").write_text("1-1\n")  # without its texts
    part, _ = find_benchmarks(data, ["word-alignment"], SETTINGS)[0]
    assert part.name == "alignment-gold deen"
    assert {path.name for path in part.files} == {"deen.src-tgt", "deen.gold", "deen.peer.out"}
    plain, tuned = run_benchmark(part, subject)["scores"].values()
    fifth = len(bitext) // 5
    assert (plain["languages"][part.name]["n"], tuned["languages"][part.name]["n"]) == (
        len(bitext),
        len(bitext) - fifth,
    )
    assert plain["facts"]["peers"] == {"deen.peer.out": 0.0}
    best = min(tuned["facts"]["tried"], key=lambda row: row["aer"])
    assert {key: tuned["settings"][key] for key in ("layer", "method", "level")}.items() <= best.items()
    pairs = load_gold_lines(*part.files[:2])
    aligner = EmbeddingAligner(subject.model, **{key: best[key] for key in ("layer", "method", "level", "threshold")})
    links = [alignment.links for alignment in aligner.align([pair.pair for pair in pairs[fifth:]])]
    gold = pairs[fifth:]
    aer = alignment_scores(links, [pair.sure for pair in gold], [pair.possible for pair in gold]).aer
    assert tuned["average"]["score"] == pytest.approx(100 * aer)


def test_broken_links_of_another_program_do_not_lose_the_result(data, subject, bitext, caplog):
    folder = data / "alignment-gold"
    folder.mkdir()
    (folder / "deen.src-tgt").write_text("".join(f"{row['source']} ||| {row['target']}\n" for row in bitext))
    (folder / "deen.gold").write_text("1-1\n" * (len(bitext) - 1) + "\n")
    (folder / "deen.good.out").write_text("0-0\n" * (len(bitext) - 1) + "\n")
    (folder / "deen.short.out").write_text("0-0\n")
    (folder / "deen.strange.out").write_text("x\n" * len(bitext))
    part, _ = find_benchmarks(data, ["word-alignment"], SETTINGS)[0]
    plain, _ = run_benchmark(part, subject)["scores"].values()
    assert plain["facts"]["peers"] == {"deen.good.out": 0.0}
    for name in ("deen.short.out", "deen.strange.out"):
        assert f"Skipped the links of {name}. " in caplog.text


def test_a_margin_finds_other_neighbours_than_the_cosine():
    rng = np.random.default_rng(40)
    source, noise = rng.normal(size=(2, 40, 6)).astype(np.float32)
    target = source + 0.9 * noise
    assert not np.array_equal(retrieval_hits(source, target)[0], retrieval_hits(source, target, margin_k=4)[0])


def test_identical_sides_are_all_found_by_margin_too():
    rows = np.random.default_rng(0).normal(size=(9, 5))
    for margin_k in (None, 4):
        assert np.array(retrieval_hits(rows, rows, margin_k=margin_k)).all()


def test_a_text_is_embedded_once(tiny_encoder, bitext, monkeypatch):
    seen = []
    encode = tiny_encoder.encode
    monkeypatch.setattr(
        tiny_encoder, "encode", lambda texts, **options: seen.extend(texts) or encode(texts, **options)
    )
    cached = CachedEncoder(tiny_encoder).encode
    texts = [row["source"] for row in bitext[:4]]
    first = cached(texts[:3])
    again = cached([texts[3], texts[0], texts[0]])
    assert seen == texts
    assert np.array_equal(again[1], first[0])
    assert np.array_equal(again[1], again[2])
    np.testing.assert_allclose(again, encode([texts[3], texts[0], texts[0]]), atol=1e-6)
    assert not np.allclose(cached(texts[:1], prompt="query: "), first[:1])


def test_embeddings_in_bfloat16_are_cached_apart(data, tiny_encoder, tmp_path):
    settings = Settings(resamples=50, transfer="finetune")
    exact = Subject("tiny", tiny_encoder, tmp_path, settings)
    rounded = replace(exact, settings=replace(settings, bf16=True))
    texts = ["one", "two three"]
    expected, found = (one.encode(texts) for one in (exact, rounded))
    assert found.dtype == np.float32
    assert not np.array_equal(found, expected)
    np.testing.assert_allclose(found, expected, atol=0.05)
    np.testing.assert_array_equal(Subject("tiny", tiny_encoder, tmp_path, settings).encode(texts), expected)
    (topics,) = find_benchmarks(data, ["sib200"], settings)[0]
    assert cache_path(topics, rounded) != cache_path(topics, exact)
    assert describe_protocol(topics, rounded) == f"{describe_protocol(topics, exact)}, bfloat16"


def test_fine_tuning_in_bfloat16_is_cached_apart(data, tiny_encoder, tmp_path):
    subjects, trained = [], []
    for bf16 in (False, True):
        settings = Settings(transfer="finetune", bf16=bf16)
        subjects.append(Subject("tiny", tiny_encoder, tmp_path, settings))
        trained += find_benchmarks(data, ["paraphrase"], settings)[0]
    exact, rounded = (cache_path(*one) for one in zip(trained, subjects, strict=True))
    assert exact != rounded
    assert trained[1].protocol == f"{trained[0].protocol}, bfloat16"


def test_fine_tuning_in_bfloat16_trains_and_measures_in_it(
    data, tiny_encoder, tiny_encoder_dir, tmp_path, monkeypatch
):
    monkeypatch.setattr("metaphrase.modeling.precision.has_bfloat16_instructions", lambda: True)
    tiny = {"num_train_epochs": 1, "max_steps": 2, "max_length": 24}
    settings = Settings(resamples=50, transfer="finetune", bf16=True, finetuning=tiny)
    subject = Subject(str(tiny_encoder_dir), tiny_encoder, tmp_path / "kept", settings)
    forward, seen = torch.nn.Linear.forward, set()

    def recorded(self, features):
        seen.add((self.training, torch.is_autocast_enabled(features.device.type)))
        return forward(self, features)

    monkeypatch.setattr(torch.nn.Linear, "forward", recorded)
    (part,) = find_benchmarks(data, ["paraphrase"], settings)[0]
    (scores,) = run_benchmark(part, subject)["scores"].values()
    assert seen == {(True, True), (False, True)}
    assert scores["facts"]["training"]["bf16"] is True


def test_fine_tuned_benchmarks_are_trained_and_measured(data, tiny_encoder, tiny_encoder_dir, tmp_path, monkeypatch):
    tiny = {"num_train_epochs": 1, "max_steps": 2, "max_length": 24, "use_cpu": True}
    settings = Settings(resamples=50, transfer="finetune", finetuning=tiny)
    subject = Subject(str(tiny_encoder_dir), tiny_encoder, tmp_path / "kept", settings)
    (part,) = find_benchmarks(data, ["paraphrase"], settings)[0]
    result = run_benchmark(part, subject)
    (scores,) = result["scores"].values()
    assert list(scores["languages"]) == ["en", "de"]
    assert scores["languages"]["de"]["n"] == 12
    assert scores["groups"]["without English"]["score"] == scores["languages"]["de"]["score"]
    assert scores["facts"]["training"]["max_steps"] == 2
    assert not list(subject.folder.rglob("checkpoint-*"))
    assert scores["settings"]["limit_test"] == 300
    assert "the first 300 in each language (limit_train none, limit_test 300)" in result["protocol"]
    for row in scores["languages"].values():
        assert row["majority"] in {100 * largest / 12 for largest in range(6, 13)}
        assert row["learned"] in (True, False)
    compared = compare_scores(result["scores"], result["scores"], resamples=50, seed=0)["pawsx accuracy"]
    assert {row["verdict"] for row in compared["languages"].values()} == {"tie"}
    assert {row["runs"] for row in (compared["pooled"], *compared["languages"].values())} == {1}

    several = replace(subject, settings=replace(settings, finetuning_runs=2))
    trained = []
    monkeypatch.setattr(FineTuner, "train_or_resume", recorded(FineTuner.train_or_resume, trained))
    (part,) = find_benchmarks(data, ["paraphrase"], several.settings)[0]
    (both,) = run_benchmark(part, several)["scores"].values()
    assert [trainer.args.seed for trainer in trained] == [43]  # the run with seed 42 is kept
    for language, row in both["languages"].items():
        one = scores["languages"][language]
        assert row["sha256"] == one["sha256"]
        assert row["run_scores"][0] == one["score"] == one["run_scores"][0]
        assert row["score"] == pytest.approx(np.mean(row["run_scores"]))
        assert set(row["items"]) <= {0, 0.5, 1}
        assert row["interval"][0] <= row["score"] <= row["interval"][1]
    assert both["average"]["score"] == pytest.approx(np.mean([row["score"] for row in both["languages"].values()]))


def recorded(method, calls):
    def call(self, *args, **kwargs):
        calls.append(self)
        return method(self, *args, **kwargs)

    return call


def test_runs_are_averaged_and_their_chunks_are_counted_together():
    def run(score, items, learned):
        row = {"metrics": {"f1": score}, "items": items, "interval": [0, 1], "facts": {"learned": learned}}
        return {"languages": {"de": {"n": 2, **row}}, "seconds": 1.5}

    runs = [run(90.0, [1, 0], False), run(70.0, [1, 1], True), run(80.0, [0, 1], False)]
    answers = mean_of_runs("xquad", runs)["languages"]["de"]
    assert answers["items"] == pytest.approx([2 / 3, 2 / 3])
    assert answers["metrics"]["f1"] == pytest.approx(100 * 2 / 3)
    assert answers["run_scores"] == [90, 70, 80]
    assert answers["facts"] == {"learned": True}
    chunks = mean_of_runs("ud", [run(50.0, [[1, 2, 2]], True), run(100.0, [[2, 2, 2]], True)])
    assert chunks["languages"]["de"]["items"] == [[3, 4, 4]]
    assert chunks["languages"]["de"]["metrics"]["f1"] == 75
    assert (chunks["average"]["f1"], chunks["seconds"]) == (75, 3)


@pytest.mark.parametrize(
    ("predicted", "learned"),
    [
        ([1] * 6, False),
        ([0] * 6, False),
        ([0, 1, 1, 1, 1, 0], False),
        ([0, 0, 1, 1, 1, 0], True),
        ([0, 0, 1, 1, 1, 1], True),
    ],
)
def test_predicting_one_class_is_not_learned(predicted, learned):
    gold = [0, 0, 1, 1, 1, 1]
    items = [int(one == label) for one, label in zip(predicted, gold, strict=True)]
    result = {
        "languages": {
            "de": {
                "n": 6,
                "items": items,
                "facts": against_majority(items, gold),
                "metrics": {"accuracy": 50.0},
                "interval": [0, 100],
            }
        },
        "average": {"accuracy": 50.0},
    }
    row = finetuned_results("pawsx", result)["pawsx accuracy"].languages["de"].details
    assert row["majority"] == pytest.approx(400 / 6)
    assert row["learned"] is learned


def test_distractors_are_hard_for_an_encoder_that_only_sees_the_topic(data, subject):
    parts, _ = find_benchmarks(data, ["xsim++"], SETTINGS)
    scores = {}
    for part in parts:
        scores |= run_benchmark(part, subject)["scores"]
    assert list(scores) == ["news xsim++", "tatoeba xsim++", "sib200 xsim++"]
    assert {row["n"] for row in scores["sib200 xsim++"]["languages"].values()} == {12}
    for result in scores.values():
        assert result["lower_is_better"]
        assert set(result["groups"]) <= {"without distractors", *KINDS}
        assert result["average"]["score"] >= result["groups"]["without distractors"]["score"]
        assert {row["n"] for row in result["groups"].values()} == {len(result["languages"])}
        assert all(
            one["score"] >= result["groups"]["without distractors"]["score"] for one in result["groups"].values()
        )
        without = [row["without"] for row in result["languages"].values()]
        assert result["groups"]["without distractors"]["score"] == pytest.approx(np.mean(without))
        for row in result["languages"].values():
            assert row["score"] == pytest.approx(100 * np.mean(row["items"]))
            assert all(row["without"] <= one["error"] for one in row["kinds"].values())


def test_a_probe_transfers_what_english_shows(data, subject, bitext):
    """A tag depends on the first letter of its word, and "German" has the English words."""
    write_treebanks(data, bitext, lambda word, at: UPOS[ord(word[0]) % 2], sides=("target", "target"))
    scores = {}
    for suite in ("paraphrase", "pos"):
        (part,) = find_benchmarks(data, [suite], SETTINGS)[0]
        assert "frozen" in part.protocol
        scores |= run_benchmark(part, subject)["scores"]
    assert list(scores) == ["pawsx probe accuracy", "ud probe f1", "ud probe accuracy"]
    tags = scores["ud probe accuracy"]["languages"]
    assert tags["de"]["score"] == tags["en"]["score"] > 80
    for name, statistic in (("pawsx probe accuracy", "shared_items"), ("ud probe f1", "chunk_f1")):
        assert scores[name]["statistic"] == statistic
        for row in (scores[name]["average"], *scores[name]["languages"].values()):
            low, high = row["interval"]
            assert low - 1e-9 <= row["score"] <= high + 1e-9


@pytest.mark.parametrize("transfer", ["probe", "finetune"])
def test_translations_of_a_pair_are_one_item(data, subject, transfer):
    """Files drop different rows, so that the same number of a row is another pair."""
    path = data / "pawsx" / "dev-de.tsv.gz"
    with gzip.open(path, "rt") as file:
        lines = file.read().splitlines()
    write_lines(path, (("NS\tNS\t0" if at < 6 else line) for at, line in enumerate(lines)))
    tiny = {"max_steps": 1, "max_length": 24, "use_cpu": True}
    subject = replace(subject, settings=replace(SETTINGS, transfer=transfer, first=8, finetuning=tiny))
    (part,) = find_benchmarks(data, ["paraphrase"], subject.settings)[0]
    (scores,) = run_benchmark(part, subject)["scores"].values()
    english, german = (set(scores["languages"][language]["item_ids"]) for language in ("en", "de"))
    assert english != german
    assert len(english & german) > 0
    assert len(english) == scores["languages"]["en"]["n"] == 8
    compared = compare(Result.from_dict(scores), Result.from_dict(scores), resamples=50)
    assert compared["pooled"]["clusters"] == len(english | german)


def write_treebanks(data, bitext, tag, sides):
    names = ("en_ewt", sides[1], "dev"), ("en_ewt", sides[1], "test"), ("de_pud", sides[0], "test")
    for name, side, split in names:
        lines = []
        for row in bitext:
            for at, word in enumerate(row[side].split(), 1):
                lines.append("\t".join([str(at), word, word, tag(word, at), "_", "_", "0", "root", "_", "_"]))
            lines.append("")
        write_lines(data / "ud" / f"{name}-ud-{split}.conllu.gz", lines)


def test_treebanks_are_found_and_tagged(data, tiny_encoder, tiny_encoder_dir, tmp_path, bitext):
    write_treebanks(data, bitext, lambda word, at: UPOS[at % 5], sides=("source", "target"))
    settings = Settings(
        languages=("de",),
        transfer="finetune",
        finetuning={"max_steps": 1, "max_length": 64, "num_train_epochs": 1, "use_cpu": True},
    )
    (part,) = find_benchmarks(data, ["pos"], settings)[0]
    assert len(part.files) == 3
    subject = Subject(str(tiny_encoder_dir), tiny_encoder, tmp_path / "kept", settings)
    scores = run_benchmark(part, subject)["scores"]
    assert list(scores) == ["ud f1", "ud accuracy"]
    assert list(scores["ud f1"]["languages"]) == ["de"]
    assert scores["ud f1"]["statistic"] == "chunk_f1"
    assert scores["ud accuracy"]["statistic"] is None


# --- Keeping ---


@pytest.fixture
def counted(tmp_path):
    calls = []
    file = tmp_path / "file"
    file.write_text("data")

    def measure(subject):
        calls.append(subject.name)
        return {"x": Result("retrieval", "x", "m", {"a": Measurement(1, 50.0)}, Measurement(1, 50.0))}

    return calls, Benchmark("x", "retrieval", "p", (file,), 1, measure)


def test_a_benchmark_is_measured_once(counted, subject):
    calls, part = counted
    assert not cache_path(part, subject).exists()
    first = run_benchmark(part, subject)
    assert cache_path(part, subject).parent.name == subject.digest[:12]
    assert run_benchmark(part, subject) == first
    assert len(calls) == 1


@pytest.mark.parametrize(
    "change",
    [{"languages": ("sw",)}, {"resamples": 51}, {"prompt": "a: "}, {"text_equality": True}, {"seed": 1}],
)
def test_changed_settings_are_measured_again(counted, subject, change):
    calls, part = counted
    run_benchmark(part, subject)
    run_benchmark(part, replace(subject, settings=replace(SETTINGS, **change)))
    assert len(calls) == 2


def test_settings_of_other_suites_do_not_matter(counted, subject):
    calls, part = counted
    run_benchmark(part, subject)
    for change in ({"finetuning": {"max_steps": 1}}, {"tasks": ("a",)}, {"protocols": ("b",)}, {"k": 3}):
        run_benchmark(part, replace(subject, settings=replace(SETTINGS, **change)))
    assert len(calls) == 1


def test_unrelated_settings_do_not_retrain(counted, subject):
    calls, part = counted
    part = replace(part, suite="qa", reads=("languages", "transfer"))
    run_benchmark(part, subject)
    for change in ({"text_equality": True}, {"resamples": 7}, {"seed": 1}, {"prompt": "a: "}, {"strip_quotes": True}):
        run_benchmark(part, replace(subject, settings=replace(SETTINGS, **change)))
    assert len(calls) == 1
    run_benchmark(replace(part, fixed={"small scale": {"limit_test": 1}}), subject)
    assert len(calls) == 2


def test_stored_prompts_distinguish_models(counted, subject, tiny_encoder_dir, tmp_path):
    _, part = counted
    prompted = copy.deepcopy(subject.model)
    prompted.prompts = {"query": "query: ", "passage": "passage: "}
    other = Subject(str(tiny_encoder_dir), prompted, tmp_path / "kept", SETTINGS)
    assert other.sha == subject.sha
    assert cache_path(part, other) != cache_path(part, subject)
    answers = replace(part, suite="answer-retrieval", asks=True)
    assert describe_protocol(answers, other).endswith("prompt 'query: ', candidates 'passage: '")
    assert describe_protocol(answers, subject).endswith("no prompt")
    explicit = replace(subject, settings=replace(SETTINGS, prompt="query: "))
    assert cache_path(part, explicit) == cache_path(part, other)
    without = replace(other, settings=replace(SETTINGS, prompt=None))
    assert cache_path(part, without) == cache_path(part, subject)
    for suite in ("mteb", "answer-retrieval"):  # documents and answers are given the passage prompt
        searched = replace(part, suite=suite, asks=suite == "answer-retrieval")
        assert cache_path(searched, explicit) != cache_path(searched, other)


def test_another_tokenizer_is_another_subject(subject, tiny_encoder_dir, tmp_path):
    respelled = copy.deepcopy(subject.model)
    respelled.tokenizer.backend_tokenizer.normalizer = Lowercase()
    other = Subject(str(tiny_encoder_dir), respelled, tmp_path / "kept", SETTINGS)
    assert other.sha == subject.sha
    assert other.folder != subject.folder


def test_changed_data_and_models_are_measured_again(counted, subject):
    calls, part = counted
    run_benchmark(part, subject)
    part.files[0].write_text("other")
    run_benchmark(part, subject)
    other = replace(subject)
    vars(other)["digest"] = subject.digest[::-1]
    run_benchmark(part, other)
    assert len(calls) == 3


def test_a_copy_of_an_encoder_has_its_own_name(counted, subject):
    calls, part = counted
    run_benchmark(part, subject)
    found = run_benchmark(part, replace(subject, name="copy"))
    assert len(calls) == 1
    assert {found["model"], *(score["model"] for score in found["scores"].values())} == {"copy"}


def test_distractors_do_not_name_the_model(data, subject):
    (part, *_), _ = find_benchmarks(data, ["xsim++"], SETTINGS)
    (score, *_) = run_benchmark(part, subject)["scores"].values()
    assert score["model"] == subject.name


@pytest.mark.parametrize("suite", ["mteb", "nli", "qa", "sib200"])
def test_suites_that_compute_in_bfloat16_take_the_option(suite):
    assert EvaluateOptions(model="m", data="d", suite=suite, bf16=True).check() == []


def test_tasks_of_mteb_in_bfloat16_are_cached_apart(data, subject):
    for part in find_benchmarks(data, ["mteb"], SETTINGS)[0]:
        assert cache_path(part, subject) != cache_path(part, replace(subject, settings=replace(SETTINGS, bf16=True)))


def test_unavailable_benchmarks_are_not_cached(counted, subject):
    _, part = counted

    def nothing(subject):
        raise DataUnavailable("the Hub does not answer")

    broken = replace(part, measure=nothing)
    with pytest.raises(DataUnavailable, match="does not answer"):
        run_benchmark(broken, subject)
    assert not cache_path(broken, subject).exists()


def test_a_failure_with_local_data_does_not_skip_the_benchmark(data, subject):
    (part, *_), _ = find_benchmarks(data, ["mteb"], SETTINGS)
    (subject.output / "mteb").parent.mkdir(parents=True)
    (subject.output / "mteb").write_text("not a folder")
    with pytest.raises(OSError, match="mteb"):
        run_benchmark(part, subject)


def test_languages_that_mteb_lacks_are_left_out(data, subject):
    """MTEB has XQuAD in English and German, but not in Swahili."""
    asked = Settings(tasks=["xquad-r"], languages=["sw", "de"])
    ((part,), _) = find_benchmarks(data, ["mteb"], asked)
    assert [path.name for path in part.files] == ["sw.json.gz", "de.json.gz"]
    assert list(run_benchmark(part, subject)["scores"]["mteb xquad-r"]["languages"]) == ["de"]
    ((part,), _) = find_benchmarks(data, ["mteb"], replace(asked, languages=["sw"]))
    with pytest.raises(DataUnavailable, match=r"XQuADRetrieval has none of the languages sw$"):
        run_benchmark(part, subject)


def test_the_questions_and_answers_of_mteb_are_those_of_answer_retrieval(data, subject):
    """So that they are embedded once, with the same prompts."""
    subject.model.prompts = {"query": "query: ", "passage": "passage: ", "BitextMining": ""}
    parts, _ = find_benchmarks(data, ["answer-retrieval", "mteb"], Settings(tasks=["xquad-r"], answer_text="sentence"))
    embedded = []
    for part in parts:
        assert describe_protocol(part, subject).endswith("prompt 'query: ', candidates 'passage: '")
        run_benchmark(part, subject)
        embedded.append(set(subject.encode.__self__.rows))
    assert parts[1].work == 0
    assert embedded[0] == embedded[1]


def test_sts22_without_the_hub(data, subject, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    part = next(part for part in find_benchmarks(data, ["sts"], SETTINGS)[0] if part.name == "sts22")
    with pytest.raises(DataUnavailable, match="sts22"):
        run_benchmark(part, subject)


@pytest.fixture
def sts22(bitext, monkeypatch):
    """STS22 with its 18 subsets, in memory."""
    task = mteb.get_task("STS22")
    texts = [row["target"] for row in bitext]
    rows = Dataset.from_dict(
        {"sentence1": texts[:8], "sentence2": texts[1:9], "score": [1.0, 2.0, 3.0, 4.0, 1.5, 2.5, 3.5, 4.0]}
    )
    task.dataset = {subset: DatasetDict({"test": rows}) for subset in task.hf_subsets}
    task.data_loaded = True
    monkeypatch.setattr("metaphrase.evaluation.mteb_tasks.get_tasks", lambda names, languages=None: [task])
    return task


def test_sts22_needs_no_folder(subject, sts22):
    ((part,), missing) = find_benchmarks(None, ["sts"], SETTINGS)
    assert missing["sts"].endswith("(except STS22, whose data are on the Hub)")
    scores = run_benchmark(part, subject)["scores"]["sts22"]
    assert len(scores["languages"]) == 18
    assert {group: row["n"] for group, row in scores["groups"].items()} == {"18": 18, "without fr-pl": 17}
    assert scores["average"]["score"] == scores["groups"]["18"]["score"]


def test_another_version_of_mteb_has_other_data(subject, sts22, monkeypatch):
    ((part,), _) = find_benchmarks(None, ["sts"], SETTINGS)
    before = cache_path(part, subject)
    monkeypatch.setattr("metaphrase.evaluation.suites.running.version", lambda name: "99")
    assert cache_path(part, subject) != before


def test_sts22_as_a_task_of_mteb_has_its_averages(subject, sts22):
    ((part,), _) = find_benchmarks(None, ["mteb"], Settings(tasks=("STS22",)))
    scores = run_benchmark(part, subject)["scores"]["mteb STS22"]
    assert {group: row["n"] for group, row in scores["groups"].items()} == {"18": 18, "without fr-pl": 17}
    others = [row["score"] for subset, row in scores["languages"].items() if subset != "fr-pl"]
    assert scores["groups"]["without fr-pl"]["score"] == pytest.approx(np.mean(others))


def test_without_a_folder_only_hub_benchmarks_are_found():
    parts, missing = find_benchmarks(None, list(SUITES), SETTINGS)
    assert [part.name for part in parts] == ["sts22"]
    assert set(missing) == set(SUITES)


def test_speed_is_measured(tiny_encoder):
    assert 0 < encoding_speed(tiny_encoder) < 1


# --- Before and after ---


def finetuned(right):
    items = {"en": [1] * right + [0] * (40 - right), "sw": [0, 1] * 20}
    languages = {
        language: {"n": 40, "items": scores, "metrics": {"accuracy": 100 * sum(scores) / 40}}
        for language, scores in items.items()
    }
    data = {"test": {language: {"sha256": "x"} for language in items}}
    return {"languages": languages, "data": data, "average": {"accuracy": 50.0}}


def compared_finetuned(before, after):
    sides = [finetuned_results("xnli", found)["xnli accuracy"] for found in (before, after)]
    return compare(*sides, resamples=500)


def test_fine_tuned_models_are_compared_by_items():
    compared = compared_finetuned(finetuned(10), finetuned(35))
    assert {language: row["verdict"] for language, row in compared["languages"].items()} == {
        "en": "better",
        "sw": "tie",
    }
    assert compared["languages"]["en"]["difference"] == pytest.approx(62.5)
    assert compared["languages"]["en"]["before"] == 25
    assert compared["pooled"]["verdict"] == "better"
    assert compared_finetuned(finetuned(35), finetuned(10))["pooled"]["verdict"] == "worse"
    other = finetuned(10)
    other["data"]["test"]["sw"]["sha256"] = "y"
    with pytest.raises(ValueError, match="'sw' are over different items"):
        compared_finetuned(other, finetuned(10))


def of_runs(right, spread):
    """Two languages, fine-tuned several times; the runs differ by ``spread``."""
    found = finetuned(right)
    for row in found["languages"].values():
        row["run_scores"] = [row["metrics"]["accuracy"] + one for one in spread]
    return found


def test_the_variation_between_runs_widens_the_interval():
    plain = compared_finetuned(finetuned(10), finetuned(20))
    assert "runs" not in plain["pooled"]
    assert plain["pooled"]["verdict"] == "better"
    single = compared_finetuned(of_runs(10, [0]), of_runs(20, [0]))
    assert single["pooled"] == plain["pooled"] | {"runs": 1}
    assert verdict_shown(single["pooled"]) == verdict_shown(single["languages"]["en"]) == "one run"
    equal = compared_finetuned(of_runs(10, [1, 2, 3]), of_runs(20, [1, 2, 3]))  # every run differs by the same points
    assert equal["pooled"] == plain["pooled"] | {"runs": 3}
    assert verdict_shown(equal["pooled"]) == "better"
    noisy = compared_finetuned(of_runs(10, [0, 0, 0]), of_runs(20, [-10, 0, 10]))
    assert noisy["pooled"]["difference"] == plain["pooled"]["difference"]
    assert noisy["pooled"]["verdict"] == noisy["languages"]["en"]["verdict"] == "tie"
    low, high = noisy["pooled"]["interval"]
    assert (high - low) / 2 == pytest.approx(4.303 * 10 / 3**0.5, rel=0.25)  # Student's t with 2 degrees of freedom
    with pytest.raises(ValueError, match="1 before, 3 after"):
        compared_finetuned(of_runs(10, [0]), of_runs(20, [0, 0, 0]))


def aligned(right):
    counts = [[2, 2, 2, 2]] * right + [[2, 2, 0, 0]] * (40 - right)
    gold = Measurement(40, 100 - 2.5 * right, None, "x", {"counts": counts})
    average = Measurement(1, gold.score)
    return Result("word-alignment", "m", "AER", {"gold": gold}, average, statistic="error_rate", lower_is_better=True)


def test_a_lower_error_rate_is_better():
    better = compare(aligned(10), aligned(30), resamples=500)
    assert better["pooled"]["difference"] == -50
    assert better["pooled"]["interval"][1] < 0
    assert better["languages"]["gold"]["verdict"] == better["pooled"]["verdict"] == "better"
    assert compare(aligned(30), aligned(10), resamples=500)["pooled"]["verdict"] == "worse"


def test_an_xsim_error_that_falls_is_better(tiny_encoder):
    sets = {"sw": ParallelSet("sw", tuple(f"s{i}" for i in range(60)), tuple(f"t{i}" for i in range(60)))}
    table = np.random.default_rng(0).normal(size=(60, 30))

    def score(found):
        def encode(texts, **options):
            rows = [int(text[1:]) for text in texts]
            moved = [text[0] == "s" and row >= found for text, row in zip(texts, rows, strict=True)]
            return np.array([table[(row + shift) % 60] for row, shift in zip(rows, moved, strict=True)])

        result = evaluate_retrieval(tiny_encoder, sets, resamples=50, margin_k=4, encode=encode)
        return xsim_error(result).to_dict()

    weak, strong = score(10), score(60)
    assert strong["average"]["score"] == 0
    assert weak["average"]["score"] > 50
    assert weak["languages"]["sw"]["interval"][0] <= weak["average"]["score"] <= weak["languages"]["sw"]["interval"][1]
    compared = compare_scores({"x": weak}, {"x": strong}, resamples=500, seed=0)["x"]
    assert compared["pooled"]["verdict"] == "better"
    assert compared["pooled"]["difference"] == pytest.approx(-weak["average"]["score"])
    assert compared["pooled"]["interval"][1] < 0
    assert compared["languages"]["sw"]["before"] == pytest.approx(weak["average"]["score"])


def test_results_that_were_read_from_files_can_be_compared(data, subject):
    parts = find_benchmarks(
        data, ["retrieval", "sts", "mining", "answer-retrieval", "word-alignment", "mteb"], SETTINGS
    )[0]
    scores = {}
    for part in parts:
        if part.files:
            scores |= run_benchmark(part, subject)["scores"]
    compared = compare_scores(scores, json.loads(json.dumps(scores)), resamples=50, seed=0)
    assert {name for name, one in scores.items() if one["statistic"] in MEASURES} == set(compared)
    assert {one["statistic"] for one in scores.values()} == {None, *MEASURES} - {"items", "chunk_f1"}
    for one in compared.values():
        assert {row["verdict"] for row in one["languages"].values()} == {"tie"}
        assert one["pooled"]["verdict"] == "tie"
        assert {"before", "after", "difference", "interval", "p_value"} <= one["pooled"].keys()


def test_other_margins_are_not_compared(tiny_encoder):
    sets = {"sw": ParallelSet("sw", ("a", "b"), ("c", "d"))}
    one, other = (evaluate_retrieval(tiny_encoder, sets, resamples=2, margin_k=k) for k in (None, 4))
    with pytest.raises(ValueError, match="differ in margin_k: None before, 4 after"):
        compare(one, other)


@pytest.fixture
def earlier(data, subject):
    """Parts of an earlier evaluation, by name."""
    parts = {part.name: part for part in find_benchmarks(data, ["retrieval"], SETTINGS)[0]}
    return {name: run_benchmark(part, subject) for name, part in parts.items()}


def test_other_data_are_detected_before_they_are_measured(data, earlier, bitext):
    def found(samples=None, **settings):
        return differences(earlier, find_benchmarks(data, ["retrieval"], Settings(**settings), samples)[0])

    assert found() == {}
    assert found(languages=["de"]) == {}  # of which the baseline has more
    small = {"tatoeba": QUICK["retrieval"]._replace(items=5, languages=None)}
    (reason,) = found(small).values()
    assert reason == "of which the baseline has all items, and this evaluation the first 5 items of each language"
    spread = {"tatoeba": QUICK["retrieval"]._replace(items=5, languages=None, spread=True)}
    (reason,) = found(spread).values()
    assert reason.endswith("this evaluation 5 items of each language, evenly spaced")
    assert list(found(split="train")) == ["news"]
    assert "other files (de-en.test.tsv.gz instead of de-en.train.tsv.gz" in found(split="train")["news"]
    write_pairs(data / "news" / "de-en.test.tsv.gz", bitext[:5])
    assert list(found()) == ["news"]
    assert "have changed" in found()["news"]


def test_a_result_that_cannot_be_compared_is_skipped(earlier):
    before = {name: score for part in earlier.values() for name, score in part["scores"].items()}
    after = copy.deepcopy(before)
    after["news"]["languages"]["de"]["sha256"] = "other"
    notes = []
    compared = compare_scores(before, after, resamples=50, seed=0, note=notes.append)
    assert set(compared) == {"news xsim", "tatoeba", "tatoeba xsim"}
    assert ["Not compared: news. " in note and "'de' are over different items" in note for note in notes] == [True]


# --- Time left ---


@pytest.fixture
def clock(monkeypatch):
    """A clock that only benchmarks move, by as many seconds as their name says."""
    now = [0.0]
    monkeypatch.setattr("metaphrase.evaluation.suites.running.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("metaphrase.evaluation.suites.running.encoding_speed", lambda model, **options: 1.0)
    return now


def test_a_quick_failure_does_not_shorten_the_estimate(subject, tmp_path, clock):
    file = tmp_path / "file"
    file.write_text("data")

    def benchmark(name, seconds, error=None):
        def measure(subject):
            clock[0] += seconds
            if error:
                raise error
            return {name: Result("retrieval", name, "m", {"a": Measurement(1, 50.0)}, Measurement(1, 50.0))}

        return Benchmark(name, "retrieval", "p", (file,), 100, measure)

    benchmarks = [
        benchmark("broken", 1, ValueError("x")),
        benchmark("missing", 1, DataUnavailable("x")),
        benchmark("slow", 200),
        benchmark("last", 200),
    ]
    notes = []
    measure_all(benchmarks, subject, {}, notes.append)
    left = [note.partition("about ")[2].partition(" left")[0] for note in notes if "about " in str(note)]
    assert left == ["7 minutes", "5 minutes", "3 minutes", "3 minutes"]
    notes.clear()
    measure_all(benchmarks[2:], subject, {}, notes.append)
    assert notes[1] == f"[1/2] {subject.name}: retrieval, slow …"
    assert notes[2] == "  slow m 50.0 (cached)"


# --- Names, languages and files ---


def test_data_sets_with_the_same_name_are_refused(data, monkeypatch):
    (data / "tatoeba" / "stsb-de-test.csv").write_text("a,b,1\nc,d,2\n")
    with pytest.raises(ValueError, match="Two data sets are called 'tatoeba'"):
        find_benchmarks(data, ["retrieval", "sts"], SETTINGS)
    (data / "gold" / "test.eng.deu.wa").write_text("1 1 1\n")
    with pytest.raises(ValueError, match="Two data sets are called 'gold'"):
        find_benchmarks(data, ["word-alignment"], SETTINGS)


def test_names_of_the_working_folder_and_of_links(data, monkeypatch):
    monkeypatch.chdir(data / "stsb")
    assert find_benchmarks(Path(), ["sts"], SETTINGS)[0][0].name == "stsb"
    (data.parent / "linked").mkdir()
    (data / "sib200").rename(data.parent / "other")
    (data.parent / "linked" / "sib200").symlink_to(data.parent / "other")
    assert find_benchmarks(data.parent / "linked", ["sib200"], SETTINGS)[0][0].name == "sib200"


def test_persian_is_not_dari(tmp_path):
    write_topics(tmp_path / "sib200", ("eng_Latn", "nob_Latn", "pes_Arab", "prs_Arab"))
    named = {
        "fa": "pes_Arab",
        "pes_Arab": "pes_Arab",
        "prs_Arab": "prs_Arab",
        "no": "nob_Latn",
        "nob_Latn": "nob_Latn",
    }
    for asked, code in named.items():
        (part,) = find_benchmarks(tmp_path, ["sib200"], Settings(languages=[asked]))[0]
        assert {path.name.partition(".")[0] for path in part.files} == {"eng_Latn", code}


def test_languages_that_a_folder_lacks_have_a_warning(data, caplog):
    """One for each folder, although several suites read it."""
    settings = Settings(languages=["sw", "ee", "prs_Arab", "en"])
    find_benchmarks(data, ["retrieval", "sts", "mining", "sib200", "xsim++", "paraphrase", "mteb"], settings, QUICK)
    warned = Counter(record.getMessage() for record in caplog.records)
    absent = {"tatoeba": "ee, prs_Arab", "news": "sw, ee, prs_Arab", "sib200": "prs_Arab"}
    absent |= dict.fromkeys(("stsb", "bucc", "pawsx"), "sw, ee, prs_Arab") | {"xquad-r": "ee, prs_Arab"}
    assert warned == {f"{data / name} has no data in {languages}.": 1 for name, languages in absent.items()}


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("pt_BR", ["pt_BR"]),
        ("pt-br", ["pt_BR"]),
        ("pt", ["pt_BR", "pt_PT"]),
        ("zh_TW", ["zh_TW"]),
        ("zh-Hant", ["zh_TW"]),
        ("por", ["pt_BR", "pt_PT"]),
    ],
)
def test_regions_are_told_apart(code, names, tmp_path):
    folder = tmp_path / "news"
    folder.mkdir()
    for name in ("pt_BR", "pt_PT", "zh_CN", "zh_TW"):
        (folder / f"{name}-en.tsv").write_text(f"source\ttarget\n{name}\tone\n")
    assert list(parallel_folders(folder, Settings(languages=[code]))["news"].files) == names
    assert list(parallel_files(folder, [code], None)) == names
    assert [one.sources for one in load_parallel_folder(folder, [code]).values()] == [(name,) for name in names]


def test_trained_languages_by_any_code(tmp_path, caplog):
    write_topics(tmp_path / "sib200", ("eng_Latn", "ceb_Latn", "tat_Cyrl", "swh_Latn"))
    assert language_groups(["ceb_Latn", "tat_Cyrl", "swh_Latn"], ["ceb", "tt"])["trained"] == ["ceb_Latn", "tat_Cyrl"]
    find_benchmarks(tmp_path, ["sib200"], Settings(trained_languages=["ceb", "tt", "sw", "en", "yo"]))
    assert [record.getMessage() for record in caplog.records] == [
        "--trained_languages has languages without data in SIB-200: yo."
    ]


def test_quick_takes_the_languages_that_a_flat_folder_has(data):
    (part,) = find_benchmarks(data / "tatoeba", ["retrieval"], SETTINGS, QUICK)[0]
    assert [path.name for path in part.files] == ["de-en.tsv.gz", "sw-en.tsv.gz"]
    with pytest.raises(FileNotFoundError, match="no pairs for fr"):
        find_benchmarks(data / "tatoeba", ["retrieval"], Settings(languages=["fr"]), QUICK)


def test_quick_takes_all_languages_of_a_folder_without_its_own(data, bitext):
    """Languages that the sample does not name are no reason to skip a folder, or to deny that it exists."""
    write_pairs(data / "lafand" / "bm-en.test.tsv.gz", bitext[:9])
    write_pairs(data / "lafand" / "ee-en.test.tsv.gz", bitext[9:])
    for folder in (data, data / "lafand"):
        parts, missing = find_benchmarks(folder, ["retrieval"], SETTINGS, QUICK)
        named = {part.name: part for part in parts}
        assert [path.name for path in named["lafand"].files] == ["bm-en.test.tsv.gz", "ee-en.test.tsv.gz"]
        assert "; sample: the first 150 items" in named["lafand"].protocol
        assert not missing


def test_data_that_change_before_their_turn_are_measured_as_they_are(data, subject, bitext):
    part = next(one for one in find_benchmarks(data, ["retrieval"], SETTINGS)[0] if one.name == "tatoeba")
    old = cache_path(part, subject)
    write_pairs(data / "tatoeba" / "de-en.tsv.gz", bitext[2:14])
    assert run_benchmark(part, subject)["scores"]["tatoeba"]["languages"]["de"]["n"] == 12
    assert cache_path(part, subject) != old


def test_files_that_are_added_before_their_turn_are_not_measured(data, subject, bitext):
    parts = {one.name: one for one in find_benchmarks(data, ["retrieval", "sib200", "xsim++"], SETTINGS)[0]}
    keys = {name: cache_path(part, subject) for name, part in parts.items()}
    write_pairs(data / "tatoeba" / "fr-en.tsv.gz", bitext[:5])
    write_topics(data / "sib200", splits=[("train", 30), ("dev", 12), ("test", 9)])
    for name in ("tatoeba", "tatoeba xsim++"):
        (result, *_) = run_benchmark(parts[name], subject)["scores"].values()
        assert list(result["languages"]) == ["de", "sw"]
    for name in ("sib200", "sib200 xsim++"):
        for result in run_benchmark(parts[name], subject)["scores"].values():
            assert {one["n"] for one in result["languages"].values()} <= {12, 42}
    assert keys == {name: cache_path(part, subject) for name, part in parts.items()}


@pytest.mark.parametrize("transfer", ["probe", "finetune"])
def test_a_treebank_that_is_added_before_its_turn_is_not_measured(data, subject, bitext, transfer):
    write_treebanks(data, bitext, lambda word, at: UPOS[at % 5], sides=("source", "target"))
    settings = Settings(transfer=transfer, finetuning={"use_cpu": True, "max_steps": 1, "max_length": 64})
    subject = replace(subject, settings=settings)
    (part,) = find_benchmarks(data, ["pos"], settings)[0]
    key = cache_path(part, subject)
    for added in ("de_gsd-ud-test", "en_gum-ud-dev"):
        shutil.copy(data / "ud" / "de_pud-ud-test.conllu.gz", data / "ud" / f"{added}.conllu.gz")
    (result, *_) = run_benchmark(part, subject)["scores"].values()
    assert result["languages"]["de"]["n"] == len(bitext)
    assert cache_path(part, subject) == key


def test_data_that_change_while_they_are_measured_are_refused(counted, subject):
    _, part = counted

    def measure(subject):
        part.files[0].write_text("other")
        return part.measure(subject)

    with pytest.raises(CorpusError, match="file changed while it was in use"):
        run_benchmark(replace(part, measure=measure), subject)
    assert not list(subject.output.rglob("*.json"))


def test_fine_tuning_does_not_resume_with_other_data(data, tiny_encoder, tiny_encoder_dir, tmp_path, monkeypatch):
    folders = []

    def task(options, arguments):
        folders.append(arguments.output_dir)
        raise KeyboardInterrupt

    monkeypatch.setitem(FINETUNED, "pawsx", replace(FINETUNED["pawsx"], task=task))
    settings = Settings(transfer="finetune", finetuning={"use_cpu": True})
    subject = Subject(str(tiny_encoder_dir), tiny_encoder, tmp_path / "kept", settings)
    for label in "01":
        (part,) = find_benchmarks(data, ["paraphrase"], settings)[0]
        with pytest.raises(KeyboardInterrupt):
            run_benchmark(part, subject)
        write_lines(data / "pawsx" / "dev-en.tsv.gz", (f"a {at}\tb {at}\t{label}" for at in range(24)))
    assert len(set(folders)) == 2


def test_sts_reads_only_the_chosen_languages(data, subject):
    write_lines(data / "stsb" / "fr-test.csv.gz", ["not,three"])
    (part, *_) = find_benchmarks(data, ["sts"], replace(SETTINGS, languages=["de"]))[0]
    assert [path.name for path in part.files] == ["stsb-de-test.csv.gz", "stsb-en-test.csv.gz"]
    assert list(run_benchmark(part, subject)["scores"]) == ["stsb", "stsb cross-lingual"]
    (whole, *_) = find_benchmarks(data, ["sts"], SETTINGS)[0]
    assert [path.name for path in whole.files][-1] == "fr-test.csv.gz"


@pytest.mark.parametrize(
    ("suite", "one", "other"),
    [
        ("sib200", "sib200/eng_Latn.dev.tsv", "sib200/eng_Latn.dev.tsv.gz"),
        ("answer-retrieval", "xquad-r/en.json", "xquad-r/en.json.gz"),
    ],
)
def test_two_files_of_a_language_are_refused(data, suite, one, other):
    for name in (one, other):
        if not (data / name).exists():
            (data / name).write_bytes(b"")
    with pytest.raises(ValueError, match="only one can be read"):
        find_benchmarks(data, [suite], SETTINGS)


def test_the_files_of_a_task_are_those_that_it_reads(data, bitext):
    questions = json.dumps({"data": []})
    for name in ("xquad.en.json", "dev-de.json", "train-en.json", "dev-notes.json"):
        _made(data / "xquad" / name).write_text(questions)
    (part,) = find_benchmarks(data, ["qa"], SETTINGS)[0]
    assert [path.name for path in part.files] == ["dev-de.json", "xquad.en.json"]


def test_english_may_have_a_treebank_for_training_alone(data, subject, bitext):
    write_treebanks(data, bitext, lambda word, at: UPOS[at % 5], sides=("source", "target"))
    (data / "ud" / "en_ewt-ud-test.conllu.gz").unlink()
    (part,) = find_benchmarks(data, ["pos"], SETTINGS)[0]
    assert list(run_benchmark(part, subject)["scores"]["ud probe f1"]["languages"]) == ["de"]


def test_a_failure_of_any_variant_is_kept():
    one = {"scores": {}, "failed": {}, "parts": {}, "settings": {}}
    assert stronger([one, one | {"failed": {"b": "x"}}])["failed"] == {"b": "x"}


def test_a_probe_of_pairs_reads_both_embeddings_their_difference_and_their_product(monkeypatch):
    embedding = {"a": [3.0, 4.0], "b": [0.0, 2.0]}
    monkeypatch.setattr(frozen, "encode_texts", lambda model, texts, **_: np.array([embedding[one] for one in texts]))
    fitted = []
    probe = Mock(predict=lambda rows: np.zeros(len(rows), dtype=int))
    monkeypatch.setattr(frozen, "_fit", lambda features, labels, c: fitted.append((features, labels, c)) or probe)
    pairs = [{"sentence1": "a", "sentence2": "b", "label": 0}, {"sentence1": "b", "sentence2": "a", "label": 1}]
    data = {"en": Dataset.from_list(pairs)}
    scores = frozen.probe_pairs(PARAPHRASES, TransferData(data, {}, data), Mock(), {})
    ((features, labels, c),) = fitted
    half = [0.6, 0.2, 0.0, 0.8]  # |u − v| and u ∗ v are the same in both orders
    np.testing.assert_allclose(features, [[0.6, 0.8, 0.0, 1.0, *half], [0.0, 1.0, 0.6, 0.8, *half]])
    assert (list(labels), c, scores["en"].metrics) == ([0, 1], frozen.C["pairs"], {"accuracy": 50.0})


def test_a_probe_of_tags_reads_the_last_layer_and_misses_words_that_are_cut(tiny_encoder, monkeypatch):
    tiny_encoder.max_seq_length = 6
    layers, real = [], EmbeddingAligner
    monkeypatch.setattr(
        frozen, "EmbeddingAligner", lambda model, **options: layers.append(options["layer"]) or real(model, **options)
    )
    rows = [{"words": ["der", "Hund"] * 8, "tags": ["NOUN"] * 16}, {"words": ["die", "Katze"], "tags": ["VERB"] * 2}]
    data = {"en": Dataset.from_list(rows)}
    scores = frozen.probe_tags(TransferData(data, {}, data), tiny_encoder, {"batch_size": 4})
    assert layers == [tiny_encoder[0].auto_model.config.num_hidden_layers] == [2]
    states = real(tiny_encoder).word_states([Words.of(" ".join(row["words"])) for row in rows])
    kept = sum(len(words) for words, _ in states)
    assert 3 <= kept < 10
    assert scores["en"].metrics["accuracy"] <= 100 * kept / 18


def test_links_are_tuned_on_the_first_fifth_and_scored_on_the_others(data, subject, bitext, monkeypatch):
    """Those of other programs too, which may change without a change of the data."""
    folder, fifth, tuned_on = data / "alignment-gold", len(bitext) // 5, []
    folder.mkdir()
    (folder / "deen.src-tgt").write_text("".join(f"{row['source']} ||| {row['target']}\n" for row in bitext))
    (folder / "deen.gold").write_text("1-1 2p2\n" * len(bitext))
    (folder / "deen.peer.out").write_text("0-1\n" * fifth + "0-0 1-1\n" * (len(bitext) - fifth))
    tune = word_alignment.tune_rule
    monkeypatch.setattr(
        word_alignment,
        "tune_rule",
        lambda model, pairs, **_: tuned_on.append(len(pairs)) or tune(model, pairs),
    )
    part, _ = find_benchmarks(data, ["word-alignment"], SETTINGS)[0]
    earlier = run_benchmark(part, subject)
    plain, tuned = earlier["scores"].values()
    assert tuned_on == [fifth]
    assert plain["facts"]["peers"]["deen.peer.out"] > 0
    assert tuned["facts"]["peers"] == {"deen.peer.out": 0.0}
    (folder / "deen.peer.out").write_text("0-0\n" * len(bitext))
    assert differences({part.name: earlier}, [part]) == {}


def test_topics_of_a_sample_are_learned_from_all_sentences(data, subject, monkeypatch):
    sizes, result = [], Result("sib200", "x", "m", {}, Measurement(1, 50.0))
    monkeypatch.setattr("metaphrase.evaluation.suites.sib200.evaluate_retrieval", lambda *_, **options: result)
    monkeypatch.setattr(
        sib200,
        "evaluate_topics",
        lambda model, sets, *, train, **_: sizes.append((len(sets["eng_Latn"].texts), len(train.texts))) or result,
    )
    samples = {None: {}, 2: {"sib200": Sample(2, 1)}}
    for sample in samples.values():
        (part,) = find_benchmarks(data, ["sib200"], SETTINGS, sample)[0]
        part.measure(subject)
    (whole, train), (some, again) = sizes
    assert some < whole == train == again


def test_the_best_encoder_comes_first_also_if_a_score_is_an_error(tmp_path, monkeypatch):
    def scored(name, accuracy, error):
        scores = {"a": (accuracy, False), "b": (error, True)}
        found = {
            key: {"average": {"score": score}, "measure": "m", "lower_is_better": lower}
            for key, (score, lower) in scores.items()
        }
        return {"model": name, "scores": found}

    monkeypatch.setattr(running, "_evaluate", lambda *_: [scored("x", 50, 30), scored("y", 60, 20)])
    rows = evaluate_models(EvaluateOptions(model="x", also=["y"], data="d", output_dir=str(tmp_path))).rows
    assert [(row.data, row.model) for row in rows] == [("a", "y"), ("a", "x"), ("b", "y"), ("b", "x")]


def test_an_encoder_with_shorter_embeddings_is_another_subject(subject, tiny_encoder_dir, tmp_path):
    shorter = copy.deepcopy(subject.model)
    shorter.truncate_dim = 8
    other = Subject(str(tiny_encoder_dir), shorter, tmp_path / "kept", SETTINGS)
    assert other.sha == subject.sha
    assert other.folder != subject.folder
