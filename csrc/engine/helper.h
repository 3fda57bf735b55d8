/* A thread beside a rank's own, for what goes on while the rank computes. */
#ifndef TP_ENGINE_HELPER_H
#define TP_ENGINE_HELPER_H

#include "csrc/engine/engine.h"

#include <pthread.h>
#include <stdatomic.h>

/* number: of this step's jobs, from 0. */
typedef tp_status tp_engine_job(tp_engine *engine, uint32_t number);

typedef struct {
    tp_engine *engine;
    const char *name;
    tp_engine_job *job;
    int running;
    pthread_t thread;
    _Atomic uint32_t begun, done; /* jobs of all steps; they wrap */
    _Atomic int ending;
    uint32_t base;                /* done when this step began */
    _Atomic int status;           /* of this step's first job that failed, once `error` says why: a tp_status */
    tp_error_state error;
} tp_engine_helper;

/* helper: zeroed. name: of the thread, 15 letters; does: "swaps", for errors. ERUNTIME. */
TP_MUST_USE tp_status
tp_engine_helper_open(tp_engine_helper *helper, tp_engine *engine, const char *name, const char *does, tp_engine_job *job);
/* Once it rests. One that was never opened may be closed, too. */
void
tp_engine_helper_close(tp_engine_helper *helper);
/* Waits for what a step that failed has left, and forgets how that ended. EABORTED. */
TP_MUST_USE tp_status
tp_engine_helper_begin_step(tp_engine_helper *helper);
/* The next job may be done. */
void
tp_engine_helper_go(tp_engine_helper *helper);
/* Until `number` jobs of this step are done; the status of the first that failed. EABORTED. */
TP_MUST_USE tp_status
tp_engine_helper_wait(tp_engine_helper *helper, uint32_t number);
/* For jobs that are of no use behind one that failed. */
int
tp_engine_helper_has_failed(const tp_engine_helper *helper);
/* Is all done that was begun? And until it is, however it ends. */
int
tp_engine_helper_rests(const tp_engine_helper *helper);
void
tp_engine_helper_rest(tp_engine_helper *helper);

#endif
