/* tinyloop: a runtime for looped (depth-recurrent) decoder language models.
 *
 * Conventions
 *   Ownership   A function whose first parameter is `tl_x **out` makes a reference that the caller
 *               gives back with tl_x_release, on any thread. A child keeps what it needs of its
 *               parents, so any order of release is right. Releasing NULL does nothing. Arrays and
 *               strings are the caller's, read during the call and not kept.
 *   Parameters  Outputs first, then the object, then inputs, then options. On failure handles and
 *               counts among the outputs are set to NULL or 0.
 *   Errors      Functions return a tl_status. Anything but TL_STATUS_OK leaves a sentence in
 *               tl_last_error() of the calling thread, and leaves all objects as they were. INVALID
 *               can come of every function, NOMEM of each that makes something, UNSUPPORTED of each
 *               that takes options (one that this version lacks), CLOSED, NOMEM and INTERRUPTED of
 *               each that computes with a model; what else can come stands at the function.
 *   Options     Structs begin with their own size. Start from the TL_..._INIT macro; NULL means the
 *               same values. Fields that a later version appends mean "default" when zero, so a
 *               program built against an older header stays right; a newer program's unknown
 *               non-zero fields are refused.
 *   Threads     Models, prefix caches and pools may be used from any number of threads at once. A
 *               KV cache and a stream are used by one call at a time; another gets BUSY. Each call
 *               needs references that live until it returns: give a thread its own of a model
 *               (tl_model_retain), and release the others when no thread calls with them any more.
 *   Callbacks   run on the thread of the call, with no lock held. They may call the library and
 *               release anything, also what the call under way uses. They must return: no exception
 *               and no longjmp may leave them.
 *   Tokens      int32_t ids in [0, vocab_size).
 *   The law     The logits at a position depend on the model with its initial noise, the KV mode,
 *               the loops, the window, prefix_len and the token ids up to it (in a prefix-LM up to
 *               prefix_len, where that is more), and on nothing else, bit for bit: not on caches,
 *               chunks, batches or threads.
 *
 * Clean as C99 and C++98. The library never exits, aborts or prints.
 */
#ifndef TINYLOOP_H
#define TINYLOOP_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define TL_API __attribute__((visibility("default")))
#else
#define TL_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define TL_VERSION_MAJOR 0
#define TL_VERSION_MINOR 1
#define TL_VERSION_PATCH 0

/* The version of the library that runs: major * 10000 + minor * 100 + patch. */
TL_API uint32_t tl_version(void);

/* The same as text, "0.1.0"; static. */
TL_API const char *tl_version_string(void);

/* ---- Status ------------------------------------------------------------------------------- */

/* What a call came to; tl_last_error() says it in words. */
typedef int32_t tl_status;

/* The values of a tl_status. Later versions may add some. */
enum {
    TL_STATUS_OK = 0,
    TL_STATUS_INVALID = 1,     /* an argument is outside what is allowed */
    TL_STATUS_NOMEM = 2,       /* out of memory */
    TL_STATUS_CLOSED = 3,      /* the model was closed */
    TL_STATUS_IO = 4,          /* a file cannot be opened or read */
    TL_STATUS_FORMAT = 5,      /* a file is not a sound .tinyloop file */
    TL_STATUS_UNSUPPORTED = 6, /* sound, but not built in this version or on this machine */
    TL_STATUS_NUMERIC = 7,     /* logits that are not finite */
    TL_STATUS_INTERRUPTED = 8, /* see tl_set_interrupt_callback */
    TL_STATUS_BUSY = 9,        /* another call uses this KV cache or stream */
    TL_STATUS_INTERNAL = 100   /* a fault of the library itself */
};

/* What the last failing call on this thread said: "function: parameter, value, what is allowed".
 * UTF-8, but for a path, which comes as it was given; never NULL; empty before the first failure; valid until the next failing call on the same
 * thread. */
