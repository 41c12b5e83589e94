"""What can be found; the remedies stand in findings.toml."""

import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


@dataclass
class Finding:
    """One thing that is not as it should be."""

    name: str
    what: str

    def record(self) -> dict:
        """Return it for the JSON file."""
        return asdict(self) | TABLE[self.name]

    def __str__(self):
        return "  {name}: {what}\n    Remedy: {remedy} ({section})".format(**self.record())
