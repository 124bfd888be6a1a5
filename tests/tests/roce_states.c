// Moves RC, UC and UD QPs through their states, and checks which attributes are accepted and which
// are refused. Prints "done" on success.

#include "refusals.h"
#include <arpa/inet.h>
#include <poll.h>
#include <rdma/rdma_verbs.h>
#include <time.h>

enum {
    PLACE = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
    PEER = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
           IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
    SENDS = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
            IBV_QP_MAX_QP_RD_ATOMIC,
    NO_QP = 0xfffff0, // no QP has this number
    DEADLINE = 30,     // seconds
};

static struct ibv_context *roce;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_port_attr port;
static union ibv_gid gid;

static struct ibv_qp *made(struct ibv_pd *in, struct ibv_cq *completes, enum ibv_qp_type type)
{
    struct ibv_qp_init_attr wanted = {.send_cq = completes, .recv_cq = completes, .qp_type = type};
    wanted.cap = (struct ibv_qp_cap){4, 4, 1, 1, 16};
    return ibv_create_qp(in, &wanted);
}

static struct ibv_qp_attr attributes(int state)
{
    struct ibv_qp_attr a = {.qp_state = state, .port_num = 1, .path_mtu = port.active_mtu};
    a.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ;
    a.dest_qp_num = NO_QP;
    a.rq_psn = a.sq_psn = 7;
    a.max_dest_rd_atomic = a.max_rd_atomic = 1;
    a.min_rnr_timer = 12;
    a.timeout = 8;
    a.retry_cnt = a.rnr_retry = 1;
    a.ah_attr = (struct ibv_ah_attr){.is_global = 1, .port_num = 1};
    a.ah_attr.grh = (struct ibv_global_route){.dgid = gid, .hop_limit = 64};
    return a;
}

static int moved(struct ibv_qp *qp, int state, int mask)
{
    struct ibv_qp_attr a = attributes(state);
    return ibv_modify_qp(qp, &a, IBV_QP_STATE | mask);
}

// Moves a new QP to this state.
static void bring(struct ibv_qp *qp, int state)
{
    CHECK(moved(qp, IBV_QPS_INIT, PLACE) == 0);
    if (state >= IBV_QPS_RTR)
        CHECK(moved(qp, IBV_QPS_RTR, PEER) == 0);
    if (state >= IBV_QPS_RTS)
        CHECK(moved(qp, IBV_QPS_RTS, SENDS) == 0);
}

static struct ibv_qp_attr queried(struct ibv_qp *qp)
{
    struct ibv_qp_attr a;
    struct ibv_qp_init_attr init;
    CHECK(ibv_query_qp(qp, &a, IBV_QP_STATE, &init) == 0);
    return a;
}

static int sends(struct ibv_qp *qp, uint64_t wr_id)
{
    struct ibv_send_wr wr = {.wr_id = wr_id, .opcode = IBV_WR_SEND}, *bad;
    return ibv_post_send(qp, &wr, &bad);
}

static int receives(struct ibv_qp *qp, uint64_t wr_id)
{
    struct ibv_recv_wr wr = {.wr_id = wr_id}, *bad;
    return ibv_post_recv(qp, &wr, &bad);
}

static struct ibv_wc next(void)
{
    struct ibv_wc wc = {.status = IBV_WC_GENERAL_ERR};
    time_t until = time(NULL) + DEADLINE;
    while (ibv_poll_cq(cq, 1, &wc) == 0)
        if (time(NULL) > until) {
            CHECK(!"a completion arrives");
            break;
        }
    return wc;
}