TL_API const char *tl_last_error(void);

/* ---- Log ---------------------------------------------------------------------------------- */

/* Levels: something to know; something that is probably not meant. */
enum { TL_LOG_INFO = 1, TL_LOG_WARNING = 2 };

/* Called on the thread whose call has something to say. `message` is valid until it returns. */
typedef void (*tl_log_callback)(void *user, int32_t level, const char *message);

/* For the whole process, from any thread; NULL (the default) drops messages. `user` is handed on.
 * A message that another thread has under way may still come to the callback before. */
TL_API void tl_set_log_callback(tl_log_callback callback, void *user);

/* ---- Interruption ------------------------------------------------------------------------- */

/* Returns non-zero to end the call that asks. */
typedef int32_t (*tl_interrupt_callback)(void *user);

/* For the calling thread alone, until it sets another; with NULL, the default, nothing interrupts
 * its calls. Asked on that thread, with no lock held, before each forward pass of a call that runs
 * tokens: for every prefill_chunk tokens of a prompt (those that see each other go in one pass),
 * then for every token that follows. A call that it ends fails with TL_STATUS_INTERRUPTED. While it
 * runs none is set, and what it sets holds until it returns. */
TL_API void tl_set_interrupt_callback(tl_interrupt_callback callback, void *user);

/* ---- Model -------------------------------------------------------------------------------- */

/* A loaded model: weights, configuration, and the memory of its KV blocks. Counted. */
typedef struct tl_model tl_model;

/* Where a model computes. AUTO: CUDA if this machine has it, else the CPU. */
enum { TL_DEVICE_AUTO = 0, TL_DEVICE_CPU = 1, TL_DEVICE_CUDA = 2 };

/* What keys and values are kept as; part of the model, since results depend on it. */
enum { TL_KV_MODE_DEFAULT = 0, TL_KV_MODE_FP16 = 1, TL_KV_MODE_FP32 = 2 };

/* How a model is loaded. */
typedef struct tl_model_options {
    size_t size;            /* sizeof(tl_model_options) */
    int64_t max_seq_len;    /* positions a sequence may have; 1 .. 2^24 */
    int32_t device;         /* TL_DEVICE_* */
    int32_t kv_mode;        /* TL_KV_MODE_*; DEFAULT: TINYLOOP_KV_* of the environment, else FP16 */
    int32_t threads;        /* 1 .. 256; 0: one for each CPU of the process, at most 64 */
    int32_t verify;         /* non-zero: also the tensors' checksums and the gaps between */
    int32_t has_init_scale; /* zero: the file's own scale */
    int32_t prefill_chunk;  /* tokens a forward pass takes at most, but for those that see each
                               other; 1 .. 4096; 0: 256 */
    double init_scale;      /* of a random initial state, 0 is none; others ignore it */
    uint64_t init_seed;     /* of a random initial state; others ignore it */
} tl_model_options;

#define TL_MODEL_OPTIONS_INIT                                                                      \
    {                                                                                              \
        sizeof(tl_model_options), 2048, TL_DEVICE_AUTO, TL_KV_MODE_DEFAULT, 0, 0, 0, 0, 0.0, 0     \
    }

/* Loads the .tinyloop file at `path` (as the file system takes it, usually UTF-8), which may be
 * removed afterwards. Header, directory and blobs are always checked; see `verify`.
 * Errors: IO, FORMAT, UNSUPPORTED (names the field of the file). */
TL_API tl_status tl_model_load(tl_model **out, const char *path, const tl_model_options *options);

/* From now on calls that would compute with this model fail with TL_STATUS_CLOSED; those under way
 * end normally, and what only looks, clones or truncates goes on. Memory returns when the last
 * handle that uses the model is released. Closing twice is fine. */
TL_API void tl_model_close(tl_model *model);

/* One more reference, to be given back too; the result is `model`. NULL for NULL. */
TL_API tl_model *tl_model_retain(tl_model *model);

