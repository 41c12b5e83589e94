"""The pictures of sittings 50 and 63: efficiency, what a message costs, who is late."""

from mpdemo.notebook.plots import style

__all__ = ["arrivals", "efficiency", "messages"]


def efficiency(measured, predicted=None, held_out=()):
    """Draw the efficiency against the devices, from 0 to 1: ``{devices: efficiency}``, and a model's as a line.

    The points of the devices in `held_out` are hollow: the model hasn't seen them.
    """

    def paint(figure, axes):
        axes.axhline(1, color=style.FAINT, linestyle=":", label="ideal")
        if predicted:
            axes.plot(
                list(predicted),
                list(predicted.values()),
                color=style.VERMILLION,
                label="predicted by the fit",
            )
        groups = [
            (False, "measured" if not held_out else "measured, fitted"),
            (True, "measured, not fitted"),
        ]
        for hollow, label in groups:
            points = {n: value for n, value in measured.items() if (n in held_out) == hollow}
            look = {
                "color": style.BLUE,
                "markersize": 8,
                "markerfacecolor": style.PAPER if hollow else style.BLUE,
            }
            axes.plot(list(points), list(points.values()), "o", label=label if points else None, **look)
        axes.set_xscale("log", base=2)
        axes.set(xlabel="GPUs", ylabel="efficiency", ylim=(0, 1.05))
        axes.set_xticks(list(measured), [f"{n}" for n in measured])
        axes.set_xticks([], minor=True)
        axes.legend(loc="lower left")

    values = ", ".join(f"{n}: {value:.2f}" for n, value in measured.items())
    text = f"efficiency against GPUs, measured {values}" + ", and predicted" * bool(predicted)
    return style.picture(paint, text, None, 6.4, 2.8)


def messages(mib, milliseconds, latency, bandwidth):
    """Draw the time of an all-reduce against its size, and the line latency + size / bandwidth (ms, MiB/ms)."""

    def paint(figure, axes):
        axes.plot(mib, milliseconds, "o", color=style.VERMILLION, label="measured")
        line = [latency + size / bandwidth for size in mib]
        axes.plot(mib, line, color=style.INK, linewidth=1.2, label="latency + size / bandwidth")
        axes.axhline(latency, color=style.FAINT, linestyle=":", label="latency alone")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=10)
        axes.set(xlabel="size of the tensor (MiB)", ylabel="one all-reduce (ms)")
        axes.set_xticks(mib, [f"{size:g}" if size >= 1 else f"1/{1 / size:.0f}" for size in mib])
        axes.set_xticks([], minor=True)
        axes.legend()

    alt = "; ".join(f"{size:g} MiB: {time:.2f} ms" for size, time in zip(mib, milliseconds, strict=True))
    return style.picture(
        paint, "the time of an all-reduce against its size, and the model of it", alt, height=2.8
    )


def arrivals(runs, threshold):
    """Draw for several runs by how many ms each rank joins an all-reduce after the first one, and the threshold."""
    behind = {name: [[now - min(row) for now in row] for row in rows] for name, rows in runs.items()}

    def paint(figure, panels):
        for axes, (name, rows) in zip(panels, behind.items(), strict=True):
            for rank, late in enumerate(zip(*rows, strict=True)):
                look = {"color": style.CYCLE[rank], "markersize": 5, "label": f"rank {rank}"}
                axes.plot(range(1, len(late) + 1), late, "os^D"[rank % 4], **look)
            axes.axhline(threshold, color=style.INK, linestyle=":", label="threshold")
            axes.set(title=name, xlabel="all-reduce", yscale="symlog")
        panels[0].set_ylabel("joins after the first (ms)")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=9)

    middle = {
        name: [sorted(late)[len(rows) // 2] for late in zip(*rows, strict=True)]
        for name, rows in behind.items()
    }
    of_all = "; ".join(
        f"{name}: {', '.join(f'rank {rank} {ms:.1f} ms' for rank, ms in enumerate(medians))}"
        for name, medians in middle.items()
    )
    text = "when each rank joins an all-reduce"
    alt = f"{text}, median after the first: {of_all}; threshold {threshold:.1f} ms"
    return style.picture(paint, text, alt, 8.6, 2.8, columns=len(runs), sharey=True)