static void devices(void)
{
    int count;
    struct ibv_device **list = ibv_get_device_list(&count);
    // The RoCE device is first, because programs that take the first device exchange QP numbers.
    CHECK(count == 2 && list[1]->transport_type == IBV_TRANSPORT_IWARP);
    CHECK(list[0]->transport_type == IBV_TRANSPORT_IB && list[0]->node_type == IBV_NODE_CA);
    CHECK(ibv_get_device_guid(list[0]) != ibv_get_device_guid(list[1]));
    // The device reports a path at which its sysfs files are found.
    char path[512], text[16] = "";
    snprintf(path, sizeof path, "%s/node_type", list[0]->ibdev_path);
    FILE *file = fopen(path, "r");
    CHECK(file && fgets(text, sizeof text, file) && !strcmp(text, "1: CA\n"));
    if (file)
        fclose(file);
    struct ibv_context *connects = ibv_open_device(list[1]);
    roce = ibv_open_device(list[0]);
    ibv_free_device_list(list);
    pd = ibv_alloc_pd(roce);
    cq = ibv_create_cq(roce, 64, NULL, NULL, 0);
    CHECK(pd && cq && ibv_query_port(roce, 1, &port) == 0);
    CHECK(port.link_layer == IBV_LINK_LAYER_ETHERNET && port.lid == 0);

    // All queries of a GID agree.
    struct ibv_gid_entry table[64], entry;
    CHECK(ibv_query_gid_table(roce, table, 64, 0) == port.gid_tbl_len);
    for (int n = 0; n < port.gid_tbl_len; n++) {
        CHECK(ibv_query_gid(roce, 1, n, &gid) == 0 && !memcmp(&gid, &table[n].gid, 16));
        CHECK(ibv_query_gid_ex(roce, 1, n, &entry, 0) == 0);
        CHECK(!memcmp(&entry, &table[n], sizeof entry) && entry.gid_type == IBV_GID_TYPE_ROCE_V2);
    }
    CHECK(ibv_query_gid(roce, 1, port.gid_tbl_len, &gid) == -1 && errno == EINVAL);
    gid = table[0].gid;

    // Objects of one device cannot be used with the other.
    struct ibv_pd *other_pd = ibv_alloc_pd(connects);
    struct ibv_cq *other_cq = ibv_create_cq(connects, 4, NULL, NULL, 0);
    CHECK(!made(pd, other_cq, IBV_QPT_RC) && errno == EINVAL);
    CHECK(!made(other_pd, cq, IBV_QPT_RC) && errno == EINVAL);
    CHECK(!made(pd, cq, IBV_QPT_RAW_PACKET) && errno == EOPNOTSUPP);
    CHECK(!made(other_pd, other_cq, IBV_QPT_UD) && errno == EOPNOTSUPP);
    struct rdma_cm_id *id;
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    CHECK(rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP) == 0);
    CHECK(rdma_bind_addr(id, (struct sockaddr *)&any) == 0);
    struct ibv_srq_init_attr srq = {.attr = {4, 1, 0}};
    CHECK(rdma_create_srq(id, pd, &srq) == -1 && errno == EINVAL);
    CHECK(rdma_destroy_id(id) == 0);
    CHECK(ibv_destroy_cq(other_cq) == 0 && ibv_dealloc_pd(other_pd) == 0);
    CHECK(ibv_close_device(connects) == 0);
}

