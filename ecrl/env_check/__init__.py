"""The checks of `ecrl check-env`."""
