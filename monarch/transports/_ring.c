/* A ring of frames in memory that two processes share: one pushes, one pops. See monarch/transports/ring.py, which says
 * what it is for; this file has what Python cannot do: fences, a copy without a detour, and a wait that keeps its CPU.
 *
 * Memory: a head of 256 bytes with `tail` (how many bytes were ever pushed) and `head` (ever popped), each on a cache line
 * of its own, and `asleep`, which the reader sets before it sleeps, and the writer clears when it wakes it, or the reader
 * when it is awake. Then the data, a power of two. A record is contiguous and begins at a multiple of 8: `struct record`, the sizes of the parts,
 * the parts. Where a record would wrap around, the rest of the data is skipped by a record of size SKIP.
 *
 * A frame that was encoded already, for the stream beside, is pushed as `bytes`, and its record marked ENCODED; what it
 * is decoded to, Python says (`decode`).
 *
 * A record becomes visible by one store to `tail`, after all else: of a writer that dies in the middle nothing is seen. The
 * reader believes no size that it has not compared with what there is.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() atomic_signal_fence(memory_order_seq_cst)
#endif

enum { VERSION = 5 }; /* of what Python calls here; ring.py names the one that it needs */
enum { HEAD_BYTES = 256, MOST_PARTS = 32, LOOKS_EACH = 64 };
#define SKIP UINT32_MAX
#define ENCODED (UINT32_C(1) << 31)

typedef struct {
    _Alignas(64) _Atomic uint64_t tail;
    _Alignas(64) _Atomic uint64_t head;
    _Alignas(64) _Atomic uint32_t asleep;
} shared;

struct record {
    uint32_t size;  /* in bytes, all of it, a multiple of 8; or SKIP */
    uint32_t parts; /* how many, and ENCODED */
    uint64_t after; /* frames that went another way, and come first */
};

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    PyObject *keep;
    PyObject *decode; /* reader: makes the frame of one that is encoded */
    shared *ring;
    char *data;
    uint64_t capacity;
    uint64_t mine;   /* tail of a writer, head of a reader: nobody else changes it */
    uint64_t theirs; /* writer: the head, as of the last look */
    uint64_t after;  /* reader: frames that came another way so far */
    char attended;   /* reader: whoever polls looks here before it sleeps */
    char armed;      /* reader: `asleep` was set, and nobody has looked since */
} Ring;

static PyTypeObject *WriterType, *ReaderType;

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int ring_init(Ring *self, PyObject *args, PyObject *kwargs) {
    PyObject *memory, *keep;
    if (self->ring) {
        PyErr_SetString(PyExc_TypeError, "a ring is initialized once");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "OO", &memory, &keep)) return -1;
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE)) return -1;
    uint64_t capacity = (uint64_t)self->memory.len - HEAD_BYTES;
    if (self->memory.len < HEAD_BYTES + 64 || capacity & (capacity - 1) || (uintptr_t)self->memory.buf % 64) {
        PyErr_SetString(PyExc_ValueError, "a ring needs aligned memory of 256 bytes and a power of two");
        PyBuffer_Release(&self->memory);
        return -1;
    }
    Py_INCREF(keep);
    self->keep = keep;
    self->data = (char *)self->memory.buf + HEAD_BYTES;
    self->capacity = capacity;
    self->ring = (shared *)self->memory.buf;
    if (Py_TYPE((PyObject *)self) == ReaderType) { /* it sleeps until somebody looks */
        atomic_store(&self->ring->asleep, 1);
        self->armed = 1;
    }
    return 0;
}

