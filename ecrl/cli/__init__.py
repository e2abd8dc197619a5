"""The command line `ecrl`."""
