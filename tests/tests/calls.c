// Calls libibverbs and librdmacm at bad moments: twice, too late, or after the daemon has died. The
// command line names a part. Prints "done" if the part passed.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

struct ibv_device;
struct ibv_context;
struct ibv_pd;
struct ibv_mr;
struct ibv_cq;
struct ibv_async_event {
    void *element;
    int event_type;
};
struct ibv_qp_cap {
    uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data;
};
struct ibv_qp_init_attr {
    void *qp_context;
    struct ibv_cq *send_cq, *recv_cq;
    void *srq;
    struct ibv_qp_cap cap;
    int qp_type, sq_sig_all;
};
struct rdma_cm_id;
struct ibv_device **ibv_get_device_list(int *count);
struct ibv_context *ibv_open_device(struct ibv_device *device);
struct ibv_pd *ibv_alloc_pd(struct ibv_context *context);
struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *address, size_t length, int access);
int ibv_dereg_mr(struct ibv_mr *mr);
int ibv_dealloc_pd(struct ibv_pd *pd);
struct ibv_cq *ibv_create_cq(struct ibv_context *context, int entries, void *program, void *channel,
                             int vector);
int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event);
int rdma_create_id(void *channel, struct rdma_cm_id **id, void *context, int port_space);
int rdma_destroy_id(struct rdma_cm_id *id);
int rdma_bind_addr(struct rdma_cm_id *id, struct sockaddr *address);
int rdma_listen(struct rdma_cm_id *id, int backlog);
uint16_t rdma_get_src_port(struct rdma_cm_id *id);
int rdma_resolve_addr(struct rdma_cm_id *id, struct sockaddr *source, struct sockaddr *peer,
                      int timeout);
int rdma_resolve_route(struct rdma_cm_id *id, int timeout);
int rdma_create_qp(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_qp_init_attr *wanted);
void rdma_destroy_qp(struct rdma_cm_id *id);
int rdma_connect(struct rdma_cm_id *id, void *parameters);
int rdma_get_request(struct rdma_cm_id *listener, struct rdma_cm_id **id);
int rdma_accept(struct rdma_cm_id *id, void *parameters);
int rdma_disconnect(struct rdma_cm_id *id);

enum { PORT_SPACE_TCP = 0x106, DEVICE_FATAL = 8, REMOTE_READ = 4 };

static void check(int holds, const char *what)
{
    if (!holds) {
        printf("failed: %s (%s)\n", what, strerror(errno));
        exit(1);
    }
}

static struct ibv_context *context(void)
{
    int count = -1;
    struct ibv_device **list = ibv_get_device_list(&count);
    check(list && list[0] && count == 2, "there are two devices");
    struct ibv_context *context = ibv_open_device(list[0]);
    check(context != NULL, "the device opens");
    return context;
}

static struct rdma_cm_id *new_id(void)
{
    struct rdma_cm_id *id;
    check(!rdma_create_id(NULL, &id, NULL, PORT_SPACE_TCP), "an id is created");
    return id;
}

// Creates an id that is bound to a device.
static struct rdma_cm_id *resolved_id(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(1)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    struct rdma_cm_id *id = new_id();
    check(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 1000), "address resolves");
    return id;
}

static struct ibv_qp_init_attr small(void)
{
    struct ibv_qp_init_attr wanted = {.cap = {2, 2, 1, 1, 0}, .qp_type = 2};
    return wanted;
}

static struct rdma_cm_id *listener, *server;

static void *serve(void *nothing)
{
    struct ibv_qp_init_attr wanted = small();
    check(!rdma_get_request(listener, &server), "a request arrives");
    check(!rdma_create_qp(server, NULL, &wanted), "the id gets a QP");
    check(!rdma_accept(server, NULL), "the request is accepted");
    return nothing;
}

