// Mappings of registered memory: protection, advice, locks, files, moves and size are the same as
// without a region.

#include "rig.h"

static void fails(struct ibv_mr *mr, int error)
{
    int found = errno;
    CHECK(!mr);
    errno = found;
    CHECK(found == error);
}

static unsigned char *file_memory(int flags, int rights, int fd)
{
    unsigned char fill[PAGE];
    memset(fill, 7, PAGE);
    CHECK(fd >= 0);
    for (int n = 0; n < PAGES; n++)
        CHECK(pwrite(fd, fill, PAGE, n * PAGE) == PAGE);
    return mapped(rights, flags, fd);
}

// ----- Protection

static void protection(struct run *r)
{
    r->bytes = memory();
    CHECK(!mprotect(r->bytes + 20 * PAGE, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC));
    point(r);
    observe(r);
    CHECK(!mprotect(r->bytes + 2 * PAGE, PAGE, PROT_NONE));
    CHECK(!mprotect(r->bytes + 4 * PAGE, 2 * PAGE, PROT_READ));
    point_of_end(r);
    store(r, 8 * PAGE, 3, 4 * PAGE);
    // System calls that read and write the pages.
    int zero = open("/dev/zero", O_RDONLY), ends[2];
    CHECK(zero >= 0 && !pipe(ends));
    for (int n = 0; n < 8; n++) {
        ssize_t into = read(zero, r->bytes + n * PAGE, 64);
        note(r, "%d: %zd %zd\n", n, into, write(ends[1], r->bytes + n * PAGE, 64));
    }
    CHECK(!close(zero) && !close(ends[0]) && !close(ends[1]));
    observe(r);
    point_of_end(r);
    observe(r);
    CHECK(!mprotect(r->bytes, LENGTH, PROT_READ | PROT_WRITE));
    observe(r);
    point(r);
    unmap(r->bytes);
}

// Memory that is read-only for the program, registered for reading only.
static void read_only(struct run *r)
{
    r->rights = IBV_ACCESS_REMOTE_READ;
    r->bytes = memory();
    CHECK(!mprotect(r->bytes, LENGTH / 2, PROT_READ));
    point(r);
    if (r->mr) {
        struct ibv_sge to = element(staging, LENGTH, staging_mr);
        CHECK(!run_request(0, IBV_WR_RDMA_READ, to, r->bytes, r->mr->rkey));
        CHECK(!memcmp(staging, r->bytes, LENGTH));
        struct ibv_sge from = element(r->bytes, LENGTH, r->mr);
        CHECK(!run_request(0, IBV_WR_RDMA_WRITE, from, staging, staging_mr->rkey));
    }
    observe(r);
    point(r);
    observe(r);
    unmap(r->bytes);
}

// Pages without the required access are refused, and nothing changes.
static void refusals(void)
{
    static const int writing[] = {
        IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_LOCAL_WRITE,
        IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_MW_BIND,
        IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_WRITE};
    struct run before = {.observed = calloc(1, ROOM)}, after = {.observed = calloc(1, ROOM)};
    unsigned char *bytes = memory();
    CHECK(!mprotect(bytes + 2 * PAGE, PAGE, PROT_READ));
    CHECK(!mprotect(bytes + 4 * PAGE, PAGE, PROT_NONE));
    CHECK(!munmap(bytes + 6 * PAGE, PAGE));
    observe_at(&before, bytes);
    for (size_t n = 0; n < sizeof writing / sizeof *writing; n++)
        fails(ibv_reg_mr(pd, bytes + PAGE, 2 * PAGE, writing[n]), EFAULT);
    for (int page = 4; page <= 6; page += 2) {
        fails(ibv_reg_mr(pd, bytes + (page - 1) * PAGE, 2 * PAGE, 0), EFAULT);
        fails(ibv_reg_mr(pd, bytes + page * PAGE, 1, IBV_ACCESS_REMOTE_READ), EFAULT);
        fails(ibv_reg_mr(pd, bytes + page * PAGE, PAGE, RIGHTS), EFAULT);
    }
    observe_at(&after, bytes);
    CHECK(!strcmp(before.observed, after.observed));
    int fd = memfd_create("file", 0);
    file_memory(MAP_SHARED, PROT_READ | PROT_WRITE, fd);
    unsigned char *shared = mapped(PROT_READ, MAP_SHARED, fd);
    fails(ibv_reg_mr(pd, shared, LENGTH, RIGHTS), EFAULT);
    CHECK(ibv_reg_mr(pd, shared, LENGTH, IBV_ACCESS_REMOTE_READ));
}

