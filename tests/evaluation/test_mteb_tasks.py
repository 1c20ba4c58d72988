import csv
import gzip
import io
import json
from contextlib import redirect_stderr

import mteb
import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from mteb.languages.check_language_code import check_language_code
from rich.console import Console

from metaphrase.corpus.parallel import ParallelSet
from metaphrase.encoders.loading import load_encoder
from metaphrase.evaluation import mteb_tasks
from metaphrase.evaluation.answer_retrieval import evaluate_answer_retrieval, load_answer_folder
from metaphrase.evaluation.encoding import prepare
from metaphrase.evaluation.mteb_tasks import (
    answer_task,
    bitext_task,
    evaluate_mteb,
    get_tasks,
    language_script,
    model_meta,
    mteb_languages,
    sts_sets,
    topic_task,
)
from metaphrase.evaluation.retrieval import evaluate_retrieval
from metaphrase.evaluation.sib200 import load_topic_folder, topic_pairs
from metaphrase.evaluation.sts import STS22_GROUPS, STS22_SUBSETS, STSSet, evaluate_sts
from metaphrase.exceptions import MissingFileError
from metaphrase.io.digests import encoder_digest, files_sha256, model_hash
from metaphrase.io.progress import progress_bars
from tests.evaluation.test_answer_retrieval import write_answers
from tests.evaluation.test_sib200 import write_topics


@pytest.fixture
def sets(bitext):
    rows = bitext[:16]
    return {
        language: ParallelSet(
            language,
            tuple(row["target"] + "!" if number % 3 else row["source"] for number, row in enumerate(rows[at:])),
            tuple(row["target"] for row in rows[at:]),
        )
        for at, language in enumerate(("sw", "zh-Hant", "ja"))
    }


@pytest.fixture
def sts22(bitext):
    """STS22 with its 18 subsets, in memory."""
    with_scores = mteb.get_task("STS22")
    texts = [row["target"] for row in bitext]
    rng = np.random.default_rng(0)
    with_scores.dataset = {}
    for subset in with_scores.hf_subsets:
        n = int(rng.integers(8, 20))
        first, shift = rng.integers(len(texts), size=n), rng.integers(1, len(texts), size=n)
        rows = {
            "sentence1": [texts[i] for i in first],
            "sentence2": [texts[i] for i in (first + shift) % len(texts)],
            "score": rng.choice([1.0, 2.0, 2.5, 4.0], size=n).tolist(),
        }
        with_scores.dataset[subset] = DatasetDict({"test": Dataset.from_dict(rows)})
    with_scores.data_loaded = True
    return with_scores


# --- Who a model is ---


def test_a_digest_depends_on_the_content_of_a_model(tiny_encoder, tiny_encoder_dir, tmp_path):
    from sentence_transformers import SentenceTransformer

    before = model_hash(tiny_encoder)
    tiny_encoder.save_pretrained(str(tmp_path / "copy"))
    copy = SentenceTransformer(str(tmp_path / "copy"), device="cpu", model_kwargs={"add_pooling_layer": False})
    assert model_hash(copy) == before
    assert len(before) == 32
    assert model_hash(prepare(tiny_encoder, pooling="mean")) != before
    assert model_hash(prepare(tiny_encoder, max_length=9)) != before
    assert model_hash(prepare(tiny_encoder, layer=1)) != before
    with torch.no_grad():
        tiny_encoder[0].auto_model.encoder.layer[0].output.dense.bias[0] += 1e-4
    assert model_hash(tiny_encoder) != before


def test_a_digest_of_an_encoder_depends_on_its_architecture(tiny_encoder, tmp_path):
    before = encoder_digest(tiny_encoder)
    tiny_encoder.save_pretrained(str(tmp_path / "copy"))
    assert encoder_digest(load_encoder(tmp_path / "copy")) == before
    config = tmp_path / "copy" / "config.json"
    content = json.loads(config.read_text())
    for changed in ({"hidden_act": "relu"}, {"num_attention_heads": content["num_attention_heads"] // 2}):
        config.write_text(json.dumps(content | changed))
        assert encoder_digest(load_encoder(tmp_path / "copy")) != before
    config.write_text(
        json.dumps(content | {"architectures": ["Other"], "use_cache": False, "hidden_dropout_prob": 0.3})
    )
    assert encoder_digest(load_encoder(tmp_path / "copy")) == before


def test_a_digest_of_files_is_of_names_and_contents(tmp_path):
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").write_text("y")
    both = files_sha256([tmp_path / "b", tmp_path / "a"])
    assert both == files_sha256([tmp_path / "a", tmp_path / "b"])
    (tmp_path / "a").write_text("y")
    (tmp_path / "b").write_text("x")
    assert files_sha256([tmp_path / "a", tmp_path / "b"]) != both


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("starter", "local/starter"),
        ("intfloat/multilingual-e5-small", "intfloat/multilingual-e5-small"),
        ("/somewhere/out/sw/", "local/sw"),
    ],
)
def test_names(tiny_encoder, name, expected):
    meta = model_meta(tiny_encoder, name)
    assert (meta.name, meta.revision) == (expected, encoder_digest(tiny_encoder))