static void steps(void)
{
    struct ibv_qp *qp = made(pd, cq, IBV_QPT_RC);
    CHECK(qp && queried(qp).qp_state == IBV_QPS_RESET);
    CHECK(moved(qp, IBV_QPS_RTR, PEER) == EINVAL && moved(qp, IBV_QPS_RTS, SENDS) == EINVAL);
    CHECK(moved(qp, IBV_QPS_INIT, PLACE & ~IBV_QP_PORT) == EINVAL);
    CHECK(moved(qp, IBV_QPS_RESET, IBV_QP_CUR_STATE) == EINVAL);
    CHECK(receives(qp, 1) == EINVAL && sends(qp, 1) == EINVAL);
    bring(qp, IBV_QPS_INIT);
    CHECK(receives(qp, 1) == 0 && sends(qp, 1) == EINVAL);
    struct ibv_qp_attr a = attributes(IBV_QPS_RTR);
    a.ah_attr.port_num = 2;
    CHECK(ibv_modify_qp(qp, &a, IBV_QP_STATE | PEER) == EINVAL);
    a = attributes(IBV_QPS_RTR);
    a.path_mtu = port.max_mtu + 1;
    CHECK(ibv_modify_qp(qp, &a, IBV_QP_STATE | PEER) == EINVAL);
    a = attributes(IBV_QPS_RTR);
    a.ah_attr.grh.sgid_index = port.gid_tbl_len;
    CHECK(ibv_modify_qp(qp, &a, IBV_QP_STATE | PEER) == EINVAL);
    CHECK(queried(qp).qp_state == IBV_QPS_INIT && qp->state == IBV_QPS_INIT);
    CHECK(moved(qp, IBV_QPS_RTR, PEER) == 0 && sends(qp, 1) == EINVAL);
    CHECK(moved(qp, IBV_QPS_RTS, SENDS) == 0 && qp->state == IBV_QPS_RTS);
    a = queried(qp);
    CHECK(a.qp_state == IBV_QPS_RTS && a.dest_qp_num == NO_QP && a.rq_psn == 7 && a.sq_psn == 7);
    CHECK(a.timeout == 8 && a.retry_cnt == 1 && a.rnr_retry == 1 && a.min_rnr_timer == 12);
    CHECK(a.max_rd_atomic == 1 && a.max_dest_rd_atomic == 1 && a.path_mtu == port.active_mtu);
    CHECK(!memcmp(&a.ah_attr.grh.dgid, &gid, 16) && a.ah_attr.is_global && a.port_num == 1);
    CHECK(moved(qp, IBV_QPS_SQD, 0) == 0);
    // The move to RTR sets the peer and the number of inbound Reads. Later they may only be
    // repeated unchanged.
    int repeated = IBV_QP_AV | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_PATH_MIG_STATE;
    CHECK(moved(qp, IBV_QPS_SQD, repeated) == 0);
    a = attributes(IBV_QPS_SQD);
    struct ibv_qp_attr changed[] = {a, a, a};
    changed[0].ah_attr.grh.dgid.raw[15]++;
    changed[1].max_dest_rd_atomic++;
    changed[2].path_mig_state = IBV_MIG_ARMED;
    for (int i = 0; i < 3; i++)
        CHECK(ibv_modify_qp(qp, &changed[i], repeated) == EINVAL);
    CHECK(moved(qp, IBV_QPS_RTS, IBV_QP_PATH_MIG_STATE) == 0);

    // There is no peer, so the request fails and moves the QP to ERR. Only a reset leaves ERR.
    CHECK(sends(qp, 2) == 0);
    struct ibv_wc wc = next();
    CHECK(wc.status == IBV_WC_RETRY_EXC_ERR && wc.wr_id == 2 && wc.vendor_err != 0);
    CHECK(queried(qp).qp_state == IBV_QPS_ERR);
    CHECK(moved(qp, IBV_QPS_RTS, 0) == EINVAL && moved(qp, IBV_QPS_SQD, 0) == EINVAL);
    CHECK(moved(qp, IBV_QPS_RESET, 0) == 0 && queried(qp).qp_state == IBV_QPS_RESET);
    CHECK(ibv_destroy_qp(qp) == 0);
    while (ibv_poll_cq(cq, 1, &wc) > 0)
        ;
}

// A reset removes unpolled completions of the QP, but not those of other QPs.
static void resets(void)
{
    struct ibv_comp_channel *channel = ibv_create_comp_channel(roce);
    cq = ibv_create_cq(roce, 4, NULL, channel, 0);
    struct ibv_qp *qps[] = {made(pd, cq, IBV_QPT_RC), made(pd, cq, IBV_QPT_RC)};
    CHECK(channel && cq && qps[0] && qps[1]);
    for (int i = 0; i < 2; i++) {
        bring(qps[i], IBV_QPS_INIT);
        CHECK(receives(qps[i], 111 * (i + 1)) == 0 && ibv_req_notify_cq(cq, 0) == 0);
        CHECK(moved(qps[i], IBV_QPS_ERR, 0) == 0);
        // Wait until the completion has been written.
        struct ibv_cq *notified;
        void *context;
        CHECK(ibv_get_cq_event(channel, &notified, &context) == 0);
        ibv_ack_cq_events(notified, 1);
    }
    CHECK(moved(qps[0], IBV_QPS_RESET, 0) == 0);
    struct ibv_wc wc = next();
    CHECK(wc.wr_id == 222 && wc.status == IBV_WC_WR_FLUSH_ERR && wc.qp_num == qps[1]->qp_num);
    CHECK(ibv_poll_cq(cq, 1, &wc) == 0);
    // Later requests complete.
    bring(qps[0], IBV_QPS_INIT);
    CHECK(receives(qps[0], 333) == 0 && moved(qps[0], IBV_QPS_ERR, 0) == 0);
    wc = next();
    CHECK(wc.wr_id == 333 && wc.status == IBV_WC_WR_FLUSH_ERR);
    for (int i = 0; i < 2; i++)
        CHECK(ibv_destroy_qp(qps[i]) == 0);
    CHECK(ibv_destroy_cq(cq) == 0);
    CHECK(ibv_destroy_comp_channel(channel) == 0);
}

