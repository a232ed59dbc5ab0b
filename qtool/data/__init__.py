"""Text for calibration and evaluation: corpora, files, and the token windows cut from them."""
