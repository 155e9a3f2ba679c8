/* SPDX-License-Identifier: Apache-2.0
 *
 * trace.h - what the replays share.
 */
#ifndef HIFC_POLICY_TRACE_H
#define HIFC_POLICY_TRACE_H

#include "hifc.h"

/* 0, or -EINVAL where times, offsets or ids are not what struct hifc_trace says. */
int replay_check(const struct hifc_trace *trace);

#endif
