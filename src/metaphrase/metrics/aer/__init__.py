"""The alignment error rate as an `evaluate` module."""
