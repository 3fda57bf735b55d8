/* Preloaded: while late_armed, who wants to read under a lock waits first, until late_go, and late_waiting counts them. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

__attribute__((visibility("default"))) int late_armed, late_waiting, late_go;

__attribute__((visibility("default"))) int
pthread_rwlock_rdlock(pthread_rwlock_t *lock)
{
    static int (*real)(pthread_rwlock_t *);
    if (real == NULL)
        *(void **)&real = dlsym(RTLD_NEXT, "pthread_rwlock_rdlock");
    if (__atomic_load_n(&late_armed, __ATOMIC_SEQ_CST)) {
        __atomic_add_fetch(&late_waiting, 1, __ATOMIC_SEQ_CST);
        while (!__atomic_load_n(&late_go, __ATOMIC_SEQ_CST))
            usleep(1000);
    }
    return real(lock);
}
