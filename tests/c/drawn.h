/* Whole numbers for tests, drawn from `state`: the same on every machine. */
#ifndef TESTS_C_DRAWN_H
#define TESTS_C_DRAWN_H

#include <stdint.h>

static uint32_t state;

static int
drawn(int low, int high) /* [low, high] */
{
    state = state * 1664525u + 1013904223u;
    return low + (int)((state >> 8) % (unsigned)(high - low + 1));
}

#endif
