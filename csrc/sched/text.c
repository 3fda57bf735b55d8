/* Programs as text, and as torch.distributed.pipelining's CSV: printed and parsed. */
#include "csrc/sched/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/deadline.h"

#define OVERLAP "OVERLAP_F_B" /* torch's word for a pair */

/* What torch's compute_comms CSV has beside: messages, and what becomes of a stage's weights where FSDP shards them, for which there
 * is no instruction. */
enum { UNSHARD = TP_OPS, RESHARD, REDUCE_GRAD };
static const struct {
    const char *name;
    int op;
} torchs[] = {{"SEND_F", TP_OP_SF},   {"RECV_F", TP_OP_RF},   {"SEND_B", TP_OP_SB},          {"RECV_B", TP_OP_RB},
              {"UNSHARD", UNSHARD},   {"RESHARD", RESHARD},   {"REDUCE_GRAD", REDUCE_GRAD}};
/* And what a stage has heard of them. */
enum { HELD = 1, GIVEN = 2, BARE = 4, REDUCED = 8, STAGES = 65536 };

/* ---- printing ------------------------------------------------------------------------------------------------------------ */

static char *
put_number(char *to, unsigned value)
{
    char digits[12];
    int count = 0;
    do
        digits[count++] = (char)('0' + value % 10);
    while ((value /= 10) != 0);
    while (count > 0)
        *to++ = digits[--count];
    return to;
}

static int
has_peer(int op)
{
    return tp_sched_is_message(op) || tp_sched_is_guest(op) || op == TP_OP_AR;
}

/* A program of 8 million instructions prints in well under a second only without snprintf per word. */
static size_t
put_word(const tp_instr *instr, int csv, char *word)
{
    char *to = put_number(word, instr->stage);
    for (const char *name = tp_op_name(instr->op); *name != 0; name++)
        *to++ = *name;
    to = put_number(to, instr->micro);
    if (!csv) {
        *to++ = '.';
        to = put_number(to, instr->slice);
        if (instr->flags & TP_HALVES)
            *to++ = instr->flags & TP_HALF_FIRST ? 'a' : 'b';
        if (instr->flags & (TP_HALF_JOINED | TP_WITHIN))
            *to++ = '+';
        if (instr->flags & TP_OVERLAPS)
            *to++ = '&';
        if (instr->flags & TP_TWO_PLACES)
            *to++ = '&';
        if (has_peer(instr->op)) {
            *to++ = '@';
            to = put_number(to, (unsigned)(uint16_t)instr->peer);
        }
    }
    *to = 0;
    return (size_t)(to - word);
}

size_t
tp_instr_print(const tp_instr *instr, char word[TP_WORD])
{
    return put_word(instr, 0, word);
}

static int
in_csv(int op)
{
    return op == TP_OP_F || op == TP_OP_B || op == TP_OP_I || op == TP_OP_W;
}

static size_t
print(const tp_program *program, int csv, char *text, size_t size)
{
    size_t length = 0;
    int64_t steps = 0;
    for (int r = 0; r < program->ranks; r++) {
        int first = 1, pair = 0;
        for (int64_t i = program->begin[r]; i < program->begin[r + 1] && !tp_deadline_told_after(&steps, 16); i++) {
            if (csv && !in_csv(program->code[i].op))
                continue;
            char word[TP_WORD + 20], *to = word;
            int opens = csv && program->code[i].flags & TP_OVERLAPS;
            if (!first)
                *to++ = !csv ? ' ' : pair ? ';' : ',';
            if (opens)
                *to++ = '(';
            to += put_word(&program->code[i], csv, to);
            if (pair)
                to = strcpy(to, ")" OVERLAP) + sizeof OVERLAP;
            pair = opens;
            size_t count = (size_t)(to - word);
            if (length + count <= size)
                memcpy(text + length, word, count);
            length += count;
            first = 0;
        }
        if (first && r + 1 == program->ranks) { /* an idle rank: an empty last line would be none (get_lines) */
            if (length < size)
                text[length] = ',';
            length++;
        }
        if (length < size)
            text[length] = '\n';
        length++;
    }
    if (size > 0)
        text[length < size ? length : size - 1] = 0;
    return length;
}

