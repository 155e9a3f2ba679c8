/* SPDX-License-Identifier: Apache-2.0
 *
 * hazard.c - see hazard.h. The fit is that of a Poisson regression with categorical features, one
 * multiplicative update an observation.
 */
#include <math.h>
#include <string.h>

#include "policy/hazard.h"

#define AGE_FIRST_S 1.0
#define AGE_STEP 1.1
#define SMOOTH_BINS 10
/* Pretended observations: of the rate, a return in a bin with this probability. */
#define RATE_PRIOR 20.0
#define RATE_PRIOR_VALUE 0.02
#define FACTOR_PRIOR 50.0
#define CURVE_PRIOR 2.0
#define SHARE_MIN 0.05

void hazard_open(struct hazard *h)
{
    memset(h, 0, sizeof *h);
    double age = AGE_FIRST_S;
    for (unsigned b = 1; b <= HAZARD_BINS; b++, age *= AGE_STEP) {
        h->ages[b] = age;
    }
    memset(h->touched, 1, sizeof h->touched);
    for (unsigned i = 0; i < HAZARD_FEATURES; i++) {
        for (unsigned v = 0; v < HAZARD_VALUES; v++) {
            h->drawn_factors[i][v] = 1;
        }
    }
    hazard_refresh(h);
}

static void smooth(const struct hazard_cell *cells, double *out, double prior, double prior_value)
{
    for (int b = 0; b < HAZARD_BINS; b++) {
        double seen = 0, expected = 0;
        for (int d = -SMOOTH_BINS; d <= SMOOTH_BINS; d++) {
            if (b + d >= 0 && b + d < HAZARD_BINS) {
                double near = 1.0 - (d < 0 ? -d : d) / (SMOOTH_BINS + 1.0);
                seen += near * cells[b + d].seen;
                expected += near * cells[b + d].expected;
            }
        }
        out[b] = (seen + prior * prior_value) / (expected + prior);
    }
}

void hazard_refresh(struct hazard *h)
{
    smooth(h->rates, h->smooth_rates, RATE_PRIOR, RATE_PRIOR_VALUE);
    for (unsigned c = 0; c < HAZARD_CURVES; c++) {
        for (unsigned v = 0; v < HAZARD_VALUES; v++) {
            if (h->touched[c][v]) {
                smooth(h->curves[c][v], h->smooth_curves[c][v], CURVE_PRIOR, 1);
                h->touched[c][v] = false;
            }
        }
    }
}

static double factor(const struct hazard *h, const struct hazard_features *f)
{
    double product = 1;
    for (unsigned i = 0; i < HAZARD_FEATURES; i++) {
        product *= h->drawn_factors[i][f->values[i]];
    }
    return product;
}

static double curve(const struct hazard *h, const struct hazard_features *f, unsigned bin)
{
    double product = 1;
    for (unsigned c = 0; c < HAZARD_CURVES; c++) {
        product *= h->smooth_curves[c][f->values[c]][bin];
    }
    return product;
}

void hazard_learn(struct hazard *h, const struct hazard_features *f, unsigned bin, double share,
                  double weight, bool returned)
{
    double seen = returned ? weight : 0;
    double exposed = factor(h, f) * curve(h, f, bin) * share * weight;
    double expected = h->smooth_rates[bin] * exposed;
    h->rates[bin].seen += seen;
    h->rates[bin].expected += exposed;
    for (unsigned c = 0; c < HAZARD_CURVES; c++) {
        struct hazard_cell *cell = &h->curves[c][f->values[c]][bin];
        cell->seen += seen;
        cell->expected += expected;
        h->touched[c][f->values[c]] = true;
    }
    for (unsigned i = 0; i < HAZARD_FEATURES; i++) {
        struct hazard_cell *cell = &h->factors[i][f->values[i]];
        cell->seen += seen;
        cell->expected += expected;
        h->drawn_factors[i][f->values[i]] =
            (cell->seen + FACTOR_PRIOR) / (cell->expected + FACTOR_PRIOR);
    }
}

double hazard_index(const struct hazard *h, const struct hazard_features *f, unsigned bin)
{
    double scale = factor(h, f), returned = 0, held_s = 0, left = 1, best = 0;
    for (unsigned b = bin; b < HAZARD_BINS; b++) {
        double rate = scale * h->smooth_rates[b] * curve(h, f, b);
        /* exp(-rate), near enough for what is summed here and many times as fast */
        double stays = rate < 1.9 ? (2 - rate) / (2 + rate) : 0.025;
        double width_s = h->ages[b + 1] - h->ages[b];
        returned += left * (1 - stays);
        held_s += left * width_s * (rate > 1e-9 ? (1 - stays) / rate : 1);
        left *= stays;
        if (returned > best * held_s) {
            best = returned / held_s;
        }
        if (left < 1e-4) {
            break;
        }
    }
    return best;
}

double hazard_share(const struct hazard *h, unsigned bin, double age)
{
    double share = (age - h->ages[bin]) / (h->ages[bin + 1] - h->ages[bin]);
    return share < SHARE_MIN ? SHARE_MIN : share > 1 ? 1 : share;
}
