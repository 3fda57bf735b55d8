/* Internal to csrc/comm: the layout of a region. It holds no pointers, as each process maps it at another address. */
#ifndef TP_COMM_REGION_H
#define TP_COMM_REGION_H

#include "csrc/comm/comm.h"

#include <pthread.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <sys/types.h>

#define TP_LINE         64 /* bytes that two cores never share here without meaning to */
#define TP_REGION_MAGIC 0x3167657270745Full
#define TP_REGION_RANKS 4096 /* most ranks of a region */
#define TP_RING_FLOOR   4096 /* smallest ring, bytes */
#define TP_ARENA_ALIGN  4096 /* bytes: ranks share no page of theirs */

/* One rank. Whoever changes something a rank may be asleep for rings its bell: one word to sleep on, whatever it is
 * that the rank waits for, so an abort wakes everybody with one call per rank. */
typedef struct {
    alignas(TP_LINE) _Atomic uint32_t bell;
    _Atomic uint32_t asleep;
    alignas(TP_LINE) _Atomic uint64_t step;
    _Atomic uint64_t instruction;
    _Atomic uint64_t rounds; /* all-gathers that it has entered: by rings, it alone writes it; over TCP, as far as known here */
    _Atomic uint64_t awaited; /* 0, or 1 + the rank for which it has waited for a while, or TP_AWAITS_ALL */
} tp_region_rank;

#define TP_AWAITS_ALL UINT64_MAX

/* Single producer, single consumer. head and tail count bytes since the beginning and never wrap. What lies between tail and
 * skip, if anything, is void: the producer went back to the start of `data` when the ring was empty. */
typedef struct {
    alignas(TP_LINE) _Atomic uint64_t head;
    _Atomic uint64_t skip;
    uint64_t capacity; /* bytes of data: lines */
    _Atomic uint32_t cut; /* bits: by whom a message was given up in its middle; what follows would be taken for its rest */
    alignas(TP_LINE) _Atomic uint64_t tail;
    alignas(TP_LINE) unsigned char data[];
} tp_ring;

struct tp_region {
    uint64_t magic;
    uint32_t abi;
    int32_t ranks;
    uint64_t bytes, ring_bytes, gather_bytes; /* the last two rounded up to lines; the rings' where none is halved */
    uint64_t ranks_at, table_at, places_at, gather_at, rings_at; /* table: of each pair the index among places, -1: no ring */
    uint64_t arenas_at;                                          /* [ranks + 1] where each rank's arena begins and the last ends */
    /* The first failure: 0, or code << 32 | (rank + 1). One word: an aborter killed half-way leaves no doubt. */
    alignas(TP_LINE) _Atomic uint64_t failure;
    _Atomic uint32_t text_ready; /* 0, or 1: text is there, or 2: it was waited for in vain, and may come still */
    _Atomic int32_t told; /* the descriptor that hears of it, + 1 */
    char text[512];
    alignas(TP_LINE) _Atomic uint64_t arrived; /* entries into all-gathers, of all ranks, ever */
    _Atomic int64_t unheard_ns; /* over TCP: for how long rank 0, by which the ranks hear of each other, was listened to in vain */
    int64_t silent_ns;          /* it is heard more often than that */
};

/* Of its thread for what goes on aside (tp_comm_ops.aside): number ranks + rank. */
static inline tp_region_rank *
tp_region_rank_at(const tp_region *region, int rank)
{
    return (tp_region_rank *)((uintptr_t)region + region->ranks_at) + rank;
}

/* NULL where the pair has no ring. */
static inline tp_ring *
tp_region_ring(const tp_region *region, int source, int target)
{
    const int32_t *table = (const int32_t *)((uintptr_t)region + region->table_at);
    const uint64_t *places = (const uint64_t *)((uintptr_t)region + region->places_at);
    int64_t index = table[(int64_t)source * region->ranks + target];
    return index < 0 ? NULL : (tp_ring *)((uintptr_t)region + places[index]);
}

static inline unsigned char *
tp_region_arena(const tp_region *region, int rank, size_t *bytes)
{
    const uint64_t *at = (const uint64_t *)((uintptr_t)region + region->arenas_at) + rank;
    *bytes = (size_t)(at[1] - at[0]);
    return (unsigned char *)((uintptr_t)region + at[0]);
}

/* Two halves, used in turn: uint64 size of the contribution, then the contribution. */
static inline unsigned char *
tp_region_gather(const tp_region *region, uint64_t round, int rank)
{
    uint64_t slot = (round & 1) * (uint64_t)region->ranks + (uint64_t)rank;
    return (unsigned char *)((uintptr_t)region + region->gather_at + slot * (region->gather_bytes + TP_LINE));
}

