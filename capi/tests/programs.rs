//! Programs in C and C++: compiled, run, and run under valgrind.
//!
//! Each says SKIPPED on the standard error where a tool is missing; with `DF11_REQUIRE_CC`,
//! `DF11_REQUIRE_VALGRIND` or `DF11_REQUIRE_GPU` set that is a failure.
#![cfg(target_os = "linux")]

#[path = "../../tests/support/driver.rs"]
mod stand_in;

use std::{
    fmt::Write as _,
    io::{ErrorKind, Write as _},
    path::{Path, PathBuf},
    process::{Command, Output},
};

use df11::{
    CompressOptions, Layout, Source,
    hazmat::{Tiles, demo},
};
use tempfile::TempDir;

/// A matrix has so many columns that a product needs a workspace.
const SHAPE: demo::Shape =
    demo::Shape { layers: 2, hidden: 128, key_value: 32, intermediate: 2048, vocabulary: 256 };
const MATRIX: &str = "model.layers.1.mlp.down_proj.weight";

/// Says that a test is skipped, unless a variable forbids it.
fn skip(variable: &str, what: &str) {
    assert!(std::env::var_os(variable).is_none(), "{what}");
    // The harness hides what eprintln writes.
    std::io::stderr().write_all(format!("SKIPPED: {what}\n").as_bytes()).unwrap();
}

/// A folder for a program, with the containers that it reads.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        let place = Self(stand_in::folder());
        place.compress("tile.df11", Layout::Tile, SHAPE);
        place.compress("gap.df11", Layout::gap(), demo::TINY);
        place
    }

    fn compress(&self, name: &str, layout: Layout, shape: demo::Shape) {
        let checkpoint = demo::checkpoint(self.0.path(), shape, 11).unwrap();
        let options = CompressOptions::new().layout(layout);
        let source = Source::open(&checkpoint).unwrap();
        df11::compress(&source, &self.path(name), &options, &()).unwrap();
    }

    /// BF16 that was FP8: the four lowest bits of its weights are zero.
    fn compress_narrow(&self) {
        let checkpoint = demo::checkpoint(self.0.path(), SHAPE, 11).unwrap();
        for entry in std::fs::read_dir(&checkpoint).unwrap() {
            let file = entry.unwrap().path();
            if file.extension().is_none_or(|end| end != "safetensors") {
                continue;
            }
            let mut bytes = std::fs::read(&file).unwrap();
            let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            bytes[header..].iter_mut().step_by(2).for_each(|low| *low &= 0xF0);
            std::fs::write(&file, bytes).unwrap();
        }
        let (source, out) = (Source::open(&checkpoint).unwrap(), self.path("narrow.df11"));
        df11::compress(&source, &out, &CompressOptions::new(), &()).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A program of the folder beside, compiled with all warnings. None where there is no compiler.
    fn compile(&self, source: &str) -> Option<PathBuf> {
        let programs = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs");
        self.compile_file(&programs.join(source))
    }

    fn compile_file(&self, file: &Path) -> Option<PathBuf> {
        let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
        // Cargo puts the library beside this test.
        let libraries = std::env::current_exe().unwrap().parent().unwrap().to_owned();
        let source = file.file_name().unwrap().to_str().unwrap();
        let program = self.path(&source.replace('.', "_"));
        let is_cpp = file.extension().is_some_and(|end| end == "cpp");
        let (compiler, standard) = if is_cpp { ("c++", "-std=c++17") } else { ("cc", "-std=c11") };
        let mut command = Command::new(compiler);
        command.args(["-g", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]).arg(standard);
        command.args(["-D_GNU_SOURCE", "-pthread"]).arg("-I").arg(crate_folder.join("include"));
        command.arg(file).arg("-o").arg(&program);
        command.arg("-L").arg(&libraries).args(["-ldf11_capi", "-ldl", "-lm"]);
        match command.arg(format!("-Wl,-rpath,{}", libraries.display())).output() {
            Ok(output) => {
                let told = String::from_utf8_lossy(&output.stderr);
                assert!(output.status.success(), "{source}: {told}");
                Some(program)
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                skip("DF11_REQUIRE_CC", "no C compiler");
                None
            }
            Err(error) => panic!("{compiler}: {error}"),
        }
    }
}

