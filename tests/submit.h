/* SPDX-License-Identifier: Apache-2.0
 *
 * submit.h - a batch of requests from submission to answer, for tests that ask for one at a time.
 */
#ifndef HIFC_TEST_SUBMIT_H
#define HIFC_TEST_SUBMIT_H

#include "check.h"

#define SUBMIT_WAIT_US 10000000

/* Returns the first request's status; each has its own. */
static inline int submit_and_wait(struct hifc_ns *ns, struct hifc_req *reqs, uint32_t count)
{
    struct hifc_ticket *ticket;
    CHECK_EQ(hifc_submit(ns, reqs, count, &ticket), 0);
    CHECK_EQ(hifc_ticket_wait(ticket, SUBMIT_WAIT_US), 1);
    hifc_ticket_free(ticket);
    return reqs[0].status;
}

#endif
