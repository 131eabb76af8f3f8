/* Status codes with a sentence per thread, and the log. */
#ifndef TL_BASE_STATUS_H
#define TL_BASE_STATUS_H

#include "tinyloop.h"

/* Makes `function` what messages of this thread begin with, and returns what it was before, which
 * the end of the call restores: calls nest where a callback makes one. */
const char *status_enter(const char *function);
void status_leave(const char **before);

/* Stores "<function>: <the formatted sentence>" for tl_last_error() and returns `code`. Needs no
 * memory. */
tl_status tl_fail(tl_status code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* As tl_fail with TL_STATUS_NOMEM: "out of memory: cannot allocate <bytes> bytes for <what>". */
tl_status tl_fail_nomem(const char *what, size_t bytes);

const char *status_last_error(void);

/* The last error without the function's name, to be said again by another call or thread. */
const char *status_sentence(void);

#define STATUS_MESSAGE_SIZE 512

/* Around what may fail without the call failing: a success leaves the last error alone. */
void status_save(char message[STATUS_MESSAGE_SIZE]);
void status_restore(const char message[STATUS_MESSAGE_SIZE]);

void log_set_callback(tl_log_callback callback, void *user);
void log_message(int32_t level, const char *format, ...) __attribute__((format(printf, 2, 3)));

#define TL_TRY(call)                                                                               \
    do {                                                                                           \
        tl_status tl_try_status_ = (call);                                                         \
        if (tl_try_status_ != TL_STATUS_OK)                                                        \
            return tl_try_status_;                                                                 \
    } while (0)

#endif
