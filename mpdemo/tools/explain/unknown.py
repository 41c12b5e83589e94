"""What a message says of itself, where no row of the table of known failures knows it; and who is missing from a list.

Nothing is guessed here: the message's own advice is quoted, the two things that must agree are named, and the library
that raised it.
"""

import ast
import re
import warnings
from contextlib import suppress
from dataclasses import replace

from mpdemo.tools.explain.known import Known
from mpdemo.tools.explain.looks import LIBRARY

OTHERS = 2000  # lines in which other ranks are looked for
MESSAGE = 4000  # characters of a message that are looked at
LONGEST = 300  # characters of an advice that are quoted
ADVICE = re.compile(
    r"\b(?:[Pp]lease (?!report)|[Mm]ake sure|[Ee]nsure|[Cc]onsider|[Tt]ry |[Dd]id you|HINT|[Hh]int:|[Ii]f you|"
    r"[Yy]ou (?:can|should|must|need|may|have to)|(?:[Nn]eed|[Rr]equired?) to\b|requires? (?!grad)|usually|[Uu]pgrade|"
    r"[Ee]xpects\b(?!:)|(?:[Vv]alid|[Aa]llowed|[Ss]upported|[Aa]vailable|[Pp]ossible) (?:[\w-]+ ){0,3}(?:are|is)\b|"
    r"[Cc]hoose|[Mm]ust be (?:one|either)\b|"
    r"[Rr]einstall|instead\b|[Oo]ne option|[Ee]ither |help\b|(?:may|might) be (?!async|incorr)|likely|probably|"
    r"[Tt]o \w+ [^.;]{0,200},? (?:use|set|run|pass|add) )|"
    r"(?:^|[.;:,!?] +|\bor |\band )[`\"']?(?:[Ss]et|[Uu]se|[Ee]nable|"
    r"[Dd]isable|[Ii]ncrease|[Dd]ecrease|[Rr]educe|[Rr]emove|[Ii]nstall|[Pp]ass|[Cc]all|[Rr]un|[Aa]dd|[Cc]heck|[Ss]pecify|"
    r"[Pp]rovide|[Ss]ee|[Rr]efer) "
)
SENTENCE = re.compile(r"(?<=[\w)\]`'\"][.!?]) +(?=[A-Z`'\"])|(?<!:)\n(?![a-z])")
A, B = (
    rf"(?P<{name}>(?:[^,;:.()\[\]\n]|\([^()]{{0,99}}\)|\[[^\[\]]{{0,99}}\]|[.:]\d){{1,200}}?)"
    for name in "ab"
)
BARE = "specified|set|provided|given|configured"
BEGIN, END, BE = r"(?:: |^|\. )", r"(?=$|[,;.)\n])", "(?:is|are|was|must be|should be)"
MORE, NOT = (
    "less|greater|smaller|larger|lower|higher|more|fewer|different",
    "does not|doesn't|do not|must|should",
)
AGREE = [  # two things of a message, and what must hold between them
    (rf"{BEGIN}{A} {BE}(?: not)?(?: evenly)? (?:divisible by|a multiple of) {B}{END}",
     "{} must be a multiple of {}"),
    (r"[Ee]xpect(?:ed|s):? (?:to (?:be|have|get) )?(?P<a>(?:(?!\. ).){1,200}?)[,;]? (?:but |instead |and )*"
     r"(?:got|found|received|actual(?:ly)?|but (?:it )?(?:has|have|is|was)):? (?P<b>.{1,200}?)(?=$|[;.] |\.$|\n)",
     "it expects {}, and gets {}"),
    (rf"(?:{BEGIN}|\(){A} (?:vs\.?|versus|!=) {B}{END}", "{} and {} must agree"),
    (rf"{BEGIN}{A} (?:{NOT}) (?:match|(?:be )?equal(?: to)?|agree with|fit) {B}{END}", "{} and {} must agree"),
    (rf"{BEGIN}{A} (?P<b>(?:must|should|has to|needs to) (?:not )?be (?!{BARE}\b).{{1,200}}?){END}", "{} {}"),
    (rf"{BEGIN}{A} {BE} (?:{MORE}) (?:than|from) {B}{END}", "{} and {} must fit"),
    (rf"{BEGIN}{A} exceed(?:s|ed)? {B}{END}", "{} must not exceed {}"),
    (rf"{BEGIN}{A} (?:only supports|supports only|is only supported (?:on|by|for|with)) {B}{END}", "{} needs {}"),
    (rf"{BEGIN}{A} (?:(?:do(?:es)?(?: not|n't)|cannot|can't) (?:support|handle|work with|be used (?:with|in|on))|"
     rf"{BE} (?:incompatible|not compatible) with) {B}{END}",
     "{} can't be used with {}"),
    (rf"{BEGIN}{A} (?:(?:must be|needs to be|has to be|should be|is not|was not|are not|not) "
     rf"(?:{BARE})|(?:is|are) required)(?P<b>){END}",
     "{} is not given, in the configuration or on the command line"),
    (r"^KeyError: (?P<a>.{1,60})(?P<b>)(?=\n|$)", "there is no entry {} in {}"),
    (r"\b[Kk]ey (?P<a>(['\"]).{1,60}?\2)(?P<b>)(?= (?:is )?not (?:in|found)|\n|$)",
     "there is no entry {} in {}"),
    (r"(?P<a>(['\"]).{1,60}?\2)(?P<b>)(?= (?:(?:is|was) )?not (?:found )?in:? (?:\[|\{|\w+\())",
     "there is no entry {} in {}"),
    (r"(?P<a>object of type 'NoneType' has no len|"
     r"'NoneType' object (?:has no attribute ['\"]\w{1,60}['\"]|is not \w+)|non-iterable NoneType)(?P<b>)",
     "a value is None ({}): what should have made it found nothing, or was left out"),
    (r"(?P<a>[\w.]{1,99}\(\)) got an unexpected keyword argument (?P<b>'\w+')",
     "{} takes no {}: misspelt, or of another version of the library"),
    (r"(?P<a>[\w.]{1,99}\(\)) missing \d+ required [\w-]+ arguments?: (?P<b>.{1,200})", "{} is called without {}"),
    (r"\[Errno \d+\] (?P<b>[^:\n]{1,99}): (?P<a>'.{1,200}')", "the system says of {}: {}"),
    (r"object of type (?P<a>'(?!int'|float')[\w.]+') has no len\(\)(?P<b>)",
     "{} has no length, as an iterable data set, which is read as a stream, has none"),
    (r"\bname (?P<a>'\w+') is not defined(?P<b>)", "{} is unknown here: misspelt, not imported, or set elsewhere"),
    (r"local variable (?P<a>'\w+') (?:where it is not|referenced before)(?P<b>)",
     "{} has no value yet: the line that sets it was not reached (an empty loop, another branch)"),
    (r"^IndexError: (?P<a>\w+) index out of range(?P<b>)", "an index is beyond the end of a {}: {}"),
    (r"(?P<a>(['\"]).{1,60}?\2) object has no attribute (?P<b>['\"]\w{1,60}['\"])",
     "{} has no {}: misspelt, never set, or of another version of the library"),
    (r"[Mm]ismatch(?:ed)? (?:between|of) (?P<a>.{1,200}?) and (?P<b>.{1,200}?)(?=$|[,;.:\n])", "{} and {} must agree"),
]  # fmt: skip
REFUSAL = re.compile(
    r"^[\w.]{0,200}?(?:Assertion|Value|Type|NotImplemented|[Cc]onfig(?:uration)?)(?:Error|Exception)\b"
)
LAUNCHER = re.compile(
    r"torch/distributed/(?:run|launch|elastic)\b|deepspeed/launcher|accelerate/commands|/bin/\w+run\b"
)
NOT_THERE = re.compile(  # a file
    r"\b(?:no|can(?:not|'t) \w+|could(?: not|n't) \w+|unable to \w+|failed to \w+) (?:\S{1,99} ){0,6}?"
    r"(?:files?|director(?:y|ies)|folders?|paths?|checkpoints?|images)\b|"
    r"(?:/\S{1,200}|\b(?:file|directory|folder|path|checkpoint)\b.{0,200}?) "
    r"(?:do(?:es)?(?: not|n't) (?:exist|(?:appear to )?(?:have|contain) \w+ file)|"
    r"(?:(?:is|are|was|were) )?(?:not found|missing)\b)|not a (?:file|directory)\b",
    re.I,
)
PROCESSES = re.compile(r"world.?size|\b(?:processes|ranks)\b", re.I)
FIRST_SIZE = re.compile(r"(?<=[\[(])\d+(?=, \d)")  # of a shape
SIZE = re.compile(r"[1-9]\d*(?=\D*$)")  # the last number
LAST_BATCH = "; only the first size differs, as that of a last batch that is smaller (drop_last=True)"
MORE_CAME = (
    "more processes came than the world size: start each once (by srun's tasks or by mp.spawn, not by both), and with "
    "a store (its file or port) that no other run has used"
)
CAME = re.compile(r"world_size=(\d+), worker_count=(\d+)")
LATE = re.compile(r"[Tt]imed? ?[Oo]ut|DEADLINE_EXCEEDED|[Dd]eadline [Ee]xceeded")
ABSENT = re.compile(
    r"(?:[Tt]imed out|[Mm]issing|[Ll]ost|[Dd]ead) (\w+?)s?(?: names| ids)?:\s*((?:\S*\d[,\s]*)+)"
)
WAITS = re.compile(r"\bRank (\d+)\]")
RANK = re.compile(r"^\[?rank[ :=]*(\d+)\b", re.I)
WORLD = re.compile(r"\b(?:world[ _]size\W*|WORLD_SIZE\W*|nranks\W*|MEMBER: \d+/)(\d+)")
STEP = re.compile(r"\bsteps?\b\W*(\d+)", re.I)