def test_a_prompt_is_a_separate_experiment(tiny_encoder):
    tiny_encoder.prompts = {"query": "query: ", "passage": "passage: "}
    plain, auto, other = (model_meta(tiny_encoder, "m", prompt) for prompt in (None, "auto", "query: "))
    assert plain.experiment_name is None
    assert len({plain.experiment_name, auto.experiment_name, other.experiment_name}) == 3
    names = {auto.experiment_name}
    for prompts in (
        {"query": "query: "},  # passages have none
        {"query": "query: ", "passage": "passage: ", "BitextMining": ""},
        {"query": "passage: ", "passage": "query: "},
    ):
        tiny_encoder.prompts = prompts
        names |= {model_meta(tiny_encoder, "m", prompt).experiment_name for prompt in ("auto", "query: ")}
    assert len(names) == 5


# --- Languages ---


def test_language_codes():
    assert mteb_languages(["zh", "swh-Latn", "deu"]) == ["zho", "cmn", "swh-Latn", "deu"]
    with pytest.raises(ValueError, match="Unknown language 'xx'"):
        mteb_languages(["xx"])


@pytest.mark.parametrize(
    ("language", "expected"),
    [
        ("sw", "swa-Latn"),
        ("ru", "rus-Cyrl"),
        ("hi", "hin-Deva"),
        ("ja", "jpn-Jpan"),
        ("ko", "kor-Kore"),
        ("zh", "zho-Hans"),
        ("zh-Hant", "zho-Hant"),
        ("ceb", "ceb-Latn"),
        ("bo", "bod-Tibt"),
        ("en", "eng-Latn"),
        ("ace_Arab", "ace-Arab"),
    ],
)
def test_scripts(language, expected):
    assert language_script(language) == expected
    check_language_code(expected)


# --- Our sets as tasks ---


def letters(texts, **options):
    """Texts of like letters are near each other."""
    table = np.random.default_rng(0).normal(size=(1024, 12))
    return np.array([np.mean([table[ord(char) % 1024] for char in text], axis=0) for text in texts], dtype=np.float32)


def constant(texts, **options):
    """All texts have the same embedding."""
    return np.ones((len(texts), 3), dtype=np.float32)


def test_local_sets_score_as_in_retrieval(tiny_encoder, sets, tmp_path):
    task = bitext_task("udhr-bitext", sets)
    (result,) = evaluate_mteb(tiny_encoder, [task], tmp_path, name=f"{tmp_path}/sw", encode=letters).values()
    assert list(result.languages) == ["sw-en", "en-sw", "zh-Hant-en", "en-zh-Hant", "ja-en", "en-ja"]
    ours = evaluate_retrieval(tiny_encoder, sets, resamples=2, encode=letters).to_dict()
    path = tmp_path / result.facts["file"]
    assert path.relative_to(tmp_path).parts == (
        "results",
        "local__sw",
        encoder_digest(tiny_encoder),
        "udhr-bitext.json",
    )
    rows = {row["hf_subset"]: row for row in json.loads(path.read_text())["scores"]["test"]}
    for language in sets:
        for subset, direction in ((f"{language}-en", "source_to_target"), (f"en-{language}", "target_to_source")):
            accuracy = ours["languages"][language][direction]["accuracy"]
            assert 100 * rows[subset]["accuracy"] == pytest.approx(accuracy, abs=1e-3)
            assert result.languages[subset].score == pytest.approx(100 * rows[subset]["f1"], abs=1e-3)
    assert rows["sw-en"]["languages"] == ["swa-Latn", "eng-Latn"]
    assert 0 < result.average.score < 100
    assert result.measure == "f1"


def test_two_checkpoints_never_share_a_result(tiny_encoder, sets, tmp_path):
    first = evaluate_mteb(tiny_encoder, [bitext_task("t", sets)], tmp_path, name="base", encode=letters)["t"]
    with torch.no_grad():
        for layer in tiny_encoder[0].auto_model.encoder.layer:
            layer.output.dense.weight.normal_()
    second = evaluate_mteb(tiny_encoder, [bitext_task("t", sets)], tmp_path, name="base", encode=constant)["t"]
    assert first.facts["revision"] != second.facts["revision"]
    assert first.average != second.average
    assert len(list(tmp_path.rglob("t.json"))) == 2


