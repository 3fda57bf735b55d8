/* Whether the real libcudnn takes the graphs that cuda/cudnn_graph.c builds: plans for the shapes of the command line, for a GPU
 * that is not here (the first word, its description in JSON). Prints of each its engine and workspace, or what cuDNN said. Built
 * and run by tests/test_cudnn_plans.py. */
#include <stdio.h>
#include <string.h>

#include "cuda/cudnn_graph.h"

static int
describe(const tp_cudnn_library *dnn, const char *json, dn_descriptor *out)
{
    int answer = dnn->create_descriptor(DN_DEVICEPROP, out);
    if (answer == DN_SUCCESS)
        answer = dnn->set(*out, DN_DEVICEPROP_JSON_REPRESENTATION, DN_TYPE_CHAR, (int64_t)strlen(json), json);
    return answer == DN_SUCCESS ? dnn->finalize(*out) : answer;
}

static void
try_one(const tp_cudnn_place *place, const char *text)
{
    long long n[8];
    tp_cudnn_plan *plan = NULL;
    if (sscanf(text, "%lld,%lld,%lld,%lld,%lld,%lld,%lld,%lld", &n[0], &n[1], &n[2], &n[3], &n[4], &n[5], &n[6], &n[7]) != 8) {
        printf("no shape: %s\n", text);
        return;
    }
    tp_attention shape = {n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7]};
    if (tp_cudnn_plan_forward(place, &shape, &plan) == TP_OK)
        printf("engine %lld workspace %zu\n", (long long)tp_cudnn_plan_engine(plan), tp_cudnn_plan_workspace(plan));
    else
        printf("%s\n", tp_error_message());
    tp_cudnn_plan_free(place->dnn, plan);
}

int
main(int count, char **words)
{
    const tp_cudnn_library *dnn;
    dn_descriptor device = NULL;
    if (tp_cudnn_load(&dnn) != TP_OK) {
        printf("%s\n", tp_error_message());
        return 1;
    }
    int answer = describe(dnn, words[1], &device);
    if (answer != DN_SUCCESS) {
        char more[512];
        dnn->last_error(more, sizeof more);
        printf("the device's description: status %d: %s\n", answer, more);
        return 1;
    }
    tp_cudnn_place place = {.dnn = dnn, .deviceprop = device, .workspace_bytes = (size_t)32 << 20};
    for (int i = 2; i < count; i++)
        try_one(&place, words[i]);
    return 0;
}
