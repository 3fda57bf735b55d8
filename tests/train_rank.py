"""One rank of test_train.py, as a user's script is: train_rank.py PLAN DATA OPTIONS (JSON). Prints one line of JSON.

OPTIONS may hold "die": {"rank", "step"}: this rank ends by SIGKILL when it has done so many steps; "fail": it raises; "hang": it
says so and does nothing more; "full": the emulated GPU of this rank has no room for its engine;
"own": what each rank has of its own, "data", "init" or "tokenizer", "disk", from which rank 1 reads for longer than a rank may wait
for another, "folder", a run folder that rank 1 does not see, or "end", by SIGKILL, of rank 1 when it looks for that."""
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import terapipe_c as tp
from terapipe_c import engine


def dying(die, fail, hang):
    make = engine.make_engine

    def make_dying(job, rank, comm):
        made = make(job, rank, comm)
        step = made.step

        def until_then(number, tokens, lr):
            if die == {"rank": rank, "step": number}:
                os.kill(os.getpid(), signal.SIGKILL)
            if fail == {"rank": rank, "step": number}:
                raise ValueError("no café here")
            if hang == {"rank": rank, "step": number}:
                print("hangs", flush=True)
                time.sleep(1000)
            return step(number, tokens, lr)

        made.step = until_then
        return made

    engine.make_engine = make_dying


def filling(full):
    make = engine.make_engine

    def make_there(job, rank, comm):
        if rank == full:     # after the look whether there is room
            tp.cuda.load().emu_machine(total_bytes=1 << 20)
        return make(job, rank, comm)

    engine.make_engine = make_there


def blind(rank, dies):
    train = importlib.import_module("terapipe_c.train")
    train.SEEN_S = 0.3

    class Elsewhere(type(Path())):
        def exists(self, **options):
            if dies and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return rank == 0 and super().exists(**options)

    train.Path = Elsewhere


def main(plan, data, options):
    options = json.loads(options)
    die, fail, hang, full, own = (options.pop(name, None) for name in ("die", "fail", "hang", "full", "own"))
    importlib.import_module("terapipe_c.watch").STUCK_S = options.pop("stuck_s", 60.0)
    if die or fail or hang:
        dying(die, fail, hang)
    if full is not None:
        filling(full)
    plan, rank = tp.Plan.load(plan), int(os.environ.get("PMI_RANK", os.environ.get("RANK", 0)))
    if own == "data":
        data = (np.arange(4000) + rank) % 256
    elif own == "init":
        options["init"] = tp.init_params(plan.model, rank)
    elif own == "tokenizer":     # which takes rank 1 longer than a rank may wait for another
        options["tokenizer"] = lambda text: time.sleep(2.5 * options["timeout_s"] * rank) or [ord(letter) % 256 for letter in text]
    elif own == "disk":          # from which rank 1 reads a tensor no quicker than that
        worker = importlib.import_module("terapipe_c.worker")
        in_time = worker._in_time
        worker._in_time = lambda *given: time.sleep(2.5 * options["timeout_s"] * rank) or in_time(*given)
    elif own in ("folder", "end"):
        blind(rank, own == "end")
    try:
        run = tp.train(plan, data, progress=False, **options)
    except (tp.Error, OSError) as error:
        sys.stdout.write(json.dumps({"error": type(error).__name__, "text": str(error)}) + "\n")   # whole, among others' lines
        return 1
    said = {"rank": run.rank, "losses": [r.loss for r in run], "norms": [r.grad_norm for r in run],
            "evals": [r.eval_loss for r in run], "checkpoint": str(run.checkpoint_path),
            "ranks": len(run.report().peak_memory_bytes), "memory": list(run.report().peak_memory_bytes),
            "predicted": list(run.report().predicted_peak_memory_bytes)}
    sys.stdout.write(json.dumps(said) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
