"""Sizes of windows if nothing else is asked for; no torch, for the command line's help."""

#: calibration windows, if the parts of a mix do not have numbers of their own
SAMPLES = 128
#: windows for a sensitivity, likewise
SENSITIVITY_SAMPLES = 32
#: tokens of a calibration window
CALIBRATION_SEQLEN = 2048
#: tokens of a window of a perplexity, as in the papers' scripts
EVALUATION_SEQLEN = 2048
