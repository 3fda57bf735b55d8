/* Polling NCCL's non-blocking calls to their end, and the watch thread over the messages they started. */
#include "cuda/nccl_inside.h"

#include <stdio.h>
#include <time.h>

#include "csrc/base/clock.h"
#include "csrc/comm/region.h"

#define TICK_NS     50000000ll
#define PATIENCE_NS 60000000000ll /* limit for making and ending communicators where there is no deadline */
#define WORD_NS     1000000000ll  /* for the word on why NCCL failed */

/* All aborts are in one group, so that every communicator is told before any is taken apart: that may wait for the device, and so
 * for the kernels of the others (NCCL issue 1013; groups since 2.22). */
void
tp_nccl_abort(nccl_comm *c)
{
    if (c->aborted)
        return;
    c->aborted = 1;
    (void)c->nccl->group_start();
    for (int i = 0; i < c->channels; i++)
        if (c->channel[i].comm != NULL)
            c->nccl->abort(c->channel[i].comm);
    if (c->twins.comm != NULL)
        c->nccl->abort(c->twins.comm);
    if (c->alone != NULL)
        c->nccl->abort(c->alone);
    if (c->world != NULL)
        c->nccl->abort(c->world);
    (void)c->nccl->group_end();
    for (int i = 0; i < c->channels; i++)
        c->channel[i].comm = NULL;
    c->twins.comm = c->alone = c->world = NULL;
}

/* After this rank's error. The others hear of it first, unless all leave anyway: an abort may end only when those of the machine's
 * other ranks have begun (NCCL's proxy.cc, ncclProxyService; issue 863), or hang. */
static void
abort_now(nccl_comm *c, tp_status status)
{
    if (!c->ending)
        tp_region_abort(c->base.region, status, c->base.comm.rank, tp_error_message());
    pthread_mutex_lock(&c->lock);
    tp_nccl_abort(c);
    pthread_mutex_unlock(&c->lock);
}

/* Words for errors of a call with a peer: " with rank 3", and "; rank 3 is at step 2 while running optimizer update on stage 1"; ""
 * where there is no one peer. */
typedef struct {
    char whom[32], doing[TP_HELD_TEXT];
} with_text;

static with_text
with(const nccl_comm *c, int peer)
{
    with_text text = {"", ""};
    if (peer == NCCL_EVERYBODY)
        return text;
    snprintf(text.whom, sizeof text.whom, " with rank %d", peer);
    tp_comm_say_who_holds_up(&c->base.comm, c->base.region, peer, text.doing);
    return text;
}

/* May it be that a rank was lost? NCCL may see that before the word on which and why has come, and names nobody itself. Who calls it
 * wrongly is to blame alone. */
static int
may_be_lost(int result)
{
    return result != NC_INVALID_ARGUMENT && result != NC_INVALID_USAGE;
}

static tp_status
hear(const nccl_comm *c)
{
    int64_t until = tp_clock_ns() + WORD_NS;
    while (tp_clock_ns() < until) {
        TP_TRY(tp_comm_check_abort(&c->base.comm, c->base.region));
        tp_clock_sleep_until(tp_clock_ns() + 1000000);
    }
    return TP_OK;
}

tp_status
tp_nccl_fail(nccl_comm *c, int result, nc_comm comm, int peer, const char *what)
{
    if (may_be_lost(result))
        TP_TRY(hear(c));
    pthread_mutex_lock(&c->lock); /* or the watch may abort it meanwhile */
    const char *more = comm != NULL && !c->aborted ? c->nccl->last_error(comm) : "";
    pthread_mutex_unlock(&c->lock);
    tp_status status = result == NC_REMOTE_ERROR ? TP_ECONNECTION : TP_ERUNTIME;
    with_text other = with(c, peer);
    tp_fail(status, "rank %d: NCCL's %s%s: %s%s%s%s", c->base.comm.rank, what, other.whom, c->nccl->error_string(result),
            more != NULL && *more ? ": " : "", more != NULL ? more : "", other.doing);
    abort_now(c, status);
    return status;
}

static tp_status
time_out(nccl_comm *c, int64_t patience_ns, const char *what, int peer)
{
    with_text other = with(c, peer);
    tp_fail(TP_ETIMEOUT, "rank %d waited %.3g s for NCCL's %s%s%s", c->base.comm.rank, (double)patience_ns * 1e-9, what, other.whom,
            other.doing);
    abort_now(c, TP_ETIMEOUT);
    return TP_ETIMEOUT;
}

/* Until the next look at what has been waited for so long: later by a sixteenth, or what a step's calls are polled by. Cores that
 * ranks share are left to NCCL's threads, which poll too. */
