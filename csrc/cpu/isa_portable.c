#define TP_ISA portable
#include "csrc/cpu/isa_body.h"