/* Gives one reference back. The last one that goes, of callers and of the model's children, frees
 * the model. */
TL_API void tl_model_release(tl_model *model);

/* What a model is, and what its sequences cost. Counts, unless it says bytes. */
typedef struct tl_model_info {
    size_t size; /* set by the caller to sizeof(tl_model_info) */
    int64_t vocab_size;
    int64_t hidden_size;
    int64_t n_layers; /* physical layers */
    int64_t n_heads;
    int64_t n_kv_heads;
    int64_t head_dim;
    int64_t max_seq_len;         /* as the model was loaded */
    int64_t max_positions;       /* positions the file was trained for; 0: unknown */
    int64_t loops_default;       /* what loops = 0 means */
    int64_t loops_min;           /* allowed range of loops */
    int64_t loops_max;           /* */
    int64_t loops_max_trained;   /* 0: unknown */
    int64_t inner_loops_default; /* of a nested schedule; 0: this model has none */
    int64_t n_states_default;    /* states of tl_model_states at the default loops */
    int64_t n_parameters;
    int64_t weight_bytes;   /* resident, as packed by the backend */
    int64_t kv_block_size;  /* positions a KV block holds */
    int64_t kv_bytes_fixed; /* KV bytes a position needs outside the loops */
    int64_t kv_bytes_loop;  /* and in each loop (nested: each outer one, at the default inner) */
    int32_t device;         /* TL_DEVICE_CPU or TL_DEVICE_CUDA */
    int32_t kv_mode;        /* TL_KV_MODE_FP16 or TL_KV_MODE_FP32 */
    int32_t threads;
    int32_t two_sided_prefix; /* non-zero: a prefix-LM, see tl_cache_options.prefix_len */
} tl_model_info;

/* Also of a closed model. */
TL_API tl_status tl_model_get_info(tl_model_info *info, const tl_model *model);

/* An opaque blob of the file: "tokenizer.json", "chat_template", "card", "end_ids" (int32
 * little-endian). *data is borrowed and lives as long as the model; its *size bytes have no final
 * zero. NULL and 0 if there is none, which is no error. */
TL_API tl_status tl_model_blob(const void **data, size_t *size, const tl_model *model,
                               const char *name);

/* Totals since the model was loaded; they only grow. Tokens count when they have gone through the
 * layers, whatever for: a generation's last token never does. */
typedef struct tl_counters {
    size_t size; /* set by the caller to sizeof(tl_counters) */
    uint64_t tokens_prefilled;
    uint64_t tokens_decoded;
    uint64_t pool_full;     /* pool requests by outcome, once they have started */
    uint64_t pool_partial;  /* */
    uint64_t pool_miss;     /* */
    uint64_t pool_fallback; /* a match that failed (no memory) and was generated plainly */
} tl_counters;

/* Also of a closed model. Each count is exact; counts that threads move meanwhile need not belong
 * to the same moment. */
TL_API tl_status tl_model_get_counters(tl_counters *counters, const tl_model *model);

/* ---- Evaluation ---------------------------------------------------------------------------- */

/* What a cache is made for; part of every key.
 *
 * A nested schedule has two counts: `loops` times, `inner_loops` runs of the low stage and then one
 * of the high stage; give both or neither. Other models take inner_loops 0.
 *
 * In a prefix-LM the first prefix_len tokens see each other: position p < prefix_len attends to all
 * positions up to prefix_len - 1. They must come in one call. By default they are all tokens of the
 * call that makes a cache or generates, and none of those of tl_model_logits, tl_model_states and
 * tl_kv_cache_create. Other models take 0. */
typedef struct tl_cache_options {
    size_t size;            /* sizeof(tl_cache_options) */
    int64_t loops;          /* times the core runs; 0: the file's default */
    int64_t cache_window;   /* position p attends to p - window + 1 .. p; 0: to all */
    int64_t inner_loops;    /* of a nested schedule, see above; 0 elsewhere */
    int64_t prefix_len;     /* used if has_prefix_len */
    int32_t has_prefix_len; /* zero: the default */
    int32_t reserved;       /* zero */
} tl_cache_options;

