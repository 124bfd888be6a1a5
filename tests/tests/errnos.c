// Calls libibverbs and librdmacm with arguments that they must refuse. Prints "done" if each call
// returned the expected error and, with RNIC_LOG=debug, logged its reason. Built with the headers
// of rdma-core, because it calls their inline functions.

#include "refusals.h"
#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <rdma/rdma_verbs.h>
#include <sys/un.h>

enum { PAGE = 4096, LOCAL = IBV_ACCESS_LOCAL_WRITE };

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static char memory[PAGE];

static struct ibv_qp_init_attr small(void)
{
    struct ibv_qp_init_attr wanted = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC};
    wanted.cap = (struct ibv_qp_cap){2, 2, 1, 1, 16};
    return wanted;
}

static struct ibv_qp *queue_pair(void)
{
    struct ibv_qp_init_attr wanted = small();
    struct ibv_qp *qp = ibv_create_qp(pd, &wanted);
    if (!qp) {
        perror("ibv_create_qp");
        exit(1);
    }
    return qp;
}

static void completion_queues(void)
{
    struct ibv_device_attr device;
    FINE(ibv_query_device(context, &device));
    NONE(EINVAL, ibv_create_cq(context, 0, NULL, NULL, 0));
    NONE(EINVAL, ibv_create_cq(context, -1, NULL, NULL, 0));
    NONE(EINVAL, ibv_create_cq(context, device.max_cqe + 1, NULL, NULL, 0));
    NONE(EINVAL, ibv_create_cq(context, 1, NULL, NULL, context->num_comp_vectors));
    struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
    struct ibv_cq *of_channel = ibv_create_cq(context, 1, NULL, channel, 0), *found;
    void *program;
    FINE(of_channel == NULL);
    RETURNS(EBUSY, ibv_destroy_comp_channel(channel));
    FINE(fcntl(channel->fd, F_SETFL, O_NONBLOCK));
    MINUS(EAGAIN, ibv_get_cq_event(channel, &found, &program));
    FINE(ibv_destroy_cq(of_channel));
    FINE(ibv_destroy_comp_channel(channel));
    RETURNS(EINVAL, ibv_resize_cq(cq, 0));
    RETURNS(EINVAL, ibv_resize_cq(cq, device.max_cqe + 1));
    struct ibv_qp *qp = queue_pair();
    RETURNS(EBUSY, ibv_destroy_cq(cq));
    FINE(ibv_destroy_qp(qp));
    struct ibv_async_event event;
    FINE(fcntl(context->async_fd, F_SETFL, O_NONBLOCK));
    MINUS(EAGAIN, ibv_get_async_event(context, &event));
}

static void regions(void)
{
    char *page = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NONE(EFAULT, ibv_reg_mr(pd, page, PAGE, LOCAL));
    struct ibv_mr *read_only = ibv_reg_mr(pd, page, PAGE, IBV_ACCESS_REMOTE_READ);
    FINE(read_only == NULL);
    FINE(ibv_dereg_mr(read_only));
    munmap(page, PAGE);
    NONE(EFAULT, ibv_reg_mr(pd, page, PAGE, 0));
    NONE(EINVAL, ibv_reg_mr(pd, memory, PAGE, IBV_ACCESS_REMOTE_WRITE));
    NONE(EINVAL, ibv_reg_mr(pd, memory, PAGE, IBV_ACCESS_REMOTE_ATOMIC));
    NONE(EINVAL, ibv_reg_mr(pd, memory + 1, SIZE_MAX, LOCAL));
    NONE(EINVAL, ibv_reg_mr(pd, NULL, SIZE_MAX, LOCAL | IBV_ACCESS_ON_DEMAND));
    NONE(EOPNOTSUPP, ibv_reg_dmabuf_mr(pd, 0, PAGE, 0, -1, LOCAL));
    RETURNS(EOPNOTSUPP, ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, NULL, 0));
    RETURNS(EBUSY, ibv_dealloc_pd(pd));
    struct ibv_mr *windowed = ibv_reg_mr(pd, memory, PAGE, LOCAL | IBV_ACCESS_MW_BIND);
    struct ibv_mw *window = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
    FINE(windowed == NULL || window == NULL);
    struct ibv_qp *qp = queue_pair();
    struct ibv_mw_bind bind = {.bind_info = {mr, (uintptr_t)memory, 1, IBV_ACCESS_REMOTE_READ}};
    // A window of type 2 is bound by a work request.
    HEADER_RETURNS(EINVAL, ibv_bind_mw(qp, window, &bind));
    FINE(ibv_destroy_qp(qp));
    FINE(ibv_dealloc_mw(window));
    FINE(ibv_dereg_mr(windowed));
}

