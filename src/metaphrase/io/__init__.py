"""Files, digests, YAML configuration and the environment, used by all layers."""
