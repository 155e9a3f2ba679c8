/* SPDX-License-Identifier: Apache-2.0
 *
 * hazard.h - learns when blocks come back, from features of the request that used them last.
 *
 * The rate of return at an age is a product: a rate that all share at this age, times a factor for
 * each feature, times a factor for some features at this age. Each factor is what was observed
 * over what the others lead to expect, drawn to 1 by a few pretended observations. Nothing about
 * time is built in but that ages fall into bins on a log scale; neighbouring bins lend each other
 * their observations.
 */
#ifndef HIFC_POLICY_HAZARD_H
#define HIFC_POLICY_HAZARD_H

#include <stdbool.h>
#include <stdint.h>

#define HAZARD_BINS 128
#define HAZARD_FEATURES 11 /* factors for all ages */
#define HAZARD_CURVES 3   /* features with a factor for each age: the first so many */
#define HAZARD_VALUES 64  /* of a feature */

struct hazard_features {
    uint8_t values[HAZARD_FEATURES];
};

struct hazard_cell {
    double seen;
    double expected;
};

struct hazard {
    double ages[HAZARD_BINS + 1]; /* where each bin begins */
    struct hazard_cell rates[HAZARD_BINS];
    struct hazard_cell factors[HAZARD_FEATURES][HAZARD_VALUES];
    struct hazard_cell curves[HAZARD_CURVES][HAZARD_VALUES][HAZARD_BINS];
    double drawn_factors[HAZARD_FEATURES][HAZARD_VALUES];
    /* What index() and learn() use, as of the last refresh. */
    double smooth_rates[HAZARD_BINS];
    double smooth_curves[HAZARD_CURVES][HAZARD_VALUES][HAZARD_BINS];
    bool touched[HAZARD_CURVES][HAZARD_VALUES];
};

void hazard_open(struct hazard *h);
/* Blocks with these features, weighing `weight`, went through `share` of a bin; some came back. */
void hazard_learn(struct hazard *h, const struct hazard_features *f, unsigned bin, double share,
                  double weight, bool returned);
void hazard_refresh(struct hazard *h);
/* The most returns a second of holding that a block can bring, which is now at the start of a bin:
 * the best over all times to give it up (its Gittins index). */
double hazard_index(const struct hazard *h, const struct hazard_features *f, unsigned bin);
/* The share of a bin that an age has gone through. */
double hazard_share(const struct hazard *h, unsigned bin, double age);

#endif
