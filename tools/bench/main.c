/* SPDX-License-Identifier: Apache-2.0
 *
 * main.c - hifc_bench: one command, its options, one JSON object. tools/bench/driver calls it and
 * says what the figures mean.
 */
#include <getopt.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"

static const struct {
    const char *name;
    int (*run)(const struct bench_options *options);
    struct bench_options defaults;
} commands[] = {
    {"cost", bench_cost, {.size_bytes = 131072, .batch = 32, .entries = 1 << 20,
                          .rounds = 25}},
    {"compare", bench_compare, {.size_bytes = 131072, .depth = 32, .rounds = 15, .round_ms = 100}},
    {"index", bench_index, {.entries = 10000000, .rounds = 15}},
    {"reopen", bench_reopen, {.uri = "ram://bench?size=2GiB", .entries = 1000000, .size_bytes = 512,
                              .rounds = 5}},
    {"throughput", bench_throughput, {.uri = "ram://bench?size=2GiB", .size_bytes = 368640,
                                      .batch = 16, .entries = 700, .rounds = 3}},
};

static uint64_t number(const char *text)
{
    char *end;
    uint64_t value = strtoull(text, &end, 0);
    if (end == text || *end) {
        bench_die("'%s' is no number", text);
    }
    return value;
}

static void read_options(int argc, char **argv, struct bench_options *options)
{
    static const struct option names[] = {
        {"uri", required_argument, NULL, 'u'},      {"entries", required_argument, NULL, 'e'},
        {"size", required_argument, NULL, 's'},     {"batch", required_argument, NULL, 'b'},
        {"depth", required_argument, NULL, 'd'},    {"rounds", required_argument, NULL, 'r'},
        {"round-ms", required_argument, NULL, 'm'}, {"write", no_argument, NULL, 'w'},
        {"batch-inflight", required_argument, NULL, 'i'},
        {"batch-bytes", required_argument, NULL, 'B'},
        {0}};
    int option;
    while ((option = getopt_long(argc, argv, "", names, NULL)) != -1) {
        switch (option) {
        case 'u': options->uri = optarg; break;
        case 'e': options->entries = number(optarg); break;
        case 's': options->size_bytes = number(optarg); break;
        case 'b': options->batch = (uint32_t)number(optarg); break;
        case 'd': options->depth = (uint32_t)number(optarg); break;
        case 'r': options->rounds = (uint32_t)number(optarg); break;
        case 'm': options->round_ms = (uint32_t)number(optarg); break;
        case 'w': options->write = true; break;
        case 'i': options->batch_inflight = (uint32_t)number(optarg); break;
        case 'B': options->batch_bytes = (uint32_t)number(optarg); break;
        default: exit(2);
        }
    }
    if (optind != argc) {
        bench_die("'%s' is one argument too many", argv[optind]);
    }
}

int main(int argc, char **argv)
{
    for (size_t i = 0; argc > 1 && i < sizeof commands / sizeof commands[0]; i++) {
        if (strcmp(argv[1], commands[i].name) == 0) {
            struct bench_options options = commands[i].defaults;
            read_options(argc - 1, argv + 1, &options);
            return commands[i].run(&options);
        }
    }
    fprintf(stderr, "usage: hifc_bench COMMAND [--uri U] [--size BYTES] [--batch N] [--depth N] "
                    "[--entries N] [--rounds N] [--round-ms N] [--write] [--batch-inflight N] "
                    "[--batch-bytes N]; commands:");
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        fprintf(stderr, " %s", commands[i].name);
    }
    fputc('\n', stderr);
    return 2;
}
