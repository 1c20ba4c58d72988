"""The table of suites. Each is one module with the function that finds its benchmarks, and one entry of the table below.

A suite finds its *benchmarks* in a folder. A benchmark is one data set under one protocol; it is the unit of
caching. It returns one or several `Result` objects by name.
"""

from __future__ import annotations

from functools import partial

from metaphrase.evaluation.suites import answer_retrieval, mining, mteb, parallel, sib200, sts, word_alignment
from metaphrase.evaluation.suites.benchmarks import Benchmark, DataUnavailable, Sample, Settings, Subject, Suite
from metaphrase.evaluation.suites.transfer import FINETUNED, find_finetuned

__all__ = ["FINETUNED", "SUITES", "Benchmark", "DataUnavailable", "Sample", "Settings", "Subject", "Suite"]

_BOOTSTRAP = ("resamples", "seed")
_PROBED = ("prompt", "bf16", "languages", "transfer", *_BOOTSTRAP)
#: Languages of the samples of ``quick``: of several scripts, with much and with little training data.
_QUICK = ("de", "ru", "zh", "hi", "sw", "te", "tl", "th")
#: All suites by name. The choices and the help of ``--suite`` are read from this table.
SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            "retrieval",
            "accuracy of translation retrieval in both directions",
            "a folder of xx-en.test.tsv.gz, or tatoeba or udhr with xx-en.tsv.gz",
            parallel.find_retrieval,
            ("prompt", "bf16", "languages", "split", "text_equality", "margin_k", "strip_quotes", *_BOOTSTRAP),
            quick=Sample(150, 0.15, _QUICK),
        ),
        Suite(
            "sts",
            "similarity in and across languages",
            "a folder of stsb-xx-test.csv.gz (except STS22, whose data are on the Hub)",
            sts.find_sts,
            ("prompt", "bf16", "languages", *_BOOTSTRAP),
            quick=Sample(200, 0.15, ("en", "de", "zh"), spread=True),
        ),
        Suite(
            "mining",
            "BUCC",
            "a folder of BUCC files (zh-en.sample.zh.gz, …)",
            mining.find_mining,
            ("prompt", "bf16", "languages", "margin", "k", "retrieval", *_BOOTSTRAP),
            options=("protocols", "duplicates", "comparison"),
            quick=Sample(90, 1),
        ),
        Suite(
            "answer-retrieval",
            "mAP of answers in one pool of all languages",
            "xquad-r/xx.json.gz in at least two languages",
            answer_retrieval.find_answer_retrieval,
            ("prompt", "bf16", "languages", "answer_text", *_BOOTSTRAP),
            quick=Sample(120, 0.1, spread=True),
        ),
        Suite(
            "sib200",
            "retrieval and topics in 205 languages",
            "sib200/xxx_Scpt.train.tsv.gz, including eng_Latn",
            sib200.find_sib200,
            ("prompt", "bf16", "languages", "trained_languages", *_BOOTSTRAP),
            quick=Sample(100, 0.25, (*_QUICK, "ewe_Latn", "tat_Cyrl", "bod_Tibt", "quy_Latn")),
        ),
        Suite(
            "xsim++",
            "retrieval among English sentences that differ in a number, a name, a negation, a comparison or a cause",
            "a folder of xx-en.test.tsv.gz, or tatoeba or udhr with xx-en.tsv.gz, or sib200",
            parallel.find_xsimpp,
            ("prompt", "bf16", "languages", "split", "strip_quotes", *_BOOTSTRAP),
            quick=Sample(150, 0.15, _QUICK),
            new_texts=0.1,
        ),
        Suite(
            "word-alignment",
            "AER",
            "a folder with test.xx, test.yy and test.xx.yy.wa, or with xxyy.src-tgt and xxyy.gold",
            word_alignment.find_word_alignment,
            _BOOTSTRAP,
            quick=Sample(60, 0.04),
        ),
        Suite(
            "nli",
            "natural language inference, transferred from English (--transfer)",
            "xnli/dev-xx.tsv.gz",
            partial(find_finetuned, "nli"),
            _PROBED,
        ),
        Suite(
            "paraphrase",
            "paraphrase detection, transferred from English (--transfer)",
            "pawsx/dev-xx.tsv.gz",
            partial(find_finetuned, "paraphrase"),
            _PROBED,
            quick=Sample(200, 0.3, ("en", "de", "zh")),
        ),
        Suite(
            "qa",
            "question answering, transferred from English",
            "xquad/xquad.xx.json.gz",
            partial(find_finetuned, "qa"),
            ("languages",),
        ),
        Suite(
            "pos",
            "part-of-speech tagging, transferred from English (--transfer)",
            "ud/xx_…-ud-test.conllu.gz, including English dev",
            partial(find_finetuned, "pos"),
            _PROBED[2:],
            quick=Sample(100, 0.4),
        ),
        Suite(
            "mteb",
            "the folder's test sets as tasks of MTEB, or --tasks",
            "a folder of xx-en.test.tsv.gz, tatoeba, udhr, sib200, xquad-r, or tasks of MTEB",
            mteb.find_mteb,
            ("prompt", "bf16", "languages", "split", "strip_quotes"),
            options=("tasks",),
            new_texts=0.0,
        ),
    )
}
