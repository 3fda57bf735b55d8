/* The capsules between _core and a module that makes communicators of device memory (cuda/module_comm.c): in goes a host
 * communicator, out comes one of device memory. */
#ifndef TP_COMM_LINK_H
#define TP_COMM_LINK_H

#include "csrc/comm/comm.h"

#define TP_LINK_CAPSULE "terapipe_c.link" /* of a tp_link *: a communicator on host memory and its region */
#define TP_COMM_CAPSULE "terapipe_c.comm" /* of a tp_comm *, to be closed by whoever takes it out */

typedef struct {
    uint32_t abi; /* TP_COMM_ABI */
    tp_comm *comm;
    tp_region *region;
} tp_link;

#endif
