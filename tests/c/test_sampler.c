/* generate/sampler.c: the chain against an independent implementation, its limits, its draws. */
#include "base/memory.h"
#include "base/random.h"
#include "generate/sampler.h"
#include "test.h"

#include <float.h>

enum { MAX_VOCAB = 60 };

static const sampling off = {
    .temperature = 1, .top_k = 0, .top_p = 1, .min_p = 0, .repetition_penalty = 1, .seed = 1};

/* The token of one draw; `seen`: n ids, may be NULL. */
static int32_t pick(sampling s, const float *logits, size_t vocab, const int32_t *seen,
                    size_t n_seen, int64_t position)
{
    sampler *made;
    int32_t token = -1;
    if (!CHECK_OK(sampler_create(&made, vocab, s)))
        return -1;
    for (size_t i = 0; i < n_seen; i++)
        sampler_see(made, seen[i]);
    CHECK_OK(sampler_pick(&token, made, logits, position));
    sampler_destroy(made);
    return token;
}

/* ---- the chain, again ---- */

/* Rank by rank instead of in place: who is kept is decided for each id by counting those before
 * it. Draws run in order of ids, or of ranks where top_k or top_p has put them in one. */
static int32_t slow_pick(sampling s, const float *logits, size_t vocab, const bool *seen,
                         int64_t position)
{
    double value[MAX_VOCAB], weight[MAX_VOCAB], before[MAX_VOCAB], largest = -INFINITY, whole = 0;
    size_t rank[MAX_VOCAB];
    for (size_t i = 0; i < vocab; i++) {
        value[i] = logits[i];
        if (seen[i])
            value[i] *= logits[i] > 0 ? 1 / s.repetition_penalty : s.repetition_penalty;
        largest = fmax(largest, value[i]);
    }
    for (size_t i = 0; i < vocab; i++) {
        rank[i] = 0;
        for (size_t k = 0; k < vocab; k++)
            rank[i] += value[k] > value[i] || (value[k] == value[i] && k < i);
    }
    if (s.temperature == 0) {
        for (size_t i = 0; i < vocab; i++)
            if (rank[i] == 0)
                return (int32_t)i;
    }
    size_t kept = s.top_k > 0 && (size_t)s.top_k < vocab ? (size_t)s.top_k : vocab;
    for (size_t i = 0; i < vocab; i++) {
        weight[i] = rank[i] < kept ? exp((value[i] - largest) / s.temperature) : 0;
        whole += weight[i];
    }
    for (size_t i = 0; i < vocab; i++) {
        before[i] = 0;
        for (size_t k = 0; k < vocab; k++)
            before[i] += rank[k] < rank[i] ? weight[k] : 0;
    }
    bool ranked = kept < vocab || s.top_p < 1;
    double left = 0, reached = 0;
    for (size_t i = 0; i < vocab; i++) {
        /* dropped if those before it are enough already; or below min_p of the best */
        if (s.top_p < 1 && before[i] >= s.top_p * whole && rank[i] > 0)
            weight[i] = 0;
        if (weight[i] < s.min_p)
            weight[i] = 0;
        left += weight[i];
    }
    double u = random_uniform(s.seed, (uint64_t)position) * left;
    for (size_t n = 0; n < vocab; n++) {
        size_t i = n;
        for (size_t k = 0; ranked && k < vocab; k++)
            i = rank[k] == n ? k : i;
        reached += weight[i];
        if (reached > u)
            return (int32_t)i;
    }
    return -1;
}

static double between(double low, double high, uint64_t key, uint64_t i)
{
    return low + (high - low) * random_uniform(key, i);
}

TEST(the_chain_against_an_independent_one)
{
    size_t n_chosen[MAX_VOCAB] = {0}, n_different = 0;
    for (uint64_t i = 0; i < 20000; i++) {
        size_t vocab = 1 + (size_t)between(0, MAX_VOCAB, 1, i);
        sampling s = {.temperature = i % 7 ? between(0.05, 3, 2, i) : 0,
                      .top_k = i % 3 ? (int64_t)between(0, 70, 3, i) : 0,
                      .top_p = i % 4 ? between(0.01, 1, 4, i) : 1,
                      .min_p = i % 5 ? between(0, 0.5, 5, i) : 0,
                      .repetition_penalty = i % 2 ? between(0.3, 3, 6, i) : 1,
                      .seed = i};
        float logits[MAX_VOCAB];
        bool is_seen[MAX_VOCAB] = {false};
        int32_t seen[10];
        for (size_t k = 0; k < vocab; k++) /* halves: with ties */
            logits[k] = (float)floor(between(-8, 8, 7, i * MAX_VOCAB + k)) / 2;
        for (size_t k = 0; k < 10; k++) {
            seen[k] = (int32_t)between(0, (double)vocab, 8, i * 10 + k);
            is_seen[seen[k]] = true;
        }
        int64_t position = (int64_t)(i * 3);
        int32_t got = pick(s, logits, vocab, seen, 10, position);
        REQUIRE(got == slow_pick(s, logits, vocab, is_seen, position));
        n_chosen[got]++;
    }
    for (size_t k = 0; k < MAX_VOCAB; k++)
        n_different += n_chosen[k] > 0;
    CHECK_EQ(n_different, MAX_VOCAB);
}