static void queue_pairs(void)
{
    struct ibv_device_attr device;
    FINE(ibv_query_device(context, &device));
    struct ibv_qp_init_attr wanted = small();
    wanted.cap.max_send_wr = device.max_qp_wr + 1;
    NONE(EINVAL, ibv_create_qp(pd, &wanted));
    wanted = small();
    wanted.cap.max_recv_sge = device.max_sge + 1;
    NONE(EINVAL, ibv_create_qp(pd, &wanted));
    wanted = small();
    wanted.cap.max_inline_data = 1 << 30;
    NONE(EINVAL, ibv_create_qp(pd, &wanted));
    wanted = small();
    wanted.send_cq = NULL;
    NONE(EINVAL, ibv_create_qp(pd, &wanted));
    wanted = small();
    wanted.qp_type = IBV_QPT_UD;
    NONE(EOPNOTSUPP, ibv_create_qp(pd, &wanted));
    wanted.qp_type = IBV_QPT_RAW_PACKET;
    NONE(EOPNOTSUPP, ibv_create_qp(pd, &wanted));
    wanted.qp_type = IBV_QPT_XRC_SEND;
    NONE(EOPNOTSUPP, ibv_create_qp(pd, &wanted));
    // A type that no device has.
    wanted.qp_type = 77;
    NONE(EINVAL, ibv_create_qp(pd, &wanted));

    struct ibv_qp *qp = queue_pair();
    struct ibv_qp_attr attributes = {.qp_state = IBV_QPS_RTS};
    RETURNS(EINVAL, ibv_modify_qp(qp, &attributes, IBV_QP_STATE));
    attributes.qp_state = 99;
    RETURNS(EINVAL, ibv_modify_qp(qp, &attributes, IBV_QP_STATE));
    attributes.qp_state = IBV_QPS_INIT;
    attributes.port_num = 2;
    RETURNS(EINVAL, ibv_modify_qp(qp, &attributes, IBV_QP_STATE | IBV_QP_PORT));

    struct ibv_qp_init_attr made;
    FINE(ibv_query_qp(qp, &attributes, IBV_QP_CAP, &made));
    struct ibv_sge sge[64] = {{(uintptr_t)memory, 1, mr->lkey}};
    struct ibv_recv_wr receive = {.sg_list = sge, .num_sge = made.cap.max_recv_sge + 1};
    struct ibv_recv_wr *bad_receive = NULL;
    RETURNS(EINVAL, ibv_post_recv(qp, &receive, &bad_receive));
    FINE(bad_receive != &receive);
    receive.num_sge = 1;
    struct ibv_recv_wr chain[3] = {receive, receive, receive};
    chain[0].next = &chain[1];
    chain[1].next = &chain[2];
    RETURNS(ENOMEM, ibv_post_recv(qp, chain, &bad_receive));
    FINE(bad_receive != &chain[2]);

    // Without a connection, send requests are refused. In ERR, all valid requests are accepted.
    struct ibv_send_wr send = {.sg_list = sge, .opcode = IBV_WR_SEND, .num_sge = 1}, *bad = NULL;
    RETURNS(EINVAL, ibv_post_send(qp, &send, &bad));
    FINE(bad != &send);
    attributes.qp_state = IBV_QPS_ERR;
    FINE(ibv_modify_qp(qp, &attributes, IBV_QP_STATE));
    send.num_sge = made.cap.max_send_sge + 1;
    RETURNS(EINVAL, ibv_post_send(qp, &send, &bad));
    FINE(bad != &send);
    send.num_sge = 1;
    sge[0].length = made.cap.max_inline_data + 1;
    send.send_flags = IBV_SEND_INLINE;
    RETURNS(EINVAL, ibv_post_send(qp, &send, &bad));
    sge[0].length = 1;
    send.send_flags = 0;
    send.opcode = 77;
    RETURNS(EINVAL, ibv_post_send(qp, &send, &bad));
    send.opcode = IBV_WR_SEND;
    struct ibv_send_wr sends[3] = {send, send, send};
    sends[0].next = &sends[1];
    sends[1].next = &sends[2];
    sends[1].opcode = IBV_WR_TSO;
    RETURNS(EINVAL, ibv_post_send(qp, sends, &bad));
    FINE(bad != &sends[1]);
    FINE(ibv_destroy_qp(qp));

    struct ibv_srq_init_attr shared = {.attr = {.max_wr = device.max_srq_wr + 1, .max_sge = 1}};
    NONE(EINVAL, ibv_create_srq(pd, &shared));
    shared.attr.max_wr = 2;
    struct ibv_srq *srq = ibv_create_srq(pd, &shared);
    FINE(srq == NULL);
    wanted = small();
    wanted.srq = srq;
    qp = ibv_create_qp(pd, &wanted);
    FINE(qp == NULL);
    RETURNS(EBUSY, ibv_destroy_srq(srq));
    RETURNS(EINVAL, ibv_post_recv(qp, &receive, &bad_receive));
    RETURNS(ENOMEM, ibv_post_srq_recv(srq, chain, &bad_receive));
    FINE(bad_receive != &chain[2]);
    struct ibv_srq_attr limit = {.srq_limit = 3};
    RETURNS(EINVAL, ibv_modify_srq(srq, &limit, IBV_SRQ_LIMIT));
    FINE(ibv_destroy_qp(qp));
    FINE(ibv_destroy_srq(srq));
}

