#include "csrc/plan/in_flight.h"

tp_status
tp_in_flight_check(const int32_t *held, int micros, int stages)
{
    for (int k = 0; held != NULL && k < stages; k++)
        if (held[k] < 1 || held[k] > micros)
            return tp_fail(TP_EVALUE, "in_flight[%d] is %d: 1 to %d, micro_batches, is possible", k, held[k], micros);
    return TP_OK;
}
