/* SPDX-License-Identifier: Apache-2.0
 *
 * spdk_uri.c - what an SPDK URI names.
 *
 *   spdk://0000:3b:00.0?ns=1                 a PCIe drive by its address
 *   spdk+tcp://10.0.0.7:4420/NQN?ns=1        NVMe over TCP; also a name, or [IPv6]
 *
 * No state, any thread.
 */
#define _GNU_SOURCE /* getaddrinfo */
#include <ctype.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device/spdk.h"
#include "util/error.h"

/* ---- URIs ------------------------------------------------------------------------------------ */

static int parse_params(const struct hifc_uri *uri, struct hifc_spdk_target *out)
{
    static const char *const pcie[] = {"ns", NULL};
    static const char *const fabrics[] = {"ns", "hostnqn", NULL};
    uint64_t nsid = 1;
    int rc = hifc_uri_allow(uri, out->pcie ? pcie : fabrics);
    rc = rc ? rc : hifc_uri_u64(uri, "ns", &nsid);
    if (rc) {
        return rc;
    }
    if (nsid == 0 || nsid > 0xfffffffeu) {
        return hifc_fail(-EINVAL, "%s device: ns=%llu; namespaces count from 1", uri->scheme,
                         (unsigned long long)nsid);
    }
    const char *hostnqn = hifc_uri_param(uri, "hostnqn");
    if (hostnqn && (strncmp(hostnqn, "nqn.", 4) != 0 || strlen(hostnqn) >= sizeof(out->hostnqn))) {
        return hifc_fail(-EINVAL, "%s device: hostnqn='%.60s' is no NQN (nqn.YYYY-MM.DOMAIN:NAME)",
                         uri->scheme, hostnqn);
    }
    out->nsid = (uint32_t)nsid;
    snprintf(out->hostnqn, sizeof(out->hostnqn), "%s", hostnqn ? hostnqn : "");
    return 0;
}

/* DDDD:BB:DD.F, in full, so that a drive has one name. */
static bool is_bdf(const char *text)
{
    static const char pattern[] = "xxxx:xx:xx.x";
    for (size_t i = 0; i < sizeof(pattern); i++) {
        bool fits = pattern[i] == 'x' ? isxdigit((unsigned char)text[i]) : text[i] == pattern[i];
        if (!fits) {
            return false;
        }
    }
    return true;
}

static int parse_pcie(const struct hifc_uri *uri, struct hifc_spdk_target *out)
{
    if (!is_bdf(uri->target)) {
        return hifc_fail(-EINVAL, "spdk device: '%.60s' is no PCI address; write all of it, as in "
                         "spdk://0000:3b:00.0?ns=1 (lspci -D lists them)", uri->target);
    }
    snprintf(out->where, sizeof(out->where), "%s", uri->target);
    for (char *c = out->where; *c; c++) {
        *c = (char)tolower((unsigned char)*c);
    }
    snprintf(out->trid.traddr, sizeof(out->trid.traddr), "%.12s", out->where);
    return 0;
}

/* Whether SPDK may have the drive: it does DMA to addresses of ours, which only an IOMMU makes
 * sense of. Without one it would overwrite whatever has that physical address. */
int hifc_spdk_check_pcie(const struct hifc_spdk_target *target)
{
    const char *bdf = target->where;
    char path[96], link[256] = "", name[32] = "";
    snprintf(path, sizeof(path), "/sys/bus/pci/devices/%.12s", bdf);
    if (access(path, F_OK) != 0) {
        return hifc_fail(-ENODEV, "%s: there is no such PCI device; lspci -D lists them", bdf);
    }
    snprintf(path, sizeof(path), "/sys/bus/pci/devices/%.12s/driver", bdf);
    ssize_t length = readlink(path, link, sizeof(link) - 1);
    const char *driver = length > 0 ? strrchr(link, '/') + 1 : "no driver";
    if (strcmp(driver, "vfio-pci") != 0) {
        return hifc_fail(-EBUSY, "%s: %s has it, not vfio-pci; bind it: hifc-admin bind %s", bdf,
                         driver, bdf);
    }
    snprintf(path, sizeof(path), "/sys/bus/pci/devices/%.12s/iommu_group/name", bdf);
    FILE *file = fopen(path, "re");
    if (file) {
        (void)!fgets(name, sizeof(name), file);
        fclose(file);
    }
    snprintf(path, sizeof(path), "/sys/bus/pci/devices/%.12s/iommu_group", bdf);
    if (access(path, F_OK) != 0 || strncmp(name, "vfio-noiommu", 12) == 0) {
        return hifc_fail(-ENOTSUP, "%s: no IOMMU stands before it; turn it on in the firmware and "
                         "on the kernel's command line (intel_iommu=on)", bdf);
    }
    return 0;
}

