// Clients that connect, send one message and disconnect at once, and a server that counts the
// messages that have been received before the end of their connections. Arguments:
//   server ADDRESS COUNT        prints "port PORT", then "received N"
//   client ADDRESS COUNT PORT   prints "sent"
// ADDRESS is an IPv4 address of the server.

#include "rdma_cm.h"

static char message[64] = "goodbye";

static uint32_t parse(const char *address)
{
    struct in_addr found;
    check(inet_pton(AF_INET, address, &found) == 1);
    return ntohl(found.s_addr);
}

static void has_qp(struct rdma_cm_id *id)
{
    struct ibv_qp_init_attr attr = {.qp_type = IBV_QPT_RC, .sq_sig_all = 1};
    attr.cap.max_send_wr = attr.cap.max_recv_wr = 4;
    attr.cap.max_send_sge = attr.cap.max_recv_sge = 1;
    check(!rdma_create_qp(id, NULL, &attr));
}

static void destroy(struct rdma_cm_id *id)
{
    rdma_destroy_qp(id);
    check(!rdma_destroy_id(id));
}

// Serves one connection. Returns 1 if its message has been received before its end.
static int serve(void)
{
    struct rdma_cm_event *event = next(events, RDMA_CM_EVENT_CONNECT_REQUEST);
    struct rdma_cm_id *id = event->id;
    check(!rdma_ack_cm_event(event));
    has_qp(id);
    struct ibv_mr *mr = rdma_reg_msgs(id, message, sizeof message);
    check(mr && !rdma_post_recv(id, NULL, message, sizeof message, mr));
    check(!rdma_accept(id, NULL));
    // The end may come before the confirmation that the connection is established.
    enum rdma_cm_event_type kind;
    do {
        check(!rdma_get_cm_event(events, &event));
        kind = event->event;
        check(kind == RDMA_CM_EVENT_ESTABLISHED || kind == RDMA_CM_EVENT_DISCONNECTED);
        check(event->id == id && !rdma_ack_cm_event(event));
    } while (kind != RDMA_CM_EVENT_DISCONNECTED);
    struct ibv_wc wc;
    int found = ibv_poll_cq(id->recv_cq, 1, &wc);
    check(found >= 0);
    check(!found || (wc.status == IBV_WC_SUCCESS && wc.byte_len == sizeof message));
    check(!rdma_disconnect(id) && !rdma_dereg_mr(mr));
    destroy(id);
    return found;
}

static void call(uint32_t ip, uint16_t port)
{
    struct rdma_cm_id *id;
    struct sockaddr_in address = ipv4(ip, htons(port));
    check(!rdma_create_id(events, &id, NULL, RDMA_PS_TCP));
    check(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 20000));
    expect(events, RDMA_CM_EVENT_ADDR_RESOLVED);
    check(!rdma_resolve_route(id, 20000));
    expect(events, RDMA_CM_EVENT_ROUTE_RESOLVED);
    has_qp(id);
    struct ibv_mr *mr = rdma_reg_msgs(id, message, sizeof message);
    check(mr && !rdma_connect(id, NULL));
    expect(events, RDMA_CM_EVENT_ESTABLISHED);
    check(!rdma_post_send(id, NULL, message, sizeof message, mr, 0));
    check(!rdma_disconnect(id));
    // Success or flushed: the adapter may not have received the acknowledgement yet.
    struct ibv_wc wc;
    check(rdma_get_send_comp(id, &wc) == 1);
    check(wc.status == IBV_WC_SUCCESS || wc.status == IBV_WC_WR_FLUSH_ERR);
    expect(events, RDMA_CM_EVENT_DISCONNECTED);
    check(!rdma_dereg_mr(mr));
    destroy(id);
}

int main(int argc, char **argv)
{
    check(argc >= 4 && (events = rdma_create_event_channel()) != NULL);
    uint32_t ip = parse(argv[2]);
    int count = atoi(argv[3]);
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (!strcmp(argv[1], "client")) {
        check(argc == 5);
        for (int n = 0; n < count; n++)
            call(ip, (uint16_t)atoi(argv[4]));
        puts("sent");
        return 0;
    }
    struct rdma_cm_id *listener;
    struct sockaddr_in address = ipv4(ip, 0);
    check(!rdma_create_id(events, &listener, NULL, RDMA_PS_TCP));
    check(!rdma_bind_addr(listener, (struct sockaddr *)&address) && !rdma_listen(listener, 8));
    printf("port %u\n", ntohs(rdma_get_src_port(listener)));
    int received = 0;
    for (int n = 0; n < count; n++)
        received += serve();
    printf("received %d\n", received);
    check(!rdma_destroy_id(listener));
    return 0;
}
