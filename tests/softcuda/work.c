/* What streams carry out: copies and the gate, values in memory, host functions. */
#include "softcuda.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- the gate ---- */

typedef struct Held {
    Direction direction;
    bool may_pass;
    struct Held *next;
} Held;

static unsigned shut_directions;
static Held *first_held; /* in the order in which they came */
static pthread_cond_t gate_changed = PTHREAD_COND_INITIALIZER;

static bool is_held(const Held *copy) {
    return copy->direction & shut_directions && !copy->may_pass;
}

static void pass_gate(const Context *context, Direction direction) {
    Held self = {direction};
    Held **link = &first_held;
    while (*link)
        link = &(*link)->next;
    *link = &self;
    pthread_cond_broadcast(&gate_changed);
    while (is_held(&self) && !context->error)
        pthread_cond_wait(&gate_changed, &driver);
    link = &first_held;
    while (*link != &self)
        link = &(*link)->next;
    *link = self.next;
}

static int count_held(unsigned directions) {
    int count = 0;
    for (const Held *copy = first_held; copy; copy = copy->next)
        if (copy->direction & directions && is_held(copy))
            count++;
    return count;
}

/* ---- copies ---- */

static void travel(size_t num_bytes) {
    double duration_s = knobs.latency_s;
    if (knobs.bytes_per_s)
        duration_s += num_bytes / knobs.bytes_per_s;
    if (!duration_s)
        return;
    time_t whole_s = duration_s;
    struct timespec duration = {whole_s, (duration_s - whole_s) * NS_PER_S};
    pthread_mutex_unlock(&driver);
    nanosleep(&duration, NULL);
    pthread_mutex_lock(&driver);
}

static void move_halves(Context *context, const Operation *copy, Half half) {
    for (size_t index = 0; index < copy->num_pieces && !context->error; index++) {
        CUresult error = move_half(&copy->pieces[index], half);
        if (error)
            fail_context(context, error);
    }
}

static void run_copy(Context *context, Operation *copy) {
    move_halves(context, copy, FIRST_HALF);
    if (context->error)
        return;
    travel(copy->num_bytes);
    pass_gate(context, copy->direction);
    if (copy->poison)
        fail_context(context, copy->poison);
    move_halves(context, copy, SECOND_HALF);
}

/* A batch has the direction of its first piece. */
static CUresult add_piece(Operation *copy, size_t index, uintptr_t target,
                          uintptr_t source, size_t num_bytes) {
    if (!target || !source)
        return CUDA_ERROR_INVALID_VALUE;
    Piece *piece = &copy->pieces[index];
    *piece = (Piece){target, source, num_bytes, is_mapped(target), is_mapped(source)};
    if (index == 0)
        copy->direction = direction_of(target, source);
    copy->num_bytes += num_bytes;
    if (piece->knows_target && piece->knows_source)
        return CUDA_SUCCESS;
    counts.pageable++;
    return knobs.pageable_error;
}

static CUresult copy_async(const Call *call, uintptr_t target, uintptr_t source,
                           size_t num_bytes, void *stream) {
    Operation *copy = new_operation(run_copy, 1);
    CUresult error = add_piece(copy, 0, target, source, num_bytes);
    if (error) {
        free(copy);
        return error;
    }
    counts.copies++;
    return enqueue(call, stream, copy);
}

static CUresult copy_now(const Call *call, uintptr_t target, uintptr_t source,
                         size_t num_bytes) {
    CUresult error = copy_async(call, target, source, num_bytes, NULL);
    return error ? error : drain_legacy_stream(call);
}

/* What must be the device's is no pageable memory. */
#define REQUIRE_MAPPED(address) \
    if (!is_mapped(address))    \
        return CUDA_ERROR_INVALID_VALUE

static CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t num_bytes,
                              void *stream) {
    ENTER("cuMemcpyAsync", LIVE_CONTEXT);
    return copy_async(&call, target, source, num_bytes, stream);
}

