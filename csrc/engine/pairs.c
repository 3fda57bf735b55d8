/* Decides exactly, in polynomial time, whether a partition fits a limit of memory where stages share their rank in pairs: stage k
 * with parts - 1 - k (two chunks that turn back, two copies of the model, guests of a peer) or with k + parts / 2 (two chunks in
 * turn). A dynamic programme over the pairs: each pair takes blocks at two places of the model, and of the pairs before it matters
 * only which two places these are, and how slow the slowest pair is. A pair takes no less with one more block, so that for given
 * places the ends that fit lie below a falling staircase. */
#include "csrc/engine/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/deadline.h"

#define ROUNDED_UP (1.0 + 1e-9) /* sums of seconds in another order */
#define MOST_WORK 3000000          /* questions whether a pair fits */
#define PLACES_A_QUESTION 64       /* that are emptied meanwhile */
#define MOST_PLACES ((size_t)1 << 23)

typedef struct {
    tp_engine_sizes *sizes;
    double *slowest;       /* [pairs + 1][blocks + 1][blocks + 1] of the pairs before, by where the left and the right stage of a
                              pair begin; INFINITY: no partition leads there */
    tp_engine_size *least; /* [stages][blocks + 1] of so many blocks, wherever they are; 0: not known yet */
    int64_t *bytes;        /* [ranks] */
    int64_t *workspace;    /* [ranks] */
    double *seconds;       /* [ranks] */
    int32_t *width;        /* [parts] blocks that a stage can have, where its pair has one */
    int32_t *behind;       /* [3][pairs + 1] that pairs from this one on can have: left stages, right ones, and together */
    const tp_engine_pace *pace;
    double less;            /* seconds: only what is faster is looked for, */
    double stage_s, pair_s; /* and then a stage, and a pair, take at most */
    size_t places;
    int64_t limit, work;
    int meet; /* a rank has both stages of its pair */
    int stages, parts, pairs, blocks, turns; /* turns: right stages go from the last block back; otherwise from the middle on */
} pairer;

static int
right_of(const pairer *x, int pair)
{
    return x->turns ? x->parts - 1 - pair : pair + x->pairs;
}

static double *
slowest_to(const pairer *x, int pair, int left, int right)
{
    size_t width = (size_t)x->blocks + 1;
    return &x->slowest[((size_t)pair * width + (size_t)left) * width + (size_t)right];
}

/* ---- one pair ------------------------------------------------------------------------------------------------------------ */

static void
begin(pairer *x, int rank)
{
    x->bytes[rank] = x->sizes->beside[rank];
    x->workspace[rank] = 0;
}

static void
touch(pairer *x, int part)
{
    for (int stage = part; stage < x->stages; stage += x->parts) {
        begin(x, x->sizes->config.program->rank_of[stage]);
        if (x->sizes->host[stage] >= 0)
            begin(x, x->sizes->host[stage]);
    }
}

/* Of so many blocks, wherever they are: every other stage has one, too. */
static tp_engine_size
least_of(pairer *x, int stage, int count)
{
    tp_engine_size *least = &x->least[(size_t)stage * ((size_t)x->blocks + 1) + (size_t)count];
    int part = stage % x->parts, behind = x->parts - 1 - part, last = part == 0 ? 0 : x->blocks - behind - count;
    int first = behind == 0 ? last : part, kinds = x->sizes->alike ? 2 : x->blocks;
    if (least->stage > 0)
        return *least;
    *least = (tp_engine_size){TP_ENGINE_NEVER, TP_ENGINE_NEVER, TP_ENGINE_NEVER};
    for (int from = first; from <= last && from < first + kinds; from++)
        *least = tp_engine_lesser_size(*least, tp_engine_size_of(x->sizes, stage, from, from + count));
    return *least;
}

static void
add(pairer *x, int stage, tp_engine_size size)
{
    int r = x->sizes->config.program->rank_of[stage];
    x->bytes[r] += size.stage;
    x->workspace[r] = size.workspace > x->workspace[r] ? size.workspace : x->workspace[r];
    if (x->sizes->host[stage] >= 0)
        x->bytes[x->sizes->host[stage]] += size.guests;
}

