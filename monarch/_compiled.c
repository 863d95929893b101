/* What every message between processes of one host passes; see monarch/compiled.py. This file has what Python cannot do:
 * fences, copies without a detour, a wait that lets go of the interpreter, and steps that nothing interrupts.
 *
 * A ring of frames in memory that two processes share: one pushes, one pops. The memory: a head of 256 bytes with `tail`
 * (how many bytes were ever pushed) and `head` (ever popped), each on a cache line of its own, and `asleep`, which the reader
 * sets before it sleeps, to what wakes it, and the writer clears when it does, or the reader when it is awake. Then the data,
 * a power of two. A record is contiguous and begins at a multiple of 8: `struct record`, the sizes of the parts, the parts.
 * Where a record would wrap around, the rest of the data is skipped by a record of size SKIP.
 *
 * A part may lie elsewhere, in other memory that both processes see: in its place is a description, and its size is marked
 * ELSEWHERE. What it is, Python says (`find`), once.
 *
 * A record becomes visible by one store to `tail`, after all else: of a writer that dies in the middle nothing is seen. The
 * reader believes no size that it has not compared with what there is.
 *
 * Memory of Python: whatever may start a collection, or let go of the last reference to something, may run code of Python,
 * which may send and receive here. So that happens before a step begins, or after it is done.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "heads are little-endian"
#endif
#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() atomic_signal_fence(memory_order_seq_cst)
#endif

enum { VERSION = 18 }; /* of what Python calls here; compiled.py names the one that it needs */
enum { HEAD_BYTES = 256, MOST_PARTS = 32, LOOKS_EACH = 64 };
enum { AWAKE, WOKEN_BY_STREAM, WOKEN_BY_BELL }; /* of a reader: what `asleep` says */
#define SKIP UINT32_MAX
#define ELSEWHERE (UINT32_C(1) << 31)

typedef struct {
    _Alignas(64) _Atomic uint64_t tail;
    _Alignas(64) _Atomic uint64_t head;
    _Alignas(64) _Atomic uint32_t asleep;
} shared;

struct record {
    uint32_t size;  /* in bytes, all of it, a multiple of 8; or SKIP */
    uint32_t parts; /* how many */
    uint64_t after; /* frames that went another way, and come first */
};

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    PyObject *keep;
    PyObject *find;    /* reader: the part that a description stands for */
    PyObject *session; /* reader: whose messages come; their type is `envelope` */
    PyTypeObject *envelope;
    shared *ring;
    char *data;
    uint64_t capacity;
    uint64_t mine;   /* tail of a writer, head of a reader: nobody else changes it */
    uint64_t theirs; /* writer: the head, as of the last look */
    uint64_t after;  /* frames that went, or came, another way so far */
    uint64_t made;   /* reader: the number of the last message that was made of a record; for the session it has come
                        once it has been delivered */
    int bell;        /* writer: an eventfd of the reader's process */
    char attended;   /* reader: whoever polls looks here before it sleeps, and hears the bell */
    char armed;      /* reader: `asleep` was set, and nobody has looked since */
    char is_left;    /* reader: LEFT or LEFT_TO_CODE, see below; or 0 */
} Ring;

static PyTypeObject *WriterType, *ReaderType;

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static double now_in_s(void) { return (double)now_ns() * 1e-9; }

static int ring_init(Ring *self, PyObject *args, PyObject *kwargs) {
    PyObject *memory, *keep;
    int is_reader = Py_TYPE((PyObject *)self) == ReaderType;
    if (self->ring) {
        PyErr_SetString(PyExc_TypeError, "a ring is initialized once");
        return -1;
    }
    if (!PyArg_ParseTuple(args, is_reader ? "OO" : "OOi", &memory, &keep, &self->bell)) return -1;
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
    if (is_reader) { /* it sleeps until somebody looks */
        atomic_store(&self->ring->asleep, WOKEN_BY_STREAM);
        self->armed = 1;
    }
    return 0;
}

static void ring_dealloc(Ring *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (self->memory.obj) PyBuffer_Release(&self->memory);
    Py_XDECREF(self->keep);
    Py_XDECREF(self->find);
    Py_XDECREF(self->session);
    Py_XDECREF((PyObject *)self->envelope);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static int is_ready(Ring *self) {
    if (self->ring) return 1;
    PyErr_SetString(PyExc_TypeError, "this ring has no memory");
    return 0;
}

/* ---- the writer */

static Py_ssize_t length_of(PyObject *list) {
    return PyList_Check(list) ? PyList_Size(list) : PyTuple_Check(list) ? PyTuple_Size(list) : -1;
}

static PyObject *item_of(PyObject *list, Py_ssize_t at) { /* borrowed */
    return PyList_Check(list) ? PyList_GetItem(list, at) : PyTuple_GetItem(list, at);
}

/* What a frame consists of. */
typedef struct {
    Py_ssize_t count;
    uint64_t total; /* bytes of the parts */
    const char *starts[MOST_PARTS];
    uint32_t sizes[MOST_PARTS]; /* and ELSEWHERE */
    Py_buffer views[MOST_PARTS];
} pieces;

static void release(pieces *from) {
    while (from->count-- > 0)
        if (from->views[from->count].obj) PyBuffer_Release(&from->views[from->count]);
}

static int piece(pieces *to, const char *start, Py_ssize_t size, uint64_t most) { /* 0: too much */
    if (to->count == MOST_PARTS || (uint64_t)size > most - to->total) return 0;
    to->views[to->count].obj = NULL;
    to->starts[to->count] = start;
    to->sizes[to->count++] = (uint32_t)size;
    to->total += (uint64_t)size;
    return 1;
}

/* 1: it is one more; 0: too much; -1: an exception is set */
static int piece_of(pieces *to, PyObject *part, uint64_t most) {
    if (PyTuple_Check(part)) { /* (description,) of one that lies elsewhere */
        PyObject *description = PyTuple_Size(part) == 1 ? PyTuple_GetItem(part, 0) : NULL;
        if (!description || !PyBytes_CheckExact(description)) {
            PyErr_SetString(PyExc_TypeError, "what stands for a part is a tuple of bytes");
            return -1;
        }
        int taken = piece(to, PyBytes_AsString(description), PyBytes_Size(description), most);
        if (taken) to->sizes[to->count - 1] |= ELSEWHERE;
        return taken;
    }
    if (PyBytes_CheckExact(part)) return piece(to, PyBytes_AsString(part), PyBytes_Size(part), most);
    Py_buffer view;
    if (PyObject_GetBuffer(part, &view, PyBUF_SIMPLE)) return -1;
    int taken = piece(to, view.buf, view.len, most);
    if (taken) to->views[to->count - 1] = view;
    else PyBuffer_Release(&view);
    return taken;
}

static uint64_t most_of(Ring *self) { return self->capacity / 8 * 3; }

static uint64_t bytes_needed(const pieces *frame) {
    return (sizeof(struct record) + 4 * (uint64_t)frame->count + frame->total + 7) & ~(uint64_t)7;
}

static int has_bytes(Ring *self, uint64_t bytes) {
    if (self->mine + bytes - self->theirs > self->capacity)
        self->theirs = atomic_load_explicit(&self->ring->head, memory_order_acquire);
    return self->mine + bytes - self->theirs <= self->capacity;
}

static int put(Ring *self, const pieces *frame) { /* 0: no room */
    uint64_t need = bytes_needed(frame), here = self->capacity - (self->mine & (self->capacity - 1));
    uint64_t skip = here < need ? here : 0;
    if (need > most_of(self) || !has_bytes(self, skip + need)) return 0;
    struct record record = {(uint32_t)need, (uint32_t)frame->count, self->after};
    if (skip) {
        uint32_t marker = SKIP;
        memcpy(self->data + (self->mine & (self->capacity - 1)), &marker, sizeof marker);
    }
    char *to = self->data + ((self->mine + skip) & (self->capacity - 1));
    memcpy(to, &record, sizeof record);
    to += sizeof record;
    memcpy(to, frame->sizes, 4 * (size_t)frame->count);
    to += 4 * frame->count;
    for (Py_ssize_t i = 0; i < frame->count; i++) {
        uint32_t size = frame->sizes[i] & ~ELSEWHERE;
        memcpy(to, frame->starts[i], size);
        to += size;
    }
    self->mine += skip + need;
    atomic_store_explicit(&self->ring->tail, self->mine, memory_order_release);
    return 1;
}

/* 1: pushed; 0: too large, or no room; -1: an exception is set */
static int push_one(Ring *self, PyObject *frame) {
    pieces found;
    int result = 1;
    Py_ssize_t count = length_of(frame);
    if (count < 0) {
        PyErr_SetString(PyExc_TypeError, "a frame is a list or a tuple of buffers");
        return -1;
    }
    found.count = 0, found.total = 0;
    for (Py_ssize_t i = 0; i < count && result == 1; i++) result = piece_of(&found, item_of(frame, i), most_of(self));
    if (result == 1) result = put(self, &found);
    release(&found);
    return result;
}

static PyObject *writer_push(Ring *self, PyObject *frames) {
    Py_ssize_t count = length_of(frames), taken = 0;
    if (count < 0) {
        PyErr_SetString(PyExc_TypeError, "push(frames): frames in a list or a tuple");
        return NULL;
    }
    if (!is_ready(self)) return NULL;
    for (; taken < count; taken++) {
        int pushed = push_one(self, item_of(frames, taken));
        if (pushed < 0 && !taken) return NULL;
        if (pushed < 0) PyErr_Clear(); /* it comes again, first */
        if (pushed != 1) break;
    }
    return PyLong_FromSsize_t(taken);
}

static int rouse(Ring *self) { /* 1: the reader sleeps, and is to be woken by the stream */
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&self->ring->asleep, memory_order_relaxed) == AWAKE) return 0;
    uint32_t woken_by = atomic_exchange(&self->ring->asleep, AWAKE);
    uint64_t once = 1;
    if (woken_by != WOKEN_BY_BELL) return woken_by != AWAKE;
    return write(self->bell, &once, sizeof once) < 0; /* then the other way */
}

static PyObject *writer_rouse(Ring *self, PyObject *unused) { return is_ready(self) ? PyBool_FromLong(rouse(self)) : NULL; }

/* ---- a session: see monarch/core/protocol.py, which has the same in Python */

enum { HEAD_OF_SESSION = 24, HEAD_OF_MESSAGE = 64 };
enum { HELLO = 1, DATA = 2, GOODBYE = 5 }; /* of `FrameType`: the first, that of a message, and the last of a session */

typedef struct {
    PyObject *parts;
    Py_ssize_t size; /* in bytes */
} kept;

typedef struct {
    PyObject_HEAD
    uint64_t sent, received;
    uint64_t acknowledged; /* the last number that we told the peer */
    Py_ssize_t unacked_bytes, unacknowledged_bytes, ack_every, ack_at_bytes;
    double ack_interval_s, ack_due_s; /* due < 0: nothing is */
    kept *unacked;                    /* the last is number `sent` */
    size_t first, count, room;        /* a power of two, of which `count` are in use, from `first` on */
    unsigned long long delivered;
    char ack_is_timed, room_is_awaited;
} Session;

static PyTypeObject *SessionType, *LaneType, *EnvelopeType, *InboxType, *DeliveryType;
static PyTypeObject *SignalType, *WakeType, *SpinType, *LeadType;

static void *new_of(PyTypeObject *type) { return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0); }

