#include "csrc/base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local tp_error_state last = {.rank = -1, .position = -1};
static tp_fail_function mirror; /* set once, before any work */

tp_status
tp_fail_at(const char *file, int line, tp_status code, const char *format, ...)
{
    va_list arguments;
    char text[sizeof last.message]; /* arguments may point into it (a wrapped error) */
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    memcpy(last.message, text, sizeof last.message);
    snprintf(last.where, sizeof last.where, "%s:%d", file, line);
    last.rank = last.position = -1;
    if (mirror != NULL)
        return mirror(file, line, code, "%s", text);
    return code;
}

void
tp_error_mirror(tp_fail_function other)
{
    mirror = other;
}

const char *
tp_error_message(void)
{
    return last.message;
}

const char *
tp_error_where(void)
{
    return last.where;
}

void
tp_error_save(tp_error_state *out)
{
    *out = last;
}

void
tp_error_restore(const tp_error_state *saved)
{
    last = *saved;
}

void
tp_error_locate(int rank, int position)
{
    last.rank = rank;
    last.position = position;
}

int
tp_error_rank(void)
{
    return last.rank;
}

int
tp_error_position(void)
{
    return last.position;
}

const char *
tp_status_name(tp_status code)
{
    static const char *const names[] = {
#define TP_STATUS_NAME(name, python, builtin, doc) #name,
        TP_STATUS_MAP(TP_STATUS_NAME)
#undef TP_STATUS_NAME
    };
    return (unsigned)code < TP_STATUS_COUNT ? names[code] : "?";
}
