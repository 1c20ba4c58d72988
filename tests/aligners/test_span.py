import math
import random

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForQuestionAnswering, PreTrainedTokenizerFast

from metaphrase.aligners.base import Alignment
from metaphrase.aligners.span import SpanAligner, bare_span, best_spans, span_links
from metaphrase.corpus.words import Words
from tests.conftest import shape

# ------------------------------------------------------------------------------------------------------ scores of a pair


def span_links_loop(forward, backward, threshold, force_bidirectional):
    """As WSPAlign's inference scores: s1 / |span|, plus s2 / |span| where the other direction has the link, too."""
    found = {}
    for i, (score, words) in enumerate(forward):
        for j in words:
            found[i, j] = [score / len(words), 1]
    for j, (score, words) in enumerate(backward):
        for i in words:
            if (i, j) in found:
                found[i, j][0] += score / len(words)
                found[i, j][1] += 1
    kept = {link: s for link, (s, n) in found.items() if s > threshold and not (force_bidirectional and n < 2)}
    return Alignment(tuple(sorted(kept)), tuple(kept[link] for link in sorted(kept)))


def test_two_halves_pass_the_threshold_together():
    assert span_links([(0.5, [0])], [(0.5, [0])]) == Alignment(((0, 0),), (1.0,))


def test_one_sure_direction_passes_alone():
    assert span_links([(0.95, [0])], [(0.0, [])]) == Alignment(((0, 0),), (0.95,))
    assert span_links([(0.95, [0])], [(0.0, [])], force_bidirectional=True) == Alignment((), ())
    assert span_links([(0.9, [0])], [(0.0, [])]).links == ()  # the threshold itself does not pass


def test_a_link_of_the_reverse_direction_alone_is_dropped():
    assert span_links([(0.0, [])], [(0.99, [0])]) == Alignment((), ())


def test_a_span_of_two_words_halves_each():
    forward, nothing = [(1.0, [0, 1])], [(0.0, []), (0.0, [])]
    assert span_links(forward, nothing, threshold=0.4) == Alignment(((0, 0), (0, 1)), (0.5, 0.5))
    assert span_links(forward, nothing).links == ()
    assert span_links(forward, [(1.0, [0]), (0.3, [0])]) == Alignment(((0, 0),), (1.5,))