/* For whom the rank waits, beyond the first moments: a rank (-1: all), and that it does not any more. */
static inline void
tp_region_await(tp_region *region, int rank, int peer)
{
    uint64_t word = peer < 0 ? TP_AWAITS_ALL : (uint64_t)peer + 1;
    atomic_store_explicit(&tp_region_rank_at(region, rank)->awaited, word, memory_order_relaxed);
}

static inline void
tp_region_await_no_more(tp_region *region, int rank)
{
    atomic_store_explicit(&tp_region_rank_at(region, rank)->awaited, 0, memory_order_relaxed);
}

/* Wake `rank` if it sleeps. shared: the futex is seen by other processes. */
void
tp_region_ring_bell(tp_region_rank *rank, int shared);
/* Sleep until the bell is no longer `seen`, at most timeout_ns. May return early. */
void
tp_region_sleep(tp_region_rank *rank, uint32_t seen, int64_t timeout_ns, int shared);

/* Is a rank whose progress this is at its update, where it waits for its sums? */
int
tp_region_is_update(uint64_t instruction);

/* ---- what every communicator says when something is wrong (words.c) -------------------------------------------- */

/* EABORTED with the first failure's words once the region is aborted. */
TP_MUST_USE tp_status
tp_comm_check_abort(const tp_comm *comm, const tp_region *region);
/* EABORTED: of what goes on aside, whose rank has given it up. */
tp_status
tp_comm_halted(const tp_comm *comm);
/* EVALUE in a fork of the process that opened it: it has lost the connections, and has not the thread. */
TP_MUST_USE tp_status
tp_comm_check_owner(pid_t owner);
/* EVALUE unless peer is another rank. */
TP_MUST_USE tp_status
tp_comm_check_peer(const tp_comm *comm, int peer);
/* `count` receives from the peer are posted. EVALUE: no more fit; none is, where one is waited for; any is, where the ranks
 * exchange. */
TP_MUST_USE tp_status
tp_comm_check_room(const tp_comm *comm, int peer, unsigned count);
/* Make room for twice the receives (at first, for TP_COMM_POSTED) in a full ring of items of `size` bytes: *room of them, the
 * oldest at *first. That many are posted only where a program sends far ahead; EMEMORY. */
TP_MUST_USE tp_status
tp_comm_more_room(const tp_comm *comm, void **items, size_t size, unsigned *room, unsigned *first);
TP_MUST_USE tp_status
tp_comm_check_posted(const tp_comm *comm, int peer, unsigned count);
TP_MUST_USE tp_status
tp_comm_check_idle(const tp_comm *comm, int peer, unsigned count);
/* EVALUE unless a message of so many bytes fits. */
TP_MUST_USE tp_status
tp_comm_check_bytes(size_t bytes, size_t most);
/* EVALUE: it has not seen the end of its last all-gather, and would be counted twice in that. */
tp_status
tp_comm_gathers_again(const tp_comm *comm);
/* ECONNECTION: the message that came is not the one that was expected. */
tp_status
tp_comm_wrong_message(const tp_comm *comm, int peer, uint64_t sent_tag, uint64_t sent_bytes, uint64_t tag, size_t bytes);
/* ECONNECTION: the peer has given up a message in its middle; or (not begun) either end an earlier one, which none can follow. */
tp_status
tp_comm_cut(const tp_comm *comm, int peer, int inward, int begun, uint64_t tag, size_t moved, size_t bytes);
#define TP_HELD_TEXT (2 * (TP_DOING_TEXT + 64))

/* "; rank 1 is ...": what the rank is doing for which this one waited, and where that one waits too, directly or through others, for a
 * rank that waits for nobody, what that is doing: the longest wait ends first, and is seldom next to who holds all up. Over TCP, where
 * rank 0 is silent, that instead. */
void
tp_comm_say_who_holds_up(const tp_comm *comm, const tp_region *region, int peer, char text[TP_HELD_TEXT]);
/* ETIMEOUT: of a message from (inward) or to the peer; peer -1: of an all-gather. */
tp_status
tp_comm_too_late(const tp_comm *comm, tp_region *region, int peer, int inward, uint64_t tag, size_t moved, size_t bytes);
/* End the run on account of a rank heard no more: its connection closed (error 0), which is `closed` in words, or failed. */
void
tp_comm_mourn(const tp_comm *comm, tp_region *region, int rank, int error, const char *closed);
/* A thread of a communicator's: signals are for the program's own. ERUNTIME. */
TP_MUST_USE tp_status
tp_comm_start_thread(pthread_t *thread, void *(*run)(void *), void *argument);

#endif
