#include "base/handle.h"

#ifdef TL_DEBUG

#include "base/lock.h"

#include <stddef.h>
#include <string.h>

static lock list_lock;
static pthread_once_t list_once = PTHREAD_ONCE_INIT;
static handle *held_handles;

static void init_list(void)
{
    lock_init(&list_lock);
}

static void take_list(void)
{
    pthread_once(&list_once, init_list);
    lock_take(&list_lock);
}

/* By address: what is not listed may be freed memory. */
static handle *find(const void *object, const char *type)
{
    handle *h = held_handles;
    while (h != NULL && h != object)
        h = h->next;
    return h != NULL && strcmp(h->type, type) == 0 ? h : NULL;
}

static void link_in(handle *h)
{
    h->previous = NULL;
    h->next = held_handles;
    if (h->next != NULL)
        h->next->previous = h;
    held_handles = h;
}

static void unlink_from(handle *h)
{
    if (h->next != NULL)
        h->next->previous = h->previous;
    if (h->previous != NULL)
        h->previous->next = h->next;
    else
        held_handles = h->next;
}

static tl_status fail_dead(const void *object, const char *type, const char *parameter)
{
    return tl_fail(TL_STATUS_INVALID,
                   "%s is %p, no %s that the caller holds: it was released, or never was one",
                   parameter, object, type);
}

void handle_give(handle *h, const char *type)
{
    take_list();
    h->type = type;
    if (h->held++ == 0)
        link_in(h);
    lock_give(&list_lock);
}

tl_status handle_check(const void *object, const char *type, const char *parameter)
{
    take_list();
    bool held = find(object, type) != NULL;
    lock_give(&list_lock);
    return held ? TL_STATUS_OK : fail_dead(object, type, parameter);
}

bool handle_take(const void *object, const char *type)
{
    take_list();
    handle *h = find(object, type);
    if (h != NULL && --h->held == 0)
        unlink_from(h);
    lock_give(&list_lock);
    if (h == NULL)
        fail_dead(object, type, "what is released");
    return h != NULL;
}

#endif