static void free_of(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *protocol_error(const char *format, ...) { /* always NULL */
    va_list values;
    va_start(values, format);
    PyObject *text = PyUnicode_FromFormatV(format, values), *errors = text ? PyImport_ImportModule("monarch.errors") : NULL;
    PyObject *type = errors ? PyObject_GetAttrString(errors, "RemoteProtocolError") : NULL;
    va_end(values);
    if (type) PyErr_SetObject(type, text);
    Py_XDECREF(type);
    Py_XDECREF(errors);
    Py_XDECREF(text);
    return NULL;
}

static PyObject *session_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"ack_every_n", "ack_interval_s", "ack_at_bytes", NULL};
    Py_ssize_t every = 1000, at_bytes = 4 << 20;
    double interval_s = 0.5;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|ndn", names, &every, &interval_s, &at_bytes)) return NULL;
    Session *self = new_of(type);
    if (!self) return NULL;
    self->ack_every = every;
    self->ack_interval_s = interval_s;
    self->ack_at_bytes = at_bytes;
    self->ack_due_s = -1;
    return (PyObject *)self;
}

static void session_dealloc(Session *self) {
    for (; self->count; self->count--, self->first++) Py_DECREF(self->unacked[self->first & (self->room - 1)].parts);
    PyMem_Free(self->unacked);
    free_of((PyObject *)self);
}

static int make_room(Session *self, size_t more) {
    if (self->count + more <= self->room) return 1;
    size_t room = self->room ? self->room : 64;
    while (room < self->count + more) room *= 2;
    kept *unacked = PyMem_Malloc(room * sizeof *unacked);
    if (!unacked) {
        PyErr_NoMemory();
        return 0;
    }
    for (size_t i = 0; i < self->count; i++) unacked[i] = self->unacked[(self->first + i) & (self->room - 1)];
    PyMem_Free(self->unacked);
    self->unacked = unacked;
    self->first = 0;
    self->room = room;
    return 1;
}

static void keep(Session *self, PyObject *parts, Py_ssize_t size) { /* there is room; it takes `parts` over */
    self->unacked[(self->first + self->count++) & (self->room - 1)] = (kept){parts, size};
    self->unacked_bytes += size;
    self->sent++;
}

static void tell(Session *self) { /* what goes out now says what has come */
    self->acknowledged = self->received;
    self->ack_due_s = -1;
}

static void head_of_session(const Session *self, uint64_t number, char *to) {
    memset(to, 0, 8);
    to[0] = DATA;
    memcpy(to + 8, &number, 8);
    memcpy(to + 16, &self->received, 8);
}

static PyObject *session_told(Session *self, PyObject *unused) {
    tell(self);
    return PyLong_FromUnsignedLongLong(self->received);
}

static PyObject *session_keep(Session *self, PyObject *args) {
    PyObject *parts;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "O!n", &PyList_Type, &parts, &size) || !make_room(self, 1)) return NULL;
    Py_INCREF(parts);
    keep(self, parts, size);
    return PyLong_FromUnsignedLongLong(self->sent);
}

static void forget_first(Session *self) {
    kept *oldest = &self->unacked[self->first & (self->room - 1)];
    PyObject *parts = oldest->parts;
    self->unacked_bytes -= oldest->size;
    self->first++;
    self->count--;
    Py_DECREF(parts); /* last: who it belongs to may run code of Python */
}

static void forget_until(Session *self, uint64_t number) {
    while (self->count && self->sent - self->count + 1 <= number) forget_first(self);
}

static PyObject *session_acknowledge(Session *self, PyObject *arg) {
    uint64_t number = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred()) return NULL;
    forget_until(self, number);
    Py_RETURN_NONE;
}

static PyObject *session_abandon(Session *self, PyObject *unused) {
    forget_until(self, self->sent);
    Py_RETURN_NONE;
}

static PyObject *session_unacked(Session *self, void *closure) {
    PyObject *found = PyList_New(0);
    for (size_t i = 0; found && i < self->count; i++) {
        kept *each = &self->unacked[(self->first + i) & (self->room - 1)];
        unsigned long long number = self->sent - self->count + 1 + i;
        Py_INCREF(each->parts);
        PyObject *item = Py_BuildValue("(KNn)", number, each->parts, each->size);
        if (!item || PyList_Append(found, item)) Py_CLEAR(found);
        Py_XDECREF(item);
    }
    return found;
}

static PyObject *session_accept(Session *self, PyObject *frame) {
    if (!PyList_Check(frame)) {
        PyErr_SetString(PyExc_TypeError, "accept(frame): a frame is a list");
        return NULL;
    }
    PyObject *head;
    Py_buffer view;
    if (!PyList_Size(frame)) return protocol_error("a frame head of 0 bytes");
    head = PyList_GetItem(frame, 0);
    if (PyObject_GetBuffer(head, &view, PyBUF_SIMPLE)) return NULL;
    uint64_t number = 0, acknowledged = 0;
    unsigned char kind = 0;
    Py_ssize_t size = view.len;
    PyObject *inner = NULL;
    if (size >= HEAD_OF_SESSION) {
        const char *at = view.buf;
        kind = (unsigned char)at[0];
        memcpy(&number, at + 8, 8);
        memcpy(&acknowledged, at + 16, 8);
        if (kind == DATA) inner = PyBytes_FromStringAndSize(at + HEAD_OF_SESSION, size - HEAD_OF_SESSION);
    }
    PyBuffer_Release(&view);
    if (size < HEAD_OF_SESSION) return protocol_error("a frame head of %zd bytes", size);
    if (kind == DATA && !inner) return NULL;
    if (acknowledged > self->sent) {
        Py_XDECREF(inner);
        return protocol_error("the peer acknowledges frame %llu of %llu", acknowledged, self->sent);
    }
    if (kind == DATA && number > self->received + 1) {
        Py_DECREF(inner);
        return protocol_error("frame %llu arrived after frame %llu", number, self->received);
    }
    if (kind < HELLO || kind > GOODBYE) return protocol_error("a frame of unknown type %d", (int)kind);
    if (kind == DATA && number == self->received + 1) {
        if (PyList_SetItem(frame, 0, inner)) return NULL;
        Py_INCREF(frame);
    } else {
        Py_XDECREF(inner); /* sent again after a break, and here already */
        frame = Py_None;
        Py_INCREF(frame);
    }
    forget_until(self, acknowledged); /* last: see there */
    return frame;
}

static void took(Session *self, Py_ssize_t bytes, double now_s) {
    self->received++;
    if (self->ack_due_s < 0) {
        self->ack_due_s = now_s + self->ack_interval_s;
        self->unacknowledged_bytes = 0;
    }
    self->unacknowledged_bytes += bytes;
}

static PyObject *session_took(Session *self, PyObject *args) {
    Py_ssize_t bytes;
    double now_s;
    if (!PyArg_ParseTuple(args, "nd", &bytes, &now_s)) return NULL;
    took(self, bytes, now_s);
    Py_RETURN_NONE;
}

static int owes_ack(const Session *self) { return self->received != self->acknowledged && self->ack_due_s >= 0; }

static int ack_is_due(const Session *self, double now_s) {
    return self->received - self->acknowledged >= (uint64_t)self->ack_every ||
           self->unacknowledged_bytes >= self->ack_at_bytes || now_s >= self->ack_due_s;
}

static PyObject *session_ack_due(Session *self, PyObject *now) {
    double now_s = PyFloat_AsDouble(now);
    if (PyErr_Occurred()) return NULL;
    if (!owes_ack(self)) Py_RETURN_NONE;
    return PyBool_FromLong(ack_is_due(self, now_s));
}

static PyObject *session_owes_ack(Session *self, void *closure) {
    return PyBool_FromLong(self->received != self->acknowledged);
}

/* ---- an envelope: see monarch/core/envelope.py, which has the same in Python */

enum { CHAINED = 128, MESSAGE_TTL = 64 };

typedef struct {
    PyObject_HEAD
    PyObject *parts, *chain;
    unsigned long long dst_proc, dst_actor, dst_port, src_proc, src_actor, seq, reply_port, via;
    unsigned int rank;
    unsigned short ttl;
    unsigned char kind, flags;
} Envelope;

static PyObject *envelope_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"kind", "dst_proc", "dst_actor", "dst_port",   "src_proc", "src_actor", "parts", "flags",
                            "rank", "seq",      "reply_port", "ttl", "chain", "via",      NULL};
    Envelope *self = new_of(type);
    if (!self) return NULL;
    self->ttl = MESSAGE_TTL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "BKKKKKO|BIKKHSK", names, &self->kind, &self->dst_proc, &self->dst_actor,
                                     &self->dst_port, &self->src_proc, &self->src_actor, &self->parts, &self->flags,
                                     &self->rank, &self->seq, &self->reply_port, &self->ttl, &self->chain, &self->via)) {
        self->parts = self->chain = NULL;
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    Py_INCREF(self->parts);
    if (self->chain) Py_INCREF(self->chain);
    else self->chain = PyBytes_FromStringAndSize(NULL, 0);
    return (PyObject *)self;
}

static void envelope_dealloc(Envelope *self) {
    Py_XDECREF(self->parts);
    Py_XDECREF(self->chain);
    free_of((PyObject *)self);
}

static Py_ssize_t bytes_of(PyObject *parts) {
    Py_ssize_t total = 0;
    for (Py_ssize_t i = 0; PyList_Check(parts) && i < PyList_Size(parts); i++) {
        Py_ssize_t size = PyObject_Size(PyList_GetItem(parts, i));
        if (size < 0) PyErr_Clear(); /* it stands for what is missing */
        total += size > 0 ? size : 0;
    }
    return total;
}

static Py_ssize_t size_of(const Envelope *self) { return HEAD_OF_MESSAGE + bytes_of(self->parts); }

static PyObject *envelope_size(Envelope *self, void *closure) { return PyLong_FromSsize_t(size_of(self)); }

