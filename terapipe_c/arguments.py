"""What the command `terapipe` understands: its commands, their flags and their examples."""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from ._files import loads

__all__ = ["LAUNCH_NUMBERS", "as_given", "build_parser", "launch_names", "plan_flags_given"]

Run = Callable[[argparse.Namespace], int]
LAUNCH_NUMBERS = {  # name: type, help; the defaults are tp.launch's
    "lr": (float, "learning rate behind the warm-up (default 0.0006)"),
    "min_lr": (float, "the cosine's last one (default lr / 10)"),
    "warmup_steps": (int, "steps in which it rises to lr (default 0)"),
    "weight_decay": (float, "AdamW's, of matrices and embeddings (default 0.1)"),
    "eps": (float, "AdamW's (default 1e-08)"),
    "grad_clip": (float, "largest norm of all gradients together (of a pipedream plan a stage's), 0: any (default 1.0)"),
    "seed": (int, "of the initial parameters and the order of the data (default 0)"),
    "threads_per_rank": (int, "threads that share a rank's work (default 1)"),
    "checkpoint_every": (int, "steps between checkpoints, of which the newest two stay, 0: none (default 50)"),
    "timeout_s": (float, "seconds after which a rank that waits for another one fails, 0: never (default 600.0)"),
    "log_every": (int, "steps between records, of which a million take some 300 MB (default 1)"),
    "eval_every": (int, "steps between evaluations on the last tenth of the data, 0: none (default 0)"),
}
MOST_REPEATED = 1 << 20      # lists and numbers of a list on the command line, by `* N`: beyond, a slip
NUMBER = re.compile(r"-\.?\d.*")   # below zero: a value, and no flag
ALIKE = 0.7                  # of difflib's ratio, of which "micro-batch-size" and "vocab-size" have 0.54
MEGATRON = {                 # its flags, and one of nanoGPT's: ours, or why there is none
    "--batch-size": "--batch",
    "--pipeline-model-parallel-size": "--stages", "--num-layers": "--n-layer", "--hidden-size": "--n-embd",
    "--num-attention-heads": "--n-head", "--seq-length": "--seq-len", "--max-position-embeddings": "--block-size",
    "--global-batch-size": "--batch", "--train-iters": "--steps", "--data-path": "--data", "--save": "--out",
    "--save-interval": "--checkpoint-every", "--eval-interval": "--eval-every", "--clip-grad": "--grad-clip",
    "--lr-decay-style": "--lr-schedule", "--lr-warmup-iters": "--warmup-steps", "--recompute-granularity": "--recompute",
    "--pipeline-model-parallel-layout": "--partition", "--log-interval": "--log-every",
    "--tensor-model-parallel-size": "there is no tensor parallelism: --stages and --data-parallel share the work",
    "--context-parallel-size": "there is no context parallelism: --slicing cuts sequences for a pipeline",
    "--micro-batch-size": "a plan chooses its micro-batches, --slicing gives them",
    "--num-layers-per-virtual-pipeline-stage": "say by --chunks how many stages a rank has",
    "--num-virtual-stages-per-pipeline-rank": "--chunks", "--use-distributed-optimizer": "--shard-optimizer",
    "--overlap-grad-reduce": "--sums-beside", "--disable-bias-linear": "--no-bias",
    "--untie-embeddings-and-output-weights": "--untied", "--optimizer": "the optimizer is AdamW",
    "--zero-stage": "ZeRO's first stage is --shard-optimizer, and there are no others",     # Megatron-DeepSpeed's
}
MODEL_DEFAULTS = {"n_layer": 4, "n_head": 4, "n_embd": 128, "vocab_size": 256}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors say what is wrong without the list of all flags."""

    _words: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        if unknown := self._unknown():      # before what is missing or wrong, which a slip of a flag may be the cause of
            message = self._not_known(unknown)
        self.exit(2, f"usage: {self.prog} [options]; {self.prog} --help lists them\n{self.prog}: error: {_told(message)}\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """What a command does not know is told here: the parser above would name its own --help, which lists commands alone."""
        self._words = sys.argv[1:] if args is None else list(args)
        if self.get_default("run") is None and (unknown := self._unknown()):
            self.error(self._not_known(unknown))
        found, unknown = super().parse_known_args(self._words, namespace)
        told, self._words = self._not_known(unknown) if unknown and self.get_default("run") is not None else "", ()
        if told:
            self.error(told)
        return found, unknown

    def _not_known(self, words: Sequence[str]) -> str:
        at = list(self._words).index(words[0]) if words[0] in self._words else 0
        before = self._option_string_actions.get(self._words[at - 1]) if at else None
        if before is not None and before.nargs == 0 and not words[0].startswith("-"):
            return _no_value(self._words[at - 1], words[0])
        if re.match(r"\w+=", words[0]) and "--grid" in self._words:      # as Hydra's overrides follow each other
            return f"unrecognized arguments: {' '.join(words)}; --grid again before each would be right: --grid {words[0]}"
        return f"unrecognized arguments: {' '.join(words)}{self._instead_of(words[0].partition('=')[0])}"

    def _unknown(self) -> list[str]:
        """Words that are flags, but none of this parser's, as argparse tells flags: also by how one begins."""
        unknown = []
        for word in self._words:
            name = word.partition("=")[0]
            if word == "--" or (not word.startswith("-") and self.get_default("run") is None):      # the others are a command's
                break
            if name.startswith("-") and name != "-" and " " not in name and not NUMBER.fullmatch(word):
                unknown += [] if any(flag.startswith(name) for flag in self._option_string_actions) else [word]
        return unknown

    def _instead_of(self, slip: str) -> str:
        """What would be right, where that can be told: Megatron-LM's name of a flag, or a slip of the keys."""
        from difflib import get_close_matches

        right = MEGATRON.get(slip.replace("_", "-"), "")
        if right and not right.startswith("--"):
            return f"; {right}"
        flags = {flag.lstrip("-"): flag for flag in self._option_string_actions}
        if right not in self._option_string_actions:
            right = next((flags[near] for near in get_close_matches(slip.lstrip("-"), flags, 1, ALIKE)), "")
            # --no-fast and --fast, or --tied and --untied, are as alike as slips are, and say the opposite
            denied = [name.startswith(("--no", "--un")) for name in (slip, right)]
            if right and denied[0] != denied[1] and self._option_string_actions[right].nargs == 0:
                return f"; for {slip} leaving {right} out would be right"
        return f"; for {slip} {right} would be right" if right else ""


