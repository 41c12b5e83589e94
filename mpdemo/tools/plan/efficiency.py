"""What fraction of its data sheet a GPU reaches, by class of kernel: as measured here, as published, or all of it.

A kernel's class is what PyTorch calls for it, and with it what limits it. `MEASURED` has what is known of a family of
GPUs; a record takes its place (mpdemo/tools/plan/records.py). Taught in notebooks/72_which_one.ipynb.
"""

from typing import NamedTuple

import numpy as np

KINDS = (
    "matrix products", "attention", "convolutions in 16 bits", "convolutions in 32 bits", "memory-bound kernels",
    "optimizer",
)  # fmt: skip
PRODUCT, ATTENTION, CONVOLUTION, CONVOLUTION_32, MEMORY, OPTIMIZER = range(len(KINDS))
# Of the time of memory-bound kernels, what is left of them once torch.compile has fused them: that of the GPT that
# notebooks/gpu/2026-11-27-1-h100.json has eager and compiled.
COMPILED = 0.57
LINKS = 1.2  # of the fraction of a link, how much more and how much less it may be
LEAST = 0.01  # of the time of all products: a size that takes less tells little


class Efficiency(NamedTuple):
    """Fractions of the data sheet, one for each of `KINDS`."""

    basis: str  # what the reader is told
    fractions: tuple = (1.0,) * len(KINDS)
    spreads: tuple = (0.0,) * len(KINDS)  # relative standard deviations, over operations and sizes
    sizes: tuple = ()  # of products: (operations, fraction), the smallest first; without any all are alike
    compiled: float = 1.0  # of the time of memory-bound kernels, what is left
    links: float = 0.8  # of a link: 360 of an H100's 450 GB/s (github.com/NVIDIA/nccl-tests/issues/326)

    def computing(self, kinds, operations):
        """Return the fractions that these kernels reach while they compute."""
        found = np.array(self.fractions)[kinds]
        if self.sizes:
            sizes, fractions = np.array(self.sizes).T
            of_products = np.interp(np.log(np.maximum(operations, 1)), np.log(sizes), fractions)
            found = np.where(kinds == PRODUCT, of_products, found)
        return found

    def moving(self, kinds):
        """Return the fractions that these kernels reach while they move."""
        moving = self.fractions[MEMORY]
        return np.select(
            [kinds == OPTIMIZER, kinds == MEMORY],
            [self.fractions[OPTIMIZER], moving / self.compiled],
            moving,
        )

    def fused(self):
        """Return this with memory-bound kernels that torch.compile, or a library, has fused."""
        return self._replace(compiled=COMPILED)

    def at_the_end(self, sign):
        """Return the fractions at one end of their spread: 1 for the faster one, -1 for the slower one."""
        ends = [(1 + spread) ** sign for spread in self.spreads]
        fractions = tuple(fraction * end for fraction, end in zip(self.fractions, ends, strict=True))
        sizes = tuple((size, fraction * ends[PRODUCT]) for size, fraction in self.sizes)
        return self._replace(fractions=fractions, sizes=sizes, links=self.links * LINKS**sign)

    def measured(self, rows, together, source):
        """Return this, with what was measured in its place: rows of class, operations, fraction and weight.

        `together` has fractions of whole classes, `source` is what the reader calls it.
        """
        fractions, spreads, sizes = list(self.fractions), list(self.spreads), self.sizes
        kinds, operations, reached, weights = np.array(rows, dtype=float).T
        for kind in map(int, np.unique(kinds)):
            at = kinds == kind
            fractions[kind] = together.get(kind, _mean(reached, weights, at))
            spreads[kind] = float(
                np.average((reached[at] / fractions[kind] - 1) ** 2, weights=weights[at]) ** 0.5
            )
            if kind == PRODUCT:
                by_size = {size: at & (operations == size) for size in np.unique(operations[at])}
                large = [
                    size for size in by_size if weights[by_size[size]].sum() > LEAST * weights[at].sum()
                ]
                sizes = tuple((float(size), _mean(reached, weights, by_size[size])) for size in large)
        known = ", ".join(
            f"{name} {fractions[kind]:.2f}" for kind, name in enumerate(KINDS) if kind in kinds
        )
        others = ", ".join(name for kind, name in enumerate(KINDS) if kind not in kinds) or "nothing"
        basis = f"kernels reach of it what {source} shows: {known}; not in it: {others}"
        return self._replace(basis=basis, fractions=tuple(fractions), spreads=tuple(spreads), sizes=sizes)


def _mean(reached, weights, at) -> float:
    """Return the fraction that some rows reach together."""
    return float(weights[at].sum() / (weights[at] / reached[at]).sum())


AT_BEST = Efficiency("no kernel is slower than its data sheet")
H100 = Efficiency(
    "kernels are as slow as those of a GPT on an H100 (PyTorch 2.11, November 2026), and convolutions as its matrix "
    "products; with software of 2023 and 2024, steps took up to half as long again",
    (0.8007, 0.691, 0.8007, 0.8007, 0.6009, 0.8171),
    (0.1, 0.2, 0.25, 0.25, 0.45, 0.1),
    ((3.44e10, 0.7553), (1.031e11, 0.7963), (1.374e11, 0.8015), (8.44e11, 0.8468)),
)
# Products, attention and convolutions in TF32 are as these runs chose them, in whole steps. Kernels alone reached 0.86
# at the best size of a product (https://github.com/stas00/ml-engineering, compute/accelerator), and FlashAttention-2
# 0.50 to 0.73 (https://arxiv.org/abs/2307.08691). Of convolutions in 16 bits nothing chose the number.
A100 = Efficiency(
    "kernels are as slow as in runs that MosaicML and NVIDIA have published of A100 (2021 to 2023), memory-bound ones "
    "as on our H100",
    (0.75, 0.63, 0.75, 0.27, 0.6009, 0.8171),
    (0.1, 0.2, 0.25, 0.25, 0.45, 0.1),
)
# What was measured of one H100: notebooks/gpu/2026-11-27-4-h100-efficiency-of-its-trace.json. What was published, and
# which of it chose these numbers: tests/bench/published.toml.
MEASURED = {"h100": H100, "h200": H100, "a100": A100, "a100-80": A100}
# Of another GPU nothing was measured: an H100's fractions, and no interval.
ASSUMED = H100._replace(
    basis="of this GPU no kernel was measured: they are taken to reach as much of it as those of a GPT on an H100",
    spreads=(0.0,) * len(KINDS),
    sizes=(),
)


def known_of(gpu) -> Efficiency:
    """Return what kernels reach of one of `GPUS`."""
    return MEASURED.get(gpu, ASSUMED)
