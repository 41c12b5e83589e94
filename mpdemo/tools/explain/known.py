"""The known failures of training jobs, and which of them a line of a log shows.

They are data, in known_failures.toml. Taught in notebooks/60_crash.ipynb.
"""

import functools
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

# The order of evidence: the first finding of the first of these kinds is named. A row of the table has the kind
# "cause" unless it says otherwise, and counts as what its line is (see `findings.weigh`).
KINDS = (
    "node",  # what a node, its kubelet or Slurm says of it, which stands above what the program noticed
    "cause",  # what ended a rank: an uncaught exception, a signal, a fatal line, a launcher's report with a reason
    "error",  # a known failure in a line of an error, or an unknown exception without a traceback
    "warning",  # a known failure in a warning, or in another line that reports a failure
    "waiting",  # a rank that waited in vain, or lost another one, is seldom the one to blame
    "hint",
    "vague",
    "unknown",  # a line that looks like an error, and that no row of the table knows
    "ended",  # from outside, as the one says who ended it
    "told",  # a signal to end came, and not said from whom
    "consequence",
)
BLAMED = KINDS[:4]
# what ended a process, as launchers spell it: exitcode: -9, exit status 137, signal 9
SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV"}
SIGNAL = re.compile(
    r"signal[\s:=]{1,4}(\d\d?)\b|(?:code|status|exited with)[\s:=]{1,4}(?:-(\d\d?)|(1[34]\d))\b", re.I
)

# how the C library says why a call failed, in English (which its rows in the table use), German, French and Spanish
REASONS = {
    "EPERM 1": "Operation not permitted|Die Operation ist nicht erlaubt|Opération non permise|"
    "Operación no permitida",
    "ENOENT 2": "No such file or directory|Datei oder Verzeichnis nicht gefunden|"
    "Aucun fichier ou dossier de ce type|Aucun fichier ou dossier de ce nom|"
    "No existe el archivo o el directorio|No existe el fichero o el directorio",
    "EIO 5": "Input/output error|Eingabe-/Ausgabefehler|Erreur d'entrée/sortie|Error de entrada/salida",
    "ENOMEM 12": "Cannot allocate memory|Nicht genügend Hauptspeicher verfügbar|"
    "Impossible d'allouer de la mémoire|No se pudo asignar memoria",
    "EACCES 13": "Permission denied|Keine Berechtigung|Permission non accordée|Permiso denegado",
    "EBUSY 16": "Device or resource busy",
    "EEXIST 17": "File exists|Die Datei existiert bereits|Le fichier existe|El archivo ya existe|"
    "El fichero ya existe",
    "ENODEV 19": "No such device",
    "EMFILE 24": "Too many open files|Zu viele offene Dateien|Trop de fichiers ouverts|"
    "Demasiados archivos abiertos|Demasiados ficheros abiertos",
    "ETXTBSY 26": "Text file busy",
    "EFBIG 27": "File too large",
    "ENOSPC 28": "No space left on device|Auf dem Gerät ist kein Speicherplatz mehr verfügbar|"
    "Aucun espace disponible sur le périphérique|No queda espacio en el dispositivo",
    "EROFS 30": "Read-only file system|Das Dateisystem ist nur lesbar|"
    "Système de fichiers accessible en lecture seulement|Sistema de archivos de solo lectura",
    "ENOTEMPTY 39": "Directory not empty",
    "ESTALE 116": "Stale file handle|Stale NFS file handle",
    "EDQUOT 122": "Disk quota exceeded|Disc quota exceeded",
}
WAYS = [  # in small letters: a reason in words or as a number, its name, its English words
    (way.lower(), name.split()[0], texts.partition("|")[0])
    for name, texts in REASONS.items()
    for way in (*texts.split("|"), f"errno {name.split()[1]}]")
]


