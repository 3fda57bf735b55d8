#include "cuda/dl.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *told; /* folders between colons */

/* Where a search has been, for its error, and why the first file that it found does not load. */
typedef struct {
    char text[640], broken[512];
    size_t used;
    int cut; /* the last file that was tried is not all there */
} trail;

static void
note(trail *where, const char *place)
{
    int added = snprintf(where->text + where->used, sizeof where->text - where->used, "%s%s", where->used ? ", " : "", place);
    where->used += (size_t)(added > 0 ? added : 0);
    if (where->used >= sizeof where->text)
        where->used = sizeof where->text - 1;
}

tp_status
tp_dl_set_folders(const char *folders)
{
    char *copy = folders && *folders ? strdup(folders) : NULL;
    if (folders && *folders && !copy)
        return tp_fail(TP_EMEMORY, "no host memory for the names of library folders");
    pthread_mutex_lock(&lock);
    free(told);
    told = copy;
    pthread_mutex_unlock(&lock);
    return TP_OK;
}

#if defined(__x86_64__)
#define MACHINE EM_X86_64
#elif defined(__aarch64__)
#define MACHINE EM_AARCH64
#else
#define MACHINE EM_NONE /* its loader's words do */
#endif

/* Where the last part that is loaded of an open file ends; 0: no library of this loader's, which says so itself. */
static uint64_t
end_of(int file, int *machine)
{
    ElfW(Ehdr) head;
    ElfW(Phdr) part;
    uint64_t end = 0;
    if (pread(file, &head, sizeof head, 0) != sizeof head || memcmp(head.e_ident, ELFMAG, SELFMAG) != 0 ||
        head.e_ident[EI_CLASS] != (sizeof(void *) == 8 ? ELFCLASS64 : ELFCLASS32) || head.e_phentsize != sizeof part)
        return 0;
    *machine = MACHINE == EM_NONE ? EM_NONE : head.e_machine;
    for (uint64_t i = 0; i < head.e_phnum; i++) {
        if (pread(file, &part, sizeof part, (off_t)(head.e_phoff + i * sizeof part)) != sizeof part)
            return 0;
        if (part.p_type == PT_LOAD && part.p_offset + part.p_filesz > end)
            end = part.p_offset + part.p_filesz;
    }
    return end;
}

/* 1: a library that was not copied whole, as where a disk was full: the loader would touch what is not there, which ends the
 * process (SIGBUS) without a word. words: that, or that it is of another processor (*machine is not MACHINE). */
static int
is_cut(const char *path, int *machine, char words[128])
{
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat is = {.st_size = 0};
    uint64_t end = file >= 0 && fstat(file, &is) == 0 ? end_of(file, machine) : 0;
    if (file >= 0)
        close(file);
    if (end > (uint64_t)is.st_size)
        snprintf(words, 128, "it was not copied whole: %llu of its %llu bytes are here", (unsigned long long)is.st_size,
                 (unsigned long long)end);
    else
        snprintf(words, 128, "it is of another processor (ELF machine %d, here %d)", *machine, MACHINE);
    return end > (uint64_t)is.st_size;
}

#ifdef __GLIBC__
/* The folders that the loader looks for a library of ours in, ld.so.cache's aside; free(). */
static Dl_serinfo *
folders_of_loader(void)
{
    Dl_info here;
    Dl_serinfo size, *all = NULL;
    void *self = dladdr(&lock, &here) ? dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD) : NULL;
    if (self && dlinfo(self, RTLD_DI_SERINFOSIZE, &size) == 0 && (all = malloc(size.dls_size)) != NULL &&
        (dlinfo(self, RTLD_DI_SERINFOSIZE, all) != 0 || dlinfo(self, RTLD_DI_SERINFO, all) != 0)) {
        free(all);
        all = NULL;
    }
    if (self)
        dlclose(self);
    return all;
}

