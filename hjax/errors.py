"""The kinds of failure a user meets; each message is one line that says what to do next."""


class ConfigError(ValueError):
    """Bad input: a key, flag, file or shape. Commands print the message and exit with status 2."""


class DataError(ConfigError):
    """A dataset or file that cannot be used; the message names the file and the row."""


class RunError(RuntimeError):
    """A failure while running (reward outage, non-finite updates). Commands exit with status 1."""