@dataclass(frozen=True)
class Known:
    """A known failure."""

    # messages of which one is in the log (how: see the table); empty: what stands for an unknown line
    seen: tuple
    what: str
    do: str
    notebook: str = ""  # where it is explained: a notebook, or a page's NAME.md
    kind: str = "cause"  # one of `KINDS`
    by: str = ""  # "slurm": its commands say this where they refuse
    # the words mean something else in a line, or raised at a place, in which this expression is found
    unless: str = ""
    # the reasons, of `REASONS`, of which a line must give one: "EACCES EPERM"; with "-" among them it may give none
    errno: str = ""
    retry: bool = False  # the same job may succeed if it is only started again

    @functools.cached_property
    def pattern(self):
        """The compiled expression that finds the message."""
        return re.compile("|".join(map(_expression, self.seen)))

    @property
    def page(self) -> str:
        """The file that explains it, or an empty text."""
        return (
            f"notebooks/{self.notebook}{'' if self.notebook.endswith('.md') else '.ipynb'}"
            if self.notebook
            else ""
        )

    def explained(self, line) -> tuple[str, str]:
        """Say what it is and what to do, with the text that the message's last ``...`` stood for in a line."""
        match = self.pattern.search(spelled(line)[0])
        shown = [part for part in match.groups() if part is not None] if match else []
        if not shown:
            return self.what, self.do
        return self.what.replace("{}", shown[-1]), self.do.replace("{}", shown[-1])


def _expression(words) -> str:
    """Return the expression of a message: whole words, and the first letter in both cases if it is a small one."""
    text = words.removeprefix("^").removesuffix("$")
    first, *others = map(re.escape, text.split("..."))
    if first[:1].islower():
        first = f"[{first[0]}{first[0].upper()}]{first[1:]}"
    found = "(.{0,300}?)".join([first, *others] if first or words[0] == "^" else others)
    if others and not others[-1]:
        found = found.removesuffix("?)") + ")"  # all that is left of the line
    begins = "^" if words[0] == "^" else r"(?<!\w)" if text[0].isalnum() else ""
    return begins + found + ("$" if words[-1] == "$" else r"(?!\w)" if text[-1].isalnum() else "")


UNKNOWN = {  # by what a line looks like that no row of the table fits; of exceptions see unknown.py
    "nccl": Known(
        (), "NCCL's own reason", "search for these words and NCCL; NCCL_DEBUG=INFO says more", kind="hint"
    ),
    "exit": Known((), "a process failed; not said why", "look for its own error above", kind="consequence"),
}


@functools.cache
def known_failures() -> tuple:
    """Return every `Known` failure of the table."""
    rows = tomllib.loads(Path(__file__).with_name("known_failures.toml").read_text(encoding="utf-8"))[
        "failure"
    ]
    return tuple(Known(**row | {"seen": tuple(row["seen"])}) for row in rows)


@functools.cache
def _pieces() -> list:
    """Return the longest piece of each message and its row: a search for them is much faster than the expressions'."""
    messages = [(words.strip("^$"), known) for known in known_failures() for words in known.seen]
    parts = [(words[words[0].islower() :].split("..."), known) for words, known in messages]
    return [(max(pieces, key=len), known) for pieces, known in parts]


def known_in(line, by="", place="") -> Known | None:
    """Return the first row of the table whose message is in a line: of all rows, or of those that one program says.

    `place` is where it was raised, if a traceback says it.
    """
    line, reason = spelled(line)
    fitting = (
        known
        for piece, known in _pieces()
        if piece in line
        and by in known.by
        and not (known.errno and reason not in known.errno.split())
        and known.pattern.search(line)
    )
    return next((k for k in fitting if not (k.unless and re.search(k.unless, f"{place} {line}"))), None)


@functools.lru_cache  # whoever knows a line weighs and explains it next
def spelled(line) -> tuple[str, str]:
    """Return a line as the table spells it, a signal's name behind it, a reason in English; the reason, or "-"."""
    signal = SIGNAL.search(line)
    name = SIGNALS.get(int(signal[signal.lastindex]) % 128) if signal else ""
    small = line.lower()
    way, reason, words = next((way for way in WAYS if way[0] in small), ("", "-", ""))
    if way and way[-1] != "]":
        at = small.find(way)
        line = line[:at] + words + line[at + len(way) :]
    return line + (f" ({name})" if name else ""), reason


def with_cause(refusal) -> str:
    """Return what a command of Slurm said as it refused, with the cause that the table has for it."""
    known = known_in(refusal, by="slurm")
    return "{}. Likely cause: {}; {}".format(refusal, *known.explained(refusal)) if known else refusal