static void
add_blocks(pairer *x, int part, int from, int to)
{
    for (int stage = part; stage < x->stages; stage += x->parts)
        add(x, stage, tp_engine_size_of(x->sizes, stage, from, to));
}

static void
add_least(pairer *x, int part, int count)
{
    for (int stage = part; stage < x->stages; stage += x->parts)
        add(x, stage, least_of(x, stage, count));
}

static int
is_within(const pairer *x, int rank)
{
    return (int64_t)tp_align_bytes((size_t)x->bytes[rank]) + x->workspace[rank] <= x->limit;
}

static int
are_within(const pairer *x, int part)
{
    for (int stage = part; stage < x->stages; stage += x->parts)
        if (!is_within(x, x->sizes->config.program->rank_of[stage]) ||
            (x->sizes->host[stage] >= 0 && !is_within(x, x->sizes->host[stage])))
            return 0;
    return 1;
}

/* The left stage [left, left_end) with as many blocks of the right one. */
static int
fits(pairer *x, int pair, int left, int left_end, int right, int count)
{
    int other = right_of(x, pair), from = x->turns ? right - count : right;
    x->work++;
    touch(x, pair);
    touch(x, other);
    add_blocks(x, pair, left, left_end);
    add_blocks(x, other, from, from + count);
    return are_within(x, pair) && are_within(x, other);
}

static double
seconds_of(const pairer *x, int from, int to)
{
    return x->pace->until[to] - x->pace->until[from];
}

static double
larger(double a, double b)
{
    return a > b ? a : b;
}

static double
pace_of(pairer *x, int part, int other, double part_s, double other_s)
{
    const int32_t *rank_of = x->sizes->config.program->rank_of;
    double slowest = 0.0, longest = larger(part_s, other_s);
    if (x->stages == x->parts) /* of two stages, or one, alone */
        return (part != other && rank_of[part] == rank_of[other] ? part_s + other_s : longest) + longest * x->pace->waits;
    for (int stage = part; stage < x->stages; stage += x->parts)
        x->seconds[rank_of[stage]] = 0.0;
    for (int stage = other; stage < x->stages; stage += x->parts)
        x->seconds[rank_of[stage]] = 0.0;
    for (int stage = part; stage < x->stages; stage += x->parts)
        slowest = larger(slowest, x->seconds[rank_of[stage]] += part_s);
    for (int stage = other; stage < x->stages && other != part; stage += x->parts)
        slowest = larger(slowest, x->seconds[rank_of[stage]] += other_s);
    return slowest + longest * x->pace->waits;
}

/* Of the pair with these stages; without a pace all are as good. */
static double
pace_of_pair(pairer *x, int pair, int left, int left_end, int right, int count)
{
    if (x->pace == NULL)
        return 0.0;
    int from = x->turns ? right - count : right;
    return pace_of(x, pair, right_of(x, pair), seconds_of(x, left, left_end), seconds_of(x, from, from + count));
}

static double
pace_of_middle(pairer *x, int from, int to)
{
    return x->pace == NULL ? 0.0 : pace_of(x, x->pairs, x->pairs, seconds_of(x, from, to), 0.0);
}

/* Where it stands between them. */
static int
fits_in_the_middle(pairer *x, int from, int to)
{
    touch(x, x->pairs);
    add_blocks(x, x->pairs, from, to);
    return are_within(x, x->pairs);
}

/* So many blocks, wherever they are. */
static int
may_fit(pairer *x, int pair, int count, int other, int more)
{
    x->work++;
    touch(x, pair);
    touch(x, other);
    add_least(x, pair, count);
    if (other != pair)
        add_least(x, other, more);
    return are_within(x, pair) && are_within(x, other);
}

static int
is_too_much(const pairer *x)
{
    return x->work > MOST_WORK || tp_deadline_late();
}

