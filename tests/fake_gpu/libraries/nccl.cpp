// NCCL between processes of one machine.
//
// A message is a file in /dev/shm, which carries the call that sent it.  A call is carried out at once: it returns
// when the messages of the other ranks have come.  A rank that calls something else than its peers gets an error
// that names both calls.  A peer that stays silent for FAKE_NCCL_PATIENCE seconds leaves the stream of the call
// stuck, as the kernel of NCCL would.  After FAKE_NCCL_SILENT calls with data, no call of this process is answered.
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "fake.hpp"

namespace {

enum Type { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, E4M3, E5M2 };
enum Reduction { SUM, PRODUCT_OF, MAX, MIN, AVERAGE };
enum Result { SUCCESS, SYSTEM = 2, INVALID_USAGE = 5 };
constexpr int SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};  // bytes by type
const std::string FOLDER = "/dev/shm/", PREFIX = "fake-nccl-";

struct Id {
    char text[128];
};
struct Comm {
    std::string folder;
    int ranks, rank;
    long calls;                     // of collectives so far
    std::map<int, long> sent, got;  // messages so far, by peer
    std::atomic<bool> aborted;
};
struct Call {
    const char* name;
    int type;
    long number;
};  // the number within the communicator; 0 for sends
struct Header {
    char name[16];
    long type, number, bytes;
};
struct Transfer {
    bool sends;
    char* memory;
    size_t bytes;
    int peer, type;
    Comm* comm;
    void* stream;
};

thread_local int depth = 0;                // of group calls
thread_local std::vector<Transfer> group;  // sends and receives of the group call under way
std::string last_error = "none";
std::atomic<long> data_calls{0};

long environment(const char* name, long otherwise) {
    const char* text = getenv(name);
    return text ? atol(text) : otherwise;
}

Result failed(const std::string& text) {
    last_error = "fake NCCL: " + text;
    fprintf(stderr, "%s\n", last_error.c_str());
    return INVALID_USAGE;
}

std::string text_of(const Header& header) {
    std::string call = std::string(header.name) + " of " + std::to_string(header.bytes) + " bytes, type " +
                       std::to_string(header.type);
    return header.number ? call + ", call " + std::to_string(header.number) : call;
}

Header header_of(const Call& call, size_t bytes) {
    Header header{};
    snprintf(header.name, sizeof header.name, "%s", call.name);
    header.type = call.type, header.number = call.number, header.bytes = bytes;
    return header;
}

Result put(Comm* comm, int to, const Call& call, const char* data, size_t bytes) {
    std::string name = comm->folder + "/" + std::to_string(comm->rank) + "-" + std::to_string(to) + "-" +
                       std::to_string(comm->sent[to]++);
    FILE* file = fopen((name + ".part").c_str(), "wb");
    if (!file) return failed("cannot write " + name);
    Header header = header_of(call, bytes);
    bool written = fwrite(&header, sizeof header, 1, file) == 1 && fwrite(data, 1, bytes, file) == bytes;
    if (fclose(file) || !written) return failed("no space for a message in /dev/shm");
    rename((name + ".part").c_str(), name.c_str());
    return SUCCESS;
}

// Read the next message of rank `from`.  A message that never comes leaves the stream stuck, which is a success.
Result get(Comm* comm, int from, const Call& call, char* data, size_t bytes, void* stream) {
    static const long patience = environment("FAKE_NCCL_PATIENCE", 300) * 1000000;
    std::string name = comm->folder + "/" + std::to_string(from) + "-" + std::to_string(comm->rank) + "-" +
                       std::to_string(comm->got[from]++);
    int file = -1;
    for (long waited = 0, nap = 20; (file = open(name.c_str(), O_RDONLY)) < 0;
         waited += nap, nap = std::min(nap * 2, 1000L)) {
        if (comm->aborted) return SYSTEM;
        if (waited > patience) {
            fake_stick(stream);
            return SUCCESS;
        }
        usleep(nap);
    }
    Header expected = header_of(call, bytes), header{};
    bool whole = read(file, &header, sizeof header) == sizeof header;
    if (whole && !memcmp(&header, &expected, sizeof header))
        for (size_t at = 0; whole && at < bytes;) {
            ssize_t got = read(file, data + at, bytes - at);
            whole = got > 0;
            at += got;
        }
    close(file);
    unlink(name.c_str());
    if (memcmp(&header, &expected, sizeof header))
        return failed("rank " + std::to_string(comm->rank) + " of " + std::to_string(comm->ranks) + " is in " +
                      text_of(expected) + "; rank " + std::to_string(from) + " is in " + text_of(header));
    return whole ? SUCCESS : failed("a message is cut: " + name);
}