// Disconnects a connection that both ends have already ended.
static void twice(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    listener = new_id();
    check(!rdma_bind_addr(listener, (struct sockaddr *)&address), "the address is bound");
    check(!rdma_listen(listener, 1), "the id listens");
    address.sin_port = rdma_get_src_port(listener);
    pthread_t thread;
    check(!pthread_create(&thread, NULL, serve, NULL), "a thread starts");
    struct rdma_cm_id *client = new_id();
    check(!rdma_resolve_addr(client, NULL, (struct sockaddr *)&address, 1000), "address resolves");
    check(!rdma_resolve_route(client, 1000), "the route resolves");
    struct ibv_qp_init_attr wanted = small();
    check(!rdma_create_qp(client, NULL, &wanted), "the id gets a QP");
    check(!rdma_connect(client, NULL), "the connection is established");
    pthread_join(thread, NULL);
    check(!rdma_disconnect(client), "the client disconnects");
    check(!rdma_disconnect(server), "the server disconnects");
    check(!rdma_disconnect(client) && !rdma_disconnect(server), "disconnecting again succeeds");
    rdma_destroy_qp(client);
    rdma_destroy_qp(server);
    check(!rdma_disconnect(client), "disconnecting without a QP succeeds");
    check(!rdma_destroy_id(client) && !rdma_destroy_id(server), "the id is destroyed");
    check(!rdma_destroy_id(listener), "the listener is destroyed");
}

// Every context gets IBV_EVENT_DEVICE_FATAL exactly once when the daemon ends.
static void died(void)
{
    struct ibv_context *busy = context(), *idle = context();
    check(ibv_create_cq(busy, 1, NULL, NULL, 0) && ibv_create_cq(busy, 1, NULL, NULL, 0),
          "completion queues are created");
    puts("ready");
    fflush(stdout);
    struct ibv_async_event event;
    check(!ibv_get_async_event(idle, &event) && event.event_type == DEVICE_FATAL,
          "the idle context gets the event");
    check(!ibv_get_async_event(busy, &event) && event.event_type == DEVICE_FATAL,
          "the busy context gets the event");
    // async_fd follows device, ops and cmd_fd in struct ibv_context.
    int fd = *(int *)((char *)busy + 268);
    check(!fcntl(fd, F_SETFL, O_NONBLOCK), "the descriptor becomes nonblocking");
    check(ibv_get_async_event(busy, &event) == -1 && errno == EAGAIN, "there is no second event");
}

static void *lose(void *id)
{
    rdma_destroy_qp(id);
    return NULL;
}

// The QP is destroyed while a thread waits for its connection.
static void lost(void)
{
    // The port has no listener, and the library retries for a while.
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(1)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    struct rdma_cm_id *id = new_id();
    check(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 1000), "address resolves");
    check(!rdma_resolve_route(id, 1000), "the route resolves");
    struct ibv_qp_init_attr wanted = small();
    check(!rdma_create_qp(id, NULL, &wanted), "the id gets a QP");
    pthread_t thread;
    check(!pthread_create(&thread, NULL, lose, id), "a thread starts");
    check(rdma_connect(id, NULL) == -1, "the connection fails");
    pthread_join(thread, NULL);
    check(!rdma_destroy_id(id), "the id is destroyed");
}

static void *work(void *made)
{
    struct rdma_cm_id *id = resolved_id();
    check(!pthread_cancel(pthread_self()), "the cancellation is requested");
    struct ibv_pd *pd = ibv_alloc_pd(context());
    static char bytes[100];
    check(pd != NULL, "a domain is allocated");
    struct ibv_mr *mr = ibv_reg_mr(pd, bytes, sizeof bytes, REMOTE_READ);
    check(mr && !ibv_dereg_mr(mr) && !ibv_dealloc_pd(pd), "memory is registered and deregistered");
    struct ibv_qp_init_attr wanted = small();
    check(!rdma_create_qp(id, NULL, &wanted), "the id gets a QP");
    rdma_destroy_qp(id);
    check(!rdma_destroy_id(id), "the id is destroyed");
    *(int *)made = 1;
    pthread_testcancel();
    return made;
}

// A thread is cancelled while it creates and destroys objects.
static void cancelled(void)
{
    int made = 0;
    void *result;
    pthread_t thread;
    check(!pthread_create(&thread, NULL, work, &made), "a thread starts");
    check(!pthread_join(thread, &result), "the thread ends");
    check(result == PTHREAD_CANCELED && made, "the thread ends at its cancellation point");
}