def library_of(places) -> str:
    """Return the name of the library that raised an exception, by the innermost places of its traceback: torch.cuda."""
    names = []
    for place in reversed(places):
        _, *path = re.split(r"(?:site|dist)-packages/(?:[^/]+\.egg/)?", place.rpartition(", in ")[0])
        if not path and not names and LIBRARY.search(place.rpartition(", in ")[0]):
            continue  # of Python's own, which a library has called
        if not path or names and path[-1].split("/")[0] != names[0].split(".")[0]:
            break
        parts = path[-1].removesuffix(".py").split("/")
        names.append(".".join(part for part in parts[:-1][:3] if part[0] != "_") or parts[0])
    return max(names, key=len, default="")


def unknown(seen) -> Known:
    """Return what an exception, or a line that looks like an error, says of itself."""
    text = "\n".join([seen.text, *(line for _, line in seen.message)])[:MESSAGE]
    library = library_of(seen.trace.inner) if seen.trace else ""
    plain = "an error" if seen.trace and not seen.trace.own else "an error in the program"
    says = {"exception": plain, "words": "the program's last words before it failed"}
    what = says.get(seen.says, "a line that looks like an error")
    what = f"an error that {library} raised" if library else what
    demand = _demand(seen, text)
    what += f": {demand}" if demand else ""
    if absent := ABSENT.search(text):
        numbers = ", ".join(re.findall(r"\d+(?=[,\s]|$)", absent[2]))
        what += f"; missing: {absent[1]} {numbers}"
    if said := advice(text):
        do = f"the message says: {said}"
    elif "multiple" in demand and PROCESSES.search(text):
        do = (
            "compare the number of processes that the launcher has started (--nproc-per-node, --ntasks) with the one "
            "that the settings ask for, such as the parallel sizes"
        )
    elif NOT_THERE.search(text):
        do = "check this path and its spelling, as the job sees it: from the folder in which it runs, on its node"
    elif came := CAME.search(text):
        do = (
            MORE_CAME
            if int(came[2]) > int(came[1])
            else "find the processes that failed before or never started"
        )
    elif LATE.search(text):
        do = (
            "find what it waited for: another rank (see its own last lines), the disk or the network; a longer timeout "
            "helps only if that is slow"
        )
    else:
        do = _place(seen, library)
    return Known((), what, do, kind="unknown")


