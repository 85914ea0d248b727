/* The gate, and what else a test controls. */
#include "softcuda.h"

#include <string.h>
#include <time.h>

enum { DEFAULT_DRIVER_VERSION = 13000 };
static const int64_t NS_PER_S = 1000000000;

Knobs knobs = {.num_devices = 1};
Counts counts;
_Atomic int driver_version = DEFAULT_DRIVER_VERSION;

/* ---- time ---- */

int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * NS_PER_S + now.tv_nsec;
}

void wait_until(pthread_cond_t *condition, int64_t deadline_ns)
{
    struct timespec deadline = {deadline_ns / NS_PER_S, deadline_ns % NS_PER_S};
    pthread_cond_clockwait(condition, &driver, CLOCK_MONOTONIC, &deadline);
}

/* ---- the gate ---- */

typedef struct Held {
    Direction direction;
    bool may_pass;
    struct Held *next;
} Held;

static unsigned shut_directions;
static Held *held; /* in the order in which they came */
static pthread_cond_t gate_changed = PTHREAD_COND_INITIALIZER;

void wake_gate(void)
{
    pthread_cond_broadcast(&gate_changed);
}

void pass_gate(const Context *context, Direction direction)
{
    Held self = {direction};
    Held **link = &held;
    while (*link)
        link = &(*link)->next;
    *link = &self;
    wake_gate();
    while (shut_directions & direction && !self.may_pass && !context->error)
        pthread_cond_wait(&gate_changed, &driver);
    for (link = &held; *link != &self; link = &(*link)->next)
        continue;
    *link = self.next;
}

static int num_held(unsigned directions)
{
    int count = 0;
    for (const Held *copy = held; copy; copy = copy->next)
        if (copy->direction & directions & shut_directions && !copy->may_pass)
            count++;
    return count;
}

EXPORT void sc_gate_shut(unsigned directions)
{
    pthread_mutex_lock(&driver);
    shut_directions |= directions;
    pthread_mutex_unlock(&driver);
}

EXPORT void sc_gate_open(unsigned directions)
{
    pthread_mutex_lock(&driver);
    shut_directions &= ~directions;
    wake_gate();
    pthread_mutex_unlock(&driver);
}

/* Lets the copy that has been held for longest go on; false if none is held. */
EXPORT bool sc_gate_pass(unsigned directions)
{
    pthread_mutex_lock(&driver);
    Held *copy = held;
    while (copy && !(copy->direction & directions & shut_directions && !copy->may_pass))
        copy = copy->next;
    if (copy)
        copy->may_pass = true;
    wake_gate();
    pthread_mutex_unlock(&driver);
    return copy != NULL;
}

EXPORT int sc_gate_num_held(unsigned directions)
{
    pthread_mutex_lock(&driver);
    int count = num_held(directions);
    pthread_mutex_unlock(&driver);
    return count;
}

/* Returns once so many are held, or the time is over; how many are held then. */
EXPORT int sc_gate_wait(unsigned directions, int count, double timeout_s)
{
    pthread_mutex_lock(&driver);
    int64_t deadline_ns = now_ns() + (int64_t)(timeout_s * NS_PER_S);
    while (num_held(directions) < count && now_ns() < deadline_ns)
        wait_until(&gate_changed, deadline_ns);
    count = num_held(directions);
    pthread_mutex_unlock(&driver);
    return count;
}

/* ---- errors ---- */

/* The nth call from now on, 1 being the next, returns the error and does nothing. */
EXPORT bool sc_refuse(const char *name, long nth, CUresult error)
{
    pthread_mutex_lock(&driver);
    Api *api = find_api(name);
    if (api)
        api->refusal = (Injection){nth, error};
    pthread_mutex_unlock(&driver);
    return api != NULL;
}

/* The nth call from now on is accepted; what it enqueues ends with the error. */
EXPORT bool sc_poison(const char *name, long nth, CUresult error)
{
    pthread_mutex_lock(&driver);
    Api *api = find_api(name);
    if (api && api->enqueues)
        api->poison = (Injection){nth, error};
    pthread_mutex_unlock(&driver);
    return api && api->enqueues;
}

/* ---- knobs ---- */

EXPORT void sc_devices(int num_devices)
{
    pthread_mutex_lock(&driver);
    knobs.num_devices = num_devices;
    pthread_mutex_unlock(&driver);
}

EXPORT void sc_driver_version(int version)
{
    driver_version = version;
}

EXPORT void sc_pace(double latency_s, double bytes_per_s)
{
    pthread_mutex_lock(&driver);
    knobs.latency_ns = (int64_t)(latency_s * NS_PER_S);
    knobs.bytes_per_ns = bytes_per_s / NS_PER_S;
    pthread_mutex_unlock(&driver);
}

EXPORT void sc_refuse_pageable(CUresult error)
{
    pthread_mutex_lock(&driver);
    knobs.pageable_error = error;
    pthread_mutex_unlock(&driver);
}

EXPORT void sc_lock_host_functions(bool on)
{
    pthread_mutex_lock(&driver);
    knobs.locks_host_functions = on;
    pthread_mutex_unlock(&driver);
}

/* ---- counters ---- */

static const struct {
    const char *name;
    const long *count;
} counters[] = {
    {"live_events", &counts.live_events},
    {"live_streams", &counts.live_streams},
    {"live_allocations", &counts.live_allocations},
    {"live_host_allocations", &counts.live_host_allocations},
    {"registered_ranges", &counts.registered_ranges},
    {"declared_ranges", &counts.declared_ranges},
    {"copies", &counts.copies},
    {"batch_items", &counts.batch_items},
    {"pageable", &counts.pageable},
    {"host_functions_run", &counts.host_functions_run},
    {"host_functions_skipped", &counts.host_functions_skipped},
};
enum { NUM_COUNTERS = sizeof counters / sizeof *counters };

static long find_count(const char *name)
{
    const Api *api = find_api(name);
    if (api)
        return api->num_calls;
    for (int index = 0; index < NUM_COUNTERS; index++)
        if (!strcmp(counters[index].name, name))
            return *counters[index].count;
    if (strcmp(name, "retained_contexts"))
        return -1;
    long num_references = 0;
    for (int device = 0; device < MAX_DEVICES; device++)
        num_references += contexts[device].num_references;
    return num_references;
}

/* Calls of a function by its name, or one of the counters above; -1 if there is none. */
EXPORT long sc_count(const char *name)
{
    pthread_mutex_lock(&driver);
    long count = find_count(name);
    pthread_mutex_unlock(&driver);
    return count;
}

/* ---- a new start ---- */

/* Everything is as before the first call, whatever is in flight. */
EXPORT void sc_reset(void)
{
    pthread_mutex_lock(&driver);
    shut_directions = 0;
    knobs = (Knobs){.num_devices = 1};
    driver_version = DEFAULT_DRIVER_VERSION;
    reset_streams();
    reset_memory();
    reset_driver();
    counts = (Counts){0};
    pthread_mutex_unlock(&driver);
}
