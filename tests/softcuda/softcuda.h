/* softcuda: a software libcuda.so.1, so that the real cuda.bindings runs without a GPU.
 *
 *     gcc -shared -fPIC -pthread -fvisibility=hidden -Wl,-soname,libcuda.so.1 \
 *         -o libcuda.so.1 *.c
 *
 * Device memory is host memory, and a stream is a worker thread with a FIFO. It proves
 * logic, never speed. Where the manual leaves a choice, softcuda takes the one that
 * shows a bug:
 *
 * - A copy is torn: one half lands when it begins, the other when it ends. In between
 *   a test may hold it at the gate for as long as it likes.
 * - A call without a current context is refused, and so is new work for a stream of
 *   another context. To wait for such a stream, or to query it, is allowed.
 * - Memory is what was allocated, registered or declared. A copy that leaves it, or
 *   whose memory is given back too early, is CUDA_ERROR_ILLEGAL_ADDRESS on its stream,
 *   where a real driver may refuse the call or notice nothing.
 * - An error on a stream kills the context: every later call returns it, no byte moves
 *   any more, and all that wait are woken. What gives things back still does.
 *
 * Left out: kernels, graphs, memory pools, IPC, the order that the legacy stream keeps
 * with others, and the orders in which a batch may read: all are the stream's. The
 * runtime API, and so torch.cuda, does not run on it.
 *
 * driver.c   admission of calls, devices, contexts, cuGetProcAddress, most controls
 * memory.c   ranges of memory
 * streams.c  handles, workers, streams, events
 * work.c     what streams carry out: copies and the gate, values, host functions
 */
#ifndef SOFTCUDA_H
#define SOFTCUDA_H

#define _GNU_SOURCE
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

#define EACH_RESULT(X)                                                              \
    X(CUDA_SUCCESS, 0, "no error")                                                  \
    X(CUDA_ERROR_INVALID_VALUE, 1, "invalid argument")                              \
    X(CUDA_ERROR_OUT_OF_MEMORY, 2, "out of memory")                                 \
    X(CUDA_ERROR_NOT_INITIALIZED, 3, "initialization error")                        \
    X(CUDA_ERROR_DEINITIALIZED, 4, "driver shutting down")                          \
    X(CUDA_ERROR_NO_DEVICE, 100, "no CUDA-capable device is detected")              \
    X(CUDA_ERROR_INVALID_DEVICE, 101, "invalid device ordinal")                     \
    X(CUDA_ERROR_INVALID_CONTEXT, 201, "invalid device context")                    \
    X(CUDA_ERROR_ECC_UNCORRECTABLE, 214, "uncorrectable ECC error encountered")     \
    X(CUDA_ERROR_INVALID_HANDLE, 400, "invalid resource handle")                    \
    X(CUDA_ERROR_NOT_FOUND, 500, "named symbol not found")                          \
    X(CUDA_ERROR_NOT_READY, 600, "device not ready")                                \
    X(CUDA_ERROR_ILLEGAL_ADDRESS, 700, "an illegal memory access was encountered")  \
    X(CUDA_ERROR_CONTEXT_IS_DESTROYED, 709, "context is destroyed")                 \
    X(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, 712,                               \
      "part or all of the requested memory range is already mapped")                \
    X(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, 713,                                   \
      "pointer does not correspond to a registered memory region")                  \
    X(CUDA_ERROR_LAUNCH_FAILED, 719, "unspecified launch failure")                  \
    X(CUDA_ERROR_NOT_PERMITTED, 800, "operation not permitted")                     \
    X(CUDA_ERROR_NOT_SUPPORTED, 801, "operation not supported")                     \
    X(CUDA_ERROR_UNKNOWN, 999, "unknown error")

#define AS_ENUM(name, code, text) name = code,
typedef enum { EACH_RESULT(AS_ENUM) } CUresult;
#undef AS_ENUM

