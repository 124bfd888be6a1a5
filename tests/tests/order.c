// Programs that rely on more than the standards promise, with two ends of an RC connection in one
// process. The command line names the part to run, which prints "done", or "broken" if the order of
// memory accesses broke it. A second argument is the hold time of the rule in milliseconds. If the
// accesses of a round end after half of that time, the round proves nothing, and the program prints
// "late" instead.

#include "refusals.h"
#include "rc_qps.h"

#include <stdint.h>
#include <time.h>

enum {
    WORDS = 512,
    RECORD = 32, // words
    ROUNDS = 4,
    PROBES = 8,
    DEADLINE = 120, // seconds, for events that should come at once
};

struct end {
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_mr *mr;
    volatile uint64_t *words;
};

static struct ibv_context *context;
static struct ibv_pd *pd;
static union ibv_gid gid;
static struct end near, far;
static struct end probe, answering;
static int64_t hold, began;
static int is_late;

static void make(struct end *e)
{
    MUST((e->cq = ibv_create_cq(context, 64, NULL, NULL, 0)) != NULL);
    e->qp = create_rc(pd, e->cq, 16);
    void *memory = aligned_alloc(4096, 8 * WORDS);
    MUST(memory != NULL);
    memset(memory, 0, 8 * WORDS);
    e->words = memory;
    MUST((e->mr = ibv_reg_mr(pd, memory, 8 * WORDS, ALL)) != NULL);
}

// Posts a request of `count` words at index `at` of both memories.
static void post(enum ibv_wr_opcode opcode, int at, int count)
{
    struct ibv_sge sge = {(uintptr_t)(near.words + at), 8 * count, near.mr->lkey};
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = opcode}, *bad;
    wr.send_flags = IBV_SEND_SIGNALED;
    uint64_t to = (uintptr_t)(far.words + at);
    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        wr.wr.atomic.remote_addr = to;
        wr.wr.atomic.rkey = far.mr->rkey;
        wr.wr.atomic.compare_add = 1;
    } else {
        wr.wr.rdma.remote_addr = to;
        wr.wr.rdma.rkey = far.mr->rkey;
    }
    MUST(ibv_post_send(near.qp, &wr, &bad) == 0);
}

static void complete(struct end *e, int count)
{
    time_t until = time(NULL) + DEADLINE;
    while (count > 0) {
        struct ibv_wc wc;
        int n = ibv_poll_cq(e->cq, 1, &wc);
        MUST(n >= 0 && (n == 0 || wc.status == IBV_WC_SUCCESS) && time(NULL) <= until);
        count -= n;
    }
}

static void await(int at, uint64_t value)
{
    time_t until = time(NULL) + DEADLINE;
    while (far.words[at] != value)
        MUST(time(NULL) <= until);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
}

static int64_t milliseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

// Called after the accesses of a round, which must precede the end of the hold time. The worker
// may have read its clock before the request arrived, hence only half of the time.
static void accessed(void)
{
    is_late = hold != 0 && milliseconds() - began > hold / 2;
}

// Waits until the responder has begun the request posted last: empty Writes of another pair of QPs,
// which no rule holds, pass through the same worker one after the other.
static void let_begin(void)
{
    for (int n = 0; n < PROBES; n++) {
        struct ibv_send_wr wr = {.opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED};
        struct ibv_send_wr *bad;
        wr.wr.rdma.remote_addr = (uintptr_t)answering.words;
        wr.wr.rdma.rkey = answering.mr->rkey;
        MUST(ibv_post_send(probe.qp, &wr, &bad) == 0);
        complete(&probe, 1);
    }
}

static void fill(volatile uint64_t *words, int count, uint64_t value)
{
    for (int n = 0; n < count; n++)
        words[n] = value;
}

// The receiver polls the last word of a Write, and reads the rest.
static int last_word(uint64_t round)
{
    fill(near.words, WORDS, round);
    post(IBV_WR_RDMA_WRITE, 0, WORDS);
    await(WORDS - 1, round);
    int good = far.words[0] == round;
    accessed();
    complete(&near, 1);
    return good;
}

// The receiver polls a flag that is written after the data.
static int flag(uint64_t round)
{
    near.words[0] = near.words[64] = round;
    post(IBV_WR_RDMA_WRITE, 0, 1);
    post(IBV_WR_RDMA_WRITE, 64, 1);
    await(64, round);
    int good = far.words[0] == round;
    accessed();
    complete(&near, 2);
    return good;
}

// The reader accepts a record whose first and last words have the same version. The writer changes
// the last word first and the first word last, so a read in the order of addresses is consistent.
static int version(uint64_t round)
{
    post(IBV_WR_RDMA_READ, 0, RECORD);
    let_begin();
    far.words[RECORD - 1] = round;
    __atomic_thread_fence(__ATOMIC_RELEASE);
    fill(far.words + 1, RECORD - 2, round);
    accessed();
    complete(&near, 1);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    far.words[0] = round;
    int accepted = near.words[0] == near.words[RECORD - 1];
    return !accepted || near.words[1] == near.words[0];
}

// Both ends count in the same word, each with its own atomic operations.
static int counter(uint64_t round)
{
    far.words[0] = 0;
    post(IBV_WR_ATOMIC_FETCH_AND_ADD, 0, 1);
    let_begin();
    __atomic_fetch_add(&far.words[0], 1, __ATOMIC_SEQ_CST);
    accessed();
    complete(&near, 1);
    return far.words[0] == 2;
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        int (*run)(uint64_t round);
    } parts[] = {
        {"last-word", last_word},
        {"flag", flag},
        {"version", version},
        {"counter", counter},
    };
    context = open_roce();
    MUST((pd = ibv_alloc_pd(context)) && !ibv_query_gid(context, 1, 0, &gid));
    struct end *ends[] = {&near, &far, &probe, &answering};
    for (int n = 0; n < 4; n++)
        make(ends[n]);
    struct retries p = {.timeout = 20, .retry_cnt = 7, .rnr_retry = 7, .min_rnr_timer = 12};
    for (int n = 0; n < 4; n++)
        connect_rc(ends[n]->qp, gid, ends[n ^ 1]->qp->qp_num, p);
    hold = argc < 3 ? 0 : atoi(argv[2]);
    for (size_t n = 0; n < sizeof parts / sizeof *parts; n++) {
        if (argc < 2 || strcmp(argv[1], parts[n].name))
            continue;
        for (uint64_t round = 1; round <= ROUNDS; round++) {
            began = milliseconds();
            int good = parts[n].run(round);
            if (!good || is_late) {
                puts(good ? "late" : "broken");
                return 1;
            }
        }
        puts("done");
        return 0;
    }
    return 2;
}
