#include "api/keys.h"

#include "api/structs.h"

tl_status key_resolve(cache_key *key, tl_model *model, const tl_cache_options *options,
                      size_t n_tokens, bool causal)
{
    tl_cache_options own = TL_CACHE_OPTIONS_INIT;
    TL_TRY(READ_STRUCT(&own, options, tl_cache_options, reserved));
    TL_TRY(struct_check_reserved(own.reserved, "tl_cache_options"));
    bool stated = own.has_prefix_len != 0;
    key_request request = {
        .loops = own.loops,
        .inner_loops = own.inner_loops,
        .window = own.cache_window,
        .has_prefix_len = stated || causal,
        .prefix_len = stated ? own.prefix_len : 0,
    };
    return engine_resolve(key, model, &request, n_tokens);
}
