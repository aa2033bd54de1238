/* Read bandwidth of this machine: reader BYTES THREADS SECONDS
 *
 * Every thread sums its own part of a buffer that is far larger than the caches. The program repeats
 * the pass for SECONDS and prints the bytes per second of the median and of the best pass. */

#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#define MOST_PASSES 4096

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static uint64_t read_all(const uint64_t *words, size_t count, int threads)
{
    uint64_t total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
    {
        /* Use whole cache lines, so that the inner loop needs no tail. */
        const size_t lines = count / 8, index = (size_t)omp_get_thread_num();
        const size_t first = lines * index / (size_t)threads;
        const size_t end = lines * (index + 1) / (size_t)threads;
        uint64_t sums[8] = {0};
        for (size_t line = first; line < end; line++)
            for (int i = 0; i < 8; i++)
                sums[i] += words[line * 8 + i];
        for (int i = 0; i < 8; i++)
            total += sums[i];
    }
    return total;
}

int main(int argc, char **argv)
{
    if (argc != 4) {
        fprintf(stderr, "usage: reader BYTES THREADS SECONDS\n");
        return 2;
    }
    const size_t bytes = strtoull(argv[1], NULL, 10);
    const int threads = atoi(argv[2]);
    const double seconds = atof(argv[3]);
    const size_t count = bytes / sizeof(uint64_t);
    uint64_t *words =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (words == MAP_FAILED) {
        perror("reader: mmap");
        return 1;
    }
    /* Ignore a failure: a kernel without huge pages only makes the reads slower. */
    madvise(words, bytes, MADV_HUGEPAGE);
#pragma omp parallel for num_threads(threads)
    for (size_t i = 0; i < count; i++)
        words[i] = i;

    static double rates[MOST_PASSES];
    int passes = 0;
    volatile uint64_t kept = 0; /* volatile: the compiler must not remove a pass */
    const double began = omp_get_wtime();
    double now = began;
    while (passes < 3 || (passes < MOST_PASSES && now - began < seconds)) {
        const double start = now;
        kept += read_all(words, count, threads);
        now = omp_get_wtime();
        rates[passes++] = (double)bytes / (now - start);
    }
    qsort(rates, (size_t)passes, sizeof *rates, ascending);
    printf("%.0f %.0f\n", rates[passes / 2], rates[passes - 1]);
    return 0;
}
