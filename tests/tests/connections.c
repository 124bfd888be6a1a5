// Opens and closes librdmacm connections in every order, both ends in one process, with event
// channels. The command line names a part. Prints "done" if the part passed. Built with the headers
// of rdma-core, because it calls their inline functions.

#define _GNU_SOURCE
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "rdma_cm.h"

enum { RECEIVES = 2 };

struct end {
    struct rdma_event_channel *channel;
    struct rdma_cm_id *id;
    char memory[64];
    struct ibv_mr *mr;
};

static struct end active, passive;
static struct rdma_cm_id *listener;

// Checks that no event is pending.
static void silent(struct rdma_event_channel *channel)
{
    struct pollfd fd = {.fd = channel->fd, .events = POLLIN};
    check(poll(&fd, 1, 0) == 0);
    int flags = fcntl(channel->fd, F_GETFL);
    struct rdma_cm_event *event;
    check(!fcntl(channel->fd, F_SETFL, flags | O_NONBLOCK));
    check(rdma_get_cm_event(channel, &event) == -1 && errno == EAGAIN);
    check(!fcntl(channel->fd, F_SETFL, flags));
}

static struct rdma_event_channel *channel(void)
{
    struct rdma_event_channel *channel = rdma_create_event_channel();
    check(channel != NULL);
    return channel;
}

static struct rdma_cm_id *new_id(struct rdma_event_channel *channel)
{
    struct rdma_cm_id *id;
    check(!rdma_create_id(channel, &id, channel, RDMA_PS_TCP));
    check(id->context == channel && id->channel == channel && id->ps == RDMA_PS_TCP);
    return id;
}

static struct rdma_cm_id *listening(struct rdma_event_channel *channel)
{
    struct rdma_cm_id *id = new_id(channel);
    struct sockaddr_in address = loopback(0);
    check(!rdma_bind_addr(id, (struct sockaddr *)&address));
    check(!rdma_listen(id, 4));
    check(rdma_get_src_port(id) != 0);
    return id;
}

// Creates a QP and posts receives.
static void furnish(struct end *end)
{
    struct ibv_qp_init_attr wanted = {.cap = {4, 4, 1, 1, 0}, .qp_type = IBV_QPT_RC};
    check(!rdma_create_qp(end->id, NULL, &wanted));
    end->mr = rdma_reg_msgs(end->id, end->memory, sizeof end->memory);
    check(end->mr != NULL);
    for (int n = 0; n < RECEIVES; n++)
        check(!rdma_post_recv(end->id, end, end->memory, sizeof end->memory, end->mr));
}

