/* What C tests say where something does not hold: CHECK goes on and is counted, MUST ends the process. */
#ifndef TESTS_C_CHECK_H
#define TESTS_C_CHECK_H

#include <stdio.h>
#include <unistd.h>

#include "csrc/base/status.h"

__attribute__((unused)) static int failures;

#define CHECK_SAYS(truth) fprintf(stderr, "%s:%d: %s does not hold: \"%s\"\n", __FILE__, __LINE__, #truth, tp_error_message())

/* The first twenty are told. */
#define CHECK(truth)                                                                                                   \
    do {                                                                                                               \
        if (!(truth) && ++failures <= 20)                                                                              \
            CHECK_SAYS(truth);                                                                                         \
    } while (0)

#define MUST(truth)                                                                                                    \
    do {                                                                                                               \
        if (!(truth)) {                                                                                                \
            CHECK_SAYS(truth);                                                                                         \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)

#endif
