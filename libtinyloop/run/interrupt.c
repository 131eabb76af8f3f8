#include "run/interrupt.h"

#include <stddef.h>

static _Thread_local struct interrupt {
    tl_interrupt_callback callback;
    void *user;
} current;

void interrupt_set(tl_interrupt_callback callback, void *user)
{
    current = (struct interrupt){callback, user};
}

tl_status interrupt_ask(void)
{
    struct interrupt asked = current;
    if (asked.callback == NULL)
        return TL_STATUS_OK;
    /* A call that the callback makes asks only what it sets itself: no endless recursion. */
    interrupt_set(NULL, NULL);
    int32_t stop = asked.callback(asked.user);
    current = asked;
    return stop == 0 ? TL_STATUS_OK : tl_fail(TL_STATUS_INTERRUPTED, "interrupted");
}