static void *resolves(void *id)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(1)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    check(!pthread_cancel(pthread_self()), "the cancellation is requested");
    rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 1000);
    return NULL;
}

static void *connects(void *id)
{
    rdma_connect(id, NULL);
    return NULL;
}

// A thread is cancelled while it waits for a peer that never decides. It must not hold a lock.
static void waits(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    listener = new_id();
    check(!rdma_bind_addr(listener, (struct sockaddr *)&address), "the address is bound");
    check(!rdma_listen(listener, 1), "the id listens");
    address.sin_port = rdma_get_src_port(listener);
    struct rdma_cm_id *client = new_id();
    check(!rdma_resolve_addr(client, NULL, (struct sockaddr *)&address, 1000), "address resolves");
    check(!rdma_resolve_route(client, 1000), "the route resolves");
    struct ibv_qp_init_attr wanted = small();
    check(!rdma_create_qp(client, NULL, &wanted), "the id gets a QP");
    pthread_t thread;
    void *result;
    // A cancelled call whose event has already arrived must complete its step.
    struct rdma_cm_id *resolved = new_id();
    check(!pthread_create(&thread, NULL, resolves, resolved), "a thread starts");
    check(!pthread_join(thread, &result) && result == PTHREAD_CANCELED, "the thread was cancelled");
    check(!rdma_resolve_route(resolved, 1000), "the address was resolved");
    check(!rdma_destroy_id(resolved), "the id is destroyed");
    check(!pthread_create(&thread, NULL, connects, client), "a thread starts");
    check(!rdma_get_request(listener, &server), "a request arrives");
    check(!pthread_cancel(thread) && !pthread_join(thread, &result), "the thread ends");
    check(result == PTHREAD_CANCELED, "the thread was cancelled");
    rdma_destroy_qp(client);
    check(!rdma_destroy_id(client) && !rdma_destroy_id(server), "the id is destroyed");
    check(!rdma_destroy_id(listener), "the listener is destroyed");
}

// A refusal must not change the attributes of the program, so that it can retry with less.
static void refused(void)
{
    struct rdma_cm_id *id = resolved_id();
    struct ibv_qp_init_attr wanted = small();
    wanted.cap.max_inline_data = 1 << 20;
    check(rdma_create_qp(id, NULL, &wanted) == -1, "too much inline data is refused");
    check(!wanted.send_cq && !wanted.recv_cq, "the attributes name no destroyed queue");
    wanted.cap.max_inline_data = 16;
    check(!rdma_create_qp(id, NULL, &wanted), "less inline data is granted");
    rdma_destroy_qp(id);
    check(!rdma_destroy_id(id), "the id is destroyed");
}

// Memory that is unmapped or unreadable cannot be registered.
static void unreadable(void)
{
    struct ibv_pd *pd = ibv_alloc_pd(context());
    check(pd != NULL, "a domain is allocated");
    char *hidden = mmap(NULL, 8192, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(hidden != MAP_FAILED, "memory is mapped");
    check(!ibv_reg_mr(pd, hidden, 8192, REMOTE_READ) && errno == EFAULT,
          "unreadable memory is refused");
    check(!munmap(hidden, 8192), "the memory is unmapped");
    check(!ibv_reg_mr(pd, hidden, 8192, 0) && errno == EFAULT, "unmapped memory is refused");
    check(ibv_reg_mr(pd, (void *)"constant", 8, REMOTE_READ) != NULL, "constants are readable");
}

int main(int count, char **words)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } parts[] = {{"twice", twice}, {"lost", lost}, {"cancelled", cancelled}, {"waits", waits},
                 {"died", died}, {"refused", refused}, {"unreadable", unreadable}};
    check(count == 2, "the arguments name one part");
    for (size_t n = 0; n < sizeof parts / sizeof *parts; n++) {
        if (!strcmp(parts[n].name, words[1])) {
            parts[n].run();
            puts("done");
            return 0;
        }
    }
    check(0, "the part is known");
}
