"""Ranks on a network of their own: machines that vanish, addresses of one link, Ctrl-C before all are there."""
import ctypes
import functools
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ports import free_port
from test_train import begin, close, meeting, mpich, plans, told  # noqa: F401

from terapipe_c import _core
from terapipe_c.job import neighbours

NEWUSER, NEWNET = 0x10000000, 0x40000000


def apart():
    """This process gets a network without anything, its own to change."""
    if ctypes.CDLL(None, use_errno=True).unshare(NEWNET if os.geteuid() == 0 else NEWUSER | NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")


@functools.cache
def has_networks():
    if shutil.which("ip") is None:
        return False
    try:
        return subprocess.run(["ip", "link", "set", "lo", "up"], preexec_fn=apart, capture_output=True).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


needs_networks = pytest.mark.skipif(not has_networks(), reason="no network namespaces here, or no ip")

RANKS = """
import json, subprocess, sys, threading
from terapipe_c import _core
from terapipe_c.job import neighbours

host, wait, setup, fault = sys.argv[1:]
said = subprocess.run(setup, shell=True, check=True, capture_output=True, text=True).stdout.strip()
host, results, met = host or said, [None] * 3, threading.Barrier(4)

def one(rank):
    region, comm = _core.Region.create(3, bytes(9), 0, 64, False), None
    try:
        try:
            comm = _core.tcp_comm(region, rank, host, 29500, neighbours(3), 64, meeting_s=20.0, timeout_s=60.0, silent_s=2.0)
            comm.barrier()
        finally:
            met.wait()
        while True:     # a message to each neighbour and from it: something is always on its way
            if wait:
                comm.barrier()
            else:
                for peer in sorted({(rank + 1) % 3, (rank + 2) % 3}, key=lambda peer: rank + peer):
                    comm.exchange(peer, 0, bytes(1 << 16), bytearray(1 << 16))
    except Exception as error:
        results[rank] = [type(error).__name__, str(error)]
        region.abort("ECONNECTION", rank, str(error))
    if comm is not None:
        comm.close()

threads = [threading.Thread(target=one, args=(rank,)) for rank in range(3)]
for thread in threads:
    thread.start()
met.wait()
subprocess.run(fault, shell=True, check=True)
for thread in threads:
    thread.join()
print(json.dumps(results))
"""


def ranks_apart(setup, fault, host="", wait=""):
    """What each of three ranks, in a network of their own, ends with."""
    words = [sys.executable, "-c", RANKS, host, wait, setup, fault]
    ended = subprocess.run(words, preexec_fn=apart, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@needs_networks
@pytest.mark.parametrize("wait", ["", "gather"])
def test_a_machine_that_vanishes_is_noticed_while_something_is_on_its_way_to_it(wait):
    """Keep-alive rests then, and the kernel tries for a quarter of an hour: all waited for their time-out, of ten minutes."""
    ends = ranks_apart("ip link set lo up", "ip link set lo down", "127.0.0.1", wait)
    for rank, (kind, text) in enumerate(ends):
        assert kind == "AbortedError" and f"rank {rank} was ended because rank " in text and "does not answer" in text, ends


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """The environment in which "rank0.late" and "rank0.mute" are names of hosts (late_name.c)."""
    shim = tmp_path_factory.mktemp("names") / "late_name.so"
    subprocess.run(["gcc", "-shared", "-fPIC", str(Path(__file__).with_name("late_name.c")), "-o", str(shim), "-ldl"], check=True)
    return {"LD_PRELOAD": str(shim)}


def test_a_name_may_get_its_address_while_ranks_wait(names):
    """Containers start in any order, and what serves their names knows one when it is ready: the others' ranks ended at once."""
    code = f"""if True:
        import sys
        from terapipe_c import _core
        rank = int(sys.argv[1])
        region = _core.Region.create(2, bytes(4), 0, 64, False)
        comm = _core.tcp_comm(region, rank, ["127.0.0.1", "rank0.late"][rank], {free_port()}, bytes(4), 64, meeting_s=30.0)
        print(comm.allgather(b"%d" % rank).decode())
        comm.close()
    """
    ranks = [subprocess.Popen([sys.executable, "-P", "-c", code, str(rank)], env={**os.environ, **names},
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for rank in range(2)]
    said = [rank.communicate(timeout=60) for rank in ranks]
    assert [out for out, _ in said] == ["01\n"] * 2, said


@pytest.mark.parametrize(("host", "why"), [("rank0.mute", "who serves names has not said what address that is"),
                                           ("no.such.host.invalid", "")])
def test_a_name_that_nobody_knows_ends_a_run_by_its_own_deadline(plans, names, host, why):  # noqa: F811
    """A minute was waited for it whatever timeout_s said, and beyond while the resolver waited."""
    _, files, data = plans
    place = {**mpich(1, 2, free_port()), **names, "MASTER_ADDR": host}
    ended = told(begin(files[2], data, 1, place, timeout_s=0.5, meeting_s=None))
    assert ended["error"] == "DeadlineError", ended
    assert f"rank 1 did not reach rank 0 at {host}:" in ended["text"] and f" within 0.5 s: {why}" in ended["text"]
    assert ended["text"].endswith("; in MASTER_ADDR, an address or a name that this machine knows would be right")


def test_ctrl_c_ends_the_wait_for_a_name(plans, names):  # noqa: F811
    """It was heard when the resolver had answered."""
    _, files, data = plans
    child = begin(files[2], data, 1, {**mpich(1, 2, free_port()), **names, "MASTER_ADDR": "rank0.mute"}, meeting_s=1000)
    time.sleep(1.0)
    while child.poll() is None:
        child.send_signal(signal.SIGINT)
        time.sleep(0.2)
    assert "KeyboardInterrupt" in json.dumps(told(child))


@needs_networks
def test_ranks_meet_at_addresses_of_one_link():
    setup = """ip link set lo up && ip link add one type veth peer name two && ip link set two up && ip link set one up
        ip -6 addr add fe80::1:1/64 dev one nodad && echo fe80::1:1%one"""
    ends = ranks_apart(setup, "ip link del one", wait="gather")
    assert all("does not answer" in text or "closed" in text for _, text in ends), ends


def test_who_comes_after_one_of_a_larger_world_hears_of_it_too():
    """That one had the last rank's place, and when that came nobody listened any more."""
    results, port = [], free_port()
    early = threading.Thread(target=lambda: results.extend(meeting([{}], port=port)))
    early.start()
    larger, = meeting([{"rank": 2, "ranks": 3}], port=port)
    late, = meeting([{"rank": 1}], port=port, meeting_s=5.0)
    early.join()
    for error in (results[0], larger, late):
        assert isinstance(error, _core.InvalidValueError), error
        assert "rank 2 was started with 3 ranks where rank 0 has 2 ranks" in str(error)


@pytest.mark.parametrize("host", ["127.0.1.1", "127.1", "localhost"])
def test_ranks_meet_at_any_address_of_this_machine_alone(host):
    """Debian gives a machine's own name 127.0.1.1, which `hostname -i` says: rank 0 listened at 127.0.0.1, whatever it was told."""
    ends = meeting([{"rank": rank, "host": host} for rank in range(3)], 3, meeting_s=5.0)
    assert [end for end in ends if isinstance(end, Exception)] == []
    close(ends)


def test_who_cannot_reach_another_says_so_to_all():
    """Rank 0 was told that it ended without a word, and the other that rank 0 had left."""
    hosts = ("0.0.0.0", "127.0.0.1", "127.0.1.1")       # rank 1 listens at its own alone
    port, ends = free_port(), []

    def first():
        one, = meeting([{"rank": 0, "host": hosts[0]}], 3, 5.0, port)
        try:
            if isinstance(one, Exception):      # it has not met yet
                raise one
            one.barrier()
        except _core.Error as error:
            ends.append(error)
        finally:
            close([one] if isinstance(one, _core.Comm) else [])

    thread = threading.Thread(target=first)
    thread.start()
    ends += meeting([{"rank": rank, "host": hosts[rank]} for rank in (1, 2)], 3, 5.0, port)
    thread.join()
    words = r"(rank 0 was ended because rank 2 failed first: )?rank 2 cannot connect to rank 1 \(port \d+\): Connection refused"
    assert len(ends) == 3 and all(re.fullmatch(words, str(end)) for end in ends), ends


def test_a_rank_meets_as_many_twins_as_there_are_replicas():
    """Who called it with 64 others at the same moment was sent away, and took that for a connection: the meeting failed."""
    ranks = 72
    pairs = bytes(0 in divmod(pair, ranks) for pair in range(ranks * ranks))    # with rank 0 alone: descriptors are few
    ends = meeting([{"rank": rank, "pairs": pairs} for rank in range(ranks)], ranks, meeting_s=5.0)
    assert [end for end in ends if isinstance(end, Exception)] == []
    close(ends)


def test_words_without_an_end_are_read_to_theirs():
    """What lies behind them was told with them."""
    ends, port = [], free_port()
    first = threading.Thread(target=lambda: ends.extend(meeting([{}], port=port)))
    first.start()
    with socket.socket() as other:
        while other.connect_ex(("127.0.0.1", port)) != 0:
            assert first.is_alive()
        words = [word.ljust(64, b"\0") for word in (b"a", b"v" * 64, b"p" * 64)]
        other.sendall(struct.pack("=QiiiHH64s64s64s", 0x31706374705F7074, 0, 1, 2, 9, 0, *words))
        first.join()
    assert f"rank 1 was started with version {'v' * 63} of terapipe_c where rank 0 has version 1 of" in str(ends[0])


def test_who_was_not_heard_for_long_and_calls_again_is_waited_for():
    """Rank 0 was stopped, and took a call that had been given up for the rank, which then had left before it came again."""
    port = free_port()
    code = f"""if True:
        from terapipe_c import _core
        region = _core.Region.create(2, bytes(4), 0, 64, False)
        comm = _core.tcp_comm(region, 0, "127.0.0.1", {port}, bytes(4), 64, token="a", version="1", plan="x", meeting_s=30.0)
        comm.barrier()
    """
    first = subprocess.Popen([sys.executable, "-P", "-c", code], stderr=subprocess.PIPE, text=True)
    try:
        other = socket.socket()
        while other.connect_ex(("127.0.0.1", port)) != 0:
            assert first.poll() is None
        first.send_signal(signal.SIGSTOP)
        words = [word.ljust(64, b"\0") for word in (b"a", b"1", b"x")]
        other.sendall(struct.pack("=QiiiHH64s64s64s", 0x31706374705F7074, 0, 1, 2, 9, 0, *words))
        other.close()
        first.send_signal(signal.SIGCONT)
        late, = meeting([{"rank": 1, "pairs": bytes(4)}], port=port)
        assert isinstance(late, _core.Comm), late
        late.barrier()
        late.close()
        assert first.wait(30) == 0
    finally:
        first.kill()
        first.communicate()


GATHERS = """
import sys
from terapipe_c import _core
rank, ranks, port, size = map(int, sys.argv[1:])
region = _core.Region.create(ranks, bytes(ranks ** 2), 0, 64, False)
comm = _core.tcp_comm(region, rank, "127.0.0.1", port, bytes(ranks ** 2), size, token="a", version="1", plan="x", meeting_s=30.0)
print("met", flush=True)
try:
    while word := sys.stdin.readline().strip():
        if word == "fail":
            region.abort("EMEMORY", rank, "no memory for it")
        print(len(comm.allgather(bytes(size))), flush=True)
except _core.AbortedError as error:
    print(error, flush=True)
comm.close()
"""


def is_asleep(pid):
    """Whether all of its threads are."""
    tasks = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(task.read_text().rpartition(")")[2].split()[0] == "S" for task in tasks)


class Gathering:
    """Ranks that gather 8 MB each, whose result is more than the kernel takes for one that does not read it."""

    def __init__(self, ranks):
        words = [sys.executable, "-P", "-c", GATHERS]
        port = str(free_port())
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.ranks = [subprocess.Popen([*words, str(rank), str(ranks), port, "8000000"], text=True, **pipes)
                      for rank in range(ranks)]  # fmt: skip

    def __enter__(self):
        assert [self.says(rank) for rank in range(len(self.ranks))] == ["met"] * len(self.ranks)
        return self

    def __exit__(self, *_):
        for one in self.ranks:
            one.kill()
            one.communicate()

    def tell(self, rank, word="gather"):
        self.ranks[rank].stdin.write(f"{word}\n")
        self.ranks[rank].stdin.flush()

    def says(self, rank):
        return self.ranks[rank].stdout.readline().rstrip()

    def stop_after_giving(self, rank):
        """It is stopped with what the others gather before it has read any of it."""
        self.tell(rank)
        for _ in range(10):         # until it and rank 0 sleep whenever they are looked at: who has something to do does not
            while not all(map(is_asleep, (self.ranks[0].pid, self.ranks[rank].pid))):
                time.sleep(0.01)
            time.sleep(0.03)
        self.ranks[rank].send_signal(signal.SIGSTOP)

    def go_on(self, rank):
        self.ranks[rank].send_signal(signal.SIGCONT)

    def end(self):
        return [one.communicate(timeout=60) for one in self.ranks]


def test_who_is_stopped_before_it_has_read_all_that_was_gathered_is_waited_for():
    """What the kernel's buffers did not take was to be read within a second; rank 0 ends meanwhile."""
    with Gathering(2) as both:
        both.stop_after_giving(1)
        both.tell(0)
        assert both.says(0) == "16000000"
        both.ranks[0].stdin.close()         # it closes the communicator
        both.ranks[0].stdin = None
        time.sleep(2.0)
        both.go_on(1)
        assert both.says(1) == "16000000"
        assert both.end() == [("", "")] * 2


def test_who_is_stopped_before_it_has_read_all_that_was_gathered_keeps_nothing_from_others():
    """Rank 0 wrote to one after the other: the rest had the result, and every other word, up to five seconds later, and then the
    one that was stopped was said to be gone."""
    with Gathering(4) as all:
        all.stop_after_giving(1)
        for rank in (3, 2, 0):
            all.tell(rank)
        assert [all.says(rank) for rank in (2, 3, 0)] == ["32000000"] * 3      # while rank 1 is stopped
        time.sleep(6.0)
        all.go_on(1)
        assert all.says(1) == "32000000"
        for rank in range(4):
            all.tell(rank)
        assert [all.says(rank) for rank in range(4)] == ["32000000"] * 4
        assert all.end() == [("", "")] * 4


def test_the_first_failure_comes_to_all_while_one_is_stopped():
    with Gathering(4) as all:
        all.stop_after_giving(1)
        for rank in (3, 2, 0):
            all.tell(rank)
        assert [all.says(rank) for rank in (2, 3, 0)] == ["32000000"] * 3
        all.tell(3)
        all.tell(2, "fail")
        words = "was ended because rank 2 failed first: no memory for it"
        assert [all.says(rank) for rank in (2, 3)] == [f"rank {rank} {words}" for rank in (2, 3)]
        all.tell(0)
        assert all.says(0) == f"rank 0 {words}"
        all.go_on(1)
        assert all.says(1) == "32000000"
        all.tell(1)
        assert all.says(1) == f"rank 1 {words}"
        assert all.end() == [("", "")] * 4


FORKS = """
import os, signal, sys
from terapipe_c import _core

what, rank, port = sys.argv[1], *map(int, sys.argv[2:])
region = _core.Region.create(3, bytes(9), 0, 64, False)
comm = _core.tcp_comm(region, rank, "127.0.0.1", port, bytes([0, 0, 0, 0, 0, 1, 0, 1, 0]), 64, timeout_s=60.0)
comm.barrier()
if rank == 2:
    told, tell = os.pipe()
    if not os.fork():
        if what == "killed":        # a worker of some data loader: it waits for its parent, which is no more
            os.close(tell)
            os.read(told, 1)
            signal.pause()
        for call in (lambda: comm.send(1, 0, b""), comm.barrier):
            try:
                call()
            except _core.InvalidValueError as error:
                print(str(error).replace(str(os.getppid()), "A").replace(str(os.getpid()), "B"))
        comm.close()
        sys.exit(0)                 # as a Python that was forked may end, with all that it has inherited
    if what == "killed":
        print(os.getpid(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    os.wait()
    comm.send(1, 1, b"well")
try:
    if rank == 1:
        comm.recv(2, 1, into := bytearray(4))
    comm.barrier()
    comm.close()
    print("good", flush=True)
except _core.AbortedError as error:
    print(error, flush=True)
"""


def forking(what):
    port = str(free_port())
    return [subprocess.Popen([sys.executable, "-P", "-c", FORKS, what, str(rank), port], stdout=subprocess.PIPE, text=True,
                             start_new_session=True) for rank in range(3)]  # fmt: skip


def test_a_rank_that_is_killed_is_missed_though_a_fork_of_it_lives():
    """The fork had its connections, too: nobody knew before the time limit."""
    ranks = forking("killed")
    try:
        words = "failed first: rank 2 ended without a word (its connection closed) before its first instruction\n"
        for rank in range(2):
            assert ranks[rank].communicate(timeout=30)[0] == f"rank {rank} was ended because rank 2 {words}"
    finally:
        os.killpg(ranks[2].pid, signal.SIGKILL)
        ranks[2].communicate()


def test_a_fork_that_ends_says_no_goodbye_for_the_rank():
    """It closed the communicator that it had inherited, and the others heard that the rank had left."""
    ranks = forking("ends")
    said = [one.communicate(timeout=60)[0] for one in ranks]
    refused = "the communicator is of process A and this is a fork of it, B: one of its own would be right\n"
    assert said == ["good\n", "good\n", 2 * refused + "good\n"]


# Two ranks of a process of its own, as threads that end: `comms`.
MET = """if True:
        import os, sys, threading
        from terapipe_c import _core
        port, comms = int(sys.argv[1]), [None] * 2

        def meet(rank):
            region = _core.Region.create(2, bytes(4), 0, 64, False)
            comms[rank] = _core.tcp_comm(region, rank, "127.0.0.1", port, bytes([0, 1, 1, 0]), 64, timeout_s=20.0)

        threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
"""


def test_what_a_fork_opens_in_the_place_of_connections_is_its_forks_too():
    """Forks of a fork lost the connections again: by then there were files of its own at those numbers."""
    code = MET + """if True:
        if not os.fork():
            os.closerange(3, 256)           # as what becomes a daemon does
            files = [os.open(os.devnull, os.O_WRONLY) for _ in range(32)]
            if not os.fork():
                os._exit([os.write(file, b"word") for file in files] != [4] * 32)
            os._exit(os.wait()[1] != 0)
        os._exit(os.wait()[1] != 0)
    """
    words = [sys.executable, "-P", "-W", "ignore::DeprecationWarning", "-c", code, str(free_port())]
    assert subprocess.run(words, check=False, timeout=60).returncode == 0


def test_a_fork_loses_its_connections_where_no_descriptor_is_left():
    """It kept them all, having none for what it puts in their place: while it lived, the others missed nobody."""
    code = MET + """if True:
        import resource
        from pathlib import Path

        def connections():
            mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in range(3, 64) if os.path.exists(f"/proc/self/fd/{fd}")}
            rows = [row.split() for row in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
            return sum(f"socket:[{row[9]}]" in mine for row in rows)

        assert connections() == 4
        os.closerange(64, 256)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        files = []
        try:
            while True:
                files.append(os.open(os.devnull, os.O_WRONLY))
        except OSError:
            pass
        if not os.fork():
            os.close(files.pop())       # to look
            os._exit(connections())
        os.close(files.pop())
        assert os.wait()[1] == 0 and connections() == 4
        os._exit(0)
    """
    words = [sys.executable, "-P", "-W", "ignore::DeprecationWarning", "-c", code, str(free_port())]
    assert subprocess.run(words, check=False, timeout=60).returncode == 0


def test_who_waits_for_the_rest_of_what_was_given_up_is_told():
    """It waited to its own limit, were that none, for ever."""
    port, comms = free_port(), [None] * 2

    def meet(rank):
        region = _core.Region.create(2, bytes(4), 0, 64, False)
        comms[rank] = _core.tcp_comm(region, rank, "127.0.0.1", port, bytes([0, 1, 1, 0]), 64,
                                     timeout_s=(0.3, 0.0)[rank])

    def together(*works):
        threads = [threading.Thread(target=work, args=(rank,)) for rank, work in enumerate(works)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    together(meet, meet)
    with pytest.raises(_core.DeadlineError, match="of 50000000 bytes moved"):
        comms[0].send(1, 7, bytes(50_000_000))
    with pytest.raises(_core.AbortedError, match="rank 0 closed its connection to rank 1 without a word"):
        comms[1].recv(0, 7, bytearray(50_000_000))
    together(*[lambda rank: comms[rank].close()] * 2)


def test_who_has_no_descriptor_for_a_rank_says_so():
    """It said that ranks did not come, after it had looked for them without a pause until it gave up."""
    port = free_port()
    code = f"""if True:
        import resource
        from terapipe_c import _core
        resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
        region = _core.Region.create(40, bytes(1600), 0, 64, False)
        _core.tcp_comm(region, 0, "127.0.0.1", {port}, bytes(1600), 64, token="a", version="1", plan="x", meeting_s=20.0)
    """
    first = subprocess.Popen([sys.executable, "-P", "-c", code], stderr=subprocess.PIPE, text=True)
    ends = meeting([{"rank": rank} for rank in range(1, 40)], 40, port=port, meeting_s=5.0)
    words = "rank 0 cannot take one more connection (Too many open files): more open files (ulimit -n) would be right"
    assert first.communicate(timeout=60)[1].rstrip().endswith(words)
    assert sum(str(end) == words for end in ends) > 15


@pytest.mark.parametrize(("name", "values"), [("seed", [1, 2]), ("val_fraction", [0.1, 0.2])])
def test_what_makes_another_first_batch_is_named_and_not_the_data(plans, name, values):  # noqa: F811
    """It was called another content of the data, whose file was looked at in vain."""
    _, files, data = plans
    port = free_port()
    children = [begin(files[2], data, rank, mpich(rank, 2, port), **{name: values[rank]}) for rank in range(2)]
    for child, value in zip(children, values, strict=True):
        assert f'"{name} of rank 1 is not that of rank 0 (here it is {value})' in child.communicate(timeout=60)[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_ends_the_wait_for_who_has_not_come(plans, rank):  # noqa: F811
    """As soon as all other waits: it took until the others were given up."""
    _, files, data = plans
    port = free_port()
    with socket.socket() as other:
        if rank == 1:
            other.bind(("127.0.0.1", port))
            other.listen()
        child = begin(files[3], data, rank, mpich(rank, 3, port), meeting_s=1000)
        try:
            while rank == 0 and other.connect_ex(("127.0.0.1", port)) != 0:
                assert child.poll() is None
            if rank == 1:
                other.accept()[0].close()
            child.send_signal(signal.SIGINT)
            _, err = child.communicate(timeout=50)
            assert err.rstrip().endswith("KeyboardInterrupt") and f"rank {rank} was interrupted before its first" in err, err
        finally:
            child.kill()
            child.communicate()


def test_the_abort_of_a_region_ends_its_meeting():
    region, port = _core.Region.create(2, bytes(4), 0, 64, False), free_port()
    timer = threading.Timer(0.3, lambda: region.abort("EABORTED", 1, "nobody wants to meet"))
    timer.start()
    with pytest.raises(_core.AbortedError, match="nobody wants to meet"):
        _core.tcp_comm(region, 1, "127.0.0.1", port, neighbours(2), 64, meeting_s=1000.0)
    timer.join()


def test_a_time_of_silence_is_checked():
    with pytest.raises(ValueError, match="silent_s is 0.0: seconds above 0"):
        _core.tcp_comm(_core.Region.create(2, bytes(4), 0, 64, False), 1, "127.0.0.1", 29500, neighbours(2), 64, silent_s=0.0)
