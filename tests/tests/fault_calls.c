// Calls that the library executes without the daemon, under fault rules, on two connected RC QPs of
// one process. The device is the first one that librdmacm uses. Each argument is a step, and each
// step prints a line:
//
//   post=OPCODES   posts a chain: w Write, r Read. The error number, and the index of *bad_wr
//   wr=OPCODES     the same with ibv_wr_start and ibv_wr_complete: the error number
//   bind           binds a memory window
//   recv=N, srq=N  posts a chain of receives
//   wc=N           waits for completions of the send CQ: their wr_ids, counted over all steps
//   poll, next     polls the empty send CQ by ibv_poll_cq (the result and errno) or ibv_start_poll
//   notify         arms the receive CQ, which has a channel, and the send CQ, which has none
//   fork           polls in a child: the error number
//   ah, port, pkey creates an address handle, or queries
//   destroy        destroys an object of each kind twice: the error numbers of the first attempts
//   addr, route    resolves an address or a route: the error number, or the event and its status
//   sync           resolves an address with a synchronous id: the error number
//   input          prints the numbers of QP, send CQ and PD, and waits for a line

#include "refusals.h"
#include "rdma_cm.h"

#include <sys/wait.h>
#include <time.h>

enum {
    DEPTH = 64,
    CHAIN = 16,
    DEADLINE = 180, // seconds, for completions that should come at once
    OPS = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_READ,
    ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
             IBV_ACCESS_MW_BIND,
};

static struct rdma_cm_id *active, *passive, *listener;
static struct ibv_comp_channel *channel;
static struct ibv_cq *send_cq, *recv_cq;
static struct ibv_cq_ex *extended_cq;
static struct ibv_srq *srq;
static struct ibv_mr *mr;
static struct ibv_mw *window;
static char bytes[256];
static uint64_t posted;

static struct rdma_cm_id *new_id(void)
{
    struct rdma_cm_id *id;
    check(!rdma_create_id(events, &id, NULL, RDMA_PS_TCP));
    return id;
}

// Resolves the address of the listener and the route to it.
static struct rdma_cm_id *resolved(void)
{
    struct rdma_cm_id *id = new_id();
    struct sockaddr_in address = loopback(rdma_get_src_port(listener));
    check(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 1000));
    expect(events, RDMA_CM_EVENT_ADDR_RESOLVED);
    check(!rdma_resolve_route(id, 1000));
    expect(events, RDMA_CM_EVENT_ROUTE_RESOLVED);
    return id;
}

static void create_qp(struct rdma_cm_id *id, struct ibv_cq *send, struct ibv_cq *recv)
{
    struct ibv_qp_init_attr_ex a = {.qp_type = IBV_QPT_RC, .send_cq = send, .recv_cq = recv};
    a.cap = (struct ibv_qp_cap){DEPTH, DEPTH, 1, 1, 0};
    a.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    a.pd = id->pd;
    a.sq_sig_all = 1;
    a.send_ops_flags = OPS;
    check(!rdma_create_qp_ex(id, &a));
}

static void connect_to_each_other(void)
{
    active = resolved();
    struct ibv_context *of = active->verbs;
    check((channel = ibv_create_comp_channel(of)) != NULL);
    struct ibv_cq_init_attr_ex a = {.cqe = DEPTH};
    check((extended_cq = ibv_create_cq_ex(of, &a)) != NULL);
    send_cq = ibv_cq_ex_to_cq(extended_cq);
    check((recv_cq = ibv_create_cq(of, 2 * DEPTH, NULL, channel, 0)) != NULL);
    struct ibv_srq_init_attr of_srq = {.attr = {.max_wr = DEPTH, .max_sge = 1}};
    check((srq = ibv_create_srq(active->pd, &of_srq)) != NULL);
    check((mr = ibv_reg_mr(active->pd, bytes, sizeof bytes, ACCESS)) != NULL);
    create_qp(active, send_cq, recv_cq);
    struct rdma_conn_param p = {.initiator_depth = 4, .responder_resources = 4, .retry_count = 7};
    check(!rdma_connect(active, &p));
    struct rdma_cm_event *asked = next(events, RDMA_CM_EVENT_CONNECT_REQUEST);
    passive = asked->id;
    create_qp(passive, recv_cq, recv_cq);
    check(!rdma_ack_cm_event(asked) && !rdma_accept(passive, &p));
    expect(events, RDMA_CM_EVENT_ESTABLISHED);
    expect(events, RDMA_CM_EVENT_ESTABLISHED);
}

