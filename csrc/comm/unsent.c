#include "csrc/comm/unsent.h"

#include <errno.h>
#include <linux/sockios.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

/* `bytes` of it have gone. */
static void
take_out(tp_unsent *box, size_t bytes)
{
    int whole = 0;
    while (whole < box->count && bytes >= box->piece[whole].bytes)
        bytes -= box->piece[whole++].bytes;
    box->count -= whole;
    memmove(box->piece, box->piece + whole, (size_t)box->count * sizeof *box->piece);
    if (box->count == 0) {
        box->used = 0;
        return;
    }
    box->piece[0].data += bytes;
    box->piece[0].bytes -= bytes;
}

int
tp_unsent_flush(tp_unsent *box, int fd)
{
    while (box->count > 0) {
        struct iovec part[TP_UNSENT_PIECES];
        for (int i = 0; i < box->count; i++) {
            memcpy(&part[i].iov_base, &box->piece[i].data, sizeof(void *)); /* only read */
            part[i].iov_len = box->piece[i].bytes;
        }
        struct msghdr message = {.msg_iov = part, .msg_iovlen = (size_t)box->count};
        ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent >= 0)
            take_out(box, (size_t)sent);
        else if (errno == EAGAIN || errno == EWOULDBLOCK)
            return 0;
        else if (errno != EINTR)
            return -1;
    }
    return 0;
}

/* Copies are made of what is left alone: mostly nothing is. */
static int
keep(tp_unsent *box, tp_piece *piece)
{
    if (piece->bytes > box->room - box->used) {
        errno = ENOBUFS;
        return -1;
    }
    piece->data = memcpy(box->words + box->used, piece->data, piece->bytes);
    box->used += piece->bytes;
    piece->lasts = 1;
    return 0;
}

int
tp_unsent_put(tp_unsent *box, int fd, const tp_frame *head, const void *payload, int lasts)
{
    if (box->count + 2 > TP_UNSENT_PIECES) {
        errno = ENOBUFS;
        return -1;
    }
    box->piece[box->count++] = (tp_piece){(const unsigned char *)head, sizeof *head, 0};
    if (head->bytes > 0)
        box->piece[box->count++] = (tp_piece){payload, head->bytes, lasts};
    if (tp_unsent_flush(box, fd) < 0)
        return -1;
    for (int i = 0; i < box->count; i++)
        if (!box->piece[i].lasts && keep(box, &box->piece[i]) < 0)
            return -1;
    return 0;
}

int
tp_unsent_is_idle(const tp_unsent *box, int fd)
{
    int unsent = 1;
    return box->count == 0 && ioctl(fd, SIOCOUTQ, &unsent) == 0 && unsent == 0;
}