static CUresult cuMemcpyHtoDAsync(CUdeviceptr target, const void *source,
                                  size_t num_bytes, void *stream) {
    ENTER("cuMemcpyHtoDAsync", LIVE_CONTEXT);
    REQUIRE_MAPPED(target);
    return copy_async(&call, target, (uintptr_t)source, num_bytes, stream);
}

static CUresult cuMemcpyDtoHAsync(void *target, CUdeviceptr source, size_t num_bytes,
                                  void *stream) {
    ENTER("cuMemcpyDtoHAsync", LIVE_CONTEXT);
    REQUIRE_MAPPED(source);
    return copy_async(&call, (uintptr_t)target, source, num_bytes, stream);
}

static CUresult cuMemcpyDtoDAsync(CUdeviceptr target, CUdeviceptr source,
                                  size_t num_bytes, void *stream) {
    ENTER("cuMemcpyDtoDAsync", LIVE_CONTEXT);
    REQUIRE_MAPPED(target);
    REQUIRE_MAPPED(source);
    return copy_async(&call, target, source, num_bytes, stream);
}

static CUresult cuMemcpyHtoD(CUdeviceptr target, const void *source, size_t num_bytes) {
    ENTER("cuMemcpyHtoD", LIVE_CONTEXT);
    REQUIRE_MAPPED(target);
    return copy_now(&call, target, (uintptr_t)source, num_bytes);
}

static CUresult cuMemcpyDtoH(void *target, CUdeviceptr source, size_t num_bytes) {
    ENTER("cuMemcpyDtoH", LIVE_CONTEXT);
    REQUIRE_MAPPED(source);
    return copy_now(&call, (uintptr_t)target, source, num_bytes);
}

static CUresult cuMemcpyDtoD(CUdeviceptr target, CUdeviceptr source, size_t num_bytes) {
    ENTER("cuMemcpyDtoD", LIVE_CONTEXT);
    REQUIRE_MAPPED(target);
    REQUIRE_MAPPED(source);
    return copy_now(&call, target, source, num_bytes);
}

/* ---- batches of copies ---- */

enum { ORDER_STREAM = 1, ORDER_ANY = 3 };

typedef struct {
    int source_access_order;
    int source_location[2];
    int target_location[2];
    unsigned flags;
} CopyAttributes;

/* Each attribute holds from one copy on, the first one from the first. */
static bool are_attributes_valid(const CopyAttributes *attributes, const size_t *firsts,
                                 size_t num_attributes, size_t num_copies) {
    if (!attributes || !firsts || !num_attributes || firsts[0])
        return false;
    for (size_t index = 0; index < num_attributes; index++) {
        int order = attributes[index].source_access_order;
        if (order < ORDER_STREAM || order > ORDER_ANY || firsts[index] >= num_copies)
            return false;
        if (index && firsts[index] <= firsts[index - 1])
            return false;
    }
    return true;
}

/* The form of CUDA 12.8 says which copy it refused: SIZE_MAX for none of them. */
static CUresult cuMemcpyBatchAsync(const CUdeviceptr *targets,
                                   const CUdeviceptr *sources, const size_t *sizes,
                                   size_t num_copies, const CopyAttributes *attributes,
                                   const size_t *firsts, size_t num_attributes,
                                   size_t *refused, void *stream) {
    ENTER("cuMemcpyBatchAsync", LIVE_CONTEXT);
    *refused = SIZE_MAX;
    bool is_legacy = (uintptr_t)stream <= LEGACY_STREAM;
    if (is_legacy || !targets || !sources || !sizes)
        return CUDA_ERROR_INVALID_VALUE;
    if (!are_attributes_valid(attributes, firsts, num_attributes, num_copies))
        return CUDA_ERROR_INVALID_VALUE;
    Operation *copy = new_operation(run_copy, num_copies);
    for (size_t index = 0; index < num_copies; index++) {
        CUresult error =
            add_piece(copy, index, targets[index], sources[index], sizes[index]);
        if (error) {
            free(copy);
            *refused = index;
            return error;
        }
    }
    counts.copies++;
    counts.batch_items += num_copies;
    return enqueue(&call, stream, copy);
}

