// IDs of rdma_cm on the RoCE device: options, addresses, channels and the loss of the device. The
// command line names the part to run, which prints "done" on success. Built with the headers of
// rdma-core, because it calls their inline functions.

#include <endian.h>
#include <infiniband/ib.h>
#include <infiniband/sa.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include "rdma_cm.h"

static enum rdma_port_space space = RDMA_PS_TCP;

// Reason of a rejection by a program.
enum { BY_PROGRAM = 28 };

static struct rdma_cm_id *new_id(void)
{
    struct rdma_cm_id *id;
    check(!rdma_create_id(events, &id, NULL, space));
    return id;
}

static struct rdma_cm_id *listening_at(uint32_t ip, uint16_t port, int backlog)
{
    struct rdma_cm_id *id = new_id();
    struct sockaddr_in address = ipv4(ip, port);
    check(!rdma_bind_addr(id, (struct sockaddr *)&address) && !rdma_listen(id, backlog));
    return id;
}

static struct rdma_cm_id *found_at(uint32_t ip, uint16_t port)
{
    struct rdma_cm_id *id = new_id();
    struct sockaddr_in address = ipv4(ip, port);
    check(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 2000));
    expect(events, RDMA_CM_EVENT_ADDR_RESOLVED);
    return id;
}

static void has_qp(struct rdma_cm_id *id)
{
    struct ibv_qp_init_attr attr = {.qp_type = IBV_QPT_RC, .sq_sig_all = 1};
    attr.cap = (struct ibv_qp_cap){4, 4, 1, 1, 0};
    check(!rdma_create_qp(id, NULL, &attr));
}

static struct rdma_cm_id *asks(uint32_t ip, uint16_t port)
{
    struct rdma_cm_id *id = found_at(ip, port);
    check(!rdma_resolve_route(id, 2000));
    expect(events, RDMA_CM_EVENT_ROUTE_RESOLVED);
    has_qp(id);
    check(!rdma_connect(id, NULL));
    return id;
}

// Fetches the next request, which must be for this listener.
static struct rdma_cm_id *asked(struct rdma_cm_id *listener)
{
    struct rdma_cm_event *event = next(events, RDMA_CM_EVENT_CONNECT_REQUEST);
    struct rdma_cm_id *id = event->id;
    check(event->listen_id == listener && !rdma_ack_cm_event(event));
    return id;
}

static void both_established(void)
{
    expect(events, RDMA_CM_EVENT_ESTABLISHED);
    expect(events, RDMA_CM_EVENT_ESTABLISHED);
}

static struct ibv_qp_attr attributes(struct ibv_qp *qp)
{
    struct ibv_qp_attr found;
    struct ibv_qp_init_attr init;
    check(!ibv_query_qp(qp, &found, -1, &init));
    return found;
}

static void destroy(struct rdma_cm_id *id)
{
    if (id->qp)
        rdma_destroy_qp(id);
    check(!rdma_destroy_id(id));
}

static int sets(struct rdma_cm_id *id, int option, void *value, size_t length)
{
    return rdma_set_option(id, RDMA_OPTION_ID, option, value, length);
}

// Checks the traffic class of the paths and QPs of a connection.
static void have_class(struct rdma_cm_id *active, struct rdma_cm_id *passive, uint8_t class)
{
    check(active->route.path_rec->traffic_class == class);
    check(passive->route.path_rec->traffic_class == class);
    check(attributes(active->qp).ah_attr.grh.traffic_class == class);
    check(attributes(passive->qp).ah_attr.grh.traffic_class == class);
}

