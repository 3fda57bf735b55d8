/* A process that was forked has every connection too: were this one killed, none would close as long as the other lives, and nobody
 * would notice. So a fork loses them. What it inherits of a communicator keeps its descriptors' numbers, at which nothing is heard. */
#include "csrc/comm/links.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* first, and what is in it */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static tp_links *first;

static void
before_fork(void)
{
    pthread_mutex_lock(&lock);
}

static void
after_fork(void)
{
    pthread_mutex_unlock(&lock);
}

/* Nothing is heard at fd any more; -1: it is closed, since there can be nothing. A process that has all descriptors it may have has that
 * one. */
static int
unplug(int fd)
{
    close(fd);
    int none = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (none < 0 || none == fd)
        return none;
    (void)dup3(none, fd, O_CLOEXEC);
    close(none);
    return fd;
}

static void
in_the_fork(void)
{
    int none = -1;
    for (const tp_links *one = first; one != NULL; one = one->next)
        for (int i = 0; i < 2 * one->ranks; i++)
            if (one->control[i] >= 0 && (none < 0 || dup3(none, one->control[i], O_CLOEXEC) < 0))
                none = unplug(one->control[i]);
    first = NULL; /* lost once: a fork of this one may have files of its own at those numbers */
    pthread_mutex_unlock(&lock);
}

static void
watch_forks(void)
{
    (void)pthread_atfork(before_fork, after_fork, in_the_fork); /* without memory for it, forks are as they were */
}

tp_status
tp_links_make(int ranks, tp_links *out)
{
    *out = (tp_links){.ranks = ranks, .control = malloc(2 * (size_t)ranks * sizeof(int))};
    if (out->control == NULL)
        return tp_fail(TP_EMEMORY, "no memory to meet %d ranks", ranks);
    out->data = out->control + ranks;
    for (int i = 0; i < 2 * ranks; i++)
        out->control[i] = -1;
    (void)pthread_once(&once, watch_forks);
    pthread_mutex_lock(&lock);
    out->next = first;
    first = out;
    pthread_mutex_unlock(&lock);
    return TP_OK;
}

void
tp_links_close(tp_links *links)
{
    if (links->control == NULL)
        return;
    pthread_mutex_lock(&lock);
    tp_links **at = &first;
    while (*at != NULL && *at != links)
        at = &(*at)->next;
    if (*at != NULL) /* else it is of what this process was forked from */
        *at = links->next;
    for (int i = 0; i < 2 * links->ranks; i++)
        if (links->control[i] >= 0)
            close(links->control[i]);
    pthread_mutex_unlock(&lock); /* behind that: a fork is before, and loses them, or has none */
    free(links->control);
    *links = (tp_links){0};
}
