// Checks and events for C tests of rdma_cm.

#include <arpa/inet.h>
#include <errno.h>
#include <rdma/rdma_verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define check(holds)                                                                                \
    do {                                                                                            \
        if (!(holds)) {                                                                             \
            printf("line %d, failed: %s (%s)\n", __LINE__, #holds, strerror(errno));                \
            exit(1);                                                                                \
        }                                                                                           \
    } while (0)

// Returns the next event, which must be of this type. Waits for it.
static inline struct rdma_cm_event *next(struct rdma_event_channel *channel,
                                         enum rdma_cm_event_type kind)
{
    struct rdma_cm_event *event;
    check(!rdma_get_cm_event(channel, &event));
    if (event->event != kind) {
        printf("%s (%d) instead of %s\n", rdma_event_str(event->event), event->status,
               rdma_event_str(kind));
        exit(1);
    }
    return event;
}

static inline int status_of(struct rdma_event_channel *channel, enum rdma_cm_event_type kind)
{
    struct rdma_cm_event *event = next(channel, kind);
    int status = event->status;
    check(!rdma_ack_cm_event(event));
    return status;
}

static inline void expect(struct rdma_event_channel *channel, enum rdma_cm_event_type kind)
{
    check(status_of(channel, kind) == 0);
}

// Returns an address with a port in network byte order.
static inline struct sockaddr_in ipv4(uint32_t address, uint16_t port)
{
    struct sockaddr_in it = {.sin_family = AF_INET, .sin_port = port};
    it.sin_addr.s_addr = htonl(address);
    return it;
}

static inline struct sockaddr_in loopback(uint16_t port)
{
    return ipv4(INADDR_LOOPBACK, port);
}

// The channel of the IDs of most parts.
static struct rdma_event_channel *events;

// Resolves the address and the route of a service on the loopback interface.
__attribute__((unused)) static void resolve(struct rdma_cm_id *id, uint16_t port)
{
    struct sockaddr_in address = loopback(port);
    check(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 2000));
    expect(events, RDMA_CM_EVENT_ADDR_RESOLVED);
    check(!rdma_resolve_route(id, 2000));
    expect(events, RDMA_CM_EVENT_ROUTE_RESOLVED);
}

struct part {
    const char *name;
    void (*run)(void);
};

// Runs the part that the command line names. Prints "done" on success.
static inline int run_part(const struct part *parts, size_t count, int argc, char **argv)
{
    check(argc == 2);
    events = rdma_create_event_channel();
    check(events != NULL);
    for (size_t n = 0; n < count; n++) {
        if (!strcmp(parts[n].name, argv[1])) {
            parts[n].run();
            rdma_destroy_event_channel(events);
            puts("done");
            return 0;
        }
    }
    return 2;
}
