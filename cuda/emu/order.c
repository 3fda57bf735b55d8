#include "cuda/emu/order.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/simt.h"

enum { FOREIGN = 1024 };

/* The last time that a stream touched these bytes in this way. */
typedef struct {
    uintptr_t begin, end;
    int line, writes;
    int64_t at;
    const char *name;
} touched;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static tp_stream lines[TP_EMU_LINES];
static tp_emu_clock clocks[TP_EMU_LINES]; /* of each stream: how much of all is before its next operation */
static touched *list;
static size_t count, room;
static struct {
    uintptr_t begin, end;
} foreign[FOREIGN];
static int foreign_most; /* none lies from here on */
static __thread tp_emu_clock host; /* what this thread has waited for */

/* All below with the lock held, but for what device.c calls. */

static int
line_of(tp_stream stream)
{
    for (int i = 0; stream != NULL && i < TP_EMU_LINES; i++)
        if (lines[i] == stream)
            return i;
    return -1;
}

static void
join(tp_emu_clock *to, const tp_emu_clock *from)
{
    for (int i = 0; i < TP_EMU_LINES; i++)
        if (to->at[i] < from->at[i])
            to->at[i] = from->at[i];
}

static int
is_device(uintptr_t at)
{
    uintptr_t range[2];
    if (tp_simt_range_of((const void *)at, 1, range) && range[0] != 0)
        return 1;
    for (int i = 0; i < foreign_most; i++)
        if (foreign[i].begin <= at && at < foreign[i].end)
            return 1;
    return 0;
}

static void
remember(const touched *now)
{
    if (count == room) {
        size_t more = room == 0 ? 256 : 2 * room;
        touched *grown = realloc(list, more * sizeof *grown);
        if (grown == NULL)
            return;
        list = grown;
        room = more;
    }
    list[count++] = *now;
}

static tp_status
touch(int line, const char *name, const void *pointer, size_t bytes, int writes)
{
    touched now = {(uintptr_t)pointer, (uintptr_t)pointer + bytes, line, writes, clocks[line].at[line], name};
    if (bytes == 0 || !is_device(now.begin))
        return TP_OK;
    touched *same = NULL;
    for (size_t i = 0; i < count; i++) {
        touched *before = &list[i];
        if (before->line == line) {
            if (before->begin == now.begin && before->end == now.end && before->writes == writes)
                same = before;
        } else if (before->begin < now.end && now.begin < before->end && (writes || before->writes) &&
                   before->at > clocks[line].at[before->line])
            return tp_fail(TP_ERUNTIME, "emulated streams: \"%s\" on one and \"%s\" on another touch the same %zu bytes at %p, and neither "
                           "waits for the other", before->name, name, bytes, pointer);
    }
    if (same != NULL)
        *same = now;
    else
        remember(&now);
    return TP_OK;
}

/* -1: nobody follows it. */
static int
begin(tp_stream stream)
{
    int line = line_of(stream);
    if (line >= 0) {
        join(&clocks[line], &host);
        clocks[line].at[line]++;
    }
    return line;
}

static tp_status
touch_rows(int line, const char *name, const void *pointer, size_t pitch, size_t bytes, size_t rows, int writes)
{
    tp_status status = TP_OK;
    if (pitch == bytes)
        return touch(line, name, pointer, bytes * rows, writes);
    for (size_t r = 0; status == TP_OK && r < rows; r++)
        status = touch(line, name, (const char *)pointer + r * pitch, bytes, writes);
    return status;
}

static tp_status
touch_copy(int line, const char *name, const tp_emu_copy *c)
{
    tp_status status = touch_rows(line, name, c->from, c->from_pitch, c->row_bytes, c->rows, 0);
    return status == TP_OK ? touch_rows(line, name, c->to, c->to_pitch, c->row_bytes, c->rows, 1) : status;
}

static tp_status
touch_arguments(int line, const char *name, const void *body, size_t bytes)
{
    tp_status status = TP_OK;
    for (size_t i = 0; status == TP_OK && i + sizeof(void *) <= bytes; i += sizeof(void *)) {
        void *word;
        memcpy(&word, (const char *)body + i, sizeof word);
        status = touch(line, name, word, 1, 1);
    }
    return status;
}

