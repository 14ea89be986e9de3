/* Records a decode step that repeats the one before, without running any Python.

   Between two steps of an engine the model and the scheduler evict every cache: the cost of a step's record is
   the number of pieces of code and memory it touches, and each Python function is a dozen of them. Here
   are the functions of observers/steps.py and observers/forward.py for the plain case only. In any other
   (prompts, another batch, an error, another level, a full ring) the Python method is called with the same
   arguments, before anything has been changed. The Python classes inherit their fields from these types.

   Compiled for one version of CPython. */

#include "native.h"

#include <stdint.h>
#include <string.h>
#include <time.h>

static inline uint64_t
now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline int
is_none(PyObject *object)
{
    return object == NULL || object == Py_None;
}

static inline void
replace(PyObject **place, PyObject *value)
{
    PyObject *old = *place;
    Py_XINCREF(value);
    *place = value;
    Py_XDECREF(old);
}

/* -- types of fields ------------------------------------------------------------------------------------- */

/* Each type's object fields are contiguous: the garbage collector needs only the first of them and their
   number. */
#define COLLECTED(type, first, count)                                                                      \
    static int type##_traverse(PyObject *self, visitproc visit, void *arg)                                \
    {                                                                                                      \
        PyObject **fields = (PyObject **)((char *)self + offsetof(type, first));                           \
        for (int i = 0; i < (count); i++)                                                                  \
            Py_VISIT(fields[i]);                                                                           \
        Py_VISIT(Py_TYPE(self));                                                                           \
        return 0;                                                                                          \
    }                                                                                                      \
    static int type##_clear(PyObject *self)                                                                \
    {                                                                                                      \
        PyObject **fields = (PyObject **)((char *)self + offsetof(type, first));                           \
        for (int i = 0; i < (count); i++)                                                                  \
            Py_CLEAR(fields[i]);                                                                           \
        return 0;                                                                                          \
    }                                                                                                      \
    static void type##_dealloc(PyObject *self)                                                             \
    {                                                                                                      \
        PyTypeObject *type_object = Py_TYPE(self);                                                         \
        PyObject_GC_UnTrack(self);                                                                         \
        type##_clear(self);                                                                                \
        type_object->tp_free(self);                                                                        \
        Py_DECREF(type_object);                                                                            \
    }                                                                                                      \
    static PyType_Slot type##_slots[] = {{Py_tp_traverse, type##_traverse},                                \
                                         {Py_tp_clear, type##_clear},                                      \
                                         {Py_tp_dealloc, type##_dealloc},                                  \
                                         {Py_tp_members, type##_members},                                  \
                                         {Py_tp_methods, type##_methods},                                  \
                                         {0, NULL}};                                                       \
    static PyType_Spec type##_spec = {"sgl_aspects.tracing.record.native." #type, sizeof(type), 0,                \
                                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,       \
                                      type##_slots};

#define OBJECT(type, name) {#name, T_OBJECT, offsetof(type, name), 0, NULL}
#define NUMBER(type, name) {#name, T_ULONGLONG, offsetof(type, name), 0, NULL}
#define SIZE(type, name) {#name, T_PYSSIZET, offsetof(type, name), 0, NULL}
#define FLAG(type, name) {#name, T_BOOL, offsetof(type, name), 0, NULL}
#define END {NULL, 0, 0, 0, NULL}

/* The memory in which steps are open. */
typedef struct {
    PyObject_HEAD
    PyObject *mapped;
    uint64_t *words; /* NULL: no longer writable */
} Blocks;

/* The free slots. */
typedef struct {
    PyObject_HEAD
    PyObject *mapped;
    char *address;
    Py_ssize_t offset; /* of the next slot */
    unsigned long long number, last;
} Slots;

typedef struct {
    PyObject_HEAD
    PyObject *steps, *words, *batch, *result, *prefill, *events, *spans, *drafts, *verified;
    unsigned long long id;
    Py_ssize_t block, child;
    char is_announced, is_recorded;
} Step;

typedef struct {
    PyObject_HEAD
    PyObject *steps, *running, *in_flight, *late, *details, *spare, *spare_events;
    unsigned long long last_id, schedule_start, schedule_end, level, group, mode_text, untimed;
    char finishing, has_passes;
} Tracker;

typedef struct {
    PyObject_HEAD
    PyObject *tracker, *slots, *requests, *preempted, *busy, *mode, *reqs;
    /* Of a batch: an attribute's name, or a function; None where a batch has none. The summary is a tuple of mode
       and requests. */
    PyObject *summary_source, *mode_source, *reqs_source, *number_source, *id_source;
    /* Attributes of a batch that show that it repeats the one before, which decoded the requests with these ids. */
    PyObject *repeat_of, *repeat_ids, *repeat_count, *repeat_unless, *decoding;
    /* Where its drafts are: see Drafts in engines/base.py; and the counts of the requests with these ids. */
    PyObject *drafts_of, *drafts_rows, *drafts_row_of, *drafts_each, *drafts_width, *drafts_unless, *drafts;
    Py_ssize_t ran_at, processing_at, processed_at, result_at, size, known;
    unsigned long long read_ns, waiting, running, usage, scheduling;
    char decodes, measures;
} StepPath;

typedef struct {
    PyObject_HEAD
    PyObject *tracker, *step, *events, *stream, *met_runner, *met_steps;
    Py_ssize_t runner_at;
    unsigned long long stream_handle, eager_text, replayed_text, device_text, passes, expects, replays;
    char has_begun, has_ended, has_parts, has_events, is_joined, is_beside, has_replayed;
} ForwardPath;

/* One child of a step, in which a draft model's passes are not the step's. */
typedef struct {
    PyObject_HEAD
    PyObject *tracker, *forward;
    Py_ssize_t child, start, before;
} DraftPath;

/* An event of the device, recorded by a function in C. */
typedef struct {
    PyObject_HEAD
    PyObject *owner; /* keeps the event alive */
    unsigned long long function, elapsed, event;
} Mark;

/* The drafts of a request: the tokens, and how many drafts had exactly so many accepted ones. */
typedef struct {
    PyObject_HEAD
    unsigned long long drafted;
    uint32_t *exactly; /* `few`, unless a draft was longer */
    size_t size;
    uint32_t few[10];
} DraftCounts;

static PyTypeObject *mark_type, *forward_type, *counts_type;

/* One of these types, and the class in Python that inherits from it, as met: looking through its bases
   touches a dozen cache lines. */
typedef struct {
    PyTypeObject *base, *met;
} Kind;

static Kind blocks_kind, slots_kind, step_kind, tracker_kind;

static COLD int
meet(PyTypeObject *type, Kind *kind)
{
    if (!PyType_IsSubtype(type, kind->base))
        return 0;
    PyTypeObject *before = kind->met;
    kind->met = (PyTypeObject *)Py_NewRef(type);
    Py_XDECREF(before);
    return 1;
}

static inline int
is_a(PyObject *object, Kind *kind)
{
    return Py_IS_TYPE(object, kind->met) || meet(Py_TYPE(object), kind);
}

/* Takes an item out of a list, with the list's reference. */
static inline PyObject *
take(PyObject *list, Py_ssize_t at)
{
    PyObject **items = ((PyListObject *)list)->ob_item, *item = items[at];
    Py_ssize_t left = PyList_GET_SIZE(list) - 1;
    for (; at < left; at++)
        items[at] = items[at + 1];
    Py_SET_SIZE(list, left);
    return item;
}

/* As PyList_Append(), but a call into Python's code only where the list has to grow. */
static inline int
append(PyObject *list, PyObject *item)
{
    PyListObject *self = (PyListObject *)list;
    Py_ssize_t size = PyList_GET_SIZE(list);
    if (size >= self->allocated)
        return PyList_Append(list, item);
    self->ob_item[size] = Py_NewRef(item);
    Py_SET_SIZE(list, size + 1);
    return 0;
}

/* The words of a step's block; NULL if they are not, or no longer, a ring's memory. */
static inline uint64_t *
words_of(Step *step)
{
    if (is_none(step->steps) || !is_a(step->steps, &blocks_kind))
        return NULL;
    uint64_t *words = ((Blocks *)step->steps)->words;
    return words == NULL ? NULL : words + step->block;
}

static inline int
is_step(PyObject *object)
{
    return !is_none(object) && is_a(object, &step_kind);
}

/* An object's attribute; NULL without an exception if it has none. */
static inline PyObject *
attribute_of(PyObject *object, PyObject *name)
{
    PyObject *found = name != NULL && PyUnicode_CheckExact(name) ? PyObject_GetAttr(object, name) : NULL;
    if (found == NULL)
        PyErr_Clear();
    return found;
}

/* An object's attribute, or a function's result for it. */
static inline PyObject *
read_from(PyObject *object, PyObject *source)
{
    return PyUnicode_CheckExact(source) ? PyObject_GetAttr(object, source)
                                        : PyObject_CallOneArg(source, object);
}

static COLD PyObject *
call_method(PyObject *self, PyObject *name, PyObject *const *args, Py_ssize_t count)
{
    PyObject *all[4] = {self, NULL, NULL, NULL};
    memcpy(all + 1, args, (size_t)count * sizeof(PyObject *));
    return PyObject_VectorcallMethod(name, all, (size_t)count + 1, NULL);
}

/* As a step's record has it: 0 is unknown. */
static inline uint64_t
number_of(PyObject *object)
{
    uint64_t number = is_none(object) ? 0 : PyLong_AsUnsignedLongLong(object) + 1;
    if (!number)
        PyErr_Clear();
    return number;
}

/* -- Blocks ------------------------------------------------------------------------------------------------ */

/* The address of a writable object, which is kept alive and as large as it is while the address is used. The
   buffer is given back at once: a file that is closed, in a forked child, must not find its memory in use. */
static void *
address_of(PyObject *memory, Py_ssize_t at_least)
{
    Py_buffer view;
    if (PyObject_GetBuffer(memory, &view, PyBUF_WRITABLE) < 0)
        return NULL;
    void *address = view.buf;
    if (view.len < at_least) {
        PyErr_Format(PyExc_ValueError, "%zd bytes of memory are not enough: %zd", view.len, at_least);
        address = NULL;
    }
    PyBuffer_Release(&view);
    return address;
}

static PyObject *
Blocks_map(PyObject *self, PyObject *memory)
{
    uint64_t *words = address_of(memory, HEADER_BYTES);
    if (words == NULL)
        return NULL;
    replace(&((Blocks *)self)->mapped, memory);
    ((Blocks *)self)->words = words;
    Py_RETURN_NONE;
}

static PyObject *
Blocks_retire(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    ((Blocks *)self)->words = NULL;
    Py_CLEAR(((Blocks *)self)->mapped);
    Py_RETURN_NONE;
}

static PyMemberDef Blocks_members[] = {END};
static PyMethodDef Blocks_methods[] = {
    {"map", Blocks_map, METH_O, "Steps are open in this memory."},
    {"retire", Blocks_retire, METH_NOARGS, "The memory may go: only Python writes there from now on."},
    {NULL, NULL, 0, NULL}};
COLLECTED(Blocks, mapped, 1)

/* -- Slots ------------------------------------------------------------------------------------------------- */

static PyObject *
Slots_hand_out(PyObject *object, PyObject *args)
{
    Slots *self = (Slots *)object;
    PyObject *memory;
    unsigned long long first, last;
    Py_ssize_t offset;
    if (!PyArg_ParseTuple(args, "KKOn", &first, &last, &memory, &offset))
        return NULL;
    char *address = NULL;
    if (last >= first) {
        address = address_of(memory, offset + (Py_ssize_t)(last - first + 1) * SLOT_BYTES);
        if (address == NULL)
            return NULL;
    }
    replace(&self->mapped, memory);
    self->address = address;
    self->offset = offset;
    self->number = first;
    self->last = address == NULL ? 0 : last;
    Py_RETURN_NONE;
}

static PyObject *
Slots_take(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    Slots *self = (Slots *)object;
    if (self->number > self->last || self->address == NULL) {
        PyErr_SetNone(PyExc_StopIteration);
        return NULL;
    }
    unsigned long long number = self->number++;
    Py_ssize_t offset = self->offset;
    self->offset += SLOT_BYTES;
    return Py_BuildValue("KOn", number, self->mapped, offset);
}

static PyObject *
Slots_left(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    Slots *self = (Slots *)object;
    int none = self->address == NULL || self->number > self->last;
    return PyLong_FromUnsignedLongLong(none ? 0 : self->last - self->number + 1);
}

static PyMemberDef Slots_members[] = {END};
static PyMethodDef Slots_methods[] = {
    {"hand_out", Slots_hand_out, METH_VARARGS, "These numbers, from this place of the memory on."},
    {"take", Slots_take, METH_NOARGS, "The next number, its memory and the place there; or StopIteration."},
    {"__length_hint__", Slots_left, METH_NOARGS, "How many are at hand."},
    {NULL, NULL, 0, NULL}};
COLLECTED(Slots, mapped, 1)

/* -- Step and tracker: fields only ------------------------------------------------------------------------- */

static PyMemberDef Step_members[] = {
    OBJECT(Step, steps), OBJECT(Step, words), OBJECT(Step, batch), OBJECT(Step, result),
    OBJECT(Step, prefill), OBJECT(Step, events), OBJECT(Step, spans),
    OBJECT(Step, drafts), OBJECT(Step, verified), NUMBER(Step, id), SIZE(Step, block), SIZE(Step, child),
    FLAG(Step, is_announced), FLAG(Step, is_recorded), END};
static PyMethodDef Step_methods[] = {{NULL, NULL, 0, NULL}};
COLLECTED(Step, steps, 9)

static PyMemberDef Tracker_members[] = {
    OBJECT(Tracker, steps), OBJECT(Tracker, running), OBJECT(Tracker, in_flight), OBJECT(Tracker, late),
    OBJECT(Tracker, details), OBJECT(Tracker, spare), OBJECT(Tracker, spare_events),
    NUMBER(Tracker, last_id), NUMBER(Tracker, schedule_start), NUMBER(Tracker, schedule_end), NUMBER(Tracker, level),
    NUMBER(Tracker, group), NUMBER(Tracker, mode_text), NUMBER(Tracker, untimed), FLAG(Tracker, finishing), FLAG(Tracker, has_passes), END};
static PyMethodDef Tracker_methods[] = {{NULL, NULL, 0, NULL}};
COLLECTED(Tracker, steps, 7)

static inline int
has_any(PyObject *list)
{
    return list != NULL && PyList_CheckExact(list) && PyList_GET_SIZE(list) > 0;
}

/* The tracker if it is one; else NULL. */
static inline Tracker *
tracker_in(PyObject *object)
{
    return is_none(object) || !is_a(object, &tracker_kind) ? NULL : (Tracker *)object;
}

/* Whether it is a list: one is looked at only where it is used, for it is memory of its own. */
static inline int
is_list(PyObject *object)
{
    return object != NULL && PyList_CheckExact(object);
}

/* -- events of a device ----------------------------------------------------------------------------------- */

static PyMemberDef Mark_members[] = {
    OBJECT(Mark, owner), NUMBER(Mark, function), NUMBER(Mark, elapsed), NUMBER(Mark, event), END};
static PyMethodDef Mark_methods[] = {{NULL, NULL, 0, NULL}};
COLLECTED(Mark, owner, 1)

typedef int (*recorder)(void *event, void *stream);
typedef int (*timer)(float *milliseconds, void *begin, void *end);

/* The milliseconds between a step's events, below 0: not available here, or not yet. The events are two functions of
   the stream, one for the time between them, and the same two as marks where they can be. */
static float
elapsed(PyObject *events)
{
    if (!PyTuple_Check(events) || PyTuple_GET_SIZE(events) < 5)
        return -1;
    Mark *begin = (Mark *)PyTuple_GET_ITEM(events, 3), *end = (Mark *)PyTuple_GET_ITEM(events, 4);
    float milliseconds = -1;
    if (!Py_IS_TYPE(begin, mark_type) || !Py_IS_TYPE(end, mark_type) || !begin->elapsed
        || ((timer)begin->elapsed)(&milliseconds, (void *)begin->event, (void *)end->event) != 0)
        return -1;
    return milliseconds < 0 ? 0 : milliseconds;
}

/* -- arguments --------------------------------------------------------------------------------------------- */

/* Defines the method that takes (args, kwargs), from the function that takes what was passed by position. */
#define PACKED(type, name)                                                                                 \
    static PyObject *type##_##name(PyObject *object, PyObject *const *args, Py_ssize_t count)              \
    {                                                                                                      \
        PyObject *token = OTHER_CASE;                                                                      \
        if (count == 2 && PyTuple_Check(args[0]))                                                          \
            token = name(object, &PyTuple_GET_ITEM(args[0], 0), PyTuple_GET_SIZE(args[0]));                \
        return token == OTHER_CASE ? call_method(object, s_##name, args, count) : token;                   \
    }

/* -- the drafts of a request ------------------------------------------------------------------------------- */

static int
count_draft(DraftCounts *self, size_t drafted, size_t accepted)
{
    if (accepted >= self->size) {
        size_t size = accepted < 10 ? 10 : 2 * accepted;
        uint32_t *more = size == 10 ? self->few : PyMem_Calloc(size, sizeof(uint32_t));
        if (more == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        for (size_t at = 0; at < self->size; at++)
            more[at] = self->exactly[at];
        if (self->exactly != self->few)
            PyMem_Free(self->exactly);
        self->exactly = more;
        self->size = size;
    }
    self->drafted += drafted;
    self->exactly[accepted]++;
    return 0;
}

static PyObject *
DraftCounts_count(PyObject *self, PyObject *args)
{
    Py_ssize_t drafted, accepted;
    if (!PyArg_ParseTuple(args, "nn", &drafted, &accepted))
        return NULL;
    if (drafted < 0 || accepted < 0 || accepted >= INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "numbers of tokens are not negative");
        return NULL;
    }
    if (count_draft((DraftCounts *)self, (size_t)drafted, (size_t)accepted) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
DraftCounts_exactly(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    DraftCounts *self = (DraftCounts *)object;
    PyObject *list = PyList_New((Py_ssize_t)self->size);
    for (size_t at = 0; list != NULL && at < self->size; at++) {
        PyObject *number = PyLong_FromUnsignedLong(self->exactly[at]);
        if (number == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, (Py_ssize_t)at, number);
    }
    return list;
}

static void
DraftCounts_dealloc(PyObject *object)
{
    DraftCounts *self = (DraftCounts *)object;
    PyTypeObject *type = Py_TYPE(self);
    if (self->exactly != self->few)
        PyMem_Free(self->exactly);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMemberDef DraftCounts_members[] = {
    {"drafted", T_ULONGLONG, offsetof(DraftCounts, drafted), READONLY, NULL}, END};
static PyMethodDef DraftCounts_methods[] = {
    {"count", DraftCounts_count, METH_VARARGS, "Count a draft of so many tokens, and how many were accepted."},
    {"exactly", DraftCounts_exactly, METH_NOARGS, "How many drafts had 0, 1, ... accepted tokens."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot DraftCounts_slots[] = {
    {Py_tp_dealloc, DraftCounts_dealloc}, {Py_tp_members, DraftCounts_members}, {Py_tp_methods, DraftCounts_methods}, {0, NULL}};
static PyType_Spec DraftCounts_spec = {"sgl_aspects.tracing.record.native.DraftCounts", sizeof(DraftCounts), 0,
                                       Py_TPFLAGS_DEFAULT, DraftCounts_slots};

/* -- a step: scheduled, launched, its result processed ----------------------------------------------------- */

static PyObject *s_schedule_exit, *s_run_enter, *s_run_exit, *s_process_enter, *s_process_exit;
static PyObject *s_read_late, *s_read_queues, *s_forward_enter, *s_forward_exit, *s_launch_enter, *s_draft_enter, *s_draft_exit;

static PyObject *
StepPath_schedule_enter(PyObject *object, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(count))
{
    StepPath *self = (StepPath *)object;
    __builtin_prefetch(self->tracker); /* for its exit */
    if (self->scheduling) /* within another one */
        return PyLong_FromUnsignedLongLong(now_ns());
    self->scheduling = now_ns();
    Py_RETURN_NONE;
}

static PyObject *
StepPath_schedule_exit(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    StepPath *self = (StepPath *)object;
    Tracker *tracker = tracker_in(self->tracker);
    uint64_t now = now_ns();
    uint64_t start = self->scheduling;
    if (count == 3 && args[0] == Py_None)
        self->scheduling = 0;
    else
        start = count ? PyLong_AsUnsignedLongLong(args[0]) : 0;
    if (start == (uint64_t)-1 && PyErr_Occurred())
        return NULL;
    int is_idle = count == 3 && (args[1] == Py_None || (tracker != NULL && tracker->schedule_start));
    if (count != 3 || tracker == NULL
        || (is_idle
            && (!is_none(self->busy) || has_any(tracker->details) || has_any(tracker->late)
                || is_none(self->requests) || !PyDict_CheckExact(self->requests)
                || PyDict_GET_SIZE(self->requests)))) {
        PyObject *all[3] = {PyLong_FromUnsignedLongLong(start), count > 1 ? args[1] : NULL, count > 2 ? args[2] : NULL};
        PyObject *done = all[0] == NULL ? NULL : call_method(object, s_schedule_exit, all, count);
        Py_XDECREF(all[0]);
        return done;
    }
    tracker->schedule_start = start;
    tracker->schedule_end = now;
    __builtin_prefetch(tracker->spare); /* for the launch, which follows */
    __builtin_prefetch(tracker->steps);
    __builtin_prefetch(self->decoding);
    Py_RETURN_NONE;
}

/* Whether two lists have the same texts: mostly the same objects. */
static int
has_same_texts(PyObject *list, PyObject *before)
{
    Py_ssize_t size = PyList_GET_SIZE(list);
    if (PyList_GET_SIZE(before) != size)
        return 0;
    for (Py_ssize_t at = 0; at < size; at++) {
        PyObject *text = PyList_GET_ITEM(list, at), *other = PyList_GET_ITEM(before, at);
        if (text != other && (!PyUnicode_CheckExact(text) || !PyUnicode_CheckExact(other) || PyUnicode_Compare(text, other)))
            return 0;
    }
    return 1;
}

/* The number of tokens in a dictionary's lists; -1 if it is none of lists. */
static Py_ssize_t
tokens_in(PyObject *lists)
{
    Py_ssize_t at = 0, sum = 0;
    PyObject *key, *list;
    if (!PyDict_CheckExact(lists))
        return -1;
    while (PyDict_Next(lists, &at, &key, &list)) {
        if (!PyList_CheckExact(list))
            return -1;
        sum += PyList_GET_SIZE(list);
    }
    return sum;
}

/* Whether a new batch decodes one token of each request of the one before, the tokens drafted for them, and nothing
   else. Requests that gave way have left: none of them was in the batch before. */
static int
decodes_again(StepPath *self, PyObject *batch, Py_ssize_t *tokens)
{
    if (!is_list(self->decoding) || PyList_GET_SIZE(self->decoding) != self->size || !self->size
        || is_none(self->repeat_unless) || !PyDict_CheckExact(self->repeat_unless) || PyDict_GET_SIZE(self->repeat_unless))
        return 0;
    PyObject *count = PyObject_GetAttr(batch, self->repeat_count);
    *tokens = count != NULL && PyLong_CheckExact(count) ? PyLong_AsSsize_t(count) : -1;
    Py_XDECREF(count);
    int is_same = *tokens == self->size;
    if (*tokens > self->size) {
        PyObject *drafts = attribute_of(batch, self->drafts_of);
        is_same = drafts != NULL && *tokens == self->size + tokens_in(drafts);
        Py_XDECREF(drafts);
    }
    PyObject *of = is_same ? PyObject_GetAttr(batch, self->repeat_of) : NULL;
    if (of == NULL)
        return 0;
    PyObject *ids = PyObject_GetAttr(of, self->repeat_ids);
    is_same = ids != NULL && PyList_CheckExact(ids) && has_same_texts(ids, self->decoding);
    Py_XDECREF(ids);
    Py_DECREF(of);
    return is_same;
}

/* Whether the batch has the mode and the requests of the one before. Their references are borrowed: the batch keeps
   them, or they are the same as before. `tokens`: those that the model is fed. */
static int
repeats(StepPath *self, PyObject *batch, Py_ssize_t *tokens)
{
    PyObject *mode, *reqs, *summary = NULL;
    if (!is_none(self->repeat_of) && !is_none(self->repeat_ids))
        return decodes_again(self, batch, tokens);
    *tokens = self->size;
    if (is_none(self->summary_source)) {
        mode = read_from(batch, self->mode_source);
        Py_XDECREF(mode);
        if (mode == NULL || mode != self->mode)
            return 0;
        reqs = read_from(batch, self->reqs_source);
    }
    else {
        summary = read_from(batch, self->summary_source);
        if (summary == NULL || !PyTuple_CheckExact(summary) || PyTuple_GET_SIZE(summary) != 2
            || PyTuple_GET_ITEM(summary, 0) != self->mode) {
            Py_XDECREF(summary);
            return 0;
        }
        reqs = Py_NewRef(PyTuple_GET_ITEM(summary, 1));
    }
    int is_same = reqs != NULL && reqs == self->reqs && PyObject_Size(reqs) == self->size;
    Py_XDECREF(reqs);
    Py_XDECREF(summary);
    return is_same;
}

static PyObject *
run_enter(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    StepPath *self = (StepPath *)object;
    uint64_t now = now_ns();
    Tracker *tracker = tracker_in(self->tracker);
    if (tracker == NULL || is_none(self->mode_source) || is_none(self->reqs_source) || !self->decodes || count <= self->ran_at || is_none(self->preempted)
        || !PySet_CheckExact(self->preempted) || PySet_GET_SIZE(self->preempted) || has_any(tracker->details))
        goto slow;
    PyObject *batch = args[self->ran_at];
    if (is_none(tracker->steps) || !is_a(tracker->steps, &blocks_kind))
        goto slow;
    uint64_t *words = ((Blocks *)tracker->steps)->words;
    if (words == NULL)
        goto slow;
    uint64_t level = words[WORD_LEVEL];
    if (batch == Py_None || level != tracker->level)
        goto slow;
    Py_ssize_t tokens;
    if (!repeats(self, batch, &tokens)) {
        PyErr_Clear();
        return OTHER_CASE;
    }
    /* Drafts are counted for requests, also where the step is not recorded. */
    int counts = tokens != self->size && (is_none(self->requests) || !PyDict_CheckExact(self->requests) || PyDict_GET_SIZE(self->requests));
    if (!level || (level == 1 && !self->measures)) {
        if (counts)
            goto slow;
        tracker->schedule_start = 0;
        Py_RETURN_NONE;
    }
    uint64_t id = 0;
    if (level >= 2) {
        id = ++tracker->last_id;
        if (!is_none(self->id_source) && !tracker->has_passes) {
            PyObject *shared = read_from(batch, self->id_source);
            uint64_t found = shared == NULL || shared == Py_None ? 0 : PyLong_AsUnsignedLongLong(shared);
            Py_XDECREF(shared);
            if (PyErr_Occurred())
                PyErr_Clear();
            else if (found)
                id = found;
        }
        uint64_t sample = words[WORD_SAMPLE];
        if (sample < SAMPLE_ALL && (id * 0x9E3779B9u & 0xFFFFFFFFu) >= sample)
            id = 0;
        if (!id && !self->measures) {
            if (counts)
                goto slow;
            tracker->schedule_start = 0;
            Py_RETURN_NONE;
        }
    }
    if (!has_any(tracker->spare))
        goto slow;
    Py_ssize_t spare = PyList_GET_SIZE(tracker->spare);
    Step *step = (Step *)PyList_GET_ITEM(tracker->spare, spare - 1);
    if (!is_step((PyObject *)step) || step->steps != tracker->steps)
        goto slow;
    take(tracker->spare, spare - 1);
    words += step->block;
    for (size_t word = 0; word < STEP_FIELDS; word++)
        words[word] = 0;
    words[STEP_SPAN_ID] = id;
    words[STEP_GROUP] = tracker->group;
    words[SCHEDULE_START] = tracker->schedule_start;
    words[SCHEDULE_END] = tracker->schedule_start ? tracker->schedule_end : 0;
    words[RUN_START] = now;
    words[STEP_MODE] = tracker->mode_text;
    words[STEP_SIZE] = (uint64_t)self->size + 1;
    words[STEP_TOKENS] = (uint64_t)tokens + 1;
    words[STEP_HEAD] = KIND_STEP;
    tracker->schedule_start = 0;
    step->id = id;
    step->child = CHILD_RUN_BATCH;
    replace(&step->batch, batch);
    replace(&step->drafts, tokens != self->size ? self->drafts : NULL);
    replace(&tracker->running, (PyObject *)step);
    return (PyObject *)step;
slow:
    return OTHER_CASE;
}

PACKED(StepPath, run_enter)

static PyObject *
StepPath_run_exit(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    StepPath *self = (StepPath *)object;
    uint64_t now = now_ns();
    if (count == 3 && args[0] == Py_None)
        Py_RETURN_NONE;
    Tracker *tracker = tracker_in(self->tracker);
    if (count != 3 || tracker == NULL || !is_step(args[0]) || args[2] != Py_None || !is_list(tracker->in_flight)
        || PyList_GET_SIZE(tracker->in_flight) >= (Py_ssize_t)MOST_IN_FLIGHT)
        goto slow;
    Step *step = (Step *)args[0];
    uint64_t *words = words_of(step);
    if (words == NULL || !step->is_recorded)
        goto slow;
    uint64_t number = 0;
    if (!is_none(self->number_source)) {
        PyObject *found = read_from(step->batch, self->number_source);
        if (found == NULL) {
            PyErr_Clear();
            goto slow;
        }
        number = number_of(found);
        Py_DECREF(found);
    }
    words[RUN_END] = now;
    words[STEP_NUMBER] = number;
    replace(&tracker->running, NULL);
    replace(&step->result, args[1]);
    if (append(tracker->in_flight, (PyObject *)step) < 0)
        return NULL;
    Py_RETURN_NONE;
slow:
    return call_method(object, s_run_exit, args, count);
}

/* The tokens of a request in a batch's result; -1 if it is not there. */
static Py_ssize_t
tokens_of(PyObject *rid, PyObject *rows, PyObject *row_of)
{
    PyObject *at = PyUnicode_CheckExact(rid) ? PyDict_GetItem(row_of, rid) : NULL;
    Py_ssize_t row = at != NULL && PyLong_CheckExact(at) ? PyLong_AsSsize_t(at) : -1;
    if (row < 0 || row >= PyList_GET_SIZE(rows) || !PyList_CheckExact(PyList_GET_ITEM(rows, row)))
        return -1;
    return PyList_GET_SIZE(PyList_GET_ITEM(rows, row));
}

/* Counts the drafts of a launched batch for its requests and its step; 0 with nothing changed in any other case, as
   where a request may have left since. A row has the accepted tokens and one more. */
static __attribute__((noinline)) int
count_drafts(StepPath *self, Step *step, uint64_t *words, PyObject *batch, PyObject *result)
{
    PyObject *drafts = attribute_of(batch, self->drafts_of), *unless = attribute_of(batch, self->drafts_unless);
    PyObject *rows = attribute_of(result, self->drafts_rows), *row_of = attribute_of(result, self->drafts_row_of);
    Py_ssize_t drafted = 0, accepted = 0;
    int done = step->drafts != NULL && PyDict_CheckExact(step->drafts) && unless == Py_None && drafts != NULL && rows != NULL && row_of != NULL && PyList_CheckExact(rows)
        && PyDict_CheckExact(row_of) && (uint64_t)tokens_in(drafts) + words[STEP_SIZE] == words[STEP_TOKENS];
    for (int counts = 0; done && counts < 2; counts++) { /* first without changes */
        PyObject *rid, *tokens, *id, *own;
        Py_ssize_t at = 0, next = 0;
        while (done && PyDict_Next(drafts, &at, &rid, &tokens)) {
            do
                done = PyDict_Next(step->drafts, &next, &id, &own);
            while (done && id != rid);
            Py_ssize_t length = done ? tokens_of(rid, rows, row_of) : -1;
            done = length >= 0 && (own == Py_None || Py_IS_TYPE(own, counts_type));
            if (!done || !counts || !length || !PyList_GET_SIZE(tokens))
                continue;
            drafted += PyList_GET_SIZE(tokens);
            accepted += length - 1;
            if (own != Py_None && count_draft((DraftCounts *)own, (size_t)PyList_GET_SIZE(tokens), (size_t)length - 1) < 0)
                PyErr_Clear(); /* no memory for a longer list */
        }
    }
    if (done && drafted) {
        words[STEP_DRAFTED] = (uint64_t)drafted + 1;
        words[STEP_ACCEPTED] = (uint64_t)accepted + 1;
    }
    Py_XDECREF(drafts);
    Py_XDECREF(unless);
    Py_XDECREF(rows);
    Py_XDECREF(row_of);
    return done;
}

static PyObject *
process_enter(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    StepPath *self = (StepPath *)object;
    uint64_t now = now_ns();
    Tracker *tracker = tracker_in(self->tracker);
    if (tracker == NULL || !is_list(tracker->in_flight))
        return OTHER_CASE;
    Py_ssize_t at = 0, in_flight = PyList_GET_SIZE(tracker->in_flight);
    if (!in_flight)
        Py_RETURN_NONE;
    if (count <= self->result_at || count <= self->processed_at || count <= self->processing_at)
        return OTHER_CASE;
    /* The first, unless the result of one before it was never processed. By the batch where the launch
       returned another object than the result. */
    Step *step = NULL;
    for (int by_batch = 0; by_batch < 2 && (!by_batch || at == in_flight); by_batch++)
        for (at = 0; at < in_flight; at++) {
            step = (Step *)PyList_GET_ITEM(tracker->in_flight, at);
            if (!is_step((PyObject *)step))
                return OTHER_CASE;
            if (by_batch ? step->batch == args[self->processed_at] : step->result == args[self->result_at])
                break;
        }
    uint64_t *words = at == in_flight || !is_none(step->prefill) || !step->is_recorded ? NULL : words_of(step);
    if (words == NULL)
        return OTHER_CASE;
    if (!is_none(self->drafts_of) && (words[STEP_TOKENS] != words[STEP_SIZE] || !PyUnicode_CheckExact(self->drafts_of))) {
        if (!count_drafts(self, step, words, args[self->processed_at], args[self->result_at]))
            return OTHER_CASE;
        Py_CLEAR(step->drafts);
    }
    if (!is_none(self->drafts_each))
        replace(&step->verified, args[self->result_at]);
    take(tracker->in_flight, at);
    words[PROCESS_START] = now;
    step->child = CHILD_PROCESS_RESULT;
    replace(&tracker->running, (PyObject *)step);
    replace(&step->batch, args[self->processed_at]);
    replace(&step->result, args[self->processing_at]);
    /* What its exit reads, since caches are cold: it comes while the engine works. */
    __builtin_prefetch(self->slots);
    __builtin_prefetch(self->requests);
    __builtin_prefetch(tracker->spare);
    return (PyObject *)step;
}

PACKED(StepPath, process_enter)

/* Writes the step's record and frees its object; 0 with an exception set. A slot is free for it. */
static int
write_step(Slots *slots, Tracker *tracker, Step *step)
{
    uint64_t *words = words_of(step);
    char *slot = slots->address + slots->offset;
    uint64_t number = slots->number++;
    slots->offset += SLOT_BYTES;
    for (size_t word = 0; word < STEP_FIELDS; word++)
        ((uint64_t *)slot)[word] = words[word];
    __atomic_store_n((uint64_t *)(slot + MARK_OFFSET), number, __ATOMIC_RELEASE);
    words[STEP_HEAD] = 0;
    if (step->is_announced) {
        PyObject *spans = PyDict_New();
        if (spans == NULL)
            return 0;
        step->is_announced = 0;
        replace(&step->spans, spans);
        Py_DECREF(spans);
    }
    return step->steps != tracker->steps || append(tracker->spare, (PyObject *)step) == 0;
}

/* Records the first late steps whose times are available; calls the method in Python if too many are late. */
static __attribute__((noinline)) PyObject *
read_late(StepPath *self, Tracker *tracker)
{
    Slots *slots = (Slots *)self->slots;
    Py_ssize_t done = 0;
    for (; done < PyList_GET_SIZE(tracker->late) && slots->number <= slots->last; done++) {
        Step *step = (Step *)PyList_GET_ITEM(tracker->late, done);
        uint64_t *words = is_step((PyObject *)step) ? words_of(step) : NULL;
        float milliseconds = words == NULL || is_none(step->events) ? -1 : elapsed(step->events);
        if (milliseconds < 0)
            break;
        words[STEP_DEVICE_TIME] = (uint64_t)(milliseconds * 1e6) + 1;
        tracker->untimed = words[STEP_DEVICE_TIME] <= SHORT_REPLAY_NS ? UNTIMED_REPLAYS : 0;
        if (append(tracker->spare_events, step->events) < 0)
            return NULL;
        Py_CLEAR(step->events);
        if (!write_step(slots, tracker, step))
            return NULL;
    }
    if (!done && PyList_GET_SIZE(tracker->late) >= (Py_ssize_t)MOST_LATE)
        return PyObject_CallMethodNoArgs((PyObject *)tracker, s_read_late);
    if (done && PyList_SetSlice(tracker->late, 0, done, NULL) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* Counts the drafts that a processed result shows: a list with the number of accepted tokens of each request, and
   the width of each draft, one more than its tokens. 0 in another case, with nothing changed. */
static __attribute__((noinline)) int
count_verified(StepPath *self, uint64_t *words, PyObject *result)
{
    PyObject *each = attribute_of(result, self->drafts_each), *width = NULL, *unless = NULL;
    int done = each == Py_None;
    if (each != NULL && PyList_CheckExact(each)) {
        width = attribute_of(result, self->drafts_width);
        unless = attribute_of(result, self->drafts_unless);
        Py_ssize_t one = width != NULL && PyLong_CheckExact(width) ? PyLong_AsSsize_t(width) - 1 : -1, accepted = 0;
        done = one >= 0 && (unless == Py_None || unless == NULL); /* versions before have no such attribute */
        for (Py_ssize_t at = 0; done && at < PyList_GET_SIZE(each); at++) {
            PyObject *right = PyList_GET_ITEM(each, at);
            Py_ssize_t number = PyLong_CheckExact(right) ? PyLong_AsSsize_t(right) : -1;
            done = number >= 0;
            accepted += number;
        }
        if (done && one && PyList_GET_SIZE(each)) {
            uint64_t drafted = (uint64_t)(one * PyList_GET_SIZE(each));
            words[STEP_TOKENS] += words[STEP_TOKENS] ? drafted : 0;
            words[STEP_DRAFTED] = drafted + 1;
            words[STEP_ACCEPTED] = (uint64_t)accepted + 1;
        }
    }
    Py_XDECREF(each);
    Py_XDECREF(width);
    Py_XDECREF(unless);
    return done;
}

static PyObject *
StepPath_process_exit(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    StepPath *self = (StepPath *)object;
    uint64_t now = now_ns();
    if (count == 3 && args[0] == Py_None)
        Py_RETURN_NONE;
    /* Before anything else is looked at: it reads the engine's queues in Python. */
    if (count == 3 && is_step(args[0]) && !is_none(((Step *)args[0])->result) && now - self->read_ns >= READING_NS) {
        PyObject *scheduler = Py_NewRef(((Step *)args[0])->result), *read = call_method(object, s_read_queues, &scheduler, 1);
        Py_DECREF(scheduler);
        if (read == NULL)
            return NULL;
        Py_DECREF(read);
    }
    Tracker *tracker = tracker_in(self->tracker);
    Slots *slots = (Slots *)self->slots;
    if (count != 3 || tracker == NULL || !is_step(args[0]) || args[2] != Py_None || tracker->finishing || is_none(self->slots)
        || is_none(self->requests) || !PyDict_CheckExact(self->requests) || PyDict_GET_SIZE(self->requests) != self->known
        || !is_a(self->slots, &slots_kind) || slots->address == NULL || slots->number > slots->last)
        goto slow;
    Step *step = (Step *)args[0];
    uint64_t *words = words_of(step);
    if (words == NULL || !step->is_recorded || !is_none(step->prefill) || !is_list(tracker->spare)
        || (!is_none(step->events) && (!is_list(tracker->late) || !is_list(tracker->spare_events))))
        goto slow;
    if (!is_none(step->verified)) {
        if (!count_verified(self, words, step->verified))
            goto slow;
        Py_CLEAR(step->verified);
    }
    words[STEP_WAITING] = self->waiting;
    words[STEP_RUNNING] = self->running;
    words[STEP_KV_USAGE] = self->usage;
    words[PROCESS_END] = now;
    if (self->measures)
        replace(&self->busy, step->result);
    replace(&tracker->running, NULL);
    Py_CLEAR(step->batch);
    Py_CLEAR(step->result);
    if (!is_none(step->events))
        return append(tracker->late, (PyObject *)step) < 0 ? NULL : read_late(self, tracker);
    if (!write_step(slots, tracker, step))
        return NULL;
    Py_RETURN_NONE;
slow:
    return call_method(object, s_process_exit, args, count);
}

static PyMemberDef StepPath_members[] = {
    OBJECT(StepPath, tracker), OBJECT(StepPath, slots), OBJECT(StepPath, requests), OBJECT(StepPath, preempted), OBJECT(StepPath, busy), OBJECT(StepPath, mode), OBJECT(StepPath, reqs),
    OBJECT(StepPath, summary_source), OBJECT(StepPath, mode_source), OBJECT(StepPath, reqs_source), OBJECT(StepPath, number_source), OBJECT(StepPath, id_source),
    OBJECT(StepPath, repeat_of), OBJECT(StepPath, repeat_ids), OBJECT(StepPath, repeat_count), OBJECT(StepPath, repeat_unless), OBJECT(StepPath, decoding),
    OBJECT(StepPath, drafts_of), OBJECT(StepPath, drafts_rows), OBJECT(StepPath, drafts_row_of), OBJECT(StepPath, drafts_each),
    OBJECT(StepPath, drafts_width), OBJECT(StepPath, drafts_unless), OBJECT(StepPath, drafts),
    SIZE(StepPath, ran_at), SIZE(StepPath, processing_at), SIZE(StepPath, processed_at),
    SIZE(StepPath, result_at), SIZE(StepPath, size), SIZE(StepPath, known), NUMBER(StepPath, read_ns), NUMBER(StepPath, waiting),
    NUMBER(StepPath, running), NUMBER(StepPath, usage), NUMBER(StepPath, scheduling), FLAG(StepPath, decodes), FLAG(StepPath, measures), END};

#define FAST(type, name) {#name, (PyCFunction)(void (*)(void))type##_##name, METH_FASTCALL, NULL}
static PyMethodDef StepPath_methods[] = {
    FAST(StepPath, schedule_enter), FAST(StepPath, schedule_exit), FAST(StepPath, run_enter),
    FAST(StepPath, run_exit), FAST(StepPath, process_enter), FAST(StepPath, process_exit),
    {NULL, NULL, 0, NULL}};
COLLECTED(StepPath, tracker, 24)

/* -- its forward pass -------------------------------------------------------------------------------------- */

/* Records the begin (0) or the end (1) on the device; 0, with an exception set, where that fails. */
static int
record_event(ForwardPath *self, Py_ssize_t which)
{
    if (PyTuple_GET_SIZE(self->events) > 3) {
        Mark *mark = (Mark *)PyTuple_GET_ITEM(self->events, 3 + which);
        if (Py_IS_TYPE(mark, mark_type) && mark->function
            && ((recorder)mark->function)((void *)mark->event, (void *)self->stream_handle) == 0)
            return 1;
    }
    PyObject *done = PyObject_CallOneArg(PyTuple_GET_ITEM(self->events, which), self->stream);
    if (done == NULL)
        return 0;
    Py_DECREF(done);
    return 1;
}

static int
begin_on_device(ForwardPath *self)
{
    self->passes++;
    self->has_begun = (char)record_event(self, 0);
    return self->has_begun;
}

/* Whether the engine's stream is to be looked up, which Python does, before the next event. */
static inline int
looks_for_stream(ForwardPath *self)
{
    return !((self->passes + 1) & PASSES_PER_STREAM);
}

static PyObject *
forward_enter(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    ForwardPath *self = (ForwardPath *)object;
    Tracker *tracker = tracker_in(self->tracker);
    if (tracker == NULL)
        return OTHER_CASE;
    Step *step = (Step *)tracker->running;
    if (is_none((PyObject *)step) ? self->is_joined : !tracker->has_passes)
        return OTHER_CASE; /* the step may run in another process, or has its first pass here */
    if (is_none((PyObject *)step) || !step->id || !is_none(self->step) || self->is_beside || tracker->level < 3)
        Py_RETURN_NONE;
    if (!is_step((PyObject *)step) || count <= self->runner_at || args[self->runner_at] != self->met_runner
        || step->steps != self->met_steps)
        return OTHER_CASE;
    uint64_t *words = words_of(step);
    if (words == NULL)
        return OTHER_CASE;
    int is_expected = self->expects >> (words[STEP_MODE] & 63) & 1;
    int is_timed = self->has_events && !(is_expected && tracker->level < 4 && (self->replays + 1) & tracker->untimed);
    if (is_timed && (!has_any(tracker->spare_events) || (!is_expected && looks_for_stream(self))))
        return OTHER_CASE;
    self->replays += (unsigned)is_expected;
    self->has_replayed = 0;
    Py_INCREF(step);
    step->child = CHILD_FORWARD;
    words[FORWARD_START] = now_ns();
    words[STEP_GRAPH] = self->eager_text;
    words[STEP_DEVICE_NAME] = self->device_text;
    if (is_timed) {
        PyObject *before = self->events;
        self->events = take(tracker->spare_events, PyList_GET_SIZE(tracker->spare_events) - 1);
        Py_XDECREF(before);
        self->has_begun = self->has_ended = self->has_parts = 0;
        if (!is_expected && !begin_on_device(self)) {
            Py_DECREF(step);
            return NULL;
        }
    }
    replace(&self->step, (PyObject *)step); /* last: its exit, which releases it, comes only after this */
    return (PyObject *)step;
}

PACKED(ForwardPath, forward_enter)

static PyObject *
launch_enter(PyObject *object, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(count))
{
    ForwardPath *self = (ForwardPath *)object;
    if (self->is_beside || (is_none(self->step) && !self->is_joined))
        Py_RETURN_NONE; /* otherwise it may be a pass of a worker */
    if (self->has_replayed && !is_none(self->step)) {
        self->has_parts = 1; /* a graph for each piece of the model: a dozen and more */
        Py_RETURN_NONE;
    }
    uint64_t *words = is_step(self->step) ? words_of((Step *)self->step) : NULL;
    if (words == NULL || (!is_none(self->events) && looks_for_stream(self)))
        return OTHER_CASE;
    self->has_replayed = 1;
    if (words[STEP_GRAPH] == self->replayed_text) {
        self->has_parts = 1;
        Py_RETURN_NONE;
    }
    words[STEP_GRAPH] = self->replayed_text;
    if (!is_none(self->events)) {
        self->expects |= 1ull << (words[STEP_MODE] & 63);
        if (!begin_on_device(self))
            return NULL;
    }
    Py_RETURN_NONE;
}

PACKED(ForwardPath, launch_enter)

static PyObject *
ForwardPath_launch_exit(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    ForwardPath *self = (ForwardPath *)object;
    int is_pass = self->has_begun && !self->has_parts && !self->is_beside;
    if (!is_none(self->events) && is_pass && count == 3 && args[2] == Py_None) {
        if (!record_event(self, 1))
            return NULL;
        self->has_ended = 1;
    }
    Py_RETURN_NONE;
}

static PyObject *
ForwardPath_forward_exit(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    ForwardPath *self = (ForwardPath *)object;
    if (count == 3 && args[0] == Py_None)
        Py_RETURN_NONE;
    uint64_t *words = count == 3 && is_step(args[0]) ? words_of((Step *)args[0]) : NULL;
    if (words == NULL || args[2] != Py_None || (!is_none(self->events) && !self->has_begun))
        return call_method(object, s_forward_exit, args, count);
    Step *step = (Step *)args[0];
    step->child = CHILD_RUN_BATCH;
    Py_CLEAR(self->step);
    if (is_none(self->events)) {
        if (words[STEP_GRAPH] == self->eager_text) /* no graph replay, unlike the last time */
            self->expects &= ~(1ull << (words[STEP_MODE] & 63));
    }
    else {
        if ((!self->has_ended || self->has_parts) && !record_event(self, 1)) {
            Py_CLEAR(self->events);
            return NULL;
        }
        replace(&step->events, self->events);
        Py_CLEAR(self->events);
    }
    words[FORWARD_END] = now_ns();
    Py_RETURN_NONE;
}

static PyMemberDef ForwardPath_members[] = {
    OBJECT(ForwardPath, tracker), OBJECT(ForwardPath, step), OBJECT(ForwardPath, events),
    OBJECT(ForwardPath, stream), OBJECT(ForwardPath, met_runner), OBJECT(ForwardPath, met_steps),
    SIZE(ForwardPath, runner_at), NUMBER(ForwardPath, stream_handle), NUMBER(ForwardPath, eager_text), NUMBER(ForwardPath, replayed_text),
    NUMBER(ForwardPath, device_text), NUMBER(ForwardPath, passes), NUMBER(ForwardPath, expects), NUMBER(ForwardPath, replays),
    FLAG(ForwardPath, has_begun), FLAG(ForwardPath, has_ended), FLAG(ForwardPath, has_parts),
    FLAG(ForwardPath, has_events), FLAG(ForwardPath, is_joined), FLAG(ForwardPath, is_beside),
    FLAG(ForwardPath, has_replayed), END};
static PyMethodDef ForwardPath_methods[] = {
    FAST(ForwardPath, forward_enter), FAST(ForwardPath, forward_exit), FAST(ForwardPath, launch_enter),
    FAST(ForwardPath, launch_exit),
    {NULL, NULL, 0, NULL}};
COLLECTED(ForwardPath, tracker, 6)

/* -- its drafts --------------------------------------------------------------------------------------------- */

static inline ForwardPath *
forward_of(DraftPath *self)
{
    return is_none(self->forward) || !PyObject_TypeCheck(self->forward, forward_type) ? NULL : (ForwardPath *)self->forward;
}

static PyObject *
draft_enter(PyObject *object, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(count))
{
    DraftPath *self = (DraftPath *)object;
    Tracker *tracker = tracker_in(self->tracker);
    ForwardPath *forward = forward_of(self);
    if (tracker == NULL || forward == NULL)
        return OTHER_CASE;
    if (forward->is_beside || !is_none(forward->step))
        Py_RETURN_NONE; /* in another one */
    Step *step = (Step *)tracker->running;
    if (is_none((PyObject *)step) && has_any(tracker->in_flight)) /* launched already */
        step = (Step *)PyList_GET_ITEM(tracker->in_flight, PyList_GET_SIZE(tracker->in_flight) - 1);
    uint64_t *words = is_step((PyObject *)step) && step->id ? words_of(step) : NULL;
    if (words == NULL)
        return OTHER_CASE;
    forward->is_beside = 1;
    self->before = step->child;
    step->child = self->child;
    if (!words[self->start])
        words[self->start] = now_ns();
    return Py_NewRef(step);
}

PACKED(DraftPath, draft_enter)

static PyObject *
DraftPath_draft_exit(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    DraftPath *self = (DraftPath *)object;
    if (count == 3 && args[0] == Py_None)
        Py_RETURN_NONE;
    ForwardPath *forward = forward_of(self);
    uint64_t *words = count == 3 && forward && is_step(args[0]) ? words_of((Step *)args[0]) : NULL;
    if (words == NULL || args[2] != Py_None)
        return call_method(object, s_draft_exit, args, count);
    forward->is_beside = 0;
    words[self->start + 1] = now_ns();
    ((Step *)args[0])->child = self->before;
    Py_RETURN_NONE;
}

static PyMemberDef DraftPath_members[] = {
    OBJECT(DraftPath, tracker), OBJECT(DraftPath, forward),
    SIZE(DraftPath, child), SIZE(DraftPath, start), SIZE(DraftPath, before), END};
static PyMethodDef DraftPath_methods[] = {
    FAST(DraftPath, draft_enter), FAST(DraftPath, draft_exit), {NULL, NULL, 0, NULL}};
COLLECTED(DraftPath, tracker, 2)

/* -- for watched_call.c ------------------------------------------------------------------------------------ */

PyObject other_case;

entry
entry_of(PyObject *enter)
{
    static const entry entries[][2] = {{StepPath_schedule_enter, StepPath_schedule_enter},
                                       {StepPath_run_enter, run_enter},
                                       {StepPath_process_enter, process_enter},
                                       {ForwardPath_forward_enter, forward_enter},
                                       {ForwardPath_launch_enter, launch_enter},
                                       {DraftPath_draft_enter, draft_enter}};
    if (PyCFunction_Check(enter))
        for (size_t i = 0; i < sizeof(entries) / sizeof(*entries); i++)
            if ((PyCFunction)(void (*)(void))entries[i][0] == PyCFunction_GET_FUNCTION(enter))
                return entries[i][1];
    return NULL;
}

PyObject *
tracker_of(PyObject *path)
{
    return ((StepPath *)path)->tracker; /* each path begins with it */
}

/* -- the module -------------------------------------------------------------------------------------------- */

static PyMethodDef functions[] = {{"is_plain", is_plain, METH_O, "Whether marshal may be given these bytes."}, {0}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "sgl_aspects.tracing.record.native._decode_path",
    .m_doc = "A plain decode step, recorded without running any Python.",
    .m_size = -1,
    .m_methods = functions,
};

static PyTypeObject *
add_type(PyObject *module, const char *name, PyType_Spec *spec)
{
    PyObject *type = PyType_FromSpec(spec);
    if (type == NULL || PyModule_AddObjectRef(module, name, type) < 0)
        return NULL;
    return (PyTypeObject *)type; /* the static variable's reference */
}

PyMODINIT_FUNC
PyInit__decode_path(void)
{
    struct {
        PyObject **place;
        const char *text;
    } names[] = {{&s_schedule_exit, "_schedule_exit"}, {&s_run_enter, "_run_enter"},
                 {&s_run_exit, "_run_exit"},           {&s_process_enter, "_process_enter"},
                 {&s_process_exit, "_process_exit"},
                 {&s_forward_enter, "_enter"},         {&s_forward_exit, "_exit"},
                 {&s_launch_enter, "_launch_enter"},   {&s_read_late, "read_late"}, {&s_read_queues, "_read_queues"},
                 {&s_draft_enter, "_enter"},           {&s_draft_exit, "_exit"}};
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        *names[i].place = PyUnicode_InternFromString(names[i].text);
        if (*names[i].place == NULL)
            return NULL;
    }
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    blocks_kind.base = add_type(module, "Blocks", &Blocks_spec);
    slots_kind.base = add_type(module, "Slots", &Slots_spec);
    step_kind.base = add_type(module, "Step", &Step_spec);
    tracker_kind.base = add_type(module, "Tracker", &Tracker_spec);
    mark_type = add_type(module, "Mark", &Mark_spec);
    counts_type = add_type(module, "DraftCounts", &DraftCounts_spec);
    forward_type = add_type(module, "ForwardPath", &ForwardPath_spec);
    if (blocks_kind.base == NULL || slots_kind.base == NULL || step_kind.base == NULL || tracker_kind.base == NULL
        || mark_type == NULL || counts_type == NULL || add_type(module, "StepPath", &StepPath_spec) == NULL
        || forward_type == NULL || add_type(module, "DraftPath", &DraftPath_spec) == NULL || add_watched_call(module) < 0
        || PyModule_AddIntMacro(module, CHECKSUM) < 0) { /* of the sources: see native/__init__.py */
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
