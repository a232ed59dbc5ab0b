"""The plan of a run: bits, bytes, memory and time, from config.json alone."""
