// Checks semantics of libibverbs that the manual pages prescribe. The argument names a part. Prints
// "done" if the part passed.

#include "refusals.h"
#include <pthread.h>
#include <rdma/rdma_verbs.h>
#include <sched.h>

enum { DEPTH = 16, BYTES = 4096, RIGHTS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE };

static struct ibv_context *context;
static struct ibv_device_attr device;
static struct ibv_pd *pd;

static void opens(enum ibv_transport_type transport)
{
    int count;
    struct ibv_device **list = ibv_get_device_list(&count);
    MUST(list != NULL);
    for (int n = 0; n < count; n++)
        if (list[n]->transport_type == transport)
            context = ibv_open_device(list[n]);
    MUST(context != NULL && !ibv_query_device(context, &device));
    ibv_free_device_list(list);
    pd = ibv_alloc_pd(context);
    MUST(pd != NULL);
}

static void closes(void)
{
    CHECK(ibv_dealloc_pd(pd) == 0);
    CHECK(ibv_close_device(context) == 0);
}

static struct ibv_qp_init_attr wants(struct ibv_cq *cq, struct ibv_srq *srq)
{
    struct ibv_qp_init_attr wanted = {.send_cq = cq, .recv_cq = cq, .srq = srq};
    wanted.qp_type = IBV_QPT_RC;
    wanted.cap = (struct ibv_qp_cap){DEPTH, DEPTH, 1, 1, 0};
    return wanted;
}