// Protection that changes after the registration does not affect the device, as with an adapter
// that has pinned the pages. A missing page is an error of the request.
static void later_protection(void)
{
    unsigned char *bytes = memory();
    CHECK(!mprotect(bytes, PAGE, PROT_READ));
    int own = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
    CHECK(own >= 0);
    if (pwrite(own, "", 1, (uintptr_t)bytes) != 1) {
        printf("left out: proc_mem.force_override forbids it (%s)\n", strerror(errno));
        exit(0);
    }
    CHECK(!mprotect(bytes, PAGE, PROT_READ | PROT_WRITE));
    struct ibv_mr *mr = ibv_reg_mr(pd, bytes, LENGTH, RIGHTS);
    CHECK(mr);
    CHECK(!mprotect(bytes, PAGE, PROT_READ));
    CHECK(!mprotect(bytes + PAGE, PAGE, PROT_NONE));
    for (int kind = 0; kind < 3; kind++)
        store_by_rdma(mr, bytes, 30 + kind, 2 * PAGE);
    CHECK(bytes[0] == 32 && page_hash(bytes + PAGE) == 0);
    // Small messages take another path.
    struct ibv_sge small = element(bytes + PAGE, 16, mr);
    CHECK(!run_request(0, IBV_WR_RDMA_WRITE, small, staging, staging_mr->rkey));
    CHECK(staging[0] == 32 && staging[15] == 32);
    CHECK(!mprotect(bytes + PAGE, PAGE, PROT_READ));
    CHECK(bytes[PAGE] == 32);
    CHECK(!munmap(bytes + 2 * PAGE, PAGE));
    small = element(bytes + 2 * PAGE, 16, mr);
    CHECK(run_request(0, IBV_WR_RDMA_WRITE, small, staging, staging_mr->rkey) ==
          IBV_WC_LOC_PROT_ERR);
    CHECK(!ibv_dereg_mr(mr));
}

// ----- Advice, locks, files, moves

static void advice(struct run *r)
{
    static const int wanted[] = {MADV_NOHUGEPAGE, MADV_DONTDUMP, MADV_RANDOM, MADV_MERGEABLE,
                                 MADV_COLD, MADV_WIPEONFORK, MADV_DONTFORK};
    r->bytes = memory();
    for (size_t n = 0; n < sizeof wanted / sizeof *wanted; n++)
        note(r, "%d\n", madvise(r->bytes + (16 + 2 * n) * PAGE, PAGE, wanted[n]));
    point(r);
    CHECK(!madvise(r->bytes, 2 * PAGE, MADV_DONTNEED));
    observe(r);
    point(r);
    store(r, PAGE, 4, 2 * PAGE);
    observe(r);
    CHECK(!madvise(r->bytes + PAGE, PAGE, MADV_DONTNEED));
    observe(r);
    // Later data stays.
    CHECK(!madvise(r->bytes + 8 * PAGE, PAGE, MADV_FREE));
    store(r, 8 * PAGE, 5, PAGE);
    point(r);
    observe(r);
    CHECK(!madvise(r->bytes, LENGTH / 2, MADV_DONTNEED));
    observe(r);
    point(r);
    unmap(r->bytes);
}

static void locks(struct run *r)
{
    r->bytes = memory();
    CHECK(!mlock(r->bytes, 2 * PAGE));
    point(r);
    observe(r);
    CHECK(!mlock2(r->bytes + 4 * PAGE, PAGE, MLOCK_ONFAULT));
    store(r, 4 * PAGE, 6, PAGE);
    CHECK(!munlock(r->bytes + PAGE, PAGE));
    point(r);
    observe(r);
    CHECK(!munlock(r->bytes, LENGTH));
    observe(r);
    point(r);
    unmap(r->bytes);
}

static void file(struct run *r, int flags)
{
    unsigned char page[PAGE];
    int fd = memfd_create("file", 0);
    r->bytes = file_memory(flags, PROT_READ | PROT_WRITE, fd);
    point(r);
    observe(r);
    store(r, 0, 8, 2 * PAGE);
    point(r);
    memset(page, 9, PAGE);
    CHECK(pwrite(fd, page, PAGE, PAGE) == PAGE && pwrite(fd, page, PAGE, 5 * PAGE) == PAGE);
    observe(r);
    CHECK(!madvise(r->bytes, LENGTH, MADV_DONTNEED));
    point(r);
    observe(r);
    for (int n = 0; n < PAGES; n++) {
        CHECK(pread(fd, page, PAGE, n * PAGE) == PAGE);
        note(r, "%lx ", page_hash(page));
    }
    unmap(r->bytes);
    close(fd);
}

static void private_file(struct run *r)
{
    file(r, MAP_PRIVATE);
}

static void shared_file(struct run *r)
{
    file(r, MAP_SHARED);
}