static CUresult cuMemcpyBatchAsync_v2(const CUdeviceptr *targets,
                                      const CUdeviceptr *sources, const size_t *sizes,
                                      size_t num_copies,
                                      const CopyAttributes *attributes,
                                      const size_t *firsts, size_t num_attributes,
                                      void *stream) {
    size_t refused;
    return cuMemcpyBatchAsync(targets, sources, sizes, num_copies, attributes, firsts,
                              num_attributes, &refused, stream);
}

/* ---- memset ---- */

static void run_memset(Context *context, Operation *operation) {
    if (context->error)
        return;
    if (is_in_bounds(operation->address, operation->num_bytes))
        memset((void *)operation->address, operation->value, operation->num_bytes);
    else
        fail_context(context, CUDA_ERROR_ILLEGAL_ADDRESS);
}

static CUresult cuMemsetD8Async(CUdeviceptr target, unsigned char value,
                                size_t num_bytes, void *stream) {
    ENTER("cuMemsetD8Async", LIVE_CONTEXT);
    REQUIRE_MAPPED(target);
    Operation *operation = new_operation(run_memset, 0);
    operation->address = target;
    operation->value = value;
    operation->num_bytes = num_bytes;
    return enqueue(&call, stream, operation);
}

/* ---- values in memory ---- */

enum { WAIT_GEQ = 0, WAIT_EQ = 1 };
enum { WRITE_DEFAULT = 0, WRITE_NO_MEMORY_BARRIER = 1 };
enum { SHORTEST_POLL_NS = 20000, LONGEST_POLL_NS = 1000000 };

static pthread_cond_t value_written = PTHREAD_COND_INITIALIZER;

static bool is_word(uintptr_t address) {
    return address % sizeof(uint32_t) == 0 && is_in_bounds(address, sizeof(uint32_t));
}

static bool is_released(const Operation *wait) {
    uint32_t value = __atomic_load_n((uint32_t *)wait->address, __ATOMIC_ACQUIRE);
    if (wait->condition == WAIT_EQ)
        return value == wait->value;
    return (int32_t)(value - wait->value) >= 0;
}

static void run_write_value(Context *context, Operation *write) {
    if (context->error)
        return;
    if (!is_word(write->address)) {
        fail_context(context, CUDA_ERROR_ILLEGAL_ADDRESS);
        return;
    }
    __atomic_store_n((uint32_t *)write->address, write->value, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&value_written);
}

static void run_wait_value(Context *context, Operation *wait) {
    int64_t pause_ns = SHORTEST_POLL_NS;
    while (!context->error && is_word(wait->address) && !is_released(wait)) {
        /* The host writes by a plain store, which wakes nobody. */
        wait_until(&value_written, now_ns() + pause_ns);
        if (pause_ns < LONGEST_POLL_NS)
            pause_ns *= 2;
    }
    if (!context->error && !is_word(wait->address))
        fail_context(context, CUDA_ERROR_ILLEGAL_ADDRESS);
}

static CUresult enqueue_value(const Call *call, void *stream, CUdeviceptr address,
                              uint32_t value, Operation *operation) {
    operation->address = address;
    operation->value = value;
    if (is_word(address))
        return enqueue(call, stream, operation);
    free(operation);
    return CUDA_ERROR_INVALID_VALUE;
}

static CUresult cuStreamWriteValue32(void *stream, CUdeviceptr address, uint32_t value,
                                     unsigned flags) {
    ENTER("cuStreamWriteValue32", LIVE_CONTEXT);
    if (flags != WRITE_DEFAULT && flags != WRITE_NO_MEMORY_BARRIER)
        return CUDA_ERROR_INVALID_VALUE;
    Operation *write = new_operation(run_write_value, 0);
    return enqueue_value(&call, stream, address, value, write);
}

