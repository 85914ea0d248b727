/* Ranges of memory: allocated, registered, or declared by a test. */
#include "softcuda.h"

#include <stdlib.h>
#include <string.h>

typedef enum { ALLOCATED, DECLARED, HOST_ALLOCATED, REGISTERED } Origin;

typedef struct Range {
    uintptr_t start;
    size_t num_bytes;
    Origin origin;
    Context *context;
    struct Range *next;
} Range;

static Range *ranges;

/* Bytes move while the driver is not locked: their memory must not go meanwhile. */
static int num_moving;
static pthread_cond_t is_still = PTHREAD_COND_INITIALIZER;

static const size_t DEVICE_BYTES = 8ull << 30;
enum { DEVICE_ALIGNMENT = 512, HOST_ALIGNMENT = 4096 };

/* ---- ranges ---- */

static long *count_of(Origin origin) {
    switch (origin) {
    case ALLOCATED:
        return &counts.live_allocations;
    case DECLARED:
        return &counts.declared_ranges;
    case HOST_ALLOCATED:
        return &counts.live_host_allocations;
    case REGISTERED:
        return &counts.registered_ranges;
    }
    abort();
}

static Range *range_at(uintptr_t address) {
    for (Range *range = ranges; range; range = range->next)
        if (address >= range->start && address - range->start < range->num_bytes)
            return range;
    return NULL;
}

static bool is_free(uintptr_t start, size_t num_bytes) {
    for (Range *range = ranges; range; range = range->next)
        if (start < range->start + range->num_bytes && range->start < start + num_bytes)
            return false;
    return true;
}

static void add_range(uintptr_t start, size_t num_bytes, Origin origin,
                      Context *context) {
    Range *range = malloc(sizeof *range);
    *range = (Range){start, num_bytes, origin, context, ranges};
    ranges = range;
    ++*count_of(origin);
}

static void remove_range(Range **link) {
    Range *range = *link;
    *link = range->next;
    --*count_of(range->origin);
    wait_until_still();
    if (range->origin == ALLOCATED)
        range->context->allocated_bytes -= range->num_bytes;
    if (range->origin == ALLOCATED || range->origin == HOST_ALLOCATED)
        free((void *)range->start);
    free(range);
}

static bool remove_range_from(uintptr_t start, Origin origin) {
    for (Range **link = &ranges; *link; link = &(*link)->next) {
        if ((*link)->start == start && (*link)->origin == origin) {
            remove_range(link);
            return true;
        }
    }
    return false;
}

void reset_memory(void) {
    while (ranges)
        remove_range(&ranges);
}

/* ---- what copies ask ---- */

static bool is_on_device(const Range *range) {
    return range && (range->origin == ALLOCATED || range->origin == DECLARED);
}

bool is_mapped(uintptr_t address) {
    return range_at(address);
}

bool is_in_bounds(uintptr_t address, size_t num_bytes) {
    const Range *range = range_at(address);
    return range && num_bytes <= range->start + range->num_bytes - address;
}

Direction direction_of(uintptr_t target, uintptr_t source) {
    bool to_device = is_on_device(range_at(target));
    bool from_device = is_on_device(range_at(source));
    if (to_device == from_device)
        return OTHER_COPY;
    return to_device ? HOST_TO_DEVICE : DEVICE_TO_HOST;
}

CUresult move_half(const Piece *piece, Half half) {
    size_t middle = piece->num_bytes / 2;
    size_t start = half == FIRST_HALF ? 0 : middle;
    size_t end = half == FIRST_HALF ? middle : piece->num_bytes;
    if (piece->knows_target && !is_in_bounds(piece->target, piece->num_bytes))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    if (piece->knows_source && !is_in_bounds(piece->source, piece->num_bytes))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    num_moving++;
    pthread_mutex_unlock(&driver);
    memmove((char *)piece->target + start, (char *)piece->source + start, end - start);
    pthread_mutex_lock(&driver);
    num_moving--;
    pthread_cond_broadcast(&is_still);
    return CUDA_SUCCESS;
}

void wait_until_still(void) {
    while (num_moving)
        pthread_cond_wait(&is_still, &driver);
}

/* ---- device memory ---- */

/* New memory holds no zeros, and nothing that was there before. */
static void *allocate(size_t num_bytes, size_t alignment) {
    size_t rounded = (num_bytes + alignment - 1) / alignment * alignment;
    void *memory = rounded < num_bytes ? NULL : aligned_alloc(alignment, rounded);
    if (memory)
        memset(memory, 0xdb, num_bytes);
    return memory;
}

