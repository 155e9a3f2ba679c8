/* SPDX-License-Identifier: Apache-2.0
 *
 * uri.c - the names of devices: scheme://target?name=value&name=value
 *
 * A parsed URI holds its own text, which is cut and percent-decoded in place; the pointers go into
 * it, so that a struct hifc_uri must not be copied. No state, any thread.
 */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "device/device.h"
#include "util/error.h"

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9') {
        return c - '0';
    }
    c = (char)tolower((unsigned char)c);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static int percent_decode(char *text, const char *whole)
{
    char *to = text;
    for (char *from = text; *from; from++) {
        if (*from != '%') {
            *to++ = *from;
            continue;
        }
        int high = hex_digit(from[1]);
        int low = high < 0 ? -1 : hex_digit(from[2]);
        if (low < 0 || (high == 0 && low == 0)) {
            return hifc_fail(-EINVAL, "device URI '%.200s': '%%' must be followed by two hex "
                             "digits (write a plain '%%' as '%%25')", whole);
        }
        *to++ = (char)(high * 16 + low);
        from += 2;
    }
    *to = '\0';
    return 0;
}

static int parse_params(char *query, const char *whole, struct hifc_uri *out)
{
    while (query && *query) {
        char *next = strchr(query, '&');
        if (next) {
            *next++ = '\0';
        }
        char *value = strchr(query, '=');
        if (!value || value == query) {
            return hifc_fail(-EINVAL, "device URI '%.200s': parameter '%.60s' is not name=value",
                             whole, query);
        }
        *value++ = '\0';
        if (hifc_uri_param(out, query)) {
            return hifc_fail(-EINVAL, "device URI '%.200s': parameter '%.60s' stands there twice",
                             whole, query);
        }
        if (out->param_count == HIFC_URI_PARAMS_MAX) {
            return hifc_fail(-EINVAL, "device URI '%.200s': more than %u parameters", whole,
                             HIFC_URI_PARAMS_MAX);
        }
        int rc = percent_decode(value, whole);
        if (rc) {
            return rc;
        }
        out->params[out->param_count].name = query;
        out->params[out->param_count].value = value;
        out->param_count++;
        query = next;
    }
    return 0;
}

int hifc_uri_parse(const char *text, struct hifc_uri *out)
{
    memset(out, 0, sizeof(*out));
    size_t length = text ? strlen(text) : 0;
    if (length >= sizeof(out->text)) {
        return hifc_fail(-EINVAL, "device URI '%.60s...' is longer than %zu bytes", text,
                         sizeof(out->text) - 1);
    }
    memcpy(out->text, text ? text : "", length);
    char *separator = strstr(out->text, "://");
    if (!separator || separator == out->text) {
        return hifc_fail(-EINVAL, "'%.200s' is no device URI; it must look like "
                         "scheme://target?name=value, e.g. file:///var/lib/hifc.img?size=8GiB",
                         text ? text : "(null)");
    }
    *separator = '\0';
    for (const char *c = out->text; *c; c++) {
        if (!islower((unsigned char)*c) && !isdigit((unsigned char)*c) && *c != '+') {
            return hifc_fail(-EINVAL, "device URI '%.200s': '%.40s' is no scheme (lower case "
                             "letters, digits, '+')", text, out->text);
        }
    }
    out->scheme = out->text;
    char *target = separator + 3;
    out->target = target;
    char *query = strchr(target, '?');
    if (query) {
        *query++ = '\0';
    }
    int rc = percent_decode(target, text);
    return rc ? rc : parse_params(query, text, out);
}

const char *hifc_uri_param(const struct hifc_uri *uri, const char *name)
{
    for (uint32_t i = 0; i < uri->param_count; i++) {
        if (strcmp(uri->params[i].name, name) == 0) {
            return uri->params[i].value;
        }
    }
    return NULL;
}

/* Digits only: no sign, no space, no overflow. */
static const char *parse_digits(const char *text, uint64_t *value)
{
    uint64_t number = 0;
    const char *c = text;
    for (; isdigit((unsigned char)*c); c++) {
        if (__builtin_mul_overflow(number, 10, &number) ||
            __builtin_add_overflow(number, (uint64_t)(*c - '0'), &number)) {
            return NULL;
        }
    }
    *value = number;
    return c == text ? NULL : c;
}

int hifc_uri_u64(const struct hifc_uri *uri, const char *name, uint64_t *value)
{
    const char *text = hifc_uri_param(uri, name);
    if (!text) {
        return 0;
    }
    uint64_t number;
    const char *end = parse_digits(text, &number);
    if (!end || *end) {
        return hifc_fail(-EINVAL, "%s device: parameter %s='%.60s' is not a whole number",
                         uri->scheme, name, text);
    }
    *value = number;
    return 0;
}

static const struct {
    const char *suffix;
    uint64_t factor;
} size_units[] = {
    {"", 1},
    {"B", 1},
    {"KiB", 1ull << 10},
    {"MiB", 1ull << 20},
    {"GiB", 1ull << 30},
    {"TiB", 1ull << 40},
    {"kB", 1000ull},
    {"KB", 1000ull},
    {"MB", 1000000ull},
    {"GB", 1000000000ull},
    {"TB", 1000000000000ull},
};
#define FRACTION_DIGITS_MAX 18u
#define SIZE_UNIT_COUNT (sizeof(size_units) / sizeof(size_units[0]))

