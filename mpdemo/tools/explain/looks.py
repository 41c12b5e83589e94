"""What a line of a log looks like: its label, a step of the training, a last word, an error.

No expression goes back and forth in a line for longer than the line is: what it repeats has an upper bound, or begins
where the line does.
"""

import json
import re

from mpdemo.errors import printable

TIME = (
    r"\[?(?:(?:\d{4}[-/])?\d\d[-/]\d\d[T ]|[A-Z][a-z][a-z] [ \d]\d )?\d\d:\d\d:\d\d[\d.,]*"
    r"(?:Z|[+-]\d\d:?\d\d)?\]? ?"
)
DATE = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.,]*")
LABEL = (  # of a launcher: [rank3]: [default3]: 3: [1,3]<stderr>: (Actor pid=1) [pod/a/b] worker-1  |
    r"\[(?:rank|default)?\d+\]:? ?|\[\d+,\d+\]<std\w+>: ?|\d+:(?: |(?!\d))|"
    r"\(\w[^()]{0,99}?pid=[^()]{0,99}\) ?|\[pod/[^\s\]]+\] ?|[\w.-]{1,99} +\| ?"
)
# bytes of a line that are looked at, and characters of what it says; then its end
LINE, TEXT = 2**16, 2**12
DEEP = 3  # JSON in the JSON of a container
FIELDS = "log message msg text exc_info exception stack_trace traceback"  # of a line of JSON
LOGGER = (
    r"(?:- )?(?:[\w.]{1,99} - )?(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) - |(?:DEBUG|INFO|WARNING):[\w.]+:)"
)
HOST = re.compile(
    r"^(?!(?:srun|sbatch|salloc|slurm\w*|bash|sh|python\S*|\S+\.(?:py|sh|cpp)|mpdemo|wandb|pyxis|kernel|step|epoch|loss|"
    r"error|\w*(?:Error|Exception|Warning)|[A-Z]+): )[A-Za-z][\w.-]{0,99}: "
)
WARNS = re.compile(r"^(?:(?:: )?\[?W(?:\d{3,4}|[ \]])|\[?WARNING\b|(?:\S+:\d+: )?[A-Z]\w*Warning\b)")
GLOG = re.compile(r"\[?([IWEF])\d{3,4} \d\d:\d\d:[\d.]+ (?:\d+ )?\S+\] ?")

TRACEBACK = "Traceback (most recent call last)"
FILE = re.compile(r'^[\s|+]*File "(.+?)", line (\d+)(?:, in (\S+))?')
# the place of a SyntaxError, without a traceback's first line
HEADLESS = re.compile(r'^ +File "[^"]+", line \d+$')
LIBRARY = re.compile(  # of any layout, with "/" on Windows too
    r"site-packages|dist-packages|/lib/python\d|^<|\.px[id]$|\.pyx$|/bin/[^/.]+$|"
    r"^[A-Za-z]:/.*/(?:[Ll]ib|[Ss]cripts)/"
)
BOX = re.compile(r"^([│╭╰])(.*?)[│╮╯]?\s*$")  # Rich draws one around a traceback
BOXED_PLACE = re.compile(r" {0,9}(\S{1,300}):(\d+) in (\S+)")
# IPython's places
CELL = re.compile(r"^(?:File (\S{1,300}):(\d+), in ([^\s(]+).*|(Cell In ?\[\d+\]), line (\d+))")
WITHIN = {  # what the file of a frame says of the line that raised, in words of the table
    " (in a download)": re.compile(r"/(?:urllib3?|requests|http|httpx|httpcore|aiohttp)/(?!web|server)"),
    " (in a worker)": re.compile(r"/torch/utils/data/_utils/worker\.py$|/multiprocessing/pool\.py$"),
}
RAISED = re.compile(
    r"^(?!srun: |slurmstepd: |(?:INFO|DEBUG|WARNING|ERROR|wandb)\b)[A-Za-z_][\w.]*(?::\s|:?$)"
)
# above a traceback
IGNORED = re.compile(r"Logging error|Exception ignored|Error in (?:atexit|sys\.excepthook)")
# of a service beside the program
ASIDE = r"Exception (?:while handling|in callback)|exception was never retrieved"
THREAD = re.compile(rf"^Exception in thread |{ASIDE}")
DIRECT = "The above exception was the direct cause"  # it was raised from another one
# of the line that raised, where several are shown
MARKED = re.compile(r"^\s{0,99}(?:❱|-{1,9}>) {0,9}\d{1,9} ")
CHAIN = re.compile(f"During handling of the above exception|{DIRECT}")