// An address handle requires a route of the device.
static void handles(void)
{
    struct ibv_ah_attr route = attributes(IBV_QPS_RTR).ah_attr;
    struct ibv_ah *ah = ibv_create_ah(pd, &route);
    CHECK(ah && ah->pd == pd && ah->context == roce);
    CHECK(ibv_dealloc_pd(pd) == EBUSY);
    CHECK(ibv_destroy_ah(ah) == 0);
    static const union ibv_gid v4 = {.raw = {[10] = 0xff, [11] = 0xff, [12] = 127, [15] = 1}};
    static const union ibv_gid v6 = {.raw = {0xfe, 0x80, [15] = 1}};
    struct ibv_ah_attr bad[] = {route, route, route, route};
    bad[0].is_global = 0;
    bad[1].port_num = 2;
    bad[2].grh.sgid_index = port.gid_tbl_len;
    // The destination is not of the address family of the source.
    bad[3].grh.dgid = memcmp(&route.grh.dgid, &v4, 12) ? v4 : v6;
    for (int i = 0; i < 4; i++)
        CHECK(ibv_create_ah(pd, &bad[i]) == NULL && errno == EINVAL);
}

// A QP that is its own peer: the completion of a message with immediate data.
static void alone(void)
{
    char bytes[64] = "itself";
    cq = ibv_create_cq(roce, 4, NULL, NULL, 0);
    struct ibv_mr *mr = ibv_reg_mr(pd, bytes, sizeof bytes, IBV_ACCESS_LOCAL_WRITE);
    struct ibv_qp *qp = made(pd, cq, IBV_QPT_RC);
    CHECK(cq && mr && qp && moved(qp, IBV_QPS_INIT, PLACE) == 0);
    struct ibv_qp_attr a = attributes(IBV_QPS_RTR);
    a.dest_qp_num = qp->qp_num;
    CHECK(ibv_modify_qp(qp, &a, IBV_QP_STATE | PEER) == 0 && moved(qp, IBV_QPS_RTS, SENDS) == 0);
    struct ibv_sge to = {(uintptr_t)bytes + 32, 32, mr->lkey}, from = {(uintptr_t)bytes, 7, mr->lkey};
    struct ibv_recv_wr receive = {.wr_id = 1, .sg_list = &to, .num_sge = 1}, *bad_receive;
    struct ibv_send_wr send = {
        .wr_id = 2, .sg_list = &from, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_IMM,
        .send_flags = IBV_SEND_SIGNALED, .imm_data = 0x12345678,
    }, *bad;
    CHECK(ibv_post_recv(qp, &receive, &bad_receive) == 0 && ibv_post_send(qp, &send, &bad) == 0);
    for (int i = 0; i < 2; i++) {
        struct ibv_wc wc = next();
        CHECK(wc.status == IBV_WC_SUCCESS && wc.qp_num == qp->qp_num);
        if (wc.wr_id == 1)
            CHECK(wc.opcode == IBV_WC_RECV && wc.byte_len == 7 && wc.imm_data == 0x12345678 &&
                  wc.wc_flags == (IBV_WC_GRH | IBV_WC_WITH_IMM));
        else
            CHECK(wc.wr_id == 2 && wc.opcode == IBV_WC_SEND);
    }
    CHECK(!strcmp(bytes + 32, "itself"));
    CHECK(ibv_destroy_qp(qp) == 0 && ibv_dereg_mr(mr) == 0 && ibv_destroy_cq(cq) == 0);
}

// Reads the next asynchronous event, which must have this type and name this QP.
static void event_of(struct ibv_qp *qp, enum ibv_event_type kind)
{
    struct ibv_async_event event;
    struct pollfd fd = {.fd = roce->async_fd, .events = POLLIN};
    CHECK(poll(&fd, 1, DEADLINE * 1000) == 1);
    CHECK(ibv_get_async_event(roce, &event) == 0);
    CHECK(event.event_type == kind && event.element.qp == qp);
    ibv_ack_async_event(&event);
}