def _demand(seen, text) -> str:
    """Return what must hold between the things that a message names, or what a line of code asserts; "" if unsaid."""
    found = ((re.search(expression, text), relation) for expression, relation in AGREE)
    match, relation = next((pair for pair in found if pair[0]), (None, ""))
    if not match:
        return _asserted(seen.trace.code) if seen.trace else ""
    a, b = match["a"].strip(), match["b"].strip() or _holder(seen)
    demand = relation.format(a, b)
    if "multiple" in relation and (size := SIZE.search(a)) and int(size[0]) > 1:
        fit = ", ".join(str(n) for n in range(1, 100) if int(size[0]) % n == 0)
        demand += f"; {size[0]} is a multiple of {fit}"
    return demand + (LAST_BATCH if a != b and FIRST_SIZE.sub("", a) == FIRST_SIZE.sub("", b) else "")


def _place(seen, library) -> str:
    """Return what to do about an exception of which only its place is known: whose code it is."""
    trace = seen.trace
    if not trace:
        return "search for the message's words; read the lines around it"
    if not trace.own:
        if LAUNCHER.search(" ".join(trace.inner)):
            return (
                "the launcher failed before your program began: look at the options that it was given, such as the "
                "number of processes, and the address and port of rank 0"
            )
        return "no line of your program stands in the traceback; search for the message's words"
    if REFUSAL.match(seen.text) and trace.code.startswith(("raise", "assert")):
        if library:
            return (
                f"{library} checks what it was given, and refuses it: change the setting or the input that the "
                "message names; this place in your own program hands it over"
            )
        return (
            "look at this place: it checks a setting or an input, and refuses it; change what it names, "
            "not the check"
        )
    if library:
        return (
            f"look at this place in your own program, and at what it hands to {library}; "
            "search for the message's words"
        )
    return "look at this place: the program itself raised the error, and the lines above it say when"


