/* The base room without Python: known answers of Philox, the heap's account, errors per thread, a team's rounds. */
#include "csrc/base/clock.h"
#include "csrc/base/mem.h"
#include "csrc/base/rng.h"
#include "csrc/base/status.h"
#include "csrc/base/team.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "tests/c/check.h"

/* kat_vectors of Random123 (Salmon et al., SC 2011), philox4x32 10. */
static void
philox_known_answers(void)
{
    static const struct {
        uint32_t counter[4], key[2], out[4];
    } known[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        uint32_t out[4];
        tp_philox(known[i].counter, known[i].key, out);
        CHECK(memcmp(out, known[i].out, sizeof out) == 0);
    }
    /* The first two words of them, as a fraction of 2^64 */
    CHECK(tp_rng_below(0, 0, 0, 1000) == 399 && tp_rng_below(0, 0, 0, 1) == 0);
    CHECK(tp_rng_below(0, 0, 0, UINT64_MAX) == UINT64_C(0x6627e8d5e169c58c));
    CHECK(tp_rng_below(UINT64_C(0x299f31d0a4093822), UINT64_C(0x0370734413198a2e), UINT64_C(0x85a308d3243f6a88), 256) == 0xd1);
    /* Box and Muller's of the first of them, by Python's math */
    static const float normal[4] = {0x1.fb76600000000p-1f, -0x1.d96d680000000p-1f, -0x1.3c37420000000p-1f, -0x1.eda3560000000p-2f};
    float values[4000];
    tp_rng_normal(0, 0, 1.0, 4, values);
    CHECK(memcmp(values, normal, sizeof normal) == 0);
    double sum = 0, squares = 0;
    tp_rng_normal(7, tp_rng_stream("w"), 2.0, 4000, values);
    for (int i = 0; i < 4000; i++) {
        sum += (double)values[i];
        squares += (double)values[i] * (double)values[i];
    }
    CHECK(fabs(sum / 4000) < 0.15 && fabs(sqrt(squares / 4000) - 2.0) < 0.1);
    float again[4000];
    tp_rng_normal(7, tp_rng_stream("w"), 2.0, 1234, again);
    CHECK(memcmp(values, again, 1234 * sizeof values[0]) == 0); /* a value does not depend on how many are asked for */
    tp_rng_normal(7, tp_rng_stream("v"), 2.0, 1234, again);
    CHECK(memcmp(values, again, 1234 * sizeof values[0]) != 0);
}

static void
heap_counts(void)
{
    tp_heap *heap = NULL;
    void *first = NULL, *second = NULL, *third = NULL;
    CHECK(tp_heap_open(1024, &heap) == TP_OK);
    CHECK(tp_heap_alloc(heap, 100, "first", &first) == TP_OK && (uintptr_t)first % TP_ALIGN == 0);
    CHECK(tp_heap_alloc(heap, 512, "second", &second) == TP_OK);
    CHECK(tp_heap_bytes(heap) == 128 + 512);
    for (int i = 0; i < 512; i++)
        CHECK(((unsigned char *)second)[i] == 0);
    CHECK(tp_heap_alloc(heap, 400, "third", &third) == TP_EMEMORY && third == NULL);
    CHECK(strstr(tp_error_message(), "third") != NULL);
    tp_heap_free(heap, second);
    tp_heap_free(heap, NULL);
    CHECK(tp_heap_bytes(heap) == 128 && tp_heap_peak_bytes(heap) == 640 && tp_heap_allocations(heap) == 2);
    tp_heap_fail_after(2);
    CHECK(tp_heap_alloc(heap, 64, "fine", &second) == TP_OK);
    CHECK(tp_heap_alloc(heap, 64, "fails", &third) == TP_EMEMORY && third == NULL);
    tp_heap_fail_after(0);
    tp_heap_free(heap, first);
    tp_heap_free(heap, second);
    CHECK(tp_heap_bytes(heap) == 0);
    tp_heap_close(heap);
}

/* Memory that is not the host's: 64 bytes for each request, in order; *context is what was given back last. */
static _Alignas(TP_ALIGN) char elsewhere[4][TP_ALIGN];
static int taken;

