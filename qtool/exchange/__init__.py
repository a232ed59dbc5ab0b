"""Other tools' checkpoints: one file a foreign format, and one conversion for both directions."""
