"""Text for calibration and evaluation: named corpora, files, and the token windows cut from them."""
