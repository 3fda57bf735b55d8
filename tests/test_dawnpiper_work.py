"""How much DawnPiper's exact search looks at, in states: a count, and no clock."""

import numpy as np
from test_dawnpiper import check_plan

from terapipe_c.planners import dawnpiper


def test_sums_that_never_meet_end_early():
    """All tensors cost the same per byte, in real numbers: no bound and no dominance tells sets apart, and the core search went on
    to its limit, 20 ms of a plan, for nothing."""
    for seed in (0, 2, 3):
        rng = np.random.default_rng(seed)
        kept, forward = rng.uniform(1e6, 4e7, 60), rng.uniform(1e-4, 5e-4, 60)
        nodes = {"fwd_s": forward, "bwd_s": 2 * forward, "recompute_s": 1e-11 * kept, "activation_bytes": kept,
                 "param_bytes": np.zeros(60), "optimizer_bytes": np.zeros(60)}  # fmt: skip
        got = dawnpiper(nodes, 1, 0.04 * kept.sum(), 1)
        assert got.gap < 1e-7 and got.states < 100_000, (seed, got)
        check_plan(nodes, got, 1, 0.04 * kept.sum(), 1, "1f1b", 0.0)
