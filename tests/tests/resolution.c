// IDs of RDMA_PS_UDP, with both ends in one process. The command line names the part to run, which
// prints "done" on success. Built with the headers of rdma-core, because it calls their inline
// functions.

#include <poll.h>
#include <pthread.h>

#include "rdma_cm.h"

enum { QKEY = 0x01234567, GRH = 40 };

static struct rdma_cm_id *new_id(void)
{
    struct rdma_cm_id *id;
    check(!rdma_create_id(events, &id, NULL, RDMA_PS_UDP));
    check(id->ps == RDMA_PS_UDP && id->qp_type == IBV_QPT_UD);
    return id;
}

static struct rdma_cm_id *listening(void)
{
    struct rdma_cm_id *id = new_id();
    struct sockaddr_in address = loopback(0);
    check(!rdma_bind_addr(id, (struct sockaddr *)&address));
    check(!rdma_listen(id, 0));
    check(rdma_get_src_port(id) != 0);
    return id;
}

static struct rdma_cm_id *resolved(uint16_t port)
{
    struct rdma_cm_id *id = new_id();
    resolve(id, port);
    struct ibv_device_attr device;
    check(!ibv_query_device(id->verbs, &device) && id->port_num == 1);
    check(id->verbs->device->transport_type == IBV_TRANSPORT_IB);
    const uint8_t mapped[16] = {[10] = 0xFF, 0xFF, 127, 0, 0, 1};
    check(!memcmp(id->route.addr.addr.ibaddr.dgid.raw, mapped, 16));
    struct ibv_port_attr one;
    check(!ibv_query_port(id->verbs, id->port_num, &one));
    const struct ibv_sa_path_rec *path = id->route.path_rec;
    check(id->route.num_paths == 1 && path && path->mtu == one.active_mtu && path->pkey == 0xFFFF);
    check(!memcmp(&path->dgid, &id->route.addr.addr.ibaddr.dgid, 16));
    check(!memcmp(&path->sgid, &id->route.addr.addr.ibaddr.sgid, 16));
    return id;
}

static struct ibv_qp_init_attr wanted(enum ibv_qp_type type)
{
    struct ibv_qp_init_attr wanted = {.qp_type = type, .sq_sig_all = 1};
    wanted.cap.max_send_wr = wanted.cap.max_recv_wr = 4;
    wanted.cap.max_send_sge = wanted.cap.max_recv_sge = 1;
    return wanted;
}

// Creates a QP on the ID. The QP can be used at once.
static void has_qp(struct rdma_cm_id *id)
{
    struct ibv_qp_init_attr other = wanted(IBV_QPT_RC), attr = wanted(IBV_QPT_UD);
    check(rdma_create_qp(id, NULL, &other) == -1 && errno == EINVAL && !id->qp);
    check(!rdma_create_qp(id, NULL, &attr));
    check(id->qp->state == IBV_QPS_RTS);
    struct ibv_qp_attr found;
    check(!ibv_query_qp(id->qp, &found, IBV_QP_QKEY, &attr));
    check(found.qp_state == IBV_QPS_RTS && found.qkey == QKEY);
}

static void connects(struct rdma_cm_id *id, const char *private_data)
{
    struct rdma_conn_param param = {.private_data = private_data};
    param.private_data_len = strlen(private_data);
    check(!rdma_connect(id, &param));
}

static void begins(const void *data, uint8_t length, const char *with, uint8_t filled)
{
    check(length == filled && !strcmp(data, with));
    for (unsigned n = strlen(with); n < length; n++)
        check(((const char *)data)[n] == 0);
}

static struct rdma_cm_id *asked(struct rdma_cm_id *listener, const char *private_data)
{
    struct rdma_cm_event *event = next(events, RDMA_CM_EVENT_CONNECT_REQUEST);
    struct rdma_cm_id *id = event->id;
    check(event->listen_id == listener && event->status == 0);
    begins(event->param.ud.private_data, event->param.ud.private_data_len, private_data, 180);
    check(id->verbs && id->ps == RDMA_PS_UDP && id->qp_type == IBV_QPT_UD);
    check(rdma_get_src_port(id) == rdma_get_src_port(listener) && rdma_get_dst_port(id) != 0);
    check(!rdma_ack_cm_event(event));
    return id;
}

