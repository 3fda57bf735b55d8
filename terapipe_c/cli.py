"""The command `terapipe`: the public face for shells. Results go to standard output (a table, or JSON with --json), everything
else to standard error. Exit codes: 0 done, 1 failed, 2 bad request.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import errno
import functools
import io
import json
import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from . import timelines
from ._core import Error
from ._files import check_place, is_standard_output, read_entry
from .arguments import LAUNCH_NUMBERS, MODEL_DEFAULTS, as_given, build_parser, launch_names, plan_flags_given

__all__ = ["main"]

DONE, FAILED, BAD_REQUEST = 0, 1, 2
# What a path can be that is wrong whenever one asks; a disk that is full or broken fails.
WRONG_PATHS = {errno.ENOENT, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP,
               errno.EROFS, errno.ENXIO}  # fmt: skip
RECORD_FIELDS = ("step", "loss", "eval_loss", "grad_norm", "lr", "tokens_per_s", "step_time_s", "predicted_step_time_s")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; gives the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        codecs.register_error("terapipe", functools.partial(_escaped, raw=sys.stdout.errors == "surrogateescape"))
        sys.stdout.reconfigure(errors="terapipe")  # the name of a folder, or a picture, must not end what went well
    parser = build_parser(COMMANDS)
    try:
        args = parser.parse_args(argv)
        if args.command == "train":  # what is given besides a plan file would change nothing
            args.argv = sys.argv[1:] if argv is None else list(argv)
    except SystemExit as stop:  # argparse: 0 after --help, 2 after a bad request
        _forget(sys.stderr)
        return int(stop.code or 0)
    taken = any(is_standard_output(path) for name in ("out", "svg", "html", "trace") if (path := getattr(args, name, None)))
    try:
        with contextlib.redirect_stdout(sys.stderr if taken else sys.stdout):  # where a file goes no table follows it
            code = args.run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
        return int(code)
    except BrokenPipeError:  # `terapipe ... | head`
        _forget(sys.stdout)
        return DONE
    except KeyboardInterrupt as error:
        _say("terapipe: interrupted", error)
        return FAILED
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        told = _told(error)
        _say(f"terapipe {args.command}: {_in_flags(told) if hasattr(args, 'gpus') else told}", error)
        if isinstance(error, OSError):
            _forget(sys.stdout)  # a full disk: what is left of it would fail again when Python ends
        return BAD_REQUEST if _is_bad_request(error) else FAILED
    finally:
        _forget(sys.stderr)


def _escaped(error: UnicodeError, raw: bool) -> tuple[str | bytes, int]:
    """For a character that a stream cannot have: of pictures one as wide, of names its escape, or their bytes as Python gives them
    (raw) where the locale is C."""
    assert isinstance(error, UnicodeEncodeError)
    char = error.object[error.start]
    if raw and 0xDC80 <= ord(char) <= 0xDCFF:
        return bytes([ord(char) - 0xDC00]), error.start + 1
    return "." if char == "·" else char.encode("ascii", "backslashreplace").decode(), error.start + 1


def _say(text: str, error: BaseException | None = None) -> None:
    """To standard error, if anybody listens, with an error's notes; never to standard output, which has results alone."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            sys.stderr.write("\n".join([text, *getattr(error, "__notes__", ()), ""]))  # at once, or a bar's words come between
            sys.stderr.flush()


