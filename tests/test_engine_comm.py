"""An engine, and who else would use its communicator meanwhile."""
import contextlib
import threading

import pytest
from test_comm import refused_beside
from test_engine import partition_of, problem, region_for

import terapipe_c as tp
from terapipe_c import _core
from terapipe_c.engine import RankEngine
from terapipe_c.schedule import tables


@pytest.mark.parametrize("kind", ["engine", "emulated"])
def test_no_engine_opens_on_a_communicator_that_another_thread_uses(kind):
    """It made room for its receives in memory that a wait was reading, and another thread could close what it opened on."""
    model, params, _ = problem(1, 8)
    partition, slicing = partition_of(model, [3]), [(1, [8])]
    program = tp.schedules.gpipe(2, 1, [1]).split().lower(True)
    comm = _core.Comm(region_for(model, partition, slicing, program), 0, 60.0)

    def opened():
        if kind == "engine":
            return RankEngine(model, partition, slicing, program, 0, comm)
        return _core.Engine.emulated(program, 0, tables(program, {"F": 1e-3, "B": 2e-3}), comm)

    into = bytearray(4)

    def receive():
        while not any(into):
            with contextlib.suppress(RuntimeError):     # the question below was at it just then
                comm.recv(1, 1, into)

    thread = threading.Thread(target=receive)
    thread.start()
    refused = refused_beside(thread, comm)
    with pytest.raises(RuntimeError, match="in use by another thread"):
        opened()
    _core.Comm(comm.region, 1, 60.0).send(0, 1, b"over")
    thread.join()
    assert refused and into == b"over"
    if kind == "engine":
        opened().load(params)
