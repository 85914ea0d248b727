/* Handles, workers, streams and events. */
#include "softcuda.h"

#include <signal.h>
#include <stdlib.h>

typedef enum { STREAM, EVENT } Kind;

/* What a handle names. It is never freed: work in flight may still need it. */
typedef struct {
    Kind kind;
    void *handle;
    Context *context;
    bool is_live;
} Object;

struct Event {
    Object object;
    unsigned flags;
    uint64_t num_records; /* a record is known by its number */
    uint64_t last_done;
    int64_t done_ns;
    pthread_cond_t done;
};

struct Stream {
    Object object;
    int priority;
    Operation *first; /* it is running, and stays until it has ended */
    Operation *last;
    pthread_cond_t arrived;
};

/* An operation has ended, or a worker, or a context has died. */
static pthread_cond_t progress = PTHREAD_COND_INITIALIZER;
static int num_workers;

/* ---- handles ---- */

/* Handles are no addresses, so that any number may be asked about; none is used twice,
 * so that one that was destroyed is known as such. */
enum { MAX_OBJECTS = 1 << 20, HANDLE_STEP = 16 };
static const uintptr_t FIRST_HANDLE = 0x5c000000;
static Object *objects[MAX_OBJECTS];
static size_t num_objects;

static bool publish(Object *object, Kind kind, Context *context) {
    if (num_objects == MAX_OBJECTS)
        return false;
    uintptr_t handle = FIRST_HANDLE + num_objects * HANDLE_STEP;
    *object = (Object){kind, (void *)handle, context, true};
    objects[num_objects++] = object;
    return true;
}

static void *find(void *handle, Kind kind) {
    size_t index = ((uintptr_t)handle - FIRST_HANDLE) / HANDLE_STEP;
    if (index >= num_objects || objects[index]->handle != handle)
        return NULL;
    Object *object = objects[index];
    return object->is_live && object->kind == kind ? object : NULL;
}

#define FIND_EVENT(event, handle)       \
    Event *event = find(handle, EVENT); \
    if (!event)                         \
        return CUDA_ERROR_INVALID_HANDLE

#define FIND_STREAM(stream, handle)              \
    Stream *stream = find_stream(&call, handle); \
    if (!stream)                                 \
        return CUDA_ERROR_INVALID_HANDLE

/* ---- workers ---- */

static void *work(void *argument) {
    Stream *stream = argument;
    pthread_setname_np(pthread_self(), "softcuda");
    pthread_mutex_lock(&driver);
    for (;;) {
        while (!stream->first && stream->object.is_live)
            pthread_cond_wait(&stream->arrived, &driver);
        Operation *operation = stream->first;
        if (!operation)
            break;
        /* A copy fails halfway, all else before it begins. */
        if (operation->poison && !operation->num_pieces)
            fail_context(stream->object.context, operation->poison);
        operation->run(stream->object.context, operation);
        stream->first = operation->next;
        free(operation);
        pthread_cond_broadcast(&progress);
    }
    num_workers--;
    pthread_cond_broadcast(&progress);
    pthread_mutex_unlock(&driver);
    return NULL;
}

static bool start_worker(Stream *stream) {
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    /* Signals are for the threads of the program. */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool has_started = !pthread_create(&thread, NULL, work, stream);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!has_started)
        return false;
    pthread_detach(thread);
    num_workers++;
    return true;
}

static Stream *new_stream(Context *context, int priority) {
    Stream *stream = calloc(1, sizeof *stream);
    stream->priority = priority;
    pthread_cond_init(&stream->arrived, NULL);
    if (!publish(&stream->object, STREAM, context))
        return NULL;
    stream->object.is_live = start_worker(stream);
    return stream->object.is_live ? stream : NULL;
}

/* The NULL stream, the legacy one and the per-thread one are one stream here. */
static Stream *find_stream(const Call *call, void *handle) {
    if ((uintptr_t)handle > PER_THREAD_STREAM)
        return find(handle, STREAM);
    if (!call->context->legacy_stream)
        call->context->legacy_stream = new_stream(call->context, 0);
    return call->context->legacy_stream;
}

Operation *new_operation(void (*run)(Context *, Operation *), size_t num_pieces) {
    Operation *operation = calloc(1, sizeof *operation + num_pieces * sizeof(Piece));
    operation->run = run;
    operation->num_pieces = num_pieces;
    return operation;
}

CUresult enqueue(const Call *call, void *stream_handle, Operation *operation) {
    Stream *stream = find_stream(call, stream_handle);
    if (!stream || stream->object.context != call->context) {
        free(operation);
        return stream ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_INVALID_HANDLE;
    }
    operation->poison = call->poison;
    if (stream->first)
        stream->last->next = operation;
    else
        stream->first = operation;
    stream->last = operation;
    pthread_cond_signal(&stream->arrived);
    return CUDA_SUCCESS;
}

