"""What everything stands on: errors, texts, files, payloads, randomness, and the settings of an experiment."""
