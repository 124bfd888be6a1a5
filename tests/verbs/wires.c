// One end of an RC connection. Executes commands from its standard input, mostly on its newest QP
// of rnicd1, and answers each with one line ("answer: " and the result). At the end of the input it
// destroys its objects and exits.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    PLACE = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
    PEER = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
           IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
    SENDS = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
            IBV_QP_MAX_QP_RD_ATOMIC,
    RIGHTS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE,
    PATIENCE = 20, // seconds
    MOST = 4,      // QPs
    PART = 64,     // bytes of each part of the memory
};

// Parts of the memory: source, destination, and target of the peer.
enum { FROM, INTO, PEERS, PARTS };

static struct ibv_context *device;
static struct ibv_pd *pd;
static struct ibv_comp_channel *channel;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static char memory[PARTS][PART];
static struct ibv_qp *qps[MOST], *qp; // the newest
static int count;

static void check(int holds, const char *what)
{
    if (!holds) {
        printf("failed: %s (%s)\n", what, strerrorname_np(errno));
        exit(1);
    }
}

static void opens(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    for (int n = 0; list && list[n]; n++)
        if (!strcmp(ibv_get_device_name(list[n]), "rnicd1"))
            device = ibv_open_device(list[n]);
    check(device != NULL, "rnicd1 is opened");
    ibv_free_device_list(list);
    pd = ibv_alloc_pd(device);
    channel = ibv_create_comp_channel(device);
    check(pd && channel, "a PD and a channel are created");
    cq = ibv_create_cq(device, 64, NULL, channel, 0);
    mr = ibv_reg_mr(pd, memory, sizeof memory, RIGHTS);
    check(cq && mr, "a CQ and a region are created");
}

static int to_init(void)
{
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = RIGHTS};
    return ibv_modify_qp(qp, &a, PLACE);
}

// Creates a QP in INIT, and prints its number and a GID of the device.
static void make(void)
{
    struct ibv_qp_init_attr wanted = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC};
    wanted.cap = (struct ibv_qp_cap){8, 8, 1, 1, 0};
    wanted.sq_sig_all = 1;
    check(count < MOST, "the table of QPs has room");
    qps[count++] = qp = ibv_create_qp(pd, &wanted);
    check(qp && to_init() == 0, "a QP is created in INIT");
    union ibv_gid gid;
    char text[INET6_ADDRSTRLEN];
    check(ibv_query_gid(device, 1, 0, &gid) == 0, "the GID is queried");
    printf("answer: %u %s\n", qp->qp_num, inet_ntop(AF_INET6, gid.raw, text, sizeof text));
}

static int to_rtr(uint32_t peer, const char *gid, uint32_t psn)
{
    struct ibv_qp_attr a = {
        .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer, .rq_psn = psn,
        .max_dest_rd_atomic = 1, .min_rnr_timer = 12,
        .ah_attr = {.is_global = 1, .port_num = 1, .grh.hop_limit = 64},
    };
    check(inet_pton(AF_INET6, gid, a.ah_attr.grh.dgid.raw) == 1, "the GID is valid");
    return ibv_modify_qp(qp, &a, PEER);
}

static int to_rts(uint32_t psn, int timeout, int retries)
{
    struct ibv_qp_attr a = {
        .qp_state = IBV_QPS_RTS, .sq_psn = psn, .timeout = timeout, .retry_cnt = retries,
        .rnr_retry = 7, .max_rd_atomic = 1,
    };
    return ibv_modify_qp(qp, &a, SENDS);
}

static int reset(void)
{
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_RESET};
    int refused = ibv_modify_qp(qp, &a, IBV_QP_STATE);
    return refused ? refused : to_init();
}

static void state(void)
{
    struct ibv_qp_attr a;
    struct ibv_qp_init_attr init;
    check(ibv_query_qp(qp, &a, IBV_QP_STATE, &init) == 0, "the state is queried");
    printf("answer: %d\n", a.qp_state);
}

static int receives(uint64_t wr_id)
{
    struct ibv_sge sge = {(uintptr_t)memory[INTO], PART, mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = wr_id, .sg_list = &sge, .num_sge = 1}, *bad;
    return ibv_post_recv(qp, &wr, &bad);
}

// Posts a Send or Write of these bytes, or a Read.
static int sends(enum ibv_wr_opcode opcode, uint64_t wr_id, uint64_t there, uint32_t rkey)
{
    struct ibv_sge sge = {(uintptr_t)memory[FROM], PART, mr->lkey};
    struct ibv_send_wr wr = {.wr_id = wr_id, .sg_list = &sge, .num_sge = 1, .opcode = opcode}, *bad;
    wr.wr.rdma.remote_addr = there;
    wr.wr.rdma.rkey = rkey;
    return ibv_post_send(qp, &wr, &bad);
}