static CUresult cuMemAlloc(CUdeviceptr *pointer, size_t num_bytes) {
    ENTER("cuMemAlloc", LIVE_CONTEXT);
    if (!num_bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (num_bytes > DEVICE_BYTES - call.context->allocated_bytes)
        return CUDA_ERROR_OUT_OF_MEMORY;
    void *memory = allocate(num_bytes, DEVICE_ALIGNMENT);
    if (!memory)
        return CUDA_ERROR_OUT_OF_MEMORY;
    add_range((uintptr_t)memory, num_bytes, ALLOCATED, call.context);
    call.context->allocated_bytes += num_bytes;
    *pointer = (uintptr_t)memory;
    return CUDA_SUCCESS;
}

static CUresult cuMemFree(CUdeviceptr pointer) {
    ENTER("cuMemFree", ANY_CONTEXT);
    if (pointer && !remove_range_from(pointer, ALLOCATED))
        return CUDA_ERROR_INVALID_VALUE;
    return call.context->error;
}

static CUresult cuMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    ENTER("cuMemGetInfo", LIVE_CONTEXT);
    *free_bytes = DEVICE_BYTES - call.context->allocated_bytes;
    *total_bytes = DEVICE_BYTES;
    return CUDA_SUCCESS;
}

/* ---- pinned memory of the host ---- */

static CUresult cuMemHostAlloc(void **pointer, size_t num_bytes, unsigned flags) {
    (void)flags;
    ENTER("cuMemHostAlloc", LIVE_CONTEXT);
    if (!num_bytes)
        return CUDA_ERROR_INVALID_VALUE;
    void *memory = allocate(num_bytes, HOST_ALIGNMENT);
    if (!memory)
        return CUDA_ERROR_OUT_OF_MEMORY;
    add_range((uintptr_t)memory, num_bytes, HOST_ALLOCATED, call.context);
    *pointer = memory;
    return CUDA_SUCCESS;
}

static CUresult cuMemFreeHost(void *pointer) {
    ENTER("cuMemFreeHost", ANY_CONTEXT);
    if (!remove_range_from((uintptr_t)pointer, HOST_ALLOCATED))
        return CUDA_ERROR_INVALID_VALUE;
    return call.context->error;
}

static CUresult cuMemHostRegister(void *pointer, size_t num_bytes, unsigned flags) {
    (void)flags;
    ENTER("cuMemHostRegister", LIVE_CONTEXT);
    if (!pointer || !num_bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (!is_free((uintptr_t)pointer, num_bytes))
        return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    add_range((uintptr_t)pointer, num_bytes, REGISTERED, call.context);
    return CUDA_SUCCESS;
}

static CUresult cuMemHostUnregister(void *pointer) {
    ENTER("cuMemHostUnregister", ANY_CONTEXT);
    if (!remove_range_from((uintptr_t)pointer, REGISTERED))
        return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    return call.context->error;
}

static CUresult cuMemHostGetDevicePointer(CUdeviceptr *device_pointer, void *pointer,
                                          unsigned flags) {
    ENTER("cuMemHostGetDevicePointer", LIVE_CONTEXT);
    const Range *range = range_at((uintptr_t)pointer);
    if (flags || !range || is_on_device(range))
        return CUDA_ERROR_INVALID_VALUE;
    *device_pointer = (uintptr_t)pointer;
    return CUDA_SUCCESS;
}

/* ---- what a pointer is ---- */

enum { POINTER_CONTEXT = 1, POINTER_MEMORY_TYPE = 2, POINTER_DEVICE_ORDINAL = 9 };
enum { MEMORYTYPE_HOST = 1, MEMORYTYPE_DEVICE = 2 };

static CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr pointer) {
    ENTER("cuPointerGetAttribute", LIVE_CONTEXT);
    const Range *range = range_at(pointer);
    if (!range)
        return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case POINTER_CONTEXT:
        *(Context **)value = range->context;
        return CUDA_SUCCESS;
    case POINTER_MEMORY_TYPE:
        *(unsigned *)value = is_on_device(range) ? MEMORYTYPE_DEVICE : MEMORYTYPE_HOST;
        return CUDA_SUCCESS;
    case POINTER_DEVICE_ORDINAL:
        *(int *)value = device_of(range->context);
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

Api memory_apis[] = {
    {"cuMemAlloc", 3020, cuMemAlloc},
    {"cuMemFree", 3020, cuMemFree},
    {"cuMemGetInfo", 3020, cuMemGetInfo},
    {"cuMemHostAlloc", 2020, cuMemHostAlloc},
    {"cuMemFreeHost", 2000, cuMemFreeHost},
    {"cuMemHostRegister", 4000, cuMemHostRegister},
    {"cuMemHostUnregister", 4000, cuMemHostUnregister},
    {"cuMemHostGetDevicePointer", 3020, cuMemHostGetDevicePointer},
    {"cuPointerGetAttribute", 4000, cuPointerGetAttribute},
    {NULL},
};

/* ---- controls for tests ---- */

/* Lets memory of the host, such as a torch CPU tensor, play device memory. */
EXPORT bool sc_declare(uintptr_t start, size_t num_bytes, CUdevice device) {
    LOCK_DRIVER;
    if (device < 0 || device >= knobs.num_devices || !is_free(start, num_bytes))
        return false;
    add_range(start, num_bytes, DECLARED, &contexts[device]);
    return true;
}

EXPORT bool sc_undeclare(uintptr_t start) {
    LOCK_DRIVER;
    return remove_range_from(start, DECLARED);
}
