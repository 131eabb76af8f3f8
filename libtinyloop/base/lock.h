/* Mutexes that a fork leaves free: around fork() every one of them is held by the forking thread,
 * so the child finds no table half changed and no lock that nobody will give back. They are leaves:
 * whoever holds one takes no other, and calls nothing that could fork. */
#ifndef TL_BASE_LOCK_H
#define TL_BASE_LOCK_H

#include <pthread.h>

typedef struct lock {
    pthread_mutex_t mutex;
    struct lock *next;
    struct lock *previous;
} lock;

void lock_init(lock *lock);
void lock_destroy(lock *lock);
void lock_take(lock *lock);
void lock_give(lock *lock);

#endif
