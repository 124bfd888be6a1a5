// IDs of rdma_cm under fault rules that change their device. With a port as its argument, connects
// to it and prints the event. With "listen", prints a port at all addresses, reads a line from
// standard input, and checks that no request has arrived.
//
// Without an argument, checks IDs while a fault rule removes their device, and after the device has
// returned: two connected IDs, one that has resolved its route, one that is bound to an address of
// the host, both ends of a request that is not decided, and a listener. Prints "ready" before each
// line that it reads from standard input, and "done" at the end.

#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <unistd.h>

#include "rdma_cm.h"

static struct rdma_cm_id *new_id(void)
{
    struct rdma_cm_id *id;
    check(!rdma_create_id(events, &id, NULL, RDMA_PS_TCP));
    return id;
}

static struct rdma_cm_id *listening(void)
{
    struct rdma_cm_id *id = new_id();
    struct sockaddr_in address = ipv4(INADDR_ANY, 0);
    check(!rdma_bind_addr(id, (struct sockaddr *)&address) && !rdma_listen(id, 4));
    return id;
}

static struct rdma_cm_id *routed(uint16_t port)
{
    struct rdma_cm_id *id = new_id();
    resolve(id, port);
    return id;
}

static void has_qp(struct rdma_cm_id *id)
{
    struct ibv_qp_init_attr attr = {.qp_type = IBV_QPT_RC, .sq_sig_all = 1};
    attr.cap = (struct ibv_qp_cap){4, 4, 1, 1, 0};
    check(!rdma_create_qp(id, NULL, &attr));
}

// Returns an ID that is bound to an address of the host and so has a device. Returns NULL if the
// host has only loopback addresses.
static struct rdma_cm_id *bound(void)
{
    struct ifaddrs *all;
    check(!getifaddrs(&all));
    for (struct ifaddrs *at = all; at; at = at->ifa_next) {
        if (!at->ifa_addr || at->ifa_addr->sa_family != AF_INET || at->ifa_flags & IFF_LOOPBACK)
            continue;
        struct rdma_cm_id *id = new_id();
        struct sockaddr_in address = *(struct sockaddr_in *)at->ifa_addr;
        address.sin_port = 0;
        if (!rdma_bind_addr(id, (struct sockaddr *)&address) && id->verbs) {
            freeifaddrs(all);
            return id;
        }
        check(!rdma_destroy_id(id));
    }
    freeifaddrs(all);
    return NULL;
}

// Requests a connection. Returns the ID of the request, which is not decided.
static struct rdma_cm_id *undecided(struct rdma_cm_id *asking)
{
    check(!rdma_connect(asking, NULL));
    struct rdma_cm_event *event = next(events, RDMA_CM_EVENT_CONNECT_REQUEST);
    struct rdma_cm_id *asked = event->id;
    check(!rdma_ack_cm_event(event));
    return asked;
}

// Connects two IDs to each other.
static void connected(struct rdma_cm_id *listener, struct rdma_cm_id *ids[2])
{
    ids[0] = routed(rdma_get_src_port(listener));
    has_qp(ids[0]);
    check(!rdma_connect(ids[0], NULL));
    struct rdma_cm_event *event = next(events, RDMA_CM_EVENT_CONNECT_REQUEST);
    ids[1] = event->id;
    check(!rdma_ack_cm_event(event));
    has_qp(ids[1]);
    check(!rdma_accept(ids[1], NULL));
    expect(events, RDMA_CM_EVENT_ESTABLISHED);
    expect(events, RDMA_CM_EVENT_ESTABLISHED);
}

static void await_input(void)
{
    char line[64];
    puts("ready");
    check(fgets(line, sizeof line, stdin) != NULL);
}

static void destroy(struct rdma_cm_id *id)
{
    if (id->qp)
        rdma_destroy_qp(id);
    check(!rdma_destroy_id(id));
}

static void no_event_is_pending(void)
{
    struct rdma_cm_event *other;
    check(fcntl(events->fd, F_SETFL, O_NONBLOCK) == 0);
    check(rdma_get_cm_event(events, &other) == -1 && errno == EAGAIN);
    check(fcntl(events->fd, F_SETFL, 0) == 0);
}

// Connects to a port, and prints the event.
static void ask(uint16_t port)
{
    struct rdma_cm_id *id = routed(port);
    struct rdma_cm_event *event;
    has_qp(id);
    check(!rdma_connect(id, NULL) && !rdma_get_cm_event(events, &event));
    puts(rdma_event_str(event->event));
    check(!rdma_ack_cm_event(event));
    destroy(id);
}

int main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    events = rdma_create_event_channel();
    check(events != NULL);
    if (argc > 1 && strcmp(argv[1], "listen")) {
        ask(htons(atoi(argv[1])));
        return 0;
    }
    struct rdma_cm_id *listener = listening();
    if (argc > 1) {
        printf("port %d\n", ntohs(rdma_get_src_port(listener)));
        await_input();
        no_event_is_pending();
        puts("done");
        return 0;
    }
    struct rdma_cm_id *ids[5];
    connected(listener, ids);
    for (int n = 2; n < 4; n++) {
        ids[n] = routed(rdma_get_src_port(listener));
        has_qp(ids[n]);
    }
    struct rdma_cm_id *asked = undecided(ids[3]);
    ids[4] = bound();
    int count = ids[4] ? 5 : 4;
    await_input();
    // Each ID with a device gets one event. As in the kernel, the ID of the request and the
    // listener at all addresses get none.
    int removed[5] = {0};
    for (int left = count; left > 0; left--) {
        struct rdma_cm_event *event = next(events, RDMA_CM_EVENT_DEVICE_REMOVAL);
        for (int n = 0; n < count; n++)
            removed[n] += ids[n] == event->id;
        check(event->status == 0 && !rdma_ack_cm_event(event));
    }
    for (int n = 0; n < count; n++)
        check(removed[n] == 1);
    struct ibv_qp_init_attr attr_of_qp = {.qp_type = IBV_QPT_RC, .cap = {4, 4, 1, 1, 0}};
    check(rdma_create_qp(asked, NULL, &attr_of_qp) == -1 && errno == EIO);
    check(rdma_accept(asked, NULL) == -1);
    check(!rdma_destroy_id(asked));
    // The device is absent.
    int found = 1;
    struct ibv_context **devices = rdma_get_devices(&found);
    check(!devices && found == 0);
    struct rdma_cm_id *late = new_id();
    struct sockaddr_in address = loopback(rdma_get_src_port(listener));
    int failed = rdma_resolve_addr(late, NULL, (struct sockaddr *)&address, 2000);
    check(failed == -1 && errno == ENODEV && !rdma_destroy_id(late));
    // IDs of the device can only be destroyed.
    check(rdma_connect(ids[2], NULL) == -1 && errno == EINVAL);
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
    check(ibv_modify_qp(ids[0]->qp, &attr, IBV_QP_STATE) == EIO);
    for (int n = 0; n < count; n++)
        destroy(ids[n]);
    // The ends of their connections cause no other events.
    no_event_is_pending();
    await_input();
    connected(listener, ids);
    destroy(ids[0]);
    expect(events, RDMA_CM_EVENT_DISCONNECTED);
    destroy(ids[1]);
    destroy(listener);
    rdma_destroy_event_channel(events);
    puts("done");
    return 0;
}
