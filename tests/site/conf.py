"""Sphinx's configuration of the course's site; tests/site/build.py runs it over a copy of the project's pages."""

import html
import os
import re
from pathlib import Path

from docutils.nodes import SkipNode
from matplotlib.textpath import TextPath

project = "Distributed PyTorch, hands on"
author = "mpdemo"
html_title = "mpdemo: from one device to many"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "README"
exclude_patterns = ["tests/site"]
suppress_warnings = [
    "misc.highlighting_failure",  # batch scripts under %%task, which the notebook's lexer does not know
    "myst.header",  # a page may begin below the first level
    "config.cache",
]

nb_execution_mode = "off"  # what is shown is what was saved
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "amsmath", "deflist"]
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "description"

html_theme = "furo"
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["site_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False
html_math_renderer = "drawn"
copybutton_exclude = ".linenos, .gp, .go"

# Where the code is read: an address as https://github.com/NAME/PROJECT/blob/main. Without one, code is downloaded.
REPOSITORY = os.environ.get("MPDEMO_REPOSITORY", "").rstrip("/")
LINK = re.compile(r"(?<!!)\[([^\]\[]*)\]\(((?!https?:|mailto:|#)[^)\s]+)\)")

TERM = re.compile(r'^\| <a id="([^"]*)"></a>(.*?) \| (.*?) \| (.*?) \|$', re.M)

IMAGE = re.compile(r'^<img alt="(.*?)" src="([^"]*)" width="[^"]*">$', re.M)
PICTURE = re.compile(
    r'((?:<a href="([^"]*)">\s*)?<picture>.*?srcset="(.*?)".*?<img alt="(.*?)" src="(.*?)">\s*</picture>(?:\s*</a>)?)',
    re.S,
)

SIZE = 16  # of a formula's letters, in its own units

CHAPTERS = {
    "The course": ["notebooks/README", "notebooks/[0-9]*"],
    "Take home": [
        "notebooks/scripts/*",
        "notebooks/glossary",
        "notebooks/on_a_gpu",
        "notebooks/failures",
        "notebooks/other_tools",
        "notebooks/gpu/README",
        "notebooks/solutions/*",
    ],
    "Tools": ["mpdemo/README", "mpdemo/tools/*/README", "mpdemo/data/README", "commands", "api"],
    "Teach it, carry it on": [
        "notebooks/for_trainers",
        "slurm/README",
        "tests/README",
        "tests/soak",
        "tests/bench/*",
        "tests/same/zoo/README",
        "CONTRIBUTING",
        "CHANGELOG",
        "SECURITY",
        "notebooks/AGENTS",
    ],
}


def add_contents(app, page, source):
    """Give the first page the site's table of contents, which GitHub would show as code."""
    if page != root_doc:
        return
    for caption, pages in CHAPTERS.items():
        lines = ["```{toctree}", ":hidden:", ":glob:", f":caption: {caption}", "", *pages, "```"]
        source[0] += "\n\n" + "\n".join(lines)


def point_out_of_the_site(app, page, source):
    """Send links to folders and to code where they can be read: the folder's page, the repository, or nowhere."""
    here = Path(app.srcdir, page).parent

    def target(match):
        text, address = match.groups()
        file, _, anchor = address.partition("#")
        path = (here / file).resolve()
        if not path.exists() or path.suffix in (".md", ".ipynb"):
            return match[0]
        below = path.relative_to(Path(app.srcdir).resolve())
        if path.is_dir() and (path / "README.md").exists():
            return f"[{text}]({os.path.relpath(path / 'README.md', here)})"
        if REPOSITORY:
            return f"[{text}]({REPOSITORY}/{below})"
        return f"[{text}]({file})" if path.is_file() else text

    source[0] = LINK.sub(target, source[0])


def take_pictures(app, page, source):
    """Make what GitHub shows as HTML images of the site; of a picture for each theme furo shows one."""
    source[0] = IMAGE.sub(r"![\1](\2)", source[0])
    for whole, link, dark, said, light in PICTURE.findall(source[0]):
        images = [(light, "only-light"), (dark, "only-dark")]
        more = f":target: {link.replace('.ipynb', '.html')}\n" if link else ""
        blocks = [
            f"```{{image}} {file}\n:alt: {said}\n:class: {theme}\n{more}```" for file, theme in images
        ]
        source[0] = source[0].replace(whole, "\n\n".join(blocks))


def define_terms(app, page, source):
    """Make the glossary's table a list of definitions, whose anchors Sphinx knows."""
    if page == "notebooks/glossary":
        source[0] = TERM.sub(
            r"(\1)=\n\n\2\n: \3 (\4)\n", re.sub(r"^\|( word |---).*\n", "", source[0], flags=re.M)
        )


def draw(writer, formula):
    """Write a formula as a picture in the text's colour: the script that Sphinx would use comes from elsewhere."""
    text = formula.astext().strip()
    path = TextPath((0, 0), f"${text}$", size=SIZE)
    box, letters = path.get_extents(), {1: "M", 2: "L", 3: "Q", 4: "C"}
    steps = [(letters.get(code), points) for points, code in path.iter_segments(simplify=False)]
    drawn = "".join(
        letter + " ".join(f"{n:.2f}" for n in points) if letter else "Z" for letter, points in steps
    )
    em = f"height: {box.height / SIZE:.2f}em; vertical-align: {box.y0 / SIZE:.2f}em"
    whole = f"{box.x0:.2f} {-box.y1:.2f} {box.width:.2f} {box.height:.2f}"
    writer.body.append(f'<svg role="img" aria-label="{html.escape(text)}" viewBox="{whole}" style="{em}">')
    writer.body.append(f'<path fill="currentColor" transform="scale(1 -1)" d="{drawn}"/></svg>')
    raise SkipNode


def setup(app):
    """Connect what rewrites a page before it is read, and what draws formulas."""
    app.add_html_math_renderer("drawn", (draw, None), (draw, None))
    app.connect("source-read", take_pictures)
    app.connect("source-read", define_terms)
    app.connect("source-read", point_out_of_the_site)
    app.connect("source-read", add_contents)
