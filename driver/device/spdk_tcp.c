/* SPDX-License-Identifier: Apache-2.0
 *
 * spdk_tcp.c - whether an NVMe/TCP target answers, before SPDK is let loose on it.
 *
 * SPDK says of a failed connect only that it failed, and waits for some answers without a bound.
 * So a connection of our own goes first, with the handshake that begins every NVMe/TCP
 * connection (ICReq, ICResp): it tells a refused connection, a host that is not there, a
 * target that hangs and a server that speaks something else apart, within PROBE_TIMEOUT_MS.
 * No state, any thread.
 */
#define _GNU_SOURCE /* SOCK_CLOEXEC */
#include <netdb.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "device/spdk.h"
#include "util/clock.h"
#include "util/error.h"

#define PROBE_TIMEOUT_MS 5000
#define PDU_IC_REQ 0x00u
#define PDU_IC_RESP 0x01u
#define IC_BYTES 128u
#define PDU_HEADER_BYTES 8u

/* 0 when the socket is ready for events, else a negative errno. */
static int wait_for(int fd, short events, int64_t end_ms)
{
    for (;;) {
        struct pollfd pollfd = {.fd = fd, .events = events};
        int64_t left_ms = end_ms - (int64_t)hifc_now_ms();
        int rc = left_ms > 0 ? poll(&pollfd, 1, (int)left_ms) : 0;
        if (rc >= 0) {
            return rc > 0 ? 0 : -ETIMEDOUT;
        }
        if (errno != EINTR) {
            return -errno;
        }
    }
}

static int fail_connect(const struct hifc_spdk_target *target, int code)
{
    const char *where = target->where;
    switch (code) {
    case -ECONNREFUSED:
        return hifc_fail(-ENODEV, "%s: connection refused: nothing listens there; start the "
                         "target, or check address and port", where);
    case -ETIMEDOUT:
        return hifc_fail(-ETIMEDOUT, "%s: no answer within %d ms; check that the target runs and "
                         "is not stopped, and the way to it (address, firewall)", where,
                         PROBE_TIMEOUT_MS);
    default:
        return hifc_fail(-ENODEV, "%s: cannot connect: %s; check address, port and network", where,
                         strerror(-code));
    }
}

static int connect_to(const struct hifc_spdk_target *target, int fd, int64_t end_ms)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST}, *found;
    if (getaddrinfo(target->trid.traddr, target->trid.trsvcid, &hints, &found) != 0) {
        return -EADDRNOTAVAIL; /* spdk_uri.c resolved it before */
    }
    int rc = connect(fd, found->ai_addr, found->ai_addrlen) == 0 ? 0 : -errno;
    freeaddrinfo(found);
    if (rc == -EINPROGRESS) {
        int error = 0;
        socklen_t size = sizeof(error);
        rc = wait_for(fd, POLLOUT, end_ms);
        if (!rc && getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) == 0) {
            rc = -error;
        }
    }
    return rc;
}

static int shake_hands(const struct hifc_spdk_target *target, int fd, int64_t end_ms)
{
    /* PDU type, flags, header length, data offset, whole length (little endian); then the version
     * of the format, alignment, digests and R2Ts in flight, all 0: the least that one can ask. */
    uint8_t request[IC_BYTES] = {PDU_IC_REQ, 0, IC_BYTES, 0, IC_BYTES, 0, 0, 0};
    uint8_t answer[PDU_HEADER_BYTES];
    size_t got = 0;
    if (send(fd, request, sizeof(request), MSG_NOSIGNAL) != (ssize_t)sizeof(request)) {
        return fail_connect(target, -errno);
    }
    while (got < sizeof(answer)) {
        int rc = wait_for(fd, POLLIN, end_ms);
        if (rc) {
            return fail_connect(target, rc);
        }
        ssize_t count = recv(fd, answer + got, sizeof(answer) - got, 0);
        if (count < 0 && (errno == EINTR || errno == EAGAIN)) {
            continue;
        }
        if (count <= 0) {
            break;
        }
        got += (size_t)count;
    }
    if (got < sizeof(answer) || answer[0] != PDU_IC_RESP) {
        return hifc_fail(-ENODEV, "%s: what answers there does not speak NVMe/TCP; check the port "
                         "(4420 is customary, a discovery service is no target)", target->where);
    }
    return 0;
}

int hifc_spdk_tcp_probe(const struct hifc_spdk_target *target)
{
    int64_t end_ms = (int64_t)hifc_now_ms() + PROBE_TIMEOUT_MS;
    int family = target->trid.adrfam == SPDK_NVMF_ADRFAM_IPV6 ? AF_INET6 : AF_INET;
    int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        return hifc_fail(-errno, "%s: no socket: %s", target->where, strerror(errno));
    }
    int rc = connect_to(target, fd, end_ms);
    rc = rc ? fail_connect(target, rc) : shake_hands(target, fd, end_ms);
    close(fd);
    return rc;
}
