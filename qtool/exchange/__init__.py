"""Other tools' checkpoints: one file a foreign format, and the conversions from and to the native
one.
"""
