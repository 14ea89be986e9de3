/* A woven function with one observer in C, called without a frame of its own (CPython 3.12 and newer).

   Cold caches make a Python frame that packs and unpacks arguments cost two microseconds and more. The code of
   such a woven function ends its constants with a WatchedCall: the same chain and hooks that its Python code
   calls, with the same care for what they raise. Where Python calls the function through its vectorcall,
   call_watched() runs them; torch.compile, which reads the code, finds the Python. */

#include "native.h"

#if PY_VERSION_HEX < 0x030C0000

int
add_watched_call(PyObject *Py_UNUSED(module))
{
    return 0; /* CPython 3.11 runs the code of a function whatever its vectorcall is */
}

#else

typedef struct {
    PyObject_HEAD
    PyObject *chain; /* first what each call touches */
    entry entry, leave; /* in C; NULL: by a call of the object */
    PyObject *entering, *leaving; /* what they are methods of */
    const char *ahead; /* the tracker that they begin with */
    unsigned long long calls;
    PyObject *enter, *exit, *failed;
} WatchedCall;

static PyTypeObject *watched_type;
static vectorcallfunc plain_call;

/* The result of `failed` for the exception that is set, as in an except block: NULL if it is not an Exception, or
   `failed` raises. */
static COLD PyObject *
contain(PyObject *failed)
{
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return NULL;
    PyObject *error = PyErr_GetRaisedException(), *outer = PyErr_GetHandledException();
    PyErr_SetHandledException(error);
    PyObject *result = PyObject_CallOneArg(failed, error);
    PyErr_SetHandledException(outer);
    Py_XDECREF(outer);
    Py_DECREF(error);
    return result;
}

/* The arguments as Python hooks see them: a tuple, and a dictionary of their own. */
static __attribute__((noinline)) PyObject *
call_packed(PyObject *enter, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    PyObject *token = NULL, *packed[2] = {PyTuple_New(count), PyDict_New()};
    if (packed[0] == NULL || packed[1] == NULL)
        goto done;
    for (Py_ssize_t i = 0; i < count; i++)
        PyTuple_SET_ITEM(packed[0], i, Py_NewRef(args[i]));
    for (Py_ssize_t i = 0; names != NULL && i < PyTuple_GET_SIZE(names); i++)
        if (PyDict_SetItem(packed[1], PyTuple_GET_ITEM(names, i), args[count + i]) < 0)
            goto done;
    token = PyObject_Vectorcall(enter, packed, 2, NULL);
done:
    Py_XDECREF(packed[0]);
    Py_XDECREF(packed[1]);
    return token;
}

static PyObject *
begin(WatchedCall *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    if (self->entry == NULL && self->enter == Py_None)
        return Py_NewRef(Py_None);
    PyObject *token = self->entry == NULL ? OTHER_CASE : self->entry(self->entering, args, count);
    if (token == OTHER_CASE)
        token = call_packed(self->enter, args, count, names);
    return token == NULL ? contain(self->failed) : token;
}

/* 0 with an exception set if the exit raises something other than an Exception. */
static int
end(WatchedCall *self, PyObject *token, PyObject *result, PyObject *error)
{
    if (self->exit == Py_None || token == self->failed) /* the token of an enter() that raised */
        return 1;
    PyObject *args[] = {token, result, error}, *done;
    done = self->leave ? self->leave(self->leaving, args, 3) : PyObject_Vectorcall(self->exit, args, 3, NULL);
    if (done == NULL)
        done = contain(self->failed);
    Py_XDECREF(done);
    return done != NULL;
}

/* The end of a call that has raised; the exception is set again, or another. */
static COLD void
end_raising(WatchedCall *self, PyObject *token)
{
    PyObject *error = PyErr_GetRaisedException(), *outer = PyErr_GetHandledException();
    PyErr_SetHandledException(error);
    int done = end(self, token, Py_None, error);
    PyErr_SetHandledException(outer);
    Py_XDECREF(outer);
    if (done)
        PyErr_SetRaisedException(error);
    else
        Py_DECREF(error);
}

