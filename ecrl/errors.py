"""Errors that a user can mend: one line per fault, no traceback on the command line, exit status 2."""


class UserError(ValueError):
    """What was given, what was expected, what to do."""


class ConfigError(UserError):
    """Faults in a config, one line each: `source: path: what is wrong; what to do`."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or of another structure; the message names the file."""