static CUresult cuStreamWaitValue32(void *stream, CUdeviceptr address, uint32_t value,
                                    unsigned flags) {
    ENTER("cuStreamWaitValue32", LIVE_CONTEXT);
    if (flags != WAIT_GEQ && flags != WAIT_EQ)
        return CUDA_ERROR_NOT_SUPPORTED;
    Operation *wait = new_operation(run_wait_value, 0);
    wait->condition = flags;
    return enqueue_value(&call, stream, address, value, wait);
}

/* ---- host functions ---- */

static void run_host_function(Context *context, Operation *operation) {
    if (context->error) {
        counts.host_functions_skipped++;
        return;
    }
    /* A host function that wants another lock, such as the GIL, waits for ever for a
     * thread that has that one and calls the driver. */
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

static CUresult cuLaunchHostFunc(void *stream, CUhostFn function, void *argument) {
    ENTER("cuLaunchHostFunc", LIVE_CONTEXT);
    if (!function)
        return CUDA_ERROR_INVALID_VALUE;
    Operation *operation = new_operation(run_host_function, 0);
    operation->function = function;
    operation->argument = argument;
    return enqueue(&call, stream, operation);
}

Api work_apis[] = {
    {"cuMemcpyAsync", 4000, cuMemcpyAsync, .enqueues = true},
    {"cuMemcpyHtoDAsync", 3020, cuMemcpyHtoDAsync, .enqueues = true},
    {"cuMemcpyDtoHAsync", 3020, cuMemcpyDtoHAsync, .enqueues = true},
    {"cuMemcpyDtoDAsync", 3020, cuMemcpyDtoDAsync, .enqueues = true},
    {"cuMemcpyHtoD", 3020, cuMemcpyHtoD, .enqueues = true},
    {"cuMemcpyDtoH", 3020, cuMemcpyDtoH, .enqueues = true},
    {"cuMemcpyDtoD", 3020, cuMemcpyDtoD, .enqueues = true},
    {"cuMemcpyBatchAsync", 12080, cuMemcpyBatchAsync, .enqueues = true},
    {"cuMemcpyBatchAsync", 13000, cuMemcpyBatchAsync_v2, .enqueues = true},
    {"cuMemsetD8Async", 3020, cuMemsetD8Async, .enqueues = true},
    {"cuStreamWriteValue32", 8000, cuStreamWriteValue32, .enqueues = true},
    {"cuStreamWaitValue32", 8000, cuStreamWaitValue32, .enqueues = true},
    {"cuLaunchHostFunc", 10000, cuLaunchHostFunc, .enqueues = true},
    {NULL},
};

/* ---- controls for tests ---- */

void wake_work(void) {
    pthread_cond_broadcast(&gate_changed);
    pthread_cond_broadcast(&value_written);
}

void reset_work(void) {
    shut_directions = 0;
    wake_work();
}

EXPORT void sc_gate_shut(unsigned directions) {
    LOCK_DRIVER;
    shut_directions |= directions;
}

EXPORT void sc_gate_open(unsigned directions) {
    LOCK_DRIVER;
    shut_directions &= ~directions;
    pthread_cond_broadcast(&gate_changed);
}

EXPORT int sc_gate_num_held(unsigned directions) {
    LOCK_DRIVER;
    return count_held(directions);
}

/* Returns once so many are held, or the time is over; how many are held then. */
EXPORT int sc_gate_wait(unsigned directions, int count, double timeout_s) {
    LOCK_DRIVER;
    int64_t deadline_ns = now_ns() + (int64_t)(timeout_s * NS_PER_S);
    while (count_held(directions) < count && now_ns() < deadline_ns)
        wait_until(&gate_changed, deadline_ns);
    return count_held(directions);
}

/* Lets the copy that has been held for longest go on; false if none is held. */
EXPORT bool sc_gate_pass(unsigned directions) {
    LOCK_DRIVER;
    Held *copy = first_held;
    while (copy && !(copy->direction & directions && is_held(copy)))
        copy = copy->next;
    if (!copy)
        return false;
    copy->may_pass = true;
    pthread_cond_broadcast(&gate_changed);
    return true;
}
