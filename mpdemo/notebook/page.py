"""What a notebook's page shows while a cell waits (`mpdemo.waits`): a text that is replaced, and empty at the end."""

from IPython import get_ipython
from IPython.display import display

from mpdemo import waits
from mpdemo.notebook.live_view import has_front_end

shown = {}  # the number of the cell that runs -> the output that shows its text


def show_text(text):
    """Show a text in the output of the cell that runs, in place of the one before."""
    cell = get_ipython().execution_count
    data = {"text/plain": text}
    if cell in shown:
        shown[cell].update(data, raw=True)
    else:
        shown.clear()
        shown[cell] = display(data, raw=True, display_id=True)


if has_front_end():
    waits.page = show_text
