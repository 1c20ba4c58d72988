import gzip
import json

import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from metaphrase.evaluation.answer_retrieval import (
    AnswerRetrievalEvaluator,
    AnswerSet,
    evaluate_answer_retrieval,
    load_answer_folder,
    rank_answers,
    sentence_spans,
)
from metaphrase.evaluation.compare import compare
from metaphrase.exceptions import DataError, DataMismatchError, MissingFileError, NonFiniteError

LANGUAGES = ("de", "en", "sw")


def squad(language, paragraphs):
    """The JSON of XQuAD-R; each paragraph is a list of sentences, and every sentence answers one question."""
    content = []
    for at, sentences in enumerate(paragraphs):
        starts = np.cumsum([0, *(len(one) + 1 for one in sentences)]).tolist()
        questions = [
            {
                "id": f"q{at}.{number}",
                "question": f"{language} question {at}.{number}",
                "answers": [{"text": "x", "answer_start": start + 1}],
            }
            for number, start in enumerate(starts[:-1])
        ]
        breaks = [[start, start + len(one)] for start, one in zip(starts, sentences, strict=False)]
        content.append(
            {"context": " ".join(sentences), "sentences": sentences, "sentence_breaks": breaks, "qas": questions}
        )
    return {"data": [{"title": "a", "paragraphs": content}]}


def write_answers(folder, paragraphs=(("one", "two"), ("three", "four", "five")), languages=LANGUAGES):
    folder.mkdir(parents=True, exist_ok=True)
    for language in languages:
        texts = [[f"{language} sentence {word}" for word in paragraph] for paragraph in paragraphs]
        with gzip.open(folder / f"{language}.json.gz", "wt", encoding="utf-8") as file:
            json.dump(squad(language, texts), file)
    return folder


class Vectors:
    """A model that embeds each text at random, far from any tie, and remembers what it was asked."""

    def __init__(self, seed=0, language_strength=2.0):
        self.rng = np.random.default_rng(seed)
        self.strength = language_strength
        self.meanings = {}
        self.prompts = {"query": "query: ", "passage": "passage: "}
        self.calls = {}

    def encode(self, texts, *, prompt="", **options):
        self.calls.setdefault(prompt, []).extend(texts)
        return np.array([self.vector(text) for text in texts], dtype=np.float32)

    def vector(self, text):
        language = text.split()[0]
        vector = self.meanings.setdefault(text, self.rng.normal(size=12)).copy()
        vector[LANGUAGES.index(language)] += self.strength
        return vector


def cosine(a, b):
    return float(a @ b) / (float(a @ a) ** 0.5 * float(b @ b) ** 0.5)