static void ports(void)
{
    struct ibv_port_attr port;
    union ibv_gid gid;
    uint16_t key;
    RETURNS(EINVAL, ibv_query_port(context, 2, &port));
    FINE(ibv_query_port(context, 1, &port));
    MINUS(EINVAL, ibv_query_gid(context, 2, 0, &gid));
    MINUS(EINVAL, ibv_query_gid(context, 1, port.gid_tbl_len, &gid));
    MINUS(EINVAL, ibv_query_pkey(context, 1, port.pkey_tbl_len, &key));
    struct ibv_ah_attr address = {.port_num = 1};
    NONE(EOPNOTSUPP, ibv_create_ah(pd, &address));
}

static void ids(void)
{
    struct rdma_event_channel *channel = rdma_create_event_channel();
    struct rdma_cm_id *id, *other;
    struct rdma_cm_event *event;
    FINE(fcntl(channel->fd, F_SETFL, O_NONBLOCK));
    MINUS(EAGAIN, rdma_get_cm_event(channel, &event));
    MINUS(EINVAL, rdma_create_id(channel, &id, NULL, 0x999));
    MINUS(EPROTONOSUPPORT, rdma_create_id(channel, &id, NULL, RDMA_PS_IPOIB));
    FINE(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
    FINE(rdma_create_id(channel, &other, NULL, RDMA_PS_TCP));

    struct rdma_conn_param parameters = {0};
    MINUS(EINVAL, rdma_notify(id, IBV_EVENT_COMM_EST));
    MINUS(EINVAL, rdma_connect(id, &parameters));
    MINUS(EINVAL, rdma_accept(id, &parameters));
    MINUS(EINVAL, rdma_reject(id, NULL, 0));
    MINUS(EINVAL, rdma_disconnect(id));
    MINUS(EINVAL, rdma_resolve_route(id, 1000));
    MINUS(EINVAL, rdma_get_request(id, &other));
    MINUS(EINVAL, rdma_get_cm_event(channel, NULL));
    struct sockaddr_un local = {.sun_family = AF_UNIX};
    MINUS(EINVAL, rdma_bind_addr(id, (struct sockaddr *)&local));
    MINUS(EINVAL, rdma_resolve_addr(id, NULL, (struct sockaddr *)&local, 1000));
    struct sockaddr_in address = {.sin_family = AF_INET};
    MINUS(EINVAL, rdma_resolve_addr(id, (struct sockaddr *)&local, (struct sockaddr *)&address, 1));
    // The id has no device yet.
    struct ibv_qp_init_attr wanted = small();
    struct ibv_srq_init_attr shared = {.attr = {.max_wr = 2, .max_sge = 1}};
    struct ibv_qp_attr attributes = {.qp_state = IBV_QPS_INIT};
    int mask;
    MINUS(EINVAL, rdma_create_qp(id, pd, &wanted));
    MINUS(EINVAL, rdma_create_srq(id, NULL, &shared));
    MINUS(EINVAL, rdma_init_qp_attr(id, &attributes, &mask));
    // An address of TEST-NET-1, which no host has.
    inet_pton(AF_INET, "192.0.2.1", &address.sin_addr);
    MINUS(EADDRNOTAVAIL, rdma_bind_addr(id, (struct sockaddr *)&address));
    // bind(2) accepts these, but they are not host addresses.
    const char *groups[] = {"224.0.0.1", "255.255.255.255", "127.255.255.255"};
    for (int n = 0; n < 3; n++) {
        inet_pton(AF_INET, groups[n], &address.sin_addr);
        MINUS(EADDRNOTAVAIL, rdma_bind_addr(id, (struct sockaddr *)&address));
    }
    inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
    FINE(rdma_bind_addr(id, (struct sockaddr *)&address));
    MINUS(EINVAL, rdma_bind_addr(id, (struct sockaddr *)&address));
    FINE(rdma_listen(id, 1));
    address.sin_port = rdma_get_src_port(id);
    MINUS(EADDRINUSE, rdma_bind_addr(other, (struct sockaddr *)&address));
    MINUS(EINVAL, rdma_connect(id, &parameters));
    int value = 1;
    MINUS(ENOSYS, rdma_set_option(id, 77, 0, &value, sizeof value));
    MINUS(ENOSYS, rdma_set_option(id, RDMA_OPTION_ID, 77, &value, sizeof value));
    MINUS(EINVAL, rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &value, 77));
    MINUS(EINVAL, rdma_set_option(id, RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, &value, sizeof value));
    // Datagrams are not acknowledged, so their IDs have no ACK timeout.
    struct rdma_cm_id *of_datagrams;
    MUST(!rdma_create_id(channel, &of_datagrams, NULL, RDMA_PS_UDP));
    MINUS(EINVAL, rdma_set_option(of_datagrams, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &value, 1));
    FINE(rdma_destroy_id(of_datagrams));
    MINUS(EFAULT, rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, NULL, sizeof value));
    // The id already listens.
    MINUS(EINVAL, rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, &value, sizeof value));
    struct rdma_addrinfo hints = {.ai_port_space = RDMA_PS_TCP}, *found;
    FINE(rdma_getaddrinfo("127.0.0.1", "7", &hints, &found));
    rdma_freeaddrinfo(found);
    // Without a node and a service, the call succeeds without addresses.
    hints.ai_family = AF_INET;
    FINE(rdma_getaddrinfo(NULL, NULL, &hints, &found));
    CHECK(found->ai_family == AF_INET && !found->ai_src_addr && !found->ai_dst_addr);
    rdma_freeaddrinfo(found);
    hints.ai_qp_type = IBV_QPT_UD;
    CHECK(rdma_getaddrinfo("127.0.0.1", "7", &hints, &found) == EAI_SOCKTYPE);
    FINE(rdma_resolve_addr(other, NULL, (struct sockaddr *)&address, 1000));
    FINE(rdma_get_cm_event(channel, &event));
    FINE(rdma_ack_cm_event(event));
    MINUS(EINVAL, rdma_create_qp(other, pd, NULL));
    wanted.qp_type = IBV_QPT_UD;
    MINUS(EOPNOTSUPP, rdma_create_qp(other, NULL, &wanted));
    MINUS(EINVAL, rdma_notify(other, IBV_EVENT_COMM_EST));
    struct ibv_srq_init_attr_ex untyped = {.attr = {.max_wr = 2, .max_sge = 1}};
    MINUS(EINVAL, rdma_create_srq_ex(other, &untyped));
    FINE(rdma_create_srq(other, NULL, &shared));
    MINUS(EINVAL, rdma_create_srq(other, NULL, &shared));
    rdma_destroy_srq(other);
    FINE(rdma_destroy_id(id));
    FINE(rdma_destroy_id(other));
    MUST(!rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP));
    MINUS(EINVAL, rdma_migrate_id(id, NULL));
    FINE(rdma_destroy_id(id));
    rdma_destroy_event_channel(channel);
}