// Events of RC and UC QPs name the QP that they belong to.
static void events(void)
{
    cq = ibv_create_cq(roce, 8, NULL, NULL, 0);
    struct ibv_qp *one = made(pd, cq, IBV_QPT_RC), *other = made(pd, cq, IBV_QPT_RC);
    CHECK(cq && one && other);
    struct ibv_qp_attr a = attributes(IBV_QPS_RTR);
    CHECK(moved(one, IBV_QPS_INIT, PLACE) == 0 && moved(other, IBV_QPS_INIT, PLACE) == 0);
    a.dest_qp_num = other->qp_num;
    CHECK(ibv_modify_qp(one, &a, IBV_QP_STATE | PEER) == 0);
    a.dest_qp_num = one->qp_num;
    CHECK(ibv_modify_qp(other, &a, IBV_QP_STATE | PEER) == 0);
    a = attributes(IBV_QPS_RTS);
    a.rnr_retry = 7;
    CHECK(ibv_modify_qp(one, &a, IBV_QP_STATE | SENDS) == 0);
    struct ibv_send_wr two[] = {{.wr_id = 2, .next = &two[1], .opcode = IBV_WR_SEND},
                                {.wr_id = 3, .opcode = IBV_WR_SEND}}, *bad;
    CHECK(receives(other, 1) == 0 && ibv_post_send(one, two, &bad) == 0);
    event_of(other, IBV_EVENT_COMM_EST);
    struct ibv_wc wc = next();
    CHECK(wc.wr_id == 1 && wc.status == IBV_WC_SUCCESS);
    a = attributes(IBV_QPS_SQD);
    a.en_sqd_async_notify = 1;
    CHECK(ibv_modify_qp(one, &a, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY) == 0);
    // The second Send has begun, and waits for a receive.
    a = queried(one);
    CHECK(a.qp_state == IBV_QPS_SQD && a.sq_draining == 1);
    CHECK(receives(other, 4) == 0 && next().wr_id == 4);
    event_of(one, IBV_EVENT_SQ_DRAINED);
    a = queried(one);
    CHECK(a.qp_state == IBV_QPS_SQD && a.sq_draining == 0);
    CHECK(ibv_destroy_qp(one) == 0 && ibv_destroy_qp(other) == 0 && ibv_destroy_cq(cq) == 0);
}

// A UC QP needs fewer attributes, and returns fewer.
static void unreliable(void)
{
    cq = ibv_create_cq(roce, 8, NULL, NULL, 0);
    struct ibv_qp *qp = made(pd, cq, IBV_QPT_UC);
    CHECK(cq && qp && qp->qp_type == IBV_QPT_UC);
    CHECK(moved(qp, IBV_QPS_INIT, PLACE) == 0);
    int peer = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
    CHECK(moved(qp, IBV_QPS_RTR, PEER) == EINVAL && moved(qp, IBV_QPS_RTR, peer) == 0);
    CHECK(moved(qp, IBV_QPS_RTS, SENDS) == EINVAL);
    CHECK(moved(qp, IBV_QPS_RTS, IBV_QP_SQ_PSN) == 0);
    struct ibv_send_wr read = {.wr_id = 1, .opcode = IBV_WR_RDMA_READ}, *bad;
    CHECK(ibv_post_send(qp, &read, &bad) == EINVAL && bad == &read);
    // There is no peer, and the sender gets no error.
    CHECK(sends(qp, 2) == 0);
    struct ibv_qp_attr a = queried(qp);
    CHECK(a.qp_state == IBV_QPS_RTS && a.dest_qp_num == NO_QP);
    CHECK(ibv_destroy_qp(qp) == 0 && ibv_destroy_cq(cq) == 0);
}

