"""The files of metaphrase-e5-small: ``metaphrase.load_encoder("metaphrase-e5-small")``."""
