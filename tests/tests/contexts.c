// Objects and the device context that creates them: closing it destroys them, and objects of
// different contexts cannot be combined. Prints "done" if all checks passed.

#include "refusals.h"
#include <arpa/inet.h>
#include <dirent.h>
#include <rdma/rdma_verbs.h>

enum { LENGTH = 4096, MANY = 1100 };

static char memory[LENGTH];

// One object of each kind, created with one context.
struct objects {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_srq *srq;
    struct ibv_mr *mr;
    struct ibv_mw *mw;
    struct ibv_qp *qp;
};

static struct ibv_context *open_device(int roce)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_context *context = NULL;
    for (int n = 0; list && list[n]; n++)
        if ((list[n]->transport_type == IBV_TRANSPORT_IB) == roce)
            context = ibv_open_device(list[n]);
    ibv_free_device_list(list);
    MUST(context != NULL);
    return context;
}

static struct ibv_qp_init_attr queues(struct objects *o)
{
    struct ibv_qp_init_attr a = {.send_cq = o->cq, .recv_cq = o->cq, .srq = o->srq};
    a.qp_type = IBV_QPT_RC;
    a.cap = (struct ibv_qp_cap){2, 2, 1, 1, 0};
    return a;
}

static struct objects make(int roce)
{
    struct objects o = {.context = open_device(roce)};
    struct ibv_srq_init_attr shared = {.attr = {.max_wr = 2, .max_sge = 1}};
    MUST((o.pd = ibv_alloc_pd(o.context)) != NULL);
    MUST((o.channel = ibv_create_comp_channel(o.context)) != NULL);
    MUST((o.cq = ibv_create_cq(o.context, 4, NULL, o.channel, 0)) != NULL);
    MUST((o.srq = ibv_create_srq(o.pd, &shared)) != NULL);
    MUST((o.mr = ibv_reg_mr(o.pd, memory, LENGTH, IBV_ACCESS_LOCAL_WRITE)) != NULL);
    MUST((o.mw = ibv_alloc_mw(o.pd, IBV_MW_TYPE_2)) != NULL);
    struct ibv_qp_init_attr a = queues(&o);
    MUST((o.qp = ibv_create_qp(o.pd, &a)) != NULL);
    return o;
}

static void destroy(struct objects *o)
{
    FINE(ibv_destroy_qp(o->qp));
    FINE(ibv_dealloc_mw(o->mw));
    FINE(ibv_dereg_mr(o->mr));
    FINE(ibv_destroy_srq(o->srq));
    FINE(ibv_destroy_cq(o->cq));
    FINE(ibv_destroy_comp_channel(o->channel));
    FINE(ibv_dealloc_pd(o->pd));
    FINE(ibv_close_device(o->context));
}

// Closes more contexts than a session can have protection domains. One of them has an
// unacknowledged event. A completion channel has its own descriptor and outlives the context.
static void closing(void)
{
    for (int n = 0; n < MANY; n++) {
        struct objects o = make(n % 2);
        if (n == 0) {
            struct ibv_qp_attr to_error = {.qp_state = IBV_QPS_ERR};
            struct ibv_async_event event;
            FINE(ibv_modify_qp(o.qp, &to_error, IBV_QP_STATE));
            MUST(ibv_get_async_event(o.context, &event) == 0);
        }
        FINE(ibv_close_device(o.context));
        FINE(ibv_destroy_comp_channel(o.channel));
        if (n + 2 < MANY)
            continue;
        RETURNS(ENOENT, ibv_destroy_qp(o.qp));
        RETURNS(ENOENT, ibv_dealloc_mw(o.mw));
        RETURNS(ENOENT, ibv_dereg_mr(o.mr));
        RETURNS(ENOENT, ibv_destroy_srq(o.srq));
        RETURNS(ENOENT, ibv_destroy_cq(o.cq));
        RETURNS(ENOENT, ibv_destroy_comp_channel(o.channel));
        RETURNS(ENOENT, ibv_dealloc_pd(o.pd));
        RETURNS(ENOENT, ibv_close_device(o.context));
    }
}

// Creates an id that is bound to a device.
static struct rdma_cm_id *resolved(void)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct rdma_cm_id *id;
    to.sin_port = htons(1);
    MUST(rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP) == 0);
    MUST(rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 120000) == 0);
    return id;
}

