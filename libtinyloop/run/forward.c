#include "run/forward.h"

#include "base/memory.h"
#include "run/interrupt.h"

struct run_pass {
    tl_model *model; /* retained */
    backend_pass *backend;
    size_t max_rows;
};

tl_status run_pass_create(run_pass **out, tl_model *model, size_t max_rows)
{
    *out = NULL;
    run_pass *pass = mem_zeroed(1, sizeof *pass);
    if (pass == NULL)
        return tl_fail_nomem("a forward pass", sizeof *pass);
    tl_status status = model->backend->pass_create(&pass->backend, model->weights, max_rows);
    if (status != TL_STATUS_OK) {
        mem_free(pass);
        return status;
    }
    pass->model = engine_retain(model);
    pass->max_rows = max_rows;
    *out = pass;
    return TL_STATUS_OK;
}

void run_pass_destroy(run_pass *pass)
{
    if (pass == NULL)
        return;
    pass->model->backend->pass_destroy(pass->backend);
    engine_release(pass->model);
    mem_free(pass);
}

size_t run_pass_rows(const run_pass *pass)
{
    return pass->max_rows;
}

/* ---- the walk; every lane runs it ---- */

typedef struct walk {
    const run_pass *pass;
    const run_item *items;
    const batch_span *spans;
    size_t n_items;
    loop_counts counts;
} walk;

static void run_steps(const walk *walk, int begin, int end, const plan_run *run, lane *self)
{
    const tl_model *model = walk->pass->model;
    for (int i = begin; i < end; i++) {
        const plan_step *step = &model->plan.steps[i];
        model->backend->step[step->kind](walk->pass->backend, step, run, self);
    }
}

/* What a run of the core leaves behind, for those who asked. */
static void read_run(const walk *walk, size_t i_state, lane *self)
{
    const backend_ops *backend = walk->pass->model->backend;
    for (size_t i = 0; i < walk->n_items; i++) {
        const run_item *item = &walk->items[i];
        size_t first = walk->spans[i].first_row;
        if (item->states != NULL)
            backend->read_rows(walk->pass->backend, first, item->n_tokens,
                               item->states + i_state * item->states_stride, self);
        if (item->exits != NULL)
            backend->read_exits(walk->pass->backend, first, item->n_tokens,
                                item->exits + i_state * item->exits_stride, self);
    }
}

static void read_hidden(const walk *walk, lane *self)
{
    const backend_ops *backend = walk->pass->model->backend;
    for (size_t i = 0; i < walk->n_items; i++) {
        const run_item *item = &walk->items[i];
        size_t first = walk->spans[i].first_row;
        if (item->hidden != NULL)
            backend->read_rows(walk->pass->backend, first, item->n_tokens, item->hidden, self);
        if (item->last_hidden != NULL)
            backend->read_rows(walk->pass->backend, first + item->n_tokens - 1, 1,
                               item->last_hidden, self);
    }
}

static void walk_plan(void *arg, lane *self)
{
    const walk *walk = arg;
    const model_plan *plan = &walk->pass->model->plan;
    int n_runs = plan_n_runs(plan, walk->counts), from = -1;
    size_t n_states = 0;
    for (int i = 0; i < n_runs; i++) {
        plan_run run = plan_run_at(plan, walk->counts, i);
        const plan_stage *stage = &plan->stages[run.stage];
        if (run.index == 0)
            run_steps(walk, stage->once, stage->enter, &run, self);
        if (from >= 0 && from != run.stage)
            run_steps(walk, stage->enter, stage->begin, &run, self);
        run_steps(walk, stage->begin, stage->end, &run, self);
        if (plan_has_state(plan, &run))
            read_run(walk, n_states++, self);
        if (run.last)
            run_steps(walk, stage->end, stage->leave, &run, self);
        from = run.stage;
    }
    read_hidden(walk, self);
}

/* ---- passes ---- */

/* Gives back what was reserved beyond the sequences' lengths. */
static void unreserve(const run_item *items, size_t n)
{
    for (size_t i = 0; i < n; i++)
        kv_sequence_truncate(&items[i].kv->sequence, items[i].kv->sequence.length);
}

static tl_status reserve(batch_span *spans, const run_item *items, size_t n_items)
{
    size_t row = 0;
    for (size_t i = 0; i < n_items; i++) {
        kv_sequence *sequence = &items[i].kv->sequence;
        tl_status status = kv_sequence_reserve(sequence, (int64_t)items[i].n_tokens);
        if (status != TL_STATUS_OK) {
            unreserve(items, i);
            return status;
        }
        spans[i] = (batch_span){
            .first_row = row,
            .n_rows = items[i].n_tokens,
            .first_position = sequence->length,
            .window = items[i].kv->key.window,
            .prefix_len = items[i].kv->key.prefix_len,
            .tokens = items[i].tokens,
            .init_state = items[i].init_state,
            .tables = sequence->data,
            .table_stride = sequence->capacity,
        };
        row += items[i].n_tokens;
    }
    return TL_STATUS_OK;
}

