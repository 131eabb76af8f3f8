/* kv/sequence.c: sequences against a plain model that knows every byte. */
#include "base/memory.h"
#include "base/random.h"
#include "kv/sequence.h"
#include "planes.h"
#include "test.h"
#include "watched_memory.h"

/* Three planes of two classes; a position of a plane is `width` bytes. */
enum { N_PLANES = 3, N_CLASSES = 2, MAX_LENGTH = 400, N_SEQUENCES = 6 };
static const int plane_class[N_PLANES] = {0, 1, 1};
static const size_t width[N_CLASSES] = {8, 24};

typedef struct model_sequence {
    bool used;
    int64_t window[N_PLANES];
    int64_t length;
    int64_t held_from[N_PLANES];           /* first position of the first block held */
    uint64_t stamps[N_PLANES][MAX_LENGTH]; /* what each position holds */
} model_sequence;

static char *position_data(const kv_sequence *sequence, int plane, int64_t p)
{
    char *block = kv_sequence_table(sequence, plane)[p / KV_BLOCK];
    return block + (size_t)(p % KV_BLOCK) * width[plane_class[plane]];
}

static void stamp(char *to, size_t size, uint64_t value)
{
    for (size_t i = 0; i < size; i += sizeof value)
        memcpy(to + i, &value, sizeof value);
}

static bool holds(const char *at, size_t size, uint64_t value)
{
    for (size_t i = 0; i < size; i += sizeof value)
        if (memcmp(at + i, &value, sizeof value) != 0)
            return false;
    return true;
}

static int64_t first_visible(int64_t window, int64_t p)
{
    return window > 0 && p >= window ? p - window + 1 : 0;
}

/* Every position that a later token may see, byte for byte; and the bytes that are held. */
static bool agrees(const kv_sequence *sequence, const model_sequence *model)
{
    if (sequence->length != model->length)
        return false;
    int64_t end = (model->length + KV_BLOCK - 1) / KV_BLOCK * KV_BLOCK;
    size_t bytes = 0;
    for (int plane = 0; plane < N_PLANES; plane++) {
        size_t size = width[plane_class[plane]];
        for (int64_t p = first_visible(model->window[plane], model->length); p < model->length; p++)
            if (!holds(position_data(sequence, plane, p), size, model->stamps[plane][p]))
                return false;
        bytes += model->length > 0 ? (size_t)(end - model->held_from[plane]) * size : 0;
    }
    return kv_sequence_bytes(sequence) == bytes;
}

/* Bytes of all blocks that any of the sequences refers to, each once. */
static size_t distinct_bytes(kv_store *store, const kv_sequence *sequences,
                             const model_sequence *models)
{
    static const kv_block *seen[N_SEQUENCES * N_PLANES * (MAX_LENGTH / KV_BLOCK + 1)];
    size_t n_seen = 0, bytes = 0;
    for (int s = 0; s < N_SEQUENCES; s++) {
        if (!models[s].used)
            continue;
        const kv_sequence *q = &sequences[s];
        for (int plane = 0; plane < N_PLANES; plane++) {
            for (size_t b = q->planes[plane].first_block; b < q->n_blocks; b++) {
                const kv_block *block = q->blocks[(size_t)plane * q->capacity + b];
                size_t i = 0;
                while (i < n_seen && seen[i] != block)
                    i++;
                if (i < n_seen)
                    continue;
                seen[n_seen++] = block;
                bytes += kv_store_block_bytes(store, plane_class[plane]);
            }
        }
    }
    return bytes;
}

static void model_commit(model_sequence *model, int64_t n)
{
    model->length += n;
    int64_t end = (model->length + KV_BLOCK - 1) / KV_BLOCK * KV_BLOCK;
    for (int plane = 0; plane < N_PLANES; plane++) {
        int64_t first = first_visible(model->window[plane], model->length) / KV_BLOCK * KV_BLOCK;
        first = first < end ? first : end;
        if (first > model->held_from[plane])
            model->held_from[plane] = first;
    }
}