def ranks_loop(question, candidates, answers, own):
    """Average precision in both pools, reciprocal rank per language, and the language of the first candidate."""

    def average_precision(languages):
        pool = [
            (cosine(question, vector), row == answers[language])
            for language in languages
            for row, vector in enumerate(candidates[language])
        ]
        right = [similarity for similarity, is_right in pool if is_right]
        total = 0.0
        for threshold in right:
            above = [is_right for similarity, is_right in pool if similarity >= threshold - 1e-12]
            total += sum(above) / len(above)
        return total / len(right)

    everyone = range(len(candidates))
    best = [max(cosine(question, vector) for vector in candidates[language]) for language in everyone]
    first = [abs(one - max(best)) < 1e-12 for one in best]
    return (
        average_precision(everyone),
        average_precision([language for language in everyone if language != own]),
        [average_precision([language]) for language in everyone],
        first[own] / sum(first),
    )


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("chunk", [None, 30])
def test_ranks_match_a_loop(ties, chunk, monkeypatch):
    if chunk is not None:
        monkeypatch.setattr("metaphrase.evaluation.answer_retrieval._CHUNK", chunk)
    rng = np.random.default_rng(3)
    sizes, n, own = (7, 5, 9), 6, 1
    questions = rng.normal(size=(n, 5)).astype(np.float32)
    candidates = [rng.normal(size=(size, 5)).astype(np.float32) for size in sizes]
    answers = np.array([[rng.integers(size) for size in sizes] for _ in range(n)])
    if ties:  # copies of candidates, within a language and across languages, and of right answers
        candidates[0][3:6] = candidates[1][0]
        candidates[2][0] = candidates[1][0]
        candidates[1][1:4] = candidates[2][8]
        answers[:3] = [[3, 0, 0], [0, 2, 8], [4, 1, 0]]
    found = rank_answers(questions, candidates, answers, own)
    expected = [ranks_loop(q, candidates, a, own) for q, a in zip(questions, answers, strict=True)]
    for values, wanted in zip(found, zip(*expected, strict=True), strict=True):
        np.testing.assert_allclose(values, np.array(wanted), atol=1e-6)
    pool = np.concatenate(candidates)
    pool /= np.linalg.norm(pool, axis=1, keepdims=True)
    starts = np.cumsum([0, *sizes[:-1]])
    for question, row, precision in zip(questions, answers, found.precision_n, strict=True):
        similarity = np.round(pool @ question, 5)
        gold = np.isin(np.arange(len(pool)), row + starts)
        assert average_precision_score(gold, similarity) == pytest.approx(precision, abs=1e-6)


def test_a_collapsed_model_finds_nothing():
    """All candidates share the last rank, so that a constant embedding has no advantage."""
    candidates = [np.ones((10, 4)), np.ones((30, 4))]
    ranks = rank_answers(np.ones((2, 4)), candidates, np.zeros((2, 2), dtype=int), 0)
    np.testing.assert_allclose(ranks.precision_n, 2 / 40)
    np.testing.assert_allclose(ranks.others_n, 1 / 30)
    np.testing.assert_allclose(ranks.reciprocal_nl, [[1 / 10, 1 / 30]] * 2)
    np.testing.assert_allclose(ranks.own_first_n, 0.5)


def test_embeddings_and_answers_are_checked():
    candidates = [np.ones((2, 3)), np.full((2, 3), np.nan)]
    with pytest.raises(NonFiniteError):
        rank_answers(np.ones((1, 3)), candidates, np.zeros((1, 2), dtype=int), 0)
    with pytest.raises(ValueError, match=r"the shape \(1, 2\), but have the shape \(1, 1\)"):
        rank_answers(np.ones((1, 3)), candidates, np.zeros((1, 1), dtype=int), 0)


# --- Data ---


@pytest.mark.parametrize("end", ".?؟।۔።։။។")
def test_sentences_end_in_any_script(end):
    text = f"a first sentence{end} a second sentence{end}"
    assert [text[slice(*span)].strip() for span in sentence_spans(text)] == text.replace(" a", "\na").split("\n")


def test_sentences_cover_a_text():
    text = "Short. The first sentence ends here. 第二句在这里结束了应该没有任何问题吧。And the rest"
    spans = list(sentence_spans(text))
    assert "".join(text[slice(*span)] for span in spans) == text
    assert len(spans) == 3


def test_a_folder_is_read(tmp_path):
    sets = load_answer_folder(write_answers(tmp_path / "xquad-r"))
    assert list(sets) == list(LANGUAGES)
    german = sets["de"]
    assert german.ids == ("q0.0", "q0.1", "q1.0", "q1.1", "q1.2")
    assert german.answers == (0, 1, 2, 3, 4)
    assert german.sentences[2] == "de sentence three"
    assert german.candidates("paragraph")[1] == "de sentence two de sentence one de sentence two"
    assert list(load_answer_folder(tmp_path / "xquad-r", ["sw", "de"])) == ["sw", "de"]