size_t
tp_program_print(const tp_program *program, char *text, size_t size)
{
    return print(program, 0, text, size);
}

size_t
tp_program_print_csv(const tp_program *program, char *text, size_t size)
{
    return print(program, 1, text, size);
}

tp_status
tp_program_can_csv(const tp_program *program)
{
    if (program->copies > 1)
        return tp_sched_refuse(program, 0, 0,
                               "torch.distributed.pipelining has no word for two copies of a model: one would be right");
    for (int r = 0; r < program->ranks; r++)
        for (int64_t i = program->begin[r]; i < program->begin[r + 1]; i++) {
            const tp_instr *instr = &program->code[i];
            if (instr->slice > 0)
                return tp_sched_refuse(program, r, i - program->begin[r],
                                       "torch.distributed.pipelining has no word for token slices: one slice per "
                                       "micro-batch would be right");
            if (instr->flags & TP_HALVES)
                return tp_sched_refuse(program, r, i - program->begin[r],
                                       "torch.distributed.pipelining has no word for half a micro-batch: whole "
                                       "forwards would be right");
            if (instr->op == TP_OP_R || tp_sched_is_beside(instr->op) || tp_sched_is_guest(instr->op))
                return tp_sched_refuse(
                    program, r, i - program->begin[r],
                    "torch.distributed.pipelining has no word for %s: only F, B, I and W compute there",
                    tp_op_name(instr->op));
        }
    return TP_OK;
}

/* ---- parsing ------------------------------------------------------------------------------------------------------------- */

typedef struct {
    const char *at, *end;
    int rank, word, cell, csv; /* cell: of a CSV's line, from 1 */
    int half;                  /* of a CSV's overlapping pair: 1 before its first action, 2 before its second */
    uint8_t *heard;            /* [STAGES] of a CSV */
} reader;

static tp_status
bad_word(const reader *r, const char *from, const char *right)
{
    int length = 0;
    while (from + length < r->end && length < 32 && strchr(" \t,\r\n", from[length]) == NULL)
        length++;
    if (r->csv)
        return tp_fail(TP_EVALUE, "line %d, cell %d, '%.*s': %s", r->rank + 1, r->cell, length, from, right);
    return tp_fail(TP_EVALUE, "rank %d, word %d, '%.*s': %s", r->rank, r->word, length, from, right);
}

static int
is_digit(const reader *r)
{
    return r->at < r->end && *r->at >= '0' && *r->at <= '9';
}

/* Digits up to `most`; -1 if there are none or they say more. */
static int
get_number(reader *r, int most)
{
    if (!is_digit(r))
        return -1;
    int value = 0;
    for (; is_digit(r); r->at++) {
        value = value * 10 + (*r->at - '0');
        if (value > most)
            return -1;
    }
    return value;
}

static int
get_op(reader *r)
{
    const char *name = r->at;
    while (r->at < r->end && ((*r->at >= 'A' && *r->at <= 'Z') || *r->at == '_'))
        r->at++;
    size_t length = (size_t)(r->at - name);
    for (int op = 0; op < TP_OPS; op++)
        if ((!r->csv || in_csv(op)) && strlen(tp_op_name(op)) == length && memcmp(tp_op_name(op), name, length) == 0)
            return op;
    for (size_t k = 0; r->csv && k < sizeof torchs / sizeof *torchs; k++)
        if (strlen(torchs[k].name) == length && memcmp(torchs[k].name, name, length) == 0)
            return torchs[k].op;
    return -1;
}

static int
get_letter(reader *r, char letter)
{
    int there = r->at < r->end && *r->at == letter;
    r->at += there;
    return there;
}