static void options(void)
{
    static const size_t lengths[] = {1, 4, 4, 1};
    uint8_t byte = 20;
    int yes = 1;
    struct rdma_cm_id *id = new_id();
    for (int option = RDMA_OPTION_ID_TOS; option <= RDMA_OPTION_ID_ACK_TIMEOUT; option++) {
        for (size_t length = 0; length <= 8; length++) {
            uint64_t value = 1;
            int fits = length == lengths[option];
            check(sets(id, option, &value, length) == (fits ? 0 : -1));
            check(fits || errno == EINVAL);
        }
    }
    check(sets(id, 4, &yes, 4) == -1 && errno == ENOSYS);
    destroy(id);
    // The QP of the ID gets the timeout. The QP of the peer has the default.
    struct rdma_cm_id *listener = listening_at(INADDR_LOOPBACK, 0, 0);
    struct rdma_cm_id *active = found_at(INADDR_LOOPBACK, rdma_get_src_port(listener));
    check(!sets(active, RDMA_OPTION_ID_ACK_TIMEOUT, &byte, 1));
    check(!sets(active, RDMA_OPTION_ID_TOS, &byte, 1));
    // A path that the program sets resolves the route.
    struct ibv_path_data paths[2] = {{.flags = IBV_PATH_FLAG_GMP}};
    paths[1].flags = IBV_PATH_FLAG_GMP | IBV_PATH_FLAG_PRIMARY | IBV_PATH_FLAG_BIDIRECTIONAL;
    paths[1].path.mtu = 2 << 6 | IBV_MTU_512;
    paths[1].path.tclass = 0x60;
    int level = RDMA_OPTION_IB, path = RDMA_OPTION_IB_PATH;
    check(rdma_set_option(active, level, path, paths, sizeof *paths) == -1 && errno == EINVAL);
    check(rdma_set_option(active, level, path, paths, sizeof paths - 1) == -1 && errno == EINVAL);
    check(rdma_set_option(active, level, path, paths, 0) == -1 && errno == EINVAL);
    check(!rdma_set_option(active, level, path, paths, sizeof paths));
    expect(events, RDMA_CM_EVENT_ROUTE_RESOLVED);
    check(active->route.num_paths == 1 && active->route.path_rec->mtu == IBV_MTU_512);
    check(rdma_set_option(active, level, path, paths, sizeof paths) == -1 && errno == EINVAL);
    has_qp(active);
    check(!rdma_connect(active, NULL));
    struct rdma_cm_id *passive = asked(listener);
    has_qp(passive);
    check(!rdma_accept(passive, NULL));
    both_established();
    check(attributes(active->qp).timeout == 20 && attributes(passive->qp).timeout == 17);
    check(attributes(active->qp).path_mtu == IBV_MTU_512);
    check(attributes(passive->qp).path_mtu == IBV_MTU_512);
    have_class(active, passive, 0x60);
    destroy(active);
    destroy(passive);
    // The route has the TOS at the time of its resolution.
    active = found_at(INADDR_LOOPBACK, rdma_get_src_port(listener));
    uint8_t tos = 0x28;
    check(!sets(active, RDMA_OPTION_ID_TOS, &tos, 1));
    check(!rdma_resolve_route(active, 2000));
    expect(events, RDMA_CM_EVENT_ROUTE_RESOLVED);
    check(!sets(active, RDMA_OPTION_ID_TOS, &byte, 1));
    has_qp(active);
    check(!rdma_connect(active, NULL));
    passive = asked(listener);
    check(!sets(passive, RDMA_OPTION_ID_TOS, &byte, 1));
    has_qp(passive);
    check(!rdma_accept(passive, NULL));
    both_established();
    have_class(active, passive, tos);
    destroy(active);
    destroy(passive);
    destroy(listener);
}

// Moves an ID with its pending event to a new channel.
static void moves(struct rdma_cm_id *id, enum rdma_cm_event_type pending)
{
    struct pollfd from = {.fd = events->fd, .events = POLLIN};
    check(poll(&from, 1, -1) == 1);
    struct rdma_event_channel *old = events, *new = rdma_create_event_channel();
    check(new && !rdma_migrate_id(id, new) && id->channel == new);
    check(poll(&from, 1, 0) == 0);
    struct rdma_cm_event *event = next(new, pending);
    check((event->listen_id ? event->listen_id : event->id) == id);
    struct rdma_cm_id *of_request = event->listen_id ? event->id : NULL;
    check(!rdma_ack_cm_event(event) && !rdma_migrate_id(id, old));
    if (of_request) {
        check(of_request->channel == new && !rdma_migrate_id(of_request, old));
        destroy(of_request);
    }
    rdma_destroy_event_channel(new);
}

