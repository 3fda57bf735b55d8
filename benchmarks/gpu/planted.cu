/* Four mistakes, one for each tool of compute-sanitizer, which benchmarks/gpu_sanitize.py has them find: a tool that watches
 * nothing (another name of our kernels, say) finds nothing either. Their names are as its filter wants them. */
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>

static __global__ void
attention_planted_memcheck(int *x, int n)
{
    if (threadIdx.x == 0)
        x[n] = 1; /* one behind the end */
}

static __global__ void
attention_planted_racecheck(int *x, int n)
{
    __shared__ int all[128];
    all[threadIdx.x] = n + (int)threadIdx.x;
    x[threadIdx.x] = all[127 - threadIdx.x]; /* of another warp, which may not have written it */
}

static __global__ void
attention_planted_synccheck(int *x, int n)
{
    if (threadIdx.x % 32 < 16)
        __syncwarp(n == 128 ? 0xffff0000u : 0xffffffffu); /* the caller is not of those that it names */
    x[threadIdx.x] = n;
}

static __global__ void
attention_planted_initcheck(int *x, int n)
{
    x[threadIdx.x] = x[n - 1 - (int)threadIdx.x] + 1; /* nobody has written there */
}

int
main(int argc, char **argv)
{
    int *x = nullptr;
    const char *tool = argc > 1 ? argv[1] : "";
    if (cudaMalloc(&x, 128 * sizeof *x) != cudaSuccess)
        return 2;
    if (!strcmp(tool, "memcheck"))
        attention_planted_memcheck<<<1, 128>>>(x, 128);
    else if (!strcmp(tool, "racecheck"))
        attention_planted_racecheck<<<1, 128>>>(x, 128);
    else if (!strcmp(tool, "synccheck"))
        attention_planted_synccheck<<<1, 128>>>(x, 128);
    else if (!strcmp(tool, "initcheck"))
        attention_planted_initcheck<<<1, 128>>>(x, 128);
    else
        return 3;
    printf("%s: %s\n", tool, cudaGetErrorString(cudaDeviceSynchronize()));
    return 0;
}
