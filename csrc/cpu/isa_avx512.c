/* Compiled with the flags of this instruction set (setup.py); the others are chosen where it is missing. */
#define TP_ISA avx512
#include "csrc/cpu/isa_body.h"
