// What an append costs at the least: the system calls alone, timed without an interpreter.
//
//   floors FILE {process|each|group} REPEATS
//
// process: pwrite of 1 KiB. each: the same and fdatasync. group: 64 of them and one fdatasync.
// FILE is written in full and synced first: a timed call meets blocks that are already allocated
// and written, and a sync has no metadata of the file to bring to the disk.
//
// Prints the p50 and the p99 of a call, or of a group, in nanoseconds.
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { TURN_NBYTES = 1024, GROUP = 64, FILE_NBYTES = 32 << 20, WARM = 20 };

static void fail(const char* what) {
  fprintf(stderr, "floors: %s: %s\n", what, strerror(errno));
  exit(1);
}

static uint64_t now_ns(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return (uint64_t)at.tv_sec * 1000000000u + (uint64_t)at.tv_nsec;
}

static int ascending(const void* a, const void* b) {
  uint64_t x = *(const uint64_t*)a, y = *(const uint64_t*)b;
  return (x > y) - (x < y);
}

static void write_turn(int fd, const char* turn, off_t off) {
  if (pwrite(fd, turn, TURN_NBYTES, off) != TURN_NBYTES) fail("pwrite");
}

static int open_written(const char* path, const char* turn) {
  int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) fail(path);
  for (off_t off = 0; off < FILE_NBYTES; off += TURN_NBYTES) write_turn(fd, turn, off);
  if (fsync(fd)) fail("fsync");
  return fd;
}

int main(int argc, char** argv) {
  long repeats = argc == 4 ? strtol(argv[3], NULL, 10) : 0;
  int group = argc == 4 && strcmp(argv[2], "group") == 0;
  int sync = group || (argc == 4 && strcmp(argv[2], "each") == 0);
  if (repeats < 1 || (!sync && strcmp(argv[2], "process") != 0)) {
    fprintf(stderr, "usage: floors FILE {process|each|group} REPEATS\n");
    return 2;
  }
  char turn[TURN_NBYTES];
  memset(turn, 0x5a, sizeof turn);
  int fd = open_written(argv[1], turn);
  uint64_t* took_ns = malloc((size_t)repeats * sizeof *took_ns);
  if (took_ns == NULL) fail("malloc");
  off_t off = 0;
  for (long i = -WARM; i < repeats; i++) {
    uint64_t start_ns = now_ns();
    for (int k = 0; k < (group ? GROUP : 1); k++) {
      write_turn(fd, turn, off);
      off = (off + TURN_NBYTES) % FILE_NBYTES;
    }
    if (sync && fdatasync(fd)) fail("fdatasync");
    if (i >= 0) took_ns[i] = now_ns() - start_ns;
  }
  qsort(took_ns, (size_t)repeats, sizeof *took_ns, ascending);
  printf("%llu %llu\n", (unsigned long long)took_ns[repeats / 2],
         (unsigned long long)took_ns[repeats * 99 / 100]);
  return 0;
}
