//! The command's messages if the GPU's driver is missing, old, broken, or out of memory. The
//! environment of each process says how the stand-in answers.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use df11::Dtype;
use rayon::prelude::*;
use serde_json::Value;
use tempfile::TempDir;

use crate::container::{Item, weights_file};
use crate::stand_in::{self, LIBRARY_NAMES, folder, functions};

const BINARY: &str = env!("CARGO_BIN_EXE_df11");

/// A setting of the driver itself.
const HIDE: &str = "CUDA_VISIBLE_DEVICES";

/// How the stand-in answers.
type Answers<'a> = &'a [(&'a str, &'a str)];

/// A folder with the stand-in's library.
struct Driver {
    folder: TempDir,
}

impl Driver {
    /// None if there is no compiler.
    fn compile() -> Option<Self> {
        Some(Self { folder: stand_in::compile()? })
    }

    /// The same without one of its functions, which has another name.
    fn without(&self, function: &str) -> Self {
        let mut library = fs::read(self.folder.path().join(LIBRARY_NAMES[0])).unwrap();
        let name = format!("\0{function}\0").into_bytes();
        let mut names = library.windows(name.len());
        let at = names.position(|window| *window == name[..]).unwrap();
        library[at + 1] = b'x';
        let folder = folder();
        fs::write(folder.path().join(LIBRARY_NAMES[0]), library).unwrap();
        Self { folder }
    }

    /// An environment in which no driver's library can be loaded, even if the machine has one.
    fn missing() -> Self {
        let folder = folder();
        for name in LIBRARY_NAMES {
            fs::write(folder.path().join(name), "no library").unwrap();
        }
        Self { folder }
    }

    /// Runs the command; nothing ever panics.
    fn run(&self, answers: Answers<'_>, arguments: &[&str]) -> Output {
        let mut command = Command::new(BINARY);
        command.args(arguments).stdin(Stdio::null());
        stand_in::answer(&mut command, self.folder.path(), answers);
        if let Some((name, hidden)) = answers.iter().find(|(name, _)| *name == HIDE) {
            command.env(name, hidden);
        }
        let output = command.output().unwrap();
        for text in [&output.stdout, &output.stderr] {
            assert!(!String::from_utf8_lossy(text).contains("panicked"), "{answers:?}: {output:?}");
        }
        output
    }

    /// The doctor's words about the GPU.
    fn doctor(&self, answers: Answers<'_>) -> Value {
        // Without a folder it does not measure this machine.
        let output = self.run(answers, &["doctor", "--json", "--folder", "/no such folder"]);
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), ""), "{answers:?}");
        serde_json::from_slice::<Value>(&output.stdout).unwrap()["checks"]["gpu"].take()
    }

    /// A benchmark of a file.
    fn bench(&self, answers: Answers<'_>, file: &Path) -> Output {
        let file = file.to_str().unwrap();
        self.run(answers, &["bench", file, "--gpu", "--json", "--repetitions", "1"])
    }

    /// The line with which a benchmark fails before it looks at its file.
    fn refusal(&self, answers: Answers<'_>) -> String {
        refusal(&self.bench(answers, Path::new("/no such file")))
    }

    /// A benchmark and the doctor say the same, in which all of `parts` occur.
    fn refuses(&self, answers: Answers<'_>, parts: &[&str]) {
        let line = self.refusal(answers);
        let found = self.doctor(answers);
        let (said, remedy) = (found["text"].as_str().unwrap(), found["remedy"].as_str().unwrap());
        let problem = line.strip_suffix(remedy).and_then(|rest| rest.strip_suffix("; ")).unwrap();
        assert!(said.ends_with(problem), "{said:?} and {line:?}");
        assert_eq!(found["status"], "warn", "{found}");
        for part in parts {
            assert!(line.contains(part), "{part:?} in {line:?}");
        }
    }
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// The one line of a failure of the GPU, after what all of them start with.
fn refusal(output: &Output) -> String {
    let line = text(&output.stderr).trim_end();
    assert_eq!((output.status.code(), line.lines().count()), (Some(2), 1), "{line}");
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(said["error"]["kind"], "gpu", "{said}");
    assert!(line.contains("; "), "a problem and a remedy: {line}");
    line.strip_prefix("df11: GPU: ").unwrap_or_else(|| panic!("{line}")).to_owned()
}

