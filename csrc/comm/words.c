/* What all communicators check, and the words of their errors: one place, so that they say the same (region.h). */
#include "csrc/comm/region.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

tp_status
tp_comm_check_abort(const tp_comm *comm, const tp_region *region)
{
    int rank;
    char text[512];
    if (atomic_load_explicit(&region->failure, memory_order_relaxed) == 0 ||
        tp_region_aborted(region, &rank, text) == TP_OK)
        return TP_OK;
    if (rank < 0)
        return tp_fail(TP_EABORTED, "rank %d was ended: %s", comm->rank, text);
    return tp_fail(TP_EABORTED, "rank %d was ended because rank %d failed first: %s", comm->rank, rank, text);
}

tp_status
tp_comm_halted(const tp_comm *comm)
{
    return tp_fail(TP_EABORTED, "rank %d has given up what it sent and received aside", comm->rank);
}

tp_status
tp_comm_check_owner(pid_t owner)
{
    return owner == getpid() ? TP_OK : tp_fail(TP_EVALUE, "the communicator is of process %d and this is a fork of it, %d: one of its "
                                                          "own would be right", (int)owner, (int)getpid());
}

tp_status
tp_comm_check_peer(const tp_comm *comm, int peer)
{
    if (peer < 0 || peer >= comm->ranks || peer == comm->rank)
        return tp_fail(TP_EVALUE, "peer is %d: another rank than %d, 0 to %d, would be right", peer, comm->rank,
                       comm->ranks - 1);
    return TP_OK;
}

tp_status
tp_comm_check_room(const tp_comm *comm, int peer, unsigned count)
{
    if (count == TP_COMM_POSTED)
        return tp_fail(TP_EVALUE, "rank %d has %d receives posted from rank %d: no more fit", comm->rank, TP_COMM_POSTED,
                       peer);
    return TP_OK;
}

tp_status
tp_comm_more_room(const tp_comm *comm, void **items, size_t size, unsigned *room, unsigned *first)
{
    unsigned more = *room > 0 ? 2 * *room : TP_COMM_POSTED, head = *room - *first;
    unsigned char *wider = more > *room ? calloc(more, size) : NULL, *old = *items;
    if (wider == NULL)
        return tp_fail(TP_EMEMORY, "no memory for more than %u receives of rank %d", *room, comm->rank);
    if (old != NULL) {
        memcpy(wider, old + *first * size, head * size);
        memcpy(wider + head * size, old, *first * size);
        free(old);
    }
    *items = wider;
    *room = more;
    *first = 0;
    return TP_OK;
}

tp_status
tp_comm_check_posted(const tp_comm *comm, int peer, unsigned count)
{
    if (count == 0)
        return tp_fail(TP_EVALUE, "rank %d waits for rank %d but has posted no receive from it", comm->rank, peer);
    return TP_OK;
}

tp_status
tp_comm_check_idle(const tp_comm *comm, int peer, unsigned count)
{
    if (count > 0)
        return tp_fail(TP_EVALUE, "rank %d exchanges with rank %d while %u receives from it are posted", comm->rank, peer,
                       count);
    return TP_OK;
}

tp_status
tp_comm_check_bytes(size_t bytes, size_t most)
{
    if (bytes > most)
        return tp_fail(TP_EVALUE, "a message has %zu bytes: the communicator was made for at most %zu", bytes, most);
    return TP_OK;
}

tp_status
tp_comm_gathers_again(const tp_comm *comm)
{
    return tp_fail(TP_EVALUE, "rank %d gathers again though its last all-gather has failed: a new region and communicator would be "
                              "right", comm->rank);
}

tp_status
tp_comm_wrong_message(const tp_comm *comm, int peer, uint64_t sent_tag, uint64_t sent_bytes, uint64_t tag, size_t bytes)
{
    char theirs[TP_TAG_TEXT], ours[TP_TAG_TEXT];
    tp_tag_print(sent_tag, theirs);
    tp_tag_print(tag, ours);
    return tp_fail(TP_ECONNECTION, "rank %d sent %s (%llu bytes) where rank %d expected %s (%zu bytes)", peer, theirs,
                   (unsigned long long)sent_bytes, comm->rank, ours, bytes);
}

tp_status
tp_comm_cut(const tp_comm *comm, int peer, int inward, int begun, uint64_t tag, size_t moved, size_t bytes)
{
    char what[TP_TAG_TEXT];
    if (!begun)
        return tp_fail(TP_ECONNECTION, "an earlier message %s rank %d was given up by rank %d, or by that one, in its middle: none can "
                                       "follow it", inward ? "from" : "to", peer, comm->rank);
    tp_tag_print(tag, what);
    return tp_fail(TP_ECONNECTION, "rank %d gave up a message %s rank %d in its middle: %s, of whose %zu bytes %zu have moved, will "
                                   "never be whole", peer, inward ? "to" : "from", comm->rank, what, bytes, moved);
}

/* Orders ranks by how likely they hold others up: those that wait for nobody first, then by a count of how far they are. */
static uint64_t
suspicion(const tp_region *region, int rank, uint64_t far)
{
    return far | (uint64_t)(atomic_load_explicit(&tp_region_rank_at(region, rank)->awaited, memory_order_relaxed) != 0) << 63;
}

/* Of the ranks that have entered fewer all-gathers than this one, one that waits for nobody, or one with the fewest; -1: there is
 * none. */
static int
one_missing(const tp_region *region, int mine)
{
    uint64_t own = atomic_load_explicit(&tp_region_rank_at(region, mine)->rounds, memory_order_relaxed), least = UINT64_MAX;
    int found = -1;
    for (int rank = 0; rank < region->ranks; rank++) {
        uint64_t rounds = atomic_load_explicit(&tp_region_rank_at(region, rank)->rounds, memory_order_relaxed);
        uint64_t key = suspicion(region, rank, rounds);
        if (rounds < own && key < least) {
            least = key;
            found = rank;
        }
    }
    return found;
}