const char *
tp_dl_cut(const char *soname)
{
    static _Thread_local char text[1200];
    const char *found = NULL;
    char path[1024], words[128];
    void *loaded = dlopen(soname, RTLD_NOW | RTLD_NOLOAD);
    Dl_serinfo *all = loaded ? NULL : folders_of_loader();
    if (loaded)
        dlclose(loaded);
    for (unsigned i = 0; all && i < all->dls_cnt; i++) {
        int machine = MACHINE;
        int length = snprintf(path, sizeof path, "%s/%s", all->dls_serpath[i].dls_name, soname);
        if (length >= (int)sizeof path || access(path, F_OK) != 0)
            continue;
        if (is_cut(path, &machine, words)) {
            snprintf(text, sizeof text, "%s: %s", path, words);
            found = text;
        }
        if (machine == MACHINE) /* the loader takes that one */
            break;
    }
    free(all);
    return found;
}
#else
const char *
tp_dl_cut(const char *soname) /* musl's loader does not say where it looks */
{
    (void)soname;
    return NULL;
}
#endif

/* dlopen, and *why not: of a bare name too, which the loader looks for. Of another processor's library that says that there is no
 * such file. */
static void *
open_whole(const char *path, const char **why, int *cut)
{
    static _Thread_local char words[128];
    int machine = MACHINE;
    const char *bare = strchr(path, '/') ? NULL : tp_dl_cut(path);
    *cut = strchr(path, '/') ? is_cut(path, &machine, words) : bare != NULL;
    void *handle = *cut ? NULL : dlopen(path, RTLD_NOW | RTLD_LOCAL);
    *why = handle ? NULL : bare ? bare : *cut || machine != MACHINE ? words : dlerror();
    return handle;
}

/* A file that is there and does not load is no file that is missing: it says what is wrong with it, or with what it needs. The
 * loader says so in the words of LC_MESSAGES; of a bare name that it found nowhere it says that name, else the path that it found. */
static void *
open_file(const char *path, trail *where)
{
    const char *why;
    void *handle = open_whole(path, &why, &where->cut);
    int missing = why && (strchr(path, '/') ? access(path, F_OK) != 0 : strncmp(why, path, strlen(path)) == 0);
    if (why && !missing && !where->broken[0])
        snprintf(where->broken, sizeof where->broken, "%.300s: %.200s", path, why);
    return handle;
}

static void *
open_in(const char *folder, size_t length, const char *below, const tp_dl_library *library, trail *where)
{
    char path[1024];
    void *handle = NULL;
    for (int i = 0; !handle && i < 4 && library->sonames[i]; i++) {
        snprintf(path, sizeof path, "%.*s%s/%s", (int)length, folder, below, library->sonames[i]);
        handle = open_file(path, where);
        if (i == 0 && !handle) {
            path[strlen(path) - strlen(library->sonames[0]) - 1] = 0;
            note(where, path);
        }
    }
    return handle;
}

static void *
open_in_told(const tp_dl_library *library, trail *where)
{
    void *handle = NULL;
    pthread_mutex_lock(&lock);
    for (const char *at = told; !handle && at && *at;) {
        size_t length = strcspn(at, ":");
        if (length)
            handle = open_in(at, length, "", library, where);
        at += length + (at[length] == ':');
    }
    pthread_mutex_unlock(&lock);
    return handle;
}

/* By name alone, which the loader looks for in LD_LIBRARY_PATH first: there by path, since only a file can be looked at before. */
static void *
open_bare(const char *name, trail *where)
{
    char path[1024];
    where->cut = 0;
    for (const char *at = getenv("LD_LIBRARY_PATH"); at && *at;) {
        size_t length = strcspn(at, ":;");
        int fits = snprintf(path, sizeof path, "%.*s/%s", (int)length, at, name) < (int)sizeof path;
        void *handle = length && fits && access(path, F_OK) == 0 ? open_file(path, where) : NULL;
        if (handle || where->cut) /* the loader would take that one */
            return handle;
        at += length + (at[length] != 0);
    }
    return open_file(name, where);
}