/* ---- all pairs ----------------------------------------------------------------------------------------------------------- */

/* Not too many seconds are left: a stage is the longest of its rank, or one of a rank's two is at least half of what that takes. */
static int
may_be_faster(const pairer *x, int pair, int left, int right, int middle)
{
    if (x->pace == NULL || x->less == INFINITY) /* of which no stages are no share: 0 x INFINITY is NaN */
        return 1;
    double left_s = x->turns ? seconds_of(x, left, right) : seconds_of(x, left, middle) + seconds_of(x, right, x->blocks);
    int odd = x->turns && x->parts % 2;
    return left_s <= ((x->pairs - pair) * x->pair_s + odd * x->stage_s) * ROUNDED_UP;
}

/* The blocks that are left for a pair and those behind it are not too few, and not too many. */
static int
leads_on(const pairer *x, int pair, int left, int right, int middle)
{
    if (!may_be_faster(x, pair, left, right, middle))
        return 0;
    const int32_t *lefts = &x->behind[pair], *rights = lefts + x->pairs + 1, *together = rights + x->pairs + 1;
    int behind = x->pairs - pair, count = middle - left, more = x->blocks - right;
    if (x->turns)
        return right - left >= 2 * behind + x->parts % 2 && right - left <= *together;
    return count >= behind && count <= *lefts && more >= behind && more <= *rights && count + more <= *together;
}

static int
lesser(int a, int b)
{
    return a < b ? a : b;
}

/* All places that a pair can leave to the next one. */
static void
go_on_from(pairer *x, int pair, int left, int right, int middle)
{
    int most = lesser(x->width[right_of(x, pair)], x->turns ? right - left - 1 : x->blocks - right);
    int last = lesser(left + x->width[pair], (x->turns ? right : middle) - (x->pairs - 1 - pair)); /* a block for each behind it */
    double before = *slowest_to(x, pair, left, right);
    for (int end = left + 1; end <= last; end++) {
        most = x->turns ? lesser(most, right - end) : most;
        while (most > 0 && pace_of_pair(x, pair, left, end, right, most) >= x->less)
            most--;
        while (most > 0 && !fits(x, pair, left, end, right, most))
            most--;
        if (most <= 0)
            return;
        for (int count = 1; count <= most; count++) {
            int next = x->turns ? right - count : right + count;
            double slowest = larger(before, pace_of_pair(x, pair, left, end, right, count)), *place = slowest_to(x, pair + 1, end, next);
            if (slowest < *place && leads_on(x, pair + 1, end, next, middle))
                *place = slowest;
        }
    }
}

/* Where a left stage may begin, and a right one beside it. */
static int
last_left(const pairer *x, int middle)
{
    return x->turns ? x->blocks : middle;
}

static int
first_right(const pairer *x, int left, int middle)
{
    return x->turns ? left : middle;
}

/* All places from which a partition ends, by the slowest of all; *left, *right: the best. The middle is where right stages begin,
 * unless they turn. */
static double
best_end(pairer *x, int middle, int *left, int *right)
{
    double best = INFINITY;
    for (int from = x->pairs; from <= last_left(x, middle); from++)
        for (int to = first_right(x, from, middle); to <= x->blocks; to++) {
            double slowest = *slowest_to(x, x->pairs, from, to);
            int odd = x->turns && x->parts % 2;
            if (slowest >= best || (odd ? !fits_in_the_middle(x, from, to) : from != (x->turns ? to : middle)))
                continue;
            slowest = odd ? larger(slowest, pace_of_middle(x, from, to)) : slowest;
            if (slowest >= best || slowest >= x->less)
                continue;
            best = slowest;
            *left = from;
            *right = to;
        }
    return best;
}

static void
forget(pairer *x, int middle)
{
    for (int pair = 0; pair <= x->pairs; pair++)
        for (int from = pair; from <= last_left(x, middle); from++)
            for (int to = first_right(x, from, middle); to <= x->blocks; to++)
                *slowest_to(x, pair, from, to) = INFINITY;
    x->work += (int64_t)(x->places / PLACES_A_QUESTION);
}

