/* Sequences of planes of given classes that share one window. */
#ifndef TINYLOOP_PLANES_H
#define TINYLOOP_PLANES_H

#include "kv/sequence.h"

static inline tl_status init_planes(kv_sequence *sequence, kv_store *store, const int *classes,
                                    int n_planes, int64_t window)
{
    tl_status status = kv_sequence_init(sequence, store, n_planes);
    for (int p = 0; status == TL_STATUS_OK && p < n_planes; p++)
        sequence->planes[p] = (kv_plane){.class = classes[p], .window = window};
    return status;
}

#endif