// Resolves the address and route of a port, and creates a QP.
static void resolved(struct end *end, uint16_t port)
{
    struct sockaddr_in address = loopback(port);
    check(!rdma_resolve_addr(end->id, NULL, (struct sockaddr *)&address, 1000));
    expect(end->channel, RDMA_CM_EVENT_ADDR_RESOLVED);
    // From here on the id has a port.
    check(rdma_get_src_port(end->id) != 0);
    check(!rdma_resolve_route(end->id, 1000));
    expect(end->channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
    furnish(end);
}

// Sends a connection request. The passive end gets an id for it and a QP.
static void ask(void)
{
    passive.channel = channel();
    listener = listening(passive.channel);
    active.channel = channel();
    active.id = new_id(active.channel);
    resolved(&active, rdma_get_src_port(listener));
    struct rdma_conn_param parameters = {.private_data = "please", .private_data_len = 7};
    parameters.initiator_depth = parameters.responder_resources = 1;
    check(!rdma_connect(active.id, &parameters));
    struct rdma_cm_event *event = next(passive.channel, RDMA_CM_EVENT_CONNECT_REQUEST);
    check(event->listen_id == listener && event->id != listener && event->id->channel);
    const struct rdma_conn_param *asked = &event->param.conn;
    check(asked->private_data_len >= 7 && !memcmp(asked->private_data, "please", 7));
    passive.id = event->id;
    furnish(&passive);
    // The private data stays valid until the event is acknowledged.
    check(!memcmp(asked->private_data, "please", 7));
    check(!rdma_ack_cm_event(event));
}

static void connected(void)
{
    ask();
    uint16_t port = rdma_get_src_port(active.id);
    struct rdma_conn_param parameters = {.private_data = "welcome", .private_data_len = 8};
    parameters.initiator_depth = parameters.responder_resources = 1;
    check(!rdma_accept(passive.id, &parameters));
    struct rdma_cm_event *event = next(active.channel, RDMA_CM_EVENT_ESTABLISHED);
    const struct rdma_conn_param *answer = &event->param.conn;
    check(event->id == active.id && answer->private_data_len >= 8);
    check(!memcmp(answer->private_data, "welcome", 8));
    check(!rdma_ack_cm_event(event));
    expect(passive.channel, RDMA_CM_EVENT_ESTABLISHED);
    check(rdma_get_src_port(active.id) == rdma_get_dst_port(passive.id));
    check(rdma_get_src_port(active.id) == port);
}

static enum ibv_qp_state state(struct end *end)
{
    struct ibv_qp_attr attributes;
    struct ibv_qp_init_attr made;
    check(!ibv_query_qp(end->id->qp, &attributes, IBV_QP_STATE, &made));
    return attributes.qp_state;
}

// Checks that the QP is in ERR: its receives are flushed, and sends fail.
static void flushed(struct end *end)
{
    check(state(end) == IBV_QPS_ERR);
    struct ibv_wc wc;
    for (int n = 0; n < RECEIVES; n++) {
        check(rdma_get_recv_comp(end->id, &wc) == 1);
        check(wc.status == IBV_WC_WR_FLUSH_ERR && wc.wr_id == (uintptr_t)end);
    }
    check(!rdma_post_send(end->id, NULL, end->memory, 1, end->mr, IBV_SEND_SIGNALED));
    check(rdma_get_send_comp(end->id, &wc) == 1 && wc.status == IBV_WC_WR_FLUSH_ERR);
}

// Checks that the end receives DISCONNECTED exactly once.
static void ended(struct end *end)
{
    expect(end->channel, RDMA_CM_EVENT_DISCONNECTED);
    silent(end->channel);
    flushed(end);
}

static void dissolve(struct end *end)
{
    check(!rdma_dereg_mr(end->mr));
    rdma_destroy_qp(end->id);
    check(!end->id->qp);
    check(!rdma_destroy_id(end->id));
}

static void all_gone(void)
{
    check(!rdma_destroy_id(listener));
    rdma_destroy_event_channel(active.channel);
    rdma_destroy_event_channel(passive.channel);
}

// One end disconnects, then the other.
static void one_by_one(struct end *first, struct end *second)
{
    connected();
    check(!rdma_disconnect(first->id));
    ended(second);
    check(!rdma_disconnect(second->id));
    ended(first);
    dissolve(first);
    dissolve(second);
    all_gone();
}

static void active_first(void)
{
    one_by_one(&active, &passive);
}

static void passive_first(void)
{
    one_by_one(&passive, &active);
}

static void at_once(void)
{
    connected();
    check(!rdma_disconnect(active.id) && !rdma_disconnect(passive.id));
    ended(&active);
    ended(&passive);
    check(!rdma_disconnect(active.id) && !rdma_disconnect(passive.id));
    dissolve(&active);
    dissolve(&passive);
    all_gone();
}

// Disconnects before the connection exists: an attempt ends once it is established, and an
// undecided request can still be accepted.
static void too_early(void)
{
    ask();
    check(!rdma_disconnect(active.id) && !rdma_disconnect(passive.id));
    silent(active.channel);
    check(!rdma_accept(passive.id, NULL));
    check(!rdma_disconnect(passive.id));
    for (int n = 0; n < 2; n++) {
        struct end *end = n ? &passive : &active;
        expect(end->channel, RDMA_CM_EVENT_ESTABLISHED);
        ended(end);
    }
    dissolve(&active);
    dissolve(&passive);
    all_gone();
    // The same, but only the passive end disconnects.
    ask();
    check(!rdma_accept(passive.id, NULL) && !rdma_disconnect(passive.id));
    expect(active.channel, RDMA_CM_EVENT_ESTABLISHED);
    ended(&active);
    expect(passive.channel, RDMA_CM_EVENT_ESTABLISHED);
    ended(&passive);
    dissolve(&active);
    dissolve(&passive);
    all_gone();
    // A rejection is still delivered.
    ask();
    check(!rdma_disconnect(active.id) && !rdma_reject(passive.id, NULL, 0));
    check(status_of(active.channel, RDMA_CM_EVENT_REJECTED) == -ECONNREFUSED);
    silent(active.channel);
    dissolve(&active);
    dissolve(&passive);
    all_gone();
}

// Messages sent before a disconnect arrive before its event.
static void behind_sends(void)
{
    connected();
    strcpy(active.memory, "the last word");
    check(!rdma_post_send(active.id, NULL, active.memory, 14, active.mr, 0));
    check(!rdma_disconnect(active.id));
    struct ibv_wc wc;
    check(rdma_get_recv_comp(passive.id, &wc) == 1);
    check(wc.status == IBV_WC_SUCCESS && wc.byte_len == 14 && wc.opcode == IBV_WC_RECV);
    check(!strcmp(passive.memory, "the last word"));
    expect(passive.channel, RDMA_CM_EVENT_DISCONNECTED);
    expect(active.channel, RDMA_CM_EVENT_DISCONNECTED);
    dissolve(&active);
    dissolve(&passive);
    all_gone();
}

// An end is destroyed without a disconnect.
static void without_a_word(void)
{
    connected();
    dissolve(&active);
    ended(&passive);
    dissolve(&passive);
    all_gone();
}

// A QP is destroyed before its id.
static void queue_pair_first(void)
{
    connected();
    check(!rdma_dereg_mr(active.mr));
    rdma_destroy_qp(active.id);
    ended(&passive);
    check(!rdma_disconnect(active.id));
    check(!rdma_destroy_id(active.id));
    dissolve(&passive);
    all_gone();
}

static void errored(void)
{
    connected();
    struct ibv_qp_attr attributes = {.qp_state = IBV_QPS_ERR};
    check(!ibv_modify_qp(active.id->qp, &attributes, IBV_QP_STATE));
    ended(&passive);
    ended(&active);
    dissolve(&active);
    dissolve(&passive);
    all_gone();
}

// The passive end is a child process, which is killed.
static void killed(void)
{
    int pipes[2];
    uint16_t port;
    check(!pipe(pipes));
    pid_t child = fork();
    check(child >= 0);
    if (child == 0) {
        passive.channel = channel();
        listener = listening(passive.channel);
        port = rdma_get_src_port(listener);
        check(write(pipes[1], &port, sizeof port) == sizeof port);
        struct rdma_cm_event *event = next(passive.channel, RDMA_CM_EVENT_CONNECT_REQUEST);
        passive.id = event->id;
        furnish(&passive);
        check(!rdma_accept(passive.id, NULL));
        pause();
        _exit(1);
    }
    check(read(pipes[0], &port, sizeof port) == sizeof port);
    active.channel = channel();
    active.id = new_id(active.channel);
    resolved(&active, port);
    check(!rdma_connect(active.id, NULL));
    expect(active.channel, RDMA_CM_EVENT_ESTABLISHED);
    check(!kill(child, SIGKILL) && waitpid(child, NULL, 0) == child);
    ended(&active);
    dissolve(&active);
    rdma_destroy_event_channel(active.channel);
}

// A forked child cannot use its parent's completion queue, and gets an error.
static void forked(void)
{
    connected();
    struct ibv_cq *cq = active.id->qp->send_cq;
    struct ibv_wc wc;
    check(ibv_poll_cq(cq, 1, &wc) == 0);
    pid_t child = fork();
    check(child >= 0);
    if (child == 0)
        _exit(ibv_poll_cq(cq, 1, &wc) < 0 ? 0 : 1);
    int status;
    check(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    check(ibv_poll_cq(cq, 1, &wc) == 0);
    dissolve(&active);
    ended(&passive);
    dissolve(&passive);
    all_gone();
}

static void rejected(void)
{
    ask();
    check(!rdma_reject(passive.id, "not today", 10));
    struct rdma_cm_event *event = next(active.channel, RDMA_CM_EVENT_REJECTED);
    const struct rdma_conn_param *answer = &event->param.conn;
    check(event->status == -ECONNREFUSED && event->id == active.id);
    check(answer->private_data_len >= 10 && !memcmp(answer->private_data, "not today", 10));
    check(!rdma_ack_cm_event(event));
    flushed(&active);
    dissolve(&active);
    dissolve(&passive);
    all_gone();
}

// An undecided request is rejected when its id is destroyed.
static void undecided(void)
{
    ask();
    dissolve(&passive);
    check(status_of(active.channel, RDMA_CM_EVENT_REJECTED) == -ECONNREFUSED);
    dissolve(&active);
    all_gone();
}

// A request is withdrawn before or during its acceptance.
static void withdrawn(void)
{
    ask();
    dissolve(&active);
    if (rdma_accept(passive.id, NULL) == -1)
        check(errno == ECONNRESET);
    else
        check(status_of(passive.channel, RDMA_CM_EVENT_CONNECT_ERROR) < 0);
    flushed(&passive);
    dissolve(&passive);
    all_gone();
}

// A request that poll(2) has announced can still be fetched after its peer has given up.
static void announced(void)
{
    passive.channel = channel();
    listener = listening(passive.channel);
    active.channel = channel();
    active.id = new_id(active.channel);
    resolved(&active, rdma_get_src_port(listener));
    check(!rdma_connect(active.id, NULL));
    struct pollfd fd = {.fd = passive.channel->fd, .events = POLLIN};
    check(poll(&fd, 1, -1) == 1);
    dissolve(&active);
    // The request of a later connection arrives after the withdrawal.
    struct end later = {.channel = channel()};
    struct rdma_event_channel *of_later = channel();
    struct rdma_cm_id *second = listening(of_later);
    later.id = new_id(later.channel);
    resolved(&later, rdma_get_src_port(second));
    check(!rdma_connect(later.id, NULL));
    struct rdma_cm_event *event = next(of_later, RDMA_CM_EVENT_CONNECT_REQUEST);
    struct rdma_cm_id *asked = event->id;
    check(!rdma_ack_cm_event(event) && !rdma_destroy_id(asked));
    check(poll(&fd, 1, 0) == 1);
    event = next(passive.channel, RDMA_CM_EVENT_CONNECT_REQUEST);
    check(event->listen_id == listener && event->status == 0);
    passive.id = event->id;
    check(!rdma_ack_cm_event(event));
    furnish(&passive);
    check(rdma_accept(passive.id, NULL) == -1 && errno == ECONNRESET);
    dissolve(&passive);
    dissolve(&later);
    check(!rdma_destroy_id(second));
    rdma_destroy_event_channel(of_later);
    rdma_destroy_event_channel(later.channel);
    all_gone();
}

// Other ids cannot use the QPs of a connection, which is unaffected.
static void taken(void)
{
    connected();
    struct end other = {.channel = channel()};
    other.id = new_id(other.channel);
    struct sockaddr_in address = loopback(rdma_get_src_port(listener));
    check(!rdma_resolve_addr(other.id, NULL, (struct sockaddr *)&address, 1000));
    expect(other.channel, RDMA_CM_EVENT_ADDR_RESOLVED);
    check(!rdma_resolve_route(other.id, 1000));
    expect(other.channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
    struct rdma_conn_param parameters = {.qp_num = active.id->qp->qp_num};
    check(rdma_connect(other.id, &parameters) == -1 && errno == EINVAL);
    furnish(&other);
    check(!rdma_connect(other.id, NULL));
    struct rdma_cm_event *event = next(passive.channel, RDMA_CM_EVENT_CONNECT_REQUEST);
    struct rdma_cm_id *asked = event->id;
    check(!rdma_ack_cm_event(event));
    parameters.qp_num = passive.id->qp->qp_num;
    check(rdma_accept(asked, &parameters) == -1 && errno == EINVAL);
    // Both ends of the connection still work.
    struct ibv_wc wc;
    check(!rdma_post_send(passive.id, NULL, passive.memory, 1, passive.mr, IBV_SEND_SIGNALED));
    check(rdma_get_send_comp(passive.id, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
    check(rdma_get_recv_comp(active.id, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
    check(!rdma_disconnect(passive.id));
    expect(active.channel, RDMA_CM_EVENT_DISCONNECTED);
    expect(passive.channel, RDMA_CM_EVENT_DISCONNECTED);
    check(state(&active) == IBV_QPS_ERR && state(&passive) == IBV_QPS_ERR);
    check(!rdma_destroy_id(asked));
    check(status_of(other.channel, RDMA_CM_EVENT_REJECTED) == -ECONNREFUSED);
    dissolve(&other);
    rdma_destroy_event_channel(other.channel);
    dissolve(&active);
    dissolve(&passive);
    all_gone();
}

static struct ibv_qp *rc_qp(struct ibv_pd *pd)
{
    struct ibv_cq *cq = ibv_create_cq(pd->context, 8, NULL, NULL, 0);
    struct ibv_qp_init_attr wanted = {.cap = {4, 4, 1, 1, 0}, .qp_type = IBV_QPT_RC};
    wanted.send_cq = wanted.recv_cq = cq;
    struct ibv_qp *qp = cq ? ibv_create_qp(pd, &wanted) : NULL;
    check(qp != NULL);
    return qp;
}

// A TCP id refuses QPs of the RoCE device. The UDP listener at the same port gets no request.
static void foreign(void)
{
    passive.channel = channel();
    listener = listening(passive.channel);
    active.channel = channel();
    struct sockaddr_in address = loopback(rdma_get_src_port(listener));
    struct rdma_cm_id *of_datagrams[2];
    for (int n = 0; n < 2; n++) {
        check(!rdma_create_id(active.channel, &of_datagrams[n], NULL, RDMA_PS_UDP));
        if (n == 0) {
            check(!rdma_bind_addr(of_datagrams[n], (struct sockaddr *)&address));
            check(!rdma_listen(of_datagrams[n], 1));
            continue;
        }
        check(!rdma_resolve_addr(of_datagrams[n], NULL, (struct sockaddr *)&address, 1000));
        expect(active.channel, RDMA_CM_EVENT_ADDR_RESOLVED);
        check(!rdma_resolve_route(of_datagrams[n], 1000));
        expect(active.channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
    }
    struct ibv_qp_init_attr wanted = {.cap = {4, 4, 1, 1, 0}, .qp_type = IBV_QPT_UD};
    check(!rdma_create_qp(of_datagrams[1], NULL, &wanted));
    struct ibv_qp *rc = rc_qp(of_datagrams[1]->pd);
    uint32_t numbers[] = {of_datagrams[1]->qp->qp_num, rc->qp_num};
    active.id = new_id(active.channel);
    check(!rdma_resolve_addr(active.id, NULL, (struct sockaddr *)&address, 1000));
    expect(active.channel, RDMA_CM_EVENT_ADDR_RESOLVED);
    check(!rdma_resolve_route(active.id, 1000));
    expect(active.channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
    for (int n = 0; n < 2; n++) {
        struct rdma_conn_param parameters = {.qp_num = numbers[n]};
        check(rdma_connect(active.id, &parameters) == -1 && errno == EINVAL);
    }
    furnish(&active);
    check(!rdma_connect(active.id, NULL));
    struct rdma_cm_event *event = next(passive.channel, RDMA_CM_EVENT_CONNECT_REQUEST);
    passive.id = event->id;
    check(!rdma_ack_cm_event(event));
    for (int n = 0; n < 2; n++) {
        struct rdma_conn_param parameters = {.qp_num = numbers[n]};
        check(rdma_accept(passive.id, &parameters) == -1 && errno == EINVAL);
    }
    // The request can still be accepted.
    furnish(&passive);
    check(!rdma_accept(passive.id, NULL));
    expect(active.channel, RDMA_CM_EVENT_ESTABLISHED);
    expect(passive.channel, RDMA_CM_EVENT_ESTABLISHED);
    dissolve(&active);
    ended(&passive);
    dissolve(&passive);
    struct ibv_cq *cq = rc->send_cq;
    check(!ibv_destroy_qp(rc) && !ibv_destroy_cq(cq));
    rdma_destroy_qp(of_datagrams[1]);
    check(!rdma_destroy_id(of_datagrams[0]) && !rdma_destroy_id(of_datagrams[1]));
    all_gone();
}

// The source port of an id is reserved until the id is destroyed.
static void source_port(void)
{
    for (int bound = 0; bound < 2; bound++) {
        passive.channel = channel();
        listener = listening(passive.channel);
        active.channel = channel();
        active.id = new_id(active.channel);
        struct sockaddr_in one = loopback(0), everywhere = {.sin_family = AF_INET};
        if (bound)
            check(!rdma_bind_addr(active.id, (struct sockaddr *)&one));
        resolved(&active, rdma_get_src_port(listener));
        one.sin_port = everywhere.sin_port = rdma_get_src_port(active.id);
        for (int connects = 0; connects < 2; connects++) {
            if (connects) {
                check(!rdma_connect(active.id, NULL));
                struct rdma_cm_event *event = next(passive.channel, RDMA_CM_EVENT_CONNECT_REQUEST);
                passive.id = event->id;
                check(!rdma_ack_cm_event(event));
                furnish(&passive);
                check(!rdma_accept(passive.id, NULL));
                expect(active.channel, RDMA_CM_EVENT_ESTABLISHED);
                expect(passive.channel, RDMA_CM_EVENT_ESTABLISHED);
                check(rdma_get_src_port(active.id) == one.sin_port);
            }
            struct rdma_cm_id *other = new_id(active.channel);
            check(rdma_bind_addr(other, (struct sockaddr *)&one) == -1 && errno == EADDRINUSE);
            check(rdma_bind_addr(other, (struct sockaddr *)&everywhere) == -1);
            check(errno == EADDRNOTAVAIL);
            check(!rdma_destroy_id(other));
            // Even the id itself cannot bind its port again.
            check(rdma_bind_addr(active.id, (struct sockaddr *)&one) == -1 && errno == EINVAL);
        }
        dissolve(&active);
        ended(&passive);
        dissolve(&passive);
        all_gone();
    }
}

// A fetched request survives its listener.
static void listener_first(void)
{
    ask();
    struct end late = {.channel = channel()};
    late.id = new_id(late.channel);
    resolved(&late, rdma_get_src_port(listener));
    check(!rdma_destroy_id(listener));
    check(!rdma_connect(late.id, NULL));
    check(status_of(late.channel, RDMA_CM_EVENT_REJECTED) == -ECONNREFUSED);
    dissolve(&late);
    rdma_destroy_event_channel(late.channel);
    // The port is free.
    struct sockaddr_in address = loopback(rdma_get_src_port(passive.id));
    listener = new_id(passive.channel);
    check(!rdma_bind_addr(listener, (struct sockaddr *)&address) && !rdma_listen(listener, 1));
    check(!rdma_accept(passive.id, NULL));
    expect(active.channel, RDMA_CM_EVENT_ESTABLISHED);
    expect(passive.channel, RDMA_CM_EVENT_ESTABLISHED);
    dissolve(&active);
    ended(&passive);
    dissolve(&passive);
    all_gone();
}

// Outstanding Reads: too many are refused. Without parameters, the request's values apply.
static void reads(void)
{
    for (int with = 0; with < 2; with++) {
        ask();
        struct ibv_device_attr device;
        check(!ibv_query_device(passive.id->verbs, &device) && device.max_qp_rd_atom < 254);
        struct rdma_conn_param parameters = {.responder_resources = device.max_qp_rd_atom + 1};
        check(rdma_accept(passive.id, &parameters) == -1 && errno == EINVAL);
        parameters.responder_resources = 1;
        check(!rdma_accept(passive.id, with ? &parameters : NULL));
        struct rdma_cm_event *event = next(active.channel, RDMA_CM_EVENT_ESTABLISHED);
        check(event->param.conn.responder_resources == !with);
        check(event->param.conn.initiator_depth == 1);
        // iWARP does not carry the peer's QP number.
        check(event->param.conn.qp_num == 0 && !rdma_ack_cm_event(event));
        event = next(passive.channel, RDMA_CM_EVENT_ESTABLISHED);
        check(event->param.conn.responder_resources == 1 && !rdma_ack_cm_event(event));
        struct ibv_qp_attr attributes;
        struct ibv_qp_init_attr made;
        check(!ibv_query_qp(passive.id->qp, &attributes, IBV_QP_MAX_DEST_RD_ATOMIC, &made));
        check(attributes.max_dest_rd_atomic == 1);
        // rdma_establish() is only for QPs created without the id.
        check(rdma_establish(active.id) == -1 && errno == EINVAL);
        dissolve(&active);
        ended(&passive);
        dissolve(&passive);
        all_gone();
    }
}

// An endpoint can connect at once. The private data starts with that of its rdma_addrinfo.
static void endpoint(void)
{
    passive.channel = channel();
    listener = listening(passive.channel);
    char port[8];
    snprintf(port, sizeof port, "%d", ntohs(rdma_get_src_port(listener)));
    struct rdma_addrinfo hints = {.ai_flags = RAI_NOROUTE, .ai_port_space = RDMA_PS_TCP}, *found;
    check(!rdma_getaddrinfo("127.0.0.1", port, &hints, &found));
    active.channel = channel();
    // Private data that is too long: the call fails and sends no request.
    char much[600] = "";
    found->ai_connect = much;
    found->ai_connect_len = sizeof much;
    check(!rdma_create_ep(&active.id, found, NULL, NULL));
    check(!rdma_migrate_id(active.id, active.channel));
    furnish(&active);
    check(rdma_connect(active.id, NULL) == -1);
    check(rdma_post_send(active.id, NULL, active.memory, 1, active.mr, IBV_SEND_SIGNALED) == -1);
    check(errno == EINVAL);
    check(!rdma_dereg_mr(active.mr));
    rdma_destroy_ep(active.id);

    found->ai_connect = "head ";
    found->ai_connect_len = 5;
    check(!rdma_create_ep(&active.id, found, NULL, NULL));
    check(!rdma_migrate_id(active.id, active.channel));
    furnish(&active);
    struct rdma_conn_param parameters = {.private_data = "tail", .private_data_len = 5};
    check(!rdma_connect(active.id, &parameters));
    struct rdma_cm_event *event = next(passive.channel, RDMA_CM_EVENT_CONNECT_REQUEST);
    check(event->param.conn.private_data_len == 10);
    check(!strcmp(event->param.conn.private_data, "head tail"));
    struct rdma_cm_id *asked = event->id;
    check(!rdma_ack_cm_event(event) && !rdma_destroy_id(asked));
    check(status_of(active.channel, RDMA_CM_EVENT_REJECTED) == -ECONNREFUSED);
    dissolve(&active);
    found->ai_connect = NULL;
    found->ai_connect_len = 0;
    rdma_freeaddrinfo(found);
    all_gone();
}

// A listening endpoint bound to a device address has a protection domain: the named one, or the
// default domain of the device.
static void domain(void)
{
    struct ifaddrs *all, *one;
    check(!getifaddrs(&all));
    for (one = all; one; one = one->ifa_next) {
        if (one->ifa_addr && one->ifa_addr->sa_family == AF_INET && one->ifa_flags & IFF_UP &&
            !(one->ifa_flags & IFF_LOOPBACK))
            break;
    }
    // A host with only loopback addresses has nothing to check.
    if (one) {
        struct rdma_addrinfo here = {.ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_TCP};
        here.ai_qp_type = IBV_QPT_RC;
        here.ai_family = AF_INET;
        here.ai_src_addr = one->ifa_addr;
        here.ai_src_len = sizeof(struct sockaddr_in);
        check(!rdma_create_ep(&listener, &here, NULL, NULL));
        check(listener->verbs && listener->pd && listener->pd->context == listener->verbs);
        struct ibv_pd *pd = ibv_alloc_pd(listener->verbs);
        check(pd && !rdma_create_ep(&active.id, &here, pd, NULL) && active.id->pd == pd);
        rdma_destroy_ep(active.id);
        rdma_destroy_ep(listener);
        check(!ibv_dealloc_pd(pd));
    }
    freeifaddrs(all);
}

static void no_listener(void)
{
    // The port is bound, so that no other process can listen on it.
    passive.channel = channel();
    listener = new_id(passive.channel);
    struct sockaddr_in address = loopback(0);
    check(!rdma_bind_addr(listener, (struct sockaddr *)&address));
    active.channel = channel();
    active.id = new_id(active.channel);
    resolved(&active, rdma_get_src_port(listener));
    check(!rdma_connect(active.id, NULL));
    check(status_of(active.channel, RDMA_CM_EVENT_REJECTED) == -ECONNREFUSED);
    flushed(&active);
    dissolve(&active);
    all_gone();
}

// A peer without MPA accepts the TCP connection and sends nothing.
static void no_answer(void)
{
    int tcp = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = loopback(0);
    socklen_t length = sizeof address;
    check(!bind(tcp, (struct sockaddr *)&address, length) && !listen(tcp, 4));
    check(!getsockname(tcp, (struct sockaddr *)&address, &length));
    active.channel = channel();
    active.id = new_id(active.channel);
    resolved(&active, address.sin_port);
    check(!rdma_connect(active.id, NULL));
    check(status_of(active.channel, RDMA_CM_EVENT_UNREACHABLE) == -ETIMEDOUT);
    flushed(&active);
    dissolve(&active);
}

static void *is_rejected(void *id)
{
    check(rdma_connect(id, NULL) == -1 && errno == ECONNREFUSED);
    return NULL;
}

// Without a channel: a rejection acknowledges the request, and the listener can be destroyed first.
static void synchronous(void)
{
    struct rdma_addrinfo hints = {.ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_TCP}, *found;
    struct ibv_qp_init_attr wanted = {.cap = {4, 4, 1, 1, 0}, .qp_type = IBV_QPT_RC};
    check(!rdma_getaddrinfo("127.0.0.1", "0", &hints, &found));
    check(!rdma_create_ep(&listener, found, NULL, &wanted) && !rdma_listen(listener, 1));
    rdma_freeaddrinfo(found);
    char port[8];
    snprintf(port, sizeof port, "%d", ntohs(rdma_get_src_port(listener)));
    hints.ai_flags = 0;
    check(!rdma_getaddrinfo("127.0.0.1", port, &hints, &found));
    check(!rdma_create_ep(&active.id, found, NULL, &wanted));
    rdma_freeaddrinfo(found);
    pthread_t thread;
    check(!pthread_create(&thread, NULL, is_rejected, active.id));
    check(!rdma_get_request(listener, &passive.id) && passive.id->event);
    check(!rdma_reject(passive.id, NULL, 0) && !passive.id->event);
    check(!pthread_join(thread, NULL));
    rdma_destroy_ep(listener);
    rdma_destroy_ep(passive.id);
    rdma_destroy_ep(active.id);
}

// Events follow an id to its new channel, including pending ones.
static void migrated(void)
{
    passive.channel = channel();
    listener = listening(passive.channel);
    struct rdma_event_channel *first = channel();
    active.channel = channel();
    active.id = new_id(first);
    struct sockaddr_in address = loopback(rdma_get_src_port(listener));
    check(!rdma_resolve_addr(active.id, NULL, (struct sockaddr *)&address, 1000));
    struct pollfd fd = {.fd = first->fd, .events = POLLIN};
    check(poll(&fd, 1, -1) == 1);
    check(!rdma_migrate_id(active.id, active.channel) && active.id->channel == active.channel);
    silent(first);
    expect(active.channel, RDMA_CM_EVENT_ADDR_RESOLVED);
    check(!rdma_resolve_route(active.id, 1000));
    expect(active.channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
    furnish(&active);
    check(!rdma_connect(active.id, NULL));
    // A server can give each connection its own channel.
    struct rdma_cm_event *event = next(passive.channel, RDMA_CM_EVENT_CONNECT_REQUEST);
    passive.id = event->id;
    check(!rdma_ack_cm_event(event));
    struct rdma_event_channel *of_listener = passive.channel;
    passive.channel = channel();
    check(!rdma_migrate_id(passive.id, passive.channel));
    furnish(&passive);
    check(!rdma_accept(passive.id, NULL));
    expect(passive.channel, RDMA_CM_EVENT_ESTABLISHED);
    expect(active.channel, RDMA_CM_EVENT_ESTABLISHED);
    silent(of_listener);
    rdma_destroy_event_channel(first);
    // Without a channel, calls wait for their events themselves.
    check(!rdma_migrate_id(active.id, NULL) && !rdma_disconnect(active.id));
    check(active.id->event && active.id->event->event == RDMA_CM_EVENT_DISCONNECTED);
    expect(passive.channel, RDMA_CM_EVENT_DISCONNECTED);
    dissolve(&active);
    dissolve(&passive);
    check(!rdma_destroy_id(listener));
    rdma_destroy_event_channel(of_listener);
}

// Returns true if a port that is free for IPv6 is also free for IPv4.
static int both_families_on_one_port(void)
{
    int yes = 1;
    struct sockaddr_in6 any = {.sin6_family = AF_INET6};
    struct sockaddr_in of_4 = {.sin_family = AF_INET};
    struct rdma_cm_id *v6 = new_id(passive.channel), *v4 = new_id(passive.channel);
    for (int option = RDMA_OPTION_ID_REUSEADDR; option <= RDMA_OPTION_ID_AFONLY; option++) {
        check(!rdma_set_option(v6, RDMA_OPTION_ID, option, &yes, sizeof yes));
        check(!rdma_set_option(v4, RDMA_OPTION_ID, option, &yes, sizeof yes));
    }
    check(!rdma_bind_addr(v6, (struct sockaddr *)&any) && !rdma_listen(v6, 1));
    of_4.sin_port = rdma_get_src_port(v6);
    int shared = !rdma_bind_addr(v4, (struct sockaddr *)&of_4) && !rdma_listen(v4, 1);
    check(shared || errno == EADDRINUSE || errno == EADDRNOTAVAIL);
    check(!rdma_destroy_id(v6) && !rdma_destroy_id(v4));
    return shared;
}

// RDMA_OPTION_ID_AFONLY decides whether an IPv6 port accepts IPv4, even if it is set and cleared
// after the bind.
static void late_family(void)
{
    struct sockaddr_in6 any = {.sin6_family = AF_INET6};
    int yes = 1, no = 0;
    for (int only = 0; only < 2; only++) {
        listener = new_id(passive.channel);
        check(!rdma_bind_addr(listener, (struct sockaddr *)&any));
        uint16_t port = rdma_get_src_port(listener);
        check(!rdma_set_option(listener, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, &yes, sizeof yes));
        if (!only)
            check(!rdma_set_option(listener, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, &no, sizeof no));
        check(!rdma_listen(listener, 1) && rdma_get_src_port(listener) == port);
        active.id = new_id(active.channel);
        resolved(&active, port);
        check(!rdma_connect(active.id, NULL));
        if (!only) {
            struct rdma_cm_event *event = next(passive.channel, RDMA_CM_EVENT_CONNECT_REQUEST);
            struct rdma_cm_id *asked = event->id;
            check(!rdma_ack_cm_event(event) && !rdma_destroy_id(asked));
        }
        check(status_of(active.channel, RDMA_CM_EVENT_REJECTED) == -ECONNREFUSED);
        silent(passive.channel);
        dissolve(&active);
        check(!rdma_destroy_id(listener));
    }
}

// A port in use by another id: EADDRINUSE for the same address, EADDRNOTAVAIL if either address is
// a wildcard.
static void taken_ports(void)
{
    struct sockaddr_in everywhere = {.sin_family = AF_INET}, one = loopback(0);
    struct sockaddr_in *firsts[] = {&everywhere, &one, &everywhere, &one};
    struct sockaddr_in *seconds[] = {&everywhere, &one, &one, &everywhere};
    int numbers[] = {EADDRNOTAVAIL, EADDRINUSE, EADDRNOTAVAIL, EADDRNOTAVAIL};
    for (int n = 0; n < 8; n++) {
        struct rdma_cm_id *first, *second;
        enum rdma_port_space space = n < 4 ? RDMA_PS_TCP : RDMA_PS_UDP;
        check(!rdma_create_id(passive.channel, &first, NULL, space));
        check(!rdma_create_id(passive.channel, &second, NULL, space));
        firsts[n % 4]->sin_port = 0;
        check(!rdma_bind_addr(first, (struct sockaddr *)firsts[n % 4]));
        seconds[n % 4]->sin_port = rdma_get_src_port(first);
        check(rdma_bind_addr(second, (struct sockaddr *)seconds[n % 4]) == -1);
        check(errno == numbers[n % 4]);
        check(!rdma_destroy_id(first) && !rdma_destroy_id(second));
    }
}

// Ids with RDMA_OPTION_ID_REUSEADDR share an address as long as none of them listens.
static void shared_port(void)
{
    struct sockaddr_in address = loopback(0);
    struct rdma_cm_id *ids[3];
    int yes = 1;
    for (int n = 0; n < 3; n++) {
        ids[n] = new_id(passive.channel);
        check(!rdma_set_option(ids[n], RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &yes, sizeof yes));
        if (n == 2)
            check(!rdma_listen(ids[1], 1));
        int bound = rdma_bind_addr(ids[n], (struct sockaddr *)&address);
        check(n < 2 ? !bound : bound == -1 && errno == EADDRINUSE);
        address.sin_port = rdma_get_src_port(ids[0]);
    }
    check(rdma_listen(ids[0], 1) == -1 && errno == EADDRINUSE);
    check(!rdma_destroy_id(ids[1]) && !rdma_listen(ids[0], 1));
    check(!rdma_destroy_id(ids[0]) && !rdma_destroy_id(ids[2]));
}

// Several listeners on one channel, and both address families on one port.
static void many_listeners(void)
{
    passive.channel = channel();
    struct rdma_cm_id *listeners[3];
    for (int n = 0; n < 3; n++)
        listeners[n] = listening(passive.channel);
    active.channel = channel();
    for (int n = 2; n >= 0; n--) {
        listener = listeners[n];
        active.id = new_id(active.channel);
        resolved(&active, rdma_get_src_port(listener));
        check(!rdma_connect(active.id, NULL));
        struct rdma_cm_event *event = next(passive.channel, RDMA_CM_EVENT_CONNECT_REQUEST);
        check(event->listen_id == listener);
        struct rdma_cm_id *asked = event->id;
        check(!rdma_ack_cm_event(event) && !rdma_reject(asked, NULL, 0));
        check(status_of(active.channel, RDMA_CM_EVENT_REJECTED) == -ECONNREFUSED);
        check(!rdma_destroy_id(asked));
        dissolve(&active);
    }
    taken_ports();
    late_family();
    shared_port();
    // A port that is free in one family may be in use in the other, but hardly in every attempt.
    int shared = 0;
    for (int tries = 0; !shared && tries < 20; tries++)
        shared = both_families_on_one_port();
    check(shared);
    for (int n = 0; n < 3; n++)
        check(!rdma_destroy_id(listeners[n]));
}

static void *destroy(void *id)
{
    check(!rdma_destroy_id(id));
    return NULL;
}

// rdma_destroy_id() blocks until the program has acknowledged the id's events.
static void unacknowledged(void)
{
    passive.channel = channel();
    listener = listening(passive.channel);
    active.channel = channel();
    active.id = new_id(active.channel);
    struct sockaddr_in address = loopback(rdma_get_src_port(listener));
    check(!rdma_resolve_addr(active.id, NULL, (struct sockaddr *)&address, 1000));
    struct rdma_cm_event *event = next(active.channel, RDMA_CM_EVENT_ADDR_RESOLVED);
    pthread_t thread;
    check(!pthread_create(&thread, NULL, destroy, active.id));
    struct timespec soon;
    check(!clock_gettime(CLOCK_REALTIME, &soon));
    soon.tv_nsec += 50 * 1000 * 1000;
    soon.tv_sec += soon.tv_nsec / 1000000000;
    soon.tv_nsec %= 1000000000;
    check(pthread_timedjoin_np(thread, NULL, &soon) == ETIMEDOUT);
    check(event->id == active.id && !rdma_ack_cm_event(event));
    check(!pthread_join(thread, NULL));
    all_gone();
}

// A listener's backlog counts only requests that the program has not fetched.
static void backlog(void)
{
    enum { BACKLOG = 2, ENDS = 2 * BACKLOG, MORE = ENDS + 1 };
    struct end ends[MORE] = {0};
    struct rdma_cm_id *asked[BACKLOG + 1];
    passive.channel = channel();
    listener = new_id(passive.channel);
    struct sockaddr_in address = loopback(0);
    check(!rdma_bind_addr(listener, (struct sockaddr *)&address));
    check(!rdma_listen(listener, BACKLOG));
    struct rdma_event_channel *shared = channel();
    for (int n = 0; n < MORE; n++) {
        ends[n].channel = shared;
        ends[n].id = new_id(shared);
        resolved(&ends[n], rdma_get_src_port(listener));
    }
    for (int n = 0; n < ENDS; n++)
        check(!rdma_connect(ends[n].id, NULL));
    for (int n = 0; n < ENDS - BACKLOG; n++)
        check(status_of(shared, RDMA_CM_EVENT_REJECTED) == -ECONNREFUSED);
    // Fetched requests await a decision and take no place in the backlog.
    for (int n = 0; n <= BACKLOG; n++) {
        if (n == BACKLOG) {
            check(!rdma_connect(ends[ENDS].id, NULL));
            // A request arrives, and no rejection.
            struct pollfd first[] = {{.fd = passive.channel->fd, .events = POLLIN},
                                     {.fd = shared->fd, .events = POLLIN}};
            check(poll(first, 2, -1) > 0 && first[0].revents == POLLIN);
        }
        struct rdma_cm_event *event = next(passive.channel, RDMA_CM_EVENT_CONNECT_REQUEST);
        asked[n] = event->id;
        check(!rdma_ack_cm_event(event));
    }
    silent(shared);
    for (int n = 0; n <= BACKLOG; n++)
        check(!rdma_destroy_id(asked[n]));
    for (int n = 0; n < MORE; n++)
        dissolve(&ends[n]);
    check(!rdma_destroy_id(listener));
    rdma_destroy_event_channel(shared);
    rdma_destroy_event_channel(passive.channel);
}

int main(int count, char **words)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } parts[] = {
        {"active first", active_first},
        {"passive first", passive_first},
        {"at once", at_once},
        {"too early", too_early},
        {"behind sends", behind_sends},
        {"without a word", without_a_word},
        {"queue pair first", queue_pair_first},
        {"errored", errored},
        {"killed", killed},
        {"forked", forked},
        {"rejected", rejected},
        {"undecided", undecided},
        {"withdrawn", withdrawn},
        {"announced", announced},
        {"taken", taken},
        {"foreign", foreign},
        {"source port", source_port},
        {"listener first", listener_first},
        {"reads", reads},
        {"endpoint", endpoint},
        {"domain", domain},
        {"no listener", no_listener},
        {"no answer", no_answer},
        {"synchronous", synchronous},
        {"migrated", migrated},
        {"many listeners", many_listeners},
        {"unacknowledged", unacknowledged},
        {"backlog", backlog},
    };
    check(count == 2);
    for (size_t n = 0; n < sizeof parts / sizeof *parts; n++) {
        if (!strcmp(parts[n].name, words[1])) {
            parts[n].run();
            puts("done");
            return 0;
        }
    }
    check(!"the part is known");
}
