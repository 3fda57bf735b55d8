"""The command `terapipe`: the public face for shells. Results go to standard output (a table, or JSON with --json), everything
else to standard error. Exit codes: 0 done, 1 failed, 2 bad request.

Every command imports the package inside, so that `--help` is quick and `doctor` works where the C module does not load.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["main"]

DONE, FAILED, BAD_REQUEST = 0, 1, 2
RECORD_FIELDS = ("step", "loss", "eval_loss", "grad_norm", "lr", "tokens_per_s", "step_time_s", "predicted_step_time_s")
LAUNCH_NUMBERS = {
    "lr": float,
    "min_lr": float,
    "warmup_steps": int,
    "weight_decay": float,
    "eps": float,
    "grad_clip": float,
    "seed": int,
    "threads_per_rank": int,
    "checkpoint_every": int,
    "log_every": int,
    "eval_every": int,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; gives the exit code."""
    parser = _parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:  # argparse: 0 after --help, 2 after a bad request
        return int(stop.code or 0)
    try:
        code = args.run(args)
        sys.stdout.flush()
        return int(code)
    except BrokenPipeError:  # `terapipe ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except KeyboardInterrupt:
        print("terapipe: interrupted", file=sys.stderr)
        return FAILED
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        print(f"terapipe {args.command}: {_told(error)}", file=sys.stderr)
        return BAD_REQUEST if _is_bad_request(error) else FAILED


def _is_bad_request(error: BaseException) -> bool:
    if isinstance(error, (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)):
        return True
    return isinstance(error, (ValueError, TypeError)) and not isinstance(error, UnicodeError)


def _told(error: BaseException) -> str:
    return f"{error}" if isinstance(error, (ValueError, OSError)) and str(error) else f"{type(error).__name__}: {error}"