// Moves a RoCE QP to RTS, with QP `peer` of this device as its peer.
static void to_rts(struct ibv_qp *qp, uint32_t peer)
{
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .port_num = 1};
    a.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    MUST(!ibv_modify_qp(qp, &a,
                        IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
    a.qp_state = IBV_QPS_RTR;
    a.path_mtu = IBV_MTU_1024;
    a.dest_qp_num = peer;
    a.max_dest_rd_atomic = 1;
    a.min_rnr_timer = 12;
    a.ah_attr = (struct ibv_ah_attr){.is_global = 1, .port_num = 1, .grh = {.hop_limit = 1}};
    MUST(!ibv_query_gid(context, 1, 0, &a.ah_attr.grh.dgid));
    MUST(!ibv_modify_qp(qp, &a,
                        IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                            IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
    a.qp_state = IBV_QPS_RTS;
    a.timeout = 14;
    a.retry_cnt = a.rnr_retry = 7;
    a.max_rd_atomic = 1;
    MUST(!ibv_modify_qp(qp, &a,
                        IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                            IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

static struct ibv_wc next(struct ibv_cq *cq)
{
    struct ibv_wc wc;
    int n;
    while ((n = ibv_poll_cq(cq, 1, &wc)) == 0)
        ;
    MUST(n == 1);
    return wc;
}

// Queries and changes of other attributes leave the state in the structure unchanged.
static void states(void)
{
    opens(IBV_TRANSPORT_IB);
    struct ibv_cq *cq = ibv_create_cq(context, DEPTH, NULL, NULL, 0);
    struct ibv_qp_init_attr wanted = wants(cq, NULL), init;
    struct ibv_qp *qp = ibv_create_qp(pd, &wanted);
    MUST(qp != NULL);
    to_rts(qp, qp->qp_num);
    struct ibv_qp_attr a;
    qp->state = IBV_QPS_SQE;
    CHECK(ibv_query_qp(qp, &a, IBV_QP_AV | IBV_QP_DEST_QPN, &init) == 0);
    CHECK(qp->state == IBV_QPS_SQE && a.dest_qp_num == qp->qp_num);
    a.min_rnr_timer = 13;
    CHECK(ibv_modify_qp(qp, &a, IBV_QP_MIN_RNR_TIMER) == 0 && qp->state == IBV_QPS_SQE);
    CHECK(ibv_query_qp(qp, &a, IBV_QP_STATE, &init) == 0 && qp->state == IBV_QPS_RTS);
    CHECK(ibv_destroy_qp(qp) == 0 && ibv_destroy_cq(cq) == 0);
    closes();
}

// With a shared receive queue, the receive capacities are ignored.
static void ignored(enum ibv_transport_type transport)
{
    opens(transport);
    struct ibv_cq *cq = ibv_create_cq(context, DEPTH, NULL, NULL, 0);
    struct ibv_srq_init_attr shared = {.attr = {.max_wr = 8, .max_sge = 1}};
    struct ibv_srq *srq = ibv_create_srq(pd, &shared);
    MUST(cq != NULL && srq != NULL);
    struct ibv_qp_init_attr wanted = wants(cq, srq);
    wanted.cap.max_recv_wr = device.max_qp_wr + 1;
    wanted.cap.max_recv_sge = device.max_sge + 1;
    struct ibv_qp *qp = ibv_create_qp(pd, &wanted);
    MUST(qp != NULL);
    CHECK(wanted.cap.max_recv_wr == 0 && wanted.cap.max_recv_sge == 0);
    CHECK(wanted.cap.max_send_wr >= DEPTH);
    CHECK(ibv_destroy_qp(qp) == 0 && ibv_destroy_srq(srq) == 0 && ibv_destroy_cq(cq) == 0);
    closes();
}

// A successful Send or Write completes with its length.
static void lengths(void)
{
    static char memory[2 * BYTES];
    opens(IBV_TRANSPORT_IB);
    struct ibv_cq *cq = ibv_create_cq(context, DEPTH, NULL, NULL, 0);
    struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof memory, RIGHTS | IBV_ACCESS_REMOTE_READ);
    struct ibv_qp_init_attr wanted = wants(cq, NULL);
    wanted.cap.max_inline_data = 64;
    struct ibv_qp *qp = ibv_create_qp(pd, &wanted);
    MUST(qp != NULL && mr != NULL);
    to_rts(qp, qp->qp_num);
    const struct {
        enum ibv_wr_opcode opcode;
        uint32_t length;
        int flags;
    } requests[] = {
        {IBV_WR_SEND, 24, 0},
        {IBV_WR_SEND, 25, IBV_SEND_INLINE},
        {IBV_WR_SEND, BYTES, 0},
        {IBV_WR_RDMA_WRITE, 26, 0},
        {IBV_WR_RDMA_WRITE, BYTES - 1, 0},
        {IBV_WR_RDMA_READ, 27, 0},
    };
    for (size_t n = 0; n < sizeof requests / sizeof *requests; n++) {
        struct ibv_sge to = {(uintptr_t)memory, BYTES, mr->lkey}, from = to;
        struct ibv_recv_wr receive = {.wr_id = 1, .sg_list = &to, .num_sge = 1}, *bad_receive;
        int sends = requests[n].opcode == IBV_WR_SEND;
        if (sends)
            MUST(!ibv_post_recv(qp, &receive, &bad_receive));
        from.addr += BYTES;
        from.length = requests[n].length;
        struct ibv_send_wr send = {.wr_id = 2, .sg_list = &from, .num_sge = 1}, *bad;
        send.opcode = requests[n].opcode;
        send.send_flags = IBV_SEND_SIGNALED | requests[n].flags;
        send.wr.rdma.remote_addr = (uintptr_t)memory;
        send.wr.rdma.rkey = mr->rkey;
        MUST(!ibv_post_send(qp, &send, &bad));
        for (int completions = sends ? 2 : 1; completions > 0; completions--) {
            struct ibv_wc wc = next(cq);
            MUST(wc.status == IBV_WC_SUCCESS);
            if (wc.byte_len != requests[n].length) {
                printf("request %zu: byte_len %u of wr_id %d\n", n, wc.byte_len, (int)wc.wr_id);
                wrong++;
            }
        }
    }
    CHECK(ibv_destroy_qp(qp) == 0 && ibv_dereg_mr(mr) == 0 && ibv_destroy_cq(cq) == 0);
    closes();
}

static void acknowledged(void)
{
    struct ibv_async_event event;
    MUST(!ibv_get_async_event(context, &event));
    ibv_ack_async_event(&event);
}

// The structures of the objects count acknowledgements.
static void counts(void)
{
    static char memory[64];
    opens(IBV_TRANSPORT_IB);
    struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
    struct ibv_cq *cq = ibv_create_cq(context, DEPTH, NULL, channel, 0), *found;
    struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof memory, RIGHTS);
    struct ibv_srq_init_attr shared = {.attr = {.max_wr = 8, .max_sge = 1}};
    struct ibv_srq *srq = ibv_create_srq(pd, &shared);
    MUST(cq != NULL && mr != NULL && srq != NULL);
    struct ibv_qp_init_attr wanted = wants(cq, srq);
    struct ibv_qp *qp = ibv_create_qp(pd, &wanted);
    MUST(qp != NULL);
    to_rts(qp, qp->qp_num);
    struct ibv_sge sge = {(uintptr_t)memory, 8, mr->lkey};
    struct ibv_recv_wr receive = {.sg_list = &sge, .num_sge = 1}, *bad_receive;
    struct ibv_srq_attr limit = {.srq_limit = 1};
    MUST(!ibv_post_srq_recv(srq, &receive, &bad_receive));
    MUST(!ibv_modify_srq(srq, &limit, IBV_SRQ_LIMIT));
    MUST(!ibv_req_notify_cq(cq, 0));
    struct ibv_send_wr send = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;
    MUST(!ibv_post_send(qp, &send, &bad));
    void *program;
    MUST(!ibv_get_cq_event(channel, &found, &program));
    CHECK(found == cq && cq->comp_events_completed == 0);
    ibv_ack_cq_events(cq, 1);
    CHECK(cq->comp_events_completed == 1);
    // Programs with their own counters may acknowledge more events than were delivered.
    ibv_ack_cq_events(cq, 4);
    CHECK(cq->comp_events_completed == 5);
    // The SRQ is below its limit.
    CHECK(srq->events_completed == 0);
    acknowledged();
    CHECK(srq->events_completed == 1);
    // The QP has consumed its last receive.
    struct ibv_qp_attr error = {.qp_state = IBV_QPS_ERR};
    MUST(!ibv_modify_qp(qp, &error, IBV_QP_STATE));
    CHECK(qp->events_completed == 0);
    acknowledged();
    CHECK(qp->events_completed == 1 && srq->events_completed == 1);
    CHECK(ibv_destroy_qp(qp) == 0 && ibv_destroy_srq(srq) == 0 && ibv_dereg_mr(mr) == 0);
    CHECK(ibv_destroy_cq(cq) == 0 && ibv_destroy_comp_channel(channel) == 0);
    closes();
}

// ibv_rereg_mr(3) has its own error codes.
static void reregistered(void)
{
    static char memory[BYTES];
    opens(IBV_TRANSPORT_IB);
    struct ibv_mr *mr = ibv_reg_mr(pd, memory, BYTES, IBV_ACCESS_LOCAL_WRITE);
    MUST(mr != NULL);
    const int access = IBV_REREG_MR_CHANGE_ACCESS, place = IBV_REREG_MR_CHANGE_TRANSLATION;
    const int input = IBV_REREG_MR_ERR_INPUT, command = IBV_REREG_MR_ERR_CMD;
    SETS(EINVAL, input, ibv_rereg_mr(mr, 1 << 7, NULL, NULL, 0, 0));
    SETS(EINVAL, input, ibv_rereg_mr(mr, place, NULL, NULL, BYTES, 0));
    SETS(EINVAL, input, ibv_rereg_mr(mr, place, NULL, memory, 0, 0));
    SETS(EINVAL, input, ibv_rereg_mr(mr, place, NULL, memory, BYTES, IBV_ACCESS_LOCAL_WRITE));
    SETS(EINVAL, input, ibv_rereg_mr(NULL, access, NULL, NULL, 0, 0));
    SETS(EINVAL, command, ibv_rereg_mr(mr, 0, NULL, NULL, 0, 0));
    SETS(EINVAL, command, ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, NULL, NULL, 0, 0));
    SETS(EINVAL, command, ibv_rereg_mr(mr, access, NULL, NULL, 0, IBV_ACCESS_REMOTE_WRITE));
    SETS(EFAULT, command, ibv_rereg_mr(mr, place, NULL, (void *)(uintptr_t)BYTES, BYTES, 0));
    CHECK(mr->addr == memory && mr->length == BYTES);
    FINE(ibv_rereg_mr(mr, place | access, NULL, memory + 8, 16, RIGHTS));
    CHECK(mr->addr == memory + 8 && mr->length == 16);
    FINE(ibv_dereg_mr(mr));
    closes();
}

// Objects up to the numbers and sizes that ibv_query_device(3) reports can be created.
static void maxima(enum ibv_transport_type transport)
{
    static char memory[8];
    opens(transport);
    struct ibv_cq *cq = ibv_create_cq(context, device.max_cqe, NULL, NULL, 0);
    MUST(cq != NULL && cq->cqe >= device.max_cqe);
    struct ibv_qp_init_attr wanted = wants(cq, NULL);
    wanted.cap = (struct ibv_qp_cap){device.max_qp_wr, device.max_qp_wr, device.max_sge,
                                     device.max_sge, 0};
    struct ibv_qp *qp = ibv_create_qp(pd, &wanted);
    MUST(qp != NULL && wanted.cap.max_send_wr >= (uint32_t)device.max_qp_wr);
    CHECK(wanted.cap.max_recv_wr >= (uint32_t)device.max_qp_wr);
    CHECK(wanted.cap.max_send_sge >= (uint32_t)device.max_sge);
    CHECK(wanted.cap.max_recv_sge >= (uint32_t)device.max_sge);
    CHECK(ibv_destroy_qp(qp) == 0 && ibv_destroy_cq(cq) == 0);
    struct ibv_srq_init_attr shared = {0};
    shared.attr.max_wr = device.max_srq_wr;
    shared.attr.max_sge = device.max_srq_sge;
    struct ibv_srq *srq = ibv_create_srq(pd, &shared);
    MUST(srq != NULL && shared.attr.max_wr >= (uint32_t)device.max_srq_wr);
    CHECK(shared.attr.max_sge >= (uint32_t)device.max_srq_sge && ibv_destroy_srq(srq) == 0);

    // The session's limits are small, and the device reports them.
    enum { MOST = 64 };
    void *made[MOST];
    MUST(device.max_pd < MOST && device.max_mr < MOST && device.max_cq < MOST);
    MUST(device.max_mw < MOST && device.max_srq < MOST && device.max_qp < MOST);
    for (int n = 1; n < device.max_pd; n++)
        MUST((made[n] = ibv_alloc_pd(context)) != NULL);
    NONE(ENOMEM, ibv_alloc_pd(context));
    for (int n = 1; n < device.max_pd; n++)
        CHECK(ibv_dealloc_pd(made[n]) == 0);
    for (int n = 0; n < device.max_mr; n++)
        MUST((made[n] = ibv_reg_mr(pd, memory, 8, IBV_ACCESS_LOCAL_WRITE)) != NULL);
    NONE(ENOMEM, ibv_reg_mr(pd, memory, 8, IBV_ACCESS_LOCAL_WRITE));
    for (int n = 0; n < device.max_mr; n++)
        CHECK(ibv_dereg_mr(made[n]) == 0);
    for (int n = 0; n < device.max_mw; n++)
        MUST((made[n] = ibv_alloc_mw(pd, IBV_MW_TYPE_2)) != NULL);
    NONE(ENOMEM, ibv_alloc_mw(pd, IBV_MW_TYPE_2));
    for (int n = 0; n < device.max_mw; n++)
        CHECK(ibv_dealloc_mw(made[n]) == 0);
    for (int n = 0; n < device.max_cq; n++)
        MUST((made[n] = ibv_create_cq(context, 1, NULL, NULL, 0)) != NULL);
    NONE(ENOMEM, ibv_create_cq(context, 1, NULL, NULL, 0));
    for (int n = 0; n < device.max_cq; n++)
        CHECK(ibv_destroy_cq(made[n]) == 0);
    shared.attr = (struct ibv_srq_attr){.max_wr = 1, .max_sge = 1};
    for (int n = 0; n < device.max_srq; n++)
        MUST((made[n] = ibv_create_srq(pd, &shared)) != NULL);
    NONE(ENOMEM, ibv_create_srq(pd, &shared));
    for (int n = 0; n < device.max_srq; n++)
        CHECK(ibv_destroy_srq(made[n]) == 0);
    cq = ibv_create_cq(context, 1, NULL, NULL, 0);
    wanted = wants(cq, NULL);
    for (int n = 0; n < device.max_qp; n++)
        MUST((made[n] = ibv_create_qp(pd, &wanted)) != NULL);
    NONE(ENOMEM, ibv_create_qp(pd, &wanted));
    for (int n = 0; n < device.max_qp; n++)
        CHECK(ibv_destroy_qp(made[n]) == 0);
    CHECK(ibv_destroy_cq(cq) == 0);
    closes();
}

// A QP of the iWARP device gets a peer by a connection, not by ibv_modify_qp().
static void iwarp_states(void)
{
    opens(IBV_TRANSPORT_IWARP);
    struct ibv_cq *cq = ibv_create_cq(context, DEPTH, NULL, NULL, 0);
    struct ibv_qp_init_attr wanted = wants(cq, NULL);
    struct ibv_qp *qp = ibv_create_qp(pd, &wanted);
    MUST(qp != NULL);
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .port_num = 1};
    FINE(ibv_modify_qp(qp, &a,
                       IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
    // Without a connection, receives wait and Sends are refused, because nothing would complete
    // them.
    struct ibv_send_wr send = {.opcode = IBV_WR_SEND}, *bad_send = NULL;
    struct ibv_recv_wr receive = {.wr_id = 1}, *bad_receive;
    FINE(ibv_post_recv(qp, &receive, &bad_receive));
    RETURNS(EINVAL, ibv_post_send(qp, &send, &bad_send));
    CHECK(bad_send == &send);
    a.qp_state = IBV_QPS_RTR;
    RETURNS(EINVAL, ibv_modify_qp(qp, &a, IBV_QP_STATE));
    a.dest_qp_num = qp->qp_num;
    RETURNS(EINVAL, ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_DEST_QPN));
    CHECK(qp->state == IBV_QPS_INIT);
    // rdma_init_qp_attr() returns the attributes that move a QP for the id's connection.
    struct rdma_cm_id *id;
    int mask;
    struct sockaddr_in there = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    MUST(!rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP));
    MUST(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&there, 1000));
    MUST(!rdma_init_qp_attr(id, &a, &mask));
    FINE(ibv_modify_qp(qp, &a, mask));
    // The attributes are valid for one QP, and for all its steps.
    struct ibv_qp *other = ibv_create_qp(pd, &wanted);
    MUST(other != NULL);
    RETURNS(EINVAL, ibv_modify_qp(other, &a, mask));
    a.qp_state = IBV_QPS_RTS;
    RETURNS(EINVAL, ibv_modify_qp(other, &a, mask));
    RETURNS(EINVAL, ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN));
    MUST(!rdma_init_qp_attr(id, &a, &mask));
    FINE(ibv_modify_qp(qp, &a, mask));
    CHECK(qp->state == IBV_QPS_RTS && ibv_destroy_qp(other) == 0);
    FINE(rdma_destroy_id(id));
    // In ERR, the waiting receive and the new Send are flushed.
    a.qp_state = IBV_QPS_ERR;
    FINE(ibv_modify_qp(qp, &a, IBV_QP_STATE));
    FINE(ibv_post_send(qp, &send, &bad_send));
    for (int n = 0; n < 2; n++)
        CHECK(next(cq).status == IBV_WC_WR_FLUSH_ERR);
    CHECK(ibv_destroy_qp(qp) == 0 && ibv_destroy_cq(cq) == 0);
    closes();
}

