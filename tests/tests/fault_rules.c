// Two QPs of one process that are connected to each other, on the first device that it sees, under
// fault rules. They share an SRQ if the environment variable SRQ is set. Each argument is a step,
// and each step that has a result prints a line:
//
//   send, write, read, atomic   posts a request on the first QP (and a receive on the second)
//   wc, receive                 waits for a completion of the first or second QP: its status
//   no_wc                       checks that there is no completion of the first QP
//   arm                         arms the CQ of the first QP
//   cq_event, no_cq_event       waits for its completion event, or checks that none is ready
//   get_cq_event                prints the error number of ibv_get_cq_event
//   error                       moves the first QP to ERR
//   event                       waits for an asynchronous event: its number, and its port if any
//   port                        prints the state of the port
//   state                       prints the states of both QPs
//   both_fail                   waits until both QPs are in ERR
//   reg_mr                      registers memory: 0 or the error number
//   input                       prints "ready" and waits for a line from standard input

#include "refusals.h"
#include "rc_qps.h"
#include "rdma_cm.h"

#include <poll.h>
#include <time.h>

enum {
    DEPTH = 64,
    LENGTH = 4096,
    DEADLINE = 180, // seconds, for completions and events that should come at once
};

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static struct ibv_comp_channel *channel;
static struct ibv_cq *cq[2];
static struct ibv_srq *srq;
static struct ibv_qp *qp[2];
// Of the iWARP device.
static struct rdma_cm_id *id[2];
static char bytes[LENGTH];

static void create_objects(void)
{
    MUST((pd = ibv_alloc_pd(context)) != NULL);
    MUST((mr = ibv_reg_mr(pd, bytes, LENGTH, ALL)) != NULL);
    MUST((channel = ibv_create_comp_channel(context)) != NULL);
    struct ibv_srq_init_attr of_srq = {.attr = {.max_wr = DEPTH, .max_sge = 1}};
    if (getenv("SRQ"))
        MUST((srq = ibv_create_srq(pd, &of_srq)) != NULL);
    for (int n = 0; n < 2; n++) {
        struct ibv_comp_channel *notified = n ? NULL : channel;
        MUST((cq[n] = ibv_create_cq(context, 2 * DEPTH, NULL, notified, 0)) != NULL);
    }
}

static void connect_to_each_other(void)
{
    union ibv_gid gid;
    MUST(!ibv_query_gid(context, 1, 0, &gid));
    // Half a second of retries, and 0.64 ms for each RNR NAK.
    struct retries p = {.timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .min_rnr_timer = 12};
    if (getenv("RNR_RETRY"))
        p.rnr_retry = atoi(getenv("RNR_RETRY"));
    for (int n = 0; n < 2; n++)
        qp[n] = create_rc_with(pd, cq[n], DEPTH, srq);
    for (int n = 0; n < 2; n++)
        connect_rc(qp[n], gid, qp[!n]->qp_num, p);
}

static void create_iwarp(int n)
{
    struct ibv_qp_init_attr a = {.send_cq = cq[n], .recv_cq = cq[n], .qp_type = IBV_QPT_RC};
    a.srq = srq;
    a.cap = (struct ibv_qp_cap){DEPTH, DEPTH, 1, 1, 64};
    MUST(!rdma_create_qp(id[n], pd, &a));
    qp[n] = id[n]->qp;
}

