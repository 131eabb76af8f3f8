#include "generate/sampler.h"

#include "base/memory.h"
#include "base/random.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

typedef struct candidate {
    double value; /* penalised logit, later its probability, not normalised */
    int32_t id;
} candidate;

struct sampler {
    sampling sampling;
    size_t vocab;
    bool *seen;            /* [vocab] */
    candidate *candidates; /* [vocab] */
};

tl_status sampler_create(sampler **out, size_t vocab, sampling sampling)
{
    *out = NULL;
    sampler *made = mem_zeroed(1, sizeof *made);
    bool *seen = mem_zeroed(vocab, sizeof *seen);
    candidate *candidates = mem_array(vocab, sizeof *candidates);
    if (made == NULL || seen == NULL || candidates == NULL) {
        mem_free(made);
        mem_free(seen);
        mem_free(candidates);
        return tl_fail_nomem("a sampler", vocab * (sizeof *seen + sizeof *candidates));
    }
    *made = (sampler){sampling, vocab, seen, candidates};
    *out = made;
    return TL_STATUS_OK;
}

void sampler_destroy(sampler *sampler)
{
    if (sampler == NULL)
        return;
    mem_free(sampler->seen);
    mem_free(sampler->candidates);
    mem_free(sampler);
}

void sampler_see(sampler *sampler, int32_t token)
{
    sampler->seen[token] = true;
}

/* ---- order: larger values first, of equal ones the lower id ---- */

static bool ranks_before(candidate a, candidate b)
{
    return a.value > b.value || (a.value == b.value && a.id < b.id);
}

static int compare(const void *a, const void *b)
{
    const candidate *x = a, *y = b;
    return ranks_before(*x, *y) ? -1 : ranks_before(*y, *x) ? 1 : 0;
}

static void sift_down(candidate *heap, size_t n, size_t i)
{
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= n)
            return;
        if (child + 1 < n && ranks_before(heap[child], heap[child + 1]))
            child++;
        if (!ranks_before(heap[i], heap[child]))
            return;
        candidate swapped = heap[i];
        heap[i] = heap[child];
        heap[child] = swapped;
        i = child;
    }
}

/* Moves the first k of the order to the front, in no order: a heap whose root is the last of the
 * k best so far. */
static void select_first(candidate *candidates, size_t n, size_t k)
{
    for (size_t i = k / 2; i-- > 0;)
        sift_down(candidates, k, i);
    for (size_t i = k; i < n; i++) {
        if (ranks_before(candidates[i], candidates[0])) {
            candidates[0] = candidates[i];
            sift_down(candidates, k, 0);
        }
    }
}

/* ---- the chain ---- */

static tl_status penalise(sampler *sampler, const float *logits, int64_t position)
{
    double penalty = sampler->sampling.repetition_penalty;
    for (size_t i = 0; i < sampler->vocab; i++) {
        double value = logits[i];
        if (!isfinite(value))
            return tl_fail(TL_STATUS_NUMERIC,
                           "logit of token %zu at position %lld is %g; the "
                           "model's numbers overflowed (kv_mode fp32 has a wider range than fp16)",
                           i, (long long)position, value);
        if (sampler->seen[i] && penalty != 1.0) {
            value = value > 0 ? value / penalty : value * penalty;
            value = fmin(fmax(value, -DBL_MAX), DBL_MAX);
        }
        sampler->candidates[i] = (candidate){value, (int32_t)i};
    }
    return TL_STATUS_OK;
}

static int32_t best(const sampler *sampler)
{
    candidate first = sampler->candidates[0];
    for (size_t i = 1; i < sampler->vocab; i++)
        if (ranks_before(sampler->candidates[i], first))
            first = sampler->candidates[i];
    return first.id;
}

/* Turns values into exp((value - largest) / temperature) and gives their sum. */
static double weigh(candidate *candidates, size_t n, double temperature)
{
    double largest = candidates[0].value, sum = 0;
    for (size_t i = 1; i < n; i++)
        largest = fmax(largest, candidates[i].value);
    for (size_t i = 0; i < n; i++) {
        candidates[i].value = exp((candidates[i].value - largest) / temperature);
        sum += candidates[i].value;
    }
    return sum;
}

/* How many of the ordered candidates make up top_p of the whole; at least one. */
static size_t nucleus(const candidate *candidates, size_t n, double sum, double top_p)
{
    double reached = 0;
    for (size_t i = 0; i < n; i++) {
        reached += candidates[i].value;
        if (reached >= top_p * sum)
            return i + 1;
    }
    return n;
}

static int32_t draw(const candidate *candidates, size_t n, double uniform)
{
    double sum = 0, reached = 0;
    for (size_t i = 0; i < n; i++)
        sum += candidates[i].value;
    int32_t last = candidates[0].id;
    for (size_t i = 0; i < n; i++) {
        if (candidates[i].value == 0)
            continue;
        last = candidates[i].id;
        reached += candidates[i].value;
        if (reached > uniform * sum)
            break;
    }
    return last;
}

tl_status sampler_pick(int32_t *token, sampler *sampler, const float *logits, int64_t position)
{
    const sampling *s = &sampler->sampling;
    candidate *candidates = sampler->candidates;
    TL_TRY(penalise(sampler, logits, position));
    if (s->temperature == 0) {
        *token = best(sampler);
        return TL_STATUS_OK;
    }
    size_t n = sampler->vocab;
    if (s->top_k > 0 && (uint64_t)s->top_k < n) {
        select_first(candidates, n, (size_t)s->top_k);
        n = (size_t)s->top_k;
    }
    if (n < sampler->vocab || s->top_p < 1)
        qsort(candidates, n, sizeof *candidates, compare);
    double sum = weigh(candidates, n, s->temperature);
    if (s->top_p < 1)
        n = nucleus(candidates, n, sum, s->top_p);
    double least = s->min_p; /* the largest weight is exactly 1 */
    size_t kept = 0;
    for (size_t i = 0; i < n; i++)
        if (candidates[i].value >= least)
            candidates[kept++] = candidates[i];
    *token = draw(candidates, kept, random_uniform(s->seed, (uint64_t)position));
    return TL_STATUS_OK;
}