/* number.fraction times factor, where that is a whole number of bytes up to 2^63 - 1. */
static bool scale(uint64_t number, const char *fraction, uint64_t factor, uint64_t *bytes)
{
    uint64_t whole, part = 0, tenths = 1;
    size_t digits = strspn(fraction, "0123456789");
    while (digits && fraction[digits - 1] == '0') {
        digits--;
    }
    for (size_t i = 0; i < digits; i++) {
        if (i == FRACTION_DIGITS_MAX) {
            return false;
        }
        tenths *= 10;
        part = part * 10 + (uint64_t)(fraction[i] - '0');
    }
    unsigned __int128 scaled = (unsigned __int128)part * factor;
    if (scaled % tenths != 0 || __builtin_mul_overflow(number, factor, &whole) ||
        __builtin_add_overflow(whole, (uint64_t)(scaled / tenths), &whole) || whole > INT64_MAX) {
        return false;
    }
    *bytes = whole;
    return true;
}

/* What was probably meant by a unit that is none: 64M, 64mib. NULL: no idea. */
static const char *near_unit(const char *unit)
{
    for (size_t i = 1; i < SIZE_UNIT_COUNT; i++) {
        const char *suffix = size_units[i].suffix;
        if (strcasecmp(unit, suffix) == 0 ||
            (strlen(unit) == 1 && toupper((unsigned char)unit[0]) == suffix[0])) {
            return suffix;
        }
    }
    return NULL;
}

/* As hifc/util/units.py, which reads the configuration's. */
int hifc_uri_size(const struct hifc_uri *uri, const char *name, uint64_t *value)
{
    const char *text = hifc_uri_param(uri, name);
    char unit[8] = "";
    if (!text) {
        return 0;
    }
    uint64_t number;
    const char *digits = text + strspn(text, " \t\n\r\f\v"), *fraction = "";
    const char *end = parse_digits(digits, &number);
    if (end && *end == '.' && isdigit((unsigned char)end[1])) {
        fraction = end + 1;
        end = fraction + strspn(fraction, "0123456789");
    }
    if (end) {
        const char *start = end + strspn(end, " \t\n\r\f\v");
        size_t length = strcspn(start, " \t\n\r\f\v");
        bool clean = !start[length + strspn(start + length, " \t\n\r\f\v")];
        snprintf(unit, sizeof(unit), "%.*s", clean && length < sizeof(unit) ? (int)length : 1,
                 clean && length < sizeof(unit) ? start : "?");
    }
    for (size_t i = 0; end && i < SIZE_UNIT_COUNT; i++) {
        if (strcmp(unit, size_units[i].suffix) == 0 &&
            scale(number, fraction, size_units[i].factor, value)) {
            return 0;
        }
    }
    const char *near = end ? near_unit(unit) : NULL;
    if (near && strcmp(near, unit) != 0) {
        return hifc_fail(-EINVAL, "%s device: parameter %s='%.60s' is not a size: write %.*s%s",
                         uri->scheme, name, text, (int)(end - digits), digits, near);
    }
    return hifc_fail(-EINVAL, "%s device: parameter %s='%.60s' is not a size: write bytes, or a "
                     "number of KiB, MiB, GiB, TiB (kB, MB, GB, TB for powers of 1000) that is a "
                     "whole number of bytes", uri->scheme, name, text);
}

int hifc_uri_allow(const struct hifc_uri *uri, const char *const *names)
{
    for (uint32_t i = 0; i < uri->param_count; i++) {
        const char *const *name = names;
        while (*name && strcmp(*name, uri->params[i].name) != 0) {
            name++;
        }
        if (*name) {
            continue;
        }
        char known[200] = "";
        for (name = names; *name; name++) {
            strncat(known, name == names ? "" : ", ", sizeof(known) - strlen(known) - 1);
            strncat(known, *name, sizeof(known) - strlen(known) - 1);
        }
        return hifc_fail(-EINVAL, "%s device: unknown parameter '%.60s'; known: %s", uri->scheme,
                         uri->params[i].name, known[0] ? known : "none");
    }
    return 0;
}

/* Appends text, percent-encoded where it would be taken apart again; false when it does not fit. */
static bool append(char *out, size_t size, const char *text, bool encode)
{
    size_t used = strlen(out);
    for (const char *c = text; *c; c++) {
        bool special = encode && strchr("%?&=#", *c);
        if (used + (special ? 3 : 1) >= size) {
            return false;
        }
        if (special) {
            static const char digits[] = "0123456789ABCDEF";
            out[used++] = '%';
            out[used++] = digits[(unsigned char)*c >> 4];
            out[used++] = digits[(unsigned char)*c & 15];
        } else {
            out[used++] = *c;
        }
        out[used] = '\0';
    }
    return true;
}

int hifc_uri_render(const struct hifc_uri *uri, const char *scheme, const char *without,
                    char *out, size_t size)
{
    out[0] = '\0';
    bool fits = append(out, size, scheme, false) && append(out, size, "://", false) &&
                append(out, size, uri->target, true);
    const char *separator = "?";
    for (uint32_t i = 0; i < uri->param_count && fits; i++) {
        if (strncmp(uri->params[i].name, without, strlen(without)) == 0) {
            continue;
        }
        fits = append(out, size, separator, false) &&
               append(out, size, uri->params[i].name, false) && append(out, size, "=", false) &&
               append(out, size, uri->params[i].value, true);
        separator = "&";
    }
    return fits ? 0 : hifc_fail(-EINVAL, "device URI '%.60s...' is longer than %zu bytes", out,
                                size - 1);
}
