// Checks the semantics in the manual pages and in chapters 10 and 11 of the IBTA specification,
// with two ends in one process. The command line names the part to run, which prints "done" on
// success.

#include "refusals.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_verbs.h>
#include <time.h>

enum {
    PLACE = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
    PEER = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
           IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
    SENDS = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
            IBV_QP_MAX_QP_RD_ATOMIC,
    ALL = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
          IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND,
    UC_PEER = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN,
    UD_PLACE = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY,
    QKEY = 0x1234,
    DEPTH = 64,
    LENGTH = 4096,
    DEADLINE = 120, // seconds, for events that should come at once
};

struct end {
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_mr *mr;
    char *bytes;
};

static int qp_type = IBV_QPT_RC;
static struct ibv_context *context;
static struct ibv_pd *pd;
static union ibv_gid gid;

static void open_device(int roce)
{
    int count;
    struct ibv_device **list = ibv_get_device_list(&count);
    MUST(list && count == 2);
    for (int n = 0; n < count && !context; n++)
        if ((list[n]->transport_type == IBV_TRANSPORT_IB) == roce)
            context = ibv_open_device(list[n]);
    ibv_free_device_list(list);
    MUST(context && (pd = ibv_alloc_pd(context)) && !ibv_query_gid(context, 1, 0, &gid));
}

static struct ibv_qp_init_attr wanted(struct end *e)
{
    struct ibv_qp_init_attr a = {.send_cq = e->cq, .recv_cq = e->cq, .qp_type = qp_type};
    a.cap = (struct ibv_qp_cap){DEPTH, DEPTH, 2, 2, 64};
    return a;
}

static void make(struct end *e)
{
    MUST((e->channel = ibv_create_comp_channel(context)) != NULL);
    MUST((e->cq = ibv_create_cq(context, 4 * DEPTH, NULL, e->channel, 0)) != NULL);
    struct ibv_qp_init_attr a = wanted(e);
    MUST((e->qp = ibv_create_qp(pd, &a)) != NULL);
    MUST((e->bytes = calloc(1, LENGTH)) != NULL);
    MUST((e->mr = ibv_reg_mr(pd, e->bytes, LENGTH, ALL)) != NULL);
}

// Creates a QP for the ibv_wr_* calls.
static struct ibv_qp *extended(struct end *e, int type, uint64_t operations)
{
    struct ibv_qp_init_attr_ex a = {.send_cq = e->cq, .recv_cq = e->cq, .qp_type = type, .pd = pd};
    a.cap = (struct ibv_qp_cap){DEPTH, DEPTH, 2, 2, 64};
    a.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    a.send_ops_flags = operations;
    return ibv_create_qp_ex(context, &a);
}

static int moved(struct end *e, int state, int mask, struct end *to)
{
    struct ibv_qp_attr a = {.qp_state = state, .port_num = 1, .path_mtu = IBV_MTU_1024};
    a.qp_access_flags = ALL & ~IBV_ACCESS_MW_BIND;
    a.dest_qp_num = to ? to->qp->qp_num : 0;
    a.qkey = QKEY;
    a.max_dest_rd_atomic = a.max_rd_atomic = 4;
    a.min_rnr_timer = 12;
    a.timeout = 20;
    a.retry_cnt = a.rnr_retry = 7;
    a.ah_attr = (struct ibv_ah_attr){.is_global = 1, .port_num = 1};
    a.ah_attr.grh = (struct ibv_global_route){.dgid = gid, .hop_limit = 64};
    return ibv_modify_qp(e->qp, &a, IBV_QP_STATE | mask);
}

static void to_init(struct end *e)
{
    MUST(moved(e, IBV_QPS_INIT, PLACE, NULL) == 0);
}

static void wire(struct end *e, struct end *to)
{
    to_init(e);
    MUST(moved(e, IBV_QPS_RTR, PEER, to) == 0);
    MUST(moved(e, IBV_QPS_RTS, SENDS, to) == 0);
}

static void unmake(struct end *e)
{
    MUST(ibv_destroy_qp(e->qp) == 0 && ibv_dereg_mr(e->mr) == 0 && ibv_destroy_cq(e->cq) == 0);
    MUST(ibv_destroy_comp_channel(e->channel) == 0);
    free(e->bytes);
}

static void pair(struct end *a, struct end *b)
{
    make(a);
    make(b);
    wire(a, b);
    wire(b, a);
}

static int readable(int fd, int seconds)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};
    return poll(&p, 1, 1000 * seconds) == 1;
}

static struct ibv_wc next(struct end *e)
{
    struct ibv_wc wc;
    time_t until = time(NULL) + DEADLINE;
    int n;
    while ((n = ibv_poll_cq(e->cq, 1, &wc)) == 0)
        MUST(time(NULL) <= until);
    MUST(n == 1);
    return wc;
}

static void completes(struct end *e, uint64_t wr_id, int status)
{
    struct ibv_wc wc = next(e);
    if (wc.wr_id != wr_id || (int)wc.status != status)
        printf("%lu: %s, not %lu: %s\n", wc.wr_id, ibv_wc_status_str(wc.status), wr_id,
               ibv_wc_status_str(status));
    MUST(wc.wr_id == wr_id && (int)wc.status == status);
}

static int receive(struct end *e, uint64_t wr_id, size_t length)
{
    struct ibv_sge sge = {(uintptr_t)e->bytes, length, e->mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = wr_id, .sg_list = &sge, .num_sge = length > 0}, *bad;
    return ibv_post_recv(e->qp, &wr, &bad);
}

static struct ibv_send_wr request(int opcode, struct ibv_sge *sge, struct end *to)
{
    struct ibv_send_wr wr = {.wr_id = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED};
    wr.sg_list = sge;
    wr.num_sge = 1;
    wr.wr.rdma.remote_addr = (uintptr_t)to->bytes;
    wr.wr.rdma.rkey = to->mr->rkey;
    return wr;
}

static void post(struct end *e, struct ibv_send_wr *wr)
{
    struct ibv_send_wr *bad;
    MUST(ibv_post_send(e->qp, wr, &bad) == 0);
}

// A zero-length region, and zero-length requests with any keys (section 9.7.4.1.5).
static void zero_bytes(void)
{
    struct end a, b;
    pair(&a, &b);
    struct ibv_mr *none = ibv_reg_mr(pd, a.bytes + 1, 0, ALL);
    MUST(none && none->length == 0 && none->addr == a.bytes + 1);
    uint32_t keys[] = {none->lkey, a.mr->lkey, 0, 0x12345678};
    int opcodes[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_SEND};
    for (int key = 0; key < 4; key++)
        for (int op = 0; op < 3; op++) {
            struct ibv_sge sge = {(uintptr_t)a.bytes + 1, 0, keys[key]};
            struct ibv_send_wr wr = request(opcodes[op], &sge, &b);
            wr.wr.rdma.rkey = keys[(key + 1) % 4];
            if (opcodes[op] == IBV_WR_SEND)
                MUST(receive(&b, 2, 0) == 0);
            post(&a, &wr);
            completes(&a, 1, IBV_WC_SUCCESS);
            if (opcodes[op] == IBV_WR_SEND)
                completes(&b, 2, IBV_WC_SUCCESS);
        }
    // The region covers no byte.
    struct ibv_sge sge = {(uintptr_t)a.bytes + 1, 1, none->lkey};
    struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, &sge, &b);
    post(&a, &wr);
    completes(&a, 1, IBV_WC_LOC_PROT_ERR);
    MUST(ibv_dereg_mr(none) == 0);
    unmake(&a);
    unmake(&b);
}

