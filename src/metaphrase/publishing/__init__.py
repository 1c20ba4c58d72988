"""Releases, model cards, reports and exports, and their upload to a Hub."""
