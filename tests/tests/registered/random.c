// Random mappings, regions and operations. Each operation runs on two arenas: RDMA stores to
// regions in the first one, and the processor stores to the second one, which has no regions.
// Contents, rights, advice and memory in use must always be equal.

#include "rig.h"

enum { ARENA = PAGES, REGIONS = 8, OPERATIONS = 500, KINDS = 5, ALIGNMENT = 1 << 20 };

static unsigned char *arenas[2];
static int files[2][KINDS];
static struct region {
    struct ibv_mr *mr;
    size_t first, pages;
    int writes;
} regions[REGIONS];
// Rights of the program for each page.
static int rights_of[ARENA];
static uint64_t seed;

static size_t below(size_t end)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (seed >> 11) % end;
}

static unsigned char *place(int arena, size_t page)
{
    return arenas[arena] + page * PAGE;
}

static int all_have(size_t first, size_t pages, int rights)
{
    for (size_t n = first; n < first + pages; n++)
        if ((rights_of[n] & rights) != rights)
            return 0;
    return 1;
}

static void map_some(size_t first, size_t pages)
{
    static const int flags[KINDS] = {MAP_PRIVATE | MAP_ANONYMOUS, MAP_PRIVATE | MAP_ANONYMOUS,
                                     MAP_SHARED | MAP_ANONYMOUS, MAP_PRIVATE, MAP_SHARED};
    int kind = below(KINDS);
    for (int arena = 0; arena < 2; arena++) {
        int fd = kind >= 3 ? files[arena][kind] : -1;
        void *at = place(arena, first);
        CHECK(mmap(at, pages * PAGE, PROT_READ | PROT_WRITE, flags[kind] | MAP_FIXED, fd,
                   fd < 0 ? 0 : (off_t)first * PAGE) == at);
    }
    for (size_t n = first; n < first + pages; n++)
        rights_of[n] = PROT_READ | PROT_WRITE;
}

static void protect_some(size_t first, size_t pages)
{
    static const int wanted[] = {PROT_NONE, PROT_READ, PROT_READ | PROT_WRITE,
                                 PROT_READ | PROT_WRITE};
    int rights = wanted[below(4)];
    for (int arena = 0; arena < 2; arena++)
        CHECK(!mprotect(place(arena, first), pages * PAGE, rights));
    for (size_t n = first; n < first + pages; n++)
        rights_of[n] = rights;
}

static void advise_some(size_t first, size_t pages)
{
    static const int wanted[] = {MADV_DONTNEED, MADV_DONTNEED, MADV_DONTFORK, MADV_DOFORK,
                                 MADV_DONTDUMP, MADV_DODUMP, MADV_RANDOM, MADV_NORMAL};
    int advice = wanted[below(sizeof wanted / sizeof *wanted)], results[2];
    for (int arena = 0; arena < 2; arena++)
        results[arena] = madvise(place(arena, first), pages * PAGE, advice);
    CHECK(results[0] == results[1]);
}

static void lock_some(size_t first, size_t pages)
{
    int locks = below(2), results[2];
    for (int arena = 0; arena < 2; arena++) {
        void *at = place(arena, first);
        results[arena] = locks ? mlock(at, pages * PAGE) : munlock(at, pages * PAGE);
    }
    CHECK(results[0] == results[1]);
}

static void register_some(size_t first, size_t pages)
{
    static const int wanted[] = {RIGHTS, RIGHTS, IBV_ACCESS_REMOTE_READ, 0};
    struct region *region = &regions[below(REGIONS)];
    int access = wanted[below(4)];
    if (region->mr)
        CHECK(!ibv_dereg_mr(region->mr));
    errno = 0;
    region->mr = ibv_reg_mr(pd, place(0, first), pages * PAGE, access);
    region->first = first;
    region->pages = pages;
    region->writes = access == RIGHTS;
    int may = all_have(first, pages, access == RIGHTS ? PROT_READ | PROT_WRITE : PROT_READ);
    CHECK(may ? region->mr != NULL : region->mr == NULL && errno == EFAULT);
}

static void deregister_some(void)
{
    struct region *region = &regions[below(REGIONS)];
    if (region->mr)
        CHECK(!ibv_dereg_mr(region->mr));
    region->mr = NULL;
}

