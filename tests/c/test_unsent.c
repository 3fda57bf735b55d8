/* Frames to a reader that reads now and then: whole, in order, whatever of them had to wait; and never a wait of the writer. */
#include "csrc/comm/unsent.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/c/check.h"

enum { LONG = 3000000, WORDS = 4096, TURNS = 60 };

static unsigned char payload[LONG], got[LONG + sizeof(tp_frame)];
static int ends[2];

static unsigned char
byte_of(int frame, size_t i)
{
    return (unsigned char)((i * 31 + i / 251 + (size_t)frame * 7) & 255);
}

static void
fill(int frame, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        payload[i] = byte_of(frame, i);
}

/* All of a frame, while the writer flushes. */
static void
expect(tp_unsent *box, int frame, size_t bytes)
{
    size_t all = sizeof(tp_frame) + bytes;
    for (size_t at = 0; at < all;) {
        ssize_t some = recv(ends[1], got + at, all - at < 50000 ? all - at : 50000, MSG_DONTWAIT);
        CHECK(some > 0 || errno == EAGAIN);
        at += some > 0 ? (size_t)some : 0;
        MUST(tp_unsent_flush(box, ends[0]) == 0);
    }
    tp_frame head;
    memcpy(&head, got, sizeof head);
    CHECK(head.a == (uint64_t)frame && head.bytes == bytes);
    size_t wrong = 0;
    for (size_t i = 0; i < bytes; i++)
        wrong += got[sizeof head + i] != byte_of(frame, i);
    CHECK(wrong == 0);
}

/* A long one that waits, and short ones behind it whose memory is written over at once. */
static void
goes_in_order(tp_unsent *box)
{
    static unsigned char brief[512];
    for (int turn = 0; turn < TURNS; turn++) {
        size_t bytes = turn % 3 ? (size_t)turn * 1000 : LONG;
        fill(turn, bytes);
        tp_frame head = {TP_FRAME_RESULT, bytes, (uint64_t)turn, 0};
        MUST(tp_unsent_put(box, ends[0], &head, payload, 1) == 0);
        CHECK(box->count > 0 || bytes < LONG);
        for (int k = 0; k < 2; k++) {
            size_t few = k ? 0 : sizeof brief;
            for (size_t i = 0; i < few; i++)
                brief[i] = byte_of(1000 + k, i);
            head = (tp_frame){TP_FRAME_ABORT, few, (uint64_t)(1000 + k), 0};
            MUST(tp_unsent_put(box, ends[0], &head, brief, 0) == 0);
            memset(brief, 0, sizeof brief);
            memset(&head, 0, sizeof head);
        }
        expect(box, turn, bytes);
        expect(box, 1000, sizeof brief);
        expect(box, 1001, 0);
        CHECK(box->count == 0 && box->used == 0);
    }
}

static void
is_bounded(tp_unsent *box)
{
    static unsigned char brief[WORDS];
    tp_frame head = {TP_FRAME_RESULT, LONG, 0, 0};
    MUST(tp_unsent_put(box, ends[0], &head, payload, 1) == 0 && box->count > 0);
    head.bytes = WORDS; /* with its head it is more than there is room for */
    CHECK(tp_unsent_put(box, ends[0], &head, brief, 0) < 0 && errno == ENOBUFS);
    box->count = 0;
    box->used = 0;
    head.bytes = 0;
    int frames = 0;
    while (tp_unsent_put(box, ends[0], &head, NULL, 0) == 0 && frames < 100)
        frames++;
    CHECK(errno == ENOBUFS && frames < TP_UNSENT_PIECES);
}

int
main(void)
{
    int bytes = 20000;
    tp_unsent box = {.words = malloc(WORDS), .room = WORDS};
    MUST(box.words != NULL && socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    setsockopt(ends[0], SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
    goes_in_order(&box);
    is_bounded(&box);
    close(ends[1]);
    box.count = 0;
    tp_frame head = {TP_FRAME_BYE, 0, 0, 0};
    CHECK(tp_unsent_put(&box, ends[0], &head, NULL, 0) < 0 && errno == EPIPE);
    close(ends[0]);
    free(box.words);
    return failures != 0;
}