static int comes(int fd, int ms)
{
    struct pollfd one = {.fd = fd, .events = POLLIN};
    return poll(&one, 1, ms) == 1;
}

// Prints the next completion: request ID, status and vendor error.
static void completion(void)
{
    struct ibv_wc wc;
    time_t until = time(NULL) + PATIENCE;
    for (;;) {
        // Armed before the last poll, so that no completion is missed.
        check(ibv_req_notify_cq(cq, 0) == 0, "the CQ is armed");
        int found = ibv_poll_cq(cq, 1, &wc);
        check(found >= 0, "the CQ is polled");
        if (found == 1)
            break;
        if (!comes(channel->fd, PATIENCE * 1000) || time(NULL) > until) {
            puts("answer: none");
            return;
        }
        struct ibv_cq *of;
        void *context;
        check(ibv_get_cq_event(channel, &of, &context) == 0, "the event of the CQ is read");
        ibv_ack_cq_events(of, 1);
    }
    printf("answer: %" PRIu64 " %d %u\n", wc.wr_id, wc.status, wc.vendor_err);
}

// Prints the next asynchronous event, or "none" if no event occurs within `ms` milliseconds.
static void event(int ms)
{
    struct ibv_async_event event;
    if (!comes(device->async_fd, ms)) {
        puts("answer: none");
        return;
    }
    check(ibv_get_async_event(device, &event) == 0, "the event is read");
    int is_own = event.element.qp == qp;
    printf("answer: %s\n", is_own ? ibv_event_type_str(event.event_type) : "of another");
    ibv_ack_async_event(&event);
}

static void does(char *line)
{
    char verb[16] = "", word[PART] = "";
    uint64_t a = 0, b = 0, c = 0;
    sscanf(line, "%15s", verb);
    if (!strcmp(verb, "make")) {
        make();
    } else if (sscanf(line, "rtr %" SCNu64 " %63s %" SCNu64, &a, word, &b) == 3) {
        printf("answer: %d\n", to_rtr(a, word, b));
    } else if (sscanf(line, "rts %" SCNu64 " %" SCNu64 " %" SCNu64, &a, &b, &c) == 3) {
        printf("answer: %d\n", to_rts(a, b, c));
    } else if (!strcmp(verb, "reset")) {
        printf("answer: %d\n", reset());
    } else if (!strcmp(verb, "state")) {
        state();
    } else if (sscanf(line, "receive %" SCNu64, &a) == 1) {
        printf("answer: %d\n", receives(a));
    } else if (sscanf(line, "send %" SCNu64 " %63s", &a, memory[FROM]) == 2) {
        printf("answer: %d\n", sends(IBV_WR_SEND, a, 0, 0));
    } else if (sscanf(line, "write %" SCNu64 " %" SCNu64 " %" SCNu64 " %63s", &a, &b, &c,
                      memory[FROM]) == 4) {
        printf("answer: %d\n", sends(IBV_WR_RDMA_WRITE, a, b, c));
    } else if (sscanf(line, "read %" SCNu64 " %" SCNu64 " %" SCNu64, &a, &b, &c) == 3) {
        printf("answer: %d\n", sends(IBV_WR_RDMA_READ, a, b, c));
    } else if (!strcmp(verb, "memory")) {
        printf("answer: %" PRIuPTR " %u\n", (uintptr_t)memory[PEERS], mr->rkey);
    } else if (!strcmp(verb, "sent")) {
        printf("answer: %.*s\n", PART, memory[FROM]);
    } else if (!strcmp(verb, "received")) {
        printf("answer: %.*s\n", PART, memory[INTO]);
    } else if (!strcmp(verb, "written")) {
        printf("answer: %.*s\n", PART, memory[PEERS]);
    } else if (!strcmp(verb, "completion")) {
        completion();
    } else if (!strcmp(verb, "event")) {
        event(PATIENCE * 1000);
    } else if (!strcmp(verb, "quiet")) {
        event(0);
    } else {
        check(0, "the command is known");
    }
}

int main(void)
{
    char line[256];
    setvbuf(stdout, NULL, _IOLBF, 0);
    opens();
    while (fgets(line, sizeof line, stdin))
        does(line);
    while (count > 0)
        check(ibv_destroy_qp(qps[--count]) == 0, "the QP is destroyed");
    check(ibv_dereg_mr(mr) == 0 && ibv_destroy_cq(cq) == 0, "region and CQ are destroyed");
    check(ibv_destroy_comp_channel(channel) == 0 && ibv_dealloc_pd(pd) == 0, "both are destroyed");
    check(ibv_close_device(device) == 0, "the device is closed");
    return 0;
}