def _asserted(code) -> str:
    """Return that what a line of code asserts must hold; "" for any other line."""
    with (
        warnings.catch_warnings(action="ignore"),
        suppress(SyntaxError, ValueError, RecursionError, MemoryError),
    ):
        (statement,) = ast.parse(code.rstrip("\\ ,(")).body
        if isinstance(statement, ast.Assert) and not isinstance(statement.test, ast.Constant):
            return f"{ast.unparse(statement.test)[:LONGEST]} must hold"
    return ""


def _holder(seen) -> str:
    """Return what a traceback's last line of code looks into; where it does not say, what that may be."""
    found = re.findall(r"([\w.]+)\[", seen.trace.code) if seen.trace else []
    return found[-1] if found else "a dictionary, a configuration or a record of the data"


def advice(text) -> str:
    """Return the sentences of a message that say what to do; "" for none."""
    _, _, said = text.partition(": ")
    said = " ".join(" ".join(part.split()) for part in SENTENCE.split(said or text) if ADVICE.search(part))
    return said if len(said) <= LONGEST else said[: LONGEST - 4].rpartition(" ")[0] + " ..."


def with_ranks(log, seen) -> Known:
    """Return what is known of some lines, with the rank that is missing from them, or alone in them."""
    known = seen[0].known
    if known.kind == "waiting" and (said := missing(log, seen)):
        return replace(known, do=f"{said}; {known.do}")
    if seen[0].says == "nan" and (said := alone(log, seen[0])):
        return replace(
            known, what=said, do=f"look at this rank's batch of this step first; else: {known.do}"
        )
    return known


def alone(log, seen) -> str:
    """Say which rank's loss is the first that is no number, if those of others are in the same step; "" if none is."""
    line = log.split(seen.numbers[0])
    own, step = rank_of(*line), STEP.search(line[1])
    for number in log.finite[-OTHERS:] if step and own is not None else ():
        line = log.split(number)
        if rank_of(*line) != own and (found := STEP.search(line[1])) and found[1] == step[1]:
            return f"the loss of rank {own} is not a number in step {step[1]}, those of other ranks are"
    return ""


def missing(log, seen) -> str:
    """Say which rank is not among those that waited, and what it said last; "" if it cannot be told."""
    waited = {rank_of(*log.split(number), expression=WAITS) for s in seen for number in s.numbers} - {None}
    first, said, world = seen[0].numbers[0], {}, max(waited, default=-1) + 1
    for number in range(max(0, first - OTHERS), first):
        said[rank_of(*log.split(number))] = number
        world = max([world, *map(int, WORLD.findall(log.line(number)))])
    absent = {*range(world), *said} - waited - {None}
    if len(absent) != 1 or len(waited) < 2:
        return ""
    (rank,) = absent
    last = f"line {said[rank] + 1}: {log.split(said[rank])[1][:120]}" if rank in said else "not in this log"
    return f"rank {rank} is missing, all others waited; what it wrote last is {last}"


def rank_of(label, text, expression=None):
    """Return the rank that wrote a line, by what its text or its label says; None if neither does."""
    found = (expression or RANK).findall(text) or re.findall(r"rank(\d+)", label)
    return int(found[-1]) if found else None
