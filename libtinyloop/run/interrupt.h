/* How a long call is ended from outside: a callback of each thread, asked before every forward pass
 * of that thread's calls. */
#ifndef TL_RUN_INTERRUPT_H
#define TL_RUN_INTERRUPT_H

#include "base/status.h"

/* For the calling thread; NULL: never interrupted. */
void interrupt_set(tl_interrupt_callback callback, void *user);

/* INTERRUPTED if the calling thread's callback says so. No lock may be held. */
tl_status interrupt_ask(void);

#endif