def test_cached_results_are_reused_unless_the_data_change(tiny_encoder, sets, tmp_path):
    encoded = []

    def encode(texts, **options):
        encoded.extend(texts)
        return tiny_encoder.encode(texts, **options)

    def measure(sets):
        encoded.clear()
        return evaluate_mteb(tiny_encoder, [bitext_task("t", sets)], tmp_path, name="m", encode=encode)["t"]

    first = measure(sets)
    assert encoded
    again = measure(sets)
    assert not encoded
    assert (again.languages, again.facts) == (first.languages, first.facts)
    sets["sw"] = ParallelSet("sw", sets["sw"].sources[::-1], sets["sw"].targets)
    other = measure(sets)
    assert encoded
    assert other.facts["data_revision"] != first.facts["data_revision"]


def test_prompts_reach_the_encoder(tiny_encoder, sets, tmp_path):
    tiny_encoder.prompts = {"query": "query: ", "passage": "passage: "}
    prompts = set()

    def encode(texts, *, prompt, **options):
        prompts.add(prompt)
        return tiny_encoder.encode(texts, prompt=prompt, **options)

    evaluate_mteb(tiny_encoder, [bitext_task("t", sets)], tmp_path, name="m", prompt="auto", encode=encode)
    assert prompts == {"query: "}
    assert [path.parent.parent.name for path in tmp_path.rglob("t.json")] == ["experiments"]


def test_documents_have_the_passage_prompt(tiny_encoder):
    tiny_encoder.prompts = {"query": "query: ", "passage": "passage: "}
    prompts = []

    def encode(texts, *, prompt, **options):
        prompts.append(prompt)
        return np.zeros((len(texts), 2))

    encoder = mteb_tasks.MTEBEncoder(tiny_encoder, model_meta(tiny_encoder, "m"), prompt="auto", encode=encode)
    for kind in (mteb_tasks.PromptType.query, mteb_tasks.PromptType.document, None):
        encoder.encode([{"text": ["a"]}], task_metadata=None, hf_split="", hf_subset="", prompt_type=kind)
    assert prompts == ["query: ", "passage: ", "query: "]


# --- MTEB's own tasks ---


def test_tasks_by_name_and_language():
    (task,) = get_tasks(["STS22"], ["de", "zh"])
    assert set(task.hf_subsets) == {"de", "de-en", "de-fr", "de-pl", "zh", "zh-en"}
    with pytest.raises(ValueError, match=r"no task 'STS2'.*Did you mean: 'STS2"):
        get_tasks(["STS2"])