def _forget(stream: TextIO | None) -> None:
    """What a stream that takes nothing still holds: Python's last flush would fail, which gives exit code 120 (as of Python 3.14
    for standard error too)."""
    if stream is not None:
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _is_bad_request(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in WRONG_PATHS or isinstance(error, FileNotFoundError):
        return True
    return isinstance(error, (ValueError, TypeError)) and not isinstance(error, UnicodeError)


def _told(error: BaseException) -> str:
    return f"{error}" if isinstance(error, (ValueError, OSError)) and str(error) else f"{type(error).__name__}: {error}"


def _in_flags(text: str) -> str:
    """What an error of `launch` or `train` says of its arguments, where a flag is called otherwise: --gpus are `devices` there."""
    text = re.sub(r"(?<![\w-])devices((?:\[\d+\])? is )", r"--gpus\1", text).replace("]: None would be", "]: none would be")
    text = re.sub(r"(?<![\w-])devices=\[(\d[\d, ]*)\]", lambda found: f"--gpus {found[1].replace(',', '')}", text)
    text = text.replace("devices=[...]", "--gpus")
    return re.sub(r"launch\(\.\.\., backend='(\w+)', dtype='(\w+)'\)", r"--backend \1 --dtype \2", text)


# ---- what commands share -----------------------------------------------------------------------------------------------


def _print(args: argparse.Namespace, result: dict[str, Any]) -> None:
    if args.json:
        print(json.dumps(_plain(result), indent=1))
        return
    width = max(map(len, result), default=0)
    for name, value in result.items():
        print(f"{name:<{width}}  {_shown(_plain(value))}")


def _plain(value: Any) -> Any:
    """As JSON has it: arrays are lists, infinities are null."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return value if isinstance(value, (str, int, bool, type(None))) else str(value)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {_shown(item)}" for key, item in value.items())
    return "[" + ", ".join(map(_shown, value)) + "]" if isinstance(value, list) else str(value)


def _model(args: argparse.Namespace) -> Any:
    import terapipe_c as tp

    from .config import whole

    if args.seq_len is not None:  # by its own name, before it is a block size
        whole("seq_len", args.seq_len)
    given = {name: getattr(args, name) for name in (*MODEL_DEFAULTS, "block_size") if getattr(args, name) is not None}
    given |= ({"bias": False} if args.no_bias else {}) | ({"tie_weights": False} if args.untied else {})
    if args.preset:
        return tp.GPTConfig.preset(args.preset, **given)
    return tp.GPTConfig(**{**MODEL_DEFAULTS, "block_size": 256 if args.seq_len is None else args.seq_len, **given})


def _cluster(args: argparse.Namespace, backend: str, dtype: str) -> Any:
    import terapipe_c as tp

    from .engine import STORE_VARIABLE

    given = {
        "devices_per_node": args.devices_per_node,
        "memory_bytes": args.device_memory_bytes,
        "link_latency_s": args.link_latency_s,
        "link_bandwidth_Bps": args.link_bandwidth_Bps,
        "node_link_latency_s": args.node_link_latency_s,
        "node_link_bandwidth_Bps": args.node_link_bandwidth_Bps,
        "peak_flops": args.peak_flops,
        "host_bandwidth_Bps": args.host_bandwidth_Bps,
        "swaps_beside": args.swaps_beside or None,
        "sums_beside": args.sums_beside or None,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if args.devices is None:
        if given or args.device:
            name = next(iter(given), "device").replace("_", "-")
            name = "device-memory-bytes" if name == "memory-bytes" else name  # --memory-bytes is another one, which needs none
            raise ValueError(f"--{name} describes a cluster: give --devices too")
        if args.swap_folder is None or backend == "cuda":
            return tp.Cluster.local(len(gpus) if (gpus := getattr(args, "gpus", None)) else None, swap_folder=args.swap_folder,
                                    backend=backend)
        cluster = _swapping(args.swap_folder)
        os.environ[STORE_VARIABLE] = args.swap_folder          # what runs here swaps to the same folder
        return cluster
    if args.swap_folder is not None:
        raise ValueError("--swap-folder is of this machine: --host-bandwidth-Bps would be right beside --devices")
    if args.device is None:
        return tp.Cluster(num_devices=args.devices, **given)
    return tp.Cluster.preset(args.device, args.devices, dtype=dtype, **given)


@functools.cache
def _swapping(folder: str) -> Any:
    """Measured once, however many trials of a sweep need it."""
    import terapipe_c as tp

    return tp.Cluster.local(swap_folder=folder)


@functools.cache
def _measured(model: Any, seq_len: int, backend: str, dtype: str | None, fast: bool, threads: int) -> Any:
    """Measured once, however many trials of a sweep need it."""
    import terapipe_c as tp

    _say(f"measuring {model!r} on {'this machine' if backend == 'cpu' else 'the first GPU of this machine'} ...")
    return tp.profile(model, seq_len=seq_len, backend=backend, dtype=dtype, threads=threads, reproducible=not fast)


def _request(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `tp.plan` but the planner."""
    import terapipe_c as tp

    from .backend import choose
    from .planning.entrance import costs_on
    from .planning.request import check_request

    model, source = _model(args), args.costs or ("profile" if args.devices is None else "analytic")
    costs = None if source in ("analytic", "profile") else tp.CostModel.load(source)
    backend = args.backend or (costs.backend if costs else "cpu")
    dtype = args.dtype or (costs.dtype if costs and not args.backend else None)
    cluster = _cluster(args, backend, choose(backend, dtype).dtype)
    seq_len = model.block_size if args.seq_len is None else args.seq_len
    names = ("schedule", "stages", "chunks", "data_parallel", "memory_bytes", "granularity", "partition", "slicing", "executable",
             "time_limit_s", "recompute", "shard_optimizer")  # fmt: skip
    request = {"model": model, "cluster": cluster, "batch": args.batch, "seq_len": seq_len,
               **{name: getattr(args, name) for name in names}}  # fmt: skip
    if source == "profile":
        check_request(costs=None, planner=getattr(args, "planner", "auto"), tensor_parallel=None, **request)  # before the work
        # copies of the model have reproducible products in any case (engine.py)
        alone = args.data_parallel in (None, 1) and args.schedule != "chimera"
        threads = getattr(args, "threads_per_rank", None)      # of `train`, whose ranks the seconds are to be of
        costs = _measured(model, seq_len, backend, args.dtype, getattr(args, "fast", False) and alone,
                          1 if threads is None else threads)
    return {**request, "costs": costs_on(model, cluster, costs, backend, dtype)}


def _make_plan(args: argparse.Namespace, progress: bool | None = None) -> Any:
    import terapipe_c as tp

    return tp.plan(**_request(args), planner=args.planner, progress=progress)


def _plan_result(plan: Any) -> dict[str, Any]:
    names = ("digest", "ranks", "chunks", "data_parallel", "shard_optimizer", "stages", "slicing", "schedule", "recompute", "swap",
             "step_time_s", "lower_bound_s", "gap", "tokens_per_s", "peak_memory_bytes", "bubbles", "planning_time_s",
             "executable", "why_not_executable", "cost_source")  # fmt: skip
    return {name: getattr(plan, name) for name in names}


def _launch_options(args: argparse.Namespace) -> dict[str, Any]:
    names = (*LAUNCH_NUMBERS, "lr_schedule", "betas", "init", "backend", "dtype")
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.gpus:
        options["devices"] = args.gpus
    if args.threads:
        options["processes"] = False
    if args.fast:
        options["reproducible"] = False
    return options


# ---- commands ----------------------------------------------------------------------------------------------------------


def _profile(args: argparse.Namespace) -> int:
    import terapipe_c as tp

    _check_folder(args.out, '"terapipe_c.costs"')
    model = _model(args)
    seq_len = model.block_size if args.seq_len is None else args.seq_len
    costs = tp.profile(
        model,
        micro_batch=args.micro_batch,
        seq_len=seq_len,
        backend=args.backend,
        dtype=args.dtype,
        threads=args.threads,
        ranks=args.ranks,
        budget_s=args.budget_s,
        reproducible=not args.fast,
    )
    result: dict[str, Any] = {
        "layer_fwd_s": costs.time(seq_len, 0, phase="fwd"),
        "layer_bwd_s": costs.time(seq_len, 0, phase="bwd"),
        "fit_error": costs.fit_error,
    }
    if args.out:
        costs.save(args.out)
        result["saved"] = args.out
    _print(args, result)
    return DONE


def _check_folder(path: str | None, mark: str = "") -> None:
    """Before the work, not after it."""
    if path:
        check_place(path, mark)


def _plan(args: argparse.Namespace) -> int:
    _check_folder(args.out, '"terapipe_c.plan"')
    plan = _make_plan(args)
    if args.out:
        plan.save(args.out)
    if args.json:
        _print(args, {**_plan_result(plan), **({"saved": args.out} if args.out else {})})
    else:
        text = plan.explain()
        if text:
            print(text)
        if args.devices and args.costs in (None, "analytic") and args.device is None and args.peak_flops is None:
            print("seconds are of devices of 60 GFLOP/s, one core each: --device, --peak-flops or --costs says what others take")
        if args.out:
            print(f"saved {args.out}")
    return DONE


def _compare(args: argparse.Namespace) -> int:
    import terapipe_c as tp

    from .compare import check_planners

    check_planners(args.planners)  # before the work, not after it
    for path in (args.svg, args.out):
        _check_folder(path)
        if path and os.path.exists(path):
            raise FileExistsError(17, "this file exists already: another one would be right", path)
    if args.svg and args.out and os.path.realpath(args.svg) == os.path.realpath(args.out):
        raise ValueError(f"--svg and --out are both {args.out}: two files would be right")
    comparison = tp.compare(**_request(args), planners=args.planners)
    written = {}
    if args.svg:
        written["svg"] = str(comparison.to_svg(args.svg))
    if args.out:
        written["saved"] = str(comparison.to_json(args.out))
    if args.json:
        _print(args, {**comparison.to_dict(), **written})
    else:
        print(comparison)
        for what, path in written.items():
            print(f"{what} {path}")
    if comparison.best is None:
        _say("terapipe compare: no planner found a plan")
        return BAD_REQUEST
    return DONE


def _simulate(args: argparse.Namespace) -> int:
    what, line = timelines.asked(args)
    _print(args, {"what": what, **timelines.result(line), **timelines.draw(args, line)})
    return DONE


def _train(args: argparse.Namespace) -> int:
    import terapipe_c as tp

    from .launch import terminable

    if args.data is None or args.steps is None:
        raise ValueError("train needs --data and --steps")
    if args.under:
        return _train_under(args)
    if args.comm:
        raise ValueError("--comm is for ranks that a launcher has started; with --under it would be right")
    if not args.plan:
        _check_run(args)
    plan = _load_plan(args) if args.plan else _make_plan(args)
    with terminable():
        run = tp.launch(plan, data=args.data, steps=args.steps, out=args.out, progress=_bar(args), **_launch_options(args))
        return _follow(args, run)


def _check_run(args: argparse.Namespace) -> None:
    """What no plan would mend, before it is measured for."""
    import inspect

    import terapipe_c as tp

    from .job import check_run

    model, known = _model(args), inspect.signature(tp.launch).parameters
    options = {name: given.default for name, given in known.items() if given.default is not given.empty} | _launch_options(args)
    seq_len = model.block_size if args.seq_len is None else args.seq_len
    options.pop("out", None)
    check_run(args.data, args.steps, args.out, seq_len=seq_len, batch=args.batch, **options)


def _load_plan(args: argparse.Namespace) -> Any:
    """The plan file, which leaves nothing to plan."""
    import terapipe_c as tp

    unused = plan_flags_given(build_parser(COMMANDS), args.command, args.argv)
    if unused:
        raise ValueError(f"{args.plan} is a plan already, so {', '.join(unused)} would change nothing: either the file or the "
                         "flags would be right")
    return tp.Plan.load(args.plan)


def _train_under(args: argparse.Namespace) -> int:
    import terapipe_c as tp

    if not args.plan:
        raise ValueError("train --under needs a plan file: ranks that plan for themselves may not agree")
    if args.threads:
        raise ValueError("--threads is for ranks of this process; with --under every process is one rank")
    run = tp.train(_load_plan(args), args.data, args.steps, out=args.out, launcher=args.under, comm=args.comm,
                   progress=_bar(args), **_launch_options(args))
    return _follow(args, run) if run.rank == 0 else DONE


def _resume(args: argparse.Namespace) -> int:
    import inspect

    import terapipe_c as tp

    from .checkpoint import find_checkpoint, verify_checkpoint
    from .job import other_cosine
    from .launch import terminable

    folder = Path(args.folder)
    checkpoint = verify_checkpoint(find_checkpoint(folder), names=(), optimizer=False)
    if args.steps is None:
        raise ValueError(f"resume needs --steps; {checkpoint.step} are done in the newest checkpoint")
    if args.steps <= checkpoint.step:
        _say(f"nothing to do: {checkpoint.step} steps are done in the newest checkpoint")
    kept: dict[str, Any] = {}
    data = checkpoint.data_state.get("source")
    if (folder / "config.json").exists():  # what launch wrote down: all of its options
        kept |= read_entry(folder / "config.json", "data", dict)
        data = kept["data"].get("path")
        kept["val_fraction"] = kept["data"].get("val_fraction", checkpoint.data_state.get("val_fraction"))
    kept |= {**checkpoint.hyper, "seed": checkpoint.seed}     # not those of a resume that ended before it wrote one
    if (data := args.data or data) is None or data == "array":
        raise ValueError(f"{folder} was trained on an array; give --data")
    known = set(inspect.signature(tp.launch).parameters) - {"plan", "data", "steps", "out", "resume", "init", "progress"}
    if args.init:
        raise ValueError(f"--init is {args.init}: a resume goes on from the run's own checkpoint, so none would be right")
    options = {name: value for name, value in kept.items() if name in known} | _launch_options(args)
    if args.plan is None and not (folder / "plan.json").exists():
        raise ValueError(f"{folder} has no plan.json: a run's folder (its --out), or --plan too, would be right")
    plan = tp.Plan.load(args.plan or str(folder / "plan.json"))
    if told := other_cosine(checkpoint.step, kept, {**kept, **options, "steps": args.steps}):
        _say(told)          # and not as a warning, which "resumed with" filters below
    with terminable():
        with warnings.catch_warnings():
            for told in ("resumed with", "steps is"):   # of what is not the checkpoint's: only flags change it here
                warnings.filterwarnings("ignore", told, UserWarning)
            run = tp.launch(plan, data=data, steps=args.steps, out=str(folder), resume=True, progress=_bar(args), **options)
        return _follow(args, run)


def _bar(args: argparse.Namespace) -> bool | None:
    return False if args.quiet or args.json else None


def _follow(args: argparse.Namespace, run: Any) -> int:
    """Wait for a run; JSON: one line a record and a last one with the report."""
    try:
        for record in run:
            if args.json:
                print(json.dumps(_record(record)), flush=True)
            elif args.quiet:
                print(f"{record.step + 1} of {args.steps} steps done  loss {record.loss:.4f}  "
                      f"{record.tokens_per_s:,.0f} tokens/s", flush=True)
    except BrokenPipeError:
        if not run.running or run.stop().history[-1].step + 1 >= args.steps:
            raise
        _say(f"terapipe: nobody reads the output any more: stopped after {run._left_off()}")
        _forget(sys.stdout)
        return FAILED
    except (KeyboardInterrupt, Error) as error:  # a rank failed, or was killed
        error.add_note(f"terapipe: it ended after {(run.stop() if run.running else run)._left_off()}")
        raise
    report = run.report()
    if args.json:
        print(json.dumps(_plain({"report": _report(report), "checkpoint": str(run.checkpoint_path)})))
    else:
        print(report)
        print(f"checkpoint {run.checkpoint_path}")
    return DONE


def _record(record: Any) -> dict[str, Any]:
    return {name: _plain(getattr(record, name, None)) for name in RECORD_FIELDS}


def _report(report: Any) -> dict[str, Any]:
    names = ("step_time_s", "predicted_step_time_s", "peak_memory_bytes", "predicted_peak_memory_bytes", "bubbles",
             "predicted_bubbles")  # fmt: skip
    return {name: getattr(report, name) for name in names}


def _view(args: argparse.Namespace) -> int:
    what, line = timelines.timeline_of(Path(args.path), args)
    written = timelines.draw(args, line)
    if written or args.json:
        _print(args, {"what": what, **({} if written else timelines.result(line)), **written})
    else:
        print(f"{what}\n{line}")
    return DONE


def _sweep(args: argparse.Namespace) -> int:
    from .sweep import Sweep, begun, read_grid, said

    grid = read_grid(args.grid, _sweep_values(args))
    for name in grid:
        if name in ("executable", "shard_optimizer") or isinstance(getattr(args, name), bool):
            grid[name] = [said(name, value) for value in grid[name]]
        grid[name] = [as_given(name, value) for value in grid[name]]
    given = {name for name, value in vars(args).items() if value is not None and value is not False}
    idle = sorted((launch_names() - {"backend", "dtype"}) & (given | grid.keys()))
    if idle and not args.train:     # trials that differ in these alone would be the same plan again
        raise ValueError(f"{', '.join(idle)} would change nothing: without --train a sweep plans only; --train, or none of them, "
                         "would be right")
    if args.train and (args.data is None and "data" not in grid or args.steps is None and "steps" not in grid):
        raise ValueError("sweep --train needs --data and --steps")
    if args.train and is_standard_output(args.out):
        raise ValueError(f"--out is {args.out}, the standard output, beside which trials have no folders: a file would be right")

    def trial(point: dict[str, Any]) -> dict[str, Any]:
        settings, folder = argparse.Namespace(**{**vars(args), **point}), f"{args.out}.runs/{sweep.key(point)}"
        plan = _make_plan(settings, progress=False)
        result = _plan_result(plan)
        if settings.train:
            from .launch import launch, terminable

            with terminable():
                run = launch(plan, data=settings.data, steps=settings.steps, out=folder, progress=False,
                             resume=begun(Path(folder), settings.steps), **_launch_options(settings)).wait()
            result.update(_report(run.report()), loss=run.history[-1].loss if run.history else None, run=folder)
        return dict(_plain(result))

    base = {
        name: value
        for name, value in vars(args).items()
        if name not in ("run", "command", "json", "debug", "grid", "out", "retry_failed")
        and not (name == "timeout_s" and value is None)     # which rows of before that option have not in their keys
    }
    sweep = Sweep(Path(args.out), grid, base, trial)
    counts = sweep.run(args.retry_failed, None if args.json else _say)
    _print(args, {**counts, "rows": args.out})
    return FAILED if sweep.all_failed() else DONE  # a trial that fails is a result; when all do, the request is what is wrong


def _sweep_values(args: argparse.Namespace) -> set[str]:
    """What may vary: every option of `plan` and `train` except where results go."""
    return {
        name
        for name in vars(args)
        if name not in ("run", "command", "json", "debug", "grid", "out", "train", "retry_failed")
    }


def _doctor(args: argparse.Namespace) -> int:
    from .doctor import WRONG, examine

    findings = examine(args.out)
    if args.json:
        print(json.dumps([vars(finding) for finding in findings], indent=1))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            print(f"{finding.status:<6} {finding.name:<{width}}  {finding.value}")
            if finding.advice:
                print(f"{'':<6} {'':<{width}}  -> {finding.advice}")
    return FAILED if any(finding.status == WRONG for finding in findings) else DONE


COMMANDS = {
    "profile": _profile,
    "plan": _plan,
    "compare": _compare,
    "simulate": _simulate,
    "train": _train,
    "resume": _resume,
    "view": _view,
    "sweep": _sweep,
    "doctor": _doctor,
}


if __name__ == "__main__":
    sys.exit(main())
