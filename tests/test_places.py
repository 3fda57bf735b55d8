"""What find_place makes of a launcher's environment where that does not say all; what it says, tests/test_train.py has."""
import re

import pytest

from terapipe_c import _core
from terapipe_c.device_comm import kind_of
from terapipe_c.environment import PORTS, find_place
from terapipe_c.train import _transport


def test_what_a_launcher_leaves_open_is_found():
    job = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
           "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "job.1"}
    places = [find_place({**job, "OMPI_COMM_WORLD_RANK": rank}) for rank in "03"]
    assert [(place.rank, place.host, place.local_ranks) for place in places] == [(0, "127.0.0.1", 4), (3, "127.0.0.1", 4)]
    first, last = places
    assert (first.port, first.ports, first.token) == (last.port, PORTS, last.token) and len(first.token) == 40
    others = [find_place({**job, "PMIX_NAMESPACE": f"job.{n}"}) for n in range(2, 400)]
    assert all(20_000 <= place.port <= 20_000 + 999 * PORTS and place.port % PORTS == 0 for place in others)
    assert len({place.port for place in others}) > 250 and first.token not in {place.token for place in others}
    first_here = {**job, "MASTER_ADDR": "h", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    for said, local_ranks in (("1", 1), ("3", 3), ("4", 4), ("", 1)):
        assert find_place({**first_here, "OMPI_COMM_WORLD_LOCAL_SIZE": said}).local_ranks == local_ranks, said
    for said in ("5", "0", "-1", "2(x3)"):     # which no launcher sets
        with pytest.raises(ValueError, match=f"OMPI_COMM_WORLD_LOCAL_SIZE is '?{re.escape(said)}'?"):
            find_place({**first_here, "OMPI_COMM_WORLD_LOCAL_SIZE": said})
    assert find_place({**job, "MASTER_ADDR": ""}).host == "127.0.0.1" and find_place({**job, "MASTER_ADDR": "h"}).host == "h"
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "4", "SLURM_JOB_ID": "7"}
    assert (find_place(slurm).host, find_place(slurm).local_rank, find_place(slurm).local_ranks) == ("127.0.0.1", 0, 1)
    torch = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "65519"}
    for store, port, ports in (("True", 65_520, PORTS), ("False", 65_519, 1)):
        place = find_place({**torch, "TORCHELASTIC_USE_AGENT_STORE": store})
        assert (place.port, place.ports) == (port, ports)
    assert find_place({**torch, "MASTER_PORT": "1"}).port == 1
    for port in ("0", "65520"):
        with pytest.raises(_core.InvalidValueError, match=f"MASTER_PORT is {port}: 1 to 65519 would be right"):
            find_place({**torch, "MASTER_PORT": port})


def test_whose_numbers_of_pmi_are():
    """srun's only with its PMI_JOBID and its own numbers: an mpiexec within a job of Slurm's has others, or no PMI_JOBID."""
    both = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "PMI_RANK": "0", "PMI_SIZE": "2", "PMI_JOBID": "7.0", "MASTER_ADDR": "h",
            "MASTER_PORT": "29500"}
    assert find_place(both).launcher == "srun"
    for change in ({"PMI_RANK": "1"}, {"PMI_SIZE": "4"}, {"MPI_LOCALRANKID": "0"}):
        assert find_place({**both, **change}).launcher == "mpiexec", change
    assert find_place({name: value for name, value in both.items() if name != "PMI_JOBID"}).launcher == "mpiexec"
    for stray in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"):       # one of two is no launcher's
        assert find_place({**both, stray: "0"}).launcher == "srun"
    with pytest.raises(_core.InvalidValueError, match=r"RANK is not set: torchrun sets it \(torchrun --nproc-per-node 2"):
        find_place(both, "torchrun")


def test_a_variable_that_is_empty_is_as_one_that_is_not_set(monkeypatch):
    """As a job's script hands on what nobody has set: of TERAPIPE_COMM, and MASTER_PORT, that was refused."""
    job = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "PMIX_NAMESPACE": "job.1"}
    assert find_place({**job, "MASTER_PORT": "", "MASTER_ADDR": ""}) == find_place(job)
    monkeypatch.setenv("TERAPIPE_COMM", "")
    assert [_transport(None, backend) for backend in ("cpu", "cuda")] == ["tcp", "tcp"]
    assert kind_of({"backend": "cpu", "ranks": 2}) == "host"
    with pytest.raises(_core.InvalidValueError, match="comm is '': tcp or mpi would be right"):     # which somebody wrote
        _transport("", "cpu")
