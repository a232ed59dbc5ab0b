"""``python -m qtool``."""

from qtool.cli import main

main()
