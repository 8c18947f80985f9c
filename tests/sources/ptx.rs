//! The committed PTX and machine code belong to the kernels' sources. Needs neither CUDA nor a GPU.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use serde::Deserialize;

use crate::files::sha256;

/// The kernels that the crate launches, by module.
const ENTRIES: [(&str, &[&str]); 4] = [
    (
        "gap.ptx",
        &[
            "df11_gap_decode_16",
            "df11_gap_decode_32",
            "df11_gap_decode_64",
            "df11_gap_decode_8",
            "df11_gap_tables",
        ],
    ),
    ("tile.ptx", &["df11_tile_decode", "df11_tile_decode_few", "df11_tile_tables"]),
    (
        "float.ptx",
        &[
            "df11_float_choose",
            "df11_float_decode_bf16_of_e4m3",
            "df11_float_decode_e4m3",
            "df11_float_decode_e5m2",
            "df11_float_decode_f16",
            "df11_float_decode_f32",
            "df11_float_decode_f32_of_bf16",
            "df11_float_decode_f32_of_f16",
            "df11_float_decode_few_bf16_of_e4m3",
            "df11_float_decode_few_e4m3",
            "df11_float_decode_few_e5m2",
            "df11_float_decode_few_f16",
            "df11_float_decode_few_f32",
            "df11_float_decode_few_f32_of_bf16",
            "df11_float_decode_few_f32_of_f16",
            "df11_float_tables_bf16_of_e4m3",
            "df11_float_tables_e4m3",
            "df11_float_tables_e5m2",
            "df11_float_tables_f16",
            "df11_float_tables_f32",
            "df11_float_tables_f32_of_bf16",
            "df11_float_tables_f32_of_f16",
        ],
    ),
    (
        "linear.ptx",
        &[
            "df11_linear_count",
            "df11_linear_fast_16",
            "df11_linear_fast_8",
            "df11_linear_gather",
            "df11_linear_grouped_8",
            "df11_linear_pack",
            "df11_linear_patch",
            "df11_linear_scan",
            "df11_linear_tile_16",
            "df11_linear_tile_8",
            "df11_linear_tile_gather",
            "df11_linear_unpack",
        ],
    ),
];

#[derive(Deserialize)]
struct Manifest {
    modules: BTreeMap<String, Module>,
}

#[derive(Deserialize)]
struct Module {
    sha256: String,
    entries: Vec<String>,
    /// The constants of its compilation: the words of `Constants` in its source.
    constants: Vec<u64>,
    /// By target and kernel.
    resources: BTreeMap<String, BTreeMap<String, Resources>>,
    machine_code: BTreeMap<String, MachineCode>,
    sources: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct Resources {
    registers: u64,
    static_shared: u64,
    spill_stores: u64,
}

#[derive(Deserialize)]
struct MachineCode {
    sha256: String,
    /// Hash of the PTX that it was made of: the committed one, or that for the target alone.
    ptx: String,
}

fn kernels() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels")
}

fn manifest() -> Manifest {
    serde_json::from_str(&read("ptx/manifest.json")).unwrap()
}

/// A file below `kernels/`.
fn bytes(name: &str) -> Vec<u8> {
    let read = fs::read(kernels().join(name));
    read.unwrap_or_else(|error| panic!("kernels/{name}: {error}; `just ptx` renews kernels/ptx"))
}

/// A text below `kernels/` as the repository has it: a checkout may have changed line endings.
fn read(name: &str) -> String {
    String::from_utf8(bytes(name)).unwrap().replace("\r\n", "\n")
}

#[track_caller]
fn hold(is_right: bool, name: &str, problem: &str) {
    assert!(is_right, "kernels/{name} {problem}; `just ptx` renews it");
}

#[test]
fn ptx_is_that_of_the_sources() {
    for (ptx, module) in manifest().modules {
        let problem = format!("changed after kernels/ptx/{ptx} was made");
        for (source, hash) in &module.sources {
            hold(sha256(read(source)) == *hash, source, &problem);
        }
    }
}

#[test]
fn ptx_and_machine_code_are_as_the_compilers_wrote_them() {
    for (ptx, module) in manifest().modules {
        let (ptx, other) = (format!("ptx/{ptx}"), "is not that of the manifest");
        hold(sha256(read(&ptx)) == module.sha256, &ptx, other);
        for (name, code) in module.machine_code {
            let name = format!("ptx/{name}");
            hold(sha256(bytes(&name)) == code.sha256, &name, other);
            // Code for Hopper alone (sm_90a) is made of a PTX that is not kept.
            let is_of_it = module.sha256 == code.ptx || name.contains(".sm_90a.");
            hold(is_of_it, &name, &format!("was made of another {ptx}"));
        }
    }
}

#[test]
fn every_source_belongs_to_a_module() {
    let known: BTreeSet<String> =
        manifest().modules.into_values().flat_map(|module| module.sources.into_keys()).collect();
    for file in fs::read_dir(kernels()).unwrap() {
        let name = file.unwrap().file_name().into_string().unwrap();
        let is_source = Path::new(&name).extension().is_some_and(|end| end == "cu" || end == "cuh");
        let problem = "is in no module of kernels/ptx/manifest.json";
        hold(!is_source || known.contains(&name), &name, problem);
    }
}