BARE = re.compile(r"^[\w.]+:$")  # an exception whose text begins in the next line
# of an exception or a line whose cause stands below it
WRAPS = re.compile(
    r"raised:|failed with|could not be started|FATAL|RayTaskError|BackendCompilerFailed|:\s*$"
)
# of an exception whose cause stands above it
REFERS = re.compile(
    r"(?:above|logs?|output) for (?:the |more |further )|previous errors?|see the other |"
    r"(?:statements?|errors?|messages?|see|reported|printed|shown|listed)(?: as)? above",
    re.I,
)
# of an exception that a library caught by itself, to say it in its own words
SAYS_LITTLE = re.compile(
    r"(?:KeyError: .*|ValueError: (?:invalid literal|could not convert) .*|[\w.]+:?\s*)$"
)
EXCEPTION = re.compile(
    r"^\s*what\(\): |(?:^|[\]:|)] ?)(?:[A-Za-z_]\w*\.)*(?:\w+Error|\w*Exception|\w+Interrupt)(?::|$)"
)
NEVER = re.compile(
    r"^(?:\s*$|(?:wandb|mlflow)(?!\.|.*\bERROR\b)|frame #\d+: |#\d+ .+ from \S+:\d+$)"
)  # or C++'s frames
HARMLESS = re.compile(
    r"^(?:wandb: |(?:mlflow|\[?INFO|\[?DEBUG)\b)|NCCL INFO|\[I |ServerApp|[Rr]etrying|trying (?!to)\w|will retry|"
    r"alling back|\bgoing to \S+ instead|not a git repository|[Ii]gnor|ing this combination|^\+ |"
    rf"{ASIDE}"
)
ERROR = re.compile(
    r"(?:^|[\s\[|:])(?:ERROR|CRITICAL|[Ee]rror(?!: \d*\.\d))(?:\]|:| -)|\|\w*ERROR\||\bAbort\(-?[1-9]|"
    r"\b[Ee]rror (?:response|at \S+:\d)|\blevel=error\b|\*\*\* SIG[A-Z]|\bSignal: [A-Z]|exited on signal [1-9]|"
    r"^\[E(?:\d{3,4} \S+ \d+)? [\w.]+:\d+\] "
)
# of a library, after which the process ends
FATAL = re.compile(
    r"^(?:: )?\[?F(?:\d{3,4} \S+ +\d+)? \S+:\d+\] |(?:^|[\s\[|:])(?:FATAL|[Ff]atal)(?:\]|:| -)|^panic: |\bpanicked at |"
    r"\blevel=(?:fatal|panic)\b"
)
HARD = re.compile(
    r"(?:^|: )(?:srun: |slurmstepd: |line \d+: )|^setup line failed|exitcode|Killed|core dumped|Aborted|Abort\(|"
    r"terminate called|atchdog|CANCELLED AT|^\[E(?:\d{3,4})? |loss scale to 0\.0|cudaGetDeviceCount\(\)|"
    r"Segmentation fault|ssertion `|died from signal"
)
FAILS = re.compile(  # what any other line says that reports a failure
    r"fail|error|fault|abort|kill|\b(?:not?|neither|cannot|can't|couldn't|unable|attempt|nan|full|down|too)\b|denied|"
    r"invalid|refus|exceed|out of|time[ds]? ?out|lost|missing|mismatch|unsupported|unknown|exhausted|overflow|must|"
    r"required|in use|corrupt|insufficient|dead|crash|reject|incompatible|cancel|signal|reducing loss|Xid|NCCL WARN",
    re.I,
)
PLAIN = re.compile(  # how tools say that they failed
    r"\bfailed\b|\b(?:[Ff]ailed|[Uu]nable) to \w|\b[Cc](?:annot|ould not) \w|^make(?:\[\d+\])?: \*\*\*|"
    r"non-zero|denied\b|: fatal |not found\b|No such file|\bundefined (?:symbol|reference)"
)
LAUNCHERS = re.compile(  # what a launcher or Python says around a failure
    r"SIGTERM|Terminating process|closing signal|exitcode|^Traceback|^(?:Sender|Subject): |"
    r"torch/distributed/(?:run|elastic)"
)
REPORTS = re.compile(  # an exception that only says that somebody failed
    r": (?!.*: )(?=.*\b(?:command|process(?:es)?|child(?:ren)?|(?:worker|task|job|trial|script|rank|actor)s?)\b)"
    r".{0,120}\b(?:failed|exited|died|crashed|terminated|errored)\b(?! to\b)[^:]{0,60}$",
    re.I,
)
# Slurm ends a job, and what its signals then do
CANCELS = re.compile(r"JOB .{1,99}CANCELLED AT|CANCELLED AT .{0,60}DUE TO (?!TASK|SIGNAL)")
KILLED = re.compile(r"is killed by signal: (?:Killed|Terminated)|exited unexpectedly")
EXITED = re.compile(
    r"\b(?:exit(?:ed|s)?|terminated|returned|failed) (?:with |non-zero )*(?:(?:exit|return) )?(?:code|status)"
    r"[ :=]*(?:-?[1-9]|no)|"
    r"exited with non-zero|\bended with [1-9]|^\s*(?:[Ee]xit [Cc]ode|exit)[ :=]+-?[1-9]|BackoffLimitExceeded|"
    r"^\s*Status: +Failed|HYDRA_FULL_ERROR"
)

