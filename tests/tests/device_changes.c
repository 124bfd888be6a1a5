// Two RC QPs on each of up to two RoCE devices, connected to each other on their device, under
// fault rules that change devices. Each argument is a step. A digit at its end selects the device;
// the default is the first. Each step that has a result prints a line:
//
//   write, wc       posts a Write on the first QP; waits for a completion on it
//   post, poll      posts a Write and polls once: the error number, and the number of completions
//   event           waits for an asynchronous event: its number, and its port if any, or the error
//   list            the names in the list of devices
//   open            opens the device again by its name, with new objects
//   verbs           the error numbers of verbs that create or query objects
//   destroy         destroys all objects and the context: 0 if each verb succeeds
//   state           the states of both QPs
//   gid             the entry 0 and 1 of the GID table: the error number of ibv_query_gid_ex, and
//                   whether ibv_query_gid returns zeros; the size of ibv_query_gid_table
//   rtr             moves a new QP to RTR: the error number
//   cross           posts a Write from a new QP of the first device to one of the second: its status
//   datagram        sends a datagram from one UD QP to another, and waits for its completion
//   received        the number of the next datagram that arrives, from 1
//   ah              creates an address handle: the error number
//   pkey, link      the P_Key; width, speed and state of the port
//   reg_mr          registers and deregisters memory
//   input           prints "ready" and waits for a line from standard input

#include "refusals.h"
#include "rc_qps.h"

#include <arpa/inet.h>
#include <time.h>

enum {
    DEPTH = 64,
    LENGTH = 4096,
    DEVICES = 2,
    DEADLINE = 180, // seconds, for completions and events that should come at once
};

// A device with the objects of the program.
struct rail {
    char name[IBV_SYSFS_NAME_MAX];
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_mr *mr;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq[2];
    struct ibv_qp *qp[2];
    // Created by the first step that needs them.
    struct ibv_qp *ud[2];
    struct ibv_ah *ah;
    uint32_t datagrams;
};

static struct rail rails[DEVICES];
static char bytes[LENGTH];
static const struct retries RETRIES = {
    .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .min_rnr_timer = 12};

static void make_objects(struct rail *r)
{
    union ibv_gid gid;
    MUST((r->pd = ibv_alloc_pd(r->context)) != NULL);
    MUST((r->mr = ibv_reg_mr(r->pd, bytes, LENGTH, ALL)) != NULL);
    MUST((r->channel = ibv_create_comp_channel(r->context)) != NULL);
    for (int n = 0; n < 2; n++) {
        MUST((r->cq[n] = ibv_create_cq(r->context, 2 * DEPTH, NULL, r->channel, 0)) != NULL);
        r->qp[n] = create_rc(r->pd, r->cq[n], DEPTH);
    }
    MUST(!ibv_query_gid(r->context, 1, 0, &gid));
    for (int n = 0; n < 2; n++)
        connect_rc(r->qp[n], gid, r->qp[!n]->qp_num, RETRIES);
}

// Opens the device of this name, or the one with this number in the list.
static void open_rail(struct rail *r, const char *name, int number)
{
    int count;
    struct ibv_device **list = ibv_get_device_list(&count);
    MUST(list);
    r->context = NULL;
    for (int n = 0; n < count && !r->context; n++)
        if (name ? !strcmp(list[n]->name, name) : n == number)
            MUST((r->context = ibv_open_device(list[n])) != NULL);
    ibv_free_device_list(list);
    if (r->context) {
        snprintf(r->name, sizeof r->name, "%s", ibv_get_device_name(r->context->device));
        make_objects(r);
    }
}

static int post_on(struct ibv_qp *qp, struct rail *r, uint32_t rkey)
{
    struct ibv_sge sge = {(uintptr_t)bytes, 8, r->mr->lkey};
    struct ibv_send_wr wr = {.opcode = IBV_WR_RDMA_WRITE, .sg_list = &sge, .num_sge = 1}, *bad;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.wr.rdma.remote_addr = (uintptr_t)bytes + 64;
    wr.wr.rdma.rkey = rkey;
    return ibv_post_send(qp, &wr, &bad);
}

static int post(struct rail *r)
{
    return post_on(r->qp[0], r, r->mr->rkey);
}