static int64_t
pause_ns(int64_t waited_ns)
{
    int64_t pause = waited_ns / 16;
    return pause < NCCL_POLL_NS ? NCCL_POLL_NS : pause > NCCL_IDLE_NS ? NCCL_IDLE_NS : pause;
}

static int64_t
limit_ns(const nccl_comm *c)
{
    return c->base.comm.timeout_ns > 0 ? c->base.comm.timeout_ns : PATIENCE_NS;
}

tp_status
tp_nccl_await_event(nccl_comm *c, tp_cuda_event event, const char *what)
{
    int64_t since = tp_clock_ns(), now = since;
    int done = 0;
    for (;;) {
        TP_TRY(tp_comm_check_abort(&c->base.comm, c->base.region));
        TP_TRY(tp_cuda_event_query(c->base.device, event, &done));
        if (done)
            return TP_OK;
        if ((now = tp_clock_ns()) - since > limit_ns(c))
            return time_out(c, limit_ns(c), what, NCCL_EVERYBODY);
        tp_clock_sleep_until(now + pause_ns(now - since));
    }
}

tp_status
tp_nccl_finish(nccl_comm *c, int result, nc_comm comm, int peer, const char *what)
{
    int64_t patience = limit_ns(c), since = tp_clock_ns();
    while (result == NC_SUCCESS || result == NC_IN_PROGRESS) {
        int state = NC_SUCCESS;
        TP_TRY(tp_comm_check_abort(&c->base.comm, c->base.region));
        pthread_mutex_lock(&c->lock);
        int asked = c->aborted ? NC_INVALID_USAGE : c->nccl->get_async_error(comm, &state);
        pthread_mutex_unlock(&c->lock);
        result = asked != NC_SUCCESS ? asked : state;
        if (result == NC_SUCCESS)
            return TP_OK;
        int64_t now = tp_clock_ns();
        if (result == NC_IN_PROGRESS && now - since > patience)
            return time_out(c, patience, what, peer);
        if (result == NC_IN_PROGRESS)
            tp_clock_sleep_until(now + pause_ns(now - since));
    }
    TP_TRY(tp_comm_check_abort(&c->base.comm, c->base.region));
    return tp_nccl_fail(c, result, comm, peer, what);
}

/* ---- the watch: all with the lock held -------------------------------------------------------------------------------------- */

/* Look for an asynchronous error of a communicator. peer: its other rank, or NCCL_EVERYBODY. */
static void
watch_errors(nccl_comm *c, nc_comm comm, int peer)
{
    int state = NC_SUCCESS;
    char text[512];
    if (comm == NULL || c->nccl->get_async_error(comm, &state) != NC_SUCCESS || state == NC_SUCCESS || state == NC_IN_PROGRESS)
        return;
    c->lost_ns = c->lost_ns == 0 ? tp_clock_ns() : c->lost_ns;
    if (may_be_lost(state) && tp_clock_ns() - c->lost_ns < WORD_NS)
        return;
    if (peer == NCCL_EVERYBODY)
        snprintf(text, sizeof text, "rank %d: NCCL between it and the same ranks of other replicas: %s", c->base.comm.rank,
                 c->nccl->error_string(state));
    else
        snprintf(text, sizeof text, "rank %d: NCCL between it and rank %d: %s", c->base.comm.rank, peer,
                 c->nccl->error_string(state));
    tp_region_abort(c->base.region, TP_ECONNECTION, c->base.comm.rank, text);
}

/* Is the device past the event? One that cannot be asked is no operation that is late: the run ends with the device's words, not with
 * a peer's name when time is up, or, where there is no limit, never. */
static int
is_past(nccl_comm *c, tp_cuda_event event)
{
    char text[512];
    int done = 0;
    if (tp_cuda_event_query(c->base.device, event, &done) == TP_OK)
        return done;
    snprintf(text, sizeof text, "rank %d: the watch over NCCL's messages: %.400s", c->base.comm.rank, tp_error_message());
    tp_region_abort(c->base.region, TP_ERUNTIME, c->base.comm.rank, text);
    return 0;
}

/* Look how far this rank's device has come. The host gives it the work of a whole step at once, and most operations of that are of no
 * event that still is: without marks one of the last, of a step longer than the deadline, would be late where nobody is. */
static void
watch_device(nccl_comm *c)
{
    nccl_marks *m = &c->marks;
    while (m->passed < m->set && is_past(c, m->event[m->passed % NCCL_MARKS])) {
        m->passed++;
        m->since_ns = tp_clock_ns();
    }
}

/* Has the oldest operation that is under way not waited too long, nor this rank's device at whatever it is? All but the last `kept` of
 * `issued` operations are over; these have an event each. */
