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