// A bind of a type 2 window takes only the low 8 bits of the key in the request.
static void bind_window(void)
{
    struct end a, b;
    pair(&a, &b);
    struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
    MUST(mw);
    uint32_t key = (mw->rkey & ~0xffu) | 0x5a;
    struct ibv_send_wr wr = {.wr_id = 7, .opcode = IBV_WR_BIND_MW}, *bad;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.bind_mw.mw = mw;
    wr.bind_mw.rkey = (~key & ~0xffu) | 0x5a;
    wr.bind_mw.bind_info = (struct ibv_mw_bind_info){
        b.mr, (uintptr_t)b.bytes, 64, IBV_ACCESS_REMOTE_WRITE};
    // A bind that is not posted, because the queue is full or the program aborts the batch, does
    // not change the key of the window.
    struct ibv_sge eight = {(uintptr_t)b.bytes, 8, b.mr->lkey};
    struct ibv_send_wr full[DEPTH], refused = wr;
    for (int n = 0; n < DEPTH; n++) {
        full[n] = request(IBV_WR_RDMA_WRITE, &eight, &a);
        full[n].wr_id = 100 + n;
        full[n].send_flags = IBV_SEND_SIGNALED;
        full[n].next = n + 1 < DEPTH ? &full[n + 1] : &refused;
    }
    refused.bind_mw.rkey = key ^ 0xff;
    MUST(ibv_post_send(b.qp, full, &bad) == ENOMEM && bad == &refused);
    for (int n = 0; n < DEPTH; n++)
        completes(&b, 100 + n, IBV_WC_SUCCESS);
    struct ibv_qp *builds = extended(&b, IBV_QPT_RC, IBV_QP_EX_WITH_BIND_MW);
    MUST(builds != NULL);
    struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(builds);
    ibv_wr_start(ex);
    ibv_wr_bind_mw(ex, mw, key ^ 0xff, &wr.bind_mw.bind_info);
    ibv_wr_abort(ex);
    MUST(ibv_destroy_qp(builds) == 0);
    MUST(ibv_post_send(b.qp, &wr, &bad) == 0);
    completes(&b, 7, IBV_WC_SUCCESS);
    strcpy(a.bytes, "by way of a window");
    struct ibv_sge sge = {(uintptr_t)a.bytes, 32, a.mr->lkey};
    wr = request(IBV_WR_RDMA_WRITE, &sge, &b);
    wr.wr.rdma.rkey = key;
    post(&a, &wr);
    completes(&a, 1, IBV_WC_SUCCESS);
    MUST(!strcmp(b.bytes, a.bytes));
    MUST(ibv_dealloc_mw(mw) == 0);
    unmake(&a);
    unmake(&b);
}

static int bound(struct end *e, struct ibv_mw *mw, struct ibv_mr *mr, int access)
{
    struct ibv_send_wr wr = {.wr_id = 7, .opcode = IBV_WR_BIND_MW}, *bad;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.bind_mw.mw = mw;
    wr.bind_mw.rkey = (mw->rkey & ~0xffu) | ((mw->rkey + 1) & 0xff);
    wr.bind_mw.bind_info = (struct ibv_mw_bind_info){mr, (uintptr_t)e->bytes, 64, access};
    return ibv_post_send(e->qp, &wr, &bad);
}

// Neither a failed bind nor a flushed one changes the key of the window: another QP can then bind
// the window with the key that the program holds.
static void bind_again(void)
{
    for (int type = IBV_MW_TYPE_1; type <= IBV_MW_TYPE_2; type++) {
        struct end a, b, c, d;
        pair(&a, &b);
        pair(&c, &d);
        struct ibv_mr *not_bindable = ibv_reg_mr(pd, a.bytes, LENGTH, IBV_ACCESS_LOCAL_WRITE);
        struct ibv_mw *mw = ibv_alloc_mw(pd, type);
        MUST(not_bindable && mw);
        for (int n = 0; n < 3; n++)
            MUST(bound(&a, mw, n ? a.mr : not_bindable, IBV_ACCESS_REMOTE_WRITE) == 0);
        completes(&a, 7, IBV_WC_MW_BIND_ERR);
        for (int n = 1; n < 3; n++)
            completes(&a, 7, IBV_WC_WR_FLUSH_ERR);
        MUST(bound(&c, mw, c.mr, IBV_ACCESS_REMOTE_WRITE) == 0);
        completes(&c, 7, IBV_WC_SUCCESS);
        // Flags that windows do not have, and a zero-based window of type 1.
        MUST(bound(&c, mw, c.mr, IBV_ACCESS_REMOTE_WRITE | 1 << 12) == EINVAL);
        if (type == IBV_MW_TYPE_1)
            MUST(bound(&c, mw, c.mr, IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_ZERO_BASED) == EINVAL);
        MUST(ibv_dealloc_mw(mw) == 0 && ibv_dereg_mr(not_bindable) == 0);
        unmake(&a);
        unmake(&b);
        unmake(&c);
        unmake(&d);
    }
}

// The ibv_wr_* calls work only on QPs created for them, and only for the requested operations.
static void operations(void)
{
    struct end a;
    make(&a);
    MUST(ibv_qp_to_qp_ex(a.qp) == NULL);
    struct ibv_qp *qp = extended(&a, IBV_QPT_RC, IBV_QP_EX_WITH_SEND);
    struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(qp);
    MUST(ex && ex->wr_send && ex->wr_start && !ex->wr_rdma_write && !ex->wr_send_inv);
    MUST(ibv_destroy_qp(qp) == 0);
    MUST(!extended(&a, IBV_QPT_UC, IBV_QP_EX_WITH_SEND_WITH_INV) && errno == EOPNOTSUPP);
    MUST((qp = extended(&a, IBV_QPT_RC, IBV_QP_EX_WITH_SEND_WITH_INV)) != NULL);
    MUST(ibv_destroy_qp(qp) == 0);
    unmake(&a);
}

enum { ROUNDS = 60, POSTS = DEPTH };

static void *moves_to_error(void *end)
{
    MUST(moved(end, IBV_QPS_ERR, 0, NULL) == 0);
    return NULL;
}

