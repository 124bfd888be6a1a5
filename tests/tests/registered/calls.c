// System calls that keep addresses or pages of the program: io_uring, AIO, pipes, futexes. They
// must see the same memory as the program, registered or not.

#include "rig.h"

#include <linux/aio_abi.h>
#include <linux/futex.h>
#include <linux/io_uring.h>
#include <pthread.h>

// Omits a part that the kernel refuses. The calling test reports it.
static void leave_out(const char *what)
{
    printf("left out: %s (%s)\n", what, strerror(errno));
    exit(0);
}

static void read_all(int fd, struct run *r)
{
    unsigned char page[PAGE];
    CHECK(pread(fd, page, PAGE, 0) == PAGE);
    note(r, "the file has %lx\n", page_hash(page));
}

static int filled_file(int value)
{
    unsigned char page[PAGE];
    int fd = memfd_create("file", 0);
    memset(page, value, PAGE);
    CHECK(fd >= 0 && write(fd, page, PAGE) == PAGE);
    return fd;
}

// ----- io_uring, by system calls

struct ring {
    int fd;
    unsigned char *sq, *cq;
    size_t sq_length, cq_length, sqes_length;
    struct io_uring_sqe *sqes;
    struct io_uring_params params;
};

static void *ring_part(const struct ring *ring, size_t length, off_t at)
{
    void *part = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, ring->fd, at);
    CHECK(part != MAP_FAILED);
    return part;
}

static struct ring ring_open(void)
{
    struct ring ring = {0};
    ring.fd = syscall(SYS_io_uring_setup, 4, &ring.params);
    if (ring.fd < 0)
        leave_out("io_uring");
    const struct io_uring_params *p = &ring.params;
    ring.sq_length = p->sq_off.array + p->sq_entries * sizeof(unsigned);
    ring.cq_length = p->cq_off.cqes + p->cq_entries * sizeof(struct io_uring_cqe);
    ring.sqes_length = p->sq_entries * sizeof(struct io_uring_sqe);
    ring.sq = ring_part(&ring, ring.sq_length, IORING_OFF_SQ_RING);
    ring.cq = ring_part(&ring, ring.cq_length, IORING_OFF_CQ_RING);
    ring.sqes = ring_part(&ring, ring.sqes_length, IORING_OFF_SQES);
    return ring;
}

static void ring_close(struct ring *ring)
{
    CHECK(!munmap(ring->sq, ring->sq_length) && !munmap(ring->cq, ring->cq_length));
    CHECK(!munmap(ring->sqes, ring->sqes_length) && !close(ring->fd));
}

static unsigned *ring_word(unsigned char *part, unsigned offset)
{
    return (unsigned *)(part + offset);
}

// Runs a request and returns its result.
static int ring_run(struct ring *ring, int opcode, int fd, void *at, unsigned length)
{
    const struct io_uring_params *p = &ring->params;
    unsigned *tail = ring_word(ring->sq, p->sq_off.tail);
    unsigned slot = *tail & *ring_word(ring->sq, p->sq_off.ring_mask);
    ring->sqes[slot] = (struct io_uring_sqe){
        .opcode = opcode, .fd = fd, .addr = (uintptr_t)at, .len = length};
    ring_word(ring->sq, p->sq_off.array)[slot] = slot;
    __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
    CHECK(syscall(SYS_io_uring_enter, ring->fd, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) == 1);
    unsigned *head = ring_word(ring->cq, p->cq_off.head);
    CHECK(__atomic_load_n(ring_word(ring->cq, p->cq_off.tail), __ATOMIC_ACQUIRE) != *head);
    struct io_uring_cqe *cqes = (struct io_uring_cqe *)(ring->cq + p->cq_off.cqes);
    int result = cqes[*head & *ring_word(ring->cq, p->cq_off.ring_mask)].res;
    __atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
    return result;
}