/* Extends by n positions of fresh stamps. False: no memory, nothing changed. */
static bool extend(kv_sequence *sequence, model_sequence *model, int64_t n, uint64_t seed)
{
    if (kv_sequence_reserve(sequence, n) != TL_STATUS_OK)
        return false;
    for (int plane = 0; plane < N_PLANES; plane++) {
        for (int64_t p = model->length; p < model->length + n; p++) {
            uint64_t value = seed << 32 | (uint64_t)plane << 16 | (uint64_t)p;
            model->stamps[plane][p] = value;
            stamp(position_data(sequence, plane, p), width[plane_class[plane]], value);
        }
    }
    kv_sequence_commit(sequence, n);
    model_commit(model, n);
    return true;
}

typedef struct kv_world {
    watched w;
    kv_store *store;
    kv_sequence sequences[N_SEQUENCES];
    model_sequence models[N_SEQUENCES];
} kv_world;

static bool world_open(kv_world *world)
{
    memset(world, 0, sizeof *world);
    const size_t block_bytes[] = {width[0] * KV_BLOCK, width[1] * KV_BLOCK};
    return CHECK_OK(
        kv_store_create(&world->store, watched_memory(&world->w), block_bytes, N_CLASSES, true));
}

/* With a window for each plane. */
static void world_start_planes(kv_world *world, int s, const int64_t *windows)
{
    CHECK_OK(init_planes(&world->sequences[s], world->store, plane_class, N_PLANES, 0));
    world->models[s] = (model_sequence){.used = true};
    for (int plane = 0; plane < N_PLANES; plane++)
        world->models[s].window[plane] = world->sequences[s].planes[plane].window = windows[plane];
}

static void world_start(kv_world *world, int s, int64_t window)
{
    const int64_t windows[N_PLANES] = {window, window, window};
    world_start_planes(world, s, windows);
}

static void world_clone(kv_world *world, int to, int from)
{
    CHECK_OK(kv_sequence_clone(&world->sequences[to], &world->sequences[from]));
    world->models[to] = world->models[from];
}

static void world_end(kv_world *world, int s)
{
    kv_sequence_clear(&world->sequences[s]);
    world->models[s].used = false;
}

/* All sequences, not only the one that was touched: a write into a clone must not show. */
static bool world_agrees(kv_world *world)
{
    for (int s = 0; s < N_SEQUENCES; s++)
        if (world->models[s].used && !agrees(&world->sequences[s], &world->models[s]))
            return test_check(false, __FILE__, __LINE__, "sequence %d differs", s);
    size_t use, slabs;
    kv_store_bytes(world->store, &use, &slabs);
    return CHECK_EQ(use, distinct_bytes(world->store, world->sequences, world->models));
}

static void world_close(kv_world *world)
{
    for (int s = 0; s < N_SEQUENCES; s++)
        if (world->models[s].used)
            world_end(world, s);
    size_t use, slabs;
    kv_store_bytes(world->store, &use, &slabs);
    CHECK_EQ(use, 0);
    CHECK(world->w.n_live <= N_CLASSES);
    kv_store_destroy(world->store);
    CHECK_EQ(world->w.n_live, 0);
}

/* Where a truncation must be refused: the window has dropped what position `length` attends to. */
static bool may_truncate(const model_sequence *model, int64_t length)
{
    bool may = true;
    for (int plane = 0; plane < N_PLANES; plane++)
        may = may && first_visible(model->window[plane], length) >= model->held_from[plane];
    return may || length == 0;
}

static void model_truncate(model_sequence *model, int64_t length)
{
    model->length = length;
    if (length == 0)
        memset(model->held_from, 0, sizeof model->held_from);
}

/* Often one for all planes, else each its own. */
static void random_windows(int64_t *windows, uint64_t i)
{
    static const int64_t choices[] = {0, 0, 1, 2, 5, 31, 32, 33, 64, 100};
    bool one = random_uniform(60, i) < 0.5;
    for (uint64_t plane = 0; plane < N_PLANES; plane++)
        windows[plane] = choices[(int)(random_uniform(61 + (one ? 0 : plane), i) * 10)];
}

