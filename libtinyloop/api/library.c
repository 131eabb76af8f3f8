/* The library itself: its version, the last error, and the callbacks of threads and process. */
#include "base/status.h"
#include "run/interrupt.h"

#define TEXT_OF(x) #x
#define VERSION_TEXT(major, minor, patch) TEXT_OF(major) "." TEXT_OF(minor) "." TEXT_OF(patch)

uint32_t tl_version(void)
{
    return TL_VERSION_MAJOR * 10000u + TL_VERSION_MINOR * 100u + TL_VERSION_PATCH;
}

const char *tl_version_string(void)
{
    return VERSION_TEXT(TL_VERSION_MAJOR, TL_VERSION_MINOR, TL_VERSION_PATCH);
}

const char *tl_last_error(void)
{
    return status_last_error();
}

void tl_set_log_callback(tl_log_callback callback, void *user)
{
    log_set_callback(callback, user);
}

void tl_set_interrupt_callback(tl_interrupt_callback callback, void *user)
{
    interrupt_set(callback, user);
}
