/* softcuda: a software libcuda.so.1, so that the real cuda.bindings runs without a GPU.
 *
 *     gcc -O2 -shared -fPIC -pthread -fvisibility=hidden \
 *         -Wl,-soname,libcuda.so.1 -o libcuda.so.1 *.c
 *
 * Device memory is host memory, and a stream is a worker thread with a FIFO. It proves
 * logic, never speed. Where the manual leaves a choice, softcuda takes the one that
 * shows a bug:
 *
 * - A copy is torn: one half lands when it begins, the other when it ends. In between a
 *   test may hold it at the gate for as long as it likes.
 * - A call without a current context is refused, and so is new work for a stream of
 *   another context. To wait for such a stream, or to query it, is allowed.
 * - Memory is what was allocated, registered or declared. A copy that leaves it, or whose
 *   memory is given back before it ends, is CUDA_ERROR_ILLEGAL_ADDRESS on its stream.
 * - An error on a stream kills the context: every later call returns it.
 *
 * Left out: kernels, graphs, memory pools, IPC, and the order that the legacy stream
 * keeps with others. The runtime API, and so torch.cuda, does not run on it.
 *
 * driver.c   admission of calls, devices, contexts, cuGetProcAddress
 * memory.c   ranges of memory and who knows them
 * streams.c  streams, events and what runs on them
 * controls.c the gate and what else a test controls: the functions named sc_*
 */
#ifndef SOFTCUDA_H
#define SOFTCUDA_H

#define _GNU_SOURCE
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* ---- the types of cuda.h ---- */

#define EACH_RESULT(X)                                                                \
    X(CUDA_SUCCESS, 0, "no error")                                                    \
    X(CUDA_ERROR_INVALID_VALUE, 1, "invalid argument")                                \
    X(CUDA_ERROR_OUT_OF_MEMORY, 2, "out of memory")                                   \
    X(CUDA_ERROR_NOT_INITIALIZED, 3, "initialization error")                          \
    X(CUDA_ERROR_DEINITIALIZED, 4, "driver shutting down")                            \
    X(CUDA_ERROR_NO_DEVICE, 100, "no CUDA-capable device is detected")                \
    X(CUDA_ERROR_INVALID_DEVICE, 101, "invalid device ordinal")                       \
    X(CUDA_ERROR_INVALID_CONTEXT, 201, "invalid device context")                      \
    X(CUDA_ERROR_ECC_UNCORRECTABLE, 214, "uncorrectable ECC error encountered")       \
    X(CUDA_ERROR_INVALID_HANDLE, 400, "invalid resource handle")                      \
    X(CUDA_ERROR_NOT_FOUND, 500, "named symbol not found")                            \
    X(CUDA_ERROR_NOT_READY, 600, "device not ready")                                  \
    X(CUDA_ERROR_ILLEGAL_ADDRESS, 700, "an illegal memory access was encountered")    \
    X(CUDA_ERROR_LAUNCH_TIMEOUT, 702, "the launch timed out and was terminated")      \
    X(CUDA_ERROR_CONTEXT_IS_DESTROYED, 709, "context is destroyed")                   \
    X(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, 712,                                 \
      "part or all of the requested memory range is already mapped")                  \
    X(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, 713,                                     \
      "pointer does not correspond to a registered memory region")                    \
    X(CUDA_ERROR_LAUNCH_FAILED, 719, "unspecified launch failure")                    \
    X(CUDA_ERROR_NOT_PERMITTED, 800, "operation not permitted")                       \
    X(CUDA_ERROR_NOT_SUPPORTED, 801, "operation not supported")                       \
    X(CUDA_ERROR_UNKNOWN, 999, "unknown error")

#define AS_ENUM(name, code, text) name = code,
typedef enum { EACH_RESULT(AS_ENUM) } CUresult;
#undef AS_ENUM

typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef void (*CUhostFn)(void *);

/* ---- driver.c ---- */

enum { MAX_DEVICES = 8 };

/* Held by every call, and by workers but while they sleep or move bytes. */
extern pthread_mutex_t driver;

typedef struct Context {
    unsigned num_references;
    CUresult error; /* sticky: once set, the context is dead */
    struct Stream *legacy_stream;
    size_t allocated_bytes;
} Context;

extern Context contexts[MAX_DEVICES]; /* the primary one of each device */

CUdevice device_of(const Context *context);

/* An error that the nth call from now on meets. */
typedef struct {
    long num_calls_left;
    CUresult error;
} Injection;

typedef struct {
    const char *name;
    int since; /* the CUDA version of this form */
    void *function;
    bool enqueues;
    long num_calls;
    Injection refusal;
    Injection poison;
} Api;

/* Each part's functions, up to one without a name. */
extern Api driver_apis[], memory_apis[], stream_apis[];

Api *find_api(const char *name);
void reset_driver(void);

typedef enum {
    NOTHING,      /* not even cuInit */
    DRIVER,       /* cuInit */
    ANY_CONTEXT,  /* a current context, dead or alive: for what gives things back */
    LIVE_CONTEXT, /* a current context that is alive */
} Need;

typedef struct {
    CUresult error;   /* if set, what the call must return at once */
    CUresult poison;  /* if set, how the operation that it enqueues must end */
    Context *context; /* current in this thread */
    bool is_locked;
} Call;

Call enter(const char *name, Need need);
void leave(Call *call);
extern __thread bool in_host_function;

#define ENTER(name, need)                                           \
    Call call __attribute__((cleanup(leave))) = enter(name, need);  \
    if (call.error)                                                 \
        return call.error

/* ---- memory.c ---- */

typedef struct {
    uintptr_t target;
    uintptr_t source;
    size_t num_bytes;
    bool knows_target; /* else it is pageable, and nobody can say where it ends */
    bool knows_source;
} Piece;

/* What a copy connects; the gate holds copies by it. */
typedef enum { HOST_TO_DEVICE = 1, DEVICE_TO_HOST = 2, OTHER_COPY = 4 } Direction;

typedef enum { FIRST_HALF, SECOND_HALF } Half;

bool is_mapped(uintptr_t address);
bool is_in_bounds(uintptr_t address, size_t num_bytes);
Direction direction_of(uintptr_t target, uintptr_t source);
/* Lets go of the driver while it moves the bytes. */
CUresult move_half(const Piece *piece, Half half);
void reset_memory(void);

/* ---- streams.c ---- */

void fail_context(Context *context, CUresult error);
void reset_streams(void);

/* ---- controls.c ---- */

typedef struct {
    int num_devices;
    int64_t latency_ns;
    double bytes_per_ns; /* 0: as fast as memory is */
    CUresult pageable_error;
    bool loses_wakes;
    bool locks_host_functions; /* a host function runs while the driver is locked */
} Knobs;

typedef struct {
    long live_events;
    long live_streams;
    long live_allocations;
    long live_host_allocations;
    long registered_ranges;
    long declared_ranges;
    long copies;
    long batch_items;
    long pageable;
    long host_functions_run;
    long host_functions_skipped;
} Counts;

extern Knobs knobs;
extern Counts counts;
extern _Atomic int driver_version;

int64_t now_ns(void);
void wait_until(pthread_cond_t *condition, int64_t deadline_ns);
/* Returns once the gate lets this copy through, or its context is dead. */
void pass_gate(const Context *context, Direction direction);
void wake_gate(void);

#endif
