/* Preloaded, it refuses memory once: to the n-th request for at least so many bytes, or to calloc alone, that comes from a library with
 * this name. Which library asks is known by the address that the request returns to. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);

static long left;
static size_t least;
static int callocs;
static const char *library;

void
refuse_at(long n, const char *name, size_t bytes, int callocs_alone)
{
    library = name;
    least = bytes;
    callocs = callocs_alone;
    left = n;
}

int
refused(void)
{
    return left <= 0;
}

static int
refuses(const void *from, size_t bytes)
{
    Dl_info info;
    if (__atomic_load_n(&left, __ATOMIC_RELAXED) <= 0 || bytes < least || !dladdr(from, &info) || !strstr(info.dli_fname, library))
        return 0;
    return __atomic_sub_fetch(&left, 1, __ATOMIC_RELAXED) == 0;
}

void *
malloc(size_t bytes)
{
    return !callocs && refuses(__builtin_return_address(0), bytes) ? NULL : __libc_malloc(bytes);
}

void *
calloc(size_t n, size_t size)
{
    return refuses(__builtin_return_address(0), n * size) ? NULL : __libc_calloc(n, size);
}

void *
realloc(void *memory, size_t bytes)
{
    return !callocs && refuses(__builtin_return_address(0), bytes) ? NULL : __libc_realloc(memory, bytes);
}
