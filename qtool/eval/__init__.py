"""Evaluation: perplexity, zero-shot tasks through lm-eval, comparison with a baseline."""
