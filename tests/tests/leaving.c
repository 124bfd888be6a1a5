// Checks the completions of a requester whose peer leaves under traffic: the peer's process is
// killed ("kill"), exits ("exit"), or destroys its QPs and deregisters its memory (any other
// argument). Prints "done" on success.

#include "refusals.h"
#include "rc_qps.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>

enum {
    QPS = 16,
    DEPTH = 16,
    LENGTH = 1 << 16,
    DEADLINE = 120, // seconds, for completions that should come at once
};

// Attributes that each process sends to the other.
struct address {
    union ibv_gid gid;
    uint32_t qp[QPS];
    uint32_t rkey;
    uint64_t bytes;
};

static struct ibv_context *context;
static struct ibv_cq *cq;
static struct ibv_qp *qp[QPS];
static struct ibv_mr *mr;
static char *bytes;

static void open_all(struct address *own)
{
    context = open_roce();
    struct ibv_pd *pd = ibv_alloc_pd(context);
    MUST(pd && !ibv_query_gid(context, 1, 0, &own->gid));
    MUST((cq = ibv_create_cq(context, 2 * QPS * DEPTH, NULL, NULL, 0)) != NULL);
    MUST((bytes = calloc(1, LENGTH)) != NULL && (mr = ibv_reg_mr(pd, bytes, LENGTH, ALL)));
    own->rkey = mr->rkey;
    own->bytes = (uintptr_t)bytes;
    for (int n = 0; n < QPS; n++) {
        qp[n] = create_rc(pd, cq, DEPTH);
        own->qp[n] = qp[n]->qp_num;
    }
}

static void connect_all(const struct address *peer)
{
    struct retries p = {.timeout = 10, .retry_cnt = 1, .rnr_retry = 7, .min_rnr_timer = 1};
    for (int n = 0; n < QPS; n++)
        connect_rc(qp[n], peer->gid, peer->qp[n], p);
}

static void send_one(int n, const struct address *peer, int round)
{
    static const int opcodes[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_ATOMIC_FETCH_AND_ADD,
                                  IBV_WR_SEND};
    struct ibv_send_wr wr = {.wr_id = n, .opcode = opcodes[n % 4]}, *bad;
    uint32_t length = n % 4 == 2 ? 8 : round % 2 ? 64 : LENGTH / 2;
    struct ibv_sge sge = {(uintptr_t)bytes, length, mr->lkey};
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.send_flags = IBV_SEND_SIGNALED;
    if (n % 4 == 2) {
        wr.wr.atomic.remote_addr = peer->bytes;
        wr.wr.atomic.rkey = peer->rkey;
    } else {
        wr.wr.rdma.remote_addr = peer->bytes;
        wr.wr.rdma.rkey = peer->rkey;
    }
    MUST(!ibv_post_send(qp[n], &wr, &bad));
}

static void receive_one(int n)
{
    struct ibv_sge sge = {(uintptr_t)bytes, LENGTH, mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = n, .sg_list = &sge, .num_sge = 1}, *bad;
    MUST(!ibv_post_recv(qp[n], &wr, &bad));
}

// Keeps requests outstanding on all QPs until each has failed.
static void request_until_all_failed(const struct address *peer, int under_way)
{
    int failed = 0;
    int done[QPS] = {0};
    int has_failed[QPS] = {0};
    for (int n = 0; n < QPS; n++)
        for (int k = 0; k < DEPTH / 2; k++)
            send_one(n, peer, k);
    time_t until = time(NULL) + DEADLINE;
    int notified = 0;
    while (failed < QPS) {
        struct ibv_wc wc;
        int got = ibv_poll_cq(cq, 1, &wc);
        MUST(got >= 0 && time(NULL) < until);
        if (!got)
            continue;
        int n = (int)wc.wr_id;
        if (wc.status == IBV_WC_SUCCESS) {
            MUST(!has_failed[n]);
            send_one(n, peer, ++done[n]);
            int least = done[0];
            for (int k = 1; k < QPS; k++)
                least = done[k] < least ? done[k] : least;
            if (least >= 8 && !notified++)
                MUST(write(under_way, "x", 1) == 1);
        } else if (!has_failed[n]) {
            has_failed[n] = 1;
            failed++;
            if (wc.status != IBV_WC_RETRY_EXC_ERR)
                printf("QP %d, opcode %d: %s\n", n, n % 4, ibv_wc_status_str(wc.status));
            MUST(wc.status == IBV_WC_RETRY_EXC_ERR);
        } else {
            MUST(wc.status == IBV_WC_WR_FLUSH_ERR);
        }
    }
}

static void respond(const char *way, int under_way)
{
    for (int n = 3; n < QPS; n += 4)
        for (int k = 0; k < DEPTH; k++)
            receive_one(n);
    struct ibv_wc wc;
    char c;
    // Reading from the pipe does not block.
    while (read(under_way, &c, 1) != 1)
        if (ibv_poll_cq(cq, 1, &wc) == 1) {
            MUST(wc.status == IBV_WC_SUCCESS);
            receive_one((int)wc.wr_id);
        }
    if (!strcmp(way, "kill"))
        raise(SIGKILL);
    if (!strcmp(way, "exit"))
        exit(0);
    for (int n = 0; n < QPS; n++)
        MUST(!ibv_destroy_qp(qp[n]));
    MUST(!ibv_dereg_mr(mr));
    exit(0);
}

int main(int count, char **arguments)
{
    MUST(count == 2);
    int up[2], down[2], under_way[2];
    MUST(!pipe(up) && !pipe(down) && !pipe2(under_way, O_NONBLOCK));
    struct address own, peer;
    pid_t child = fork();
    int *out = child ? down : up, *in = child ? up : down;
    open_all(&own);
    MUST(write(out[1], &own, sizeof own) == sizeof own);
    MUST(read(in[0], &peer, sizeof peer) == sizeof peer);
    connect_all(&peer);
    if (child) {
        request_until_all_failed(&peer, under_way[1]);
        int status;
        MUST(waitpid(child, &status, 0) == child);
        puts("done");
    } else {
        respond(arguments[1], under_way[0]);
    }
}