// Names are those of rdma-core, because scripts and test suites compare them.
static void named(void)
{
    const struct {
        const char *found, *name;
    } names[] = {
        {ibv_wc_status_str(IBV_WC_SUCCESS), "success"},
        {ibv_wc_status_str(IBV_WC_WR_FLUSH_ERR), "Work Request Flushed Error"},
        {ibv_wc_status_str(IBV_WC_RETRY_EXC_ERR), "transport retry counter exceeded"},
        {ibv_wc_status_str(IBV_WC_RNR_RETRY_EXC_ERR), "RNR retry counter exceeded"},
        {ibv_event_type_str(IBV_EVENT_QP_FATAL), "local work queue catastrophic error"},
        {ibv_event_type_str(IBV_EVENT_GID_CHANGE), "GID table change"},
        {ibv_port_state_str(IBV_PORT_NOP), "no state change (NOP)"},
        {ibv_node_type_str(IBV_NODE_SWITCH), "InfiniBand switch"},
        {ibv_node_type_str(IBV_NODE_UNKNOWN), "unknown"},
        {rdma_event_str(99), "UNKNOWN EVENT"},
    };
    for (size_t n = 0; n < sizeof names / sizeof *names; n++)
        if (strcmp(names[n].found, names[n].name)) {
            printf("\"%s\" instead of \"%s\"\n", names[n].found, names[n].name);
            wrong++;
        }
}

