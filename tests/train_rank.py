"""One rank of test_train.py, as a user's script is: train_rank.py PLAN DATA OPTIONS (JSON). Prints one line of JSON.

OPTIONS may hold "die": {"rank", "step"}: this rank ends by SIGKILL when it has done so many steps; "fail": it raises."""
import json
import os
import signal
import sys

import terapipe_c as tp
from terapipe_c import engine


def dying(die, fail):
    make = engine.make_engine

    def make_dying(job, rank, comm):
        made = make(job, rank, comm)
        step = made.step

        def until_then(number, tokens, lr):
            if die == {"rank": rank, "step": number}:
                os.kill(os.getpid(), signal.SIGKILL)
            if fail == {"rank": rank, "step": number}:
                raise ValueError("no café here")
            return step(number, tokens, lr)

        made.step = until_then
        return made

    engine.make_engine = make_dying


def main(plan, data, options):
    options = json.loads(options)
    die, fail = options.pop("die", None), options.pop("fail", None)
    if die or fail:
        dying(die, fail)
    try:
        run = tp.train(tp.Plan.load(plan), data, progress=False, **options)
    except (tp.Error, OSError) as error:
        print(json.dumps({"error": type(error).__name__, "text": str(error)}))
        return 1
    said = {"rank": run.rank, "losses": [r.loss for r in run], "norms": [r.grad_norm for r in run],
            "evals": [r.eval_loss for r in run], "checkpoint": str(run.checkpoint_path),
            "ranks": len(run.report().peak_memory_bytes), "memory": list(run.report().peak_memory_bytes)}
    print(json.dumps(said))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