static int status_of(struct rail *r)
{
    struct ibv_wc wc;
    time_t until = time(NULL) + DEADLINE;
    int got;
    while (!(got = ibv_poll_cq(r->cq[0], 1, &wc)))
        MUST(time(NULL) < until);
    MUST(got == 1);
    return wc.status;
}

static void complete(struct rail *r)
{
    printf("wc %d\n", status_of(r));
}

static void cross(void)
{
    struct ibv_qp *qp[2];
    union ibv_gid gid[2];
    for (int n = 0; n < 2; n++) {
        qp[n] = create_rc(rails[n].pd, rails[n].cq[0], DEPTH);
        MUST(!ibv_query_gid(rails[n].context, 1, 0, &gid[n]));
    }
    for (int n = 0; n < 2; n++)
        connect_rc(qp[n], gid[!n], qp[!n]->qp_num, RETRIES);
    MUST(!post_on(qp[0], &rails[0], rails[1].mr->rkey));
    printf("cross %d\n", status_of(&rails[0]));
    MUST(!ibv_destroy_qp(qp[0]) && !ibv_destroy_qp(qp[1]));
}

static void event(struct rail *r)
{
    struct ibv_async_event found;
    if (ibv_get_async_event(r->context, &found)) {
        printf("event %s\n", strerrorname_np(errno));
        return;
    }
    if (found.event_type == IBV_EVENT_DEVICE_FATAL)
        printf("event %d\n", found.event_type);
    else
        printf("event %d port %d\n", found.event_type, found.element.port_num);
    ibv_ack_async_event(&found);
}

static void list(void)
{
    int count;
    struct ibv_device **list = ibv_get_device_list(&count);
    MUST(list);
    printf("devices");
    for (int n = 0; n < count; n++)
        printf(" %s", ibv_get_device_name(list[n]));
    printf("\n");
    ibv_free_device_list(list);
}

// Error number of a call that returns a pointer.
#define NUMBER_OF(call) (errno = 0, (call) ? 0 : errno)

static void verbs(struct rail *r)
{
    struct ibv_device_attr device;
    struct ibv_port_attr port;
    union ibv_gid gid;
    __be16 pkey;
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
    struct ibv_qp_init_attr init = {.send_cq = r->cq[0], .recv_cq = r->cq[0]};
    init.qp_type = IBV_QPT_RC;
    init.cap = (struct ibv_qp_cap){1, 1, 1, 1, 0};
    struct ibv_srq_init_attr srq = {.attr = {.max_wr = 1, .max_sge = 1}};
    struct ibv_recv_wr wr = {0}, *bad;
    void *of_channel;
    struct ibv_cq *cq;
    int made[] = {
        ibv_query_device(r->context, &device),
        ibv_query_port(r->context, 1, &port),
        ibv_query_gid(r->context, 1, 0, &gid) ? errno : 0,
        ibv_query_pkey(r->context, 1, 0, &pkey) ? errno : 0,
        NUMBER_OF(ibv_alloc_pd(r->context)),
        NUMBER_OF(ibv_reg_mr(r->pd, bytes, LENGTH, ALL)),
        NUMBER_OF(ibv_alloc_mw(r->pd, IBV_MW_TYPE_2)),
        NUMBER_OF(ibv_create_comp_channel(r->context)),
        NUMBER_OF(ibv_create_cq(r->context, 4, NULL, NULL, 0)),
        ibv_resize_cq(r->cq[0], 4 * DEPTH),
        ibv_req_notify_cq(r->cq[0], 0),
        NUMBER_OF(ibv_create_srq(r->pd, &srq)),
        NUMBER_OF(ibv_create_qp(r->pd, &init)),
        ibv_modify_qp(r->qp[1], &attr, IBV_QP_STATE),
        ibv_query_qp(r->qp[1], &attr, IBV_QP_STATE, &init),
        ibv_post_recv(r->qp[1], &wr, &bad),
        post(r),
        ibv_get_cq_event(r->channel, &cq, &of_channel) ? errno : 0,
    };
    printf("verbs");
    for (size_t n = 0; n < sizeof made / sizeof *made; n++)
        printf(" %s", made[n] ? strerrorname_np(made[n]) : "0");
    printf("\n");
}

