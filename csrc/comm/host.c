#include "csrc/comm/host.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "csrc/base/clock.h"
#include "csrc/comm/region.h"

struct tp_host {
    pthread_mutex_t lock; /* all that follows */
    pthread_cond_t changed;
    int holders, told, failure, reason;
    struct addrinfo *found;
    char name[];
};

/* With the lock held, which it gives back. */
static void
let_go(tp_host *asked)
{
    int last = --asked->holders == 0;
    pthread_mutex_unlock(&asked->lock);
    if (!last)
        return;
    if (asked->found != NULL)
        freeaddrinfo(asked->found);
    pthread_cond_destroy(&asked->changed);
    pthread_mutex_destroy(&asked->lock);
    free(asked);
}

static void *
ask(void *argument)
{
    tp_host *asked = argument;
    const char *host = strcmp(asked->name, "localhost") == 0 ? "127.0.0.1" : asked->name;
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM}, *found = NULL;
    int failure = getaddrinfo(host, NULL, &hints, &found), reason = errno;
    pthread_mutex_lock(&asked->lock);
    asked->found = failure == 0 ? found : NULL;
    asked->failure = failure;
    asked->reason = reason;
    asked->told = 1;
    pthread_cond_signal(&asked->changed);
    let_go(asked);
    return NULL;
}

tp_status
tp_host_ask(const char *host, tp_host **out)
{
    size_t bytes = strlen(host) + 1;
    tp_host *asked = calloc(1, sizeof *asked + bytes);
    pthread_t thread;
    if (asked == NULL)
        return tp_fail(TP_EMEMORY, "no memory to ask for the address of %s", host);
    memcpy(asked->name, host, bytes);
    pthread_mutex_init(&asked->lock, NULL);
    tp_clock_condition(&asked->changed);
    asked->holders = 2;
    tp_status status = tp_comm_start_thread(&thread, ask, asked);
    if (status != TP_OK) {
        pthread_mutex_lock(&asked->lock);
        asked->holders = 1;
        let_go(asked);
        return status;
    }
    pthread_detach(thread);
    *out = asked;
    return TP_OK;
}

int
tp_host_answer(tp_host *asked, int64_t until_ns, struct addrinfo **addresses, const char **why)
{
    struct timespec at = {(time_t)(until_ns / 1000000000), (long)(until_ns % 1000000000)};
    pthread_mutex_lock(&asked->lock);
    while (!asked->told && tp_clock_ns() < until_ns)
        pthread_cond_timedwait(&asked->changed, &asked->lock, &at);
    if (!asked->told) {
        pthread_mutex_unlock(&asked->lock);
        return 0;
    }
    if (asked->failure == 0) {
        if (*addresses != NULL)
            freeaddrinfo(*addresses);
        *addresses = asked->found;
        asked->found = NULL;
    } else if (*addresses == NULL)
        *why = asked->failure == EAI_SYSTEM ? strerror(asked->reason) : gai_strerror(asked->failure);
    let_go(asked);
    return 1;
}

void
tp_host_forget(tp_host *asked)
{
    if (asked == NULL)
        return;
    pthread_mutex_lock(&asked->lock);
    let_go(asked);
}
