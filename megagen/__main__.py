"""``python -m megagen``."""

from megagen.cli import main

main()
