/* LayerNorm of rows far from zero against float64: what the rounding of their means leaves out is not lost, forward, by what was
 * saved, and backward; by a team the same bits. Prints one line per failure; exit code 1 if there was one. */
#include "csrc/backend/backend.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/c/check.h"

enum { ROWS = 70, MOST = 801 }; /* more rows than a member of a team takes at once */

typedef struct {
    float x[ROWS * MOST], dy[ROWS * MOST], gamma[MOST], y[ROWS * MOST], again[ROWS * MOST], dx[ROWS * MOST];
    float mean[ROWS], rstd[ROWS], dgamma[MOST];
} norm_job;

static uint32_t state;

static float
uniform(void) /* [-1, 1) */
{
    state = state * 1664525u + 1013904223u;
    return ldexpf((float)(int32_t)state, -31);
}

/* n elements of each row about `mean`; the first row's are all the same, the second one is about zero. */
static void
fill(norm_job *job, int n, float mean)
{
    state = 7;
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < n; i++) {
            job->x[r * n + i] = (r == 1 ? 0 : mean) + (r == 0 ? 0 : uniform());
            job->dy[r * n + i] = uniform();
        }
    for (int i = 0; i < n; i++)
        job->gamma[i] = 1 + 0.5f * uniform();
}

static double
worse(double so_far, float got, double wanted, double size)
{
    const double error = fabs((double)got - wanted) / size;
    return isnan(error) || error > so_far ? error : so_far;
}

/* The largest errors of y, dx and dgamma, by what they are made of. */
static void
measure(const norm_job *job, int n, double error[3])
{
    static double dgamma[MOST], size[MOST];
    memset(dgamma, 0, sizeof dgamma), memset(size, 0, sizeof size);
    for (int r = 0; r < ROWS; r++) {
        const float *x = job->x + r * n, *dy = job->dy + r * n;
        double mean = 0, squares = 0, g = 0, along = 0;
        for (int i = 0; i < n; i++)
            mean += (double)x[i] / n;
        for (int i = 0; i < n; i++)
            squares += ((double)x[i] - mean) * ((double)x[i] - mean);
        const double rstd = 1 / sqrt(squares / n + 1e-5);
        for (int i = 0; i < n; i++) {
            const double unit = ((double)x[i] - mean) * rstd, d = (double)dy[i];
            g += d * (double)job->gamma[i] / n, along += d * (double)job->gamma[i] * unit / n;
            dgamma[i] += d * unit, size[i] += fabs(d * unit) + fabs(d);
            error[0] = worse(error[0], job->y[r * n + i], unit * (double)job->gamma[i], 1);
        }
        for (int i = 0; i < n; i++)
            error[1] = worse(error[1], job->dx[r * n + i],
                             rstd * ((double)dy[i] * (double)job->gamma[i] - g - ((double)x[i] - mean) * rstd * along), rstd);
    }
    for (int i = 0; i < n; i++)
        error[2] = worse(error[2], job->dgamma[i], dgamma[i], size[i]);
}

static void
run(tp_backend *be, norm_job *job, int n)
{
    const tp_backend_ops *ops = be->ops;
    ops->layernorm(be, ROWS, n, job->x, n, job->gamma, NULL, job->y, n, job->mean, job->rstd);
    ops->layernorm_apply(be, ROWS, n, job->x, n, job->mean, job->rstd, 1, job->gamma, NULL, job->again, n);
    memset(job->dgamma, 0, sizeof job->dgamma);
    ops->layernorm_backward(be, ROWS, n, job->dy, n, job->x, n, job->mean, job->rstd, 1, job->gamma, NULL, 0, job->dx, n,
                            job->dgamma, NULL);
}

static void
check(const char *isa, norm_job *alone, norm_job *shared)
{
    static const int widths[] = {5, 33, MOST};
    static const float means[] = {15, 300, -300, 3000, 1e5f};
    tp_heap *heap = NULL;
    tp_team *team = NULL;
    tp_backend one, two;
    MUST(tp_heap_open(0, &heap) == TP_OK && tp_team_open(2, &team) == TP_OK);
    MUST(tp_cpu_open(isa, heap, NULL, &one) == TP_OK && tp_cpu_open(isa, heap, team, &two) == TP_OK);
    for (int i = 0; i < 15; i++) {
        const int n = widths[i % 3];
        double error[3] = {0, 0, 0};
        fill(alone, n, means[i / 3]), fill(shared, n, means[i / 3]);
        run(&one, alone, n), run(&two, shared, n);
        measure(alone, n, error);
        for (int k = 0; k < 3; k++)
            if (!(error[k] <= 3e-6) && ++failures <= 20)
                fprintf(stderr, "%s: %s of %d columns about %g: %.1e off\n", isa, k == 0 ? "y" : k == 1 ? "dx" : "dgamma", n,
                        (double)means[i / 3], error[k]);
        CHECK(memcmp(alone->again, alone->y, (size_t)(ROWS * n) * sizeof(float)) == 0);
        CHECK(memcmp(shared, alone, sizeof *alone) == 0);
    }
    tp_team_close(team);
    tp_heap_close(heap);
}

int
main(void)
{
    static const char *const isas[] = {"avx512", "avx2", "portable"};
    norm_job *jobs = calloc(2, sizeof *jobs);
    MUST(jobs != NULL);
    for (int i = 0; i < 3; i++)
        if (tp_cpu_ops(isas[i]) != NULL)
            check(isas[i], jobs, jobs + 1);
    free(jobs);
    return failures != 0;
}
