/* MPI collectives. Every rank compares the results with the expected ones. With the argument
* "forever" they run until the process is killed, after a line that reports the start. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int rank, ranks;

static void must(int right, const char *what, int count) {
    if (right)
        return;
    fprintf(stderr, "rank %d: %s of %d is wrong\n", rank, what, count);
    MPI_Abort(MPI_COMM_WORLD, 3);
}

static int value(int of, int n) {
    return of * 1000003 + n * 7;
}

/* Each collective over `count` numbers of every rank. */
static void compare(int count) {
    int *own = malloc(sizeof(int) * count * ranks), *all = malloc(sizeof(int) * count * ranks);
    must(own && all, "memory", count);

    for (int n = 0; n < count; n++)
        own[n] = value(rank, n);
    MPI_Allreduce(own, all, count, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    for (int n = 0; n < count; n++) {
        int sum = 0;
        for (int r = 0; r < ranks; r++)
            sum += value(r, n);
        must(all[n] == sum, "allreduce", count);
    }

    for (int root = 0; root < ranks; root++) {
        for (int n = 0; n < count; n++)
            own[n] = rank == root ? value(root + 5, n) : -1;
        MPI_Bcast(own, count, MPI_INT, root, MPI_COMM_WORLD);
        for (int n = 0; n < count; n++)
            must(own[n] == value(root + 5, n), "bcast", count);
    }

    for (int n = 0; n < count * ranks; n++)
        own[n] = value(rank, n);
    MPI_Alltoall(own, count, MPI_INT, all, count, MPI_INT, MPI_COMM_WORLD);
    for (int r = 0; r < ranks; r++)
        for (int n = 0; n < count; n++)
            must(all[r * count + n] == value(r, rank * count + n), "alltoall", count);

    for (int n = 0; n < count; n++)
        own[n] = value(rank, n);
    MPI_Gather(own, count, MPI_INT, all, count, MPI_INT, 0, MPI_COMM_WORLD);
    if (rank == 0)
        for (int r = 0; r < ranks; r++)
            for (int n = 0; n < count; n++)
                must(all[r * count + n] == value(r, n), "gather", count);

    int before = 0, mine = rank + 1;
    MPI_Scan(&mine, &before, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    must(before == (rank + 1) * (rank + 2) / 2, "scan", 1);
    MPI_Barrier(MPI_COMM_WORLD);
    free(own);
    free(all);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    for (int count = 1; count <= 65536; count *= 16)
        compare(count);
    if (rank == 0) {
        printf("%d ranks agree\n", ranks);
        fflush(stdout);
    }
    while (argc > 1 && strcmp(argv[1], "forever") == 0)
        compare(1024);
    MPI_Finalize();
    return 0;
}