@pytest.mark.parametrize("force_bidirectional", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_links_match_the_loop(seed, force_bidirectional):
    rng = np.random.default_rng(seed)

    def answers(n, other):
        for _ in range(n):
            first = rng.integers(other)
            yield rng.random(), list(range(first, rng.integers(first, other) + 1))

    m, n = rng.integers(1, 8, 2)
    forward, backward = list(answers(m, n)), list(answers(n, m))
    threshold = rng.choice([0.0, 0.3, 0.9])
    found = span_links(forward, backward, threshold=threshold, force_bidirectional=force_bidirectional)
    assert found == span_links_loop(forward, backward, threshold, force_bidirectional)


# -------------------------------------------------------------------------------------------------- scores of a sequence


def best_span_loop(start, end, real, context, max_length, softmax_over):
    n = len(start)
    shares = [i for i in range(n) if (real[i] if softmax_over == "sequence" else context[i] or i == 0)]
    total_start, total_end = (sum(math.exp(logits[i]) for i in shares) for logits in (start, end))
    best = (0.0, 0, 0)
    for i in range(n):
        for j in range(i, min(n, i + max_length)):
            if context[i] and context[j]:
                score = math.exp(start[i]) / total_start * math.exp(end[j]) / total_end
                best = max(best, (score, i, j), key=lambda found: found[0])
    return best


@pytest.mark.parametrize("softmax_over", ["sequence", "context"])
@pytest.mark.parametrize("max_length", [1, 3, 15])
def test_best_spans_match_the_loop(softmax_over, max_length):
    lengths = [5, 9, 20, 20]
    start, end = 3 * torch.randn(2, 4, 20, dtype=torch.float64)
    real = torch.arange(20) < torch.tensor(lengths)[:, None]
    context = (torch.arange(20) >= 3) & (torch.arange(20) < torch.tensor(lengths)[:, None] - 1)
    context[3] = False
    scores = best_spans(start, end, real, context, max_length=max_length, softmax_over=softmax_over)
    for row, found in enumerate(zip(*(tensor.tolist() for tensor in scores), strict=True)):
        expected = best_span_loop(
            start[row].tolist(), end[row].tolist(), real[row], context[row], max_length, softmax_over
        )
        assert found[1:] == expected[1:]
        assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert scores[0][3] == 0  # no context, no answer


def test_what_the_first_token_and_the_question_take_lowers_the_score():
    # [CLS] question [SEP] context context [SEP], logits such that e^logit = 2, 1, 1, 4, 1, 1
    logits = torch.tensor([[2.0, 1.0, 1.0, 4.0, 1.0, 1.0]]).log()
    real, context = torch.ones(1, 6, dtype=torch.bool), torch.tensor([[False, False, False, True, True, False]])
    score, first, last = best_spans(logits, logits, real, context)
    assert (first.item(), last.item()) == (3, 3)
    assert score.item() == pytest.approx((4 / 10) ** 2)
    score, _, _ = best_spans(logits, logits, real, context, softmax_over="context")
    assert score.item() == pytest.approx((4 / 7) ** 2)


# ---------------------------------------------------------------------------------------------------------- the aligner


@pytest.mark.parametrize(
    ("text", "span", "bare"),
    [
        ("cats", (0, 4), (0, 4)),
        ("I like cats.", (7, 12), (7, 11)),
        ("“cats,”", (0, 7), (1, 5)),
        ("e-mail", (0, 6), (0, 6)),
        ("a .", (2, 3), (2, 3)),
        ("है।", (0, 3), (0, 2)),
    ],
)
def test_bare_span(text, span, bare):
    assert bare_span(text, span) == bare


@pytest.fixture
def tiny_qa(tokenizer):
    torch.manual_seed(1)
    model = BertForQuestionAnswering(BertConfig(**shape(tokenizer)))
    torch.nn.init.normal_(model.qa_outputs.weight, std=2)  # answers that differ
    return model.eval()


def aligner_of(model, tokenizer, **settings):
    return SpanAligner(
        model, tokenizer, **{"max_question_length": 32, "stride": 8, "max_length": 64, "threshold": 0.0} | settings
    )


PAIRS = [
    (Words.of("der Hund schläft"), Words.of("the dog sleeps")),
    (Words.of("ja"), Words.of("yes")),
    (Words.of(""), Words.of("yes")),
    (Words.of("ja"), Words.of("")),
    (Words.of("das Haus ist rot."), Words.of("the house is red, and the garden is big")),
]


def aligned_slowly(model, tokenizer, source, target, max_answer_length=15):
    """One question at a time."""

    def answers(side, other):
        for start, end in side.spans:
            start, end = bare_span(side.text, (start, end))
            question = side.text[:start] + " ¶ " + side.text[start:end] + " ¶ " + side.text[end:]
            inputs = tokenizer(question, other.text, return_tensors="pt")
            encoding = inputs.encodings[0]
            output = model(**inputs)
            context = [sequence == 1 for sequence in encoding.sequence_ids]
            score, first, last = best_span_loop(
                output.start_logits[0].tolist(),
                output.end_logits[0].tolist(),
                [True] * len(context),
                context,
                max_answer_length,
                "sequence",
            )
            start = encoding.word_to_chars(encoding.token_to_word(first), 1)[0]
            end = encoding.word_to_chars(encoding.token_to_word(last), 1)[1]
            bare = [bare_span(other.text, span) for span in other.spans]
            yield score, [j for j, (a, b) in enumerate(bare) if a >= start and b <= end]

    return span_links_loop(list(answers(source, target)), list(answers(target, source)), 0.0, False)


@torch.inference_mode()
def test_matches_one_question_at_a_time(tiny_qa, tokenizer):
    aligner = aligner_of(tiny_qa, tokenizer, batch_size=3)
    alignments = aligner.align(PAIRS)
    assert alignments[2] == alignments[3] == Alignment((), ())
    for at in (0, 1, 4):
        expected = aligned_slowly(tiny_qa, tokenizer, *PAIRS[at])
        assert alignments[at].links == expected.links
        np.testing.assert_allclose(alignments[at].scores, expected.scores, rtol=1e-4)
    assert sum(len(alignment.links) for alignment in alignments) > 5
    assert aligner.align([]) == []


@torch.inference_mode()
def test_the_batch_does_not_matter(tiny_qa, tokenizer, monkeypatch):
    together = aligner_of(tiny_qa, tokenizer, batch_size=64).align(PAIRS)
    backwards = aligner_of(tiny_qa, tokenizer, batch_size=2).align(PAIRS[::-1])[::-1]
    monkeypatch.setattr("metaphrase.aligners.span._BLOCK", 1)
    alone = aligner_of(tiny_qa, tokenizer).align(PAIRS)
    assert [a.links for a in together] == [a.links for a in backwards] == [a.links for a in alone]


def test_questions_mark_the_bare_word(tiny_qa, tokenizer):
    words = Words.of("das Haus, rot")
    aligner = aligner_of(tiny_qa, tokenizer)
    assert aligner._question_texts([(words, 1, words), (words, 2, words)]) == [
        "das  ¶ Haus ¶ , rot",
        "das Haus,  ¶ rot ¶ ",
    ]


def test_a_question_is_cut_and_asked_only_if_its_marks_are_left(tiny_qa, tokenizer):
    words = Words.of("das Haus ist rot und der Garten ist groß")
    aligner = aligner_of(tiny_qa, tokenizer, max_question_length=8)
    texts = aligner._question_texts([(words, word, words) for word in range(len(words))])
    assert [text is None for text in texts] == sorted(text is None for text in texts)
    assert None in texts
    assert texts[0] is not None
    for text in filter(None, texts):
        assert text.count("¶") == 2
        assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) <= 8
    links = aligner.align([(words, Words.of("the house"))])[0].links
    assert {i for i, _ in links} <= {word for word, text in enumerate(texts) if text}


