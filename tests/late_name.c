/* Preloaded, it knows no address of the host "rank0.late" when it is asked first; then that of this machine. Of "rank0.mute"
 * nobody says anything, as where whoever serves names is not there. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <string.h>
#include <unistd.h>

int
getaddrinfo(const char *host, const char *service, const struct addrinfo *hints, struct addrinfo **out)
{
    static int asked;
    int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **);
    *(void **)&real = dlsym(RTLD_NEXT, "getaddrinfo");
    if (host != NULL && strcmp(host, "rank0.late") == 0) {
        if (asked++ == 0)
            return EAI_NONAME;
        host = "127.0.0.1";
    }
    while (host != NULL && strcmp(host, "rank0.mute") == 0)
        pause();
    return real(host, service, hints, out);
}
