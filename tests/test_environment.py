"""Which rank of how many a process is, as launchers' variables say."""
import pytest
from test_train import mpich, openmpi, slurm, torchrun

from terapipe_c import _core
from terapipe_c.environment import PORTS, find_place, first_host

HERE_TWO = torchrun(0, 2, 29_500)


def test_places():
    as_text = {name: str(value) for name, value in torchrun(1, 4, 29_500).items()}
    place = find_place(as_text)
    assert (place.launcher, place.rank, place.ranks, place.local_rank, place.host) == ("torchrun", 1, 4, 1, "127.0.0.1")
    assert (place.port, place.ports) == (29_501, PORTS)  # the agent's own store is at 29500
    place = find_place({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "77",
                        "SLURM_JOB_NODELIST": "gpu[07-09,12],big3"})
    assert (place.launcher, place.rank, place.local_rank, place.host, place.ports) == ("srun", 5, 1, "gpu07", PORTS)
    both = {**{name: str(value) for name, value in openmpi(0, 2, 1).items()}, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    assert find_place(both).launcher == "mpirun" and find_place({**both, "SLURM_JOB_NODELIST": "a", "SLURM_JOB_ID": "1"},
                                                                "srun").ranks == 1
    assert find_place({**both, "TERAPIPE_TOKEN": "x"}).token != find_place(both).token
    slurms = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0",
              "SLURM_STEP_NODELIST": "n[1-2]", "PMI_FD": "9", "PMI_JOBID": "7.0", "PMI_RANK": "1", "PMI_SIZE": "2"}
    place = find_place(slurms)      # srun --mpi=pmi2
    assert (place.launcher, place.rank, place.ranks, place.host) == ("srun", 1, 2, "n1")
    hydra = {**slurms, "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    assert find_place(hydra).launcher == find_place({**hydra, "PMI_RANK": "0"}).launcher == "mpiexec"
    for nodes, first in (("a", "a"), ("a,b", "a"), ("n[3,5-7]", "n3"), ("n[001-100]-ib,m", "n001-ib"), ("n-1-[2-3]", "n-1-2")):
        assert first_host(nodes) == first


@pytest.mark.parametrize(("environment", "words"), [
    ({}, "no launcher started this process: looked for RANK and WORLD_SIZE .* SLURM_PROCID and SLURM_NTASKS"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "where rank 0 is cannot be told: looked for MASTER_ADDR"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "MASTER_PORT is not set"),
    ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x': a whole number"), ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2"),
    ({"PMI_RANK": "0", "PMI_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "0"}, "MASTER_PORT is 0"),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "looked for MASTER_ADDR, SLURM_STEP_NODELIST"),
    ({**HERE_TWO, "LOCAL_RANK": "2"}, "LOCAL_RANK is 2 and LOCAL_WORLD_SIZE 2: a rank from 0 to one less than all of this machine"),
    ({**HERE_TWO, "LOCAL_RANK": "-1"}, "LOCAL_RANK is -1 and LOCAL_WORLD_SIZE 2: a rank from 0"),
    ({**HERE_TWO, "LOCAL_RANK": "zero"}, "LOCAL_RANK is 'zero': a whole number would be right"),
    ({**HERE_TWO, "LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE is 3 and WORLD_SIZE 2: 1 to as many as all would be right"),
    ({**HERE_TWO, "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE is 0"), ({**HERE_TWO, "LOCAL_WORLD_SIZE": "1.5"}, "SIZE is '1.5'"),
    ({**HERE_TWO, "WORLD_SIZE": "0"}, "RANK is 0 and WORLD_SIZE 0"), ({**HERE_TWO, "WORLD_SIZE": "-2"}, "WORLD_SIZE -2"),
    ({**HERE_TWO, "WORLD_SIZE": ""}, "WORLD_SIZE is '': a whole"), ({**HERE_TWO, "RANK": "-1"}, "RANK is -1 and WORLD_SIZE 2"),
    ({**HERE_TWO, "RANK": "0_1"}, "RANK is '0_1': a whole"), ({**HERE_TWO, "RANK": "9" * 5000}, r"^RANK is '9{70,}\.\.\.: a whole"),
    ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2"}, "LOCAL_RANK is 2 and WORLD_SIZE 2: a rank from 0 to one less than all"),
    (openmpi(0, 2, 1) | {"OMPI_COMM_WORLD_LOCAL_RANK": 2}, "OMPI_COMM_WORLD_LOCAL_RANK is 2 and OMPI_COMM_WORLD_LOCAL_SIZE 2"),
    (openmpi(0, 2, 1) | {"OMPI_COMM_WORLD_LOCAL_RANK": "a"}, "OMPI_COMM_WORLD_LOCAL_RANK is 'a': a whole"),
    (openmpi(0, 2, 1) | {"OMPI_COMM_WORLD_LOCAL_SIZE": "many"}, "OMPI_COMM_WORLD_LOCAL_SIZE is 'many': a whole"),
    (mpich(0, 2, 1) | {"MPI_LOCALRANKID": 1, "MPI_LOCALNRANKS": 1}, "MPI_LOCALRANKID is 1 and MPI_LOCALNRANKS 1"),
    (slurm(0, 2, 1) | {"SLURM_LOCALID": 2}, "SLURM_LOCALID is 2 and SLURM_NTASKS 2"),
    (slurm(0, 2, 1) | {"SLURM_LOCALID": "-1"}, "SLURM_LOCALID is -1"), (slurm(0, 2, 1) | {"SLURM_LOCALID": "x"}, "LOCALID is 'x'"),
    (slurm(0, 2, 1) | {"SLURM_NTASKS_PER_NODE": "0"}, "SLURM_NTASKS_PER_NODE is 0 and SLURM_NTASKS 2: at least 1 would be right"),
])
def test_what_is_missing_is_said(environment, words):
    with pytest.raises(_core.InvalidValueError, match=words):
        find_place({name: str(value) for name, value in environment.items()})


def test_srun_gives_a_node_more_tasks_than_it_was_asked_for():
    """sbatch's --ntasks-per-node is the most for srun -n, and no limit for an srun that asks for itself."""
    place = find_place({name: str(value) for name, value in slurm(3, 4, 1).items()} | {"SLURM_NTASKS_PER_NODE": "2"})
    assert (place.local_rank, place.local_ranks) == (3, 1)
    assert find_place({name: str(value) for name, value in slurm(1, 2, 1).items()} | {"SLURM_NTASKS_PER_NODE": "8"}).local_rank == 1
