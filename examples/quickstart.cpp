// tinyloop from C++: as quickstart.c, with handles that release themselves and errors that are
// thrown.
//
//     c++ -std=c++11 quickstart.cpp $(tinyloop --cflags --libs) -o quickstart
//     ./quickstart MODEL.tinyloop
#include <tinyloop.h>

#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace
{

using Tokens = std::vector<int32_t>;

template <typename Handle, void (*release)(Handle *)> struct Release {
    void operator()(Handle *handle) const
    {
        release(handle);
    }
};

using Model = std::unique_ptr<tl_model, Release<tl_model, tl_model_release>>;
using Pool = std::unique_ptr<tl_prefix_pool, Release<tl_prefix_pool, tl_prefix_pool_release>>;
using Stream = std::unique_ptr<tl_stream, Release<tl_stream, tl_stream_release>>;

// The sentence names the function, the argument and what is allowed.
void check(tl_status status)
{
    if (status != TL_STATUS_OK)
        throw std::runtime_error(tl_last_error());
}

Model load(const char *path)
{
    tl_model *model = nullptr;
    check(tl_model_load(&model, path, nullptr));
    return Model(model);
}

Pool make_pool(int64_t capacity)
{
    tl_prefix_pool_options options = TL_PREFIX_POOL_OPTIONS_INIT;
    options.capacity = capacity;
    tl_prefix_pool *pool = nullptr;
    check(tl_prefix_pool_create(&pool, &options));
    return Pool(pool);
}

Stream start(const Model &model, const Pool &pool, const Tokens &prompt)
{
    tl_generate_options options = TL_GENERATE_OPTIONS_INIT;
    options.max_tokens = 16;
    options.temperature = 0.8;
    options.has_seed = 1;
    options.seed = 42;
    tl_stream *stream = nullptr;
    check(
        tl_stream_create(&stream, model.get(), pool.get(), prompt.data(), prompt.size(), &options));
    return Stream(stream);
}

// Stands for a long instruction that many requests begin with.
Tokens make_prefix(int32_t first)
{
    Tokens tokens;
    for (int32_t i = 0; i < 64; i++)
        tokens.push_back(first + 7 * i);
    return tokens;
}

void print_counters(const Model &model)
{
    tl_counters counters = {};
    counters.size = sizeof counters;
    check(tl_model_get_counters(&counters, model.get()));
    std::cout << counters.tokens_prefilled << " tokens prefilled, " << counters.tokens_decoded
              << " decoded; pool: " << counters.pool_full << " full, " << counters.pool_partial
              << " partial, " << counters.pool_miss << " missed\n";
}

void run(const char *path)
{
    Model model = load(path);
    Pool pool = make_pool(16);
    Tokens prompt = make_prefix(1);
    int64_t length;
    check(tl_prefix_pool_register(&length, pool.get(), model.get(), prompt.data(), prompt.size(),
                                  nullptr));

    // The prompt begins with what the pool has, so only the question is run.
    for (int32_t id = 11; id <= 15; id++)
        prompt.push_back(id);
    Stream stream = start(model, pool, prompt);
    std::cout << "tokens:";
    int32_t token;
    for (check(tl_stream_next(&token, stream.get())); token >= 0;
         check(tl_stream_next(&token, stream.get())))
        std::cout << ' ' << token << std::flush;
    std::cout << '\n';
    print_counters(model);
}

} // namespace

int main(int argc, char **argv)
{
    if (argc != 2) {
        std::cerr << "usage: " << argv[0] << " MODEL.tinyloop\n";
        return 2;
    }
    try {
        run(argv[1]);
    } catch (const std::exception &error) {
        std::cerr << error.what() << '\n';
        return 1;
    }
    return 0;
}