// A UD QP has a Q_Key and no peer, and can reply to any sender.
static void datagrams(void)
{
    cq = ibv_create_cq(roce, 8, NULL, NULL, 0);
    struct ibv_qp *qp = made(pd, cq, IBV_QPT_UD);
    static char memory[2][64];
    struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
    CHECK(cq && qp && mr && qp->qp_type == IBV_QPT_UD);
    int place = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
    struct ibv_qp_attr a = attributes(IBV_QPS_INIT);
    a.qkey = 0x1234;
    CHECK(moved(qp, IBV_QPS_INIT, PLACE) == EINVAL);
    CHECK(ibv_modify_qp(qp, &a, IBV_QP_STATE | place) == 0);
    CHECK(moved(qp, IBV_QPS_RTR, IBV_QP_DEST_QPN) == EINVAL && moved(qp, IBV_QPS_RTR, 0) == 0);

    struct ibv_ah *to = ibv_create_ah(pd, &a.ah_attr);
    struct ibv_sge data = {(uintptr_t)"hello", 5, 0};
    struct ibv_send_wr wr = {.wr_id = 1, .sg_list = &data, .num_sge = 1}, *bad;
    wr.opcode = IBV_WR_SEND_WITH_IMM;
    wr.imm_data = htonl(42);
    wr.send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE;
    wr.wr.ud.ah = to;
    wr.wr.ud.remote_qpn = qp->qp_num;
    wr.wr.ud.remote_qkey = 0x1234;
    CHECK(to && ibv_post_send(qp, &wr, &bad) == EINVAL && bad == &wr);
    CHECK(moved(qp, IBV_QPS_RTS, SENDS) == EINVAL);
    CHECK(moved(qp, IBV_QPS_RTS, IBV_QP_SQ_PSN) == 0);
    // The fields of other opcodes overlap the address handle.
    struct ibv_send_wr write = {.wr_id = 1, .opcode = IBV_WR_RDMA_WRITE};
    write.wr.rdma.remote_addr = 8;
    CHECK(ibv_post_send(qp, &write, &bad) == EINVAL && bad == &write);

    // A handle of another domain.
    struct ibv_pd *other = ibv_alloc_pd(roce);
    struct ibv_ah *foreign = ibv_create_ah(other, &a.ah_attr);
    wr.wr.ud.ah = foreign;
    CHECK(foreign && ibv_post_send(qp, &wr, &bad) == EINVAL && bad == &wr);
    CHECK(ibv_destroy_ah(foreign) == 0 && ibv_dealloc_pd(other) == 0);
    wr.wr.ud.ah = to;

    // The first datagram goes to the QP itself, the second one to the source address in the header
    // that has been received.
    wr.opcode = IBV_WR_SEND_WITH_IMM;
    for (int n = 0; n < 2; n++) {
        struct ibv_sge into = {(uintptr_t)memory[n], sizeof memory[n], mr->lkey};
        struct ibv_recv_wr receive = {.wr_id = 2, .sg_list = &into, .num_sge = 1}, *not;
        CHECK(ibv_post_recv(qp, &receive, &not) == 0 && ibv_post_send(qp, &wr, &bad) == 0);
        struct ibv_wc sent = next(), got = next();
        if (sent.opcode == IBV_WC_RECV) {
            struct ibv_wc first = sent;
            sent = got;
            got = first;
        }
        CHECK(sent.wr_id == 1 && sent.status == IBV_WC_SUCCESS && sent.opcode == IBV_WC_SEND);
        CHECK(got.wr_id == 2 && got.status == IBV_WC_SUCCESS && got.opcode == IBV_WC_RECV);
        CHECK(got.wc_flags == (IBV_WC_GRH | IBV_WC_WITH_IMM) && got.imm_data == htonl(42));
        CHECK(got.byte_len == 45 && got.src_qp == qp->qp_num);
        CHECK(!memcmp(memory[n] + 40, "hello", 5));
        struct ibv_grh *header = (struct ibv_grh *)memory[n];
        struct ibv_ah_attr back;
        CHECK(ibv_init_ah_from_wc(roce, 1, &got, header, &back) == 0);
        CHECK(!memcmp(&back.grh.dgid, &gid, 16) && back.grh.sgid_index == 0 && back.is_global);
        CHECK(ibv_init_ah_from_wc(roce, 2, &got, header, &back) == -1 && errno == EINVAL);
        CHECK(ibv_destroy_ah(to) == 0);
        to = ibv_create_ah_from_wc(pd, &got, header, 1);
        CHECK(to);
        wr.wr.ud.ah = to;
    }
    CHECK(ibv_destroy_ah(to) == 0);
    a = queried(qp);
    CHECK(a.qp_state == IBV_QPS_RTS && a.qkey == 0x1234);
    CHECK(ibv_destroy_qp(qp) == 0 && ibv_dereg_mr(mr) == 0 && ibv_destroy_cq(cq) == 0);
}

// The names of the devices in the list.
static void names(void)
{
    int count;
    struct ibv_device **list = ibv_get_device_list(&count);
    for (int i = 0; i < count; i++)
        puts(ibv_get_device_name(list[i]));
    CHECK(list && list[count] == NULL);
    ibv_free_device_list(list);
}

int main(int argc, char **argv)
{
    (void)argv;
    setvbuf(stdout, NULL, _IONBF, 0);
    if (argc > 1) {
        names();
        return wrong != 0;
    }
    read_reasons();
    devices();
    steps();
    CHECK(ibv_destroy_cq(cq) == 0);
    resets();
    handles();
    alone();
    events();
    unreliable();
    datagrams();
    CHECK(ibv_dealloc_pd(pd) == 0 && ibv_close_device(roce) == 0);
    if (wrong == 0)
        puts("done");
    return wrong != 0;
}