# ---- the parser --------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="terapipe",
        description="Plans and runs token-pipelined GPT training.",
        epilog="Each command has its own --help with an example.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str, example: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
        command.add_argument("--json", action="store_true", help="print JSON instead of a table")
        command.add_argument("--debug", action="store_true", help="show where an error comes from")
        return command

    p = add(
        "profile",
        _profile,
        "measure the model's layers on this machine",
        "terapipe profile --n-layer 4 --n-head 4 --n-embd 256 --seq-len 512 --block-size 512 --out costs.json",
    )
    _model_flags(p)
    p.add_argument("--seq-len", type=int, help="longest sequence measured (block size if not given)")
    p.add_argument("--micro-batch", type=int, default=1)
    p.add_argument("--backend", default="cpu")
    p.add_argument("--threads", type=int, default=1, help="threads of one rank")
    p.add_argument("--out", help="save the cost model here")

    p = add(
        "plan",
        _plan,
        "find stages, slices and a schedule",
        "terapipe plan --preset gpt2-124m --batch 8 --seq-len 1024 --stages 2 --costs costs.json --out plan.json",
    )
    _plan_flags(p)
    p.add_argument("--out", help="save the plan here")

    p = add(
        "simulate",
        _simulate,
        "time a plan, a program or a named schedule without running it",
        "terapipe simulate --schedule seq1f1b --ranks 4 --micro-batches 8 --slices 2 --fwd 1.0 --bwd 2.0",
    )
    p.add_argument("path", nargs="?", help="a plan file, a program's text, or a torch.distributed.pipelining CSV")
    p.add_argument("--schedule", help="instead of a file: gpipe, 1f1b, seq1f1b, ...")
    p.add_argument("--ranks", type=int, default=4)
    p.add_argument("--micro-batches", type=int, default=8)
    p.add_argument("--slices", type=int, default=1)
    p.add_argument("--fwd", type=float, default=1.0, help="seconds of one F (programs and schedules)")
    p.add_argument("--bwd", type=float, default=2.0, help="seconds of one B (programs and schedules)")
    p.add_argument("--comm", type=float, default=0.0, help="seconds of one message (programs and schedules)")
    _picture_flags(p)

    p = add("train", _train, "train as planned", "terapipe train plan.json --data corpus.txt --steps 200 --out runs/a")
    p.add_argument("plan", nargs="?", help="a plan file; without it, the flags of `terapipe plan` make one")
    _plan_flags(p)
    _launch_flags(p)
    p.add_argument("--out", required=True, help="run folder to make")

    p = add("resume", _resume, "continue a run from its newest checkpoint", "terapipe resume runs/a --steps 400")
    p.add_argument("folder", help="run folder")
    p.add_argument("--plan", help="another plan file (the run's own if not given)")
    _launch_flags(p)

    p = add(
        "view", _view, "draw a plan, a run or a program", "terapipe view runs/a --html timeline.html --trace trace.json"
    )
    p.add_argument("path", help="a plan file, a run folder, or a program's text")
    p.add_argument("--fwd", type=float, default=1.0, help="seconds of one F (programs)")
    p.add_argument("--bwd", type=float, default=2.0, help="seconds of one B (programs)")
    p.add_argument("--comm", type=float, default=0.0, help="seconds of one message (programs)")
    _picture_flags(p)

    p = add(
        "sweep",
        _sweep,
        "plan (or train) every point of a grid; one JSON line a trial, resumed by running it again",
        "terapipe sweep --n-layer 4 --batch 8 --seq-len 256 --grid schedule=gpipe,1f1b --grid slicing=1,2,4 --out sweep.jsonl",
    )
    _plan_flags(p)
    _launch_flags(p, needed=False)
    p.add_argument(
        "--grid",
        action="append",
        default=[],
        metavar="NAME=V,V,... | FILE.json",
        help="values of one option of `plan` or `train`, or a JSON object of name -> list; repeat for more",
    )
    p.add_argument("--train", action="store_true", help="train each plan too (needs --data, --steps); else plan only")
    p.add_argument("--retry-failed", action="store_true", help="run trials again that failed before")
    p.add_argument("--out", required=True, help="JSONL file, appended to")

    p = add("doctor", _doctor, "say what this machine offers and what would stop a run", "terapipe doctor --out runs")
    p.add_argument("--out", default=".", help="folder where runs would be written")
    return parser


def _model_flags(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("model")
    group.add_argument("--preset", help="gpt2-124m, gpt3-175b, ...; the other model flags are then not used")
    for name, value in (("n-layer", 4), ("n-head", 4), ("n-embd", 128), ("vocab-size", 256), ("block-size", None)):
        group.add_argument(
            f"--{name}", type=int, default=value, help=f"default {value or 'the sequence length, or 256'}"
        )
    group.add_argument("--no-bias", action="store_true", help="no biases in linear layers and LayerNorms")
    group.add_argument("--untied", action="store_true", help="a head of its own instead of the token embedding's")


def _plan_flags(p: argparse.ArgumentParser) -> None:
    _model_flags(p)
    group = p.add_argument_group("plan")
    group.add_argument("--batch", type=int, default=8, help="sequences a step (default 8)")
    group.add_argument("--seq-len", type=int, help="tokens a sequence (default: the block size)")
    group.add_argument("--stages", type=int)
    group.add_argument("--planner", default="auto")
    group.add_argument("--schedule", default="auto")
    group.add_argument("--slicing", type=_slicing, help="slices a sequence, or JSON [[micro_batch, [lengths]], ...]")
    group.add_argument("--partition", type=_pairs, help="JSON [[first_block, last_block + 1], ...]")
    group.add_argument("--granularity", type=int, help="slice lengths are multiples of this many tokens")
    group.add_argument("--memory-bytes", type=_bytes, help="a rank's memory, e.g. 16e9")
    group.add_argument(
        "--costs", help="a file of `terapipe profile`, or 'analytic', or 'profile' (the default on this machine)"
    )
    group = p.add_argument_group("cluster (this machine, if --devices is not given)")
    for name, kind in (
        ("devices", int),
        ("devices-per-node", int),
        ("device-memory-bytes", _bytes),
        ("link-latency-s", float),
        ("link-bandwidth-Bps", float),
        ("peak-flops", float),
    ):
        group.add_argument(f"--{name}", type=kind)


def _launch_flags(p: argparse.ArgumentParser, needed: bool = True) -> None:
    group = p.add_argument_group("training")
    group.add_argument("--data", help="text file, or .bin of nanoGPT, llm.c or Megatron")
    group.add_argument("--steps", type=int, help="optimizer steps, counted from the start of the run")
    for name, kind in LAUNCH_NUMBERS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind)
    group.add_argument("--lr-schedule", choices=("cosine", "constant"))
    group.add_argument("--betas", type=float, nargs=2)
    group.add_argument("--init", help="start from this checkpoint's parameters")
    group.add_argument("--backend")
    group.add_argument("--threads", action="store_true", help="ranks as threads of this process")
    group.add_argument("--fast", action="store_true", help="reproducible=False")
    if needed:
        group.add_argument("--quiet", action="store_true", help="no progress bar")


