/* Two ranks measure half the round-trip time of a message, and the bandwidth of windows of messages,
 * each for half of the given time. Arguments: bytes, seconds. Prints microseconds and MB/s. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WINDOW = 16, MORE = 1, LAST = 2 };

static int rank, size;
static char *buffer;

/* A round that rank 0 begins and ends. `tag` tells rank 1 if another round follows. */
static int round_trip(int tag) {
    MPI_Status status;
    if (rank == 0) {
        MPI_Send(buffer, size, MPI_BYTE, 1, tag, MPI_COMM_WORLD);
        MPI_Recv(buffer, size, MPI_BYTE, 1, MPI_ANY_TAG, MPI_COMM_WORLD, &status);
    } else {
        MPI_Recv(buffer, size, MPI_BYTE, 0, MPI_ANY_TAG, MPI_COMM_WORLD, &status);
        MPI_Send(buffer, size, MPI_BYTE, 0, status.MPI_TAG, MPI_COMM_WORLD);
    }
    return status.MPI_TAG;
}

static int window(int tag) {
    MPI_Request requests[WINDOW];
    MPI_Status statuses[WINDOW];
    for (int n = 0; n < WINDOW; n++) {
        char *message = buffer + (size_t)n * size;
        if (rank == 0)
            MPI_Isend(message, size, MPI_BYTE, 1, tag, MPI_COMM_WORLD, &requests[n]);
        else
            MPI_Irecv(message, size, MPI_BYTE, 0, MPI_ANY_TAG, MPI_COMM_WORLD, &requests[n]);
    }
    MPI_Waitall(WINDOW, requests, statuses);
    if (rank == 0) {
        MPI_Recv(NULL, 0, MPI_BYTE, 1, MPI_ANY_TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        return tag;
    }
    MPI_Send(NULL, 0, MPI_BYTE, 0, MORE, MPI_COMM_WORLD);
    return statuses[0].MPI_TAG;
}

/* Returns the seconds per round, excluding the first hundredth of the time. */
static double measure(int (*round)(int), double seconds) {
    double start = MPI_Wtime(), counted = 0;
    long rounds = 0;
    int tag;
    do {
        double now = MPI_Wtime();
        if (!counted && now > start + seconds / 100) {
            counted = now;
            rounds = 0;
        }
        tag = round(now > start + seconds && rounds > 0 ? LAST : MORE);
        rounds++;
    } while (tag != LAST);
    return (MPI_Wtime() - counted) / rounds;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (argc != 3)
        MPI_Abort(MPI_COMM_WORLD, 2);
    size = atoi(argv[1]);
    buffer = malloc((size_t)size * WINDOW);
    if (!buffer)
        MPI_Abort(MPI_COMM_WORLD, 3);
    memset(buffer, 1, (size_t)size * WINDOW);
    double seconds = atof(argv[2]) / 2;
    double latency = measure(round_trip, seconds) / 2;
    double bandwidth = (double)size * WINDOW / measure(window, seconds);
    if (rank == 0)
        printf("half a round trip %.3f us, bandwidth %.3f MB/s\n", latency * 1e6, bandwidth / 1e6);
    MPI_Finalize();
    return 0;
}
