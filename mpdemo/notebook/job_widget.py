"""The widget of the live view (live_view.py): created once, updated in every polling interval, then replaced."""

from pathlib import Path

import ipywidgets as w
from IPython.display import HTML, display

from mpdemo.notebook.snapshot import labels, together


class JobWidget:
    """A line for every job, and one of them in detail: its loss curve, the end of its log, a Cancel button.

    Attributes
    ----------
    pressed : int or None
        The job whose Cancel button was pressed, counted from 0; `live_view.follow` acts on it.
    """

    def __init__(self, jobs):
        self.pressed = None
        self.header, self.chart, self.log = w.HTML(), w.HTML(), w.HTML(layout=w.Layout(flex="1 1 300px"))
        self.bar = w.FloatProgress(min=0, max=1, layout=w.Layout(width="180px"))
        names = labels([(Path(job.out).name, str(job.id)) for job in jobs])
        self.detail = w.ToggleButtons(options=[(name, number) for number, name in enumerate(names)])
        self.button = w.Button(description="Cancel", icon="stop", button_style="danger")
        self.button.layout.width = "100px"
        self.button.on_click(self._press)
        again = ", ".join(f'"{Path(job.out).as_posix()}"' for job in jobs)
        hint = w.HTML(f'<small style="opacity:.75">Page reloaded? <code>await follow({again})</code></small>')
        charts = w.HBox([self.chart, self.log], layout=w.Layout(flex_flow="row wrap"))
        choice = [self.detail] if len(jobs) > 1 else []
        self.box = w.VBox([self.header, *choice, charts, w.HBox([self.button, self.bar, hint])])
        self.handle = display(self.box, display_id=True)

    def _press(self, button):
        """Note the click: the page may call this from another thread."""
        self.pressed = self.detail.value
        button.disabled, button.description = True, "Cancelling"

    def taken(self):
        """Return the job whose Cancel button was pressed, None for no job; the button can be pressed again."""
        pressed, self.pressed = self.pressed, None
        return pressed

    def paint(self, snapshots):
        """Show a snapshot of every job."""
        shown = snapshots[self.detail.value]
        self.header.value = "<br>".join(snapshot.header() for snapshot in snapshots)
        self.chart.value, self.log.value = shown.chart(), shown.log_tail()
        if self.pressed is None:
            self.button.disabled, self.button.description = shown.finished, "Cancel"
        self.bar.layout.visibility = "visible" if shown.total else "hidden"
        if shown.total:
            self.bar.value = shown.steps[-1]["step"] / shown.total if shown.steps else 0

    def replace(self, snapshots):
        """Replace the widget by picture and lines; keep the end of the log of every job that did not succeed."""
        self.handle.update(together(snapshots))
        for snapshot in snapshots:
            if snapshot.state != "done":
                display(HTML(snapshot.header() + snapshot.log_tail()))
        parts = [widget for row in self.box.children for widget in (*getattr(row, "children", ()), row)]
        # A page that was reloaded shows the box of the kernel again, and does not know the display: this is its end.
        self.box.children = [w.HTML("<br>".join(s.header() for s in snapshots) + snapshots[self.detail.value].chart())]
        for widget in parts:
            widget.close()