/* INFINITY: there are none, or there is too much to be looked at. */
static double
reach(pairer *x, int middle, int *left, int *right)
{
    if (x->pace != NULL) {
        x->stage_s = x->less / (1.0 + x->pace->waits);
        x->pair_s = x->meet ? x->less / (1.0 + 0.5 * x->pace->waits) : 2.0 * x->stage_s;
    }
    if (!leads_on(x, 0, 0, middle, middle))
        return INFINITY;
    forget(x, middle);
    *slowest_to(x, 0, 0, middle) = 0.0;
    for (int pair = 0; pair < x->pairs; pair++)
        for (int from = pair; from <= last_left(x, middle) && !is_too_much(x); from++)
            for (int to = first_right(x, from, middle); to <= x->blocks; to++)
                if (*slowest_to(x, pair, from, to) < INFINITY)
                    go_on_from(x, pair, from, to, middle);
    return is_too_much(x) ? INFINITY : best_end(x, middle, left, right);
}

/* One place before that from which the pair can leave it, no slower. */
static void
step_back(pairer *x, int pair, int middle, int *left, int *right)
{
    int end = *left, next = *right;
    double slowest = *slowest_to(x, pair + 1, end, next);
    for (*left = end - 1; *left >= pair; --*left)
        for (int count = 1; count <= x->width[right_of(x, pair)]; count++) {
            *right = x->turns ? next + count : next - count;
            if (*right >= first_right(x, *left, middle) && *right <= x->blocks && *slowest_to(x, pair, *left, *right) <= slowest &&
                pace_of_pair(x, pair, *left, end, *right, count) <= slowest && fits(x, pair, *left, end, *right, count))
                return;
        }
}

static void
trace(pairer *x, int middle, int left, int right, int32_t *boundary)
{
    for (int pair = x->pairs; pair >= 0; pair--) {
        boundary[pair] = left;
        boundary[x->turns ? x->parts - pair : x->pairs + pair] = right;
        if (pair > 0)
            step_back(x, pair - 1, middle, &left, &right);
    }
}

/* ---- which pairs --------------------------------------------------------------------------------------------------------- */

static int
are_paired(const pairer *x, int part, int other)
{
    return part == other || (x->turns ? part + other == x->parts - 1 : abs(part - other) == x->pairs);
}

/* Do all that hold of a stage hold of its pair alone? */
static int
are_pairs(const pairer *x)
{
    const tp_program *program = x->sizes->config.program;
    for (int i = 0; i < x->stages; i++)
        for (int j = 0; j < x->stages; j++) {
            int r = program->rank_of[i], host = x->sizes->host[i];
            int meet = r == program->rank_of[j] || r == x->sizes->host[j] || (host >= 0 && host == x->sizes->host[j]);
            if (meet && !are_paired(x, i % x->parts, j % x->parts))
                return 0;
        }
    return 1;
}

static int
has_both(const pairer *x)
{
    const tp_program *program = x->sizes->config.program;
    for (int pair = 0; pair < x->pairs; pair++) {
        int there = 0;
        for (int i = pair; i < x->stages; i += x->parts)
            for (int j = right_of(x, pair); j < x->stages; j += x->parts)
                there |= program->rank_of[i] == program->rank_of[j];
        if (!there)
            return 0;
    }
    return 1;
}

/* How far a pair's stages go, each where the other has one block, and together. */
static int
look_at_pair(pairer *x, int pair, int32_t *together)
{
    int other = right_of(x, pair), most = x->blocks - x->parts + 1, *left = &x->width[pair], *right = &x->width[other];
    *together = 0;
    *right = 0;
    while (*right < most && may_fit(x, pair, 1, other, *right + 1))
        ++*right;
    int more = *right;
    for (*left = 1; *left <= most; ++*left) {
        while (more > 0 && !may_fit(x, pair, *left, other, more))
            more--;
        if (more == 0)
            break;
        *together = *left + more > *together ? *left + more : *together;
    }
    --*left;
    return *left > 0 && *right > 0;
}

