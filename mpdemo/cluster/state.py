"""What a throw-away cluster consists of, kept in its folder so that another process can take it down later."""

import json
import os
import secrets
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from mpdemo.errors import UserError

STATE_FILE = "cluster.json"
PREFIX = "mpdemo-cluster-"  # of folders in the temporary directory
SOCKET_PATH_LIMIT = 100  # bytes: the kernel allows 107 for a socket's path


@dataclass
class State:
    """One cluster: where it lies, its nodes and its processes."""

    folder: Path
    nodes: list[str]
    network: str  # "namespaces", "hosts" or "none"
    port: int  # of the controller; the nodes have the next ones, accounting the one after
    owned: bool  # the daemons end with the process that started them
    bridge: str | None = None  # connects the nodes, where each has a network of its own
    subnet: str = "127.77.0"
    mbit: int | None = None  # million bits per second that a node receives at most
    processes: dict = field(default_factory=dict)  # name -> (number, start time)

    @property
    def controller(self) -> str:
        """The controller's address."""
        return f"{self.subnet}.1" if self.bridge else "127.0.0.1"

    @property
    def accounting_port(self) -> int:
        """The port of slurmdbd, where there is one."""
        return self.port + len(self.nodes) + 1

    def save(self):
        """Write the state into the cluster's folder."""
        (self.folder / STATE_FILE).write_text(json.dumps(vars(self), default=str))

    @classmethod
    def load(cls, folder):
        """Read the state of the cluster in `folder`; `UserError` if there is none."""
        folder = Path(folder).absolute()
        try:
            return cls(**json.loads((folder / STATE_FILE).read_text()) | {"folder": folder})
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"no cluster in {folder}; start one: python -m mpdemo cluster up FOLDER") from None
        except OSError as error:
            why = f"{error.strerror}; only the user who started a cluster can take it down"
            raise UserError(f"cannot read {folder / STATE_FILE}: {why}") from None
        except (ValueError, TypeError):
            mend = f"end the daemons of that cluster, then rm -r {folder}"
            raise UserError(f"{folder / STATE_FILE} is damaged; do: {mend}") from None


def prepare_folder(folder) -> Path:
    """Make the cluster's folder; refuse one that is in use."""
    name = f"{PREFIX}{secrets.token_hex(4)}"  # made at the end only: a refusal leaves nothing behind
    folder = Path(folder or Path(tempfile.gettempdir(), name)).absolute()
    if len(os.fsencode(folder / "munge.sock")) > SOCKET_PATH_LIMIT:
        raise UserError(
            f"the path {folder} is too long for a socket (at most {SOCKET_PATH_LIMIT} bytes); use a shorter one"
        )
    if any(c in str(folder) for c in " \t#,[]%"):
        raise UserError(f"slurm.conf cannot hold the path {str(folder)!r}; use one without blanks and any of #,[]%")
    try:
        if (folder / STATE_FILE).exists():
            down = f"take it down first: python -m mpdemo cluster down {folder}"
            raise UserError(f"a cluster is already in {folder}; {down}")
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"{folder} is not empty; give a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)  # munged insists on a folder that others may pass through
    except OSError as error:
        raise UserError(f"cannot make the folder {folder}: {error.strerror}; give another one") from None
    return folder