static void disconnect(void)
{
    rdma_destroy_qp(active);
    rdma_destroy_qp(passive);
    check(!window || !ibv_dealloc_mw(window));
    check(!ibv_dereg_mr(mr) && !ibv_destroy_srq(srq));
    check(!ibv_destroy_cq(send_cq) && !ibv_destroy_cq(recv_cq));
    check(!ibv_destroy_comp_channel(channel));
    // Events of the ended connection may be pending.
    check(!rdma_destroy_id(active) && !rdma_destroy_id(passive));
}

static void post(const char *opcodes)
{
    struct ibv_send_wr wr[CHAIN] = {0}, *bad = NULL;
    struct ibv_sge sge = {(uintptr_t)bytes, 8, mr->lkey};
    int count = strlen(opcodes);
    for (int n = 0; n < count; n++) {
        wr[n] = (struct ibv_send_wr){.wr_id = posted + n, .sg_list = &sge, .num_sge = 1};
        wr[n].opcode = opcodes[n] == 'w' ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ;
        wr[n].wr.rdma.remote_addr = (uintptr_t)bytes + 64;
        wr[n].wr.rdma.rkey = mr->rkey;
        wr[n].next = n + 1 < count ? &wr[n + 1] : NULL;
    }
    begin_call();
    int error = ibv_post_send(active->qp, wr, &bad);
    if (error)
        has_reason(__LINE__, "ibv_post_send", error);
    printf("post %d %d\n", error, error ? (int)(bad - wr) : count);
    posted += count;
}

static void post_extended(const char *opcodes)
{
    struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(active->qp);
    ibv_wr_start(qp);
    for (const char *opcode = opcodes; *opcode; opcode++) {
        qp->wr_id = posted++;
        qp->wr_flags = 0;
        if (*opcode == 'w')
            ibv_wr_rdma_write(qp, mr->rkey, (uintptr_t)bytes + 64);
        else
            ibv_wr_rdma_read(qp, mr->rkey, (uintptr_t)bytes + 64);
        ibv_wr_set_sge(qp, mr->lkey, (uintptr_t)bytes, 8);
    }
    begin_call();
    int error = ibv_wr_complete(qp);
    if (error)
        has_reason(__LINE__, "ibv_wr_complete", error);
    printf("wr %d\n", error);
}

static void bind_window(void)
{
    if (!window)
        check((window = ibv_alloc_mw(active->pd, IBV_MW_TYPE_1)) != NULL);
    struct ibv_mw_bind bind = {.wr_id = posted++, .send_flags = IBV_SEND_SIGNALED};
    bind.bind_info = (struct ibv_mw_bind_info){mr, (uintptr_t)bytes, 8, IBV_ACCESS_REMOTE_READ};
    uint32_t before = window->rkey;
    int error = ibv_bind_mw(active->qp, window, &bind);
    check(!error || window->rkey == before);
    printf("bind %d\n", error);
}

static void receive(const char *step, int count)
{
    struct ibv_recv_wr wr[CHAIN] = {0}, *bad = NULL;
    struct ibv_sge sge = {(uintptr_t)bytes, 8, mr->lkey};
    for (int n = 0; n < count; n++) {
        wr[n] = (struct ibv_recv_wr){.wr_id = n, .sg_list = &sge, .num_sge = 1};
        wr[n].next = n + 1 < count ? &wr[n + 1] : NULL;
    }
    int of_srq = *step == 's';
    begin_call();
    int error = of_srq ? ibv_post_srq_recv(srq, wr, &bad) : ibv_post_recv(active->qp, wr, &bad);
    if (error)
        has_reason(__LINE__, step, error);
    printf("%.4s %d %d\n", of_srq ? "srq" : step, error, error ? (int)(bad - wr) : count);
}

static void complete(int count)
{
    time_t until = time(NULL) + DEADLINE;
    printf("wc");
    while (count > 0) {
        struct ibv_wc wc;
        int got = ibv_poll_cq(send_cq, 1, &wc);
        check(got >= 0 && time(NULL) < until);
        count -= got;
        if (got)
            printf(" %s%d", wc.status ? "failed " : "", (int)wc.wr_id);
    }
    puts("");
}