/// A safetensors file with one matrix of 16 columns.
fn safetensors(folder: &TempDir, dtype: Dtype, bytes: &[u8]) -> PathBuf {
    let rows = bytes.len() as u64 / (2 * dtype.bits());
    let path = folder.path().join("model.safetensors");
    let item = Item::raw("a", dtype, &[rows, 16], bytes.to_vec());
    fs::write(&path, weights_file(&[item])).unwrap();
    path
}

const NEWER: &str = "install a driver of CUDA 12.0 (R525) or newer";

#[test]
fn a_machine_without_a_driver_lacks_nothing() {
    let driver = Driver::missing();
    let line = driver.refusal(&[]);
    assert!(
        line.starts_with("no NVIDIA driver on this machine; install one of CUDA 12.0"),
        "{line}"
    );
    let found = driver.doctor(&[]);
    assert_eq!((&found["status"], &found["remedy"]), (&"ok".into(), &Value::Null));
    assert_eq!(found["text"], format!("none in use: {line}"));
}

#[test]
fn a_driver_that_lacks_a_function_is_refused() {
    let functions = functions();
    assert!(functions.len() > 40 && functions.contains(&"cuInit"), "{functions:?}");
    let Some(driver) = Driver::compile() else { return };
    functions.into_par_iter().for_each(|function| {
        let line = driver.without(function).refusal(&[]);
        assert_eq!(line, format!("the NVIDIA driver lacks the function {function}; {NEWER}"));
    });
}

#[test]
fn drivers_that_do_not_start_and_gpus_that_do_not_open_are_refused() {
    let Some(driver) = Driver::compile() else { return };
    let (memory, ampere) = ("free memory on the GPU", "8.0 (Ampere) or newer");
    let start = |answer: &str| format!("starting the NVIDIA driver: words for {answer}");
    let (open, load) = ("starting the GPU: words for ", "loading the kernels: words for ");
    let (retain, module) = ("cuDevicePrimaryCtxRetain", "cuModuleLoadData");
    let rows: [(&str, &str, &str, &str); 25] = [
        ("version", "11040", "the NVIDIA driver knows CUDA 11.4", NEWER),
        ("version", "11080", "the NVIDIA driver knows CUDA 11.8", NEWER),
        ("version", "9020", "the NVIDIA driver knows CUDA 9.2", NEWER),
        ("cuInit", "3", &start("3"), "not before a fork"),
        ("cuInit", "34", &start("34"), "folder of stubs"),
        ("cuInit", "304", &start("304"), "/dev/nvidia*"),
        ("cuInit", "802", &start("802"), "nvidia-fabricmanager"),
        ("cuInit", "803", &start("803"), "restart the machine"),
        ("cuInit", "804", &start("804"), "cuda-compat"),
        ("cuInit", "805", &start("805"), "MPS"),
        ("cuInit", "999", &start("999 (CUDA_ERROR_999)"), "nvidia_uvm"),
        // Answers that the binding does not know.
        ("cuInit", "226", &start("226 (CUDA_ERROR_226)"), "the system's log"),
        ("cuInit", "4711", "starting the NVIDIA driver: CUDA error 4711", "the system's log"),
        ("devices", "0", "the driver shows no GPU; check that nvidia-smi lists one", "--gpus all"),
        ("cuInit", "100", "the driver shows no GPU; check that nvidia-smi lists one", "--gpus all"),
        (
            HIDE,
            "",
            "the driver shows no GPU, with CUDA_VISIBLE_DEVICES=\"\"",
            "unset CUDA_VISIBLE_DEVICES",
        ),
        (
            HIDE,
            "7",
            "the driver shows no GPU, with CUDA_VISIBLE_DEVICES=\"7\"",
            "unset CUDA_VISIBLE_DEVICES",
        ),
        ("capability", "75", "Stand-in 0 has compute capability 7.5", ampere),
        (retain, "2", &format!("{open}2"), memory),
        (retain, "46", &format!("{open}46"), "compute mode"),
        (retain, "214", &format!("{open}214"), "reset the GPU"),
        (module, "209", &format!("{load}209"), ampere),
        (module, "221", &format!("{load}221"), "libnvidia-ptxjitcompiler"),
        (module, "222", &format!("{load}222"), NEWER),
        (module, "223", &format!("{load}223"), "unset CUDA_DISABLE_PTX_JIT"),
    ];
    for (name, answer, problem, remedy) in rows {
        let answers = [("devices", if name == HIDE { "0" } else { "1" }), (name, answer)];
        driver.refuses(&answers, &[problem, remedy]);
    }
    assert_eq!(driver.doctor(&[("version", "12000")])["status"], "ok");
    // The stub of the CUDA toolkit has no words either.
    let stub = [("cuDriverGetVersion", "34"), ("cuGetErrorString", "34"), ("cuGetErrorName", "34")];
    driver.refuses(&stub, &["asking for the driver's version: CUDA error 34", "folder of stubs"]);
}

