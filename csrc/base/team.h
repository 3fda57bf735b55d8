/* The threads of one rank. No kernel starts threads of its own: ranks never oversubscribe the cores they were given. */
#ifndef TP_BASE_TEAM_H
#define TP_BASE_TEAM_H

#include <stdint.h>

#include "csrc/base/status.h"

#define TP_TEAM_MOST 256 /* threads */

typedef struct tp_team tp_team;
typedef void (*tp_team_work)(void *argument, int member, int members);

/* Start members - 1 threads that wait (spin briefly, then sleep). members in 1..TP_TEAM_MOST. */
TP_MUST_USE tp_status
tp_team_open(int members, tp_team **out);
void
tp_team_close(tp_team *team);
/* 1 for NULL. */
int
tp_team_members(const tp_team *team);
/* Run work(argument, 0..members-1, members), the caller as member 0; returns when all are done. A NULL team runs it
 * alone. Not re-entrant; one caller at a time. */
void
tp_team_run(tp_team *team, tp_team_work work, void *argument);

/* The part [*first, *last) of `items`, in multiples of `grain`, that is member's. */
void
tp_team_share(int64_t items, int64_t grain, int member, int members, int64_t *first, int64_t *last);

#endif