// Pending events follow their ID to its new channel, in each state.
static void migrated(void)
{
    struct rdma_cm_id *listener = listening_at(INADDR_LOOPBACK, 0, 0);
    uint16_t port = rdma_get_src_port(listener);
    struct rdma_cm_id *active = new_id();
    struct sockaddr_in address = loopback(port);
    check(!rdma_resolve_addr(active, NULL, (struct sockaddr *)&address, 2000));
    moves(active, RDMA_CM_EVENT_ADDR_RESOLVED);
    check(!rdma_resolve_route(active, 2000));
    moves(active, RDMA_CM_EVENT_ROUTE_RESOLVED);
    has_qp(active);
    check(!rdma_connect(active, NULL));
    // Destroying the ID of the request rejects it.
    moves(listener, RDMA_CM_EVENT_CONNECT_REQUEST);
    moves(active, RDMA_CM_EVENT_REJECTED);
    destroy(active);
    active = asks(INADDR_LOOPBACK, port);
    struct rdma_cm_id *passive = asked(listener);
    struct rdma_event_channel *other = rdma_create_event_channel();
    check(other && !rdma_migrate_id(passive, other));
    has_qp(passive);
    check(!rdma_accept(passive, NULL));
    expect(other, RDMA_CM_EVENT_ESTABLISHED);
    moves(active, RDMA_CM_EVENT_ESTABLISHED);
    check(!rdma_disconnect(passive));
    expect(other, RDMA_CM_EVENT_DISCONNECTED);
    moves(active, RDMA_CM_EVENT_DISCONNECTED);
    expect(other, RDMA_CM_EVENT_TIMEWAIT_EXIT);
    moves(active, RDMA_CM_EVENT_TIMEWAIT_EXIT);
    destroy(active);
    destroy(passive);
    destroy(listener);
    rdma_destroy_event_channel(other);
}

// Listeners at different addresses can share a port. A listener at a wildcard address cannot.
static void listeners(void)
{
    struct rdma_cm_id *one = listening_at(INADDR_LOOPBACK, 0, 0);
    uint16_t port = rdma_get_src_port(one);
    struct rdma_cm_id *two = listening_at(INADDR_LOOPBACK + 1, port, 0);
    struct rdma_cm_id *third = new_id();
    struct sockaddr_in any = ipv4(INADDR_ANY, port), same = loopback(port);
    check(rdma_bind_addr(third, (struct sockaddr *)&any) == -1 && errno == EADDRNOTAVAIL);
    check(rdma_bind_addr(third, (struct sockaddr *)&same) == -1 && errno == EADDRINUSE);
    for (int n = 0; n < 2; n++) {
        struct rdma_cm_id *active = asks(INADDR_LOOPBACK + n, port);
        struct rdma_cm_id *passive = asked(n ? two : one);
        check(!rdma_reject(passive, NULL, 0));
        check(status_of(events, RDMA_CM_EVENT_REJECTED) == BY_PROGRAM);
        destroy(active);
        destroy(passive);
    }
    destroy(one);
    destroy(two);
    check(!rdma_bind_addr(third, (struct sockaddr *)&any) && !rdma_listen(third, 0));
    struct rdma_cm_id *active = asks(INADDR_LOOPBACK + 1, port), *passive = asked(third);
    destroy(passive);
    check(status_of(events, RDMA_CM_EVENT_REJECTED) == BY_PROGRAM);
    destroy(active);
    destroy(third);
}

