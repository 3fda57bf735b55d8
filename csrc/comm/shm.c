/* Memory of a region: anonymous for threads, a sealed memfd for processes (no name in /dev/shm that could be left). */
#include "csrc/comm/comm.h"

#include "csrc/base/room.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

tp_status
tp_local_create(size_t bytes, void **memory)
{
    void *mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED)
        return tp_fail(TP_EMEMORY, "no memory for a region of %zu bytes: %s", bytes, strerror(errno));
    *memory = mapped;
    return TP_OK;
}

/* A memfd has no limit of its own: without a look at what there is, an absurd size would first fill the machine, and one beyond
 * the limit of a control group (a container's) would end the process. */
static tp_status
fill_and_seal(int fd, size_t bytes)
{
    tp_room room;
    tp_room_look("", &room);
    if (bytes > room.available)
        return tp_fail(TP_EIO, "shared memory of %zu bytes: %s has %zu bytes available", bytes,
                       room.grouped ? "this process's control group (its container's limit of memory)" : "this machine",
                       room.available);
    if (ftruncate(fd, (off_t)bytes) < 0)
        return tp_fail(TP_EIO, "shared memory of %zu bytes: %s%s", bytes, strerror(errno),
                       errno == EFBIG ? ": a higher limit of a file (ulimit -f), or processes=False, would be right" : "");
    int failure;
    do
        failure = posix_fallocate(fd, 0, (off_t)bytes);
    while (failure == EINTR);
    if (failure != 0)
        return tp_fail(TP_EIO, "shared memory of %zu bytes (%zu available): %s", bytes, room.available, strerror(failure));
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
        return tp_fail(TP_EIO, "shared memory of %zu bytes could not be sealed: %s", bytes, strerror(errno));
    return TP_OK;
}

static tp_status
map(int fd, size_t bytes, void **memory)
{
    void *mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED)
        return tp_fail(TP_EIO, "shared memory of %zu bytes could not be mapped: %s", bytes, strerror(errno));
    *memory = mapped;
    return TP_OK;
}

tp_status
tp_shm_create(size_t bytes, int *fd, void **memory)
{
    int made = memfd_create("terapipe_c", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (made < 0)
        return tp_fail(TP_EIO, "shared memory of %zu bytes: memfd_create: %s", bytes, strerror(errno));
    tp_status status = fill_and_seal(made, bytes);
    if (status == TP_OK)
        status = map(made, bytes, memory);
    if (status != TP_OK)
        close(made);
    else
        *fd = made;
    return status;
}

tp_status
tp_shm_attach(int fd, size_t *bytes, void **memory)
{
    struct stat about;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || fstat(fd, &about) < 0)
        return tp_fail(TP_EIO, "descriptor %d is not shared memory: %s", fd, strerror(errno));
    if ((seals & F_SEAL_SHRINK) == 0) /* a region that can shrink under us is a SIGBUS */
        return tp_fail(TP_EIO, "descriptor %d is shared memory that was not sealed", fd);
    TP_TRY(map(fd, (size_t)about.st_size, memory));
    *bytes = (size_t)about.st_size;
    return TP_OK;
}

void
tp_shm_detach(void *memory, size_t bytes)
{
    if (memory != NULL)
        munmap(memory, bytes);
}
