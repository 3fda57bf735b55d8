/* Compiled with the flags of this instruction set (setup.py): AVX-512, and products by AMX. */
#define TP_ISA amx
#define TP_AMX 1
#include "csrc/cpu/isa_body.h"
