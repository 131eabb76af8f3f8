#include "base/status.h"

#include "base/lock.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char last_error[STATUS_MESSAGE_SIZE];
static _Thread_local size_t sentence_begin;        /* in last_error */
static _Thread_local const char *current_function; /* NULL outside calls */

const char *status_enter(const char *function)
{
    const char *before = current_function;
    current_function = function;
    return before;
}

void status_leave(const char **before)
{
    current_function = *before;
}

tl_status tl_fail(tl_status code, const char *format, ...)
{
    size_t used = 0;
    if (current_function != NULL)
        used = (size_t)snprintf(last_error, sizeof last_error, "%s: ", current_function);
    sentence_begin = used;
    va_list args;
    va_start(args, format);
    vsnprintf(last_error + used, sizeof last_error - used, format, args);
    va_end(args);
    return code;
}

tl_status tl_fail_nomem(const char *what, size_t bytes)
{
    return tl_fail(TL_STATUS_NOMEM, "out of memory: cannot allocate %zu bytes for %s", bytes, what);
}

const char *status_last_error(void)
{
    return last_error;
}

const char *status_sentence(void)
{
    return last_error + sentence_begin;
}

void status_save(char message[STATUS_MESSAGE_SIZE])
{
    memcpy(message, last_error, STATUS_MESSAGE_SIZE);
}

void status_restore(const char message[STATUS_MESSAGE_SIZE])
{
    memcpy(last_error, message, STATUS_MESSAGE_SIZE);
}

static lock log_lock;
static pthread_once_t log_once = PTHREAD_ONCE_INIT;
static tl_log_callback log_callback;
static void *log_user;

static void init_log(void)
{
    lock_init(&log_lock);
}

static void take_log(void)
{
    pthread_once(&log_once, init_log);
    lock_take(&log_lock);
}

void log_set_callback(tl_log_callback callback, void *user)
{
    take_log();
    log_callback = callback;
    log_user = user;
    lock_give(&log_lock);
}

void log_message(int32_t level, const char *format, ...)
{
    take_log();
    tl_log_callback callback = log_callback;
    void *user = log_user;
    lock_give(&log_lock);
    if (callback == NULL)
        return;
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    callback(user, level, text);
}
