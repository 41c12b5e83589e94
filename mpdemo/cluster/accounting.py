"""Accounting for a throw-away cluster: MariaDB and slurmdbd, from the cluster's folder like everything else.

Without it Slurm takes any account and any qos, and forgets a job some time after its end. With it, sbatch refuses what
is not the user's, and ``sacct`` remembers every job. https://slurm.schedmd.com/accounting.html
"""

from mpdemo.cluster.config import CLUSTER_NAME, user_name
from mpdemo.cluster.daemons import missing_programs, port_answers
from mpdemo.errors import UserError

PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db", "my_print_defaults")
INSTALL = "apt-get install slurmdbd mariadb-server-core mariadb-client-core"
PATIENCE = 120  # seconds for one command: a slow disk
ACCOUNT = "course"  # of a user whose site names none
# The database knows its user by the socket, so there is no password, and nobody else is let in.
DATABASE = "--skip-networking --skip-log-bin --innodb-buffer-pool-size=16M"
SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
DbdHost=localhost
DbdAddr={state.controller}
DbdPort={state.accounting_port}
SlurmUser={user}
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser={user}
LogFile={folder}/log/slurmdbd.log
PidFile={folder}/slurmdbd.pid
"""
SLURM_CONF = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={state.controller}
AccountingStoragePort={state.accounting_port}
AccountingStoragePass={folder}/munge.sock
AccountingStorageEnforce=associations,limits,qos
"""


def available() -> bool:
    """Whether the programs are installed here."""
    return not missing_programs(PROGRAMS)


def configure(state):
    """Write slurmdbd's configuration and add to the controller's, before that starts."""
    values = {"state": state, "folder": state.folder, "user": user_name()}
    file = state.folder / "slurmdbd.conf"
    file.touch(0o600)  # slurmdbd reads no other
    file.write_text(SLURMDBD_CONF.format(**values))
    with open(state.folder / "slurm.conf", "a") as file:
        file.write(SLURM_CONF.format(**values))


def start(daemons, wanted):
    """Start the database and slurmdbd, and enter the accounts and qos that this user may use.

    Parameters
    ----------
    daemons : mpdemo.cluster.daemons.Daemons
        Its munged runs, its controller does not yet.
    wanted : dict
        ``accounts`` and ``qos``: lists of names.

    Raises
    ------
    UserError
        One of them did not start, or Slurm refused a name.
    """
    state, user = daemons.state, user_name()
    socket = state.folder / "db.sock"
    database = ["--no-defaults", f"--datadir={state.folder}/db", f"--user={user}"]
    (state.folder / "db").mkdir(mode=0o700)
    _run(daemons, "mariadb-install-db", *database, f"--auth-root-socket-user={user}", "--skip-test-db")
    daemons.start("mariadbd", ["mariadbd", *database, f"--socket={socket}", *DATABASE.split()])
    daemons.wait_for("database", socket.exists)
    daemons.environment["MYSQL_UNIX_PORT"] = str(socket)  # where MariaDB's library looks for "localhost"
    daemons.start("slurmdbd", ["slurmdbd", "-D"])
    daemons.wait_for("slurmdbd", lambda: port_answers(state.controller, state.accounting_port))
    _change(daemons, "add", "cluster", CLUSTER_NAME)
    for name in wanted.get("qos", []):
        _change(daemons, "add", "qos", name)
    accounts, qos = wanted.get("accounts") or [ACCOUNT], ",".join(["normal", *wanted.get("qos", [])])
    for name in accounts:
        _change(daemons, "add", "account", name)
        _change(daemons, "add", "user", user, f"account={name}", f"qos={qos}")
    _change(daemons, "modify", "user", "where", f"name={user}", "set", f"defaultaccount={accounts[0]}")


def _change(daemons, *words):
    """Let Slurm's own command change the database."""
    _run(daemons, "sacctmgr", "--immediate", "--quiet", *words)


def _run(daemons, *command):
    """Run a command for the cluster; raise its last line where it fails."""
    done = daemons.client(*command, seconds=PATIENCE)
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
        raise UserError(f"accounting of the cluster in {daemons.state.folder}: {command[0]}: {said[-1].strip()}")