/* Of a head, which has been checked for its size, and the list of parts behind it, which this takes over. */
static PyObject *envelope_of(PyTypeObject *type, const char *head, PyObject *parts) {
    Envelope *self = new_of(type);
    uint64_t fields[7];
    if (!self) {
        Py_DECREF(parts);
        return NULL;
    }
    self->parts = parts;
    self->kind = (unsigned char)head[0];
    self->flags = (unsigned char)head[1] & ~CHAINED;
    memcpy(&self->ttl, head + 2, 2);
    memcpy(&self->rank, head + 4, 4);
    memcpy(fields, head + 8, sizeof fields);
    self->dst_proc = fields[0], self->dst_actor = fields[1], self->dst_port = fields[2], self->src_proc = fields[3];
    self->src_actor = fields[4], self->seq = fields[5], self->reply_port = fields[6];
    if (head[1] & CHAINED) {
        Py_ssize_t last = PyList_Size(parts) - 1;
        if (last < 0) protocol_error("a message without the chain that it announces");
        else if ((self->chain = PyBytes_FromObject(PyList_GetItem(parts, last))) &&
                 PyList_SetSlice(parts, last, last + 1, NULL))
            Py_CLEAR(self->chain);
    } else self->chain = PyBytes_FromStringAndSize(NULL, 0);
    if (!self->chain) {
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyObject *envelope_parse(PyObject *type, PyObject *frame) {
    Py_ssize_t count = PyList_Check(frame) ? PyList_Size(frame) : 0;
    Py_buffer view;
    if (!count) return protocol_error("a message head of 0 bytes, not %d", HEAD_OF_MESSAGE);
    if (PyObject_GetBuffer(PyList_GetItem(frame, 0), &view, PyBUF_SIMPLE)) return NULL;
    PyObject *found = NULL, *parts = view.len == HEAD_OF_MESSAGE ? PyList_GetSlice(frame, 1, count) : NULL;
    if (parts) found = envelope_of((PyTypeObject *)type, view.buf, parts);
    else if (!PyErr_Occurred()) protocol_error("a message head of %zd bytes, not %d", view.len, HEAD_OF_MESSAGE);
    PyBuffer_Release(&view);
    return found;
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
        record->size = *(const volatile uint32_t *)(self->data + place); /* once: another process may write there */
        if (record->size == SKIP) {
            if (here > there || !place) return BROKEN;
            mine += here;
            continue;
        }
        if (record->size < sizeof *record || record->size > here || record->size > there || record->size % 8)
            return BROKEN;
        memcpy((char *)record + sizeof record->size, self->data + place + sizeof record->size,
               sizeof *record - sizeof record->size);
        *at = mine;
        return record->parts > MOST_PARTS ? BROKEN : record->after > self->after ? NOTHING : RECORD;
    }
}

static int something_is_there(Ring *self) {
    struct record record;
    uint64_t at;
    return next_record(self, &record, &at) != NOTHING;
}

static int wants_a_look(Ring *self) { return self->is_left || something_is_there(self); }

static int lies_elsewhere(const struct record *record, const char *from) { /* some part of it */
    for (uint32_t i = 0, size; i < record->parts; i++) {
        memcpy(&size, from + 4 * i, 4);
        if (size & ELSEWHERE) return 1;
    }
    return 0;
}

/* What a description stands for, which this takes over; NULL without an exception: nobody says. */
static PyObject *found(Ring *self, PyObject *description) {
    PyObject *part = description && self->find ? PyObject_CallFunctionObjArgs(self->find, description, NULL) : NULL;
    Py_XDECREF(description);
    return part;
}

/* The parts of a record from the `first` on; NULL without an exception: their sizes are wrong */
static PyObject *frame_of(Ring *self, const struct record *record, const char *from, uint32_t first) {
    uint32_t sizes[MOST_PARTS], count = record->parts;
    uint64_t left = record->size - sizeof *record;
    if (left < 4 * (uint64_t)count) return NULL;
    memcpy(sizes, from, 4 * (size_t)count);
    from += 4 * (size_t)count;
    left -= 4 * (uint64_t)count;
    PyObject *frame = PyList_New(count - first);
    for (uint32_t i = 0; frame && i < count; i++) {
        uint32_t size = sizes[i] & ~ELSEWHERE;
        if (size > left) Py_CLEAR(frame);
        else if (i >= first) {
            PyObject *part = PyBytes_FromStringAndSize(from, size);
            if (sizes[i] & ELSEWHERE) part = found(self, part);
            if (!part || PyList_SetItem(frame, i - first, part)) Py_CLEAR(frame);
        }
        from += size;
        left -= size;
    }
    return frame;
}

/* Whether a record is the next message of the session, and nothing is wrong with it; Python looks at all others. */
static int is_next(Ring *self, const struct record *record, const char *from) {
    Session *session = (Session *)self->session;
    uint32_t first, count = record->parts;
    uint64_t number, known;
    if (!session || !count || record->size < sizeof *record + 4 * count) return 0;
    memcpy(&first, from, 4);
    const char *head = from + 4 * count;
    if (first != HEAD_OF_SESSION + HEAD_OF_MESSAGE || record->size - sizeof *record - 4 * count < first || head[0] != DATA)
        return 0;
    memcpy(&number, head + 8, 8);
    memcpy(&known, head + 16, 8);
    return number == (self->made > session->received ? self->made : session->received) + 1 && known <= session->sent;
}

static uint64_t receiver_of(const struct record *record, const char *from) { /* its process; of one that is next */
    uint64_t proc;
    memcpy(&proc, from + 4 * record->parts + HEAD_OF_SESSION + 8, 8);
    return proc;
}

static PyObject *message_of(Ring *self, const struct record *record, const char *from, uint64_t *acknowledged) { /* likewise */
    const char *head = from + 4 * record->parts;
    uint64_t number, known;
    memcpy(&number, head + 8, 8);
    memcpy(&known, head + 16, 8);
    PyObject *parts = frame_of(self, record, from, 1);
    PyObject *message = parts ? envelope_of(self->envelope, head + HEAD_OF_SESSION, parts) : NULL;
    if (message) {
        self->made = number;
        *acknowledged = known;
    }
    return message;
}

static int fall_asleep(Ring *self) { /* 0: it may not, something is there */
    atomic_store_explicit(&self->ring->asleep, self->attended ? WOKEN_BY_BELL : WOKEN_BY_STREAM, memory_order_relaxed);
    self->armed = 1;
    atomic_thread_fence(memory_order_seq_cst);
    return !something_is_there(self);
}

static void stay_awake(Ring *self) { /* its writer need not ring any more */
    if (self->armed) atomic_store_explicit(&self->ring->asleep, AWAKE, memory_order_relaxed);
    self->armed = 0;
}

/* What lies elsewhere may be large: somebody who pops does other things, too, as soon as he has so much of it. */
static const Py_ssize_t TURN_BYTES = 4 << 20;

static PyObject *reader_pop(Ring *self, PyObject *after) {
    if (!is_ready(self)) return NULL;
    self->after = PyLong_AsUnsignedLongLong(after);
    self->is_left = 0;
    if (PyErr_Occurred()) return NULL;
    PyObject *frames = PyList_New(0), *session = self->session;
    Py_ssize_t turn = 0;
    uint64_t acknowledged = 0;
    if (!frames) return NULL;
    Py_XINCREF(session);
    while (turn < TURN_BYTES || !self->attended) { /* who is not looked at must not leave anything behind */
        struct record record;
        uint64_t at;
        int there = next_record(self, &record, &at);
        if (there == NOTHING) {
            if (!self->attended && !fall_asleep(self)) continue;
            break;
        }
        const char *from = self->data + (at & (self->capacity - 1)) + sizeof record;
        PyObject *frame = NULL;
        if (there == RECORD && is_next(self, &record, from)) frame = message_of(self, &record, from, &acknowledged);
        else if (there == RECORD) frame = frame_of(self, &record, from, 0);
        if (!frame) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "what lies in the ring is no frame");
            break;
        }
        int failed = PyList_Append(frames, frame);
        if (lies_elsewhere(&record, from)) turn += PyList_Check(frame) ? bytes_of(frame) : size_of((Envelope *)frame);
        Py_DECREF(frame);
        if (failed) break;
        self->mine = at + record.size;
        atomic_store_explicit(&self->ring->head, self->mine, memory_order_release);
    }
    if (acknowledged) forget_until((Session *)session, acknowledged); /* last: see there */
    Py_XDECREF(session);
    if (PyErr_Occurred() && !PyList_Size(frames)) Py_CLEAR(frames);
    else PyErr_Clear(); /* the error comes again, with the next call */
    return frames;
}

static PyObject *reader_carry(Ring *self, PyObject *session) {
    PyObject *type = PyObject_TypeCheck(session, SessionType) ? PyObject_GetAttrString(session, "message") : NULL;
    if (!type || !PyType_Check(type) || !PyType_IsSubtype((PyTypeObject *)type, EnvelopeType)) {
        Py_XDECREF(type);
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a session, with the type of its messages");
        return NULL;
    }
    PyObject *old = self->session, *old_type = (PyObject *)self->envelope;
    Py_INCREF(session);
    self->session = session;
    self->envelope = (PyTypeObject *)type;
    Py_XDECREF(old);
    Py_XDECREF(old_type);
    Py_RETURN_NONE;
}

static PyObject *hand_over(PyObject *take, Envelope *message);
static int queue_now(PyObject *take, Envelope *message);

/* What `deliver_from` says: that was all; or what comes next needs a look at its link, or may only run no code of Python now. */
enum { ALL, LEFT, LEFT_TO_CODE };

/* `pop`, `accept`, a delivery and `took` for each message of the session that is there now, and next; of those that lie
 * elsewhere, as many as make a turn. With `calls_only` no code of Python runs. -1: an exception of `take` is set */
static int deliver_from(Ring *self, PyObject *take, uint64_t proc, double now_s, int calls_only) {
    Session *session = (Session *)self->session;
    self->is_left = 0;
    if (!session || !self->attended) return LEFT;
    Py_INCREF((PyObject *)session);
    uint64_t end = atomic_load_explicit(&self->ring->tail, memory_order_acquire), at, acknowledged = 0;
    int result = ALL, delivered = 0;
    Py_ssize_t turn = 0;
    struct record record;
    while (turn < TURN_BYTES && end - self->mine - 1 < self->capacity && next_record(self, &record, &at) == RECORD) {
        const char *from = self->data + (at & (self->capacity - 1)) + sizeof record;
        uint64_t made = self->made;
        if (!is_next(self, &record, from) || receiver_of(&record, from) != proc) result = LEFT;
        int elsewhere = result == ALL && lies_elsewhere(&record, from);
        if (elsewhere && calls_only) result = LEFT_TO_CODE;
        if (result != ALL) break;
        Envelope *message = (Envelope *)message_of(self, &record, from, &acknowledged);
        Py_ssize_t size = message ? size_of(message) : 0; /* whoever has it may take it apart */
        if (elsewhere) turn += size;
        uint64_t mine = self->mine;
        self->mine = at + record.size; /* first: once it is queued, others may have the interpreter */
        if (!message) result = LEFT; /* what is wrong with it, the long way finds out, too */
        else if (calls_only && !queue_now(take, message)) result = LEFT_TO_CODE;
        if (result != ALL) {
            self->made = made, self->mine = mine;
            PyErr_Clear();
            Py_XDECREF((PyObject *)message);
            break;
        }
        delivered = 1;
        atomic_store_explicit(&self->ring->head, self->mine, memory_order_release);
        PyObject *done = calls_only ? Py_None : hand_over(take, message);
        Py_DECREF((PyObject *)message);
        if (done || PyErr_ExceptionMatches(PyExc_Exception)) took(session, size, now_s), session->delivered++;
        if (!done) break;
        if (!calls_only) Py_DECREF(done);
    }
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    if (result == ALL && !delivered) result = LEFT; /* what wakes without a message is something else */
    if (owes_ack(session) && (!session->ack_is_timed || ack_is_due(session, now_s))) result = LEFT;
    if (acknowledged) forget_until(session, acknowledged); /* late: see there */
    if (session->room_is_awaited) result = LEFT;
    Py_DECREF((PyObject *)session);
    PyErr_Restore(type, error, trace);
    return type ? -1 : result;
}

static PyObject *reader_deliver(Ring *self, PyObject *const *args, Py_ssize_t n) {
    if (n != 3) {
        PyErr_SetString(PyExc_TypeError, "deliver(take, proc, now_s)");
        return NULL;
    }
    if (!is_ready(self)) return NULL;
    uint64_t proc = PyLong_AsUnsignedLongLong(args[1]);
    double now_s = PyFloat_AsDouble(args[2]);
    if (PyErr_Occurred()) return NULL;
    int result = deliver_from(self, args[0], proc, now_s, 0);
    return result < 0 ? NULL : PyBool_FromLong(result == ALL);
}

/* ---- the bell of the stream: a frame of no parts, all of it at once or nothing */

static int ring_bell(int fd) {
    uint32_t bell = 0;
    return send(fd, &bell, sizeof bell, MSG_DONTWAIT | MSG_NOSIGNAL) == sizeof bell;
}

static PyObject *module_ring_bell(PyObject *module, PyObject *arg) {
    long fd = PyLong_AsLong(arg);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(ring_bell((int)fd));
}

/* ---- marks: see monarch/transports/segments.py. Whether `memory[at]` was `old`, and is `new` now; no other process that does
 * the same comes in between. */

