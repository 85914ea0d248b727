/* Admission of calls, devices, contexts, cuGetProcAddress, and controls for tests. */
#include "softcuda.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

enum { DEFAULT_DRIVER_VERSION = 13000 };
static const Knobs DEFAULTS = {
    .num_devices = 1,
    .driver_version = DEFAULT_DRIVER_VERSION,
};

pthread_mutex_t driver = PTHREAD_MUTEX_INITIALIZER;
Context contexts[MAX_DEVICES];
Knobs knobs = DEFAULTS;
Counts counts;
__thread bool in_host_function;

static bool is_initialised;
/* In the child of a process that had called cuInit nothing works, and the driver may be
 * locked by a thread that the child does not have. */
static bool is_forked;

enum { MAX_DEPTH = 16 };

/* The contexts that this thread has pushed. A reset cannot reach those of others: it
 * makes their round a past one. */
static __thread struct {
    unsigned long round;
    int depth;
    Context *stack[MAX_DEPTH];
} bound;
static unsigned long current_round = 1;

static pthread_cond_t called = PTHREAD_COND_INITIALIZER;

/* ---- time ---- */

int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * NS_PER_S + now.tv_nsec;
}

void wait_until(pthread_cond_t *condition, int64_t deadline_ns) {
    struct timespec deadline = {deadline_ns / NS_PER_S, deadline_ns % NS_PER_S};
    pthread_cond_clockwait(condition, &driver, CLOCK_MONOTONIC, &deadline);
}

/* ---- admission ---- */

static Api *const tables[] = {driver_apis, memory_apis, stream_apis, work_apis};
enum { NUM_TABLES = sizeof tables / sizeof *tables };

/* Finds the first form, which counts the calls of all. */
static Api *find_api(const char *name) {
    for (int table = 0; table < NUM_TABLES; table++)
        for (Api *api = tables[table]; api->name; api++)
            if (!strcmp(api->name, name))
                return api;
    return NULL;
}

static Context *current_context(void) {
    if (bound.round != current_round)
        bound.depth = 0;
    bound.round = current_round;
    return bound.depth ? bound.stack[bound.depth - 1] : NULL;
}

static bool is_due(Injection *injection) {
    return injection->num_calls_left > 0 && --injection->num_calls_left == 0;
}

static CUresult admit(Call *call, Api *api, Need need) {
    api->num_calls++;
    pthread_cond_broadcast(&called);
    if (is_due(&api->poison))
        call->poison = api->poison.error;
    if (is_due(&api->refusal))
        return api->refusal.error;
    if (need == NOTHING)
        return CUDA_SUCCESS;
    if (!is_initialised)
        return CUDA_ERROR_NOT_INITIALIZED;
    call->context = current_context();
    if (need == DRIVER)
        return CUDA_SUCCESS;
    if (!call->context)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!call->context->num_references)
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    return need == LIVE_CONTEXT ? call->context->error : CUDA_SUCCESS;
}

Call enter(const char *name, Need need) {
    if (in_host_function)
        return (Call){.error = CUDA_ERROR_NOT_PERMITTED};
    if (is_forked)
        return (Call){.error = CUDA_ERROR_NOT_INITIALIZED};
    pthread_mutex_lock(&driver);
    Call call = {.is_locked = true};
    call.error = admit(&call, find_api(name), need);
    return call;
}

void leave(Call *call) {
    if (call->is_locked)
        pthread_mutex_unlock(&driver);
}

static void after_fork(void) {
    is_forked = is_initialised;
}

__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, after_fork);
}

/* ---- the driver ---- */

static CUresult cuInit(unsigned flags) {
    ENTER("cuInit", NOTHING);
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (!knobs.num_devices)
        return CUDA_ERROR_NO_DEVICE;
    is_initialised = true;
    return CUDA_SUCCESS;
}

static CUresult cuDriverGetVersion(int *version) {
    ENTER("cuDriverGetVersion", NOTHING);
    *version = knobs.driver_version;
    return CUDA_SUCCESS;
}

#define AS_ROW(name, code, text) {name, #name, text},
static const struct {
    CUresult result;
    const char *name;
    const char *text;
} results[] = {EACH_RESULT(AS_ROW)};
#undef AS_ROW
enum { NUM_RESULTS = sizeof results / sizeof *results };