static CUresult drain(Stream *stream) {
    Context *context = stream->object.context;
    while (stream->first && !context->error)
        pthread_cond_wait(&progress, &driver);
    return context->error;
}

CUresult drain_legacy_stream(const Call *call) {
    return drain(call->context->legacy_stream);
}

void wake_events(void) {
    for (size_t index = 0; index < num_objects; index++)
        if (objects[index]->kind == EVENT)
            pthread_cond_broadcast(&((Event *)objects[index])->done);
}

/* Whoever learns of the error may count on it that no byte moves any more. */
void fail_context(Context *context, CUresult error) {
    wait_until_still();
    if (!context->error)
        context->error = error;
    pthread_cond_broadcast(&progress);
    wake_events();
    wake_work();
}

void reset_streams(void) {
    for (int device = 0; device < MAX_DEVICES; device++)
        fail_context(&contexts[device], CUDA_ERROR_DEINITIALIZED);
    for (size_t index = 0; index < num_objects; index++) {
        Object *object = objects[index];
        object->is_live = false;
        if (object->kind == STREAM)
            pthread_cond_signal(&((Stream *)object)->arrived);
        else
            ((Event *)object)->last_done = ((Event *)object)->num_records;
    }
    while (num_workers)
        pthread_cond_wait(&progress, &driver);
}

/* ---- streams ---- */

enum { LEAST_PRIORITY = 0, GREATEST_PRIORITY = -5 };
enum { STREAM_NON_BLOCKING = 1 };

static CUresult create_stream(const Call *call, void **handle, unsigned flags,
                              int priority) {
    if (flags & ~STREAM_NON_BLOCKING)
        return CUDA_ERROR_INVALID_VALUE;
    if (priority < GREATEST_PRIORITY)
        priority = GREATEST_PRIORITY;
    if (priority > LEAST_PRIORITY)
        priority = LEAST_PRIORITY;
    Stream *stream = new_stream(call->context, priority);
    if (!stream)
        return CUDA_ERROR_OUT_OF_MEMORY;
    counts.live_streams++;
    *handle = stream->object.handle;
    return CUDA_SUCCESS;
}

static CUresult cuStreamCreate(void **handle, unsigned flags) {
    ENTER("cuStreamCreate", LIVE_CONTEXT);
    return create_stream(&call, handle, flags, LEAST_PRIORITY);
}

static CUresult cuStreamCreateWithPriority(void **handle, unsigned flags,
                                           int priority) {
    ENTER("cuStreamCreateWithPriority", LIVE_CONTEXT);
    return create_stream(&call, handle, flags, priority);
}

/* The worker still carries out what the stream was given. */
static CUresult cuStreamDestroy(void *handle) {
    ENTER("cuStreamDestroy", ANY_CONTEXT);
    Stream *stream = find(handle, STREAM);
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    stream->object.is_live = false;
    pthread_cond_signal(&stream->arrived);
    counts.live_streams--;
    return call.context->error;
}

static CUresult cuStreamQuery(void *handle) {
    ENTER("cuStreamQuery", LIVE_CONTEXT);
    FIND_STREAM(stream, handle);
    if (stream->object.context->error)
        return stream->object.context->error;
    return stream->first ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

static CUresult cuStreamSynchronize(void *handle) {
    ENTER("cuStreamSynchronize", LIVE_CONTEXT);
    FIND_STREAM(stream, handle);
    return drain(stream);
}

static CUresult cuStreamGetPriority(void *handle, int *priority) {
    ENTER("cuStreamGetPriority", LIVE_CONTEXT);
    FIND_STREAM(stream, handle);
    *priority = stream->priority;
    return CUDA_SUCCESS;
}

static CUresult cuStreamGetCtx(void *handle, Context **context) {
    ENTER("cuStreamGetCtx", LIVE_CONTEXT);
    FIND_STREAM(stream, handle);
    *context = stream->object.context;
    return CUDA_SUCCESS;
}

static CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    ENTER("cuCtxGetStreamPriorityRange", LIVE_CONTEXT);
    if (least)
        *least = LEAST_PRIORITY;
    if (greatest)
        *greatest = GREATEST_PRIORITY;
    return CUDA_SUCCESS;
}

static CUresult cuCtxSynchronize(void) {
    ENTER("cuCtxSynchronize", LIVE_CONTEXT);
    for (size_t index = 0; index < num_objects; index++)
        if (objects[index]->kind == STREAM && objects[index]->context == call.context)
            drain((Stream *)objects[index]);
    return call.context->error;
}

/* ---- events ---- */

enum { EVENT_BLOCKING_SYNC = 1, EVENT_DISABLE_TIMING = 2 };

static bool is_done(const Event *event, uint64_t record) {
    return event->last_done >= record || event->object.context->error;
}