// The backlog counts the requests that the program has not fetched.
static void backlog(void)
{
    struct rdma_cm_id *listener = listening_at(INADDR_LOOPBACK, 0, 2);
    uint16_t port = rdma_get_src_port(listener);
    struct rdma_event_channel *of_listener = rdma_create_event_channel();
    check(of_listener && !rdma_migrate_id(listener, of_listener));
    struct rdma_cm_id *active[4], *passive[3];
    for (int n = 0; n < 3; n++)
        active[n] = asks(INADDR_LOOPBACK, port);
    struct rdma_cm_event *event = next(events, RDMA_CM_EVENT_REJECTED);
    check(event->id == active[2] && event->status == BY_PROGRAM && !rdma_ack_cm_event(event));
    // A fetched request makes room, even while it is undecided.
    for (int n = 0; n < 3; n++) {
        event = next(of_listener, RDMA_CM_EVENT_CONNECT_REQUEST);
        passive[n] = event->id;
        check(!rdma_ack_cm_event(event));
        if (n == 0)
            active[3] = asks(INADDR_LOOPBACK, port);
    }
    for (int n = 0; n < 3; n++)
        destroy(passive[n]);
    for (int n = 0; n < 3; n++)
        check(status_of(events, RDMA_CM_EVENT_REJECTED) == BY_PROGRAM);
    for (int n = 0; n < 4; n++)
        destroy(active[n]);
    destroy(listener);
    rdma_destroy_event_channel(of_listener);
}

// rdma_resolve_addr() gives an ID its source port.
static void source_port(void)
{
    struct rdma_cm_id *listener = listening_at(INADDR_LOOPBACK, 0, 0);
    struct rdma_cm_id *active = found_at(INADDR_LOOPBACK, rdma_get_src_port(listener));
    uint16_t port = rdma_get_src_port(active);
    check(port != 0);
    struct rdma_cm_id *other = new_id();
    struct sockaddr_in taken = loopback(port);
    check(rdma_bind_addr(other, (struct sockaddr *)&taken) == -1 && errno == EADDRINUSE);
    destroy(other);
    check(!rdma_resolve_route(active, 2000));
    expect(events, RDMA_CM_EVENT_ROUTE_RESOLVED);
    has_qp(active);
    check(!rdma_connect(active, NULL));
    struct rdma_cm_id *passive = asked(listener);
    check(rdma_get_dst_port(passive) == port && rdma_get_src_port(active) == port);
    destroy(passive);
    check(status_of(events, RDMA_CM_EVENT_REJECTED) == BY_PROGRAM);
    destroy(active);
    destroy(listener);
}

// Another program may listen at the reserved source port of an ID. The ID then connects from
// another port.
static void taken_port(void)
{
    static const enum rdma_port_space spaces[] = {RDMA_PS_TCP, RDMA_PS_UDP};
    int down[2], up[2];
    uint16_t port;
    check(!pipe(down) && !pipe(up));
    pid_t child = fork();
    check(child >= 0);
    if (child == 0) {
        close(down[1]);
        events = rdma_create_event_channel();
        for (int n = 0; read(down[0], &port, sizeof port) == sizeof port; n++) {
            space = spaces[n];
            listening_at(n ? INADDR_LOOPBACK : INADDR_ANY, port, 0);
            check(write(up[1], "x", 1) == 1);
        }
        _exit(0);
    }
    close(up[1]);
    for (int n = 0; n < 2; n++) {
        space = spaces[n];
        struct rdma_cm_id *listener = listening_at(INADDR_LOOPBACK, 0, 0);
        struct rdma_cm_id *active = found_at(INADDR_LOOPBACK, rdma_get_src_port(listener));
        port = rdma_get_src_port(active);
        check(write(down[1], &port, sizeof port) == sizeof port && read(up[0], &port, 1) == 1);
        check(!rdma_resolve_route(active, 2000));
        expect(events, RDMA_CM_EVENT_ROUTE_RESOLVED);
        if (space == RDMA_PS_TCP)
            has_qp(active);
        port = rdma_get_src_port(active);
        check(!rdma_connect(active, NULL));
        struct rdma_cm_id *passive = asked(listener);
        check(rdma_get_dst_port(passive) && rdma_get_dst_port(passive) != port);
        destroy(passive);
        status_of(events, n ? RDMA_CM_EVENT_UNREACHABLE : RDMA_CM_EVENT_REJECTED);
        destroy(active);
        destroy(listener);
    }
    close(down[1]);
    check(waitpid(child, NULL, 0) == child);
}