static CUresult cuGetErrorName(CUresult result, const char **name) {
    *name = NULL;
    for (int row = 0; row < NUM_RESULTS; row++)
        if (results[row].result == result)
            *name = results[row].name;
    return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult cuGetErrorString(CUresult result, const char **text) {
    *text = NULL;
    for (int row = 0; row < NUM_RESULTS; row++)
        if (results[row].result == result)
            *text = results[row].text;
    return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- devices ---- */

static bool is_device(CUdevice device) {
    return 0 <= device && device < knobs.num_devices;
}

static CUresult cuDeviceGetCount(int *count) {
    ENTER("cuDeviceGetCount", DRIVER);
    *count = knobs.num_devices;
    return CUDA_SUCCESS;
}

static CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER("cuDeviceGet", DRIVER);
    if (!is_device(ordinal))
        return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

static CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
    ENTER("cuDeviceGetName", DRIVER);
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    snprintf(name, size, "softcuda %d", device);
    return CUDA_SUCCESS;
}

static CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    ENTER("cuDeviceGetAttribute", DRIVER);
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    switch (attribute) {
    case 19: /* CAN_MAP_HOST_MEMORY */
    case 41: /* UNIFIED_ADDRESSING */
    case 91: /* CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM */
    case 99: /* HOST_REGISTER_SUPPORTED */
        *value = 1;
        break;
    case 40: /* ASYNC_ENGINE_COUNT */
        *value = 2;
        break;
    case 75: /* COMPUTE_CAPABILITY_MAJOR */
        *value = 9;
        break;
    default:
        *value = 0;
    }
    return CUDA_SUCCESS;
}

/* ---- contexts ---- */

CUdevice device_of(const Context *context) {
    return context - contexts;
}

static bool is_context(const Context *context) {
    return contexts <= context && context < contexts + knobs.num_devices;
}

static CUresult cuDevicePrimaryCtxRetain(Context **context, CUdevice device) {
    ENTER("cuDevicePrimaryCtxRetain", DRIVER);
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    if (contexts[device].error)
        return contexts[device].error;
    contexts[device].num_references++;
    counts.retained_contexts++;
    *context = &contexts[device];
    return CUDA_SUCCESS;
}

static CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    ENTER("cuDevicePrimaryCtxRelease", DRIVER);
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    if (!contexts[device].num_references)
        return CUDA_ERROR_INVALID_CONTEXT;
    contexts[device].num_references--;
    counts.retained_contexts--;
    return CUDA_SUCCESS;
}

static CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags,
                                           int *active) {
    ENTER("cuDevicePrimaryCtxGetState", DRIVER);
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    *flags = 0;
    *active = contexts[device].num_references > 0;
    return CUDA_SUCCESS;
}

