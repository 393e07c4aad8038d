"""How a run may end: one exception for each exit code.

The message of each is the one line that the user sees. Any other exception is a bug of albert-ds.
"""

import errno
import os
import re

# Errors of the file system that the user can correct; all others are the machine's.
WRONG_PATH = (
    *(errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP),
    *(errno.ENAMETOOLONG, errno.EEXIST),
)
# What libraries say where this machine has no more files; gloo has no socket then.
OF_MACHINE = (*map(os.strerror, (errno.EMFILE, errno.ENFILE)), "to a (local) address")
# What a terminal would obey: controls but for line ends and tabs, and marks of writing direction.
_CONTROLS = {*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)}
_ESCAPES = {code: ascii(chr(code))[1:-1] for code in _CONTROLS - {*b"\t\n"}}
# Of a query: what signs it or is a secret itself (AWS, Google Cloud, Azure, tokens of hubs).
SECRET = r"(?:token|key|sig|signature|secret|password|credential|x-(?:amz|goog)-[\w-]+)"


def hide_passwords(text: str) -> str:
    """`text`, in which no URL shows a password, or a token in its place or in its query."""
    # A password ends at the last @ of the host's part; one with a slash, at the first @.
    is_port, password = r"(?!\d+(?:/|\s|$))", r'(?:[^/\s"]*@|[^@\s"]*@)'
    text = re.sub(rf'(://[^/@\s:"]*):{is_port}{password}', r"\1:***@", text)
    text = re.sub(r'(://)[^/@\s:"]+@', r"\1***@", text)
    return re.sub(rf'([?&][\w.-]*{SECRET})=[^&\s"]*', r"\1=***", text, flags=re.IGNORECASE)


def escape_controls(text: str) -> str:
    """`text`, in which a name of a file, a member or a tensor says nothing to the terminal."""
    return text.translate(_ESCAPES)


class _Ending(Exception):
    def __str__(self) -> str:
        return hide_passwords(super().__str__())


class UserError(_Ending, ValueError):
    """The user's input is wrong. The message names flag or file, the value and what is allowed."""

    code = 2


class DamagedData(_Ending, RuntimeError):
    """Data on the disk is damaged. The message names the file and the record."""

    code = 3


class Diverged(_Ending, RuntimeError):
    """The gradient stayed infinite or NaN. The message names the last good checkpoint."""

    code = 4


class MachineFailed(_Ending, RuntimeError):
    """A rank is missing or storage failed. The message names what was saved."""

    code = 5


class Stopped(_Ending, RuntimeError):
    """Stopped on request after a complete checkpoint. The same command continues from there."""

    code = 75


ENDINGS = (UserError, DamagedData, Diverged, MachineFailed, Stopped)


def name_os_error(error: OSError, consequence: str = "") -> UserError | MachineFailed:
    """The error to report for a file that cannot be read or written."""
    where = f"{error.filename}: " if error.filename else ""
    what = f"{where}{error.strerror or error}"
    if error.errno == errno.ENOSPC and error.filename and not _has_inodes(str(error.filename)):
        what += " (for more files; its inodes are used up, not its bytes)"
    return UserError(what) if error.errno in WRONG_PATH else MachineFailed(f"{what}{consequence}")


def _has_inodes(place: str) -> bool:
    while not os.path.lexists(place):
        place = os.path.dirname(os.path.abspath(place))
    try:
        system = os.statvfs(place)
    except OSError:
        return True
    return system.f_favail > 0 or not system.f_files  # some file systems count none


def name_system_error(error: OSError | RuntimeError, consequence: str = "") -> Exception:
    """The error to report for one of the system, which a library may have made a RuntimeError.

    Any other RuntimeError is returned as it is.
    """
    if isinstance(error, OSError):
        return name_os_error(error, consequence)
    text = " ".join(str(error).split())
    if text.startswith("Symlink loop"):  # pathlib's
        return UserError(text)
    is_limit = any(of_machine in text for of_machine in OF_MACHINE)
    return MachineFailed(f"{text[-200:]}{consequence}") if is_limit else error