static struct ibv_qp_ex *ex;
static int inside;

static void *builds(void *nothing)
{
    for (int n = 0; n < 1000; n++) {
        ibv_wr_start(ex);
        CHECK(__atomic_fetch_add(&inside, 1, __ATOMIC_SEQ_CST) == 0);
        sched_yield();
        __atomic_fetch_sub(&inside, 1, __ATOMIC_SEQ_CST);
        ibv_wr_abort(ex);
    }
    return nothing;
}

static void writes(uint64_t wr_id, struct ibv_mr *mr)
{
    ex->wr_id = wr_id;
    ex->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_rdma_write(ex, mr->rkey, (uintptr_t)mr->addr);
}

// Requests built together are posted together or not at all, by one thread at a time.
static void built(void)
{
    static char memory[2048];
    opens(IBV_TRANSPORT_IB);
    struct ibv_cq *cq = ibv_create_cq(context, DEPTH, NULL, NULL, 0);
    struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof memory, RIGHTS);
    struct ibv_qp_init_attr wanted = wants(cq, NULL);
    struct ibv_qp_init_attr_ex with = {.send_cq = cq, .recv_cq = cq, .pd = pd};
    with.cap = wanted.cap;
    with.qp_type = IBV_QPT_RC;
    with.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    with.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_READ;
    struct ibv_qp *qp = ibv_create_qp_ex(context, &with);
    MUST(mr != NULL && qp != NULL);
    to_rts(qp, qp->qp_num);
    ex = ibv_qp_to_qp_ex(qp);
    struct ibv_sge several[] = {{(uintptr_t)memory, 8, mr->lkey}, {(uintptr_t)memory, 8, mr->lkey}};
    for (int n = 0; n < 3; n++) {
        ibv_wr_start(ex);
        writes(1, mr);
        ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)memory, 8);
        if (n == 2) {
            ibv_wr_rdma_read(ex, mr->rkey, (uintptr_t)memory);
            ibv_wr_set_inline_data(ex, memory, 8);
        } else {
            writes(2, mr);
            if (n == 0)
                ibv_wr_set_sge_list(ex, 2, several);
            else
                ibv_wr_set_inline_data(ex, memory, with.cap.max_inline_data + 1);
        }
        RETURNS(EINVAL, ibv_wr_complete(ex));
    }
    ibv_wr_start(ex);
    writes(3, mr);
    ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)memory, 8);
    FINE(ibv_wr_complete(ex));
    CHECK(next(cq).wr_id == 3);
    pthread_t threads[3];
    for (int n = 0; n < 3; n++)
        MUST(!pthread_create(&threads[n], NULL, builds, NULL));
    for (int n = 0; n < 3; n++)
        MUST(!pthread_join(threads[n], NULL));
    CHECK(ibv_destroy_qp(qp) == 0 && ibv_dereg_mr(mr) == 0 && ibv_destroy_cq(cq) == 0);
    closes();
}