static void mixing(int roce)
{
    struct objects a = make(roce), others[] = {make(roce), make(!roce)};
    for (int n = 0; n < 2; n++) {
        struct objects *other = &others[n];
        NONE(EINVAL, ibv_create_cq(a.context, 4, NULL, other->channel, 0));
        CHECK(ibv_rereg_mr(a.mr, IBV_REREG_MR_CHANGE_PD, other->pd, NULL, 0, 0) != 0);
        CHECK(a.mr->pd == a.pd);
        struct ibv_qp_init_attr with = queues(&a);
        with.send_cq = other->cq;
        NONE(EINVAL, ibv_create_qp(a.pd, &with));
        with = queues(&a);
        with.recv_cq = other->cq;
        NONE(EINVAL, ibv_create_qp(a.pd, &with));
        with = queues(&a);
        with.srq = other->srq;
        NONE(EINVAL, ibv_create_qp(a.pd, &with));
        struct ibv_qp_init_attr_ex extended = {.send_cq = a.cq, .recv_cq = a.cq};
        extended.qp_type = IBV_QPT_RC;
        extended.cap = with.cap;
        extended.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        extended.send_ops_flags = IBV_QP_EX_WITH_SEND;
        extended.pd = a.pd;
        NONE(EINVAL, ibv_create_qp_ex(other->context, &extended));
    }
    // An id has its own context, so objects of other contexts are refused.
    struct rdma_cm_id *id = resolved();
    struct ibv_qp_init_attr with = {.qp_type = IBV_QPT_RC, .cap = {2, 2, 1, 1, 0}};
    MINUS(EINVAL, rdma_create_qp(id, a.pd, &with));
    struct ibv_srq_init_attr shared = {.attr = {.max_wr = 2, .max_sge = 1}};
    MINUS(EINVAL, rdma_create_srq(id, a.pd, &shared));
    FINE(rdma_create_qp(id, NULL, &with));
    rdma_destroy_qp(id);
    FINE(rdma_destroy_id(id));
    destroy(&a);
    destroy(&others[0]);
    destroy(&others[1]);
}

static int descriptors(void)
{
    int count = 0;
    DIR *open = opendir("/proc/self/fd");
    MUST(open != NULL);
    while (readdir(open))
        count++;
    closedir(open);
    return count;
}

// A CQ holds a reference to its channel. A CQ without a channel uses neither a channel of the
// session nor a descriptor, and arming it has no effect.
static void channels(void)
{
    struct objects o = make(1);
    MUST(o.channel->refcnt == 1);
    struct ibv_cq *second = ibv_create_cq(o.context, 4, NULL, o.channel, 0);
    MUST(second && o.channel->refcnt == 2);
    FINE(ibv_destroy_cq(second));
    CHECK(o.channel->refcnt == 1);
    static struct ibv_cq *silent[MANY];
    int before = 0;
    for (int n = 0; n < MANY; n++) {
        MUST((silent[n] = ibv_create_cq(o.context, 1, NULL, NULL, 0)) != NULL);
        FINE(ibv_req_notify_cq(silent[n], 0));
        if (n == 0)
            before = descriptors();
    }
    CHECK(descriptors() == before);
    for (int n = 0; n < MANY; n++)
        FINE(ibv_destroy_cq(silent[n]));
    destroy(&o);
}

// After the daemon's end, all objects can still be destroyed.
static void orphaned(void)
{
    struct objects o = make(1);
    struct ibv_async_event event;
    puts("ready");
    fflush(stdout);
    MUST(ibv_get_async_event(o.context, &event) == 0);
    MUST(event.event_type == IBV_EVENT_DEVICE_FATAL);
    ibv_ack_async_event(&event);
    destroy(&o);
}

int main(int count, char **arguments)
{
    read_reasons();
    if (count > 1) {
        orphaned();
    } else {
        // Keeps one session open. Otherwise each context would have its own session, whose thread
        // may close its descriptors at any time after the end of the session.
        struct ibv_context *kept = open_device(1);
        closing();
        mixing(0);
        mixing(1);
        channels();
        FINE(ibv_close_device(kept));
    }
    if (!wrong)
        puts("done");
    return wrong != 0;
}
