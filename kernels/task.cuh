// What the tasks of all encodings have in common. Rust mirrors it: src/gpu/task.rs.
#pragma once

namespace df11 {
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Where the codebook of a tensor is and where its decode table goes.
struct TableTask {
    const u8* codebook;
    void* table;  // aligned to 16
    u64 codebook_bytes;
};

// The bit of the status word that all encodings share; each has more of its own. 0 is success, and
// kernels only set bits.
constexpr u32 STATUS_NO_CODE = 1;  // bits that are no code
}  // namespace df11