def test_unavailable_data_are_named(tiny_encoder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    with pytest.raises(OSError, match="sts22"):
        evaluate_mteb(tiny_encoder, get_tasks(["STS22"], ["de"]), tmp_path, name="m")
    with pytest.raises(OSError, match="sts22"):
        sts_sets(*get_tasks(["STS22"], ["de"]))


def test_sts22_equals_mteb(tiny_encoder, sts22, tmp_path):
    assert tuple(sorted(STS22_SUBSETS)) == tuple(sorted(sts22.hf_subsets))
    sets = sts_sets(sts22)

    # The cosines of the tiny encoder differ by less than float32 tells.
    ours = evaluate_sts(tiny_encoder, sets, groups=STS22_GROUPS, resamples=20, encode=random_rows).to_dict()
    theirs = evaluate_mteb(tiny_encoder, [sts22], tmp_path, name="m", encode=random_rows)["STS22"]
    assert theirs.measure == "cosine_spearman"
    assert set(theirs.languages) == set(STS22_SUBSETS)
    for subset, row in theirs.languages.items():
        assert ours["languages"][subset]["score"] == pytest.approx(row.score, abs=1e-3), subset
    assert ours["groups"]["18"]["score"] == pytest.approx(theirs.average.score, abs=1e-3)
    seventeen = np.mean([row.score for subset, row in theirs.languages.items() if subset != "fr-pl"])
    assert ours["groups"]["without fr-pl"]["score"] == pytest.approx(seventeen, abs=1e-3)


def random_rows(texts, **options):
    """A text has the same random embedding in every call, far from any tie."""
    return np.array([np.random.default_rng([*text.encode()]).normal(size=8) for text in texts], dtype=np.float32)


def with_data(name, data, **chosen):
    """MTEB's own task with data in memory."""
    task = mteb.get_task(name, **chosen)
    task.dataset, task.data_loaded = data, True
    return task


def mteb_scores(model, task, folder, encode=random_rows):
    """The scores of each subset, as MTEB writes them."""
    found = evaluate_mteb(model, [task], folder, name="m", encode=encode)[task.metadata.name]
    rows = json.loads((folder / found.facts["file"]).read_text())["scores"]
    return {row["hf_subset"]: row for split in rows.values() for row in split}


def test_stsb_equals_mteb(tiny_encoder, bitext, tmp_path):
    rng = np.random.default_rng(3)
    rows = {
        "sentence1": [row["source"] for row in bitext],
        "sentence2": [row["target"] for row in bitext],
        "score": rng.choice([0.0, 1.5, 3.0, 5.0], size=len(bitext)).tolist(),
    }
    data = {"de": DatasetDict({"test": Dataset.from_dict(rows)})}
    task = with_data("STSBenchmarkMultilingualSTS", data, hf_subsets=["de"], eval_splits=["test"])
    theirs = mteb_scores(tiny_encoder, task, tmp_path)["de"]
    sets = {"de": STSSet("de", *(tuple(rows[column]) for column in ("sentence1", "sentence2", "score")))}
    ours = evaluate_sts(tiny_encoder, sets, resamples=2, encode=random_rows)
    assert ours.average.score == pytest.approx(100 * theirs["cosine_spearman"], abs=1e-3)


@pytest.mark.parametrize(("name", "subset", "split"), [("Tatoeba", "deu-eng", "test"), ("BUCC.v2", "de-en", "test")])
def test_bitext_mining_equals_mteb(tiny_encoder, sets, tmp_path, name, subset, split):
    one = sets["sw"]
    rows = Dataset.from_dict({"sentence1": list(one.sources), "sentence2": list(one.targets)})
    data = {subset: DatasetDict({split: rows})}
    theirs = mteb_scores(tiny_encoder, with_data(name, data, hf_subsets=[subset]), tmp_path, letters)[subset]
    ours = evaluate_retrieval(tiny_encoder, {"sw": one}, resamples=2, encode=letters)
    accuracy = ours.languages["sw"].details["source_to_target"]["accuracy"]
    assert 0 < accuracy < 100
    assert accuracy == pytest.approx(100 * theirs["accuracy"], abs=1e-3)


def test_answer_retrieval_equals_mteb(tiny_encoder, tmp_path):
    """MTEB's retrieval of XQuAD over the candidates of one language (MRR), and over the pool of all languages (mAP)."""
    answers = load_answer_folder(write_answers(tmp_path / "xquad-r"), ["de", "en"])
    ours = evaluate_answer_retrieval(tiny_encoder, answers, resamples=2, encode=random_rows)
    theirs = mteb_scores(tiny_encoder, answer_task("xquad-r-retrieval", answers), tmp_path)
    assert set(theirs) == {"de", "en"}
    for language, scores in theirs.items():
        mrr = ours["MRR in the question's language"].languages[language].score
        assert 20 < mrr < 100
        assert mrr == pytest.approx(100 * scores["mrr_at_100"], abs=2e-3)

    pool = [(f"{language}-{at}", text) for language, one in answers.items() for at, text in enumerate(one.sentences)]
    asked = answers["de"]
    split = {
        "queries": Dataset.from_dict({"id": list(asked.ids), "text": list(asked.questions)}),
        "corpus": Dataset.from_dict({"id": [id_ for id_, _ in pool], "text": [text for _, text in pool]}),
        "relevant_docs": {
            question: {f"{language}-{one.answers[at]}": 1 for language, one in answers.items()}
            for at, question in enumerate(asked.ids)
        },
        "top_ranked": None,
    }
    task = with_data("XQuADRetrieval", {"de": {"validation": split}}, hf_subsets=["de"])
    theirs = mteb_scores(tiny_encoder, task, tmp_path)["de"]
    assert ours["mAP"].languages["de"].score == pytest.approx(100 * theirs["map_at_100"], abs=2e-3)


def with_meaning(texts, **options):
    """Sentences of SIB-200, here a language, a topic and a number, are near their translations and those of their topic."""
    return random_rows(texts) + np.stack([random_rows(text.split()[1:]).sum(axis=0) for text in texts])


SIB200 = ("eng_Latn", "swh_Latn")


def local_topics(folder, **chosen):
    return topic_task("sib200-classification", load_topic_folder(folder, by_id=False), **chosen)


@pytest.mark.filterwarnings("ignore")  # those of MTEB
@pytest.mark.parametrize(("split", "theirs"), [("test", "test"), ("dev", "validation")])
def test_topics_of_sib200_equal_mteb(tiny_encoder, tmp_path, monkeypatch, split, theirs):
    """MTEB's task with the rows of the files, transformed, embedded and measured by MTEB."""
    folder = write_topics(tmp_path / "sib200", SIB200, (("train", 60), (split, 24)))
    task = with_data("SIB200Classification", {}, hf_subsets=list(SIB200), eval_splits=[theirs])
    for language in SIB200:
        splits = {}
        for ours, name in (("train", "train"), (split, theirs)):
            with gzip.open(folder / f"{language}.{ours}.tsv.gz", "rt", encoding="utf-8") as file:
                splits[name] = Dataset.from_list(list(csv.DictReader(file, delimiter="\t")))
        task.dataset[language] = DatasetDict(splits)
    task.dataset_transform()
    monkeypatch.setattr(tiny_encoder, "encode", with_meaning)
    wrapped = mteb.models.SentenceTransformerEncoderWrapper(tiny_encoder)
    (expected,) = mteb.evaluate(wrapped, task, cache=None, co2_tracker=False).task_results
    expected = {row["hf_subset"]: row for row in expected.scores[theirs]}
    found = mteb_scores(tiny_encoder, local_topics(folder), tmp_path, with_meaning)
    assert found.keys() == expected.keys() == set(SIB200)
    for language, scores in found.items():
        assert 0.5 < scores["accuracy"] < 1
        for one, other in zip(
            (scores, *scores["scores_per_experiment"]),
            (expected[language], *expected[language]["scores_per_experiment"]),
            strict=True,
        ):
            assert [one["accuracy"], one["f1"]] == pytest.approx([other["accuracy"], other["f1"]], abs=1e-6)


def test_retrieval_of_sib200_equals_mteb(tiny_encoder, tmp_path):
    pairs = topic_pairs(load_topic_folder(write_topics(tmp_path / "sib200", SIB200)))
    theirs = mteb_scores(tiny_encoder, bitext_task("sib200-bitext", pairs), tmp_path, with_meaning)
    ours = evaluate_retrieval(tiny_encoder, pairs, resamples=2, encode=with_meaning)
    for language, result in ours.languages.items():
        for subset, direction in ((f"{language}-en", "source_to_target"), (f"en-{language}", "target_to_source")):
            accuracy = result.details[direction]["accuracy"]
            assert 20 < accuracy < 100
            assert accuracy == pytest.approx(100 * theirs[subset]["accuracy"], abs=1e-3)


def test_other_data_of_a_local_task_are_measured_again(tiny_encoder, tmp_path):
    encoded = []

    def encode(texts, **options):
        encoded.extend(texts)
        return with_meaning(texts)

    def measured(task):
        encoded.clear()
        (result,) = evaluate_mteb(tiny_encoder, [task], tmp_path, name="m", encode=encode).values()
        return bool(encoded), result.facts["data_revision"]

    folder = write_topics(tmp_path / "sib200", SIB200)
    answers = load_answer_folder(write_answers(tmp_path / "xquad-r"), ["de", "en"])
    first = [measured(local_topics(folder)), measured(answer_task("answers", answers))]
    again = [measured(local_topics(folder)), measured(answer_task("answers", answers))]
    assert again == [(False, revision) for _, revision in first]
    assert measured(local_topics(folder, first=5))[0]
    write_topics(folder, SIB200, header="index_id\tcategory\ttext", splits=(("train", 33), ("dev", 12)))
    assert measured(local_topics(folder))[0]
    assert measured(answer_task("answers", {"de": answers["de"].chosen(range(2)), "en": answers["en"]}))[0]


def test_languages_that_mteb_lacks(tmp_path):
    answers = load_answer_folder(write_answers(tmp_path / "xquad-r"))
    assert set(answer_task("answers", answers).hf_subsets) == {"de", "en"}
    with pytest.raises(MissingFileError, match=r"MTEB's XQuADRetrieval has none of the languages sw\."):
        answer_task("answers", {"sw": answers["sw"]})


def test_progress_is_shown_though_mteb_is_silenced(tiny_encoder):
    out = io.StringIO()
    encoder = mteb_tasks.MTEBEncoder(
        tiny_encoder, model_meta(tiny_encoder, "m"), encode=lambda texts, **options: np.zeros((len(texts), 2))
    )
    console = Console(file=out, force_terminal=True)
    with progress_bars(True, console) as encoder.begin, redirect_stderr(io.StringIO()):
        rows_nh = encoder.encode([{"text": ["a", "b"]}], task_metadata=None, hf_split="test", hf_subset="de-en")
    assert rows_nh.shape == (2, 2)
    assert "Embedding de-en" in out.getvalue()
