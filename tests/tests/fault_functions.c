// Calls each function of libibverbs and librdmacm that a fault rule can fail, twice. A rule fails
// the first call (limit=1), which must leave everything as it was. Prints a line for each function:
// the verb of the rule, and the error numbers of both calls. The argument is the name of the device.

#include "refusals.h"
#include "rdma_cm.h"

#include <dlfcn.h>
#include <fcntl.h>

enum { DEPTH = 16, ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND };

static const int STATE =
    IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_comp_channel *channel;
static struct ibv_cq *cq;
static struct ibv_srq *srq;
static struct ibv_qp *qp;
static struct ibv_mr *mr;
static struct ibv_mw *window;
static struct rdma_cm_id *listener;
static char bytes[64];

// Prints the error numbers of two calls. The first of them must have a reason.
#define SHOW(name, number)                                                                          \
    do {                                                                                            \
        begin_call();                                                                               \
        int first = (number);                                                                       \
        if (first)                                                                                  \
            has_reason(__LINE__, name, first);                                                      \
        begin_call();                                                                               \
        printf("%s %d %d\n", name, first, (number));                                                \
    } while (0)

// Calls a function that returns 0 or an error number.
#define STATUS(name, call) SHOW(name, call)

// Calls a function that returns `failed` and sets errno.
#define ERRNO(name, failed, call) SHOW(name, (call) == (failed) ? errno : 0)

// Calls a function that returns a negative error number.
#define NEGATIVE(name, call) SHOW(name, (call) < 0 ? errno : 0)

static void open_device(const char *name)
{
    struct ibv_device **list;
    int count;
    ERRNO("get_device_list", NULL, list = ibv_get_device_list(&count));
    check(count == 1 && !strcmp(ibv_get_device_name(list[0]), name));
    ERRNO("open_device", NULL, context = ibv_open_device(list[0]));
    ibv_free_device_list(list);
}

static void query(void)
{
    struct ibv_device_attr device;
    struct ibv_port_attr port;
    struct ibv_gid_entry entries[64];
    struct ibv_values_ex values = {.comp_mask = IBV_VALUES_MASK_RAW_CLOCK};
    struct ibv_async_event event;
    union ibv_gid gid;
    uint16_t pkey;
    STATUS("query_device", ibv_query_device(context, &device));
    STATUS("query_port", ibv_query_port(context, 1, &port));
    ERRNO("query_pkey", -1, ibv_query_pkey(context, 1, 0, &pkey));
    ERRNO("get_pkey_index", -1, ibv_get_pkey_index(context, 1, pkey));
    ERRNO("query_gid", -1, ibv_query_gid(context, 1, 0, &gid));
    NEGATIVE("query_gid_table", ibv_query_gid_table(context, entries, 64, 0));
    STATUS("query_rt_values_ex", ibv_query_rt_values_ex(context, &values));
    check(!fcntl(context->async_fd, F_SETFL, O_NONBLOCK));
    ERRNO("get_async_event", -1, ibv_get_async_event(context, &event));
}

static void create_objects(void)
{
    void *(*alloc_buf)(struct ibv_pd *, size_t, void **) = dlsym(RTLD_DEFAULT, "ibv_alloc_buf");
    void (*free_buf)(void *) = dlsym(RTLD_DEFAULT, "ibv_free_buf");
    struct ibv_srq_init_attr of_srq = {.attr = {.max_wr = DEPTH, .max_sge = 1}};
    struct ibv_qp_init_attr of_qp = {.qp_type = IBV_QPT_RC};
    void *buf;
    ERRNO("alloc_pd", NULL, pd = ibv_alloc_pd(context));
    ERRNO("alloc_buf", NULL, alloc_buf(pd, sizeof bytes, &buf));
    free_buf(buf);
    ERRNO("create_comp_channel", NULL, channel = ibv_create_comp_channel(context));
    ERRNO("create_cq", NULL, cq = ibv_create_cq(context, DEPTH, NULL, channel, 0));
    STATUS("resize_cq", ibv_resize_cq(cq, 2 * DEPTH));
    ERRNO("create_srq", NULL, srq = ibv_create_srq(pd, &of_srq));
    ERRNO("reg_mr", NULL, mr = ibv_reg_mr(pd, bytes, sizeof bytes, ACCESS));
    ERRNO("alloc_mw", NULL, window = ibv_alloc_mw(pd, IBV_MW_TYPE_1));
    of_qp.send_cq = of_qp.recv_cq = cq;
    of_qp.cap = (struct ibv_qp_cap){DEPTH, DEPTH, 1, 1, 0};
    ERRNO("create_qp", NULL, qp = ibv_create_qp(pd, &of_qp));
}

