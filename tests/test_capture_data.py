"""tp.capture of models whose Python asks tensors for numbers, or for shapes that numbers say. Skipped where torch is not
installed."""

import random
import threading

import pytest
from test_capture import saved_bytes, torch

import terapipe_c as tp

__all__ = ["torch"]


def model_of(torch, forward, **parts):
    """A module of these parts; two layers, first and last, more."""
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
            for name, part in parts.items():
                setattr(self, name, part)

        def forward(self, *args):
            return forward(self, *args)

    torch.manual_seed(4)
    return Model()


def check(torch, model, *args, unused=0):
    """That the nodes' bytes are what the model saves and holds."""
    nodes = tp.capture(model, args, repeats=0)
    with torch.random.fork_rng():
        assert nodes.activation_bytes.sum() == saved_bytes(torch, model, *args)
    assert nodes.param_bytes.sum() == sum(4 * p.numel() for p in model.parameters()) - unused
    return nodes


def asked(torch):
    """name -> what a model does with its first layer's result h and whole numbers n."""
    def written(model, h, n):
        h = h * 1
        h[:, :n.max()] = 0.0
        return h.sin()

    def popped(model, h, n):
        counts = n.tolist()
        first = counts.pop(0)
        return h[:first].sin() if len(counts) == 5 and n.sum() > 0 else h

    def each(model, h, n):
        return sum(h[(n == k).nonzero()[:, 0]].sum() for k in n.unique() if int(k) > 0)

    def packed(model, h, n):
        whole = torch.nn.utils.rnn.pack_padded_sequence(h[None].expand(3, -1, -1), n[:3].cpu(), batch_first=True)
        return torch.nn.utils.rnn.pad_packed_sequence(model.rnn(whole)[0], batch_first=True)[0].sin()

    return {
        "slice": lambda model, h, n: h[:, :n.max()].sin() if h[:, :n.max()].shape[1] > 2 else h,
        "slice and mask": lambda model, h, n: h[n > 1, :n.max()].sin(), "slice that is written": written,
        "arange": lambda model, h, n: h[torch.arange(n.max())].sin(), "a loop": each, "packed": packed,
        "unique": lambda model, h, n: h.new_zeros(len(torch.unique(n)), 8).index_add(0, n.unique(return_inverse=True)[1], h).sin(),
        "one_hot": lambda model, h, n: torch.nn.functional.one_hot(n).float().T @ h.sin(),
        "in": lambda model, h, n: h.sin() if 3 in n else h, "equal": lambda model, h, n: h.sin() if n.equal(n + 0) else h,
        "allclose": lambda model, h, n: h.sin() if h.allclose(h + 0) else h,
        "format": lambda model, h, n: h.sin() if f"{n.sum():03d}" == "009" else h,
        "tolist": lambda model, h, n: [x.sin() for x, k in zip(h.split(n[:3].tolist()), n.tolist(), strict=False) if k > 1],
        "a list that is written": popped, "a list of bools": lambda model, h, n: h[(n > 1).tolist()].sin(),
        "how often": lambda model, h, n: h.repeat_interleave(n, 0).sin() if n.sum() > 0 else h,
        "ctc": lambda model, h, n: torch.nn.functional.ctc_loss(h.log_softmax(-1)[:, None], n[None, :2], 2 * n[:1], n[1:2])
        if n.sum() > 0 else h,
    }


@pytest.mark.parametrize("what", ["slice", "slice and mask", "slice that is written", "arange", "a loop", "packed", "unique",
                                  "one_hot", "in", "equal", "allclose", "format", "tolist", "a list that is written",
                                  "a list of bools", "how often", "ctc"])
def test_whatever_asks_for_numbers_is_told_the_examples(torch, what, capfd):
    do = asked(torch)[what]
    model = model_of(torch, lambda model, x, n: model.last(x).mean() * do(model, model.first(x).tanh(), n)
                     if what != "tolist" else [model.last(x), *do(model, model.first(x).tanh(), n)])
    if what == "packed":
        model.rnn = torch.nn.GRU(8, 8, batch_first=True)
    check(torch, model, torch.randn(6, 8), torch.tensor([3, 2, 1, 0, 2, 1]))
    assert capfd.readouterr() == ("", "")


def test_gradients_go_through_what_a_mask_chooses(torch):
    def forward(model, x):
        h = model.first(x).tanh()
        return model.last(h[h[:, 0] > 0]).sin(), torch.masked_select(h, h < 0).exp()

    model = model_of(torch, forward)
    nodes = tp.capture(model, torch.randn(64, 8), repeats=1)
    at = {name: k for k, name in enumerate(nodes.names)}
    assert all(nodes.bwd_s[at[name]] > 0 for name in ("first.linear", "tanh", "getitem", "masked_select", "last.linear", "exp"))


def test_a_question_that_a_trace_does_not_ask_is_passed_over(torch):
    """The answer to a skipped question was given to the next one; where all results are zeros no comparison notices."""
    def forward(model, x):
        h = model.first(x).tanh()
        if not torch.compiler.is_exporting() and (h > 2).any():
            h = h + 1
        return model.last(h.sin() if (h < 2).any() else model.other(h).exp())

    model = model_of(torch, forward, other=torch.nn.Linear(8, 8))
    torch.nn.init.zeros_(model.last.weight)
    torch.nn.init.zeros_(model.last.bias)
    with pytest.warns(UserWarning, match=r"other\.weight, other\.bias"):
        assert "sin" in check(torch, model, torch.randn(6, 8), unused=288).names


