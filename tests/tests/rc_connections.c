// Connections of RC and UC QPs by rdma_cm on the RoCE device, with both ends in one process. The
// command line names the part to run, which prints "done" on success. Built with the headers of
// rdma-core, because it calls their inline functions.

#include <poll.h>
#include <pthread.h>

#include "rdma_cm.h"

// Maximum private data of REQ, REP and REJ, in bytes.
enum { REQUEST_DATA = 56, REPLY_DATA = 196, REJECT_DATA = 148 };
// Reasons of REJ.
enum { NO_LISTENER = 8, BY_PROGRAM = 28 };
// Rights of a peer that may send Reads.
enum { ALL = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC };

static enum rdma_port_space space = RDMA_PS_TCP;

static struct rdma_cm_id *new_id(void)
{
    struct rdma_cm_id *id;
    check(!rdma_create_id(events, &id, NULL, space));
    check(id->ps == space && id->qp_type == IBV_QPT_RC);
    return id;
}

static struct rdma_cm_id *listening_at(uint32_t at)
{
    struct rdma_cm_id *id = new_id();
    struct sockaddr_in address = ipv4(at, 0);
    check(!rdma_bind_addr(id, (struct sockaddr *)&address));
    check(!rdma_listen(id, 0));
    check(rdma_get_src_port(id) != 0);
    return id;
}

static struct rdma_cm_id *listening(void)
{
    return listening_at(INADDR_LOOPBACK);
}

static struct rdma_cm_id *resolved_at(uint32_t ip, uint16_t port)
{
    struct rdma_cm_id *id = new_id();
    struct sockaddr_in address = ipv4(ip, port);
    check(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 2000));
    expect(events, RDMA_CM_EVENT_ADDR_RESOLVED);
    check(!rdma_resolve_route(id, 2000));
    expect(events, RDMA_CM_EVENT_ROUTE_RESOLVED);
    check(id->verbs && id->pd && id->port_num == 1);
    check(id->verbs->device->transport_type == IBV_TRANSPORT_IB);
    return id;
}

static struct rdma_cm_id *resolved(struct rdma_cm_id *listener)
{
    return resolved_at(INADDR_LOOPBACK, rdma_get_src_port(listener));
}

static struct ibv_qp_init_attr wanted(enum ibv_qp_type type)
{
    struct ibv_qp_init_attr wanted = {.qp_type = type, .sq_sig_all = 1};
    wanted.cap.max_send_wr = wanted.cap.max_recv_wr = 4;
    wanted.cap.max_send_sge = wanted.cap.max_recv_sge = 1;
    return wanted;
}

static struct ibv_qp_attr attributes(struct ibv_qp *qp)
{
    struct ibv_qp_attr found;
    struct ibv_qp_init_attr init;
    check(!ibv_query_qp(qp, &found, -1, &init));
    return found;
}

static enum ibv_qp_state state(struct ibv_qp *qp)
{
    return attributes(qp).qp_state;
}

// Creates a QP on the ID. The QP can receive at once.
static void has_qp_of(struct rdma_cm_id *id, enum ibv_qp_type type)
{
    struct ibv_qp_init_attr attr = wanted(type);
    check(!rdma_create_qp(id, NULL, &attr));
    check(id->qp->state == IBV_QPS_INIT && state(id->qp) == IBV_QPS_INIT);
}

static void has_qp(struct rdma_cm_id *id)
{
    has_qp_of(id, IBV_QPT_RC);
}

static void connects(struct rdma_cm_id *id, const char *private_data)
{
    struct rdma_conn_param param = {.private_data = private_data};
    param.private_data_len = strlen(private_data);
    check(!rdma_connect(id, &param));
}

static void accepts(struct rdma_cm_id *id, const char *private_data)
{
    struct rdma_conn_param param = {.private_data = private_data};
    param.private_data_len = strlen(private_data);
    check(!rdma_accept(id, &param));
}

// Checks private data, which are padded with zeros.
static void begins(const struct rdma_conn_param *param, const char *with, uint8_t length)
{
    const char *data = param->private_data;
    check(param->private_data_len == length && !strncmp(data, with, length));
    for (unsigned n = strlen(with); n < length; n++)
        check(data[n] == 0);
}