static struct sockaddr_ib ib(uint64_t sid, uint64_t mask)
{
    struct sockaddr_ib it = {.sib_family = AF_IB, .sib_pkey = 0xFFFF};
    ib_addr_set(&it.sib_addr, 0, 0, htobe32(0xFFFF), htobe32(INADDR_LOOPBACK));
    it.sib_sid = htobe64(sid);
    it.sib_sid_mask = htobe64(mask);
    return it;
}

// Checks that an end has the GID of 127.0.0.1, and a port of this port space.
static void is_ib(const struct sockaddr *end, uint64_t space, uint16_t port)
{
    const struct sockaddr_ib *at = (const struct sockaddr_ib *)end;
    struct sockaddr_ib same = ib(0, 0);
    check(at->sib_family == AF_IB && !ib_addr_cmp(&at->sib_addr, &same.sib_addr));
    check(be64toh(at->sib_sid) == (space << 16 | be16toh(port)) && at->sib_sid_mask == ~0ULL);
}

// Addresses of the family AF_IB: a GID and a service ID.
static void af_ib(void)
{
    const uint64_t spaces = ~0xFFFFULL, all = ~0ULL;
    struct rdma_cm_id *id = new_id();
    // The service ID must be in the port space of the ID, as far as the mask selects it.
    struct sockaddr_ib wrong = ib(0x013F0000, spaces), none = ib(0, 0);
    struct sockaddr_in ip = loopback(7);
    check(rdma_bind_addr(id, (struct sockaddr *)&wrong) == -1 && errno == EPROTONOSUPPORT);
    check(!rdma_bind_addr(id, (struct sockaddr *)&none));
    is_ib(rdma_get_local_addr(id), RDMA_PS_TCP, rdma_get_src_port(id));
    check(rdma_get_src_port(id) != 0);
    check(rdma_resolve_addr(id, NULL, (struct sockaddr *)&ip, 9) == -1 && errno == EINVAL);
    destroy(id);
    // An ID of RDMA_PS_IB may use the ports of RDMA_PS_TCP.
    space = RDMA_PS_IB;
    struct rdma_cm_id *listener = new_id();
    struct sockaddr_ib tcp = ib((uint64_t)RDMA_PS_TCP << 16, spaces);
    check(!rdma_bind_addr(listener, (struct sockaddr *)&tcp) && !rdma_listen(listener, 0));
    uint16_t port = rdma_get_src_port(listener);
    is_ib(rdma_get_local_addr(listener), RDMA_PS_TCP, port);
    space = RDMA_PS_TCP;
    struct rdma_cm_id *active = new_id();
    struct sockaddr_ib to = ib((uint64_t)RDMA_PS_TCP << 16 | be16toh(port), all);
    struct sockaddr_ib udp = ib((uint64_t)RDMA_PS_UDP << 16 | 7, all);
    check(rdma_resolve_addr(active, NULL, (struct sockaddr *)&udp, 9) == -1);
    check(errno == EPROTONOSUPPORT);
    check(rdma_resolve_addr(active, (struct sockaddr *)&ip, (struct sockaddr *)&to, 9) == -1);
    check(errno == EINVAL);
    check(!rdma_resolve_addr(active, NULL, (struct sockaddr *)&to, 2000));
    expect(events, RDMA_CM_EVENT_ADDR_RESOLVED);
    check(!rdma_resolve_route(active, 2000));
    expect(events, RDMA_CM_EVENT_ROUTE_RESOLVED);
    is_ib(rdma_get_peer_addr(active), RDMA_PS_TCP, port);
    check(rdma_get_dst_port(active) == port && active->verbs);
    // A call in the wrong phase does not change the port space.
    to = ib((uint64_t)RDMA_PS_IB << 16 | be16toh(port), all);
    check(rdma_resolve_addr(active, NULL, (struct sockaddr *)&to, 9) == -1 && errno == EINVAL);
    has_qp(active);
    check(!rdma_connect(active, NULL));
    struct rdma_cm_id *passive = asked(listener);
    is_ib(rdma_get_local_addr(passive), RDMA_PS_TCP, port);
    has_qp(passive);
    check(!rdma_accept(passive, NULL));
    both_established();
    is_ib(rdma_get_local_addr(active), RDMA_PS_TCP, rdma_get_src_port(active));
    destroy(active);
    destroy(passive);
    // An ID with an IP address reaches the same port.
    active = asks(INADDR_LOOPBACK, port);
    destroy(asked(listener));
    check(status_of(events, RDMA_CM_EVENT_REJECTED) == BY_PROGRAM);
    destroy(active);
    destroy(listener);
    // A listener at the wildcard GID serves both families.
    listener = new_id();
    memset(&none.sib_addr, 0, sizeof none.sib_addr);
    check(!rdma_bind_addr(listener, (struct sockaddr *)&none) && !rdma_listen(listener, 0));
    active = asks(INADDR_LOOPBACK, rdma_get_src_port(listener));
    destroy(asked(listener));
    check(status_of(events, RDMA_CM_EVENT_REJECTED) == BY_PROGRAM);
    destroy(active);
    destroy(listener);
}

