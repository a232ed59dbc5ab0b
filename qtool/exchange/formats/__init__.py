"""Foreign checkpoint formats, one file each."""