def _told(message: str) -> str:
    """What argparse says of a value, as the rest of the package does: the value, and what would be right."""
    argument = re.fullmatch(r"argument (?:\S+/)?(\S+): (.*)", message, re.DOTALL)
    if argument is None:
        return message
    flag, said = argument.groups()
    if found := re.fullmatch(r"ignored explicit argument (.*)", said):
        return _no_value(flag, ast.literal_eval(found[1]))
    if found := re.fullmatch(r"invalid (int|float) value: (.*)", said):
        return f"{flag} is {found[2]}: a {'whole number' if found[1] == 'int' else 'number'} would be right"
    if found := re.fullmatch(r"invalid choice: (.*) \(choose from (.*)\)", said):
        return f"{flag} is {found[1]}: one of {found[2].replace(chr(39), '')} would be right"
    if found := re.fullmatch(r"expected (one|\d+|at least one) arguments?", said):
        return f"{flag} has too few values: {found[1]} would be right"
    return message


def _no_value(flag: str, value: str) -> str:
    """For a flag that is there or not, and was given a value, as Hydra's and absl's flags have one."""
    known = {"true": f"{flag} alone", "false": "leaving it out"}
    word = {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}.get(value.lower(), value.lower())
    return f"{flag} is given the value {value!r} and takes none: {known.get(word, ', or '.join(known.values()))} would be right"


