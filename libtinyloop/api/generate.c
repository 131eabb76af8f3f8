/* Generation: whole, and as streams. */
#include "api/call.h"
#include "api/structs.h"
#include "generate/generation.h"

static tl_status read_generate_options(tl_generate_options *own, const tl_generate_options *given)
{
    *own = (tl_generate_options)TL_GENERATE_OPTIONS_INIT;
    TL_TRY(READ_STRUCT(own, given, tl_generate_options, user));
    return struct_check_reserved(own->reserved, "tl_generate_options");
}

static tl_status generate(int32_t *tokens, size_t capacity, size_t *n_tokens, tl_model *model,
                          const generation_source *source, const tl_generate_options *options)
{
    tl_generate_options own;
    TL_TRY(read_generate_options(&own, options));
    TL_TRY(engine_check_open(model));
    return generation_run(tokens, capacity, n_tokens, model, source, &own);
}

tl_status tl_generate(int32_t *tokens, size_t capacity, size_t *n_tokens, tl_model *model,
                      const int32_t *prompt, size_t n_prompt, const tl_generate_options *options)
{
    BEGIN_CALL();
    NOT_NULL(n_tokens);
    *n_tokens = 0;
    CHECK_HANDLE(tl_model, model);
    NOT_NULL(prompt);
    generation_source source = {.tokens = prompt, .n_tokens = n_prompt};
    return generate(tokens, capacity, n_tokens, model, &source, options);
}

tl_status tl_generate_from_prefix_cache(int32_t *tokens, size_t capacity, size_t *n_tokens,
                                        tl_model *model, tl_prefix_cache *cache,
                                        const int32_t *suffix, size_t n_suffix,
                                        const tl_generate_options *options)
{
    BEGIN_CALL();
    NOT_NULL(n_tokens);
    *n_tokens = 0;
    CHECK_HANDLE(tl_model, model);
    CHECK_HANDLE(tl_prefix_cache, cache);
    if (n_suffix > 0)
        NOT_NULL(suffix);
    generation_source source = {.cache = cache, .tokens = suffix, .n_tokens = n_suffix};
    return generate(tokens, capacity, n_tokens, model, &source, options);
}

tl_status tl_prefix_pool_generate(int32_t *tokens, size_t capacity, size_t *n_tokens,
                                  tl_prefix_pool *pool, tl_model *model, const int32_t *prompt,
                                  size_t n_prompt, const tl_generate_options *options)
{
    BEGIN_CALL();
    NOT_NULL(n_tokens);
    *n_tokens = 0;
    CHECK_HANDLE(tl_prefix_pool, pool);
    CHECK_HANDLE(tl_model, model);
    NOT_NULL(prompt);
    generation_source source = {.pool = pool, .tokens = prompt, .n_tokens = n_prompt};
    return generate(tokens, capacity, n_tokens, model, &source, options);
}

/* ---- streams ---- */

static tl_status create_stream(tl_stream **out, tl_model *model, const generation_source *source,
                               const tl_generate_options *options)
{
    tl_generate_options own;
    TL_TRY(read_generate_options(&own, options));
    TL_TRY(engine_check_open(model));
    TL_TRY(generation_create(out, model, source, &own));
    GIVE(tl_stream, *out);
    return TL_STATUS_OK;
}

tl_status tl_stream_create(tl_stream **out, tl_model *model, tl_prefix_pool *pool,
                           const int32_t *prompt, size_t n_prompt,
                           const tl_generate_options *options)
{
    BEGIN_CALL();
    NOT_NULL(out);
    *out = NULL;
    CHECK_HANDLE(tl_model, model);
    if (pool != NULL)
        CHECK_HANDLE(tl_prefix_pool, pool);
    NOT_NULL(prompt);
    generation_source source = {.pool = pool, .tokens = prompt, .n_tokens = n_prompt};
    return create_stream(out, model, &source, options);
}

tl_status tl_stream_create_from_prefix_cache(tl_stream **out, tl_model *model,
                                             tl_prefix_cache *cache, const int32_t *suffix,
                                             size_t n_suffix, const tl_generate_options *options)
{
    BEGIN_CALL();
    NOT_NULL(out);
    *out = NULL;
    CHECK_HANDLE(tl_model, model);
    CHECK_HANDLE(tl_prefix_cache, cache);
    if (n_suffix > 0)
        NOT_NULL(suffix);
    generation_source source = {.cache = cache, .tokens = suffix, .n_tokens = n_suffix};
    return create_stream(out, model, &source, options);
}

tl_status tl_stream_next(int32_t *token, tl_stream *stream)
{
    BEGIN_CALL();
    NOT_NULL(token);
    *token = -1;
    CHECK_HANDLE(tl_stream, stream);
    return generation_stream_next(token, stream);
}

void tl_stream_release(tl_stream *stream)
{
    BEGIN_CALL();
    if (stream != NULL && handle_take(stream, "tl_stream"))
        generation_stream_release(stream);
}