@torch.inference_mode()
def test_a_long_context_is_read_in_windows(tiny_qa, tokenizer):
    source, target = Words.of("das Haus"), Words.of(" ".join(["the house is red and the garden is big"] * 8))
    aligner = aligner_of(tiny_qa, tokenizer, max_length=40, max_question_length=16)
    ((score, start, end),) = aligner._answer([(source, 1, target)])
    windows = tokenizer(
        "das  ¶ Haus ¶ ",
        target.text,
        truncation="only_second",
        max_length=40,
        stride=8,
        return_overflowing_tokens=True,
    )
    assert len(windows.encodings) > 2
    best = (0.0, 0, 0)
    for encoding in windows.encodings:
        output = tiny_qa(torch.tensor([encoding.ids]))
        found, first, last = best_span_loop(
            output.start_logits[0].tolist(),
            output.end_logits[0].tolist(),
            [True] * len(encoding.ids),
            [sequence == 1 for sequence in encoding.sequence_ids],
            15,
            "sequence",
        )
        characters = encoding.offsets[first][0], encoding.offsets[last][1]
        best = max(best, (found, *characters), key=lambda answer: answer[0])
    assert score == pytest.approx(best[0], rel=1e-4)
    assert start <= best[1] < best[2] <= end  # widened to whole words


def test_answers_are_widened_to_words_only_on_request(tiny_qa, tokenizer):
    words = Words.of("und das Haus")
    encoding = tokenizer("ja", words.text).encodings[0]
    pieces = [p for p, sequence in enumerate(encoding.sequence_ids) if sequence == 1]
    by_word = {}
    for piece in pieces:
        by_word.setdefault(encoding.token_to_word(piece), []).append(piece)
    split = next((ps for ps in by_word.values() if len(ps) > 1), None)
    if split is None:
        words = Words.of("Hundehaus")
        encoding = tokenizer("ja", words.text).encodings[0]
        split = [p for p, sequence in enumerate(encoding.sequence_ids) if sequence == 1]
    assert len(split) > 1
    wide = aligner_of(tiny_qa, tokenizer)._characters(encoding, split[1], split[1])
    exact = aligner_of(tiny_qa, tokenizer, align_to_words=False)._characters(encoding, split[1], split[1])
    assert exact == encoding.offsets[split[1]]
    assert wide[0] < exact[0]