static void fixed_buffer(struct run *r)
{
    struct ring ring = ring_open();
    int input = filled_file(11), output = filled_file(12);
    r->bytes = memory();
    point(r);
    struct iovec all = {r->bytes, LENGTH};
    CHECK(!syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_BUFFERS, &all, 1));
    for (int round = 0; round < 2; round++) {
        point(r);
        unsigned char *at = r->bytes + (3 + 4 * round) * PAGE;
        note(r, "read %d\n", ring_run(&ring, IORING_OP_READ_FIXED, input, at, PAGE));
        observe(r);
        point(r);
        store(r, at - r->bytes, 13 + round, PAGE);
        note(r, "wrote %d\n", ring_run(&ring, IORING_OP_WRITE_FIXED, output, at, PAGE));
        read_all(output, r);
    }
    CHECK(!syscall(SYS_io_uring_register, ring.fd, IORING_UNREGISTER_BUFFERS, NULL, 0));
    point(r);
    observe(r);
    ring_close(&ring);
    close(input);
    close(output);
    unmap(r->bytes);
}

// A read of a pipe waits in the kernel while the memory is registered and deregistered.
static void read_waits(struct run *r)
{
    struct ring ring = ring_open();
    int ends[2];
    CHECK(!pipe(ends));
    r->bytes = memory();
    point(r);
    unsigned *tail = ring_word(ring.sq, ring.params.sq_off.tail);
    ring.sqes[0] = (struct io_uring_sqe){.opcode = IORING_OP_READ, .fd = ends[0], .len = PAGE};
    ring.sqes[0].addr = (uintptr_t)(r->bytes + 6 * PAGE);
    ring_word(ring.sq, ring.params.sq_off.array)[0] = 0;
    __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
    CHECK(syscall(SYS_io_uring_enter, ring.fd, 1, 0, 0, NULL, 0) == 1);
    point(r);
    store(r, 5 * PAGE, 15, PAGE);
    point(r);
    CHECK(write(ends[1], "0123456789abcdef", 16) == 16);
    CHECK(!syscall(SYS_io_uring_enter, ring.fd, 0, 1, IORING_ENTER_GETEVENTS, NULL, 0));
    observe(r);
    point(r);
    observe(r);
    ring_close(&ring);
    CHECK(!close(ends[0]) && !close(ends[1]));
    unmap(r->bytes);
}

static void uring(void)
{
    same_with_and_without(fixed_buffer);
    same_with_and_without(read_waits);
}

// ----- Linux AIO

static long aio_run(aio_context_t context, int opcode, int fd, void *at)
{
    struct iocb request = {.aio_lio_opcode = opcode, .aio_fildes = fd};
    struct iocb *list[] = {&request};
    struct io_event event;
    request.aio_buf = (uintptr_t)at;
    request.aio_nbytes = PAGE;
    CHECK(syscall(SYS_io_submit, context, 1, list) == 1);
    CHECK(syscall(SYS_io_getevents, context, 1, 1, &event, NULL) == 1);
    return event.res;
}

static void aio_context(struct run *r)
{
    aio_context_t context = 0;
    int input = filled_file(11), output = filled_file(12);
    r->bytes = memory();
    point(r);
    if (syscall(SYS_io_setup, 4, &context))
        leave_out("AIO");
    point(r);
    note(r, "read %ld\n", aio_run(context, IOCB_CMD_PREAD, input, r->bytes + PAGE));
    observe(r);
    store(r, PAGE, 13, PAGE);
    point(r);
    note(r, "wrote %ld\n", aio_run(context, IOCB_CMD_PWRITE, output, r->bytes + PAGE));
    read_all(output, r);
    CHECK(!syscall(SYS_io_destroy, context));
    point(r);
    observe(r);
    close(input);
    close(output);
    unmap(r->bytes);
}

static void aio(void)
{
    same_with_and_without(aio_context);
}

// ----- Pages in a pipe, and a thread that sleeps on a word

