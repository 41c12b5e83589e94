"""Read files that others may have written: none of them hangs or fills the memory, and what is wrong is one line.

    with foreign.faults("run.json is no record"):
        record = foreign.typed(foreign.unpacked("run.json"), name=str, steps=int, seconds=float)

All that reads a log, a trace or a record reads it so.
"""

import contextlib
import errno
import gzip
import json
import os
import stat
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Any, BinaryIO

from mpdemo.errors import QUOTED, UserError, error_line

LARGEST = 512 * 2**20  # bytes of JSON, unpacked: Python needs several times as many to read them
BLOCK = 2**20  # bytes that are read at once
MOST = 2**64  # numbers in files are smaller, and so are addresses
DAMAGED = OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError, ArithmeticError
DAMAGED += RecursionError, MemoryError, SyntaxError


@contextlib.contextmanager
def faults(said: str, do: str = "") -> Generator[None]:
    """Turn whatever a damaged file makes Python raise into a `UserError`: what is `said` of it, why, and what to do."""
    try:
        yield
    except UserError:
        raise
    except DAMAGED as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error_line(error)
        raise UserError(f"{said} ({why})" + (f"; {do}" if do else "")) from None


def opened(path: str | Path) -> BinaryIO:
    """Open a file for reading; `OSError` for a pipe, a socket or a device, which may never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    # which doesn't wait if it has become a pipe
    return open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")


def try_to_write(path: Path) -> None:
    """Raise `OSError` if a file can't be written, and leave everything as it was."""
    if is_there := os.path.lexists(path):
        opened(path).close()
    path.open("a").close()
    if not is_there:
        path.unlink()


def unpacked(path: str | Path) -> Any:
    """Return what is in a file of JSON, packed by gzip or not."""
    with opened(path) as file:
        size, packed = os.fstat(file.fileno()).st_size, file.peek(2)[:2] == b"\x1f\x8b"
        text = (
            (gzip.GzipFile(fileobj=file) if packed else file).read(LARGEST + 1) if size <= LARGEST else b""
        )
    if max(size, len(text)) > LARGEST:
        raise ValueError(f"it is larger than {LARGEST // 2**20} MiB")
    return json.loads(text)


def text(path: str | Path, most: int) -> str:
    """Return what is in a file of UTF-8 of at most so many bytes."""
    with opened(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it is larger than {most} bytes")
    return content.decode().replace("\r\n", "\n")


def typed(row: Any, **fields: Any) -> dict[str, Any]:
    """Return those of some fields that a JSON object has; `TypeError` where one is not of its type.

    A type is one that `isinstance` takes; ``float`` also takes whole numbers, and no number may be infinite or none.
    """
    if not isinstance(row, dict):
        raise TypeError(f"{QUOTED.repr(row)} is no object with names")
    found = {name: row[name] for name in fields if name in row}
    for name, value in found.items():
        kind = int | float if fields[name] is float else fields[name]
        if not isinstance(value, kind) or isinstance(value, int | float) and not abs(value) < MOST:
            raise TypeError(f"{name} can't be {QUOTED.repr(value)}")
    return found


def tail(path: str | Path, most: int) -> tuple[bytes, bool]:
    """Return the last bytes of a file, and whether there are others before; blocks of NULs alone are left out.

    Such blocks, of any number, are in a log that was emptied while a program wrote, or whose node crashed.
    """
    blocks, left, end = [], most, 0
    with opened(path) as file:
        written = _written(file.fileno())
        for begin, end in reversed(written):
            while begin < end and left:
                size = min(BLOCK, end - begin, left)
                end -= size
                file.seek(end)
                block = file.read(size)
                if block.count(0) < len(block):
                    blocks.append(block)
                    left -= size
            if not left:
                break
    return b"".join(reversed(blocks)), not left and end > written[0][0]


def _written(number) -> list:
    """Return the parts of a file, in order, that were ever written: its holes, which are NULs, may be huge."""
    parts, end, size = [], 0, os.fstat(number).st_size
    with contextlib.suppress(OSError):  # nothing from there on
        while end < size:
            begin = os.lseek(number, end, os.SEEK_DATA)
            end = os.lseek(number, begin, os.SEEK_HOLE)
            parts.append((begin, end))
    return parts