static void destroy(struct rdma_cm_id *id)
{
    if (id->qp)
        rdma_destroy_qp(id);
    check(!rdma_destroy_id(id));
}

// Sends one datagram to the address in the event's parameters.
static void sends(struct rdma_cm_id *from, struct rdma_ud_param *to, struct rdma_cm_id *receiver)
{
    static char memory[2][128];
    struct ibv_mr *out = rdma_reg_msgs(from, memory[0], sizeof memory[0]);
    struct ibv_mr *in = rdma_reg_msgs(receiver, memory[1], sizeof memory[1]);
    struct ibv_ah *ah = ibv_create_ah(from->pd, &to->ah_attr);
    check(out && in && ah && to->qkey == QKEY);
    check(!rdma_post_recv(receiver, NULL, memory[1], sizeof memory[1], in));
    strcpy(memory[0], "ping");
    check(!rdma_post_ud_send(from, NULL, memory[0], 5, out, 0, ah, to->qp_num));
    struct ibv_wc wc;
    check(rdma_get_send_comp(from, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
    check(rdma_get_recv_comp(receiver, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
    check(wc.byte_len == GRH + 5 && !strcmp(memory[1] + GRH, "ping"));
    check(wc.src_qp == from->qp->qp_num);
    check(!ibv_destroy_ah(ah) && !rdma_dereg_mr(out) && !rdma_dereg_mr(in));
}

static void accepted(void)
{
    struct rdma_cm_id *listener = listening(), *active = new_id();
    uint8_t tos = 0x28;
    check(!rdma_set_option(active, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &tos, 1));
    resolve(active, rdma_get_src_port(listener));
    has_qp(active);
    connects(active, "hello");
    struct rdma_cm_id *passive = asked(listener, "hello");
    has_qp(passive);
    struct rdma_conn_param param = {.private_data = "welcome", .private_data_len = 7};
    param.qp_num = passive->qp->qp_num;
    check(!rdma_accept(passive, &param));
    struct rdma_cm_event *event = next(events, RDMA_CM_EVENT_ESTABLISHED);
    check(event->id == active && event->status == 0);
    struct rdma_ud_param *ud = &event->param.ud;
    begins(ud->private_data, ud->private_data_len, "welcome", 136);
    check(ud->qp_num == passive->qp->qp_num && ud->ah_attr.is_global && ud->ah_attr.port_num == 1);
    check(active->route.path_rec->traffic_class == tos && ud->ah_attr.grh.traffic_class == tos);
    sends(active, ud, passive);
    check(!rdma_ack_cm_event(event));
    // There is no connection to end, and the peer gets no event.
    check(!rdma_disconnect(active));
    destroy(active);
    destroy(passive);
    destroy(listener);
}

// The program creates and moves the QPs itself, and answers every request with the same QP.
static void own_qp(void)
{
    struct rdma_cm_id *listener = listening();
    struct rdma_cm_id *ids[2] = {resolved(rdma_get_src_port(listener)),
                                 resolved(rdma_get_src_port(listener))};
    struct ibv_cq *cq = ibv_create_cq(ids[0]->verbs, 8, NULL, NULL, 0);
    struct ibv_qp_init_attr attr = wanted(IBV_QPT_UD);
    attr.send_cq = attr.recv_cq = cq;
    struct ibv_qp *qp = ibv_create_qp(ids[0]->pd, &attr);
    check(cq && qp);
    for (int state = IBV_QPS_INIT; state <= IBV_QPS_RTS; state++) {
        struct ibv_qp_attr to = {.qp_state = state};
        int mask;
        check(!rdma_init_qp_attr(ids[0], &to, &mask));
        check(!ibv_modify_qp(qp, &to, mask));
    }
    struct rdma_conn_param param = {.qp_num = qp->qp_num};
    check(!rdma_connect(ids[0], &param) && !rdma_connect(ids[1], &param));
    struct rdma_cm_id *passive[2];
    for (int n = 0; n < 2; n++)
        passive[n] = asked(listener, "");
    for (int n = 0; n < 2; n++) {
        check(!rdma_accept(passive[n], &param));
        struct rdma_cm_event *event = next(events, RDMA_CM_EVENT_ESTABLISHED);
        check(event->id == ids[0] || event->id == ids[1]);
        check(event->param.ud.qp_num == qp->qp_num);
        check(event->param.ud.qkey == QKEY && !rdma_ack_cm_event(event));
        destroy(passive[n]);
    }
    destroy(ids[0]);
    destroy(ids[1]);
    destroy(listener);
    check(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq));
}

// A lookup needs no QP: the ID has none, destroys its QP during the lookup, or names a QP that does
// not exist.
static void without_qp(void)
{
    struct rdma_cm_id *listener = listening();
    for (int n = 0; n < 3; n++) {
        struct rdma_cm_id *active = resolved(rdma_get_src_port(listener));
        struct rdma_conn_param param = {.private_data = "hello", .private_data_len = 5};
        param.qp_num = n == 2 ? UINT32_MAX : 0;
        if (n == 1)
            has_qp(active);
        check(!rdma_connect(active, &param));
        struct rdma_cm_id *passive = asked(listener, "hello");
        if (n == 1)
            rdma_destroy_qp(active);
        has_qp(passive);
        check(!rdma_accept(passive, NULL));
        struct rdma_cm_event *event = next(events, RDMA_CM_EVENT_ESTABLISHED);
        check(event->id == active && event->status == 0);
        check(event->param.ud.qp_num == passive->qp->qp_num);
        has_qp(active);
        sends(active, &event->param.ud, passive);
        check(!rdma_ack_cm_event(event));
        destroy(active);
        destroy(passive);
    }
    destroy(listener);
}

static void rejected(void)
{
    struct rdma_cm_id *listener = listening(), *active = resolved(rdma_get_src_port(listener));
    has_qp(active);
    connects(active, "");
    struct rdma_cm_id *passive = asked(listener, "");
    // A reply with too much private data fails and leaves the request undecided.
    static const char most[136 + 1];
    struct rdma_conn_param param = {.private_data = most, .private_data_len = sizeof most};
    has_qp(passive);
    check(rdma_accept(passive, &param) == -1 && errno == EINVAL);
    check(rdma_reject(passive, most, sizeof most) == -1 && errno == EINVAL);
    check(!rdma_reject(passive, "no", 2));
    struct rdma_cm_event *event = next(events, RDMA_CM_EVENT_UNREACHABLE);
    // The SIDR status, as in the kernel.
    check(event->status == 2);
    begins(event->param.ud.private_data, event->param.ud.private_data_len, "no", 136);
    check(!rdma_ack_cm_event(event));
    destroy(passive);
    destroy(active);
    // Destroying an undecided request rejects it as well.
    active = resolved(rdma_get_src_port(listener));
    has_qp(active);
    connects(active, "");
    destroy(asked(listener, ""));
    event = next(events, RDMA_CM_EVENT_UNREACHABLE);
    check(event->status == 2 && !rdma_ack_cm_event(event));
    destroy(active);
    destroy(listener);
}

static void unreachable(int status, struct rdma_cm_id *active)
{
    has_qp(active);
    connects(active, "");
    struct rdma_cm_event *event = next(events, RDMA_CM_EVENT_UNREACHABLE);
    if (event->status != status) {
        printf("status %d\n", event->status);
        exit(1);
    }
    check(!rdma_ack_cm_event(event));
    destroy(active);
}

// Any address in 127.0.0.0/8 can be bound and looked up.
static void other_loopback(void)
{
    struct sockaddr_in address = loopback(0), everywhere = {.sin_family = AF_INET};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK + 1);
    for (int n = 0; n < 2; n++) {
        struct rdma_cm_id *listener = new_id(), *active = new_id();
        struct sockaddr_in *here = n ? &everywhere : &address;
        here->sin_port = 0;
        check(!rdma_bind_addr(listener, (struct sockaddr *)here) && !rdma_listen(listener, 0));
        address.sin_port = rdma_get_src_port(listener);
        check(!rdma_resolve_addr(active, NULL, (struct sockaddr *)&address, 2000));
        expect(events, RDMA_CM_EVENT_ADDR_RESOLVED);
        check(!rdma_resolve_route(active, 2000));
        expect(events, RDMA_CM_EVENT_ROUTE_RESOLVED);
        has_qp(active);
        connects(active, "hello");
        struct rdma_cm_id *passive = asked(listener, "hello");
        has_qp(passive);
        check(!rdma_accept(passive, NULL));
        struct rdma_cm_event *event = next(events, RDMA_CM_EVENT_ESTABLISHED);
        check(event->status == 0);
        sends(active, &event->param.ud, passive);
        check(!rdma_ack_cm_event(event));
        destroy(active);
        destroy(passive);
        destroy(listener);
    }
}

static void no_listener(void)
{
    unreachable(1, resolved(htons(7)));
}

static void no_answer(void)
{
    struct rdma_cm_id *listener = listening();
    struct rdma_event_channel *unread = rdma_create_event_channel();
    check(unread && !rdma_migrate_id(listener, unread));
    unreachable(-ETIMEDOUT, resolved(rdma_get_src_port(listener)));
    destroy(listener);
    rdma_destroy_event_channel(unread);
}

// A request that poll(2) has reported can still be read after its peer gave up.
static void announced(void)
{
    struct rdma_cm_id *listener = listening(), *active = resolved(rdma_get_src_port(listener));
    struct rdma_event_channel *unread = rdma_create_event_channel(), *read = events;
    check(unread && !rdma_migrate_id(listener, unread));
    has_qp(active);
    connects(active, "");
    struct pollfd fd = {.fd = unread->fd, .events = POLLIN};
    check(poll(&fd, 1, -1) == 1);
    destroy(active);
    // The answer to a later lookup comes after the notice of the withdrawal.
    no_listener();
    check(poll(&fd, 1, 0) == 1);
    events = unread;
    struct rdma_cm_id *passive = asked(listener, "");
    has_qp(passive);
    // Over UDP a request cannot be withdrawn.
    check(!rdma_accept(passive, NULL) || errno == ECONNRESET);
    destroy(passive);
    destroy(listener);
    events = read;
    rdma_destroy_event_channel(unread);
}

static struct rdma_addrinfo *address(int flags, const char *port)
{
    struct rdma_addrinfo hints = {.ai_flags = flags, .ai_port_space = RDMA_PS_UDP}, *found;
    check(!rdma_getaddrinfo("127.0.0.1", port, &hints, &found));
    check(found->ai_port_space == RDMA_PS_UDP && found->ai_qp_type == IBV_QPT_UD);
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
    struct rdma_addrinfo *here = address(RAI_PASSIVE, "7611"), *there = address(0, "7611");
    struct rdma_cm_id *listener, *active, *passive;
    struct ibv_qp_init_attr attr = wanted(IBV_QPT_UD);
    check(!rdma_create_ep(&listener, here, NULL, &attr));
    check(!rdma_listen(listener, 0));
    attr = wanted(IBV_QPT_UD);
    check(!rdma_create_ep(&active, there, NULL, &attr));
    pthread_t thread;
    check(!pthread_create(&thread, NULL, connects_and_waits, active));
    check(!rdma_get_request(listener, &passive));
    check(passive->qp && passive->qp->state == IBV_QPS_RTS);
    check(passive->event && passive->event->event == RDMA_CM_EVENT_CONNECT_REQUEST);
    check(!rdma_accept(passive, NULL));
    check(!pthread_join(thread, NULL));
    check(active->event->event == RDMA_CM_EVENT_ESTABLISHED);
    sends(active, &active->event->param.ud, passive);
    check(!rdma_disconnect(active));
    // After accept the request is acknowledged, so the listener may be destroyed first.
    check(!passive->event);
    rdma_destroy_ep(listener);
    rdma_destroy_ep(passive);
    rdma_destroy_ep(active);
    rdma_freeaddrinfo(here);
    rdma_freeaddrinfo(there);
}

int main(int argc, char **argv)
{
    static const struct part parts[] = {
        {"accepted", accepted},
        {"own queue pair", own_qp},
        {"without a queue pair", without_qp},
        {"rejected", rejected},
        {"no listener", no_listener},
        {"no answer", no_answer},
        {"announced", announced},
        {"other loopback", other_loopback},
        {"endpoints", endpoints},
    };
    return run_part(parts, sizeof parts / sizeof *parts, argc, argv);
}