BAR = re.compile(r"\d%\|.{0,200}?(\d{1,12}/\d{1,12})")  # of progress, and its count
STEP = re.compile(
    r"\b(?:global_)?(?:epochs?|step|iter(?:ation)?s?|loss|batch|trial|round|episode|fold)\b"
    r"\W*\d(?!.{0,200}\bfailed with)|"
    r"(?<!\?)(?:it/s|s/it)|(?:images|samples|tokens|tok)/s|"  # a bar that has no rate yet shows "?it/s"
    r"\bsav(?:ed|ing)\b.{0,200}\bcheckpoint|\bcheckpoint\b.{0,200}\bsaved\b",
    re.I,
)
LOSS = re.compile(r"^(?!.*train_runtime).*loss\b[\"']?[\s:=]*(?:tensor\()?\d", re.I)
NAN = re.compile(r"\b(?:\w*loss|grad_?norm)\b[\"']?[\s:=]*(?:tensor\()?[\"']?nan\b", re.I)
RESTART = re.compile(
    r"[Rr]esum(?:ed|ing|es)\b|[Rr]estor(?:ed|ing)\b|[Rr]estart(?:ing|ed)?\b|[Aa]ttempt \d|oad(?:ed|ing) \w*checkpoint"
)
ENDED = re.compile(  # what the program itself says after its last step
    r"\btraining\b(?: (?!not|never)\w+){0,2} (?:done|finished|completed?|ended|successful(?:ly)?)\b|"
    r"\b(?:finished|completed|done) (?:with )?training\b|`Trainer\.fit` stopped: |['\"]train_runtime['\"]|"
    r"^\W*(?:all )?(?:done|finished)\W*$",
    re.I,
)
DONE = re.compile(
    r"\b(?:done|finished|completed?|succe\w+|ended well|elapsed|best|final)\b|100%|exit code 0", re.I
)
NOT_DONE = re.compile(
    r"\b(?:not|un|never|before)\b|fail|error|^wandb|\b(?:status|code|rc)\W{1,3}[1-9]", re.I
)
NEW = [  # no part of an exception's message: a rule, a logger's or a tool's line, the shell's, a bar, ...
    re.compile(
        rf"^(?:{GLOG.pattern})|^[-=*]{{9}}|^(?:mpdemo|wandb|mlflow|clearml|neptune)\b|^\+ |\d%\||^\(\w+\) \S+@|"
        r"^(?:rm|cp|mv|ln|ls|cat|mkdir|tar|rsync|scp|ssh|chmod|df|du|make|bash|sh|kill|git|conda|docker)(?:\[\d+\])?: |"
        r"^[^a-z]{0,40}\b(?:DEBUG|INFO|WARN|WARNING)\b"
    ),
    *(HARD, STEP, ENDED, EXCEPTION, WARNS, IGNORED, THREAD),
]


def unboxed(text) -> str:
    """Return a line of a traceback that Rich or IPython has drawn as Python prints it."""
    if not (box := BOX.match(text)):
        return CELL.sub(r'  File "\1\4", line \2\5, in \3', text)
    if box[1] == "╭" and TRACEBACK in text:
        return f"{TRACEBACK}:"
    place = BOXED_PLACE.match(box[2])
    return f'  File "{place[1]}", line {place[2]}, in {place[3]}' if place else f"    {box[2].strip()}"


