/* api/structs: programs and libraries of different versions. The struct here had two fields at
 * first, has three in this library, and has four in a later one. */
#include "api/structs.h"
#include "test.h"

typedef struct first {
    size_t size;
    int64_t a;
    int64_t b;
} first;

typedef struct present {
    size_t size;
    int64_t a;
    int64_t b;
    int64_t c;
} present;

typedef struct later {
    size_t size;
    int64_t a;
    int64_t b;
    int64_t c;
    int64_t d;
} later;

#define DEFAULTS                                                                                   \
    {                                                                                              \
        sizeof(present), 10, 20, 30                                                                \
    }

static tl_status read_present(present *own, const void *given)
{
    *own = (present)DEFAULTS;
    return READ_STRUCT(own, given, present, b);
}

static bool holds(const present *p, int64_t a, int64_t b, int64_t c)
{
    return p->a == a && p->b == b && p->c == c;
}

TEST(options_of_every_version)
{
    present own;
    CHECK_OK(read_present(&own, NULL));
    CHECK(holds(&own, 10, 20, 30));
    const first of_older = {sizeof of_older, 1, 2};
    CHECK_OK(read_present(&own, &of_older));
    CHECK(holds(&own, 1, 2, 30)); /* what it lacks is at its default */
    const present of_same = {sizeof of_same, 1, 2, 3};
    CHECK_OK(read_present(&own, &of_same));
    CHECK(holds(&own, 1, 2, 3));
    const later of_newer = {sizeof of_newer, 1, 2, 3, 0};
    CHECK_OK(read_present(&own, &of_newer));
    CHECK(holds(&own, 1, 2, 3));
}

TEST(an_option_that_this_version_lacks)
{
    present own;
    const later wants_more = {sizeof wants_more, 1, 2, 3, 4};
    CHECK_STATUS(read_present(&own, &wants_more), TL_STATUS_UNSUPPORTED);
    CHECK_STR_HAS(tl_last_error(), "present has a field at byte 32 that this version, ");
    CHECK_STR_HAS(tl_last_error(), tl_version_string());
    CHECK(holds(&own, 10, 20, 30));
}

TEST(sizes_that_no_version_has)
{
    static const size_t sizes[] = {0, 1, sizeof(size_t), sizeof(first) - 1, 4097, SIZE_MAX};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        present own, given = {sizes[i], 1, 2, 3};
        CHECK_STATUS(read_present(&own, &given), TL_STATUS_INVALID);
        CHECK_STR_HAS(tl_last_error(), "present.size is ");
        CHECK_STR_HAS(tl_last_error(), "at least 24");
        CHECK(holds(&own, 10, 20, 30));
        CHECK_STATUS(WRITE_STRUCT(&given, &own, present, b), TL_STATUS_INVALID);
        CHECK_EQ(given.size, sizes[i]);
        CHECK(holds(&given, 1, 2, 3));
    }
}

TEST(infos_of_every_version)
{
    const present own = {0, 1, 2, 3};
    struct {
        first info;
        int64_t beyond;
    } of_older = {{.size = sizeof(first)}, 99};
    CHECK_OK(WRITE_STRUCT(&of_older.info, &own, present, b));
    CHECK_EQ(of_older.info.size, sizeof(first));
    CHECK(of_older.info.a == 1 && of_older.info.b == 2 && of_older.beyond == 99);
    present of_same = {.size = sizeof of_same};
    CHECK_OK(WRITE_STRUCT(&of_same, &own, present, b));
    CHECK(of_same.size == sizeof of_same && holds(&of_same, 1, 2, 3));
    later of_newer = {sizeof of_newer, 9, 9, 9, 9};
    CHECK_OK(WRITE_STRUCT(&of_newer, &own, present, b));
    CHECK_EQ(of_newer.size, sizeof of_newer);
    CHECK(of_newer.a == 1 && of_newer.b == 2 && of_newer.c == 3 && of_newer.d == 0);
}
