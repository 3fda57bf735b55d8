/* The end of a rank 0 whose other rank reads late what was gathered: it has all of it, and then the time for a goodbye, too. */
#include "csrc/comm/control.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "csrc/base/clock.h"
#include "csrc/comm/parting.h"
#include "csrc/comm/socket.h"
#include "tests/c/check.h"

enum { BYTES = 4000000, LATE_NS = 1500000000, LINGER_NS = 900000000 };
#define LONG_NS 30000000000ll

static int64_t closed_ns;

static void *
end(void *control)
{
    tp_control_close(control);
    closed_ns = tp_clock_ns();
    return NULL;
}

int
main(void)
{
    const uint8_t pairs[4] = {0};
    const tp_region_shape shape = {2, pairs, 0, 64, NULL};
    int ends[2], fds[2] = {-1, -1};
    void *memory;
    size_t bytes;
    tp_region *region;
    tp_control *control;
    pthread_t thread;
    alarm(60);
    MUST(tp_region_bytes(&shape, &bytes) == TP_OK && tp_local_create(bytes, &memory) == TP_OK);
    MUST(tp_region_create(memory, bytes, &shape, &region) == TP_OK);
    MUST(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
    fds[1] = ends[0];
    const tp_comm comm = {.rank = 0, .ranks = 2};
    MUST(tp_control_open(&comm, fds, BYTES, LONG_NS, region, &control) == TP_OK);
    unsigned char *mine = calloc(1, BYTES), *all = calloc(2, BYTES);
    MUST(mine != NULL && all != NULL);
    tp_frame head = {TP_FRAME_GATHER, BYTES, 0, 0};
    MUST(tp_socket_write(ends[1], &head, sizeof head, tp_clock_ns() + LONG_NS) == 0);
    MUST(tp_socket_write(ends[1], mine, BYTES, tp_clock_ns() + LONG_NS) == 0);
    MUST(tp_control_gather(control, mine, BYTES, all) == TP_OK);
    MUST(pthread_create(&thread, NULL, end, control) == 0);
    tp_clock_sleep_until(tp_clock_ns() + LATE_NS);
    int64_t read_ns = tp_clock_ns();
    do { /* tables may come before */
        MUST(tp_socket_read(ends[1], &head, sizeof head, tp_clock_ns() + LONG_NS) == 0);
        MUST(head.bytes <= 2 * (BYTES + 8) && (all = realloc(all, head.bytes + 1)) != NULL);
        MUST(tp_socket_read(ends[1], all, head.bytes, tp_clock_ns() + LONG_NS) == 0);
    } while (head.kind != TP_FRAME_RESULT);
    CHECK(head.bytes == 2 * (BYTES + 8));
    MUST(tp_socket_read(ends[1], &head, sizeof head, tp_clock_ns() + LONG_NS) == 0 && head.kind == TP_FRAME_BYE);
    MUST(pthread_join(thread, NULL) == 0);
    CHECK(closed_ns - read_ns >= LINGER_NS);
    close(ends[0]);
    close(ends[1]);
    free(mine);
    free(all);
    tp_shm_detach(memory, bytes);
    return failures != 0;
}
