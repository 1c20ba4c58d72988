"""What can be done with a trained encoder: merging, removing language identity, and making it smaller."""