static struct rdma_cm_event *request_to(struct rdma_cm_id *listener)
{
    struct rdma_cm_event *event = next(events, RDMA_CM_EVENT_CONNECT_REQUEST);
    struct rdma_cm_id *id = event->id;
    check(event->listen_id == listener && event->status == 0);
    check(id != listener && id->verbs && id->ps == space && id->qp_type == IBV_QPT_RC);
    return event;
}

static struct rdma_cm_id *asked(struct rdma_cm_id *listener, const char *private_data)
{
    struct rdma_cm_event *event = request_to(listener);
    struct rdma_cm_id *id = event->id;
    begins(&event->param.conn, private_data, REQUEST_DATA);
    check(!rdma_ack_cm_event(event));
    return id;
}

// Fetches the ESTABLISHED events of both ends, which arrive in any order.
static void established(struct rdma_cm_id *active, struct rdma_cm_id *passive, const char *reply)
{
    for (unsigned seen = 0; seen != 3;) {
        struct rdma_cm_event *event = next(events, RDMA_CM_EVENT_ESTABLISHED);
        unsigned end = event->id == active ? 1 : 2;
        check(event->id == active || event->id == passive);
        check(event->status == 0 && !(seen & end));
        if (end == 1)
            begins(&event->param.conn, reply, REPLY_DATA);
        else
            check(event->param.conn.private_data_len == 0);
        seen |= end;
        check(!rdma_ack_cm_event(event));
    }
    check(state(active->qp) == IBV_QPS_RTS && state(passive->qp) == IBV_QPS_RTS);
}

// Fetches DISCONNECTED and then TIMEWAIT_EXIT of both ends. Events of different ends arrive in any
// order.
static void both_end(struct rdma_cm_id *active, struct rdma_cm_id *passive)
{
    enum rdma_cm_event_type due[2] = {RDMA_CM_EVENT_DISCONNECTED, RDMA_CM_EVENT_DISCONNECTED};
    for (int n = 0; n < 4; n++) {
        struct rdma_cm_event *event;
        check(!rdma_get_cm_event(events, &event));
        check(event->id == active || event->id == passive);
        enum rdma_cm_event_type *expected = &due[event->id == passive];
        check(event->event == *expected && event->status == 0);
        *expected = RDMA_CM_EVENT_TIMEWAIT_EXIT;
        check(!rdma_ack_cm_event(event));
    }
}

static void destroy(struct rdma_cm_id *id)
{
    if (id->qp)
        rdma_destroy_qp(id);
    if (id->srq)
        rdma_destroy_srq(id);
    check(!rdma_destroy_id(id));
}

