/* Streams, events, and what runs on them. */
#include "softcuda.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef enum { STREAM = 1, EVENT = 2 } Kind;

/* What a handle names. It is never freed: work in flight may still need it. */
typedef struct {
    Kind kind;
    void *handle;
    Context *context;
    bool is_live;
} Object;

typedef struct Event {
    Object object;
    unsigned flags;
    uint64_t num_recorded; /* a record is known by its number */
    uint64_t last_done;
    int64_t done_ns;
    pthread_cond_t done;
} Event;

typedef struct Operation Operation;

typedef struct Stream {
    Object object;
    int priority;
    Operation *first; /* it is running, and stays until it has ended */
    Operation *last;
    pthread_cond_t arrived;
} Stream;

struct Operation {
    Operation *next;
    void (*run)(Stream *stream, Operation *operation);
    CUresult poison;
    Event *event;
    uint64_t record;
    uintptr_t address;
    uint32_t value;
    unsigned condition;
    size_t num_bytes;
    CUhostFn function;
    void *argument;
    Direction direction;
    size_t num_pieces;
    Piece pieces[];
};

/* An operation has ended, or a context has died. */
static pthread_cond_t progress = PTHREAD_COND_INITIALIZER;
static pthread_cond_t value_written = PTHREAD_COND_INITIALIZER;
static int num_workers;

/* ---- handles ---- */

/* Handles are no addresses, so that any number may be asked about; none is used twice,
 * so that one that was destroyed is known as such. */
enum { MAX_OBJECTS = 1 << 20, HANDLE_STEP = 16 };
static const uintptr_t FIRST_HANDLE = 0x5c000000;
static Object *objects[MAX_OBJECTS];
static size_t num_objects;

static bool publish(Object *object, Kind kind, Context *context)
{
    if (num_objects == MAX_OBJECTS)
        return false;
    uintptr_t handle = FIRST_HANDLE + num_objects * HANDLE_STEP;
    *object = (Object){kind, (void *)handle, context, true};
    objects[num_objects++] = object;
    return true;
}

static void *find(void *handle, Kind kind)
{
    size_t index = ((uintptr_t)handle - FIRST_HANDLE) / HANDLE_STEP;
    if (index >= num_objects || objects[index]->handle != handle)
        return NULL;
    return objects[index]->is_live && objects[index]->kind == kind ? objects[index] : NULL;
}

static Event *find_event(void *handle)
{
    return find(handle, EVENT);
}

/* ---- workers ---- */

void fail_context(Context *context, CUresult error)
{
    if (!context->error)
        context->error = error;
    for (size_t index = 0; index < num_objects; index++)
        if (objects[index]->kind == EVENT)
            pthread_cond_broadcast(&((Event *)objects[index])->done);
    pthread_cond_broadcast(&value_written);
    pthread_cond_broadcast(&progress);
    wake_gate();
}

static void *work(void *argument)
{
    Stream *stream = argument;
    pthread_mutex_lock(&driver);
    for (;;) {
        while (!stream->first && stream->object.is_live)
            pthread_cond_wait(&stream->arrived, &driver);
        Operation *operation = stream->first;
        if (!operation)
            break;
        operation->run(stream, operation);
        if (operation->poison)
            fail_context(stream->object.context, operation->poison);
        stream->first = operation->next;
        free(operation);
        pthread_cond_broadcast(&progress);
    }
    num_workers--;
    pthread_cond_broadcast(&progress);
    pthread_mutex_unlock(&driver);
    return NULL;
}