def test_chosen_questions_keep_their_paragraphs(tmp_path):
    one = load_answer_folder(write_answers(tmp_path))["de"]
    assert one.questions_by_paragraph() == [[0, 1], [2, 3, 4]]
    assert one.chosen(range(5)) == one
    assert one.chosen([0]).sentences == ("de sentence one", "de sentence two")
    assert one.chosen(range(3)).sentences == one.sentences
    moved = AnswerSet("de", ("b", "c"), ("q", "r"), (3, 4), one.sentences, one.paragraphs).chosen([0])
    assert (moved.ids, moved.answers, moved.sentences) == (("b",), (1,), one.sentences[2:])


@pytest.mark.parametrize(
    "change",
    [
        lambda paragraph: paragraph.pop("sentences"),
        lambda paragraph: paragraph["sentence_breaks"].pop(),
        lambda paragraph: paragraph["sentence_breaks"].append(3),
        lambda paragraph: paragraph["qas"][0].update(answers=[]),
        lambda paragraph: paragraph["qas"][0]["answers"][0].update(answer_start=999),
        lambda paragraph: paragraph.update(qas=[]),
    ],
)
def test_other_formats_are_refused(tmp_path, change):
    content = squad("de", [["a b", "c"]])
    change(content["data"][0]["paragraphs"][0])
    (tmp_path / "de.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"de\.json"):
        load_answer_folder(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"data": 3}', "{", "[" * 100_000])
def test_other_json_is_refused(tmp_path, text):
    (tmp_path / "de.json").write_text(text)
    with pytest.raises(DataError, match=r"de\.json must be SQuAD's JSON with 'sentences'"):
        load_answer_folder(tmp_path)


def test_languages_must_have_the_same_questions(tmp_path):
    write_answers(tmp_path, languages=["de"])
    write_answers(tmp_path, paragraphs=[["one", "two"]], languages=["en"])
    with pytest.raises(DataMismatchError, match="the questions of en and de differ"):
        load_answer_folder(tmp_path)
    with pytest.raises(MissingFileError, match=r"no questions in sw\. It has: de, en"):
        load_answer_folder(tmp_path, ["sw"])
    with pytest.raises(MissingFileError, match=r"no files named xx\.json"):
        load_answer_folder(tmp_path / "nowhere")


# --- Results ---


def test_results_are_means_of_the_ranks(tmp_path):
    sets = load_answer_folder(write_answers(tmp_path / "xquad-r"))
    model = Vectors()
    results = evaluate_answer_retrieval(model, sets, prompt="auto", resamples=60)
    assert {measure: one.lower_is_better for measure, one in results.items()} == {
        "mAP": False,
        "mAP in one language": False,
        "MRR in the question's language": False,
        "own-language bias": True,
        "mAP lost to the question's language": True,
    }
    candidates = [np.array([model.vector(text) for text in one.sentences]) for one in sets.values()]
    for own, (language, one) in enumerate(sets.items()):
        rows = [
            ranks_loop(model.vector(question), candidates, [answer] * 3, own)
            for question, answer in zip(one.questions, one.answers, strict=True)
        ]
        whole, others, reciprocal, first = (np.array(column) for column in zip(*rows, strict=True))
        expected = {
            "mAP": whole,
            "mAP in one language": reciprocal.mean(axis=1),
            "MRR in the question's language": reciprocal[:, own],
            "own-language bias": first - 1 / 3,
            "mAP lost to the question's language": others - whole,
        }
        for measure, items in expected.items():
            measured = results[measure].languages[language]
            np.testing.assert_allclose(measured.details["items"], items, atol=1e-5)
            assert measured.score == pytest.approx(100 * items.mean(), abs=1e-3)
            low, high = measured.interval
            assert low <= measured.score <= high
        answers = results["mAP in one language"].languages[language].details["answers"]
        assert answers == pytest.approx(dict(zip(sets, 100 * reciprocal.mean(axis=0), strict=True)), abs=1e-3)
    assert set(model.calls) == {"query: ", "passage: "}
    assert all("question" in text for text in model.calls["query: "])
    assert all("sentence" in text for text in model.calls["passage: "])
    plain = Vectors()
    assert evaluate_answer_retrieval(plain, sets, resamples=10)["mAP"].settings["answer_prompt"] == ""
    assert set(plain.calls) == {""}


def test_the_paragraph_follows_the_sentence(tmp_path):
    sets = load_answer_folder(write_answers(tmp_path / "xquad-r"))
    model = Vectors()
    results = evaluate_answer_retrieval(model, sets, answer_text="paragraph", resamples=10)
    assert "en sentence two en sentence one en sentence two" in model.calls[""]
    assert "text of a candidate: paragraph" in results["mAP"].protocol
    with pytest.raises(DataMismatchError, match="different items"):
        compare(evaluate_answer_retrieval(model, sets, resamples=10)["mAP"], results["mAP"])


def test_the_order_of_languages_does_not_matter(tmp_path):
    sets = load_answer_folder(write_answers(tmp_path / "xquad-r"))
    model = Vectors()
    one, other = (
        evaluate_answer_retrieval(model, {code: sets[code] for code in order}, resamples=10)["mAP"]
        for order in (sorted(sets), sorted(sets, reverse=True))
    )
    assert compare(one, other)["pooled"]["difference"] == 0


def test_less_language_is_better(tmp_path):
    """The paired comparison of the same items, in the direction of each measure."""
    paragraphs = [[f"{at} {number}" for number in range(10)] for at in range(4)]
    sets = load_answer_folder(write_answers(tmp_path / "xquad-r", paragraphs))
    before, after = (
        evaluate_answer_retrieval(aligned(Vectors(language_strength=strength), sets), sets, resamples=200)
        for strength in (9.0, 0.0)
    )
    for measure in ("mAP", "own-language bias", "mAP lost to the question's language"):
        assert compare(before[measure], after[measure])["pooled"]["verdict"] == "better"
        assert compare(after[measure], before[measure])["pooled"]["verdict"] == "worse"


def aligned(model, sets):
    """Make a model that embeds questions and their answers in all languages alike, apart from their language."""
    for at in range(len(sets["de"].ids)):
        meaning = model.rng.normal(size=12)
        meaning[:3] = 0
        for one in sets.values():
            for text in (one.questions[at], one.sentences[one.answers[at]]):
                model.meanings[text] = meaning + 0.01 * model.rng.normal(size=12)
    return model


def test_one_language_is_no_pool(tmp_path):
    sets = load_answer_folder(write_answers(tmp_path / "xquad-r", languages=["de"]))
    with pytest.raises(DataError, match="at least two languages, but got de"):
        evaluate_answer_retrieval(Vectors(), sets)


def test_the_evaluator_logs_fractions(tmp_path, tiny_encoder):
    sets = load_answer_folder(write_answers(tmp_path / "xquad-r"))
    evaluator = AnswerRetrievalEvaluator(sets, name="xquad-r")
    metrics = evaluator(tiny_encoder, str(tmp_path), epoch=1, steps=10)
    results = evaluate_answer_retrieval(tiny_encoder, sets, resamples=10)
    assert evaluator.primary_metric == "xquad-r_mean_average_precision"
    assert 100 * metrics[evaluator.primary_metric] == pytest.approx(results["mAP"].average.score, abs=1e-3)
    assert 100 * metrics["xquad-r_sw_average_precision"] == pytest.approx(
        results["mAP"].languages["sw"].score, abs=1e-3
    )
    bias = results["own-language bias"].average.score
    assert 100 * (metrics["xquad-r_own_language_first"] - 1 / 3) == pytest.approx(bias, abs=1e-3)
    assert len((tmp_path / "answer_retrieval_evaluation_xquad-r_results.csv").read_text().splitlines()) == 2
    assert evaluator.get_config_dict() == {"answer_text": "sentence"}