// rdma_getaddrinfo() with hints for AF_IB.
static void af_ib_lookup(void)
{
    struct rdma_addrinfo hints = {.ai_family = AF_IB, .ai_port_space = RDMA_PS_IB}, *found;
    hints.ai_flags = RAI_FAMILY | RAI_NUMERICHOST;
    hints.ai_qp_type = IBV_QPT_RC;
    check(!rdma_getaddrinfo("127.0.0.1", "7471", &hints, &found));
    check(found->ai_family == AF_IB && found->ai_dst_len == sizeof(struct sockaddr_ib));
    check(!found->ai_src_addr);
    is_ib(found->ai_dst_addr, RDMA_PS_IB, htobe16(7471));
    rdma_freeaddrinfo(found);
    // Without a service, the address stands for any port of the port space.
    hints.ai_flags |= RAI_PASSIVE;
    check(!rdma_getaddrinfo("127.0.0.1", NULL, &hints, &found));
    check(found->ai_src_len == sizeof(struct sockaddr_ib) && !found->ai_dst_addr);
    struct sockaddr_ib *source = (struct sockaddr_ib *)found->ai_src_addr;
    check(be64toh(source->sib_sid_mask) == ~0xFFFFULL);
    space = RDMA_PS_IB;
    struct rdma_cm_id *id = new_id();
    check(!rdma_bind_addr(id, found->ai_src_addr) && rdma_get_src_port(id) != 0);
    destroy(id);
    // Addresses in the hints are returned.
    struct rdma_addrinfo known = {.ai_family = AF_IB, .ai_dst_addr = found->ai_src_addr};
    known.ai_dst_len = found->ai_src_len;
    struct rdma_addrinfo *copy;
    check(!rdma_getaddrinfo(NULL, NULL, &known, &copy));
    check(copy->ai_dst_len == known.ai_dst_len && copy->ai_family == AF_IB);
    check(!memcmp(copy->ai_dst_addr, known.ai_dst_addr, known.ai_dst_len));
    rdma_freeaddrinfo(copy);
    rdma_freeaddrinfo(found);
    // A host name resolves to IP addresses only.
    hints.ai_flags = RAI_FAMILY;
    check(!rdma_getaddrinfo("localhost", "7471", &hints, &found));
    check(found->ai_family == AF_INET || found->ai_family == AF_INET6);
    rdma_freeaddrinfo(found);
}