#define TL_CACHE_OPTIONS_INIT                                                                      \
    {                                                                                              \
        sizeof(tl_cache_options), 0, 0, 0, 0, 0, 0                                                 \
    }

/* logits: float32 [n_tokens, vocab_size], of every position, also where they are not finite.
 * n_tokens is 1 .. max_seq_len here and below. init_state: NULL, or float32
 * [n_tokens, hidden_size] that the core starts from as it is, in place of the model's own initial
 * state; INVALID for a model whose core has no other start than its input, or whose schedule is
 * nested. */
TL_API tl_status tl_model_logits(float *logits, tl_model *model, const int32_t *tokens,
                                 size_t n_tokens, const float *init_state,
                                 const tl_cache_options *options);

/* states: float32 [n, n_tokens, hidden_size], the state after each loop and its norm; n is `loops`,
 * or in a nested schedule loops * (inner_loops + 1): that after each run of a stage, in order. */
TL_API tl_status tl_model_states(float *states, tl_model *model, const int32_t *tokens,
                                 size_t n_tokens, const float *init_state,
                                 const tl_cache_options *options);

/* logits: float32 [loops, n_tokens], what the exit gate says after each loop, before the sigmoid.
 * INVALID for a model that has none. */
TL_API tl_status tl_model_exit_logits(float *logits, tl_model *model, const int32_t *tokens,
                                      size_t n_tokens, const tl_cache_options *options);

/* ---- KV cache: one sequence ---------------------------------------------------------------- */

/* The keys and values of one sequence, in every loop and layer. One call at a time. */
typedef struct tl_kv_cache tl_kv_cache;

/* An empty one; its memory comes as tokens do. NULL options: the file's depth, no window. */
TL_API tl_status tl_kv_cache_create(tl_kv_cache **out, tl_model *model,
                                    const tl_cache_options *options);

/* Shares all blocks; a block is copied only when one of the two writes into it. Also of a closed
 * model. Errors: BUSY. */
TL_API tl_status tl_kv_cache_clone(tl_kv_cache **out, const tl_kv_cache *kv);

/* Forgets positions length and later. INVALID above the present length, where a window has already
 * dropped positions that the next token would attend to, or inside of what has seen each other.
 * Also of a closed model. Errors: BUSY. */
TL_API tl_status tl_kv_cache_truncate(tl_kv_cache *kv, int64_t length);

/* Positions that it holds, those that a window has dropped included. 0 for NULL. While another call
 * extends it, what was before. */
TL_API int64_t tl_kv_cache_length(const tl_kv_cache *kv);

/* Bytes of the blocks that it refers to, shared ones included; 0 when empty, and for NULL. While
 * another call extends it, what was before. */
TL_API int64_t tl_kv_cache_bytes(const tl_kv_cache *kv);

/* Blocks that nothing else refers to are free at once. */
TL_API void tl_kv_cache_release(tl_kv_cache *kv);

/* Runs the tokens at positions length .. length + n - 1, extends the cache by them, and gives the
 * last one's final hidden state: float32 [hidden_size], before the final norm. length + n may be
 * max_seq_len at most. On failure the cache is as it was. Errors: BUSY. */
TL_API tl_status tl_decode_with_kv_cache_capture(float *hidden, tl_kv_cache *kv,
                                                 const int32_t *tokens, size_t n_tokens);

/* ---- Generation ---------------------------------------------------------------------------- */

/* Called after each token; returns non-zero to stop there, which is no error: the token is kept. */
typedef int32_t (*tl_token_callback)(void *user, int32_t token);

/* Sampling takes these steps: the repetition penalty on each id that the text so far has (logits
 * above 0 are divided by it, others multiplied), then temperature, top_k, top_p and min_p; then one
 * number is drawn that depends on the seed and the token's position alone. */