/* ---- what device.c, graph.c and false libraries say ------------------------------------------------------------------------- */

void
tp_emu_order_stream(tp_stream stream, int begins)
{
    pthread_mutex_lock(&lock);
    int line = line_of(begins ? NULL : stream);
    for (int i = 0; begins && line < 0 && i < TP_EMU_LINES; i++)
        if (lines[i] == NULL)
            line = i;
    if (line >= 0)
        lines[line] = begins ? stream : NULL;
    pthread_mutex_unlock(&lock);
}

tp_status
tp_emu_order_do(tp_stream stream, const char *name, const void *body, size_t bytes)
{
    tp_status status = TP_OK;
    pthread_mutex_lock(&lock);
    int line = begin(stream);
    if (line >= 0 && strcmp(name, "copy") == 0)
        status = touch_copy(line, name, body);
    else if (line >= 0 && strcmp(name, "fill") == 0)
        status = touch(line, name, ((const tp_emu_fill *)body)->memory, ((const tp_emu_fill *)body)->bytes, 1);
    else if (line >= 0)
        status = touch_arguments(line, name, body, bytes);
    pthread_mutex_unlock(&lock);
    return status;
}

tp_status
tp_emu_order_touch(tp_stream stream, const char *name, const void *pointer, size_t bytes, int writes)
{
    pthread_mutex_lock(&lock);
    int line = begin(stream);
    tp_status status = line < 0 ? TP_OK : touch(line, name, pointer, bytes, writes);
    pthread_mutex_unlock(&lock);
    return status;
}

static void
forget(uintptr_t from, uintptr_t to)
{
    size_t kept = 0;
    for (size_t i = 0; i < count; i++)
        if (list[i].end <= from || to <= list[i].begin)
            list[kept++] = list[i];
    count = kept;
}

void
tp_emu_order_forget(const void *pointer, size_t bytes)
{
    pthread_mutex_lock(&lock);
    forget((uintptr_t)pointer, (uintptr_t)pointer + bytes);
    pthread_mutex_unlock(&lock);
}

/* Has this thread not waited for all that touched these bytes? */
static int
is_busy(uintptr_t from, uintptr_t to)
{
    for (size_t i = 0; i < count; i++)
        if (list[i].begin < to && from < list[i].end && list[i].at > host.at[list[i].line])
            return 1;
    return 0;
}

int
tp_emu_order_foreign(const void *pointer, size_t bytes, int gives)
{
    uintptr_t wanted = gives ? 0 : (uintptr_t)pointer;
    int i = 0, busy = 0;
    pthread_mutex_lock(&lock);
    while (i < FOREIGN && foreign[i].begin != wanted)
        i++;
    if (i < FOREIGN) {
        busy = !gives && is_busy(foreign[i].begin, foreign[i].end);
        if (!gives)
            forget(foreign[i].begin, foreign[i].end);
        foreign[i].begin = gives ? (uintptr_t)pointer : 0;
        foreign[i].end = gives ? (uintptr_t)pointer + bytes : 0;
        foreign_most = foreign_most > i ? foreign_most : i + 1;
    }
    pthread_mutex_unlock(&lock);
    return busy;
}

void
tp_emu_order_record(tp_stream stream, tp_emu_clock *clock)
{
    pthread_mutex_lock(&lock);
    int line = line_of(stream);
    if (line >= 0)
        *clock = clocks[line];
    pthread_mutex_unlock(&lock);
}

void
tp_emu_order_wait(tp_stream stream, const tp_emu_clock *clock)
{
    pthread_mutex_lock(&lock);
    int line = line_of(stream);
    if (line >= 0)
        join(&clocks[line], clock);
    pthread_mutex_unlock(&lock);
}

void
tp_emu_order_host_stream(tp_stream stream)
{
    pthread_mutex_lock(&lock);
    int line = line_of(stream);
    if (line >= 0)
        join(&host, &clocks[line]);
    pthread_mutex_unlock(&lock);
}

void
tp_emu_order_host_event(const tp_emu_clock *clock)
{
    pthread_mutex_lock(&lock);
    join(&host, clock);
    pthread_mutex_unlock(&lock);
}