static void destroy(struct rail *r)
{
    int failed = 0;
    for (int n = 0; n < 2; n++) {
        failed |= ibv_destroy_qp(r->qp[n]);
        failed |= ibv_destroy_cq(r->cq[n]);
    }
    failed |= ibv_destroy_comp_channel(r->channel);
    failed |= ibv_dereg_mr(r->mr);
    failed |= ibv_dealloc_pd(r->pd);
    failed |= ibv_close_device(r->context);
    printf("destroy %d\n", failed);
    r->context = NULL;
}

static void gid(struct rail *r)
{
    static const union ibv_gid none;
    struct ibv_gid_entry entry[64];
    printf("gid");
    for (int n = 0; n < 2; n++) {
        union ibv_gid gid;
        MUST(!ibv_query_gid(r->context, 1, n, &gid));
        int is_none = !memcmp(&gid, &none, sizeof gid);
        int failed = ibv_query_gid_ex(r->context, 1, n, entry, 0);
        printf(" %s %s", failed ? strerrorname_np(failed) : "0", is_none ? "zero" : "set");
    }
    printf(" %zd\n", ibv_query_gid_table(r->context, entry, 64, 0));
}

static void rtr(struct rail *r)
{
    struct ibv_qp *qp = create_rc(r->pd, r->cq[0], DEPTH);
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024};
    a.dest_qp_num = r->qp[1]->qp_num;
    a.max_dest_rd_atomic = 1;
    a.ah_attr = (struct ibv_ah_attr){.is_global = 1, .port_num = 1};
    a.ah_attr.grh.dgid.raw[10] = a.ah_attr.grh.dgid.raw[11] = 0xff;
    a.ah_attr.grh.dgid.raw[12] = 127;
    a.ah_attr.grh.dgid.raw[15] = 1;
    int failed = ibv_modify_qp(qp, &a,
                               IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                                   IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                                   IBV_QP_MIN_RNR_TIMER);
    printf("rtr %s\n", failed ? strerrorname_np(failed) : "0");
    MUST(!ibv_destroy_qp(qp));
}

static int make_ah(struct rail *r)
{
    struct ibv_ah_attr a = {.is_global = 1, .port_num = 1, .grh.hop_limit = 64};
    // 127.0.0.1
    a.grh.dgid.raw[10] = a.grh.dgid.raw[11] = 0xff;
    a.grh.dgid.raw[12] = 127;
    a.grh.dgid.raw[15] = 1;
    errno = 0;
    r->ah = ibv_create_ah(r->pd, &a);
    return r->ah ? 0 : errno;
}