/// Runs a command that succeeds; what it printed.
fn run(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&stderr);
    assert!(status.success(), "{command:?}: {status}, {stderr}");
    assert!(!stderr.contains("panicked"), "{command:?}: {stderr}");
    String::from_utf8(stdout).unwrap()
}

/// Runs a program as [`run`] does, under valgrind, which fails at the first byte that is read or
/// written where none is, and at memory that nobody freed. `None` where valgrind is missing.
fn run_checked(program: &Path, arguments: &[&Path]) -> Option<String> {
    let mut command = Command::new("valgrind");
    command.args(["--quiet", "--error-exitcode=99", "--leak-check=full"]);
    command.args(["--show-leak-kinds=definite", "--errors-for-leak-kinds=definite", "--"]);
    command.arg(program).args(arguments);
    command.env("RAYON_NUM_THREADS", "2");
    if Command::new("valgrind").arg("--version").output().is_err() {
        skip("DF11_REQUIRE_VALGRIND", "no valgrind");
        return None;
    }
    Some(run(&mut command))
}

fn fnv(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// The text that the program prints of a model, from the library's own answers.
fn listed(path: &Path) -> String {
    let model = df11::open(path).unwrap();
    let names: Vec<_> = model.tensors().map(|tensor| tensor.name().to_owned()).collect();
    model.tensors().enumerate().fold(String::new(), |mut text, (at, tensor)| {
        let (rows, columns) = Tiles::of(&tensor).unwrap().map_or((0, 0), |tiles| tiles.shape());
        let shape: Vec<_> = tensor.shape().iter().map(u64::to_string).collect();
        let target = names.iter().position(|name| name == tensor.target().name()).unwrap();
        let bytes = tensor.decode::<u8>().unwrap();
        writeln!(
            text,
            "{at} {} {} {} {} [{}] {} of {} bytes, as {target}, {rows}x{columns}, {:016x}",
            tensor.name(),
            tensor.block_name(),
            tensor.dtype().unwrap().name(),
            tensor.encoding().name(),
            shape.join(","),
            tensor.stored_bytes(),
            bytes.len(),
            fnv(&bytes),
        )
        .unwrap();
        text
    })
}

#[test]
fn a_program_in_c_lists_and_decodes_and_leaves_no_memory() {
    let place = Place::new();
    let Some(program) = place.compile("list.c") else { return };
    for name in ["tile.df11", "gap.df11"] {
        let path = place.path(name);
        let text = run(Command::new(&program).arg(&path));
        assert_eq!(text, listed(&path));
        let has = |word| text.contains(word);
        assert!(has(" alias ") && has(" raw ") && has(" F32 "), "{text}");
        if let Some(checked) = (name == "tile.df11").then(|| run_checked(&program, &[&path])) {
            assert!(checked.is_none_or(|checked| checked == text));
        }
    }
}

/// Its first piece of code is a program, the others are parts of a function.
#[test]
fn the_code_of_the_page_runs() {
    let page = include_str!("../../docs/c.md");
    let mut pieces = page.split("```c\n").skip(1).map(|piece| piece.split_once("```").unwrap().0);
    let (first, place) = (pieces.next().unwrap().to_owned(), Place::new());
    let parts: Vec<_> = pieces.collect();
    assert!(!parts.is_empty(), "code for GPUs");
    let function = "void part(df11_model *model, df11_tensor tensor, void *memory, void *output, \
                    void *stream, void *x, void *y, void *workspace) {";
    std::fs::write(place.path("page.c"), format!("{first}{function}{}}}", parts.concat())).unwrap();
    let Some(program) = place.compile_file(&place.path("page.c")) else { return };
    let text = run(Command::new(&program).arg(place.path("tile.df11")));
    assert!(text.contains(&format!("{MATRIX} BF16 524288\n")), "{text}");
    for (arguments, end) in [(vec![], "name a container\n"), (vec!["absent"], "; check the path\n")]
    {
        let output = Command::new(&program).args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert!(String::from_utf8_lossy(&output.stderr).ends_with(end), "{output:?}");
    }
}

/// In a folder that is a checkout with the library built, as far as the page's commands see.
#[test]
fn the_commands_of_the_documentation_run_as_typed() {
    let page = include_str!("../../docs/c.md");
    let block = |language: &str| {
        page.split_once(&format!("```{language}\n")).unwrap().1.split_once("```").unwrap().0
    };
    let (build, commands) = block("sh").split_once('\n').unwrap();
    assert!(build.starts_with("cargo build --release -p df11-capi "), "{build}");
    let place = Place::new();
    std::fs::write(place.path("program.c"), block("c")).unwrap();
    std::fs::create_dir(place.path("target")).unwrap();
    let libraries = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let link = |to: &Path, name: &str| std::os::unix::fs::symlink(to, place.path(name)).unwrap();
    link(&libraries, "target/release");
    link(Path::new(env!("CARGO_MANIFEST_DIR")), "capi");
    std::fs::rename(place.path("tile.df11"), place.path("Llama-3.1-8B.df11")).unwrap();
    if Command::new("cc").arg("--version").output().is_err() {
        return skip("DF11_REQUIRE_CC", "no C compiler");
    }
    let mut shell = Command::new("sh");
    shell.args(["-e", "-c", commands]).current_dir(place.path("")).env_remove("LD_LIBRARY_PATH");
    let text = run(&mut shell);
    assert!(text.contains(&format!("{MATRIX} BF16 524288\n")), "{text}");
}

#[test]
fn a_program_in_cpp_decodes_rows_on_threads() {
    let place = Place::new();
    let Some(program) = place.compile("rows.cpp") else { return };
    for name in ["tile.df11", "gap.df11"] {
        run(Command::new(&program).arg(place.path(name)).arg(MATRIX));
    }
}

#[test]
fn a_forked_process_decodes_too() {
    let place = Place::new();
    let Some(program) = place.compile("fork.c") else { return };
    // Several portions, so that several threads decode.
    let shape = demo::Shape { hidden: 512, ..SHAPE };
    place.compress("large-tile.df11", Layout::Tile, shape);
    place.compress("large-gap.df11", Layout::gap(), shape);
    for name in ["gap.df11", "large-tile.df11", "large-gap.df11"] {
        run(Command::new(&program).arg(place.path(name)));
    }
}

#[test]
fn hostile_calls_and_damaged_files_are_refused() {
    let place = Place::new();
    let Some(program) = place.compile("hostile.c") else { return };
    // A driver that cannot be loaded, even if the machine has one.
    let none = stand_in::folder();
    for name in stand_in::LIBRARY_NAMES {
        std::fs::write(none.path().join(name), "no library").unwrap();
    }
    let scratch = place.path("damaged");
    let mut command = Command::new(&program);
    command.arg(place.path("tile.df11")).args([MATRIX]).arg(&scratch);
    run(command.env("LD_LIBRARY_PATH", none.path()));
    let path = place.path("gap.df11");
    run_checked(&program, &[&path, Path::new(MATRIX), &scratch.with_extension("checked")]);
}

#[test]
fn hostile_calls_of_the_gpu_are_refused() {
    let place = Place::new();
    let (Some(program), Some(driver)) = (place.compile("hostile.c"), stand_in::compile()) else {
        return;
    };
    let mut command = Command::new(program);
    command.arg(place.path("tile.df11")).arg(MATRIX).arg(place.path("damaged")).arg("gpu");
    stand_in::answer(&mut command, driver.path(), &[]);
    run(&mut command);
}

/// Compiled everywhere, run where there is a GPU.
#[test]
fn a_program_in_c_loads_decodes_and_multiplies_on_the_gpu() {
    let place = Place::new();
    let Some(program) = place.compile("gpu.c") else { return };
    if !df11::gpu::has_driver() {
        return skip("DF11_REQUIRE_GPU", "no GPU");
    }
    place.compress_narrow();
    for (name, part) in [
        ("tile.df11", " 12 of them multiplied by, 12 as stored"),
        ("narrow.df11", " 12 of them multiplied by, 0 as stored"),
        ("gap.df11", " 0 of them multiplied by, 0 as stored"),
    ] {
        let text = run(Command::new(&program).arg(place.path(name)));
        assert!(text.contains(part), "{text}");
    }
}
