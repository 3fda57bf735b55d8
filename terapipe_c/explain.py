"""A plan in words. :func:`explain` fits a screen however many ranks there are: neighbours that are alike share a line."""
from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .backend import choose
from .config import counted, human_bytes, human_count, human_gap, human_seconds
from .guests import guest_bytes, hosts
from .schedule import CODE, idle_causes
from .schedules import SLICED

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["explain", "format_slicing", "memory_by_rank", "restriction"]

LINES = 16      # most lines for stages
GROUPS = 8      # most groups of ranks with equal memory, and most pairs of ranks, to name


def explain(plan: Plan) -> str:
    """The text: what runs where, predicted time and memory, where the time goes, what else was looked at, and the search's log."""
    p = plan
    lines = [f"Plan {p.digest} for {p.model!r}: {human_count(p.model.num_params)} parameters",
             f"  a step: {counted(p.batch, 'sequence')} of {p.seq_len} tokens, {counted(p.ranks, 'rank')}"
             + (f" of {p.chunks} chunks" if p.chunks > 1 else "")
             + (f", {p.data_parallel} replicas of them" if p.data_parallel > 1 else "")
             + (", which shard the optimizer" if p.shard_optimizer else "")
             + f", schedule {p.schedule}, planner {p.planner}"
             + (", two copies of the model, half of the micro-batches down the ranks and half up" if p.copies > 1 else ""),
             f"  slices: {format_slicing(p.slicing)}" + _halves(p), "  stages:", *_stages(p), *_saved(p), *_guests(p),
             f"  predicted step: {human_seconds(p.step_time_s)} ({human_count(p.tokens_per_s)} tokens/s); no order of these "
             f"operations is faster than {human_seconds(p.lower_bound_s)} (gap {human_gap(p.gap)})"]
    if p.slicing_bound_s is not None and p.slicing_gap is not None:
        lines.append(f"  no other slicing of these micro-batches on these stages is faster than "
                     f"{human_seconds(p.slicing_bound_s)} in any order (gap {human_gap(p.slicing_gap)})")
    if p.cost_source:
        where = f" on {p.device}" if p.device else " (nothing was measured)" if p.cost_source.startswith("analytic") else ""
        lines.append(f"  costs: {p.cost_source}{where}")
    told = idle_causes(p.bubbles, p.ranks * p.step_time_s)
    share = sum(told.values()) / (p.ranks * p.step_time_s) if p.step_time_s > 0 else 0.0
    causes = ", ".join(f"{k.replace('_', ' ')} {human_seconds(v)}" for k, v in told.items())
    lines.append(f"  idle: {100 * share:.3g} % of the ranks' time" + (f" ({causes})" if causes else ""))
    limit = "" if p.memory_limit_bytes is None else f" of {human_bytes(p.memory_limit_bytes)}"
    lines.append(f"  peak memory: {memory_by_rank(p.peak_memory_bytes)}{limit}")
    if not p.executable:
        lines.append(f"  {restriction(p)}: {p.why_not_executable}")
    if p.compared:
        lines.append("  compared with: " + ", ".join(f"{what} {human_seconds(s)}" for what, s in p.compared))
    lines.append(f"  planned in {human_seconds(p.planning_time_s)}" + ("; the search:" if p.search_log else ""))
    return "\n".join([*lines, *(f"    {line}" for line in p.search_log)])


def restriction(plan: Plan) -> str:
    """For a plan that is not ``executable``: the words that say whether it runs at all."""
    return "not executable" if plan.why_not_at_all else "runs not reproducibly"


# ---- stages --------------------------------------------------------------------------------------------------------------

def _stages(plan: Plan) -> list[str]:
    """A line for each stage. More than LINES stages: one line for neighbours with the same blocks, seconds and step from rank to
    rank; if there are still too many the middle is left out."""
    rows = [_stage(plan, k) for k in range(len(plan.stages))]
    if len(rows) <= LINES:
        return [_stage_line([row]) for row in rows]
    groups: list[list[dict[str, Any]]] = []
    for row in rows:
        if groups and _alike(groups[-1], row):
            groups[-1].append(row)
        else:
            groups.append([row])
    lines = [_stage_line(group) for group in groups]
    if len(groups) <= LINES:
        return lines
    ends = LINES // 2 - 1
    folded = [row for group in groups[ends:-ends] for row in group]
    slowest = max(folded, key=lambda row: row["fwd"] + row["bwd"])
    least, most = (f"{counted(pick(len(row['kinds']) for row in folded), 'block')}, "
                   f"{human_seconds(pick(row['fwd'] for row in folded))} forward, "
                   f"{human_seconds(pick(row['bwd'] for row in folded))} backward" for pick in (min, max))
    between = f"    {folded[0]['stage']} to {folded[-1]['stage']}: from {least}, to {most}; the slowest is"
    return [*lines[:ends], between, _stage_line([slowest]), *lines[-ends:]]


def _stage(plan: Plan, k: int) -> dict[str, Any]:
    first, end = plan.stages[k]
    blocks = plan.model.blocks[first:end]
    work = {p: float(plan.durations[p][k].sum()) for p in "FIW"}    # of all micro-batches, whatever their copy
    return {"stage": k, "ranks": [int(rank) for rank in plan.program.rank_of[k::len(plan.stages)]],
            "kinds": [b.kind for b in blocks], "names": [b.name for b in blocks], "fwd": work["F"], "bwd": work["I"] + work["W"],
            "versions": plan.program.versions(k)}


