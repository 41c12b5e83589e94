"""What more devices bring and what they cost: speed-up beside the ideal, and the hours of all devices."""

from typing import Any

from mpdemo.notebook.plots.style import CYCLE, FAINT, picture
from mpdemo.notebook.show import Bundle
from mpdemo.plan.scaling import Model, same_batch, same_share

MARKERS = "osD^"


def scaling(report: dict[str, Any]) -> Bundle:
    """Draw the speed-up against the devices, and what the jobs cost.

    Parameters
    ----------
    report : dict
        From `mpdemo.labs.scaling_jobs`, or made like it. Of each of its ``rows`` are drawn: ``scaling`` (the name of
        its series), ``devices``, ``batch``, ``speedup``, ``speedup_interval`` (where it has one) and
        ``device_hours``; of ``fit``, by series, the model.
    """
    names = list(dict.fromkeys(row["scaling"] for row in report["rows"]))
    numbers = sorted({row["devices"] for row in report["rows"]})

    def paint(figure, both):
        speed, cost = both
        speed.plot(numbers, [n / numbers[0] for n in numbers], color=FAINT, linestyle=":", label="ideal")
        for index, name in enumerate(names):
            rows = [row for row in report["rows"] if row["scaling"] == name]
            look = {"color": CYCLE[index], "marker": MARKERS[index % len(MARKERS)], "markersize": 6}
            _paint_speed(speed, name, rows, report["fit"].get(name), look)
            cost.plot(
                [row["devices"] for row in rows], [row["device_hours"] for row in rows], "--", linewidth=1, **look
            )
        for axes in both:  # exactly the numbers that were measured
            axes.set_xscale("log", base=2)
            axes.set(xlabel="devices N")
            axes.set_xticks(numbers, [f"{n:g}" for n in numbers])
            axes.set_xticks([], minor=True)
        speed.set_yscale("log", base=2)
        speed.yaxis.set_major_formatter("{x:g}")
        speed.set(ylabel=f"speed-up over {numbers[0]} device{'s' * (numbers[0] > 1)}")
        cost.set(ylabel="cost of a job (device-hours)", ylim=(0, None))
        if "speedup_interval" in report["rows"][0]:
            speed.set_title("bars: 95 % intervals over the steps", fontsize=9)
        figure.legend(*speed.get_legend_handles_labels(), loc="outside upper center", ncols=5)

    fitted = "the fitted model, " * any(report["fit"].values())
    text = f"speed-up against devices with the ideal, {fitted}and the cost of a job: {', '.join(names)} on "
    return picture(paint, f"{text}{', '.join(map(str, numbers))} devices", None, 8.0, 3.6, 1, 2)


def _paint_speed(axes, name, rows, model, look):
    """Paint one series: its points with their 95 % intervals, and the model through them."""
    devices = [row["devices"] for row in rows]
    speedups = [row["speedup"] for row in rows]
    spread = None
    if "speedup_interval" in rows[0]:
        ends = [(row["speedup"], *row["speedup_interval"]) for row in rows]
        spread = [y - low for y, low, _ in ends], [high - y for y, _, high in ends]
    axes.errorbar(devices, speedups, yerr=spread, linestyle="none", capsize=4, label=name, **look)
    if model:
        model = Model(**model)
        first, last = rows[0]["batch"], rows[-1]["batch"]
        batch = same_batch(first) if first == last else same_share(last // devices[-1])
        line = range(devices[0], devices[-1] + 1)
        values = [model.time(devices[0], first) / model.time(n, batch(n)) for n in line]
        axes.plot(line, values, color=look["color"], linewidth=1.2, label=f"{name}, model")