/* ---- limits ---- */

static const float some[] = {1, 3, -2, 3, 0.5f, 2.5f, 3, -1};
enum { N_SOME = sizeof some / sizeof *some };

TEST(greedy_ties_go_to_the_lowest_id)
{
    sampling s = off;
    s.temperature = 0;
    CHECK_EQ(pick(s, some, N_SOME, NULL, 0, 5), 1);
    const float equal[9] = {0};
    CHECK_EQ(pick(s, equal, 9, NULL, 0, 5), 0);
    CHECK_EQ(pick(s, some, 1, NULL, 0, 5), 0);
}

/* Whatever leaves one candidate, or makes the others impossible, is greedy at every draw. */
TEST(narrow_sampling_is_greedy)
{
    sampling narrow[5] = {off, off, off, off, off};
    narrow[0].top_k = 1;
    narrow[1].top_p = DBL_MIN;
    narrow[2].temperature = 1e-300;
    narrow[2].top_k = 1;
    narrow[3].temperature = DBL_TRUE_MIN;
    narrow[3].top_p = 0.3; /* three equally good ones: a third of the whole each */
    narrow[4].temperature = 0;
    for (int i = 0; i < 5; i++)
        for (int64_t position = 0; position < 200; position++)
            REQUIRE(pick(narrow[i], some, N_SOME, NULL, 0, position) == 1);
}

TEST(a_tiny_temperature_leaves_the_best)
{
    sampling s = off;
    bool chosen[N_SOME] = {false};
    const double tiny[] = {1e-3, 1e-300, DBL_TRUE_MIN};
    for (int i = 0; i < 3; i++) {
        s.temperature = tiny[i];
        for (int64_t position = 0; position < 200; position++) {
            int32_t token = pick(s, some, N_SOME, NULL, 0, position);
            REQUIRE(token == 1 || token == 3 || token == 6);
            chosen[token] = true;
        }
    }
    CHECK(chosen[1] && chosen[3] && chosen[6]);
    s = off;
    s.min_p = 1; /* as good as the best */
    for (int64_t position = 0; position < 200; position++) {
        int32_t token = pick(s, some, N_SOME, NULL, 0, position);
        REQUIRE(token == 1 || token == 3 || token == 6);
    }
}

/* Half of four equal ones are two: as many as are needed, and no more. */
TEST(top_p_keeps_as_few_as_make_it_up)
{
    const float equal[4] = {2, 2, 2, 2};
    sampling s = off;
    s.top_p = 0.5;
    bool chosen[4] = {false};
    for (int64_t position = 0; position < 200; position++)
        chosen[pick(s, equal, 4, NULL, 0, position)] = true;
    CHECK(chosen[0] && chosen[1] && !chosen[2] && !chosen[3]);
}

TEST(top_k_of_the_vocabulary_and_more_is_off)
{
    static const int64_t large[] = {N_SOME, N_SOME + 1, 1000000, INT64_MAX};
    for (int64_t position = 0; position < 300; position++) {
        int32_t want = pick(off, some, N_SOME, NULL, 0, position);
        for (int i = 0; i < 4; i++) {
            sampling s = off;
            s.top_k = large[i];
            REQUIRE(pick(s, some, N_SOME, NULL, 0, position) == want);
        }
    }
}

TEST(a_huge_temperature_makes_all_equal)
{
    sampling s = off;
    s.temperature = DBL_MAX;
    int n[N_SOME] = {0}, n_draws = 4000;
    for (int64_t position = 0; position < n_draws; position++)
        n[pick(s, some, N_SOME, NULL, 0, position)]++;
    for (int i = 0; i < N_SOME; i++)
        CHECK_NEAR(n[i], n_draws / N_SOME, 100);
}