static void random_step(kv_world *world, uint64_t i)
{
    double u[4];
    for (uint64_t k = 0; k < 4; k++)
        u[k] = random_uniform(k + 50, i);
    int s = (int)(u[0] * N_SEQUENCES), other = (int)(u[1] * N_SEQUENCES);
    kv_sequence *sequence = &world->sequences[s];
    model_sequence *model = &world->models[s];
    if (!model->used) {
        int64_t windows[N_PLANES];
        random_windows(windows, i);
        if (world->models[other].used && u[3] < 0.7)
            world_clone(world, s, other);
        else
            world_start_planes(world, s, windows);
    } else if (u[2] < 0.6) {
        int64_t n = (int64_t)(u[3] < 0.5 ? 1 + u[3] * 8 : (u[3] - 0.5) * 140) + 1;
        if (model->length + n <= MAX_LENGTH)
            CHECK(extend(sequence, model, n, i + 1));
    } else if (u[2] < 0.85) {
        int64_t length = (int64_t)(u[3] * (double)(model->length + 1));
        bool may = may_truncate(model, length);
        if (CHECK_EQ(kv_sequence_truncate(sequence, length),
                     may ? TL_STATUS_OK : TL_STATUS_INVALID) &&
            may)
            model_truncate(model, length);
    } else {
        world_end(world, s);
    }
}

TEST(random_operations_against_a_model)
{
    static kv_world world;
    REQUIRE(world_open(&world));
    for (uint64_t i = 0; i < 20000; i++) {
        random_step(&world, i);
        if (!world_agrees(&world))
            break;
    }
    CHECK(world.w.n_copied > 100); /* the walk did come by shared blocks */
    world_close(&world);
}

TEST(only_a_half_filled_shared_block_is_copied)
{
    static kv_world world;
    REQUIRE(world_open(&world));
    world_start(&world, 0, 0);
    CHECK(extend(&world.sequences[0], &world.models[0], 2 * KV_BLOCK, 1));
    world_clone(&world, 1, 0);
    CHECK(extend(&world.sequences[1], &world.models[1], 5, 2)); /* a block of its own */
    CHECK_EQ(world.w.n_copied, 0);
    world_clone(&world, 2, 1);
    CHECK(extend(&world.sequences[2], &world.models[2], 1, 3));
    CHECK_EQ(world.w.n_copied, N_PLANES);
    CHECK(extend(&world.sequences[2], &world.models[2], 1, 4));
    CHECK(extend(&world.sequences[1], &world.models[1], 1, 5)); /* sole owner again */
    CHECK_EQ(world.w.n_copied, N_PLANES);
    CHECK(world_agrees(&world));
    /* forgetting a shared position is no write; taking its place is */
    world_clone(&world, 3, 0);
    CHECK_OK(kv_sequence_truncate(&world.sequences[3], KV_BLOCK + 1));
    model_truncate(&world.models[3], KV_BLOCK + 1);
    CHECK_EQ(world.w.n_copied, N_PLANES);
    CHECK(extend(&world.sequences[3], &world.models[3], 1, 6));
    CHECK_EQ(world.w.n_copied, 2 * N_PLANES);
    CHECK(world_agrees(&world));
    world_close(&world);
}

TEST(references_keep_blocks_alive)
{
    static kv_world world;
    REQUIRE(world_open(&world));
    world_start(&world, 0, 0);
    CHECK(extend(&world.sequences[0], &world.models[0], 50, 1));
    for (int s = 1; s < N_SEQUENCES; s++) {
        world_clone(&world, s, s - 1);
        CHECK_EQ(world.sequences[0].blocks[0]->references, s + 1);
    }
    for (int s = 0; s < N_SEQUENCES - 1; s++) {
        world_end(&world, s);
        CHECK(world_agrees(&world));
    }
    CHECK_EQ(world.sequences[N_SEQUENCES - 1].blocks[0]->references, 1);
    world_close(&world);
}