#[test]
fn a_gpu_that_works_is_named() {
    let Some(driver) = Driver::compile() else { return };
    let found = driver.doctor(&[("devices", "2"), ("version", "13010")]);
    let gpu = |at| format!("Stand-in {at}, 1.07 GB, driver of CUDA 13.1");
    assert_eq!(found["text"], format!("{}; {}; the kernels load", gpu(0), gpu(1)));
    assert_eq!(
        (&found["status"], found["value"]["devices"].as_array().unwrap().len()),
        (&"ok".into(), 2)
    );
    // If the driver refuses the machine code, it gets PTX.
    let hopper = [("capability", "90"), ("machine_code", "209")];
    assert_eq!(driver.doctor(&hopper)["status"], "ok");
    driver.refuses(&[hopper[0], ("cuModuleLoadData", "209")], &["loading the kernels"]);
}

#[test]
fn a_failure_of_any_function_is_told_in_one_line() {
    let Some(driver) = Driver::compile() else { return };
    // It is stored as it is and copied on the GPU, which the stand-in can.
    let file = safetensors(&driver.folder, Dtype::F32, &[7; 8192]);
    let output = driver.bench(&[], &file);
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), ""), "{output:?}");
    functions().into_par_iter().for_each(|function| {
        let output = driver.bench(&[(function, "700")], &file);
        if output.status.success() {
            // These are optional: free memory is queried only if memory does not suffice, occupancy
            // only when a kernel is launched for compressed tensors, and rows are copied only if
            // columns are wanted. The command multiplies nothing.
            let minor = [
                "LaunchKernel",
                "ModuleGetGlobal",
                "TensorMap",
                "Occupancy",
                "GetInfo",
                "Memcpy2D",
                "Error",
                "Free",
                "Destroy",
                "Unload",
                "Unregister",
                "Release",
            ];
            assert!(minor.iter().any(|part| function.contains(part)), "{function}: {output:?}");
            assert_eq!(text(&output.stderr), "", "{function}");
        } else {
            let line = refusal(&output);
            let answer = ": words for 700 (CUDA_ERROR_700); some kernel of this process failed";
            assert!(line.contains(answer), "{function}: {line}");
        }
    });
}

#[test]
fn a_model_that_does_not_fit_is_refused() {
    let Some(driver) = Driver::compile() else { return };
    let file = safetensors(&driver.folder, Dtype::F32, &[7; 8192]);
    let line = refusal(&driver.bench(&[("memory", "5000")], &file));
    assert!(
        line.contains("the model needs ") && line.contains("Stand-in 0 has 5000 free; free memory"),
        "{line}"
    );
}

#[test]
fn a_gpu_that_decodes_something_else_is_found_out() {
    let Some(driver) = Driver::compile() else { return };
    // Large enough to be coded; the stand-in runs no kernels.
    let file = safetensors(&driver.folder, Dtype::BF16, &[0x11, 0x3C].repeat(1 << 16));
    let output = driver.bench(&[], &file);
    let line = text(&output.stderr);
    assert_eq!((output.status.code(), line.lines().count()), (Some(1), 1), "{line}");
    assert!(line.contains("differs from the CPU's decoding; please report"), "{line}");
}

