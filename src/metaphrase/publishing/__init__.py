"""Releases, model cards and reports, and their upload to a Hub."""
