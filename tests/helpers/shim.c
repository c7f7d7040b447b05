// Faults of the system, injected by LD_PRELOAD while the file named by KALOS_ARM exists.
//   KALOS_FAULT  short, eintr, or the number of an errno
//   KALOS_OPS    which calls, by name: "pwrite", "pread", "fdatasync fsync", "mmap"; default all
//   but mmap KALOS_FILE   part of the path of the files concerned; default all KALOS_KILL   at the
//   n-th call that writes or syncs, counted from 1, the process kills itself KALOS_STOP   as
//   KALOS_KILL, but the process stops until somebody continues it KALOS_DURABLE  folder to which
//   each file is copied when it is synced: what a power loss leaves
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static int calls, turns;

static const char* path_of(int fd, char* buffer, size_t n) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t got = readlink(link, buffer, n - 1);
  buffer[got < 0 ? 0 : got] = 0;
  return buffer;
}

static int concerned(const char* op, int fd) {
  const char *arm = getenv("KALOS_ARM"), *ops = getenv("KALOS_OPS"), *file = getenv("KALOS_FILE");
  char path[4096];
  if (!getenv("KALOS_FAULT") || (arm && access(arm, F_OK) != 0)) return 0;
  if (ops ? !strstr(ops, op) : !strcmp(op, "mmap")) return 0;
  return !file || strstr(path_of(fd, path, sizeof path), file) != NULL;
}

static void maybe_die(void) {
  const char *at = getenv("KALOS_KILL"), *stop = getenv("KALOS_STOP"), *arm = getenv("KALOS_ARM");
  if ((!at && !stop) || (arm && access(arm, F_OK) != 0)) return;
  if (++calls == atoi(at ? at : stop)) kill(getpid(), at ? SIGKILL : SIGSTOP);
}

// 0: go on; -1: fail with errno; 1: do half of it.
static int fault(const char* op, int fd) {
  if (!concerned(op, fd)) return 0;
  const char* what = getenv("KALOS_FAULT");
  if (!strcmp(what, "short")) return turns++ % 3 != 2;
  if (!strcmp(what, "eintr")) {
    if (turns++ % 2) return 0;
    errno = EINTR;
    return -1;
  }
  errno = atoi(what);
  return -1;
}

static void keep_copy(int fd) {
  const char* root = getenv("KALOS_DURABLE");
  char path[4096], target[8192], buffer[65536];
  struct stat st;
  if (!root || fstat(fd, &st) != 0) return;
  path_of(fd, path, sizeof path);
  const char* name = strstr(path, "/gen-");
  name = name ? name + 1 : strrchr(path, '/') + 1;
  if (S_ISDIR(st.st_mode)) {  // a synced folder: which names are durable in it
    snprintf(target, sizeof target, "%s/names-%s", root, name);
    FILE* out = fopen(target, "w");
    DIR* dir = opendir(path);
    struct dirent* entry;
    while (dir && (entry = readdir(dir))) fprintf(out, "%s\n", entry->d_name);
    if (dir) closedir(dir);
    if (out) fclose(out);
    return;
  }
  snprintf(target, sizeof target, "%s/%s", root, name);
  int in = open(path, O_RDONLY), out = open(target, O_WRONLY | O_CREAT | O_TRUNC, 0600);
  ssize_t n;
  while (in >= 0 && out >= 0 && (n = read(in, buffer, sizeof buffer)) > 0)
    if (write(out, buffer, n) != n) break;
  close(in);
  close(out);
}

ssize_t pwrite(int fd, const void* data, size_t n, off_t at) {
  static ssize_t (*real)(int, const void*, size_t, off_t);
  if (!real) real = dlsym(RTLD_NEXT, "pwrite");
  maybe_die();
  int f = fault("pwrite", fd);
  if (f < 0) return -1;
  return real(fd, data, f > 0 && n > 1 ? n / 2 : n, at);
}
ssize_t pwrite64(int fd, const void* data, size_t n, off_t at) { return pwrite(fd, data, n, at); }

ssize_t pread(int fd, void* data, size_t n, off_t at) {
  static ssize_t (*real)(int, void*, size_t, off_t);
  if (!real) real = dlsym(RTLD_NEXT, "pread");
  int f = fault("pread", fd);
  if (f < 0) return -1;
  return real(fd, data, f > 0 && n > 1 ? n / 2 : n, at);
}
ssize_t pread64(int fd, void* data, size_t n, off_t at) { return pread(fd, data, n, at); }

int fdatasync(int fd) {
  static int (*real)(int);
  if (!real) real = dlsym(RTLD_NEXT, "fdatasync");
  maybe_die();
  if (fault("fdatasync", fd) < 0) return -1;
  // A model of power losses needs the order of syncs and not their cost.
  int code = getenv("KALOS_DURABLE") ? 0 : real(fd);
  if (code == 0) keep_copy(fd);
  return code;
}

int fsync(int fd) {
  static int (*real)(int);
  if (!real) real = dlsym(RTLD_NEXT, "fsync");
  maybe_die();
  if (fault("fsync", fd) < 0) return -1;
  int code = getenv("KALOS_DURABLE") ? 0 : real(fd);
  if (code == 0) keep_copy(fd);
  return code;
}

int ftruncate(int fd, off_t n) {
  static int (*real)(int, off_t);
  if (!real) real = dlsym(RTLD_NEXT, "ftruncate");
  maybe_die();
  return real(fd, n);
}
int ftruncate64(int fd, off_t n) { return ftruncate(fd, n); }

int unlinkat(int fd, const char* path, int flags) {
  static int (*real)(int, const char*, int);
  if (!real) real = dlsym(RTLD_NEXT, "unlinkat");
  maybe_die();
  return real(fd, path, flags);
}

int renameat(int a, const char* from, int b, const char* to) {
  static int (*real)(int, const char*, int, const char*);
  if (!real) real = dlsym(RTLD_NEXT, "renameat");
  maybe_die();
  return real(a, from, b, to);
}

void* mmap(void* address, size_t n, int prot, int flags, int fd, off_t off) {
  static void* (*real)(void*, size_t, int, int, int, off_t);
  if (!real) real = dlsym(RTLD_NEXT, "mmap");
  if (fd >= 0 && fault("mmap", fd) < 0) return MAP_FAILED;
  return real(address, n, prot, flags, fd, off);
}
void* mmap64(void* address, size_t n, int prot, int flags, int fd, off_t off) {
  return mmap(address, n, prot, flags, fd, off);
}
