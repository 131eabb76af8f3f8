/* tinyloop from C: load a model, keep two prefixes in a pool, generate after them.
 *
 *     cc -std=c99 quickstart.c $(tinyloop --cflags --libs) -o quickstart
 *     ./quickstart MODEL.tinyloop [TOKEN_ID ...]
 *
 * The library works with token ids; turning text into ids is the tokenizer's business, which is
 * yours to bring (the file carries one as the blob "tokenizer.json"). Here the question is the ids
 * of the command line, or some that are built in. */
#include <tinyloop.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PREFIX_LENGTH = 64, MAX_QUESTION = 64, MAX_NEW_TOKENS = 16 };

/* Every function that can fail returns a tl_status, and leaves a sentence for this thread. */
static void check(tl_status status, const char *what)
{
    if (status == TL_STATUS_OK)
        return;
    fprintf(stderr, "%s failed (status %d): %s\n", what, (int)status, tl_last_error());
    exit(1);
}

/* Called with each token as soon as it is there; `user` is what the options say. Another result
 * than 0 would stop the generation. */
static int32_t print_token(void *user, int32_t token)
{
    FILE *out = user;
    fprintf(out, " %ld", (long)token);
    fflush(out);
    return 0;
}

/* Stands for a long instruction that many requests begin with. */
static void make_prefix(int32_t *tokens, int32_t first, int64_t vocab_size)
{
    for (int32_t i = 0; i < PREFIX_LENGTH; i++)
        tokens[i] = (int32_t)((first + 7 * i) % vocab_size);
}

static size_t read_question(int32_t *tokens, int argc, char **argv, int64_t vocab_size)
{
    static const int32_t built_in[] = {11, 12, 13, 14, 15};
    size_t n = 0;
    for (int i = 2; i < argc && n < MAX_QUESTION; i++) {
        char *end;
        long id = strtol(argv[i], &end, 10);
        if (end == argv[i] || *end != '\0' || id < 0 || id >= vocab_size) {
            fprintf(stderr, "%s is no token id; those of this model are 0 to %ld\n", argv[i],
                    (long)vocab_size - 1);
            exit(2);
        }
        tokens[n++] = (int32_t)id;
    }
    for (size_t i = 0; argc <= 2 && i < sizeof built_in / sizeof *built_in; i++)
        tokens[n++] = (int32_t)(built_in[i] % vocab_size);
    return n;
}

/* Prefix and question as one prompt, through the pool. */
static void ask(tl_model *model, tl_prefix_pool *pool, const int32_t *prefix,
                const int32_t *question, size_t n_question)
{
    int32_t prompt[PREFIX_LENGTH + MAX_QUESTION], tokens[MAX_NEW_TOKENS];
    size_t n_tokens;
    memcpy(prompt, prefix, PREFIX_LENGTH * sizeof *prompt);
    memcpy(prompt + PREFIX_LENGTH, question, n_question * sizeof *prompt);

    /* Options start from their INIT macro, which knows the defaults. */
    tl_generate_options options = TL_GENERATE_OPTIONS_INIT;
    options.max_tokens = MAX_NEW_TOKENS;
    options.temperature = 0.8;
    options.has_seed = 1; /* the same seed gives the same tokens, with or without a pool */
    options.seed = 42;
    options.on_token = print_token;
    options.user = stdout;
    printf("tokens:");
    check(tl_prefix_pool_generate(tokens, MAX_NEW_TOKENS, &n_tokens, pool, model, prompt,
                                  PREFIX_LENGTH + n_question, &options),
          "tl_prefix_pool_generate");
    printf("  (%lu)\n", (unsigned long)n_tokens);
}

static void print_counters(const tl_model *model, const char *when)
{
    tl_counters counters;
    counters.size = sizeof counters; /* tells the library which version's struct this is */
    check(tl_model_get_counters(&counters, model), "tl_model_get_counters");
    printf("%s: %lu tokens prefilled, %lu decoded; pool: %lu full, %lu partial, %lu missed\n", when,
           (unsigned long)counters.tokens_prefilled, (unsigned long)counters.tokens_decoded,
           (unsigned long)counters.pool_full, (unsigned long)counters.pool_partial,
           (unsigned long)counters.pool_miss);
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: %s MODEL.tinyloop [TOKEN_ID ...]\n", argv[0]);
        return 2;
    }
    tl_model *model;
    tl_model_info info;
    check(tl_model_load(&model, argv[1], NULL), "tl_model_load"); /* NULL: default options */
    info.size = sizeof info;
    check(tl_model_get_info(&info, model), "tl_model_get_info");
    printf("tinyloop %s: %ld layers, %ld loops, vocabulary of %ld\n", tl_version_string(),
           (long)info.n_layers, (long)info.loops_default, (long)info.vocab_size);

    /* The pool holds up to 16 prefixes. Registering one runs it through the model, once. */
    tl_prefix_pool *pool;
    int32_t first[PREFIX_LENGTH], second[PREFIX_LENGTH], question[MAX_QUESTION];
    int64_t length;
    check(tl_prefix_pool_create(&pool, NULL), "tl_prefix_pool_create");
    make_prefix(first, 1, info.vocab_size);
    make_prefix(second, 2, info.vocab_size);
    check(tl_prefix_pool_register(&length, pool, model, first, PREFIX_LENGTH, NULL),
          "tl_prefix_pool_register");
    check(tl_prefix_pool_register(&length, pool, model, second, PREFIX_LENGTH, NULL),
          "tl_prefix_pool_register");
    printf("the pool has %ld prefixes of %ld tokens\n", (long)tl_prefix_pool_size(pool),
           (long)tl_prefix_pool_total_cached_tokens(pool));
    print_counters(model, "after registering");

    /* A prompt that begins with a prefix of the pool prefills only what follows it. */
    size_t n_question = read_question(question, argc, argv, info.vocab_size);
    ask(model, pool, first, question, n_question);
    print_counters(model, "after the first prompt");
    ask(model, pool, second, question, n_question);
    print_counters(model, "after the second prompt");

    /* Handles are counted: any order is right. */
    tl_model_release(model);
    tl_prefix_pool_release(pool);
    return 0;
}
