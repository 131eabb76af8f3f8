/* One generation under way: from a prompt, a pool's longest match or a prefix cache, token by
 * token. tl_generate and its kin run it to the end, tl_stream hands it out. */
#ifndef TL_GENERATE_GENERATION_H
#define TL_GENERATE_GENERATION_H

#include "generate/sampler.h"
#include "prefix/pool.h"

typedef struct tl_stream generation;

/* What to generate from; the first two may be NULL. */
typedef struct generation_source {
    tl_prefix_pool *pool;
    tl_prefix_cache *cache;
    const int32_t *tokens; /* the prompt, or what follows the cache */
    size_t n_tokens;
} generation_source;

/* Checks everything, copies what it needs, computes nothing yet. `options` are complete. */
tl_status generation_create(generation **out, tl_model *model, const generation_source *source,
                            const tl_generate_options *options);
void generation_destroy(generation *generation);

/* The next token, or -1 at the end. After INTERRUPTED the next call tries again; after any other
 * failure the generation is at its end. */
tl_status generation_next(int32_t *token, generation *generation);

/* As a call of its own: CLOSED, and the end, if the model was closed meanwhile; BUSY while another
 * call uses it. Released meanwhile, it goes when the call ends. */
tl_status generation_stream_next(int32_t *token, generation *generation);
void generation_stream_release(generation *generation);

/* All of it into tokens [capacity], with options.on_token after each. INVALID if the capacity is
 * below options.max_tokens. */
tl_status generation_run(int32_t *tokens, size_t capacity, size_t *n_tokens, tl_model *model,
                         const generation_source *source, const tl_generate_options *options);

#endif