static tp_status
take(void *context, size_t bytes, const char *what, void **out)
{
    (void)context, (void)bytes;
    if (taken == 3)
        return tp_fail(TP_EMEMORY, "%s: no more", what);
    *out = elsewhere[taken++];
    return TP_OK;
}

static void
give(void *context, void *memory)
{
    *(void **)context = memory;
}

static void
blocks_elsewhere_have_their_own_sizes(void)
{
    tp_heap *heap = NULL;
    void *block[4] = {NULL}, *given = NULL;
    static const int order[] = {1, 2, 0};
    CHECK(tp_heap_open(0, &heap) == TP_OK);
    tp_heap_use(heap, &(tp_heap_hook){&given, take, give});
    for (int i = 0; i < 3; i++)
        CHECK(tp_heap_alloc(heap, (size_t)64 << i, "a block", &block[i]) == TP_OK && block[i] == elsewhere[i]);
    CHECK(tp_heap_alloc(heap, 1, "a block", &block[3]) == TP_EMEMORY && tp_heap_bytes(heap) == 64 + 128 + 256);
    tp_heap_free(heap, elsewhere[3]); /* nobody has it */
    CHECK(given == NULL);
    for (size_t i = 0, left = 64 + 128 + 256; i < 3; i++) { /* the one in the middle, the newest, the last */
        tp_heap_free(heap, block[order[i]]);
        left -= (size_t)64 << order[i];
        CHECK(given == block[order[i]] && tp_heap_bytes(heap) == left);
    }
    tp_heap_close(heap);
}

static void *
fail_elsewhere(void *argument)
{
    CHECK(strcmp(tp_error_message(), "") == 0);
    (void)!tp_fail(TP_EVALUE, "another thread's");
    *(int *)argument = strcmp(tp_error_message(), "another thread's") == 0;
    return NULL;
}

static void
errors_are_per_thread(void)
{
    CHECK(tp_fail(TP_ESCHEDULE, "rule %d", 3) == TP_ESCHEDULE);
    CHECK(strstr(tp_error_where(), "test_base.c:") != NULL && strchr(tp_error_where(), '\n') == NULL);
    tp_error_locate(2, 17);
    int theirs = 0;
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, fail_elsewhere, &theirs) == 0);
    pthread_join(thread, NULL);
    CHECK(theirs && strcmp(tp_error_message(), "rule 3") == 0 && tp_error_rank() == 2 && tp_error_position() == 17);
    CHECK(tp_fail(TP_EVALUE, "wrapped: %s", tp_error_message()) == TP_EVALUE);
    CHECK(strcmp(tp_error_message(), "wrapped: rule 3") == 0 && tp_error_rank() == -1);
}

#define ITEMS 1000

static void
add_one(void *argument, int member, int members)
{
    int64_t first, last, *items = argument;
    tp_team_share(ITEMS, 16, member, members, &first, &last);
    for (int64_t i = first; i < last; i++)
        items[i]++;
}

static void
teams_share(void)
{
    for (int members = 1; members <= 5; members += 2) {
        tp_team *team = NULL;
        int64_t items[ITEMS] = {0};
        CHECK(tp_team_open(members, &team) == TP_OK && tp_team_members(team) == members);
        for (int round = 0; round < 300; round++) {
            tp_team_run(team, add_one, items);
            if (round % 100 == 99) /* long enough for the members to fall asleep */
                tp_clock_sleep_until(tp_clock_ns() + 2000000);
        }
        for (int i = 0; i < ITEMS; i++)
            CHECK(items[i] == 300);
        tp_team_close(team);
    }
    tp_team *none = NULL;
    CHECK(tp_team_open(0, &none) == TP_EVALUE && none == NULL && strstr(tp_error_message(), "0") != NULL);
    CHECK(tp_team_members(NULL) == 1);
}

int
main(void)
{
    philox_known_answers();
    heap_counts();
    blocks_elsewhere_have_their_own_sizes();
    errors_are_per_thread();
    teams_share();
    return failures != 0;
}