/* `a` or `b` behind the slice of F, SF and RF; `+` behind those of F, and behind the slice of R. */
static unsigned
get_half(reader *r, int op)
{
    if (op == TP_OP_R)
        return get_letter(r, '+') ? TP_WITHIN : 0;
    if (op != TP_OP_F && op != TP_OP_SF && op != TP_OP_RF)
        return 0;
    unsigned half = get_letter(r, 'a') ? TP_HALF_FIRST : get_letter(r, 'b') ? TP_HALF_SECOND : 0;
    return half != 0 && op == TP_OP_F && get_letter(r, '+') ? half | TP_HALF_JOINED : half;
}

static unsigned
get_overlap(reader *r, int op)
{
    if ((op != TP_OP_F && !tp_sched_is_backward(op) && !tp_sched_is_swap(op)) || !get_letter(r, '&'))
        return 0;
    return op == TP_OP_SO && get_letter(r, '&') ? TP_BESIDE | TP_TWO_PLACES : TP_OVERLAPS;
}

/* What stands before a CSV's action: `(` of an overlapping pair. */
static void
get_pair_begin(reader *r)
{
    if (r->half == 0 && get_letter(r, '('))
        r->half = 1;
}

/* And behind it: `;` within a pair, `)OVERLAP_F_B` at its end. *flags: of the action. */
static tp_status
get_pair_end(reader *r, const char *from, unsigned *flags)
{
    static const char right[] = "(<action>;<action>)" OVERLAP ", a forward and a backward, would be right";
    if (r->half == 1) {
        *flags |= TP_OVERLAPS;
        r->half = 2;
        return get_letter(r, ';') ? TP_OK : bad_word(r, from, right);
    }
    if (r->half == 2) {
        size_t length = sizeof ")" OVERLAP - 1;
        if ((size_t)(r->end - r->at) < length || memcmp(r->at, ")" OVERLAP, length) != 0)
            return bad_word(r, from, right);
        r->at += length;
        r->half = 0;
    }
    return TP_OK;
}

/* A CSV's stage computes between its UNSHARD and its RESHARD, or has neither, and its gradients are reduced behind the last. */
static tp_status
hear(reader *r, const char *from, int stage, int op)
{
    uint8_t *heard = &r->heard[stage];
    if (op == UNSHARD) {
        if (*heard & (HELD | BARE))
            return bad_word(r, from, *heard & HELD ? "its stage has its weights by an UNSHARD already: RESHARD between the two, or one, "
                                                     "would be right"
                                                   : "its stage computed before it: UNSHARD before that would be right");
        *heard |= HELD;
    } else if (op == RESHARD) {
        if (!(*heard & HELD))
            return bad_word(r, from, "its stage has no weights to give back: UNSHARD before it would be right");
        *heard = (uint8_t)((*heard & ~HELD) | GIVEN);
    } else if (op == REDUCE_GRAD) {
        if (*heard & REDUCED)
            return bad_word(r, from, "it is done twice");
        *heard |= REDUCED;
    } else if (in_csv(op)) {
        if (!(*heard & HELD) && *heard & GIVEN)
            return bad_word(r, from, "its stage's weights are given back by RESHARD: UNSHARD before it would be right");
        if (*heard & REDUCED && op != TP_OP_F)
            return bad_word(r, from, "its stage's REDUCE_GRAD came before it: behind the stage's last backward would be right");
        *heard |= *heard & HELD ? 0 : BARE;
    }
    return TP_OK;
}

