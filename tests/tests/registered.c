// Registers memory of its own and does with it what programs do: forks, starts others, has threads,
// gives it back. Each part is named on the command line, and says "done" if all was as it should be.

#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

struct ibv_device;
struct ibv_context;
struct ibv_pd;
struct ibv_mr;
struct ibv_device **ibv_get_device_list(int *count);
struct ibv_context *ibv_open_device(struct ibv_device *device);
struct ibv_pd *ibv_alloc_pd(struct ibv_context *context);
struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *address, size_t length, int access);
int ibv_dereg_mr(struct ibv_mr *mr);

extern char **environ;

enum { LENGTH = 1 << 20, RIGHTS = 1 | 2 | 4 };

static void check(int holds, const char *what)
{
    if (!holds) {
        printf("not so: %s\n", what);
        exit(1);
    }
}

static struct ibv_pd *domain(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    check(list && list[0], "there is a device");
    struct ibv_context *context = ibv_open_device(list[0]);
    check(context != NULL, "it opens");
    struct ibv_pd *pd = ibv_alloc_pd(context);
    check(pd != NULL, "it has a domain");
    return pd;
}

// Whether a page lies in the library's file.
static int shared(void *page)
{
    char line[512];
    int found = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    check(maps != NULL, "maps can be read");
    while (fgets(line, sizeof line, maps)) {
        unsigned long start, end;
        if (sscanf(line, "%lx-%lx", &start, &end) == 2 && (uintptr_t)page >= start &&
            (uintptr_t)page < end)
            found = strstr(line, "rnic-adopted") && strstr(line, " rw-s ");
    }
    fclose(maps);
    return found;
}

static int all(const unsigned char *bytes, unsigned char value)
{
    for (size_t n = 0; n < LENGTH; n++)
        if (bytes[n] != value)
            return 0;
    return 1;
}

static unsigned char *memory(void)
{
    unsigned char *bytes = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                                -1, 0);
    check(bytes != MAP_FAILED, "there is memory");
    memset(bytes, 7, LENGTH);
    return bytes;
}

static void ended_well(pid_t child)
{
    int status;
    check(child > 0 && waitpid(child, &status, 0) == child, "the child ends");
    check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ends well");
}

static void *idle(void *until)
{
    pthread_mutex_lock(until);
    pthread_mutex_unlock(until);
    return NULL;
}

// A block of the heap is registered between others, which the allocator and libraries use.
static void heap_holds(struct ibv_pd *pd, size_t length)
{
    enum { BLOCKS = 64 };
    unsigned char *block = malloc(length), *others[BLOCKS];
    check(block != NULL, "there is a block");
    memset(block, 1, length);
    struct ibv_mr *mr = ibv_reg_mr(pd, block, length, RIGHTS);
    check(mr != NULL, "a block of the heap is registered");
    for (size_t n = 0; n < BLOCKS; n++) {
        others[n] = malloc(24 + n * 40);
        check(others[n] != NULL, "there are others");
        memset(others[n], 2, 24 + n * 40);
    }
    check(!ibv_dereg_mr(mr), "it is taken back");
    free(block);
    for (size_t n = 0; n < BLOCKS; n++) {
        check(others[n][0] == 2 && others[n][23 + n * 40] == 2, "others hold what they held");
        free(others[n]);
    }
}

// Small regions are shared if they are whole pages, and only a few of them.
static void few_small_ones(struct ibv_pd *pd)
{
    enum { PAGE = 4096, FEW = 32, MORE = 8 };
    unsigned char *bytes = memory();
    struct ibv_mr *mrs[FEW + MORE];
    struct ibv_mr *part = ibv_reg_mr(pd, bytes + LENGTH - PAGE, 8, RIGHTS);
    check(part && !shared(bytes + LENGTH - PAGE), "a part of a page stays private");
    check(!ibv_dereg_mr(part), "it is taken back");
    for (int n = 0; n < FEW + MORE; n++) {
        // Every other page, so that none borders on another.
        mrs[n] = ibv_reg_mr(pd, bytes + 2 * n * PAGE, PAGE, RIGHTS);
        check(mrs[n] != NULL, "a page is registered");
        check(shared(bytes + 2 * n * PAGE) == (n < FEW), "as many as are few are shared");
    }
    check(all(bytes, 7), "all hold what they held");
    check(!ibv_dereg_mr(mrs[0]) && !shared(bytes), "a page is private again");
    check(!ibv_dereg_mr(mrs[FEW]), "one of the others is taken back");
    mrs[FEW] = ibv_reg_mr(pd, bytes + 2 * FEW * PAGE, PAGE, RIGHTS);
    check(mrs[FEW] && shared(bytes + 2 * FEW * PAGE), "there is room for another one");
    for (int n = 1; n < FEW + MORE; n++)
        check(!ibv_dereg_mr(mrs[n]), "a page is taken back");
    check(all(bytes, 7), "all hold what they held, private again");
    munmap(bytes, LENGTH);
}