// Each receive is flushed once, whether it is posted before, during or after the move to ERR.
static void flush(void)
{
    for (int n = 0; n < ROUNDS; n++) {
        struct end a, b;
        make(&a);
        make(&b);
        to_init(&a);
        if (n % 2)
            MUST(moved(&a, IBV_QPS_RTR, PEER, &b) == 0);
        pthread_t thread;
        int before = n % (POSTS / 4);
        for (int id = 0; id < POSTS; id++) {
            if (id == before)
                MUST(pthread_create(&thread, NULL, moves_to_error, &a) == 0);
            MUST(receive(&a, id, LENGTH) == 0);
        }
        for (int id = 0; id < POSTS; id++)
            completes(&a, id, IBV_WC_WR_FLUSH_ERR);
        MUST(pthread_join(thread, NULL) == 0);
        // The QP is now in ERR.
        struct ibv_sge sge = {(uintptr_t)a.bytes, 8, a.mr->lkey};
        struct ibv_send_wr wr = request(IBV_WR_SEND, &sge, &b);
        post(&a, &wr);
        completes(&a, 1, IBV_WC_WR_FLUSH_ERR);
        MUST(receive(&a, 2, LENGTH) == 0);
        completes(&a, 2, IBV_WC_WR_FLUSH_ERR);
        struct ibv_wc wc;
        MUST(ibv_poll_cq(a.cq, 1, &wc) == 0);
        unmake(&a);
        unmake(&b);
    }
}

static void event_of(struct end *e, int type)
{
    struct ibv_context *in = e->qp->context;
    struct ibv_async_event event;
    do {
        MUST(readable(in->async_fd, DEADLINE) && ibv_get_async_event(in, &event) == 0);
        ibv_ack_async_event(&event);
        // A first message that arrives in RTR raises this event.
    } while (event.event_type == IBV_EVENT_COMM_EST);
    if ((int)event.event_type != type)
        printf("%s\n", ibv_event_type_str(event.event_type));
    MUST((int)event.event_type == type && event.element.qp == e->qp);
}

static int state_of(struct end *e)
{
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    MUST(ibv_query_qp(e->qp, &attr, IBV_QP_STATE, &init) == 0);
    return attr.qp_state;
}

// Connects two ends. The CQ of the first has only `entries` entries.
static void pair_with_cq(struct end *a, struct end *b, int entries)
{
    make(a);
    make(b);
    MUST(ibv_destroy_qp(a->qp) == 0 && ibv_destroy_cq(a->cq) == 0);
    MUST((a->cq = ibv_create_cq(context, entries, NULL, a->channel, 0)) != NULL);
    MUST(a->cq->cqe == entries);
    struct ibv_qp_init_attr w = wanted(a);
    MUST((a->qp = ibv_create_qp(pd, &w)) != NULL);
    wire(a, b);
    wire(b, a);
}

// A CQ needs entries only for completions, and successful unsignaled requests generate none.
static void unsignaled(void)
{
    struct end a, b;
    pair_with_cq(&a, &b, 16);
    for (int round = 0; round < 20; round++) {
        for (int n = 0; n < 4; n++)
            MUST(receive(&a, 100, LENGTH) == 0);
        struct ibv_sge from_a = {(uintptr_t)a.bytes, LENGTH, a.mr->lkey};
        struct ibv_sge from_b = {(uintptr_t)b.bytes, 64, b.mr->lkey};
        for (int n = 0; n < 60; n++) {
            struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, &from_a, &b);
            wr.send_flags = n == 59 ? IBV_SEND_SIGNALED : 0;
            post(&a, &wr);
            struct ibv_send_wr back = request(IBV_WR_SEND, &from_b, &a);
            if (n % 15 == 0)
                post(&b, &back);
        }
        for (int n = 0; n < 5; n++)
            MUST(next(&a).status == IBV_WC_SUCCESS);
        for (int n = 0; n < 4; n++)
            completes(&b, 1, IBV_WC_SUCCESS);
    }
    MUST(!readable(context->async_fd, 0));
    unmake(&a);
    unmake(&b);
}

// A receive that completes in a full CQ overruns it (IBV_EVENT_CQ_ERR). By default, a send queue
// waits for a free entry instead, so that no completion is lost.
static void overrun(void)
{
    enum { ENTRIES = 16 };
    struct end a, b;
    pair_with_cq(&a, &b, ENTRIES);
    struct ibv_sge sge = {(uintptr_t)a.bytes, 8, a.mr->lkey};
    for (int n = 0; n < 2 * ENTRIES; n++) {
        struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, &sge, &b);
        wr.wr_id = n;
        post(&a, &wr);
    }
    for (int n = 0; n < 2 * ENTRIES; n++)
        completes(&a, n, IBV_WC_SUCCESS);
    for (int n = 0; n <= ENTRIES; n++) {
        MUST(receive(&a, n, 8) == 0);
        struct ibv_send_wr wr = request(IBV_WR_SEND, &sge, &a);
        sge.lkey = b.mr->lkey;
        sge.addr = (uintptr_t)b.bytes;
        post(&b, &wr);
    }
    struct ibv_async_event event;
    MUST(readable(context->async_fd, DEADLINE) && !ibv_get_async_event(context, &event));
    MUST(event.event_type == IBV_EVENT_CQ_ERR && event.element.cq == a.cq);
    ibv_ack_async_event(&event);
    event_of(&a, IBV_EVENT_QP_FATAL);
    MUST(state_of(&a) == IBV_QPS_ERR);
    unmake(&a);
    unmake(&b);
}

// With cq_overrun = "error" in the profile, a send that completes in a full CQ overruns it. The CQ
// keeps the completions before it, and other CQs work. No send in flight holds an entry, so a CQ of
// one entry is as small as the program requests.
static void overrun_by_send(void)
{
    enum { ENTRIES = 16 };
    struct end a, b;
    pair_with_cq(&a, &b, 1);
    unmake(&a);
    unmake(&b);
    pair_with_cq(&a, &b, ENTRIES);
    struct ibv_sge sge = {(uintptr_t)a.bytes, 8, a.mr->lkey};
    // More requests than entries are in flight, and the program polls.
    for (int n = 0; n < 4 * ENTRIES; n++) {
        struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, &sge, &b);
        wr.wr_id = n;
        wr.send_flags = n % 4 == 3 ? IBV_SEND_SIGNALED : 0;
        post(&a, &wr);
    }
    for (int n = 3; n < 4 * ENTRIES; n += 4)
        completes(&a, n, IBV_WC_SUCCESS);
    MUST(!readable(context->async_fd, 0));
    for (int n = 0; n <= ENTRIES; n++) {
        struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, &sge, &b);
        wr.wr_id = n;
        post(&a, &wr);
    }
    struct ibv_async_event event;
    MUST(readable(context->async_fd, DEADLINE) && !ibv_get_async_event(context, &event));
    MUST(event.event_type == IBV_EVENT_CQ_ERR && event.element.cq == a.cq);
    ibv_ack_async_event(&event);
    event_of(&a, IBV_EVENT_QP_FATAL);
    MUST(state_of(&a) == IBV_QPS_ERR);
    for (int n = 0; n < ENTRIES; n++)
        completes(&a, n, IBV_WC_SUCCESS);
    unmake(&a);
    unmake(&b);
    pair_with_cq(&a, &b, ENTRIES);
    sge = (struct ibv_sge){(uintptr_t)a.bytes, 8, a.mr->lkey};
    struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, &sge, &b);
    post(&a, &wr);
    completes(&a, wr.wr_id, IBV_WC_SUCCESS);
    unmake(&a);
    unmake(&b);
}

