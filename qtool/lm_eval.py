"""lm-eval's own command line with native checkpoints: ``python -m qtool.lm_eval run ...``.

Everything after the module's name is lm-eval's. Neither transformers nor lm-eval looks for plugins
among the installed packages, so this imports qtool's quantizer and then calls lm-eval:

    python -m qtool.lm_eval run --model hf --model_args pretrained=DIR,dtype=auto --tasks piqa

``qtool eval`` gives the same log-likelihoods on the same batch size where ``--model_args`` has
``softmax_dtype=float32`` too.
"""


def main() -> None:
    """Register the quantizer with transformers, then run lm-eval."""
    from lm_eval.__main__ import cli_evaluate

    from qtool.runtime import huggingface  # noqa: F401  (registers the quantizer)

    cli_evaluate()


if __name__ == "__main__":
    main()