bool lonely() { return fake_option(PEERS) == 1; }

// Whether a call has nothing to do, after noting it: no message is sent, or none is answered.
bool is_idle(const char* name, Comm* comm, void* stream, size_t read_bytes, const void* read, size_t written_bytes,
             const void* written) {
    static const long silent_after = environment("FAKE_NCCL_SILENT", -1);
    fake_note(NCCL, stream, comm->ranks, std::max(read_bytes, written_bytes), name);
    if (read) fake_access(stream, read, read_bytes, false, name);
    if (written) fake_access(stream, written, written_bytes, true, name);
    if (silent_after >= 0 && ++data_calls > silent_after) {
        fake_stick(stream);
        return true;
    }
    return fake_option(PEERS) == 2;
}

float from_bf16(uint16_t bits) {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}
uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
template <class T>
T combine(T a, T b, int reduction) {
    switch (reduction) {
        case PRODUCT_OF: return a * b;
        case MAX: return a > b ? a : b;
        case MIN: return a < b ? a : b;
        default: return a + b;
    }
}
template <class T>
void combine(char* total, const char* part, size_t count, int reduction) {
    auto* to = reinterpret_cast<T*>(total);
    auto* from = reinterpret_cast<const T*>(part);
    for (size_t i = 0; i < count; ++i) to[i] = combine<T>(to[i], from[i], reduction);
}
template <class T>
void divide(char* total, size_t count, int ranks) {
    for (size_t i = 0; i < count; ++i) reinterpret_cast<T*>(total)[i] /= ranks;
}

Result add(char* total, const char* part, size_t count, int type, int reduction) {
    switch (type) {
        case INT8: combine<int8_t>(total, part, count, reduction); break;
        case UINT8: combine<uint8_t>(total, part, count, reduction); break;
        case INT32: combine<int32_t>(total, part, count, reduction); break;
        case INT64: combine<int64_t>(total, part, count, reduction); break;
        case FLOAT16: combine<_Float16>(total, part, count, reduction); break;
        case FLOAT32: combine<float>(total, part, count, reduction); break;
        case FLOAT64: combine<double>(total, part, count, reduction); break;
        case BFLOAT16:
            for (size_t i = 0; i < count; ++i) {
                auto* to = reinterpret_cast<uint16_t*>(total) + i;
                *to =
                    to_bf16(combine(from_bf16(*to), from_bf16(reinterpret_cast<const uint16_t*>(part)[i]), reduction));
            }
            break;
        default: return failed("no sums of type " + std::to_string(type));
    }
    return SUCCESS;
}

Result average(char* total, size_t count, int type, int ranks) {
    switch (type) {
        case FLOAT16: divide<_Float16>(total, count, ranks); break;
        case FLOAT32: divide<float>(total, count, ranks); break;
        case FLOAT64: divide<double>(total, count, ranks); break;
        case BFLOAT16:
            for (size_t i = 0; i < count; ++i) {
                auto* to = reinterpret_cast<uint16_t*>(total) + i;
                *to = to_bf16(from_bf16(*to) / ranks);
            }
            break;
        default: return failed("no averages of type " + std::to_string(type));
    }
    return SUCCESS;
}

// Send part i of `sent` to rank i, and receive a part from each; `step` 0 sends all the same part.
Result exchange(Comm* comm, const Call& call, const char* sent, size_t step, char* received, size_t bytes,
                void* stream) {
    std::vector<char> own(sent + comm->rank * step, sent + comm->rank * step + bytes);
    for (int i = 0; i < comm->ranks; ++i)
        if (i != comm->rank && !lonely())
            if (Result result = put(comm, i, call, sent + i * step, bytes)) return result;
    for (int i = 0; i < comm->ranks; ++i) {
        if (i == comm->rank || lonely())
            memcpy(received + i * bytes, own.data(), bytes);
        else if (Result result = get(comm, i, call, received + i * bytes, bytes, stream))
            return result;
    }
    return SUCCESS;
}