def _picture_flags(p: argparse.ArgumentParser) -> None:
    p.add_argument("--svg", help="draw the timeline here")
    p.add_argument("--html", help="draw the timeline here, to be looked at in a browser")
    p.add_argument("--trace", help="write a Chrome trace here (opens in Perfetto)")


def _slicing(text: str) -> Any:
    try:
        value = json.loads(text)
        return value if isinstance(value, int) else [(int(b), [int(n) for n in lengths]) for b, lengths in value]
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of slices nor JSON [[micro_batch, [lengths]], ...]"
        ) from error


def _pairs(text: str) -> Any:
    try:
        return [(int(first), int(end)) for first, end in json.loads(text)]
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON [[first_block, last_block + 1], ...]") from error


def _bytes(text: str) -> int:
    value = float(text)
    if not 0 < value < 1e18:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes")
    return int(value)


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
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items())
    return "[" + ", ".join(map(_shown, value)) + "]" if isinstance(value, list) else str(value)


def _model(args: argparse.Namespace) -> Any:
    import terapipe_c as tp

    if args.preset:
        return tp.GPTConfig.preset(args.preset)
    return tp.GPTConfig(
        n_layer=args.n_layer,
        n_head=args.n_head,
        n_embd=args.n_embd,
        vocab_size=args.vocab_size,
        block_size=args.block_size or args.seq_len or 256,
        bias=not args.no_bias,
        tie_weights=not args.untied,
    )


