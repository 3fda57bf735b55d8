#include "csrc/base/team.h"

#include "csrc/base/cpu_relax.h"
#include "csrc/base/fpu.h"

#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SPINS 4000 /* about 10 us: kernels follow one another within that in a busy stage */

typedef struct {
    tp_team *team;
    int member;
    pthread_t thread;
} worker;

struct tp_team {
    int members;
    tp_team_work work;
    void *argument;
    _Atomic uint32_t round, done;
    _Atomic int ending;
    worker workers[];
};

static void
futex(_Atomic uint32_t *word, int operation, uint32_t value)
{
    syscall(SYS_futex, (uint32_t *)word, operation | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

static void
wait_change(_Atomic uint32_t *word, uint32_t seen)
{
    for (int spin = 0; spin < SPINS; spin++) {
        if (atomic_load_explicit(word, memory_order_acquire) != seen)
            return;
        tp_cpu_relax();
    }
    while (atomic_load_explicit(word, memory_order_acquire) == seen)
        futex(word, FUTEX_WAIT, seen);
}

static void *
worker_main(void *argument)
{
    worker *self = argument;
    tp_team *team = self->team;
    uint32_t seen = 0;
    (void)tp_fpu_flush_subnormals(); /* as the caller of every kernel has it */
    for (;;) {
        wait_change(&team->round, seen);
        seen = atomic_load_explicit(&team->round, memory_order_acquire);
        if (atomic_load(&team->ending))
            return NULL;
        team->work(team->argument, self->member, team->members);
        atomic_fetch_add_explicit(&team->done, 1, memory_order_release);
        futex(&team->done, FUTEX_WAKE, 1);
    }
}

tp_status
tp_team_open(int members, tp_team **out)
{
    if (members < 1 || members > TP_TEAM_MOST)
        return tp_fail(TP_EVALUE, "threads per rank is %d: 1 to %d would be right", members, TP_TEAM_MOST);
    tp_team *team = calloc(1, sizeof *team + (size_t)members * sizeof(worker));
    if (team == NULL)
        return tp_fail(TP_EMEMORY, "no memory for a team of %d threads", members);
    team->members = 1;
    for (int i = 1; i < members; i++) {
        worker *self = &team->workers[i];
        *self = (worker){.team = team, .member = i};
        int failure = pthread_create(&self->thread, NULL, worker_main, self);
        if (failure != 0) {
            tp_team_close(team);
            return tp_fail(TP_ERUNTIME, "thread %d of %d could not be started (%s): fewer threads per rank, or more memory (ulimit -v)"
                           " or processes (ulimit -u), would be right", i, members, strerror(failure));
        }
        team->members = i + 1;
    }
    *out = team;
    return TP_OK;
}

void
tp_team_close(tp_team *team)
{
    if (team == NULL)
        return;
    atomic_store(&team->ending, 1);
    atomic_fetch_add_explicit(&team->round, 1, memory_order_release);
    futex(&team->round, FUTEX_WAKE, INT32_MAX);
    for (int i = 1; i < team->members; i++)
        pthread_join(team->workers[i].thread, NULL);
    free(team);
}

int
tp_team_members(const tp_team *team)
{
    return team == NULL ? 1 : team->members;
}

void
tp_team_run(tp_team *team, tp_team_work work, void *argument)
{
    if (team == NULL || team->members == 1) {
        work(argument, 0, 1);
        return;
    }
    uint32_t others = (uint32_t)team->members - 1;
    team->work = work;
    team->argument = argument;
    atomic_store_explicit(&team->done, 0, memory_order_relaxed);
    atomic_fetch_add_explicit(&team->round, 1, memory_order_release);
    futex(&team->round, FUTEX_WAKE, INT32_MAX);
    work(argument, 0, team->members);
    for (uint32_t done; (done = atomic_load_explicit(&team->done, memory_order_acquire)) != others;)
        wait_change(&team->done, done);
}

void
tp_team_share(int64_t items, int64_t grain, int member, int members, int64_t *first, int64_t *last)
{
    int64_t grains = (items + grain - 1) / grain;
    int64_t begin = grains * member / members * grain, end = grains * (member + 1) / members * grain;
    *first = begin < items ? begin : items;
    *last = end < items ? end : items;
}