TEST(draws_follow_the_probabilities)
{
    int n[N_SOME] = {0}, n_draws = 20000;
    double whole = 0;
    for (int i = 0; i < N_SOME; i++)
        whole += exp(some[i] / 1.5);
    sampling s = off;
    s.temperature = 1.5;
    for (int64_t position = 0; position < n_draws; position++)
        n[pick(s, some, N_SOME, NULL, 0, position)]++;
    for (int i = 0; i < N_SOME; i++) {
        double p = exp(some[i] / 1.5) / whole;
        CHECK_NEAR(n[i], p * n_draws, 4 * sqrt(p * n_draws));
    }
}

TEST(a_draw_depends_on_seed_and_position_alone)
{
    sampler *one;
    REQUIRE_OK(sampler_create(&one, N_SOME, off));
    int n_changes = 0;
    for (int64_t position = 99; position >= 0; position--) {
        int32_t token;
        REQUIRE_OK(sampler_pick(&token, one, some, position));
        REQUIRE(token == pick(off, some, N_SOME, NULL, 0, position));
        sampling other = off;
        other.seed = 1ull << 32 | 1;
        n_changes += token != pick(other, some, N_SOME, NULL, 0, position);
    }
    CHECK(n_changes > 20);
    sampler_destroy(one);
}

/* ---- the penalty ---- */

TEST(the_penalty_weakens_what_was_seen)
{
    sampling s = off;
    s.temperature = 0;
    s.repetition_penalty = 2;
    const float logits[] = {3, 2, -1, -1.5f};
    const int32_t zero[] = {0, 0, 0}, top_two[] = {0, 1};
    CHECK_EQ(pick(s, logits, 4, zero, 3, 0), 1);     /* 1.5 (once, not thrice) under 2 */
    CHECK_EQ(pick(s, logits, 4, top_two, 2, 0), 0);  /* 1.5 over 1 */
    CHECK_EQ(pick(s, logits + 2, 2, zero, 1, 0), 1); /* -2 under -1.5 */
    s.repetition_penalty = 0.5;
    CHECK_EQ(pick(s, logits + 2, 2, (const int32_t[]){1}, 1, 0), 1); /* -0.75 over -1 */
}

TEST(extreme_penalties_stay_finite)
{
    const float logits[] = {3e38f, -3e38f, 1e-38f, 0};
    const int32_t seen[] = {0, 1, 2, 3};
    const double penalties[] = {DBL_TRUE_MIN, 1e-300, 1e300, DBL_MAX};
    for (int i = 0; i < 4; i++) {
        for (int greedy = 0; greedy < 2; greedy++) {
            sampling s = off;
            s.temperature = greedy ? 0 : 1;
            s.repetition_penalty = penalties[i];
            int32_t token = pick(s, logits, 4, seen, 4, 3);
            CHECK(token >= 0 && token < 4 && token != 1);
        }
    }
}

/* ---- failures ---- */

TEST(logits_that_are_not_finite)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 3; i++) {
        for (size_t at = 0; at < N_SOME; at++) {
            for (int greedy = 0; greedy < 2; greedy++) {
                sampling s = off;
                s.temperature = greedy ? 0 : 1;
                float logits[N_SOME];
                memcpy(logits, some, sizeof some);
                logits[at] = bad[i];
                sampler *made;
                int32_t token = 77;
                REQUIRE_OK(sampler_create(&made, N_SOME, s));
                CHECK_STATUS(sampler_pick(&token, made, logits, 1234), TL_STATUS_NUMERIC);
                CHECK_STR_HAS(tl_last_error(), "1234");
                CHECK_OK(sampler_pick(&token, made, some, 1234)); /* usable after */
                sampler_destroy(made);
            }
        }
    }
}

TEST(a_sampler_without_memory)
{
    int64_t live = mem_live(), n = 0;
    sampler *made;
    for (;; n++) {
        mem_fail_at(n);
        tl_status status = sampler_create(&made, 100, off);
        mem_fail_at(-1);
        if (status == TL_STATUS_OK)
            break;
        CHECK_EQ(status, TL_STATUS_NOMEM);
        CHECK_STR_HAS(tl_last_error(), "out of memory");
        CHECK(made == NULL);
        REQUIRE(n < 10);
    }
    CHECK_EQ(n, 3);
    sampler_destroy(made);
    sampler_destroy(NULL);
    CHECK_EQ(mem_live(), live);
}
