// Passes handles that were destroyed, are of another type, or never existed. Prints "done" if every
// call refused them, with ENOENT, or EINVAL for null, and with a reason.

#include "refusals.h"
#include <arpa/inet.h>
#include <rdma/rdma_verbs.h>

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static char memory[4096];

static struct ibv_qp *queue_pair(struct ibv_cq *completes)
{
    struct ibv_qp_init_attr wanted = {.send_cq = completes, .recv_cq = completes};
    wanted.qp_type = IBV_QPT_RC;
    wanted.cap = (struct ibv_qp_cap){2, 2, 1, 1, 0};
    return ibv_create_qp(pd, &wanted);
}

static void queue_pairs(void)
{
    struct ibv_qp_attr attributes = {.qp_state = IBV_QPS_ERR};
    struct ibv_qp_init_attr init;
    struct ibv_qp *qp = queue_pair(cq), *old = qp;
    MUST(qp != NULL);
    FINE(ibv_destroy_qp(qp));
    RETURNS(ENOENT, ibv_destroy_qp(old));
    // The address is not reused at once.
    qp = queue_pair(cq);
    MUST(qp != NULL && qp != old);
    RETURNS(ENOENT, ibv_destroy_qp(old));
    RETURNS(ENOENT, ibv_modify_qp(old, &attributes, IBV_QP_STATE));
    RETURNS(ENOENT, ibv_query_qp(old, &attributes, IBV_QP_STATE, &init));
    struct ibv_send_wr send = {.opcode = IBV_WR_SEND}, *bad_send = NULL;
    RETURNS(ENOENT, ibv_post_send(old, &send, &bad_send));
    CHECK(bad_send == &send);
    struct ibv_recv_wr receive = {.wr_id = 1}, *bad_receive = NULL;
    RETURNS(ENOENT, ibv_post_recv(old, &receive, &bad_receive));
    CHECK(bad_receive == &receive);
    RETURNS(EINVAL, ibv_modify_qp(NULL, &attributes, IBV_QP_STATE));
    RETURNS(EINVAL, ibv_modify_qp(qp, NULL, IBV_QP_STATE));
    RETURNS(ENOENT, ibv_destroy_qp((struct ibv_qp *)cq));
    RETURNS(ENOENT, ibv_destroy_qp((struct ibv_qp *)((char *)qp + 8)));
    RETURNS(ENOENT, ibv_destroy_qp((struct ibv_qp *)(uintptr_t)0xdead0));
    FINE(ibv_destroy_qp(qp));
}

static void queues(void)
{
    struct ibv_cq *old = ibv_create_cq(context, 4, NULL, NULL, 0);
    MUST(old != NULL);
    FINE(ibv_destroy_cq(old));
    RETURNS(ENOENT, ibv_destroy_cq(old));
    RETURNS(ENOENT, ibv_resize_cq(old, 8));
    RETURNS(ENOENT, ibv_req_notify_cq(old, 0));
    struct ibv_wc wc;
    RETURNS(-ENOENT, ibv_poll_cq(old, 1, &wc));
    NONE(ENOENT, queue_pair(old));
    NONE(EINVAL, queue_pair(NULL));
    struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
    MUST(channel != NULL);
    FINE(ibv_destroy_comp_channel(channel));
    RETURNS(ENOENT, ibv_destroy_comp_channel(channel));
    NONE(ENOENT, ibv_create_cq(context, 4, NULL, channel, 0));
    struct ibv_cq *found;
    void *program;
    MINUS(ENOENT, ibv_get_cq_event(channel, &found, &program));
    struct ibv_srq_init_attr shared = {.attr = {.max_wr = 2, .max_sge = 1}};
    struct ibv_srq *srq = ibv_create_srq(pd, &shared);
    MUST(srq != NULL);
    FINE(ibv_destroy_srq(srq));
    RETURNS(ENOENT, ibv_destroy_srq(srq));
    RETURNS(ENOENT, ibv_query_srq(srq, &shared.attr));
    RETURNS(ENOENT, ibv_modify_srq(srq, &shared.attr, IBV_SRQ_LIMIT));
    struct ibv_recv_wr receive = {.wr_id = 1}, *bad;
    RETURNS(ENOENT, ibv_post_srq_recv(srq, &receive, &bad));
}

