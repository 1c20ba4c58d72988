"""Parallel text: files of many formats, and data sets in memory and on the Hub, become one clean, labelled data set.

A corpus row has the columns ``source``, ``target``, ``source_lang`` and ``target_lang`` and, if a file has them, those of
``OPTIONAL``: ``alignment`` (Pharaoh ``i-j``), ``alignment_scores`` (a number for each link), ``segmenter`` (which words the
links count, ``whitespace`` or ``icu``, or ICU on one side: ``icu-source``, ``icu-target``), ``source_bt`` and ``target_bt``
(back-translations), and ``negatives`` (wrong translations that are similar to the right one). Several sentences in a column
are separated by `` ||| ``. The corpus is English-centric: English is the target. A file whose name (``en-sw.tsv``), columns
or suffixes give the opposite direction is swapped, with everything that belongs to its sides. ``target_lang`` sets another
target language.

Reading is strict. Text is UTF-8, lines end at line feeds only, and a file whose sides may be paired wrongly is refused.
An unreadable line is dropped and counted; too many of them are an error. The `CorpusReport` states how many pairs were
read, how many were kept, and why the others were dropped.
"""

from metaphrase.corpus.cleaning import Cleaning
from metaphrase.corpus.loading import Corpus, load_corpus

__all__ = ["Cleaning", "Corpus", "load_corpus"]