static void ring_dealloc(Ring *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (self->memory.obj) PyBuffer_Release(&self->memory);
    Py_XDECREF(self->keep);
    Py_XDECREF(self->decode);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static int is_ready(Ring *self) {
    if (self->ring) return 1;
    PyErr_SetString(PyExc_TypeError, "this ring has no memory");
    return 0;
}

static PyObject *ring_position(Ring *self, void *closure) { return PyLong_FromUnsignedLongLong(self->mine); }

/* ---- the writer */

static Py_ssize_t length_of(PyObject *list) {
    return PyList_Check(list) ? PyList_Size(list) : PyTuple_Check(list) ? PyTuple_Size(list) : -1;
}

static PyObject *item_of(PyObject *list, Py_ssize_t at) { /* borrowed */
    return PyList_Check(list) ? PyList_GetItem(list, at) : PyTuple_GetItem(list, at);
}

/* 1: pushed; 0: too large, or no room; -1: an exception is set */
static int push_one(Ring *self, PyObject *frame, uint64_t after) {
    Py_buffer buffers[MOST_PARTS];
    const char *starts[MOST_PARTS];
    uint32_t sizes[MOST_PARTS];
    int encoded = PyBytes_CheckExact(frame);
    Py_ssize_t count = encoded ? 1 : length_of(frame), seen;
    uint64_t total = sizeof(struct record);
    int result = 0;
    if (count < 0) {
        PyErr_SetString(PyExc_TypeError, "a frame is a list or a tuple of buffers, or bytes");
        return -1;
    }
    if (count > MOST_PARTS) return 0;
    total += 4 * (uint64_t)count;
    for (seen = 0; seen < count; seen++) {
        PyObject *part = encoded ? frame : item_of(frame, seen);
        Py_ssize_t size;
        buffers[seen].obj = NULL;
        if (PyBytes_CheckExact(part)) {
            starts[seen] = PyBytes_AsString(part);
            size = PyBytes_Size(part);
        } else {
            if (PyObject_GetBuffer(part, &buffers[seen], PyBUF_SIMPLE)) {
                buffers[seen].obj = NULL;
                result = -1;
                break;
            }
            starts[seen] = buffers[seen].buf;
            size = buffers[seen].len;
        }
        total += (uint64_t)size;
        if (total > self->capacity / 8) {
            seen++;
            goto release;
        }
        sizes[seen] = (uint32_t)size;
    }
    if (result == 0) {
        uint64_t need = (total + 7) & ~(uint64_t)7, tail = self->mine, place = tail & (self->capacity - 1);
        uint64_t skip = self->capacity - place < need ? self->capacity - place : 0;
        if (tail + skip + need - self->theirs > self->capacity)
            self->theirs = atomic_load_explicit(&self->ring->head, memory_order_acquire);
        if (tail + skip + need - self->theirs <= self->capacity) {
            struct record record = {(uint32_t)need, (uint32_t)count | (encoded ? ENCODED : 0), after};
            char *to;
            if (skip) {
                uint32_t marker = SKIP;
                memcpy(self->data + place, &marker, sizeof marker);
                tail += skip;
                place = 0;
            }
            to = self->data + place;
            memcpy(to, &record, sizeof record);
            to += sizeof record;
            memcpy(to, sizes, 4 * (size_t)count);
            to += 4 * count;
            for (Py_ssize_t i = 0; i < count; i++) {
                memcpy(to, starts[i], sizes[i]);
                to += sizes[i];
            }
            self->mine = tail + need;
            atomic_store_explicit(&self->ring->tail, self->mine, memory_order_release);
            result = 1;
        }
    }
release:
    while (seen-- > 0)
        if (buffers[seen].obj) PyBuffer_Release(&buffers[seen]);
    return result;
}

static PyObject *writer_push(Ring *self, PyObject *const *args, Py_ssize_t n) {
    if (n != 2 || length_of(args[0]) < 0) {
        PyErr_SetString(PyExc_TypeError, "push(frames, after): frames in a list or a tuple");
        return NULL;
    }
    uint64_t after = PyLong_AsUnsignedLongLong(args[1]);
    if (PyErr_Occurred() || !is_ready(self)) return NULL;
    Py_ssize_t count = length_of(args[0]), taken = 0;
    for (; taken < count; taken++) {
        int pushed = push_one(self, item_of(args[0], taken), after);
        if (pushed < 0 && !taken) return NULL;
        if (pushed < 0) PyErr_Clear(); /* it comes again, first */
        if (pushed != 1) break;
    }
    return PyLong_FromSsize_t(taken);
}

static PyObject *writer_rouse(Ring *self, PyObject *unused) {
    if (!is_ready(self)) return NULL;
    atomic_thread_fence(memory_order_seq_cst);
    if (!atomic_load_explicit(&self->ring->asleep, memory_order_relaxed)) Py_RETURN_FALSE;
    return PyBool_FromLong(atomic_exchange(&self->ring->asleep, 0) != 0);
}

/* ---- the reader */

enum { NOTHING, RECORD, BROKEN };

/* The record to pop next, copied, and where it is. NOTHING also where it waits for frames that come another way. Changes
 * nothing that a thread which pops meanwhile could stumble over. */
static int next_record(Ring *self, struct record *record, uint64_t *at) {
    uint64_t mine = self->mine, tail = atomic_load_explicit(&self->ring->tail, memory_order_acquire);
    for (;;) {
        uint64_t place = mine & (self->capacity - 1), here = self->capacity - place, there = tail - mine;
        if (!there) return NOTHING;
        if (there > self->capacity || tail % 8) return BROKEN;
        memcpy(&record->size, self->data + place, sizeof record->size);
        if (record->size == SKIP) {
            if (here > there || !place) return BROKEN;
            mine += here;
            continue;
        }
        if (record->size < sizeof *record || record->size > here || record->size > there || record->size % 8)
            return BROKEN;
        memcpy(record, self->data + place, sizeof *record);
        *at = mine;
        return (record->parts & ~ENCODED) > MOST_PARTS ? BROKEN : record->after > self->after ? NOTHING : RECORD;
    }
}

static int something_is_there(Ring *self) {
    struct record record;
    uint64_t at;
    return next_record(self, &record, &at) != NOTHING;
}

/* NULL without an exception: the sizes of its parts are wrong */
static PyObject *frame_of(const struct record *record, const char *from) {
    uint32_t sizes[MOST_PARTS], count = record->parts & ~ENCODED;
    uint64_t left = record->size - sizeof *record;
    if (left < 4 * (uint64_t)count) return NULL;
    memcpy(sizes, from, 4 * (size_t)count);
    from += 4 * (size_t)count;
    left -= 4 * (uint64_t)count;
    PyObject *frame = PyList_New(count);
    for (uint32_t i = 0; frame && i < count; i++) {
        PyObject *part = sizes[i] <= left ? PyBytes_FromStringAndSize(from, sizes[i]) : NULL;
        if (!part || PyList_SetItem(frame, i, part)) {
            Py_DECREF(frame);
            return NULL;
        }
        from += sizes[i];
        left -= sizes[i];
    }
    return frame;
}

static PyObject *decoded(Ring *self, PyObject *parts) { /* takes `parts` over; NULL without an exception, too */
    PyObject *frame = NULL;
    if (parts && self->decode && PyList_Size(parts) == 1)
        frame = PyObject_CallFunctionObjArgs(self->decode, PyList_GetItem(parts, 0), NULL);
    Py_XDECREF(parts);
    return frame;
}

static int fall_asleep(Ring *self) { /* 0: it may not, something is there */
    atomic_store_explicit(&self->ring->asleep, 1, memory_order_relaxed);
    self->armed = 1;
    atomic_thread_fence(memory_order_seq_cst);
    return !something_is_there(self);
}

/* What lies elsewhere may be large: somebody who pops does other things, too, as soon as he has so much of it. */
static const Py_ssize_t TURN_BYTES = 4 << 20;

static Py_ssize_t bytes_of(PyObject *frame) {
    Py_ssize_t total = 0;
    for (Py_ssize_t i = 0; PyList_Check(frame) && i < PyList_Size(frame); i++) {
        Py_ssize_t size = PyObject_Size(PyList_GetItem(frame, i));
        if (size < 0) PyErr_Clear(); /* it stands for what is missing */
        total += size > 0 ? size : 0;
    }
    return total;
}

static PyObject *reader_pop(Ring *self, PyObject *after) {
    if (!is_ready(self)) return NULL;
    self->after = PyLong_AsUnsignedLongLong(after);
    if (PyErr_Occurred()) return NULL;
    PyObject *frames = PyList_New(0);
    Py_ssize_t turn = 0;
    if (!frames) return NULL;
    while (turn < TURN_BYTES || !self->attended) { /* who is not looked at must not leave anything behind */
        struct record record;
        uint64_t at;
        int found = next_record(self, &record, &at);
        if (found == NOTHING) {
            if (self->attended || fall_asleep(self)) return frames;
            continue;
        }
        const char *from = self->data + (at & (self->capacity - 1)) + sizeof record;
        PyObject *frame = found == RECORD ? frame_of(&record, from) : NULL;
        if (found == RECORD && record.parts & ENCODED) frame = decoded(self, frame);
        if (!frame) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "what lies in the ring is no frame");
            break;
        }
        int failed = PyList_Append(frames, frame);
        if (record.parts & ENCODED) turn += bytes_of(frame);
        Py_DECREF(frame);
        if (failed) break;
        self->mine = at + record.size;
        atomic_store_explicit(&self->ring->head, self->mine, memory_order_release);
    }
    if (PyList_Size(frames)) { /* the error comes again, with the next call */
        PyErr_Clear();
        return frames;
    }
    Py_DECREF(frames);
    return NULL;
}

