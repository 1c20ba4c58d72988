"""The accuracy of translation retrieval as an `evaluate` module."""
