// RC QPs of the RoCE device that a test connects by their numbers.

#include <infiniband/verbs.h>

enum {
    ALL = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
          IBV_ACCESS_REMOTE_ATOMIC,
};

// Time limits of a QP; see ibv_modify_qp(3).
struct retries {
    uint8_t timeout, retry_cnt, rnr_retry, min_rnr_timer;
};

// Opens the first RoCE device.
__attribute__((unused)) static struct ibv_context *open_roce(void)
{
    int count;
    struct ibv_context *opened = NULL;
    struct ibv_device **list = ibv_get_device_list(&count);
    MUST(list);
    for (int n = 0; n < count && !opened; n++)
        if (list[n]->transport_type == IBV_TRANSPORT_IB)
            opened = ibv_open_device(list[n]);
    ibv_free_device_list(list);
    MUST(opened);
    return opened;
}

// Creates an RC QP whose queues take `depth` requests and receives, and moves it to INIT. `srq` may
// be NULL.
static struct ibv_qp *create_rc_with(struct ibv_pd *pd, struct ibv_cq *cq, int depth,
                                     struct ibv_srq *srq)
{
    struct ibv_qp_init_attr a = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC};
    a.srq = srq;
    a.cap = (struct ibv_qp_cap){depth, depth, 1, 1, 64};
    struct ibv_qp *qp = ibv_create_qp(pd, &a);
    MUST(qp);
    struct ibv_qp_attr to = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = ALL};
    int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    MUST(!ibv_modify_qp(qp, &to, mask));
    return qp;
}

__attribute__((unused)) static struct ibv_qp *create_rc(struct ibv_pd *pd, struct ibv_cq *cq,
                                                        int depth)
{
    return create_rc_with(pd, cq, depth, NULL);
}

// Moves a QP from INIT to RTS, with QP `number` at `gid` as its peer.
static void connect_rc(struct ibv_qp *qp, union ibv_gid gid, uint32_t number, struct retries p)
{
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024};
    a.dest_qp_num = number;
    a.max_dest_rd_atomic = a.max_rd_atomic = 4;
    a.min_rnr_timer = p.min_rnr_timer;
    a.ah_attr = (struct ibv_ah_attr){.is_global = 1, .port_num = 1};
    a.ah_attr.grh = (struct ibv_global_route){.dgid = gid, .hop_limit = 64};
    int to_rtr = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                 IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    MUST(!ibv_modify_qp(qp, &a, to_rtr));
    a.qp_state = IBV_QPS_RTS;
    a.timeout = p.timeout;
    a.retry_cnt = p.retry_cnt;
    a.rnr_retry = p.rnr_retry;
    int to_rts = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                 IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
    MUST(!ibv_modify_qp(qp, &a, to_rts));
}
