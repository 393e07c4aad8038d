"""How a run may end: one exception per exit code, so that every ending has a name.

The message of each is the one line its user reads. Anything else that is raised is a crash of ours.
"""


class UserError(ValueError):
    """The user's input is wrong: the message names flag or file, the value and what is allowed."""

    code = 2


class DamagedData(RuntimeError):
    """A shard cannot be read; the message names the shard and the record."""

    code = 3


class Diverged(RuntimeError):
    """The gradient stayed infinite or NaN; the message names the last good checkpoint."""

    code = 4


class MachineFailed(RuntimeError):
    """A peer is missing or storage failed; the message names what was saved."""

    code = 5


class Stopped(RuntimeError):
    """Stopped on request after a complete checkpoint; the same command goes on from there."""

    code = 75


ENDINGS = (UserError, DamagedData, Diverged, MachineFailed, Stopped)