TEST(a_window_bounds_the_blocks_that_are_held)
{
    static const int64_t windows[] = {1, 2, 31, 32, 33, 64, 90}, chunks[] = {1, 3, 32, 33, 50};
    for (int i = 0; i < 7; i++) {
        for (int k = 0; k < 5; k++) {
            static kv_world world;
            REQUIRE(world_open(&world));
            world_start(&world, 0, windows[i]);
            /* window and chunk in whole blocks, and one more */
            size_t n_blocks = (size_t)(windows[i] + chunks[k] + KV_BLOCK - 1) / KV_BLOCK + 1;
            size_t bound = n_blocks * KV_BLOCK * (width[0] + 2 * width[1]);
            for (int64_t n = 0; n + chunks[k] <= MAX_LENGTH; n += chunks[k]) {
                REQUIRE_OK(kv_sequence_reserve(&world.sequences[0], chunks[k]));
                CHECK(kv_sequence_bytes(&world.sequences[0]) <= bound);
                CHECK(extend(&world.sequences[0], &world.models[0], chunks[k], 1));
                CHECK(agrees(&world.sequences[0], &world.models[0]));
            }
            world_close(&world);
        }
    }
}

TEST(truncation_behind_the_window_is_refused)
{
    static kv_world world;
    REQUIRE(world_open(&world));
    world_start(&world, 0, 40);
    CHECK(extend(&world.sequences[0], &world.models[0], 150, 1));
    /* position 150 sees 111 and up, so block 3, which starts at 96, is the first one held; length
       135 is the least whose next token sees nothing before 96 */
    CHECK_EQ(world.models[0].held_from[0], 96);
    CHECK_STATUS(kv_sequence_truncate(&world.sequences[0], 134), TL_STATUS_INVALID);
    CHECK_STR_HAS(tl_last_error(), "134");
    CHECK_STR_HAS(tl_last_error(), "0 and 135 to 150");
    CHECK(agrees(&world.sequences[0], &world.models[0]));
    CHECK_OK(kv_sequence_truncate(&world.sequences[0], 135));
    model_truncate(&world.models[0], 135);
    CHECK(extend(&world.sequences[0], &world.models[0], 30, 2));
    CHECK(world_agrees(&world));
    CHECK_OK(kv_sequence_truncate(&world.sequences[0], 0));
    CHECK_EQ(kv_sequence_bytes(&world.sequences[0]), 0);
    model_truncate(&world.models[0], 0);
    CHECK(extend(&world.sequences[0], &world.models[0], 70, 3));
    CHECK(world_agrees(&world));
    world_close(&world);
}

/* Each plane keeps what its own window shows, and the narrowest says how far back one may go. */
TEST(planes_with_windows_of_their_own)
{
    static kv_world world;
    REQUIRE(world_open(&world));
    world_start_planes(&world, 0, (const int64_t[]){0, 100, 7});
    kv_sequence *sequence = &world.sequences[0];
    model_sequence *model = &world.models[0];
    for (int64_t n = 0; n < 290; n += 10) {
        CHECK(extend(sequence, model, 10, (uint64_t)n + 1));
        REQUIRE(world_agrees(&world));
    }
    /* position 290 sees 191 and up, and 284 and up */
    CHECK_EQ(sequence->planes[0].first_block, 0);
    CHECK_EQ(sequence->planes[1].first_block, 191 / KV_BLOCK);
    CHECK_EQ(sequence->planes[2].first_block, 284 / KV_BLOCK);
    CHECK_EQ(kv_sequence_bytes(sequence),
             KV_BLOCK * (10 * width[0] + (10 - 5) * width[1] + (10 - 8) * width[1]));
    world_clone(&world, 1, 0);
    CHECK(world_agrees(&world));
    /* block 8 starts at 256, so position 262 is the first that sees nothing before it there */
    CHECK_STATUS(kv_sequence_truncate(sequence, 261), TL_STATUS_INVALID);
    CHECK_STR_HAS(tl_last_error(), "allowed are 0 and 262 to 290");
    CHECK_STR_HAS(tl_last_error(), "0 and 262 to 290");
    CHECK(world_agrees(&world));
    CHECK_OK(kv_sequence_truncate(sequence, 262));
    model_truncate(model, 262);
    CHECK(extend(sequence, model, 30, 500));
    CHECK(extend(&world.sequences[1], &world.models[1], 30, 600));
    CHECK(world_agrees(&world));
    CHECK_OK(kv_sequence_truncate(sequence, 0));
    model_truncate(model, 0);
    CHECK(extend(sequence, model, 300, 700));
    CHECK(world_agrees(&world));
    world_close(&world);
}