static PyObject *module_swap(PyObject *module, PyObject *args) {
    PyObject *memory, *swapped = NULL;
    Py_ssize_t at;
    unsigned char old, new;
    Py_buffer view;
    if (!PyArg_ParseTuple(args, "Onbb", &memory, &at, &old, &new) || PyObject_GetBuffer(memory, &view, PyBUF_WRITABLE)) return NULL;
    if (at < 0 || at >= view.len) PyErr_SetString(PyExc_IndexError, "outside of the memory");
    else swapped = PyBool_FromLong(atomic_compare_exchange_strong((_Atomic unsigned char *)view.buf + at, &old, new));
    PyBuffer_Release(&view);
    return swapped;
}

/* ---- a lane: how a session's messages leave through a ring, from the first look to the bell in one step. Nobody else runs
 * meanwhile, no thread and no handler of a signal: nothing here lets go of the interpreter, or runs code of Python. */

typedef struct {
    PyObject_HEAD
    Ring *writer;
    Session *session;
    Py_ssize_t most_bytes; /* unacknowledged; with more, who sends is to wait */
    int fd;                /* of the stream beside; -1: it is closed */
    Py_ssize_t claims;     /* messages that are about to be put there */
    char open;             /* nothing that was numbered before waits elsewhere */
} Lane;

static PyObject *lane_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *writer, *session;
    Py_ssize_t most_bytes;
    int fd;
    if (!PyArg_ParseTuple(args, "O!O!in", WriterType, &writer, SessionType, &session, &fd, &most_bytes)) return NULL;
    Lane *self = is_ready((Ring *)writer) ? new_of(type) : NULL;
    if (!self) return NULL;
    Py_INCREF(writer);
    Py_INCREF(session);
    self->writer = (Ring *)writer;
    self->session = (Session *)session;
    self->most_bytes = most_bytes;
    self->fd = fd;
    return (PyObject *)self;
}

static void lane_dealloc(Lane *self) {
    Py_XDECREF((PyObject *)self->writer);
    Py_XDECREF((PyObject *)self->session);
    free_of((PyObject *)self);
}

static PyObject *lane_close(Lane *self, PyObject *unused) {
    self->open = 0;
    self->fd = -1;
    Py_CLEAR(self->writer); /* whoever keeps the lane keeps no descriptor: `post` looks whether it is open, each time */
    Py_RETURN_NONE;
}

/* Bytes of a message: a copy of so much keeps the others from the interpreter for 10 us, and 64 KiB take 30 us less than
 * the long way. */
enum { MOST_TARGETS = 256, MOST_POSTED = 96 << 10 };

struct target {
    Lane *lane;
    PyObject *counter; /* or NULL: its messages have no numbers */
    PyObject *kept;    /* [head, *parts] */
    uint64_t proc, number, place;
    uint32_t rank;
};

/* Of a message: what does not differ between its receivers. */
struct message {
    unsigned char kind, flags;
    uint16_t ttl;
    uint64_t dst_actor, dst_port, src_proc, src_actor, reply_port;
};

static void head_of_message(const struct message *message, const struct target *to, char *head) {
    uint64_t fields[7] = {to->proc,           message->dst_actor, message->dst_port,  message->src_proc,
                          message->src_actor, to->number,         message->reply_port};
    head[0] = (char)message->kind;
    head[1] = (char)message->flags;
    memcpy(head + 2, &message->ttl, 2);
    memcpy(head + 4, &to->rank, 4);
    memcpy(head + 8, fields, sizeof fields);
}

static PyObject *name_of_lane; /* "lane" */

static int target_of(PyObject *item, struct target *to) { /* 1; 0: not now; -1: an exception is set */
    PyObject *counter = PyTuple_Check(item) && PyTuple_Size(item) == 4 ? PyTuple_GetItem(item, 1) : NULL;
    if (!counter || (counter != Py_None && !PyIter_Check(counter))) {
        PyErr_SetString(PyExc_TypeError, "a target is (peer, counter, process, rank)");
        return -1;
    }
    PyObject *lane = PyObject_GetAttr(PyTuple_GetItem(item, 0), name_of_lane);
    if (!lane) return -1;
    int open = Py_TYPE(lane) == LaneType && ((Lane *)lane)->open;
    Py_DECREF(lane); /* its peer has it as long as nothing else runs */
    if (!open) return 0;
    to->lane = (Lane *)lane;
    to->counter = counter == Py_None ? NULL : counter;
    to->proc = PyLong_AsUnsignedLongLong(PyTuple_GetItem(item, 2));
    to->rank = (uint32_t)PyLong_AsUnsignedLong(PyTuple_GetItem(item, 3));
    return PyErr_Occurred() ? -1 : 1;
}

/* [head, *parts, chain]; the head is filled in when it is numbered. */
static PyObject *parts_to_keep(PyObject *parts, PyObject *chain) {
    Py_ssize_t count = PyList_Size(parts), chained = PyBytes_Size(chain) > 0;
    PyObject *list = PyList_New(1 + count + chained), *head = list ? PyBytes_FromStringAndSize(NULL, HEAD_OF_MESSAGE) : NULL;
    if (!head) {
        Py_XDECREF(list);
        return NULL;
    }
    PyList_SetItem(list, 0, head);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *part = PyList_GetItem(parts, i);
        Py_INCREF(part);
        PyList_SetItem(list, 1 + i, part);
    }
    if (chained) {
        Py_INCREF(chain);
        PyList_SetItem(list, 1 + count, chain);
    }
    return list;
}

/* 1: all targets can take a frame that needs so many bytes of their rings; 0: some cannot now; -1: an exception is set */
static int all_have_room(PyObject *items, struct target *targets, uint64_t need) {
    Py_ssize_t count = PyTuple_Size(items), i;
    int result = 1;
    for (i = 0; i < count && result == 1; i++) result = target_of(PyTuple_GetItem(items, i), &targets[i]);
    for (Py_ssize_t j = 0; j < i && result == 1; j++) targets[j].lane->claims = 0;
    for (Py_ssize_t j = 0; j < i && result == 1; j++) {
        Lane *lane = targets[j].lane;
        /* One more than those that are claimed: a record may have to begin at the start. */
        if (need > most_of(lane->writer) || !has_bytes(lane->writer, (++lane->claims + 1) * need)) result = 0;
        else if (!make_room(lane->session, lane->claims)) result = -1;
    }
    return result;
}

static int draw_number(struct target *to) { /* 0: an exception is set */
    to->number = 0;
    if (!to->counter) return 1;
    PyObject *number = PyIter_Next(to->counter);
    if (!number) return 0;
    to->number = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return !PyErr_Occurred();
}

/* Put a message into the ring of one of its receivers. */
static void commit(const struct message *message, struct target *to, pieces *frame) {
    Session *session = to->lane->session;
    char head[HEAD_OF_SESSION + HEAD_OF_MESSAGE];
    head_of_message(message, to, head + HEAD_OF_SESSION);
    memcpy(PyBytes_AsString(PyList_GetItem(to->kept, 0)), head + HEAD_OF_SESSION, HEAD_OF_MESSAGE);
    head_of_session(session, session->sent + 1, head);
    keep(session, to->kept, (Py_ssize_t)(frame->total - HEAD_OF_SESSION));
    to->kept = NULL;
    tell(session);
    frame->starts[0] = head;
    put(to->lane->writer, frame); /* there is room: see `all_have_room` */
}

enum { NOT_SENT, SENT, FULL }; /* what `post` says: see monarch/compiled.py */

/* ---- an inbox: how a call to an actor of this process gets there, from the first look to the waking in one step, too. Once
 * it is there, and known whom to wake, the interpreter may be let go: this goes on behind it. See monarch/core/mailbox.py,
 * which has the same in Python. */

enum { CALL = 1, PORT = 2 }; /* of `Kind` */
enum { SEQUENCED = 8, SKIP_NUMBER = 32, QUEUED_BYTES = 1024 };

typedef struct {
    PyObject_HEAD
    PyObject *calls;    /* a deque */
    PyObject *signal;   /* a Signal: who is to be woken */
    PyObject *message;  /* the type of what is in `calls` */
    PyObject *expected; /* a dict: (process, actor) -> the number that comes next */
    PyObject *waiting;  /* a dict of messages that came before others; of any, Python looks at what comes */
    PyObject *behind;   /* a list of what is to be done once messages are here, likewise */
    PyObject *closed;   /* why nothing is accepted any more, or None */
    long long come_bytes, weigh_at_bytes;
    unsigned long long last_proc, last_actor; /* who sent what came last */
    char is_mixed; /* it came while there was something of another; who takes it all out forgets that */
} Inbox;

/* A signal, on which one thread waits, and what wakes one that polls: see monarch/core/driver.py and monarch/wake.py, which
 * have the same in Python. */
typedef struct {
    PyObject_HEAD
    PyObject *lock, *wake, *bell; /* which of them wakes it; NULL is None */
    unsigned long pumping;        /* the thread that waits while it polls */
    char is_set, looks, is_near;
} Signal;

typedef struct {
    PyObject_HEAD
    PyObject *bell, *owned;
    int fd;
} Wake;

static PyObject *name_of_append, *name_of_mailbox, *name_of_deliver, *name_of_release, *name_of_acquire, *name_of_noted;

static void signal_dealloc(Signal *self) {
    Py_XDECREF(self->lock);
    Py_XDECREF(self->wake);
    Py_XDECREF(self->bell);
    free_of((PyObject *)self);
}

static void wake_dealloc(Wake *self) {
    Py_XDECREF(self->bell);
    Py_XDECREF(self->owned);
    free_of((PyObject *)self);
}

static int is_a(PyObject *object, PyTypeObject *type) { /* 0: an exception is set */
    if (PyObject_TypeCheck(object, type)) return 1;
    PyErr_Format(PyExc_TypeError, "this is no %R", (PyObject *)type);
    return 0;
}

static int inbox_traverse(Inbox *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->calls);
    Py_VISIT(self->signal);
    Py_VISIT(self->message);
    Py_VISIT(self->expected);
    Py_VISIT(self->waiting);
    Py_VISIT(self->behind);
    Py_VISIT(self->closed);
    return 0;
}

static int inbox_clear(Inbox *self) {
    Py_CLEAR(self->calls);
    Py_CLEAR(self->signal);
    Py_CLEAR(self->message);
    Py_CLEAR(self->expected);
    Py_CLEAR(self->waiting);
    Py_CLEAR(self->behind);
    Py_CLEAR(self->closed);
    return 0;
}

static void inbox_dealloc(Inbox *self) {
    PyObject_GC_UnTrack(self);
    inbox_clear(self);
    free_of((PyObject *)self);
}

/* What wakes the thread that waits for a signal: one of these, or nothing. */
struct waking {
    char *byte;      /* to set; NULL: none */
    PyObject *lock;  /* to release; NULL: none */
    PyObject *owned; /* the descriptor to write to, which this keeps open; NULL: none */
    int fd;
};

/* As `Signal.notify` and `Wake.set`; 0: an exception is set. */
static int waking_of(PyObject *object, struct waking *how) {
    *how = (struct waking){NULL, NULL, NULL, -1};
    if (!is_a(object, SignalType)) return 0;
    const Signal *signal = (const Signal *)object;
    if (signal->is_set || signal->pumping == PyThread_get_thread_ident()) return 1;
    PyObject *bell = signal->bell;
    if (signal->wake && signal->wake != Py_None) {
        if (!is_a(signal->wake, WakeType)) return 0;
        const Wake *wake = (const Wake *)signal->wake;
        bell = wake->bell;
        if (wake->owned && wake->owned != Py_None) how->owned = wake->owned, how->fd = wake->fd;
    } else how->lock = signal->lock;
    if (bell && PyByteArray_Check(bell) && PyByteArray_Size(bell) == 1) {
        how->byte = PyByteArray_AsString(bell);
        how->owned = how->lock = NULL;
    }
    return 1;
}

