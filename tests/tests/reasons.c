// The lines of RNIC_LOG=debug about lost datagrams and rejected connections, and those that a walk
// of the GID table does not write. The command line names the part to run, which prints "done" on
// success.

#include "refusals.h"

#include <poll.h>

#include "rdma_cm.h"

static char text[1 << 16];

// Reads all lines of the log, and returns the number of those that contain `words`.
static int lines_with(const char *words)
{
    ssize_t length = pread(2, text, sizeof text - 1, 0);
    text[length > 0 ? length : 0] = 0;
    int count = 0;
    for (const char *at = text; (at = strstr(at, words)); at += strlen(words))
        count++;
    return count;
}

// Waits for a line of the thread that receives events.
static void logs(const char *words)
{
    for (int n = 0; n < 60000; n++) {
        if (lines_with(words))
            return;
        poll(NULL, 0, 2);
    }
    printf("no line with \"%s\" in:\n%s\n", words, text);
    exit(1);
}

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;

static void open_device(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    MUST(list && list[0] && (context = ibv_open_device(list[0])));
    ibv_free_device_list(list);
    MUST((pd = ibv_alloc_pd(context)) && (cq = ibv_create_cq(context, 64, NULL, NULL, 0)));
}

enum { QKEY = 0x11 };

static void moves(struct ibv_qp *qp, struct ibv_qp_attr attr, int mask)
{
    MUST(ibv_modify_qp(qp, &attr, IBV_QP_STATE | mask) == 0);
}

// Creates a UD QP in INIT.
static struct ibv_qp *ud_qp(void)
{
    struct ibv_qp_init_attr wanted = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_UD};
    wanted.cap = (struct ibv_qp_cap){16, 16, 1, 1, 16};
    struct ibv_qp *qp = ibv_create_qp(pd, &wanted);
    MUST(qp != NULL);
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY};
    moves(qp, attr, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
    return qp;
}

static struct ibv_mr *mr;

// Sends a datagram of 100 bytes, which succeeds.
static void sends(struct ibv_qp *from, struct ibv_ah *ah, uint32_t qp, uint32_t qkey)
{
    struct ibv_sge sge = {(uintptr_t)mr->addr, 100, mr->lkey};
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.wr.ud.ah = ah;
    wr.wr.ud.remote_qpn = qp;
    wr.wr.ud.remote_qkey = qkey;
    MUST(ibv_post_send(from, &wr, &bad) == 0);
    struct ibv_wc wc;
    int found;
    while ((found = ibv_poll_cq(cq, 1, &wc)) == 0)
        poll(NULL, 0, 1);
    MUST(found == 1 && wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_SEND);
}

static void datagrams(void)
{
    static char bytes[4096];
    open_device();
    MUST((mr = ibv_reg_mr(pd, bytes, sizeof bytes, IBV_ACCESS_LOCAL_WRITE)) != NULL);
    struct ibv_qp *from = ud_qp(), *to = ud_qp();
    moves(from, (struct ibv_qp_attr){.qp_state = IBV_QPS_RTR}, 0);
    moves(from, (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS}, IBV_QP_SQ_PSN);
    struct ibv_ah_attr route = {.is_global = 1, .port_num = 1};
    MUST(ibv_query_gid(context, 1, 0, &route.grh.dgid) == 0);
    struct ibv_ah *ah = ibv_create_ah(pd, &route);
    MUST(ah != NULL);
    // The receiver is in INIT.
    for (int n = 0; n < 100; n++)
        sends(from, ah, to->qp_num, QKEY);
    char sender[64], receiver[64], missing[64];
    snprintf(sender, sizeof sender, "QP %u: lost a datagram", from->qp_num);
    snprintf(missing, sizeof missing, "no UD queue pair %u that receives", to->qp_num);
    snprintf(receiver, sizeof receiver, "QP %u: dropped a datagram", to->qp_num);
    logs(sender);
    MUST(lines_with(missing) == 1 && lines_with(receiver) == 0);
    moves(to, (struct ibv_qp_attr){.qp_state = IBV_QPS_RTR}, 0);
    for (int n = 0; n < 100; n++)
        sends(from, ah, to->qp_num, QKEY);
    logs("no receive is posted");
    for (int n = 0; n < 100; n++)
        sends(from, ah, to->qp_num, QKEY + 1);
    logs("its Q_Key is not that of the queue pair");
    struct ibv_sge sge = {(uintptr_t)bytes, 100, mr->lkey};
    struct ibv_recv_wr wr = {.sg_list = &sge, .num_sge = 1}, *bad;
    MUST(ibv_post_recv(to, &wr, &bad) == 0);
    for (int n = 0; n < 100; n++)
        sends(from, ah, to->qp_num, QKEY);
    logs("with its GRH it has 140 bytes, more than the receive");
    // One line for each reason, however many datagrams are lost.
    MUST(lines_with(receiver) == 3 && lines_with(sender) == 1);
    MUST(!ibv_destroy_qp(from) && !ibv_destroy_qp(to) && !ibv_destroy_ah(ah));
    MUST(!ibv_dereg_mr(mr));
}

static void rejected(void)
{
    events = rdma_create_event_channel();
    struct rdma_cm_id *id;
    MUST(events && !rdma_create_id(events, &id, NULL, RDMA_PS_TCP));
    resolve(id, htons(9));
    struct ibv_qp_init_attr wanted = {.qp_type = IBV_QPT_RC, .cap = {1, 1, 1, 1, 0}};
    MUST(!rdma_create_qp(id, NULL, &wanted) && !rdma_connect(id, NULL));
    MUST(status_of(events, RDMA_CM_EVENT_REJECTED) == 8);
    char line[128];
    snprintf(line, sizeof line, "rnic: rdma_connect: 127.0.0.1:%u to 127.0.0.1:9: rejected: ",
             ntohs(rdma_get_src_port(id)));
    logs(line);
    logs("invalid service ID: no program listens at this port (reason 8)");
    rdma_destroy_qp(id);
    MUST(!rdma_destroy_id(id));
    rdma_destroy_event_channel(events);
}

static void table(void)
{
    open_device();
    struct ibv_port_attr port;
    MUST(!ibv_query_port(context, 1, &port));
    int empty = 0;
    for (int n = 0; n < port.gid_tbl_len; n++) {
        struct ibv_gid_entry entry;
        int error = ibv_query_gid_ex(context, 1, n, &entry, 0);
        MUST(error == 0 || error == ENODATA);
        empty += error != 0;
    }
    MUST(port.gid_tbl_len == 64 && empty > 0);
    MUST(lines_with("GID") == 0);
    // An address handle needs an entry.
    struct ibv_ah_attr route = {.is_global = 1, .port_num = 1, .grh = {.sgid_index = 63}};
    NONE(EINVAL, ibv_create_ah(pd, &route));
    MUST(lines_with("grh.sgid_index 63: ") == 1);
}

static void closes(void)
{
    if (context)
        MUST(!ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd) && !ibv_close_device(context));
}

int main(int argc, char **argv)
{
    MUST(argc == 2);
    read_reasons();
    static const struct {
        const char *name;
        void (*run)(void);
    } all[] = {{"datagrams", datagrams}, {"rejected", rejected}, {"table", table}};
    for (size_t n = 0; n < sizeof all / sizeof *all; n++)
        if (!strcmp(argv[1], all[n].name)) {
            all[n].run();
            closes();
            puts(wrong ? "wrong" : "done");
        }
    return wrong;
}