// A message from the peer's QP, reported by rdma_notify(), replaces a lost confirmation.
static void notified(void)
{
    struct rdma_cm_id *listener = listening_at(INADDR_LOOPBACK, 0, 0);
    struct rdma_cm_id *active = found_at(INADDR_LOOPBACK, rdma_get_src_port(listener));
    check(!rdma_resolve_route(active, 2000));
    expect(events, RDMA_CM_EVENT_ROUTE_RESOLVED);
    // The QP belongs to the program, which does not confirm the connection.
    struct ibv_cq *cq = ibv_create_cq(active->verbs, 8, NULL, NULL, 0);
    struct ibv_qp_init_attr attr = {.qp_type = IBV_QPT_RC, .send_cq = cq, .recv_cq = cq};
    attr.cap = (struct ibv_qp_cap){4, 4, 1, 1, 0};
    struct ibv_qp *qp = ibv_create_qp(active->pd, &attr);
    struct rdma_conn_param param = {.qp_num = qp->qp_num};
    check(!rdma_connect(active, &param));
    struct rdma_cm_id *passive = asked(listener);
    has_qp(passive);
    check(rdma_notify(passive, IBV_EVENT_COMM_EST) == -1 && errno == EINVAL);
    check(!rdma_accept(passive, NULL));
    expect(events, RDMA_CM_EVENT_CONNECT_RESPONSE);
    check(rdma_notify(active, IBV_EVENT_COMM_EST) == -1 && errno == EINVAL);
    check(rdma_notify(passive, IBV_EVENT_SM_CHANGE) == -1 && errno == EINVAL);
    check(!rdma_notify(passive, IBV_EVENT_COMM_EST));
    struct rdma_cm_event *event = next(events, RDMA_CM_EVENT_ESTABLISHED);
    check(event->id == passive && !rdma_ack_cm_event(event));
    check(rdma_notify(passive, IBV_EVENT_COMM_EST) == -1 && errno == EISCONN);
    // The late confirmation changes nothing.
    check(!rdma_establish(active));
    destroy(active);
    expect(events, RDMA_CM_EVENT_DISCONNECTED);
    destroy(passive);
    destroy(listener);
    check(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq));
}

// A host that does not answer.
static void unreachable(void)
{
    struct rdma_cm_id *active = asks(INADDR_LOOPBACK + 8, htons(7471));
    struct rdma_cm_event *event = next(events, RDMA_CM_EVENT_UNREACHABLE);
    check(event->id == active && event->status == -ETIMEDOUT && !rdma_ack_cm_event(event));
    destroy(active);
}

// Every ID gets DEVICE_REMOVAL when the daemon ends.
static void removed(void)
{
    struct rdma_cm_id *listener = listening_at(INADDR_LOOPBACK, 0, 0);
    uint16_t port = rdma_get_src_port(listener);
    struct rdma_cm_id *ids[5] = {listener, asks(INADDR_LOOPBACK, port)};
    ids[2] = asked(listener);
    has_qp(ids[2]);
    check(!rdma_accept(ids[2], NULL));
    both_established();
    ids[3] = found_at(INADDR_LOOPBACK, port);
    ids[4] = asks(INADDR_LOOPBACK, port);
    struct rdma_cm_id *undecided = asked(listener);
    puts("ready");
    fflush(stdout);
    // Event of each ID before DEVICE_REMOVAL, or -1.
    const int before[5] = {-1, RDMA_CM_EVENT_DISCONNECTED, RDMA_CM_EVENT_DISCONNECTED, -1,
                           RDMA_CM_EVENT_CONNECT_ERROR};
    int seen[5] = {-1, -1, -1, -1, -1};
    for (int left = 5; left > 0;) {
        struct rdma_cm_event *event;
        check(!rdma_get_cm_event(events, &event));
        int n = 0;
        while (n < 5 && ids[n] != event->id)
            n++;
        check(n < 5);
        if (event->event == RDMA_CM_EVENT_DEVICE_REMOVAL) {
            check(seen[n] == before[n] && event->status == 0);
            left--;
        } else {
            check(seen[n] == -1);
            seen[n] = event->event;
            check(event->status == (n == 4 ? -ENODEV : 0));
        }
        check(!rdma_ack_cm_event(event));
    }
    check(rdma_accept(undecided, NULL) == -1 && !rdma_destroy_id(undecided));
    for (int n = 0; n < 5; n++)
        destroy(ids[n]);
}

int main(int argc, char **argv)
{
    static const struct part parts[] = {
        {"options", options},         {"migrated", migrated},
        {"listeners", listeners},     {"backlog", backlog},
        {"source port", source_port}, {"taken port", taken_port},
        {"AF_IB", af_ib},
        {"lookup", af_ib_lookup},     {"notified", notified},
        {"unreachable", unreachable}, {"removed", removed},
    };
    return run_part(parts, sizeof parts / sizeof *parts, argc, argv);
}