/// The container of a file.
fn compressed(driver: &Driver, file: &Path) -> String {
    let container = file.with_extension("df11");
    let [from, to] = [file, &container].map(|path| path.to_str().unwrap());
    assert!(driver.run(&[], &["compress", from, "-o", to, "-q"]).status.success());
    to.to_owned()
}

const ON_GPU: [&str; 3] = ["--device", "gpu", "--json"];

#[test]
fn what_a_gpu_copies_is_verified() {
    let Some(driver) = Driver::compile() else { return };
    // Some pieces long.
    let bytes: Vec<u8> = (0..3_000_000u32).flat_map(|at| (at % 65_521).to_le_bytes()).collect();
    let file = safetensors(&driver.folder, Dtype::U32, &bytes);
    let container = compressed(&driver, &file);
    let arguments = [&["verify", &container][..], &ON_GPU, &["--threads", "5"]].concat();
    let output = driver.run(&[("devices", "2")], &arguments);
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), ""));
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&said["device"]["name"], &said["device"]["ordinal"]),
        (&"Stand-in 0".into(), &0.into())
    );
    let output = driver.run(&[("devices", "2")], &["verify", &container, "--device", "1"]);
    assert!(
        text(&output.stdout).trim_end().ends_with("  device     Stand-in 1, GPU 1"),
        "{output:?}"
    );
    let line = refusal(
        &driver.run(&[("memory", "5000")], &[&["verify", &container], &ON_GPU[..]].concat()),
    );
    assert!(
        line.contains("takes ") && line.contains("Stand-in 0 has 5000 free; free memory"),
        "{line}"
    );
}

#[test]
fn what_a_gpu_makes_up_is_noticed() {
    let Some(driver) = Driver::compile() else { return };
    // Large enough to be coded; the stand-in runs no kernels.
    let container = compressed(
        &driver,
        &safetensors(&driver.folder, Dtype::BF16, &[0x11, 0x3C].repeat(1 << 16)),
    );
    let output = driver.run(&[], &[&["verify", &container], &ON_GPU[..]].concat());
    let line = text(&output.stderr);
    assert_eq!((output.status.code(), line.lines().count()), (Some(1), 1), "{line}");
    assert!(line.contains("do not have the hash"), "{line}");
}

#[test]
fn a_failure_while_a_gpu_verifies_is_no_success() {
    let Some(driver) = Driver::compile() else { return };
    let container = compressed(&driver, &safetensors(&driver.folder, Dtype::F32, &[7; 8192]));
    let arguments = [&["verify", &container], &ON_GPU[..]].concat();
    let is_refused = |function: &&str| {
        let output = driver.run(&[(*function, "700")], &arguments);
        if output.status.success() {
            let said: Value = serde_json::from_slice(&output.stdout).unwrap();
            assert_eq!(said["device"]["kind"], "gpu", "{function}");
        } else {
            assert!(refusal(&output).contains(": words for 700 (CUDA_ERROR_700); "), "{function}");
        }
        !output.status.success()
    };
    let refused = functions().into_par_iter().filter(is_refused).count();
    assert!(refused > 20, "{refused}");
}

#[test]
fn the_cpu_decodes_where_a_gpu_cannot_and_one_line_says_why() {
    let Some(driver) = Driver::compile() else { return };
    for (answer, part) in
        [(("cuInit", "999"), "starting the NVIDIA driver"), (("memory", "1000000"), "1000000 free")]
    {
        let output = driver.run(&[answer], &["demo"]);
        let line = text(&output.stderr);
        assert_eq!((output.status.code(), line.lines().count()), (Some(0), 1), "{line}");
        assert!(line.starts_with("df11: the CPU decodes: GPU: ") && line.contains("; "), "{line}");
        assert!(line.contains(part), "{line}");
        assert!(text(&output.stdout).contains("decoded by CPU"), "{output:?}");
    }
    for driver in [&driver, &Driver::missing()] {
        let output = driver.run(&[("cuInit", "999")], &["demo", "--json"]);
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), ""));
        let said: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(said["device"]["reason"].as_str().unwrap().contains("driver"), "{said}");
    }
    assert_eq!(text(&Driver::missing().run(&[], &["demo"]).stderr), "", "nobody expects a GPU");
}