typedef struct tl_generate_options {
    size_t size;                /* sizeof(tl_generate_options) */
    int64_t max_tokens;         /* >= 0; n_prompt + max_tokens <= max_seq_len */
    int64_t loops;              /* 0: the file's default */
    int64_t inner_loops;        /* of a nested schedule: tl_cache_options */
    int64_t cache_window;       /* >= 0; 0: no window */
    int64_t prefix_len;         /* used if has_prefix_len; else the whole prompt, in a prefix-LM */
    int64_t top_k;              /* >= 0; 0: off */
    double temperature;         /* >= 0, finite; 0: greedy, ties go to the lowest id */
    double top_p;               /* in (0, 1] */
    double min_p;               /* in [0, 1] */
    double repetition_penalty;  /* > 0, finite */
    uint64_t seed;              /* used if has_seed */
    int32_t has_seed;           /* zero: a fresh seed */
    int32_t has_stop_tokens;    /* zero: the file's end ids; else stop_tokens, which may be none */
    int32_t has_prefix_len;     /* zero: the default */
    int32_t reserved;           /* zero */
    const int32_t *stop_tokens; /* one that comes is kept and ends the generation */
    size_t n_stop_tokens;       /* ids that stop_tokens has */
    tl_token_callback on_token; /* may be NULL */
    void *user;                 /* handed to on_token */
} tl_generate_options;

#define TL_GENERATE_OPTIONS_INIT                                                                   \
    {                                                                                              \
        sizeof(tl_generate_options), 128, 0, 0, 0, 0, 50, 1.0, 1.0, 0.0, 1.0, 0, 0, 0, 0, 0, NULL, \
            0, NULL, NULL                                                                          \
    }

/* tokens receives the generated ids (without the prompt), at most max_tokens, and *n_tokens how many
 * they are; `capacity` is the size of `tokens` in ids and must be at least max_tokens. Tokens that
 * a failing call had made are lost to the caller, but for those that on_token was told of.
 * Errors: NUMERIC if logits are not finite. */
TL_API tl_status tl_generate(int32_t *tokens, size_t capacity, size_t *n_tokens, tl_model *model,
                             const int32_t *prompt, size_t n_prompt,
                             const tl_generate_options *options);

/* ---- Prefix cache: one prefix, reusable ----------------------------------------------------- */

/* What a run of a prefix leaves: its KV and the last token's final hidden state. Immutable. */
typedef struct tl_prefix_cache tl_prefix_cache;

/* Runs the tokens, 1 .. max_seq_len, and keeps what they leave. */
TL_API tl_status tl_build_prefix_cache(tl_prefix_cache **out, tl_model *model,
                                       const int32_t *tokens, size_t n_tokens,
                                       const tl_cache_options *options);

/* What a prefix cache was built for, and what it holds. */
typedef struct tl_prefix_cache_info {
    size_t size;          /* set by the caller to sizeof(tl_prefix_cache_info) */
    int64_t length;       /* tokens */
    int64_t loops;        /* as it was built, like the next three */
    int64_t cache_window; /* */
    int64_t inner_loops;  /* */
    int64_t prefix_len;   /* */
    int64_t bytes;        /* blocks, final hidden state and token ids */
} tl_prefix_cache_info;

/* Also of a closed model. */
TL_API tl_status tl_prefix_cache_get_info(tl_prefix_cache_info *info, const tl_prefix_cache *cache);

/* Generations that have begun with it go on. */
TL_API void tl_prefix_cache_release(tl_prefix_cache *cache);

/* Generates after cache + suffix (which may be empty: then no layer runs before the first token).
 * options->loops, inner_loops and cache_window may be 0 or must equal the cache's; so must
 * prefix_len, which by default is the whole prompt here too. INVALID for a cache of another model.
 * Otherwise as tl_generate. */