static CUresult cuCtxPushCurrent(Context *context) {
    ENTER("cuCtxPushCurrent", DRIVER);
    if (!is_context(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (bound.depth == MAX_DEPTH)
        return CUDA_ERROR_OUT_OF_MEMORY;
    bound.stack[bound.depth++] = context;
    return CUDA_SUCCESS;
}

static CUresult cuCtxPopCurrent(Context **context) {
    ENTER("cuCtxPopCurrent", DRIVER);
    if (!bound.depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    bound.depth--;
    if (context)
        *context = call.context;
    return CUDA_SUCCESS;
}

static CUresult cuCtxSetCurrent(Context *context) {
    ENTER("cuCtxSetCurrent", DRIVER);
    if (context && !is_context(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (bound.depth)
        bound.depth--;
    if (context)
        bound.stack[bound.depth++] = context;
    return CUDA_SUCCESS;
}

static CUresult cuCtxGetCurrent(Context **context) {
    ENTER("cuCtxGetCurrent", DRIVER);
    *context = call.context;
    return CUDA_SUCCESS;
}

/* There are no graphs here; but who waits while another thread records one must say that
 * it may. */
static __thread int capture_mode; /* global, until the thread says otherwise */
enum { NUM_CAPTURE_MODES = 3 };

static CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
    ENTER("cuThreadExchangeStreamCaptureMode", DRIVER);
    if (*mode < 0 || *mode >= NUM_CAPTURE_MODES)
        return CUDA_ERROR_INVALID_VALUE;
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

static CUresult cuCtxGetDevice(CUdevice *device) {
    ENTER("cuCtxGetDevice", ANY_CONTEXT);
    *device = device_of(call.context);
    return CUDA_SUCCESS;
}

/* ---- the address of each function ---- */

enum { FOUND, SYMBOL_NOT_FOUND, VERSION_NOT_SUFFICIENT };

/* Gives the newest form that is no newer than asked for. */
EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version,
                                    uint64_t flags, int *status) {
    (void)flags;
    ENTER("cuGetProcAddress", NOTHING);
    int newest = 0;
    int found = SYMBOL_NOT_FOUND;
    *function = NULL;
    for (int table = 0; table < NUM_TABLES; table++) {
        for (Api *api = tables[table]; api->name; api++) {
            if (strcmp(api->name, name) || api->since > knobs.driver_version)
                continue;
            if (newest < api->since && api->since <= version) {
                newest = api->since;
                *function = api->function;
            }
            found = newest ? FOUND : VERSION_NOT_SUFFICIENT;
        }
    }
    if (status)
        *status = found;
    if (version > knobs.driver_version)
        return CUDA_ERROR_INVALID_VALUE;
    return found == FOUND ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuGetProcAddress(const char *name, void **function, int version,
                                 uint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}

Api driver_apis[] = {
    {"cuInit", 2000, cuInit},
    {"cuDriverGetVersion", 2020, cuDriverGetVersion},
    {"cuGetErrorName", 6000, cuGetErrorName},
    {"cuGetErrorString", 6000, cuGetErrorString},
    {"cuGetProcAddress", 11030, cuGetProcAddress},
    {"cuGetProcAddress", 12000, cuGetProcAddress_v2},
    {"cuDeviceGetCount", 2000, cuDeviceGetCount},
    {"cuDeviceGet", 2000, cuDeviceGet},
    {"cuDeviceGetName", 2000, cuDeviceGetName},
    {"cuDeviceGetAttribute", 2000, cuDeviceGetAttribute},
    {"cuDevicePrimaryCtxRetain", 7000, cuDevicePrimaryCtxRetain},
    {"cuDevicePrimaryCtxRelease", 11000, cuDevicePrimaryCtxRelease},
    {"cuDevicePrimaryCtxGetState", 7000, cuDevicePrimaryCtxGetState},
    {"cuCtxPushCurrent", 4000, cuCtxPushCurrent},
    {"cuCtxPopCurrent", 4000, cuCtxPopCurrent},
    {"cuCtxSetCurrent", 4000, cuCtxSetCurrent},
    {"cuCtxGetCurrent", 4000, cuCtxGetCurrent},
    {"cuCtxGetDevice", 2000, cuCtxGetDevice},
    {"cuThreadExchangeStreamCaptureMode", 10010, cuThreadExchangeStreamCaptureMode},
    {NULL},
};

/* ---- controls for tests ---- */

EXPORT void sc_get_knobs(Knobs *copy) {
    LOCK_DRIVER;
    *copy = knobs;
}

EXPORT void sc_set_knobs(const Knobs *wanted) {
    LOCK_DRIVER;
    knobs = *wanted;
    wake_events();
}

EXPORT void sc_get_counts(Counts *copy) {
    LOCK_DRIVER;
    *copy = counts;
}

/* Says how often a function was called; -1 if there is none of this name. */
EXPORT long sc_num_calls(const char *name) {
    LOCK_DRIVER;
    const Api *api = find_api(name);
    return api ? api->num_calls : -1;
}

/* Returns once it was called so often, or the time is over; how often it was then. */
EXPORT long sc_wait_calls(const char *name, long count, double timeout_s) {
    LOCK_DRIVER;
    const Api *api = find_api(name);
    int64_t deadline_ns = now_ns() + (int64_t)(timeout_s * NS_PER_S);
    while (api && api->num_calls < count && now_ns() < deadline_ns)
        wait_until(&called, deadline_ns);
    return api ? api->num_calls : -1;
}

/* Lets the nth call from now on return an error and do nothing; 1 is the next. */
EXPORT bool sc_refuse(const char *name, long nth, CUresult error) {
    LOCK_DRIVER;
    Api *api = find_api(name);
    if (api)
        api->refusal = (Injection){nth, error};
    return api;
}

/* Lets what the nth call from now on enqueues end with an error. */
EXPORT bool sc_poison(const char *name, long nth, CUresult error) {
    LOCK_DRIVER;
    Api *api = find_api(name);
    if (!api || !api->enqueues)
        return false;
    api->poison = (Injection){nth, error};
    return true;
}

/* Makes everything as it was before the first call, whatever is in flight. */
EXPORT void sc_reset(void) {
    LOCK_DRIVER;
    is_initialised = false;
    current_round++;
    knobs = DEFAULTS;
    reset_work();
    reset_streams();
    reset_memory();
    for (int table = 0; table < NUM_TABLES; table++) {
        for (Api *api = tables[table]; api->name; api++) {
            api->num_calls = 0;
            api->refusal = (Injection){0};
            api->poison = (Injection){0};
        }
    }
    memset(contexts, 0, sizeof contexts);
    counts = (Counts){0};
}