static void carry_out(const struct waking *how) {
    static const uint64_t one = 1;
    if (how->byte) *how->byte = 1;
    if (how->owned) { /* who is woken wants the interpreter: where it shares our CPU, it would sleep again at once */
        Py_INCREF(how->owned);
        Py_BEGIN_ALLOW_THREADS;
        ssize_t written = write(how->fd, &one, sizeof one); /* or it is readable already */
        (void)written;
        Py_END_ALLOW_THREADS;
        Py_DECREF(how->owned);
    }
    if (how->lock) {
        PyObject *released = PyObject_CallMethodObjArgs(how->lock, name_of_release, NULL);
        if (!released) PyErr_Clear(); /* the thread was awake */
        Py_XDECREF(released);
    }
}

/* Whether a call with that chain may come from the very actor that it is for: then Python looks for a deadlock. See
 * `comes_from` in monarch/core/chain.py. */
static int may_come_from(PyObject *chain, uint64_t proc, uint64_t actor) {
    const uint64_t link[2] = {proc, actor};
    if (!PyBytes_Check(chain)) return 1; /* Python says what is wrong with it */
    const char *at = PyBytes_AsString(chain);
    for (Py_ssize_t left = PyBytes_Size(chain) - (Py_ssize_t)sizeof link; at && left >= 0; left--, at++)
        if (!memcmp(at, link, sizeof link)) return 1;
    return 0;
}

static PyObject *envelope_here(Inbox *to, const struct message *message, PyObject *parts, PyObject *chain, uint64_t proc,
                               uint32_t rank) {
    PyTypeObject *type = (PyTypeObject *)to->message;
    if (!type || !PyType_Check(to->message) || !PyType_IsSubtype(type, EnvelopeType)) {
        PyErr_SetString(PyExc_TypeError, "an inbox needs the type of its messages");
        return NULL;
    }
    Envelope *self = new_of(type);
    if (!self) return NULL;
    Py_INCREF(parts);
    self->parts = parts;
    self->kind = message->kind;
    self->flags = message->flags & ~(SEQUENCED | CHAINED); /* none overtakes another on this way */
    self->ttl = message->ttl;
    self->rank = rank;
    self->dst_proc = proc, self->dst_actor = message->dst_actor, self->dst_port = message->dst_port;
    self->src_proc = message->src_proc, self->src_actor = message->src_actor, self->reply_port = message->reply_port;
    Py_INCREF(chain);
    self->chain = chain;
    return (PyObject *)self;
}

static int has_room(const Inbox *to, long long size) {
    return to->closed == Py_None && to->calls && to->signal && to->come_bytes + size <= to->weigh_at_bytes;
}

/* It has room. -1: an exception is set */
static int queue(Inbox *to, PyObject *envelope, long long size) {
    struct waking how;
    if (!waking_of(to->signal, &how)) return -1;
    const Envelope *call = (Envelope *)envelope;
    if (call->src_actor != to->last_actor || call->src_proc != to->last_proc) {
        to->last_proc = call->src_proc, to->last_actor = call->src_actor;
        if (PyObject_Size(to->calls) > 0) to->is_mixed = 1;
    }
    PyObject *queued = PyObject_CallMethodObjArgs(to->calls, name_of_append, envelope, NULL);
    if (queued) ((Signal *)to->signal)->is_set = 1;
    Py_XDECREF(queued);
    if (!queued) return -1; /* there is no memory */
    to->come_bytes += size;
    carry_out(&how);
    return SENT;
}

static int post_here(Inbox *to, const struct message *message, PyObject *parts, PyObject *chain, uint64_t proc, uint32_t rank) {
    long long size = QUEUED_BYTES + bytes_of(parts);
    if (may_come_from(chain, proc, message->dst_actor)) return NOT_SENT;
    PyObject *envelope = envelope_here(to, message, parts, chain, proc, rank); /* a collection may run code of Python here */
    int result = !envelope ? -1 : has_room(to, size) ? queue(to, envelope, size) : NOT_SENT;
    Py_XDECREF(envelope);
    return result;
}

/* ---- whom messages are for that have come to this process: see `Proc.deliver`, which does it for all others */

typedef struct {
    PyObject_HEAD
    PyObject *take;   /* that */
    PyObject *actors; /* a dict: number -> what has a `mailbox` */
    PyObject *ports;  /* a dict: number -> what can `deliver` */
} Delivery;

static PyObject *delivery_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *take, *actors, *ports;
    if (!PyArg_ParseTuple(args, "OO!O!", &take, &PyDict_Type, &actors, &PyDict_Type, &ports)) return NULL;
    Delivery *self = new_of(type);
    if (!self) return NULL;
    Py_INCREF(take);
    Py_INCREF(actors);
    Py_INCREF(ports);
    self->take = take;
    self->actors = actors;
    self->ports = ports;
    return (PyObject *)self;
}

static int delivery_traverse(Delivery *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->take);
    Py_VISIT(self->actors);
    Py_VISIT(self->ports);
    return 0;
}

static int delivery_clear(Delivery *self) {
    Py_CLEAR(self->take);
    Py_CLEAR(self->actors);
    Py_CLEAR(self->ports);
    return 0;
}

static void delivery_dealloc(Delivery *self) {
    PyObject_GC_UnTrack(self);
    delivery_clear(self);
    free_of((PyObject *)self);
}

static PyObject *at_number(PyObject *dict, uint64_t number) { /* borrowed; NULL: nothing, maybe with an exception */
    PyObject *key = PyLong_FromUnsignedLongLong(number);
    PyObject *found = key ? PyDict_GetItemWithError(dict, key) : NULL;
    Py_XDECREF(key);
    return found;
}

/* Queue a call where it is the next of its sender's, and nothing about it is special. SENT; 0: it was not; -1 */
static int queue_next(PyObject *actors, Envelope *message) {
    if ((message->flags & (SEQUENCED | SKIP_NUMBER)) != SEQUENCED) return 0;
    if (may_come_from(message->chain, message->dst_proc, message->dst_actor)) return 0;
    PyObject *actor = at_number(actors, message->dst_actor), *box = actor ? PyObject_GetAttr(actor, name_of_mailbox) : NULL;
    if (!box) {
        if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
        PyErr_Clear();
        return 0;
    }
    Inbox *to = (Inbox *)box;
    int result = PyObject_TypeCheck(box, InboxType) && to->expected && to->waiting && to->behind ? SENT : 0;
    PyObject *sender = result ? Py_BuildValue("(KK)", message->src_proc, message->src_actor) : NULL;
    PyObject *next = sender ? PyLong_FromUnsignedLongLong(message->seq + 1) : NULL;
    if (result && !next) result = -1;
    long long size = QUEUED_BYTES + bytes_of(message->parts);
    /* From here on nothing is made that could start a collection. */
    if (result == SENT && (PyObject_Size(to->waiting) || PyObject_Size(to->behind) || !has_room(to, size))) result = 0;
    PyObject *number = result == SENT ? PyDict_GetItemWithError(to->expected, sender) : NULL;
    if (result == SENT && (number ? PyLong_AsUnsignedLongLong(number) : 0) != message->seq) result = 0;
    if (PyErr_Occurred()) result = -1;
    if (result == SENT && PyDict_SetItem(to->expected, sender, next)) result = -1;
    if (result == SENT) result = queue(to, (PyObject *)message, size);
    Py_XDECREF(sender);
    Py_XDECREF(next);
    Py_DECREF(box);
    return result;
}

static PyObject *hand_over(PyObject *take, Envelope *message) {
    if (Py_TYPE(take) == DeliveryType) {
        const Delivery *to = (Delivery *)take;
        PyObject *sink = message->kind == PORT ? at_number(to->ports, message->dst_port) : NULL;
        int queued = message->kind == CALL ? queue_next(to->actors, message) : 0;
        if (queued < 0 || PyErr_Occurred()) return NULL;
        if (queued) Py_RETURN_NONE;
        if (sink) {
            Py_INCREF(sink); /* it may be the last message for it */
            PyObject *done = PyObject_CallMethodObjArgs(sink, name_of_deliver, (PyObject *)message, NULL);
            Py_DECREF(sink);
            return done;
        }
        take = to->take;
    }
    return PyObject_CallFunctionObjArgs(take, (PyObject *)message, NULL);
}

static PyObject *delivery_call(Delivery *self, PyObject *args, PyObject *kwargs) {
    PyObject *message = !kwargs && PyTuple_Size(args) == 1 ? PyTuple_GetItem(args, 0) : NULL;
    if (!message || !PyObject_TypeCheck(message, EnvelopeType)) return PyObject_Call(self->take, args, kwargs);
    return hand_over((PyObject *)self, (Envelope *)message);
}

static int queue_now(PyObject *take, Envelope *message) { /* now, where that runs no code of Python */
    int queued = Py_TYPE(take) == DeliveryType && message->kind == CALL ? queue_next(((Delivery *)take)->actors, message) : 0;
    if (queued < 0) PyErr_Clear(); /* the error comes again, in the long way */
    return queued == SENT;
}

static PyObject *module_post(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    if (n != 11 || !PyTuple_Check(args[0]) || !PyList_Check(args[1]) || !PyBytes_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "post(targets, parts, chain, kind, flags, ttl, dst_actor, dst_port, src_proc, "
                                         "src_actor, reply_port): a tuple, a list, bytes, numbers");
        return NULL;
    }
    PyObject *items = args[0], *parts = args[1], *chain = args[2];
    uint64_t numbers[8];
    for (int i = 0; i < 8; i++) numbers[i] = PyLong_AsUnsignedLongLong(args[3 + i]);
    Py_ssize_t count = PyTuple_Size(items), length = PyList_Size(parts);
    if (PyErr_Occurred()) return NULL;
    if (!count || count > MOST_TARGETS) return PyLong_FromLong(NOT_SENT);
    struct message message = {(unsigned char)numbers[0],
                              (unsigned char)(numbers[1] | (PyBytes_Size(chain) ? CHAINED : 0)),
                              (uint16_t)numbers[2], numbers[3], numbers[4], numbers[5], numbers[6], numbers[7]};
    PyObject *only = count == 1 ? PyTuple_GetItem(items, 0) : NULL;
    if (only && PyTuple_Check(only) && PyTuple_Size(only) == 4 && PyObject_TypeCheck(PyTuple_GetItem(only, 0), InboxType)) {
        uint64_t proc = PyLong_AsUnsignedLongLong(PyTuple_GetItem(only, 2));
        unsigned long rank = PyLong_AsUnsignedLong(PyTuple_GetItem(only, 3));
        if (PyErr_Occurred()) return NULL;
        int sent = post_here((Inbox *)PyTuple_GetItem(only, 0), &message, parts, chain, proc, (uint32_t)rank);
        return sent < 0 ? NULL : PyLong_FromLong(sent);
    }
    struct target targets[MOST_TARGETS];
    Py_ssize_t ready = 0;
    pieces frame;
    frame.count = 0, frame.total = 0;
    int result = piece(&frame, NULL, HEAD_OF_SESSION + HEAD_OF_MESSAGE, MOST_POSTED);
    for (Py_ssize_t i = 0; i < length && result == 1; i++) result = piece_of(&frame, PyList_GetItem(parts, i), MOST_POSTED);
    if (result == 1 && PyBytes_Size(chain)) result = piece_of(&frame, chain, MOST_POSTED);
    if (result == 1) result = all_have_room(items, targets, bytes_needed(&frame)); /* most often, where not, it ends here */
    for (; ready < count && result == 1; ready++) {
        if (!(targets[ready].kept = parts_to_keep(parts, chain))) result = -1; /* a collection may run code of Python here */
    }
    if (result == 1) result = all_have_room(items, targets, bytes_needed(&frame));
    for (Py_ssize_t i = 0; i < count && result == 1; i++) {
        if (!draw_number(&targets[i])) result = -1;
    }
    for (Py_ssize_t i = 0; i < count && result == SENT; i++) commit(&message, &targets[i], &frame); /* cannot fail */
    for (Py_ssize_t i = 0; i < count && result >= SENT; i++) {
        Lane *lane = targets[i].lane;
        if (rouse(lane->writer)) ring_bell(lane->fd); /* without room for it there is something to read, which wakes, too */
        if (lane->session->unacked_bytes > lane->most_bytes) result = FULL;
    }
    release(&frame);
    for (Py_ssize_t i = 0; i < ready; i++) Py_XDECREF(targets[i].kept);
    return result < 0 ? NULL : PyLong_FromLong(result);
}

