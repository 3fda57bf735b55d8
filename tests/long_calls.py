"""Long calls of the C core, most of them minutes, each repeated until a signal ends it: long_calls.py NAME ..., for
test_signals.py. Prints a call's name when it begins, and "ended"."""
import sys

import numpy as np

import terapipe_c as tp
from terapipe_c import _core, planners, schedules

CALLS = {}
RNG = np.random.default_rng(1)


def call(function):
    CALLS[function.__name__] = function
    return function


def chain(blocks):
    forward = RNG.uniform(1.0, 50.0, blocks)
    memory = {"static_bytes": RNG.uniform(1.0, 9.0, blocks), "activation_bytes": RNG.uniform(1.0, 9.0, blocks)}
    return forward, forward * RNG.uniform(1.5, 2.5, blocks), memory


def smooth(units):
    """Slice costs without a shape that a search could use."""
    i = np.arange(units + 1, dtype=float)
    G = 1e-6 * (30 + i + 3 * np.sqrt(i) + RNG.uniform(0.0, 5.0, units + 1))
    return G, G, 1e-9, 1e-13


def table(units):
    s, c = np.indices((units + 1, units + 1))
    return 1e-4 * (5 + s + 0.01 * s * c + RNG.uniform(0.0, 0.5, s.shape))


def layers(kinds, count):
    return [{"name": f"{k}", "count": count, "fwd_s": RNG.uniform(1.0, 2.0), "bwd_s": RNG.uniform(2.0, 4.0), "static_bytes": 1.0,
             "strategies": [{"name": f"{s}", "extra_bwd_s": s * RNG.uniform(0.3, 0.5), "activation_bytes": 3.0 / (1 + s)}
                            for s in range(4)]} for k in range(kinds)]


def nodes(count):
    forward, backward, memory = chain(count)
    return {"fwd_s": forward, "bwd_s": backward, "recompute_s": RNG.uniform(1.0, 50.0, count),
            "activation_bytes": memory["activation_bytes"], "param_bytes": memory["static_bytes"], "optimizer_bytes": forward}


def model(layers=96, width=12288):
    return tp.GPTConfig(n_layer=layers, n_head=96, n_embd=width, vocab_size=50257, block_size=2048)


@call
def slices():
    _core.plan_slices([smooth(1 << 20)], 1, 16)


@call
def slices_of_a_batch():
    _core.plan_slices([smooth(1 << 16)] * 16, 16, 16)


@call
def slices_of_a_table():
    _core.plan_slices([table(2048)] * 16, 16, 64)


@call
def slices_apart():
    _core.plan_slices_apart(smooth(1 << 19), smooth(1 << 19), 16)


@call
def slice_bound():
    _core.plan_slice_bound(smooth(1 << 21), np.full(1 << 11, 1 << 10, np.int32), 16)


@call
def slicing_bound():
    n = 1 << 20
    G0, G1, a2, a3 = smooth(n)
    ends = np.zeros((1, n + 1))
    both = np.stack([G0, G1])[None]
    _core.slicing_bound([(1, both, both, ends, ends, np.zeros((1, 2)), np.array([[a2, a3, a2, a3]]))], 1, n, 0.0)


@call
def shop():
    costs = [smooth(4096) for _ in range(16)]
    _core.plan_shop(costs, [f"{k}" for k in range(16)], np.arange(16, dtype=np.int32), work=1 << 50)


@call
def shop_with_labels():
    costs = [table(256) for _ in range(12)]
    _core.plan_shop(costs, [f"{k}" for k in range(12)], np.arange(12, dtype=np.int32), work=1 << 50)


@call
def autopipe():
    forward, backward, memory = chain(1000)
    planners.autopipe(forward, backward, 300, 310, comm_s=30.0, memory={**memory, "limit_bytes": np.full(300, 4000.0)})


@call
def autopipe_heuristic():
    forward, backward, memory = chain(20_000)
    planners.autopipe_heuristic(forward, backward, 500, 2000)


@call
def autopipe_slicer():
    forward, backward, memory = chain(4000)
    planners.autopipe_slicer(forward, backward, 1 << 20)


@call
def dawnpiper():
    planners.dawnpiper(nodes(200_000), 500, 3e4, micro_batches=1000)


@call
def dawnpiper_binary():
    planners.dawnpiper_binary(nodes(20_000), 16, 5e4, micro_batches=64, swap_bandwidth_Bps=0.01)


@call
def bmpipe():
    planners.bmpipe(layers(30, 30), 64, 128, 400.0, time_limit_s=None)


@call
def bmpipe_of_chunks():
    planners.bmpipe(layers(6, 20), 8, 512, 400.0, chunks=4, time_limit_s=None)


@call
def piper():
    forward, backward, memory = chain(900)
    limit = {**memory, "limit_bytes": 8000.0, "recompute_s": forward}
    graph = planners.layer_graph(forward, backward, 128, 512, memory=limit, param_bytes=forward, bandwidth_Bps=1.0)
    planners.piper(graph)


@call
def parallel_layers():
    forward, backward, memory = chain(1000)
    limit = {**memory, "limit_bytes": 3000.0, "recompute_s": forward}
    graph = planners.layer_graph(forward, backward, 512, 512, memory=limit, param_bytes=forward, bandwidth_Bps=1.0)
    planners.parallel_layers(graph)


@call
def pipedream():
    forward, backward, memory = chain(2000)
    planners.pipedream(forward, backward, 500, 1000)


@call
def dapple():
    forward, backward, memory = chain(400)
    planners.dapple(forward, backward, 128, 256)


@call
def vpipe():
    forward, backward, memory = chain(4000)
    planners.vpipe(forward, backward, 400, 64, memory={**memory, "limit_bytes": 500.0, "recompute_s": forward})


@call
def adapipe():
    forward, backward, memory = chain(1000)
    planners.adapipe(forward, backward, 64, 64, memory={**memory, "limit_bytes": 2000.0, "recompute_s": forward})


@call
def zb_v():
    schedules.zb_v(1000, 1500, seconds=(1.0, 1.1, 0.7))


@call
def split():
    schedules.one_f_one_b(512, 8000).split()


@call
def makespans():
    program = schedules.one_f_one_b(64, 20_000)
    program.makespan([{"F": 1.0, "B": 2.0}] * 100_000)


@call
def cost_table():
    weights = np.ones((4, 3))
    costs = tp.CostModel.analytic(model(2, 96), tp.Cluster(num_devices=2, peak_flops=1e12))
    _core.cost_table(costs._pack, weights, 1.0, 1.0, 1 << 13)


@call
def joint():
    tp.plan(model(), tp.Cluster.preset("a100-80", 96), 256, 2048)


@call
def joint_with_a_limit():
    tp.plan(model(), tp.Cluster.preset("a100-80", 96), 256, 2048, time_limit_s=600)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name, flush=True)
        try:
            while True:                    # some are done in a second where nothing else runs
                CALLS[name]()
        except KeyboardInterrupt:
            print("ended", flush=True)
