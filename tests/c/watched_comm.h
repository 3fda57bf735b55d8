/* A communicator that forwards to another, and holds what is lent by it to its promise: it stays as it is until it is back, and no
 * memory is lent anew before that. Whoever writes too early is found at once, whether or not the reader was late. */
#ifndef TP_TESTS_WATCHED_COMM_H
#define TP_TESTS_WATCHED_COMM_H

#include "csrc/comm/comm.h"

#include <stdlib.h>
#include <string.h>

#include "tests/c/check.h"

typedef struct watched_loan watched_loan;
struct watched_loan {
    watched_loan *next;
    int peer;
    uint64_t loan;
    const unsigned char *data;
    unsigned char *copy;
    size_t bytes;
};

typedef struct {
    tp_comm base;
    tp_comm *inner;
    watched_loan *out; /* what is not known to be back */
    int64_t lent;
    int withdrawn;
    unsigned slices; /* bit s: of such messages of slice s some were asked back */
} watched_comm;

/* Of this peer, up to this loan; peer -1: of all. */
static void
watched_back(watched_comm *w, int peer, uint64_t loan)
{
    for (watched_loan **at = &w->out, *one; (one = *at) != NULL;) {
        if (peer >= 0 && (one->peer != peer || one->loan > loan)) {
            at = &one->next;
            continue;
        }
        MUST(memcmp(one->copy, one->data, one->bytes) == 0); /* it was as it had been when it was lent */
        *at = one->next;
        free(one->copy);
        free(one);
    }
}

static tp_status
watched_lend(tp_comm *comm, int peer, uint64_t tag, const void *data, size_t bytes, uint64_t *loan)
{
    watched_comm *w = (watched_comm *)comm;
    const unsigned char *begin = data;
    for (const watched_loan *one = w->out; one != NULL; one = one->next)
        MUST(begin + bytes <= one->data || one->data + one->bytes <= begin);
    TP_TRY(w->inner->ops->lend(w->inner, peer, tag, data, bytes, loan));
    if (*loan == 0)
        return TP_OK;
    watched_loan *one = calloc(1, sizeof *one);
    MUST(one != NULL);
    *one = (watched_loan){w->out, peer, *loan, data, malloc(bytes), bytes};
    MUST(one->copy != NULL);
    memcpy(one->copy, data, bytes);
    w->out = one;
    w->lent++;
    return TP_OK;
}

static tp_status
watched_reclaim(tp_comm *comm, int peer, uint64_t loan, uint64_t tag, size_t bytes)
{
    watched_comm *w = (watched_comm *)comm;
    TP_TRY(w->inner->ops->reclaim(w->inner, peer, loan, tag, bytes));
    watched_back(w, peer, loan);
    w->slices |= 1u << (tag & 31); /* tp_tag's last part */
    return TP_OK;
}

/* Whoever comes to it has read what it was sent. */
static tp_status
watched_allgather(tp_comm *comm, const void *mine, size_t bytes, void *all)
{
    watched_comm *w = (watched_comm *)comm;
    TP_TRY(w->inner->ops->allgather(w->inner, mine, bytes, all));
    watched_back(w, -1, 0);
    return TP_OK;
}

static tp_status
watched_send(tp_comm *comm, int peer, uint64_t tag, const void *data, size_t bytes)
{
    tp_comm *inner = ((watched_comm *)comm)->inner;
    return inner->ops->send(inner, peer, tag, data, bytes);
}

static tp_status
watched_recv_post(tp_comm *comm, int peer, uint64_t tag, void *data, size_t bytes)
{
    tp_comm *inner = ((watched_comm *)comm)->inner;
    return inner->ops->recv_post(inner, peer, tag, data, bytes);
}

static tp_status
watched_recv_wait(tp_comm *comm, int peer)
{
    tp_comm *inner = ((watched_comm *)comm)->inner;
    return inner->ops->recv_wait(inner, peer);
}

static tp_status
watched_exchange(tp_comm *comm, int peer, uint64_t tag, const void *out, size_t out_bytes, void *in, size_t in_bytes)
{
    tp_comm *inner = ((watched_comm *)comm)->inner;
    return inner->ops->exchange(inner, peer, tag, out, out_bytes, in, in_bytes);
}

static tp_status
watched_reserve(tp_comm *comm, int peer, unsigned posted)
{
    tp_comm *inner = ((watched_comm *)comm)->inner;
    return inner->ops->reserve(inner, peer, posted);
}

static void *
watched_arena(tp_comm *comm, size_t *bytes)
{
    tp_comm *inner = ((watched_comm *)comm)->inner;
    return inner->ops->arena(inner, bytes);
}

/* The inner one goes with it; what a failed run has lent is forgotten. */
static void
watched_close(tp_comm *comm)
{
    watched_comm *w = (watched_comm *)comm;
    for (watched_loan *one; (one = w->out) != NULL;) {
        w->out = one->next;
        free(one->copy);
        free(one);
    }
    w->inner->ops->close(w->inner);
    free(w);
}

static tp_status
watched_progress(tp_comm *comm)
{
    watched_comm *w = (watched_comm *)comm;
    return w->inner->ops->progress == NULL ? TP_OK : w->inner->ops->progress(w->inner);
}

static void
watched_withdraw(tp_comm *comm)
{
    ((watched_comm *)comm)->withdrawn++;
}

static watched_comm *
watch(tp_comm *inner)
{
    static const tp_comm_ops ops = {.abi = TP_COMM_ABI,
                                    .name = "watched",
                                    .send = watched_send,
                                    .recv_post = watched_recv_post,
                                    .recv_wait = watched_recv_wait,
                                    .exchange = watched_exchange,
                                    .allgather = watched_allgather,
                                    .close = watched_close,
                                    .reserve = watched_reserve,
                                    .arena = watched_arena,
                                    .lend = watched_lend,
                                    .reclaim = watched_reclaim,
                                    .progress = watched_progress,
                                    .withdraw = watched_withdraw};
    watched_comm *w = calloc(1, sizeof *w);
    MUST(w != NULL);
    w->base = *inner;
    w->base.ops = &ops;
    w->inner = inner;
    return w;
}

#endif