static PyObject *lane_open(Lane *self, void *closure) { return PyBool_FromLong(self->open); }

static int lane_let(Lane *self, PyObject *value, void *closure) {
    int open = value ? PyObject_IsTrue(value) : 0;
    if (open < 0) return -1;
    self->open = open && self->fd >= 0;
    return 0;
}

/* ---- many readers */

enum { A_FEW = 64, MOST_LOOKED_AT = 256, YIELDS_WITHIN_NS = 12000 };

typedef struct {
    Py_ssize_t count;
    Ring **at; /* borrowed from a tuple */
    Ring *few[A_FEW];
} readers;

static int gather(readers *all, PyObject *tuple) { /* 0: an exception is set */
    all->count = PyTuple_Check(tuple) ? PyTuple_Size(tuple) : 0;
    all->at = all->count > A_FEW ? PyMem_Malloc((size_t)all->count * sizeof *all->at) : all->few;
    if (!all->at) PyErr_NoMemory();
    else if (!PyTuple_Check(tuple)) PyErr_SetString(PyExc_TypeError, "readers are to be in a tuple");
    for (Py_ssize_t i = 0; i < all->count && !PyErr_Occurred(); i++) {
        all->at[i] = (Ring *)PyTuple_GetItem(tuple, i);
        if (Py_TYPE((PyObject *)all->at[i]) != ReaderType || !all->at[i]->ring)
            PyErr_SetString(PyExc_TypeError, "these are not all readers");
    }
    if (!PyErr_Occurred()) return 1;
    if (all->at != all->few) PyMem_Free(all->at);
    return 0;
}

static void scatter(readers *all) {
    if (all->at != all->few) PyMem_Free(all->at);
}

/* Threads of this process that look, and so have let go of the interpreter. */
static atomic_int looking;

/* Another thread of this process has set our bell. It has the interpreter still, as a rule, and lets it go when it begins to
 * look itself. Who asks for it before is put to sleep, and is woken in 25 us and more on a CPU that slept. One that sleeps
 * instead is not seen to let it go: beside a busy neighbour, where this happens, a call within the process took 145 us with
 * 100 us here, 56 with 12; on a quiet machine 32 with both. */
static void wait_for_interpreter(void) {
    for (uint64_t began = now_ns(); atomic_load(&looking) < 2 && now_ns() - began < YIELDS_WITHIN_NS;) PAUSE();
}

/* Until one of the rings has something, or the epoll, or the bell is set, or the time is over: 0. The readers are awake from
 * now on. */
static int look(const readers *all, int epoll, const volatile char *bell, double time_s, double *longest_s) {
    int found = 0;
    Py_ssize_t count = all->count < MOST_LOOKED_AT ? all->count : MOST_LOOKED_AT;
    uint64_t time_ns = (uint64_t)(time_s * 1e9), longest = 0;
    Py_BEGIN_ALLOW_THREADS;
    atomic_fetch_add(&looking, 1);
    uint64_t began = now_ns(), last = began;
    for (Py_ssize_t i = 0; i < count; i++) stay_awake(all->at[i]);
    for (;;) {
        for (int look = 0; look < LOOKS_EACH && !found; look++) {
            for (Py_ssize_t i = 0; i < count && !found; i++) found = wants_a_look(all->at[i]);
            if (!found && *bell) {
                wait_for_interpreter();
                found = 1;
            }
            PAUSE();
        }
        struct epoll_event event;
        if (!found && epoll >= 0) found = epoll_wait(epoll, &event, 1, 0) != 0;
        uint64_t now = now_ns();
        if (now - last > longest) longest = now - last;
        last = now;
        if (found || now - began >= time_ns) break;
    }
    atomic_fetch_sub(&looking, 1);
    Py_END_ALLOW_THREADS;
    *longest_s = (double)longest * 1e-9;
    return found;
}

static int is_bell(PyObject *bell) {
    if (PyByteArray_Check(bell) && PyByteArray_Size(bell) == 1) return 1;
    PyErr_SetString(PyExc_TypeError, "a bell is a bytearray of one byte");
    return 0;
}

static PyObject *module_look(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    readers all;
    if (n != 4) {
        PyErr_SetString(PyExc_TypeError, "look(readers, epoll, time_s, bell)");
        return NULL;
    }
    long epoll = PyLong_AsLong(args[1]);
    double time_s = PyFloat_AsDouble(args[2]), longest_s;
    if (PyErr_Occurred() || !is_bell(args[3]) || !gather(&all, args[0])) return NULL;
    int found = look(&all, (int)epoll, PyByteArray_AsString(args[3]), time_s, &longest_s);
    PyObject *ready = found ? PyList_New(0) : Py_None;
    for (Py_ssize_t i = 0; i < all.count && found && ready; i++) {
        if (!wants_a_look(all.at[i])) continue;
        PyObject *number = PyLong_FromSsize_t(i);
        if (!number || PyList_Append(ready, number)) Py_CLEAR(ready);
        Py_XDECREF(number);
    }
    scatter(&all);
    return ready ? Py_BuildValue(found ? "(Nd)" : "(Od)", ready, longest_s) : NULL;
}

/* Whether one of the readers has something; where none has, their writers ring from now on. */
static int some_want_a_look(const readers *all) {
    /* First a look at all: as long as one has something, the writers of the others need not ring. */
    for (Py_ssize_t i = 0; i < all->count; i++)
        if (wants_a_look(all->at[i])) return 1;
    for (Py_ssize_t i = 0; i < all->count; i++)
        if (!fall_asleep(all->at[i])) return 1;
    return 0;
}

enum { MOST_EVENTS = 256, LONGEST_SLEEP_MS = 3600 * 1000 };

/* A signal that comes between Python's last look at signals and the call of the system does not end a sleep. Where one has
 * come, another may be right behind it: of those, up to one in 100 came just then. So the next sleep is a short one. */
static const double AFTER_SIGNAL_S = 10e-3;
static _Thread_local int a_signal_came; /* since the last sleep */

/* What `epoll_wait` says, or -errno; a negative time has no end, and it may be over early. The readers are awake then. */
static int sleep_on(const readers *all, int epoll, double timeout_s, struct epoll_event *events, double *slept_s) {
    if (a_signal_came && (timeout_s < 0 || timeout_s > AFTER_SIGNAL_S)) timeout_s = AFTER_SIGNAL_S;
    a_signal_came = 0;
    int timeout_ms = LONGEST_SLEEP_MS, found;
    if (timeout_s >= 0 && timeout_s * 1e3 < LONGEST_SLEEP_MS)
        timeout_ms = timeout_s > 0 ? (int)(timeout_s * 1e3 + (1 - 1e-9)) : 0; /* not before it is over */
    uint64_t began = now_ns();
    Py_BEGIN_ALLOW_THREADS;
    found = epoll_wait(epoll, events, MOST_EVENTS, timeout_ms);
    if (found < 0) found = -errno;
    Py_END_ALLOW_THREADS;
    if (found == -EINTR) a_signal_came = 1;
    *slept_s = (double)(now_ns() - began) * 1e-9;
    for (Py_ssize_t i = 0; i < all->count; i++) stay_awake(all->at[i]);
    return found;
}

static PyObject *module_sleep(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    if (n != 5 || !PyTuple_Check(args[0]) || !PyTuple_Check(args[1]) || PyTuple_Size(args[0]) != PyTuple_Size(args[1])) {
        PyErr_SetString(PyExc_TypeError, "sleep(readers, events, epoll, bell, timeout_s): tuples of the same length");
        return NULL;
    }
    readers all;
    long epoll = PyLong_AsLong(args[2]), bell = PyLong_AsLong(args[3]);
    double timeout_s = args[4] == Py_None ? -1 : PyFloat_AsDouble(args[4]), slept_s = -1;
    if (PyErr_Occurred() || !gather(&all, args[0])) return NULL;
    struct epoll_event events[MOST_EVENTS];
    int count = 0, look_at_all = some_want_a_look(&all), slept = !look_at_all;
    if (slept) count = sleep_on(&all, (int)epoll, timeout_s, events, &slept_s);
    if (count == -EBADF || count == -EINVAL) PyErr_SetString(PyExc_ValueError, "it is closed");
    else if (count == -EINTR) PyErr_CheckSignals();
    else if (count < 0) PyErr_Format(PyExc_OSError, "epoll_wait: %s", strerror(-count));
    for (int i = 0; i < count; i++) look_at_all |= events[i].data.fd == bell;
    PyObject *found = PyErr_Occurred() ? NULL : PyList_New(0);
    for (Py_ssize_t i = 0; i < all.count && look_at_all && found; i++)
        if (wants_a_look(all.at[i]) && PyList_Append(found, PyTuple_GetItem(args[1], i))) Py_CLEAR(found);
    for (int i = 0; i < count && found; i++) {
        if (events[i].data.fd == bell) continue;
        PyObject *item = Py_BuildValue("(iI)", events[i].data.fd, (unsigned int)events[i].events);
        if (!item || PyList_Append(found, item)) Py_CLEAR(found);
        Py_XDECREF(item);
    }
    scatter(&all);
    if (!found) return NULL;
    return slept ? Py_BuildValue("(Nd)", found, slept_s) : Py_BuildValue("(NO)", found, Py_None);
}

/* ---- whether to look for a while before sleeping: see monarch/core/spin.py, which has the same in Python */

typedef struct {
    PyObject_HEAD
    double time_s;
    long skips, penalty, short_left, short_wanted;
} Spin;

enum { FEWEST_SKIPS = 8, MOST_SKIPS = 512, MOST_SHORT = 16, SHORT_AT_FIRST = 3 };
static const double PREEMPTED_S = 200e-6;

static PyObject *spin_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    Spin *self = new_of(type);
    if (self) self->penalty = FEWEST_SKIPS, self->short_left = self->short_wanted = SHORT_AT_FIRST;
    return (PyObject *)self;
}

static int pays(Spin *self) {
    if (!self->skips) return !self->short_left;
    self->skips--;
    return 0;
}

static void learn(Spin *self, int found, double longest_s) {
    if (longest_s >= PREEMPTED_S) {
        self->skips = self->penalty;
        self->penalty = 2 * self->penalty < MOST_SKIPS ? 2 * self->penalty : MOST_SKIPS;
    } else if (found) self->penalty = FEWEST_SKIPS, self->short_wanted = 0;
    else {
        long wanted = 2 * self->short_wanted;
        self->short_left = self->short_wanted = wanted < 1 ? 1 : wanted < MOST_SHORT ? wanted : MOST_SHORT;
    }
}

static void slept(Spin *self, double for_s) {
    if (self->short_left) self->short_left = for_s < self->time_s ? self->short_left - 1 : self->short_wanted;
}

static PyObject *spin_pays(Spin *self, PyObject *unused) { return PyBool_FromLong(pays(self)); }