// Sum the parts of all ranks in the order of ranks, so that all have the same bits.
Result reduce(Comm* comm, const Call& call, const char* sent, size_t step, char* out, size_t count, int reduction,
              void* stream) {
    size_t bytes = count * SIZES[call.type];
    std::vector<char> parts(bytes * comm->ranks);
    if (Result result = exchange(comm, call, sent, step, parts.data(), bytes, stream)) return result;
    int ranks = lonely() ? 1 : comm->ranks;
    for (int i = 1; i < ranks; ++i)
        if (Result result = add(parts.data(), parts.data() + i * bytes, count, call.type, reduction)) return result;
    memcpy(out, parts.data(), bytes);
    return reduction == AVERAGE ? average(out, count, call.type, ranks) : SUCCESS;
}

Result end_group() {
    std::vector<Transfer> transfers;
    transfers.swap(group);
    Call call{"Send", 0, 0};
    for (auto& t : transfers)
        if (t.sends && t.peer != t.comm->rank && !lonely())
            if (Result result = put(t.comm, t.peer, (call.type = t.type, call), t.memory, t.bytes)) return result;
    for (auto& t : transfers) {
        if (t.sends) continue;
        if (t.peer != t.comm->rank && !lonely()) {
            if (Result result = get(t.comm, t.peer, (call.type = t.type, call), t.memory, t.bytes, t.stream))
                return result;
            continue;
        }
        for (auto& other : transfers)
            if (other.sends && other.comm == t.comm && other.peer == t.peer) {
                memmove(t.memory, other.memory, std::min(t.bytes, other.bytes));
                break;
            }
    }
    return SUCCESS;
}

Result create(Comm** made, const char* id, int ranks, int rank) {
    *made = new Comm{FOLDER + PREFIX + id, ranks, rank, 0, {}, {}, {false}};
    mkdir((*made)->folder.c_str(), 0700);
    return SUCCESS;
}

void remove_folder(const std::string& folder) {
    if (DIR* files = opendir(folder.c_str())) {
        while (dirent* file = readdir(files)) unlink((folder + "/" + file->d_name).c_str());
        closedir(files);
    }
    rmdir(folder.c_str());
}

// Remove the folders of runs that were killed: their process is gone, and they are an hour old.
void remove_stale() {
    DIR* folders = opendir(FOLDER.c_str());
    if (!folders) return;
    while (dirent* entry = readdir(folders)) {
        std::string name = entry->d_name;
        struct stat status;
        if (name.rfind(PREFIX, 0) || stat((FOLDER + name).c_str(), &status)) continue;
        if (status.st_mtime < time(nullptr) - 3600 && kill(atoi(name.c_str() + PREFIX.size()), 0))
            remove_folder(FOLDER + name);
    }
    closedir(folders);
}

}  // namespace

API int ncclGetVersion(int* version) {
    *version = 22809;
    return SUCCESS;
}
API int ncclGetUniqueId(Id* id) {
    static std::atomic<int> made{0};
    remove_stale();
    timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    memset(id, 0, sizeof *id);
    snprintf(id->text, sizeof id->text, "%d-%ld-%d", getpid(), t.tv_nsec, made++);
    return SUCCESS;
}
API int ncclCommInitRank(Comm** comm, int ranks, Id id, int rank) { return create(comm, id.text, ranks, rank); }
API int ncclCommInitRankConfig(Comm** comm, int ranks, Id id, int rank, void*) {
    return create(comm, id.text, ranks, rank);
}
API int ncclCommInitRankScalable(Comm** comm, int ranks, int rank, int, Id* ids, void*) {
    return create(comm, ids->text, ranks, rank);
}
API int ncclCommDestroy(Comm* comm) {
    rmdir(comm->folder.c_str());
    return SUCCESS;
}
API int ncclCommFinalize(Comm*) { return SUCCESS; }
API int ncclCommAbort(Comm* comm) {
    comm->aborted = true;
    fake_release();
    return SUCCESS;
}
API int ncclCommGetAsyncError(Comm*, int* error) {
    *error = SUCCESS;
    return SUCCESS;
}
API int ncclCommCount(Comm* comm, int* ranks) {
    *ranks = comm->ranks;
    return SUCCESS;
}
API int ncclCommUserRank(Comm* comm, int* rank) {
    *rank = comm->rank;
    return SUCCESS;
}
API const char* ncclGetErrorString(int) { return "fake NCCL: an error"; }
API const char* ncclGetLastError(Comm*) { return last_error.c_str(); }

