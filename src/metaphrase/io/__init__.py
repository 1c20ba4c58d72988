"""What every layer stands on: files, digests, settings in YAML, and facts about the machine."""
