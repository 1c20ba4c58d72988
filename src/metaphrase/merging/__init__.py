"""Task vectors: what training changed in a model's weights, to weigh it, add it to others and store it in a small file."""

from metaphrase.merging.vectors import TaskVector, combine, interpolate

__all__ = ["TaskVector", "combine", "interpolate"]
