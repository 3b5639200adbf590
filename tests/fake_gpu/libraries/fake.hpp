// What the fake libraries share: the trace of calls, the options, and streams that never end.
#pragma once
#include <cstddef>

#define API extern "C" __attribute__((visibility("default")))

// The numbers are those of Kind in tests/fake_gpu/trace.py.
enum Kind : long {
    KERNEL,
    COPY,
    SET,
    RECORD,
    WAIT,
    SYNC_STREAM,
    SYNC_EVENT,
    SYNC_DEVICE,
    QUERY,
    ALLOCATE,
    FREE,
    PIN,
    EVENT,
    NCCL,
    PRODUCT,
    CODEC,
    ACCESS
};

enum Option {
    COPIES,   // 1: copies within a device are made; 0: they are only noted
    PEERS,    // 0: messages go between processes; 1: each other rank sends what this rank sends; 2: no message is sent
    QUERIES,  // 1: all recorded work has ended when the host asks; 0: no work ends before the host waits for it
};

extern "C" {
// Count a call, and append it to the trace while one is recorded.  `name` must live as long as the process.
void fake_note(long kind, const void* stream, long event, long bytes, const char* name);
// Append an access of memory by the stream's work to the trace, if the memory is a device's or pinned.
void fake_access(const void* stream, const void* memory, long bytes, bool writes, const char* name);
long fake_option(int option);
// No work of the stream ends any more, and no work that waits for it, until fake_release().
void fake_stick(const void* stream);
void fake_release();
}
