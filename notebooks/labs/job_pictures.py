"""Pictures of runs that are stopped: signals (53), what failures cost (55), one training run in several jobs (81)."""

from mpdemo.notebook.plots import style

__all__ = ["one_run", "time_line"]


def one_run(whole, jobs):
    """Draw the losses of several jobs over those of a run that never stopped, and each job as a bar of its steps.

    Parameters
    ----------
    whole : list
        Pairs of step and loss.
    jobs : list of dict
        For each job `steps`, between which two steps it ran, and `losses`, pairs as above; perhaps `why`, a text.
    """

    def paint(figure, panels):
        curve, bars = panels
        curve.plot(
            *zip(*whole, strict=True), color=style.FAINT, linewidth=5, alpha=0.6, label="never stopped"
        )
        for number, job in enumerate(jobs):
            look = style.line_style(number)
            (first, last), colour = job["steps"], look["color"]
            if job["losses"]:
                curve.plot(*zip(*job["losses"], strict=True), **look, marker="o", markersize=4)
            bars.barh(
                number, last - first, left=first, height=0.7, color=style.paler(colour, 0.8), **style.EDGE
            )
            if "why" in job:
                bars.annotate(
                    job["why"], (last, number), (5, 0), textcoords="offset points", va="center", fontsize=9
                )
        room = 1.3 if any("why" in job for job in jobs) else 1.02  # at the right, for the last text
        for axes in panels:
            axes.set_xlim(0, whole[-1][0] * room)
        curve.set(ylabel="loss (nats per token)")
        curve.tick_params(labelbottom=False)  # the same steps as below
        curve.legend()
        bars.set(xlabel="step")
        style.name_bars(bars, range(len(jobs)), [f"job {number + 1}" for number in range(len(jobs))])

    spans = [
        f"job {number} steps {job['steps'][0]} to {job['steps'][1]}" for number, job in enumerate(jobs, 1)
    ]
    ends = f"The loss falls from {whole[0][1]:.2f} to {whole[-1][1]:.2f} on one line with a run that never stopped: "
    text = f"loss against step: {len(jobs)} jobs, and a run that never stopped"
    size = {"width": 7.6, "height": 3.0 + 0.3 * len(jobs), "rows": 2}
    return style.picture(
        paint, text, ends + ", ".join(spans) + ".", **size, height_ratios=[3, 0.45 * len(jobs)]
    )


COLOURS = {"save": style.GREEN, "lost": style.VERMILLION, "stop": style.ORANGE}  # by a word of a box


def time_line(lanes, marks, unit="s", end=None):
    """Draw what happens between signals: `lanes` {name: [(what, begin, end), ...]}, and `marks` {signal: when}.

    A box that says "save", "stop" or "lost" has a colour of its own, and one that says "wait" is hatched.
    """
    last = end or max(stop for boxes in lanes.values() for _, _, stop in boxes)

    def paint(_, axes):
        for row, boxes in enumerate(lanes.values()):
            for name, begin, stop in boxes:
                colour = next((c for word, c in COLOURS.items() if word in name), style.SKY)
                look = style.EDGE | {"facecolor": style.paler(colour)}
                if "wait" in name:
                    look |= {"facecolor": style.PAPER, "hatch": "////", "edgecolor": style.FAINT}
                axes.broken_barh([(begin, stop - begin)], (row - 0.32, 0.64), **look)
                paper = {
                    "facecolor": style.PAPER if "wait" in name else look["facecolor"],
                    "edgecolor": "none",
                }
                words = {"ha": "center", "va": "center", "fontsize": 8.5, "bbox": paper | {"pad": 1}}
                axes.text((begin + stop) / 2, row, name, **words)
        for (name, at), after in zip(marks.items(), [*list(marks.values())[1:], last], strict=True):
            crowded = at > 0.2 * last and after - at < 0.2 * last  # then its name stands before it
            axes.axvline(at, color=style.VERMILLION, linewidth=1.4, linestyle="--")
            words = {"ha": "right" if crowded else "left", "color": style.VERMILLION, "fontsize": 9}
            place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
            axes.annotate(name, (at, 1.0), (-2 if crowded else 2, 2), **words, **place)
        style.name_bars(axes, range(len(lanes)), list(lanes))
        axes.set(xlabel=f"time ({unit})", xlim=(0, last * 1.02))

    rows = [
        f"{lane}: " + ", ".join(f"{name} {begin:g} to {stop:g}" for name, begin, stop in boxes)
        for lane, boxes in lanes.items()
    ]
    alt = "; ".join([*rows, *(f"{name} at {at:g} {unit}" for name, at in marks.items())])
    return style.picture(paint, f"time line: {', '.join(lanes)}", alt, 8.0, 1.0 + 0.42 * len(lanes))
