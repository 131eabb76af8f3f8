/* What callers hold: every object of the C API begins with a handle. In debug builds (TL_DEBUG) all
 * handles that callers hold are listed, so one that was released, or never was one, is told by its
 * address alone and not followed. An address that a new object has taken over since is not told.
 * Other builds keep no list and believe the caller. */
#ifndef TL_BASE_HANDLE_H
#define TL_BASE_HANDLE_H

#include "base/status.h"

#include <stdbool.h>

typedef struct handle {
    struct handle *next;
    struct handle *previous;
    const char *type; /* "tl_model" */
    int64_t held;     /* references that callers have; an object may live on without any */
} handle;

#ifdef TL_DEBUG

/* One more reference is the caller's. */
void handle_give(handle *handle, const char *type);

/* INVALID unless the caller has a reference to an object of that type. */
tl_status handle_check(const void *object, const char *type, const char *parameter);

/* The caller gives a reference back; false, with a message, if it had none. */
bool handle_take(const void *object, const char *type);

#else

static inline void handle_give(handle *handle, const char *type)
{
    (void)handle, (void)type;
}

static inline tl_status handle_check(const void *object, const char *type, const char *parameter)
{
    (void)object, (void)type, (void)parameter;
    return TL_STATUS_OK;
}

static inline bool handle_take(const void *object, const char *type)
{
    (void)object, (void)type;
    return true;
}

#endif

#endif
