#include "csrc/base/store.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "csrc/base/clock.h"

#define PIECE ((size_t)16 << 20) /* of one copy: about a slice's arrays of a large model, more than a core's cache */

/* -1: errno says why. */
static int
nameless_file(const char *folder)
{
    char path[PATH_MAX];
    int fd = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) /* file systems that know no such files */
        return fd;
    if (snprintf(path, sizeof path, "%s/.terapipe-store-XXXXXX", folder) >= (int)sizeof path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    fd = mkostemp(path, O_CLOEXEC);
    if (fd >= 0)
        unlink(path);
    return fd;
}

tp_status
tp_store_open(const char *folder, size_t bytes, const char *what, void **out)
{
    *out = NULL;
    if (bytes == 0)
        return TP_OK;
    if (folder == NULL)
        return tp_fail(TP_EVALUE, "%s swaps %zu bytes, and no folder was given for them: one on a disk would be right", what, bytes);
    int fd = nameless_file(folder);
    if (fd < 0)
        return tp_fail(TP_EIO, "%s swaps to a file in %s, which cannot be made: %s", what, folder, strerror(errno));
    int error = EFBIG;
    if (bytes <= (size_t)INT64_MAX)
        do
            error = posix_fallocate(fd, 0, (off_t)bytes); /* else a full disk is a SIGBUS */
        while (error == EINTR);
    if (error != 0) {
        close(fd);
        return tp_fail(TP_EIO, "%s swaps %zu bytes to a file in %s: %s", what, bytes, folder, strerror(error));
    }
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    error = errno;
    close(fd);
    if (memory == MAP_FAILED)
        return tp_fail(TP_EMEMORY, "%s: no addresses for %zu bytes of swapped activations: %s", what, bytes, strerror(error));
    *out = memory;
    return TP_OK;
}

void
tp_store_close(void *memory, size_t bytes)
{
    if (memory != NULL)
        munmap(memory, bytes);
}

/* All of the store in pieces: out of memory, or back in. Returns the seconds. */
static double
copy_all(char *store, size_t bytes, char *piece, int out)
{
    int64_t start = tp_clock_ns();
    for (size_t at = 0; at < bytes; at += PIECE) {
        size_t count = bytes - at < PIECE ? bytes - at : PIECE;
        memcpy(out ? store + at : piece, out ? piece : store + at, count);
    }
    return (double)(tp_clock_ns() - start) * 1e-9;
}

tp_status
tp_store_time(const char *folder, size_t bytes, int rounds, double *seconds)
{
    void *store = NULL;
    if (bytes == 0 || rounds < 1)
        return tp_fail(TP_EVALUE, "%d rounds of %zu bytes: at least one of each would be right", rounds, bytes);
    char *piece = calloc(1, PIECE);
    if (piece == NULL)
        return tp_fail(TP_EMEMORY, "no memory to measure swaps with");
    tp_status status = tp_store_open(folder, bytes, "a measurement", &store);
    for (int i = 0; i < 2 * rounds && status == TP_OK; i++)
        seconds[i] = copy_all(store, bytes, piece, i % 2 == 0);
    tp_store_close(store, bytes);
    free(piece);
    return status;
}
