"""The experts of a mixture: tokens sorted by expert, grouped GEMMs, weighted sums."""
