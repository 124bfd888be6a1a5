// Connects QPs that it has created itself and stored in the IDs. Prints "done" on success.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

struct ibv_context;
struct ibv_pd;
struct ibv_cq;
struct ibv_qp;

struct ibv_qp_init_attr {
    void *context;
    struct ibv_cq *send_cq, *recv_cq;
    void *srq;
    uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data;
    uint32_t type;
    int signal_all;
};

// The first members of the library's structure.
struct rdma_cm_id {
    struct ibv_context *verbs;
    void *channel, *context;
    struct ibv_qp *qp;
};

struct rdma_cm_event {
    struct rdma_cm_id *id, *listener;
    uint32_t event;
    int status;
};

enum { TCP = 0x0106, RC = 2 };
enum { ADDRESS_RESOLVED = 0, ROUTE_RESOLVED = 2, REQUEST = 4, ESTABLISHED = 9 };

void *rdma_create_event_channel(void);
int rdma_create_id(void *channel, struct rdma_cm_id **id, void *context, int space);
int rdma_bind_addr(struct rdma_cm_id *id, struct sockaddr *address);
int rdma_listen(struct rdma_cm_id *id, int backlog);
uint16_t rdma_get_src_port(struct rdma_cm_id *id);
int rdma_resolve_addr(struct rdma_cm_id *id, struct sockaddr *from, struct sockaddr *to, int ms);
int rdma_resolve_route(struct rdma_cm_id *id, int ms);
int rdma_connect(struct rdma_cm_id *id, void *parameters);
int rdma_accept(struct rdma_cm_id *id, void *parameters);
int rdma_get_cm_event(void *channel, struct rdma_cm_event **event);
int rdma_ack_cm_event(struct rdma_cm_event *event);
struct ibv_pd *ibv_alloc_pd(struct ibv_context *context);
struct ibv_cq *ibv_create_cq(struct ibv_context *of, int n, void *own, void *channel, int vector);
struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *wanted);

static void check(int holds, const char *what)
{
    if (!holds) {
        printf("failed: %s\n", what);
        exit(1);
    }
}

// Returns the ID of the next event, which must have this type.
static struct rdma_cm_id *next(void *channel, uint32_t kind, const char *what)
{
    struct rdma_cm_event *event;
    check(!rdma_get_cm_event(channel, &event) && event->event == kind && !event->status, what);
    struct rdma_cm_id *id = event->id;
    rdma_ack_cm_event(event);
    return id;
}

static void gets_a_queue_pair(struct rdma_cm_id *id)
{
    struct ibv_cq *cq = ibv_create_cq(id->verbs, 4, NULL, NULL, 0);
    struct ibv_qp_init_attr wanted = {
        .send_cq = cq, .recv_cq = cq, .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1,
        .max_recv_sge = 1, .type = RC,
    };
    id->qp = ibv_create_qp(ibv_alloc_pd(id->verbs), &wanted);
    check(id->qp != NULL, "a QP is created");
}

int main(void)
{
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
    };
    void *of_server = rdma_create_event_channel(), *of_client = rdma_create_event_channel();
    struct rdma_cm_id *listener, *client;
    check(!rdma_create_id(of_server, &listener, NULL, TCP), "a listener is created");
    check(!rdma_bind_addr(listener, (struct sockaddr *)&address), "the listener is bound");
    check(!rdma_listen(listener, 1), "the listener listens");
    address.sin_port = rdma_get_src_port(listener);

    check(!rdma_create_id(of_client, &client, NULL, TCP), "a client is created");
    check(!rdma_resolve_addr(client, NULL, (struct sockaddr *)&address, 1000), "resolution starts");
    next(of_client, ADDRESS_RESOLVED, "the address is resolved");
    check(!rdma_resolve_route(client, 1000), "route resolution starts");
    next(of_client, ROUTE_RESOLVED, "the route is resolved");
    gets_a_queue_pair(client);
    check(!rdma_connect(client, NULL), "the client connects");

    struct rdma_cm_id *server = next(of_server, REQUEST, "a request arrives");
    gets_a_queue_pair(server);
    check(!rdma_accept(server, NULL), "the request is accepted");
    next(of_server, ESTABLISHED, "the server is connected");
    // Not CONNECT_RESPONSE, because the library itself moves a QP stored in an ID to RTS.
    next(of_client, ESTABLISHED, "the client is connected");
    puts("done");
    return 0;
}
