"""Files that nobody should have to read, in one list: what a reader of files is given in its tests."""

import gzip
import json
import os
import socket

DEEP = 100_000
HOSTILE = {  # name -> what is in the file
    "empty": b"",
    "one byte": b"{",
    "binary": bytes(range(256)) * 9,
    "no UTF-8": b'{"name": "\xff\xfe"}',
    "cut off": b'{"id": 7, "where": "this mach',
    "null": b"null",
    "a list": b"[[], {}]",
    "a text": b'"text"',
    "a huge number": b"1" + b"0" * 9999,
    "other types": b'{"id": [], "spec": 3, "parts": {"a": 1}, "traceEvents": {"b": null}, "exit_status": "x"}',
    "deep lists": b"[" * DEEP + b"]" * DEEP,
    "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "no numbers": b'{"id": NaN, "traceEvents": [{"ph": "X", "ts": NaN, "dur": -Infinity}], "parts": NaN}',
    "escapes": json.dumps({"id": "\x1b[2J", "name": "\x1b]0;title\x07\u202e", "where": "a\nb"}).encode(),
    "cut gzip": gzip.compress(b'{"traceEvents": []}')[:-9],
    "damaged gzip": gzip.compress(os.urandom(999))[:40] + b"x" * 999,
    "gzip of zeros": gzip.compress(bytes(2**24)),
    "NULs": bytes(9999),
    "UTF-16": "step 1\n".encode("utf-16"),
    "line ends of Windows": b"import torch\r\nprint(1)\r\n",
}


def files(folder) -> list:
    """Write all of them into a folder, beside a pipe, a socket, two bad links, a folder, and 3 GB that are a hole."""
    for name, content in HOSTILE.items():
        (folder / name).write_bytes(content)
    os.mkfifo(folder / "a pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(folder / "a socket"))  # its name may not be long
    (folder / "a circle").symlink_to("a circle")
    (folder / "a folder").mkdir()
    (folder / "a device").symlink_to("/dev/zero")
    (folder / "a hole").touch()
    os.truncate(folder / "a hole", 3 * 2**30)
    return sorted(folder.iterdir())


NAMES = [*HOSTILE, "a pipe", "a socket", "a circle", "a folder", "a device", "a hole"]
