/* Status codes and the error message of the calling thread. Source of the pattern: one X-macro, message only at the origin. */
#ifndef TP_BASE_STATUS_H
#define TP_BASE_STATUS_H

/* X(code, Python class, builtin it also inherits, its docstring): csrc/py/convert.c makes the exceptions from this list. */
#define TP_STATUS_MAP(X)                                                                                               \
    X(OK, None, None, "")                                                                                              \
    X(EVALUE, InvalidValueError, ValueError, "An argument's value: names both, and what would be right.")              \
    X(ETYPE, InvalidTypeError, TypeError, "An argument's type: names both, and what would be right.")                  \
    X(EMEMORY, OutOfMemoryError, MemoryError, "The host or a device has no memory left.")                              \
    X(EINFEASIBLE, InfeasibleError, ValueError, "No plan fits: names the binding limit.")                              \
    X(ESCHEDULE, ScheduleError, ValueError, "A program breaks a rule at .rank, .position.")                            \
    X(EIO, StorageError, OSError, "A file, a folder or an address cannot be used.")                                    \
    X(ETIMEOUT, DeadlineError, TimeoutError,                                                                           \
      "A wait took too long: names who waited, or which planner had no time left.")                                    \
    X(ECONNECTION, PeerError, ConnectionError, "A rank is gone or broke the protocol: names it.")                      \
    X(EABORTED, AbortedError, RuntimeError, "Another rank failed, or the run was interrupted.")                        \
    X(ERUNTIME, ExecutionError, RuntimeError, "A rank failed: a loss of NaN, a device, its code.")                     \
    X(EINTERNAL, InternalError, RuntimeError, "A bug of terapipe_c.")

typedef enum {
#define TP_STATUS_ENUM(name, python, builtin, doc) TP_##name,
    TP_STATUS_MAP(TP_STATUS_ENUM)
#undef TP_STATUS_ENUM
        TP_STATUS_COUNT
} tp_status;

#if defined(__GNUC__)
#define TP_MUST_USE __attribute__((warn_unused_result))
#define TP_PRINTF(f, a) __attribute__((format(printf, f, a)))
#else
#define TP_MUST_USE
#define TP_PRINTF(f, a)
#endif

/* Record "message (file:line)" for the calling thread and return `code`. Call it only where an error is first seen. */
tp_status
tp_fail_at(const char *file, int line, tp_status code, const char *format, ...) TP_PRINTF(4, 5);
#define tp_fail(code, ...) tp_fail_at(__FILE__, __LINE__, (code), __VA_ARGS__)

/* Tell every later tp_fail there as well. Two modules that are linked with this file have a message each; the one that is
 * loaded by the other says its own there. */
typedef tp_status (*tp_fail_function)(const char *file, int line, tp_status code, const char *format, ...) TP_PRINTF(4, 5);
void
tp_error_mirror(tp_fail_function other);

/* The calling thread's last message, without file and line; "" if none. Valid until the thread's next tp_fail. */
const char *
tp_error_message(void);
/* "file:line" of the last tp_fail of the calling thread. */
const char *
tp_error_where(void);
/* All of the calling thread's last failure, to be brought back when others have failed in between. */
typedef struct {
    char message[1024], where[160];
    int rank, position;
} tp_error_state;
void
tp_error_save(tp_error_state *out);
void
tp_error_restore(const tp_error_state *saved);
/* A ScheduleError's rank and position; -1 where they do not apply. Set by tp_error_locate right after tp_fail. */
void
tp_error_locate(int rank, int position);
int
tp_error_rank(void);
int
tp_error_position(void);
const char *
tp_status_name(tp_status code);

#define TP_TRY(call)                                                                                                   \
    do {                                                                                                               \
        tp_status tp_try_ = (call);                                                                                    \
        if (tp_try_ != TP_OK)                                                                                          \
            return tp_try_;                                                                                            \
    } while (0)

#endif