// Receives posted in ERR are flushed on QPs of every type, whether or not they had a peer.
static void flush_in_error(void)
{
    static const struct {
        int type, place, peer;
    } types[] = {
        {IBV_QPT_RC, PLACE, PEER}, {IBV_QPT_UC, PLACE, UC_PEER}, {IBV_QPT_UD, UD_PLACE, 0},
    };
    for (int n = 0; n < 6; n++) {
        struct end e;
        qp_type = types[n / 2].type;
        make(&e);
        MUST(moved(&e, IBV_QPS_INIT, types[n / 2].place, NULL) == 0);
        if (n % 2)
            MUST(moved(&e, IBV_QPS_RTR, types[n / 2].peer, &e) == 0);
        MUST(receive(&e, 0, LENGTH) == 0);
        MUST(moved(&e, IBV_QPS_ERR, 0, NULL) == 0);
        completes(&e, 0, IBV_WC_WR_FLUSH_ERR);
        for (int id = 1; id < 3 * DEPTH; id++) {
            MUST(receive(&e, id, LENGTH) == 0);
            completes(&e, id, IBV_WC_WR_FLUSH_ERR);
        }
        unmake(&e);
    }
    qp_type = IBV_QPT_RC;
}

// Buffers of the library (ibv_alloc_buf(3)), and registration by attributes (ibv_reg_mr_ex(3)).
// The headers may be older than these functions.
static void buffers(void)
{
    enum { IOVA = 1, ADDR = 2, FD = 4, FD_OFFSET = 8, DMAH = 16, BUF = 32 };
    struct {
        size_t length;
        int access;
        uint64_t comp_mask, iova;
        void *addr;
        int fd;
        uint64_t fd_offset;
        void *dmah, *buf;
    } attr = {.length = LENGTH, .access = ALL};
    void *(*alloc_buf)(struct ibv_pd *, size_t, void **) = dlsym(RTLD_DEFAULT, "ibv_alloc_buf");
    void (*free_buf)(void *) = dlsym(RTLD_DEFAULT, "ibv_free_buf");
    struct ibv_mr *(*reg_buf_mr)(struct ibv_pd *, void *, void *, size_t, int) =
        dlsym(RTLD_DEFAULT, "ibv_reg_buf_mr");
    struct ibv_mr *(*reg_mr_ex)(struct ibv_pd *, void *) = dlsym(RTLD_DEFAULT, "ibv_reg_mr_ex");
    MUST(alloc_buf && free_buf && reg_buf_mr && reg_mr_ex);

    void *buf;
    char *bytes = alloc_buf(pd, LENGTH, &buf);
    MUST(bytes && (uintptr_t)bytes % sysconf(_SC_PAGESIZE) == 0);
    memset(bytes, 0, LENGTH);
    struct ibv_mr *mr = reg_buf_mr(pd, buf, bytes + 8, LENGTH - 8, ALL);
    MUST(mr && mr->addr == bytes + 8 && mr->length == LENGTH - 8 && mr->pd == pd);

    // It is the target of a Write.
    struct end a, b;
    pair(&a, &b);
    strcpy(a.bytes, "to a buffer");
    struct ibv_sge sge = {(uintptr_t)a.bytes, 12, a.mr->lkey};
    struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, &sge, &b);
    wr.wr.rdma.remote_addr = (uintptr_t)bytes + 8;
    wr.wr.rdma.rkey = mr->rkey;
    post(&a, &wr);
    completes(&a, wr.wr_id, IBV_WC_SUCCESS);
    MUST(strcmp(bytes + 8, "to a buffer") == 0);
    MUST(ibv_dereg_mr(mr) == 0);

    MUST(!reg_buf_mr(pd, buf, bytes, LENGTH + 1, ALL) && errno == EINVAL);
    MUST(!reg_buf_mr(pd, buf, bytes - 1, 8, ALL) && errno == EINVAL);
    MUST(!reg_buf_mr(pd, buf, bytes + LENGTH, 1, ALL) && errno == EINVAL);
    struct ibv_pd *other = ibv_alloc_pd(context);
    MUST(other != NULL);
    MUST(!reg_buf_mr(other, buf, bytes, 8, ALL) && errno == EINVAL);
    MUST(ibv_dealloc_pd(other) == 0);

    attr.addr = bytes;
    attr.buf = buf;
    attr.comp_mask = ADDR | BUF;
    MUST((mr = reg_mr_ex(pd, &attr)) && ibv_dereg_mr(mr) == 0);
    attr.comp_mask = BUF;
    MUST(!reg_mr_ex(pd, &attr) && errno == EINVAL);
    attr.comp_mask = ADDR | BUF | FD;
    MUST(!reg_mr_ex(pd, &attr) && errno == EINVAL);
    free_buf(buf);
    MUST(!reg_buf_mr(pd, buf, bytes, 8, ALL) && errno == ENOENT);

    // Memory of the program, with an address of its own for requests.
    attr.addr = a.bytes;
    attr.iova = 4096;
    attr.comp_mask = ADDR | IOVA;
    MUST((mr = reg_mr_ex(pd, &attr)) && mr->addr == a.bytes);
    wr.wr.rdma.remote_addr = 4096 + 100;
    wr.wr.rdma.rkey = mr->rkey;
    post(&a, &wr);
    completes(&a, wr.wr_id, IBV_WC_SUCCESS);
    MUST(strcmp(a.bytes + 100, "to a buffer") == 0);
    MUST(ibv_dereg_mr(mr) == 0);
    attr.comp_mask = IOVA;
    MUST(!reg_mr_ex(pd, &attr) && errno == EINVAL);
    attr.comp_mask = ADDR | FD_OFFSET;
    MUST(!reg_mr_ex(pd, &attr) && errno == EINVAL);
    attr.comp_mask = FD | FD_OFFSET | IOVA;
    MUST(!reg_mr_ex(pd, &attr) && errno == EOPNOTSUPP);
    attr.comp_mask = ADDR | DMAH;
    MUST(!reg_mr_ex(pd, &attr) && errno == EOPNOTSUPP);
    unmake(&a);
    unmake(&b);
}

// Capacities that a manual page calls ignored are ignored.
static void ignored(void)
{
    struct end e;
    make(&e);
    struct ibv_srq_init_attr s = {.attr = {.max_wr = DEPTH, .max_sge = 1, .srq_limit = 1 << 30}};
    struct ibv_srq *srq = ibv_create_srq(pd, &s);
    struct ibv_srq_attr is;
    MUST(srq && !ibv_query_srq(srq, &is) && is.srq_limit == 0);
    int types[] = {IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD};
    for (int n = 0; n < 3; n++) {
        struct ibv_qp_init_attr w = wanted(&e);
        w.qp_type = types[n];
        w.srq = srq;
        w.cap.max_recv_wr = w.cap.max_recv_sge = UINT32_MAX;
        struct ibv_qp *qp = ibv_create_qp(pd, &w);
        MUST(qp && w.cap.max_send_wr >= DEPTH && ibv_destroy_qp(qp) == 0);
    }
    // Without IBV_SRQ_MAX_WR the size is not set.
    struct ibv_srq_attr to = {.max_wr = UINT32_MAX, .max_sge = UINT32_MAX, .srq_limit = 2};
    MUST(ibv_modify_srq(srq, &to, IBV_SRQ_LIMIT) == 0);
    MUST(!ibv_query_srq(srq, &is) && is.max_wr == s.attr.max_wr && is.max_sge == 1);
    MUST(ibv_destroy_srq(srq) == 0);
    unmake(&e);
}