def _alike(group: Sequence[dict[str, Any]], row: dict[str, Any]) -> bool:
    """May this stage share the line of those before it? Versions of weights count down from rank to rank."""
    last = group[-1]
    steps = [b - a for a, b in zip(last["ranks"], row["ranks"], strict=True)]
    before = [b - a for a, b in zip(group[-2]["ranks"], last["ranks"], strict=True)] if len(group) > 1 else steps
    return (all(abs(step) == 1 for step in steps) and steps == before and row["kinds"] == last["kinds"]
            and bool(row["versions"]) == bool(last["versions"])
            and all(human_seconds(row[time]) == human_seconds(last[time]) for time in ("fwd", "bwd")))


def _stage_line(group: Sequence[dict[str, Any]]) -> str:
    a, b = group[0], group[-1]
    each = " each" if len(group) > 1 else ""
    stages = f"{a['stage']}" if a is b else f"{a['stage']} to {b['stage']}"
    ranks = " and ".join(f"{x}" if x == y else f"{x} to {y}" for x, y in zip(a["ranks"], b["ranks"], strict=True))
    many = each or len(a["ranks"]) > 1
    names = a["names"][0] if len(a["names"]) == 1 and not each else f"{a['names'][0]} to {b['names'][-1]}"
    most, least = (max(row["versions"] for row in group), min(row["versions"] for row in group)) if a["versions"] else (0, 0)
    weights = f", weights in {f'{most} to ' if most > least else ''}{least} version{'s' * (most > 1)}"
    return (f"    {stages} on rank{'s' if many else ''} {ranks}: " + (f"{counted(len(a['kinds']), 'block')} each, " if each else "")
            + f"{names}: {human_seconds(a['fwd'])} forward, {human_seconds(a['bwd'])} backward{each}" + (weights if most else ""))


# ---- memory --------------------------------------------------------------------------------------------------------------

def memory_by_rank(sizes: Sequence[int]) -> str:
    """"rank 0 38.1 GiB, ranks 1-95 37.2 GiB"; of many that differ the largest and the smallest."""
    groups = runs_of(map(human_bytes, sizes))
    if len(groups) <= GROUPS:
        return ", ".join(f"rank{'s' if last > first else ''} {_span(first, last)} {text}" for first, last, text in groups)
    least, most = (pick(range(len(sizes)), key=sizes.__getitem__) for pick in (min, max))
    return (f"{human_bytes(sizes[most])} on rank {most}, the most, to {human_bytes(sizes[least])} on rank {least} "
            "(plan.peak_memory_bytes has all)")


def runs_of(texts: Iterable[str]) -> list[tuple[int, int, str]]:
    """(first, last, text) of neighbours that read alike."""
    found, at = [], 0
    for text, group in itertools.groupby(texts):
        count = sum(1 for _ in group)
        found.append((at, at + count - 1, text))
        at += count
    return found


def _span(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first}-{last}"


def _saved(plan: Plan) -> list[str]:
    def counts(kinds: Sequence[str]) -> str:
        return ", ".join(f"{kinds.count(kind)} of {plan.model.n_layer} {kind} blocks" for kind in dict.fromkeys(kinds))

    again = [block.kind for block, flag in zip(plan.model.blocks, plan.recompute, strict=False) if flag]
    away = [block.kind for block, bytes_ in zip(plan.model.blocks, plan.swap, strict=False) if bytes_]
    return [*([f"  made again before their backward: {counts(again)}"] if again else []),
            *([f"  swapped until their backward: {counts(away)}, {human_bytes(sum(plan.swap))} a micro-batch"
               f"{', beside the work' * plan.program.swaps_beside}"] if away else [])]


def _guests(plan: Plan) -> list[str]:
    kept = hosts(plan.program)
    where = choose(plan.backend, plan.dtype)
    sizes = guest_bytes(plan.model, plan.stages, plan.slicing, plan.recompute, where) if kept else []
    lines = [f"  rank {peer} keeps activations of rank {rank} until their backward: {count} of {len(plan.slicing)} "
             f"micro-batches, {human_bytes(sizes[rank])} each" for (rank, peer), count in kept.items()]
    return lines if len(lines) <= GROUPS else [*lines[:GROUPS - 1], f"  and so on, {len(lines)} pairs of ranks in all"]


# ---- slices --------------------------------------------------------------------------------------------------------------

def _halves(plan: Plan) -> str:
    code = plan.program.instructions(0)
    count = int((code["flags"][code["op"] == CODE["F"]] & 1).sum()) if plan.schedule == SLICED else 0    # not their messages
    which = "forward of the first micro-batch" if count == 1 else f"forwards of the first {count} micro-batches"
    return f", the {which} in halves along the batch" if count else ""


def format_slicing(slicing: Iterable[tuple[int, Sequence[int]]]) -> str:
    """TeraPipe's notation: ``[(1, [120]*4+[64])] * 8``."""
    def runs(lengths: Sequence[int]) -> str:
        parts = [(n, sum(1 for _ in group)) for n, group in itertools.groupby(lengths)]
        joined: list[str] = []
        plain: list[str] = []
        for n, count in parts:
            if count > 2:
                if plain:
                    joined.append(f"[{', '.join(plain)}]")
                    plain = []
                joined.append(f"[{n}]*{count}")
            else:
                plain += [str(n)] * count
        if plain:
            joined.append(f"[{', '.join(plain)}]")
        return "+".join(joined)

    groups = [((b, tuple(lengths)), sum(1 for _ in g)) for (b, lengths), g in
              itertools.groupby(((b, tuple(lengths)) for b, lengths in slicing))]
    return " + ".join(f"[({b}, {runs(lengths)})]" + (f" * {count}" if count > 1 else "") for (b, lengths), count in groups)
