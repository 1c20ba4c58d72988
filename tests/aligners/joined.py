"""Words from lists."""

from itertools import accumulate

from metaphrase.corpus.words import Words


def join_words(words, language=None):
    """A text of words, separated by spaces."""
    ends = list(accumulate((len(word) + 1 for word in words), initial=0))
    spans = tuple((start, start + len(word)) for start, word in zip(ends, words, strict=False))
    return Words(" ".join(words), spans, language)
