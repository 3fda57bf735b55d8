/* How a batch is cut into micro-batches and these into token slices: checked, and as offsets. */
#include "csrc/model/model.h"

#include <stdlib.h>

static tp_status
check(int32_t seq_len, int32_t batch, int32_t micros, const int32_t *batches, const int32_t *slices,
      const int32_t *lengths, int64_t *starts)
{
    int64_t sequences = 0, at = 0;
    *starts = 0;
    for (int32_t q = 0; q < micros; q++) {
        if (batches[q] < 1 || slices[q] < 1)
            return tp_fail(TP_EVALUE, "micro-batch %d has %d sequences in %d slices: at least 1 of each would be right", q,
                           batches[q], slices[q]);
        int64_t tokens = 0;
        for (int32_t s = 0; s < slices[q]; s++, at++) {
            if (lengths[at] < 1)
                return tp_fail(TP_EVALUE, "slice %d of micro-batch %d has %d tokens: at least 1 would be right", s, q,
                               lengths[at]);
            tokens += lengths[at];
        }
        if (tokens != seq_len)
            return tp_fail(TP_EVALUE, "the slices of micro-batch %d sum to %lld tokens: %d (seq_len) would be right", q,
                           (long long)tokens, seq_len);
        sequences += batches[q];
        *starts += slices[q] + 1;
    }
    if (sequences != batch)
        return tp_fail(TP_EVALUE, "the micro-batches cover %lld sequences: %d (batch) would be right",
                       (long long)sequences, batch);
    return TP_OK;
}

tp_status
tp_slicing_open(int32_t seq_len, int32_t batch, int32_t micros, const int32_t *batches, const int32_t *slices,
                const int32_t *lengths, tp_slicing **out)
{
    int64_t starts = 0;
    if (micros < 1 || micros > 65536)
        return tp_fail(TP_EVALUE, "there are %d micro-batches: 1 to 65536 would be right", micros);
    TP_TRY(check(seq_len, batch, micros, batches, slices, lengths, &starts));
    tp_slicing *slicing = calloc(1, sizeof *slicing);
    tp_micro *micro = calloc((size_t)micros, sizeof *micro);
    int32_t *storage = calloc((size_t)starts, sizeof *storage);
    if (slicing == NULL || micro == NULL || storage == NULL) {
        free(slicing);
        free(micro);
        free(storage);
        return tp_fail(TP_EMEMORY, "no memory for a slicing of %d micro-batches", micros);
    }
    *slicing = (tp_slicing){.seq_len = seq_len, .batch = batch, .micros = micros, .micro = micro, .starts = storage};
    int32_t sequence = 0;
    for (int32_t q = 0; q < micros; q++) {
        micro[q] = (tp_micro){.batch = batches[q], .slices = slices[q], .first_seq = sequence, .start = storage};
        sequence += batches[q];
        if (batches[q] > slicing->max_batch)
            slicing->max_batch = batches[q];
        *storage++ = 0;
        for (int32_t s = 0; s < slices[q]; s++, storage++, lengths++) {
            *storage = storage[-1] + *lengths;
            int64_t rows = (int64_t)*lengths * batches[q];
            slicing->max_rows = rows > slicing->max_rows ? rows : slicing->max_rows;
        }
    }
    *out = slicing;
    return TP_OK;
}

tp_status
tp_slicing_halve(tp_slicing *slicing, int micro)
{
    tp_micro *m = &slicing->micro[micro];
    if (m->slices > 1)
        return tp_fail(TP_EVALUE, "micro-batch %d has %d token slices: halves along the batch are of one slice", micro,
                       m->slices);
    if (m->batch < 2)
        return tp_fail(TP_EVALUE, "micro-batch %d has %d sequence: a forward in halves needs at least 2", micro, m->batch);
    m->half = (m->batch + 1) / 2;
    return TP_OK;
}

tp_status
tp_slicing_check(const tp_slicing *slicing, const tp_model *model)
{
    double rows = (double)slicing->micros * slicing->max_batch * slicing->seq_len;
    double numbers = rows * model->n_embd * tp_model_blocks(model);
    if (numbers <= TP_MODEL_NUMBERS)
        return TP_OK;
    return tp_fail(TP_EVALUE, "%d micro-batches of up to %d sequences of %d tokens are %.3g numbers between the model's %d blocks: "
                   "at most %.3g would be right", slicing->micros, slicing->max_batch, slicing->seq_len, numbers,
                   tp_model_blocks(model), TP_MODEL_NUMBERS);
}

void
tp_slicing_close(tp_slicing *slicing)
{
    if (slicing == NULL)
        return;
    free(slicing->micro);
    free(slicing->starts);
    free(slicing);
}
