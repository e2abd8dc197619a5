"""The checks of environments that `ecrl check-env` and `ecrl.check_env` run."""
