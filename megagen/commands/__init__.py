"""One module per command; ``megagen.cli`` puts them together."""