// Stores to a part of a writable region, or reads from a readable one.
static void use_region(void)
{
    const struct region *region = &regions[below(REGIONS)];
    if (!region->mr)
        return;
    size_t pages = 1 + below(region->pages > 8 ? 8 : region->pages);
    size_t first = region->first + below(region->pages - pages + 1);
    size_t skip = below(PAGE), length = 1 + below(pages * PAGE - skip);
    unsigned char *mine = place(0, first) + skip, *twin = place(1, first) + skip;
    int value = below(256);
    if (region->writes && all_have(first, pages, PROT_WRITE) && below(2)) {
        store_by_rdma(region->mr, mine, value, length);
        memset(twin, value, length);
    } else if (all_have(first, pages, PROT_READ)) {
        struct ibv_sge from = element(mine, length, region->mr);
        CHECK(!run_request(0, IBV_WR_RDMA_WRITE, from, staging, staging_mr->rkey));
        CHECK(!memcmp(staging, twin, length));
    }
}

static void store_some(size_t first, size_t pages)
{
    int value = below(256);
    for (int arena = 0; arena < 2 && all_have(first, pages, PROT_WRITE); arena++)
        memset(place(arena, first), value, pages * PAGE);
}

// Notes contents, rights and advice of each page, and the memory in use.
static void note_arena(struct run *r, int arena)
{
    r->length = 0;
    for (int n = 0; n < ARENA; n++)
        note(r, "%d:%lx ", n, page_hash(place(arena, n)));
    note_smaps(r, place(arena, 0));
}

static void same(struct run seen[2], const char *what, int operation)
{
    for (int arena = 0; arena < 2; arena++)
        note_arena(&seen[arena], arena);
    if (!strcmp(seen[0].observed, seen[1].observed))
        return;
    printf("%s, operation %d:\n%s\nwithout regions:\n%s\n", what, operation, seen[0].observed,
           seen[1].observed);
    exit(1);
}

// A child sees both arenas unchanged, and its writes are private except in shared memory.
static void fork_some(struct run seen[2], int operation)
{
    pid_t made = below(2) ? fork() : syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL);
    if (made == 0) {
        same(seen, "in a child", operation);
        for (int n = 0; n < ARENA; n++)
            for (int arena = 0; arena < 2; arena++)
                if (all_have(n, 1, PROT_WRITE) && page_hash(place(arena, n)))
                    memset(place(arena, n), 0xcc, PAGE);
        same(seen, "in a child that has written", operation);
        fflush(stdout);
        _exit(0);
    }
    int status;
    CHECK(made > 0 && waitpid(made, &status, 0) == made);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void operation(struct run seen[2], int number)
{
    size_t pages = 1 + below(12), first = below(ARENA - pages + 1);
    switch (below(12)) {
    case 0: map_some(first, pages); break;
    case 1: protect_some(first, pages > 3 ? 3 : pages); break;
    case 2: advise_some(first, pages); break;
    case 3: lock_some(first, pages > 2 ? 2 : pages); break;
    case 4: case 5: register_some(first, pages); break;
    case 6: deregister_some(); break;
    case 7: case 8: case 9: use_region(); break;
    case 10: store_some(first, pages); break;
    default:
        if (below(8) == 0)
            fork_some(seen, number);
    }
}

static void arena_open(int arena)
{
    // Shared, so that mappings of the arena do not merge with it.
    unsigned char *all = mmap(NULL, 3 * ALIGNMENT, PROT_NONE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(all != MAP_FAILED);
    // Aligned, because the kernel reads files ahead in aligned steps.
    arenas[arena] = all + ALIGNMENT + (ALIGNMENT - (uintptr_t)all % ALIGNMENT) % ALIGNMENT;
    for (int kind = 0; kind < KINDS; kind++) {
        CHECK((files[arena][kind] = memfd_create("arena", 0)) >= 0);
        CHECK(!ftruncate(files[arena][kind], ARENA * PAGE));
    }
}

static void random_operations(void)
{
    struct run seen[2] = {{.observed = malloc(ROOM)}, {.observed = malloc(ROOM)}};
    CHECK(seen[0].observed && seen[1].observed);
    arena_open(0);
    arena_open(1);
    for (size_t n = 0; n < ARENA; n += 16)
        map_some(n, 16);
    for (int n = 0; n < OPERATIONS; n++) {
        operation(seen, n);
        same(seen, "after an operation", n);
    }
}

int main(int count, char **words)
{
    static const struct part parts[] = {{"operations", random_operations}, {0}};
    CHECK(count == 3 && (seed = strtoull(words[2], NULL, 10)) != 0);
    return run_part(count - 1, words, parts);
}