/* Tokens that see each other must come together. */
static tl_status check_prefix(const run_item *item)
{
    int64_t length = item->kv->sequence.length, prefix = item->kv->key.prefix_len;
    if (length >= prefix || (length == 0 && (int64_t)item->n_tokens >= prefix))
        return TL_STATUS_OK;
    return tl_fail(TL_STATUS_INVALID,
                   "prefix_len is %lld: the first %lld tokens see each other and must come in one "
                   "call; %lld are there and %zu came",
                   (long long)prefix, (long long)prefix, (long long)length, item->n_tokens);
}

static tl_status check_batch(const run_pass *pass, const run_item *items, size_t n_items)
{
    size_t rows = 0;
    for (size_t i = 0; i < n_items; i++) {
        cache_key key = items[i].kv->key, first = items[0].kv->key;
        rows += items[i].n_tokens;
        if (items[i].n_tokens == 0 || key.loops != first.loops ||
            key.inner_loops != first.inner_loops)
            return tl_fail(TL_STATUS_INTERNAL, "a batch has an empty item or different loops");
        TL_TRY(check_prefix(&items[i]));
    }
    if (rows > pass->max_rows)
        return tl_fail(TL_STATUS_INTERNAL, "a batch of %zu rows in a pass of %zu", rows,
                       pass->max_rows);
    return TL_STATUS_OK;
}

tl_status run_forward(run_pass *pass, const run_item *items, size_t n_items)
{
    TL_TRY(check_batch(pass, items, n_items));
    TL_TRY(interrupt_ask());
    batch_span one, *spans = &one;
    if (n_items > 1 && (spans = mem_array(n_items, sizeof *spans)) == NULL)
        return tl_fail_nomem("a batch", n_items * sizeof *spans);
    tl_status status = reserve(spans, items, n_items);
    if (status == TL_STATUS_OK) {
        const backend_ops *backend = pass->model->backend;
        walk walk = {pass, items, spans, n_items, key_loop_counts(items[0].kv->key)};
        backend->pass_begin(pass->backend, spans, n_items);
        backend->run(pass->model->weights, walk_plan, &walk);
        for (size_t i = 0; i < n_items; i++)
            kv_sequence_commit(&items[i].kv->sequence, (int64_t)items[i].n_tokens);
    }
    if (spans != &one)
        mem_free(spans);
    return status;
}

tl_status run_tokens(run_pass *pass, const run_item *item, counter counter)
{
    size_t hidden = (size_t)pass->model->config.hidden_size;
    for (size_t done = 0; done < item->n_tokens;) {
        run_item part = *item;
        size_t left = item->n_tokens - done;
        part.tokens += done;
        part.n_tokens = left < pass->max_rows ? left : pass->max_rows;
        if (part.hidden != NULL)
            part.hidden += done * hidden;
        if (part.states != NULL)
            part.states += done * hidden;
        if (part.exits != NULL)
            part.exits += done;
        if (part.init_state != NULL)
            part.init_state += done * hidden;
        TL_TRY(run_forward(pass, &part, 1));
        engine_count(pass->model, counter, part.n_tokens);
        done += part.n_tokens;
    }
    return TL_STATUS_OK;
}

tl_status run_extend(run_pass *pass, const run_item *item, counter counter)
{
    if (item->n_tokens <= pass->max_rows)
        return run_tokens(pass, item, counter);
    /* Later passes may fail after earlier ones moved the window: work on a clone. */
    run_item on_clone = *item;
    TL_TRY(kv_cache_clone(&on_clone.kv, item->kv));
    tl_status status = run_tokens(pass, &on_clone, counter);
    if (status == TL_STATUS_OK) {
        kv_sequence extended = on_clone.kv->sequence;
        on_clone.kv->sequence = item->kv->sequence;
        item->kv->sequence = extended;
    }
    kv_cache_release(on_clone.kv);
    return status;
}

typedef struct head_walk {
    const run_pass *pass;
    const float *hidden;
    size_t n;
    float *logits;
} head_walk;

static void walk_head(void *arg, lane *self)
{
    const head_walk *walk = arg;
    const backend_ops *backend = walk->pass->model->backend;
    backend->write_rows(walk->pass->backend, walk->n, walk->hidden, self);
    backend->head(walk->pass->backend, walk->n, walk->logits, self);
}

tl_status run_head(run_pass *pass, const float *hidden, size_t n, float *logits)
{
    if (n > pass->max_rows)
        return tl_fail(TL_STATUS_INTERNAL, "%zu rows in a pass of %zu", n, pass->max_rows);
    head_walk walk = {pass, hidden, n, logits};
    pass->model->backend->run(pass->model->weights, walk_head, &walk);
    return TL_STATUS_OK;
}
