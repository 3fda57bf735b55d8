"""What tests of the slice planners share: random tables of slice costs, and every slicing there is."""

import itertools

import numpy as np

KINDS = ("smooth", "stairs", "noisy", "wild", "flat")


def slicings(n):
    """All ordered lists of slice lengths that sum to n."""
    for cuts in range(1 << (n - 1)):
        ends = [i + 1 for i in range(n - 1) if cuts >> i & 1] + [n]
        yield [b - a for a, b in itertools.pairwise([0, *ends])]


def dense_table(rng, n, kind):
    """t[s, c] in seconds; only s >= 1, s + c <= n is meaningful."""
    s, c = np.meshgrid(np.arange(n + 1.0), np.arange(n + 1.0), indexing="ij")
    if kind == "smooth":
        t = rng.uniform(0.5, 9) + rng.uniform(0.1, 2) * s + rng.uniform(0, 0.3) * s * c
    elif kind == "stairs":
        t = 3.0 + 4.0 * np.ceil(s / rng.integers(2, 5)) + 0.05 * s * c
    elif kind == "noisy":
        t = (3.0 + s + 0.02 * s * c) * rng.uniform(1, 1.3, s.shape)
    elif kind == "wild":
        t = rng.integers(0, 60, s.shape).astype(float)
    else:
        t = np.full(s.shape, float(rng.integers(0, 3)))
    return np.ascontiguousarray(t * 1e-3)