enum { NULL_STREAM = 0, LEGACY_STREAM = 1, PER_THREAD_STREAM = 2 };

typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef void (*CUhostFn)(void *);

/* ---- driver.c ---- */

enum { MAX_DEVICES = 8, NS_PER_S = 1000000000 };

typedef struct {
    unsigned num_references;
    CUresult error; /* sticky: once it is set, the context is dead */
    struct Stream *legacy_stream;
    size_t allocated_bytes;
} Context;

/* What a test sets; tests/softcuda/_controls.py has the same fields. */
typedef struct {
    int num_devices;
    int driver_version;
    int pageable_error; /* if set, what a copy of pageable memory returns */
    int loses_wakes;    /* cuEventSynchronize does not return */
    int locks_host_functions; /* the driver is locked while a host function runs */
    double latency_s;
    double bytes_per_s; /* 0: as fast as memory is */
} Knobs;

/* What a test reads; tests/softcuda/_controls.py has the same fields. */
typedef struct {
    long retained_contexts;
    long live_events;
    long live_streams;
    long live_allocations;
    long live_host_allocations;
    long registered_ranges;
    long declared_ranges;
    long copies; /* a batch is one */
    long batch_items;
    long pageable;
    long host_functions_run;
    long host_functions_skipped;
} Counts;

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

typedef enum {
    NOTHING,      /* not even cuInit */
    DRIVER,       /* cuInit */
    ANY_CONTEXT,  /* a current context, dead or alive: for what gives things back */
    LIVE_CONTEXT, /* a current context that is alive */
} Need;

typedef struct {
    CUresult error;   /* if set, what the call must return at once */
    CUresult poison;  /* if set, what the work that it enqueues fails with */
    Context *context; /* current in this thread */
    bool is_locked;
} Call;

/* Held throughout every call, and by workers but while they sleep or move bytes. It
 * guards all there is. */
extern pthread_mutex_t driver;
extern Context contexts[MAX_DEVICES]; /* the primary one of each device */
extern Knobs knobs;
extern Counts counts;
extern __thread bool in_host_function;

/* Each part's functions, up to one without a name. */
extern Api driver_apis[], memory_apis[], stream_apis[], work_apis[];

Call enter(const char *name, Need need);
void leave(Call *call);
int64_t now_ns(void);
void wait_until(pthread_cond_t *condition, int64_t deadline_ns);
CUdevice device_of(const Context *context);

/* Opens every function of the driver's that a program calls; may return from it. */
#define ENTER(name, need)                                          \
    Call call __attribute__((cleanup(leave))) = enter(name, need); \
    if (call.error)                                                \
        return call.error

/* Opens every function of ours that a test calls. */
#define LOCK_DRIVER                                                          \
    Call call __attribute__((cleanup(leave), unused)) = {.is_locked = true}; \
    pthread_mutex_lock(&driver)

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
void wait_until_still(void);
void reset_memory(void);

/* ---- streams.c ---- */

typedef struct Event Event;
typedef struct Stream Stream;

/* One piece of work for a stream; each kind uses the fields that it needs. */
typedef struct Operation {
    struct Operation *next;
    void (*run)(Context *context, struct Operation *operation);
    CUresult poison;
    Event *event;
    uint64_t record;
    uintptr_t address;
    uint32_t value;
    unsigned condition;
    CUhostFn function;
    void *argument;
    size_t num_bytes;
    Direction direction;
    size_t num_pieces;
    Piece pieces[];
} Operation;

Operation *new_operation(void (*run)(Context *, Operation *), size_t num_pieces);
/* Takes the operation over, also when it refuses. */
CUresult enqueue(const Call *call, void *stream_handle, Operation *operation);
CUresult drain_legacy_stream(const Call *call);
void fail_context(Context *context, CUresult error);
void wake_events(void);
void reset_streams(void);

/* ---- work.c ---- */

void wake_work(void);
void reset_work(void);

#endif
