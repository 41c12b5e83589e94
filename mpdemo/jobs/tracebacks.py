"""Follow the tracebacks of a log to the exceptions that end them, and tell which exception of a chain counts."""

import re

MOST = 1000  # tracebacks that are followed to their exception
LONGEST = 400  # lines of a traceback, with those that other ranks write in between
FILE = re.compile(r'\s*(?:\| )?File "(.+?)", line (\d+)(?:, in (\S+))?')
NOT_THE_USERS = re.compile(r"site-packages|dist-packages|/lib/python\d|^<|/bin/(?:torchrun|accelerate|deepspeed)")
RAISED = re.compile(r"[A-Za-z_][\w.]*(?::\s|:?$)")  # the line that ends a traceback
HARMLESS = re.compile(r"Logging error|Exception ignored|Error in (?:atexit|sys\.excepthook)")  # above its first line
CHAIN = re.compile(r"During handling of the above exception|The above exception was the direct cause")
SAYS_LITTLE = re.compile(r"(?:KeyError: .*|[\w.]+:?\s*)$")  # of an exception that a library caught by itself
WEB = re.compile(r"/(?:urllib3?|requests|http|httpx|httpcore|aiohttp)/")


class Tracebacks:
    """The tracebacks of a log.

    `places` has the user's own file and line for each line in which one ends; `chained` are those of these lines that
    came up while an earlier exception was handled, `web` those raised inside a library for downloads; `skipped` are the
    lines that say nothing by themselves.
    """

    def __init__(self, split, starts, end):
        self.split = split  # number of a line -> its label and its text: the ranks of a job write into one log
        self.end = end  # how many lines there are
        self.places, self.skipped, self.chained, self.web = {}, set(), set(), set()
        self.newest = {}  # label -> the line of its latest exception
        for start in starts[:MOST]:
            self._follow(start)

    def _follow(self, start):
        """Find the line in which a traceback ends; other ranks may write in between."""
        label, _ = self.split(start)
        above = self._above(start, label)
        earlier = self.newest.get(label) if CHAIN.search(above) else None
        harmless = HARMLESS.search(above) or earlier in self.skipped
        place, web = "", False
        for number, text in self._below(start, label):
            if match := FILE.match(text):
                if not place or not NOT_THE_USERS.search(match[1]):
                    place = f"{match[1]}, line {match[2]}" + (f", in {match[3]}" if match[3] else "")
                web = web or bool(WEB.search(match[1]))
                self.skipped.add(number)
            elif text[:1].isspace() or text[:1] in "|+":
                self.skipped.add(number)
            elif RAISED.match(text):
                self.newest[label] = number
                if harmless:
                    self.skipped.add(number)
                else:
                    self._note(number, place, web, earlier)
                return

    def _above(self, start, label) -> str:
        """Return the text above a line: the last one of the same process that is not empty."""
        lines = (self.split(number) for number in range(start - 1, max(-1, start - 50), -1))
        return next((text for own, text in lines if own == label and text.strip()), "")

    def _below(self, start, label):
        """Yield number and text of the lines below one that the same process wrote."""
        for number in range(start + 1, min(start + LONGEST, self.end)):
            own, text = self.split(number)
            if own == label:
                yield number, text

    def _note(self, number, place, web, earlier):
        """Note an exception; of two in a chain the first counts, unless a library caught it and it says nothing."""
        self.places[number] = place
        if web:
            self.web.add(number)
        if earlier is None:
            return
        if SAYS_LITTLE.match(self.split(earlier)[1]) and NOT_THE_USERS.search(self.places[earlier]):
            del self.places[earlier]
            self.skipped.add(earlier)
        else:
            self.chained.add(number)