// Connects the QPs of the iWARP device, which have no numbers that a program could exchange.
static void connect_iwarp(void)
{
    struct rdma_cm_id *listener;
    struct sockaddr_in any_port = loopback(0);
    MUST((events = rdma_create_event_channel()) != NULL);
    MUST(!rdma_create_id(events, &listener, NULL, RDMA_PS_TCP));
    MUST(!rdma_bind_addr(listener, (struct sockaddr *)&any_port) && !rdma_listen(listener, 1));
    MUST(!rdma_create_id(events, &id[0], NULL, RDMA_PS_TCP));
    resolve(id[0], rdma_get_src_port(listener));
    context = id[0]->verbs;
    create_objects();
    create_iwarp(0);
    struct rdma_conn_param p = {.initiator_depth = 4, .responder_resources = 4};
    MUST(!rdma_connect(id[0], &p));
    struct rdma_cm_event *asked = next(events, RDMA_CM_EVENT_CONNECT_REQUEST);
    id[1] = asked->id;
    create_iwarp(1);
    MUST(!rdma_ack_cm_event(asked) && !rdma_accept(id[1], &p));
    expect(events, RDMA_CM_EVENT_ESTABLISHED);
    expect(events, RDMA_CM_EVENT_ESTABLISHED);
    MUST(!rdma_destroy_id(listener));
}

static void post(enum ibv_wr_opcode opcode)
{
    struct ibv_sge sge = {(uintptr_t)bytes, 8, mr->lkey};
    if (opcode == IBV_WR_SEND) {
        struct ibv_recv_wr wr = {.sg_list = &sge, .num_sge = 1}, *bad;
        MUST(!(srq ? ibv_post_srq_recv(srq, &wr, &bad) : ibv_post_recv(qp[1], &wr, &bad)));
    }
    struct ibv_send_wr wr = {.opcode = opcode, .sg_list = &sge, .num_sge = 1}, *bad;
    wr.send_flags = IBV_SEND_SIGNALED;
    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        wr.wr.atomic.remote_addr = (uintptr_t)bytes + 64;
        wr.wr.atomic.rkey = mr->rkey;
    } else {
        wr.wr.rdma.remote_addr = (uintptr_t)bytes + 64;
        wr.wr.rdma.rkey = mr->rkey;
    }
    MUST(!ibv_post_send(qp[0], &wr, &bad));
}

static void complete(const char *step, int n)
{
    struct ibv_wc wc;
    time_t until = time(NULL) + DEADLINE;
    int got;
    while (!(got = ibv_poll_cq(cq[n], 1, &wc)))
        MUST(time(NULL) < until);
    MUST(got == 1);
    printf("%s %d\n", step, wc.status);
}

static void completion_event(void)
{
    struct ibv_cq *found;
    void *own;
    MUST(!ibv_get_cq_event(channel, &found, &own) && found == cq[0]);
    ibv_ack_cq_events(found, 1);
    puts("cq_event");
}

static void event(void)
{
    struct ibv_async_event found;
    MUST(!ibv_get_async_event(context, &found));
    int type = found.event_type;
    switch (type) {
    case IBV_EVENT_PORT_ACTIVE:
    case IBV_EVENT_PORT_ERR:
    case IBV_EVENT_LID_CHANGE:
    case IBV_EVENT_PKEY_CHANGE:
    case IBV_EVENT_GID_CHANGE:
    case IBV_EVENT_SM_CHANGE:
    case IBV_EVENT_CLIENT_REREGISTER:
        printf("event %d port %d\n", type, found.element.port_num);
        break;
    case IBV_EVENT_DEVICE_FATAL:
        printf("event %d\n", type);
        break;
    case IBV_EVENT_CQ_ERR:
        printf("event %d cq %d\n", type, found.element.cq == cq[1]);
        break;
    case IBV_EVENT_SRQ_ERR:
        MUST(found.element.srq == srq);
        printf("event %d srq\n", type);
        break;
    default:
        printf("event %d qp %d\n", type, found.element.qp == qp[1]);
    }
    ibv_ack_async_event(&found);
}

static enum ibv_qp_state state_of(int n)
{
    struct ibv_qp_attr a;
    struct ibv_qp_init_attr init;
    MUST(!ibv_query_qp(qp[n], &a, IBV_QP_STATE, &init));
    return a.qp_state;
}

