"""``Timeline.lower_bound_s`` against orders that are legal and faster than it once was."""

import numpy as np

from terapipe_c import Program


def test_sends_that_change_places_are_orders_too():
    """Slice 1's gradient is sent behind slice 0's, whose way is longer: the bound had slice 0 wait for both copies out, 19 s."""
    program = Program.parse("0RB0.0@1 0RB0.1@1 0F0.0 0SF0.0@1 0F0.1 0SF0.1@1 0B0.1 0B0.0\n"
                            "1RF0.0@0 1RF0.1@0 1F0.0 1F0.1 1B0.1 1B0.0 1SB0.0@0 1SB0.1@0\n")  # fmt: skip
    program.check(canonical=True)
    zero = np.zeros((2, 2))
    line = program.simulate({"F": zero, "B": zero + 1, "SB": zero + 3, "comm": zero, "comm.back": np.array([[0, 0], [10.0, 0]])})
    assert line.lower_bound_s <= line.makespan_s == 16.0
    halves = Program.parse("0RB0.0@1 0F0.0a 0F0.0b 0SF0.0b@1 0SF0.0a@1 0B0.0\n"
                           "1RF0.0b@0 1RF0.0a@0 1F0.0a 1F0.0b 1B0.0 1SB0.0@0\n")  # fmt: skip
    halves.check(canonical=True)
    one = np.ones((2, 1))
    line = halves.simulate({"F": one, "B": one, "SF.a": 3 * one, "SF.b": 0 * one, "comm.a": 0 * one, "comm.b": 10 * one})
    assert line.lower_bound_s <= line.makespan_s