// Executes a call and prints its result: 0 or the error number.
#define SHOW(name, failed, call)                                                                    \
    do {                                                                                            \
        begin_call();                                                                               \
        int number = (failed) == (call) ? errno : 0;                                                \
        if (number)                                                                                 \
            has_reason(__LINE__, #call, number);                                                    \
        printf("%s %d\n", name, number);                                                            \
    } while (0)

static void poll_in_child(void)
{
    fflush(stdout);
    pid_t child = fork();
    check(child >= 0);
    if (!child) {
        struct ibv_wc wc;
        _exit(ibv_poll_cq(send_cq, 1, &wc) < 0 ? errno : 0);
    }
    int status;
    check(waitpid(child, &status, 0) == child && WIFEXITED(status));
    printf("child %d\n", WEXITSTATUS(status));
}

static void create_ah(void)
{
    union ibv_gid gid;
    check(!ibv_query_gid(active->verbs, 1, 0, &gid));
    struct ibv_ah_attr a = {.is_global = 1, .port_num = 1, .grh = {.dgid = gid}};
    begin_call();
    struct ibv_ah *ah = ibv_create_ah(active->pd, &a);
    printf("ah %d\n", ah ? 0 : errno);
    if (ah)
        check(!ibv_destroy_ah(ah));
}

// Prints the error number of a failed call, or waits for the event of the call and prints it.
static void outcome(const char *call, int failed, int number)
{
    if (failed) {
        has_reason(__LINE__, call, number);
        printf("%s %d\n", call, number);
        return;
    }
    struct rdma_cm_event *event;
    check(!rdma_get_cm_event(events, &event));
    printf("%s %s %d\n", call, rdma_event_str(event->event) + strlen("RDMA_CM_EVENT_"),
           event->status);
    check(!rdma_ack_cm_event(event));
}

// Resolves an address twice on the same id, because a failed call must leave the id usable.
static void resolve_address(void)
{
    struct rdma_cm_id *id = new_id();
    struct sockaddr_in address = loopback(rdma_get_src_port(listener));
    for (int n = 0; n < 2; n++) {
        begin_call();
        int failed = rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 1000);
        outcome("addr", failed, errno);
    }
    check(!rdma_destroy_id(id));
}

static void resolve_route(void)
{
    struct rdma_cm_id *id = new_id();
    struct sockaddr_in address = loopback(rdma_get_src_port(listener));
    check(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 1000));
    expect(events, RDMA_CM_EVENT_ADDR_RESOLVED);
    for (int n = 0; n < 2; n++) {
        begin_call();
        int failed = rdma_resolve_route(id, 1000);
        outcome("route", failed, errno);
    }
    check(!rdma_destroy_id(id));
}

// Resolves an address with a synchronous id, which waits for the event.
static void resolve_synchronously(void)
{
    struct rdma_cm_id *id;
    check(!rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP));
    struct sockaddr_in address = loopback(rdma_get_src_port(listener));
    SHOW("sync", -1, rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 1000));
    check(!rdma_destroy_id(id));
}

static int resolves(const char *step)
{
    return !strcmp(step, "addr") || !strcmp(step, "route") || !strcmp(step, "sync");
}

