#include "cuda/emu/apart.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { ALIGN = 512, HUGE = 2 << 20 };

typedef struct block {
    struct block *next;
    void *memory;
    size_t bytes;
} block;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static block *blocks;
static int inside;

int
tp_emu_apart(void)
{
    const char *told = getenv("TERAPIPE_EMU_APART");
    return told != NULL && told[0] == '1';
}

void *
tp_emu_take(size_t bytes)
{
    if (!tp_emu_apart()) {
        size_t align = bytes < HUGE ? ALIGN : HUGE;
        void *memory = aligned_alloc(align, (bytes + align - 1) / align * align);
        if (memory != NULL && align == HUGE) /* all of it is written at once: a page fault for 2 MiB, then, not 512 */
            (void)madvise(memory, bytes, MADV_HUGEPAGE);
        return memory;
    }
    block *one = malloc(sizeof *one);
    void *memory = one == NULL ? MAP_FAILED
                               : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        free(one);
        return NULL;
    }
    (void)madvise(memory, bytes, MADV_HUGEPAGE); /* protect() changes one entry for 2 MiB, then, not 512 */
    pthread_mutex_lock(&lock);
    *one = (block){blocks, memory, bytes};
    blocks = one;
    pthread_mutex_unlock(&lock);
    return memory;
}

void
tp_emu_give(void *memory)
{
    block *found = NULL;
    pthread_mutex_lock(&lock);
    for (block **at = &blocks; *at != NULL && found == NULL; at = &(*at)->next)
        if ((*at)->memory == memory) {
            found = *at;
            *at = found->next;
            break;
        }
    pthread_mutex_unlock(&lock);
    if (found == NULL) {
        free(memory);
        return;
    }
    (void)munmap(memory, found->bytes);
    free(found);
}

static void
protect(int how)
{
    for (block *one = blocks; one != NULL; one = one->next)
        (void)mprotect(one->memory, one->bytes, how);
}

void
tp_emu_enter(void)
{
    pthread_mutex_lock(&lock);
    if (inside++ == 0)
        protect(PROT_READ | PROT_WRITE);
    pthread_mutex_unlock(&lock);
}

void
tp_emu_leave(void)
{
    pthread_mutex_lock(&lock);
    if (--inside == 0)
        protect(PROT_NONE);
    pthread_mutex_unlock(&lock);
}
