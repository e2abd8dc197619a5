"""The command-line program `ecrl`."""