def test_numbers_that_are_asked_for_within_autocast_are_told(torch):
    def forward(model, x):
        if (x > 1e9).any():
            return x
        with torch.autocast("cpu", torch.bfloat16):
            h = model.first(x).tanh()
            h = h[h[:, 0] > 0]
        return model.last(h.float())

    check(torch, model_of(torch, forward), torch.randn(6, 8))


def test_a_function_that_asks_for_numbers_is_one_node(torch):
    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x[:int((x[:, 0] > -9).sum())] * (2 if x.abs().sum().item() > 0 else 3)
            ctx.save_for_backward(y)
            return y, y.shape[0]

        @staticmethod
        def backward(ctx, dy, _):
            return 2 * dy

    def forward(model, x):
        h, count = Kept.apply(model.first(x).tanh())
        return model.last(h[:count]) if h.abs().sum().item() > 0 else h     # a question of the same shape as the Function's

    nodes = check(torch, model_of(torch, forward), torch.randn(6, 8))
    assert "kept" in nodes.names and "last.linear" in nodes.names


def test_the_way_is_the_one_that_random_numbers_say_now(torch):
    """torch.fx, which is tried first, drew some of the random numbers: the nodes were those of another path than the model's next
    one."""
    def forward(model, x):
        h = model.first(x)
        for part in model.parts:
            if torch.rand([]).item() > 0.5 and random.random() > 0.3:
                h = part(h).tanh()
        return model.last(h) if (h < 1e9).all() else h

    model = model_of(torch, forward, parts=torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(8)))
    for seed in range(3):
        torch.manual_seed(seed)
        random.seed(seed)
        with torch.random.fork_rng():
            now = random.getstate()
            taken = sum(torch.rand([]).item() > 0.5 and random.random() > 0.3 for _ in range(8))
            random.setstate(now)
        with pytest.warns(UserWarning, match=f"{16 - 2 * taken} parameters"):
            nodes = tp.capture(model, torch.randn(6, 8, generator=torch.Generator().manual_seed(0)), repeats=0)
        assert sum("tanh" in name for name in nodes.names) == taken and random.getstate() == now


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_within_checkpoints_are_as_if_there_were_none(torch, reentrant):
    """torch.export took everything after them as being without gradients: nothing was kept."""
    again = torch.utils.checkpoint.checkpoint

    def forward(model, x, nested=True):
        def part(h):
            return model.other(h[h[:, 0] > -9]).tanh() if (h < 1e9).all() else h

        h = model.first(x)
        inner = (lambda h: again(part, h * 2, use_reentrant=reentrant)) if nested else lambda h: part(h * 2)
        return model.last(again(inner, h, use_reentrant=reentrant) if nested else inner(h)).sin()

    model, x = model_of(torch, forward, other=torch.nn.Linear(8, 8)), torch.randn(6, 8)
    plain = model_of(torch, lambda model, x: forward(model, x, False), other=torch.nn.Linear(8, 8))
    plain.load_state_dict(model.state_dict())
    hooks = torch.utils.checkpoint._checkpoint_hook
    assert tp.capture(model, x, repeats=0).activation_bytes.sum() == saved_bytes(torch, plain, x) > 0
    assert torch.utils.checkpoint._checkpoint_hook is hooks


def test_a_refusal_says_so_by_what_it_raises_alone(torch, capfd):
    """torch.export printed the graph so far, and logged."""
    model = model_of(torch, lambda model, x: x if torch.compiler.is_exporting() and (model.first(x) > 0).any() else
                     model.last(x) if (x < 1e9).all() else model.first(x))
    with pytest.raises(tp.InvalidValueError, match="cannot trace Model.*data-dependent"):
        tp.capture(model, torch.randn(6, 8), repeats=0)
    assert capfd.readouterr() == ("", "")


def test_several_threads_capture_at_a_time(torch):
    def forward(model, x):
        h = model.first(x)
        return model.last(h[h[:, 0] > 0]).sin()

    model, found = model_of(torch, forward), list[float]()
    models = [model_of(torch, forward) for _ in range(4)]
    x = torch.randn(6, 8)
    threads = [threading.Thread(target=lambda model=model: found.append(tp.capture(model, x, repeats=0).activation_bytes.sum()))
               for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [saved_bytes(torch, model, x)] * 4


def test_what_an_operation_traces_by_itself_has_no_bytes(torch):
    """torch.cond traces the backward of its branches as it runs, and autograd saves what has no data then: no model with one could
    be captured."""
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.yes, self.no, self.last = (torch.nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            return self.last(torch.cond(x.sum() > 0, lambda y: self.yes(y).relu(), lambda y: self.no(y).tanh(), (x,)))

    model, x = Model(), torch.ones(4, 8)
    nodes = tp.capture(model, x, repeats=1)
    rows = dict(zip(nodes.names, zip(nodes.param_bytes, nodes.activation_bytes, nodes.bwd_s, strict=True), strict=True))
    assert rows["cond"][0] == 2 * (8 + 1) * 8 * 4 and rows["cond"][2] > 0 and nodes.param_bytes.sum() == 3 * (8 + 1) * 8 * 4
    assert nodes.activation_bytes.sum() >= 4 * 8 * 4