static PyObject *reader_was_rung(Ring *self, PyObject *unused) {
    if (!is_ready(self)) return NULL;
    if (!self->armed || atomic_load_explicit(&self->ring->asleep, memory_order_relaxed)) Py_RETURN_FALSE;
    self->armed = 0;
    Py_RETURN_TRUE;
}

static PyObject *reader_attended(Ring *self, void *closure) { return PyBool_FromLong(self->attended); }

static int reader_attend(Ring *self, PyObject *value, void *closure) {
    int attended = value ? PyObject_IsTrue(value) : 0;
    if (attended < 0) return -1;
    self->attended = (char)attended;
    return 0;
}

static PyObject *reader_decode(Ring *self, void *closure) {
    PyObject *decode = self->decode ? self->decode : Py_None;
    Py_INCREF(decode);
    return decode;
}

static int reader_decode_by(Ring *self, PyObject *value, void *closure) {
    PyObject *old = self->decode;
    Py_XINCREF(value);
    self->decode = value;
    Py_XDECREF(old);
    return 0;
}

/* ---- the bell: a frame of no parts on the stream, all of it at once or nothing */

static PyObject *module_ring_bell(PyObject *module, PyObject *arg) {
    uint32_t bell = 0;
    long fd = PyLong_AsLong(arg);
    if (PyErr_Occurred()) return NULL;
    return PyBool_FromLong(send((int)fd, &bell, sizeof bell, MSG_DONTWAIT | MSG_NOSIGNAL) == sizeof bell);
}