static void both_fail(void)
{
    time_t until = time(NULL) + DEADLINE;
    while (state_of(0) != IBV_QPS_ERR || state_of(1) != IBV_QPS_ERR)
        MUST(time(NULL) < until);
}

static void step(const char *name)
{
    if (!strcmp(name, "send")) {
        post(IBV_WR_SEND);
    } else if (!strcmp(name, "write")) {
        post(IBV_WR_RDMA_WRITE);
    } else if (!strcmp(name, "read")) {
        post(IBV_WR_RDMA_READ);
    } else if (!strcmp(name, "atomic")) {
        post(IBV_WR_ATOMIC_FETCH_AND_ADD);
    } else if (!strcmp(name, "wc")) {
        complete(name, 0);
    } else if (!strcmp(name, "no_wc")) {
        struct ibv_wc wc;
        MUST(ibv_poll_cq(cq[0], 1, &wc) == 0);
    } else if (!strcmp(name, "receive")) {
        complete(name, 1);
    } else if (!strcmp(name, "event")) {
        event();
    } else if (!strcmp(name, "arm")) {
        MUST(!ibv_req_notify_cq(cq[0], 0));
    } else if (!strcmp(name, "cq_event")) {
        completion_event();
    } else if (!strcmp(name, "get_cq_event")) {
        struct ibv_cq *none;
        void *own;
        MUST(ibv_get_cq_event(channel, &none, &own) == -1);
        printf("%s %d\n", name, errno);
    } else if (!strcmp(name, "no_cq_event")) {
        struct pollfd channel_ready = {.fd = channel->fd, .events = POLLIN};
        MUST(poll(&channel_ready, 1, 0) == 0);
    } else if (!strcmp(name, "error")) {
        struct ibv_qp_attr a = {.qp_state = IBV_QPS_ERR};
        MUST(!ibv_modify_qp(qp[0], &a, IBV_QP_STATE));
    } else if (!strcmp(name, "port")) {
        struct ibv_port_attr a;
        MUST(!ibv_query_port(context, 1, &a));
        printf("port %d\n", a.state);
    } else if (!strcmp(name, "state")) {
        printf("state %d %d\n", state_of(0), state_of(1));
    } else if (!strcmp(name, "both_fail")) {
        both_fail();
    } else if (!strcmp(name, "reg_mr")) {
        errno = 0;
        struct ibv_mr *made = ibv_reg_mr(pd, bytes, LENGTH, ALL);
        printf("reg_mr %d\n", made ? 0 : errno);
        MUST(!made || !ibv_dereg_mr(made));
    } else if (!strcmp(name, "input")) {
        char line[64];
        puts("ready");
        MUST(fgets(line, sizeof line, stdin));
    } else {
        fprintf(stderr, "unknown step %s\n", name);
        exit(1);
    }
}

static int is_iwarp(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    MUST(list && *list);
    int found = list[0]->transport_type == IBV_TRANSPORT_IWARP;
    ibv_free_device_list(list);
    return found;
}

int main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    int of_iwarp = is_iwarp();
    if (of_iwarp) {
        connect_iwarp();
    } else {
        context = open_roce();
        create_objects();
        connect_to_each_other();
    }
    for (int n = 1; n < argc; n++)
        step(argv[n]);
    for (int n = 0; n < 2; n++) {
        if (of_iwarp)
            rdma_destroy_qp(id[n]);
        else
            MUST(!ibv_destroy_qp(qp[n]));
        MUST(!ibv_destroy_cq(cq[n]));
    }
    MUST(!srq || !ibv_destroy_srq(srq));
    MUST(!ibv_destroy_comp_channel(channel));
    MUST(!ibv_dereg_mr(mr) && !ibv_dealloc_pd(pd));
    if (of_iwarp) {
        MUST(!rdma_destroy_id(id[0]) && !rdma_destroy_id(id[1]));
        rdma_destroy_event_channel(events);
    } else {
        MUST(!ibv_close_device(context));
    }
    return 0;
}
