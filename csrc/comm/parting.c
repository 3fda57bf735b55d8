#include "csrc/comm/parting.h"

#include <string.h>

#include "csrc/base/clock.h"
#include "csrc/comm/socket.h"

#define WORD_NS 200000000ll

/* What a rank that has hung up said before, as a message: 1. What else it sent is in vain; it may have had a thread. */
static int
last_words(int fd, tp_frame *head, char text[512])
{
    int64_t until = tp_clock_ns() + WORD_NS;
    while (tp_socket_read(fd, head, sizeof *head, until) == 0) {
        int is_abort = head->kind == TP_FRAME_ABORT && head->bytes < 512;
        for (uint64_t left = head->bytes; left > 0;) {
            size_t some = left < 511 ? left : 511;
            if (tp_socket_read(fd, text, some, until) < 0)
                return 0;
            text[some] = 0;
            left -= some;
        }
        if (is_abort)
            return 1;
    }
    return 0;
}

void
tp_parting_say(const int *control, int ranks, int rank, tp_status status)
{
    struct {
        tp_frame head;
        char text[511];
    } word = {.head = {TP_FRAME_ABORT, strlen(tp_error_message()), (uint64_t)status, (uint64_t)(rank + 1)}};
    if (word.head.bytes > sizeof word.text)
        word.head.bytes = sizeof word.text;
    memcpy(word.text, tp_error_message(), word.head.bytes);
    for (int i = 0; i < ranks; i++)
        if (control[i] >= 0)
            (void)tp_socket_write(control[i], &word, sizeof word.head + word.head.bytes, tp_clock_ns() + WORD_NS);
}

tp_status
tp_parting_hear(const int *control, int ranks, int *who)
{
    for (int i = 0; i < ranks; i++) {
        if (control[i] < 0 || !tp_socket_hung_up(control[i]))
            continue;
        tp_frame head;
        char text[512] = "";
        *who = i;
        if (!last_words(control[i], &head, text))
            return tp_fail(TP_ECONNECTION, "rank %d left during the meeting", i);
        if (head.b >= 1 && head.b <= (uint64_t)ranks)
            *who = (int)head.b - 1;
        return tp_fail(TP_ECONNECTION, "%s", text);
    }
    return TP_OK;
}
