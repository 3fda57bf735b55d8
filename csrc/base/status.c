#include "csrc/base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char message[1024];
static _Thread_local char where[160];
static tp_fail_function mirror; /* set once, before any work */
static _Thread_local int located_rank = -1, located_position = -1;

tp_status
tp_fail_at(const char *file, int line, tp_status code, const char *format, ...)
{
    va_list arguments;
    char text[sizeof message]; /* arguments may point into `message` (a wrapped error) */
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    memcpy(message, text, sizeof message);
    snprintf(where, sizeof where, "%s:%d", file, line);
    located_rank = located_position = -1;
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
    return message;
}

const char *
tp_error_where(void)
{
    return where;
}

void
tp_error_locate(int rank, int position)
{
    located_rank = rank;
    located_position = position;
}

int
tp_error_rank(void)
{
    return located_rank;
}

int
tp_error_position(void)
{
    return located_position;
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
