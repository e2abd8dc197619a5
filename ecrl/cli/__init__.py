"""Command-line program `ecrl`."""