static int
moves(nccl_comm *c, const tp_cuda_event *events, int64_t kept, int64_t issued, int64_t *seen, int64_t *since_ns)
{
    while (*seen < issued) {
        if (*seen + kept >= issued && !is_past(c, events[*seen % kept]))
            break;
        ++*seen;
        *since_ns = 0;
    }
    if (*seen == issued)
        return 1;
    int64_t now = tp_clock_ns();
    *since_ns = *since_ns == 0 ? now : *since_ns;
    int64_t since = *since_ns > c->marks.since_ns ? *since_ns : c->marks.since_ns;
    return c->base.comm.timeout_ns <= 0 || now - since <= c->base.comm.timeout_ns;
}

static void
too_late(nccl_comm *c, const char *for_what, int peer)
{
    char text[512], holds_up[TP_HELD_TEXT];
    tp_comm_say_who_holds_up(&c->base.comm, c->base.region, peer, holds_up);
    snprintf(text, sizeof text, "rank %d waited %.3g s %s rank %d%.420s", c->base.comm.rank, (double)c->base.comm.timeout_ns * 1e-9,
             for_what, peer, holds_up);
    tp_region_abort(c->base.region, TP_ETIMEOUT, c->base.comm.rank, text);
}

static void
watch_channel(nccl_comm *c, nccl_channel *ch)
{
    const tp_cuda_event *events = ch->keeps ? ch->done : ch->sends ? ch->freed : ch->filled;
    watch_errors(c, ch->comm, ch->peer);
    if (!moves(c, events, ch->keeps ? NCCL_GUESTS : c->slots, ch->issued, &ch->seen, &ch->since_ns))
        too_late(c, ch->sends ? "to send a message to" : "for a message from", ch->peer);
}

static void
watch_exchanges(nccl_comm *c)
{
    nccl_exchanges *e = &c->exchanges;
    watch_errors(c, c->twins.comm, NCCL_EVERYBODY);
    if (!moves(c, e->done, NCCL_EXCHANGES, e->issued, &e->seen, &e->since_ns))
        too_late(c, "to exchange gradients with", e->peer[e->seen % NCCL_EXCHANGES]);
}

void *
tp_nccl_watch(void *argument)
{
    nccl_comm *c = argument;
    pthread_mutex_lock(&c->lock);
    while (!c->ending && !c->aborted) {
        int64_t next = tp_clock_ns() + TICK_NS;
        struct timespec at = {(time_t)(next / 1000000000), (long)(next % 1000000000)};
        pthread_cond_timedwait(&c->changed, &c->lock, &at);
        if (!c->aborted && !c->ending)
            watch_device(c);
        for (int i = 0; i < c->channels && !c->aborted && !c->ending; i++)
            watch_channel(c, &c->channel[i]);
        if (!c->aborted && !c->ending)
            watch_exchanges(c);
        if (tp_region_is_aborted(c->base.region))
            tp_nccl_abort(c);
    }
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

/* ---- waits of this rank ------------------------------------------------------------------------------------------------------ */

tp_status
tp_nccl_await_exchange(nccl_comm *c)
{
    const nccl_exchanges *e = &c->exchanges;
    int done = e->issued < NCCL_EXCHANGES;
    while (!done) {
        TP_TRY(tp_comm_check_abort(&c->base.comm, c->base.region));
        TP_TRY(tp_cuda_event_query(c->base.device, e->done[e->issued % NCCL_EXCHANGES], &done));
        if (!done)
            tp_clock_sleep_until(tp_clock_ns() + NCCL_POLL_NS);
    }
    return TP_OK;
}

tp_status
tp_nccl_arrive(nccl_comm *c, nc_comm comm, int peer, int64_t left)
{
#ifdef TP_CUDA_EMULATED
    int64_t until = tp_clock_ns() + c->base.comm.timeout_ns;
    while (c->nccl->settled != NULL) {
        pthread_mutex_lock(&c->lock);
        int result = c->aborted ? NC_INVALID_USAGE : c->nccl->settled(comm, (int)left);
        pthread_mutex_unlock(&c->lock);
        if (result == NC_SUCCESS)
            break;
        TP_TRY(tp_comm_check_abort(&c->base.comm, c->base.region));
        if (result != NC_IN_PROGRESS)
            return tp_nccl_fail(c, result, comm, peer, "ncclRecv");
        if (c->base.comm.timeout_ns > 0 && tp_clock_ns() > until)
            return time_out(c, c->base.comm.timeout_ns, "message", peer);
        tp_clock_sleep_until(tp_clock_ns() + NCCL_POLL_NS);
    }
#else
    (void)c, (void)comm, (void)peer, (void)left;
#endif
    return TP_OK;
}
