/* An order by chance (tp_simt_set_order of 8 and more): of numbers that follow from it. */
#include "cuda/emu/machine.h"

int
tp_simt_chance(simt_machine *m, int n)
{
    m->chance ^= m->chance << 13;
    m->chance ^= m->chance >> 7;
    m->chance ^= m->chance << 17;
    return (int)((m->chance >> 33) % (uint64_t)n);
}

int
tp_simt_at_once(simt_machine *m)
{
    return (m->order & 4) != 0 || ((m->order & SIMT_BY_CHANCE) != 0 && tp_simt_chance(m, 2));
}

static int64_t
common_divisor(int64_t a, int64_t b)
{
    while (b > 0) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

int64_t
tp_simt_chance_begin(simt_machine *m, int64_t blocks)
{
    int64_t step = m->order & 1 ? blocks - 1 : 1;
    m->chance = ((uint64_t)m->order + 1) * 0x9e3779b97f4a7c15u;
    if (m->order & SIMT_BY_CHANCE)
        do
            step = 1 + tp_simt_chance(m, blocks < INT32_MAX ? (int)blocks : INT32_MAX);
        while (common_divisor(blocks, step) != 1);
    return step;
}
