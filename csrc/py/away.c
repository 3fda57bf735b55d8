/* Long calls without the GIL, and the signals and aborts that come meanwhile: the only user of csrc/base/deadline.h's listener. */
#include "csrc/py/module.h"

#include <sys/syscall.h>
#include <unistd.h>

/* Only the main thread handles signals: mostly the process's first, and where it is not, Python knows. 1: it is this one, or nobody
 * says; 0; -1: an exception, which a handler has raised while Python was asked. */
static int
is_main(void)
{
    if (syscall(SYS_gettid) == getpid())
        return 1;
    PyObject *name = PyUnicode_FromString("threading"), *threading = name == NULL ? NULL : PyImport_GetModule(name);
    PyObject *thread = threading == NULL ? NULL : PyObject_CallMethod(threading, "main_thread", NULL);
    PyObject *ident = thread == NULL ? NULL : PyObject_GetAttrString(thread, "ident");
    unsigned long main = ident == NULL || ident == Py_None ? 0 : PyLong_AsUnsignedLong(ident);
    Py_XDECREF(name);
    Py_XDECREF(threading);
    Py_XDECREF(thread);
    Py_XDECREF(ident);
    return PyErr_Occurred() ? -1 : main == 0 || main == PyThread_get_thread_ident();
}

/* As Python does between two of its instructions: handlers run here, and what they raise stays set until tp_py_back. By the
 * thread's own state, not by PyGILState, which knows one interpreter alone. */
static int
heard(void *context)
{
    tp_py_away *away = context;
    PyEval_RestoreThread(away->thread);
    int raised = PyErr_CheckSignals() < 0, mine = raised ? 1 : is_main();
    away->thread = PyEval_SaveThread();
    return raised || mine < 0 ? 1 : mine - 1;
}

void
tp_py_leave(tp_py_away *away)
{
    away->thread = PyEval_SaveThread();
    tp_deadline_listen(heard, away, &away->before);
}

static int
heard_abort(void *context)
{
    return tp_region_is_aborted(context);
}

void
tp_py_leave_rank(tp_py_away *away, const tp_region *region)
{
    if (region == NULL) {
        tp_py_leave(away);
        return;
    }
    away->thread = PyEval_SaveThread();
    tp_deadline_listen(heard_abort, (void *)(uintptr_t)region, &away->before);
}

tp_status
tp_py_back(tp_py_away *away, tp_status status)
{
    int told = tp_deadline_was_interrupted();
    tp_deadline_unlisten(&away->before);
    PyEval_RestoreThread(away->thread);
    return told ? TP_EABORTED : status;
}