class _Once(argparse.Action):
    """An option whose value a positional argument may give, too; both at once are an error."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 option_string: str | None = None) -> None:
        if (before := getattr(namespace, self.dest, None)) is not None:
            raise argparse.ArgumentError(self, f"{before} and {values} are given: one of them would be right")
        setattr(namespace, self.dest, values)


def _version() -> str:
    from . import __version__

    return __version__


def build_parser(runs: Mapping[str, Run]) -> argparse.ArgumentParser:
    """The whole parser; `runs` has the function of each command."""
    parser = _Parser(
        prog="terapipe",
        description="Plans and runs token-pipelined GPT training.",
        epilog="Each command has its own --help with an example.",
    )
    parser.add_argument("--version", action="version", version=f"terapipe_c {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, example: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=runs[name])
        for text_type in (None, str):
            command.register("type", text_type, _something)
        command.add_argument("--json", action="store_true", help="print JSON instead of a table")
        command.add_argument("--debug", action="store_true", help="show where an error comes from")
        return command

    p = add(
        "profile",
        "measure the model's layers on this machine",
        "terapipe profile --n-layer 4 --n-head 4 --n-embd 128 --seq-len 256 --out costs.json",
    )
    model_flags(p)
    p.add_argument("--seq-len", type=int, help="longest sequence measured (block size if not given)")
    p.add_argument("--micro-batch", type=int, default=1, help="sequences in a micro-batch of the plans to come (default 1)")
    p.add_argument("--backend", default="cpu", help="cpu (default) or cuda")
    p.add_argument("--dtype", choices=("float32", "bf16"), help="of activations; bf16 on cuda if not given")
    p.add_argument("--fast", action="store_true", help="products as `train --fast` has them, on cuda")
    p.add_argument("--threads", type=int, default=1, help="threads of one rank (default 1)")
    p.add_argument("--ranks", type=int, help="ranks that run at once while measuring (cores divided by --threads if not given)")
    p.add_argument("--budget-s", type=float, default=20.0, help="seconds to measure in, about (default 20)")
    p.add_argument("--out", help="save the cost model here; replaces cost models alone")

    p = add(
        "plan",
        "find stages, slices and a schedule",
        "terapipe plan --n-layer 4 --n-head 4 --n-embd 128 --batch 8 --seq-len 256 --stages 2 --costs costs.json --out plan.json",
    )
    plan_flags(p)
    backend_flags(p)
    p.add_argument("--out", help="save the plan here; replaces plans alone")

    p = add(
        "compare",
        "plan by every planner, side by side",
        "terapipe compare --preset gpt2-124m --batch 8 --seq-len 1024 --stages 4 --devices 4 --planners auto,autopipe,uniform "
        "--svg compare.svg",
    )
    plan_flags(p, planner=False)
    backend_flags(p)
    p.add_argument("--planners", "--planner", type=_names, help="names with commas between (default: all)")
    p.add_argument("--svg", help="draw steps, causes of idling and timelines here; a new file")
    p.add_argument("--out", help="save the table as JSON here; a new file")

    p = add(
        "simulate",
        "time a plan, a program or a named schedule without running it; peak_activations, of what has no bytes: how many each rank "
        "holds at most, of one micro-batch in one stage each",
        "terapipe simulate --schedule seq1f1b --ranks 4 --micro-batches 8 --slices 2 --fwd 1.0 --bwd 2.0",
    )
    p.add_argument("path", nargs="?", help="a plan file, a program's text, or a torch.distributed.pipelining CSV")
    p.add_argument("--schedule",
                   help="instead of a file: gpipe, 1f1b, seq1f1b, ... (hanayo: its authors' placement, in an order of ours)")
    p.add_argument("--ranks", type=int, help="of a named schedule (default 4)")
    p.add_argument("--micro-batches", type=int, help="of a named schedule (default 8)")
    p.add_argument("--slices", type=int, help="token slices of a micro-batch of a named schedule (default 1)")
    p.add_argument("--chunks", type=int, help="stages a rank of interleaved, looped-bfs and hanayo (default 2)")
    p.add_argument("--split", type=int, help="micro-batches that sliced-1f1b halves (default 1)")
    p.add_argument("--fwd", type=float, help="seconds of one F, or R, of a program or schedule (default 1)")
    p.add_argument("--bwd", type=float, help="seconds of one B of a program or schedule (default 2)")
    p.add_argument("--comm", type=float, help="seconds of one message of a program or schedule (default 0)")
    picture_flags(p)

    p = add("train", "train as planned", "terapipe train plan.json --data corpus.txt --steps 200 --out runs/a")
    p.add_argument("plan", nargs="?", action=_Once, default=argparse.SUPPRESS,
                   help="a plan file; without it, the flags of `terapipe plan` make one")
    p.add_argument("--plan", action=_Once, help="the same")
    plan_flags(p)
    launch_flags(p)
    p.add_argument("--out", required=True, help="run folder to make")
    p.add_argument("--under", choices=("torchrun", "mpirun", "mpiexec", "srun"),
                   help="be one rank, as this launcher says in the environment, instead of starting all: "
                        "torchrun --nproc-per-node 2 --no-python terapipe train plan.json --under torchrun ...; "
                        "needs a plan file, and rank 0 alone prints")
    p.add_argument("--comm", choices=("tcp", "mpi"),
                   help="with --under: what messages between CPU ranks go over (what TERAPIPE_COMM says, or tcp, if not given)")

    p = add("resume", "continue a run from its newest checkpoint", "terapipe resume runs/a --steps 400")
    p.add_argument("folder", help="run folder")
    p.add_argument("--plan", help="another plan file (the run's own if not given)")
    launch_flags(p, resumed=True)

    p = add("view", "draw a plan, a run or a program, or print its timeline",
            "terapipe view runs/a --html timeline.html --trace trace.json")
    p.add_argument("path", help="a plan file, a run folder, or a program's text")
    p.add_argument("--fwd", type=float, help="seconds of one F, or R, of a program (default 1)")
    p.add_argument("--bwd", type=float, help="seconds of one B of a program (default 2)")
    p.add_argument("--comm", type=float, help="seconds of one message of a program (default 0)")
    picture_flags(p)

    p = add(
        "sweep",
        "plan (or train) every point of a grid; one JSON line a trial, resumed by running it again; "
        "exits with 1 if every trial failed",
        "terapipe sweep --n-layer 4 --batch 8 --seq-len 256 --grid schedule=gpipe,1f1b --grid slicing=1,2,4 --out sweep.jsonl",
    )
    plan_flags(p)
    launch_flags(p, needed=False)
    p.add_argument(
        "--grid",
        action="append",
        default=[],
        metavar="NAME=V,V,... | FILE.json",
        help="values of one option of `plan` or `train`, or a JSON object of name -> list; repeat for more",
    )
    p.add_argument("--train", action="store_true", help="train each plan too (needs --data, --steps); else plan only")
    p.add_argument("--retry-failed", action="store_true", help="run trials again that failed before")
    p.add_argument("--out", required=True,
                   help="JSONL file, appended to (by several sweeps at once, too); a trial is known there by its options, and by "
                        "what is in its files of costs, data and init (of data or tensors above 64 MiB by their size and time)")

    p = add("doctor", "say what this machine offers and what would stop a run", "terapipe doctor --out runs")
    p.add_argument("--out", default=".", help="folder where runs would be written")
    return parser


def model_flags(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("model")
    group.add_argument("--preset", help="gpt2-124m, gpt3-175b, ...; the other model flags replace single fields of it")
    for name, value in {**MODEL_DEFAULTS, "block_size": "the sequence length, or 256"}.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"default {value}, or the preset's")
    group.add_argument("--no-bias", action="store_true", help="no biases in linear layers and LayerNorms")
    group.add_argument("--untied", action="store_true", help="a head of its own instead of the token embedding's")


def plan_flags(p: argparse.ArgumentParser, planner: bool = True) -> None:
    """planner: whether --planner, of one name, is among them."""
    model_flags(p)
    group = p.add_argument_group("plan")
    group.add_argument("--batch", type=int, default=8, help="sequences a step (default 8)")
    group.add_argument("--seq-len", type=int, help="tokens a sequence (default: the block size)")
    group.add_argument("--stages", type=int, help="ranks of a pipeline (default: as many as are fastest)")
    if planner:
        group.add_argument("--planner", default="auto", help="auto (default), terapipe, uniform, autopipe, dawnpiper, bmpipe, ...")
    group.add_argument("--schedule", default="auto",
                       help="auto (default), gpipe, 1f1b, seq1f1b, interleaved, looped-bfs, ... (hanayo: in an order of ours)")
    group.add_argument("--chunks", type=int, help="stages of a rank")
    group.add_argument("--data-parallel", type=int, help="replicas of the pipeline (`train --fast` runs them)")
    group.add_argument("--shard-optimizer", action="store_true", default=None,
                       help="each replica has AdamW's moments of a part alone")
    group.add_argument(
        "--executable", type=_yes_no, metavar="yes|no", help="only plans that this engine runs, or any (default: see tp.plan)"
    )
    group.add_argument("--time-limit-s", type=float, help="planning ends after so many seconds with the best plan "
                       "by then (auto makes one at once; another planner that has none fails)")
    group.add_argument("--recompute", choices=("ffn", "attention", "full"),
                       help="blocks that keep their input alone and compute the rest again before their backward")
    group.add_argument("--slicing", type=_slicing,
                       help="slices a sequence, or '[(micro_batch, [lengths]), ...]', as a plan prints it or in JSON")
    group.add_argument("--partition", type=_pairs, help="'[(first_block, last_block + 1), ...]', or that in JSON")
    group.add_argument("--granularity", type=int, help="slice lengths are multiples of this many tokens")
    group.add_argument("--memory-bytes", type=_bytes, help="a rank's memory, e.g. 16e9")
    group.add_argument(
        "--costs", help="a file of `terapipe profile`, or 'analytic', or 'profile' (the default on this machine)"
    )
    group = p.add_argument_group("cluster (this machine, if --devices is not given)")
    for name, kind, text in (
        ("devices", int, "how many"),
        ("device", str, "h100, a100-80, ...: whose sheet says what is not given here (half of its peak in fp32, or bf16)"),
        ("devices-per-node", int, "default: all of them"),
        ("device-memory-bytes", _bytes, "of one (default 16e9)"),
        ("link-latency-s", float, "of an empty message (default 5e-6)"),
        ("link-bandwidth-Bps", float, "bytes a second of one link, each way (default 12.5e9)"),
        ("node-link-latency-s", float, "the same within a node (default: as between nodes)"),
        ("node-link-bandwidth-Bps", float, "the same within a node (default: as between nodes; of --device its own)"),
        ("peak-flops", float, "FLOPs a second that kernels reach (default 60e9, a core's)"),
        ("host-bandwidth-Bps", float, "bytes a second that a rank swaps at (default: nothing is swapped)"),
    ):
        group.add_argument(f"--{name}", type=kind, help=text)
    group.add_argument("--swaps-beside", action="store_true", help="a rank has a core to spare for its swaps")
    group.add_argument("--sums-beside", action="store_true", help="a rank has a core to spare for sums of replicas' gradients")
    group.add_argument("--swap-folder", help="plans for this machine may swap activations to files here: how fast is measured")


def backend_flags(p: Any) -> None:
    p.add_argument("--backend", help="cpu or cuda, which the plan is for (default: the cost file's, or cpu)")
    p.add_argument("--dtype", choices=("float32", "bf16"), help="of activations; bf16 on cuda if not given")


def plan_flags_given(parser: argparse.ArgumentParser, command: str, argv: Sequence[str]) -> list[str]:
    """Flags of `plan_flags` that are on this command line, even with their default values. parser: from :func:`build_parser`; it
    cannot be used afterwards."""
    known = argparse.ArgumentParser(add_help=False)
    plan_flags(known)
    subparsers = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for action in subparsers.choices[command]._actions:
        action.default = argparse.SUPPRESS                     # what is not given is not there
    given = vars(parser.parse_args(argv))
    return [action.option_strings[0] for action in known._actions if action.dest in given]


def launch_flags(p: argparse.ArgumentParser, needed: bool = True, resumed: bool = False) -> None:
    """needed: a run follows, and may be quiet. resumed: values that are not given are the run's own, not `launch`'s."""
    group = p.add_argument_group("training (values that are not given, but --steps, are the run's own)" if resumed else "training")

    def add(name: str, text: str, default: str = "", **options: Any) -> None:
        group.add_argument(name, help=text if resumed else text + default, **options)

    add("--data", "text, its bytes the tokens (not compressed, nor archives, tables or UTF-16); a .bin of nanoGPT (uint16) or "
                  "llm.c; Megatron's .bin beside its .idx; a .npy, 1-D and of integers")
    add("--steps", "optimizer steps, counted from the start of the run, where a cosine ends", type=int)
    for name, (kind, text) in LAUNCH_NUMBERS.items():
        text, default, value = text.partition(" (default ")
        add(f"--{name.replace('_', '-')}", text, default + value, type=kind)
    add("--lr-schedule", "of the learning rate", " (default cosine)", choices=("cosine", "constant"))
    add("--betas", "AdamW's", " (default 0.9 0.95)", type=float, nargs=2)
    group.add_argument("--init", help=argparse.SUPPRESS if resumed else     # which a resume refuses, with words
                       "start from these parameters: a checkpoint, or a folder of transformers' GPT-2")
    add("--backend", "cpu or cuda", " (default cpu)")
    add("--dtype", "of activations", "; bf16 on cuda if not given", choices=("float32", "bf16"))
    add("--gpus", "on cuda, the GPU of each rank", " (rank r has GPU r if not given)", type=int, nargs="+")
    group.add_argument("--threads", action="store_true", help="ranks as threads of this process")
    group.add_argument("--fast", action="store_true",
                       help="reproducible=False: on cuda faster products, but of replicas; those of --data-parallel, and schedule "
                            "pipedream, need it")
    if needed:
        group.add_argument("--quiet", action="store_true", help="no progress bar")


def launch_names() -> set[str]:
    """The options of `launch_flags`, as they are called in a grid."""
    known = argparse.ArgumentParser(add_help=False)
    launch_flags(known, needed=False)
    return {action.dest for action in known._actions}


def picture_flags(p: argparse.ArgumentParser) -> None:
    p.add_argument("--svg", help="draw the timeline here")
    p.add_argument("--html", help="draw the timeline here, to be looked at in a browser")
    p.add_argument("--trace", help="write a Chrome trace here (opens in Perfetto)")


def _something(text: str) -> str:
    """A text that is not empty: an empty one, most likely a shell variable that is not set, would be taken for no option at all."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: a value, or no such option, would be right")
    return text


