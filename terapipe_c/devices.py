"""Data sheets of accelerators, and the roofline that turns FLOPs and bytes into seconds: planning only, nothing measured.

Peaks are dense (NVIDIA's sheets print twice that with sparsity), in FLOPs a second; bandwidths in bytes a second, decimal.
"""
from __future__ import annotations

from dataclasses import dataclass

from ._core import InvalidValueError
from .config import brief, html_table, human_bytes, human_rate, real

__all__ = ["DEVICES", "Device", "get", "names"]

DTYPES = ("fp32", "fp16", "bf16")


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True)
class Device:
    """One accelerator as its vendor describes it."""

    name: str
    peak_flops: dict[str, float]
    """FLOPs a second by dtype, dense; fp32 without tensor cores. A dtype that the device lacks is absent."""
    memory_bytes: float
    memory_bandwidth_Bps: float
    link_bandwidth_Bps: float
    """To its peers in a node, one way: half of what a sheet prints for both."""
    source: str
    """Of every figure above."""
    checked: bool
    """Were memory, its bandwidth and the fp16 peak found again in a second text? Else they are recalled from the sheet."""

    def peak(self, dtype: str) -> float:
        """Dense FLOPs a second in this dtype; "float32" is "fp32", as backends call it."""
        dtype = "fp32" if isinstance(dtype, str) and dtype == "float32" else dtype
        if not isinstance(dtype, str) or dtype not in self.peak_flops:
            raise InvalidValueError(f"dtype is {brief(dtype)}: {self.name} has {', '.join(self.peak_flops)}")
        return self.peak_flops[dtype]

    def seconds(self, flops: float, num_bytes: float, *, dtype: str = "fp16", efficiency: float = 0.5,
                bandwidth_efficiency: float = 0.8, launch_s: float = 5e-6) -> float:
        """Roofline: max(flops / (peak * efficiency), bytes / (bandwidth * bandwidth_efficiency)) + launch_s.

        The three last arguments are assumptions, not figures of a sheet.
        """
        compute = real("flops", flops, zero=True) / (self.peak(dtype) * share("efficiency", efficiency))
        move = real("num_bytes", num_bytes, zero=True) / (
            self.memory_bandwidth_Bps * share("bandwidth_efficiency", bandwidth_efficiency))
        return max(compute, move) + real("launch_s", launch_s, zero=True)

    def _repr_html_(self) -> str:
        return html_table(self.name, [
            *((dtype, human_rate(peak, "FLOP/s")) for dtype, peak in self.peak_flops.items()),
            ("memory", f"{human_bytes(self.memory_bytes)}, {human_rate(self.memory_bandwidth_Bps, 'B/s')}"),
            ("link", human_rate(self.link_bandwidth_Bps, "B/s")), ("source", self.source)])


def share(name: str, value: float) -> float:
    """A part of one: above 0, at most 1."""
    number = real(name, value)
    if number > 1:
        raise InvalidValueError(f"{name} is {value!r}: at most 1 would be right")
    return number


def _peaks(fp32: float, fp16: float, bf16: float | None) -> dict[str, float]:
    return {"fp32": fp32, "fp16": fp16} | ({} if bf16 is None else {"bf16": bf16})


_A100 = ("NVIDIA A100 datasheet (r4): SXM4, NVLink 600 GB/s both ways; found again, with 312 and 19.5 TFLOPS, 1.555 and 2.039 TB/s:"
         " glennklockwood.com/garden/processors/A100")
DEVICES = {d.name: d for d in (
    Device("v100", _peaks(15.7e12, 125e12, None), 16e9, 900e9, 150e9,
           "NVIDIA V100 datasheet: SXM2 16 GB, NVLink 300 GB/s both ways; found again: 125 and 15.7 TFLOPS, 16 GB in"
           " github.com/avensun/deep-learning-benchmark and gist syhw/b8067966, 125 TFLOPS and 900 GB/s in"
           " fanghostt/transformers-benchmarks, 6 links of 25 GB/s each way in notes on NVIDIA's whitepaper (gist"
           " wolfram77/a42aeb02); what was announced in 2017 was 120 and 15", True),
    Device("a100-40", _peaks(19.5e12, 312e12, 312e12), 40e9, 1555e9, 300e9, _A100, True),
    Device("a100-80", _peaks(19.5e12, 312e12, 312e12), 80e9, 2039e9, 300e9, _A100, True),
    Device("h100", _peaks(67e12, 989e12, 989e12), 80e9, 3350e9, 450e9,
           "NVIDIA H100 datasheet: SXM5, half of the 1979 TFLOPS with sparsity, NVLink 900 GB/s both ways; found again: 80 GB, 3.35"
           " TB/s, 900 GB/s at acecloud.ai/blog/nvidia-b200-vs-h200-h100-a100, with 990 dense at"
           " llmbook.apartsin.com/appendices/appendix-g-hardware-compute/section-g.1.html", True),
    Device("h200", _peaks(67e12, 989e12, 989e12), 141e9, 4800e9, 450e9,
           "NVIDIA H200 datasheet: SXM, half of the 1979 TFLOPS with sparsity, NVLink 900 GB/s both ways; found again: memory and"
           " links at aiminingco.com/gpu/h200/specs; 989 dense, 4.8 TB/s, 900 GB/s in"
           " huggingface.co/datasets/devidasmishra/ai-inference-hardware-economics-2026; the same cores as H100's, 3958 FP8 with"
           " sparsity, at lzwjava.github.io/nvidia-h200-gpu-specs-en (saulelectric.com prints 1970 as dense: wrong)", True),
    Device("rtx3090", _peaks(35.6e12, 71e12, 71e12), 24e9, 936e9, 32e9,
           "NVIDIA GA102 whitepaper, fp16 with fp32 accumulation; found again: 70 of 16 bits on its page 44"
           " (github.com/apoorvkh/academic-pretraining/issues/3), 29.8 and 59.5 times 1.17 of the RTX 3080"
           " (huggingface/transformers/issues/14608), 35.7 TFLOPS fp32 (igorslab.de, technical details of the RTX 3000); 24 GB;"
           " 936 GB/s is 384 bit of GDDR6X at 1219 MHz, 16 transfers a clock (lambdabrendan/Lambda-LLM-Calculator, gpu_specs.csv);"
           " link: PCIe 4.0 x16", True),
    Device("ascend910", _peaks(16e12, 256e12, None), 32e9, 1200e9, 30e9,
           "Huawei's announcement of 2019 (256 TFLOPS fp16) and Hot Chips 31 (32 GB, 1.2 TB/s, HCCS 30 GB/s a link); found again:"
           " 32 GB at linleygroup.com newsletter 6076; 1200 GB/s of four HBM2 stacks, 256 TFLOPS, three links of 30 GB/s in"
           " jameswhanlon.com/new-chips-for-machine-intelligence.html (October 2019, from the Hot Chips talk); 256 TFLOPS, 240 Gb/s"
           " a link at vengineer.hatenablog.com/entry/2019/09/06/070000 and besthub.dev"
           " (how-huawei-ascend-910-redefines-ai-training-performance); fp32, not on the sheet: assumed a sixteenth of fp16", True),
)}


def names() -> list[str]:
    """Devices that :func:`get` knows."""
    return list(DEVICES)


def get(name: str | Device) -> Device:
    """A device by name; a :class:`Device` is itself."""
    if isinstance(name, Device):
        return name
    if str(name).lower() not in DEVICES:
        raise InvalidValueError(f"there is no device {brief(name)}: one of {', '.join(DEVICES)} would be right")
    return DEVICES[str(name).lower()]
