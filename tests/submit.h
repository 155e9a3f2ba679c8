/* SPDX-License-Identifier: Apache-2.0
 *
 * submit.h - a batch of requests from submission to answer, for tests that ask for one at a time.
 */
#ifndef HIFC_TEST_SUBMIT_H
#define HIFC_TEST_SUBMIT_H

#include "check.h"

#include <unistd.h>

/* Returns the first request's status; each has its own. */
static inline int submit_and_wait(struct hifc_ns *ns, struct hifc_req *reqs, uint32_t count)
{
    struct hifc_ticket *ticket;
    CHECK_EQ(hifc_submit(ns, reqs, count, &ticket), 0);
    CHECK_EQ(hifc_ticket_wait(ticket, CHECK_HANG_US), 1);
    hifc_ticket_free(ticket);
    return reqs[0].status;
}

/* The same for one request, again until it is not answered Retry: the janitor makes room at its own
 * pace. */
static inline int submit_until_taken(struct hifc_ns *ns, const struct hifc_req *wanted)
{
    const unsigned pause_us = 200;
    for (int64_t slept_us = 0;; slept_us += pause_us) {
        struct hifc_req req = *wanted;
        int status = submit_and_wait(ns, &req, 1);
        if (status != HIFC_RETRY || slept_us > CHECK_HANG_US) {
            return status;
        }
        usleep(pause_us);
    }
}

#endif