static PyObject *
call_watched(PyObject *function, PyObject *const *args, size_t nargsf, PyObject *names)
{
    PyObject *constants = ((PyCodeObject *)PyFunction_GET_CODE(function))->co_consts;
    Py_ssize_t last = PyTuple_GET_SIZE(constants) - 1;
    if (last < 0 || !Py_IS_TYPE(PyTuple_GET_ITEM(constants, last), watched_type))
        return plain_call(function, args, nargsf, names);
    /* The call keeps the hooks with which it begins. */
    WatchedCall *self = (WatchedCall *)Py_NewRef(PyTuple_GET_ITEM(constants, last));
    if (self->ahead != NULL) { /* all at once, not one after the other */
        __builtin_prefetch(self->entering);
        __builtin_prefetch(self->ahead);
        __builtin_prefetch(self->ahead + 64);
        __builtin_prefetch(self->ahead + 128);
        __builtin_prefetch(self->chain);
    }
    self->calls++;
    PyObject *result = NULL, *token = begin(self, args, PyVectorcall_NARGS(nargsf), names);
    if (token != NULL) {
        /* Nearly always a function: what PyObject_Vectorcall() looks up of its type is evicted. */
        vectorcallfunc call = PyObject_Vectorcall;
        if (PyFunction_Check(self->chain) && ((PyFunctionObject *)self->chain)->vectorcall != NULL)
            call = ((PyFunctionObject *)self->chain)->vectorcall;
        result = call(self->chain, args, nargsf, names);
        if (result == NULL)
            end_raising(self, token);
        else if (!end(self, token, result, Py_None))
            Py_CLEAR(result);
        Py_DECREF(token);
    }
    Py_DECREF(self);
    return result;
}

/* WatchedCall(function, chain, enter, exit, failed) */
static PyObject *
WatchedCall_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyFunctionObject *function;
    PyObject *chain, *enter, *exit, *failed;
    if (!PyArg_ParseTuple(args, "O!OOOO", &PyFunction_Type, &function, &chain, &enter, &exit, &failed))
        return NULL;
    WatchedCall *self = (WatchedCall *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->chain = Py_NewRef(chain);
    self->enter = Py_NewRef(enter);
    self->exit = Py_NewRef(exit);
    self->failed = Py_NewRef(failed);
    self->entry = entry_of(enter);
    if (self->entry != NULL) {
        self->entering = PyCFunction_GET_SELF(enter);
        self->ahead = (const char *)tracker_of(self->entering);
    }
    if (PyCFunction_Check(exit) && PyCFunction_GET_FLAGS(exit) == METH_FASTCALL) {
        self->leave = (entry)(void (*)(void))PyCFunction_GET_FUNCTION(exit);
        self->leaving = PyCFunction_GET_SELF(exit);
    }
    if (function->vectorcall != call_watched) {
        plain_call = function->vectorcall; /* CPython's, the same for every function */
        PyFunction_SetVectorcall(function, call_watched);
    }
    return (PyObject *)self;
}

static void
WatchedCall_dealloc(PyObject *object)
{
    WatchedCall *self = (WatchedCall *)object;
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(self->chain);
    Py_XDECREF(self->enter);
    Py_XDECREF(self->exit);
    Py_XDECREF(self->failed);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMemberDef WatchedCall_members[] = {
    {"calls", T_ULONGLONG, offsetof(WatchedCall, calls), READONLY, "How many calls it has seen."},
    {NULL, 0, 0, 0, NULL}};
/* Not collected, like the code objects that hold it. */
static PyType_Slot watched_slots[] = {
    {Py_tp_new, WatchedCall_new}, {Py_tp_dealloc, WatchedCall_dealloc}, {Py_tp_members, WatchedCall_members}, {0, NULL}};
static PyType_Spec watched_spec = {"sgl_aspects.tracing.record.native.WatchedCall", sizeof(WatchedCall), 0,
                                   Py_TPFLAGS_DEFAULT, watched_slots};

int
add_watched_call(PyObject *module)
{
    watched_type = (PyTypeObject *)PyType_FromSpec(&watched_spec);
    return watched_type == NULL ? -1 : PyModule_AddObjectRef(module, "WatchedCall", (PyObject *)watched_type);
}

#endif
