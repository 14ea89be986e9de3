/* Declarations shared by the C files. */

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-tree-loop-distribute-patterns") /* short loops call no other library's memmove() */
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <structmember.h>

#include "layout.h"

#define COLD __attribute__((noinline, cold))

/* A function in C that sees a call begin, by what was passed by position: a token, NULL with an exception set,
   or OTHER_CASE, with nothing changed, where its Python method has to be called. */
typedef PyObject *(*entry)(PyObject *self, PyObject *const *args, Py_ssize_t count);

extern PyObject other_case;
#define OTHER_CASE (&other_case)

/* decode_path.c: the function in C of a bound method, or NULL. */
entry entry_of(PyObject *enter);
/* The tracker of an object with such a method, borrowed. */
PyObject *tracker_of(PyObject *path);

/* plain_record.c */
PyObject *is_plain(PyObject *module, PyObject *record);

/* watched_call.c: -1 with an exception set. */
int add_watched_call(PyObject *module);