static void use_objects(void)
{
    struct ibv_srq_attr of_srq;
    struct ibv_qp_attr of_qp = {.qp_state = IBV_QPS_INIT, .port_num = 1};
    struct ibv_qp_init_attr init;
    struct ibv_recv_wr wr = {0}, *bad;
    struct ibv_cq *of_event;
    struct ibv_wc wc;
    void *program;
    uint32_t number;
    STATUS("modify_srq", ibv_modify_srq(srq, &of_srq, 0));
    STATUS("query_srq", ibv_query_srq(srq, &of_srq));
    STATUS("get_srq_num", ibv_get_srq_num(srq, &number));
    STATUS("post_srq_recv", ibv_post_srq_recv(srq, &wr, &bad));
    SHOW("rereg_mr",
         ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, ACCESS) ? errno : 0);
    // Each call must find the state of a new QP.
    STATUS("modify_qp",
           qp->state == IBV_QPS_RESET ? ibv_modify_qp(qp, &of_qp, STATE) : EISCONN);
    check(qp->state == IBV_QPS_INIT);
    STATUS("query_qp", ibv_query_qp(qp, &of_qp, IBV_QP_STATE, &init));
    check(of_qp.qp_state == IBV_QPS_INIT);
    STATUS("post_recv", ibv_post_recv(qp, &wr, &bad));
    NEGATIVE("poll_cq", ibv_poll_cq(cq, 1, &wc));
    STATUS("req_notify_cq", ibv_req_notify_cq(cq, 0));
    check(!fcntl(channel->fd, F_SETFL, O_NONBLOCK));
    ERRNO("get_cq_event", -1, ibv_get_cq_event(channel, &of_event, &program));
}

// Only the RoCE device has address handles.
static void use_address_handles(void)
{
    struct ibv_wc wc = {.wc_flags = IBV_WC_GRH};
    struct ibv_grh grh = {.version_tclass_flow = htonl(6u << 28)};
    struct ibv_ah_attr attr;
    struct ibv_ah *ah;
    union ibv_gid gid;
    check(!ibv_query_gid(context, 1, 0, &gid));
    grh.sgid = grh.dgid = gid;
    ERRNO("init_ah_from_wc", -1, ibv_init_ah_from_wc(context, 1, &wc, &grh, &attr));
    ERRNO("create_ah", NULL, ah = ibv_create_ah(pd, &attr));
    STATUS("destroy_ah", ibv_destroy_ah(ah));
}

static void destroy_objects(void)
{
    STATUS("destroy_qp", ibv_destroy_qp(qp));
    STATUS("dealloc_mw", ibv_dealloc_mw(window));
    STATUS("dereg_mr", ibv_dereg_mr(mr));
    STATUS("destroy_srq", ibv_destroy_srq(srq));
    STATUS("destroy_cq", ibv_destroy_cq(cq));
    STATUS("destroy_comp_channel", ibv_destroy_comp_channel(channel));
    STATUS("dealloc_pd", ibv_dealloc_pd(pd));
    STATUS("close_device", ibv_close_device(context));
}

static void listen_on_id(void)
{
    struct ibv_context **list;
    struct sockaddr_in address = loopback(0);
    uint8_t tos = 8;
    ERRNO("rdma_get_devices", NULL, list = rdma_get_devices(NULL));
    rdma_free_devices(list);
    ERRNO("rdma_create_event_channel", NULL, events = rdma_create_event_channel());
    ERRNO("rdma_create_id", -1, rdma_create_id(events, &listener, NULL, RDMA_PS_TCP));
    ERRNO("rdma_set_option", -1,
          rdma_set_option(listener, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &tos, sizeof tos));
    ERRNO("rdma_bind_addr", -1, rdma_bind_addr(listener, (struct sockaddr *)&address));
    ERRNO("rdma_listen", -1, rdma_listen(listener, 1));
}

// Moves a QP that was created without an ID to a state.
static void move(struct rdma_cm_id *id, struct ibv_qp *made, enum ibv_qp_state state)
{
    struct ibv_qp_attr attr = {.qp_state = state};
    int mask;
    check(!rdma_init_qp_attr(id, &attr, &mask) && !ibv_modify_qp(made, &attr, mask));
}

static struct ibv_qp_init_attr of_connection(void)
{
    struct ibv_qp_init_attr attr = {.qp_type = IBV_QPT_RC, .sq_sig_all = 1};
    attr.cap = (struct ibv_qp_cap){DEPTH, DEPTH, 1, 1, 0};
    return attr;
}