static PyObject *module_take_bell(PyObject *module, PyObject *arg) {
    uint32_t bell = 1;
    long fd = PyLong_AsLong(arg);
    if (PyErr_Occurred()) return NULL;
    if (recv((int)fd, &bell, sizeof bell, MSG_DONTWAIT | MSG_PEEK) != sizeof bell || bell) Py_RETURN_FALSE;
    return PyBool_FromLong(recv((int)fd, &bell, sizeof bell, MSG_DONTWAIT) == sizeof bell);
}

/* ---- many readers */

static Ring *reader_at(PyObject *readers, Py_ssize_t at) {
    PyObject *reader = PyTuple_GetItem(readers, at);
    if (reader && Py_TYPE(reader) == ReaderType && ((Ring *)reader)->ring) return (Ring *)reader;
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "readers are to be in a tuple");
    return NULL;
}

static int append_number(PyObject *list, Py_ssize_t number) { /* takes the list over where it fails */
    PyObject *item = PyLong_FromSsize_t(number);
    int failed = !item || PyList_Append(list, item);
    Py_XDECREF(item);
    if (failed) Py_DECREF(list);
    return failed;
}

enum { MOST_LOOKED_AT = 256, YIELDS_WITHIN_NS = 100000 };

/* Threads of this process that look, and so have let go of the interpreter. */
static atomic_int looking;

/* Another thread of this process has set our bell. It has the interpreter still, as a rule, and lets it go when it begins to
 * look itself. Who asks for it before is put to sleep, and is woken in 25 us and more on a CPU that slept. */
static void wait_for_interpreter(void) {
    for (uint64_t began = now_ns(); atomic_load(&looking) < 2 && now_ns() - began < YIELDS_WITHIN_NS;) PAUSE();
}

