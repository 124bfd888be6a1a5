// One end of a connection of rdma_cm under fault rules. Each argument is a step:
//
//   listen IP       listens at a port that it prints
//   ask IP PORT     resolves the address and asks to connect
//   accept, answer  accepts the request of the last event, the second with private data
//   event           prints the next event with its status and private data
//   hold            prints the next event, and keeps it without acknowledging it
//   ack             prints the oldest event that is kept once more, and acknowledges it
//   get             prints the error number of rdma_get_cm_event
//   silent          checks that no event is pending
//   send            posts a Send
//   wc, receive     prints the status of the next completion of a Send or receive
//   async           prints the number of the next asynchronous event
//   disconnect      ends the connection
//   leave           prints the error number of rdma_disconnect
//   input           prints "ready" and waits for a line or the end of standard input

#include <poll.h>

#include "rdma_cm.h"

enum { RECEIVES = 2, KEPT = 4 };

static struct rdma_cm_id *listener, *id;
static struct ibv_mr *mr;
static char memory[64];
static struct rdma_cm_event *kept[KEPT];
static int holds, acknowledged;

static struct rdma_cm_id *new_id(void)
{
    struct rdma_cm_id *made;
    check(!rdma_create_id(events, &made, NULL, RDMA_PS_TCP));
    return made;
}

static struct sockaddr_in address_of(const char *ip, int port)
{
    struct sockaddr_in address = ipv4(0, htons(port));
    check(inet_pton(AF_INET, ip, &address.sin_addr) == 1);
    return address;
}

static void create_objects(void)
{
    struct ibv_qp_init_attr wanted = {.cap = {4, 4, 1, 1, 0}, .qp_type = IBV_QPT_RC};
    check(!rdma_create_qp(id, NULL, &wanted));
    check((mr = rdma_reg_msgs(id, memory, sizeof memory)) != NULL);
    for (int n = 0; n < RECEIVES; n++)
        check(!rdma_post_recv(id, NULL, memory, sizeof memory, mr));
}

static void listens(const char *ip)
{
    listener = new_id();
    struct sockaddr_in address = address_of(ip, 0);
    check(!rdma_bind_addr(listener, (struct sockaddr *)&address) && !rdma_listen(listener, 4));
    printf("port %d\n", ntohs(rdma_get_src_port(listener)));
}

static void ask(const char *ip, const char *port)
{
    id = new_id();
    struct sockaddr_in address = address_of(ip, atoi(port));
    check(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 2000));
    expect(events, RDMA_CM_EVENT_ADDR_RESOLVED);
    check(!rdma_resolve_route(id, 2000));
    expect(events, RDMA_CM_EVENT_ROUTE_RESOLVED);
    create_objects();
    struct rdma_conn_param parameters = {.retry_count = 7, .rnr_retry_count = 7};
    check(!rdma_connect(id, &parameters));
}

// Prints an event, with its private data up to the last byte that is not zero.
static void show(const struct rdma_cm_event *found)
{
    const unsigned char *data = found->param.conn.private_data;
    int length = found->param.conn.private_data_len;
    check(!length == !data);
    printf("%s %d", rdma_event_str(found->event), found->status);
    while (length && !data[length - 1])
        length--;
    if (length)
        printf(" %d ", found->param.conn.private_data_len);
    for (int n = 0; n < length; n++)
        printf("%02x", data[n]);
    puts("");
}

static void hold(void)
{
    check(holds < KEPT && !rdma_get_cm_event(events, &kept[holds]));
    check(kept[holds]->event != RDMA_CM_EVENT_CONNECT_REQUEST);
    show(kept[holds++]);
}

static void acknowledge(void)
{
    check(acknowledged < holds);
    show(kept[acknowledged]);
    check(!rdma_ack_cm_event(kept[acknowledged++]));
}

static void event(void)
{
    struct rdma_cm_event *found;
    check(!rdma_get_cm_event(events, &found));
    show(found);
    if (found->event == RDMA_CM_EVENT_CONNECT_REQUEST) {
        check(!id);
        id = found->id;
        create_objects();
    }
    check(!rdma_ack_cm_event(found));
}

static void silent(void)
{
    struct pollfd fd = {.fd = events->fd, .events = POLLIN};
    check(poll(&fd, 1, 0) == 0);
}

int main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    check((events = rdma_create_event_channel()) != NULL);
    for (char **step = argv + 1; *step; step++) {
        struct ibv_wc wc;
        if (!strcmp(*step, "listen")) {
            listens(*++step);
        } else if (!strcmp(*step, "ask")) {
            ask(step[1], step[2]);
            step += 2;
        } else if (!strcmp(*step, "accept")) {
            check(!rdma_accept(id, NULL));
        } else if (!strcmp(*step, "answer")) {
            struct rdma_conn_param parameters = {.private_data = "hi", .private_data_len = 2};
            parameters.rnr_retry_count = 7;
            check(!rdma_accept(id, &parameters));
        } else if (!strcmp(*step, "event")) {
            event();
        } else if (!strcmp(*step, "hold")) {
            hold();
        } else if (!strcmp(*step, "ack")) {
            acknowledge();
        } else if (!strcmp(*step, "get")) {
            struct rdma_cm_event *none;
            check(rdma_get_cm_event(events, &none) == -1);
            printf("get %d\n", errno);
        } else if (!strcmp(*step, "silent")) {
            silent();
        } else if (!strcmp(*step, "send")) {
            check(!rdma_post_send(id, NULL, memory, 1, mr, IBV_SEND_SIGNALED));
        } else if (!strcmp(*step, "wc")) {
            check(rdma_get_send_comp(id, &wc) == 1);
            printf("wc %d\n", wc.status);
        } else if (!strcmp(*step, "receive")) {
            check(rdma_get_recv_comp(id, &wc) == 1);
            printf("receive %d\n", wc.status);
        } else if (!strcmp(*step, "async")) {
            struct ibv_async_event found;
            check(!ibv_get_async_event(id->verbs, &found));
            printf("async %d\n", found.event_type);
            ibv_ack_async_event(&found);
        } else if (!strcmp(*step, "leave")) {
            check(rdma_disconnect(id) == -1);
            printf("leave %d\n", errno);
        } else if (!strcmp(*step, "disconnect")) {
            check(!rdma_disconnect(id));
        } else if (!strcmp(*step, "input")) {
            char line[64];
            puts("ready");
            check(fgets(line, sizeof line, stdin) || feof(stdin));
        } else {
            printf("unknown step %s\n", *step);
            return 1;
        }
    }
    if (id) {
        check(!rdma_dereg_mr(mr));
        rdma_destroy_qp(id);
        check(!rdma_destroy_id(id));
    }
    check(!listener || !rdma_destroy_id(listener));
    rdma_destroy_event_channel(events);
    return 0;
}
