/* Faults that a test asks libnccls of processes for. FAKE_FAULT="rank call nth" kills the process of that rank at its nth call of
 * that name, or, with -nth, has that send or receive fail; "rank ncclGetVersion number" gives that rank of a launcher's (RANK) a
 * library of that version. With FAKE_STUCK=1 no abort ends, with "others" none before those of a communicator's other ranks have
 * begun (fake_nccl_processes.c alone). */
#ifndef TP_TESTS_FAKE_FAULTS_H
#define TP_TESTS_FAKE_FAULTS_H

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/dl_nccl.h"

static int own_rank = -1; /* in the first communicator */

static int
fault(const char *call)
{
    static struct {
        const char *call;
        int count;
    } made[16];
    const char *text = getenv("FAKE_FAULT");
    char name[64];
    int i = 0, rank, nth;
    while (made[i].call != NULL && strcmp(made[i].call, call) != 0)
        i++;
    made[i].call = call;
    made[i].count++;
    if (text == NULL || sscanf(text, "%d %63s %d", &rank, name, &nth) != 3 || rank != own_rank || strcmp(name, call) != 0)
        return NC_SUCCESS;
    if (nth == made[i].count)
        raise(SIGKILL);
    return nth == -made[i].count ? NC_SYSTEM_ERROR : NC_SUCCESS;
}

static int
is_stuck(const char *how)
{
    const char *told = getenv("FAKE_STUCK");
    return told != NULL && strcmp(told, how) == 0;
}

static int
version_told(int version)
{
    const char *text = getenv("FAKE_FAULT"), *own = getenv("RANK");
    int rank, number;
    if (text != NULL && own != NULL && sscanf(text, "%d ncclGetVersion %d", &rank, &number) == 2 && rank == atoi(own))
        return number;
    return version;
}

#endif
