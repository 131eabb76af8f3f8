/* How an exported function begins: its name for messages, and checks of what it was given. */
#ifndef TL_API_CALL_H
#define TL_API_CALL_H

#include "base/handle.h"
#include "run/engine.h"

/* First in every function that can fail. */
#define BEGIN_CALL()                                                                               \
    __attribute__((cleanup(status_leave), unused)) const char *outer_call = status_enter(__func__)

#define NOT_NULL(argument)                                                                         \
    do {                                                                                           \
        if ((argument) == NULL)                                                                    \
            return tl_fail(TL_STATUS_INVALID, #argument " is NULL");                               \
    } while (0)

#define CHECK_HANDLE(type, argument)                                                               \
    do {                                                                                           \
        NOT_NULL(argument);                                                                        \
        TL_TRY(handle_check(argument, #type, #argument));                                          \
    } while (0)

static inline void call_let_go(tl_model **model)
{
    engine_release(*model);
}

/* A model to compute with: open, and alive until the call ends, even if a callback releases it. */
#define COMPUTE_WITH(model)                                                                        \
    TL_TRY(engine_check_open(model));                                                              \
    __attribute__((cleanup(call_let_go), unused)) tl_model *kept_model = engine_retain(model)

/* What a function has made is the caller's. Every object begins with its handle. */
#define GIVE(type, object) handle_give((handle *)(object), #type)

#endif