def test_lengths_without_room_for_a_context_are_refused(tiny_qa, tokenizer):
    with pytest.raises(ValueError, match="leave 0 pieces for a question"):
        SpanAligner(tiny_qa, tokenizer, stride=128)  # this tokenizer's limit is 64 pieces
    assert SpanAligner(tiny_qa, tokenizer).stride == 21
    with pytest.raises(ValueError, match=r"leave 52 pieces .* is 53"):
        aligner_of(tiny_qa, tokenizer, max_question_length=53)
    assert aligner_of(tiny_qa, tokenizer, max_question_length=None).max_question_length == 52
    with pytest.raises(ValueError, match="fast tokenizer"):
        SpanAligner(tiny_qa)


def test_a_model_is_loaded_by_name(tiny_qa, tokenizer, tmp_path):
    tiny_qa.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    named = aligner_of(tmp_path, None, device="cpu").align(PAIRS)
    assert [a.links for a in named] == [a.links for a in aligner_of(tiny_qa, tokenizer).align(PAIRS)]


def test_the_longest_question_leaves_a_window(tiny_qa, tokenizer):
    source, target = (Words.of(" ".join(["das Haus ist rot"] * 15)), Words.of(" ".join(["the house is red"] * 4)))
    aligner = aligner_of(tiny_qa, tokenizer, max_question_length=None)
    texts = aligner._question_texts([(source, 0, target)])
    assert len(tokenizer(texts[0], add_special_tokens=False)["input_ids"]) == 52
    (alignment,) = aligner.align([(source, target)])
    assert alignment.links


def test_dropout_is_off(tiny_qa, tokenizer):
    aligner = aligner_of(tiny_qa.train(), tokenizer)
    assert aligner.align(PAIRS) == aligner.align(PAIRS)


# ------------------------------------------------------------------------------------------------------- a trained model


N_WORDS, N_ASKED = 8, 3


@pytest.fixture(scope="module")
def trained():
    """A model of a language pair of eight words, trained on questions as WSPAlign asks them; some seconds."""
    torch.manual_seed(0)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "¶", *(f"{side}{i}" for side in "ab" for i in range(N_WORDS))]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    specials = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=40, **specials)
    model = BertForQuestionAnswering(
        BertConfig(
            **shape(tokenizer, hidden_size=64, num_attention_heads=4, intermediate_size=128),
            hidden_dropout_prob=0,
            attention_probs_dropout_prob=0,
            initializer_range=0.1,
        )
    )
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rng = random.Random(0)
    for _ in range(400):
        questions, contexts, answers = [], [], []
        for _ in range(64):
            source, target = sentence_pair(rng)
            if rng.random() < 0.5:
                source, target = target, source
            asked = rng.randrange(N_ASKED)
            questions.append(" ".join([*source[:asked], "¶", source[asked], "¶", *source[asked + 1 :]]))
            contexts.append(" ".join(target))
            where = next(at for at, word in enumerate(target) if word[1:] == source[asked][1:])
            answers.append(1 + N_ASKED + 2 + 1 + where)  # [CLS] question with two marks [SEP]
        batch = tokenizer(questions, contexts, return_tensors="pt")
        output = model(**batch, start_positions=torch.tensor(answers), end_positions=torch.tensor(answers))
        output.loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        if output.loss < 0.01:
            break
    return model, tokenizer


def sentence_pair(rng):
    ids = rng.sample(range(N_WORDS), N_ASKED)
    return [f"a{i}" for i in ids], [f"b{i}" for i in rng.sample(ids, N_ASKED)]


@pytest.mark.slow
def test_a_trained_model_finds_the_translations(trained):
    rng = random.Random(1)
    drawn = [sentence_pair(rng) for _ in range(40)]
    pairs = [(Words.of(" ".join(source)), Words.of(" ".join(target))) for source, target in drawn]
    aligner = SpanAligner(*trained, max_question_length=16, stride=8, max_length=40)
    right = total = 0
    for (source, target), alignment in zip(drawn, aligner.align(pairs), strict=True):
        gold = {(i, j) for i, x in enumerate(source) for j, y in enumerate(target) if x[1:] == y[1:]}
        right += len(gold & set(alignment.links))
        total += len(gold | set(alignment.links))
        assert all(0.9 < score <= 2 for score in alignment.scores)
    assert right / total > 0.95