// SGEs at addresses that are not a multiple of 8, as in a packed structure.
static void packed_sges(void)
{
    struct end a, b;
    pair(&a, &b);
    struct ibv_qp *by_calls = extended(&a, IBV_QPT_RC, IBV_QP_EX_WITH_SEND);
    MUST(by_calls && ibv_destroy_qp(a.qp) == 0);
    a.qp = by_calls;
    wire(&a, &b);
    MUST(moved(&b, IBV_QPS_RESET, 0, NULL) == 0);
    wire(&b, &a);
    _Alignas(8) char room[2 * sizeof(struct ibv_sge) + 4];
    struct ibv_sge *packed = (void *)(room + 4);
    for (int call = 0; call < 2; call++) {
        struct ibv_sge into[] = {{(uintptr_t)b.bytes, 1, b.mr->lkey},
                                 {(uintptr_t)b.bytes + 8, 1, b.mr->lkey}};
        memcpy(packed, into, sizeof into);
        struct ibv_recv_wr receive = {.wr_id = 2, .sg_list = packed, .num_sge = 2}, *bad;
        MUST(ibv_post_recv(b.qp, &receive, &bad) == 0);
        struct ibv_sge from[] = {{(uintptr_t)a.bytes, 1, a.mr->lkey},
                                 {(uintptr_t)a.bytes + 1, 1, a.mr->lkey}};
        memcpy(packed, from, sizeof from);
        memcpy(a.bytes, call ? "cd" : "ab", 2);
        if (call) {
            struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(a.qp);
            ibv_wr_start(ex);
            ex->wr_id = 1;
            ex->wr_flags = IBV_SEND_SIGNALED;
            ibv_wr_send(ex);
            ibv_wr_set_sge_list(ex, 2, packed);
            MUST(ibv_wr_complete(ex) == 0);
        } else {
            struct ibv_send_wr wr = request(IBV_WR_SEND, packed, &b);
            wr.num_sge = 2;
            post(&a, &wr);
        }
        completes(&a, 1, IBV_WC_SUCCESS);
        completes(&b, 2, IBV_WC_SUCCESS);
        MUST(b.bytes[0] == a.bytes[0] && b.bytes[8] == a.bytes[1]);
    }
    unmake(&a);
    unmake(&b);
}

// Deregistered memory can be moved and grown, and registered again at its new address.
static void moved_memory(void)
{
    enum { SMALL = 1 << 16, LARGE = 1 << 22 };
    struct end a, b;
    pair(&a, &b);
    int how = MAP_PRIVATE | MAP_ANONYMOUS;
    char *bytes = mmap(NULL, SMALL, PROT_READ | PROT_WRITE, how, -1, 0);
    MUST(bytes != MAP_FAILED);
    for (int n = 0, length = SMALL; n < 6; n++) {
        struct ibv_mr *mr = ibv_reg_mr(pd, bytes, length, ALL);
        MUST(mr != NULL);
        b.bytes[0] = (char)(n + 1);
        struct ibv_sge sge = {(uintptr_t)bytes + length - 1, 1, mr->lkey};
        struct ibv_send_wr wr = request(IBV_WR_RDMA_READ, &sge, &b);
        post(&a, &wr);
        completes(&a, 1, IBV_WC_SUCCESS);
        MUST(bytes[length - 1] == n + 1 && ibv_dereg_mr(mr) == 0);
        // The memory moves to a new address and changes its size.
        int next = n % 2 ? SMALL : LARGE;
        char *room = mmap(NULL, next, PROT_NONE, how, -1, 0);
        MUST(room != MAP_FAILED);
        char *to = mremap(bytes, length, next, MREMAP_MAYMOVE | MREMAP_FIXED, room);
        MUST(to == room && (next < length || to[length - 1] == n + 1));
        bytes = to;
        length = next;
    }
    unmake(&a);
    unmake(&b);
}

// The responder of a refused request raises an event, and both ends move to ERR. Earlier Reads are
// answered.
static void refused(void)
{
    struct {
        int opcode, received, status, event;
        uint32_t wrong;
    } cases[] = {
        {IBV_WR_RDMA_WRITE, 0, IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR, 0x100},
        {IBV_WR_RDMA_READ, 0, IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR, 0x100},
        {IBV_WR_SEND, 8, IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR, 0},
    };
    enum { BEFORE = 3 };
    for (int run = 0; run < 6; run++) {
        int n = run % 3;
        struct end a, b;
        pair(&a, &b);
        struct ibv_sge sge = {(uintptr_t)a.bytes, 64, a.mr->lkey};
        struct ibv_sge all = {sge.addr, LENGTH, sge.lkey};
        struct ibv_send_wr wr = request(cases[n].opcode, &sge, &b), reads[BEFORE];
        wr.wr.rdma.rkey ^= cases[n].wrong;
        if (cases[n].received)
            MUST(receive(&b, 9, cases[n].received) == 0);
        for (int id = 0; id < BEFORE; id++) {
            reads[id] = request(IBV_WR_RDMA_READ, &all, &b);
            reads[id].wr_id = 20 + id;
            reads[id].next = id + 1 < BEFORE ? &reads[id + 1] : &wr;
        }
        post(&a, run < 3 ? &wr : reads);
        for (int id = 0; run >= 3 && id < BEFORE; id++)
            completes(&a, 20 + id, IBV_WC_SUCCESS);
        completes(&a, 1, cases[n].status);
        if (cases[n].received)
            completes(&b, 9, IBV_WC_LOC_LEN_ERR);
        event_of(&b, cases[n].event);
        for (int end = 0; end < 2; end++) {
            struct ibv_qp_attr attr;
            struct ibv_qp_init_attr init;
            MUST(ibv_query_qp(end ? b.qp : a.qp, &attr, IBV_QP_STATE, &init) == 0);
            MUST(attr.qp_state == IBV_QPS_ERR);
        }
        unmake(&a);
        unmake(&b);
    }
    MUST(!readable(context->async_fd, 0));
}

// A request that fails locally fails after the requests before it are done, so that the first
// failure a program sees is the cause of the others.
static void local_error(void)
{
    enum { BEFORE = 8 };
    int opcodes[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_LOCAL_INV};
    for (int n = 0; n < 4; n++) {
        struct end a, b;
        pair(&a, &b);
        struct ibv_sge sge = {(uintptr_t)a.bytes, LENGTH, a.mr->lkey};
        struct ibv_sge foreign = {sge.addr, n == 0 ? 8 : LENGTH, sge.lkey ^ 0x100};
        struct ibv_send_wr wr[BEFORE + 2];
        for (int id = 0; id < BEFORE + 2; id++) {
            wr[id] = request(id % 4 == 3 ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE, &sge, &b);
            wr[id].wr_id = id;
            wr[id].next = id < BEFORE + 1 ? &wr[id + 1] : NULL;
        }
        wr[BEFORE].opcode = opcodes[n];
        wr[BEFORE].sg_list = &foreign;
        wr[BEFORE].num_sge = opcodes[n] != IBV_WR_LOCAL_INV;
        wr[BEFORE].invalidate_rkey = foreign.lkey;
        post(&a, wr);
        for (int id = 0; id < BEFORE; id++)
            completes(&a, id, IBV_WC_SUCCESS);
        completes(&a, BEFORE, IBV_WC_LOC_PROT_ERR);
        completes(&a, BEFORE + 1, IBV_WC_WR_FLUSH_ERR);
        unmake(&a);
        unmake(&b);
    }
}