static bool start_worker(Stream *stream)
{
    sigset_t all;
    sigset_t before;
    pthread_t thread;
    /* Signals are for the threads of the program. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool has_started = !pthread_create(&thread, NULL, work, stream);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!has_started)
        return false;
    pthread_detach(thread);
    pthread_setname_np(thread, "softcuda");
    num_workers++;
    return true;
}

static Stream *new_stream(Context *context, int priority)
{
    Stream *stream = calloc(1, sizeof *stream);
    stream->priority = priority;
    pthread_cond_init(&stream->arrived, NULL);
    if (!publish(&stream->object, STREAM, context))
        return NULL;
    if (!start_worker(stream)) {
        stream->object.is_live = false;
        return NULL;
    }
    return stream;
}

/* The legacy stream, by either name, and the per-thread one: all are one here. */
static const uintptr_t LEGACY = 1;
static const uintptr_t PER_THREAD = 2;

static Stream *legacy_stream(Context *context)
{
    if (!context->legacy_stream)
        context->legacy_stream = new_stream(context, 0);
    return context->legacy_stream;
}

static Stream *find_stream(const Call *call, void *handle)
{
    if ((uintptr_t)handle <= PER_THREAD)
        return legacy_stream(call->context);
    return find(handle, STREAM);
}

static Operation *new_operation(void (*run)(Stream *, Operation *), size_t num_pieces)
{
    Operation *operation = calloc(1, sizeof *operation + num_pieces * sizeof(Piece));
    operation->run = run;
    operation->num_pieces = num_pieces;
    return operation;
}

static void append(Stream *stream, Operation *operation)
{
    if (stream->first)
        stream->last->next = operation;
    else
        stream->first = operation;
    stream->last = operation;
    pthread_cond_signal(&stream->arrived);
}

/* Takes the operation over, also when it refuses. */
static CUresult enqueue(const Call *call, void *handle, Operation *operation)
{
    Stream *stream = find_stream(call, handle);
    if (!stream || stream->object.context != call->context) {
        free(operation);
        return stream ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_INVALID_HANDLE;
    }
    operation->poison = call->poison;
    append(stream, operation);
    return CUDA_SUCCESS;
}

static CUresult drain(Stream *stream)
{
    Context *context = stream->object.context;
    while (stream->first && !context->error)
        pthread_cond_wait(&progress, &driver);
    return context->error;
}

void reset_streams(void)
{
    for (int device = 0; device < MAX_DEVICES; device++)
        fail_context(&contexts[device], CUDA_ERROR_DEINITIALIZED);
    for (size_t index = 0; index < num_objects; index++) {
        Object *object = objects[index];
        object->is_live = false;
        if (object->kind == STREAM)
            pthread_cond_signal(&((Stream *)object)->arrived);
        else
            ((Event *)object)->last_done = ((Event *)object)->num_recorded;
    }
    while (num_workers)
        pthread_cond_wait(&progress, &driver);
}

/* ---- copies ---- */

static void travel(size_t num_bytes)
{
    double bytes_per_ns = knobs.bytes_per_ns;
    int64_t duration_ns = knobs.latency_ns;
    if (bytes_per_ns > 0)
        duration_ns += (int64_t)(num_bytes / bytes_per_ns);
    if (duration_ns <= 0)
        return;
    struct timespec duration = {duration_ns / 1000000000, duration_ns % 1000000000};
    pthread_mutex_unlock(&driver);
    clock_nanosleep(CLOCK_MONOTONIC, 0, &duration, NULL);
    pthread_mutex_lock(&driver);
}

static void move_halves(Stream *stream, const Operation *copy, Half half)
{
    Context *context = stream->object.context;
    for (size_t index = 0; index < copy->num_pieces && !context->error; index++) {
        CUresult error = move_half(&copy->pieces[index], half);
        if (error)
            fail_context(context, error);
    }
}

static void run_copy(Stream *stream, Operation *copy)
{
    move_halves(stream, copy, FIRST_HALF);
    if (stream->object.context->error)
        return;
    travel(copy->num_bytes);
    pass_gate(stream->object.context, copy->direction);
    if (!copy->poison)
        move_halves(stream, copy, SECOND_HALF);
}

/* The direction is the first piece's. */
static CUresult add_piece(Operation *copy, size_t index, uintptr_t target,
                          uintptr_t source, size_t num_bytes)
{
    Piece *piece = &copy->pieces[index];
    *piece = (Piece){target, source, num_bytes, is_mapped(target), is_mapped(source)};
    if (!target || !source || !num_bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (index == 0)
        copy->direction = direction_of(target, source);
    copy->num_bytes += num_bytes;
    if (piece->knows_target && piece->knows_source)
        return CUDA_SUCCESS;
    counts.pageable++;
    return knobs.pageable_error;
}

static CUresult enqueue_copy(const Call *call, uintptr_t target, uintptr_t source,
                             size_t num_bytes, void *stream)
{
    Operation *copy = new_operation(run_copy, 1);
    CUresult error = add_piece(copy, 0, target, source, num_bytes);
    if (error) {
        free(copy);
        return error;
    }
    counts.copies++;
    return enqueue(call, stream, copy);
}

static CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t num_bytes,
                              void *stream)
{
    ENTER("cuMemcpyAsync", LIVE_CONTEXT);
    return enqueue_copy(&call, target, source, num_bytes, stream);
}

static CUresult cuMemcpyHtoDAsync(CUdeviceptr target, const void *source,
                                  size_t num_bytes, void *stream)
{
    ENTER("cuMemcpyHtoDAsync", LIVE_CONTEXT);
    if (!is_mapped(target))
        return CUDA_ERROR_INVALID_VALUE;
    return enqueue_copy(&call, target, (uintptr_t)source, num_bytes, stream);
}

static CUresult cuMemcpyDtoHAsync(void *target, CUdeviceptr source, size_t num_bytes,
                                  void *stream)
{
    ENTER("cuMemcpyDtoHAsync", LIVE_CONTEXT);
    if (!is_mapped(source))
        return CUDA_ERROR_INVALID_VALUE;
    return enqueue_copy(&call, (uintptr_t)target, source, num_bytes, stream);
}

static CUresult cuMemcpyDtoDAsync(CUdeviceptr target, CUdeviceptr source,
                                  size_t num_bytes, void *stream)
{
    ENTER("cuMemcpyDtoDAsync", LIVE_CONTEXT);
    if (!is_mapped(target) || !is_mapped(source))
        return CUDA_ERROR_INVALID_VALUE;
    return enqueue_copy(&call, target, source, num_bytes, stream);
}

static CUresult copy_now(const Call *call, uintptr_t target, uintptr_t source,
                         size_t num_bytes)
{
    CUresult error = enqueue_copy(call, target, source, num_bytes, NULL);
    return error ? error : drain(legacy_stream(call->context));
}

static CUresult cuMemcpyHtoD(CUdeviceptr target, const void *source, size_t num_bytes)
{
    ENTER("cuMemcpyHtoD", LIVE_CONTEXT);
    if (!is_mapped(target))
        return CUDA_ERROR_INVALID_VALUE;
    return copy_now(&call, target, (uintptr_t)source, num_bytes);
}

static CUresult cuMemcpyDtoH(void *target, CUdeviceptr source, size_t num_bytes)
{
    ENTER("cuMemcpyDtoH", LIVE_CONTEXT);
    if (!is_mapped(source))
        return CUDA_ERROR_INVALID_VALUE;
    return copy_now(&call, (uintptr_t)target, source, num_bytes);
}

static CUresult cuMemcpyDtoD(CUdeviceptr target, CUdeviceptr source, size_t num_bytes)
{
    ENTER("cuMemcpyDtoD", LIVE_CONTEXT);
    if (!is_mapped(target) || !is_mapped(source))
        return CUDA_ERROR_INVALID_VALUE;
    return copy_now(&call, target, source, num_bytes);
}

/* ---- batches of copies ---- */

typedef struct {
    int source_access_order; /* 1 to 3: stream, during the call, any */
    int source_location[2];
    int target_location[2];
    unsigned flags;
} CopyAttributes;
_Static_assert(sizeof(CopyAttributes) == 24, "CUmemcpyAttributes");

static bool are_attributes_valid(size_t count, const CopyAttributes *attributes,
                                 const size_t *firsts, size_t num_attributes)
{
    if (!attributes || !firsts || !num_attributes || num_attributes > count)
        return false;
    for (size_t index = 0; index < num_attributes; index++) {
        int order = attributes[index].source_access_order;
        if (order < 1 || order > 3 || firsts[index] >= count)
            return false;
        if (index ? firsts[index] <= firsts[index - 1] : firsts[0] != 0)
            return false;
    }
    return true;
}

/* The form of CUDA 12.8, which says what it choked on: SIZE_MAX for no one copy. */
static CUresult cuMemcpyBatchAsync(const CUdeviceptr *targets, const CUdeviceptr *sources,
                                   const size_t *sizes, size_t count,
                                   const CopyAttributes *attributes, const size_t *firsts,
                                   size_t num_attributes, size_t *failed, void *stream)
{
    ENTER("cuMemcpyBatchAsync", LIVE_CONTEXT);
    *failed = SIZE_MAX;
    if ((uintptr_t)stream <= LEGACY || !targets || !sources || !sizes)
        return CUDA_ERROR_INVALID_VALUE;
    if (!are_attributes_valid(count, attributes, firsts, num_attributes))
        return CUDA_ERROR_INVALID_VALUE;
    Operation *copy = new_operation(run_copy, count);
    for (size_t index = 0; index < count; index++) {
        CUresult error =
            add_piece(copy, index, targets[index], sources[index], sizes[index]);
        if (error) {
            free(copy);
            *failed = index;
            return error;
        }
    }
    counts.copies++;
    counts.batch_items += count;
    return enqueue(&call, stream, copy);
}

static CUresult cuMemcpyBatchAsync_v2(const CUdeviceptr *targets,
                                      const CUdeviceptr *sources, const size_t *sizes,
                                      size_t count, const CopyAttributes *attributes,
                                      const size_t *firsts, size_t num_attributes,
                                      void *stream)
{
    size_t failed;
    return cuMemcpyBatchAsync(targets, sources, sizes, count, attributes, firsts,
                              num_attributes, &failed, stream);
}

/* ---- other operations ---- */

static void run_memset(Stream *stream, Operation *operation)
{
    if (stream->object.context->error)
        return;
    if (is_in_bounds(operation->address, operation->num_bytes))
        memset((void *)operation->address, operation->value, operation->num_bytes);
    else
        fail_context(stream->object.context, CUDA_ERROR_ILLEGAL_ADDRESS);
}

static CUresult cuMemsetD8Async(CUdeviceptr target, unsigned char value,
                                size_t num_bytes, void *stream)
{
    ENTER("cuMemsetD8Async", LIVE_CONTEXT);
    if (!is_mapped(target))
        return CUDA_ERROR_INVALID_VALUE;
    Operation *operation = new_operation(run_memset, 0);
    operation->address = target;
    operation->value = value;
    operation->num_bytes = num_bytes;
    return enqueue(&call, stream, operation);
}

static void run_host_function(Stream *stream, Operation *operation)
{
    if (stream->object.context->error) {
        counts.host_functions_skipped++;
        return;
    }
    /* A host function that waits for another lock, such as the GIL, deadlocks with a
     * thread that holds that one and calls the driver. */
    bool stays_locked = knobs.locks_host_functions;
    if (!stays_locked)
        pthread_mutex_unlock(&driver);
    in_host_function = true;
    operation->function(operation->argument);
    in_host_function = false;
    if (!stays_locked)
        pthread_mutex_lock(&driver);
    counts.host_functions_run++;
}

static CUresult cuLaunchHostFunc(void *stream, CUhostFn function, void *argument)
{
    ENTER("cuLaunchHostFunc", LIVE_CONTEXT);
    if (!function)
        return CUDA_ERROR_INVALID_VALUE;
    Operation *operation = new_operation(run_host_function, 0);
    operation->function = function;
    operation->argument = argument;
    return enqueue(&call, stream, operation);
}

/* ---- values in memory ---- */

enum { WAIT_GEQ = 0, WAIT_EQ = 1 };
enum { WORD_BYTES = 4 };
static const int64_t SHORTEST_POLL_NS = 20000;
static const int64_t LONGEST_POLL_NS = 1000000;

static bool is_word(uintptr_t address)
{
    return address % WORD_BYTES == 0 && is_in_bounds(address, WORD_BYTES);
}

static bool is_released(const Operation *wait)
{
    uint32_t value = __atomic_load_n((uint32_t *)wait->address, __ATOMIC_ACQUIRE);
    if (wait->condition == WAIT_EQ)
        return value == wait->value;
    return (int32_t)(value - wait->value) >= 0;
}

static void run_write_value(Stream *stream, Operation *operation)
{
    if (stream->object.context->error)
        return;
    if (!is_word(operation->address)) {
        fail_context(stream->object.context, CUDA_ERROR_ILLEGAL_ADDRESS);
        return;
    }
    __atomic_store_n((uint32_t *)operation->address, operation->value, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&value_written);
}

static void run_wait_value(Stream *stream, Operation *operation)
{
    Context *context = stream->object.context;
    int64_t pause_ns = SHORTEST_POLL_NS;
    while (!context->error) {
        if (!is_word(operation->address))
            fail_context(context, CUDA_ERROR_ILLEGAL_ADDRESS);
        else if (is_released(operation))
            return;
        /* The host writes by a plain store, which wakes nobody. */
        wait_until(&value_written, now_ns() + pause_ns);
        if (pause_ns < LONGEST_POLL_NS)
            pause_ns *= 2;
    }
}

static CUresult enqueue_value(const Call *call, void *stream, Operation *operation,
                              CUdeviceptr address, uint32_t value)
{
    operation->address = address;
    operation->value = value;
    if (is_word(address))
        return enqueue(call, stream, operation);
    free(operation);
    return CUDA_ERROR_INVALID_VALUE;
}

static CUresult cuStreamWriteValue32(void *stream, CUdeviceptr address, uint32_t value,
                                     unsigned flags)
{
    ENTER("cuStreamWriteValue32", LIVE_CONTEXT);
    if (flags > 1)
        return CUDA_ERROR_INVALID_VALUE;
    Operation *operation = new_operation(run_write_value, 0);
    return enqueue_value(&call, stream, operation, address, value);
}

static CUresult cuStreamWaitValue32(void *stream, CUdeviceptr address, uint32_t value,
                                    unsigned flags)
{
    ENTER("cuStreamWaitValue32", LIVE_CONTEXT);
    if (flags != WAIT_GEQ && flags != WAIT_EQ)
        return CUDA_ERROR_NOT_SUPPORTED;
    Operation *operation = new_operation(run_wait_value, 0);
    operation->condition = flags;
    return enqueue_value(&call, stream, operation, address, value);
}

/* ---- streams ---- */

enum { LEAST_PRIORITY = 0, GREATEST_PRIORITY = -5 };
enum { STREAM_NON_BLOCKING = 1 };

static CUresult create_stream(const Call *call, void **handle, unsigned flags,
                              int priority)
{
    if (flags > STREAM_NON_BLOCKING)
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

static CUresult cuStreamCreate(void **handle, unsigned flags)
{
    ENTER("cuStreamCreate", LIVE_CONTEXT);
    return create_stream(&call, handle, flags, LEAST_PRIORITY);
}

static CUresult cuStreamCreateWithPriority(void **handle, unsigned flags, int priority)
{
    ENTER("cuStreamCreateWithPriority", LIVE_CONTEXT);
    return create_stream(&call, handle, flags, priority);
}

/* The worker still carries out what the stream was given. */
static CUresult cuStreamDestroy(void *handle)
{
    ENTER("cuStreamDestroy", ANY_CONTEXT);
    Stream *stream = find(handle, STREAM);
    if (!stream || stream == stream->object.context->legacy_stream)
        return CUDA_ERROR_INVALID_HANDLE;
    stream->object.is_live = false;
    pthread_cond_signal(&stream->arrived);
    counts.live_streams--;
    return call.context->error;
}

static CUresult cuStreamQuery(void *handle)
{
    ENTER("cuStreamQuery", LIVE_CONTEXT);
    Stream *stream = find_stream(&call, handle);
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    if (stream->object.context->error)
        return stream->object.context->error;
    return stream->first ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

static CUresult cuStreamSynchronize(void *handle)
{
    ENTER("cuStreamSynchronize", LIVE_CONTEXT);
    Stream *stream = find_stream(&call, handle);
    return stream ? drain(stream) : CUDA_ERROR_INVALID_HANDLE;
}

static CUresult cuCtxSynchronize(void)
{
    ENTER("cuCtxSynchronize", LIVE_CONTEXT);
    for (size_t index = 0; index < num_objects && !call.context->error; index++)
        if (objects[index]->kind == STREAM && objects[index]->context == call.context)
            drain((Stream *)objects[index]);
    return call.context->error;
}

static CUresult cuStreamGetPriority(void *handle, int *priority)
{
    ENTER("cuStreamGetPriority", LIVE_CONTEXT);
    Stream *stream = find_stream(&call, handle);
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    *priority = stream->priority;
    return CUDA_SUCCESS;
}

static CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    ENTER("cuCtxGetStreamPriorityRange", LIVE_CONTEXT);
    if (least)
        *least = LEAST_PRIORITY;
    if (greatest)
        *greatest = GREATEST_PRIORITY;
    return CUDA_SUCCESS;
}

static CUresult cuStreamGetCtx(void *handle, Context **context)
{
    ENTER("cuStreamGetCtx", LIVE_CONTEXT);
    Stream *stream = find_stream(&call, handle);
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    *context = stream->object.context;
    return CUDA_SUCCESS;
}

static CUresult cuStreamGetCtx_v2(void *handle, Context **context, void **green_context)
{
    if (green_context)
        *green_context = NULL;
    return cuStreamGetCtx(handle, context);
}

/* ---- events ---- */

enum { EVENT_BLOCKING_SYNC = 1, EVENT_DISABLE_TIMING = 2 };

static bool is_done(const Event *event, uint64_t record)
{
    return event->last_done >= record || event->object.context->error;
}

static CUresult cuEventCreate(void **handle, unsigned flags)
{
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

static CUresult cuEventDestroy(void *handle)
{
    ENTER("cuEventDestroy", ANY_CONTEXT);
    Event *event = find_event(handle);
    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    event->object.is_live = false;
    counts.live_events--;
    return call.context->error;
}

/* It wakes who waits even if the context is dead: they must learn of it. */
static void run_record(Stream *stream, Operation *operation)
{
    (void)stream;
    Event *event = operation->event;
    if (operation->record > event->last_done) {
        event->last_done = operation->record;
        event->done_ns = now_ns();
    }
    pthread_cond_broadcast(&event->done);
}

static CUresult cuEventRecord(void *handle, void *stream_handle)
{
    ENTER("cuEventRecord", LIVE_CONTEXT);
    Event *event = find_event(handle);
    Stream *stream = find_stream(&call, stream_handle);
    if (!event || !stream || event->object.context != stream->object.context)
        return CUDA_ERROR_INVALID_HANDLE;
    Operation *operation = new_operation(run_record, 0);
    operation->event = event;
    operation->record = event->num_recorded + 1;
    CUresult error = enqueue(&call, stream_handle, operation);
    if (!error)
        event->num_recorded++;
    return error;
}

static void run_wait_event(Stream *stream, Operation *operation)
{
    Event *event = operation->event;
    while (!is_done(event, operation->record) && !stream->object.context->error)
        pthread_cond_wait(&event->done, &driver);
}

static CUresult cuStreamWaitEvent(void *stream, void *handle, unsigned flags)
{
    ENTER("cuStreamWaitEvent", LIVE_CONTEXT);
    Event *event = find_event(handle);
    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    Operation *operation = new_operation(run_wait_event, 0);
    operation->event = event;
    operation->record = event->num_recorded;
    return enqueue(&call, stream, operation);
}

static CUresult cuEventQuery(void *handle)
{
    ENTER("cuEventQuery", LIVE_CONTEXT);
    Event *event = find_event(handle);
    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!is_done(event, event->num_recorded))
        return CUDA_ERROR_NOT_READY;
    return event->object.context->error;
}

static CUresult cuEventSynchronize(void *handle)
{
    ENTER("cuEventSynchronize", LIVE_CONTEXT);
    Event *event = find_event(handle);
    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    uint64_t record = event->num_recorded;
    while (!is_done(event, record) || knobs.loses_wakes)
        pthread_cond_wait(&event->done, &driver);
    return event->object.context->error;
}

static CUresult cuEventElapsedTime(float *elapsed_ms, void *start_handle, void *end_handle)
{
    ENTER("cuEventElapsedTime", LIVE_CONTEXT);
    Event *start = find_event(start_handle);
    Event *end = find_event(end_handle);
    if (!start || !end || (start->flags | end->flags) & EVENT_DISABLE_TIMING)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!start->num_recorded || !end->num_recorded)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!is_done(start, start->num_recorded) || !is_done(end, end->num_recorded))
        return CUDA_ERROR_NOT_READY;
    *elapsed_ms = (end->done_ns - start->done_ns) / 1e6f;
    return CUDA_SUCCESS;
}

