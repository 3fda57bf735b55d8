# Messages over MPI, where the module was built. terapipe_c/mpi.py is its face; csrc/comm/mpi.h says what is in the capsule.
from typing_extensions import CapsuleType

transport: CapsuleType