/* Of the ranks that are not at the instruction where this one waits for all, one that waits for nobody, or is the fewest steps on;
 * -1: there is none. */
static int
one_behind(const tp_region *region, int mine)
{
    uint64_t own_step, own, step, instruction, least = UINT64_MAX;
    int found = -1;
    tp_region_read_progress(region, mine, &own_step, &own);
    for (int rank = 0; rank < region->ranks; rank++) {
        tp_region_read_progress(region, rank, &step, &instruction);
        int here = step == own_step && instruction >> 48 == own >> 48; /* the stages differ */
        uint64_t key = suspicion(region, rank, step);
        if (rank != mine && !here && key < least) {
            least = key;
            found = rank;
        }
    }
    return found;
}

/* For whom the rank waits, -1: for nobody. Of one that was stopped the last word may be of a wait that is long over: nobody waits for
 * all who have come, or for one that is in a later step, which begins where all have ended the one before. */
static int
awaited_by(const tp_region *region, int rank)
{
    uint64_t awaited = atomic_load_explicit(&tp_region_rank_at(region, rank)->awaited, memory_order_relaxed), own, step, doing;
    tp_region_read_progress(region, rank, &own, &doing);
    if (awaited == 0 && tp_region_is_update(doing)) /* its thread aside, for which it waits */
        awaited = atomic_load_explicit(&tp_region_rank_at(region, rank + region->ranks)->awaited, memory_order_relaxed);
    if (awaited == TP_AWAITS_ALL)
        return one_missing(region, rank);
    if (awaited == 0 || awaited > (uint64_t)region->ranks)
        return -1;
    tp_region_read_progress(region, (int)awaited - 1, &step, &doing);
    return step > own ? -1 : (int)awaited - 1;
}

/* For how long rank 0 has told nothing of the others, who may long have gone on, or wait for it. Seconds; 0: they are as they seem. */
static double
silence(const tp_region *region)
{
    int64_t silent = atomic_load_explicit(&region->unheard_ns, memory_order_relaxed);
    return silent > region->silent_ns ? (double)silent * 1e-9 : 0.0;
}

void
tp_comm_say_who_holds_up(const tp_comm *comm, const tp_region *region, int peer, char text[TP_HELD_TEXT])
{
    char doing[TP_DOING_TEXT];
    double silent = silence(region);
    if (silent > 0.0) {
        tp_region_doing(region, 0, doing);
        snprintf(text, TP_HELD_TEXT, "; rank 0, by which the ranks hear of each other, has said nothing for %.3g s, and was last heard %s",
                 silent, doing);
        return;
    }
    int last = peer, next = awaited_by(region, peer); /* each is read once: it may change meanwhile */
    for (int i = 0; i < comm->ranks && next >= 0 && next != comm->rank; i++) { /* of a device's wait this one's region has no word */
        last = next;
        next = awaited_by(region, last);
    }
    tp_region_doing(region, peer, doing);
    int used = snprintf(text, TP_HELD_TEXT, "; rank %d is %s", peer, doing);
    if (last == peer || next >= 0) /* the latter: in a ring, of which none is to blame */
        return;
    tp_region_doing(region, last, doing);
    snprintf(text + used, TP_HELD_TEXT / 2, ", and in the end waits for rank %d, which is %s", last, doing);
}

tp_status
tp_comm_too_late(const tp_comm *comm, tp_region *region, int peer, int inward, uint64_t tag, size_t moved, size_t bytes)
{
    char what[TP_TAG_TEXT], holds_up[TP_HELD_TEXT] = "";
    double waited = (double)comm->timeout_ns * 1e-9;
    tp_region_await(region, comm->rank, peer); /* as it did until now: in who waits for whom, it is a link */
    int other = peer < 0 ? one_missing(region, comm->rank) : peer;
    other = other < 0 ? one_behind(region, comm->rank) : other;
    if (other >= 0)
        tp_comm_say_who_holds_up(comm, region, other, holds_up);
    tp_region_await_no_more(region, comm->rank);
    if (peer < 0)
        return tp_fail(TP_ETIMEOUT, "rank %d waited %.3g s for the other ranks to gather%s", comm->rank, waited, holds_up);
    tp_tag_print(tag, what);
    return tp_fail(TP_ETIMEOUT, "rank %d waited %.3g s %s rank %d (%s, %zu of %zu bytes moved)%s", comm->rank, waited,
                   inward ? "for a message from" : "to send a message to", peer, what, moved, bytes, holds_up);
}

void
tp_comm_mourn(const tp_comm *comm, tp_region *region, int rank, int error, const char *closed)
{
    char doing[TP_DOING_TEXT], text[512];
    tp_region_doing(region, rank, doing);
    if (error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH || error == EHOSTDOWN || error == ENETDOWN)
        snprintf(text, sizeof text, "rank %d does not answer rank %d any more (%s: is its machine, or the network to it, gone?) %s",
                 rank, comm->rank, strerror(error), doing);
    else
        snprintf(text, sizeof text, "rank %d %s %s", rank, closed, doing);
    tp_region_abort(region, TP_ECONNECTION, rank, text);
}

tp_status
tp_comm_start_thread(pthread_t *thread, void *(*run)(void *), void *argument)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failure = pthread_create(thread, NULL, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failure == 0 ? TP_OK : tp_fail(TP_ERUNTIME, "the communicator's thread could not be started: %s", strerror(failure));
}