// A fenced Send begins after earlier Reads are done, and carries the data that they fetched. This
// includes short Sends, which are copied at the post if they have no fence.
static void fence(void)
{
    static const uint32_t lengths[] = {8, 64, LENGTH / 2};
    struct end a, b;
    pair(&a, &b);
    for (uint64_t n = 1; n <= 210; n++) {
        uint32_t length = lengths[n % 3];
        memset(a.bytes, 0, LENGTH);
        memset(b.bytes, 0, LENGTH / 2);
        memset(b.bytes + LENGTH / 2, (int)n, LENGTH / 2);
        MUST(receive(&b, n, LENGTH / 2) == 0);
        struct ibv_sge sge = {(uintptr_t)a.bytes, length, a.mr->lkey};
        struct ibv_send_wr read = request(IBV_WR_RDMA_READ, &sge, &b);
        struct ibv_send_wr send = request(IBV_WR_SEND, &sge, &b);
        read.wr.rdma.remote_addr += LENGTH / 2;
        read.next = &send;
        send.wr_id = 2;
        send.send_flags |= IBV_SEND_FENCE;
        post(&a, &read);
        completes(&a, 1, IBV_WC_SUCCESS);
        completes(&a, 2, IBV_WC_SUCCESS);
        completes(&b, n, IBV_WC_SUCCESS);
        MUST(!memcmp(b.bytes, b.bytes + LENGTH / 2, length));
    }
    unmake(&a);
    unmake(&b);
}

// A CQ armed for solicited completions gets no event for others.
static void solicited(void)
{
    struct end a, b;
    pair(&a, &b);
    struct ibv_sge sge = {(uintptr_t)a.bytes, 8, a.mr->lkey};
    struct ibv_send_wr wr = request(IBV_WR_SEND, &sge, &b);
    for (int n = 0; n < 4; n++) {
        MUST(ibv_req_notify_cq(b.cq, 1) == 0);
        for (int id = 0; id < 16; id++) {
            MUST(receive(&b, id, LENGTH) == 0);
            post(&a, &wr);
            completes(&a, 1, IBV_WC_SUCCESS);
            completes(&b, id, IBV_WC_SUCCESS);
        }
        MUST(!readable(b.channel->fd, 0));
        MUST(receive(&b, 99, LENGTH) == 0);
        wr.send_flags |= IBV_SEND_SOLICITED;
        post(&a, &wr);
        wr.send_flags &= ~IBV_SEND_SOLICITED;
        completes(&a, 1, IBV_WC_SUCCESS);
        struct ibv_cq *cq;
        void *program;
        MUST(readable(b.channel->fd, DEADLINE) && !ibv_get_cq_event(b.channel, &cq, &program));
        MUST(cq == b.cq);
        ibv_ack_cq_events(cq, 1);
        completes(&b, 99, IBV_WC_SUCCESS);
        MUST(!readable(b.channel->fd, 0));
    }
    unmake(&a);
    unmake(&b);
}

// Sends 8 bytes until they arrive, since UC and UD may lose a message.
static void passes(struct end *from, struct end *to, struct ibv_send_wr *wr)
{
    MUST(receive(to, 77, LENGTH) == 0);
    for (time_t until = time(NULL) + DEADLINE;;) {
        post(from, wr);
        completes(from, wr->wr_id, IBV_WC_SUCCESS);
        for (int looks = 0; looks < 1000; looks++) {
            struct ibv_wc wc;
            if (ibv_poll_cq(to->cq, 1, &wc) == 1) {
                MUST(wc.wr_id == 77 && wc.status == IBV_WC_SUCCESS);
                return;
            }
            usleep(1000);
        }
        MUST(time(NULL) <= until);
    }
}

// A send request of a UC or UD QP that fails locally moves the QP to SQE: later requests are
// flushed, receives continue, and the move to RTS clears it (section 10.3.1.6).
static void send_queue_error(void)
{
    int types[] = {IBV_QPT_UC, IBV_QPT_UD};
    for (int n = 0; n < 2; n++) {
        int ud = (qp_type = types[n]) == IBV_QPT_UD;
        struct end a, b, *ends[] = {&a, &b};
        make(&a);
        make(&b);
        for (int end = 0; end < 2; end++) {
            struct end *e = ends[end];
            MUST(moved(e, IBV_QPS_INIT, ud ? UD_PLACE : PLACE, NULL) == 0);
            MUST(moved(e, IBV_QPS_RTR, ud ? 0 : UC_PEER, ends[!end]) == 0);
            MUST(moved(e, IBV_QPS_RTS, IBV_QP_SQ_PSN, NULL) == 0);
        }
        struct ibv_ah_attr at = {.is_global = 1, .port_num = 1};
        at.grh = (struct ibv_global_route){.dgid = gid, .hop_limit = 64};
        struct ibv_ah *ah = ibv_create_ah(pd, &at);
        MUST(ah);
        struct ibv_sge sge = {(uintptr_t)a.bytes, 8, a.mr->lkey};
        struct ibv_sge back = {(uintptr_t)b.bytes, 8, b.mr->lkey};
        struct ibv_sge foreign = {sge.addr, 8, sge.lkey ^ 0x100};
        struct ibv_send_wr to_b = request(IBV_WR_SEND, &sge, &b);
        struct ibv_send_wr to_a = request(IBV_WR_SEND, &back, &a);
        if (ud) {
            to_b.wr.ud.ah = to_a.wr.ud.ah = ah;
            to_b.wr.ud.remote_qpn = b.qp->qp_num;
            to_a.wr.ud.remote_qpn = a.qp->qp_num;
            to_b.wr.ud.remote_qkey = to_a.wr.ud.remote_qkey = QKEY;
        }
        passes(&a, &b, &to_b);
        struct ibv_send_wr wrong = to_b, later = to_b;
        wrong.sg_list = &foreign;
        wrong.wr_id = 2;
        wrong.next = &later;
        later.wr_id = 3;
        for (int round = 0; round < 3; round++) {
            post(&a, &wrong);
            completes(&a, 2, IBV_WC_LOC_PROT_ERR);
            completes(&a, 3, IBV_WC_WR_FLUSH_ERR);
            MUST(state_of(&a) == IBV_QPS_SQE && state_of(&b) == IBV_QPS_RTS);
            post(&a, &later);
            completes(&a, 3, IBV_WC_WR_FLUSH_ERR);
            passes(&b, &a, &to_a);
            // The move to SQD is refused, the move from SQE to RTS succeeds.
            MUST(moved(&a, IBV_QPS_SQD, 0, NULL) == EINVAL);
            struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTS, .cur_qp_state = IBV_QPS_SQE};
            MUST(ibv_modify_qp(a.qp, &attr, IBV_QP_STATE | IBV_QP_CUR_STATE) == 0);
            MUST(state_of(&a) == IBV_QPS_RTS);
            passes(&a, &b, &to_b);
        }
        post(&a, &wrong);
        completes(&a, 2, IBV_WC_LOC_PROT_ERR);
        completes(&a, 3, IBV_WC_WR_FLUSH_ERR);
        MUST(receive(&a, 4, LENGTH) == 0);
        MUST(moved(&a, IBV_QPS_ERR, 0, NULL) == 0);
        completes(&a, 4, IBV_WC_WR_FLUSH_ERR);
        MUST(state_of(&a) == IBV_QPS_ERR && ibv_destroy_ah(ah) == 0);
        unmake(&a);
        unmake(&b);
    }
}