/* A failed reserve leaves length, bytes and contents; a failed clone leaves nothing behind. */
TEST(sequences_without_memory)
{
    for (int shared = 0; shared < 2; shared++) {
        for (int64_t n = 0;; n++) {
            static kv_world world;
            REQUIRE(world_open(&world));
            world_start_planes(&world, 0, (const int64_t[]){0, 5, 33});
            CHECK(extend(&world.sequences[0], &world.models[0], 40, 1));
            if (shared)
                world_clone(&world, 1, 0);
            int64_t live = mem_live();
            mem_fail_at(n);
            tl_status status = kv_sequence_reserve(&world.sequences[0], 200);
            mem_fail_at(-1);
            CHECK(status == TL_STATUS_OK || status == TL_STATUS_NOMEM);
            if (status == TL_STATUS_NOMEM) {
                CHECK_EQ(mem_live(), live);
                CHECK(agrees(&world.sequences[0], &world.models[0]));
            }
            CHECK(extend(&world.sequences[0], &world.models[0], 200, 2));
            CHECK(world_agrees(&world));
            world_close(&world);
            if (status == TL_STATUS_OK)
                break;
            REQUIRE(n < 50);
        }
    }
    static kv_world world;
    REQUIRE(world_open(&world));
    world_start(&world, 0, 0);
    CHECK(extend(&world.sequences[0], &world.models[0], 40, 1));
    int64_t live = mem_live(), n = 0;
    for (;; n++) {
        mem_fail_at(n);
        tl_status status = kv_sequence_clone(&world.sequences[1], &world.sequences[0]);
        mem_fail_at(-1);
        if (status == TL_STATUS_OK)
            break;
        CHECK_EQ(status, TL_STATUS_NOMEM);
        CHECK_EQ(mem_live(), live);
        CHECK_EQ(world.sequences[0].blocks[0]->references, 1);
        REQUIRE(n < 50);
    }
    CHECK(n == 3); /* plane classes and two tables */
    world.models[1] = world.models[0];
    CHECK(world_agrees(&world));
    world_close(&world);
}

/* As above, where it is a slab that the backend cannot allocate, in any plane. */
TEST(sequences_without_block_memory)
{
    for (int64_t n = 0; n < 8; n++) {
        watched w;
        kv_store *store;
        kv_sequence sequence;
        /* large blocks, so that the planes need many slabs */
        REQUIRE_OK(kv_store_create(&store, watched_memory(&w), (const size_t[]){1 << 20, 2 << 20},
                                   2, false));
        REQUIRE_OK(init_planes(&sequence, store, plane_class, N_PLANES, 0));
        REQUIRE_OK(kv_sequence_reserve(&sequence, 40));
        kv_sequence_commit(&sequence, 40);
        size_t bytes = kv_sequence_bytes(&sequence), use, slabs;
        w.fail_in = n;
        tl_status status = kv_sequence_reserve(&sequence, 6 * KV_BLOCK);
        bool fired = w.fail_in < 0;
        w.fail_in = -1;
        CHECK_EQ(status, fired ? TL_STATUS_NOMEM : TL_STATUS_OK);
        kv_store_bytes(store, &use, &slabs);
        if (fired) {
            CHECK_EQ(kv_sequence_bytes(&sequence), bytes);
            CHECK_EQ(use, bytes);
        }
        CHECK(n > 3 || fired);
        kv_sequence_clear(&sequence);
        kv_store_bytes(store, &use, &slabs);
        CHECK_EQ(use, 0);
        kv_store_destroy(store);
        CHECK_EQ(w.n_live, 0);
    }
}