static PyObject *module_look(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    Ring *rings[MOST_LOOKED_AT];
    if (n != 4 || !PyTuple_Check(args[0]) || !PyByteArray_Check(args[3]) || PyByteArray_Size(args[3]) != 1) {
        PyErr_SetString(PyExc_TypeError, "look(readers, epoll, time_s, bell): a bell is a bytearray of one byte");
        return NULL;
    }
    volatile char *bell = PyByteArray_AsString(args[3]);
    Py_ssize_t count = PyTuple_Size(args[0]);
    long epoll = PyLong_AsLong(args[1]);
    uint64_t time_ns = (uint64_t)(PyFloat_AsDouble(args[2]) * 1e9), longest = 0;
    if (PyErr_Occurred()) return NULL;
    if (count > MOST_LOOKED_AT) count = MOST_LOOKED_AT;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!(rings[i] = reader_at(args[0], i))) return NULL;
    }
    int found = 0;
    Py_BEGIN_ALLOW_THREADS;
    atomic_fetch_add(&looking, 1);
    uint64_t began = now_ns(), last = began;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (rings[i]->armed && atomic_exchange(&rings[i]->ring->asleep, 0)) rings[i]->armed = 0;
    }
    for (;;) {
        for (int look = 0; look < LOOKS_EACH && !found; look++) {
            for (Py_ssize_t i = 0; i < count && !found; i++) found = something_is_there(rings[i]);
            if (!found && *bell) {
                wait_for_interpreter();
                found = 1;
            }
            PAUSE();
        }
        struct epoll_event event;
        if (!found && epoll >= 0) found = epoll_wait((int)epoll, &event, 1, 0) != 0;
        uint64_t now = now_ns();
        if (now - last > longest) longest = now - last;
        last = now;
        if (found || now - began >= time_ns) break;
    }
    atomic_fetch_sub(&looking, 1);
    Py_END_ALLOW_THREADS;
    PyObject *ready = Py_None;
    if (found) {
        if (!(ready = PyList_New(0))) return NULL;
        for (Py_ssize_t i = 0; i < count; i++) {
            if (something_is_there(rings[i]) && append_number(ready, i)) return NULL;
        }
    }
    return Py_BuildValue(found ? "(Nd)" : "(Od)", ready, (double)longest * 1e-9);
}

static PyObject *module_fall_asleep(PyObject *module, PyObject *readers) {
    if (!PyTuple_Check(readers)) {
        PyErr_SetString(PyExc_TypeError, "readers are to be in a tuple");
        return NULL;
    }
    PyObject *found = PyList_New(0);
    Py_ssize_t count = PyTuple_Size(readers);
    /* First a look at all: as long as one has something, the writers of the others need not ring. */
    for (int asleep = 0; found && asleep < 2 && !PyList_Size(found); asleep++) {
        for (Py_ssize_t i = 0; found && i < count; i++) {
            Ring *reader = reader_at(readers, i);
            if (!reader) Py_CLEAR(found);
            else if ((asleep ? !fall_asleep(reader) : something_is_there(reader)) && append_number(found, i)) return NULL;
        }
    }
    return found;
}

/* ---- the module */

static PyMethodDef writer_methods[] = {
    {"push", (PyCFunction)(void (*)(void))writer_push, METH_FASTCALL, NULL},
    {"rouse", (PyCFunction)writer_rouse, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMethodDef reader_methods[] = {
    {"pop", (PyCFunction)reader_pop, METH_O, NULL},
    {"was_rung", (PyCFunction)reader_was_rung, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef writer_fields[] = {
    {"position", (getter)ring_position, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyGetSetDef reader_fields[] = {
    {"position", (getter)ring_position, NULL, NULL, NULL},
    {"attended", (getter)reader_attended, (setter)reader_attend, NULL, NULL},
    {"decode", (getter)reader_decode, (setter)reader_decode_by, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot writer_slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, ring_init},
    {Py_tp_dealloc, ring_dealloc},
    {Py_tp_methods, writer_methods},
    {Py_tp_getset, writer_fields},
    {0, NULL},
};
static PyType_Slot reader_slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, ring_init},
    {Py_tp_dealloc, ring_dealloc},
    {Py_tp_methods, reader_methods},
    {Py_tp_getset, reader_fields},
    {0, NULL},
};
static PyType_Spec writer_spec = {"monarch.transports._ring.Writer", sizeof(Ring), 0, Py_TPFLAGS_DEFAULT, writer_slots};
static PyType_Spec reader_spec = {"monarch.transports._ring.Reader", sizeof(Ring), 0, Py_TPFLAGS_DEFAULT, reader_slots};

static PyMethodDef functions[] = {
    {"look", (PyCFunction)(void (*)(void))module_look, METH_FASTCALL, NULL},
    {"fall_asleep", (PyCFunction)module_fall_asleep, METH_O, NULL},
    {"ring_bell", (PyCFunction)module_ring_bell, METH_O, NULL},
    {"take_bell", (PyCFunction)module_take_bell, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_ring", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__ring(void) {
    PyObject *module = PyModule_Create(&definition);
    if (!module) return NULL;
    WriterType = (PyTypeObject *)PyType_FromSpec(&writer_spec);
    ReaderType = (PyTypeObject *)PyType_FromSpec(&reader_spec);
    if (!WriterType || !ReaderType || PyModule_AddObjectRef(module, "Writer", (PyObject *)WriterType) ||
        PyModule_AddObjectRef(module, "Reader", (PyObject *)ReaderType) || PyModule_AddIntConstant(module, "VERSION", VERSION)) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
