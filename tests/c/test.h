/* A small test harness. A program is one file:
 *
 *     #include "test.h"
 *     TEST(addition) { CHECK_EQ(1 + 1, 2); }
 *
 * main() is here: it runs every test in the order of the file, or those named on the command line,
 * and closes with "PROGRAM: N passed, N failed". A CHECK that fails reports and goes on; a REQUIRE
 * that fails also returns, so it belongs into the test's own body. Checks may run on any thread. */
#ifndef TINYLOOP_TEST_H
#define TINYLOOP_TEST_H

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tinyloop.h"

typedef struct test_case {
    const char *name;
    void (*run)(void);
    struct test_case *next;
} test_case;

static test_case *test_first, **test_last = &test_first;
static atomic_int test_failures; /* failed checks so far, of all tests */

static inline void test_register(test_case *test)
{
    *test_last = test;
    test_last = &test->next;
}

#define TEST(NAME)                                                                                 \
    static void test_body_##NAME(void);                                                            \
    __attribute__((constructor)) static void test_register_##NAME(void)                            \
    {                                                                                              \
        static test_case test = {#NAME, test_body_##NAME, NULL};                                   \
        test_register(&test);                                                                      \
    }                                                                                              \
    static void test_body_##NAME(void)

/* ---- Checks: each gives true if it held ------------------------------------------------------ */

__attribute__((format(printf, 4, 5))) static inline bool
test_check(bool held, const char *file, int line, const char *format, ...)
{
    if (held)
        return true;
    char message[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    fprintf(stderr, "%s:%d: %s\n", file, line, message);
    atomic_fetch_add(&test_failures, 1);
    return false;
}

static inline bool test_int_eq(intmax_t a, intmax_t b, const char *text, const char *file, int line)
{
    return test_check(a == b, file, line, "%s: %" PRIdMAX " != %" PRIdMAX, text, a, b);
}

static inline bool test_str_eq(const char *a, const char *b, const char *text, const char *file,
                               int line)
{
    bool same = a && b && strcmp(a, b) == 0;
    return test_check(same, file, line, "%s: \"%s\" != \"%s\"", text, a ? a : "(null)",
                      b ? b : "(null)");
}

static inline bool test_str_has(const char *text, const char *part, const char *file, int line)
{
    bool has = text && part && strstr(text, part);
    return test_check(has, file, line, "\"%s\" does not contain \"%s\"", text ? text : "(null)",
                      part ? part : "(null)");
}

/* Bit equality of two arrays of `size` bytes; names the first byte that differs. */
static inline bool test_mem_eq(const void *a, const void *b, size_t size, const char *text,
                               const char *file, int line)
{
    const unsigned char *x = a, *y = b;
    size_t at = 0;
    while (at < size && x[at] == y[at])
        at++;
    return test_check(at == size, file, line, "%s: differ at byte %zu of %zu", text, at, size);
}

static inline bool test_near(double a, double b, double tolerance, const char *text,
                             const char *file, int line)
{
    bool near = fabs(a - b) <= tolerance; /* false for NaN */
    return test_check(near, file, line, "%s: |%.9g - %.9g| > %.3g", text, a, b, tolerance);
}

static inline bool test_status(tl_status got, tl_status want, const char *text, const char *file,
                               int line)
{
    return test_check(got == want, file, line, "%s: status %d, not %d (last error: %s)", text,
                      (int)got, (int)want, tl_last_error());
}

#define CHECK(CONDITION) test_check((CONDITION), __FILE__, __LINE__, "%s", #CONDITION)
#define CHECK_EQ(A, B) test_int_eq((intmax_t)(A), (intmax_t)(B), #A " == " #B, __FILE__, __LINE__)
#define CHECK_STR_EQ(A, B) test_str_eq((A), (B), #A " == " #B, __FILE__, __LINE__)
#define CHECK_STR_HAS(TEXT, PART) test_str_has((TEXT), (PART), __FILE__, __LINE__)
#define CHECK_MEM_EQ(A, B, SIZE) test_mem_eq((A), (B), (SIZE), #A " == " #B, __FILE__, __LINE__)
#define CHECK_NEAR(A, B, TOLERANCE)                                                                \
    test_near((A), (B), (TOLERANCE), #A " ~ " #B, __FILE__, __LINE__)
#define CHECK_OK(CALL) test_status((CALL), TL_STATUS_OK, #CALL, __FILE__, __LINE__)
#define CHECK_STATUS(CALL, STATUS) test_status((CALL), (STATUS), #CALL, __FILE__, __LINE__)

#define REQUIRE(CONDITION)                                                                         \
    do {                                                                                           \
        if (!test_check((CONDITION), __FILE__, __LINE__, "%s", #CONDITION))                        \
            return;                                                                                \
    } while (0)
#define REQUIRE_OK(CALL)                                                                           \
    do {                                                                                           \
        if (!test_status((CALL), TL_STATUS_OK, #CALL, __FILE__, __LINE__))                         \
            return;                                                                                \
    } while (0)

/* Path of the .tinyloop file that tests may load. */
static inline const char *test_model_path(void)
{
    const char *path = getenv("TINYLOOP_TEST_MODEL");
    if (!path) {
        fprintf(stderr, "set TINYLOOP_TEST_MODEL to a .tinyloop file, or run `make test`\n");
        exit(2);
    }
    return path;
}

/* ---- Running --------------------------------------------------------------------------------- */

static inline bool test_selected(const test_case *test, int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], test->name) == 0)
            return true;
    return argc < 2;
}

static inline bool test_exists(const char *name)
{
    for (const test_case *test = test_first; test; test = test->next)
        if (strcmp(test->name, name) == 0)
            return true;
    return false;
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (!test_exists(argv[i])) {
            fprintf(stderr, "%s: no test is named %s\n", argv[0], argv[i]);
            return 2;
        }
    }
    int passed = 0, failed = 0;
    for (const test_case *test = test_first; test; test = test->next) {
        if (!test_selected(test, argc, argv))
            continue;
        int before = atomic_load(&test_failures);
        test->run();
        bool held = atomic_load(&test_failures) == before;
        if (!held)
            fprintf(stderr, "FAILED %s\n", test->name);
        *(held ? &passed : &failed) += 1;
    }
    const char *slash = strrchr(argv[0], '/');
    printf("%s: %d passed, %d failed\n", slash ? slash + 1 : argv[0], passed, failed);
    return failed || !passed;
}

#endif
