"""The table of suites, with the data that they look for in a folder, and the settings that they read.

A suite finds its *benchmarks* in a folder. A benchmark is one data set under one protocol; it is the unit of
caching. It returns one or several `Result` objects by name.
"""

from __future__ import annotations

from functools import partial

from metaphrase.evaluation.suites import answer_retrieval, mining, mteb, parallel, sib200, sts, word_alignment
from metaphrase.evaluation.suites.benchmarks import Benchmark, DataUnavailable, Settings, Subject, Suite
from metaphrase.evaluation.suites.transfer import FINETUNED, find_finetuned

__all__ = ["FINETUNED", "SUITES", "Benchmark", "DataUnavailable", "Settings", "Subject", "Suite"]

_BOOTSTRAP = ("resamples", "seed")
_PROBED = ("prompt", "bf16", "languages", "transfer", *_BOOTSTRAP)
#: All suites by name.
SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            "retrieval",
            "a folder of xx-en.test.tsv.gz, or tatoeba or udhr with xx-en.tsv.gz",
            parallel.find_retrieval,
            ("prompt", "bf16", "languages", "split", "text_equality", "margin_k", "strip_quotes", *_BOOTSTRAP),
        ),
        Suite(
            "sts",
            "a folder of stsb-xx-test.csv.gz (except STS22, whose data are on the Hub)",
            sts.find_sts,
            ("prompt", "bf16", "languages", *_BOOTSTRAP),
        ),
        Suite(
            "mining",
            "a folder of BUCC files (zh-en.sample.zh.gz, …)",
            mining.find_mining,
            ("prompt", "bf16", "languages", "margin", "k", "retrieval", *_BOOTSTRAP),
        ),
        Suite(
            "answer-retrieval",
            "xquad-r/xx.json.gz in at least two languages",
            answer_retrieval.find_answer_retrieval,
            ("prompt", "bf16", "languages", "answer_text", *_BOOTSTRAP),
        ),
        Suite(
            "sib200",
            "sib200/xxx_Scpt.train.tsv.gz, including eng_Latn",
            sib200.find_sib200,
            ("prompt", "bf16", "languages", "trained_languages", *_BOOTSTRAP),
        ),
        Suite(
            "xsim++",
            "a folder of xx-en.test.tsv.gz, or tatoeba or udhr with xx-en.tsv.gz, or sib200",
            parallel.find_xsimpp,
            ("prompt", "bf16", "languages", "split", "strip_quotes", *_BOOTSTRAP),
        ),
        Suite(
            "word-alignment",
            "a folder with test.xx, test.yy and test.xx.yy.wa, or with xxyy.src-tgt and xxyy.gold",
            word_alignment.find_word_alignment,
            _BOOTSTRAP,
        ),
        Suite("nli", "xnli/dev-xx.tsv.gz", partial(find_finetuned, "nli"), _PROBED),
        Suite("paraphrase", "pawsx/dev-xx.tsv.gz", partial(find_finetuned, "paraphrase"), _PROBED),
        Suite("qa", "xquad/xquad.xx.json.gz", partial(find_finetuned, "qa"), ("languages",)),
        Suite("pos", "ud/xx_…-ud-test.conllu.gz, including English dev", partial(find_finetuned, "pos"), _PROBED[2:]),
        Suite(
            "mteb",
            "a folder of xx-en.test.tsv.gz, tatoeba, udhr, sib200, xquad-r, or tasks of MTEB",
            mteb.find_mteb,
            ("prompt", "bf16", "languages", "split", "strip_quotes"),
        ),
    )
}
