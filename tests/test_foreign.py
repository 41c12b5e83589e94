"""Whatever a file holds that somebody else wrote: one line or a right answer, soon, and nothing else has changed."""

import gzip
import json
import os
import time

import hostile
import pytest

from mpdemo import foreign, paths
from mpdemo.errors import UserError
from mpdemo.measure import traces
from mpdemo.notebook.records import beside
from mpdemo.tools.plan.records import efficiency_of


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    """The folder of all hostile files."""
    folder = tmp_path_factory.mktemp("bad")
    hostile.files(folder)
    return folder


def test_json_is_read_packed_or_not_and_its_fields_have_types(tmp_path):
    file = tmp_path / "file"
    row = {"name": "é", "steps": 3, "seconds": 1.5, "more": [None]}
    for content in (json.dumps(row).encode(), gzip.compress(json.dumps(row).encode())):
        file.write_bytes(content)
        assert foreign.unpacked(file) == row
    assert foreign.typed(row, steps=float, seconds=int | float, other=str) == {"steps": 3, "seconds": 1.5}
    for fields in ({"name": int}, {"steps": str}, {"seconds": int}, {"more": dict}):
        with pytest.raises(TypeError, match=f"^{next(iter(fields))} can't be "):
            foreign.typed(row, **fields)
    for number in (float("nan"), float("inf"), -(10**400)):
        with pytest.raises(TypeError, match="^steps can't be "):
            foreign.typed({"steps": number}, steps=float)


def test_the_end_of_a_file_is_read_and_blocks_of_nuls_are_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(foreign, "BLOCK", 4)
    file = tmp_path / "log"
    file.write_bytes(b"ab" + bytes(20) + b"cdefgh" + bytes(9) + b"i")
    text, cut = foreign.tail(file, 99)
    assert text.replace(b"\0", b"") == b"abcdefghi" and len(text) < 20 and not cut
    text, cut = foreign.tail(file, 8)
    assert text.replace(b"\0", b"").endswith(b"hi") and len(text) == 8 and cut
    os.truncate(file, 2**40)  # a hole
    assert foreign.tail(file, 8)[0].rstrip(b"\0").endswith(b"i") and not foreign.tail(file, 99)[1]


READERS = {
    "traces": lambda file: traces.read([file]),
    "plan --record": lambda file: efficiency_of(file, "h100"),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", hostile.NAMES)
def test_a_reader_answers_any_file_in_one_line(bad, reader, name):
    begun = time.monotonic()
    with pytest.raises(UserError) as refused:
        READERS[reader](bad / name)
    assert name in str(refused.value) and "\n" not in str(refused.value)
    assert time.monotonic() - begun < 10


def test_records_of_gpus_that_are_none_are_a_line_each(bad, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "root", lambda: tmp_path)
    for number, name in enumerate(hostile.NAMES):
        (tmp_path / f"runs/gpu/{number}").mkdir(parents=True)
        (tmp_path / f"runs/gpu/{number}/record.json").symlink_to(bad / name)
    assert " ".join(repr(beside("gpt")).split()).count("is no record") == len(hostile.NAMES) - 1  # no circle