// Calls for features that the device lacks.
static void absent(void)
{
    struct ibv_alloc_dm_attr memory_of_device = {.length = 64};
    NONE(EOPNOTSUPP, ibv_alloc_dm(context, &memory_of_device));
    struct ibv_xrcd_init_attr domain = {.comp_mask = 3, .fd = -1, .oflags = O_CREAT};
    NONE(EOPNOTSUPP, ibv_open_xrcd(context, &domain));
    NONE(EOPNOTSUPP, ibv_alloc_null_mr(pd));
    struct ibv_td_init_attr thread = {0};
    NONE(EOPNOTSUPP, ibv_alloc_td(context, &thread));
    struct ibv_parent_domain_init_attr parent = {.pd = pd};
    NONE(EOPNOTSUPP, ibv_alloc_parent_domain(context, &parent));
    struct ibv_wq_init_attr queue = {.pd = pd, .cq = cq, .max_wr = 1, .max_sge = 1};
    NONE(EOPNOTSUPP, ibv_create_wq(context, &queue));
    struct ibv_counters_init_attr counters = {0};
    NONE(EOPNOTSUPP, ibv_create_counters(context, &counters));
    struct ibv_modify_cq_attr moderated = {0};
    RETURNS(EOPNOTSUPP, ibv_modify_cq(cq, &moderated));
    struct ibv_qp *qp = queue_pair();
    struct ibv_flow_attr flow = {0};
    NONE(EOPNOTSUPP, ibv_create_flow(qp, &flow));
    struct ibv_qp_rate_limit_attr rate = {.rate_limit = 1};
    RETURNS(EOPNOTSUPP, ibv_modify_qp_rate_limit(qp, &rate));
    union ibv_gid gid = {0};
    RETURNS(EOPNOTSUPP, ibv_attach_mcast(qp, &gid, 0));
    FINE(ibv_destroy_qp(qp));
}

int main(void)
{
    read_reasons();
    struct ibv_device **list = ibv_get_device_list(NULL);
    context = list ? ibv_open_device(list[0]) : NULL;
    pd = context ? ibv_alloc_pd(context) : NULL;
    cq = pd ? ibv_create_cq(context, 4, NULL, NULL, 0) : NULL;
    mr = cq ? ibv_reg_mr(pd, memory, PAGE, LOCAL) : NULL;
    if (!mr) {
        perror("cannot create the device and its objects");
        return 1;
    }
    completion_queues();
    regions();
    queue_pairs();
    ports();
    ids();
    absent();
    FINE(ibv_dereg_mr(mr));
    FINE(ibv_destroy_cq(cq));
    FINE(ibv_dealloc_pd(pd));
    FINE(ibv_close_device(context));
    if (!wrong)
        puts("done");
    return wrong != 0;
}