// Threads that store without pause, each into its own word of every page.
enum { STORERS = 2, PARTS = 32, PAGES = PARTS * LENGTH / 4096 };
static _Atomic int storing = 1, rounds, lost;
struct storer {
    pthread_t thread;
    unsigned char *bytes;
    uint64_t stored[PAGES];
};

static void *store(void *of)
{
    struct storer *storer = of;
    while (storing) {
        for (size_t page = 0; page < PAGES; page++) {
            volatile uint64_t *word = (uint64_t *)(storer->bytes + page * 4096);
            if (*word != storer->stored[page]) {
                lost = 1;
                return "a store is lost";
            }
            *word = ++storer->stored[page];
        }
        rounds++;
    }
    return NULL;
}

static void beside_stores(struct ibv_pd *pd)
{
    static struct storer storers[STORERS];
    unsigned char *bytes = mmap(NULL, PARTS * LENGTH, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(bytes != MAP_FAILED, "there is memory");
    memset(bytes, 0, PARTS * LENGTH);
    for (size_t n = 0; n < STORERS; n++) {
        storers[n].bytes = bytes + n * sizeof(uint64_t);
        check(!pthread_create(&storers[n].thread, NULL, store, &storers[n]), "a thread starts");
    }
    for (size_t n = 0; n < PARTS; n++) {
        // Every page is stored to before, in between and afterwards.
        for (int before = rounds; !lost && rounds < before + STORERS;)
            sched_yield();
        struct ibv_mr *mr = ibv_reg_mr(pd, bytes + n * LENGTH, LENGTH, RIGHTS);
        check(mr != NULL && shared(bytes + n * LENGTH), "memory is shared beside threads");
        for (int before = rounds; !lost && rounds < before + STORERS;)
            sched_yield();
        check(!ibv_dereg_mr(mr) && !shared(bytes + n * LENGTH), "it is taken back");
    }
    for (int before = rounds; !lost && rounds < before + STORERS;)
        sched_yield();
    storing = 0;
    for (size_t n = 0; n < STORERS; n++) {
        void *wrong;
        check(!pthread_join(storers[n].thread, &wrong), "it ends");
        check(!wrong, wrong ? wrong : "no store is lost");
    }
}

// A block of a thread's own arena, with another object's bytes in front of it and behind it.
static void *registers_its_block(void *of)
{
    enum { BLOCK = 100 * 1024 };
    unsigned char *block = malloc(BLOCK);
    check(block != NULL && (uintptr_t)block % 4096 != 0, "there is a block");
    memset(block, 1, BLOCK);
    struct ibv_mr *mr = ibv_reg_mr(of, block, BLOCK, RIGHTS);
    check(mr != NULL && !shared(block) && !shared(block + BLOCK), "it stays where it lies");
    check(!ibv_dereg_mr(mr), "it is taken back");
    free(block);
    return NULL;
}

// The stack of a coroutine, in memory that it registers itself.
static ucontext_t on_stack, off_stack;
static struct ibv_pd *domain_of_stack;
static unsigned char *stack;

static void register_own_stack(void)
{
    struct ibv_mr *mr = ibv_reg_mr(domain_of_stack, stack, LENGTH, RIGHTS);
    check(mr != NULL, "a stack is registered by who runs on it");
    check(!shared(stack), "it stays private");
    check(!ibv_dereg_mr(mr), "it is taken back");
}

int main(int count, char **words)
{
    check(count == 2, "one part is named");
    const char *part = words[1];
    struct ibv_pd *pd = domain();
    unsigned char *bytes = memory();

    if (!strcmp(part, "small")) {
        few_small_ones(pd);
        puts("done");
        return 0;
    }
    if (!strcmp(part, "heap")) {
        for (size_t n = 0; n < 50; n++)
            heap_holds(pd, 70000 + n * 16);
        puts("done");
        return 0;
    }
    if (!strcmp(part, "stack")) {
        check(!getcontext(&on_stack), "there is a context");
        on_stack.uc_stack.ss_sp = bytes;
        on_stack.uc_stack.ss_size = LENGTH;
        on_stack.uc_link = &off_stack;
        makecontext(&on_stack, (void (*)(void))register_own_stack, 0);
        domain_of_stack = pd;
        stack = bytes;
        check(!swapcontext(&off_stack, &on_stack), "it runs");
        puts("done");
        return 0;
    }
    if (!strcmp(part, "reached")) {
        // Peers write through the first, at any time.
        unsigned char *untouched = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE,
                                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        check(untouched != MAP_FAILED, "there is more memory");
        struct ibv_mr *first = ibv_reg_mr(pd, untouched, LENGTH, RIGHTS);
        memset(untouched, 7, LENGTH);
        struct ibv_mr *second = ibv_reg_mr(pd, untouched, LENGTH, RIGHTS);
        check(first && second && !shared(untouched), "what is registered stays where it is");
        check(!ibv_dereg_mr(first) && !ibv_dereg_mr(second), "both are taken back");
        first = ibv_reg_mr(pd, untouched + 65536, LENGTH / 2, RIGHTS);
        check(first && shared(untouched + 65536), "a part is shared");
        second = ibv_reg_mr(pd, untouched, LENGTH, RIGHTS);
        check(second != NULL, "all of it is registered");
        check(!ibv_dereg_mr(first), "the part is taken back");
        check(!shared(untouched + 65536) && all(untouched, 7), "it holds what it held");
        pid_t child = fork();
        if (child == 0) {
            memset(untouched, 9, LENGTH);
            _exit(0);
        }
        ended_well(child);
        check(all(untouched, 7), "the parent has not what the child wrote");
        check(!ibv_dereg_mr(second), "the rest is taken back");
        puts("done");
        return 0;
    }
    if (!strcmp(part, "stored")) {
        beside_stores(pd);
        puts("done");
        return 0;
    }
    if (!strcmp(part, "arena")) {
        pthread_t thread;
        check(!pthread_create(&thread, NULL, registers_its_block, pd), "a thread starts");
        check(!pthread_join(thread, NULL), "it ends");
        puts("done");
        return 0;
    }
    if (!strcmp(part, "threads")) {
        pthread_mutex_t until = PTHREAD_MUTEX_INITIALIZER;
        pthread_t thread;
        pthread_mutex_lock(&until);
        check(!pthread_create(&thread, NULL, idle, &until), "a thread starts");
        struct ibv_mr *mr = ibv_reg_mr(pd, bytes, LENGTH, RIGHTS);
        check(mr != NULL, "memory is registered beside a thread");
        check(!shared(bytes), "it stays private");
        check(!ibv_dereg_mr(mr), "it is taken back");
        pthread_mutex_unlock(&until);
        pthread_join(thread, NULL);
        puts("done");
        return 0;
    }

    struct ibv_mr *mr = ibv_reg_mr(pd, bytes, LENGTH, RIGHTS);
    check(mr != NULL, "memory is registered");
    check(shared(bytes), "it is shared");
    check(all(bytes, 7), "it holds what it held");

    if (!strcmp(part, "back")) {
        struct ibv_mr *part_of_it = ibv_reg_mr(pd, bytes + 4096, 2 * 65536, RIGHTS);
        check(part_of_it != NULL, "a part of it is registered as well");
        memset(bytes, 8, LENGTH);
        check(!ibv_dereg_mr(mr), "the first is taken back");
        check(shared(bytes), "it is shared for the second");
        check(!ibv_dereg_mr(part_of_it), "the second is taken back");
        check(!shared(bytes), "it is private again");
        check(all(bytes, 8), "it holds what was written");
        // What an allocator counts on.
        check(!madvise(bytes, LENGTH, MADV_DONTNEED), "it can be given up");
        check(all(bytes, 0), "it is zero then");
        unsigned char *untouched = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE,
                                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        check(untouched != MAP_FAILED, "there is more memory");
        mr = ibv_reg_mr(pd, untouched, LENGTH, RIGHTS);
        check(mr != NULL && !shared(untouched), "untouched memory is registered as it lies");
        check(!ibv_dereg_mr(mr), "and taken back");
    } else if (!strcmp(part, "unmapped")) {
        check(!munmap(bytes, LENGTH), "it can be unmapped");
        unsigned char *other = mmap(bytes, LENGTH, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        check(other == bytes, "something else can take its place");
        memset(other, 9, LENGTH);
        check(!ibv_dereg_mr(mr), "the region is taken back");
        check(all(other, 9), "what took its place is left alone");
    } else if (!strcmp(part, "fork")) {
        pid_t child = fork();
        if (child == 0) {
            check(all(bytes, 7), "the child sees what was there");
            check(!shared(bytes), "the child has it for itself");
            memset(bytes, 9, LENGTH);
            struct ibv_mr *own = ibv_reg_mr(domain(), memory(), LENGTH, RIGHTS);
            check(own != NULL, "the child has a device of its own");
            // It may try to take its parent's back, as destructors do; what comes of it is
            // nothing.
            ibv_dereg_mr(mr);
            _exit(0);
        }
        ended_well(child);
        check(all(bytes, 7), "the parent has not what the child wrote");
        check(shared(bytes), "the parent's is shared still");
        check(!ibv_dereg_mr(mr), "it is taken back");
        check(all(bytes, 7), "it holds what it held after that");
    } else if (!strcmp(part, "replaced")) {
        // Half of it is given up and something else comes there, the other half moves.
        unsigned char *kept = bytes + LENGTH / 2, *room = memory();
        check(mremap(kept, LENGTH / 2, LENGTH / 2, MREMAP_MAYMOVE | MREMAP_FIXED, room) == room,
              "half of it moves");
        check(mmap(bytes, LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED,
                   -1, 0) == bytes, "something else takes its place");
        memset(bytes, 5, LENGTH);
        pid_t child = fork();
        if (child == 0) {
            check(all(bytes, 5), "the child has what is there now");
            check(all(room, 7), "the child has what moved");
            memset(room, 9, LENGTH);
            _exit(0);
        }
        ended_well(child);
        check(all(room, 7), "the parent has not what the child wrote");
        check(!ibv_dereg_mr(mr), "it is taken back");
    } else if (!strcmp(part, "beside")) {
        size_t length = 4 * LENGTH;
        unsigned char *block = malloc(length);
        check(block != NULL, "there is a block");
        memset(block, 7, length);
        struct ibv_mr *of_block = ibv_reg_mr(pd, block, length, RIGHTS);
        check(of_block != NULL && shared(block), "it is registered");
        pthread_mutex_t until = PTHREAD_MUTEX_INITIALIZER;
        pthread_t thread;
        pthread_mutex_lock(&until);
        check(!pthread_create(&thread, NULL, idle, &until), "a thread starts");
        check(!ibv_dereg_mr(mr) && !ibv_dereg_mr(of_block), "both are taken back beside it");
        check(all(bytes, 7) && all(block, 7), "they hold what they held");
        pid_t child = fork();
        if (child == 0) {
            memset(bytes, 9, LENGTH);
            _exit(0);
        }
        ended_well(child);
        check(all(bytes, 7), "the parent has not what the child wrote");
        block = realloc(block, 2 * length);
        check(block != NULL && all(block, 7), "a block can grow");
        memset(block, 8, 2 * length);
        free(block);
        pthread_mutex_unlock(&until);
        pthread_join(thread, NULL);
    } else if (!strcmp(part, "start")) {
        pid_t child = vfork();
        if (child == 0) {
            execl("/bin/true", "true", NULL);
            _exit(127);
        }
        ended_well(child);
        char *arguments[] = {"true", NULL};
        check(!posix_spawn(&child, "/bin/true", NULL, NULL, arguments, environ), "it starts");
        ended_well(child);
        check(shared(bytes) && all(bytes, 7), "nothing has changed for it");
        check(!ibv_dereg_mr(mr), "it is taken back");
    } else {
        check(0, "the part is known");
    }
    puts("done");
    return 0;
}
