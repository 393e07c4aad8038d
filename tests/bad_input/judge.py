"""How a case may end."""

from collections.abc import Callable

from albert_ds.base.errors import DamagedData, UserError

AS_PROMISED, TRACEBACK, HANG, WRONG = "as promised", "traceback", "hang", "silently wrong"


def refusal(read: Callable[[], object]) -> str | None:
    """What is said, in one line, where input is refused; None where it is taken."""
    try:
        read()
    except (UserError, DamagedData) as error:
        assert str(error).strip() and "\n" not in str(error), repr(str(error))
        return str(error)
    return None
