"""Schedules of torch.distributed.pipelining as CSV, made by torch itself, without a process group.

`python tests/torch_schedules.py` (with torch 2.13) writes tests/golden/torch/*.csv anew: what its _dump_csv writes of the
multi-stage schedules (compute_only; of TALKING compute_comms, too: *.comms.csv), and _get_pipeline_order of GPipe and 1F1B less
REDUCE_GRAD, which its own reader of compute-only files refuses.
"""

import csv
import io
import pathlib
import tempfile

GOLDEN = pathlib.Path(__file__).parent / "golden" / "torch"
#: (class less "Schedule", ranks, stages a rank, micro-batches)
MADE = [
    ("GPipe", 3, 1, 4),
    ("Interleaved1F1B", 3, 1, 6),  # one stage a rank: 1F1B
    ("Interleaved1F1B", 2, 2, 4),
    ("Interleaved1F1B", 4, 3, 8),
    ("LoopedBFS", 2, 2, 3),
    ("InterleavedZeroBubble", 2, 2, 4),
    ("InterleavedZeroBubble", 4, 2, 8),
    ("ZBVZeroBubble", 2, 2, 3),
    ("ZBVZeroBubble", 4, 2, 8),
    ("DualPipeV", 2, 2, 4),
    ("DualPipeV", 4, 2, 10),
]
#: Of these its lowering with messages.
TALKING = [
    ("Interleaved1F1B", 2, 2, 4),
    ("LoopedBFS", 2, 2, 3),
    ("InterleavedZeroBubble", 2, 2, 4),
    ("ZBVZeroBubble", 2, 2, 3),
    ("DualPipeV", 2, 2, 4),
]
#: torch 2.13's table of 1F1B (for display) gives the last rank the forwards of micro-batches 1..m.
WRONG = ("1F1B", 2, 1, 3)


class Stage:
    """What a schedule asks of a stage to be built."""

    submod = None
    is_first = is_last = False
    group = None
    group_rank = 0

    def __init__(self, ranks, chunks):
        self.num_stages, self.group_size = ranks * chunks, ranks


def order_of(name, ranks, chunks, micros):
    from torch.distributed.pipelining import schedules

    kind = getattr(schedules, f"Schedule{name}")
    stages = [Stage(ranks, chunks) for _ in range(chunks)]
    if issubclass(kind, schedules.PipelineScheduleSingle):
        order = kind(stages[0], micros)._get_pipeline_order()
    else:
        order = kind(stages, micros).pipeline_order
    reduce_grad = schedules._ComputationType.REDUCE_GRAD
    return {r: [a for a in order[r] if a is None or a.computation_type is not reduce_grad] for r in order}


def text_of(name, ranks, chunks, micros):
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    for row in order_of(name, ranks, chunks, micros).values():
        writer.writerow(row)
    return out.getvalue()


def loaded(text, ranks, chunks, micros):
    """torch's own reading, proof and lowering of a compute-only CSV."""
    from torch.distributed.pipelining import schedules

    runtime = schedules._PipelineScheduleRuntime([Stage(ranks, chunks) for _ in range(chunks)], micros)
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write(text)
        file.flush()
        runtime._load_csv(file.name, format="compute_only")
    return runtime


def load(text, ranks, chunks, micros):
    """{rank: [str(action)]}, without idle steps."""
    order = loaded(text, ranks, chunks, micros).pipeline_order
    return {r: [str(a) for a in row if a is not None] for r, row in order.items()}


def with_messages(name, ranks, chunks, micros):
    """torch's compute_comms CSV."""
    runtime = loaded(text_of(name, ranks, chunks, micros), ranks, chunks, micros)
    with tempfile.NamedTemporaryFile("r", suffix=".csv") as file:
        runtime._dump_csv(file.name, format="compute_comms")
        return file.read()


def path_of(name, ranks, chunks, micros):
    return GOLDEN / f"{name}_{ranks}x{chunks}x{micros}.csv"


def comms_path_of(*one):
    return path_of(*one).with_suffix(".comms.csv")


if __name__ == "__main__":
    for one in (*MADE, WRONG):
        path_of(*one).write_text(text_of(*one))
    for one in TALKING:
        comms_path_of(*one).write_text(with_messages(*one))
