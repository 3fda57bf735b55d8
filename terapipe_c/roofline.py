"""What blocks cost by first principles: operations over the peak, bytes over the bandwidth."""
from __future__ import annotations

from .config import Cluster, GPTConfig
from .fit import Curve

__all__ = ["CORE_FLOPS", "bandwidth_of", "curves_of"]

CORE_FLOPS, _DEFAULT_BYTES = 60e9, 10e9   # one core: fp32 GEMM with AVX2 or AVX-512, and its share of the memory
_FLOPS_PER_BYTE = 150.0   # of accelerators that name no bandwidth: 139 (V100, fp16) to 156 (A100, bf16) by terapipe_c/devices.py


def bandwidth_of(cluster: Cluster) -> float:
    """Bytes a second of a device's memory."""
    return cluster.memory_bandwidth_Bps or max(_DEFAULT_BYTES, (cluster.peak_flops or CORE_FLOPS) / _FLOPS_PER_BYTE)


def curves_of(model: GPTConfig, cluster: Cluster) -> dict[tuple[str, str], Curve]:
    """Of each (kind of block, phase); see CostModel.analytic."""
    E, V = float(model.n_embd), float(model.vocab_size)
    peak, bandwidth = cluster.peak_flops or CORE_FLOPS, bandwidth_of(cluster)

    def roof(flops_row: float, weight_bytes: float, row_bytes: float, pair_flops: float = 0.0) -> Curve:
        compute, move, fixed = flops_row / peak, row_bytes / bandwidth, weight_bytes / bandwidth
        turn = fixed / (compute - move) if compute > move and fixed > 0 else 1.0
        points = (0.0, turn, 2 * turn)
        pair = pair_flops / peak
        # A query's pair with itself: of S tokens S (S + 1) / 2 pairs are counted, and a Curve has S^2 / 2.
        seconds = tuple(max(compute * r, fixed + move * r) + pair * r / 2 for r in points)
        return Curve(points, seconds, pair, 0.0, 0.0, 2 * E * 4 / bandwidth if pair_flops else 0.0, pair)

    square = 4 * E * E                                     # bytes of an [E, E] matrix
    return {
        ("embedding", "F"): roof(0, 0, 12 * E), ("embedding", "W"): roof(0, 0, 16 * E),
        ("attention", "F"): roof(8 * E * E, 4 * square, 48 * E, 4 * E),
        ("attention", "I"): roof(8 * E * E, 4 * square, 64 * E, 10 * E),
        ("attention", "W"): roof(8 * E * E, 8 * square, 24 * E),
        ("ffn", "F"): roof(16 * E * E, 8 * square, 64 * E), ("ffn", "I"): roof(16 * E * E, 8 * square, 64 * E),
        ("ffn", "W"): roof(16 * E * E, 16 * square, 48 * E),
        ("head", "F"): roof(2 * V * E, 4 * V * E, 12 * E), ("head", "I"): roof(4 * V * E, 12 * V * E, 12 * E),
        ("head", "W"): roof(0, 0, 8 * E),
    }