API int ncclGroupStart() {
    ++depth;
    return SUCCESS;
}
API int ncclGroupEnd() { return --depth ? SUCCESS : end_group(); }
static int transfer(bool sends, const void* memory, size_t count, int type, int peer, Comm* comm, void* stream) {
    size_t bytes = count * SIZES[type];
    const void *read = sends ? memory : nullptr, *written = sends ? nullptr : memory;
    if (is_idle(sends ? "Send" : "Recv", comm, stream, bytes, read, bytes, written)) return SUCCESS;
    group.push_back({sends, (char*)memory, bytes, peer, type, comm, stream});
    return depth ? SUCCESS : end_group();
}
API int ncclSend(const void* memory, size_t count, int type, int peer, Comm* comm, void* stream) {
    return transfer(true, memory, count, type, peer, comm, stream);
}
API int ncclRecv(void* memory, size_t count, int type, int peer, Comm* comm, void* stream) {
    return transfer(false, memory, count, type, peer, comm, stream);
}
API int ncclAllGather(const void* sent, void* received, size_t count, int type, Comm* comm, void* stream) {
    size_t bytes = count * SIZES[type];
    if (is_idle("AllGather", comm, stream, bytes, sent, bytes * comm->ranks, received)) return SUCCESS;
    return exchange(comm, {"AllGather", type, ++comm->calls}, (const char*)sent, 0, (char*)received, bytes, stream);
}
API int ncclAlltoAll(const void* sent, void* received, size_t count, int type, Comm* comm, void* stream) {
    size_t bytes = count * SIZES[type], all = bytes * comm->ranks;
    if (is_idle("AlltoAll", comm, stream, all, sent, all, received)) return SUCCESS;
    return exchange(comm, {"AlltoAll", type, ++comm->calls}, (const char*)sent, bytes, (char*)received, bytes, stream);
}
API int ncclAllReduce(const void* sent, void* received, size_t count, int type, int reduction, Comm* comm,
                      void* stream) {
    size_t bytes = count * SIZES[type];
    if (is_idle("AllReduce", comm, stream, bytes, sent, bytes, received)) return SUCCESS;
    return reduce(comm, {"AllReduce", type, ++comm->calls}, (const char*)sent, 0, (char*)received, count, reduction,
                  stream);
}
API int ncclReduceScatter(const void* sent, void* received, size_t count, int type, int reduction, Comm* comm,
                          void* stream) {
    size_t bytes = count * SIZES[type];
    if (is_idle("ReduceScatter", comm, stream, bytes * comm->ranks, sent, bytes, received)) return SUCCESS;
    return reduce(comm, {"ReduceScatter", type, ++comm->calls}, (const char*)sent, bytes, (char*)received, count,
                  reduction, stream);
}
API int ncclBroadcast(const void* sent, void* received, size_t count, int type, int root, Comm* comm, void* stream) {
    size_t bytes = count * SIZES[type];
    Call call{"Broadcast", type, ++comm->calls};
    if (is_idle("Broadcast", comm, stream, bytes, comm->rank == root ? sent : nullptr, bytes, received)) return SUCCESS;
    if (comm->rank != root) return lonely() ? SUCCESS : get(comm, root, call, (char*)received, bytes, stream);
    for (int i = 0; i < comm->ranks; ++i)
        if (i != root && !lonely())
            if (Result result = put(comm, i, call, (const char*)sent, bytes)) return result;
    memmove(received, sent, bytes);
    return SUCCESS;
}
API int ncclBcast(void* memory, size_t count, int type, int root, Comm* comm, void* stream) {
    return ncclBroadcast(memory, memory, count, type, root, comm, stream);
}