// Destroys an object of each kind. The first attempt must fail and leave the object as it is.
static void destroy_objects(void)
{
    struct ibv_context *of = active->verbs;
    struct ibv_pd *pd = ibv_alloc_pd(of);
    struct ibv_comp_channel *made = ibv_create_comp_channel(of);
    struct ibv_cq *cq = ibv_create_cq(of, DEPTH, NULL, made, 0);
    struct ibv_srq_init_attr of_srq = {.attr = {.max_wr = DEPTH, .max_sge = 1}};
    struct ibv_srq *queue = ibv_create_srq(pd, &of_srq);
    struct ibv_qp_init_attr of_qp = {.qp_type = IBV_QPT_RC, .send_cq = cq, .recv_cq = cq};
    of_qp.srq = queue;
    of_qp.cap = (struct ibv_qp_cap){DEPTH, 0, 1, 0, 0};
    struct ibv_qp *qp = ibv_create_qp(pd, &of_qp);
    struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
    check(pd && made && cq && queue && qp && mw);
    struct ibv_recv_wr empty = {0}, *bad;
    int all[6];
    begin_call();
    all[0] = ibv_destroy_qp(qp);
    has_reason(__LINE__, "ibv_destroy_qp", all[0]);
    check(!ibv_destroy_qp(qp));
    all[1] = ibv_destroy_srq(queue);
    check(!ibv_post_srq_recv(queue, &empty, &bad) && !ibv_destroy_srq(queue));
    all[2] = ibv_destroy_cq(cq);
    check(!ibv_req_notify_cq(cq, 0) && !ibv_destroy_cq(cq));
    all[3] = ibv_destroy_comp_channel(made);
    check(!ibv_destroy_comp_channel(made));
    all[4] = ibv_dealloc_mw(mw);
    check(!ibv_dealloc_mw(mw));
    all[5] = ibv_dealloc_pd(pd);
    check(!ibv_dealloc_pd(pd));
    printf("destroy %d %d %d %d %d %d\n", all[0], all[1], all[2], all[3], all[4], all[5]);
}

static void step(const char *name)
{
    const char *argument = strchr(name, '=');
    struct ibv_port_attr port;
    uint16_t pkey;
    if (argument)
        argument++;
    if (!strncmp(name, "post=", 5)) {
        post(argument);
    } else if (!strncmp(name, "wr=", 3)) {
        post_extended(argument);
    } else if (!strncmp(name, "recv=", 5) || !strncmp(name, "srq=", 4)) {
        receive(name, atoi(argument));
    } else if (!strncmp(name, "wc=", 3)) {
        complete(atoi(argument));
    } else if (!strcmp(name, "bind")) {
        bind_window();
    } else if (!strcmp(name, "poll")) {
        struct ibv_wc wc;
        begin_call();
        int got = ibv_poll_cq(send_cq, 1, &wc);
        int number = errno;
        if (got < 0)
            has_reason(__LINE__, "ibv_poll_cq", number);
        printf("poll %d %d\n", got, got < 0 ? number : 0);
    } else if (!strcmp(name, "next")) {
        struct ibv_poll_cq_attr a = {0};
        printf("next %d\n", ibv_start_poll(extended_cq, &a));
    } else if (!strcmp(name, "notify")) {
        int with_channel = ibv_req_notify_cq(recv_cq, 0);
        printf("notify %d %d\n", with_channel, ibv_req_notify_cq(send_cq, 0));
    } else if (!strcmp(name, "destroy")) {
        destroy_objects();
    } else if (!strcmp(name, "fork")) {
        poll_in_child();
    } else if (!strcmp(name, "ah")) {
        create_ah();
    } else if (!strcmp(name, "port")) {
        printf("port %d\n", ibv_query_port(active->verbs, 1, &port));
    } else if (!strcmp(name, "pkey")) {
        SHOW("pkey", -1, ibv_query_pkey(active->verbs, 1, 0, &pkey));
    } else if (!strcmp(name, "addr")) {
        resolve_address();
    } else if (!strcmp(name, "route")) {
        resolve_route();
    } else if (!strcmp(name, "sync")) {
        resolve_synchronously();
    } else if (!strcmp(name, "input")) {
        char line[64];
        printf("ready qp=%u cq=%u pd=%u\n", active->qp->qp_num, send_cq->handle,
               active->pd->handle);
        check(fgets(line, sizeof line, stdin));
    } else {
        fprintf(stderr, "unknown step %s\n", name);
        exit(1);
    }
}

int main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    read_reasons();
    check((events = rdma_create_event_channel()) != NULL);
    listener = new_id();
    struct sockaddr_in address = loopback(0);
    check(!rdma_bind_addr(listener, (struct sockaddr *)&address) && !rdma_listen(listener, 1));
    int connects = argc > 1 && !resolves(argv[1]);
    if (connects)
        connect_to_each_other();
    for (int n = 1; n < argc; n++)
        step(argv[n]);
    if (connects)
        disconnect();
    check(!rdma_destroy_id(listener));
    rdma_destroy_event_channel(events);
    return wrong != 0;
}
