#include "cuda/comm.h"

#include <stdlib.h>

#include "csrc/comm/region.h"
#include "cuda/rank.h"

tp_status
tp_cuda_comm_open(size_t bytes, const tp_comm_ops *ops, tp_comm *control, tp_region *region, size_t message_bytes,
                  tp_cuda_comm **out)
{
    size_t ranks = (size_t)control->ranks;
    tp_cuda_comm *c = calloc(1, bytes);
    tp_cuda_receives *from = calloc(ranks, sizeof *from);
    *out = NULL;
    if (c == NULL || from == NULL) {
        free(c);
        free(from);
        return tp_fail(TP_EMEMORY, "no memory for a communicator of %zu ranks", ranks);
    }
    c->comm = (tp_comm){ops, control->rank, control->ranks, control->timeout_ns, 0, 0};
    c->control = control;
    c->region = region;
    c->message_bytes = message_bytes > 0 ? message_bytes : 1;
    c->from = from;
    *out = c;
    return TP_OK;
}

void
tp_cuda_comm_close(tp_cuda_comm *c)
{
    free(c->from);
    free(c);
}

tp_status
tp_cuda_comm_bind(tp_cuda_comm *c, void *device, void (*release)(tp_cuda_comm *))
{
    if (device == NULL) {
        if (c->device != NULL)
            release(c);
        c->device = NULL;
        return TP_OK;
    }
    const tp_cuda_rank *rank = tp_cuda_rank_of(device);
    c->device = rank->cuda;
    c->compute = rank->stream;
    return TP_OK;
}

tp_status
tp_cuda_comm_ready(const tp_cuda_comm *c, int peer)
{
    TP_TRY(tp_comm_check_peer(&c->comm, peer));
    if (c->device == NULL)
        return tp_fail(TP_EVALUE, "this communicator has no device yet");
    return tp_comm_check_abort(&c->comm, c->region);
}

tp_status
tp_cuda_comm_post(tp_cuda_comm *c, int peer, void *data, size_t bytes, tp_cuda_receive **out)
{
    tp_cuda_receives *queue = &c->from[peer];
    TP_TRY(tp_comm_check_room(&c->comm, peer, queue->count));
    *out = &queue->items[(queue->first + queue->count) % TP_COMM_POSTED];
    **out = (tp_cuda_receive){.data = data, .bytes = bytes};
    queue->count++;
    return TP_OK;
}

tp_status
tp_cuda_comm_take(tp_cuda_comm *c, int peer, tp_cuda_receive **out)
{
    TP_TRY(tp_comm_check_posted(&c->comm, peer, peer < 0 || peer >= c->comm.ranks ? 0 : c->from[peer].count));
    tp_cuda_receives *queue = &c->from[peer];
    *out = &queue->items[queue->first];
    queue->first = (queue->first + 1) % TP_COMM_POSTED;
    queue->count--;
    return TP_OK;
}

tp_status
tp_cuda_comm_allgather(tp_comm *comm, const void *mine, size_t bytes, void *all)
{
    tp_comm *control = ((tp_cuda_comm *)comm)->control;
    return control->ops->allgather(control, mine, bytes, all);
}