static PyObject *spin_learn(Spin *self, PyObject *args) {
    int found;
    double longest_s;
    if (!PyArg_ParseTuple(args, "pd", &found, &longest_s)) return NULL;
    learn(self, found, longest_s);
    Py_RETURN_NONE;
}

static PyObject *spin_slept(Spin *self, PyObject *for_s) {
    double slept_s = PyFloat_AsDouble(for_s);
    if (PyErr_Occurred()) return NULL;
    slept(self, slept_s);
    Py_RETURN_NONE;
}

/* ---- the lead: to wait for a signal, and deliver meanwhile what the rings bring, in one step. See `Poller.lead_by`. */

typedef struct {
    PyObject_HEAD
    PyObject *readers;    /* a tuple of those that are looked at */
    PyObject *take;       /* takes messages for the process `proc`; None: nobody does yet */
    PyObject *first;      /* as long as there is something, others are to lead, who do that before */
    PyObject *timers;     /* a list; the first item of the first says when it is due */
    PyObject *on_failure; /* hears what a delivery raised */
    PyObject *byte;       /* which `waker` sets, while the leader looks */
    PyObject *waker, *spin;
    unsigned long long proc;
    int epoll, eventfd; /* -1: it is closed; the bell in it */
} Lead;

/* Of one who leads. */
struct leading {
    Lead *by;
    readers all;
    Signal *signal;
    int calls_only;
    double look_s, deadline_s;
    int vain;         /* it has looked for nothing, and may sleep after that */
    PyObject *failed; /* what a delivery raised, or NULL */
};

static PyObject *lead_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    int epoll, eventfd;
    PyObject *waker, *byte, *spin, *timers, *first, *on_failure;
    if (!PyArg_ParseTuple(args, "iiO!O!O!O!OO", &epoll, &eventfd, WakeType, &waker, &PyByteArray_Type, &byte, SpinType, &spin,
                          &PyList_Type, &timers, &first, &on_failure) ||
        !is_bell(byte))
        return NULL;
    PyObject *readers = PyTuple_New(0);
    Lead *self = readers ? new_of(type) : NULL;
    if (!self) {
        Py_XDECREF(readers);
        return NULL;
    }
    self->readers = readers, self->epoll = epoll, self->eventfd = eventfd;
    Py_INCREF(self->waker = waker);
    Py_INCREF(self->byte = byte);
    Py_INCREF(self->spin = spin);
    Py_INCREF(self->timers = timers);
    Py_INCREF(self->first = first);
    Py_INCREF(self->on_failure = on_failure);
    Py_INCREF(self->take = Py_None);
    return (PyObject *)self;
}

static int lead_traverse(Lead *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->readers);
    Py_VISIT(self->take);
    Py_VISIT(self->first);
    Py_VISIT(self->timers);
    Py_VISIT(self->on_failure);
    return 0;
}

static int lead_clear(Lead *self) {
    Py_CLEAR(self->readers);
    Py_CLEAR(self->take);
    Py_CLEAR(self->first);
    Py_CLEAR(self->timers);
    Py_CLEAR(self->on_failure);
    return 0;
}

static void lead_dealloc(Lead *self) {
    PyObject_GC_UnTrack(self);
    lead_clear(self);
    Py_XDECREF(self->byte);
    Py_XDECREF(self->waker);
    Py_XDECREF(self->spin);
    free_of((PyObject *)self);
}

static void set_to(PyObject **place, PyObject *value) {
    PyObject *before = *place;
    Py_XINCREF(value);
    *place = value;
    Py_XDECREF(before);
}

/* Whether there is something to do, or somebody wants this thread */
static int look_first(struct leading *self, int *wanted) {
    Lead *by = self->by;
    Wake *waker = (Wake *)by->waker;
    volatile char *byte = PyByteArray_AsString(by->byte);
    double longest_s;
    set_to(&waker->bell, by->byte);
    int found = look(&self->all, by->epoll, byte, self->look_s, &longest_s);
    set_to(&waker->bell, NULL); /* whoever comes now writes to a descriptor */
    *wanted = *byte;
    *byte = 0;
    learn((Spin *)by->spin, found, longest_s);
    return found || *wanted || some_want_a_look(&self->all);
}