static void regions(void)
{
    struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
    MUST(mr != NULL);
    FINE(ibv_dereg_mr(mr));
    RETURNS(ENOENT, ibv_dereg_mr(mr));
    SETS(ENOENT, IBV_REREG_MR_ERR_INPUT,
         ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, 0));
    struct ibv_mw *window = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
    MUST(window != NULL);
    FINE(ibv_dealloc_mw(window));
    RETURNS(ENOENT, ibv_dealloc_mw(window));
    struct ibv_pd *domain = ibv_alloc_pd(context);
    MUST(domain != NULL);
    FINE(ibv_dealloc_pd(domain));
    RETURNS(ENOENT, ibv_dealloc_pd(domain));
    NONE(ENOENT, ibv_reg_mr(domain, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE));
    NONE(ENOENT, ibv_alloc_mw(domain, IBV_MW_TYPE_1));
    struct ibv_srq_init_attr shared = {.attr = {.max_wr = 2, .max_sge = 1}};
    NONE(ENOENT, ibv_create_srq(domain, &shared));
    struct ibv_ah_attr address = {.port_num = 1, .is_global = 1};
    NONE(ENOENT, ibv_create_ah(domain, &address));
    union ibv_gid gid;
    FINE(ibv_query_gid(context, 1, 0, &gid));
    address.grh.dgid = gid;
    struct ibv_ah *ah = ibv_create_ah(pd, &address);
    MUST(ah != NULL);
    FINE(ibv_destroy_ah(ah));
    RETURNS(ENOENT, ibv_destroy_ah(ah));
}

static void ids(void)
{
    struct rdma_event_channel *channel = rdma_create_event_channel();
    struct rdma_cm_id *id;
    struct rdma_cm_event *event;
    MUST(channel != NULL && !rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(9)};
    inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
    FINE(rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 1000));
    FINE(rdma_get_cm_event(channel, &event));
    FINE(rdma_ack_cm_event(event));
    MINUS(ENOENT, rdma_ack_cm_event(event));
    FINE(rdma_destroy_id(id));
    MINUS(ENOENT, rdma_destroy_id(id));
    MINUS(ENOENT, rdma_bind_addr(id, (struct sockaddr *)&address));
    MINUS(ENOENT, rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 1000));
    MINUS(ENOENT, rdma_resolve_route(id, 1000));
    MINUS(ENOENT, rdma_listen(id, 1));
    MINUS(ENOENT, rdma_connect(id, NULL));
    MINUS(ENOENT, rdma_accept(id, NULL));
    MINUS(ENOENT, rdma_reject(id, NULL, 0));
    MINUS(ENOENT, rdma_disconnect(id));
    MINUS(ENOENT, rdma_create_qp(id, NULL, &(struct ibv_qp_init_attr){.qp_type = IBV_QPT_RC}));
    CHECK(rdma_get_src_port(id) == 0);
    MINUS(EINVAL, rdma_destroy_id(NULL));
    // These calls return no error.
    rdma_destroy_qp(id);
    rdma_destroy_srq(id);
    rdma_destroy_ep(id);
    rdma_destroy_event_channel(channel);
    rdma_destroy_event_channel(channel);
    MINUS(ENOENT, rdma_get_cm_event(channel, &event));
    MINUS(ENOENT, rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
    struct rdma_addrinfo hints = {.ai_port_space = RDMA_PS_TCP}, *found;
    FINE(rdma_getaddrinfo("127.0.0.1", "7", &hints, &found));
    rdma_freeaddrinfo(found);
    rdma_freeaddrinfo(found);
    struct ibv_context **contexts = rdma_get_devices(NULL);
    MUST(contexts != NULL);
    rdma_free_devices(contexts);
    rdma_free_devices(contexts);
}

int main(void)
{
    read_reasons();
    struct ibv_device **list = ibv_get_device_list(NULL), *device = list ? list[0] : NULL;
    context = device ? ibv_open_device(device) : NULL;
    pd = context ? ibv_alloc_pd(context) : NULL;
    cq = pd ? ibv_create_cq(context, 4, NULL, NULL, 0) : NULL;
    MUST(cq != NULL);
    ibv_free_device_list(list);
    ibv_free_device_list(list);
    // The context keeps its device alive.
    CHECK(ibv_get_device_name(device) != NULL);
    // Some programs make a device of their own to test their code.
    struct ibv_device own = {.name = "own0"};
    MUST(!strcmp(ibv_get_device_name(&own), "own0"));
    NONE(ENODEV, ibv_get_device_name((struct ibv_device *)(uintptr_t)0xdead00));
    NONE(ENODEV, ibv_open_device((struct ibv_device *)(uintptr_t)0xdead00));
    queue_pairs();
    queues();
    regions();
    ids();
    FINE(ibv_destroy_cq(cq));
    FINE(ibv_dealloc_pd(pd));
    FINE(ibv_close_device(context));
    RETURNS(ENOENT, ibv_close_device(context));
    NONE(ENOENT, ibv_alloc_pd(context));
    struct ibv_device_attr attributes;
    RETURNS(ENOENT, ibv_query_device(context, &attributes));
    if (!wrong)
        puts("done");
    return wrong != 0;
}
