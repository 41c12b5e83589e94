"""A release is refused where two files name different versions."""

import re

import pytest
import release


@pytest.fixture
def released(tmp_path):
    """A copy of the files that name a version, as they are when 1.2.3 is released."""
    (tmp_path / "mpdemo").mkdir()
    for file in release.NAMED:
        text = (
            (release.ROOT / file).read_text().replace("0.1.0", "1.2.3").replace("## Unreleased", "## 1.2.3")
        )
        text = re.sub(r"(?m)^date-released: .*\n", "", text)
        text = text.replace("version: 1.2.3", "version: 1.2.3\ndate-released: 2026-12-01")
        (tmp_path / file).write_text(text)
    return tmp_path


def test_a_tag_that_all_files_name_is_released(released):
    assert release.disagreements("v1.2.3", released) == []


@pytest.mark.parametrize("file", release.NAMED)
def test_a_file_of_another_version_is_named(released, file):
    (released / file).write_text((released / file).read_text().replace("1.2.3", "1.2.4"))
    assert release.disagreements("v1.2.3", released) == [f"{file} has 1.2.4, the tag v1.2.3"]


def test_what_is_not_released_yet_is_refused(capsys):
    assert release.main("v0.0.0") == 2 and "the versions disagree" in capsys.readouterr().err