static struct rdma_cm_event *cm_event(struct rdma_event_channel *from, int type)
{
    struct rdma_cm_event *event;
    MUST(readable(from->fd, DEADLINE) && rdma_get_cm_event(from, &event) == 0);
    if ((int)event->event != type)
        printf("%s, not %s\n", rdma_event_str(event->event), rdma_event_str(type));
    MUST((int)event->event == type);
    return event;
}

static void attach(struct rdma_cm_id *id, struct end *e)
{
    e->channel = NULL;
    MUST((e->cq = ibv_create_cq(id->verbs, 4 * DEPTH, NULL, NULL, 0)) != NULL);
    struct ibv_qp_init_attr a = wanted(e);
    MUST(rdma_create_qp(id, NULL, &a) == 0);
    e->qp = id->qp;
    MUST((e->bytes = calloc(1, LENGTH)) != NULL);
    MUST((e->mr = ibv_reg_mr(id->qp->pd, e->bytes, LENGTH, ALL)) != NULL);
}

static void detach(struct rdma_cm_id *id, struct end *e)
{
    rdma_destroy_qp(id);
    MUST(ibv_dereg_mr(e->mr) == 0 && ibv_destroy_cq(e->cq) == 0);
    free(e->bytes);
    MUST(rdma_destroy_id(id) == 0);
}

// A connection of the iWARP device.
struct link {
    struct rdma_event_channel *listens, *connects;
    struct rdma_cm_id *listener, *client, *server;
    struct end a, b; // of the client and of the server
};

static struct rdma_conn_param depths = {.responder_resources = 1, .initiator_depth = 1};

// Requests a connection, which the server has not accepted yet.
static void ask(struct link *l)
{
    l->listens = rdma_create_event_channel();
    l->connects = rdma_create_event_channel();
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    MUST(l->listens && l->connects);
    MUST(!rdma_create_id(l->listens, &l->listener, NULL, RDMA_PS_TCP));
    MUST(!rdma_bind_addr(l->listener, (struct sockaddr *)&at) && !rdma_listen(l->listener, 1));
    at.sin_port = rdma_get_src_port(l->listener);
    MUST(!rdma_create_id(l->connects, &l->client, NULL, RDMA_PS_TCP));
    MUST(!rdma_resolve_addr(l->client, NULL, (struct sockaddr *)&at, 1000 * DEADLINE));
    rdma_ack_cm_event(cm_event(l->connects, RDMA_CM_EVENT_ADDR_RESOLVED));
    MUST(!rdma_resolve_route(l->client, 1000 * DEADLINE));
    rdma_ack_cm_event(cm_event(l->connects, RDMA_CM_EVENT_ROUTE_RESOLVED));
    attach(l->client, &l->a);
    MUST(receive(&l->a, 1, LENGTH) == 0);
    MUST(!rdma_connect(l->client, &depths));
    struct rdma_cm_event *asks = cm_event(l->listens, RDMA_CM_EVENT_CONNECT_REQUEST);
    l->server = asks->id;
    rdma_ack_cm_event(asks);
    attach(l->server, &l->b);
}

static void part(struct link *l)
{
    detach(l->client, &l->a);
    detach(l->server, &l->b);
    MUST(!rdma_destroy_id(l->listener));
    rdma_destroy_event_channel(l->listens);
    rdma_destroy_event_channel(l->connects);
}

// As in siw, the move to SQD ends an iWARP connection gracefully. Unknown attributes are refused.
static void closes_in_order(void)
{
    struct link l;
    ask(&l);
    MUST(!rdma_accept(l.server, &depths));
    rdma_ack_cm_event(cm_event(l.connects, RDMA_CM_EVENT_ESTABLISHED));
    rdma_ack_cm_event(cm_event(l.listens, RDMA_CM_EVENT_ESTABLISHED));
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    MUST(!ibv_query_qp(l.a.qp, &attr, IBV_QP_ACCESS_FLAGS, &init));
    MUST(attr.qp_access_flags & IBV_ACCESS_REMOTE_READ);
    MUST(attr.qp_access_flags & IBV_ACCESS_REMOTE_WRITE);
    MUST(ibv_modify_qp(l.a.qp, &attr, IBV_QP_RATE_LIMIT) == EOPNOTSUPP);
    MUST(ibv_modify_qp(l.a.qp, &attr, 1 << 30) == EOPNOTSUPP);
    attr.qp_state = IBV_QPS_SQD;
    MUST(ibv_modify_qp(l.a.qp, &attr, IBV_QP_STATE) == 0);
    rdma_ack_cm_event(cm_event(l.listens, RDMA_CM_EVENT_DISCONNECTED));
    MUST(!rdma_disconnect(l.server));
    rdma_ack_cm_event(cm_event(l.connects, RDMA_CM_EVENT_DISCONNECTED));
    part(&l);
}

// A UC QP can use a shared receive queue.
static void unreliable_shared(void)
{
    struct end a, b;
    struct ibv_srq_init_attr shared = {.attr = {.max_wr = DEPTH, .max_sge = 1}};
    struct ibv_srq *srq = ibv_create_srq(pd, &shared);
    MUST(srq != NULL);
    make(&a);
    make(&b);
    struct end *ends[] = {&a, &b};
    for (int n = 0; n < 2; n++) {
        struct ibv_qp_init_attr w = wanted(ends[n]);
        w.qp_type = IBV_QPT_UC;
        w.srq = n ? srq : NULL;
        MUST(ibv_destroy_qp(ends[n]->qp) == 0);
        MUST((ends[n]->qp = ibv_create_qp(pd, &w)) != NULL);
        to_init(ends[n]);
    }
    int peer = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
    for (int n = 0; n < 2; n++) {
        MUST(moved(ends[n], IBV_QPS_RTR, peer, ends[!n]) == 0);
        MUST(moved(ends[n], IBV_QPS_RTS, IBV_QP_SQ_PSN, NULL) == 0);
    }
    struct ibv_sge to = {(uintptr_t)b.bytes, 8, b.mr->lkey};
    struct ibv_recv_wr receives = {.wr_id = 5, .sg_list = &to, .num_sge = 1}, *bad;
    MUST(ibv_post_srq_recv(srq, &receives, &bad) == 0);
    strcpy(a.bytes, "shared");
    struct ibv_sge from = {(uintptr_t)a.bytes, 8, a.mr->lkey};
    struct ibv_send_wr wr = request(IBV_WR_SEND, &from, &b);
    post(&a, &wr);
    completes(&a, 1, IBV_WC_SUCCESS);
    completes(&b, 5, IBV_WC_SUCCESS);
    MUST(!strcmp(b.bytes, "shared"));
    unmake(&a);
    unmake(&b);
    MUST(ibv_destroy_srq(srq) == 0);
}