Api stream_apis[] = {
    {"cuMemcpyAsync", 4000, cuMemcpyAsync, true},
    {"cuMemcpyHtoDAsync", 3020, cuMemcpyHtoDAsync, true},
    {"cuMemcpyDtoHAsync", 3020, cuMemcpyDtoHAsync, true},
    {"cuMemcpyDtoDAsync", 3020, cuMemcpyDtoDAsync, true},
    {"cuMemcpyHtoD", 3020, cuMemcpyHtoD, true},
    {"cuMemcpyDtoH", 3020, cuMemcpyDtoH, true},
    {"cuMemcpyDtoD", 3020, cuMemcpyDtoD, true},
    {"cuMemcpyBatchAsync", 12080, cuMemcpyBatchAsync, true},
    {"cuMemcpyBatchAsync", 13000, cuMemcpyBatchAsync_v2, true},
    {"cuMemsetD8Async", 3020, cuMemsetD8Async, true},
    {"cuLaunchHostFunc", 10000, cuLaunchHostFunc, true},
    {"cuStreamWriteValue32", 8000, cuStreamWriteValue32, true},
    {"cuStreamWaitValue32", 8000, cuStreamWaitValue32, true},
    {"cuStreamCreate", 2000, cuStreamCreate},
    {"cuStreamCreateWithPriority", 5050, cuStreamCreateWithPriority},
    {"cuStreamDestroy", 4000, cuStreamDestroy},
    {"cuStreamQuery", 2000, cuStreamQuery},
    {"cuStreamSynchronize", 2000, cuStreamSynchronize},
    {"cuStreamGetPriority", 5050, cuStreamGetPriority},
    {"cuStreamGetCtx", 9020, cuStreamGetCtx},
    {"cuStreamGetCtx", 12050, cuStreamGetCtx_v2},
    {"cuStreamWaitEvent", 3020, cuStreamWaitEvent, true},
    {"cuCtxSynchronize", 2000, cuCtxSynchronize},
    {"cuCtxGetStreamPriorityRange", 5050, cuCtxGetStreamPriorityRange},
    {"cuEventCreate", 2000, cuEventCreate},
    {"cuEventDestroy", 4000, cuEventDestroy},
    {"cuEventRecord", 2000, cuEventRecord, true},
    {"cuEventQuery", 2000, cuEventQuery},
    {"cuEventSynchronize", 2000, cuEventSynchronize},
    {"cuEventElapsedTime", 2000, cuEventElapsedTime},
    {NULL},
};

/* ---- for tests ---- */

EXPORT int64_t sc_event_done_ns(void *handle)
{
    pthread_mutex_lock(&driver);
    Event *event = find_event(handle);
    int64_t done_ns = event ? event->done_ns : 0;
    pthread_mutex_unlock(&driver);
    return done_ns;
}

EXPORT void sc_lose_wakes(bool on)
{
    pthread_mutex_lock(&driver);
    knobs.loses_wakes = on;
    for (size_t index = 0; index < num_objects; index++)
        if (objects[index]->kind == EVENT)
            pthread_cond_broadcast(&((Event *)objects[index])->done);
    pthread_mutex_unlock(&driver);
}
