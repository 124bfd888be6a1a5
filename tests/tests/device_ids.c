// IDs of rdma_cm under fault rules that change their device. With a port as its argument, connects
// to it and prints the event. With "listen", prints a port at all addresses, reads a line from
// standard input, and checks that no request has arrived. Otherwise:
//
// Two connected IDs of rdma_cm, one that has resolved its route, and a listener, while a fault rule
// removes their device, and after it has returned. Prints "ready" before each line that it reads
// from standard input, and "done" at the end.

#include <fcntl.h>
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

// Checks that no event waits.
static void none_waits(void)
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
        none_waits();
        puts("done");
        return 0;
    }
    struct rdma_cm_id *ids[3];
    connected(listener, ids);
    ids[2] = routed(rdma_get_src_port(listener));
    has_qp(ids[2]);
    await_input();
    // Each ID with a device has one event, and the listener at all addresses none.
    int removed[3] = {0};
    for (int left = 3; left > 0; left--) {
        struct rdma_cm_event *event = next(events, RDMA_CM_EVENT_DEVICE_REMOVAL);
        for (int n = 0; n < 3; n++)
            removed[n] += ids[n] == event->id;
        check(event->status == 0 && !rdma_ack_cm_event(event));
    }
    check(removed[0] == 1 && removed[1] == 1 && removed[2] == 1);
    // The device is absent.
    int count = 1;
    struct ibv_context **devices = rdma_get_devices(&count);
    check(!devices && count == 0);
    struct rdma_cm_id *late = new_id();
    struct sockaddr_in address = loopback(rdma_get_src_port(listener));
    int failed = rdma_resolve_addr(late, NULL, (struct sockaddr *)&address, 2000);
    check(failed == -1 && errno == ENODEV && !rdma_destroy_id(late));
    // IDs of the device can only be destroyed.
    check(rdma_connect(ids[2], NULL) == -1 && errno == EINVAL);
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
    check(ibv_modify_qp(ids[0]->qp, &attr, IBV_QP_STATE) == EIO);
    for (int n = 0; n < 3; n++)
        destroy(ids[n]);
    // Their connections had no other events.
    none_waits();
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