def looks_like(text) -> str:
    """Return what a line looks like; "" for a harmless one."""
    if NEVER.match(text):
        return ""
    if EXCEPTION.search(text[:200]):
        return "exception"
    if NAN.search(text):
        return "nan"
    if HARMLESS.search(text):
        return ""
    if HARD.search(text):
        return "fault" if ERROR.search(text) or FATAL.search(text) else "hard"
    if FATAL.search(text):
        return "fault"
    if EXITED.search(text):
        return "exit"
    return "nccl" if "NCCL WARN" in text else "error" if ERROR.search(text) else "soft"


def notes(text) -> tuple:
    """Return whether a line is a step, a step whose loss is a number, a restart, a last word, the program's own one."""
    # no exception is a step, although it may speak of one, or of a checkpoint that was not saved properly
    step = STEP.search(text) and not (
        HARMLESS.search(text.removeprefix("[").removeprefix("INFO"))
        or HARD.search(text)
        or EXCEPTION.search(text)
    )
    ended = ENDED.search(text)
    done = ended or DONE.search(text) and not NOT_DONE.search(text)
    finite = step and LOSS.search(text) and not NAN.search(text)
    return tuple(map(bool, (step, finite, RESTART.search(text), done, ended)))


def seen_text(raw) -> str:
    """Return a line as a terminal shows it: the last state of a progress bar, and no colours."""
    return printable(
        shortened(raw.rstrip(b"\r").rpartition(b"\r")[2], LINE, b" ... ").decode(errors="replace")
    )


def shortened(text, most, dots):
    """Return the beginning and the end of what is very long: expressions take their time."""
    return text if len(text) <= 2 * most else text[:most] + dots + text[-most // 4 :]


def unlabelled(log) -> list[str]:
    """Return the lines of a log without a launcher's labels."""
    return [re.sub(f"^(?:{LABEL})*", "", line) for line in log.splitlines()]


def label_of(lines, traced):
    """Return the expression of what stands before each line, as a launcher or a logger has written it.

    It is a label if nearly all of the first lines begin with it, a logger's words or one host's name, or if a traceback
    does, of which `traced` holds the first lines.
    """
    common = re.compile(f"(?:{TIME}|{LABEL})*")

    def bare(line):
        text = _from_json(seen_text(line))
        return text[common.match(text).end() :]

    texts = [text for line in lines if (text := bare(line)).strip()]
    learned = [TIME, LABEL, *(_ahead(list(map(bare, block))) for block in traced)]
    for expression in (re.compile(LOGGER), HOST):
        found = [match for text in texts if (match := expression.match(text))]
        shapes = {_shape(match[0]) for match in found} if expression is HOST else {LOGGER}
        alone = expression is HOST and len(texts) == 1
        if len(shapes) == 1 and len(texts) <= 1.1 * len(found) and not alone:
            learned += shapes
    return re.compile(f"(?:{'|'.join(filter(None, dict.fromkeys(learned)))})*")


def _ahead(block) -> str:
    """Return the shape of what stands before a traceback's first line, if one of its places stands behind it too."""
    words = block[0].partition(TRACEBACK)[0]
    shape = _shape(words)
    return (
        shape
        if re.search(r"\w", words) and any(re.match(f'{shape} +File "', line) for line in block)
        else ""
    )


def _shape(words) -> str:
    """Return the expression of words in which other numbers may stand."""
    return re.sub(r"\d+", r"\\d+", re.escape(words))


def split(raw, label) -> tuple:
    """Return a line's label, without times, its text, which may be indented, and how many times stand before it.

    `label` is the labels' expression.
    """
    text, labels = seen_text(raw), ""
    for _ in range(DEEP):
        end = label.match(text).end()
        labels, text = labels + text[:end], text[end:]
        if text == (text := _from_json(text)):
            break
    text = "\n".join(unboxed(shortened(line, TEXT, " ... ")) for line in text.split("\n"))
    short, times = re.subn(TIME, "", GLOG.sub(r"\1", labels))
    return re.sub(LOGGER, "", short).strip(), text, times


def _from_json(line) -> str:
    """Return the text that a logger wrote as a line of JSON; any other line as it is."""
    if line[:2] != '{"' or line.rstrip()[-1:] != "}":
        return line
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return line
    severe = "ERROR: " if re.match("error|crit|fatal", str(found.get("level")), re.I) else ""
    texts = [found[name].rstrip("\n") for name in FIELDS.split() if isinstance(found.get(name), str)]
    return printable(severe + "\n".join(texts)) if texts else line