/* An action; op of *out: TP_OPS or more where it is no instruction. */
static tp_status
get_action(reader *r, tp_instr *out)
{
    const char *from = r->at;
    unsigned flags = 0;
    get_pair_begin(r);
    int stage = get_number(r, STAGES - 1), op = stage < 0 ? -1 : get_op(r), micro = 0;
    if (stage < 0)
        return bad_word(r, from, "a stage from 0 to 65535 first would be right");
    if (op < 0 || (r->half != 0 && !in_csv(op)))
        return bad_word(r, from,
                        r->half != 0 ? "only F, B and I are read in pairs of " OVERLAP
                                     : "only the actions F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B, UNSHARD, RESHARD and REDUCE_GRAD "
                                       "of torch.distributed.pipelining, and pairs of them in " OVERLAP ", are read");
    if (op < TP_OPS && (micro = get_number(r, 65535)) < 0)
        return bad_word(r, from, "a micro-batch from 0 to 65535 behind the operation would be right");
    TP_TRY(hear(r, from, stage, op));
    TP_TRY(get_pair_end(r, from, &flags));
    *out = (tp_instr){.op = (uint16_t)op, .stage = (uint16_t)stage, .micro = (uint16_t)micro, .peer = -1, .flags = (uint16_t)flags};
    return r->half == 0 && r->at < r->end && strchr(" \t,\r\n", *r->at) == NULL
               ? bad_word(r, from, "there is more behind it than belongs to a word")
               : TP_OK;
}

static tp_status
get_word(reader *r, tp_instr *out)
{
    const char *from = r->at;
    int stage = get_number(r, STAGES - 1);
    if (stage < 0)
        return bad_word(r, from, "a stage from 0 to 65535 first would be right");
    int op = get_op(r);
    if (op < 0)
        return bad_word(r, from, "an operation of F B I W R SF RF SB RB SO SI AR OPT SE RE SL RL U behind the stage would be "
                                 "right");
    int micro = get_number(r, 65535), slice = 0, peer = -1;
    if (micro < 0)
        return bad_word(r, from, "a micro-batch from 0 to 65535 behind the operation would be right");
    if (r->at >= r->end || *r->at++ != '.' || (slice = get_number(r, 65535)) < 0)
        return bad_word(r, from, "`.` and a slice from 0 to 65535 behind the micro-batch would be right");
    unsigned flags = get_half(r, op);
    flags |= get_overlap(r, op);
    int marked = r->at < r->end && *r->at == '@';
    r->at += marked;
    if (marked != has_peer(op) || (marked && (peer = get_number(r, 32766)) < 0))
        return bad_word(r, from,
                        "`@` and a rank behind SF, RF, SB, RB, SE, RE, SL, RL and AR, and behind no other, would be right");
    if (r->at < r->end && strchr(" \t,\r\n", *r->at) == NULL)
        return bad_word(r, from, "there is more behind it than belongs to a word");
    *out = (tp_instr){.op = (uint16_t)op,
                      .stage = (uint16_t)stage,
                      .micro = (uint16_t)micro,
                      .slice = (uint16_t)slice,
                      .peer = (int16_t)peer,
                      .flags = (uint16_t)flags};
    return TP_OK;
}

typedef struct {
    tp_instr *code;
    int64_t *counts;
    size_t length, room, ranks, rank_room;
} pile;

static tp_status
add_rank(pile *p, int64_t count)
{
    if (p->ranks == p->rank_room) {
        size_t room = p->rank_room * 2 + 16;
        int64_t *counts = realloc(p->counts, room * sizeof *counts);
        if (counts == NULL)
            return tp_fail(TP_EMEMORY, "no memory for %zu ranks", room);
        p->counts = counts;
        p->rank_room = room;
    }
    p->counts[p->ranks++] = count;
    return TP_OK;
}

static tp_status
add_instr(pile *p, tp_instr instr)
{
    if (p->length == p->room) {
        size_t room = p->room + p->room / 2 + 64;
        tp_instr *code = realloc(p->code, room * sizeof *code);
        if (code == NULL)
            return tp_fail(TP_EMEMORY, "no memory for %zu instructions", room);
        p->code = code;
        p->room = room;
    }
    p->code[p->length++] = instr;
    return TP_OK;
}