// Sends one message.
static void sends(struct rdma_cm_id *from, struct rdma_cm_id *to)
{
    static char memory[2][64];
    struct ibv_mr *out = rdma_reg_msgs(from, memory[0], sizeof memory[0]);
    struct ibv_mr *in = rdma_reg_msgs(to, memory[1], sizeof memory[1]);
    check(out && in);
    strcpy(memory[0], "ping");
    memset(memory[1], 0, sizeof memory[1]);
    check(!rdma_post_recv(to, NULL, memory[1], sizeof memory[1], in));
    check(!rdma_post_send(from, NULL, memory[0], 5, out, 0));
    struct ibv_wc wc;
    check(rdma_get_recv_comp(to, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
    check(wc.byte_len == 5 && !strcmp(memory[1], "ping") && wc.qp_num == to->qp->qp_num);
    check(rdma_get_send_comp(from, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
    check(!rdma_dereg_mr(out) && !rdma_dereg_mr(in));
}

// Connects QPs of this type that the IDs own, sends both ways, and disconnects.
static void meet(struct rdma_cm_id *listener, struct rdma_cm_id *active, enum ibv_qp_type type)
{
    has_qp_of(active, type);
    connects(active, "hello");
    struct rdma_cm_id *passive = asked(listener, "hello");
    has_qp_of(passive, type);
    accepts(passive, "welcome");
    check(state(passive->qp) == IBV_QPS_RTS);
    established(active, passive, "welcome");
    check(attributes(active->qp).dest_qp_num == passive->qp->qp_num);
    check(attributes(passive->qp).dest_qp_num == active->qp->qp_num);
    sends(active, passive);
    sends(passive, active);
    check(!rdma_disconnect(active));
    check(state(active->qp) == IBV_QPS_ERR && state(passive->qp) == IBV_QPS_RTS);
    both_end(active, passive);
    check(!rdma_disconnect(passive) && state(passive->qp) == IBV_QPS_ERR);
    destroy(active);
    destroy(passive);
}

static void connected(void)
{
    struct rdma_cm_id *listener = listening();
    meet(listener, resolved(listener), IBV_QPT_RC);
    // The listener serves further requests.
    meet(listener, resolved(listener), IBV_QPT_RC);
    destroy(listener);
}

static void refuses(struct rdma_cm_id *id, enum ibv_qp_type type)
{
    struct ibv_qp_init_attr attr = wanted(type);
    check(rdma_create_qp(id, NULL, &attr) == -1 && errno == EINVAL && !id->qp);
}

static void port_space_ib(void)
{
    space = RDMA_PS_IB;
    struct rdma_cm_id *listener = listening(), *active = resolved(listener);
    refuses(active, IBV_QPT_UD);
    meet(listener, active, IBV_QPT_UC);
    meet(listener, resolved(listener), IBV_QPT_RC);
    destroy(listener);
    // Each port space has its own ports. Another process may have the TCP port of any ID that is
    // not of RDMA_PS_TCP.
    struct sockaddr_in address = ipv4(INADDR_LOOPBACK, 0);
    struct rdma_cm_id *of_tcp, *of_ib;
    check(!rdma_create_id(events, &of_tcp, NULL, RDMA_PS_TCP));
    check(!rdma_bind_addr(of_tcp, (struct sockaddr *)&address));
    address.sin_port = rdma_get_src_port(of_tcp);
    check(!rdma_create_id(events, &of_ib, NULL, RDMA_PS_IB));
    check(!rdma_bind_addr(of_ib, (struct sockaddr *)&address));
    destroy(of_tcp);
    destroy(of_ib);
}

static void qp_types(void)
{
    struct rdma_cm_id *listener = listening(), *active = resolved(listener);
    refuses(active, IBV_QPT_UD);
    refuses(active, IBV_QPT_UC);
    // A connection requires a QP of the device.
    struct rdma_conn_param param = {.qp_num = 0xFFFFFF};
    check(rdma_connect(active, &param) == -1 && errno == EINVAL);
    has_qp(active);
    check(!rdma_connect(active, NULL));
    struct rdma_cm_id *passive = asked(listener, "");
    check(rdma_accept(passive, &param) == -1 && errno == EINVAL);
    refuses(passive, IBV_QPT_UC);
    has_qp(passive);
    check(!rdma_accept(passive, NULL));
    established(active, passive, "");
    destroy(active);
    destroy(passive);
    destroy(listener);
}

// Moves a QP with the attributes that the ID returns, after checking their mask.
static struct ibv_qp_attr moves(struct rdma_cm_id *id, struct ibv_qp *qp, enum ibv_qp_state to,
                                int mask)
{
    struct ibv_qp_attr attr = {.qp_state = to};
    int found;
    check(!rdma_init_qp_attr(id, &attr, &found));
    check(found == (mask | IBV_QP_STATE) && attr.qp_state == to);
    check(!ibv_modify_qp(qp, &attr, found));
    check(state(qp) == to);
    return attr;
}

enum {
    TO_INIT = IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX | IBV_QP_PORT,
    TO_RTR = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
             IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
    TO_RTS = IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
             IBV_QP_MAX_QP_RD_ATOMIC,
};

// Starting PSNs of a QP.
struct psns {
    uint32_t receives, sends;
};

// Moves a QP that the program owns to RTS, and checks the attributes. The peer's QP has the number
// `peer`, sends at most `inbound` Reads, and accepts at most `outbound`.
static struct psns becomes_ready(struct rdma_cm_id *id, struct ibv_qp *qp, uint32_t peer,
                                 uint8_t inbound, uint8_t outbound, uint8_t rnr_retry)
{
    const uint8_t mapped[16] = {[10] = 0xFF, 0xFF, 127, 0, 0, 1};
    struct ibv_qp_attr to = moves(id, qp, IBV_QPS_INIT, TO_INIT);
    check(to.qp_access_flags == ALL && to.port_num == 1 && to.pkey_index == 0);
    to = moves(id, qp, IBV_QPS_RTR, TO_RTR);
    check(to.dest_qp_num == peer && to.path_mtu == id->route.path_rec->mtu);
    check(to.max_dest_rd_atomic == inbound && to.min_rnr_timer == 0);
    check(to.ah_attr.is_global && to.ah_attr.port_num == 1 && to.ah_attr.grh.hop_limit == 64);
    check(!memcmp(to.ah_attr.grh.dgid.raw, mapped, sizeof mapped));
    union ibv_gid own;
    check(!ibv_query_gid(id->verbs, 1, to.ah_attr.grh.sgid_index, &own));
    check(!memcmp(own.raw, mapped, sizeof mapped));
    struct psns psns = {.receives = to.rq_psn};
    to = moves(id, qp, IBV_QPS_RTS, TO_RTS);
    check(to.max_rd_atomic == outbound && to.retry_cnt == 4 && to.rnr_retry == rnr_retry);
    check(to.timeout == 17);
    psns.sends = to.sq_psn;
    return psns;
}

// Two QPs of the program, with one CQ.
struct own {
    struct ibv_cq *cq;
    struct ibv_qp *qps[2];
};

static struct own own_qps(struct rdma_cm_id *of, enum ibv_qp_type type)
{
    struct own own = {.cq = ibv_create_cq(of->verbs, 8, NULL, NULL, 0)};
    struct ibv_qp_init_attr attr = wanted(type);
    attr.send_cq = attr.recv_cq = own.cq;
    for (int n = 0; n < 2; n++) {
        own.qps[n] = ibv_create_qp(of->pd, &attr);
        check(own.qps[n]);
    }
    return own;
}

static void destroy_own(struct own *own)
{
    check(!ibv_destroy_qp(own->qps[0]) && !ibv_destroy_qp(own->qps[1]));
    check(!ibv_destroy_cq(own->cq));
}

// Sends one message between two QPs of the program.
static void sends_own(struct own *own, int from)
{
    struct ibv_send_wr send = {.wr_id = 1, .opcode = IBV_WR_SEND}, *bad;
    struct ibv_recv_wr receive = {.wr_id = 2}, *bad_receive;
    check(!ibv_post_recv(own->qps[1 - from], &receive, &bad_receive));
    check(!ibv_post_send(own->qps[from], &send, &bad));
    for (uint64_t seen = 0; seen != 3;) {
        struct ibv_wc wc;
        int count = ibv_poll_cq(own->cq, 1, &wc);
        check(count >= 0 && (count == 0 || wc.status == IBV_WC_SUCCESS));
        if (count)
            seen |= wc.wr_id;
    }
}

// The program creates and moves the QPs itself, and confirms the connection. The numbers of Reads,
// which are swapped for the peer, and the retry counts arrive unchanged.
static void own_qp(void)
{
    struct rdma_cm_id *listener = listening(), *active = resolved(listener);
    struct own own = own_qps(active, IBV_QPT_RC);
    struct ibv_qp_attr to = {.qp_state = IBV_QPS_INIT};
    int mask;
    // The rights depend on the parameters of the connection, and RTR on those of the peer.
    check(!rdma_init_qp_attr(active, &to, &mask) && to.qp_access_flags == 0);
    to.qp_state = IBV_QPS_RTR;
    check(rdma_init_qp_attr(active, &to, &mask) == -1 && errno == EINVAL);

    struct rdma_conn_param param = {.qp_num = own.qps[0]->qp_num, .srq = 1};
    param.responder_resources = 3;
    param.initiator_depth = 5;
    param.retry_count = 4;
    param.rnr_retry_count = 6;
    check(!rdma_connect(active, &param));
    check(rdma_establish(active) == -1 && errno == EINVAL);
    struct rdma_cm_event *event = request_to(listener);
    struct rdma_cm_id *passive = event->id;
    struct rdma_conn_param *found = &event->param.conn;
    check(found->responder_resources == 5 && found->initiator_depth == 3);
    check(found->retry_count == 4 && found->rnr_retry_count == 6);
    check(found->qp_num == own.qps[0]->qp_num && found->srq == 1);
    check(!rdma_ack_cm_event(event));
    struct psns second = becomes_ready(passive, own.qps[1], own.qps[0]->qp_num, 5, 3, 6);

    struct rdma_conn_param answer = {.qp_num = own.qps[1]->qp_num};
    answer.responder_resources = 2;
    answer.initiator_depth = 1;
    answer.rnr_retry_count = 7;
    check(!rdma_accept(passive, &answer));
    event = next(events, RDMA_CM_EVENT_CONNECT_RESPONSE);
    check(event->id == active && event->status == 0);
    found = &event->param.conn;
    begins(found, "", REPLY_DATA);
    check(found->responder_resources == 1 && found->initiator_depth == 2);
    check(found->rnr_retry_count == 7 && found->srq == 0);
    check(found->qp_num == own.qps[1]->qp_num);
    check(!rdma_ack_cm_event(event));
    struct psns first = becomes_ready(active, own.qps[0], own.qps[1]->qp_num, 1, 2, 7);
    // Each end chooses the PSN of the first packet that it receives.
    check(first.receives == second.sends && second.receives == first.sends);

    check(!rdma_establish(active));
    check(rdma_establish(active) == -1 && errno == EINVAL);
    event = next(events, RDMA_CM_EVENT_ESTABLISHED);
    check(event->id == passive && event->status == 0 && !rdma_ack_cm_event(event));
    sends_own(&own, 0);
    sends_own(&own, 1);
    // The end of a connection has no effect on the program's QPs.
    destroy(passive);
    event = next(events, RDMA_CM_EVENT_DISCONNECTED);
    check(event->id == active && !rdma_ack_cm_event(event));
    check(!rdma_disconnect(active));
    check(state(own.qps[0]) == IBV_QPS_RTS && state(own.qps[1]) == IBV_QPS_RTS);
    sends_own(&own, 0);
    destroy(active);
    destroy(listener);
    destroy_own(&own);
}

// Parameters of connections between QPs of the IDs.
static void parameters(void)
{
    struct rdma_cm_id *listener = listening(), *active = resolved(listener);
    has_qp(active);
    struct rdma_conn_param param = {.responder_resources = 3, .initiator_depth = 5};
    // Ignored, because the ID has a QP.
    param.qp_num = 7;
    param.srq = 1;
    // Above the maximum of 7.
    param.retry_count = 9;
    param.rnr_retry_count = 2;
    check(!rdma_connect(active, &param));
    struct rdma_cm_event *event = request_to(listener);
    struct rdma_cm_id *passive = event->id;
    struct rdma_conn_param *found = &event->param.conn;
    check(found->responder_resources == 5 && found->initiator_depth == 3);
    check(found->retry_count == 7 && found->rnr_retry_count == 2);
    check(found->qp_num == active->qp->qp_num && found->srq == 0);
    check(!rdma_ack_cm_event(event));
    has_qp(passive);
    struct rdma_conn_param answer = {.responder_resources = 2, .initiator_depth = 1};
    answer.rnr_retry_count = 3;
    check(!rdma_accept(passive, &answer));
    established(active, passive, "");
    struct ibv_qp_attr of = attributes(active->qp);
    check(of.max_dest_rd_atomic == 1 && of.max_rd_atomic == 2 && of.qp_access_flags == ALL);
    check(of.retry_cnt == 7 && of.rnr_retry == 3 && of.timeout == 17);
    check(of.path_mtu == active->route.path_rec->mtu);
    of = attributes(passive->qp);
    check(of.max_dest_rd_atomic == 2 && of.max_rd_atomic == 1 && of.qp_access_flags == ALL);
    check(of.retry_cnt == 7 && of.rnr_retry == 2 && of.timeout == 17);
    check(of.path_mtu == active->route.path_rec->mtu);
    check(of.rq_psn == attributes(active->qp).sq_psn);
    destroy(active);
    destroy(passive);
    // Without parameters, an end accepts as many Reads as it can. If an end accepts no Reads, its
    // peer may only write.
    active = resolved(listener);
    has_qp(active);
    struct rdma_conn_param none = {.responder_resources = 0, .initiator_depth = 1};
    check(!rdma_connect(active, &none));
    passive = asked(listener, "");
    has_qp(passive);
    check(!rdma_accept(passive, NULL));
    established(active, passive, "");
    check(attributes(active->qp).qp_access_flags == IBV_ACCESS_REMOTE_WRITE);
    check(attributes(passive->qp).qp_access_flags == ALL);
    check(attributes(passive->qp).max_dest_rd_atomic == 1);
    check(attributes(passive->qp).max_rd_atomic == 0);
    // More than the device supports.
    struct ibv_device_attr device;
    check(!ibv_query_device(active->verbs, &device));
    struct rdma_cm_id *greedy = resolved(listener);
    has_qp(greedy);
    struct rdma_conn_param most = {.responder_resources = device.max_qp_rd_atom + 1};
    check(rdma_connect(greedy, &most) == -1 && errno == EINVAL);
    destroy(greedy);
    destroy(active);
    destroy(passive);
    destroy(listener);
}

// Fetches REJECTED of an ID, checks that its QP is in ERR, and destroys the ID.
static void is_rejected(struct rdma_cm_id *active, int reason, const char *private_data)
{
    struct rdma_cm_event *event = next(events, RDMA_CM_EVENT_REJECTED);
    check(event->id == active);
    if (event->status != reason) {
        printf("reason %d\n", event->status);
        exit(1);
    }
    begins(&event->param.conn, private_data, REJECT_DATA);
    check(!rdma_ack_cm_event(event));
    check(state(active->qp) == IBV_QPS_ERR);
    destroy(active);
}

static void rejected(void)
{
    struct rdma_cm_id *listener = listening(), *active = resolved(listener);
    has_qp(active);
    connects(active, "");
    struct rdma_cm_id *passive = asked(listener, "");
    check(!rdma_reject(passive, "no", 2));
    check(rdma_reject(passive, "no", 2) == -1 && errno == EINVAL);
    destroy(passive);
    is_rejected(active, BY_PROGRAM, "no");
    // Destroying an undecided request rejects it as well.
    active = resolved(listener);
    has_qp(active);
    connects(active, "");
    destroy(asked(listener, ""));
    is_rejected(active, BY_PROGRAM, "");
    // So does destroying the listener before the program has fetched the request.
    struct rdma_event_channel *unread = rdma_create_event_channel();
    check(unread && !rdma_migrate_id(listener, unread));
    active = resolved(listener);
    has_qp(active);
    connects(active, "");
    struct pollfd fd = {.fd = unread->fd, .events = POLLIN};
    check(poll(&fd, 1, -1) == 1);
    destroy(listener);
    is_rejected(active, BY_PROGRAM, "");
    rdma_destroy_event_channel(unread);
}

static void no_listener(void)
{
    struct rdma_cm_id *active = resolved_at(INADDR_LOOPBACK, htons(7));
    has_qp(active);
    connects(active, "");
    is_rejected(active, NO_LISTENER, "");
}

// A message can carry its maximum of private data. With more, the call fails and changes nothing.
static void private_data(void)
{
    static char data[256];
    memset(data, 'a', sizeof data - 1);
    struct rdma_conn_param param = {.private_data = data, .private_data_len = REQUEST_DATA + 1};
    struct rdma_cm_id *listener = listening();
    for (int accept = 0; accept < 2; accept++) {
        struct rdma_cm_id *active = resolved(listener);
        has_qp(active);
        param.private_data_len = REQUEST_DATA + 1;
        check(rdma_connect(active, &param) == -1 && errno == EINVAL);
        param.private_data_len = REQUEST_DATA;
        check(!rdma_connect(active, &param));
        struct rdma_cm_event *event = request_to(listener);
        struct rdma_cm_id *passive = event->id;
        begins(&event->param.conn, data, REQUEST_DATA);
        check(!rdma_ack_cm_event(event));
        has_qp(passive);
        param.private_data_len = REPLY_DATA + 1;
        check(rdma_accept(passive, &param) == -1 && errno == EINVAL);
        check(rdma_reject(passive, data, REJECT_DATA + 1) == -1 && errno == EINVAL);
        if (accept) {
            param.private_data_len = REPLY_DATA;
            check(!rdma_accept(passive, &param));
            established(active, passive, data);
            destroy(active);
        } else {
            check(!rdma_reject(passive, data, REJECT_DATA));
            is_rejected(active, BY_PROGRAM, data);
        }
        destroy(passive);
    }
    destroy(listener);
}

static void has_srq(struct rdma_cm_id *id)
{
    struct ibv_srq_init_attr attr = {.attr = {.max_wr = 4, .max_sge = 1}};
    check(!rdma_create_srq(id, NULL, &attr));
    has_qp(id);
    check(id->qp->srq == id->srq);
}

static void srq(void)
{
    struct rdma_cm_id *listener = listening(), *active = resolved(listener);
    has_srq(active);
    check(!rdma_connect(active, NULL));
    struct rdma_cm_event *event = request_to(listener);
    struct rdma_cm_id *passive = event->id;
    check(event->param.conn.srq == 1 && !rdma_ack_cm_event(event));
    has_srq(passive);
    check(!rdma_accept(passive, NULL));
    established(active, passive, "");
    sends(active, passive);
    sends(passive, active);
    // Destroying the QP ends the connection.
    rdma_destroy_qp(active);
    for (unsigned seen = 0; seen != 3;) {
        event = next(events, RDMA_CM_EVENT_DISCONNECTED);
        seen |= event->id == active ? 1 : event->id == passive ? 2 : 0;
        check(!rdma_ack_cm_event(event));
    }
    destroy(active);
    destroy(passive);
    destroy(listener);
}

// Like UCX, the program names UD QPs of its own.
static void ud_qp(void)
{
    struct rdma_cm_id *listener = listening(), *active = resolved(listener);
    struct own own = own_qps(active, IBV_QPT_UD);
    struct rdma_conn_param param = {.qp_num = own.qps[0]->qp_num};
    param.private_data = "hello";
    param.private_data_len = 5;
    check(!rdma_connect(active, &param));
    struct rdma_cm_event *event = request_to(listener);
    struct rdma_cm_id *passive = event->id;
    begins(&event->param.conn, "hello", REQUEST_DATA);
    check(event->param.conn.qp_num == own.qps[0]->qp_num && !rdma_ack_cm_event(event));
    param.qp_num = own.qps[1]->qp_num;
    check(!rdma_accept(passive, &param));
    event = next(events, RDMA_CM_EVENT_CONNECT_RESPONSE);
    check(event->param.conn.qp_num == own.qps[1]->qp_num && !rdma_ack_cm_event(event));
    check(!rdma_establish(active));
    event = next(events, RDMA_CM_EVENT_ESTABLISHED);
    check(event->id == passive && !rdma_ack_cm_event(event));
    check(!rdma_disconnect(active));
    both_end(active, passive);
    check(!rdma_disconnect(passive));
    check(state(own.qps[0]) == IBV_QPS_RESET && state(own.qps[1]) == IBV_QPS_RESET);
    destroy(active);
    destroy(passive);
    destroy(listener);
    destroy_own(&own);
}

// Returns the IPv4 address of an end.
static uint32_t ip(const struct sockaddr_in *end)
{
    check(end->sin_family == AF_INET);
    return ntohl(end->sin_addr.s_addr);
}

// Checks the GIDs and the path of an ID with a peer on this host.
static void has_path(struct rdma_cm_id *id)
{
    // All loopback addresses have the GID of 127.0.0.1.
    const uint8_t mapped[16] = {[10] = 0xFF, 0xFF, 127, 0, 0, 1};
    const struct rdma_ib_addr *gids = &id->route.addr.addr.ibaddr;
    check(!memcmp(gids->sgid.raw, mapped, 16) && !memcmp(gids->dgid.raw, mapped, 16));
    check(gids->pkey == 0xFFFF);
    const struct ibv_sa_path_rec *path = id->route.path_rec;
    check(id->route.num_paths == 1 && path && path->numb_path == 1 && path->reversible);
    check(!memcmp(path->sgid.raw, mapped, 16) && !memcmp(path->dgid.raw, mapped, 16));
    check(path->pkey == 0xFFFF && path->hop_limit == 64 && path->packet_life_time == 16);
    struct ibv_port_attr port;
    check(!ibv_query_port(id->verbs, id->port_num, &port));
    check(path->mtu >= port.active_mtu && path->mtu <= IBV_MTU_4096);
}

static void addresses(void)
{
    const uint32_t listens[] = {INADDR_LOOPBACK, INADDR_ANY, INADDR_LOOPBACK + 1};
    for (int n = 0; n < 3; n++) {
        struct rdma_cm_id *listener = listening_at(listens[n]);
        uint32_t at = n ? INADDR_LOOPBACK + 1 : INADDR_LOOPBACK;
        struct rdma_cm_id *active = resolved_at(at, rdma_get_src_port(listener));
        has_path(active);
        has_qp(active);
        connects(active, "");
        struct rdma_cm_id *passive = asked(listener, "");
        has_path(passive);
        has_qp(passive);
        accepts(passive, "");
        established(active, passive, "");
        has_path(active);
        struct rdma_addr *ends[] = {&active->route.addr, &passive->route.addr};
        check(ip(&ends[0]->dst_sin) == at && ip(&ends[1]->src_sin) == at);
        check(ip(&ends[0]->src_sin) == ip(&ends[1]->dst_sin));
        check(rdma_get_dst_port(active) == rdma_get_src_port(listener));
        check(rdma_get_src_port(passive) == rdma_get_src_port(listener));
        check(rdma_get_src_port(active) == rdma_get_dst_port(passive));
        check(rdma_get_src_port(active) != 0);
        sends(active, passive);
        destroy(active);
        destroy(passive);
        destroy(listener);
    }
}

// A server that disconnects as soon as it has received does not make the client's Send fail.
static void last_send(void)
{
    static char memory[2][64];
    struct rdma_cm_id *listener = listening();
    for (int n = 0; n < 20; n++) {
        struct rdma_cm_id *active = resolved(listener);
        has_qp(active);
        connects(active, "");
        struct rdma_cm_id *passive = asked(listener, "");
        has_qp(passive);
        struct ibv_mr *out = rdma_reg_msgs(active, memory[0], sizeof memory[0]);
        struct ibv_mr *in = rdma_reg_msgs(passive, memory[1], sizeof memory[1]);
        check(out && in && !rdma_post_recv(passive, NULL, memory[1], sizeof memory[1], in));
        accepts(passive, "");
        established(active, passive, "");
        check(!rdma_post_send(active, NULL, memory[0], sizeof memory[0], out, 0));
        struct ibv_wc wc;
        check(rdma_get_recv_comp(passive, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
        check(!rdma_disconnect(passive));
        rdma_destroy_qp(passive);
        check(rdma_get_send_comp(active, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
        check(!rdma_dereg_mr(out) && !rdma_dereg_mr(in));
        destroy(active);
        destroy(passive);
    }
    destroy(listener);
}

static struct rdma_addrinfo *address(int flags, const char *port)
{
    struct rdma_addrinfo hints = {.ai_flags = flags, .ai_port_space = space}, *found;
    check(!rdma_getaddrinfo("127.0.0.1", port, &hints, &found));
    check(found->ai_port_space == space && found->ai_qp_type == IBV_QPT_RC);
    return found;
}

static void *connects_and_waits(void *id)
{
    check(!rdma_connect(id, NULL));
    return NULL;
}

// IDs without a channel, whose calls block.
static void endpoints(void)
{
    struct rdma_addrinfo *here = address(RAI_PASSIVE, "7612"), *there = address(0, "7612");
    struct rdma_cm_id *listener, *active, *passive;
    struct ibv_qp_init_attr attr = wanted(IBV_QPT_RC);
    check(!rdma_create_ep(&listener, here, NULL, &attr));
    check(!rdma_listen(listener, 0));
    attr = wanted(IBV_QPT_RC);
    check(!rdma_create_ep(&active, there, NULL, &attr));
    pthread_t thread;
    check(!pthread_create(&thread, NULL, connects_and_waits, active));
    check(!rdma_get_request(listener, &passive));
    check(passive->qp && state(passive->qp) == IBV_QPS_INIT);
    check(passive->event && passive->event->event == RDMA_CM_EVENT_CONNECT_REQUEST);
    check(!rdma_accept(passive, NULL));
    check(!pthread_join(thread, NULL));
    check(active->event->event == RDMA_CM_EVENT_ESTABLISHED);
    check(passive->event->event == RDMA_CM_EVENT_ESTABLISHED);
    check(state(active->qp) == IBV_QPS_RTS && state(passive->qp) == IBV_QPS_RTS);
    sends(active, passive);
    sends(passive, active);
    check(!rdma_disconnect(active) && active->event->event == RDMA_CM_EVENT_DISCONNECTED);
    check(!rdma_disconnect(passive) && passive->event->event == RDMA_CM_EVENT_DISCONNECTED);
    rdma_destroy_ep(listener);
    rdma_destroy_ep(passive);
    rdma_destroy_ep(active);
    rdma_freeaddrinfo(here);
    rdma_freeaddrinfo(there);
}

int main(int argc, char **argv)
{
    static const struct part parts[] = {
        {"connected", connected},
        {"port space IB", port_space_ib},
        {"QP types", qp_types},
        {"own QP", own_qp},
        {"parameters", parameters},
        {"rejected", rejected},
        {"no listener", no_listener},
        {"private data", private_data},
        {"SRQ", srq},
        {"UD QP", ud_qp},
        {"addresses", addresses},
        {"last Send", last_send},
        {"endpoints", endpoints},
    };
    return run_part(parts, sizeof parts / sizeof *parts, argc, argv);
}
