#include "csrc/base/room.h"

#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { TEXT = 16384 }; /* a memory.stat has some 3 KB, /proc/self/cgroup a line of at most PATH_MAX for each of a dozen */

typedef struct {
    const char *mount, *limit, *usage, *caches[2];
} hierarchy;

/* Where version 1 has its memory controller and version 2 all of them, alone or beside version 1. */
static const hierarchy version_1 = {
    "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", {"total_inactive_file", "total_active_file"}};
static const hierarchy version_2[] = {
    {"/sys/fs/cgroup", "memory.max", "memory.current", {"inactive_file", "active_file"}},
    {"/sys/fs/cgroup/unified", "memory.max", "memory.current", {"inactive_file", "active_file"}}};

/* The beginning of a file, if it can be read. */
__attribute__((format(printf, 2, 3))) static bool
read_text(char text[TEXT], const char *format, ...)
{
    char path[3 * PATH_MAX];
    va_list args;
    va_start(args, format);
    int length = vsnprintf(path, sizeof path, format, args);
    va_end(args);
    int fd = length < 0 || (size_t)length >= sizeof path ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    size_t have = 0;
    ssize_t got;
    while (have < TEXT - 1 && (got = read(fd, text + have, TEXT - 1 - have)) > 0)
        have += (size_t)got;
    close(fd);
    text[have] = '\0';
    return have > 0;
}

/* The number behind a name at the beginning of a line. */
static bool
number_of(const char *text, const char *name, size_t *out)
{
    size_t length = strlen(name);
    for (const char *line = text; line != NULL; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, name, length) == 0 && (line[length] == ' ' || line[length] == ':')) {
            *out = (size_t)strtoull(line + length + 1, NULL, 10);
            return true;
        }
    }
    return false;
}

static void
look_at_group(const char *root, const hierarchy *of, const char *group, tp_room *room)
{
    char text[TEXT];
    if (!read_text(text, "%s%s%s/%s", root, of->mount, group, of->limit) || *text < '0' || *text > '9')
        return; /* none here, or "max" */
    size_t limit = (size_t)strtoull(text, NULL, 10), used = 0, cached = 0;
    if (read_text(text, "%s%s%s/%s", root, of->mount, group, of->usage))
        used = (size_t)strtoull(text, NULL, 10);
    if (read_text(text, "%s%s%s/memory.stat", root, of->mount, group))
        for (int i = 0; i < 2; i++) {
            size_t bytes;
            if (number_of(text, of->caches[i], &bytes))
                cached += bytes;
        }
    used -= cached < used ? cached : used;
    size_t free_bytes = limit > used ? limit - used : 0;
    if (limit < room->total)
        room->total = limit;
    if (free_bytes < room->available) {
        room->available = free_bytes;
        room->grouped = true;
    }
}

/* The group and all above it; of one whose path is another's, as in a container without a namespace of its own, what is there. */
static void
look_up(const char *root, const hierarchy *of, const char *group, size_t length, tp_room *room)
{
    char path[PATH_MAX];
    if (length >= sizeof path)
        return;
    memcpy(path, group, length);
    path[length] = '\0';
    for (char *end = path + length; end != NULL; end = strrchr(path, '/')) {
        *end = '\0';
        look_at_group(root, of, path, room);
    }
}

/* Is `name` one of these, which have commas between? */
static bool
among(const char *names, const char *end, const char *name)
{
    size_t length = strlen(name);
    for (const char *at = names; at < end; at++) {
        if ((size_t)(end - at) >= length && strncmp(at, name, length) == 0 && (at + length == end || at[length] == ','))
            return true;
        at = memchr(at, ',', (size_t)(end - at));
        if (at == NULL)
            return false;
    }
    return false;
}

/* Lines of "number:controllers:path"; version 2 is number 0 without controllers. */
static void
look_at_groups(const char *root, const char *text, tp_room *room)
{
    for (const char *line = text; *line != '\0';) {
        const char *end = line + strcspn(line, "\n");
        const char *names = memchr(line, ':', (size_t)(end - line));
        const char *path = names == NULL ? NULL : memchr(names + 1, ':', (size_t)(end - names - 1));
        if (path != NULL) {
            size_t length = (size_t)(end - path - 1);
            if (among(names + 1, path, "memory"))
                look_up(root, &version_1, path + 1, length, room);
            for (int i = 0; path == names + 1 && i < 2; i++)
                look_up(root, &version_2[i], path + 1, length, room);
        }
        line = end + (*end == '\n');
    }
}

void
tp_room_look(const char *root, tp_room *out)
{
    char text[TEXT];
    *out = (tp_room){.total = SIZE_MAX, .available = SIZE_MAX};
    if (read_text(text, "%s/proc/meminfo", root)) {
        size_t kilobytes;
        if (number_of(text, "MemTotal", &kilobytes))
            out->total = kilobytes * 1024;
        if (number_of(text, "MemAvailable", &kilobytes))
            out->available = kilobytes * 1024;
    }
    if (read_text(text, "%s/proc/self/cgroup", root))
        look_at_groups(root, text, out);
}
