"""Is a script of the reader's own the same training with several processes, and does it resume?"""

import os
from collections.abc import Sequence
from typing import Any


class NotTheSame(AssertionError):
    """A script is another training on several processes, or nothing could be compared.

    Attributes
    ----------
    record
        What ``mpdemo same --json`` writes.
    """

    def __init__(self, text: str, record: dict[str, Any]) -> None:
        super().__init__(text)
        self.record = record


def check(
    script: str | os.PathLike[str], *args: object, processes: Sequence[int] = (1, 2), **options: object
) -> dict[str, Any]:
    """Run a script as ``mpdemo same`` does, and return what --json writes; raise if it isn't the same training.

    Parameters
    ----------
    script, args
        What stands behind ``--`` on the command line.
    processes
        The first number is compared with the others.
    options
        Those of the command, such as ``device="cpu"``, ``resume=True``, ``timeout=60``.

    Raises
    ------
    NotTheSame
        With what was found, where, and what to do.
    UserError
        In one line, if the script can't be run or an option isn't allowed.
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    from mpdemo.tools.same import command

    numbers = processes if isinstance(processes, Sequence) else [processes]
    given = options | {"processes": ",".join(map(str, numbers))}
    verdicts, record = command.run(command.arguments(script, args, given))
    lines = [line for verdict in verdicts for line in command.told(verdict)]
    if record["verdict"] != "same":
        raise NotTheSame("\n".join([" ".join(record["script"]), *lines]), record)
    return record
