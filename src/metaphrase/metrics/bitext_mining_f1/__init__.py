"""Precision, recall and F1 of bitext mining as an `evaluate` module."""
