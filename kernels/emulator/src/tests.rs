//! Small kernels with and without faults.

use std::sync::Arc;

use crate::{
    machine::{Fault, Launch, run},
    memory, parse,
    program::Program,
};

const ELEMENTS: usize = 64;

#[repr(align(16))]
struct Aligned([u32; ELEMENTS]);

/// A kernel of a block or more, with one pointer and the memory that it may use.
struct Case<'t> {
    /// Functions that the body calls.
    functions: &'t str,
    body: &'t str,
    blocks: u32,
    threads: u32,
    seed: u64,
}

impl Case<'_> {
    /// Returns the words in memory after the run; each began as its index.
    fn run(&self) -> Result<Vec<u32>, Fault> {
        let text = format!(
            ".version 8.0\n.target sm_90a\n.address_size 64\n\
             .extern .shared .align 16 .b8 memory[];\n{}\
             .visible .entry kernel(\n.param .u64 kernel_param_0\n)\n{{\n\
             .reg .pred %p<9>;\n.reg .b32 %r<9>;\n.reg .b64 %rd<9>;\n\
             ld.param.u64 %rd1, [kernel_param_0];\nmov.u32 %r1, %tid.x;\n\
             mul.wide.u32 %rd2, %r1, 4;\nadd.s64 %rd2, %rd1, %rd2;\nmov.u32 %r2, memory;\n\
             {}\nret;\n}}\n",
            self.functions, self.body
        );
        let program = Arc::new(Program::new(&parse::parse(&text)));
        let mut words = Box::new(Aligned(std::array::from_fn(|at| at as u32)));
        let address = words.0.as_mut_ptr() as u64;
        memory::note(address, 4 * ELEMENTS as u64);
        let result = run(&Launch {
            entry: Arc::clone(&program.entries["kernel"]),
            program,
            name: "kernel".into(),
            parameters: address.to_le_bytes().to_vec(),
            blocks: self.blocks,
            threads: self.threads,
            cluster: 1,
            dynamic_shared: 1024,
            resident: 4,
            seed: self.seed,
        });
        memory::forget(address);
        result.map(|_| words.0.to_vec())
    }
}

fn run_one(body: &str, seed: u64) -> Result<Vec<u32>, Fault> {
    Case { functions: "", body, blocks: 1, threads: 32, seed }.run()
}

fn problem(body: &str) -> String {
    run_one(body, 1).expect_err("it has a fault").0
}

/// Brings 256 bytes to shared memory; the first thread asks.
const ASK: &str = "
    setp.ne.u32 %p1, %r1, 0;
    add.s32 %r3, %r2, 512;
    @%p1 bra ASKED;
    mbarrier.init.shared.b64 [%r3], 1;
    { .reg .b64 s; mbarrier.arrive.expect_tx.shared.b64 s, [%r3], 256; }
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 256, [%r3];
    ASKED:
    bar.warp.sync -1;";
const WAIT: &str = "
    { .reg .pred p;
    AGAIN: mbarrier.try_wait.parity.shared.b64 p, [%r3], 0;
    @p bra DONE;
    bra AGAIN;
    DONE: }";
/// Writes what is there, the other way around.
const TAKE: &str = "
    mul.lo.u32 %r4, %r1, 4;
    sub.u32 %r4, %r2, %r4;
    ld.shared.u32 %r5, [%r4+124];
    st.global.u32 [%rd2], %r5;";

#[test]
fn a_copy_is_there_after_its_barrier() {
    for seed in 1..20 {
        let words = run_one(&[ASK, WAIT, TAKE].concat(), seed).unwrap();
        let expected: Vec<u32> = (0..32).rev().chain(32..64).collect();
        assert_eq!(words, expected);
    }
}

#[test]
fn a_copy_for_which_nobody_waits_is_nonsense_in_some_order() {
    let is_wrong = |seed| match run_one(&[ASK, TAKE, WAIT].concat(), seed) {
        Ok(words) => words[0] == 0xA5A5_A5A5,
        Err(Fault(_)) => false,
    };
    assert!((1..40).any(is_wrong));
}

#[test]
fn who_waits_for_ever_is_told_with_the_line() {
    let text = problem(&["mbarrier.init.shared.b64 [%r2], 2;\nmov.u32 %r3, %r2;", WAIT].concat());
    assert!(text.contains("kernel hangs") && text.contains("warp 0 ffffffff: line"), "{text}");
    assert!(text.contains("2 of 2 arrivals"), "{text}");
}

