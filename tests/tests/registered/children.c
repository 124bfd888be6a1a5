// Children of a process with registered memory see and change the same memory as if no region
// existed.

#include "rig.h"

#include <linux/sched.h>
#include <spawn.h>

extern char **environ;

static void ended_well(pid_t child)
{
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// A child that hashes its memory when asked, and then overwrites all of it.
static void child(const unsigned char *bytes, int asked, int answers)
{
    char go;
    uint64_t hash[2];
    if (read(asked, &go, 1) != 1)
        _exit(1);
    hash[0] = range_hash(bytes);
    for (int n = 0; n < PAGES; n++)
        if (page_hash(bytes + n * PAGE))
            memset((unsigned char *)bytes + n * PAGE, 99, PAGE);
    hash[1] = range_hash(bytes);
    _exit(write(answers, hash, sizeof hash) != sizeof hash);
}

static void snapshot(struct run *r, pid_t make(void))
{
    int asks[2], answers[2];
    uint64_t hash[2];
    CHECK(!pipe(asks) && !pipe(answers));
    point(r);
    pid_t made = make();
    if (made == 0)
        child(r->bytes, asks[0], answers[1]);
    CHECK(made > 0);
    point(r);
    store(r, 0, 2, LENGTH / 2);
    point(r);
    CHECK(write(asks[1], "", 1) == 1 && read(answers[0], hash, sizeof hash) == sizeof hash);
    note(r, "the child saw %lx and has %lx\n", hash[0], hash[1]);
    ended_well(made);
    store(r, PAGE, 3, PAGE);
    point(r);
    observe(r);
    for (int n = 0; n < 2; n++)
        CHECK(!close(asks[n]) && !close(answers[n]));
}

static pid_t by_clone(void)
{
    return syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL);
}

static pid_t by_clone3(void)
{
    struct clone_args args = {.exit_signal = SIGCHLD};
    return syscall(SYS_clone3, &args, sizeof args);
}

static pid_t by_system_call(void)
{
#ifdef SYS_fork
    return syscall(SYS_fork);
#else
    return by_clone();
#endif
}

static pid_t (*const MAKERS[])(void) = {fork, _Fork, by_clone, by_clone3, by_system_call};
static pid_t (*maker)(void);

static void snapshot_of_memory(struct run *r)
{
    r->bytes = memory();
    snapshot(r, maker);
    unmap(r->bytes);
}

static void snapshot_with_advice(struct run *r)
{
    r->bytes = memory();
    CHECK(!madvise(r->bytes, 4 * PAGE, MADV_WIPEONFORK));
    CHECK(!madvise(r->bytes + 8 * PAGE, 4 * PAGE, MADV_DONTFORK));
    CHECK(!mprotect(r->bytes + 30 * PAGE, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC));
    snapshot(r, maker);
    unmap(r->bytes);
}

// Shared memory stays shared with the child.
static void snapshot_of_shared(struct run *r)
{
    r->bytes = mapped(PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1);
    memset(r->bytes, 7, LENGTH);
    snapshot(r, maker);
    unmap(r->bytes);
}

static void snapshots(void)
{
    for (size_t n = 0; n < sizeof MAKERS / sizeof *MAKERS; n++) {
        maker = MAKERS[n];
        same_with_and_without(snapshot_of_memory);
    }
    maker = fork;
    same_with_and_without(snapshot_with_advice);
    same_with_and_without(snapshot_of_shared);
    maker = by_clone;
    same_with_and_without(snapshot_with_advice);
}

// A child of vfork shares its parent's memory.
static void borrowed_memory(struct run *r)
{
    r->bytes = memory();
    point(r);
    pid_t made = vfork();
    if (made == 0) {
        r->bytes[5 * PAGE] = 9;
        _exit(0);
    }
    ended_well(made);
    store(r, 0, 4, 2 * PAGE);
    point(r);
    made = vfork();
    if (made == 0) {
        execl("/bin/true", "true", NULL);
        _exit(127);
    }
    ended_well(made);
    char *arguments[] = {"true", NULL};
    CHECK(!posix_spawn(&made, "/bin/true", NULL, NULL, arguments, environ));
    ended_well(made);
    point(r);
    observe(r);
    unmap(r->bytes);
}

static void borrowed(void)
{
    same_with_and_without(borrowed_memory);
}

// A child can use verbs itself. Its attempts to use its parent's objects change nothing.
static void own_device(void)
{
    unsigned char *bytes = memory();
    struct ibv_mr *mr = ibv_reg_mr(pd, bytes, LENGTH, RIGHTS);
    CHECK(mr);
    for (size_t n = 0; n < sizeof MAKERS / sizeof *MAKERS; n++) {
        pid_t made = MAKERS[n]();
        if (made == 0) {
            ibv_dereg_mr(mr);
            // In a child, the C library is fully usable only after fork().
            if (MAKERS[n] == fork) {
                rig_open();
                struct ibv_mr *own = ibv_reg_mr(pd, memory(), LENGTH, RIGHTS);
                CHECK(own);
                store_by_rdma(own, own->addr, 5, LENGTH);
                CHECK(((unsigned char *)own->addr)[LENGTH - 1] == 5);
            }
            _exit(0);
        }
        ended_well(made);
        for (int kind = 0; kind < 3; kind++)
            store_by_rdma(mr, bytes, 20 + n + kind, LENGTH);
        CHECK(bytes[0] == 22 + (int)n && bytes[LENGTH - 1] == bytes[0]);
    }
    CHECK(!ibv_dereg_mr(mr));
}

int main(int count, char **words)
{
    static const struct part parts[] = {
        {"snapshots", snapshots}, {"borrowed", borrowed}, {"own_device", own_device}, {0}};
    return run_part(count, words, parts);
}
