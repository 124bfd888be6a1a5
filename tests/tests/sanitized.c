// A small program of the verbs API for sanitizers and valgrind: a thread waits for messages from
// the main thread, and both use heap memory. An argument selects one fault.

#include "registered/rig.h"

#include <pthread.h>

enum { MESSAGES = 8, SIZE = 1000 };

static unsigned char *inbox, *outbox;
static struct ibv_mr *inbox_mr, *outbox_mr;
static int taken; // by the receiving thread

static void post_receive(int slot)
{
    struct ibv_sge to = element(inbox + slot * SIZE, SIZE, inbox_mr);
    struct ibv_recv_wr wr = {.wr_id = slot, .sg_list = &to, .num_sge = 1}, *bad;
    CHECK(!ibv_post_recv(qps[1], &wr, &bad));
}

// Takes the completions of both QPs.
static void *receive(void *none)
{
    for (int sent = 0, received = 0; sent < MESSAGES || received < MESSAGES; taken++) {
        struct ibv_wc wc = completion();
        CHECK(wc.status == IBV_WC_SUCCESS);
        if (wc.opcode & IBV_WC_RECV) {
            CHECK(wc.byte_len == SIZE && inbox[wc.wr_id * SIZE] == wc.wr_id + 1);
            received++;
        } else {
            sent++;
        }
    }
    return none;
}

static void send_all(void)
{
    for (int n = 0; n < MESSAGES; n++) {
        memset(outbox + n * SIZE, n + 1, SIZE);
        struct ibv_sge from = element(outbox + n * SIZE, SIZE, outbox_mr);
        struct ibv_send_wr wr = {.sg_list = &from, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;
        wr.send_flags = IBV_SEND_SIGNALED;
        CHECK(!ibv_post_send(qps[0], &wr, &bad));
    }
}

int main(int count, char **words)
{
    const char *fault = count > 1 ? words[1] : "";
    rig_open();
    CHECK(inbox = calloc(MESSAGES, SIZE));
    CHECK(outbox = calloc(MESSAGES, SIZE));
    CHECK(inbox_mr = ibv_reg_mr(pd, inbox, MESSAGES * SIZE, RIGHTS));
    CHECK(outbox_mr = ibv_reg_mr(pd, outbox, MESSAGES * SIZE, RIGHTS));
    for (int n = 0; n < MESSAGES; n++)
        post_receive(n);
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, receive, NULL));
    send_all();
    if (!strcmp(fault, "race"))
        taken++;
    CHECK(!pthread_join(thread, NULL));
    if (!strcmp(fault, "overflow"))
        outbox[MESSAGES * SIZE] = 1;
    CHECK(!ibv_dereg_mr(inbox_mr) && !ibv_dereg_mr(outbox_mr) && !ibv_dereg_mr(staging_mr));
    for (int n = 0; n < 2; n++)
        CHECK(!ibv_destroy_qp(qps[n]));
    struct ibv_context *context = pd->context;
    CHECK(!ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd) && !ibv_close_device(context));
    free(inbox);
    free(outbox);
    puts("done");
    return 0;
}