def _slicing(text: str) -> Any:
    try:
        value = _notation(text)
        return value if isinstance(value, int) else [(b, list(lengths)) for b, lengths in value]
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of slices nor [(micro_batch, [lengths]), ...], as a plan prints it or in JSON"
        ) from error


def _pairs(text: str) -> Any:
    try:
        return [(first, end) for first, end in _notation(text)]
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not [(first_block, last_block + 1), ...], nor that in JSON") from error


def as_given(name: str, value: Any) -> Any:
    """A value of a sweep's grid, where it is text that the option of this name has another reading of; ValueError: none has."""
    read = {"slicing": _slicing, "partition": _pairs}.get(name)
    try:
        return read(value) if read and isinstance(value, str) else value
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"value {error} (of {name})") from error


def _notation(text: str) -> Any:
    """Lists and numbers as JSON or as Python and a plan write them: `[(1, [120]*4+[64])] * 8`."""
    try:
        return loads(text)
    except ValueError:
        try:
            return _listed(ast.parse(text.strip(), mode="eval").body)
        except (SyntaxError, RecursionError, MemoryError):      # the last two: nested beyond reason
            raise ValueError("neither JSON nor a list of Python's") from None


def _listed(node: ast.expr) -> Any:
    match node:
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_listed(part) for part in parts]
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return number
        case ast.BinOp(left=ast.expr() as left, op=ast.Add(), right=right) if isinstance(more := _listed(right), list):
            return [*_listed(left), *more]
        case ast.BinOp(left=ast.expr() as left, op=ast.Mult(), right=ast.Constant(value=int(times))):
            repeated = _listed(left)
            if isinstance(repeated, list) and (times < 2 or times * _count(repeated) <= MOST_REPEATED):
                return repeated * times
    raise ValueError("other than lists of numbers, added and repeated")


def _count(value: Any) -> int:
    """The number of lists and numbers in a value; nested repetitions multiply."""
    return 1 + sum(map(_count, value)) if isinstance(value, list) else 1


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _yes_no(text: str) -> bool:
    if text not in ("yes", "no"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither yes nor no")
    return text == "yes"


def _bytes(text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value < 1e18:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes: one of at least 1, such as 16e9, would be right")
    return int(value)