#[test]
fn threads_that_miss_a_barrier_hang() {
    let body = "setp.lt.u32 %p1, %r1, 32;\n@%p1 bra END;\nbar.sync 0;\nEND:";
    let result = Case { functions: "", body, blocks: 2, threads: 64, seed: 3 }.run();
    assert!(result.is_err_and(|fault| fault.0.contains("kernel hangs")));
}

#[test]
fn memory_of_nobody_is_neither_read_nor_written() {
    for body in [
        "ld.global.u32 %r3, [%rd1+256];",
        "st.global.u32 [%rd1+-4], %r1;",
        "st.shared.u32 [%r2+1024], %r1;",
        "ld.global.v2.u32 {%r3, %r4}, [%rd1+252];",
    ] {
        let text = problem(body);
        let told = ["were not allocated", "are not the block's", "are not aligned"];
        assert!(told.iter().any(|told| text.contains(told)), "{text}");
    }
}

#[test]
fn variables_of_a_function_have_shared_memory_of_their_own() {
    let functions = "
        .func write(.param .b32 write_param_0)
        {
        .reg .b32 %r<2>;
        .shared .align 4 .u32 inner;
        ld.param.u32 %r1, [write_param_0];
        st.shared.u32 [inner], %r1;
        ret;
        }
        ";
    let body = "
        .shared .align 4 .u32 outer;
        mov.u32 %r3, 77;
        st.shared.u32 [outer], %r3;
        st.shared.u32 [%r2], %r3;
        { .param .b32 param0; st.param.b32 [param0], %r1; call.uni write, (param0); }
        ld.shared.u32 %r4, [outer];
        ld.shared.u32 %r5, [%r2];
        add.s32 %r4, %r4, %r5;
        st.global.u32 [%rd1], %r4;";
    let words = Case { functions, body, blocks: 1, threads: 1, seed: 1 }.run();
    assert_eq!(words.unwrap()[0], 154);
}

#[test]
fn one_arrival_too_many_is_a_fault() {
    let arrive = "{ .reg .b64 s; mbarrier.arrive.expect_tx.shared.b64 s, [%r2], 16; }\n";
    let text = problem(&["mbarrier.init.shared.b64 [%r2], 32;\n", arrive, arrive].concat());
    assert!(text.contains("one arrival too many"), "{text}");
}

#[test]
fn threads_of_a_warp_exchange_values() {
    let words = run_one(
        "shfl.sync.bfly.b32 %r3|%p1, %r1, 1, 31, -1;
         setp.lt.u32 %p2, %r1, 5;
         vote.sync.ballot.b32 %r4, %p2, -1;
         add.s32 %r5, %r3, %r4;
         st.global.u32 [%rd2], %r5;",
        1,
    );
    let expected: Vec<u32> = (0..32).map(|lane| (lane ^ 1) + 31).chain(32..64).collect();
    assert_eq!(words.unwrap(), expected);
}

#[test]
fn words_are_taken_apart_and_put_together() {
    let words = run_one(
        "mov.u32 %r3, 0x12345678;
         prmt.b32 %r4, %r3, 0xAABBCCDD, 0x7014;
         st.global.u32 [%rd1], %r4;
         lop3.b32 %r4, %r3, 0xFF, 0x0F0F0F0F, 0xE4;
         st.global.u32 [%rd1+4], %r4;
         shf.r.wrap.b32 %r4, %r3, 1, 36;
         st.global.u32 [%rd1+8], %r4;
         bfi.b32 %r4, 0xFF, %r3, 8, 4;
         st.global.u32 [%rd1+12], %r4;
         shl.b32 %r4, %r3, 32;
         st.global.u32 [%rd1+16], %r4;
         bfind.shiftamt.u32 %r4, %r3;
         st.global.u32 [%rd1+20], %r4;",
        1,
    );
    let bits = (0x1234_5678 & 0x0F0F_0F0F) | (0xFF & !0x0F0F_0F0F);
    assert_eq!(words.unwrap()[..6], [0xAA78_56DD, bits, 0x1123_4567, 0x1234_5F78, 0, 3]);
}