static void note_failure(struct leading *self) {
    PyObject *type, *trace;
    PyErr_Fetch(&type, &self->failed, &trace);
    PyErr_NormalizeException(&type, &self->failed, &trace);
    if (self->failed && trace) PyException_SetTraceback(self->failed, trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
}

/* Wait once, and deliver. Whether there is nothing else to do but to wait again */
static int lead_once(struct leading *self, PyObject *take, int round) {
    enum { ROUNDS_BETWEEN = 8 }; /* as long as rings have something, descriptors are looked at now and then */
    struct epoll_event events[MOST_EVENTS];
    const Lead *by = self->by;
    int wanted = 0, rang = 0, goes_on = 1, count = 0, ready = some_want_a_look(&self->all);
    if (!ready && self->look_s > 0) {
        if (round == 1) ready = look_first(self, &wanted);
        if (!ready) { /* not here: a signal that came while it looked would not end the sleep */
            self->vain = 1;
            return 0;
        }
    }
    if (!ready) {
        double left_s = self->deadline_s - now_in_s(), slept_s;
        count = sleep_on(&self->all, by->epoll, left_s > 0 ? left_s : 0, events, &slept_s);
        slept((Spin *)by->spin, slept_s);
        goes_on = count > 0;
    } else if (round % ROUNDS_BETWEEN == 0) count = epoll_wait(by->epoll, events, MOST_EVENTS, 0);
    for (int i = 0; i < count; i++) {
        if (events[i].data.fd == by->eventfd) rang = 1;
        else goes_on = 0;
    }
    double now_s = now_in_s();
    for (Py_ssize_t i = 0; i < self->all.count && !self->failed; i++) {
        Ring *ring = self->all.at[i];
        int result = ring->is_left;
        if (!wants_a_look(ring)) continue;
        rang = 0;
        if (!result || (result == LEFT_TO_CODE && !self->calls_only))
            result = deliver_from(ring, take, by->proc, now_s, self->calls_only);
        if (result < 0) note_failure(self), result = LEFT;
        if (result != ALL) ring->is_left = (char)result, goes_on = 0;
    }
    return goes_on && !wanted && !rang && now_s < self->deadline_s; /* rang: for a ring that is new here */
}

/* Whether it had the lock, and led; -1: an exception is set */
static int lead_with(struct leading *self, PyObject *take, PyObject *lock) {
    PyObject *taken = PyObject_CallMethodObjArgs(lock, name_of_acquire, Py_False, NULL);
    Py_XDECREF(taken);
    if (taken != Py_True) return taken ? 0 : -1;
    self->vain = 0;
    self->signal->pumping = PyThread_get_thread_ident();
    set_to(&self->signal->wake, self->by->waker);
    for (int round = 1; !self->signal->is_set && lead_once(self, take, round);) round++;
    set_to(&self->signal->wake, NULL);
    self->signal->pumping = 0;
    PyObject *released = PyObject_CallMethodObjArgs(lock, name_of_release, NULL);
    Py_XDECREF(released);
    return released ? 1 : -1;
}

/* Handlers of signals may run here, and here only: the lead is free, and nothing half done. Whether one was held back, and
 * the block that this is in is to end; -1: an exception is set */
static int is_noted(PyObject *held) {
    PyObject *noted = PyErr_CheckSignals() ? NULL : PyObject_GetAttr(held, name_of_noted);
    Py_XDECREF(noted);
    if (noted == Py_True) a_signal_came = 1;
    return noted ? noted == Py_True : -1;
}

/* Whether its time is not over yet; 0 with an exception, too */
static int has_time(struct leading *self, double timeout_s) {
    double now_s = now_in_s();
    self->deadline_s = now_s + timeout_s;
    if (PyList_Size(self->by->timers) > 0) {
        PyObject *first = PyList_GetItem(self->by->timers, 0), *due = PyTuple_Check(first) ? PyTuple_GetItem(first, 0) : NULL;
        double due_s = due ? PyFloat_AsDouble(due) : now_s;
        if (due_s < self->deadline_s) self->deadline_s = due_s;
    }
    return !PyErr_Occurred() && self->deadline_s > now_s;
}

static PyObject *lead_until(Lead *by, PyObject *const *args, Py_ssize_t n) {
    if (n != 5) PyErr_SetString(PyExc_TypeError, "until(lock, signal, held, calls_only, timeout_s)");
    if (n != 5 || !is_a(args[1], SignalType)) return NULL;
    struct leading self = {.by = by, .signal = (Signal *)args[1], .calls_only = args[3] == Py_True};
    int noted = is_noted(args[2]), led; /* what came before would not end the sleep */
    if (noted < 0) return NULL;
    if (noted) Py_RETURN_NONE;
    double timeout_s = PyFloat_AsDouble(args[4]);
    PyObject *take = by->take, *tuple = by->readers;
    int may_lead = !PyErr_Occurred() && take != Py_None && !PyObject_Size(by->first) && has_time(&self, timeout_s);
    if (PyErr_Occurred()) return NULL;
    if (!may_lead) Py_RETURN_NONE;
    if (!gather(&self.all, tuple)) return NULL;
    Py_INCREF(take); /* others may come in their place meanwhile */
    Py_INCREF(tuple);
    Spin *spin = (Spin *)by->spin;
    if (self.signal->looks && pays(spin)) self.look_s = spin->time_s;
    led = lead_with(&self, take, args[0]);
    if (led > 0 && self.vain) { /* now it sleeps */
        noted = is_noted(args[2]);
        self.look_s = 0;
        if (!noted && lead_with(&self, take, args[0]) < 0) noted = -1;
    }
    scatter(&self.all);
    Py_DECREF(tuple);
    Py_DECREF(take);
    if (self.failed && led >= 0 && noted >= 0) {
        PyObject *told = PyObject_CallFunctionObjArgs(by->on_failure, self.failed, NULL);
        Py_XDECREF(told);
        if (!told) led = -1;
    }
    Py_CLEAR(self.failed);
    if (led < 0 || noted < 0) return NULL;
    if (!led) Py_RETURN_NONE;
    return PyBool_FromLong(self.signal->is_set);
}

/* ---- the module */

static PyMethodDef writer_methods[] = {
    {"push", (PyCFunction)writer_push, METH_O, NULL},
    {"rouse", (PyCFunction)writer_rouse, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMethodDef reader_methods[] = {
    {"pop", (PyCFunction)reader_pop, METH_O, NULL},
    {"deliver", (PyCFunction)(void (*)(void))reader_deliver, METH_FASTCALL, NULL},
    {"carry", (PyCFunction)reader_carry, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef writer_fields[] = {
    {"position", T_ULONGLONG, offsetof(Ring, mine), READONLY, NULL},
    {"after", T_ULONGLONG, offsetof(Ring, after), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyMemberDef reader_fields[] = {
    {"position", T_ULONGLONG, offsetof(Ring, mine), READONLY, NULL},
    {"attended", T_BOOL, offsetof(Ring, attended), 0, NULL},
    {"find", T_OBJECT, offsetof(Ring, find), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot writer_slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, ring_init},
    {Py_tp_dealloc, ring_dealloc},
    {Py_tp_methods, writer_methods},
    {Py_tp_members, writer_fields},
    {0, NULL},
};
static PyType_Slot reader_slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, ring_init},
    {Py_tp_dealloc, ring_dealloc},
    {Py_tp_methods, reader_methods},
    {Py_tp_members, reader_fields},
    {0, NULL},
};
static PyType_Spec writer_spec = {"monarch._compiled.Writer", sizeof(Ring), 0, Py_TPFLAGS_DEFAULT, writer_slots};
static PyType_Spec reader_spec = {"monarch._compiled.Reader", sizeof(Ring), 0, Py_TPFLAGS_DEFAULT, reader_slots};

static PyMethodDef session_methods[] = {
    {"keep", (PyCFunction)session_keep, METH_VARARGS, NULL},
    {"told", (PyCFunction)session_told, METH_NOARGS, NULL},
    {"accept", (PyCFunction)session_accept, METH_O, NULL},
    {"took", (PyCFunction)session_took, METH_VARARGS, NULL},
    {"acknowledge", (PyCFunction)session_acknowledge, METH_O, NULL},
    {"abandon", (PyCFunction)session_abandon, METH_NOARGS, NULL},
    {"ack_due", (PyCFunction)session_ack_due, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef session_fields[] = {
    {"unacked", (getter)session_unacked, NULL, NULL, NULL},
    {"owes_ack", (getter)session_owes_ack, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyMethodDef envelope_methods[] = {
    {"parse", (PyCFunction)envelope_parse, METH_O | METH_CLASS, NULL},
    {NULL, NULL, 0, NULL},
};
#define NUMBER(name, type) {#name, type, offsetof(Envelope, name), 0, NULL}
static PyMemberDef envelope_fields[] = {
    NUMBER(kind, T_UBYTE),          NUMBER(flags, T_UBYTE),        NUMBER(ttl, T_USHORT),
    NUMBER(rank, T_UINT),           NUMBER(dst_proc, T_ULONGLONG), NUMBER(dst_actor, T_ULONGLONG),
    NUMBER(dst_port, T_ULONGLONG),  NUMBER(src_proc, T_ULONGLONG), NUMBER(src_actor, T_ULONGLONG),
    NUMBER(seq, T_ULONGLONG),       NUMBER(via, T_ULONGLONG),      NUMBER(reply_port, T_ULONGLONG),
    NUMBER(parts, T_OBJECT_EX),     NUMBER(chain, T_OBJECT_EX),    {NULL, 0, 0, 0, NULL},
};
static PyGetSetDef envelope_computed[] = {
    {"size_bytes", (getter)envelope_size, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyMethodDef lane_methods[] = {
    {"close", (PyCFunction)lane_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef lane_fields[] = {
    {"open", (getter)lane_open, (setter)lane_let, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyMemberDef inbox_fields[] = {
    {"calls", T_OBJECT_EX, offsetof(Inbox, calls), 0, NULL},
    {"signal", T_OBJECT_EX, offsetof(Inbox, signal), 0, NULL},
    {"_expected", T_OBJECT_EX, offsetof(Inbox, expected), 0, NULL},
    {"_waiting", T_OBJECT_EX, offsetof(Inbox, waiting), 0, NULL},
    {"_behind", T_OBJECT_EX, offsetof(Inbox, behind), 0, NULL},
    {"message", T_OBJECT_EX, offsetof(Inbox, message), 0, NULL},
    {"come_bytes", T_LONGLONG, offsetof(Inbox, come_bytes), 0, NULL},
    {"weigh_at_bytes", T_LONGLONG, offsetof(Inbox, weigh_at_bytes), 0, NULL},
    {"closed", T_OBJECT_EX, offsetof(Inbox, closed), 0, NULL},
    {"_last_proc", T_ULONGLONG, offsetof(Inbox, last_proc), 0, NULL},
    {"_last_actor", T_ULONGLONG, offsetof(Inbox, last_actor), 0, NULL},
    {"is_mixed", T_BOOL, offsetof(Inbox, is_mixed), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot inbox_slots[] = {
    {Py_tp_new, PyType_GenericNew},    {Py_tp_dealloc, inbox_dealloc}, {Py_tp_members, inbox_fields},
    {Py_tp_traverse, inbox_traverse}, {Py_tp_clear, inbox_clear},     {0, NULL},
};
static PyMemberDef session_notes[] = {
    {"sent", T_ULONGLONG, offsetof(Session, sent), READONLY, NULL},
    {"received", T_ULONGLONG, offsetof(Session, received), READONLY, NULL},
    {"unacked_bytes", T_PYSSIZET, offsetof(Session, unacked_bytes), READONLY, NULL},
    {"delivered", T_ULONGLONG, offsetof(Session, delivered), 0, NULL},
    {"ack_is_timed", T_BOOL, offsetof(Session, ack_is_timed), 0, NULL},
    {"room_is_awaited", T_BOOL, offsetof(Session, room_is_awaited), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot session_slots[] = {
    {Py_tp_new, session_new},       {Py_tp_dealloc, session_dealloc}, {Py_tp_methods, session_methods},
    {Py_tp_getset, session_fields}, {Py_tp_members, session_notes},   {0, NULL},
};
static PyType_Slot envelope_slots[] = {
    {Py_tp_new, envelope_new},       {Py_tp_dealloc, envelope_dealloc}, {Py_tp_methods, envelope_methods},
    {Py_tp_members, envelope_fields}, {Py_tp_getset, envelope_computed}, {0, NULL},
};
static PyType_Slot lane_slots[] = {
    {Py_tp_new, lane_new},       {Py_tp_dealloc, lane_dealloc}, {Py_tp_methods, lane_methods},
    {Py_tp_getset, lane_fields}, {0, NULL},
};
static PyType_Spec session_spec = {"monarch._compiled.Session", sizeof(Session), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, session_slots};
static PyType_Spec envelope_spec = {"monarch._compiled.Envelope", sizeof(Envelope), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, envelope_slots};
static PyType_Slot delivery_slots[] = {
    {Py_tp_new, delivery_new},           {Py_tp_dealloc, delivery_dealloc}, {Py_tp_call, delivery_call},
    {Py_tp_traverse, delivery_traverse}, {Py_tp_clear, delivery_clear},     {0, NULL},
};
static PyType_Spec delivery_spec = {"monarch._compiled.Delivery", sizeof(Delivery), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, delivery_slots};
static PyType_Spec inbox_spec = {"monarch._compiled.Inbox", sizeof(Inbox), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, inbox_slots};
static PyType_Spec lane_spec = {"monarch._compiled.Lane", sizeof(Lane), 0, Py_TPFLAGS_DEFAULT, lane_slots};

static PyMemberDef signal_fields[] = {
    {"_lock", T_OBJECT_EX, offsetof(Signal, lock), 0, NULL}, {"wake", T_OBJECT, offsetof(Signal, wake), 0, NULL},
    {"bell", T_OBJECT, offsetof(Signal, bell), 0, NULL},     {"pumping", T_ULONG, offsetof(Signal, pumping), 0, NULL},
    {"is_set", T_BOOL, offsetof(Signal, is_set), 0, NULL},   {"looks", T_BOOL, offsetof(Signal, looks), 0, NULL},
    {"is_near", T_BOOL, offsetof(Signal, is_near), 0, NULL}, {NULL, 0, 0, 0, NULL},
};
static PyType_Slot signal_slots[] = {
    {Py_tp_new, PyType_GenericNew}, {Py_tp_dealloc, signal_dealloc}, {Py_tp_members, signal_fields}, {0, NULL},
};
static PyType_Spec signal_spec = {"monarch._compiled.Signal", sizeof(Signal), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
                                  signal_slots};
static PyMemberDef wake_fields[] = {
    {"bell", T_OBJECT, offsetof(Wake, bell), 0, NULL},
    {"_owned", T_OBJECT, offsetof(Wake, owned), 0, NULL},
    {"_fd", T_INT, offsetof(Wake, fd), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot wake_slots[] = {
    {Py_tp_new, PyType_GenericNew}, {Py_tp_dealloc, wake_dealloc}, {Py_tp_members, wake_fields}, {0, NULL},
};
static PyType_Spec wake_spec = {"monarch._compiled.Wake", sizeof(Wake), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, wake_slots};
static PyMethodDef spin_methods[] = {
    {"pays", (PyCFunction)spin_pays, METH_NOARGS, NULL},
    {"learn", (PyCFunction)spin_learn, METH_VARARGS, NULL},
    {"slept", (PyCFunction)spin_slept, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef spin_fields[] = {
    {"time_s", T_DOUBLE, offsetof(Spin, time_s), 0, NULL},
    {"_short_left", T_LONG, offsetof(Spin, short_left), 0, NULL},
    {"_short_wanted", T_LONG, offsetof(Spin, short_wanted), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot spin_slots[] = {
    {Py_tp_new, spin_new}, {Py_tp_dealloc, free_of}, {Py_tp_methods, spin_methods}, {Py_tp_members, spin_fields}, {0, NULL},
};
static PyType_Spec spin_spec = {"monarch._compiled.Spin", sizeof(Spin), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, spin_slots};
static PyMethodDef lead_methods[] = {
    {"until", (PyCFunction)(void (*)(void))lead_until, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef lead_fields[] = {
    {"readers", T_OBJECT_EX, offsetof(Lead, readers), 0, NULL}, {"take", T_OBJECT_EX, offsetof(Lead, take), 0, NULL},
    {"first", T_OBJECT_EX, offsetof(Lead, first), 0, NULL},     {"proc", T_ULONGLONG, offsetof(Lead, proc), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot lead_slots[] = {
    {Py_tp_new, lead_new},           {Py_tp_dealloc, lead_dealloc}, {Py_tp_methods, lead_methods}, {Py_tp_members, lead_fields},
    {Py_tp_traverse, lead_traverse}, {Py_tp_clear, lead_clear},     {0, NULL},
};
static PyType_Spec lead_spec = {"monarch._compiled.Lead", sizeof(Lead), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, lead_slots};

static PyMethodDef functions[] = {
    {"post", (PyCFunction)(void (*)(void))module_post, METH_FASTCALL, NULL},
    {"look", (PyCFunction)(void (*)(void))module_look, METH_FASTCALL, NULL},
    {"sleep", (PyCFunction)(void (*)(void))module_sleep, METH_FASTCALL, NULL},
    {"ring_bell", (PyCFunction)module_ring_bell, METH_O, NULL},
    {"swap", (PyCFunction)module_swap, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_compiled", NULL, -1, functions, NULL, NULL, NULL, NULL};

static int make_names(void) {
    struct {
        PyObject **at;
        const char *name;
    } names[] = {
        {&name_of_lane, "lane"},       {&name_of_append, "append"},   {&name_of_mailbox, "mailbox"}, {&name_of_deliver, "deliver"},
        {&name_of_acquire, "acquire"}, {&name_of_release, "release"}, {&name_of_noted, "noted"},
    };
    int made = 1;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        made = (*names[i].at = PyUnicode_InternFromString(names[i].name)) != NULL && made;
    return made;
}

PyMODINIT_FUNC PyInit__compiled(void) {
    PyObject *module = PyModule_Create(&definition);
    if (!module) return NULL;
    struct {
        PyTypeObject **at;
        PyType_Spec *spec;
    } types[] = {
        {&WriterType, &writer_spec}, {&ReaderType, &reader_spec}, {&SessionType, &session_spec},   {&EnvelopeType, &envelope_spec},
        {&LaneType, &lane_spec},     {&InboxType, &inbox_spec},   {&DeliveryType, &delivery_spec}, {&SignalType, &signal_spec},
        {&WakeType, &wake_spec},     {&SpinType, &spin_spec},     {&LeadType, &lead_spec},
    };
    int made = make_names() && !PyModule_AddIntConstant(module, "VERSION", VERSION);
    for (size_t i = 0; i < sizeof types / sizeof *types && made; i++) {
        *types[i].at = (PyTypeObject *)PyType_FromSpec(types[i].spec);
        made = *types[i].at && !PyModule_AddObjectRef(module, strrchr(types[i].spec->name, '.') + 1, (PyObject *)*types[i].at);
    }
    if (made) return module;
    Py_DECREF(module);
    return NULL;
}