static void *
search(const tp_dl_library *library, trail *where)
{
    void *handle = NULL;
    for (int i = 0; !handle && i < 4 && library->sonames[i]; i++)
        handle = dlopen(library->sonames[i], RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (!handle)
        handle = open_in_told(library, where);
    const char *homes[] = {getenv("CUDA_HOME"), getenv("CUDA_PATH"), "/usr/local/cuda"};
    for (int i = 0; !handle && i < 3; i++)
        if (homes[i] && *homes[i])
            handle = open_in(homes[i], strlen(homes[i]), "/lib64", library, where);
    for (int i = 0; !handle && i < 4 && library->sonames[i]; i++)
        handle = open_bare(library->sonames[i], where);
    if (!handle)
        note(where, "the loader's own folders (LD_LIBRARY_PATH, ld.so.cache)");
    return handle;
}

static void
path_of(void *handle, char *path, size_t size)
{
    struct link_map *map = NULL;
    if (dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0 || !map)
        snprintf(path, size, "?");
    else
        snprintf(path, size, "%s", map->l_name);
}

/* "2.18.1". Numbers below 10000 are of NCCL before 2.9 and cuDNN before 9, which had one digit for the minor version. */
static const char *
version_text(int version, char text[24])
{
    int unit = version < 10000 ? 1000 : 10000;
    if (version <= 0)
        snprintf(text, 24, "unknown");
    else
        snprintf(text, 24, "%d.%d.%d", version / unit, version % unit / 100, version % 100);
    return text;
}

/* Fill the table; the first function that is missing and may not be, or NULL. */
static const char *
fill(const tp_dl_library *library, void *handle)
{
    const char *missing = NULL;
    int count = 0;
    while (library->names[count])
        count++;
    for (int i = 0; i < count; i++) {
        void *function = dlsym(handle, library->names[i]);
        if (!function && !missing && i < count - library->optional)
            missing = library->names[i];
        memcpy((char *)library->table + (size_t)i * sizeof function, &function, sizeof function);
    }
    return missing;
}

/* The library's handle, from where its variable says or from wherever it is. */
static tp_status
open_library(const tp_dl_library *library, void **out)
{
    trail where = {"", "", 0, 0};
    char needed[24];
    const char *named = getenv(library->variable), *why;
    if (named && *named) {
        *out = open_whole(named, &why, &where.cut);
        if (!*out)
            return tp_fail(TP_ERUNTIME, "%s: %s is \"%s\", which does not load: %s", library->what, library->variable, named, why);
        return TP_OK;
    }
    *out = search(library, &where);
    if (*out)
        return TP_OK;
    version_text(library->needed, needed);
    if (where.broken[0])
        return tp_fail(TP_ERUNTIME, "%s does not load: %s; %s or newer is needed: pip install -U %s, or name another file in %s",
                       library->what, where.broken, needed, library->package, library->variable);
    return tp_fail(TP_ERUNTIME, "%s was not found: %s is not loaded, nor in %s; %s or newer is needed: pip install %s, or name the "
                   "file in %s", library->what, library->sonames[0], where.text, needed, library->package, library->variable);
}

static tp_status
check(const tp_dl_library *library, const char *path, const char *missing, int found)
{
    char has[24], needed[24];
    version_text(found, has);
    version_text(library->needed, needed);
    if (missing)
        return tp_fail(TP_ERUNTIME, "%s at %s lacks %s: its version is %s; %s or newer is needed: pip install -U %s, or name "
                       "another in %s", library->what, path, missing, has, needed, library->package, library->variable);
    if (found < library->needed)
        return tp_fail(TP_ERUNTIME, "%s at %s is version %s; %s or newer is needed: pip install -U %s, or name another in %s",
                       library->what, path, has, needed, library->package, library->variable);
    return TP_OK;
}

static tp_status
load(const tp_dl_library *library, tp_dl_state *state)
{
    void *handle;
    TP_TRY(open_library(library, &handle));
    path_of(handle, state->path, sizeof state->path);
    const char *missing = fill(library, handle);
    int found = library->version();
    TP_TRY(check(library, state->path, missing, found));
    state->version = found;
    return TP_OK;
}

tp_status
tp_dl_load(const tp_dl_library *library, tp_dl_state *state)
{
    pthread_mutex_lock(&state->lock);
    tp_status status = state->version ? TP_OK : load(library, state);
    pthread_mutex_unlock(&state->lock);
    return status;
}

void
tp_dl_found(tp_dl_state *state, const char **path, int *version)
{
    pthread_mutex_lock(&state->lock);
    *path = state->version ? state->path : "";
    *version = state->version;
    pthread_mutex_unlock(&state->lock);
}