def _cluster(args: argparse.Namespace) -> Any:
    import terapipe_c as tp

    given = {
        "devices_per_node": args.devices_per_node,
        "memory_bytes": args.device_memory_bytes,
        "link_latency_s": args.link_latency_s,
        "link_bandwidth_Bps": args.link_bandwidth_Bps,
        "peak_flops": args.peak_flops,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if args.devices is None:
        if given:
            raise ValueError(f"--{next(iter(given)).replace('_', '-')} describes a cluster: give --devices too")
        return tp.Cluster.local()
    return tp.Cluster(num_devices=args.devices, **given)


def _make_plan(args: argparse.Namespace) -> Any:
    import terapipe_c as tp

    model, cluster = _model(args), _cluster(args)
    seq_len = args.seq_len or model.block_size
    source = args.costs or ("profile" if args.devices is None else "analytic")
    if source == "analytic":
        costs = tp.CostModel.analytic(model, cluster)
    elif source == "profile":
        print(f"measuring {model!r} on this machine ...", file=sys.stderr)
        costs = tp.profile(model, seq_len=seq_len)
    else:
        costs = tp.CostModel.load(source)
    return tp.plan(
        model,
        cluster,
        batch=args.batch,
        seq_len=seq_len,
        costs=costs,
        planner=args.planner,
        schedule=args.schedule,
        stages=args.stages,
        memory_bytes=args.memory_bytes,
        granularity=args.granularity,
        partition=args.partition,
        slicing=args.slicing,
    )


def _plan_result(plan: Any) -> dict[str, Any]:
    return {
        name: getattr(plan, name)
        for name in (
            "stages",
            "slicing",
            "schedule",
            "step_time_s",
            "lower_bound_s",
            "gap",
            "peak_memory_bytes",
            "bubbles",
            "planning_time_s",
        )
    }


def _timeline_result(line: Any) -> dict[str, Any]:
    return {
        "makespan_s": line.makespan_s,
        "lower_bound_s": line.lower_bound_s,
        "busy_s": line.busy_s,
        "bubbles": line.bubbles,
        "peak_memory_bytes": line.peak_memory_bytes,
    }


def _draw(args: argparse.Namespace, line: Any) -> dict[str, str]:
    written = {}
    for name, draw in (("svg", "to_svg"), ("html", "to_html"), ("trace", "to_chrome_trace")):
        path = getattr(args, name)
        if path:
            getattr(line, draw)(path)
            written[name] = path
    return written


def _timeline_of(path: Path, args: argparse.Namespace) -> tuple[str, Any]:
    """(what it is, its timeline): a run folder's measured one where there is one, else the planned one."""
    import terapipe_c as tp

    if path.is_dir():
        if not (path / "plan.json").is_file():
            raise ValueError(f"{path}: no run folder, it has no plan.json")
        measured = getattr(tp, "load_timeline", None)
        if measured is not None and any(
            (path / name).exists() for name in ("timeline.npz", "timeline.json", "trace.npz")
        ):
            return "measured timeline of a run", measured(path)
        return "planned timeline of a run", tp.Plan.load(str(path / "plan.json")).timeline()
    text = path.read_text()
    if text.lstrip().startswith("{"):
        return "plan", tp.Plan.load(str(path)).timeline()
    program = tp.Program.from_csv(text) if path.suffix == ".csv" else tp.Program.parse(text)
    program.check()
    return "program", program.simulate({"F": args.fwd, "B": args.bwd}, comm_s=args.comm)


def _launch_options(args: argparse.Namespace) -> dict[str, Any]:
    names = (*LAUNCH_NUMBERS, "lr_schedule", "betas", "init", "backend")
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    if args.threads:
        options["processes"] = False
    if args.fast:
        options["reproducible"] = False
    return options


# ---- commands ----------------------------------------------------------------------------------------------------------


def _profile(args: argparse.Namespace) -> int:
    import terapipe_c as tp

    model = _model(args)
    costs = tp.profile(
        model,
        micro_batch=args.micro_batch,
        seq_len=args.seq_len or model.block_size,
        backend=args.backend,
        threads=args.threads,
    )
    seq_len = args.seq_len or model.block_size
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


def _plan(args: argparse.Namespace) -> int:
    plan = _make_plan(args)
    if args.out:
        plan.save(args.out)
    if args.json:
        _print(args, {**_plan_result(plan), **({"saved": args.out} if args.out else {})})
    else:
        text = plan.explain()
        if text:
            print(text)
        if args.out:
            print(f"saved {args.out}")
    return DONE


def _simulate(args: argparse.Namespace) -> int:
    if (args.path is None) == (args.schedule is None):
        raise ValueError("give either a file or --schedule")
    if args.path is not None:
        what, line = _timeline_of(Path(args.path), args)
    else:
        import terapipe_c as tp

        name = {"1f1b": "one_f_one_b"}.get(args.schedule, args.schedule.replace("-", "_"))
        build = None if name.startswith("_") else getattr(tp.schedules, name, None)
        if not callable(build):
            raise ValueError(
                f"--schedule is {args.schedule!r}; known are gpipe, 1f1b, seq1f1b and others of terapipe_c.schedules"
            )
        program = build(args.ranks, args.micro_batches, slices=args.slices)
        program.check()
        what, line = args.schedule, program.simulate({"F": args.fwd, "B": args.bwd}, comm_s=args.comm)
    _print(args, {"what": what, **_timeline_result(line), **_draw(args, line)})
    return DONE


def _train(args: argparse.Namespace) -> int:
    import terapipe_c as tp

    if args.data is None or args.steps is None:
        raise ValueError("train needs --data and --steps")
    plan = tp.Plan.load(args.plan) if args.plan else _make_plan(args)
    return _follow(
        args,
        tp.launch(plan, data=args.data, steps=args.steps, out=args.out, progress=_bar(args), **_launch_options(args)),
    )


def _resume(args: argparse.Namespace) -> int:
    import inspect

    import terapipe_c as tp

    folder = Path(args.folder)
    checkpoint = tp.load_checkpoint(folder, names=(), optimizer=False)
    if args.steps is None:
        raise ValueError(f"resume needs --steps; the newest checkpoint is of step {checkpoint.step}")
    data = args.data or checkpoint.data_state.get("source")
    if data is None or data == "array":
        raise ValueError(f"{folder} was trained on an array; give --data")
    kept = {name: value for name, value in checkpoint.hyper.items() if name in inspect.signature(tp.launch).parameters}
    options = {**kept, "seed": checkpoint.seed, **_launch_options(args)}
    for name in ("steps", "out", "resume", "data", "progress", "plan", "init"):
        options.pop(name, None)
    plan = tp.Plan.load(args.plan or str(folder / "plan.json"))
    return _follow(
        args, tp.launch(plan, data=data, steps=args.steps, out=str(folder), resume=True, progress=_bar(args), **options)
    )


def _bar(args: argparse.Namespace) -> bool | None:
    return False if args.quiet or args.json else None


def _follow(args: argparse.Namespace, run: Any) -> int:
    """Wait for a run; JSON: one line a record and a last one with the report."""
    for record in run:
        if args.json:
            print(json.dumps(_record(record)), flush=True)
        elif args.quiet:
            print(f"step {record.step}  loss {record.loss:.4f}  {record.tokens_per_s:,.0f} tokens/s", flush=True)
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
    return {
        name: getattr(report, name)
        for name in (
            "step_time_s",
            "predicted_step_time_s",
            "peak_memory_bytes",
            "predicted_peak_memory_bytes",
            "bubbles",
            "predicted_bubbles",
        )
    }


def _view(args: argparse.Namespace) -> int:
    if not (args.svg or args.html or args.trace):
        raise ValueError("give at least one of --svg, --html, --trace: where to draw")
    what, line = _timeline_of(Path(args.path), args)
    _print(args, {"what": what, **_draw(args, line)})
    return DONE


def _sweep(args: argparse.Namespace) -> int:
    from .sweep import Sweep, read_grid

    grid = read_grid(args.grid, _sweep_values(args))
    if args.train and (args.data is None and "data" not in grid or args.steps is None and "steps" not in grid):
        raise ValueError("sweep --train needs --data and --steps")

    def trial(point: dict[str, Any]) -> dict[str, Any]:
        settings = argparse.Namespace(**{**vars(args), **point})
        plan = _make_plan(settings)
        result = _plan_result(plan)
        if settings.train:
            import terapipe_c as tp

            folder = f"{args.out}.runs/{sweep.key(point)}"
            run = tp.launch(
                plan, data=settings.data, steps=settings.steps, out=folder, progress=False, **_launch_options(settings)
            )
            losses = [record.loss for record in run]
            result.update(_report(run.report()), loss=losses[-1], run=folder)
        return dict(_plain(result))

    base = {
        name: value
        for name, value in vars(args).items()
        if name not in ("run", "command", "json", "debug", "grid", "out", "retry_failed")
    }
    sweep = Sweep(Path(args.out), grid, base, trial)
    counts = sweep.run(args.retry_failed, None if args.json else lambda text: print(text, file=sys.stderr, flush=True))
    _print(args, {**counts, "rows": args.out})
    return DONE


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


if __name__ == "__main__":
    sys.exit(main())