static int
look_at_pairs(pairer *x)
{
    int32_t *lefts = x->behind, *rights = lefts + x->pairs + 1, *together = rights + x->pairs + 1;
    int middle = 0;
    if (x->turns && x->parts % 2)
        while (middle < x->blocks - x->parts + 1 && may_fit(x, x->pairs, middle + 1, x->pairs, 0))
            middle++;
    lefts[x->pairs] = rights[x->pairs] = 0;
    together[x->pairs] = middle;
    for (int pair = x->pairs - 1; pair >= 0; pair--) {
        if (!look_at_pair(x, pair, &together[pair]))
            return 0;
        lefts[pair] = lefts[pair + 1] + x->width[pair];
        rights[pair] = rights[pair + 1] + x->width[right_of(x, pair)];
        together[pair] += together[pair + 1];
    }
    return 1;
}

/* The best of all middles, each by what is better than the best of those before. */
static tp_answer
look(pairer *x, int32_t *boundary)
{
    int left = 0, right = 0; /* reach() sets both of what is finite, but gcc 13 does not see that */
    int first = x->turns ? x->blocks : x->pairs, last = x->turns ? x->blocks : x->blocks - x->pairs;
    tp_answer answer = TP_NO;
    if (!look_at_pairs(x))
        return TP_NO;
    for (int middle = first; middle <= last && (answer == TP_NO || x->pace != NULL); middle++) {
        double slowest = reach(x, middle, &left, &right);
        if (is_too_much(x))
            return answer == TP_YES ? TP_YES : TP_UNKNOWN;
        if (slowest == INFINITY)
            continue;
        trace(x, middle, left, right, boundary);
        x->less = slowest;
        answer = TP_YES;
    }
    return answer;
}

static int
take_room(pairer *x, int ranks)
{
    size_t pairs = (size_t)x->pairs + 1;
    x->slowest = malloc(x->places * sizeof *x->slowest);
    x->bytes = malloc(2 * (size_t)ranks * sizeof *x->bytes);
    x->seconds = malloc((size_t)ranks * sizeof *x->seconds);
    x->width = malloc(((size_t)x->parts + 3 * pairs) * sizeof *x->width);
    x->least = calloc((size_t)x->stages * ((size_t)x->blocks + 1), sizeof *x->least);
    if (x->slowest == NULL || x->bytes == NULL || x->seconds == NULL || x->width == NULL || x->least == NULL)
        return 0;
    x->workspace = x->bytes + ranks;
    x->behind = x->width + x->parts;
    return 1;
}

tp_status
tp_engine_find_pairs(tp_engine_sizes *sizes, int64_t limit, const tp_engine_pace *pace, double less, int32_t *boundary,
                     tp_answer *answer)
{
    const tp_program *program = sizes->config.program;
    pairer x = {.sizes = sizes, .limit = limit, .stages = program->stages, .parts = tp_program_copy_stages(program),
                .blocks = sizes->blocks, .pace = pace, .less = less};
    size_t width = (size_t)x.blocks + 1;
    *answer = TP_UNKNOWN;
    x.pairs = x.parts / 2;
    x.places = ((size_t)x.pairs + 1) * width * width;
    for (x.turns = 1; x.turns >= 0 && !are_pairs(&x); x.turns--)
        continue;
    if (x.turns < 0 || (!x.turns && x.parts % 2) || x.places > MOST_PLACES)
        return TP_OK;
    x.meet = has_both(&x);
    tp_status status = TP_OK;
    if (take_room(&x, program->ranks))
        *answer = look(&x, boundary);
    else
        status = tp_fail(TP_EMEMORY, "no memory for %d blocks on %d pairs of stages", x.blocks, x.pairs);
    free(x.slowest);
    free(x.bytes);
    free(x.seconds);
    free(x.width);
    free(x.least);
    return status == TP_OK ? tp_deadline_check_told() : status;
}
