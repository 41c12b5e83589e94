"""The picture of notebooks/11_when_it_breaks.ipynb: who waits for whom, by the last collectives of each rank."""

import pickle

from mpdemo.notebook.plots import style
from mpdemo.paths import root

__all__ = ["who_waits"]
LOOKS = {  # of a collective
    "all_reduce": {"facecolor": style.paler(style.SKY, 0.8)},
    "broadcast": {"facecolor": style.paler(style.ORANGE, 0.8), "hatch": "////"},
    "barrier": {"facecolor": style.paler(style.GREEN, 0.7), "hatch": "...."},
}


def who_waits(folder, most=5):
    """Draw the last collectives of each rank, by number, from the flight recorders in a folder of the project."""
    files = sorted((root() / folder).glob("rank_*"))
    calls = {
        file.name.replace("_", " "): {
            entry["collective_seq_id"]: entry["profiling_name"].partition(":")[2]
            for entry in pickle.loads(file.read_bytes())["entries"]
        }
        for file in files
    }
    last = max(max(numbers) for numbers in calls.values())
    numbers = range(last - most + 1, last + 1)

    def paint(figure, axes):
        for height, called in enumerate(calls.values()):
            for number in numbers:
                name = called.get(number)
                look = LOOKS.get(name, {"facecolor": style.PAPER}) if name else {"facecolor": "none", "linestyle": ":"}
                axes.barh(height, 0.9, left=number - 0.45, height=0.7, **{**style.EDGE, **look})
                box = {"facecolor": style.PAPER, "edgecolor": "none", "pad": 1}
                axes.text(number, height, name or "not called", ha="center", va="center", fontsize=8, bbox=box)
        axes.set(xlabel="number of the collective", xlim=(numbers[0] - 0.6, last + 0.6))
        axes.set_xticks(numbers)
        axes.grid(visible=False)
        style.name_bars(axes, range(len(calls)), list(calls))

    ends = [f"{rank} waits in number {max(called)}, {called[max(called)]}" for rank, called in calls.items()]
    alt = f"Collectives {numbers[0]} to {last} of each rank. {'; '.join(ends)}."
    return style.picture(paint, "the last collectives of each rank, by number", alt, 7.2, 2.4)