static CUresult cuEventCreate(void **handle, unsigned flags) {
    ENTER("cuEventCreate", LIVE_CONTEXT);
    if (flags & ~(EVENT_BLOCKING_SYNC | EVENT_DISABLE_TIMING))
        return CUDA_ERROR_INVALID_VALUE;
    Event *event = calloc(1, sizeof *event);
    event->flags = flags;
    pthread_cond_init(&event->done, NULL);
    if (!publish(&event->object, EVENT, call.context))
        return CUDA_ERROR_OUT_OF_MEMORY;
    counts.live_events++;
    *handle = event->object.handle;
    return CUDA_SUCCESS;
}

static CUresult cuEventDestroy(void *handle) {
    ENTER("cuEventDestroy", ANY_CONTEXT);
    FIND_EVENT(event, handle);
    event->object.is_live = false;
    counts.live_events--;
    return call.context->error;
}

/* A dead context changes nothing here: who waits must learn of it. */
static void run_record(Context *context, Operation *operation) {
    (void)context;
    Event *event = operation->event;
    if (operation->record > event->last_done) {
        event->last_done = operation->record;
        event->done_ns = now_ns();
    }
    pthread_cond_broadcast(&event->done);
}

static CUresult cuEventRecord(void *handle, void *stream_handle) {
    ENTER("cuEventRecord", LIVE_CONTEXT);
    FIND_EVENT(event, handle);
    FIND_STREAM(stream, stream_handle);
    if (event->object.context != stream->object.context)
        return CUDA_ERROR_INVALID_HANDLE;
    Operation *operation = new_operation(run_record, 0);
    operation->event = event;
    operation->record = event->num_records + 1;
    CUresult error = enqueue(&call, stream_handle, operation);
    if (!error)
        event->num_records++;
    return error;
}

static void run_wait_event(Context *context, Operation *operation) {
    while (!is_done(operation->event, operation->record) && !context->error)
        pthread_cond_wait(&operation->event->done, &driver);
}

static CUresult cuStreamWaitEvent(void *stream_handle, void *handle, unsigned flags) {
    ENTER("cuStreamWaitEvent", LIVE_CONTEXT);
    FIND_EVENT(event, handle);
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    Operation *operation = new_operation(run_wait_event, 0);
    operation->event = event;
    operation->record = event->num_records;
    return enqueue(&call, stream_handle, operation);
}

static CUresult cuEventQuery(void *handle) {
    ENTER("cuEventQuery", LIVE_CONTEXT);
    FIND_EVENT(event, handle);
    if (!is_done(event, event->num_records))
        return CUDA_ERROR_NOT_READY;
    return event->object.context->error;
}

static CUresult cuEventSynchronize(void *handle) {
    ENTER("cuEventSynchronize", LIVE_CONTEXT);
    FIND_EVENT(event, handle);
    uint64_t record = event->num_records;
    while (!is_done(event, record) || knobs.loses_wakes)
        pthread_cond_wait(&event->done, &driver);
    return event->object.context->error;
}

static CUresult cuEventElapsedTime(float *elapsed_ms, void *start_handle,
                                   void *end_handle) {
    ENTER("cuEventElapsedTime", LIVE_CONTEXT);
    FIND_EVENT(start, start_handle);
    FIND_EVENT(end, end_handle);
    if ((start->flags | end->flags) & EVENT_DISABLE_TIMING)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!start->num_records || !end->num_records)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!is_done(start, start->num_records) || !is_done(end, end->num_records))
        return CUDA_ERROR_NOT_READY;
    *elapsed_ms = (end->done_ns - start->done_ns) / 1e6;
    return CUDA_SUCCESS;
}

Api stream_apis[] = {
    {"cuStreamCreate", 2000, cuStreamCreate},
    {"cuStreamCreateWithPriority", 5050, cuStreamCreateWithPriority},
    {"cuStreamDestroy", 4000, cuStreamDestroy},
    {"cuStreamQuery", 2000, cuStreamQuery},
    {"cuStreamSynchronize", 2000, cuStreamSynchronize},
    {"cuStreamGetPriority", 5050, cuStreamGetPriority},
    {"cuStreamGetCtx", 9020, cuStreamGetCtx},
    {"cuCtxGetStreamPriorityRange", 5050, cuCtxGetStreamPriorityRange},
    {"cuCtxSynchronize", 2000, cuCtxSynchronize},
    {"cuEventCreate", 2000, cuEventCreate},
    {"cuEventDestroy", 4000, cuEventDestroy},
    {"cuEventRecord", 2000, cuEventRecord, .enqueues = true},
    {"cuStreamWaitEvent", 3020, cuStreamWaitEvent, .enqueues = true},
    {"cuEventQuery", 2000, cuEventQuery},
    {"cuEventSynchronize", 2000, cuEventSynchronize},
    {"cuEventElapsedTime", 2000, cuEventElapsedTime},
    {NULL},
};

/* ---- controls for tests ---- */

/* Says when an event's last record was done; 0 if there is none. */
EXPORT int64_t sc_event_done_ns(void *handle) {
    LOCK_DRIVER;
    const Event *event = find(handle, EVENT);
    return event ? event->done_ns : 0;
}