// A CQ cannot become smaller than the number of its unpolled completions.
static void resized(void)
{
    opens(IBV_TRANSPORT_IB);
    struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
    struct ibv_cq *cq = ibv_create_cq(context, DEPTH - 1, NULL, channel, 0), *found;
    // As on rxe, mlx5 and mlx4, which do not round it up to a power of two.
    MUST(cq != NULL && cq->cqe == DEPTH - 1);
    struct ibv_qp_init_attr wanted = wants(cq, NULL);
    struct ibv_qp *qp = ibv_create_qp(pd, &wanted);
    MUST(qp != NULL);
    to_rts(qp, qp->qp_num);
    for (int n = 0; n < 3; n++) {
        struct ibv_send_wr wr = {.opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED}, *bad;
        void *program;
        MUST(!ibv_req_notify_cq(cq, 0) && !ibv_post_send(qp, &wr, &bad));
        MUST(!ibv_get_cq_event(channel, &found, &program));
    }
    ibv_ack_cq_events(cq, 3);
    int cqe = cq->cqe;
    RETURNS(EINVAL, ibv_resize_cq(cq, 2));
    CHECK(cq->cqe == cqe);
    FINE(ibv_resize_cq(cq, 3));
    next(cq);
    FINE(ibv_resize_cq(cq, 2));
    CHECK(cq->cqe == 2 && ibv_destroy_qp(qp) == 0 && ibv_destroy_cq(cq) == 0);
    CHECK(ibv_destroy_comp_channel(channel) == 0);
    closes();
}