// The first UD QP sends, and the second receives.
static void make_datagrams(struct rail *r)
{
    struct ibv_qp_init_attr init = {.qp_type = IBV_QPT_UD};
    init.cap = (struct ibv_qp_cap){DEPTH, DEPTH, 1, 1, 0};
    for (int n = 0; n < 2; n++) {
        init.send_cq = init.recv_cq = r->cq[n];
        MUST((r->ud[n] = ibv_create_qp(r->pd, &init)) != NULL);
        struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 7};
        MUST(!ibv_modify_qp(r->ud[n], &a,
                            IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
        a.qp_state = IBV_QPS_RTR;
        MUST(!ibv_modify_qp(r->ud[n], &a, IBV_QP_STATE));
        a.qp_state = IBV_QPS_RTS;
        MUST(!ibv_modify_qp(r->ud[n], &a, IBV_QP_STATE | IBV_QP_SQ_PSN));
    }
    for (int n = 0; n < 4; n++) {
        struct ibv_sge sge = {(uintptr_t)bytes + 1024, 64, r->mr->lkey};
        struct ibv_recv_wr wr = {.sg_list = &sge, .num_sge = 1}, *bad;
        MUST(!ibv_post_recv(r->ud[1], &wr, &bad));
    }
    MUST(!make_ah(r));
}

static void datagram(struct rail *r)
{
    struct ibv_send_wr wr = {.opcode = IBV_WR_SEND_WITH_IMM, .send_flags = IBV_SEND_SIGNALED};
    struct ibv_send_wr *bad;
    if (!r->ah)
        make_datagrams(r);
    wr.imm_data = htonl(++r->datagrams);
    wr.wr.ud.ah = r->ah;
    wr.wr.ud.remote_qpn = r->ud[1]->qp_num;
    wr.wr.ud.remote_qkey = 7;
    MUST(!ibv_post_send(r->ud[0], &wr, &bad));
    complete(r);
}

static void received(struct rail *r)
{
    struct ibv_wc wc;
    time_t until = time(NULL) + DEADLINE;
    while (!ibv_poll_cq(r->cq[1], 1, &wc))
        MUST(time(NULL) < until);
    printf("received %u\n", ntohl(wc.imm_data));
}

static void step(char *name)
{
    char *end = name + strlen(name) - 1;
    int number = *end >= '0' && *end < '0' + DEVICES ? *end - '0' : 0;
    if (*end >= '0' && *end <= '9')
        *end = 0;
    struct rail *r = &rails[number];
    struct ibv_port_attr port;
    __be16 pkey;
    if (!strcmp(name, "write")) {
        MUST(!post(r));
    } else if (!strcmp(name, "wc")) {
        complete(r);
    } else if (!strcmp(name, "post")) {
        int failed = post(r);
        printf("post %s\n", failed ? strerrorname_np(failed) : "0");
    } else if (!strcmp(name, "poll")) {
        struct ibv_wc wc;
        printf("poll %d\n", ibv_poll_cq(r->cq[0], 1, &wc));
    } else if (!strcmp(name, "event")) {
        event(r);
    } else if (!strcmp(name, "list")) {
        list();
    } else if (!strcmp(name, "open")) {
        open_rail(r, r->name, number);
        printf("open %s\n", r->context ? r->name : "nothing");
    } else if (!strcmp(name, "verbs")) {
        verbs(r);
    } else if (!strcmp(name, "destroy")) {
        destroy(r);
    } else if (!strcmp(name, "state")) {
        struct ibv_qp_attr a[2];
        struct ibv_qp_init_attr init;
        for (int n = 0; n < 2; n++)
            MUST(!ibv_query_qp(r->qp[n], &a[n], IBV_QP_STATE, &init));
        printf("state %d %d\n", a[0].qp_state, a[1].qp_state);
    } else if (!strcmp(name, "gid")) {
        gid(r);
    } else if (!strcmp(name, "rtr")) {
        rtr(r);
    } else if (!strcmp(name, "cross")) {
        cross();
    } else if (!strcmp(name, "datagram")) {
        datagram(r);
    } else if (!strcmp(name, "received")) {
        received(r);
    } else if (!strcmp(name, "ah")) {
        struct ibv_ah *kept = r->ah;
        int failed = make_ah(r);
        printf("ah %s\n", failed ? strerrorname_np(failed) : "0");
        MUST(!r->ah || !ibv_destroy_ah(r->ah));
        r->ah = kept;
    } else if (!strcmp(name, "pkey")) {
        MUST(!ibv_query_pkey(r->context, 1, 0, &pkey));
        printf("pkey %#06x\n", ntohs(pkey));
    } else if (!strcmp(name, "link")) {
        MUST(!ibv_query_port(r->context, 1, &port));
        printf("link %d %d %d\n", port.active_width, port.active_speed, port.state);
    } else if (!strcmp(name, "reg_mr")) {
        struct ibv_mr *made = ibv_reg_mr(r->pd, bytes, LENGTH, ALL);
        MUST(made && !ibv_dereg_mr(made));
    } else if (!strcmp(name, "input")) {
        char line[64];
        puts("ready");
        MUST(fgets(line, sizeof line, stdin));
    } else {
        fprintf(stderr, "unknown step %s\n", name);
        exit(1);
    }
}

int main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int n = 0; n < DEVICES; n++)
        open_rail(&rails[n], NULL, n);
    for (int n = 1; n < argc; n++)
        step(argv[n]);
    for (int n = 0; n < DEVICES; n++) {
        struct rail *r = &rails[n];
        if (!r->context)
            continue;
        MUST(!r->ah || !ibv_destroy_ah(r->ah));
        for (int m = 0; m < 2; m++) {
            MUST(!r->ud[m] || !ibv_destroy_qp(r->ud[m]));
            MUST(!ibv_destroy_qp(r->qp[m]) && !ibv_destroy_cq(r->cq[m]));
        }
        MUST(!ibv_destroy_comp_channel(r->channel));
        MUST(!ibv_dereg_mr(r->mr) && !ibv_dealloc_pd(r->pd) && !ibv_close_device(r->context));
    }
    return 0;
}
