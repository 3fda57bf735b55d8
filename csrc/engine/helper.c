/* A thread beside a rank's own, which does numbered jobs in their order while the rank goes on: copies of what is swapped, sums of
 * gradients. The rank counts: what it has begun, and what is done. */
#include "csrc/engine/helper.h"

#include <linux/futex.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "csrc/base/cpu_relax.h"

#define SPINS 4000
#define NAP_NS 100000000 /* between two looks whether the run was aborted */

static void
futex(_Atomic uint32_t *word, int operation, uint32_t value, const struct timespec *most)
{
    syscall(SYS_futex, (uint32_t *)word, operation | FUTEX_PRIVATE_FLAG, value, most, NULL, 0);
}

static int
changes(_Atomic uint32_t *word, uint32_t seen)
{
    for (int spin = 0; spin < SPINS; spin++) {
        if (atomic_load_explicit(word, memory_order_acquire) != seen)
            return 1;
        tp_cpu_relax();
    }
    return 0;
}

static void *
helper_main(void *argument)
{
    tp_engine_helper *helper = argument;
    (void)prctl(PR_SET_NAME, helper->name); /* for whoever looks at the process */
    for (;;) {
        uint32_t done = atomic_load_explicit(&helper->done, memory_order_relaxed);
        while (!changes(&helper->begun, done) && !atomic_load(&helper->ending) &&
               atomic_load_explicit(&helper->begun, memory_order_acquire) == done)
            futex(&helper->begun, FUTEX_WAIT, done, NULL);
        if (atomic_load(&helper->ending))
            return NULL;
        tp_status status = helper->job(helper->engine, done - helper->base);
        if (status != TP_OK && atomic_load_explicit(&helper->status, memory_order_relaxed) == TP_OK) {
            tp_error_save(&helper->error);
            atomic_store_explicit(&helper->status, (int)status, memory_order_release); /* read while later jobs go on */
        }
        atomic_fetch_add_explicit(&helper->done, 1, memory_order_release);
        futex(&helper->done, FUTEX_WAKE, 1, NULL);
    }
}

tp_status
tp_engine_helper_open(tp_engine_helper *helper, tp_engine *engine, const char *name, const char *does, tp_engine_job *job)
{
    helper->engine = engine;
    helper->name = name;
    helper->job = job;
    int failure = pthread_create(&helper->thread, NULL, helper_main, helper);
    helper->running = failure == 0;
    if (failure == 0)
        return TP_OK;
    return tp_fail(TP_ERUNTIME, "the thread that %s beside the work could not be started (%s): more memory (ulimit -v) or "
                   "processes (ulimit -u) would be right", does, strerror(failure));
}

void
tp_engine_helper_close(tp_engine_helper *helper)
{
    if (!helper->running)
        return;
    atomic_store(&helper->ending, 1);
    atomic_fetch_add_explicit(&helper->begun, 1, memory_order_release); /* a wait for another number ends */
    futex(&helper->begun, FUTEX_WAKE, 1, NULL);
    pthread_join(helper->thread, NULL);
    helper->running = 0;
}

/* Until `number` jobs of all steps are done. */
static tp_status
wait_until(tp_engine_helper *helper, uint32_t number, int whatever)
{
    const struct timespec nap = {.tv_nsec = NAP_NS};
    for (uint32_t done; (int32_t)(number - (done = atomic_load_explicit(&helper->done, memory_order_acquire))) > 0;) {
        if (changes(&helper->done, done))
            continue;
        futex(&helper->done, FUTEX_WAIT, done, &nap);
        if (!whatever)
            TP_TRY(tp_engine_check_abort(helper->engine));
    }
    tp_status status = (tp_status)atomic_load_explicit(&helper->status, memory_order_acquire);
    if (status != TP_OK && !whatever)
        tp_error_restore(&helper->error);
    return whatever ? TP_OK : status;
}

tp_status
tp_engine_helper_begin_step(tp_engine_helper *helper)
{
    uint32_t begun = atomic_load_explicit(&helper->begun, memory_order_relaxed);
    tp_engine_helper_rest(helper); /* jobs of a step that failed end by themselves, and why they did is that step's */
    atomic_store_explicit(&helper->status, TP_OK, memory_order_relaxed);
    TP_TRY(tp_engine_check_abort(helper->engine));
    helper->base = begun;
    return TP_OK;
}

void
tp_engine_helper_go(tp_engine_helper *helper)
{
    atomic_fetch_add_explicit(&helper->begun, 1, memory_order_release);
    futex(&helper->begun, FUTEX_WAKE, 1, NULL);
}

tp_status
tp_engine_helper_wait(tp_engine_helper *helper, uint32_t number)
{
    return wait_until(helper, helper->base + number, 0);
}

int
tp_engine_helper_has_failed(const tp_engine_helper *helper)
{
    return atomic_load_explicit(&helper->status, memory_order_relaxed) != TP_OK;
}

int
tp_engine_helper_rests(const tp_engine_helper *helper)
{
    return atomic_load_explicit(&helper->done, memory_order_acquire) == atomic_load_explicit(&helper->begun, memory_order_relaxed);
}

void
tp_engine_helper_rest(tp_engine_helper *helper)
{
    (void)!wait_until(helper, atomic_load_explicit(&helper->begun, memory_order_relaxed), 1);
}