/* Empty lines are idle ranks, but those behind the last that has a word or a comma: print(p, file=f) leaves one there. */
static tp_status
get_lines(reader *r, pile *p)
{
    size_t before = 0, ranks = 0;
    int64_t steps = 0;
    while (r->at < r->end) {
        char c = *r->at;
        if (c == '\n') {
            TP_TRY(add_rank(p, (int64_t)(p->length - before)));
            if (p->length > before || r->cell > 1)
                ranks = p->ranks;
            before = p->length;
            r->rank++;
            r->word = 0;
            r->cell = 1;
            r->at++;
        } else if (c == ' ' || c == '\t' || c == ',' || c == '\r') {
            r->cell += c == ',';
            r->at++;
        } else {
            tp_instr instr;
            TP_TRY(tp_deadline_check_after(&steps, 32));
            TP_TRY(r->csv ? get_action(r, &instr) : get_word(r, &instr));
            if (instr.op < TP_OPS)
                TP_TRY(add_instr(p, instr));
            r->word++;
        }
    }
    if (p->length > before || r->cell > 1) {
        TP_TRY(add_rank(p, (int64_t)(p->length - before)));
        ranks = p->ranks;
    }
    p->ranks = ranks;
    return TP_OK;
}

static tp_status
parse(const char *text, size_t length, int csv, tp_program **out)
{
    reader r = {text, text + length, 0, 0, 1, csv, 0, csv ? calloc(STAGES, 1) : NULL};
    pile p = {0};
    tp_status status = csv && r.heard == NULL ? tp_fail(TP_EMEMORY, "no memory for %d stages", STAGES) : get_lines(&r, &p);
    if (status == TP_OK && p.length == 0)
        status = tp_fail(TP_EVALUE, "the text has no instruction");
    if (status == TP_OK && p.ranks > 32767)
        status = tp_fail(TP_EVALUE, "the text has %zu lines, one per rank: at most 32767 would be right", p.ranks);
    if (status == TP_OK)
        status = tp_program_from_code((int)p.ranks, p.counts, p.code, 0, out);
    free(p.code);
    free(p.counts);
    free(r.heard);
    return status;
}

tp_status
tp_program_parse(const char *text, size_t length, tp_program **out)
{
    return parse(text, length, 0, out);
}

/* Messages of a CSV do not say between which ranks they go, nor which buffers. Are they what the compute order needs? Then `lower`
 * makes them anew, and the program is the compute order alone. */
static tp_status
without_messages(tp_program *program, tp_program **out)
{
    for (int64_t i = 0; i < program->begin[program->ranks]; i++) {
        tp_instr *instr = &program->code[i];
        int to = instr->stage + (instr->op == TP_OP_SF || instr->op == TP_OP_RB ? 1 : -1);
        if (tp_sched_is_message(instr->op)) /* beyond the ends check refuses it */
            instr->peer = (int16_t)program->rank_of[to >= 0 && to < program->stages ? to : instr->stage];
    }
    if (tp_sched_is_dense(program))
        TP_TRY(tp_program_assign_slots(program));
    TP_TRY(tp_program_check(program));
    return tp_program_strip(program, out);
}

tp_status
tp_program_parse_csv(const char *text, size_t length, tp_program **out)
{
    tp_program *program = NULL;
    TP_TRY(parse(text, length, 1, &program));
    int talks = (tp_sched_ops(program) & TP_SCHED_MESSAGES) != 0;
    tp_status status = talks ? without_messages(program, out) : tp_program_check(program);
    if (status == TP_OK && !talks) {
        *out = program;
        return TP_OK;
    }
    tp_program_close(program);
    if (status == TP_OK)
        return TP_OK;
    if (status != TP_ESCHEDULE)
        return status;
    char why[1024]; /* tp_fail writes where tp_error_message reads */
    int rank = tp_error_rank(), position = tp_error_position();
    snprintf(why, sizeof why, "%s", tp_error_message());
    status = tp_fail(TP_ESCHEDULE, "line %d: %s", rank + 1, why);
    tp_error_locate(rank, position);
    return status;
}