TL_API tl_status tl_generate_from_prefix_cache(int32_t *tokens, size_t capacity, size_t *n_tokens,
                                               tl_model *model, tl_prefix_cache *cache,
                                               const int32_t *suffix, size_t n_suffix,
                                               const tl_generate_options *options);

/* ---- Prefix pool: many prefixes, the longest match wins -------------------------------------- */

/* Prefix caches by (model, tokens, options), of any number of models. */
typedef struct tl_prefix_pool tl_prefix_pool;

/* How a pool is made. */
typedef struct tl_prefix_pool_options {
    size_t size;      /* sizeof(tl_prefix_pool_options) */
    int64_t capacity; /* entries at most; >= 0; 0 becomes 1 */
} tl_prefix_pool_options;

#define TL_PREFIX_POOL_OPTIONS_INIT                                                                \
    {                                                                                              \
        sizeof(tl_prefix_pool_options), 16                                                         \
    }

/* An empty one. Errors: NOMEM. */
TL_API tl_status tl_prefix_pool_create(tl_prefix_pool **out, const tl_prefix_pool_options *options);

/* Its entries go, and the models that only they kept; generations under way go on. */
TL_API void tl_prefix_pool_release(tl_prefix_pool *pool);

/* Entries that it has; 0 for NULL. */
TL_API int64_t tl_prefix_pool_size(const tl_prefix_pool *pool);

/* Sum of their lengths in tokens; 0 for NULL. */
TL_API int64_t tl_prefix_pool_total_cached_tokens(const tl_prefix_pool *pool);

/* Builds the prefix's cache and enters it under (model, tokens, options); *length receives
 * n_tokens. The same key again changes nothing. Above the capacity the shortest entry that was
 * there before goes (of equally short ones the first registered). A failure leaves no entry, and
 * takes none away. */
TL_API tl_status tl_prefix_pool_register(int64_t *length, tl_prefix_pool *pool, tl_model *model,
                                         const int32_t *tokens, size_t n_tokens,
                                         const tl_cache_options *options);

/* As tl_generate, token for token; an entry that the prompt starts with (same model, loops, window
 * and prefix_len; the longest wins) saves its part of the prefill. */
TL_API tl_status tl_prefix_pool_generate(int32_t *tokens, size_t capacity, size_t *n_tokens,
                                         tl_prefix_pool *pool, tl_model *model,
                                         const int32_t *prompt, size_t n_prompt,
                                         const tl_generate_options *options);

/* ---- Stream: the same tokens, one call each ------------------------------------------------- */

/* A generation that waits between its tokens. One call at a time. */
typedef struct tl_stream tl_stream;

/* Checks the arguments; nothing runs before the first tl_stream_next. `pool` may be NULL.
 * Everything that the options point to is copied; on_token is not called. With a pool the match is
 * looked for in the first tl_stream_next. */
TL_API tl_status tl_stream_create(tl_stream **out, tl_model *model, tl_prefix_pool *pool,
                                  const int32_t *prompt, size_t n_prompt,
                                  const tl_generate_options *options);
/* The same tokens as tl_generate_from_prefix_cache. */
TL_API tl_status tl_stream_create_from_prefix_cache(tl_stream **out, tl_model *model,
                                                    tl_prefix_cache *cache, const int32_t *suffix,
                                                    size_t n_suffix,
                                                    const tl_generate_options *options);

/* *token: the next id, or -1 at the end. A failure (CLOSED if the model was closed meanwhile)
 * leaves the stream at its end; only after INTERRUPTED the next call tries again. Errors: NUMERIC as
 * in tl_generate; BUSY, which leaves the stream to the call that uses it. */
TL_API tl_status tl_stream_next(int32_t *token, tl_stream *stream);

/* At any time; frees what the generation held. */
TL_API void tl_stream_release(tl_stream *stream);

#ifdef __cplusplus
}
#endif

#endif
