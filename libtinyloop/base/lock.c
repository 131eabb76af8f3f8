#include "base/lock.h"

#include <stddef.h>

static pthread_mutex_t registry = PTHREAD_MUTEX_INITIALIZER;
static lock *all_locks;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

static void before_fork(void)
{
    pthread_mutex_lock(&registry);
    for (lock *l = all_locks; l != NULL; l = l->next)
        pthread_mutex_lock(&l->mutex);
}

static void after_fork(void)
{
    for (lock *l = all_locks; l != NULL; l = l->next)
        pthread_mutex_unlock(&l->mutex);
    pthread_mutex_unlock(&registry);
}

static void install_fork_handlers(void)
{
    pthread_atfork(before_fork, after_fork, after_fork);
}

void lock_init(lock *l)
{
    pthread_once(&fork_once, install_fork_handlers);
    pthread_mutex_init(&l->mutex, NULL);
    pthread_mutex_lock(&registry);
    l->previous = NULL;
    l->next = all_locks;
    if (l->next != NULL)
        l->next->previous = l;
    all_locks = l;
    pthread_mutex_unlock(&registry);
}

void lock_destroy(lock *l)
{
    pthread_mutex_lock(&registry);
    if (l->next != NULL)
        l->next->previous = l->previous;
    if (l->previous != NULL)
        l->previous->next = l->next;
    else
        all_locks = l->next;
    pthread_mutex_unlock(&registry);
    pthread_mutex_destroy(&l->mutex);
}

void lock_take(lock *l)
{
    pthread_mutex_lock(&l->mutex);
}

void lock_give(lock *l)
{
    pthread_mutex_unlock(&l->mutex);
}
