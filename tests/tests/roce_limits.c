// Creates objects up to the maxima that the first device reports, and one more of each, which must
// fail. The expected error number is in the environment variable named after the kind (QPs, CQs,
// ...), and otherwise ENOMEM. Prints "done" on success.

#include "refusals.h"
#include <infiniband/verbs.h>
#include <sys/resource.h>

static struct ibv_context *device;
static struct ibv_device_attr has;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static char memory[4096];

static void *one_pd(void) { return ibv_alloc_pd(device); }
static void *one_cq(void) { return ibv_create_cq(device, 1, NULL, NULL, 0); }
static void *one_mr(void) { return ibv_reg_mr(pd, memory, 1, 0); }
static void *one_mw(void) { return ibv_alloc_mw(pd, IBV_MW_TYPE_1); }

static void *one_cq_with_a_channel(void)
{
    struct ibv_comp_channel *channel = ibv_create_comp_channel(device);
    return channel ? ibv_create_cq(device, 1, NULL, channel, 0) : NULL;
}

static struct ibv_qp *qp(int wr, int sge, int inline_data)
{
    struct ibv_qp_init_attr wanted = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC};
    wanted.cap = (struct ibv_qp_cap){wr, wr, sge, sge, inline_data};
    return ibv_create_qp(pd, &wanted);
}

static void *one_qp(void) { return qp(1, 1, 0); }

static struct ibv_srq *srq(int wr, int sge)
{
    struct ibv_srq_init_attr wanted = {.attr = {.max_wr = wr, .max_sge = sge}};
    return ibv_create_srq(pd, &wanted);
}

static void *one_srq(void) { return srq(1, 1); }

static void *one_ah(void)
{
    struct ibv_ah_attr to = {.is_global = 1, .port_num = 1};
    // Source and destination must be of one address family.
    ibv_query_gid(pd->context, 1, 0, &to.grh.dgid);
    return ibv_create_ah(pd, &to);
}

// Creates `most` minus `used` objects, and one more, which must fail. The objects are destroyed
// with their context.
static void fill(const char *name, int most, int used, void *(*one)(void))
{
    int number = getenv(name) ? atoi(getenv(name)) : ENOMEM;
    for (int n = used; n < most; n++) {
        if (!one()) {
            printf("failed: %s %d of %d: %m\n", name, n + 1, most);
            wrong++;
            return;
        }
    }
    errno = 0;
    if (one() || errno != number) {
        printf("failed: one more than %s %d: %m\n", name, most);
        wrong++;
    }
}

static void open_first(void)
{
    int count = 0;
    struct ibv_device **devices = ibv_get_device_list(&count);
    if (!devices || !count || !(device = ibv_open_device(devices[0])) ||
        ibv_query_device(device, &has)) {
        perror("no device");
        exit(1);
    }
    ibv_free_device_list(devices);
    pd = ibv_alloc_pd(device);
    cq = ibv_create_cq(device, 1, NULL, NULL, 0);
    CHECK(pd && cq);
}

// Posts an atomic to a QP in ERR, which flushes all requests.
static int post_atomic(void)
{
    struct ibv_sge sge = {.addr = (uintptr_t)memory, .length = 8};
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1}, *bad;
    struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT, .port_num = 1};
    struct ibv_qp_attr error = {.qp_state = IBV_QPS_ERR};
    int all = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    struct ibv_qp *failed = qp(1, 1, 0);
    wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
    CHECK(failed && !ibv_modify_qp(failed, &init, all));
    CHECK(failed && !ibv_modify_qp(failed, &error, IBV_QP_STATE));
    return ibv_post_send(failed, &wr, &bad);
}

static void sizes(void)
{
    int inline_most = atoi(getenv("INLINE"));
    CHECK(ibv_create_cq(device, has.max_cqe, NULL, NULL, 0));
    CHECK(!ibv_create_cq(device, has.max_cqe + 1, NULL, NULL, 0) && errno == EINVAL);
    CHECK(ibv_resize_cq(cq, has.max_cqe + 1) == EINVAL);
    CHECK(qp(has.max_qp_wr, has.max_sge, inline_most));
    CHECK(!qp(has.max_qp_wr + 1, 1, 0) && errno == EINVAL);
    CHECK(!qp(1, has.max_sge + 1, 0) && errno == EINVAL);
    CHECK(!qp(1, 1, inline_most + 1) && errno == EINVAL);
    CHECK(post_atomic() == (has.atomic_cap == IBV_ATOMIC_NONE ? EINVAL : 0));
    if (has.max_srq) {
        CHECK(srq(has.max_srq_wr, has.max_srq_sge));
        CHECK(!srq(has.max_srq_wr + 1, 1) && errno == EINVAL);
        CHECK(!srq(1, has.max_srq_sge + 1) && errno == EINVAL);
    }
    if (has.max_mr_size < sizeof memory) {
        CHECK(ibv_reg_mr(pd, memory, has.max_mr_size, 0));
        CHECK(!ibv_reg_mr(pd, memory, has.max_mr_size + 1, 0) && errno == EINVAL);
    }
}

int main(int argc, char **argv)
{
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    open_first();
    if (argc > 1 && !strcmp(argv[1], "channels")) {
        fill("CQs", has.max_cq, 1, one_cq_with_a_channel);
    } else {
        sizes();
        CHECK(!ibv_close_device(device));
        open_first();
        fill("PDs", has.max_pd, 1, one_pd);
        fill("MRs", has.max_mr, 0, one_mr);
        fill("MWs", has.max_mw, 0, one_mw);
        fill("SRQs", has.max_srq, 0, one_srq);
        fill("QPs", has.max_qp, 0, one_qp);
        fill("CQs", has.max_cq, 1, one_cq);
        if (has.max_ah)
            fill("AHs", has.max_ah, 0, one_ah);
    }
    printf("%d CQEs, %d requests, %d SGEs\n", has.max_cqe, has.max_qp_wr, has.max_sge);
    if (!wrong)
        puts("done");
    return wrong != 0;
}
