/* Round trips of 8 bytes between two ranks, by MPI alone: prints the median in microseconds. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    enum { WARM = 2000, ROUNDS = 20000 };
    static double times[ROUNDS];
    char bytes[8] = {0};
    int rank, level;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    for (int i = 0; i < WARM + ROUNDS; i++) {
        double start = MPI_Wtime();
        if (rank == 0) {
            MPI_Send(bytes, 8, MPI_BYTE, 1, 0, MPI_COMM_WORLD);
            MPI_Recv(bytes, 8, MPI_BYTE, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        } else {
            MPI_Recv(bytes, 8, MPI_BYTE, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            MPI_Send(bytes, 8, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
        }
        if (i >= WARM) times[i - WARM] = (MPI_Wtime() - start) * 1e6;
    }
    qsort(times, ROUNDS, sizeof times[0], ascending);
    if (rank == 0) printf("%.3f\n", times[ROUNDS / 2]);
    return MPI_Finalize();
}
