// Shared by the programs of this folder: a device, two connected QPs of this process, and scenarios
// that run with and without a memory region.
//
// A scenario uses memory like a program and calls `point` in between. It runs once without a
// region, and then once for each pair of points: it registers its memory at the first and
// deregisters it at the second. All runs must observe the same.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#pragma GCC diagnostic ignored "-Wunused-function"

#define CHECK(what)                                                                                \
    do {                                                                                           \
        if (!(what)) {                                                                             \
            printf("%s:%d: %s fails (%s)\n", __FILE__, __LINE__, #what, strerror(errno));          \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

enum {
    PAGE = 4096,
    PAGES = 32,
    LENGTH = PAGES * PAGE,
    RIGHTS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
    ROOM = 1 << 18, // bytes of observations
};

static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_qp *qps[2];
// Memory of the peer, always registered.
static unsigned char *staging;
static struct ibv_mr *staging_mr;

static void rig_connect(struct ibv_qp *qp, struct ibv_qp *to, const union ibv_gid *gid)
{
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = RIGHTS};
    CHECK(!ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
                         IBV_QP_ACCESS_FLAGS));
    a.qp_state = IBV_QPS_RTR;
    a.path_mtu = IBV_MTU_1024;
    a.dest_qp_num = to->qp_num;
    a.max_dest_rd_atomic = a.max_rd_atomic = 1;
    a.min_rnr_timer = 12;
    a.ah_attr = (struct ibv_ah_attr){.is_global = 1, .port_num = 1};
    a.ah_attr.grh = (struct ibv_global_route){.dgid = *gid, .hop_limit = 64};
    CHECK(!ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                         IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
    a.qp_state = IBV_QPS_RTS;
    a.timeout = 14;
    a.retry_cnt = a.rnr_retry = 7;
    CHECK(!ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                         IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

static void rig_queue_pairs(void)
{
    struct ibv_qp_init_attr wanted = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC};
    wanted.cap = (struct ibv_qp_cap){8, 8, 1, 1, 64};
    union ibv_gid gid;
    CHECK(!ibv_query_gid(pd->context, 1, 0, &gid));
    for (int n = 0; n < 2; n++)
        CHECK(qps[n] = ibv_create_qp(pd, &wanted));
    for (int n = 0; n < 2; n++)
        rig_connect(qps[n], qps[!n], &gid);
}

static void rig_open(void)
{
    CHECK(!ibv_fork_init());
    struct ibv_device **list = ibv_get_device_list(NULL);
    CHECK(list);
    int n = 0;
    while (list[n] && list[n]->transport_type != IBV_TRANSPORT_IB)
        n++;
    CHECK(list[n]);
    struct ibv_context *context = ibv_open_device(list[n]);
    CHECK(context);
    ibv_free_device_list(list);
    CHECK(pd = ibv_alloc_pd(context));
    CHECK(cq = ibv_create_cq(context, 64, NULL, NULL, 0));
    rig_queue_pairs();
    staging = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(staging != MAP_FAILED);
    CHECK(staging_mr = ibv_reg_mr(pd, staging, LENGTH, RIGHTS));
}

static struct ibv_wc completion(void)
{
    struct ibv_wc wc;
    int found;
    while ((found = ibv_poll_cq(cq, 1, &wc)) == 0)
        sched_yield();
    CHECK(found == 1);
    return wc;
}

// Posts a request. Returns the status of its completion.
static enum ibv_wc_status run_request(int qp, enum ibv_wr_opcode opcode, struct ibv_sge sge,
                                      void *remote, uint32_t rkey)
{
    struct ibv_send_wr wr = {.opcode = opcode, .sg_list = &sge, .num_sge = 1}, *bad;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.wr.rdma.remote_addr = (uintptr_t)remote;
    wr.wr.rdma.rkey = rkey;
    CHECK(!ibv_post_send(qps[qp], &wr, &bad));
    return completion().status;
}

static struct ibv_sge element(const void *start, size_t length, const struct ibv_mr *mr)
{
    return (struct ibv_sge){(uintptr_t)start, length, mr->lkey};
}

// Fills a part of a region by an RDMA Write, an RDMA Read or a Send, in turn.
static void store_by_rdma(struct ibv_mr *mr, unsigned char *to, int value, size_t length)
{
    static unsigned kind;
    memset(staging, value, length);
    struct ibv_sge here = element(to, length, mr), there = element(staging, length, staging_mr);
    switch (kind++ % 3) {
    case 0:
        CHECK(!run_request(0, IBV_WR_RDMA_WRITE, there, to, mr->rkey));
        break;
    case 1:
        CHECK(!run_request(1, IBV_WR_RDMA_READ, here, staging, staging_mr->rkey));
        break;
    default: {
        struct ibv_recv_wr wr = {.sg_list = &here, .num_sge = 1}, *bad;
        CHECK(!ibv_post_recv(qps[1], &wr, &bad));
        CHECK(!run_request(0, IBV_WR_SEND, there, NULL, 0));
        CHECK(!completion().status);
    }
    }
}

// Reads a page like a system call. Returns its hash, or 0 if it cannot be read.
static uint64_t page_hash(const unsigned char *page)
{
    unsigned char copy[PAGE];
    struct iovec to = {copy, PAGE}, from = {(void *)page, PAGE};
    if (process_vm_readv(getpid(), &to, 1, &from, 1, 0) != PAGE)
        return 0;
    uint64_t hash = 0xcbf29ce484222325;
    for (int n = 0; n < PAGE; n++)
        hash = (hash ^ copy[n]) * 0x100000001b3;
    return hash;
}

static uint64_t range_hash(const unsigned char *bytes)
{
    uint64_t hash = 0;
    for (int n = 0; n < PAGES; n++)
        hash = hash * 31 + page_hash(bytes + n * PAGE);
    return hash;
}

// ----- Scenarios

struct run {
    unsigned char *bytes;
    int rights; // of the region; 0 for RIGHTS
    struct ibv_mr *mr;
    int points, registers, deregisters;
    char *observed;
    size_t length;
};

static void note(struct run *r, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    int more = vsnprintf(r->observed + r->length, ROOM - r->length, format, list);
    va_end(list);
    CHECK(more >= 0 && r->length + more < ROOM);
    r->length += more;
}

static void deregister(struct run *r)
{
    if (r->mr)
        CHECK(!ibv_dereg_mr(r->mr));
    r->mr = NULL;
}

static void point(struct run *r)
{
    r->points++;
    if (r->points == r->registers)
        CHECK(r->mr = ibv_reg_mr(pd, r->bytes, LENGTH, r->rights ? r->rights : RIGHTS));
    if (r->points == r->deregisters)
        deregister(r);
}

// A point at which the memory cannot be registered, but a region can end.
static void point_of_end(struct run *r)
{
    r->points++;
    if (r->points == r->deregisters)
        deregister(r);
}

// Fills a part of the memory, through the region if there is one.
static void store(struct run *r, size_t offset, int value, size_t length)
{
    if (r->mr)
        store_by_rdma(r->mr, r->bytes + offset, value, length);
    else
        memset(r->bytes + offset, value, length);
}

// Notes the lines of smaps about a range: rights, advice, locks and memory in use per mapping.
static void note_smaps(struct run *r, const unsigned char *bytes)
{
    static const char *const kept[] = {"Size:", "Rss:", "Anonymous:", "Locked:", "VmFlags:"};
    FILE *file = fopen("/proc/self/smaps", "r");
    CHECK(file);
    char *line = NULL;
    size_t room = 0;
    int inside = 0;
    while (getline(&line, &room, file) > 0) {
        unsigned long start, end, offset;
        char rights[5];
        if (sscanf(line, "%lx-%lx %4s %lx", &start, &end, rights, &offset) == 4) {
            inside = start < (uintptr_t)bytes + LENGTH && end > (uintptr_t)bytes;
            if (inside)
                note(r, "%lx-%lx %s %lx\n", start - (uintptr_t)bytes, end - (uintptr_t)bytes,
                     rights, offset);
        }
        for (size_t n = 0; inside && n < sizeof kept / sizeof *kept; n++)
            if (!strncmp(line, kept[n], strlen(kept[n])))
                note(r, "%s", line);
    }
    free(line);
    fclose(file);
}

static void observe_at(struct run *r, const unsigned char *bytes)
{
    for (int n = 0; n < PAGES; n++)
        note(r, "%d:%lx ", n, page_hash(bytes + n * PAGE));
    note(r, "\n");
    note_smaps(r, bytes);
}

static void observe(struct run *r)
{
    observe_at(r, r->bytes);
}

// Maps memory between two inaccessible pages, so that the kernel does not merge it with a
// neighbour.
static unsigned char *mapped(int rights, int flags, int fd)
{
    unsigned char *all = mmap(NULL, LENGTH + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(all != MAP_FAILED);
    unsigned char *bytes = all + PAGE;
    CHECK(mmap(bytes, LENGTH, rights, flags | MAP_FIXED, fd, 0) == bytes);
    return bytes;
}

static unsigned char *memory(void)
{
    unsigned char *bytes = mapped(PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    memset(bytes, 7, LENGTH);
    return bytes;
}

static void unmap(unsigned char *bytes)
{
    CHECK(!munmap(bytes - PAGE, LENGTH + 2 * PAGE));
}

static struct run run_once(void scenario(struct run *), int registers, int deregisters)
{
    struct run r = {.registers = registers, .deregisters = deregisters};
    CHECK(r.observed = malloc(ROOM));
    r.observed[0] = 0;
    scenario(&r);
    deregister(&r);
    return r;
}

static void compare(const struct run *with, const struct run *without)
{
    if (with->points == without->points && !strcmp(with->observed, without->observed))
        return;
    printf("registered at point %d to %d:\n%s\nwithout a region:\n%s\n", with->registers,
           with->deregisters, with->observed, without->observed);
    exit(1);
}

// Runs a scenario with each lifetime of a region. The last region outlives the scenario.
static void same_with_and_without(void scenario(struct run *))
{
    // Runs before all others, which may leave kernel threads behind.
    struct run early = run_once(scenario, 2, 0), without = run_once(scenario, 0, 0);
    CHECK(without.points >= 2 && without.length > 0);
    compare(&early, &without);
    for (int first = 1; first <= without.points; first++)
        for (int last = first; last <= without.points + 1; last++) {
            struct run with = run_once(scenario, first, last);
            compare(&with, &without);
            free(with.observed);
        }
    free(early.observed);
    free(without.observed);
}

struct part {
    const char *name;
    void (*run)(void);
};

// Runs the part named on the command line. Prints "done" on success.
static int run_part(int count, char **words, const struct part *parts)
{
    CHECK(count == 2);
    for (; parts->name; parts++)
        if (!strcmp(parts->name, words[1])) {
            rig_open();
            parts->run();
            puts("done");
            return 0;
        }
    printf("there is no part %s\n", words[1]);
    return 2;
}