static void pages_in_a_pipe(struct run *r)
{
    unsigned char page[PAGE];
    int ends[2];
    CHECK(!pipe(ends));
    r->bytes = memory();
    point(r);
    struct iovec lent = {r->bytes + 2 * PAGE, PAGE};
    CHECK(vmsplice(ends[1], &lent, 1, 0) == PAGE);
    point(r);
    store(r, 2 * PAGE, 14, PAGE);
    point(r);
    CHECK(read(ends[0], page, PAGE) == PAGE);
    note(r, "the pipe has %lx\n", page_hash(page));
    CHECK(write(ends[1], page, PAGE) == PAGE);
    CHECK(read(ends[0], r->bytes + 4 * PAGE, PAGE) == PAGE);
    observe(r);
    CHECK(!close(ends[0]) && !close(ends[1]));
    unmap(r->bytes);
}

static void *sleeps_on(void *word)
{
    while (__atomic_load_n((int *)word, __ATOMIC_ACQUIRE) == 0)
        // Not FUTEX_PRIVATE, so the kernel identifies the word by its page.
        syscall(SYS_futex, word, FUTEX_WAIT, 0, NULL, NULL, 0);
    return NULL;
}

static void sleeper(struct run *r)
{
    pthread_t thread;
    r->bytes = memory();
    int *word = (int *)(r->bytes + 9 * PAGE);
    *word = 0;
    point(r);
    CHECK(!pthread_create(&thread, NULL, sleeps_on, word));
    point(r);
    store(r, 10 * PAGE, 1, PAGE);
    point(r);
    __atomic_store_n(word, 1, __ATOMIC_RELEASE);
    syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
    CHECK(!pthread_join(thread, NULL));
    point(r);
    observe(r);
    unmap(r->bytes);
}

static void pages(void)
{
    same_with_and_without(pages_in_a_pipe);
    same_with_and_without(sleeper);
}

// ----- Threads that store without pause

enum { STORERS = 2, ROUNDS = 16 };

static struct storer {
    pthread_t thread;
    unsigned char *bytes;
    uint64_t stored[PAGES];
    _Atomic unsigned long rounds;
} storers[STORERS];
static _Atomic int storing = 1, lost;

static void *store_always(void *of)
{
    struct storer *storer = of;
    while (storing) {
        for (int page = 0; page < PAGES; page++) {
            volatile uint64_t *word = (uint64_t *)(storer->bytes + page * PAGE);
            if (*word != storer->stored[page]) {
                lost = 1;
                return NULL;
            }
            *word = ++storer->stored[page];
        }
        storer->rounds++;
    }
    return NULL;
}

// Waits until both threads have stored to every page.
static void all_store(void)
{
    for (int n = 0; n < STORERS; n++) {
        unsigned long before = storers[n].rounds;
        while (storers[n].rounds < before + 2 && !lost)
            sched_yield();
    }
}

static void threads(void)
{
    unsigned char *bytes = memory();
    memset(bytes, 0, LENGTH);
    for (int n = 0; n < STORERS; n++) {
        storers[n].bytes = bytes + n * sizeof(uint64_t);
        CHECK(!pthread_create(&storers[n].thread, NULL, store_always, &storers[n]));
    }
    for (int round = 0; round < ROUNDS; round++) {
        struct ibv_mr *mr = ibv_reg_mr(pd, bytes, LENGTH, RIGHTS);
        CHECK(mr);
        all_store();
        // The threads store to the first words of the page.
        store_by_rdma(mr, bytes + (round % PAGES) * PAGE + 64, round, PAGE - 64);
        CHECK(!ibv_dereg_mr(mr));
        all_store();
        CHECK(bytes[(round % PAGES) * PAGE + 64] == round);
    }
    storing = 0;
    for (int n = 0; n < STORERS; n++)
        CHECK(!pthread_join(storers[n].thread, NULL));
    CHECK(!lost);
}

int main(int count, char **words)
{
    static const struct part parts[] = {
        {"uring", uring}, {"aio", aio}, {"pages", pages}, {"threads", threads}, {0}};
    return run_part(count, words, parts);
}