// RDMA_CM_EVENT_ESTABLISHED can be read as soon as the first completion, on either end.
static void established(void)
{
    for (int n = 0; n < 60; n++) {
        struct link l;
        ask(&l);
        // Sent as soon as the connection is established.
        struct ibv_sge sge = {(uintptr_t)l.b.bytes, 8, l.b.mr->lkey};
        struct ibv_send_wr wr = request(IBV_WR_SEND, &sge, &l.a);
        struct ibv_sge from = {(uintptr_t)l.a.bytes, 8, l.a.mr->lkey};
        struct ibv_send_wr back = request(IBV_WR_SEND, &from, &l.b);
        MUST(receive(&l.b, 2, LENGTH) == 0);
        post(&l.b, &wr);
        post(&l.a, &back);
        MUST(!rdma_accept(l.server, &depths));
        struct end *ends[] = {&l.a, &l.b};
        struct rdma_event_channel *channels[] = {l.connects, l.listens};
        for (int end = 0; end < 2; end++) {
            struct end *first = ends[(n + end) % 2];
            struct rdma_event_channel *channel = channels[(n + end) % 2];
            MUST(next(first).status == IBV_WC_SUCCESS);
            MUST(readable(channel->fd, 0));
            rdma_ack_cm_event(cm_event(channel, RDMA_CM_EVENT_ESTABLISHED));
        }
        part(&l);
    }
}

// Returns the CQ of the next event of a channel, which must be readable.
static struct ibv_cq *notified(struct ibv_comp_channel *channel)
{
    struct ibv_cq *cq;
    void *program;
    MUST(readable(channel->fd, DEADLINE) && !ibv_get_cq_event(channel, &cq, &program));
    ibv_ack_cq_events(cq, 1);
    return cq;
}

// A channel with events of destroyed CQs only is not readable, since ibv_get_cq_event would block.
static void destroyed_cq(void)
{
    struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
    MUST(channel != NULL);
    // The second CQ stays.
    for (int staying = 0; staying < 2; staying++) {
        struct ibv_cq *cqs[3];
        struct ibv_qp *qps[3];
        for (int n = 0; n < 3; n++) {
            struct end e = {.channel = channel};
            MUST((e.cq = cqs[n] = ibv_create_cq(context, DEPTH, NULL, channel, 0)) != NULL);
            struct ibv_qp_init_attr a = wanted(&e);
            MUST((e.qp = qps[n] = ibv_create_qp(pd, &a)) != NULL);
            to_init(&e);
            struct ibv_recv_wr empty = {.wr_id = 1}, *bad;
            MUST(!ibv_post_recv(e.qp, &empty, &bad) && !ibv_req_notify_cq(e.cq, 0));
            MUST(moved(&e, IBV_QPS_ERR, 0, NULL) == 0);
            completes(&e, 1, IBV_WC_WR_FLUSH_ERR);
            // The worker sends the event before it destroys the QP.
            MUST(!ibv_destroy_qp(qps[n]));
        }
        MUST(readable(channel->fd, DEADLINE));
        for (int n = 0; n < 3; n++)
            if (n != 1 || !staying)
                MUST(!ibv_destroy_cq(cqs[n]));
        if (staying) {
            MUST(notified(channel) == cqs[1]);
            MUST(!readable(channel->fd, 0) && !ibv_destroy_cq(cqs[1]));
        }
        MUST(!readable(channel->fd, 0));
    }
    MUST(!ibv_destroy_comp_channel(channel));
}

// As in siw, the responder of an iWARP connection raises the events of an RC responder.
static void refused_iwarp(void)
{
    struct {
        int opcode, received, event;
        uint32_t wrong;
        uint64_t beyond;
    } cases[] = {
        {IBV_WR_RDMA_WRITE, 0, IBV_EVENT_QP_ACCESS_ERR, 0x100, 0},
        {IBV_WR_RDMA_WRITE, 0, IBV_EVENT_QP_ACCESS_ERR, 0, LENGTH},
        {IBV_WR_RDMA_READ, 0, IBV_EVENT_QP_ACCESS_ERR, 0x100, 0},
        {IBV_WR_SEND, 8, IBV_EVENT_QP_REQ_ERR, 0, 0},
    };
    for (int n = 0; n < 4; n++) {
        struct link l;
        ask(&l);
        MUST(!rdma_accept(l.server, &depths));
        rdma_ack_cm_event(cm_event(l.connects, RDMA_CM_EVENT_ESTABLISHED));
        rdma_ack_cm_event(cm_event(l.listens, RDMA_CM_EVENT_ESTABLISHED));
        struct ibv_sge sge = {(uintptr_t)l.a.bytes, 64, l.a.mr->lkey};
        struct ibv_send_wr wr = request(cases[n].opcode, &sge, &l.b);
        wr.wr.rdma.rkey ^= cases[n].wrong;
        wr.wr.rdma.remote_addr += cases[n].beyond;
        if (cases[n].received)
            MUST(receive(&l.b, 9, cases[n].received) == 0);
        post(&l.a, &wr);
        event_of(&l.b, cases[n].event);
        MUST(state_of(&l.b) == IBV_QPS_ERR);
        MUST(!readable(l.a.qp->context->async_fd, 0));
        part(&l);
    }
}

int main(int count, char **arguments)
{
    static const struct {
        const char *name;
        void (*run)(void);
        int roce;
    } parts[] = {
        {"rebind", bind_again, 1}, {"operations", operations, 1}, {"closes", closes_in_order, 0},
        {"uc-srq", unreliable_shared, 1}, {"zero", zero_bytes, 1}, {"bind", bind_window, 1},
        {"flush", flush, 1}, {"refused", refused, 1}, {"local", local_error, 1},
        {"fence", fence, 1},
        {"solicited", solicited, 1}, {"established", established, 0},
        {"sqe", send_queue_error, 1}, {"refused-iwarp", refused_iwarp, 0},
        {"unsignaled", unsignaled, 1}, {"overrun", overrun, 1},
        {"overrun-by-send", overrun_by_send, 1}, {"ignored", ignored, 1},
        {"buffers", buffers, 1},
        {"flush-in-error", flush_in_error, 1}, {"moved-memory", moved_memory, 1},
        {"packed-sges", packed_sges, 1}, {"destroyed-cq", destroyed_cq, 1},
    };
    MUST(count == 2);
    for (size_t n = 0; n < sizeof parts / sizeof *parts; n++)
        if (!strcmp(arguments[1], parts[n].name)) {
            open_device(parts[n].roce);
            parts[n].run();
            puts("done");
            return 0;
        }
    return 2;
}
