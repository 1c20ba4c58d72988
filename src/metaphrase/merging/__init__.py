"""Task vectors: the change of a model's weights in training, which can be scaled, added and stored in a small file."""

from metaphrase.merging.vectors import TaskVector, combine, interpolate

__all__ = ["TaskVector", "combine", "interpolate"]