// Operations that a QP type or CQ does not support are refused at its creation.
static void unserved(void)
{
    opens(IBV_TRANSPORT_IB);
    struct ibv_cq_init_attr_ex queue = {.cqe = DEPTH, .comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS};
    queue.flags = 1 << 7;
    NONE(EOPNOTSUPP, ibv_create_cq_ex(context, &queue));
    queue.flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
    struct ibv_cq_ex *extended = ibv_create_cq_ex(context, &queue);
    MUST(extended != NULL);
    struct ibv_cq *cq = ibv_cq_ex_to_cq(extended);
    struct ibv_qp_init_attr_ex with = {.send_cq = cq, .recv_cq = cq, .pd = pd};
    with.cap = (struct ibv_qp_cap){DEPTH, DEPTH, 1, 1, 0};
    with.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    with.qp_type = IBV_QPT_UD;
    with.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE;
    NONE(EOPNOTSUPP, ibv_create_qp_ex(context, &with));
    with.qp_type = IBV_QPT_UC;
    with.send_ops_flags = IBV_QP_EX_WITH_RDMA_READ;
    NONE(EOPNOTSUPP, ibv_create_qp_ex(context, &with));
    with.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_BIND_MW;
    struct ibv_qp *qp = ibv_create_qp_ex(context, &with);
    MUST(qp != NULL && ibv_destroy_qp(qp) == 0);
    CHECK(ibv_destroy_cq(cq) == 0);
    closes();
}

int main(int argc, char **argv)
{
    const char *part = argc > 1 ? argv[1] : "";
    read_reasons();
    if (!strcmp(part, "states"))
        states();
    else if (!strcmp(part, "ignored")) {
        ignored(IBV_TRANSPORT_IB);
        ignored(IBV_TRANSPORT_IWARP);
    } else if (!strcmp(part, "lengths"))
        lengths();
    else if (!strcmp(part, "counts"))
        counts();
    else if (!strcmp(part, "reregistered"))
        reregistered();
    else if (!strcmp(part, "maxima")) {
        maxima(IBV_TRANSPORT_IB);
        maxima(IBV_TRANSPORT_IWARP);
    } else if (!strcmp(part, "iWARP states"))
        iwarp_states();
    else if (!strcmp(part, "named"))
        named();
    else if (!strcmp(part, "built"))
        built();
    else if (!strcmp(part, "resized"))
        resized();
    else if (!strcmp(part, "unserved"))
        unserved();
    else
        MUST(!"the part is known");
    if (!wrong)
        puts("done");
    return wrong != 0;
}