// Half of the memory moves, another mapping replaces a part, and the rest shrinks.
static void moves(struct run *r)
{
    r->bytes = memory();
    unsigned char *room = memory();
    point(r);
    store(r, 0, 8, LENGTH);
    void *half = r->bytes + LENGTH / 2;
    CHECK(mremap(half, LENGTH / 2, LENGTH / 2, MREMAP_MAYMOVE | MREMAP_FIXED, room) == room);
    observe(r);
    observe_at(r, room);
    // The region ends with its memory.
    if (r->mr) {
        struct ibv_sge from = element(staging, PAGE, staging_mr);
        CHECK(run_request(0, IBV_WR_RDMA_WRITE, from, half, r->mr->rkey) != IBV_WC_SUCCESS);
        for (int n = 0; n < 2; n++)
            CHECK(!ibv_destroy_qp(qps[n]));
        struct ibv_wc wc;
        while (ibv_poll_cq(cq, 1, &wc) > 0) {
        }
        rig_queue_pairs();
    }
    CHECK(mmap(half, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
               0) == half);
    store(r, LENGTH / 2, 5, PAGE);
    CHECK(mremap(r->bytes, 4 * PAGE, 2 * PAGE, 0) == r->bytes);
    observe(r);
    observe_at(r, room);
    // At a later point, all of the range must be mapped to be registered.
    CHECK(mmap(r->bytes, LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED,
               -1, 0) == r->bytes);
    point(r);
    observe(r);
    observe_at(r, room);
    unmap(r->bytes);
    unmap(room);
}

// A heap block grows, also by mremap() in the allocator.
static void grows(struct run *r)
{
    unsigned char *block = malloc(LENGTH + 8 * PAGE);
    CHECK(block);
    memset(block, 7, LENGTH + 8 * PAGE);
    r->bytes = block + PAGE - (uintptr_t)block % PAGE;
    point(r);
    store(r, 0, 8, PAGE);
    size_t start = r->bytes - block;
    block = realloc(block, 64 * LENGTH);
    CHECK(block);
    if (r->mr) {
        // The memory may have moved. Register it at its new address.
        CHECK(!ibv_dereg_mr(r->mr));
        r->bytes = block + start;
        CHECK(r->mr = ibv_reg_mr(pd, r->bytes, LENGTH, RIGHTS));
    }
    r->bytes = block + start;
    store(r, PAGE, 9, PAGE);
    point(r);
    for (int n = 0; n < PAGES; n++)
        note(r, "%lx ", page_hash(block + start + n * PAGE));
    free(block);
}

static void page_scenarios(void)
{
    same_with_and_without(protection);
    same_with_and_without(read_only);
    same_with_and_without(advice);
    same_with_and_without(locks);
    same_with_and_without(private_file);
    same_with_and_without(shared_file);
    same_with_and_without(moves);
    same_with_and_without(grows);
}

// ----- Size

// Returns a memory counter of this process in KiB.
static long status_kib(const char *name)
{
    char line[256];
    long kib = -1;
    FILE *status = fopen("/proc/self/status", "r");
    CHECK(status);
    while (fgets(line, sizeof line, status))
        if (!strncmp(line, name, strlen(name)))
            kib = strtol(line + strlen(name) + 1, NULL, 10);
    fclose(status);
    CHECK(kib >= 0);
    return kib;
}

// Registers 600 MiB, more than half of the cgroup's limit, without locking any.
static void large(void)
{
    const size_t length = 600UL << 20;
    const struct rlimit none = {0, 0};
    CHECK(!setrlimit(RLIMIT_MEMLOCK, &none));
    for (int touched = 0; touched < 2; touched++) {
        unsigned char *bytes =
            mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(bytes != MAP_FAILED);
        if (touched)
            memset(bytes, 7, length);
        long private_kib = status_kib("RssAnon"), shared_kib = status_kib("RssShmem");
        struct ibv_mr *mr = ibv_reg_mr(pd, bytes, length, RIGHTS);
        CHECK(mr);
        store_by_rdma(mr, bytes + length - LENGTH, 9, LENGTH);
        CHECK(bytes[length - 1] == 9);
        CHECK(status_kib("RssAnon") - private_kib < 16 << 10);
        CHECK(status_kib("RssShmem") - shared_kib < 16 << 10);
        CHECK(!ibv_dereg_mr(mr));
        CHECK(status_kib("RssAnon") - private_kib < 16 << 10);
        CHECK(status_kib("RssShmem") - shared_kib < 16 << 10);
        CHECK(!munmap(bytes, length));
    }
}

int main(int count, char **words)
{
    static const struct part parts[] = {{"scenarios", page_scenarios},
                                        {"refusals", refusals},
                                        {"later_protection", later_protection},
                                        {"large", large},
                                        {0}};
    return run_part(count, words, parts);
}