static void connect_ids(void)
{
    struct rdma_conn_param param = {.initiator_depth = 1, .responder_resources = 1};
    struct ibv_srq_init_attr of_srq = {.attr = {.max_wr = DEPTH, .max_sge = 1}};
    struct ibv_qp_init_attr init = of_connection();
    struct sockaddr_in address = loopback(rdma_get_src_port(listener));
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT};
    struct ibv_send_wr wr = {.opcode = IBV_WR_RDMA_WRITE}, *bad;
    struct rdma_cm_id *active, *passive;
    struct rdma_cm_event *event;
    int mask;
    check(!rdma_create_id(events, &active, NULL, RDMA_PS_TCP));
    ERRNO("rdma_resolve_addr", -1,
          rdma_resolve_addr(active, NULL, (struct sockaddr *)&address, 1000));
    ERRNO("rdma_get_cm_event", -1, rdma_get_cm_event(events, &event));
    check(event->event == RDMA_CM_EVENT_ADDR_RESOLVED);
    ERRNO("rdma_ack_cm_event", -1, rdma_ack_cm_event(event));
    ERRNO("rdma_resolve_route", -1, rdma_resolve_route(active, 1000));
    expect(events, RDMA_CM_EVENT_ROUTE_RESOLVED);
    ERRNO("rdma_create_srq", -1, rdma_create_srq(active, NULL, &of_srq));
    rdma_destroy_srq(active);

    struct ibv_cq *made_cq = ibv_create_cq(active->verbs, DEPTH, NULL, NULL, 0);
    check(made_cq != NULL);
    init.send_cq = init.recv_cq = made_cq;
    struct ibv_qp *made = ibv_create_qp(active->pd, &init);
    check(made != NULL);
    ERRNO("rdma_init_qp_attr", -1, rdma_init_qp_attr(active, &attr, &mask));
    move(active, made, IBV_QPS_INIT);
    param.qp_num = made->qp_num;
    ERRNO("rdma_connect", -1, rdma_connect(active, &param));
    event = next(events, RDMA_CM_EVENT_CONNECT_REQUEST);
    passive = event->id;
    // The request stays undecided.
    ERRNO("rdma_disconnect", -1, rdma_disconnect(passive));
    init = of_connection();
    ERRNO("rdma_create_qp", -1, rdma_create_qp(passive, NULL, &init));
    check(!rdma_ack_cm_event(event) && !rdma_accept(passive, NULL));
    expect(events, RDMA_CM_EVENT_CONNECT_RESPONSE);
    move(active, made, IBV_QPS_RTR);
    move(active, made, IBV_QPS_RTS);
    ERRNO("rdma_establish", -1, rdma_establish(active));
    expect(events, RDMA_CM_EVENT_ESTABLISHED);
    ERRNO("rdma_notify", -1, rdma_notify(active, IBV_EVENT_PATH_MIG));
    STATUS("post_send", ibv_post_send(made, &wr, &bad));

    check(!rdma_disconnect(active));
    expect(events, RDMA_CM_EVENT_DISCONNECTED);
    expect(events, RDMA_CM_EVENT_DISCONNECTED);
    check(!ibv_destroy_qp(made) && !ibv_destroy_cq(made_cq));
    rdma_destroy_qp(passive);
    rdma_destroy_ep(active);
    rdma_destroy_ep(passive);
}

static void destroy_listener(void)
{
    struct rdma_event_channel *other = rdma_create_event_channel();
    check(other != NULL);
    ERRNO("rdma_migrate_id", -1,
          listener->channel == events ? rdma_migrate_id(listener, other) : -1);
    check(listener->channel == other);
    ERRNO("rdma_destroy_id", -1, rdma_destroy_id(listener));
    rdma_destroy_event_channel(other);
}

static void use_endpoints(void)
{
    struct rdma_addrinfo hints = {.ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_TCP};
    struct ibv_qp_init_attr init = of_connection();
    struct rdma_conn_param param = {0};
    struct rdma_cm_id *endpoint, *active, *asked;
    struct rdma_addrinfo *found;
    ERRNO("rdma_getaddrinfo", -1, rdma_getaddrinfo("127.0.0.1", NULL, &hints, &found));
    ERRNO("rdma_create_ep", -1, rdma_create_ep(&endpoint, found, NULL, NULL));
    rdma_freeaddrinfo(found);
    check(!rdma_listen(endpoint, 1));
    check(!rdma_create_id(events, &active, NULL, RDMA_PS_TCP));
    resolve(active, rdma_get_src_port(endpoint));
    check(!rdma_create_qp(active, NULL, &init) && !rdma_connect(active, &param));
    ERRNO("rdma_get_request", -1, rdma_get_request(endpoint, &asked));
    ERRNO("rdma_reject", -1, rdma_reject(asked, NULL, 0));
    check(status_of(events, RDMA_CM_EVENT_REJECTED) != 0);
    rdma_destroy_ep(active);
    rdma_destroy_ep(asked);
    rdma_destroy_ep(endpoint);
}

int main(int argc, char **argv)
{
    check(argc == 2);
    read_reasons();
    open_device(argv[1]);
    query();
    create_objects();
    use_objects();
    if (context->device->transport_type == IBV_TRANSPORT_IB)
        use_address_handles();
    destroy_objects();
    listen_on_id();
    connect_ids();
    use_endpoints();
    destroy_listener();
    rdma_destroy_event_channel(events);
    return wrong != 0;
}