#[test]
fn ptx_holds_what_the_crate_launches_for_every_gpu_since_ampere() {
    assert_eq!(manifest().modules.len(), ENTRIES.len());
    for (module, entries) in ENTRIES {
        let name = format!("ptx/{module}");
        let ptx = read(&name);
        hold(ptx.contains("\n.target sm_80\n"), &name, "is not for sm_80");
        // PTX 8.0 is what drivers of CUDA 12.0 load.
        hold(ptx.contains("\n.version 8.0\n"), &name, "needs newer drivers");
        for entry in entries {
            let line = format!("\n.visible .entry {entry}(\n");
            hold(ptx.contains(&line), &name, &format!("lacks {entry}"));
        }
        assert_eq!(manifest().modules[module].entries, entries);
    }
}

/// Shared memory that a block may have on the smallest GPUs, those of compute capability 8.6, 8.9
/// and 12.0.
const SMALLEST_ROOM: u64 = 99 << 10;

/// The most that a tile takes of shared memory (spec/format.md 6.4): 32 lanes of 3584 bits and up
/// to 127 more, in copies of 16 bytes.
const LARGEST_TILE: u64 = 32 * (3584 + 127) / 8 + 32;

fn check_fit(module: &Module, kernel: &str, [warp, max_warps, least_warps]: [u64; 3]) {
    for (target, kernels) in &module.resources {
        let taken = &kernels[kernel];
        assert!(
            max_warps >= least_warps && taken.static_shared + least_warps * warp <= SMALLEST_ROOM,
            "{target}, {kernel}"
        );
        // A multiprocessor has 64 Ki registers.
        assert!(max_warps * 32 * taken.registers <= 65_536, "{target}, {kernel}");
        assert!(
            taken.spill_stores <= 32,
            "{target}, {kernel}: see ALLOWED_SPILLS in kernels/build.py"
        );
    }
}

#[test]
fn every_decode_kernel_fits_the_smallest_gpus() {
    let modules = manifest().modules;
    let gap = &modules["gap.ptx"];
    for (at, bytes) in [8, 16, 32, 64].into_iter().enumerate() {
        let [warp, max_warps] = [3, 7].map(|group| gap.constants[group + at]);
        // Four warps share thread blocks; fewer would leave most of a multiprocessor idle.
        check_fit(gap, &format!("df11_gap_decode_{bytes}"), [warp, max_warps, 4]);
    }
    let tile = &modules["tile.ptx"];
    let [besides, max_warps] = [4, 5].map(|at| tile.constants[at]);
    check_fit(tile, "df11_tile_decode", [besides + LARGEST_TILE, max_warps, 4]);
    // Common weights: all the warps that registers allow.
    check_fit(tile, "df11_tile_decode", [besides + 2704, max_warps, max_warps]);
    let float = &modules["float.ptx"];
    let besides = float.constants[4];
    let order = ["e4m3", "e5m2", "f16", "bf16_of_e4m3", "f32", "f32_of_f16", "f32_of_bf16"];
    for (name, &max_warps) in order.into_iter().zip(&float.constants[6..13]) {
        for kernel in ["decode", "decode_few"].map(|what| format!("df11_float_{what}_{name}")) {
            check_fit(float, &kernel, [besides + LARGEST_TILE, max_warps, 4]);
            check_fit(float, &kernel, [besides + 2704, max_warps, max_warps]);
            for (target, kernels) in &float.resources {
                assert_eq!(kernels[&kernel].spill_stores, 0, "{target}, {kernel}");
            }
        }
    }
}

#[test]
fn every_product_kernel_fits_the_smallest_gpus() {
    let linear = &manifest().modules["linear.ptx"];
    let [threads, _, few_bytes, max_bytes, _, grouped, 8, 0, 0, 0, 0, packing] =
        *linear.constants[26..].first_chunk().unwrap()
    else {
        panic!("other constants are at these places")
    };
    assert!(threads > 0 && few_bytes > 0 && grouped > 0 && packing > 0);
    for (rows, shared) in [(8, few_bytes), (16, max_bytes)] {
        let kernel = &format!("df11_linear_fast_{rows}");
        for (target, kernels) in &linear.resources {
            assert!(
                threads.next_multiple_of(128) * kernels[kernel].registers <= 65_536,
                "{target}"
            );
            assert_eq!(kernels[kernel].spill_stores, 0, "{target}, {kernel}");
        }
        let taken = &linear.resources["sm_80"][kernel];
        assert!(shared + taken.static_shared <= SMALLEST_ROOM);
    }
    let taken = &linear.resources["sm_80"]["df11_linear_grouped_8"];
    assert!(grouped + taken.static_shared <= SMALLEST_ROOM);
    assert!(packing <= SMALLEST_ROOM);
}