/* Splits "HOST:PORT/NQN" or "[IPv6]:PORT/NQN"; NULL when it is not of that form. */
static const char *split_address(char *text, char **port, char **nqn)
{
    char *host = text, *end;
    *nqn = strchr(text, '/');
    if (!*nqn) {
        return NULL;
    }
    *(*nqn)++ = '\0';
    if (*host == '[') {
        end = strchr(++host, ']');
        if (!end || end[1] != ':') {
            return NULL;
        }
        *end++ = '\0';
    } else {
        end = strrchr(host, ':');
        if (!end || strchr(host, ':') != end) {
            return NULL;
        }
    }
    *end = '\0';
    *port = end + 1;
    return *host && **port ? host : NULL;
}

static int resolve(const char *scheme, const char *host, const char *port,
                   struct spdk_nvme_transport_id *trid)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found;
    char *end;
    long number = strtol(port, &end, 10);
    if (*end || !isdigit((unsigned char)*port) || number < 1 || number > 65535) {
        return hifc_fail(-EINVAL, "%s device: '%.20s' is no port (1 to 65535)", scheme, port);
    }
    snprintf(trid->trsvcid, sizeof(trid->trsvcid), "%ld", number);
    int rc = getaddrinfo(host, trid->trsvcid, &hints, &found);
    if (rc == 0) {
        trid->adrfam = found->ai_family == AF_INET6 ? SPDK_NVMF_ADRFAM_IPV6 : SPDK_NVMF_ADRFAM_IPV4;
        rc = getnameinfo(found->ai_addr, found->ai_addrlen, trid->traddr, sizeof(trid->traddr),
                         NULL, 0, NI_NUMERICHOST);
        freeaddrinfo(found);
    }
    return rc ? hifc_fail(-EINVAL, "%s device: '%.100s': %s; check the address", scheme, host,
                          gai_strerror(rc))
              : 0;
}

static int parse_fabrics(const struct hifc_uri *uri, struct hifc_spdk_target *out)
{
    char text[sizeof(uri->text)];
    char *port, *nqn;
    snprintf(text, sizeof(text), "%s", uri->target);
    const char *host = split_address(text, &port, &nqn);
    if (!host || strncmp(nqn, "nqn.", 4) != 0 || strlen(nqn) > SPDK_NVMF_NQN_MAX_LEN) {
        return hifc_fail(-EINVAL, "%s device: '%.100s' is not ADDRESS:PORT/NQN; write it as in "
                         "spdk+tcp://10.0.0.7:4420/nqn.2026-01.org.example:kv?ns=1", uri->scheme,
                         uri->target);
    }
    int rc = resolve(uri->scheme, host, port, &out->trid);
    if (rc) {
        return rc;
    }
    bool v6 = out->trid.adrfam == SPDK_NVMF_ADRFAM_IPV6;
    snprintf(out->trid.subnqn, sizeof(out->trid.subnqn), "%s", nqn);
    snprintf(out->where, sizeof(out->where), "%s%.60s%s:%.8s/%.220s", v6 ? "[" : "",
             out->trid.traddr, v6 ? "]" : "", out->trid.trsvcid, nqn);
    return 0;
}

int hifc_spdk_target_parse(const struct hifc_uri *uri, struct hifc_spdk_target *out)
{
    memset(out, 0, sizeof(*out));
    bool rdma = strcmp(uri->scheme, "spdk+rdma") == 0;
    if (rdma && !spdk_nvme_transport_available_by_name("RDMA")) {
        return hifc_fail(-ENOTSUP, "spdk+rdma device: this SPDK was built without RDMA; use "
                         "spdk+tcp, or link an SPDK configured with --with-rdma");
    }
    out->pcie = strcmp(uri->scheme, "spdk") == 0;
    out->trid.trtype = out->pcie ? SPDK_NVME_TRANSPORT_PCIE
                       : rdma    ? SPDK_NVME_TRANSPORT_RDMA
                                 : SPDK_NVME_TRANSPORT_TCP;
    spdk_nvme_trid_populate_transport(&out->trid, out->trid.trtype);
    int rc = parse_params(uri, out);
    return rc ? rc : out->pcie ? parse_pcie(uri, out) : parse_fabrics(uri, out);
}
